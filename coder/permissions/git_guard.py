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

from coder.tools.workspace import (
    FILE,
    NEW_FILE,
    escaped,
    git_folders,
    make_private,
    read_small_file,
    repository_top,
    temporary_name,
)

NAMES = "commondir", "config", "config.worktree", "info/attributes", "hooks", "remotes", "branches"
GIT_INIT = re.compile(  # the configuration that it writes
    rb"(\[core\]\n|\[extensions\]\n|\t(repositoryformatversion|filemode|bare|logallrefupdates"
    rb"|symlinks|ignorecase|precomposeunicode|objectformat|refstorage) = \w+\n)+"
)
MAX_BYTES = 8 << 20  # of content that is kept of a file or folder
MAX_FILES = 1000

Entry = tuple[int, bytes]  # the mode with the type; a file's content, a link's target
State = dict[str, Entry]  # by path
Changes = dict[str, str]  # by path: "new", "changed" or "removed", and why it stays
TOO_MUCH: Entry = (0, b"")  # stands for a file or folder that cannot be compared


class GitGuard:
    """Guards the repository of `workspace`, its `.coder/`, and the files and folders `ours`.

    Call from one thread at a time. Commands may overlap: until the last ends, changes are theirs.
    From the first command to `close` a record of the files is in coder's folder `data`, locked by
    this process. One that nobody has locked is of a process that was killed; `left` is what differs.
    """

    def __init__(self, workspace: Path, ours: Iterable[Path] = (), data: Path | None = None):
        tops = dict.fromkeys((workspace, repository_top(workspace)))
        self._gits = list(dict.fromkeys(f"{git}/" for top in tops for git in git_folders(top)))
        self._roots = [f"{top}/.git" for top in tops]
        # A HEAD may make a repository of the workspace itself
        self._roots += map(str, (workspace / "HEAD", workspace / ".coder", *ours))
        self._roots += [git + name for git in self._gits for name in NAMES]
        self._commands_running = 0
        self.known = State()  # as it was when the last command ended
        self.unguarded: list[str] = []  # holds too much, or cannot be read
        self._accept()
        name = hashlib.sha256(os.fsencode(workspace)).hexdigest()[:32]
        self._records = data / "guarded" if data else None
        self._name = f"{name}-{os.getpid()}-{os.urandom(4).hex()}.json"
        self._lock = -1  # on the record of this process
        self._of_killed = [*self._records.glob(f"{name}*.json")] if self._records else []
        self._of_killed = [path for path in self._of_killed if not _is_locked(path)]
        self.left = Changes()
        for path in self._of_killed:
            # A command may have written it, where the workspace is the home
            with contextlib.suppress(ValueError, AttributeError, TypeError, RecursionError):
                data_of = json.loads(read_small_file(path) or b"{")
                self.left |= _changes(data_of, _digests(self.known))

    def begin(self) -> Changes:
        """A command begins. Returns what changed since the last one ended; that stays."""
        changes = self.since()
        self._commands_running += 1
        if self._records and (changes or self._lock < 0):
            with contextlib.suppress(OSError):  # then only this process notices changes
                self._write_record(self._records)
        return changes

    def _write_record(self, folder: Path) -> None:
        """Write it, locked before it has its name. Raises OSError."""
        make_private(folder)
        new = folder / temporary_name()
        fd = os.open(new, NEW_FILE, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        with open(fd, "w", closefd=False) as file:
            json.dump(_digests(self.known), file)
        os.replace(new, folder / self._name)
        self._unlock()
        self._lock = fd

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

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
        own = [self._records / self._name] if self._records else []
        for path in own + self._of_killed:
            with contextlib.suppress(OSError):
                path.unlink()
        self._unlock()

    def _accept(self) -> None:
        """Take the files as they are for known; what cannot be compared is not guarded any more."""
        state = self._read()
        self.unguarded += [path for path, entry in state.items() if entry == TOO_MUCH]
        self._roots = [root for root in self._roots if root not in self.unguarded]
        self.known = {path: entry for path, entry in state.items() if entry != TOO_MUCH}

    def _read(self) -> State:
        """What is there; a repository that is gone as a whole may come back, and counts."""
        state = {path: entry for root in self._roots for path, entry in _read_tree(root).items()}
        gone = [git for git in self._gits if not os.path.lexists(f"{git}HEAD")]
        for path in self.known.keys() - state.keys():
            if path.startswith(tuple(gone)):
                state[path] = self.known[path]
        for path in state.keys() - self.known.keys():
            mode, data = state[path]
            if path.endswith("/config") and stat.S_ISREG(mode) and GIT_INIT.fullmatch(data):
                self.known[path] = mode, data  # a command may make a repository
        return state

    def _put_back(self, path: str, old: Entry | None) -> None:
        """Raises OSError."""
        if os.path.isdir(path) and not os.path.islink(path):  # is moved aside
            root = next(each for each in self._roots if f"{path}/".startswith(f"{each}/"))
            os.rename(path, f"{root}.undone-{os.urandom(4).hex()}")
        if old is None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return
        mode, data = old
        os.makedirs(folder := os.path.dirname(path), exist_ok=True)
        temporary = Path(folder, temporary_name())
        if stat.S_ISLNK(mode):
            temporary.symlink_to(os.fsdecode(data))
        else:
            temporary.write_bytes(data)
            temporary.chmod(stat.S_IMODE(mode))
        os.replace(temporary, path)


def _read_tree(root: str) -> State:
    """The files and links at and below a path, but for sample hooks and what is in `.git`."""
    state, waiting, size = State(), [root], 0
    for _ in range(MAX_FILES):
        if not waiting:
            return state
        path = waiting.pop()
        try:
            mode = os.lstat(path).st_mode
        except (OSError, ValueError):
            continue
        if stat.S_ISDIR(mode):
            with contextlib.suppress(OSError):  # another user's
                # A closed one is opened: it could hide something
                if mode & stat.S_IRWXU != stat.S_IRWXU:
                    os.chmod(path, stat.S_IMODE(mode) | stat.S_IRWXU)
                if path.endswith("/.git"):
                    continue
                with os.scandir(path) as listed:
                    paths = (each.path for each in listed if not each.name.endswith(".sample"))
                    waiting += itertools.islice(paths, MAX_FILES)
            continue
        link = os.fsencode(os.readlink(path)) if stat.S_ISLNK(mode) else None
        state[path] = mode, link or read_small_file(path, MAX_BYTES) or b""
        size += len(state[path][1])
        if size >= MAX_BYTES:
            break
    return {root: TOO_MUCH}


def _is_locked(path: Path) -> bool:
    """Whether a process that lives has locked this file; also where it cannot be opened."""
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
    """How two states differ, what holds something before what is in it."""
    paths = sorted({path for path, _ in old.items() ^ new.items()})
    return {
        path: "removed" if path not in new else "changed" if path in old else "new"
        for path in paths
    }


def _digests(state: State) -> dict[str, str]:
    return {path: hashlib.sha256(repr(each).encode()).hexdigest() for path, each in state.items()}


def describe(changes: Changes, workspace: Path) -> str:
    """In one line: `.git/hooks/pre-commit (new), .git/config (changed)`."""
    texts = [f"{path.removeprefix(f'{workspace}/')} ({what})" for path, what in changes.items()]
    more = [f"and {len(texts) - 10} more"] if len(texts) > 10 else []
    return escaped(", ".join(texts[:10] + more))
