"""Session: the agent of the command line for any program, in any folder, thread and event loop."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coder import (
    ChatModel,
    CoderError,
    Event,
    MessageStart,
    ModelError,
    Nested,
    Notice,
    PermissionAsked,
    Reply,
    RetryPolicy,
    RunEnd,
    RunResult,
    ScriptedModel,
    ScriptedServer,
    Session,
    TextDelta,
    UndoResult,
)
from coder.asynchronous import QUEUED
from coder.events import innermost
from coder.settings import Settings
from tests.harness import all_of, commands, contents, drive, results, roles, sent, serve
from tests.terminal import until

WRITE = Reply(calls=[("write", {"path": "new.txt", "content": "new\n"})])
DONE = Reply("Done.")
LONG = Reply("word " * 2000, pace=0.01)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without anything in it, and no settings in the environment."""
    for name in [*os.environ]:
        if name.startswith(("OPENAI_", "CODER_", "XDG_")):
            monkeypatch.delenv(name)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def opened(folder: Path, server: ScriptedServer, **options: Any) -> Session:
    """A session in a folder, which is made, on this server."""
    folder.mkdir(exist_ok=True)
    settings = {"OPENAI_BASE_URL": server.url, "CODER_TITLES": "off", "CODER_RETRY_BASE": "0.01"}
    return Session.open(folder, **{"model": "m", "settings": settings} | options)


def run(session: Session, text: str = "go") -> tuple[list[Event], RunResult]:
    return drive(session.prompt(text))


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def answer_first(session: Session, answer: str, **more: str) -> None:
    """Answer the question that comes, as another thread does it."""
    until(lambda: session.questions, "a question")
    assert session.answer(session.questions[0].id, answer, **more)


def end_of(events: list[Event]) -> RunEnd:
    [end] = all_of(RunEnd, events)
    return end


# ---- a run ---------------------------------------------------------------------------------------


def test_a_session_has_what_the_command_line_has(tmp_path: Path, home: Path) -> None:
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws" / "AGENTS.md").write_text("Say please.")
    with serve(DONE) as server, opened(tmp_path / "ws", server) as session:
        events, result = run(session)
        system = server.requests[0]["messages"][0]["content"]
        tools = {each["function"]["name"] for each in server.requests[0]["tools"]}
        assert session.is_kept
        assert session.settings.host in server.url
    assert result.stop_reason == "stop"
    assert result.text == "Done."
    assert roles(session.messages) == ["user", "assistant"]
    assert "Say please." in system
    assert str(tmp_path / "ws") in system
    assert {"read", "edit", "write", "bash", "grep", "task", "todo", "ask_user"} <= tools
    assert events[-1].type in ("run_end", "status")
    assert (home / ".local/share/coder/sessions.db").exists()


def test_two_sessions_in_two_folders_work_side_by_side(tmp_path: Path) -> None:
    here = Path.cwd()
    both_asked = threading.Barrier(2, timeout=30)

    def work(session: Session) -> None:
        for event in session.prompt("go"):
            if isinstance(event, PermissionAsked):
                both_asked.wait()  # the runs overlap
                event.reply("once")

    call = Reply(calls=[("write", {"path": "mine.txt", "content": "text\n"})])
    command = Reply(calls=commands("pwd > pwd.txt"))
    rules = {"bash": "allow"}
    with (
        serve(call, command, DONE) as first,
        serve(call, command, DONE) as second,
        opened(tmp_path / "one", first, rules=rules) as one,
        opened(tmp_path / "two", second, rules=rules) as two,
    ):
        threads = [
            in_thread(lambda: work(one)),
            in_thread(lambda: work(two)),
        ]
        for thread in threads:
            thread.join(30)
        for session in (one, two):
            assert (session.cwd / "pwd.txt").read_text() == f"{session.cwd}\n"
        undone = one.undo()
        assert isinstance(undone, UndoResult)
        assert undone.paths == ["mine.txt", "pwd.txt"]
        assert list(one.cwd.iterdir()) == []
        assert one.messages == []
        assert sorted(each.name for each in two.cwd.iterdir()) == ["mine.txt", "pwd.txt"]
        assert one.id != two.id
        one.redo()
        assert (one.cwd / "mine.txt").read_text() == "text\n"
    assert Path.cwd() == here


