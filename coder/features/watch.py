"""What runs programs later on, or steers us, compared before and after each command; a change that counts is undone.

A sandbox ends with its command. What git runs by itself when a person uses it next (hooks, programs that its configuration
names) and our own configuration are ways out of it, and Landlock cannot take them out of a workspace that may be written. So
they are looked at whether or not they were there before (CVE-2026-25725). git is not run for it: its configuration is read here,
strictly, and a new line counts unless it is known to be harmless. `git init`, `clone`, `remote add`, `submodule add` and a
branch's upstream pass; `core.pager` or `alias.x = !program` do not. Folders of the workspace that the configuration leads to
(core.hooksPath, include.path) are watched as well.

    watch.begin()                  # before a command; tells what changed since the last one ended
    watch.end(undo)                # after it; tells what was undone

What lies there may have been made to break a look: it is bounded in number, depth and size, and a folder that cannot be looked
into, or holds too much, is itself a change.

What it leaves out: repositories in other folders of the workspace, also where they are planted, and the .git files of submodules;
undoing what a child in the background changes after its command, which is told at the next one.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import shutil
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from coder.tools.searcher import small_file
from coder.tools.workspace import temporary_name

MAX_FILE = 1 << 20  # bytes; a larger file is known by its size and times, and cannot be put back
MAX_TOTAL = 16 << 20  # bytes that are kept of all files
MAX_DEPTH = 8  # folders in the name of a submodule
MAX_ENTRIES = 2000  # in a folder of hooks, or among submodules
MAX_TOLD = 10
ROUNDS = 5  # files that include each other; folders in folders that cannot be looked into
CLOSED, CROWDED, LINK = "cannot be looked into", "holds too much to be looked at", "link"

# Sections of which no key names a program, and keys of others, with * for a subsection. From git's Documentation/config/.
SECTIONS = {"user", "author", "committer", "color", "advice", "status", "rerere", "fetch", "push", "index", "feature", "extensions",
            "stash", "blame", "column", "tag", "log", "format", "i18n", "rebase", "am", "maintenance", "receive", "versionsort", "grep"}
KEYS = {
    *(f"core.{name}" for name in ("repositoryformatversion", "filemode", "bare", "logallrefupdates", "symlinks", "ignorecase",
                                  "precomposeunicode", "autocrlf", "eol", "safecrlf", "quotepath", "sparsecheckout", "sparsecheckoutcone",
                                  "untrackedcache", "longpaths", "abbrev", "compression", "whitespace", "commitgraph", "worktree",
                                  "fscache", "sharedrepository")),
    *(f"remote.*.{name}" for name in ("url", "pushurl", "fetch", "push", "tagopt", "prune", "prunetags", "mirror", "promisor",
                                      "partialclonefilter", "followremotehead", "gh-resolved")),
    *(f"branch.*.{name}" for name in ("remote", "merge", "rebase", "pushremote", "description", "vscode-merge-base", "gh-merge-base")),
    *(f"submodule.*.{name}" for name in ("url", "active", "update", "branch", "ignore")), "submodule.active", "submodule.recurse",
    *(f"maintenance.*.{name}" for name in ("enabled", "schedule", "auto")),
    "init.defaultbranch", "pull.rebase", "pull.ff", "merge.conflictstyle", "merge.ff", "credential.usehttppath",
    "diff.algorithm", "diff.renames", "diff.noprefix", "diff.mnemonicprefix", "diff.colormoved", "commit.gpgsign", "gc.auto",
    "branch.autosetuprebase", "branch.autosetupmerge", "branch.sort", "lfs.repositoryformatversion", "http.postbuffer"}
RUNS = re.compile(r"\s*(!|[\w+.-]+::)")  # a value that git runs: submodule.update, and ext:: where a URL stands
PLAIN = re.compile(r"true|false|yes|no|on|off|\d+", re.I)  # as a program's name it is one of the system
PATHS = {"core.hookspath", "core.attributesfile", "include.path", "includeif.*.path", "init.templatedir"}  # and as a folder's it is not
TRUST = {"http.sslverify", "http.*.sslverify"}
TOOLS = {"merge.tool", "merge.guitool", "diff.tool", "diff.guitool"}  # files of git's own folder; a slash would lead out of it
ALIAS = re.compile(r"(add|blame|branch|checkout|cherry-pick|commit|describe|diff|fetch|log|merge|pull|push|reflog|remote|reset|restore"
                   r"|rev-parse|shortlog|show|stash|status|switch|tag)\b")
NOT_IN_ALIAS = re.compile(r"!|::|--(exec|upl|rec|ext|textc|conf|rep|out)|(^|\s)-[a-z]*[cxso]", re.I)  # options that run or write
EXEC = re.compile(rb"\s*(x|exec)\b")  # in the list of a rebase
WORKTREE = "core.worktree"  # harmless where it leads from a submodule's folder back into the repository

SECTION = re.compile(r'\s*\[([A-Za-z0-9-]+)(?:[ \t]+"((?:[^"\\]|\\.)*)")?\]\s*')
ENTRY = re.compile(r"\s*([A-Za-z][A-Za-z0-9-]*)[ \t]*(?:=[ \t]*((?:[^\\]|\\[\\\"tnb])*))?")
NOTHING = re.compile(r"\s*([#;].*)?")
NOT_PLAIN = "a line that is not plain"

Role = Literal["pointer", "config", "hook", "todo", "own"]


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
Place = tuple[Role, Path, str]  # the last: why it is unseen, or ""


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
            led, bare = self._followed(look), _is_bare(self.workspace)
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
        """Keys that count among the lines that are new."""
        lines = Counter(entries(new)) - Counter(entries(old))
        return list(dict.fromkeys(key for key, value in lines if not (self._harmless(key, value, path))))

    def _harmless(self, key: str, value: str, path: Path) -> bool:
        section, _, name = key.partition(".")
        known = f"{section}.*.{name.rpartition('.')[2]}" if "." in name else key
        if key == WORKTREE:
            led = _real(path.parent / _plain(value))
            return "modules" in path.parts and led is not None and led.is_relative_to(_top(self.workspace))
        value = _plain(value)
        if PLAIN.fullmatch(value) and known not in PATHS | TRUST:
            return True
        if section == "alias":
            return bool(ALIAS.match(value)) and not NOT_IN_ALIAS.search(value)
        if known in TOOLS:
            return "/" not in value
        return (known in KEYS or (section in SECTIONS and "." not in name)) and not RUNS.match(value)

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
            found[_top(self.workspace) / ".git"] = Found("pointer", "unseen", data=f"{CLOSED}: {error}".encode("utf-8", "replace"))
        return found

    def _places(self) -> Iterator[Place]:
        top = _top(self.workspace)
        yield from (("pointer", each / ".git", "") for each in dict.fromkeys((self.workspace, top)))
        folder = _git_folder(top)
        if folder:
            yield from _of_git(folder, [path.parent for path, found in (self._last or {}).items() if found.role == "config"])
        if self._bare:
            yield from _of_git(self.workspace, [])
        elif _is_bare(self.workspace) and self._would_run():
            yield "pointer", self.workspace / "HEAD", ""
        for role, path, _ in self._led:
            yield from ((role, each, problem) for each, problem in (_tree(path, ".sample") if role == "hook" else [(path, "")]))
        yield from self._own()

    def _would_run(self) -> bool:
        """Would git run something, where the workspace itself has become a repository?"""
        return bool(self._new_keys(self.workspace / "config", b"", _bytes(self.workspace / "config") or b"")
                    or len(list(_tree(self.workspace / "hooks", ".sample"))) > 1)

    def _followed(self, look: Look) -> list[Place]:
        """The hooks folder and the included files that the configuration names, those in the workspace. A folder `_` is a part of
        its parent (husky)."""
        led = list[Place]()
        for path, found in look.items():
            for key, value in entries(found.data) if found.role == "config" and found.kind == "file" else []:
                hooks = key == "core.hookspath"
                if not hooks and not re.fullmatch(r"include\.path|includeif\..*\.path", key, re.S):
                    continue
                target = _real((_top(self.workspace) if hooks else path.parent) / os.path.expanduser(_plain(value)))
                target = target.parent if target and target.name == "_" else target
                if target and self.workspace in target.parents:
                    led.append(("hook" if hooks else "config", target, ""))
        return list(dict.fromkeys(led))

    def _own(self) -> Iterator[Place]:
        """All of our configuration. Of our data, that there is any, and the configuration of the snapshots' repositories."""
        if self.config:
            yield from (("own", path, problem) for path, problem in _tree(self.config))
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


