"""Sessions on disk: what is in the file is what was in memory, whatever happens. Groups SES and INV
of the reference."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import random
import re
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from coder import Agent, ChatModel, SessionStore
from coder.devtools.scripted import Body, Reply, ScriptedModel, ScriptedServer
from coder.events import Compacted, Event, Nested, RunEnd, TextDelta
from coder.history import NOT_RUN, repair, user, wire_messages
from coder.hooks import FunctionHooks
from coder.loop import run_loop
from coder.providers.wire import copied
from coder.sessions.database import StoreError
from coder.sessions.recorder import Recorder, fork
from coder.sessions.session_lock import SessionLock
from coder.sessions.store import (
    APPLICATION,
    INTERRUPTED,
    VERSION,
    Store,
    open_store,
    to_model_messages,
)
from coder.types import Limits, Message, Usage
from tests.harness import add, ask, assert_all_valid, assert_valid, contents, drive, serve
from tests.terminal import PATIENCE, ROOT
from tests.test_random import QUICK, TOOLS, Left, Moment, drawn

TWO = Reply(
    "Let me see.",
    calls=[
        ("add", {"a": 1, "b": 2}),
        ("add", {"a": 3, "b": 4}),
    ],
    reasoning="Two sums.",
)
SHORTENED = Compacted("manual", 1, {"messages": 4}, {"messages": 1}, "summary")


def said(text: str, role: str = "user", **meta: Any) -> Message:
    return {"role": role, "content": text, "meta": {"timestamp": 1} | meta}


def calling(*ids: str, name: str = "add", arguments: str = "{}", **more: Any) -> Message:
    function = {"name": name, "arguments": arguments}
    calls = [{"id": each, "type": "function", "function": function} for each in ids]
    return {"role": "assistant", "content": "", "tool_calls": calls} | more


def result(call_id: str, text: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def kept(store: Store, *messages: Message, directory: str = "/ws", **names: str) -> str:
    """A session with these messages in it; its id."""
    info = store.create(directory, **names)
    Recorder(store, info, list(messages)).close()
    return info.id


def opened(store: Store, session_id: str, **options: Any) -> Recorder:
    return Recorder(store, store.get(session_id), **options)


def states(store: Store, session_id: str) -> list[Any]:
    query = "SELECT state FROM part WHERE session = ? AND type = 'tool' ORDER BY id"
    return [row["state"] for row in store.rows(query, session_id)]


def table(store: Store, session_id: str) -> list[tuple[int, str]]:
    """(active, content) of all messages ever, in the order of a transcript."""
    query = "SELECT active, data FROM message WHERE session = ? ORDER BY position"
    rows = store.rows(query, session_id)
    return [
        (
            row["active"],
            json.loads(row["data"])["content"],
        )
        for row in rows
    ]


def active(store: Store, session_id: str) -> list[Message]:
    """The list as it is in the file, without a repair."""
    query = "SELECT data FROM message WHERE session = ? AND active ORDER BY position"
    return [json.loads(row["data"]) for row in store.rows(query, session_id)]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    """A child process that runs `code`."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        text=True,
        stdin=pipe,
        stdout=pipe,
    )


# ---- the file ----------------------------------------------------------------------------------


@pytest.mark.case("SES-09")
@pytest.mark.parametrize("mask", [0o000, 0o022])
def test_the_file_is_its_owners_alone_or_is_tightened(tmp_path: Path, mask: int) -> None:
    (tmp_path / "project.txt").touch(0o644)
    before = os.umask(mask)
    names = ("", "-wal", "-shm")
    path = tmp_path / "share" / "coder" / "sessions.db"
    try:
        with (
            Store(path) as store,
            Recorder(
                store,
                store.create("/ws"),
                [],
            ),
        ):
            locks = path.with_name("sessions.db.locks")
            for name in names:
                os.chmod(f"{path}{name}", 0o644)
            Store(path).close()
            assert {mode(Path(f"{path}{name}")) for name in names} == {0o600}
            assert {mode(each) for each in (path.parents[1], path.parent, locks)} == {0o700}
            assert [mode(each) for each in locks.iterdir()] == [0o600]
    finally:
        os.umask(before)


@pytest.mark.case("SES-15")
def test_a_file_of_a_newer_version_or_another_program_is_not_touched(tmp_path: Path) -> None:
    newer, foreign, marked = (tmp_path / name for name in "nfm")
    Store(newer).close()
    for path, change in (
        (newer, f"PRAGMA user_version = {VERSION + 1}"),
        (foreign, "CREATE TABLE bookmarks (url TEXT)"),
        (marked, "PRAGMA application_id = 7"),
    ):
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.execute(change)
    for path, why in (
        (newer, "made by a newer version of coder"),
        (foreign, "belongs to another program"),
        (marked, "another program"),
    ):
        path.chmod(0o644)
        before = path.read_bytes(), path.stat().st_mtime_ns, mode(path)
        with pytest.raises(StoreError, match=why):
            Store(path)
        assert (
            path.read_bytes(),
            path.stat().st_mtime_ns,
            mode(path),
        ) == before
        in_memory, notice = open_store(path)
        assert in_memory.in_memory
        assert notice.endswith(" This session is not saved.")
        assert "\n" not in notice
    (tmp_path / "empty").touch()
    with Store(tmp_path / "empty") as store:
        assert store.rows("PRAGMA application_id")[0][0] == APPLICATION


@pytest.mark.case("SES-16")
@pytest.mark.parametrize("place", ["a file", "/proc/nowhere"])
def test_if_nothing_can_be_written_it_goes_on_in_memory(tmp_path: Path, place: str) -> None:
    (tmp_path / "a file").touch()
    path = tmp_path / place / "coder" / "sessions.db"
    store, notice = open_store(path)
    assert notice.startswith(f"The file of the sessions {path}: ")
    assert notice.endswith("This session is not saved.")
    assert "\n" not in notice
    session_id = kept(store, said("hi"))
    assert to_model_messages(store, session_id) == [said("hi")]
    assert store.search("hi")[0][0].id == session_id


