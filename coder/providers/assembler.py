"""The chunks of one answer -> one Completion. Tolerant of what real servers send (tests/data/quirks.jsonl has examples).

`Assembler.feed` takes one chunk (the JSON of an event) and gives its deltas, `Assembler.completion` judges the whole. No
rule asks which server it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from coder.events import Event, ReasoningDelta, TextDelta, ToolCallDelta
from coder.providers.call_arguments import parse_arguments
from coder.providers.errors import classify
from coder.providers.profiles import ECHOED, REASONING, THINK, read_usage
from coder.providers.text import ThinkTag, join_pieces, mend, mend_all, new_id, safe_name
from coder.types import Completion, Finish, Message, ModelError, ToolCall, Usage

# Words for finish_reason, lower case.
OVERFLOW = "model_context_window_exceeded"
LENGTH = {"length", "max_tokens", "model_length", "max_output_tokens", OVERFLOW}
FILTER = {"content_filter", "sensitive", "safety", "refusal", "guardrail_intervened", "error_toxic"}
FILTER |= {"recitation", "prohibited_content", "blocklist", "spii"}
FINISH: dict[str, Finish] = dict.fromkeys(LENGTH, "length")
FINISH |= dict.fromkeys(FILTER, "content_filter")
FAILED = {"error", "network_error", "insufficient_system_resource", "abort"}
FAILED |= {"malformed_function_call", "unexpected_tool_call"}
NO_WORD = {"", "null", "none"}  # some servers write null as a word
ONLY_TEXT = {"role", "content"}
CUT_OFF = "the answer was cut off"
LONE_END = "\n</think>\n"


class Assembler:
    """Collects the chunks of one answer. `echoed` are the members of a delta, beside the API's own, that the server wants
    back with the message."""

    def __init__(self, echoed: Iterable[str] = ECHOED) -> None:
        self.echoed = frozenset(echoed)
        self.kept: dict[str, list[Any]] = {}  # pieces of echoed members, by name
        self.text: list[str] = []
        self.thoughts: dict[str, list[str]] = {}  # by the name they came under
        self.calls = ToolCallAssembler()
        self.usage: Usage | None = None
        self.finish_reason = ""
        self.done = False  # the end mark came
        self._has_call_list = False  # an entry of tool_calls came
        self._tag = ThinkTag()

    def feed(self, chunk: Any) -> Sequence[Event]:
        """Take one chunk; the deltas that it adds. Raises ModelError where the chunk is an error."""
        if not isinstance(chunk, dict):
            return ()
        if text := self._only_text(chunk):
            self.text.append(text)
            return (TextDelta(text),)
        if chunk.get("error") or "error" in (chunk.get("object"), chunk.get("type")):
            raise classify(None, chunk)
        events: list[Event] = []
        choices = [choice for choice in chunk.get("choices") or () if choice]
        for part in (chunk, *choices):
            if isinstance(usage := part.get("usage"), dict):
                self.usage = read_usage(usage) or self.usage  # the last one counts
        for choice in choices:
            if choice.get("error"):
                raise classify(None, choice)
            delta = choice.get("delta") or (None if self.begun else choice.get("message"))
            if delta:
                self._take_delta(delta, events)
            reason = str(choice.get("finish_reason") or "")
            if reason.lower() not in NO_WORD:
                self.finish_reason = reason  # only remembered: data may follow
        return events

    def _only_text(self, chunk: dict[str, Any]) -> str:
        """The text of a chunk that has nothing else, as most have; "" where it has to be looked at member by member."""
        choices = chunk.get("choices")
        if type(choices) is not list or len(choices) != 1 or self._tag.state != "text":
            return ""
        choice = choices[0]
        delta = choice.get("delta") if type(choice) is dict else None
        if type(delta) is not dict or not delta.keys() <= ONLY_TEXT or chunk.get("type"):
            return ""
        for part in (chunk, choice):
            if part.get("usage") or part.get("error") or part.get("finish_reason"):
                return ""
        text = delta.get("content")
        return text if type(text) is str and text.isascii() else ""

    def flush(self) -> Sequence[Event]:
        """The answer is over: the deltas of what was held back."""
        events: list[Event] = []
        self._add_text(*self._tag.rest(), events)
        return events

    @property
    def begun(self) -> bool:
        return bool(self.text or self.calls.calls or any(map(any, self.thoughts.values())))

    def _take_delta(self, delta: dict[str, Any], events: list[Event]) -> None:
        named = [name for name in REASONING if isinstance(delta.get(name), str)]
        for name in named:  # also "": it may have to go back
            self.thoughts.setdefault(name, []).append(delta[name])
        # some servers send the same thought under two names: it is shown once
        if thought := next(filter(None, map(delta.get, named)), ""):
            events.append(ReasoningDelta(mend(thought)))
        for content in (delta.get("content"), delta.get("refusal")):
            parts = content if isinstance(content, list) else [{"text": content}]
            for part in filter(lambda each: isinstance(each, dict), parts):
                self._add_text(*self._split_part(part), events)
        calls = [call for call in delta.get("tool_calls") or () if call]
        self._has_call_list = self._has_call_list or bool(calls)
        if delta.get("function_call") and not self._has_call_list:  # the older form; some send both
            calls = [{"index": 0, "function": delta["function_call"]}]
        events += map(self.calls.add, calls)
        for name in self.echoed & delta.keys():
            if name not in REASONING and delta[name]:
                self.kept.setdefault(name, []).append(delta[name])

    def _split_part(self, part: dict[str, Any]) -> tuple[str, str]:
        """(thought, text) of a text that may hold tags, or of another part of content (Mistral)."""
        text, thinking = part.get("text"), part.get("thinking")
        if isinstance(text, str):
            return self._tag.split(text)
        if isinstance(thinking, list):
            texts = [item.get("text") for item in thinking if isinstance(item, dict)]
            thinking = "".join(text for text in texts if isinstance(text, str))
        return (thinking if isinstance(thinking, str) else "", "")

    def _add_text(self, thought: str, text: str, events: list[Event]) -> None:
        if thought:
            self.thoughts.setdefault(THINK, []).append(thought)
            events.append(ReasoningDelta(mend(thought)))
        if text:
            self.text.append(text)
            events.append(TextDelta(mend(text)))

    @property
    def ended(self) -> bool:
        """A finish_reason or the end mark is enough: some servers send only one of them."""
        return bool(self.finish_reason or self.done)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing, should no more come: some servers send arguments behind a finish_reason."""
        if self.done or self.finish_reason.lower() in FINISH:  # the latter cut an answer
            return True
        return self.ended and not any(call.is_open() for call in self.calls.calls)

    def completion(self) -> Completion:
        """The answer. Raises ModelError where it is none."""
        word = self.finish_reason.lower()
        text = self._without_thought(mend("".join(self.text)))
        if text.isspace():  # no answer
            text = ""
        calls = self.calls.finished()
        if not self.ended:
            raise ModelError("incomplete", CUT_OFF, retryable=True)
        if word in FAILED:
            problem = f"the server ended the answer with {self.finish_reason!r}"
            raise ModelError("server", problem, retryable=True)
        if word == OVERFLOW and not text:
            raise ModelError("overflow", "the context is full")
        finish = FINISH.get(word, "tool_calls" if calls else "stop")
        calls = [] if finish == "content_filter" else calls
        if not text and not calls and not word:  # something did not arrive
            raise ModelError("empty", "the answer was empty", retryable=True)
        names = [name for name in (*REASONING, THINK) if any(self.thoughts.get(name, ()))]
        name = next(iter([*names, *self.thoughts]), "")
        thoughts = mend("".join(self.thoughts.get(name, ())))
        # the entry for the history; what is echoed goes back under the name it came with
        message: Message = {"role": "assistant", "content": text or None}
        if name in self.echoed:
            message[name] = thoughts
        with suppress(ValueError):  # nested too deeply to be meant
            message |= {name: mend_all(join_pieces(pieces)) for name, pieces in self.kept.items()}
        if calls:
            message["tool_calls"] = [entry for _, entry in calls]
        usage = self.usage or Usage(estimated=True)
        made = [call for call, _ in calls]
        return Completion(text, made, finish, message, usage, thoughts, self.finish_reason)

    def _without_thought(self, text: str) -> str:
        """The text after a thought that only has an end: templates of some servers write <think> into the prompt."""
        thought, end, answer = f"{text}\n".partition(LONE_END)
        if not end or "<think>" in thought or any(map(any, self.thoughts.values())):
            return text
        self.thoughts[THINK] = [thought]
        return answer.strip("\n")


