"""Take the values of API keys out of what is shown, sent, recorded or kept.

    redactor = Redactor("sk-...")
    redactor.text("my key is sk-...")           # "my key is [API key, not shown]"
    model = ChatModel("gpt-5", api_key="sk-...", redact=redactor.data)
    hooks = HookChain(..., Redaction(redactor))  # last, so that it gets what the other hooks return

A key is found as it is, or as JSON escapes it. Whatever enters the conversation is redacted when it
does: results and answers by the hook, prompts by the caller, and for the screen the model redacts
what it reads from the server. docs/security.md says what this does not prevent.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import sys
from collections.abc import Callable
from typing import Any

from coder.history import FILE_TOOLS
from coder.hooks import Hooks
from coder.permissions.sanitize import strip_controls
from coder.tools.secrets import is_secret
from coder.toolset import ToolContext
from coder.types import Completion, Request, ToolCall, ToolResult

HIDDEN = "[API key, not shown]"
MIN_KEY = 8  # characters
# What users write if a local server wants a key and does not check it
PLACEHOLDER = (
    r"(?i)anything|placeholder|password|localhost|lm-studio|not-(needed|required)|your-api-key"
    r"|sk-no-key(-required)?|no-key-required|x{8,}|12345678|123456789|1234567890"
)


class Redactor:
    """Replaces the values of keys in texts, bytes and JSON values by `instead`."""

    def __init__(self, *keys: str | None, instead: str = HIDDEN) -> None:
        self.instead = instead
        self._spellings: list[str] = []  # the longest first, since one key may hold another
        for key in keys:
            self.hide(key)

    def hide(self, key: str | None) -> None:
        """Replace this key, too, from now on, unless it is too short or a placeholder."""
        key = (key or "").strip()
        if len(key) >= MIN_KEY and not re.fullmatch(PLACEHOLDER, key):
            spellings = {*self._spellings, key, json.dumps(key)[1:-1]}
            self._spellings = sorted(spellings, key=len, reverse=True)

    def text(self, text: str) -> str:
        for spelling in self._spellings:
            text = text.replace(spelling, self.instead)
        return text

    def data(self, data: bytes) -> bytes:
        for spelling in self._spellings:
            data = data.replace(spelling.encode("utf-8", "replace"), self.instead.encode())
        return data


def redacted(value: Any, redact: Callable[[str], str]) -> Any:
    """Redact every string in a JSON value."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, list):
        return [redacted(item, redact) for item in value]
    if isinstance(value, dict):
        return {redact(name): redacted(item, redact) for name, item in value.items()}
    return value


# ---- the conversation and logs -------------------------------------------------------------------


class Redaction(Hooks):
    """Redacts the system prompt, since it holds files; answers; and what tools return: their
    updates, the preview of a question, their results."""

    def __init__(self, redactor: Redactor) -> None:
        self.redactor = redactor

    def before_llm_call(self, request: Request) -> None:
        request.system = self.redactor.text(request.system)

    def after_llm_call(self, answer: Completion) -> None:
        parts: list[Completion | ToolCall] = [answer, *answer.calls]
        for part in parts:
            for field in dataclasses.fields(part):
                setattr(part, field.name, redacted(getattr(part, field.name), self.redactor.text))

    def before_tool_call(self, call: ToolCall, ctx: ToolContext) -> ToolResult | None:
        ctx.redact = self.redactor.text
        if call.name in FILE_TOOLS and HIDDEN in str(call.arguments):
            return ToolResult(
                f"Error: {HIDDEN!r} stands for a key that is not shown to you, and writing this "
                "would put it in the key's place. Leave that line out of your change.",
                is_error=True,
            )
        return None

    def after_tool_call(self, call: ToolCall, result: ToolResult) -> ToolResult:
        redact = self.redactor.text
        return dataclasses.replace(
            result,
            content=redacted(result.content, redact),
            details=redacted(result.details, redact),
        )


def redact_logs(redactor: Redactor) -> None:
    """Redact what all of Python's loggers write from now on, and strip terminal escapes from it.

    Libraries log what they send and receive (OPENAI_LOG=debug).
    """
    if "logging" in sys.modules:
        _redact_records(redactor)
    else:
        sys.meta_path.insert(0, _LoggingFinder(redactor))


class _LoggingFinder:
    """Redacts logs as soon as somebody imports `logging`: a start without it saves 7 ms."""

    def __init__(self, redactor: Redactor) -> None:
        self.redactor = redactor

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name != "logging":
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: object) -> None:
            execute(module)
            _redact_records(self.redactor)

        spec.loader.exec_module = exec_module
        return spec


def _redact_records(redactor: Redactor) -> None:
    """An exception becomes text here, since whoever formats it later would write it as it is."""
    import logging  # late: see _LoggingFinder

    make = logging.getLogRecordFactory()

    def make_redacted(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        try:
            text = record.getMessage()
        except Exception:  # it does not fit its arguments
            text = f"{record.msg} {record.args!r}"
        record.msg = redactor.text(strip_controls(text))
        record.args = ()
        if record.exc_info:
            text = logging.Formatter().formatException(record.exc_info)
            record.exc_text = redactor.text(strip_controls(text))
            record.exc_info = None
        return record

    logging.setLogRecordFactory(make_redacted)


# ---- what looks like a secret --------------------------------------------------------------------

REMOVED = "[removed]"
# What is kept is in the first group. Each begins with a word and has bounds, so that the time is
# linear in the text.
SHAPES = [
    r"(?s)()(?:-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----"
    r".*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)"
    r"|\b(?:(?:sk|rk|pk)-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|glpat-[\w-]{16,}|xox[abeoprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}\b|AIza[\w-]{30,}"
    r"|hf_[A-Za-z0-9]{20,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,}))",
    # a header
    r"(?i)(authorization\\?[\"']?\s{0,3}[:=]\s{0,3}\\?[\"']?(?:(?:bearer|basic|token)\s{1,3})?)"
    r"[^\s\"'\\]+",
    r"(://[^\s/:@\"']{0,100}:)[^\s/@\"']{1,300}(?=@)",  # an address with a password
    # as in JSON and in code, if the value is one word
    r"(?i)((?:key|token|secret|passw|credential|auth)[\w-]{0,40}\\?[\"']?\s{0,3}[:=]\s{0,3}"
    r"\\?([\"']))[^\s\"'\\]{8,}(?=\\?\2)",
]
VARIABLE = r"(\b([A-Z][A-Z0-9_]*)=)(\"[^\"\n]*\"|'[^'\n]*'|[^\s\"']+)"  # as in a .env


def without_secrets(text: str) -> str:
    """Replace what is a secret by its shape or by the name before it: for what is exported."""
    for shape in SHAPES:
        text = re.sub(shape, rf"\1{REMOVED}", text)
    return re.sub(VARIABLE, _without_value, text)


def _without_value(variable: re.Match[str]) -> str:
    if is_secret(variable[2]):
        return variable[1] + REMOVED
    return variable[0]
