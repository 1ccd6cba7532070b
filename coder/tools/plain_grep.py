"""The search of grep on a machine with neither ripgrep nor git: a program that prints as they do.

    python plain_grep.py FLAGS CONTEXT SKIPPED PATTERN [NAME...]

In the folder; FLAGS: i, f (standard input). Ignored files are searched, too, but no folder named in a/b/SKIPPED.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from fnmatch import fnmatchcase
from typing import IO


def main(flags: str, context: str, skipped: str, pattern: str, *names: str) -> None:
    try:
        wanted = re.compile(pattern, re.I if "i" in flags else 0)
    except re.error as error:
        sys.stderr.write(f"regex: {error}\n")
        sys.exit(2)
    if "f" in flags:
        search(sys.stdin.buffer, "-", wanted, int(context))
        return
    for folder, folders, files in os.walk("."):
        folders[:] = sorted({*folders} - {*skipped.split("/")})
        for name in sorted(files):
            path = os.path.join(folder, name)
            counts = not names or any(fnmatchcase(name, each) for each in names)
            if counts and os.path.isfile(path) and not os.path.islink(path):
                with contextlib.suppress(OSError), open(path, "rb") as file:
                    search(file, path, wanted, int(context))


def search(file: IO[bytes], path: str, wanted: re.Pattern[str], context: int) -> None:
    """Print the lines that match, and those around; nothing of a binary file."""
    if b"\0" in (data := file.read()):
        return
    lines = data.removesuffix(b"\n").split(b"\n")
    columns = dict[int, int]()
    for at, line in enumerate(lines):
        text = line.rstrip(b"\r").decode("utf-8", "surrogateescape")
        if found := wanted.search(text):
            columns[at] = len(text[: found.start()].encode("utf-8", "surrogateescape")) + 1
    around = {at + more for at in columns for more in range(-context, context + 1)}
    for at in sorted(around & {*range(len(lines))}):
        mark = b":%d:" % columns[at] if at in columns else b"-"
        sys.stdout.buffer.write(b"%s\0%d%s%s\n" % (os.fsencode(path), at + 1, mark, lines[at]))


if __name__ == "__main__":
    main(*sys.argv[1:])
