"""Hooks that may fail or hang, which a run outlives: Guard, and the user's commands as hooks.

    HookChain(Guard(Audit(), seconds=5), Guard(compaction, seconds=None))

A failure is reported as a notice, once in a run for each method, and the run goes on as if the hook
were not there. What the hook changed before it failed stays changed.
"""

from __future__ import annotations

import json
import re
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from coder.abort import Abort, run_in_thread
from coder.events import Events, Notice, Returning, resolve
from coder.hooks import HOOK_NAMES, FunctionHooks, Hooks, implements
from coder.permissions.ownership import check_ownership
from coder.tools.bash import output_of
from coder.toolset import ToolContext
from coder.types import (
    Aborted,
    CoderError,
    Completion,
    DeniedError,
    ModelError,
    Request,
    ToolCall,
    ToolError,
    ToolResult,
)

# An error of this class raised by this method is the hook's answer and not a failure.
ANSWERS: dict[str, type[Exception]] = {
    "before_tool_call": ToolError,
    "after_tool_call": ToolError,
    "before_llm_call": ModelError,
}
IN_CHILD = ("before_llm_call", "after_llm_call", "before_tool_call", "after_tool_call")

BLOCKED = "exit code 2"  # as Claude Code has it
LIMIT = 1_000_000  # bytes of an answer; a longer one is a failure


def refusal(method: str, text: str) -> Exception:
    """What this method of a hook raises to reject the request or the call that it is called for."""
    if "tool_call" in method:
        return ToolError(text)
    return ModelError("bad_request", f"{text}, so the request was not sent")


class Guard(Hooks):
    """`hook`, of which no failure ends the run, and which is never called twice at a time.

    Each call has `seconds`, without the time that a consumer of its events takes, and runs in a
    worker thread, where one that hangs is abandoned. None: no limit and no thread, for the
    program's own features. `closed`: a failure rejects what the hook is called for, so a tool's
    result is an error and a request is not sent.
    """

    def __init__(
        self,
        hook: Hooks,
        *,
        name: str = "",
        seconds: float | None = 30.0,
        closed: bool = False,
    ) -> None:
        self.hook = hook
        self.name = name or type(hook).__name__
        self.seconds = seconds
        self.closed = closed
        self._turn = threading.RLock()  # sub-agents run in threads of their own
        self._abort = Abort()  # of the current run
        self._reported_errors: set[str] = set()
        for method in HOOK_NAMES:
            if method == "on_run_start" or implements(hook, method):
                setattr(self, method, partial(self._call_guarded, method))

    def in_child(self) -> Hooks:
        """The hook for a sub-agent: for its requests and calls, but its run is the parent's."""
        return FunctionHooks(
            **{name: getattr(self, name) for name in IN_CHILD if implements(self.hook, name)}
        )

    def _call_guarded(self, method: str, *args: Any) -> Events[Any]:
        if method == "on_run_start":
            self._abort = args[0]
            self._reported_errors = set()
            if not implements(self.hook, method):
                return None
        call = self._call_limited
        if self.seconds is None:
            call = self._work
        answers = (Aborted, ANSWERS.get(method, Aborted))
        try:
            return (yield from call(method, args))
        except answers:
            raise
        except Exception as error:
            self._abort.check()
            if method not in self._reported_errors:
                self._reported_errors.add(method)
                yield Notice(
                    f"The hook {self.name} failed ({method}): {type(error).__name__}: {error}"
                )
            if self.closed:
                raise refusal(method, f"the hook {self.name} failed: {error}") from error
            without_the_hook = getattr(Hooks(), method)
            return (yield from resolve(without_the_hook(*args)))

    def _work(self, method: str, args: tuple[Any, ...]) -> Events[Any]:
        return (yield from resolve(getattr(self.hook, method)(*args)))

    def _call_limited(self, method: str, args: tuple[Any, ...]) -> Events[Any]:
        """The hook's events and its answer.

        A thread fetches each event within what is left of the time.
        """
        work = self._work(method, args)
        left = self.seconds or 0.0
        while True:
            try:
                with self._turn:
                    started = time.monotonic()
                    check = partial(self._check_time, started + left)
                    event = run_in_thread(lambda: next(work), check, f"hook {self.name}")
            except StopIteration as end:
                return end.value
            left -= time.monotonic() - started
            yield event

    def _check_time(self, end: float) -> None:
        """Raises TimeoutError and Aborted."""
        self._abort.check()
        if time.monotonic() > end:
            raise TimeoutError(f"no answer within {self.seconds:g} s")


def _blocking(method: str, text: str) -> Exception:
    """What a command raises to block what it is called for."""
    if method == "before_tool_call":
        return DeniedError(text)
    return refusal(method, text)


