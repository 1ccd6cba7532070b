"""Typing while the agent works: a line steers it, `+line` waits until it is done, a command comes
after the run.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator

from coder.agent.state import Queue
from coder.cli.input import do_nothing
from coder.cli.keys import ENTER, ESC, NEWLINE, PASTED, Keys, single_keys
from coder.cli.line_editor import unchanged
from coder.cli.screen import Screen
from coder.cli.text_rows import one_line
from coder.history import text_of, user

# (name, argument). What looks like a command is never sent; /home/me/x.py does not
COMMAND = re.compile(r"/([\w?-]*)(\s.*)?")
CTRL_U = "\x15"
CTRL_W = "\x17"
BACKSPACE = "\x7f\b"


class TypeAhead:
    """A worker thread reads single keys and shows them in the status row.

    Nothing typed is lost: what no run has taken is the next entry, or is in the next prompt if
    the run did not end well.
    """

    def __init__(self, screen: Screen, steering: Queue, follow_ups: Queue) -> None:
        self.screen = screen
        self.steering = steering
        self.follow_ups = follow_ups
        self.redact: Callable[[str], str] = unchanged  # what is sent and kept
        self.stop: Callable[[], object] = do_nothing  # the run, at Esc; called in the worker thread
        self.text = ""  # the line so far
        self.commands: list[str] = []
        self.entered: list[str] = []  # all lines of the run
        self._keys = Keys()
        self._reading = contextlib.ExitStack()
        self._is_listening = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """While inside, keys are taken one by one; none if there is no terminal."""
        self.entered.clear()
        with contextlib.ExitStack() as self._reading:
            self._reading.enter_context(self._thread())
            yield

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While inside, a question reads the keyboard."""
        was_listening = self._is_listening
        self._reading.close()
        try:
            yield
        finally:
            if was_listening:
                self._reading.enter_context(self._thread())

    @contextlib.contextmanager
    def _thread(self) -> Iterator[None]:
        with single_keys() as is_terminal:
            if not is_terminal:
                yield
                return
            awake, wake = os.pipe()
            reader = threading.Thread(target=self._read, args=(awake,), daemon=True)
            usual = self.screen.stop_key
            self.screen.stop_key = "Esc"
            self._is_listening = True
            reader.start()
            self.show()
            try:
                yield
            finally:
                self._is_listening = False
                self.screen.stop_key = usual
                os.close(wake)
                reader.join()
                os.close(awake)
                self.screen.show_typed("")

    def _read(self, awake: int) -> None:
        with contextlib.suppress(EOFError):
            keys = self._keys.read(awake)
            while keys:
                entry = self.take(keys)
                if entry:
                    self.enter(entry)
                self.show()
                keys = self._keys.read(awake)

    def take(self, keys: list[str]) -> str:
        """Take the keys of one read; the entry, if Enter ends them.

        Lines that come at once were pasted, and are one.
        """
        for key in keys:
            self._take_key(key)
        if not keys or keys[-1] not in ENTER:
            return ""
        entry = self.text.strip()
        self.text = ""
        return entry

    def _take_key(self, key: str) -> None:
        pasted = key.removeprefix(PASTED)
        if key == ESC:
            self.stop()
        elif key in NEWLINE:
            self.text += "\n"
        elif key in BACKSPACE:
            self.text = self.text[:-1]
        elif key == CTRL_U:
            self.text = ""
        elif key == CTRL_W:
            self.text = re.sub(r"\S+\s*$", "", self.text)
        elif pasted == "\t" or pasted.isprintable():
            self.text += pasted

    def enter(self, entry: str) -> None:
        """Put a line where it waits for its turn."""
        self.entered.append(entry)
        if "\n" in entry:  # pasted: words, whatever it begins with
            self._put(self.steering, entry)
        elif is_command(entry):
            self.commands.append(entry)
        elif entry.startswith("+"):
            self._put(self.follow_ups, entry[1:].strip())
        else:
            self._put(self.steering, entry)

    def _put(self, queue: Queue, entry: str) -> None:
        if entry:
            message = user(self.redact(entry))
            message["meta"]["queued"] = True  # the renderer shows it then
            queue.put(message)

    def waiting(self) -> list[str]:
        """The lines that Enter has ended and no run has taken."""
        queued = [text_of(message) for message in (*self.steering, *self.follow_ups)]
        return queued + self.commands

    def take_lines(self) -> list[str]:
        """Those lines, which wait no longer."""
        lines = self.waiting()
        self.steering.clear()
        self.follow_ups.clear()
        self.commands.clear()
        return lines

    def show(self) -> None:
        """Show the beginning of what waits, and what is typed."""
        typed = f"> {self.text}" if self.text else ""
        waiting = self.waiting()
        if waiting:
            number = f" ({len(waiting)})" if len(waiting) > 1 else ""
            queued = one_row(f"queued{number}: {waiting[0]}")
            typed = f"{one_line(queued, self.screen.width // 2)}  {typed}"
        self.screen.show_typed(one_row(typed))


def is_command(entry: str) -> bool:
    """Whether a line is for the terminal, and not for the model."""
    return entry[0] == "!" or entry in ("exit", "quit") or bool(COMMAND.fullmatch(entry))


def one_row(text: str) -> str:
    return text.replace("\n", "⏎")
