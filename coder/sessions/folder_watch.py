"""Changed paths of a workspace, as the kernel reports them."""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import threading
from collections.abc import Iterator

MAX_FOLDERS = 50_000  # that are watched: each takes a kilobyte of the kernel's memory
# modify, attrib, close_write, moved_from, moved_to, create, delete; onlydir, dont_follow
CHANGES = 0x2 | 0x4 | 0x8 | 0x40 | 0x80 | 0x100 | 0x200 | 0x1000000 | 0x2000000
OVERFLOW = 0x4000  # reports were lost
IGNORED = 0x8000  # the folder is gone, and watched no more
EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name after it


class FolderWatch:
    """The paths below `root` that the kernel reports as changed, in the folders that were added.

    `works` is False if it does not report, or has no room for all folders: then any may change.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.works = False
        self.reported: set[str] = set()  # and not taken yet
        self._folders: dict[int, str] = {}
        self._fd = -1

    def begin(self) -> None:
        """Ask the kernel for reports. A process has only so many of these."""
        if sys.platform == "linux":
            import ctypes

            self._libc = ctypes.CDLL(None)
            self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            self.works = self._fd >= 0

    def add(self, folder: str) -> bool:
        """Watch a folder, if it is one. If the kernel has no room, nothing is watched."""
        if not self.works:
            return False
        path = f"{self.root}/{folder}"
        watch = self._libc.inotify_add_watch(self._fd, os.fsencode(path), CHANGES)
        is_added = bool(watch >= 0)
        if is_added:
            self._folders[watch] = folder
            is_refused = len(self._folders) > MAX_FOLDERS
        else:
            is_folder = os.path.isdir(path) and not os.path.islink(path)
            is_refused = is_folder and os.access(path, os.R_OK)
        if is_refused:
            self.close()
        return is_added

    def take(self) -> set[str]:
        """The paths reported since the last call; with "", any path may have changed."""
        if not self.works:
            return {""}
        self.collect()
        taken = self.reported
        self.reported = set()
        return taken

    def collect(self) -> None:
        """Add what the kernel has to report to `reported`."""
        if not self.works:
            return
        for watch, mask, name in self._events():
            folder = self._folders.get(watch)
            if mask & OVERFLOW:
                self.reported.add("")
            elif mask & IGNORED and folder == "":
                self.reported.add("")  # the workspace is removed, and may be made again
                self.close()
            elif folder is not None and name:
                path = f"{folder}/{name}"
                self.reported.add(path.lstrip("/"))

    def _events(self) -> Iterator[tuple[int, int, str]]:
        """The watch, the mask and the name of each report that waits."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            while True:
                data += os.read(self._fd, 1 << 18)
        start = 0
        while start < len(data):
            watch, mask, _, length = EVENT.unpack_from(data, start)
            start += EVENT.size
            name = data[start : start + length].rstrip(b"\0")
            start += length
            yield watch, mask, os.fsdecode(name)

    def close(self) -> None:
        """End the reports. The kernel takes 10 to 20 ms for it, in a thread nobody waits for."""
        self.works = False
        if self._fd >= 0:
            threading.Thread(target=os.close, args=(self._fd,)).start()
        self._fd = -1
