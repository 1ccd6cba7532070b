"""The user's commands as hooks, from hooks.json in the configuration folder.

    {"before_tool_call": [{"command": "~/bin/check", "tools": "bash|edit", "seconds": 10, "closed": true}]}

A command gets JSON on stdin: {"hook", "cwd", "session_id", "tool", "arguments", "result", "is_error"}, as far as
they are known. It may answer JSON on stdout: {"arguments": {...}} changes those of the call, {"result": "..."}
answers it, or replaces the tool's result. Exit code 2 blocks: the model gets what the command wrote to stderr.
Any other failure is reported, and ignored unless the hook is `closed`.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

from coder.abort import Abort
from coder.extend.guard import Guard
from coder.hooks import FunctionHooks, HookChain, Hooks
from coder.permissions.rules import check_ownership
from coder.tools.process import Ending, output_of
from coder.toolset import ToolContext
from coder.types import Completion, DeniedError, ModelError, Request, ToolCall, ToolResult

BLOCKED = 2  # exit code (Claude Code's)
PLACES = ("before_llm_call", "after_llm_call", "before_tool_call", "after_tool_call")
LIMIT = 100_000  # bytes of an answer that are read


class HooksError(Exception):
    """hooks.json cannot be used, in one line."""


def command_hooks(path: Path) -> HookChain:
    """The hooks that a file names; none where there is no file. Raises HooksError."""
    if not path.is_file():
        return HookChain()
    try:
        check_ownership(path)
        places = json.loads(path.read_text("utf-8"))
        named = [(place, entry) for place, entries in places.items() for entry in entries]
        return HookChain(*(_hook(place, entry, path.parent) for place, entry in named))
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise HooksError(f"{path}: {error}") from None


def _hook(place: str, entry: dict[str, Any], folder: Path) -> Hooks:
    if place not in PLACES:
        raise ValueError(f"there is no place {place!r}; known: {', '.join(PLACES)}")
    if unknown := entry.keys() - {"command", "tools", "seconds", "closed"}:
        raise ValueError(f"a hook has no {', '.join(sorted(unknown))}")
    text, seconds = str(entry["command"]), float(entry.get("seconds", 30))
    command = Command(text, re.compile(entry.get("tools", "")), seconds, folder)
    hooks = FunctionHooks(on_run_start=command.on_run_start, **{place: getattr(command, place)})
    return Guard(hooks, name=text, seconds=seconds + 1, closed=bool(entry.get("closed", False)))


class Blocked(Exception):
    """The exit code was 2; the text is what the command wrote to stderr."""


class Command:
    """One command. It runs in the configuration folder, so that a relative path is the user's."""

    def __init__(self, command: str, tools: re.Pattern[str], seconds: float, folder: Path) -> None:
        self.command, self.tools, self.seconds, self.folder = command, tools, seconds, folder
        self.abort = Abort()

    def on_run_start(self, abort: Abort) -> None:
        self.abort = abort

    def before_llm_call(self, request: Request) -> None:
        facts = {"session_id": request.session_id, "messages": request.messages}
        try:
            self._ask("before_llm_call", facts)
        except Blocked as blocked:
            raise ModelError("bad_request", f"{self.command}: {blocked}") from None

    def after_llm_call(self, completion: Completion) -> None:
        calls = [_call_facts(call) for call in completion.calls]
        self._ask("after_llm_call", {"text": completion.text, "calls": calls})

    def before_tool_call(self, call: ToolCall, ctx: ToolContext) -> ToolResult | None:
        if not self.tools.search(call.name):
            return None
        place = {"cwd": str(ctx.cwd), "session_id": ctx.session_id}
        try:
            answer = self._ask("before_tool_call", place | _call_facts(call))
        except Blocked as blocked:
            raise DeniedError(str(blocked)) from None
        if isinstance(answer.get("arguments"), dict):
            call.arguments = answer["arguments"]
        return ToolResult(answer["result"]) if isinstance(answer.get("result"), str) else None

    def after_tool_call(self, call: ToolCall, result: ToolResult) -> ToolResult | None:
        if not self.tools.search(call.name):
            return None
        facts = {"result": result.content, "is_error": result.is_error}
        try:
            text = self._ask("after_tool_call", _call_facts(call) | facts).get("result")
        except Blocked as blocked:
            return ToolResult(f"Withheld: {blocked}", is_error=True)
        replaced = ToolResult(str(text), result.is_error, result.details)
        return replaced if isinstance(text, str) else None

    def _ask(self, place: str, facts: dict[str, Any]) -> dict[str, Any]:
        """Run the command; the JSON object that it answers, or {}. Raises Blocked, or RuntimeError where it fails."""
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stderr:
            stdin.write(json.dumps({"hook": place} | facts, default=str).encode())
            stdin.seek(0)
            shell = ["/bin/sh", "-c", self.command]
            work = output_of(
                shell, self.folder, self.abort, self.seconds, stdin=stdin, stderr=stderr
            )
            stdout, ending = _read(work)
            stderr.seek(0)
            message = stderr.read(LIMIT).decode("utf-8", "replace").strip()
        if ending.code == BLOCKED and not ending.cause:
            raise Blocked(message or "blocked by a hook")
        if ending.code or ending.cause:
            failure = [ending.cause or f"exit code {ending.code}", message[:500]]
            raise RuntimeError(": ".join(filter(None, failure)))
        try:
            answer = json.loads(stdout)
        except ValueError:
            return {}
        return answer if isinstance(answer, dict) else {}


def _call_facts(call: ToolCall) -> dict[str, Any]:
    return {"tool": call.name, "arguments": call.arguments}


def _read(work: Generator[bytes, None, Ending]) -> tuple[bytes, Ending]:
    """What a command writes to stdout, and how it ended."""
    output = b""
    while True:
        try:
            output = (output + next(work))[:LIMIT]
        except StopIteration as end:
            return output, end.value
