"""Signals: Ctrl+C stops the run, twice quickly ends the program; SIGTERM and SIGHUP end it in order.

The first Ctrl+C sets the run's Abort: the stream, the tools and the waits see it and end with the history in order. What
does not look at it within `FORCE` seconds gets a KeyboardInterrupt. A second Ctrl+C is a KeyboardInterrupt at once.

What it leaves out: Ctrl+C at the prompt (keyboard.py), Ctrl+Z (the system does it).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from coder.abort import Abort

FORCE = 0.8  # seconds


class Interrupts:
    """`presses` counts the Ctrl+C of the newest run; `last` is when the newest came (monotonic seconds)."""

    def __init__(self) -> None:
        self.presses = 0
        self.last = -100.0
        self._late: list[int] | None = None  # Ctrl+C behind a run whose end is kept

    @contextmanager
    def stopping(self, abort: Abort) -> Iterator[None]:
        """While inside, Ctrl+C stops the run that `abort` belongs to."""
        self.presses = 0

        def pressed(number: int, frame: FrameType | None) -> None:
            self.presses += 1
            self.last = time.monotonic()
            if self.presses > 1:
                raise KeyboardInterrupt
            signal.setitimer(signal.ITIMER_REAL, FORCE)
            abort.set()

        def force(number: int, frame: FrameType | None) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, pressed), signal.signal(signal.SIGALRM, force)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGINT, before[0] if self._late is None else self._noted)
            signal.signal(signal.SIGALRM, before[1])

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What follows on a run in here is not broken off: a Ctrl+C that comes then is raised at the end."""
        before, self._late = signal.getsignal(signal.SIGINT), []
        try:
            yield
        finally:
            late, self._late = self._late, None
            signal.signal(signal.SIGINT, before)
        if late:
            raise KeyboardInterrupt

    def _noted(self, number: int, frame: FrameType | None) -> None:
        if self._late is not None:
            self._late.append(number)


@contextmanager
def held() -> Iterator[None]:
    """While inside, Ctrl+C waits; it comes as KeyboardInterrupt at the end. For imports, which must not be left half done."""
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def end_in_order() -> None:
    """Let SIGTERM and SIGHUP unwind the program, so that children are stopped and the terminal is restored."""
    def ended(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, ended)
    signal.signal(signal.SIGHUP, ended)
