"""Redact: the values of our keys, taken out of what is shown, sent, recorded or kept.

    redactor = Redactor("sk-...")
    redactor.text("my key is sk-...")           # "my key is [API key, not shown]"
    model = RedactingModel("gpt-5", api_key="sk-...", redactor=redactor)
    hooks = HookChain(..., Redaction(redactor))  # the last one, so that it sees what the others have made of a result

A key is found however JSON spells it, over the borders of pieces, and where half of it is left of a longer text that was cut. The
hook sees to what tools say, the model to what is asked and answered. It is a guard against accidents: a program that reads a key
can write it in another way. What it leaves out: values under 8 characters and words such as "not-needed", which local servers
take for a key.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Generator
from typing import Any, cast

from coder.abort import Abort
from coder.ai import ChatModel
from coder.environment import is_secret
from coder.text import clean
from coder.tools import ToolContext
from coder.types import (
    Completion,
    Event,
    Hooks,
    ModelError,
    ReasoningDelta,
    Request,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    ToolResult,
)

HIDDEN = "[API key, not shown]"
LEAST_KEY = 8  # characters
LEAST_HALF = 12  # characters of a key that are taken for it where a text was cut
NO_KEY = re.compile(  # what people write where a server wants a key and does not look at it
    r"(?:(?:not|none|no|any(?:thing)?|sk|api|key|dummy|fake|test(?:ing)?|local(?:host)?|placeholder|required?|need(?:ed)?|your|my|here|"
    r"ollama|llama|vllm|lm|studio|empty|null|secret|token|change|me|password|example|xx+|0+|12345678(?:90?)?)[-_. ]?)++", re.I)
WRITING = {"write", "edit", "apply_patch"}


# ---- one text --------------------------------------------------------------------------------------------


def spellings(text: str) -> str:
    """A regular expression for a text as any encoder of JSON may write it: PHP's has \\/ for /, Go's \\u0026 for &, Gson's \\u003d
    for =; JSON inside of JSON has more backslashes. No encoder escapes letters and digits."""
    parts = [] if re.match("[A-Za-z0-9]", text) else [r"(?<!\\)"]  # a run of backslashes is tried once, as a whole
    for piece in re.findall(r"[A-Za-z0-9]+|\\+|.", text, re.S):
        units = r"\\++u".join(piece.encode("utf-16-be", "surrogatepass").hex(" ", 2).split())
        other = r"\\++" if piece[0] == "\\" else rf"\\*+(?:{re.escape(piece)}|u(?i:{units}))"
        parts.append(piece if re.fullmatch(r"[A-Za-z0-9]+", piece) else other)
    return "".join(parts)


class _Key:
    """One key, and what finds it."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.pattern = re.compile(spellings(key))
        self.raw = re.compile(spellings(key).encode("utf-8", "backslashreplace"))
        self.sure = max(re.findall("[A-Za-z0-9]*", key), key=len)  # is in every spelling: looked for first, which is much faster
        self.sure_raw = self.sure.encode()
        half = len(key) // 2
        self.halves = (key[:half], key[-half:]) if half >= LEAST_HALF else ()

    def text(self, text: str, instead: str) -> str:
        if self.sure in text:
            text = self.pattern.sub(lambda _: instead, text)
        if self.halves and self.halves[0] in text:
            text = self._cut(text, self.halves[0], instead)
        if self.halves and self.halves[1] in text:
            text = self._cut(text[::-1], self.halves[1][::-1], instead[::-1], self.key[::-1])[::-1]
        return text

    def _cut(self, text: str, half: str, instead: str, key: str = "") -> str:
        """Replace what begins like the key, as far as it goes on like it."""
        key, done, at = key or self.key, "", 0
        while (found := text.find(half, at)) >= 0:
            end = found + len(half)
            while end - found < len(key) and text[end:end + 1] == key[end - found]:
                end += 1
            done, at = f"{done}{text[at:found]}{instead}", end
        return done + text[at:]


