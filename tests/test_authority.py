"""Rules, agents and sub-agents on the command line: flags, files of the user's, files of the folder's, and what a session keeps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coder.devtools.scripted import Body, Reply, ScriptedServer
from coder.history import text_of
from tests.harness import serve
from tests.terminal import OneShot, Place, Terminal

TOUCH = Reply("", calls=[("bash", {"command": "touch made"})])


def config(place: Place, name: str, text: str) -> Path:
    path = place.home / ".config" / "coder" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def prepared(folder: Path, server: ScriptedServer) -> Place:
    """The folders of a session that is still to be started there."""
    return Place(folder, server)


def answers(body: Body) -> list[str]:
    return [text_of(message) for message in body["messages"] if message["role"] == "tool"]


# ---- rules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, made",
    [
        ([], False),
        (["-y"], True),
        (["--allow", "bash:touch *"], True),
        (["--allow", "bash"], True),
        (["-y", "--deny", "bash:touch *"], False),
        (["--deny", "bash", "--allow", "bash:touch *"], True),
        (["--allow", "bash:touch *", "--deny", "bash"], False),
    ],
)
def test_flags_are_rules_in_their_order(tmp_path: Path, flags: list[str], made: bool) -> None:
    with serve(TOUCH, Reply("Done.")) as server, OneShot(tmp_path, server, *flags, "go") as run:
        assert run.end() == 0
    assert (run.ws / "made").exists() is made


def test_the_users_file_counts_and_a_flag_goes_before_it(tmp_path: Path) -> None:
    for flags, made in (([], False), (["--allow", "bash:touch *"], True)):
        folder = tmp_path / str(made)
        with serve(TOUCH, Reply("Done.")) as server:
            config(
                prepared(folder, server),
                "permissions.json",
                '{"bash": {"*": "allow", "touch *": "deny"}}',
            )
            with OneShot(folder, server, *flags, "go") as run:
                assert run.end() == 0
        assert (run.ws / "made").exists() is made


@pytest.mark.case("PRM-17")
def test_a_rule_that_can_never_count_is_told_at_the_start(tmp_path: Path) -> None:
    with serve(TOUCH, Reply("Done.")) as server:
        config(
            prepared(tmp_path, server),
            "permissions.json",
            '{"bash": {"touch *": "deny"}, "*": "allow"}',
        )
        with OneShot(tmp_path, server, "go") as run:
            assert run.end() == 0
            assert "The rule `deny bash: touch *` (permissions.json) never counts" in run.err
    assert (run.ws / "made").exists(), "the last that fits"


@pytest.mark.parametrize(
    "name, text, flags, said",
    [
        (
            "permissions.json",
            '{"bash": 1}',
            [],
            "permissions.json: bash: *: 1 is not one of allow, ask, deny",
        ),
        ("x", "", ["--allow", "rm -rf /"], "'rm -rf /' is no rule"),
        ("x", "", ["--agent", "boss"], "there is no agent 'boss'; known: build, plan"),
        ("x", "", ["--agent", "explore"], "there is no agent 'explore'"),
    ],
)
def test_what_cannot_be_understood_is_one_line_and_nothing_is_asked_of_the_model(
    tmp_path: Path, name: str, text: str, flags: list[str], said: str
) -> None:
    with serve(Reply("Hello.")) as server:
        config(prepared(tmp_path, server), name, text)
        with OneShot(tmp_path, server, *flags, "go") as run:
            assert run.end() == 2 and said in run.err and run.err.count("\n") == 1
        assert server.requests == []


def test_a_folder_may_forbid_and_may_not_allow(tmp_path: Path) -> None:
    with serve(
        Reply(
            "", calls=[("bash", {"command": "touch made"}), ("bash", {"command": "mkdir made2"})]
        ),
        Reply("Done."),
    ) as server:
        rules = prepared(tmp_path, server).ws / ".coder" / "permissions.json"
        rules.parent.mkdir()
        rules.write_text('{"*": "allow", "bash": {"mkdir *": "deny"}}')
        with OneShot(tmp_path, server, "go") as run:
            assert run.end() == 0
            assert (
                "a folder allows nothing" in run.err
                and "tightens the permissions (1 rule)" in run.err
            )
        with OneShot(tmp_path, server, "-y", "go") as run:
            assert run.end() == 0
        assert not (run.ws / "made2").exists()
    first = answers(server.requests[1])
    assert "nobody can be asked" in first[0] and "a rule denies" in first[1]


# ---- agents ----------------------------------------------------------------------------------------------


def test_a_plan_is_made_without_the_tools_that_change(tmp_path: Path) -> None:
    calls = [
        ("write", {"path": "x", "content": "x"}),
        ("bash", {"command": "touch made"}),
        ("bash", {"command": "ls"}),
    ]
    with (
        serve(Reply("", calls=calls), Reply("The plan.")) as server,
        OneShot(tmp_path, server, "--plan", "-y", "go") as run,
    ):
        assert run.end() == 0 and run.out == "The plan.\n"
    assert list(run.ws.iterdir()) == []
    body = server.requests[1]
    assert {"write", "edit", "apply_patch"}.isdisjoint(
        {each["function"]["name"] for each in body["tools"]}
    )
    assert "You are planning" in body["messages"][0]["content"]
    denied = answers(body)
    assert (
        denied[0].startswith("Denied")
        and denied[1].startswith("Denied")
        and denied[2] == "(no output)"
    ), "looking is free"


def test_an_agent_of_ones_own_has_its_prompt_model_and_rules(tmp_path: Path) -> None:
    with serve(TOUCH, Reply("Done.")) as server:
        head = 'model: other\ntemperature: 0.5\npermissions:\n  bash:\n    "touch *": allow\n'
        config(prepared(tmp_path, server), "agents/mine.md", f"---\n{head}---\nYou are mine.")
        with OneShot(tmp_path, server, "--agent", "mine", "go") as run:
            assert run.end() == 0
    assert (run.ws / "made").exists()
    body = server.requests[0]
    assert (body["model"], body["temperature"]) == ("other", 0.5) and body["messages"][0][
        "content"
    ].startswith("You are mine.")
    assert str(run.ws) in body["messages"][0]["content"], "the facts of the place stay"


def test_in_a_session_agents_are_switched_and_rules_are_shown(tmp_path: Path) -> None:
    def script(body: Body) -> Reply:
        return Reply(
            f"{'planning' if 'You are planning' in body['messages'][0]['content'] else 'building'} with {len(body['tools'])} tools"
        )

    with (
        ScriptedServer(script) as server,
        Terminal(tmp_path, server, "--deny", "bash:rm *") as session,
    ):
        assert "building with 9 tools" in session.say("one")
        assert "* build" in session.say("/agent") and "Agent plan:" in session.say("/plan")
        assert "planning with 7 tools" in session.say("two")
        shown = session.say("/permissions")
        assert (
            "deny   bash: rm *  (a flag)" in shown
            and "deny   edit: *  (agent plan)" in shown
            and "ask    *: *  (agent plan)" in shown
        )
        assert "Agent build:" in session.say("/plan") and "building with 9 tools" in session.say(
            "three"
        )
        assert "There is no agent boss; known: build, plan." in session.say("/agent boss")
        assert "no longer asked" in session.say("/yolo") and "Asking again" in session.say("/yolo")
        assert "planning with" in session.say("/plan think about it")


def test_a_yes_is_for_this_conversation_and_this_agent(tmp_path: Path) -> None:
    question = "or why not: "
    with (
        ScriptedServer(
            lambda body: Reply("Done.") if body["messages"][-1]["role"] == "tool" else TOUCH
        ) as server,
        Terminal(tmp_path, server) as session,
    ):

        def asked(text: str, answer: str) -> None:
            session.enter(text)
            session.expect(question)
            session.settled()
            session.say(answer)

        asked("one", "a")
        assert "Done." in session.say("two"), "not asked again"
        session.say("/new")
        asked("three", "a")
        session.say("/plan")
        asked("four", "n")
        session.say("/plan")
        asked("five", "n")


def test_a_conversation_goes_on_with_the_agent_it_was_left_with(tmp_path: Path) -> None:
    with serve(Reply("Hello.")) as server:
        with OneShot(tmp_path, server, "--plan", "one") as run:
            assert run.end() == 0
        with OneShot(tmp_path, server, "-c", "two") as run:
            assert run.end() == 0 and "plan goes on, as before" in run.err
        with OneShot(tmp_path, server, "-c", "--agent", "build", "three") as run:
            assert run.end() == 0
    planning = ["You are planning" in body["messages"][0]["content"] for body in server.requests]
    assert planning == [True, True, False]


def test_the_persons_model_comes_back_behind_an_agents_own(tmp_path: Path) -> None:
    with serve(Reply("Hello.")) as server:
        config(prepared(tmp_path, server), "agents/plan.md", "---\nmodel: big\n---\n")
        with Terminal(tmp_path, server) as session:
            session.say("/model mine")
            session.say("/plan")
            session.say("one")
            session.say("/plan")
            session.say("two")
    assert [body["model"] for body in server.requests] == ["big", "mine"]


# ---- sub-agents ------------------------------------------------------------------------------------------


def by_role(body: Body) -> Reply:
    """The parent calls a sub-agent, and goes on with it where the conversation knows one; the child tells how much it knows."""
    system, *messages = body["messages"]
    if "another agent" in system["content"]:
        return Reply(f"I know {len(messages)} messages.")
    if messages[-1]["role"] == "tool":
        return Reply(f"It says: {text_of(messages[-1])}")
    known = [text.rpartition("task_id: ")[2].rstrip("]") for text in answers(body)]
    return Reply(
        "",
        calls=[
            (
                "task",
                {"description": "count", "prompt": "Count.", "agent": "explore"}
                | ({"task_id": known[0]} if known else {}),
            )
        ],
    )


def listed(place: Place, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "coder", "sessions", *arguments],
        cwd=place.ws,
        env=place.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_sub_agents_session_is_kept_and_gone_on_with_in_another_process(tmp_path: Path) -> None:
    with ScriptedServer(by_role) as server:
        with OneShot(tmp_path, server, "--output-format", "json", "one") as run:
            assert run.end() == 0
            first: dict[str, Any] = json.loads(run.out)
        with OneShot(tmp_path, server, "-c", "two") as run:
            assert run.end() == 0 and run.out.startswith("It says: I know 3 messages.")
        assert len(listed(run).strip().splitlines()) == 1, "a child is no conversation of its own"
        child = text_of(first["messages"][2]).rpartition("task_id: ")[2].rstrip("]")
        assert "Count." in listed(run, "show", child)
        listed(run, "rm", first["session_id"])
        gone = subprocess.run(
            [sys.executable, "-m", "coder", "sessions", "show", child],
            cwd=run.ws,
            env=run.environment,
            capture_output=True,
            timeout=60,
        )
        assert gone.returncode != 0
    own = [
        body for body in server.requests if "another agent" not in body["messages"][0]["content"]
    ]
    assert first["usage"]["input"] > 0 and len(own) == 4


def test_another_sessions_child_is_not_to_be_had(tmp_path: Path) -> None:
    with ScriptedServer(by_role) as server:
        with OneShot(tmp_path, server, "--output-format", "json", "one") as run:
            run.end()
            child = (
                text_of(json.loads(run.out)["messages"][2]).rpartition("task_id: ")[2].rstrip("]")
            )

        def steals(body: Body) -> Reply:
            done = body["messages"][-1]["role"] == "tool"
            return (
                Reply("Done.")
                if done
                else Reply(
                    "", calls=[("task", {"description": "x", "prompt": "x", "task_id": child})]
                )
            )

        server.script = steals
        with OneShot(tmp_path, server, "two") as run:
            run.end()
        assert "there is no task" in answers(server.requests[-1])[0]
