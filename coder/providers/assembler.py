"""Bytes of an event stream -> one Completion. Tolerant of what real servers send.

Three stages, each usable alone: `sse` finds the events in the bytes, `Assembler.feed` takes one chunk (the JSON of an
event) and yields deltas, `Assembler.completion` judges the whole. Every rule names the observation behind it (F3, C6,
S5 ...; tests/data/quirks.jsonl replays them). No rule asks who the server is.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from typing import Any

from coder.events import Event, ReasoningDelta, TextDelta
from coder.providers.errors import classify
from coder.providers.reasoning import ECHOED, REASONING, THINK, ThinkTag, joined
from coder.providers.text import mend, mend_all
from coder.providers.tool_call_deltas import Calls
from coder.providers.usage import read_usage
from coder.types import Completion, Finish, Message, ModelError, ToolCall, Usage

# ---- bytes -> events -------------------------------------------------------------------------------------

MAX_LINE = 50_000_000  # bytes (C13: a whole file in one event is no rarity)
CUT = "\n"  # the name of an event that the body ended in; no other can be called so


def sse(chunks: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """(event name, data) of each event, CUT for a last one without its blank line. Comments, empty data and other fields are
    passed over (S1, S2)."""
    event, data = "", list[str]()
    for line in _lines(chunks):
        if line.startswith("data:"):
            # S4: the space is optional
            data.append(line[6:] if line.startswith("data: ") else line[5:])
        elif line.startswith("event:"):
            event = line[6:].strip()
        elif line.startswith("error:"):  # S9: an error as a field of its own
            yield "error", line[6:].strip()
        elif not line:
            if any(data):
                yield event, "\n".join(data)
            event, data = "", []
    if any(data):  # S7: perhaps whole, as a [DONE]
        yield event if event == "error" else CUT, "\n".join(data)


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Lines ended by CR, LF or CRLF and by nothing else (S4, S5), decoded whole, so that no character is cut (S6)."""
    tail, size, mark = list[bytes](), 0, "\ufeff"
    for chunk in chunks:
        if b"\n" not in chunk and b"\r" not in chunk:  # a long line: joined once, at its end
            tail.append(chunk)
            size += len(chunk)
            if size > MAX_LINE:
                raise ModelError("protocol", "a line of the event stream is too long")
            continue
        lines = b"".join([*tail, chunk]).splitlines(keepends=True)
        # a CR at the very end may be half of a CRLF: keep it for the next chunk
        tail = [lines.pop()] if not lines[-1].endswith(b"\n") else []
        size = len(tail[0]) if tail else 0
        for line in lines:
            text = line.decode("utf-8", "replace").rstrip("\r\n")
            if mark:
                text, mark = text.removeprefix(mark), ""  # S5: a BOM at the start
            yield text
    yield from (
        line.decode("utf-8", "replace").removeprefix(mark) for line in b"".join(tail).splitlines()
    )


# ---- chunks -> completion --------------------------------------------------------------------------------

LENGTH = {"length", "max_tokens", "model_length", "max_output_tokens"}  # F7, F11
# F8, F15
FILTER = {
    "content_filter",
    "sensitive",
    "safety",
    "refusal",
    "guardrail_intervened",
    "error_toxic",
    "recitation",
    "prohibited_content",
    "blocklist",
    "spii",
}
# F12
FAILED = {
    "error",
    "network_error",
    "insufficient_system_resource",
    "abort",  # F9
    "malformed_function_call",
    "unexpected_tool_call",
}
OVERFLOW = {"model_context_window_exceeded"}  # F10
# F2: with neither a call nor a text, something did not arrive
LOST = {
    "tool_calls",
    "tool_use",
    "function_call",
    "",
}
THOUGHTS = frozenset(REASONING)


