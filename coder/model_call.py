"""Asking the model: one answer, after as many attempts and compactions as it takes."""

from __future__ import annotations

import json

from coder import events
from coder.events import Events, Returning, resolve
from coder.history import History, calls_of, keep_usage, newest, repair
from coder.providers.errors import Failures
from coder.providers.wire import RunRequest
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
        # Repair the list. The hook on_length shortens it if it is near the limit: mostly it is not
        yield from compact(run, "threshold")

        # If the attempt fails: once more with a shorter list or after a wait, or the end
        try:
            answer = yield from stream_answer(run)
        except ModelError as error:
            run.abort.check()  # a connection that an abort has cut can look like an error
            run.partial = []  # the text of this attempt is void
            if error.kind == "overflow":
                is_shorter = yield from compact(run, "overflow")
                if not is_shorter:
                    return End("length", CONTEXT_LIMIT, error)
                continue
            delay = failures.add(error)  # seconds until the next attempt
            if delay is None:  # too many errors, or one for which no wait helps
                return End("error", failures.text(error), error)
            yield from wait_to_retry(run, attempt=failures.attempts, delay=delay, error=error)
            continue

        # If the full context has cut the answer: it is dropped and asked for once more, if the list
        # can be shortened; else it is accepted, and end_of ends the run
        if fills_context(answer, run.model.context_window):
            is_shorter = yield from compact(run, "length")
            if is_shorter:
                continue

        # If the answer is empty: a second attempt, but no third
        if is_empty(answer) and not empty_is_fine:
            empty_is_fine = True
            failures.attempts += 1  # it counts as an attempt, not as one of `max_errors`
            nothing = ModelError("empty", "the answer was empty", retryable=True)
            yield from wait_to_retry(run, attempt=failures.attempts, delay=0.0, error=nothing)
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
    """The End that this answer means; None if it has calls, after whose results the run goes on."""
    # First, for an answer with calls, too: none of them is run
    if answer.finish == "content_filter":
        return End("content_filter", answer.text or FILTERED)
    if answer.calls:
        return None
    if fills_context(answer, context_window):
        # The server has reported no error: this one tells programs why the text is cut
        error = ModelError("overflow", "the context is full")
        return End("length", answer.text or CONTEXT_LIMIT, error)
    if answer.finish == "length":
        return End("length", answer.text or CUT, continuable=True)
    return End("stop", answer.text or "Task completed.", continuable=True)


def compact(run: Run, trigger: Trigger) -> Events[bool]:
    """Repair the list, then let the hook on_length shorten it, at most `max_compactions` times
    between two answers.

    Returns whether the list is shorter now.
    """
    run.history.repair()
    if run.compactions >= run.limits.max_compactions:
        return False

    # At "threshold" only the hook knows whether the list is too long, and mostly it is not. In all
    # other cases the server has said so: the state of the run changes
    is_too_long = trigger != "threshold"
    if is_too_long:
        yield events.Status("compacting")

    # The hook shortens the list in place. Its event gets the compaction's number and the new list
    shortening = run.hooks.on_length(run.messages, trigger, run.last_usage, run.abort)
    with Returning(resolve(shortening)) as work:
        for event in work:
            if isinstance(event, events.Compacted):
                event.attempt = run.compactions + 1
                event.messages = run.messages[:]
            yield event
    if not work.value:
        return False

    # The size of the longer list is void, and so is the text of an answer that was cut ("length")
    run.compactions += 1
    run.partial = []
    run.last_usage = Usage()
    if is_too_long:
        yield events.Status("preparing")
    yield from resolve(run.hooks.on_compacted(run.messages))

    # The old History would not check again what it has repaired; the hooks may have changed that
    run.history = History(run.messages)
    return True


