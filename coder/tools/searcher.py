"""Walking a tree with its .gitignore files, and searching it. Standard library only.

Run as a program it is the search of machines without ripgrep: a child that can be killed, because a regular expression
can run for ever and holds the interpreter's lock while it does. Globs cannot: they are matched in linear time, since
.gitignore files are foreign text and are matched in our own process.

    python -I searcher.py '{"pattern": ..., "path": ..., "workspace": ..., "glob": "", "ignore_case": false, "literal": false,
                           "context": 0}'

writes `path NUL line-number:text` per match (`-` for `:` in lines of context), and notes in lines without a NUL.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import TextIO

MAX_RULE = 1000  # characters of one rule in it
MAX_RULES = 1_000_000  # bytes of a .gitignore that are looked at
MAX_LINE = 1_000_000  # characters of a line that are searched; of a longer one a note says so
MAX_WRITTEN = 2000  # characters of a line that are written
MAX_WAYS = 1000  # that a glob's braces may stand for
BINARY = 1 << 16  # bytes from the beginning in which a NUL makes a file binary


# ---- patterns --------------------------------------------------------------------------------------------


class Glob:
    """A glob for paths below a folder: ** crosses folders, * and ? do not. Without a slash it holds at any depth."""

    def __init__(self, pattern: str, anchored: bool = False, braces: bool = True) -> None:
        ways = _written_out([pattern]) if braces else [pattern]
        names = [_component(way) for way in ways if not anchored and "/" not in way]
        self._name = re.compile("|".join(names), re.S) if names else None
        self._paths = [_parts(way) for way in ways if anchored or "/" in way]

    def match(self, path: str) -> bool:
        if self._name and self._name.fullmatch(path.rpartition("/")[2]):
            return True
        return any(_fits(parts, path.split("/")) for parts in self._paths)


def _written_out(patterns: list[str]) -> list[str]:
    """Without braces: a{b,c} is ab and ac."""
    while len(patterns) < MAX_WAYS and (found := re.search(r"(?<!\\)\{([^{}]*)\}", patterns[0])):
        head, tail = patterns[0][: found.start()], patterns[0][found.end() :]
        patterns = [*patterns[1:], *(f"{head}{choice}{tail}" for choice in found[1].split(","))]
    return patterns


def _parts(pattern: str) -> list[re.Pattern[str] | None]:
    """One regular expression for each component; None is **, any number of them. At the end ** is at least one."""
    parts = [
        None if part == "**" else re.compile(_component(part), re.S) for part in pattern.split("/")
    ]
    return parts if parts[-1] else [*parts, re.compile(".*", re.S)]


def _component(text: str) -> str:
    """A glob for one name as a regular expression. What stands between two stars is taken where it first fits, for good."""
    pieces = [""]
    for token in re.findall(r"\\.|\*+|\[[!^]?\]?[^\]]*\]|.", text, re.S):
        if token[0] == "*":
            pieces.append("")
        elif token[0] == "[" and len(token) > 2:
            body = re.sub(r"([\[\\&~|])", r"\\\1", token[1:-1])
            pieces[-1] += f"[^{body[1:]}]" if body[0] in "!^" else f"[{body}]"
        else:
            pieces[-1] += (
                "." if token == "?" else re.escape(token[-1] if token[0] == "\\" else token)
            )
    first, *middle = pieces
    last = f".*{middle.pop()}" if middle else ""
    return first + "".join(f"(?>.*?{piece})" for piece in middle if piece) + last


def _fits(wanted: list[re.Pattern[str] | None], parts: list[str]) -> bool:
    """Match components; a ** that took too few takes one more, and only the last ** ever has to."""
    at = position = 0
    again: tuple[int, int] | None = None
    while position < len(parts):
        part = wanted[at] if at < len(wanted) else None
        if at < len(wanted) and part is None:
            at, again = at + 1, (at + 1, position)
        elif part and part.fullmatch(parts[position]):
            at, position = at + 1, position + 1
        elif again:
            at, position = again[0], again[1] + 1
            again = (at, position)
        else:
            return False
    return at == len(wanted)


def chooser(glob: str, *roots: str) -> Callable[[str], bool]:
    """Does a path fit a glob, seen from one of the roots? A ! in front turns it round. Raises re.error."""
    if not glob:
        return lambda path: True
    wanted, negated = Glob(glob.removeprefix("!").removeprefix("./")), glob.startswith("!")
    return lambda path: negated != any(wanted.match(os.path.relpath(path, root)) for root in roots)


# ---- what is ignored -------------------------------------------------------------------------------------

# A folder and its (pattern, negated, folders only)
Rules = list[tuple[str, list[tuple[Glob, bool, bool]]]]


def ignore_rules(folder: str) -> list[tuple[Glob, bool, bool]]:
    """What the folder's .gitignore says of paths below it; .git/info/exclude says it, too."""
    rules = []
    for name in (".git/info/exclude", ".gitignore"):
        text = (small_file(os.path.join(folder, name), MAX_RULES) or b"").decode(
            "utf-8-sig", "surrogateescape"
        )
        rules += [rule for line in text.splitlines() if (rule := _rule(line))]
    return rules


