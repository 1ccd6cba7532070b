"""Child processes: started apart from the terminal, read with bounded memory, never left behind.

A child gets a session of its own, so that it has no terminal to ask for passwords or to take keys
from. It is over when the process is over, not when the pipe is: a background child may live on.

A time-out, an abort and our own end kill all that is left, also what has made a session of its own:
the children of each command carry its mark in their environment. After a kill -9 of ours a guard
does it: PR_SET_PDEATHSIG would reach a command's shell alone, not what that has started.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from coder.abort import TICK, Abort
from coder.tools.secrets import clean_path, is_secret
from coder.types import ToolError

GRACE = 0.5  # seconds between TERM and KILL
DRAIN = 0.2  # seconds to read on after the process has ended while something else still writes
READ = 1 << 16
OURS = ".private-folder-of-coder"  # a file in it, since the name alone may be another's
MARK = "CODER_COMMAND"  # environment variable by which a command's children are known

# Variables that make a shell run or load something, or that change what a command means. An
# exported function (BASH_FUNC_...) would stand in for a program.
STEERING = re.compile(
    "BASH_ENV|ENV|SHELLOPTS|BASHOPTS|POSIXLY_CORRECT|CDPATH|GLOBIGNORE|PROMPT_COMMAND"
    "|RIPGREP_CONFIG_PATH|LD_PRELOAD|LD_AUDIT|BASH_FUNC_.*",
    re.S,
)
EDITORS = ("EDITOR", "VISUAL", "GIT_EDITOR", "GIT_ASKPASS", "SSH_ASKPASS")
QUIET = {
    **dict.fromkeys(("PAGER", "GIT_PAGER", "MANPAGER"), "cat"),
    **dict.fromkeys(EDITORS, "true"),
    "TERM": "dumb",
    "GIT_TERMINAL_PROMPT": "0",
    "SSH_ASKPASS_REQUIRE": "never",
    "PIP_NO_INPUT": "1",
    "DEBIAN_FRONTEND": "noninteractive",
}

# A shell that reads until this process is gone, then kills what carries the mark, three times, since
# that may start others meanwhile. It runs in the background of one that ends at once: a program that
# waits for its children does not wait for it.
GUARD = """
exec 3<&0
{
  read -r line
  for turn in 1 2 3; do
    grep -lsF -e "$0" /proc/[0-9]*/environ | while IFS=/ read -r root proc number file; do kill -9 "$number"; done
  done
} <&3 &
"""

_started: set[int] = set()  # groups that may have left members
_run = f"{os.getpid()}-{os.urandom(6).hex()}"


@dataclass
class Ending:
    """How a child ended: `code` as subprocess has it, negative for a signal.

    `cause` is why it was ended: "timeout", "aborted" or "".
    """

    code: int
    cause: str = ""


def environment() -> dict[str, str]:
    """Ours, without what looks like a secret and what steers a shell; pagers and prompts off."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not (STEERING.fullmatch(name) or is_secret(name, value))
    }
    if "PATH" in kept:
        kept["PATH"] = clean_path(kept["PATH"])
    return kept | QUIET


def find_program(name: str, workspace: str | Path) -> str:
    """The path of a program that is not in the workspace; "" where there is none.

    It may neither lie there, as a link to any other program, nor be a link that leads there.
    """
    for place in environment().get("PATH", os.defpath).split(os.pathsep):
        found = shutil.which(name, path=place)
        ends = (Path(os.path.realpath(place)), Path(os.path.realpath(found or place)))
        if found and not any(end.is_relative_to(workspace) for end in ends):
            return found
    return ""


def marked_environment() -> dict[str, str]:
    """`environment` for a child that is started elsewhere: it ends with us, like a command's children."""
    _start_guard()
    return environment() | {MARK: f"{_run}-server"}


