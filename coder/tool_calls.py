"""Running the tool calls of one answer: hooks around each, repetitions refused, output truncated once.

Start events and results come in the order of the answer. The tool set says which calls run together.
"""

from __future__ import annotations

import time

from coder import events
from coder.events import Event, Events, innermost, resolve
from coder.history import NOT_RUN, content_of, tool_message
from coder.run import End, OpenCall, Run, truncate
from coder.toolset import as_failure
from coder.types import Aborted, Message, ToolCall, ToolError, ToolResult

SKIPPED = "Skipped due to queued user message."
MAX_CALLS = 100  # of one answer that are run
TOO_MANY = (
    f"Not run: at most {MAX_CALLS} calls of one answer are run. "
    "Send the others again, in later answers."
)
KEPT_UPDATES = 100  # of a tool that is aborted: they become its result


def run_tools(
    run: Run, calls: list[ToolCall], not_run: str = ""
) -> Events[tuple[list[Message], End | None]]:
    """(the result messages, the End if a call was repeated once too often). `not_run`: why none is run."""
    results, end, started = list[Message](), None, 0
    for group in run.offered.groups(calls):
        run.open = [OpenCall(call, run.offered.context(call, run.abort)) for call in group]
        for each in run.open:
            each.ctx.budget, each.ctx.message_id = run.budget, run.answer["meta"]["message_id"]
            started += 1
            if started > MAX_CALLS and not not_run:
                not_run = TOO_MANY
            if run.abort.is_set:
                not_run = f"Not run: {run.abort_reason}."
            if not not_run and (end := repeated_too_often(run, each.call)):
                not_run = NOT_RUN
            yield from start(run, each, not_run)
        yield from execute(run, [each for each in run.open if each.result is None])
        while run.open:
            each = run.open[0]
            results.append(tool_message(each.call.id, each.result or run.stopped(each)))
            run.messages.append(results[-1])
            run.open.pop(0)
            yield events.MessageStart(results[-1])
            yield events.MessageEnd(results[-1])
        if not_run in ("", TOO_MANY) and not run.abort.is_set:
            steering = yield from resolve(run.hooks.get_steering_messages())
            run.pending += steering
            not_run = SKIPPED if steering else not_run
    return results, end


def start(run: Run, each: OpenCall, not_run: str) -> Events[None]:
    """The start event; and the result, where the tool is not needed for it."""
    call = each.call
    yield events.ToolStart(call.id, call.name, call.arguments or {}, run.offered.title(call))
    each.started = time.monotonic()
    if not_run:
        each.result = ToolResult(not_run, is_error=True)
    else:
        each.result = yield from repeated(run, call)
    if each.result:
        yield end_event(each)
        return
    try:
        answer = yield from resolve(run.hooks.before_tool_call(call, each.ctx))
        answer = checked("before_tool_call", answer)
    except Aborted:
        answer = run.stopped(each)
    except ToolError as error:
        answer = as_failure(error)
    if answer:
        yield from finish(run, each, answer)


def execute(run: Run, calls: list[OpenCall]) -> Events[None]:
    """The tools themselves. An abort becomes the result of those it hits."""
    works = [run.offered.run(each.call, each.ctx) for each in calls]
    together = run.offered.together(works, run.abort)
    try:
        for place, event in together:
            if isinstance(event, ToolResult):
                yield from finish(run, calls[place], event)
            else:
                yield from pass_on(run, calls[place], event)
    except Aborted:
        for each in calls:
            if each.result is None:
                yield from finish(run, each, run.stopped(each))
    finally:
        together.close()


def pass_on(run: Run, each: OpenCall, event: Event) -> Events[None]:
    """An event of a tool: count a sub-agent's usage, keep the newest output, time the user's answers."""
    if isinstance(event, events.Nested) and isinstance(event.event, events.RunEnd):
        run.usage += event.event.usage
    if isinstance(event, events.ToolUpdate):
        each.output = [*each.output[1 - KEPT_UPDATES :], event.text]
    passed = time.monotonic()
    yield event
    if hasattr(innermost(event), "reply"):
        each.asking += time.monotonic() - passed


def finish(run: Run, each: OpenCall, result: ToolResult) -> Events[None]:
    """What the hooks make of a result, and the end event."""
    try:
        changed = yield from resolve(run.hooks.after_tool_call(each.call, result))
        result = checked("after_tool_call", changed) or result
    except ToolError as error:
        result = as_failure(error)
    except Aborted:
        result = run.stopped(each)
    limit, content = run.limits.max_output, content_of(result.content)
    if isinstance(content, str):
        result.content = truncate(content, limit)
    else:
        result.content = [
            part | {"text": truncate(part["text"], limit)} if "text" in part else part
            for part in content
        ]
    each.result = result
    yield end_event(each)


def end_event(each: OpenCall) -> events.ToolEnd:
    assert each.result
    seconds = time.monotonic() - each.started - each.asking
    return events.ToolEnd(each.call.id, each.call.name, each.result, each.result.is_error, seconds)


def repeated_too_often(run: Run, call: ToolCall) -> End | None:
    """Count the call; the End, if it came once more after its repetition was refused."""
    count = run.budget.repetitions(call)
    if count <= run.limits.doom_loop_threshold:
        return None
    times = f"{count} times in a row with the same arguments"
    return End("doom_loop", f"Stopped: {call.name} was called {times}.")


def repeated(run: Run, call: ToolCall) -> Events[ToolResult | None]:
    """The answer to a call that came too often in a row; None: run it."""
    count = run.budget.repeated[1]
    if count < run.limits.doom_loop_threshold:
        return None
    question = events.DoomLoop(call.name, call.arguments or {}, count)
    if (yield from resolve(run.hooks.on_doom_loop(question))):
        run.budget.repeated = ("", 0)
        return None
    return ToolResult(
        f"Not run: {call.name} was called {count} times in a row with the same arguments, and the "
        "result would be the same. Do something else, or say what is in the way. The same call once "
        "more ends the run.",
        is_error=True,
    )


def checked(hook: str, result: ToolResult | None) -> ToolResult | None:
    if not isinstance(result, ToolResult | None):
        raise TypeError(f"{hook} returned {result!r}: a hook returns a ToolResult or None")
    return result