def _read_answer(stdout: bytes) -> dict[str, Any]:
    """The JSON object that a command has written; {} if it wrote something else."""
    try:
        answer = json.loads(stdout)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def command_hooks(path: Path) -> list[Guard]:
    """The hooks that hooks.json names; none if there is no file. Raises CoderError.

        {"before_tool_call": [{"command": "~/bin/check", "tools": "bash|edit",
                               "seconds": 10, "closed": true}]}

    A command gets JSON on stdin: {"hook", "cwd", "session_id", "tool", "arguments", "result",
    "is_error"}, as far as they are known. It may answer JSON on stdout: {"arguments": {...}}
    changes those of the call, {"result": "..."} answers it, or replaces the tool's result. Exit
    code 2 blocks: the model gets what the command wrote to stderr. Any other failure is reported,
    and ignored unless the hook is `closed`.
    """
    if not path.is_file():
        return []
    try:
        check_ownership(path)
        guards = []
        entries_by_method = json.loads(path.read_text("utf-8"))
        for method, entries in entries_by_method.items():
            for entry in entries:
                guards.append(Command(path.parent, **entry).guarded(method))
        return guards
    except (OSError, ValueError, TypeError, AttributeError, re.error) as error:
        raise CoderError(f"{path}: {error}") from None


@dataclass
class Command:
    """One command. It runs in the configuration folder, so that a relative path is the user's."""

    folder: Path
    command: str
    tools: str = ""  # a regular expression
    seconds: float = 30
    closed: bool = False
    abort: Abort = field(default_factory=Abort, init=False)  # of the current run

    def guarded(self, method: str) -> Guard:
        """The command as this method of a hook. Raises ValueError and re.error."""
        if method not in IN_CHILD:
            raise ValueError(f"there is no hook {method!r}; known: {', '.join(IN_CHILD)}")
        re.compile(self.tools)
        hooks = FunctionHooks(on_run_start=self.on_run_start, **{method: getattr(self, method)})
        return Guard(
            hooks,
            name=self.command,
            seconds=float(self.seconds) + 1,  # the command itself is stopped before
            closed=self.closed,
        )

    def on_run_start(self, abort: Abort) -> None:
        self.abort = abort

    def before_llm_call(self, request: Request) -> None:
        self._ask("before_llm_call", session_id=request.session_id, messages=request.messages)

    def after_llm_call(self, completion: Completion) -> None:
        calls = [{"tool": call.name, "arguments": call.arguments} for call in completion.calls]
        self._ask("after_llm_call", text=completion.text, calls=calls)

    def before_tool_call(self, call: ToolCall, ctx: ToolContext) -> ToolResult | None:
        answer = self._ask("before_tool_call", call, cwd=ctx.cwd, session_id=ctx.session_id)
        if isinstance(answer.get("arguments"), dict):
            call.arguments = answer["arguments"]
        if isinstance(answer.get("result"), str):
            return ToolResult(answer["result"])
        return None

    def after_tool_call(self, call: ToolCall, result: ToolResult) -> ToolResult | None:
        answer = self._ask("after_tool_call", call, result=result.content, is_error=result.is_error)
        text = answer.get("result")
        if isinstance(text, str):
            return replace(result, content=text)
        return None

    def _ask(self, method: str, call: ToolCall | None = None, **facts: Any) -> dict[str, Any]:
        """Run the command; the JSON object that it answers, or {}.

        Raises RuntimeError if it fails, and what blocks the call or the request.
        """
        facts["hook"] = method
        if call:
            facts |= {"tool": call.name, "arguments": call.arguments}
            if not re.search(self.tools, call.name):
                return {}
        stdout, message, failure = self._run_command(json.dumps(facts, default=str))
        if failure == BLOCKED and method in ANSWERS:
            raise _blocking(method, message or "blocked by a hook")
        if len(stdout) > LIMIT:  # cut, it would be no JSON, and pass for no answer
            failure = f"its answer has more than {LIMIT:,} bytes"
        if failure and message:
            failure += f": {message[:500]}"
        if failure:
            raise RuntimeError(failure)
        return _read_answer(stdout)

    def _run_command(self, text: str) -> tuple[bytes, str, str]:
        """Run it on `text`: its output, its standard error, and how it failed, or ""."""
        stdout = b""
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stderr:
            stdin.write(text.encode())
            stdin.seek(0)
            output = output_of(
                ["/bin/sh", "-c", self.command],
                self.folder,
                self.abort,
                self.seconds,
                stdin=stdin,
                stderr=stderr,
            )
            with Returning(output) as pieces:
                for data in pieces:
                    stdout = (stdout + data)[: LIMIT + 1]
            stderr.seek(0)
            message = stderr.read(LIMIT).decode("utf-8", "replace").strip()
        code, cause = pieces.value
        if not cause and code:
            cause = f"exit code {code}"
        return stdout, message, cause
