"""Input: the terminal's modes, and lines at the prompt and at questions.

What is typed is never lost and never answers a question that was not on the screen: keys that came before a question
stand at the next prompt. The modes are restored before the program stops or ends, however that comes.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from coder.cli.process import private_dir
from coder.cli.signals import at_end, begin_exit, handling, wake_up
from coder.permissions.sanitize import strip_controls

PROMPT, MORE = "> ", ". "
MAX_HISTORY = 1000
NEWLINE = "\x1e"  # in the history's file, where a newline would begin another entry
# Seconds
EXIT_WITHIN = 1.5  # between two Ctrl+C that end the session
QUIET = 0.3  # without a key before a question takes an answer: before, the user cannot have read it
AT_ONCE = 0.03  # without a key behind Enter: what comes sooner was pasted


class Leave(SystemExit):
    """Leave the session with this exit code."""


# ---- the terminal's modes ----------------------------------------------------------------

MARK_PASTES, MARK_NONE = "\x1b[?2004h", "\x1b[?2004l"
LFLAG = 3  # place in termios' list

Attributes = list[Any]
_at_start: Attributes = []  # empty: no terminal, or not begun


def _keep_modes() -> None:
    """Remember the terminal's modes; they are restored at the end, and while Ctrl+Z has stopped the program."""
    if not _at_start and (now := _attributes()):
        _at_start[:] = now
        at_end.append(_restore)
        if signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
            signal.signal(signal.SIGTSTP, _stop)


@contextlib.contextmanager
def tty_flags(on: str = "", off: str = "") -> Iterator[bool]:
    """While inside, local flags of the terminal on stdin, such as "ECHO", are on or off. False where there is none."""
    before = _attributes()
    if before is None:
        yield False
        return
    changed = list(before)
    for name in on.split():
        changed[LFLAG] |= getattr(termios, name)
    for name in off.split():
        changed[LFLAG] &= ~getattr(termios, name)
    _apply(changed)
    try:
        yield True
    finally:
        _apply(before)


def silent_keys() -> AbstractContextManager[bool]:
    """While inside, keys are kept by the terminal for the next prompt, but not shown."""
    return tty_flags(on="NOFLSH", off="ECHO")


def _attributes() -> Attributes | None:
    try:
        return termios.tcgetattr(sys.stdin.fileno())
    except (OSError, ValueError, termios.error):
        return None


def _apply(wanted: Attributes) -> None:
    """Set the modes. In the background that would stop the program; and the terminal may be gone."""
    with contextlib.suppress(OSError, ValueError, termios.error):
        if os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp():
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, wanted)


def send(sequence: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.write(sequence)
        sys.stdout.flush()


def _restore() -> None:
    if _attributes() not in (None, _at_start):
        _apply(_at_start)
        send(f"{MARK_NONE}\x1b[0m")


def _stop(number: int, frame: FrameType | None) -> None:
    """Ctrl+Z: the shell gets the terminal as it was; afterwards the program has it as it left it."""
    now = _attributes()
    _restore()
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)  # stopped in here
    signal.signal(signal.SIGTSTP, _stop)
    if now and now != _at_start:
        _apply(now)
        send("" if now[LFLAG] & termios.ICANON else MARK_PASTES)


def waiting_keys(quiet: float) -> str:
    """Take what was typed and not read yet, until no key has come for `quiet` seconds, as text."""
    data = b""
    with tty_flags(on="NOFLSH", off="ICANON ECHO") as is_terminal:
        while is_terminal and select.select([sys.stdin], [], [], quiet)[0]:
            if not (piece := os.read(sys.stdin.fileno(), 4096)):
                break
            data += piece
    text = data.decode("utf-8", "replace").replace("\r", "\n")
    return "".join(c for c in strip_controls(text) if c.isprintable() or c in "\n\t")


# ---- lines -------------------------------------------------------------------------------


