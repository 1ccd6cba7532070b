"""What two older systems do and no other test demonstrates: rows of the list of what pi-agent-core (P01 to P62) and the loop
kernel (K01 to K29) do.

Most rows are shown where the part is tested: test_agent.py, test_hooks.py, test_loop.py, test_golden.py, test_relay.py.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import os
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Generator, Sequence
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
from coder.hooks import FunctionHooks, HookChain, Hooks
from coder.loop import run_loop
from coder.permissions.permissions import Permissions
from coder.permissions.rules import rules_of
from coder.providers.errors import RetryPolicy
from coder.sessions.recorder import SessionStore
from coder.tool_calls import MAX_CALLS, TOO_MANY
from coder.toolset import ToolContext, Toolset, tool
from coder.types import (
    Completion,
    DeniedError,
    Limits,
    Message,
    ModelError,
    Request,
    RunResult,
    ToolCall,
    ToolResult,
    Usage,
)
from tests.harness import FAST, ask, assert_all_valid, drive, serve
from tests.terminal import promptly, until

ROOT = Path(__file__).parents[1]


@tool
def add(a: int, b: int) -> str:
    """Add.

    a: one
    b: other
    """
    return str(a + b)


ONE = Reply(calls=[("add", {"a": 1, "b": 2})])
HANGING = Reply("alpha beta gamma", cut=3, close="hang")


def agent_of(server: ScriptedServer, **options: Any) -> Agent:
    return Agent(ChatModel("m", base_url=server.url), **{"tools": [add], "retry": FAST} | options)


def contents(server: ScriptedServer, request: int = -1) -> list[Any]:
    return [message.get("content") for message in server.requests[request]["messages"]]


def roles(messages: Sequence[Message]) -> list[str]:
    return [message["role"] for message in messages]


class Saying:
    """A model in the test's own words: what it does at each request."""

    name, context_window = "saying", 100_000

    def __init__(self, *steps: Callable[[Abort], str]) -> None:
        self.steps = iter(steps)

    def stream(self, request: Request, abort: Abort) -> Generator[Event, None, Completion]:
        yield TextDelta("So: ")
        text = f"So: {next(self.steps)(abort)}"
        return Completion(text, [], "stop", {"role": "assistant", "content": text}, Usage())


# ---- the order of hooks and requests ---------------------------------------------------------------------


def test_every_hook_has_its_place_in_a_step() -> None:
    """P05, P30, K06: shorten, transform, convert, key, request hook, request, answer hook, tool hooks, queues."""
    order: list[str] = []

    def noting(name: str, value: Any = None) -> Callable[..., Any]:
        def hook(*_: Any) -> Any:
            order.append(name)
            return value

        return hook

    def listing(name: str) -> Callable[..., Any]:
        def hook(messages: list[Message], *_: Any) -> list[Message]:
            order.append(name)
            return messages

        return hook

    def script(body: Body) -> Reply:
        order.append("request")
        return ONE if len(body["messages"]) == 1 else Reply("Three.")

    @tool
    def add(a: int, b: int) -> str:
        """Add.

        a: one
        b: other
        """
        order.append("the tool")
        return str(a + b)

    hooks = FunctionHooks(
        on_length=noting("on_length", False),
        transform_context=listing("transform_context"),
        convert_to_llm=listing("convert_to_llm"),
        get_steering_messages=noting("get_steering_messages", ()),
        get_follow_up_messages=noting("get_follow_up_messages", ()),
        **{
            name: noting(name)
            for name in (
                "get_api_key",
                "before_llm_call",
                "after_llm_call",
                "before_tool_call",
                "after_tool_call",
            )
        },
    )
    with serve(script) as server:
        ask(server, tools=[add], hooks=hooks)
    asked = [
        "on_length",
        "transform_context",
        "convert_to_llm",
        "get_api_key",
        "before_llm_call",
        "request",
        "after_llm_call",
    ]
    assert [name for name in order if name != "get_steering_messages"] == [
        *asked,
        "before_tool_call",
        "the tool",
        "after_tool_call",
        *asked,
        "get_follow_up_messages",
    ]
    assert (
        order[0] == "get_steering_messages"
        and order[order.index("after_tool_call") + 1] == "get_steering_messages"
    )  # P07


def test_what_the_answer_hook_returns_changes_nothing_and_it_is_asked_once_for_each_answer() -> (
    None
):
    """K08."""
    seen: list[str] = []

    def look(completion: Completion) -> Any:
        seen.append(completion.text)
        return Completion(
            "another", [], "stop", {"role": "assistant", "content": "another"}, Usage()
        )

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
    with serve(reply) as server:
        _, result = ask(
            server,
            tools=[add],
            limits=limits,
            hooks=FunctionHooks(get_follow_up_messages=lambda: polls.append("asked") or ()),
        )
    assert (result.stop_reason, len(polls)) == (reason, asked)


