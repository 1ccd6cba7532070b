"""bash, and all other child processes: apart from the terminal, read with bounded memory, never left behind.

A child gets a session of its own, without a terminal. It is over when the process is over, not when the pipe is: a
background child may live on. A time-out, an abort and the end of the program kill all that is left (processes.py).
"""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

from coder.abort import TICK, Abort
from coder.events import Returning
from coder.tools import processes, slips
from coder.tools.secrets import clean_path, environment
from coder.tools.workspace import private_folder
from coder.toolset import ToolContext, tool
from coder.types import ToolError, ToolResult

DEFAULT_TIMEOUT = 120  # seconds
MAX_TIMEOUT = 600
KEEP = 14_000  # characters of head and tail each: under the 30,000 that the loop passes on
MAX_SAVED = 1 << 30  # bytes of output: an endless command must not fill the disk
SHOW_EVERY = 0.1  # seconds between two updates
DRAIN = 0.2  # seconds to read on after the process has ended while something else still writes
SHELLS = ("/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash")


@tool(permission="bash", default="ask", asks_itself=True, slips=slips.BASH)
def bash(
    ctx: ToolContext, command: str, timeout: int = DEFAULT_TIMEOUT
) -> Generator[Any, None, ToolResult]:
    """Run a command in bash, in the workspace. Each call is a new shell without input or terminal:
    `cd` and variables do not last. Put a server in the background with & and its output in a
    file. Prefer read, grep, glob and edit to cat, grep, find and sed.

    command: the command line
    timeout: seconds until it is stopped, default 120, at most 600
    """
    return (yield from run_command(ctx, command, timeout))


def run_command(
    ctx: ToolContext, command: str, timeout: int = DEFAULT_TIMEOUT, permission: str = "bash"
) -> Generator[Any, None, ToolResult]:
    """The tool's work; `permission` is the name of the one that is asked for."""
    if "\0" in command or not command.strip():
        raise ToolError("the command is empty or holds a NUL")
    yield from ctx.ask(permission, command)
    seconds, output = min(max(1, timeout), MAX_TIMEOUT), Output()
    argv = [shell(), "--noprofile", "--norc", "-c", command]
    updated, fresh = time.monotonic(), ""
    work = output_of(argv, ctx.cwd, ctx.abort, seconds, confine=ctx.confine)
    with contextlib.closing(output), Returning(work) as pieces:
        for data in pieces:
            fresh = (fresh + output.add(data))[-2000:]
            if fresh and time.monotonic() - updated > SHOW_EVERY:
                yield fresh
                updated, fresh = time.monotonic(), ""
    code, cause = pieces.value
    notes = [_how_it_ended(code, cause, seconds, ctx.abort.reason), output.note()]
    text = "\n".join(filter(None, [output.text(), *notes]))
    details = {"exit_code": code, "cause": cause, "saved": output.saved}
    text = text or ("" if output.bytes else "(no output)")
    return ToolResult(text, is_error=code != 0, details=details)


def _how_it_ended(code: int, cause: str, seconds: int, reason: str) -> str:
    if cause == "timeout":
        return f"[timed out after {seconds} s and was stopped; timeout can be up to {MAX_TIMEOUT}]"
    if cause:
        limit = reason == "max_time"
        return f"[{'the time limit of the run was reached' if limit else 'aborted by the user'}]"
    if code < 0:
        name = next((each.name for each in signal.Signals if each == -code), "real-time")
        return f"[killed by signal {-code} ({name})]"
    return f"[exit code {code}]" if code else ""


