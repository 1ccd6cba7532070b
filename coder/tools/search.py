"""grep and glob.

grep runs in a child that can be killed: ripgrep where there is one, else our own (searcher.py). Both skip .git, ignored
and binary files, and give the same lines. Files that hold secrets by their names are passed over, whether they match or not:
even that they do would tell what is in them. glob lists their names.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from coder.tools import searcher
from coder.tools.process import Ending, output_of
from coder.tools.secrets import secret_for
from coder.tools.workspace import escaped, shown, to_read
from coder.toolset import ToolContext, tool
from coder.types import ToolError, ToolResult

TIMEOUT = 30  # seconds of one search
MAX_MATCHES = 100
MAX_SHOWN = 500  # characters of one line
MAX_FILES = 200  # of one glob


@tool(concurrent=True)
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
    """Search file contents with a regular expression: `path:line:text` per match. Ignored, binary and secret files are skipped.

    pattern: regular expression
    path: file or folder, default the workspace
    glob: only files that match, e.g. *.py
    ignore_case: ignore case
    literal: the pattern is plain text
    context: lines to show around each match
    limit: lines to return, default 100
    """
    target = yield from to_read(ctx, path)
    _refuse_special(target, path)
    if not target.is_dir() and secret_for(ctx)(name := shown(ctx, target)):
        yield from ctx.ask("read", name)
    if "\0" in pattern or not pattern:
        raise ToolError("the pattern is empty or holds a NUL")
    options = {
        "pattern": pattern,
        "path": str(target),
        "workspace": str(ctx.cwd),
        "glob": glob,
        "ignore_case": ignore_case,
        "literal": literal,
        "context": min(max(0, context), 20),
    }
    found = Found(ctx, max(1, limit), *_chosen(ctx, target, glob))
    work = output_of(_command(options), ctx.cwd, ctx.abort, TIMEOUT, confine=ctx.confine)
    try:
        ending = _collect(work, found)
    finally:
        work.close()
    ctx.abort.check()
    if ending and ending.cause == "timeout":
        raise ToolError(
            f"the search took more than {TIMEOUT} s and was stopped. Use a simpler pattern, or name a folder or a glob."
        )
    if ending and ending.code not in (0, 1) and not found.lines:
        raise ToolError("\n".join(found.notes) or f"the search failed with exit code {ending.code}")
    return ToolResult(found.text(), details={"matches": len(found.lines)})


def _chosen(ctx: ToolContext, target: Path, glob: str) -> tuple[Callable[[str], bool], list[str]]:
    """Does a file count? What ripgrep makes of a glob and of the folders above depends on its version; ours does not.

    Also the files right in the folder that would count if they were not secret.
    """
    cwd = str(ctx.cwd)
    try:
        wanted = searcher.chooser(glob, str(target), cwd)
    except re.error as error:
        raise ToolError(f"{glob} is no glob: {error}") from None
    if not target.is_dir():
        return lambda path: True, []
    above = searcher.rules_above(str(target), cwd)

    def secret(path: str) -> bool:
        return secret_for(ctx)(shown(ctx, Path(path)))

    def counts(path: str) -> bool:
        return (
            wanted(path)
            and not secret(path)
            and not (above and searcher.hidden(path, str(target), above))
        )

    paths = [os.path.join(target, name) for name in _names(target)]
    return counts, [
        escaped(os.path.basename(path))
        for path in paths
        if secret(path) and wanted(path) and not os.path.isdir(path)
    ]


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder), key=os.fsencode)
    except OSError:  # the search says it
        return []


def _refuse_special(target: Path, path: str) -> None:
    try:
        mode = target.stat().st_mode
    except OSError as error:
        raise ToolError(f"{path} cannot be searched: {error.strerror}") from None
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ToolError(f"{path} is neither a regular file nor a folder")


def _command(options: dict[str, Any]) -> list[str]:
    """The child that searches; both write `path NUL number:text`, in the order of the paths."""
    ripgrep = _ripgrep()
    if not ripgrep:
        return [sys.executable, "-I", str(Path(searcher.__file__)), json.dumps(options)]
    flags = [
        flag
        for name, flag in (("ignore_case", "--ignore-case"), ("literal", "--fixed-strings"))
        if options[name]
    ]
    # Narrows; a --glob would also bring back what is ignored, and .git
    name = options["glob"].rpartition("/")[2]
    if re.fullmatch(r"[\w.?-]*\*?[\w.?-]+(\{[\w.,-]+\})?", name):
        flags += ["--type-add", f"chosen:{name}", "--type=chosen"]
    return [
        ripgrep,
        "--no-config",
        "--null",
        "--with-filename",
        "--line-number",
        "--no-heading",
        "--color=never",
        "--sort=path",
        "--hidden",
        "--glob=!.git",
        "--no-require-git",
        "--no-ignore-parent",
        "--no-ignore-dot",
        "--no-ignore-global",
        "--engine=auto",
        "--crlf",
        "--max-columns=2000",
        "--max-columns-preview",
        "--mmap",
        f"--context={options['context']}",
        *flags,
        "--regexp",
        options["pattern"],
        "--",
        options["path"],
    ]


@cache
def _ripgrep() -> str | None:
    """ripgrep, unless it lies in the folder we work in."""
    found = shutil.which("rg")
    return found if found and not Path(found).resolve().is_relative_to(Path.cwd()) else None


class Found:
    """The lines of a search in files that are `chosen`, at most `limit` of them, and what the search had to say beside.

    `passed_over`: names of files that are not searched since they hold secrets.
    """

    def __init__(
        self,
        ctx: ToolContext,
        limit: int,
        chosen: Callable[[str], bool],
        passed_over: Sequence[str] = (),
    ) -> None:
        self.ctx, self.limit, self.passed_over = ctx, limit, passed_over
        self.chosen = cache(chosen)
        self.lines: list[str] = []
        self.full = False
        self._other: list[
            str
        ] = []  # lines without a NUL: notes, and beginnings of paths with a newline in them

    def add(self, line: str) -> None:
        path, nul, rest = line.partition("\0")
        if not nul:
            self._other.append(line)
            return
        for at in range(len(self._other)):
            if os.path.lexists(whole := "\n".join([*self._other[at:], path])):
                path, self._other = whole, self._other[:at]
                break
        self._other = self._notes()
        if not self.chosen(path):
            return
        if len(self.lines) == self.limit:
            self.full = True
            return
        rest = rest.rstrip("\r")
        cut = rest if len(rest) <= MAX_SHOWN else rest[:MAX_SHOWN] + " … (line cut)"
        number = next((at for at, c in enumerate(cut) if not c.isdigit()), 0)
        self.lines.append(f"{escaped(shown(self.ctx, Path(path)))}{cut[number : number + 1]}{cut}")

    def _notes(self) -> list[str]:
        # That stands between groups of context
        return [line for line in self._other if line.rstrip("\r") not in ("", "--")]

    @property
    def notes(self) -> list[str]:
        return [escaped(line)[:MAX_SHOWN] for line in self._notes()[:10]]

    def text(self) -> str:
        tail = (
            [
                f"({self.limit} lines shown, there are more; narrow the pattern, the path or the glob)"
            ]
            if self.full
            else []
        )
        tail += [f"({note})" for note in self.notes]
        if self.passed_over:
            count = f" and {len(self.passed_over) - 5} more" if len(self.passed_over) > 5 else ""
            tail.append(
                f"(not searched, since they may hold secrets: {', '.join(self.passed_over[:5])}{count}; path can name one)"
            )
        return "\n".join([*(self.lines or ["No matches."]), *tail])


def _collect(work: Iterator[bytes], found: Found) -> Ending | None:
    """Read until the end, or until there is enough: then None."""
    rest = b""
    while not found.full:
        try:
            data = next(work)
        except StopIteration as end:
            for line in rest.splitlines():
                found.add(line.decode("utf-8", "surrogateescape"))
            ending: Ending = end.value
            return ending
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            found.add(line.decode("utf-8", "surrogateescape"))
    return None


@tool(concurrent=True)
def glob(ctx: ToolContext, pattern: str, path: str = ".") -> Generator[Any, None, ToolResult]:
    """Find files by name, newest first, at most 200. Ignored files are skipped.

    pattern: e.g. *.py (at any depth) or src/**/*.ts
    path: folder to look in, default the workspace
    """
    target = yield from to_read(ctx, path)
    if not target.is_dir():
        raise ToolError(f"{path} is not a folder")
    try:
        wanted = searcher.Glob(pattern.removeprefix("./"))
    except re.error as error:
        raise ToolError(f"{pattern} is no pattern: {error}") from None
    found, notes = list[tuple[float, str]](), list[str]()
    for entry in searcher.walk(str(target), notes, searcher.rules_above(str(target), str(ctx.cwd))):
        ctx.abort.check()
        if wanted.match(os.path.relpath(entry.path, target)):
            with contextlib.suppress(OSError):
                found.append((-entry.stat().st_mtime, entry.path))
    found.sort()
    lines = [escaped(shown(ctx, Path(name))) for _, name in found[:MAX_FILES]]
    if len(found) > MAX_FILES:
        lines.append(f"({MAX_FILES} of {len(found)} files, the newest; narrow the pattern)")
    lines += [f"(skipped {escaped(note)})" for note in notes[:10]]
    return ToolResult("\n".join(lines) or "No files found.", details={"files": len(found)})
