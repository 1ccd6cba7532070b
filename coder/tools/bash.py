"""bash, and all other child processes: apart from the terminal, read with bounded memory, never left behind.

A child gets a session of its own, without a terminal. It is over when the process is over, not when the pipe is: a
background child may live on. A time-out, an abort and the end of the program kill all that is left (processes.py).
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
    "[stopped after {seconds} s, with all it had started. If it waits for input or never ends (server, watcher, editor): "
    "pass its flags (-y), or put it in the background: CMD > log 2>&1 &. Only if it is slow: {slow}.]"
)
INTERACTIVE = {"python", "python3", "node", "cat", "bash", "sh", "irb", "psql", "sqlite3", "mysql"}
FOR_ONE_SHELL = re.compile(r"(?:cd|export|source|\.|alias|set|pushd)\s[^;&|\n]*")
# bash has a `read` of its own
TOOL_AS_PROGRAM = re.compile(
    r"line \d+: (apply_patch|edit|write|glob|todo|task|ask_user|read): "
    r"(?:command not found|`.*': not a valid identifier)"
)
SHELLS = ("/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash")


@tool(permission="bash", default="ask", asks_itself=True, slips=slips.BASH)
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
    ctx: ToolContext, command: str, timeout: int = DEFAULT_TIMEOUT, permission: str = "bash"
) -> Generator[Any, None, ToolResult]:
    """The tool's work; `permission` is the name of the one that is asked for."""
    if "\0" in command or not command.strip():
        raise ToolError("the command is empty or holds a NUL")
    yield from ctx.ask(permission, command)
    seconds = min(max(1, timeout), MAX_TIMEOUT)
    argv = [shell(), "--noprofile", "--norc", "-c", command]
    work = output_of(argv, ctx.cwd, ctx.abort, seconds, confine=ctx.confine)
    output = Output()
    updated = time.monotonic()
    fresh = ""  # since then
    with contextlib.closing(output), Returning(work) as pieces:
        for data in pieces:
            fresh = (fresh + output.add(data))[-MAX_UPDATE:]
            if fresh and time.monotonic() - updated > SHOW_EVERY:
                yield fresh
                updated = time.monotonic()
                fresh = ""
    code, cause = pieces.value
    shown = output.text()
    if not output.bytes:
        shown = _say_no_output(command, code)
    notes = [_hint(code, shown), _how_it_ended(code, cause, seconds, ctx.abort.reason)]
    text = "\n".join(part for part in (shown, *notes) if part)
    details = {"exit_code": code, "cause": cause, "saved": output.saved}
    return ToolResult(text, is_error=code != 0, details=details)


def _say_no_output(command: str, code: int) -> str:
    """What an output that is empty means to a model that expected one."""
    if code:
        return ""
    if command.strip() in INTERACTIVE:
        return "(no output; commands get no input)"
    if FOR_ONE_SHELL.fullmatch(command.strip()):
        return "(no output; the next call is a new shell: write it and what follows in one call, with &&)"
    return "(no output)"


def _hint(code: int, shown: str) -> str:
    """That a tool was called as a program."""
    found = TOOL_AS_PROGRAM.search(shown)
    if code and found:
        return f"[{found[1]} is a tool, not a program]"
    return ""


def _how_it_ended(code: int, cause: str, seconds: int, reason: str) -> str:
    """Why and how, in brackets; "" if the command went well. `reason`: of an abort."""
    if cause == "timeout":
        slow = "do it in parts"
        if seconds < MAX_TIMEOUT:
            slow = f"timeout up to {MAX_TIMEOUT}"
        return STOPPED.format(seconds=seconds, slow=slow)
    if cause and reason == "max_time":
        return "[the time limit of the run was reached]"
    if cause:
        return "[aborted by the user]"
    if code < 0:
        name = next((each.name for each in signal.Signals if each == -code), "real-time")
        return f"[killed by signal {-code} ({name})]"
    return f"[exit code {code}]" if code else ""


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
    pipe = process.stdout.fileno()
    is_open = True
    ended = 0.0  # when the process was first seen to be over
    watched = select.poll()  # select() takes no number above 1023
    watched.register(pipe, select.POLLIN)
    while True:
        # Both before the pipe is read: all that was written until then is in there
        over = process.poll() is not None
        stop = abort.is_set
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
