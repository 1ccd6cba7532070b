"""Sandbox: commands and searches write only where they should, and leave nothing behind.

    run_loop(messages, model, Toolset(sandbox.tools(TOOLS)), hooks=HookChain(permissions, sandbox))

docs/security.md says where that is, and what they can still do. After each command git_guard.py
puts back what would run later. One thread gives up its rights for good (`restrict`), and what it
starts has no more: there is no code between fork and exec, and no helper program.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import os
import re
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from coder.events import Event, Notice
from coder.hooks import Hooks
from coder.permissions.git_guard import Changes, GitGuard, describe
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
SIGNS = re.compile(
    r"(?i)permission denied|operation not permitted|read-only file system|no new privileges"
    r"|invalid cross-device link|\bE(ACCES|PERM|ROFS|XDEV)\b"
)
OFFLINE = re.compile(r"(?i)name resolution|not resolve|n.t connect|\b(EAI_AGAIN|ENOTFOUND)\b")

# Notices for the user: at the start, and later.
NO_SANDBOX = (
    "No sandbox: this kernel has no Landlock, or it may not be used. Commands that you allow run "
    "with all of your rights."
)
INCOMPLETE = "The sandbox of this kernel is incomplete: it lacks what Linux 6.12 and seccomp have."
HOLDS_HOME = "This folder holds your home folder: the sandbox lets commands write to all of it."
UNGUARDED = "Not guarded against changes by commands, since it holds too much: {}."
NOT_ENDED = (
    "A session in this folder was killed. Changed since its last command began, "
    "and not put back: {}. Check that before you use git here."
)
LEFT = "Changed outside the sandbox or since the last command, and not put back: {}."
CHANGED = "A command changed {}; put back."


class Sandbox(Hooks):
    """Confines what the tools of a session start. One for a process.

    `required`: raise CoderError where the kernel lacks something; otherwise `notices` says so, in
    sentences for the user. `config` is coder's own folder, guarded where commands can write to it;
    with `data`, the next start reports what a killed process could not put back.
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
        # All that plan mode can write to: here-documents, mktemp and sort need some place
        self.scratch = self.temporary.with_name("plan")
        self.notices: list[str] = []
        self._unreported_notices: list[str] = []
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
            self._unreported_notices.append(text.format(describe(changes, self.workspace)))

    def tools(self, tools: Iterable[Tool], read_only: bool = False) -> list[Tool]:
        """The same tools; in a sandbox bash takes `unconfined` and reports what was put back.

        `read_only`: for an agent that changes nothing, and so leaves no sandbox.
        """
        about = "run outside the sandbox; the user is asked. Only for what it prevents"
        more, made = {"unconfined": {"type": "boolean", "description": about}}, list[Tool]()
        for tool in tools:
            if self.active and tool.name == "bash":
                properties = tool.parameters["properties"] | ({} if read_only else more)
                parameters = tool.parameters | {"properties": properties}
                tool = dataclasses.replace(tool, parameters=parameters, function=_bash)
            made.append(tool)
        return made

    def since(self) -> list[str]:
        """For the end of a session: what changed since the last command, and is not reported."""
        self.report(LEFT, self.worker.submit(self.guard.since).result())
        self.guard.close()
        return self._take_unreported()

    def before_tool_call(self, call: ToolCall, ctx: ToolContext) -> None:
        if self.active:
            is_search = call.name in ("grep", "glob")  # they start what coder chooses
            reader = self.reader if ctx.read_only and not is_search else None
            ctx.confine = CallConfinement(self, is_search, reader)

    @cached_property
    def reader(self) -> ThreadPoolExecutor | None:
        """A thread whose children can change nothing; None where the kernel cannot do that."""
        from coder.permissions.no_changes import make_reader  # late: only a plan needs it

        # A thread is confined as the one that starts it
        return self.worker.submit(make_reader, self.scratch).result()

    def after_tool_call(self, call: ToolCall, result: ToolResult) -> Generator[Event, None, None]:
        yield from map(Notice, self._take_unreported())

    def _take_unreported(self) -> list[str]:
        notices, self._unreported_notices = self._unreported_notices, []
        return notices


class CallConfinement:
    """The confinement of one tool call. `outside`: the user allowed it to run without.

    `reader`: the sandbox's thread of this name, where nothing may be changed; then `read_only` is true.
    """

    def __init__(
        self, sandbox: Sandbox, is_search: bool, reader: ThreadPoolExecutor | None = None
    ) -> None:
        self.sandbox, self.is_search = sandbox, is_search
        self.outside = False
        self.thread = reader or sandbox.confined
        self.read_only = reader is not None
        self.environment = _environment(sandbox.scratch if reader else sandbox.temporary)
        self.put_back: Changes = {}

    def start(self, start: Callable[[], Process]) -> Process:
        """Start a child in the sandbox: one at a time, where no Ctrl+C comes between."""
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
            return start() if self.outside else self.thread.submit(start).result()
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        sandbox, guard = self.sandbox, self.sandbox.guard
        if self.outside or self.read_only:  # what has changed was not changed by the command
            sandbox.report(LEFT, guard.end(undo=False))
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


