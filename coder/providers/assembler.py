"""The chunks of one answer -> one Completion. Tolerant of what real servers send (docs/servers.md has examples).

`Assembler.feed` takes one chunk (the JSON of an event) and gives its deltas, `Assembler.completion` judges the whole. No
rule asks which server it is.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from typing import Any

from coder.events import Event, ReasoningDelta, TextDelta
from coder.providers.errors import classify
from coder.providers.reasoning import ECHOED, REASONING, THINK, ThinkTag, joined
from coder.providers.text import mend, mend_all
from coder.providers.tool_call_deltas import ToolCallAssembler
from coder.providers.usage import read_usage
from coder.types import Completion, Finish, Message, ModelError, ToolCall, Usage

# Words for finish_reason, lower case.
LENGTH = {"length", "max_tokens", "model_length", "max_output_tokens"}
FILTER = {
    *("content_filter", "sensitive", "safety", "refusal", "guardrail_intervened", "error_toxic"),
    *("recitation", "prohibited_content", "blocklist", "spii"),
}
FAILED = {
    *("error", "network_error", "insufficient_system_resource", "abort"),
    *("malformed_function_call", "unexpected_tool_call"),
}
OVERFLOW = "model_context_window_exceeded"
LOST = {"tool_calls", "tool_use", "function_call", ""}  # with neither a call nor a text
THOUGHTS = frozenset(REASONING)
ONLY_TEXT = {"role", "content"}


class Assembler:
    """Collects the chunks of one answer. `tool_names` are the tools that were offered, `echoed` the members of a delta,
    beside the API's own, that the server wants back with the message."""

    def __init__(self, tool_names: Container[str] = (), echoed: Iterable[str] = ECHOED) -> None:
        self.echoed = frozenset(echoed)
        self._others = self.echoed - THOUGHTS
        self.kept: dict[str, list[Any]] = {}  # pieces of echoed members, by name
        self.text: list[str] = []
        self.thoughts: dict[str, list[str]] = {}  # by the name they came under
        self.calls = ToolCallAssembler(tool_names)
        self.usage: Usage | None = None
        self.finish_reason = ""
        self.done = False  # the end mark came
        self._listed = False  # an entry of tool_calls came
        self._half = ""  # of a surrogate pair whose second half comes with the next delta
        self._tag = ThinkTag()

    # -- taking chunks

    def feed(self, chunk: Any) -> Sequence[Event]:
        """Take one chunk; the deltas that it adds. Raises ModelError where the chunk is an error."""
        if not isinstance(chunk, dict):
            return ()
        if text := self._only_text(chunk):
            self.text.append(text)
            return (TextDelta(text),)
        if chunk.get("error") or chunk.get("object") == "error" or chunk.get("type") == "error":
            raise classify(None, chunk)
        self._count(chunk)
        events: list[Event] = []
        for choice in chunk.get("choices") or ():
            if not choice:
                continue
            self._count(choice)
            if choice.get("error"):
                raise classify(None, choice)
            delta = choice.get("delta") or (None if self.begun else choice.get("message"))
            if delta:
                self._delta(delta, events)
            if reason := choice.get("finish_reason"):
                self.finish_reason = str(reason)  # only remembered: data may follow
        return events

    def _only_text(self, chunk: dict[str, Any]) -> str:
        """The text of a chunk that has nothing else, as most have; "" where it has to be looked at member by member."""
        choices = chunk.get("choices")
        if type(choices) is not list or len(choices) != 1 or type(choices[0]) is not dict:
            return ""
        delta = choices[0].get("delta")
        if type(delta) is not dict or not delta.keys() <= ONLY_TEXT or self._half:
            return ""
        if self._tag.state != "text" or chunk.get("object") == "error" or "type" in chunk:
            return ""
        for part in (chunk, choices[0]):
            if part.get("usage") or part.get("error") or part.get("finish_reason"):
                return ""
        text = delta.get("content")
        return text if type(text) is str and text.isascii() else ""

    def flush(self) -> Sequence[Event]:
        """The answer is over: the deltas of what was held back."""
        events: list[Event] = []
        thought, text = self._tag.rest()
        self._thought(thought, events)
        self._text(text, events)
        return events

    @property
    def begun(self) -> bool:
        return bool(self.text or self.calls or any(map(any, self.thoughts.values())))

    def _count(self, source: dict[str, Any]) -> None:
        if isinstance(usage := source.get("usage"), dict):
            self.usage = read_usage(usage) or self.usage  # the last one counts

    def _delta(self, delta: dict[str, Any], events: list[Event]) -> None:
        """All members of one delta: any of them may come together or be null."""
        if not THOUGHTS.isdisjoint(delta):
            self._thinking(delta, events)
        for content in (delta.get("content"), delta.get("refusal")):
            if isinstance(content, str):
                self._say(content, events)
            elif isinstance(content, list):
                self._parts(content, events)
        if "tool_calls" in delta or "function_call" in delta:
            calls = [call for call in delta.get("tool_calls") or () if call]
            self._listed = self._listed or bool(calls)
            function = delta.get("function_call")
            if function and not self._listed:  # the older form; some servers send both
                calls = [{"index": 0, "function": function}]
            events += map(self.calls.add, calls)
        for name in self._others & delta.keys():
            if delta[name]:
                self.kept.setdefault(name, []).append(delta[name])

    def _thinking(self, delta: dict[str, Any], events: list[Event]) -> None:
        """Some servers send the same thought under two names: it is shown once."""
        shown = False
        for name in REASONING:
            value = delta.get(name)
            if isinstance(value, str):  # also "": it may have to go back
                self.thoughts.setdefault(name, []).append(value)
                if value and not shown:
                    shown = True
                    events.append(ReasoningDelta(mend(value)))

    def _parts(self, parts: list[Any], events: list[Event]) -> None:
        """Content as a list of text and thinking (Mistral)."""
        for part in parts:
            if not isinstance(part, dict):
                continue
            thinking = part.get("thinking")
            if isinstance(part.get("text"), str):
                self._say(part["text"], events)
            elif isinstance(thinking, str):
                self._thought(thinking, events)
            else:
                texts = (item.get("text") for item in thinking or () if isinstance(item, dict))
                self._thought("".join(str(text or "") for text in texts), events)

    def _say(self, text: str, events: list[Event]) -> None:
        if self._half or not text.isascii():
            text = self._whole(text)
        if self._tag.state != "text":
            thought, text = self._tag.split(text)
            self._thought(thought, events)
        self._text(text, events)

    def _text(self, text: str, events: list[Event]) -> None:
        if text:
            self.text.append(text)
            events.append(TextDelta(text))

    def _thought(self, text: str, events: list[Event]) -> None:
        if text:
            self.thoughts.setdefault(THINK, []).append(text)
            events.append(ReasoningDelta(mend(text)))

    def _whole(self, text: str) -> str:
        """Half a surrogate pair waits for the next piece."""
        text, self._half = self._half + text, ""
        if "\ud800" <= text[-1:] <= "\udbff":
            text, self._half = text[:-1], text[-1]
        return mend(text)

    # -- judging the whole

    @property
    def ended(self) -> bool:
        """A finish_reason or the end mark is enough: some servers send only one of them."""
        return bool(self.finish_reason or self.done)

    def completion(self) -> Completion:
        """The answer. Raises ModelError where it is none."""
        word = self.finish_reason.lower()
        text, calls = mend("".join(self.text) + self._half), self.calls.finished()
        if not self.ended:
            raise ModelError("incomplete", "the answer was cut off", retryable=True)
        if word in FAILED:
            problem = f"the server ended the answer with {self.finish_reason!r}"
            raise ModelError("server", problem, retryable=True)
        if word == OVERFLOW and not text:
            raise ModelError("overflow", "the context is full")
        finish = _finish(word, bool(calls))
        calls = [] if finish == "content_filter" else calls
        if not text and not calls and word in LOST:  # something did not arrive
            raise ModelError("empty", "the answer was empty", retryable=True)
        names = [name for name in (*REASONING, THINK) if any(self.thoughts.get(name, ()))]
        name = next(iter([*names, *self.thoughts]), "")
        thoughts = mend("".join(self.thoughts.get(name, ())))
        message = self._message(text, {name: thoughts} if name in self.echoed else {}, calls)
        usage = self.usage or Usage(estimated=True)
        made = [call for call, _ in calls]
        return Completion(text, made, finish, message, usage, thoughts, self.finish_reason)

    def _message(
        self, text: str, thoughts: Message, calls: list[tuple[ToolCall, Message]]
    ) -> Message:
        """The entry for the history; what is echoed goes back under the name it came with."""
        message: Message = {"role": "assistant", "content": text or None} | thoughts
        with suppress(ValueError):  # nested too deeply to be meant
            message |= {name: mend_all(joined(pieces)) for name, pieces in self.kept.items()}
        if calls:
            message["tool_calls"] = [entry for _, entry in calls]
        return message


def _finish(word: str, calls: bool) -> Finish:
    """Calls count whatever the word; an unknown word is an end."""
    if word in LENGTH or word == OVERFLOW:
        return "length"
    if word in FILTER:
        return "content_filter"
    return "tool_calls" if calls else "stop"
