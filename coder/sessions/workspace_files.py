"""Which files of a workspace have changed since the last look, and what they were: what undo needs.

    files = WorkspaceFiles(root, data)
    files.start()                # before a run: all files, read where their stamps are new
    files.look()                 # what has changed since

On Linux the kernel reports changed paths, so that a look at nothing costs nothing; else each look goes through the
folder. Left out: what git ignores (where there is no repository, folders that tools make), .git, repositories
inside of the workspace, sockets and devices, and what is too large or too much.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import struct
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from coder.sessions.blobs import MAX_STORED, BlobStore
from coder.sessions.git import blob_id
from coder.tools.workspace import TOOL_FOLDERS, fill_file, link_file, put_file

SECONDS = 1.8  # that a look may keep a tool waiting, before a bit to store
MAX_FILE = 2_000_000  # bytes of a file that is kept
CLOCK = 20_000_000  # nanoseconds by which the kernel's clock of files may be behind
LEVELS = 8  # of folders for which git is asked one by one
MAX_FOLDERS = 20_000  # that are watched: each takes a kilobyte of the kernel's memory
Info = os.stat_result


@dataclass(frozen=True)
class Entry:
    """A file: type and permissions, blob id ("": not kept), and its inode if it has several names, else 0."""

    mode: int
    blob: str
    link: int = field(default=0, compare=False)


Pair = tuple[Entry | None, Entry | None]  # before, after; None: no file


class FolderWatch:
    """The paths below `root` that the kernel reports as changed, in the folders that were added."""

    # modify, attrib, close_write, moved_from, moved_to, create, delete; onlydir, dont_follow
    MASK = 0x2 | 0x4 | 0x8 | 0x40 | 0x80 | 0x100 | 0x200 | 0x1000000 | 0x2000000
    OVERFLOW, IGNORED = 0x4000, 0x8000
    EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name behind it

    def __init__(self, root: str) -> None:
        self.root = root
        self._folders: dict[int, str] = {}
        self._fd = -1
        if sys.platform == "linux":
            import ctypes

            self._libc = ctypes.CDLL(None)
            self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)

    def add(self, folder: str) -> None:
        """Watch a folder, if it is one. Where the kernel has no room, nothing is watched."""
        if self._fd >= 0:
            path = os.path.join(self.root, folder)
            watch = self._libc.inotify_add_watch(self._fd, os.fsencode(path), self.MASK)
            if watch >= 0:
                self._folders[watch] = folder
            refused = watch < 0 and os.path.isdir(path) and os.access(path, os.R_OK)
            if refused or len(self._folders) > MAX_FOLDERS:
                self.close()

    def take(self) -> set[str]:
        """The paths reported since the last call; with "", any path may have changed."""
        changed, data = set[str]() if self._fd >= 0 else {""}, b""
        with contextlib.suppress(BlockingIOError):
            while self._fd >= 0:
                data += os.read(self._fd, 1 << 18)
        at = 0
        while at < len(data):
            watch, mask, _, size = self.EVENT.unpack_from(data, at)
            at += self.EVENT.size + size
            name = os.fsdecode(data[at - size : at].rstrip(b"\0"))
            if mask & self.OVERFLOW:
                changed.add("")
            elif mask & self.IGNORED and self._folders.get(watch) == "":
                changed.add("")  # the workspace is removed, and may be made again
                self.close()
            elif watch in self._folders and name:
                changed.add(f"{self._folders[watch]}/{name}".lstrip("/"))
        return changed

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class State(NamedTuple):
    """A file at the last look; what has the same stamp is the same."""

    mode: int
    blob: str
    stamp: int
    link: int = 0

    @property
    def entry(self) -> Entry:
        return Entry(self.mode, self.blob, self.link)


class WorkspaceFiles:
    """The files of a workspace. Paths are relative to it; "" is the workspace itself."""

    def __init__(self, root: str, data: str) -> None:
        self.root, self.data = root, data
        self.ready = False  # has a first look been made?
        self.left_out = 0  # files and folders that it had no time or room for
        self.deadline = math.inf  # of the look under way; another thread may bring it forward
        self._watch = FolderWatch(root)
        self._files: dict[str, State] = {}
        self._linked: set[str] = set()  # files with several names
        self._folders: set[str] = set()
        self._ignored_paths: set[str] = set()
        self._unreached_folders: set[str] = set()  # folders for which the first look had no time
        self._piped_folders: set[str] = set()  # whose rules git would wait for: they are a pipe
        self._git_works = True

    @cached_property
    def store(self) -> BlobStore:
        """Opened when it is needed. Raises StoreError."""
        return BlobStore(self.root, self.data, lambda: self.deadline)

    def start(self) -> None:
        """Look at everything, as the state before a run, until the `deadline`."""
        began = time.time_ns()
        self._watch.take()  # what was reported so far is looked at now
        self._ignored_paths, self._unreached_folders = (
            {os.path.relpath(self.data, self.root)},
            set(),
        )
        self._git_works = True
        git = self.store.git
        git.read_index()
        inside = above = set(git.tracked)
        while above := {path.rpartition("/")[0] for path in above} - inside:
            inside = inside | above  # the folders that they are in
        found, self._folders = self._scan([""], inside)
        kept = {row["id"] for row in self.store.rows("SELECT id FROM blob")} | git.blobs
        known = self._files or self._saved_states()
        states = {
            path: state._replace(link=_link(info))
            for path, info in found.items()
            if (state := known.get(path)) and state.blob in kept and state.stamp == _stamp(info)
        }
        new = {path: info for path, info in found.items() if path not in states}
        rules = [path for path in found if path.endswith(".gitattributes")]
        # What is newer may have changed since git looked
        old = (path for path, info in new.items() if info.st_ctime_ns < began - CLOCK)
        sizes = {path: new[path].st_size for path in old if new[path].st_size <= MAX_FILE}
        blobs = git.unchanged(sizes, rules)
        states |= {path: _state(new[path], blob) for path, blob in blobs.items()}
        self.left_out = len(self._unreached_folders)
        for path, info in sorted(new.items(), key=lambda each: (each[1].st_size, each[0])):
            if path not in states:
                self.left_out += self._is_full(MAX_STORED) and info.st_size <= MAX_FILE
                states[path] = self._read(path, info, MAX_STORED)
        self._files = states
        self._linked = {path for path, state in states.items() if state.link}
        self.store.flush()
        if states != known:
            self.store.execute("INSERT OR REPLACE INTO look VALUES (1, ?)", (json.dumps(states),))
        self.store.prune({state.blob for state in states.values()})
        self.ready = True

    def _saved_states(self) -> dict[str, State]:
        """The files as the first look of an earlier process has read them."""
        rows = self.store.rows("SELECT data FROM look")
        saved = json.loads(rows[0]["data"]) if rows else {}
        return {path: State(*state) for path, state in saved.items()}

    def look(self) -> tuple[dict[str, Pair], list[str]]:
        """The files that have changed since the last look; and those of which the old or the new content is not kept."""
        self.deadline = time.monotonic() + SECONDS
        places = self._watch.take()
        places |= self._changed_links()
        found, folders = self._scan(places)
        gone = places & self._files.keys()
        if within := places & self._folders:
            gone |= {path for path in self._files if _is_within(path, within)}
            self._folders = {path for path in self._folders if not _is_within(path, within)}
        self._folders |= folders
        files: dict[str, Pair] = {}
        lost = []
        for path in sorted(found.keys() | gone):
            old, info = self._files.pop(path, None), found.get(path) or self._info(path)
            if info and old and path not in places and old.stamp == _stamp(info):
                new: State | None = old
            else:
                new = self._read(path, info) if info and not stat.S_ISDIR(info.st_mode) else None
            self._linked.discard(path)
            if new:
                self._files[path] = new
                self._linked |= {path} if new.link else set()
            known = old or not _is_within(path, self._unreached_folders)
            if known and all(state.blob for state in (old, new) if state):
                pair = old and old.entry, new and new.entry
                if pair[0] != pair[1]:
                    files[path] = pair
            elif not (old and new and old.stamp == new.stamp):
                lost.append(path)
        self.store.flush()
        return files, lost

    def entry(self, path: str) -> Entry | None:
        """A file as it is now."""
        info = self._info(path)
        if not info or stat.S_ISDIR(info.st_mode):
            return None
        blob = ""
        with contextlib.suppress(OSError):
            blob = blob_id(self._load(path, info))
        return _state(info, blob).entry

    def put(self, path: str, data: bytes, goal: Entry, made: dict[int, str]) -> None:
        """Make a file what it was. Raises OSError.

        If it was one of several names of an inode, it is so again: the inode is filled in its place, so that its names
        outside of the workspace have the content as well, or the file becomes one more name of another one. `made` are
        the files that were made before, by what their inodes were.
        """
        place = Path(self.root, path)
        if goal.link:
            first = made.setdefault(goal.link, path)
            with contextlib.suppress(OSError):  # it is not there, or cannot be written to
                if first == path and fill_file(place, data, goal.mode, goal.link):
                    return
            with contextlib.suppress(OSError):  # the content counts more
                names = [first] if first != path else self._names(goal)
                if names:
                    link_file(Path(self.root, names[0]), place)
                    return
        put_file(place, data, goal.mode, sync=False)

    def _names(self, goal: Entry) -> list[str]:
        """Files of the workspace that are a name of this inode, with this content."""
        found = list[str]()
        for path in self._files or self._saved_states():
            info = self._info(path)
            if info and info.st_ino == goal.link and self.entry(path) == goal:
                found.append(path)
        return found

    def _changed_links(self) -> set[str]:
        """Files with several names that have changed: the kernel reports one of these at most."""
        changed = set[str]()
        for path in self._linked:
            with contextlib.suppress(OSError):
                if _stamp(os.lstat(os.path.join(self.root, path))) != self._files[path].stamp:
                    changed.add(path)
        return changed

    def close(self) -> None:
        self._watch.close()

    # ---- finding

    def _scan(
        self, places: Iterable[str], known: Collection[str] = ()
    ) -> tuple[dict[str, Info], set[str]]:
        """The files at and below these places, and the folders, which are watched from now on. `known`: not ignored."""
        with self.store.git.answering():
            return self._scan_levels(places, known)

    def _scan_levels(
        self, places: Iterable[str], known: Collection[str]
    ) -> tuple[dict[str, Info], set[str]]:
        files: dict[str, Info] = {}
        folders = set[str]()
        inner = [place for place in places if not _is_within(place, self._ignored_paths)]
        level = {place: info for place in inner if (info := self._info(place))}
        depth = ahead = 0
        while level:
            # Each question is a process: of a deep tree, more and more levels are listed before the next one
            depth += 1
            ahead = 2 * ahead + 1 if depth > LEVELS else 0
            seen = dict(level)
            for _ in range(ahead):
                level = self._below(level, folders)
                seen |= level
            self._find_pipes(seen)
            # Not by subtracting `self._files`: that goes through all of them
            asked = {path for path in seen if path not in known and path not in self._files}
            self._ignored_paths |= self._ask_git(asked - self._folders - self._ignored_paths)
            files |= {path: info for path, info in seen.items() if self._is_file(path, info)}
            if ahead:
                files = {path: info for path, info in files.items() if self._is_covered(path)}
                folders = {path for path in folders if self._is_covered(path)}
                level = {path: info for path, info in level.items() if self._is_covered(path)}
            level = self._below(level, folders)
        return files, folders

    def _below(self, level: Mapping[str, Info], folders: set[str]) -> dict[str, Info]:
        """What is in the folders of a level, which are added to `folders`."""
        below: dict[str, Info] = {}
        for path, info in level.items():
            is_left_out = path in self._ignored_paths or os.path.basename(path) == ".git"
            if is_left_out or not stat.S_ISDIR(info.st_mode):
                continue
            if time.monotonic() > self.deadline:
                self._unreached_folders.add(path)
            elif (found := self._entries(path)) is not None:
                folders.add(path)
                below |= found
        return below

    def _is_covered(self, path: str) -> bool:
        return not _is_within(path, self._ignored_paths)

    def _is_file(self, path: str, info: Info) -> bool:
        """A file or link that may be covered."""
        is_kept = stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode)
        return is_kept and path not in self._ignored_paths and os.path.basename(path) != ".git"

    def _find_pipes(self, seen: Mapping[str, Info]) -> None:
        """Remember the folders of which git could not read the rules; for the workspace itself it reads those in it."""
        if "" in seen and (info := self._info(".gitignore")):
            seen = {**seen, ".gitignore": info}
        pipes = (path for path, info in seen.items() if stat.S_ISFIFO(info.st_mode))
        rules = (path for path in pipes if os.path.basename(path) == ".gitignore")
        self._piped_folders |= {os.path.dirname(path) for path in rules}

    def _entries(self, folder: str) -> dict[str, Info] | None:
        """What is in a folder; None where it is left out."""
        self._watch.add(folder)
        found = {}
        try:
            with os.scandir(os.path.join(self.root, folder)) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        info = entry.stat(follow_symlinks=False)
                        found[f"{folder}/{entry.name}".lstrip("/")] = info
        except OSError:
            return None
        if folder and f"{folder}/.git" in found:
            self._ignored_paths.add(folder)
            return None
        return found

    def _info(self, path: str) -> Info | None:
        """Of what is at a path and behind no link."""
        whole = os.path.join(self.root, path).rstrip("/")
        folder = os.path.dirname(whole)
        with contextlib.suppress(OSError):
            return os.lstat(whole) if os.path.realpath(folder) == folder else None
        return None

    def _ask_git(self, paths: Set[str]) -> set[str]:
        """What is ignored of these paths."""
        above, answer = self._piped_folders, None
        asked = paths
        if above:
            asked = {path for path in paths if not _is_within(os.path.dirname(path), above)}
        if self._git_works and time.monotonic() < self.deadline:
            answer = self.store.git.ignored(sorted(asked))
            if answer is None or "" in answer:
                # There is none, or it ignores the workspace as a whole
                self._git_works, answer = False, None
        by_name = paths if answer is None else paths - asked
        return (answer or set()) | {
            each for each in by_name if os.path.basename(each) in TOOL_FOLDERS
        }

    # ---- reading

    def _read(self, path: str, info: Info, most: int = 2 * MAX_STORED) -> State:
        """A file as it is; the store gets its content, where there is time and room."""
        blob = ""
        if not self._is_full(most):
            with contextlib.suppress(OSError):
                blob = self.store.add(self._load(path, info))
        return _state(info, blob)

    def _is_full(self, most: int) -> bool:
        return time.monotonic() > self.deadline or self.store.stored > most

    def _load(self, path: str, info: Info) -> bytes:
        """The content of a file that is at its path, behind no link. Raises OSError."""
        whole = os.path.join(self.root, path)
        if stat.S_ISLNK(info.st_mode):
            return os.fsencode(os.readlink(whole))
        fd = os.open(whole, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb", buffering=0) as file:
            now = os.fstat(fd)
            if not stat.S_ISREG(now.st_mode) or now.st_size > MAX_FILE:
                raise OSError("it is no file that is kept")
            if sys.platform == "linux" and os.readlink(f"/proc/self/fd/{fd}") != whole:
                raise OSError("it is behind a link")
            return file.read(MAX_FILE)


def _state(info: Info, blob: str = "") -> State:
    """Without the bits that give a program its owner's rights: they are not restored."""
    return State(info.st_mode & ~0o7000, blob, _stamp(info), _link(info))


def _link(info: Info) -> int:
    """The inode of a file that has several names, else 0."""
    return info.st_ino if info.st_nlink > 1 and stat.S_ISREG(info.st_mode) else 0


def _stamp(info: Info) -> int:
    times = (info.st_ctime_ns, info.st_mtime_ns)
    return hash((info.st_mode, info.st_size, *times, info.st_ino))


def _is_within(path: str, places: Collection[str]) -> bool:
    """Is a path, or a folder that it is in, one of these?"""
    while path not in places:
        if not path:
            return False
        path = path.rpartition("/")[0]
    return True