def test_a_message_that_is_changed_after_a_run_is_kept_at_the_end(tmp_path: Path) -> None:
    with serve(DONE) as server:
        with opened(tmp_path / "ws", server) as session:
            run(session)
            session.messages[0]["content"] = "changed"
            session_id = session.id
        with opened(tmp_path / "ws", server, resume=session_id) as session:
            assert contents(session.messages) == ["changed", "Done."]


def test_nothing_of_the_process_is_changed(tmp_path: Path) -> None:
    def state() -> object:
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        return handlers, dict(os.environ), os.getcwd(), logging.getLogRecordFactory()

    before = state()
    with serve(DONE) as server, opened(tmp_path / "ws", server) as session:
        run(session)
        assert state() == before


def test_notices_come_as_events(tmp_path: Path) -> None:
    (tmp_path / "ws" / ".coder").mkdir(parents=True)
    (tmp_path / "ws" / ".coder" / "permissions.json").write_text('{"bash": "deny"}')
    with serve(DONE) as server, opened(tmp_path / "ws", server) as session:
        events, _ = run(session)
    assert any("can only deny and ask" in notice.text for notice in all_of(Notice, events))


def test_a_loop_that_is_left_ends_the_run_and_the_next_one_begins(tmp_path: Path) -> None:
    with serve(LONG, DONE) as server, opened(tmp_path / "ws", server) as session:
        for event in session.prompt("go"):
            if isinstance(event, TextDelta):
                break
        assert run(session, "again")[1].text == "Done."
    assert contents(session.messages, "user") == ["go", "again"]


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with serve(LONG) as server, opened(tmp_path / "ws", server) as session:
        events = session.prompt("go")
        next(events)
        uses: list[Callable[[], object]] = [
            lambda: session.prompt("too early"),
            lambda: session.use(agent="plan"),
            session.undo,
            session.begin,
        ]
        for use in uses:
            with pytest.raises(RuntimeError, match="at work"):
                use()
        events.close()


# ---- questions -----------------------------------------------------------------------------------


def test_a_question_waits_for_an_answer_from_another_thread(tmp_path: Path) -> None:
    with serve(WRITE, DONE) as server, opened(tmp_path / "ws", server) as session:
        answering = in_thread(lambda: answer_first(session, "once"))
        events, _ = run(session)
        answering.join()
        [asked] = all_of(PermissionAsked, events)
        assert (tmp_path / "ws" / "new.txt").read_text() == "new\n"
        assert session.questions == []
        assert not session.answer(asked.id, "no"), "the first answer counts"
        assert not session.answer("nonsense", "once")


def test_an_answer_may_come_before_the_next_event_is_taken(tmp_path: Path) -> None:
    with serve(WRITE, DONE) as server, opened(tmp_path / "ws", server) as session:
        for event in session.prompt("go"):
            if isinstance(event, PermissionAsked):
                [question] = session.questions
                assert question is event
                assert session.answer(event.id, "once")
                assert session.questions == []
                assert not session.answer(event.id, "no")
        assert (tmp_path / "ws" / "new.txt").exists()


def test_the_consumer_of_the_events_may_reply(tmp_path: Path) -> None:
    with serve(WRITE, DONE) as server, opened(tmp_path / "ws", server) as session:
        for event in session.prompt("go"):
            if isinstance(event, PermissionAsked):
                event.reply("no", "not today")
        assert "not today" in results(server)[0]
        assert not (tmp_path / "ws" / "new.txt").exists()


def test_always_counts_for_the_session(tmp_path: Path) -> None:
    again = Reply(calls=[("write", {"path": "other.txt", "content": "x"})])
    with (
        serve(WRITE, again, DONE) as server,
        opened(tmp_path / "ws", server) as session,
    ):
        answering = in_thread(lambda: answer_first(session, "always"))
        events, _ = run(session)
        answering.join()
    assert len(all_of(PermissionAsked, events)) == 1
    assert (tmp_path / "ws" / "other.txt").exists()


