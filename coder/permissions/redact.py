"""Take the values of API keys out of what is shown, sent, recorded or kept.

    redactor = Redactor("sk-...")
    redactor.text("my key is sk-...")           # "my key is [API key, not shown]"
    model = RedactingModel("gpt-5", api_key="sk-...", redactor=redactor)
    hooks = HookChain(..., Redaction(redactor))  # the last one, so that it gets what the others return

A key is found as it is, as JSON and URLs escape it, and over the borders of pieces of a stream. The hook
covers what tools return, the model what is sent and answered. This guards against accidents: a program
that reads a key can write it in another way, or only a part of it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import groupby
from typing import Any, cast
from urllib.parse import quote

from coder.abort import Abort
from coder.ai import ChatModel
from coder.events import Event, ReasoningDelta, Returning, TextDelta, ToolCallDelta
from coder.hooks import Hooks
from coder.providers.text import clean, new_id, safe_name
from coder.tools.environment import is_secret
from coder.toolset import ToolContext
from coder.types import Completion, ModelError, Request, ToolCall, ToolResult

HIDDEN = "[API key, not shown]"
LEAST_KEY = 8  # characters
NO_KEY = re.compile(  # what people write where a local server wants a key and does not check it
    r"(?:(?:not|none|no|any(?:thing)?|sk|api|key|dummy|fake|test(?:ing)?|local(?:host)?|placeholder"
    r"|required?|need(?:ed)?|your|my|here|ollama|llama|vllm|lm|studio|empty|null|secret|token|change"
    r"|me|password|example|xx+|0+|12345678(?:90?)?)[-_. ]?)++",
    re.I,
)
WRITING = {"write", "edit", "apply_patch"}


# ---- one text --------------------------------------------------------------------------------------------


class Redactor:
    """Replaces the values of keys in texts, bytes and JSON values by `instead`."""

    def __init__(self, *keys: str | None, instead: str = HIDDEN) -> None:
        self.instead = instead
        self._spellings: list[str] = []  # the longest first, since one key may hold another
        for key in keys:
            self.hide(key)

    def hide(self, key: str | None) -> None:
        """Replace this key, too, from now on, unless it is too short or no secret."""
        key = (key or "").strip()
        if len(key) < LEAST_KEY or NO_KEY.fullmatch(key):
            return
        escaped = json.dumps(key)[1:-1]
        spellings = {key, escaped, json.dumps(escaped)[1:-1], quote(key, safe=""), safe_name(key)}
        self._spellings = sorted({*self._spellings, *spellings}, key=len, reverse=True)

    def text(self, text: str) -> str:
        for spelling in self._spellings:
            text = text.replace(spelling, self.instead)
        return text

    def data(self, data: bytes) -> bytes:
        for spelling in self._spellings:
            data = data.replace(spelling.encode("utf-8", "replace"), self.instead.encode())
        return data

    def value(self, value: Any) -> Any:
        """Redact every string in a JSON value; the same object where there is nothing to replace."""
        return redacted(value, self.text) if self._spellings else value

    def stream(self) -> Stream:
        return Stream(self)

    def partial(self, text: str) -> int:
        """Count the characters at the end of a text that may be the beginning of a key."""
        for size in range(min(len(text), max(map(len, self._spellings), default=0)), 0, -1):
            if any(spelling.startswith(text[-size:]) for spelling in self._spellings):
                return size
        return 0


def redacted(value: Any, redact: Callable[[str], str]) -> Any:
    """Redact every string in a JSON value; the same object where nothing changed."""
    if isinstance(value, str):
        new: Any = redact(value)
        return value if new == value else new
    if isinstance(value, list):
        new = [redacted(item, redact) for item in value]
        return value if all(a is b for a, b in zip(value, new)) else new
    if isinstance(value, dict):
        new = {redacted(name, redact): redacted(item, redact) for name, item in value.items()}
        is_same = all(name in new and new[name] is item for name, item in value.items())
        return value if is_same else new
    return value


class Stream:
    """Redacts a text that comes in pieces: what may be the beginning of a key waits for the next."""

    def __init__(self, redactor: Redactor) -> None:
        self.redactor = redactor
        self._held = ""

    def text(self, text: str) -> str:
        """Redact a whole text beside the stream."""
        return self.redactor.text(text)

    def add(self, text: str) -> str:
        """Take a piece; returns what can be shown by now."""
        text = self.redactor.text(self._held + text)
        end = len(text) - self.redactor.partial(text)
        self._held = text[end:]
        return text[:end]

    def rest(self, under: float = math.inf) -> str:
        """Return what was held back: at the end, or in a pause where it is shorter than `under`."""
        if len(self._held) >= under:
            return ""
        rest, self._held = self._held, ""
        return rest


# ---- tools and models ------------------------------------------------------------------------------------


class Redaction(Hooks):
    """Redacts what tools return: their updates, the preview of a question, their results."""

    def __init__(self, redactor: Redactor) -> None:
        self.redactor = redactor

    def before_tool_call(self, call: ToolCall, ctx: ToolContext) -> ToolResult | None:
        ctx.redact = self.redactor.stream()
        if call.name in WRITING and HIDDEN in str(call.arguments):
            return ToolResult(
                f"Error: {HIDDEN!r} stands for a key that is not shown to you, and writing this "
                "would put it in the key's place. Leave that line out of your change.",
                is_error=True,
            )
        return None

    def after_tool_call(self, call: ToolCall, result: ToolResult) -> ToolResult | None:
        content, details = self.redactor.value(result.content), self.redactor.value(result.details)
        if content is result.content and details is result.details:
            return None
        return ToolResult(content, result.is_error, details)


class RedactingModel(ChatModel):
    """A ChatModel that neither sends the keys of its redactor nor passes them on."""

    def __init__(self, name: str, *, redactor: Redactor, **options: Any) -> None:
        super().__init__(name, **options)
        self.redactor = redactor

    def stream(self, request: Request, abort: Abort) -> Generator[Event, None, Completion]:
        """As ChatModel's."""
        value, text = self.redactor.value, self.redactor.text
        asked = dataclasses.replace(
            request, messages=value(request.messages), system=text(request.system)
        )
        names = CallNames(self.redactor)
        try:
            with Returning(super().stream(asked, abort)) as answer:
                yield from _deltas(answer, self.redactor.stream(), names)
        except ModelError as error:
            error.message, error.request_id = text(error.message), value(error.request_id)
            error.args = (error.message,)
            raise
        return self._redacted(answer.value, names)

    def _redacted(self, answer: Completion, names: CallNames) -> Completion:
        value, text = self.redactor.value, self.redactor.text
        for call, entry in zip(answer.calls, answer.message.get("tool_calls") or ()):
            call.id, call.name = names.id(call.id), names.name(call.name)
            call.arguments, call.problem = value(call.arguments), text(call.problem)
            entry["id"], entry["function"]["name"] = call.id, call.name
        answer.text, answer.reasoning = text(answer.text), text(answer.reasoning)
        answer.message = value(answer.message)
        answer.finish_reason = text(answer.finish_reason)
        return answer