class Assembler:
    """Collects the chunks of one answer. `tool_names` are the tools that were offered, `echoed` the members of a delta,
    beside the API's own, that the server wants back with the message."""

    def __init__(self, tool_names: Container[str] = (), echoed: Iterable[str] = ECHOED) -> None:
        self.echoed = frozenset(echoed)
        self._others = self.echoed - THOUGHTS
        self.kept: dict[str, list[Any]] = {}  # pieces, by name
        self.text: list[str] = []
        self.thoughts: dict[str, list[str]] = {}  # by the name they came under
        self.calls = Calls(tool_names)
        self.usage: Usage | None = None
        self.finish_reason = ""
        self.done = False  # the end mark came
        self._listed = False  # an entry of tool_calls came
        self._half = (
            ""  # S6: the first half of a surrogate pair whose second half comes with the next delta
        )
        self._tag = ThinkTag()

    # -- taking chunks

    def feed(self, chunk: Any) -> Iterator[Event]:
        """Take one chunk; yield what it adds. Raises ModelError where the chunk is an error (S8)."""
        if not isinstance(chunk, dict):
            return
        if chunk.get("error") or chunk.get("object") == "error" or chunk.get("type") == "error":
            raise classify(None, chunk)
        if usage := chunk.get("usage"):
            self._count(usage)
        for choice in filter(None, chunk.get("choices") or ()):  # C1
            if usage := choice.get("usage"):  # C4
                self._count(usage)
            if choice.get("error"):
                raise classify(None, choice)  # F9
            delta = choice.get("delta") or (None if self.begun else choice.get("message"))  # C2, C6
            if delta:
                yield from self._delta(delta)
            if reason := choice.get("finish_reason"):
                self.finish_reason = str(reason)  # F5, F6: only remembered

    def rest(self) -> Iterator[Event]:
        """The answer is over: yield what was held back of it."""
        thought, text = self._tag.rest()
        yield from self._thought(thought)
        if text:
            self.text.append(text)
            yield TextDelta(text)

    @property
    def begun(self) -> bool:
        return bool(self.text or self.calls or any(map(any, self.thoughts.values())))

    def _count(self, usage: Any) -> None:
        if isinstance(usage, dict):
            self.usage = read_usage(usage) or self.usage  # C3: the last one counts

    def _delta(self, delta: dict[str, Any]) -> Iterator[Event]:
        """All members of one delta: any of them may come together (T26) or be null (C2)."""
        if not THOUGHTS.isdisjoint(delta):
            yield from self._thinking(delta)
        for said in (delta.get("content"), delta.get("refusal")):  # C8
            if isinstance(said, str):
                yield from self._say(said)
            elif said:
                yield from self._parts(said)
        if "tool_calls" in delta or "function_call" in delta:
            # Null among them is passed over
            calls = list(filter(None, delta.get("tool_calls") or ()))
            self._listed = self._listed or bool(calls)
            function = delta.get("function_call")
            if function and not self._listed:  # the older form; the newer one says the same
                calls = [{"index": 0, "function": function}]
            yield from map(self.calls.add, calls)
        for name in self._others & delta.keys():
            if delta[name]:
                self.kept.setdefault(name, []).append(delta[name])

    def _thinking(self, delta: dict[str, Any]) -> Iterator[Event]:
        shown = False
        for name in REASONING:
            value = delta.get(name)
            if isinstance(value, str):  # also "": it may have to go back (R26)
                self.thoughts.setdefault(name, []).append(value)
                if value and not shown:
                    shown = True
                    yield ReasoningDelta(mend(value))

    def _parts(self, parts: Any) -> Iterator[Event]:
        """C5: content as a list of text and thinking."""
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                yield from self._say(part["text"])
            elif isinstance(part, dict) and part.get("thinking"):
                thinking = part["thinking"]
                yield from self._thought(
                    thinking
                    if isinstance(thinking, str)
                    else "".join(
                        str(item.get("text") or "") for item in thinking if isinstance(item, dict)
                    )
                )

    def _say(self, text: str) -> Iterator[Event]:
        if self._half or not text.isascii():
            text = self._whole(text)
        thought, text = self._tag.split(text)
        if thought:
            yield from self._thought(thought)
        if text:
            self.text.append(text)
            yield TextDelta(text)

    def _thought(self, text: str) -> Iterator[Event]:
        if text:
            self.thoughts.setdefault(THINK, []).append(text)
            yield ReasoningDelta(mend(text))

    def _whole(self, text: str) -> str:
        """S6: half a surrogate pair waits for the next piece."""
        text, self._half = self._half + text, ""
        if "\ud800" <= text[-1:] <= "\udbff":
            text, self._half = text[:-1], text[-1]
        return mend(text)

    # -- judging the whole

    @property
    def ended(self) -> bool:
        """F3, S7: a finish_reason or the end mark is enough."""
        return bool(self.finish_reason or self.done)

    def completion(self) -> Completion:
        """The answer. Raises ModelError where it is none."""
        word = self.finish_reason.lower()
        text, calls = mend("".join(self.text) + self._half), self.calls.finished()
        if not self.ended:  # F4, S11
            raise ModelError("incomplete", "the answer was cut off", retryable=True)
        if word in FAILED:
            raise ModelError(
                "server", f"the server ended the answer with {self.finish_reason!r}", retryable=True
            )
        if word in OVERFLOW and not text:
            raise ModelError("overflow", "the context is full")
        finish = self._finish(word, bool(calls))
        calls = [] if finish == "content_filter" else calls
        if not text and not calls and word in LOST:  # F2
            raise ModelError("empty", "the answer was empty", retryable=True)
        name = next(
            (name for name in (*REASONING, THINK) if any(self.thoughts.get(name, ()))),
            next(iter(self.thoughts), ""),
        )
        thoughts = mend("".join(self.thoughts.get(name, ())))
        message = self._message(text, {name: thoughts} if name in self.echoed else {}, calls)
        return Completion(
            text,
            [call for call, _ in calls],
            finish,
            message,
            self.usage or Usage(estimated=True),
            thoughts,
            self.finish_reason,
        )

    def _finish(self, word: str, calls: bool) -> Finish:
        """F1, F3, F11: calls count whatever the word; an unknown word is an end."""
        if word in LENGTH | OVERFLOW:
            return "length"
        if word in FILTER:
            return "content_filter"
        return "tool_calls" if calls else "stop"

    def _message(
        self, text: str, thoughts: Message, calls: list[tuple[ToolCall, Message]]
    ) -> Message:
        """The entry for the history; what is echoed goes back under the name it came with (R26)."""
        message: Message = {"role": "assistant", "content": text or None} | thoughts
        with suppress(ValueError):  # nested too deeply to be meant
            message |= {name: mend_all(joined(pieces)) for name, pieces in self.kept.items()}
        if calls:
            message["tool_calls"] = [entry for _, entry in calls]
        return message
