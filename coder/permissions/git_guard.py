"""Put back what a command changed in the files that make git or coder run or obey something later.

A sandbox ends with its command. A hook or a setting that the command left in `.git` would run
later, outside of it, and Landlock cannot exclude a folder from a writable one. So these files are
compared before and after each command, whether or not they existed before (CVE-2026-25725): the
repository's configuration, hooks and attributes, `.coder/`, and coder's own folders where commands
can write to them. Any change by a confined command is put back; a change by anybody else is
accepted and reported. A repository that a command creates keeps the configuration of `git init`,
and gets no hooks.

What is read may be hostile: it is bounded in size, links are not followed, and a folder in the way
is moved aside, not emptied. Not covered, as the README says: submodules, other worktrees, nested
repositories, and files that a hook or the configuration names.
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
from typing import NamedTuple

from coder.tools.folder import temporary_name
from coder.tools.repository import (
    git_folders,
    read_path,
    read_small_file,
    repository_top,
    resolved,
)
from coder.tools.workspace import escaped

OLD_URLS = ("remotes", "branches")  # where git looks for remotes that its configuration lacks
NAMES = ("commondir", "config", "config.worktree", "info/attributes", "hooks", *OLD_URLS)
GIT_INIT = re.compile(  # the configuration that it writes
    rb"\[core\]\n(\t(repositoryformatversion|filemode|bare|logallrefupdates|symlinks|ignorecase"
    rb"|precomposeunicode) = (0|true|false)\n)+"
)
MAX_FILE, MAX_TREE = 1 << 20, 8 << 20  # bytes of content that are kept
MAX_ENTRIES = 1000  # in a folder and those below it
MAX_LISTED = 10
ROUNDS = 4  # what is put back may uncover more: a folder that was closed


class Entry(NamedTuple):
    """What is at a path. `data`: a file's content, a link's target. `problem`: why it lacks."""

    mode: int  # the type included
    data: bytes = b""
    problem: str = ""

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.mode)


Look = dict[str, Entry]  # by path; a Path would cost more than the comparison
Changes = dict[str, str]  # by path: "new", "changed", "removed" or a problem, and why it stays


class GitGuard:
    """Guards the repository of `workspace`, and coder's own folders (None: commands cannot write).

    Call from one thread at a time. Commands may overlap: until the last ends, changes are theirs.
    """

    def __init__(self, workspace: Path, config: Path | None, data: Path | None) -> None:
        self.workspace, self.config, self.data = workspace, config, data
        self.known: Look = {}  # as it was when the last command ended
        self._running = 0
        self._repositories: list[str] = []
        self._roots: list[str] = []
        self._accept({})

    def begin(self) -> Changes:
        """A command begins. Returns what changed since the last one ended; that stays."""
        changes = self.since()
        self._running += 1
        return changes

    def since(self) -> Changes:
        """What changed since the last command ended, perhaps by the user. Reported once."""
        if self._running or ((look := self._look()) == self.known and not self.data):
            return {}
        changes = self._changes(look)
        self._accept(look)
        return changes

    def end(self, allowed: bool = False) -> Changes:
        """A command has ended. Returns its changes, which are put back unless `allowed`."""
        self._running -= 1
        if allowed:
            return self._changes(self._look()) if self._running else self.since()
        done, failed = Changes(), Changes()
        for _ in range(ROUNDS):
            look = self._look()
            todo = {path: what for path, what in self._changes(look).items() if path not in failed}
            for path, what in todo.items():
                done.setdefault(path, what)
                try:
                    self._put_back(path, self.known.get(path), look.get(path))
                except FileNotFoundError:  # gone with its folder
                    continue
                except OSError as error:
                    failed[path] = f"{what}; not put back: {error.strerror or error}"
            if not todo:
                break
        if look != self.known:
            self._accept(look, todo.keys() - failed.keys())
        return done | failed

    def _accept(self, look: Look, unless: Iterable[str] = ()) -> None:
        """Take `look` as known, except for what keeps changing, and for a repository that is gone
        as a whole: it may come back."""
        if (roots := self._find_roots()) != self._roots:
            self._roots = roots
            look = self._look()
        known = {path: entry for path, entry in look.items() if path not in unless}
        for path, entry in self.known.items():
            if path in unless or (path not in look and self._is_gone(path)):
                known[path] = entry
        self.known = known

    def _look(self) -> Look:
        return {path: entry for root in self._roots for path, entry in _tree(root).items()}

    def _changes(self, look: Look) -> Changes:
        """How `look` differs from what is known, folders before what is in them."""
        changes: Changes = {}
        for path in sorted(self.known.keys() | look.keys()):
            old, new = self.known.get(path), look.get(path)
            if old == new or (new is None and self._is_gone(path)):
                continue
            if old or (new and not _is_harmless(path, new)):
                changes[path] = _describe(old, new)
        return changes

    def _is_gone(self, path: str) -> bool:
        """Whether it belongs to a repository that is not there any more."""
        homes = [each for each in self._repositories if _contains(each, path)]
        return any(not os.path.lexists(f"{each}/HEAD") for each in homes)

    def _find_roots(self) -> list[str]:
        """The files and folders to guard. A HEAD may make a repository of the workspace itself."""
        tops = dict.fromkeys((self.workspace, repository_top(self.workspace)))
        git = dict.fromkeys(str(each) for top in tops for each in git_folders(top))
        head = self.workspace / "HEAD"
        if os.path.lexists(head) and not os.path.lexists(self.workspace / ".git"):
            git[str(self.workspace)] = None
        self._repositories = list(git)
        ours = [head, self.workspace / ".coder", *([self.config] if self.config else [])]
        ours += self.data.glob("snapshots/*/config") if self.data else []
        pointers = [f"{top}/.git" for top in tops]
        return [*pointers, *(f"{each}/{name}" for each in git for name in NAMES), *map(str, ours)]

    def _put_back(self, path: str, old: Entry | None, new: Entry | None) -> None:
        """Raises OSError."""
        if new and new.is_folder and (new.problem or not (old and old.is_folder)):
            root = max((each for each in self._roots if _contains(each, path)), key=len)
            os.rename(path, f"{root}.undone-{os.urandom(4).hex()}")
        elif new and not new.is_folder and (old is None or old.is_folder):
            os.unlink(path)
        if old and old.problem:
            raise OSError(old.problem)
        if old and old.is_folder:
            if path not in self._repositories:  # an empty one would be in the way of the real one
                os.makedirs(path, exist_ok=True)
            if os.path.isdir(path):
                os.chmod(path, stat.S_IMODE(old.mode))
        elif old:
            _write(Path(path), old)


def _contains(folder: str, path: str) -> bool:
    return f"{path}/".startswith(f"{folder}/")


def _is_harmless(path: str, new: Entry) -> bool:
    """Whether it may be new: an empty folder, or the configuration that `git init` writes."""
    is_config = stat.S_ISREG(new.mode) and path.endswith("/config")
    return not new.problem and (new.is_folder or (is_config and bool(GIT_INIT.fullmatch(new.data))))


def _write(path: Path, entry: Entry) -> None:
    """Replace whatever file or link is there, at once. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(temporary_name())
    try:
        if stat.S_ISLNK(entry.mode):
            temporary.symlink_to(os.fsdecode(entry.data))
        else:
            temporary.write_bytes(entry.data)
            temporary.chmod(stat.S_IMODE(entry.mode))
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _tree(root: str) -> Look:
    """What is at and below a path, but for sample hooks; of `.git` the folder alone. A folder that
    is closed, or too full to be compared, is a problem of the whole."""
    look: Look = {}
    waiting, left = [root], MAX_TREE
    while waiting:
        path = waiting.pop()
        if (entry := _entry(path, min(left, MAX_FILE))) is None:
            continue
        look[path] = entry
        left -= len(entry.data)
        if entry.is_folder and not root.endswith("/.git"):
            try:
                with os.scandir(path) as listed:
                    inside = [each.path for each in itertools.islice(listed, MAX_ENTRIES)]
            except OSError:
                return {root: look[root]._replace(problem="cannot be read")}
            if len(look) + len(inside) >= MAX_ENTRIES:
                return {root: look[root]._replace(problem="holds too much")}
            waiting += [each for each in inside if not each.endswith(".sample")]
    return look


