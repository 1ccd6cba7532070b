"""The agent loop: call the model, run the tools it asks for, and again, until it is done.

Read `run_loop`, then `run_to_end`, `run_steps` and `run_step`. Asking the model, with retries and
compaction, is model_call.py; running tools is tool_calls.py; the state of a run is run.py. Events
come out, hooks go in.

The list of messages belongs to the caller and is extended in place. However a run ends (an answer,
a limit, an error, an abort, Ctrl+C, a consumer that stops iterating), each tool call in it has
exactly one result.

Messages that the user enters during a run wait in the hooks. The loop asks for steering messages at
the start, after each group of tools and when the model is done, for follow-ups only when the model
is done. They are queued in `run.pending`, and enter the list before the next request: never between
a call and its result.

An abort (abort.py) is a token that can be set from anywhere. It closes the stream of the answer and
stops the tools; in the loop the next `check` or `wait` of the token raises Aborted, which climbs to
`run_to_end`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from coder import events
from coder.abort import Abort
from coder.ai import Model
from coder.events import Events, drain, resolve
from coder.history import kept_usage, reason_not_to_answer, user
from coder.hooks import Hooks
from coder.model_call import ask, end_of
from coder.providers.errors import RetryPolicy
from coder.run import End, Run
from coder.text_calls import reminder
from coder.tool_calls import reason_to_skip, run_tools, skip_calls
from coder.toolset import Tool, Toolset
from coder.types import (
    Aborted,
    Budget,
    Limits,
    Message,
    ModelError,
    Reasoning,
    RunResult,
    Usage,
)

REMINDED = (
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

    `prompt` (text or messages) is added to the list first. `max_steps` replaces that of
    `limits`; a `budget`, if given, counts instead of both.
    Raises ValueError if there is nothing to answer, TypeError for hooks that are no Hooks,
    KeyboardInterrupt and programming errors.
    """
    if not isinstance(hooks, Hooks | None):
        raise TypeError("hooks is one object of the class Hooks; a HookChain makes one of several")
    if max_steps is not None:
        limits = replace(limits, max_steps=max_steps)
    run = Run(
        messages=messages,
        model=model,
        tools=tools if isinstance(tools, Toolset) else Toolset(tools),
        system=system,
        reasoning=reasoning,
        hooks=hooks or Hooks(),
        limits=limits,
        retry=retry,
        abort=abort or Abort(),
        budget=budget or Budget(limits.max_steps),
        pending=[user(prompt)] if isinstance(prompt, str) else list(prompt),
    )
    return run_to_end(run)


def run_to_end(run: Run) -> Events[RunResult]:
    """Run all steps, settle the list and report the end. Exceptions other than an abort leave from
    here: an interrupt after that report, all others without it."""
    interrupt: KeyboardInterrupt | None = None
    with run.abort.child(run.limits.max_seconds) as token:
        # A token of the run's own. The caller's token and the time limit set it; to set it does not
        # set the caller's
        run.abort = token
        try:
            yield events.RunStart()
            yield events.Status("preparing")
            end = yield from run_steps(run)
        except Aborted as error:
            run.abort.set(str(error))  # set already, unless a hook has raised it by itself
            end = run.abort_end()
            yield from run.settle()
        except KeyboardInterrupt as error:
            run.abort.set()
            end = run.abort_end()
            yield from run.settle()
            interrupt = error  # raised again below
        finally:
            # For a consumer that has stopped, or an exception that is not caught above: nobody can
            # get the events then. After the ends above nothing is left to settle
            drain(run.settle())
        yield events.Status("ended")
        yield events.RunEnd(
            stop_reason=end.stop_reason,
            text=end.text,
            usage=run.usage,
            steps=run.steps,
            error=end.error,
        )
    if interrupt:
        raise interrupt
    return RunResult(
        stop_reason=end.stop_reason,
        text=end.text,
        messages=run.messages,
        usage=run.usage,
        steps=run.steps,
        error=end.error,
        value=end.value,
    )


