"""The state of one run, and what is done to its list of messages: adding to it, and closing it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from coder import events
from coder.abort import Abort
from coder.ai import Model
from coder.events import Events
from coder.history import NOT_RUN, History, now, tool_message, truncate
from coder.hooks import Hooks
from coder.providers.errors import RetryPolicy
from coder.providers.text import new_id
from coder.repetition import Repetitions
from coder.toolset import ToolContext, Toolset
from coder.types import (
    Budget,
    Completion,
    Limits,
    Message,
    ModelError,
    Reasoning,
    StopReason,
    ToolCall,
    ToolResult,
    Usage,
)

ABORTED_BY = {"aborted": "aborted by the user", "max_time": "the time limit was reached"}


@dataclass
class End:
    """Why and with which text a run ends."""

    stop_reason: StopReason
    text: str
    error: ModelError | None = None
    continuable: bool = False  # by queued messages: the model is done


@dataclass
class OpenCall:
    """A tool call of the newest answer whose result is not in the list yet."""

    call: ToolCall
    ctx: ToolContext
    is_started: bool = False  # its start event is out
    began: float = 0.0  # monotonic seconds; 0: its tool has not begun
    asking: float = 0.0  # seconds that the user took to answer, which are not the tool's
    seconds: float = 0.0  # that its tool took
    output: deque[str] = field(default_factory=lambda: deque(maxlen=100))  # its newest updates
    result: ToolResult | None = None


@dataclass
class Run:
    """The state of one run: what run_loop was given, and what has come of it so far."""

    messages: list[Message]
    model: Model
    tools: Toolset
    system: str
    reasoning: Reasoning
    hooks: Hooks
    limits: Limits
    retry: RetryPolicy
    abort: Abort
    budget: Budget
    pending: list[Message]  # prompts and queued messages that are not in the list yet
    steps: int = 0
    usage: Usage = field(default_factory=Usage)  # with that of sub-agents
    last_usage: Usage | None = None  # of the newest answer; None: still to be read from the list
    text: str = ""  # of the newest answer
    compactions: int = 0  # since the newest answer
    was_reminded: bool = False  # that an answer called nothing
    in_step: bool = False
    answer: Message = field(default_factory=dict)  # of the current step
    partial: list[str] = field(default_factory=list)  # the text of the answer under way, in pieces
    open_calls: list[OpenCall] = field(default_factory=list)
    results: list[Message] = field(default_factory=list)  # of the calls of the current step
    offered: Toolset = field(init=False)  # by the newest request, as the hooks changed it
    history: History = field(init=False)
    repetitions: Repetitions = field(init=False)

    def __post_init__(self) -> None:
        self.offered, self.history = self.tools, History(self.messages)
        self.repetitions = Repetitions(self.limits.doom_loop_threshold)

    def context(self, call: ToolCall) -> ToolContext:
        """What the tool of a call gets."""
        tools = self.offered
        ids = tools.session_id, self.answer["meta"]["message_id"], call.id
        return ToolContext(
            *(tools.cwd, self.abort, *ids),
            seen=tools.seen,
            budget=self.budget,
            tool=tools.known.get(call.name),
        )

    def stamp(self) -> dict[str, Any]:
        return {"message_id": new_id(), "timestamp": now(), "model": self.model.name}

    def begin_step(self) -> events.StepStart:
        self.steps += 1
        self.budget.step()
        self.in_step, self.answer, self.results = True, {}, []
        return events.StepStart(self.steps)

    def end_step(self, answer: Completion | None) -> events.StepEnd:
        self.in_step = False
        finish, usage = (answer.finish_reason, answer.usage) if answer else ("error", Usage())
        return events.StepEnd(self.answer, self.results, finish, usage)

    def add_pending(self) -> Events[None]:
        while self.pending:
            self.messages.append(self.pending[0])
            yield from _announce(self.pending.pop(0))

    def add_result(self, opened: OpenCall) -> Events[None]:
        message = tool_message(opened.call.id, opened.result or self.abort_result(opened))
        self.messages.append(message)
        self.open_calls.remove(opened)  # last: a result twice is repaired, a lost one is not
        self.results.append(message)
        yield from _announce(message)

    def close(self) -> Events[None]:
        """Close a run that was stopped: keep the partial text, answer the open calls, end the step."""
        if text := "".join(self.partial):
            meta = self.stamp() | {"aborted": True}
            self.answer = {"role": "assistant", "content": text, "meta": meta}
            self.partial = []
            self.messages.append(self.answer)
            yield events.MessageEnd(self.answer)  # its start was at its first delta
        for opened in self.open_calls[:]:
            if not opened.is_started:
                opened.result = ToolResult(NOT_RUN, is_error=True)
            yield from self.add_result(opened)
        self.history.repair()  # an interrupt may have left a result twice
        yield from self.add_pending()
        if self.in_step:
            self.in_step = False
            yield events.StepEnd(self.answer, self.results, "aborted", Usage())

    @property
    def abort_reason(self) -> str:
        return ABORTED_BY.get(self.abort.reason, self.abort.reason or "stopped")

    def abort_result(self, opened: OpenCall) -> ToolResult:
        """The result of a tool that was aborted: its output so far, and why."""
        text = "\n".join(filter(None, ["".join(opened.output), f"[{self.abort_reason}]"]))
        limit = self.limits.max_output - 99  # so that it is cut only once
        return ToolResult(truncate(text, limit), is_error=True)

    def abort_end(self) -> End:
        if self.abort.reason == "max_time":
            seconds = self.limits.max_seconds  # None: the limit is that of the run it is part of
            limit = "Time limit" if seconds is None else f"Time limit of {seconds:g} s"
            text = f"{limit} reached, task may be incomplete."
            return End("max_time", self.text or text)
        return End("aborted", "Request aborted.")


def _announce(message: Message) -> Events[None]:
    yield events.MessageStart(message)
    yield events.MessageEnd(message)
