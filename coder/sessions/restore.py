"""Makes files of a workspace what they were before a run, or after it."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Mapping, Set
from pathlib import Path

from coder.sessions.database import StoreError
from coder.sessions.file_reader import FileReader
from coder.sessions.file_states import Entry, info_at, link_of
from coder.sessions.known_files import KnownFiles
from coder.tools.workspace import fill_file, link_file, put_file, remove

Goals = Mapping[str, Entry | None]  # None: no file


class Restore:
    """Writes files below the root of `reader`; `known` are the files that there are.

    `new_inodes` are those that the last `write` gave to files with several names, by the former
    ones.
    """

    def __init__(self, reader: FileReader, known: KnownFiles) -> None:
        self.reader = reader
        self.known = known
        self.root = Path(reader.root)
        self.new_inodes: dict[int, int] = {}

    def _check_places(self, wanted: Set[str], removed: Set[str]) -> None:
        """Raise StoreError if something is in the place of a file that is not removed."""
        blocked = sorted(path for path in wanted if self._is_blocked(path, removed))
        if blocked:
            paths = ", ".join(blocked)
            raise StoreError(f"files that undo does not cover are in the place of {paths}")

    def _is_blocked(self, path: str, removed: Set[str]) -> bool:
        """Is something in the place of this file that is not `removed`: a folder with files in it,
        or something else in the place of a folder above?"""
        place = self.root / path
        if os.path.realpath(place) == str(place):  # else it is a link, or reached through one
            for folder, _, names in os.walk(place):
                below = os.path.relpath(folder, self.root)
                if any(f"{below}/{name}" not in removed for name in names):
                    return True
        for above in list(Path(path).parents)[:-1]:
            info = info_at(self.reader.root, str(above))
            is_in_the_way = info is not None and not stat.S_ISDIR(info.st_mode)
            if is_in_the_way and str(above) not in removed:
                return True
        return False

    def write(self, goals: Goals) -> set[str]:
        """Write files as they are to be, but those whose contents are lost, which it returns.

        Raises OSError, StoreError: some is done, and to do it again does the rest; nothing is done
        if something that is no goal is in the place of a file. Folders that become empty go; an
        empty folder is neither kept nor made.
        """
        self.new_inodes = {}
        wanted = {path: goal for path, goal in goals.items() if goal is not None}
        removed = goals.keys() - wanted.keys()
        self._check_places(wanted.keys(), removed)
        blobs = self.reader.store.blobs({goal.blob for goal in wanted.values()})
        # Names of these files that stay: while all are there, they can be told from other files
        others = self._other_names(goals)
        # What goes: first, since a file may be in the place of a folder
        self._remove(removed)
        # What comes back: files with several names last, when no other file has one of these
        lost: set[str] = set()
        names: dict[int, list[str]] = {}
        for path, goal in sorted(wanted.items()):
            if goal.blob not in blobs:
                lost.add(path)
                continue
            folders = os.walk(self.root / path, topdown=False)
            _remove_empty(Path(folder) for folder, *_ in folders)
            if goal.link:
                names.setdefault(goal.link, []).append(path)
            elif not self._is_alone(path, goal):
                put_file(
                    self.root / path,
                    blobs[goal.blob],
                    goal.mode,
                    sync=False,
                )
        for paths in names.values():
            goal = wanted[paths[0]]
            other = others.get(goal.link, "")
            self._write_names(paths, goal, blobs[goal.blob], other)
        return lost

    def _remove(self, paths: Iterable[str]) -> None:
        emptied: set[Path] = set()
        for path in paths:
            file = self.root / path
            with contextlib.suppress(FileNotFoundError):
                remove(file)
            emptied.update(file.parents)
        emptied -= {self.root, *self.root.parents}
        _remove_empty(sorted(emptied, reverse=True))

    def _is_alone(self, path: str, goal: Entry) -> bool:
        """Is a file as it is to be, with no other name?"""
        info = info_at(self.reader.root, path)
        is_one = info is not None and info.st_nlink == 1
        return is_one and self.reader.entry_now(path) == goal

    def _write_names(self, paths: list[str], goal: Entry, data: bytes, other: str) -> None:
        """Make these paths the names of one file, which may have one more in the workspace.

        If one of them is still a name of the file that it was, this is filled in its place, so
        that its names outside of the workspace have the content as well.
        """
        first = self._filled(paths, goal, data)
        if not first and other and self.reader.entry_now(other) == goal:
            first = other
        if not first:
            first = paths[0]
            put_file(self.root / first, data, goal.mode, sync=False)
            self.new_inodes[goal.link] = os.lstat(self.root / first).st_ino
        for path in paths:
            if not self._is_one_file(path, first):
                self._link(path, first, goal, data)

    def _filled(self, paths: list[str], goal: Entry, data: bytes) -> str:
        """The path at which the file was filled; "" if it is not there, or cannot be written to."""
        for path in paths:
            with contextlib.suppress(OSError):
                if fill_file(self.root / path, data, goal.mode, goal.link):
                    return path
        return ""

    def _other_names(self, goals: Goals) -> dict[int, str]:
        """By the inodes of files with several names: a path that is none of the goals.

        A file with one name is not of these, also if it has got the inode of a removed one.
        """
        found: dict[int, str] = {}
        inodes = {goal.link for goal in goals.values() if goal and goal.link}
        if not inodes:
            return found
        with self.known.lock:
            paths = set(self.known.read)
        paths.update(*self.reader.store.saved_states().values())
        for path in sorted(paths - goals.keys()):
            info = info_at(self.reader.root, path)
            if info and link_of(info) in inodes:
                found[info.st_ino] = path
        return found

    def _is_one_file(self, path: str, first: str) -> bool:
        info = info_at(self.reader.root, path)
        other = info_at(self.reader.root, first)
        return info is not None and other is not None and os.path.samestat(info, other)

    def _link(self, path: str, first: str, goal: Entry, data: bytes) -> None:
        try:
            link_file(self.root / first, self.root / path)
        except OSError:  # the content counts more
            put_file(self.root / path, data, goal.mode, sync=False)


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            remove(folder, os.rmdir)
