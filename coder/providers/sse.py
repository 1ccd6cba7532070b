"""The body of an answer -> deltas: an event stream, or one JSON document, whatever its content type
says.

An answer is read to its end, so that its connection can serve the next request.
"""

from __future__ import annotations

import io
import json
import math
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Protocol

from coder.events import Event
from coder.providers.assembler import CUT_OFF, Assembler
from coder.providers.errors import classify
from coder.providers.text import shown_url
from coder.types import ModelError

AFTER_FINISH = 3.0  # seconds to wait for usage and the end mark after a finish_reason
AFTER_DONE = 0.25  # seconds to wait for the end of the body after the end mark
# bytes of a document, or of a line: some servers send a whole file in one event
MAX_BODY = 50_000_000
END_MARKS = {"[done]", "[end]", "</s>"}
END: Any = object()  # the parsed form of an end mark
BOM = b"\xef\xbb\xbf"
CUT_EVENT = "\n"  # the name of an event that the end of the body has cut; no real name has a \n


class Response(Protocol):
    """An HTTP response whose head has come."""

    url: str
    status_code: int

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers, their names in lower case."""
        ...

    @property
    def is_framed(self) -> bool:
        """Whether a cut of the body is noticed; otherwise it looks like the end."""
        ...

    def set_deadline(self, seconds: float) -> None:
        """Data has to come within so many seconds from now."""
        ...

    def pieces(self) -> Iterator[bytes]:
        """The body, piece by piece as it comes. Raises ModelError or Aborted."""
        ...


class Tap(Protocol):
    """Sees the answer to one request."""

    def head(self, response: Response) -> object: ...

    def piece(self, data: bytes) -> object: ...

    def ended(self, error: ModelError | None) -> object: ...


def read_answer(
    response: Response,
    assembler: Assembler,
    idle_timeout: float,
    tap: Tap | None,
) -> Iterator[Event]:
    """Feed a response to the assembler; yields its deltas. Raises ModelError or Aborted.

    Its first text decides how it is read: as one document, or as events.
    """
    pieces = response.pieces()
    if tap:
        tap.head(response)
        pieces = _tapped(pieces, tap)
    start = _read_until_text(pieces).removeprefix(BOM)
    text = start.lstrip()
    if not text:
        raise ModelError("incomplete", "the server sent nothing", retryable=True)
    body = chain([start], pieces)
    if text.startswith((b"{", b"[", b"<")):
        return _read_document(response, body, assembler)
    return _read_events(response, body, assembler, idle_timeout)


def _tapped(pieces: Iterable[bytes], tap: Tap) -> Iterator[bytes]:
    for piece in pieces:
        tap.piece(piece)
        yield piece


def _read_until_text(pieces: Iterable[bytes]) -> bytes:
    """The beginning of a body. White space and a byte order mark do not say what follows."""
    start = b""
    for piece in pieces:
        start += piece
        if len(start.lstrip()) > len(BOM):
            break
    return start


def _read_events(
    response: Response,
    body: Iterable[bytes],
    assembler: Assembler,
    idle_timeout: float,
) -> Iterator[Event]:
    """Feed the events one by one. After the end mark they are read to the end, and ignored."""
    for event, data in sse(body):
        had_finished = bool(assembler.finish_reason)
        # The end mark, or a chunk. Inline, since this runs for each token
        if assembler.has_end_mark or (data[:1] != "{" and data.strip().lower() in END_MARKS):
            chunk = END
        else:
            chunk = _parse_event(event, data, had_finished)
        if chunk is END:
            assembler.has_end_mark = True
            response.set_deadline(AFTER_DONE)
            continue

        # Its deltas, and how long to wait for the next event: after a finish_reason only deltas
        # make that longer
        deltas = assembler.feed(chunk)
        yield from deltas
        if deltas or not had_finished:
            response.set_deadline(AFTER_FINISH if assembler.finish_reason else idle_timeout)


# ---- one document --------------------------------------------------------------------------------


def _finite(digits: str) -> float | None:
    value = float(digits)
    return value if math.isfinite(value) else None


# Python reads NaN, Infinity and 1e999, which no server accepts: null, as JavaScript writes them.
DECODER = json.JSONDecoder(parse_constant=lambda _: None, parse_float=_finite)


def _read_document(
    response: Response, body: Iterable[bytes], assembler: Assembler
) -> Iterator[Event]:
    """Feed the one document: a completion, or an error. After an error an end mark may follow."""
    data = bytearray()
    for piece in body:
        data += piece
        if len(data) > MAX_BODY:
            raise ModelError("protocol", "the answer is too large and no event stream")
    text = data.decode("utf-8", "replace").strip()
    try:
        document, end = DECODER.raw_decode(text)
    except ValueError as error:
        if text.startswith("{") and not response.is_framed:
            raise ModelError("incomplete", CUT_OFF, retryable=True) from error
        raise _no_api_answer(response, text) from error
    members = document.keys() if isinstance(document, dict) else set()
    is_api_answer = members & {"choices", "error", "object"}
    has_more_choices = "choices" in members and end < len(text)  # a stream of another kind
    if not is_api_answer or has_more_choices:
        raise _no_api_answer(response, document)
    yield from assembler.feed(document)
    assembler.has_end_mark = True


def _no_api_answer(response: Response, document: Any) -> ModelError:
    said = classify(None, document).message
    return ModelError("protocol", f"not an API answer from {shown_url(response.url)}: {said}")


# ---- an event stream -----------------------------------------------------------------------------


def _parse_event(event: str, data: str, had_finished: bool) -> Any:
    """The JSON of one event, or END. Raises ModelError if a piece of the answer is lost."""
    try:
        text = data.strip()
        value, end = DECODER.raw_decode(text)
        if end < len(text):
            raise ValueError("something follows")
    except (ValueError, RecursionError) as error:
        if event == "error":
            return {"error": data}
        if event == CUT_EVENT:
            raise ModelError("incomplete", CUT_OFF, retryable=True) from error
        if had_finished:  # an end mark in another form
            return END
        raise ModelError(
            "protocol",
            f"the stream holds what is no JSON: {data[:80]!r}",
            retryable=True,
        ) from error
    if event == "error" and not (isinstance(value, dict) and value.get("error")):
        return {"error": value}
    return value


def sse(chunks: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """(event name, data) of each event. The body may end without the blank line that ends an event:
    then the name of the last one is CUT_EVENT.

    Comments, empty data and other fields are passed over.
    """
    event = ""
    data: list[str] = []
    for lines in _split_chunks(chunks):
        for line in lines:
            if line.startswith("data:"):
                data.append(line[5:].removeprefix(" "))
            elif not line:
                if any(data):
                    yield event, "\n".join(data)
                event = ""
                data = []
            elif line.startswith("event:"):
                event = line[6:].strip()
            elif line.startswith("error:"):  # some servers send an error as a field of its own
                yield "error", line[6:].strip()
    if any(data):  # perhaps whole, as a [DONE]
        name = "error" if event == "error" else CUT_EVENT
        yield name, "\n".join(data)


def _split_chunks(chunks: Iterable[bytes]) -> Iterator[list[str]]:
    """For each chunk, the lines that are whole with it. CR, LF and CRLF end a line, nothing else
    does."""
    utf8 = getincrementaldecoder("utf-8")("replace")
    decode = io.IncrementalNewlineDecoder(utf8, translate=True).decode
    held: list[str] = []  # the pieces of a line that is not at its end
    size = 0
    for chunk in chunks:
        # The text goes on with the line that is held. Each "\n" ends a line; the last piece, "" if
        # the text ends there, begins another one
        first, *others = decode(chunk).split("\n")
        held.append(first)
        size += len(first)
        if size > MAX_BODY:
            raise ModelError("protocol", "a line of the event stream is too long")
        if others:
            yield ["".join(held), *others[:-1]]
            held = others[-1:]
            size = len(others[-1])
    rest = "".join([*held, decode(b"", final=True)])
    if rest:
        yield rest.removesuffix("\n").split("\n")
