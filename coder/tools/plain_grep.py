"""The search of grep if neither ripgrep nor git is installed: a program of its own, and its walk.

Only folders of tools are left out, since nothing here reads .gitignore.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from coder.tools import workspace


def walk(top: str | Path) -> Iterator[str]:
    """The paths of the files below a folder, also of ignored ones, without the folders of tools."""
    for folder, folders, files in os.walk(top):
        folders[:] = sorted({*folders} - workspace.TOOL_FOLDERS)
        yield from (os.path.relpath(os.path.join(folder, name), top) for name in sorted(files))


def print_matches(pattern: str, flags: str, context: str, *names: str) -> None:
    """The program of PLAIN: search below the current folder, and print as the others do.

    `flags`: i ignores case, f searches standard input. `names`: patterns for the names of files.
    """
    try:
        wanted = re.compile(pattern, re.IGNORECASE if "i" in flags else 0)
    except re.error as error:
        sys.stderr.write(f"regex: {error}\n")
        sys.exit(2)
    if "f" in flags:
        _print_matches_in("-", sys.stdin.buffer.read(), wanted, int(context))
        return
    for path in walk("."):
        base = os.path.basename(path)
        if not names or any(fnmatchcase(base, name) for name in names):
            data = workspace.read_small_file(path) or b""
            _print_matches_in(path, data, wanted, int(context))


def _print_matches_in(
    path: str,
    data: bytes,
    wanted: re.Pattern[str],
    context: int,
) -> None:
    if not data or b"\0" in data:
        return
    lines = data.removesuffix(b"\n").split(b"\n")
    columns = _columns(lines, wanted)
    shown = set[int]()
    for at in columns:
        first = max(0, at - context)
        end = min(len(lines), at + context + 1)
        shown.update(range(first, end))
    last = -1
    for at in sorted(shown):
        if context and at != last + 1:
            sys.stdout.buffer.write(b"--\n")
        last = at
        mark = b":%d:" % columns[at] if at in columns else b"-"
        sys.stdout.buffer.write(b"%s\0%d%s%s\n" % (os.fsencode(path), at + 1, mark, lines[at]))


def _columns(lines: list[bytes], wanted: re.Pattern[str]) -> dict[int, int]:
    """The columns of the matches, in bytes from 1, by the index of their line."""
    columns = dict[int, int]()
    for at, line in enumerate(lines):
        text = line.rstrip(b"\r").decode("utf-8", "surrogateescape")
        match = wanted.search(text)
        if match:
            before = text[: match.start()].encode("utf-8", "surrogateescape")
            columns[at] = len(before) + 1
    return columns
