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
from coder.events import Event, Nested, RunEnd, RunStart, ToolEnd
from coder.hooks import HookChain
from coder.permissions.permissions import Permissions
from coder.permissions.rules import Rule, rules_of
from coder.tools.bash import bash
from coder.tools.files import ls, read, write
from coder.toolset import Toolset
from coder.types import Limits, Message, RunResult
from tests.harness import FAST, ask, assert_all_valid, contents
from tests.terminal import promptly, until

Script = Callable[[Body], Reply]
CHILD = "the child"  # its system prompt
OFFERED = [read, write, bash, ls]


def results(messages: list[Message]) -> list[str]:
    return contents(messages, "tool")


def is_child(body: Body) -> bool:
    return bool(body["messages"][0]["content"] == CHILD)


def calls_once(*calls: tuple[str, Any], then: str = "Done.") -> Script:
    """These calls after a user's message, a text after their results."""

    def script(body: Body) -> Reply:
        return Reply("", calls=calls) if body["messages"][-1]["role"] == "user" else Reply(then)

    return script


def again(body: Body) -> Reply:
    """A child that calls for ever, each time with other arguments."""
    return Reply(
        "",
        calls=[("ls", {"path": "./" * len(body["messages"])})],
    )


def task(prompt: str = "Look.", **more: str) -> tuple[str, dict[str, str]]:
    return "task", {"description": "look at it", "prompt": prompt} | more


class Office:
    """A server that answers parent and child, and the sub-agents of a session in a folder."""

    def __init__(
        self,
        folder: Path,
        parent: Script,
        child: Script = lambda body: Reply("Done."),
        permissions: Permissions | None = None,
        specs: tuple[AgentSpec, ...] = (),
        **options: Any,
    ) -> None:
        self.server = ScriptedServer(lambda body: (child if is_child(body) else parent)(body))
        self.folder = folder
        self.limits = options.get("limits", Limits())
        self.permissions = permissions or Permissions(yolo=True)
        chosen = specs or choices(BUILT_IN, "subagent")
        self.subagents = Subagents(chosen, self.equip, retry=FAST, **options)
        self.tools = ParallelTools([*OFFERED, self.subagents.tool], cwd=folder)
        self.messages: list[Message] = []

    def __enter__(self) -> Office:
        self.server.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.server.__exit__(*error)

    def equip(self, spec: AgentSpec, session_id: str) -> Equipment:
        permissions = self.permissions.child(
            [
                *spec.rules,
                Rule("task", "*", "deny"),
            ]
        )
        offered = permissions.offered([*OFFERED, self.subagents.tool])
        return Equipment(
            ChatModel(spec.model or "small", base_url=self.server.url),
            Toolset(offered, cwd=self.folder, session_id=session_id),
            CHILD,
            HookChain(permissions),
        )

    def run(self, **options: Any) -> tuple[list[Event], RunResult]:
        options = {"limits": self.limits, "hooks": HookChain(self.permissions)} | options
        return ask(self.server, tools=self.tools, messages=self.messages, **options)

    @property
    def first(self) -> list[Message]:
        """The messages of the first child."""
        return next(iter(self.subagents.children.values())).messages

    def requests(self, of_child: bool) -> list[Body]:
        return [body for body in self.server.requests if is_child(body) is of_child]


@pytest.mark.case("INV-11")
def test_the_last_text_of_the_child_is_the_result_and_its_run_is_nested(tmp_path: Path) -> None:
    """The child sees nothing of the conversation, and the parent none of the child's calls."""
    (tmp_path / "f").write_text("x")
    parent = calls_once(task("What is in f?", agent="explore"))
    with Office(
        tmp_path,
        parent,
        calls_once(("read", {"path": "f"}), then="It is x."),
    ) as office:
        events, result = office.run(prompt="A secret.")
        assert_all_valid(office.server)
        theirs = office.requests(True)
        ours = office.requests(False)
    [child] = office.subagents.children.values()
    assert results(result.messages) == [f"It is x.\n\n[task_id: {child.id}]"]
    nested = [event for event in events if isinstance(event, Nested)]
    assert {(each.agent, each.session_id) for each in nested} == {("explore", child.id)}
    assert isinstance(nested[0].event, RunStart)
    assert isinstance(nested[-1].event, RunEnd)
    assert [type(event) for event in events].count(RunEnd) == 1
    assert [each["content"] for each in theirs[0]["messages"]] == [CHILD, "What is in f?"]
    assert theirs[0]["model"] == "small"
    assert "A secret." not in str(theirs)
    assert [each["function"]["name"] for each in theirs[0]["tools"]] == ["read", "ls"], "no task"
    ids = {m["tool_call_id"] for m in theirs[-1]["messages"] if m["role"] == "tool"}
    assert ids
    assert not any(call_id in str(ours) for call_id in ids)
    own = [event.usage.input for event in events if event.type == "step_end"]
    assert result.usage.input == nested[-1].event.usage.input + sum(own) > sum(own) > 0