def test_audit_permission_and_redaction_are_three_hooks() -> None:
    """K12. The audit sees what the model asked for, the model sees neither the denied nor the secret."""
    audit: list[tuple[str, Any]] = []

    def record(call: ToolCall, ctx: ToolContext) -> None:
        audit.append((call.name, dict(call.arguments or {})))

    def permit(call: ToolCall, ctx: ToolContext) -> None:
        if call.arguments and call.arguments["key"] == "root":
            raise DeniedError("not that one")

    def redact(call: ToolCall, result: ToolResult) -> ToolResult:
        return ToolResult(str(result.content).replace("sesame", "***"), result.is_error)

    @tool
    def secret(key: str) -> str:
        """Tell.

        key: of what
        """
        return f"{key} is sesame"

    hooks = HookChain(
        FunctionHooks(before_tool_call=record),
        FunctionHooks(before_tool_call=permit),
        FunctionHooks(after_tool_call=redact),
    )
    with serve(
        Reply(calls=[("secret", {"key": "root"}), ("secret", {"key": "door"})]), Reply("ok")
    ) as server:
        ask(server, tools=[secret], hooks=hooks)
        assert contents(server)[2:] == [
            "Denied: not that one",
            "door is ***",
        ] and "sesame" not in str(server.requests)
    assert audit == [("secret", {"key": "root"}), ("secret", {"key": "door"})]


# ---- messages, tools, images -----------------------------------------------------------------------------


def test_a_request_is_the_prompt_the_messages_and_the_tools() -> None:
    """P03, P10, P11: a tool is a name, a description, parameters; its label is for people and in no request."""

    @tool(title=lambda arguments: f"of {arguments['city']}")
    def weather(city: str, ctx: ToolContext) -> str:
        """Say how the weather is.

        city: where
        """
        assert (ctx.session_id, ctx.call_id, ctx.abort.is_set) == ("s1", starts[-1].id, False)
        return "rain"

    starts: list[ToolStart] = []
    with serve(Reply(calls=[("weather", {"city": "Bergen"})]), Reply("Wet.")) as server:
        agent = agent_of(
            server,
            tools=[weather],
            system="Be brief.",
            session_id="s1",
            on_tool_call=starts.append,
        )
        agent.run("And Bergen?")
        assert server.requests[0]["tools"] == [
            {
                "type": "function",
                "function": {
                    "name": "weather",
                    "description": "Say how the weather is.",
                    "parameters": {
                        "type": "object",
                        "properties": {"city": {"type": "string", "description": "where"}},
                        "required": ["city"],
                    },
                },
            }
        ]
        assert roles(server.requests[1]["messages"]) == ["system", "user", "assistant", "tool"]
        assert starts[0].title == "weather of Bergen" and "of Bergen" not in str(server.requests)


def test_details_of_a_result_are_for_people_and_not_sent() -> None:
    """P12, P22."""

    @tool
    def look(path: str) -> ToolResult:
        """Look.

        path: what
        """
        return ToolResult("two lines", details={"diff": "+PRIVATE"})

    ends: list[ToolEnd] = []
    with serve(Reply(calls=[("look", {"path": "x"})]), Reply("ok")) as server:
        agent = agent_of(server, tools=[look], on_tool_result=ends.append)
        agent.run("go")
        assert contents(server)[-1] == "two lines" and "PRIVATE" not in str(server.requests)
    assert ends[0].result.details == {"diff": "+PRIVATE"} and "PRIVATE" not in str(agent.messages)


def png(path: Path, colour: bytes) -> bytes:
    """A picture of one pixel, in a file."""

    def part(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + part(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))
        + part(b"IDAT", zlib.compress(b"\0" + colour))
        + part(b"IEND", b"")
    )
    return path.read_bytes()


def pictures(body: Body) -> list[bytes]:
    """The bytes of all pictures of a request."""
    parts = [
        part
        for message in body["messages"]
        if isinstance(message["content"], list)
        for part in message["content"]
    ]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    assert all(url.startswith("data:image/png;base64,") for url in urls)
    return [base64.b64decode(url.partition(",")[2], validate=True) for url in urls]


def test_pictures_in_a_prompt_and_in_a_result_arrive_byte_by_byte(tmp_path: Path) -> None:
    """P12, P43, P44."""
    red, blue = png(tmp_path / "red.png", b"\xff\0\0"), png(tmp_path / "blue.png", b"\0\0\xff")

    @tool
    def look(name: str, ctx: ToolContext) -> list[dict[str, Any]]:
        """Look at a picture.

        name: of the file
        """
        data = base64.b64encode((ctx.cwd / name).read_bytes()).decode()
        return [
            {"type": "text", "text": name},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        ]

    image = {"type": "image", "data": base64.b64encode(red).decode(), "mimeType": "image/png"}
    with serve(Reply(calls=[("look", {"name": "blue.png"})]), Reply("Red and blue.")) as server:
        agent = agent_of(server, tools=[look], cwd=tmp_path)
        agent.prompt("What colours?", [image, image])
        assert_all_valid(server)
        assert [pictures(body) for body in server.requests] == [[red, red], [red, red, blue]]
        assert roles(server.requests[1]["messages"]) == [
            "user",
            "assistant",
            "tool",
            "user",
        ]  # a result of its own is text (R19)
    assert roles(agent.messages) == ["user", "assistant", "tool", "assistant"], (
        "the list holds the picture where it belongs"
    )


