"""The state of one run, and what is done to its list of messages: adding to it, and closing it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import dropwhile
from typing import Any

from coder import events
from coder.abort import Abort
from coder.ai import Model
from coder.events import Events
from coder.history import History, now, tool_message, truncate
from coder.hooks import Hooks
from coder.providers.errors import RetryPolicy
from coder.providers.text import new_id
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
    """Why and with which text a run ends."""

    stop_reason: StopReason
    text: str
    error: ModelError | None = None
    continuable: bool = False  # by queued messages: the model is done


@dataclass
class OpenCall:
    """A tool call whose result is not in the list yet."""

    call: ToolCall
    ctx: ToolContext
    started: float = 0.0  # monotonic seconds; 0: no start event yet
    asking: float = 0.0  # seconds that the user took to answer, which are not the tool's
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
    last_usage: Usage = field(default_factory=Usage)  # of the newest answer
    text: str = ""  # of the newest answer
    compactions: int = 0  # since the newest answer
    in_step: bool = False
    answer: Message = field(default_factory=dict)  # of the current step
    partial: list[str] | None = None  # pieces of the answer under way; None before its first event
    open_calls: list[OpenCall] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.offered = self.tools  # what the newest request offered, as the hooks changed it
        self.history = History(self.messages, self.model.name)

    def context(self, call: ToolCall) -> ToolContext:
        """What the tool of a call may know and do."""
        context = self.offered.context(call, self.abort)
        context.budget, context.message_id = self.budget, self.answer["meta"]["message_id"]
        return context

    def stamp(self) -> dict[str, Any]:
        return {"message_id": new_id(), "timestamp": now(), "model": self.model.name}

    def add_pending(self) -> Events[None]:
        while self.pending:
            message = self.pending.pop(0)
            self.messages.append(message)
            yield events.MessageStart(message)
            yield events.MessageEnd(message)

    def close(self) -> Events[None]:
        """Close a run that was stopped: keep the partial text, answer the open calls, end the step."""
        start = len(self.messages)
        if text := "".join(self.partial or ()):
            meta = self.stamp() | {"aborted": True}
            self.answer = {"role": "assistant", "content": text, "meta": meta}
            self.partial = None
            self.messages.append(self.answer)
        # Calls that have not started are answered by the repair below
        started, self.open_calls = [each for each in self.open_calls if each.started], []
        self.messages += [
            tool_message(each.call.id, each.result or self.abort_result(each)) for each in started
        ]
        self.messages += self.pending
        self.pending.clear()
        self.history.repair()
        for message in self.messages[start:]:
            if not message.get("meta", {}).get("aborted"):  # its start was at its first delta
                yield events.MessageStart(message)
            yield events.MessageEnd(message)
        if self.in_step:
            self.in_step = False
            rest = dropwhile(lambda each: each is not self.answer, self.messages)
            results = [message for message in rest if message["role"] == "tool"]
            yield events.StepEnd(self.answer, results, "aborted", Usage())

    @property
    def abort_reason(self) -> str:
        return ABORTED_BY.get(self.abort.reason, self.abort.reason or "stopped")

    def abort_result(self, opened: OpenCall) -> ToolResult:
        """The result of a tool that was aborted: its output so far, and why."""
        limit = self.limits.max_output - len(self.abort_reason) - 99  # so that it is cut only once
        output = truncate("".join(opened.output), limit)
        text = "\n".join(filter(None, [output, f"[{self.abort_reason}]"]))
        return ToolResult(text, is_error=True)

    def abort_end(self) -> End:
        if self.abort.reason == "max_time":
            text = f"Time limit of {self.limits.max_seconds:g} s reached, task may be incomplete."
            return End("max_time", self.text or text)
        return End("aborted", "Request aborted.")
