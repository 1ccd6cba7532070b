"""Whether a request comes from a command of a session, which must not answer its own questions.

A command may find the token: in the profile of the browser, or in the arguments of a curl. On Linux
a request is refused if its end of the connection belongs to a descendant of this process. A program
that a command has left outside of this process tree is not found.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

CONNECTED = "01"  # the state in /proc/net/tcp (proc(5))


def is_own(client: tuple[str, int] | None) -> bool:
    """Does a child of this process, or one of its children, have this end of a connection?"""
    processes = descendants(os.getpid())
    if not client or not processes:
        return False
    inode = inode_of(client[1])
    return bool(inode) and any(has_socket(process, inode) for process in processes)


def descendants(process: int) -> list[int]:
    """The children of a process, and theirs."""
    found: list[int] = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            for child in task.read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def inode_of(port: int) -> str:
    """The inode of the connected socket with this local port; "" if there is none."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                words = line.split()
                if words[1].endswith(f":{port:04X}") and words[3] == CONNECTED:
                    return words[9]
    return ""


def has_socket(process: int, inode: str) -> bool:
    with suppress(OSError):
        for link in os.scandir(f"/proc/{process}/fd"):
            with suppress(OSError):
                if os.readlink(link) == f"socket:[{inode}]":
                    return True
    return False
