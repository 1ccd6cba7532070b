"""Sub-agents: the tool `task`, through real runs against a scripted server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coder.abort import Abort
from coder.agent.parallel import ParallelTools
from coder.agent.profiles import BUILT_IN, AgentSpec, choices
from coder.agent.subagent import Equipment, Subagents
from coder.ai import ChatModel
from coder.devtools.scripted import Body, Reply, ScriptedServer
from coder.events import Event, Nested, PermissionAsked, RunEnd, RunStart, ToolEnd
from coder.history import NOT_RUN, text_of
from coder.hooks import HookChain
from coder.permissions.permissions import Permissions
from coder.permissions.rules import Rule, rules_of
from coder.tools.bash import bash
from coder.tools.files import ls, read, write
from coder.toolset import Toolset
from coder.types import Limits, Message, RunResult
from tests.harness import FAST, ask, assert_all_valid
from tests.terminal import promptly, until

Script = Callable[[Body], Reply]
CHILD = "the child"  # of what its system prompt consists


def results(messages: list[Message]) -> list[str]:
    return [text_of(message) for message in messages if message["role"] == "tool"]


def script(parent: Script, child: Script) -> Script:
    """Answers the two by their system prompts."""
    return lambda body: (child if body["messages"][0]["content"] == CHILD else parent)(body)


def calls_once(*calls: tuple[str, Any], then: str = "Done.") -> Script:
    """These calls behind a user's message, a text behind their results."""
    return lambda body: (
        Reply("", calls=calls) if body["messages"][-1]["role"] == "user" else Reply(then)
    )


class Office:
    """A folder, permissions, and the sub-agents of a session in it."""

    def __init__(
        self,
        server: ScriptedServer,
        folder: Path,
        permissions: Permissions | None = None,
        *,
        limits: Limits = Limits(),
        specs: tuple[AgentSpec, ...] = (),
        **options: Any,
    ) -> None:
        self.server, self.folder, self.limits = server, folder, limits
        self.permissions = permissions or Permissions(yolo=True)
        self.subagents = Subagents(
            specs or choices(BUILT_IN, "subagent"), self.equip, limits=limits, retry=FAST, **options
        )
        self.tools = ParallelTools([read, write, bash, ls, self.subagents.tool], cwd=folder)
        self.messages: list[Message] = []

    def equip(self, spec: AgentSpec, session_id: str) -> Equipment:
        permissions = self.permissions.child([*spec.rules, Rule("task", "*", "deny")])
        offered = permissions.offered([read, write, bash, ls, self.subagents.tool])
        return Equipment(
            ChatModel(spec.model or "small", base_url=self.server.url),
            Toolset(offered, cwd=self.folder, session_id=session_id),
            CHILD,
            HookChain(permissions),
        )

    def run(self, **options: Any) -> tuple[list[Event], RunResult]:
        options = {"limits": self.limits} | options
        return ask(
            self.server,
            tools=self.tools,
            hooks=HookChain(self.permissions),
            messages=self.messages,
            **options,
        )


def task(prompt: str = "Look.", **more: str) -> tuple[str, dict[str, str]]:
    return "task", {"description": "look at it", "prompt": prompt} | more


