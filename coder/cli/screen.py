"""The screen: whatever is put on it goes through the sanitiser (text.py) here, whoever wrote it, so that no caller can forget
it; one line at the bottom tells what is going on.

Output is appended and never repainted, but for that one line.
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
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, TextIO

from coder.providers.text import Cleaner
from coder.providers.text import clean as clean

if TYPE_CHECKING:
    from rich.console import Console

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
FRAME = 0.1  # seconds
NO_TERMINAL = 200  # columns of a stream that is none: a file or a log
STALL = 5.0  # seconds without data from which they are counted on the screen


@contextlib.contextmanager
def _there() -> Iterator[None]:
    """A terminal that is gone takes nothing, and is no error: the signal that says so is on its way."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise


def _columns(stream: TextIO) -> int:
    return shutil.get_terminal_size().columns if stream.isatty() else NO_TERMINAL


def one_line(text: str, width: int) -> str:
    """Cleaned, lines joined, cut to `width` columns with an ellipsis; other white space stays as it is."""
    line, width = (
        re.sub(r" *\n\s*", " ", clean(text[: 4 * width + 100]).expandtabs(4)).rstrip(),
        max(10, width),
    )
    if line.isascii():  # a column each, and no need of rich
        return line if len(line) <= width else f"{line[: width - 1]}…"
    from rich.text import Text

    measured = Text(line)
    measured.truncate(width, overflow="ellipsis")
    return measured.plain


