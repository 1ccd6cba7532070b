"""Calls side by side: the order of events and results, questions, an abort, a tool that does not
end."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from itertools import count
from typing import Any

import pytest

from coder.abort import Abort
from coder.agent.parallel import MAX_WORKERS, ParallelTools
from coder.ai import ChatModel
from coder.devtools.scripted import Reply, ScriptedModel
from coder.events import Event, MessageEnd, StepEnd, StepStart, ToolEnd, ToolStart, ToolUpdate
from coder.history import NOT_RUN
from coder.hooks import FunctionHooks
from coder.loop import run_loop
from coder.toolset import Tool, ToolContext, Toolset
from coder.types import Message, ToolCall, ToolResult
from tests.harness import all_of, ask, assert_all_valid, contents, drive, quick, serve, types
from tests.terminal import PATIENCE, promptly, until


class Meeting:
    """Tools that wait for each other: one that runs alone never ends."""

    def __init__(self, parties: int) -> None:
        self.barrier = threading.Barrier(parties, timeout=PATIENCE)
        self.order: list[str] = []
        self.released = threading.Event()

    @property
    def tools(self) -> list[Tool]:
        def look(name: str) -> str:
            self.barrier.wait()
            self.order.append(name)
            return f"saw {name}"

        def last(name: str) -> Generator[str, None, str]:
            self.barrier.wait()
            yield f"{name} waits"
            assert self.released.wait(PATIENCE)
            self.order.append(name)
            return f"saw {name}"

        def sleep(name: str) -> None:
            self.barrier.wait()
            self.released.wait(PATIENCE)

        def wait(ctx: ToolContext, name: str) -> Generator[str, None, str]:
            yield f"{name} began"
            self.barrier.wait()
            try:
                ctx.abort.wait(PATIENCE)
            finally:
                self.order.append(name)
            return "?"

        def change(name: str) -> None:
            self.order.append(name)

        side_by_side = [quick(each, concurrent=True) for each in (look, last, sleep, wait)]
        return [*side_by_side, quick(change)]


def calls(*pairs: tuple[str, str]) -> Reply:
    return Reply(calls=[(name, {"name": about}) for name, about in pairs])


def places(events: list[Event], kind: type[Event]) -> list[int]:
    return [place for place, event in enumerate(events) if isinstance(event, kind)]


def test_calls_that_change_nothing_run_side_by_side_and_results_are_in_the_answers_order() -> None:
    meeting = Meeting(3)

    def release(event: Event) -> None:
        if isinstance(event, ToolEnd) and len(meeting.order) == 2:
            meeting.released.set()  # the slow first call ends only after the display of the others

    with serve(
        calls(("last", "a"), ("look", "b"), ("look", "c")),
        Reply("done"),
    ) as server:
        events, result = ask(server, tools=ParallelTools(meeting.tools), each=release)
        assert_all_valid(server)
    assert result.stop_reason == "stop"
    assert meeting.order[-1] == "a"
    assert contents(result.messages, "tool") == ["saw a", "saw b", "saw c"]
    assert max(places(events, ToolStart)) < min(places(events, ToolEnd))
    assert [event.text for event in events if isinstance(event, ToolUpdate)] == ["a waits"]


def test_a_call_that_changes_something_waits_and_is_waited_for() -> None:
    meeting = Meeting(2)
    pairs = [
        ("look", "a"),
        ("look", "b"),
        ("change", "x"),
        ("look", "c"),
        ("look", "d"),
    ]
    with serve(calls(*pairs), Reply("done")) as server:
        events, _ = ask(server, tools=ParallelTools(meeting.tools))
    assert {*meeting.order[:2]} == {"a", "b"}
    assert {*meeting.order[3:]} == {"c", "d"}
    kinds = [kind.removeprefix("tool_") for kind in types(events) if "tool_" in kind]
    two = ["start", "start", "end", "end"]
    assert [kind for kind in kinds if kind != "call_delta"] == [*two, "start", "end", *two]


def test_no_more_than_eight_run_at_a_time_and_one_alone_in_the_runs_own_thread() -> None:
    running = set[str]()
    where = list[threading.Thread]()
    four = threading.Barrier(4, timeout=20)  # of eight, eight and four

    def look(name: str) -> str:
        running.add(name)
        if name != "x":
            four.wait()
        assert len(running) <= MAX_WORKERS
        running.remove(name)
        where.append(threading.current_thread())
        return name

    pairs = [("look", str(number)) for number in range(20)]
    with serve(
        calls(*pairs),
        calls(("look", "x")),
        Reply("done"),
    ) as server:
        _, result = ask(
            server,
            tools=ParallelTools([quick(look, concurrent=True)]),
        )
    assert contents(result.messages, "tool") == [*map(str, range(20)), "x"]
    assert where[-1] is threading.main_thread() is not where[0]


@pytest.mark.parametrize("kind", [Toolset, ParallelTools])
def test_an_abort_at_any_event_announces_each_message_and_result_once(kind: type[Toolset]) -> None:
    def look(name: str) -> Generator[str, None, str]:
        yield f"{name} began"
        return f"saw {name}"

    def change(name: str) -> str:
        return f"changed {name}"

    tools = kind([quick(look, concurrent=True), quick(change)])
    asked = (
        ("look", "a"),
        ("look", "b"),
        ("change", "c"),
        ("look", "d"),
        (
            "none",
            "e",
        ),
    )
    replies = [
        Reply(
            "I look.",
            [(name, {"name": of}) for name, of in asked],
        ),
        Reply("It is done."),
    ]
    for moment in range(100):
        abort = Abort()
        numbers = count()

        def each(event: Event, abort: Abort = abort, numbers: Iterator[int] = numbers) -> None:
            if next(numbers) == moment:  # noqa: B023 (called in this round)
                abort.set()

        run = run_loop([], ScriptedModel(replies), tools, prompt="go", abort=abort)
        events, result = drive(run, each)
        assert [event.message for event in all_of(MessageEnd, events)] == result.messages
        steps = all_of(StepEnd, events)
        started = {each.id for each in all_of(ToolStart, events)}
        assert len(steps) == len(all_of(StepStart, events))
        for step in steps:
            calls = [call["id"] for call in step.message.get("tool_calls", ())]
            assert [each["tool_call_id"] for each in step.tool_results] == calls
            not_run = [e["tool_call_id"] for e in step.tool_results if e["content"] == NOT_RUN]
            assert not_run == [each for each in calls if each not in started]
    assert result.stop_reason == "stop", "it has fewer events"


def test_hooks_are_called_in_the_runs_thread_in_the_order_of_the_answer() -> None:
    meeting = Meeting(2)
    seen = list[tuple[str, str]]()

    def before(call: ToolCall, ctx: ToolContext) -> ToolResult | None:
        assert threading.current_thread() is threading.main_thread()
        assert call.arguments
        seen.append(("before", call.arguments["name"]))
        return ToolResult("answered by the hook") if call.arguments["name"] == "b" else None

    def after(call: ToolCall, result: ToolResult) -> ToolResult:
        assert threading.current_thread() is threading.main_thread()
        assert call.arguments
        seen.append(("after", call.arguments["name"]))
        return ToolResult(f"{result.content}!")

    hooks = FunctionHooks(before_tool_call=before, after_tool_call=after)
    with serve(
        calls(("look", "a"), ("look", "b"), ("look", "c")),
        Reply("done"),
    ) as server:
        _, result = ask(server, tools=ParallelTools(meeting.tools), hooks=hooks)
    outputs = ["saw a!", "answered by the hook!", "saw c!"]
    assert contents(result.messages, "tool") == outputs
    assert seen[:4] == [
        ("before", "a"),
        ("before", "b"),
        ("after", "b"),
        ("before", "c"),
    ]


# ---- ends in the middle ---------------------------------------------------------------------


def test_an_abort_reaches_all_and_a_tool_that_does_not_look_at_it_is_abandoned() -> None:
    meeting = Meeting(4)
    abort = Abort()
    threading.Thread(
        target=lambda: (meeting.barrier.wait(), abort.set()),
        daemon=True,
    ).start()
    pairs = [("sleep", "a"), ("wait", "b"), ("wait", "c")]
    with serve(calls(*pairs), Reply("done")) as server, promptly():
        events, result = ask(server, tools=ParallelTools(meeting.tools), abort=abort)
    meeting.released.set()
    assert result.stop_reason == "aborted"
    until(lambda: sorted(meeting.order) == ["b", "c"], "both have seen it")
    aborted = "[aborted by the user]"
    outputs = [aborted, f"b began\n{aborted}", f"c began\n{aborted}"]
    assert contents(result.messages, "tool") == outputs
    assert types(events).count("tool_end") == 3


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ZeroDivisionError])
def test_a_consumer_that_breaks_off_leaves_all_in_order(error: type[BaseException] | None) -> None:
    meeting = Meeting(2)
    messages = list[Message]()
    with serve(
        calls(("wait", "a"), ("wait", "b")),
        Reply("done"),
    ) as server:
        model = ChatModel("m", base_url=server.url)
        run: Any = run_loop(messages, model, ParallelTools(meeting.tools), prompt="go")
        next(event for event in run if isinstance(event, ToolUpdate))
        if error is None:
            run.close()
        else:
            with pytest.raises(error):
                run.throw(error())
                for _ in run:
                    pass
    meeting.barrier.abort()
    names = lambda: [thread.name for thread in threading.enumerate()]  # noqa: E731
    until(
        lambda: not any(name.startswith("tool call") for name in names()),
        "all tools ended",
    )
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "tool"]