def test_messages_for_the_screen_may_stand_anywhere_and_reach_no_server() -> None:
    """P02, P04: between a call and its result, too, where a server would refuse them."""
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "a",
                "type": "function",
                "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'},
            }
        ],
    }
    notice = {"role": "notification", "text": "for the screen"}
    with serve(Reply("ok")) as server:
        agent = agent_of(
            server,
            messages=[
                notice,
                user("add"),
                call,
                notice,
                {"role": "tool", "tool_call_id": "a", "content": "3"},
            ],
        )
        agent.prompt([notice, user("and?")])
        assert_all_valid(server)
        assert roles(server.requests[0]["messages"]) == [
            "user",
            "assistant",
            "tool",
            "user",
        ] and "screen" not in str(server.requests)
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
    """P62: milliseconds since the epoch."""
    before = time.time_ns() // 1_000_000
    with serve(ONE, Reply("Three.")) as server:
        agent = agent_of(server)
        agent.run("go")
        agent.follow_up("and?")
        agent.continue_()
        assert "timestamp" not in str(server.requests)
    stamps = [message["meta"]["timestamp"] for message in agent.messages]
    assert (
        len(stamps) == 6
        and sorted(stamps) == stamps
        and before <= stamps[0] <= stamps[-1] <= time.time_ns() // 1_000_000
    )


def test_a_message_that_was_broken_off_carries_when_it_came() -> None:
    """P62."""
    with serve(HANGING) as server, promptly(10):
        agent = agent_of(server)
        agent.subscribe(
            lambda event: (
                agent.abort() if isinstance(event, TextDelta) and event.text == " beta" else None
            )
        )
        agent.run("go")
    assert (
        agent.messages[1]["content"] == "alpha beta"
        and {"timestamp", "model"} <= agent.messages[1]["meta"].keys()
    )


# ---- state -----------------------------------------------------------------------------------------------


def test_an_answer_is_in_the_list_when_it_is_whole_and_in_the_state_while_it_comes() -> None:
    """P31, P38. pi puts the partial message into the list and changes it there; our list is what is sent."""
    seen: list[tuple[str, Any, list[str]]] = []
    with serve(Reply("Fine.", reasoning="Hm. Well.")) as server:
        agent = agent_of(server)
        agent.subscribe(
            lambda event: seen.append(
                (event.type, agent.state.stream_message, roles(agent.messages))
            )
        )
        agent.run("go")
    coming = [
        message for kind, message, listed in seen if kind.endswith("_delta") and listed == ["user"]
    ]
    assert [(message["reasoning"], message["content"]) for message in coming] == [
        ("Hm.", ""),
        ("Hm. Well.", ""),
        ("Hm. Well.", "Fine."),
    ]
    assert [each for each in seen if each[0] == "message_end"][-1] == (
        "message_end",
        None,
        ["user", "assistant"],
    )


def test_new_messages_are_those_that_ended_and_the_result_has_them_all() -> None:
    """P14, P16, P25: our run_end carries no list, the generator's return value does."""
    with serve(ONE, Reply("Three.")) as server:
        old = [user("before"), {"role": "assistant", "content": "yes"}]
        agent = agent_of(server, messages=old)
        events, result = drive(agent.stream("go"))
    assert isinstance(result, RunResult) and result.messages[:2] == old
    assert [event.message for event in events if isinstance(event, MessageEnd)] == result.messages[
        2:
    ]
    step = next(event for event in events if isinstance(event, StepEnd))
    assert [step.message, *step.tool_results] == result.messages[3:5]


def test_reset_forgets_the_conversation_the_queues_and_the_error_and_nothing_else() -> None:
    """P52, P53."""
    with serve(Reply("no", status=400)) as server:
        agent = agent_of(server, system="Be brief.", reasoning="low", session_id="s1")
        model, tools = agent.state.model, agent.state.tools
        agent.run("go")
        agent.steer("x")
        agent.follow_up("y")
        assert agent.state.error and agent.has_queued_messages and agent.messages
        agent.reset()
    assert (agent.state.error, agent.has_queued_messages, agent.messages) == (None, False, [])
    assert (
        agent.state.model,
        agent.state.tools,
        agent.state.system,
        agent.state.reasoning,
        agent.session_id,
    ) == (model, tools, "Be brief.", "low", "s1")


def test_budgets_that_a_hook_sets_are_not_lost() -> None:
    """P55, K07."""
    with serve(Reply("ok")) as server:
        chat = ChatModel("m", base_url=server.url, profile={"reasoning": {"budget": "$budget"}})
        Agent(
            chat,
            reasoning="high",
            retry=FAST,
            before_llm_call=lambda request: setattr(request, "budgets", {"high": 7}),
        ).run("go")
        assert server.requests[0]["budget"] == 7


# ---- queues ----------------------------------------------------------------------------------------------