def test_a_file_of_an_older_version_is_brought_to_this_one(tmp_path: Path) -> None:
    with Store(tmp_path / "old.db") as store:
        session_id = kept(store, said("needle"))
        store.rows("PRAGMA user_version = 2")
        store.rows("DROP INDEX part_by_session")
    with Store(tmp_path / "old.db") as store:
        assert store.search("needle")[0][0].id == session_id
        assert store.rows("PRAGMA user_version")[0][0] == VERSION
        assert store.rows("SELECT 1 FROM sqlite_schema WHERE name = 'part_by_session'")


def test_many_processes_may_open_a_new_file_at_the_same_time(tmp_path: Path) -> None:
    code = (
        "import sys; from coder.sessions.store import Store; sys.stdin.read(1)\n"
        "from coder.sessions.recorder import Recorder\n"
        "store = Store(sys.argv[1]); info = store.create('/ws')\n"
        "Recorder(store, info, [{'role': 'user', 'content': 'hi'}]).close(); print(info.id)"
    )
    children = [python(code, str(tmp_path / "sessions.db")) for _ in range(4)]
    for child in children:
        assert child.stdin
        child.stdin.write("g")
        child.stdin.flush()
    ids = {child.communicate(timeout=PATIENCE)[0].strip() for child in children}
    assert [child.returncode for child in children] == [0] * 4
    with Store(tmp_path / "sessions.db") as store:
        assert {row["id"] for row in store.rows("SELECT id FROM session")} == ids
        assert len(ids) == 4


# ---- damage ------------------------------------------------------------------------------------


@pytest.fixture
def large(tmp_path: Path) -> tuple[Path, str, list[Message]]:
    """A file with a session of 400 messages."""
    texts = [f"number {number} " + "word " * (number % 90) for number in range(400)]
    messages = [said(text, ("user", "assistant")[at % 2]) for at, text in enumerate(texts)]
    with Store(tmp_path / "sessions.db") as store:
        return store.path, kept(store, *messages), messages


