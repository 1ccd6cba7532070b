"""Signals: Ctrl+C stops the run, twice quickly ends the program; SIGTERM, SIGHUP and SIGQUIT end it in order.

The first Ctrl+C sets the run's Abort: the stream, the tools and the waits see it and end with the history in order.
Code that does not look at it within FORCE_AFTER seconds gets a KeyboardInterrupt, and so does all at a second Ctrl+C.

Shutdown is `graceful_shutdown`: unwind, kill our processes, restore the terminal. Once it has begun, further signals
are ignored; where it takes longer than EXIT_AFTER seconds, the exit is forced.
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
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from coder.cli import terminal_modes
from coder.permissions.sanitize import strip_controls

if TYPE_CHECKING:
    from coder.abort import Abort

# Seconds
FORCE_AFTER = 0.8
WAKE_EVERY = 0.2
EXIT_AFTER = 1.5  # the promise is two

ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

Handler = Callable[[int, FrameType | None], None]
_exit_codes: list[int] = []  # the first one counts; empty until the shutdown begins


class Interrupts:
    """Ctrl+C and ending signals during runs. Both stop the run first, so that its last event comes.

    `presses` counts the Ctrl+C of the newest run, `last` is when the newest signal came (monotonic seconds). `ended`:
    a signal that ends the program has come.
    """

    def __init__(self) -> None:
        self.presses = 0
        self.last = -100.0
        self.ended = False
        self._behind_run: Handler | None = None  # takes Ctrl+C from the end of a run on

    @contextmanager
    def stopping(self, abort: Abort) -> Iterator[None]:
        """While inside, signals stop the run that `abort` belongs to."""
        self.presses, self.ended, forced = 0, False, False

        def press(number: int, frame: FrameType | None) -> None:
            self.presses, self.last = self.presses + 1, time.monotonic()
            abort.set()
            if self.presses > 1 and begin_exit(128 + signal.SIGINT):
                raise KeyboardInterrupt

        def end(number: int, frame: FrameType | None) -> None:
            if begin_exit(128 + number):
                self.ended, self.last = True, time.monotonic()
                abort.set()

        def force(number: int, frame: FrameType | None) -> None:
            nonlocal forced
            asked = self.ended or (self.presses and not _exit_codes)
            if asked and not forced and time.monotonic() - self.last >= FORCE_AFTER:
                forced = True
                raise KeyboardInterrupt

        with contextlib.ExitStack() as stack:
            for each in ENDING:
                if signal.getsignal(each) is _exit:
                    stack.enter_context(handling(each, end))
            before = signal.signal(signal.SIGINT, press)
            try:
                with wake_up(force):
                    yield
            finally:
                signal.signal(signal.SIGINT, self._behind_run or before)
                if self.ended:
                    raise SystemExit(_exit_codes[0])

    @contextmanager
    def deferred_behind_run(self) -> Iterator[None]:
        """What follows on a run in here is not broken off: a Ctrl+C that comes then is raised at the end."""
        late: list[int] = []
        before = signal.getsignal(signal.SIGINT)
        self._behind_run = lambda number, frame: late.append(number)
        try:
            yield
        finally:
            self._behind_run = None
            signal.signal(signal.SIGINT, before)
        if late and not _exit_codes:
            raise KeyboardInterrupt


@contextmanager
def wake_up(handler: Handler) -> Iterator[None]:
    """While inside, a clock wakes the main thread and calls `handler`.

    Python looks for signals before a call that blocks. One that comes between the look and the call does not wake the
    call, and would be seen when something is read, which may be never.
    """
    with handling(signal.SIGALRM, handler):
        clock = signal.setitimer(signal.ITIMER_REAL, WAKE_EVERY, WAKE_EVERY)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, *clock)


@contextmanager
def handling(number: int, handler: Handler = lambda number, frame: None) -> Iterator[None]:
    """While inside, `handler` takes this signal; by default nothing comes of it."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def defer_sigint() -> Iterator[None]:
    """While inside, Ctrl+C waits; it comes as KeyboardInterrupt at the end. For imports, which must not be left half done."""
    pressed: list[int] = []
    with handling(signal.SIGINT, lambda number, frame: pressed.append(number)):
        yield
    if pressed and not _exit_codes:
        raise KeyboardInterrupt


# ---- shutdown ----------------------------------------------------------------------------


@contextmanager
def graceful_shutdown() -> Iterator[None]:
    """Around the whole program: however it ends, afterwards no process of ours is left and the terminal is restored."""
    for number, handler in (*((each, _exit) for each in ENDING), (signal.SIGINT, _exit_at_once)):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, handler)
    sys.excepthook = _report_defect
    threading.excepthook = lambda args: _report_defect(
        args.exc_type, args.exc_value, args.exc_traceback
    )
    terminal_modes.keep()
    try:
        yield
    finally:
        _exit_codes.append(0)
        _clean_up()
        if any(_exit_codes):
            # Python's own end restores the default handlers: a late signal would change the exit code
            for number in (*ENDING, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)


def begin_exit(code: int, seconds: float = EXIT_AFTER) -> bool:
    """Begin the shutdown with this exit code; it is forced after `seconds`. False where it had begun before."""
    if _exit_codes:
        return False
    _exit_codes.append(code)
    # Not threading.Thread: a signal's handler must not wait for its lock
    _thread.start_new_thread(_force_exit, (code, seconds))
    return True


def raise_on_sigint() -> None:
    """From here on Ctrl+C is a KeyboardInterrupt, because the caller handles it."""

    def press(number: int, frame: FrameType | None) -> None:
        if not _exit_codes:
            raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, press)


def _exit(number: int, frame: FrameType | None) -> None:
    if begin_exit(128 + number):
        raise SystemExit(128 + number)


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    """Ctrl+C before there is anything to keep. An exception could be lost in the middle of an import."""
    if not _exit_codes:
        _clean_up()
        os._exit(128 + number)


def _force_exit(code: int, seconds: float) -> None:
    time.sleep(seconds)
    _clean_up()
    os._exit(code)


def _clean_up() -> None:
    """Restore the terminal, kill our processes, remove the temporary folder. Can be called twice."""
    terminal_modes.restore()
    if process := sys.modules.get("coder.tools.process"):
        process.stop_all()
        if process.private_folder.cache_info().currsize:
            shutil.rmtree(process.private_folder(), ignore_errors=True)


def _report_defect(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    """Replace Python's own traceback, which holds text of others unsanitised."""
    frames = traceback.extract_tb(trace)
    text = f"coder: internal error, in coder or in a plugin. {kind.__name__}: {error}"
    places = "".join(f"\n  {each.filename}:{each.lineno} in {each.name}" for each in frames)
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(strip_controls(f"{text}{places}\n"))
        sys.stderr.flush()
