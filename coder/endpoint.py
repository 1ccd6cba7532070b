"""Endpoint: one server's address, its key and its connections, through the openai client.

The client makes the connection, the credentials and the request. Its own retries are off, and redirects are not followed:
they would carry the conversation to another host. A proxy of the environment is used for https only, where it sees nothing.
What happens before an answer comes is turned into ModelError here.

What it leaves out: what is sent (profile.py), reading the answer (ai.py), ending a request from outside (connection.py).
"""

from __future__ import annotations

import gc
import json
import os
import socket
import ssl
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl

from coder.abort import Abort
from coder.address import shown_url
from coder.connection import Line
from coder.errors import classify
from coder.types import Event, ModelError

CONNECT_TIMEOUT = 10.0  # seconds
MAX_ERROR = 1_000_000  # bytes of an error's body that are read
OUR_HEADERS = {"host", "accept", "accept-encoding", "authorization", "connection", "content-length", "content-type", "user-agent"}


class Endpoint:
    """Where requests go. `base_url` None is the client's default, and then a missing key is taken from OPENAI_API_KEY;
    an address given here never gets a key that was not given with it. `key_header`: a header that carries the key, too."""

    def __init__(self, base_url: str | None, api_key: str | None, headers: Mapping[str, str], key_header: str = "",
                 path: str = "/chat/completions") -> None:
        self.base_url, self.api_key, self.key_header, self.path = base_url, api_key, key_header, path
        self.headers = {name.lower(): value for name, value in headers.items()}
        self.address = base_url or os.environ.get("OPENAI_BASE_URL") or None  # where the client goes
        self._idle: list[Channel] = []
        self._tls: ssl.SSLContext | None = None

    def exchange(self, data: bytes, api_key: str | None, abort: Abort, seconds: float,
                 read: Callable[[Any, Line], Iterator[Event]]) -> Generator[Event, None, ModelError | None]:
        """One request: send `data`, yield what `read` makes of the answer; return the failure, if there was one.

        `seconds` may pass until the first data; `read` sets the line's later limits. Raises Aborted.
        """
        abort.check()
        failure: ModelError | None = None
        with self._channel() as channel:
            with Line(channel.stream, seconds) as line, abort.calling(line.cut):
                try:
                    with well_formed():
                        response = line.open(lambda: channel.send(data, api_key, line), abort)
                        with channel.reading(response):
                            yield from read(response, line)
                except ModelError as error:
                    failure = error
            channel.spoiled = line.is_cut  # and may still be in use by the thread that was left
            abort.check()
        if line.fired:
            failure = ModelError("network", f"no data for {line.seconds:g} s", retryable=True)
        return failure

    @contextmanager
    def _channel(self) -> Iterator[Channel]:
        """A channel for one request: one that is idle, or a new one. One whose request was left in the middle is given up."""
        try:
            channel = self._idle.pop()
        except IndexError:  # no question first: other threads take channels, too
            channel = Channel(self)
        whole = False
        try:
            yield channel
            whole = not channel.spoiled
        finally:
            if whole:
                self._idle.append(channel)
            else:
                channel.close()

    def key_for(self, api_key: str | None) -> str:
        """The key of a request. Raises ModelError where no header can carry it; it is not shown."""
        key = (api_key or self.api_key or (None if self.base_url else os.environ.get("OPENAI_API_KEY")) or "none").strip()  # R29
        if not (key.isascii() and key.isprintable()):
            raise ModelError("auth", "the key holds characters that no header can carry: copy it again")
        return key

    def tls(self) -> ssl.SSLContext:
        """Loading the authorities takes 50 ms; without any, a connection that does use TLS fails, and is not trusted."""
        if self._tls is None:
            plain = (self.address or "").startswith("http://")
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if plain else ssl.create_default_context()
        return self._tls

    def headers_for(self, key: str) -> dict[str, str]:
        """Those that we set whatever the client found in the environment, which may belong to another server."""
        ours = {"authorization": self.headers.get("authorization") or f"Bearer {key}"} if self.base_url else {}
        return ours | ({self.key_header: key} if self.key_header else {})


def load() -> Any:
    """The openai package, which is slow to import: at the first need, and without the garbage collector, which takes an eighth
    of that time and finds nothing."""
    collects = gc.isenabled() and "openai" not in sys.modules
    if collects:
        gc.disable()
    try:
        import openai  # waits where another thread is at it

        return openai
    finally:
        if collects:
            gc.enable()


