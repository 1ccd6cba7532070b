"""The loop against a real server: the decision table, limits and texts, retries, the doom loop,
hooks, output."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest

from coder.abort import Abort
from coder.devtools.scripted import Reply, ScriptedServer
from coder.events import (
    DoomLoop,
    Event,
    MessageEnd,
    Notice,
    QuestionAsked,
    Retry,
    State,
    Status,
    StepEnd,
    ToolEnd,
)
from coder.history import user
from coder.hooks import FunctionHooks
from coder.tools.bash import bash
from coder.tools.files import ls, read
from coder.toolset import ToolContext, Toolset, tool
from coder.types import Limits, Message, ModelError
from tests.harness import ONE, add, all_of, ask, assert_all_valid, contents, quick, serve
from tests.terminal import promptly


@quick
def say(text: str) -> str:
    return text


def call(name: str = "add", **arguments: Any) -> Reply:
    return Reply(
        calls=[
            (
                name,
                arguments or {"a": 1, "b": 2},
            )
        ]
    )


def calling(finish: str) -> Reply:
    return Reply(calls=ONE.calls, finish=finish)


DONE = Reply("done")


# ---- the decision table and the states -----------------------------------------------------------

GUIDE = (Path(__file__).parent.parent / "docs" / "reading-guide.md").read_text()
FULL = Reply("This model's maximum context length is 8 tokens", status=400)
SMALL = {"model": {"context_window": 10}}  # tokens: any answer fills it
BUSY = Reply("no", status=503)
HALF = Reply("half", finish="length")


def hook(**functions: Any) -> dict[str, Any]:
    return {"hooks": FunctionHooks(**functions)}


def once(value: Any) -> Callable[..., Any]:
    """Give the value, or raise it, the first time."""
    values = [value]

    def give(*_: Any) -> Any:
        if values and isinstance(values[0], Exception):
            raise values.pop()
        return [values.pop()] if values else []

    return give


AS_TEXT = Reply('<tool_call>{"name": "add"}</tool_call>')
ANNOUNCED = Reply("I will add:")
SHORTER = hook(on_length=lambda m, trigger, usage, abort: trigger != "threshold")
MORE = user("more")
REFUSED = ModelError("bad_request", "not today")
NOT_YET = ModelError("server", "not yet", retryable=True)


@dataclass
class Row:
    """What follows on the replies of a server."""

    replies: list[Reply]
    stop_reason: str
    text: str  # its beginning
    requests: int
    states: str
    options: dict[str, Any] = field(default_factory=dict)


# By what the answer has, and the condition, as the table of docs/reading-guide.md has them
ROWS: dict[tuple[str, str], list[Row]] = {
    ("an error", "the context overflowed"): [
        Row(
            replies=[FULL, DONE],
            options=SHORTER,
            stop_reason="stop",
            text="done",
            requests=2,
            states="preparing asking compacting preparing asking finishing ended",
        ),
        Row(
            replies=[FULL],
            stop_reason="length",
            text="Context limit reached.",
            requests=1,
            states="preparing asking compacting ended",
        ),
    ],
    ("an error, or a cut stream", "worth another try"): [
        Row(
            replies=[BUSY, DONE],
            stop_reason="stop",
            text="done",
            requests=2,
            states="preparing asking waiting preparing asking finishing ended",
        ),
        Row(
            replies=[Reply("half", cut=1), DONE],
            stop_reason="stop",
            text="done",
            requests=2,
            states="preparing asking waiting preparing asking finishing ended",
        ),
    ],
    ("an error", "of any other kind"): [
        Row(
            replies=[Reply("no", status=404)],
            stop_reason="error",
            text="Error: ",
            requests=1,
            states="preparing asking ended",
        )
    ],
    ("anything", "finish_reason `content_filter`"): [
        Row(
            replies=[Reply("some", finish="content_filter")],
            stop_reason="content_filter",
            text="some",
            requests=1,
            states="preparing asking ended",
        ),
        Row(
            replies=[calling("content_filter")],
            stop_reason="content_filter",
            text="The provider",
            requests=1,
            states="preparing asking ended",
        ),
    ],
    ("tool calls", "finish_reason `length`"): [
        Row(
            replies=[calling("length"), DONE],
            stop_reason="stop",
            text="done",
            requests=2,
            states="preparing asking running_tools preparing asking finishing ended",
        )
    ],
    ("tool calls", "any other finish_reason"): [
        Row(
            replies=[ONE, DONE],
            stop_reason="stop",
            text="done",
            requests=2,
            states="preparing asking running_tools preparing asking finishing ended",
        ),
        Row(
            replies=[calling("stop"), DONE],
            stop_reason="stop",
            text="done",
            requests=2,
            states="preparing asking running_tools preparing asking finishing ended",
        ),
    ],
    ("no calls", "`length`, and the context is at least 80 % full"): [
        Row(
            replies=[HALF],
            options=SMALL,
            stop_reason="length",
            text="half",
            requests=1,
            states="preparing asking compacting ended",
        ),
        Row(
            replies=[HALF, DONE],
            options={**SMALL, **SHORTER},
            stop_reason="stop",
            text="done",
            requests=2,
            states="preparing asking compacting preparing asking finishing ended",
        ),
    ],
    ("no calls", "`length` otherwise"): [
        Row(
            replies=[HALF],
            stop_reason="length",
            text="half",
            requests=1,
            states="preparing asking finishing ended",
        ),
        Row(
            replies=[Reply("", finish="length")],
            stop_reason="length",
            text="The answer was cut",
            requests=1,
            states="preparing asking finishing ended",
        ),
    ],
    ("no text and no calls", "the first time in this step, and not after tool results"): [
        Row(
            replies=[Reply(""), DONE],
            stop_reason="stop",
            text="done",
            requests=2,
            states="preparing asking waiting preparing asking finishing ended",
        ),
        Row(
            replies=[Reply(""), Reply("")],
            stop_reason="stop",
            text="Task completed.",
            requests=2,
            states="preparing asking waiting preparing asking finishing ended",
        ),
        Row(
            replies=[ONE, Reply("")],
            stop_reason="stop",
            text="Task completed.",
            requests=2,
            states="preparing asking running_tools preparing asking finishing ended",
        ),
        Row(
            replies=[Reply("", finish="tool_calls")] * 2,
            stop_reason="stop",
            text="Task completed.",
            requests=2,
            states="preparing asking waiting preparing asking finishing ended",
        ),
        Row(
            replies=[ONE, Reply("", finish="tool_use")],
            stop_reason="stop",
            text="Task completed.",
            requests=2,
            states="preparing asking running_tools preparing asking finishing ended",
        ),
    ],
    (
        "no calls",
        "a tool call as text, or before any call an announcement (a text that ends with `:`)",
    ): [
        Row(
            replies=[AS_TEXT, DONE],
            stop_reason="stop",
            text="done",
            requests=2,
            states="preparing asking finishing preparing asking finishing ended",
        ),
        Row(
            replies=[AS_TEXT],
            stop_reason="error",
            text="Error: the model called no tool",
            requests=2,
            states="preparing asking finishing preparing asking finishing ended",
        ),
        Row(
            replies=[ANNOUNCED, ONE, ANNOUNCED],
            stop_reason="stop",
            text="I will add:",
            requests=3,
            states="preparing asking finishing preparing asking running_tools preparing asking finishing ended",
        ),
    ],
    ("no calls", "any other finish_reason"): [
        Row(
            replies=[DONE],
            stop_reason="stop",
            text="done",
            requests=1,
            states="preparing asking finishing ended",
        ),
        Row(
            replies=[DONE],
            options=SMALL,
            stop_reason="stop",
            text="done",
            requests=1,
            states="preparing asking finishing ended",
        ),
    ],
}
OTHERS: list[Row] = [
    Row(
        replies=[DONE],
        options=hook(get_follow_up_messages=once(MORE)),
        stop_reason="stop",
        text="done",
        requests=2,
        states="preparing asking finishing preparing asking finishing ended",
    ),
    Row(
        replies=[ONE],
        options={"limits": Limits(max_steps=1)},
        stop_reason="max_steps",
        text="Max steps",
        requests=1,
        states="preparing asking running_tools preparing ended",
    ),
    Row(
        replies=[ONE],
        stop_reason="doom_loop",
        text="Stopped: add",
        requests=4,
        states="preparing asking running_tools " * 4 + "ended",
    ),
    Row(
        replies=[BUSY],
        options={"limits": Limits(max_errors=1)},
        stop_reason="error",
        text="Error: no",
        requests=1,
        states="preparing asking ended",
    ),
    Row(
        replies=[DONE],
        options=hook(before_llm_call=once(NOT_YET)),
        stop_reason="stop",
        text="done",
        requests=1,
        states="preparing waiting preparing asking finishing ended",
    ),
    Row(
        replies=[DONE],
        options=hook(before_llm_call=once(REFUSED)),
        stop_reason="error",
        text="Error: not today",
        requests=0,
        states="preparing ended",
    ),
]


@pytest.mark.parametrize(
    "case",
    [*ROWS, ()],
    ids=" · ".join,
)
def test_what_follows_on_an_answer(case: Any) -> None:
    for row in ROWS.get(case, OTHERS):
        with serve(*row.replies) as server:
            events, result = ask(server, tools=[add], **row.options)
        assert result.stop_reason == row.stop_reason
        assert result.text[: len(row.text)] == row.text
        assert len(server.requests) == row.requests
        assert [event.state for event in all_of(Status, events)] == row.states.split()


def test_the_reading_guide_has_these_rows_and_draws_the_ways_that_these_runs_take() -> None:
    table = GUIDE.partition("| the answer has |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| (.+?) \| (.+?) \| .+? \|$", table, re.M) == [*ROWS]
    drawing = GUIDE.split("```mermaid\n")[1].split("\n```")[0]
    drawn = set(re.findall(r"(\w+) --> (\w+)", drawing)) - {("run", "ended")}
    rows = [row for rows in ROWS.values() for row in rows] + OTHERS
    assert {way for row in rows for way in pairwise(row.states.split())} == drawn
    assert {state for row in rows for state in row.states.split()} == {*get_args(State)}


# ---- how a run ends ------------------------------------------------------------------------------


def test_an_empty_answer_is_asked_for_once_more_and_both_are_paid_for() -> None:
    with serve(Reply("")) as server:
        events, result = ask(server)
        assert result.usage.input == sum(len(json.dumps(body)) // 4 for body in server.requests)
    assert [e.error.message for e in events if isinstance(e, Retry)] == ["the answer was empty"]


def test_attempts_are_numbered_one_after_the_other_whatever_made_them_fail() -> None:
    """An empty answer is no error: five attempts fail here, and five errors would end the run."""
    with serve(BUSY, Reply(""), BUSY, BUSY, BUSY, DONE) as server:
        events, result = ask(server)
    retries = [(event.attempt, event.error.kind) for event in all_of(Retry, events)]
    kinds = ["server", "empty", "server", "server", "server"]
    assert retries == list(zip([1, 2, 3, 4, 5], kinds))
    assert result.text == "done"


@pytest.mark.case("NET-08")
def test_an_answer_cut_inside_its_calls_runs_none_of_them(tmp_path: Path) -> None:
    """Neither the one with valid arguments nor the one that is cut."""

    @quick
    def touch(path: str) -> None:
        (tmp_path / path).touch()

    calls = [("touch", {"path": "a"}), ("touch", '{"path": "b')]
    with serve(
        Reply("Writing.", calls=calls, finish="length"),
        Reply("smaller"),
    ) as server:
        _, result = ask(server, tools=[touch])
        assert_all_valid(server)
    assert list(tmp_path.iterdir()) == []
    assert result.stop_reason == "stop"
    results = contents(result.messages, "tool")
    assert len(results) == 2
    assert all("cut at the output limit" in each for each in results)


def test_an_overflow_is_compacted_at_most_twice_between_two_answers() -> None:
    triggers = list[str]()
    compacted = list[int]()

    def shorten(messages: list[Message], trigger: str, *_: Any) -> bool:
        triggers.append(trigger)
        messages[:-1] = [] if trigger != "threshold" else messages[:-1]
        return trigger != "threshold"

    hooks = FunctionHooks(
        on_length=shorten,
        on_compacted=lambda m: compacted.append(len(m)),
    )
    with serve(FULL) as server:
        _, result = ask(server, hooks=hooks)
        assert len(server.requests) == 3
    assert result.stop_reason == "length"
    assert result.error
    assert result.error.kind == "overflow"
    assert triggers == ["threshold", "overflow"] * 2
    assert len(compacted) == 2
    with serve(FULL, FULL, call(), FULL, FULL, DONE) as server:
        _, result = ask(server, hooks=hooks, tools=[add])
        assert_all_valid(server)
    assert result.text == "done"
    assert len(compacted) == 6


@pytest.mark.parametrize(
    "content",
    ["", None, 7, {"pruned": True}],
)
def test_messages_that_a_hook_changes_in_place_are_repaired(content: Any) -> None:
    def prune(messages: list[Message], *_: Any) -> bool:
        old = [each for each in messages[:-2] if each["role"] == "tool" and each["content"] == "3"]
        for message in old:
            message["content"] = content
        return bool(old)

    with serve(ONE, calling("tool_calls"), DONE) as server:
        ask(server, tools=[add], hooks=FunctionHooks(on_length=prune))
        assert_all_valid(server)
        first, _ = (each for each in server.requests[-1]["messages"] if each["role"] == "tool")
    assert first["content"] not in ("3", "")
    assert isinstance(first["content"], str)


# ---- limits ---------------------------------------------------------------------------------


def counting() -> ScriptedServer:
    """A model that calls for ever, each time with other arguments."""
    numbers = iter(range(10**6))
    return serve(lambda body: call(a=next(numbers), b=0))


@pytest.mark.case("INV-10")
def test_the_step_limit_ends_each_run_with_its_words() -> None:
    messages: list[Message] = []
    with counting() as server:
        for _ in range(2):
            _, result = ask(
                server,
                tools=[add],
                limits=Limits(max_steps=3),
                messages=messages,
            )
        assert len(server.requests) == 6
        assert_all_valid(server)
    assert result.stop_reason == "max_steps"
    assert result.steps == 3
    assert result.text == "Max steps reached, task may be incomplete."


def test_the_time_limit_ends_the_run_as_an_abort_would() -> None:
    @quick
    def wait(ctx: ToolContext) -> None:
        ctx.abort.wait(60)

    with serve(Reply(calls=[("wait", {})])) as server, promptly():
        _, result = ask(
            server,
            tools=[wait],
            limits=Limits(max_seconds=0.3),
        )
    assert result.stop_reason == "max_time"
    assert result.text == "Time limit of 0.3 s reached, task may be incomplete."


# ---- retries --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        *(Reply("busy", status=status) for status in (429, 500, 503, 529)),
        Reply(status=0),
        Reply("half", cut=2),
        Reply("half", cut=2, close="reset"),
        Reply(chunks=[b"data: {oops\n\n"]),
        Reply(chunks=[b'data: {"error": {"message": "overloaded"}}\n\n']),
    ],
    ids=lambda r: f"{r.status}-{r.close}-{r.cut}-{bool(r.chunks)}",
)
def test_a_transient_failure_is_tried_again_and_leaves_no_trace(bad: Reply) -> None:
    """NET-01 to NET-07. A good answer resets the count of failures."""
    with serve(
        *[bad] * 4,
        call(),
        *[bad] * 4,
        Reply("fine"),
    ) as server:
        events, result = ask(server, tools=[add])
    attempts = [event.attempt for event in all_of(Retry, events)]
    # A connection that was kept open and is closed by the server is opened again without a word
    assert attempts[:4] == [1, 2, 3, 4]
    assert attempts[4:] in (
        [1, 2, 3, 4],
        [1, 2, 3],
    )
    assert contents(result.messages) == ["go", None, "3", "fine"]


@pytest.mark.case("NET-07")
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "bad_request"),
        (401, "auth"),
        (403, "auth"),
        (404, "not_found"),
        (402, "quota"),
    ],
)
def test_a_final_error_is_not_tried_again(status: int, kind: str) -> None:
    with serve(call(), Reply("no such thing", status=status)) as server:
        events, result = ask(server, tools=[add])
        assert len(server.requests) == 2
    where = f" at {server.url}/chat/completions" if status == 404 else ""
    assert result.text == f"Error: no such thing{where}"
    assert result.error
    assert result.error.kind == kind
    steps = [event.usage.input for event in all_of(StepEnd, events)]
    assert steps[1] == 0
    assert sum(steps) == result.usage.input


# ---- calls that are only written ------------------------------------------------------------

CALL = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
TEXT_CALLS = {
    "Qwen, Hermes": f"<tool_call>\n{CALL}\n</tool_call>",
    "Qwen3-Coder": "<tool_call>\n<function=add>\n<parameter=a>1</parameter>\n</function>\n</tool_call>",
    "Qwen3-Coder without the tag": "<function=add>\n<parameter=a>1</parameter>\n</function>",
    "GLM": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "Mistral": f"[TOOL_CALLS][{CALL}]",
    "Mistral, newer": '[TOOL_CALLS]add{"a": 1}',
    "Llama": "<|python_tag|>add(a=1, b=2)",
    "Llama, JSON": '{"name": "add", "parameters": {"a": 1}}',
    "Kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0",
    "DeepSeek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add",
    "Anthropic": '<function_calls>\n<invoke name="add">\n<parameter name="a">1</parameter>',
    "harmony": '<|channel|>commentary to=functions.add <|message|>{"a": 1}',
    "ReAct": 'Thought: add them.\nAction: add\nAction Input: {"a": 1}',
    "Gemma": "```tool_code\nadd(a=1, b=2)\n```",
    "pythonic": "[add(a=1, b=2)]",
    "Cline": "<add>\n<a>1</a>\n<b>2</b>\n</add>",
    "JSON": CALL,
    "fenced JSON": f"Let me add them.\n```json\n{CALL}\n```",
    "long": "thinking " * 800 + f"<tool_call>{CALL}</tool_call>" + " more" * 2000,
}


@pytest.mark.parametrize("form", TEXT_CALLS)
def test_a_call_as_text_is_asked_for_once_more_with_the_reason(form: str) -> None:
    with serve(Reply(TEXT_CALLS[form]), ONE, Reply("done")) as server:
        events, result = ask(server, tools=[add])
        assert_all_valid(server)
        told = server.requests[1]["messages"][-1]
    reason = "Nothing was run: your answer holds a tool call written as text. "
    way = "Call the tool itself (add), or answer without such markup."
    assert told == {"role": "user", "content": reason + way}
    assert result.text == "done"
    assert "is asked once more" in all_of(Notice, events)[0].text


@pytest.mark.parametrize(
    "text",
    [
        "The model should write `<tool_call>{...}</tool_call>` here.",
        'Its parser looks for `<invoke name="add">`, as in the docs.',
        "<tool_call> is a tag of Qwen.",
        '{"name": "add"}',
        '{"name": "other", "arguments": {}}',
        "[other(a=1)]",
        "Use it so:\n```python\nadd(a=1, b=2)\n```",
        "<p>\n<b>bold</b>\n</p>",
        "The sum is 3.",
    ],
)
def test_what_only_speaks_of_a_call_is_an_answer(text: str) -> None:
    with serve(Reply(text)) as server:
        _, result = ask(server, tools=[add])
    assert result.stop_reason == "stop"
    assert result.text == text
    assert len(server.requests) == 1


def test_without_tools_nothing_is_taken_for_a_call() -> None:
    with serve(Reply(TEXT_CALLS["JSON"])) as server:
        assert ask(server)[1].stop_reason == "stop"


# ---- the doom loop --------------------------------------------------------------------------


@pytest.mark.case("INV-10")
def test_the_third_identical_call_is_answered_unrun_and_the_fourth_ends_the_run() -> None:
    order = [
        {"a": 1, "b": 2},
        {"b": 2, "a": 1},
        {"a": 1, "b": 2},
        {"a": 1, "b": 2},
    ]
    answered: list[float] = []

    def each(event: Event) -> None:
        if isinstance(event, DoomLoop):
            time.sleep(0.05)  # the user's time, which is not the tool's
            answered.append(time.monotonic())
        if isinstance(event, ToolEnd) and answered:
            assert event.seconds <= time.monotonic() - answered[0]

    with serve(*(Reply(calls=[("add", arguments)]) for arguments in order)) as server:
        events, result = ask(server, tools=[add], each=each)
        assert_all_valid(server)
    assert result.stop_reason == "doom_loop"
    assert result.steps == 4
    assert [event.count for event in all_of(DoomLoop, events)] == [3]
    outputs = contents(result.messages, "tool")
    assert outputs[:2] == ["3", "3"]
    assert "3 times in a row" in outputs[2]
    assert len(outputs) == 4


def test_equal_calls_of_one_answer_run_once_and_count_once() -> None:
    five = Reply(calls=[("add", {"a": 1, "b": 1})] * 5)
    with serve(five, five, Reply("done")) as server:
        events, result = ask(server, tools=[add])
        assert_all_valid(server)
    assert result.text == "done"
    above = "Same call as above in this answer; its result is above."
    assert contents(result.messages, "tool") == ["2", *[above] * 4] * 2
    assert not any(event.is_error for event in all_of(ToolEnd, events))


def test_an_equal_call_runs_again_after_a_concurrent_tool_that_may_change_things() -> None:
    steps: list[str] = []

    @tool(concurrent=True, default="allow")
    def look() -> str:
        """Look."""
        return f"{len(steps)} steps"

    @tool(concurrent=True, may_change=True, default="allow")
    def work() -> str:
        """Work."""
        steps.append("one")
        return "done"

    calls = [("look", {}), ("work", {}), ("look", {})]
    with serve(Reply(calls=calls), Reply("done")) as server:
        _, result = ask(server, tools=[look, work])
    assert contents(result.messages, "tool") == ["0 steps", "done", "1 steps"]


def test_equal_calls_of_one_answer_run_again_after_a_change(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("old\n")
    test = ("bash", {"command": "cat f"})
    change = ("bash", {"command": "echo new > f"})
    looks = [
        ("read", {"path": "f"}),
        ("ls", {}),
        ("read", {"path": "f"}),
    ]
    with serve(
        Reply(calls=[test, change, test, test, *looks]),
        Reply("done"),
    ) as server:
        _, result = ask(
            server,
            tools=Toolset([bash, read, ls], cwd=tmp_path),
        )
    old, _, new, again, first, _, second = contents(result.messages, "tool")
    assert old == "old"
    assert new == "new"
    assert first == "new"
    assert again == second == "Same call as above in this answer; its result is above."


def numbered(*numbers: int) -> list[Reply]:
    return [call(a=number, b=0) for number in numbers]


def test_another_call_resets_the_count() -> None:
    same = call(a=1, b=1)
    other = call(a=2, b=2)
    with serve(same, same, other, same, same, Reply("done")) as server:
        assert ask(server, tools=[add])[1].text == "done"


CYCLES = {"A,B": 2, "A,B,C": 3, "eight in turn": 8}


@pytest.mark.parametrize(
    ("length", "most"),
    [(2, 16), (3, 20), (8, 20)],
    ids=CYCLES,
)
def test_a_cycle_that_brings_nothing_new_is_told_and_ends(length: int, most: int) -> None:
    cycle = numbered(*range(length)) * 20
    with serve(*cycle) as server:
        _, result = ask(
            server,
            tools=[add],
            limits=Limits(max_steps=100),
        )
        assert_all_valid(server)
        outputs = contents(server.requests[-1]["messages"], "tool")
    assert result.stop_reason == "doom_loop"
    assert len(server.requests) == length + 12 <= most
    assert result.text == "Stopped: the last 12 calls brought nothing new."
    note = "[Nothing new in the last 8 calls: they repeat. Change the approach, or end with what is in the way.]"
    assert [at for at, output in enumerate(outputs) if note in output] == [length + 7]


def test_the_note_comes_with_the_next_result_if_the_eighth_call_is_refused() -> None:
    first, second = numbered(0, 1)
    seven_without_news = [first, second, first, second, first, second, second]
    refused = second
    with serve(
        first,
        second,
        *seven_without_news,
        refused,
        *[first, second] * 4,
    ) as server:
        _, result = ask(
            server,
            tools=[add],
            limits=Limits(max_steps=100),
        )
        outputs = contents(server.requests[-1]["messages"], "tool")
    assert outputs[9].startswith("Not run: add was called 3 times in a row")
    note = "[Nothing new in the last 8 calls: they repeat. "
    assert [at for at, output in enumerate(outputs) if note in output] == [10]
    assert result.text == "Stopped: the last 12 calls brought nothing new."


def test_what_changes_is_never_taken_for_a_loop() -> None:
    polls = 0

    def poll() -> str:
        nonlocal polls
        polls += 1
        return f"{polls} of 20 done"

    with serve(
        *[Reply(calls=[("poll", {})])] * 20,
        Reply("done"),
    ) as server:
        _, result = ask(
            server,
            tools=[quick(poll)],
            limits=Limits(max_steps=50),
        )
    assert result.text == "done"
    assert polls == 20
    many = Reply(calls=[("add", {"a": number, "b": 0}) for number in range(30)])
    for replies in ([many], [many, many]):  # the second time the model has not read the note yet
        with serve(*replies, Reply("done")) as server:
            assert ask(server, tools=[add])[1].text == "done"


def test_a_user_may_let_a_cycle_go_on() -> None:
    def allow(event: Event) -> None:
        if isinstance(event, DoomLoop):
            event.reply(True)

    with serve(*numbered(1, 2) * 12, Reply("done")) as server:
        events, result = ask(
            server,
            tools=[add],
            each=allow,
            limits=Limits(max_steps=50),
        )
    assert result.text == "done"
    assert [event.count for event in all_of(DoomLoop, events)] == [12]


def test_a_consumer_may_let_the_repeated_call_run() -> None:
    with serve(*[call()] * 3, Reply("done")) as server:
        allow = lambda event: event.reply(True) if isinstance(event, DoomLoop) else None  # noqa: E731
        _, result = ask(server, tools=[add], each=allow)
    assert result.text == "done"
    assert contents(result.messages, "tool") == ["3"] * 3


# ---- tools in the loop ----------------------------------------------------------------------


A = "a" * 15_000
C = "c" * 15_000
PETS = [{"type": "dog"}]


@pytest.mark.case("INV-09")
@pytest.mark.parametrize(
    ("output", "sent"),
    [
        ("", "(no output)"),
        ("half \ud83d, nul \0, pair \ud83d\ude00", "half \ufffd, nul \ufffd, pair \U0001f600"),
        (PETS, '[{"type": "dog"}]'),
        (A + "b" * 5_000 + C, f"{A}\n\n... [truncated 5000 characters] ...\n\n{C}"),
        ("x" * 30_000, "x" * 30_000),
    ],
    ids=["empty", "no encoder takes it", "records are no content blocks", "long", "at the limit"],
)
def test_output_as_it_is_sent(output: Any, sent: str) -> None:
    @quick
    def tell() -> Any:
        return output

    with serve(
        Reply(calls=[("tell", {})]),
        Reply("ok"),
    ) as server:
        ask(server, "in \udc00put", tools=[tell])
        assert_all_valid(server)
        assert server.requests[1]["messages"][-1]["content"] == sent


def test_a_title_that_cannot_be_made_breaks_nothing() -> None:
    shouting = tool(title=lambda arguments: arguments["city"].upper(), name="shout")
    with serve(
        Reply(calls=[("shout", "{")]),
        Reply("ok"),
    ) as server:
        assert (
            ask(
                server,
                tools=[shouting(say.function)],
            )[1].text
            == "ok"
        )


# ---- hooks ----------------------------------------------------------------------------------


def test_a_follow_up_is_not_lost_at_a_limit() -> None:
    left = [[user("and now?")]]
    hooks = FunctionHooks(get_follow_up_messages=lambda: left.pop() if left else [])
    with serve(Reply("one")) as server:
        _, result = ask(
            server,
            "x",
            hooks=hooks,
            limits=Limits(max_steps=1),
        )
    assert result.stop_reason == "max_steps"
    assert contents(result.messages) == ["x", "one", "and now?"]


# ---- what is sent ---------------------------------------------------------------------------


def test_a_list_that_a_hook_makes_for_a_request_is_repaired() -> None:
    def newest(messages: list[Message], abort: Abort) -> list[Message]:
        return [user("In short."), *messages[-1:]]

    with serve(ONE, DONE) as server:
        ask(server, tools=[add], hooks=FunctionHooks(transform_context=newest))
        assert_all_valid(server)
        assert contents(server.requests[-1]["messages"]) == ["In short."]


def test_an_abort_before_the_run_sends_nothing_and_keeps_the_prompt() -> None:
    abort = Abort()
    abort.set()
    with serve(Reply("never")) as server:
        _, result = ask(server, "keep me", abort=abort)
        assert server.requests == []
    assert result.stop_reason == "aborted"
    assert result.text == "Request aborted."
    assert contents(result.messages) == ["keep me"]


# ---- what a result, a total and a time hold ------------------------------------------------------


def test_a_message_that_a_hook_adds_before_an_interrupt_is_taken_for_no_result() -> None:
    messages = list[Message]()
    events = list[Event]()

    def interrupt(*_: Any) -> None:
        messages.append(user("mine"))
        raise KeyboardInterrupt

    hooks = FunctionHooks(before_tool_call=interrupt)
    two = Reply(calls=[("add", {"a": 1, "b": b}) for b in (1, 2)])
    with serve(two) as server, pytest.raises(KeyboardInterrupt):
        ask(
            server,
            tools=[add],
            messages=messages,
            hooks=hooks,
            each=events.append,
        )
    [step] = all_of(StepEnd, events)
    assert step.tool_results == messages[2:4]
    assert contents(messages)[4:] == ["mine"]
    assert [event.message for event in all_of(MessageEnd, events)] == messages[:4]


def test_the_output_of_an_aborted_tool_is_truncated_once() -> None:
    abort = Abort()

    @tool
    def flood(ctx: ToolContext) -> object:
        """Write much, then be aborted."""
        yield ctx.update("x" * 100_000)
        abort.set()
        abort.check()

    with serve(Reply(calls=[("flood", {})])) as server:
        _, result = ask(server, tools=[flood], abort=abort)
    text = result.messages[-1]["content"]
    assert text.endswith("[aborted by the user]")
    assert 29_900 < len(text) <= 30_000
    assert len(re.findall(r"truncated \d+ characters", text)) == 1


def test_the_time_of_a_tool_is_without_that_of_hooks_and_of_the_user() -> None:
    def choose() -> Generator[Event, None, str]:
        question = QuestionAsked("q", "Which?", ["one"])
        yield question
        return str(question.answer)

    begun = list[float]()

    def hesitate(*_: Any) -> None:
        time.sleep(0.05)  # the hook's time
        begun.append(time.monotonic())

    def check(*_: Any) -> None:
        time.sleep(0.05)

    def each(event: Event) -> None:
        if isinstance(event, QuestionAsked):
            time.sleep(0.05)  # the user's
        elif isinstance(event, ToolEnd):
            assert 0 <= event.seconds <= time.monotonic() - begun[0] - 0.1

    hooks = FunctionHooks(before_tool_call=hesitate, after_tool_call=check)
    with serve(Reply(calls=[("choose", {})]), DONE) as server:
        ask(server, tools=[quick(choose)], each=each, hooks=hooks)
    assert begun


def test_a_call_without_usable_arguments_reaches_no_hook() -> None:
    called: list[str] = []
    hooks = FunctionHooks(before_tool_call=lambda call, ctx: called.append(call.name))
    with serve(
        Reply(calls=[("add", "[not an object")]),
        call(),
        Reply("done"),
    ) as server:
        _, result = ask(server, tools=[add], hooks=hooks)
    assert called == ["add"]
    assert result.text == "done"
    assert [each["role"] for each in result.messages].count("tool") == 2
