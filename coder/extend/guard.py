"""Hooks that may fail: a user's hook, which may also hang (Guard), and a built-in feature (Spared).

    HookChain(Guard(Audit(), seconds=5), Spared(compaction))

A failure is reported as a `hook_failed` event, once for each place and run, and the run goes on as if the
hook were not there. What the hook changed before it failed stays changed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from coder.abort import TICK, Abort
from coder.events import Event, Events, HookFailed, resolve
from coder.hooks import HOOK_NAMES, Hooks, implements
from coder.types import CoderError, ModelError, ToolError

# An error of this class raised at this place is the hook's answer and not a failure.
ANSWERS: dict[str, type[Exception]] = {
    "before_tool_call": ToolError,
    "after_tool_call": ToolError,
    "before_llm_call": ModelError,
}


class Spared(Hooks):
    """A built-in feature that a run can do without, called in the run's own thread without a time limit."""

    def __init__(self, hook: Hooks, *, name: str = "", closed: bool = False) -> None:
        self.hook, self.closed = hook, closed
        self.name = name or type(hook).__name__
        self._abort = Abort()  # of the current run
        self._reported: set[str] = set()
        for place in HOOK_NAMES:
            if place == "on_run_start" or implements(hook, place):
                setattr(self, place, partial(self._guarded, place))

    def _guarded(self, place: str, *args: Any) -> Events[Any]:
        if place == "on_run_start":
            self._abort, self._reported = args[0], set()
        started = time.monotonic()
        try:
            return (yield from self._called(place, args))
        except Exception as error:
            if self._is_answer(place, error):
                raise
            self._abort.check()
            if place not in self._reported:
                self._reported.add(place)
                text = f"{type(error).__name__}: {error}"
                yield HookFailed(self.name, place, text, time.monotonic() - started)
            if self.closed:
                raise _rejection(self.name, place, error) from error
            return (yield from resolve(getattr(Hooks(), place)(*args)))

    def _is_answer(self, place: str, error: Exception) -> bool:
        return isinstance(error, CoderError)

    def _called(self, place: str, args: tuple[Any, ...]) -> Events[Any]:
        return (yield from resolve(getattr(self.hook, place)(*args)))


class Guard(Spared):
    """A user's hook, which may fail or hang.

    Each call has `seconds`, without the time that a consumer of its events takes, and runs in a worker thread;
    a hook that hangs is abandoned there, since Python cannot end it. `closed`: a failure rejects what the hook
    stands before or behind, so a tool's result is an error and a request is not sent.
    """

    def __init__(
        self, hook: Hooks, *, name: str = "", seconds: float = 30.0, closed: bool = False
    ) -> None:
        super().__init__(hook, name=name, closed=closed)
        self.seconds = seconds

    def _is_answer(self, place: str, error: Exception) -> bool:
        return isinstance(error, ANSWERS.get(place, ()))

    def _called(self, place: str, args: tuple[Any, ...]) -> Events[Any]:
        work, left = super()._called(place, args), self.seconds
        while True:
            started = time.monotonic()
            outcome = self._next(work, left)
            if isinstance(outcome, StopIteration):
                return outcome.value
            if isinstance(outcome, BaseException):
                raise outcome
            left -= time.monotonic() - started
            yield outcome

    def _next(self, work: Events[Any], seconds: float) -> Event | BaseException:
        """The next event of the hook's work, or what it raised. Raises TimeoutError and Aborted."""
        outcomes: list[Event | BaseException] = []
        done, end = threading.Event(), time.monotonic() + seconds

        def run() -> None:
            try:
                outcomes.append(next(work))
            except BaseException as error:
                outcomes.append(error)
            done.set()

        threading.Thread(target=run, daemon=True, name=f"hook {self.name}").start()
        while not done.wait(max(0.0, min(TICK, end - time.monotonic()))):
            self._abort.check()
            if time.monotonic() > end:
                raise TimeoutError(f"no answer within {self.seconds:g} s")
        return outcomes[0]


class Serialized(Hooks):
    """A user's hook that is never called twice at a time, since sub-agents run in threads of their own.

    Its events are yielded outside of its turns, so that none waits for the other. A sub-agent's run belongs to that
    of its parent, so `in_child` passes on each request and each call, and not the run.
    """

    IN_CHILD = ("before_llm_call", "after_llm_call", "before_tool_call", "after_tool_call")

    def __init__(
        self, hook: Hooks, lock: threading.RLock, places: Sequence[str] = HOOK_NAMES
    ) -> None:
        self.hook, self.lock = hook, lock
        for place in places:
            if implements(hook, place):
                setattr(self, place, partial(self._turns, place))

    def in_child(self) -> Serialized:
        """The same hook for the run of a sub-agent."""
        return Serialized(self.hook, self.lock, self.IN_CHILD)

    def _turns(self, place: str, *args: Any) -> Events[Any]:
        with self.lock:
            work = resolve(getattr(self.hook, place)(*args))
        while True:
            with self.lock:
                try:
                    event = next(work)
                except StopIteration as end:
                    return end.value
            yield event


def _rejection(hook: str, place: str, error: Exception) -> Exception:
    text = f"the hook {hook} failed: {error}"
    if "tool_call" in place:
        return ToolError(text)
    return ModelError("bad_request", f"{text}, so the request was not sent")
