"""Sandbox: the model's commands and searches write only where they should, and leave nothing
behind.

    run_loop(messages, model, Toolset(sandbox.tools(TOOLS)), hooks=HookChain(permissions, sandbox))

Commands write only in the workspace, the folders of its git repository, a private temporary folder
(TMPDIR), shared memory (/dev/shm) and harmless devices; searches write nothing. They signal, trace
and reach over abstract sockets only each other, change no other process's limits, gain nothing
from set-user-ID programs, and have fewer of root's capabilities. Without `network` they have
sockets for this machine only: no TCP, no UDP. After each command git_guard.py puts back what would
run later.

An allowed command can still read everything and run every program, use the network where it is not
off, ask servers at named unix sockets (docker, D-Bus) to act for it, and change modes, owners and
times of files elsewhere. This process and the user's own commands are not confined.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from coder.abort import Abort
from coder.events import Event, Notice
from coder.hooks import Hooks
from coder.permissions.git_guard import (
    Changes,
    GitGuard,
    describe,
    writable_git_folders,
)
from coder.permissions.landlock import (
    LandlockError,
    SandboxThread,
    available,
    can_filter,
    gaps,
    restrict,
)
from coder.tools.bash import DEFAULT_TIMEOUT, run_command
from coder.tools.process import private_folder
from coder.toolset import Tool, ToolContext
from coder.types import CoderError, DeniedError, ToolCall, ToolResult

T = TypeVar("T")
Process = subprocess.Popen[bytes]

NULL = Path("/dev/null")
# /dev/shm holds the semaphores of Python's multiprocessing; writing to a graphics card is
# computing. No terminals: a command could write to the user's.
DEVICES = [NULL, Path("/dev/zero"), Path("/dev/full"), Path("/dev/shm")]
CARDS = ("nvidia*", "dri/*", "kfd")
# Package managers that fail without a cache that they can write.
CACHES = {"PIP_CACHE_DIR": "pip", "UV_CACHE_DIR": "uv", "npm_config_cache": "npm", "GOCACHE": "go"}
# Where to find servers that would act for a command outside of the sandbox.
SERVERS = ("TMUX", "STY", "DBUS_SESSION_BUS_ADDRESS", "DOCKER_HOST")
SEARCHES = {"grep", "glob"}
SIGNS = re.compile(
    r"permission denied|operation not permitted|read-only file system|invalid cross-device link"
    r"|no new privileges|\bE(ACCES|PERM|ROFS|XDEV)\b",
    re.I,
)

# Notices for the user: at the start, and later.
NO_SANDBOX = "No sandbox: {}. Commands that you allow run with all of your rights."
INCOMPLETE = "The sandbox of this kernel is incomplete: {}. Commands can reach further."
HOLDS_HOME = "This folder holds your home folder: the sandbox lets commands write to all of it."
UNGUARDED = "Not guarded against changes by commands: {}."
NOT_ENDED = (
    "A session in this folder was killed, or is still open. Changed since its last command began, "
    "and not put back: {}. Check that before you use git here."
)
LEFT = "Changed since the last command, and not put back: {}."
CHANGED = "A command changed {}; put back."
ALLOWED = "A command outside of the sandbox changed {}."
# For the model.
PUT_BACK = (
    "[put back: {}. A command cannot change git's own configuration and hooks, or coder's files; "
    "what else it did stays. To do it on purpose (git config, git remote add, git branch -u), {}]"
)
ASK = "make that call again with unconfined true: the user is asked"
HINT = (
    "[in the sandbox commands write only in {} and $TMPDIR ({}){}. Where that is the reason, do it "
    "there, or make the call again with unconfined true: the user is asked]"
)
UNCONFINED = "run outside the sandbox; the user is asked. Only for what it prevents"


class SandboxError(CoderError):
    """A sandbox is required, and this system has none; the text is for the user."""


class Sandbox(Hooks):
    """Confines what the tools of a session start. One for a process: commands can signal each
    other.

    `workspace` is the folder that commands may write. `required`: raise SandboxError where the
    kernel lacks something; otherwise `notices` says what, in sentences for the user. `network`
    False turns the network off. `config` and `data` are coder's own folders, guarded where
    commands can write to them; with `data`, the next start notices what a killed process could not
    put back.
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
        self.workspace = Path(workspace).resolve()
        self.network = network
        self.temporary = Path(os.path.realpath(private_folder()), "tmp")
        self.temporary.mkdir(mode=0o700, exist_ok=True)
        caches = {name: str(self.temporary / "cache" / each) for name, each in CACHES.items()}
        self.environment: dict[str, str | None] = dict.fromkeys(SERVERS)
        self.environment |= {"TMPDIR": str(self.temporary), **caches}
        self.notices: list[str] = []
        self._unreported: list[str] = []
        self._devices = [*DEVICES, *(path for card in CARDS for path in Path("/dev").glob(card))]
        self._git_folders = writable_git_folders(self.workspace)
        self._threads: dict[bool, tuple[list[object], SandboxThread]] = {}  # by: may it write?
        self.worker = SandboxThread()  # not confined
        self.active = True
        if lacking := self._lacking():
            self.notices.append(lacking)
            if required:
                raise SandboxError(lacking)
        if self.active and self._is_writable(Path(os.path.realpath(os.path.expanduser("~")))):
            self.notices.append(HOLDS_HOME)
        ours = [config, data and data / "snapshots" / "git" / "config"]
        writable = [each for each in ours if each and self._is_writable(each)]
        self._guard = GitGuard(self.workspace, writable, data)
        self._report(self.notices, UNGUARDED, self._guard.unguarded)
        self._report(self.notices, NOT_ENDED, self._guard.left)

    def _lacking(self) -> str:
        """Start a confined thread; returns what the kernel lacks, in a sentence for the user."""
        try:
            self._thread(writes=True)
        except LandlockError as error:
            self.active = False
            return NO_SANDBOX.format(error.strerror or error)
        lacking = gaps(available(), can_filter())
        return INCOMPLETE.format(lacking) if lacking else ""

    def _is_writable(self, path: Path) -> bool:
        """Whether commands can write there."""
        places = (path, path.resolve())
        return not self.active or any(each.is_relative_to(self.workspace) for each in places)

    def _report(self, notices: list[str], text: str, changes: Changes) -> None:
        if changes:
            notices.append(text.format(describe(changes, self.workspace)))

    def tools(self, tools: Iterable[Tool]) -> list[Tool]:
        """The same tools; bash reports what was put back and, in a sandbox, takes `unconfined`."""
        return [_confinable(each, self.active) if each.name == "bash" else each for each in tools]

    def since(self) -> list[str]:
        """For the end of a session: what changed since the last command, and is not reported."""
        self._report(self._unreported, LEFT, self.worker.run(self._guard.since))
        self._guard.close()
        return self._take_unreported()

    # -- around a call

    def on_run_start(self, abort: Abort) -> Generator[Event, None, None]:
        """Report what an interrupt left unreported."""
        yield from map(Notice, self._take_unreported())

    def before_tool_call(self, call: ToolCall, ctx: ToolContext) -> None:
        ctx.confine = CallConfinement(self, writes=call.name not in SEARCHES)

    def after_tool_call(self, call: ToolCall, result: ToolResult) -> Generator[Event, None, None]:
        yield from map(Notice, self._take_unreported())

    def _take_unreported(self) -> list[str]:
        notices, self._unreported = self._unreported, []
        return notices

    # -- what CallConfinement does, in the worker thread

    def begin(self) -> None:
        """A command is about to start."""
        self._report(self._unreported, LEFT, self._guard.begin())

    def end(self, outside: bool) -> Changes:
        """A command has ended. Returns what it changed and must not, which is put back."""
        if outside:
            self._report(self._unreported, ALLOWED, self._guard.end(allowed=True))
            return {}
        put_back = self.confined(self._guard.end)
        self._report(self._unreported, CHANGED, put_back)
        return put_back

    def confined(self, work: Callable[[], T], writes: bool = True) -> T:
        return self._thread(writes).run(work) if self.active else work()

    def _thread(self, writes: bool) -> SandboxThread:
        """The thread that starts children. Rules are for folders, not for their names: a folder
        that was made anew needs another thread."""
        paths = [self.workspace, self.temporary, *self._git_folders] if writes else []
        wanted = [_identity(path) for path in paths]
        known, thread = self._threads.get(writes, ([], None))
        if thread is None or known != wanted:
            if thread:
                thread.end()
            paths += self._devices if writes else [NULL]
            thread = SandboxThread(lambda: restrict(paths, self.network))
            self._threads[writes] = wanted, thread
        return thread


