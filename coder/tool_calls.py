"""Running the tool calls of one answer: hooks around each, repetitions refused, output truncated once.

Start events and results come in the order of the answer. The tool set says which calls run together.
"""

from __future__ import annotations

import time
from typing import Any

from coder import events
from coder.events import Event, Events, innermost, resolve
from coder.history import NOT_RUN, truncate_content
from coder.providers.request import copied
from coder.providers.text import new_id
from coder.repetition import SAME_AS_ABOVE, STALE_CALLS_TO_END
from coder.run import End, OpenCall, Run
from coder.toolset import as_failure
from coder.types import Aborted, Completion, ToolCall, ToolError, ToolResult

ANSWER_CUT = (
    "Not run: the answer was cut at the output limit, so this call may be incomplete. "
    "Send it again in smaller pieces, for instance a long file in several edits."
)


def run_tools(run: Run, answer: Completion, end: End | None) -> Events[End | None]:
    """Add a result for each open call; none is run where `end` is given, or where the answer was cut. An End, if a call
    was repeated once too often."""
    not_run = NOT_RUN if end else ANSWER_CUT if answer.finish == "length" else ""
    end = None
    run.repetitions.begin_answer()
    while run.open_calls:
        size = run.offered.group_size([opened.call for opened in run.open_calls])
        group = run.open_calls[:size]
        for opened in group:
            if run.abort.is_set:
                not_run = f"Not run: {run.abort_reason}."
            end = (yield from start_call(run, opened, not_run)) or end
            if end:
                not_run = NOT_RUN
        yield from run_group(run, [opened for opened in group if opened.result is None])
        for opened in group:
            yield from run.add_result(opened)
        if run.repetitions.is_stuck and not end:
            end = yield from end_stuck(run, group[-1].call)
            if end:
                not_run = NOT_RUN
        if not not_run and not run.abort.is_set:
            steering = yield from resolve(run.hooks.get_steering_messages())
            run.pending += steering
            not_run = "Skipped due to queued user message." if steering else ""
    return end


def start_call(run: Run, opened: OpenCall, not_run: str) -> Events[End | None]:
    """The start event; and the result, where it comes from `not_run`, a repetition or a hook. An End, as `run_tools`."""
    call = opened.call
    opened.is_started = True
    refused = refuse(run, call)
    # Whoever is shown them may keep or change them
    shown = {} if refused else copied(call.arguments)
    yield events.ToolStart(call.id, call.name, shown, run.offered.title(call))
    end = None
    if not not_run and run.repetitions.is_double(call, run.offered.changes_nothing(call)):
        yield end_call(opened, ToolResult(SAME_AS_ABOVE))
        return None
    if not not_run:
        not_run, end = yield from check_repetition(run, call)
    if not_run:
        yield end_call(opened, ToolResult(not_run, is_error=True))
    elif refused:
        run.repetitions.add(call, refused)
        yield end_call(opened, refused)
    else:
        early = yield from call_hook(run, opened, "before_tool_call", opened.ctx)
        if early:
            yield from finish_call(run, opened, early)
    return end


def refuse(run: Run, call: ToolCall) -> ToolResult | None:
    """Check the arguments; the result of a call that cannot be made with them."""
    try:
        run.offered.check(call)
    except ToolError as error:
        refused = as_failure(error)
        refused.is_news = False
        return refused
    return None


def call_hook(run: Run, opened: OpenCall, name: str, given: Any) -> Events[ToolResult | None]:
    """The result that a hook around a tool returns or raises. Raises TypeError for another value."""
    try:
        result = yield from resolve(getattr(run.hooks, name)(opened.call, given))
    except Aborted:
        return run.abort_result(opened)
    except ToolError as error:
        return as_failure(error)
    if isinstance(result, ToolResult | None):
        return result
    raise TypeError(f"the hook {name} returned {result!r:.80}, which is no ToolResult")


def run_group(run: Run, calls: list[OpenCall]) -> Events[None]:
    """Run the tools. An abort becomes the result of those that it stops."""
    works = [run.offered.run(opened.call, opened.ctx) for opened in calls]
    together = run.offered.together(works, run.abort)
    for opened in calls:
        opened.began = time.monotonic()
    try:
        for place, event in together:
            if isinstance(event, ToolResult):
                yield from finish_call(run, calls[place], event)
            else:
                yield from pass_on(run, calls[place], event)
    except Aborted:
        for opened in calls:
            if opened.result is None:
                yield from finish_call(run, opened, run.abort_result(opened))
    finally:
        together.close()


def pass_on(run: Run, opened: OpenCall, event: Event) -> Events[None]:
    """Pass on an event of a tool. Count a sub-agent's usage, keep the newest output, time the user's answers."""
    if isinstance(event, events.Nested) and isinstance(event.event, events.RunEnd):
        run.usage += event.event.usage
    if isinstance(event, events.ToolUpdate):
        opened.output.append(event.text)
    passed = time.monotonic()
    yield event
    if hasattr(innermost(event), "reply"):
        opened.asking += time.monotonic() - passed


def finish_call(run: Run, opened: OpenCall, result: ToolResult) -> Events[None]:
    """The result as the hooks change it, truncated, and the end event."""
    opened.seconds = time.monotonic() - opened.began - opened.asking if opened.began else 0.0
    result = (yield from call_hook(run, opened, "after_tool_call", result)) or result
    result.content = truncate_content(result.content, run.limits.max_output)
    run.repetitions.add(opened.call, result)
    yield end_call(opened, result)


def end_call(opened: OpenCall, result: ToolResult) -> events.ToolEnd:
    opened.result = result
    name, seconds = opened.call.name, opened.seconds
    return events.ToolEnd(opened.call.id, name, result, result.is_error, seconds)


def check_repetition(run: Run, call: ToolCall) -> Events[tuple[str, End | None]]:
    """Why the call is not run, "" if it is; and the End, if it was refused before."""
    count = run.repetitions.times(call)
    if count < run.repetitions.threshold:
        return "", None
    times = f"{call.name} was called {count} times in a row with the same arguments"
    if count > run.repetitions.threshold:
        return NOT_RUN, End("doom_loop", f"Stopped: {times}.")
    arguments = copied(call.arguments)
    question = events.DoomLoop(call.name, arguments, count, id=new_id(), call_id=call.id)
    if (yield from resolve(run.hooks.on_doom_loop(question))):
        run.repetitions.allow()
        return "", None
    run.repetitions.refuse(call)
    why = "its result was the same. Do something else, or say what is in the way"
    return f"Not run: {times}, and {why}. The same call once more ends the run.", None


def end_stuck(run: Run, call: ToolCall) -> Events[End | None]:
    """The End of a run whose calls bring nothing new, unless the user or a hook lets it go on."""
    question = events.DoomLoop(
        call.name, copied(call.arguments), STALE_CALLS_TO_END, id=new_id(), call_id=call.id
    )
    if (yield from resolve(run.hooks.on_doom_loop(question))):
        run.repetitions.allow()
        return None
    return End("doom_loop", f"Stopped: the last {STALE_CALLS_TO_END} calls brought nothing new.")
