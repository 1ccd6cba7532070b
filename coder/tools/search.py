"""grep and glob: through ripgrep where it is installed, else git, else grep and a plain walk.

Binary files, .git and what .gitignore names are skipped (without ripgrep and git: the folders in
SKIPPED), and links are not followed. A search is a child process, so that it can be stopped; it
starts in the folder as it was opened, so that a link that takes the folder's place leads nowhere.

grep leaves out the files that may hold secrets, whether they match or not: that one matches would
tell what is in it. glob lists their names.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from coder.tools.folder import folder_of
from coder.tools.globs import Glob
from coder.tools.process import Ending, environment, output_of
from coder.tools.repository import repository_top
from coder.tools.secrets import secret_for
from coder.tools.workspace import escaped, opened, shown, to_read
from coder.toolset import ToolContext, tool
from coder.types import ToolError, ToolResult

TIMEOUT = 30  # seconds of one search
MAX_MATCHES = 100
MAX_SHOWN = 500  # characters of one line
MAX_KEPT = 10_000  # bytes of one line of output: a path and what is shown of the text
MAX_FILES = 200  # of one glob
SKIPPED = ".git .hg .svn node_modules .venv venv __pycache__ .tox .mypy_cache .pytest_cache"

RIPGREP = """--no-config --null --hidden --glob=!.git --no-require-git --no-ignore-dot
    --no-ignore-global"""
RIPGREP_GREP = """--with-filename --line-number --no-heading --color=never --sort=path --engine=auto
    --crlf --max-columns=4000 --max-columns-preview --mmap --no-context-separator"""
GIT = "-c core.fsmonitor=false -c core.excludesFile=/dev/null"
GIT_GREP = "grep --no-index --null --line-number --column --no-color --no-full-name -I"
GREP = "--recursive --null --with-filename --line-number --color=never -I"
# Of the child: text is in characters, and no repository counts but that of the folder
VARIABLES = {"LC_ALL": "C.UTF-8", "GIT_DIR": None, "GIT_WORK_TREE": None, "GIT_INDEX_FILE": None}

# A path, the number of a line and the line. Of a line of context, ripgrep and grep write - behind
# the number, and git leaves out the column.
RECORD = re.compile(rb"(.*?)\0(\d+)(?:([:-])|\0(\d+\0)?)(.*)", re.S)


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
    target = yield from to_read(ctx, path)
    if not target.is_dir() and secret_for(ctx)(name := shown(ctx, target)):
        yield from ctx.ask("read", name)
    if "\0" in pattern or not pattern:
        raise ToolError("the pattern is empty or holds a NUL")
    flags = [f"-C{min(max(0, context), 20)}", *(["-i"] if ignore_case else [])]
    with _opened(ctx, target, glob) as search:
        matches = Matches(max(1, limit), cache(search.name_of))
        ending, notes = search.run(search.grep(pattern, literal, flags), matches.take)
        secrets = search.secrets()
    if ending and ending.code not in (0, 1) and not matches.lines:
        raise ToolError("\n".join(notes) or f"the search failed with exit code {ending.code}")
    if matches.is_full:
        narrow = "narrow the pattern, the path or the glob"
        notes.insert(0, f"{len(matches.lines)} lines shown, there are more; {narrow}")
    if secrets:
        names = ", ".join(secrets[:5]) + (f" and {len(secrets) - 5} more" if secrets[5:] else "")
        notes.append(f"not searched, since they may hold secrets: {names}; path can name one")
    lines = [*(matches.lines or ["No matches."]), *(f"({note})" for note in notes)]
    return ToolResult("\n".join(lines), details={"matches": len(matches.lines)})


@tool(concurrent=True)
def glob(ctx: ToolContext, pattern: str, path: str = ".") -> Generator[Any, None, ToolResult]:
    """Find files by name, newest first, at most 200. Ignored files are skipped.

    pattern: e.g. *.py (at any depth) or src/**/*.ts
    path: folder to look in, default the workspace
    """
    target = yield from to_read(ctx, path)
    if not target.is_dir():
        raise ToolError(f"{path} is not a folder")
    found = list[tuple[float, str]]()
    with _opened(ctx, target, pattern) as search:
        for name in filter(search.glob.matches, search.names()):
            with contextlib.suppress(OSError):
                info = os.stat(search.cwd / name, follow_symlinks=False)
                if stat.S_ISREG(info.st_mode):
                    found.append((-info.st_mtime, shown(ctx, target / name)))
    found.sort()
    lines = [escaped(name) for _, name in found[:MAX_FILES]]
    if len(found) > MAX_FILES:
        lines.append(f"({MAX_FILES} of {len(found)} files, the newest; narrow the pattern)")
    return ToolResult("\n".join(lines) or "No files found.", details={"files": len(found)})


# ---- the programs ---------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(ctx: ToolContext, target: Path, glob: str) -> Iterator[Search]:
    """Raises ToolError where there is neither a folder nor a regular file."""
    is_folder = target.is_dir()
    with contextlib.ExitStack() as stack:
        file = None if is_folder else stack.enter_context(opened(target))
        place = target / "any" if is_folder else target
        try:
            cwd = Path(f"/proc/self/fd/{stack.enter_context(folder_of(place))}")
        except OSError as error:
            raise ToolError(f"{target} cannot be searched: {error.strerror}") from None
        cwd, top = cwd if cwd.exists() else place.parent, repository_top(target)
        top_or_none = top if os.path.lexists(top / ".git") else None
        yield Search(ctx, target, cwd, file, Glob(glob or "**"), top_or_none)


@dataclass
class Search:
    """A folder that is open, or a file in it, and the programs that search there.

    `cwd` names the folder whatever is at its path meanwhile; `file` is open for reading; `top` is
    the folder of the repository.
    """

    ctx: ToolContext
    target: Path
    cwd: Path
    file: int | None
    glob: Glob
    top: Path | None

    def grep(self, pattern: str, literal: bool, flags: list[str]) -> list[str]:
        """The command that searches, whose output is made of `RECORD`s."""
        where, names = (".", self.glob.names()) if self.file is None else ("-", [])
        if program := self._program("rg"):
            kinds = [flag for name in names for flag in ("--type-add", f"chosen:{name}")]
            kinds += ["--type=chosen"] if names else []
            flags += [*kinds, "-F"] if literal else kinds
            return [*self._ripgrep(program, RIPGREP_GREP), *flags, "-e", pattern, "--", where]
        if program := self._program("git"):
            flags += [*_syntax((program, "grep", "--no-index"), pattern, literal)]
            paths = [f":(glob)**/{name}" for name in names] or ["."]
            paths = paths if self.file is None else [f":(literal){self.target.name}"]
            flags += self._exclusion(program)
            return [program, *GIT.split(), *GIT_GREP.split(), *flags, "--", *paths]
        if program := self._program("grep"):
            flags += [*_syntax((program,), pattern, literal)]
            kinds = [f"--exclude-dir={name}" for name in SKIPPED.split()]
            kinds += [f"--include={name}" for name in names]
            return [program, *GREP.split(), *kinds, *flags, "--", where]
        raise ToolError("a search needs ripgrep, git or grep, and this machine has none of them")

    def names(self) -> list[str]:
        """The paths of the files in the folder."""
        if program := self._program("rg"):
            return self._listed([*self._ripgrep(program, "--files"), "."]) or []
        if self.top and (program := self._program("git")):
            command = [program, *GIT.split(), f"--work-tree={self.top}", "ls-files", "-coz"]
            names = self._listed([*command, *self._exclusion(program)])
            if names is not None:  # those with a slash are repositories of their own
                inner = [name for name in names if name.endswith("/")]
                return names + [each for name in inner for each in self._walked(name)]
        return list(self._walked(""))

    def _program(self, name: str) -> str | None:
        """The path of a program that is not in the workspace."""
        places = environment().get("PATH", os.defpath).split(os.pathsep)
        places = [each for each in places if not Path(each).resolve().is_relative_to(self.ctx.cwd)]
        return shutil.which(name, path=os.pathsep.join(places) or os.defpath)

    def _ripgrep(self, program: str, flags: str) -> list[str]:
        parents = [] if self.top else ["--no-ignore-parent"]
        return [program, *RIPGREP.split(), *parents, *flags.split()]

    def _exclusion(self, git: str) -> list[str]:
        """git's flag for .gitignore, unless what it names is to be searched."""
        is_named = self.file is not None
        if self.top and self.top != self.target and not is_named:
            ending, _ = self.run([git, *GIT.split(), "check-ignore", "-q", "."], bool)
            is_named = ending is not None and ending.code == 0
        return [] if is_named else ["--exclude-standard"]

    def run(
        self, command: list[str], take: Callable[[bytes], bool]
    ) -> tuple[Ending | None, list[str]]:
        """Pass the output to `take` until it returns that it has enough: the ending is None then.

        Returns the first lines of stderr, too. Raises Aborted, and ToolError at a time-out.
        """
        ending = None

        def output() -> Iterator[bytes]:
            nonlocal ending
            ending = yield from work

        with tempfile.TemporaryFile() as errors:
            work = output_of(
                command,
                self.cwd,
                self.ctx.abort,
                TIMEOUT,
                stdin=self.file,
                stderr=errors,
                confine=self.ctx.confine,
                variables=VARIABLES,
            )
            with contextlib.closing(work):
                any(map(take, output()))
            errors.seek(0)
            lines = errors.read(MAX_KEPT).decode("utf-8", "replace").splitlines()[:10]
        self.ctx.abort.check()
        if ending and ending.cause == "timeout":
            way = "Use a simpler pattern, or name a folder or a glob."
            raise ToolError(f"the search took more than {TIMEOUT} s and was stopped. {way}")
        return ending, [escaped(line)[:MAX_SHOWN] for line in lines]

    def _listed(self, command: list[str]) -> list[str] | None:
        """The paths that a program writes; None where it fails."""
        output = io.BytesIO()
        ending, _ = self.run(command, lambda data: output.write(data) < 0)
        if ending and ending.code > 2:
            return None
        names = dict.fromkeys(output.getvalue().split(b"\0")[:-1])
        return [os.fsdecode(name).removeprefix("./") for name in names]

    def _walked(self, start: str) -> Iterator[str]:
        """The paths of the files below a folder, but for those in SKIPPED folders."""
        folders = [start]
        while folders:
            folder = folders.pop()
            self.ctx.abort.check()
            with contextlib.suppress(OSError), os.scandir(self.cwd / folder) as entries:
                for entry in entries:
                    if not entry.is_dir(follow_symlinks=False):
                        yield os.path.join(folder, entry.name)
                    elif entry.name not in SKIPPED.split():
                        folders.append(os.path.join(folder, entry.name))

    def name_of(self, path: str) -> str:
        """What to show for a path in the output; "" for a file that does not count."""
        if self.file is not None:
            return escaped(shown(self.ctx, self.target))
        path = path.removeprefix("./")
        name = shown(self.ctx, self.target / path)
        matches = [self.glob.matches(path), self.glob.matches(name)]  # seen from the workspace, too
        counts = all(matches) if self.glob.is_negated else any(matches)
        return escaped(name) if counts and not self._is_secret(path) else ""

    def secrets(self) -> list[str]:
        """The names of the files right in the folder that are left out of a search."""
        entries = list(os.scandir(self.cwd)) if self.file is None else []
        names = sorted(each.name for each in entries if not each.is_dir(follow_symlinks=False))
        names = [name for name in names if self.glob.matches(name) and self._is_secret(name)]
        return [escaped(name) for name in names]

    def _is_secret(self, path: str) -> bool:
        return secret_for(self.ctx)(shown(self.ctx, self.target / path))


