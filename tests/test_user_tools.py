"""The tools that the user sees: the checklist, and a question if there is one who can answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coder.agent.user_tools import NO_ANSWER, ask_user, todo
from coder.devtools.scripted import Body, Reply
from coder.events import QuestionAsked, ToolEnd, ToolStart
from coder.permissions.permissions import Permissions
from coder.permissions.rules import Rule
from tests.harness import all_of, ask, assert_all_valid, results, serve
from tests.terminal import OneShot, Terminal, rendered

ITEMS = [
    {"text": "look", "status": "done"},
    {"content": "change  it\nthen", "status": "in-progress"},
    {"text": "test"},
]
SHOWN = "[x] look\n[>] change it then\n[ ] test"


def test_the_checklist_is_the_result_and_its_details() -> None:
    with serve(
        Reply(calls=[("todo", {"items": ITEMS})]),
        Reply("done"),
    ) as server:
        events, _ = ask(server, tools=[todo])
        assert_all_valid(server)
        assert results(server) == [SHOWN]
    [start], [end] = all_of(ToolStart, events), all_of(ToolEnd, events)
    assert start.title == "todo 1 of 3 done"
    states = [item["status"] for item in end.result.details["todo"]]
    assert states == ["done", "in_progress", "pending"]
    assert todo(items=[]).content == "The checklist is empty."


@pytest.mark.parametrize(
    "items",
    [
        [{"status": "done"}],
        [{"text": "a", "status": "maybe"}],
        [7],
        "no",
    ],
)
def test_what_is_no_checklist_is_an_error_result(items: Any) -> None:
    with serve(
        Reply(calls=[("todo", {"items": items})]),
        Reply("done"),
    ) as server:
        ask(server, tools=[todo])
        assert results(server)[0].startswith("Error: ")


# ---- questions ------------------------------------------------------------------------------

QUESTION = {"question": "Which colour?\x1b[31m", "options": ["red", "green"]}
CALL = Reply(calls=[("ask_user", QUESTION)])


def offered(body: Body) -> list[Any]:
    return [each["function"]["name"] for each in body["tools"]]


PLAIN = Reply(calls=[("ask_user", {"question": "Which one?"})])
ANSWERS = [
    (CALL, "2", "green"),
    (CALL, "neither, blue\r", "neither, blue"),
    (CALL, "\x04", NO_ANSWER),
    (PLAIN, "\r", NO_ANSWER),
]


def test_the_answer_at_the_prompt_is_shown_once_and_ctrl_c_stops_the_run(tmp_path: Path) -> None:
    replies = [reply for call, _, _ in ANSWERS for reply in (call, Reply("done"))]
    with (
        serve(*replies, CALL, Reply("on")) as server,
        Terminal(tmp_path, server, "--plan") as session,
    ):
        for call, keys, answer in ANSWERS:
            start = len(session.output)
            session.enter("go")
            session.expect("answer: ")
            session.settled()
            session.type(keys)
            session.not_now()
            shown = session.output[start:]
            assert results(server)[-1] == answer
            assert ("● ask_user" in rendered(shown)) == (answer == NO_ANSWER)
            assert "\x1b[31m" not in shown
            assert "ask_user needs" not in shown
            assert ("2. green" in shown) == (call is CALL)
        session.enter("go")
        session.expect("answer: ")
        session.ctrl_c()
        session.prompt()
        assert len(server.requests) == 2 * len(ANSWERS) + 1
        session.enter("go on")
        assert "on" in session.not_now()


def test_it_is_offered_only_if_the_user_can_answer_and_to_no_sub_agent(tmp_path: Path) -> None:
    task = Reply(calls=[("task", {"description": "d", "prompt": "p"})])
    with serve(task, Reply("found"), Reply("done")) as server:
        with Terminal(tmp_path, server) as session:
            session.say("go")
        assert ["ask_user" in offered(body) for body in server.requests] == [True, False, True]
        with OneShot(tmp_path, server, "go") as one_shot:
            one_shot.child.communicate()
        assert "ask_user" not in offered(server.requests[-1])


def test_it_needs_no_permission_and_a_rule_can_take_it_away() -> None:
    plan = Permissions(agent=[Rule("*", "*", "ask")], can_ask=True)

    def each(event: Any) -> None:
        if isinstance(event, QuestionAsked):
            event.reply("red")

    with serve(CALL, Reply("done")) as server:
        events, _ = ask(server, tools=[ask_user], hooks=plan, each=each)
        assert results(server) == ["red"]
    asked = [event.to_dict() for event in events if "asked" in event.type]
    assert [each["type"] for each in asked] == ["question_asked"], json.dumps(asked)
    assert not Permissions([Rule("ask_user", "*", "deny")]).offered([ask_user])
