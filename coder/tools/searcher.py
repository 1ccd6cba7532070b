"""Walking a tree with its .gitignore files, and searching it. Standard library only.

Run as a program it is the search of machines without ripgrep: a child that can be killed, because a regular expression
can run for ever and holds the interpreter's lock while it does.

    python -I searcher.py '{"pattern": ..., "path": ..., "glob": null, "ignore_case": false, "literal": false, "context": 0}'

writes `path NUL line-number:text` per match (`-` for `:` in lines of context), and notes in lines without a NUL.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from itertools import groupby

MAX_LINE = 1_000_000  # bytes of a line that is searched; the rest of a longer one is not
Ignored = Callable[[str, bool], bool]


# ---- patterns --------------------------------------------------------------------------------------------


def to_regex(pattern: str) -> str:
    """A glob as a regular expression for a path with /: ** crosses folders, * and ? do not."""
    pieces = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[!^]?\]?[^\]/]*\]|\{[^{}]*\})", pattern)
    return "".join(pieces.get(part) or _set(part) for part in parts)


def _set(part: str) -> str:
    if part.startswith("[") and part.endswith("]") and len(part) > 2:
        body = part[1:-1].replace("\\", "\\\\")
        return f"[^{body[1:]}]" if body[0] in "!^" else f"[{body}]"
    if part.startswith("{") and part.endswith("}"):
        return "(?:" + "|".join(to_regex(choice) for choice in part[1:-1].split(",")) + ")"
    return re.escape(part)


def matcher(pattern: str) -> re.Pattern[str]:
    """A glob for paths below a folder; without a slash it holds at any depth."""
    pattern = pattern.removeprefix("./")
    return re.compile(("" if "/" in pattern else "(?:.*/)?") + to_regex(pattern) + r"\Z", re.S)


def ignore_rules(folder: str) -> list[tuple[re.Pattern[str], bool, bool]]:
    """(pattern, negated, folders only) of the folder's .gitignore, for paths below it."""
    rules = []
    try:
        with open(os.path.join(folder, ".gitignore"), encoding="utf-8", errors="replace") as lines:
            for line in map(str.strip, lines):
                if not line or line.startswith("#"):
                    continue
                body = line.lstrip("!").rstrip("/")
                anchored = "/" in body
                text = ("" if anchored else "(?:.*/)?") + to_regex(body.lstrip("/"))
                rules.append((re.compile(text + r"\Z", re.S), line.startswith("!"), line.endswith("/")))
    except (OSError, re.error):
        pass
    return rules


# ---- walking ---------------------------------------------------------------------------------------------


def walk(root: str, notes: list[str]) -> Iterator[os.DirEntry[str]]:
    """Regular files below `root`, in order, without .git and what .gitignore names. Links to folders are not followed.

    What could not be looked into is told in `notes`.
    """
    stack: list[tuple[str, list[tuple[str, list[tuple[re.Pattern[str], bool, bool]]]]]] = [(root, [])]
    while stack:
        folder, above = stack.pop()
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            notes.append(f"{folder}: {error.strerror}")
            continue
        own = ignore_rules(folder) if any(entry.name == ".gitignore" for entry in entries) else []
        rules = [*above, (folder, own)] if own else above
        folders = []
        for entry in entries:
            is_folder = entry.is_dir(follow_symlinks=False)
            if entry.name == ".git" or ignored(entry.path, is_folder, rules):
                continue
            if is_folder:
                folders.append((entry.path, rules))
            elif _regular(entry):
                yield entry
            else:
                notes.append(f"{entry.path}: not a regular file")
        stack.extend(reversed(folders))


def _regular(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:
        return False  # a link that leads round in a circle


def ignored(path: str, is_folder: bool, rules: list[tuple[str, list[tuple[re.Pattern[str], bool, bool]]]]) -> bool:
    """The last rule that fits decides; the nearest .gitignore comes last."""
    verdict = False
    for folder, patterns in rules:
        below = path[len(folder):].lstrip("/")
        for pattern, negated, folders_only in patterns:
            if (is_folder or not folders_only) and pattern.match(below):
                verdict = not negated
    return verdict


# ---- searching -------------------------------------------------------------------------------------------


def search(path: str, pattern: re.Pattern[bytes], context: int) -> Iterator[tuple[int, bool, bytes]]:
    """(line number, is a match, line) of the matches in a file and the lines around them. A binary file has none."""
    with open(path, "rb") as file:
        if b"\0" in file.read(8192):
            raise ValueError("binary file")
        file.seek(0)
        before: list[tuple[int, bytes]] = []
        after = 0
        for number, line in enumerate(_lines(file), 1):
            if pattern.search(line):
                yield from ((n, False, text) for n, text in before)
                yield number, True, line
                before, after = [], context
            elif after:
                yield number, False, line
                after -= 1
            elif context:
                before = [*before, (number, line)][-context:]


def _lines(file: object) -> Iterator[bytes]:
    """Lines, each at most MAX_LINE long; the rest of a longer one is passed over."""
    readline = file.readline  # type: ignore[attr-defined]
    while line := readline(MAX_LINE):
        end = line
        while not end.endswith(b"\n") and len(end) == MAX_LINE:
            end = readline(MAX_LINE)
        yield line.rstrip(b"\r\n")


def main(arguments: dict[str, object]) -> int:
    text, path = str(arguments["pattern"]), str(arguments["path"])
    flags = re.IGNORECASE if arguments["ignore_case"] else 0
    try:
        pattern = re.compile((re.escape(text) if arguments["literal"] else text).encode(), flags)
    except re.error as error:
        print(f"regex parse error: {error}")
        return 2
    chosen = matcher(str(arguments["glob"])) if arguments["glob"] else None
    notes: list[str] = []
    files = [path] if os.path.isfile(path) else (entry.path for entry in walk(path, notes))
    binary = found = 0
    out = sys.stdout.buffer
    for file in files:
        if chosen and not chosen.match(os.path.relpath(file, path)):
            continue
        try:
            for number, is_match, line in search(file, pattern, int(str(arguments["context"]))):
                found += is_match
                out.write(b"%s\0%d%s%s\n" % (os.fsencode(file), number, b":" if is_match else b"-", line[:2000]))
        except ValueError:
            binary += 1
        except OSError as error:
            notes.append(f"{file}: {error.strerror}")
        out.flush()
    for kind, group in groupby(sorted(notes), lambda note: note.rpartition(": ")[2]):
        print(f"skipped ({kind}): " + ", ".join(note.rpartition(": ")[0] for note in list(group)[:10]))
    if binary:
        print(f"skipped: {binary} binary file{'s' if binary > 1 else ''}")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
