"""Rules, agents and sub-agents on the command line: flags, the user's files, the folder's files, and what a session keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coder.devtools.scripted import Body, Reply, ScriptedServer
from coder.history import text_of
from tests.harness import contents, results, serve
from tests.terminal import OneShot, Place, Terminal

TOUCH = Reply("", calls=[("bash", {"command": "touch made"})])


def config(folder: Path, server: ScriptedServer, name: str, text: str) -> None:
    """A file of the user's for a session that is still to be started."""
    path = Place(folder, server).home / ".config" / "coder" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def once(folder: Path, server: ScriptedServer, *arguments: str, code: int = 0) -> OneShot:
    with OneShot(folder, server, *arguments) as run:
        assert run.end() == code, run.err
        return run


# ---- rules -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "file", "made"),
    [
        ("--deny bash --allow bash:touch*", "", True),
        ("-y --deny bash:touch*", "", False),
        ("", '{"bash": {"*": "allow", "touch *": "deny"}}', False),
        ("--allow bash", '{"bash": {"*": "allow", "touch *": "deny"}}', True),
    ],
)
def test_flags_go_before_the_users_file(tmp_path: Path, flags: str, file: str, made: bool) -> None:
    with serve(TOUCH, Reply("Done.")) as server:
        if file:
            config(tmp_path, server, "permissions.json", file)
        once(tmp_path, server, *flags.split(), "go")
    assert (tmp_path / "ws" / "made").exists() is made


@pytest.mark.case("PRM-17")
def test_a_rule_that_can_never_count_is_told_at_the_start(tmp_path: Path) -> None:
    with serve(TOUCH, Reply("Done.")) as server:
        rules = '{"bash": {"touch *": "deny"}, "*": "allow"}'
        config(tmp_path, server, "permissions.json", rules)
        err = once(tmp_path, server, "go").err
        assert "The rule `deny bash: touch *` (permissions.json) has no effect" in err
    assert (tmp_path / "ws" / "made").exists(), "the last that fits"


def test_what_is_not_understood_is_one_line_and_the_model_not_asked(tmp_path: Path) -> None:
    with serve(Reply("Hello.")) as server:
        config(tmp_path, server, "permissions.json", '{"bash": 1}')
        for flags, why in (
            ([], "permissions.json: bash: *: 1 is not one of allow, ask, deny"),
            (["--allow", "rm -rf /"], "'rm -rf /' is no rule"),
            (["--agent", "explore"], "there is no agent 'explore'; known: build, plan"),
        ):
            run = once(tmp_path, server, *flags, "go", code=2)
            assert why in run.err and run.err.count("\n") == 1
            config(tmp_path, server, "permissions.json", "{}")
        assert server.requests == []


# ---- agents ------------------------------------------------------------------------------------


def test_a_plan_is_made_without_the_tools_that_change(tmp_path: Path) -> None:
    calls = [("write", {"path": "x", "content": "x"})]
    calls += [("bash", {"command": command}) for command in ("touch made", "ls")]
    with serve(Reply("", calls=calls), Reply("The plan.")) as server:
        assert once(tmp_path, server, "--plan", "-y", "go").out == "The plan.\n"
    assert list((tmp_path / "ws").iterdir()) == []
    body = server.requests[1]
    tools = {each["function"]["name"] for each in body["tools"]}
    assert {"write", "edit", "apply_patch"}.isdisjoint(tools)
    assert "You are planning" in body["messages"][0]["content"]
    denied = contents(body["messages"], "tool")
    assert denied[0].startswith("Denied") and denied[1].startswith("Denied")
    assert denied[2] == "(no output)", "looking is free"


def test_an_agent_of_the_users_own_has_its_prompt_model_and_rules(tmp_path: Path) -> None:
    head = 'model: other\npermissions:\n  bash:\n    "touch *": allow\n'
    with serve(TOUCH, Reply("Done.")) as server:
        config(tmp_path, server, "agents/mine.md", f"---\n{head}---\nYou are mine.")
        once(tmp_path, server, "--agent", "mine", "go")
        assert (tmp_path / "ws" / "made").exists()
        body = server.requests[0]
        assert body["model"] == "other"
        prompt = body["messages"][0]["content"]
        assert prompt.startswith("You are mine.") and str(tmp_path / "ws") in prompt
        config(tmp_path, server, "agents/plan.md", "---\nmodel: big\n---\n")
        with Terminal(tmp_path, server) as session:
            for entry in ("/model mine", "/plan", "one", "/plan", "two"):
                session.say(entry)
    assert [body["model"] for body in server.requests[-2:]] == ["big", "mine"]


