"""Sandbox: commands and searches of the model's write only where they should, and leave nothing behind that runs later.

    run_loop(messages, model, Toolset(sandbox.tools(TOOLS)), hooks=HookChain(permissions, sandbox))

Commands write only in the workspace, the folders of its git repository, a private temporary folder (TMPDIR), shared memory
(/dev/shm) and harmless devices; searches write nothing. They signal, trace and reach over abstract sockets only each other,
set-user-ID programs give them nothing, and root has fewer capabilities. Without `network` they have sockets for this machine
only: no TCP, no UDP. After each command watch.py undoes what would run later.

What it leaves out, and an allowed command can still do: read everything and run every program; use the network where it is
not off; talk to servers at unix sockets with a name (docker, D-Bus), which may do anything for it; change modes, owners and
times of files elsewhere. In a workspace that holds the home folder, all of that is writable. Our own process and a person's own
commands are not confined.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from coder.abort import Abort
from coder.features.git_places import git_folders
from coder.features.landlock import NETWORK_ABI, ConfinedThread, LandlockError, available, can_filter, gaps, restrict
from coder.features.watch import Change, Watch, told
from coder.tools import Tool, ToolContext
from coder.tools.bash import DEFAULT_TIMEOUT, run_command
from coder.tools.process import private_folder
from coder.tools.workspace import escaped
from coder.types import CoderError, DeniedError, Event, Hooks, Notice, ToolCall, ToolError, ToolResult

T = TypeVar("T")
Identity = tuple[Path, int, int]

NULL = Path("/dev/null")
# Writing to a graphics card is computing. /dev/shm is where semaphores of Python's multiprocessing live. Not terminals:
# a command could write to that of its user.
DEVICES = [NULL, Path("/dev/zero"), Path("/dev/full"), Path("/dev/shm")]
CARDS = ("nvidia*", "dri/*", "kfd")
# Tools that fail without a cache that they can write. Others go without, or find what they have downloaded in ~/.cache.
CACHES = {"PIP_CACHE_DIR": "pip", "UV_CACHE_DIR": "uv", "npm_config_cache": "npm", "GOCACHE": "go"}
# Ways to servers that would do something for a command outside; without them it has to know where they are.
SERVERS = ("TMUX", "STY", "DBUS_SESSION_BUS_ADDRESS", "DOCKER_HOST")
SEARCHES = {"grep", "glob"}
SIGNS = re.compile(r"permission denied|operation not permitted|read-only file system|invalid cross-device link|no new privileges"
                   r"|\bE(ACCES|PERM|ROFS|XDEV)\b", re.I)
UNCONFINED = "run outside the sandbox; the user is asked. Only for what it made fail"


class SandboxError(CoderError):
    """There has to be a sandbox, and this system has none; the text is for a person."""


class Sandbox(Hooks):
    """Confines what the tools of a session start. One object for a process: its commands may signal each other.

    `workspace` is the folder that may be written; `required` raises SandboxError where the kernel cannot do it all, else what is
    missing is in `notices`, sentences for a person at the start. `network` False turns it off. `config` and `data` are our own
    folders, watched where commands can write to them, whether or not they exist. `abi`: use no newer version of Landlock.
    """

    def __init__(self, workspace: str | Path, *, required: bool = False, network: bool = True, config: Path | None = None,
                 data: Path | None = None, abi: int | None = None) -> None:
        self.workspace = Path(workspace).resolve()
        self.network = network
        self.temporary = Path(os.path.realpath(private_folder()), "tmp")
        self.temporary.mkdir(mode=0o700, exist_ok=True)
        self.environment: dict[str, str | None] = {
            "TMPDIR": str(self.temporary), **{name: str(self.temporary / "cache" / each) for name, each in CACHES.items()},
            **dict.fromkeys(SERVERS)}
        self.abi = available() if abi is None else min(abi, available())
        self.notices: list[str] = []
        self._devices = [*DEVICES, *(path for each in CARDS for path in Path("/dev").glob(each))]
        self._lock = threading.Lock()
        self._threads: dict[bool, tuple[list[Identity], ConfinedThread]] = {}  # by: may it write?
        self._calls: dict[int, tuple[ToolCall, Call]] = {}
        self.active = self._probe(required)
        ours = [each if each and (not self.active or self._holds(each)) else None for each in (config, data)]
        self.watch = Watch(self.workspace, *ours)
        self._looker = ConfinedThread(lambda: None)  # no Ctrl+C comes to another thread than the main one

    @property
    def summary(self) -> str:
        """A sentence for a banner, "" where nothing is confined."""
        if not self.active:
            return ""
        return f"Sandbox: commands write only in this folder and a temporary one{'' if self.network else ', and have no network'}."

    def tools(self, tools: Iterable[Tool]) -> list[Tool]:
        """The same tools, bash with a parameter more: `unconfined`. Where nothing is confined they stay as they are."""
        return [_with_unconfined(each) if each.name == "bash" and self.active else each for each in tools]

    def since(self) -> list[str]:
        """What has changed since the last command ended, for the end of a session, when children in the background are gone."""
        untold = [text for _, call in list(self._calls.values()) for text in call.taken_notices()]
        return untold + _left(self.watch.since(), self.workspace)

    def unbroken(self, work: Callable[[], None]) -> None:
        """Do it to its end, an interrupt notwithstanding, which is raised afterwards (or after landlock.PATIENCE)."""
        self._looker.run(work)

    # -- around a call

    def on_run_start(self, abort: Abort) -> Generator[Event, None, None]:
        """Tell what an interrupt has kept us from telling."""
        for _, call in list(self._calls.values()):
            yield from map(Notice, call.taken_notices())

    def before_tool_call(self, call: ToolCall, ctx: ToolContext) -> None:
        own = Call(self, writes=call.name not in SEARCHES)
        ctx.confine = own
        self._calls[id(call)] = call, own

    def after_tool_call(self, call: ToolCall, result: ToolResult) -> Generator[Event, None, ToolResult | None]:
        _, own = self._calls.pop(id(call), (call, None))
        if not own:
            return None
        yield from map(Notice, own.taken_notices())
        lines = [self._undone_line(own.undone)] if own.undone else []
        if own.started and not own.outside and self.active and result.details.get("exit_code") and SIGNS.search(str(result.content)):
            lines.append(self._hint())
        if not lines or not isinstance(result.content, str):
            return None
        return dataclasses.replace(result, content="\n".join([result.content, *lines]))

    def _hint(self) -> str:
        network = "" if self.network else " and have no network"
        return (f"[in the sandbox commands write only in {self.workspace} and $TMPDIR ({self.temporary}){network}. Where that is the "
                "reason, do it there, or make the call again with unconfined true: the user is asked]")

    def _undone_line(self, changes: Sequence[Change]) -> str:
        way = "make the call again with unconfined true: the user is asked" if self.active else "ask the user to do it"
        return (f"[undone: {escaped(told(changes, self.workspace))}. A command must not change what git or coder run later by themselves. "
                f"Where it has to be, {way}]")

    # -- confining

    def run(self, work: Callable[[], T], writes: bool = True, discard: Callable[[T], object] | None = None) -> T:
        """Run it in a confined thread, or in this one where nothing is confined. Raises what it raises, and OSError."""
        if not self.active:
            return work()
        with self._lock:
            thread = self._thread(writes)
        return thread.run(work, discard)

    def _thread(self, writes: bool) -> ConfinedThread:
        """The thread that children come from. A rule is for a folder, not for its name: for another folder there is another."""
        paths = self._writable() if writes else [NULL]
        wanted = [_identity(path) for path in paths]
        known, thread = self._threads.get(writes, ([], None))
        if thread is None or known != wanted:
            if thread:
                thread.end()
            thread = ConfinedThread(lambda: restrict(paths, self.network, self.abi))
            self._threads[writes] = wanted, thread
        return thread

    def _writable(self) -> list[Path]:
        return [self.workspace, self.temporary, *git_folders(self.workspace), *self._devices]

    def _holds(self, path: Path) -> bool:
        """May commands write there?"""
        return any(each.is_relative_to(self.workspace) for each in (path, path.resolve()))

    def _probe(self, required: bool) -> bool:
        """Try it in earnest. Is there a sandbox?"""
        try:
            self._thread(True)
        except LandlockError as error:
            reason = error.strerror or str(error)
            if required:
                raise SandboxError(f"there is no sandbox on this system: {reason}") from None
            self.notices.append(f"No sandbox: {reason}. A command that is allowed can do all that you can.")
            return False
        missing = missing_of(self.abi, self.network)
        if missing and required:
            raise SandboxError(" ".join(missing))
        self.notices += missing
        if Path(os.path.realpath(os.path.expanduser("~"))).is_relative_to(self.workspace):
            self.notices.append("This folder holds your home folder: the sandbox lets commands write to all of it.")
        return True


def missing_of(abi: int, network: bool) -> list[str]:
    """What the sandbox of a kernel with this version of Landlock does not keep, sentences for a person."""
    found = [f"The sandbox of this kernel is not whole: commands can {' and '.join(gaps(abi))}."] if gaps(abi) else []
    if network or can_filter():
        return found
    return [*found, "The sandbox of this kernel cannot turn off the network." if abi < NETWORK_ABI else
            "The sandbox of this system turns off plain TCP only, not UDP."]


class Call:
    """The confinement of one tool call. `outside`: the person has allowed it to run without."""

    def __init__(self, sandbox: Sandbox, writes: bool) -> None:
        self.sandbox, self.writes = sandbox, writes
        self.outside = self.started = False
        self.undone: list[Change] = []
        self._notices: list[str] = []

    @property
    def environment(self) -> Mapping[str, str | None]:
        return {} if self.outside or not self.sandbox.active else self.sandbox.environment

    def start(self, start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        self.started = True
        if not self.writes:
            return self.sandbox.run(start, False, _discard)
        self._notices += _left(self.sandbox.watch.begin(), self.sandbox.workspace)
        try:
            return start() if self.outside else self.sandbox.run(start, True, _discard)
        except BaseException:
            self.ended()
            raise

    def ended(self) -> None:
        if self.writes:
            self.sandbox.unbroken(self._compare)

    def _compare(self) -> None:
        changes = self.sandbox.watch.end(None if self.outside else self.sandbox.run)
        if not changes:
            return
        names = told(changes, self.sandbox.workspace)
        if self.outside:
            self._notices.append(f"A command outside of the sandbox changed {names}.")
        else:
            self.undone += changes
            self._notices.append(f"A command changed what runs later by itself; undone: {names}.")

    def taken_notices(self) -> list[str]:
        """What a person is to be told; taken by this."""
        notices, self._notices = self._notices, []
        return notices


def _left(changes: Sequence[Change], workspace: Path) -> list[str]:
    return [f"Changed since the last command, and left so: {told(changes, workspace)}."] if changes else []


def _identity(path: Path) -> Identity:
    try:
        info = path.stat()
    except OSError:
        return path, 0, 0
    return path, info.st_dev, info.st_ino


def _discard(process: subprocess.Popen[bytes]) -> None:
    """End a child that an interrupt has kept from its owner."""
    with contextlib.suppress(ProcessLookupError, PermissionError), process:
        os.killpg(process.pid, signal.SIGKILL)


def _with_unconfined(tool: Tool) -> Tool:
    known = tool.parameters
    properties = known["properties"] | {"unconfined": {"type": "boolean", "description": UNCONFINED}}
    return dataclasses.replace(tool, parameters=known | {"properties": properties}, function=_bash, title=_title)


def _bash(ctx: ToolContext, command: str, timeout: int = DEFAULT_TIMEOUT, unconfined: bool = False) -> Generator[Any, None, ToolResult]:
    if not unconfined:
        return (yield from run_command(ctx, command, timeout))
    if ctx.authorize is None:
        raise DeniedError("nobody can be asked to let a command run outside of the sandbox.")
    if not isinstance(ctx.confine, Call):
        raise ToolError("this call is not in the sandbox: leave unconfined out")
    ctx.confine.outside = True
    return (yield from run_command(ctx, command, timeout, "unconfined"))


def _title(arguments: dict[str, Any]) -> str:
    return f"{arguments.get('command', '')}{' (outside of the sandbox)' if arguments.get('unconfined') else ''}"
