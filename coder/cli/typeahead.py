"""Typing while the agent works: a line steers it, `+line` waits until it is done, a command comes after the run.

A worker thread reads single keys and shows them in the status row. Nothing typed is lost: what no run has taken is the
next entry, or stands at the next prompt where the run did not end well.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import select
import sys
import threading
from collections.abc import Callable, Iterator

from coder.agent.state import Queue
from coder.cli.input import MARK_NONE, MARK_PASTES, send, tty_flags
from coder.cli.screen import Screen, one_line
from coder.events import Event, MessageStart
from coder.history import text_of, user
from coder.types import Message

# (name, argument). What looks like a command is never sent; /home/me/x.py does not
COMMAND = re.compile(r"/([\w?-]*)(\s.*)?")
KEY = re.compile(r"\x1b\[\[?[0-?]*[ -/]*[@-~]?|\x1bO.?|\x1b[^\r\n]?|\r\n|.", re.S)
BEGUN = re.compile(r"\x1b(?:\[[0-?]*|O)")  # a key's sequence that the next read ends
ENTER = ("\r", "\n", "\r\n")


class TypeAhead:
    """The keyboard during runs. It fills the queues of the agent, and is a subscriber of it."""

    def __init__(self, screen: Screen, steering: Queue, follow_ups: Queue) -> None:
        self.screen = screen
        self.redact: Callable[[str], str] = str  # what is sent and kept
        self.text = ""  # the line under way
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # the beginning of a sequence
        self._pasting = False
        self.steering, self.follow_ups = steering, follow_ups
        self.commands: list[str] = []
        self.entered: list[str] = []  # all lines of the run
        self._reading, self._listens = contextlib.ExitStack(), False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """While inside, keys are taken one by one; nothing where there is no terminal."""
        self.entered.clear()
        with contextlib.ExitStack() as self._reading:
            self._reading.enter_context(self._keys())
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
                self._reading.enter_context(self._keys())

    @contextlib.contextmanager
    def _keys(self) -> Iterator[None]:
        with tty_flags(on="NOFLSH", off="ICANON ECHO") as is_terminal:
            if not is_terminal:
                yield
                return
            awake, wake = os.pipe()
            reader = threading.Thread(target=self._read, args=(awake,), daemon=True)
            send(MARK_PASTES)
            reader.start()
            self._listens = True
            self._show()
            try:
                yield
            finally:
                self._listens = False
                os.close(wake)
                reader.join()
                os.close(awake)
                send(MARK_NONE)
                self.screen.show_typed("")

    def _read(self, awake: int) -> None:
        keys = sys.stdin.fileno()
        while True:
            if keys not in select.select([keys, awake], [], [])[0]:
                return
            data = b""
            with contextlib.suppress(OSError):
                data = os.read(keys, 1 << 16)
            if not data:  # the terminal is gone
                return
            if entry := self.feed(data):
                self._enter(entry)
            self._show()

    def feed(self, data: bytes) -> str:
        """Take the bytes of one read; the entry, if Enter ends them. Lines that come at once were pasted, and are one."""
        keys = KEY.findall(self._held + self._decoder.decode(data))
        self._held = keys.pop() if keys and BEGUN.fullmatch(keys[-1]) else ""
        for key in keys:
            if key in ENTER:
                self.text += "\n"
            elif key in ("\x1b[200~", "\x1b[201~"):
                self._pasting = key == "\x1b[200~"
            elif key in "\x7f\b":
                self.text = self.text[:-1]
            elif key == "\x15":  # Ctrl+U
                self.text = ""
            elif key == "\x17":  # Ctrl+W
                self.text = re.sub(r"\S+\s*$", "", self.text)
            elif key == "\t" or key.isprintable():
                self.text += key
        if self._pasting or not keys or keys[-1] not in ENTER:
            return ""
        entry, self.text = self.text.strip(), ""
        return entry

    def _enter(self, entry: str) -> None:
        self.entered.append(entry)
        is_words = "\n" in entry  # pasted, whatever it begins with
        if not is_words and (
            entry[0] == "!" or COMMAND.fullmatch(entry) or entry in ("exit", "quit")
        ):
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