class Redactor:
    """Takes the values of keys out of texts, bytes and JSON values; `instead` stands in their place."""

    def __init__(self, *keys: str | None, instead: str = HIDDEN) -> None:
        self.instead = instead
        self._keys: list[_Key] = []
        for key in keys:
            self.hide(key)

    def hide(self, key: str | None) -> None:
        """Take this out, too, from now on, unless it is too short or no secret."""
        key = (key or "").strip()
        if len(key) >= LEAST_KEY and not NO_KEY.fullmatch(key) and all(each.key != key for each in self._keys):
            self._keys = sorted([*self._keys, _Key(key)], key=lambda each: -len(each.key))  # one may hold another

    def text(self, text: str) -> str:
        for key in self._keys:
            text = key.text(text, self.instead)
        return text

    def data(self, data: bytes) -> bytes:
        for key in self._keys:
            if key.sure_raw in data:
                data = key.raw.sub(self.instead.encode(), data)
        return data

    def value(self, value: Any) -> Any:
        """A JSON value with every string in it redacted; the same object where there is nothing to take out."""
        return redacted(value, self.text) if self._keys else value

    def stream(self) -> Stream:
        return Stream(self)

    def pending(self, text: str) -> int:
        """How many characters at the end of a text may be the beginning of a key."""
        whole = max((found.end() for key in self._keys if key.sure in text for found in key.pattern.finditer(text)), default=0)
        left = len(text) - whole
        return max((n for key in self._keys for n in range(1, min(len(key.key) - 1, left) + 1) if text.endswith(key.key[:n])), default=0)


def redacted(value: Any, redact: Callable[[str], str]) -> Any:
    """A JSON value with every string in it redacted; the same object where nothing changed."""
    if isinstance(value, str):
        new: Any = redact(value)
        return value if new == value else new
    if isinstance(value, list):
        new = [redacted(item, redact) for item in value]
        return value if all(a is b for a, b in zip(value, new)) else new
    if isinstance(value, dict):
        new = {redact(name) if isinstance(name, str) else name: redacted(item, redact) for name, item in value.items()}
        same = all(a == b and value[a] is new[b] for a, b in zip(value, new)) and len(value) == len(new)
        return value if same else new
    return value


class Stream:
    """A text that comes in pieces: what may be the beginning of a key waits for the next piece."""

    def __init__(self, redactor: Redactor) -> None:
        self.redactor = redactor
        self._held = ""

    def text(self, text: str) -> str:
        """A whole text beside the stream."""
        return self.redactor.text(text)

    def add(self, text: str) -> str:
        """Take a piece in; returns what can be shown by now."""
        text = self._held + text
        place = len(text) - self.redactor.pending(text)
        self._held = text[place:]
        return self.redactor.text(text[:place])

    def rest(self) -> str:
        """What was held back, at the end of the stream."""
        rest, self._held = self._held, ""
        return self.redactor.text(rest)


# ---- tools and models ------------------------------------------------------------------------------------


class Redaction(Hooks):
    """Takes keys out of what tools say: while they work, in the preview of a question, in their results."""

    def __init__(self, redactor: Redactor) -> None:
        self.redactor = redactor

    def before_tool_call(self, call: ToolCall, ctx: ToolContext) -> ToolResult | None:
        ctx.redact = self.redactor.stream()
        if call.name in WRITING and HIDDEN in str(call.arguments):
            return ToolResult(f"Error: {HIDDEN!r} stands for a key that is not shown to you, and writing this would put it in the key's "
                              "place. Leave that line out of your change.", is_error=True)
        return None

    def after_tool_call(self, call: ToolCall, result: ToolResult) -> ToolResult | None:
        content, details = self.redactor.value(result.content), self.redactor.value(result.details)
        if content is result.content and details is result.details:
            return None
        return ToolResult(content, result.is_error, details)


FIELD: dict[type[Event], str] = {TextDelta: "text", ReasoningDelta: "text", ToolCallDelta: "arguments"}


class RedactingModel(ChatModel):
    """A ChatModel that neither sends nor passes on the keys of its redactor."""

    def __init__(self, name: str, *, redactor: Redactor, **options: Any) -> None:
        super().__init__(name, **options)
        self.redactor = redactor

    def stream(self, request: Request, abort: Abort) -> Generator[Event, None, Completion]:
        """As ChatModel's."""
        asked = dataclasses.replace(request, messages=self.redactor.value(request.messages), system=self.redactor.text(request.system))
        try:
            answer = yield from _deltas(super().stream(asked, abort), self.redactor.stream())
        except ModelError as error:
            error.message = self.redactor.text(error.message)
            error.args = (error.message,)
            raise
        answer.text, answer.reasoning = self.redactor.text(answer.text), self.redactor.text(answer.reasoning)
        answer.message = self.redactor.value(answer.message)
        for call in answer.calls:
            call.arguments = self.redactor.value(call.arguments)
        return answer


