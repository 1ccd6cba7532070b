"""Bytes of an event stream -> one Completion. Tolerant of what real servers send.

Three stages, each usable alone: `sse` finds the events in the bytes, `Assembler.feed` takes one chunk (the JSON of an
event) and yields deltas, `Assembler.completion` judges the whole. Every rule names the observation behind it (T1, F3,
C6, S5 ...; tests/data/quirks.jsonl replays them). No rule asks who the server is.

What it leaves out: sockets, time-outs and HTTP errors (ai.py), and what to do about a failed answer (loop.py).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from coder.errors import classify
from coder.types import Completion, Event, Finish, Message, ModelError, ReasoningDelta, TextDelta, ToolCall, ToolCallDelta, Usage

# ---- bytes -> events -------------------------------------------------------------------------------------


def sse(chunks: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """(event name, data) of each event. Comments, empty data and other fields are passed over (S1, S2)."""
    event, data = "", list[str]()
    for line in _lines(chunks):
        if line.startswith("data:"):
            data.append(line[6:] if line.startswith("data: ") else line[5:])  # S4: the space is optional
        elif line.startswith("event:"):
            event = line[6:].strip()
        elif line.startswith("error:"):  # S9: an error as a field of its own
            yield "error", line[6:].strip()
        elif not line:
            if any(data):
                yield event, "\n".join(data)
            event, data = "", []
    if any(data):  # S7: [DONE] without its blank line; a cut event is no JSON, and the caller sees that
        yield event, "\n".join(data)


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Lines ended by CR, LF or CRLF and by nothing else (S4, S5), decoded whole, so that no character is cut (S6)."""
    tail, mark = b"", "\ufeff"
    for chunk in chunks:
        lines = (tail + chunk if tail else chunk).splitlines(keepends=True)
        # a CR at the very end may be half of a CRLF: keep it for the next chunk
        tail = b"" if not lines or lines[-1].endswith(b"\n") else lines.pop()
        for line in lines:
            text = line.decode("utf-8", "replace").rstrip("\r\n")
            if mark:
                text, mark = text.removeprefix(mark), ""  # S5: a BOM at the start
            yield text
    yield from (line.decode("utf-8", "replace") for line in tail.splitlines())


# ---- chunks -> completion --------------------------------------------------------------------------------

LENGTH = {"length", "max_tokens", "model_length", "max_output_tokens"}  # F7, F11
FILTER = {"content_filter", "sensitive", "safety", "refusal", "guardrail_intervened", "error_toxic", "recitation",
          "prohibited_content", "blocklist", "spii"}  # F8, F15
FAILED = {"error", "network_error", "insufficient_system_resource", "abort",  # F9
          "malformed_function_call", "unexpected_tool_call"}  # F12
OVERFLOW = {"model_context_window_exceeded"}  # F10
REASONING = ("reasoning_content", "reasoning", "reasoning_text")  # C7: the first that is not empty
ECHOED = {"reasoning_content"}  # R26: goes back with the message under the name it came with


@dataclass(slots=True)
class _Call:
    """A tool call while it arrives. `index` is a key and no position (T4)."""

    index: Any = None
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    whole: dict[str, Any] | None = None  # T11: arguments that came as an object
    extra: dict[str, Any] = field(default_factory=dict)  # T28: unknown members go back to the server

    def add(self, part: dict[str, Any], function: dict[str, Any]) -> None:
        self.id = self.id or part.get("id") or ""  # set once, never joined (T5, T7)
        name = function.get("name") or ""
        if name != self.name:  # T7: repeated, or the name so far, or really a piece
            self.name = name if name.startswith(self.name) else self.name + name
        arguments = function.get("arguments")
        if isinstance(arguments, dict):
            self.whole = arguments
        elif arguments:
            self.pieces.append(str(arguments))
        self.extra |= {k: v for k, v in part.items() if k not in ("index", "id", "type", "function") and v is not None}

    def complete(self) -> bool:
        """A name and arguments that are whole, as far as one can see."""
        arguments = self.whole or (parse_arguments(self.pieces)[0] if self.pieces else None)
        return bool(self.name) and arguments is not None


