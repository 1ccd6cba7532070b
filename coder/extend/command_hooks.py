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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coder.abort import Abort
from coder.events import Returning
from coder.extend.guard import ANSWERS, IN_CHILD, Guard, refusal
from coder.hooks import FunctionHooks
from coder.permissions.rules import check_ownership
from coder.tools.bash import output_of
from coder.toolset import ToolContext
from coder.types import CoderError, Completion, DeniedError, Request, ToolCall, ToolResult

BLOCKED = "exit code 2"  # as Claude Code has it
LIMIT = 1_000_000  # bytes of an answer; a longer one is a failure


class HooksError(CoderError):
    """hooks.json cannot be used, in one line."""


def command_hooks(path: Path) -> list[Guard]:
    """The hooks that a file names; none where there is no file. Raises HooksError."""
    if not path.is_file():
        return []
    try:
        check_ownership(path)
        places = json.loads(path.read_text("utf-8"))
        named = [(place, entry) for place, entries in places.items() for entry in entries]
        return [Command(path.parent, **entry).guarded(place) for place, entry in named]
    except (OSError, ValueError, TypeError, AttributeError, re.error) as error:
        raise HooksError(f"{path}: {error}") from None


@dataclass
class Command:
    """One command. It runs in the configuration folder, so that a relative path is the user's."""

    folder: Path
    command: str
    tools: str = ""  # a regular expression
    seconds: float = 30
    closed: bool = False
    abort: Abort = field(default_factory=Abort, init=False)  # of the current run

    def guarded(self, place: str) -> Guard:
        """The command as a hook at this place. Raises ValueError and re.error."""
        if place not in IN_CHILD:
            raise ValueError(f"there is no place {place!r}; known: {', '.join(IN_CHILD)}")
        re.compile(self.tools)
        hooks = FunctionHooks(on_run_start=self.on_run_start, **{place: getattr(self, place)})
        seconds = float(self.seconds) + 1
        return Guard(hooks, name=self.command, seconds=seconds, closed=self.closed)

    def on_run_start(self, abort: Abort) -> None:
        self.abort = abort

    def before_llm_call(self, request: Request) -> None:
        self._ask("before_llm_call", session_id=request.session_id, messages=request.messages)

    def after_llm_call(self, completion: Completion) -> None:
        calls = [{"tool": call.name, "arguments": call.arguments} for call in completion.calls]
        self._ask("after_llm_call", text=completion.text, calls=calls)

    def before_tool_call(self, call: ToolCall, ctx: ToolContext) -> ToolResult | None:
        place = {"cwd": ctx.cwd, "session_id": ctx.session_id}
        answer = self._ask("before_tool_call", call, **place)
        if isinstance(answer.get("arguments"), dict):
            call.arguments = answer["arguments"]
        return ToolResult(answer["result"]) if isinstance(answer.get("result"), str) else None

    def after_tool_call(self, call: ToolCall, result: ToolResult) -> ToolResult | None:
        facts = {"result": result.content, "is_error": result.is_error}
        text = self._ask("after_tool_call", call, **facts).get("result")
        return replace(result, content=text) if isinstance(text, str) else None

    def _ask(self, place: str, call: ToolCall | None = None, **facts: Any) -> dict[str, Any]:
        """Run the command; the JSON object that it answers, or {}. Raises RuntimeError where it fails, or what blocks."""
        facts["hook"] = place
        if call:
            facts |= {"tool": call.name, "arguments": call.arguments}
            if not re.search(self.tools, call.name):
                return {}
        stdout, message, (code, cause) = self._output(json.dumps(facts, default=str).encode())
        failure = cause or (f"exit code {code}" if code else "")
        if failure == BLOCKED and place in ANSWERS:
            text = message or "blocked by a hook"
            raise DeniedError(text) if place == "before_tool_call" else refusal(place, text)
        if len(stdout) > LIMIT:  # cut, it would be no JSON, and pass for no answer
            failure = f"its answer has more than {LIMIT:,} bytes"
        if failure:
            raise RuntimeError(": ".join(filter(None, [failure, message[:500]])))
        try:
            answer = json.loads(stdout)
        except ValueError:
            return {}
        return answer if isinstance(answer, dict) else {}

    def _output(self, given: bytes) -> tuple[bytes, str, tuple[int, str]]:
        """What the command writes to stdout and stderr, and how it ended."""
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stderr:
            stdin.write(given)
            stdin.seek(0)
            stdout, argv = b"", ["/bin/sh", "-c", self.command]
            where = self.folder, self.abort, self.seconds
            with Returning(output_of(argv, *where, stdin=stdin, stderr=stderr)) as pieces:
                for data in pieces:
                    stdout = (stdout + data)[: LIMIT + 1]
            stderr.seek(0)
            message = stderr.read(LIMIT).decode("utf-8", "replace").strip()
        return stdout, message, pieces.value
