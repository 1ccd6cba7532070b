"""The stateful agent: prompts, queues, subscribers, state. Rows P37 to P56 of what pi-agent-core does."""

from __future__ import annotations

from typing import Any

import pytest

from coder.agent.agent import Agent
from coder.ai import ChatModel
from coder.devtools.scripted import Reply, ScriptedServer
from coder.events import Event, RunEnd, ToolStart
from coder.history import image_part
from coder.loop import run_loop
from coder.providers.errors import RetryPolicy
from coder.toolset import tool
from coder.types import DeniedError
from tests.harness import FAST, assert_all_valid, drive, serve, shape
from tests.terminal import promptly, until


@tool
def add(a: int, b: int) -> str:
    """Add.

    a: one
    b: other
    """
    return str(a + b)


TWO = Reply("Let me see.", calls=[("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4})])
ONE = Reply(calls=[("add", {"a": 1, "b": 2})])


def agent_of(server: ScriptedServer, **options: Any) -> Agent:
    return Agent(ChatModel("m", base_url=server.url), tools=[add], **{"retry": FAST} | options)


def contents(server: ScriptedServer, request: int = -1) -> list[Any]:
    return [message.get("content") for message in server.requests[request]["messages"]]


# ---- prompts ---------------------------------------------------------------------------------------------


def test_a_prompt_has_four_forms() -> None:
    """P43, P44."""
    image = {"type": "image", "data": "aGk=", "mimeType": "image/png"}
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    with serve(Reply("yes")) as server:
        for given in (
            ("hi",),
            ("hi", [image]),
            ({"role": "user", "content": "one"},),
            ([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],),
        ):
            agent_of(server).prompt(*given)
        assert [contents(server, n) for n in range(4)] == [
            ["hi"],
            [[{"type": "text", "text": "hi"}, part]],
            ["one"],
            ["a", "b"],
        ]
    assert image_part(part) == part
    with pytest.raises(ValueError, match="an image is"):
        image_part({"type": "image", "data": ""})


def test_the_conversation_goes_on_and_can_be_reset() -> None:
    """P52, P53."""
    with serve(Reply("yes")) as server:
        agent = agent_of(server, system="Be brief.")
        assert agent.run("one").text == "yes"
        agent.prompt("two")
        assert contents(server) == ["Be brief.", "one", "yes", "two"]
        agent.steer("never")
        agent.reset()
        assert (
            agent.messages == []
            and not agent.has_queued_messages
            and agent.state.system == "Be brief."
        )
        kept = [{"role": "user", "content": "old"}]
        agent.replace_messages(kept)
        agent.append_message({"role": "assistant", "content": "news"})
        agent.prompt("three")
        assert contents(server) == ["Be brief.", "old", "news", "three"] and len(kept) == 1


def test_the_setters_count_from_the_next_run() -> None:
    with serve(Reply("yes")) as server, serve(Reply("other")) as second:
        agent = agent_of(server, reasoning="low", session_id="s1", budgets={"high": 9})
        agent.prompt("one")
        agent.set_system("New.")
        agent.set_reasoning("high")
        agent.set_tools([])
        agent.set_model(
            ChatModel(
                "n",
                base_url=second.url,
                profile={"reasoning": {"budget": "$budget"}, "cache_key": True},
            )
        )
        assert agent.prompt("two").text == "other"
        first, last = server.requests[0], second.requests[0]
    assert first["reasoning_effort"] == "low" and "tools" in first
    assert (last["model"], last["budget"], last["prompt_cache_key"], contents(second)[0]) == (
        "n",
        9,
        "s1",
        "New.",
    ) and "tools" not in last


# ---- state -----------------------------------------------------------------------------------------------


def test_the_state_follows_the_run() -> None:
    """P37, P38, P47."""
    streamed: list[str] = []
    calls: list[int] = []
    with serve(TWO, Reply("Seven.")) as server:
        agent = agent_of(server)

        def follow(event: Event) -> None:
            calls.append(len(agent.state.pending_tool_calls))
            assert agent.state.is_streaming is not isinstance(event, RunEnd)
            if agent.state.stream_message:
                streamed.append(agent.state.stream_message["content"])

        agent.subscribe(follow)
        agent.prompt("add")
    assert len(agent.messages) == 5 and not agent.state.is_streaming
    assert (
        "Let me" in streamed[2] and streamed[-1] == "Seven." and max(calls) == 1 and calls[-1] == 0
    )


def test_a_stream_that_is_left_leaves_an_agent_that_works() -> None:
    with serve(ONE, Reply("fine")) as server:
        agent = agent_of(server)
        for event in agent.stream("go"):
            if isinstance(event, ToolStart):
                assert agent.state.is_streaming and agent.state.pending_tool_calls == {event.id}
                break
        until(lambda: not agent.state.is_streaming)
        assert (
            agent.wait_for_idle(5)
            and not agent.state.pending_tool_calls
            and agent.prompt("again").text == "fine"
        )
        assert_all_valid(server)


# ---- one run at a time -----------------------------------------------------------------------------------


# ---- queues ----------------------------------------------------------------------------------------------


def test_steering_comes_after_the_tool_under_way_and_skips_the_rest() -> None:
    """P40, P36, P61."""
    with serve(TWO, Reply("Stopped.")) as server:
        agent = agent_of(server)
        agent.subscribe(
            lambda event: (
                agent.steer("Stop.")
                if isinstance(event, ToolStart) and not agent.messages[2:]
                else None
            )
        )
        assert agent.prompt("add").text == "Stopped."
        assert contents(server)[1:] == [
            "Let me see.",
            "3",
            "Skipped due to queued user message.",
            "Stop.",
        ]


@pytest.mark.parametrize(
    ("mode", "sent"),
    [
        ("one-at-a-time", [["go", "a", "x"], ["go", "a", "x", "a", "y"]]),
        ("all", [["go", "a", "x", "y"]]),
    ],
)
def test_a_queue_gives_one_or_all(mode: Any, sent: list[list[str]]) -> None:
    with serve(Reply("a")) as server:
        agent = agent_of(server)
        agent.set_follow_up_mode(mode)
        agent.prompt("go")
        for text in ("x", "y"):
            agent.follow_up(text)
        agent.continue_()
        assert [contents(server, n) for n in range(1, len(server.requests))] == sent


def test_continue_takes_steering_first_and_says_what_is_missing() -> None:
    """P46."""
    with serve(Reply("fine")) as server:
        agent = agent_of(server)
        with pytest.raises(ValueError, match="no message"):
            agent.continue_()
        agent.prompt("one")
        with pytest.raises(ValueError, match="is a finished answer"):
            agent.continue_()
        agent.follow_up("later")
        agent.steer("now")
        agent.continue_()
        assert contents(server, 1) == ["one", "fine", "now"] and contents(server, 2) == [
            "one",
            "fine",
            "now",
            "fine",
            "later",
        ]


# ---- subscribers, callbacks, hooks -----------------------------------------------------------------------


def test_callbacks_take_the_place_of_events() -> None:
    """M10, K13, K14."""
    said: list[Any] = []
    with serve(TWO, Reply("Seven.")) as server:
        agent = agent_of(
            server,
            on_text=said.append,
            on_tool_call=lambda event: said.append(event.arguments["a"]),
            on_tool_result=lambda event: said.append(event.result.content),
            on_step_finish=lambda event: said.append(event.finish_reason),
            on_response=lambda message: said.append(len(message.get("tool_calls", []))),
        )
        agent.prompt("add")
    assert said == ["Let", " me", " see.", 2, 1, "3", 3, "7", "tool_calls", "Seven.", 0, "stop"]


def test_a_name_is_a_model_and_any_model_will_do() -> None:
    """P01: what lies under the loop can be replaced."""

    class Parrot:
        name, context_window = "parrot", 1000

        def stream(self, request: Any, abort: Any) -> Any:
            from coder.events import TextDelta
            from coder.types import Completion, Usage

            text = request.messages[-1]["content"]
            yield TextDelta(text)
            return Completion(text, [], "stop", {"role": "assistant", "content": text}, Usage())

    assert Agent(Parrot()).run("hello").text == "hello"
    with serve(lambda body: Reply(body["model"])) as server:
        assert Agent("some-model", base_url=server.url, api_key="k").run("hi").text == "some-model"


def test_an_abort_before_the_first_event_counts() -> None:
    with serve(Reply("never")) as server:
        agent = agent_of(server)
        run = agent.stream("go")
        agent.abort()
        assert (
            list(run)[-1].to_dict()["stop_reason"] == "aborted"
            and not server.requests
            and not agent.state.is_streaming
        )


def test_no_limit_to_the_wait_that_a_server_asks_for() -> None:
    """P56: 0 is no cap."""
    waits: list[float] = []
    with serve(Reply("busy", status=429, headers={"Retry-After": "3600"}), Reply("fine")) as server:
        agent = agent_of(server, retry=None, max_retry_delay=0)
        agent.subscribe(
            lambda event: (
                (waits.append(event.delay), agent.abort()) if event.type == "retry" else None
            )
        )
        assert agent.run("go").stop_reason == "aborted" and waits == [3600]


def test_an_unknown_keyword_is_said_with_all_there_are_and_none_is_none() -> None:
    with serve(Reply("fine")) as server:
        with pytest.raises(TypeError, match=r"there is no hook 'on_txt'; .* before_tool_call"):
            agent_of(server, on_txt=print)
        assert agent_of(server, on_text=None, before_llm_call=None).run("go").text == "fine"


def test_unsubscribing_twice_leaves_the_same_functions_second_subscription() -> None:
    heard: list[str] = []

    def hear(event: Event) -> None:
        heard.append(event.type)

    with serve(Reply("fine")) as server:
        agent = agent_of(server)
        unsubscribe = agent.subscribe(hear)
        agent.subscribe(hear)
        unsubscribe()
        unsubscribe()
        agent.run("go")
    assert heard.count("run_end") == 1


def test_subscribers_see_every_event_until_they_unsubscribe() -> None:
    """P48, P59."""
    seen: list[Event] = []
    with serve(Reply("yes")) as server:
        agent = agent_of(server)
        unsubscribe = agent.subscribe(seen.append)
        agent.prompt("one")
        message = ["message_start", "message_end"]
        assert shape(seen) == ["run_start", "step_start", *message, *message, "step_end", "run_end"]
        unsubscribe()
        agent.prompt("two")
        assert sum(isinstance(event, RunEnd) for event in seen) == 1


def test_an_error_is_kept_until_the_next_run_and_leaves_no_message() -> None:
    with serve(Reply("no such thing", status=400), Reply("fine")) as server:
        agent = agent_of(server)
        assert agent.prompt("hi").stop_reason == "error"
        assert agent.state.error and agent.state.error.kind == "bad_request"  # type: ignore[union-attr]
        assert [message["role"] for message in agent.messages] == ["user"]
        assert agent.continue_().text == "fine" and agent.state.error is None
        agent.append_message({"role": "notification", "text": "for the screen"})
        with pytest.raises(ValueError, match="a finished answer"):
            agent.continue_()


def test_plain_functions_are_hooks_also_for_roles_of_ones_own() -> None:
    """P02, P04."""

    def deny(call: Any, ctx: Any) -> None:
        if call.arguments["a"] == 1:
            raise DeniedError("not one")

    def convert(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        def sent(message: dict[str, Any]) -> dict[str, Any]:
            is_ours = message["role"] == "artifact"
            return {"role": "user", "content": f"[{message['text']}]"} if is_ours else message

        return list(map(sent, messages))

    with serve(TWO, Reply("ok")) as server:
        agent = agent_of(
            server, before_tool_call=deny, get_api_key=lambda: "fresh", convert_to_llm=convert
        )
        agent.append_message({"role": "notification", "text": "for the screen"})
        agent.append_message({"role": "artifact", "text": "a table"})
        agent.prompt("add")
        assert contents(server)[:2] == ["[a table]", "add"]
        assert contents(server)[-2:] == ["Denied: not one", "7"]
        assert server.heads[-1]["authorization"] == "Bearer fresh"
        roles = [message["role"] for message in agent.messages[:3]]
        assert roles == ["notification", "artifact", "user"]


def test_a_longer_wait_than_allowed_fails_at_once() -> None:
    """P56."""
    with serve(Reply("later", status=429, headers={"retry-after": "5"})) as server, promptly(4):
        agent = Agent(ChatModel("m", base_url=server.url), max_retry_delay=2)
        assert agent.prompt("hi").stop_reason == "error" and len(server.requests) == 1
    assert RetryPolicy().max_delay == 60


@pytest.mark.parametrize("model", [5, None])
def test_what_cannot_be_a_model_is_rejected_at_once(model: Any) -> None:
    agent = Agent("m", base_url="http://127.0.0.1:9/v1")
    for use in (agent.set_model, Agent):
        with pytest.raises(TypeError, match="an object with a method `stream`"):
            use(model)
    assert agent.state.model.name == "m"


def test_max_steps_is_short_for_that_of_the_limits() -> None:
    with serve(lambda body: Reply(calls=[("add", {"a": len(body["messages"]), "b": 2})])) as server:
        agent = agent_of(server, max_steps=2)
        assert (agent.run("go").stop_reason, agent.limits.max_steps) == ("max_steps", 2)
        run = run_loop([], ChatModel("m", base_url=server.url), [add], prompt="go", max_steps=3)
        assert drive(run)[1].stop_reason == "max_steps" and len(server.requests) == 5
