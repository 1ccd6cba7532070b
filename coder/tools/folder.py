"""The folder that a file is in, held open: what is done relative to it happens there, whatever becomes of the path meanwhile.

A path that was looked at may lead elsewhere a moment later, when one of its folders has become a link: while a person was asked, or
because a process in the background makes it so. So the folder is opened once, it is checked that what was opened is at this path and
behind no link, and all else is named relative to it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from coder.types import ToolError

# To name things in it a folder need not be readable; O_PATH is Linux's.
FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC


@contextlib.contextmanager
def folder_of(place: Path, make: bool = False) -> Iterator[int]:
    """A descriptor of the folder that a real path (links followed) is in; with `make`, folders that are missing are made.

    Raises ToolError where the folder is not at its path, or behind a link, and OSError.
    """
    there = next((each for each in place.parents if not make or os.path.lexists(each)), place)
    fd = os.open(there, FOLDER)
    try:
        if not _is_at(fd, there):
            raise ToolError(
                f"{place} is left as it is: its folder is not where it was, or a link has taken its place"
            )
        for part in place.parent.relative_to(there).parts:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, dir_fd=fd)
            fd, above = os.open(part, FOLDER | os.O_NOFOLLOW, dir_fd=fd), fd
            os.close(above)
        yield fd
    finally:
        os.close(fd)


def _is_at(fd: int, folder: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}") == str(folder)
    except OSError:  # no Linux, or no /proc
        return os.path.realpath(folder) == str(folder) and os.path.samestat(
            os.fstat(fd), os.lstat(folder)
        )


def temporary_name() -> str:
    """For a file that is to take another one's place in its folder."""
    return f".coder-{os.getpid()}-{os.urandom(4).hex()}.tmp"


def rename(place: Path, name: str) -> None:
    """Give what is at a real path, a link itself too, another name in its folder. Raises ToolError, OSError."""
    with folder_of(place) as folder:
        os.rename(place.name, name, src_dir_fd=folder, dst_dir_fd=folder)


def remove(place: Path) -> None:
    """Remove the file or link at a real path. Raises ToolError, OSError."""
    with folder_of(place) as folder:
        os.unlink(place.name, dir_fd=folder)


def remove_folder(place: Path) -> None:
    """Remove the empty folder at a real path. Raises ToolError, OSError."""
    with folder_of(place) as folder:
        os.rmdir(place.name, dir_fd=folder)
