"""What commands leave running, ended at a time-out, an abort and the end of the program.

A command is a session and a group of its own, and its children have its mark in their environment.
A child can leave the group (setsid) and drop the mark (env -i), so the command line adopts orphans
as well (`adopt_orphans`). After a kill -9 a guard ends all: PR_SET_PDEATHSIG would reach a
command's shell alone, not what that has started.

A program that uses the library has children of its own, which are neither ended nor waited for
here: there, only the mark, the groups, the descent from a command at its time-out and the sandbox
tell what is a command's.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

from coder.tools.secrets import environment

GRACE = 0.5  # seconds between TERM and KILL
MARK = "CODER_COMMAND"  # environment variable that marks a command's children
PR_SET_CHILD_SUBREAPER = 36
PAUSE = 0.005  # seconds between two looks at what is left
ROUNDS = 200  # looks at what was killed, until it is given up

# It runs in the background of a shell that ends at once, so a program that waits for its children
# does not wait for it. Descriptor 3 is a pipe whose other end closes when this process ends in any
# way.
GUARD = """
exec 3<&0
{{
  read -r line
  {}
}} <&3 >/dev/null 2>&1 &
echo "$!"
"""
# Kills what has the mark, three times, since that may start others during a turn.
KILL_MARKED = """
  for turn in 1 2 3; do
    grep -lsF -e "$0" /proc/[0-9]*/environ | while IFS=/ read -r root proc number file; do kill -9 "$number"; done
  done
"""

_started: set[int] = set()  # groups that may have left members
_running: set[int] = set()  # commands that are waited for
_guards: set[int] = set()
_program_mark = f"{os.getpid()}-{os.urandom(6).hex()}"
_is_adopting: list[bool] = []  # empty unless all orphans of this program are its commands'
COMMANDS = f"{_program_mark}-"  # how marks begin
SERVERS = f"{_program_mark}-server"
USERS = f"user-{os.urandom(8).hex()}"  # of the user's own commands, which may outlive the program


class Process(NamedTuple):
    """From /proc/PID/stat; `start` in clock ticks since the system's own."""

    is_alive: bool  # no zombie
    parent: int
    session: int
    start: int