def stream_answer(run: Run) -> Events[Completion]:
    """One attempt: send the request and pass on the deltas of its answer. Raises ModelError."""
    request = yield from make_request(run)
    yield events.Status("asking")
    is_started = False  # the answer; a Notice may come before it
    with Returning(run.model.stream(request, run.abort)) as stream:
        for event in stream:
            if not is_started and not isinstance(event, events.Notice):
                is_started = True
                yield events.MessageStart({"role": "assistant", "content": ""})
            if isinstance(event, events.TextDelta):
                run.partial.append(event.text)
            yield event
            # A ChatModel checks the token by itself, a Model of the user's own may never do it. The
            # `if` only saves a call for each piece of text
            if run.abort.reason:
                run.abort.check()
    if not is_started:  # an empty answer
        yield events.MessageStart({"role": "assistant", "content": ""})
    answer = stream.value
    run.usage += answer.usage
    yield from resolve(run.hooks.after_llm_call(answer))
    return answer


def make_request(run: Run) -> Events[Request]:
    """The request: the list in the API's form, and the tools, both as the hooks change them.

    `run.offered` is set to the tools that are in it.
    """
    # The hooks make the list for this request. Without such hooks it is the run's list itself
    chosen = yield from resolve(run.hooks.transform_context(run.messages, run.abort))
    for_model = yield from resolve(run.hooks.convert_to_llm(chosen))

    # `ask` has repaired the run's list, but the hooks may have changed it in passing. If they have
    # made another list, that is repaired, too
    run.history.repair()
    if for_model is not run.messages:
        for_model = repair(for_model)

    # `request.messages`, without "meta" and custom roles, are made of a copy of the list when a
    # hook or a model reads them. ChatModel does without: it takes only what is new (wire.py)
    request = RunRequest.of(
        source=for_model.copy(),
        model=run.model.name,
        tools=run.tools.schemas,
        system=run.system,
        api_key=(yield from resolve(run.hooks.get_api_key())),
        reasoning=run.reasoning,
        session_id=run.tools.session_id,
    )
    yield from resolve(run.hooks.before_llm_call(request))

    # A hook may have taken tools out, and added some
    schemas, offered = run.tools.select(request.tools)
    request.tools = schemas
    run.offered = offered
    return request


def wait_to_retry(run: Run, attempt: int, delay: float, error: ModelError) -> Events[None]:
    """Report a failed attempt, and wait `delay` seconds."""
    yield events.Retry(attempt, delay, error)
    yield events.Status("waiting")
    run.abort.wait(delay)
    yield events.Status("preparing")


def accept(run: Run, answer: Completion) -> Events[None]:
    """Add the answer to the list, unless it is empty, and report it in any case. Its calls are open
    then."""
    # It is the newest answer now
    run.partial = []
    run.compactions = 0
    run.text = answer.text
    run.last_usage = answer.usage
    run.answer_message = answer.message
    answer.message["meta"] = run.new_meta()

    # Its calls wait for results. They are open before the list has the answer, so that `settle`
    # gives each a result, whatever stops the run from here on. If the answer is not in the list
    # yet, the repair in `settle` drops these results again
    recognize_calls(run, answer)
    run.open_calls = [OpenCall(call, run.tool_context(call)) for call in answer.calls]
    if answer.text or answer.calls:
        # The size of the list in tokens, up to here, is kept for on_length in a later run
        keep_usage(answer.message, answer.usage, len(run.messages))
        run.messages.append(answer.message)
    yield events.MessageEnd(answer.message)
    if answer.finish == "content_filter":
        yield events.Notice(FILTERED)


def recognize_calls(run: Run, answer: Completion) -> None:
    """Turn the calls of an answer into calls of the offered tools: some models write other names of
    a tool or its parameters (slips.py).

    The message is changed as well: the model reads in it how the tool is really called.
    """
    # `call` is the call as the model has written it, `meant` as the tool takes it, `entry` its dict
    # in the message
    entries = {entry.get("id"): entry for entry in calls_of(answer.message)}
    written = answer.calls
    answer.calls = [run.offered.recognize(call) for call in written]
    for call, meant in zip(written, answer.calls):
        entry = entries.get(call.id)
        if entry is None or meant == call:
            continue
        entry["function"]["name"] = meant.name
        if not meant.problem:  # else they are {}; the message keeps the text that was written
            entry["function"]["arguments"] = json.dumps(meant.arguments, ensure_ascii=False)
