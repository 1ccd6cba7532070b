"""ChatModel: one streamed chat completion with tools, through the openai client.

The stream is read here, to its end, so that one connection serves a whole run. Two measured reasons: the client's typed
`create()` walks the whole history again for every request (459 ms at 400 steps, against 10), and its stream costs 200 µs a
token and drops the connection (against 15).

What it leaves out: the connection (endpoint.py, connection.py), what a server takes (profile.py), the meaning of the bytes
(wire.py) and of errors (errors.py), and asking again after a failure (loop.py).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from coder.abort import Abort
from coder.address import host_of, shown_url
from coder.connection import Line
from coder.endpoint import Endpoint, well_formed
from coder.profile import BUDGETS, LIMITS, Profile, Refusals, dispensable, profile_of, request_body
from coder.shaping import Shaper
from coder.text import mend_all
from coder.types import Completion, Event, ModelError, Notice, Request
from coder.usage import CHARS_PER_TOKEN, Price, estimate
from coder.wire import CUT, Assembler, sse

AFTER_FINISH = 3.0  # seconds to wait for usage and [DONE] after a finish_reason (F14)
AFTER_DONE = 0.25  # seconds to wait for the end of the body, so that the connection can be used again
FIRST_BYTE_TIMEOUT = 300.0  # seconds: a long prompt on a local server takes minutes (S12)
MOST_REFUSALS = 6  # requests in a row, each without one member more
MAX_BODY = 50_000_000  # bytes of an answer that is no event stream
FIELDS = (b"data:", b"event:", b"id:", b"retry:", b"error:", b":")  # how an event stream may begin
MARKUP = re.compile(r"<tool_call>|<\|tool_calls?_(section_)?begin|<function=|<\|python_tag\|>|\[TOOL_CALLS\]")  # T21


class ChatModel:
    """A model behind an OpenAI-compatible endpoint.

    `base_url` None is the client's default, and then a missing key is taken from OPENAI_API_KEY; an address given here
    never gets a key that was not given with it. `idle_timeout`: seconds without an event that carries data (comments do
    not count: S15), `first_byte_timeout`: seconds to the first of them; 0 is no limit. `extra_body` and `headers` go
    out with every request. `profile` overrides fields of profile.Profile, `budgets` the tokens of the reasoning levels;
    `price` gives Usage its cost. `tap` (say `lambda sent: print`) gets the bytes of each request; what it returns gets the
    response, each piece of its body as received, and at the end the ModelError or None. Raises ValueError for a wrong profile.
    """

    def __init__(self, name: str, *, base_url: str | None = None, api_key: str | None = None, context_window: int = 128_000,
                 idle_timeout: float = 180.0, first_byte_timeout: float = FIRST_BYTE_TIMEOUT,
                 headers: Mapping[str, str] | None = None, extra_body: Mapping[str, Any] | None = None,
                 profile: Mapping[str, Any] | None = None, budgets: Mapping[str, int] = BUDGETS, price: Price | None = None,
                 tap: Callable[[bytes], Callable[[Any], object]] | None = None) -> None:
        self.name = name
        self.context_window = context_window
        self.idle_timeout = idle_timeout or math.inf
        self.first_byte_timeout = first_byte_timeout or math.inf
        self.extra_body = dict(extra_body or {})
        self.endpoint = Endpoint(base_url, api_key, headers or {})
        self.profile: Profile = profile_of(host_of(self.endpoint.address), name, profile)
        self.endpoint.key_header = self.profile.key_header
        self.refusals = Refusals(self.endpoint.address or "", name)
        self.budgets = budgets
        self.price = price
        self.tap = tap
        self._shape = Shaper()
        self._said: set[str] = set()  # what was left out
        self._cut_noticed = False

    def stream(self, request: Request, abort: Abort) -> Generator[Event, None, Completion]:
        """Yield the deltas of one answer, return it whole. Raises ModelError or Aborted."""
        refusals = self.refusals
        for _ in range(MOST_REFUSALS):
            asked = self.body(request, refusals)
            yield from self._left_out(asked, request, refusals)
            assembler = Assembler({tool["function"]["name"] for tool in request.tools}, self.profile.echoed)
            try:
                answer = yield from self._answer(encoded(asked), request, assembler, abort)
            except ModelError as error:
                error.message = self._without_key(error.message, request)
                name = None if assembler.begun else dispensable(error, asked, self.profile)
                if error.kind != "bad_request":
                    self.refusals.learn(refusals)  # what is wrong now is something else
                if name is None:
                    raise
                refusals, failure = refusals.with_one(name, asked.get(name)), error
            else:
                self.refusals.learn(refusals)
                yield from self._remarks(answer, request)
                return answer
        raise failure

    def _left_out(self, asked: dict[str, Any], request: Request, refusals: Refusals) -> Iterator[Event]:
        """Say, once, what a person asked for and the server does not take. A limit may only have changed its name."""
        wanted = {*self.extra_body, *request.options, *(self.profile.reasoning if request.reasoning != "off" else ())}
        wanted -= {*LIMITS} if asked.keys() & {*LIMITS} else set()
        for name in sorted(wanted & refusals.names() - asked.keys() - self._said):
            self._said.add(name)
            yield Notice(f"The server does not take {name!r}, so it is left out.")

    def body(self, request: Request, refusals: Refusals | None = None) -> dict[str, Any]:
        """The JSON that is sent."""
        return request_body(self.name, request, self.profile, refusals or self.refusals, self._shape,
                            extra=self.extra_body, budgets={**self.budgets, **request.budgets})

    def _without_key(self, text: str, request: Request) -> str:
        """A server's text, which may repeat the key that it was sent."""
        try:
            key = self.endpoint.key_for(request.api_key)
        except ModelError:  # one that no header can carry was never sent
            return text
        return text.replace(key, "***") if len(key) > 7 else text

    def _answer(self, data: bytes, request: Request, assembler: Assembler, abort: Abort) -> Generator[Event, None, Completion]:
        """One request and its answer, judged."""
        heard = self.tap(data) if self.tap else None

        def read(response: Any, line: Line) -> Iterator[Event]:
            return self._read(response, assembler, line, heard)

        failure = yield from self.endpoint.exchange(data, request.api_key, abort, self.first_byte_timeout, read)
        if heard:
            heard(failure)
        if failure and not (failure.kind == "network" and assembler.ended):  # F14: whole, only the connection stayed open
            raise failure
        with well_formed():
            yield from assembler.rest()
            return self._judged(assembler.completion(), len(data))

    def _judged(self, answer: Completion, sent: int) -> Completion:
        """F10: a full window and no room for a word is an overflow. C3: usage that was not reported is estimated."""
        if answer.usage.estimated:
            answer.usage = estimate(sent, len(json.dumps(answer.message)))
        usage = answer.usage
        if self.price:
            usage.cost = self.price.of(usage)
        empty = not (answer.text or answer.calls or usage.output)
        if answer.finish == "length" and empty and usage.input >= 0.99 * self.context_window:
            raise ModelError("overflow", "the context is full")
        return answer

    def _remarks(self, answer: Completion, request: Request) -> Iterator[Event]:
        """What a person should know of an answer that looks right and is not."""
        if request.tools and not answer.calls and MARKUP.search(answer.text[-4000:]):
            yield Notice("The model wrote a tool call as text: the server has no tool parser for it, or it is not switched on.")
        usage, sent = answer.usage, sum(len(m["content"]) for m in request.messages if isinstance(m.get("content"), str))
        few = CHARS_PER_TOKEN * 3 * usage.input < sent  # C12; no text has three times as many characters to a token
        if few and sent > 16_000 and not (self._cut_noticed or usage.estimated or usage.cached):
            self._cut_noticed = True
            yield Notice(f"The server counts {usage.input} tokens for {sent} characters: perhaps its context is smaller than ours "
                         f"({self.context_window}), and it cuts what does not fit. Give it more, or set CODER_CONTEXT_WINDOW.")

    # -- reading

    def _read(self, response: Any, assembler: Assembler, line: Line, heard: Callable[[Any], object] | None) -> Iterator[Event]:
        """Feed the assembler to the end of the body."""
        chunks = response.iter_bytes() if "content-encoding" in response.headers else response.iter_raw()  # S14
        if heard:
            heard(response)
            chunks = ((heard(chunk), chunk)[1] for chunk in chunks)
        if "event-stream" not in response.headers.get("content-type", "event-stream"):
            start = b""
            while len(start.lstrip()) < len(max(FIELDS, key=len)) + 3 and (chunk := next(chunks, b"")):
                start += chunk
            if not start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(FIELDS):
                yield from self._read_whole(response, start, chunks, assembler)
                return
            chunks = chain([start], chunks)
        ended = False
        for event, data in sse(chunks):
            if assembler.done or data == "[DONE]":
                assembler.done = True  # S7: what follows is read, so that the connection can serve again, and ignored
                line.within(AFTER_DONE)
                continue
            added = False
            for each in assembler.feed(_parse(event, data)):
                added = True
                yield each
            if added or not ended:  # F14: what comes behind the end and adds nothing is no reason to wait on
                line.within(AFTER_FINISH if assembler.finish_reason else self.idle_timeout)
            ended = bool(assembler.finish_reason)

    def _read_whole(self, response: Any, start: bytes, chunks: Iterator[bytes], assembler: Assembler) -> Iterator[Event]:
        """S10: an answer that is no event stream: a completion, an error, or something else altogether."""
        body = b"".join(_at_most(chain([start], chunks), MAX_BODY))
        try:
            chunk = json.loads(body)
        except ValueError:
            chunk = None
        if not isinstance(chunk, dict) or not (chunk.keys() & {"choices", "error"} or chunk.get("object") == "error"):
            raise ModelError("protocol", f"not an API answer from {shown_url(str(response.url))}")
        yield from assembler.feed(chunk)
        assembler.done = True


NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")  # escaped; not where the backslash itself is


def encoded(body: dict[str, Any]) -> bytes:
    """The bytes of a request; what no encoder takes is mended (R24, R25). Raises ModelError for what is no JSON."""
    try:
        data = _dumped(body)
        if data is None or (b"\\u0000" in data and NUL.search(data)):  # a hook may have put it in
            data = _dumped(mend_all(body)) or b""
        return data
    except (TypeError, ValueError, RecursionError) as error:
        raise ModelError("bad_request", f"what was to be sent is no JSON: {error}") from error


def _dumped(body: Any) -> bytes | None:
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return None


def _parse(event: str, data: str) -> Any:
    """The JSON of one event. Raises ModelError where it is none: a piece of the answer is lost (S13)."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        if event == "error":
            return {"error": data}
        if event == CUT:
            raise ModelError("incomplete", "the answer was cut off", retryable=True) from error
        raise ModelError("protocol", f"the stream holds what is no JSON: {data[:80]!r}", retryable=True) from error
    return value if event != "error" or (isinstance(value, dict) and value.get("error")) else {"error": value}  # S8


def _at_most(chunks: Iterable[bytes], limit: int) -> Iterator[bytes]:
    for chunk in chunks:
        limit -= len(chunk)
        if limit < 0:
            raise ModelError("protocol", "the answer is too large and no event stream")
        yield chunk
