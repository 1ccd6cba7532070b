"""Whatever happens in a conversation, every request that is ever sent is valid (INV-01)."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from coder.abort import Abort
from coder.features.scripted import Body, Reply, ScriptedServer
from coder.tools import ToolContext, tool
from coder.types import Event, Limits, Message, ToolUpdate
from tests.harness import ask, assert_all_valid

TEXTS = st.sampled_from(["", "a word", "two words", "h\ud83dlf", "nul\0", "\U0001f600"])
ARGUMENTS = st.sampled_from([{}, {"text": "x"}, {"text": "\udc00"}, '{"text": "cut', "[]", "null", "", '"twice"', {"other": 1}])
CALLS = st.lists(st.tuples(st.sampled_from(["echo", "echo", "slow", "fails", "no such.tool", ""]), ARGUMENTS), max_size=4)
REPLIES = st.one_of(
    st.builds(Reply, text=TEXTS, calls=CALLS, finish=st.sampled_from(["", "stop", "tool_calls", "length", "content_filter", None])),
    st.builds(Reply, text=TEXTS, calls=CALLS, cut=st.integers(0, 8), close=st.sampled_from(["eof", "reset"])),
    st.builds(Reply, text=st.just("bad"), status=st.sampled_from([0, 400, 401, 429, 500, 503])),
    st.builds(Reply, chunks=st.sampled_from([[b"data: {oops\n\n"], [b'data: {"error": {"code": 429}}\n\n'], [b"<html>"], []])))


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


MOMENTS = st.builds(Moment, st.integers(1, 40), st.sampled_from(["never", "never", "abort", "thread", "leave"]))


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


CONVERSATIONS = given(script=st.lists(REPLIES, min_size=1, max_size=8), moments=st.lists(MOMENTS, min_size=1, max_size=3))


@seed(20261121)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@CONVERSATIONS
def test_every_request_of_a_random_conversation_is_valid(script: list[Reply], moments: list[Moment]) -> None:
    every_request_is_valid(script, moments)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@CONVERSATIONS
def test_so_are_those_of_many_more(script: list[Reply], moments: list[Moment]) -> None:
    every_request_is_valid(script, moments)


def every_request_is_valid(script: list[Reply], moments: list[Moment]) -> None:
    left = iter(script)

    def next_reply(body: Body) -> Reply:
        return next(left, Reply("enough"))

    messages: list[Message] = []
    with ScriptedServer(next_reply) as server:
        for moment in moments:
            try:
                _, result = ask(server, "next", tools=[echo, slow, fails], messages=messages, abort=moment.abort, each=moment,
                                limits=Limits(max_steps=6, max_errors=3))
            except Left:
                continue
            assert result.messages is messages
        ask(server, "last", tools=[echo, slow, fails], messages=messages, limits=Limits(max_steps=2, max_errors=3))
        assert_all_valid(server)
        assert sum(m.get("content") == "last" for m in messages) == 1
