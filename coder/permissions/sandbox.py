"""Sandbox: commands and searches write only where they should, and leave nothing behind.

    run_loop(messages, model, Toolset(sandbox.tools(TOOLS)), hooks=HookChain(permissions, sandbox))

docs/security.md says where that is, and what they can still do. After each command git_guard.py
puts back what would run later. One thread gives up its rights for good (`restrict`), and what it
starts has no more: there is no code between fork and exec, and no helper program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Generator, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from coder.events import Event, Notice
from coder.hooks import Hooks
from coder.permissions.git_guard import Changes, GitGuard, describe
from coder.permissions.job_thread import Job, JobThread
from coder.permissions.landlock import limit_signals, restrict
from coder.tools import processes
from coder.tools.bash import DEFAULT_TIMEOUT, run_command
from coder.tools.repository import writable_git_folders
from coder.tools.workspace import private_folder
from coder.toolset import Tool, ToolContext
from coder.types import CoderError, DeniedError, ToolCall, ToolResult

Process = subprocess.Popen[bytes]

# /dev/shm holds the semaphores of Python's multiprocessing; writing to a graphics card is
# computing. No terminals: a command could write to the user's.
DEVICES = ("null", "zero", "full", "shm", "nvidia*", "dri/*", "kfd")
# Package managers that fail without a cache that they can write
CACHES = {"PIP_CACHE_DIR": "pip", "UV_CACHE_DIR": "uv", "npm_config_cache": "npm", "GOCACHE": "go"}
SIGNS = (
    r"(?i)permission denied|operation not permitted|read-only file system|no new privileges"
    r"|invalid cross-device link|\bE(ACCES|PERM|ROFS|XDEV)\b"
)
OFFLINE = r"(?i)name resolution|not resolve|n.t connect|\b(EAI_AGAIN|ENOTFOUND)\b"

# Notices for the user: at the start, and later.
NO_SANDBOX = (
    "No sandbox: this kernel has no Landlock, or it may not be used. Commands that you allow run "
    "with all of your rights."
)
INCOMPLETE = "The sandbox of this kernel is incomplete: it lacks what Linux 6.12 and seccomp have."
HOLDS_HOME = "This folder holds your home folder: the sandbox lets commands write to all of it."
UNGUARDED = "Not guarded against changes by commands, since it holds too much: {}."
NOT_ENDED = (
    "Another coder session in this folder was killed. Since its last command began, these files "
    "were changed, and not put back: {}. Look at them before you use git here."
)
LEFT = "Changed outside the sandbox or since the last command, and not put back: {}."
CHANGED = "A command changed {}; put back."


class Sandbox(Hooks):
    """Confines what the tools of a session start.

    `required`: raise CoderError if the kernel lacks something; otherwise `notices` says so, in
    sentences for the user. `config` is coder's own folder, guarded if commands can write to it;
    with `data`, the next start reports what a killed process could not put back. `may_leave`:
    somebody can allow a command to run outside; otherwise the model is not told of that way.
    """

    def __init__(
        self,
        workspace: str | Path,
        *,
        required: bool = False,
        network: bool = True,
        config: Path | None = None,
        data: Path | None = None,
        may_leave: bool = True,
    ) -> None:
        self.workspace = Path(workspace).resolve()
        self.network = network
        self.may_leave = may_leave
        folder = Path(tempfile.mkdtemp(prefix="session-", dir=private_folder()))
        self.temporary = folder / "tmp"
        self.temporary.mkdir(mode=0o700)
        # All that plan mode can write to: here-documents, mktemp and sort need it
        self.scratch = folder / "plan"
        self.notices: list[str] = []
        self._unreported_notices: list[str] = []
        # Threads that start children: in the sandbox, and outside. `signaller` starts the former
        self.confined = JobThread()
        self.worker = JobThread()
        self.signaller = JobThread()
        self._end_all: Callable[[], object] | None = None  # once there was a command
        self._is_limited = False  # whether the kernel took the limit of signals
        self._is_scoped = False  # whether that was seen to work
        self._since = 0  # clock ticks: no command is older
        self.active = self._confine()
        if required and self.notices:
            raise CoderError(self.notices[0])
        if self.active and self._can_write(Path(os.path.expanduser("~"))):
            self.notices.append(HOLDS_HOME)
        own = [config] if config and self._can_write(config) else []
        self.guard = GitGuard(self.workspace, own, data)
        self.report(UNGUARDED, dict.fromkeys(self.guard.unguarded, "too much"))
        self.report(NOT_ENDED, self.guard.left)
        self.notices += self._take_unreported()

    def _confine(self) -> bool:
        """Limit the thread that starts commands; False, with a notice, if the kernel cannot."""
        writable = [self.workspace, self.temporary, *writable_git_folders(self.workspace)]
        for name in DEVICES:
            writable += Path("/dev").glob(name)
        try:
            is_complete = self.signaller.submit(self._start_confined, writable).result()
        except OSError:
            self.notices.append(NO_SANDBOX)
            return False
        if not is_complete:
            self.notices.append(INCOMPLETE)
        return True

    def _start_confined(self, writable: Iterable[Path]) -> bool:
        """Start the confined thread in a domain whose members can signal each other alone."""
        with contextlib.suppress(OSError):  # before Linux 6.12
            limit_signals()
            self._is_limited = True
        return self.confined.submit(restrict, writable, self.network).result()

    def _can_write(self, path: Path) -> bool:
        return path.is_relative_to(self.workspace) or path.resolve().is_relative_to(self.workspace)

    def report(self, text: str, changes: Changes) -> None:
        """Keep a notice for the user until the next event."""
        if changes:
            self._unreported_notices.append(text.format(describe(changes, self.workspace)))

    def tools(self, tools: Iterable[Tool], read_only: bool = False) -> list[Tool]:
        """The same tools; in a sandbox bash says where it can write, takes `unconfined` and reports
        what was put back.

        `read_only`: for an agent that changes nothing, and so leaves no sandbox.
        """
        return [self._with_bash(tool, read_only) if tool.name == "bash" else tool for tool in tools]

    def _with_bash(self, tool: Tool, read_only: bool) -> Tool:
        """The tool bash as this sandbox has it."""
        if not self.active:
            return tool
        properties = dict(tool.parameters["properties"])
        if self.may_leave and not read_only:
            about = "run outside the sandbox; the user is asked. Only for what it prevents"
            properties["unconfined"] = {"type": "boolean", "description": about}
        writable = "$TMPDIR" if read_only else "the workspace and $TMPDIR"
        return dataclasses.replace(
            tool,
            description=f"{tool.description} It can write in {writable} alone.",
            parameters=tool.parameters | {"properties": properties},
            function=_bash,
        )

    def since(self) -> list[str]:
        """For the end of a session: what changed since the last command, and is not reported.

        What commands have left in the background ends before. If something could go on, the record
        stays.
        """
        is_certain = self._end_commands()
        look = self.guard.since  # in the worker, if it was started: it may still be at another one
        changes = self.worker.submit(look).result() if self.worker.is_started else look()
        self.report(LEFT, changes)
        if is_certain:
            self.guard.close()
        return self._take_unreported()

    # -- what is left of commands

    def watch(self) -> None:
        """See to it that all confined processes end with this one, or with the session.

        In the thread that is limited in its signals: kill(2) of "all processes" from there reaches
        those of this sandbox, whatever they have made of their groups, parents and variables, and
        no other of the user's. That the limit works is seen first, at a process outside of it;
        without it, only marks, groups and parents tell.
        """
        outside = processes.main_guard()
        if self._end_all:
            return
        is_kept = self.signaller.submit(_cannot_signal, outside).result()
        self._is_scoped = self._is_limited and is_kept
        facts = processes.facts(outside)
        if facts:
            self._since = facts.start
        self._end_all = lambda: None
        _with_commands.add(self)
        if self._is_scoped:
            guard = self.signaller.submit(processes.start_guard, "kill -9 -1")
            _, descriptor = guard.result()
            self._end_all = weakref.finalize(self, os.close, descriptor)

    def _end_commands(self) -> bool:
        """End what commands have left; tell whether it is certain that nothing has stayed."""
        if not self._end_all:
            return True
        _with_commands.discard(self)
        # An orphan without a mark may belong to another session of this process
        is_certain = not _with_commands and processes.end_orphans()
        self._end_all()
        self._end_all = None
        rounds = processes.ROUNDS if self._is_scoped else 1
        for _ in range(rounds):
            if not self.signaller.submit(self._could_any_live).result():
                return True
            time.sleep(processes.PAUSE)
        return is_certain and not self._is_scoped

    def _could_any_live(self) -> bool:
        """Could a process of a command be alive?

        Such a one can be signalled from here, is younger than the first command, and can gain no
        rights, which no process can undo (prctl(2)).
        """
        return any(self._may_be_confined(number) for number in processes.numbers())

    def _may_be_confined(self, number: int) -> bool:
        if number == os.getpid():
            return False
        try:
            os.kill(number, 0)
            status = Path(f"/proc/{number}/status").read_bytes()
        except OSError:
            return False
        facts = processes.facts(number)
        if not facts or not facts.is_alive or facts.start < self._since:
            return False
        return b"NoNewPrivs:\t1" in status

    def before_tool_call(self, call: ToolCall, ctx: ToolContext) -> None:
        if self.active:
            is_search = call.name in ("grep", "glob")  # they start what coder chooses
            reader = self.reader if ctx.read_only and not is_search else None
            ctx.confine = CallConfinement(self, is_search, reader)

    @cached_property
    def reader(self) -> JobThread | None:
        """A thread whose children can change nothing; None if the kernel cannot do that."""
        from coder.permissions.no_changes import make_reader  # late: only a plan needs it

        # A thread is confined as the one that starts it
        return self.signaller.submit(make_reader, self.scratch).result()

    def after_tool_call(self, call: ToolCall, result: ToolResult) -> Generator[Event, None, None]:
        for notice in self._take_unreported():
            yield Notice(notice)

    def _take_unreported(self) -> list[str]:
        notices = self._unreported_notices
        self._unreported_notices = []
        return notices


# Those in this process that have started commands, and not ended them yet
_with_commands: weakref.WeakSet[Sandbox] = weakref.WeakSet()


class CallConfinement:
    """The confinement of one tool call. `outside`: the user allowed it to run without.

    `reader`: the sandbox's thread of this name, which may change nothing; then `read_only` is true.
    """

    def __init__(self, sandbox: Sandbox, is_search: bool, reader: JobThread | None) -> None:
        self.sandbox = sandbox
        self.is_search = is_search
        self.outside = False
        self.thread = reader or sandbox.confined
        self.read_only = reader is not None
        self.environment = _environment(sandbox.scratch if reader else sandbox.temporary)
        self.put_back: Changes = {}

    def start(self, start: Callable[[], Process]) -> Process:
        """Start a child in the sandbox: one at a time, in a thread that no Ctrl+C interrupts."""
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
        sandbox.watch()
        sandbox.report(LEFT, sandbox.guard.begin())
        try:
            if self.outside:
                return start()
            return self.thread.submit(start).result()
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        sandbox = self.sandbox
        if self.outside or self.read_only:  # what has changed was not changed by the command
            sandbox.report(LEFT, sandbox.guard.end(undo=False))
        else:  # put back with the rights of a command: a link leads nowhere else
            self.put_back = sandbox.confined.submit(sandbox.guard.end).result()
            sandbox.report(CHANGED, self.put_back)

    def _discard(self, started: Job[Process]) -> None:
        """End a child that an interrupt kept from its owner."""
        if started.exception():
            return
        with started.result() as process:
            processes.signal_group(process.pid, signal.SIGKILL)
        if not self.is_search:
            self._end()


def _bash(
    ctx: ToolContext, command: str, timeout: int = DEFAULT_TIMEOUT, unconfined: bool = False
) -> Generator[Any, None, ToolResult]:
    """Say to the model what was put back, and that the sandbox may be why a command failed."""
    call = ctx.confine if isinstance(ctx.confine, CallConfinement) else None
    if unconfined:
        if ctx.authorize is None or call is None:
            raise DeniedError("no user can be asked to let a command run outside of the sandbox.")
        call.outside = True
        call.environment = {}
    permission = "unconfined" if unconfined else "bash"
    result = yield from run_command(ctx, command, timeout, permission)
    if call is None:
        return result
    output = str(result.content)
    lines = [output]
    if call.put_back:
        changes = describe(call.put_back, call.sandbox.workspace)
        lines.append(
            f"[put back: {changes}. A command cannot change git's own configuration and hooks, or "
            "coder's files; what else it did stays. To do it on purpose (git config, git remote add, "
            "git branch -u), make that call again with unconfined true: the user is asked]"
        )
    if result.details.get("exit_code") and not call.outside:
        lines += _hints(call, output)
    return dataclasses.replace(result, content="\n".join(lines))


def _hints(call: CallConfinement, output: str) -> list[str]:
    """What to say to the model if the sandbox may be why a command failed."""
    sandbox = call.sandbox
    is_sign = bool(re.search(SIGNS, output))
    if call.read_only and (is_sign or re.search(OFFLINE, output)):
        return [
            f"[in plan mode commands write nothing, except in $TMPDIR ({sandbox.scratch}), and reach no "
            "network and no other program. What needs more belongs into the plan]"
        ]
    if call.read_only or not is_sign:
        return []
    network = "" if sandbox.network else " and have no network"
    way = "do it there"
    if sandbox.may_leave:
        way += ", or make the call again with unconfined true: the user is asked"
    return [
        f"[in the sandbox commands write only in {sandbox.workspace} and $TMPDIR "
        f"({sandbox.temporary}){network}. If that is the reason, {way}]"
    ]


def _environment(temporary: Path) -> dict[str, str]:
    """The variables that lead programs to the folder in which they can write."""
    environment = {"TMPDIR": str(temporary)}
    for name, folder in CACHES.items():
        environment[name] = str(temporary / "cache" / folder)
    return environment


def _cannot_signal(number: int) -> bool:
    """Does the kernel deny a signal to this process of the same user?"""
    try:
        if number:
            os.kill(number, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        pass
    return False
