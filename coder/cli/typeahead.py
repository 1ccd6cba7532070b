"""Typing while the agent works: a line steers it, `+line` waits until it is done, a command comes after the run.

A worker thread reads single keys and shows them in the status row. Nothing typed is lost: what no run has taken is the
next entry, or stands at the next prompt where the run did not end well.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import selectors
import sys
import threading
from collections.abc import Callable, Iterator

from coder.agent.state import Queue
from coder.cli.input import AT_ONCE
from coder.cli.screen import Screen, last_columns, one_line
from coder.cli.signals import defer_sigint
from coder.cli.terminal_modes import renew_single_keys, single_keys
from coder.events import Event, MessageStart
from coder.history import text_of, user
from coder.types import Message

# (name, argument). What looks like a command is never sent; /home/me/x.py does not
COMMAND = re.compile(r"/([\w?-]*)(\s.*)?")
CHECK_MODES = (
    1.0  # seconds between two looks at the terminal's modes, which a shell resets after a stop
)


class LineEditor:
    """The line under way, from bytes: backspace, Ctrl+U, Ctrl+W, a backslash at the end, pasting."""

    # What a terminal sends for a key, or as an answer: CSI, the Linux console's function keys, SS3; OSC, DCS and the like
    SEQUENCE = re.compile(
        r"\x1b(?:\[\[.|\[[0-?]*[ -/]*[@-~]|O[ -~]|[\]PX^_][^\x07\x1b\r\n]{0,300}(?:\x07|\x1b\\))"
    )
    BEGUN = re.compile(r"\x1b(?:\[\[?|\[[0-?]*[ -/]*|O|[\]PX^_][^\x07\x1b\r\n]{0,300}\x1b?)?")

    def __init__(self) -> None:
        self.text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # the beginning of a sequence
        self._pasting = False

    def feed(self, data: bytes) -> list[str]:
        """Take bytes; the lines that Enter has ended."""
        self._held += self._decoder.decode(data)
        ended: list[str] = []
        while self._held and not self.BEGUN.fullmatch(self._held):
            sequence = self.SEQUENCE.match(self._held)
            key = sequence[0] if sequence else self._held[0]
            self._held = self._held[len(key) :]
            if self._ends_line(key):
                ended.append(self.text)
                self.text = ""
        return ended

    def _ends_line(self, key: str) -> bool:
        if key in "\r\n":
            if not (self._pasting or self.text.endswith("\\")):
                return True
            self.text = (self.text if self._pasting else self.text[:-1]) + "\n"
        elif key in ("\x1b[200~", "\x1b[201~"):
            self._pasting = key == "\x1b[200~"
        elif key in "\x7f\b":
            self.text = self.text[:-1]
        elif key == "\x15":
            self.text = ""
        elif key == "\x17":
            self.text = re.sub(r"\S+\s*$", "", self.text)
        elif key == "\t" or key.isprintable():
            self.text += key
        return False


class TypeAhead:
    """The keyboard during runs. It fills the queues of the agent, and is a subscriber of it."""

    def __init__(self, screen: Screen, steering: Queue, follow_ups: Queue) -> None:
        self.screen = screen
        self.redact: Callable[[str], str] = str  # what is sent and kept
        self.line = LineEditor()
        self.steering, self.follow_ups = steering, follow_ups
        self.commands: list[str] = []
        self.entered: list[str] = []  # all lines of the run
        self._reading: contextlib.ExitStack | None = None

    # -- reading

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """While inside, keys are taken one by one; nothing where there is no terminal."""
        self.entered.clear()
        try:
            self._start()
            yield
        finally:
            self._stop()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While inside, a question reads the keyboard."""
        was_reading = self._reading is not None
        self._stop()
        try:
            yield
        finally:
            if was_reading:
                self._start()

    def _start(self) -> None:
        with defer_sigint(), contextlib.ExitStack() as opening:
            if not opening.enter_context(single_keys()):
                return
            awake, wake = os.pipe()
            opening.callback(os.close, awake)
            opening.callback(os.close, wake)
            thread = threading.Thread(
                target=self._read, args=(sys.stdin.fileno(), awake), daemon=True, name="keys"
            )
            opening.callback(thread.join)
            opening.callback(os.write, wake, b".")
            thread.start()
            self._reading = opening.pop_all()
        self._show()

    def _stop(self) -> None:
        with defer_sigint():
            reading, self._reading = self._reading, None
            if reading:
                reading.close()
                self.screen.show_typed("")

    def _read(self, fd: int, awake: int) -> None:
        with selectors.DefaultSelector() as keys:
            keys.register(fd, selectors.EVENT_READ)
            keys.register(awake, selectors.EVENT_READ)
            data = b""  # an Enter and what comes with it
            while True:
                ready = [key.fd for key, _ in keys.select(AT_ONCE if data else CHECK_MODES)]
                if fd in ready:
                    read = b""
                    with contextlib.suppress(OSError):
                        read = os.read(fd, 4096)
                    if not read:  # the terminal is gone
                        return
                    data += read
                    if b"\r" in data or b"\n" in data:
                        continue
                self._take(data)
                if awake in ready:
                    return
                if not (data or ready):
                    renew_single_keys()
                data = b""

    def _take(self, data: bytes) -> None:
        """Lines that came at once are one, because they were pasted. One that Enter did not end is under way."""
        lines, rest = self.line.feed(data), self.line.text
        if lines and rest:
            self.line.text, lines = "\n".join([*lines, rest]), []
        if line := "\n".join(lines).strip():
            self._enter(line)
        if data:
            self._show()

    def _enter(self, line: str) -> None:
        self.entered.append(line)
        is_words = "\n" in line  # pasted, or of several lines, whatever it begins with
        if not is_words and (line[0] == "!" or COMMAND.fullmatch(line) or line in ("exit", "quit")):
            self.commands.append(line)
        elif not is_words and line.startswith("+") and line[1:].strip():
            self.follow_ups.put(_queued(self.redact(line[1:].strip())))
        else:
            self.steering.put(_queued(self.redact(line)))

    def _show(self) -> None:
        """The beginning of what waits, and the end of what is typed."""
        waiting = [*map(text_of, (*self.steering, *self.follow_ups)), *self.commands]
        number = f" ({len(waiting)})" if len(waiting) > 1 else ""
        newest = f"queued{number}: {waiting[0]}".replace("\n", "⏎") if waiting else ""
        typed = f"> {self.line.text}".replace("\n", "⏎") if self.line.text else ""
        if newest:  # two thirds of the row are free
            third = self.screen.width // 3
            newest = one_line(newest, third if typed else 2 * third - 2)
            typed = last_columns(typed, third - 3)
        self.screen.show_typed("  ".join(filter(None, [newest, typed])))

    def __call__(self, event: Event) -> None:
        if isinstance(event, MessageStart):  # it may have waited in a queue
            self._show()

    # -- what no run has taken

    def unsent_lines(self) -> list[str]:
        """The lines that Enter has ended and no run has taken; clears them."""
        lines: list[str] = []
        for queue in (self.steering, self.follow_ups):
            while len(queue):
                lines += map(text_of, queue.take())
        lines += self.commands
        self.commands = []
        return lines

    def partial_line(self) -> str:
        """The line under way; clears it."""
        text, self.line = self.line.text, LineEditor()
        return text


def _queued(text: str) -> Message:
    """A message that the renderer shows when its turn comes."""
    message = user(text)
    return message | {"meta": message["meta"] | {"queued": True}}