def output_of(
    argv: list[str],
    cwd: Path,
    abort: Abort,
    timeout: float,
    *,
    stdin: IO[bytes] | int | None = None,
    stderr: IO[bytes] | int | None = None,
    confine: Any = None,
    variables: Mapping[str, str | None] | None = None,
) -> Generator[bytes, None, Ending]:
    """Run a program, yield its output as it comes, b"" when none comes, and return how it ended.

    `stdin` and `stderr`: files instead of nothing, and of the common output. `confine`: what the
    child is kept in. `variables`: for its environment; None for one that it does not get. Raises
    ToolError where it cannot be started. At the end only background children may be left, and none
    where it was ended.
    """
    mark = f"{_run}-{time.monotonic_ns()}"
    given = environment() | {**(confine.environment if confine else {}), **(variables or {})}
    env = {name: value for name, value in given.items() if value is not None} | {MARK: mark}
    files = {"stdin": subprocess.DEVNULL if stdin is None else stdin, "stderr": stderr}
    process = _start(argv, cwd, env, files, confine)
    cause = "interrupted"
    try:
        cause = yield from read_output(process, abort, time.monotonic() + timeout)
    finally:
        with contextlib.ExitStack() as ending:
            if process.stdout:
                ending.callback(process.stdout.close)
            if confine:
                ending.callback(confine.ended)
            if cause:
                _kill(process, mark)
    return Ending(process.wait(), cause)


def _start(
    argv: list[str], cwd: Path, env: dict[str, str], files: Any, confine: Any
) -> subprocess.Popen[bytes]:
    def popen() -> subprocess.Popen[bytes]:
        both = files | {"stdout": subprocess.PIPE, "stderr": files["stderr"] or subprocess.STDOUT}
        return subprocess.Popen(argv, cwd=cwd, env=env, start_new_session=True, **both)

    _start_guard()
    try:
        process = confine.start(popen) if confine else popen()
    except (OSError, ValueError) as error:
        gone = "" if cwd.is_dir() else f" (the folder {cwd} is gone)"
        raise ToolError(f"the command could not be started: {error}{gone}") from None
    _started.add(process.pid)
    return process


def read_output(
    process: subprocess.Popen[bytes], abort: Abort, deadline: float
) -> Generator[bytes, None, str]:
    """Yield output, b"" when none comes, until the process has ended. Returns the cause where it has to be ended."""
    assert process.stdout
    pipe, ended, is_open = process.stdout.fileno(), 0.0, True
    watched = select.poll()  # select() takes no number above 1023
    watched.register(pipe, select.POLLIN)
    while True:
        # Both before the pipe is read: all that was written until then is in there
        over, stop = process.poll() is not None, abort.is_set
        ready = is_open and watched.poll(0 if over or stop else TICK * 1000)
        data = os.read(pipe, READ) if ready else b""
        is_open = is_open and bool(data or not ready)  # closed by the process, which may go on
        yield data
        if not is_open:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(TICK)
        now = time.monotonic()
        if over:
            ended = ended or now
            if not data or now - ended > DRAIN:
                return ""
        elif stop:
            return "aborted"
        elif now > deadline:
            return "timeout"


def _kill(process: subprocess.Popen[bytes], mark: str) -> None:
    """TERM to the group, a short grace, KILL, and a sweep for those who have left the group."""
    _signal(process.pid, signal.SIGTERM)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    finally:  # also when a second Ctrl+C comes during the grace
        _signal(process.pid, signal.SIGKILL)
        process.wait()
        _sweep(mark)
        _started.discard(process.pid)


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _sweep(mark: str) -> None:
    """KILL every process that carries the mark."""
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)


@cache
def _start_guard() -> None:
    """Once. The end of the pipe that we hold is closed with us, however we end."""
    atexit.register(stop_all)
    if not os.path.isdir("/proc/self"):
        return
    reader, _ = os.pipe()
    with open(reader, "rb") as ours, contextlib.suppress(OSError):  # without sh there is none
        argv = ["/bin/sh", "-c", GUARD, f"{MARK}={_run}"]
        quiet: Any = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
        env = {"PATH": os.defpath}
        subprocess.run(argv, env=env, stdin=ours, start_new_session=True, check=False, **quiet)


def stop_all() -> None:
    """End what commands have left in the background. Called at our own end."""
    if os.path.isdir("/proc/self"):
        _sweep(_run)  # every mark begins with it; a group's number may be another's by now
        return
    for group in _started:
        _signal(group, signal.SIGKILL)


@cache
def private_folder() -> str:
    """A folder of this process alone (0700), removed with it, and those of killed processes."""
    for mark in Path(tempfile.gettempdir()).glob(f"coder-*/{OURS}"):
        _clear_away(mark.parent)
    folder = tempfile.mkdtemp(prefix=f"coder-{os.getpid()}-")
    fcntl.flock(os.open(folder, os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_EX)  # as long as we live
    Path(folder, OURS).touch()  # when it is locked: without this nobody clears it away
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _clear_away(folder: Path) -> None:
    """Remove a private folder that no process holds: the kernel gives the lock back at any end."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(fd)
