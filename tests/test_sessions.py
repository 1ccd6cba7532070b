"""Sessions on disk: what stands in the file is what was in memory, whatever happens. Groups SES and INV of the reference."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from coder import Agent, ChatModel, SessionStore
from coder.abort import Abort
from coder.devtools.replay import ScriptedModel
from coder.devtools.scripted import Body, Reply, ScriptedServer
from coder.events import Compacted, Event, Nested, Outcome, RunEnd, TextDelta, ToolEnd, ToolStart
from coder.history import NOT_RUN, convert_to_llm, repair
from coder.hooks import Hooks
from coder.loop import run_loop
from coder.sessions.database import APPLICATION, SCHEMA
from coder.sessions.recorder import INTERRUPTED, Recorder, parts, to_model_messages
from coder.sessions.rows import dumps
from coder.sessions.store import SessionLock as Claim
from coder.sessions.store import Store, StoreError, Todo, open_store
from coder.toolset import Toolset, tool
from coder.types import Limits, Message, Trigger, Usage
from tests.harness import ask, assert_all_valid, assert_valid, drive, serve
from tests.terminal import PATIENCE, ROOT, promptly, until
from tests.test_random import MOMENTS, QUICK, REPLIES, TOOLS, Left, Moment


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "data" / "sessions.db")
    yield made
    made.close()


@tool
def add(a: int, b: int) -> str:
    """Add.

    a: one
    b: other
    """
    return str(a + b)


TWO = Reply(
    "Let me see.",
    calls=[("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4})],
    reasoning="Two sums.",
)


def said(text: str, role: str = "user") -> Message:
    return {"role": role, "content": text, "meta": {"timestamp": 1}}


def calling(call_id: str, name: str = "add") -> Message:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}
        ],
    }


def result(call_id: str, text: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def kept(store: Store, *messages: Message, directory: str = "/ws") -> str:
    """A session with these messages in it."""
    session_id = store.create(directory)
    with Recorder(store, session_id, list(messages)) as recorder:
        recorder.sync()
    return session_id


def states(store: Store, session_id: str) -> list[Any]:
    return [
        row["state"]
        for row in store.rows(
            "SELECT state FROM part WHERE session = ? AND type = 'tool' ORDER BY id", session_id
        )
    ]


def table(store: Store, session_id: str) -> list[tuple[int, str]]:
    """(active, content) of all messages ever, in the order of a transcript."""
    rows = store.rows(
        "SELECT active, data FROM message WHERE session = ? ORDER BY position", session_id
    )
    return [(row["active"], json.loads(row["data"])["content"]) for row in rows]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def python(code: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A child process that runs `code`."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        **options,
    )


# ---- the file --------------------------------------------------------------------------------------------


@pytest.mark.case("SES-09")
@pytest.mark.parametrize("mask", [0o000, 0o022])
def test_the_file_and_what_belongs_to_it_are_for_their_owner_alone(
    tmp_path: Path, mask: int
) -> None:
    """SES-09."""
    before = os.umask(mask)
    try:
        with contextlib.closing(Store(tmp_path / "share" / "coder" / "sessions.db")) as store:
            with Recorder(store, store.create("/ws"), [said("hi")]) as recorder:
                recorder.sync()
                modes = {path.name: mode(path) for path in (tmp_path / "share").rglob("*")}
            assert modes == {
                "coder": 0o700,
                "sessions.db": 0o600,
                "sessions.db-wal": 0o600,
                "sessions.db-shm": 0o600,
                "sessions.db.locks": 0o700,
                recorder.session_id: 0o600,
            }
            assert mode(tmp_path / "share") == 0o700
    finally:
        os.umask(before)


@pytest.mark.case("SES-09")
def test_a_file_that_others_could_read_is_tightened_and_its_neighbours_are_not_touched(
    tmp_path: Path,
) -> None:
    """SES-09."""
    path, other = tmp_path / "sessions.db", tmp_path / "project.txt"
    other.write_text("theirs")
    other.chmod(0o644)
    writer = Store(path)
    kept(writer, said("hi"))
    for each in tmp_path.glob("sessions.db*"):
        each.chmod(0o644 if each.is_file() else 0o755)
    second = Store(path)
    assert {mode(each) for each in tmp_path.glob("sessions.db*") if each.is_file()} == {
        0o600
    } and mode(other) == 0o644
    second.close()
    writer.close()


@pytest.mark.case("SES-15")
def test_a_newer_file_is_refused_and_not_touched(tmp_path: Path) -> None:
    """SES-15."""
    path = tmp_path / "sessions.db"
    with contextlib.closing(Store(path)) as store:
        kept(store, said("from the future"))
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {len(SCHEMA) + 1}")
    path.chmod(0o644)
    before = path.read_bytes(), path.stat().st_mtime_ns, mode(path)
    with pytest.raises(StoreError, match="made by a newer version of coder") as raised:
        Store(path)
    assert (path.read_bytes(), path.stat().st_mtime_ns, mode(path)) == before and "\n" not in str(
        raised.value
    )
    in_memory, notice = open_store(path)
    assert in_memory.in_memory and "newer version" in notice and notice.endswith("not saved.")
    assert path.read_bytes() == before[0]


def test_what_is_no_database_of_ours_is_refused_and_not_touched(tmp_path: Path) -> None:
    text, foreign, marked, empty = (
        tmp_path / f"{name}.db" for name in ("text", "foreign", "marked", "empty")
    )
    text.write_text("This is no database. " * 500)
    empty.touch()
    with contextlib.closing(sqlite3.connect(foreign)) as db:
        db.execute("CREATE TABLE bookmarks (url TEXT)")
    with contextlib.closing(sqlite3.connect(marked)) as db:
        db.execute("PRAGMA application_id = 7")
    for path, why in (
        (text, "it is not an SQLite database; move it away"),
        (foreign, "belongs to another program"),
        (marked, "another program"),
    ):
        before = path.read_bytes()
        with pytest.raises(StoreError, match=why):
            Store(path)
        assert path.read_bytes() == before
    with contextlib.closing(Store(empty)) as store:
        assert store.sessions() == []
    with contextlib.closing(sqlite3.connect(empty)) as db:
        assert db.execute("PRAGMA application_id").fetchone()[0] == APPLICATION


@pytest.mark.case("SES-16")
@pytest.mark.parametrize("place", ["a file", "/proc/nowhere"])
def test_where_nothing_can_be_written_it_goes_on_in_memory_with_a_notice(
    tmp_path: Path, place: str
) -> None:
    """SES-16."""
    (tmp_path / "a file").touch()
    path = tmp_path / place / "coder" / "sessions.db"
    with pytest.raises(StoreError):
        Store(path)
    store, notice = open_store(path)
    assert (
        notice.startswith(f"The file of the sessions {path}: ")
        and notice.endswith("This session is not saved.")
        and "\n" not in notice
    )
    session_id = kept(store, said("hi"))
    assert (
        to_model_messages(store, session_id) == [said("hi")]
        and store.search("hi")[0].session.id == session_id
    )
    assert list(tmp_path.rglob("sessions*")) == []


def test_a_store_that_is_fine_says_nothing(tmp_path: Path) -> None:
    store, notice = open_store(tmp_path / "sessions.db")
    assert (notice, store.in_memory) == ("", False)
    store.close()
    with pytest.raises(StoreError):
        store.sessions()


def test_many_processes_may_open_a_new_file_at_the_same_time(tmp_path: Path) -> None:
    code = (
        "import sys; from coder.sessions.store import Store; sys.stdin.read(1)\n"
        "store = Store(sys.argv[1]); print(store.create('/ws'))"
    )
    children = [python(code, str(tmp_path / "sessions.db")) for _ in range(6)]
    for child in children:
        assert child.stdin
        child.stdin.write("g")
        child.stdin.flush()
    ids = {child.communicate(timeout=PATIENCE)[0].strip() for child in children}
    assert [child.returncode for child in children] == [0] * 6
    with contextlib.closing(Store(tmp_path / "sessions.db")) as store:
        assert {row["id"] for row in store.rows("SELECT id FROM session")} == ids and len(ids) == 6


def test_two_connections_write_at_the_same_time_without_losing_anything(tmp_path: Path) -> None:
    stores = [Store(tmp_path / "sessions.db") for _ in range(3)]
    recorders = [Recorder(store, store.create("/ws"), []) for store in stores]

    def talk(recorder: Recorder) -> None:
        for number in range(60):
            recorder.messages.append(said(str(number)))
            recorder.sync()

    threads = [threading.Thread(target=talk, args=(recorder,)) for recorder in recorders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for recorder, store in zip(recorders, reversed(stores)):
        assert (
            not recorder.problem
            and to_model_messages(store, recorder.session_id) == recorder.messages
            and len(recorder.messages) == 60
        )
        recorder.close()
    for store in stores:
        store.close()


def test_a_transaction_that_was_left_open_does_not_hinder_the_next(store: Store) -> None:
    """As a failed, or interrupted, rollback leaves it."""
    store.rows("BEGIN IMMEDIATE")
    session_id = kept(store, said("hi"))
    with contextlib.closing(Store(store.path)) as other:
        assert to_model_messages(other, session_id) == [said("hi")]


# ---- damage ----------------------------------------------------------------------------------------------


@pytest.fixture
def large(tmp_path: Path) -> tuple[Path, str, list[Message]]:
    """A file with a session of 400 messages, all of it in one file."""
    path = tmp_path / "sessions.db"
    messages = [
        said(f"number {number} " + "word " * (number % 90), "user" if number % 2 else "assistant")
        for number in range(400)
    ]
    with contextlib.closing(Store(path)) as store:
        session_id = kept(store, *messages)
    assert not path.with_name("sessions.db-wal").exists()
    return path, session_id, messages


def damage(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def data_page(path: Path, text: str) -> int:
    """Where the page begins that holds the message with this text."""
    return path.read_bytes().index(text.encode()) // 4096 * 4096


def aside(path: Path) -> list[Path]:
    return [each for each in path.parent.glob("sessions.db.damaged-*") if "-wal" not in each.name]


@pytest.mark.case("SES-01", "SES-02", "SES-03")
@pytest.mark.parametrize("hurt", ["cut", "head", "garbage"])
def test_a_damaged_file_is_kept_under_another_name_and_a_new_one_begun(
    large: tuple[Path, str, list[Message]], hurt: str
) -> None:
    """At the opening, when it is read, and only once by two that have it open."""
    path, session_id, _ = large
    first = Store(path) if hurt == "garbage" else None
    place = data_page(path, '"content": "number 200 ')
    if hurt == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        damage(path, 16 if hurt == "head" else place, b"\xff" * 4080)
    before = path.read_bytes()
    with contextlib.closing(Store(path)) as store:
        with pytest.raises(StoreError, match=r"There is no session|was damaged"):
            to_model_messages(store, session_id) or store.get(session_id)
        assert re.fullmatch(
            r"The file of the sessions was damaged; a new one was begun\. The damaged file is kept as "
            rf"{aside(path)[0]}\.",
            store.notice,
        )
        new = kept(store, said("hi"))
        assert store.search("hi") and mode(path) == mode(aside(path)[0]) == 0o600
    if first:
        with contextlib.closing(first):
            with pytest.raises(StoreError, match="another process has begun a new one"):
                to_model_messages(first, session_id)
            assert first.get(new)
    assert [each.read_bytes() for each in aside(path)] == [before]


def test_damage_that_a_write_notices_costs_nothing_of_the_conversation_under_way(
    large: tuple[Path, str, list[Message]],
) -> None:
    path, session_id, messages = large
    told: list[str] = []
    with contextlib.closing(Store(path)) as store:
        with Recorder(store, session_id, tell=told.append) as recorder:
            damage(path, 4096, b"\xff" * (path.stat().st_size - 4096))
            store.rows("PRAGMA shrink_memory")
            for number in range(3):
                recorder.messages.append(said(f"and on {number}"))
                recorder.sync()
        assert not told and not recorder.problem and "was damaged" in store.notice
    with contextlib.closing(Store(path)) as store:
        assert len(to_model_messages(store, session_id)) == len(messages) + 3


@pytest.mark.parametrize(
    "hurt", ["DROP TABLE search_data", "UPDATE search_data SET block = x'ffff0000'"]
)
def test_a_search_index_that_is_damaged_is_made_again(
    large: tuple[Path, str, list[Message]], hurt: str
) -> None:
    path, session_id, messages = large
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute(hurt)
    with contextlib.closing(Store(path)) as store:
        with Recorder(store, session_id) as recorder:
            for number in range(3):
                recorder.messages.append(said(f"and on {number}"))
                recorder.sync()
            assert not recorder.problem and not store.notice
        assert (
            store.search("number 200")[0].session.id
            == session_id
            == store.search("on 2")[0].session.id
        )
        assert store.rows("PRAGMA integrity_check")[0][0] == "ok" and not aside(path)
        assert len(to_model_messages(store, session_id)) == len(messages) + 3


@pytest.mark.parametrize("lock", ["EXCLUSIVE", "IMMEDIATE"])
def test_opening_waits_for_a_process_that_writes(tmp_path: Path, lock: str) -> None:
    """Also where the file is new, and not yet in the mode in which that is no matter."""
    path = tmp_path / "sessions.db"
    with contextlib.closing(
        sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    ) as other:
        other.execute(f"BEGIN {lock}")
        timer = threading.Timer(0.3, other.execute, ("ROLLBACK",))
        timer.start()
        with promptly(4), contextlib.closing(Store(path)) as store:
            assert kept(store, said("hi"))
        timer.join()


@pytest.mark.case("SES-03")
def test_a_message_that_cannot_be_read_is_left_out_and_said(store: Store) -> None:
    """SES-03."""
    session_id = kept(store, *(said(str(number)) for number in range(5)))
    with store.transaction() as db:
        db.execute('UPDATE message SET data = \'{"role": "user", "cont\' WHERE position = 2')
    told: list[str] = []
    with pytest.raises(
        ZeroDivisionError
    ):  # whoever is told may fail: the session is free all the same
        Recorder(store, session_id, tell=lambda text: 1 // 0)  # type: ignore[arg-type]
    with Recorder(store, session_id, tell=told.append) as recorder:
        assert [message["content"] for message in recorder.messages] == ["0", "1", "3", "4"]
        recorder.messages.append(said("5"))
        recorder.sync()
    assert told == ["1 message is left out of the session: what stands in the file cannot be read."]
    assert [message["content"] for message in to_model_messages(store, session_id)] == [
        "0",
        "1",
        "3",
        "4",
        "5",
    ]


# ---- what goes in comes out ------------------------------------------------------------------------------

TEXTS = st.text(max_size=20) | st.sampled_from(
    ["", "h\ud83dlf", "nul\0", "\ufffe", "\U0001f600", '"quoted" \\ \n', "你好"]
)
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
CONTENTS = TEXTS | st.lists(
    st.builds(lambda text: {"type": "text", "text": text}, TEXTS) | st.just(IMAGE),
    min_size=1,
    max_size=3,
)
VALUES = (
    st.integers()
    | TEXTS
    | st.booleans()
    | st.none()
    | st.floats(allow_nan=False)
    | st.lists(TEXTS, max_size=2)
)
METAS = st.dictionaries(
    st.sampled_from(["timestamp", "model", "is_error", "queued", "own"]), VALUES, max_size=3
)
CALLS = st.lists(
    st.builds(
        lambda call_id, name, arguments: {
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        },
        st.sampled_from(["a", "b", "call_0"]),
        st.sampled_from(["read", "no such"]),
        st.sampled_from(["{}", '{"x": "\\ud83d"}', "broken"]),
    ),
    min_size=1,
    max_size=3,
)
MESSAGES = st.one_of(
    st.builds(
        lambda content, meta: {"role": "user", "content": content, "meta": meta}, CONTENTS, METAS
    ),
    st.builds(
        lambda content, thought: {
            "role": "assistant",
            "content": content,
            "reasoning_content": thought,
        },
        TEXTS,
        TEXTS,
    ),
    st.builds(
        lambda content, calls, meta: {
            "role": "assistant",
            "content": content,
            "tool_calls": calls,
            "meta": meta,
        },
        TEXTS,
        CALLS,
        METAS,
    ),
    st.builds(
        lambda call_id, content: {"role": "tool", "tool_call_id": call_id, "content": content},
        st.sampled_from(["a", "b", "call_0"]),
        CONTENTS,
    ),
    st.builds(lambda text: {"role": "artifact", "text": text, "meta": {}}, TEXTS),
)
RELAXED = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def active(store: Store, session_id: str) -> list[Message]:
    """The list as it stands in the file, without a repair."""
    return [
        json.loads(row["data"])
        for row in store.rows(
            "SELECT data FROM message WHERE session = ? AND active ORDER BY position", session_id
        )
    ]


@pytest.mark.case("INV-09")
@seed(20261121)
@RELAXED
@given(messages=st.lists(MESSAGES, max_size=12))
def test_any_list_is_loaded_as_it_was(store: Store, messages: list[Message]) -> None:
    """INV-09: also what no encoder takes, before it is mended; and after the repair that every request gets."""
    session_id = kept(store, *messages)
    assert not messages or active(store, session_id) == as_json(messages)
    mended = repair(messages)
    again = kept(store, *mended)
    assert not mended or to_model_messages(store, again) == as_json(mended)


def set_parts(store: Store, session_id: str, kind: str, records: list[Any]) -> None:
    with Recorder(store, session_id) as recorder:
        recorder.keep_undo(records)


KINDS = [
    "append",
    "append",
    "replace",
    "cut",
    "compact",
    "prune",
    "twice",
    "reverse",
    "given",
    "resume",
]
EDITS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 9), st.integers(1, 4)), max_size=12
)


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
        messages[place : place + count : 2] = [
            said(f"{name}.short") for _ in messages[place : place + count : 2]
        ]
    elif edit == "twice":
        messages += messages[place : place + 1]
    elif edit == "reverse":
        messages.reverse()


@seed(20261121)
@RELAXED
@given(edits=EDITS)
def test_whatever_is_done_to_the_list_the_table_follows(
    store: Store, edits: list[tuple[str, int, int]]
) -> None:
    """Nothing that was written is lost: what left the list stays in the table, unless another message took its place."""
    messages: list[Message] = [said("first")]
    recorder = Recorder(store, store.create("/ws"), messages)
    try:
        for number, (edit, place, count) in enumerate(edits):
            before = len(table(store, recorder.session_id))
            edited(messages, edit, place, count, str(number))
            recorder(Compacted("manual", 1, {}, {}, "summary")) if edit in (
                "compact",
                "prune",
            ) else recorder.sync()
            assert not recorder.problem and active(store, recorder.session_id) == messages
            assert len(table(store, recorder.session_id)) >= max(before, len(messages))
            if edit in ("given", "resume"):
                recorder.close()
                recorder = Recorder(
                    store, recorder.session_id, list(messages) if edit == "given" else None
                )
                messages = recorder.messages
    finally:
        recorder.close()


@pytest.mark.case("INV-01")
@seed(20261121)
@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    script=st.lists(REPLIES, min_size=1, max_size=8),
    moments=st.lists(MOMENTS, min_size=1, max_size=3),
)
def test_after_random_runs_the_list_loaded_is_the_list_in_memory_and_at_every_event_it_can_be_sent(
    store: Store, script: list[Reply], moments: list[Moment]
) -> None:
    """INV-01 with resumes: what a kill would leave at any event is valid, and what a run leaves is exact."""
    model, session_id = ScriptedModel([*script, *[Reply("enough")] * 50]), store.create("/ws")
    for moment in moments:
        with Recorder(store, session_id) as recorder:

            def each(event: Event, recorder: Recorder = recorder, moment: Moment = moment) -> None:
                recorder(event)
                if not event.type.endswith("_delta"):
                    assert_valid({"messages": convert_to_llm(to_model_messages(store, session_id))})
                moment(event)

            run = run_loop(
                recorder.messages,
                model,
                TOOLS,
                prompts="next",
                abort=moment.abort,
                retry=QUICK,
                limits=Limits(max_steps=6, max_errors=3),
            )
            with contextlib.suppress(Left):
                drive(run, each)
            run.close()
            recorder.sync()
            assert not recorder.problem and active(store, session_id) == as_json(recorder.messages)
            assert to_model_messages(store, session_id) == as_json(repair(recorder.messages))
    for body in model.requests:
        assert_valid(body)


def test_deltas_are_not_written_one_by_one(store: Store) -> None:
    """E17."""
    session_id = store.create("/ws")
    changes: list[tuple[str, int]] = []
    with (
        serve(Reply("one two three four five six", reasoning="a b c d")) as server,
        Recorder(store, session_id) as recorder,
    ):

        def each(event: Event) -> None:
            before = store.rows("SELECT total_changes() AS n")[0]["n"]
            recorder(event)
            changes.append((event.type, store.rows("SELECT total_changes() AS n")[0]["n"] - before))

        ask(server, messages=recorder.messages, each=each)
        with contextlib.closing(sqlite3.connect(store.path)) as other:
            store.rows("PRAGMA busy_timeout = 1")
            other.execute("BEGIN IMMEDIATE")
            recorder(TextDelta("not even a transaction"))
            assert not recorder.problem
    written = {kind for kind, count in changes if count}
    assert written == {"message_end", "step_end", "run_end"}
    assert sum(kind.endswith("_delta") for kind, _ in changes) == 10 and all(
        not n for kind, n in changes if kind.endswith("_delta")
    )


def test_an_interrupt_at_any_place_loses_and_doubles_nothing(store: Store) -> None:
    """A second Ctrl+C is an exception between any two instructions."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    chance, hit = random.Random(7), 0
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with Recorder(store, store.create("/ws"), []) as recorder:
            for round_ in range(150):
                try:
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.00005, 0.002))
                    for number in range(50):
                        recorder.messages.append(said(f"{round_}.{number}"))
                        recorder.sync()
                except KeyboardInterrupt:
                    hit += 1
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                del recorder.messages[40:]
                recorder.sync()
                assert (
                    not recorder.problem and active(store, recorder.session_id) == recorder.messages
                )
            texts = [text for _, text in table(store, recorder.session_id)]
            assert len(texts) == len(set(texts)) and hit > 100
    finally:
        signal.signal(signal.SIGALRM, before)