# ---- what lies where -------------------------------------------------------------------------------------


def git_folders(workspace: Path) -> list[Path]:
    """The folders that git needs to write to in a workspace, which may lie elsewhere: in a folder above, or where a linked
    worktree or a submodule has them. What lies in the workspace is believed only where the other place points back to it.
    """
    top = _top(workspace)
    folder, here = _git_folder(top), os.path.realpath(top)
    if folder is None or not os.path.isfile(folder / "HEAD"):
        return []
    if str(folder) == os.path.join(here, ".git"):
        return [folder]
    common = _common(folder)
    if folder.parent == common / "worktrees" and _line(folder / "gitdir") == os.path.join(here, ".git"):
        return [common]
    settings = dict(entries(_bytes(folder / "config") or b""))
    return [folder] if WORKTREE in settings and _real(folder / _plain(settings[WORKTREE])) == Path(here) else []


def _real(path: Path) -> Path | None:
    """Where it leads; None where the name is none (too long, a NUL)."""
    try:
        return Path(os.path.realpath(path))
    except (OSError, ValueError):
        return None


def _top(workspace: Path) -> Path:
    """The folder that holds .git: the workspace or the first above it, else the workspace."""
    return next((each for each in (workspace, *workspace.parents) if os.path.lexists(each / ".git")), workspace)


