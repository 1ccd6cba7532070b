"""What is known of each file of a workspace, as it was at the last look."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection

from coder.sessions.file_states import INODE_BITS, State, is_within, stamp_of


class KnownFiles:
    """The files of a workspace, each in one of three states.

    `in_git`: git has it as it is, with the permissions `usual_mode`, or those of `modes`, so that a
    repository of 100,000 files is covered without reading one. `read`: its content is in the store.
    `unread`: if it changes now, it is lost what it was; the number is its stamp, or 0 if changes
    are reported.

    `is_surveyed`: is it known which files there are? `is_checked`: is it certain that git has files
    in this form? `has_modes`: and with these permissions? `steps`: how often a tool has begun.
    While one works `no_tool` is not set: if changes are not reported, nothing is read then.
    `is_needed` is set when a tool waits for the files, or the session ends.

    `inodes` are those of the unread files, and of the files in git as soon as these are checked.
    `folders` are watched. The kernel may not report changes of files that are `polled`. Whoever
    uses this from two threads holds the `lock`.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.is_surveyed = False
        self.is_checked = threading.Event()
        self.has_modes = False
        self.steps = 0
        self.is_needed = threading.Event()
        self.no_tool = threading.Event()
        self.no_tool.set()
        self.in_git: dict[str, str] = {}  # blobs
        self.usual_mode = 0
        self.modes: dict[str, int] = {}
        self.read: dict[str, State] = {}
        self.unread: dict[str, int] = {}
        self.inodes: dict[str, int] = {}
        self.folders: set[str] = set()
        self.polled: set[str] = set()

    def state(self, path: str) -> State | None:
        """A file at the last look; None if there was none."""
        if path in self.in_git:
            mode = self.modes.get(path, self.usual_mode)
            return State(
                mode,
                self.in_git[path],
                stamp=0,
                inode=self.inodes.get(path, 0) & INODE_BITS,
            )
        if path in self.unread:
            return State(
                mode=0,
                blob="",
                stamp=self.unread[path],
                inode=self.inodes.get(path, 0) & INODE_BITS,
            )
        return self.read.get(path)

    def is_same(self, path: str, info: os.stat_result | None) -> bool:
        """Is a file with these facts what it was?"""
        state = self.state(path)
        if state is None or info is None:
            return state is None and info is None
        return state.stamp == stamp_of(info)

    def note(self, path: str, state: State) -> None:
        """Take this for what a file is now."""
        self.forget(path)
        self.read[path] = state
        if state.link:
            self.polled.add(path)

    def forget(self, path: str) -> None:
        self.in_git.pop(path, None)
        self.unread.pop(path, None)
        self.read.pop(path, None)
        self.polled.discard(path)

    def at(self, places: set[str]) -> set[str]:
        """The files at these places, and those below the ones that were folders."""
        files = {place for place in places if self.state(place)}
        folders = places & self.folders
        if not folders:
            return files
        for paths in self.files():
            for path in paths:
                if is_within(path, folders):
                    files.add(path)
        return files

    def forget_folders(self, places: set[str]) -> None:
        """Forget the folders at and below these places."""
        if self.folders.isdisjoint(places):
            return
        for folder in list(self.folders):
            if is_within(folder, places):
                self.folders.discard(folder)

    def files(self) -> list[Collection[str]]:
        """All files, by their states."""
        return [self.in_git, self.read, self.unread]

    def paths(self) -> list[Collection[str]]:
        """All that is covered, whatever the rules of git say by now."""
        return [*self.files(), self.folders]
