"""The screen: finished rows are appended and never repainted; below them stand the row under way and one status row.

All text goes through the sanitiser here, so that no caller can forget it.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import shutil
import threading
import time
from functools import cached_property
from typing import TYPE_CHECKING, TextIO

from coder.permissions.sanitize import TerminalSanitizer, strip_controls

if TYPE_CHECKING:
    from rich.console import Console

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
FRAME = 0.1  # seconds
FILE_WIDTH = 200  # columns of a stream that is no terminal: a file or a log
STALL = 5.0  # seconds without data from which they are counted on the screen
ERASE_ROW = "\r\x1b[K"

# Of text in rows
WIDE = "\u3001-\u9fff\uac00-\ud7af\uff00-\uffef"  # scripts without blanks
BREAK = re.compile(f"(?<=[ \u3000])(?=[^ \u3000])|(?<=[{WIDE}])(?=[^ ])|(?<=[^ ])(?=[{WIDE}])")
PIECE = re.compile("\n|[^\n]{1,512}")
FENCES = ("```", "~~~")


class Screen:
    """Write to a stream, in colour where it takes it, with a status row while the user waits.

    `answers`: the stream of the model's text, where it is another one (stdout beside stderr). On a stream that is no
    terminal, or a dumb one, nothing is wrapped or repainted.
    """

    def __init__(self, stream: TextIO, answers: TextIO | None = None) -> None:
        both = answers is not None and answers.isatty() and stream.isatty()
        self.stream = answers if answers and both else stream
        self.live = stream.isatty() and os.environ.get("TERM") != "dumb"
        # rich looks at these variables. Where it would write no style it is not loaded.
        self._styles = stream.isatty() or any(
            map(os.environ.get, ("FORCE_COLOR", "TTY_COMPATIBLE"))
        )
        self._answers = Screen(answers) if answers and not both else self
        self._sanitizer, self._rows = TerminalSanitizer(), RowWriter()
        self._row = self._row_style = ""  # under way, as it stands on the screen
        self._lock = threading.RLock()
        self.label = ""  # of the status
        self._limit = math.inf
        self._only_stalls = False
        self._since = self._last_data = 0.0
        self._status_row = ""  # as it stands on the screen
        self._typed = ""
        self._title = ""
        self._ticker: threading.Thread | None = None

    @property
    def width(self) -> int:
        return shutil.get_terminal_size().columns if self.stream.isatty() else FILE_WIDTH

    @cached_property
    def console(self) -> Console:
        """rich on our stream: it knows the terminal's colours, NO_COLOR and FORCE_COLOR."""
        from rich.console import Console

        return Console(file=self.stream, highlight=False, markup=False, emoji=False, soft_wrap=True)

    # -- text that streams

    def answer(self, text: str) -> None:
        """Append text of the model's answer."""
        self._answers._stream(text, "")

    def thought(self, text: str) -> None:
        """Append text of the model's reasoning."""
        self._stream(text, "dim")

    def _stream(self, text: str, style: str) -> None:
        text = self._sanitizer.feed(text)
        if self.live:
            finished = self._rows.feed(text, self.width)
            self._draw(finished, self._rows.row.rstrip(" "), style)
        else:
            finished, newline, row = (self._row + text).rpartition("\n")
            self._draw(finished + newline, row, style)

    def finish_line(self) -> None:
        """End the row under way."""
        if self._answers is not self:
            self._answers.finish_line()
        self._stream(self._sanitizer.flush(), self._row_style)
        self._rows = RowWriter()
        if self._row:
            self._draw(f"{self._row}\n", "", self._row_style)

    # -- whole lines

    def line(self, text: str = "", style: str = "") -> None:
        """Append a line, broken between words where the terminal is too narrow for it."""
        text = strip_controls(text)
        self.exact_line(wrap(text, self.width) if self.live else text, style)

    def listed(self, head: str, text: str) -> None:
        """Append a line: `head`, and behind it the text, with a hanging indent."""
        column = cell_count(head)
        text = wrap(strip_controls(text), max(10, self.width - column))
        self.exact_line(head + text.replace("\n", "\n" + " " * column))

    def exact_line(self, text: str, style: str = "") -> None:
        """Append a line, broken only by the terminal: what the user decides on."""
        self.styled_line((text, style))

    def styled_line(self, *parts: tuple[str, str]) -> None:
        """Append a line of several (text, style) parts; a style is one of rich, such as "bold red"."""
        self.finish_line()
        text = "".join(self._styled(strip_controls(text), style) for text, style in parts)
        self._draw(f"{text}\n", "")

    def _styled(self, text: str, style: str) -> str:
        if not (style and text and self._styles):
            return text
        from rich.text import Text

        with self.console.capture() as capture:
            self.console.print(Text(text, style), end="")
        return capture.get()

    # -- the status row

    def status(self, label: str, limit: float = math.inf, *, only_stalls: bool = False) -> None:
        """Show `label` with a spinner and the seconds below the output, from now on; "" ends it.

        After `limit` seconds without another call the program gives up: from STALL on, these are counted as well.
        `only_stalls`: nothing is shown before that.
        """
        with self._lock:
            self._last_data = time.monotonic()
            if label and (not self.label or only_stalls != self._only_stalls):
                self._since = self._last_data
            self.label, self._limit, self._only_stalls = label, limit, only_stalls
            if self._typed or not label:
                self._draw("", self._row, self._row_style)
            if label and self.live and self._ticker is None:
                self._ticker = threading.Thread(target=self._tick, daemon=True)
                self._ticker.start()

    def restart_clock(self) -> None:
        self._since = self._last_data = time.monotonic()

    def show_typed(self, text: str) -> None:
        """Show in the status row what the user types."""
        with self._lock:
            self._typed = re.sub(r"\s", " ", strip_controls(text))
            self._draw("", self._row, self._row_style)

    def title(self, text: str) -> None:
        """Set the window's title; "" for none of ours."""
        if self.live and text != self._title:
            with self._lock:
                self._title = text
                self._send(f"\x1b]0;{one_line(text, 60) if text else ''}\x07")

    def _tick(self) -> None:
        while True:
            time.sleep(FRAME)
            with self._lock, contextlib.suppress(OSError, ValueError):  # the stream may be closed
                if not self.label:
                    self._ticker = None
                    return
                self._draw("", self._row, self._row_style)

    def _status(self, now: float) -> str:
        """The status row as it should be now; "" for none."""
        if not (self.live and self.label):
            return ""
        room = self.width - 1
        typed = last_columns(self._typed, room if self._only_stalls else room * 2 // 3)
        room -= cell_count(typed) + 1 if typed else 0
        started = self._last_data + STALL if self._only_stalls else self._since + 2 * FRAME
        waiting = self._waiting(now, room) if now > started and room >= 10 else ""
        return " ".join(filter(None, [waiting, typed]))

    def _waiting(self, now: float, room: int) -> str:
        """The label with a spinner, the seconds, and those without data."""
        spinner = SPINNER[int(now / FRAME) % len(SPINNER)]
        waited, silent = now - self._since, now - self._last_data
        seconds = f" {waited:.0f}s" if waited >= 1 else ""
        if silent >= STALL and self._limit < math.inf:
            long = f" · no data for {silent:.0f}s of {self._limit:g}s"
            seconds = long if len(long) + 12 < room else f" {silent:.0f}/{self._limit:g}s"
        return one_line(one_line(f"{spinner} {self.label}", room - len(seconds)) + seconds, room)

    # -- drawing

    def _draw(self, finished: str, row: str, style: str = "") -> None:
        """Write rows that are finished, and below them the row under way and the status, in one write.

        Of what stands there, only what changes is written again. `finished` begins with the old row under way.
        """
        with self._lock:
            text, status = finished + row, self._status(time.monotonic())
            below = ("\r\n" if row else "") + f"\x1b[2m{status}\x1b[0m" if status else ""
            if text == self._row and status == self._status_row:
                return
            if text == self._row and status and self._status_row:
                changed = f"{ERASE_ROW}\x1b[2m{status}\x1b[0m"
            elif not self._status_row and text.startswith(self._row):
                changed = self._styled(text[len(self._row) :], style) + below
            else:
                changed = self._erase() + self._styled(text, style) + below
            self._row, self._row_style, self._status_row = row, style, status
            self._send(changed)

    def _erase(self) -> str:
        """What takes the row under way and the status off the screen."""
        up = "\x1b[A" + ERASE_ROW if self._row and self._status_row else ""
        return ERASE_ROW + up

    def _send(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError as error:
            if error.errno != errno.EIO:  # the terminal is gone: its signal is on the way
                raise


# ---- text in rows ------------------------------------------------------------------------
# ASCII is measured here. Other text is measured by rich, which takes 60 ms to load.


def cell_count(text: str) -> int:
    """How many columns a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def one_line(text: str, width: int) -> str:
    """Sanitised, lines joined, cut to `width` columns with an ellipsis; other white space stays."""
    width = max(10, width)
    line = strip_controls(text[: 4 * width + 100]).expandtabs(4)
    line = re.sub(r" *\n\s*", " ", line).rstrip()
    return line if cell_count(line) <= width else f"{line[: _fitting(line, width - 1)]}…"


def last_columns(text: str, width: int) -> str:
    """The text, or its end behind an ellipsis where it is wider than `width` columns."""
    if cell_count(text) <= width:
        return text
    return f"…{text[::-1][: _fitting(text[::-1], width - 1)][::-1]}"


def wrap(text: str, width: int) -> str:
    """Text with newlines between words, so that no row is wider than `width` columns."""
    rows = RowWriter()
    return rows.feed(text, width) + rows.row


def _fitting(text: str, width: int) -> int:
    """How many characters of the text fit into `width` columns."""
    if text.isascii():
        return width
    end = used = 0
    while end < len(text) and (used := used + cell_count(text[end])) <= width:
        end += 1
    return end


class RowWriter:
    """Break text into rows while it streams. `row` is the row under way, which may still change.

    Fenced code, and a word wider than a row, are broken only by the terminal's edge: they stay copyable.
    """

    def __init__(self) -> None:
        self.row = ""
        self._line_start = ""
        self._in_code = False

    def feed(self, text: str, width: int) -> str:
        """Take text; the rows that are finished by it."""
        finished = []
        for piece in PIECE.findall(text):
            if piece == "\n":
                finished.append(f"{self.row.rstrip(' ')}\n")
                self._in_code ^= self._is_fence()
                self.row = self._line_start = ""
                continue
            self._line_start = (self._line_start + piece)[:80]
            self.row += piece
            if "\t" in piece:
                self.row = self.row.expandtabs()
            while cell_count(self.row.rstrip(" ")) > width:
                finished.append(self._take_row(width))
        return "".join(finished)

    def _is_fence(self) -> bool:
        return self._line_start.lstrip().startswith(FENCES)

    def _take_row(self, width: int) -> str:
        end = _fitting(self.row, width) or 1
        places: list[int] = []
        if not (self._in_code or self._is_fence()):
            after_blanks = len(self.row) - len(self.row[end:].lstrip(" "))
            places = [found.start() for found in BREAK.finditer(self.row, 0, after_blanks + 1)]
        if not places:
            row, self.row = self.row[:end], self.row[end:]
            return row
        row, self.row = self.row[: places[-1]].rstrip(" "), self.row[places[-1] :]
        return f"{row}\n" if row else ""  # an indented word that fits only without its indentation
