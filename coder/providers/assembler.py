"""The chunks of one answer -> one Completion. Tolerant of what real servers send (tests/data/quirks.jsonl has examples).

`Assembler.feed` takes one chunk (the JSON of an event) and gives its deltas, `Assembler.completion` judges the whole. No
rule asks which server it is.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from coder.events import Event, ReasoningDelta, TextDelta
from coder.providers.errors import classify
from coder.providers.profiles import ECHOED, REASONING, THINK
from coder.providers.text import mend, mend_all
from coder.providers.tool_call_deltas import ToolCallAssembler
from coder.types import Completion, Finish, Message, ModelError, Usage

# Words for finish_reason, lower case.
LENGTH = {"length", "max_tokens", "model_length", "max_output_tokens"}
FILTER = {"content_filter", "sensitive", "safety", "refusal", "guardrail_intervened", "error_toxic"}
FILTER |= {"recitation", "prohibited_content", "blocklist", "spii"}
FAILED = {"error", "network_error", "insufficient_system_resource", "abort"}
FAILED |= {"malformed_function_call", "unexpected_tool_call"}
OVERFLOW = "model_context_window_exceeded"
LOST = {"tool_calls", "tool_use", "function_call", ""}  # with neither a call nor a text
ONLY_TEXT = {"role", "content"}


class Assembler:
    """Collects the chunks of one answer. `tool_names` are the tools that were offered, `echoed` the members of a delta,
    beside the API's own, that the server wants back with the message."""

    def __init__(self, tool_names: Container[str] = (), echoed: Iterable[str] = ECHOED) -> None:
        self.echoed = frozenset(echoed)
        self.kept: dict[str, list[Any]] = {}  # pieces of echoed members, by name
        self.text: list[str] = []
        self.thoughts: dict[str, list[str]] = {}  # by the name they came under
        self.calls = ToolCallAssembler(tool_names)
        self.usage: Usage | None = None
        self.finish_reason = ""
        self.done = False  # the end mark came
        self._listed = False  # an entry of tool_calls came
        self._tag = ThinkTag()

    # -- taking chunks

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
            if reason := choice.get("finish_reason"):
                self.finish_reason = str(reason)  # only remembered: data may follow
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
        return bool(self.text or self.calls or any(map(any, self.thoughts.values())))

    def _take_delta(self, delta: dict[str, Any], events: list[Event]) -> None:
        """All members of one delta: any of them may come together or be null."""
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
        self._take_calls(delta, events)
        for name in self.echoed & delta.keys():
            if name not in REASONING and delta[name]:
                self.kept.setdefault(name, []).append(delta[name])

    def _split_part(self, part: dict[str, Any]) -> tuple[str, str]:
        """Both of a text that may hold tags, or of another part of content (Mistral)."""
        text, thinking = part.get("text"), part.get("thinking")
        if isinstance(text, str):
            return self._tag.split(text) if self._tag.state != "text" else ("", text)
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

    def _take_calls(self, delta: dict[str, Any], events: list[Event]) -> None:
        calls = [call for call in delta.get("tool_calls") or () if call]
        self._listed = self._listed or bool(calls)
        function = delta.get("function_call")
        if function and not self._listed:  # the older form; some servers send both
            calls = [{"index": 0, "function": function}]
        events += map(self.calls.add, calls)

    # -- judging the whole

    @property
    def ended(self) -> bool:
        """A finish_reason or the end mark is enough: some servers send only one of them."""
        return bool(self.finish_reason or self.done)

    def completion(self) -> Completion:
        """The answer. Raises ModelError where it is none."""
        word = self.finish_reason.lower()
        text, calls = mend("".join(self.text)), self.calls.finished()
        if not self.ended:
            raise ModelError("incomplete", "the answer was cut off", retryable=True)
        if word in FAILED:
            problem = f"the server ended the answer with {self.finish_reason!r}"
            raise ModelError("server", problem, retryable=True)
        if word == OVERFLOW and not text:
            raise ModelError("overflow", "the context is full")
        finish = _finish_of(word, bool(calls))
        calls = [] if finish == "content_filter" else calls
        if not text and not calls and word in LOST:  # something did not arrive
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


def _finish_of(word: str, calls: bool) -> Finish:
    """Calls count whatever the word; an unknown word is an end."""
    if word in LENGTH or word == OVERFLOW:
        return "length"
    if word in FILTER:
        return "content_filter"
    return "tool_calls" if calls else "stop"


# ---- what a model thinks ---------------------------------------------------------------------------


