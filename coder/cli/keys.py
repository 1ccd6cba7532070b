"""The keyboard: the terminal's modes, and its bytes as keys.

The modes are restored before the program stops or ends, however that comes.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import select
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType, ModuleType
from typing import Any

from coder.cli.process import at_end, begin_exit

MARK_PASTES = "\x1b[?2004h"
MARK_NONE = "\x1b[?2004l"
PASTE_BEGINS = "\x1b[200~"
PASTE_ENDS = "\x1b[201~"
KEY = re.compile(r"\x1b{1,2}(?:\[\[?[0-?]*[ -/]*[@-~]?|O.?)|\x1b\r|\x1b[^\r\n]?|\r\n|.", re.S)
BEGUN = re.compile(r"\x1b{1,2}(?:\[[0-?]*|O)?")  # a key's sequence that the next read ends
PASTED = PASTE_BEGINS  # in front of each character of a paste
ESC = "\x1b"
CTRL_D = "\x04"
ENTER = ("\r", "\r\n")
# Ctrl+J, Alt+Enter; an Enter that does not end a read was pasted
NEWLINE = (*ENTER, "\n", "\x1b\r", f"{PASTED}\n")
ESC_ALONE = 0.05  # seconds without a byte after an Esc that begins no other key
PASTE_PAUSE = 1.0  # seconds without a byte that end a paste
ESC_TWICE = 1.0  # seconds between two that belong together
ESC_CHECK = 0.1  # seconds between two looks at the one that readline holds
LONG_AGO = -100.0
READING_SEQUENCE = 0x200000  # in readline's state: RL_STATE_MULTIKEY
IFLAG = 0  # index in termios' list
LFLAG = 3
UTF8_LOCALES = ("C.UTF-8", "C.utf8", "UTF-8")  # one of which a system has (PEP 538)

# They draw the row that takes keys, when the program goes on after a stop
_at_continue: list[Callable[[], object]] = []
_at_start: list[Any] = []  # the terminal's modes; empty: no terminal, or not begun


def keep_modes() -> None:
    """Remember the terminal's modes; they are restored at the end, and while Ctrl+Z has stopped
    the program."""
    now = _attributes()
    if _at_start or not now:
        return
    _at_start[:] = now
    at_end.append(_restore)
    if signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
        signal.signal(signal.SIGTSTP, _stop)


@contextlib.contextmanager
def tty_flags(on: str = "", off: str = "") -> Iterator[bool]:
    """While inside, these flags of stdin's terminal are on or off; False if it is no terminal.

    Without ICRNL, Enter is no Ctrl+J.
    """
    before = _attributes()
    if before is None:
        yield False
        return
    changed = list(before)
    for name in on.split():
        changed[_field_of(name)] |= getattr(termios, name)
    for name in off.split():
        changed[_field_of(name)] &= ~getattr(termios, name)
    _apply(changed)
    try:
        yield True
    finally:
        _apply(before)


def _field_of(flag: str) -> int:
    return IFLAG if flag == "ICRNL" else LFLAG


def silent_keys() -> AbstractContextManager[bool]:
    """While inside, keys are kept by the terminal for the next prompt, but not shown."""
    return tty_flags(on="NOFLSH", off="ECHO")


@contextlib.contextmanager
def single_keys() -> Iterator[bool]:
    """While inside, keys come one by one, and pastes are marked. False without a terminal."""
    with tty_flags(on="NOFLSH", off="ICANON ECHO ICRNL") as is_terminal:
        if not is_terminal:
            yield False
            return
        send(MARK_PASTES)
        try:
            yield True
        finally:
            send(MARK_NONE)


def _attributes() -> list[Any] | None:
    try:
        return termios.tcgetattr(sys.stdin.fileno())
    except (OSError, ValueError, termios.error):
        return None


def _apply(wanted: list[Any]) -> None:
    """Set the modes. In the background that would stop the program; the terminal may be gone."""
    with contextlib.suppress(OSError, ValueError, termios.error):
        if _is_in_front():
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, wanted)


def _is_in_front() -> bool:
    with contextlib.suppress(OSError, ValueError):
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    return False


def send(sequence: str) -> None:
    """Send a sequence to the terminal, also if a signal has come during a write."""
    with contextlib.suppress(OSError, ValueError):
        with contextlib.suppress(RuntimeError):  # that write goes on when the handler has returned
            sys.stdout.flush()
        os.write(sys.stdout.fileno(), sequence.encode())


def _restore() -> None:
    if _attributes() not in (None, _at_start):
        _apply(_at_start)
        send(f"{MARK_NONE}\x1b[0m")


def _stop(number: int, frame: FrameType | None) -> None:
    """Ctrl+Z: give the shell the terminal as it was, and afterwards the program as it left it."""
    now = _attributes()
    _restore()
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)  # stopped in here
    signal.signal(signal.SIGTSTP, _stop)
    if now and now != _at_start:
        _apply(now)
        if not now[LFLAG] & termios.ICANON:
            send(MARK_PASTES)
    if _at_continue and _is_in_front():
        with contextlib.suppress(RuntimeError):  # the signal came during a write of the row
            _at_continue[-1]()


@contextlib.contextmanager
def drawn_again(draw: Callable[[], object]) -> Iterator[None]:
    """While inside, `draw` is called when the program goes on after Ctrl+Z."""
    _at_continue.append(draw)
    try:
        yield
    finally:
        _at_continue.pop()


def take_utf8() -> None:
    """Let readline take UTF-8 if the locale is C, in which it knows only ASCII, as Python itself
    does (PEP 540).

    It reads the variable from C's environment. Python's own, which commands get, keeps what the
    user has set.
    """
    import locale  # late: for the prompt only

    if locale.setlocale(locale.LC_CTYPE) not in ("C", "POSIX"):
        return
    for name in UTF8_LOCALES:
        with contextlib.suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, name)
            os.putenv("LC_ALL", name)
            return


def end_with_terminal() -> None:
    """End the program when its terminal is gone: libedit reads it again and again then, and sees
    no signal."""
    poll = select.poll()
    poll.register(sys.stdin, 0)
    if poll.poll()[0][1] & select.POLLHUP:
        time.sleep(1)  # for an end in order
        begin_exit(128 + signal.SIGHUP)


class Keys:
    """The terminal's bytes as keys: a character, a control character or a sequence; in a paste,
    PASTED and a character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held_keys = ""  # the beginning of a sequence
        self._is_pasting = False

    def feed(self, data: bytes) -> list[str]:
        """The keys that these bytes end."""
        sequences = KEY.findall(self._held_keys + self._decoder.decode(data))
        self._held_keys = ""
        if sequences and BEGUN.fullmatch(sequences[-1]):
            self._held_keys = sequences.pop()
        keys = []
        for key in sequences:
            if key in (PASTE_BEGINS, PASTE_ENDS):
                self._is_pasting = key == PASTE_BEGINS
            elif self._is_pasting:
                keys.append(PASTED + ("\n" if key in ENTER else key))
            else:
                keys.append(key)
        return keys

    def read(self, *others: int, seconds: float | None = None) -> list[str]:
        """The keys that come next; none after `seconds`, or if one of the files `others` can be
        read. Raises EOFError."""
        terminal = sys.stdin.fileno()
        while True:
            is_esc = self._held_keys in (ESC, ESC * 2)
            patience = ESC_ALONE if is_esc else seconds
            ready = select.select([terminal, *others], [], [], patience)[0]
            if not ready:
                self._held_keys = ""
                return [ESC] if is_esc else []
            if terminal not in ready:
                return []
            data = b""
            with contextlib.suppress(OSError):
                data = os.read(terminal, 1 << 16)
            if not data:  # the terminal is gone
                raise EOFError
            keys = self.feed(data)
            if keys:
                return keys

    def read_all(self, quiet: float) -> list[str]:
        """All keys, until none has come for `quiet` seconds. Raises EOFError."""
        keys: list[str] = []
        while more := self.read(seconds=quiet):
            keys += more
        return keys


