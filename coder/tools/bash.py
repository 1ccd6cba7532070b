"""bash: run a command, show its output while it comes, keep what the model needs of it.

Memory stays bounded at gigabytes of output: the head and the tail are kept, the whole goes to a private file that the
result names. No state carries over from one command to the next.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import Generator
from functools import cache
from io import FileIO
from typing import Any

from coder.tools.process import Ending, output_of, private_folder
from coder.toolset import ToolContext, tool
from coder.types import ToolError, ToolResult

DEFAULT_TIMEOUT = 120  # seconds
MAX_TIMEOUT = 600
KEEP = 14_000  # characters kept of the head and of the tail each: together under the 30,000 that the loop passes on
MAX_SAVED = 1 << 30  # bytes of output that are saved: an endless command must not fill the disk
SHOW_EVERY = 0.1  # seconds between two updates


@tool
def bash(
    ctx: ToolContext, command: str, timeout: int = DEFAULT_TIMEOUT
) -> Generator[Any, None, ToolResult]:
    """Run a command in bash, in the workspace. Each call is a new shell without input or terminal: `cd` and variables do
    not last. Put a server in the background with & and its output in a file. Prefer read, grep, glob and edit to cat,
    grep, find and sed.

    command: the command line
    timeout: seconds until it is stopped, default 120, at most 600
    """
    return (yield from run_command(ctx, command, timeout))


def run_command(
    ctx: ToolContext, command: str, timeout: int = DEFAULT_TIMEOUT, permission: str = "bash"
) -> Generator[Any, None, ToolResult]:
    """The tool's work, with leave asked under another name where somebody offers commands of another kind."""
    if "\0" in command or not command.strip():
        raise ToolError("the command is empty or holds a NUL")
    yield from ctx.ask(permission, command)
    seconds = min(max(1, timeout), MAX_TIMEOUT)
    output = Output()
    work = output_of(
        [shell(), "--noprofile", "--norc", "-c", command],
        ctx.cwd,
        ctx.abort,
        seconds,
        confine=ctx.confine,
    )
    try:
        ending = yield from _shown(ctx, work, output)
        return ToolResult(
            output.text() + _note(ending, seconds, ctx.abort.reason, output),
            is_error=ending.code != 0,
            details={"exit_code": ending.code, "cause": ending.cause, "saved": output.saved},
        )
    finally:
        work.close()
        output.close()


def _shown(
    ctx: ToolContext, work: Generator[bytes, None, Ending], output: Output
) -> Generator[Any, None, Ending]:
    """Read to the end, with an update now and then."""
    shown = time.monotonic()
    fresh = ""
    while True:
        try:
            data = next(work)
        except StopIteration as end:
            ending: Ending = end.value
            return ending
        fresh = (fresh + output.add(data))[-2000:]
        if fresh and time.monotonic() - shown > SHOW_EVERY:
            yield ctx.update(fresh)
            shown, fresh = time.monotonic(), ""


def _note(ending: Ending, seconds: int, reason: str, output: Output) -> str:
    """What a model has to know beside the output: how it ended, and where the rest is."""
    lines = []
    if ending.cause == "timeout":
        lines.append(
            f"[timed out after {seconds} s and was stopped; timeout can be up to {MAX_TIMEOUT}]"
        )
    elif ending.cause:
        lines.append(
            "[the time limit of the run was reached]"
            if reason == "max_time"
            else "[aborted by the user]"
        )
    elif ending.code < 0:
        lines.append(f"[killed by signal {-ending.code} ({_signal_name(-ending.code)})]")
    elif ending.code:
        name = _signal_name(ending.code - 128) if ending.code > 128 else ""
        lines.append(f"[exit code {ending.code}{f': {name}' if name else ''}]")
    if output.saved:
        part = f"the first {MAX_SAVED:,} bytes" if output.bytes > MAX_SAVED else "the whole output"
        lines.append(f"[{part} of {output.bytes:,} bytes: {output.saved}]")
    if not lines:
        return "" if output.bytes else "(no output)"
    return ("\n" if output.bytes else "") + "\n".join(lines)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


class Output:
    """Head and tail of a stream of bytes as text, and a file of the whole from the point where they do not suffice."""

    def __init__(self) -> None:
        self.bytes = 0
        self.characters = 0
        self.saved = ""
        self._head: list[str] = []
        self._raw: list[bytes] = []  # what the head was made of, until it is saved
        self._room = 2 * KEEP  # what fits whole
        self._tail: deque[str] = deque()
        self._tail_size = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._file: FileIO | None = None

    def add(self, data: bytes) -> str:
        """Take bytes in; returns their text."""
        text = self._decoder.decode(data)
        self.bytes += len(data)
        self.characters += len(text)
        head = text[: self._room]
        self._head.append(head) if head else None
        self._room -= len(head)
        if not self._tail:
            self._raw.append(data)
        if rest := text[len(head) :]:
            self._spill(data)
            self._tail.append(rest)
            self._tail_size += len(rest)
            while self._tail_size - len(self._tail[0]) > KEEP:
                self._tail_size -= len(self._tail.popleft())
        return text

    def _spill(self, data: bytes) -> None:
        """Save what has come so far, and what comes; a file that cannot be whole, on a full disk, goes again."""
        try:
            if self._raw:
                data, self._raw = b"".join(self._raw), []
                fd, self.saved = tempfile.mkstemp(
                    dir=private_folder(), prefix="output-", suffix=".txt"
                )
                self._file = os.fdopen(fd, "wb", buffering=0)
            data = data[: max(0, MAX_SAVED - self._file.tell())] if self._file else b""
            if data and self._file and self._file.write(data) != len(data):
                raise OSError("the disk is full")
        except OSError:
            self.close()
            with contextlib.suppress(OSError):
                os.unlink(self.saved)
            self.saved = ""

    def text(self) -> str:
        """The whole, or head and tail with a marker that says what is missing."""
        head, tail = "".join(self._head), "".join(self._tail)
        if not tail:
            return head.rstrip("\n")
        head, tail = head[:KEEP], (head[KEEP:] + tail)[-KEEP:]
        missing = self.characters - len(head) - len(tail)
        return f"{head}\n\n... [truncated {missing} characters] ...\n\n{tail}".rstrip("\n")

    def close(self) -> None:
        if self._file:
            self._file.close()
            self._file = None


@cache
def shell() -> str:
    """The system's bash, before anything that a folder on PATH may offer."""
    found = next(
        (
            path
            for path in ("/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash")
            if os.access(path, os.X_OK)
        ),
        None,
    )
    found = found or shutil.which("bash")
    if not found:
        raise ToolError("there is no bash on this machine")
    return found
