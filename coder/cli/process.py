"""What is set up for the whole process: safe standard streams, no look into it for other processes, late imports.

A command can look into its parent: /proc/PID/environ and /proc/PID/mem belong to the same user. So the process is
marked as one that others may not look into, which also means no core dumps. Only for the command line, never for
the library. Not hidden: from root, and where another process has the key in its environment, such as the shell that
started the program.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import os
import select
import stat
import sys
import time
from pathlib import Path
from typing import Any

from coder.cli.settings import ConfigError

USAGE, LIMIT, TRANSIENT, INTERRUPTED = 2, 3, 75, 130  # exit codes
PR_SET_DUMPABLE = 4
MAX_INPUT = 400_000  # bytes of stdin: about 100,000 tokens, and `yes |` never ends
PATIENCE = 3.0  # seconds
WAITING = "coder: waiting for the end of standard input (Ctrl+D, or start with </dev/null)\n"


def hide_process() -> None:
    """Let no other process read our memory and environment, as far as this system can."""
    import ctypes  # late: 4 ms
    import resource

    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def private_dir(folder: Path) -> None:
    """Make a folder for the user alone, and close one of the user's that others can read. Raises OSError."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):  # mkdir's mode is for the last folder only
        each.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if status.st_uid == os.geteuid() and status.st_mode & 0o077:
        folder.chmod(0o700)


def mend_streams() -> None:
    """Replace a closed standard stream by the null device, so that no socket takes its number; write ? where a C
    locale has no é."""
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
        elif name != "stdin" and stream is getattr(sys, f"__{name}__"):
            raw = io.BufferedWriter(Output(stream.fileno(), needed=name == "stdout"))
            tty = name == "stderr" or stream.isatty()
            text = io.TextIOWrapper(raw, stream.encoding, "replace", line_buffering=tty)
            setattr(sys, name, text)


class Output(io.FileIO):
    """What lies under stdout and stderr. Progress that cannot be written is dropped; for the answer (`needed`) a
    line says why, and BrokenPipeError is raised, as where its reader has left."""

    def __init__(self, number: int, needed: bool) -> None:
        super().__init__(number, "w", closefd=False)
        self.needed, self.failed = needed, False

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            # Of a terminal that is gone: the signal that says so is on its way
            if not self.needed or error.errno == errno.EIO:
                return len(data)
            if error.errno != errno.EPIPE and not self.failed:
                sys.stderr.write(f"coder: the output cannot be written: {error.strerror}\n")
            self.failed = True
            raise BrokenPipeError from None


def has_input() -> bool:
    """Whether stdin is a pipe, a file or a socket. The null device and a closed stdin hold nothing."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def read_stdin() -> str:
    """All of stdin, up to MAX_INPUT bytes. A note says what is waited for, since a pipe left open looks like a hang."""
    data, note_at = b"", time.monotonic() + PATIENCE
    while len(data) <= MAX_INPUT:
        left = max(0.0, note_at - time.monotonic()) if note_at else None
        if not select.select([sys.stdin], [], [], left)[0]:
            sys.stderr.write(WAITING)
            note_at = 0.0
        elif piece := os.read(sys.stdin.fileno(), MAX_INPUT + 1 - len(data)):
            data += piece
        else:
            break
    text = data[:MAX_INPUT].decode("utf-8", "replace")
    if len(data) <= MAX_INPUT:
        return text
    sys.stderr.write(f"coder: only the first {MAX_INPUT:,} bytes of stdin are taken\n")
    return f"{text}\n... [cut after {MAX_INPUT} bytes]"


# ---- imports of modules that may be deleted ----------------------------------------------------


def optional(name: str) -> Any:
    """Import a module; None where it, or a module of ours that it imports, was deleted."""
    try:
        __import__(name)  # which -X importtime shows, unlike import_module
        return sys.modules[name]
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "coder":
            raise
        return None


def collect_garbage() -> None:
    """From now on, and never what was imported so far (`__main__.py` has switched the collector off)."""
    gc.freeze()
    gc.enable()


def needed(name: str, purpose: str) -> Any:
    """Import the module that `purpose`, which the user asked for, needs. Raises ConfigError."""
    if (module := optional(name)) is None:
        raise ConfigError(f"{purpose} is not available: {name} or a part of it was deleted")
    return module