# ---- what is written -------------------------------------------------------------------------------------


def test_a_call_is_pending_then_running_then_completed_or_failed(store: Store) -> None:
    """E19-E21, E28, E33, E34."""
    seen: list[list[str]] = []
    session_id = store.create("/ws")
    bad = Reply(calls=[("add", {"a": 1, "b": 2}), ("add", {"a": "x"})])
    with serve(bad, Reply("Done.")) as server, Recorder(store, session_id) as recorder:

        def each(event: Event) -> None:
            recorder(event)
            if event.type in ("message_end", "tool_start", "tool_end"):
                seen.append([event.type, *states(store, session_id)])

        ask(server, tools=[add], messages=recorder.messages, each=each)
    assert seen == [
        ["message_end"],
        ["message_end"],
        ["tool_start", "running", "pending"],
        ["tool_end", "running", "pending"],
        ["message_end", "running", "pending"],
        ["tool_start", "completed", "running"],
        ["tool_end", "completed", "running"],
        ["message_end", "completed", "running"],
        ["message_end", "completed", "failed"],
    ]
    rows = store.rows(
        "SELECT * FROM part WHERE session = ? AND type = 'tool' ORDER BY id", session_id
    )
    calls = [call["id"] for call in recorder.messages[1]["tool_calls"]]
    assert [row["call_id"] for row in rows] == calls and [row["title"] for row in rows] == [
        "add 1",
        "add x",
    ]
    assert all(row["start"] <= row["end"] for row in rows) and "content" not in json.loads(
        rows[0]["data"]
    )


