"""Endpoint: one server's address, its key, and requests to it.

Requests are made and sent here. The openai client, whose import takes 0.15 s, supplies what it knows of OpenAI's own server
(address, organisation, project), and is not imported for any other. Redirects are not followed: they would carry the
conversation to another host. Retries are the loop's.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urljoin, urlsplit, urlunsplit

from coder.abort import Abort
from coder.providers.connection import Connections, StreamingRequest
from coder.providers.errors import ADVICE, classify
from coder.providers.response import well_formed
from coder.providers.text import shown_url
from coder.types import ModelError

CALL, LIST = "/chat/completions", "/models"
MAX_ERROR = 1_000_000  # bytes of an error's body that are read
HEADER = re.compile(r"[!-9;-~]+: [\t -~]*")


class Endpoint:
    """Where requests go; address and key as for a ChatModel. `key_header`: a further header for the key. `redact` is applied
    to each piece that is read of an answer."""

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
        self._connections: Connections | None = None
        self._defaults: dict[str, str] = {}  # headers of each request

    def _base_of(self, url: str) -> str:
        """A base URL, also where the address of the call itself was pasted."""
        place, mark, query = url.partition("?")
        return place.rstrip("/").removesuffix(CALL) + mark + query

    @contextmanager
    def post(
        self, data: bytes, api_key: str | None, abort: Abort, seconds: float, path: str = CALL
    ) -> Iterator[StreamingRequest]:
        """Send `data`, or ask for the LIST; inside, the answer can be read. Within `seconds` the first of it has to come.
        Raises ModelError for what is no answer, or Aborted."""
        abort.check()
        key = self.key_for(api_key)
        connections = self._connections = self._connections or self._connect(key)
        base, mark, query = connections.url.partition("?")  # Azure's ?api-version=
        url = base.rstrip("/") + path + mark + query
        message = self._head(url, path, key, len(data)) + data
        request = StreamingRequest(connections, url, abort, seconds, self.redact)
        with abort.calling(request.cut):
            try:
                request.send(message)
                if request.status_code >= 300:
                    raise self._refusal(request)
                yield request
            except ModelError as error:  # a server's text may repeat the key that it was sent
                if len(key) > 7:
                    error.message = error.message.replace(key, "***")
                    error.request_id = error.request_id and error.request_id.replace(key, "***")
                raise
            finally:
                request.close()

    def models(self, seconds: float = 5.0, abort: Abort | None = None) -> list[str]:
        """The names of the server's models. Raises ModelError and Aborted."""
        with self.post(b"", None, abort or Abort(), seconds, LIST) as answer, well_formed():
            listing = json.loads(b"".join(answer.pieces()))
            return [str(model["id"]) for model in listing["data"] or ()]

    def key_for(self, api_key: str | None) -> str:
        """The key of a request. Raises ModelError where OpenAI's own server has none, or where no header can carry it; it
        is not shown."""
        key = api_key or self.api_key or ("" if self.base_url else os.environ.get("OPENAI_API_KEY"))
        own = self.headers.keys() & {"authorization", "api-key", self.key_header}
        if not (key or self.address or own):
            ways = "set OPENAI_API_KEY, or give api_key= or a base_url="
            raise ModelError("auth", f"no key: {ways}; nothing was sent")
        key = (key or "none").strip()
        if not (key.isascii() and key.isprintable()):
            message = "the key holds characters that no header can carry: copy it again"
            raise ModelError("auth", message)
        return key

    def _connect(self, key: str) -> Connections:
        """The connections to the server, at the first request. Raises ModelError for an address that is none."""
        from coder import __version__  # late: it imports this module's users

        address, self._defaults = self.address, {"user-agent": f"coder/{__version__}"}
        if not address:
            client = openai_client(key)
            address = str(client.base_url)
            given = client.default_headers.items()  # some are marked as left out
            self._defaults = {
                name.lower(): value for name, value in given if isinstance(value, str)
            }
        with suppress(ValueError):
            parts = urlsplit(address)
            known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            if known and re.fullmatch("[!-~]+", address):
                return Connections(address)
        message = f"{shown_url(address)!r} is no base URL: it has to begin with http:// or https://"
        raise ModelError("protocol", message)

    def _head(self, url: str, path: str, key: str, size: int) -> bytes:
        """Request line and headers. Raises ModelError for a header that cannot be sent."""
        parts = urlsplit(url)
        headers = {
            "host": parts.netloc.rpartition("@")[2],
            "accept": "application/json",
            "content-type": "application/json",
            "authorization": f"Bearer {key}",
            **self._defaults,
            "accept-encoding": "identity",
            **self.headers,
            **({self.key_header: key} if self.key_header else {}),
            "content-length": str(size),
        }
        lines = [f"{name}: {value}" for name, value in headers.items()]
        if not all(map(HEADER.fullmatch, lines)):  # not shown: it may be a key
            raise ModelError("protocol", "a header of the request holds what cannot be sent")
        target = urlunsplit(("", "", parts.path, parts.query, ""))
        method = "POST" if path == CALL else "GET"
        return "\r\n".join([f"{method} {target} HTTP/1.1", *lines, "", ""]).encode()

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


def openai_client(api_key: str) -> Any:
    """The openai package's client, imported at the first need."""
    import openai

    return openai.OpenAI(api_key=api_key, max_retries=0)