class Keyboard:
    """Lines from the terminal. `history` is a file."""

    def __init__(self, history: Path) -> None:
        _keep_modes()
        self.history = history
        self.early: list[str] = []  # prefilled at the next prompts, one text at each
        self.redact: Callable[[str], str] = str  # what is saved
        self.paused: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self.pressed = -100.0  # when Ctrl+C last stopped a run or did nothing (monotonic)
        self.readline = _load_readline(history)

    def entries(self) -> Iterator[str]:
        """What the user enters, until Ctrl+D. Raises Leave."""
        while True:
            try:
                yield self._entry()
            except KeyboardInterrupt:
                continue  # the entry is given up
            except EOFError:
                sys.stdout.write("\n")
                return

    def _entry(self) -> str:
        """A line or a pasted block; several lines between triple quotes, or with a backslash at their ends."""
        text = self._block(PROMPT, self.early).rstrip()
        if "\n" not in text:  # no mark in what was pasted means anything
            text = text.strip()
            if text.startswith('"""'):
                while not text[3:].rstrip().endswith('"""'):
                    text += "\n" + self._block(MORE)
                text = text.rstrip()[3:-3].strip()
            while text.endswith("\\"):
                text = text[:-1] + "\n" + self._block(MORE)
        self.remember([text])
        return text

    def _block(self, prompt: str, early: list[str] | None = None) -> str:
        """A line, and what was there already when Enter came: a paste, where the terminal does not mark one."""
        text = self._line(prompt, [] if early is None else early)
        pasted = waiting_keys(AT_ONCE)
        sys.stdout.write(pasted)
        return f"{text}\n{pasted}" if pasted else text

    def _line(self, prompt: str, early: list[str]) -> str:
        """One line; the first of `early` is prefilled and taken. Raises EOFError, KeyboardInterrupt, Leave."""
        text, readline = strip_controls(early[0]) if early else "", self.readline
        if readline:  # a C function as the hook: no signal is handled, and lost, in it
            readline.set_startup_hook(partial(readline.insert_text, text) if text else None)
        try:
            with wake_up():
                line = input(prompt)
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            if readline and readline.get_line_buffer():
                del early[:1]
            elif time.monotonic() - self.pressed < EXIT_WITHIN:
                begin_exit(130)
                raise Leave(130) from None
            else:
                self.pressed = time.monotonic()
                sys.stdout.write("(Ctrl+C again or Ctrl+D exits)\n")
            raise
        if readline:
            del early[:1]
        return line

    def answer(self, prompt: str) -> str:
        """A line that was typed after the question was on the screen; "" at Ctrl+D. Ctrl+C stops the run, too."""
        stop_run = signal.getsignal(signal.SIGINT)

        def press(number: int, frame: FrameType | None) -> None:
            if callable(stop_run):
                stop_run(number, frame)
            raise KeyboardInterrupt

        with self.paused(), handling(signal.SIGINT, press), tty_flags(on="ECHO"):
            try:
                if early := waiting_keys(QUIET).replace("\n", " ").strip():
                    self.early.append(early)
                if self.readline:
                    self.readline.set_startup_hook(None)
                text = input(prompt)
                # A paste is no yes
                return f"{text} {waiting_keys(AT_ONCE)}".replace("\n", " ").strip()
            except (EOFError, KeyboardInterrupt):
                sys.stdout.write("\n")
                return ""

    def remember(self, entries: list[str]) -> None:
        """Put these entries into the history, but not the newest one again."""
        if readline := self.readline:
            for entry in filter(None, entries):
                if entry != readline.get_history_item(readline.get_current_history_length()):
                    readline.add_history(entry)

    def close(self) -> None:
        """Save the history, privately; a read-only home is no error."""
        if (readline := self.readline) is None:
            return
        places = range(1, readline.get_current_history_length() + 1)
        entries = [readline.get_history_item(place) for place in places[-MAX_HISTORY:]]
        with contextlib.suppress(OSError):
            private_dir(self.history.parent)
            fd = os.open(self.history, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(fd, "w", encoding="utf-8", errors="replace") as file:
                file.writelines(self.redact(each).replace("\n", NEWLINE) + "\n" for each in entries)


def _load_readline(history: Path) -> ModuleType | None:
    """The readline module with the history in it; None where Python has none."""
    try:
        import readline
    except ImportError:
        return None
    readline.set_auto_history(False)  # an entry is one item, and an answer is none
    readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
    with contextlib.suppress(OSError):
        for line in filter(None, history.read_text("utf-8", "replace").split("\n")):
            readline.add_history(line.replace(NEWLINE, "\n"))
    return readline
