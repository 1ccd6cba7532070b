"""Abort: one cancel token for a run.

Setting it shuts the socket of the stream, and stops tools, waits, hooks and sub-agents. A time
limit is an abort with the reason "max_time".

Python code that neither waits nor looks at the token is not interrupted. In the main thread Ctrl+C
does that (KeyboardInterrupt); cli/ uses both.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from coder.types import Aborted, T

TICK = 0.05  # seconds between two checks of the token while waiting


class Abort:
    """Set once, from any thread or signal handler; stays set. Holds no lock, so that a signal
    handler may set it."""

    def __init__(self) -> None:
        self.reason = ""  # "" until set
        self._callbacks: list[Callable[[], None]] = []

    def set(self, reason: str = "aborted") -> None:
        """Cancel. The first reason counts. Callbacks run in this thread and must not raise."""
        self.reason = self.reason or reason
        for callback in list(self._callbacks):
            callback()

    def is_set(self) -> bool:
        return bool(self.reason)

    def check(self) -> None:
        """Raise Aborted if set."""
        if self.reason:
            raise Aborted(self.reason)

    def wait(self, seconds: float) -> None:
        """Sleep, but not past an abort. Raises Aborted."""
        end = time.monotonic() + seconds
        left = seconds
        while left > 0 and not self.reason:
            time.sleep(min(TICK, left))
            left = end - time.monotonic()
        self.check()

    @contextmanager
    def calling(self, callback: Callable[[], None]) -> Iterator[None]:
        """While inside, `callback` is called when the token is set, at once if it was before.

        It may be called twice: make it harmless.
        """
        self._callbacks.append(callback)
        try:
            if self.reason:
                callback()
            yield
        finally:
            self._callbacks.remove(callback)

    @contextmanager
    def child(self, max_seconds: float | None = None) -> Iterator[Abort]:
        """A token for a part of the work. It is set when this one is, or after `max_seconds` (as
        "max_time"); to set it does not set this one."""
        token = Abort()
        with self.calling(lambda: token.set(self.reason)):
            if max_seconds is None:
                yield token
                return
            clock = threading.Timer(max_seconds, token.set, ("max_time",))
            clock.daemon = True
            try:
                clock.start()
                yield token
            finally:
                clock.cancel()


def run_in_thread(work: Callable[[], T], check: Callable[[], object], name: str) -> T:
    """What `work` returns or raises, run in a worker thread.

    `check` is called every TICK seconds; if it raises, the thread goes on alone, since Python
    cannot end it.
    """
    values: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            values.append(work())
        except BaseException as error:
            errors.append(error)
        done.set()

    threading.Thread(target=run, daemon=True, name=name).start()
    while not done.wait(TICK):
        check()
    if errors:
        raise errors[0]
    return values[0]
