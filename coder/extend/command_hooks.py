"""Commands of the user's as hooks, from hooks.json in the configuration folder; never from the folder that is worked in.

    {"before_tool_call": [{"command": "~/bin/check", "tools": "bash|edit", "seconds": 10, "closed": true}]}

A command gets JSON on stdin: {"hook", "cwd", "session_id", "tool", "arguments", "result", "is_error"}, as far as they are
known. It may answer JSON on stdout: {"arguments": {...}} changes those of the call, {"result": "..."} answers it, or
replaces the tool's result. Exit code 2 blocks: the model is told what the command wrote to stderr. Any other failure is
told, and passed over unless the hook is `closed`.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

from coder.abort import Abort
from coder.events import Event
from coder.extend.guard import Guard
from coder.hooks import FunctionHooks, HookChain, Hooks
from coder.permissions.ownership import check_trusted
from coder.tools.process import output_of
from coder.toolset import ToolContext
from coder.types import Completion, DeniedError, ModelError, Request, ToolCall, ToolResult

BLOCKED = 2  # exit code (Claude Code's)
PLACES = ("before_llm_call", "after_llm_call", "before_tool_call", "after_tool_call")
LONGEST = 100_000  # characters of an answer that are read
Flow = Generator[Event, None, Any]


class HooksError(Exception):
    """hooks.json is not what it should be, in one line."""


def command_hooks(path: Path) -> HookChain:
    """The hooks that a file names; none where there is no file. Raises HooksError."""
    if not path.is_file():
        return HookChain()
    try:
        check_trusted(path)
        places = json.loads(path.read_text("utf-8"))
        return HookChain(
            *(
                _hook(place, entry, path.parent)
                for place, entries in places.items()
                for entry in entries
            )
        )
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise HooksError(f"{path}: {error}") from None


def _hook(place: str, entry: dict[str, Any], folder: Path) -> Hooks:
    if place not in PLACES:
        raise ValueError(
            f"there is no place {place!r} for a command; there are {', '.join(PLACES)}"
        )
    if unknown := entry.keys() - {"command", "tools", "seconds", "closed"}:
        raise ValueError(f"a hook has no {', '.join(sorted(unknown))}")
    command = Command(
        str(entry["command"]),
        re.compile(entry.get("tools", "")),
        float(entry.get("seconds", 30)),
        folder,
    )
    hooks = FunctionHooks(on_run_start=command.on_run_start, **{place: getattr(command, place)})
    return Guard(
        hooks,
        name=command.command,
        seconds=command.seconds + 1,
        closed=bool(entry.get("closed", False)),
    )


class Blocked(Exception):
    """The command's exit code was 2; its text is what it wrote to stderr."""


class Command:
    """One command, with what it is asked at each place. It works in the configuration folder: a relative path is the user's."""

    def __init__(self, command: str, tools: re.Pattern[str], seconds: float, folder: Path) -> None:
        self.command, self.tools, self.seconds, self.folder = command, tools, seconds, folder
        self.abort = Abort()

    def on_run_start(self, abort: Abort) -> None:
        self.abort = abort

    def before_llm_call(self, request: Request) -> Flow:
        try:
            yield from self._ask(
                {
                    "hook": "before_llm_call",
                    "session_id": request.session_id,
                    "messages": request.messages,
                }
            )
        except Blocked as blocked:
            raise ModelError("bad_request", f"{self.command}: {blocked}") from None

    def after_llm_call(self, completion: Completion) -> Flow:
        calls = [{"tool": call.name, "arguments": call.arguments} for call in completion.calls]
        yield from self._ask({"hook": "after_llm_call", "text": completion.text, "calls": calls})

    def before_tool_call(self, call: ToolCall, ctx: ToolContext) -> Flow:
        if not self.tools.search(call.name):
            return None
        facts = {
            "hook": "before_tool_call",
            "cwd": str(ctx.cwd),
            "session_id": ctx.session_id,
            "tool": call.name,
            "arguments": call.arguments,
        }
        try:
            answer = yield from self._ask(facts)
        except Blocked as blocked:
            raise DeniedError(str(blocked)) from None
        if isinstance(answer.get("arguments"), dict):
            call.arguments = answer["arguments"]
        return ToolResult(answer["result"]) if isinstance(answer.get("result"), str) else None

    def after_tool_call(self, call: ToolCall, result: ToolResult) -> Flow:
        if not self.tools.search(call.name):
            return None
        facts = {
            "hook": "after_tool_call",
            "tool": call.name,
            "arguments": call.arguments,
            "result": result.content,
            "is_error": result.is_error,
        }
        try:
            answer = yield from self._ask(facts)
        except Blocked as blocked:
            return ToolResult(f"Withheld: {blocked}", is_error=True)
        return (
            ToolResult(answer["result"], result.is_error, result.details)
            if isinstance(answer.get("result"), str)
            else None
        )

    def _ask(self, facts: dict[str, Any]) -> Generator[Event, None, dict[str, Any]]:
        """Run the command; the JSON object that it answers, {} for none. Raises Blocked, or RuntimeError where it fails."""
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stderr:
            stdin.write(json.dumps(facts, default=str).encode())
            stdin.seek(0)
            work = output_of(
                ["/bin/sh", "-c", self.command],
                self.folder,
                self.abort,
                self.seconds,
                stdin=stdin,
                stderr=stderr,
            )
            stdout = b""
            while True:
                try:
                    stdout = (stdout + next(work))[:LONGEST]
                except StopIteration as end:
                    ending = end.value
                    break
            stderr.seek(0)
            said = stderr.read(LONGEST).decode("utf-8", "replace").strip()
        if ending.code == BLOCKED and not ending.cause:
            raise Blocked(said or "blocked by a hook")
        if ending.code or ending.cause:
            raise RuntimeError(
                f"{ending.cause or f'exit code {ending.code}'}{': ' if said else ''}{said[:500]}"
            )
        yield from ()
        return _object(stdout)


def _object(stdout: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(stdout)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
