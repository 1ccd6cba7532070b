"""Endpoint: one server's address, its key and its connections, through the openai client.

The client makes the connection, the credentials and the request. Its own retries are off, and redirects are not followed:
they would carry the conversation to another host. A proxy of the environment is used for https only, where it sees nothing.
What the network does, before an answer and within one, is turned into ModelError here.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import socket
import ssl
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from urllib.parse import parse_qsl, urljoin, urlsplit

from coder.abort import Abort
from coder.events import Event
from coder.providers.address import proxy_of, shown_url
from coder.providers.connection import Line
from coder.providers.errors import ADVICE, classify
from coder.types import ModelError

DEFAULT = "https://api.openai.com/v1"  # the client's
CONNECT_TIMEOUT = 10.0  # seconds
SECOND_TRY = 0.5  # seconds before it, where nothing answers at an address that has not answered yet
STALE = 1.0  # seconds behind a request in which a connection that the server had closed shows it
MAX_ERROR = 1_000_000  # bytes of an error's body that are read
OUR_HEADERS = {
    "host",
    "accept",
    "accept-encoding",
    "authorization",
    "connection",
    "content-length",
    "content-type",
    "user-agent",
}
ANSWERED: set[str] = set()  # addresses that did, in this process


class Unreachable(ModelError):
    """There is no connection to the server, or to the proxy before it."""


class Endpoint:
    """Where requests go. `base_url` None is the client's default, and then a missing key is taken from OPENAI_API_KEY;
    an address given here never gets a key that was not given with it. `key_header`: a header that carries the key, too."""

    def __init__(
        self,
        base_url: str | None,
        api_key: str | None,
        headers: Mapping[str, str],
        key_header: str = "",
        path: str = "/chat/completions",
    ) -> None:
        self.base_url, self.api_key, self.key_header, self.path = (
            base_url,
            api_key,
            key_header,
            path,
        )
        self.headers = {name.lower(): value for name, value in headers.items()}
        # Where the client goes
        self.address = _base_of(base_url or os.environ.get("OPENAI_BASE_URL") or "", path) or None
        self.url = self.address or DEFAULT
        self._idle: list[Channel] = []
        self._tls: ssl.SSLContext | None = None

    def exchange(
        self,
        data: bytes,
        api_key: str | None,
        abort: Abort,
        seconds: float,
        read: Callable[[Any, Line], Iterator[Event]],
    ) -> Generator[Event, None, ModelError | None]:
        """One request: send `data`, yield what `read` makes of the answer; return the failure, if there was one.

        `seconds` may pass until the first data; `read` sets the line's later limits. Raises Aborted.
        """
        failure = yield from self._exchanged(data, api_key, abort, seconds, read)
        if isinstance(failure, Unreachable) and self.url not in ANSWERED:
            abort.wait(SECOND_TRY)
            failure = yield from self._exchanged(data, api_key, abort, seconds, read)
            if isinstance(failure, Unreachable):
                failure.retryable = (
                    False  # an address that is wrong, mostly, or a server that does not run
                )
        return failure

    def _exchanged(
        self,
        data: bytes,
        api_key: str | None,
        abort: Abort,
        seconds: float,
        read: Callable[[Any, Line], Iterator[Event]],
    ) -> Generator[Event, None, ModelError | None]:
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
        key = (
            api_key
            or self.api_key
            or (None if self.base_url else os.environ.get("OPENAI_API_KEY"))
            or "none"
        ).strip()  # R29
        if not (key.isascii() and key.isprintable()):
            raise ModelError(
                "auth", "the key holds characters that no header can carry: copy it again"
            )
        return key

    def tls(self) -> ssl.SSLContext:
        """The authorities that the client itself would trust; loading them takes 50 ms. Without any, a connection that does
        use TLS fails, and is not trusted. Raises ModelError where the environment names some that cannot be loaded."""
        if self._tls is None:
            import httpx2  # the openai client's own HTTP library

            plain = self.url.lower().startswith("http://")
            try:
                self._tls = (
                    ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                    if plain
                    else httpx2.create_ssl_context()
                )
            except OSError as error:
                name = next(
                    (name for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if os.environ.get(name)), ""
                )
                said = (
                    f"{name} is {os.environ.get(name, '')}"
                    if name
                    else "the authorities of this system"
                )
                raise ModelError(
                    "protocol",
                    f"{said}, and cannot be loaded: {error.strerror or error}",
                    advice=OWN_CA,
                ) from error
        return self._tls

    def proxy(self) -> str | None:
        """The address of the proxy to take. Raises ModelError where there is one that cannot be taken."""
        address, name = proxy_of(self.url)
        kind = address.partition("://")[0].lower()
        if kind not in ("", "http", "https", "socks5", "socks5h"):
            raise ModelError(
                "protocol",
                f"{name} is {shown_url(address)}, and has to begin with http://, https:// or socks5://",
                advice=PAST_PROXY,
            )
        if kind.startswith("socks") and not find_spec("socksio"):
            raise ModelError(
                "protocol",
                f"{name} names a SOCKS proxy, which needs an extra: pip install 'coder-agent[socks]'",
                advice=PAST_PROXY,
            )
        return address or None

    @property
    def shown(self) -> str:
        """What a connection leads to: the server, or the proxy before it."""
        address, name = proxy_of(self.url)
        return f"the proxy {shown_url(address)} ({name})" if address else shown_url(self.url)

    def headers_for(self, key: str) -> dict[str, str]:
        """Those that we set whatever the client found in the environment, which may belong to another server."""
        ours = (
            {"authorization": self.headers.get("authorization") or f"Bearer {key}"}
            if self.base_url
            else {}
        )
        return ours | ({self.key_header: key} if self.key_header else {})


def _base_of(url: str, path: str) -> str:
    """A base URL, where the address of the call itself was pasted, too."""
    place, mark, query = url.partition("?")
    return (
        place.rstrip("/").removesuffix(path) + mark + query
        if place.rstrip("/").endswith(path)
        else url
    )


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
        self._reused = False  # the request got a connection that was there
        self._sent = 0.0  # when the request was out (monotonic seconds)
        self._heard = False  # a byte came since
        self._line: Line | None = None  # of the request under way
        self._key = ""
        self._client: Any = None

    def send(self, data: bytes, api_key: str | None, line: Line) -> Any:
        """Send a request's body; the response with its headers read. Raises ModelError."""
        import httpx2  # the openai client's own HTTP library

        self._line, self._key = line, self.endpoint.key_for(api_key)
        self._sending = True
        try:
            outcome = self._posted(data)
            closed = isinstance(outcome, httpx2.NetworkError | httpx2.RemoteProtocolError)
            # The server had closed the connection before the request came: it cannot have begun to work on it.
            stale = self._reused and not self._heard and time.monotonic() - self._sent < STALE
            if closed and stale and not line.is_cut:
                outcome = self._posted(data)
        finally:
            self._sending = False
        if isinstance(outcome, ModelError):
            raise outcome from None  # of _refused
        if isinstance(outcome, Exception):
            raise self._network_error(outcome) from outcome
        return outcome

    def _posted(self, data: bytes) -> Any:
        """The response, or what was raised instead."""
        openai = load()
        import httpx2

        try:
            client = self._connected(openai)
            if client.api_key != self._key:
                client = client.with_options(api_key=self._key)
            return client.post(
                self.endpoint.path,
                content=data,
                cast_to=object,
                stream=True,
                stream_cls=openai.Stream[object],
            ).response
        except openai.APIConnectionError as error:
            return error.__cause__ or error
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            return error

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
        except httpx2.DecodingError as error:
            raise ModelError(
                "protocol", f"the answer cannot be decoded: {error}", retryable=True
            ) from error
        except httpx2.HTTPError as error:
            raise ModelError(
                "network",
                "the connection broke in the middle of the answer",
                retryable=True,
                advice=ADVICE["incomplete"],
            ) from error
        finally:
            response.close()

    def _connected(self, openai: Any) -> Any:
        """The client, made at the first request."""
        if self._client is not None:
            return self._client
        endpoint = self.endpoint
        address, _, query = (endpoint.address or "").partition("?")
        transport = openai.DefaultHttpxClient(
            follow_redirects=False,
            verify=endpoint.tls(),
            event_hooks={"request": [self._prepared], "response": [self._refused]},
            trust_env=False,
            proxy=endpoint.proxy(),
        )
        # S14
        self._client = openai.OpenAI(
            base_url=address or DEFAULT,
            api_key=self._key,
            max_retries=0,
            http_client=transport,  # H12
            timeout=openai.Timeout(None, connect=CONNECT_TIMEOUT),  # reading is timed by the line
            default_query=dict(parse_qsl(query)),  # Azure's older addresses end in ?api-version=
            default_headers={"Accept-Encoding": "identity", **endpoint.headers},
        )
        return self._client

    def _prepared(self, request: Any) -> None:
        """See which connection the request gets, and that nothing goes out that is not meant to."""
        line = self._line
        assert line

        def seen(event: str, info: dict[str, Any]) -> None:
            if "connect_tcp" in event:
                self._reused = False
            if event.endswith(("connect_tcp.complete", "start_tls.complete")):
                self.stream = info["return_value"]
                self._listen()
                line.connected(self.stream)
            if event.endswith("receive_response_headers.started"):
                self._sent = time.monotonic()

        self._reused, self._heard, self._sent = True, False, time.monotonic()
        request.extensions["trace"] = seen
        if self.endpoint.base_url:  # the client adds what it finds in the environment
            for name in set(request.headers) - OUR_HEADERS - self.endpoint.headers.keys():
                del request.headers[name]
        request.headers.update(self.endpoint.headers_for(self._key))

    def _listen(self) -> None:
        """Note from now on that bytes come: an answer that breaks off in its head is the same exception as none."""
        read = self.stream.read

        def noted(*arguments: Any, **named: Any) -> bytes:
            data: bytes = read(*arguments, **named)
            self._heard = self._heard or bool(data)
            return data

        self.stream.read = noted

    def _refused(self, response: Any) -> None:
        """Raise ModelError for an answer with an error's status. The body is read here, to its end or MAX_ERROR: what it
        holds is of no known size, encoding or sense, and may break off."""
        ANSWERED.add(self.endpoint.url)
        if response.status_code < 300:
            return
        url = str(response.url)
        if response.status_code < 400:
            target = shown_url(
                _base_of(urljoin(url, response.headers.get("location", "")), self.endpoint.path)
            )
            raise ModelError(
                "protocol",
                f"{shown_url(url)} redirects to {target}, which is not followed",
                status=response.status_code,
                advice="Set OPENAI_BASE_URL to where the server is.",
            )
        body = b"".join(_some(response))
        try:
            said = json.loads(body)
        except (ValueError, RecursionError):
            said = body.decode("utf-8", "replace")
        error = classify(response.status_code, said, response.headers)
        error.body = body
        if response.status_code == 404 and "model" not in error.message.lower():
            error.message += f" at {shown_url(url)}"
            error.advice = NO_V1 if "/v1" not in url else ""
        raise error

    def _network_error(self, cause: BaseException) -> ModelError:
        """What the HTTP library raised, in our terms."""
        url, place, causes = shown_url(self.endpoint.url), self.endpoint.shown, list(_causes(cause))
        kinds = {type(each).__name__ for each in causes}
        proxied = PAST_PROXY if place != url else ""
        if kinds & {"UnsupportedProtocol", "InvalidURL"}:
            return ModelError(
                "protocol", f"{url!r} is no base URL: it has to begin with http:// or https://"
            )
        if "LocalProtocolError" in kinds:  # its text holds the header, and that may be a key
            return ModelError("protocol", "a header of the request holds what cannot be sent")
        if "ProxyError" in kinds:
            passing = str(cause)[:1] == "5" or "could not connect" in str(cause)
            return ModelError(
                "network" if passing else "protocol",
                f"{place} does not connect to {url}: {str(cause).strip()}",
                retryable=passing,
                advice=PAST_PROXY,
            )
        for each in causes:
            if isinstance(each, ssl.SSLError) and (error := _tls_error(each, url)):
                return error
            if isinstance(each, socket.gaierror):
                return Unreachable(
                    "network",
                    f"the host of {place} is not known: {each.strerror}",
                    retryable=True,
                    advice=proxied,
                )
            if isinstance(each, OSError) and each.errno in NOBODY:
                return Unreachable(
                    "network", f"nothing answers at {place}", retryable=True, advice=proxied
                )
        if "ConnectTimeout" in kinds:
            return Unreachable(
                "network",
                f"nothing answers at {place} within {CONNECT_TIMEOUT:g} s",
                retryable=True,
                advice=proxied,
            )
        if self.endpoint.url not in ANSWERED and speaks_tls(self.endpoint.url):
            return ModelError(
                "protocol",
                f"{url} speaks https and not http",
                advice="Write https:// in OPENAI_BASE_URL.",
            )
        return ModelError(
            "network",
            f"{place} closed the connection before an answer",
            retryable=True,
            advice=proxied,
        )


