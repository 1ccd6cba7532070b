"""Endpoint: one server's address, its key, and requests to it; and its answers as events, into an Assembler.

Requests are made here. The openai client, whose import takes 0.15 s, supplies the address of OpenAI's own server and the
user's headers for it where no address is given; it is not imported for any other. Redirects are not followed: they would
carry the conversation to another host. Retries are the loop's. An answer is read to its end, so that its connection can
serve the next request.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any
from urllib.parse import urljoin, urlsplit

from coder.abort import Abort
from coder.events import Event
from coder.providers.assembler import CUT_OFF, Assembler
from coder.providers.connection import Server, StreamingRequest
from coder.providers.errors import ADVICE, classify, well_formed
from coder.providers.text import host_of, shown_url
from coder.types import ModelError

CALL, LIST = "/chat/completions", "/models"
MAX_ERROR = 1_000_000  # bytes of an error's body that are read
ACCOUNT = {"openai-organization": "OPENAI_ORG_ID", "openai-project": "OPENAI_PROJECT_ID"}
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
        self.server: Server | None = None  # from the first request on
        self._default_headers: dict[str, str] = {}  # headers of each request

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
        self.server = self.server or Server(self._find_base(key), self.redact)
        base, mark, query = self.server.url.partition("?")  # Azure's ?api-version=
        url = base.rstrip("/") + path + mark + query
        message = self._head(url, path, key, len(data)) + data
        request = StreamingRequest(self.server, url, abort, seconds)
        with abort.calling(request.cut):
            try:
                request.send(message)
                if not 200 <= request.status_code < 300:
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

    def _find_base(self, key: str) -> str:
        from coder import __version__  # late: it imports this module's users

        address, headers = self.address, dict[str, str]()
        if not address:
            client = openai_client(key)
            address = str(client.base_url)
            for name, value in client.default_headers.items():
                # some are marked as left out; others say that the client itself is what sends
                if isinstance(value, str) and not name.lower().startswith("x-stainless"):
                    headers[name.lower()] = value
        elif re.fullmatch(r"(.+\.)?openai\.com(:\d+)?", host_of(address).lower()):
            for name, variable in ACCOUNT.items():
                if value := os.environ.get(variable, "").strip():
                    headers[name] = value
        headers["user-agent"] = f"coder/{__version__}"
        self._default_headers = headers  # once: another thread may send its first request beside
        with suppress(ValueError):
            parts = urlsplit(address)
            known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            if known and re.fullmatch("[!-~]+", address):
                return address
        message = f"{shown_url(address)!r} is no base URL: it has to begin with http:// or https://"
        raise ModelError("protocol", message)

    def _head(self, url: str, path: str, key: str, size: int) -> bytes:
        parts = urlsplit(url)
        headers = {
            "host": parts.netloc.rpartition("@")[2],
            "accept": "application/json",
            "content-type": "application/json",
            "authorization": f"Bearer {key}",
            **self._default_headers,
            "accept-encoding": "identity",
            **self.headers,
            **({self.key_header: key} if self.key_header else {}),
            "content-length": str(size),
        }
        lines = [f"{name}: {value}" for name, value in headers.items()]
        if not all(map(HEADER.fullmatch, lines)):  # not shown: it may be a key
            raise ModelError("protocol", "a header of the request holds what cannot be sent")
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        method = "POST" if path == CALL else "GET"
        return "\r\n".join([f"{method} {target} HTTP/1.1", *lines, "", ""]).encode()

    def _refusal(self, request: StreamingRequest) -> ModelError:
        """The error of a status that is none of success. What can be read of the body counts; some break off."""
        url, status = shown_url(request.url), request.status_code
        if not 300 <= status < 600:
            message = f"{url} answers with HTTP status {status:03d}, which is none of an answer"
            return ModelError("protocol", message, status=status)
        if status < 400:
            location = request.headers.get("location", "")
            with suppress(ValueError):  # no address: shown as it is
                location = urljoin(request.url, location)
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


# ---- answers -> events ------------------------------------------------------------------------------

AFTER_FINISH = 3.0  # seconds to wait for usage and the end mark after a finish_reason
AFTER_DONE = 0.25  # seconds to wait for the end of the body after the end mark
MAX_BODY = 50_000_000  # bytes of an answer in one piece, or of a line: some servers send a whole file in one event
END_MARKS = {"[done]", "[end]", "</s>"}
BOM = b"\xef\xbb\xbf"


def read_answer(
    response: StreamingRequest,
    assembler: Assembler,
    idle_timeout: float,
    tap: Callable[[Any], object] | None,
) -> Iterator[Event]:
    """The events of the answer, which feed the assembler. `tap` gets the response, and each piece of its body."""
    pieces = response.pieces()
    if tap:
        tap(response)
        pieces = _tapped(pieces, tap)
    start = b""
    while len(start.lstrip()) <= len(BOM) and (piece := next(pieces, b"")):
        start += piece
    begun = start.removeprefix(BOM).lstrip()
    if not begun:
        raise ModelError("incomplete", "the server sent nothing", retryable=True)
    pieces = chain([start], pieces)
    if begun.startswith((b"{", b"[", b"<")):  # JSON or a page, whatever the content type says
        yield from _read_whole(response, pieces, assembler)
        return
    for event, data in sse(pieces):
        ended = bool(assembler.finish_reason)
        over = assembler.done or (data[:1] != "{" and data.strip().lower() in END_MARKS)
        try:
            parsed = None if over else _parse_event(event, data)
        except ModelError as error:
            over = ended and error.kind == "protocol"  # another end mark
            if not over:
                raise
        if over:
            assembler.done = True  # what follows is read and ignored
            response.within(AFTER_DONE)
            continue
        deltas = assembler.feed(parsed)
        yield from deltas
        if deltas or not ended:  # after the end, what adds nothing prolongs no wait
            response.within(AFTER_FINISH if assembler.finish_reason else idle_timeout)


def _tapped(pieces: Iterable[bytes], tap: Callable[[Any], object]) -> Iterator[bytes]:
    for piece in pieces:
        tap(piece)
        yield piece


def _read_whole(
    response: StreamingRequest, pieces: Iterable[bytes], assembler: Assembler
) -> Iterator[Event]:
    """A completion, or an error, behind which an end mark may follow, in one piece."""
    body = bytearray()
    for piece in pieces:
        body += piece
        if len(body) > MAX_BODY:
            raise ModelError("protocol", "the answer is too large and no event stream")
    text = body.decode("utf-8-sig", "replace").strip()
    try:
        chunk, end = DECODER.raw_decode(text)
    except ValueError as error:
        if text.startswith("{") and not response.is_framed:
            raise ModelError("incomplete", CUT_OFF, retryable=True) from error
        chunk, end = text, len(text)
    known = isinstance(chunk, dict) and chunk.keys() & {"choices", "error", "object"}
    if not known or (end < len(text) and "choices" in chunk):
        url = shown_url(response.url)
        problem = f"not an API answer from {url}: {classify(None, chunk).message}"
        raise ModelError("protocol", problem)
    yield from assembler.feed(chunk)
    assembler.done = True


def _finite(digits: str) -> float | None:
    value = float(digits)
    return value if math.isfinite(value) else None


# Python reads NaN, Infinity and 1e999, which no server accepts: null, as JavaScript writes them.
DECODER = json.JSONDecoder(parse_constant=lambda _: None, parse_float=_finite)


def _parse_event(event: str, data: str) -> Any:
    """The JSON of one event. Raises ModelError where it is none, since a piece of the answer is lost."""
    try:
        text = data.strip()
        value, end = DECODER.raw_decode(text)
        if end < len(text):
            raise ValueError("something follows")
    except (ValueError, RecursionError) as error:
        if event == "error":
            return {"error": data}
        if event == CUT:
            raise ModelError("incomplete", CUT_OFF, retryable=True) from error
        problem = f"the stream holds what is no JSON: {data[:80]!r}"
        raise ModelError("protocol", problem, retryable=True) from error
    if event == "error" and not (isinstance(value, dict) and value.get("error")):
        return {"error": value}
    return value


CUT = "\n"  # the name of an event that the body ended in; no other can be called so


def sse(chunks: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """(event name, data) of each event, CUT for a last one without its blank line. Comments, empty data and other fields
    are passed over."""
    event, data = "", list[str]()
    for lines in _split_chunks(chunks):
        for line in lines:
            if line.startswith("data:"):
                data.append(line[5:].removeprefix(" "))
            elif not line:
                if any(data):
                    yield event, data[0] if len(data) == 1 else "\n".join(data)
                event, data = "", []
            elif line.startswith("event:"):
                event = line[6:].strip()
            elif line.startswith("error:"):  # some servers send an error as a field of its own
                yield "error", line[6:].strip()
    if any(data):  # perhaps whole, as a [DONE]
        yield event if event == "error" else CUT, "\n".join(data)


def _split_chunks(chunks: Iterable[bytes]) -> Iterator[list[str]]:
    """The lines that each chunk ends. CR, LF and CRLF end a line, and nothing else does."""
    utf8 = getincrementaldecoder("utf-8-sig")("replace")
    decode = io.IncrementalNewlineDecoder(utf8, translate=True).decode
    held, size = list[str](), 0  # the line that is not at its end
    for chunk in chunks:
        first, *others = decode(chunk).split("\n")
        held.append(first)
        size += len(first)
        if size > MAX_BODY:
            raise ModelError("protocol", "a line of the event stream is too long")
        if others:
            yield ["".join(held), *others[:-1]]
            held, size = others[-1:], len(others[-1])
    if rest := "".join([*held, decode(b"", final=True)]):
        yield rest.removesuffix("\n").split("\n")
