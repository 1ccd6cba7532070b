"""Paths as models write them: what was meant where that is certain, names that are near where it is not.

A path is mended only to read, and only if nothing is there by its own name: `file://`, quotes, the line after a
name (`app.py:12`), the a/ of a diff. For everything else the error names what is there.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import time
from collections.abc import Iterator
from itertools import islice

from coder.tools import workspace
from coder.toolset import ToolContext
from coder.types import ToolError

MAX_NAMED = 3  # paths in a "did you mean"
MAX_LOOKED_AT = 20_000  # files
LOOK_SECONDS = 0.3
NEAR = 0.75  # of difflib: `aplication.py` for `application.py`, not `test.py` for `text.md`

LINE = re.compile(r"(?P<path>.+?)(?::|#L)(?P<line>\d+)(?:(?::|-L?)\d+)?")
VARIABLE = re.compile(r"\$\w|\$\{")


def meant(ctx: ToolContext, path: str) -> tuple[str, int]:
    """(the path that a reading tool was given or surely meant, the line that it names, 0 if none)."""
    if _is_there(ctx, path):
        return path, 0
    for plain in _without_marks(path):
        if _is_there(ctx, plain):
            return plain, 0
        with_line = LINE.fullmatch(plain)
        if with_line and _is_there(ctx, with_line["path"]):
            return with_line["path"], int(with_line["line"])
    return path, 0


def _is_there(ctx: ToolContext, path: str) -> bool:
    try:
        return bool(path) and os.path.lexists(ctx.cwd / os.path.expanduser(path))
    except (OSError, ValueError):
        return False


def _without_marks(path: str) -> Iterator[str]:
    """The path without what surrounds it in other texts, the least change first."""
    plain = path.strip().strip("\"'`").removeprefix("file://").removeprefix("@")
    yield plain
    yield plain.replace("\\", "/")
    if plain.startswith(("a/", "b/")):  # of a diff
        yield plain[2:]


@contextlib.contextmanager
def naming_near(ctx: ToolContext, path: str, what: str = "file", way: str = "") -> Iterator[None]:
    """The error for a missing file names it as the model did, and what is there instead, else a `way` on."""
    try:
        yield
    except workspace.MissingFileError:
        raise ToolError(f"there is no {what} {path}{did_you_mean(ctx, path) or way}") from None


def without_prefix(ctx: ToolContext, path: str) -> str:
    """The path without the a/ or b/ of a diff, if only that is there."""
    rest = path[2:] if path.startswith(("a/", "b/")) else ""
    return rest if _is_there(ctx, rest) and not _is_there(ctx, path) else path


def did_you_mean(ctx: ToolContext, path: str) -> str:
    """ "; did you mean src/app.py?", or "" if nothing is near."""
    if VARIABLE.search(path):
        return "; variables are not expanded here"
    found = list(islice(dict.fromkeys(_near(ctx, path)), MAX_NAMED))
    return f"; did you mean {', '.join(found)}?" if found else ""


def _near(ctx: ToolContext, path: str) -> Iterator[str]:
    """What is in the workspace: the longest tail of the path, its name elsewhere, a similar name."""
    pieces = re.split(r"[\\/]", path.strip().strip("\"'`"))
    parts = [part for part in pieces if part not in ("", ".")]
    tail = _tail_there(ctx, parts)
    if tail:
        yield tail
    wanted = parts[-1].lower() if parts else ""
    by_name = dict[str, list[str]]()
    for file in _files(ctx):
        by_name.setdefault(os.path.basename(file).lower(), []).append(file)
    for name in (wanted, *difflib.get_close_matches(wanted, by_name, MAX_NAMED, NEAR)):
        for file in by_name.get(name, ()):
            yield workspace.escaped(file)


def _tail_there(ctx: ToolContext, parts: list[str]) -> str:
    """The longest part at the end of a path that leads to something in the workspace; "" if none does."""
    for start in range(1, len(parts)):
        tail = "/".join(parts[start:])
        if ".." not in parts[start:] and os.path.lexists(ctx.cwd / tail):
            return tail
    return ""


def _files(ctx: ToolContext) -> Iterator[str]:
    """The files and folders of the workspace, as many as a moment shows, the nearest first."""
    until = time.monotonic() + LOOK_SECONDS
    found = 0
    for folder, folders, files in os.walk(ctx.cwd):
        folders[:] = sorted({*folders} - workspace.TOOL_FOLDERS)
        for name in sorted([*files, *folders]):
            yield os.path.relpath(os.path.join(folder, name), ctx.cwd)
        found += len(files)
        if found > MAX_LOOKED_AT or time.monotonic() > until:
            return