def _syntax(grep: tuple[str, ...], pattern: str, literal: bool) -> list[str]:
    """The flags for a pattern, in Perl's syntax (digits as \\d, lookahead) where it is known."""
    if literal:
        return ["-F", "-e", pattern]
    if not _knows_perl(grep):
        return ["-E", "-e", pattern]
    return ["-P", "-e", f"(*UCP)(*ANYCRLF){pattern}"]


@cache
def _knows_perl(grep: tuple[str, ...]) -> bool:
    """It is a choice at a program's compilation."""
    command = [*grep, "-P", "-q", "-e", "x", "--", "null"]
    return subprocess.run(command, cwd="/dev", capture_output=True).returncode == 1


class Matches:
    """The lines found, at most `limit`; `name_of` a path is "" for a file that does not count."""

    def __init__(self, limit: int, name_of: Callable[[str], str]) -> None:
        self.limit, self.name_of = limit, name_of
        self.lines = list[str]()
        self.is_full = False
        self.rest = b""  # of the output: a line under way, or a part of a path with a line break

    def take(self, data: bytes) -> bool:
        """Take output. Returns whether there is enough."""
        *lines, rest = data.split(b"\n")
        for line in lines:
            whole, self.rest = self.rest + line, b""
            if record := RECORD.fullmatch(whole):
                self._add(*record.groups())
            elif whole != b"--":  # that stands between groups of context
                self.rest = whole + b"\n"
        self.rest = (self.rest + rest)[:MAX_KEPT]
        return self.is_full

    def _add(self, path: bytes, number: bytes, sign: bytes, column: bytes, text: bytes) -> None:
        name = self.name_of(os.fsdecode(path))
        if name and len(self.lines) == self.limit:
            self.is_full = True
        elif name:
            line = text[:MAX_KEPT].rstrip(b"\r").decode("utf-8-sig", "replace")
            line = line if len(line) <= MAX_SHOWN else line[:MAX_SHOWN] + " … (line cut)"
            mark = sign.decode() if sign else ":" if column else "-"
            self.lines.append(f"{name}{mark}{number.decode()}{mark}{line}")