class Channel:
    """A client with one connection, used by one request at a time: so it is known which connection that request has."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.stream: Any = None  # the network stream of the connection
        self.spoiled = False  # its request was cut
        self._sending = False
        self._line: Line | None = None  # of the request under way
        self._key = ""
        self._client: Any = None

    def send(self, data: bytes, api_key: str | None, line: Line) -> Any:
        """Send a request's body; the response with its headers read. Raises ModelError."""
        openai = load()
        import httpx2  # the openai client's own HTTP library

        self._line, self._key = line, self.endpoint.key_for(api_key)
        self._sending = True
        try:
            client = self._connected(openai)
            if client.api_key != self._key:
                client = client.with_options(api_key=self._key)
            return client.post(self.endpoint.path, content=data, cast_to=object, stream=True,
                               stream_cls=openai.Stream[object]).response
        except openai.APIConnectionError as error:
            if isinstance(error.__cause__, ModelError):
                raise error.__cause__ from None  # of _refused
            raise self._network_error(error.__cause__ or error) from error
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise self._network_error(error) from error
        finally:
            self._sending = False

    def close(self) -> None:
        """Give the connection up; one that a thread still waits on goes with the thread."""
        if self._client is not None and not self._sending:
            self._client.close()

    @contextmanager
    def reading(self, response: Any) -> Iterator[None]:
        """Turn what the HTTP library raises while a body is read into ModelError; close the response on every way out."""
        import httpx2  # the openai client's own HTTP library

        try:
            yield
        except httpx2.HTTPError as error:
            raise self._network_error(error) from error
        finally:
            response.close()

    def _connected(self, openai: Any) -> Any:
        """The client, made at the first request."""
        if self._client is not None:
            return self._client
        endpoint = self.endpoint
        address, _, query = (endpoint.base_url or "").partition("?")
        transport = openai.DefaultHttpxClient(
            follow_redirects=False, verify=endpoint.tls(), event_hooks={"request": [self._prepared], "response": [self._refused]},
            trust_env=(endpoint.address or "https").lower().startswith("https"))  # over http a proxy would read the key
        self._client = openai.OpenAI(
            base_url=address or None, api_key=self._key, max_retries=0, http_client=transport,  # H12
            timeout=openai.Timeout(None, connect=CONNECT_TIMEOUT),  # reading is timed by the line
            default_query=dict(parse_qsl(query)),  # Azure's older addresses end in ?api-version=
            default_headers={"Accept-Encoding": "identity", **endpoint.headers})  # S14
        return self._client

    def _prepared(self, request: Any) -> None:
        """See which connection the request gets, and that nothing goes out that is not meant to."""
        line = self._line
        assert line

        def seen(event: str, info: dict[str, Any]) -> None:
            if event.endswith(("connect_tcp.complete", "start_tls.complete")):
                self.stream = info["return_value"]
                line.connected(self.stream)

        request.extensions["trace"] = seen
        if self.endpoint.base_url:  # the client adds what it finds in the environment
            for name in set(request.headers) - OUR_HEADERS - self.endpoint.headers.keys():
                del request.headers[name]
        request.headers.update(self.endpoint.headers_for(self._key))

    def _refused(self, response: Any) -> None:
        """Raise ModelError for an answer with an error's status. The body is read here, to its end or MAX_ERROR: what it
        holds is of no known size, encoding or sense, and may break off."""
        if response.status_code < 300:
            return
        if response.status_code < 400:
            target = shown_url(response.headers.get("location", ""))
            raise ModelError("protocol", f"{shown_url(str(response.url))} redirects to {target}, which is not followed",
                             status=response.status_code)
        body = b"".join(_some(response))
        try:
            said = json.loads(body)
        except (ValueError, RecursionError):
            said = body.decode("utf-8", "replace")
        error = classify(response.status_code, said, response.headers)
        error.body = body
        raise error

    def _network_error(self, cause: BaseException) -> ModelError:
        """What the HTTP library raised, in our terms."""
        url, causes = shown_url(self.endpoint.address or ""), list(_causes(cause))
        kinds = {type(each).__name__ for each in causes}
        if kinds & {"UnsupportedProtocol", "InvalidURL"}:
            return ModelError("protocol", f"{url!r} is no base URL: it has to begin with http:// or https://")
        if "LocalProtocolError" in kinds:  # its text holds the header, and that may be a key
            return ModelError("protocol", "a header of the request holds what cannot be sent")
        if any(isinstance(each, ConnectionRefusedError) or "refused" in str(each).lower() for each in causes):
            return ModelError("network", f"nothing answers at {url}", retryable=True)
        if any(isinstance(each, socket.gaierror) for each in causes):
            return ModelError("network", f"the host of {url} is not known: {causes[-1]}", retryable=True)
        return ModelError("network", str(cause) or type(cause).__name__, retryable=True)


# What reading an answer raises whose members are not of the kind that the API says.
MALFORMED = (AttributeError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError, AssertionError)


@contextmanager
def well_formed() -> Iterator[None]:
    """Inside, an answer is read. Raises ModelError where it is malformed: no server may break a run."""
    try:
        yield
    except MALFORMED as error:
        said = f"the answer is malformed ({type(error).__name__}: {error})"[:200]
        raise ModelError("protocol", said, retryable=True) from error


def _some(response: Any) -> Iterator[bytes]:
    """The beginning of a body; what cannot be read or decoded of it is left out."""
    import httpx2

    left = MAX_ERROR
    try:
        for chunk in response.iter_bytes():
            yield chunk[:left]
            left -= len(chunk)
            if left <= 0:
                break
    except httpx2.HTTPError:
        pass
    finally:
        response.close()


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it came from, down to the system's."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
