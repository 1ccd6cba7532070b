"""What runs programs later on, or steers us, compared before and after each command; a change that counts is undone.

A sandbox ends with its command. What git runs by itself when a person uses it next (hooks, programs that its configuration
names) and our own configuration are ways out of it, and Landlock cannot take them out of a workspace that may be written. So
they are looked at whether or not they were there before (CVE-2026-25725): the places of git_places.py, by the rules of
git_config.py. `git init`, `clone`, `remote add`, `submodule add` and a branch's upstream pass; `core.pager` or
`alias.x = !program` do not. Folders of the workspace that the configuration leads to (core.hooksPath, include.path) are watched
as well.

    watch.begin()                  # before a command; tells what changed since the last one ended
    watch.end(undo)                # after it; tells what was undone

What lies there may have been made to break a look: a folder that cannot be looked into, or holds too much, is itself a change.

What it leaves out: repositories in other folders of the workspace, also where they are planted, and the .git files of submodules;
undoing what a child in the background changes after its command, which is told at the next one.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from coder.features.git_config import entries, new_keys, plain
from coder.features.git_places import CLOSED, CROWDED, MAX_FILE, Place, Role, content, git_folder, is_bare, of_git, real, top_of, tree
from coder.tools.folder import temporary_name

MAX_TOTAL = 16 << 20  # bytes that are kept of all files
MAX_TOLD = 10
EXEC = re.compile(rb"\s*(x|exec)\b")  # in the list of a rebase
ROUNDS = 5  # files that include each other; folders in folders that cannot be looked into


@dataclass(frozen=True)
class Found:
    """What lies at a path: `data` is a file's content, where a link leads, or why a folder is "unseen". A file is "unread" where
    its content does not matter, because another has been there."""

    role: Role
    kind: Literal["file", "link", "folder", "other", "unread", "unseen"]
    mode: int = 0
    data: bytes = b""


@dataclass(frozen=True)
class Change:
    """`what` is "new", "changed", "removed", or the keys of a configuration; `problem` says why it could not be undone."""

    path: Path
    what: str
    problem: str = ""


Look = dict[Path, Found]
Undo = Callable[[Callable[[], None]], None]


class Watch:
    """Looks at the repository of `workspace`, and at our own folders: all of `config`, of `data` what runs something.

    Commands may run side by side: what one of them changes is undone when the first of them ends. Safe for threads.
    """

    def __init__(self, workspace: Path, config: Path | None = None, data: Path | None = None) -> None:
        self.workspace, self.config, self.data = workspace, config, data
        self._last: Look | None = None  # as it was when the last command ended, or the first began
        self._led: list[Place] = []  # where the configuration led then
        self._bare = False  # was the workspace itself what lies in .git elsewhere?
        self._running = 0
        self._lock = threading.Lock()

    def begin(self) -> list[Change]:
        """A command begins. What has changed since the last one ended is told; it may be the person's own doing, and stays."""
        with self._lock:
            changes = [] if self._running else self._accepted()
            self._running += 1
        return changes

    def end(self, undo: Undo | None) -> list[Change]:
        """A command has ended. `undo` is given a function to call that puts things back; without it nothing is undone."""
        with self._lock:
            self._running -= 1
            if undo is None:
                return _changes(self._counted(self._look(self._last))) if self._running else self._accepted()
            look, undone = self._opened(undo)
            for pointers_only in (True, False):  # where git looks comes first: what lies there may be somebody's other repository
                failed = {each.path for each in undone if each.problem}
                if counted := {path: what for path, what in self._counted(look, pointers_only).items() if path not in failed}:
                    undone += self._undone(counted, look, undo)
                    look = self._look(self._last)
            self._last = self._look() if any(found.kind == "unread" for found in look.values()) else look
        return undone

    def _opened(self, undo: Undo) -> tuple[Look, list[Change]]:
        """A look. What a command has closed is opened for it."""
        opened = list[Change]()
        for _ in range(ROUNDS):
            look = self._look(self._last)
            closed = [path for path, found in look.items() if found.data == CLOSED.encode() and self._known(path) != found]
            done = [each for path in closed if not (each := _attempt(path, CLOSED, functools.partial(_open, path), undo)).problem]
            opened += done
            if not done:
                break
        return look, opened

    def _undone(self, counted: dict[Path, str], look: Look, undo: Undo) -> list[Change]:
        before = self._last or {}
        undone = list[Change]()
        for path in sorted(counted):
            gone = path not in before and any(parent in counted and parent not in before for parent in path.parents)
            if not gone:  # with its folder
                undone.append(_attempt(path, counted[path], functools.partial(_put_back, path, before, look.get(path)), undo))
        return undone

    def _known(self, path: Path) -> Found | None:
        return (self._last or {}).get(path)

    def since(self) -> list[Change]:
        """What has changed since the last command ended, by a child in the background or by somebody else."""
        with self._lock:
            return [] if self._running else self._accepted()

    def _accepted(self) -> list[Change]:
        changes, look = list[Change](), self._look(self._last)
        if self._last is not None:
            changes = _changes(self._counted(look))
        for _ in range(ROUNDS):
            led, bare = self._followed(look), is_bare(self.workspace)
            if (led, bare) == (self._led, self._bare) and not any(found.kind == "unread" for found in look.values()):
                break
            self._led, self._bare = led, bare
            look = self._look()
        self._last = look
        return changes

    def _counted(self, look: Look, pointers_only: bool = False) -> dict[Path, str]:
        """The changes that count, in words."""
        before = self._last or {}
        paths = [path for path in {**before, **look} if before.get(path) != look.get(path)]
        judged = {path: self._judged(path, before.get(path), look.get(path)) for path in paths
                  if not pointers_only or (look.get(path) or before[path]).role == "pointer"}
        return {path: what for path, what in judged.items() if what}

    def _judged(self, path: Path, old: Found | None, new: Found | None) -> str:
        """What of a change counts, in words, or "" where it is harmless."""
        role = (new or old or Found("own", "other")).role
        plain = "removed" if new is None else "new" if old is None else "changed"
        if new and new.kind == "unseen":
            return new.data.decode()
        if role == "pointer":
            return "" if new is None or new.kind == "folder" or _leads_up(path, new) else plain
        if role == "hook":
            return "" if new is None and not any(os.path.lexists(each / "HEAD") for each in path.parents) else plain
        if role == "own":  # we make repositories for snapshots ourselves, meanwhile
            return "" if old is None and self.data in path.parents else plain
        if new is None:
            return ""
        if new.kind != "file":
            return plain
        if role == "todo":
            lines = set(new.data.split(b"\n")) - set(old.data.split(b"\n") if old else [])
            return "exec" if any(map(EXEC.match, lines)) else ""
        return ", ".join(self._new_keys(path, old.data if old and old.kind == "file" else b"", new.data))

    def _new_keys(self, path: Path, old: bytes, new: bytes) -> list[str]:
        """Keys that count among the lines that are new in a repository's configuration."""
        def leads_home(value: str) -> bool:
            led = real(path.parent / value)
            return "modules" in path.parts and led is not None and led.is_relative_to(top_of(self.workspace))

        return new_keys(old, new, leads_home)

    # -- what there is

    def _look(self, known: Look | None = None) -> Look:
        """Of files that run something, only those in `known` are read, and those of the same size; without it, all."""
        found, left = Look(), MAX_TOTAL
        try:
            for role, path, problem in self._places():
                old = known.get(path) if known is not None else None
                compared = known is not None and role in ("hook", "own") and not (old and old.kind == "other")
                most = min(MAX_FILE, left) if not compared else len(old.data) if old and old.kind == "file" else -1
                if each := _found(role, path, problem, most):
                    each = replace(each, kind="unread", data=b"") if compared and each.kind == "other" else each
                    found[path] = each
                    left -= len(each.data)
        except (OSError, ValueError, RecursionError) as error:  # of what nobody has thought of; the rest of the look counts
            found[top_of(self.workspace) / ".git"] = Found("pointer", "unseen", data=f"{CLOSED}: {error}".encode("utf-8", "replace"))
        return found

    def _places(self) -> Iterator[Place]:
        top = top_of(self.workspace)
        yield from (("pointer", each / ".git", "") for each in dict.fromkeys((self.workspace, top)))
        folder = git_folder(top)
        if folder:
            yield from of_git(folder, [path.parent for path, found in (self._last or {}).items() if found.role == "config"])
        if self._bare:
            yield from of_git(self.workspace, [])
        elif is_bare(self.workspace) and self._would_run():
            yield "pointer", self.workspace / "HEAD", ""
        for role, path, _ in self._led:
            yield from ((role, each, problem) for each, problem in (tree(path, ".sample") if role == "hook" else [(path, "")]))
        yield from self._own()

    def _would_run(self) -> bool:
        """Would git run something, where the workspace itself has become a repository?"""
        return bool(self._new_keys(self.workspace / "config", b"", content(self.workspace / "config") or b"")
                    or len(list(tree(self.workspace / "hooks", ".sample"))) > 1)

    def _followed(self, look: Look) -> list[Place]:
        """The hooks folder and the included files that the configuration names, those in the workspace. A folder `_` is a part of
        its parent (husky)."""
        led = list[Place]()
        for path, found in look.items():
            for key, value in entries(found.data) if found.role == "config" and found.kind == "file" else []:
                hooks = key == "core.hookspath"
                if not hooks and not re.fullmatch(r"include\.path|includeif\..*\.path", key, re.S):
                    continue
                target = real((top_of(self.workspace) if hooks else path.parent) / os.path.expanduser(plain(value)))
                target = target.parent if target and target.name == "_" else target
                if target and self.workspace in target.parents:
                    led.append(("hook" if hooks else "config", target, ""))
        return list(dict.fromkeys(led))

    def _own(self) -> Iterator[Place]:
        """All of our configuration. Of our data, that there is any, and the configuration of the snapshots' repositories."""
        if self.config:
            yield from (("own", path, problem) for path, problem in tree(self.config))
        if self.data:
            yield "own", self.data, ""
            yield from (("own", path, "") for path in self.data.glob("snapshots/*/config"))


