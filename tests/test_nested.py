"""Agents that a tool runs (ctx.run), and async tools: events, tokens, abort, side by side."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, TypedDict

import pytest

from coder import (
    Abort,
    Agent,
    ChatModel,
    Event,
    Events,
    Nested,
    ParallelTools,
    Permissions,
    Reply,
    RunEnd,
    ScriptedModel,
    Session,
    TextDelta,
    ToolContext,
    ToolError,
    ToolUpdate,
    tool,
)
from coder.devtools.scripted import Body
from coder.events import PermissionAsked, innermost
from tests.harness import add, all_of, contents, drive, serve
from tests.terminal import PATIENCE, promptly


class Point(TypedDict):
    x: int


def asking(helper: Agent, **options: Any) -> Any:
    """A tool that has an agent do its work."""

    def ask(what: str, ctx: ToolContext) -> Events[str]:
        """Ask the helper.

        what: the question
        """
        result = yield from ctx.run(helper, what, **options)
        return f"{result.stop_reason}: {result.text}"

    return tool(ask)


ASK = Reply(calls=[("ask", {"what": "How much is it?"})])


def test_an_agent_works_as_a_part_of_a_call() -> None:
    helper = Agent(
        ScriptedModel(
            [
                Reply(calls=[("add", {"a": 1, "b": 2})]),
                Reply("3"),
            ]
        ),
        tools=[add],
    )
    model = ScriptedModel([ASK, Reply("It is 3.")])
    agent = Agent(
        model,
        tools=[asking(helper, name="helper")],
        max_steps=9,
    )
    events, result = drive(agent.stream("go"))
    nested = all_of(Nested, events)
    assert {each.agent for each in nested} == {"helper"}
    assert all(each.session_id for each in nested)
    assert len({each.call_id for each in nested}) == 1
    [end] = [each.event for each in nested if isinstance(each.event, RunEnd)]
    assert contents(agent.messages, "tool") == ["stop: 3"]
    own = sum(each.usage.input for each in events if each.type == "step_end")
    assert result.usage.input == own + end.usage.input > own > 0
    assert contents(helper.messages)[0] == "How much is it?"


def test_its_steps_count_for_the_run() -> None:
    endless = Reply(calls=[("add", {"a": 1, "b": 2})])
    helper = Agent(
        ScriptedModel([endless, endless, endless, endless]),
        tools=[add],
        max_steps=2,
    )
    agent = Agent(
        ScriptedModel([ASK, Reply("fine")]),
        tools=[asking(helper)],
        max_steps=4,
    )
    assert agent.run("go").text == "fine"
    assert contents(agent.messages, "tool")[0].startswith("max_steps")
    helper = Agent(ScriptedModel([endless, endless, endless]), tools=[add])
    agent = Agent(
        ScriptedModel([ASK, Reply("fine")]),
        tools=[asking(helper)],
        max_steps=3,
    )
    assert agent.run("go").text == "fine", "one step is left for the answer"


def test_its_answer_has_the_form_that_the_tool_asks_for() -> None:
    @tool
    def locate(ctx: ToolContext) -> Events[str]:
        """Find it."""
        result = yield from ctx.run(
            Agent(ScriptedModel([Reply('{"x": 7}')])), "Where?", output=Point
        )
        return str(result.output["x"] + 1)

    agent = Agent(
        ScriptedModel(
            [
                Reply(calls=[("locate", {})]),
                Reply("there"),
            ]
        ),
        tools=[locate],
    )
    agent.run("go")
    assert contents(agent.messages, "tool") == ["8"]


def test_its_questions_reach_the_consumer() -> None:
    helper = Agent(
        ScriptedModel(
            [
                Reply(calls=[("add", {"a": 1, "b": 2})]),
                Reply("3"),
            ]
        ),
        tools=[add],
        hooks=Permissions([], can_ask=True),
    )
    agent = Agent(
        ScriptedModel([ASK, Reply("fine")]),
        tools=[asking(helper)],
    )

    def answer(event: Event) -> None:
        asked = innermost(event)
        if isinstance(asked, PermissionAsked):
            asked.reply("once")

    agent.subscribe(answer)
    agent.run("go")
    assert contents(helper.messages, "tool") == ["3"]


@pytest.mark.parametrize("kind", [list, ParallelTools])
def test_the_abort_of_the_run_is_its_own(kind: Any) -> None:
    with serve(Reply("word " * 2000, pace=0.05)) as server:
        helper = Agent(ChatModel("m", base_url=server.url))
        agent = Agent(
            ScriptedModel([ASK]),
            tools=kind([asking(helper)]),
        )
        token = Abort()

        def stop(event: Event) -> None:
            if isinstance(innermost(event), TextDelta):
                threading.Thread(target=token.set).start()

        agent.subscribe(stop)
        with promptly():
            result = agent.run("go", abort=token)
    assert result.stop_reason == "aborted"
    assert contents(agent.messages, "tool") == ["[aborted by the user]"]
    assert helper.wait_for_idle(0), "it can be used again"


def test_an_abort_of_the_helper_alone_is_no_abort_of_the_run() -> None:
    helper = Agent(ScriptedModel([Reply("word " * 500, pace=0.01)]))
    agent = Agent(
        ScriptedModel([ASK, Reply("fine")]),
        tools=[asking(helper)],
    )
    agent.subscribe(lambda event: helper.abort() if isinstance(event, Nested) else None)
    assert agent.run("go").stop_reason == "stop"
    assert contents(agent.messages, "tool") == ["aborted: Request aborted."]


def test_agents_work_side_by_side() -> None:
    both = threading.Barrier(2)

    def answer(body: Body) -> Reply:
        both.wait(PATIENCE)  # each waits for the other
        return Reply(body["messages"][-1]["content"].upper())

    with serve(answer) as server:

        @tool(concurrent=True)
        def research(topic: str, ctx: ToolContext) -> Events[str]:
            """Find out about a topic.

            topic: what about
            """
            result = yield from ctx.run(
                Agent(ChatModel("m", base_url=server.url)),
                topic,
            )
            return result.text

        calls = [
            ("research", {"topic": "oslo"}),
            ("research", {"topic": "bergen"}),
        ]
        model = ScriptedModel([Reply(calls=calls), Reply("done")])
        agent = Agent(model, tools=ParallelTools([research]))
        agent.run("Compare Oslo and Bergen.")
    assert contents(agent.messages, "tool") == ["OSLO", "BERGEN"]


def test_a_session_runs_such_a_tool_and_counts_its_tokens_once(tmp_path: Path) -> None:
    helper = Agent(ScriptedModel([Reply("3")]))
    session = Session.open(
        tmp_path,
        model=ScriptedModel([ASK, Reply("It is 3.")]),
        tools=[asking(helper)],
        yolo=True,
        data=tmp_path / "data",
        settings={"CODER_TITLES": "off"},
    )
    with session:
        result = session.run("go")
        assert contents(session.messages, "tool") == ["stop: 3"]
        assert session.usage == result.usage


# ---- async tools ---------------------------------------------------------------------------------


@tool
async def fetch(what: str, ctx: ToolContext) -> str:
    """Fetch something.

    what: its name
    """
    ctx.update(f"fetching {what}")
    await asyncio.sleep(0.001)
    if what == "nothing":
        raise ToolError("there is nothing")
    return what.upper()


FETCH = Reply(
    calls=[
        ("fetch", {"what": "news"}),
        ("fetch", {"what": "nothing"}),
    ]
)


def test_an_async_tool_runs_to_its_end_also_below_a_running_loop() -> None:
    agent = Agent(ScriptedModel([FETCH, Reply("done")]), tools=[fetch])

    async def run() -> list[Event]:
        return list(agent.stream("go"))  # as in a cell of a notebook

    events = asyncio.run(run())
    assert contents(agent.messages, "tool") == ["NEWS", "Error: there is nothing"]
    assert [each.text for each in all_of(ToolUpdate, events)] == [
        "fetching news",
        "fetching nothing",
    ]


def test_the_output_of_an_async_tool_comes_while_it_works() -> None:
    is_shown = threading.Event()

    @tool
    async def work(ctx: ToolContext) -> str:
        """Work until its output was seen."""
        ctx.update("begun")
        while not is_shown.is_set():
            await asyncio.sleep(0.001)
        return "done"

    agent = Agent(
        ScriptedModel(
            [
                Reply(calls=[("work", {})]),
                Reply("done"),
            ]
        ),
        tools=[work],
    )
    agent.subscribe(lambda event: is_shown.set() if isinstance(event, ToolUpdate) else None)
    assert agent.run("go").text == "done"


def run_until_aborted(agent: Agent, has_begun: threading.Event) -> None:
    """Run the agent, and abort the run once its tool has begun."""

    def stop() -> None:
        has_begun.wait(PATIENCE)
        agent.abort()

    threading.Thread(target=stop).start()
    with promptly():
        assert agent.run("go").stop_reason == "aborted"


def test_an_abort_cancels_an_async_tool() -> None:
    has_begun = threading.Event()
    has_cleaned_up = threading.Event()

    @tool
    async def wait(ctx: ToolContext) -> str:
        """Wait for ever."""
        has_begun.set()
        try:
            await asyncio.sleep(1000)
        finally:
            has_cleaned_up.set()
        return ""

    agent = Agent(
        ScriptedModel([Reply(calls=[("wait", {})])]),
        tools=[wait],
    )

    run_until_aborted(agent, has_begun)
    assert has_cleaned_up.wait(PATIENCE)
    assert contents(agent.messages, "tool") == ["[aborted by the user]"]


def test_an_async_tool_that_ignores_the_abort_is_left_alone() -> None:
    has_begun = threading.Event()
    may_end = threading.Event()

    @tool
    async def block() -> str:
        """Block the loop."""
        has_begun.set()
        may_end.wait(PATIENCE)
        return ""

    agent = Agent(
        ScriptedModel([Reply(calls=[("block", {})])]),
        tools=[block],
    )

    run_until_aborted(agent, has_begun)
    may_end.set()


def test_an_async_generator_is_no_tool() -> None:
    async def count() -> Any:
        """Count."""
        yield "one"

    with pytest.raises(TypeError, match="tool count is an async generator"):
        tool(count)


def test_a_concurrent_async_tool_runs_side_by_side_with_others() -> None:
    both = threading.Barrier(2)

    @tool(concurrent=True)
    async def meet(who: str) -> str:
        """Meet.

        who: the name
        """
        await asyncio.to_thread(both.wait, PATIENCE)
        return who

    calls = [
        ("meet", {"who": "a"}),
        ("meet", {"who": "b"}),
    ]
    model = ScriptedModel([Reply(calls=calls), Reply("done")])
    agent = Agent(model, tools=ParallelTools([meet]))
    agent.run("go")
    assert contents(agent.messages, "tool") == ["a", "b"]
