"""Running the tool calls of one answer: hooks around each, repetitions refused, output cut once.

Start events and results come in the order of the answer. The tool set says what runs together.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from coder import events
from coder.events import Event, Events, Outcome, innermost, resolve
from coder.history import NOT_RUN, truncate_content
from coder.providers.request import copied
from coder.providers.text import new_id
from coder.repetition import SAME_AS_ABOVE, STALE_CALLS_TO_END
from coder.run import End, OpenCall, Run
from coder.toolset import as_failure
from coder.types import Aborted, Completion, T, ToolCall, ToolError, ToolResult

ANSWER_CUT = (
    "Not run: the answer was cut at the output limit, so this call may be incomplete. "
    "Send it again in smaller pieces, for instance a long file in several edits."
)


def reason_not_to_run(answer: Completion, end: End | None) -> str:
    """Why none of the calls of an answer is run; "" if they are."""
    if end:  # the content filter stopped an answer with calls
        return NOT_RUN
    if answer.finish == "length":
        return ANSWER_CUT
    return ""


def run_tools(run: Run, why_not: str) -> Events[End | None]:
    """Add a result for each open call; it is `why_not`, unless that is "".

    Returns the End of a run that repeats itself.
    """
    end: End | None = None
    run.repetitions.begin_answer()
    while run.open_calls:
        # A group is one call alone, or neighbours that run side by side
        size = run.offered.group_size([opened.call for opened in run.open_calls])
        group = run.open_calls[:size]
        repeated = yield from start_group(run, group, why_not)
        yield from run_group(run, group)
        for opened in group:
            yield from run.add_result(opened)

        # A call that repeats itself ends the run, and so do calls that bring nothing new
        end = end or repeated
        if end is None and run.repetitions.is_stuck:
            end = yield from end_stuck(run, group[-1].call)
        if end:
            why_not = NOT_RUN

        # A message that the user has queued comes before the calls that are left
        if not why_not and not run.abort.is_set:
            steering = yield from resolve(run.hooks.get_steering_messages())
            run.pending += steering
            if steering:
                why_not = "Skipped due to queued user message."
    return end


def start_group(run: Run, group: list[OpenCall], why_not: str) -> Events[End | None]:
    """Announce the calls of a group; those that are not to be run get their results.

    Returns the End of a run that repeats itself.
    """
    ended: End | None = None
    for opened in group:
        if run.abort.is_set:
            why_not = f"Not run: {run.abort_reason}."
        end = yield from start_call(run, opened, why_not)
        if end:
            ended = end
            why_not = NOT_RUN
    return ended


def start_call(run: Run, opened: OpenCall, why_not: str) -> Events[End | None]:
    """Announce the call; it gets its result if it is not to be run.

    Returns the End of a run that repeats itself.
    """
    call = opened.call
    opened.is_started = True
    refused = refuse(run, call)
    shown = {} if refused else copied(call.arguments)  # whoever gets them may change them
    yield events.ToolStart(call.id, call.name, shown, run.offered.title(call))
    if why_not:
        yield end_call(opened, ToolResult(why_not, is_error=True))
        return None
    if run.repetitions.is_double(call, run.offered.changes_nothing(call)):
        yield end_call(opened, ToolResult(SAME_AS_ABOVE))
        return None
    end = yield from check_repetition(run, opened)
    if opened.result:  # a repetition: it has been answered, not run
        return end
    if refused:
        run.repetitions.add(call, refused)
        yield end_call(opened, refused)
        return None
    early = yield from call_hook(run, opened, run.hooks.before_tool_call, opened.ctx)
    if early:
        yield from finish_call(run, opened, early)
    return None


def refuse(run: Run, call: ToolCall) -> ToolResult | None:
    """Bring the arguments to the types of the tool, in place; the result if that fails."""
    try:
        run.offered.check(call)
    except ToolError as error:
        refused = as_failure(error)
        refused.is_news = False
        return refused
    return None


def call_hook(
    run: Run,
    opened: OpenCall,
    hook: Callable[[ToolCall, T], Outcome[ToolResult | None]],
    given: T,
) -> Events[ToolResult | None]:
    """The result that a hook of a tool returns or raises. Raises TypeError for another value."""
    try:
        result = yield from resolve(hook(opened.call, given))
    except Aborted:
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
    works = [run.offered.run(opened.call, opened.ctx) for opened in calls]
    together = run.offered.together(works, run.abort)
    for opened in calls:
        opened.began = time.monotonic()
    try:
        for number, event in together:
            if isinstance(event, ToolResult):
                yield from finish_call(run, calls[number], event)
            else:
                yield from pass_on(run, calls[number], event)
    except Aborted:
        for opened in calls:
            if opened.result is None:
                yield from finish_call(run, opened, run.abort_result(opened))
    finally:
        together.close()


def pass_on(run: Run, opened: OpenCall, event: Event) -> Events[None]:
    """Pass on an event of a tool. Count a sub-agent's usage, keep the newest output, time the
    user's answers."""
    if isinstance(event, events.Nested) and isinstance(event.event, events.RunEnd):
        run.usage += event.event.usage
    if isinstance(event, events.ToolUpdate):
        opened.output.append(event.text)
    shown = time.monotonic()
    yield event
    if hasattr(innermost(event), "reply"):  # a question: the consumer has answered meanwhile
        opened.asking += time.monotonic() - shown


def finish_call(run: Run, opened: OpenCall, result: ToolResult) -> Events[None]:
    """The result as the hooks change it, truncated, and the end event."""
    if opened.began is not None:
        opened.seconds = time.monotonic() - opened.began - opened.asking
    changed = yield from call_hook(run, opened, run.hooks.after_tool_call, result)
    result = changed or result
    result.content = truncate_content(result.content, run.limits.max_output)
    run.repetitions.add(opened.call, result)
    yield end_call(opened, result)


def end_call(opened: OpenCall, result: ToolResult) -> events.ToolEnd:
    opened.result = result
    return events.ToolEnd(
        id=opened.call.id,
        name=opened.call.name,
        result=result,
        is_error=result.is_error,
        seconds=opened.seconds,
    )


def check_repetition(run: Run, opened: OpenCall) -> Events[End | None]:
    """Give the call a result instead of running it, if it repeats the calls before it too often.

    Returns the End of the run, if it was refused before.
    """
    call = opened.call
    count = run.repetitions.times(call)
    if count < run.repetitions.threshold:
        return None
    times = f"{call.name} was called {count} times in a row with the same arguments"
    if count > run.repetitions.threshold:
        yield end_call(opened, ToolResult(NOT_RUN, is_error=True))
        return End("doom_loop", f"Stopped: {times}.")
    if (yield from may_repeat(run, call, count)):
        return None
    run.repetitions.refuse(call)
    text = (
        f"Not run: {times}, and its result was the same. Do something else, or say what is in the "
        "way. The same call once more ends the run."
    )
    yield end_call(opened, ToolResult(text, is_error=True))
    return None


def may_repeat(run: Run, call: ToolCall, count: int) -> Events[bool]:
    """Ask the hooks, and without one the user, whether the run may go on repeating itself."""
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


def end_stuck(run: Run, call: ToolCall) -> Events[End | None]:
    """The End of a run whose calls bring nothing new, unless the user or a hook lets it go on."""
    if (yield from may_repeat(run, call, STALE_CALLS_TO_END)):
        return None
    return End("doom_loop", f"Stopped: the last {STALE_CALLS_TO_END} calls brought nothing new.")
