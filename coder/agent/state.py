"""What an agent is and does, the queues of messages that wait for it, and the forms of what it is given."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

from coder import events
from coder.ai import Model
from coder.events import Event, Events
from coder.history import image_part, user
from coder.toolset import Toolset
from coder.types import Aborted, Message, ModelError, Reasoning, RunResult

Mode = Literal["one-at-a-time", "all"]
Prompt = str | Message | Sequence[Message]


@dataclass
class AgentState:
    """What an agent is (the first five), and what it does. `messages` is the loop's own list."""

    model: Model
    system: str = ""
    reasoning: Reasoning = "off"
    tools: Toolset = field(default_factory=Toolset)
    messages: list[Message] = field(default_factory=list)
    is_streaming: bool = False  # a run is under way
    pending_tool_calls: set[str] = field(default_factory=set)  # ids of calls under way
    error: ModelError | Aborted | None = None  # of the last run
    coming: dict[str, list[str]] | None = None  # pieces of the answer under way, by their field

    @property
    def stream_message(self) -> Message | None:
        """The answer that is coming, as far as it has come."""
        pieces = self.coming
        return pieces and {"role": "assistant"} | {k: "".join(v) for k, v in pieces.items()}

    def follow(self, event: Event) -> None:
        """Keep right what the agent does."""
        match event:
            case events.TextDelta(text=text) if self.coming is not None:
                self.coming["content"].append(text)
            case events.ReasoningDelta(text=text) if self.coming is not None:
                self.coming.setdefault("reasoning", []).append(text)
            case events.MessageStart(message=message):
                self.coming = {"content": []} if message["role"] == "assistant" else None
            case events.MessageEnd() | events.Retry() | events.Compacted():
                self.coming = None  # it is in the list now, or taken back
            case events.ToolStart(id=call_id):
                self.pending_tool_calls.add(call_id)
            case events.ToolEnd(id=call_id):
                self.pending_tool_calls.discard(call_id)
            case events.RunStart():
                self.error = None
            case events.RunEnd(stop_reason=reason, text=text, error=error):
                self.error = Aborted(text) if reason == "aborted" else error
                self.end()

    def end(self) -> None:
        self.is_streaming, self.coming = False, None
        self.pending_tool_calls.clear()


class Queue:
    """Messages for the agent, from any thread. `mode` says how many are taken at a time."""

    def __init__(self, mode: Mode = "one-at-a-time") -> None:
        self.mode = mode
        self._waiting: deque[Message] = deque()

    @property
    def mode(self) -> Mode:
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"a queue gives {' or '.join(get_args(Mode))}, not {mode!r}")
        self._mode = mode

    def put(self, message: str | Message) -> None:
        self._waiting.append(user(message) if isinstance(message, str) else message)

    def take(self) -> list[Message]:
        """The next, or all of them."""
        taken: list[Message] = []
        while self._waiting and (self.mode == "all" or not taken):
            taken.append(self._waiting.popleft())
        return taken

    def clear(self) -> None:
        self._waiting.clear()

    def __iter__(self) -> Iterator[Message]:
        return iter(list(self._waiting))

    def __len__(self) -> int:
        return len(self._waiting)


class Record(Protocol):
    """Where a conversation is kept: what a SessionStore opens."""

    messages: list[Message]
    session_id: str
    taken: bool  # by an agent

    def watch(self, run: Events[RunResult]) -> Events[RunResult]: ...
    def sync(self) -> None: ...


# Callbacks for those who want no events: keyword -> (the event it is for, what it is given).
CALLBACKS: dict[str, tuple[type[Event], Callable[[Any], Any]]] = {
    "on_text": (events.TextDelta, lambda event: event.text),
    "on_tool_call": (events.ToolStart, lambda event: event),
    "on_tool_result": (events.ToolEnd, lambda event: event),
    "on_step_finish": (events.StepEnd, lambda event: event),
    "on_response": (events.MessageEnd, lambda event: event.message),  # the model's messages only
    "on_compacted": (events.Compacted, lambda event: event),
}


def callback(name: str, function: Callable[..., Any]) -> Callable[[Event], None]:
    """A subscriber for a callback."""
    kind, given = CALLBACKS[name]

    def subscriber(event: Event) -> None:
        of_model = not isinstance(event, events.MessageEnd) or event.message["role"] == "assistant"
        if isinstance(event, kind) and of_model:
            function(given(event))

    return subscriber


def messages_of(prompt: Prompt, images: Sequence[dict[str, Any]] = ()) -> list[Message]:
    """A prompt in any of its four forms as messages."""
    if isinstance(prompt, str):
        parts = [{"type": "text", "text": prompt}, *map(image_part, images)]
        return [user(parts if images else prompt)]
    return [prompt] if isinstance(prompt, dict) else list(prompt)