class ThinkTag:
    """Thoughts before an answer, between tags that may be cut anywhere. Tags later in a text are text."""

    OPEN, CLOSE = "<think>", "</think>"

    def __init__(self) -> None:
        self.state: Literal["before", "inside", "behind", "text"] = "before"
        self._held = ""  # what may be the beginning of a tag

    def split(self, text: str) -> tuple[str, str]:
        """(thought, text) of this piece, as far as it is known by now."""
        text, self._held = self._held + text, ""
        if self.state == "before":
            begun = text.lstrip()
            if self.OPEN.startswith(begun):
                self._held = text
                return "", ""
            if not begun.startswith(self.OPEN):
                self.state = "text"
                return "", text
            self.state, text = "inside", begun[len(self.OPEN) :]
        thought = ""
        if self.state == "inside":
            thought, closed, text = text.partition(self.CLOSE)
            if not closed:
                lengths = range(len(self.CLOSE) - 1, 0, -1)
                cut = next((n for n in lengths if thought.endswith(self.CLOSE[:n])), 0)
                thought, self._held = thought[: len(thought) - cut], thought[len(thought) - cut :]
                return thought, ""
            self.state = "behind"
        if self.state == "behind":  # white space between the tag and the text is dropped
            text = text.lstrip()
            self.state = "text" if text else "behind"
        return thought, text

    def rest(self) -> tuple[str, str]:
        """What was held back, when no more comes."""
        held, inside = self._held, self.state == "inside"
        self.state, self._held = "text", ""
        return (held, "") if inside else ("", held)


def join_pieces(pieces: list[Any]) -> Any:
    """One member of a message from its pieces: texts are joined, objects take what is new, entries of lists go on."""
    if all(isinstance(piece, str) for piece in pieces):
        return "".join(pieces)
    if all(isinstance(piece, dict) for piece in pieces):
        return _merge_pieces(pieces)
    if not all(isinstance(piece, list) for piece in pieces):
        return pieces[-1]
    groups: list[list[Any]] = []  # of pieces of one entry
    for entry in chain.from_iterable(pieces):
        if groups and _continues_entry(groups[-1][-1], entry):
            groups[-1].append(entry)
        else:
            groups.append([entry])
    return [_merge_pieces(group) if len(group) > 1 else group[0] for group in groups]


def _continues_entry(last: Any, entry: Any) -> bool:
    """Is this a further piece of the same entry? A signature ends one; what is encrypted comes whole."""
    if not (isinstance(last, dict) and isinstance(entry, dict)):
        return False
    if last.get("signature") or "data" in last or "data" in entry:
        return False
    return all(entry.get(name) == last.get(name) for name in ("type", "index", "id"))


def _merge_pieces(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """Later members win; text grows."""
    merged = {name: value for piece in pieces for name, value in piece.items() if value is not None}
    for name in merged.keys() & {"thinking", "text", "summary"}:
        texts = [piece[name] for piece in pieces if isinstance(piece.get(name), str)]
        merged[name] = "".join(texts) or merged[name]
    return merged


# ---- tokens and money ------------------------------------------------------------------------------

MAX_COUNT = 1e12  # tokens; what is more, or no number at all, is not counted
CHARS_PER_TOKEN = 4  # of English prose and code; an estimate is marked as one


def read_usage(usage: dict[str, Any]) -> Usage | None:
    """Tokens from every known shape; None where nothing is counted."""
    into = _find_part(usage, "prompt_tokens_details", "input_tokens_details")
    out = _find_part(usage, "completion_tokens_details", "output_tokens_details")
    sent = _read_number(usage, "prompt_tokens", "input_tokens", "prompt_eval_count")
    got = _read_number(usage, "completion_tokens", "output_tokens", "eval_count")
    names = ("prompt_cache_hit_tokens", "cached_tokens", "cache_read_input_tokens")
    cached = _read_number(into, "cached_tokens") or _read_number(usage, *names)
    reasoning = _read_number(out, "reasoning_tokens") or _read_number(usage, "reasoning_tokens")
    beside = _read_number(usage, "total_tokens") - sent - got
    if cached > sent or (beside > 0 and beside == cached):  # Anthropic: the cache beside the input
        sent, beside = sent + cached + _read_number(usage, "cache_creation_input_tokens"), 0
    if beside > 0 and reasoning in (0, beside):  # xAI, Gemini: reasoning beside the output
        got, reasoning = got + beside, beside
    return Usage(sent, got, cached, reasoning) if sent + got else None


def _find_part(usage: dict[str, Any], *names: str) -> dict[str, Any]:
    return next((usage[name] for name in names if isinstance(usage.get(name), dict)), {})


def _read_number(of: dict[str, Any], *names: str) -> int:
    numbers = (of[name] for name in names if isinstance(of.get(name), int | float))
    return next((int(number) for number in numbers if 0 <= number < MAX_COUNT), 0)


@dataclass(frozen=True, slots=True)
class Price:
    """What a million tokens cost, in one currency. `cached` None: as much as other input. Raises ValueError."""

    input: float
    output: float
    cached: float | None = None

    def __post_init__(self) -> None:
        for each in (self.input, self.output, self.cached or 0):
            if not (isinstance(each, int | float) and each >= 0):
                raise ValueError(f"{each!r} is no price")

    def of(self, usage: Usage) -> float:
        """The price of these tokens."""
        cached = self.input if self.cached is None else self.cached
        fresh = max(0, usage.input - usage.cached)
        return (fresh * self.input + usage.cached * cached + usage.output * self.output) / 1_000_000