# ---- faults ----------------------------------------------------------------------------------------------

NOBODY = {
    errno.ECONNREFUSED,
    errno.ETIMEDOUT,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.EHOSTDOWN,
}
OWN_CA = (
    "SSL_CERT_FILE names a file with the authorities to trust (PEM), also with one of your own."
)
PAST_PROXY = "Mend that variable, or name the server's host in NO_PROXY."
NO_V1 = "Check the base URL (OPENAI_BASE_URL): it mostly ends in /v1."
CERTIFICATES = {
    9: "Look at this machine's clock.",
    10: "The server needs a new one; or look at this machine's clock.",  # OpenSSL's numbers
    62: "OPENAI_BASE_URL needs a name that the certificate is for.",
    64: "OPENAI_BASE_URL needs an address that the certificate is for.",
}


def _tls_error(cause: ssl.SSLError, url: str) -> ModelError | None:
    """None where the connection only broke."""
    if isinstance(cause, ssl.SSLCertVerificationError):
        return ModelError(
            "protocol",
            f"the certificate of {url} is refused: {cause.verify_message.rstrip('.')}",
            advice=CERTIFICATES.get(cause.verify_code, OWN_CA),
        )
    if isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return None
    reason = (cause.reason or str(cause)).replace("_", " ").lower()
    return ModelError(
        "protocol",
        f"{url} does not speak TLS as https needs it ({reason})",
        advice="A server that speaks http has an address with http://.",
    )


def speaks_tls(url: str) -> bool:
    """Does a server that has closed an http request without a word take a TLS handshake? Nothing is sent in it."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        return False
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((parts.hostname, parts.port or 80), CONNECT_TIMEOUT) as plain,
            context.wrap_socket(plain, server_hostname=parts.hostname),
        ):
            return True
    except (OSError, ValueError):
        return False


# What reading an answer raises whose members are not of the kind that the API says.
MALFORMED = (
    AttributeError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    RecursionError,
    AssertionError,
)


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
