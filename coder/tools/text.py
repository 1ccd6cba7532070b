"""The text of a file that is changed: its lines, the search for lines in it, and diffs."""

from __future__ import annotations

import codecs
import difflib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from itertools import accumulate, groupby
from pathlib import Path
from typing import IO, Protocol

from coder.tools import workspace
from coder.tools.indentation import first_filled, lines_without, reindent, shift
from coder.toolset import ToolContext
from coder.types import ToolError

MAX_IN_EDITOR = 5_000_000  # bytes; an editor is not asked to open a larger file
MAX_EDIT = 50_000_000  # bytes of a file that is edited in memory
MAX_COMPARED = 4_000  # differing lines of both texts; difflib takes seconds for many more
MAX_RUN = 10  # new lines in a row, or old ones, that a result repeats
AROUND = 3  # lines of a diff before and after a change
# The first line and the number of lines, of the old text and of the new one; without a number: 1
HUNK = r"@@ -(?P<old_line>\d+)(?:,(?P<old>\d+))? \+(?P<line>\d+)(?:,(?P<new>\d+))? @@"
FIRST_LINE = r"(?<=[-+])\d+"  # in the header of a hunk
STRAY = "[\udc80-\udcff]"  # how a byte that is not UTF-8 is decoded
Splice = tuple[int, int, str]  # the start and the end of a piece of a text, and its new text

# What models and editors write for plain characters
PUNCTUATION = str.maketrans(
    "‘’‚‛“”„‟‐‑‒–—―−\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000",
    "''''\"\"\"\"-------" + 13 * " ",
)


def plain(line: str) -> str:
    return line.translate(PUNCTUATION)


def _exactly(line: str) -> str:
    return line


def _plain_without_ends(line: str) -> str:
    return plain(line).strip()


# How lines are compared, the strictest way first
VIEWS: tuple[Callable[[str], str], ...] = (
    _exactly,
    str.rstrip,
    str.strip,
    _plain_without_ends,
)


class Editor(Protocol):
    """The program in which the user edits files. Its methods raise ToolError and Aborted."""

    def unsaved(self, path: Path, saved: bytes) -> bytes | None:
        """The text that the user has of a file; None if it is what is `saved` on disk."""
        ...

    def write(self, path: Path, data: bytes) -> bool:
        """Replace and save a text that `unsaved` has returned; False if it has returned none."""
        ...


def open_text(ctx: ToolContext, target: Path, name: str) -> IO[bytes]:
    """A file as the user has it, to read from: with what is not saved in the editor.

    Raises ToolError.
    """
    editor: Editor | None = ctx.editor
    file = workspace.opened(target, name)
    if editor is None or os.fstat(file.fileno()).st_size > MAX_IN_EDITOR:
        return file
    unsaved = editor.unsaved(target, file.read())
    if unsaved is None:
        file.seek(0)
        return file
    file.close()
    return BytesIO(unsaved)


def load(ctx: ToolContext, target: Path) -> Text:
    """The whole text of a file that is to be changed. Raises ToolError."""
    name = workspace.shown(ctx, target)
    with open_text(ctx, target, name) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size > MAX_EDIT:
            raise ToolError(f"{name} has {size:,} bytes, too large to edit here: use a command")
        data = file.read()
    if b"\0" in data[:8192]:
        raise ToolError(f"{name} is a binary file of {size:,} bytes")
    digest = ctx.seen.get(target)
    has_changed = digest is not None and digest != workspace.digest_of(data)
    text = data.removeprefix(codecs.BOM_UTF8)
    bom = data[: len(data) - len(text)]
    return Text(text.decode("utf-8", "surrogateescape"), bom, has_changed)


def load_known(ctx: ToolContext, target: Path) -> Text:
    """The text of a file that is to be overwritten.

    Raises ToolError if the model does not know the file as it is now.
    """
    file = load(ctx, target)
    name = workspace.shown(ctx, target)
    if file.has_changed:
        raise workspace.changed_error(name)
    if ctx.seen.get(target) is None:
        raise ToolError(
            f"{name} exists and was not read as it is now. Read it first, or change a part of it."
        )
    return file


