"""The chunks of one answer -> one Completion. Tolerant of what real servers send
(tests/data/quirks.jsonl has examples).

`Assembler.feed` takes one chunk (the JSON of an event) and gives its deltas, `Assembler.completion`
judges the whole. No rule asks which server it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from coder.events import Event, ReasoningDelta, TextDelta
from coder.providers.call_assembler import ToolCallAssembler
from coder.providers.errors import classify
from coder.providers.profiles import ECHOED, REASONING, THINK, read_usage
from coder.providers.text import (
    JsonObject,
    ThinkTag,
    dictionaries,
    join_pieces,
    mend,
    mend_all,
    strings,
)
from coder.types import Completion, Finish, Message, ModelError, ToolCall, Usage

# Words for finish_reason, lower case.
OVERFLOW = "model_context_window_exceeded"
LENGTH = {
    OVERFLOW,
    "length",
    "max_tokens",
    "model_length",
    "max_output_tokens",
}
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
FINISH: dict[str, Finish] = dict.fromkeys(LENGTH, "length")
FINISH |= dict.fromkeys(FILTER, "content_filter")
FAILED = {
    "error",
    "network_error",
    "insufficient_system_resource",
    "abort",
    "malformed_function_call",
    "unexpected_tool_call",
}
NO_WORD = {"", "null", "none"}  # some servers write null as a word
ONLY_TEXT = {"role", "content"}
CUT_OFF = "the answer was cut off"
LONE_END = "\n</think>\n"


class Assembler:
    """Collects the chunks of one answer. `echoed` are the members of a delta, besides the API's
    own, that the server wants back with the message."""

    def __init__(self, echoed: Iterable[str] = ECHOED) -> None:
        self.echoed = frozenset(echoed)
        self.kept: dict[str, list[Any]] = {}  # pieces of echoed members, by name
        self.text: list[str] = []
        self.thoughts: dict[str, list[str]] = {}  # by the name they came under
        self.calls = ToolCallAssembler()
        self.usage: Usage | None = None
        self.finish_reason = ""
        self.has_end_mark = False
        self._has_call_list = False  # an entry of tool_calls came
        self._tag = ThinkTag()

    # -- chunks

    def feed(self, chunk: Any) -> Sequence[Event]:
        """Take one chunk; returns the deltas that it adds. Raises ModelError if it is an error."""
        if not isinstance(chunk, dict):
            return ()
        text = self._only_text(chunk)
        if text:
            self.text.append(text)
            return (TextDelta(text),)
        kinds = (chunk.get("object"), chunk.get("type"))
        if chunk.get("error") or "error" in kinds:
            raise classify(None, chunk)
        choices = [choice for choice in chunk.get("choices") or () if choice]
        self._take_usage(chunk, *choices)
        deltas: list[Event] = []
        for choice in choices:
            deltas += self._take_choice(choice)
        return deltas

    def _only_text(self, chunk: JsonObject) -> str:
        """The text of a chunk that has nothing else, "" for any other.

        Most chunks are like this, but not the first text of an answer: until it has begun, a
        <think> tag may come. This runs for each token: dense, since it saves the whole way below.
        """
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

    def _take_usage(self, *parts: JsonObject) -> None:
        for part in parts:
            usage = part.get("usage")
            if isinstance(usage, dict):
                self.usage = read_usage(usage) or self.usage  # the last one counts

    def _take_choice(self, choice: JsonObject) -> Iterator[Event]:
        if choice.get("error"):
            raise classify(None, choice)
        delta = choice.get("delta")
        if not delta and not self.begun:
            delta = choice.get("message")  # of an answer that comes in one piece
        if delta:
            yield from self._take_thoughts(delta)
            for name in ("content", "refusal"):
                if delta.get(name):
                    yield from self._take_content(delta[name])
            yield from self._take_calls(delta)
            self._keep_echoed(delta)
        reason = str(choice.get("finish_reason") or "")
        if reason.lower() not in NO_WORD:
            self.finish_reason = reason  # only remembered: data may follow

    def _take_thoughts(self, delta: JsonObject) -> Iterator[Event]:
        """Some servers send the same thought under two names: it is shown once."""
        shown = ""
        for name in REASONING:
            thought = delta.get(name)
            if isinstance(thought, str):  # also "": it may have to go back
                self.thoughts.setdefault(name, []).append(thought)
                shown = shown or thought
        if shown:
            yield ReasoningDelta(mend(shown))

    def _take_content(self, content: Any) -> Iterator[Event]:
        parts = content if isinstance(content, list) else [{"text": content}]
        for part in dictionaries(parts):
            thought, text = self._split_part(part)
            yield from self._add(thought, text)

    def _split_part(self, part: JsonObject) -> tuple[str, str]:
        """(thought, text) of a text that may hold tags, or of another part of content (Mistral)."""
        text = part.get("text")
        if isinstance(text, str):
            return self._tag.split(text)
        thinking = part.get("thinking")
        if isinstance(thinking, str):
            return thinking, ""
        return "".join(strings(dictionaries(thinking), "text")), ""

    def _add(self, thought: str, text: str) -> Iterator[Event]:
        if thought:
            self.thoughts.setdefault(THINK, []).append(thought)
            yield ReasoningDelta(mend(thought))
        if text:
            self.text.append(text)
            yield TextDelta(mend(text))

    def _take_calls(self, delta: JsonObject) -> Iterator[Event]:
        calls = [call for call in delta.get("tool_calls") or () if call]
        if calls:
            self._has_call_list = True
        elif delta.get("function_call") and not self._has_call_list:
            calls = [{"index": 0, "function": delta["function_call"]}]  # older; some send both
        for call in calls:
            yield self.calls.add(call)

    def _keep_echoed(self, delta: JsonObject) -> None:
        for name in self.echoed & delta.keys():
            if name not in REASONING and delta[name]:
                self.kept.setdefault(name, []).append(delta[name])

    def flush(self) -> Iterator[Event]:
        """The answer is over: the deltas of what was held back."""
        thought, text = self._tag.rest()
        return self._add(thought, text)

    # -- what has come so far

    @property
    def begun(self) -> bool:
        """Has a piece of a text, a call or a thought come?"""
        return bool(self.text or self.calls.calls or self._has_thought)

    @property
    def _has_thought(self) -> bool:
        return any(any(pieces) for pieces in self.thoughts.values())

    @property
    def ended(self) -> bool:
        """Has the server said that this is the end? A finish_reason or the end mark is enough: some
        servers send only one of them."""
        return bool(self.finish_reason or self.has_end_mark)

    @property
    def is_whole(self) -> bool:
        """Is this all of the answer, if no more comes? A finish_reason alone does not say so: some
        servers send arguments of calls after it. After "length" and the like nothing more comes."""
        was_cut = self.finish_reason.lower() in FINISH
        if self.has_end_mark or was_cut:
            return True
        return self.ended and not any(call.is_open() for call in self.calls.calls)

    # -- the whole

    def completion(self) -> Completion:
        """The answer. Raises ModelError if there is none."""
        word = self.finish_reason.lower()
        self._check_end(word)
        text = self._whole_text()
        if word == OVERFLOW and not text:
            raise ModelError("overflow", "the context is full")

        # The calls, each with its entry for the message. After a content filter none counts
        calls = self.calls.finished()
        finish = FINISH.get(word, "tool_calls" if calls else "stop")
        if finish == "content_filter":
            calls = []
        if not (text or calls or word):  # something did not arrive
            raise ModelError("empty", "the answer was empty", retryable=True)

        # The thoughts, under the one name that goes back
        name = self._name_of_thoughts()
        pieces = self.thoughts.get(name, ())
        thoughts = mend("".join(pieces))
        return Completion(
            text=text,
            calls=[call for call, _ in calls],
            finish=finish,
            message=self._message(text, calls, name, thoughts),
            usage=self.usage or Usage(estimated=True),
            reasoning=thoughts,
            finish_reason=self.finish_reason,
        )

    def _check_end(self, word: str) -> None:
        if not self.ended:
            raise ModelError("incomplete", CUT_OFF, retryable=True)
        if word in FAILED:
            raise ModelError(
                "server",
                f"the server ended the answer with {self.finish_reason!r}",
                retryable=True,
            )

    def _whole_text(self) -> str:
        """The text; "" for white space alone. What comes before a </think> without a <think> goes
        to the thoughts: templates of some servers write the <think> into the prompt."""
        text = mend("".join(self.text))
        thought, end, answer = f"{text}\n".partition(LONE_END)
        if end and "<think>" not in thought and not self._has_thought:
            self.thoughts[THINK] = [thought]
            text = answer.strip("\n")
        return "" if text.isspace() else text

    def _name_of_thoughts(self) -> str:
        """The first name with a thought, else the first that came, else ""."""
        for name in (*REASONING, THINK):
            if any(self.thoughts.get(name, ())):
                return name
        return next(iter(self.thoughts), "")

    def _message(
        self,
        text: str,
        calls: Sequence[tuple[ToolCall, Message]],
        thoughts_name: str,
        thoughts: str,
    ) -> Message:
        """The entry for the history; what is echoed goes back under the name it came with."""
        message: Message = {"role": "assistant", "content": text or None}
        if thoughts_name in self.echoed:
            message[thoughts_name] = thoughts
        with suppress(ValueError):  # nested too deeply to be meant: none of them is sent back
            message |= {name: mend_all(join_pieces(pieces)) for name, pieces in self.kept.items()}
        if calls:
            message["tool_calls"] = [entry for _, entry in calls]
        return message


# ---- answers that look right and are not ---------------------------------------------------------

MAX_CHARS_PER_TOKEN = 12  # no text has more
DROPPED = """\
The server counts fewer tokens than the conversation has: perhaps its context is smaller than \
ours ({window}). Give it more (with Ollama by OLLAMA_CONTEXT_LENGTH, or num_ctx in the Modelfile), \
or set CODER_CONTEXT_WINDOW to what it has."""


def check_context(answer: Completion, window: int) -> None:
    """Raises ModelError if there was no room for a word: some servers report that as an answer that
    was cut at its limit."""
    is_empty = not (answer.text or answer.calls or answer.usage.output)
    if answer.finish == "length" and is_empty and answer.usage.input >= 0.99 * window:
        raise ModelError("overflow", "the context is full")


def has_dropped(answer: Completion, sent: bytes) -> bool:
    """Must the server have dropped messages, since it counts too few tokens for what was sent?"""
    usage = answer.usage
    has_few_tokens = MAX_CHARS_PER_TOKEN * usage.input < len(sent)
    if len(sent) <= 16_000 or not has_few_tokens:
        return False
    return not (usage.estimated or usage.cached or b'"image_url"' in sent)
