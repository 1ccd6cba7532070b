"""Rules, agents and sub-agents on the command line: flags, the user's files, the folder's files,
and what a session keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coder.devtools.scripted import Body, Reply, ScriptedServer
from coder.history import text_of
from tests.harness import commands, contents, results, serve
from tests.terminal import Terminal
from tests.test_cli import Done, Place

TOUCH = Reply("", calls=commands("touch made"))
RULES = '{"bash": {"*": "allow", "touch *": "deny"}}'


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def once(place: Place, server: ScriptedServer, *arguments: str, code: int = 0) -> Done:
    """One task in this process."""
    done = place.run(*arguments, server=server)
    assert done.returncode == code, done.stderr
    return done


def write(place: Place, name: str, text: str) -> None:
    """Write a file of the user's."""
    (place.config / name).parent.mkdir(parents=True, exist_ok=True)
    (place.config / name).write_text(text)


# ---- rules -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "file", "made"),
    [
        ("--deny bash --allow bash:touch*", "{}", True),
        ("-y --deny bash:touch*", "{}", False),
        ("", RULES, False),
        ("--allow bash", RULES, True),
    ],
)
def test_flags_go_before_the_users_file(place: Place, flags: str, file: str, made: bool) -> None:
    with serve(TOUCH, Reply("Done.")) as server:
        write(place, "permissions.json", file)
        once(place, server, *flags.split(), "go")
    assert (place.ws / "made").exists() is made


@pytest.mark.case("PRM-17")
def test_a_rule_that_can_never_count_is_told_at_the_start(place: Place) -> None:
    with serve(TOUCH, Reply("Done.")) as server:
        rules = '{"bash": {"touch *": "deny"}, "*": "allow", "gr*": "deny"}'
        write(place, "permissions.json", rules)
        err = once(place, server, "go").stderr
        for rule, why in (("bash: touch *", "`allow *: *`"), ("gr*: *", "there is no such kind")):
            assert f"The rule `deny {rule}` (permissions.json) has no effect: {why}" in err
    assert (place.ws / "made").exists(), "the last that fits"


def test_what_is_not_understood_is_one_line_and_the_model_not_asked(place: Place) -> None:
    with serve(Reply("Hello.")) as server:
        write(place, "permissions.json", '{"bash": 1}')
        for flags, why in (
            ([], "permissions.json: bash: *: 1 is not one of allow, ask, deny"),
            (["--allow", "rm -rf /"], "'rm -rf /' is no rule"),
            (["--agent", "explore"], "there is no agent 'explore'; known: build, plan"),
        ):
            err = once(place, server, *flags, "go", code=2).stderr
            assert why in err
            assert err.count("\n") == 1
            write(place, "permissions.json", "{}")
        assert server.requests == []


# ---- agents ------------------------------------------------------------------------------------


def test_a_plan_is_made_without_the_tools_that_change(place: Place) -> None:
    calls = [
        ("write", {"path": "x", "content": "x"}),
        *commands("touch made", "ls"),
    ]
    with serve(Reply("", calls=calls), Reply("The plan.")) as server:
        assert once(place, server, "--plan", "-y", "go").stdout == "The plan.\n"
    assert list(place.ws.iterdir()) == []
    body = server.requests[1]
    tools = {each["function"]["name"] for each in body["tools"]}
    assert {"write", "edit", "apply_patch"}.isdisjoint(tools)
    assert "You are planning" in body["messages"][0]["content"]
    denied = contents(body["messages"], "tool")
    assert denied[0] == "Denied: plan mode changes no file. The user ends it."
    assert "[in plan mode commands" in denied[1] or denied[1].startswith("Denied: plan mode")
    assert denied[2] == "(no output)", "looking is free"


