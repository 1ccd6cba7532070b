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
PREFLIGHT = [
    ("Access-Control-Allow-Methods", "POST"),
    ("Access-Control-Allow-Headers", "authorization, content-type"),
    ("Access-Control-Max-Age", "600"),
    ("Content-Length", "0"),
]
RETURNED = ("content-type", "retry-after", "retry-after-ms", "x-request-id")  # headers of an answer

Environ = dict[str, Any]
StartResponse = Callable[[str, list[tuple[str, str]]], Any]


@dataclass(frozen=True)
class Upstream:
    """A server of models; `model` is the model's name there, if it differs."""

    base_url: str
    api_key: str = field(repr=False)
    model: str = ""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


class _Refused(Exception):
    """A request without an answer; `status` is an HTTP status line."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


def relay(
    models: Mapping[str, Upstream],
    tokens: Iterable[str],
    *,
    origin: str = "",
    max_body: int = MAX_BODY,
) -> Callable[[Environ, StartResponse], Iterable[bytes]]:
    """A WSGI application. `models`: those that may be asked, by the name that clients use;
    `tokens`: the accepted bearer tokens; `origin`: of web pages whose scripts may ask, such as
    "https://app.example"; `max_body`: bytes of a request. Raises ValueError without a token."""
    accepted = [token.encode() for token in tokens]
    if not accepted or not all(accepted):
        raise ValueError("a relay without a token would be open to everybody")
    cors = [("Access-Control-Allow-Origin", origin), ("Vary", "Origin")] if origin else []

    def application(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        if origin and (environ["REQUEST_METHOD"], environ["PATH_INFO"]) == ("OPTIONS", PATH):
            start_response("204 No Content", [*cors, *PREFLIGHT])
            return []
        try:
            _authorize(environ, accepted)
            answer = _Answer(*_request(environ, models, max_body))
        except _Refused as refused:
            start_response(refused.status, [("Content-Type", "application/json"), *cors])
            error = {"message": str(refused), "code": int(refused.status[:3])}
            return [json.dumps({"error": error}).encode()]
        start_response(answer.status, [*answer.headers, *cors])
        return answer

    return application


def _authorize(environ: Environ, accepted: list[bytes]) -> None:
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
    environ: Environ, models: Mapping[str, Upstream], max_body: int
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
    """The answer of the model's server: its status, some of its headers, and its body as it comes.

    A WSGI server calls `close` on every way out, also when the client has left: that ends the
    request. An answer that breaks ends early, which clients notice.
    """

    def __init__(self, upstream: Upstream, body: dict[str, Any]) -> None:
        """Raises _Refused where the server cannot be reached."""
        self.upstream = upstream
        url = urlsplit(upstream.base_url)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        self.connection = kind(url.netloc, timeout=TIMEOUT)
        query = f"?{url.query}" if url.query else ""
        path = f"{url.path.rstrip('/')}/chat/completions{query}"
        own = {"Content-Type": "application/json", "Authorization": f"Bearer {upstream.api_key}"}
        try:
            data = json.dumps(body).encode()
            self.connection.request("POST", path, data, {**own, **upstream.headers})
            self.response = self.connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            log.warning("the model's server at %s: %r", upstream.base_url, error)
            raise _Refused("502 Bad Gateway", "the model's server cannot be reached") from None
        code = self.response.status
        self.status = f"{code} {http.client.responses.get(code, 'Unknown')}"
        self.headers = [
            (name, self._without_key(value))
            for name, value in self.response.getheaders()
            if name.lower() in RETURNED
        ]
        self.headers += [("Cache-Control", "no-store"), ("X-Accel-Buffering", "no")]

    def __iter__(self) -> Iterator[bytes]:
        with suppress(OSError, http.client.HTTPException):
            if self.response.status != 200:
                error = self.response.read(MAX_ERROR).decode("utf-8", "replace")
                yield self._without_key(error).encode()
                return
            while piece := self.response.read1(65_536):
                yield piece

    def close(self) -> None:
        self.connection.close()

    def _without_key(self, text: str) -> str:
        """What the server answers, which may repeat the key that it was sent."""
        return text.replace(self.upstream.api_key, "***")
