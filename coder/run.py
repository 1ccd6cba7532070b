"""The state of one run, and what is done to its list of messages: adding to it, and settling it."""

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
    """Why a run ends, and with which text."""

    stop_reason: StopReason
    text: str
    error: ModelError | None = None
    continuable: bool = False  # a queued message may continue the run


@dataclass
class OpenCall:
    """A tool call of the newest answer whose result is not in the list yet."""

    call: ToolCall
    ctx: ToolContext
    is_started: bool = False  # its start event is out
    began: float | None = None  # monotonic seconds, when its tool began
    asking: float = 0.0  # seconds that the user took to answer; they are not the tool's
    seconds: float = 0.0  # that its tool took
    output: deque[str] = field(default_factory=lambda: deque(maxlen=100))  # its newest updates
    result: ToolResult | None = None


@dataclass
class Run:
    """The state of one run."""

    # What run_loop was given
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

    # What has come of it so far
    pending: list[Message]  # prompts and queued messages that are not in the list yet
    steps: int = 0
    usage: Usage = field(default_factory=Usage)  # with that of sub-agents
    # Of the newest answer. None: still to be read from the list; zeros: unknown, it was shortened
    last_usage: Usage | None = None
    text: str = ""  # of the newest answer
    compactions: int = 0  # since the newest answer
    was_reminded: bool = False  # that an answer called nothing
    offered: Toolset = field(init=False)  # the tools of the newest request, after the hooks
    history: History = field(init=False)
    repetitions: Repetitions = field(init=False)

    # The current step
    in_step: bool = False
    partial: list[str] = field(default_factory=list)  # the text that has arrived, in pieces
    answer: Message = field(default_factory=dict)
    open_calls: list[OpenCall] = field(default_factory=list)
    results: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.offered = self.tools
        self.history = History(self.messages)
        self.repetitions = Repetitions(self.limits.doom_loop_threshold)

    def context(self, call: ToolCall) -> ToolContext:
        """What the tool of a call gets."""
        return ToolContext(
            cwd=self.offered.cwd,
            abort=self.abort,
            session_id=self.offered.session_id,
            message_id=self.answer["meta"]["message_id"],
            call_id=call.id,
            seen=self.offered.seen,
            budget=self.budget,
            tool=self.offered.known.get(call.name),
        )

    def stamp(self) -> dict[str, Any]:
        """The meta data of an answer."""
        return {"message_id": new_id(), "timestamp": now(), "model": self.model.name}

    def begin_step(self) -> events.StepStart:
        self.budget.step()
        self.steps += 1
        self.in_step = True
        self.answer = {}
        self.results = []
        return events.StepStart(self.steps)

    def end_step(self, finish_reason: str, usage: Usage) -> events.StepEnd:
        self.in_step = False
        return events.StepEnd(self.answer, self.results, finish_reason, usage)

    def add_pending(self) -> Events[None]:
        while self.pending:
            message = self.pending[0]
            self.messages.append(message)
            self.pending.pop(0)  # after the append: after an interrupt between them it comes twice
            yield from _announce(message)

    def add_result(self, opened: OpenCall) -> Events[None]:
        result = opened.result or self.abort_result(opened)
        message = tool_message(opened.call.id, result)
        self.messages.append(message)
        # After the append: an interrupt between them leaves the result twice, and repair drops one
        self.open_calls.remove(opened)
        self.results.append(message)
        yield from _announce(message)

    def settle(self) -> Events[None]:
        """Leave the list valid, whatever stopped the run. Does nothing the second time."""
        # The text that has arrived becomes an answer
        text = "".join(self.partial)
        if text:
            meta = self.stamp() | {"aborted": True}
            self.answer = {"role": "assistant", "content": text, "meta": meta}
            self.partial = []
            self.messages.append(self.answer)
            yield events.MessageEnd(self.answer)  # its start was at its first delta
        # Each call gets a result
        for opened in self.open_calls[:]:
            if not opened.is_started:
                opened.result = ToolResult(NOT_RUN, is_error=True)
            yield from self.add_result(opened)
        self.history.repair()  # an interrupt may have left a result twice
        # Prompts and queued messages are kept
        yield from self.add_pending()
        if self.in_step:
            yield self.end_step("aborted", Usage())

    @property
    def abort_reason(self) -> str:
        return ABORTED_BY.get(self.abort.reason, self.abort.reason or "stopped")

    def abort_result(self, opened: OpenCall) -> ToolResult:
        """The result of a tool that was aborted: its output so far, and why."""
        output = "".join(opened.output)
        reason = f"[{self.abort_reason}]"
        text = f"{output}\n{reason}" if output else reason
        limit = self.limits.max_output - 99  # so that it is cut only once
        return ToolResult(truncate(text, limit), is_error=True)

    def abort_end(self) -> End:
        if self.abort.reason != "max_time":
            return End("aborted", "Request aborted.")
        limit = "Time limit"
        if self.limits.max_seconds is not None:  # None: the limit is the parent run's
            limit += f" of {self.limits.max_seconds:g} s"
        return End("max_time", self.text or f"{limit} reached, task may be incomplete.")


def _announce(message: Message) -> Events[None]:
    yield events.MessageStart(message)
    yield events.MessageEnd(message)
