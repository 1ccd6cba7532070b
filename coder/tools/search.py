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
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple

from coder.tools import slips, workspace
from coder.tools.bash import find_program, output_of
from coder.tools.globs import Glob
from coder.toolset import ToolContext, tool
from coder.types import ToolError, ToolResult

TIMEOUT = 30  # seconds of one search
MAX_MATCHES = 100
COUNT_SECONDS = 1.0  # for which matches are counted that are not shown
MAX_NAMED = 3  # files with the most matches
MAX_SHOWN = 500  # characters of one line
MAX_KEPT = 1 << 20  # bytes of one line of output
MAX_FILES = 200  # of one glob
MAX_NOTES = 10  # lines of a program's standard error

RIPGREP = "--null --hidden --glob=!.git"
RIPGREP_GREP = """--with-filename --line-number --column --no-heading --color=never --sort=path
    --engine=auto --crlf"""
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

# What ripgrep's second engine says of a file that is not UTF-8
NOT_UTF8 = re.compile(r"(?:rg: )?(?:\./)?(.+?): PCRE2: error matching: UTF-8 error.*")
# A line end in a pattern, outside of a set of characters
LINE_END = re.compile(r"(?<!\\)(?:\\\\)*\\n")
SET = re.compile(r"\[\^?[^\]]*\]")
# How basic regular expressions write what has no backslash here
BASIC = re.compile(r"\\[|()+?]")
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
    """Search file contents with a regular expression: the path of each file, then `line:text` per match.

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
    if "\n" in pattern:
        raise ToolError(WITHIN_A_LINE)
    flags = [f"-C{min(max(0, context), 20)}", *(["-i"] if ignore_case else [])]
    with contextlib.ExitStack() as stack:
        search = Search(ctx, target, glob, stack)
        excerpt = Excerpt(max(1, limit))
        try:
            excerpt.take(search.grep(pattern, literal, flags))
        except ToolError:
            if spans_lines(pattern, literal):
                raise ToolError(WITHIN_A_LINE) from None
            raise
    if not excerpt.lines and spans_lines(pattern, literal):
        raise ToolError(WITHIN_A_LINE)
    text = excerpt.text() or _say_nothing_found(pattern, literal)
    notes = [f"({note})" for note in (*excerpt.notes(), *search.notes)]
    return ToolResult("\n".join([text, *notes]), details={"matches": excerpt.shown})


WITHIN_A_LINE = "a match lies within one line: search for one of the lines, with context"


def spans_lines(pattern: str, literal: bool) -> bool:
    """Does the regular expression ask for a line end? No match has one."""
    return not literal and bool(LINE_END.search(SET.sub("", pattern)))


def _say_nothing_found(pattern: str, literal: bool) -> str:
    if not literal and (basic := BASIC.search(pattern)):
        plain = f"Here {basic[0][1]} is written without a backslash."
        return f"No matches. {plain}"
    return "No matches (ignored and secret files are skipped)."


class Line(NamedTuple):
    """A line that was found, or one around it. `begins_group`: the line before it in the file is not the one above."""

    name: str
    number: int
    text: str
    is_match: bool
    begins_group: bool

    def __str__(self) -> str:
        """Without the name, which stands once above the lines of a file."""
        mark = ":" if self.is_match else "-"
        return f"{self.number}{mark}{self.text}"


class Excerpt:
    """The first lines of a search, at most `most`, and how many matches there are in all."""

    def __init__(self, most: int) -> None:
        self.most, self.shown = most, 0
        self.lines: list[str] = []  # below the name of their file; with a -- between groups
        self._file = ""  # of the last line
        self.matches = Counter[str]()  # by file
        self.is_cut = self.is_counted_in_part = False

    def take(self, found: Iterable[Line]) -> None:
        """Keep the first lines; count on for a second at most."""
        deadline = 0.0
        for line in found:
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

    def text(self) -> str:
        return "\n".join(self.lines)

    def notes(self) -> Iterator[str]:
        """If it was cut, what would be needed to search again."""
        if not self.is_cut:
            return
        number, files = sum(self.matches.values()), len(self.matches)
        total = f"{number:,} matches in {files:,} file{'s' if files > 1 else ''}"
        if self.is_counted_in_part:
            total = f"over {total}"
        named = (f"{name} {count:,}" for name, count in self.matches.most_common(MAX_NAMED))
        most = f"; the most: {', '.join(named)}" if files > 1 else ""
        narrow = "narrow the pattern, the path or the glob"
        yield f"{self.most} lines shown of {total}{most}; {narrow}"


@tool(concurrent=True, permission="read", default="allow", slips=slips.GLOB)
def glob(ctx: ToolContext, pattern: str, path: str = ".") -> Generator[Any, None, ToolResult]:
    """Find files by name, newest first.

    pattern: e.g. *.py (at any depth) or src/**/*.ts
    path: folder, default the workspace
    """
    target = yield from workspace.to_read(ctx, path)
    if not target.is_dir():
        raise ToolError(f"{path} is not a folder")
    found = list[tuple[float, str]]()
    wanted = _from_the_folder(ctx, pattern)
    with contextlib.ExitStack() as stack:
        search = Search(ctx, target, wanted, stack)
        for name in search.names():
            # The pattern may be meant as seen from the workspace, too
            if not search.glob.matches(name, workspace.shown(ctx, target / name)):
                continue
            with contextlib.suppress(OSError):
                info = os.stat(search.cwd / name, follow_symlinks=False)
                if stat.S_ISREG(info.st_mode):
                    found.append((-info.st_mtime, workspace.shown(ctx, target / name)))
    found.sort()
    lines = [workspace.escaped(name) for _, name in found[:MAX_FILES]]
    if len(found) > MAX_FILES:
        lines.append(f"({MAX_FILES} of {len(found)} files, the newest; narrow the pattern)")
    text = "\n".join(lines) or _say_no_files(target, wanted)
    return ToolResult(text, details={"files": len(found)})


def _from_the_folder(ctx: ToolContext, pattern: str) -> str:
    """The pattern without the path of the workspace; no file is found outside the folder that is searched."""
    return pattern.removeprefix(f"{ctx.cwd}/").lstrip("/") or "**"


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
        self.is_only_not_utf8 = False  # what the notes are about
        self.stdin: IO[bytes] | int = subprocess.DEVNULL
        if self.is_file:
            self.stdin = stack.enter_context(workspace.opened(target, workspace.shown(ctx, target)))
        place = target if self.is_file else target / "any"
        try:
            cwd = Path(f"/proc/self/fd/{stack.enter_context(workspace.folder_of(place))}")
        except OSError as error:
            raise ToolError(f"{target} cannot be searched: {error.strerror}") from None
        self.waits = not self.is_file and any(map(_waits, (target, *target.parents)))
        self.cwd = cwd if cwd.exists() else place.parent

    def grep(self, pattern: str, literal: bool, flags: list[str]) -> Iterator[Line]:
        """The lines that are found in files that count, and those around."""
        is_empty, begins_group, name_of = True, False, cache(self._name_of)
        for line in self._lines(self._command(pattern, literal, flags)):
            found = RECORD.fullmatch(line)
            if found:
                is_empty = False
                place, number, _, column, text = found.groups()
                if name := name_of(os.fsdecode(place)):
                    shown = _cut_line(text, int(column or 1))
                    yield Line(name, int(number), shown, column is not None, begins_group)
                    begins_group = False
            elif line.rstrip(b"\r") == b"--":
                begins_group = True
            elif len(self.notes) < MAX_NOTES:
                self._note(workspace.escaped(line.decode("utf-8", "replace"))[:MAX_SHOWN])
        if is_empty and self.code > 1 and not self.is_only_not_utf8:
            raise ToolError(self._say_why())

    def _lines(self, command: list[str]) -> Iterator[bytes]:
        rest = b""
        with contextlib.closing(self._output(command)) as output:
            for data in output:
                *lines, last = (rest + data).split(b"\n")
                yield from lines
                rest = last[:MAX_KEPT]

    def _note(self, text: str) -> None:
        """Keep a line of a program's standard error."""
        unread = NOT_UTF8.fullmatch(text)
        self.is_only_not_utf8 = bool(unread) and (self.is_only_not_utf8 or not self.notes)
        self.notes.append(f"{unread[1]} was not searched: it is not UTF-8" if unread else text)

    def _say_why(self) -> str:
        """Why the search failed, by the program's last line: the lines before it draw the pattern."""
        said = [note for note in self.notes if note.strip()]
        if not said:
            return f"the search ended with exit code {self.code}"
        if any("regex" in note or "PCRE" in note or "fatal" in note for note in said):
            return f"{said[-1]} (regex). Set literal to search for plain text."
        return said[-1]

    def _command(self, pattern: str, literal: bool, flags: list[str]) -> list[str]:
        names = [] if self.is_file else self.glob.names()
        if program := self._find("rg"):
            flags += [flag for name in names for flag in ("--type-add", f"chosen:{name}")]
            flags += [*(["--type=chosen"] if names else []), *(["-F"] if literal else [])]
            command = [program, *RIPGREP.split(), *RIPGREP_GREP.split(), *flags, "-e", pattern]
            return [*command, "--", "-" if self.is_file else "."]
        if program := self._find("git"):
            flags += ["-F", "-e", pattern] if literal else ["-P", "-e", f"{PERL}{pattern}"]
            paths = [f":(glob)**/{name}" for name in names] or ["."]
            what = ["--", f":(literal){self.target.name}"]
            what = what if self.is_file else ["--exclude-standard", "--", *paths]
            return [program, *GIT.split(), *GIT_GREP.split(), *flags, *what]
        pattern = re.escape(pattern) if literal else pattern
        how = [pattern, "i" * ("-i" in flags) + "f" * self.is_file, flags[0][2:]]
        return [sys.executable, "-I", "-c", PLAIN, str(Path(__file__).parents[2]), *how, *names]

    def _find(self, name: str) -> str:
        """A program that reads the rules of what is ignored; "" where there is none, or it would wait for a pipe."""
        return "" if self.waits else find_program(name, self.ctx.cwd)

    def names(self) -> Iterator[str]:
        """The paths of the files in the folder."""
        top = workspace.repository_top(self.target)
        if program := self._find("rg"):
            command = [program, *RIPGREP.split(), "--files", "."]
        elif os.path.lexists(top / ".git") and (program := self._find("git")):
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
        counts = self.glob.matches(path, name)
        return workspace.escaped(name) if counts and not workspace.is_secret(self.ctx, name) else ""


def _waits(folder: Path) -> bool:
    """Is a pipe in the place of the rules of this folder?"""
    return any((folder / name).is_fifo() for name in (".gitignore", ".ignore", ".rgignore"))


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
        last = -1
        for at in sorted(around & {*range(len(lines))}):
            if more and at != last + 1:
                sys.stdout.buffer.write(b"--\n")
            last = at
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