def small_file(path: str | os.PathLike[str], most: int) -> bytes | None:
    """A regular file, at most `most` bytes of it; None where there is none that can be read. A stranger's may be a pipe, or a link
    to an endless device: links are not followed, and opening never waits."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        return os.read(fd, most) if stat.S_ISREG(os.fstat(fd).st_mode) else None
    except OSError:
        return None
    finally:
        os.close(fd)


def _rule(line: str) -> tuple[Glob, bool, bool] | None:
    line = re.sub(r"(?<!\\) +$", "", line.rstrip("\r\n"))
    body = line.removeprefix("!").rstrip("/")
    if not body or line.startswith("#") or len(line) > MAX_RULE:
        return None
    try:
        return (
            Glob(body.removeprefix("/"), anchored="/" in body, braces=False),
            line.startswith("!"),
            line.endswith("/"),
        )
    except re.error:
        return None


def ignored(path: str, is_folder: bool, rules: Rules) -> bool:
    """The last rule that fits decides; the nearest .gitignore comes last."""
    for folder, patterns in reversed(rules):
        below = path[len(folder) :].lstrip("/")
        for pattern, negated, folders_only in reversed(patterns):
            if (is_folder or not folders_only) and pattern.match(below):
                return not negated
    return False


def rules_above(root: str, workspace: str) -> Rules:
    """The rules that the folders above `root` have for it: up to its repository's top, or to the workspace if there is none.

    None at all where `root` is itself ignored: who names such a folder wants to look into it.
    """
    above, folder = [root], root
    while folder != os.path.dirname(folder):
        above.append(folder := os.path.dirname(folder))
    top = next(
        (folder for folder in above if os.path.lexists(os.path.join(folder, ".git"))), workspace
    )
    rules: Rules = []
    for folder, below in reversed(list(zip(above[1:], above))):
        if folder == top or rules:
            rules.append((folder, ignore_rules(folder)))
            if ignored(below, True, rules):
                return []
    return rules


def hidden(path: str, root: str, rules: Rules) -> bool:
    """Is a file below `root` left out by `walk`? The rules are those above root."""
    folder = root
    for name in os.path.relpath(path, root).split("/"):
        rules = [*rules, (folder, ignore_rules(folder))]
        folder = os.path.join(folder, name)
        if ignored(folder, folder != path, rules):
            return True
    return False


def walk(root: str, notes: list[str], rules: Rules) -> Iterator[os.DirEntry[str]]:
    """Regular files below `root`, in order, without .git and what is ignored. Links to folders are not followed.

    `rules`: those above root. What could not be looked into is told in `notes`.
    """
    stack: list[tuple[str, os.DirEntry[str] | None, Rules]] = [(root, None, rules)]
    while stack:
        path, entry, rules = stack.pop()
        if entry and not entry.is_dir(follow_symlinks=False):
            if _regular(entry):
                yield entry
            else:
                notes.append(f"{path}: not a regular file")
            continue
        try:
            entries = sorted(
                os.scandir(path), key=lambda entry: os.fsencode(entry.name), reverse=True
            )
        except OSError as error:
            notes.append(f"{path}: {error.strerror}")
            continue
        if any(entry.name in (".git", ".gitignore") for entry in entries):
            rules = [*rules, (path, ignore_rules(path))]
        stack += [
            (entry.path, entry, rules)
            for entry in entries
            if entry.name != ".git"
            and not ignored(entry.path, entry.is_dir(follow_symlinks=False), rules)
        ]


def _regular(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:
        return False  # a link that leads round in a circle


# ---- searching -------------------------------------------------------------------------------------------


def search(
    path: str, pattern: re.Pattern[str], context: int, notes: list[str]
) -> Iterator[tuple[int, bool, str]]:
    """(line number, is a match, line) of the matches in a file and the lines around them. Raises
    ValueError for a binary file. What is not searched is told in `notes`."""
    with open(path, "rb") as file:
        start = file.read(BINARY)
    wide = start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if b"\0" in start and not wide:
        raise ValueError("binary file")
    encoding, errors = ("utf-16", "replace") if wide else ("utf-8-sig", "surrogateescape")
    with open(path, encoding=encoding, errors=errors, newline="\n") as lines:
        before: list[tuple[int, str]] = []
        after = 0
        for number, line in enumerate(_lines(lines, path, notes), 1):
            if pattern.search(line):
                if "\0" in line:
                    raise ValueError("binary file")
                yield from ((n, False, text) for n, text in before)
                yield number, True, line
                before, after = [], context
            elif after:
                yield number, False, line
                after -= 1
            elif context:
                before = [*before, (number, line)][-context:]


def _lines(file: TextIO, path: str, notes: list[str]) -> Iterator[str]:
    """Lines, each at most MAX_LINE long; the rest of a longer one is passed over."""
    note = f"{path}: the rest of lines of more than {MAX_LINE:,} characters"
    while line := file.readline(MAX_LINE):
        end = line
        while not end.endswith("\n") and len(end) == MAX_LINE:
            if (end := file.readline(MAX_LINE)).strip("\n") and notes[-1:] != [note]:
                notes.append(note)
        yield line.rstrip("\r\n")


def main(arguments: dict[str, object]) -> int:
    """Search; returns grep's exit code."""
    text, path, workspace = (str(arguments[name]) for name in ("pattern", "path", "workspace"))
    try:
        pattern = re.compile(
            re.escape(text) if arguments["literal"] else text,
            re.IGNORECASE if arguments["ignore_case"] else 0,
        )
    except re.error as error:
        print(f"regex parse error: {error}")
        return 2
    notes: list[str] = []
    binary = found = 0
    out = sys.stdout.buffer
    for file in _files(path, workspace, str(arguments["glob"]), notes):
        try:
            for number, is_match, line in search(
                file, pattern, int(str(arguments["context"])), notes
            ):
                found += is_match
                written = f"{number}{':' if is_match else '-'}{line[:MAX_WRITTEN]}"
                out.write(
                    b"%s\0%s\n" % (os.fsencode(file), written.encode("utf-8", "surrogateescape"))
                )
        except ValueError:
            binary += 1
        except OSError as error:
            notes.append(f"{file}: {error.strerror}")
        out.flush()
    for kind, group in groupby(sorted(notes, key=_reason), _reason):
        out.write(
            os.fsencode(
                f"skipped ({kind}): "
                + ", ".join(note.rpartition(": ")[0] for note in list(group)[:10])
                + "\n"
            )
        )
    if binary:
        out.write(b"skipped: %d binary file%s\n" % (binary, b"s" if binary > 1 else b""))
    out.flush()
    return 0 if found else 1


def _files(path: str, workspace: str, glob: str, notes: list[str]) -> Iterator[str]:
    """The file that is named, or those of the folder; a link may lead out of it, and is not followed."""
    if os.path.isfile(path):
        yield path
        return
    chosen = chooser(glob, path, workspace)
    for entry in walk(path, notes, rules_above(path, workspace)):
        if not entry.is_symlink() and chosen(entry.path):
            yield entry.path


def _reason(note: str) -> str:
    return note.rpartition(": ")[2]


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
