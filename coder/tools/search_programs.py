"""The programs that search: ripgrep if it is installed, else git, else a plain walk; and globs.

Binary files, .git and what .gitignore names are skipped, and links are not followed. A search is a
child process, so that it can be stopped; it starts in the folder as it was opened, so that a link
that takes the folder's name leads nowhere.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Generator, Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import IO, NamedTuple

from coder.tools import workspace
from coder.tools.bash import find_program, output_of
from coder.tools.repository import repository_top
from coder.toolset import ToolContext
from coder.types import ToolError

TIMEOUT = 30  # seconds of one search
MAX_SHOWN = 500  # characters of one line
MAX_KEPT = 1 << 20  # bytes of one line of output
MAX_NOTES = 10  # lines of a program's standard error
MAX_WAYS = 1000  # that the braces of a pattern may mean

RIPGREP = "--null --hidden --glob=!.git"
RIPGREP_GREP = """--with-filename --line-number --column --no-heading --color=never --sort=path
    --engine=auto --crlf"""
GIT = "-c core.fsmonitor=false"  # that would start a program
GIT_LIST = "ls-files -coz --exclude-standard"
GIT_GREP = "grep --no-index --null --line-number --column --no-color --no-full-name -I"
PLAIN_NAME = r"[\w.?*-]+"
BRACES = r"\{([^{}]*)\}"
PERL = "(*UCP)(*ANYCRLF)"  # letters of all languages, lines that end in CRLF
VARIABLES = {"LC_ALL": "C.UTF-8"}  # text is in characters
PLAIN = """
import sys
sys.path.append(sys.argv[1])
from coder.tools.plain_grep import print_matches
print_matches(*sys.argv[2:])
"""

# What ripgrep's second engine says of a file that is not UTF-8
NOT_UTF8 = r"(?:rg: )?(?:\./)?(.+?): PCRE2: error matching: UTF-8 error.*"
# A path, the number of a line, the column of the match (none in a line of context), the line
RECORD = (
    rb"(?s)(?P<path>.*?)\0(?P<number>\d+)"
    rb"(?:(?P<mark>[:\0])(?P<column>\d+)(?P=mark)|[-\0])(?P<text>.*)"
)


class Wanted(NamedTuple):
    """Which lines are searched for. `context`: lines to show around a match."""

    pattern: str
    ignore_case: bool
    literal: bool
    context: int


class Line(NamedTuple):
    """A match, or a line around one. `begins_group`: the line before it is not shown."""

    name: str
    number: int
    text: str
    is_match: bool
    begins_group: bool

    def __str__(self) -> str:
        """Without the name, which is written once above the lines of a file."""
        mark = ":" if self.is_match else "-"
        return f"{self.number}{mark}{self.text}"


class Search:
    """A folder that is open, or a file in it, and the programs that search there.

    `cwd` names the folder, whatever its path leads to by then; `stdin` is the file; `notes` are the
    program's other lines, `code` its exit code. Raises ToolError if there is no such file or
    folder.
    """

    def __init__(
        self,
        ctx: ToolContext,
        target: Path,
        glob: str,
        stack: contextlib.ExitStack,
    ) -> None:
        self.ctx = ctx
        self.target = target
        self.glob = Glob(glob or "**")
        self.notes: list[str] = []
        self.has_failed = False  # a note tells of more than files that are not UTF-8
        self.code = 0
        self.is_file = not target.is_dir()
        self.stdin: IO[bytes] | int = subprocess.DEVNULL
        inside = target / "any"
        if self.is_file:
            self.stdin = stack.enter_context(workspace.opened(target, workspace.shown(ctx, target)))
            inside = target
        try:
            folder = stack.enter_context(workspace.folder_of(inside))
        except OSError as error:
            raise ToolError(f"{target} cannot be searched: {error.strerror}") from None
        cwd = Path(f"/proc/self/fd/{folder}")
        self.cwd = cwd if cwd.exists() else inside.parent
        folders = () if self.is_file else (target, *target.parents)
        self.waits = any(_waits(path) for path in folders)

    def grep(self, wanted: Wanted) -> Iterator[Line]:
        """The matches in files that may be shown, and the lines around."""
        is_empty = True
        begins_group = False
        name_of = cache(self._name_of)
        for line in self._lines(self._command(wanted)):
            record = re.fullmatch(RECORD, line)
            if record:
                is_empty = False
                name = name_of(os.fsdecode(record["path"]))
                if name:
                    column = record["column"]
                    yield Line(
                        name=name,
                        number=int(record["number"]),
                        text=_cut_line(record["text"], int(column or 1)),
                        is_match=column is not None,
                        begins_group=begins_group,
                    )
                    begins_group = False
            elif line.rstrip(b"\r") == b"--":
                begins_group = True
            else:
                self._note(workspace.escaped(line.decode("utf-8", "replace"))[:MAX_SHOWN])
        if is_empty and self.code > 1 and (self.has_failed or not self.notes):
            raise ToolError(self._say_why())

    def _lines(self, command: list[str]) -> Iterator[bytes]:
        rest = b""
        with contextlib.closing(self._output(command)) as output:
            for data in output:
                *lines, last = (rest + data).split(b"\n")
                yield from lines
                rest = last[:MAX_KEPT]

    def _note(self, text: str) -> None:
        """Keep a line of a program's standard error, if there are not too many."""
        if len(self.notes) >= MAX_NOTES:
            return
        not_utf8 = re.fullmatch(NOT_UTF8, text)
        if not_utf8:
            text = f"{not_utf8[1]} was not searched: it is not UTF-8"
        else:
            self.has_failed = True
        self.notes.append(text)

    def _say_why(self) -> str:
        """Why the search failed: the program's last line. Those before it draw the pattern."""
        said = [note for note in self.notes if note.strip()]
        if not said:
            return f"the search ended with exit code {self.code}"
        if any("regex" in note or "PCRE" in note or "fatal" in note for note in said):
            return f"{said[-1]} (regex). Set literal to search for plain text."
        return said[-1]

    def _command(self, wanted: Wanted) -> list[str]:
        """The command that searches, with the first program that is there."""
        names = [] if self.is_file else self.glob.names()
        ripgrep = self._find("rg")
        if ripgrep:
            return [ripgrep, *self._ripgrep(wanted, names)]
        git = self._find("git")
        if git:
            return [git, *self._git_grep(wanted, names)]
        return [sys.executable, "-I", "-c", PLAIN, *self._plain_grep(wanted, names)]

    def _ripgrep(self, wanted: Wanted, names: list[str]) -> list[str]:
        words = [*RIPGREP.split(), *RIPGREP_GREP.split(), f"-C{wanted.context}"]
        if wanted.ignore_case:
            words.append("-i")
        if wanted.literal:
            words.append("-F")
        for name in names:
            words += ["--type-add", f"chosen:{name}"]
        if names:
            words.append("--type=chosen")
        return [*words, "-e", wanted.pattern, "--", "-" if self.is_file else "."]

    def _git_grep(self, wanted: Wanted, names: list[str]) -> list[str]:
        words = [*GIT.split(), *GIT_GREP.split(), f"-C{wanted.context}"]
        if wanted.ignore_case:
            words.append("-i")
        if wanted.literal:
            words += ["-F", "-e", wanted.pattern]
        else:
            words += ["-P", "-e", f"{PERL}{wanted.pattern}"]
        if self.is_file:
            return [*words, "--", f":(literal){self.target.name}"]
        paths = [f":(glob)**/{name}" for name in names]
        return [*words, "--exclude-standard", "--", *(paths or ["."])]

    def _plain_grep(self, wanted: Wanted, names: list[str]) -> list[str]:
        """The arguments of PLAIN."""
        package = str(Path(__file__).parents[2])
        pattern = re.escape(wanted.pattern) if wanted.literal else wanted.pattern
        flags = ""
        if wanted.ignore_case:
            flags += "i"
        if self.is_file:
            flags += "f"
        return [package, pattern, flags, str(wanted.context), *names]

    def _find(self, name: str) -> str:
        """The path of a program that reads ignore files; "" if there is none, or if it would wait
        for one of the files.
        """
        return "" if self.waits else find_program(name, self.ctx.cwd)

    def names(self) -> Iterator[str]:
        """The paths of the files in the folder."""
        command = self._listing()
        if command:
            output = b"".join(self._output(command, stderr=subprocess.DEVNULL))
            for path in dict.fromkeys(output.split(b"\0")[:-1]):
                yield os.fsdecode(path).removeprefix("./")
        else:
            from coder.tools.plain_grep import walk  # late: only without the programs

            for name in walk(self.cwd):
                self.ctx.abort.check()
                yield name

    def _listing(self) -> list[str]:
        """The command that lists files, with the first program that is there, or []."""
        ripgrep = self._find("rg")
        if ripgrep:
            return [ripgrep, *RIPGREP.split(), "--files", "."]
        top = repository_top(self.target)
        git = self._find("git") if os.path.lexists(top / ".git") else ""
        if git:
            return [git, *GIT.split(), f"--work-tree={top}", *GIT_LIST.split()]
        return []

    def _output(
        self, command: list[str], stderr: int = subprocess.STDOUT
    ) -> Generator[bytes, None, None]:
        """The output. Raises Aborted, and ToolError at a time-out."""
        code, cause = yield from output_of(
            command,
            self.cwd,
            self.ctx.abort,
            TIMEOUT,
            stdin=self.stdin,
            stderr=stderr,
            confine=self.ctx.confine,
            variables=VARIABLES,
        )
        self.ctx.abort.check()
        self.code = abs(code)
        if cause == "timeout":
            raise ToolError(
                f"the search took more than {TIMEOUT} s and was stopped. "
                "Use a simpler pattern, or name a folder or a glob."
            )

    def _name_of(self, path: str) -> str:
        """What to show for a path in the output; "" for a file that is not shown."""
        if self.is_file:
            return workspace.escaped(workspace.shown(self.ctx, self.target))
        path = path.removeprefix("./")
        name = workspace.shown(self.ctx, self.target / path)
        # A glob may be meant as seen from the workspace, too
        if not self.glob.matches(path, name) or workspace.is_secret(self.ctx, name):
            return ""
        return workspace.escaped(name)


