"""Which files of a workspace have changed since the last look, and what they were: what undo needs.

    files = WorkspaceFiles(root, data)
    files.begin_run()
    files.look_at_all()   # in a thread: the first look
    files.begin_step()
    files.end_step()      # what has changed since the step began

On Linux the kernel reports changed paths, so that a look at nothing costs nothing; else each look
goes through the folder. Left out is what FolderScan leaves out, and what is too large or too much.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property

from coder.sessions.blobs import BlobStore
from coder.sessions.file_reader import FileReader
from coder.sessions.file_states import (
    Entry,
    Pair,
    State,
    born_at,
    file_clock,
    info_at,
    is_linked_otherwise,
    is_within,
    link_of,
    stamp_of,
)
from coder.sessions.first_look import FirstLook
from coder.sessions.folder_scan import FolderScan, Level
from coder.sessions.folder_watch import FolderWatch
from coder.sessions.git import Git, Programs
from coder.sessions.git_index import GitIndex
from coder.sessions.known_files import KnownFiles
from coder.sessions.restore import Restore

GIT_MODE = stat.S_IFMT(0o777777) | stat.S_IXUSR  # of a mode: what git knows of it
Found = dict[str, tuple[State | None, State | None]]  # before, after; None: no file


@dataclass
class Changes:
    """What a step has changed: files, and those whose change cannot be undone."""

    files: dict[str, Pair] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)


class WorkspaceFiles:
    """The files of a workspace. Paths are relative to it; "" is the workspace itself.

    One thread may be in the first look while another one calls the methods here.
    """

    def __init__(self, root: str, data: str) -> None:
        self.root = root
        self.data = data
        self.known = KnownFiles()
        self._watch = FolderWatch(root)
        self._programs = Programs(root)
        self._closing = threading.Event()
        # At the last look
        self._was_surveyed = False
        self._had_modes = False
        self._run_began = file_clock()
        # Inodes of files that this run has changed: those that were known, and those that were
        # there before it, but not known
        self._known_inodes: set[int] = set()
        self._moved_in: set[int] = set()

    # Made when they are needed: not every session has a run

    @cached_property
    def _git(self) -> Git:
        return Git(self.root, self.data, self._programs)

    @cached_property
    def store(self) -> BlobStore:
        """Raises StoreError."""
        return BlobStore(self.root, self.data, self._git)

    @cached_property
    def reader(self) -> FileReader:
        """Raises StoreError."""
        return FileReader(self.root, self.store)

    @cached_property
    def restore(self) -> Restore:
        """Raises StoreError."""
        return Restore(self.reader, self.known)

    @cached_property
    def _index(self) -> GitIndex:
        return GitIndex(self._git)

    @cached_property
    def _scan(self) -> FolderScan:
        own_folder = os.path.relpath(self.data, self.root)
        scan = FolderScan(self.root, self._git, self._watch, own_folder)
        scan.known = self._covered
        scan.closing = self._closing
        return scan

    @cached_property
    def first_look(self) -> FirstLook:
        """Raises StoreError."""
        return FirstLook(self.known, self.reader, self._index, self._watch, self._scan)

    def _covered(self) -> list[Collection[str]]:
        """Files and folders that are covered, also if a rule ignores them."""
        return [self._index.tracked, self._index.folders, *self.known.paths()]

    # ---- looking

    def look_at_all(self) -> None:
        """The first look, in a thread. Raises StoreError, OSError."""
        with self.known.lock:
            first_look = self.first_look
        first_look.run()

    @property
    def left_out(self) -> int:
        """How many files there was no room for."""
        is_begun = "first_look" in self.__dict__
        return self.first_look.left_out if is_begun else 0

    def begin_run(self) -> None:
        """From now on files that are made are the run's."""
        self._run_began = file_clock()
        self._known_inodes = set()
        self._moved_in = set()

    def begin_step(self) -> None:
        """Before a tool works: what has changed up to now is not its doing. Raises StoreError."""
        with self.known.lock:
            self.known.steps += 1
            self.known.no_tool.clear()
        self.look()

    def end_step(self) -> Changes:
        """What has changed since the step began. Raises StoreError."""
        changes = Changes()
        try:
            if self.known.is_surveyed:
                self.first_look.check_changed()
            found = self.look()
        finally:
            self.known.no_tool.set()
        inodes = {before.inode for before, _ in found.values() if before}
        self._known_inodes |= inodes - self._moved_in
        for path, (before, after) in found.items():
            if after and self._is_moved_in(path, after):
                changes.lost.append(path)
            else:
                _add_change(changes, path, before, after)
        return changes

    def _is_moved_in(self, path: str, state: State) -> bool:
        """Does a file that was not known hold what was there before the run, and nothing else does?

        It was ignored, or came from outside, and this is its only name: to remove or replace it
        would be to lose it.
        """
        if state.inode in self._known_inodes:
            return False
        full_path = os.path.join(self.root, path)
        try:
            is_older = born_at(full_path) < self._run_began
            is_lone = is_older and os.lstat(full_path).st_nlink == 1
        except OSError:  # it is gone
            return False
        if is_older:
            self._moved_in.add(state.inode)
        return is_lone

    def keep(self, path: str) -> None:
        """Read a file now that a tool is about to write, however far the first look has come."""
        known = self.known
        with known.lock:
            is_guess = path in known.in_git and not known.has_modes
            if not known.is_surveyed:
                if path not in known.polled:
                    self._renew(path)
                    known.polled.add(path)
            elif (is_guess or path in known.unread) and not self._may_have_changed(path):
                self._renew(path)

    def _may_have_changed(self, path: str) -> bool:
        """Has a tool of this step changed a file that was not read?"""
        self._watch.collect()
        if is_within(path, self._watch.reported):
            return True
        stamp = self.known.unread.get(path, 0)
        info = info_at(self.root, path)
        return info is None or stamp not in (0, stamp_of(info))

    def look(self) -> Found:
        """What has changed since the last look. Before the survey is done, only files of `keep`."""
        found: Found = {}
        with self.known.lock:
            was_surveyed = self._was_surveyed
            had_modes = self._had_modes
            self._was_surveyed = self.known.is_surveyed
            self._had_modes = self.known.has_modes
            polled = self._changed_polled()
            places = set(polled)
            if self.known.is_surveyed:
                places |= self._watch.take()
            changed = self._changed_at(places)
            changed |= self._other_names(changed)
            for path in sorted(changed):
                before = self.known.state(path)
                is_guess = path in self.known.in_git and not had_modes
                after = self._renew(path)
                if is_guess and before and after:
                    before = _like(before, after)
                if was_surveyed or path in polled:
                    found[path] = before, after
            if changed:
                self.store.flush()
        return found

    def _changed_at(self, places: set[str]) -> set[str]:
        """The files at and below these places that are not what they were."""
        listed = self._list(places)
        known = self.known.at(places)
        self.known.forget_folders(places)
        self.known.folders |= listed.folders
        changed: set[str] = set()
        for path in known | listed.files.keys():
            is_named = path in places
            if is_named or not self.known.is_same(path, self._info(path, listed)):
                changed.add(path)
        return changed

    def _other_names(self, changed: set[str]) -> set[str]:
        """The files of which these have become names: the kernel reports the new names only."""
        inodes = {self._new_inode(path) for path in changed}
        inodes.discard(0)
        found: set[str] = set()
        if not inodes:
            return found
        for paths in self.known.files():
            for path, info in self.reader.infos(paths).items():
                if info.st_ino in inodes:
                    found.add(path)
        return found - self.known.polled

    def _new_inode(self, path: str) -> int:
        """The inode of which a file has become a name; 0 if it was one, or has no other name."""
        info = info_at(self.root, path)
        if info is None:
            return 0
        link = link_of(info)
        state = self.known.state(path)
        was_linked = state is not None and state.link == link
        return 0 if was_linked else link

    def _changed_polled(self) -> set[str]:
        changed: set[str] = set()
        for path in self.known.polled:
            info = info_at(self.root, path)
            if not self.known.is_same(path, info):
                changed.add(path)
        return changed

    def _list(self, places: set[str]) -> Level:
        """What is at and below these places now."""
        if not places:
            return Level()
        if not self.known.is_surveyed:  # the survey is using the scan
            return Level(files=dict.fromkeys(places, 0))
        return self._scan.below(places)

    def _info(self, path: str, listed: Level) -> os.stat_result | None:
        """Facts of a file; one that was listed is reached through no link."""
        if path in listed.files:
            return self.reader.infos([path]).get(path)
        return info_at(self.root, path)

    def _renew(self, path: str) -> State | None:
        """Read a file again, as it is now; None if there is none."""
        state = self.reader.state_now(path)
        if state:
            self.known.note(path, state)
        else:
            self.known.forget(path)
        return state

    def close(self) -> None:
        """End what is under way."""
        self._closing.set()
        self._programs.close()
        self.known.no_tool.set()
        self.known.is_needed.set()
        self._watch.close()


def _like(before: State, after: State) -> State:
    """A file that git has, with permissions and names that git does not know, as they are now."""
    is_other_kind = before.mode & GIT_MODE != after.mode & GIT_MODE
    if is_other_kind:
        return before
    link = after.link if after.inode == before.inode else 0
    return before._replace(mode=after.mode, link=link)


def _add_change(changes: Changes, path: str, before: State | None, after: State | None) -> None:
    is_lost = any(state.blob == "" for state in (before, after) if state)
    if not is_lost:
        old = _entry(before)
        new = _entry(after)
        if old != new or is_linked_otherwise(old, new):
            changes.files[path] = (old, new)
    elif before is None or after is None or before.stamp != after.stamp:
        changes.lost.append(path)


def _entry(state: State | None) -> Entry | None:
    return state.entry if state else None
