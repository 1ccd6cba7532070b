"""The hooks that go into a run, and several hooks as one.

    hooks = HookChain(permissions, FunctionHooks(after_tool_call=redact))

A hook is a plain method, or a generator that yields events and returns its value. It is called by
position: the names of its parameters are its own. A ToolError (DeniedError) raised around a tool
becomes the result of the call. A ModelError from a hook around a request (transform_context to
after_llm_call) is a failed attempt. Any other exception ends the run: it is a bug, and the history
is left valid. extend/guard.py has a guard for hooks that may fail or hang.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from coder.abort import Abort
from coder.events import DoomLoop, Events, Outcome, resolve
from coder.toolset import ToolContext
from coder.types import Completion, Message, Request, ToolCall, ToolResult, Trigger, Usage


class Hooks:
    """All hooks of a run.

    One that is not overridden changes nothing; on_doom_loop asks the user.
    """

    def on_run_start(self, abort: Abort) -> Outcome[None]:
        """A run begins; `abort` is its token, for hooks that wait."""

    def before_llm_call(self, request: Request) -> Outcome[None]:
        """Change the request in place: messages, tools, system, options."""

    def after_llm_call(self, completion: Completion) -> Outcome[None]:
        """Look at the answer."""

    def before_tool_call(self, call: ToolCall, ctx: ToolContext) -> Outcome[ToolResult | None]:
        """Change `call.arguments` in place, or return a result; then the tool is not run. The
        arguments have the types of the tool's schema. Not called for a call whose arguments are
        unusable."""

    def after_tool_call(self, call: ToolCall, result: ToolResult) -> Outcome[ToolResult | None]:
        """Return another result, or None to keep it."""

    def transform_context(self, messages: list[Message], abort: Abort) -> Outcome[list[Message]]:
        """Return another list for this request only: prune, inject. The history stays as it is."""
        return messages

    def convert_to_llm(self, messages: list[Message]) -> Outcome[list[Message]]:
        """Return API messages instead of those with custom roles, which are not sent."""
        return messages

    def get_api_key(self) -> Outcome[str | None]:
        """Called before every model call; None keeps the model's own key."""

    def get_steering_messages(self) -> Outcome[Sequence[Message]]:
        """Called at the start, after each group of tools (messages then skip the calls that are
        left), and when the model is done."""
        return ()

    def get_follow_up_messages(self) -> Outcome[Sequence[Message]]:
        """Called when the model is done and there is no steering; messages continue the run."""
        return ()

    def on_length(
        self, messages: list[Message], trigger: Trigger, usage: Usage, abort: Abort
    ) -> Outcome[bool]:
        """The context may be too long: shorten `messages` in place; return whether you did.

        `usage` is that of the newest answer in the list; zeros: unknown. Called with "threshold"
        before each request, with "length" and "overflow" when an answer was cut or a request was
        rejected because the context is full; not any more after `max_compactions` times between two
        answers."""
        return False

    def on_doom_loop(self, event: DoomLoop) -> Outcome[bool]:
        """Return True to let the run go on. The default asks the consumer of the events."""
        yield event
        return event.allowed

    def on_compacted(self, messages: list[Message]) -> Outcome[None]:
        """The history was shortened: attach again what must not be lost."""


HOOK_NAMES = tuple(name for name in vars(Hooks) if not name.startswith("_"))


def implements(hook: Hooks, name: str) -> bool:
    """Does this hook override the method?"""
    if type(hook) is HookChain:  # not a subclass, which may do more than its hooks
        return any(implements(inner, name) for inner in hook.hooks)
    return name in vars(hook) or getattr(type(hook), name) is not getattr(Hooks, name)


class FunctionHooks(Hooks):
    """Plain functions as hooks: FunctionHooks(before_tool_call=lambda call, ctx: None)."""

    def __init__(self, **functions: Callable[..., Any]) -> None:
        for name, function in functions.items():
            if name not in HOOK_NAMES:
                raise TypeError(f"there is no hook {name!r}; known: {', '.join(HOOK_NAMES)}")
            setattr(self, name, function)


class HookChain(Hooks):
    """Several hooks as one, called in order: each sees what those before it have changed.

    Of what they return: the first result, key or compaction counts (`before_tool_call`,
    `get_api_key`, `on_length`; the hooks after it are not called). The first hook that overrides
    `on_doom_loop` decides there. Queued messages are joined. A changed list or result goes on to
    the next hook.
    """

    def __init__(self, *hooks: Hooks) -> None:
        self.hooks = list(hooks)

    def on_run_start(self, abort: Abort) -> Events[None]:
        for hook in self.hooks:
            yield from resolve(hook.on_run_start(abort))

    def before_llm_call(self, request: Request) -> Events[None]:
        for hook in self.hooks:
            yield from resolve(hook.before_llm_call(request))

    def after_llm_call(self, completion: Completion) -> Events[None]:
        for hook in self.hooks:
            yield from resolve(hook.after_llm_call(completion))

    def on_compacted(self, messages: list[Message]) -> Events[None]:
        for hook in self.hooks:
            yield from resolve(hook.on_compacted(messages))

    # The first that returns something decides

    def before_tool_call(self, call: ToolCall, ctx: ToolContext) -> Events[ToolResult | None]:
        for hook in self.hooks:
            result = yield from resolve(hook.before_tool_call(call, ctx))
            if result:
                return result
        return None

    def get_api_key(self) -> Events[str | None]:
        for hook in self.hooks:
            key = yield from resolve(hook.get_api_key())
            if key:
                return key
        return None

    def on_length(
        self, messages: list[Message], trigger: Trigger, usage: Usage, abort: Abort
    ) -> Events[bool]:
        for hook in self.hooks:
            is_shorter = yield from resolve(hook.on_length(messages, trigger, usage, abort))
            if is_shorter:
                return True
        return False

    def on_doom_loop(self, event: DoomLoop) -> Events[bool]:
        """The first hook decides, also with a no; without one, the consumer of the events."""
        for hook in self.hooks:
            if implements(hook, "on_doom_loop"):
                return (yield from resolve(hook.on_doom_loop(event)))
        return (yield from resolve(super().on_doom_loop(event)))

    # All that they return is joined

    def get_steering_messages(self) -> Events[list[Message]]:
        messages: list[Message] = []
        for hook in self.hooks:
            messages += yield from resolve(hook.get_steering_messages())
        return messages

    def get_follow_up_messages(self) -> Events[list[Message]]:
        messages: list[Message] = []
        for hook in self.hooks:
            messages += yield from resolve(hook.get_follow_up_messages())
        return messages

    # Each gets what the one before it has returned; None changes nothing

    def transform_context(self, messages: list[Message], abort: Abort) -> Events[list[Message]]:
        for hook in self.hooks:
            changed = yield from resolve(hook.transform_context(messages, abort))
            if changed is not None:
                messages = changed
        return messages

    def convert_to_llm(self, messages: list[Message]) -> Events[list[Message]]:
        for hook in self.hooks:
            changed = yield from resolve(hook.convert_to_llm(messages))
            if changed is not None:
                messages = changed
        return messages

    def after_tool_call(self, call: ToolCall, result: ToolResult) -> Events[ToolResult | None]:
        for hook in self.hooks:
            changed = yield from resolve(hook.after_tool_call(call, result))
            if changed is not None:
                result = changed
        return result
