"""Sub-agents on the screen: whose line is whose, what stands in the status line, and how their questions look."""

from __future__ import annotations

import io
import re
from pathlib import Path

from coder.cli.render import Renderer
from coder.cli.screen import Screen
from coder.cli.workers import Subagents
from coder.devtools.scripted import Body, Reply
from coder.events import (
    Event,
    MessageEnd,
    Nested,
    Notice,
    RunEnd,
    RunStart,
    StepStart,
    TextDelta,
    ToolEnd,
    ToolStart,
    ToolUpdate,
)
from coder.types import ToolResult, Usage
from tests.harness import serve
from tests.terminal import Terminal

OWN = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]|\x1b\][^\x07]*\x07|\x1b[78]")
QUESTION = "or why not: "


def told(*events: Event, verbose: bool = False) -> str:
    """What a renderer puts on a screen that is no terminal."""
    stream = io.StringIO()
    render = Renderer(Screen(stream), verbose=verbose)
    for event in events:
        render(event)
    return stream.getvalue()


def of(agent: str, session: str, *events: Event) -> list[Event]:
    return [Nested(agent, event, session) for event in events]


def tool(
    call_id: str, title: str, output: str = "out", *, failed: bool = False, diff: str = ""
) -> list[Event]:
    result = ToolResult(output, failed, {"diff": diff} if diff else {})
    return [ToolStart(call_id, "bash", {}, title), ToolEnd(call_id, "bash", result, failed, 0.0)]


def test_each_call_of_a_child_is_a_line_with_its_name_and_its_words_are_not_ours() -> None:
    text = told(
        TextDelta("Ours "),
        *of("explore", "s1", RunStart(), TextDelta("theirs"), *tool("1", "ls src")),
        *of("explore", "s2", RunStart(), *tool("1", "grep x")),
        *of("explore", "s1", *tool("2", "cat y", "no\nsuch", failed=True)),
        TextDelta("again"),
        *of("explore", "s1", RunEnd("stop", "theirs", Usage(1200, 30), 3)),
        *of(
            "explore",
            "s2",
            Notice("look"),
            *tool("3", "edit f", diff="--- a\n+++ b\n@@ -1 +1,2 @@\n-x\n+y\n+z"),
        ),
    )
    lines = [re.sub(r"\d\.\d s$", "T", line) for line in text.splitlines()]
    assert lines == [
        "Ours ",
        "  explore ● ls src",
        "  explore 2 ● grep x",
        "  explore ✗ cat y",
        "  explore │ no",
        "again",
        "  explore done · 3 steps · 1.2k in, 30 out · T",
        "  explore 2: look",
        "  explore 2 ● edit f  +2 -1",
    ]


def test_with_v_words_and_outputs_of_children_are_shown_with_their_names() -> None:
    said = MessageEnd({"role": "assistant", "content": "I found\ntwo"})
    text = told(*of("explore", "s", *tool("1", "ls", "a\nb"), said), verbose=True)
    assert text.splitlines() == [
        "  explore ● ls",
        "  explore │ a",
        "  explore │ b",
        "  explore │ I found",
        "  explore │ two",
    ]


def follow(*events: Event) -> Subagents:
    render = Renderer(Screen(io.StringIO()))
    for event in events:
        render(event)
    return render.subagents


def test_the_status_line_is_shared_by_those_who_are_at_work() -> None:
    long = "a very long title " * 9
    events = [
        *of("explore", "s1", RunStart(), *tool("1", "first call")[:1]),
        *of("general", "s2", StepStart(1), TextDelta("x")),
        *of("explore", "s3", *tool("1", long)[:1], ToolUpdate("1", "line\nlast line\n")),
    ]
    shown = follow(*events).activity(78)
    assert shown.startswith("explore: first call · general: writing · explore 2: a very long")
    assert len(shown) <= 78 and len(follow(*events).activity(20).split(" · ")) == 3
    events += of("explore", "s1", RunEnd("stop", "", Usage(), 1))
    assert follow(*events).activity(78).startswith("general: writing · explore 2: ")


def test_a_compaction_inside_a_child_is_the_childs_and_one_of_ours_is_no_child() -> None:
    assert not follow(Nested("compaction", RunStart())).active
    inside = Nested("explore", Nested("compaction", RunStart()), "s1")
    assert follow(inside).activity(80) == "explore: shortening the conversation"


def test_a_run_that_begins_forgets_the_children_of_the_one_before() -> None:
    first, second = (of("explore", name, *tool("1", name)) for name in ("s1", "s2"))
    assert told(*first, RunStart(), *second).splitlines() == ["  explore ● s1", "  explore ● s2"]


def script(body: Body) -> Reply:
    """Two tasks side by side, whose agents ask for a command each; then the end."""
    first = next(message["content"] for message in body["messages"] if message["role"] == "user")
    done = body["messages"][-1]["role"] == "tool"
    if first.startswith("child "):
        return (
            Reply(f"{first} is done")
            if done
            else Reply(calls=[("bash", {"command": f"touch {first[6:]}"})])
        )
    tasks = [
        ("task", {"description": name, "prompt": f"child {name}", "agent": "general"})
        for name in ("one", "two")
    ]
    return Reply("Both.") if done else Reply(calls=tasks)


def test_a_childs_question_reaches_the_person_with_its_name_and_is_answered_for_it_alone(
    tmp_path: Path,
) -> None:
    with serve(script) as server, Terminal(tmp_path, server) as session:
        session.enter("go")
        made = []
        for answer in ("y", "no, not this"):
            asked = OWN.sub("", session.expect(QUESTION))
            who, name = re.findall(
                r"(general[^\r]*) asks: Run this command\?\r\n +touch (\w+)", asked
            )[-1]
            made.append((who, name))
            session.enter(answer)
        ended = OWN.sub("", session.prompt())
        assert {name for _, name in made} == {"one", "two"} and all(
            who == f"general ({name})" for who, name in made
        ), "by their calls"
        assert (session.ws / made[0][1]).exists() and not (session.ws / made[1][1]).exists()
        assert f"{made[1][0]} ✗ bash touch {made[1][1]}" in ended and "Both." in ended
        assert all(re.search(rf"{re.escape(who)} done · 2 steps · ", ended) for who, _ in made)
        said = [str(message["content"]) for body in server.requests for message in body["messages"]]
        assert any(
            "the user refused: not this" in text or "the user refused: no, not this" in text
            for text in said
        )
