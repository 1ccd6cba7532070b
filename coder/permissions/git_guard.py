"""Put back what a confined command changed in the files that make git or coder run something later.

A sandbox ends with its command. A hook or a setting that the command left in `.git` would run
later and outside of it, and Landlock cannot take a folder out of a writable one (CVE-2026-25725).
So these files are compared before and after each command: the repository's configuration, hooks
and attributes, `.coder/`, and coder's own folders where commands can write to them. Any change by
a confined command is put back; a change by others is reported and accepted. A repository that a
command creates keeps the configuration of `git init`, and gets no hooks.

What is read may be hostile: it is bounded, links are not followed, and a folder in the way is
moved aside. Not covered, as docs/security.md says: submodules, other worktrees, nested repositories, and
files that a hook or the configuration names.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from coder.tools.folder import temporary_name
from coder.tools.repository import (
    git_folders,
    read_path,
    read_small_file,
    repository_top,
    resolved,
)
from coder.tools.workspace import escaped

NAMES = [
    "commondir",
    "config",
    "config.worktree",
    "info/attributes",
    "hooks",
    "remotes",
    "branches",
]
GIT_INIT = re.compile(  # the configuration that it writes
    rb"\[core\]\n(\t(repositoryformatversion|filemode|bare|logallrefupdates|symlinks|ignorecase"
    rb"|precomposeunicode) = (0|true|false)\n)+"
)
MAX_BYTES = 8 << 20  # of content that is kept, in a file or a folder
MAX_ENTRIES = 1000  # in a folder and those below it
MAX_LISTED = 10
ROUNDS = 4  # what is put back may uncover more: a folder that was closed

Entry = tuple[int, bytes]  # the mode with the type; a file's content, a link's target
UNREADABLE = 0  # the mode of what cannot be compared; its content is the reason
State = dict[str, Entry]  # by path; a Path would cost more than the comparison
Changes = dict[str, str]  # by path: "new", "changed" or "removed", and why it stays


class GitGuard:
    """Guards the repository of `workspace`, its `.coder/`, and the files and folders `ours`.

    Call from one thread at a time. Commands may overlap: until the last ends, changes are theirs.
    Where `data`, coder's data folder, is given, a record of the files is there from the first
    command to `close`. One that is there already is of a process that was killed before it could
    put something back; `left` is what differs from it.
    """

    def __init__(
        self, workspace: Path, ours: Iterable[Path] = (), data: Path | None = None
    ) -> None:
        self.workspace = workspace
        # A HEAD may make a repository of the workspace itself
        self._ours = [str(each) for each in (workspace / "HEAD", workspace / ".coder", *ours)]
        self._running = 0
        self.known = State()  # as it was when the last command ended
        self._accept()
        name = hashlib.sha256(os.fsencode(workspace)).hexdigest()[:32]
        self._record = data / "guarded" / f"{name}.json" if data else None
        self._recorded = State()
        self.left = self._differences() if self._record else Changes()

    @property
    def unguarded(self) -> Changes:
        """What cannot be compared, and why."""
        return {path: data.decode() for path, (mode, data) in self.known.items() if not mode}

    def begin(self) -> Changes:
        """A command begins. Returns what changed since the last one ended; that stays."""
        changes = self.since()
        self._running += 1
        if self._record and self.known != self._recorded:
            self._write_record(self._record)
        return changes

    def since(self) -> Changes:
        """What changed since the last command ended, perhaps by the user. Reported once."""
        if self._running or (state := self._read()) == self.known:
            return {}
        changes = self._changes(state)
        self._accept()
        return changes

    def end(self, allowed: bool = False) -> Changes:
        """A command has ended. Returns its changes, which are put back unless `allowed`."""
        self._running -= 1
        if allowed:
            return self._changes(self._read()) if self._running else self.since()
        found, failed = Changes(), Changes()
        for _ in range(ROUNDS):
            state = self._read()
            todo = {path: what for path, what in self._changes(state).items() if path not in failed}
            found = todo | found
            for path, what in todo.items():
                try:
                    self._put_back(path, self.known.get(path), state.get(path))
                except FileNotFoundError:  # gone with its folder
                    continue
                except OSError as error:
                    failed[path] = f"{what}; not put back: {error.strerror or error}"
            if not todo:
                break
        else:
            failed |= {
                path: f"{what}; not put back: it changes again" for path, what in todo.items()
            }
        if state != self.known:
            self._accept()
        return dict(sorted((found | failed).items()))

    def close(self) -> None:
        """The session has ended."""
        self._recorded = State()
        if self._record:
            with contextlib.suppress(OSError):
                self._record.unlink()
                self._record.parent.rmdir()

    def _write_record(self, path: Path) -> None:
        """Where that fails, changes are noticed only as long as this process lives."""
        with contextlib.suppress(OSError):
            for folder in (path.parent.parent, path.parent):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.write_text(json.dumps(_digests(self.known)))
            self._recorded = self.known

    def _differences(self) -> Changes:
        """How the files differ from the record of an earlier session."""
        try:
            old = json.loads(read_small_file(str(self._record), MAX_BYTES) or b"{}")
            new = _digests(self.known) if old else {}
            paths = {path for path, _ in old.items() ^ new.items()}
            return {path: _describe(path in old, new.get(path)) for path in sorted(paths)}
        except (ValueError, AttributeError, TypeError):  # cut off, or not ours
            return {}

    def _accept(self) -> None:
        """Take the files as they are for known, those of the repository that is there now.

        A repository that is gone as a whole may come back.
        """
        tops = dict.fromkeys((self.workspace, repository_top(self.workspace)))
        gits = dict.fromkeys(str(each) for top in tops for each in git_folders(top))
        if os.path.lexists(self._ours[0]) and not os.path.lexists(self.workspace / ".git"):
            gits[str(self.workspace)] = None
        self._roots = [f"{top}/.git" for top in tops] + self._ours
        self._roots += [f"{git}/{name}" for git in gits for name in NAMES]
        self._gits, state = list(gits), self._read()
        gone = (path for path in self.known if path not in state and self._is_gone(path))
        self.known = {path: self.known[path] for path in gone} | state

    def _read(self) -> State:
        return {path: entry for root in self._roots for path, entry in _read_tree(root).items()}

    def _changes(self, state: State) -> Changes:
        """How the state differs from what is known, folders before what is in them."""
        changes = Changes()
        for path in sorted(self.known.keys() | state.keys()):
            old, new = self.known.get(path), state.get(path)
            if new is None:
                is_change = not self._is_gone(path)
            else:
                is_change = old != new if old else not _is_harmless(path, new)
            if is_change:
                changes[path] = _describe(bool(old), new)
        return changes

    def _is_gone(self, path: str) -> bool:
        """Whether it belongs to a repository that is not there any more."""
        gits = [git for git in self._gits if f"{path}/".startswith(f"{git}/")]
        return any(not os.path.lexists(f"{git}/HEAD") for git in gits)

    def _put_back(self, path: str, old: Entry | None, new: Entry | None) -> None:
        """Raises OSError."""
        old_kind, new_kind = (stat.S_IFMT(each[0]) if each else None for each in (old, new))
        if new_kind == UNREADABLE or (new_kind == stat.S_IFDIR != old_kind):
            root = max((each for each in self._roots if f"{path}/".startswith(f"{each}/")), key=len)
            os.rename(path, f"{root}.undone-{os.urandom(4).hex()}")
        elif new and old_kind in (None, stat.S_IFDIR) and new_kind != stat.S_IFDIR:
            os.unlink(path)
        if old is None:
            return
        if old_kind == UNREADABLE:
            raise OSError(old[1].decode())
        if old_kind != stat.S_IFDIR:
            _write(Path(path), old)
            return
        if path not in self._gits:  # an empty one would be in the way of the real one
            os.makedirs(path, exist_ok=True)
        os.chmod(path, stat.S_IMODE(old[0]))


def _read_tree(root: str) -> State:
    """What is at and below a path, but for sample hooks; of `.git` the folder alone."""
    state, waiting, size = State(), [root], 0
    while waiting:
        path = waiting.pop()
        try:
            mode, data = os.lstat(path).st_mode, b""
            if stat.S_ISLNK(mode):
                data = os.fsencode(os.readlink(path))
        except (OSError, ValueError):
            continue
        if stat.S_ISDIR(mode) and not root.endswith("/.git"):
            try:
                with os.scandir(path) as listed:
                    inside = [each.path for each in itertools.islice(listed, MAX_ENTRIES)]
            except OSError:
                return {root: (UNREADABLE, b"cannot be read")}
            waiting += [each for each in inside if not each.endswith(".sample")]
            size += MAX_BYTES if len(inside) == MAX_ENTRIES else 0
        elif stat.S_ISREG(mode):
            data = read_small_file(path, MAX_BYTES) or b""
        elif not stat.S_ISLNK(mode) and not stat.S_ISDIR(mode):
            return {root: (UNREADABLE, b"holds what is no file")}
        state[path] = mode, data
        size += len(data)
        if len(state) + len(waiting) >= MAX_ENTRIES or size >= MAX_BYTES:
            return {root: (UNREADABLE, b"holds too much")}
    return state


def _is_harmless(path: str, new: Entry) -> bool:
    """Whether it may be new: an empty folder, or the configuration that `git init` writes."""
    mode, data = new
    is_config = stat.S_ISREG(mode) and path.endswith("/config")
    return stat.S_ISDIR(mode) or (is_config and bool(GIT_INIT.fullmatch(data)))


def _write(path: Path, entry: Entry) -> None:
    """Replace whatever file or link is there, at once. Raises OSError."""
    mode, data = entry
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(temporary_name())
    try:
        if stat.S_ISLNK(mode):
            temporary.symlink_to(os.fsdecode(data))
        else:
            temporary.write_bytes(data)
            temporary.chmod(stat.S_IMODE(mode))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _describe(had: bool, new: Entry | str | None) -> str:
    if isinstance(new, tuple) and new[0] == UNREADABLE:
        return new[1].decode()
    return "removed" if new is None else "changed" if had else "new"


def describe(changes: Changes, workspace: Path) -> str:
    """In one line: `.git/hooks/pre-commit (new), .git/config (changed)`."""
    texts = [f"{path.removeprefix(f'{workspace}/')} ({what})" for path, what in changes.items()]
    more = len(texts) - MAX_LISTED
    return escaped(", ".join(texts[:MAX_LISTED] + ([f"and {more} more"] if more > 0 else [])))


def _digests(state: State) -> dict[str, str]:
    return {path: hashlib.sha256(repr(each).encode()).hexdigest() for path, each in state.items()}


def writable_git_folders(workspace: Path) -> list[Path]:
    """The folders that git needs to write to in a workspace, where they belong to it: in a folder
    above, or of a linked worktree or a submodule. What the workspace says is believed only where
    the other place points back."""
    top = repository_top(workspace)
    pointer, folders = top / ".git", git_folders(top)
    folder, shared = folders[0], folders[-1]
    if not os.path.isfile(folder / "HEAD"):
        return []
    if folder.parent == shared / "worktrees" and read_path(folder / "gitdir") == str(pointer):
        return [shared]
    config = os.fsdecode(read_small_file(folder / "config", MAX_BYTES) or b"")
    worktree = re.search(r"^\s*worktree = ([^\0\n]+)$", config, re.M)
    leads_back = worktree is not None and resolved(folder / worktree[1]) == top
    return [folder] if folder == pointer or leads_back else []
