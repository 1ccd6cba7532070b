"""JobThread: a thread that keeps rights of its own, and runs what others give it.

`concurrent.futures` has the like; it imports `logging`, which takes 7 ms of each start.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Generic, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class Job(Generic[T]):
    """A function that a JobThread runs once."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function: Callable[[], T] | None = function
        self._has_ended = threading.Event()
        self._value: T
        self._error: BaseException | None = None

    def run(self) -> None:
        assert self._function
        try:
            self._value = self._function()
        except BaseException as error:
            self._error = error
        self._function = None  # what it holds can be collected
        self._has_ended.set()

    def exception(self) -> BaseException | None:
        """Wait for the end; what the function raised."""
        self._has_ended.wait()
        return self._error

    def result(self) -> T:
        """Wait for the end; what the function returned. Raises what the function raised."""
        error = self.exception()
        if error is None:
            return self._value
        try:
            raise error
        finally:
            del error, self  # the traceback holds this frame


class JobThread:
    """One thread, which runs functions in their order until this object is collected.

    The thread that gives the first function starts it, and Linux gives a new thread the
    restrictions of the one that starts it (landlock(7), seccomp(2)). `is_started`: it
    was given one.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._start_lock = threading.Lock()  # tools that run side by side may give the first one
        self.is_started = False

    def submit(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> Job[T]:
        job = Job(partial(function, *arguments, **named))
        self._jobs.put(job.run)
        with self._start_lock:
            if not self.is_started:
                threading.Thread(
                    target=_run_jobs, args=(self._jobs,), daemon=True, name="jobs"
                ).start()
                self.is_started = True
                weakref.finalize(self, self._jobs.put, None)
        return job


def _run_jobs(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    for run in iter(jobs.get, None):
        run()
        del run  # while the thread waits, what the job holds can be collected