def test_an_answer_has_its_finish_its_tokens_and_the_time_of_its_end(store: Store) -> None:
    """E22, E32, E16, E18."""
    session_id = store.create("/ws", model="m")
    with serve(TWO, Reply("Done.")) as server, Recorder(store, session_id) as recorder:
        ask(server, tools=[add], messages=recorder.messages, each=recorder)
    rows = store.rows("SELECT * FROM message WHERE session = ? ORDER BY position", session_id)
    answers = [row for row in rows if row["role"] == "assistant"]
    assert [row["finish"] for row in answers] == ["tool_calls", "stop"] and all(
        row["completed"] for row in answers
    )
    assert all(json.loads(row["tokens"])["input"] > 0 for row in answers) and {
        row["error"] for row in rows
    } == {None}
    kinds = [
        (row["type"], row["text"] or json.loads(row["data"]).get("text"))
        for row in store.rows(
            "SELECT * FROM part WHERE message = ? AND type <> 'tool'", answers[0]["id"]
        )
    ]
    assert kinds == [("text", "Let me see."), ("reasoning", "Two sums.")]


def test_why_a_run_failed_stands_at_its_last_message(store: Store) -> None:
    """E27, E30."""
    session_id = store.create("/ws")
    with (
        serve(Reply("no such thing", status=400)) as server,
        Recorder(store, session_id) as recorder,
    ):
        ask(server, messages=recorder.messages, each=recorder)
    error = json.loads(
        store.rows("SELECT error FROM message WHERE session = ?", session_id)[0]["error"]
    )
    assert (error["stop_reason"], error["kind"], error["status"]) == ("error", "bad_request", 400)


