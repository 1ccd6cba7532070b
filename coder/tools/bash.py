"""bash: run a command, show its output while it comes, keep what the model needs of it.

Memory stays bounded at gigabytes of output: the head and the tail are kept, the whole goes to a
private file that the result names. No state carries over from one command to the next.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Generator
from functools import cache
from typing import IO, Any

from coder.events import Returning
from coder.tools.process import Ending, output_of, private_folder
from coder.toolset import ToolContext, tool
from coder.types import ToolError, ToolResult

DEFAULT_TIMEOUT = 120  # seconds
MAX_TIMEOUT = 600
KEEP = 14_000  # characters of head and tail each: under the 30,000 that the loop passes on
MAX_SAVED = 1 << 30  # bytes of output: an endless command must not fill the disk
SHOW_EVERY = 0.1  # seconds between two updates
SHELLS = ("/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash")


@tool
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
                yield ctx.update(fresh)
                updated, fresh = time.monotonic(), ""
    ending = pieces.value
    notes = [_how_it_ended(ending, seconds, ctx.abort.reason), output.note()]
    text = "\n".join(filter(None, [output.text(), *notes]))
    return ToolResult(
        text or ("" if output.bytes else "(no output)"),
        is_error=ending.code != 0,
        details={"exit_code": ending.code, "cause": ending.cause, "saved": output.saved},
    )


def _how_it_ended(ending: Ending, seconds: int, reason: str) -> str:
    if ending.cause == "timeout":
        return f"[timed out after {seconds} s and was stopped; timeout can be up to {MAX_TIMEOUT}]"
    if ending.cause:
        limit = reason == "max_time"
        return f"[{'the time limit of the run was reached' if limit else 'aborted by the user'}]"
    if ending.code < 0:
        name = next((each.name for each in signal.Signals if each == -ending.code), "real-time")
        return f"[killed by signal {-ending.code} ({name})]"
    return f"[exit code {ending.code}]" if ending.code else ""


class Output:
    """Head and tail of a stream as text; the whole in a file as soon as it is more than both."""

    def __init__(self) -> None:
        self.bytes = 0
        self.saved = ""  # the path of the file
        self._written = self._characters = 0
        self._head = self._tail = ""
        self._unsaved = bytearray()
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
            self._unsaved += data
            if self._tail:
                self._save()
        return text

    def _save(self) -> None:
        """Write what has come, until MAX_SAVED or the disk is full."""
        try:
            if not self._file:
                folder = private_folder()
                fd, self.saved = tempfile.mkstemp(dir=folder, prefix="output-", suffix=".txt")
                self._file = os.fdopen(fd, "wb", buffering=0)
            size = self._file.write(self._unsaved[: MAX_SAVED - self._written])
            self._written += size
            self._is_saving = size == len(self._unsaved)
        except OSError:
            self._is_saving = False
        self._unsaved.clear()

    def text(self) -> str:
        """The whole, or head and tail with a marker that says what is missing."""
        head, tail = self._head[:KEEP], (self._head[KEEP:] + self._tail)[-KEEP:]
        missing = self._characters - len(head) - len(tail)
        middle = f"\n\n... [truncated {missing} characters] ...\n\n" if missing else ""
        return f"{head}{middle}{tail}".rstrip("\n")

    def note(self) -> str:
        """Where the whole is, if it is in a file."""
        is_whole = self._written == self.bytes
        part = "the whole output" if is_whole else f"the first {self._written:,} bytes"
        return f"[{part} of {self.bytes:,} bytes: {self.saved}]" if self.saved else ""

    def close(self) -> None:
        self.add(b"", is_last=True)
        if self._file:
            self._file.close()
            self._file = None


@cache
def shell() -> str:
    """The system's bash, before anything that a folder on PATH may offer."""
    found = next((path for path in SHELLS if os.access(path, os.X_OK)), shutil.which("bash"))
    if not found:
        raise ToolError("there is no bash on this machine")
    return found