class Screen:
    """Appends to a stream, in colour where it takes it, with a status line below while somebody waits.

    `answers`: the stream of the model's text, where it is another one (stdout beside stderr). A stream that is no
    terminal, or a dumb one, is never repainted.
    """

    def __init__(self, stream: TextIO, answers: TextIO | None = None) -> None:
        self.stream = stream
        self.answers = answers or stream
        self.live = stream.isatty() and os.environ.get("TERM") != "dumb"
        # Where rich would write no style it is not loaded, which takes 60 ms: these two variables are those that it looks at.
        self.colours = stream.isatty() or any(
            map(os.environ.get, ("FORCE_COLOR", "TTY_COMPATIBLE"))
        )
        self.at_start = True  # of a line
        self._newest = stream
        self._answer = Flow()
        self._thought = Flow()
        self._lock = threading.RLock()
        self.label = ""  # of the status line
        self._title = ""  # of the window
        self._beside = ""  # what is typed, and waits
        self._since = 0.0
        self._limit = math.inf
        self._heard = 0.0  # when data came last
        self._only_stalls = False
        self._line = ""  # what is written of the line that is under way
        self._painted = ""  # the status, as it stands on a row of its own
        self._ticker: threading.Thread | None = None

    @property
    def width(self) -> int:
        return _columns(self.stream)

    def rows(self, text: str) -> int:
        """How many rows a line of text takes."""
        return max(1, -(-_cells(clean(text).expandtabs()) // self.width))

    @cached_property
    def console(self) -> Console:
        """rich on our stream: it knows the terminal's colours, NO_COLOR and FORCE_COLOR. Made late, the import is slow."""
        from rich.console import Console

        return Console(file=self.stream, highlight=False, markup=False, emoji=False, soft_wrap=True)

    # -- appending

    def write(self, text: str) -> None:
        """Append a text, whoever wrote it."""
        self.print(text, "")

    def _append(self, text: str, stream: TextIO | None = None, style: str = "") -> None:
        """Append text that is clean; the status, which is below it, goes and comes in the same write, so that it is seen all the time."""
        if not text:
            return
        stream = stream or self.stream
        with self._lock:
            apart = stream is not self.stream
            before = self._wiped()
            if apart:
                self._send(before)
            self._newest = stream
            self.at_start = text.endswith("\n")
            self._line = text.rpartition("\n")[2] if "\n" in text else self._line + text
            after = self._painting(time.monotonic()) if self.label and self._beside else ""
            self._send(
                self._styled(text, style) if apart else before + self._styled(text, style) + after,
                stream,
            )
            if apart:
                self._send(after)

    def _send(self, text: str, stream: TextIO | None = None) -> None:
        stream = stream or self.stream
        if text:
            with _there():
                stream.write(text)
                stream.flush()

    def _styled(self, text: str, style: str) -> str:
        """With the terminal's sequences for a style, if it takes any."""
        if not (style and self.colours):
            return text
        from rich.text import Text

        with self.console.capture() as capture:
            self.console.print(Text(text, style), end="")
        return capture.get()

    def answer(self, text: str) -> None:
        """Append text of the model's answer, with words kept whole at the edge of a terminal."""
        self._append(self._thought.rest(), style="dim")
        self._append(
            self._answer.add(text, _columns(self.answers) if self.answers.isatty() else 0),
            self.answers,
        )

    def thought(self, text: str) -> None:
        """Append text of the model's reasoning: dim, beside our own words."""
        self._append(self._answer.rest(), self.answers)
        self._append(self._thought.add(text, self.width if self.live else 0), style="dim")

    def _end_flows(self) -> None:
        """What either of them held back comes before what follows."""
        self._append(self._answer.rest(), self.answers)
        self._append(self._thought.rest(), style="dim")

    def finish_line(self) -> None:
        """End a line that is under way, on the stream that it is on."""
        self._end_flows()
        if not self.at_start:
            self._append("\n", self._newest)

    def line(self, text: str = "", style: str = "") -> None:
        """Append a line of its own, broken between words where the terminal is too narrow for it."""
        text, wrap = clean(text), Wrap()
        self.exactly(wrap.add(text, self.width) + wrap.rest() if self.live else text, style)

    def listed(self, head: str, text: str) -> None:
        """Append a line of its own: `head`, and behind it the text, with a hanging indent."""
        wrap, column = Wrap(), _cells(head)
        text = wrap.add(clean(text), max(10, self.width - column)) + wrap.rest()
        self.exactly(head + text.replace("\n", "\n" + " " * column))

    def exactly(self, text: str, style: str = "") -> None:
        """Append a line of its own, broken only by the terminal: what a person decides on."""
        self.finish_line()
        self.print(text + "\n", style)

    def print(self, text: str, style: str) -> None:
        """Append a text, whoever wrote it, in a style such as "bold red"."""
        self._end_flows()
        self._append(clean(text), style=style)

    # -- the status line

    def status(self, label: str, limit: float = math.inf, *, only_stalls: bool = False) -> None:
        """Show `label` with a spinner and the seconds below the output, from now on; "" ends it.

        After `limit` seconds without another call something is given up: from STALL on, these are counted as well.
        `only_stalls`: nothing is shown before that.
        """
        with self._lock:
            self._heard = time.monotonic()
            if label and (not self.label or only_stalls != self._only_stalls):
                self._since = self._heard
            self.label, self._limit, self._only_stalls = label, limit, only_stalls
            if not label:
                self._send(self._wiped())
            elif self._beside:
                self._paint()
        if label and self.live and self._ticker is None:
            self._ticker = threading.Thread(target=self._tick, daemon=True)
            self._ticker.start()

    def beside(self, text: str) -> None:
        """Show this in the status line from now on; its end, where there is too little room."""
        with self._lock:
            self._beside = text
            if self.label:
                self._paint()

    def title(self, text: str) -> None:
        """What the window is called, "" for nothing of ours."""
        if self.live and text != self._title:
            with self._lock:
                self._title = text
                self._send(f"\x1b]0;{one_line(text, 60) if text else ''}\x07")

    def restart_clock(self) -> None:
        self._since = self._heard = time.monotonic()

    def _tick(self) -> None:
        while True:
            time.sleep(FRAME)
            with self._lock:
                if not self.label:
                    self._ticker = None
                    return
                self._paint()

    def _shows(self, now: float) -> bool:
        """Is it time to show what is waited for?"""
        return now - self._heard > STALL if self._only_stalls else now - self._since > 2 * FRAME

    def _paint(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
            self._send(self._painting(time.monotonic()))

    def _painting(self, now: float) -> str:
        """What puts the status, as it is now, on its row; nothing where it is there already."""
        if not self.live:
            return ""
        room = self.width - 1
        typed = end_of(clean(self._beside), room if self._only_stalls else room * 2 // 3)
        taken = _cells(typed) + 1 if typed else 0
        text = " ".join(
            filter(None, [self._waited_for(now, room - taken) if self._shows(now) else "", typed])
        )
        if text == self._painted:
            return ""
        self._painted = text
        return self._on_own_row(f"\x1b[2m{text}\x1b[0m" if text else "")

    def _wiped(self) -> str:
        """What takes the status away."""
        painted, self._painted = self._painted, ""
        return self._on_own_row("") if painted else ""

    def _on_own_row(self, text: str) -> str:
        """What writes a text on the row below a line that is under way, which goes on then; or where the next line begins."""
        if self.at_start:
            return f"\r\x1b[K{text}"
        column = _column(self._line, 0, self.width)
        # Written again: only so the terminal knows that the row is full
        last = self._line[-1] if column == self.width else ""
        right = f"\x1b[{column - _cells(last)}C" if column > _cells(last) else ""
        return f"\r\n\x1b[K{text}\x1b[A\r{right}{last}"

    def _waited_for(self, now: float, room: int) -> str:
        """The label with its spinner and the seconds; nothing where there is no room for it."""
        if room < 10:
            return ""
        spinner = SPINNER[int(now / FRAME) % len(SPINNER)]
        long, short = self._seconds(now)
        seconds = long if len(long) + 12 < room else short
        return one_line(one_line(f"{spinner} {self.label}", room - len(seconds)) + seconds, room)

    def _seconds(self, now: float) -> tuple[str, str]:
        """How long it has taken: with what is counted as silence, and in short."""
        waited, silent = now - self._since, now - self._heard
        if silent >= STALL and self._limit < math.inf:
            return (
                f" · no data for {silent:.0f}s of {self._limit:g}s",
                f" {silent:.0f}/{self._limit:g}s",
            )
        seconds = f" {waited:.0f}s" if waited >= 1 else ""
        return seconds, seconds


def _cells(text: str) -> int:
    """How many columns a text takes."""
    if text.isascii():  # a column each, and no need of rich
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _column(text: str, start: int, width: int) -> int:
    """The column behind a text that begins in column `start`, where the terminal breaks it; `width` where the row is full."""
    if text.isascii():
        end = start + len(text)
        return (end - 1) % width + 1 if end else 0
    for c in text:
        start = start + size if start + (size := _cells(c)) <= width else size
    return start


def end_of(text: str, room: int) -> str:
    """The text, or its end behind an ellipsis where it is wider than `room` columns."""
    if _cells(text) <= room:
        return text
    while text and _cells(text) > room - 1:
        text = text[max(1, (_cells(text) - room) // 2) :]
    return f"…{text}"


class Flow:
    """Text that streams: cleaned across the borders of its pieces, and wrapped between words where it has a width."""

    def __init__(self) -> None:
        self._cleaner = Cleaner()
        self._wrap = Wrap()
        self._width = 0

    def add(self, text: str, width: int) -> str:
        """What can be written by now; `width` 0 is no terminal, and breaks no lines."""
        self._width, text = width, self._cleaner.feed(text)
        return self._wrap.add(text, width) if width else text

    def rest(self) -> str:
        """What is held back; the text ends here."""
        held = self._cleaner.end()
        return self._wrap.add(held, self._width) + self._wrap.rest() if self._width else held


class Wrap:
    """Breaks prose between words while it comes; code in fences is left as it is. Tabs become blanks.

    A word is held back until it is whole, and blanks until what follows them: those that do not fit would take a row of their own.
    """

    WIDE = "\u3001-\u9fff\uac00-\ud7af\uff00-\uffef"  # scripts without blanks: each character is a word
    TOKEN = re.compile(f"\n|[ \t\u3000]+|[{WIDE}]|[^ \t\n\u3000{WIDE}]+")
    WHOLE = re.compile(f"[\n{WIDE}]")

    def __init__(self) -> None:
        self.width = 80
        self._begin()

    def _begin(self) -> None:
        self.token, self.blanks = "", ""  # held back: what may go on, and what stands before it
        self.column = 0
        self.first = True  # no word in this line so far
        self.inside = False  # what was written last is the beginning of a word
        self.in_code = False

    def add(self, text: str, width: int) -> str:
        """What can be written by now."""
        self.width = width
        tokens, self.token = self.TOKEN.findall(self.token + text), ""
        begun = bool(tokens) and not self.WHOLE.match(tokens[-1])
        if begun and (len(tokens[-1]) <= width or not tokens[-1].strip()):
            self.token, begun = tokens.pop(), False
        written = "".join(map(self._placed, tokens))
        self.inside = begun or (self.inside and not tokens)
        return written

    def rest(self) -> str:
        """What is held back; the text ends here."""
        written = self._placed(self.token) + self._fitting()
        self._begin()
        return written

    def _placed(self, token: str) -> str:
        if token == "\n":
            written, self.column, self.first, self.inside = f"{self._fitting()}\n", 0, True, False
            return written
        if not token.strip(" \t\u3000"):
            for blank in token:
                tab = 8 - (self.column + _cells(self.blanks)) % 8
                self.blanks += " " * tab if blank == "\t" else blank
            self.inside = False
            return ""
        if self.first and token.startswith(("```", "~~~")):
            self.in_code = not self.in_code
        if self.column + _cells(self.blanks + token) > self.width and not (
            self.in_code or self.inside
        ):
            written, self.column = (
                ("\n" if self.column else "") + token,
                _column(token, 0, self.width),
            )
        else:
            written = self.blanks + token
            self.column = _column(written, self.column, self.width)
        self.blanks, self.first, self.inside = "", False, False
        return written

    def _fitting(self) -> str:
        """Blanks at the end of a line, where they fit."""
        blanks, self.blanks = self.blanks, ""
        return blanks if self.column + _cells(blanks) <= self.width else ""
