"""Which files of a workspace have changed since the last look, and what they were: what undo needs.

    files = WorkspaceFiles(root, data)
    files.survey()        # what is there; what git has is known then
    files.read_rest()     # another thread may look meanwhile
    files.look()          # what has changed since the last look

A file is in one of three states: git has it as it is (a repository of 100,000 files is covered
without reading one), it was read, or it is `unread`: what it was is lost if it changes now.

On Linux the kernel reports changed paths, so that a look at nothing costs nothing; else each look
goes through the folder. Left out is what FolderScan leaves out, and what is too large or too much.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from coder.sessions.blobs import MAX_STORED, BlobStore
from coder.sessions.file_states import (
    MAX_FILE,
    Entry,
    Pair,
    State,
    content_at,
    info_at,
    is_within,
    link_of,
    stamp_of,
    state_from,
)
from coder.sessions.folder_scan import FolderScan, Level
from coder.sessions.folder_watch import FolderWatch
from coder.sessions.git import Git, Programs, blob_id
from coder.sessions.git_index import GitIndex
from coder.tools.workspace import fill_file, link_file, put_file

CLOCK = 20_000_000  # nanoseconds by which the kernel's clock of files may be behind
BATCH = 500  # files that are read between two looks at what was reported


@dataclass
class Changes:
    """What a look has found: the files that changed, and those whose change cannot be undone."""

    files: dict[str, Pair] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)


class WorkspaceFiles:
    """The files of a workspace. Paths are relative to it; "" is the workspace itself.

    `is_surveyed`: is it known which files there are? `left_out`: how many there was no room for.
    One thread may call `survey` and `read_rest` while another one calls the other methods.
    """

    def __init__(self, root: str, data: str) -> None:
        self.root = root
        self.data = data
        self.is_surveyed = False
        self.left_out = 0
        self.may_read = threading.Event()  # is no tool at work? Else a file may just change
        self.may_read.set()
        self._watch = FolderWatch(root)
        self._programs = Programs(root)
        self._closing = threading.Event()
        self._lock = threading.RLock()  # for what follows
        self._files: dict[str, State] = {}  # that were read
        self._in_git: dict[str, str] = {}  # blobs of files that are as git has them
        self._mode_in_git = 0  # which these have
        self._unread: dict[str, int] = {}  # stamps of files, or 0 if the kernel reports changes
        self._folders: set[str] = set()
        self._polled: set[str] = set()  # files of which the kernel may not report a change
        self._reported: set[str] = set()  # since the last look
        self._looks = 0
        self._was_surveyed = False  # at the last look

    @cached_property
    def _git(self) -> Git:
        return Git(self.root, self.data, self._programs)

    @cached_property
    def store(self) -> BlobStore:
        """Opened when it is needed. Raises StoreError."""
        return BlobStore(self.root, self.data, self._git)

    @cached_property
    def _index(self) -> GitIndex:
        return GitIndex(self._git)

    @cached_property
    def _scan(self) -> FolderScan:
        own_folder = os.path.relpath(self.data, self.root)
        scan = FolderScan(self.root, self._git, self._watch, own_folder)
        scan.known = self._known
        scan.closing = self._closing
        return scan

    def _known(self) -> list[Collection[str]]:
        """Files and folders that are covered, also if a rule ignores them."""
        index = self._index
        return [index.tracked, index.folders, self._files, self._unread, self._folders]

    # ---- the first look

    def survey(self) -> None:
        """Find all files, and those that git has as they are. Raises StoreError, OSError."""
        self._began = time.time_ns()
        with self._lock:
            index = self._index
            scan = self._scan
            store = self.store
        # What git added, and when
        index.read()
        store.in_git = index.blobs
        # Folders are listed and watched while a program looks at permissions
        index.begin_search()
        self._watch.begin()
        found = scan.below([""])
        # From now on changes are reported: what has changed up to now is not as git has it
        index.compare(found.files)
        if self._watch.works:
            index.find_plain()
        unread = self._stamps(found.files.difference(index.plain))
        with self._lock:
            for path in self._polled:  # `keep` knows what they were
                index.plain.pop(path, None)
                unread.pop(path, None)
            self._in_git = index.plain
            self._mode_in_git = index.mode
            self._unread = unread
            self._folders = found.folders
            self.is_surveyed = not self._closing.is_set()

    def _stamps(self, files: Iterable[str]) -> dict[str, int]:
        """By what a change of a file shows, if it is not reported."""
        if self._watch.works:
            return dict.fromkeys(files, 0)
        return {path: stamp_of(info) for path, info in self._infos(files).items()}

    def read_rest(self) -> None:
        """Read all files that are unread, until `close`. Raises StoreError."""
        saved = self._saved_states()
        while self._unread and not self._closing.is_set():
            self._read_unread(saved)
            if self._watch.works:
                break  # what is left was just changed, and will be read by the next look
        if not self._closing.is_set():
            with self._lock:
                states = dict(self._files)
            self._forget_states(saved.keys() - states.keys())
            self.store.prune({state.blob for state in states.values()})

    def _read_unread(self, saved: dict[str, State]) -> None:
        """Read the unread files once. Small ones come first: there may be no room for all."""
        # Files that are as an earlier process has read them, or as git has them
        sizes: dict[str, int] = {}
        for batch in self._batches(list(self._unread)):
            looks = self._looks
            known: dict[str, State] = {}
            for path, info in self._infos(batch).items():
                sizes[path] = info.st_size
                state = self._known_state(path, info, saved)
                if state:
                    known[path] = state
            self._record(known, looks)
        # The others
        rest = [path for path in sizes if path in self._unread]
        rest.sort(key=lambda path: (sizes[path], path))
        for batch in self._batches(rest):
            looks = self._looks
            has_room = self.store.stored <= MAX_STORED
            read = {path: self._read(path, has_room) for path in batch}
            recorded = self._record(read, looks)
            self.store.flush()
            self._save_states(recorded)
            for path, state in recorded.items():
                if not state.blob and sizes[path] <= MAX_FILE:
                    self.left_out += 1

    def _batches(self, paths: list[str]) -> Iterator[list[str]]:
        """Some of the paths at a time, if no tool may change them without a report."""
        for start in range(0, len(paths), BATCH):
            if not self._watch.works:
                self.may_read.wait()
            if self._closing.is_set():
                return
            yield paths[start : start + BATCH]

    def _infos(self, paths: Iterable[str]) -> dict[str, os.stat_result]:
        """Facts of the files that are still there."""
        infos: dict[str, os.stat_result] = {}
        for path in paths:
            with contextlib.suppress(OSError):
                infos[path] = os.lstat(os.path.join(self.root, path))
        return infos

    def _record(self, states: Mapping[str, State | None], looks: int) -> dict[str, State]:
        """Take these for the states of unread files; not of those that a tool may have changed since `looks`."""
        recorded: dict[str, State] = {}
        with self._lock:
            self._take_reports()
            if not self._watch.works and looks != self._looks:
                return {}
            for path, state in states.items():
                is_changed = is_within(path, self._reported)
                if state and path in self._unread and not is_changed:
                    self._set_state(path, state)
                    recorded[path] = state
        return recorded

    def _take_reports(self) -> None:
        if self._watch.works:
            self._reported |= self._watch.take()

    def _known_state(
        self, path: str, info: os.stat_result, saved: dict[str, State]
    ) -> State | None:
        """The state of a file that need not be read; None if it has to be."""
        state = saved.get(path)
        if state and state.stamp == stamp_of(info):
            return state._replace(link=link_of(info))
        blob = self._index.as_added.get(path)
        # What is newer may have changed since git looked
        if blob and info.st_ctime_ns < self._began - CLOCK and info.st_size <= MAX_FILE:
            return state_from(info, blob)
        return None

    def _saved_states(self) -> dict[str, State]:
        """The files as earlier processes have read them, if their contents are kept."""
        kept = self.store.kept() | self._index.blobs
        states: dict[str, State] = {}
        for row in self.store.rows("SELECT path, state FROM file"):
            state = State(*json.loads(row["state"]))
            if state.blob in kept:
                states[os.fsdecode(row["path"])] = state
        return states

    def _save_states(self, states: dict[str, State]) -> None:
        rows = [(os.fsencode(path), json.dumps(state)) for path, state in states.items()]
        self.store.execute("INSERT OR REPLACE INTO file VALUES (?, ?)", *rows)

    def _forget_states(self, paths: Iterable[str]) -> None:
        rows = [(os.fsencode(path),) for path in paths]
        self.store.execute("DELETE FROM file WHERE path = ?", *rows)

    # ---- looking again

    @property
    def unread(self) -> int:
        """How many files are not read yet."""
        return len(self._unread)

    def keep(self, path: str) -> None:
        """Read a file now that a tool is about to write, however far the first look has come."""
        with self._lock:
            if not self.is_surveyed:
                if path not in self._polled:
                    self._renew(path)
                    self._polled.add(path)
            elif path in self._unread:
                self._take_reports()
                info = info_at(self.root, path)
                stamp = self._unread[path]
                is_changed = is_within(path, self._reported)
                if info and not is_changed and stamp in (0, stamp_of(info)):
                    self._renew(path)

    def look(self) -> Changes:
        """What has changed since the last look. Before the survey is done, only files of `keep`."""
        changes = Changes()
        with self._lock:
            self._looks += 1
            was_surveyed = self._was_surveyed
            self._was_surveyed = self.is_surveyed
            polled = self._changed_polled()
            places = polled | self._reports()
            listed = Level()
            gone: set[str] = set()
            if self.is_surveyed and places:
                listed = self._scan.below(places)
                gone = self._paths_at(places)
                self._folders |= listed.folders
            for path in sorted(polled | gone | listed.files):
                info = self._info(path, path in listed.files)
                if not was_surveyed and path not in polled:
                    self._renew(path)
                elif path in places or not self._is_same(path, info):
                    self._compare(path, changes)
            self.store.flush()
        return changes

    def _changed_polled(self) -> set[str]:
        """Files that have changed, of which the kernel reports one of several names at most, or none."""
        changed: set[str] = set()
        for path in self._polled:
            if not self._is_same(path, info_at(self.root, path)):
                changed.add(path)
        return changed

    def _reports(self) -> set[str]:
        """Where files may have changed since the last look."""
        if not self.is_surveyed:
            return set()
        reported = self._reported | self._watch.take()
        self._reported = set()
        return reported

    def _paths_at(self, places: set[str]) -> set[str]:
        """The files that were at and below these places, which are folders no more."""
        paths = {place for place in places if self._before(place)}
        gone = places & self._folders
        if gone:
            for states in (self._files, self._in_git, self._unread):
                paths |= {path for path in states if is_within(path, gone)}
            self._folders = {path for path in self._folders if not is_within(path, gone)}
        return paths

    def _info(self, path: str, is_listed: bool) -> os.stat_result | None:
        """Facts of a file; one that was listed is reached through no link."""
        if is_listed:
            return self._infos([path]).get(path)
        return info_at(self.root, path)

    def _before(self, path: str) -> State | None:
        """A file at the last look; None if there was none."""
        if path in self._in_git:
            return State(self._mode_in_git, self._in_git[path], stamp=0)
        if path in self._unread:
            return State(mode=0, blob="", stamp=self._unread[path])
        return self._files.get(path)

    def _is_same(self, path: str, info: os.stat_result | None) -> bool:
        before = self._before(path)
        if before is None or info is None:
            return before is None and info is None
        return before.stamp == stamp_of(info)

    def _compare(self, path: str, changes: Changes) -> None:
        """Add what has become of a file to the changes."""
        before = self._before(path)
        after = self._renew(path)
        is_kept = all(state.blob for state in (before, after) if state)
        if is_kept:
            old = before.entry if before else None
            new = after.entry if after else None
            if old != new:
                changes.files[path] = (old, new)
        elif not (before and after and before.stamp == after.stamp):
            changes.lost.append(path)

    def _renew(self, path: str) -> State | None:
        """Read a file again, as it is now; None if there is none."""
        after = self._read_any(path)
        self._in_git.pop(path, None)
        self._unread.pop(path, None)
        self._files.pop(path, None)
        self._polled.discard(path)
        if after:
            self._set_state(path, after)
        return after

    def _set_state(self, path: str, state: State) -> None:
        self._files[path] = state
        self._unread.pop(path, None)
        self._in_git.pop(path, None)
        if state.link:
            self._polled.add(path)

    def _read_any(self, path: str) -> State | None:
        """What is at a path now; None if it is no file."""
        info = info_at(self.root, path)
        if info is None or stat.S_ISDIR(info.st_mode):
            return None
        return self._read(path, has_room=self.store.stored <= 2 * MAX_STORED)

    def _read(self, path: str, has_room: bool) -> State | None:
        """A file as it is, with its content in the store if there is room; None if there is none."""
        if has_room:
            with contextlib.suppress(OSError):
                data, info = content_at(self.root, path)
                return state_from(info, self.store.add(data))
        with contextlib.suppress(OSError):
            return state_from(os.lstat(os.path.join(self.root, path)), "")
        return None

    # ---- taking back

    def entry(self, path: str) -> Entry | None:
        """A file as it is now."""
        info = info_at(self.root, path)
        if info is None or stat.S_ISDIR(info.st_mode):
            return None
        try:
            data, info = content_at(self.root, path)
        except OSError:
            return state_from(info, "").entry
        return state_from(info, blob_id(data)).entry

    def put(self, path: str, data: bytes, goal: Entry, made: dict[int, str]) -> None:
        """Make a file what it was. Raises OSError.

        If it was one of several names of an inode, it is so again: the inode is filled in its
        place, so that its names outside of the workspace have the content as well, or the file
        becomes one more name of another one. `made` are the files that were made before, by what
        their inodes were.
        """
        target = Path(self.root, path)
        if goal.link and self._put_link(path, data, goal, made):
            return
        put_file(target, data, goal.mode, sync=False)

    def _put_link(self, path: str, data: bytes, goal: Entry, made: dict[int, str]) -> bool:
        """Fill the inode that the file was, or give another name to it; False if there is none."""
        target = Path(self.root, path)
        first = made.setdefault(goal.link, path)
        if first == path:
            with contextlib.suppress(OSError):  # it is not there, or cannot be written to
                if fill_file(target, data, goal.mode, goal.link):
                    return True
        with contextlib.suppress(OSError):  # the content counts more
            names = [first] if first != path else self._names(goal)
            if names:
                link_file(Path(self.root, names[0]), target)
                return True
        return False

    def _names(self, goal: Entry) -> list[str]:
        """Files of the workspace that are a name of this inode, with this content."""
        found: list[str] = []
        with self._lock:
            paths = self._files.keys() | self._saved_states().keys()
        for path in paths:
            info = info_at(self.root, path)
            if info and info.st_ino == goal.link and self.entry(path) == goal:
                found.append(path)
        return found

    def close(self) -> threading.Thread | None:
        """End what is under way; the thread, if any, may be waited for."""
        self._closing.set()
        self.may_read.set()
        self._programs.close()
        return self._watch.close()