def test_usage_and_cost_of_the_runs_and_of_their_sub_agents_are_added(store: Store) -> None:
    session_id = kept(store, said("hi"))
    with Recorder(store, session_id) as recorder:
        recorder(RunEnd("stop", "", Usage(10, 5, 2, 1, cost=0.5), 1))
        recorder(Nested("explore", RunEnd("stop", "", Usage(3, 1, cost=0.25), 1)))
        recorder(
            Nested("explore", Nested("compaction", RunEnd("stop", "", Usage(2, 1, cost=0.25), 1)))
        )
        recorder.sync()
        assert store.get(session_id).usage == Usage(15, 7, 2, 1, cost=1.0)
        recorder(RunEnd("stop", "", Usage(1, 1, estimated=True), 1))
    assert store.get(session_id).usage == Usage(16, 8, 2, 1, estimated=True, cost=None)


def test_after_a_compaction_the_old_messages_stay_where_they_were_and_are_not_sent(
    store: Store,
) -> None:
    """A30, E37."""
    session_id = kept(
        store, said("one"), said("two", "assistant"), said("three"), said("four", "assistant")
    )
    with Recorder(store, session_id) as recorder:
        summary = said("Goal: go on") | {"meta": {"summary": True}}
        recorder.messages[:2] = [summary]
        recorder(
            Compacted(
                "threshold",
                1,
                {"messages": 4, "tokens": 100},
                {"messages": 3, "tokens": 50},
                "summary",
            )
        )
        recorder.messages.append(said("five"))
        recorder.sync()
        recorder.messages[:4] = [said("Goal: still") | {"meta": {"summary": True}}]
        recorder(
            Compacted(
                "manual", 1, {"messages": 4, "tokens": 90}, {"messages": 1, "tokens": 20}, "summary"
            )
        )
    assert table(store, session_id) == [
        (0, "one"),
        (0, "two"),
        (0, "Goal: go on"),
        (0, "three"),
        (0, "four"),
        (0, "five"),
        (1, "Goal: still"),
    ]
    assert [message["content"] for message in to_model_messages(store, session_id)] == [
        "Goal: still"
    ]
    assert [part["trigger"] for part in parts(store, session_id, "compaction")] == [
        "threshold",
        "manual",
    ]
    assert store.search("three")[0].session.messages == 1


class Shortening(Hooks):
    """Replaces all but the newest message, at the second request."""

    def on_length(
        self, messages: list[Message], trigger: Trigger, usage: Usage, abort: Abort
    ) -> Outcome[bool]:
        if len(messages) < 4:
            return False
        messages[:-1] = [said("a summary") | {"meta": {"summary": True}}]
        yield Nested("compaction", RunEnd("stop", "a summary", Usage(100, 10), 1))
        yield Compacted(trigger, 1, {"messages": 4}, {"messages": 2}, "summary")
        return True

    def on_compacted(self, messages: list[Message]) -> None:
        messages.insert(1, said("notes, attached again"))


def test_a_compaction_within_a_run_is_written_as_it_happened(store: Store) -> None:
    """A28, ABT-08: every earlier record stays."""
    session_id = kept(
        store, said("one"), said("two", "assistant"), said("three"), said("four", "assistant")
    )
    with serve(Reply("ok")) as server, Recorder(store, session_id) as recorder:
        ask(server, "five", messages=recorder.messages, each=recorder, hooks=Shortening())
        assert to_model_messages(store, session_id) == recorder.messages
    assert table(store, session_id) == [
        (0, "one"),
        (0, "two"),
        (0, "three"),
        (0, "four"),
        (1, "a summary"),
        (1, "notes, attached again"),
        (1, "five"),
        (1, "ok"),
    ]
    assert (
        store.get(session_id).usage.input > 100 and len(parts(store, session_id, "compaction")) == 1
    )


def test_a_compaction_while_nothing_can_be_written_keeps_the_old_messages_all_the_same(
    store: Store,
) -> None:
    told: list[str] = []
    session_id = kept(store, said("one"), said("two", "assistant"))
    with Recorder(store, session_id, tell=told.append) as recorder:
        with contextlib.closing(sqlite3.connect(store.path)) as other:
            store.rows("PRAGMA busy_timeout = 1")
            other.execute("BEGIN IMMEDIATE")
            recorder.messages[:] = [said("a summary")]
            recorder(Compacted("manual", 1, {}, {}, "summary"))
        assert len(told) == 1 and "another process keeps it busy" in told[0]
        recorder(RunEnd("stop", "", Usage(), 1))
        assert told[1:] == ["The conversation is saved again."]
        recorder.messages[0] = said("a summary, mended")
        recorder.sync()
    assert table(store, session_id) == [(0, "one"), (0, "two"), (1, "a summary, mended")]


@pytest.mark.case("INV-03")
def test_a_result_that_was_pruned_stands_beside_its_original(store: Store) -> None:
    """A31, INV-03."""
    session_id = kept(
        store,
        said("go"),
        calling("a"),
        result("a", "long output"),
        calling("b"),
        result("b", "new output"),
    )
    with Recorder(store, session_id) as recorder:
        recorder.messages[2] = result("a", "[removed]")
        recorder(Compacted("threshold", 1, {}, {}, "prune"))
    assert [text for _, text in table(store, session_id)] == [
        "go",
        "",
        "long output",
        "[removed]",
        "",
        "new output",
    ]
    assert [message["content"] for message in to_model_messages(store, session_id)] == [
        "go",
        "",
        "[removed]",
        "",
        "new output",
    ]