class CallNames:
    """Ids and names of one answer's calls without keys, in the forms that servers take back."""

    def __init__(self, redactor: Redactor) -> None:
        self.redactor = redactor
        self._ids: dict[str, str] = {}

    def id(self, call_id: str) -> str:
        """The id, or a new one in the place of one that holds a key, the same wherever it stands."""
        text, part = self.redactor.text(call_id), self.redactor.partial(call_id)
        is_clean = text == call_id and part < LEAST_KEY
        return call_id if is_clean else self._ids.setdefault(call_id, new_id())

    def name(self, name: str) -> str:
        """The name, or its beginning as far as it has come."""
        part = self.redactor.partial(name)
        shown = self.redactor.text(name[:-part] if part >= LEAST_KEY else name)
        return name if shown == name else safe_name(shown)


FIELD: dict[type[Event], str] = {
    TextDelta: "text",
    ReasoningDelta: "text",
    ToolCallDelta: "arguments",
}


def _deltas(events: Iterable[Event], stream: Stream, names: CallNames) -> Iterator[Event]:
    """Redact the deltas of an answer; successive ones of a kind are one text."""
    for (kind, _), group in groupby(events, lambda event: (type(event), getattr(event, "id", ""))):
        field, event = FIELD.get(kind), cast(Any, None)
        for event in group:
            if isinstance(event, ToolCallDelta):
                call_id, name = names.id(event.id), names.name(event.name)
                event = dataclasses.replace(event, id=call_id, name=name)
            if field:
                text = getattr(event, field)
                shown = stream.add(text)
                if shown != text:
                    event = dataclasses.replace(event, **{field: shown})
            yield event
        if field and (rest := stream.rest()):
            yield dataclasses.replace(event, **{field: rest})


