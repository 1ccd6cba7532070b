"""Agent: the loop with a memory. State, queues, subscribers, and a way to stop it from another thread.

    agent = Agent("gpt-5", tools=[population])
    agent.subscribe(print)
    print(agent.run("How many people live in Oslo?").text)

One run at a time. What is said to the agent meanwhile goes into one of two queues: `steer` changes the course after the
tool under way, `follow_up` waits until the run would end. All state is rebuilt from the events of the run, so whoever
subscribes knows what the agent knows.

To run in the background, call `prompt` in a thread of your own and `wait_for_idle` in others.
"""

from __future__ import annotations

import copy
import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from coder.abort import Abort
from coder.ai import ChatModel, Model
from coder.events import (
    Compacted,
    Event,
    MessageEnd,
    MessageStart,
    ReasoningDelta,
    Retry,
    Returning,
    RunEnd,
    RunStart,
    StepEnd,
    TextDelta,
    ToolEnd,
    ToolStart,
)
from coder.history import image_part, nothing_to_answer, user
from coder.hooks import HOOK_NAMES, FunctionHooks, HookChain, Hooks
from coder.loop import run_loop
from coder.providers.errors import RetryPolicy
from coder.toolset import Tool, Toolset
from coder.types import Aborted, Limits, Message, ModelError, Reasoning, Request, RunResult

if TYPE_CHECKING:
    from coder.sessions.recorder import Recorder

Mode = Literal["one-at-a-time", "all"]
Prompt = str | Message | Sequence[Message]


# ---- what is known of a run ------------------------------------------------------------------------------


@dataclass
class AgentState:
    """What an agent is and does. `apply` keeps the second half right, from events alone."""

    model: Model
    system_prompt: str = ""
    thinking_level: Reasoning = "off"
    tools: Toolset = field(default_factory=Toolset)
    messages: list[Message] = field(default_factory=list)
    is_streaming: bool = False  # a run is under way
    stream_message: Message | None = None  # the answer that is coming, as far as it has come
    pending_tool_calls: set[str] = field(default_factory=set)  # ids of calls under way
    error: ModelError | Aborted | None = None  # of the last run

    def apply(self, event: Event) -> None:
        match event:
            case RunStart():
                self.is_streaming, self.error = True, None
            case MessageStart(message=message) if message["role"] == "assistant":
                self.stream_message = {"role": "assistant", "content": ""}
            case TextDelta(text=text) if self.stream_message is not None:
                self.stream_message = self.stream_message | {
                    "content": self.stream_message["content"] + text
                }
            case ReasoningDelta(text=text) if self.stream_message is not None:
                self.stream_message = self.stream_message | {
                    "reasoning": self.stream_message.get("reasoning", "") + text
                }
            case MessageEnd(message=message):
                self.stream_message = None
                if (
                    message["role"] != "assistant"
                    or message.get("content")
                    or message.get("tool_calls")
                ):
                    self.messages.append(message)
            case Retry():
                self.stream_message = None  # what was shown of the answer is taken back
            case Compacted(messages=messages):
                self.stream_message, self.messages = None, list(messages)
            case ToolStart(id=call_id):
                self.pending_tool_calls.add(call_id)
            case ToolEnd(id=call_id):
                self.pending_tool_calls.discard(call_id)
            case RunEnd(stop_reason=reason, text=text, error=error):
                self.is_streaming, self.stream_message = False, None
                self.error = Aborted(text) if reason == "aborted" else error
                self.pending_tool_calls.clear()


# ---- what waits to be said -------------------------------------------------------------------------------


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


class QueueHooks(Hooks):
    """The two queues, as the loop asks for them."""

    def __init__(self, steering: Queue, follow_ups: Queue) -> None:
        self.steering, self.follow_ups = steering, follow_ups

    def get_steering_messages(self) -> list[Message]:
        return self.steering.take()

    def get_follow_up_messages(self) -> list[Message]:
        return self.follow_ups.take()


# ---- the agent -------------------------------------------------------------------------------------------

