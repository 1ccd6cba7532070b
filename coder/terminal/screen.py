"""The screen: whatever is put on it goes through the sanitiser (text.py) here, whoever wrote it, so that no caller can forget
it; one line at the bottom tells what is going on.

Output is appended and never repainted, but for that one line. What it leaves out: what is worth showing (render.py).
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
from typing import TYPE_CHECKING, Literal, TextIO

from coder.text import Cleaner
from coder.text import clean as clean

if TYPE_CHECKING:
    from rich.console import Console

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
FRAME = 0.1  # seconds
STALL = 5.0  # seconds without data from which they are counted on the screen


@contextlib.contextmanager
def _there() -> Iterator[None]:
    """A terminal that is gone takes nothing, and is no error: the signal that says so is on its way."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise


def one_line(text: str, width: int, indent: str = "") -> str:
    """Cleaned, white space folded, cut to `width` columns with an ellipsis; `indent` goes in front."""
    line, width = indent + " ".join(clean(text[:4 * width + 100]).split()), max(10, width)
    if line.isascii():  # a column each, and no need of rich
        return line if len(line) <= width else f"{line[:width - 1]}…"
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
        self.colours = stream.isatty() or any(map(os.environ.get, ("FORCE_COLOR", "TTY_COMPATIBLE")))
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
        self._painted: Literal["", "line", "behind"] = ""  # where the status is
        self._ticker: threading.Thread | None = None

    @property
    def width(self) -> int:
        return shutil.get_terminal_size().columns

    def rows(self, text: str) -> int:
        """How many rows a line of text takes."""
        return max(1, -(-_columns(clean(text), 0) // self.width))

    @cached_property
    def console(self) -> Console:
        """rich on our stream: it knows the terminal's colours, NO_COLOR and FORCE_COLOR. Made late, the import is slow."""
        from rich.console import Console

        class Plain(Console):
            def on_broken_pipe(self) -> None:
                """Called while the error is handled: rich itself would end the program here."""
                raise

        return Plain(file=self.stream, highlight=False, markup=False, emoji=False, soft_wrap=True)

    # -- appending

    def write(self, text: str) -> None:
        """Append a text, whoever wrote it."""
        self.print(text, "")

    def _append(self, text: str, stream: TextIO | None = None) -> None:
        """Append text that is clean."""
        if not text:
            return
        with self._lock:
            self._wipe()
            self._newest = stream or self.stream
            with _there():
                self._newest.write(text)
                self._newest.flush()
            self._moved(text)
            if self._beside and self.label:
                self._paint(time.monotonic())

    def _moved(self, text: str) -> None:
        self.at_start = text.endswith("\n")
        self._line = text.rpartition("\n")[2] if "\n" in text else self._line + text

    def answer(self, text: str) -> None:
        """Append text of the model's answer, with words kept whole at the edge of a terminal."""
        self._styled(self._thought.rest(), "dim")
        self._append(self._answer.add(text, self.width if self.answers.isatty() else 0), self.answers)

    def thought(self, text: str) -> None:
        """Append text of the model's reasoning: dim, beside our own words."""
        self._append(self._answer.rest(), self.answers)
        self._styled(self._thought.add(text, self.width if self.live else 0), "dim")

    def _end_flows(self) -> None:
        """What either of them held back comes before what follows."""
        self._append(self._answer.rest(), self.answers)
        self._styled(self._thought.rest(), "dim")

    def finish_line(self) -> None:
        """End a line that is under way, on the stream that it is on."""
        self._end_flows()
        if not self.at_start:
            self._append("\n", self._newest)

    def line(self, text: str = "", style: str = "") -> None:
        """Append a line of its own."""
        self.finish_line()
        self.print(text + "\n", style)

    def print(self, text: str, style: str) -> None:
        """Append a text, whoever wrote it, in a style such as "bold red"."""
        self._end_flows()
        self._styled(clean(text), style)

    def _styled(self, text: str, style: str) -> None:
        """Append text that is clean, in a style."""
        if not (style and text and self.colours):
            self._append(text)
            return
        from rich.text import Text

        with self._lock:
            self._wipe()
            self._newest = self.stream
            with _there():
                self.console.print(Text(text, style), end="")
            self._moved(text)

    # -- the status line

    def status(self, label: str, limit: float = math.inf, *, only_stalls: bool = False) -> None:
        """Show `label` with a spinner and the seconds below the output, from now on; "" ends it.

        After `limit` seconds without another call something is given up: from STALL on, these are counted as well.
        `only_stalls`: nothing is shown before that, and then behind a line that is under way, too.
        """
        with self._lock:
            self._heard = time.monotonic()
            if label and (not self.label or only_stalls != self._only_stalls):
                self._since = self._heard
            self.label, self._limit, self._only_stalls = label, limit, only_stalls
            if not label or self._painted == "behind":
                self._wipe()
        if label and self.live and self._ticker is None:
            self._ticker = threading.Thread(target=self._tick, daemon=True)
            self._ticker.start()

    def beside(self, text: str) -> None:
        """Show this in the status line, and behind a line that is under way; its end, where there is too little room."""
        with self._lock:
            if text == self._beside:
                return
            self._beside = text
            if self._painted:
                self._wipe()
            if self.live and self.label:
                self._paint(time.monotonic())

    def title(self, text: str) -> None:
        """What the window is called, "" for nothing of ours."""
        if self.live and text != self._title:
            with self._lock:
                self._title = text
                with _there():
                    self.stream.write(f"\x1b]0;{one_line(text, 60) if text else ''}\x07")
                    self.stream.flush()

    def restart_clock(self) -> None:
        self._since = self._heard = time.monotonic()

    def _tick(self) -> None:
        while True:
            time.sleep(FRAME)
            with self._lock:
                if not self.label:
                    self._ticker = None
                    return
                now = time.monotonic()
                if self._beside or self._shows(now):
                    self._paint(now)

    def _shows(self, now: float) -> bool:
        """Is it time to show what is waited for?"""
        return now - self._heard > STALL if self._only_stalls else now - self._since > 2 * FRAME

    def _paint(self, now: float) -> None:
        from rich.cells import cell_len
        from rich.text import Text

        column = cell_len(self._line) % self.width
        room = self.width - column - 2
        behind = self._only_stalls or self._beside
        if not self.at_start and (not behind or room < 12 or not column or "\t" in self._line):
            return  # nothing is painted where it could break the line
        typed = _end_of(clean(self._beside), room if self._only_stalls else room * 2 // 3)
        taken = cell_len(typed) + 1 if typed else 0
        text = " ".join(filter(None, [self._waited_for(now, room - taken) if self._shows(now) else "", typed]))
        with contextlib.suppress(OSError, ValueError):
            self.stream.write("\r\x1b[K" if self.at_start else "\x1b7 ")
            self.console.print(Text(text, "dim"), end="")
            self.stream.write("" if self.at_start else "\x1b8")
            self.stream.flush()
            self._painted = "line" if self.at_start else "behind"

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
            return f" · no data for {silent:.0f}s of {self._limit:g}s", f" {silent:.0f}/{self._limit:g}s"
        seconds = f" {waited:.0f}s" if waited >= 1 else ""
        return seconds, seconds

    def _wipe(self) -> None:
        if self._painted:
            painted, self._painted = self._painted, ""
            with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
                self.stream.write("\r\x1b[K" if painted == "line" else "\x1b[K")
                self.stream.flush()


def _columns(text: str, start: int) -> int:
    """How many columns a text takes that begins in column `start`; a tab goes to the next eighth one."""
    from rich.cells import cell_len

    first, *others = text.split("\t")
    end = start + cell_len(first)
    for each in others:
        end = (end // 8 + 1) * 8 + cell_len(each)
    return end - start


def _end_of(text: str, room: int) -> str:
    """The text, or its end behind an ellipsis where it is wider than `room` columns."""
    from rich.cells import cell_len

    if cell_len(text) <= room:
        return text
    while text and cell_len(text) > room - 1:
        text = text[max(1, (cell_len(text) - room) // 2):]
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
    """Breaks prose between words while it comes: a word is held back until it is whole. Code in fences is left as it is."""

    # after white space, and after a character of a script that has no spaces
    BETWEEN = re.compile("(?<=[ \n\u3000-\u9fff\uac00-\ud7af\uff00-\uffef])")
    LONGEST = 60  # characters that are held back

    def __init__(self) -> None:
        self.width = 80
        self.in_code = False
        self._begin()

    def _begin(self) -> None:
        self.word = ""
        self.column = 0
        self.blank = True  # nothing but space in this line so far
        self.inside = False  # what was written last is the beginning of a word

    def add(self, text: str, width: int) -> str:
        """What can be written by now."""
        self.width = width
        *words, self.word = self.BETWEEN.split(self.word + text)
        if len(self.word) > self.LONGEST:
            words, self.word = [*words, self.word], ""
        return "".join(map(self._placed, words))

    def rest(self) -> str:
        """The word that is held back; the text ends here."""
        word = self._placed(self.word)
        self._begin()
        self.in_code = False
        return word

    def _placed(self, word: str) -> str:
        bare = word.rstrip(" \n")
        size = _columns(bare, self.column)
        if self.blank and bare.startswith(("```", "~~~")):
            self.in_code = not self.in_code
        breaks = bool(bare and self.column) and self.column + size > self.width and not (self.in_code or self.inside)
        self.column = (0 if breaks else self.column) + size + word.count(" ")
        self.blank, self.inside = self.blank and not bare, bool(word) and word == bare and not self.BETWEEN.search(word[-1])
        if word.endswith("\n"):
            self.column, self.blank, self.inside = 0, True, False
        return f"\n{word}" if breaks else word