def test_without_an_answer_in_time_it_is_no(tmp_path: Path) -> None:
    with (
        serve(WRITE, DONE) as server,
        opened(tmp_path / "ws", server, ask_timeout=0.05) as session,
    ):
        _, result = run(session)
    assert result.stop_reason == "stop"
    assert "no answer within 0.05 s" in results(server)[0]


def test_a_session_that_does_not_ask_never_waits(tmp_path: Path) -> None:
    with (
        serve(WRITE, DONE) as server,
        opened(tmp_path / "ws", server, ask=False) as session,
    ):
        events, _ = run(session)
        offered = {each["function"]["name"] for each in server.requests[0]["tools"]}
    assert "needs permission" in results(server)[0]
    assert "ask_user" not in offered
    assert not all_of(PermissionAsked, events)


def test_a_cancel_ends_the_wait_for_an_answer(tmp_path: Path) -> None:
    with (
        serve(WRITE, DONE) as server,
        opened(tmp_path / "ws", server) as session,
    ):

        def cancel() -> None:
            until(lambda: session.questions, "a question")
            session.cancel()

        in_thread(cancel)
        _, result = run(session)
        assert result.stop_reason == "aborted"
        assert session.questions == []


@pytest.mark.parametrize(
    ("answer", "number"), [("once", 3), ("no", 2)], ids=["it runs again", "it does not"]
)
def test_a_repeated_call_is_a_question(tmp_path: Path, answer: str, number: int) -> None:
    calls = 0

    def count() -> str:
        """Count."""
        nonlocal calls
        calls += 1
        return "counted"

    again = Reply(calls=[("count", {})])
    options = {"tools": [count], "rules": {"count": "allow"}}
    with (
        serve(again, again, again, DONE) as server,
        opened(tmp_path / "ws", server, **options) as session,
    ):
        answering = in_thread(lambda: answer_first(session, answer))
        run(session)
        answering.join()
    assert calls == number


def test_a_question_of_the_model_takes_any_text(tmp_path: Path) -> None:
    ask = Reply(
        calls=[
            (
                "ask_user",
                {"question": "Which?", "options": ["a", "b"]},
            )
        ]
    )
    with serve(ask, DONE) as server, opened(tmp_path / "ws", server) as session:
        answering = in_thread(lambda: answer_first(session, "the red one"))
        run(session)
        answering.join()
    assert results(server) == ["the red one"]


def test_a_wrong_word_is_an_error_and_the_question_stays(tmp_path: Path) -> None:
    with serve(WRITE, DONE) as server, opened(tmp_path / "ws", server) as session:
        for event in session.prompt("go"):
            if isinstance(event, PermissionAsked):
                with pytest.raises(ValueError, match="once, always, no"):
                    session.answer(event.id, "maybe")
                assert session.questions == [event]
                session.answer(event.id, "no")


def test_a_question_of_a_sub_agent_has_an_id_of_its_own(tmp_path: Path) -> None:
    task = Reply(calls=[("task", {"description": "d", "prompt": "write"})])
    with (
        serve(task, WRITE, Reply("Child done."), DONE) as server,
        opened(tmp_path / "ws", server) as session,
    ):
        answering = in_thread(lambda: answer_first(session, "once"))
        events, result = run(session)
        answering.join()
    [nested] = [
        event for event in all_of(Nested, events) if isinstance(innermost(event), PermissionAsked)
    ]
    assert nested.agent == "general"
    assert result.text == "Done."
    assert (tmp_path / "ws" / "new.txt").exists()


# ---- cancel --------------------------------------------------------------------------------------


def test_no_cancel_is_lost_from_the_return_of_prompt_on(tmp_path: Path) -> None:
    reasons = []
    with (
        serve(LONG) as server,
        opened(tmp_path / "ws", server, keep=False) as session,
    ):
        for delay in (
            0.0,
            *(random.uniform(0, 0.02) for _ in range(30)),
        ):
            events = session.prompt("go")
            clock = threading.Timer(delay, session.cancel)
            clock.start()
            reasons.append(drive(events)[1].stop_reason)
            clock.join()
    assert reasons == ["aborted"] * len(reasons)


