"""The hooks that go into a run, and several hooks as one.

    hooks = HookChain(permissions, FunctionHooks(after_tool_call=redact))

A hook is a plain method or a generator that yields events and returns its value. A ToolError (DeniedError) raised
around a tool answers its call, a ModelError raised before a request fails it. Any other exception ends the
run: it is a bug, and the history is left valid. extend/guard.py has a guard for hooks that may fail or hang.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from coder.abort import Abort
from coder.events import DoomLoop, Events, Outcome, resolve
from coder.toolset import ToolContext
from coder.types import Completion, Message, Request, ToolCall, ToolResult, Trigger, Usage


class Hooks:
    """All hooks of a run. A method that is not overridden changes nothing; on_doom_loop asks the user."""

    def on_run_start(self, abort: Abort) -> Outcome[None]:
        """A run begins; `abort` is its token, for hooks that wait."""

    def before_llm_call(self, request: Request) -> Outcome[None]:
        """Change the request in place: messages, tools, system, options."""

    def after_llm_call(self, completion: Completion) -> Outcome[None]:
        """Look at the answer."""

    def before_tool_call(self, call: ToolCall, ctx: ToolContext) -> Outcome[ToolResult | None]:
        """Change `call.arguments` in place, or return a result, which answers the call instead of the tool.
        The arguments have the types of the tool's schema. Not called for a call whose arguments are unusable."""

    def after_tool_call(self, call: ToolCall, result: ToolResult) -> Outcome[ToolResult | None]:
        """Return another result, or None to keep it."""

    def transform_context(self, messages: list[Message], abort: Abort) -> Outcome[list[Message]]:
        """Return another list for this request only: prune, inject. The history stays as it is."""
        return messages

    def convert_to_llm(self, messages: list[Message]) -> Outcome[list[Message]]:
        """Return API messages instead of those with custom roles. What is left of those is not sent."""
        return messages

    def get_api_key(self) -> Outcome[str | None]:
        """Called before every model call; None keeps the model's own key."""

    def get_steering_messages(self) -> Outcome[Sequence[Message]]:
        """Called at the start, before the end, and after each group of tools: messages then skip the remaining calls."""
        return ()

    def get_follow_up_messages(self) -> Outcome[Sequence[Message]]:
        """Called when the model is done and there is no steering; messages continue the run."""
        return ()

    def on_length(
        self, messages: list[Message], trigger: Trigger, usage: Usage, abort: Abort
    ) -> Outcome[bool]:
        """The context may be too long: shorten `messages` in place and return True, or return False.

        Called with "threshold" before a request (`usage` is that of the last answer), with "length" and "overflow"
        when the model ran into its limit; at most `max_compactions` times between two answers."""
        return False

    def on_doom_loop(self, event: DoomLoop) -> Outcome[bool]:
        """Return True to run the repeated call after all. The default asks the consumer of the events."""
        yield event
        return event.allowed

    def on_compacted(self, messages: list[Message]) -> Outcome[None]:
        """The history was shortened: attach again what must not be lost."""


HOOK_NAMES = tuple(name for name in vars(Hooks) if not name.startswith("_"))


def implements(hook: Hooks, name: str) -> bool:
    """Does this hook override the method?"""
    if isinstance(hook, HookChain):
        return any(implements(each, name) for each in hook.hooks)
    return name in vars(hook) or getattr(type(hook), name) is not getattr(Hooks, name)


class FunctionHooks(Hooks):
    """Plain functions as hooks: FunctionHooks(before_tool_call=lambda call, ctx: None)."""

    def __init__(self, **functions: Callable[..., Any]) -> None:
        for name, function in functions.items():
            if name not in HOOK_NAMES:
                raise TypeError(f"there is no hook {name!r}; known: {', '.join(HOOK_NAMES)}")
            setattr(self, name, function)


# How the answers of several hooks become one. Where a name is in none of these, all hooks are just called.
FIRST = {"before_tool_call", "get_api_key", "on_length"}  # the first answer counts
JOINED = {"get_steering_messages", "get_follow_up_messages"}
CHANGED = {"after_tool_call": 1, "transform_context": 0, "convert_to_llm": 0}  # which argument


class HookChain(Hooks):
    """Several hooks as one, called in order: each sees what those before it have changed."""

    def __init__(self, *hooks: Hooks) -> None:
        self.hooks = list(hooks)
        for name in HOOK_NAMES:
            setattr(self, name, partial(self._call, name))

    def _call(self, name: str, *args: Any) -> Events[Any]:
        methods = [getattr(hook, name) for hook in self.hooks if implements(hook, name)]
        if (
            name == "on_doom_loop"
        ):  # the first hook decides; without one, the consumer of the events
            decide = methods[0] if methods else Hooks().on_doom_loop
            return (yield from resolve(decide(*args)))
        values, place = list(args), CHANGED.get(name)
        result: Any = [] if name in JOINED else None if place is None else args[place]
        for method in methods:
            answer = yield from resolve(method(*values))
            if name in JOINED:
                result += answer
            elif name in FIRST and answer:
                return answer
            elif place is not None and answer is not None:
                result = values[place] = answer
        return result
