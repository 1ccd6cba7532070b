"""Sub-agents on the screen: whose line is whose, what stands in the status line, and how their questions look."""

from __future__ import annotations

import io
import re
from pathlib import Path

from coder.cli.render import Renderer
from coder.cli.screen import Screen
from coder.devtools.scripted import Body, Reply
from coder.events import Event, Nested, Notice, RunEnd, RunStart, TextDelta, ToolEnd, ToolStart
from coder.types import ToolResult, Usage
from tests.harness import serve
from tests.terminal import QUESTION, Terminal

OWN = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]|\x1b\][^\x07]*\x07|\x1b[78]")


def shown(*events: Event) -> str:
    """What a renderer puts on a screen that is no terminal."""
    screen = Screen(io.StringIO())
    render = Renderer(screen, screen)
    for event in events:
        render(event)
    return str(screen.stream.getvalue())  # type: ignore[attr-defined]


def of(agent: str, session: str, *events: Event) -> list[Event]:
    return [Nested(agent, event, session, f"call-{session}") for event in events]


def tool(
    call_id: str, title: str, output: str = "out", *, failed: bool = False, name: str = "bash"
) -> list[Event]:
    result = ToolResult(output, failed)
    return [ToolStart(call_id, name, {}, title), ToolEnd(call_id, name, result, failed, 0.0)]


def test_what_a_child_does_is_a_line_with_its_task_but_not_what_it_reads_or_says() -> None:
    text = shown(
        TextDelta("Ours "),
        ToolStart("call-s1", "task", {}, "explore: find it"),
        *of("explore", "s1", RunStart(), TextDelta("theirs"), *tool("1", "ls src")),
        *of("general", "s2", RunStart(), *tool("1", "grep x")),
        *of("explore", "s1", *tool("2", "cat y", "no\nsuch", failed=True)),
        *of("explore", "s1", *tool("3", "read z", name="read")),
        *of("explore", "s1", RunEnd("stop", "theirs", Usage(1200, 30), 3)),
        ToolEnd("call-s1", "task", ToolResult("found\n\n[task_id: 1]"), False, 9),
        *of("general", "s2", Notice("look")),
        TextDelta("again"),
    )
    assert [re.sub(r"\d\.\d s$", "T", line) for line in text.splitlines()] == [
        "Ours ",
        "  explore: find it ● ls src",
        "  general ● grep x",
        "  explore: find it ✗ cat y",
        "  no",
        "● explore: find it · 3 steps · 1.2k in, 30 out · T",
        "  found",
        "  general: look",
        "",
        "again",
    ]


def script(body: Body) -> Reply:
    """Two tasks side by side, whose agents ask for a command each; then the end."""
    first = next(message["content"] for message in body["messages"] if message["role"] == "user")
    done = body["messages"][-1]["role"] == "tool"
    if first.startswith("child "):
        touch = Reply(calls=[("bash", {"command": f"touch {first[6:]}"})])
        return Reply(f"{first} is done") if done else touch
    asked = {name: {"description": name, "prompt": f"child {name}"} for name in ("one", "two")}
    tasks = [("task", {"agent": "general"} | each) for each in asked.values()]
    return Reply("Both.") if done else Reply(calls=tasks)


def test_a_childs_question_names_it_and_is_answered_for_it_alone(tmp_path: Path) -> None:
    with serve(script) as server, Terminal(tmp_path, server) as session:
        session.enter("go")
        made = []
        for answer in ("y", "no, not this"):
            asked = OWN.sub("", session.expect(QUESTION))
            line = r"(general[^\r]*) asks: Run this command\?\r\n +touch (\w+)"
            who, name = re.findall(line, asked)[-1]
            made.append((who, name))
            session.enter(answer)
        ended = OWN.sub("", session.prompt())
        assert sorted(made) == [("general: one", "one"), ("general: two", "two")], "by their calls"
        assert (session.ws / made[0][1]).exists() and not (session.ws / made[1][1]).exists()
        assert f"{made[1][0]} ✗ bash touch {made[1][1]}" in ended and "Both." in ended
        assert all(re.search(rf"{re.escape(who)} · 2 steps · ", ended) for who, _ in made)
        said = [str(message["content"]) for body in server.requests for message in body["messages"]]
        assert any(re.search("the user refused: (no, )?not this", text) for text in said)
