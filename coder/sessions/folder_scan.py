"""Goes through the folders of a workspace, and asks git level by level which paths to leave out."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass, field

from coder.sessions.file_states import info_at, is_within
from coder.sessions.folder_watch import FolderWatch
from coder.sessions.git import Git
from coder.tools.workspace import TOOL_FOLDERS

LEVELS = 8  # of folders for which git is asked one by one
RULES = ".gitignore"
GIT = ".git"


@dataclass
class Level:
    """Paths by what is at them: a folder, a file or link with its inode, or what is never kept."""

    folders: set[str] = field(default_factory=set)
    files: dict[str, int] = field(default_factory=dict)
    others: set[str] = field(default_factory=set)

    def add(self, more: Level) -> None:
        self.folders |= more.folders
        self.files |= more.files
        self.others |= more.others

    def keep(self, is_kept: Callable[[str], bool]) -> None:
        self.folders = {path for path in self.folders if is_kept(path)}
        self.files = {path: inode for path, inode in self.files.items() if is_kept(path)}


class FolderScan:
    """Lists folders below `root`, which `watch` reports on from then on.

    Left out: what git ignores (without a repository, folders that tools make), .git, and
    repositories inside of the workspace. Paths of the collections `known` are covered, whatever
    the rules say.
    """

    def __init__(self, root: str, git: Git, watch: FolderWatch, own_folder: str) -> None:
        self.root = root
        self.git = git
        self.watch = watch
        self.known: Callable[[], Sequence[Collection[str]]] = list
        self.closing = threading.Event()  # ends a listing
        self.watched: Set[str] = frozenset()  # folders, already
        self.passed_over: Collection[str] = ()  # files whose changes git sees
        self._left_out = {own_folder, GIT}
        self._piped_folders: set[str] = set()  # git would wait for their rules: they are a pipe
        self._git_works = True

    def below(self, places: Iterable[str]) -> Level:
        """The files at and below these places, and the folders that were listed."""
        level = self._level_of(places)
        self._find_pipes_above(level)
        with self.git.answering():
            return self._all_levels(level)

    def watch_all(self, folders: Iterable[str]) -> None:
        """Watch these folders; `watched` are those that are there."""
        watched: set[str] = set()
        for folder in sorted(folders):  # after the one that it is in, which may be a link now
            above = folder.rpartition("/")[0]
            is_reached = not folder or above in watched
            if is_reached and self.watch.add(folder):
                watched.add(folder)
        self.watched = watched

    def settled(self, since: int) -> set[str]:
        """Those of the `watched` folders in which nothing was made or removed since then, in
        nanoseconds; repositories are not `watched` any more."""
        settled: set[str] = set()
        for folder in self.watched:
            path = f"{self.root}/{folder}"
            if folder and os.path.lexists(f"{path}/{GIT}"):
                self._left_out.add(folder)
            with contextlib.suppress(OSError):
                if os.lstat(path).st_ctime_ns < since:
                    settled.add(folder)
        self.watched = {folder for folder in self.watched if self._is_inside(folder)}
        return settled

    def _level_of(self, places: Iterable[str]) -> Level:
        level = Level()
        for place in sorted(places):  # the files of a folder are read together
            info = info_at(self.root, place)
            is_git = os.path.basename(place) == GIT
            if info is None or is_git or is_within(place, self._left_out):
                continue
            if stat.S_ISDIR(info.st_mode):
                level.folders.add(place)
            elif stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode):
                level.files[place] = info.st_ino
            else:
                level.others.add(place)
        return level

    def _all_levels(self, level: Level) -> Level:
        found = Level()
        depth = 0
        ahead = 0  # levels that are listed before git is asked about them
        while level.folders or level.files:
            # Each question is a process: of a deep tree, more and more levels are listed before the
            # next one
            depth += 1
            if depth > LEVELS:
                ahead = 2 * ahead + 1
            seen = level
            for _ in range(ahead):
                level = self._level_below(level, found)
                seen.add(level)
            self._leave_out_ignored(seen)
            found.files |= seen.files
            for path in self._left_out & seen.files.keys():
                del found.files[path]
            if ahead:
                level.keep(self._is_inside)
            level = self._level_below(level, found)
        if ahead:
            found.keep(self._is_inside)
        return found

    def _is_inside(self, path: str) -> bool:
        return not is_within(path, self._left_out)

    def _level_below(self, level: Level, found: Level) -> Level:
        """What is in the folders of a level; those that could be listed are `found`."""
        below = Level()
        for folder in sorted(level.folders - self._left_out):
            if self._list(folder, below):
                found.folders.add(folder)
        return below

    def _list(self, folder: str, below: Level) -> bool:
        """Watch a folder and list what is in it; False if it is left out."""
        if self.closing.is_set():
            return False
        if folder not in self.watched:
            self.watch.add(folder)
        inside = f"{folder}/" if folder else ""
        passed_over = self.passed_over
        try:
            with os.scandir(f"{self.root}/{folder}") as listed:
                entries = [entry for entry in listed if inside + entry.name not in passed_over]
        except OSError:
            return False
        if folder and any(entry.name == GIT for entry in entries):  # a repository of its own
            self._left_out.add(folder)
            return False
        _sort_in(entries, inside, below)
        return True

    # ---- what is ignored

    def _leave_out_ignored(self, seen: Level) -> None:
        self._find_pipes(seen)
        unknown = seen.folders  # of names those of folders count
        if self._git_works:
            unknown = unknown.union(seen.files)
        for covered in [*self.known(), self._left_out]:
            if covered:  # for 100,000 files each set costs
                unknown = unknown.difference(covered)
        by_name = self._below_pipes(unknown)
        ignored = self._ask_git(unknown - by_name)
        if ignored is None:
            ignored = set()
            by_name = unknown
        self._left_out |= ignored
        for folder in by_name & seen.folders:
            if os.path.basename(folder) in TOOL_FOLDERS:
                self._left_out.add(folder)

    def _ask_git(self, paths: set[str]) -> set[str] | None:
        """What git ignores of these paths; None if it cannot say."""
        if not self._git_works:
            return None
        ignored = self.git.ignored(sorted(paths))
        if ignored is None or "" in ignored:
            # There is none, or it ignores the workspace as a whole
            self._git_works = False
            return None
        return ignored

    def _below_pipes(self, paths: set[str]) -> set[str]:
        if not self._piped_folders:
            return set()
        return {path for path in paths if is_within(os.path.dirname(path), self._piped_folders)}

    def _find_pipes(self, seen: Level) -> None:
        """Remember the folders of which git could not read the rules."""
        self._piped_folders |= {
            os.path.dirname(path) for path in seen.others if os.path.basename(path) == RULES
        }

    def _find_pipes_above(self, level: Level) -> None:
        """The same of folders that are not listed, and of the workspace itself."""
        above = {""}
        for path in level.folders.union(level.files):
            while path:
                path = os.path.dirname(path)
                above.add(path)
        self._find_pipes(self._level_of(os.path.join(folder, RULES) for folder in above))


def _sort_in(
    entries: Iterable[os.DirEntry[str]],
    inside: str,
    level: Level,
) -> None:
    """Add to a level what is in a folder, whose path is `inside`.

    This is done for 100,000 files: each call costs.
    """
    files = level.files
    for entry in entries:
        path = inside + entry.name
        if entry.is_file(follow_symlinks=False) or entry.is_symlink():
            files[path] = entry.inode()
        elif entry.is_dir(follow_symlinks=False):
            level.folders.add(path)
        else:
            level.others.add(path)
