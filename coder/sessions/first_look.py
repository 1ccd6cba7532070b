"""The first look at a workspace: which files there are, and what they hold.

read_index()    # what git has added
survey()        # what is there, and which files are as git has added them
check()         # which of these are not quite so
read_rest()     # all else is read; another thread may look for changes meanwhile
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from os import stat_result

from coder.sessions.blobs import MAX_STORED, Seen
from coder.sessions.file_reader import FileReader
from coder.sessions.file_states import (
    MAX_FILE,
    State,
    info_at,
    info_in,
    is_within,
    opened,
    stamp_of,
    state_from,
)
from coder.sessions.folder_scan import FolderScan
from coder.sessions.folder_watch import FolderWatch
from coder.sessions.git_index import MAX_SECONDS, GitIndex
from coder.sessions.known_files import KnownFiles

SHORT_ANSWER = 0.25  # seconds for which nothing is watched, unless a tool begins
CLOCK = 20_000_000  # nanoseconds by which the kernel's clock of files may be behind
SAVED = 300  # folders whose files are read before this is stored
MANY = 1_000  # paths: to list all folders again takes less time
FEW = 50  # paths that are checked before all others
BATCH = 500  # files that are read between two looks at what was reported


class FirstLook:
    """Finds all files of a workspace, which are `known` then; for `left_out` there was no room."""

    def __init__(
        self,
        known: KnownFiles,
        reader: FileReader,
        index: GitIndex,
        watch: FolderWatch,
        scan: FolderScan,
    ) -> None:
        self.known = known
        self.reader = reader
        self.store = reader.store
        self.index = index
        self.watch = watch
        self.scan = scan
        self.closing = scan.closing
        self.left_out = 0
        self._began = 0
        self._listing: subprocess.Popen[bytes] | None = None  # of files that git does not have
        # What processes have read, by folders, and those in which something is not stored yet
        self._saved: dict[str, Seen] = {}
        self._unsaved: set[str] = set()

    def run(self) -> None:
        """All of it. Raises StoreError, OSError."""
        self.read_index()
        # Many answers need no tool, and to end a watch takes the kernel 10 to 20 ms
        self.known.is_needed.wait(SHORT_ANSWER)
        if self.closing.is_set():
            self.index.git.output(self._listing)  # it was ended, too
            return
        self.survey()
        try:
            if len(self.known.unread) <= BATCH:
                self._saved = self.store.saved_states()
                self._read_small()  # a tool waits for these; its end waits for the check
            self.check()
        finally:
            self.known.is_checked.set()
        self.read_rest()

    def read_index(self) -> None:
        """Read what git has added, and when."""
        self._began = time.time_ns()
        self._listing = self.index.git.start("ls-files -z --others --directory")
        self.index.read()
        self.store.in_git = self.index.blobs

    def survey(self) -> None:
        """Find all files, and those that git has as they are. Raises StoreError, OSError."""
        index = self.index
        # From now on changes of tracked files are reported: git finds those up to now, while
        # folders are listed
        self.watch.begin()
        self.scan.watch_all(index.folders)
        index.begin_compare()
        self.scan.passed_over = index.compared
        found = self.scan.below(self._not_in_git())
        found.folders |= self.scan.watched
        self.scan.watched = frozenset()
        self.scan.passed_over = ()
        in_git = index.compare(found)
        # What is in the places of files that git has no more
        places: Collection[str] = index.changed
        if not self.watch.works:
            in_git = {}
        has_none = index.tracked and not in_git  # git may not even have read its own index
        if has_none or len(places) > MANY:
            places = [""]
        others = self.scan.below(places)
        found.files |= others.files
        # In the order of the listing: the files of a folder are read together
        unread = self._stamps(found.files)
        with self.known.lock:
            for path in self.known.polled:  # it is known what they were
                in_git.pop(path, None)
                unread.pop(path, None)
            for path in unread.keys() & in_git.keys():
                del unread[path]
            self.known.in_git = in_git
            self.known.usual_mode = index.usual_mode
            self.known.modes = index.modes
            self.known.unread = unread
            self.known.inodes = found.files
            self.known.folders = found.folders
            self.known.is_surveyed = not self.closing.is_set()
        if not in_git:
            self.known.is_checked.set()

    def _not_in_git(self) -> Collection[str]:
        """Where the files are that git does not have, also ignored ones, and those in folders that
        have changed since it has begun to look."""
        unsettled = self.index.folders - self.scan.settled(since=self._began - CLOCK)
        git = self.index.git
        is_top = str(git.top) == git.root  # else it may be ignored as a whole
        is_usable = is_top and self.watch.works and bool(self.index.tracked)
        listing = git.output(self._listing, MAX_SECONDS if is_usable else 0.0)
        if listing is None or not is_usable:
            return [""]
        names = os.fsdecode(listing).split("\0")[:-1]
        places = unsettled.union(name.rstrip("/") for name in names)
        return [""] if len(places) > MANY else places

    def check(self) -> None:
        """Find which files git has in another form, or not with the permissions that they have."""
        if not self.known.is_checked.is_set():
            self.index.begin_search()
            try:
                converted = self.index.find_converted()
                self._doubt(converted)
            finally:
                self.known.is_checked.set()
            # This may take long: there may be many files that git ignores
            self._doubt(self.index.find_special())
        self.known.has_modes = True

    def check_changed(self) -> None:
        """Find what files were that have changed by now, without all others if they are few."""
        checked: set[str] = set()
        while not self.known.is_checked.is_set():
            with self.known.lock:
                self.watch.collect()
                places = set(self.watch.reported)
                are_known = places.isdisjoint(self.known.folders)
                are_files = are_known and all(self._is_lone(path) for path in places)
                paths = sorted((places & self.known.in_git.keys()) - checked)
            if are_files and not paths:
                return
            converted = None
            if are_files and len(paths) <= FEW:
                converted = self.index.find_few(paths)
            if converted is None:
                self.known.is_checked.wait()
                return
            self._doubt(converted)
            checked.update(paths)

    def _is_lone(self, path: str) -> bool:
        """Is it no folder, and no further name of a file, whose other names may not be reported?"""
        info = info_at(self.reader.root, path)
        return info is None or (info.st_nlink == 1 and not stat.S_ISDIR(info.st_mode))

    def _doubt(self, paths: set[str]) -> None:
        """Take files for some that are to be read, but not for what a tool has just done to
        them."""
        with self.known.lock:
            self.known.inodes = self.index.inodes | self.known.inodes
            self.watch.collect()
            doubtful = paths & self.known.in_git.keys()
            for path in sorted(doubtful, key=os.path.dirname):  # a folder's are read together
                is_as_added = path not in self.index.changed
                if not is_as_added or not is_within(path, self.watch.reported):
                    del self.known.in_git[path]
                    self.known.unread[path] = 0

    def _stamps(self, files: Iterable[str]) -> dict[str, int]:
        """By what a change of a file shows, if it is not reported."""
        if self.watch.works:
            return dict.fromkeys(files, 0)
        infos = self.reader.infos(files)
        return {path: stamp_of(info) for path, info in infos.items()}

    def read_rest(self) -> None:
        """Read all files that are unread, and forget those that are gone. Raises StoreError."""
        self._read_unread()
        if self.closing.is_set():
            return
        with self.known.lock:
            states = dict(self.known.read)
        for folder, saved in self._saved.items():
            gone = [path for path in saved if path not in states]
            for path in gone:
                del saved[path]
                self._unsaved.add(folder)
        self._save()
        self._saved = {}
        self.store.prune({state.blob for state in states.values()})

    def _read_unread(self) -> None:
        """Read all files that are unread, until it is closed."""
        self._saved = self.store.saved_states()
        while self.known.unread and not self.closing.is_set():
            others = self._read_small()
            self._read_others(others)
            if self.watch.works:
                break  # what is left has just changed, and the next look reads it

    def _read_small(self) -> list[str]:
        """Take what an earlier process has read, and what git has, and read small files. Returns
        the others."""
        others: list[str] = []
        for folder, inside in itertools.groupby(list(self.known.unread), os.path.dirname):
            for paths in self._batches(list(inside)):
                steps = self.known.steps
                states = self._small_states(folder, paths)
                others += [path for path in paths if path not in states]
                self._record(states, steps)
            # A transaction costs as much as to read some hundred small files
            if len(self._unsaved) > SAVED:
                self._save()
        self._save()
        return others

    def _save(self) -> None:
        self.store.save_states({folder: self._saved[folder] for folder in self._unsaved})
        self._unsaved = set()

    def _small_states(self, folder: str, paths: Iterable[str]) -> dict[str, State]:
        """The states of those files of a folder that are known, or can be read."""
        saved = self._saved.setdefault(folder, {})
        states: dict[str, State] = {}
        has_room = self.store.stored <= MAX_STORED
        skipping = contextlib.suppress(OSError)
        with skipping, opened(self.reader.root, folder) as fd:
            for path in paths:
                name = path.rpartition("/")[2]
                state = None
                with skipping:
                    if path in saved or path in self.index.tracked:
                        state = self._known_state(path, info_in(fd, name), saved.get(path))
                    if state:
                        states[path] = state
                    elif has_room:
                        states[path] = self.reader.read_small(fd, name)
        return states

    def _known_state(self, path: str, info: stat_result, saved: State | None) -> State | None:
        """The state of a file that need not be read; None if it has to be."""
        if saved and saved.stamp == stamp_of(info):
            return saved
        is_as_added = path not in self.index.changed
        blob = self.index.tracked.get(path, "") if is_as_added else ""
        is_new = info.st_ctime_ns > self._began - CLOCK  # it may have changed since git looked
        is_large = info.st_size > MAX_FILE
        if not blob or is_new or is_large:
            return None
        return state_from(info, blob)

    def _read_others(self, paths: Iterable[str]) -> None:
        """Read files of any size. If there is no room for all, smaller ones come first."""
        sizes = {path: info.st_size for path, info in self.reader.infos(paths).items()}
        for batch in self._batches(sorted(sizes, key=sizes.__getitem__)):
            steps = self.known.steps
            has_room = self.store.stored <= MAX_STORED
            states: dict[str, State] = {}
            for path in batch:
                state = self.reader.read(path, has_room)
                if state:
                    states[path] = state
            recorded = self._record(states, steps)
            if not has_room:
                self.left_out += sum(sizes[path] <= MAX_FILE for path in recorded)
        self._save()

    def _batches(self, paths: list[str]) -> Iterator[list[str]]:
        """Some of the paths at a time, if no tool may change them without a report."""
        for start in range(0, len(paths), BATCH):
            if not self.watch.works:
                self.known.no_tool.wait()
            if self.closing.is_set():
                return
            yield paths[start : start + BATCH]

    def _record(self, states: Mapping[str, State], steps: int) -> list[str]:
        """Take these for the states of unread files, and return their paths.

        Left out are those that a tool may have changed, which has begun after so many `steps`.
        """
        recorded: list[str] = []
        with self.known.lock:
            self.watch.collect()
            if not self.watch.works and steps != self.known.steps:
                return []
            reported = self.watch.reported
            for path, state in states.items():
                is_changed = bool(reported) and is_within(path, reported)
                if path in self.known.unread and not is_changed:
                    self.known.note(path, state)
                    recorded.append(path)
        for path in recorded:
            folder = os.path.dirname(path)
            saved = self._saved.setdefault(folder, {})
            if saved.get(path) != states[path]:
                saved[path] = states[path]
                self._unsaved.add(folder)
        return recorded
