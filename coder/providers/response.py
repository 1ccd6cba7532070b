"""Reading the body of a response: an event stream, or an answer in one piece, into an Assembler.

The body is read to its end, so that the connection can serve the next request.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from coder.events import Event
from coder.providers.address import shown_url
from coder.providers.assembler import Assembler
from coder.providers.errors import classify
from coder.types import Completion, ModelError, Request

AFTER_FINISH = 3.0  # seconds to wait for usage and the end mark after a finish_reason
AFTER_DONE = 0.25  # seconds to wait for the end of the body after the end mark
MAX_BODY = 50_000_000  # bytes of an answer that is no event stream
FIELDS = (b"data:", b"event:", b"id:", b"retry:", b"error:", b":")  # how an event stream may begin
NO_EVENTS = (b"{", b"[", b"<")  # how none begins, whatever its content type is
END_MARKS = {"[done]", "[end]", "</s>"}
TOO_SMALL = (
    "Look at its log: the context that it was started with may be too small for the conversation."
)
TOOL_MARKUP = re.compile(
    r"<tool_call>|<\|tool_calls?_(section_)?begin|<function=|<\|python_tag\|>|\[TOOL_CALLS\]"
)
MAX_CHARS_PER_TOKEN = 12  # no text has more
# What reading an answer raises whose members are not of the kind that the API has.
MALFORMED = (AttributeError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError)


@contextmanager
def well_formed() -> Iterator[None]:
    """Inside, an answer is read. Raises ModelError where it is malformed."""
    try:
        yield
    except MALFORMED as error:
        message = f"the answer is malformed ({type(error).__name__}: {error})"[:200]
        raise ModelError("protocol", message, retryable=True) from error


def read_answer(
    response: Any,
    assembler: Assembler,
    idle_timeout: float,
    tap: Callable[[Any], object] | None,
) -> Iterator[Event]:
    """The events of the answer, which feed the assembler. `response` is an http.StreamingRequest; `tap` gets it, and each
    piece of its body."""
    pieces = response.pieces()
    if tap:
        tap(response)
        pieces = ((tap(piece), piece)[1] for piece in pieces)
    start = b""
    while len(start.lstrip()) < len(max(FIELDS, key=len)) + 3 and (piece := next(pieces, b"")):
        start += piece
    if not start.strip():
        raise ModelError("incomplete", "the server sent nothing", retryable=True, advice=TOO_SMALL)
    pieces = chain([start], pieces)
    if is_event_stream(response.headers.get("content-type", "event-stream"), start):
        return _read_events(pieces, assembler, response.within, idle_timeout)
    return _read_whole(pieces, assembler, shown_url(str(response.url)))


def is_event_stream(content_type: str, start: bytes) -> bool:
    """By how the body begins: JSON or a page may come under the content type of a stream."""
    begun = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if begun.startswith(FIELDS):
        return True
    return "event-stream" in content_type and not begun.startswith(NO_EVENTS)


def _read_events(
    pieces: Iterable[bytes],
    assembler: Assembler,
    within: Callable[[float], None],
    idle_timeout: float,
) -> Iterator[Event]:
    for event, data in sse(pieces):
        ended = bool(assembler.finish_reason)
        over = assembler.done or (data[:1] != "{" and data.strip().lower() in END_MARKS)
        try:
            parsed = None if over else parse_event(event, data)
        except ModelError as error:
            over = ended and error.kind == "protocol"  # another end mark
            if not over:
                raise
        if over:
            assembler.done = True  # what follows is read and ignored
            within(AFTER_DONE)
            continue
        deltas = assembler.feed(parsed)
        yield from deltas
        if deltas or not ended:  # after the end, what adds nothing prolongs no wait
            within(AFTER_FINISH if assembler.finish_reason else idle_timeout)


def _read_whole(pieces: Iterable[bytes], assembler: Assembler, url: str) -> Iterator[Event]:
    """A completion or an error in one piece. Behind an error an end mark may follow; behind a completion,
    more of the answer: then it is no completion."""
    body = b""
    for piece in pieces:
        body += piece
        if len(body) > MAX_BODY:
            raise ModelError("protocol", "the answer is too large and no event stream")
    text = body.decode("utf-8-sig", "replace").strip()
    try:
        chunk, end = DECODER.raw_decode(text)
    except ValueError:
        chunk, end = text, len(text)
    whole = isinstance(chunk, dict) and end == len(text) and chunk.keys() & {"choices", "error"}
    failed = isinstance(chunk, dict) and (chunk.get("error") or chunk.get("object") == "error")
    if not (whole or failed):
        problem = f"not an API answer from {url}: {classify(None, chunk).message}"
        raise ModelError("protocol", problem)
    yield from assembler.feed(chunk)
    assembler.done = True


def _finite(digits: str) -> float | None:
    value = float(digits)
    return value if math.isfinite(value) else None


# Python reads NaN, Infinity and 1e999, which no server accepts: null, as JavaScript writes them.
DECODER = json.JSONDecoder(parse_constant=lambda _: None, parse_float=_finite)


_scan: Any = getattr(DECODER, "scan_once")  # noqa: B009 (not in the types)


def _decoded(data: str) -> Any:
    """DECODER.decode(data); the calls around its scanner are left out where nothing follows on the value."""
    if data.startswith("{"):
        value, end = _scan(data, 0)
        if end == len(data):
            return value
    return DECODER.decode(data)


def parse_event(event: str, data: str) -> Any:
    """The JSON of one event. Raises ModelError where it is none, since a piece of the answer is lost."""
    try:
        value = _decoded(data)
    except (ValueError, RecursionError) as error:
        if event == "error":
            return {"error": data}
        if event == CUT:
            raise ModelError("incomplete", "the answer was cut off", retryable=True) from error
        problem = f"the stream holds what is no JSON: {data[:80]!r}"
        raise ModelError("protocol", problem, retryable=True) from error
    if event == "error" and not (isinstance(value, dict) and value.get("error")):
        return {"error": value}
    return value


# ---- bytes -> events ------------------------------------------------------------------------------

BOM = b"\xef\xbb\xbf"
MAX_LINE = 50_000_000  # bytes: some servers send a whole file in one event
CUT = "\n"  # the name of an event that the body ended in; no other can be called so


def sse(chunks: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """(event name, data) of each event, CUT for a last one without its blank line. Comments, empty data and other fields
    are passed over."""
    event, data = "", list[str]()
    for lines in _lines(chunks):
        for line in lines:
            if line.startswith("data:"):
                data.append(line[6:] if line.startswith("data: ") else line[5:])
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


def _lines(chunks: Iterable[bytes]) -> Iterator[list[str]]:
    """The lines that each chunk ends. CR, LF and CRLF end a line, and nothing else does."""
    held, size, mark = list[bytes](), 0, BOM
    for chunk in filter(None, chunks):
        end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r", 0, -1)) + 1  # a last CR may be half a CRLF
        if end or (held and held[-1].endswith(b"\r")):
            yield _split(b"".join([*held, chunk[:end]]).removeprefix(mark))
            held, size, mark = [], 0, b""
        if end < len(chunk):
            held.append(chunk[end:])
            size += len(chunk) - end
        if size > MAX_LINE:
            raise ModelError("protocol", "a line of the event stream is too long")
    if held:
        yield _split(b"".join(held).removeprefix(mark))


def _split(data: bytes) -> list[str]:
    """Whole lines, decoded together, so that no character is cut."""
    text = data.decode("utf-8", "replace")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.removesuffix("\n").split("\n")


# ---- answers that look right and are not -----------------------------------------------------------------


def check_context(answer: Completion, window: int) -> None:
    """Raises ModelError where there was no room for a word: some servers report that as an answer cut at its limit."""
    empty = not (answer.text or answer.calls or answer.usage.output)
    if answer.finish == "length" and empty and answer.usage.input >= 0.99 * window:
        raise ModelError("overflow", "the context is full")


def remarks(answer: Completion, request: Request, window: int) -> Iterator[str]:
    """What the user should know: a tool call written as text, or a server that must have dropped messages."""
    if request.tools and not answer.calls and TOOL_MARKUP.search(answer.text[-4000:]):
        yield (
            "The model wrote a tool call as text: the server has no tool parser for it, "
            "or it is not switched on."
        )
    usage = answer.usage
    texts = (message.get("content") for message in request.messages)
    sent = sum(len(text) for text in texts if isinstance(text, str))
    few = MAX_CHARS_PER_TOKEN * usage.input < sent and sent > 16_000
    if few and not usage.estimated and not usage.cached:
        yield (
            "The server counts fewer tokens than the conversation has: perhaps its context is "
            f"smaller than ours ({window}), and it cuts what does not fit. Give it more, or set "
            "CODER_CONTEXT_WINDOW."
        )
