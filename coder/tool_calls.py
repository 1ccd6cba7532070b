"""Running the tool calls of one answer: hooks around each, repetitions not run, output cut once.

Start events and result messages come in the order of the answer. The tool set says which
neighbouring calls run at the same time (`group_size`), and runs them (`outputs_of`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from coder import events
from coder.events import Event, Events, Outcome, is_question, resolve
from coder.history import NOT_RUN, as_text, truncate_content
from coder.providers.text import new_id
from coder.providers.wire import copied
from coder.repetition import SAME_AS_ABOVE, STALE_CALLS_TO_END
from coder.run import End, OpenCall, Run
from coder.toolset import as_failure
from coder.types import Aborted, Completion, T, ToolCall, ToolError, ToolResult

ANSWER_CUT = (
    "Not run: the answer was cut at the output limit, so this call may be incomplete. "
    "Send it again in smaller pieces, for instance a long file in several edits."
)
SKIPPED = "Skipped due to queued user message."


def reason_to_skip(answer: Completion, end: End | None) -> str:
    """Why none of the calls of an answer is run; "" if they are. `end` is that of `end_of`."""
    if end:  # a content filter has stopped the answer
        return NOT_RUN
    if answer.finish == "length":
        return ANSWER_CUT
    return ""


def skip_calls(run: Run, reason: str) -> Events[None]:
    """Give each open call a result that says why it is not run."""
    for opened in run.open_calls[:]:
        yield from announce_call(run, opened)  # no matter whether its arguments fit
        yield opened.end_call(ToolResult(reason, is_error=True))
        yield from run.add_result(opened)


def run_tools(run: Run) -> Events[End | None]:
    """Add a result for each open call.

    Returns the End of a run that a tool ends, or that repeats itself. After an abort the calls that
    are left get results here, too; run_steps then ends the run.
    """
    run.repetitions.begin_answer()
    while run.open_calls:
        # Start the calls of the next group, until one ends the run. A group is one call alone, or
        # neighbours that run at the same time. Some have their results at once (`start_call`)
        size = run.offered.group_size([opened.call for opened in run.open_calls])
        group: list[OpenCall] = []
        end: End | None = None
        for opened in run.open_calls[:size]:
            group.append(opened)
            end = yield from start_call(run, opened)
            if end:
                break

        # Run the tools of the others. This is also done if the last call of the group has ended the
        # run: those before it were announced. The results enter the list in the order of the answer
        yield from run_group(run, group)
        for opened in group:
            yield from run.add_result(opened)

        # What else may end the run: a tool with its value, or calls that bring nothing new
        if end is None:
            end = end_by_tool(group)
        if end is None:
            end = yield from stop_if_stuck(run, group[-1].call)
        if end:
            yield from skip_calls(run, NOT_RUN)
            return end

        # A message that the user has queued comes before the calls that are left. After an abort
        # nothing is queued: the calls that are left get their results in the next rounds
        if not run.abort.is_set():
            queued = yield from resolve(run.hooks.get_steering_messages())
            run.pending += queued
            if queued:
                yield from skip_calls(run, SKIPPED)
    return None


def announce_call(run: Run, opened: OpenCall) -> Events[ToolResult | None]:
    """Bring the arguments of a call to the types of its tool, and report its start.

    If they do not fit, the event has {} for them, and the failure is returned: it can be the
    call's result.
    """
    call = opened.call
    failure: ToolResult | None = None
    arguments = {}
    try:
        call.arguments = run.offered.fit_arguments(call)
        arguments = copied(call.arguments)  # a consumer of the event may change them
    except ToolError as error:
        failure = as_failure(error)
        failure.can_be_new = False
    opened.is_announced = True
    yield events.ToolStart(
        id=call.id,
        name=call.name,
        arguments=arguments,
        title=run.offered.title(call),
    )
    return failure


def start_call(run: Run, opened: OpenCall) -> Events[End | None]:
    """Announce the call. It gets its result at once, if its tool is not to be run.

    Returns the End of a run that repeats itself.
    """
    call = opened.call
    failure = yield from announce_call(run, opened)
    if run.abort.is_set():
        yield opened.end_call(ToolResult(f"Not run: {run.abort_reason}.", is_error=True))
        return None

    # It equals an earlier call of this answer, and nothing was changed in between: not run again
    if run.repetitions.seen_in_answer(call):
        yield opened.end_call(ToolResult(SAME_AS_ABOVE))
        return None
    run.repetitions.add_to_answer(call, run.offered.changes_nothing(call))

    # The third equal call in a row is refused; the fourth is refused, too, and ends the run. A call
    # that was refused has its result
    end = yield from stop_repetition(run, opened)
    if opened.result:
        return end

    # Unusable arguments: no hook sees the call
    if failure:
        run.repetitions.add_result(call, failure)
        yield opened.end_call(failure)
        return None

    # A hook may deny the call, or have a result for it. Only this result and those of tools go
    # through `finish_call`, which calls after_tool_call
    result = yield from call_hook(run, opened, hook=run.hooks.before_tool_call, argument=opened.ctx)
    if result:
        yield from finish_call(run, opened, result)
    return None


def call_hook(
    run: Run,
    opened: OpenCall,
    hook: Callable[[ToolCall, T], Outcome[ToolResult | None]],
    argument: T,
) -> Events[ToolResult | None]:
    """The result that a hook of a tool returns or raises. Raises TypeError for another value."""
    try:
        result = yield from resolve(hook(opened.call, argument))
    except Aborted:  # the call gets a result first; run_steps ends the run, if its token is set
        return run.abort_result(opened)
    except ToolError as error:
        return as_failure(error)
    if isinstance(result, ToolResult | None):
        return result
    name = getattr(hook, "__name__", repr(hook))
    raise TypeError(f"the hook {name} returned {result!r:.80}, which is no ToolResult")


def run_group(run: Run, group: list[OpenCall]) -> Events[None]:
    """Run the tools of calls without a result. An abort becomes the result of those it stops."""
    calls = [opened for opened in group if opened.result is None]
    generators = [run.offered.run(opened.call, opened.ctx) for opened in calls]
    # Pairs: the index of a call, and an event of its tool or, at its end, its result. Nothing runs
    # before the first pair is asked for; from then on they may all run at the same time
    outputs = run.offered.outputs_of(generators, run.abort)
    for opened in calls:
        opened.begin_tool()
    try:
        for index, output in outputs:
            if isinstance(output, ToolResult):
                yield from finish_call(run, calls[index], output)
            else:
                yield from pass_on(run, calls[index], output)
    except Aborted:
        for opened in calls:
            if opened.result is None:
                yield from finish_call(run, opened, run.abort_result(opened))
    finally:
        outputs.close()


def pass_on(run: Run, opened: OpenCall, event: Event) -> Events[None]:
    """Pass on an event of a tool. Count a sub-agent's usage, keep the newest output, time the
    user's replies."""
    # The end of a sub-agent's run; its usage has that of its own sub-agents already
    if isinstance(event, events.Nested) and isinstance(event.event, events.RunEnd):
        run.usage += event.event.usage
    if isinstance(event, events.ToolUpdate):
        opened.updates.append(event.text)
    passed_at = time.monotonic()
    yield event
    if is_question(event):  # the consumer has replied meanwhile
        opened.user_seconds += time.monotonic() - passed_at


