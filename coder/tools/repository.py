"""Find the git repository that a folder belongs to, without starting git.

What is read may be hostile: only small regular files are, and links to them are not followed. A
caller that trusts the answer, because it reads or writes there, checks it itself.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

MAX_POINTER = 1 << 16  # bytes of a file that names a folder


def repository_top(folder: Path, counts: Callable[[Path], bool] = os.path.lexists) -> Path:
    """The folder that holds `.git`: this folder, or the first above it whose `.git` `counts`.

    Where there is none, the folder itself.
    """
    if os.path.lexists(folder / ".git"):
        return folder
    return next((each for each in folder.parents if counts(each / ".git")), folder)


def git_folders(top: Path) -> list[Path]:
    """The folder that `.git` is or names (of a linked worktree or a submodule), links resolved.

    For a linked worktree also the repository's own folder, which all worktrees share; it is last.
    """
    pointer = read_path(top / ".git")
    leads = pointer.startswith("gitdir:")
    named = top / pointer.removeprefix("gitdir:").strip() if leads else top / ".git"
    folder = resolved(named)
    shared = read_path(folder / "commondir")
    return [folder, resolved(folder / shared)] if shared else [folder]


def read_path(file: Path) -> str:
    """The path that is the text of a small file; "" where there is none."""
    text = os.fsdecode(read_small_file(file, MAX_POINTER) or b"").strip()
    return "" if "\0" in text else text


def resolved(path: Path) -> Path:
    """The path without links; unlike Path.resolve it never raises."""
    return Path(os.path.realpath(path))


def read_small_file(path: str | os.PathLike[str], most: int) -> bytes | None:
    """At most `most` bytes of a regular file; None where there is none that can be read.

    Links are not followed, and opening does not wait for the other end of a pipe.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        return os.read(fd, most) if stat.S_ISREG(os.fstat(fd).st_mode) else None
    except OSError:
        return None
    finally:
        os.close(fd)
