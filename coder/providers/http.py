"""Endpoint: one server's address, its key, and requests to it through the openai client.

The client makes a request; its own transport would read the answer through six layers, so exchange.py sends it. Redirects
are not followed, since they would carry the conversation to another host. Retries are the loop's.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, urljoin, urlsplit

from coder.abort import Abort
from coder.providers.address import shown_url
from coder.providers.connection import Connections
from coder.providers.errors import ADVICE, classify
from coder.providers.exchange import StreamingRequest
from coder.types import ModelError

DEFAULT_URL = "https://api.openai.com/v1"  # the client's
MAX_ERROR = 1_000_000  # bytes of an error's body that are read
HEADER = re.compile(rb"[!-9;-~]+: [^\r\n\0]*")
BAD_HEADER = "a header of the request holds what cannot be sent"
OUR_HEADERS = {
    *("host", "accept", "accept-encoding", "authorization", "connection"),
    *("content-length", "content-type", "user-agent"),
}


class Endpoint:
    """Where requests go. `base_url` None is the client's default, and then a missing key is taken from OPENAI_API_KEY;
    an address given here never gets a key that was not given with it. `key_header`: a further header for the key.
    `redact` is applied to each piece that is read of an answer."""

    path = "/chat/completions"

    def __init__(
        self,
        base_url: str | None,
        api_key: str | None,
        headers: Mapping[str, str],
        redact: Callable[[bytes], bytes] = bytes,
    ) -> None:
        self.base_url, self.api_key, self.key_header = base_url, api_key, ""
        self.redact = redact
        self.headers = {name.lower(): value for name, value in headers.items()}
        self.address = self._base_of(base_url or os.environ.get("OPENAI_BASE_URL") or "") or None
        self.connections = Connections(self.address or DEFAULT_URL)
        self._client: Any = None
        self._thread = threading.local()  # its request and key

    def _base_of(self, url: str) -> str:
        """A base URL, also where the address of the call itself was pasted."""
        place, mark, query = url.partition("?")
        if not place.rstrip("/").endswith(self.path):
            return url
        return place.rstrip("/").removesuffix(self.path) + mark + query

    @contextmanager
    def post(
        self, data: bytes, api_key: str | None, abort: Abort, seconds: float
    ) -> Iterator[StreamingRequest]:
        """Send `data`; inside, the answer can be read. Within `seconds` the first of it has to come.

        Raises ModelError for what is no answer, or Aborted.
        """
        abort.check()
        key = self.key_for(api_key)
        request = StreamingRequest(self.connections, abort, seconds, self.redact)
        with abort.calling(request.cut):
            try:
                self._thread.request, self._thread.key = request, key
                self._send(data)
                yield request
            except ModelError as error:  # a server's text may repeat the key that it was sent
                if len(key) > 7:
                    error.message = error.message.replace(key, "***")
                    error.request_id = error.request_id and error.request_id.replace(key, "***")
                raise
            finally:
                request.close()

    def key_for(self, api_key: str | None) -> str:
        """The key of a request. Raises ModelError where the client's default server has none, or where no header can
        carry it; it is not shown."""
        given = api_key or self.api_key
        if not (self.address or given or os.environ.get("OPENAI_API_KEY") or self._has_own_key()):
            message = (
                "no key: set OPENAI_API_KEY, or give api_key= or a base_url=; nothing was sent"
            )
            raise ModelError("auth", message)
        key = given or ("" if self.base_url else os.environ.get("OPENAI_API_KEY")) or "none"
        key = key.strip()
        if not (key.isascii() and key.isprintable()):
            message = "the key holds characters that no header can carry: copy it again"
            raise ModelError("auth", message)
        return key

    def _has_own_key(self) -> bool:
        """Whether the user's own headers authorise the request."""
        return not self.headers.keys().isdisjoint({"authorization", "api-key", self.key_header})

    # -- through the client

    def _send(self, data: bytes) -> None:
        self._check_address()
        openai = load()
        import httpx2  # the openai client's own HTTP library

        try:
            self._client = self._client or self._new_client(openai)
            self._client.post(self.path, content=data, cast_to=httpx2.Response, stream=True)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            address = shown_url(self.connections.url)
            raise ModelError("protocol", f"{address!r} is no base URL") from error
        except UnicodeEncodeError as error:  # its text holds the header, and that may be a key
            raise ModelError("protocol", BAD_HEADER) from error

    def _check_address(self) -> None:
        address = self.connections.url
        with suppress(ValueError):
            parts = urlsplit(address)
            if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
                return
        message = f"{shown_url(address)!r} is no base URL: it has to begin with http:// or https://"
        raise ModelError("protocol", message)

    def _new_client(self, openai: Any) -> Any:
        address, _, query = self.connections.url.partition("?")
        return openai.OpenAI(
            base_url=address,
            api_key=self._thread.key,
            max_retries=0,
            timeout=None,  # StreamingRequest has the limits
            http_client=openai.DefaultHttpxClient(
                transport=self, follow_redirects=False, trust_env=False
            ),
            default_query=dict(parse_qsl(query)),  # Azure's older addresses end in ?api-version=
            default_headers={"Accept-Encoding": "identity", **self.headers},
        )

    def handle_request(self, made: Any) -> Any:
        """Send what the client has made: this is its transport. Raises ModelError, for a refusal too."""
        import httpx2

        lines = [f"{name}: {value}".encode() for name, value in self._headers(made.headers).items()]
        if not all(map(HEADER.fullmatch, lines)):
            raise ModelError("protocol", BAD_HEADER)
        first = b"%s %s HTTP/1.1" % (made.method.encode(), made.url.raw_path)
        request: StreamingRequest = self._thread.request
        request.send(str(made.url), b"\r\n".join([first, *lines, b"", made.content]))
        if request.status_code >= 300:
            raise self._refusal(request)
        return httpx2.Response(request.status_code)

    def close(self) -> None:
        """For the client, which closes its transport: idle connections end with this object."""

    def _headers(self, made: Mapping[str, str]) -> dict[str, str]:
        """Those of a request that go to this server. The client adds what it finds in the environment, which may belong
        to another one."""
        headers, key = dict(made), self._thread.key
        if self.base_url:
            known = OUR_HEADERS | self.headers.keys()
            headers = {name: value for name, value in headers.items() if name in known}
        if self.base_url or headers.get("authorization") == f"Bearer {self._client.api_key}":
            headers["authorization"] = self.headers.get("authorization") or f"Bearer {key}"
        return headers | ({self.key_header: key} if self.key_header else {})

    def _refusal(self, request: StreamingRequest) -> ModelError:
        """The error of a status that is none of success. What can be read of the body counts; some break off."""
        url, status = shown_url(request.url), request.status_code
        if status < 400:
            location = urljoin(request.url, request.headers.get("location", ""))
            target = shown_url(self._base_of(location))
            message = f"{url} redirects to {target}; redirects are not followed"
            advice = "Set OPENAI_BASE_URL to where the server is."
            return ModelError("protocol", message, status=status, advice=advice)
        body = b""
        with suppress(ModelError):
            for piece in request.pieces():
                body += piece
                if len(body) >= MAX_ERROR:
                    break
        try:
            said = json.loads(body)
        except (ValueError, RecursionError):
            said = body.decode("utf-8", "replace")
        error = classify(status, said, request.headers)
        error.body = body[:MAX_ERROR]
        if status == 404 and "model" not in error.message.lower():
            error.message += f" at {url}"
            error.advice = "" if "/v1" in url else ADVICE["protocol"]
        return error


def load() -> Any:
    """What is used of the openai package, which is slow to import: at the first need, and without the garbage collector,
    which takes an eighth of that time and finds nothing."""
    collects = gc.isenabled() and "openai._client" not in sys.modules
    if collects:
        gc.disable()
    try:  # waits where another thread is at it
        from openai._base_client import DefaultHttpxClient  # not the package: see cli/lazy.py
        from openai._client import OpenAI
        from openai._utils._logs import setup_logging

        setup_logging()  # by OPENAI_LOG, as the package would do
    except ImportError:  # another version, laid out otherwise
        from openai import DefaultHttpxClient, OpenAI
    finally:
        if collects:
            gc.enable()
    return SimpleNamespace(OpenAI=OpenAI, DefaultHttpxClient=DefaultHttpxClient)
