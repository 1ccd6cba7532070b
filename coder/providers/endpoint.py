"""Endpoint: the address of one server, its key, and requests to it.

Redirects are not followed: they would carry the conversation to another host. Retries are the
loop's.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urljoin, urlsplit

from coder import __version__
from coder.abort import Abort
from coder.providers.connection import HttpExchange, Redact, Server
from coder.providers.errors import ADVICE, classify, refuse_malformed
from coder.providers.sse import Response
from coder.providers.text import host_of, shown_url
from coder.types import ModelError

OPENAI = "https://api.openai.com/v1"
COMPLETIONS = "/chat/completions"
MODELS = "/models"
MAX_ERROR = 1_000_000  # bytes of an error's body that are read
ACCOUNT = {"openai-organization": "OPENAI_ORG_ID", "openai-project": "OPENAI_PROJECT_ID"}
HEADER = r"[!-9;-~]+: [\t -~]*"
SHORTEST_KEY = 8  # characters; less than that might also be a word of the server's text


class Endpoint:
    """Where requests go; address, key and headers are those of a ChatModel. `key_header`: the name
    of a second header with the key, which some servers want."""

    def __init__(
        self,
        base_url: str | None,
        api_key: str | None,
        headers: Mapping[str, str],
        redact: Redact | None = None,
    ) -> None:
        self.base_url = base_url
        self.api_key = api_key
        self.key_header = ""
        self.redact = redact
        self.headers = {name.lower(): value for name, value in headers.items()}
        # "": OpenAI's own
        self.address = base_of(base_url or os.environ.get("OPENAI_BASE_URL") or "")
        self._account = account_headers(self.address)
        self._server: Server | None = None  # from the first request on

    @contextmanager
    def request(
        self,
        data: bytes,
        api_key: str | None,
        abort: Abort,
        seconds: float,
        path: str = COMPLETIONS,
    ) -> Iterator[Response]:
        """POST `data` to the path, or GET the path if there is no data. Inside the `with` the body
        of the answer can be read.

        The answer's head has to come within `seconds`. Raises Aborted, and ModelError, also for an
        answer whose status is no success.
        """
        abort.check()
        key = self.key_for(api_key)
        if self._server is None:
            self._server = Server(check_address(self.address or OPENAI), self.redact)
        base, mark, query = self._server.url.partition("?")  # Azure's ?api-version=
        url = base.rstrip("/") + path + mark + query
        head = self._head(url, key, len(data))
        exchange = HttpExchange(self._server, url, abort, seconds)
        with abort.calling(exchange.cut):
            try:
                exchange.send_and_read_head(head + data)
                check_status(exchange)
                yield exchange
            except ModelError as error:
                hide_key(error, key)
                raise
            finally:
                exchange.close()

    def models(self, seconds: float = 5.0, abort: Abort | None = None) -> list[str]:
        """The names of the server's models. Raises ModelError and Aborted."""
        with (
            self.request(b"", None, abort or Abort(), seconds, MODELS) as response,
            refuse_malformed(),
        ):
            listing = json.loads(b"".join(response.pieces()))
            return [str(model["id"]) for model in listing["data"] or ()]

    def key_for(self, api_key: str | None) -> str:
        """The key of a request. Raises ModelError if there is none for OpenAI's own server, or if
        no header can carry it; the error does not show it."""
        # The environment's key belongs to OpenAI, or to the environment's address
        key = api_key or self.api_key
        if not key and not self.base_url:
            key = os.environ.get("OPENAI_API_KEY")

        # Without a key only OpenAI's own server is not asked; any other gets the word "none"
        has_own_header = self.headers.keys() & {"authorization", "api-key", self.key_header}
        if not (key or self.address or has_own_header):
            raise ModelError(
                "auth",
                "no key: set OPENAI_API_KEY, or give api_key= or a base_url=; nothing was sent",
            )
        key = (key or "none").strip()
        if not (key.isascii() and key.isprintable()):
            raise ModelError(
                "auth", "the key holds characters that no header can carry: copy it again"
            )
        return key

    def _head(self, url: str, key: str, size: int) -> bytes:
        """The head of a request with `size` bytes of data."""
        parts = urlsplit(url)
        headers = {
            "host": parts.netloc.rpartition("@")[2],
            "accept": "application/json",
            "content-type": "application/json",
            "authorization": f"Bearer {key}",
            "user-agent": f"coder/{__version__}",
            "accept-encoding": "identity",
        }
        headers |= self._account | self.headers
        if self.key_header:
            headers[self.key_header] = key
        headers["content-length"] = str(size)
        target = parts.path
        if parts.query:
            target += f"?{parts.query}"
        method = "POST" if size else "GET"
        head = f"{method} {target} HTTP/1.1\r\n"
        for name, value in headers.items():
            line = f"{name}: {value}"
            if not re.fullmatch(HEADER, line):  # not shown: it may be a key
                raise ModelError("protocol", "a header of the request holds what cannot be sent")
            head += f"{line}\r\n"
        return f"{head}\r\n".encode()


