"""Executor: the calls of an answer, run. Events, hooks around each tool, repetitions, skipped calls, output cut once.

Starts and results come in the order of the answer, and each result stands right behind its answer in the history. The
tool set says which calls go together; ours runs one after the other, features/parallel.py some side by side.

What it leaves out: what a tool is and one call of it (tools/__init__.py), and what follows on the results (loop.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from coder.abort import Abort
from coder.history import NOT_RUN, tool_message
from coder.tools import ToolContext, Toolset, as_failure
from coder.types import (
    Aborted,
    DoomLoop,
    Event,
    Hooks,
    Limits,
    Message,
    MessageEnd,
    MessageStart,
    Nested,
    RunEnd,
    ToolCall,
    ToolEnd,
    ToolError,
    ToolResult,
    ToolStart,
    ToolUpdate,
    Usage,
    settle,
)

SKIPPED = "Skipped due to queued user message."
ABORTED_BY = {"aborted": "aborted by the user", "max_time": "the time limit was reached"}
KEPT_UPDATES = 100  # of a tool that does not get to its end

Flow = Generator[Event, None, Any]


@dataclass
class Ledger:
    """What a run may still do and has done. A sub-agent's run has one of its own, below that of the run which called it:
    so its steps count there as well, and it ends with that one's limit."""

    max_steps: int
    parent: Ledger | None = None
    steps: int = 0  # model calls, with those of sub-agents
    repeated: tuple[str, int] = ("", 0)  # the newest call, and how often it came in a row

    def step(self) -> None:
        self.steps += 1
        if self.parent:
            self.parent.step()

    @property
    def left(self) -> int:
        """Steps until the nearest limit. The last one is the parent's, to say what came of it."""
        own = self.max_steps - self.steps
        return min(own, self.parent.left - 1) if self.parent else own


@dataclass
class Slot:
    """A call of the group under way, as far as it has come."""

    call: ToolCall
    ctx: ToolContext
    begun: float = 0.0  # monotonic seconds; 0 before its start event
    asking: float = 0.0  # seconds that a person took to answer, which are not the tool's
    output: list[str] = field(default_factory=list)
    result: ToolResult | None = None


@dataclass
class Outcome:
    """What came of the calls of one answer: their messages, and why the run ends, if it does."""

    results: list[Message] = field(default_factory=list)
    repetition: str = ""


