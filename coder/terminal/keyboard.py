"""The keyboard: lines through readline, and keys that come while nobody reads them.

What is typed is never lost and never tears the output: keys that came before a question stand at the next prompt.
What it leaves out: keys during a run (typeahead.py), what a line means (repl.py).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from coder.terminal.interrupts import leaving, woken
from coder.terminal.modes import attributes, local_modes
from coder.terminal.private import own_folder
from coder.text import clean

PROMPT, MORE = "> ", ". "
AGAIN = 2.0  # seconds within which a second Ctrl+C on an empty line leaves
QUIET = 0.3  # seconds without a key before a question takes an answer: who types does not yet see it
MOST_PENDING = 1 << 16  # bytes of keys before a question that are kept for the next prompt
BOTH = 1.0  # seconds within which a Ctrl+C after one that stopped a run leaves
MAX_HISTORY = 1000


class Leave(Exception):
    """Leave the session with this exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Keyboard:
    """Lines from the terminal. `history` is a file; `waiting` is called before a prompt is drawn.

    `stopped_run` tells when Ctrl+C last stopped a run (monotonic seconds).
    """

    def __init__(self, history: Path, waiting: Callable[[], None]) -> None:
        self.history = history
        self.waiting = waiting
        self.stopped_run: Callable[[], float] = lambda: -100.0
        self.paused: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext  # whoever else reads keys waits
        self.early = ""  # keys that came before a question was asked; they belong to the next prompt
        self.redact: Callable[[str], str] = str  # of what is saved
        self.given_up = False  # the newest question, by Ctrl+C or Ctrl+D
        self.hinted = -100.0  # when a Ctrl+C at the prompt said what a second one does
        self.readline = _readline(history)

    def entries(self) -> Iterator[str]:
        """What the person enters, one entry after the other, until Ctrl+D. Raises Leave."""
        while True:
            try:
                yield self._entry(PROMPT, MORE)
            except KeyboardInterrupt:
                continue  # the entry is given up
            except EOFError:
                sys.stdout.write("\n")
                return

    def _entry(self, prompt: str, more: str) -> str:
        """A line, or several, between triple quotes or with a backslash at the end of each but the last."""
        text = self.line(prompt)
        while text.endswith("\\") and not text.lstrip().startswith('"""'):
            text = text[:-1] + "\n" + self.line(more)
        if text.lstrip().startswith('"""'):
            text = text.lstrip()[3:]
            while not text.rstrip().endswith('"""'):
                text += "\n" + self.line(more)
            text = text.rstrip()[:-3]
        return text.strip()

    def line(self, prompt: str) -> str:
        """One line. Raises EOFError at Ctrl+D, KeyboardInterrupt at Ctrl+C, Leave at a Ctrl+C that is the second."""
        early = clean(self.early)

        def pressed(number: int, frame: FrameType | None) -> None:
            if frame and frame.f_code is drawn.__code__:
                return  # readline drops what is raised there; it came before the line was on the screen
            self._interrupted()
            raise KeyboardInterrupt

        def drawn() -> None:
            try:
                self.readline.insert_text(early)  # type: ignore[union-attr]
            except UnicodeEncodeError:  # the C locale
                self.readline.insert_text(early.encode("ascii", "replace").decode())  # type: ignore[union-attr]
            self.readline.redisplay()  # type: ignore[union-attr]
            self.early = ""  # only now: a Ctrl+C that came before loses nothing

        if self.readline:
            self.readline.set_pre_input_hook(drawn if self.early else None)
        self.waiting()
        with _handling(pressed), woken():
            return input(prompt)

    def _interrupted(self) -> None:
        """Ctrl+C at the prompt clears what is typed; on an empty line, twice leaves."""
        now = time.monotonic()
        typed = self.readline and self.readline.get_line_buffer()
        sys.stdout.write("\n")
        if typed:
            return
        if now - self.hinted < AGAIN or now - self.stopped_run() < BOTH:
            leaving(130)
            raise Leave(130)
        self.hinted = now
        sys.stdout.write("(Ctrl+C again leaves, so does Ctrl+D)\n")

    def answer(self, prompt: str) -> str:
        """A line typed after the question was on the screen, and QUIET seconds without a key; "" at Ctrl+D. Ctrl+C stops the run, too."""
        with self.paused():
            return self._answer(prompt)

    def _answer(self, prompt: str) -> str:
        stop_run = signal.getsignal(signal.SIGINT)

        def pressed(number: int, frame: FrameType | None) -> None:
            if callable(stop_run):
                stop_run(number, frame)
            raise KeyboardInterrupt

        if self.readline:
            self.readline.set_pre_input_hook(None)
        self.given_up = False
        try:
            with _handling(pressed), local_modes(on="ECHO"):
                self.early += _pending()
                text = input(prompt).strip()
        except (EOFError, KeyboardInterrupt):
            self.given_up = True
            sys.stdout.write("\n")
            return ""
        if self.readline and text:
            self.readline.remove_history_item(self.readline.get_current_history_length() - 1)
        return text

    def remember(self, lines: list[str]) -> None:
        """Put into the history what was entered elsewhere."""
        for line in lines if self.readline else ():
            self.readline.add_history(line)  # type: ignore[union-attr]

    def close(self) -> None:
        """Save the history, privately; no reason to fail where the home is read-only."""
        if self.readline is None:
            return
        with contextlib.suppress(OSError):
            own_folder(self.history.parent)
            os.close(os.open(self.history, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
            for place in range(self.readline.get_current_history_length()):
                self.readline.replace_history_item(place, self.redact(self.readline.get_history_item(place + 1)))
            self.readline.write_history_file(self.history)


def _readline(history: Path) -> ModuleType | None:
    """The readline module with our history in it, where there is one."""
    try:
        import readline
    except ImportError:
        return None
    with contextlib.suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(MAX_HISTORY)
    return readline


@contextlib.contextmanager
def _handling(pressed: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, pressed)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def silent_keys() -> Iterator[None]:
    """While inside, keys are kept by the terminal for the next prompt, but not shown; also when Ctrl+C is among them."""
    with local_modes(on="NOFLSH", off="ECHO"):
        yield


def _pending() -> str:
    """What was typed and not read yet, until no key has come for QUIET seconds, taken out of the terminal: it must not answer a
    question that it came before."""
    if attributes() is None:
        return ""
    data = b""
    with local_modes(on="NOFLSH", off="ICANON ECHO"):
        fd = sys.stdin.fileno()
        while select.select([fd], [], [], QUIET)[0] and (piece := os.read(fd, 4096)):
            data += piece[:MOST_PENDING - len(data)]  # all of them are taken out: what stays would be the answer
    text = data.decode("utf-8", "replace").replace("\r", " ").replace("\n", " ")
    return "".join(c for c in clean(text) if c.isprintable())