class Output:
    """Head and tail of a stream as text; the whole in a private file as soon as it is more than both."""

    def __init__(self, max_saved: int = MAX_SAVED) -> None:
        self.bytes = 0
        self.max_saved = max_saved
        self.saved = ""  # the path of the file
        self._written_bytes = self._characters = 0
        self._head = self._tail = ""
        self._unsaved_bytes = bytearray()
        self._is_saving = True
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._file: IO[bytes] | None = None

    def add(self, data: bytes, is_last: bool = False) -> str:
        """Take bytes; returns their text."""
        text = self._decoder.decode(data, is_last)
        room = 2 * KEEP - len(self._head)
        self._head += text[:room]
        self._tail = (self._tail + text[room:])[-KEEP:]
        self._characters += len(text)
        self.bytes += len(data)
        if self._is_saving:
            self._unsaved_bytes += data
            if self._tail:
                self._save()
        return text

    def _save(self) -> None:
        """Write what has come, until `max_saved` or the disk is full."""
        try:
            if not self._file:
                fd, self.saved = tempfile.mkstemp(".txt", "output-", str(private_folder()))
                self._file = os.fdopen(fd, "wb", buffering=0)
            size = self._file.write(self._unsaved_bytes[: self.max_saved - self._written_bytes])
            self._written_bytes += size
            self._is_saving = size == len(self._unsaved_bytes)
        except OSError:
            self._is_saving = False
        self._unsaved_bytes.clear()

    def text(self) -> str:
        """The whole, or head and tail with a marker that names what is missing."""
        head, tail = self._head[:KEEP], (self._head[KEEP:] + self._tail)[-KEEP:]
        missing = self._characters - len(head) - len(tail)
        middle = f"\n\n... [truncated {missing} characters] ...\n\n" if missing else ""
        return f"{head}{middle}{tail}".rstrip("\n")

    def note(self) -> str:
        """Where the whole is, if it is in a file."""
        is_whole = self._written_bytes == self.bytes
        part = "the whole output" if is_whole else f"the first {self._written_bytes:,} bytes"
        return f"[{part} of {self.bytes:,} bytes: {self.saved}]" if self.saved else ""

    def close(self) -> None:
        self.add(b"", is_last=True)
        if self._file:
            self._file.close()


@cache
def shell() -> str:
    """The system's bash, before anything that a folder on PATH may offer."""
    found = next((path for path in SHELLS if os.access(path, os.X_OK)), shutil.which("bash"))
    if not found:
        raise ToolError("there is no bash on this machine")
    return found


def find_program(name: str, workspace: str | Path) -> str:
    """The path of a program that is not in the workspace; "" where there is none.

    It may neither lie there, as a link to any other program, nor be a link that leads there.
    """
    for place in clean_path(os.environ.get("PATH", "")).split(os.pathsep):
        found = shutil.which(name, path=place)
        ends = (Path(os.path.realpath(place)), Path(os.path.realpath(found or place)))
        if found and not any(end.is_relative_to(workspace) for end in ends):
            return found
    return ""


# ---- processes ------------------------------------------------------------------------------


def output_of(
    argv: list[str],
    cwd: Path,
    abort: Abort,
    timeout: float,
    *,
    stdin: IO[bytes] | int = subprocess.DEVNULL,
    stderr: IO[bytes] | int = subprocess.STDOUT,
    confine: Any = None,
    variables: Mapping[str, str] | None = None,
) -> Generator[bytes, None, tuple[int, str]]:
    """Run a program, yield its output as it comes, b"" when none comes, and return how it ended.

    That is (the code, as subprocess has it; "", or why it was ended: "timeout", "aborted"). `confine`:
    what the child is kept in. `variables`: more for its environment. Raises ToolError where it cannot
    be started. At the end only background children may be left, and none where it was ended.
    """
    mark = processes.new_mark()
    env = environment() | {**(confine.environment if confine else {}), **(variables or {})}
    files: Any = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": stderr}
    more = files | {"cwd": cwd, "env": env | {processes.MARK: mark}, "start_new_session": True}
    start: Any = partial(subprocess.Popen, argv, **more)
    processes.main_guard()
    try:
        process: subprocess.Popen[bytes] = confine.start(start) if confine else start()
    except (OSError, ValueError) as error:
        gone = "" if cwd.is_dir() else f" (the folder {cwd} is gone)"
        raise ToolError(f"the command could not be started: {error}{gone}") from None
    processes.note_start(process.pid)
    cause = "interrupted"
    try:
        cause = yield from read_output(process, abort, time.monotonic() + timeout)
    finally:
        with process, contextlib.ExitStack() as ending:
            if confine:
                ending.callback(confine.ended)
            ending.callback(processes.note_end, process.pid)
            if cause:
                processes.kill(process, mark)
    return process.wait(), cause


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
        data = os.read(pipe, 1 << 16) if ready else b""
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
