"""The agent loop: call the model, run the tools it asks for, and again, until it is done.

Read `run_loop`, then `run_to_end`, then `run_steps`. Asking the model, with retries and compaction, is
model_call.py; running tools is tool_calls.py; the state of a run is run.py. Events come out, hooks go in.

The list of messages belongs to the caller and is extended in place. However a run ends (an answer, a limit,
an error, an abort, Ctrl+C, a consumer that stops iterating), each tool call in it has exactly one result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from coder import events
from coder.abort import Abort
from coder.ai import Model
from coder.events import Events, drain, resolve
from coder.history import nothing_to_answer, user
from coder.hooks import Hooks
from coder.model_call import ask
from coder.providers.errors import RetryPolicy
from coder.run import End, Run
from coder.text_calls import reminder
from coder.tool_calls import run_tools
from coder.toolset import Tool, Toolset
from coder.types import (
    Aborted,
    Budget,
    Completion,
    Limits,
    Message,
    ModelError,
    Reasoning,
    RunResult,
)

ASKED_AGAIN = (
    "The model wrote or announced a tool call instead of making it, and is asked once more. "
    "If this happens often, the server's tool parser is missing or off."
)
NOT_CALLED = "the model called no tool, although it was asked to"


def run_loop(
    messages: list[Message],
    model: Model,
    tools: Toolset | Iterable[Tool | Callable[..., object]] = (),
    *,
    prompt: str | Sequence[Message] = (),
    system: str = "",
    reasoning: Reasoning = "off",
    hooks: Hooks | None = None,
    limits: Limits = Limits(),
    max_steps: int | None = None,
    retry: RetryPolicy = RetryPolicy(),
    abort: Abort | None = None,
    budget: Budget | None = None,
) -> Events[RunResult]:
    """A generator of the events of one run, which returns its RunResult.

    `prompt` (text or messages) is added to the list first. `max_steps` replaces that of `limits`.
    Raises ValueError where there is nothing to answer, KeyboardInterrupt and programming errors.
    """
    if not isinstance(hooks, Hooks | None):
        raise TypeError("hooks is one object of the class Hooks; a HookChain makes one of several")
    limits = replace(limits, max_steps=max_steps) if max_steps is not None else limits
    run = Run(
        messages,
        model,
        tools if isinstance(tools, Toolset) else Toolset(tools),
        system,
        reasoning,
        hooks or Hooks(),
        limits,
        retry,
        abort or Abort(),
        budget or Budget(limits.max_steps),
        pending=[user(prompt)] if isinstance(prompt, str) else list(prompt),
    )
    return run_to_end(run)


def run_to_end(run: Run) -> Events[RunResult]:
    """Run all steps; close the list and report the end on every way out."""
    interrupt: KeyboardInterrupt | None = None
    with run.abort.child(run.limits.max_seconds) as token:
        run.abort = token
        try:
            yield events.RunStart()
            yield events.Status("preparing")
            end = yield from run_steps(run)
        except (Aborted, KeyboardInterrupt) as error:
            interrupt = error if isinstance(error, KeyboardInterrupt) else None
            run.abort.set(str(error) or "aborted")  # a KeyboardInterrupt has no text
            end = run.abort_end()
            yield from run.close()
        finally:
            drain(run.close())  # nobody can get these events: an exception, or the consumer stopped
        yield events.Status("ended")
        yield events.RunEnd(end.stop_reason, end.text, run.usage, run.steps, end.error)
        if interrupt:
            raise interrupt
        return RunResult(end.stop_reason, end.text, run.messages, run.usage, run.steps, end.error)


def unanswerable(messages: list[Message], hooks: Hooks) -> Events[str]:
    """Why a list has nothing that a model could answer, also as the hooks convert it; "" where it has."""
    problem = nothing_to_answer(messages)
    if problem:  # unless there is a message with a role of the user's own
        problem = nothing_to_answer((yield from resolve(hooks.convert_to_llm(messages))))
    return problem


def run_steps(run: Run) -> Events[End]:
    """Take steps, until an answer or a limit ends the run and no queued message continues it."""
    yield from resolve(run.hooks.on_run_start(run.abort))
    run.pending += yield from resolve(run.hooks.get_steering_messages())
    problem = "" if run.pending else (yield from unanswerable(run.messages, run.hooks))
    if problem:
        raise ValueError(f"{problem}: give the run a prompt")
    end = None
    while not end:
        run.abort.check()
        if run.budget.left <= 0:
            yield from run.add_pending()
            return End("max_steps", run.text or "Max steps reached, task may be incomplete.")
        yield run.begin_step()
        yield from run.add_pending()
        answer, end = yield from ask(run)
        if answer and answer.calls:
            yield events.Status("running_tools")
            end = (yield from run_tools(run, answer, end)) or end
            yield from run.add_pending()
        yield run.end_step(answer)
        if end and end.continuable:
            yield events.Status("finishing")
            run.pending += yield from resolve(run.hooks.get_steering_messages())
            if not run.pending:
                run.pending += yield from resolve(run.hooks.get_follow_up_messages())
            if not run.pending and answer and end.stop_reason == "stop":
                end = yield from check_called(run, answer, end)
            end = None if run.pending else end
        if not end:
            yield events.Status("preparing")
    return end


def check_called(run: Run, answer: Completion, end: End) -> Events[End]:
    """Ask once more after an answer in which a call is only written or announced; the second one ends the run."""
    tools = run.offered
    if not tools.tools:
        return end
    text = reminder(
        answer.text, list(tools.tools), tools.has, has_run_tools=run.repetitions.calls > 0
    )
    if not text:
        return end
    if run.was_reminded:
        return End("error", f"Error: {NOT_CALLED}", ModelError("no_call", NOT_CALLED))
    run.was_reminded = True
    yield events.Notice(ASKED_AGAIN)
    run.pending.append(user(text))
    return end