def test_a_repaired_message_is_the_same_row_with_its_calls(store: Store) -> None:
    """T24: servers that give every first call the same id."""

    def frame(delta: Body, finish: str | None = None) -> bytes:
        return (
            b"data: "
            + json.dumps(
                {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
            ).encode()
            + b"\n\n"
        )

    def call(number: int) -> Reply:
        function = {"name": "add", "arguments": json.dumps({"a": number, "b": 0})}
        return Reply(
            chunks=[
                frame(
                    {
                        "tool_calls": [
                            {"index": 0, "id": "call_0", "type": "function", "function": function}
                        ]
                    }
                ),
                frame({}, "tool_calls"),
                b"data: [DONE]\n\n",
            ]
        )

    session_id = store.create("/ws")
    with serve(call(1), call(2), Reply("ok")) as server, Recorder(store, session_id) as recorder:
        ask(server, tools=[add], messages=recorder.messages, each=recorder)
        recorder.sync()
        assert to_model_messages(store, session_id) == recorder.messages
    rows = store.rows(
        "SELECT * FROM part WHERE session = ? AND type = 'tool' ORDER BY id", session_id
    )
    ids = [each["id"] for message in recorder.messages for each in message.get("tool_calls", ())]
    assert [row["call_id"] for row in rows] == ids and len(set(ids)) == 2
    assert [(row["state"], row["title"]) for row in rows] == [
        ("completed", "add 1"),
        ("completed", "add 2"),
    ]
    assert {flag for flag, _ in table(store, session_id)} == {1}


def test_a_call_whose_id_is_repaired_when_the_session_is_read_has_its_end_too(store: Store) -> None:
    session_id = kept(store, said("go"), calling("a"), result("a", "out"), calling("a"))
    assert states(store, session_id) == ["completed", "pending"]
    with Recorder(store, session_id) as recorder:
        recorder.sync()
        assert (
            to_model_messages(store, session_id) == recorder.messages
            and recorder.messages[-1]["tool_call_id"] != "a"
        )
    assert states(store, session_id) == ["completed", "failed"]


def test_a_list_that_somebody_else_has_read_goes_on_with_its_calls(store: Store) -> None:
    session_id = kept(store, said("go"), calling("a"))
    with Recorder(store, session_id, [said("go"), calling("a"), result("a", "out")]) as recorder:
        recorder.sync()
    assert states(store, session_id) == ["completed"] and len(table(store, session_id)) == 3


def test_a_message_of_another_role_is_no_repair_of_the_one_before(store: Store) -> None:
    """As after an undo: what was taken back stays in the table."""
    session_id = kept(store, said("one"), said("two", "assistant"))
    with Recorder(store, session_id) as recorder:
        recorder.messages[:] = [said("three", "assistant")]
        recorder.sync()
    assert sorted(table(store, session_id)) == [(0, "one"), (0, "two"), (1, "three")]


# ---- what a kill leaves ----------------------------------------------------------------------------------


def test_a_call_that_was_killed_is_answered_by_what_became_of_it(store: Store) -> None:
    """SES-04, SES-05: at each event, what would be loaded if the process ended there."""
    found: list[tuple[str, list[str]]] = []
    session_id = store.create("/ws")
    bad = Reply(calls=[("nonsense", {})])
    with serve(TWO, bad, Reply("Done.")) as server, Recorder(store, session_id) as recorder:

        def each(event: Event) -> None:
            recorder(event)
            if isinstance(event, ToolStart | ToolEnd):
                answers = [
                    message
                    for message in to_model_messages(store, session_id)
                    if message["role"] == "tool"
                ]
                found.append((event.type, [message["content"] for message in answers[:2]]))

        ask(server, tools=[add], messages=recorder.messages, each=each)
    assert found == [
        ("tool_start", [INTERRUPTED, NOT_RUN]),
        ("tool_end", [INTERRUPTED, NOT_RUN]),
        ("tool_start", ["3", INTERRUPTED]),
        ("tool_end", ["3", INTERRUPTED]),
        ("tool_start", ["3", "7"]),
        ("tool_end", ["3", "7"]),
    ]


def test_a_call_that_was_killed_has_failed_once_the_session_goes_on(
    tmp_path: Path, store: Store
) -> None:
    session_id = store.create("/ws")
    with serve(TWO, Reply("Done.")) as server:
        recorder = Recorder(store, session_id)

        def each(event: Event) -> None:
            recorder(event)
            assert not isinstance(event, ToolStart) or 1 // 0

        with pytest.raises(ZeroDivisionError):
            ask(server, tools=[add], messages=recorder.messages, each=each)
        recorder._lock.release()  # as at a kill, which closes nothing
        assert states(store, session_id) == ["running", "pending"]
        with Recorder(store, session_id) as again:
            ask(server, "Go on.", messages=again.messages, each=again)
            assert [m["content"] for m in again.messages if m["role"] == "tool"] == [
                INTERRUPTED,
                NOT_RUN,
            ]
            assert to_model_messages(store, session_id) == again.messages
    assert states(store, session_id) == ["failed", "failed"]
    ends = store.rows("SELECT \"end\" FROM part WHERE session = ? AND type = 'tool'", session_id)
    assert all(row["end"] for row in ends)


@pytest.mark.case("SES-05")
def test_open_calls_are_answered_in_front_of_the_next_message(store: Store) -> None:
    """SES-05."""
    two = calling("a") | {"tool_calls": calling("a")["tool_calls"] + calling("b")["tool_calls"]}
    session_id = kept(store, said("go"), two)
    with serve(Reply("ok")) as server, Recorder(store, session_id) as recorder:
        ask(server, "What happened?", messages=recorder.messages, each=recorder)
        assert [(m["role"], m["content"]) for m in server.requests[0]["messages"]] == [
            ("user", "go"),
            ("assistant", None),
            ("tool", NOT_RUN),
            ("tool", NOT_RUN),
            ("user", "What happened?"),
        ]
        assert_all_valid(server)
        assert to_model_messages(store, session_id) == recorder.messages


@pytest.mark.case("SES-06")
def test_a_result_without_its_call_is_dropped(store: Store) -> None:
    """SES-06."""
    told: list[str] = []
    session_id = kept(store, said("go"), result("lost", "who asked?"), said("ok", "assistant"))
    with serve(Reply("fine")) as server, Recorder(store, session_id, tell=told.append) as recorder:
        ask(server, "on", messages=recorder.messages, each=recorder)
        assert_all_valid(server)
    assert [message["content"] for message in to_model_messages(store, session_id)] == [
        "go",
        "ok",
        "on",
        "fine",
    ]
    assert told == ["1 result is left out of the session: no tool call belongs to it."]
    with Recorder(store, session_id, tell=told.append):
        assert len(told) == 1


WORKER = """
import os, sys, time
from coder import Agent, ChatModel, SessionStore
from coder.abort import Abort
from coder.ai import ChatModel
from coder.sessions.recorder import Recorder
from coder.sessions.store import Store
from coder.loop import run_loop
from coder.toolset import tool
import openai

url, path = sys.argv[1:]
for line in sys.stdin:
    session_id, effects = line.split()
    if pid := os.fork():
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("ended", flush=True)
        continue

    @tool
    def mark(number: int) -> str:
        '''Leave a mark.

        number: which
        '''
        with open(effects, "a") as file:
            file.write(f"{number}\\n")
        time.sleep(0.004)
        return f"marked {number}"

    store = Store(path)
    with Recorder(store, session_id) as recorder:
        for event in run_loop(recorder.messages, ChatModel("m", base_url=url), [mark], prompts="Mark ten."):
            recorder(event)
    os._exit(0)
"""


def ten(first: int) -> Reply:
    return Reply(
        "Marking.", calls=[("mark", {"number": number}) for number in range(first, first + 5)]
    )


@pytest.mark.case("SES-04")
def test_after_fifty_kills_in_a_turn_of_ten_calls_every_session_loads_and_no_call_ran_twice(
    tmp_path: Path,
) -> None:
    def script(body: Body) -> Reply:
        results = sum(message["role"] == "tool" for message in body["messages"])
        last = body["messages"][-1]
        return (
            Reply("I see.")
            if last["content"] == "Go on."
            else ten(0)
            if not results
            else ten(5)
            if results == 5
            else Reply("Done.")
        )

    chance, cut = random.Random(4), 0
    store = Store(tmp_path / "sessions.db")
    with ScriptedServer(script) as server:
        worker = python(WORKER, server.url, str(store.path))
        assert worker.stdin and worker.stdout
        for run in range(50):
            session_id, effects = store.create("/ws"), tmp_path / f"effects{run}"
            effects.touch()
            worker.stdin.write(f"{session_id} {effects}\n")
            worker.stdin.flush()
            pid = int(worker.stdout.readline())
            wanted = chance.randint(0, 10)
            until(lambda: len(effects.read_text().split()) >= wanted, f"{wanted} calls")  # noqa: B023 (called at once)
            time.sleep(chance.uniform(0, 0.008))  # the moment within a call is the case
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            assert worker.stdout.readline() == "ended\n"
            marks = effects.read_text().split()
            assert len(marks) == len(set(marks))
            with Recorder(
                store, session_id
            ) as recorder:  # the claim of the killed process is gone with it
                checked_marks(recorder.messages, set(marks))
                ask(server, "Go on.", messages=recorder.messages, each=recorder)
            assert (
                effects.read_text().split() == marks
                and to_model_messages(store, session_id) == recorder.messages
            )
            cut += 0 < len(marks) < 10
        worker.communicate(timeout=PATIENCE)
        assert_all_valid(server)
    assert cut >= 20, f"too few were hit in their turn: {cut}"
    assert store.rows("PRAGMA integrity_check")[0][0] == "ok"
    store.close()


def checked_marks(messages: list[Message], marks: set[str]) -> None:
    """What the model is told of each call is true: done, not run, or perhaps."""
    answers = {
        message["tool_call_id"]: message["content"]
        for message in messages
        if message["role"] == "tool"
    }
    told = set()
    for call in (call for message in messages for call in message.get("tool_calls", ())):
        number = str(json.loads(call["function"]["arguments"])["number"])
        told.add(number)
        assert answers[call["id"]] in (
            {f"marked {number}", INTERRUPTED} if number in marks else {NOT_RUN, INTERRUPTED}
        )
    assert marks <= told


# ---- one writer ------------------------------------------------------------------------------------------

HOLDER = """
import sys
from coder.sessions.recorder import Recorder
from coder.sessions.store import Store
recorder = Recorder(Store(sys.argv[1]), sys.argv[2])
recorder.messages.append({"role": "user", "content": "from A"})
recorder.sync()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.case("SES-07")
def test_a_session_that_another_process_has_is_refused_and_can_be_forked(store: Store) -> None:
    """SES-07; and the kernel gives it back when that process is killed."""
    session_id = kept(store, said("hi"))
    left = store.path.with_name("sessions.db.locks") / session_id
    left.write_text("1234567890123")  # by one that was killed
    holder = python(HOLDER, str(store.path), session_id)
    try:
        assert holder.stdout and holder.stdout.readline() == "ready\n"
        with pytest.raises(
            StoreError,
            match=rf"^The session {session_id} is open in another process \(pid {holder.pid}\)\.$",
        ):
            Recorder(store, session_id)
        with pytest.raises(StoreError, match="is open in another process"):
            store.remove(session_id)
        forked = store.fork(session_id)
        with Recorder(store, forked) as recorder:
            recorder.messages.append(said("from B"))
            recorder.sync()
        assert [m["content"] for m in to_model_messages(store, session_id)] == ["hi", "from A"]
        assert [m["content"] for m in to_model_messages(store, forked)] == [
            "hi",
            "from A",
            "from B",
        ]
    finally:
        holder.kill()
        holder.communicate(timeout=PATIENCE)
    with Recorder(store, session_id) as recorder:
        assert len(recorder.messages) == 2


def test_a_session_is_held_by_one_also_in_one_process_and_given_back(store: Store) -> None:
    session_id = kept(store, said("hi"))
    before = len(os.listdir("/proc/self/fd"))
    with Recorder(store, session_id), pytest.raises(StoreError, match="open in this process"):
        Recorder(store, session_id)
    Recorder(store, session_id).close()
    assert len(os.listdir("/proc/self/fd")) == before
    locks = store.path.with_name("sessions.db.locks")
    assert list(locks.iterdir()) == []
    (locks / "other").symlink_to(store.path)
    with pytest.raises(StoreError, match="cannot be locked"):
        Claim(store.path, "other")
    with pytest.raises(StoreError, match="There is no session"):
        Recorder(store, "nosuch")


def test_of_many_that_want_a_claim_at_the_same_time_one_has_it(tmp_path: Path) -> None:
    """Also while it is given back, which takes its file away."""
    held, most = 0, 0
    guard = threading.Lock()

    def want() -> None:
        nonlocal held, most
        for _ in range(150):
            try:
                claim = Claim(tmp_path / "sessions.db", "one")
            except StoreError:
                continue
            with guard:
                held += 1
                most = max(most, held)
            time.sleep(0.0005)  # two that hold it have to meet
            with guard:
                held -= 1
            claim.release()

    threads = [threading.Thread(target=want) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (held, most) == (0, 1)


# ---- when writing fails ----------------------------------------------------------------------------------

FULL = """
import json, resource, sys
from coder.sessions.recorder import Recorder, to_model_messages
from coder.sessions.store import Store
from coder.events import RunEnd, RunStart
from coder.types import Usage
store, told = Store(sys.argv[1]), []
recorder = Recorder(store, store.create("/ws"), [], tell=told.append)

def turn(number):
    recorder(RunStart())
    for text in (f"question {number}", "x" * 30_000):
        recorder.messages.append({"role": "user", "content": text})
        recorder.sync() if not recorder.problem else None
    recorder(RunEnd("stop", "", Usage(1, 1), 1))

turn(1)
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, unlimited[1]))
for number in range(2, 12):
    turn(number)
