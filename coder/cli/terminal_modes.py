"""The terminal's modes: changed for a while, given back before we stop or end, however that comes.

`kept` remembers how the terminal was when we began.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

try:
    import termios
except ImportError:  # no POSIX terminal
    termios = None  # type: ignore[assignment]

MARK_PASTES, MARK_NONE = "\x1b[?2004h", "\x1b[?2004l"
AS_EVER = f"{MARK_NONE}\x1b[0m\x1b[?25h\x1b]0;\x07"  # pastes unmarked, no colour, a cursor, no title of ours

LOCAL = 3  # where the local modes are in termios' list

_at_first: list[Any] = []  # the attributes when we began; none: no terminal, or not begun


@contextlib.contextmanager
def local_modes(on: str = "", off: str = "") -> Iterator[bool]:
    """While inside, local modes of the terminal on stdin are on or off; False, and nothing done, where there is none."""
    before = attributes()
    if before is None:
        yield False
        return
    _set(_changed(before, on, off))
    try:
        yield True
    finally:
        _set(before)


@contextlib.contextmanager
def raw() -> Iterator[None]:
    """While inside, each key and each byte of output goes through the terminal on stdin as it is."""
    with local_modes(off="ECHO ICANON IEXTEN ISIG") as there:
        if there and (now := attributes()):
            _set(
                [
                    now[0] & ~(termios.ICRNL | termios.IXON | termios.ISTRIP | termios.BRKINT),
                    now[1] & ~termios.OPOST,
                    *now[2:],
                ]
            )
        yield


def modes_again(on: str, off: str) -> bool:
    """Set them again if the terminal is ours and has others: a shell resets them when we come back from a stop. Was it so?"""
    now = attributes()
    if now is None or not _ours() or _changed(now, on, off) == now:
        return False
    _set(_changed(now, on, off))
    return True


@contextlib.contextmanager
def pastes_marked() -> Iterator[None]:
    """While inside, the terminal marks what is pasted, so that a newline in it is no Enter."""
    say(MARK_PASTES)
    try:
        yield
    finally:
        say(MARK_NONE)


def say(sequence: str) -> None:
    """Send the terminal a sequence of ours; it may be gone."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.write(sequence)
        sys.stdout.flush()


def attributes() -> list[Any] | None:
    """As termios has them; None where stdin is no terminal, or it is gone."""
    if termios is None:
        return None
    try:
        return termios.tcgetattr(sys.stdin.fileno())
    except (OSError, ValueError, termios.error):
        return None


def _ours() -> bool:
    """Are we in the terminal's foreground? Who is not is stopped by setting its modes."""
    with contextlib.suppress(OSError, ValueError):
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    return False


def _set(wanted: list[Any]) -> None:
    with contextlib.suppress(OSError, ValueError, termios.error):  # the terminal may be gone
        if _ours():
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, wanted)


def _changed(before: list[Any], on: str, off: str) -> list[Any]:
    modes = before[LOCAL]
    for name in on.split():
        modes |= getattr(termios, name)
    for name in off.split():
        modes &= ~getattr(termios, name)
    return [*before[:LOCAL], modes, *before[LOCAL + 1 :]]


# ---- from our beginning to our end -----------------------------------------------------------------------


def keep() -> None:
    """Remember how the terminal is, and give it back so while Ctrl+Z has stopped us."""
    _at_first[:] = attributes() or []
    if _at_first and signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
        signal.signal(signal.SIGTSTP, _stopped)


def restore() -> None:
    """Make the terminal what it was when we began, if anything of ours is still in it."""
    now = attributes()
    if _at_first and now is not None and now != _at_first:
        _set(_at_first)
        say(AS_EVER)


def _stopped(number: int, frame: FrameType | None) -> None:
    """Ctrl+Z: the shell gets the terminal as it was; afterwards we have it as we left it."""
    now = attributes()
    restore()
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)  # we are stopped in here
    signal.signal(signal.SIGTSTP, _stopped)
    if now and _ours() and now != attributes():
        _set(now)
        # Who reads key by key has them marked
        say("" if now[LOCAL] & termios.ICANON else MARK_PASTES)
