"""Reads files of a workspace into the store of undo."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

from coder.sessions.blobs import MAX_STORED, BlobStore
from coder.sessions.file_states import (
    MAX_FILE,
    Entry,
    State,
    content_in,
    info_at,
    opened,
    state_from,
)
from coder.sessions.git import blob_id

SMALL = 50_000  # bytes of files that are read before the others


class FileReader:
    """Reads files below `root`; their contents go to the `store`, as long as there is room."""

    def __init__(self, root: str, store: BlobStore) -> None:
        self.root = root
        self.store = store

    def state_now(self, path: str) -> State | None:
        """What is at a path, with its content in the store; None if it is no file."""
        if not self._is_file(path):
            return None
        # Steps may store as much again as the first look
        has_room = self.store.stored <= 2 * MAX_STORED
        return self.read(path, has_room)

    def entry_now(self, path: str) -> Entry | None:
        """What is at a path; nothing is stored."""
        if not self._is_file(path):
            return None
        try:
            data, info = self._content(path)
        except OSError:
            return self._unkept(path)
        return state_from(info, blob_id(data)).entry

    def read(self, path: str, has_room: bool) -> State | None:
        """A file that was listed, with its content in the store if there is room."""
        if not has_room:
            return self._unkept_state(path)
        try:
            data, info = self._content(path)
        except OSError:
            return self._unkept_state(path)
        blob = self.store.add(data)
        return state_from(info, blob)

    def read_small(self, folder: int, name: str) -> State:
        """A file of an opened folder, with its content in the store. Raises OSError."""
        data, info = content_in(folder, name, SMALL)
        blob = self.store.add(data)
        return state_from(info, blob)

    def _content(self, path: str) -> tuple[bytes, os.stat_result]:
        folder, name = os.path.split(path)
        with opened(self.root, folder) as fd:
            return content_in(fd, name, MAX_FILE)

    def _is_file(self, path: str) -> bool:
        info = info_at(self.root, path)
        return info is not None and not stat.S_ISDIR(info.st_mode)

    def _unkept(self, path: str) -> Entry | None:
        state = self._unkept_state(path)
        return state.entry if state else None

    def _unkept_state(self, path: str) -> State | None:
        """The state of a file whose content is not kept; None if it is gone."""
        info = self.infos([path]).get(path)
        return state_from(info, blob="") if info else None

    def infos(self, paths: Iterable[str]) -> dict[str, os.stat_result]:
        """Facts of the files that are still there."""
        infos: dict[str, os.stat_result] = {}
        for path in paths:
            try:
                infos[path] = os.lstat(f"{self.root}/{path}")
            except OSError:
                continue
        return infos
