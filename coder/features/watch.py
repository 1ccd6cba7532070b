"""What runs programs later on, or steers us, compared before and after each command; a change that counts is undone.

A sandbox ends with its command. What git runs by itself when a person uses it next (hooks, programs that its configuration
names) and our own configuration are ways out of it, and Landlock cannot take them out of a workspace that may be written. So
they are looked at whether or not they were there before (CVE-2026-25725). git is not run for it: its configuration is read here,
strictly, and a new line counts unless it is known to be harmless. `git init`, `clone`, `remote add`, `submodule add` and a
branch's upstream pass; `core.pager` or an alias do not.

    watch.begin()                  # before a command; tells what changed since the last one ended
    watch.end(undo)                # after it; tells what was undone

What it leaves out: repositories that a command plants in other folders of the workspace; a hooks folder elsewhere (core.hooksPath);
undoing what a child in the background changes after its command, which is told at the next one.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MAX_FILE = 1 << 20  # bytes; a larger file is known by its size and times, and cannot be put back
MAX_DEPTH = 8  # folders in the name of a submodule

# Sections of which no key names a program, and keys of others, with * for a subsection. From git's Documentation/config/.
SECTIONS = {"user", "author", "committer", "color", "advice", "status", "rerere", "fetch", "push", "index", "feature", "extensions",
            "stash", "blame", "column", "tag"}
KEYS = {
    *(f"core.{name}" for name in ("repositoryformatversion", "filemode", "bare", "logallrefupdates", "symlinks", "ignorecase",
                                  "precomposeunicode", "autocrlf", "eol", "safecrlf", "quotepath", "sparsecheckout", "sparsecheckoutcone",
                                  "untrackedcache", "longpaths", "abbrev", "compression", "whitespace", "commitgraph", "worktree")),
    *(f"remote.*.{name}" for name in ("url", "pushurl", "fetch", "push", "tagopt", "prune", "prunetags", "mirror", "promisor",
                                      "partialclonefilter", "followremotehead", "gh-resolved")),
    *(f"branch.*.{name}" for name in ("remote", "merge", "rebase", "pushremote", "description", "vscode-merge-base", "gh-merge-base")),
    *(f"submodule.*.{name}" for name in ("url", "active", "update", "branch", "ignore")), "submodule.active", "submodule.recurse",
    "init.defaultbranch", "pull.rebase", "pull.ff", "merge.conflictstyle", "merge.ff", "rebase.autostash", "rebase.autosquash",
    "diff.algorithm", "diff.renames", "diff.noprefix", "diff.mnemonicprefix", "diff.colormoved", "commit.gpgsign", "gc.auto",
    "branch.autosetuprebase", "branch.autosetupmerge", "branch.sort", "lfs.repositoryformatversion", "http.postbuffer"}
RUNS = re.compile(r'"?\s*(!|[\w+.-]+::)')  # a value that git runs: submodule.update, and ext:: where a URL stands
WORKTREE = "core.worktree"  # harmless where it leads from a submodule's folder back into the repository

SECTION = re.compile(r'\s*\[([A-Za-z0-9-]+)(?:[ \t]+"((?:[^"\\]|\\.)*)")?\]\s*')
ENTRY = re.compile(r"\s*([A-Za-z][A-Za-z0-9-]*)[ \t]*(?:=[ \t]*((?:[^\\]|\\[\\\"tnb])*))?")
NOTHING = re.compile(r"\s*([#;].*)?")
NOT_PLAIN = "a line that is not plain"

Role = Literal["pointer", "config", "hook", "own"]


@dataclass(frozen=True)
class Found:
    """What lies at a path: `data` is a file's content, or where a link leads."""

    role: Role
    kind: Literal["file", "link", "folder", "other"]
    mode: int = 0
    data: bytes = b""


@dataclass(frozen=True)
class Change:
    """`what` is "new", "changed", "removed", or the keys of a configuration; `problem` says why it could not be undone."""

    path: Path
    what: str
    problem: str = ""


Look = dict[Path, Found]