def _changes(counted: dict[Path, str]) -> list[Change]:
    return [Change(path, what) for path, what in counted.items()]


def _attempt(path: Path, what: str, work: Callable[[], None], undo: Undo) -> Change:
    try:
        undo(work)
    except (OSError, ValueError, RecursionError) as error:
        return Change(path, what, getattr(error, "strerror", "") or str(error))
    return Change(path, what)


def _open(path: Path) -> None:
    os.chmod(path, stat.S_IMODE(os.lstat(path).st_mode) | stat.S_IRWXU)


def _put_back(path: Path, before: Look, now: Found | None) -> None:
    """Raises OSError. A file is replaced at once, so that nobody reads half of it."""
    old = before.get(path)
    if now and now.kind == "unseen":
        if now.role != "hook" or now.data != CROWDED.encode():
            raise OSError("it is left as it is")
        _clear(path, before)
        return
    if old and old.kind == "other":
        raise OSError("it was too large to be kept, or no file")
    if old is None or old.kind != "file" or (path.is_dir() and not path.is_symlink()):
        _remove(path)
    if old is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if old.kind == "folder":
        path.mkdir(exist_ok=True)
    elif old.kind == "link":
        os.symlink(os.fsdecode(old.data), path)
    else:
        name = path.with_name(temporary_name())
        with open(name, "xb") as file:
            file.write(old.data)
            os.fchmod(file.fileno(), old.mode)
        os.replace(name, path)