def _bash(
    ctx: ToolContext, command: str, timeout: int = DEFAULT_TIMEOUT, unconfined: bool = False
) -> Generator[Any, None, ToolResult]:
    """Say to the model what was put back, and that the sandbox may be why a command failed."""
    call = ctx.confine if isinstance(ctx.confine, CallConfinement) else None
    if unconfined:
        if ctx.authorize is None or call is None:
            raise DeniedError("no user can be asked to let a command run outside of the sandbox.")
        call.outside, call.environment = True, {}
    permission = "unconfined" if unconfined else "bash"
    result = yield from run_command(ctx, command, timeout, permission)
    if call is None:
        return result
    lines, sandbox = [str(result.content)], call.sandbox
    if call.put_back:
        lines.append(
            f"[put back: {describe(call.put_back, sandbox.workspace)}. A command cannot change git's own "
            "configuration and hooks, or coder's files; what else it did stays. To do it on purpose (git "
            "config, git remote add, git branch -u), make that call again with unconfined true: the user "
            "is asked]"
        )
    if result.details.get("exit_code") and not call.outside:
        lines += _hints(call, lines[0])
    return dataclasses.replace(result, content="\n".join(lines))


def _hints(call: CallConfinement, output: str) -> list[str]:
    """What to say to the model where the sandbox may be why a command failed."""
    sandbox = call.sandbox
    is_sign = bool(SIGNS.search(output))
    if call.read_only and (is_sign or OFFLINE.search(output)):
        return [
            f"[in plan mode commands write nothing, except in $TMPDIR ({sandbox.scratch}), and reach no "
            "network and no other program. What needs more belongs into the plan]"
        ]
    if call.read_only or not is_sign:
        return []
    network = "" if sandbox.network else " and have no network"
    return [
        f"[in the sandbox commands write only in {sandbox.workspace} and $TMPDIR "
        f"({sandbox.temporary}){network}. Where that is the reason, do it there, or make the call "
        "again with unconfined true: the user is asked]"
    ]


def _environment(temporary: Path) -> dict[str, str]:
    """The variables that lead programs to the folder where they can write."""
    caches = {name: str(temporary / "cache" / each) for name, each in CACHES.items()}
    return {"TMPDIR": str(temporary), **caches}


# ---- Landlock and seccomp ------------------------------------------------------------------------

# Landlock restricts a thread and what it starts. These can signal and trace each other, and nothing
# else (the kernel's Documentation/userspace-api/landlock.rst, uapi/linux/landlock.h). A seccomp filter
# (seccomp_filter.rst) covers what Landlock has no rights for: the limits of other processes (a CPU
# limit of 0 kills) and, without a network, all sockets but local ones: Landlock knows TCP by bind
# and connect only, which TCP fast open, MPTCP and UDP avoid.

# Of BPF: code, instructions to skip if true, if false, value
Instruction = tuple[int, int, int, int]

# System calls, the same on all machines but Alpha; and constants of prctl(2).
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION = 1  # flag of CREATE_RULESET: return the version of the interface
PATH_BENEATH = 1
PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, FILTER_MODE = 22, 24, 38, 2
NETWORK_ABI, FULL_ABI = 4, 6  # the first versions with rules for TCP, and with scopes

# Rights that change something, as bits, by the version that introduced them.
WRITE_FILE, REFER, TRUNCATE, IOCTL_DEV = 1 << 1, 1 << 13, 1 << 14, 1 << 15
MAKE_AND_REMOVE = sum(1 << bit for bit in range(4, 13))
RIGHTS = {1: WRITE_FILE | MAKE_AND_REMOVE, 2: REFER, 3: TRUNCATE, 5: IOCTL_DEV}
FOLDER_RIGHTS = ~(1 << 6 | 1 << 11)  # no device nodes: with its own root could write to any disk
FILE_RIGHTS = WRITE_FILE | TRUNCATE | IOCTL_DEV  # those that a rule for a single file may name
TCP = 0b11  # bind and connect
SCOPES = 0b11  # abstract unix sockets and signals of others
# Dropped for root: SYS_MODULE, SYS_RAWIO, SYS_PTRACE, SYS_ADMIN, SYS_BOOT, SYS_TIME, PERFMON
# (reads the environment of any process), BPF. See capabilities(7).
CAPABILITIES = (16, 17, 19, 21, 22, 25, 38, 39)

