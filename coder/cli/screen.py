"""The screen: finished rows are appended and never repainted; below them stand the row under way and the status rows.

All text goes through the sanitiser here, so that no caller can forget it.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from typing import TextIO

from coder.permissions.sanitize import TerminalSanitizer, strip_controls

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
FRAME = 0.1  # seconds
STALL = 5.0  # seconds without data from which they are counted on the screen
PROSE = 100  # columns of a row of text at most: longer ones are hard to read
MARGIN = 4  # rows of the screen beside a text that is not folded
FILE_WIDTH = 200  # columns of a stream that is no terminal: a file or a log
STYLES = {"bold": 1, "dim": 2, "italic": 3, "underline": 4, "reverse": 7, "strike": 9}
STYLES |= {"red": 31, "green": 32, "yellow": 33, "blue": 34, "cyan": 36}

# Of text in rows
WIDE = "\u3001-\u9fff\uac00-\ud7af\uff00-\uffef"  # scripts without blanks
PIECE = ".{1,512}"  # whose columns are counted again for each row in it
BREAK = re.compile(f"(?<=[ {WIDE}])(?=[^ ])|(?<=[^ ])(?=[{WIDE}])")


class Screen:
    """Write to a stream: styled where it takes styles, with a status row where it is a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.live = stream.isatty() and os.environ.get("TERM") != "dumb"
        self.styled = self.live or bool(os.environ.get("FORCE_COLOR"))
        self.stop_key = "Ctrl+C"  # what stops that which is waited for
        self.markdown = False  # whether text that streams without a style is Markdown
        self._sanitizer = TerminalSanitizer()
        self._rows: PlainText | None = None  # of the text that streams
        self._row = ""  # under way, as it stands on the screen
        self._status_rows = ""  # as they stand on the screen
        self._has_gap = True  # the last row that was finished is blank
        self._label, self._limit, self._typed_text = "", math.inf, ""
        self._rows_above: tuple[str, ...] = ()  # rows above the label
        self._label_since = self._last_data = 0.0
        self._lock = threading.RLock()
        self._ticker: threading.Thread | None = None

    @property
    def width(self) -> int:
        return shutil.get_terminal_size().columns if self.stream.isatty() else FILE_WIDTH

    # -- text

    def write(self, text: str, style: str = "") -> None:
        """Append text that streams."""
        if not self._rows:
            self.finish_line()
            self._rows = self._begin_text(style)
        finished = self._rows.feed(self._sanitizer.feed(text), self.width)
        self._draw(finished, self._rows.row)

    def _begin_text(self, style: str) -> PlainText:
        def paint(text: str, added: str) -> str:
            return self._style(text, f"{style} {added}") if self.live else text

        if not (self.live and self.markdown):
            return PlainText(paint)
        from coder.cli.markdown import Markdown

        return Markdown(paint)

    def finish_line(self) -> None:
        """End the row under way."""
        finished = f"{self._row}\n" if self._row else ""
        if rows := self._rows:
            finished = rows.feed(self._sanitizer.flush(), self.width) + rows.finish()
            self._rows = None
        if finished:
            self._draw(finished, "")

    def line(self, text: str = "", style: str = "", head: str = "") -> None:
        """Append a line, broken between words where the terminal is too narrow; further rows hang behind `head`."""
        column, text = cell_count(head), strip_controls(text)
        if self.live:
            text = wrap(text, max(10, min(self.width, PROSE) - column)).replace(
                "\n", "\n" + " " * column
            )
        self.exact_line((head + text, style))

    def gap(self) -> None:
        """Append a blank row, unless there is one."""
        self.finish_line()
        if not self._has_gap:
            self.line()

    def entry(self, text: str) -> None:
        """Append what the user entered, set off as at the prompt."""
        self.line(text.strip(), "bold", "❯ ")

    def exact_line(self, *parts: tuple[str, str]) -> None:
        """Append a line of (text, style) parts, broken only by the terminal."""
        self.finish_line()
        self._draw(f"{self._style_parts(parts)}\n", "")

    def draft(self, *parts: tuple[str, str]) -> None:
        """On a terminal, show a line that further drafts replace, until something else follows it."""
        if self._rows:
            self.finish_line()
        self._draw("", self._style_parts(parts))

    def _style_parts(self, parts: Iterable[tuple[str, str]]) -> str:
        return "".join(self._style(strip_controls(text), style) for text, style in parts)

    def _style(self, text: str, style: str) -> str:
        """The text with words of STYLES, such as "bold red"; NO_COLOR leaves bold and dim."""
        if not (style and self.styled and text.strip()):
            return text
        codes = [STYLES[word] for word in style.split()]
        if os.environ.get("NO_COLOR"):
            codes = [code for code in codes if code < 30]
        return f"\x1b[{';'.join(map(str, codes))}m{text}\x1b[0m" if codes else text

    def notify(self, text: str) -> None:
        """Ring the bell, and have a terminal that can do so show a notification (OSC 9)."""
        if self.live:
            self.stream.write(f"\x1b]9;coder: {one_line(text, 80)}\x07\x07")
            self.stream.flush()

    # -- the status row

    def status(
        self, label: str = "", limit: float = math.inf, *above: str, since: float = 0.0
    ) -> None:
        """Show `label` below the output with the seconds since there was none, or since then; data has come just now.

        After `limit` seconds without another call the program gives up: from STALL on these are counted, also
        without a label.
        """
        with self._lock:
            self._last_data = time.monotonic()
            if since or not self._label:
                self._label_since = since or self._last_data
            self._label, self._limit, self._rows_above = label, limit, above
            if not (label or limit < math.inf):
                self._draw("", self._row)
            elif self.live and self._ticker is None:
                self._ticker = threading.Thread(target=self._tick, daemon=True)
                self._ticker.start()

    def show_typed(self, text: str) -> None:
        """Show in the status row what the user types."""
        with self._lock:
            self._typed_text = re.sub(r"\s", " ", strip_controls(text))
            self._draw("", self._row)

    def _tick(self) -> None:
        while True:
            time.sleep(FRAME)
            with self._lock, contextlib.suppress(ValueError):  # the stream may be closed
                if not self._label and self._limit == math.inf:
                    self._ticker = None
                    return
                self._draw("", self._row)

    def _status(self, now: float) -> str:
        """The status rows as they should be now; "" for none."""
        if not (self.live and (self._label or self._limit < math.inf)):
            return ""
        room = self.width - 1
        # Its end is shown: reversed, cut, and reversed again
        typed = one_line(self._typed_text[::-1], room * 2 // 3 if self._label else room)[::-1]
        room -= cell_count(typed) + 1
        waited, silent = now - self._label_since, now - self._last_data
        stalls = silent >= STALL and self._limit < math.inf
        if room < 10 or not (stalls or self._rows_above or (self._label and waited >= 2 * FRAME)):
            return typed
        seconds = f" {waited:.0f}s" if waited >= 1 else ""
        if stalls:
            seconds = f" no data for {silent:.0f}s of {self._limit:g}s"
        label = f"{SPINNER[int(now / FRAME) % len(SPINNER)]} {self._label}"
        waiting = one_line(one_line(label, room - len(seconds)) + seconds, room)
        hint = f" · {self.stop_key} stops"
        if not typed and cell_count(waiting + hint) <= room:
            waiting += hint
        fitting = max(0, shutil.get_terminal_size().lines - 2)  # with the row under way
        rows = [one_line(row, self.width - 1) for row in self._rows_above[:fitting]]
        return "\r\n".join([*rows, f"{waiting} {typed}" if typed else waiting])

    # -- drawing

    def _draw(self, finished: str, row: str) -> None:
        """Write rows that are finished, and below them the row under way and the status, in one write.

        Of what stands there, only what changes is written again. `finished` begins with the old row under way.
        """
        with self._lock:
            text, status = finished + row, self._status(time.monotonic())
            if text == self._row and status == self._status_rows:
                return
            if finished:
                self._has_gap = finished == "\n" or finished.endswith("\n\n")
            below = ("\r\n" if row else "") + self._style(status, "dim") if status else ""
            if not self._status_rows and text.startswith(self._row):
                changed = text[len(self._row) :] + below
            else:
                standing = "\n".join(filter(None, [self._row, self._status_rows]))
                changed = erasure(standing) + text + below
            self._row, self._status_rows = row, status
            self.stream.write(changed)
            self.stream.flush()


# ---- text in rows ------------------------------------------------------------------------


def cell_count(text: str) -> int:
    """How many columns a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # late: 60 ms

    return cell_len(text)


def erasure(standing: str) -> str:
    """What takes this text off the screen, at whose end the cursor stands; a narrower terminal has broken its rows."""
    width = shutil.get_terminal_size().columns
    lines = re.sub("\x01.*?\x02|\x1b\\[[\\d;]*m|\r", "", standing).split("\n")
    up = sum(max(0, cell_count(line) - 1) // width for line in lines) + len(lines) - 1
    return f"\r\x1b[{up}A\x1b[J" if up else "\r\x1b[J"


def one_line(text: str, width: int) -> str:
    """Sanitised, lines joined, cut to `width` columns with an ellipsis; other white space stays."""
    width = max(10, width)
    line = strip_controls(text[: 4 * width + 100]).expandtabs(4)
    line = re.sub(r" *\n\s*", " ", line).rstrip()
    return line if cell_count(line) <= width else f"{start_of(line, width - 1)}…"


class Folded:
    """Texts that are taller than the screen, over which readline would draw, and what stands for each in a line."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}  # by what stands for them
        self._marks: dict[str, str] = {}  # the reverse

    def fold(self, text: str) -> str:
        """The text, or what stands for it or for parts of it that are known."""
        for known, mark in self._marks.items():
            text = text.replace(known, mark)
        size = shutil.get_terminal_size()
        lines = text.split("\n")
        rows = sum(1 + cell_count(line) // size.columns for line in lines)
        if rows <= max(1, size.lines - MARGIN):
            return text
        count = len(text.rstrip("\n").split("\n"))
        number = f"{count} line{'s' * (count > 1)}"
        mark = f"[{number} pasted]"
        while self._texts.setdefault(mark, text) != text:
            mark = mark.replace("]", "'") + "]"
        self._marks[text] = mark
        return mark

    def unfold(self, line: str) -> str:
        """The line with the texts in it."""
        for mark, text in self._texts.items():
            line = line.replace(mark, text)
        return line


def wrap(text: str, width: int) -> str:
    """Text with newlines between words, so that no row is wider than `width` columns but by a word: it stays copyable."""
    rows = []
    for line in text.expandtabs().split("\n"):
        while len(line) > 4 * width or cell_count(line.rstrip(" ")) > width:
            first = BREAK.search(line, 1)
            if not (at := row_end(line, width) or (first.start() if first else 0)):
                break
            if row := line[:at].rstrip(" "):  # an indentation may leave none
                rows.append(row)
            line = line[at:]
        rows.append(line)
    return "\n".join(rows)


def row_end(text: str, width: int, least: int = 0) -> int:
    """Where the first row of a text that is too wide ends, between two words and behind `least` characters; 0 for nowhere."""
    end = len(start_of(text, width)) or 1
    next_word = len(text) - len(text[end:].lstrip(" "))
    places = [each.start() for each in BREAK.finditer(text, least + 1, next_word + 1)]
    return places[-1] if places else 0


def start_of(text: str, width: int) -> str:
    """As much of the text as fits into `width` columns."""
    if text.isascii():
        return text[:width]
    from rich.cells import chop_cells

    return chop_cells(text[: 4 * width + 100], width)[0]


class PlainText:
    """Text that streams, broken only by the terminal's edge: it stays copyable. `row` is under way, and may change."""

    def __init__(self, paint: Callable[[str, str], str]) -> None:
        self.paint = paint
        self.row = self._text = ""

    def feed(self, text: str, width: int) -> str:
        """Take text; the rows that are finished by it, each with its newline."""
        finished, newline, last = (self._text + text).rpartition("\n")
        rows, row = [finished, newline], ""
        for piece in re.findall(PIECE, last):
            row += piece
            while cell_count(row) > width:
                rows.append(start_of(row, width) or row[0])
                row = row[len(rows[-1]) :]
        self._text, self.row = row, self.paint(row, "")
        return self.paint("".join(rows), "")

    def finish(self) -> str:
        """The rest, at the end of the text."""
        return f"{self.row}\n" if self.row else ""
