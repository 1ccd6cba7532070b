"""Calls side by side: the order of events and results, questions, an abort, a tool that does not end."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from typing import Any

import pytest

from coder.abort import Abort
from coder.agent.parallel import MAX_WORKERS, ParallelTools
from coder.devtools.scripted import Reply
from coder.events import Event, PermissionAsked, ToolEnd, ToolStart, ToolUpdate
from coder.hooks import FunctionHooks
from coder.toolset import Tool, ToolContext, tool
from coder.types import ToolResult
from tests.harness import ask, assert_all_valid, serve, types


class Meeting:
    """Tools that wait for each other: whoever runs alone does not get on."""

    def __init__(self, parties: int) -> None:
        self.barrier = threading.Barrier(parties, timeout=20)
        self.order: list[str] = []
        self.released = threading.Event()

    def tools(self) -> list[Tool]:
        @tool(concurrent=True)
        def look(name: str) -> str:
            """Look, together with the others.

            name: at what
            """
            self.barrier.wait()
            self.order.append(name)
            return f"saw {name}"

        @tool(concurrent=True)
        def last(name: str) -> Generator[str, None, str]:
            """Look, and end when it is released.

            name: at what
            """
            self.barrier.wait()
            yield f"{name} waits"
            assert self.released.wait(20)
            self.order.append(name)
            return f"saw {name}"

        @tool
        def change(name: str) -> str:
            """Change something.

            name: what
            """
            self.order.append(name)
            return f"changed {name}"

        return [look, last, change]


def results_of(body: dict[str, Any]) -> list[str]:
    return [message["content"] for message in body["messages"] if message["role"] == "tool"]


def calls(*pairs: tuple[str, str]) -> Reply:
    return Reply(calls=[(name, {"name": about}) for name, about in pairs])


def test_calls_that_change_nothing_run_side_by_side_and_their_results_stand_in_the_answers_order() -> (
    None
):
    meeting = Meeting(3)

    def release(event: Event) -> None:
        if isinstance(event, ToolEnd) and len(meeting.order) == 2:
            meeting.released.set()  # the slow first call ends only after the display of the others

    with serve(calls(("last", "a"), ("look", "b"), ("look", "c")), Reply("done")) as server:
        events, result = ask(server, tools=ParallelTools(meeting.tools()), each=release)
        assert_all_valid(server)
    assert result.stop_reason == "stop" and meeting.order[-1] == "a"
    assert results_of(server.requests[1]) == ["saw a", "saw b", "saw c"]
    starts = [place for place, event in enumerate(events) if isinstance(event, ToolStart)]
    ends = [place for place, event in enumerate(events) if isinstance(event, ToolEnd)]
    assert max(starts) < min(ends)
    ids = [event.id for event in events if isinstance(event, ToolStart)]
    ended = [event.id for event in events if isinstance(event, ToolEnd)]
    assert ended[-1] == ids[0] and set(ended) == set(ids)
    assert [
        event.text for event in events if isinstance(event, ToolUpdate) and event.id == ids[0]
    ] == ["a waits"]
    shown = [
        event.message["tool_call_id"]
        for event in events
        if event.type == "message_end" and event.message["role"] == "tool"
    ]  # type: ignore[attr-defined]
    assert shown == ids


def test_a_call_that_changes_something_waits_for_those_before_it_and_those_behind_wait_for_it() -> (
    None
):
    meeting = Meeting(2)
    with serve(
        calls(("look", "a"), ("look", "b"), ("change", "x"), ("look", "c"), ("look", "d")),
        Reply("done"),
    ) as server:
        events, _ = ask(server, tools=ParallelTools(meeting.tools()))
    assert (
        set(meeting.order[:2]) == {"a", "b"}
        and meeting.order[2] == "x"
        and set(meeting.order[3:]) == {"c", "d"}
    )
    kinds = [kind for kind in types(events) if kind in ("tool_start", "tool_end")]
    assert (
        kinds
        == ["tool_start"] * 2
        + ["tool_end"] * 2
        + ["tool_start", "tool_end"]
        + ["tool_start"] * 2
        + ["tool_end"] * 2
    )


def test_one_call_alone_stays_in_the_runs_own_thread() -> None:
    where: list[threading.Thread] = []

    @tool(concurrent=True)
    def here() -> str:
        """Where am I?"""
        where.append(threading.current_thread())
        return "here"

    with serve(Reply(calls=[("here", {})]), Reply("done")) as server:
        ask(server, tools=ParallelTools([here]))
    assert where == [threading.main_thread()]


def test_no_more_than_eight_run_at_a_time() -> None:
    running, most, lock = 0, 0, threading.Lock()

    @tool(concurrent=True)
    def look(name: str) -> str:
        """Look.

        name: at what
        """
        nonlocal running, most
        with lock:
            running, most = running + 1, max(most, running + 1)
        time.sleep(0.01)
        with lock:
            running -= 1
        return name

    with serve(calls(*(("look", str(number)) for number in range(20))), Reply("done")) as server:
        ask(server, tools=ParallelTools([look]))
    assert results_of(server.requests[1]) == [str(number) for number in range(20)]
    assert 1 < most <= MAX_WORKERS


def test_hooks_are_called_in_the_runs_thread_one_at_a_time_in_the_order_of_the_answer() -> None:
    meeting, seen = Meeting(2), list[tuple[str, Any, bool]]()

    def before(call: Any, ctx: ToolContext) -> ToolResult | None:
        seen.append(
            (
                "before",
                call.arguments["name"],
                threading.current_thread() is threading.main_thread(),
            )
        )
        return ToolResult("answered by the hook") if call.arguments["name"] == "b" else None

    def after(call: Any, result: ToolResult) -> ToolResult:
        seen.append(
            ("after", call.arguments["name"], threading.current_thread() is threading.main_thread())
        )
        return ToolResult(f"{result.content}!")

    with serve(calls(("look", "a"), ("look", "b"), ("look", "c")), Reply("done")) as server:
        ask(
            server,
            tools=ParallelTools(meeting.tools()),
            hooks=FunctionHooks(before_tool_call=before, after_tool_call=after),
        )
    assert results_of(server.requests[1]) == ["saw a!", "answered by the hook!", "saw c!"]
    assert seen[:4] == [
        ("before", "a", True),
        ("before", "b", True),
        ("after", "b", True),
        ("before", "c", True),
    ]
    assert sorted(seen[4:]) == [("after", "a", True), ("after", "c", True)]


def test_a_question_is_answered_before_its_tool_goes_on_while_others_run() -> None:
    meeting, answers = Meeting(2), list[str]()

    @tool(concurrent=True)
    def outside(ctx: ToolContext, name: str) -> Generator[Event, None, str]:
        """Go there.

        name: where
        """
        meeting.barrier.wait()
        asked = PermissionAsked(ctx.call_id, "external_directory", name, name)
        yield asked
        answers.append(asked.answer)
        return asked.answer

    def reply(event: Event) -> None:
        if isinstance(event, PermissionAsked):
            event.reply("once" if event.pattern == "a" else "no")

    with serve(calls(("outside", "a"), ("outside", "b")), Reply("done")) as server:
        ask(server, tools=ParallelTools([outside]), each=reply)
    assert results_of(server.requests[1]) == ["once", "no"] and sorted(answers) == ["no", "once"]


def test_the_same_call_thrice_in_one_answer_is_answered_unrun_the_third_time() -> None:
    meeting = Meeting(2)
    with serve(calls(*[("look", "a")] * 4), Reply("done")) as server:
        _, result = ask(server, tools=ParallelTools(meeting.tools()))
    assert result.stop_reason == "doom_loop" and meeting.order == ["a", "a"]
    contents = [m["content"] for m in result.messages if m["role"] == "tool"]
    assert (
        contents[:2] == ["saw a"] * 2
        and "3 times in a row" in contents[2]
        and contents[3].startswith("Not run")
    )


# ---- ends in the middle ----------------------------------------------------------------------------------


def stubborn(meeting: Meeting) -> Tool:
    @tool(concurrent=True)
    def sleep(name: str) -> str:
        """Sleep on, whatever happens.

        name: who
        """
        meeting.barrier.wait()
        meeting.released.wait(30)
        return "awake"

    return sleep


def patient(meeting: Meeting) -> Tool:
    @tool(concurrent=True)
    def wait(ctx: ToolContext, name: str) -> Generator[str, None, str]:
        """Wait for an abort.

        name: who
        """
        yield f"{name} began"
        meeting.barrier.wait()
        try:
            ctx.abort.wait(30)
        finally:
            meeting.order.append(name)
        return "?"

    return wait


def test_an_abort_reaches_all_and_the_results_say_what_was_put_out() -> None:
    meeting, abort = Meeting(3), Abort()
    threading.Thread(target=lambda: (meeting.barrier.wait(), abort.set()), daemon=True).start()
    with serve(calls(("wait", "a"), ("wait", "b")), Reply("done")) as server:
        events, result = ask(server, tools=ParallelTools([patient(meeting)]), abort=abort)
    assert result.stop_reason == "aborted" and sorted(meeting.order) == ["a", "b"]
    assert [m["content"] for m in result.messages if m["role"] == "tool"] == [
        "a began\n[aborted by the user]",
        "b began\n[aborted by the user]",
    ]
    assert types(events).count("tool_end") == 2


def test_a_tool_that_does_not_look_at_the_abort_is_left_behind() -> None:
    meeting, abort = Meeting(3), Abort()
    threading.Thread(target=lambda: (meeting.barrier.wait(), abort.set()), daemon=True).start()
    with serve(calls(("sleep", "a"), ("wait", "b")), Reply("done")) as server:
        started = time.monotonic()
        _, result = ask(
            server, tools=ParallelTools([stubborn(meeting), patient(meeting)]), abort=abort
        )
    meeting.released.set()
    assert result.stop_reason == "aborted" and time.monotonic() - started < 10
    assert [m["content"] for m in result.messages if m["role"] == "tool"] == [
        "[aborted by the user]",
        "b began\n[aborted by the user]",
    ]


@pytest.mark.parametrize("left_by", ["walking away", "KeyboardInterrupt", "a bug of the consumer"])
def test_whoever_breaks_off_leaves_ended_tools_and_a_history_in_order(left_by: str) -> None:
    from coder.ai import ChatModel
    from coder.loop import run_loop

    meeting, messages = Meeting(2), list[dict[str, Any]]()
    with serve(calls(("wait", "a"), ("wait", "b")), Reply("done")) as server:
        run = run_loop(
            messages,
            ChatModel("m", base_url=server.url),
            ParallelTools([patient(meeting)]),
            prompts="go",
        )
        for event in run:
            if isinstance(event, ToolUpdate):
                break
        if left_by == "walking away":
            run.close()
        else:
            with pytest.raises(
                KeyboardInterrupt if left_by == "KeyboardInterrupt" else ZeroDivisionError
            ):
                raised = run.throw(
                    KeyboardInterrupt() if left_by == "KeyboardInterrupt" else ZeroDivisionError()
                )
                while raised:
                    raised = next(run)
    meeting.barrier.abort()
    deadline = time.monotonic() + 10
    while any(thread.name.startswith("tool call") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "tool"]
