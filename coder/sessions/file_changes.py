"""Which files of a workspace have changed since the last look, and what they were.

    files = WorkspaceFiles(repo)
    files.start()                # before a run: all files, read where their stamps are new
    files.look()                 # what has changed since
    files.look(["a.py"])         # the same of these paths only

On Linux the kernel reports changed paths (inotify), so that a look at nothing costs nothing; else
each look goes through the folder. Not seen: what reaches a file through a hard link from outside
the workspace, or through memory that stays mapped, until the next `start`. Left out: ignored files,
.git, repositories inside of the workspace, sockets and devices, and what is too large or too much.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import stat
import struct
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from coder.sessions.snapshot_repo import MAX_STORED, MAX_WAITING, SnapshotRepo, blob_id

SECONDS = 2.0  # that a tool may wait for the first look; that others read what has changed
MAX_FILE = 2_000_000  # bytes of a file that is kept
MAX_FOLDERS = 20_000  # that are watched: each takes a kilobyte of the kernel's memory
MAX_LOST = 100  # paths that a step names as not kept
RECENT = 20_000_000  # nanoseconds in which a file can change twice with the same stamp

KINDS = (stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR)
Info = os.stat_result
Entry = tuple[int, str]  # type and permissions of a file, blob id ("": not kept)
Pair = tuple[Entry | None, Entry | None]  # before, after; None: no file


class State(NamedTuple):
    """A file at the last look; stamp 0: to be read again."""

    mode: int
    blob: str
    stamp: int


class FolderWatch:
    """The paths below `root` that the kernel reports as changed, in the folders that were added."""

    MODIFY, ATTRIB, CLOSE_WRITE, MOVED, CREATE, DELETE = 0x2, 0x4, 0x8, 0xC0, 0x100, 0x200
    DELETE_SELF, MOVE_SELF, OVERFLOW, IGNORED = 0x400, 0x800, 0x4000, 0x8000
    ONLY_FOLDERS, NO_LINKS = 0x1000000, 0x2000000
    MASK = MODIFY | ATTRIB | CLOSE_WRITE | MOVED | CREATE | DELETE | DELETE_SELF | MOVE_SELF
    EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name behind it

    def __init__(self, root: str) -> None:
        self.root = root
        self._folders: dict[int, str] = {}
        self._fd = -1
        self._libc: Any = None
        if sys.platform == "linux":
            import ctypes

            self._errno = ctypes.get_errno
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)

    def add(self, folder: str) -> None:
        """Watch a folder, if it is one. Where the kernel has no room, nothing is watched."""
        if self._fd < 0:
            return
        path = os.fsencode(os.path.join(self.root, folder))
        mask = self.MASK | self.ONLY_FOLDERS | self.NO_LINKS
        watch = self._libc.inotify_add_watch(self._fd, path, mask)
        if watch >= 0:
            self._folders[watch] = folder
        if len(self._folders) > MAX_FOLDERS or (watch < 0 and self._errno() == errno.ENOSPC):
            self.close()

    def take(self) -> set[str] | None:
        """The paths reported since the last call; None: unknown."""
        changed: set[str] | None = set()
        while self._fd >= 0:
            try:
                data = os.read(self._fd, 1 << 18)
            except BlockingIOError:
                return changed
            for folder, mask, name in self._events(data):
                if mask & self.OVERFLOW:
                    changed = None
                elif mask & (self.DELETE_SELF | self.MOVE_SELF) and folder == "":
                    self.close()
                elif changed is not None and folder is not None and name:
                    changed.add(f"{folder}/{name}".lstrip("/"))
        return None

    def _events(self, data: bytes) -> Iterator[tuple[str | None, int, str]]:
        at = 0
        while at < len(data):
            watch, mask, _, size = self.EVENT.unpack_from(data, at)
            at += self.EVENT.size + size
            yield self._folders.get(watch), mask, os.fsdecode(data[at - size : at].rstrip(b"\0"))
            if mask & self.IGNORED:
                self._folders.pop(watch, None)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        self._folders.clear()


class WorkspaceFiles:
    """The files of a repo's workspace. Paths are relative to it; "" is the workspace itself."""

    def __init__(self, repo: SnapshotRepo) -> None:
        self.repo = repo
        self.ready = False  # has a first look been made?
        self.left_out = 0  # files and folders that the first look had no time or room for
        self._watch = FolderWatch(repo.root)
        self._files: dict[str, State] = {}
        self._folders: set[str] = set()
        self._outside: set[str] = set()  # what is left out, with all below
        self._unseen: set[str] | None = None  # reported and not looked at yet; None: anything
        self.stopped = False
        self.hurried = False  # set by another thread: the first look reads no more files

    def start(self) -> None:
        """Look at everything, as the state before a run, until `hurried` is set."""
        self.ready = self.stopped = self.hurried = False
        deadline = time.monotonic() + SECONDS * 3 / 4
        self._watch.take()  # what was reported so far is looked at now
        saved = {path: State(*row) for path, row in self.repo.load_files().items()}
        self._outside = {os.path.relpath(self.repo.data, self.repo.root), *self.repo.ignored()}
        found, self._folders, skipped = self._scan([""], deadline)
        self.left_out = len(skipped) if time.monotonic() > deadline else 0
        files = {path: info for path, info in found.items() if info}
        self._files = self._read(files, saved | self._files, float("inf"), first=True)
        self._unseen = set()
        self.ready = True
        if not self.stopped:
            self.repo.flush(ask_git=True)
            changed = {path: row for path, row in self._files.items() if saved.get(path) != row}
            self.repo.save_files(changed, saved.keys() - self._files.keys())
            self.repo.prune()

    def stop(self) -> None:
        """End a first look that is under way in another thread."""
        self.stopped = self.hurried = True
        self.repo.stop()

    def close(self) -> None:
        self._watch.close()

    def look(self, paths: Iterable[str] | None = None) -> dict[str, Any]:
        """What has changed since the last look, of these paths or anywhere, without what is empty.

        {"files": {path: (before, after)}, "lost": [path]}; of the lost the old or the new content
        is not kept.
        """
        self.stopped = self.hurried = False
        reported = self._watch.take()
        if self._unseen is not None:
            self._unseen = None if reported is None else self._unseen | reported
        if paths is None:
            paths, self._unseen = [""] if self._unseen is None else self._unseen, set()
        places = self._covered(paths)
        if new := [path for path in places if path not in self._files and self._info(path)]:
            self._outside |= self.repo.ignored(new)
            places = self._covered(places)
        found, folders, skipped = self._scan(places)
        if places & self._folders:
            self._folders = {each for each in self._folders if not _is_within(each, places)}
            below = [path for path in self._files if path not in found]
            found |= {path: self._info(path) for path in below if _is_within(path, places)}
        self._folders |= folders
        files, lost = self._compare(found)
        step = {"files": files, "lost": sorted([*lost, *skipped])[:MAX_LOST]}
        return {name: value for name, value in step.items() if value}

    def _covered(self, paths: Iterable[str]) -> set[str]:
        return {path for path in paths if not _is_within(path, self._outside)}

    def _compare(self, found: Mapping[str, Info | None]) -> tuple[dict[str, Pair], list[str]]:
        """What differs from the last look, and what of it is not kept."""
        there = {path: info for path, info in found.items() if info}
        states = self._read(there, self._files, time.monotonic() + SECONDS)
        self.repo.flush()
        files: dict[str, Pair] = {}
        lost = []
        for path in found:
            old, new = self._files.pop(path, None), states.get(path)
            if new:
                self._files[path] = new
            if old and new and old.stamp == new.stamp != 0:
                continue
            if not all(state.blob for state in (old, new) if state):
                lost.append(path)
            elif (old and old[:2]) != (new and new[:2]):
                files[path] = old and old[:2], new and new[:2]
        return files, lost

    def entry(self, path: str) -> Entry | None:
        """A file as it is now."""
        info = self._info(path)
        if not info or stat.S_ISDIR(info.st_mode):
            return None
        with contextlib.suppress(OSError):
            data, info = self._load(path, info)
            return _mode(info), blob_id(data)
        return _mode(info), ""

    # ---- finding

    def _scan(
        self, places: Iterable[str], deadline: float = float("inf")
    ) -> tuple[dict[str, Info | None], set[str], list[str]]:
        """Files at and below these places (None: gone), folders, and folders that are left out."""
        found: dict[str, Info | None] = {}
        folders, skipped = set[str](), list[str]()
        waiting = collections.deque[str]()
        for place in places:
            info = self._info(place)
            if info and stat.S_ISDIR(info.st_mode):
                waiting.append(place)
            found[place] = None if info and stat.S_ISDIR(info.st_mode) else info
        while waiting:
            if (folder := waiting.popleft()) in folders:
                continue
            late = self.stopped or time.monotonic() > deadline
            entries = None if late else self._entries(folder)
            if entries is None:
                skipped.append(folder)
                self._outside.add(folder)
                continue
            folders.add(folder)
            for path, entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(path)
                else:
                    with contextlib.suppress(FileNotFoundError):
                        found[path] = _of_kind(entry.stat(follow_symlinks=False))
        return found, folders, skipped

    def _entries(self, folder: str) -> list[tuple[str, os.DirEntry[str]]] | None:
        """What is in a folder, which is watched from now on; None where it is left out."""
        self._watch.add(folder)
        try:
            with os.scandir(os.path.join(self.repo.root, folder)) as entries:
                found = {f"{folder}/{entry.name}".lstrip("/"): entry for entry in entries}
        except OSError:
            return None
        if folder and f"{folder}/.git" in found:
            return None
        return [
            (path, entry)
            for path, entry in found.items()
            if path not in self._outside and entry.name not in self.repo.passed_over
        ]

    def _info(self, path: str) -> Info | None:
        """Of what is at a path and behind no link."""
        whole = os.path.join(self.repo.root, path).rstrip("/")
        folder = os.path.dirname(whole)
        with contextlib.suppress(OSError):
            return _of_kind(os.lstat(whole)) if os.path.realpath(folder) == folder else None
        return None

    # ---- reading

    def _read(
        self,
        found: Mapping[str, Info],
        known: Mapping[str, State],
        deadline: float,
        first: bool = False,
    ) -> dict[str, State]:
        """The states of files, small ones first; without a blob where there is no time or room."""
        states = {}
        for path, info in sorted(found.items(), key=lambda item: item[1].st_size):
            state = known.get(path)
            if not (state and state.stamp == _stamp(info) and (state.blob or not first)):
                full = self.repo.stored > MAX_STORED * (1 if first else 2)
                if full or self.hurried or time.monotonic() > deadline:
                    state = State(_mode(info), "", _stamp(info))
                    self.left_out += first and info.st_size <= MAX_FILE
                else:
                    state = self._state(path, info)
                    self.repo.flush(ask_git=first, above=MAX_WAITING)
            states[path] = state
        return states

    def _state(self, path: str, info: Info) -> State:
        """A file as it is; the repo gets its content."""
        now = time.time_ns()
        try:
            data, info = self._load(path, info)
        except OSError:
            return State(_mode(info), "", _stamp(info))
        recent = now - info.st_ctime_ns < RECENT
        return State(_mode(info), self.repo.add(data), 0 if recent else _stamp(info))

    def _load(self, path: str, info: Info) -> tuple[bytes, Info]:
        """The content of a file that is at its path, behind no link. Raises OSError."""
        whole = os.path.join(self.repo.root, path)
        if stat.S_ISLNK(info.st_mode):
            return os.fsencode(os.readlink(whole)), info
        fd = os.open(whole, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb", buffering=0) as file:
            now = os.fstat(fd)
            if not stat.S_ISREG(now.st_mode) or now.st_size > MAX_FILE:
                raise OSError("it is no file that is kept")
            if sys.platform == "linux" and os.readlink(f"/proc/self/fd/{fd}") != whole:
                raise OSError("it is behind a link")
            return file.read(now.st_size), now


def _of_kind(info: Info) -> Info | None:
    """None for sockets, devices and the like."""
    return info if stat.S_IFMT(info.st_mode) in KINDS else None


def _mode(info: Info) -> int:
    """Without the bits that give a program its owner's rights: they are not restored."""
    return info.st_mode & ~0o7000


def _stamp(info: Info) -> int:
    """What has the same stamp is the same."""
    times = (info.st_ctime_ns, info.st_mtime_ns)
    return hash((info.st_mode, info.st_size, *times, info.st_ino))


def _is_within(path: str, places: Collection[str]) -> bool:
    """Is a path, or a folder that it is in, one of these?"""
    while path not in places:
        if not path:
            return False
        path = path.rpartition("/")[0]
    return True
