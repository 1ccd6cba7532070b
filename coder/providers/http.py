"""Endpoint: one server's address, its key and its connections; StreamingRequest: one request and its answer.

The openai client makes the request, and sends it through the connection given here: its own transport reads an event
stream through six layers. Redirects are not followed, since they would carry the conversation to another host. Retries
are the loop's.
"""

from __future__ import annotations

import gc
import http.client
import json
import math
import os
import re
import socket
import ssl
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import parse_qsl, urljoin, urlsplit

from coder.abort import Abort
from coder.providers import connection
from coder.providers.address import shown_url
from coder.providers.connection import (
    NO_V1,
    PERHAPS_TLS,
    Unreachable,
    authorities_error,
    closed,
    connect_error,
    proxy_error,
)
from coder.providers.errors import ADVICE, classify
from coder.types import ModelError

DEFAULT_URL = "https://api.openai.com/v1"  # the client's
SECOND_TRY = 0.5  # seconds before it, where nothing answers at an address that has not answered yet
STALE = 1.0  # seconds after a request in which a connection that the server had closed shows it
MAX_ERROR = 1_000_000  # bytes of an error's body that are read
HEADER = re.compile(rb"[!-9;-~]+: [^\r\n\0]*")
OUR_HEADERS = {
    *("host", "accept", "accept-encoding", "authorization", "connection"),
    *("content-length", "content-type", "user-agent"),
}


class Endpoint:
    """Where requests go. `base_url` None is the client's default, and then a missing key is taken from OPENAI_API_KEY;
    an address given here never gets a key that was not given with it. `key_header`: a further header for the key."""

    def __init__(
        self,
        base_url: str | None,
        api_key: str | None,
        headers: Mapping[str, str],
        key_header: str = "",
        path: str = "/chat/completions",
    ) -> None:
        self.base_url, self.api_key, self.path = base_url, api_key, path
        self.key_header = key_header
        self.headers = {name.lower(): value for name, value in headers.items()}
        self.address = _base_of(base_url or os.environ.get("OPENAI_BASE_URL") or "", path) or None
        self.url = self.address or DEFAULT_URL
        self.answered = False  # at least once
        self._idle: list[socket.socket] = []
        self._tls: ssl.SSLContext | None = None
        self._client: Any = None
        self._transport = _Transport()

    @contextmanager
    def post(
        self, data: bytes, api_key: str | None, abort: Abort, seconds: float
    ) -> Iterator[StreamingRequest]:
        """Send `data`; inside, the answer can be read. Within `seconds` the first of it has to come.

        Raises ModelError for what is no answer, or Aborted.
        """
        abort.check()
        request = StreamingRequest(self, self.key_for(api_key), abort, seconds)
        with abort.calling(request.cut):
            try:
                self._send(data, request)
                yield request
            except ModelError as error:
                request.hide_key(error)
                raise
            finally:
                request.close()

    def _send(self, data: bytes, request: StreamingRequest) -> None:
        self._check_address()
        openai = load()
        import httpx2  # the openai client's own HTTP library

        try:
            client = self._client or self._new_client(openai, request.key)
            self._client = client
            if client.api_key != request.key:
                client = client.with_options(api_key=request.key)
            self._transport.calls.current = request
            client.post(self.path, content=data, cast_to=httpx2.Response, stream=True)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ModelError("protocol", f"{shown_url(self.url)!r} is no base URL") from error
        except UnicodeEncodeError as error:  # its text holds the header, and that may be a key
            raise ModelError("protocol", BAD_HEADER) from error

    def _new_client(self, openai: Any, key: str) -> Any:
        address, _, query = (self.address or "").partition("?")
        return openai.OpenAI(
            base_url=address or DEFAULT_URL,
            api_key=key,
            max_retries=0,
            timeout=None,  # StreamingRequest has the limits
            http_client=openai.DefaultHttpxClient(
                transport=self._transport, follow_redirects=False, trust_env=False
            ),
            default_query=dict(parse_qsl(query)),  # Azure's older addresses end in ?api-version=
            default_headers={"Accept-Encoding": "identity", **self.headers},
        )

    def _check_address(self) -> None:
        with suppress(ValueError):
            parts = urlsplit(self.url)
            if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
                return
        message = (
            f"{shown_url(self.url)!r} is no base URL: it has to begin with http:// or https://"
        )
        raise ModelError("protocol", message)

    # -- keys

    def key_for(self, api_key: str | None) -> str:
        """The key of a request. Raises ModelError where no header can carry it; it is not shown."""
        given = api_key or self.api_key
        key = given or ("" if self.base_url else os.environ.get("OPENAI_API_KEY")) or "none"
        key = key.strip()
        if not (key.isascii() and key.isprintable()):
            message = "the key holds characters that no header can carry: copy it again"
            raise ModelError("auth", message)
        return key

    def allowed_headers(self, headers: Mapping[str, str], key: str) -> dict[str, str]:
        """Those of a request that go to this server. The client adds what it finds in the environment, which may belong
        to another one."""
        allowed = dict(headers)
        if self.base_url:
            known = OUR_HEADERS | self.headers.keys()
            allowed = {name: value for name, value in headers.items() if name in known}
            allowed["authorization"] = self.headers.get("authorization") or f"Bearer {key}"
        if self.key_header:
            allowed[self.key_header] = key
        return allowed

    # -- connections

    def idle_connection(self) -> socket.socket | None:
        """One that an earlier request has left, and the server has not closed."""
        while self._idle:
            with suppress(IndexError):  # another thread took it
                sock = self._idle.pop()
                if connection.is_open(sock):
                    return sock
                sock.close()
        return None

    def keep(self, sock: socket.socket) -> None:
        """Keep a connection for the next request."""
        self._idle.append(sock)

    def connect(self, check: Callable[[], object]) -> socket.socket:
        """A new connection; `check` is called meanwhile, and may raise. Raises ModelError."""
        proxy = connection.proxy_of(self.url)
        if proxy and proxy.url.partition("://")[0].lower() not in ("http", "socks5", "socks5h"):
            raise proxy_error(proxy)
        try:
            return connection.in_background(
                lambda: connection.connect(self.url, proxy, self.tls), check
            )
        except (OSError, UnicodeError, http.client.HTTPException, connection.ProxyError) as error:
            raise connect_error(error, self.url, proxy) from error

    def tls(self) -> ssl.SSLContext:
        """The authorities that the client itself would trust; loading them takes 50 ms. Raises ModelError."""
        if self._tls is None:
            import httpx2  # the openai client's own HTTP library

            try:
                self._tls = httpx2.create_ssl_context()
            except OSError as error:
                raise authorities_error(error) from error
        return self._tls

    @property
    def shown(self) -> str:
        """What a connection leads to: the server, or the proxy before it."""
        return str(connection.proxy_of(self.url) or shown_url(self.url))