def run_steps(run: Run) -> Events[End]:
    """Take steps, until an answer or a limit ends the run and no queued message continues it."""
    yield from resolve(run.hooks.on_run_start(run.abort))
    queued = yield from resolve(run.hooks.get_steering_messages())
    run.pending += queued
    if not run.pending:  # there has to be something to answer
        problem = yield from reason_not_to_ask(run.messages, run.hooks)
        if problem:
            raise ValueError(f"{problem}: give the run a prompt")

    # Before the first answer of this run the hook on_length gets the tokens that were kept with the
    # last answer of an earlier run. They are found by its place in the list, once that is in order
    run.history.repair()
    run.last_usage = kept_usage(run.messages)

    while True:
        # One step, if there is still one
        run.abort.check()
        if run.budget.left <= 0:
            yield from run.add_pending()  # kept for the next run
            return End("max_steps", run.text or "Max steps reached, task may be incomplete.")
        end = yield from run_step(run)

        # Tools were called: the model gets their results
        if end is None:
            yield events.Status("preparing")
            continue

        # Nothing can continue the run
        if not end.continuable:
            return end

        # The model is done: queued messages, or a reminder, may continue the run
        yield events.Status("finishing")
        end = yield from continue_run(run, end)
        if end:
            return end
        yield events.Status("preparing")


def run_step(run: Run) -> Events[End | None]:
    """Ask the model, and run the tools that it calls.

    Returns None if tools were called, and the model has to see their results. Else the End: no
    attempt has brought an answer, the answer has no calls, or its calls end the run.
    """
    # The request, and its answer
    yield run.begin_step()
    yield from run.add_pending()
    answer = yield from ask(run)
    if isinstance(answer, End):  # no attempt has brought an answer
        yield run.end_step("error", Usage())  # "error": there is no finish_reason
        return answer

    # What the answer means for the run. If it has calls, only a content filter ends the run here
    end = end_of(answer, run.model.context_window)

    # Each call gets a result. If the calls are skipped, `end` stays as it is: that of the filter;
    # or None after a cut answer: the model reads in the results why they were not run
    if answer.calls:
        yield events.Status("running_tools")
        reason = reason_to_skip(answer, end)
        if reason:
            yield from skip_calls(run, reason)
        else:
            end = yield from run_tools(run)
        yield from run.add_pending()  # steering messages that run_tools has queued

    yield run.end_step(answer.finish_reason, answer.usage)
    return end


def reason_not_to_ask(messages: list[Message], hooks: Hooks) -> Events[str]:
    """Why a run without a prompt has nothing to ask the model; "" if the list has something."""
    problem = reason_not_to_answer(messages)
    if problem:  # a message with a custom role counts, if the hooks convert it
        converted = yield from resolve(hooks.convert_to_llm(messages))
        problem = reason_not_to_answer(converted)
    return problem


def continue_run(run: Run, end: End) -> Events[End | None]:
    """Queue what continues the run (run.pending) and return None; else return the End.

    Steering messages come first; without one, follow-ups; without one, a reminder to call.
    """
    queued = yield from resolve(run.hooks.get_steering_messages())
    if not queued:
        queued = yield from resolve(run.hooks.get_follow_up_messages())
    run.pending += queued
    if queued:
        return None
    if end.stop_reason != "stop":  # "length": a text that was cut is not judged
        return end
    return (yield from remind_to_call(run, end))


def remind_to_call(run: Run, end: End) -> Events[End | None]:
    """Queue a reminder and return None, if the answer only writes or announces a call; else return
    the End.

    The second time in a run that is an error.
    """
    text = reminder(
        answer=run.text,
        tools=list(run.offered.tools),
        is_tool=run.offered.has,
        has_called=run.repetitions.has_calls,
    )
    if not text:
        return end
    if run.was_reminded:
        return End("error", f"Error: {NOT_CALLED}", ModelError("no_call", NOT_CALLED))
    run.was_reminded = True
    yield events.Notice(REMINDED)
    run.pending.append(user(text))
    return None
