"""A relay that keeps the key: clients send it a token of their own, it asks the model's server.

    app = relay({"gpt-5": Upstream("https://api.openai.com/v1", key)}, tokens={"token-of-ann"})
    model = ChatModel("gpt-5", base_url="https://relay.example/v1", api_key="token-of-ann")

`app` runs in any WSGI server (`python -m wsgiref` is enough for a try), which also does TLS, rates
and accounts. The relay speaks the OpenAI protocol: a request goes on as it came, with the key in
the place of the token, and its answer comes back byte by byte, so any client of the protocol works.
Where tokens expire, the hook `get_api_key` gives ChatModel one for each call.
"""

from __future__ import annotations

import hmac
import http.client
import json
import logging
import queue
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

log = logging.getLogger("coder.relay")

PATH = "/v1/chat/completions"
MAX_BODY = 20_000_000  # bytes of a request
MAX_ERROR = 1_000_000  # bytes of an error's body
TIMEOUT = 600.0  # seconds without a byte from the model's server
BEAT = 1.0  # seconds between two comments in a silent stream, which show if the client has left
PATIENCE = 5.0  # seconds for the status of the answer, before a stream begins without it
PREFLIGHT = [
    ("Access-Control-Allow-Methods", "POST"),
    ("Access-Control-Allow-Headers", "authorization, content-type"),
    ("Access-Control-Max-Age", "600"),
    ("Content-Length", "0"),
]
RETURNED = ("content-type", "retry-after", "retry-after-ms", "x-request-id")  # headers of an answer

Headers = list[tuple[str, str]]
StartResponse = Callable[[str, Headers], Any]


@dataclass(frozen=True)
class Upstream:
    """A server of models; `model` is the model's name there, if it differs."""

    base_url: str
    api_key: str = field(repr=False)
    model: str = ""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


