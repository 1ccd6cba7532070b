"""What holds for every request that is ever sent, group INV of the reliability list, whatever
happens in a conversation."""

from __future__ import annotations

import random
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from coder.abort import Abort
from coder.ai import Model
from coder.devtools.scripted import Reply, ScriptedModel
from coder.events import Event, ToolUpdate
from coder.loop import run_loop
from coder.providers.errors import RetryPolicy
from coder.sessions.recorder import Recorder
from coder.sessions.store import Store
from coder.tools.bash import bash
from coder.tools.files import read
from coder.toolset import ToolContext, Toolset, tool
from coder.types import Limits, Message
from tests.harness import ask, assert_all_valid, assert_valid, drive, results, serve

SAID = ["", "a word", "two words", "h\ud83dlf", "nul\0", "\U0001f600"]
ARGUMENTS: list[Any] = [
    {},
    {"text": "x"},
    {"text": "\udc00"},
    {"other": 1},
]
ARGUMENTS += ['{"text": "cut', "[]", "null", "", '"twice"']
BROKEN = [[b"data: {oops\n\n"], [b'data: {"error": {"code": 429}}\n\n'], [b"<html>"], list[bytes]()]
HOW = ["never", "never", "abort", "thread", "leave"]
NAMES = ["echo", "echo", "slow", "fails", "no such.tool", ""]
FINISHES = ["", "", "stop", "tool_calls", "length", "content_filter", None]


class Moment:
    """Ends a run when so many events have been seen: by the token, by Ctrl+C's exception, or by
    walking away."""

    def __init__(self, after: int, how: str) -> None:
        self.left = after
        self.how = how
        self.abort = Abort()

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


QUICK = RetryPolicy(base=0.001, cap=0.002)
TOOLS = [echo, slow, fails]


def drawn(number: int) -> tuple[list[Reply], list[Moment]]:
    """The conversation of a seed, and how each of its runs is ended."""
    chance = random.Random(number)

    def reply() -> Reply:
        kind = chance.random()
        text = chance.choice(SAID)
        count = chance.randint(1, 5) if chance.random() < 0.7 else 0
        calls = [
            (
                chance.choice(NAMES),
                chance.choice(ARGUMENTS),
            )
            for _ in range(count)
        ]
        if kind < 0.55:
            return Reply(text, calls, finish=chance.choice(FINISHES))
        if kind < 0.75:
            close = chance.choice(["eof", "reset"])
            return Reply(text, calls, cut=chance.randint(0, 8), close=close)
        if kind < 0.9:
            return Reply(
                "bad",
                status=chance.choice([0, 400, 401, 429, 500, 503]),
            )
        return Reply(chunks=chance.choice(BROKEN))

    moments = [(chance.randint(1, 40), chance.choice(HOW)) for _ in range(chance.randint(1, 3))]
    replies = [reply() for _ in range(chance.randint(1, 8))]
    return replies, [Moment(*moment) for moment in moments]


@pytest.mark.case("INV-01")
def test_every_request_of_five_hundred_random_conversations_is_valid() -> None:
    """The answers come byte for byte as from a server."""
    sent = 0
    for number in range(500):
        script, moments = drawn(number)
        model = ScriptedModel([*script, *[Reply("enough")] * 50])
        every_request_is_valid(model, moments, f"seed {number}")
        for body in model.bodies:
            assert_valid(body)
        sent += len(model.bodies)
    assert sent > 2_000


def every_request_is_valid(model: Model, moments: list[Moment], name: str = "") -> None:
    """Some runs of one conversation, each of which may be ended somewhere, and one more."""
    options: dict[str, Any] = {
        "retry": QUICK,
        "limits": Limits(max_steps=6, max_errors=3),
    }
    messages: list[Message] = []
    for moment in moments:
        try:
            run = run_loop(
                messages,
                model,
                TOOLS,
                prompt="next",
                abort=moment.abort,
                **options,
            )
            _, result = drive(run, moment)
        except Left:
            run.close()
            continue
        assert result.messages is messages, name
    drive(run_loop(messages, model, TOOLS, prompt="last", **options))
    assert sum(message.get("content") == "last" for message in messages) == 1, name


# ---- giants, and text that no encoder takes ------------------------------------------------------

DONE = Reply("All is well.")


@tool
def five_megabytes() -> str:
    """Say much."""
    return "much " * 1_000_000


@pytest.mark.case("INV-08")
def test_a_result_of_five_megabytes_is_cut_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a line of the file\n" * 300_000)
    calls = [
        ("five_megabytes", {}),
        ("bash", {"command": "cat file"}),
        ("read", {"path": "file"}),
    ]
    with serve(Reply(calls=calls), DONE) as server:
        ask(server, tools=Toolset([five_megabytes, bash, read], cwd=tmp_path))
        found = results(server)
        assert_all_valid(server)
    assert all(len(each) < 60_000 for each in found)
    assert all(
        mark in each
        for mark, each in zip(["[truncated ", "are not shown; all are in", "offset="], found)
    ), [each[-200:] for each in found]


ODD = "half \ud83d, \udc00 other, nul \0, none \ufffe \uffff, pair \U0001f600, line \u2028"


@tool
def odd() -> str:
    """Say what no encoder takes."""
    return ODD


@pytest.mark.case("INV-09")
def test_text_that_no_encoder_takes_is_sent_and_stays_the_same(tmp_path: Path) -> None:
    with serve(
        Reply("So: \ud83d\0\ufffe", calls=[("odd", {})]),
        DONE,
    ) as server:
        with closing(Store(tmp_path / "sessions.db")) as store:
            info = store.create("/ws")
            with Recorder(store, info) as recorder:
                ask(server, ODD, tools=[odd], messages=recorder.messages, each=recorder)
        with (
            closing(Store(tmp_path / "sessions.db")) as store,
            Recorder(store, info) as recorder,
        ):
            ask(server, "and now?", tools=[odd], messages=recorder.messages, each=recorder)
        assert_all_valid(server)
        first = server.requests[1]["messages"]
        second = server.requests[2]["messages"]
    assert second[: len(first)] == first
    assert len(second) == len(first) + 2
    mended = (
        ODD.replace("\ud83d", "\ufffd")
        .replace("\udc00", "\ufffd")
        .replace(
            "\0",
            "\ufffd",
        )
    )
    assert [each["content"] for each in first if each["role"] != "assistant"] == [mended] * 2
