"""Bad servers, group NET of the reliability list: what a failing answer must not do, and when a run
gives up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from coder.devtools.scripted import Body, Reply, events
from coder.events import Retry, TextDelta, ToolEnd
from coder.providers.errors import RetryPolicy
from coder.tools.bash import bash
from coder.toolset import Toolset, tool
from coder.types import Limits
from tests.harness import all_of, ask, assert_all_valid, serve
from tests.terminal import OneShot
from tests.test_wire import chunk, stream

TOUCH = [("bash", {"command": "touch PWN"})]
ATTEMPTS = 5
FINE = Reply("All is well.")


def pieces(reply: Reply) -> list[bytes]:
    """The events of a reply without its end: no finish reason, no [DONE]."""
    return list(events(reply, {}))[:-2]


WHOLE = pieces(Reply("I do it.", TOUCH))
END = list(events(Reply(calls=TOUCH), {}))[-2]
ERROR = {"error": {"message": "the engine \x1b]0;PWN\x07broke\x9b2J down"}}
NO_JSON = "the stream holds what is no JSON"


@pytest.mark.case("NET-01", "NET-02", "NET-03", "NET-04")
@pytest.mark.parametrize(
    ("chunks", "code", "said"),
    [
        (WHOLE, 75, "the answer was cut off"),
        ([*WHOLE, END[: len(END) // 2]], 75, "the answer was cut off"),
        ([*WHOLE, b"data: {oops\n\n"], 1, f"{NO_JSON}: '{{oops'"),
        (
            [*WHOLE, b"data: %s\n\n" % json.dumps(ERROR, ensure_ascii=False).encode()],
            75,
            "the engine ]0;PWN broke 2J down",
        ),
    ],
    ids=["NET-01", "NET-02", "NET-03", "NET-04"],
)
def test_an_answer_that_does_not_come_to_its_end_runs_nothing_and_is_asked_for_a_few_times(
    tmp_path: Path, chunks: Sequence[bytes], code: int, said: str
) -> None:
    with (
        serve(Reply(chunks=chunks)) as server,
        OneShot(tmp_path, server, "-y", "go") as run,
    ):
        assert run.end() == code
        assert run.out == ""
        assert len(server.requests) == ATTEMPTS
        assert f"Failed after {ATTEMPTS} errors" in run.err
        assert said in run.err
        assert all(letter.isprintable() or letter == "\n" for letter in run.err), run.err
        assert not list(run.ws.iterdir())


@pytest.mark.case("NET-05")
def test_a_stream_that_falls_silent_is_given_up_at_the_limit(tmp_path: Path) -> None:
    with (
        serve(Reply("Well, then", cut=2, close="hang"), FINE) as server,
        OneShot(tmp_path, server, "--idle-timeout", "1", "go") as run,
    ):
        assert run.end() == 0
        assert run.out == "All is well.\n"
        assert server.times[1] - server.times[0] >= 1
        assert "No data for 1 s" in run.err


def busy(wait: str) -> Reply:
    return Reply("slow down", status=429, headers={"Retry-After": wait})


@pytest.mark.case("NET-06")
@pytest.mark.parametrize(
    ("wait", "attempts", "code"),
    [
        ("1", 2, 0),
        ("999999999", 1, 75),
        ("nan", ATTEMPTS, 75),
    ],
)
def test_a_server_that_names_a_wait_is_asked_again_then_or_never(
    tmp_path: Path, wait: str, attempts: int, code: int
) -> None:
    replies = [busy(wait), FINE] if code == 0 else [busy(wait)]
    with serve(*replies) as server, OneShot(tmp_path, server, "go") as run:
        assert run.end() == code
        assert len(server.requests) == attempts
        assert attempts != 1 or "asks to wait 999999999 s" in run.err
        assert code or server.times[1] - server.times[0] >= 1


@pytest.mark.case("NET-07")
@pytest.mark.parametrize("goes_away", [False, True])
def test_what_passes_is_tried_again_with_waits_that_grow(goes_away: bool) -> None:
    def last_words(body: Body) -> Reply:
        server.socket.close()
        return Reply(
            chunks=pieces(Reply(calls=[("ls", {})])),
            close="reset",
        )

    passing = [
        Reply("oops", status=500),
        Reply("oops", status=503),
        *[Reply(status=0)] * 3,
        FINE,
    ]
    with serve(*([last_words] if goes_away else passing)) as server:
        seen, result = ask(server, retry=RetryPolicy(base=0.01))
        # the first reset comes on a connection that was there, and is asked again at once
        assert len(server.requests) == (1 if goes_away else ATTEMPTS + 1)
    waits = [retry.delay for retry in all_of(Retry, seen)]
    assert len(waits) == ATTEMPTS - 1
    assert all(a < b for a, b in pairwise(waits))
    assert ("nothing answers" in result.text) if goes_away else result.text == "All is well."


@pytest.mark.case("NET-09")
def test_arguments_that_are_no_json_are_not_guessed_at_and_go_back_mended(tmp_path: Path) -> None:
    with serve(
        Reply(calls=[("bash", '{"command": touch PWN"}'), ("bash", '{"command": "touch PWN')]), FINE
    ) as server:
        seen, _ = ask(server, tools=Toolset([bash], cwd=tmp_path))
        _, answer, *results = server.requests[1]["messages"]
    assert [end.is_error for end in seen if isinstance(end, ToolEnd)] == [True, True]
    assert not list(tmp_path.iterdir())
    assert all("not valid JSON" in result["content"] for result in results)
    assert [json.loads(call["function"]["arguments"]) for call in answer["tool_calls"]] == [{}, {}]


def odd(arguments: Any, name: Any = "say", **more: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}} | more


ODD_CALLS: list[tuple[dict[str, Any], str]] = [  # a call, and what its result says
    (odd('{"text": "one"}'), "one"),
    (odd('{"text": "two"}', id="same"), "two"),
    (odd('{"text": "three"}', id="same"), "three"),
    (odd(7, id=None), "no JSON object"),
    (odd('{"text": "x"}', "", id="a"), "the call had no name"),
    (odd('{"text": "x"}', "fly", id="b"), "there is no tool 'fly'"),
    *(
        (
            odd(given, id=f"c{given}"),
            "say needs text",
        )
        for given in (None, "null")
    ),
    *(
        (
            odd(given, id=f"d{given}"),
            "no JSON object",
        )
        for given in ('["x"]', "7")
    ),
    (odd("{}", None, id=8), "the call had no name"),
]


@tool
def say(text: str) -> str:
    """Say.

    text: what
    """
    return text


@pytest.mark.case("NET-10")
@pytest.mark.parametrize(
    "together",
    [True, False],
    ids=["in one answer", "one by one"],
)
def test_a_call_that_is_odd_in_any_way_gets_one_result(together: bool) -> None:
    numbered = [{"index": at, "type": "function"} | call for at, (call, _) in enumerate(ODD_CALLS)]
    answers = [numbered] if together else [[call] for call in numbered]
    chunks = [
        stream(
            *(chunk(tool_calls=[call]) for call in calls),
            chunk("tool_calls"),
        )
        for calls in answers
    ]
    with serve(*(Reply(chunks=each) for each in chunks), FINE) as server:
        _, result = ask(server, tools=[say])
        assert_all_valid(server)
    results = [message["content"] for message in result.messages if message["role"] == "tool"]
    assert result.text == "All is well."
    assert len(results) == len(ODD_CALLS)
    expected = [said for _, said in ODD_CALLS]
    if together:
        expected[expected.index("say needs text") + 1] = "Same call as above"
    assert all(said in content for said, content in zip(expected, results)), results


@pytest.mark.case("NET-14")
def test_slow_words_without_end_are_ended_by_the_time_limit() -> None:
    words = 0
    with serve(Reply("word " * 10_000, pace=0.02)) as server:
        for seconds in (1, 10, 30):  # a busy machine may need more for the first words
            if words < 3:
                seen, result = ask(server, limits=Limits(max_seconds=seconds))
                words = sum(isinstance(event, TextDelta) for event in seen)
    assert result.stop_reason == "max_time"
    assert 2 < words < 10_000
    assert result.messages[-1]["content"].startswith("word word")


HEADINGS = "Goal", "Instructions", "Discoveries", "Accomplished", "Files"
TOO_LONG = Reply("This model's maximum context length is 8192 tokens.", status=400)


@pytest.mark.case("NET-15")
def test_a_context_that_is_always_too_long_is_shortened_once_and_then_said(tmp_path: Path) -> None:
    too_long = [False]
    asked = []

    def script(body: Body) -> Reply:
        summarising = "<conversation>" in str(body["messages"][-1]["content"])
        asked.append("summary" if summarising else "run")
        if summarising:
            return Reply("".join(f"## {heading}\nnone\n" for heading in HEADINGS))
        return TOO_LONG if too_long[0] else Reply("word " * 2_000)

    with serve(script) as server:
        for number in range(2):
            with OneShot(tmp_path, server, *["-c"][:number], f"question {number}") as run:
                assert run.end() == 0
        too_long[0] = True
        asked.clear()
        with OneShot(tmp_path, server, "-c", "--output-format", "stream-json", "and now?") as run:
            assert run.end() == 3
            seen = [json.loads(line) for line in run.out.splitlines()]
    assert asked == ["run", "summary", "run", "summary"], "the second attempt shortens nothing"
    assert [event["type"] for event in seen].count("compacted") == 1
    assert seen[-1]["stop_reason"] == "length"
    assert seen[-1]["text"] == "Context limit reached."
