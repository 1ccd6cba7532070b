"""The loop against a real server: the decision table, limits and texts, retries, the doom loop, hooks, output."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from coder.abort import Abort
from coder.ai import ChatModel
from coder.devtools.scripted import Body, Reply, ScriptedServer
from coder.events import DoomLoop, Outcome, Retry, StepEnd, ToolEnd
from coder.history import user
from coder.hooks import FunctionHooks, Hooks
from coder.loop import run_loop
from coder.providers.errors import RetryPolicy
from coder.run import truncate
from coder.toolset import Tool, ToolContext, Toolset, tool
from coder.types import (
    Completion,
    Limits,
    Message,
    ModelError,
    Request,
    ToolCall,
    ToolError,
    ToolResult,
    Usage,
)
from tests.harness import FAST, ask, assert_all_valid, drive, serve, shape, types


@tool
def add(a: int, b: int) -> str:
    """Add.

    a: first
    b: second
    """
    return str(a + b)


@tool
def say(text: str) -> str:
    """Say.

    text: what
    """
    return text


def call(name: str = "add", **arguments: Any) -> Reply:
    return Reply(calls=[(name, arguments or {"a": 1, "b": 2})])


# ---- the decision table ----------------------------------------------------------------------------------

FULL = Reply("This model's maximum context length is 8 tokens", status=400)
SHORTER = FunctionHooks(on_length=lambda m, trigger, usage, abort: trigger != "threshold")
SMALL = {"context_window": 10}  # tokens: any answer fills it

# (what the answer has, the condition) as the table of docs/reading-guide.md has it -> the replies, the options, and what comes of it:
# stop_reason, text, how many requests were sent.
ROWS: dict[tuple[str, str], list[tuple[list[Reply], dict[str, Any], tuple[str, str, int]]]] = {
    ("an error", "the context overflowed"): [
        ([FULL, Reply("done")], {"hooks": SHORTER}, ("stop", "done", 2)),
        ([FULL], {}, ("length", "Context limit reached.", 1)),
    ],
    ("an error, or a cut stream", "worth another try"): [
        ([Reply("no", status=503), Reply("done")], {}, ("stop", "done", 2)),
        ([Reply("half", cut=1), Reply("done")], {}, ("stop", "done", 2)),
    ],
    ("an error", "of any other kind"): [
        ([Reply("no", status=404)], {}, ("error", "Error: ", 1)),
    ],
    ("anything", "finish_reason `content_filter`"): [
        ([Reply("some", finish="content_filter")], {}, ("content_filter", "some", 1)),
        (
            [Reply(calls=[("add", {"a": 1, "b": 2})], finish="content_filter")],
            {},
            ("content_filter", "The provider", 1),
        ),
    ],
    ("tool calls", "finish_reason `length`"): [
        (
            [Reply(calls=[("add", {"a": 1, "b": 2})], finish="length"), Reply("done")],
            {},
            ("stop", "done", 2),
        ),
    ],
    ("tool calls", "any other finish_reason"): [
        ([call(), Reply("done")], {}, ("stop", "done", 2)),
        (
            [Reply(calls=[("add", {"a": 1, "b": 2})], finish="stop"), Reply("done")],
            {},
            ("stop", "done", 2),
        ),
    ],
    ("no calls", "`length`, and the context is at least 80 % full"): [
        ([Reply("half", finish="length")], {"model": SMALL}, ("length", "half", 1)),
        (
            [Reply("half", finish="length"), Reply("done")],
            {"model": SMALL, "hooks": SHORTER},
            ("stop", "done", 2),
        ),
    ],
    ("no calls", "`length` otherwise"): [
        ([Reply("half", finish="length")], {}, ("length", "half", 1)),
        ([Reply("", finish="length")], {}, ("length", "The answer was cut at the output limit", 1)),
    ],
    ("nothing at all", "neither behind tool results nor for the second time"): [
        ([Reply(""), Reply("done")], {}, ("stop", "done", 2)),
        ([Reply(""), Reply("")], {}, ("stop", "Task completed.", 2)),
        ([call(), Reply("")], {}, ("stop", "Task completed.", 2)),
    ],
    ("no calls", "any other finish_reason"): [
        ([Reply("done")], {}, ("stop", "done", 1)),
        ([Reply("done")], {"model": SMALL}, ("stop", "done", 1)),
    ],
}


@pytest.mark.parametrize("row", ROWS, ids=" · ".join)
def test_what_follows_on_an_answer(row: tuple[str, str]) -> None:
    for replies, options, (stop_reason, text, requests) in ROWS[row]:
        with serve(*replies) as server:
            _, result = ask(server, tools=[add], **options)
        assert (result.stop_reason, len(server.requests)) == (stop_reason, requests), replies
        assert result.text.startswith(text)


def test_the_reading_guide_has_these_rows() -> None:
    guide = (Path(__file__).parent.parent / "docs" / "reading-guide.md").read_text()
    table = guide.partition("| the answer has |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| (.+?) \| (.+?) \| .+? \|$", table, re.M) == [*ROWS]


# ---- how a run ends --------------------------------------------------------------------------------------


def test_a_plain_answer_ends_the_run_with_its_text() -> None:
    with serve(Reply("Four.")) as server:
        events, result = ask(server, "2+2?")
    assert (result.stop_reason, result.text, result.steps, result.error) == (
        "stop",
        "Four.",
        1,
        None,
    )
    assert shape(events) == [
        "run_start",
        "step_start",
        "message_start",
        "message_end",
        "message_start",
        "message_end",
        "step_end",
        "run_end",
    ]
    assert [m["role"] for m in result.messages] == ["user", "assistant"]


def test_a_run_with_tools_goes_on_until_there_are_no_calls() -> None:
    with serve(
        Reply("I add.", calls=[("add", {"a": 2, "b": 2}), ("add", {"a": 3, "b": 3})]),
        Reply("4 and 6."),
    ) as server:
        events, result = ask(server, tools=[add])
        assert_all_valid(server)
    assert result.text == "4 and 6." and result.steps == 2
    assert [m.get("content") for m in result.messages] == ["go", "I add.", "4", "6", "4 and 6."]
    assert shape(events) == [
        "run_start",
        "step_start",
        "message_start",
        "message_end",
        "message_start",
        "message_end",
        "tool_start",
        "tool_end",
        "message_start",
        "message_end",
        "tool_start",
        "tool_end",
        "message_start",
        "message_end",
        "step_end",
        "step_start",
        "message_start",
        "message_end",
        "step_end",
        "run_end",
    ]


def test_calls_are_run_though_the_server_says_stop() -> None:
    with serve(Reply(calls=[("add", {"a": 2, "b": 2})], finish="stop"), Reply("done")) as server:
        _, result = ask(server, tools=[add])
    assert result.messages[2]["content"] == "4"


def test_an_empty_stop_behind_tool_results_ends_the_run_and_one_without_any_is_asked_for_once_more() -> (
    None
):
    """The words of the refactor plan: the work is done, and there is nothing to add."""
    with serve(call(), Reply("")) as server:
        events, result = ask(server, tools=[add])
        assert len(server.requests) == 2
    assert (result.stop_reason, result.text, result.error) == (
        "stop",
        "Task completed.",
        None,
    ) and "retry" not in types(events)
    assert [m["role"] for m in result.messages] == ["user", "assistant", "tool"]
    assert shape(events)[-4:] == ["message_start", "message_end", "step_end", "run_end"]

    with serve(Reply("")) as server:
        events, result = ask(server)
        assert len(server.requests) == 2
    assert (result.stop_reason, result.text, result.error) == ("stop", "Task completed.", None)
    assert [e.error.message for e in events if isinstance(e, Retry)] == ["the answer was empty"]
    assert result.usage.input == sum(
        len(json.dumps(body)) // 4 for body in server.requests
    )  # both are paid for


def test_an_empty_answer_at_the_start_is_asked_for_again() -> None:
    with serve(Reply(""), Reply("here")) as server:
        events, result = ask(server)
    assert result.text == "here" and "retry" in types(events)


def test_calls_that_were_announced_and_did_not_come_are_a_failed_attempt() -> None:
    """F2: the server lost them, so the model was not done."""
    with serve(call(), Reply("", finish="tool_calls"), Reply("here")) as server:
        _, result = ask(server, tools=[add])
    assert result.text == "here"


@pytest.mark.case("NET-08")
def test_an_answer_cut_inside_its_calls_runs_none_of_them(tmp_path: Path) -> None:
    """NET-08: neither the one with valid arguments nor the one that is cut."""

    @tool
    def touch(path: str) -> str:
        """Touch.

        path: file
        """
        (tmp_path / path).touch()
        return "ok"

    cut = Reply(
        "Writing.", calls=[("touch", {"path": "a"}), ("touch", '{"path": "b')], finish="length"
    )
    with serve(cut, Reply("smaller then")) as server:
        _, result = ask(server, tools=[touch])
        assert_all_valid(server)
    assert list(tmp_path.iterdir()) == []
    assert all(
        "cut at the output limit" in m["content"] for m in result.messages if m["role"] == "tool"
    )
    assert result.stop_reason == "stop"


def test_an_answer_at_the_output_limit_ends_with_length_and_its_text() -> None:
    with serve(Reply("half a st", finish="length")) as server:
        _, result = ask(server)
    assert (result.stop_reason, result.text) == ("length", "half a st")


def test_length_in_a_full_context_without_compaction_ends_with_length() -> None:
    with serve(Reply("x" * 4000, finish="length")) as server:
        _, result = ask(server, model={"context_window": 500})
    assert result.stop_reason == "length" and result.text == "x" * 4000


def test_an_overflow_without_compaction_says_that_the_context_limit_is_reached() -> None:
    """NET-15: one clear end and no loop."""
    with serve(Reply("This model's maximum context length is 10 tokens", status=400)) as server:
        _, result = ask(server)
        assert len(server.requests) == 1
    assert (result.stop_reason, result.text) == ("length", "Context limit reached.")
    assert result.error and result.error.kind == "overflow"


class Shortening(Hooks):
    """Compaction by dropping all but the last message."""

    def __init__(self) -> None:
        self.triggers: list[str] = []
        self.told = 0

    def on_length(
        self, messages: list[Message], trigger: str, usage: Usage, abort: Abort
    ) -> Outcome[bool]:
        self.triggers.append(trigger)
        if trigger == "threshold":
            return False
        messages[:-1] = []
        return True

    def on_compacted(self, messages: list[Message]) -> Outcome[None]:
        self.told += 1
        return None


def test_an_overflow_is_compacted_and_asked_again_at_most_twice_in_a_row() -> None:
    hooks = Shortening()
    with serve(Reply("maximum context length", status=400)) as server:
        _, result = ask(server, hooks=hooks)
        assert len(server.requests) == 3
    assert result.stop_reason == "length"
    assert hooks.triggers == ["threshold", "overflow", "threshold", "overflow"] and hooks.told == 2


def test_after_a_completed_step_the_context_may_be_compacted_again() -> None:
    hooks = Shortening()
    full = Reply("maximum context length", status=400)
    with serve(full, full, call(), full, full, Reply("done")) as server:
        _, result = ask(server, hooks=hooks, tools=[add])
        assert_all_valid(server)
    assert result.text == "done" and hooks.told == 4


def test_a_filtered_answer_ends_with_a_notice_and_is_not_retried() -> None:
    with serve(Reply("Step one is", finish="content_filter")) as server:
        events, result = ask(server)
        assert len(server.requests) == 1
    assert (result.stop_reason, result.text) == (
        "content_filter",
        "Step one is",
    ) and "notice" in types(events)


def test_calls_of_a_filtered_answer_are_not_run() -> None:
    with serve(Reply(calls=[("add", {"a": 1, "b": 1})], finish="content_filter")) as server:
        events, result = ask(server, tools=[add])
    assert result.stop_reason == "content_filter" and "tool_start" not in types(events)


# ---- limits ----------------------------------------------------------------------------------------------


def counting() -> ScriptedServer:
    """A model that calls for ever, each time with other arguments."""
    numbers = iter(range(10**6))
    return serve(lambda body: call(a=next(numbers), b=0))


@pytest.mark.case("INV-10")
def test_the_step_limit_ends_the_run_with_its_words() -> None:
    with counting() as server:
        _, result = ask(server, tools=[add], limits=Limits(max_steps=3))
        assert len(server.requests) == 3
        assert_all_valid(server)
    assert (result.stop_reason, result.text, result.steps) == (
        "max_steps",
        "Max steps reached, task may be incomplete.",
        3,
    )


def test_the_step_limit_counts_per_run() -> None:
    with counting() as server:
        messages: list[Message] = []
        for _ in range(2):
            _, result = ask(server, tools=[add], limits=Limits(max_steps=2), messages=messages)
        assert result.steps == 2 and len(server.requests) == 4
        assert_all_valid(server)


@pytest.mark.parametrize("where", ["stream", "tool", "backoff"])
def test_the_time_limit_ends_the_run_wherever_it_is(where: str) -> None:
    @tool
    def wait(ctx: ToolContext) -> str:
        """Wait."""
        ctx.abort.wait(60)
        return "never"

    replies = {
        "stream": Reply("slow", close="hang", cut=2),
        "tool": Reply(calls=[("wait", {})]),
        "backoff": Reply("busy", status=503, headers={"retry-after": "30"}),
    }
    started = time.monotonic()
    with serve(replies[where]) as server:
        _, result = ask(
            server, tools=[wait] if where == "tool" else [], limits=Limits(max_seconds=0.5)
        )
    assert result.stop_reason == "max_time" and time.monotonic() - started < 5
    assert (
        where == "stream" or result.text == "Time limit of 0.5 s reached, task may be incomplete."
    )


# ---- retries ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        Reply("busy", status=429),
        Reply("oops", status=500),
        Reply("oops", status=503),
        Reply("oops", status=529),
        Reply(status=0),
        Reply("half", cut=2),
        Reply("half", cut=2, close="reset"),
        Reply(chunks=[b"data: {oops\n\n"]),
        Reply(chunks=[b'data: {"error": {"message": "overloaded"}}\n\n']),
    ],
    ids=lambda r: f"{r.status}-{r.close}-{r.cut}-{bool(r.chunks)}",
)
def test_a_passing_failure_is_tried_again_and_leaves_no_trace(bad: Reply) -> None:
    """NET-01 to NET-07."""
    with serve(bad, bad, Reply("fine")) as server:
        events, result = ask(server)
        assert len(server.requests) == 3
    retries = [event for event in events if isinstance(event, Retry)]
    assert [event.attempt for event in retries] == [1, 2]
    assert result.text == "fine" and [m.get("content") for m in result.messages] == ["go", "fine"]


def test_after_five_failures_the_run_says_so_and_names_the_error() -> None:
    with serve(Reply("overloaded", status=503)) as server:
        _, result = ask(server)
        assert len(server.requests) == 5
    assert (result.stop_reason, result.text) == ("error", "Failed after 5 errors: overloaded")
    assert result.error and (result.error.kind, result.error.status) == ("server", 503)
    assert [m["role"] for m in result.messages] == ["user"]


@pytest.mark.case("NET-07")
@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "bad_request"), (401, "auth"), (403, "auth"), (404, "not_found"), (402, "quota")],
)
def test_a_final_error_is_not_tried_again(status: int, kind: str) -> None:
    with serve(Reply("no such thing", status=status)) as server:
        _, result = ask(server)
        assert len(server.requests) == 1
    where = f" at {server.url}/chat/completions" if status == 404 else ""
    assert (
        result.text == f"Error: no such thing{where}" and result.error and result.error.kind == kind
    )


def test_the_count_of_failures_is_reset_by_a_good_answer() -> None:
    bad = Reply("busy", status=503)
    with serve(*[bad] * 4, call(), *[bad] * 4, Reply("fine")) as server:
        _, result = ask(server, tools=[add])
    assert result.text == "fine"


def test_waits_grow_and_obey_the_server() -> None:
    policy = RetryPolicy()
    busy = ModelError("server", "x", retryable=True)
    for attempt, most in ((1, 2), (2, 4), (3, 8), (4, 16), (5, 30), (9, 30)):
        waits = [policy.delay(busy, attempt) or 0 for _ in range(50)]
        assert all(0.75 * most <= wait <= most for wait in waits) and len(set(waits)) > 1
    assert (
        policy.delay(ModelError("rate_limit", "x", retryable=True, retry_after=45), 1) or 0
    ) == 45
    assert policy.delay(ModelError("rate_limit", "x", retryable=True, retry_after=61), 1) is None
    assert policy.delay(ModelError("auth", "x"), 1) is None


def test_a_server_that_asks_for_a_day_is_not_waited_for() -> None:
    with serve(Reply("later", status=429, headers={"retry-after": "86400"})) as server:
        _, result = ask(server)
        assert len(server.requests) == 1
    assert result.text == "Error: later (the server asks to wait 86400 s)"


def test_retry_after_is_waited_for() -> None:
    with serve(Reply("later", status=429, headers={"retry-after": "0.4"}), Reply("fine")) as server:
        _, result = ask(server)
        assert server.times[1] - server.times[0] >= 0.4
    assert result.text == "fine"


def test_one_connection_serves_a_run_also_after_errors_with_a_body() -> None:
    with serve(
        call(), call(a=2, b=2), Reply("busy", status=503), call(a=3, b=3), Reply("done")
    ) as server:
        ask(server, tools=[add])
        assert server.connections == 1 and len(server.requests) == 5


def test_the_first_byte_and_an_idle_stream_are_timed_and_comments_do_not_count() -> None:
    comments = Reply(chunks=[b": processing\n\n"] * 100, pace=0.05)
    for slow in (Reply("late", hold=30), comments, Reply("one two", cut=2, close="hang")):
        started = time.monotonic()
        with serve(slow, Reply("fine")) as server:
            _, result = ask(server, model={"idle_timeout": 0.5, "first_byte_timeout": 0.5})
        assert result.text == "fine" and time.monotonic() - started < 4


# ---- the doom loop ---------------------------------------------------------------------------------------


@pytest.mark.case("INV-10")
def test_the_third_identical_call_is_answered_unrun_and_the_fourth_ends_the_run() -> None:
    ran: list[int] = []

    @tool
    def count(a: int, b: int) -> str:
        """Count.

        a: one
        b: two
        """
        ran.append(a)
        return "same"

    order = [
        {"a": 1, "b": 2},
        {"b": 2, "a": 1},
        {"a": 1, "b": 2},
        {"a": 1, "b": 2},
    ]  # canonical: the order does not matter
    with serve(*(Reply(calls=[("count", arguments)]) for arguments in order)) as server:
        events, result = ask(server, tools=[count])
        assert_all_valid(server)
    assert len(ran) == 2
    assert result.stop_reason == "doom_loop" and result.steps == 4
    assert [event.count for event in events if isinstance(event, DoomLoop)] == [3]
    assert "3 times in a row" in result.messages[6]["content"]
    assert [m["role"] for m in result.messages] == ["user"] + ["assistant", "tool"] * 4


def test_a_different_call_in_between_resets_the_count() -> None:
    same, other = call(a=1, b=1), call(a=2, b=2)
    with serve(same, same, other, same, same, Reply("done")) as server:
        events, result = ask(server, tools=[add])
    assert result.text == "done" and not [event for event in events if isinstance(event, DoomLoop)]


def test_a_consumer_may_let_the_repeated_call_run() -> None:
    with serve(*[call()] * 3, Reply("done")) as server:
        events, result = ask(
            server,
            tools=[add],
            each=lambda event: event.reply(True) if isinstance(event, DoomLoop) else None,
        )
    assert result.text == "done"
    assert [event.result.content for event in events if isinstance(event, ToolEnd)] == [
        "3",
        "3",
        "3",
    ]


def test_the_count_goes_over_the_calls_of_one_answer_too() -> None:
    with serve(Reply(calls=[("add", {"a": 1, "b": 1})] * 5), Reply("unreached")) as server:
        events, result = ask(server, tools=[add])
    assert result.stop_reason == "doom_loop"
    assert [event.is_error for event in events if isinstance(event, ToolEnd)] == [
        False,
        False,
        True,
        True,
        True,
    ]


# ---- tools in the loop -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("nope", {}, "there is no tool 'nope'. The tools are: add, broken"),
        ("add", '{"a": 1', "not valid JSON"),
        ("add", "[1, 2]", "no JSON object but"),
        ("add", {"a": 1}, "add needs b"),
        ("add", {"a": 1, "b": "x"}, "has to be of type integer"),
        ("add", {"a": 1, "b": 2, "c": 3}, "no parameter c"),
        ("broken", {}, "broken failed: ZeroDivisionError"),
    ],
)
def test_what_a_model_does_wrong_becomes_a_result(name: str, arguments: Any, expected: str) -> None:
    @tool
    def broken() -> str:
        """Fail."""
        return str(1 / 0)

    with serve(Reply(calls=[(name, arguments)]), Reply("I see")) as server:
        events, result = ask(server, tools=[add, broken])
        assert_all_valid(server)
    end = next(event for event in events if isinstance(event, ToolEnd))
    assert end.is_error and expected in str(end.result.content)
    assert result.text == "I see"


def test_tool_errors_are_the_models_to_mend() -> None:
    @tool
    def picky() -> str:
        """Refuse."""
        raise ToolError("try another way")

    with serve(call("picky", x=1), Reply(calls=[("picky", {})]), Reply("ok")) as server:
        _, result = ask(server, tools=[picky])
    assert result.messages[4]["content"] == "Error: try another way"


def test_output_is_cut_once_with_the_exact_marker() -> None:
    text = "a" * 15_000 + "b" * 5_000 + "c" * 15_000
    with serve(Reply(calls=[("big", {})]), Reply("ok")) as server:

        @tool
        def big() -> str:
            """Big."""
            return text

        _, result = ask(server, tools=[big])
    assert (
        result.messages[2]["content"]
        == "a" * 15_000 + "\n\n... [truncated 5000 characters] ...\n\n" + "c" * 15_000
    )


def test_output_of_exactly_the_limit_is_untouched() -> None:
    assert truncate("x" * 30_000) == "x" * 30_000
    assert truncate("abcdefg", 4) == "ab\n\n... [truncated 3 characters] ...\n\nfg"


@pytest.mark.case("INV-09")
def test_what_no_encoder_takes_is_cleaned_before_it_is_sent() -> None:
    """INV-09."""

    @tool
    def dirty() -> str:
        """Dirty."""
        return "half \ud83d, nul \0, pair \ud83d\ude00"

    with serve(Reply(calls=[("dirty", {})]), Reply("ok")) as server:
        _, result = ask(server, "in \udc00put", tools=[dirty])
        assert_all_valid(server)
    assert result.messages[2]["content"] == "half \ufffd, nul \ufffd, pair \U0001f600"


def test_an_empty_result_is_never_sent() -> None:
    with serve(Reply(calls=[("say", {"text": ""})]), Reply("ok")) as server:
        ask(server, tools=[say])
        assert server.requests[1]["messages"][-1]["content"] == "(no output)"


# ---- hooks -----------------------------------------------------------------------------------------------


class Recording(Hooks):
    def __init__(self, **overrides: Any) -> None:
        self.seen: list[str] = []
        self.overrides = overrides

    def before_llm_call(self, request: Request) -> Outcome[None]:
        self.seen.append("before_llm_call")
        request.system, request.options = "changed", {"temperature": 0.5}

    def after_llm_call(self, completion: Completion) -> Outcome[None]:
        self.seen.append("after_llm_call")

    def before_tool_call(self, call: ToolCall, ctx: ToolContext) -> Outcome[ToolResult | None]:
        self.seen.append("before_tool_call")
        assert call.arguments is not None
        if call.arguments["a"] == 13:
            return ToolResult("unlucky", is_error=True)
        call.arguments["a"] += 100
        return None

    def after_tool_call(self, call: ToolCall, result: ToolResult) -> Outcome[ToolResult | None]:
        self.seen.append("after_tool_call")
        return dataclasses.replace(result, content=f"<{result.content}>")

    def transform_context(self, messages: list[Message], abort: Abort) -> Outcome[list[Message]]:
        self.seen.append("transform_context")
        return [user("injected"), *messages]

    def get_api_key(self) -> Outcome[str | None]:
        self.seen.append("get_api_key")
        return f"key{len(self.seen)}"


def test_hooks_see_and_change_what_they_are_for() -> None:
    hooks = Recording()
    with serve(
        Reply(calls=[("add", {"a": 1, "b": 2}), ("add", {"a": 13, "b": 0})]), Reply("ok")
    ) as server:
        _, result = ask(server, tools=[add], hooks=hooks)
        assert_all_valid(server)
        body = server.requests[1]
        assert (
            body["messages"][0] == {"role": "system", "content": "changed"}
            and body["temperature"] == 0.5
        )
        assert body["messages"][1]["content"] == "injected"
        keys = [head["authorization"] for head in server.heads]
    assert [m["content"] for m in result.messages if m["role"] == "tool"] == ["<103>", "<unlucky>"]
    assert result.messages[0]["content"] == "go", "the history itself is not transformed"
    assert keys[0].startswith("Bearer key") and keys[0] != keys[1]
    assert hooks.seen[:4] == [
        "transform_context",
        "get_api_key",
        "before_llm_call",
        "after_llm_call",
    ]


class Queues(Hooks):
    """Steering after the first tool, one follow-up at the end."""

    def __init__(self) -> None:
        self.steering: list[Message] = []
        self.follow_up = [user("and now?")]

    def get_steering_messages(self) -> Outcome[Sequence[Message]]:
        taken, self.steering = self.steering, []
        return taken

    def get_follow_up_messages(self) -> Outcome[Sequence[Message]]:
        taken, self.follow_up = self.follow_up, []
        return taken

    def after_tool_call(self, call: ToolCall, result: ToolResult) -> Outcome[ToolResult | None]:
        self.steering = [user("stop that")]
        return None


def test_steering_skips_the_remaining_calls_and_a_follow_up_goes_on() -> None:
    with serve(
        Reply(calls=[("add", {"a": 1, "b": 1}), ("add", {"a": 2, "b": 2})]),
        Reply("stopped"),
        Reply("nothing"),
    ) as server:
        events, result = ask(server, tools=[add], hooks=Queues())
        assert_all_valid(server)
    assert [m["content"] for m in result.messages] == [
        "go",
        None,
        "2",
        "Skipped due to queued user message.",
        "stop that",
        "stopped",
        "and now?",
        "nothing",
    ]
    assert shape(events)[6:16] == [
        "tool_start",
        "tool_end",
        "message_start",
        "message_end",
        "tool_start",
        "tool_end",
        "message_start",
        "message_end",
        "message_start",
        "message_end",
    ]
    assert [event.is_error for event in events if isinstance(event, ToolEnd)] == [False, True]
    assert len([event for event in events if isinstance(event, StepEnd)]) == 3


def test_a_bug_in_a_hook_surfaces_and_the_list_stays_valid() -> None:
    class Broken(Hooks):
        def before_tool_call(self, call: ToolCall, ctx: ToolContext) -> Outcome[ToolResult | None]:
            raise ZeroDivisionError("a bug")

    messages: list[Message] = []
    with serve(
        Reply(calls=[("add", {"a": 1, "b": 1}), ("add", {"a": 2, "b": 2})]), Reply("fine")
    ) as server:
        with pytest.raises(ZeroDivisionError):
            ask(server, tools=[add], hooks=Broken(), messages=messages)
        assert [m["role"] for m in messages] == ["user", "assistant", "tool", "tool"]
        ask(server, "again", messages=messages)
        assert_all_valid(server)


def test_private_facts_and_roles_of_ones_own_stay_in_the_list_and_are_not_sent() -> None:
    messages: list[Message] = [{"role": "notification", "text": "a file changed"}]
    with serve(Reply("ok")) as server:
        ask(server, messages=messages)
        assert [m["role"] for m in server.requests[0]["messages"]] == ["user"]
    assert messages[0]["role"] == "notification" and "timestamp" in messages[1]["meta"]


def test_without_prompts_the_run_goes_on_from_the_list() -> None:
    messages = [user("go")]
    with serve(Reply("ok")) as server:
        events, result = drive(run_loop(messages, ChatModel("m", base_url=server.url), retry=FAST))
    assert result.text == "ok" and [e for e in types(events) if e == "message_start"] == [
        "message_start"
    ]


# ---- what is sent ----------------------------------------------------------------------------------------


def test_each_request_begins_with_the_bytes_of_the_one_before() -> None:
    bodies: list[str] = []

    def script(body: Body) -> Reply:
        bodies.append(json.dumps(body["messages"]))
        return call(a=len(bodies), b=0) if len(bodies) < 6 else Reply("done")

    with serve(script) as server:
        ask(server, tools=[add], system="be brief")
    for before, after in pairwise(bodies):
        assert after.startswith(before[:-1])


def test_a_request_holds_nothing_that_is_not_needed() -> None:
    with serve(Reply("ok")) as server:
        ask(server)
        assert set(server.requests[0]) == {"model", "messages", "stream", "stream_options"}


def test_runs_of_one_conversation_share_the_list_and_the_files_seen(tmp_path: Path) -> None:
    toolset = Toolset([add], cwd=tmp_path)
    messages: list[Message] = []
    with serve(Reply("one"), Reply("two")) as server:
        ask(server, "a", tools=toolset, messages=messages)
        ask(server, "b", tools=toolset, messages=messages)
        assert [m["content"] for m in server.requests[1]["messages"]] == ["a", "one", "b"]


def test_usage_is_summed_over_the_steps() -> None:
    with serve(call(), Reply("ok")) as server:
        events, result = ask(server, tools=[add])
    steps = [event.usage for event in events if isinstance(event, StepEnd)]
    assert result.usage.input == sum(u.input for u in steps) > 0 and not result.usage.estimated


def test_where_the_server_counts_no_tokens_there_is_an_estimate_that_says_so() -> None:
    with serve(Reply("a few words", usage=False)) as server:
        _, result = ask(server)
    assert result.usage.estimated and result.usage.input > 0 and result.usage.output > 0


def test_an_abort_that_is_set_before_the_run_sends_nothing() -> None:
    abort = Abort()
    abort.set()
    with serve(Reply("never")) as server:
        _, result = ask(server, abort=abort)
        assert server.requests == []
    assert (result.stop_reason, result.text) == ("aborted", "Request aborted.")


def test_an_abort_from_another_thread_ends_a_run_between_steps() -> None:
    abort = Abort()
    threading.Timer(0.3, abort.set).start()
    with counting() as server:
        _, result = ask(server, tools=[add], abort=abort, limits=Limits(max_steps=10**6))
        assert_all_valid(server)
    assert result.stop_reason == "aborted"


def test_a_hook_can_make_api_messages_of_its_own_roles() -> None:
    class Converting(Hooks):
        def convert_to_llm(self, messages: list[Message]) -> Outcome[list[Message]]:
            return [
                user(f"(notice: {m['text']})") if m["role"] == "notification" else m
                for m in messages
            ]

    messages: list[Message] = [
        {"role": "notification", "text": "a file changed"},
        {"role": "artifact", "data": 1},
    ]
    with serve(Reply("ok")) as server:
        ask(server, messages=messages, hooks=Converting())
        assert server.requests[0]["messages"] == [
            {"role": "user", "content": "(notice: a file changed)"},
            {"role": "user", "content": "go"},
        ]
    assert messages[0] == {"role": "notification", "text": "a file changed"}


def test_a_message_that_was_taken_from_a_queue_is_not_lost_at_a_limit() -> None:
    with serve(Reply("one")) as server:
        hooks = Queues()
        _, result = ask(server, "x", hooks=hooks, limits=Limits(max_steps=1))
    assert result.stop_reason == "max_steps" and [m["content"] for m in result.messages] == [
        "x",
        "one",
        "and now?",
    ]


def test_a_prompt_is_not_lost_when_the_run_is_aborted_before_it() -> None:
    abort = Abort()
    abort.set()
    with serve(Reply("never")) as server:
        _, result = ask(server, "keep me", abort=abort)
    assert [m["content"] for m in result.messages] == ["keep me"]


def test_a_failed_step_has_no_usage_of_its_own() -> None:
    with serve(call(), Reply("no", status=400)) as server:
        events, result = ask(server, tools=[add])
    steps = [event.usage.input for event in events if isinstance(event, StepEnd)]
    assert steps[1] == 0 and sum(steps) == result.usage.input


def test_a_title_that_cannot_be_made_breaks_nothing() -> None:
    @tool(title=lambda arguments: arguments["city"].upper())
    def weather(city: str) -> str:
        """Weather.

        city: where
        """
        return "fine"

    with serve(Reply(calls=[("weather", "{")]), Reply("ok")) as server:
        _, result = ask(server, tools=[weather])
    assert result.text == "ok"


def test_tools_that_could_not_work_are_refused_when_they_are_made() -> None:
    async def late() -> str:
        """Late."""
        return ""

    def any_number(*words: str) -> str:
        """Any.

        words: some
        """
        return ""

    for function in (late, any_number):
        with pytest.raises(TypeError):
            tool(function)


PLACES = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["x"],
    "additionalProperties": False,
}
PAIR = {"prefixItems": [{"type": "integer"}, {}], "items": False}
OLD_PAIR = {"items": [{"type": "integer"}, {}], "additionalItems": False}  # up to draft 2019-09
SPACED = {
    "properties": {"a": {"$ref": "#/$defs/a%20kind"}, "b": {"$ref": "#/$defs/kinds/anyOf/1"}},
    "$defs": {
        "a kind": {"type": "integer"},
        "kinds": {"anyOf": [{"type": "string"}, {"type": "boolean"}]},
    },
}
NAMED = {
    "patternProperties": {"^x": {}, "^z": {"type": "integer"}},
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "under": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["name"],
        }
    },
    "type": "object",
    "properties": {"tree": {"$ref": "#/$defs/node"}},
}


@pytest.mark.parametrize(
    ("schema", "arguments", "came"),
    [
        ({}, {"a": 1, "b": [None]}, {"a": 1, "b": [None]}),
        ({"type": "object"}, {}, {}),
        ({"type": "object", "properties": {"a": {}}}, {"a": {"b": "c"}}, {"a": {"b": "c"}}),
        ({"properties": {"a": {"type": "string"}}}, {"a": "x"}, {"a": "x"}),
        ({"properties": {"a": True}}, {"a": 3}, {"a": 3}),
        ({"properties": {"a": {"type": "array"}}}, {"a": "[1]"}, {"a": [1]}),
        (
            {"properties": {"a": {"type": ["string", "null"]}}, "required": ["a"]},
            {"a": None},
            {"a": None},
        ),
        ({"properties": {"a": {"type": "string"}}}, {"a": None}, {}),
        (
            {"properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "string"}]}}},
            {"a": "10"},
            {"a": "10"},
        ),
        (
            {"properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "array"}]}}},
            {"a": "[10]"},
            {"a": [10]},
        ),
        (
            {"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "null"}]}}},
            {"a": "x"},
            "t: a has to be of type integer, not",
        ),
        ({"properties": {"a": {"enum": ["x", 1, None]}}}, {"a": 1}, {"a": 1}),
        ({"properties": {"a": {"enum": ["x", 1]}}}, {"a": "y"}, "t: a has to be one of x, 1"),
        ({"properties": {"a": {"const": "x"}}}, {"a": "y"}, "t: a has to be one of x"),
        (
            {"properties": {"p": PLACES}},
            {"p": {"x": "3", "tags": "[]"}},
            {"p": {"x": 3, "tags": []}},
        ),
        ({"properties": {"p": PLACES}}, {"p": {"x": -1}}, "t: p.x has to be at least 0"),
        (
            {"properties": {"p": PLACES}},
            {"p": {"tags": []}},
            "t: p needs x. Its parameters: x, tags",
        ),
        (
            {"properties": {"p": PLACES}},
            {"p": {"x": 1, "tags": ["a", 5]}},
            "t: p.tags[1] has to be of type string, not 5",
        ),
        (
            {"properties": {"p": PLACES}},
            {"p": {"x": 1, "y": 2}},
            "t: p has no parameter y. Its parameters: x, tags",
        ),
        (
            {"properties": {"p": {"additionalProperties": {"type": "integer"}}}},
            {"p": {"k": "7"}},
            {"p": {"k": 7}},
        ),
        (
            TREE,
            {"tree": {"name": "a", "under": [{"name": "b"}]}},
            {"tree": {"name": "a", "under": [{"name": "b"}]}},
        ),
        (TREE, {"tree": {"name": "a", "under": [{"named": "b"}]}}, "t: tree.under[0] needs name"),
        ({"$ref": "#/$defs/p", "$defs": {"p": PLACES}}, {"x": 1}, {"x": 1}),
        ({"$ref": "#"}, {"x": 1}, {"x": 1}),
        (
            {"properties": {"a": {"allOf": [{"type": "string"}, {"enum": ["x"]}]}}},
            {"a": "y"},
            "t: a has to be one of x",
        ),
        (PLACES, {"x": 1, "y": 2}, "t has no parameter y. Its parameters: x, tags"),
        ({"properties": {"a": PAIR}}, {"a": ["1", 2]}, {"a": [1, 2]}),
        ({"properties": {"a": PAIR}}, {"a": ["x", 2]}, "t: a[0] has to be of type integer"),
        ({"properties": {"a": PAIR}}, {"a": [1, 2, 3]}, "t: a[2] must not be given"),
        ({"properties": {"a": OLD_PAIR}}, {"a": ["x", 2]}, "t: a[0] has to be of type integer"),
        ({"properties": {"a": OLD_PAIR}}, {"a": [1, 2, 3]}, "t: a[2] must not be given"),
        (SPACED, {"a": "x"}, "t: a has to be of type integer"),
        (SPACED, {"b": [1]}, "t: b has to be of type boolean"),
        ({"properties": {"p": NAMED}}, {"p": {"x": None, "z": "7"}}, {"p": {"x": None, "z": 7}}),
        ({"properties": {"p": NAMED}}, {"p": {"z": "x"}}, "t: p.z has to be of type integer"),
        ({"properties": {"p": NAMED}}, {"p": {"y": 1}}, "t: p has no parameter y"),
        ({"patternProperties": {r"^\p{L}+$": {}}}, {"a": None}, {"a": None}),
        (
            {"properties": {"from": {"type": "string"}}, "required": ["from"]},
            {},
            "t needs from. Its parameters: from",
        ),
    ],
)
def test_a_tool_may_have_any_schema(
    schema: dict[str, Any], arguments: dict[str, Any], came: Any
) -> None:
    """Written by hand; what the schema says is checked, however deep it stands."""
    given: list[Any] = []
    made = Tool("t", "Try.", schema, lambda **values: given.append(values))
    with serve(Reply(calls=[("t", arguments)]), Reply("done")) as server:
        _, result = ask(server, tools=[made])
        assert server.requests[0]["tools"][0]["function"]["parameters"]["type"] == "object"
    if isinstance(came, str):
        assert result.messages[2]["content"].startswith(f"Error: {came}") and not given, (
            result.messages[2]
        )
    else:
        assert given == [came], result.messages[2]


def test_records_with_a_type_are_no_content_blocks() -> None:
    @tool
    def pets() -> list[dict[str, str]]:
        """Pets."""
        return [{"type": "dog"}]

    with serve(Reply(calls=[("pets", {})]), Reply("ok")) as server:
        _, result = ask(server, tools=[pets])
    assert result.messages[2]["content"] == '[{"type": "dog"}]'


def test_a_page_of_a_file_is_not_cut_again_by_the_loop(tmp_path: Path) -> None:
    from coder.tools.files import read

    (tmp_path / "f").write_text("".join(f"line {number} {'x' * 50}\n" for number in range(1, 1001)))
    with serve(Reply(calls=[("read", {"path": "f"})]), Reply("ok")) as server:
        _, result = ask(server, tools=Toolset([read], cwd=tmp_path))
    page = result.messages[2]["content"]
    shown = [int(number) for number in re.findall(r"^(\d+)\t", page, re.M)]
    assert (
        "truncated" not in page
        and shown == list(range(1, len(shown) + 1))
        and f"offset={len(shown) + 1} " in page
    )
