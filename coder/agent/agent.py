"""Agent: the loop with a memory.

It has a state, queues, subscribers, and can be stopped from another thread.

    agent = Agent("gpt-5", tools=[population])
    agent.subscribe(print)
    print(agent.run("How many people live in Oslo?").text)

One run at a time. To run in the background, call `prompt` in a thread of your own and
`wait_for_idle` in others.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from coder.abort import Abort
from coder.agent.state import (
    AgentState,
    Functions,
    Mode,
    Prompt,
    Queue,
    Record,
    Tools,
    callbacks_of,
    chain_hooks,
    make_toolset,
    messages_of,
)
from coder.ai import ChatModel, Model
from coder.arguments import Schema
from coder.events import Event, Events, drain
from coder.hooks import FunctionHooks, HookChain, Hooks
from coder.loop import reason_not_to_ask, run_loop
from coder.providers.errors import RetryPolicy
from coder.providers.request import REASONING_BUDGETS
from coder.types import Budget, Limits, Message, Reasoning, RunResult, T, V

if TYPE_CHECKING:
    from coder.agent.structured import StructuredAnswer


class Agent:
    """A model, its tools and a conversation.

    `model`: a name (then it is a ChatModel, and `base_url`, `api_key` and `reasoning_budgets` are
    its) or anything with the `stream` of Model. `functions` are hooks (`before_tool_call=...`) and
    callbacks (`on_text=...`).
    `reasoning_budgets`: tokens of the reasoning levels. `max_steps` is short for that of `limits`.
    `max_retry_delay`: seconds; if a server asks for a longer wait, the run fails at once; 0 is no
    limit, None that of `retry`. `session`: what a SessionStore has opened; its messages are the
    conversation, which is kept there.
    """

    # So that an attribute that would do nothing (agent.max_steps = 9) is an error
    __slots__ = (
        "__weakref__",
        "_idle",
        "_make_named",
        "_subscribers",
        "follow_ups",
        "hooks",
        "limits",
        "retry",
        "session",
        "state",
        "steering",
        "token",
    )

    def __init__(
        self,
        model: str | Model,
        *,
        tools: Tools = (),
        system: str = "",
        messages: Iterable[Message] = (),
        reasoning: Reasoning = "off",
        reasoning_budgets: Mapping[str, int] = REASONING_BUDGETS,
        base_url: str | None = None,
        api_key: str | None = None,
        hooks: Hooks | Sequence[Hooks] = (),
        limits: Limits = Limits(),
        max_steps: int | None = None,
        retry: RetryPolicy | None = None,
        max_retry_delay: float | None = None,
        session_id: str = "",
        cwd: str | Path | None = None,
        session: Record | None = None,
        **functions: Unpack[Functions],
    ) -> None:
        self._make_named: Callable[[str], Model] | None = None
        if isinstance(model, str):
            self._make_named = partial(
                ChatModel, base_url=base_url, api_key=api_key, reasoning_budgets=reasoning_budgets
            )
        if session and not session_id:
            session_id = session.session_id
        toolset = make_toolset(tools, cwd, session_id)
        self.state = AgentState(self._make_model(model), system, reasoning, toolset, list(messages))
        self.limits = limits
        if max_steps is not None:
            self.limits = replace(limits, max_steps=max_steps)
        self.retry = retry or RetryPolicy()
        if max_retry_delay is not None:
            self.max_retry_delay = max_retry_delay
        self.steering = Queue()
        self.follow_ups = Queue()
        self.token = Abort()  # of the current run, or of the last
        self._idle = threading.Condition()
        self._subscribers: dict[object, Callable[[Event], None]] = {}
        self.hooks = self._chain_hooks(hooks, functions)
        self.session = session
        if session:
            self._take(session)

    def _take(self, session: Record) -> None:
        """Go on with the session's messages, and keep in it what comes."""
        if self.state.messages or session.taken:
            raise ValueError("a session has its own messages, and belongs to one agent")
        session.taken = True
        self.state.messages = session.messages

    def _chain_hooks(self, hooks: Hooks | Sequence[Hooks], functions: Functions) -> HookChain:
        """The hooks of every run. Callbacks become subscribers."""
        for callback in callbacks_of(functions):
            self.subscribe(callback)
        queues = FunctionHooks(
            get_steering_messages=self.steering.take,
            get_follow_up_messages=self.follow_ups.take,
        )
        return chain_hooks(hooks, functions, queues)

    # -- runs

    def prompt(
        self,
        prompt: Prompt,
        images: Sequence[dict[str, Any]] = (),
        *,
        output: type[V] | Schema | None = None,
        abort: Abort | None = None,
    ) -> RunResult[V]:
        """Run to the end with text, text with images, one message, or several.

        An image is {"type": "image", "data": base64, "mimeType": ...}, or the API's image_url part.
        `output` is the form of the answer (structured.py): a pydantic model, a dataclass, a
        TypedDict, or the JSON schema of an object. `abort` is the run's token, if it may be set
        before this is called. Raises RuntimeError during a run: use `steer` or `follow_up`.
        """
        return drain(self.stream(prompt, images, output=output, abort=abort))

    run = prompt

    def stream(
        self,
        prompt: Prompt,
        images: Sequence[dict[str, Any]] = (),
        *,
        output: type[V] | Schema | None = None,
        abort: Abort | None = None,
        budget: Budget | None = None,
    ) -> Events[RunResult[V]]:
        """`prompt` as a generator of events, which returns the RunResult.

        It begins with its first event. `budget` counts the run's steps, instead of `limits`.
        """
        form: StructuredAnswer | None = None
        if output is not None:
            from coder.agent.structured import StructuredAnswer  # late: few runs need it

            form = StructuredAnswer(output)
        token = self._begin(abort)  # first: to read the prompt may take a while
        messages = messages_of(prompt, images)
        return self._run_and_notify(
            lambda abort: self._start_loop(messages, abort, form=form, budget=budget), token
        )

    def continue_(self, *, abort: Abort | None = None) -> RunResult:
        """Go on without a new message: after an error, or with the queued messages.

        Raises ValueError if there is nothing to go on with: no message, or a finished answer.
        """
        token = self._begin(abort)
        problem = drain(reason_not_to_ask(self.state.messages, self.hooks))
        if problem and not self.has_queued_messages:
            raise ValueError(f"{problem}: prompt the agent, or queue a message")
        messages = []
        if problem and not self.steering:  # which the loop takes at its start, unlike follow-ups
            messages = self.follow_ups.take()
        return drain(self._run_and_notify(lambda abort: self._start_loop(messages, abort), token))

    def run_as_work(self, start: Callable[[Abort], Events[T]]) -> Events[T]:
        """Run what `start` begins as the agent's work: alone, with its subscribers, until an abort.

        For what yields events and is no run of the loop, such as a compaction that the user asks
        for. Raises RuntimeError during a run.
        """
        return self._run_and_notify(start, self._begin())

    def _begin(self, abort: Abort | None = None) -> Abort:
        """The token of a run that begins; `abort` counts from here on.

        Raises RuntimeError during a run.
        """
        self._check_idle()
        self.token = abort or Abort()
        return self.token

    def _run_and_notify(self, start: Callable[[Abort], Events[T]], token: Abort) -> Events[T]:
        """The events of a run, each told to the state and to the subscribers first."""
        run = start(token)
        with self._idle:
            self._check_idle()  # again: another run may have begun before this one's first event
            self.token = token
            self.state.is_streaming = True
        try:
            while True:
                try:  # by hand, without Returning: no frame more for each token
                    event = next(run)
                except StopIteration as end:
                    value: T = end.value
                    return value
                self.state.update(event)
                for subscriber in list(self._subscribers.values()):
                    subscriber(event)
                yield event
        finally:
            run.close()
            with self._idle:
                self.state.is_streaming = False
                self.state.coming = None
                self.state.pending_tool_calls.clear()
                self._idle.notify_all()

    def _start_loop(
        self,
        prompts: list[Message],
        abort: Abort,
        form: StructuredAnswer | None = None,
        budget: Budget | None = None,
    ) -> Events[RunResult]:
        state = self.state
        run = run_loop(
            state.messages,
            state.model,
            state.tools,
            prompt=prompts,
            system=state.system,
            hooks=HookChain(self.hooks, form) if form else self.hooks,
            reasoning=state.reasoning,
            limits=self.limits,
            retry=self.retry,
            abort=abort,
            budget=budget,
        )
        if form:
            run = form.watch(run)
        if self.session is None:
            return run
        self.session.messages = state.messages
        return self.session.watch(run)

    def abort(self) -> None:
        """End the current run, from any thread.

        Counts from the call of `prompt` or `stream` on, for this run alone.
        """
        self.token.set()

    def wait_for_idle(self, timeout: float | None = None) -> bool:
        """Wait for the end of the run; False if that took longer than `timeout` seconds."""
        with self._idle:
            return self._idle.wait_for(lambda: not self.state.is_streaming, timeout)

    def _check_idle(self) -> None:
        if self.state.is_streaming:
            raise RuntimeError(
                "the agent is at work: "
                "use steer(), follow_up(), wait_for_idle(); close a stream() that is left"
            )

    # -- queues and subscribers

    def steer(self, message: str | Message) -> None:
        """Add a message during the run: it comes after the running tool, instead of the remaining
        calls.
        """
        self.steering.put(message)

    def follow_up(self, message: str | Message) -> None:
        """Add a message that waits until the run would end."""
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
        return bool(self.steering or self.follow_ups)

    def subscribe(self, subscriber: Callable[[Event], None]) -> Callable[[], None]:
        """Call `subscriber` with every event, in the thread of the run; return what ends that.

        An exception of the subscriber ends the run.
        """
        key = object()
        self._subscribers[key] = subscriber

        def unsubscribe() -> None:
            self._subscribers.pop(key, None)

        return unsubscribe

    # -- state

    @property
    def messages(self) -> list[Message]:
        return self.state.messages

    def replace_messages(self, messages: Iterable[Message]) -> None:
        """Another conversation; the list is copied.

        Raises RuntimeError during a run, like everything that changes the list.
        """
        self._check_idle()
        self.state.messages = list(messages)
        if self.session:
            self.session.messages = self.state.messages
            self.session.sync()

    def append_message(self, message: Message) -> None:
        self.replace_messages([*self.messages, message])

    def clear_messages(self) -> None:
        self.replace_messages([])

    def set_system(self, text: str) -> None:
        self.state.system = text

    def set_reasoning(self, level: Reasoning) -> None:
        self.state.reasoning = level

    def set_model(self, model: str | Model) -> None:
        """Used from the next run on. A name is another model of the same server."""
        self.state.model = self._make_model(model)

    def _make_model(self, model: str | Model) -> Model:
        if isinstance(model, str) and self._make_named:
            return self._make_named(model)
        if isinstance(model, str) or not hasattr(model, "stream"):
            kinds = "a ChatModel, or an object with its `stream`"
            raise TypeError(f"a model is {kinds}, not {model!r}")
        return model

    def set_tools(self, tools: Tools) -> None:
        self.state.tools = make_toolset(tools, self.state.tools.cwd, self.session_id)

    @property
    def max_retry_delay(self) -> float:
        """Seconds that a server may ask for; of the `retry` policy."""
        return self.retry.max_delay

    @max_retry_delay.setter
    def max_retry_delay(self, seconds: float) -> None:
        self.retry = replace(self.retry, max_delay=seconds or math.inf)

    @property
    def session_id(self) -> str:
        """Names the conversation for the provider's cache."""
        return self.state.tools.session_id

    @session_id.setter
    def session_id(self, value: str) -> None:
        self.state.tools.session_id = value

    def reset(self) -> None:
        """Forget the conversation, the queues and the error; keep the model, the tools and the
        prompt.
        """
        self.clear_messages()
        self.steering.clear()
        self.follow_ups.clear()
        self.state.error = None
