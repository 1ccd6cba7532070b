"""Reading an answer: the bytes of its body, an event stream or an answer in one piece, into an Assembler.

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
from coder.providers.assembler import Assembler
from coder.providers.errors import classify
from coder.providers.text import shown_url
from coder.types import Completion, ModelError

AFTER_FINISH = 3.0  # seconds to wait for usage and the end mark after a finish_reason
AFTER_DONE = 0.25  # seconds to wait for the end of the body after the end mark
MAX_BODY = 50_000_000  # bytes of an answer in one piece, or of a line: some servers send a whole file in one event
END_MARKS = {"[done]", "[end]", "</s>"}
BOM = b"\xef\xbb\xbf"
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
    """The events of the answer, which feed the assembler. `response` is a http.StreamingRequest; `tap` gets it, and
    each piece of its body."""
    pieces = response.pieces()
    if tap:
        tap(response)
        pieces = ((tap(piece), piece)[1] for piece in pieces)
    start = b""
    while len(start.lstrip()) <= len(BOM) and (piece := next(pieces, b"")):
        start += piece
    begun = start.removeprefix(BOM).lstrip()
    if not begun:
        raise ModelError("incomplete", "the server sent nothing", retryable=True)
    pieces = chain([start], pieces)
    if begun.startswith((b"{", b"[", b"<")):  # JSON or a page, whatever the content type says
        return _read_whole(pieces, assembler, shown_url(response.url))
    return _read_events(pieces, assembler, response.within, idle_timeout)


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
    """A completion, or an error, behind which an end mark may follow, in one piece."""
    body = bytearray()
    for piece in pieces:
        body += piece
        if len(body) > MAX_BODY:
            raise ModelError("protocol", "the answer is too large and no event stream")
    text = body.decode("utf-8-sig", "replace").strip()
    try:
        chunk, end = DECODER.raw_decode(text)
    except ValueError:
        chunk, end = text, len(text)
    known = isinstance(chunk, dict) and chunk.keys() & {"choices", "error", "object"}
    if not known or (end < len(text) and "choices" in chunk):
        problem = f"not an API answer from {url}: {classify(None, chunk).message}"
        raise ModelError("protocol", problem)
    yield from assembler.feed(chunk)
    assembler.done = True


def _finite(digits: str) -> float | None:
    value = float(digits)
    return value if math.isfinite(value) else None


# Python reads NaN, Infinity and 1e999, which no server accepts: null, as JavaScript writes them.
DECODER = json.JSONDecoder(parse_constant=lambda _: None, parse_float=_finite)


def parse_event(event: str, data: str) -> Any:
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
            raise ModelError("incomplete", "the answer was cut off", retryable=True) from error
        problem = f"the stream holds what is no JSON: {data[:80]!r}"
        raise ModelError("protocol", problem, retryable=True) from error
    if event == "error" and not (isinstance(value, dict) and value.get("error")):
        return {"error": value}
    return value


# ---- bytes -> events -------------------------------------------------------------------------------

CUT = "\n"  # the name of an event that the body ended in; no other can be called so


def sse(chunks: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """(event name, data) of each event, CUT for a last one without its blank line. Comments, empty data and other fields
    are passed over."""
    event, data = "", list[str]()
    for lines in _split_chunks(chunks):
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


def _split_chunks(chunks: Iterable[bytes]) -> Iterator[list[str]]:
    """The lines that each chunk ends. CR, LF and CRLF end a line, and nothing else does."""
    held, size, mark = list[bytes](), 0, BOM
    for chunk in filter(None, chunks):
        end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r", 0, -1)) + 1  # a last CR may be half a CRLF
        if end or (held and held[-1].endswith(b"\r")):
            yield _split_lines(b"".join([*held, chunk[:end]]).removeprefix(mark))
            held, size, mark = [], 0, b""
        if end < len(chunk):
            held.append(chunk[end:])
            size += len(chunk) - end
        if size > MAX_BODY:
            raise ModelError("protocol", "a line of the event stream is too long")
    if held:
        yield _split_lines(b"".join(held).removeprefix(mark))


def _split_lines(data: bytes) -> list[str]:
    """Whole lines, decoded together, so that no character is cut."""
    text = data.decode("utf-8", "replace")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.removesuffix("\n").split("\n")


# ---- answers that look right and are not -----------------------------------------------------------

TOOL_MARKUP = re.compile(
    r"<tool_call>|<\|tool_calls?_(section_)?begin|<function=|<\|python_tag\|>|\[TOOL_CALLS\]"
)
MAX_CHARS_PER_TOKEN = 12  # no text has more


def check_context(answer: Completion, window: int) -> None:
    """Raises ModelError where there was no room for a word: some servers report that as an answer cut at its limit."""
    empty = not (answer.text or answer.calls or answer.usage.output)
    if answer.finish == "length" and empty and answer.usage.input >= 0.99 * window:
        raise ModelError("overflow", "the context is full")


def remarks(answer: Completion, has_tools: bool, sent: bytes, window: int) -> Iterator[str]:
    """What the user should know: a tool call written as text, or a server that must have dropped messages."""
    if has_tools and not answer.calls and TOOL_MARKUP.search(answer.text[-4000:]):
        yield "The model wrote a tool call as text: the server's tool parser is missing or off."
    usage = answer.usage
    few = MAX_CHARS_PER_TOKEN * usage.input < len(sent) and len(sent) > 16_000
    if few and not (usage.estimated or usage.cached or b'"image_url"' in sent):
        yield (
            "The server counts fewer tokens than the conversation has: perhaps its context is "
            f"smaller than ours ({window}). Give it more (with Ollama by OLLAMA_CONTEXT_LENGTH, or num_ctx in "
            "the Modelfile), or set CODER_CONTEXT_WINDOW to what it has."
        )