def _entry(path: str, most: int) -> Entry | None:
    """None where nothing can be seen. A file of more than `most` bytes is a problem."""
    try:
        info = os.lstat(path)
        if stat.S_ISLNK(info.st_mode):
            return Entry(info.st_mode, os.fsencode(os.readlink(path)))
    except (OSError, ValueError):
        return None
    if stat.S_ISDIR(info.st_mode):
        return Entry(info.st_mode)
    wanted = stat.S_ISREG(info.st_mode) and info.st_size <= most
    data = read_small_file(path, most + 1) if wanted else None
    if data is None or len(data) > most:
        version = f"{info.st_size} {info.st_mtime_ns} {info.st_ctime_ns} {info.st_ino}"
        return Entry(info.st_mode, version.encode(), "too large to be kept, or no file")
    return Entry(info.st_mode, data)


def _describe(old: object, new: object) -> str:
    if old is None or new is None:
        return "new" if old is None else "removed"
    return (new.problem if isinstance(new, Entry) and new.is_folder else "") or "changed"


def describe(changes: Changes, workspace: Path) -> str:
    """In one line: `.git/hooks/pre-commit (new), .git/config (changed)`."""
    texts = [f"{path.removeprefix(f'{workspace}/')} ({what})" for path, what in changes.items()]
    more = len(texts) - MAX_LISTED
    return escaped(", ".join(texts[:MAX_LISTED] + ([f"and {more} more"] if more > 0 else [])))


