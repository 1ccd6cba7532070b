"""The screen: finished rows are appended and never repainted; the unfinished row and the status
rows are below them.

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

from coder.cli.text_rows import (
    PROSE,
    Part,
    PlainText,
    cell_count,
    end_of_line,
    erasure,
    one_line,
    wrap,
)
from coder.permissions.sanitize import TerminalSanitizer, strip_controls

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
FRAME = 0.1  # seconds
STALL = 5.0  # seconds without data, after which they are counted on the screen
MIN_STATUS = 10  # columns for a status; in fewer it is left out
FILE_WIDTH = 200  # columns of a stream that is no terminal: a file or a log
STYLES = {"bold": "1", "dim": "2", "italic": "3", "underline": "4", "reverse": "7", "strike": "9"}
COLOURS = {"red": "31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36"}


class Screen:
    """Write to a stream: with styles if it takes them, with status rows if it is a terminal."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream = stream
        self.clock = clock  # seconds
        self.live = stream.isatty() and os.environ.get("TERM") != "dumb"
        self.styled = self.live or bool(os.environ.get("FORCE_COLOR"))
        self.stop_key = "Ctrl+C"  # stops what is being waited for
        self.markdown = False  # whether text that streams without a style is Markdown
        self._codes = STYLES if os.environ.get("NO_COLOR") else STYLES | COLOURS
        self._sanitizer = TerminalSanitizer()
        self._rows: PlainText | None = None  # of the text that streams
        self._row = ""  # the unfinished one, as it was drawn
        self._status_rows = ""  # as they were drawn
        self._has_gap = True  # the last finished row is blank
        self._label = ""
        self._label_since = 0.0
        self._limit = math.inf
        self._last_data = 0.0
        self._rows_above: tuple[str, ...] = ()  # above the label
        self._typed_text = ""
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

        if not self.live or not self.markdown:
            return PlainText(paint)
        from coder.cli.markdown import Markdown

        return Markdown(paint)

    def finish_line(self) -> None:
        """End the unfinished row."""
        finished = f"{self._row}\n" if self._row else ""
        if self._rows:
            finished = self._rows.feed(self._sanitizer.flush(), self.width)
            finished += self._rows.finish()
            self._rows = None
        if finished:
            self._draw(finished, "")

    def line(self, text: str = "", style: str = "", head: str = "") -> None:
        """Append a line, broken between words if the terminal is too narrow; further rows hang
        after `head`."""
        indent = cell_count(head)
        text = strip_controls(text)
        if self.live:
            text = wrap(text, max(10, min(self.width, PROSE) - indent))
            text = text.replace("\n", "\n" + " " * indent)
        self.exact_line((head + text, style))

    def gap(self) -> None:
        """Append a blank row, unless there is one."""
        self.finish_line()
        if not self._has_gap:
            self.line()

    def entry(self, text: str) -> None:
        """Append what the user entered, set off as at the prompt."""
        self.line(text.strip(), "bold", "❯ ")

    def exact_line(self, *parts: Part) -> None:
        """Append a line of parts, broken only by the terminal."""
        self.finish_line()
        self._draw(f"{self._style_parts(parts)}\n", "")

    def draft(self, *parts: Part) -> None:
        """On a terminal, show a line that further drafts replace, until something else follows."""
        if self._rows:
            self.finish_line()
        self._draw("", self._style_parts(parts))

    def _style_parts(self, parts: Iterable[Part]) -> str:
        return "".join(self._style(strip_controls(text), style) for text, style in parts)

    def _style(self, text: str, style: str) -> str:
        """The text with the words of a style, such as "bold red"; NO_COLOR leaves out colours."""
        if not style or not self.styled or not text.strip():
            return text
        codes = [self._codes[word] for word in style.split() if word in self._codes]
        return f"\x1b[{';'.join(codes)}m{text}\x1b[0m" if codes else text

    def notify(self, text: str) -> None:
        """Ring the bell, and show a notification on a terminal that can do so (OSC 9)."""
        if self.live:
            self.stream.write(f"\x1b]9;coder: {one_line(text, 80)}\x07\x07")
            self.stream.flush()

    # -- the status rows

    def status(
        self, label: str = "", limit: float = math.inf, *above: str, since: float = 0.0
    ) -> None:
        """Data has come just now. Show `label` below the output, with the seconds since there was
        no label, or since `since`, and the rows `above` it.

        After `limit` seconds without another call the program gives up: they are counted on the
        screen from STALL on, also without a label.
        """
        with self._lock:
            self._last_data = self.clock()
            if since or not self._label:
                self._label_since = since or self._last_data
            self._label = label
            self._limit = limit
            self._rows_above = above
            if not self._is_waiting:
                self._draw("", self._row)
            elif self.live and self._ticker is None:
                self._ticker = threading.Thread(target=self._tick, daemon=True)
                self._ticker.start()

    def show_typed(self, text: str) -> None:
        """Show in the status row what the user types."""
        with self._lock:
            self._typed_text = re.sub(r"\s", " ", strip_controls(text))
            self._draw("", self._row)

    @property
    def _is_waiting(self) -> bool:
        return bool(self._label) or self._limit < math.inf

    def _tick(self) -> None:
        while True:
            time.sleep(FRAME)
            with self._lock, contextlib.suppress(ValueError):  # the stream may be closed
                if not self._is_waiting:
                    self._ticker = None
                    return
                self._draw("", self._row)

    def _status(self, now: float) -> str:
        """The status rows as they should be now; "" for none."""
        if not self.live or not self._is_waiting:
            return ""
        columns = self.width - 1
        typed = end_of_line(self._typed_text, columns * 2 // 3 if self._label else columns)
        room = columns - cell_count(typed) - 1
        waiting = self._waiting(now, room) if room >= MIN_STATUS else ""
        if not waiting:
            return typed
        hint = f" · {self.stop_key} stops"
        if typed:
            waiting += f" {typed}"
        elif cell_count(waiting + hint) <= room:
            waiting += hint
        most_above = max(0, shutil.get_terminal_size().lines - 2)  # the unfinished row stays, too
        rows = [one_line(row, columns) for row in self._rows_above[:most_above]]
        return "\r\n".join([*rows, waiting])

    def _waiting(self, now: float, room: int) -> str:
        """What is being waited for, and for how long; "" as long as that is not worth a word."""
        waited = now - self._label_since
        silent = now - self._last_data
        seconds = f" {waited:.0f}s" if waited >= 1 else ""
        if silent >= STALL and self._limit < math.inf:
            seconds = f" no data for {silent:.0f}s of {self._limit:g}s"
        elif not self._rows_above and (not self._label or waited < 2 * FRAME):
            return ""
        frame = SPINNER[int(now / FRAME) % len(SPINNER)]
        label = one_line(f"{frame} {self._label}", room - len(seconds))
        return one_line(label + seconds, room)

    # -- drawing

    def _draw(self, finished: str, row: str) -> None:
        """Write finished rows, and the unfinished row and the status below them, in one write.

        `finished` begins with the old unfinished row. Only the part that differs is written again.
        """
        with self._lock:
            text = finished + row
            status = self._status(self.clock())
            if text == self._row and status == self._status_rows:
                return
            if finished:
                self._has_gap = f"\n{finished}".endswith("\n\n")
            if not self._status_rows and text.startswith(self._row):
                changed = text[len(self._row) :]
            else:
                drawn = [rows for rows in (self._row, self._status_rows) if rows]
                changed = erasure("\n".join(drawn)) + text
            if status and row:
                changed += "\r\n"
            changed += self._style(status, "dim")
            self._row = row
            self._status_rows = status
            self.stream.write(changed)
            self.stream.flush()