def _clear(folder: Path, known: Look) -> None:
    """Leave in it what is known."""
    waiting = [folder]
    while waiting:
        for path in map(Path, [each.path for each in os.scandir(waiting.pop())]):
            if path not in known:
                _remove(path)
            elif known[path].kind == "folder":
                waiting.append(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _leads_up(path: Path, found: Found) -> bool:
    """Is it the way from a linked worktree's folder to what it shares?"""
    return path.parent.parent.name == "worktrees" and found.kind == "file" and found.data.strip() == b"../.."


def _found(role: Role, path: Path, problem: str, most: int) -> Found | None:
    """A file of more than `most` bytes is an "other"."""
    if problem:
        return Found(role, "unseen", data=problem.encode())
    try:
        info = os.lstat(path)
        if stat.S_ISLNK(info.st_mode):
            return Found(role, "link", data=os.fsencode(os.readlink(path)))
    except (OSError, ValueError):
        return None
    if stat.S_ISDIR(info.st_mode):
        return Found(role, "folder")
    data = content(path) if stat.S_ISREG(info.st_mode) and info.st_size <= most else None
    if data is None or len(data) > most:
        return Found(role, "other", data=f"{info.st_mode} {info.st_size} {info.st_mtime_ns} {info.st_ctime_ns} {info.st_ino}".encode())
    return Found(role, "file", stat.S_IMODE(info.st_mode), data)


def told(changes: Sequence[Change], workspace: Path) -> str:
    """Changes in one line: `.git/hooks/pre-commit (new), .git/config (core.pager)`."""
    names = [(str(each.path.relative_to(workspace)) if each.path.is_relative_to(workspace) else str(each.path), each) for each in changes]
    texts = [f"{name} ({each.what}{f'; not undone: {each.problem}' if each.problem else ''})" for name, each in names]
    return ", ".join(texts[:MAX_TOLD] + [f"and {len(texts) - MAX_TOLD} more"] * (len(texts) > MAX_TOLD))