def test_a_cancel_before_the_first_event_ends_that_run_alone(tmp_path: Path) -> None:
    with serve(DONE) as server, opened(tmp_path / "ws", server) as session:
        events = session.prompt("go")
        session.cancel()
        assert drive(events)[1].stop_reason == "aborted"
        assert run(session)[1].stop_reason == "stop"


def test_close_ends_a_run_of_another_thread(tmp_path: Path) -> None:
    with serve(LONG) as server:
        session = opened(tmp_path / "ws", server)
        ended: list[RunResult] = []
        is_coming = threading.Event()

        def work() -> None:
            def show(event: Event) -> None:
                if isinstance(event, TextDelta):
                    is_coming.set()

            ended.append(drive(session.prompt("go"), show)[1])

        thread = in_thread(work)
        assert is_coming.wait(30)
        session.close()
        thread.join(30)
        session.close()  # it may be called twice
    assert [each.stop_reason for each in ended] == ["aborted"]


# ---- asyncio -------------------------------------------------------------------------------------


def test_a_run_gives_its_events_to_an_event_loop(tmp_path: Path) -> None:
    async def collect(session: Session) -> list[Event]:
        return [event async for event in session.aprompt("go")]

    with serve(DONE) as server, opened(tmp_path / "ws", server) as session:
        events = asyncio.run(collect(session))
    assert "".join(each.text for each in all_of(TextDelta, events)) == "Done."
    assert end_of(events).stop_reason == "stop"


def test_an_async_loop_that_is_left_cancels_the_run(tmp_path: Path) -> None:
    async def leave(session: Session) -> None:
        events = session.aprompt("go")
        async for event in events:
            if isinstance(event, TextDelta):
                break
        await events.aclose()
        assert not session.agent.state.is_streaming

    async def cancel_task(session: Session) -> None:
        async def take_all() -> None:
            async for event in session.aprompt("go"):
                if isinstance(event, TextDelta):
                    is_coming.set()

        is_coming = asyncio.Event()
        task = asyncio.create_task(take_all())
        await is_coming.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for way in (leave, cancel_task):
        with (
            serve(LONG) as server,
            opened(tmp_path / way.__name__, server) as session,
        ):
            asyncio.run(way(session))
            assert session.agent.token.is_set()
            assert not session.agent.state.is_streaming
            assert roles(session.messages) == ["user", "assistant"]


def test_a_close_ends_the_run_of_a_loop_that_was_only_left(tmp_path: Path) -> None:
    """A `break` does not end an async generator: its run waits for room for further events."""

    async def leave(session: Session) -> None:
        events = session.aprompt("go")
        async for event in events:
            if isinstance(event, TextDelta):
                break
        coming = session.agent.state.coming
        assert coming is not None
        await asyncio.to_thread(until, lambda: len(coming["content"]) > QUEUED)
        session.close()
        assert not session.agent.state.is_streaming

    with (
        serve(Reply("word " * 5_000)) as server,
        opened(tmp_path, server) as session,
    ):
        asyncio.run(leave(session))


def test_a_retry_policy_of_the_programs_own_holds_for_sub_agents_too(tmp_path: Path) -> None:
    class Never(RetryPolicy):
        def delay(self, error: ModelError, attempt: int) -> None:
            return None

    start = Reply(calls=[("task", {"description": "look", "prompt": "look"})])
    busy = Reply("busy", status=503)
    with (
        serve(start, busy, Reply("never")) as server,
        opened(tmp_path, server, retry=Never(), yolo=True) as session,
    ):
        run(session)
        assert len(server.requests) == 3
        assert "busy" in results(server)[-1]


def test_questions_are_answered_from_the_event_loop(tmp_path: Path) -> None:
    async def work(session: Session) -> None:
        async for event in session.aprompt("go"):
            if isinstance(event, PermissionAsked):
                assert session.answer(event.id, "once")

    with serve(WRITE, DONE) as server, opened(tmp_path / "ws", server) as session:
        asyncio.run(work(session))
    assert (tmp_path / "ws" / "new.txt").exists()