in_between = recorder.problem, len(to_model_messages(store, recorder.session_id)), len(recorder.messages)
resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
turn(12)
print(json.dumps([told, in_between, recorder.problem, to_model_messages(store, recorder.session_id) == recorder.messages]))
"""


def test_a_full_disk_is_told_once_and_the_conversation_goes_on(tmp_path: Path) -> None:
    """SES-12: the limit for the size of files makes real writes fail."""
    child = python(FULL, str(tmp_path / "sessions.db"), stderr=subprocess.PIPE)
    out, err = child.communicate(timeout=PATIENCE)
    assert err == ""
    told, (problem, saved, in_memory), after, equal = json.loads(out)
    assert told == [problem, "The conversation is saved again."]
    assert re.fullmatch(
        r"The file of the sessions .*: the disk is full, or fails\. The conversation goes on, but is not saved\.",
        problem,
    )
    assert 2 <= saved < in_memory == 22 and (after, equal) == ("", True)


def test_what_cannot_be_written_as_json_is_told_and_does_not_end_the_run(store: Store) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    told: list[str] = []
    with Recorder(store, store.create("/ws"), [said("hi")], tell=told.append) as recorder:
        recorder.messages.append({"role": "user", "content": "x", "meta": {"deep": deep}})
        recorder.sync()
        recorder.sync()
        assert (
            len(told) == 1
            and told[0].endswith("goes on, but is not saved.")
            and recorder.problem == told[0]
        )
        recorder.messages[1] = said("shallow", "assistant") | {"meta": {"path": Path("/x")}}
        recorder.sync()
        assert told[1:] == ["The conversation is saved again."] and not recorder.problem
    assert to_model_messages(store, recorder.session_id)[1]["meta"] == {"path": "/x"}
    del recorder, deep


# ---- finding ---------------------------------------------------------------------------------------------


@pytest.mark.case("SES-10")
@pytest.mark.parametrize(
    "given",
    ["../x", "/etc/passwd", "", "   ", "a" * 5000, "x'; DROP TABLE session; --", "ID\0", "%", "é"],
)
def test_an_id_that_is_none_is_refused_before_anything_is_opened(store: Store, given: str) -> None:
    """SES-10."""
    kept(store, said("hi"))
    before = sorted(store.path.parent.rglob("*"))
    with pytest.raises(StoreError, match="There is no session") as raised:
        store.find(given)
    assert (
        len(str(raised.value)) < 120
        and sorted(store.path.parent.rglob("*")) == before
        and store.sessions()
    )


def test_ids_are_short_words_that_sort_by_time(store: Store) -> None:
    ids = []
    for _ in range(20):
        ids.append(store.create("/ws"))
        time.sleep(0.002)  # ids of one millisecond have no order
    assert ids == sorted(ids) and all(re.fullmatch("[0-9a-z]{12}", each) for each in ids)


def test_the_beginning_of_an_id_will_do_where_it_is_one_session(store: Store) -> None:
    one, two = kept(store, said("one")), kept(store, said("two"))
    assert store.find(one).id == one and store.find(f" {two.upper()} ").id == two
    length = next(place for place, pair in enumerate(zip(one, two)) if pair[0] != pair[1])
    assert store.find(one[: length + 1]).id == one
    with pytest.raises(
        StoreError, match=f"Several sessions begin with .*{one}.*{two}" if one < two else "Several"
    ):
        store.find(one[:length])
    with pytest.raises(StoreError, match="There is no session 'zzz'"):
        store.find("zzz")


def test_sessions_are_listed_by_folder_the_newest_first_and_empty_ones_are_not(
    store: Store,
) -> None:
    """SES-14: each tells its folder."""
    old, other, new = (
        kept(store, said("old\nwords")),
        kept(store, said("other"), directory="/else"),
        kept(store, said("new")),
    )
    store.create("/ws")
    child = store.create("/ws", parent=new, agent="explore")
    with Recorder(store, child, [said("look")]) as recorder:
        recorder.sync()
    time.sleep(0.002)
    store.touch(old)
    assert [info.id for info in store.sessions("/ws")] == [old, new] and {
        info.id for info in store.sessions()
    } == {old, new, other}
    latest = store.latest("/ws")
    assert latest and (latest.id, latest.first, latest.messages, latest.directory) == (
        old,
        "old words",
        1,
        "/ws",
    )
    assert store.latest("/nowhere") is None and store.get(child).parent == new


def test_a_session_in_which_nothing_was_said_is_gone_when_it_is_closed(store: Store) -> None:
    with Recorder(store, store.create("/ws")) as empty:
        empty.sync()
    with pytest.raises(StoreError):
        store.get(empty.session_id)


def test_a_title_can_be_set_and_is_one_line(store: Store) -> None:
    session_id = kept(store, said("hi"))
    store.rename(session_id, " Repair\nthe  \ud83d parser ")
    store.set_model(session_id, "gpt-5", "plan")
    info = store.get(session_id)
    assert (info.title, info.model, info.agent) == ("Repair the \ufffd parser", "gpt-5", "plan")


def test_a_fork_is_a_copy_that_knows_its_origin_and_goes_its_own_way(store: Store) -> None:
    session_id = kept(store, said("go"), calling("a"), result("a", "out"), said("ok", "assistant"))
    store.set_todos(session_id, [Todo("one", "done"), Todo("two", "pending")])
    set_parts(store, session_id, "snapshot", [{"tree": "abc"}])
    forked = store.fork(session_id)
    assert to_model_messages(store, forked) == to_model_messages(store, session_id) and store.todos(
        forked
    ) == store.todos(session_id)
    assert states(store, forked) == ["completed"] and parts(store, forked, "snapshot") == [
        {"tree": "abc"}
    ]
    assert (store.get(forked).parent, store.get(forked).forked, store.get(forked).usage) == (
        session_id,
        True,
        Usage(),
    )
    assert {info.id for info in store.sessions()} == {session_id, forked}
    store.remove(session_id)
    assert len(to_model_messages(store, forked)) == 4 and store.get(forked).parent is None
    with pytest.raises(StoreError, match="There is no session"):
        store.fork("nosuch")


def test_removing_takes_everything_of_a_session_and_of_its_sub_agents(store: Store) -> None:
    session_id = kept(store, said("needle in it"))
    child = store.create("/ws", parent=session_id)
    grandchild = store.create("/ws", parent=child)
    store.set_todos(child, [Todo("one", "done")])
    other = kept(store, said("another needle"))
    with (
        contextlib.closing(Recorder(store, child, [said("look")])) as busy,
        pytest.raises(StoreError, match="is open"),
    ):
        busy.sync()
        store.remove(session_id)
    Recorder(store, session_id).close()
    store.remove(session_id)
    assert [row["id"] for row in store.rows("SELECT id FROM session")] == [
        other
    ] and grandchild != other
    for name in ("message", "part"):
        assert {row["session"] for row in store.rows(f"SELECT session FROM {name}")} == {other}
    assert store.rows("SELECT * FROM todo") == [] and [
        found.session.id for found in store.search("needle")
    ] == [other]


def test_parts_that_belong_to_no_message_are_kept_for_whoever_set_them(store: Store) -> None:
    """A17: the snapshots of a session."""
    session_id = kept(store, said("hi"))
    set_parts(store, session_id, "snapshot", [{"before": "a"}, {"before": "b"}])
    set_parts(store, session_id, "snapshot", [{"before": "a", "after": "c"}])
    assert parts(store, session_id, "snapshot") == [{"before": "a", "after": "c"}]
    set_parts(store, session_id, "text", [])
    assert store.search("hi"), "the parts of messages are not theirs"


def test_permissions_are_not_kept(store: Store) -> None:
    """SES-13."""
    words = " ".join(row["sql"] or "" for row in store.rows("SELECT sql FROM sqlite_schema"))
    assert "message" in words and "permission" not in words and "allow" not in words


# ---- searching -------------------------------------------------------------------------------------------

QUERIES = [
    ("needle", ["one"]),
    ("NEEDLE haystack", ["one"]),
    ("needle parser", []),
    ("parser", ["two"]),
    ("eedl", ["one"]),
    ("世界", ["three"]),
    ("你好世界", ["three"]),
    ("50%", ["three"]),
    ("5_%", []),
    ('"quoted"', ["two"]),
    ("NOT", []),
    ("a*", []),
    ("", []),
    ("  ", []),
    ("o", ["three", "two"]),
    ("tool output", []),
]


def searchable(store: Store) -> dict[str, str]:
    """Three sessions, by id."""
    one = kept(
        store, said("Find the Needle in the haystack"), calling("a"), result("a", "tool output")
    )
    two = kept(store, said('say "quoted"'), said("ok", "assistant"))
    store.rename(two, "Repair the parser")
    three = kept(store, said("你好世界, 50% of it"), said("oh", "assistant"))
    for each in (one, two, three):
        store.touch(each)
        time.sleep(0.002)
    return {one: "one", two: "two", three: "three"}


@pytest.mark.parametrize("indexed", [True, False])
def test_words_are_found_in_titles_and_texts_the_newest_first(store: Store, indexed: bool) -> None:
    """With the index, and as a library without it does."""
    names = searchable(store)
    if not indexed:
        with store.transaction() as db:
            for statement in (
                "DROP TRIGGER search_insert",
                "DROP TRIGGER search_delete",
                "DROP TABLE search",
            ):
                db.execute(statement)
    assert {
        query: [names[found.session.id] for found in store.search(query)] for query, _ in QUERIES
    } == dict(QUERIES)
    assert store.search("needle")[0].snippet == "Find the Needle in the haystack"
    if not indexed:
        with contextlib.closing(
            Store(store.path)
        ) as again:  # the index is made again, of what is there
            assert [names[found.session.id] for found in again.search("needle")] == ["one"]
            assert (
                again.rows("SELECT count(*) AS n FROM search WHERE search MATCH 'needle'")[0]["n"]
                == 1
            )


def test_a_snippet_shows_the_words_and_what_stands_around_them(store: Store) -> None:
    kept(store, said("a " * 200 + "\nthe\nneedle here " + "b " * 200))
    snippet = store.search("needle")[0].snippet
    assert re.fullmatch(r"…(a )+the needle here (b )+b?…", snippet) and len(snippet) < 100


def test_what_was_removed_or_replaced_is_not_found_any_more(store: Store) -> None:
    session_id = kept(store, said("first words"))
    with Recorder(store, session_id) as recorder:
        recorder.messages[0] = said("other phrases")
        recorder.sync()
    assert not store.search("first") and store.search("phrases")
    assert store.rows("SELECT count(*) AS n FROM search WHERE search MATCH 'first'")[0]["n"] == 0


# ---- how fast --------------------------------------------------------------------------------------------


def test_a_long_session_is_opened_quickly_and_a_step_late_in_it_costs_as_much_as_the_first(
    store: Store,
) -> None:
    messages: list[Message] = []
    for number in range(500):
        messages += [
            said("x" * 500),
            calling(f"c{number}"),
            result(f"c{number}", "y" * 15_000),
            said("z" * 1000, "assistant"),
        ]
    session_id = kept(store, *messages)
    with promptly(1.0), Recorder(store, session_id) as recorder:
        assert recorder.messages == messages and len(messages) == 2000
    with promptly(2.0), Recorder(store, session_id) as recorder:
        for number in range(100):
            recorder.messages.append(said(str(number)))
            recorder.sync()
    assert dumps(to_model_messages(store, session_id)[-1]) == dumps(said("99"))


# ---- an agent's conversation -----------------------------------------------------------------------------


def test_what_an_agent_says_and_does_is_in_its_session(tmp_path: Path) -> None:
    """Also what is done to the list between two runs, and a run that a consumer leaves."""
    with serve(TWO, Reply("3 and 7."), Reply("Once more."), Reply("one two three four")) as server:
        model = ChatModel("m", base_url=server.url)
        with SessionStore(tmp_path / "sessions.db") as store:
            agent = Agent(model, tools=[add], session=store.open(directory="/ws"))
            agent.run("Add.")
            assert len(agent.messages) == 5
            agent.append_message(said("By the way."))
            agent.run("Again.")
            run = agent.stream("Count.")
            for event in run:
                if isinstance(event, TextDelta):
                    break
            run.close()
            before, session_id = agent.messages, agent.session_id
        with SessionStore(tmp_path / "sessions.db") as store:
            assert store.sessions("/ws")[0].id == session_id
            again = Agent(model, session=store.open(session_id))
            assert again.messages == before and [m["content"] for m in again.messages[-2:]] == [
                "Count.",
                "one",
            ]
            again.reset()
            assert to_model_messages(store, session_id) == []


def test_a_run_of_the_loop_is_kept_where_it_is_watched_and_one_on_another_list_says_so(
    tmp_path: Path,
) -> None:
    with serve(TWO, Reply("3 and 7.")) as server, SessionStore(tmp_path / "sessions.db") as store:
        session = store.open()
        _, result = drive(
            session.watch(
                run_loop(
                    session.messages, ChatModel("m", base_url=server.url), [add], prompts="Add."
                )
            )
        )
        assert (
            to_model_messages(store, session.session_id) == result.messages
            and len(result.messages) == 5
        )
        with pytest.raises(ValueError, match="another list"):
            drive(
                session.watch(
                    run_loop([], ChatModel("m", base_url=server.url), [add], prompts="Add.")
                )
            )
        with pytest.raises(ValueError, match="messages of its own"):
            Agent("m", base_url=server.url, session=session, messages=[said("hi")])


def test_a_session_keeps_what_the_list_holds_when_it_is_closed(tmp_path: Path) -> None:
    """Messages added to the list itself, before a run and behind the last, and one changed in place."""
    with serve(Reply("one"), Reply("two")) as server:
        with SessionStore(tmp_path / "sessions.db") as store:
            model = ChatModel("m", base_url=server.url)
            sessions = [store.open() for _ in range(2)]
            for session in sessions:
                agent = Agent(model, session=session)
                if session is sessions[1]:
                    agent.run("go")
                    agent.messages[0]["content"] = "changed"
                agent.messages.append(said("added"))
        with SessionStore(tmp_path / "sessions.db") as store:
            held = [
                [m["content"] for m in store.open(each.session_id).messages] for each in sessions
            ]
    assert held == [["added"], ["changed", "one", "added"]]


def test_a_store_that_is_closed_leaves_its_sessions_to_others(tmp_path: Path) -> None:
    first = SessionStore(tmp_path / "sessions.db")
    session = first.open()
    session.messages.append(said("hi"))
    with SessionStore(first.path) as second, pytest.raises(StoreError, match="in this process"):
        session.sync()
        second.open(session.session_id)
    first.close()
    with SessionStore(first.path) as second:
        again = second.open(session.session_id)
        session.close()  # closed already: it takes nothing from the one that has the session now
        again.messages.append(said("you"))
    with contextlib.closing(Store(first.path)) as store:
        assert table(store, session.session_id) == [(1, "hi"), (1, "you")]


def test_a_session_belongs_to_one_agent_and_agents_may_share_a_set_of_tools(
    tmp_path: Path,
) -> None:
    with (
        serve(Reply("one"), Reply("two")) as server,
        SessionStore(tmp_path / "sessions.db") as store,
    ):
        model = ChatModel("m", base_url=server.url, profile={"cache_key": True})
        tools = Toolset([add])
        one, two = store.open(), store.open()
        with pytest.raises(TypeError, match="an agent has no on_txt"):
            Agent(model, session=one, on_txt=print)
        agents = [Agent(model, session=session, tools=tools) for session in (one, two)]
        with pytest.raises(ValueError, match="another agent"):
            Agent(model, session=one)
        assert [agent.session_id for agent in agents] == [one.session_id, two.session_id]
        for agent in agents:
            agent.set_tools(tools)
            agent.run("go")
        keys = [request["prompt_cache_key"] for request in server.requests]
        assert keys == [one.session_id, two.session_id]
        assert [table(store, each.session_id)[1][1] for each in (one, two)] == ["one", "two"]


def test_a_run_behind_the_close_of_its_store_says_so_in_one_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serve(Reply("one")) as server:
        with SessionStore(tmp_path / "sessions.db") as store:
            agent = Agent(ChatModel("m", base_url=server.url), session=store.open())
        agent.run("go")
    (line,) = caplog.messages
    assert line.count(". ") == 1 and ".." not in line.removeprefix(str(tmp_path)), line


AGENT = """
import sys, time
from coder import Agent, ChatModel, SessionStore

