"""The stateful agent: prompts, queues, subscribers, state. Rows P37 to P56 of what pi-agent-core
does."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

from coder.abort import Abort
from coder.agent.agent import Agent
from coder.ai import ChatModel
from coder.devtools.scripted import Reply
from coder.events import (
    Compacted,
    Event,
    MessageEnd,
    RunEnd,
    RunStart,
    TextDelta,
    ToolStart,
    drain,
)
from coder.history import image_part, user
from coder.hooks import FunctionHooks
from coder.loop import run_loop
from coder.sessions.session_store import SessionStore
from coder.types import Completion, DeniedError, Message, Usage
from tests.harness import (
    ONE,
    add,
    agent_of,
    all_of,
    assert_all_valid,
    contents,
    drive,
    roles,
    sent,
    serve,
)
from tests.terminal import PATIENCE, promptly, until

TWO = Reply(
    "Let me see.",
    calls=[
        ("add", {"a": 1, "b": 2}),
        ("add", {"a": 3, "b": 4}),
    ],
)


def test_a_prompt_has_four_forms() -> None:
    """P43, P44."""
    image = {"type": "image", "data": "aGk=", "mimeType": "image/png"}
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    one, two = ({"role": "user", "content": text} for text in ("one", "two"))
    with serve(Reply("yes")) as server:
        for given in (
            ("hi",),
            ("hi", [image]),
            (one,),
            ([one, two],),
        ):
            agent_of(server).prompt(*given)
        pictured = [[{"type": "text", "text": "hi"}, part]]
        assert [sent(server, n) for n in range(4)] == [["hi"], pictured, ["one"], ["one", "two"]]
    assert image_part(part) == part
    with pytest.raises(ValueError, match="an image is"):
        image_part({"type": "image", "data": ""})


def test_the_conversation_goes_on_and_can_be_reset() -> None:
    """P52, P53."""
    with serve(Reply("yes")) as server:
        agent = agent_of(server, system="Be brief.", session_id="s1")
        assert agent.run("one").text == "yes"
        agent.prompt("two")
        assert sent(server) == ["Be brief.", "one", "yes", "two"]
        agent.steer("never")
        agent.follow_up("never")
        agent.reset()
        assert agent.messages == []
        assert agent.has_queued_messages is False
        assert agent.state.system == "Be brief."
        assert agent.session_id == "s1"
        kept = [{"role": "user", "content": "old"}]
        agent.replace_messages(kept)
        agent.append_message({"role": "assistant", "content": "news"})
        agent.prompt("three")
        assert sent(server) == ["Be brief.", "old", "news", "three"]
        assert len(kept) == 1


def test_the_setters_count_from_the_next_run() -> None:
    profile = {"reasoning": {"budget": "$budget"}, "cache_key": True}
    reasoning_budgets = {"high": 9}
    with serve(Reply("yes")) as server, serve(Reply("other")) as second:
        agent = agent_of(server, reasoning="low", session_id="s1")
        agent.prompt("one")
        agent.set_system("New.")
        agent.set_reasoning("high")
        agent.set_tools([])
        agent.set_model(
            ChatModel(
                "n", base_url=second.url, profile=profile, reasoning_budgets=reasoning_budgets
            )
        )
        assert agent.prompt("two").text == "other"
        assert sent(second)[0] == "New."
        first = server.requests[0]
        last = second.requests[0]
    assert first["reasoning_effort"] == "low"
    assert "tools" in first
    assert "tools" not in last
    assert last["model"] == "n"
    assert last["budget"] == 9
    assert last["prompt_cache_key"] == "s1"


def test_a_stream_that_is_left_leaves_an_agent_that_works() -> None:
    """P38, P47."""
    with serve(ONE, Reply("fine")) as server:
        agent = agent_of(server)
        for event in agent.stream("go"):
            if isinstance(event, ToolStart):
                assert agent.state.is_streaming
                assert agent.state.pending_tool_calls == {event.id}
                break
        until(lambda: not agent.state.is_streaming)
        assert agent.wait_for_idle(30)
        assert not agent.state.pending_tool_calls
        assert agent.prompt("again").text == "fine"
        assert_all_valid(server)


class Slow(list[Message]):
    """Messages that take until `done` to be read."""

    def __init__(self, *messages: Message) -> None:
        super().__init__(messages)
        self.begun = threading.Event()
        self.done = threading.Event()

    def __iter__(self) -> Iterator[Message]:
        self.begun.set()
        assert self.done.wait(PATIENCE)
        return super().__iter__()


def test_a_cancel_between_the_call_and_the_first_event_stops_that_run_and_no_other() -> None:
    """From another thread: while the prompt is read, before the first event is taken, with a token
    before the call."""
    with serve(Reply("yes")) as server, SessionStore(":memory:") as store:
        agent = agent_of(server, session=store.open())
        prompt = Slow(user("one"))

        def cancel() -> None:
            assert prompt.begun.wait(PATIENCE)
            agent.abort()
            prompt.done.set()

        def stop_at_once(work: Callable[[], None]) -> None:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()

        threading.Thread(target=cancel).start()
        assert agent.prompt(prompt).stop_reason == "aborted"
        stop_at_once(agent.abort)  # of the run that has ended
        run = agent.stream("two")
        stop_at_once(agent.abort)
        assert drain(run).stop_reason == "aborted"
        token = Abort()
        stop_at_once(token.set)
        assert agent.prompt("three", abort=token).stop_reason == "aborted"
        token = Abort()
        stop_at_once(token.set)
        assert agent.continue_(abort=token).stop_reason == "aborted"
        assert server.requests == []
        assert agent.prompt("four").text == "yes"
        assert sent(server) == ["one", "two", "three", "four"]


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
        assert sent(server, 1) == ["one", "fine", "now"]
        assert sent(server, 2) == ["one", "fine", "now", "fine", "later"]


def test_callbacks_take_the_place_of_events() -> None:
    """M10, K13, K14."""
    said: list[Any] = []

    def shorten(messages: list[Any], trigger: Any, *_: Any) -> Generator[Event, None, bool]:
        if was_long := len(messages) == 3:
            messages[:-1] = []
            yield Compacted(trigger, 1, {"messages": 3}, {"messages": 1}, "newest")
        return was_long

    with serve(TWO, Reply("Seven.")) as server:
        agent = agent_of(
            server,
            on_text=said.append,
            on_tool_call=lambda event: said.append(event.arguments["a"]),
            on_tool_result=lambda event: said.append(event.result.content),
            on_step_finish=lambda event: said.append(event.finish_reason),
            on_response=lambda message: said.append(len(message.get("tool_calls", []))),
            on_compacted=lambda event: said.append(event.strategy),
            on_doom_loop=None,
            on_length=shorten,
            messages=[user("old"), user("older")],
        )
        agent.prompt("add")
        assert sent(server, 0) == ["add"]
        assert contents(agent.messages)[0] == "add"
    assert said[:4] == ["newest", "Let", " me", " see."]
    assert said[4:] == [2, 1, "3", 3, "7", "tool_calls", "Seven.", 0, "stop"]


def test_a_name_is_a_model_and_any_model_will_do() -> None:
    """P01: what lies under the loop can be replaced."""

    class Parrot:
        name = "parrot"
        context_window = 1000

        def stream(self, request: Any, abort: Any) -> Any:
            text = request.messages[-1]["content"]
            yield TextDelta(text)
            return Completion(
                text,
                [],
                "stop",
                {"role": "assistant", "content": text},
                Usage(),
            )

    assert Agent(Parrot()).run("hello").text == "hello"
    with serve(lambda body: Reply(body["model"])) as server:
        assert (
            Agent(
                "some-model",
                base_url=server.url,
                api_key="k",
            )
            .run("hi")
            .text
            == "some-model"
        )


def test_subscribers_see_every_event_until_they_unsubscribe() -> None:
    """P48."""
    seen: list[Event] = []
    with serve(Reply("yes")) as server:
        agent = agent_of(server)
        unsubscribe = agent.subscribe(seen.append)
        agent.prompt("one")
        unsubscribe()
        agent.prompt("two")
    assert len(all_of(RunStart, seen)) == len(all_of(RunEnd, seen)) == 1


def test_an_error_is_kept_until_the_next_run_and_leaves_no_message() -> None:
    """P24, P46."""
    seen: list[Event] = []
    with serve(Reply("no such thing", status=400), Reply("fine")) as server:
        agent = agent_of(server)
        assert agent.prompt("hi").stop_reason == "error"
        assert "no such thing" in str(agent.state.error)
        assert roles(agent.messages) == ["user"]
        agent.subscribe(seen.append)
        assert agent.continue_().text == "fine"
        assert agent.state.error is None
        assert sent(server, 1) == ["hi"], "nothing is added"
    assert roles([event.message for event in all_of(MessageEnd, seen)]) == ["assistant"]


def test_plain_functions_are_hooks_also_for_roles_of_ones_own() -> None:
    """P02, P04."""

    def deny(call: Any, ctx: Any) -> None:
        if call.arguments["a"] == 1:
            raise DeniedError("not one")

    def convert(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {"role": "user", "content": f"[{each['text']}]"} if each["role"] == "artifact" else each
            for each in messages
        ]

    options = {"before_tool_call": deny, "convert_to_llm": convert, "get_api_key": lambda: "fresh"}
    with serve(TWO, Reply("ok")) as server:
        agent = agent_of(server, **options)
        agent.append_message({"role": "notification", "text": "for the screen"})
        agent.append_message({"role": "artifact", "text": "a table"})
        agent.prompt("add")
        assert sent(server)[:2] == ["[a table]", "add"]
        assert sent(server)[-2:] == ["Denied: not one", "7"]
        assert server.heads[-1]["authorization"] == "Bearer fresh"
        assert roles(agent.messages)[:3] == ["notification", "artifact", "user"]


def test_a_list_that_ends_with_a_role_of_ones_own_goes_on_if_the_hook_makes_a_message_of_it() -> (
    None
):
    """In an agent and in the loop, also if it is the only one; on the screen only it is none to
    answer."""

    def convert(messages: list[Message]) -> list[Message]:
        shown = ({"role": "user", "content": each["text"]} for each in messages if "text" in each)
        return [each for each in messages if "text" not in each] + [*shown]

    table: Message = {"role": "artifact", "text": "a table"}
    picture: Message = {"role": "artifact", "picture": "for the screen"}
    with serve(Reply("I see.")) as server:
        for before in (
            [],
            [user("look"), {"role": "assistant", "content": "At what?"}],
        ):
            agent = agent_of(server, convert_to_llm=convert, messages=[*before, table])
            assert agent.continue_().text == "I see."
            assert sent(server) == [*contents(before), "a table"]
            model = ChatModel("m", base_url=server.url)
            hooks = FunctionHooks(convert_to_llm=convert)
            messages = [*before, table]
            assert drain(run_loop(messages, model, hooks=hooks)).text == "I see."
            assert messages[:-1] == [*before, table]

            agent = agent_of(server, convert_to_llm=convert, messages=[*before, picture])
            with pytest.raises(ValueError, match="prompt the agent"):
                agent.continue_()
            with pytest.raises(ValueError, match="give the run a prompt"):
                drain(run_loop([*before, picture], model, hooks=hooks))
            agent = agent_of(server, messages=[*before, table])
            with pytest.raises(ValueError, match="prompt the agent"):
                agent.continue_()
        assert len(server.requests) == 4


def test_a_longer_wait_than_allowed_fails_at_once() -> None:
    """P56."""
    with (
        serve(Reply("later", status=429, headers={"retry-after": "30"})) as server,
        promptly(),
    ):
        agent = agent_of(server, retry=None, max_retry_delay=2)
        assert agent.prompt("hi").stop_reason == "error"
        assert len(server.requests) == 1
        agent = agent_of(server, max_retry_delay=2)  # next to a policy of one's own
        assert agent.prompt("hi").stop_reason == "error"
        assert len(server.requests) == 2
        agent = agent_of(server)
        assert agent.max_retry_delay == 60
        agent.max_retry_delay = 1
        assert agent.prompt("hi").stop_reason == "error"
        assert len(server.requests) == 3
        agent.max_retry_delay = 0
        assert agent.max_retry_delay == math.inf


@pytest.mark.parametrize(
    "name",
    ["max_steps", "model", "tools", "system", "temperature", "limit"],
)
def test_an_attribute_that_would_do_nothing_is_refused(name: str) -> None:
    agent = Agent("m", base_url="http://127.0.0.1:9")
    with pytest.raises(AttributeError, match=name):
        setattr(agent, name, 1)
    with pytest.raises(AttributeError, match="modell"):
        setattr(agent.state, "modell", "m")  # noqa: B010 - what a type checker finds, too


def test_max_steps_is_short_for_that_of_the_limits() -> None:
    with serve(lambda body: Reply(calls=[("add", {"a": len(body["messages"]), "b": 2})])) as server:
        agent = agent_of(server, max_steps=2)
        assert agent.run("go").stop_reason == "max_steps"
        assert agent.limits.max_steps == 2
        run = run_loop(
            [],
            ChatModel("m", base_url=server.url),
            [add],
            prompt="go",
            max_steps=3,
        )
        assert drive(run)[1].stop_reason == "max_steps"
        assert len(server.requests) == 5
        assert agent_of(server, max_steps=0).run("go").steps == 0
        assert len(server.requests) == 5