def test_a_slow_consumer_holds_the_run_up(tmp_path: Path) -> None:
    """The memory is bounded: most of the answer is still on the server."""
    passed = 0

    def count(event: Event) -> None:
        nonlocal passed
        passed += isinstance(event, TextDelta)

    async def work(session: Session) -> None:
        events = session.aprompt("go")
        async for event in events:
            if isinstance(event, TextDelta):
                break
        before = -1
        while before != passed:  # until nothing comes any more
            before = passed
            await asyncio.sleep(0.2)
        assert passed < 200
        await events.aclose()

    pieces = Reply("word " * 5000)
    with serve(pieces) as server, opened(tmp_path / "ws", server) as session:
        session.agent.subscribe(count)
        asyncio.run(work(session))


def test_an_exception_of_the_run_reaches_the_async_loop(tmp_path: Path) -> None:
    def fail(event: Event) -> None:
        if isinstance(event, MessageStart):
            raise ArithmeticError("a subscriber's")

    async def collect(session: Session) -> None:
        async for _ in session.aprompt("go"):
            pass

    with serve(DONE) as server, opened(tmp_path / "ws", server) as session:
        session.agent.subscribe(fail)
        with pytest.raises(ArithmeticError, match="a subscriber's"):
            asyncio.run(collect(session))


# ---- who works -----------------------------------------------------------------------------------


def test_another_agent_and_another_model_work_from_the_next_run_on(tmp_path: Path) -> None:
    with serve(DONE) as server, opened(tmp_path / "ws", server) as session:
        run(session)
        session.use(agent="plan")
        run(session)
        session.use(model="other")
        run(session)
        assert session.spec.name == "plan"
        assert session.model.name == "other"
        session.use(agent="build", model="third")
        run(session)
        with pytest.raises(CoderError, match="no agent 'nobody'"):
            session.use(agent="nobody")
    offered = [
        "edit" in {each["function"]["name"] for each in body["tools"]} for body in server.requests
    ]
    assert offered == [True, False, False, True]
    assert [body["model"] for body in server.requests] == ["m", "m", "other", "third"]


def test_a_program_brings_rules_tools_and_a_prompt(tmp_path: Path) -> None:
    def forecast(city: str) -> str:
        """Look up the weather.

        city: its name
        """
        return f"Rain in {city}."

    call = Reply(calls=[("forecast", {"city": "Oslo"})])
    options = {"rules": {"forecast": "allow"}, "tools": [forecast], "append_system": "Be kind."}
    with (
        serve(call, DONE) as server,
        opened(tmp_path / "ws", server, **options) as session,
    ):
        run(session)
    assert results(server) == ["Rain in Oslo."]
    assert server.requests[0]["messages"][0]["content"].endswith("\n\nBe kind.")


def test_a_model_of_the_programs_own_needs_no_settings(tmp_path: Path) -> None:
    model: ChatModel = ScriptedModel([Reply("Hello.")])
    with Session.open(tmp_path, model=model, settings={"CODER_TITLES": "off"}) as session:
        assert run(session)[1].text == "Hello."
        assert session.model is model


# ---- the conversation ----------------------------------------------------------------------------


def test_a_conversation_goes_on_in_another_session(tmp_path: Path) -> None:
    with serve(DONE) as server:
        with opened(tmp_path / "ws", server, agent="plan") as session:
            run(session, "first")
        with opened(tmp_path / "ws", server, resume=session.id) as again:
            assert again.id == session.id
            assert again.spec.name == "plan"
            assert again.messages == session.messages
            run(again, "second")
        with opened(tmp_path / "ws", server, resume=True, agent="build") as newest:
            assert newest.id == session.id
            assert newest.spec.name == "build"
            newest.begin()
            assert newest.id != session.id
            assert newest.messages == []
            newest.resume(session.id)
            assert contents(newest.messages, "user") == ["first", "second"]
    assert sent(server)[1:] == ["first", "Done.", "second"]


def test_two_sessions_cannot_have_one_conversation(tmp_path: Path) -> None:
    with serve(DONE) as server, opened(tmp_path / "ws", server) as session:
        run(session)
        with pytest.raises(CoderError, match="is open already in this"):
            opened(tmp_path / "ws", server, resume=session.id)


