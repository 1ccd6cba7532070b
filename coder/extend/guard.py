"""Guards around hooks: a hook that may fail or hang (Guard), and a feature that a run can do without (Spared).

    HookChain(Guard(Audit(), seconds=5), Spared(compaction))

A failure is reported as a `hook_failed` event, and the run goes on.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

from coder.abort import TICK, Abort
from coder.events import Event, Events, HookFailed, resolve
from coder.hooks import HOOK_NAMES, Hooks, implements
from coder.types import CoderError, ModelError, Request, ToolCall, ToolError, ToolResult

# An error of this class raised at this place is the hook's answer and not a failure.
ANSWERS: dict[str, type[Exception]] = {
    "before_tool_call": ToolError,
    "after_tool_call": ToolError,
    "before_llm_call": ModelError,
}


class Guard(Hooks):
    """One hook that may fail or hang.

    Each of its calls has `seconds`, without the time that a consumer of its events takes, and works on copies,
    so that a failure in the middle has changed nothing. After a failure an open guard goes on as if the hook
    were not there; `closed`: the call fails, so a tool's result is an error and a request is not sent. Each call
    runs in a worker thread of its own; a hook that hangs is left behind there, since Python cannot end it.
    """

    def __init__(
        self, hook: Hooks, *, name: str = "", seconds: float = 30.0, closed: bool = False
    ) -> None:
        self.hook = hook
        self.name = name or type(hook).__name__
        self.seconds = seconds
        self.closed = closed
        self._abort = Abort()  # of the current run
        for place in HOOK_NAMES:
            if place != "on_run_start" and implements(hook, place):
                setattr(self, place, partial(self._guarded, place))

    def on_run_start(self, abort: Abort) -> Events[None]:
        self._abort = abort
        if implements(self.hook, "on_run_start"):
            yield from self._guarded("on_run_start", abort)

    def _guarded(self, name: str, *args: Any) -> Events[Any]:
        copies, started = [_scratch(each) for each in args], time.monotonic()
        try:
            value = yield from self._limited(name, copies)
        except Exception as error:
            if isinstance(error, ANSWERS.get(name, ())):
                raise
            if self._abort.is_set:
                self._abort.check()
            yield HookFailed(
                self.name, name, f"{type(error).__name__}: {error}", time.monotonic() - started
            )
            if self.closed:
                raise _closing(self.name, name, error) from error
            return (yield from resolve(getattr(Hooks(), name)(*args)))
        for original, changed in zip(args, copies):
            _write_back(original, changed)
        return _own(value, copies, args)

    def _limited(self, name: str, args: list[Any]) -> Events[Any]:
        """Call the hook, and take its events one by one, each step in a thread and within what is left of the time."""
        left = self.seconds
        value, left = self._step(lambda: getattr(self.hook, name)(*args), left)
        if not isinstance(value, Generator):
            return value
        work = value
        while True:
            (over, value), left = self._step(lambda: _next(work), left)
            if over:
                return value
            yield value

    def _step(self, work: Callable[[], Any], left: float) -> tuple[Any, float]:
        """(what `work` returns, the seconds left). Raises what it raises, TimeoutError, or Aborted."""
        outcome: list[tuple[Any, BaseException | None]] = []
        done, started = threading.Event(), time.monotonic()

        def run() -> None:
            try:
                outcome.append((work(), None))
            except BaseException as error:
                outcome.append((None, error))
            done.set()

        threading.Thread(target=run, daemon=True, name=f"hook {self.name}").start()
        while not done.wait(min(TICK, max(0.0, left))):
            self._abort.check()
            if time.monotonic() - started > left:
                raise TimeoutError(f"no answer within {self.seconds:g} s")
        value, error = outcome[0]
        if error:
            raise error
        return value, left - (time.monotonic() - started)


class Spared(Hooks):
    """A hook that a run can do without: after an unexpected exception, which is reported once, the run goes on
    as if it were not there. Nothing of it is undone, and it has no time limit."""

    def __init__(self, hook: Hooks) -> None:
        self.hook = hook
        self._reported = False
        for place in HOOK_NAMES:
            if implements(hook, place):
                setattr(self, place, partial(self._spared, place))

    def _spared(self, place: str, *args: Any) -> Events[Any]:
        started = time.monotonic()
        try:
            return (yield from resolve(getattr(self.hook, place)(*args)))
        except CoderError:
            raise
        except Exception as error:
            if not self._reported:
                self._reported = True
                yield HookFailed(
                    type(self.hook).__name__,
                    place,
                    f"{type(error).__name__}: {error}",
                    time.monotonic() - started,
                )
            return (yield from resolve(getattr(Hooks(), place)(*args)))


def _next(work: Generator[Event, None, Any]) -> tuple[bool, Any]:
    """(False, the next event) or (True, the value at the end)."""
    try:
        return False, next(work)
    except StopIteration as end:
        return True, end.value


def _scratch(value: Any) -> Any:
    """What a hook may change, to be changed on trial. Messages themselves are never changed, only replaced."""
    if isinstance(value, Request):
        return dataclasses.replace(
            value, messages=value.messages[:], tools=value.tools[:], options=dict(value.options)
        )
    if isinstance(value, ToolCall):
        return dataclasses.replace(value, arguments=copy.deepcopy(value.arguments))
    if isinstance(value, ToolResult):  # details may be anything, also what cannot be copied
        return dataclasses.replace(
            value, content=copy.deepcopy(value.content), details=dict(value.details)
        )
    return value[:] if isinstance(value, list) else value


def _write_back(original: Any, changed: Any) -> None:
    if original is changed:
        return
    if isinstance(original, list):
        original[:] = changed
        return
    for each in dataclasses.fields(original):
        setattr(original, each.name, getattr(changed, each.name))


def _own(value: Any, copies: Sequence[Any], args: Sequence[Any]) -> Any:
    """A hook that gives back what it was given gives back ours."""
    return next((theirs for ours, theirs in zip(copies, args) if value is ours), value)


def _closing(hook: str, name: str, error: Exception) -> Exception:
    said = f"the hook {hook} failed: {error}"
    return (
        ToolError(said)
        if "tool_call" in name
        else ModelError("bad_request", f"{said}, so nothing was sent")
    )