def finish_call(run: Run, opened: OpenCall, result: ToolResult) -> Events[None]:
    """Let the hooks change the result, truncate it, and report the end of the call."""
    opened.end_tool()
    changed = yield from call_hook(run, opened, hook=run.hooks.after_tool_call, argument=result)
    if changed:
        if changed.final is None:  # a new result does not keep a tool from ending the run
            changed.final = result.final
        result = changed
    result.content = truncate_content(result.content, run.limits.max_output)
    run.repetitions.add_result(opened.call, result)  # may put a note into the result: nothing new
    yield opened.end_call(result)


def end_by_tool(group: list[OpenCall]) -> End | None:
    """The End of a run that one of these calls has ended with its value."""
    for opened in group:
        if opened.result and opened.result.final:
            text = as_text(opened.result.content) or "Task completed."
            return End("stop", text, value=opened.result.final.value)
    return None


def stop_repetition(run: Run, opened: OpenCall) -> Events[End | None]:
    """Refuse the third equal call in a row (the threshold), if the two before it had equal results
    and neither the user nor a hook allows it: it gets a result without being run.

    At the fourth, returns the End of the run.
    """
    call = opened.call
    count = run.repetitions.times_in_a_row(call)  # with equal results, this call included
    if count < run.repetitions.threshold:
        return None
    problem = f"{call.name} was called {count} times in a row with the same arguments"
    if count > run.repetitions.threshold:
        yield opened.end_call(ToolResult(NOT_RUN, is_error=True))
        return End("doom_loop", f"Stopped: {problem}.")
    is_allowed = yield from may_repeat(run, call, count)
    if is_allowed:
        return None
    run.repetitions.add_not_run(call)
    text = (
        f"Not run: {problem}, and its result was the same. Do something else, or say what is in the "
        "way. The same call once more ends the run."
    )
    yield opened.end_call(ToolResult(text, is_error=True))
    return None


def stop_if_stuck(run: Run, call: ToolCall) -> Events[End | None]:
    """The End of a run whose calls bring nothing new, unless the user or a hook lets it go on.

    Before that, a note in a result has told the model so (`Repetitions.add_result`).
    """
    if not run.repetitions.is_stuck:
        return None
    is_allowed = yield from may_repeat(run, call, STALE_CALLS_TO_END)
    if is_allowed:
        return None
    return End("doom_loop", f"Stopped: the last {STALE_CALLS_TO_END} calls brought nothing new.")


def may_repeat(run: Run, call: ToolCall, count: int) -> Events[bool]:
    """Let the hooks decide, and without one the user, whether the run may go on repeating itself.

    If it may, repetitions are counted anew.
    """
    question = events.DoomLoop(
        name=call.name,
        arguments=copied(call.arguments),
        count=count,
        id=new_id(),
        call_id=call.id,
    )
    is_allowed = yield from resolve(run.hooks.on_doom_loop(question))
    if is_allowed:
        run.repetitions.allow()
    return is_allowed