def test_several_run_side_by_side_and_answer_in_their_order(tmp_path: Path) -> None:
    met = threading.Barrier(3, timeout=20)

    def child(body: Body) -> Reply:
        met.wait()
        return Reply(f"I did {body['messages'][-1]['content']}")

    with Office(
        tmp_path,
        calls_once(*(task(name) for name in "abc")),
        child,
    ) as office:
        _, result = office.run()
    answers = [text.partition("\n")[0] for text in results(result.messages)]
    assert answers == ["I did a", "I did b", "I did c"]


def test_a_child_is_continued_by_its_id(tmp_path: Path) -> None:
    def parent(body: Body) -> Reply:
        answers = results(body["messages"])
        ids = [answer.rpartition(": ")[2].rstrip("]") for answer in answers]
        given = {"task_id": ids[0], "agent": "general"} if ids else {}
        again = Reply("", calls=[task(f"Part {len(answers)}", **given)])
        return Reply("Done.") if len(answers) == 2 else again

    with Office(tmp_path, parent) as office:
        office.run()
    [child] = office.subagents.children.values()
    assert child.spec.name == "general"
    assert contents(child.messages) == ["Part 0", "Done.", "Part 1", "Done."]


def test_a_task_of_another_agent_is_refused(tmp_path: Path) -> None:
    earlier = [
        {"role": "user", "content": "before"},
        {"role": "assistant", "content": "then"},
    ]
    calls = calls_once(task(task_id="abc", agent="general"), task(task_id="abc"))
    with Office(
        tmp_path,
        calls,
        load={"abc": ("explore", earlier)}.get,
    ) as office:
        _, result = office.run()
    refused, done = results(result.messages)
    assert refused == "Error: the task abc is one of explore, not of general"
    assert done == "Done.\n\n[task_id: abc]"


@pytest.mark.parametrize("works_first", [False, True])
def test_a_child_without_an_answer_is_an_error_that_names_its_id(
    tmp_path: Path, works_first: bool
) -> None:
    (tmp_path / "f").write_text("x")

    def child(body: Body) -> Reply:
        has_read = any(each["role"] == "tool" for each in body["messages"])
        return Reply(
            "",
            calls=[] if has_read or not works_first else [("read", {"path": "f"})],
        )

    with Office(tmp_path, calls_once(task(agent="explore")), child) as office:
        events, result = office.run()
    [child_] = office.subagents.children.values()
    way = f"Ask it again with task_id {child_.id}, or do it yourself."
    assert results(result.messages) == [f"The sub-agent ended without an answer. {way}"]
    assert [e.is_error for e in events if isinstance(e, ToolEnd)] == [True]


def test_a_child_of_an_earlier_process_is_loaded_and_no_other(tmp_path: Path) -> None:
    earlier = [
        {"role": "user", "content": "before"},
        {"role": "assistant", "content": "then"},
    ]
    calls = calls_once(
        task(task_id="abc"),
        task(task_id="../x"),
        task(agent="boss"),
    )
    with Office(
        tmp_path,
        calls,
        load={"abc": ("explore", earlier)}.get,
    ) as office:
        _, result = office.run()
        [child] = office.requests(True)
    assert [each["content"] for each in child["messages"]] == [CHILD, "before", "then", "Look."]
    _, unknown, boss = results(result.messages)
    assert "there is no task '../x'" in unknown
    assert boss == "Error: task: agent has to be one of general, explore"


