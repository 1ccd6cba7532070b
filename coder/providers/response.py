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
from coder.providers.assembler import CUT, Assembler, sse
from coder.providers.errors import classify
from coder.types import Completion, ModelError, Request, Usage

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


def read_answer(
    response: Any,
    assembler: Assembler,
    idle_timeout: float,
    tap: Callable[[Any], object] | None,
) -> Iterator[Event]:
    """The events of the answer, which feed the assembler. `tap` gets the response and each piece of its body."""
    chunks = response.pieces()
    if tap:
        tap(response)
        chunks = ((tap(chunk), chunk)[1] for chunk in chunks)
    start = b""
    while len(start.lstrip()) < len(max(FIELDS, key=len)) + 3 and (chunk := next(chunks, b"")):
        start += chunk
    if not start.strip():
        raise ModelError("incomplete", "the server sent nothing", retryable=True, advice=TOO_SMALL)
    chunks = chain([start], chunks)
    if is_event_stream(response.headers.get("content-type", "event-stream"), start):
        return _read_events(chunks, assembler, response.within, idle_timeout)
    return _read_whole(chunks, assembler, shown_url(str(response.url)))


def is_event_stream(content_type: str, start: bytes) -> bool:
    """By how the body begins: JSON or a page may come under the content type of a stream."""
    begun = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if begun.startswith(FIELDS):
        return True
    return "event-stream" in content_type and not begun.startswith(NO_EVENTS)


def _read_events(
    chunks: Iterable[bytes],
    assembler: Assembler,
    within: Callable[[float], None],
    idle_timeout: float,
) -> Iterator[Event]:
    ended = False
    for event, data in sse(chunks):
        over = assembler.done or (data[:1] != "{" and data.strip().lower() in END_MARKS)
        try:
            parsed = None if over else parse_event(event, data)
        except ModelError as error:
            over = bool(assembler.finish_reason) and error.kind == "protocol"  # another end mark
            if not over:
                raise
        if over:
            assembler.done = True  # what follows is read and ignored
            within(AFTER_DONE)
            continue
        added = False
        for each in assembler.feed(parsed):
            added = True
            yield each
        if added or not ended:  # after the end, what adds nothing prolongs no wait
            within(AFTER_FINISH if assembler.finish_reason else idle_timeout)
        ended = bool(assembler.finish_reason)


def _read_whole(chunks: Iterable[bytes], assembler: Assembler, url: str) -> Iterator[Event]:
    """A completion or an error in one piece. Behind an error an end mark may follow; behind a completion,
    more of the answer: then it is no completion."""
    body = b"".join(_at_most(chunks, MAX_BODY)).decode("utf-8-sig", "replace").strip()
    try:
        chunk, end = DECODER.raw_decode(body)
    except ValueError:
        chunk, end = body, len(body)
    known = isinstance(chunk, dict) and (
        (end == len(body) and chunk.keys() & {"choices", "error"})
        or chunk.get("error")
        or chunk.get("object") == "error"
    )
    if not known:
        problem = f"not an API answer from {url}: {classify(None, chunk).message}"
        raise ModelError("protocol", problem)
    yield from assembler.feed(chunk)
    assembler.done = True


def _at_most(chunks: Iterable[bytes], limit: int) -> Iterator[bytes]:
    for chunk in chunks:
        limit -= len(chunk)
        if limit < 0:
            raise ModelError("protocol", "the answer is too large and no event stream")
        yield chunk


# ---- JSON ------------------------------------------------------------------------------------------------


def _finite(digits: str) -> float | None:
    value = float(digits)
    return value if math.isfinite(value) else None


# Python reads NaN, Infinity and 1e999, which no server accepts: null, as JavaScript writes them.
DECODER = json.JSONDecoder(parse_constant=lambda _: None, parse_float=_finite)


def parse_event(event: str, data: str) -> Any:
    """The JSON of one event. Raises ModelError where it is none, since a piece of the answer is lost."""
    try:
        value = DECODER.decode(data)
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


# ---- answers that look right and are not -----------------------------------------------------------------


def tool_markup(answer: Completion, request: Request) -> str:
    """A notice, if a tool call was written as text; else ""."""
    if request.tools and not answer.calls and TOOL_MARKUP.search(answer.text[-4000:]):
        return (
            "The model wrote a tool call as text: the server has no tool parser for it, "
            "or it is not switched on."
        )
    return ""


def truncated_context(usage: Usage, request: Request, window: int) -> str:
    """A notice, if the server counts so few tokens that it must have dropped messages; else ""."""
    texts = (message.get("content") for message in request.messages)
    sent = sum(len(text) for text in texts if isinstance(text, str))
    few = MAX_CHARS_PER_TOKEN * usage.input < sent
    if not few or sent <= 16_000 or usage.estimated or usage.cached:
        return ""
    return (
        f"The server counts {usage.input} tokens for {sent} characters: perhaps its context is "
        f"smaller than ours ({window}), and it cuts what does not fit. Give it more, or set "
        "CODER_CONTEXT_WINDOW."
    )


# What reading an answer raises whose members are not of the kind that the API has.
MALFORMED = (
    AttributeError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    RecursionError,
    AssertionError,
)


@contextmanager
def well_formed() -> Iterator[None]:
    """Inside, an answer is read. Raises ModelError where it is malformed: no server may break a run."""
    try:
        yield
    except MALFORMED as error:
        message = f"the answer is malformed ({type(error).__name__}: {error})"[:200]
        raise ModelError("protocol", message, retryable=True) from error
