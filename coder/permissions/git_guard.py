"""Put back what a confined command changed in the files that make git or coder run something later.

Landlock cannot take a folder out of a writable one (CVE-2026-25725). So these files are compared
before and after each command. What a confined command changed is put back; what changed meanwhile
is reported and accepted. What is read may be hostile: it is bounded, and links are not followed.
docs/security.md says what is not covered.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from coder.tools.repository import git_folders, repository_top
from coder.tools.workspace import (
    FILE,
    NEW_FILE,
    escaped,
    make_private,
    put_file,
    read_small_file,
    real,
    temporary_name,
)

NAMES = "commondir", "config", "config.worktree", "info/attributes", "hooks", "remotes", "branches"
GIT_INIT = (  # the configuration that it writes
    rb"(\[core\]\n|\[extensions\]\n|\t(repositoryformatversion|filemode|bare|logallrefupdates"
    rb"|symlinks|ignorecase|precomposeunicode|objectformat|refstorage) = \w+\n)+"
)
# What coder itself writes in its folder of data, which may be that of the configuration, too
OWN_DATA = "sessions.db", "snapshots", "guarded", "history", "tour.json"
MAX_BYTES = 8 << 20  # of content that is kept of a file or folder
MAX_FILES = 1000

Entry = tuple[int, bytes]  # the mode with the type; a file's content, a link's target
State = dict[str, Entry]  # by path
Changes = dict[str, str]  # by path: "new", "changed" or "removed", and why it stays
TOO_MUCH: Entry = (0, b"")  # of a file or folder that cannot be compared
NO_LOCK = -1  # instead of a descriptor


class GitGuard:
    """Guards the repository of `workspace`, its `.coder/`, and the files and folders `ours`.

    Call from one thread at a time. Commands may overlap: until the last ends, changes are theirs.
    From the first command to `close` a record of the files is in coder's folder `data`, locked by
    this process. A record without a lock was left by a killed process; `left` lists what changed
    since.
    """

    def __init__(self, workspace: Path, own: Iterable[Path] = (), data: Path | None = None):
        tops = dict.fromkeys((workspace, repository_top(workspace)))
        self._roots = [f"{top}/.git" for top in tops]
        # A HEAD may make a repository of the workspace itself
        self._roots += [str(path) for path in (workspace / "HEAD", workspace / ".coder", *own)]
        self._gits: list[str] = []
        for top in tops:
            for git in git_folders(top):
                if f"{git}/" not in self._gits:
                    self._gits.append(f"{git}/")
                    self._roots += [f"{git}/{name}" for name in NAMES]
        self._commands_running = 0
        self._left_out: tuple[str, ...] = ()
        if data:
            self._left_out = tuple(f"{data}/{name}" for name in OWN_DATA)
        self.known = State()  # as it was when the last command ended
        self.unguarded: list[str] = []  # holds too much, or cannot be read
        self._accept()
        self._record: _Record | None = None
        self.left = Changes()
        if data:
            self._record = _Record(data / "guarded", workspace)
            self.left = self._record.left_by_killed(self.known)

    def begin(self) -> Changes:
        """A command begins. Returns what changed since the last one ended; that stays."""
        changes = self.since()
        self._commands_running += 1
        if self._record and (changes or not self._record.is_written):
            with contextlib.suppress(OSError):  # then only this process notices changes
                self._record.write(self.known)
        return changes

    def end(self, undo: bool = True) -> Changes:
        """A command has ended. Returns what changed since it began, which `undo` puts back."""
        self._commands_running -= 1
        if not undo:
            return self.since()
        changes = _changes(self.known, self._read())
        for path in changes:
            try:
                self._put_back(path, self.known.get(path))
            except OSError as error:
                changes[path] += f"; not put back: {error.strerror}"
        if any("not put back" in what for what in changes.values()):
            self._accept()
        return changes

    def since(self) -> Changes:
        """What changed since the last command ended, perhaps by the user. Reported once."""
        old = self.known
        if not self._commands_running:
            self._accept()
        return _changes(old, self.known)

    def close(self) -> None:
        """The session has ended."""
        if self._record:
            self._record.remove()

    def _accept(self) -> None:
        """Take the files as they are for known; what cannot be compared is not guarded any more."""
        state = self._read()
        self.unguarded += [path for path, entry in state.items() if entry == TOO_MUCH]
        self._roots = [root for root in self._roots if root not in self.unguarded]
        self.known = {path: entry for path, entry in state.items() if entry != TOO_MUCH}

    def _read(self) -> State:
        """What is there; a repository that is gone as a whole may come back, and counts."""
        state = State()
        for root in self._roots:
            state |= _read_tree(root, self._left_out)
        gone = tuple(git for git in self._gits if not os.path.lexists(f"{git}HEAD"))
        for path in self.known.keys() - state.keys():
            if path.startswith(gone):
                state[path] = self.known[path]
        for path in state.keys() - self.known.keys():
            if _is_of_new_repository(path, state[path]):  # which a command may make
                self.known[path] = state[path]
        return state

    def _put_back(self, path: str, old: Entry | None) -> None:
        """Raises OSError."""
        if os.path.isdir(path) and not os.path.islink(path):  # is moved aside
            root = next(root for root in self._roots if f"{path}/".startswith(f"{root}/"))
            os.rename(path, f"{root}.undone-{os.urandom(4).hex()}")
        if old is None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return
        mode, data = old
        target = Path(path)
        put_file(real(target.parent) / target.name, data, mode, sync=False)


class _Record:
    """What is known of a workspace's files, for the next start; in `folder`, a file for each
    process.

    This process locks its own. One without a lock was left by a killed process.
    """

    def __init__(self, folder: Path, workspace: Path) -> None:
        name = hashlib.sha256(os.fsencode(workspace)).hexdigest()[:32]
        self._folder = folder
        self._path = folder / f"{name}-{os.getpid()}-{os.urandom(4).hex()}.json"
        self._lock = NO_LOCK
        self._of_killed = [path for path in folder.glob(f"{name}*.json") if not _is_locked(path)]

    @property
    def is_written(self) -> bool:
        return self._lock != NO_LOCK

    def left_by_killed(self, known: State) -> Changes:
        """What changed since killed processes knew the files."""
        left = Changes()
        for path in self._of_killed:
            # A command may have written it, if the workspace is the home
            with contextlib.suppress(ValueError, AttributeError, TypeError, RecursionError):
                record = json.loads(read_small_file(path) or b"{")
                left |= _changes(record, _digests(known))
        return left

    def write(self, known: State) -> None:
        """Write it, locked before it has its name. Raises OSError."""
        make_private(self._folder)
        new = self._folder / temporary_name()
        fd = os.open(new, NEW_FILE, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        with open(fd, "w", closefd=False) as file:
            json.dump(_digests(known), file)
        os.replace(new, self._path)
        self._unlock()
        self._lock = fd

    def remove(self) -> None:
        """Remove it, and those of killed processes."""
        for path in [self._path, *self._of_killed]:
            with contextlib.suppress(OSError):
                path.unlink()
        self._unlock()

    def _unlock(self) -> None:
        if self.is_written:
            os.close(self._lock)
        self._lock = NO_LOCK


def _is_of_new_repository(path: str, entry: Entry) -> bool:
    """Is this the configuration that `git init` writes?"""
    mode, data = entry
    if not path.endswith("/config") or not stat.S_ISREG(mode):
        return False
    return re.fullmatch(GIT_INIT, data) is not None


def _read_tree(root: str, left_out: tuple[str, ...]) -> State:
    """The files and links at and below a path.

    Left out are sample hooks, what is in `.git`, and paths that begin with one of `left_out`.
    """
    state = State()
    waiting = [root]
    size = 0
    for _ in range(MAX_FILES):
        if not waiting:
            return state
        path = waiting.pop()
        if path.startswith(left_out):
            continue
        try:
            mode = os.lstat(path).st_mode
        except (OSError, ValueError):
            continue
        if stat.S_ISDIR(mode):
            with contextlib.suppress(OSError):  # another user's
                waiting += _entries_of(path, mode)
            continue
        if stat.S_ISLNK(mode):
            content = os.fsencode(os.readlink(path))
        else:
            content = read_small_file(path, MAX_BYTES) or b""
        state[path] = mode, content
        size += len(content)
        if size >= MAX_BYTES:
            break
    return {root: TOO_MUCH}


def _entries_of(folder: str, mode: int) -> list[str]:
    """The paths in a folder. A closed one is opened: it could hide something. Raises OSError."""
    if mode & stat.S_IRWXU != stat.S_IRWXU:
        os.chmod(folder, stat.S_IMODE(mode) | stat.S_IRWXU)
    if folder.endswith("/.git"):
        return []
    with os.scandir(folder) as entries:
        paths = (entry.path for entry in entries if not entry.name.endswith(".sample"))
        return list(itertools.islice(paths, MAX_FILES))


def _is_locked(path: Path) -> bool:
    """Whether a process that lives has locked this file; also if it cannot be opened."""
    try:
        fd = os.open(path, FILE)
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(fd)


def _changes(old: Mapping[str, object], new: Mapping[str, object]) -> Changes:
    """How two states differ, a folder before what is in it."""
    changes = Changes()
    for path in sorted({path for path, _ in old.items() ^ new.items()}):
        if path not in new:
            changes[path] = "removed"
        elif path in old:
            changes[path] = "changed"
        else:
            changes[path] = "new"
    return changes


def _digests(state: State) -> dict[str, str]:
    return {path: hashlib.sha256(repr(entry).encode()).hexdigest() for path, entry in state.items()}


def describe(changes: Changes, workspace: Path) -> str:
    """In one line: `.git/hooks/pre-commit (new), .git/config (changed)`."""
    texts = [f"{path.removeprefix(f'{workspace}/')} ({what})" for path, what in changes.items()]
    if len(texts) > 10:
        texts[10:] = [f"and {len(texts) - 10} more"]
    return escaped(", ".join(texts))