@pytest.mark.case("PRM-26", "PRM-27")
def test_a_child_may_do_only_what_its_parent_and_its_own_rules_allow(tmp_path: Path) -> None:
    free = AgentSpec(
        "free",
        mode="subagent",
        rules=tuple(rules_of({"*": "allow"})),
    )
    commands = [("bash", {"command": command}) for command in ("touch PWN", "mkdir d")]
    child = calls_once(*commands, ("write", {"path": "w", "content": "x"}))
    strict = Permissions(rules_of({"bash": {"touch *": "deny"}}))
    with Office(
        tmp_path,
        calls_once(task(agent="free")),
        child,
        strict,
        (free,),
    ) as office:
        office.run()
        denied, *unasked = results(office.first)
    assert list(tmp_path.iterdir()) == []
    assert "a rule denies" in denied
    assert all("no user can be asked" in each for each in unasked)
    (tmp_path / "secret").write_text("hidden words")
    blind = AgentSpec(
        "blind",
        mode="subagent",
        rules=tuple(rules_of({"read": {"secret": "deny"}})),
    )
    child = calls_once(("read", {"path": "secret"}))
    with Office(
        tmp_path,
        calls_once(task(agent="blind")),
        child,
        specs=(blind,),
    ) as office:
        office.run()
        sent = str(office.server.requests)
    assert "hidden words" not in sent
    assert "a rule denies read" in sent


def test_an_abort_of_the_parent_ends_the_child_and_both_histories_are_whole(tmp_path: Path) -> None:
    abort = Abort()
    waits = calls_once(("bash", {"command": "touch started; sleep 60"}))

    def child(body: Body) -> Reply:
        return Reply("Fine.") if abort.is_set() else waits(body)

    def stop() -> None:
        until((tmp_path / "started").exists, "the child works")
        abort.set()

    with Office(tmp_path, calls_once(task()), child) as office:
        threading.Thread(target=stop, daemon=True).start()
        with promptly(20):
            events, result = office.run(abort=abort)
        ends = [e.event for e in events if isinstance(e, Nested) and isinstance(e.event, RunEnd)]
        assert result.stop_reason == "aborted"
        assert [e.stop_reason for e in ends] == ["aborted"]
        for messages in (office.first, result.messages):
            assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
        assert "aborted" in results(office.first)[0]
        [child] = office.subagents.children
        told = "The sub-agent did not finish (aborted): Request aborted."
        assert results(result.messages) == [f"{told}\n\n[task_id: {child}]"]
        office.run(prompt="Go on.")
        assert_all_valid(office.server)


def test_the_time_limit_of_the_parent_ends_the_child(tmp_path: Path) -> None:
    silent = Reply("never", cut=0, close="hang")
    with Office(tmp_path, calls_once(task()), lambda body: silent) as office:
        _, result = office.run(limits=Limits(max_seconds=2.0))
    [answer] = results(result.messages)
    assert result.stop_reason == "max_time"
    assert answer.startswith("The sub-agent did not finish (max_time): Time limit reached")


def test_childrens_steps_are_the_parents_and_one_is_left_to_answer(tmp_path: Path) -> None:
    limits = Limits(max_steps=6)
    with Office(
        tmp_path, calls_once(task(), then="It was stopped."), again, limits=limits
    ) as office:
        _, result = office.run()
        assert len(office.server.requests) == 6
    assert result.text == "It was stopped."
    assert result.stop_reason == "stop"
    assert result.steps == 2
    assert results(result.messages)[0].startswith("The sub-agent did not finish (max_steps)")

    def insisting(body: Body) -> Reply:
        return Reply(
            "",
            calls=[task(str(len(body["messages"])))],
        )

    with Office(tmp_path, insisting, again, limits=limits) as office:
        _, result = office.run()
        assert len(office.server.requests) == 6
        assert result.stop_reason == "max_steps"
    assert "did not finish (max_steps)" in results(result.messages)[-1]
    short = AgentSpec("short", mode="subagent", max_steps=2)
    with Office(
        tmp_path,
        calls_once(task(agent="short")),
        again,
        specs=(short,),
    ) as office:
        office.run()
        assert len(office.requests(True)) == 2


def test_the_schema_names_the_agents_that_there_are() -> None:
    specs = [AgentSpec("reviewer", "reviews", "subagent")]
    made = Subagents(specs, lambda spec, session_id: pytest.fail("not run")).tool
    agent = made.parameters["properties"]["agent"]
    assert agent["enum"] == ["reviewer"]
    assert agent["description"] == "reviewer: reviews"
    given = {"agent": "reviewer", "description": "look at it"}
    assert made.title_of(given) == "task reviewer: look at it"
