"""The terminal's modes: changed for a while, and restored before the program stops or ends, however that comes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import termios
from collections.abc import Iterator
from types import FrameType
from typing import Any

MARK_PASTES, MARK_NONE = "\x1b[?2004h", "\x1b[?2004l"
# Bracketed paste off, attributes reset, cursor visible
RESET = f"{MARK_NONE}\x1b[0m\x1b[?25h"
IFLAG, OFLAG, LFLAG = 0, 1, 3  # places in termios' list

Attributes = list[Any]
_at_start: Attributes = []  # empty: no terminal, or not begun


@contextlib.contextmanager
def tty_flags(on: str = "", off: str = "") -> Iterator[bool]:
    """While inside, local flags of the terminal on stdin, such as "ECHO", are on or off. False where there is none."""
    before = attributes()
    if before is None:
        yield False
        return
    _apply(_with_flags(before, on, off))
    try:
        yield True
    finally:
        _apply(before)


@contextlib.contextmanager
def raw() -> Iterator[None]:
    """While inside, each key and each byte of output goes through the terminal on stdin as it is."""
    with tty_flags(off="ECHO ICANON IEXTEN ISIG") as is_terminal:
        if is_terminal and (now := attributes()):
            now[IFLAG] &= ~(termios.ICRNL | termios.IXON | termios.ISTRIP | termios.BRKINT)
            now[OFLAG] &= ~termios.OPOST
            _apply(now)
        yield


@contextlib.contextmanager
def single_keys() -> Iterator[bool]:
    """While inside, keys come one by one and unseen, and pastes are marked. False where there is no terminal."""
    with tty_flags(on="NOFLSH", off="ICANON ECHO") as is_terminal:
        if is_terminal:
            send(MARK_PASTES)
        try:
            yield is_terminal
        finally:
            if is_terminal:
                send(MARK_NONE)


def renew_single_keys() -> None:
    """Set them again where a shell has reset them, which it does when the program comes back from a stop."""
    now = attributes()
    if now and _in_foreground() and now != (wanted := _with_flags(now, "NOFLSH", "ICANON ECHO")):
        _apply(wanted)
        send(MARK_PASTES)


def send(sequence: str) -> None:
    """Send the terminal an escape sequence; it may be gone."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.write(sequence)
        sys.stdout.flush()


def attributes() -> Attributes | None:
    """As termios has them; None where stdin is no terminal, or it is gone."""
    try:
        return termios.tcgetattr(sys.stdin.fileno())
    except (OSError, ValueError, termios.error):
        return None


def _in_foreground() -> bool:
    """Whether the terminal is ours. A program in the background is stopped by setting its modes."""
    with contextlib.suppress(OSError, ValueError):
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    return False


def _apply(wanted: Attributes) -> None:
    with contextlib.suppress(OSError, ValueError, termios.error):  # the terminal may be gone
        if _in_foreground():
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, wanted)


def _with_flags(before: Attributes, on: str, off: str) -> Attributes:
    changed = list(before)
    for name in on.split():
        changed[LFLAG] |= getattr(termios, name)
    for name in off.split():
        changed[LFLAG] &= ~getattr(termios, name)
    return changed


# ---- from start to end -------------------------------------------------------------------


def keep() -> None:
    """Remember the terminal's modes, and restore them also while Ctrl+Z has stopped the program."""
    _at_start[:] = attributes() or []
    if _at_start and signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
        signal.signal(signal.SIGTSTP, _stop)


def restore() -> None:
    """Restore the modes from the start, if anything of ours is still in them."""
    now = attributes()
    if _at_start and now is not None and now != _at_start:
        _apply(_at_start)
        send(RESET)


def _stop(number: int, frame: FrameType | None) -> None:
    """Ctrl+Z: the shell gets the terminal as it was; afterwards the program has it as it left it."""
    now = attributes()
    restore()
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)  # stopped in here
    signal.signal(signal.SIGTSTP, _stop)
    if now and _in_foreground() and now != attributes():
        _apply(now)
        send("" if now[LFLAG] & termios.ICANON else MARK_PASTES)