class Executor:
    """Runs the calls of one run's answers. `messages` is the history, to which the results are added; what somebody says
    meanwhile goes to `pending`."""

    def __init__(self, messages: list[Message], pending: list[Message], tools: Toolset, hooks: Hooks, limits: Limits, abort: Abort,
                 ledger: Ledger) -> None:
        self.messages, self.pending, self.tools, self.hooks, self.limits, self.abort = messages, pending, tools, hooks, limits, abort
        self.ledger = ledger
        self.usage = Usage()  # of the runs that tools have made: sub-agents
        self.open: list[Slot] = []  # calls whose results are not in the history yet

    def run(self, calls: list[ToolCall], not_run: str = "") -> Generator[Event, None, Outcome]:
        """Run the calls. `not_run` says why none is to be run; every call has its events and its result all the same."""
        outcome = Outcome()
        for group in self.tools.groups(calls):
            self.open = [Slot(call, self._context(call)) for call in group]
            for slot in self.open:
                if self.abort.is_set:
                    not_run = f"Not run: {ABORTED_BY.get(self.abort.reason, self.abort.reason)}."
                if not not_run and self._count(slot.call) > self.limits.doom_loop_threshold:
                    not_run = NOT_RUN
                    outcome.repetition = (f"Stopped: {slot.call.name} was called {self.ledger.repeated[1]} times in a row with the same "
                                          "arguments.")
                yield from self._begin(slot, not_run)
            yield from self._work([slot for slot in self.open if slot.result is None])
            while self.open:
                outcome.results.append(tool_message(self.open[0].call.id, self.open[0].result or self._stopped(self.open[0])))
                self.messages.append(outcome.results[-1])
                self.open.pop(0)
                yield MessageStart(outcome.results[-1])
                yield MessageEnd(outcome.results[-1])
            if not (not_run or self.abort.is_set) and (came := (yield from settle(self.hooks.get_steering_messages()))):
                self.pending += came
                not_run = SKIPPED
        return outcome

    def unfinished(self) -> list[Message]:
        """The results of calls that were under way when the run was broken off, with what they had put out by then."""
        slots, self.open = self.open, []
        return [tool_message(slot.call.id, slot.result or self._stopped(slot)) for slot in slots if slot.begun]

    def _context(self, call: ToolCall) -> ToolContext:
        ctx = self.tools.context(call, self.abort)
        ctx.ledger = self.ledger
        return ctx

    # -- one call, from its start event to its end event

    def _begin(self, slot: Slot, not_run: str) -> Flow:
        """The start, and the result where the tool is not needed for it."""
        call = slot.call
        yield ToolStart(call.id, call.name, call.arguments or {}, self.tools.title(call))
        slot.begun = time.monotonic()
        unrun = ToolResult(not_run, is_error=True) if not_run else (yield from self._repetition(call))
        if unrun:
            slot.result = unrun
            yield self._end(slot)
        elif answer := (yield from self._answered(slot)):
            yield from self._finish(slot, answer)

    def _answered(self, slot: Slot) -> Generator[Event, None, ToolResult | None]:
        """What a hook answers in the place of the tool."""
        try:
            return _checked("before_tool_call", (yield from settle(self.hooks.before_tool_call(slot.call, slot.ctx))))
        except Aborted:
            return self._stopped(slot)
        except ToolError as error:  # a no, or a failure that is not to be passed over
            return as_failure(error)

    def _work(self, slots: Sequence[Slot]) -> Flow:
        """The tools of a group, to their ends. An abort becomes the result of those that it hit."""
        saying = self.tools.together([self.tools.run(slot.call, slot.ctx) for slot in slots], self.abort)
        try:
            for place, said in saying:
                if isinstance(said, ToolResult):
                    yield from self._finish(slots[place], said)
                else:
                    if isinstance(said, Nested) and isinstance(said.event, RunEnd):
                        self.usage += said.event.usage
                    yield from _passed_on(slots[place], said)
        except Aborted:
            for slot in slots:
                if slot.result is None:
                    yield from self._finish(slot, self._stopped(slot))
        finally:
            saying.close()

    def _finish(self, slot: Slot, result: ToolResult) -> Flow:
        try:
            result = _checked("after_tool_call", (yield from settle(self.hooks.after_tool_call(slot.call, result)))) or result
        except ToolError as error:
            result = as_failure(error)
        except Aborted:
            result = self._stopped(slot)
        slot.result = self._cut(result)
        yield self._end(slot)

    def _end(self, slot: Slot) -> ToolEnd:
        assert slot.result
        return ToolEnd(slot.call.id, slot.call.name, slot.result, slot.result.is_error, time.monotonic() - slot.begun - slot.asking)

    def _stopped(self, slot: Slot) -> ToolResult:
        note = f"[{ABORTED_BY.get(self.abort.reason, self.abort.reason or 'stopped')}]"
        return self._cut(ToolResult("\n".join(filter(None, ["".join(slot.output), note])), is_error=True))

    # -- the same call again and again

    def _count(self, call: ToolCall) -> int:
        """How often this call, by name and canonical arguments, came in a row."""
        key = call.name + json.dumps(call.arguments, sort_keys=True)
        self.ledger.repeated = (key, self.ledger.repeated[1] + 1 if key == self.ledger.repeated[0] else 1)
        return self.ledger.repeated[1]

    def _repetition(self, call: ToolCall) -> Generator[Event, None, ToolResult | None]:
        """The answer to a call that came too often in a row; None lets it run."""
        count = self.ledger.repeated[1]
        if count < self.limits.doom_loop_threshold:
            return None
        if (yield from settle(self.hooks.on_doom_loop(DoomLoop(call.name, call.arguments or {}, count)))):
            self.ledger.repeated = ("", 0)
            return None
        return ToolResult(f"Not run: {call.name} was called {count} times in a row with the same arguments, and the result "
                          "would be the same. Do something else, or say what is in the way. The same call once more ends "
                          "the run.", is_error=True)

    # -- output

    def _cut(self, result: ToolResult) -> ToolResult:
        """The one place where output is cut."""
        content = result.content
        if isinstance(content, str):
            result.content = truncate(content, self.limits.max_output)
        else:
            result.content = [part | {"text": truncate(part["text"], self.limits.max_output)} if "text" in part else part
                              for part in content]
        return result


def _checked(hook: str, result: ToolResult | None) -> ToolResult | None:
    if not isinstance(result, ToolResult | None):
        raise TypeError(f"{hook} gave {result!r}: a hook gives a ToolResult or None")
    return result


def _passed_on(slot: Slot, event: Event) -> Flow:
    """Pass an event on; keep the newest output for the case that the tool does not get to its end."""
    if isinstance(event, ToolUpdate):
        slot.output.append(event.text)
        del slot.output[:-KEPT_UPDATES]
    passed = time.monotonic()
    yield event
    while isinstance(event, Nested):
        event = event.event
    if hasattr(event, "reply"):
        slot.asking += time.monotonic() - passed


def truncate(text: str, limit: int = 30_000) -> str:
    """At most `limit` characters, the first and the last half, with a marker that says how much is missing."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n\n... [truncated {len(text) - limit} characters] ...\n\n{text[len(text) - half:]}"