url, path, effects = sys.argv[1:]

def mark(number: int) -> str:
    '''Leave a mark.

    number: which
    '''
    with open(effects, "a") as file:
        file.write(f"{number}\\n")
    time.sleep(0.05)
    return f"marked {number}"

with SessionStore(path) as store:
    session = store.open()
    print(session.session_id, flush=True)
    Agent(ChatModel("m", base_url=url), tools=[mark], session=session).run("Mark ten.")
"""


def test_an_agent_that_is_killed_leaves_a_session_that_loads_and_goes_on(tmp_path: Path) -> None:
    def script(body: Body) -> Reply:
        results = sum(message["role"] == "tool" for message in body["messages"])
        last = body["messages"][-1]
        return (
            Reply("I see.")
            if last["content"] == "Go on."
            else ten(0)
            if not results
            else ten(5)
            if results == 5
            else Reply("Done.")
        )

    with ScriptedServer(script) as server, SessionStore(tmp_path / "sessions.db") as store:
        for wanted in (1, 3, 5, 6, 9):
            effects = tmp_path / f"effects{wanted}"
            effects.touch()
            worker = python(AGENT, server.url, str(store.path), str(effects))
            assert worker.stdout
            session_id = worker.stdout.readline().strip()
            until(lambda: len(effects.read_text().split()) >= wanted, f"{wanted} calls")  # noqa: B023 (called at once)
            worker.kill()
            worker.communicate(timeout=PATIENCE)
            marks = effects.read_text().split()
            session = store.open(session_id)
            checked_marks(session.messages, set(marks))
            agent = Agent(ChatModel("m", base_url=server.url), session=session)
            assert agent.run("Go on.").text == "I see." and effects.read_text().split() == marks
            assert to_model_messages(store, session_id) == agent.messages
        assert_all_valid(server)
