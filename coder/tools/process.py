"""Child processes: started apart from the terminal, read with bounded memory, and never left behind.

A child gets a session of its own, so that it has no terminal to ask for passwords or to steal keys from, and the null
device as its input. It is over when the process is over, not when the pipe is: a background child that holds the pipe
open does not hang us. It may live on until we end; at a time-out, an abort and at our own end all that is left is killed,
also what has made a session of its own: each command's children carry its mark in their environment.

What it leaves out: confinement (features/sandbox.py). POSIX only; children that left their group are found on Linux only.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Protocol

from coder.abort import TICK, Abort
from coder.environment import is_secret
from coder.types import ToolError

GRACE = 0.5  # seconds between TERM and KILL
DRAIN = 0.2  # seconds to read on after the process has ended while something else still writes
READ = 1 << 16
MARK = "CODER_COMMAND"  # environment variable by which a command's children are known

STEERING = {"BASH_ENV", "ENV", "SHELLOPTS", "BASHOPTS", "POSIXLY_CORRECT", "CDPATH", "GLOBIGNORE", "PROMPT_COMMAND", "RIPGREP_CONFIG_PATH",
            "LD_PRELOAD", "LD_AUDIT"}
FUNCTION = "BASH_FUNC_"  # how the name of an exported function begins, which would stand in for a program
QUIET = {"PAGER": "cat", "GIT_PAGER": "cat", "MANPAGER": "cat", "TERM": "dumb", "EDITOR": "true", "VISUAL": "true",
         "GIT_EDITOR": "true", "GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "true", "SSH_ASKPASS": "true",
         "SSH_ASKPASS_REQUIRE": "never", "PIP_NO_INPUT": "1", "DEBIAN_FRONTEND": "noninteractive"}

_started: set[int] = set()  # groups that may have left members
_run = f"{os.getpid()}-{os.urandom(6).hex()}"


@dataclass(frozen=True)
class Ending:
    """How a child ended: `code` as subprocess has it (negative: a signal), `cause` "timeout", "aborted" or ""."""

    code: int
    cause: str = ""


class Confinement(Protocol):
    """What a child is kept in."""

    @property
    def environment(self) -> Mapping[str, str | None]:
        """Variables for the child, before ours; None for one that it does not get."""
        ...

    def start(self, start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        """Call `start` where its child is confined. Raises what it raises, and ToolError."""
        ...

    def ended(self) -> None:
        """Called once after each start that gave a child, when that is over, on every way out."""
        ...


def environment() -> dict[str, str]:
    """Ours, without what looks like a secret and what steers a shell; with all pagers and prompts off."""
    kept = {name: value for name, value in os.environ.items()
            if name not in STEERING and not name.startswith(FUNCTION) and not is_secret(name)}
    if "PATH" in kept:  # a relative folder there is the workspace, which must not stand in for the system (PRM-21)
        # "" would be the workspace again
        kept["PATH"] = os.pathsep.join(filter(os.path.isabs, kept["PATH"].split(os.pathsep))) or os.defpath
    return kept | QUIET


def output_of(argv: list[str], cwd: Path, abort: Abort, timeout: float, *, stdin: IO[bytes] | None = None,
              stderr: IO[bytes] | None = None, confine: Confinement | None = None) -> Generator[bytes, None, Ending]:
    """Run a program; yield what it writes to stdout and stderr as it comes, b"" when nothing comes, return how it ended.

    `stdin` and `stderr`: files in the place of nothing, and of the common output. `confine`: what the child is kept in.

    Raises ToolError where it cannot be started. On every way out, also a closed generator, its group is gone or, after
    a normal end, only background children are left.
    """
    mark = f"{_run}-{time.monotonic_ns()}"
    given: Mapping[str, str | None] = {**environment(), **(confine.environment if confine else {}), MARK: mark}
    variables = {name: value for name, value in given.items() if value is not None}

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(argv, cwd=cwd, env=variables, start_new_session=True, stdin=stdin or subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=stderr or subprocess.STDOUT)

    try:
        process = confine.start(start) if confine else start()
    except (OSError, ValueError) as error:
        gone = "" if cwd.is_dir() else f" (the folder {cwd} is gone)"
        raise ToolError(f"the command could not be started: {error}{gone}") from None
    if not _started:
        atexit.register(stop_all)
    _started.add(process.pid)
    cause = "interrupted"
    try:
        cause = yield from _pump(process, abort, time.monotonic() + timeout)
    finally:
        try:
            if cause:
                _kill(process, mark)
        finally:
            if confine:
                confine.ended()
            if process.stdout:
                process.stdout.close()
    return Ending(process.wait(), cause)


def _pump(process: subprocess.Popen[bytes], abort: Abort, deadline: float) -> Generator[bytes, None, str]:
    """Yield output until the process has ended. Returns the cause where it has to be ended."""
    assert process.stdout
    pipe, ended = process.stdout.fileno(), 0.0
    with _exit_of(process) as exit_fd, selectors.DefaultSelector() as watched:  # select() takes no number above 1023
        for fd in (pipe, *exit_fd):
            watched.register(fd, selectors.EVENT_READ)
        while True:
            over = process.poll() is not None  # asked before looking at the pipe: what it wrote is in there by then
            ready = [key.fd for key, _ in watched.select(TICK)]
            if pipe in ready:
                if data := os.read(pipe, READ):
                    yield data
                else:
                    watched.unregister(pipe)  # it has closed its output, and may go on
            elif not ready:
                yield b""
            now = time.monotonic()
            if over:
                ended = ended or now
                if pipe not in ready or pipe not in watched.get_map() or now - ended > DRAIN:
                    return ""
            elif abort.is_set:
                return "aborted"
            elif now > deadline:
                return "timeout"


@contextlib.contextmanager
def _exit_of(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """A descriptor that is ready when the process has ended, where the system has such; else we look now and then."""
    try:
        fd = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # not Linux, or a sandbox that does not know the call
        yield []
        return
    try:
        yield [fd]
    finally:
        os.close(fd)


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


def stop_all() -> None:
    """End what commands have left in the background. Called at our own end."""
    if os.path.isdir("/proc/self"):
        _sweep(_run)  # every command's mark begins with it; checked process by process, so that no reused number is hit
        return
    for group in _started:
        _signal(group, signal.SIGKILL)


@cache
def private_folder() -> str:
    """A folder of this process alone (0700), gone with it."""
    folder = tempfile.mkdtemp(prefix=f"coder-{os.getpid()}-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
