"""The state of one run, and what is done to its list of messages: adding to it, and settling it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from coder import events
from coder.abort import Abort
from coder.ai import Model
from coder.events import Events
from coder.history import NOT_RUN, NOTE_SIZE, History, now, tool_message, truncate
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
    """A reason to end the run, and the text that it ends with.

    `continuable`: a queued message or a reminder continues the run instead; this End is dropped.
    """

    stop_reason: StopReason
    text: str
    error: ModelError | None = None
    value: Any = None  # of a tool that has ended the run
    continuable: bool = False


@dataclass(eq=False)
class OpenCall:
    """A tool call of the newest answer whose result is not in the list yet.

    It is announced (ToolStart), gets a result (`end_call`, ToolEnd), and stays open until
    `Run.add_result` has put the result into the list: the results of a group enter it together.
    """

    call: ToolCall
    ctx: ToolContext
    is_announced: bool = False  # its ToolStart is out: a ToolEnd has to follow
    result: ToolResult | None = None  # None until `end_call`, or until `settle` gives it one
    # The newest texts of its ToolUpdates: the output that is kept, if it is aborted
    updates: deque[str] = field(default_factory=lambda: deque(maxlen=100))

    # The clock of the tool itself: neither its hooks count nor the time in which it asks the user
    tool_began: float | None = None  # by the monotonic clock; None: it is not running
    user_seconds: float = 0.0  # in which its questions waited for a reply
    tool_seconds: float = 0.0  # the outcome, set by `end_tool`

    def begin_tool(self) -> None:
        self.tool_began = time.monotonic()

    def end_tool(self) -> None:
        """Stop the clock, if it is running: it is not for a call that was not run, or if it was
        stopped before the hooks that see the result."""
        if self.tool_began is not None:
            self.tool_seconds = time.monotonic() - self.tool_began - self.user_seconds
            self.tool_began = None

    def end_call(self, result: ToolResult) -> events.ToolEnd:
        """Give the call its result; returns the event that reports it."""
        self.end_tool()
        self.result = result
        return events.ToolEnd(
            id=self.call.id,
            name=self.call.name,
            result=result,
            is_error=result.is_error,
            seconds=self.tool_seconds,
        )


@dataclass(eq=False)
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
    budget: Budget  # counts the steps of sub-agents, too; `steps` below does not

    # What has come of it so far
    pending: list[Message]  # prompts and queued messages that are not in the list yet
    steps: int = 0
    usage: Usage = field(default_factory=Usage)  # with that of sub-agents
    last_usage: Usage = field(default_factory=Usage)  # of the newest answer; empty if unknown
    text: str = ""  # of the newest answer
    compactions: int = 0  # since the newest answer
    was_reminded: bool = False  # the model has got a reminder to call (text_calls.py)
    offered: Toolset = field(init=False)  # the tools of the newest request, after the hooks
    history: History = field(init=False)  # its `repair` puts `messages` in order, in place
    repetitions: Repetitions = field(init=False)  # counts calls that bring nothing new

    # The current step
    in_step: bool = False
    partial: list[str] = field(default_factory=list)  # the text of an answer that still comes
    answer_message: Message = field(default_factory=dict)  # the whole answer; {} until it is there
    open_calls: list[OpenCall] = field(default_factory=list)
    tool_messages: list[Message] = field(default_factory=list)  # the results so far

    def __post_init__(self) -> None:
        self.offered = self.tools
        self.history = History(self.messages)
        self.repetitions = Repetitions(self.limits.doom_loop_threshold)

    def tool_context(self, call: ToolCall) -> ToolContext:
        """What the tool of a call gets."""
        return ToolContext(
            cwd=self.offered.cwd,
            abort=self.abort,
            session_id=self.offered.session_id,
            message_id=self.answer_message["meta"]["message_id"],
            call_id=call.id,
            seen=self.offered.seen,
            budget=self.budget,
            tool=self.offered.known.get(call.name),
        )

    def new_meta(self) -> dict[str, Any]:
        """The key "meta" of a new answer."""
        return {"message_id": new_id(), "timestamp": now(), "model": self.model.name}

    def begin_step(self) -> events.StepStart:
        """Count a step. The one before has left `partial` and `open_calls` empty."""
        self.budget.step()
        self.steps += 1
        self.in_step = True
        self.answer_message = {}
        self.tool_messages = []
        return events.StepStart(self.steps)

    def end_step(self, finish_reason: str, usage: Usage) -> events.StepEnd:
        self.in_step = False
        return events.StepEnd(
            message=self.answer_message,
            tool_results=self.tool_messages,
            finish_reason=finish_reason,
            usage=usage,
        )

    def add_pending(self) -> Events[None]:
        """Put the prompts and queued messages into the list."""
        while self.pending:
            message = self.pending[0]
            # First the append, then the pop. After an interrupt between them `settle` adds the
            # message again: it is in the list twice, which servers accept. The other way round it
            # would be lost
            self.messages.append(message)
            self.pending.pop(0)
            yield from _report(message)

    def add_result(self, opened: OpenCall) -> Events[None]:
        """Put the result of a call into the list: the call is no longer open."""
        assert opened.result
        message = tool_message(opened.call.id, opened.result)
        # First the append, as above. If `settle` adds the result again, its `repair` drops one of
        # the two
        self.messages.append(message)
        self.open_calls.remove(opened)
        self.tool_messages.append(message)
        yield from _report(message)

    def settle(self) -> Events[None]:
        """Leave the list valid, whatever stopped the run. Called again it does nothing, or what is
        left if an interrupt has stopped it."""
        # The text that has arrived becomes an answer. It is taken out of `partial` before it is in
        # the list, so that it is never added twice
        text = "".join(self.partial)
        if text:
            meta = self.new_meta() | {"aborted": True}
            self.answer_message = {"role": "assistant", "content": text, "meta": meta}
            self.partial = []
            self.messages.append(self.answer_message)
            yield events.MessageEnd(self.answer_message)  # its start was at its first delta

        # Each call gets a result, and each ToolStart its ToolEnd
        for opened in self.open_calls[:]:
            if not opened.is_announced:
                # Nothing has begun: it has neither a result nor a ToolStart, and gets no ToolEnd
                opened.result = ToolResult(NOT_RUN, is_error=True)
            elif opened.result is None:
                # Its tool or a hook was at work, or a question was open
                yield opened.end_call(self.abort_result(opened))
            yield from self.add_result(opened)
        self.history.repair()  # an interrupt may have left a result twice

        # Prompts and queued messages are kept
        yield from self.add_pending()
        if self.in_step:
            yield self.end_step("aborted", Usage())

    @property
    def abort_reason(self) -> str:
        """Why the run was aborted, in words."""
        reason = self.abort.reason
        if not reason:  # no abort: an exception, or the consumer takes no more events
            return "stopped"
        return ABORTED_BY.get(reason, reason)  # a program may set a reason of its own

    def abort_result(self, opened: OpenCall) -> ToolResult:
        """The result of a tool that was aborted: its output so far, and why."""
        text = f"[{self.abort_reason}]"
        output = "".join(opened.updates)
        if output:
            text = f"{output}\n{text}"
        max_chars = self.limits.max_output - NOTE_SIZE  # so that it is not truncated once more
        return ToolResult(truncate(text, max_chars), is_error=True)

    def abort_end(self) -> End:
        """The End of a run that was aborted, by the user or by a time limit."""
        if self.abort.reason != "max_time":
            return End("aborted", "Request aborted.")
        seconds = self.limits.max_seconds
        if seconds is None:  # the limit is that of the parent's run
            limit = "Time limit"
        else:
            limit = f"Time limit of {seconds:g} s"
        return End("max_time", self.text or f"{limit} reached, task may be incomplete.")


def _report(message: Message) -> Events[None]:
    yield events.MessageStart(message)
    yield events.MessageEnd(message)
