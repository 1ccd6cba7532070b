"""grep and glob: through ripgrep where it is installed, else git, else by a plain walk.

Binary files, .git and what .gitignore names are skipped, and links are not followed. A search is a child process, so
that it can be stopped; it starts in the folder as it was opened, so that a link that takes its place leads nowhere.
grep leaves out the files that may hold secrets, whether they match or not: that one matches would tell what is in it.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import subprocess
import sys
from collections.abc import Generator, Iterator
from fnmatch import fnmatchcase
from functools import cache
from itertools import islice
from pathlib import Path
from typing import IO, Any

from coder.tools import slips, workspace
from coder.tools.bash import find_program, output_of
from coder.toolset import ToolContext, tool
from coder.types import ToolError, ToolResult

TIMEOUT = 30  # seconds of one search
MAX_MATCHES = 100
MAX_SHOWN = 500  # characters of one line
MAX_KEPT = 1 << 20  # bytes of one line of output
MAX_FILES = 200  # of one glob
MAX_NOTES = 10  # lines of a program's standard error
MAX_WAYS = 1000  # that the braces of a glob may stand for

RIPGREP = "--null --hidden --glob=!.git"
RIPGREP_GREP = """--with-filename --line-number --column --no-heading --color=never --sort=path
    --engine=auto --crlf --no-context-separator"""
GIT = "-c core.fsmonitor=false"  # that would start a program
GIT_LIST = "ls-files -coz --exclude-standard"
GIT_GREP = "grep --no-index --null --line-number --column --no-color --no-full-name -I"
PERL = "(*UCP)(*ANYCRLF)"  # letters of all languages, lines that end in CRLF
VARIABLES = {"LC_ALL": "C.UTF-8"}  # text is in characters
PLAIN = """
import sys
sys.path.append(sys.argv[1])
from coder.tools.search import print_matches
print_matches(*sys.argv[2:])
"""

# A path, the number of a line, the column of the match (none in a line of context), the line
RECORD = re.compile(rb"(.*?)\0(\d+)(?:([:\0])(\d+)\3|[-\0])(.*)", re.S)


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
    """Search file contents with a regular expression: `path:line:text` per match. Ignored, binary and
    secret files are skipped.

    pattern: regular expression
    path: file or folder, default the workspace
    glob: only files that match, e.g. *.py
    ignore_case: ignore case
    literal: the pattern is plain text
    context: lines to show around each match
    limit: lines to return, default 100
    """
    target = yield from workspace.to_read(ctx, path)
    if not target.is_dir():
        yield from workspace.ask_to_show(ctx, target)
    if "\0" in pattern or not pattern:
        raise ToolError("the pattern is empty or holds a NUL")
    flags = [f"-C{min(max(0, context), 20)}", *(["-i"] if ignore_case else [])]
    most = max(1, limit)
    with contextlib.ExitStack() as stack:
        search = Search(ctx, target, glob, stack)
        lines = list(islice(search.grep(pattern, literal, flags), most + 1))
    if len(lines) > most:
        narrow = "narrow the pattern, the path or the glob"
        search.notes.append(f"{most} lines shown, there are more; {narrow}")
    lines = lines[:most]
    text = "\n".join([*(lines or ["No matches."]), *(f"({note})" for note in search.notes)])
    return ToolResult(text, details={"matches": len(lines)})


@tool(concurrent=True, permission="read", default="allow", slips=slips.GLOB)
def glob(ctx: ToolContext, pattern: str, path: str = ".") -> Generator[Any, None, ToolResult]:
    """Find files by name, newest first, at most 200. Ignored files are skipped.

    pattern: e.g. *.py (at any depth) or src/**/*.ts
    path: folder to look in, default the workspace
    """
    target = yield from workspace.to_read(ctx, path)
    if not target.is_dir():
        raise ToolError(f"{path} is not a folder")
    found = list[tuple[float, str]]()
    with contextlib.ExitStack() as stack:
        search = Search(ctx, target, pattern, stack)
        for name in filter(search.glob.matches, search.names()):
            with contextlib.suppress(OSError):
                info = os.stat(search.cwd / name, follow_symlinks=False)
                if stat.S_ISREG(info.st_mode):
                    found.append((-info.st_mtime, workspace.shown(ctx, target / name)))
    found.sort()
    lines = [workspace.escaped(name) for _, name in found[:MAX_FILES]]
    if len(found) > MAX_FILES:
        lines.append(f"({MAX_FILES} of {len(found)} files, the newest; narrow the pattern)")
    return ToolResult("\n".join(lines) or "No files found.", details={"files": len(found)})


# ---- the programs ---------------------------------------------------------------------------


class Search:
    """A folder that is open, or a file in it, and the programs that search there.

    `cwd` names the folder whatever is at its path meanwhile; `stdin` is the file; `notes` is what a
    program said beside, `code` how it ended. Raises ToolError where there is neither.
    """

    def __init__(
        self, ctx: ToolContext, target: Path, glob: str, stack: contextlib.ExitStack
    ) -> None:
        self.ctx, self.target, self.glob = ctx, target, Glob(glob or "**")
        self.notes, self.code, self.is_file = list[str](), 0, not target.is_dir()
        self.stdin: IO[bytes] | int = subprocess.DEVNULL
        if self.is_file:
            self.stdin = stack.enter_context(workspace.opened(target))
        place = target if self.is_file else target / "any"
        try:
            cwd = Path(f"/proc/self/fd/{stack.enter_context(workspace.folder_of(place))}")
        except OSError as error:
            raise ToolError(f"{target} cannot be searched: {error.strerror}") from None
        self.cwd = cwd if cwd.exists() else place.parent

    def grep(self, pattern: str, literal: bool, flags: list[str]) -> Iterator[str]:
        """The lines that are found in files that count, and those around, as the result has them."""
        rest, is_empty, name_of = b"", True, cache(self._name_of)
        with contextlib.closing(self._output(self._command(pattern, literal, flags))) as output:
            for data in output:
                *lines, last = (rest + data).split(b"\n")
                for line in lines:
                    if found := RECORD.fullmatch(line):
                        is_empty = False
                        place, number, _, column, text = found.groups()
                        mark = "-" if column is None else ":"
                        if name := name_of(os.fsdecode(place)):
                            yield f"{name}{mark}{int(number)}{mark}{_cut_line(text, int(column or 1))}"
                    elif line != b"--" and len(self.notes) < MAX_NOTES:  # between groups of context
                        note = workspace.escaped(line.decode("utf-8", "replace"))
                        self.notes.append(note[:MAX_SHOWN])
                rest = last[:MAX_KEPT]
        if is_empty and self.code > 1:
            raise ToolError("\n".join(self.notes) or f"the search ended with exit code {self.code}")

    def _command(self, pattern: str, literal: bool, flags: list[str]) -> list[str]:
        names = [] if self.is_file else self.glob.names()
        if program := find_program("rg", self.ctx.cwd):
            flags += [flag for name in names for flag in ("--type-add", f"chosen:{name}")]
            flags += [*(["--type=chosen"] if names else []), *(["-F"] if literal else [])]
            command = [program, *RIPGREP.split(), *RIPGREP_GREP.split(), *flags, "-e", pattern]
            return [*command, "--", "-" if self.is_file else "."]
        if program := find_program("git", self.ctx.cwd):
            flags += ["-F", "-e", pattern] if literal else ["-P", "-e", f"{PERL}{pattern}"]
            paths = [f":(glob)**/{name}" for name in names] or ["."]
            what = ["--", f":(literal){self.target.name}"]
            what = what if self.is_file else ["--exclude-standard", "--", *paths]
            return [program, *GIT.split(), *GIT_GREP.split(), *flags, *what]
        pattern = re.escape(pattern) if literal else pattern
        how = [pattern, "i" * ("-i" in flags) + "f" * self.is_file, flags[0][2:]]
        return [sys.executable, "-I", "-c", PLAIN, str(Path(__file__).parents[2]), *how, *names]

    def names(self) -> Iterator[str]:
        """The paths of the files in the folder."""
        top = workspace.repository_top(self.target)
        if program := find_program("rg", self.ctx.cwd):
            command = [program, *RIPGREP.split(), "--files", "."]
        elif os.path.lexists(top / ".git") and (program := find_program("git", self.ctx.cwd)):
            command = [program, *GIT.split(), f"--work-tree={top}", *GIT_LIST.split()]
        else:
            for name in walk(self.cwd):
                self.ctx.abort.check()
                yield name
            return
        found = b"".join(self._output(command, stderr=subprocess.DEVNULL)).split(b"\0")[:-1]
        yield from (os.fsdecode(name).removeprefix("./") for name in dict.fromkeys(found))

    def _output(self, command: list[str], **more: Any) -> Generator[bytes, None, None]:
        """The output. Raises Aborted, and ToolError at a time-out."""
        more |= {"stdin": self.stdin, "confine": self.ctx.confine, "variables": VARIABLES}
        code, cause = yield from output_of(command, self.cwd, self.ctx.abort, TIMEOUT, **more)
        self.ctx.abort.check()
        self.code = abs(code)
        if cause == "timeout":
            way = "Use a simpler pattern, or name a folder or a glob."
            raise ToolError(f"the search took more than {TIMEOUT} s and was stopped. {way}")

    def _name_of(self, path: str) -> str:
        """What to show for a path in the output; "" for a file that does not count."""
        if self.is_file:
            return workspace.escaped(workspace.shown(self.ctx, self.target))
        path = path.removeprefix("./")
        name = workspace.shown(self.ctx, self.target / path)
        # A glob may be meant as seen from the workspace, too
        counts = self.glob.matches(path) or self.glob.matches(name)
        return workspace.escaped(name) if counts and not workspace.is_secret(self.ctx, name) else ""


def walk(top: str | Path) -> Iterator[str]:
    """The paths of the files below a folder, but for what tools have installed; also of ignored ones."""
    for folder, folders, files in os.walk(top):
        folders[:] = sorted({*folders} - workspace.TOOL_FOLDERS)
        yield from (os.path.relpath(os.path.join(folder, name), top) for name in sorted(files))


def print_matches(pattern: str, flags: str, context: str, *names: str) -> None:
    """The program of PLAIN: search below the current folder, and print as the others do.

    `flags`: i ignores case, f searches standard input. `names`: patterns for the names of files.
    """
    try:
        wanted = re.compile(pattern, re.I if "i" in flags else 0)
    except re.error as error:
        sys.stderr.write(f"regex: {error}\n")
        sys.exit(2)
    is_file, more = "f" in flags, int(context)
    for path in ["-"] if is_file else walk("."):
        if names and not any(fnmatchcase(os.path.basename(path), each) for each in names):
            continue
        data = sys.stdin.buffer.read() if is_file else workspace.read_small_file(path) or b""
        if not data or b"\0" in data:
            continue
        lines, columns = data.removesuffix(b"\n").split(b"\n"), dict[int, int]()
        for at, line in enumerate(lines):
            text = line.rstrip(b"\r").decode("utf-8", "surrogateescape")
            if found := wanted.search(text):
                columns[at] = len(text[: found.start()].encode("utf-8", "surrogateescape")) + 1
        around = {at + n for at in columns for n in range(-more, more + 1)}
        for at in sorted(around & {*range(len(lines))}):
            mark = b":%d:" % columns[at] if at in columns else b"-"
            sys.stdout.buffer.write(b"%s\0%d%s%s\n" % (os.fsencode(path), at + 1, mark, lines[at]))


def _cut_line(text: bytes, column: int) -> str:
    """A line, or of a long one the part around a column."""
    at = len(text[: column - 1].decode("utf-8", "replace"))
    line = text.rstrip(b"\r").decode("utf-8-sig", "replace")
    if len(line) <= MAX_SHOWN:
        return line
    start = max(0, min(at - MAX_SHOWN // 5, len(line) - MAX_SHOWN))
    return f"{'… ' if start else ''}{line[start : start + MAX_SHOWN]} … (line cut)"


class Glob:
    """A pattern for paths below a folder: ** is any number of folders, * and ? cross none.

    Without a slash it is for names at any depth; a ! in front turns it round. It comes from a
    model: each path is matched in linear time.
    """

    def __init__(self, pattern: str) -> None:
        self.is_negated = pattern.startswith("!")
        ways = [pattern.removeprefix("!").removeprefix("./").replace("[^", "[!")]
        while len(ways) < MAX_WAYS and (found := re.search(r"\{([^{}]*)\}", ways[0])):
            head, tail = ways[0][: found.start()], ways[0][found.end() :]
            ways = [*ways[1:], *(f"{head}{choice}{tail}" for choice in found[1].split(","))]
        self.ways = [way.split("/") if "/" in way else ["**", way] for way in ways]
        for way in self.ways:
            way[-1:] = ["**", "*"] if way[-1] in ("", "**") else way[-1:]

    def names(self) -> list[str]:
        """Patterns of which one fits the name of each file, for the programs; [] for any name."""
        names = [way[-1] for way in self.ways]
        are_plain = all(re.fullmatch(r"[\w.?*-]+", name) and name != "*" for name in names)
        return names if are_plain and not self.is_negated else []

    def matches(self, path: str) -> bool:
        return self.is_negated != any(_fits(path.split("/"), way) for way in self.ways)


def _fits(names: list[str], parts: list[str]) -> bool:
    """Of all the ways in which the parts so far fit, follow how many names they take."""
    taken = {0}
    for part in parts:
        if part == "**":
            taken = set(range(min(taken), len(names) + 1)) if taken else taken
        else:
            taken = {n + 1 for n in taken if n < len(names) and fnmatchcase(names[n], part)}
    return len(names) in taken