# ---- tool calls -------------------------------------------------------------------------------------

MEMBERS = {"index", "id", "type", "function"}  # of a piece of a call; others go back to the server


@dataclass(slots=True)
class _Call:
    """A tool call while it arrives. `index` is a key and no position."""

    index: Any = None
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)  # of the arguments
    extra: dict[str, Any] = field(default_factory=dict)  # other members

    def is_complete(self) -> bool:
        """A name and arguments that are whole, as far as one can see; parsed only where they may be."""
        ends = "".join(self.pieces[-1:]).rstrip().endswith(("}", '"'))
        return bool(self.name) and ends and parse_arguments(self.pieces)[0] is not None

    def is_open(self) -> bool:
        """Whether arguments are missing, or a part of them."""
        filled = any(self.pieces)
        return bool(self.name or filled) and not (filled and self.arguments()[0] is not None)

    def arguments(self) -> tuple[dict[str, Any] | None, str]:
        """As parse_arguments, of a call that is over. Some servers send the text so far with each piece."""
        parsed = parse_arguments(self.pieces)
        filled = [piece for piece in self.pieces if piece]
        if parsed[0] is None and all(b.startswith(a) for a, b in pairwise(filled)):
            return parse_arguments(filled[-1:])
        return parsed


class ToolCallAssembler:
    """The calls of one answer, in order of arrival."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []

    def add(self, part: dict[str, Any]) -> ToolCallDelta:
        """Take one piece; what it adds, for the screen."""
        function = part.get("function") or {}
        name, given = _as_text(function.get("name")), function.get("arguments")
        # some servers send an object
        arguments = given if isinstance(given, str) else "" if given is None else json.dumps(given)
        call = self._find_call(part, name, begins=bool(name and arguments.strip()))
        if call is None:
            call = _Call(part.get("index"))
            self.calls.append(call)
        call.id = call.id or _as_text(part.get("id"))  # set once: some servers repeat it
        if name != call.name:  # the name so far, or a further piece of it
            call.name = name if name.startswith(call.name) else call.name + name
        call.pieces.append(arguments)
        extra = ((k, v) for k, v in part.items() if k not in MEMBERS and v is not None)
        call.extra.update(extra)
        return ToolCallDelta(call.id, call.name, mend(arguments))

    def _find_call(self, part: dict[str, Any], name: str, begins: bool) -> _Call | None:
        """The call that this piece belongs to: by id, else by index, else the last one; None for a new call. A piece that
        `begins` could stand alone."""
        index, call_id = part.get("index"), _as_text(part.get("id"))
        here = self._newest_with("index", index) if index is not None else None
        if not call_id:
            found = here or (self.calls[-1] if self.calls and (index is None or not name) else None)
            return None if found and begins and found.is_complete() else found
        known = self._newest_with("id", call_id)
        if known and (index is None or known.index == index or not name):
            return known
        # another id takes the index over; the same id at another index, with a name, is another call
        return here if here and here.id in ("", call_id) else None

    def _newest_with(self, member: str, value: Any) -> _Call | None:
        return next((c for c in reversed(self.calls) if getattr(c, member) == value), None)

    def finished(self) -> list[tuple[ToolCall, Message]]:
        """Each call and its form in the history."""
        made: list[tuple[ToolCall, Message]] = []
        seen: set[str] = set()
        for call in self.calls:
            if not (call.name or any(call.pieces)):
                continue
            arguments, problem = call.arguments()
            try:
                arguments, extra = mend_all(arguments), mend_all(call.extra)
                text = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
            except ValueError as error:  # NaN, or nested too deeply
                arguments, extra, problem, text = None, {}, f"not usable: {error}", "{}"
            call_id = mend(call.id) if call.id and call.id not in seen else new_id()
            seen.add(call_id)
            # some models put a prefix ("functions.") and a tail ("<|channel|>") to the name of a tool
            core = re.split(r"[.:/]", call.name.split("<|")[0])[-1].strip()
            name = safe_name(core or call.name)
            function = {"name": name, "arguments": text}
            entry = {"id": call_id, "type": "function", "function": function} | extra
            made.append((ToolCall(call_id, name, arguments or {}, problem), entry))
        return made


def _as_text(value: Any) -> str:
    """An id or a name; some servers send numbers."""
    return "" if value is None else str(value)


# ---- answers that look right and are not -----------------------------------------------------------

MAX_CHARS_PER_TOKEN = 12  # no text has more


def check_context(answer: Completion, window: int) -> None:
    """Raises ModelError where there was no room for a word: some servers report that as an answer cut at its limit."""
    empty = not (answer.text or answer.calls or answer.usage.output)
    if answer.finish == "length" and empty and answer.usage.input >= 0.99 * window:
        raise ModelError("overflow", "the context is full")


def remarks(answer: Completion, sent: bytes, window: int) -> Iterator[str]:
    """What the user should know: a server that must have dropped messages."""
    usage = answer.usage
    few = MAX_CHARS_PER_TOKEN * usage.input < len(sent) and len(sent) > 16_000
    if few and not (usage.estimated or usage.cached or b'"image_url"' in sent):
        yield (
            "The server counts fewer tokens than the conversation has: perhaps its context is "
            f"smaller than ours ({window}). Give it more (with Ollama by OLLAMA_CONTEXT_LENGTH, or num_ctx in "
            "the Modelfile), or set CODER_CONTEXT_WINDOW to what it has."
        )