class Watch:
    """Looks at the repository of `workspace`, and at our own folders: all of `config`, of `data` what runs something.

    Commands may run side by side: what one of them changes is undone when the first of them ends. Safe for threads.
    """

    def __init__(self, workspace: Path, config: Path | None = None, data: Path | None = None) -> None:
        self.workspace, self.config, self.data = workspace, config, data
        self._last: Look | None = None  # as it was when the last command ended, or the first began
        self._running = 0
        self._lock = threading.Lock()

    def begin(self) -> list[Change]:
        """A command begins. What has changed since the last one ended is told; it may be the person's own doing, and stays."""
        with self._lock:
            changes = [] if self._running else self._accepted()
            self._running += 1
        return changes

    def end(self, undo: Callable[[Callable[[], None]], None] | None) -> list[Change]:
        """A command has ended. `undo` is given a function to call that puts things back; without it nothing is undone."""
        with self._lock:
            self._running -= 1
            if undo is None:
                return self._accepted()
            before, look, undone = self._last or {}, self._look(), list[Change]()
            for pointers_only in (True, False):  # where git looks comes first: what lies there may be somebody's other repository
                counted = self._counted(look, pointers_only)
                for path in sorted(counted):
                    gone = path not in before and any(parent in counted and parent not in before for parent in path.parents)
                    if not gone:  # with its folder
                        undone.append(_undone(path, counted[path], before, undo))
                look = self._look() if counted else look
            self._last = look
        return undone

    def since(self) -> list[Change]:
        """What has changed since the last command ended, by a child in the background or by somebody else."""
        with self._lock:
            return [] if self._running else self._accepted()

    def _accepted(self) -> list[Change]:
        look = self._look()
        changes = [Change(path, what) for path, what in self._counted(look).items()] if self._last is not None else []
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
        if role == "pointer":
            return "" if new is None or new.kind == "folder" or _leads_up(path, new) else plain
        if role == "hook":
            return "" if new is None and not (_git_folder_of(path) / "HEAD").exists() else plain
        if role == "own":  # we make repositories for snapshots ourselves, meanwhile
            return "" if old is None and self.data in path.parents else plain
        if new is None:
            return ""
        if new.kind != "file":
            return plain
        return ", ".join(self._new_keys(path, old.data if old and old.kind == "file" else b"", new.data))

    def _new_keys(self, path: Path, old: bytes, new: bytes) -> list[str]:
        """Keys that count among the lines that are new."""
        lines = Counter(entries(new)) - Counter(entries(old))
        return list(dict.fromkeys(key for key, value in lines if not (self._harmless(key, value, path))))

    def _harmless(self, key: str, value: str, path: Path) -> bool:
        section, _, name = key.partition(".")
        known = f"{section}.*.{name.rpartition('.')[2]}" if "." in name else key
        if key == WORKTREE:
            top = _top(self.workspace)
            return "modules" in path.parts and Path(os.path.realpath(path.parent / value.strip('"'))).is_relative_to(top)
        return (known in KEYS or (section in SECTIONS and "." not in name)) and not RUNS.match(value)

    # -- what there is

    def _look(self) -> Look:
        found: Look = {}
        for role, path in [*_of_git(self.workspace), *self._own()]:
            if each := _found(role, path):
                found[path] = each
        return found

    def _own(self) -> Iterator[tuple[Role, Path]]:
        """All of our configuration. Of our data, that there is any, and the configuration of the snapshots' repositories."""
        if self.config:
            yield from (("own", path) for path in _tree(self.config))
        if self.data:
            yield "own", self.data
            yield from (("own", path) for path in self.data.glob("snapshots/*/config"))


def _undone(path: Path, what: str, before: Look, undo: Callable[[Callable[[], None]], None]) -> Change:
    try:
        undo(lambda: _put_back(path, before.get(path)))
    except OSError as error:
        return Change(path, what, error.strerror or str(error))
    return Change(path, what)


