"""Hooks: several in a row, plain functions, a guard around what may fail, commands of the
user's."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from coder.abort import Abort
from coder.agent.agent import Agent
from coder.ai import ChatModel
from coder.devtools.scripted import Reply
from coder.events import Event, Notice, ToolEnd, ToolStart
from coder.extend.guard import Guard, command_hooks
from coder.history import user
from coder.hooks import HOOK_NAMES, FunctionHooks, HookChain, Hooks
from coder.providers.wire import copied
from coder.types import CoderError, DeniedError, Request, ToolCall, ToolResult
from tests.harness import FAST, ONE, add, all_of, ask, contents, quick, roles, serve
from tests.terminal import promptly, until


def result_of(*hooks: Hooks) -> tuple[str, list[Event]]:
    """The result of one call of add under these hooks, and all events."""
    with serve(ONE, Reply("done")) as server:
        events, _ = ask(server, tools=[add], hooks=HookChain(*hooks))
    [end] = all_of(ToolEnd, events)
    return str(end.result.content), events


# ---- in a row -------------------------------------------------------------------------------


def test_each_hook_sees_what_those_before_it_have_changed() -> None:
    """K07, K09 to K12, P05."""
    seen: list[str] = []

    def calling(change: Any) -> Any:
        return lambda call, ctx: call.arguments.update(a=change(call.arguments["a"]))

    def marked(sign: str) -> Any:
        return lambda call, result: ToolResult(f"{result.content}{sign}")

    def asking(text: str) -> Any:
        def change(request: Request) -> None:
            request.system += text
            request.tools = [] if len(request.messages) > 4 else request.tools

        return change

    def adding(text: str) -> Any:
        return lambda messages, abort: [*messages, user(text)]

    first = FunctionHooks(
        before_tool_call=calling(lambda a: a * 2),
        after_tool_call=marked("!"),
        before_llm_call=asking("a"),
        transform_context=adding("one"),
        after_llm_call=lambda completion: seen.append(completion.text),
    )
    second = FunctionHooks(
        before_tool_call=calling(lambda a: a + 1),
        after_tool_call=marked("?"),
        before_llm_call=asking("b"),
        transform_context=adding("two"),
        get_api_key=lambda: "second",
    )
    with serve(ONE, Reply("done")) as server:
        _, result = ask(
            server,
            tools=[add],
            hooks=HookChain(first, HookChain(second)),
        )
        before, after = server.requests
        assert server.heads[0]["authorization"] == "Bearer second"
    assert contents(before["messages"]) == ["ab", "go", "one", "two"]
    assert "tools" in before
    assert "tools" not in after
    assert seen == ["", "done"]
    assert contents(result.messages) == ["go", None, "5!?", "done"], "1 * 2 + 1 + 2"


def refuse(call: ToolCall, ctx: Any) -> None:
    raise DeniedError("not today")


def test_the_first_that_answers_or_blocks_a_call_is_the_last_that_is_asked() -> None:
    asked: list[str] = []
    late = FunctionHooks(before_tool_call=lambda call, ctx: asked.append(call.name))
    answer = FunctionHooks(before_tool_call=lambda call, ctx: ToolResult("mine"))
    assert result_of(answer, late)[0] == "mine"
    output, events = result_of(FunctionHooks(before_tool_call=refuse), late)
    assert output == "Denied: not today"
    assert asked == []
    assert all_of(ToolEnd, events)[0].is_error


@quick
def total(numbers: list[int], table: dict[str, Any]) -> str:
    return f"{sum(numbers)} {table}"


SENT = {"numbers": "[1, 2]", "table": '{"a": [1]}'}
CHECKED = {"numbers": [1, 2], "table": {"a": [1]}}
BROKEN = {
    "cut": '{"numbers": [1',
    "no object": "[1]",
    "of another type": {"numbers": "one", "table": {}},
    "without one": {"numbers": [1]},
    "with one too many": CHECKED | {"more": 1},
}


@pytest.mark.parametrize("broken", [None, *BROKEN])
def test_hooks_and_subscribers_see_arguments_that_were_checked(broken: str | None) -> None:
    """They are never None. A call that cannot be made is answered before a hook around tools sees
    it, and shown as {}."""
    seen: dict[str, list[Any]] = {name: [] for name in ("answer", "before", "after", "start")}
    hooks = FunctionHooks(
        after_llm_call=lambda done: seen["answer"].extend(c.arguments for c in done.calls),
        before_tool_call=lambda call, ctx: seen["before"].append(copied(call.arguments)),
        after_tool_call=lambda call, result: seen["after"].append(call.arguments),
    )

    def each(event: Event) -> None:
        if isinstance(event, ToolStart):
            seen["start"].append(event.arguments)

    call = ("total", SENT if broken is None else BROKEN[broken])
    with serve(Reply(calls=[call]), Reply("done")) as server:
        events, result = ask(server, tools=[total], hooks=hooks, each=each)
    [end] = all_of(ToolEnd, events)
    assert all(isinstance(each, dict) for each in seen["answer"])
    assert result.text == "done"
    if broken:
        assert end.is_error
        assert end.result.content.startswith("Error: ")
        assert seen["before"] == []
        assert seen["after"] == []
        assert seen["start"] == [{}]
    else:
        assert end.result.content == "3 {'a': [1]}"
        assert seen["before"] == seen["after"] == seen["start"] == [CHECKED]


def test_what_a_hook_makes_of_the_arguments_is_checked_again() -> None:
    def change(to: Any) -> Hooks:
        return FunctionHooks(before_tool_call=lambda call, ctx: call.arguments.update(a=to))

    assert result_of(change("40"))[0] == "42"
    assert "a has to be of type integer" in result_of(change("forty"))[0]


def test_a_subscriber_that_changes_what_it_is_shown_changes_nothing() -> None:
    def each(event: Event) -> None:
        if isinstance(event, ToolStart):
            event.arguments["table"]["a"].append(2)
            event.arguments["numbers"].clear()

    with serve(
        Reply(calls=[("total", CHECKED)]),
        Reply("done"),
    ) as server:
        events, _ = ask(server, tools=[total], each=each)
    assert all_of(ToolEnd, events)[0].result.content == "3 {'a': [1]}"


def test_a_hook_that_does_not_exist_is_named() -> None:
    with pytest.raises(TypeError, match="there is no hook 'before_tool'; known: on_run_start"):
        FunctionHooks(before_tool=lambda: None)


@pytest.mark.parametrize("name", ["before_tool_call", "after_tool_call"])
def test_a_hook_that_returns_no_result_for_a_call_is_named(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} returned 'yes', which is no ToolResult"):
        result_of(FunctionHooks(**{name: lambda *_: "yes"}))


# ---- guarded --------------------------------------------------------------------------------


def fails(*_: Any) -> None:
    raise ZeroDivisionError("oh")


def hangs(*_: Any) -> None:
    threading.Event().wait(60)


@pytest.mark.parametrize("broken", [fails, hangs])
@pytest.mark.parametrize(
    "place",
    sorted({*HOOK_NAMES} - {"on_doom_loop", "on_compacted"}),
)
def test_an_open_guard_reports_once_and_goes_on(place: str, broken: Any) -> None:
    """K25."""
    with promptly():
        seconds = 0.1 if broken is hangs else 60
        guard = Guard(FunctionHooks(**{place: broken}), name="mine", seconds=seconds)
        output, events = result_of(guard)
    late = "TimeoutError: no answer within 0.1 s"
    error = "ZeroDivisionError: oh" if broken is fails else late
    [notice] = all_of(Notice, events)
    assert output == "3"
    assert notice.text == f"The hook mine failed ({place}): {error}"


@pytest.mark.parametrize("place", ["before_tool_call", "after_tool_call", "before_llm_call"])
def test_a_closed_guard_rejects_what_its_hook_checks_before_or_after(place: str) -> None:
    guard = Guard(FunctionHooks(**{place: fails}), name="mine", closed=True)
    with serve(ONE, Reply("done")) as server:
        events, result = ask(server, tools=[add], hooks=guard)
        sent = len(server.requests)
    assert len(all_of(Notice, events)) == 1
    if place == "before_llm_call":
        assert sent == 0
        assert "the hook mine failed: oh, so the request was not sent" in result.text
    else:
        assert result.messages[2]["content"] == "Error: the hook mine failed: oh"


@pytest.mark.parametrize("seconds", [30.0, None])
def test_a_guarded_hook_that_works_does_what_it_would_do_alone(seconds: float | None) -> None:
    def report(call: ToolCall, ctx: Any) -> Generator[Event, None, ToolResult | None]:
        yield Notice("one")
        yield Notice("two")
        assert call.arguments
        call.arguments["a"] = 10
        return None

    output, events = result_of(Guard(FunctionHooks(before_tool_call=report), seconds=seconds))
    assert output == "12"
    assert [event.text for event in all_of(Notice, events)] == ["one", "two"]
    output, events = result_of(Guard(FunctionHooks(before_tool_call=refuse), seconds=seconds))
    assert output == "Denied: not today"
    assert not all_of(Notice, events)


def test_a_hook_that_is_not_guarded_ends_the_run_with_its_bug_and_a_history_in_order() -> None:
    messages: list[dict[str, Any]] = []
    events: list[Event] = []
    options = {"messages": messages, "hooks": FunctionHooks(before_tool_call=fails)}
    with serve(ONE) as server, pytest.raises(ZeroDivisionError):
        ask(server, tools=[add], each=events.append, **options)
    assert roles(messages) == ["user", "assistant", "tool"]
    assert isinstance(events[-1], ToolStart), "no end is reported: the exception is the end"


def test_an_abort_does_not_wait_for_a_guarded_hook_and_does_not_end_the_next_run() -> None:
    class Slow(Hooks):
        def before_tool_call(self, call: ToolCall, ctx: Any) -> None:
            agent.abort()
            hangs()

    with serve(ONE, Reply("two"), Reply("three")) as server, promptly():
        model = ChatModel("m", base_url=server.url)
        agent = Agent(
            model,
            tools=[add],
            hooks=Guard(Slow()),
            retry=FAST,
        )
        assert agent.run("go").stop_reason == "aborted"
        assert roles(agent.messages)[-1] == "tool"
        assert [agent.run("again").text for _ in range(2)] == ["two", "three"]


# ---- commands -------------------------------------------------------------------------------


def commands(folder: Path, **places: Any) -> HookChain:
    entries = {
        place: [{"command": entry} if isinstance(entry, str) else entry]
        for place, entry in places.items()
    }
    (folder / "hooks.json").write_text(json.dumps(entries))
    return HookChain(*command_hooks(folder / "hooks.json"))


def test_a_command_gets_json_and_can_change_arguments_and_results(tmp_path: Path) -> None:
    before = f'cat > {tmp_path}/asked.json; echo \'{{"arguments": {{"a": 40, "b": 2}}}}\''
    after = 'cat > got.json; echo \'{"result": "hidden"}\''
    output, _ = result_of(commands(tmp_path, before_tool_call=before, after_tool_call=after))
    asked, got = (json.loads((tmp_path / name).read_text()) for name in ("asked.json", "got.json"))
    assert output == "hidden"
    assert asked["cwd"] == os.getcwd()
    facts = asked["hook"], asked["tool"], asked["arguments"]
    assert facts == ("before_tool_call", "add", {"a": 1, "b": 2})
    assert got["arguments"] == {"a": 40, "b": 2}
    assert got["result"] == "42"
    assert got["is_error"] is False


def test_exit_code_two_blocks_with_what_the_command_wrote(tmp_path: Path) -> None:
    before = commands(tmp_path, before_tool_call="echo no add >&2; exit 2")
    assert result_of(before)[0] == "Denied: no add"
    after = commands(tmp_path, after_tool_call="exit 2")
    assert result_of(after)[0] == "Error: blocked by a hook"
    with serve(Reply("hi")) as server:
        hooks = commands(tmp_path, before_llm_call="echo not now >&2; exit 2")
        assert "not now" in ask(server, hooks=hooks)[1].text
        assert server.requests == []


@pytest.mark.parametrize(
    ("command", "error"), [("echo bad >&2; exit 1", "exit code 1: bad"), ("sleep 60", "timeout")]
)
def test_a_failed_command_is_ignored_if_open(tmp_path: Path, command: str, error: str) -> None:
    entry = {"command": command, "seconds": 0.3 if error == "timeout" else 60}
    with promptly():
        output, events = result_of(commands(tmp_path, before_tool_call=entry))
        assert output == "3"
        assert error in all_of(Notice, events)[0].text
        output, _ = result_of(commands(tmp_path, before_tool_call=entry | {"closed": True}))
        assert output.startswith("Error: the hook")
        assert error in output


@pytest.mark.parametrize(
    ("size", "expected"),
    [(200_000, "xxx"), (2_000_000, "Error: the hook")],
)
def test_an_answer_that_is_cut_is_a_failure(tmp_path: Path, size: int, expected: str) -> None:
    (tmp_path / "answer").write_text(json.dumps({"result": "x" * size}))
    chain = commands(tmp_path, after_tool_call={"command": "cat answer", "closed": True})
    assert result_of(chain)[0].startswith(expected)


def test_a_command_is_asked_for_the_tools_it_names_besides_its_file(tmp_path: Path) -> None:
    entry = {"command": "pwd > here; exit 2", "tools": "bash|edit"}
    assert result_of(commands(tmp_path, before_tool_call=entry))[0] == "3"
    assert not (tmp_path / "here").exists()
    chain = commands(tmp_path, before_tool_call=entry | {"tools": "bash|add"})
    assert result_of(chain)[0].startswith("Denied")
    assert (tmp_path / "here").read_text().strip() == str(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "{oops",
        "[]",
        '{"before": [{"command": "x"}]}',
        '{"before_tool_call": [{}]}',
        '{"before_tool_call": "x"}',
        '{"before_tool_call": [{"command": "x", "tool": "y"}]}',
        '{"before_tool_call": [{"command": "x", "seconds": "y"}]}',
        '{"before_tool_call": [{"command": "x", "tools": "("}]}',
    ],
)
def test_a_file_of_hooks_that_is_none_is_an_error_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "hooks.json").write_text(text)
    with pytest.raises(CoderError, match=r"hooks\.json: [^\n]+$"):
        command_hooks(tmp_path / "hooks.json")
    assert command_hooks(tmp_path / "none.json") == []


@pytest.mark.parametrize("place", ["before_llm_call", "after_tool_call"])
def test_an_abort_ends_a_command_wherever_it_is_asked(tmp_path: Path, place: str) -> None:
    """The shell of the command writes its own number, and is gone after the run."""
    abort = Abort()
    number = tmp_path / "pid"

    def stop() -> None:
        until(lambda: number.exists() and number.read_text())
        abort.set()

    chain = commands(tmp_path, **{place: {"command": "echo $$ > pid; exec sleep 60"}})
    threading.Thread(target=stop, daemon=True).start()
    with serve(ONE, Reply("done")) as server, promptly(20):
        events, result = ask(server, tools=[add], hooks=chain, abort=abort)
    kinds = [event.type for event in events]
    assert result.stop_reason == "aborted"
    assert kinds.count("tool_start") == kinds.count("tool_end")
    pid = number.read_text().strip()
    until(lambda: not Path(f"/proc/{pid}").exists(), "the command is gone")