class Assembler:
    """Collects the chunks of one answer. `tool_names` are the tools that were offered."""

    def __init__(self, tool_names: Container[str] = ()) -> None:
        self.tool_names = tool_names
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.reasoning_name = ""
        self.details: list[Any] = []
        self.calls: list[_Call] = []
        self.usage: Usage | None = None
        self.finish_reason = ""
        self.done = False  # the end mark came
        self.half = ""  # S6: the first half of a surrogate pair whose second half comes with the next delta

    # -- taking chunks

    def feed(self, chunk: Any) -> Iterator[Event]:
        """Take one chunk; yield what it adds. Raises ModelError where the chunk is an error (S8)."""
        if not isinstance(chunk, dict):
            return
        if chunk.get("error") or chunk.get("object") == "error" or chunk.get("type") == "error":
            raise classify(None, chunk)
        if usage := chunk.get("usage"):
            self._count(usage)
        for choice in chunk.get("choices") or ():  # C1
            if usage := choice.get("usage"):  # C4
                self._count(usage)
            if choice.get("error"):
                raise classify(None, choice)  # F9
            delta = choice.get("delta") or (None if self._anything() else choice.get("message"))  # C2, C6
            if delta:
                yield from self._delta(delta)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason  # F5, F6: only remembered

    def _anything(self) -> bool:
        return bool(self.text or self.reasoning or self.calls)

    def _delta(self, delta: dict[str, Any]) -> Iterator[Event]:
        """All members of one delta: any of them may come together (T26) or be null (C2)."""
        for name in REASONING:
            if value := delta.get(name):
                self.reasoning_name = self.reasoning_name or name
                yield from self._reasoning(value if isinstance(value, str) else "")
                break
        if isinstance(details := delta.get("reasoning_details"), list):
            self.details += details
        for said in (delta.get("content"), delta.get("refusal")):  # C8
            if isinstance(said, str):
                if text := self._whole(said):
                    yield TextDelta(text)
            elif said:
                yield from self._parts(said)
        for part in delta.get("tool_calls") or ():  # T20
            yield from self._call(part)
        if function := delta.get("function_call"):  # T25: the older form, one call
            yield from self._call({"index": 0, "function": function})

    def _parts(self, parts: Any) -> Iterator[Event]:
        """C5: content as a list of text and thinking."""
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                yield TextDelta(self._whole(part["text"]))
            elif isinstance(part, dict) and part.get("thinking"):
                thinking = part["thinking"]
                yield from self._reasoning(thinking if isinstance(thinking, str) else "".join(
                    str(item.get("text") or "") for item in thinking if isinstance(item, dict)))

    def _whole(self, text: str) -> str:
        """Take a piece of text; what of it can be shown: half a surrogate pair waits for the next piece (S6)."""
        self.text.append(text)
        if text.isascii() and not self.half:
            return text
        text, self.half = self.half + text, ""
        if "\ud800" <= text[-1:] <= "\udbff":
            text, self.half = text[:-1], text[-1]
        return mend(text)

    def _reasoning(self, text: str) -> Iterator[Event]:
        if text:
            self.reasoning.append(text)
            yield ReasoningDelta(mend(text))

    def _call(self, part: dict[str, Any]) -> Iterator[Event]:
        function = part.get("function") or {}  # T9
        call = self._find(part, function) or self._new(part)
        call.add(part, function)
        arguments = function.get("arguments") or ""
        yield ToolCallDelta(call.id, call.name, mend(arguments if isinstance(arguments, str) else json.dumps(arguments)))

    def _find(self, part: dict[str, Any], function: dict[str, Any]) -> _Call | None:
        """The call that this piece belongs to: by id, else by index, else the last one; None for a new call."""
        call_id, index, name = part.get("id"), part.get("index"), function.get("name")
        here = next((c for c in reversed(self.calls) if c.index == index), None) if index is not None else None
        if call_id:
            known = next((c for c in reversed(self.calls) if c.id == call_id), None)
            if known and (index is None or known.index == index or not name):
                return known
            # T2: another id takes the index over; T24: the same id at another index, with a name, is another call
            return here if here and here.id in ("", call_id) else None
        found = here or (self.calls[-1] if self.calls and (index is None or not name) else None)
        if found and name and found.complete() and function.get("arguments"):  # T6: a name after a whole call
            return None
        return found

    def _new(self, part: dict[str, Any]) -> _Call:
        self.calls.append(_Call(index=part.get("index")))
        return self.calls[-1]

    def _count(self, usage: Any) -> None:
        if isinstance(usage, dict):
            self.usage = read_usage(usage)  # C3: the last one counts

    # -- judging the whole

    @property
    def ended(self) -> bool:
        """F3, S7: a finish_reason or the end mark is enough."""
        return bool(self.finish_reason or self.done)

    def completion(self) -> Completion:
        """The answer. Raises ModelError where it is none."""
        word = self.finish_reason.lower()
        text, calls = mend("".join(self.text)), self._tool_calls()
        if not self.ended:  # F4, S11
            raise ModelError("incomplete", "the answer was cut off", retryable=True)
        if word in FAILED:
            raise ModelError("server", f"the server ended the answer with {self.finish_reason!r}", retryable=True)
        if word in OVERFLOW and not text:
            raise ModelError("overflow", "the context is full")
        finish = self._finish(word, bool(calls))
        calls = [] if finish == "content_filter" else calls
        if not text and not calls and finish in ("stop", "tool_calls"):  # F2, F13
            raise ModelError("empty", "the answer was empty", retryable=True)
        return Completion(text, [call for call, _ in calls], finish, self._message(text, calls),
                          self.usage or Usage(estimated=True), mend("".join(self.reasoning)), self.finish_reason)

    def _finish(self, word: str, calls: bool) -> Finish:
        """F1, F3, F11: calls count whatever the word; an unknown word is an end."""
        if word in LENGTH | OVERFLOW:
            return "length"
        if word in FILTER:
            return "content_filter"
        return "tool_calls" if calls else "stop"

    def _tool_calls(self) -> list[tuple[ToolCall, Message]]:
        """Each call and its form in the history, in order of arrival."""
        made: list[tuple[ToolCall, Message]] = []
        seen: set[str] = set()
        for call in self.calls:
            if not (call.name or call.pieces or call.whole):
                continue
            arguments, problem = (call.whole, "") if call.whole is not None else parse_arguments(call.pieces)
            arguments = mend_all(arguments)
            call_id = mend(call.id) if call.id and call.id not in seen else new_id()  # T6, T24
            seen.add(call_id)
            name = self._name(call.name)
            text = json.dumps(arguments or {}, ensure_ascii=False)  # T12, R28: always valid JSON
            entry = {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}} | call.extra
            made.append((ToolCall(call_id, name, arguments, problem), entry))
        return made

    def _name(self, name: str) -> str:
        """T23: prefix and tail go where an offered tool remains; T30, T32: nothing else that a server refuses."""
        core = name.split("<|")[0].rsplit(".", 1)[-1].strip()
        return core if core in self.tool_names else safe_name(name)

    def _message(self, text: str, calls: list[tuple[ToolCall, Message]]) -> Message:
        message: Message = {"role": "assistant", "content": text or None}
        if self.reasoning_name in ECHOED:
            message[self.reasoning_name] = mend("".join(self.reasoning))
        if self.details:
            message["reasoning_details"] = self.details
        if calls:
            message["tool_calls"] = [entry for _, entry in calls]
        return message


