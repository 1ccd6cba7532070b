"""Where git looks without being asked: its folder, what worktrees share, submodules, hooks; the workspace and above.

git is not run for it. What lies there may have been made to break a look: it is bounded in number and depth, and a folder that
cannot be looked into, or holds too much, is told as such (CLOSED, CROWDED).

What it leaves out: what the files say (git_config.py), what of a change counts (watch.py).
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from coder.features.git_config import WORKTREE, entries, plain
from coder.tools.searcher import small_file

MAX_FILE = 1 << 20  # bytes
MAX_DEPTH = 8  # folders in the name of a submodule
MAX_ENTRIES = 2000  # in a folder of hooks, or among submodules
CLOSED, CROWDED, LINK = "cannot be looked into", "holds too much to be looked at", "link"

Role = Literal["pointer", "config", "hook", "todo", "own"]
Place = tuple[Role, Path, str]  # the last: why it is unseen, or ""


def git_folders(workspace: Path) -> list[Path]:
    """The folders that git needs to write to in a workspace, which may lie elsewhere: in a folder above, or where a linked
    worktree or a submodule has them. What lies in the workspace is believed only where the other place points back to it.
    """
    top = top_of(workspace)
    folder, here = git_folder(top), os.path.realpath(top)
    if folder is None or not os.path.isfile(folder / "HEAD"):
        return []
    if str(folder) == os.path.join(here, ".git"):
        return [folder]
    common = _common(folder)
    if folder.parent == common / "worktrees" and _line(folder / "gitdir") == os.path.join(here, ".git"):
        return [common]
    settings = dict(entries(content(folder / "config") or b""))
    return [folder] if WORKTREE in settings and real(folder / plain(settings[WORKTREE])) == Path(here) else []


def real(path: Path) -> Path | None:
    """Where it leads; None where the name is none (too long, a NUL)."""
    try:
        return Path(os.path.realpath(path))
    except (OSError, ValueError):
        return None


def top_of(workspace: Path) -> Path:
    """The folder that holds .git: the workspace or the first above it, else the workspace."""
    return next((each for each in (workspace, *workspace.parents) if os.path.lexists(each / ".git")), workspace)


def git_folder(top: Path) -> Path | None:
    """Where .git is, or leads to."""
    path = top / ".git"
    if os.path.isdir(path):
        return real(path)
    target = _line(path)
    return real(top / target.removeprefix("gitdir:").strip()) if target.startswith("gitdir:") else None


def _common(folder: Path) -> Path:
    """What the worktrees of a repository share."""
    target = _line(folder / "commondir")
    return (real(folder / target) if target else None) or folder


def is_bare(folder: Path) -> bool:
    """Does git take the folder itself for a repository?"""
    return (not os.path.lexists(folder / ".git") and all(os.path.isdir(folder / name) for name in ("objects", "refs"))
            and re.match(r"ref:\s*refs/|[0-9a-f]{40}", _line(folder / "HEAD")) is not None)


def of_git(folder: Path, known: Iterable[Path]) -> Iterator[Place]:
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
        yield from (("hook", path, problem) for path, problem in tree(each / "hooks", ".sample")
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


def tree(folder: Path, without: str = "/") -> Iterator[tuple[Path, str]]:
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


def content(path: Path) -> bytes | None:
    """A file, or the beginning of one that is too large; None where there is none that can be read."""
    return small_file(path, MAX_FILE + 1)


def _line(path: Path) -> str:
    return os.fsdecode(content(path) or b"").strip()
