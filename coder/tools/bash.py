"""bash, and all other child processes: without a terminal, read with bounded memory, ended in any
case.

A child gets a session of its own, without a terminal. A command ends when its process ends, not
when the pipe is closed: a background child may live on. A time-out, an abort and the end of the
program kill all that is left (processes.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Generator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

from coder.abort import TICK, Abort
from coder.events import Returning
from coder.tools import processes, slips
from coder.tools.output import Output
from coder.tools.secrets import clean_path, environment
from coder.toolset import ToolContext, tool
from coder.types import ToolError, ToolResult

DEFAULT_TIMEOUT = 120  # seconds
MAX_TIMEOUT = 600
SHOW_EVERY = 0.1  # seconds between two updates
MAX_UPDATE = 2000  # characters
DRAIN = 0.2  # seconds to read on after the process has ended while something else still writes
STOPPED = (
    "[stopped after {seconds} s, with all it had started. If it waits for input or never ends "
    "(server, watcher, editor): pass its flags (-y), or put it in the background: "
    "CMD > log 2>&1 &. Only if it is slow: {slow}.]"
)
INTERACTIVE = {"python", "python3", "node", "cat", "bash", "sh", "irb", "psql", "sqlite3", "mysql"}
FOR_ONE_SHELL = r"(?:cd|export|source|\.|alias|set|pushd)\s[^;&|\n]*"
# bash has a `read` of its own
TOOL_AS_PROGRAM = (
    r"line \d+: (apply_patch|edit|write|glob|todo|task|ask_user|read): "
    r"(?:command not found|`.*': not a valid identifier)"
)
SYSTEM = "/bin:/usr/bin:/usr/local/bin"  # folders that are searched first for bash


@tool(
    permission="bash",
    default="ask",
    asks_itself=True,
    slips=slips.BASH,
)
def bash(
    ctx: ToolContext, command: str, timeout: int = DEFAULT_TIMEOUT
) -> Generator[Any, None, ToolResult]:
    """Run a command in bash, in the workspace. Each call is a new shell without input or terminal:
    `cd` and variables do not last. Put a server in the background with & and its output in a
    file. Long output is cut in the middle and saved whole. Prefer read, grep, glob and edit to cat,
    grep, find and sed.

    command: the command line
    timeout: seconds, default 120, at most 600
    """
    return (yield from run_command(ctx, command, timeout))


def run_command(
    ctx: ToolContext,
    command: str,
    timeout: int = DEFAULT_TIMEOUT,
    permission: str = "bash",
) -> Generator[Any, None, ToolResult]:
    """Run a command as the tool does, with another `permission`."""
    if "\0" in command or not command.strip():
        raise ToolError("the command is empty or holds a NUL")
    yield from ctx.ask(permission, command)
    seconds = min(max(1, timeout), MAX_TIMEOUT)
    argv = [shell(), "--noprofile", "--norc", "-c", command]
    work = output_of(argv, ctx.cwd, ctx.abort, seconds, confine=ctx.confine)
    output = Output()
    updated = time.monotonic()
    fresh = ""  # output since then
    with contextlib.closing(output), Returning(work) as pieces:
        for data in pieces:
            fresh = (fresh + output.add(data))[-MAX_UPDATE:]
            if fresh and time.monotonic() - updated > SHOW_EVERY:
                yield fresh
                updated = time.monotonic()
                fresh = ""
    code, cause = pieces.value
    shown = output.text() if output.bytes else _say_no_output(command, code)
    how = _say_code(code)
    if cause:
        how = _say_cause(cause, seconds, ctx.abort.reason)
    parts = (shown, _hint(code, shown), how)
    text = "\n".join(part for part in parts if part)
    details = {"exit_code": code, "cause": cause, "saved": output.saved}
    return ToolResult(text, is_error=code != 0, details=details)


def _say_no_output(command: str, code: int) -> str:
    """Why there is no output, for a model that expected one."""
    if code:
        return ""
    if command.strip() in INTERACTIVE:
        return "(no output; commands get no input)"
    if re.fullmatch(FOR_ONE_SHELL, command.strip()):
        return "(no output; the next call is a new shell: write it and what follows in one call, with &&)"
    return "(no output)"


def _hint(code: int, shown: str) -> str:
    """Tell if a tool was called as a program."""
    called = re.search(TOOL_AS_PROGRAM, shown)
    if code and called:
        return f"[{called[1]} is a tool, not a program]"
    return ""


def _say_cause(cause: str, seconds: int, reason: str) -> str:
    """Why a command was ended, in brackets. `reason`: of an abort."""
    if cause == "timeout":
        slow = "do it in parts"
        if seconds < MAX_TIMEOUT:
            slow = f"timeout up to {MAX_TIMEOUT}"
        return STOPPED.format(seconds=seconds, slow=slow)
    if reason == "max_time":
        return "[the time limit of the run was reached]"
    return "[aborted by the user]"


def _say_code(code: int) -> str:
    """How a command ended by itself, in brackets; "" if it went well."""
    if code > 0:
        return f"[exit code {code}]"
    if code == 0:
        return ""
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "real-time"
    return f"[killed by signal {-code} ({name})]"


@cache
def shell() -> str:
    """The system's bash, before anything that a folder on PATH may offer."""
    path = shutil.which("bash", path=SYSTEM) or shutil.which("bash")
    if not path:
        raise ToolError("there is no bash on this machine")
    return path