def _git_folder(top: Path) -> Path | None:
    """Where .git is, or leads to."""
    path = top / ".git"
    if os.path.isdir(path):
        return _real(path)
    target = _line(path)
    return _real(top / target.removeprefix("gitdir:").strip()) if target.startswith("gitdir:") else None


def _common(folder: Path) -> Path:
    """What the worktrees of a repository share."""
    target = _line(folder / "commondir")
    return (_real(folder / target) if target else None) or folder


def _is_bare(folder: Path) -> bool:
    """Does git take the folder itself for a repository?"""
    return (not os.path.lexists(folder / ".git") and all(os.path.isdir(folder / name) for name in ("objects", "refs"))
            and re.match(r"ref:\s*refs/|[0-9a-f]{40}", _line(folder / "HEAD")) is not None)


def _of_git(folder: Path, known: Iterable[Path]) -> Iterator[Place]:
    """What git reads without being asked, of a repository, its worktrees and its submodules, those that are `known` for certain."""
    common = _common(folder)
    modules = list(_modules(common))
    yield from (("pointer", path, "" if problem == LINK else problem) for path, problem in modules if problem)
    shared = dict.fromkeys([common, *(path for path, problem in modules if not problem),
                            *(path for path in known if common / "modules" in path.parents)])
    trees = [each for path in shared for each in _inside(path / "worktrees")]
    yield from (("pointer", path, "" if problem == LINK else problem) for path, problem in trees if problem)
    for each in dict.fromkeys([folder, *shared, *(path for path, problem in trees if not problem)]):
        yield "pointer", each / "commondir", ""
        yield from (("config", each / name, "") for name in ("config", "config.worktree"))
        yield "todo", each / "rebase-merge" / "git-rebase-todo", ""
    for each in shared:
        yield from (("hook", path, problem) for path, problem in _tree(each / "hooks", ".sample")
                    if problem or path.name != "hooks" or path.parent != each or path.is_symlink())