class _Refused(Exception):
    """A request that is not passed on; `status` is an HTTP status line."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


def relay(
    models: Mapping[str, Upstream],
    tokens: Iterable[str],
    *,
    origin: str = "",
    max_body: int = MAX_BODY,
    patience: float = PATIENCE,
) -> Callable[[dict[str, Any], StartResponse], Iterable[bytes]]:
    """A WSGI application. `models`: those that may be asked, by the name that clients use;
    `tokens`: the accepted bearer tokens; `origin`: of web pages whose scripts may ask, such as
    "https://app.example"; `max_body`: bytes of a request; `patience`: seconds for the status of
    an answer, before its stream begins without it. Raises ValueError without a token."""
    accepted = [token.encode() for token in tokens]
    if not accepted or not all(accepted):
        raise ValueError("a relay without a token would be open to everybody")
    cors = [("Access-Control-Allow-Origin", origin), ("Vary", "Origin")] if origin else []

    def application(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        if origin and (environ["REQUEST_METHOD"], environ["PATH_INFO"]) == ("OPTIONS", PATH):
            start_response("204 No Content", [*cors, *PREFLIGHT])
            return []
        try:
            _authorize(environ, accepted)
            answer = _Answer(*_request(environ, models, max_body))
        except _Refused as refused:
            start_response(refused.status, [("Content-Type", "application/json"), *cors])
            return [_error(str(refused), int(refused.status[:3]))]
        status, headers = answer.begin(patience)
        start_response(status, [*headers, *cors])
        return answer

    return application


def _error(message: str, code: int) -> bytes:
    return json.dumps({"error": {"message": message, "code": code}}).encode()


def _authorize(environ: dict[str, Any], accepted: list[bytes]) -> None:
    """Check the path, the method and the token, before the body is read. Raises _Refused."""
    if environ["PATH_INFO"] != PATH:
        raise _Refused("404 Not Found", f"there is only {PATH}")
    if environ["REQUEST_METHOD"] != "POST":
        raise _Refused("405 Method Not Allowed", "use POST")
    scheme, _, token = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
    given = token.strip().encode("latin-1", "replace")
    matches = [hmac.compare_digest(given, each) for each in accepted]  # all: in constant time
    if scheme.lower() != "bearer" or not any(matches):
        raise _Refused("401 Unauthorized", "the token is not known")


def _request(
    environ: dict[str, Any], models: Mapping[str, Upstream], max_body: int
) -> tuple[Upstream, dict[str, Any]]:
    """The server that a request is for, and the body to send there. Raises _Refused."""
    length = environ.get("CONTENT_LENGTH") or ""
    if not (length.isascii() and length.isdigit()):
        raise _Refused("411 Length Required", "the request needs a Content-Length")
    if len(length) > 12 or int(length) > max_body:
        raise _Refused("413 Content Too Large", f"a request has at most {max_body} bytes")
    try:
        body = json.loads(environ["wsgi.input"].read(int(length)))
        name = body["model"]
        upstream = models.get(name)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise _Refused("400 Bad Request", "the body has to be JSON that names a model") from None
    if upstream is None:
        known = ", ".join(models)
        raise _Refused("404 Not Found", f"model {name!r:.80} not found; there are {known}")
    return upstream, body | {"model": upstream.model or name}


class _Answer:
    """The body of one answer. A thread reads it from the model's server, so that a client that
    leaves is noticed while the model is silent; `close`, which a WSGI server calls on every way
    out, ends the request."""

    def __init__(self, upstream: Upstream, body: dict[str, Any]) -> None:
        self.upstream, self.body = upstream, body
        url = urlsplit(upstream.base_url)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        self.connection = kind(url.netloc, timeout=TIMEOUT)
        query = f"?{url.query}" if url.query else ""
        self.path = f"{url.path.rstrip('/')}/chat/completions{query}"
        self.head: queue.Queue[tuple[int, Headers]] = queue.Queue()  # one, at most
        self.pieces: queue.Queue[bytes] = queue.Queue()  # b"" is the end
        self.is_stream = False
        self.started = self.left = False
        threading.Thread(target=self._ask, daemon=True).start()

    def begin(self, patience: float) -> tuple[str, Headers]:
        """The status line and the headers; those of a stream if it has none after `patience`."""
        try:
            status, headers = self.head.get(timeout=patience if self.body.get("stream") else None)
        except queue.Empty:
            status, headers = 200, [("content-type", "text/event-stream")]
        kinds = [value for name, value in headers if name == "content-type"]
        self.is_stream = status == 200 and "event-stream" in "".join(kinds)
        line = f"{status} {http.client.responses.get(status, 'Unknown')}"
        return line, [*headers, ("Cache-Control", "no-store"), ("X-Accel-Buffering", "no")]

    def __iter__(self) -> Iterator[bytes]:
        at_line = True  # a comment may stand between two lines
        while True:
            try:
                piece = self.pieces.get(timeout=BEAT)
            except queue.Empty:
                if self.is_stream and at_line:
                    yield b": still here\n"
                continue
            if not piece:
                return
            if not self.head.empty() and self.head.get()[0] != 200:  # an error behind the beginning
                piece = b"data: " + b" ".join(piece.split()) + b"\n\n"
            at_line = piece.endswith(b"\n")
            yield piece

    def close(self) -> None:
        self.left = True
        if self.connection.sock:
            with suppress(OSError):  # closed already
                self.connection.sock.shutdown(socket.SHUT_RDWR)

    def _ask(self) -> None:
        """Send the request and put its answer into the queues. An answer that breaks ends early,
        which clients notice."""
        try:
            self.connection.connect()
            if not self.left:
                self._pass_on()
        except (OSError, http.client.HTTPException) as error:
            if not self.left:
                log.warning("the model's server at %s: %r", self.upstream.base_url, error)
                self._fail("the model's server cannot be reached")
        finally:
            self.pieces.put(b"")
            self.connection.close()

    def _pass_on(self) -> None:
        own = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {self.upstream.api_key}",
        }
        data = json.dumps(self.body).encode()
        self.connection.request("POST", self.path, data, {**own, **self.upstream.headers})
        answer = self.connection.getresponse()
        headers = [(name.lower(), value) for name, value in answer.getheaders()]
        kept = [(name, self._without_key(value)) for name, value in headers if name in RETURNED]
        self._start(answer.status, kept)
        if answer.status != 200:
            error = answer.read(MAX_ERROR).decode("utf-8", "replace")
            self.pieces.put(self._without_key(error).encode())
            return
        while piece := answer.read1(65_536):
            self.pieces.put(piece)

    def _start(self, status: int, headers: Headers) -> None:
        self.started = True
        self.head.put((status, headers))

    def _fail(self, message: str) -> None:
        """Tell the client why there is no answer, if none has begun."""
        if not self.started:
            self._start(502, [("content-type", "application/json")])
            self.pieces.put(_error(message, 502))

    def _without_key(self, text: str) -> str:
        """What the server says, which may repeat the key that it was sent."""
        return text.replace(self.upstream.api_key, "***")