def damage(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def aside(path: Path) -> list[Path]:
    return [each for each in path.parent.glob("sessions.db.damaged-*") if each.name[-1].isdigit()]


@pytest.mark.case("SES-01")
@pytest.mark.parametrize("hurt", ["byte", "cut", "head", "garbage", "words"])
def test_a_damaged_file_is_set_aside(large: tuple[Path, str, list[Message]], hurt: str) -> None:
    """At the opening, when it is read, and only once by two that have it open."""
    path, session_id, messages = large
    first = Store(path) if hurt == "garbage" else None
    place = path.read_bytes().index(b'"content":"number 200 ') // 4096 * 4096
    match hurt:
        case "byte":
            damage(
                path,
                28,
                (path.stat().st_size // 4096 + 1).to_bytes(4, "big"),
            )
            os.truncate(path, path.stat().st_size - 1)
        case "cut":
            os.truncate(path, path.stat().st_size // 2)
        case "words":
            path.write_text("This is no database. " * 500)
        case _:
            damage(path, 16 if hurt == "head" else place, b"\xff" * 4080)
    before = path.read_bytes()
    least = {"byte": 398, "garbage": 350, "cut": 100}.get(hurt, 0)  # messages that can be read
    rest = ", with what can be read of it" if least else ""
    with Store(path) as store:
        found = to_model_messages(store, session_id)
        assert least <= len(found) < 400
        assert all(each in messages for each in found)
        assert [info.id for info in store.sessions("/ws")] == [session_id] * bool(least)
        assert store.notice == (
            f"The file of the sessions was damaged; a new one was begun{rest}. The damaged file is "
            f"kept as {aside(path)[0]}."
        )
        new = kept(store, said("hi"))
        assert store.search("hi")
        assert mode(path) == mode(aside(path)[0]) == 0o600
    if first:
        with first:
            assert to_model_messages(first, session_id) == found
            assert first.get(new)
    assert [each.read_bytes() for each in aside(path)] == [before]
    assert not list(path.parent.glob("*.new*"))


def test_messages_of_a_session_whose_row_cannot_be_read_are_kept(store: Store) -> None:
    """They are found with those of all folders: which one it was is not known."""
    for number in range(100):
        kept(
            store, said(f"about {number}"), said("answer", "assistant"), directory=f"/{number}" * 50
        )
    path = store.path
    store.close()
    data = path.read_bytes()
    damage(path, data.index(b"/50/50/50") // 4096 * 4096, b"\xff" * 4096)
    with Store(path) as again:
        infos = again.sessions()
        assert sorted(info.first for info in infos) == sorted(f"about {n}" for n in range(100))
        assert 1 <= sum(info.directory == "" for info in infos) < 50
        assert all(info.messages == 2 for info in infos)


def test_values_of_another_kind_are_read_as_what_they_should_be(store: Store) -> None:
    one = kept(store, said("needle"))
    two = kept(store, said("second"), title="Two")
    with store.transaction() as db:
        db.execute(
            "UPDATE session SET title = ?, model = ? WHERE id = ?", (b"Blob \xff", b"m", one)
        )
        db.execute("UPDATE session SET updated = 'never', input = x'00' WHERE id = ?", (one,))
        db.execute("UPDATE message SET data = CAST(data AS BLOB) WHERE session = ?", (one,))
    found = {info.id: info for info in store.sessions()}
    assert found[one].title == "Blob \ufffd"
    assert found[one].model == "m"
    assert found[one].first == "needle"
    assert found[one].updated == 0
    assert found[one].usage.input == 0
    assert store.find("two").id == two
    assert store.find("blob").id == one
    assert [info.id for info, _ in store.search("blob")] == [one]
    assert [info.id for info, _ in store.search("NEEDLE")] == [one]
    assert to_model_messages(store, one) == [said("needle")]


@pytest.mark.parametrize("folder", ["there", "gone"])
def test_a_link_to_a_file_that_is_not_there_yet_is_followed(tmp_path: Path, folder: str) -> None:
    """What SQLite and the locks put next to it is next to the file that it leads to."""
    (tmp_path / "there").mkdir()
    link = tmp_path / "link.db"
    target = tmp_path / folder / "sessions.db"
    link.symlink_to(target)
    store, notice = open_store(link)
    with store:
        kept(store, said("hi"))
        assert notice == ""
        assert mode(target) == 0o600
        assert link.is_symlink()
        assert [each.name for each in tmp_path.iterdir() if each.is_file()] == ["link.db"]
    target.write_bytes(b"no database" * 1000)
    Store(link).close()
    assert link.is_symlink()
    assert len(aside(target)) == 1


def test_damage_seen_by_a_write_costs_no_message(large: tuple[Path, str, list[Message]]) -> None:
    path, session_id, messages = large
    told: list[str] = []
    with Store(path) as store:
        with opened(store, session_id, tell=told.append) as recorder:
            damage(path, 4096, b"\xff" * (path.stat().st_size - 4096))
            store.rows("PRAGMA shrink_memory")
            for number in range(3):
                recorder.messages.append(said(f"and on {number}"))
                recorder.sync()
        assert not told
        assert not recorder.problem
        assert "was damaged" in store.notice
    with Store(path) as store:
        assert len(to_model_messages(store, session_id)) == len(messages) + 3


@pytest.mark.case("SES-02", "SES-03", "SES-06")
@pytest.mark.parametrize("text", ['{"role": "us', "garbage", "\0" * 300, "[1]", "{}, {}"])
def test_what_cannot_be_read_or_sent_is_left_out_and_reported(store: Store, text: str) -> None:
    """A row that is no message, and a result without its call; what comes after both is sent."""
    session_id = kept(
        store,
        *(said(str(at)) for at in range(5)),
        result("lost", "who asked?"),
    )
    with store.transaction() as db:
        db.execute("UPDATE message SET data = ? WHERE position = 2", (text,))
    told: list[str] = []
    with (
        opened(store, session_id, tell=told.append) as recorder,
        serve(Reply("Done.")) as server,
    ):
        assert contents(recorder.messages) == ["0", "1", "3", "4"]
        ask(server, "5", messages=recorder.messages, each=recorder)
        assert contents(server.requests[0]["messages"]) == ["0", "1", "3", "4", "5"]
    assert told == ["Left out of the session, since it cannot be used: 2 of 6 messages."]
    [row] = store.rows("SELECT data, active FROM message WHERE position = 2")
    assert tuple(row) == (text, 0)  # kept as it is for who wants to repair it
    assert contents(to_model_messages(store, session_id)) == ["0", "1", "3", "4", "5", "Done."]


def replace_first(messages: list[Message]) -> None:
    messages[0] = user("changed")


def change_first(messages: list[Message]) -> None:
    messages[0]["content"] = "changed"


def take_out_first(messages: list[Message]) -> None:
    del messages[0]


@pytest.mark.parametrize("change", [replace_first, change_first, take_out_first])
def test_old_messages_that_a_hook_changes_within_a_run_are_stored(
    store: Store, change: Callable[[list[Message]], None]
) -> None:
    session_id = kept(store, *(said(str(at)) for at in range(5)))

    def transform(messages: list[Message], *_: Any) -> list[Message]:
        if messages[-1]["role"] == "tool":
            change(messages)
        return messages

    with (
        opened(store, session_id) as recorder,
        serve(Reply(calls=[("add", {"a": 1, "b": 2})]), Reply("Done.")) as server,
    ):
        hooks = FunctionHooks(transform_context=transform)
        options = {"tools": [add], "hooks": hooks}
        ask(server, "5", messages=recorder.messages, each=recorder, **options)
        assert server.requests[1]["messages"] == wire_messages(recorder.messages[:-1])
        assert to_model_messages(store, session_id) == recorder.messages


@pytest.mark.parametrize(("levels", "is_kept"), [(98, True), (99, False)])
def test_a_message_that_is_nested_too_deeply_is_left_out(
    store: Store, levels: int, is_kept: bool
) -> None:
    value: Any = "deep"
    for _ in range(levels):  # in the two of the message and its meta
        value = [value]
    messages = [said("go", deep=value), said("on")]
    with opened(store, kept(store, *messages)) as recorder:
        assert recorder.messages == (messages if is_kept else messages[1:])


# ---- what goes in comes out --------------------------------------------------------------------


def relaxed(examples: int) -> settings:
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=examples, deadline=None, suppress_health_check=checks)


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


EDITS = ["append", "append", "replace", "cut", "compact", "prune", "twice", "reverse", "given"]


def edited(messages: list[Message], edit: str, place: int, count: int, name: str) -> None:
    fresh = [said(f"{name}.{number}") for number in range(count)]
    place = min(place, len(messages))
    if edit == "append":
        messages += fresh
    elif edit == "replace":
        messages[place : place + count] = fresh[: len(messages[place : place + count])]
    elif edit == "cut":
        del messages[place : place + count]
    elif edit == "compact":
        messages[:place] = fresh[:1]
    elif edit == "prune":
        pruned = messages[place : place + count : 2]
        messages[place : place + count : 2] = [said(f"{name}.short") for _ in pruned]
    elif edit == "twice":
        messages += messages[place : place + 1]
    elif edit == "reverse":
        messages.reverse()


@seed(20261121)
@relaxed(100)
@given(
    edits=st.lists(
        st.tuples(
            st.sampled_from([*EDITS, "resume"]),
            st.integers(0, 9),
            st.integers(1, 4),
        ),
        max_size=12,
    )
)
def test_the_table_follows_all_changes(store: Store, edits: list[tuple[str, int, int]]) -> None:
    """Nothing is lost: what left the list stays in the table, unless another message took its
    place."""
    messages: list[Message] = [said("first")]
    recorder = Recorder(store, store.create("/ws"), messages)
    try:
        for number, (edit, place, count) in enumerate(edits):
            before = len(table(store, recorder.session_id))
            edited(messages, edit, place, count, str(number))
            recorder(SHORTENED) if edit in ("compact", "prune") else recorder.sync()
            assert not recorder.problem
            assert active(store, recorder.session_id) == messages
            assert len(table(store, recorder.session_id)) >= max(before, len(messages))
            if edit in ("given", "resume"):
                recorder.close()
                given = list(messages) if edit == "given" else None
                recorder = Recorder(store, recorder.info, given)
                messages = recorder.messages
    finally:
        recorder.close()


@pytest.mark.case("INV-01")
@pytest.mark.parametrize("number", range(2000, 2040))
def test_after_random_runs_the_list_loaded_is_the_list_in_memory(store: Store, number: int) -> None:
    """With resumes: what a kill would leave at any event is valid, and what a run leaves is
    exact."""
    script, moments = drawn(number)
    model = ScriptedModel([*script, *[Reply("enough")] * 50])
    info = store.create("/ws")
    session_id = info.id
    for moment in moments:
        with Recorder(store, info) as recorder:

            def each(event: Event, recorder: Recorder = recorder, moment: Moment = moment) -> None:
                recorder(event)
                if not event.type.endswith("_delta"):
                    assert_valid({"messages": wire_messages(to_model_messages(store, session_id))})
                moment(event)

            limits = Limits(max_steps=6, max_errors=3)
            options: dict[str, Any] = {
                "abort": moment.abort,
                "retry": QUICK,
                "limits": limits,
            }
            run = run_loop(recorder.messages, model, TOOLS, prompt="next", **options)
            with contextlib.suppress(Left):
                drive(run, each)
            run.close()
            recorder.sync()
            assert not recorder.problem
            assert active(store, session_id) == as_json(recorder.messages)
            assert to_model_messages(store, session_id) == as_json(repair(recorder.messages))
    for body in model.bodies:
        assert_valid(body)


def test_an_interrupt_at_any_place_loses_and_doubles_nothing(store: Store) -> None:
    """A second Ctrl+C is an exception between any two lines."""
    begun = 0
    used = Nested("compaction", RunEnd("stop", "", Usage(1), 1))
    left = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        if "/sessions/" not in frame.f_code.co_filename:
            return None
        left -= event == "line"
        if not left:
            raise KeyboardInterrupt
        return trace

    debugger = sys.gettrace()
    with Recorder(store, store.create("/ws"), []) as recorder:
        while left <= 0:  # until it was interrupted at each of its lines
            begun += 1
            recorder.messages[:] = [
                *recorder.messages[-20:],
                said(f"number {begun}"),
            ]
            left = begun
            sys.settrace(trace)
            try:
                with contextlib.suppress(KeyboardInterrupt):
                    recorder(used)
                    recorder.sync()
            finally:
                sys.settrace(debugger)
            recorder.sync()
            assert not recorder.problem
            assert active(store, recorder.session_id) == recorder.messages
        texts = [text for _, text in table(store, recorder.session_id)]
        assert len(texts) == len(set(texts)) == begun > 50
        assert store.get(recorder.session_id).usage.input in range(begun - 20, begun + 1)


# ---- what is written ---------------------------------------------------------------------------


def test_a_call_is_pending_then_running_then_completed_or_failed(store: Store) -> None:
    """At each event: the states in the file, and how the calls would be answered if the process
    ended there."""
    seen: list[tuple[str, list[str], list[str]]] = []
    info = store.create("/ws")
    session_id = info.id
    bad = Reply(
        calls=[
            ("add", {"a": 1, "b": 2}),
            ("add", {"a": "x"}),
        ]
    )
    with (
        serve(bad, Reply("Done.")) as server,
        Recorder(store, info) as recorder,
    ):

        def each(event: Event) -> None:
            recorder(event)
            if event.type in ("tool_start", "step_end"):
                loaded = to_model_messages(store, session_id)
                answers = [each["content"] for each in loaded if each["role"] == "tool"]
                seen.append((event.type, states(store, session_id), answers))

        ask(server, tools=[add], messages=recorder.messages, each=each)
    wrong = recorder.messages[3]["content"]
    assert seen[:3] == [
        ("tool_start", ["running", "pending"], [INTERRUPTED, NOT_RUN]),
        ("tool_start", ["completed", "running"], ["3", INTERRUPTED]),
        ("step_end", ["completed", "failed"], ["3", wrong]),
    ]
    query = "SELECT * FROM part WHERE session = ? AND type = 'tool' ORDER BY id"
    rows = store.rows(query, session_id)
    calls = [call["id"] for call in recorder.messages[1]["tool_calls"]]
    titles = [(row["call_id"], row["title"]) for row in rows]
    assert titles == [*zip(calls, ("add 1", "add x"))]
    assert all(row["start"] <= row["end"] for row in rows)
    assert json.loads(rows[0]["data"]).keys() == {"name", "details", "seconds"}


def test_usage_and_cost_of_the_runs_and_of_their_sub_agents_are_added(store: Store) -> None:
    session_id = kept(store, said("hi"))
    with opened(store, session_id) as recorder:
        recorder(
            RunEnd(
                "stop",
                "",
                Usage(10, 5, 2, 1, cost=0.5),
                1,
            )
        )
        inner = RunEnd("stop", "", Usage(3, 1, cost=0.25), 1)
        recorder(Nested("explore", inner))
        recorder(Nested("explore", Nested("compaction", inner)))
        recorder(Nested("task", inner, session_id="child"))  # in its parent's usage
        recorder.sync()
        assert store.get(session_id).usage == Usage(16, 7, 2, 1, cost=1.0)
        recorder(RunEnd("stop", "", Usage(1, 1, estimated=True), 1))
    assert store.get(session_id).usage == Usage(
        17,
        8,
        2,
        1,
        estimated=True,
        cost=None,
    )


def test_a_failed_write_is_reported_once_and_made_up_for_at_the_end(store: Store) -> None:
    told: list[str] = []
    session_id = kept(store, said("one"), said("two", "assistant"))
    with opened(store, session_id, tell=told.append) as recorder:
        with contextlib.closing(sqlite3.connect(store.path)) as other:
            store.rows("PRAGMA busy_timeout = 1")
            other.execute("BEGIN IMMEDIATE")
            recorder.messages[:] = [said("a summary")]
            recorder(SHORTENED)
            recorder.messages.append(said("three", "assistant"))
        assert len(told) == 1
        assert "database is locked" in told[0] == recorder.problem
        recorder(SHORTENED)  # each attempt may cost a wait: none before the end
        assert len(told) == 1
        assert contents(active(store, session_id)) == ["one", "two"]
        recorder(RunEnd("stop", "", Usage(), 1))
        assert told[1:] == ["The conversation is saved again."]
        assert not recorder.problem
        recorder.messages[0]["content"] = "a summary, mended"
    left = [
        (0, "one"),
        (0, "two"),
        (1, "a summary, mended"),
        (1, "three"),
    ]
    assert table(store, session_id) == left


@pytest.mark.case("SES-05")
def test_open_calls_are_answered_in_front_of_the_next_message_and_have_an_end(store: Store) -> None:
    """Also if the repair gives a call another id."""
    again = said("go"), calling("a"), result("a", "out"), calling("a", "b")
    session_id = kept(store, *again)
    assert states(store, session_id) == ["completed", "pending", "pending"]
    with serve(Reply("ok")) as server, opened(store, session_id) as recorder:
        ask(server, "What happened?", messages=recorder.messages, each=recorder)
        sent = [(m["role"], m["content"]) for m in server.requests[0]["messages"]]
        assert sent[-3:] == [
            ("tool", NOT_RUN),
            ("tool", NOT_RUN),
            ("user", "What happened?"),
        ]
        assert_all_valid(server)
    assert to_model_messages(store, session_id) == recorder.messages
    assert len(recorder.messages) == 8
    # The first call of the second answer has another id now, which no part has
    assert states(store, session_id) == ["completed", "pending", "failed"]


def call_of(messages: list[Message]) -> dict[str, Any]:
    [call] = messages[1]["tool_calls"]
    return call


CHANGES: dict[str, Callable[[list[Message]], Any]] = {
    "a text": lambda messages: messages[0].update(content="gone"),
    "arguments that are no JSON": lambda messages: call_of(messages)["function"].update(
        arguments='{"a": 1'
    ),
    "a name that no server takes": lambda messages: call_of(messages)["function"].update(name="?"),
    "a call without an id": lambda messages: call_of(messages).update(id=""),
    "a result without a text": lambda messages: messages[2].update(content=""),
    "a result that is gone": lambda messages: messages.pop(2),
    "an answer that is gone": lambda messages: messages.pop(1),
    "a result that comes too late": lambda messages: messages.insert(3, messages.pop(2)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_changed_in_a_session_before_its_first_run_is_sent_repaired_and_kept(
    store: Store, change: Callable[[list[Message]], Any]
) -> None:
    session_id = kept(
        store,
        said("go"),
        calling("a", arguments='{"a": 1, "b": 2}'),
        result("a", "3"),
        said("It is 3.", "assistant"),
    )
    with serve(Reply("ok")) as server, opened(store, session_id) as recorder:
        unchanged = wire_messages(recorder.messages)
        change(recorder.messages)
        ask(server, "And now?", messages=recorder.messages, each=recorder)
        assert_all_valid(server)
        sent = server.requests[0]["messages"]
        assert sent == wire_messages(recorder.messages[:-1])
        assert sent[:-1] != unchanged
        assert recorder.messages == repair(recorder.messages)
    assert to_model_messages(store, session_id) == recorder.messages


def test_a_message_of_an_older_session_that_is_changed_and_changed_back_is_sent_as_it_is(
    tmp_path: Path,
) -> None:
    with (
        serve(Reply("ok"), Reply("ok")) as server,
        SessionStore(tmp_path / "sessions.db") as store,
    ):
        session = store.open(kept(store, said("go"), said("Well.", "assistant")))
        agent = Agent(ChatModel("m", base_url=server.url), session=session)
        for text in ("changed", "go"):
            session.messages[0]["content"] = text
            agent.run("And now?")
            assert contents(server.requests[-1]["messages"])[0] == text


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
PART = {"type": "text", "text": "a", "meta": 1}
LATE: Message = {"role": "user", "meta": {"timestamp": 1}, "content": "meta comes first"}
KINDS: dict[str, list[Message]] = {
    "texts": [said('a "quoted" back\\slash, é, 漢, \x1b[1m, ,"meta":{}')],
    "what no server takes": [said("half \ud83d of it"), said("NUL \0 here")],
    "parts": [said("see") | {"content": [PART, IMAGE]}],
    "a meta in a meta": [said("go", meta={"meta": 1})],
    "a meta in front, and none": [LATE, {"role": "user", "content": "no meta"}],
    "roles of the user's own": [said("a note", "note"), said("Be brief.", "system")],
    "thoughts": [
        said("Well.", "assistant") | {"reasoning_content": "Hm.", "meta": {"model": "m"}},
        said("On.", "assistant") | {"think_tag": "Hm.", "meta": {"model": "other"}},
    ],
    "images in a result": [calling("a"), result("a", "") | {"content": [PART, IMAGE]}],
    "calls": [
        calling("a_long_id", "b", meta={"timestamp": 1}),
        *(result(each, "3") | {"meta": {"timestamp": 1}} for each in ("a_long_id", "b")),
    ],
}
PROFILES: list[dict[str, Any]] = [
    {},
    {"echoed": []},
    {"tool_name": True, "empty_content": "empty"},
    {"strict_turns": True, "ids": "[a-z]{1,8}", "reasoning_filled": True},
]


@pytest.mark.parametrize("profile", PROFILES, ids=str)
@pytest.mark.parametrize("messages", KINDS.values(), ids=KINDS)
def test_a_session_that_is_resumed_is_sent_like_one_that_was_never_written(
    store: Store, messages: list[Message], profile: dict[str, Any]
) -> None:
    """To the byte, although its rows are sent as far as they can be."""
    bodies: list[bytes] = []
    conversation = [
        said("go"),
        *messages,
        said("It is 3.", "assistant"),
        said("So be it.", "assistant"),
    ]
    model = {"tap": bodies.append, "profile": profile}
    with serve(Reply("ok"), Reply("ok")) as server:
        with opened(store, kept(store, *copied(conversation))) as recorder:
            ask(server, "And now?", messages=recorder.messages, model=model)
        ask(server, "And now?", messages=copied(conversation), model=model)
    assert bodies[0] == bodies[1]


@pytest.mark.parametrize(
    ("found", "written", "wanted"),
    [
        ("a/b", "a\\/b", b'"a\\/b 1"'),  # the row is sent
        ("a/b", "\\ud800", b'"\xef\xbf\xbd 1"'),
        ("a/b", b"\xff", b'"\xef\xbf\xbd 1"'),
        ('"a/b 1"', '[{"type": "text", "n": NaN}]', b""),
        # written by hand, with spaces here and there
        ('"a/b 1",', '[{"type":"text","text":"","meta":1}], ', b'"meta":1}]}'),
    ],
)
def test_a_row_that_no_server_takes_is_not_sent_as_it_is(
    store: Store, found: str, written: str | bytes, wanted: bytes
) -> None:
    bodies: list[bytes] = []
    texts = ["a/b 1", "a/b 2"]
    answers = [said(text, "assistant") for text in ("Well.", "So be it.")]
    session_id = kept(store, *(said(text) for text in texts), *answers)
    with store.transaction() as db:
        change = "UPDATE message SET data = replace(data, ?, CAST(? AS TEXT)) WHERE position = 0"
        db.execute(change, (found, written))
    with opened(store, session_id) as recorder, serve(Reply("ok")) as server:
        _, ended = ask(server, messages=recorder.messages, model={"tap": bodies.append})
    assert [wanted in body for body in bodies] == [True] * bool(wanted)
    assert ended.stop_reason == ("stop" if wanted else "error")


# ---- what a kill leaves ------------------------------------------------------------------------

WORKER = """
import os, signal, sys, threading, time
from coder import ChatModel
from coder.sessions.recorder import Recorder
from coder.sessions.store import Store
from coder.loop import run_loop

url, path = sys.argv[1:]
for line in sys.stdin:
    session_id, effects, last, delay = line.split()
    if pid := os.fork():
        os.waitpid(pid, 0)
        print("ended", flush=True)
        continue

    def mark(number: int) -> str:
        '''Leave a mark, and be killed a moment after the last.

        number: which
        '''
        with open(effects, "a") as file:
            file.write(f"{number}\\n")
        if number == int(last):
            kill = os.getpid(), signal.SIGKILL
            threading.Timer(float(delay), os.kill, kill).start()
        time.sleep(0.004)
        return f"marked {number}"

    store = Store(path)
    with Recorder(store, store.create("/ws", session_id=session_id)) as recorder:
        for event in run_loop(recorder.messages, ChatModel("m", base_url=url), [mark], prompt="Mark ten."):
            recorder(event)
    os._exit(0)
"""


def marking(body: Body) -> Reply:
    """Two answers with five calls each."""
    results = sum(message["role"] == "tool" for message in body["messages"])
    if body["messages"][-1]["content"] == "Go on." or results == 10:
        return Reply("I see.")
    calls = [("mark", {"number": at}) for at in range(results, results + 5)]
    return Reply("Marking.", calls=calls)


@pytest.mark.case("SES-04")
@pytest.mark.parametrize(
    "kills",
    [12, pytest.param(200, marks=pytest.mark.slow)],
)
def test_after_kills_every_session_loads_and_no_call_ran_twice(tmp_path: Path, kills: int) -> None:
    chance = random.Random(4)
    cut = 0
    store = Store(tmp_path / "sessions.db")
    with ScriptedServer(marking) as server:
        worker = python(WORKER, server.url, str(store.path))
        assert worker.stdin
        assert worker.stdout
        for run in range(kills):
            info = store.create("/ws")
            effects = tmp_path / f"effects{run}"
            moment = f"{chance.randint(0, 9)} {chance.uniform(0, 0.008)}"
            worker.stdin.write(f"{info.id} {effects} {moment}\n")
            worker.stdin.flush()
            assert worker.stdout.readline() == "ended\n"
            marks = effects.read_text().split()
            assert len(marks) == len(set(marks))
            with Recorder(store, info) as recorder:  # the lock went with the process
                check_marks(recorder.messages, set(marks))
                ask(server, "Go on.", messages=recorder.messages, each=recorder)
            assert effects.read_text().split() == marks
            assert to_model_messages(store, info.id) == recorder.messages
            cut += 0 < len(marks) < 10
        worker.communicate(timeout=PATIENCE)
        assert_all_valid(server)
    assert cut >= kills // 3, f"too few were hit in their turn: {cut}"
    assert store.rows("PRAGMA integrity_check")[0][0] == "ok"
    store.close()


def check_marks(messages: list[Message], marks: set[str]) -> None:
    """What the model is told of each call is true: done, not run, or perhaps."""
    answers = {each["tool_call_id"]: each["content"] for each in messages if each["role"] == "tool"}
    told = set()
    for call in (call for message in messages for call in message.get("tool_calls", ())):
        number = str(json.loads(call["function"]["arguments"])["number"])
        told.add(number)
        done = {f"marked {number}", INTERRUPTED}
        not_done = {NOT_RUN, INTERRUPTED}
        assert answers[call["id"]] in (done if number in marks else not_done)
    assert marks <= told


# ---- one writer --------------------------------------------------------------------------------

HOLDER = """
import sys
from coder.sessions.recorder import Recorder
from coder.sessions.store import Store
store = Store(sys.argv[1])
recorder = Recorder(store, store.get(sys.argv[2]))
recorder.messages.append({"role": "user", "content": "from A"})
recorder.sync()
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_lock_that_is_removed_while_another_process_opens_it_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "sessions.db"
    first = SessionLock(place, "s")
    lock = fcntl.flock

    def late(fd: int, how: int) -> None:
        first.release()
        lock(fd, how)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", late)
        second = SessionLock(place, "s")
    with pytest.raises(StoreError, match="open already in this program"):
        SessionLock(place, "s")
    second.release()
    SessionLock(place, "s").release()


@pytest.mark.case("SES-07")
def test_a_session_that_another_process_has_is_refused_and_can_be_forked(store: Store) -> None:
    """And the kernel gives it back when that process is killed."""
    session_id = kept(store, said("hi"))
    left = store.path.with_name("sessions.db.locks") / session_id
    left.write_text("1234567890123")  # by one that was killed
    holder = python(HOLDER, str(store.path), session_id)
    try:
        assert holder.stdout
        assert holder.stdout.readline() == "ready\n"
        for action in (opened, Store.remove):
            with pytest.raises(StoreError, match=r"^The session \w+ is open in another process\.$"):
                action(store, session_id)
        forked = fork(store, session_id)
        with opened(store, forked) as recorder:
            recorder.messages.append(said("from B"))
        assert contents(to_model_messages(store, session_id)) == ["hi", "from A"]
        assert contents(to_model_messages(store, forked)) == ["hi", "from A", "from B"]
    finally:
        holder.kill()
        holder.communicate(timeout=PATIENCE)
    with opened(store, session_id) as recorder:
        assert len(recorder.messages) == 2


CLOSING = """
import sys
from coder import SessionStore
with SessionStore(sys.argv[1]) as store:
    session = store.open()
    session.close()
print("standard output is still open")
"""


def test_a_session_that_is_closed_twice_closes_nothing_else(tmp_path: Path) -> None:
    """By the program, and by the store, which closes what it has opened."""
    child = python(CLOSING, str(tmp_path / "sessions.db"))
    said, _ = child.communicate(timeout=PATIENCE)
    assert child.returncode == 0
    assert said == "standard output is still open\n"


def test_if_no_lock_can_be_taken_nothing_is_left_open(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    session_id = kept(store, said("hi"))
    monkeypatch.setattr(fcntl, "flock", refuse)
    free = os.dup(0)
    os.close(free)
    with opened(store, session_id) as recorder:
        assert contents(recorder.messages) == ["hi"]
    assert os.dup(0) == free
    os.close(free)


# ---- finding -----------------------------------------------------------------------------------


@pytest.mark.case("SES-10")
@pytest.mark.parametrize(
    "given", ["../x", "/etc/passwd", "", "   ", "a" * 5000, "x'; DROP TABLE session; --", "%", "é"]
)
def test_an_id_that_is_none_is_refused_before_anything_is_opened(store: Store, given: str) -> None:
    kept(store, said("hi"))
    before = sorted(store.path.parent.rglob("*"))
    with pytest.raises(StoreError, match="There is no session") as raised:
        store.find(given)
    assert len(str(raised.value)) < 120
    assert store.sessions()
    assert sorted(store.path.parent.rglob("*")) == before


def test_ids_are_short_words_that_sort_by_time_and_their_beginning_will_do(store: Store) -> None:
    one = kept(store, said("one"))
    time.sleep(0.002)  # ids of one millisecond have no order
    two = kept(store, said("two"))
    assert one < two
    assert all(re.fullmatch("[0-9a-f]{15}", each) for each in (one, two))
    assert store.find(one).id == one
    assert store.find(f" {two.upper()} ").id == two
    length = next(place for place, pair in enumerate(zip(one, two)) if pair[0] != pair[1])
    assert store.find(one[: length + 1]).id == one
    with pytest.raises(StoreError, match=f"Several sessions begin with .*{one}, {two}"):
        store.find(one[:length])
    with pytest.raises(StoreError, match="There is no session 'zzz'"):
        store.find("zzz")


def test_a_session_is_found_by_its_name_and_by_its_number_in_the_list(store: Store) -> None:
    answer = said("\n" + "Since. " * 99, "assistant")
    names = ("Äpfel", "Äpfel und 100% Birnen", "Birnen")
    ids = [
        kept(
            store,
            said("why?"),
            answer,
            calling("a"),
            result("a", "out"),
        )
        for _ in names
    ]
    for session_id, name in zip(ids, names):
        store.rename(session_id, name)
    listed = [info.id for info in store.sessions("/ws")]
    given = ("1", "3", "äPFEL", "äpfel u", "birnen")
    found = [store.find(each, "/ws").id for each in given]
    assert found == [listed[0], listed[2], *ids]
    for none in ("4", "100%", "%"):
        with pytest.raises(StoreError, match="There is no session"):
            store.find(none, "/ws")
    with pytest.raises(StoreError, match="Several sessions begin with"):
        store.find("Äpf")
    asked, answered = store.ending(ids[0])
    assert asked == "why?"
    assert answered.startswith("Since. Since.")
    assert len(answered) <= 200
    assert store.ending(kept(store)) == ("", "")
    assert store.ending(
        kept(
            store,
            said("why?"),
            answer,
            said("and now?"),
        )
    ) == ("and now?", "")


def test_sessions_are_listed_by_folder_the_newest_first_none_empty(store: Store) -> None:
    old = kept(store, said("old\nwords"))
    other = kept(store, said("other"), directory="/else")
    new = kept(store, said("new"))
    empty = kept(store)
    child = kept(store, said("look"), parent=new, agent="explore")
    time.sleep(0.002)
    with opened(store, old) as recorder:
        recorder(RunEnd("stop", "", Usage(), 1))
    assert [info.id for info in store.sessions("/ws")] == [old, new]
    assert {info.id for info in store.sessions()} == {old, new, other}
    [latest] = store.sessions("/ws", 1)
    assert latest.id == old
    assert latest.first == "old words"
    assert latest.messages == 1
    assert store.sessions("/nowhere") == []
    assert store.get(child).parent == new
    with pytest.raises(StoreError):  # gone when it was closed
        store.get(empty)
    store.rename(old, " Repair\nthe  \ud83d parser ")
    assert store.get(old).title == "Repair the \ufffd parser"


def plan(store: Store, session_id: str, *texts: str) -> None:
    rows = [(session_id, at, text, "pending") for at, text in enumerate(texts)]
    with store.transaction() as db:
        db.executemany("INSERT INTO todo VALUES (?, ?, ?, ?)", rows)


def test_a_fork_is_a_copy_that_knows_its_origin_and_goes_its_own_way(store: Store) -> None:
    session_id = kept(
        store,
        said("go"),
        calling("a"),
        result("a", "out"),
        said("ok", "assistant"),
    )
    forked = fork(store, session_id)
    assert to_model_messages(store, forked) == to_model_messages(store, session_id)
    assert states(store, forked) == ["completed"]
    info = store.get(forked)
    assert info.parent == session_id
    assert info.forked is True
    assert info.usage == Usage()
    assert {info.id for info in store.sessions()} == {session_id, forked}
    store.remove(session_id)
    assert len(to_model_messages(store, forked)) == 4
    assert store.get(forked).parent is None
    with pytest.raises(StoreError, match="There is no session"):
        fork(store, "nosuch")


def test_removing_takes_everything_of_a_session_and_of_its_sub_agents(store: Store) -> None:
    session_id = kept(store, said("needle in it"))
    child = kept(store, said("look"), parent=session_id)
    plan(store, child, "one")
    other = kept(store, said("another needle"))
    with opened(store, child), pytest.raises(StoreError, match="is open"):
        store.remove(session_id)
    store.remove(session_id)
    assert [row["id"] for row in store.rows("SELECT id FROM session")] == [other]
    assert {row["session"] for row in store.rows("SELECT session FROM message")} == {other}
    assert store.rows("SELECT * FROM todo") == []
    assert [info.id for info, _ in store.search("needle")] == [other]


QUERIES = {
    "NEEDLE haystack": ["one"],
    "needle parser": [],
    "eedl": ["one"],
    "parser": ["two"],
    '"quoted"': ["two"],
    "你好世界": ["three"],
    "übersicht": ["three"],
    "50%": ["three"],
    "5_%": [],
    " ": [],
    "o": ["three", "two"],
    "content role": [],
    "tool output": [],
}


def test_words_are_found_in_titles_and_texts_the_newest_first(store: Store) -> None:
    needle = said("Find the Needle in the haystack")
    texts = [[needle, calling("a"), result("a", "tool output")]]
    texts += [[said('say "quoted"'), said("ok", "assistant")]]
    texts += [[said("你好世界, 50% of it"), said("oh Übersicht", "assistant")]]
    names = {}
    for name, messages in zip(("one", "two", "three"), texts):
        names[kept(store, *messages)] = name
        time.sleep(0.002)
    one, two, _ = names
    store.rename(two, "Repair the parser")
    found = {query: [names[info.id] for info, _ in store.search(query)] for query in QUERIES}
    assert found == QUERIES
    assert store.search("needle")[0][1] == needle["content"]
    with opened(store, one) as recorder:
        recorder.messages[0] = said("a " * 200 + "\nother\nphrases here " + "b " * 200)
    assert not store.search("needle")
    snippet = store.search("phrases")[0][1]
    assert re.fullmatch(r"…( ?a)+ other phrases here (b )+b?…", snippet)
    assert len(snippet) < 100


def test_a_search_finds_the_fifty_newest_sessions(store: Store) -> None:
    for _ in range(52):
        kept(store, said("needle"))
    newest = [info.id for info in store.sessions("/ws", 50)]
    assert [info.id for info, _ in store.search("needle")] == newest
    assert len(newest) == 50


def test_a_text_is_found_after_a_thousand_that_are_nearly_like_it(store: Store) -> None:
    one = kept(store, said("say a_b!"))
    kept(store, *(said(f"{number} axb!") for number in range(1000)))
    assert [info.id for info, _ in store.search("A_b!")] == [one]


# ---- an agent's conversation -------------------------------------------------------------------


def test_what_an_agent_says_and_does_is_in_its_session(tmp_path: Path) -> None:
    """Also what is done to the list between two runs, and a run that a consumer leaves."""
    with serve(
        TWO,
        Reply("3 and 7."),
        Reply("Once more."),
        Reply("one two three four"),
    ) as server:
        model = ChatModel("m", base_url=server.url)
        with SessionStore(tmp_path / "sessions.db") as store:
            agent = Agent(
                model,
                tools=[add],
                session=store.open(directory="/ws"),
            )
            agent.run("Add.")
            assert len(agent.messages) == 5
            agent.append_message(said("By the way."))
            agent.run("Again.")
            run = agent.stream("Count.")
            for event in run:
                if isinstance(event, TextDelta):
                    break
            run.close()
            agent.messages[0]["content"] = "changed"
            agent.messages.append(said("added"))
            before = agent.messages
            session_id = agent.session_id
        with SessionStore(tmp_path / "sessions.db") as store:
            assert store.sessions("/ws")[0].id == session_id
            again = Agent(model, session=store.open(session_id))
            assert again.messages == before
            assert before[0]["content"] == "changed"
            assert contents(again.messages)[-3:] == ["Count.", "one", "added"]
            again.reset()
            assert to_model_messages(store, session_id) == []


@pytest.mark.parametrize("name", [":memory:", "sessions.db"])
def test_a_session_that_is_open_in_this_program_says_so(tmp_path: Path, name: str) -> None:
    path = name if name == ":memory:" else tmp_path / name
    with serve(Reply("Hi.")) as server, SessionStore(path) as store:
        session = store.open()
        Agent(ChatModel("m", base_url=server.url), session=session).run("Hello.")
        with pytest.raises(
            StoreError, match=f"{session.session_id} is open already in this program"
        ):
            store.open(session.session_id)
        with pytest.raises(StoreError, match="is open already in this program"):
            store.remove(session.session_id)
        session.close()
        session.close()
        with store.open(session.session_id) as again:
            assert contents(again.messages) == ["Hello.", "Hi."]


def test_a_program_lists_finds_names_and_removes_its_sessions(tmp_path: Path) -> None:
    with (
        serve(Reply("Fine.")) as server,
        SessionStore(tmp_path / "sessions.db") as store,
    ):
        model = ChatModel("m", base_url=server.url)
        for city in ("Oslo", "Bergen"):
            with store.open(directory="/ws") as session:
                Agent(model, session=session).run(f"How is {city}?")
        bergen, oslo = store.sessions("/ws")
        assert oslo.first == "How is Oslo?"
        assert oslo.messages == 2
        assert oslo.model == ""
        store.rename(oslo.id, "the  capital")
        assert store.find("the cap").title == "the capital"
        [(found, snippet)] = store.search("bergen")
        assert found.id == bergen.id
        assert snippet == "How is Bergen?"
        store.remove("the capital")
        assert [each.id for each in store.sessions()] == [bergen.id]
        for change in (
            lambda: store.remove("the capital"),
            lambda: store.rename("x", "y"),
        ):
            with pytest.raises(StoreError, match="There is no session"):
                change()


def test_a_run_of_the_loop_is_kept_if_it_is_watched(tmp_path: Path) -> None:
    with (
        serve(TWO, Reply("3 and 7.")) as server,
        SessionStore(tmp_path / "sessions.db") as store,
    ):
        session = store.open()
        model = ChatModel("m", base_url=server.url)
        run = run_loop(session.messages, model, [add], prompt="Add.")
        _, done = drive(session.watch(run))
        assert to_model_messages(store, session.session_id) == done.messages
        assert len(done.messages) == 5
        with pytest.raises(ValueError, match="another list"):
            drive(
                session.watch(
                    run_loop(
                        [],
                        model,
                        [add],
                        prompt="Add.",
                    )
                )
            )
        with pytest.raises(ValueError, match="has its own messages"):
            Agent(
                "m",
                base_url=server.url,
                session=session,
                messages=[said("hi")],
            )
