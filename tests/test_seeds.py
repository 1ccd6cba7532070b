"""What two older systems do and no other test demonstrates: rows of the list of what pi-agent-core (P01 to P62) and the loop
kernel (K01 to K29) do.

Most rows are shown where the part is tested: test_agent.py, test_hooks.py (K12), test_loop.py, test_golden.py, test_wire.py (K22),
test_relay.py.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from coder.abort import Abort
from coder.agent.agent import Agent
from coder.agent.parallel import ParallelTools
from coder.ai import ChatModel
from coder.devtools.scripted import Body, Reply, ScriptedServer
from coder.events import (
    Compacted,
    Event,
    MessageEnd,
    Nested,
    PermissionAsked,
    QuestionAsked,
    StepEnd,
    TextDelta,
    ToolEnd,
    ToolStart,
    ToolUpdate,
)
from coder.history import user
from coder.hooks import FunctionHooks
from coder.loop import run_loop
from coder.permissions.permissions import Permissions
from coder.permissions.rules import rules_of
from coder.providers.errors import RetryPolicy
from coder.sessions.recorder import SessionStore
from coder.tool_calls import MAX_CALLS, TOO_MANY
from coder.toolset import ToolContext, Toolset, tool
from coder.types import Completion, Limits, Message, ModelError, Request, ToolResult, Usage
from tests.harness import (
    FAST,
    ONE,
    add,
    all_of,
    ask,
    assert_all_valid,
    contents,
    drive,
    quick,
    roles,
    serve,
)
from tests.terminal import promptly, until

ROOT = Path(__file__).parents[1]
AGAIN = Reply(calls=[("add", {"a": 5, "b": 6})])
HANGING = Reply("alpha beta gamma", cut=3, close="hang")


def agent_of(server: ScriptedServer, **options: Any) -> Agent:
    return Agent(ChatModel("m", base_url=server.url), **{"tools": [add], "retry": FAST} | options)


def sent(server: ScriptedServer, request: int = -1) -> list[Any]:
    return contents(server.requests[request]["messages"])


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


class Saying:
    """A model in the test's own words: what it does at each request."""

    name, context_window = "saying", 100_000

    def __init__(self, *steps: Callable[[Abort], str]) -> None:
        self.steps = iter(steps)

    def stream(self, request: Request, abort: Abort) -> Generator[Event, None, Completion]:
        yield TextDelta("So: ")
        text = f"So: {next(self.steps)(abort)}"
        return Completion(text, [], "stop", said(text), Usage())


# ---- the order of hooks and requests ---------------------------------------------------------------------

BEFORE = [
    *("on_length", "transform_context", "convert_to_llm", "get_api_key"),
    *("before_llm_call", "request", "after_llm_call"),
]
RETURNS = {"on_length": False, "get_steering_messages": (), "get_follow_up_messages": ()}


def test_every_hook_has_its_place_in_a_step() -> None:
    """P05, P07, P30, K06: shorten, transform, convert, key, request hook, request, answer hook, tool hooks, queues."""
    order: list[str] = []

    def noting(name: str) -> Callable[..., Any]:
        def hook(first: Any = None, *_: Any) -> Any:
            order.append(name)
            return first if name in ("transform_context", "convert_to_llm") else RETURNS.get(name)

        return hook

    def script(body: Body) -> Reply:
        order.append("request")
        return ONE if len(body["messages"]) == 1 else Reply("Three.")

    @quick
    def add(a: int, b: int) -> None:
        order.append("the tool")

    names = [*BEFORE, "before_tool_call", "after_tool_call", *RETURNS]
    with serve(script) as server:
        hooks = FunctionHooks(**{name: noting(name) for name in names if name != "request"})
        ask(server, tools=[add], hooks=hooks)
    steering = [place for place, name in enumerate(order) if name == "get_steering_messages"]
    assert {0, order.index("after_tool_call") + 1} <= {*steering}
    calling = ["before_tool_call", "the tool", "after_tool_call"]
    others = [name for name in order if name != "get_steering_messages"]
    assert others == [*BEFORE, *calling, *BEFORE, "get_follow_up_messages"]


def test_the_answer_hook_changes_nothing_and_is_asked_once_for_each_answer() -> None:
    """K08."""
    seen: list[str] = []

    def look(completion: Completion) -> Any:
        seen.append(completion.text)
        return Completion("another", [], "stop", said("another"), Usage())

    with serve(Reply("busy", status=503), Reply("half", cut=2), Reply("fine")) as server:
        _, result = ask(server, hooks=FunctionHooks(after_llm_call=look))
    assert (result.text, roles(result.messages), seen) == ("fine", ["user", "assistant"], ["fine"])


@pytest.mark.parametrize(
    ("reply", "limits", "reason", "asked"),
    [
        (Reply("done"), Limits(), "stop", 1),
        (Reply("no", status=400), Limits(), "error", 0),
        (ONE, Limits(max_steps=1), "max_steps", 0),
        (Reply("half", finish="length"), Limits(), "length", 1),
        (Reply("half", finish="content_filter"), Limits(), "content_filter", 0),
        (HANGING, Limits(max_seconds=0.5), "max_time", 0),
    ],
)
def test_follow_ups_are_asked_for_only_where_the_model_has_finished(
    reply: Reply, limits: Limits, reason: str, asked: int
) -> None:
    """P08, P28."""
    polls: list[str] = []
    hooks = FunctionHooks(get_follow_up_messages=lambda: polls.append("asked") or ())
    with serve(reply) as server:
        _, result = ask(server, tools=[add], limits=limits, hooks=hooks)
    assert (result.stop_reason, len(polls)) == (reason, asked)