# By AUDIT_ARCH, the numbers of socket, socketcall (0: none) and prlimit64.
CALLS = {
    0xC000003E: (41, 0, 302),  # x86_64
    0xC00000B7: (198, 0, 261),  # aarch64
    0x40000003: (359, 102, 340),  # i386
    0x40000028: (281, 102, 369),  # arm
}
MACHINES = {"x86_64", "aarch64"}  # those whose programs, 32-bit ones included, are all in the table
X32 = 0x40000000  # from here on: the calls of x86_64 by other numbers
IO_URING_SETUP = 425
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06  # linux/bpf_common.h
ALLOW: Instruction = (RETURN, 0, 0, 0x7FFF0000)
DENY: Instruction = (RETURN, 0, 0, 0x00050000 | errno.EACCES)
NUMBER, ARCH, FIRST, THIRD = 0, 4, 16, 32  # in struct seccomp_data; arguments: low half first
# socket(family, ...): AF_UNIX and AF_NETLINK.
LOCAL_SOCKETS = [(LOAD, 0, 0, FIRST), (EQUAL, 2, 0, 1), (EQUAL, 1, 0, 16), DENY, ALLOW]
# prlimit64(process, resource, new, old): process 0 is the caller; without `new` it only reads.
OWN_LIMITS = [
    *[(LOAD, 0, 0, FIRST), (EQUAL, 5, 0, 0)],
    *[(LOAD, 0, 0, THIRD), (EQUAL, 0, 2, 0), (LOAD, 0, 0, THIRD + 4), (EQUAL, 1, 0, 0)],
    *[DENY, ALLOW],
]


def restrict(writable: Iterable[Path], network: bool = True, abi: int | None = None) -> bool:
    """Limit this thread, and what it starts, to changing files at and below `writable`.

    Its programs get no rights by set-user-ID, fewer of root's, and cannot change other processes'
    limits. Without `network` it has local sockets only, or where seccomp is missing no TCP. `abi`: use
    no newer Landlock. Returns whether the kernel can do all of this. Raises OSError where it has none.
    """
    if abi is None:
        abi = _call("syscall", CREATE_RULESET, None, 0, VERSION)
    handled = sum(rights for since, rights in RIGHTS.items() if abi >= since)
    fields = [handled, 0 if network else TCP, SCOPES]
    fields = fields[: 1 if abi < NETWORK_ABI else 2 if abi < FULL_ABI else 3]
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = _call("syscall", CREATE_RULESET, attributes, len(attributes), 0)
    with contextlib.ExitStack() as closing:
        closing.callback(os.close, ruleset)
        for path in writable:
            try:
                fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            closing.callback(os.close, fd)
            is_folder = stat.S_ISDIR(os.fstat(fd).st_mode)
            rule = struct.pack("=Qi", handled & (FOLDER_RIGHTS if is_folder else FILE_RIGHTS), fd)
            _call("syscall", ADD_RULE, ruleset, PATH_BENEATH, rule, 0)
        with contextlib.suppress(OSError):  # only root can drop them, who alone has them
            for capability in CAPABILITIES:
                _call("prctl", PR_CAPBSET_DROP, capability, 0, 0, 0)
        _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _call("syscall", RESTRICT_SELF, ruleset, 0)
    return _filter_calls(network) and abi >= FULL_ABI


def _filter_calls(network: bool) -> bool:
    """Deny for good changing other processes' limits and, without `network`, sockets other than unix
    and netlink ones, and io_uring, which opens sockets by itself. Calls of an unknown architecture
    are denied. False where seccomp does not work, or the machine is not in the table."""
    program = [(LOAD, 0, 0, ARCH)]
    for arch, (socket, socketcall, prlimit) in CALLS.items():
        part = [(LOAD, 0, 0, NUMBER), (AT_LEAST, 0, 1, X32), DENY, *_case(prlimit, OWN_LIMITS)]
        if not network:
            part += [*_case(IO_URING_SETUP, [DENY]), *_case(socket, LOCAL_SOCKETS)]
            part += _case(socketcall, [DENY]) if socketcall else []  # its arguments cannot be seen
        program += _case(arch, [*part, ALLOW])
    return install_filter(program)


def install_filter(program: list[Instruction]) -> bool:
    """Filter this thread's system calls for good, and deny all of other architectures."""
    packed = b"".join(struct.pack("=HBBI", *each) for each in [*program, DENY])
    code = ctypes.create_string_buffer(packed)
    header = struct.pack("@HP", len(packed) // 8, ctypes.addressof(code))
    with contextlib.suppress(OSError):
        if os.uname().machine in MACHINES:
            return _call("prctl", PR_SET_SECCOMP, FILTER_MODE, header, 0, 0) == 0
    return False


def _case(value: int, part: list[Instruction]) -> list[Instruction]:
    """Run `part` where the loaded value is this one."""
    return [(EQUAL, 0, len(part), value), *part]


def _call(name: str, *arguments: int | bytes | None) -> int:
    """Call a function of the C library. Raises OSError."""
    if sys.platform != "linux":  # where the numbers are those of other system calls
        raise OSError(errno.ENOSYS, "this system is not Linux")
    given = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result = getattr(ctypes.CDLL(None, use_errno=True), name)(*given)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)
