"""Restoring: files of the workspace written back as they were, where nobody else has changed them since.

What it leaves out: what has to be written (snapshots.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coder.features.git import AT_ONCE, Entry, Pair
from coder.features.shadow import bare
from coder.tools.folder import make_folder, make_link, remove, remove_folder, set_executable
from coder.tools.workspace import escaped, replace
from coder.types import ToolError


@dataclass
class Way:
    """What has to become of the files: path -> (as it has to be now, as it will be), and the empty folders of the goal."""

    files: dict[str, Pair] = field(default_factory=dict)
    torn: set[str] = field(default_factory=set)  # changed by somebody else between two steps
    make: set[str] = field(default_factory=set)
    remove: set[str] = field(default_factory=set)
    unsure: set[str] = field(default_factory=set)  # of the files: changed while a tool ran that does not say what it changes
    others: set[str] = field(default_factory=set)  # not of the files: changed by somebody else for certain


class Writer:
    """Writes into a workspace, never through a link, also one that comes meanwhile, and only where nothing else is in the way."""

    def __init__(self, workspace: Path, way: Way, now: Mapping[str, Entry]) -> None:
        self.workspace, self.way, self.now = workspace, way, now
        self.todo = {path: pair for path, pair in way.files.items() if now.get(path) != pair[1]}
        self.removed = {path for path, (_, goal) in self.todo.items() if goal is None}

    def conflicts(self) -> list[str]:
        """The paths that are not as the agent, or the undoing of it, has left them."""
        return sorted(path for path, (expected, _) in self.todo.items()
                      if path in self.way.torn or self.now.get(path) != expected or self._in_the_way(path))

    def _in_the_way(self, path: str) -> bool:
        """Is there something at a path, or above it, that is no file of ours?"""
        parts = path.split("/")
        for at in range(1, len(parts)):
            above = "/".join(parts[:at])
            if _is_other(self.workspace / above):
                return above not in self.removed  # what lies behind a link that goes is in nobody's way
        target = self.workspace / path
        if path in self.now or not os.path.lexists(target):
            return False
        return _is_other(target) or any(found not in self.removed for found in _files(target, self.workspace))

    def write(self, contents: Callable[[Sequence[str]], list[bytes]]) -> None:
        """Do it. Raises OSError, ToolError: then part of it is done, and doing it again does the rest."""
        for path in self.removed:
            with contextlib.suppress(FileNotFoundError):
                remove(self._checked(path))
        wanted = [(path, old, goal) for path, (old, goal) in sorted(self.todo.items()) if goal]
        for start in range(0, len(wanted), AT_ONCE):
            part = wanted[start:start + AT_ONCE]
            for (path, old, goal), data in zip(part, contents([goal[1] for _, _, goal in part])):
                self._write(self._checked(path), old, goal, data)
        self._tidy()

    def _checked(self, path: str) -> Path:
        target = self.workspace / path
        if not is_relative(path) or os.path.realpath(target.parent) != str(target.parent):
            raise ToolError(f"{escaped(path)} would be reached through a link")
        return target

    def _write(self, target: Path, old: Entry | None, goal: Entry, data: bytes) -> None:
        mode, name = goal
        if target.is_dir() and not target.is_symlink():
            for folder in sorted(bare(target), key=len, reverse=True):
                remove_folder(Path(folder))
        if mode == "120000":
            make_link(target, data)
            return
        if target.is_symlink() or not (old and old[1] == name and old[0] != "120000"):
            replace(target, data)
        set_executable(target, mode == "100755")

    def _tidy(self) -> None:
        """Folders: those that came with what was removed go, as far as they are empty; those of the goal come."""
        parents = {str(parent) for path in self.removed for parent in Path(path).parents if str(parent) != "."}
        for folder in sorted((parents | self.way.remove) - self.way.make, key=len, reverse=True):
            with contextlib.suppress(OSError, ToolError):
                remove_folder(self._checked(folder))
        for folder in sorted(self.way.make):
            with contextlib.suppress(NotADirectoryError, ToolError):
                if not os.path.lexists(self.workspace / folder):  # what stands there, a link that leads nowhere too, stays
                    make_folder(self._checked(folder))


def _is_other(target: Path) -> bool:
    """Is it there, and no folder?"""
    return os.path.lexists(target) and (target.is_symlink() or not target.is_dir())


def _files(folder: Path, workspace: Path) -> Iterator[str]:
    """All in a folder that is no folder itself, relative to the workspace."""
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        yield from (os.path.relpath(os.path.join(parent, name), workspace) for name in [*files, *links])


def is_relative(path: str) -> bool:
    return bool(path) and not path.startswith("/") and ".." not in path.split("/")
