"""Sandbox: commands and searches write only where they should, and leave nothing behind.

    run_loop(messages, model, Toolset(sandbox.tools(TOOLS)), hooks=HookChain(permissions, sandbox))

docs/security.md says where that is, and what they can still do. After each command git_guard.py
puts back what would run later. This process and the user's own commands are not confined.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from coder.events import Event, Notice
from coder.hooks import Hooks
from coder.permissions.git_guard import Changes, GitGuard, describe
from coder.permissions.landlock import restrict
from coder.tools.bash import DEFAULT_TIMEOUT, run_command
from coder.tools.workspace import private_folder, writable_git_folders
from coder.toolset import Tool, ToolContext
from coder.types import CoderError, DeniedError, ToolCall, ToolResult

Process = subprocess.Popen[bytes]

# /dev/shm holds the semaphores of Python's multiprocessing; writing to a graphics card is
# computing. No terminals: a command could write to the user's.
DEVICES = ("null", "zero", "full", "shm", "nvidia*", "dri/*", "kfd")
# Package managers that fail without a cache that they can write
CACHES = {"PIP_CACHE_DIR": "pip", "UV_CACHE_DIR": "uv", "npm_config_cache": "npm", "GOCACHE": "go"}
SEARCHES = {"grep", "glob"}
SIGNS = re.compile(
    r"permission denied|operation not permitted|read-only file system|invalid cross-device link"
    r"|no new privileges|\bE(ACCES|PERM|ROFS|XDEV)\b",
    re.I,
)

# Notices for the user: at the start, and later.
NO_SANDBOX = (
    "No sandbox: this kernel has no Landlock, or it may not be used. Commands that you allow run "
    "with all of your rights."
)
INCOMPLETE = "The sandbox of this kernel is incomplete: it lacks what Linux 6.12 and seccomp have."
HOLDS_HOME = "This folder holds your home folder: the sandbox lets commands write to all of it."
UNGUARDED = "Not guarded against changes by commands, since it holds too much: {}."
NOT_ENDED = (
    "A session in this folder was killed, or is still open. Changed since its last command began, "
    "and not put back: {}. Check that before you use git here."
)
LEFT = "Changed outside the sandbox or since the last command, and not put back: {}."
CHANGED = "A command changed {}; put back."
# For the model.
PUT_BACK = (
    "[put back: {}. A command cannot change git's own configuration and hooks, or coder's files; "
    "what else it did stays. To do it on purpose (git config, git remote add, git branch -u), make "
    "that call again with unconfined true: the user is asked]"
)
HINT = (
    "[in the sandbox commands write only in {} and $TMPDIR ({}){}. Where that is the reason, do it "
    "there, or make the call again with unconfined true: the user is asked]"
)
UNCONFINED = "run outside the sandbox; the user is asked. Only for what it prevents"


class Sandbox(Hooks):
    """Confines what the tools of a session start. One for a process.

    `workspace` is the folder that commands may write. `required`: raise CoderError where the
    kernel lacks something; otherwise `notices` says so, in sentences for the user. `network` False
    turns the network off. `config` and `data` are coder's own folders, guarded where commands can
    write to them; with `data`, the next start reports what a killed process could not put back.
    """

    def __init__(
        self,
        workspace: str | Path,
        *,
        required: bool = False,
        network: bool = True,
        config: Path | None = None,
        data: Path | None = None,
    ) -> None:
        self.workspace, self.network = Path(workspace).resolve(), network
        self.temporary = private_folder() / "tmp"
        self.temporary.mkdir(mode=0o700, exist_ok=True)
        caches = {name: str(self.temporary / "cache" / each) for name, each in CACHES.items()}
        self.environment = {"TMPDIR": str(self.temporary), **caches}
        self.notices: list[str] = []
        self._unreported: list[str] = []
        # Threads that start children: in the sandbox, and outside
        self.confined, self.worker = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        writable = [self.workspace, self.temporary, *writable_git_folders(self.workspace)]
        writable += [path for name in DEVICES for path in Path("/dev").glob(name)]
        try:
            is_complete = self.confined.submit(restrict, writable, network).result()
            self.notices += [] if is_complete else [INCOMPLETE]
            self.active = True
        except OSError:
            self.notices.append(NO_SANDBOX)
            self.active = False
        if required and self.notices:
            raise CoderError(self.notices[0])
        if self.active and self._can_write(Path(os.path.expanduser("~"))):
            self.notices.append(HOLDS_HOME)
        ours = [config] if config and self._can_write(config) else []
        self.guard = GitGuard(self.workspace, ours, data)
        self.report(UNGUARDED, dict.fromkeys(self.guard.unguarded, "too much"))
        self.report(NOT_ENDED, self.guard.left)
        self.notices += self._take_unreported()

    def _can_write(self, path: Path) -> bool:
        return any(each.is_relative_to(self.workspace) for each in (path, path.resolve()))

    def report(self, text: str, changes: Changes) -> None:
        """Keep a notice for the user until the next event."""
        if changes:
            self._unreported.append(text.format(describe(changes, self.workspace)))

    def tools(self, tools: Iterable[Tool]) -> list[Tool]:
        """The same tools; in a sandbox bash takes `unconfined` and reports what was put back."""
        names = {"bash"} if self.active else set[str]()
        return [_confinable(tool) if tool.name in names else tool for tool in tools]

    def since(self) -> list[str]:
        """For the end of a session: what changed since the last command, and is not reported."""
        self.report(LEFT, self.worker.submit(self.guard.since).result())
        self.guard.close()
        return self._take_unreported()

    # -- around a call

    def before_tool_call(self, call: ToolCall, ctx: ToolContext) -> None:
        if self.active:
            ctx.confine = CallConfinement(self, is_search=call.name in SEARCHES)

    def after_tool_call(self, call: ToolCall, result: ToolResult) -> Generator[Event, None, None]:
        yield from map(Notice, self._take_unreported())

    def _take_unreported(self) -> list[str]:
        notices, self._unreported = self._unreported, []
        return notices


class CallConfinement:
    """The confinement of one tool call. `outside`: the user allowed it to run without."""

    outside = False

    def __init__(self, sandbox: Sandbox, is_search: bool) -> None:
        self.sandbox, self.is_search = sandbox, is_search
        self.environment = sandbox.environment
        self.put_back: Changes = {}

    def start(self, start: Callable[[], Process]) -> Process:
        """Start a child in the sandbox. Raises what `start` raises.

        The worker thread starts and ends one child at a time, where no Ctrl+C comes between.
        """
        started = self.sandbox.worker.submit(self._start, start)
        try:
            return started.result()
        except BaseException:
            self.sandbox.worker.submit(self._discard, started)
            raise

    def ended(self) -> None:
        """The child has ended. What it changed and must not is put back."""
        if not self.is_search:
            self.sandbox.worker.submit(self._end).result()

    def _start(self, start: Callable[[], Process]) -> Process:
        sandbox = self.sandbox
        if self.is_search:
            return sandbox.confined.submit(start).result()
        sandbox.report(LEFT, sandbox.guard.begin())
        try:
            return start() if self.outside else sandbox.confined.submit(start).result()
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        sandbox, guard = self.sandbox, self.sandbox.guard
        if self.outside:
            guard.end(undo=False)
            sandbox.report(LEFT, guard.since())
        else:  # put back with the rights of a command: a link leads nowhere else
            self.put_back = sandbox.confined.submit(guard.end).result()
            sandbox.report(CHANGED, self.put_back)

    def _discard(self, started: Future[Process]) -> None:
        """End a child that an interrupt kept from its owner."""
        if started.exception():
            return
        with contextlib.suppress(ProcessLookupError, PermissionError), started.result() as process:
            os.killpg(process.pid, signal.SIGKILL)
        if not self.is_search:
            self._end()

    def explain(self, result: ToolResult) -> ToolResult:
        """Say to the model what was put back, and that the sandbox may be why a command failed."""
        lines, sandbox = [str(result.content)], self.sandbox
        if self.put_back:
            lines.append(PUT_BACK.format(describe(self.put_back, sandbox.workspace)))
        if result.details.get("exit_code") and SIGNS.search(lines[0]) and not self.outside:
            network = "" if sandbox.network else " and have no network"
            lines.append(HINT.format(sandbox.workspace, sandbox.temporary, network))
        return dataclasses.replace(result, content="\n".join(lines))


def _confinable(tool: Tool) -> Tool:
    more = {"unconfined": {"type": "boolean", "description": UNCONFINED}}
    parameters = tool.parameters | {"properties": tool.parameters["properties"] | more}
    return dataclasses.replace(tool, parameters=parameters, function=_bash)


def _bash(
    ctx: ToolContext, command: str, timeout: int = DEFAULT_TIMEOUT, unconfined: bool = False
) -> Generator[Any, None, ToolResult]:
    call = ctx.confine if isinstance(ctx.confine, CallConfinement) else None
    if unconfined:
        if ctx.authorize is None or call is None:
            raise DeniedError("no user can be asked to let a command run outside of the sandbox.")
        call.outside, call.environment = True, {}
    permission = "unconfined" if unconfined else "bash"
    result = yield from run_command(ctx, command, timeout, permission)
    return call.explain(result) if call else result