def test_in_a_session_agents_are_switched_and_rules_are_shown(tmp_path: Path) -> None:
    def script(body: Body) -> Reply:
        planning = "You are planning" in body["messages"][0]["content"]
        return Reply(f"{'planning' if planning else 'building'} with {len(body['tools'])} tools")

    with (
        ScriptedServer(script) as server,
        Terminal(tmp_path, server, "--deny", "bash:rm *") as session,
    ):
        for entry, shown in (
            ("one", "building with 10 tools"),
            ("/agent", "* build"),
            ("/plan", "Agent plan:"),
            ("two", "planning with 8 tools"),
            ("/permissions", "deny   bash: rm *  (a flag)"),
            ("/permissions", "deny   edit: *  (agent plan)"),
            ("/permissions", "ask    *: *  (agent plan)"),
            ("/plan", "Agent build:"),
            ("three", "building with 10 tools"),
            ("/agent boss", "There is no agent boss; known: build, plan."),
            ("/yolo", "no longer asked"),
            ("/yolo", "Asking again"),
            ("/plan think about it", "planning with"),
        ):
            assert shown in session.say(entry), entry


def test_a_permission_is_for_this_conversation_and_this_agent(tmp_path: Path) -> None:
    def script(body: Body) -> Reply:
        return Reply("Done.") if body["messages"][-1]["role"] == "tool" else TOUCH

    with ScriptedServer(script) as server, Terminal(tmp_path, server) as session:
        for entry, answer in (
            ("one", "a"),
            ("two", ""),  # not asked again
            ("/new", ""),
            ("three", "a"),
            ("/plan", ""),
            ("four", "n"),
            ("/plan", ""),
            ("five", "n"),
        ):
            if answer:
                session.enter(entry)
                session.expect("why not: ")
                session.settled()
            session.say(answer or entry)


def test_a_conversation_goes_on_with_the_agent_it_was_left_with(tmp_path: Path) -> None:
    with serve(Reply("Hello.")) as server:
        once(tmp_path, server, "--plan", "one")
        assert "Agent plan continues: " in once(tmp_path, server, "-c", "two").err
        once(tmp_path, server, "-c", "--agent", "build", "three")
    planning = ["You are planning" in body["messages"][0]["content"] for body in server.requests]
    assert planning == [True, True, False]


# ---- sub-agents --------------------------------------------------------------------------------


def by_role(body: Body) -> Reply:
    """The parent calls a sub-agent, and continues it where it knows one; the child tells how much it knows."""
    system, *messages = body["messages"]
    if "another agent" in system["content"]:
        return Reply(f"I know {len(messages)} messages.")
    if messages[-1]["role"] == "tool":
        return Reply(f"It says: {text_of(messages[-1])}")
    known = [{"task_id": task_id(text)} for text in contents(body["messages"], "tool")]
    task = {"description": "count", "prompt": "Count.", "agent": "explore"}
    return Reply("", calls=[("task", task | (known[0] if known else {}))])


def task_id(text: str) -> str:
    return text.rpartition("task_id: ")[2].rstrip("]")


def test_a_sub_agents_session_goes_on_elsewhere_by_its_parent_alone(tmp_path: Path) -> None:
    with ScriptedServer(by_role) as server:
        out = once(tmp_path, server, "--output-format", "json", "one").out
        first: dict[str, Any] = json.loads(out)
        again = once(tmp_path, server, "-c", "two")
        assert again.out.startswith("It says: I know 3 messages.")
        listed = once(tmp_path, server, "sessions").out.strip()
        assert len(listed.splitlines()) == 1, "a child is no conversation of its own"
        child = task_id(text_of(first["messages"][2]))

        def steals(body: Body) -> Reply:
            task = {"description": "x", "prompt": "x", "task_id": child}
            done = body["messages"][-1]["role"] == "tool"
            return Reply("Done.") if done else Reply("", calls=[("task", task)])

        server.script = steals
        once(tmp_path, server, "three")
        assert "there is no task" in results(server)[0]
    prompts = [body["messages"][0]["content"] for body in server.requests[:6]]
    assert first["usage"]["input"] > 0
    assert sum("another agent" not in prompt for prompt in prompts) == 4
