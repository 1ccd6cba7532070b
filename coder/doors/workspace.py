"""The folder that one task works in, and what the task has changed there as a patch.

The state at the start is kept in a git directory next to the folder, not in it: so the patch is
whole whatever the task does with the folder's own repository, commits included.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coder.types import CoderError

# A patch that `git apply` takes, whatever the user's own configuration of git says
PATCH = [
    "diff",
    "--cached",
    "--binary",
    "--full-index",
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--no-renames",
    "--src-prefix=a/",
    "--dst-prefix=b/",
]
ALL_BINARY = "* -diff\n"  # attributes by which each file is shown as binary, in ASCII


class WorkspaceError(CoderError):
    """The folder of a task cannot be made."""


class Workspace:
    """A folder of its own. `folder` is where the task works."""

    def __init__(self, place: Path, name: str) -> None:
        self.folder = place / name
        self.base = place / "base.git"
        self._start = ""  # the tree of the start

    def fill(self, cwd: str, repo: str, commit: str) -> None:
        """Copy a folder, or clone a repository; with neither it is empty. Raises WorkspaceError."""
        if repo:
            _run("git", "clone", "-q", "--", repo, str(self.folder))
        else:
            self.folder.mkdir()
        if commit:
            _run("git", "-C", str(self.folder), "checkout", "-q", "--detach", commit)
        if cwd:
            _run("cp", "-a", "--", f"{cwd}/.", str(self.folder))
        _run("git", "--git-dir", str(self.base), "init", "-q")
        self._start = self._tree()

    def patch(self) -> str:
        """What has changed since the start. Files that git ignores are not in it."""
        self._tree()
        texts = self._files_of_patch()
        if all(is_utf8(text) for text in texts):
            return b"".join(texts).decode()
        (self.base / "info").mkdir(exist_ok=True)
        (self.base / "info/attributes").write_text(ALL_BINARY)
        binaries = self._files_of_patch()
        chosen = [text if is_utf8(text) else binary for text, binary in zip(texts, binaries)]
        return b"".join(chosen).decode()

    def _files_of_patch(self) -> list[bytes]:
        """The parts of the patch, one a file."""
        data = self._git(*PATCH, self._start)
        return re.split(rb"(?m)^(?=diff --git )", data)[1:]

    def _tree(self) -> str:
        """The id of the folder's present state."""
        self._git("add", "-A")
        return self._git("write-tree").decode().strip()

    def _git(self, *words: str) -> bytes:
        where = ["--git-dir", str(self.base), "--work-tree", str(self.folder)]
        return _run("git", *where, *words, folder=self.folder)


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@contextmanager
def workspace(cwd: str, repo: str, commit: str) -> Iterator[Workspace]:
    """A workspace that is removed in the end. Raises WorkspaceError."""
    name = Path(repo or cwd or "workspace").name.removesuffix(".git") or "workspace"
    with tempfile.TemporaryDirectory(prefix="coder-batch-", ignore_cleanup_errors=True) as place:
        made = Workspace(Path(place), name)
        made.fill(cwd, repo, commit)
        yield made


def is_dirty(repo: str) -> bool:
    """Has this repository of this machine changes that no commit has, and that a clone lacks?"""
    if not Path(repo).is_dir():
        return False
    try:
        return bool(_run("git", "-C", repo, "status", "--porcelain", "-uno"))
    except WorkspaceError:
        return False


def _run(*words: str, folder: Path | None = None) -> bytes:
    """The output of a program. Raises WorkspaceError with the last line of what it says."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment = outer | {"GIT_TERMINAL_PROMPT": "0"}
    done = subprocess.run(
        words,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise WorkspaceError(f"{words[0]}: {said[-1] if said else 'failed'}")
    return done.stdout
