"""What is typed while the agent works: a line steers it, `+line` waits until it is done, a command comes after the run.

Keys are read one by one in a thread and shown in the status line, so that they never tear the output. Nothing typed is
lost: what no run has taken is the next entry, or stands at the next prompt where the run did not end well.
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

from coder.agent.agent import Queue
from coder.cli.keyboard import AT_ONCE
from coder.cli.screen import Screen, end_of, one_line
from coder.cli.signals import held
from coder.cli.terminal_modes import MARK_PASTES, local_modes, modes_again, pastes_marked, say
from coder.events import Event, MessageStart
from coder.history import text_of, user
from coder.types import Message

# (name, argument); what looks like one is never sent, and /home/me/x.py does not
COMMAND = re.compile(r"/([\w?-]*)(\s.*)?")
LOOK = 1.0  # seconds between two looks at the terminal's modes, which a shell resets after a stop


class Line:
    """The line under way, from bytes. It knows backspace, Ctrl+U, Ctrl+W, a backslash at the end, and pasting."""

    # What a terminal sends for a key, or as an answer: CSI, the Linux console's function keys, SS3, and OSC, DCS and the like.
    SEQUENCE = re.compile(
        r"\x1b(?:\[\[.|\[[0-?]*[ -/]*[@-~]|O[ -~]|[\]PX^_][^\x07\x1b\r\n]{0,300}(?:\x07|\x1b\\))"
    )
    BEGUN = re.compile(r"\x1b(?:\[\[?|\[[0-?]*[ -/]*|O|[\]PX^_][^\x07\x1b\r\n]{0,300}\x1b?)?")

    def __init__(self) -> None:
        self.text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""  # the beginning of a sequence
        self._pasting = False

    def feed(self, data: bytes) -> list[str]:
        """Take bytes; the lines that Enter has ended."""
        self._rest += self._decoder.decode(data)
        ended: list[str] = []
        while self._rest and not self.BEGUN.fullmatch(self._rest):
            sequence = self.SEQUENCE.match(self._rest)
            # An ESC that begins no sequence is a key without a meaning
            key = sequence[0] if sequence else self._rest[0]
            self._rest = self._rest[len(key) :]
            if self._key(key):
                ended.append(self.text)
                self.text = ""
        return ended

    def _key(self, key: str) -> bool:
        """True for the Enter that ends the line."""
        if key in ("\r", "\n"):
            if not (self._pasting or self.text.endswith("\\")):
                return True
            self.text = self.text if self._pasting else self.text[:-1]
            self.text += "\n"
        elif key in ("\x1b[200~", "\x1b[201~"):
            self._pasting = key == "\x1b[200~"
        elif key in ("\x7f", "\b"):
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
        self.redact: Callable[[str], str] = str  # what is typed is kept, too
        self.line = Line()
        self.steering, self.follow_ups = steering, follow_ups
        self.later: list[str] = []  # commands: they are for us, not for the model
        self.entered: list[str] = []  # all lines of the run
        self._open: contextlib.ExitStack | None = None  # what ends when we stop listening

    # -- listening

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
        listened = self._open is not None
        self._stop()
        try:
            yield
        finally:
            if listened:
                self._start()

    def _start(self) -> None:
        with held(), contextlib.ExitStack() as opening:
            if not opening.enter_context(local_modes(on="NOFLSH", off="ICANON ECHO")):
                return
            opening.enter_context(pastes_marked())
            awake, wake = os.pipe()
            opening.callback(os.close, awake)
            opening.callback(os.close, wake)
            thread = threading.Thread(
                target=self._listen, args=(sys.stdin.fileno(), awake), daemon=True, name="keys"
            )
            opening.callback(thread.join)
            opening.callback(os.write, wake, b".")
            thread.start()
            self._open = opening.pop_all()
        self._show()

    def _stop(self) -> None:
        with held():
            stack, self._open = self._open, None
            if stack:
                stack.close()
                self.screen.beside("")

    def _listen(self, fd: int, awake: int) -> None:
        with selectors.DefaultSelector() as keys:
            keys.register(fd, selectors.EVENT_READ)
            keys.register(awake, selectors.EVENT_READ)
            data = b""  # an Enter and what comes with it
            while True:
                ready = [key.fd for key, _ in keys.select(AT_ONCE if data else LOOK)]
                if fd in ready:
                    try:
                        read = os.read(fd, 4096)
                    except OSError:
                        return
                    if not read:  # the terminal is gone
                        return
                    data += read
                    if b"\r" in data or b"\n" in data:
                        continue
                self._typed(data)
                if awake in ready:
                    return
                if not (data or ready) and modes_again(on="NOFLSH", off="ICANON ECHO"):
                    say(MARK_PASTES)
                data = b""

    def _typed(self, data: bytes) -> None:
        """Lines that came at once are one: a person pastes so, and types otherwise. Where Enter did not end it, it is under way."""
        lines, rest = self.line.feed(data), self.line.text
        if lines and rest:
            self.line.text, lines = "\n".join([*lines, rest]), []
        if line := "\n".join(lines).strip():
            self._enter(line)
        if data:
            self._show()

    def _enter(self, line: str) -> None:
        self.entered.append(line)
        if "\n" in line:  # pasted, or of several lines: words, whatever they begin with
            self.steering.put(_queued(self.redact(line)))
        elif line.startswith("+") and line[1:].strip():
            self.follow_ups.put(_queued(self.redact(line[1:].strip())))
        elif line.startswith("!") or COMMAND.fullmatch(line) or line in ("exit", "quit"):
            self.later.append(line)
        else:
            self.steering.put(_queued(self.redact(line)))

    def _show(self) -> None:
        waiting = [*map(text_of, (*self.steering, *self.follow_ups)), *self.later]
        newest = (
            f"queued{f' ({len(waiting)})' if len(waiting) > 1 else ''}: {waiting[0]}"
            if waiting
            else ""
        )
        newest, typed = (
            text.replace("\n", "⏎")
            for text in (newest, f"> {self.line.text}" if self.line.text else "")
        )
        # Its beginning is shown, and the end of what is typed; two thirds of the row are free
        if newest:
            third = self.screen.width // 3
            newest = one_line(newest, third if typed else 2 * third - 2)
            typed = end_of(typed, third - 3)
        self.screen.beside("  ".join(filter(None, [newest, typed])))

    def __call__(self, event: Event) -> None:
        if isinstance(event, MessageStart):  # it may have waited in a queue
            self._show()

    # -- what no run has taken

    def left(self) -> list[str]:
        """The lines that were ended with Enter, and nobody has taken; they are taken by this."""
        lines = [
            text_of(message)
            for queue in (self.steering, self.follow_ups)
            for message in _emptied(queue)
        ] + self.later
        self.later = []
        return lines

    def unfinished(self) -> str:
        """What was typed of a line; taken by this."""
        text, self.line = self.line.text, Line()
        return text


def _queued(text: str) -> Message:
    """A message that the renderer shows when its turn comes."""
    message = user(text)
    return message | {"meta": message["meta"] | {"queued": True}}


def _emptied(queue: Queue) -> Iterator[Message]:
    while len(queue):
        yield from queue.take()