def test_each_queue_can_be_cleared_and_told_how_much_to_give() -> None:
    """P40, P41, P42, P51."""
    with serve(Reply("a")) as server:
        agent = agent_of(server)
        for queue, put in ((agent.steering, agent.steer), (agent.follow_ups, agent.follow_up)):
            assert queue.mode == "one-at-a-time"
            put("never")
            assert agent.has_queued_messages
            clear = (
                agent.clear_steering_queue
                if queue is agent.steering
                else agent.clear_follow_up_queue
            )
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
        assert [contents(server, n) for n in range(2)] == [
            ["go", "one", "two"],
            ["go", "one", "two", "a", "then one", "then two"],
        ]
        assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("mode", "first", "second"),
    [("one-at-a-time", ["stop"], ["stop", "ok", "and wait"]), ("all", ["stop", "and wait"], None)],
)
def test_steering_in_the_middle_of_a_run_gives_one_or_all(
    mode: Any, first: list[str], second: Any
) -> None:
    """P42. What is left of one-at-a-time comes behind the next tool."""
    with serve(ONE, Reply("ok", calls=[("add", {"a": 5, "b": 5})]), Reply("fine")) as server:
        agent = agent_of(server, steering_mode=mode)

        def steer(event: Event) -> None:
            if isinstance(event, ToolStart) and not agent.messages[2:]:
                agent.steer("stop")
                agent.steer("and wait")

        agent.subscribe(steer)
        agent.run("go")
        assert contents(server, 1)[3:] == first
        if second:
            assert [text for text in contents(server, 2)[3:] if text != "10"] == second


def test_steering_during_the_last_answer_goes_on_with_the_run() -> None:
    """P26, P27: pi asks behind turn_end, whether there were tools or not, and before it asks for follow-ups."""
    left = ["wait"]
    with serve(Reply("fine"), Reply("waiting")) as server:
        agent = agent_of(server)
        agent.subscribe(
            lambda event: agent.steer(left.pop()) if isinstance(event, TextDelta) and left else None
        )
        result = agent.run("go")
        assert (result.text, agent.has_queued_messages, contents(server)) == (
            "waiting",
            False,
            ["go", "fine", "wait"],
        )