def _waits(folder: Path) -> bool:
    """Is an ignore file of this folder a pipe? A program would wait for its other end."""
    return any((folder / name).is_fifo() for name in (".gitignore", ".ignore", ".rgignore"))


def _cut_line(text: bytes, column: int) -> str:
    """A line, or of a long one the part around a column."""
    at = len(text[: column - 1].decode("utf-8", "replace"))
    line = text.rstrip(b"\r").decode("utf-8-sig", "replace")
    if len(line) <= MAX_SHOWN:
        return line
    start = max(0, min(at - MAX_SHOWN // 5, len(line) - MAX_SHOWN))
    begin = "… " if start else ""
    return f"{begin}{line[start : start + MAX_SHOWN]} … (line cut)"


# ---- patterns for paths ---------------------------------------------------------------------


class Glob:
    """A pattern for paths below a folder: ** is any number of folders, * and ? cross none.

    Without a slash it is for names at any depth; a ! in front reverses it. It comes from a model:
    a path is matched in linear time.
    """

    def __init__(self, pattern: str) -> None:
        self.is_negated = pattern.startswith("!")
        plain = pattern.removeprefix("!").removeprefix("./").replace("[^", "[!")
        self.ways = [_parts_of(way) for way in _ways_of(plain)]

    def names(self) -> list[str]:
        """Patterns for the names of files, for the programs; [] for any name."""
        if self.is_negated:
            return []
        names = [way[-1] for way in self.ways]
        are_plain = all(re.fullmatch(PLAIN_NAME, name) and name != "*" for name in names)
        return names if are_plain else []

    def matches(self, *paths: str) -> bool:
        """Does one of these paths match? They are of one file, relative to different folders."""
        return any(self.is_negated != self._fits_any(path.split("/")) for path in paths)

    def _fits_any(self, names: list[str]) -> bool:
        return any(_fits(names, way) for way in self.ways)


def _ways_of(pattern: str) -> list[str]:
    """The patterns without braces that one with braces means."""
    ways = [pattern]
    while len(ways) < MAX_WAYS:
        braces = re.search(BRACES, ways[0])
        if not braces:
            break
        first = ways.pop(0)
        head = first[: braces.start()]
        tail = first[braces.end() :]
        ways += [f"{head}{choice}{tail}" for choice in braces[1].split(",")]
    return ways


def _parts_of(way: str) -> list[str]:
    """The parts of a pattern between slashes; without a slash it is a name at any depth."""
    parts = way.split("/") if "/" in way else ["**", way]
    if parts[-1] in ("", "**"):
        return [*parts[:-1], "**", "*"]
    return parts


def _fits(names: list[str], parts: list[str]) -> bool:
    """Do the parts of a pattern match all names? `taken`: how many the parts so far may match."""
    taken = {0}
    for part in parts:
        if not taken:
            return False
        if part == "**":
            taken = set(range(min(taken), len(names) + 1))
        else:
            taken = {n + 1 for n in taken if n < len(names) and fnmatchcase(names[n], part)}
    return len(names) in taken