def find_program(name: str, workspace: str | Path) -> str:
    """The path of a program that is not in the workspace; "" if there is none.

    Neither the program nor the folder, with links followed, may be in the workspace.
    """
    for folder in clean_path(os.environ.get("PATH", "")).split(os.pathsep):
        program = shutil.which(name, path=folder)
        if program:
            ends = [Path(os.path.realpath(path)) for path in (folder, program)]
            if not any(end.is_relative_to(workspace) for end in ends):
                return program
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
    """Run a program, yield its output as it comes, b"" while none comes, and return how it ended.

    That is (the code, as subprocess has it; "", or why it was ended: "timeout", "aborted").
    `confine`: a sandbox for the child. `variables`: more for its environment. Raises ToolError if
    it cannot be started. Afterwards only background children may be left, and none if it was ended.
    """
    mark = processes.new_mark()
    env = environment()
    if confine:
        env |= confine.environment
    env |= variables or {}
    env[processes.MARK] = mark
    process = _start(argv, cwd, confine, stdin=stdin, stderr=stderr, env=env)
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


def _start(argv: list[str], cwd: Path, confine: Any, **more: Any) -> subprocess.Popen[bytes]:
    """The child, in a session of its own. Raises ToolError if it cannot be started."""
    processes.main_guard()
    start: Any = partial(
        subprocess.Popen,
        argv,
        cwd=cwd,
        stdout=subprocess.PIPE,
        start_new_session=True,
        **more,
    )
    if confine:
        start = partial(confine.start, start)
    try:
        child: subprocess.Popen[bytes] = start()
    except (OSError, ValueError) as error:
        gone = "" if cwd.is_dir() else f" (the folder {cwd} is gone)"
        raise ToolError(f"the command could not be started: {error}{gone}") from None
    return child


def read_output(
    process: subprocess.Popen[bytes], abort: Abort, deadline: float
) -> Generator[bytes, None, str]:
    """Yield output, b"" while none comes, until the process has ended.

    Returns why it has to be ended: "timeout" or "aborted"; "" if it has ended by itself.
    """
    pipe = Pipe(process)
    while process.poll() is None:
        is_aborted = abort.is_set()  # before the pipe is read: all written until then is in there
        yield pipe.read(0 if is_aborted else TICK)
        if not pipe.is_open:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(TICK)
        if is_aborted:
            return "aborted"
        if time.monotonic() > deadline:
            return "timeout"
    drained_at = time.monotonic() + DRAIN
    while time.monotonic() <= drained_at:
        data = pipe.read(0)
        if not data:
            break
        yield data
    return ""


class Pipe:
    """The output of a process, which may close it and go on."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout
        self.is_open = True
        self._fd = process.stdout.fileno()
        self._poll = select.poll()  # select() takes no number above 1023
        self._poll.register(self._fd, select.POLLIN)

    def read(self, seconds: float) -> bytes:
        """What comes within this time, or b""."""
        if not self.is_open or not self._poll.poll(seconds * 1000):
            return b""
        data = os.read(self._fd, 1 << 16)
        self.is_open = bool(data)
        return data