class HeldEsc:
    """The Esc that GNU readline holds: it would take it and the next key for one, however late
    that comes.

    Its keyseq-timeout does not count in the way in which Python calls it. Raises AttributeError,
    OSError or ValueError if readline's own variables cannot be reached, such as in a Python that
    was linked statically.
    """

    def __init__(self, readline: ModuleType, end: str) -> None:
        import ctypes  # late: for the prompt only

        self.end = end  # the characters with which Esc ends a line
        self._readline = readline
        self._library = ctypes.CDLL(readline.__file__)
        self._state = ctypes.c_ulong.in_dll(self._library, "rl_readline_state")
        self._held = ctypes.c_char_p.in_dll(self._library, "rl_executing_keyseq")
        self._length = ctypes.c_int.in_dll(self._library, "rl_key_sequence_length")
        self._give_up = self._library.rl_callback_sigcleanup
        self.draw_again = self._library.rl_forced_update_display  # the prompt and the line
        self._last_came = LONG_AGO
        self._last_line = ""  # as it was then

    def ends(self, presses: int) -> Callable[[int, FrameType | None], None]:
        """A handler for the clock's signal while readline reads: so many Esc end the line, fewer
        do nothing."""

        def look(number: int, frame: FrameType | None) -> None:
            # First and without a call: after Ctrl+C Python may come here with the exception set,
            # which no call may see
            if not self._state.value & READING_SEQUENCE:
                return
            held = (self._held.value or b"")[: self._length.value].decode("latin-1")
            if held.strip(ESC):
                return
            self._give_up()
            line = self._readline.get_line_buffer()
            now = time.monotonic()
            count = len(held)
            if line == self._last_line and now - self._last_came < ESC_TWICE:
                count += 1
            self._last_came = now
            self._last_line = line
            if count >= presses:
                self._last_came = LONG_AGO
                for key in self.end:
                    self._library.rl_stuff_char(ord(key))
                self._library.rl_callback_read_char()

        return look


def waiting_keys(quiet: float) -> str:
    """Take what was typed and not read yet, until no key has come for `quiet` seconds, as text."""
    keys: list[str] = []
    with tty_flags(on="NOFLSH", off="ICANON ECHO") as is_terminal, contextlib.suppress(EOFError):
        if is_terminal:
            keys = Keys().read_all(quiet)
    return text_of(keys)


def read_paste() -> str:
    """The rest of a paste whose beginning has been read, and nothing of what follows it."""
    end = PASTE_ENDS.encode()
    data = b""
    while not data.endswith(end):
        begun = max(size for size in range(len(end)) if data.endswith(end[:size]))
        if not select.select([sys.stdin], [], [], PASTE_PAUSE)[0]:
            break  # it has no end
        piece = os.read(sys.stdin.fileno(), len(end) - begun)
        if not piece:
            break
        data += piece
    text = data.removesuffix(end).decode("utf-8", "replace")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def text_of(keys: list[str]) -> str:
    """What these keys write."""
    texts = ["\n" if key in NEWLINE else key.removeprefix(PASTED) for key in keys]
    return "".join(text for text in texts if text.isprintable() or text in "\n\t")
