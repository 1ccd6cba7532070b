"""Paths as models write them: what was meant if that is certain, else names that are near.

A path is mended only to read, and only if nothing has exactly this path: `file://`, quotes, the
line after a name (`app.py:12`), the a/ of a diff. For everything else the error names what is
there.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import time
from collections.abc import Iterator

from coder.tools import workspace
from coder.toolset import ToolContext
from coder.types import ToolError

MAX_NAMED = 3  # paths in a "did you mean"
MAX_LOOKED_AT = 20_000  # files and folders
FEW = 100  # of them, for which the time does not count: the machine may stand still
LOOK_SECONDS = 0.3
NEAR = 0.75  # of difflib: `aplication.py` for `application.py`, not `test.py` for `text.md`
SHORT = 3  # characters of a name that is another one's begin: `app.py` for `application.py`

LINE = r"(?P<path>.+?)(?::|#L)(?P<line>\d+)(?:(?::|-L?)\d+)?"
VARIABLE = r"\$\w|\$\{"


def meant(ctx: ToolContext, path: str) -> tuple[str, int]:
    """(the path of a reading tool, or what it surely means; the line that it names, or 0)."""
    if _is_there(ctx, path):
        return path, 0
    for plain in _without_marks(path):
        if _is_there(ctx, plain):
            return plain, 0
        with_line = re.fullmatch(LINE, plain)
        if with_line and _is_there(ctx, with_line["path"]):
            return with_line["path"], int(with_line["line"])
    return path, 0


def _is_there(ctx: ToolContext, path: str) -> bool:
    try:
        return bool(path) and os.path.lexists(ctx.cwd / os.path.expanduser(path))
    except ValueError:  # a ~ and a name that no user can have
        return False


def _without_marks(path: str) -> Iterator[str]:
    """The path without what is around it in other texts, the least change first."""
    plain = path.strip().strip("\"'`").removeprefix("file://").removeprefix("@")
    yield plain
    yield plain.replace("\\", "/")
    if plain.startswith(("a/", "b/")):  # of a diff
        yield plain[2:]


@contextlib.contextmanager
def naming_near(
    ctx: ToolContext,
    path: str,
    what: str = "file",
    way: str = "",
) -> Iterator[None]:
    """Turn the error for a missing file into one with the model's path and paths that are near.

    If none is near, it has the `way` to go on.
    """
    try:
        yield
    except workspace.MissingFileError:
        raise ToolError(f"there is no {what} {path}{did_you_mean(ctx, path) or way}") from None


def without_prefix(ctx: ToolContext, path: str) -> str:
    """The path without the a/ or b/ of a diff, if only that is there."""
    if path.startswith(("a/", "b/")) and not _is_there(ctx, path) and _is_there(ctx, path[2:]):
        return path[2:]
    return path


def did_you_mean(ctx: ToolContext, path: str) -> str:
    """ "; did you mean src/app.py?", or "" if nothing is near."""
    if re.search(VARIABLE, path):
        return "; variables are not expanded here"
    near = list(dict.fromkeys(_near(ctx, path)))
    if not near:
        return ""
    return f"; did you mean {', '.join(near[:MAX_NAMED])}?"


def _near(ctx: ToolContext, path: str) -> Iterator[str]:
    """Paths of the workspace: the longest tail of this one, its name elsewhere, a similar name."""
    pieces = re.split(r"[\\/]", path.strip().strip("\"'`"))
    parts = [part for part in pieces if part not in ("", ".")]
    if not parts:
        return
    tail = _tail_there(ctx, parts)
    if tail:
        yield tail
    wanted = parts[-1].lower()
    by_name = _files_by_name(ctx)
    names = difflib.get_close_matches(wanted, by_name, MAX_NAMED, NEAR)
    if not names:
        names = [name for name in by_name if _is_short_for(name, wanted)]
    for name in names:
        for file in by_name[name]:
            yield workspace.escaped(file)


def _files_by_name(ctx: ToolContext) -> dict[str, list[str]]:
    """The files and folders of the workspace by their names in small letters.

    Those above come first; what is not reached in time is left out.
    """
    by_name = dict[str, list[str]]()
    deadline = time.monotonic() + LOOK_SECONDS
    count = 0
    for folder, folders, files in os.walk(ctx.cwd):
        folders[:] = sorted({*folders} - workspace.TOOL_FOLDERS)
        for name in sorted([*files, *folders]):
            path = os.path.relpath(os.path.join(folder, name), ctx.cwd)
            by_name.setdefault(name.lower(), []).append(path)
        count += len(files) + len(folders)
        is_late = count > FEW and time.monotonic() > deadline
        if count > MAX_LOOKED_AT or is_late:
            break
    return by_name


def _is_short_for(name: str, wanted: str) -> bool:
    stem, suffix = os.path.splitext(name)
    wanted_stem, wanted_suffix = os.path.splitext(wanted)
    return len(stem) >= SHORT and wanted_stem.startswith(stem) and suffix == wanted_suffix


def _tail_there(ctx: ToolContext, parts: list[str]) -> str:
    """The longest end of a path that leads to something in the workspace; "" if none does."""
    for start in range(1, len(parts)):
        tail = "/".join(parts[start:])
        if ".." not in parts[start:] and os.path.lexists(ctx.cwd / tail):
            return tail
    return ""
