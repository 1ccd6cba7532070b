"""run_loop(): ask the model, run its tools, decide, again; until one of eight reasons to stop.

Each round: 1 repair the history · 2 shorten it if a hook wants to · 3 make the request · 4 stream the answer ·
5 decide (decision.py) · 6 run the tools · 7 look for messages that came meanwhile.

The loop owns the list of messages and works on it in place. Whatever ends a run (an answer, a limit, an error, an abort,
Ctrl+C, a consumer that walks away), every tool call in the list has its result, and the list can be sent again.

What it leaves out: everything that a hook or a consumer of the events can do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from coder.abort import Abort
from coder.decision import FULL, Decision, Facts, decide
from coder.errors import RetryPolicy
from coder.executor import Executor, Ledger
from coder.history import NOT_RUN, Converter, Repairer, now, repair, user
from coder.states import Machine, State
from coder.tools import Tool, Toolset
from coder.types import (
    Aborted,
    Compacted,
    Completion,
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
    Trigger,
    Usage,
    settle,
)

CUT = ("Not run: the answer was cut at the output limit, so this call may be incomplete. "
       "Send it again in smaller pieces, for instance a long file in several edits.")

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
             limits: Limits = Limits(), retry: RetryPolicy = RetryPolicy(), abort: Abort | None = None,
             ledger: Ledger | None = None) -> Generator[Event, None, RunResult]:
    """Run until done; yields events, returns the RunResult.

    `messages` is the conversation so far, changed in place. `prompts` (text, or messages) are added to it with their
    events; without them the run goes on from the list as it is. `reasoning` is how much the model is to think. `ledger`: a
    run of a sub-agent's counts in that of its parent. Raises nothing for what a model, a server or a tool does.
    KeyboardInterrupt and bugs climb, after `run_end` and with the list in order.
    """
    toolset = tools if isinstance(tools, Toolset) else Toolset(tools)
    pending = [user(prompts)] if isinstance(prompts, str) else list(prompts)
    with (abort or Abort()).child(limits.max_seconds) as token:
        run = _Run(messages, model, toolset, pending, system, reasoning, hooks or Hooks(), limits, retry, token,
                   ledger or Ledger(limits.max_steps))
        return (yield from run.go())


class _Run:
    """The state of one run."""

    def __init__(self, messages: list[Message], model: Model, tools: Toolset, pending: list[Message], system: str,
                 reasoning: Reasoning, hooks: Hooks, limits: Limits, retry: RetryPolicy, abort: Abort, ledger: Ledger) -> None:
        self.messages, self.model, self.tools, self.pending, self.system = messages, model, tools, pending, system
        self.reasoning, self.hooks, self.limits, self.retry, self.abort = reasoning, hooks, limits, retry, abort
        self.ledger = ledger
        self.steps = 0
        self.usage = Usage()
        self.last_usage = Usage()
        self.text = ""  # of the newest answer
        self.compactions = 0  # in a row, without a completed step between them
        self.repair, self.convert = Repairer(), Converter(model.name)
        self.executor = Executor(messages, pending, tools, self.hooks, limits, abort, ledger)
        self.machine = Machine()
        self.in_step = False
        self.answer: Message = {}  # of the step
        self.partial: list[str] = []  # text of the answer under way

    # -- start and end

    def go(self) -> Generator[Event, None, RunResult]:
        interrupt: KeyboardInterrupt | None = None
        try:
            yield RunStart()
            yield Status("busy")
            try:
                yield from settle(self.hooks.on_run_start(self.abort))
                verdict: Verdict = yield from self._rounds()
            except Aborted as aborted:
                verdict = self._aborted(str(aborted))
                yield from self._close()
            except KeyboardInterrupt as raised:
                interrupt, verdict = raised, self._aborted("aborted")
                yield from self._close()
        finally:
            self.machine.end()
            for _ in self._close():
                pass  # nobody listens any more: a bug climbs, or the consumer has gone
        yield Status("idle")
        usage = self.usage + self.executor.usage
        yield RunEnd(verdict.stop_reason, verdict.text, usage, self.steps, verdict.error)
        if interrupt:
            raise interrupt
        return RunResult(verdict.stop_reason, verdict.text, self.messages, usage, self.steps, verdict.error)

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
            self.answer = {"role": "assistant", "content": text, "meta": self._stamp() | {"aborted": True}}
            self.messages.append(self.answer)
        self.messages += self.executor.unfinished()
        self.messages += self.pending  # what was taken from a queue, or asked, is not lost
        self.pending.clear()
        self.repair(self.messages)
        for message in self.messages[before:]:
            if not (begun and message.get("meta", {}).get("aborted")):
                yield MessageStart(message)
            yield MessageEnd(message)
        if self.in_step:
            self.in_step = False
            place = next((place for place, message in enumerate(self.messages) if message is self.answer), len(self.messages))
            results = [message for message in self.messages[place:] if message["role"] == "tool"]
            yield StepEnd(self.answer, results, "aborted", Usage())

    # -- rounds

    def _rounds(self) -> Flow:
        """Steps until one of them, or a limit, ends the run."""
        self.pending += yield from settle(self.hooks.get_steering_messages())
        while True:
            self.abort.check()
            if self.ledger.left <= 0:
                yield from self._add_pending()
                self.machine.to(State.ENDED)
                return Verdict("max_steps", self.text or "Max steps reached, task may be incomplete.")
            verdict: Verdict | None = yield from self._step()
            if verdict and verdict.stop_reason == "stop":
                self.machine.to(State.FINISHING)
                self.pending += (yield from settle(self.hooks.get_steering_messages())) or (
                    yield from settle(self.hooks.get_follow_up_messages()))
                verdict = None if self.pending else verdict
            self.machine.to(State.ENDED if verdict else State.READY)
            if verdict:
                return verdict

    def _step(self) -> Flow:
        """One model call and its tools. Returns a Verdict where the run ends with it."""
        self.steps += 1
        self.ledger.step()
        self.in_step, self.answer = True, {}
        yield StepStart(self.steps)
        self.machine.to(State.PREPARING)
        yield from self._add_pending()
        answer, verdict = yield from self._answer()
        results: list[Message] = []
        if answer and answer.calls:
            results, repetition = yield from self._run_tools(answer, ended=bool(verdict))
            verdict = verdict or repetition
        self.in_step = False
        yield StepEnd(answer.message if answer else {}, results, answer.finish_reason if answer else "error",
                      answer.usage if answer else Usage())
        return verdict

    def _run_tools(self, answer: Completion, ended: bool) -> Generator[Event, None, tuple[list[Message], Verdict | None]]:
        """The calls of an answer. Those of one that was cut, or ends the run, are answered without being run."""
        if not ended:
            self.machine.to(State.RUNNING_TOOLS)
        not_run = NOT_RUN if ended else CUT if answer.finish == "length" else ""
        outcome = yield from self.executor.run(answer.calls, not_run)
        yield from self._add_pending()
        return outcome.results, Verdict("doom_loop", outcome.repetition) if outcome.repetition else None

    def _add_pending(self) -> Flow:
        """What was asked, or came from a queue, enters the history; where we are left in between, `_close` adds the rest."""
        while self.pending:
            message = self.pending.pop(0)
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
            self.machine.to(State.DECIDING)
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
                self.machine.to(State.COMPACTING)
                if not (yield from self._shorten("overflow" if failed else "length")):
                    text = answer.text if answer else ""
                    return (yield from self._accept(answer)), Verdict("length", text or "Context limit reached.", failed)
                self.machine.to(State.PREPARING)
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
        self.machine.to(State.ASKING)
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
            self.abort.check()  # a stream that was cut off may say so as an error
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
        answer.message["meta"] = self._stamp()
        self.answer = answer.message
        if answer.text or answer.calls:
            self.messages.append(answer.message)
        yield MessageEnd(answer.message)
        return answer

    def _stamp(self) -> dict[str, Any]:
        return {"timestamp": now(), "model": self.model.name}

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
        self.machine.to(State.WAITING)
        yield Retry(attempt, delay, error)
        yield Status("retry")
        self.abort.wait(delay)
        self.machine.to(State.PREPARING)
        yield Status("busy")

    def _shorten(self, trigger: Trigger) -> Generator[Event, None, bool]:
        """Let a hook compact the history, at most `max_compactions` times without a completed step."""
        if self.compactions >= self.limits.max_compactions:
            return False
        self.repair(self.messages)
        done = yield from self._filled(settle(self.hooks.on_length(self.messages, trigger, self.last_usage, self.abort)))
        if done:
            self.compactions += 1
            self.partial = []
            yield from settle(self.hooks.on_compacted(self.messages))
        return done

    def _filled(self, shortening: Generator[Event, None, bool]) -> Generator[Event, None, bool]:
        """Pass on what a hook says while it shortens the history, with the list in it that it has made."""
        try:
            while True:
                event = next(shortening)
                if isinstance(event, Compacted):
                    event.messages = self.messages[:]
                yield event
        except StopIteration as end:
            done: bool = end.value
            return done
        finally:
            shortening.close()