class _Transport:
    """What the client sends a request through: the StreamingRequest of the thread."""

    def __init__(self) -> None:
        self.calls = threading.local()

    def handle_request(self, request: Any) -> Any:
        import httpx2

        self.calls.current.send(request)
        return httpx2.Response(200)

    def close(self) -> None:
        """Nothing to close: connections are the endpoint's."""


BAD_HEADER = "a header of the request holds what cannot be sent"


class StreamingRequest:
    """One request, and its answer as it comes. `cut` ends both at any moment, from any thread or signal handler."""

    def __init__(self, endpoint: Endpoint, key: str, abort: Abort, seconds: float) -> None:
        self.endpoint, self.key, self.abort = endpoint, key, abort
        self.url, self.status_code = endpoint.url, 0
        self.headers: Any = {}  # by name in any case
        self._socket: socket.socket | None = None
        self._answer: http.client.HTTPResponse | None = None
        self._whole = False  # the answer was read to its end
        self._timeout = -1.0  # the socket's
        self.within(seconds)

    def within(self, seconds: float) -> None:
        """Data has to come within so many seconds from now."""
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def cut(self) -> None:
        """End the connection."""
        if sock := self._socket:
            with suppress(OSError):  # not connected any more
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def hide_key(self, error: ModelError) -> None:
        """A server's text may repeat the key that it was sent."""
        if len(self.key) > 7:
            error.message = error.message.replace(self.key, "***")
            error.request_id = error.request_id and error.request_id.replace(self.key, "***")

    def close(self) -> None:
        """Leave the connection to the next request, if this one's answer was read to its end."""
        if self._answer:
            self._answer.close()
        sock, self._socket = self._socket, None  # what is kept is not cut any more
        if sock and self._whole and not self.abort.is_set:
            self.endpoint.keep(sock)
        elif sock:
            sock.close()

    # -- sending

    def send(self, request: Any) -> None:
        """Send what the client has made, and read the head of the answer. Raises ModelError, for a refusal too."""
        self.url = str(request.url)
        headers = self.endpoint.allowed_headers(request.headers, self.key)
        lines = [f"{name}: {value}".encode() for name, value in headers.items()]
        if not all(map(HEADER.fullmatch, lines)):
            raise ModelError("protocol", BAD_HEADER)
        first = b"%s %s HTTP/1.1" % (request.method.encode(), request.url.raw_path)
        try:
            self._answer = self._exchange(b"\r\n".join([first, *lines, b"", request.content]))
        except TimeoutError as error:
            raise self._silence() from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.abort.check()
            raise self._closed() from error
        self.endpoint.answered = True
        self.status_code, self.headers = self._answer.status, self._answer.headers
        if self.status_code >= 300:
            raise self._refusal()

    def _exchange(self, message: bytes) -> http.client.HTTPResponse:
        """The answer with its head read. A connection that the server had closed before the request came is replaced:
        it cannot have begun to work on it."""
        idle, began = self.endpoint.idle_connection(), time.monotonic()
        answer = self._first_bytes(idle, message) if idle else None
        if not answer and not (idle and time.monotonic() - began > STALE):
            self.abort.check()
            answer = self._first_bytes(self._connect(), message)
        if not answer:
            raise http.client.RemoteDisconnected("no answer")
        answer.begin()
        while 100 <= answer.status < 200:  # interim answers
            answer.headers = answer.msg = None  # type: ignore[assignment]
            answer.begin()
        return answer

    def _first_bytes(self, sock: socket.socket, message: bytes) -> http.client.HTTPResponse | None:
        """An answer of which something has come; None where the connection ends before."""
        if self._socket:
            self._socket.close()
        self._socket, self._timeout = sock, -1.0
        self.abort.check()
        self._limit()
        answer = http.client.HTTPResponse(sock, method="POST")
        with suppress(ConnectionError, ssl.SSLError):
            with suppress(ConnectionError):  # a refusal may come before the whole request is sent
                sock.sendall(message)
            if answer.fp.peek(1):
                return answer
        answer.close()
        return None

    def _connect(self) -> socket.socket:
        """A new connection. Where nothing answers at an address that never did, it is tried twice and no more."""

        def check() -> None:
            self.abort.check()
            if time.monotonic() > self._deadline:
                raise self._silence()

        try:
            return self.endpoint.connect(check)
        except Unreachable:
            if self.endpoint.answered:
                raise
        self.abort.wait(SECOND_TRY)
        try:
            return self.endpoint.connect(check)
        except Unreachable as failure:
            failure.retryable = False
            raise

    def _limit(self) -> None:
        """Let the next read or write end at the deadline."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if self._socket and not self._timeout - 0.05 < left <= self._timeout:  # a system call
            self._timeout = left
            self._socket.settimeout(None if math.isinf(left) else left)

    # -- reading

    def pieces(self) -> Iterator[bytes]:
        """The body, each piece what one read brings. Raises ModelError, or Aborted."""
        assert self._answer
        try:
            body = connection.body_of(self._answer, self._limit)
            if "content-encoding" in self.headers:  # although none was asked for
                body = _decoded(body, self.headers["content-encoding"])
            yield from body
        except TimeoutError as error:
            raise self._silence() from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.abort.check()
            message = "the connection broke in the middle of the answer"
            advice = ADVICE["incomplete"]
            raise ModelError("network", message, retryable=True, advice=advice) from error
        self.abort.check()
        self._whole = not self._answer.will_close

    def _refusal(self) -> ModelError:
        """The error of a status that is none of success. What can be read of the body counts; some break off."""
        url = shown_url(self.url)
        if self.status_code < 400:
            location = urljoin(self.url, self.headers.get("location", ""))
            target = shown_url(_base_of(location, self.endpoint.path))
            message = f"{url} redirects to {target}, which is not followed"
            advice = "Set OPENAI_BASE_URL to where the server is."
            return ModelError("protocol", message, status=self.status_code, advice=advice)
        body = b""
        with suppress(ModelError):
            for piece in self.pieces():
                body += piece
                if len(body) >= MAX_ERROR:
                    break
        try:
            said = json.loads(body)
        except (ValueError, RecursionError):
            said = body.decode("utf-8", "replace")
        error = classify(self.status_code, said, self.headers)
        error.body = body[:MAX_ERROR]
        if self.status_code == 404 and "model" not in error.message.lower():
            error.message += f" at {url}"
            error.advice = "" if "/v1" in url else NO_V1
        return error

    def _silence(self) -> ModelError:
        return ModelError("network", f"no data for {self._seconds:g} s", retryable=True)

    def _closed(self) -> ModelError:
        plain = not self.endpoint.answered and self.endpoint.url.startswith("http:")
        return closed(self.endpoint.shown, PERHAPS_TLS if plain else "")


def _decoded(body: Iterator[bytes], encoding: str) -> Iterator[bytes]:
    if encoding.lower() not in ("identity", "gzip", "x-gzip", "deflate"):
        message = f"the answer cannot be decoded: its encoding is {encoding!r}"
        raise ModelError("protocol", message, retryable=True)
    decoder = zlib.decompressobj(zlib.MAX_WBITS | 32)  # either form, by its head
    try:
        for piece in body:
            if data := piece if encoding.lower() == "identity" else decoder.decompress(piece):
                yield data
    except zlib.error as error:
        message = f"the answer cannot be decoded: {error}"
        raise ModelError("protocol", message, retryable=True) from error


def _base_of(url: str, path: str) -> str:
    """A base URL, also where the address of the call itself was pasted."""
    place, mark, query = url.partition("?")
    if not place.rstrip("/").endswith(path):
        return url
    return place.rstrip("/").removesuffix(path) + mark + query


def load() -> Any:
    """The openai package, which is slow to import: at the first need, and without the garbage collector, which takes an
    eighth of that time and finds nothing."""
    collects = gc.isenabled() and "openai" not in sys.modules
    if collects:
        gc.disable()
    try:
        import openai  # waits where another thread is at it

        return openai
    finally:
        if collects:
            gc.enable()
