"""Step mode: what a stop shows, and what each key does, in a program and in a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coder import Agent, Permissions, Reply, RunResult, ScriptedModel, Stepper, rules_of, tool
from coder.devtools.scripted import ScriptedServer
from tests.harness import assert_valid
from tests.terminal import OneShot, Terminal

ran: list[str] = []


@tool
def note(text: str) -> str:
    """Write a note.

    text: what to write
    """
    ran.append(text)
    return f"noted {text}"


class Steps:
    """A run with one tool call, and the answers at its stops."""

    def __init__(self, *answers: str, edit: Callable[[Any], Any] = list) -> None:
        ran.clear()
        self.answers = list(answers)
        self.questions: list[str] = []
        self.shown: list[str] = []
        self.stepper = Stepper(
            ask=self._answer,
            show=self.shown.append,
            edit=lambda text: json.dumps(edit(json.loads(text))),
        )
        self.model = ScriptedModel(
            [
                Reply("I note.", [("note", {"text": "one"})]),
                Reply("Done."),
            ]
        )

    def _answer(self, question: str, keys: str) -> str:
        self.questions.append(question)
        return self.answers.pop(0) if self.answers else ""

    def run(self, *hooks: Any) -> RunResult:
        self.stepper.hooks += hooks
        agent = Agent(
            self.model,
            tools=[note],
            system="Be careful.",
            hooks=self.stepper,
        )
        self.agent = agent
        return agent.run("Go on.")

    @property
    def text(self) -> str:
        return "\n".join(self.shown)

    def sent(self, request: int) -> list[dict[str, Any]]:
        body = self.model.bodies[request]
        assert_valid(body)
        return list(body["messages"])


def test_each_stop_shows_only_what_is_new() -> None:
    steps = Steps()
    result = steps.run()
    assert result.stop_reason == "stop"
    assert [question.split(" ")[1] for question in steps.questions] == ["sends", "runs", "sends"]
    first, second = steps.text.split("== Request 2")
    assert "+ user: Go on." in first
    assert "+ system, 11 characters, and 1 tools" in first
    assert '== Tool note {"text": "one"}' in first
    assert "noted one" in first
    assert "+ user: Go on." not in second
    assert "+ system" not in second
    assert "+ tool: noted one" in second
    assert "% as in the request before (cached)" in second


def test_an_edited_argument_is_what_runs_and_what_is_in_the_list() -> None:
    steps = Steps("", "e", "", edit=lambda arguments: {"text": "two"})
    steps.run()
    assert ran == ["two"]
    [call] = steps.agent.messages[1]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"text": "two"}
    assert steps.agent.messages[2]["content"] == "noted two"


def test_an_edited_message_is_sent_and_stays_in_the_conversation() -> None:
    def change(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [message | {"content": "Stop here."} for message in messages]

    steps = Steps("e", edit=change)
    steps.run()
    assert steps.sent(0)[-1]["content"] == "Stop here."
    assert steps.sent(1)[1]["content"] == "Stop here."
    assert steps.agent.messages[0]["content"] == "Stop here."


@pytest.mark.parametrize(
    "wrong",
    [lambda value: {}, lambda value: [], lambda value: 1],
)
def test_an_edit_of_another_form_changes_nothing(wrong: Callable[[Any], Any]) -> None:
    steps = Steps("e", edit=wrong)
    steps.run()
    assert "nothing was changed" in steps.text
    assert steps.sent(0)[-1]["content"] == "Go on."


def test_a_skipped_tool_gives_the_typed_result() -> None:
    steps = Steps("", "s", "typed by hand")
    steps.run()
    assert ran == []
    assert steps.agent.messages[2]["content"] == "typed by hand"
    assert steps.sent(1)[-1]["content"] == "typed by hand"


def test_w_shows_all_and_asks_again() -> None:
    steps = Steps("w")
    steps.run()
    assert '"system": "Be careful."' in steps.text
    assert len(steps.questions) == 4


def test_c_goes_on_without_stops() -> None:
    steps = Steps("c")
    assert steps.run().stop_reason == "stop"
    assert len(steps.questions) == 1
    assert ran == ["one"]


@pytest.mark.parametrize(
    "before",
    [
        pytest.param([], id="at a request"),
        pytest.param([""], id="at a tool"),
        pytest.param(["", ""], id="at a later request"),
    ],
)
def test_q_stops_with_a_list_that_can_be_sent(before: list[str]) -> None:
    steps = Steps(*before, "q")
    assert steps.run().stop_reason == "aborted"
    steps.stepper.is_on = False
    assert steps.agent.run("Once more.").stop_reason == "stop"
    steps.sent(-1)


def test_enter_is_the_answer_to_the_permissions_too() -> None:
    asking = Permissions(rules_of({"note": "ask"}), can_ask=True)
    steps = Steps()
    assert steps.run(asking).stop_reason == "stop"
    assert ran == ["one"]
    assert len(steps.questions) == 3


def test_a_rule_that_denies_still_denies() -> None:
    steps = Steps()
    steps.run(Permissions(rules_of({"note": "deny"}), can_ask=True))
    assert ran == []
    assert "Denied" in steps.agent.messages[2]["content"]


# ---- in a terminal -------------------------------------------------------------------------------


def test_a_session_goes_step_by_step_until_it_is_switched_off(tmp_path: Path) -> None:
    replies = [
        Reply(calls=[("bash", {"command": "echo one"})]),
        Reply("First."),
        Reply("Second."),
    ]
    editor = "sed -i s/one/two/"
    with (
        ScriptedServer(replies) as server,
        Terminal(tmp_path, server, EDITOR=editor) as session,
    ):
        session.enter("/step")
        session.expect("The next run goes step by step")
        session.prompt()
        session.enter("go")
        session.expect("+ user: go")
        session.expect("Enter sends it")
        session.settled()
        session.type("\r")
        session.expect("== Tool bash")
        session.expect("Enter runs it")
        session.settled()
        session.type("e")
        session.expect("echo two")
        session.expect("Enter runs it")
        session.settled()
        session.type("\r")  # the command is not asked about once more
        session.expect("| two")
        session.expect("Enter sends it")
        session.settled()
        session.type("\r")
        session.expect("First.")
        session.prompt()
        session.enter("/step")
        session.expect("No more stops.")
        session.prompt()
        session.say("go on")
    assert server.requests[1]["messages"][-1]["content"].startswith("two")


def test_steps_need_a_terminal(tmp_path: Path) -> None:
    with (
        ScriptedServer([]) as server,
        OneShot(tmp_path, server, "--step", "hi") as run,
    ):
        assert run.end() == 2
    assert "--step needs a terminal" in run.err
    assert server.requests == []
