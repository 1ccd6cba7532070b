"""Hooks together: several in a row, plain functions in the place of methods, and a guard around one that may fail or hang.

    HookChain(FunctionHooks(after_tool_call=redact), Guard(Audit(), seconds=5))

What it leaves out: commands of the user's as hooks (command_hooks.py), permissions and compaction, which are hooks
themselves.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal, get_args

from coder.abort import TICK, Abort
from coder.types import (
    Completion,
    DoomLoop,
    Event,
    HookFailed,
    Hooks,
    Message,
    ModelError,
    Request,
    ToolCall,
    ToolError,
    ToolResult,
    Trigger,
    Usage,
    settle,
)

Flow = Generator[Event, None, Any]
Name = Literal["on_run_start", "before_llm_call", "after_llm_call", "before_tool_call", "after_tool_call", "transform_context",
               "convert_to_llm",
               "get_api_key", "get_steering_messages", "get_follow_up_messages", "on_length", "on_doom_loop", "on_compacted"]
NAMES: tuple[str, ...] = get_args(Name)
# What a hook raises there is no failure but its answer.
NO: dict[str, type[Exception]] = {"before_tool_call": ToolError, "after_tool_call": ToolError, "before_llm_call": ModelError}


def has(hook: Hooks, name: str) -> bool:
    """Does a hook do anything of its own at this place?"""
    if isinstance(hook, HookChain):
        return any(has(each, name) for each in hook.hooks)
    if isinstance(hook, Guard):
        return name == "on_run_start" or has(hook.hook, name)
    return name in vars(hook) or getattr(type(hook), name) is not getattr(Hooks, name)


class FunctionHooks(Hooks):
    """Plain functions as hooks: FunctionHooks(before_tool_call=lambda call, ctx: None). Raises TypeError for another name."""

    def __init__(self, **functions: Callable[..., Any]) -> None:
        for name, function in functions.items():
            if name not in NAMES:
                raise TypeError(f"there is no hook {name!r}; there are {', '.join(NAMES)}")
            setattr(self, name, function)


class HookChain(Hooks):
    """Several hooks as one, in this order, one after the other: each sees what those before it have changed (K09).

    The first that answers or blocks a call is the last that is asked about it. The first key counts, and the first of those
    that decide on a repetition; queues are joined.
    """

    def __init__(self, *hooks: Hooks) -> None:
        self.hooks = list(hooks)

    def _of(self, name: str) -> list[Any]:
        return [getattr(hook, name) for hook in self.hooks if has(hook, name)]

    def on_run_start(self, abort: Abort) -> Flow:
        for hook in self._of("on_run_start"):
            yield from settle(hook(abort))

    def before_llm_call(self, request: Request) -> Flow:
        for hook in self._of("before_llm_call"):
            yield from settle(hook(request))

    def after_llm_call(self, completion: Completion) -> Flow:
        for hook in self._of("after_llm_call"):
            yield from settle(hook(completion))

    def before_tool_call(self, call: ToolCall, ctx: Any) -> Flow:
        for hook in self._of("before_tool_call"):
            if result := (yield from settle(hook(call, ctx))):
                return result
        return None

    def after_tool_call(self, call: ToolCall, result: ToolResult) -> Flow:
        for hook in self._of("after_tool_call"):
            result = (yield from settle(hook(call, result))) or result
        return result

    def transform_context(self, messages: list[Message], abort: Abort) -> Flow:
        for hook in self._of("transform_context"):
            messages = yield from settle(hook(messages, abort))
        return messages

    def convert_to_llm(self, messages: list[Message]) -> Flow:
        for hook in self._of("convert_to_llm"):
            messages = yield from settle(hook(messages))
        return messages

    def get_api_key(self) -> Flow:
        for hook in self._of("get_api_key"):
            if key := (yield from settle(hook())):
                return key
        return None

    def get_steering_messages(self) -> Flow:
        return (yield from self._queued("get_steering_messages"))

    def get_follow_up_messages(self) -> Flow:
        return (yield from self._queued("get_follow_up_messages"))

    def _queued(self, name: str) -> Flow:
        messages: list[Message] = []
        for hook in self._of(name):
            messages += yield from settle(hook())
        return messages

    def on_length(self, messages: list[Message], trigger: Trigger, usage: Usage, abort: Abort) -> Flow:
        for hook in self._of("on_length"):
            if (yield from settle(hook(messages, trigger, usage, abort))):
                return True
        return False

    def on_doom_loop(self, event: DoomLoop) -> Flow:
        for hook in self._of("on_doom_loop"):
            return (yield from settle(hook(event)))
        return (yield from settle(super().on_doom_loop(event)))

    def on_compacted(self, messages: list[Message]) -> Flow:
        for hook in self._of("on_compacted"):
            yield from settle(hook(messages))


class Guard(Hooks):
    """One hook that may fail or hang, and the run goes on.

    Each of its calls has `seconds`, not counting the time that a consumer of its events takes, and works on copies, so
    that what failed in the middle has changed nothing. A failure is told as a `hook_failed` event. Then an open guard goes
    on as if the hook were not there; a `closed` one fails the call that the hook stood before or behind: a tool's result
    is an error, a request is not sent. Each call runs in a thread of its own, so what is bound to one (a connection of
    sqlite3's) has to be made for any. A hook that hangs is left behind in its thread; Python cannot end it.

    A ToolError (DeniedError) raised around a tool, or a ModelError before a request, is no failure but the hook's no.
    """

    def __init__(self, hook: Hooks, *, name: str = "", seconds: float = 30.0, closed: bool = False) -> None:
        self.hook = hook
        self.name = name or type(hook).__name__
        self.seconds = seconds
        self.closed = closed
        self._abort = Abort()  # of the run under way

    def _guarded(self, name: str, *args: Any) -> Flow:
        copies, started = [_scratch(each) for each in args], time.monotonic()
        try:
            value = yield from self._limited(name, copies)
        except Exception as error:
            if isinstance(error, NO.get(name, ())):
                raise
            if self._abort.is_set:
                self._abort.check()
            yield HookFailed(self.name, name, f"{type(error).__name__}: {error}", time.monotonic() - started)
            if self.closed:
                raise _closing(self.name, name, error) from error
            return (yield from settle(getattr(Hooks(), name)(*args)))
        for original, changed in zip(args, copies):
            _write_back(original, changed)
        return _own(value, copies, args)

    def _limited(self, name: str, args: list[Any]) -> Flow:
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

    # -- every hook, guarded

    def on_run_start(self, abort: Abort) -> Flow:
        self._abort = abort
        if has(self.hook, "on_run_start"):
            yield from self._guarded("on_run_start", abort)

    def before_llm_call(self, request: Request) -> Flow:
        return self._guarded("before_llm_call", request)

    def after_llm_call(self, completion: Completion) -> Flow:
        return self._guarded("after_llm_call", completion)

    def before_tool_call(self, call: ToolCall, ctx: Any) -> Flow:
        return self._guarded("before_tool_call", call, ctx)

    def after_tool_call(self, call: ToolCall, result: ToolResult) -> Flow:
        return self._guarded("after_tool_call", call, result)

    def transform_context(self, messages: list[Message], abort: Abort) -> Flow:
        return self._guarded("transform_context", messages, abort)

    def convert_to_llm(self, messages: list[Message]) -> Flow:
        return self._guarded("convert_to_llm", messages)

    def get_api_key(self) -> Flow:
        return self._guarded("get_api_key")

    def get_steering_messages(self) -> Flow:
        return self._guarded("get_steering_messages")

    def get_follow_up_messages(self) -> Flow:
        return self._guarded("get_follow_up_messages")

    def on_length(self, messages: list[Message], trigger: Trigger, usage: Usage, abort: Abort) -> Flow:
        return self._guarded("on_length", messages, trigger, usage, abort)

    def on_doom_loop(self, event: DoomLoop) -> Flow:
        return self._guarded("on_doom_loop", event)

    def on_compacted(self, messages: list[Message]) -> Flow:
        return self._guarded("on_compacted", messages)


def _next(work: Generator[Event, None, Any]) -> tuple[bool, Any]:
    """(False, the next event) or (True, the value at the end)."""
    try:
        return False, next(work)
    except StopIteration as end:
        return True, end.value


def _scratch(value: Any) -> Any:
    """What a hook may change, to be changed on trial. Messages themselves are never changed, only replaced."""
    if isinstance(value, Request):
        return dataclasses.replace(value, messages=value.messages[:], tools=value.tools[:], options=dict(value.options))
    if isinstance(value, ToolCall):
        return dataclasses.replace(value, arguments=copy.deepcopy(value.arguments))
    if isinstance(value, ToolResult):  # details may be anything, also what cannot be copied
        return dataclasses.replace(value, content=copy.deepcopy(value.content), details=dict(value.details))
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
    return ToolError(said) if "tool_call" in name else ModelError("bad_request", f"{said}, so nothing was sent")