def test_steering_is_not_lost_where_the_consumer_leaves_while_calls_are_skipped() -> None:
    """P40, P47: it is in the history or still in the queue."""
    with serve(Reply(calls=[("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4})])) as server:
        agent = agent_of(server)
        for event in agent.stream("go"):
            if isinstance(event, ToolStart) and agent.messages[2:]:
                break  # at the call that is skipped
            if isinstance(event, ToolStart):
                agent.steer("stop")
    assert agent.has_queued_messages or agent.messages[-1]["content"] == "stop"


def test_no_message_of_a_prompt_is_lost_where_the_consumer_leaves_at_the_first() -> None:
    """P43, P47."""
    with serve(Reply("never")) as server:
        agent = agent_of(server)
        for event in agent.stream([user("one"), user("two")]):
            if isinstance(event, MessageEnd):
                break
    assert [message["content"] for message in agent.messages] == ["one", "two"]


def test_continuing_adds_nothing_where_the_model_had_not_the_last_word() -> None:
    """P24, P46: no message of a prompt, and the queues are left to the loop."""
    with serve(Reply("no", status=400), Reply("fine")) as server:
        agent, told = agent_of(server), list[str]()
        agent.run("go")
        agent.subscribe(
            lambda event: (
                told.append(event.message["role"]) if isinstance(event, MessageEnd) else None
            )
        )
        agent.continue_()
        assert told == ["assistant"] and contents(server, 1) == ["go"]


# ---- errors, retries, aborts, limits ---------------------------------------------------------------------


def broken_off(error: Exception) -> Callable[[Abort], str]:
    """A model that is told to stop and reports it as an error of its own."""

    def step(abort: Abort) -> str:
        abort.set()
        raise error

    return step


def test_a_passing_failure_after_an_abort_is_the_abort() -> None:
    """K15, K16: the abort counts, not the error, and no time passes."""
    with promptly(10):
        result = Agent(
            Saying(broken_off(ModelError("network", "closed", retryable=True))),
            retry=RetryPolicy(base=60),
        ).run("go")
    assert (result.stop_reason, result.text) == ("aborted", "Request aborted.")


def test_how_long_to_wait_is_a_strategy_that_can_be_replaced() -> None:
    """K26: by provider, by kind, by what the server says."""
    asked: list[tuple[str, int]] = []

    class Patient(RetryPolicy):
        def delay(self, error: ModelError, attempt: int) -> float | None:
            asked.append((error.kind, attempt))
            return None if error.kind == "server" else 0.0

    with serve(
        Reply("slow", status=429),
        Reply("half", cut=2),
        Reply("broken", status=500),
        Reply("unreached"),
    ) as server:
        _, result = ask(server, retry=Patient())
        assert len(server.requests) == 3
    assert (result.stop_reason, asked) == (
        "error",
        [("rate_limit", 1), ("incomplete", 2), ("server", 3)],
    )


def test_a_finish_reason_that_nobody_knows_is_an_end() -> None:
    """K22."""
    with serve(Reply("Fine.", finish="because")) as server:
        _, result = ask(server)
    assert (result.stop_reason, result.text) == ("stop", "Fine.")


def test_where_compaction_is_used_up_the_run_goes_on_without_it() -> None:
    """K05: twice in a row, and a completed step begins a new row."""

    class Eager(Hooks):
        triggers: list[str]

        def on_length(self, messages: list[Message], trigger: Any, usage: Usage, *_: Any) -> bool:
            self.triggers.append(trigger)
            return True

    hooks = Eager()
    hooks.triggers = []
    with serve(
        Reply("busy", status=503),
        Reply("busy", status=503),
        Reply("busy", status=503),
        ONE,
        Reply("fine"),
    ) as server:
        _, result = ask(server, tools=[add], hooks=hooks)
    assert result.text == "fine" and hooks.triggers == ["threshold"] * 3


def test_a_callback_is_told_of_a_compaction_and_a_step() -> None:
    """K14."""

    def shorten(
        messages: list[Message], trigger: Any, usage: Usage, *_: Any
    ) -> Generator[Event, None, bool]:
        if len(messages) < 3:
            return False
        messages[:-1] = []
        yield Compacted(
            trigger, 1, {"messages": 3, "tokens": 9}, {"messages": 1, "tokens": 3}, "newest"
        )
        return True

    told: list[Any] = []
    with serve(Reply("fine")) as server:
        agent = agent_of(
            server,
            messages=[user("a"), {"role": "assistant", "content": "b"}],
            on_length=shorten,
            on_compacted=lambda event: told.append(
                (event.trigger, event.before["messages"], event.after["messages"])
            ),
            on_step_finish=lambda event: told.append(event.message["content"]),
        )
        agent.run("go")
        assert contents(server) == ["go"]
    assert told == [("threshold", 3, 1), "fine"] and [
        message["content"] for message in agent.messages
    ] == ["go", "fine"]


def test_the_time_that_a_person_takes_is_not_the_tools_in_a_nested_run_either() -> None:
    @tool
    def delegate() -> Generator[Event, None, str]:
        """Delegate."""
        yield Nested("helper", PermissionAsked("1", "edit", "x", "x"))
        return "done"

    def person(event: Event) -> None:
        if isinstance(event, Nested):
            threading.Event().wait(2)

    with serve(Reply(calls=[("delegate", {})]), Reply("ok")) as server:
        events, _ = ask(server, tools=[delegate], each=person)
    assert next(event.seconds for event in events if isinstance(event, ToolEnd)) < 1.5


# ---- in a script, in a notebook, from threads ------------------------------------------------------------

SCRIPT = """\
from coder import Agent
agent = Agent("some-model", system="Be brief.")
print(agent.run("one").text)
print(agent.run("two").text)
print(len(agent.messages))
"""


def child(
    server: ScriptedServer, *arguments: str, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    env = os.environ | {
        "OPENAI_BASE_URL": server.url,
        "OPENAI_API_KEY": "x",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        [sys.executable, *arguments],
        env=env,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_five_lines_are_an_agent_in_a_script_and_at_a_python_prompt(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with serve(lambda body: Reply(f"{body['messages'][-1]['content']}!")) as server:
        done = child(server, str(tmp_path / "script.py"))
        assert (done.stdout, done.stderr, done.returncode) == ("one!\ntwo!\n4\n", "", 0)
        done = child(server, "-i", "-q", stdin=SCRIPT)
        assert (done.stdout, done.returncode) == (
            "one!\ntwo!\n4\n",
            0,
        ) and "Error" not in done.stderr


def test_an_agent_works_where_an_event_loop_is_running() -> None:
    """A notebook's cells run inside one, in its thread; nothing here starts another or needs it."""

    @tool
    def look() -> Generator[str, None, str]:
        """Look."""
        yield "half way"
        return "seen"

    async def cell(agent: Agent) -> list[str]:
        assert asyncio.get_running_loop().is_running()
        *_, end = agent.stream("two")
        return [
            agent.run("one").text,
            end.type,
            await asyncio.to_thread(lambda: agent.run("three").text),
        ]

    with serve(
        lambda body: (
            Reply(calls=[("look", {})]) if body["messages"][-1]["role"] == "user" else Reply("fine")
        )
    ) as server:
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
        done = child(server, "-c", code)
        assert (done.stdout, done.returncode) == (
            "interrupted\nFalse True ['one', 'alpha beta']\nYes?\n",
            0,
        ), done.stderr
        assert contents(server) == ["one", "alpha beta", "two"]


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
        print(len(kept), sum(streaming for _, streaming in kept))
    """)
    with serve(Reply("never")) as server:
        done = child(server, "-c", code)
    assert (done.stdout, done.returncode) == ("200 0\n", 0), done.stderr


def test_a_prompt_in_one_thread_is_watched_steered_and_aborted_from_others() -> None:
    """P40, P45, P47, P49, P50."""
    results: list[RunResult] = []
    with serve(HANGING, Reply("again")) as server, promptly(20):
        agent = agent_of(server)
        worker = threading.Thread(target=lambda: results.append(agent.prompt("hi")))
        worker.start()
        until(lambda: (agent.state.stream_message or {}).get("content") == "alpha beta")
        assert (
            agent.state.is_streaming
            and not agent.wait_for_idle(0.01)
            and roles(agent.messages) == ["user"]
        )
        with pytest.raises(RuntimeError, match="steer"):
            agent.prompt("no")
        agent.steer("later")
        agent.abort()
        assert agent.wait_for_idle(10)
        worker.join()
        assert results[0].stop_reason == "aborted" and [
            message["content"] for message in agent.messages
        ] == ["hi", "alpha beta"]
        until(lambda: server.gone == 1, "the server sees that the connection is closed")
        assert agent.has_queued_messages and agent.prompt("go on").text == "again"
        assert contents(server) == ["hi", "alpha beta", "go on", "later"]
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

    @tool
    def double(number: int) -> str:
        """Double a number.

        number: which
        """
        return str(2 * number)

    def half(number: int) -> str:
        """Half of a number.

        number: which
        """
        return str(number // 2)

    def choose(request: Request) -> None:
        request.tools[:] = (
            [double, half]
            if len(request.messages) < 3
            else [each for each in request.tools if each != double.schema]
        )

    calls = [("add", {"a": 1, "b": 2}), ("double", {"number": 4}), ("half", {"number": 8})]
    with serve(
        Reply(calls=calls), Reply(calls=[("add", {"a": 1, "b": 2})]), Reply("done")
    ) as server:
        _, result = ask(server, tools=[add], hooks=FunctionHooks(before_llm_call=choose))
        assert_all_valid(server)
        assert [
            [each["function"]["name"] for each in body["tools"]] for body in server.requests
        ] == [["double", "half"], ["add"], ["add"]]
    assert [message["content"] for message in result.messages if message["role"] == "tool"] == [
        "Error: there is no tool 'add'. The tools are: double, half",
        "8",
        "4",
        "3",
    ]


@pytest.mark.parametrize("profile", [{}, {"typed_schema": True, "schema_without": ["$ref"]}])
def test_a_tool_of_the_provider_that_a_hook_adds_goes_to_the_server_as_it_is(
    profile: dict[str, Any],
) -> None:
    search = {"type": "web_search", "web_search": {"$ref": "x"}}
    hooks = FunctionHooks(before_llm_call=lambda request: request.tools.append(search))
    with serve(ONE, Reply("done")) as server:
        _, result = ask(server, tools=[add], hooks=hooks, model={"profile": profile})
        assert [body["tools"][1] for body in server.requests] == [search, search]
    assert result.text == "done" and result.messages[2]["content"] == "3"


# ---- the list is the truth -------------------------------------------------------------------------------


def tool_text(message: Message, text: str) -> None:
    message["content"] = text


def first_part(message: Message, text: str) -> None:
    message["content"][0]["text"] = text


PARTS = [{"type": "text", "text": "my key is sk-1"}, {"type": "text", "text": "use it"}]
# What a message holds, how it is changed in place, and how the server wants messages.
IN_PLACE: dict[str, tuple[Message, Callable[[Message, str], None], dict[str, Any]]] = {
    "text": ({"role": "user", "content": "my key is sk-1"}, tool_text, {}),
    "text with a time": (user("my key is sk-1"), tool_text, {}),
    "a part": ({"role": "user", "content": PARTS}, first_part, {}),
    "a part with a time": (user(PARTS), first_part, {}),
    "joined with the next": (user("my key is sk-1"), tool_text, {"strict_turns": True}),
    "a part, joined with the next": (
        {"role": "user", "content": PARTS},
        first_part,
        {"strict_turns": True},
    ),
}


@pytest.mark.parametrize("where", ["a subscriber", "transform_context", "before_tool_call"])
@pytest.mark.parametrize("what", IN_PLACE)
def test_a_message_that_is_changed_in_place_is_sent_changed(what: str, where: str) -> None:
    """In the middle of a run, after it was sent once."""
    given, change, profile = IN_PLACE[what]
    messages = [copy.deepcopy(given)]

    def redact(*_: Any) -> Any:
        if len(messages) > 2:
            change(messages[0], "my key is ***")

    hooks = (
        FunctionHooks(before_tool_call=redact)
        if where == "before_tool_call"
        else FunctionHooks(transform_context=lambda given, abort: redact() or given)
        if where == "transform_context"
        else None
    )
    with serve(ONE, Reply(calls=[("add", {"a": 5, "b": 6})]), Reply("done")) as server:
        ask(
            server,
            tools=[add],
            messages=messages,
            prompt="And now?",
            hooks=hooks,
            model={"profile": profile},
            each=redact if where == "a subscriber" else None,
        )
        assert_all_valid(server)
        sent = [str(body["messages"]) for body in server.requests]
    assert (
        ["sk-1" in each for each in sent] == [True, False, False]
        and "***" in sent[1]
        and "***" in sent[2]
    )


def test_calls_and_results_that_are_changed_in_place_are_sent_changed_and_valid() -> None:
    def spoil(event: Event) -> None:
        if isinstance(event, StepEnd) and len(messages) == 3:
            messages[1]["tool_calls"][0]["function"]["arguments"] = '{"a": '
            messages[2]["content"] = "n\0thing"
        elif isinstance(event, StepEnd) and len(messages) == 5:
            messages[2]["tool_call_id"] = "another"
            messages[1]["content"] = "I add."

    messages: list[Message] = []
    with serve(
        ONE,
        Reply(calls=[("add", {"a": 5, "b": 6})]),
        Reply(calls=[("add", {"a": 7, "b": 8})]),
        Reply("done"),
    ) as server:
        ask(server, tools=[add], messages=messages, each=spoil)
        assert_all_valid(server)
        calls = [body["messages"][1] for body in server.requests[1:]]
        results = [body["messages"][2]["content"] for body in server.requests[1:]]
    assert [call["tool_calls"][0]["function"]["arguments"] for call in calls] == ["{}"] * 3
    assert [call.get("content") for call in calls] == [None, "I add.", "I add."]
    assert results == ["n\ufffdthing", *["Not run: the run ended before this call."] * 2]


def test_what_a_request_hook_changes_in_place_is_sent_and_the_list_stays_what_it_is() -> None:
    secret = ["sk-1"]

    def redact(request: Request) -> None:
        for message in request.messages:
            if isinstance(message.get("content"), str) and len(secret) > 1:
                message["content"] = message["content"].replace("sk-1", "***")
        secret.append("known now")

    messages: list[Message] = [{"role": "user", "content": "sk-1 it is"}]
    with serve(ONE, Reply("done")) as server:
        ask(
            server,
            tools=[add],
            messages=messages,
            prompt="Go.",
            hooks=FunctionHooks(before_llm_call=redact),
            model={"profile": {"strict_turns": True}},
        )
        assert ["sk-1" in str(body["messages"]) for body in server.requests] == [True, False]
    assert messages[0]["content"] == "sk-1 it is"


def test_a_message_that_is_changed_in_place_is_kept_changed(tmp_path: Path) -> None:
    def redact(event: Event) -> None:
        if isinstance(event, StepEnd):
            session.messages[0]["content"] = "my key is ***"

    with serve(ONE, Reply("done")) as server, SessionStore(tmp_path / "sessions.db") as store:
        session = store.open()
        run = run_loop(
            session.messages, ChatModel("m", base_url=server.url), [add], prompts="my key is sk-1"
        )
        drive(session.watch(run), redact)
        rows = [
            *store.rows("SELECT data FROM message"),
            *store.rows("SELECT text AS data FROM part"),
        ]
        assert not [row["data"] for row in rows if "sk-1" in str(row["data"])] and store.search(
            "my key is ***"
        )


# ---- images, tools of one's own, and what an agent is given ----------------------------------------------


SEED_IMAGE = {"type": "image", "data": "aGk=", "mimeType": "image/png"}
API_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}


def images_of(server: ScriptedServer) -> list[int]:
    """How many images each request has, all in the API's form."""
    assert all('"type": "image"' not in json.dumps(body) for body in server.requests)
    return [json.dumps(body["messages"]).count(json.dumps(API_IMAGE)) for body in server.requests]


def test_an_image_in_the_short_form_may_stand_in_any_message_and_result() -> None:
    """P44: in prompts, queues, the list, what tools return and what hooks put in their place."""

    def look(how: str) -> Any:
        """Look.

        how: as what
        """
        return ToolResult(["here", SEED_IMAGE]) if how == "result" else [SEED_IMAGE]  # type: ignore[list-item]

    def answer(call: ToolCall, ctx: ToolContext) -> ToolResult | None:
        return ToolResult([SEED_IMAGE]) if call.arguments == {"how": "hook"} else None

    message = {"role": "user", "content": [SEED_IMAGE]}
    calls = [("look", {"how": how}) for how in ("plain", "result", "hook")]
    with serve(Reply(calls=calls), Reply("I see."), Reply("More.")) as server:
        agent = agent_of(
            server,
            tools=[look],
            before_tool_call=answer,
            messages=[message, {"role": "assistant", "content": "ok"}],
        )
        agent.follow_up({"role": "user", "content": [SEED_IMAGE]})
        agent.prompt(
            [{"role": "user", "content": [{"type": "text", "text": "And this?"}, SEED_IMAGE]}]
        )
        assert_all_valid(server)
        assert images_of(server) == [2, 5, 6]
    with serve(Reply("done")) as server:
        inject = FunctionHooks(transform_context=lambda messages, abort: [*messages, message])
        ask(server, prompt=[message], messages=[message], hooks=inject)  # type: ignore[arg-type]
        assert images_of(server) == [3]


def test_progress_of_a_plain_function_is_shown() -> None:
    def count(ctx: ToolContext) -> str:
        """Count."""
        ctx.update("one ")
        ctx.update("two ")
        return "done"

    def fails(ctx: ToolContext) -> str:
        """Fail."""
        ctx.update("three ")
        raise ValueError("no")

    def once(ctx: ToolContext) -> Any:
        """Update in a generator."""
        ctx.update("four ")
        yield ctx.update("five ")
        return "done"

    for made in (Toolset, ParallelTools):
        with serve(
            Reply(calls=[("count", {}), ("fails", {}), ("once", {})]), Reply("done")
        ) as server:
            events, _ = ask(
                server, tools=made([tool(concurrent=True)(each) for each in (count, fails, once)])
            )
        assert sorted(e.text for e in events if isinstance(e, ToolUpdate)) == [
            "five ",
            "four ",
            "one ",
            "three ",
            "two ",
        ]


def test_a_tool_knows_the_message_that_called_it() -> None:
    """A20."""
    seen: list[str] = []

    def where(ctx: ToolContext, number: int) -> str:
        """Where am I?

        number: any
        """
        seen.append(ctx.message_id)
        return "here"

    calls = [("where", {"number": number}) for number in range(3)]
    with serve(Reply(calls=calls[:2]), Reply(calls=calls[2:]), Reply("x")) as server:
        _, result = ask(server, tools=[where])
        assert_all_valid(server)
    ids = [
        message["meta"]["message_id"]
        for message in result.messages
        if message["role"] == "assistant"
    ]
    assert seen == [ids[0], ids[0], ids[1]] and len(set(ids)) == 3


@pytest.mark.parametrize("kind", [Toolset, ParallelTools])
def test_a_tool_may_ask_the_person_a_question(kind: type[Toolset]) -> None:
    def choose(of: str, ctx: ToolContext) -> Any:
        """Ask the person.

        of: what
        """
        asked = QuestionAsked(ctx.call_id, f"Which {of}?", ["red", "blue"])
        yield asked
        return f"{of}: {asked.answer or 'no answer'}"

    def reply(event: Event) -> None:
        if isinstance(event, QuestionAsked) and "colour" in event.question:
            time.sleep(0.05)  # a person
            event.reply(event.options[1])

    with serve(
        Reply(calls=[("choose", {"of": "colour"}), ("choose", {"of": "size"})]), Reply("done")
    ) as server:
        events, result = ask(server, tools=kind([tool(concurrent=True)(choose)]), each=reply)
    assert [m["content"] for m in result.messages if m["role"] == "tool"] == [
        "colour: blue",
        "size: no answer",
    ]
    assert [e.to_dict()["question"] for e in events if isinstance(e, QuestionAsked)] == [
        "Which colour?",
        "Which size?",
    ]


def test_a_tool_that_asks_under_its_own_name_asks_once() -> None:
    def deploy(where: str, ctx: ToolContext) -> Any:
        """Deploy.

        where: to
        """
        yield from ctx.ask("deploy", where)
        return "deployed"

    def yes(event: Event) -> None:
        if isinstance(event, PermissionAsked):
            event.reply("once")

    for rules, asked, said in (
        ({"deploy": "ask"}, 1, "deployed"),
        ({"deploy": {"prod*": "ask"}}, 1, "deployed"),
        ({"deploy": {"*": "ask", "prod*": "deny"}}, 1, "Denied"),
        ({}, 0, "deployed"),
    ):
        with serve(Reply(calls=[("deploy", {"where": "production"})]), Reply("done")) as server:
            events, result = ask(
                server, tools=[deploy], hooks=Permissions(rules_of(rules), can_ask=True), each=yes
            )
        assert sum(isinstance(event, PermissionAsked) for event in events) == asked, rules
        assert result.messages[2]["content"].startswith(said), rules


def test_a_retry_policy_may_try_again_what_is_mostly_final() -> None:
    """K26: a gateway whose 400 passes."""

    class Gateway(RetryPolicy):
        def delay(self, error: ModelError, attempt: int) -> float | None:
            return 0.0 if error.status == 400 else super().delay(error, attempt)

    with serve(Reply("gateway", status=400), Reply("fine")) as server:
        _, result = ask(server, retry=Gateway())
    assert result.text == "fine"
    with serve(Reply("gateway", status=400)) as server:
        _, result = ask(server, retry=Gateway())
        assert len(server.requests) == 5
    assert result.text == "Failed after 5 errors: gateway"


def test_a_follow_up_comes_after_an_answer_that_was_cut() -> None:
    with serve(Reply("half", finish="length"), Reply("whole")) as server:
        agent = agent_of(server)
        agent.follow_up("Go on.")
        assert agent.run("Tell.").text == "whole" and not agent.has_queued_messages
        assert contents(server) == ["Tell.", "half", "Go on."]


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
        with pytest.raises(TypeError, match="made from a model, not from a name"):
            agent_of(server).set_model("another")
        for wrong in ([print], print, [one, {}]):
            with pytest.raises(TypeError, match="hooks are objects of the class Hooks"):
                agent_of(server, hooks=wrong)
        with pytest.raises(TypeError, match="HookChain"):
            ask(server, hooks=[one])


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "notice", "content": "x"}],
        [user("hi"), {"role": "assistant", "content": "yes"}],
    ],
)
def test_a_run_without_anything_to_answer_is_refused(messages: list[Message]) -> None:
    with serve(Reply("yes")) as server:
        model = ChatModel("m", base_url=server.url)
        with pytest.raises(
            ValueError, match=r"no message to continue from|the model had the last word"
        ):
            drive(run_loop(messages, model))
        assert not server.requests
        steering = FunctionHooks(
            get_steering_messages=lambda given=[user("go")]: [given.pop()] if given else []
        )
        assert drive(run_loop(messages, model, hooks=steering))[1].text == "yes"


def test_of_thousands_of_calls_in_an_answer_the_first_are_run_and_the_others_say_why_not() -> None:
    ran: list[int] = []

    def note(number: int) -> str:
        """Note.

        number: any
        """
        ran.append(number)
        return "noted"

    with serve(
        Reply(calls=[("note", {"number": number}) for number in range(2_000)]), Reply("done")
    ) as server:
        _, result = ask(server, tools=[note])
        assert_all_valid(server)
    results = [message["content"] for message in result.messages if message["role"] == "tool"]
    assert ran == list(range(MAX_CALLS)) and len(results) == 2_000
    assert set(results[MAX_CALLS:]) == {TOO_MANY} and f"at most {MAX_CALLS} calls" in TOO_MANY
