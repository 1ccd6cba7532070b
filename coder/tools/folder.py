"""Open a folder and work relative to its descriptor, so that a swapped link redirects nothing.

A path that was checked may lead elsewhere a moment later, when one of its folders has become a
link: while permission is asked, or because a process in the background makes it so. So the folder
is opened once, what was opened is compared with its path, and all else is named relative to it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from coder.types import ToolError

# To name things in it a folder need not be readable; O_PATH is Linux's.
FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
# Opening never waits, as it would for a FIFO.
FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY


@contextlib.contextmanager
def folder_of(place: Path, make: bool = False) -> Iterator[int]:
    """A descriptor of the folder that a path without links is in; `make` makes missing folders.

    Raises OSError, and ToolError where the folder is not at its path, or behind a link.
    """
    there = next((each for each in place.parents if not make or os.path.lexists(each)), place)
    fd = os.open(there, FOLDER)
    try:
        if not _is_at(fd, there):
            reason = "its folder is not where it was, or a link has taken its place"
            raise ToolError(f"{place} is left as it is: {reason}")
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
        same = os.path.samestat(os.fstat(fd), os.lstat(folder))
        return same and os.path.realpath(folder) == str(folder)


def open_in(folder: Path, name: str) -> int:
    """A descriptor to read a file, or with the name "." the folder. Raises OSError, ToolError."""
    with folder_of(folder / (name if name != "." else "any")) as fd:
        return os.open(name, FILE, dir_fd=fd)


def file_info(folder: int, name: str) -> os.stat_result | None:
    """Of a regular file; None where there is none."""
    with contextlib.suppress(FileNotFoundError):
        info = os.stat(name, dir_fd=folder, follow_symlinks=False)
        return info if stat.S_ISREG(info.st_mode) else None
    return None


def replace_in(folder: int, name: str, data: bytes, like: os.stat_result | None) -> None:
    """Put `data` in the place of a file at once and durably, with owner and mode of `like`."""
    temporary = temporary_name()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, 0o666, dir_fd=folder), "wb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            if like:
                with contextlib.suppress(OSError):  # first: this clears the mode's special bits
                    os.fchown(file.fileno(), like.st_uid, like.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(like.st_mode))
            os.fsync(file.fileno())
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def temporary_name() -> str:
    """For a file that is to take another one's place in its folder."""
    return f".coder-{os.getpid()}-{os.urandom(4).hex()}.tmp"


def rename(place: Path, name: str) -> None:
    """Give a file, or a link itself, another name in its folder. Raises ToolError, OSError."""
    with folder_of(place) as folder:
        os.rename(place.name, name, src_dir_fd=folder, dst_dir_fd=folder)


def remove(place: Path) -> None:
    """Remove a file, or a link itself. Raises ToolError, OSError."""
    with folder_of(place) as folder:
        os.unlink(place.name, dir_fd=folder)


def remove_folder(place: Path) -> None:
    """Remove an empty folder. Raises ToolError, OSError."""
    with folder_of(place) as folder:
        os.rmdir(place.name, dir_fd=folder)
