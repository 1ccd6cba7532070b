"""Private: what this process keeps from the user's other processes, which are also those that a model starts.

A command can look into its parent: /proc/PID/environ and /proc/PID/mem belong to the same user. So the values of secrets are
wiped from where the system shows our environment, and the process is marked as one that others may not look into, which also
means no core dumps. Only for the command line, never for the library.

Not hidden: from root, and where another process has the key in its environment, such as the shell that started the program.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from coder.tools.environment import is_secret

PR_SET_DUMPABLE = 4
KEY = "OPENAI_API_KEY"


def close_process() -> None:
    """Let no other process see our secrets, as far as this system can. `os.environ` stays as it is."""
    import ctypes  # late: 4 ms
    import resource

    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if not sys.platform.startswith("linux"):
        return
    library = ctypes.CDLL(None)
    library.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    shown = ctypes.POINTER(ctypes.c_void_p).in_dll(library, "environ")
    places: list[int] = []
    while address := shown[len(places)]:
        places.append(address)
    for address in places:
        name, _, value = ctypes.string_at(address).partition(b"=")
        if value and is_secret(os.fsdecode(name), os.fsdecode(value)):
            os.putenv(name, value)  # a copy elsewhere, for whoever asks for it
            ctypes.memset(address + len(name) + 1, 0, len(value))


def own_folder(folder: Path) -> None:
    """Make a folder for the user alone, and those above that are missing (mkdir's mode is for the last only); one of the user's that
    others can look into is closed to them. Raises OSError."""
    for each in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        each.mkdir(mode=0o700, exist_ok=True)
    facts = folder.stat()
    if facts.st_uid == os.geteuid() and facts.st_mode & 0o077:
        folder.chmod(0o700)


def forget_key() -> None:
    """Take the key out of `os.environ`, when the settings have been read: nothing that we import finds it there."""
    os.environ.pop(KEY, None)