# ---- messages, tools, images -----------------------------------------------------------------------------


def test_a_request_is_the_prompt_the_messages_and_the_tools() -> None:
    """P03, P10 to P12, P22: a tool is a name, a description, parameters; its label and the details of its results stay here."""

    def weather(city: str, ctx: ToolContext) -> ToolResult:
        """Say how the weather is.

        city: where
        """
        assert (ctx.session_id, ctx.call_id, ctx.abort.is_set) == ("s1", starts[-1].id, False)
        return ToolResult("rain", details={"diff": "+PRIVATE"})

    starts, ends = list[ToolStart](), list[ToolEnd]()
    heard = {"on_tool_call": starts.append, "on_tool_result": ends.append}
    made = tool(title=lambda arguments: f"of {arguments['city']}")(weather)
    with serve(Reply(calls=[("weather", {"city": "Bergen"})]), Reply("Wet.")) as server:
        agent = agent_of(server, tools=[made], system="Be brief.", session_id="s1", **heard)
        agent.run("And Bergen?")
    where = {"city": {"type": "string", "description": "where"}}
    parameters = {"type": "object", "properties": where, "required": ["city"]}
    function = {"name": "weather", "description": "Say how the weather is."}
    schema = {"type": "function", "function": function | {"parameters": parameters}}
    assert server.requests[0]["tools"] == [schema]
    assert roles(server.requests[1]["messages"]) == ["system", "user", "assistant", "tool"]
    assert starts[0].title == "weather of Bergen" and "of Bergen" not in str(server.requests)
    assert ends[0].result.details == {"diff": "+PRIVATE"} and sent(server)[-1] == "rain"
    assert "PRIVATE" not in f"{server.requests}{agent.messages}"


def pictures(body: Body) -> list[bytes]:
    """The bytes of all pictures of a request."""
    lists = [content for content in contents(body["messages"]) if isinstance(content, list)]
    parts = [part for each in lists for part in each if part["type"] == "image_url"]
    urls = [part["image_url"]["url"].partition("data:image/png;base64,") for part in parts]
    return [base64.b64decode(data, validate=True) for _, _, data in urls]


def test_pictures_in_a_prompt_and_in_a_result_arrive_byte_by_byte() -> None:
    """P12, P43, P44."""
    red, blue = bytes(range(256)), bytes(range(255, -1, -1))

    @quick
    def look() -> list[dict[str, Any]]:
        url = f"data:image/png;base64,{base64.b64encode(blue).decode()}"
        return [
            {"type": "text", "text": "blue"},
            {"type": "image_url", "image_url": {"url": url}},
        ]

    image = {"type": "image", "data": base64.b64encode(red).decode(), "mimeType": "image/png"}
    with serve(Reply(calls=[("look", {})]), Reply("Red and blue.")) as server:
        agent = agent_of(server, tools=[look])
        agent.prompt("What colours?", [image, image])
        assert_all_valid(server)
        assert [pictures(body) for body in server.requests] == [[red, red], [red, red, blue]]
        in_request = roles(server.requests[1]["messages"])
    assert in_request == ["user", "assistant", "tool", "user"], "a result of its own is text"
    assert roles(agent.messages) == ["user", "assistant", "tool", "assistant"]


def test_messages_for_the_screen_may_stand_anywhere_and_reach_no_server() -> None:
    """P02, P04: between a call and its result, too, where a server would refuse them."""
    function = {"name": "add", "arguments": '{"a": 1, "b": 2}'}
    call = said("") | {"tool_calls": [{"id": "a", "type": "function", "function": function}]}
    answer = {"role": "tool", "tool_call_id": "a", "content": "3"}
    notice = {"role": "notification", "text": "for the screen"}
    with serve(Reply("ok")) as server:
        agent = agent_of(server, messages=[notice, user("add"), call, notice, answer])
        agent.prompt([notice, user("and?")])
        assert_all_valid(server)
        assert roles(server.requests[0]["messages"]) == ["user", "assistant", "tool", "user"]
        assert "screen" not in str(server.requests)
    assert roles(agent.messages).count("notification") == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda agent: agent.append_message({"role": "notification", "text": "x"}),
        lambda agent: agent.reset(),
    ],
    ids=["append", "reset"],
)
def test_nothing_is_done_to_the_messages_during_a_run(change: Callable[[Agent], None]) -> None:
    """P52, P53: the loop's own list counts at its end, so that a change meanwhile would be undone."""
    with serve(Reply("ok")) as server:
        agent = agent_of(server)
        agent.subscribe(lambda event: change(agent) if isinstance(event, StepEnd) else None)
        with pytest.raises(RuntimeError, match="at work"):
            agent.prompt("go")
        assert not agent.state.is_streaming and roles(agent.messages) == ["user", "assistant"]