def _put_back(path: Path, old: Found | None) -> None:
    """Raises OSError. A file is replaced at once, so that nobody reads half of it."""
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
        name = path.with_name(f".coder-{os.getpid()}-{os.urandom(4).hex()}.tmp")
        with open(name, "xb") as file:
            file.write(old.data)
            os.fchmod(file.fileno(), old.mode)
        os.replace(name, path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# ---- what lies where -------------------------------------------------------------------------------------


def git_folders(workspace: Path) -> list[Path]:
    """The folders that git needs to write to in a workspace, which may lie elsewhere: in a folder above, or where a linked
    worktree or a submodule has them. What lies in the workspace is believed only where the other place points back to it.
    """
    top = _top(workspace)
    folder, here = _git_folder(top), os.path.realpath(top)
    if folder is None or not (folder / "HEAD").is_file():
        return []
    if str(folder) == os.path.join(here, ".git"):
        return [folder]
    common = _common(folder)
    if folder.parent == common / "worktrees" and _line(folder / "gitdir") == os.path.join(here, ".git"):
        return [common]
    settings = dict(entries(_bytes(folder / "config") or b""))
    return [folder] if WORKTREE in settings and os.path.realpath(folder / settings[WORKTREE].strip('"')) == here else []


def _top(workspace: Path) -> Path:
    """The folder that holds .git: the workspace or the first above it, else the workspace."""
    return next((each for each in (workspace, *workspace.parents) if os.path.lexists(each / ".git")), workspace)


def _git_folder(top: Path) -> Path | None:
    """Where .git is, or leads to."""
    path = top / ".git"
    if path.is_dir():
        return Path(os.path.realpath(path))
    target = _line(path)
    return Path(os.path.realpath(top / target.removeprefix("gitdir:").strip())) if target.startswith("gitdir:") else None


def _common(folder: Path) -> Path:
    """What the worktrees of a repository share."""
    target = _line(folder / "commondir")
    return Path(os.path.realpath(folder / target)) if target else folder


def _of_git(workspace: Path) -> Iterator[tuple[Role, Path]]:
    """The paths that git reads without being asked, of the workspace's repository, its worktrees and its submodules."""
    top = _top(workspace)
    yield from (("pointer", each / ".git") for each in dict.fromkeys((workspace, top)))
    folder = _git_folder(top)
    if folder is None:
        return
    common = _common(folder)
    shared = [common, *_modules(common)]
    trees = [tree for each in shared for tree in _folders(each / "worktrees")]
    for each in dict.fromkeys([folder, *shared, *trees]):
        yield "pointer", each / "commondir"
        yield from (("config", each / name) for name in ("config", "config.worktree"))
    for each in shared:
        hooks = list(_tree(each / "hooks", ".sample"))
        yield from (("hook", path) for path in hooks[0 if hooks[0].is_symlink() else 1:])


def _modules(folder: Path, depth: int = 0) -> Iterator[Path]:
    """The folders of submodules, also of those in submodules, and of those with a slash in the name."""
    for each in _folders(folder / "modules" if depth == 0 else folder):
        if (each / "HEAD").exists():
            yield each
            yield from _modules(each)
        elif depth < MAX_DEPTH:
            yield from _modules(each, depth + 1)


def _folders(folder: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _tree(folder: Path, without: str = "/") -> Iterator[Path]:
    """A folder and all that is in it but names with a certain end; links are not followed."""
    yield folder
    if not folder.is_symlink():
        for root, folders, files in os.walk(folder):
            yield from (Path(root, name) for name in [*folders, *files] if not name.endswith(without))


def _git_folder_of(hook: Path) -> Path:
    """.git of .git/hooks/a/b"""
    return next(each.parent for each in hook.parents if each.name == "hooks") if hook.name != "hooks" else hook.parent


def _leads_up(path: Path, found: Found) -> bool:
    """Is it the way from a linked worktree's folder to what it shares?"""
    return path.parent.parent.name == "worktrees" and found.kind == "file" and found.data.strip() == b"../.."


def _found(role: Role, path: Path) -> Found | None:
    try:
        info = os.lstat(path)
        if stat.S_ISLNK(info.st_mode):
            return Found(role, "link", data=os.fsencode(os.readlink(path)))
    except OSError:
        return None
    if stat.S_ISDIR(info.st_mode):
        return Found(role, "folder")
    data = _bytes(path) if stat.S_ISREG(info.st_mode) else None
    if data is None or len(data) > MAX_FILE:
        return Found(role, "other", data=f"{info.st_mode} {info.st_size} {info.st_mtime_ns} {info.st_ino}".encode())
    return Found(role, "file", stat.S_IMODE(info.st_mode), data)


def _bytes(path: Path) -> bytes | None:
    """A file, or the beginning of one that is too large; None where there is none that can be read. Opening never waits."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        info = os.fstat(fd)
        return os.read(fd, min(info.st_size, MAX_FILE) + 1) if stat.S_ISREG(info.st_mode) else None
    except OSError:
        return None
    finally:
        os.close(fd)


def _line(path: Path) -> str:
    return os.fsdecode(_bytes(path) or b"").strip()


# ---- git's configuration ---------------------------------------------------------------------------------


def entries(data: bytes) -> list[tuple[str, str]]:
    """(key, value) of each line, the key as `section.subsection.name`, section and name in small letters. Whatever is not a
    section, a comment or `name = value` in one plain line comes as (NOT_PLAIN, the line): git may read something else in it."""
    found, section, continued = list[tuple[str, str]](), "", False
    for line in data.replace(b"\r\n", b"\n").decode("utf-8", "surrogateescape").split("\n"):
        head, entry = SECTION.fullmatch(line), ENTRY.fullmatch(line)
        plain = not continued and not re.search("[\x00-\x08\x0b-\x1f\x7f]", line)
        continued = line.endswith("\\")
        if plain and head:
            section = f"{head[1].lower()}.{head[2]}" if head[2] is not None else head[1].lower()
        elif plain and section and entry:
            found.append((f"{section}.{entry[1].lower()}", (entry[2] or "").strip()))
        elif not (plain and NOTHING.fullmatch(line)):
            found.append((NOT_PLAIN, line))
    return found


def told(changes: Sequence[Change], workspace: Path) -> str:
    """Changes in one line: `.git/hooks/pre-commit (new), .git/config (core.pager)`."""
    names = [(str(each.path.relative_to(workspace)) if each.path.is_relative_to(workspace) else str(each.path), each) for each in changes]
    return ", ".join(f"{name} ({each.what}{f'; not undone: {each.problem}' if each.problem else ''})" for name, each in names)
