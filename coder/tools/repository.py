"""The git repository of a workspace: its top folder, and the folders that git keeps its data in."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from coder.tools.workspace import read_small_file, real

MAX_CONFIG = 1 << 20  # bytes
MAX_PATH = 1 << 16  # bytes of a file that holds a path
GITDIR = "gitdir: "
WORKTREE = r"(?m)^\s*worktree = ([^\0\n]+)$"


def repository_top(folder: Path, counts: Callable[[Path], bool] = os.path.lexists) -> Path:
    """The folder that holds `.git`: this folder, or the first above it whose `.git` `counts`.

    The folder itself if there is no such folder.
    """
    if os.path.lexists(folder / ".git"):
        return folder
    for parent in folder.parents:
        if counts(parent / ".git"):
            return parent
    return folder


def git_folders(top: Path) -> tuple[Path, Path]:
    """(the folder that `.git` is or names, the repository's own folder), links resolved.

    `.git` names another folder in a linked worktree and in a submodule. Only in a linked worktree
    the two differ: all worktrees share the repository's own folder.
    What `.git` names may be hostile: a caller that reads or writes there checks it itself.
    """
    folder = top / ".git"
    pointer = read_path(folder)
    if pointer.startswith(GITDIR):
        folder = top / pointer.removeprefix(GITDIR)
    folder = real(folder)
    shared = read_path(folder / "commondir")
    if not shared:
        return folder, folder
    return folder, real(folder / shared)


def writable_git_folders(workspace: Path) -> list[Path]:
    """The folders that git has to write to, if they belong to the workspace.

    They may be in a folder above, or of a linked worktree or a submodule. What the workspace says
    is believed only if the other side points back.
    """
    top = repository_top(workspace)
    pointer = top / ".git"
    folder, shared = git_folders(top)
    if not os.path.isfile(folder / "HEAD"):
        return []
    if folder.parent == shared / "worktrees" and read_path(folder / "gitdir") == str(pointer):
        return [shared]
    if folder == pointer or _worktree_of(folder) == top:
        return [folder]
    return []


def _worktree_of(folder: Path) -> Path | None:
    """The worktree that the configuration in a git folder names."""
    config = os.fsdecode(read_small_file(folder / "config", MAX_CONFIG) or b"")
    worktree = re.search(WORKTREE, config)
    return real(folder / worktree[1]) if worktree else None


def read_path(file: Path) -> str:
    """The path in a small file, exactly as git reads it; "" if there is no such file."""
    data = read_small_file(file, MAX_PATH) or b""
    path, _, _ = data.rstrip(b"\r\n").partition(b"\0")
    return os.fsdecode(path)