# Callbacks for those who want no events: keyword -> (the events it is for, what it is given).
CALLBACKS: dict[str, tuple[type[Event], Callable[[Any], Any]]] = {
    "on_text": (TextDelta, lambda event: event.text),
    "on_tool_call": (ToolStart, lambda event: event),
    "on_tool_result": (ToolEnd, lambda event: event),
    "on_step_finish": (StepEnd, lambda event: event),
    "on_response": (MessageEnd, lambda event: event.message),  # the model's messages only
    "on_compacted": (Compacted, lambda event: event),
}


class Agent:
    """A model, its tools and a conversation.

    `model`: a name (then it is a ChatModel, and `base_url` and `api_key` are its) or anything with the `stream` of Model.
    Further keywords are hooks, by the names of Hooks (`before_tool_call=...`), and callbacks: `on_text(text)`,
    `on_tool_call(event)`, `on_tool_result(event)`, `on_step_finish(event)`, `on_response(message)`, `on_compacted(event)`.
    `max_retry_delay`: seconds; where a server asks for a longer wait, the run fails at once; 0 is no limit. A `retry` policy
    of your own has its own. `session`: what a SessionStore has opened; its messages are the conversation, which is kept there.
    """

    def __init__(
        self,
        model: str | Model,
        *,
        tools: Toolset | Iterable[Tool | Callable[..., Any]] = (),
        system_prompt: str = "",
        messages: Iterable[Message] = (),
        thinking_level: Reasoning = "off",
        thinking_budgets: Mapping[str, int] | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        hooks: Hooks | Sequence[Hooks] = (),
        limits: Limits = Limits(),
        retry: RetryPolicy | None = None,
        max_retry_delay: float = 60.0,
        session_id: str = "",
        cwd: str | Path | None = None,
        session: Recorder | None = None,
        steering_mode: Mode = "one-at-a-time",
        follow_up_mode: Mode = "one-at-a-time",
        **functions: Callable[..., Any],
    ) -> None:
        self._named = (
            partial(ChatModel, base_url=base_url, api_key=api_key)
            if isinstance(model, str)
            else _unnamed
        )
        made = self._model(model)
        toolset = _toolset(tools, cwd, session_id or (session.session_id if session else ""))
        self.state = AgentState(made, system_prompt, thinking_level, toolset, list(messages))
        self.thinking_budgets = dict(thinking_budgets or {})
        self.limits = limits
        self.retry = retry or RetryPolicy(max_delay=_retry_delay(max_retry_delay))
        self.steering, self.follow_ups = Queue(steering_mode), Queue(follow_up_mode)
        self._subscribers: dict[object, Callable[[Event], None]] = {}
        self._idle = threading.Condition()
        self._running = False
        self._abort = Abort()
        functions = {name: function for name, function in functions.items() if function is not None}
        if unknown := [name for name in functions if name not in (*CALLBACKS, *HOOK_NAMES)]:
            raise TypeError(
                f"an agent has no {', '.join(unknown)}; there are the hooks {', '.join(HOOK_NAMES)} and the callbacks "
                f"{', '.join(CALLBACKS)}"
            )
        callbacks = {name: function for name, function in functions.items() if name in CALLBACKS}
        for name, function in callbacks.items():
            self.subscribe(_calling(name, function))
        own = FunctionHooks(
            **{name: function for name, function in functions.items() if name not in callbacks}
        )
        budgets = FunctionHooks(before_llm_call=self._set_budgets)
        given = [hooks] if isinstance(hooks, Hooks) else hooks
        if not isinstance(given, Sequence) or not all(isinstance(each, Hooks) for each in given):
            raise TypeError(
                "hooks are objects of the class Hooks, one or a list; functions go by their names (before_tool_call=...)"
            )
        self.hooks = HookChain(*given, own, QueueHooks(self.steering, self.follow_ups), budgets)
        self.session = session
        if session:
            self._keep_in(session)

    def _keep_in(self, session: Recorder) -> None:
        if self.state.messages:
            raise ValueError(
                "a session has messages of its own: give it with replace_messages() what it is to hold instead"
            )
        if session.taken:
            raise ValueError("the session belongs to another agent: open one for each agent")
        session.taken = True
        self.state.messages = session.messages

    # -- saying something

    def prompt(self, prompt: Prompt, images: Sequence[dict[str, Any]] = ()) -> RunResult:
        """Say something and wait for the end of the run: text, text with images, one message, or several.

        An image is {"type": "image", "data": base64, "mimeType": ...}, or the API's image_url part. Raises RuntimeError
        while a run is under way: then use `steer` or `follow_up`.
        """
        return _drained(self.stream(prompt, images))

    run = prompt

    def stream(
        self, prompt: Prompt, images: Sequence[dict[str, Any]] = ()
    ) -> Generator[Event, None, RunResult]:
        """`prompt` as a generator of events, which returns the RunResult."""
        messages = messages_of(prompt, images)
        return self._go(lambda: messages, self._next_abort())

    def continue_(self) -> RunResult:
        """Go on without a new message: after an error, or with what waits in the queues (steering first).

        Raises ValueError where there is nothing to go on with: no message, or the model had the last word.
        """
        abort = self._next_abort()
        problem = nothing_to_answer(self.state.messages)
        if problem and not self.has_queued_messages:
            raise ValueError(f"{problem}: prompt the agent, or queue a message")
        # The loop itself looks for steering messages first
        waiting = not problem or len(self.steering)
        return _drained(self._go(lambda: [] if waiting else self.follow_ups.take(), abort))

    def steer(self, message: str | Message) -> None:
        """Say something during the run: it comes after the tool under way, and the remaining calls are skipped."""
        self.steering.put(message)

    def follow_up(self, message: str | Message) -> None:
        """Say something that waits until the run would end."""
        self.follow_ups.put(message)

    def clear_steering_queue(self) -> None:
        self.steering.clear()

    def clear_follow_up_queue(self) -> None:
        self.follow_ups.clear()

    def set_steering_mode(self, mode: Mode) -> None:
        self.steering.mode = mode

    def set_follow_up_mode(self, mode: Mode) -> None:
        self.follow_ups.mode = mode

    @property
    def has_queued_messages(self) -> bool:
        return bool(len(self.steering) or len(self.follow_ups))

    # -- watching and stopping

    def subscribe(self, subscriber: Callable[[Event], None]) -> Callable[[], None]:
        """Call `subscriber` with every event, in the thread of the run; returns what ends that. What it raises ends the run."""
        key = object()
        self._subscribers[key] = subscriber
        return lambda: self._subscribers.pop(key, None) and None

    def abort(self) -> None:
        """End the run under way, from any thread."""
        self._abort.set()

    def wait_for_idle(self, timeout: float | None = None) -> bool:
        """Wait until no run is under way; False where that took longer than `timeout` seconds."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._running, timeout)

    # -- state

    @property
    def messages(self) -> list[Message]:
        return self.state.messages

    def replace_messages(self, messages: Iterable[Message]) -> None:
        """Another conversation; the list is copied. Raises RuntimeError during a run, as all that changes the list."""
        self._check_idle()
        self.state.messages = list(messages)
        if self.session:
            self.session.messages = self.state.messages
            self.session.sync()

    def append_message(self, message: Message) -> None:
        self.replace_messages([*self.state.messages, message])

    def clear_messages(self) -> None:
        self.replace_messages([])

    def set_system_prompt(self, text: str) -> None:
        self.state.system_prompt = text

    def set_model(self, model: str | Model) -> None:
        """Used from the next run on. A name is another model of the same server."""
        self.state.model = self._model(model)

    def _model(self, model: str | Model) -> Model:
        if isinstance(model, str):
            return self._named(model)
        if not callable(getattr(model, "stream", None)):
            raise TypeError(f"a model is a name or an object with a method `stream`, not {model!r}")
        return model

    @property
    def max_retry_delay(self) -> float:
        return self.retry.max_delay

    @max_retry_delay.setter
    def max_retry_delay(self, seconds: float) -> None:
        self.retry = replace(self.retry, max_delay=_retry_delay(seconds))

    def set_thinking_level(self, level: Reasoning) -> None:
        self.state.thinking_level = level

    def set_tools(self, tools: Toolset | Iterable[Tool | Callable[..., Any]]) -> None:
        self.state.tools = _toolset(tools, self.state.tools.cwd, self.session_id)

    @property
    def session_id(self) -> str:
        """Names the conversation for the provider's cache."""
        return self.state.tools.session_id

    @session_id.setter
    def session_id(self, value: str) -> None:
        self.state.tools.session_id = value

    def reset(self) -> None:
        """Forget the conversation, the queues and the error; keep the model, the tools and the prompt."""
        self.clear_messages()
        self.clear_steering_queue()
        self.clear_follow_up_queue()
        self.state.error = None

    # -- one run

    def _check_idle(self) -> None:
        if self._running:
            raise RuntimeError(
                "the agent is at work: steer() or follow_up() says something to it, wait_for_idle() waits; "
                "a stream() that was left half-way has to be closed"
            )

    def _next_abort(self) -> Abort:
        """The token of the run that comes: abort() counts from here on. Raises RuntimeError during a run."""
        with self._idle:
            self._check_idle()
            self._abort = Abort()
            return self._abort

    def _go(
        self, prompts: Callable[[], list[Message]], abort: Abort
    ) -> Generator[Event, None, RunResult]:
        with self._idle:
            self._check_idle()
            self._running, self._abort = True, abort
        try:
            return (yield from self._watched(prompts()))
        finally:
            with self._idle:
                self._running = False
                self._idle.notify_all()

    def _watched(self, prompts: list[Message]) -> Generator[Event, None, RunResult]:
        """The loop, with the state kept right and the subscribers told."""
        state, messages = self.state, list(self.state.messages)
        events = run_loop(
            messages,
            state.model,
            state.tools,
            prompts=prompts,
            system=state.system_prompt,
            hooks=self.hooks,
            reasoning=state.thinking_level,
            limits=self.limits,
            retry=self.retry,
            abort=self._abort,
        )
        if self.session:
            self.session.messages = messages
            events = self.session.watch(events)
        try:
            with Returning(events) as run:
                for event in run:
                    state.apply(event)
                    for subscriber in list(self._subscribers.values()):
                        subscriber(event)
                    yield event
            return run.value
        finally:
            # what no event tells: a history that was repaired, and the end of a run that was left
            state.messages, state.is_streaming, state.stream_message = messages, False, None
            state.pending_tool_calls.clear()

    def _set_budgets(self, request: Request) -> None:
        request.budgets = {**self.thinking_budgets, **request.budgets}