def _deltas(answer: Generator[Event, None, Completion], stream: Stream) -> Generator[Event, None, Completion]:
    """Pass an answer on; each row of deltas of a kind is one text."""
    last: Event | None = None
    try:
        while True:
            try:
                event: Event | None = next(answer)
                completion = None
            except StopIteration as end:
                event, completion = None, cast(Completion, end.value)
            if last and (type(event), getattr(event, "id", "")) != (type(last), getattr(last, "id", "")):
                if rest := stream.rest():
                    yield _with(last, rest)
                last = None
            if completion:
                return completion
            if event and type(event) in FIELD:
                last = event
                event = _with(event, stream.add(getattr(event, FIELD[type(event)])))
            if event:
                yield event
    finally:
        answer.close()


def _with(delta: Any, text: str) -> Event:
    field = FIELD[type(delta)]
    changed: Event = delta if getattr(delta, field) == text else dataclasses.replace(delta, **{field: text})
    return changed


def redact_logs(redactor: Redactor) -> None:
    """Take the keys, and what drives a terminal, out of what all of Python's loggers write from now on: libraries log what they send
    and get (OPENAI_LOG=debug). An exception is written as text here, since whoever formats it later would write it as it is."""
    make = logging.getLogRecordFactory()

    def written(text: str) -> str:
        return redactor.text(clean(text))

    def redacted_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        record.msg, record.args = written(_message(record)), ()
        if record.exc_info:
            record.exc_text, record.exc_info = written(logging.Formatter().formatException(record.exc_info)), None
        return record

    logging.setLogRecordFactory(redacted_record)


def _message(record: logging.LogRecord) -> str:
    """The message; one that does not fit its arguments is no reason to fail (logging itself tells it and goes on)."""
    try:
        return record.getMessage()
    except (TypeError, ValueError, LookupError, OverflowError):
        return f"{record.msg} {record.args!r}"


# ---- what looks like a secret ----------------------------------------------------------------------------

REMOVED = "[removed]"
WHOLE = re.compile(  # keys by their shape
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)"
    r"|\b(?:sk|rk|pk)-[A-Za-z0-9_-]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|\bxox[abeoprs]-[\w-]{10,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[\w-]{30,}|\bhf_[A-Za-z0-9]{20,}|\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,}", re.S)
# The rest begins with a word and has bounds, so that no text takes longer than its length.
HEADER = re.compile(r"(?i)(authorization\\?[\"']?\s{0,3}[:=]\s{0,3}\\?[\"']?(?:(?:bearer|basic|token|digest)\s{1,3})?)[^\s\"'\\]+")
ADDRESS = re.compile(r"(://[^\s/:@\"']{0,100}:)[^\s/@\"']{1,300}(?=@)")
VARIABLE = re.compile(r"(\b([A-Z][A-Z0-9_]*)=)(\"[^\"\n]*\"|'[^'\n]*'|[^\s\"']+)")  # as in an environment, a .env
MEMBER = re.compile(  # as in JSON and in code, where the value is one word
    r"(?i)((?:key|token|secret|passw|credential|auth)[\w-]{0,40}\\?[\"']?\s{0,3}[:=]\s{0,3}\\?([\"']))[^\s\"'\\]{8,}(?=\\?\2)")


def _variable(found: re.Match[str]) -> str:
    return found[1] + REMOVED if is_secret(found[2]) else found[0]


# (one of these words, in small letters, is in whatever the pattern finds; the pattern; what takes its place). To look for the words
# first is a hundred times faster.
RULES: list[tuple[tuple[str, ...], re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (("-----begin ", "sk-", "rk-", "pk-", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "xox", "akia", "asia", "aiza",
      "hf_", "eyj"), WHOLE, REMOVED),
    (("authorization",), HEADER, rf"\1{REMOVED}"),
    (("://",), ADDRESS, rf"\1{REMOVED}"),
    (("=",), VARIABLE, _variable),
    (("key", "token", "secret", "passw", "credential", "auth"), MEMBER, rf"\1{REMOVED}")]


def without_secrets(text: str) -> str:
    """A text without what is a secret by its shape, or by the name before it: for what leaves our hands (features/export.py)."""
    small = text.lower()
    for words, pattern, instead in RULES:
        if any(word in small for word in words):
            text = pattern.sub(instead, text)
    return text
