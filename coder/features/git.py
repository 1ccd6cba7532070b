"""The git program on a repository of ours: its environment, its time limit, and what it says of trees.

What it leaves out: what lies in the repository (shadow.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coder.abort import TICK, Abort
from coder.tools.process import GRACE
from coder.tools.workspace import escaped
from coder.types import (
    CoderError,
)

AT_ONCE = 50  # contents that are held in memory at a time
SLOW = 1.0  # seconds after which it is asked what git may be waiting for
RULES = ".gitignore"  # git opens it without a look at what it is

Entry = tuple[str, str]  # mode and id of a file, as git has them
Pair = tuple[Entry | None, Entry | None]  # before, after; None: not there


class SnapshotError(CoderError):
    """A snapshot could not be taken or read; the text is for a person."""


class TooLong(SnapshotError):
    """It was not done in the seconds there were."""


class GitFailed(SnapshotError):
    """git ended with an error; `said` is what it wrote about it."""

    def __init__(self, said: bytes) -> None:
        line = said.decode("utf-8", "replace").strip().partition("\n")[0]
        super().__init__(f"git says: {escaped(line).rstrip('.')[:300]}")
        self.said = said


@dataclass(frozen=True)
class State:
    """The workspace at one time. `left_out` are files that are not in the tree: path -> what tells their state."""

    tree: str
    folders: frozenset[str] = frozenset()  # that hold nothing but folders
    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Git:
    """Runs git in a repository that nobody else writes to meanwhile: the lock is the child's too, so that it also holds for
    a child that outlives us."""

    argv: list[str]
    root: Path
    environment: dict[str, str]
    abort: Abort
    deadline: float
    lock: int

    def __call__(self, *argv: str, given: bytes = b"", codes: Iterable[int] = (0,), cwd: Path | None = None, **variables: str) -> bytes:
        """What a git command writes. Raises SnapshotError, GitFailed, Aborted."""
        with tempfile.TemporaryFile() as file:  # a pipe would have to be fed between two looks at the clock
            file.write(given)
            file.seek(0)
            process = subprocess.Popen([*self.argv, *argv], cwd=cwd or self.root, env=self.environment | variables, stdin=file, umask=0o077,
                                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, pass_fds=(self.lock,))
        with process:
            try:
                out, said = self._outcome(process)
            except BaseException:
                _end(process)
                raise
        if process.returncode not in codes:
            raise GitFailed(said)
        return out

    def _outcome(self, process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
        slow = time.monotonic() + SLOW
        while True:
            try:
                return process.communicate(timeout=TICK)
            except subprocess.TimeoutExpired:
                self.abort.check()
            if time.monotonic() > self.deadline:
                raise TooLong("it takes too long in this workspace")
            if time.monotonic() > slow:
                self._refuse_fifo()
                slow = self.deadline

    def _refuse_fifo(self) -> None:
        """Raise SnapshotError where a file of rules is none: git would wait for ever until somebody writes into it."""
        for parent, folders, files in os.walk(self.root):
            folders[:] = [name for name in folders if name != ".git"]
            if RULES in files and stat.S_ISFIFO(os.lstat(os.path.join(parent, RULES)).st_mode):
                raise SnapshotError(f"{escaped(os.path.relpath(os.path.join(parent, RULES), self.root))} is no regular file")
            if time.monotonic() > self.deadline:
                return

    def changes(self, before: str, after: str) -> dict[str, Pair]:
        """The files that differ between two trees."""
        facts = names(self("diff-tree", "-r", "-z", "--raw", "--no-renames", "--no-abbrev", before, after)) if before != after else []
        found: dict[str, Pair] = {}
        for fact, path in zip(facts[::2], facts[1::2]):
            old_mode, mode, old, new, _ = fact.removeprefix(":").split(" ")
            found[path] = _entry(old_mode, old), _entry(mode, new)
        return found

    def entries(self, tree: str) -> dict[str, Entry]:
        """All files of a tree."""
        rows = [fact.partition("\t") for fact in names(self("ls-tree", "-r", "-z", tree))]
        return {path: (fact.split(" ")[0], fact.split(" ")[2]) for fact, _, path in rows}

    def contents(self, ids: Sequence[str]) -> list[bytes]:
        """The contents of files."""
        data, at, found = self("cat-file", "--batch", given="\n".join([*ids, ""]).encode()), 0, list[bytes]()
        for _ in ids:
            begin = data.index(b"\n", at) + 1
            end = begin + int(data[at:begin].split(b" ")[2])
            found.append(data[begin:end])
            at = end + 1
        return found

    def keep(self, *trees: str) -> None:
        """Count these as new, with all that is in them, when old objects are thrown away."""
        self("mktree", "-z", given=listed(f"040000 tree {tree}\t{number}" for number, tree in enumerate(trees)))

    def missing(self, ids: Sequence[str]) -> bool:
        return b" missing\n" in self("cat-file", "--batch-check", given="\n".join([*ids, ""]).encode())


def _entry(mode: str, name: str) -> Entry | None:
    return (mode, name) if mode != "000000" else None


def names(listing: bytes) -> list[str]:
    return [os.fsdecode(name) for name in listing.split(b"\0")[:-1]]


def listed(names: Iterable[str]) -> bytes:
    return b"".join(os.fsencode(name) + b"\0" for name in names)


def _end(process: subprocess.Popen[bytes]) -> None:
    """TERM, at which git takes its lock away, and KILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
