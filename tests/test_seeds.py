"""What two older systems do and no other test demonstrates: rows of the list of what pi-agent-core
(P01 to P62) and the loop kernel (K01 to K29) do.

Most rows are shown where the part is tested: test_agent.py, test_hooks.py (K12), test_loop.py,
test_golden.py, test_wire.py (K22), test_relay.py.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

import pytest

from coder.abort import Abort
from coder.agent.agent import Agent
from coder.agent.parallel import ParallelTools
from coder.ai import ChatModel
from coder.devtools.scripted import Body, Reply
from coder.events import Event, QuestionAsked, StepEnd, TextDelta, ToolEnd, ToolStart
from coder.history import user
from coder.hooks import FunctionHooks
from coder.loop import run_loop
from coder.providers.errors import RetryPolicy
from coder.toolset import ToolContext, Toolset, tool
from coder.types import Completion, Message, ModelError, Request, ToolResult, Usage
from tests.harness import (
    FAST,
    ONE,
    add,
    agent_of,
    all_of,
    ask,
    assert_all_valid,
    contents,
    drive,
    quick,
    roles,
    sent,
    serve,
)
from tests.terminal import promptly, until

AGAIN = Reply(calls=[("add", {"a": 5, "b": 6})])
HANGING = Reply("alpha beta gamma", cut=3, close="hang")


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


# ---- the order of hooks and requests -------------------------------------------------------------

BEFORE = [
    *("on_length", "transform_context", "convert_to_llm", "get_api_key"),
    *("before_llm_call", "request", "after_llm_call"),
]
RETURNS = {"on_length": False, "get_steering_messages": (), "get_follow_up_messages": ()}


def test_every_hook_has_its_place_in_a_step() -> None:
    """P05, P07, P30, K06: shorten, transform, convert, key, request hook, request, answer hook,
    tool hooks, queues."""
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

    with serve(
        Reply("busy", status=503),
        Reply("half", cut=2),
        Reply("fine"),
    ) as server:
        _, result = ask(server, hooks=FunctionHooks(after_llm_call=look))
    assert result.text == "fine"
    assert roles(result.messages) == ["user", "assistant"]
    assert seen == ["fine"]


# ---- messages, tools, images ---------------------------------------------------------------------


def test_a_request_is_the_prompt_the_messages_and_the_tools() -> None:
    """P03, P10 to P12, P22: a tool is a name, a description, parameters; its label and the details
    of its results stay here."""

    def weather(city: str, ctx: ToolContext) -> ToolResult:
        """Say how the weather is.

        city: where
        """
        assert ctx.session_id == "s1"
        assert ctx.call_id == starts[-1].id
        assert ctx.abort.is_set() is False
        return ToolResult("rain", details={"diff": "+PRIVATE"})

    starts = list[ToolStart]()
    ends = list[ToolEnd]()
    heard = {"on_tool_call": starts.append, "on_tool_result": ends.append}
    made = tool(title=lambda arguments: f"of {arguments['city']}")(weather)
    with serve(
        Reply(calls=[("weather", {"city": "Bergen"})]),
        Reply("Wet."),
    ) as server:
        agent = agent_of(
            server,
            tools=[made],
            system="Be brief.",
            session_id="s1",
            **heard,
        )
        agent.run("And Bergen?")
    where = {"city": {"type": "string", "description": "where"}}
    parameters = {"type": "object", "properties": where, "required": ["city"]}
    function = {"name": "weather", "description": "Say how the weather is."}
    schema = {"type": "function", "function": function | {"parameters": parameters}}
    assert server.requests[0]["tools"] == [schema]
    assert roles(server.requests[1]["messages"]) == ["system", "user", "assistant", "tool"]
    assert starts[0].title == "weather of Bergen"
    assert "of Bergen" not in str(server.requests)
    assert ends[0].result.details == {"diff": "+PRIVATE"}
    assert sent(server)[-1] == "rain"
    assert "PRIVATE" not in f"{server.requests}{agent.messages}"


@pytest.mark.parametrize(
    "change",
    [
        lambda agent: agent.append_message({"role": "notification", "text": "x"}),
        lambda agent: agent.reset(),
    ],
    ids=["append", "reset"],
)
def test_nothing_is_done_to_the_messages_during_a_run(change: Callable[[Agent], None]) -> None:
    """P52, P53: the loop's own list counts at its end, so that a change meanwhile would be
    undone."""
    with serve(Reply("ok")) as server:
        agent = agent_of(server)
        agent.subscribe(lambda event: change(agent) if isinstance(event, StepEnd) else None)
        with pytest.raises(RuntimeError, match="at work"):
            agent.prompt("go")
        assert not agent.state.is_streaming
        assert roles(agent.messages) == ["user", "assistant"]


def test_every_message_carries_when_it_came() -> None:
    """P62: milliseconds since the epoch; one that was broken off, too."""
    before = time.time_ns() // 1_000_000
    with serve(ONE, Reply("Three."), HANGING) as server, promptly():
        agent = agent_of(server)
        agent.run("go")
        agent.follow_up("and?")
        agent.subscribe(
            lambda event: agent.abort() if getattr(event, "text", "") == " beta" else None
        )
        agent.continue_()
        assert "timestamp" not in str(server.requests)
    stamps = [message["meta"]["timestamp"] for message in agent.messages]
    assert len(stamps) == 6
    assert sorted(stamps) == stamps
    assert before <= stamps[0] <= stamps[-1] <= time.time_ns() // 1_000_000
    assert agent.messages[-1]["content"] == "alpha beta"
    assert "model" in agent.messages[-1]["meta"]


# ---- state ---------------------------------------------------------------------------------------


def test_an_answer_is_in_the_list_when_it_is_whole_and_in_the_state_while_it_comes() -> None:
    """P31, P38. pi puts the partial message into the list and changes it there; our list is what is
    sent."""
    seen: list[tuple[str, Any, list[str]]] = []
    with serve(
        Reply("void", cut=2),
        Reply("Fine.", reasoning="Hm. Well."),
    ) as server:
        agent = agent_of(server)
        state = agent.state
        agent.subscribe(
            lambda e: seen.append(
                (
                    e.type,
                    state.stream_message,
                    roles(agent.messages),
                )
            )
        )
        agent.run("go")
    coming = [m for kind, m, listed in seen if kind.endswith("_delta") and listed == ["user"]]
    whole = [
        ("", "void"),
        ("Hm.", ""),
        ("Hm. Well.", ""),
        ("Hm. Well.", "Fine."),
    ]
    assert [
        (
            each.get("reasoning", ""),
            each["content"],
        )
        for each in coming
    ] == whole
    assert ("retry", None, ["user"]) in seen, "what is void is gone"
    ends = [each for each in seen if each[0] == "message_end"]
    assert ends[-1] == ("message_end", None, ["user", "assistant"])


# ---- queues --------------------------------------------------------------------------------------


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
        for text in ("one", "two"):
            agent.steer(text)
            agent.follow_up(f"then {text}")
        agent.run("go")
        first = ["go", "one", "two"]
        assert [sent(server, 0), sent(server, 1)] == [
            first,
            [*first, "a", "then one", "then two"],
        ]
        assert len(server.requests) == 2


def test_steering_during_the_last_answer_goes_on_with_the_run() -> None:
    """P26, P27: pi asks after turn_end, whether there were tools or not, and before it asks for
    follow-ups."""
    left = ["wait"]
    with serve(Reply("fine"), Reply("waiting")) as server:
        agent = agent_of(server)
        agent.subscribe(
            lambda event: agent.steer(left.pop()) if isinstance(event, TextDelta) and left else None
        )
        assert agent.run("go").text == "waiting"
        assert not agent.has_queued_messages
        assert sent(server) == ["go", "fine", "wait"]


# ---- errors, retries, aborts, limits -------------------------------------------------------------


def test_a_passing_failure_after_an_abort_is_the_abort() -> None:
    """K15, K16: the abort counts, not the error, and no time passes."""

    class Broken:
        name = "broken"
        context_window = 100_000

        def stream(self, request: Request, abort: Abort) -> Generator[Event, None, Completion]:
            yield TextDelta("So: ")
            abort.set()
            raise ModelError("network", "closed", retryable=True)

    with promptly():
        result = Agent(Broken(), retry=RetryPolicy(base=60)).run("go")
    assert result.stop_reason == "aborted"
    assert result.text == "Request aborted."


def test_how_long_to_wait_is_a_strategy_that_can_be_replaced() -> None:
    """K26: by provider, by kind, by what the server says; also if an error is mostly final."""
    asked: list[tuple[str, int]] = []

    class Patient(RetryPolicy):
        def delay(self, error: ModelError, attempt: int) -> float | None:
            asked.append((error.kind, attempt))
            return None if error.kind == "server" else 0.0

    slow = Reply("slow", status=429)
    gateway = Reply("gateway", status=400)
    with serve(
        slow,
        gateway,
        Reply("half", cut=2),
        Reply("no", status=500),
    ) as server:
        assert ask(server, retry=Patient())[1].stop_reason == "error"
        assert len(server.requests) == 4
    kinds = ["rate_limit", "bad_request", "incomplete", "server"]
    assert asked == list(zip(kinds, (1, 2, 3, 4)))
    with serve(gateway) as server:
        assert ask(server, retry=Patient())[1].text == "Failed after 5 errors: gateway"
        assert len(server.requests) == 5


def test_if_compaction_is_used_up_the_run_goes_on_without_it() -> None:
    """K05: twice in a row, and a completed step begins a new row."""
    triggers: list[str] = []
    hooks = FunctionHooks(on_length=lambda messages, trigger, *_: not triggers.append(trigger))
    with serve(
        *[Reply("busy", status=503)] * 3,
        ONE,
        Reply("fine"),
    ) as server:
        _, result = ask(server, tools=[add], hooks=hooks)
    assert result.text == "fine"
    assert triggers == ["threshold"] * 3


# ---- in a script, in a notebook, from threads ----------------------------------------------------


def test_an_interrupted_cell_leaves_an_agent_that_goes_on() -> None:
    """A notebook interrupts with SIGINT in the main thread."""
    came = threading.Event()

    def interrupt() -> None:
        if came.wait(30):
            os.kill(os.getpid(), signal.SIGINT)

    with serve(HANGING, Reply("Yes?")) as server:
        agent = agent_of(server)
        agent.subscribe(lambda event: came.set() if event == TextDelta(" beta") else None)
        (thread := threading.Thread(target=interrupt)).start()
        with promptly(), pytest.raises(KeyboardInterrupt):
            agent.run("one")
        thread.join()
        assert agent.wait_for_idle(0)
        assert contents(agent.messages) == ["one", "alpha beta"]
        assert agent.run("two").text == "Yes?"
        assert sent(server) == ["one", "alpha beta", "two"]


def test_a_prompt_in_one_thread_is_watched_steered_and_aborted_from_others() -> None:
    """P40, P45, P47, P49, P50."""
    with serve(HANGING, Reply("again")) as server, promptly(20):
        agent = agent_of(server)
        worker = threading.Thread(target=agent.prompt, args=("hi",))
        worker.start()
        until(lambda: (agent.state.stream_message or {}).get("content") == "alpha beta")
        assert agent.state.is_streaming
        assert not agent.wait_for_idle(0.01)
        assert roles(agent.messages) == ["user"]
        with pytest.raises(RuntimeError, match="steer"):
            agent.prompt("no")
        agent.steer("later")
        waiter = threading.Thread(target=agent.wait_for_idle)
        waiter.start()
        agent.abort()
        waiter.join(30)
        assert not waiter.is_alive()
        assert agent.wait_for_idle(0)
        worker.join()
        assert contents(agent.messages) == ["hi", "alpha beta"]
        assert agent.messages[-1]["meta"]["aborted"]
        until(lambda: server.gone == 1, "the server sees that the connection is closed")
        assert agent.has_queued_messages
        assert agent.prompt("go on").text == "again"
        assert sent(server) == ["hi", "alpha beta", "go on", "later"]
        assert_all_valid(server)


# ---- the tools of one request --------------------------------------------------------------------


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

    calls = [
        *ONE.calls,
        ("double", {"number": 4}),
        ("half", {"number": 8}),
    ]
    with serve(Reply(calls=calls), ONE, Reply("done")) as server:
        _, result = ask(
            server,
            tools=[add],
            hooks=FunctionHooks(before_llm_call=choose),
        )
        assert_all_valid(server)
    offered = [[each["function"]["name"] for each in body["tools"]] for body in server.requests]
    assert offered == [["double", "half"], ["add"], ["add"]]
    unknown = "Error: there is no tool 'add'. The tools are: double, half"
    assert contents(result.messages, "tool") == [unknown, "8", "4", "3"]


# ---- the list is the truth -----------------------------------------------------------------------


@pytest.mark.parametrize("profile", [{}, {"strict_turns": True}])
@pytest.mark.parametrize("where", ["a subscriber", "transform_context", "before_tool_call"])
def test_a_message_that_is_changed_in_place_is_sent_changed(where: str, profile: Any) -> None:
    """In the middle of a run, after it was sent once."""
    parts = [
        {"type": "text", "text": "my key is sk-1"},
        {"type": "text", "text": "use it"},
    ]
    messages = [user("my key is sk-1"), user(parts)]

    def redact(listed: Any = None, *_: Any) -> Any:
        if len(messages) > 3:
            messages[0]["content"] = messages[1]["content"][0]["text"] = "my key is ***"
        return listed if where == "transform_context" else None

    subscribing = where == "a subscriber"
    hooks = {} if subscribing else {"hooks": FunctionHooks(**{where: redact})}
    options = {
        "tools": [add],
        "messages": messages,
        "model": {"profile": profile},
    } | hooks
    with serve(ONE, AGAIN, Reply("done")) as server:
        ask(server, "And now?", each=redact if subscribing else None, **options)
        assert_all_valid(server)
        texts = [str(body["messages"]) for body in server.requests]
    found = [
        (
            text.count("sk-1"),
            text.count("***"),
        )
        for text in texts
    ]
    assert found == [(2, 0), (0, 2), (0, 2)]


def change_message(request: Request) -> None:
    request.messages[0]["content"] = "changed"


def add_message(request: Request) -> None:
    request.messages.append(user("changed"))


def set_messages(request: Request) -> None:
    request.messages = [user("changed")]


@pytest.mark.parametrize("change", [change_message, add_message, set_messages])
def test_what_a_hook_changes_in_a_request_is_in_that_request_only(
    change: Callable[[Request], None],
) -> None:
    """The second of three."""
    requests = 0

    def before_llm_call(request: Request) -> None:
        nonlocal requests
        requests += 1
        if requests == 2:
            change(request)

    with serve(ONE, AGAIN, Reply("done")) as server:
        hooks = FunctionHooks(before_llm_call=before_llm_call)
        _, result = ask(server, "first", tools=[add], hooks=hooks)
        texts = [str(body["messages"]) for body in server.requests]
    assert ["changed" in text for text in texts] == [False, True, False]
    assert "changed" not in str(result.messages)


# ---- images, tools of one's own, and what an agent is given --------------------------------------


def test_a_tool_knows_the_message_that_called_it() -> None:
    """A20."""
    seen: list[str] = []

    @quick
    def where(ctx: ToolContext, number: int) -> None:
        seen.append(ctx.message_id)

    calls = [("where", {"number": number}) for number in range(3)]
    with serve(
        Reply(calls=calls[:2]),
        Reply(calls=calls[2:]),
        Reply("x"),
    ) as server:
        _, result = ask(server, tools=[where])
        assert_all_valid(server)
    ids = [m["meta"]["message_id"] for m in result.messages if m["role"] == "assistant"]
    assert seen == [ids[0], ids[0], ids[1]]
    assert len(set(ids)) == 3


@pytest.mark.parametrize("kind", [Toolset, ParallelTools])
def test_a_tool_may_ask_the_person_a_question(kind: type[Toolset]) -> None:
    def choose(of: str, ctx: ToolContext) -> Any:
        asked = QuestionAsked(ctx.call_id, f"Which {of}?", ["red", "blue"])
        yield asked
        return f"{of}: {asked.answer or 'no answer'}"

    def reply(event: Event) -> None:
        if isinstance(event, QuestionAsked) and "colour" in event.question:
            event.reply(event.options[1])

    calls = [
        ("choose", {"of": "colour"}),
        ("choose", {"of": "size"}),
    ]
    with serve(Reply(calls=calls), Reply("done")) as server:
        tools = kind([quick(choose, concurrent=True)])
        events, result = ask(server, tools=tools, each=reply)
    assert contents(result.messages, "tool") == ["colour: blue", "size: no answer"]
    questions = [event.to_dict()["question"] for event in all_of(QuestionAsked, events)]
    assert questions == ["Which colour?", "Which size?"]


def test_what_an_agent_is_given_counts_or_fails_at_once() -> None:
    before: list[str] = []
    one, two = (
        FunctionHooks(before_llm_call=lambda request, name=name: before.append(name))
        for name in ("one", "two")
    )
    with serve(Reply("yes")) as server:
        options: dict[str, Any] = {
            "hooks": [one, two],
            "retry": FAST,
            "reasoning_budgets": {"high": 9},
        }
        agent = Agent("m", base_url=server.url, api_key="k", **options)
        assert agent.run("hi").text == "yes"
        assert before == ["one", "two"]
        agent.set_model("another")
        model = agent.state.model
        assert isinstance(model, ChatModel)
        assert model.reasoning_budgets == {"high": 9}
        assert agent.run("hi").text == "yes"
        assert server.requests[-1]["model"] == "another"
        assert server.heads[-1]["authorization"] == "Bearer k"
        with pytest.raises(TypeError, match="a model is a ChatModel"):
            agent_of(server).set_model("another")
        for wrong in ([print], print, [one, {}]):
            with pytest.raises(TypeError, match="hooks are objects of the class Hooks"):
                agent_of(server, hooks=wrong)
        with pytest.raises(TypeError, match="HookChain"):
            ask(server, hooks=[one])


NOTICE = {"role": "notice", "content": "x"}


@pytest.mark.parametrize(
    "messages",
    [[], [NOTICE], [user("hi"), said("yes")]],
)
def test_a_run_without_anything_to_answer_is_refused(messages: list[Message]) -> None:
    why = r"no message to continue from|the last message is a finished answer"
    with serve(Reply("yes")) as server:
        model = ChatModel("m", base_url=server.url)
        given = [user("go")]
        with pytest.raises(ValueError, match=why):
            drive(run_loop(messages, model))
        assert not server.requests
        steering = FunctionHooks(get_steering_messages=lambda: [given.pop()] if given else [])
        assert drive(run_loop(messages, model, hooks=steering))[1].text == "yes"
