"""What undo knows of a file: its permissions, the id of its content, and by what a change shows."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

MAX_FILE = 2_000_000  # bytes of a file that is kept
# Files get the time of a clock which the kernel keeps some milliseconds behind the usual one
FILE_CLOCK = 5 if sys.platform == "linux" else time.CLOCK_REALTIME  # CLOCK_REALTIME_COARSE
# Of statx: relative to the folder of the process, no link followed; the time of birth is asked for
STATX_FOLDER = -100
STATX_NOFOLLOW = 0x100
STATX_BIRTH = 0x800
STATX_SIZE = 256  # bytes of an answer
STATX_TIME = struct.Struct("qI")  # seconds, nanoseconds
STATX_BORN_AT = 80  # where this time is in the answer
INODE_BITS = 0xFFFFFFFF
TO_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # no pipe holds it up
SPECIAL_BITS = 0o7000  # which give a program its owner's rights: they are not restored


@dataclass(frozen=True)
class Entry:
    """A file: type and permissions, blob id ("": not kept), and its inode if it has several names,
    else 0."""

    mode: int
    blob: str
    link: int = field(default=0, compare=False)


Pair = tuple[Entry | None, Entry | None]  # before, after; None: no file


def is_linked_otherwise(before: Entry | None, after: Entry | None) -> bool:
    """Is a file a name of another inode, or has it other names than before?"""
    return before is not None and after is not None and before.link != after.link


class State(NamedTuple):
    """A file when it was looked at; what has the same stamp is the same.

    Of its inode there are those bits that git knows, too.
    """

    mode: int
    blob: str
    stamp: int
    link: int = 0
    inode: int = 0

    @property
    def entry(self) -> Entry:
        return Entry(self.mode, self.blob, self.link)


def state_from(info: os.stat_result, blob: str) -> State:
    """The state of a file with these facts and this content."""
    mode = info.st_mode & ~SPECIAL_BITS
    return State(mode, blob, stamp_of(info), link_of(info), info.st_ino & INODE_BITS)


def link_of(info: os.stat_result) -> int:
    """The inode of a file that has several names, else 0."""
    return info.st_ino if info.st_nlink > 1 and stat.S_ISREG(info.st_mode) else 0


def stamp_of(info: os.stat_result) -> int:
    """A number that is another one after a change."""
    times = (info.st_ctime_ns, info.st_mtime_ns)
    return hash((info.st_mode, info.st_size, *times, info.st_ino))


def file_clock() -> int:
    """The time that a file gets which is made now, in nanoseconds."""
    return time.clock_gettime_ns(FILE_CLOCK)


def born_at(path: str) -> int:
    """When the file at a path was made, in nanoseconds. Neither a move nor `touch` changes it.

    If its file system does not keep that, when it was last written. Raises OSError.
    """
    info = os.lstat(path)
    if sys.platform == "darwin":
        seconds_of_birth: float = info.st_birthtime
        return int(seconds_of_birth * 1e9)
    import ctypes  # late: what lists conversations does not need it

    statx = _statx()
    answer = ctypes.create_string_buffer(STATX_SIZE)
    if statx:
        statx(STATX_FOLDER, os.fsencode(path), STATX_NOFOLLOW, STATX_BIRTH, answer)
    [known] = struct.unpack_from("I", answer)
    if not known & STATX_BIRTH:
        return info.st_mtime_ns
    seconds: int
    seconds, nanoseconds = STATX_TIME.unpack_from(answer, STATX_BORN_AT)
    return seconds * 1_000_000_000 + int(nanoseconds)


@cache  # a step may make thousands of files
def _statx() -> Any:
    """The function of the C library; None if it has none."""
    import ctypes

    return getattr(ctypes.CDLL(None), "statx", None)


def info_at(root: str, path: str) -> os.stat_result | None:
    """Facts of the file at a path that leads through no link; None if there is none."""
    whole = os.path.join(root, path).rstrip("/")
    folder = os.path.dirname(whole)
    if os.path.realpath(folder) != folder:
        return None
    try:
        return os.lstat(whole)
    except OSError:
        return None


@contextlib.contextmanager
def opened(root: str, folder: str) -> Iterator[int]:
    """The descriptor of a folder. Raises OSError, also if its path leads through a link."""
    whole = os.path.join(root, folder).rstrip("/")
    fd = os.open(whole, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if sys.platform == "linux" and os.readlink(f"/proc/self/fd/{fd}") != whole:
            raise OSError("it is reached through a link")
        yield fd
    finally:
        os.close(fd)


def info_in(folder: int, name: str) -> os.stat_result:
    """Facts of a file in an opened folder. Raises OSError."""
    return os.stat(name, dir_fd=folder, follow_symlinks=False)


def content_in(folder: int, name: str, most: int) -> tuple[bytes, os.stat_result]:
    """The content of a file or link in an opened folder, and its facts.

    Raises OSError, also for what is not kept, or has more than `most` bytes.
    """
    try:
        fd = os.open(name, TO_READ, dir_fd=folder)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        info = info_in(folder, name)
        return os.fsencode(os.readlink(name, dir_fd=folder)), info
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size > most:
            raise OSError("it is no file that is kept")
        return os.read(fd, info.st_size), info
    finally:
        os.close(fd)


def is_within(path: str, places: Collection[str]) -> bool:
    """Is a path, or a folder that it is in, one of these?"""
    while path not in places:
        if not path:
            return False
        path = path.rpartition("/")[0]
    return True