def _modules(folder: Path) -> Iterator[tuple[Path, str]]:
    """The folders of submodules, also of those in submodules, and of those with a slash in the name; and what is no such folder."""
    waiting, seen = [(folder / "modules", 0)], 0
    while waiting:
        place, depth = waiting.pop()
        for path, problem in _inside(place):
            seen += 1
            if seen > MAX_ENTRIES or (depth == MAX_DEPTH and not os.path.lexists(path / "HEAD")):
                yield folder / "modules", CROWDED
                return
            if problem:
                yield path, problem
            elif os.path.lexists(path / "HEAD"):
                yield path, ""
                waiting.append((path / "modules", 0))
            else:
                waiting.append((path, depth + 1))


def _inside(folder: Path) -> list[tuple[Path, str]]:
    """The folders and links in a folder, or the folder itself with the reason why it is not known."""
    if os.path.islink(folder):
        return [(folder, LINK)]
    listed = _listed(folder)
    if isinstance(listed, str):
        return [(folder, listed)]
    return [(path, LINK if kind == "link" else "") for path, kind in listed if kind]


def _listed(folder: Path) -> list[tuple[Path, str]] | str:
    """(path, "folder", "link" or "") of all in a folder; or why that is not known. Nothing, where there is no folder."""
    try:
        with os.scandir(folder) as entries:
            listed = [(Path(each.path), "link" if each.is_symlink() else "folder" if each.is_dir(follow_symlinks=False) else "")
                      for each in itertools.islice(entries, MAX_ENTRIES + 1)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError):
        return CLOSED
    return listed if len(listed) <= MAX_ENTRIES else CROWDED


def _tree(folder: Path, without: str = "/") -> Iterator[tuple[Path, str]]:
    """A folder and all that is in it but names with a certain end; links are not followed. A folder comes again with the reason
    why it is not known."""
    yield folder, ""
    waiting, seen = [] if folder.is_symlink() else [folder], 0
    while waiting:
        place = waiting.pop()
        listed = _listed(place)
        seen += 0 if isinstance(listed, str) else len(listed)
        if listed == CROWDED or seen > MAX_ENTRIES:
            yield folder, CROWDED
            return
        if isinstance(listed, str):
            yield place, listed
            continue
        for path, kind in listed:
            if not path.name.endswith(without):
                yield path, ""
                waiting += [path] if kind == "folder" else []


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
    data = _bytes(path) if stat.S_ISREG(info.st_mode) and info.st_size <= most else None
    if data is None or len(data) > most:
        return Found(role, "other", data=f"{info.st_mode} {info.st_size} {info.st_mtime_ns} {info.st_ctime_ns} {info.st_ino}".encode())
    return Found(role, "file", stat.S_IMODE(info.st_mode), data)


def _bytes(path: Path) -> bytes | None:
    """A file, or the beginning of one that is too large; None where there is none that can be read."""
    return small_file(path, MAX_FILE + 1)


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


def _plain(value: str) -> str:
    """A value as git understands it: without quotes and the comment behind it."""
    bare = re.sub(r'"((?:[^"\\]|\\.)*)"?|\s*[#;].*', lambda match: match[1] or "", value)
    return re.sub(r'\\(["\\])', r"\1", bare)


def told(changes: Sequence[Change], workspace: Path) -> str:
    """Changes in one line: `.git/hooks/pre-commit (new), .git/config (core.pager)`."""
    names = [(str(each.path.relative_to(workspace)) if each.path.is_relative_to(workspace) else str(each.path), each) for each in changes]
    texts = [f"{name} ({each.what}{f'; not undone: {each.problem}' if each.problem else ''})" for name, each in names]
    return ", ".join(texts[:MAX_TOLD] + [f"and {len(texts) - MAX_TOLD} more"] * (len(texts) > MAX_TOLD))