class GuardRecord:
    """A note in coder's data folder of the guarded files when the last command began.

    The end of a session removes it. If one is there at a start, a process was killed before it
    could put something back.
    """

    def __init__(self, data: Path, workspace: Path) -> None:
        name = hashlib.sha256(os.fsencode(workspace)).hexdigest()[:32]
        self.path = data / "guarded" / f"{name}.json"
        self._written: Look = {}

    def changes(self, look: Look) -> Changes:
        """What is not as the note of an earlier session says."""
        try:
            old = json.loads(read_small_file(self.path, MAX_FILE) or b"{}")
            new = _digests(look) if old else {}
            pairs = {
                each: (old.get(each), new.get(each)) for each in sorted(old.keys() | new.keys())
            }
            return {each: _describe(*pair) for each, pair in pairs.items() if pair[0] != pair[1]}
        except (ValueError, AttributeError):  # cut off, or not ours
            return {}

    def write(self, look: Look) -> None:
        """Where that fails, changes are noticed only as long as this process lives."""
        with contextlib.suppress(OSError):
            if look == self._written and self.path.exists():
                return
            for folder in (self.path.parent.parent, self.path.parent):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.write_text(json.dumps(_digests(look)))
            self._written = look

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()
            self.path.parent.rmdir()


def _digests(look: Look) -> dict[str, str]:
    return {path: hashlib.sha256(repr(each).encode()).hexdigest() for path, each in look.items()}


# -- where git's folders are


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
    config = os.fsdecode(read_small_file(folder / "config", MAX_FILE) or b"")
    worktree = re.search(r"^\s*worktree = ([^\0\n]+)$", config, re.M)
    leads_back = worktree is not None and resolved(folder / worktree[1]) == top
    return [folder] if folder == pointer or leads_back else []
