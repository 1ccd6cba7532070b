"""Signals: Ctrl+C stops the run, twice quickly ends the program; SIGTERM, SIGHUP and SIGQUIT end it in order.

The first Ctrl+C sets the run's Abort: the stream, the tools and the waits see it and end with the history in order. What
does not look at it within `FORCE` seconds gets a KeyboardInterrupt. A second Ctrl+C is a KeyboardInterrupt at once.

There is one way out, `in_order`: the stack unwinds, then no process of ours is left and the terminal is as it was. Once a
signal has asked for the end no other breaks it off, and where it takes longer than `LAST` seconds, it is made short.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

from coder.abort import Abort
from coder.cli import terminal_modes as modes
from coder.providers.text import clean

FORCE = 0.8  # seconds
LOOK = 0.2  # seconds until a signal is seen that came at the wrong moment
LAST = 1.5  # seconds for an orderly end that a signal has asked for: what is promised is two
LAST_LINE = 6.0  # and where a program waits for the last event of the run
PASSED = 5.0  # seconds for an event to reach those who listen, there
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Interrupts:
    """`presses` counts the Ctrl+C of the newest run; `last` is when the newest came (monotonic seconds). With `tells_end` a signal
    that ends the program stops the run first, as Ctrl+C does: a program that reads the events gets the last one, too."""

    def __init__(self) -> None:
        self.presses = 0
        self.last = -100.0
        self.tells_end = False
        self.ended = False  # by such a signal
        self.passing_on = (
            False  # an event is on its way to those who listen, and no step of the run is under way
        )
        self._late: list[int] | None = None  # Ctrl+C behind a run whose end is kept

    @contextmanager
    def stopping(self, abort: Abort) -> Iterator[None]:
        """While inside, Ctrl+C stops the run that `abort` belongs to."""
        self.presses, self.passing_on, self.ended = 0, False, False
        forced, code = False, 0

        def ended(number: int, frame: FrameType | None) -> None:
            nonlocal code
            if leaving(128 + number, LAST_LINE):
                code, self.last, self.ended = 128 + number, time.monotonic(), True
                abort.set()

        def pressed(number: int, frame: FrameType | None) -> None:
            self.presses += 1
            self.last = time.monotonic()
            if self.presses > 1:
                _break_off()
                return
            abort.set()

        def look(number: int, frame: FrameType | None) -> None:
            nonlocal forced
            patience = PASSED if self.tells_end and self.passing_on else FORCE
            asked = code or (self.presses and not _left)
            if asked and not forced and time.monotonic() - self.last >= patience:
                forced = True
                raise KeyboardInterrupt

        ending = [
            number for number in ENDING if self.tells_end and signal.getsignal(number) is _ended
        ]
        before = signal.signal(signal.SIGINT, pressed)
        for number in ending:
            signal.signal(number, ended)
        try:
            with woken(look):
                yield
        finally:
            for number in ending:
                signal.signal(number, _ended)
            signal.signal(signal.SIGINT, before if self._late is None else self._noted)
            if code:
                raise SystemExit(code)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What follows on a run in here is not broken off: a Ctrl+C that comes then is raised at the end."""
        before, self._late = signal.getsignal(signal.SIGINT), []
        try:
            yield
        finally:
            late, self._late = self._late, None
            signal.signal(signal.SIGINT, before)
        if late and not _left:
            raise KeyboardInterrupt

    def _noted(self, number: int, frame: FrameType | None) -> None:
        if self._late is not None:
            self._late.append(number)


@contextmanager
def woken(
    look: Callable[[int, FrameType | None], None] = lambda number, frame: None,
) -> Iterator[None]:
    """While inside, a clock wakes the main thread. Python looks for signals before a call that blocks, and one that comes behind
    that look does not wake the call: it would be seen when something is read, which may be never."""
    handler, clock = (
        signal.signal(signal.SIGALRM, look),
        signal.setitimer(signal.ITIMER_REAL, LOOK, LOOK),
    )
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *clock)
        signal.signal(signal.SIGALRM, handler)


@contextmanager
def held() -> Iterator[None]:
    """While inside, Ctrl+C waits; it comes as KeyboardInterrupt at the end. For imports, which must not be left half done."""
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed and not _left:
        raise KeyboardInterrupt


# ---- the end ---------------------------------------------------------------------------------------------

_left: list[int] = []  # the exit code, once the end has begun


@contextmanager
def in_order() -> Iterator[None]:
    """Around the whole program: whatever ends it, afterwards no process of ours is left and the terminal is as it was."""
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, _ended)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, _at_once)
    sys.excepthook = _tell
    threading.excepthook = lambda args: _tell(args.exc_type, args.exc_value, args.exc_traceback)
    modes.keep()
    try:
        yield
    finally:
        _left.append(0)
        _clear_up()
        # Python's own end gives signals their default back, and a late one would change the exit
        # code
        if any(_left):
            for number in (*ENDING, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)


def leaving(code: int, seconds: float = LAST) -> bool:
    """The end begins, with this exit code, and no signal breaks it off from now on; False where it had begun before.
    `seconds` is the time that it has."""
    if _left:
        return False
    _left.append(code)
    # Not threading.Thread: a signal's handler must not wait for its lock
    _thread.start_new_thread(_cut_short, (code, seconds))
    return True


def _ended(number: int, frame: FrameType | None) -> None:
    if leaving(128 + number):
        raise SystemExit(128 + number)


def _at_once(number: int, frame: FrameType | None) -> None:
    """Ctrl+C where there is nothing to keep. Without an exception, which may be lost in the middle of an import, or leave its lock held."""
    if not _left:
        _clear_up()
        os._exit(128 + number)


def take_presses() -> None:
    """From here on Ctrl+C is a KeyboardInterrupt: somebody is there to take it."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, _pressed)


def _pressed(number: int, frame: FrameType | None) -> None:
    """Ctrl+C where nobody else takes it."""
    if not _left:
        raise KeyboardInterrupt


def _break_off() -> None:
    """The second Ctrl+C."""
    if leaving(128 + signal.SIGINT):
        raise KeyboardInterrupt


def _cut_short(code: int, seconds: float) -> None:
    """In a thread: after `seconds` the end is made without whoever holds it up."""
    time.sleep(seconds)
    _clear_up()
    os._exit(code)


def _clear_up() -> None:
    """No process of ours, no folder for temporary files, the terminal as it was. May be done twice."""
    modes.restore()
    for number in _descendants():
        with contextlib.suppress(OSError):
            os.kill(number, signal.SIGKILL)
    if process := sys.modules.get("coder.tools.process"):
        process.stop_all()
        if process.private_folder.cache_info().currsize:
            shutil.rmtree(process.private_folder(), ignore_errors=True)


def _descendants() -> list[int]:
    """Our children and theirs, by process id; none where the system does not tell."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            parent = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found = children.get(os.getpid(), [])
    for number in found:
        found += children.get(number, [])
    return found


def _tell(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    """What nobody has caught, in place of Python's own lines: they hold text of others as it is."""
    places = [
        f"  {frame.filename}:{frame.lineno} in {frame.name}"
        for frame in traceback.extract_tb(trace)
    ]
    text = clean(
        "\n".join(
            [f"coder: ended by a defect in it or in a plugin. {kind.__name__}: {error}", *places]
        )
    )
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
