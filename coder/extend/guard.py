"""Guard: a hook that may fail or hang, which a run outlives.

    HookChain(Guard(Audit(), seconds=5), Guard(compaction, seconds=None))

A failure is reported as a notice, once for each place and run, and the run goes on as if the
hook were not there. What the hook changed before it failed stays changed.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

from coder.abort import Abort, run_in_thread
from coder.events import Events, Notice, resolve
from coder.hooks import HOOK_NAMES, FunctionHooks, Hooks, implements
from coder.types import Aborted, ModelError, ToolError

# An error of this class raised at this place is the hook's answer and not a failure.
ANSWERS: dict[str, type[Exception]] = {
    "before_tool_call": ToolError,
    "after_tool_call": ToolError,
    "before_llm_call": ModelError,
}
IN_CHILD = ("before_llm_call", "after_llm_call", "before_tool_call", "after_tool_call")


def refusal(place: str, text: str) -> Exception:
    """What a hook at this place raises to reject what it stands before or behind."""
    if "tool_call" in place:
        return ToolError(text)
    return ModelError("bad_request", f"{text}, so the request was not sent")


class Guard(Hooks):
    """`hook`, of which no failure ends the run, and which is never called twice at a time.

    Each call has `seconds`, without the time that a consumer of its events takes, and runs in a worker thread;
    a hook that hangs is abandoned there, since Python cannot end it. None: no limit and no thread, for a
    feature of ours. `closed`: a failure rejects what the hook stands before or behind, so a tool's result is an
    error and a request is not sent.
    """

    def __init__(
        self, hook: Hooks, *, name: str = "", seconds: float | None = 30.0, closed: bool = False
    ) -> None:
        self.hook, self.seconds, self.closed = hook, seconds, closed
        self.name = name or type(hook).__name__
        self._turn = threading.RLock()  # sub-agents run in threads of their own
        self._abort = Abort()  # of the current run
        self._reported: set[str] = set()
        for place in HOOK_NAMES:
            if place == "on_run_start" or implements(hook, place):
                setattr(self, place, partial(self._guarded, place))

    def in_child(self) -> Hooks:
        """The hook for the run of a sub-agent: each request and each call, not the run, which is its parent's."""
        places = [place for place in IN_CHILD if implements(self.hook, place)]
        return FunctionHooks(**{place: getattr(self, place) for place in places})

    def _guarded(self, place: str, *args: Any) -> Events[Any]:
        if place == "on_run_start":
            self._abort, self._reported = args[0], set()
            if not implements(self.hook, place):
                return None
        call = self._work if self.seconds is None else self._limited
        try:
            return (yield from call(place, args))
        except Exception as error:
            if isinstance(error, (Aborted, ANSWERS.get(place, Aborted))):
                raise
            self._abort.check()
            if place not in self._reported:
                self._reported.add(place)
                text = f"{type(error).__name__}: {error}"
                yield Notice(f"The hook {self.name} failed ({place}): {text}")
            if self.closed:
                raise refusal(place, f"the hook {self.name} failed: {error}") from error
            return (yield from resolve(getattr(Hooks(), place)(*args)))

    def _work(self, place: str, args: tuple[Any, ...]) -> Events[Any]:
        return (yield from resolve(getattr(self.hook, place)(*args)))

    def _limited(self, place: str, args: tuple[Any, ...]) -> Events[Any]:
        work, left = self._work(place, args), self.seconds or 0.0
        while True:
            try:
                with self._turn:
                    started = time.monotonic()
                    check = partial(self._check, started + left)
                    event = run_in_thread(lambda: next(work), check, f"hook {self.name}")
            except StopIteration as end:
                return end.value
            left -= time.monotonic() - started
            yield event

    def _check(self, end: float) -> None:
        """Raises TimeoutError and Aborted."""
        self._abort.check()
        if time.monotonic() > end:
            raise TimeoutError(f"no answer within {self.seconds:g} s")
