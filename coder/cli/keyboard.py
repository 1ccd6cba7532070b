"""The keyboard: lines through readline, and keys that come while nobody reads them.

What is typed is never lost and never tears the output: keys that came before a question stand at the next prompt.
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

from coder.cli.private import own_folder
from coder.cli.signals import leaving, woken
from coder.cli.terminal_modes import local_modes
from coder.providers.text import clean

PROMPT, MORE = "> ", ". "
AGAIN = 2.0  # seconds within which a second Ctrl+C on an empty line leaves
QUIET = (
    0.3  # seconds without a key before a question takes an answer: who types does not yet see it
)
AT_ONCE = 0.03  # seconds without a key behind Enter: what comes before was pasted, or typed before the prompt
MOST_PENDING = 1 << 16  # bytes of keys before a question that are kept for the next prompt
BOTH = 1.0  # seconds within which a Ctrl+C after one that stopped a run leaves
MAX_HISTORY = 1000
NEWLINE = "\x1e"  # in the history's file, in which a newline would begin another entry
EXITS = ("/exit", "/quit", "/q", "exit", "quit")


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
        # Whoever else reads keys waits
        self.paused: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self.early: list[str] = []  # what stands at the next prompts, one text at each
        self.redact: Callable[[str], str] = str  # of what is saved
        self.given_up = False  # the newest question, by Ctrl+C, Ctrl+D or /exit
        self.leaves = False  # /exit was the answer to a question
        self.hinted = -100.0  # when a Ctrl+C at the prompt said what a second one does
        self.readline = _readline(history)

    def entries(self) -> Iterator[str]:
        """What the person enters, one entry after the other, until Ctrl+D. Raises Leave."""
        while not self.leaves:
            try:
                yield self._entry()
            except KeyboardInterrupt:
                continue  # the entry is given up
            except EOFError:
                sys.stdout.write("\n")
                return

    def _entry(self) -> str:
        """What is entered, as one item of the history: its lines alone may be commands."""
        text, readline = "", self.readline
        begun = readline.get_current_history_length() if readline else 0
        try:
            text = self._text(PROMPT, MORE)
        finally:
            while readline and (newest := readline.get_current_history_length()) > begun:
                readline.remove_history_item(newest - 1)
            self.remember([text] if text else [])
        return text

    def _text(self, prompt: str, more: str) -> str:
        """A line or a pasted block; or several lines, between triple quotes or with a backslash at the end of each but the last."""
        text = self._block(prompt, self.early).rstrip()
        if "\n" in text:  # pasted: no mark in it means anything
            return text
        while text.endswith("\\") and not text.lstrip().startswith('"""'):
            text = text[:-1] + "\n" + self._block(more)
        if text.lstrip().startswith('"""'):
            text = text.lstrip()[3:]
            while not text.rstrip().endswith('"""'):
                text += "\n" + self._block(more)
            text = text.rstrip()[:-3]
        return text.strip()

    def _block(self, prompt: str, early: list[str] | None = None) -> str:
        """A line, and what was there already when Enter came: a paste, where the terminal does not mark one. Its last line, which no
        Enter has ended, stands at a prompt of its own."""
        text = self.line(prompt, early or [])
        while waiting := self._at_once():
            *lines, rest = waiting.split("\n")
            sys.stdout.write("".join(f"{MORE}{line}\n" for line in lines))
            text = "\n".join([text, *lines, *([self.line(MORE, [rest])] if rest else [])])
        return text

    def _at_once(self) -> str:
        try:
            return waiting_keys(AT_ONCE)
        except KeyboardInterrupt:
            sys.stdout.write("\n")  # behind the ^C
            raise

    def line(self, prompt: str, early: list[str]) -> str:
        """One line; the first of `early` stands in it, and is taken. Raises EOFError at Ctrl+D, KeyboardInterrupt at Ctrl+C,
        Leave at a Ctrl+C that is the second."""
        typed = clean(early[0]) if early else ""
        late: list[int] = []  # Ctrl+C while readline calls `drawn`, where it drops what is raised

        def pressed(number: int, frame: FrameType | None) -> None:
            if frame and frame.f_code is drawn.__code__:
                late.append(number)
                return
            self._interrupted()
            raise KeyboardInterrupt

        def look(number: int, frame: FrameType | None) -> None:
            if late and not (frame and frame.f_code is drawn.__code__):
                pressed(late.pop(), frame)

        def drawn() -> None:
            try:
                self.readline.insert_text(typed)  # type: ignore[union-attr]
            except UnicodeEncodeError:  # the C locale
                self.readline.insert_text(typed.encode("ascii", "replace").decode())  # type: ignore[union-attr]
            self.readline.redisplay()  # type: ignore[union-attr]
            if not late:  # a Ctrl+C that came before the text was on the screen loses nothing
                del early[0]

        if self.readline:
            self.readline.set_pre_input_hook(drawn if early else None)
        self.waiting()
        with _handling(pressed), woken(look):
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
                if early := waiting_keys(QUIET).replace("\n", " ").strip():
                    self.early.append(early)
                text = input(prompt).strip()
                if waiting := waiting_keys(AT_ONCE):  # a paste is no yes
                    text = f"{text} {waiting}".replace("\n", " ").strip()
                elif text in EXITS:
                    self.leaves = True
                    pressed(signal.SIGINT, None)
        except (EOFError, KeyboardInterrupt):
            self.given_up = True
            sys.stdout.write("\n")
            return ""
        if self.readline and text:
            self.readline.remove_history_item(self.readline.get_current_history_length() - 1)
        return text

    def remember(self, lines: list[str]) -> None:
        """Put these entries into the history; one that is its newest already is not put there again."""
        if (readline := self.readline) is None:
            return
        for line in lines:
            if line != readline.get_history_item(readline.get_current_history_length()):
                readline.add_history(line)

    def close(self) -> None:
        """Save the history, privately; no reason to fail where the home is read-only."""
        if self.readline is None:
            return
        with contextlib.suppress(OSError):
            own_folder(self.history.parent)
            os.close(os.open(self.history, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
            for place in range(self.readline.get_current_history_length()):
                entry = self.redact(self.readline.get_history_item(place + 1))
                self.readline.replace_history_item(place, entry.replace("\n", NEWLINE))
            self.readline.write_history_file(self.history)


def _readline(history: Path) -> ModuleType | None:
    """The readline module with our history in it, where there is one."""
    try:
        import readline
    except ImportError:
        return None
    with contextlib.suppress(OSError):
        readline.read_history_file(history)
        for place in range(readline.get_current_history_length()):
            entry = readline.get_history_item(place + 1)
            readline.replace_history_item(place, entry.replace(NEWLINE, "\n"))
    readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
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


def waiting_keys(quiet: float) -> str:
    """What was typed and not read yet, until no key has come for `quiet` seconds, taken out of the terminal."""
    data = b""
    with local_modes(on="NOFLSH", off="ICANON ECHO") as there:
        fd = sys.stdin.fileno() if there else -1
        while there and select.select([fd], [], [], quiet)[0] and (piece := os.read(fd, 4096)):
            # All of them are taken out: what stays would be the answer
            data += piece[: MOST_PENDING - len(data)]
    return text_of_keys(data)


def text_of_keys(data: bytes) -> str:
    """What was typed, without keys that are no text."""
    text = clean(data.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n"))
    return "".join(c for c in text if c.isprintable() or c in "\n\t")