def _identity(path: Path) -> object:
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_dev, info.st_ino


class CallConfinement:
    """The confinement of one tool call. `outside`: the user allowed it to run without."""

    def __init__(self, sandbox: Sandbox, writes: bool) -> None:
        self.sandbox, self.writes = sandbox, writes
        self.outside = False
        self.put_back: Changes = {}

    @property
    def environment(self) -> Mapping[str, str | None]:
        return {} if self.outside or not self.sandbox.active else self.sandbox.environment

    def start(self, start: Callable[[], Process]) -> Process:
        """Start a child in the sandbox. Raises what `start` raises, and LandlockError.

        The worker thread starts and ends one child at a time, where no interrupt comes between.
        """

        def discard(process: Process) -> None:
            """End a child that an interrupt kept from its owner."""
            with contextlib.suppress(ProcessLookupError, PermissionError), process:
                os.killpg(process.pid, signal.SIGKILL)
            if self.writes:
                self._end()

        return self.sandbox.worker.run(lambda: self._start(start), discard)

    def ended(self) -> None:
        """The child has ended. What it changed and must not is put back."""
        if self.writes:
            self.sandbox.worker.run(self._end)

    def _start(self, start: Callable[[], Process]) -> Process:
        if not self.writes:
            return self.sandbox.confined(start, writes=False)
        self.sandbox.begin()
        try:
            return start() if self.outside else self.sandbox.confined(start)
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        self.put_back = self.sandbox.end(self.outside)

    def explain(self, result: ToolResult) -> ToolResult:
        """Say to the model what was put back, and that the sandbox may be why a command failed."""
        lines, sandbox = [str(result.content)], self.sandbox
        if self.put_back:
            way = ASK if sandbox.active else "ask the user to do it"
            lines.append(PUT_BACK.format(describe(self.put_back, sandbox.workspace), way))
        denied = result.details.get("exit_code") and SIGNS.search(lines[0])
        if denied and sandbox.active and not self.outside:
            network = "" if sandbox.network else " and have no network"
            lines.append(HINT.format(sandbox.workspace, sandbox.temporary, network))
        return dataclasses.replace(result, content="\n".join(lines)) if lines[1:] else result


def _confinable(tool: Tool, active: bool) -> Tool:
    if not active:
        return dataclasses.replace(tool, function=_bash)
    more = {"unconfined": {"type": "boolean", "description": UNCONFINED}}
    parameters = tool.parameters | {"properties": tool.parameters["properties"] | more}
    return dataclasses.replace(tool, parameters=parameters, function=_bash, title=_title)


def _bash(
    ctx: ToolContext, command: str, timeout: int = DEFAULT_TIMEOUT, unconfined: bool = False
) -> Generator[Any, None, ToolResult]:
    call = ctx.confine if isinstance(ctx.confine, CallConfinement) else None
    if unconfined:
        if ctx.authorize is None or call is None:
            raise DeniedError("no user can be asked to let a command run outside of the sandbox.")
        call.outside = True
    permission = "unconfined" if unconfined else "bash"
    result = yield from run_command(ctx, command, timeout, permission)
    return call.explain(result) if call else result


def _title(arguments: dict[str, Any]) -> str:
    outside = " (outside of the sandbox)" if arguments.get("unconfined") else ""
    return f"{arguments.get('command', '')}{outside}"