# ---- addresses -----------------------------------------------------------------------------------


def base_of(url: str) -> str:
    """A base URL, also if the address of the call itself was pasted."""
    path, mark, query = url.partition("?")
    return path.rstrip("/").removesuffix(COMPLETIONS) + mark + query


def account_headers(address: str) -> dict[str, str]:
    """The user's organisation and project, for OpenAI's own addresses ("" is one) and no other."""
    headers = {}
    if re.fullmatch(r"(.+\.)?openai\.com(:\d+)?", host_of(address).lower()):
        for name, variable in ACCOUNT.items():
            value = os.environ.get(variable, "").strip()
            if value:
                headers[name] = value
    return headers


def check_address(address: str) -> str:
    """The address. Raises ModelError if it is no base URL."""
    with suppress(ValueError):  # of a port that is no number
        parts = urlsplit(address)
        is_known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        if is_known and re.fullmatch("[!-~]+", address):
            return address
    raise ModelError(
        "protocol",
        f"{shown_url(address)!r} is no base URL: it has to begin with http:// or https://",
    )


# ---- answers that are errors ---------------------------------------------------------------------


def check_status(response: Response) -> None:
    """Raise ModelError for a response whose status is not one of success."""
    status = response.status_code
    if 200 <= status < 300:
        return
    url = shown_url(response.url)
    if not 300 <= status < 600:
        raise ModelError(
            "protocol",
            f"{url} answers with HTTP status {status:03d}, which no answer has",
            status=status,
        )
    if status < 400:
        raise _redirect(response)
    body = _read_start(response)
    try:
        said: Any = json.loads(body)
    except (ValueError, RecursionError):
        said = body.decode("utf-8", "replace")
    error = classify(status, said, response.headers)
    error.body = body[:MAX_ERROR]
    if status == 404 and "model" not in error.message.lower():  # perhaps the address is wrong
        error.message += f" at {url}"
        error.advice = ""
        if "/v1" not in url:
            error.advice = ADVICE["protocol"]
    raise error


def _redirect(response: Response) -> ModelError:
    location = response.headers.get("location", "")
    with suppress(ValueError):  # no address: shown as it is
        location = urljoin(response.url, location)
    target = shown_url(base_of(location))
    return ModelError(
        "protocol",
        f"{shown_url(response.url)} redirects to {target}; redirects are not followed",
        status=response.status_code,
        advice="Set OPENAI_BASE_URL to where the server is.",
    )


def _read_start(response: Response) -> bytes:
    """What can be read of a body, up to MAX_ERROR; some break off."""
    body = b""
    with suppress(ModelError):
        for piece in response.pieces():
            body += piece
            if len(body) >= MAX_ERROR:
                break
    return body


def hide_key(error: ModelError, key: str) -> None:
    """A server's text may repeat the key that it was sent."""
    if len(key) >= SHORTEST_KEY:
        error.message = error.message.replace(key, "***")
        if error.request_id:
            error.request_id = error.request_id.replace(key, "***")