def redact_logs(redactor: Redactor) -> None:
    """Redact what all of Python's loggers write from now on, and strip what drives a terminal.

    Libraries log what they send and get (OPENAI_LOG=debug). An exception becomes text here, since
    whoever formats it later would write it as it is.
    """
    make = logging.getLogRecordFactory()

    def make_redacted(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        record.msg, record.args = redactor.text(clean(_message(record))), ()
        if record.exc_info:
            raised = logging.Formatter().formatException(record.exc_info)
            record.exc_text, record.exc_info = redactor.text(clean(raised)), None
        return record

    logging.setLogRecordFactory(make_redacted)


def _message(record: logging.LogRecord) -> str:
    """The message; one that does not fit its arguments is written as it is."""
    try:
        return record.getMessage()
    except (TypeError, ValueError, LookupError, OverflowError):
        return f"{record.msg} {record.args!r}"


# ---- what looks like a secret ----------------------------------------------------------------------------

REMOVED = "[removed]"
KEY_SHAPES = re.compile(
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)"
    r"|\b(?:(?:sk|rk|pk)-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|glpat-[\w-]{16,}|xox[abeoprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}\b|AIza[\w-]{30,}"
    r"|hf_[A-Za-z0-9]{20,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,})",
    re.S,
)
# The other patterns begin with a word and have bounds, so that the time is linear in the text.
HEADER = re.compile(
    r"(?i)(authorization\\?[\"']?\s{0,3}[:=]\s{0,3}\\?[\"']?(?:(?:bearer|basic|token|digest)\s{1,3})?)"
    r"[^\s\"'\\]+"
)
ADDRESS = re.compile(r"(://[^\s/:@\"']{0,100}:)[^\s/@\"']{1,300}(?=@)")
VARIABLE = re.compile(r"(\b([A-Z][A-Z0-9_]*)=)(\"[^\"\n]*\"|'[^'\n]*'|[^\s\"']+)")  # as in a .env
MEMBER = re.compile(  # as in JSON and in code, where the value is one word
    r"(?i)((?:key|token|secret|passw|credential|auth)[\w-]{0,40}\\?[\"']?\s{0,3}[:=]\s{0,3}\\?([\"']))"
    r"[^\s\"'\\]{8,}(?=\\?\2)"
)


def without_secrets(text: str) -> str:
    """Replace what is a secret by its shape or by the name before it: for what is exported."""

    def variable(found: re.Match[str]) -> str:
        return found[1] + REMOVED if is_secret(found[2]) else found[0]

    text = KEY_SHAPES.sub(REMOVED, text)
    for pattern in (HEADER, ADDRESS):
        text = pattern.sub(rf"\1{REMOVED}", text)
    return MEMBER.sub(rf"\1{REMOVED}", VARIABLE.sub(variable, text))