def _toolset(
    tools: Toolset | Iterable[Tool | Callable[..., Any]], cwd: str | Path | None, session_id: str
) -> Toolset:
    """A set of one agent's own: what is given may be shared with other agents, whose sessions are others."""
    if not isinstance(tools, Toolset):
        return Toolset(tools, cwd=cwd, session_id=session_id)
    own = copy.copy(tools)
    own.session_id = own.session_id or session_id
    return own


def _retry_delay(seconds: float) -> float:
    """What a RetryPolicy takes for it. Raises TypeError and ValueError."""
    if not isinstance(seconds, int | float):
        raise TypeError(f"max_retry_delay is a number of seconds, not {seconds!r}")
    if not seconds >= 0:
        raise ValueError(f"max_retry_delay is a number of seconds from 0 (no limit), not {seconds}")
    return seconds or math.inf


def _unnamed(name: str) -> Model:
    raise TypeError(
        "this agent was made from a model, not from a name: give set_model() a model, ChatModel(name, ...)"
    )


def _drained(run: Generator[Event, None, RunResult]) -> RunResult:
    # Closed also by an interrupt here: whoever keeps its traceback keeps the generator.
    with Returning(run) as rest:
        for _ in rest:
            pass
    return rest.value


def _calling(name: str, function: Callable[..., Any]) -> Callable[[Event], None]:
    """A subscriber for a callback."""
    kind, given = CALLBACKS[name]

    def subscriber(event: Event) -> None:
        of_model = not isinstance(event, MessageEnd) or event.message["role"] == "assistant"
        if isinstance(event, kind) and of_model:
            function(given(event))

    return subscriber


def messages_of(prompt: Prompt, images: Sequence[dict[str, Any]] = ()) -> list[Message]:
    """A prompt in any of its four forms as messages."""
    if isinstance(prompt, str):
        parts = [{"type": "text", "text": prompt}, *map(image_part, images)]
        return [user(parts if images else prompt)]
    return [prompt] if isinstance(prompt, dict) else list(prompt)