class Text:
    """The text of a file and its lines. Bytes that are not UTF-8 survive in it as surrogates.

    `joined` is all lines, each with a newline. If all lines of the file end in CRLF, it has none.
    If only some do, a CR is white space at the end of its line, and new lines get the commoner
    ending. `has_changed`: the file is not as the session has read it.
    """

    def __init__(
        self,
        text: str,
        bom: bytes = b"",
        has_changed: bool = False,
    ) -> None:
        self.text = text
        self.bom = bom
        self.has_changed = has_changed
        ends = text.count("\n")
        crlf = text.count("\r\n")
        self.newline = "\r\n" if crlf * 2 > ends else "\n"
        self.is_crlf = crlf > 0 and crlf == ends
        self.is_ended = not text or text.endswith("\n")
        self.added = self.newline  # the ending of a new line in `joined`
        self.joined = text
        if self.is_crlf:
            self.added = "\n"
            self.joined = text.replace("\r\n", "\n")
        if not self.is_ended:
            self.joined += "\n"
        self.lines = self.joined.split("\n")[:-1]
        self.starts = [0, *accumulate(len(line) + 1 for line in self.lines)]

    def encoded(self, text: str) -> bytes:
        """The bytes of a changed text. Raises ToolError if another encoding may be meant."""
        if not re.search(STRAY, self.text):
            return self.bom + text.encode()
        new_characters = set(text) - set(self.text)
        if not "".join(new_characters).isascii():
            raise ToolError(
                "the file is not UTF-8: only ASCII can be added to it. "
                "Use a command that knows its encoding."
            )
        return self.bom + text.encode("utf-8", "surrogateescape")

    def searched(self, old: str) -> str:
        """`joined`, but a search for a newline does not see the one that the file lacks."""
        if old == "\n" and not self.is_ended:
            return self.joined[:-1]
        return self.joined

    def restored(self, joined: str) -> str:
        """Changed lines as they belong into the file."""
        text = joined
        if not self.is_ended:
            text = text.removesuffix("\n")
        if self.is_crlf:
            text = text.replace("\n", "\r\n")
        return text

    def spliced(self, splices: Iterable[Splice]) -> str:
        """The file's text after these changes of `joined`."""
        parts = list[str]()
        at = 0
        for start, end, new in splices:
            parts.append(self.joined[at:start])
            parts.append(new.replace("\n", self.added))
            at = end
        parts.append(self.joined[at:])
        return self.restored("".join(parts))

    def find(self, wanted: Sequence[str], start: int = 0) -> list[int]:
        """The lines at which the wanted ones are, from `start`, in the strictest view that fits."""
        for view in VIEWS[:1] if self.has_changed else VIEWS:
            seen = [view(line) for line in self.lines]
            sought = [view(line) for line in wanted]
            fits = list[int]()
            for at in range(start, len(seen) - len(wanted) + 1):
                end = at + len(wanted)
                if seen[at:end] == sought and shift(self.lines[at:end], wanted):
                    fits.append(at)
            if fits:
                return fits
        return []

    def changes(self, at: int, body: Sequence[str]) -> list[Splice]:
        """What the marked lines change if their old ones fit at line `at`."""
        old = lines_without("+", body)
        own = self.lines[at : at + len(old)]
        if own == _plain(own) and old != _plain(old):
            body = _plain(body)
        splices = list[Splice]()
        for line in reindent(own, body, first_filled(self.lines[at + len(old) :])):
            start = self.starts[at]
            if line[0] == "+":
                splices.append((start, start, f"{line[1:]}\n"))
                continue
            at += 1
            if line[0] == "-":
                splices.append((start, self.starts[at], ""))
        return splices


def _plain(lines: Iterable[str]) -> list[str]:
    return [plain(line) for line in lines]


# ---- marked lines and diffs -----------------------------------------------------------------


def marked(mark: str, lines: Iterable[str]) -> list[str]:
    return [f"{mark}{line}" for line in lines]


def diff(old: str, new: str, name: str) -> str:
    """A unified diff with three lines around; in words if only line endings differ."""
    if old == new:
        return ""
    before = old.splitlines()
    after = new.splitlines()
    if before == after:
        return "(only line endings, or the newline at the end, differ)"
    # difflib would also compare the equal lines at both ends
    first = max(0, _count_equal(before, after) - AROUND)
    last = max(0, _count_equal(before[first:][::-1], after[first:][::-1]) - AROUND)
    before = before[first : len(before) - last]
    after = after[first : len(after) - last]
    if len(before) + len(after) > MAX_COMPARED:  # all in one hunk
        sizes = f"-{min(1, len(before))},{len(before)} +{min(1, len(after))},{len(after)}"
        lines = [f"@@ {sizes} @@", *marked("-", before), *marked("+", after)]
    else:
        lines = list(
            difflib.unified_diff(
                before,
                after,
                lineterm="",
                n=AROUND,
            )
        )[2:]
    for at, line in enumerate(lines):
        if line.startswith("@"):
            lines[at] = re.sub(FIRST_LINE, lambda number: str(int(number[0]) + first), line)
    text = "\n".join([f"--- a/{name}", f"+++ b/{name}", *lines])
    return text.encode("utf-8", "replace").decode()


def _count_equal(before: list[str], after: list[str]) -> int:
    """How many lines are the same from the start on."""
    count = 0
    for old, new in zip(before, after):
        if old != new:
            break
        count += 1
    return count


def lines_of(changes: str) -> str:
    """The lines of the new text that a diff changes, as `, lines 3-5`; "" if no line differs."""
    touched = list[int]()
    number = 0
    for line in changes.split("\n")[2:]:
        header = re.match(HUNK, line)
        if header:
            number = int(header["line"])
            continue
        if line.startswith(("+", "-")):
            touched.append(number)
        if not line.startswith("-"):
            number += 1
    if not touched:
        return ""
    if touched[0] == touched[-1]:
        return f", line {touched[0]}"
    return f", lines {touched[0]}-{touched[-1]}"


def shortened(changes: str) -> str:
    """The hunks of a diff for the model, which knows what it wrote.

    Of many added or removed lines in a row only the first and the last are in it.
    """
    if not changes.startswith("---"):
        return changes
    lines = list[str]()
    for mark, run in groupby(changes.split("\n")[2:], lambda line: line[0]):
        group = list(run)
        if mark in ("+", "-") and len(group) > MAX_RUN:
            group = [group[0], f"{mark} ... ({len(group) - 2} lines)", group[-1]]
        lines += group
    return "\n".join(lines)