def test_every_message_carries_when_it_came() -> None:
    """P62: milliseconds since the epoch; one that was broken off, too."""
    before = time.time_ns() // 1_000_000
    with serve(ONE, Reply("Three."), HANGING) as server, promptly(10):
        agent = agent_of(server)
        agent.run("go")
        agent.follow_up("and?")
        agent.subscribe(
            lambda event: agent.abort() if getattr(event, "text", "") == " beta" else None
        )
        agent.continue_()
        assert "timestamp" not in str(server.requests)
    stamps = [message["meta"]["timestamp"] for message in agent.messages]
    assert len(stamps) == 6 and sorted(stamps) == stamps
    assert before <= stamps[0] <= stamps[-1] <= time.time_ns() // 1_000_000
    assert agent.messages[-1]["content"] == "alpha beta" and "model" in agent.messages[-1]["meta"]


# ---- state -----------------------------------------------------------------------------------------------


def test_an_answer_is_in_the_list_when_it_is_whole_and_in_the_state_while_it_comes() -> None:
    """P31, P38. pi puts the partial message into the list and changes it there; our list is what is sent."""
    seen: list[tuple[str, Any, list[str]]] = []
    with serve(Reply("Fine.", reasoning="Hm. Well.")) as server:
        agent = agent_of(server)
        state = agent.state
        agent.subscribe(
            lambda e: seen.append((e.type, state.stream_message, roles(agent.messages)))
        )
        agent.run("go")
    coming = [m for kind, m, listed in seen if kind.endswith("_delta") and listed == ["user"]]
    whole = [("Hm.", ""), ("Hm. Well.", ""), ("Hm. Well.", "Fine.")]
    assert [(message["reasoning"], message["content"]) for message in coming] == whole
    ends = [each for each in seen if each[0] == "message_end"]
    assert ends[-1] == ("message_end", None, ["user", "assistant"])


def test_new_messages_are_those_that_ended_and_the_result_has_them_all() -> None:
    """P14, P16, P25: our run_end carries no list, the generator's return value does."""
    old = [user("before"), said("yes")]
    with serve(ONE, Reply("Three.")) as server:
        events, result = drive(agent_of(server, messages=old).stream("go"))
    assert result.messages[:2] == old
    assert [event.message for event in all_of(MessageEnd, events)] == result.messages[2:]
    step = all_of(StepEnd, events)[0]
    assert [step.message, *step.tool_results] == result.messages[3:5]


def test_reset_forgets_the_conversation_the_queues_and_the_error_and_nothing_else() -> None:
    """P52, P53."""
    with serve(Reply("no", status=400)) as server:
        agent = agent_of(server, system="Be brief.", reasoning="low", session_id="s1")
        state, model, tools = agent.state, agent.state.model, agent.state.tools
        agent.run("go")
        agent.steer("x")
        agent.follow_up("y")
        assert state.error and agent.has_queued_messages and agent.messages
        agent.reset()
    state = agent.state
    assert (state.error, agent.has_queued_messages, agent.messages) == (None, False, [])
    assert (state.model, state.tools, state.system) == (model, tools, "Be brief.")
    assert (state.reasoning, agent.session_id) == ("low", "s1")


def test_budgets_that_a_hook_sets_are_not_lost() -> None:
    """P55, K07."""
    hooks = FunctionHooks(before_llm_call=lambda request: setattr(request, "budgets", {"high": 7}))
    with serve(Reply("ok")) as server:
        model = {"profile": {"reasoning": {"budget": "$budget"}}}
        ask(server, reasoning="high", hooks=hooks, model=model)
        assert server.requests[0]["budget"] == 7


# ---- queues ----------------------------------------------------------------------------------------------


def test_each_queue_can_be_cleared_and_told_how_much_to_give() -> None:
    """P40, P41, P42, P51."""
    with serve(Reply("a")) as server:
        agent = agent_of(server)
        for queue, put, clear in (
            (agent.steering, agent.steer, agent.clear_steering_queue),
            (agent.follow_ups, agent.follow_up, agent.clear_follow_up_queue),
        ):
            assert queue.mode == "one-at-a-time"
            put("never")
            assert agent.has_queued_messages
            clear()
            assert not agent.has_queued_messages
        agent.set_steering_mode("all")
        agent.set_follow_up_mode("all")
        with pytest.raises(ValueError, match="one-at-a-time"):
            agent.set_steering_mode("some")  # type: ignore[arg-type]
        for text in ("one", "two"):
            agent.steer(text)
            agent.follow_up(f"then {text}")
        agent.run("go")
        first = ["go", "one", "two"]
        assert [sent(server, 0), sent(server, 1)] == [first, [*first, "a", "then one", "then two"]]
        assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("mode", "first", "second"),
    [
        ("one-at-a-time", ["stop"], ["stop", "ok", "11", "and wait"]),
        ("all", ["stop", "and wait"], ["stop", "and wait", "ok", "11"]),
    ],
)
def test_steering_in_the_middle_of_a_run_gives_one_or_all(
    mode: Any, first: list[str], second: list[str]
) -> None:
    """P42. What is left of one-at-a-time comes behind the next tool."""
    with serve(ONE, Reply("ok", calls=AGAIN.calls), Reply("fine")) as server:
        agent = agent_of(server)
        agent.set_steering_mode(mode)

        def steer(event: Event) -> None:
            if isinstance(event, ToolStart) and not agent.messages[2:]:
                agent.steer("stop")
                agent.steer("and wait")

        agent.subscribe(steer)
        agent.run("go")
        assert (sent(server, 1)[3:], sent(server, 2)[3:]) == (first, second)


