"""Typing while the agent works: a line steers it, `+line` waits until it is done, a command comes after the run.

A worker thread reads single keys and shows them in the status row. Nothing typed is lost: what no run has taken is the
next entry, or stands at the next prompt where the run did not end well.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator

from coder.agent.state import Queue
from coder.cli.keys import ENTER, ESC, NEWLINE, PASTED, Keys, single_keys
from coder.cli.screen import Screen, one_line
from coder.events import Event, MessageStart
from coder.history import text_of, user
from coder.types import Message

# (name, argument). What looks like a command is never sent; /home/me/x.py does not
COMMAND = re.compile(r"/([\w?-]*)(\s.*)?")


class TypeAhead:
    """The keyboard during runs. It fills the queues of the agent, and is a subscriber of it."""

    def __init__(self, screen: Screen, steering: Queue, follow_ups: Queue) -> None:
        self.screen = screen
        self.redact: Callable[[str], str] = str  # what is sent and kept
        self.stop: Callable[[], object] = int  # the run, at Esc; called in the worker thread
        self.text = ""  # the line under way
        self.steering, self.follow_ups = steering, follow_ups
        self.commands: list[str] = []
        self.entered: list[str] = []  # all lines of the run
        self._keys = Keys()
        self._reading, self._listens = contextlib.ExitStack(), False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """While inside, keys are taken one by one; nothing where there is no terminal."""
        self.entered.clear()
        with contextlib.ExitStack() as self._reading:
            self._reading.enter_context(self._thread())
            yield

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While inside, a question reads the keyboard."""
        was_listening = self._listens
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
            self._listens = True
            reader.start()
            self._show()
            try:
                yield
            finally:
                self._listens = False
                os.close(wake)
                reader.join()
                os.close(awake)
                self.screen.show_typed("")

    def _read(self, awake: int) -> None:
        with contextlib.suppress(EOFError):
            while self._listens:
                if entry := self.take(self._keys.read(awake)):
                    self._enter(entry)
                self._show()

    def take(self, keys: list[str]) -> str:
        """Take the keys of one read; the entry, if Enter ends them. Lines that come at once were pasted, and are one."""
        for key in keys:
            text = key.removeprefix(PASTED)
            if key == ESC:
                self.stop()
            elif key in NEWLINE:
                self.text += "\n"
            elif key in "\x7f\b":
                self.text = self.text[:-1]
            elif key == "\x15":  # Ctrl+U
                self.text = ""
            elif key == "\x17":  # Ctrl+W
                self.text = re.sub(r"\S+\s*$", "", self.text)
            elif text == "\t" or text.isprintable():
                self.text += text
        if not keys or keys[-1] not in ENTER:
            return ""
        entry, self.text = self.text.strip(), ""
        return entry

    def _enter(self, entry: str) -> None:
        self.entered.append(entry)
        is_words = "\n" in entry  # pasted, whatever it begins with
        is_command = entry[0] == "!" or entry in ("exit", "quit") or COMMAND.fullmatch(entry)
        if is_command and not is_words:
            self.commands.append(entry)
        elif not is_words and entry.startswith("+"):
            if words := entry[1:].strip():
                self.follow_ups.put(_queued(self.redact(words)))
        else:
            self.steering.put(_queued(self.redact(entry)))

    def _show(self) -> None:
        """The beginning of what waits, and what is typed."""
        waiting = [*map(text_of, (*self.steering, *self.follow_ups)), *self.commands]
        number = f" ({len(waiting)})" if len(waiting) > 1 else ""
        typed = f"> {self.text}" if self.text else ""
        if waiting:
            queued = f"queued{number}: {waiting[0]}".replace("\n", "⏎")
            typed = f"{one_line(queued, self.screen.width // 2)}  {typed}"
        self.screen.show_typed(typed.replace("\n", "⏎"))

    def __call__(self, event: Event) -> None:
        if isinstance(event, MessageStart):  # it may have waited in a queue
            self._show()

    def unsent_lines(self) -> list[str]:
        """The lines that Enter has ended and no run has taken; clears them."""
        lines: list[str] = []
        for queue in (self.steering, self.follow_ups):
            while len(queue):
                lines += map(text_of, queue.take())
        lines, self.commands = lines + self.commands, []
        return lines

    def partial_line(self) -> str:
        """The line under way; clears it."""
        text, self.text = self.text, ""
        return text


def _queued(text: str) -> Message:
    """A message that the renderer shows when its turn comes."""
    message = user(text)
    return message | {"meta": message["meta"] | {"queued": True}}