def test_the_last_text_of_the_child_is_the_result_and_its_run_is_nested(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    with ScriptedServer(
        script(
            calls_once(task("What is in f?", agent="explore")),
            calls_once(("read", {"path": "f"}), then="It says x."),
        )
    ) as server:
        office = Office(server, tmp_path)
        events, result = office.run()
        assert_all_valid(server)
    [child] = office.subagents.children.values()
    assert results(result.messages) == [f"It says x.\n\n[task_id: {child.id}]"]
    nested = [event for event in events if isinstance(event, Nested)]
    assert {(each.agent, each.session_id) for each in nested} == {("explore", child.id)}
    assert (
        isinstance(nested[0].event, RunStart)
        and isinstance(nested[-1].event, RunEnd)
        and nested[-1].event.steps == 2
    )
    assert [type(event) for event in events].count(RunEnd) == 1, (
        "a child's end is never taken for the parent's"
    )
    [end] = [event for event in events if isinstance(event, ToolEnd)]
    assert end.result.details == {
        "agent": "explore",
        "session_id": child.id,
        "steps": 2,
        "stop_reason": "stop",
    }


def test_the_child_sees_nothing_of_the_conversation_and_the_parent_nothing_of_its_calls(
    tmp_path: Path,
) -> None:
    with ScriptedServer(script(calls_once(task()), calls_once(("ls", {})))) as server:
        Office(server, tmp_path).run(prompt="A secret.")
        child = [body for body in server.requests if body["messages"][0]["content"] == CHILD]
        parent = [body for body in server.requests if body not in child]
    assert "A secret." not in str(child) and [each["content"] for each in child[0]["messages"]] == [
        CHILD,
        "Look.",
    ]
    assert [each["function"]["name"] for each in child[0]["tools"]] == [
        "read",
        "write",
        "bash",
        "ls",
    ], "no task for it"
    assert child[0]["model"] == "small" and "ls" not in [
        call["function"]["name"]
        for message in parent[-1]["messages"]
        for call in message.get("tool_calls") or []
    ]


def test_what_it_uses_is_added_to_the_parent(tmp_path: Path) -> None:
    with ScriptedServer(
        script(calls_once(task(), task("More.")), lambda body: Reply("Done."))
    ) as server:
        events, result = Office(server, tmp_path).run()
    children = [
        event.event.usage
        for event in events
        if isinstance(event, Nested) and isinstance(event.event, RunEnd)
    ]
    own = [event.usage for event in events if event.type == "step_end"]
    assert len(children) == 2 and all(each.input for each in children)
    assert result.usage.input == sum(each.input for each in [*children, *own])  # type: ignore[attr-defined]


def test_several_work_side_by_side_and_answer_in_their_order(tmp_path: Path) -> None:
    met = threading.Barrier(3, timeout=20)

    def child(body: Body) -> Reply:
        met.wait()
        return Reply(f"I did {body['messages'][-1]['content']}")

    with ScriptedServer(script(calls_once(*(task(name) for name in "abc")), child)) as server:
        _, result = Office(server, tmp_path).run()
    assert [text.partition("\n")[0] for text in results(result.messages)] == [
        "I did a",
        "I did b",
        "I did c",
    ]


def test_a_child_is_gone_on_with_by_its_id(tmp_path: Path) -> None:
    def parent(body: Body) -> Reply:
        answers = results(body["messages"])
        if not answers:
            return Reply("", calls=[task("First.")])
        if len(answers) == 1:
            return Reply(
                "",
                calls=[
                    task(
                        "Second.",
                        task_id=answers[0].rpartition(": ")[2].rstrip("]"),
                        agent="explore",
                    )
                ],
            )
        return Reply("Done.")

    with ScriptedServer(
        script(parent, lambda body: Reply(f"{len(body['messages'])} messages"))
    ) as server:
        office = Office(server, tmp_path)
        _, result = office.run()
    assert [text.partition("\n")[0] for text in results(result.messages)] == [
        "2 messages",
        "4 messages",
    ]
    assert (
        len(office.subagents.children) == 1
        and next(iter(office.subagents.children.values())).spec.name == "general"
    ), "who it was"


def test_a_child_of_an_earlier_process_is_loaded_and_an_unknown_one_is_an_error(
    tmp_path: Path,
) -> None:
    known: dict[str, tuple[str, list[Message]]] = {
        "abc": (
            "explore",
            [{"role": "user", "content": "before"}, {"role": "assistant", "content": "then"}],
        )
    }
    with ScriptedServer(
        script(
            calls_once(task(task_id="abc"), task(task_id="../x"), task(agent="boss")),
            lambda body: Reply("Done."),
        )
    ) as server:
        office = Office(server, tmp_path, load=known.get)
        _, result = office.run()
        [child] = [body for body in server.requests if body["messages"][0]["content"] == CHILD]
    assert [each["content"] for each in child["messages"]] == [CHILD, "before", "then", "Look."]
    said = results(result.messages)
    assert (
        "there is no task '../x'" in said[1]
        and said[2] == "Error: task: agent has to be one of general, explore"
    )


def test_a_childs_question_reaches_whoever_answers_the_parents_with_its_name(
    tmp_path: Path,
) -> None:
    asked: list[tuple[str, str]] = []

    def each(event: Event) -> None:
        if isinstance(event, Nested) and isinstance(event.event, PermissionAsked):
            asked.append((event.agent, event.event.pattern))
            event.event.reply("once" if "yes" in event.event.pattern else "no")

    child = calls_once(("bash", {"command": "touch yes"}), ("bash", {"command": "touch no"}))
    with ScriptedServer(script(calls_once(task()), child)) as server:
        Office(server, tmp_path, Permissions(can_ask=True)).run(each=each)
    assert asked == [("general", "touch yes"), ("general", "touch no")]
    assert (tmp_path / "yes").exists() and not (tmp_path / "no").exists()


@pytest.mark.case("PRM-26")
def test_what_the_parent_may_not_the_child_may_not(tmp_path: Path) -> None:
    free = AgentSpec("free", mode="subagent", rules=tuple(rules_of({"*": "allow"})))
    child = calls_once(
        ("bash", {"command": "touch PWN"}),
        ("bash", {"command": "mkdir d"}),
        ("write", {"path": "w", "content": "x"}),
    )
    with ScriptedServer(script(calls_once(task(agent="free")), child)) as server:
        office = Office(
            server, tmp_path, Permissions(rules_of({"bash": {"touch *": "deny"}})), specs=(free,)
        )
        office.run()
        said = results(next(iter(office.subagents.children.values())).messages)
    assert list(tmp_path.iterdir()) == []
    assert "a rule denies" in said[0] and all("nobody can be asked" in each for each in said[1:])


@pytest.mark.case("PRM-27")
def test_what_the_childs_own_rules_deny_is_denied(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hidden words")
    blind = AgentSpec("blind", mode="subagent", rules=tuple(rules_of({"read": {"secret": "deny"}})))
    with ScriptedServer(
        script(calls_once(task(agent="blind")), calls_once(("read", {"path": "secret"})))
    ) as server:
        Office(server, tmp_path, specs=(blind,)).run()
        assert "hidden words" not in str(server.requests) and "a rule denies read" in str(
            server.requests
        )


@pytest.mark.case("INV-11")
def test_the_parents_requests_hold_one_result_for_the_task_and_none_of_the_childs_ids(
    tmp_path: Path,
) -> None:
    with ScriptedServer(
        script(calls_once(task()), calls_once(("ls", {}), ("ls", {"path": "."})))
    ) as server:
        Office(server, tmp_path).run()
        assert_all_valid(server)
        parent = [body for body in server.requests if body["messages"][0]["content"] != CHILD][-1][
            "messages"
        ]
        child = [body for body in server.requests if body["messages"][0]["content"] == CHILD][-1][
            "messages"
        ]
    of_parent, of_child = (
        [message["tool_call_id"] for message in each if message["role"] == "tool"]
        for each in (parent, child)
    )
    assert (
        len(of_parent) == 1
        and len(of_child) == 2
        and not set(of_child) & {text for text in of_parent}
    )


def test_an_abort_of_the_parent_ends_the_child_and_both_histories_are_whole(tmp_path: Path) -> None:
    abort = Abort()
    waits = calls_once(("bash", {"command": "touch started; sleep 60"}))
    with ScriptedServer(
        script(calls_once(task()), lambda body: Reply("Fine.") if abort.is_set else waits(body))
    ) as server:
        office = Office(server, tmp_path)

        def stop() -> None:
            until((tmp_path / "started").exists, "the child works")
            abort.set()

        threading.Thread(target=stop, daemon=True).start()
        with promptly(20):
            events, result = office.run(abort=abort)
        assert result.stop_reason == "aborted"
        [ended] = [
            event.event
            for event in events
            if isinstance(event, Nested) and isinstance(event.event, RunEnd)
        ]
        assert isinstance(ended, RunEnd) and ended.stop_reason == "aborted"
        inner = next(iter(office.subagents.children.values())).messages
        assert [message["role"] for message in inner] == [
            "user",
            "assistant",
            "tool",
        ] and "aborted" in results(inner)[0]
        assert [message["role"] for message in result.messages] == ["user", "assistant", "tool"]
        office.run(prompt="Go on.")
        assert_all_valid(server)


def test_the_steps_of_children_are_the_parents_and_one_is_left_to_say_what_came_of_it(
    tmp_path: Path,
) -> None:
    def child(body: Body) -> Reply:
        return Reply("", calls=[("ls", {"path": f"./{'x/../' * len(body['messages'])}"})])

    with ScriptedServer(script(calls_once(task(), then="The child was stopped."), child)) as server:
        _, result = Office(server, tmp_path, limits=Limits(max_steps=6)).run()
        assert len(server.requests) == 6
    assert (
        result.text == "The child was stopped."
        and result.stop_reason == "stop"
        and result.steps == 2
    )
    assert results(result.messages)[0].startswith("The sub-agent did not finish (max_steps)")
    with ScriptedServer(
        script(lambda body: Reply("", calls=[task(str(len(body["messages"])))]), child)
    ) as server:
        _, result = Office(server, tmp_path, limits=Limits(max_steps=6)).run()
        assert len(server.requests) == 6 and result.stop_reason == "max_steps"
    assert "no steps are left for a sub-agent" in results(result.messages)[-1]


def test_repetitions_are_counted_on_where_a_child_goes_on(tmp_path: Path) -> None:
    """Twice in one run, twice in the next: the third of them is not run."""

    def parent(body: Body) -> Reply:
        answers = results(body["messages"])
        ids = [answer.rpartition(": ")[2].rstrip("]") for answer in answers]
        given = {"task_id": ids[0]} if ids else {}
        return (
            Reply("Done.")
            if len(answers) == 2
            else Reply("", calls=[task(f"Part {len(answers)}", **given)])
        )

    with ScriptedServer(script(parent, calls_once(("ls", {}), ("ls", {})))) as server:
        office = Office(server, tmp_path)
        _, result = office.run()
    said = results(next(iter(office.subagents.children.values())).messages)
    assert (
        len(said) == 4
        and said[2].startswith("Not run: ls was called 3 times")
        and said[3] == NOT_RUN
    )
    assert results(result.messages)[1].startswith("The sub-agent did not finish (doom_loop)")


def test_a_consumer_that_walks_away_leaves_the_childs_history_whole(tmp_path: Path) -> None:
    from coder.loop import run_loop

    with ScriptedServer(
        script(calls_once(task()), calls_once(("bash", {"command": "sleep 60"})))
    ) as server:
        office = Office(server, tmp_path)
        work = run_loop(
            office.messages,
            ChatModel("m", base_url=server.url),
            office.tools,
            prompts="go",
            hooks=HookChain(office.permissions),
        )
        with promptly(20):
            for event in work:
                if isinstance(event, Nested) and event.event.type == "tool_start":
                    break
            work.close()
    inner = next(iter(office.subagents.children.values())).messages
    assert [message["role"] for message in inner] == ["user", "assistant", "tool"]
    assert [message["role"] for message in office.messages] == ["user", "assistant", "tool"]


def test_the_schema_names_the_agents_that_there_are() -> None:
    made = Subagents(
        [AgentSpec("reviewer", "reviews", "subagent")],
        lambda spec, session_id: pytest.fail("not run"),
    ).tool
    agent = made.parameters["properties"]["agent"]
    assert (
        agent["enum"] == ["reviewer"]
        and agent["description"] == "reviewer: reviews"
        and made.parameters["required"] == ["description", "prompt"]
    )
    assert (
        made.title_of({"agent": "reviewer", "description": "look at it"})
        == "task reviewer: look at it"
    )
