"""Text in rows: how many columns it takes, where it breaks, how rows are erased from the screen."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import cache

from coder.permissions.sanitize import strip_controls

Part = tuple[str, str]  # a text and its style
Parts = list[Part]  # a row

PROSE = 100  # columns of a row of text at most: longer ones are hard to read
WIDE = "\u3001-\u9fff\uac00-\ud7af\uff00-\uffef"  # scripts without blanks
PIECE = ".{1,512}"  # the columns of a piece are counted again for each row in it
UNSEEN = "\x01.*?\x02|\x1b\\[[\\d;]*m|\r"  # readline's marks of what has no width, and styles


@cache
def breaks() -> re.Pattern[str]:
    """Matches where a row can end. Most starts need none, and to compile it takes 3 ms."""
    return re.compile(f"(?<=[ {WIDE}])(?=[^ ])|(?<=[^ ])(?=[{WIDE}])")


def cell_count(text: str) -> int:
    """How many columns a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # late: 60 ms

    return cell_len(text)


def start_of(text: str, width: int) -> str:
    """As much of the text as fits into `width` columns."""
    if text.isascii():
        return text[:width]
    from rich.cells import chop_cells

    rows = chop_cells(text[: _most_characters(width)], width)
    return rows[0] if rows else text  # characters of no width alone make no row


def _most_characters(width: int) -> int:
    """More characters than the columns can show: a longer text is not looked at beyond them."""
    return 4 * width + 100


def one_line(text: str, width: int) -> str:
    """Sanitised, lines joined, cut to `width` columns with an ellipsis; other white space stays."""
    width = max(10, width)
    line = strip_controls(text[: _most_characters(width)]).expandtabs(4)
    line = re.sub(r" *\n\s*", " ", line).rstrip()
    if cell_count(line) <= width:
        return line
    return f"{start_of(line, width - 1)}…"


def end_of_line(line: str, width: int) -> str:
    """The end of a sanitised line, cut to `width` columns with an ellipsis in front."""
    width = max(10, width)
    line = line[-_most_characters(width) :].lstrip()
    if cell_count(line) <= width:
        return line
    # Only the start of a text can be cut to columns, so the line is reversed for that
    return f"…{start_of(line[::-1], width - 1)[::-1]}"


def wrap(text: str, width: int) -> str:
    """Text with newlines between words, so that it stays copyable.

    A row is wider than `width` columns only if a single word is.
    """
    rows = []
    for line in text.expandtabs().split("\n"):
        while len(line) > 4 * width or cell_count(line.rstrip(" ")) > width:
            end = row_end(line, width)
            if not end:  # the first word is too wide: break after it
                after_word = breaks().search(line, 1)
                if after_word is None:
                    break
                end = after_word.start()
            row = line[:end].rstrip(" ")
            if row:  # an indentation may leave none
                rows.append(row)
            line = line[end:]
        rows.append(line)
    return "\n".join(rows)


def row_end(text: str, width: int, least: int = 0) -> int:
    """The end of the first row of a text that is too wide: between two words, after more than
    `least` characters. 0 if there is no such place."""
    end = len(start_of(text, width)) or 1
    next_word = len(text) - len(text[end:].lstrip(" "))
    ends = [found.start() for found in breaks().finditer(text, least + 1, next_word + 1)]
    return ends[-1] if ends else 0


def erasure(drawn: str) -> str:
    """The sequence that erases this text from the screen; the cursor is at its end.

    A terminal that has become narrower has broken its rows.
    """
    width = shutil.get_terminal_size().columns
    lines = re.sub(UNSEEN, "", drawn).split("\n")
    rows_above = len(lines) - 1
    for line in lines:
        rows_above += max(0, cell_count(line) - 1) // width
    return f"\r\x1b[{rows_above}A\x1b[J" if rows_above else "\r\x1b[J"


class PlainText:
    """Text that streams, broken only by the terminal's edge, so that it stays copyable.

    `paint(text, style)` puts a style in. `row` is the last row, which may still change.
    """

    def __init__(self, paint: Callable[[str, str], str]) -> None:
        self.paint = paint
        self.row = ""
        self._text = ""  # of the row, without its style

    def feed(self, text: str, width: int) -> str:
        """Take text; returns the rows that it finishes."""
        finished, newline, last_line = (self._text + text).rpartition("\n")
        finished += newline
        row = ""
        for piece in re.findall(PIECE, last_line):
            row += piece
            while cell_count(row) > width:
                full_row = start_of(row, width) or row[0]
                finished += full_row
                row = row[len(full_row) :]
        self._text = row
        self.row = self.paint(row, "")
        return self.paint(finished, "")

    def finish(self) -> str:
        """The rest, at the end of the text."""
        return f"{self.row}\n" if self.row else ""