# ---- pieces ----------------------------------------------------------------------------------------------


def parse_arguments(pieces: list[str]) -> tuple[dict[str, Any] | None, str]:
    """(the arguments, "") or (None, why not). Never closes a bracket or a quote that is missing (F7)."""
    raw = "".join(pieces).strip()
    if not raw:
        return {}, ""  # T12
    try:
        value = json.loads(raw, strict=False)  # T16: raw newlines inside strings
        if isinstance(value, str):
            value = json.loads(value, strict=False)  # T13: encoded twice
    except RecursionError:
        return None, "nested too deeply"
    except ValueError as error:
        if len(pieces) > 1 and all(b.startswith(a) for a, b in pairwise(pieces)):
            return parse_arguments(pieces[-1:])  # T15: each piece is the text so far
        value = _first_object(raw)
        if value is None:
            return None, f"not valid JSON: {error}"
    if value is None:
        return {}, ""
    return (value, "") if isinstance(value, dict) else (None, f"a JSON object is expected, not {json.dumps(value)[:80]}")


def _first_object(raw: str) -> Any:
    """The object at the start where what follows repeats it or holds no other; an empty first one gives way."""
    decoder, rest, found = json.JSONDecoder(strict=False), raw, list[Any]()
    while rest.startswith("{"):
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return None
        found.append(value)
        rest = rest[end:].strip()
    found = [value for value in found if value] or found[:1]  # T14
    alike = found and all(value == found[0] for value in found)  # T15
    return found[0] if alike and "{" not in rest else None  # T17


def read_usage(usage: dict[str, Any]) -> Usage:
    """Tokens from every known shape (C3, C4)."""
    def number(*names: str, of: dict[str, Any] = usage) -> int:
        return next((int(of[name]) for name in names if isinstance(of.get(name), int | float)), 0)

    into = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    out = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
    cached = number("cached_tokens", of=into) or number("prompt_cache_hit_tokens", "cached_tokens")
    return Usage(number("prompt_tokens", "input_tokens"), number("completion_tokens", "output_tokens"), cached,
                 number("reasoning_tokens", of=out) or number("reasoning_tokens"))


def mend(text: str) -> str:
    """Join surrogate pairs that came apart; what no encoder takes (a lone half, NUL) becomes U+FFFD (S6, R24, R25)."""
    if text.isascii():
        return text.replace("\0", "\ufffd") if "\0" in text else text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace("\0", "\ufffd")


def mend_all(value: Any) -> Any:
    """`mend` for every string inside a JSON value."""
    if isinstance(value, str):
        return mend(value)
    if isinstance(value, list):
        return [mend_all(item) for item in value]
    if isinstance(value, dict):
        return {mend(key): mend_all(item) for key, item in value.items()}
    return value


def safe_name(name: str) -> str:
    """A tool name that every server takes back in the history (R23)."""
    return re.sub(r"[^a-zA-Z0-9_-]", "_", name)[:64] or "unknown"


def new_id() -> str:
    """Nine alphanumerics: fits every server (T31)."""
    return secrets.token_hex(5)[:9]