def test_nothing_is_kept_if_that_is_not_wanted(tmp_path: Path, home: Path) -> None:
    with (
        serve(DONE) as server,
        opened(tmp_path / "ws", server, keep=False) as session,
    ):
        run(session)
        assert session.id
        assert not session.is_kept
    assert not (home / ".local").exists()


def test_a_server_has_folders_of_its_own(tmp_path: Path, home: Path) -> None:
    for config, text in (
        (home / ".config/coder", "somebody else"),
        (tmp_path / "config", "its own"),
    ):
        config.mkdir(parents=True)
        (config / "AGENTS.md").write_text(text)
        (config / "permissions.json").write_text('{"bash": "allow"}')
    (tmp_path / "config" / "permissions.json").write_text('{"bash": "deny"}')
    skill = home / ".claude/skills/pdf"
    skill.mkdir(parents=True)
    (skill / "SKILL.md").write_text("---\ndescription: reads pages\n---\nRead.")
    options = {"config": tmp_path / "config", "data": tmp_path / "data"}
    with (
        serve(DONE) as server,
        opened(tmp_path / "ws", server, **options) as session,
    ):
        run(session)
    system = server.requests[0]["messages"][0]["content"]
    assert "its own" in system
    assert "somebody else" not in system
    assert "reads pages" not in system
    assert "bash" not in {each["function"]["name"] for each in server.requests[0]["tools"]}
    assert (tmp_path / "data/sessions.db").exists()
    assert not (home / ".local").exists()


def test_an_mcp_server_is_told_the_folder_of_the_session(tmp_path: Path) -> None:
    program = [str(Path(__file__).with_name("mcp_server.py"))]
    entry = {"command": sys.executable, "args": program, "cwd": "${PWD}"}
    config = tmp_path / "config"
    config.mkdir()
    (config / "mcp.json").write_text(json.dumps({"mcpServers": {"io": entry}}))
    call = Reply(calls=[("io__facts", {"variable": "HOME"})])
    options = {"config": config, "rules": {"mcp": "allow"}}
    with (
        serve(call, DONE) as server,
        opened(tmp_path / "ws", server, **options) as session,
    ):
        run(session)
    assert str(tmp_path / "ws") in results(server)[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"agent": "nobody"}, "no agent 'nobody'"),
        ({"resume": "nothing"}, "no session 'nothing'"),
        ({"resume": True}, "no conversation in this folder"),
        ({"settings": {"OPENAI_BASE_URI": "x"}}, "no setting OPENAI_BASE_URI"),
        ({"settings": {}}, "no key"),
        ({"sandbox": "maybe"}, "CODER_SANDBOX"),
        ({"rules": {"bash": "perhaps"}}, "is not one of allow, ask, deny"),
        ({"cwd": "missing"}, "there is no folder"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_opened_is_one_clear_error(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    folder = tmp_path / options.pop("cwd", "")
    settings = {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1"}
    with pytest.raises(CoderError, match=message) as raised:
        Session.open(folder, **{"model": "m", "settings": settings} | options)
    assert "\n" not in str(raised.value)


def test_a_wrong_sandbox_is_refused_next_to_a_programs_own_settings(tmp_path: Path) -> None:
    own = Settings(base_url="http://127.0.0.1:9/v1", model="m")
    with pytest.raises(CoderError, match=r"CODER_SANDBOX: 'maybe' has to be auto, on .* or off"):
        Session.open(tmp_path, settings=own, sandbox="maybe")


def test_a_session_refuses_a_model_of_ones_own(tmp_path: Path) -> None:
    class Own:
        name = "own"
        context_window = 8_000

    with pytest.raises(CoderError, match="a model of your own goes into an Agent"):
        Session.open(tmp_path, model=Own())  # type: ignore[arg-type]


def test_no_title_is_asked_for_if_nothing_is_kept(tmp_path: Path) -> None:
    model = ScriptedModel([Reply("Well.")])
    folders = {"config": tmp_path / "config", "data": tmp_path / "data"}
    with Session.open(tmp_path, model=model, keep=False, **folders) as session:
        assert session.run("hello").text == "Well."
    assert len(model.requests) == 1
