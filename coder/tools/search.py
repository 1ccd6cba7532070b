"""grep and glob: what they find, and what they say if it is too much or nothing.

search_programs.py does the search. grep leaves out files that may hold secrets, whether they match
or not: that a file matches would tell what is in it.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

from coder.tools import paths, slips, workspace
from coder.tools.search_programs import Line, Search, Wanted
from coder.toolset import ToolContext, tool
from coder.types import ToolError, ToolResult

MAX_MATCHES = 100
COUNT_SECONDS = 1.0  # for which matches are counted that are not shown
MAX_CONTEXT = 20  # lines around a match
MAX_NAMED = 3  # files with the most matches
MAX_FILES = 200  # of one glob

# A line end in a pattern, outside of a set of characters
LINE_END = r"(?<!\\)(?:\\\\)*\\n"
SET = r"\[\^?[^\]]*\]"
# How basic regular expressions write what has no backslash here
BASIC = r"\\(?P<mark>[|()+?])"


@tool(concurrent=True, permission="read", default="allow", slips=slips.GREP)
def grep(
    ctx: ToolContext,
    pattern: str,
    path: str = ".",
    glob: str = "",
    ignore_case: bool = False,
    literal: bool = False,
    context: int = 0,
    limit: int = MAX_MATCHES,
) -> Generator[Any, None, ToolResult]:
    """Search file contents with a regular expression: the path of each file, then `line:text` per
    match.

    pattern: regular expression
    path: file or folder, default the workspace
    glob: only files that match, e.g. *.py
    ignore_case: ignore case
    literal: the pattern is plain text
    context: lines to show around each match
    limit: lines to return, default 100
    """
    path, _ = paths.meant(ctx, path)
    target = yield from workspace.to_read(ctx, path)
    if not target.is_dir():
        yield from workspace.ask_to_show(ctx, target)
    _check_pattern(pattern)
    context = min(max(0, context), MAX_CONTEXT)
    wanted = Wanted(pattern, ignore_case=ignore_case, literal=literal, context=context)
    excerpt = Excerpt(max(1, limit))
    is_several = not literal and spans_lines(pattern)
    with contextlib.ExitStack() as stack:
        with paths.naming_near(ctx, path):
            search = Search(ctx, target, glob, stack)
        try:
            excerpt.take(search.grep(wanted))
        except ToolError:
            if not is_several:
                raise
            raise ToolError(WITHIN_A_LINE) from None
    if is_several and not excerpt.lines:
        raise ToolError(WITHIN_A_LINE)
    text = "\n".join(excerpt.lines) or _say_nothing_found(pattern, literal)
    notes = [f"({note})" for note in (*excerpt.notes(), *search.notes)]
    return ToolResult("\n".join([text, *notes]), details={"matches": excerpt.shown})


WITHIN_A_LINE = "a match lies within one line: search for one of the lines, with context"


def _check_pattern(pattern: str) -> None:
    if "\0" in pattern or not pattern:
        raise ToolError("the pattern is empty or holds a NUL")
    if "\n" in pattern:
        raise ToolError(WITHIN_A_LINE)


def spans_lines(pattern: str) -> bool:
    """Does the regular expression ask for a line end? No match has one."""
    return bool(re.search(LINE_END, re.sub(SET, "", pattern)))


def _say_nothing_found(pattern: str, literal: bool) -> str:
    basic = None if literal else re.search(BASIC, pattern)
    if basic:
        return f"No matches. Here {basic['mark']} is written without a backslash."
    return "No matches (ignored and secret files are skipped)."


class Excerpt:
    """The first lines of a search, at most `most`, and how many matches there are in all."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.shown = 0
        self.lines: list[str] = []  # below the name of their file; with a -- between groups
        self._file = ""  # of the last line
        self.matches = Counter[str]()  # by file
        self.is_cut = False
        self.is_counted_in_part = False

    def take(self, lines: Iterable[Line]) -> None:
        """Keep the first lines; count on for a second at most."""
        deadline = 0.0
        for line in lines:
            self.matches[line.name] += line.is_match
            if self.shown < self.most:
                self._show(line)
                continue
            self.is_cut = True
            deadline = deadline or time.monotonic() + COUNT_SECONDS
            if time.monotonic() > deadline:
                self.is_counted_in_part = True
                return

    def _show(self, line: Line) -> None:
        if line.name != self._file:
            # A name may look like a line of a file; what follows an empty line is a name
            self.lines += ["", line.name] if self.lines else [line.name]
            self._file = line.name
        elif line.begins_group:
            self.lines.append("--")
        self.lines.append(str(line))
        self.shown += 1

    def notes(self) -> Iterator[str]:
        """If it was cut, what would be needed to search again."""
        if not self.is_cut:
            return
        total = f"{self.matches.total():,} matches"
        if self.is_counted_in_part:
            total = f"over {total}"
        files = len(self.matches)
        places = "1 file"
        if files > 1:
            named = [f"{name} {count:,}" for name, count in self.matches.most_common(MAX_NAMED)]
            places = f"{files:,} files; the most: {', '.join(named)}"
        narrow = "narrow the pattern, the path or the glob"
        yield f"{self.most} lines shown of {total} in {places}; {narrow}"


@tool(concurrent=True, permission="read", default="allow", slips=slips.GLOB)
def glob(ctx: ToolContext, pattern: str, path: str = ".") -> Generator[Any, None, ToolResult]:
    """Find files by name, newest first.

    pattern: e.g. *.py (at any depth) or src/**/*.ts
    path: folder, default the workspace
    """
    path, _ = paths.meant(ctx, path)
    target = yield from workspace.to_read(ctx, path)
    if not target.is_dir():
        near = "" if target.exists() else paths.did_you_mean(ctx, path)
        raise ToolError(f"{path} is not a folder{near}")
    files = list[tuple[float, str]]()  # its age, a file
    # Without the path of the workspace: the search stays in its folder
    wanted = pattern.removeprefix(f"{ctx.cwd}/").lstrip("/") or "**"
    with contextlib.ExitStack() as stack:
        search = Search(ctx, target, wanted, stack)
        for name in search.names():
            shown = workspace.shown(ctx, target / name)
            # The pattern may be meant as seen from the workspace, too
            if not search.glob.matches(name, shown):
                continue
            with contextlib.suppress(OSError):
                info = os.stat(search.cwd / name, follow_symlinks=False)
                if stat.S_ISREG(info.st_mode):
                    files.append((-info.st_mtime, shown))
    files.sort()
    lines = [workspace.escaped(shown) for _, shown in files[:MAX_FILES]]
    if len(files) > MAX_FILES:
        lines.append(f"({MAX_FILES} of {len(files)} files, the newest; narrow the pattern)")
    text = "\n".join(lines) or _say_no_files(target, wanted)
    return ToolResult(text, details={"files": len(files)})


def _say_no_files(target: Path, pattern: str) -> str:
    if "*" not in pattern and (target / pattern).is_dir():
        name = pattern.rstrip("/")
        return f"No files found: {name} is a folder. Use ls, or the pattern {name}/**."
    none = "No files found (ignored files are skipped)."
    if "," in pattern and "{" not in pattern:
        return f"{none} Several patterns are written {{{pattern}}}."
    if not re.search(r"[*?\[]", pattern):
        name = pattern.rpartition("/")[2]
        return f"{none} The pattern is a whole name: *{name}* finds parts of one."
    return none
