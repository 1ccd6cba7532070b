"""Hooks: several in a row, plain functions, a guard around what may fail, commands of the user's."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from coder.abort import Abort
from coder.agent.agent import Agent
from coder.ai import ChatModel
from coder.devtools.scripted import Reply
from coder.events import Event, HookFailed, Notice, ToolEnd
from coder.extend.command_hooks import HooksError, command_hooks
from coder.extend.guard import Guard
from coder.hooks import HOOK_NAMES, FunctionHooks, HookChain, Hooks
from coder.toolset import ToolContext, tool
from coder.types import DeniedError, ModelError, Request, ToolCall, ToolResult
from tests.harness import FAST, ask, serve
from tests.terminal import promptly, until


@tool
def add(a: int, b: int) -> str:
    """Add.

    a: one
    b: other
    """
    return str(a + b)


CALL = Reply(calls=[("add", {"a": 1, "b": 2})])


def result_of(
    *hooks: Hooks, replies: tuple[Reply, ...] = (CALL, Reply("done"))
) -> tuple[str, list[Event]]:
    """The result of one call of add under these hooks, and all events."""
    with serve(*replies) as server:
        events, _ = ask(server, tools=[add], hooks=HookChain(*hooks))
    return next(
        (str(event.result.content) for event in events if isinstance(event, ToolEnd)), ""
    ), events


# ---- in a row --------------------------------------------------------------------------------------------


def test_each_hook_sees_what_those_before_it_have_changed() -> None:
    """K07, K09 to K12, P05."""

    def double(call: ToolCall, ctx: Any) -> None:
        assert call.arguments
        call.arguments["a"] *= 2

    def more(call: ToolCall, ctx: Any) -> None:
        assert call.arguments
        call.arguments["a"] += 1

    def marked(sign: str) -> Any:
        return lambda call, result: ToolResult(f"{result.content}{sign}")

    said, _ = result_of(
        FunctionHooks(before_tool_call=double, after_tool_call=marked("!")),
        FunctionHooks(before_tool_call=more, after_tool_call=marked("?")),
    )
    assert said == "5!?"  # 1 * 2 + 1 + 2, and not (1 + 1) * 2 + 2


def test_requests_context_and_tools_are_changed_in_order_and_the_answer_is_only_looked_at() -> None:
    seen: list[str] = []

    def system(text: str) -> Any:
        def change(request: Request) -> None:
            request.system += text
            request.tools = [] if text == "b" else request.tools

        return change

    first = FunctionHooks(
        before_llm_call=system("a"),
        transform_context=lambda messages, abort: [*messages, user("one")],
        after_llm_call=lambda completion: seen.append(completion.text),
    )
    second = FunctionHooks(
        before_llm_call=system("b"),
        transform_context=lambda messages, abort: [*messages, user("two")],
        get_api_key=lambda: "second",
    )
    with serve(Reply("hi")) as server:
        _, result = ask(server, tools=[add], hooks=HookChain(first, second))
        body = server.requests[0]
        assert [message["content"] for message in body["messages"]] == [
            "ab",
            "go",
            "one",
            "two",
        ] and "tools" not in body
        assert server.heads[0]["authorization"] == "Bearer second"
    assert seen == ["hi"] and [message["content"] for message in result.messages] == ["go", "hi"]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_the_first_that_answers_or_blocks_a_call_is_the_last_that_is_asked() -> None:
    asked: list[str] = []
    late = FunctionHooks(before_tool_call=lambda call, ctx: asked.append(call.name))
    assert (
        result_of(FunctionHooks(before_tool_call=lambda call, ctx: ToolResult("mine")), late)[0]
        == "mine"
    )

    def no(call: ToolCall, ctx: Any) -> None:
        raise DeniedError("not today")

    said, events = result_of(FunctionHooks(before_tool_call=no), late)
    assert (
        said == "Denied: not today"
        and asked == []
        and any(isinstance(e, ToolEnd) and e.is_error for e in events)
    )


def test_a_hook_may_say_something_and_a_chain_may_hold_a_chain() -> None:
    def loud(call: ToolCall, ctx: Any) -> Generator[Event, None, None]:
        yield Notice(f"calling {call.name}")

    _, events = result_of(HookChain(HookChain(FunctionHooks(before_tool_call=loud))))
    assert [event.text for event in events if isinstance(event, Notice)] == ["calling add"]


def test_a_hook_that_does_not_exist_is_said() -> None:
    with pytest.raises(
        TypeError, match="there is no hook 'before_tool'; known: on_run_start, before_llm_call"
    ):
        FunctionHooks(before_tool=lambda: None)


# ---- guarded ---------------------------------------------------------------------------------------------


def fails(*_: Any) -> None:
    raise ZeroDivisionError("oh")


def hangs(*_: Any) -> None:
    threading.Event().wait(60)


@pytest.mark.parametrize("broken", [fails, hangs])
@pytest.mark.parametrize("place", sorted({*HOOK_NAMES} - {"on_doom_loop", "on_compacted"}))
def test_an_open_guard_reports_and_goes_on(place: str, broken: Any) -> None:
    """K25."""
    with promptly(10):
        said, events = result_of(Guard(FunctionHooks(**{place: broken}), name="mine", seconds=0.1))
    failed = [event for event in events if isinstance(event, HookFailed)]
    assert said == "3"
    assert [(event.hook, event.place) for event in failed] == [("mine", place)], "once"
    assert (
        "ZeroDivisionError: oh" if broken is fails else "TimeoutError: no answer within 0.1 s"
    ) in failed[0].error


@pytest.mark.parametrize("place", ["before_tool_call", "after_tool_call"])
def test_a_closed_guard_fails_the_call_and_shows_nothing_of_its_result(place: str) -> None:
    said, events = result_of(Guard(FunctionHooks(**{place: fails}), name="mine", closed=True))
    assert said == "Error: the hook mine failed: oh" and any(
        isinstance(event, HookFailed) for event in events
    )


def test_a_closed_guard_lets_no_request_out() -> None:
    with serve(Reply("hi")) as server:
        _, result = ask(
            server, hooks=Guard(FunctionHooks(before_llm_call=fails), name="redact", closed=True)
        )
        assert server.requests == [] and result.error and result.error.kind == "bad_request"
        assert "the hook redact failed: oh, so nothing was sent" in result.text


def test_a_guarded_hook_that_works_does_what_it_would_do_alone() -> None:
    def ask_first(call: ToolCall, ctx: Any) -> Generator[Event, None, ToolResult | None]:
        yield Notice("one")
        yield Notice("two")
        assert call.arguments
        call.arguments["a"] = 10
        return None

    def no(call: ToolCall, ctx: Any) -> None:
        raise DeniedError("no")

    said, events = result_of(Guard(FunctionHooks(before_tool_call=ask_first)))
    assert said == "12" and [event.text for event in events if isinstance(event, Notice)] == [
        "one",
        "two",
    ]
    said, events = result_of(Guard(FunctionHooks(before_tool_call=no)))
    assert said == "Denied: no" and not any(isinstance(event, HookFailed) for event in events)


def test_an_abort_does_not_wait_for_a_guarded_hook() -> None:
    abort = Abort()
    hook = FunctionHooks(before_tool_call=lambda call, ctx: (abort.set(), hangs()))
    with serve(CALL) as server, promptly(10):
        _, result = ask(server, tools=[add], abort=abort, hooks=Guard(hook))
    assert result.stop_reason == "aborted" and result.messages[-1]["role"] == "tool"


def test_a_hook_that_is_not_guarded_ends_the_run_with_its_bug_and_a_history_in_order() -> None:
    messages: list[dict[str, Any]] = []
    with serve(CALL) as server, pytest.raises(ZeroDivisionError):
        ask(server, tools=[add], messages=messages, hooks=FunctionHooks(before_tool_call=fails))
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]


def test_a_request_can_be_refused_by_a_hook() -> None:
    def refuse(request: Request) -> None:
        raise ModelError("bad_request", "too late in the day")

    with serve(Reply("hi")) as server:
        assert (
            ask(server, hooks=FunctionHooks(before_llm_call=refuse))[1].text
            == "Error: too late in the day"
            and not server.requests
        )


# ---- commands --------------------------------------------------------------------------------------------


def commands(folder: Path, **places: Any) -> HookChain:
    path = folder / "hooks.json"
    path.write_text(
        json.dumps(
            {
                place: [{"command": entry} if isinstance(entry, str) else entry]
                for place, entry in places.items()
            }
        )
    )
    return command_hooks(path)


def test_a_command_gets_the_facts_as_json_and_can_change_arguments_and_results(
    tmp_path: Path,
) -> None:
    before = f'cat > {tmp_path}/asked.json; echo \'{{"arguments": {{"a": 40, "b": 2}}}}\''
    said, _ = result_of(
        commands(
            tmp_path,
            before_tool_call=before,
            after_tool_call='cat > got.json; echo \'{"result": "hidden"}\'',
        )
    )
    asked, got = (json.loads((tmp_path / name).read_text()) for name in ("asked.json", "got.json"))
    assert said == "hidden" and (asked["hook"], asked["tool"], asked["arguments"]) == (
        "before_tool_call",
        "add",
        {"a": 1, "b": 2},
    )
    assert (got["arguments"], got["result"], got["is_error"]) == ({"a": 40, "b": 2}, "42", False)
    assert asked["cwd"] == os.getcwd()


def test_exit_code_two_blocks_with_what_the_command_wrote(tmp_path: Path) -> None:
    assert (
        result_of(commands(tmp_path, before_tool_call="echo no add >&2; exit 2"))[0]
        == "Denied: no add"
    )
    assert (
        result_of(commands(tmp_path, after_tool_call="exit 2"))[0] == "Withheld: blocked by a hook"
    )
    with serve(Reply("hi")) as server:
        _, result = ask(
            server, hooks=commands(tmp_path, before_llm_call="echo not now >&2; exit 2")
        )
        assert "not now" in result.text and server.requests == []


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("exit 3", "exit code 3"),
        ("echo bad >&2; exit 1", "exit code 1: bad"),
        ("sleep 60", "timeout"),
        ("/no/such/program", "exit code 127"),
    ],
)
def test_a_command_that_fails_is_told_and_passed_over_unless_it_is_closed(
    tmp_path: Path, command: str, said: str
) -> None:
    with promptly(15):
        result, events = result_of(
            commands(tmp_path, before_tool_call={"command": command, "seconds": 0.3})
        )
        assert result == "3" and said in next(
            event.error for event in events if isinstance(event, HookFailed)
        )
        result, _ = result_of(
            commands(
                tmp_path, before_tool_call={"command": command, "seconds": 0.3, "closed": True}
            )
        )
        assert result.startswith("Error: the hook") and said in result


def test_a_command_is_asked_for_the_tools_it_names_and_works_where_its_file_is(
    tmp_path: Path,
) -> None:
    chain = commands(
        tmp_path, before_tool_call={"command": "pwd > here; exit 2", "tools": "bash|edit"}
    )
    assert result_of(chain)[0] == "3" and not (tmp_path / "here").exists()
    assert result_of(
        commands(tmp_path, before_tool_call={"command": "pwd > here; exit 2", "tools": "bash|add"})
    )[0].startswith("Denied")
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
    ],
)
def test_a_file_of_hooks_that_is_none_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "hooks.json").write_text(text)
    with pytest.raises(HooksError, match=r"hooks\.json: "):
        command_hooks(tmp_path / "hooks.json")
    assert command_hooks(tmp_path / "none.json").hooks == []


# ---- aborts ----------------------------------------------------------------------------------------------


def test_an_abort_of_one_run_does_not_end_the_next() -> None:
    """A guard that was told of a run's abort must forget it."""

    class Slow(Hooks):
        def before_tool_call(self, call: ToolCall, ctx: ToolContext) -> None:
            return None

        def after_llm_call(self, completion: Any) -> None:
            time.sleep(0.12)  # longer than a look at the token

    @tool
    def wait(ctx: ToolContext) -> str:
        """Wait."""
        ctx.abort.wait(20)
        return "?"

    with serve(Reply(calls=[("wait", {})]), Reply("two"), Reply("three")) as server:
        agent = Agent(
            ChatModel("m", base_url=server.url), tools=[wait], hooks=Guard(Slow()), retry=FAST
        )
        stop = agent.subscribe(lambda event: agent.abort() if event.type == "tool_start" else None)
        assert agent.run("go").stop_reason == "aborted"
        stop()
        assert [agent.run("again").text for _ in range(2)] == ["two", "three"]


@pytest.mark.parametrize(
    "place", ["before_llm_call", "after_llm_call", "before_tool_call", "after_tool_call"]
)
def test_an_abort_ends_a_command_wherever_it_is_asked(tmp_path: Path, place: str) -> None:
    """The shell of the command writes its own number, and is gone after the run."""
    abort = Abort()

    def stop() -> None:
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        abort.set()

    chain = commands(tmp_path, **{place: {"command": "echo $$ > pid; exec sleep 60"}})
    threading.Thread(target=stop, daemon=True).start()
    with serve(CALL, Reply("done")) as server, promptly(20):
        events, result = ask(server, tools=[add], hooks=chain, abort=abort)
    kinds = [event.type for event in events]
    assert result.stop_reason == "aborted" and kinds.count("tool_start") == kinds.count("tool_end")
    pid = (tmp_path / "pid").read_text().strip()
    until(lambda: not Path(f"/proc/{pid}").exists(), "the command is gone")


def test_a_hook_that_gives_something_else_than_a_result_is_named() -> None:
    wrong = FunctionHooks(after_tool_call=lambda call, result: "x")
    with serve(CALL) as server, pytest.raises(TypeError, match="after_tool_call returned 'x'"):
        ask(server, tools=[add], hooks=wrong)
