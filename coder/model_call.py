"""Asking the model: one answer, after as many attempts and compactions as it takes."""

from __future__ import annotations

import json

from coder import events
from coder.events import Events, Returning, resolve
from coder.history import History, newest, repair, stamp_usage, stamped_usage, wire_messages
from coder.providers.errors import Failures
from coder.run import End, OpenCall, Run
from coder.types import Completion, ModelError, Request, Trigger, Usage

FULL = 0.8  # of the context window; from there on, "length" means that the context is full
CONTEXT_LIMIT = "Context limit reached."
CUT = "The answer was cut at the output limit before it began."
FILTERED = "The provider's content filter stopped the answer."


def ask(run: Run) -> Events[Completion | End]:
    """One accepted answer; or the End of the run, if no attempt has brought one."""
    failures = Failures(run.retry, run.limits.max_errors)
    # After tool results an empty answer means that the model is done. Else it is asked once more
    empty_is_fine = newest(run.messages).get("role") == "tool"
    while True:
        # The list is repaired each time, and shortened if it is near the limit
        yield from compact(run, "threshold")

        # One attempt. An error is compacted away, waited for, or the end
        try:
            answer = yield from attempt(run)
        except ModelError as error:
            run.abort.check()  # a connection that an abort has cut can look like an error
            run.partial = []
            if error.kind == "overflow":
                if (yield from compact(run, "overflow")):
                    continue
                return End("length", CONTEXT_LIMIT, error)
            delay = failures.add(error)
            if delay is None:
                return End("error", failures.text(error), error)
            yield from wait(run, failures.attempts, delay, error)
            continue

        # An answer that the full context has cut is asked for again in a shorter list
        if fills_context(answer, run.model.context_window):
            if (yield from compact(run, "length")):
                continue
        elif is_empty(answer) and not empty_is_fine:
            empty_is_fine = True
            nothing = ModelError("empty", "the answer was empty", retryable=True)
            failures.attempts += 1
            yield from wait(run, failures.attempts, 0.0, nothing)
            continue

        yield from accept(run, answer)
        return answer


def fills_context(answer: Completion, context_window: int) -> bool:
    """Was the text cut because the context is full, not at the limit of the output?"""
    tokens = answer.usage.input + answer.usage.output
    was_cut = answer.finish == "length" and not answer.calls
    return was_cut and tokens >= FULL * context_window


def is_empty(answer: Completion) -> bool:
    """Has the model ended its answer without a text and without a call?"""
    is_whole = answer.finish in ("stop", "tool_calls")
    return is_whole and not answer.text and not answer.calls


def end_of(answer: Completion, context_window: int) -> End | None:
    """The End that this answer means; None if it has calls: each gets a result, then it goes on."""
    if answer.finish == "content_filter":
        return End("content_filter", answer.text or FILTERED)
    if answer.calls:
        return None
    if fills_context(answer, context_window):
        error = ModelError("overflow", "the context is full")  # no error of the server's
        return End("length", answer.text or CONTEXT_LIMIT, error)
    if answer.finish == "length":
        return End("length", answer.text or CUT, continuable=True)
    return End("stop", answer.text or "Task completed.", continuable=True)


def compact(run: Run, trigger: Trigger) -> Events[bool]:
    """Repair the list and let a hook shorten it, `max_compactions` times between two answers."""
    run.history.repair()
    if run.last_usage is None:
        run.last_usage = stamped_usage(run.messages)  # an earlier run's
    if run.compactions >= run.limits.max_compactions:
        return False
    if trigger != "threshold":
        yield events.Status("compacting")
    shortened = run.hooks.on_length(run.messages, trigger, run.last_usage, run.abort)
    with Returning(resolve(shortened)) as work:
        for event in work:
            if isinstance(event, events.Compacted):
                event.attempt = run.compactions + 1
                event.messages = run.messages[:]
            yield event
    if work.value:
        run.compactions += 1
        run.partial = []  # the text of an answer that was cut is void
        run.last_usage = Usage()  # that of the newest answer counted the longer list
        if trigger != "threshold":
            yield events.Status("preparing")
        yield from resolve(run.hooks.on_compacted(run.messages))
        run.history = History(run.messages)  # messages may have been changed in place
    return work.value


def attempt(run: Run) -> Events[Completion]:
    """One request and its answer, streamed. Raises ModelError."""
    request = yield from request_for(run)
    yield events.Status("asking")
    is_started = False
    with Returning(run.model.stream(request, run.abort)) as stream:
        for event in stream:
            if not is_started and not isinstance(event, events.Notice):
                is_started = True
                yield events.MessageStart({"role": "assistant", "content": ""})
            if isinstance(event, events.TextDelta):
                run.partial.append(event.text)
            yield event
    if not is_started:
        yield events.MessageStart({"role": "assistant", "content": ""})
    run.usage += stream.value.usage
    yield from resolve(run.hooks.after_llm_call(stream.value))
    return stream.value


def request_for(run: Run) -> Events[Request]:
    """The list converted to API messages, and changed by the hooks."""
    chosen = yield from resolve(run.hooks.transform_context(run.messages, run.abort))
    converted = yield from resolve(run.hooks.convert_to_llm(chosen))
    run.history.repair()  # again: the hooks had the list
    if converted is not run.messages:
        converted = repair(converted)
    request = Request(
        messages=wire_messages(converted, run.model.name),
        tools=run.tools.schemas,
        system=run.system,
        api_key=(yield from resolve(run.hooks.get_api_key())),
        reasoning=run.reasoning,
        session_id=run.tools.session_id,
    )
    yield from resolve(run.hooks.before_llm_call(request))
    request.tools, run.offered = run.tools.select(request.tools)
    return request


def wait(run: Run, attempt: int, delay: float, error: ModelError) -> Events[None]:
    """Report a failed attempt and wait for the next."""
    yield events.Retry(attempt, delay, error)
    yield events.Status("waiting")
    run.abort.wait(delay)
    yield events.Status("preparing")


def accept(run: Run, answer: Completion) -> Events[None]:
    """Stamp the answer and announce it; add it to the list, unless it is empty."""
    run.partial = []
    run.compactions = 0
    run.text = answer.text
    run.last_usage = answer.usage
    run.answer_message = answer.message
    answer.message["meta"] = run.new_meta()
    recognize_calls(run, answer)
    run.open_calls = [OpenCall(call, run.context(call)) for call in answer.calls]
    if answer.text or answer.calls:
        stamp_usage(answer.message, answer.usage, len(run.messages))
        run.messages.append(answer.message)
    yield events.MessageEnd(answer.message)
    if answer.finish == "content_filter":
        yield events.Notice(FILTERED)


def recognize_calls(run: Run, answer: Completion) -> None:
    """Turn calls by other names into those of the offered tools.

    The message is changed as well: the model reads in it how the tool is really called.
    """
    entries = {entry.get("id"): entry for entry in answer.message.get("tool_calls") or ()}
    recognized = [run.offered.recognize(call) for call in answer.calls]
    for call, meant in zip(answer.calls, recognized):
        entry = entries.get(call.id)
        if entry is None or meant == call:
            continue
        entry["function"]["name"] = meant.name
        if not meant.problem:
            entry["function"]["arguments"] = json.dumps(meant.arguments, ensure_ascii=False)
    answer.calls = recognized
