"""What this process keeps from the user's other processes, which are also those that a model starts.

A command can look into its parent: /proc/PID/environ and /proc/PID/mem belong to the same user. So the process is
marked as one that others may not look into, which also means no core dumps. Only for the command line, never for
the library.

Not hidden: from root, and where another process has the key in its environment, such as the shell that started the
program.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

PR_SET_DUMPABLE = 4
KEY = "OPENAI_API_KEY"


def hide_process() -> None:
    """Let no other process read our memory and environment, as far as this system can."""
    import ctypes  # late: 4 ms
    import resource

    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def drop_api_key() -> None:
    """Take the key out of `os.environ`, when the settings have been read: no import finds it there."""
    os.environ.pop(KEY, None)


def private_dir(folder: Path) -> None:
    """Make a folder for the user alone, and those above that are missing; one of the user's that others can read is
    closed to them. Raises OSError."""
    # mkdir's mode is for the last folder only
    for each in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        each.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if status.st_uid == os.geteuid() and status.st_mode & 0o077:
        folder.chmod(0o700)