def test_steering_during_the_last_answer_goes_on_with_the_run() -> None:
    """P26, P27: pi asks behind turn_end, whether there were tools or not, and before it asks for follow-ups."""
    left = ["wait"]
    with serve(Reply("fine"), Reply("waiting")) as server:
        agent = agent_of(server)
        agent.subscribe(
            lambda event: agent.steer(left.pop()) if isinstance(event, TextDelta) and left else None
        )
        assert agent.run("go").text == "waiting" and not agent.has_queued_messages
        assert sent(server) == ["go", "fine", "wait"]


def test_no_message_is_lost_where_the_consumer_leaves() -> None:
    """P40, P43, P47: at the first of a prompt's messages; while calls are skipped, where it is in the history or in the queue."""
    with serve(Reply(calls=[("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4})])) as server:
        agent = agent_of(server)
        for event in agent.stream([user("one"), user("two")]):
            if isinstance(event, MessageEnd):
                break
        assert contents(agent.messages) == ["one", "two"]
        agent = agent_of(server)
        for event in agent.stream("go"):
            if isinstance(event, ToolStart) and agent.messages[2:]:
                break  # at the call that is skipped
            if isinstance(event, ToolStart):
                agent.steer("stop")
    assert agent.has_queued_messages or agent.messages[-1]["content"] == "stop"


def test_continuing_adds_nothing_where_the_model_had_not_the_last_word() -> None:
    """P24, P46: no message of a prompt, and the queues are left to the loop."""
    with serve(Reply("no", status=400), Reply("fine")) as server:
        agent, events = agent_of(server), list[Event]()
        agent.run("go")
        agent.subscribe(events.append)
        agent.continue_()
        assert roles([event.message for event in all_of(MessageEnd, events)]) == ["assistant"]
        assert sent(server, 1) == ["go"]


# ---- errors, retries, aborts, limits ---------------------------------------------------------------------


def test_a_passing_failure_after_an_abort_is_the_abort() -> None:
    """K15, K16: the abort counts, not the error, and no time passes."""

    def broken_off(abort: Abort) -> str:
        abort.set()
        raise ModelError("network", "closed", retryable=True)

    with promptly(10):
        result = Agent(Saying(broken_off), retry=RetryPolicy(base=60)).run("go")
    assert (result.stop_reason, result.text) == ("aborted", "Request aborted.")


def test_how_long_to_wait_is_a_strategy_that_can_be_replaced() -> None:
    """K26: by provider, by kind, by what the server says; also where an error is mostly final."""
    asked: list[tuple[str, int]] = []

    class Patient(RetryPolicy):
        def delay(self, error: ModelError, attempt: int) -> float | None:
            asked.append((error.kind, attempt))
            return None if error.kind == "server" else 0.0

    slow, gateway = Reply("slow", status=429), Reply("gateway", status=400)
    with serve(slow, gateway, Reply("half", cut=2), Reply("no", status=500)) as server:
        assert ask(server, retry=Patient())[1].stop_reason == "error" and len(server.requests) == 4
    kinds = ["rate_limit", "bad_request", "incomplete", "server"]
    assert asked == list(zip(kinds, (1, 2, 3, 4)))
    with serve(gateway) as server:
        assert ask(server, retry=Patient())[1].text == "Failed after 5 errors: gateway"
        assert len(server.requests) == 5


def test_where_compaction_is_used_up_the_run_goes_on_without_it() -> None:
    """K05: twice in a row, and a completed step begins a new row."""
    triggers: list[str] = []
    hooks = FunctionHooks(on_length=lambda messages, trigger, *_: not triggers.append(trigger))
    with serve(*[Reply("busy", status=503)] * 3, ONE, Reply("fine")) as server:
        _, result = ask(server, tools=[add], hooks=hooks)
    assert result.text == "fine" and triggers == ["threshold"] * 3


def test_a_callback_is_told_of_a_compaction_and_a_step() -> None:
    """K14."""

    def shorten(messages: list[Message], trigger: Any, *_: Any) -> Generator[Event, None, bool]:
        if len(messages) < 3:
            return False
        messages[:-1] = []
        sizes = {"messages": 3, "tokens": 9}, {"messages": 1, "tokens": 3}
        yield Compacted(trigger, 1, *sizes, "newest")
        return True

    compactions, steps = list[Compacted](), list[StepEnd]()
    heard = {"on_compacted": compactions.append, "on_step_finish": steps.append}
    with serve(Reply("fine")) as server:
        old = [user("a"), said("b")]
        agent = agent_of(server, messages=old, on_length=shorten, **heard)
        agent.run("go")
        assert sent(server) == ["go"] and contents(agent.messages) == ["go", "fine"]
    [event], [step] = compactions, steps
    assert (event.before["messages"], event.after["messages"]) == (3, 1)
    assert (event.trigger, step.message["content"]) == ("threshold", "fine")


def test_the_time_that_a_person_takes_is_not_the_tools_in_a_nested_run_either() -> None:
    @quick
    def delegate() -> Generator[Event, None, str]:
        yield Nested("helper", PermissionAsked("1", "edit", "x", "x"))
        return "done"

    def person(event: Event) -> None:
        if isinstance(event, Nested):
            threading.Event().wait(2)

    with serve(Reply(calls=[("delegate", {})]), Reply("ok")) as server:
        events, _ = ask(server, tools=[delegate], each=person)
    assert all_of(ToolEnd, events)[0].seconds < 1.5


# ---- in a script, in a notebook, from threads ------------------------------------------------------------

SCRIPT = """\
from coder import Agent
agent = Agent("some-model", system="Be brief.")
print(agent.run("one").text)
print(agent.run("two").text)
print(len(agent.messages))
"""


def child(server: ScriptedServer, *arguments: str, stdin: str = "") -> tuple[str, int, str]:
    """What a Python process writes and how it ends."""
    env = {"OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "x", "PYTHONPATH": str(ROOT)}
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=os.environ | env, input=stdin, **options)
    return done.stdout, done.returncode, done.stderr


def test_five_lines_are_an_agent_in_a_script_and_at_a_python_prompt() -> None:
    with serve(lambda body: Reply(f"{body['messages'][-1]['content']}!")) as server:
        assert child(server, "-c", SCRIPT) == ("one!\ntwo!\n4\n", 0, "")
        *end, errors = child(server, "-i", "-q", stdin=SCRIPT)
        assert end == ["one!\ntwo!\n4\n", 0] and "Error" not in errors


def test_an_agent_works_where_an_event_loop_is_running() -> None:
    """A notebook's cells run inside one, in its thread; nothing here starts another or needs it."""

    @quick
    def look() -> Generator[str, None, str]:
        yield "half way"
        return "seen"

    async def cell(agent: Agent) -> list[str]:
        *_, end = agent.stream("two")
        third = await asyncio.to_thread(lambda: agent.run("three").text)
        return [agent.run("one").text, end.type, third]

    def script(body: Body) -> Reply:
        asked = body["messages"][-1]["role"] == "user"
        return Reply(calls=[("look", {})]) if asked else Reply("fine")

    with serve(script) as server:
        agent = agent_of(server, tools=[look])
        assert asyncio.run(cell(agent)) == ["fine", "run_end", "fine"] and len(agent.messages) == 12
        assert_all_valid(server)


def test_an_interrupted_cell_leaves_an_agent_that_goes_on() -> None:
    """A notebook interrupts with SIGINT in the main thread, here in a process of its own."""
    code = dedent("""
        import os, signal, threading
        from coder import Agent

        agent, came = Agent("m"), threading.Event()
        agent.subscribe(lambda event: came.set() if getattr(event, "text", "") == " beta" else None)
        threading.Thread(target=lambda: came.wait(30) and os.kill(os.getpid(), signal.SIGINT), daemon=True).start()
        try:
            agent.run("one")
        except KeyboardInterrupt:
            print("interrupted")
        print(agent.state.is_streaming, agent.wait_for_idle(0), [message["content"] for message in agent.messages])
        print(agent.run("two").text)
    """)
    with serve(HANGING, Reply("Yes?")) as server:
        written, status, errors = child(server, "-c", code)
        expected = "interrupted\nFalse True ['one', 'alpha beta']\nYes?\n"
        assert (written, status) == (expected, 0), errors
        assert sent(server) == ["one", "alpha beta", "two"]


def test_an_interrupted_cell_whose_traceback_is_kept_leaves_an_agent_that_goes_on() -> None:
    """A notebook keeps the last traceback, and with it everything in its frames. Interrupted anywhere, with nothing to wait for."""
    code = dedent("""
        import os, signal, sys, threading
        from coder import Agent
        from coder.events import TextDelta
        from coder.types import Completion, Usage

        class Talking:
            name, context_window = "talking", 1000
            def stream(self, request, abort):
                for _ in range(400):
                    yield TextDelta("on ")
                return Completion("on", [], "stop", {"role": "assistant", "content": "on"}, Usage())

        sys.setswitchinterval(1e-6)
        kept = []
        for _ in range(200):
            agent, came = Agent(Talking()), threading.Event()
            agent.subscribe(lambda event: came.set() if event.type == "text_delta" else None)
            signalling = threading.Thread(target=lambda: came.wait(30) and os.kill(os.getpid(), signal.SIGINT))
            signalling.start()
            try:
                agent.run("go")
                signalling.join()
            except KeyboardInterrupt as interrupt:
                kept.append((interrupt, agent.state.is_streaming))
            signalling.join()
        print(len(kept) > 100, sum(streaming for _, streaming in kept))
    """)
    with serve(Reply("never")) as server:
        written, status, errors = child(server, "-c", code)
    assert (written, status) == ("True 0\n", 0), errors


def test_a_prompt_in_one_thread_is_watched_steered_and_aborted_from_others() -> None:
    """P40, P45, P47, P49, P50."""
    with serve(HANGING, Reply("again")) as server, promptly(20):
        agent = agent_of(server)
        worker = threading.Thread(target=agent.prompt, args=("hi",))
        worker.start()
        until(lambda: (agent.state.stream_message or {}).get("content") == "alpha beta")
        assert agent.state.is_streaming and not agent.wait_for_idle(0.01)
        assert roles(agent.messages) == ["user"]
        with pytest.raises(RuntimeError, match="steer"):
            agent.prompt("no")
        agent.steer("later")
        agent.abort()
        assert agent.wait_for_idle(10)
        worker.join()
        assert contents(agent.messages) == ["hi", "alpha beta"]
        assert agent.messages[-1]["meta"]["aborted"]
        until(lambda: server.gone == 1, "the server sees that the connection is closed")
        assert agent.has_queued_messages and agent.prompt("go on").text == "again"
        assert sent(server) == ["hi", "alpha beta", "go on", "later"]
        assert_all_valid(server)


def test_whoever_waits_for_the_end_can_prompt_at_once() -> None:
    """P50: at work means neither more nor less than what wait_for_idle waits for."""
    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(300):
            begun = threading.Event()
            agent = Agent(Saying(lambda abort: begun.set() or "one", lambda abort: "two"))  # noqa: B023 (asked at once)
            worker = threading.Thread(target=agent.prompt, args=("a",))
            worker.start()
            begun.wait(10)
            assert agent.wait_for_idle(10) and agent.prompt("b").text == "So: two"
            worker.join()
    finally:
        sys.setswitchinterval(switching)


# ---- the tools of one request ----------------------------------------------------------------------------


def test_a_hook_decides_which_tools_a_request_offers_and_those_are_the_ones_that_run() -> None:
    """K08: what it takes out is unknown when it is called, what it adds is run."""

    @quick
    def double(number: int) -> str:
        return str(2 * number)

    def half(number: int) -> str:
        """Half of a number.

        number: which
        """
        return str(number // 2)

    def choose(request: Request) -> None:
        left = [each for each in request.tools if each != double.schema]
        request.tools[:] = [double, half] if len(request.messages) < 3 else left

    calls = [*ONE.calls, ("double", {"number": 4}), ("half", {"number": 8})]
    with serve(Reply(calls=calls), ONE, Reply("done")) as server:
        _, result = ask(server, tools=[add], hooks=FunctionHooks(before_llm_call=choose))
        assert_all_valid(server)
    offered = [[each["function"]["name"] for each in body["tools"]] for body in server.requests]
    assert offered == [["double", "half"], ["add"], ["add"]]
    unknown = "Error: there is no tool 'add'. The tools are: double, half"
    assert contents(result.messages, "tool") == [unknown, "8", "4", "3"]


def test_a_tool_of_the_provider_that_a_hook_adds_goes_to_the_server_as_it_is() -> None:
    search = {"type": "web_search", "web_search": {"$ref": "x"}}
    hooks = FunctionHooks(before_llm_call=lambda request: request.tools.append(search))
    with serve(ONE, Reply("done")) as server:
        _, result = ask(server, tools=[add], hooks=hooks)
        assert [body["tools"][1] for body in server.requests] == [search, search]
    assert result.text == "done" and result.messages[2]["content"] == "3"


# ---- the list is the truth -------------------------------------------------------------------------------

PARTS = [{"type": "text", "text": "my key is sk-1"}, {"type": "text", "text": "use it"}]
STRICT = {"strict_turns": True}
# What a message holds, and how the server wants messages.
IN_PLACE: dict[str, tuple[Message, dict[str, Any]]] = {
    "text": ({"role": "user", "content": "my key is sk-1"}, {}),
    "text with a time": (user("my key is sk-1"), {}),
    "a part": ({"role": "user", "content": PARTS}, {}),
    "a part with a time": (user(PARTS), {}),
    "joined with the next": (user("my key is sk-1"), STRICT),
    "a part, joined with the next": ({"role": "user", "content": PARTS}, STRICT),
}


@pytest.mark.parametrize("where", ["a subscriber", "transform_context", "before_tool_call"])
@pytest.mark.parametrize("what", IN_PLACE)
def test_a_message_that_is_changed_in_place_is_sent_changed(what: str, where: str) -> None:
    """In the middle of a run, after it was sent once."""
    given, profile = IN_PLACE[what]
    messages = [copy.deepcopy(given)]

    def redact(listed: Any = None, *_: Any) -> Any:
        if len(messages) > 2:
            parts = messages[0]["content"]
            holder, key = (messages[0], "content") if isinstance(parts, str) else (parts[0], "text")
            holder[key] = "my key is ***"
        return listed if where == "transform_context" else None

    subscribing = where == "a subscriber"
    hooks = {} if subscribing else {"hooks": FunctionHooks(**{where: redact})}
    options = {"tools": [add], "messages": messages, "model": {"profile": profile}} | hooks
    with serve(ONE, AGAIN, Reply("done")) as server:
        ask(server, "And now?", each=redact if subscribing else None, **options)
        assert_all_valid(server)
        texts = [str(body["messages"]) for body in server.requests]
    assert [("sk-1" in text, "***" in text) for text in texts] == [
        (True, False),
        *[(False, True)] * 2,
    ]


def test_calls_and_results_that_are_changed_in_place_are_sent_changed_and_valid() -> None:
    def spoil(event: Event) -> None:
        if isinstance(event, StepEnd) and len(messages) == 3:
            messages[1]["tool_calls"][0]["function"]["arguments"] = '{"a": '
            messages[2]["content"] = "n\0thing"
        elif isinstance(event, StepEnd) and len(messages) == 5:
            messages[2]["tool_call_id"] = "another"
            messages[1]["content"] = "I add."

    messages: list[Message] = []
    third = Reply(calls=[("add", {"a": 7, "b": 8})])
    with serve(ONE, AGAIN, third, Reply("done")) as server:
        ask(server, tools=[add], messages=messages, each=spoil)
        assert_all_valid(server)
        calls = [body["messages"][1] for body in server.requests[1:]]
        results = [body["messages"][2]["content"] for body in server.requests[1:]]
    assert [call["tool_calls"][0]["function"]["arguments"] for call in calls] == ["{}"] * 3
    assert contents(calls) == [None, "I add.", "I add."]
    assert results == ["n\ufffdthing", *["Not run: the run ended before this call."] * 2]


def test_what_a_request_hook_changes_in_place_is_sent_and_the_list_stays_what_it_is() -> None:
    seen: list[Request] = []

    def redact(request: Request) -> None:
        for message in request.messages if seen else ():
            if isinstance(message.get("content"), str):
                message["content"] = message["content"].replace("sk-1", "***")
        seen.append(request)

    messages: list[Message] = [{"role": "user", "content": "sk-1 it is"}]
    options = {"hooks": FunctionHooks(before_llm_call=redact), "model": {"profile": STRICT}}
    with serve(ONE, Reply("done")) as server:
        ask(server, "Go.", tools=[add], messages=messages, **options)
        assert ["sk-1" in str(body["messages"]) for body in server.requests] == [True, False]
    assert messages[0]["content"] == "sk-1 it is"


def test_a_message_that_is_changed_in_place_is_kept_changed(tmp_path: Path) -> None:
    def redact(event: Event) -> None:
        if isinstance(event, StepEnd):
            session.messages[0]["content"] = "my key is ***"

    with serve(ONE, Reply("done")) as server, SessionStore(tmp_path / "sessions.db") as store:
        session, model = store.open(), ChatModel("m", base_url=server.url)
        run = run_loop(session.messages, model, [add], prompt="my key is sk-1")
        drive(session.watch(run), redact)
        rows = [
            *store.rows("SELECT data FROM message"),
            *store.rows("SELECT text AS data FROM part"),
        ]
        assert not [row["data"] for row in rows if "sk-1" in str(row["data"])]
        assert store.search("my key is ***")


# ---- images, tools of one's own, and what an agent is given ----------------------------------------------


SEED_IMAGE = {"type": "image", "data": "aGk=", "mimeType": "image/png"}
API_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}


def images_of(server: ScriptedServer) -> list[int]:
    """How many images each request has, all in the API's form."""
    assert all('"type": "image"' not in json.dumps(body) for body in server.requests)
    return [json.dumps(body["messages"]).count(json.dumps(API_IMAGE)) for body in server.requests]


def test_an_image_in_the_short_form_may_stand_in_any_message_and_result() -> None:
    """P44: in prompts, queues, the list, what tools return and what hooks put in their place."""

    @quick
    def look(how: str) -> Any:
        return ToolResult(["here", SEED_IMAGE]) if how == "result" else [SEED_IMAGE]  # type: ignore[list-item]

    def answer(call: Any, ctx: ToolContext) -> ToolResult | None:
        return ToolResult([SEED_IMAGE]) if call.arguments == {"how": "hook"} else None

    def message() -> Message:
        return {"role": "user", "content": [dict(SEED_IMAGE)]}

    calls = [("look", {"how": how}) for how in ("plain", "result", "hook")]
    with serve(Reply(calls=calls), Reply("I see."), Reply("More.")) as server:
        old = [message(), said("ok")]
        agent = agent_of(server, tools=[look], before_tool_call=answer, messages=old)
        agent.follow_up(message())
        asked = [{"type": "text", "text": "And this?"}, SEED_IMAGE]
        agent.prompt([{"role": "user", "content": asked}])
        assert_all_valid(server)
        assert images_of(server) == [2, 5, 6]
    with serve(Reply("done")) as server:
        inject = FunctionHooks(transform_context=lambda messages, abort: [*messages, message()])
        ask(server, prompt=[message()], messages=[message()], hooks=inject)  # type: ignore[arg-type]
        assert images_of(server) == [3]


@pytest.mark.parametrize("kind", [Toolset, ParallelTools])
def test_progress_of_a_plain_function_is_shown(kind: type[Toolset]) -> None:
    def count(ctx: ToolContext) -> str:
        ctx.update("one ")
        ctx.update("two ")
        return "done"

    def fails(ctx: ToolContext) -> str:
        ctx.update("three ")
        raise ValueError("no")

    def once(ctx: ToolContext) -> Any:
        ctx.update("four ")
        yield ctx.update("five ")
        return "done"

    tools = kind([quick(each, concurrent=True) for each in (count, fails, once)])
    with serve(Reply(calls=[("count", {}), ("fails", {}), ("once", {})]), Reply("done")) as server:
        events, _ = ask(server, tools=tools)
    texts = sorted(event.text.strip() for event in all_of(ToolUpdate, events))
    assert texts == ["five", "four", "one", "three", "two"]


def test_a_tool_knows_the_message_that_called_it() -> None:
    """A20."""
    seen: list[str] = []

    @quick
    def where(ctx: ToolContext, number: int) -> None:
        seen.append(ctx.message_id)

    calls = [("where", {"number": number}) for number in range(3)]
    with serve(Reply(calls=calls[:2]), Reply(calls=calls[2:]), Reply("x")) as server:
        _, result = ask(server, tools=[where])
        assert_all_valid(server)
    ids = [m["meta"]["message_id"] for m in result.messages if m["role"] == "assistant"]
    assert seen == [ids[0], ids[0], ids[1]] and len(set(ids)) == 3


@pytest.mark.parametrize("kind", [Toolset, ParallelTools])
def test_a_tool_may_ask_the_person_a_question(kind: type[Toolset]) -> None:
    def choose(of: str, ctx: ToolContext) -> Any:
        asked = QuestionAsked(ctx.call_id, f"Which {of}?", ["red", "blue"])
        yield asked
        return f"{of}: {asked.answer or 'no answer'}"

    def reply(event: Event) -> None:
        if isinstance(event, QuestionAsked) and "colour" in event.question:
            time.sleep(0.05)  # a person
            event.reply(event.options[1])

    calls = [("choose", {"of": "colour"}), ("choose", {"of": "size"})]
    with serve(Reply(calls=calls), Reply("done")) as server:
        tools = kind([quick(choose, concurrent=True)])
        events, result = ask(server, tools=tools, each=reply)
    assert contents(result.messages, "tool") == ["colour: blue", "size: no answer"]
    questions = [event.to_dict()["question"] for event in all_of(QuestionAsked, events)]
    assert questions == ["Which colour?", "Which size?"]


@pytest.mark.parametrize(
    ("rules", "asked", "said"),
    [
        ({"deploy": "ask"}, 1, "deployed"),
        ({"deploy": {"prod*": "ask"}}, 1, "deployed"),
        ({"deploy": {"*": "ask", "prod*": "deny"}}, 1, "Denied"),
        ({}, 0, "deployed"),
    ],
)
def test_a_tool_that_asks_under_its_own_name_asks_once(rules: Any, asked: int, said: str) -> None:
    @quick
    def deploy(where: str, ctx: ToolContext) -> Any:
        yield from ctx.ask("deploy", where)
        return "deployed"

    def yes(event: Event) -> None:
        if isinstance(event, PermissionAsked):
            event.reply("once")

    with serve(Reply(calls=[("deploy", {"where": "production"})]), Reply("done")) as server:
        hooks = Permissions(rules_of(rules), can_ask=True)
        events, result = ask(server, tools=[deploy], hooks=hooks, each=yes)
    assert len(all_of(PermissionAsked, events)) == asked
    assert result.messages[2]["content"].startswith(said)


def test_a_follow_up_comes_after_an_answer_that_was_cut() -> None:
    with serve(Reply("half", finish="length"), Reply("whole")) as server:
        agent = agent_of(server)
        agent.follow_up("Go on.")
        assert agent.run("Tell.").text == "whole" and not agent.has_queued_messages
        assert sent(server) == ["Tell.", "half", "Go on."]


def test_what_an_agent_is_given_counts_or_fails_at_once() -> None:
    before: list[str] = []
    one, two = (
        FunctionHooks(before_llm_call=lambda request, name=name: before.append(name))
        for name in ("one", "two")
    )
    with serve(Reply("wait", status=429, headers={"retry-after": "30"}), Reply("yes")) as server:
        agent = Agent("m", base_url=server.url, api_key="k", hooks=[one, two], retry=FAST)
        agent.retry = RetryPolicy(max_delay=5)
        assert agent.run("hi").stop_reason == "error" and before == ["one", "two"]
        agent.set_model("another")
        assert agent.run("hi").text == "yes" and server.requests[-1]["model"] == "another"
        assert server.heads[-1]["authorization"] == "Bearer k"
        with pytest.raises(TypeError, match="a model is a ChatModel"):
            agent_of(server).set_model("another")
        for wrong in ([print], print, [one, {}]):
            with pytest.raises(TypeError, match="hooks are objects of the class Hooks"):
                agent_of(server, hooks=wrong)
        with pytest.raises(TypeError, match="HookChain"):
            ask(server, hooks=[one])


NOTICE = {"role": "notice", "content": "x"}


@pytest.mark.parametrize("messages", [[], [NOTICE], [user("hi"), said("yes")]])
def test_a_run_without_anything_to_answer_is_refused(messages: list[Message]) -> None:
    why = r"no message to continue from|the last message is a finished answer"
    with serve(Reply("yes")) as server:
        model, given = ChatModel("m", base_url=server.url), [user("go")]
        with pytest.raises(ValueError, match=why):
            drive(run_loop(messages, model))
        assert not server.requests
        steering = FunctionHooks(get_steering_messages=lambda: [given.pop()] if given else [])
        assert drive(run_loop(messages, model, hooks=steering))[1].text == "yes"


def test_of_thousands_of_calls_in_an_answer_the_first_are_run_and_the_others_say_why_not() -> None:
    ran: list[int] = []

    @quick
    def note(number: int) -> None:
        ran.append(number)

    calls = [("note", {"number": number}) for number in range(2_000)]
    with serve(Reply(calls=calls), Reply("done")) as server:
        _, result = ask(server, tools=[note])
        assert_all_valid(server)
    results = contents(result.messages, "tool")
    assert ran == list(range(MAX_CALLS)) and len(results) == 2_000
    assert set(results[MAX_CALLS:]) == {TOO_MANY} and f"at most {MAX_CALLS} calls" in TOO_MANY
