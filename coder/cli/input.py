"""Input at the prompt and at questions, through readline.

What is typed is never lost and never answers a question that was not on the screen: keys that came before a question
stand at the next prompt.
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

from coder.cli.process import private_dir
from coder.cli.signals import begin_exit, handling, wake_up
from coder.cli.terminal_modes import tty_flags
from coder.permissions.sanitize import strip_controls

PROMPT, MORE = "> ", ". "
EXITS = ("/exit", "/quit", "/q", "exit", "quit")
MAX_HISTORY = 1000
NEWLINE = "\x1e"  # in the history's file, where a newline would begin another entry
MAX_EARLY_KEYS = 1 << 16  # bytes of keys before a question that are kept for the next prompt
# Seconds
EXIT_WITHIN = 2.0  # between two Ctrl+C on an empty line that end the session
EXIT_AFTER_RUN = 1.0  # between a Ctrl+C that stopped a run and one that ends the session
QUIET = 0.3  # without a key before a question takes an answer: before, the user cannot have read it
AT_ONCE = (
    0.03  # without a key behind Enter: what comes sooner was pasted, or typed before the prompt
)


class Leave(Exception):
    """Leave the session with this exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Keyboard:
    """Lines from the terminal. `history` is a file; `before_prompt` is called before a prompt is drawn."""

    def __init__(self, history: Path, before_prompt: Callable[[], None] = lambda: None) -> None:
        self.history, self.before_prompt = history, before_prompt
        self.early: list[str] = []  # prefilled at the next prompts, one text at each
        self.redact: Callable[[str], str] = str  # what is saved
        self.paused: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self.stopped_run: Callable[[], float] = lambda: -100.0  # when Ctrl+C last did (monotonic)
        self.given_up = False  # the newest question, by Ctrl+C, Ctrl+D or /exit
        self._leaves = False  # /exit was the answer to a question
        self._hinted = -100.0  # when a Ctrl+C at the prompt showed what a second one does
        self.readline = _load_readline(history)

    # -- entries

    def entries(self) -> Iterator[str]:
        """What the user enters, until Ctrl+D. Raises Leave."""
        while not self._leaves:
            try:
                yield self._entry()
            except KeyboardInterrupt:
                continue  # the entry is given up
            except EOFError:
                sys.stdout.write("\n")
                return

    def _entry(self) -> str:
        """One entry, which is one item of the history: one of its lines alone might be a command."""
        text, readline = "", self.readline
        begun = readline.get_current_history_length() if readline else 0
        try:
            text = self._lines()
        finally:
            while readline and (newest := readline.get_current_history_length()) > begun:
                readline.remove_history_item(newest - 1)
            self.remember([text] if text else [])
        return text

    def _lines(self) -> str:
        """A line or a pasted block; several lines between triple quotes, or with a backslash at their ends."""
        text = self._block(PROMPT, self.early).rstrip()
        if "\n" in text:  # pasted: no mark in it means anything
            return text
        while text.endswith("\\") and not text.lstrip().startswith('"""'):
            text = text[:-1] + "\n" + self._block(MORE)
        if text.lstrip().startswith('"""'):
            text = text.lstrip()[3:]
            while not text.rstrip().endswith('"""'):
                text += "\n" + self._block(MORE)
            text = text.rstrip()[:-3]
        return text.strip()

    def _block(self, prompt: str, early: list[str] | None = None) -> str:
        """A line and what was there already when Enter came: a paste, where the terminal does not mark one.

        Its last line, which no Enter has ended, stands at a prompt of its own.
        """
        text = self.line(prompt, early or [])
        while waiting := self._keys_at_once():
            *lines, rest = waiting.split("\n")
            sys.stdout.write("".join(f"{MORE}{line}\n" for line in lines))
            text = "\n".join([text, *lines, *([self.line(MORE, [rest])] if rest else [])])
        return text

    def _keys_at_once(self) -> str:
        try:
            return waiting_keys(AT_ONCE)
        except KeyboardInterrupt:
            sys.stdout.write("\n")  # behind the ^C
            raise

    def line(self, prompt: str, early: list[str]) -> str:
        """One line; the first of `early` is prefilled and taken.

        Raises EOFError at Ctrl+D, KeyboardInterrupt at Ctrl+C, Leave at a second Ctrl+C.
        """
        text = strip_controls(early[0]) if early else ""
        late: list[int] = []  # Ctrl+C while readline calls `draw`, where it drops what is raised

        def press(number: int, frame: FrameType | None) -> None:
            if frame and frame.f_code is draw.__code__:
                late.append(number)
                return
            self._give_up_line()
            raise KeyboardInterrupt

        def press_late(number: int, frame: FrameType | None) -> None:
            if late and not (frame and frame.f_code is draw.__code__):
                press(late.pop(), frame)

        def draw() -> None:
            readline = self.readline
            try:
                readline.insert_text(text)  # type: ignore[union-attr]
            except UnicodeEncodeError:  # the C locale
                readline.insert_text(text.encode("ascii", "replace").decode())  # type: ignore[union-attr]
            readline.redisplay()  # type: ignore[union-attr]
            if not late:  # a Ctrl+C that came before the text was on the screen loses nothing
                del early[0]

        if self.readline:
            self.readline.set_pre_input_hook(draw if early else None)
        self.before_prompt()
        with handling(signal.SIGINT, press), wake_up(press_late):
            return input(prompt)

    def _give_up_line(self) -> None:
        """Ctrl+C at the prompt clears the line; on an empty one, twice leaves."""
        now = time.monotonic()
        typed = self.readline and self.readline.get_line_buffer()
        sys.stdout.write("\n")
        if typed:
            return
        if now - self._hinted < EXIT_WITHIN or now - self.stopped_run() < EXIT_AFTER_RUN:
            begin_exit(130)
            raise Leave(130)
        self._hinted = now
        sys.stdout.write("(Ctrl+C again or Ctrl+D exits)\n")

    # -- questions

    def answer(self, prompt: str) -> str:
        """A line that was typed after the question was on the screen; "" at Ctrl+D. Ctrl+C stops the run, too."""
        stop_run = signal.getsignal(signal.SIGINT)

        def press(number: int, frame: FrameType | None) -> None:
            if callable(stop_run):
                stop_run(number, frame)
            raise KeyboardInterrupt

        self.given_up = False
        with self.paused():
            try:
                with handling(signal.SIGINT, press), tty_flags(on="ECHO"):
                    text = self._answer(prompt)
                    if text in EXITS:
                        self._leaves = True
                        press(signal.SIGINT, None)
                    return text
            except (EOFError, KeyboardInterrupt):
                self.given_up = True
                sys.stdout.write("\n")
                return ""

    def _answer(self, prompt: str) -> str:
        if self.readline:
            self.readline.set_pre_input_hook(None)
        if early := waiting_keys(QUIET).replace("\n", " ").strip():
            self.early.append(early)
        text = input(prompt).strip()
        if self.readline and text:
            self.readline.remove_history_item(self.readline.get_current_history_length() - 1)
        # A paste is no yes
        return f"{text} {waiting_keys(AT_ONCE)}".replace("\n", " ").strip()

    # -- history

    def remember(self, entries: list[str]) -> None:
        """Put these entries into the history, but not the newest one again."""
        if readline := self.readline:
            for entry in entries:
                if entry != readline.get_history_item(readline.get_current_history_length()):
                    readline.add_history(entry)

    def close(self) -> None:
        """Save the history, privately; a read-only home is no error."""
        if (readline := self.readline) is None:
            return
        with contextlib.suppress(OSError):
            private_dir(self.history.parent)
            os.close(os.open(self.history, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
            _replace_items(readline, lambda entry: self.redact(entry).replace("\n", NEWLINE))
            readline.write_history_file(self.history)


def _load_readline(history: Path) -> ModuleType | None:
    """The readline module with the history in it; None where Python has none."""
    try:
        import readline
    except ImportError:
        return None
    with contextlib.suppress(OSError):
        readline.read_history_file(history)
        _replace_items(readline, lambda entry: entry.replace(NEWLINE, "\n"))
    readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
    readline.set_history_length(MAX_HISTORY)
    return readline


def _replace_items(readline: ModuleType, change: Callable[[str], str]) -> None:
    for place in range(readline.get_current_history_length()):
        readline.replace_history_item(place, change(readline.get_history_item(place + 1)))


# ---- keys that wait ----------------------------------------------------------------------


@contextlib.contextmanager
def silent_keys() -> Iterator[None]:
    """While inside, keys are kept by the terminal for the next prompt, but not shown; also when Ctrl+C is among them."""
    with tty_flags(on="NOFLSH", off="ECHO"):
        yield


def waiting_keys(quiet: float) -> str:
    """Take what was typed and not read yet, until no key has come for `quiet` seconds."""
    data = b""
    with tty_flags(on="NOFLSH", off="ICANON ECHO") as is_terminal:
        fd = sys.stdin.fileno() if is_terminal else -1
        while (
            is_terminal and select.select([fd], [], [], quiet)[0] and (piece := os.read(fd, 4096))
        ):
            # All are taken, also those that are too many: what stays would be the answer
            data += piece[: MAX_EARLY_KEYS - len(data)]
    return text_of_keys(data)


def text_of_keys(data: bytes) -> str:
    """What was typed, without keys that are no text."""
    text = data.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")
    return "".join(c for c in strip_controls(text) if c.isprintable() or c in "\n\t")
