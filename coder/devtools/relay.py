"""A relay that keeps the key: clients send it a token of their own, it asks the model's server.

    Relay("https://api.openai.com/v1", key, tokens={"token-of-ann"}, port=8080).serve_forever()
    model = ChatModel("gpt-5", base_url="http://127.0.0.1:8080/v1", api_key="token-of-ann")

It speaks the OpenAI protocol: a request goes on as it came, with the key instead of the token, and
its answer comes back byte by byte, so any client of the protocol works. It listens on this machine;
TLS and rates are the work of the web server in front of it. If tokens expire, the hook
`get_api_key` gives ChatModel one for each call.
"""

from __future__ import annotations

import hmac
import http.client
import json
from collections.abc import Iterable
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

PATHS = {"POST": "/v1/chat/completions", "GET": "/v1/models"}
MAX_BODY = 20_000_000  # bytes of a request
TIMEOUT = 600.0  # seconds without a byte from the model's server
RETURNED = ("content-type", "retry-after", "retry-after-ms", "x-request-id")  # headers of an answer


class Relay(ThreadingHTTPServer):
    """A server in front of `base_url`, whose key is `api_key`.

    `tokens`: the accepted bearer tokens; `origin`: of web pages whose scripts may ask, such as
    "https://app.example". Raises ValueError without a token, OSError if the port is taken.
    """

    daemon_threads = True

    def __init__(
        self,
        base_url: str,
        api_key: str,
        tokens: Iterable[str],
        *,
        origin: str = "",
        port: int = 0,
    ) -> None:
        self.base = urlsplit(base_url)
        self.key = api_key
        self.origin = origin
        self.tokens = [f"Bearer {token}".encode() for token in tokens]
        if b"Bearer " in self.tokens or not self.tokens:
            raise ValueError("a relay without a token would be open to everybody")
        super().__init__(("127.0.0.1", port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: Relay

    def do_OPTIONS(self) -> None:
        allowed = {
            "Access-Control-Allow-Methods": "GET, POST",
            "Access-Control-Allow-Headers": "authorization, content-type",
        }
        self._head(204, allowed)

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "0")
        if not length.isdecimal() or len(length) > 12 or int(length) > MAX_BODY:
            self._refuse(413, f"a request has a Content-Length of at most {MAX_BODY} bytes")
            return
        body = self.rfile.read(int(length))
        token = self.headers.get("Authorization", "").encode("latin-1", "replace")
        # All of them are compared, so that the time says nothing about one
        matches = [hmac.compare_digest(token, accepted) for accepted in self.server.tokens]
        if not any(matches):
            self._refuse(401, "the token is not known")
        elif self.path != PATHS[self.command]:
            self._refuse(404, f"there are only {' and '.join(PATHS.values())}")
        else:
            self._forward(body)

    do_GET = do_POST

    def _forward(self, body: bytes) -> None:
        """Pass the request on, and the answer back.

        One that breaks off ends early, which clients notice.
        """
        server = self.server
        path = f"{server.base.path.rstrip('/')}{self.path.removeprefix('/v1')}"
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {server.key}"}
        is_https = server.base.scheme == "https"
        connect = http.client.HTTPSConnection if is_https else http.client.HTTPConnection
        with closing(connect(server.base.netloc, timeout=TIMEOUT)) as connection:
            try:
                connection.request(self.command, path, body or None, headers)
                answer = connection.getresponse()
            except (OSError, http.client.HTTPException):
                self._refuse(502, "the model's server cannot be reached")
                return
            got = {name.lower(): value for name, value in answer.getheaders()}
            self._head(answer.status, {name: got[name] for name in RETURNED if name in got})
            with suppress(OSError, http.client.HTTPException):
                # An error that names the key is read whole: a piece could have a half of it
                read = answer.read1 if answer.status == 200 else answer.read
                while piece := read(65_536):
                    self.wfile.write(piece.replace(server.key.encode(), b"***"))

    def _refuse(self, status: int, message: str) -> None:
        self._head(status, {"Content-Type": "application/json"})
        self.wfile.write(json.dumps({"error": {"message": message, "code": status}}).encode())

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        if self.server.origin:
            headers |= {"Access-Control-Allow-Origin": self.server.origin, "Vary": "Origin"}
        for name, value in headers.items():
            self.send_header(name, value.replace(self.server.key, "***"))
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the library's name)
        pass
