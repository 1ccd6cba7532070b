"""What an agent is and does, the queues of messages that wait for it, and the callbacks."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict

from coder import events
from coder.abort import Abort
from coder.ai import Model
from coder.events import Event, Events, Outcome
from coder.history import image_part, user
from coder.hooks import FunctionHooks, HookChain, Hooks
from coder.toolset import Tool, ToolContext, Toolset
from coder.types import (
    Aborted,
    Completion,
    Message,
    ModelError,
    Reasoning,
    Request,
    RunResult,
    ToolCall,
    ToolResult,
    Trigger,
    Usage,
)

Mode = Literal["one-at-a-time", "all"]
Tools = Toolset | Iterable[Tool | Callable[..., Any]]
Prompt = str | Message | Sequence[Message]

# Callbacks for those who want no events, by keyword: the event, and its field or "" for itself
CALLBACKS: dict[str, tuple[type[Event], str]] = {
    "on_text": (events.TextDelta, "text"),
    "on_tool_call": (events.ToolStart, ""),
    "on_tool_result": (events.ToolEnd, ""),
    "on_step_finish": (events.StepEnd, ""),
    "on_response": (events.MessageEnd, "message"),  # the model's messages only
    "on_compacted": (events.Compacted, ""),
}


class Functions(TypedDict, total=False):
    """Hooks as plain functions, by the names of Hooks, and callbacks; None is none."""

    on_run_start: Callable[[Abort], Outcome[None]] | None
    before_llm_call: Callable[[Request], Outcome[None]] | None
    after_llm_call: Callable[[Completion], Outcome[None]] | None
    before_tool_call: Callable[[ToolCall, ToolContext], Outcome[ToolResult | None]] | None
    after_tool_call: Callable[[ToolCall, ToolResult], Outcome[ToolResult | None]] | None
    transform_context: Callable[[list[Message], Abort], Outcome[list[Message]]] | None
    convert_to_llm: Callable[[list[Message]], Outcome[list[Message]]] | None
    get_api_key: Callable[[], Outcome[str | None]] | None
    get_steering_messages: Callable[[], Outcome[Sequence[Message]]] | None
    get_follow_up_messages: Callable[[], Outcome[Sequence[Message]]] | None
    on_length: Callable[[list[Message], Trigger, Usage, Abort], Outcome[bool]] | None
    on_doom_loop: Callable[[events.DoomLoop], Outcome[bool]] | None
    on_text: Callable[[str], object] | None
    on_tool_call: Callable[[events.ToolStart], object] | None
    on_tool_result: Callable[[events.ToolEnd], object] | None
    on_step_finish: Callable[[events.StepEnd], object] | None
    on_response: Callable[[Message], object] | None
    on_compacted: Callable[[events.Compacted], object] | None


@dataclass(slots=True, eq=False)
class AgentState:
    """What an agent is (the first five), and what it does. `messages` is the loop's own list."""

    model: Model
    system: str
    reasoning: Reasoning
    tools: Toolset
    messages: list[Message]
    is_streaming: bool = False  # during a run
    # The pieces of the answer that is coming, by their field; None: none is
    coming: dict[str, list[str]] | None = None
    pending_tool_calls: set[str] = field(default_factory=set)  # ids of running calls
    error: ModelError | Aborted | None = None  # of the last run

    @property
    def stream_message(self) -> Message | None:
        """The answer that is coming, as far as it has come."""
        if self.coming is None:
            return None
        texts = {name: "".join(pieces) for name, pieces in self.coming.items()}
        return {"role": "assistant"} | texts

    def update(self, event: Event) -> None:
        match event:
            case events.TextDelta(text=text):
                self._add_piece("content", text)
            case events.ReasoningDelta(text=text):
                self._add_piece("reasoning", text)
            case events.MessageStart(message={"role": "assistant"}):
                self.coming = {"content": []}
            case events.MessageStart() | events.MessageEnd() | events.Retry() | events.Compacted():
                self.coming = None  # it is in the list now, or taken back
            case events.ToolStart(id=call_id):
                self.pending_tool_calls.add(call_id)
            case events.ToolEnd(id=call_id):
                self.pending_tool_calls.discard(call_id)
            case events.RunStart():
                self.error = None
            case events.RunEnd(stop_reason=reason, text=text, error=error):
                self.error = Aborted(text) if reason == "aborted" else error

    def _add_piece(self, name: str, text: str) -> None:
        if self.coming is not None:
            self.coming.setdefault(name, []).append(text)


def messages_of(prompt: Prompt, images: Sequence[dict[str, Any]]) -> list[Message]:
    """The messages of a prompt in any of its forms."""
    if isinstance(prompt, dict):
        return [prompt]
    if not isinstance(prompt, str):
        return list(prompt)
    if not images:
        return [user(prompt)]
    text = {"type": "text", "text": prompt}
    return [user([text, *[image_part(image) for image in images]])]


class Queue(deque[Message]):
    """Messages for the agent, from any thread. `mode`: how many are taken at a time."""

    mode: Mode = "one-at-a-time"

    def put(self, message: str | Message) -> None:
        if isinstance(message, str):
            message = user(message)
        self.append(message)

    def take(self) -> list[Message]:
        """The next, or all of them."""
        taken: list[Message] = []
        while self and (self.mode == "all" or not taken):
            taken.append(self.popleft())
        return taken


class Record(Protocol):
    """Where a conversation is kept: what a SessionStore opens."""

    messages: list[Message]
    session_id: str
    taken: bool  # by an agent

    def watch(self, run: Events[RunResult]) -> Events[RunResult]: ...
    def sync(self) -> None: ...


def chain_hooks(
    hooks: Hooks | Sequence[Hooks],
    functions: Mapping[str, object],
    queues: Hooks,
) -> HookChain:
    """The hooks of every run: objects, plain functions, the queues."""
    objects = [hooks] if isinstance(hooks, Hooks) else hooks
    if not isinstance(objects, Sequence) or not all(isinstance(hook, Hooks) for hook in objects):
        raise TypeError("hooks are objects of the class Hooks; functions go by their names")
    named: dict[str, Any] = {}
    for name, function in functions.items():
        if function is not None and name not in CALLBACKS:
            named[name] = function
    return HookChain(*objects, FunctionHooks(**named), queues)


def make_toolset(tools: Tools, cwd: str | Path | None, session_id: str) -> Toolset:
    """A set of one agent's own: `tools` may be shared with agents that have other sessions."""
    if not isinstance(tools, Toolset):
        return Toolset(tools, cwd=cwd, session_id=session_id)
    own = copy.copy(tools)
    own.session_id = own.session_id or session_id
    return own


def callbacks_of(functions: Mapping[str, Any]) -> list[Callable[[Event], None]]:
    """The callbacks among the functions, as subscribers."""
    callbacks: list[Callable[[Event], None]] = []
    for name, function in functions.items():
        if function is not None and name in CALLBACKS:
            callbacks.append(partial(call_back, function, *CALLBACKS[name]))
    return callbacks


def call_back(
    function: Callable[..., object],
    kind: type[Event],
    name: str,
    event: Event,
) -> None:
    """Call the function if the event is of this kind, with the event or one of its fields."""
    if not isinstance(event, kind):
        return
    if isinstance(event, events.MessageEnd) and event.message["role"] != "assistant":
        return
    function(getattr(event, name) if name else event)
