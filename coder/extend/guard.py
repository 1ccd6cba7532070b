"""Hooks that may fail or hang, which a run outlives: Guard, and the user's commands as hooks.

    HookChain(Guard(Audit(), seconds=5), Guard(compaction, seconds=None))

A failure is reported as a notice, once for each place and run, and the run goes on as if the
hook were not there. What the hook changed before it failed stays changed.
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
from coder.permissions.rules import check_ownership
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

# An error of this class raised at this place is the hook's answer and not a failure.
ANSWERS: dict[str, type[Exception]] = {
    "before_tool_call": ToolError,
    "after_tool_call": ToolError,
    "before_llm_call": ModelError,
}
IN_CHILD = ("before_llm_call", "after_llm_call", "before_tool_call", "after_tool_call")

BLOCKED = "exit code 2"  # as Claude Code has it
LIMIT = 1_000_000  # bytes of an answer; a longer one is a failure


def refusal(place: str, text: str) -> Exception:
    """What a hook at this place raises to reject what it stands before or behind."""
    if "tool_call" in place:
        return ToolError(text)
    return ModelError("bad_request", f"{text}, so the request was not sent")


class Guard(Hooks):
    """`hook`, of which no failure ends the run, and which is never called twice at a time.

    Each call has `seconds`, without the time that a consumer of its events takes, and runs in a worker thread, where
    one that hangs is abandoned. None: no limit and no thread, for a feature of ours. `closed`: a failure rejects what
    the hook stands before or behind, so a tool's result is an error and a request is not sent.
    """

    def __init__(
        self, hook: Hooks, *, name: str = "", seconds: float | None = 30.0, closed: bool = False
    ) -> None:
        self.hook, self.seconds, self.closed = hook, seconds, closed
        self.name = name or type(hook).__name__
        self._turn = threading.RLock()  # sub-agents run in threads of their own
        self._abort = Abort()  # of the current run
        self._reported_errors: set[str] = set()
        for place in HOOK_NAMES:
            if place == "on_run_start" or implements(hook, place):
                setattr(self, place, partial(self._call_guarded, place))

    def in_child(self) -> Hooks:
        """The hook for the run of a sub-agent: each request and each call, not the run, which is its parent's."""
        places = [place for place in IN_CHILD if implements(self.hook, place)]
        return FunctionHooks(**{place: getattr(self, place) for place in places})

    def _call_guarded(self, place: str, *args: Any) -> Events[Any]:
        if place == "on_run_start":
            self._abort, self._reported_errors = args[0], set()
            if not implements(self.hook, place):
                return None
        call = self._work if self.seconds is None else self._call_limited
        try:
            return (yield from call(place, args))
        except Exception as error:
            if isinstance(error, (Aborted, ANSWERS.get(place, Aborted))):
                raise
            self._abort.check()
            if place not in self._reported_errors:
                self._reported_errors.add(place)
                text = f"{type(error).__name__}: {error}"
                yield Notice(f"The hook {self.name} failed ({place}): {text}")
            if self.closed:
                raise refusal(place, f"the hook {self.name} failed: {error}") from error
            return (yield from resolve(getattr(Hooks(), place)(*args)))

    def _work(self, place: str, args: tuple[Any, ...]) -> Events[Any]:
        return (yield from resolve(getattr(self.hook, place)(*args)))

    def _call_limited(self, place: str, args: tuple[Any, ...]) -> Events[Any]:
        work, left = self._work(place, args), self.seconds or 0.0
        while True:
            try:
                with self._turn:
                    started = time.monotonic()
                    check = partial(self._check, started + left)
                    event = run_in_thread(lambda: next(work), check, f"hook {self.name}")
            except StopIteration as end:
                return end.value
            left -= time.monotonic() - started
            yield event

    def _check(self, end: float) -> None:
        """Raises TimeoutError and Aborted."""
        self._abort.check()
        if time.monotonic() > end:
            raise TimeoutError(f"no answer within {self.seconds:g} s")


def command_hooks(path: Path) -> list[Guard]:
    """The hooks that hooks.json names; none where there is no file. Raises CoderError.

        {"before_tool_call": [{"command": "~/bin/check", "tools": "bash|edit", "seconds": 10, "closed": true}]}

    A command gets JSON on stdin: {"hook", "cwd", "session_id", "tool", "arguments", "result", "is_error"}, as far as
    they are known. It may answer JSON on stdout: {"arguments": {...}} changes those of the call, {"result": "..."}
    answers it, or replaces the tool's result. Exit code 2 blocks: the model gets what the command wrote to stderr.
    Any other failure is reported, and ignored unless the hook is `closed`.
    """
    if not path.is_file():
        return []
    try:
        check_ownership(path)
        places = json.loads(path.read_text("utf-8"))
        named = [(place, entry) for place, entries in places.items() for entry in entries]
        return [Command(path.parent, **entry).guarded(place) for place, entry in named]
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
        stdout, argv = b"", ["/bin/sh", "-c", self.command]
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stderr:
            stdin.write(json.dumps(facts, default=str).encode())
            stdin.seek(0)
            where = self.folder, self.abort, self.seconds
            with Returning(output_of(argv, *where, stdin=stdin, stderr=stderr)) as pieces:
                for data in pieces:
                    stdout = (stdout + data)[: LIMIT + 1]
            stderr.seek(0)
            message = stderr.read(LIMIT).decode("utf-8", "replace").strip()
        code, cause = pieces.value
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