def test_an_agent_of_the_users_own_has_its_prompt_model_and_rules(
    place: Place, tmp_path: Path
) -> None:
    head = 'model: other\npermissions:\n  bash:\n    "touch *": allow\n'
    with serve(TOUCH, Reply("Done.")) as server:
        write(place, "agents/mine.md", f"---\n{head}---\nYou are mine.")
        once(place, server, "--agent", "mine", "go")
        assert (place.ws / "made").exists()
        body = server.requests[0]
        assert body["model"] == "other"
        prompt = body["messages"][0]["content"]
        assert prompt.startswith("You are mine.")
        assert str(place.ws) in prompt
        write(place, "agents/plan.md", "---\nmodel: big\n---\n")
        with Terminal(tmp_path, server) as session:
            for entry in ("/model mine", "/plan"):
                session.say(entry)
            session.enter("one")
            session.not_now()
            for entry in ("/plan", "two"):
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
            ("/permissions", "deny   edit: *  (built-in agent plan)"),
            ("/permissions", "ask    *: *  (built-in agent plan)"),
            ("/plan", "Agent build:"),
            ("three", "building with 10 tools"),
            ("/agent boss", "There is no agent boss; known: build, plan."),
            ("/yolo", "no longer asked"),
            ("/yolo", "Asking again"),
            ("/plan think about it", "planning with"),
        ):
            session.enter(entry)
            said = session.not_now() if "planning" in shown else session.prompt()
            assert shown in said, entry


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
            ("/plan", ""),  # the agent is another one in between
            ("four", "n"),
        ):
            if answer:
                session.enter(entry)
                session.expect("why not: ")
                session.settled()
            session.say(answer or entry)


def test_a_conversation_goes_on_with_the_agent_it_was_left_with(place: Place) -> None:
    with serve(Reply("Hello.")) as server:
        once(place, server, "--plan", "one")
        assert "Agent plan continues: " in once(place, server, "-c", "two").stderr
        once(place, server, "-c", "--agent", "build", "three")
    planning = ["You are planning" in body["messages"][0]["content"] for body in server.requests]
    assert planning == [True, True, False]
    told = ["one", "two", "Plan mode is over: files can be changed now.", "three"]
    assert contents(server.requests[2]["messages"], "user") == told


# ---- sub-agents --------------------------------------------------------------------------------


def by_role(body: Body) -> Reply:
    """The parent calls a sub-agent, and continues it if it knows one; the child tells how much
    it knows."""
    system, *messages = body["messages"]
    if "another agent" in system["content"]:
        return Reply(f"I know {len(messages)} messages.")
    if messages[-1]["role"] == "tool":
        return Reply(f"It says: {text_of(messages[-1])}")
    known = [{"task_id": task_id(text)} for text in contents(body["messages"], "tool")]
    task = {"description": "count", "prompt": "Count.", "agent": "explore"}
    return Reply(
        "",
        calls=[("task", task | (known[0] if known else {}))],
    )


def task_id(text: str) -> str:
    return text.rpartition("task_id: ")[2].rstrip("]")


def test_a_sub_agents_session_goes_on_elsewhere_by_its_parent_alone(place: Place) -> None:
    with ScriptedServer(by_role) as server:
        out = once(place, server, "--output-format", "json", "one").stdout
        first: dict[str, Any] = json.loads(out)
        again = once(place, server, "-c", "two")
        assert again.stdout.startswith("It says: I know 3 messages.")
        listed = once(place, server, "sessions").stdout.strip()
        assert len(listed.splitlines()) == 1, "a child is no conversation of its own"
        child = task_id(text_of(first["messages"][2]))

        def steals(body: Body) -> Reply:
            task = {"description": "x", "prompt": "x", "task_id": child}
            done = body["messages"][-1]["role"] == "tool"
            return Reply("Done.") if done else Reply("", calls=[("task", task)])

        server.script = steals
        once(place, server, "three")
        assert "there is no task" in results(server)[0]
    prompts = [body["messages"][0]["content"] for body in server.requests[:6]]
    assert first["usage"]["input"] > 0
    assert sum("another agent" not in prompt for prompt in prompts) == 4
