"""Whatever happens in a conversation, every request that is ever sent is valid (INV-01)."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from coder.abort import Abort
from coder.ai import ChatModel
from coder.devtools.replay import ScriptedModel
from coder.devtools.scripted import Body, Reply, ScriptedServer
from coder.events import Event, ToolUpdate
from coder.loop import run_loop
from coder.providers.errors import RetryPolicy
from coder.toolset import ToolContext, tool
from coder.types import Limits, Message
from tests.harness import assert_all_valid, assert_valid, drive

SAID = ["", "a word", "two words", "h\ud83dlf", "nul\0", "\U0001f600"]
WORDS = [
    {},
    {"text": "x"},
    {"text": "\udc00"},
    '{"text": "cut',
    "[]",
    "null",
    "",
    '"twice"',
    {"other": 1},
]  # arguments
BROKEN = [[b"data: {oops\n\n"], [b'data: {"error": {"code": 429}}\n\n'], [b"<html>"], list[bytes]()]
HOW = ["never", "never", "abort", "thread", "leave"]
TEXTS, ARGUMENTS = st.sampled_from(SAID), st.sampled_from(WORDS)
CALLS = st.lists(
    st.tuples(st.sampled_from(["echo", "echo", "slow", "fails", "no such.tool", ""]), ARGUMENTS),
    max_size=5,
)
REPLIES = st.one_of(
    st.builds(
        Reply,
        text=TEXTS,
        calls=CALLS,
        finish=st.sampled_from(["", "stop", "tool_calls", "length", "content_filter", None]),
    ),
    st.builds(
        Reply,
        text=TEXTS,
        calls=CALLS,
        cut=st.integers(0, 8),
        close=st.sampled_from(["eof", "reset"]),
    ),
    st.builds(Reply, text=st.just("bad"), status=st.sampled_from([0, 400, 401, 429, 500, 503])),
    st.builds(Reply, chunks=st.sampled_from(BROKEN)),
)


class Moment:
    """Ends a run when so many events have been seen: by the token, by Ctrl+C's exception, or by walking away."""

    def __init__(self, after: int, how: str) -> None:
        self.left, self.how, self.abort = after, how, Abort()

    def __call__(self, event: Event) -> None:
        self.left -= 1
        if self.left == 0 and self.how == "abort":
            self.abort.set()
        elif self.left == 0 and self.how == "thread":
            threading.Thread(target=self.abort.set).start()
        elif self.left == 0 and self.how == "leave":
            raise Left


class Left(Exception):
    pass


MOMENTS = st.builds(Moment, st.integers(1, 40), st.sampled_from(HOW))


@tool
def echo(text: str = "") -> str:
    """Echo.

    text: what
    """
    return text


@tool
def slow(ctx: ToolContext) -> Any:
    """Yield some updates."""
    for word in ("one", "two"):
        yield ToolUpdate(ctx.call_id, word)
        ctx.abort.check()
    return "both"


@tool
def fails() -> str:
    """Fail."""
    raise ValueError("no \ud83d good")


CONVERSATIONS = given(
    script=st.lists(REPLIES, min_size=1, max_size=8),
    moments=st.lists(MOMENTS, min_size=1, max_size=3),
)
QUICK = RetryPolicy(base=0.001, cap=0.002)
TOOLS = [echo, slow, fails]


def drawn(number: int) -> tuple[list[Reply], list[Moment]]:
    """The conversation of a seed: much like those that hypothesis finds, at a fifth of the time."""
    chance = random.Random(number)

    def calls() -> list[tuple[str, Any]]:
        names = ["echo", "echo", "slow", "fails", "no such.tool", ""]
        return [
            (chance.choice(names), chance.choice(WORDS))
            for _ in range(chance.randint(1, 5) if chance.random() < 0.7 else 0)
        ]

    def reply() -> Reply:
        kind, text = chance.random(), chance.choice(SAID)
        if kind < 0.55:
            return Reply(
                text,
                calls(),
                finish=chance.choice(
                    ["", "", "stop", "tool_calls", "length", "content_filter", None]
                ),
            )
        if kind < 0.75:
            return Reply(
                text, calls(), cut=chance.randint(0, 8), close=chance.choice(["eof", "reset"])
            )
        return (
            Reply("bad", status=chance.choice([0, 400, 401, 429, 500, 503]))
            if kind < 0.9
            else Reply(chunks=chance.choice(BROKEN))
        )

    moments = [
        Moment(chance.randint(1, 40), chance.choice(HOW)) for _ in range(chance.randint(1, 3))
    ]
    return [reply() for _ in range(chance.randint(1, 8))], moments


@pytest.mark.case("INV-01")
def test_every_request_of_five_hundred_random_conversations_is_valid() -> None:
    """The answers come byte for byte as from a server, without one: its sockets and threads would take most of the time."""
    sent = 0
    for number in range(500):
        script, moments = drawn(number)
        model = ScriptedModel([*script, *[Reply("enough")] * 50])
        every_request_is_valid(model, moments, f"seed {number}")
        for body in model.requests:
            assert_valid(body)
        sent += len(model.requests)
    assert sent > 2_000


@pytest.mark.case("INV-01")
@seed(20261121)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@CONVERSATIONS
def test_so_is_every_request_to_a_real_server(script: list[Reply], moments: list[Moment]) -> None:
    at_a_server(script, moments)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@CONVERSATIONS
def test_so_are_those_of_many_more(script: list[Reply], moments: list[Moment]) -> None:
    at_a_server(script, moments)


def at_a_server(script: list[Reply], moments: list[Moment]) -> None:
    left = iter(script)

    def next_reply(body: Body) -> Reply:
        return next(left, Reply("enough"))

    with ScriptedServer(next_reply) as server:
        every_request_is_valid(ChatModel("m", base_url=server.url), moments)
        assert_all_valid(server)


def every_request_is_valid(model: ChatModel, moments: list[Moment], name: str = "") -> None:
    """Some runs of one conversation, each of which may be ended somewhere, and one more."""
    options: dict[str, Any] = {"retry": QUICK, "limits": Limits(max_steps=6, max_errors=3)}
    messages: list[Message] = []
    for moment in moments:
        try:
            run = run_loop(messages, model, TOOLS, prompts="next", abort=moment.abort, **options)
            _, result = drive(run, moment)
        except Left:
            run.close()
            continue
        assert result.messages is messages, name
    drive(run_loop(messages, model, TOOLS, prompts="last", **options))
    assert sum(message.get("content") == "last" for message in messages) == 1, name
