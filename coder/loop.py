"""run_loop(): ask the model, run its tools, decide, again; until one of eight reasons to stop.

Each round: 1 repair the history · 2 shorten it if a hook wants to · 3 make the request · 4 stream the answer ·
5 decide (decision.py) · 6 run the tools · 7 look for messages that came meanwhile.

The loop owns the list of messages and works on it in place. Whatever ends a run (an answer, a limit, an error, an abort,
Ctrl+C, a consumer that walks away), every tool call in the list has its result, and the list can be sent again.

What it leaves out: everything that a hook or a consumer of the events can do.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from coder.abort import Abort
from coder.decision import FULL, Decision, Facts, decide
from coder.errors import RetryPolicy
from coder.history import NOT_RUN, Converter, Repairer, now, repair, tool_message, user
from coder.tools import Tool, Toolset, as_failure
from coder.types import (
    Aborted,
    Completion,
    DoomLoop,
    Event,
    Hooks,
    Limits,
    Message,
    MessageEnd,
    MessageStart,
    Model,
    ModelError,
    Notice,
    Reasoning,
    Request,
    Retry,
    RunEnd,
    RunResult,
    RunStart,
    Status,
    StepEnd,
    StepStart,
    StopReason,
    TextDelta,
    ToolCall,
    ToolEnd,
    ToolError,
    ToolResult,
    ToolStart,
    ToolUpdate,
    Usage,
    settle,
)

CUT = ("Not run: the answer was cut at the output limit, so this call may be incomplete. "
       "Send it again in smaller pieces, for instance a long file in several edits.")
SKIPPED = "Skipped due to queued user message."
ABORTED_BY = {"aborted": "aborted by the user", "max_time": "the time limit was reached"}

Flow = Generator[Event, None, Any]


# ---- the run ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """Why and with which text a run ends."""

    stop_reason: StopReason
    text: str
    error: ModelError | None = None


def run_loop(messages: list[Message], model: Model, tools: Toolset | Iterable[Tool | Callable[..., Any]] = (), *,
             prompts: str | Sequence[Message] = (), system: str = "", reasoning: Reasoning = "off", hooks: Hooks | None = None,
             limits: Limits = Limits(), retry: RetryPolicy = RetryPolicy(),
             abort: Abort | None = None) -> Generator[Event, None, RunResult]:
    """Run until done; yields events, returns the RunResult.

    `messages` is the conversation so far, changed in place. `prompts` (text, or messages) are added to it with their
    events; without them the run goes on from the list as it is. `reasoning` is how much the model is to think. Raises
    nothing for what a model, a server or a tool does. KeyboardInterrupt and bugs climb, after `run_end` and with the list
    in order.
    """
    toolset = tools if isinstance(tools, Toolset) else Toolset(tools)
    pending = [user(prompts)] if isinstance(prompts, str) else list(prompts)
    with (abort or Abort()).child(limits.max_seconds) as token:
        run = _Run(messages, model, toolset, pending, system, reasoning, hooks or Hooks(), limits, retry, token)
        return (yield from run.go())


class _Run:
    """The state of one run."""

    def __init__(self, messages: list[Message], model: Model, tools: Toolset, pending: list[Message], system: str,
                 reasoning: Reasoning, hooks: Hooks, limits: Limits, retry: RetryPolicy, abort: Abort) -> None:
        self.messages, self.model, self.tools, self.pending, self.system = messages, model, tools, pending, system
        self.reasoning, self.hooks, self.limits, self.retry, self.abort = reasoning, hooks, limits, retry, abort
        self.steps = 0
        self.usage = Usage()
        self.last_usage = Usage()
        self.text = ""  # of the newest answer
        self.compactions = 0  # in a row, without a completed step between them
        self.repeated: tuple[str, int] = ("", 0)  # the newest call, and how often it came in a row
        self.repair, self.convert = Repairer(), Converter(model.name)
        self.in_step = False
        self.partial: list[str] = []  # text of the answer under way
        self.running: tuple[ToolCall, list[str]] | None = None  # the call under way, and its output so far
        self.asking = 0.0  # seconds that a person took to answer, which are not the tool's

    # -- start and end

    def go(self) -> Generator[Event, None, RunResult]:
        interrupt: KeyboardInterrupt | None = None
        try:
            yield RunStart()
            yield Status("busy")
            try:
                verdict: Verdict = yield from self._rounds()
            except Aborted as aborted:
                verdict = self._aborted(str(aborted))
                yield from self._close()
            except KeyboardInterrupt as raised:
                interrupt, verdict = raised, self._aborted("aborted")
                yield from self._close()
        finally:
            for _ in self._close():
                pass  # nobody listens any more: a bug climbs, or the consumer has gone
        yield Status("idle")
        yield RunEnd(verdict.stop_reason, verdict.text, self.usage, self.steps, verdict.error)
        if interrupt:
            raise interrupt
        return RunResult(verdict.stop_reason, verdict.text, self.messages, self.usage, self.steps, verdict.error)

    def _aborted(self, reason: str) -> Verdict:
        self.abort.set(reason)
        if reason == "max_time":
            return Verdict("max_time", self.text or f"Time limit of {self.limits.max_seconds:g} s reached, task may be incomplete.")
        return Verdict("aborted", "Request aborted.")

    def _close(self) -> Flow:
        """Put the history in order after an end in the middle: keep the partial text, answer the open calls."""
        before, begun = len(self.messages), bool(self.partial)
        if text := "".join(self.partial):
            self.partial = []
            self.messages.append({"role": "assistant", "content": text, "meta": {"aborted": True}})
        if self.running:
            call, output = self.running
            self.running = None
            self.messages.append(tool_message(call.id, self._stopped(output)))
        self.messages += self.pending  # what was taken from a queue, or asked, is not lost
        self.pending = []
        self.repair(self.messages)
        for message in self.messages[before:]:
            if not (begun and message.get("meta", {}).get("aborted")):
                yield MessageStart(message)
            yield MessageEnd(message)
        if self.in_step:
            self.in_step = False
            yield StepEnd(self.messages[-1] if self.messages else {}, [], "aborted", Usage())

    def _stopped(self, output: list[str]) -> ToolResult:
        note = f"[{ABORTED_BY.get(self.abort.reason, self.abort.reason or 'stopped')}]"
        return self._cut(ToolResult("\n".join(filter(None, ["".join(output), note])), is_error=True))

    # -- rounds

    def _rounds(self) -> Flow:
        """Steps until one of them, or a limit, ends the run."""
        self.pending += yield from settle(self.hooks.get_steering_messages())
        while True:
            self.abort.check()
            if self.steps >= self.limits.max_steps:
                yield from self._add(self.pending)
                self.pending = []
                return Verdict("max_steps", self.text or "Max steps reached, task may be incomplete.")
            verdict: Verdict | None = yield from self._step()
            if verdict and verdict.stop_reason == "stop":
                self.pending += yield from settle(self.hooks.get_follow_up_messages())
                verdict = None if self.pending else verdict
            if verdict:
                return verdict

    def _step(self) -> Flow:
        """One model call and its tools. Returns a Verdict where the run ends with it."""
        self.steps += 1
        self.in_step = True
        yield StepStart(self.steps)
        pending, self.pending = self.pending, []
        yield from self._add(pending)
        answer, verdict = yield from self._answer()
        results: list[Message] = []
        if answer and answer.calls:
            reason = CUT if answer.finish == "length" else ""
            results, verdict = yield from self._run_tools(answer.calls, reason)
        self.in_step = False
        yield StepEnd(answer.message if answer else {}, results, answer.finish_reason if answer else "error",
                      answer.usage if answer else Usage())
        return verdict

    def _add(self, messages: Iterable[Message]) -> Flow:
        for message in messages:
            self.messages.append(message)
            yield MessageStart(message)
            yield MessageEnd(message)

    # -- the model

    def _answer(self) -> Generator[Event, None, tuple[Completion | None, Verdict | None]]:
        """An answer, after as many attempts as it takes and the policy allows; with the Verdict, if it ends the run."""
        errors, attempts, loading = 0, 0, 0.0  # loading: since when the server says that it loads its model
        while True:
            attempts += 1
            yield from self._shorten("threshold")
            outcome = yield from self._attempt()
            failed = outcome if isinstance(outcome, ModelError) else None
            answer = outcome if isinstance(outcome, Completion) else None
            decision = decide(self._facts(outcome))
            if failed and decision is Decision.RETRY:
                loading = (loading or time.monotonic()) if failed.loading else 0.0
                errors += not loading or time.monotonic() - loading > self.retry.loading
                delay = self.retry.delay(failed, max(errors, 1)) if errors < self.limits.max_errors else None
                if delay is None:
                    return None, self._failed(failed, errors)
                yield from self._wait(attempts, delay, failed)
            elif decision is Decision.COMPACT:
                if not (yield from self._shorten("overflow" if failed else "length")):
                    text = answer.text if answer else ""
                    return (yield from self._accept(answer)), Verdict("length", text or "Context limit reached.", failed)
            elif failed:
                return None, self._failed(failed, errors + 1)
            else:
                return (yield from self._accept(answer)), (yield from self._verdict(decision))

    def _facts(self, outcome: Completion | ModelError) -> Facts:
        if isinstance(outcome, ModelError):
            return Facts(error=outcome)
        full = outcome.usage.input + outcome.usage.output >= FULL * self.model.context_window
        return Facts(bool(outcome.calls), outcome.finish, full)

    def _attempt(self) -> Generator[Event, None, Completion | ModelError]:
        """One request and its answer, or the error instead of it."""
        self.partial = []
        try:
            request = yield from self._request()
        except ModelError as error:  # a hook's no
            return error
        stream = self.model.stream(request, self.abort)
        try:
            while True:
                event = next(stream)
                if not (self.partial or isinstance(event, Notice)):
                    yield MessageStart({"role": "assistant", "content": ""})
                    self.partial.append("")
                if isinstance(event, TextDelta):
                    self.partial.append(event.text)
                yield event
        except StopIteration as end:
            answer: Completion = end.value
        except ModelError as error:
            self.partial = []
            return error
        finally:
            stream.close()
        if not self.partial:
            yield MessageStart({"role": "assistant", "content": ""})
        yield from settle(self.hooks.after_llm_call(answer))
        return answer

    def _request(self) -> Generator[Event, None, Request]:
        """What is sent: the history repaired, transformed and converted, and what the hooks make of it."""
        self.repair(self.messages)
        chosen = yield from settle(self.hooks.transform_context(self.messages, self.abort))
        converted = yield from settle(self.hooks.convert_to_llm(chosen))
        wire = self.convert(converted)
        if converted is not self.messages:
            wire = repair(wire)
        key = yield from settle(self.hooks.get_api_key())
        request = Request(wire, self.tools.schemas, self.system, key, reasoning=self.reasoning, session_id=self.tools.session_id)
        yield from settle(self.hooks.before_llm_call(request))
        return request

    def _accept(self, answer: Completion | None) -> Generator[Event, None, Completion | None]:
        """The answer enters the history."""
        if answer is None:
            return None
        self.partial = []
        self.compactions = 0
        self.text, self.last_usage = answer.text, answer.usage
        self.usage += answer.usage
        answer.message["meta"] = {"timestamp": now(), "model": self.model.name}
        if answer.text or answer.calls:
            self.messages.append(answer.message)
        yield MessageEnd(answer.message)
        return answer

    def _verdict(self, decision: Decision) -> Generator[Event, None, Verdict | None]:
        match decision:
            case Decision.END:
                return Verdict("stop", self.text or "Task completed.")
            case Decision.END_LENGTH:
                return Verdict("length", self.text or "The answer was cut at the output limit before it began.")
            case Decision.END_FILTERED:
                yield Notice("The provider's content filter stopped the answer.")
                return Verdict("content_filter", self.text or "The provider's content filter stopped the answer.")
        return None

    def _failed(self, error: ModelError, errors: int) -> Verdict:
        wait = error.retry_after or 0
        asked = f" (the server asks to wait {wait:.0f} s)" if wait > self.retry.max_delay else ""
        text = f"Error: {error.message}{asked}" if errors < 2 else f"Failed after {errors} errors: {error.message}{asked}"
        return Verdict("error", text, error)

    def _wait(self, attempt: int, delay: float, error: ModelError) -> Flow:
        yield Retry(attempt, delay, error)
        yield Status("retry")
        self.abort.wait(delay)
        yield Status("busy")

    def _shorten(self, trigger: Literal["threshold", "length", "overflow"]) -> Generator[Event, None, bool]:
        """Let a hook compact the history, at most `max_compactions` times without a completed step."""
        if self.compactions >= self.limits.max_compactions:
            return False
        self.repair(self.messages)
        done = yield from settle(self.hooks.on_length(self.messages, trigger, self.last_usage))
        if done:
            self.compactions += 1
            self.partial = []
            yield from settle(self.hooks.on_compacted(self.messages))
        return done

    # -- the tools

    def _run_tools(self, calls: list[ToolCall],
                   not_run: str) -> Generator[Event, None, tuple[list[Message], Verdict | None]]:
        """Run the calls in order, each with its result right behind it. `not_run` says why none is to be run."""
        results: list[Message] = []
        steering: list[Message] = []
        verdict = None
        for call in calls:
            if self.abort.is_set:
                not_run = f"Not run: {ABORTED_BY.get(self.abort.reason, self.abort.reason)}."
            if not not_run and self._count(call) > self.limits.doom_loop_threshold:
                not_run = NOT_RUN
                verdict = Verdict("doom_loop", f"Stopped: {call.name} was called {self.repeated[1]} times in a row "
                                               "with the same arguments.")
            result = yield from self._call(call, not_run)
            results.append(tool_message(call.id, result))
            yield from self._add(results[-1:])
            self.running = None
            if not not_run and (came := (yield from settle(self.hooks.get_steering_messages()))):
                steering, not_run = list(came), SKIPPED
        yield from self._add(steering)
        return results, verdict

    def _count(self, call: ToolCall) -> int:
        """How often this call, by name and canonical arguments, came in a row."""
        key = call.name + json.dumps(call.arguments, sort_keys=True)
        self.repeated = (key, self.repeated[1] + 1 if key == self.repeated[0] else 1)
        return self.repeated[1]

    def _call(self, call: ToolCall, not_run: str) -> Generator[Event, None, ToolResult]:
        """One call, from its start event to its end event."""
        yield ToolStart(call.id, call.name, call.arguments or {}, self.tools.title(call))
        self.asking, started = 0.0, time.monotonic()
        if not_run:
            result = ToolResult(not_run, is_error=True)
        else:
            result = (yield from self._repetition(call)) or (yield from self._execute(call))
        yield ToolEnd(call.id, call.name, result, result.is_error, time.monotonic() - started - self.asking)
        return result

    def _repetition(self, call: ToolCall) -> Generator[Event, None, ToolResult | None]:
        """The answer to a call that came too often in a row; None lets it run."""
        count = self.repeated[1]
        if count < self.limits.doom_loop_threshold:
            return None
        if (yield from settle(self.hooks.on_doom_loop(DoomLoop(call.name, call.arguments or {}, count)))):
            self.repeated = ("", 0)
            return None
        return ToolResult(f"Not run: {call.name} was called {count} times in a row with the same arguments, and the result "
                          "would be the same. Do something else, or say what is in the way. The same call once more ends "
                          "the run.", is_error=True)

    def _execute(self, call: ToolCall) -> Generator[Event, None, ToolResult]:
        """The hooks around the tool, and the tool. An abort becomes its result, with what it had put out by then."""
        output: list[str] = []
        self.running = (call, output)
        ctx = self.tools.context(call, self.abort)
        try:
            result = yield from settle(self.hooks.before_tool_call(call, ctx))
            if result is None:
                work = self.tools.run(call, ctx)
                result = yield from self._noting(work, output)
        except Aborted:
            result = self._stopped(output)
        except ToolError as error:  # of a hook: a no, or a failure that is not to be passed over
            result = as_failure(error)
        try:
            result = (yield from settle(self.hooks.after_tool_call(call, result))) or result
        except ToolError as error:
            result = as_failure(error)
        return self._cut(result)

    def _noting(self, work: Generator[Event, None, ToolResult], output: list[str]) -> Generator[Event, None, ToolResult]:
        """Pass events on, and keep the newest output for the case that the tool does not get to its end."""
        try:
            while True:
                event = next(work)
                if isinstance(event, ToolUpdate):
                    output.append(event.text)
                    del output[:-100]
                passed = time.monotonic()
                yield event
                if hasattr(event, "reply"):
                    self.asking += time.monotonic() - passed
        except StopIteration as end:
            result: ToolResult = end.value
            return result
        finally:
            work.close()

    def _cut(self, result: ToolResult) -> ToolResult:
        """The one place where output is cut."""
        content = result.content
        if isinstance(content, str):
            result.content = truncate(content, self.limits.max_output)
        else:
            result.content = [part | {"text": truncate(part["text"], self.limits.max_output)} if "text" in part else part
                              for part in content]
        return result


def truncate(text: str, limit: int = 30_000) -> str:
    """At most `limit` characters, the first and the last half, with a marker that says how much is missing."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n\n... [truncated {len(text) - limit} characters] ...\n\n{text[len(text) - half:]}"