def facts(number: int) -> Process | None:
    """None if there is no such process."""
    try:
        fields = Path(f"/proc/{number}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    is_alive = fields[0] not in (b"Z", b"X")
    return Process(is_alive, int(fields[1]), int(fields[3]), int(fields[19]))


def is_alive(number: int) -> bool:
    process = facts(number)
    return process is not None and process.is_alive


def numbers() -> list[int]:
    """All processes of the machine, if the system lists them."""
    if not os.path.isdir("/proc/self"):
        return []
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


# ---- the start ------------------------------------------------------------------------------


def new_mark() -> str:
    return f"{COMMANDS}{time.monotonic_ns()}"


def marked_environment() -> dict[str, str]:
    """`environment` for a child that is started elsewhere and ends with this process."""
    main_guard()
    return environment() | {MARK: SERVERS}


def note_start(number: int) -> None:
    """A command has been started, in a session of its own."""
    _started.add(number)
    _running.add(number)


def note_end(number: int) -> None:
    """A command has been waited for."""
    _running.discard(number)
    _reap()
    for group in list(_started - _running):
        # The system gives a group's number to nobody else while it has members
        with contextlib.suppress(PermissionError):
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                _started.discard(group)


@cache
def main_guard() -> int:
    """Start, once, what ends marked processes after this one. Returns its number, or 0."""
    atexit.register(stop_all)
    if not os.path.isdir("/proc/self"):
        return 0
    return start_guard(KILL_MARKED, f"{MARK}={_program_mark}")[0]


def start_guard(script: str, argument: str = "sh") -> tuple[int, int]:
    """Start a shell that runs a script when this process ends or closes a descriptor.

    The script has `argument` as $0. Returns the shell's number, 0 if there is no shell, and the
    descriptor.
    """
    reader, writer = os.pipe()
    argv = ["/bin/sh", "-c", GUARD.format(script), argument]
    with open(reader, "rb") as stdin:
        try:
            done = subprocess.run(
                argv,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                check=False,
                env={"PATH": os.defpath},
                start_new_session=True,
            )
        except OSError:  # there is no sh
            return 0, writer
    number = int(done.stdout or 0)
    _guards.add(number)
    return number, writer


# ---- the end of a command -------------------------------------------------------------------


def kill(process: subprocess.Popen[bytes], mark: str) -> None:
    """TERM to the group, a short grace, KILL, and a sweep for those who have left the group."""
    command = facts(process.pid)
    family = _descendants(process.pid)
    signal_group(process.pid, signal.SIGTERM)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    finally:  # also when a second Ctrl+C comes during the grace
        signal_group(process.pid, signal.SIGKILL)
        process.wait()
        _sweep(mark)
        for number, before in family.items():
            now = facts(number)
            if now and now.start == before.start:  # it is still the same
                _kill(number)
        if command:
            end_orphans(command.start, spared=COMMANDS)


def signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _kill(number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(number, signal.SIGKILL)


def _sweep(mark: str) -> None:
    """KILL every process that has the mark."""
    wanted = f"{MARK}={mark}".encode()
    for number in numbers():
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{number}/environ").read_bytes():
                os.kill(number, signal.SIGKILL)


def _descendants(number: int) -> dict[int, Process]:
    """What descends from a process, as far as no parent in between has ended."""
    children = dict[int, dict[int, Process]]()  # by their parent
    for other in numbers():
        process = facts(other)
        if process:
            children.setdefault(process.parent, {})[other] = process
    family = dict[int, Process]()
    parents = [number]
    while parents:
        below = children.pop(parents.pop(), {})
        family |= below
        parents += below
    return family


# ---- orphans --------------------------------------------------------------------------------


def adopt_orphans() -> None:
    """Let orphans come to this program, and end with it. All its children are of this package.

    If the system cannot do it, they go to the system's first process as ever, and can be lost.
    """
    if sys.platform != "linux":
        return
    import ctypes  # late: 4 ms

    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0:
        _is_adopting.append(True)


def _orphans() -> dict[int, Process]:
    """Commands' children that have lost their parent, zombies included.

    Those are this program's children in another session than its own: a command's processes can
    never come back into its session (setsid(2)), where the user's editor and `!commands` are.
    Orphans come to the main thread. What another thread has started, such as MCP servers, is not
    one; nor is what was there before the first command.
    """
    own = os.getpid()
    try:
        listed = Path(f"/proc/self/task/{own}/children").read_text()
        children = {int(word) for word in listed.split()}
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        children = set(numbers())
    guard = facts(main_guard())
    first = guard.start if guard else 0
    orphans = dict[int, Process]()
    for number in children - _guards - _running:
        child = facts(number)
        if not child or child.parent != own or child.session == os.getsid(0):
            continue
        if child.start >= first:
            orphans[number] = child
    return orphans


def end_orphans(since: int = 0, spared: str = SERVERS) -> bool:
    """KILL what commands have left and what that has started, from this time on.

    What has a mark that begins with `spared` stays, and so do the user's own. Only children are
    killed: nobody else gets their numbers before they are waited for. What they have started comes
    to this program when they end, and is killed in the next round. Returns whether all is gone;
    False if orphans go elsewhere.
    """
    if not _is_adopting:
        return False
    for _ in range(ROUNDS):
        left = [
            number
            for number, orphan in _orphans().items()
            if orphan.start >= since and not (orphan.is_alive and _is_marked(number, spared))
        ]
        if not left:
            return True
        for number in left:
            _kill(number)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(number, os.WNOHANG)
        time.sleep(PAUSE)
    return False


def _is_marked(number: int, spared: str) -> bool:
    with contextlib.suppress(OSError):
        variables = Path(f"/proc/{number}/environ").read_bytes()
        return any(f"{MARK}={mark}".encode() in variables for mark in (spared, USERS))
    return False


def _reap() -> None:
    """Wait for orphans that have ended."""
    if not _is_adopting:
        return
    with contextlib.suppress(ChildProcessError):
        # A look that costs little: has any child ended?
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            for number, child in _orphans().items():
                if not child.is_alive:
                    os.waitpid(number, os.WNOHANG)


# ---- the end of the program -----------------------------------------------------------------


def stop_all() -> None:
    """End what commands have left in the background. Called at the end of the program."""
    if not main_guard.cache_info().currsize:  # nothing was started
        return
    _sweep(_program_mark)  # every mark begins with it
    for group in _started:
        # If such a process is there, its number belongs to another one: the group has ended
        if group in _running or not os.path.exists(f"/proc/{group}"):
            signal_group(group, signal.SIGKILL)
    for _ in range(ROUNDS):  # their orphans come with their end
        if not any(is_alive(number) for number in list(_running)):
            break
        time.sleep(PAUSE)
    end_orphans()
