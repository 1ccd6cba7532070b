"""Restore plan: what runs have changed together, and how it is taken back or done again."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coder.sessions.file_changes import Pair, WorkspaceFiles
from coder.sessions.snapshot_repo import SnapshotError, SnapshotRepo
from coder.tools.workspace import folder_of, remove, temporary_name
from coder.types import ToolError

Step = dict[str, Any]  # as RunSnapshot has it


@dataclass
class NetChange:
    """What steps have changed together, from before the first to after the last."""

    files: dict[str, Pair] = field(default_factory=dict)
    torn: set[str] = field(default_factory=set)  # changed by the user between two steps


def net_change(steps: Iterable[Step]) -> NetChange:
    """Raises SnapshotError where a step is not known, or no step."""
    net = NetChange()
    for step in steps:
        if "problem" in step:
            raise SnapshotError(step["problem"])
        for path, pair in step.get("files", {}).items():
            old, new = (entry and (entry[0], entry[1]) for entry in pair)  # lists, out of JSON
            first, last = net.files.get(path, (old, old))
            net.files[path] = first, new
            net.torn |= {path} if last != old else set()
    if not all(map(is_relative, net.files)):
        raise SnapshotError("a record names a path outside of the workspace")
    return net


def is_relative(path: str) -> bool:
    return bool(path) and not path.startswith("/") and ".." not in path.split("/")


class RestorePlan:
    """Writes files as they were, where nothing else is in the way, and never through a link.

    `files` is what has to be written: path -> (as it must be now, as it will be). Folders that
    become empty go, as with git; an empty folder is neither kept nor made.
    """

    def __init__(self, workspace: WorkspaceFiles, net: NetChange, back: bool) -> None:
        self.root, self.torn = Path(workspace.repo.root), net.torn
        self.now = {path: workspace.entry(path) for path in net.files}
        pairs = {path: pair[::-1] if back else pair for path, pair in net.files.items()}
        self.files = {path: pair for path, pair in pairs.items() if self.now[path] != pair[1]}
        self.removed = {path for path, (_, goal) in self.files.items() if goal is None}

    def conflicts(self) -> list[str]:
        """Paths that are not as the run, or the undoing of it, has left them."""
        return sorted(
            path
            for path, (expected, _) in self.files.items()
            if path in self.torn or self.now[path] != expected or self._is_blocked(path)
        )

    def _is_blocked(self, path: str) -> bool:
        """Is something at a path, or above it, that is no file of the plan?"""
        for above in list(Path(path).parents)[-2::-1]:
            if os.path.lexists(self.root / above) and not _is_folder(self.root / above):
                # What is behind a link that goes is no matter
                return str(above) not in self.removed
        target = self.root / path
        if self.now[path] or not os.path.lexists(target):
            return False
        return not _is_folder(target) or not self.removed.issuperset(self._files_below(target))

    def _files_below(self, folder: Path) -> Iterator[str]:
        for parent, folders, files in os.walk(folder):
            links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
            for name in (*files, *links):
                yield os.path.relpath(os.path.join(parent, name), self.root)

    def write(self, repo: SnapshotRepo) -> None:
        """Write. Raises OSError, ToolError, SnapshotError: some is done, and to do it again does the rest."""
        goals = sorted((path, goal) for path, (_, goal) in self.files.items() if goal)
        blobs = repo.blobs({blob for _, (_, blob) in goals})  # nothing is done where one is missing
        for path in self.removed:
            with contextlib.suppress(FileNotFoundError):
                remove(self.root / path)
        emptied = {self.root / above for path in self.removed for above in Path(path).parents}
        _remove_empty(sorted(emptied - {self.root}, reverse=True))
        for path, (mode, blob) in goals:
            if _is_folder(self.root / path):  # without a file, or there is a conflict
                inner = [Path(each) for each, *_ in os.walk(self.root / path, topdown=False)]
                _remove_empty(inner)
            put_file(self.root / path, mode, blobs[blob])


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError, ToolError):
            remove(folder, os.rmdir)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def put_file(target: Path, mode: int, data: bytes) -> None:
    """Put a file or link in its place at once, in a folder behind no link. Raises OSError, ToolError."""
    name = temporary_name()
    with folder_of(target, make=True) as folder:
        try:
            if stat.S_ISLNK(mode):
                os.symlink(data, os.fsencode(name), dir_fd=folder)
            else:
                _write_file(folder, name, data, like=target.name, mode=stat.S_IMODE(mode))
            os.replace(name, target.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)
            raise


def _write_file(folder: int, name: str, data: bytes, *, like: str, mode: int) -> None:
    """A new file with the owner of the one that is `like` it, where there is one."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(name, flags, 0o600, dir_fd=folder), "wb") as file:
        file.write(data)
        with contextlib.suppress(OSError):
            old = os.stat(like, dir_fd=folder, follow_symlinks=False)
            os.fchown(file.fileno(), old.st_uid, old.st_gid)
        os.fchmod(file.fileno(), mode)
