"""Sessions, by the program itself: what a torn, foreign or full file, another folder or another process does to a conversation.

Group SES of the reliability list, restated for SQLite where it speaks of lines in a file; its other cases are in test_sessions.py.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from coder.devtools.scripted import Body, Reply, ScriptedServer
from coder.history import user
from coder.sessions.database import SCHEMA
from coder.sessions.recorder import Recorder
from coder.sessions.store import Store
from tests.harness import serve
from tests.terminal import PATIENCE, OneShot, Place, Terminal


def echo(body: Body) -> Reply:
    return Reply(f"You said: {str(body['messages'][-1]['content'])[:50]!r}")


def said(server: ScriptedServer) -> list[str]:
    """What the person has said, by the newest request."""
    return [
        message["content"]
        for message in server.requests[-1]["messages"]
        if message["role"] == "user"
    ]


def database(folder: Path) -> Path:
    return folder / "home" / ".data" / "coder" / "sessions.db"


def talk(folder: Path, server: ScriptedServer, *arguments: str, code: int = 0) -> str:
    """One run without a terminal; what it wrote to stderr."""
    with OneShot(folder, server, *arguments) as run:
        assert run.end() == code, run.err
        return run.err


def talk_out(folder: Path, server: ScriptedServer, *arguments: str) -> str:
    with OneShot(folder, server, *arguments) as run:
        assert run.end() == 0, run.err
        return run.out


@contextmanager
def changed(folder: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(database(folder))) as db, db:
        yield db


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def kept(folder: Path, *texts: str) -> str:
    """A conversation of an earlier run in the workspace, in which these were said by turns; its id."""
    path = database(folder)
    with closing(Store(path)) as store:
        messages = [
            user(text) if number % 2 == 0 else {"role": "assistant", "content": text}
            for number, text in enumerate(texts)
        ]
        with Recorder(store, session_id := store.create(str(folder / "ws")), messages) as recorder:
            recorder.sync()
    return session_id


# ---- a file that is damaged, foreign or full -------------------------------------------------------------------


@pytest.mark.case("SES-01")
def test_of_a_log_whose_last_record_was_cut_all_before_it_goes_on(tmp_path: Path) -> None:
    """As after a kill: the newest messages stand in the -wal only."""
    session_id, path = kept(tmp_path, "first", "one"), database(tmp_path)
    with closing(Store(path)) as store, Recorder(store, session_id) as recorder:
        for text in ("second", "third " + "word " * 3_000):
            recorder.messages.append(user(text))
            recorder.sync()
        copies = {each: each.read_bytes() for each in (path, path.with_name("sessions.db-wal"))}
    for each, data in copies.items():
        each.write_bytes(data if each == path else data[:-2_000])
    with serve(echo) as server:
        talk(tmp_path, server, "-c", "fourth")
        assert said(server) == ["first", "second", "fourth"]
    with changed(tmp_path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.mark.case("SES-01", "SES-02", "SES-03")
@pytest.mark.parametrize("damage", ["cut", "zeros", "garbage"])
def test_a_damaged_file_is_kept_and_reported_and_the_run_is_saved_in_a_new_one(
    tmp_path: Path, damage: str
) -> None:
    kept(tmp_path, *(f"number {number} " + "word " * 500 for number in range(21)))
    path = database(tmp_path)
    data = path.read_bytes()
    place = data.index(b'"content": "number 10 ') // 4096 * 4096
    hurt = {
        "cut": data[: len(data) * 4 // 5],
        "zeros": data[:place] + b"\0" * 300 + data[place + 300 :],
        "garbage": data[:place] + b"garbage!" * 512 + data[place + 4096 :],
    }
    path.write_bytes(hurt[damage])
    with serve(echo) as server:
        err = talk(tmp_path, server, "-c", "and on", code=2)
        assert "The file of the sessions was damaged; a new one was begun." in err
        assert err.count("\n") == 1 and list(path.parent.glob("sessions.db.damaged-*"))
        assert "damaged" not in talk(tmp_path, server, "anew")
        talk(tmp_path, server, "-c", "and on")
        assert said(server) == ["anew", "and on"]


def test_a_damaged_file_costs_a_new_conversation_nothing_and_is_reported(tmp_path: Path) -> None:
    kept(tmp_path, *(f"number {number} " + "word " * 500 for number in range(21)))
    with open(database(tmp_path), "r+b") as file:
        file.truncate(os.path.getsize(database(tmp_path)) * 4 // 5)
    with serve(echo) as server:
        assert "was damaged; a new one was begun" in " ".join(talk(tmp_path, server, "x").split())
        assert "x" in talk_out(tmp_path, server, "sessions")


@pytest.mark.case("SES-15")
def test_what_a_newer_version_has_added_is_ignored_and_stays(tmp_path: Path) -> None:
    kept(tmp_path, "first", "one")
    with changed(tmp_path) as db:
        db.execute("ALTER TABLE message ADD COLUMN mood TEXT DEFAULT 'fine'")
        db.execute(
            "INSERT INTO part (session, type, data) SELECT id, 'hologram', 'no JSON' FROM session"
        )
        db.execute(
            "INSERT INTO part (session, message, type, data) SELECT session, id, 'scent', 'no JSON' FROM message LIMIT 1"
        )
        db.execute(
            "INSERT INTO message (session, position, role, data) SELECT id, 2, 'oracle', ? FROM session",
            ('{"role": "oracle", "content": {"vision": [1, 2]}}',),
        )
    with serve(echo) as server:
        talk(tmp_path, server, "-c", "second")
        assert [message["role"] for message in server.requests[-1]["messages"]] == [
            "system",
            "user",
            "assistant",
            "user",
        ]
    with changed(tmp_path) as db:
        assert db.execute(
            "SELECT type, data FROM part WHERE type IN ('hologram', 'scent') ORDER BY type"
        ).fetchall() == [("hologram", "no JSON"), ("scent", "no JSON")]
        assert db.execute(
            "SELECT count(*), min(mood) FROM message WHERE role = 'oracle' AND active"
        ).fetchone() == (1, "fine")


@pytest.mark.case("SES-15")
def test_a_file_of_a_newer_version_is_left_alone_and_the_run_goes_on_in_memory(
    tmp_path: Path,
) -> None:
    kept(tmp_path, "first", "one")
    with changed(tmp_path) as db:
        db.execute(f"PRAGMA user_version = {len(SCHEMA) + 1}")
    before = database(tmp_path).read_bytes()
    with serve(echo) as server:
        assert (
            "made by a newer version" in (err := " ".join(talk(tmp_path, server, "second").split()))
            and "not saved" in err
        )
        assert said(server) == ["second"] and database(tmp_path).read_bytes() == before


def within(
    folder: Path, server: ScriptedServer, command: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """The program, begun by a shell behind a command of its own."""
    place = Place(folder, server)
    done = subprocess.run(
        ["bash", "-c", f'{command}; exec "$@"', "bash", sys.executable, "-m", "coder", *arguments],
        cwd=place.ws,
        env=place.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    place.check(done.stdout + done.stderr)
    return done


@pytest.mark.case("SES-12")
def test_a_full_disk_is_said_the_answer_comes_and_the_exit_code_is_not_zero(tmp_path: Path) -> None:
    kept(tmp_path, "first", "one")
    with serve(echo) as server:
        done = within(tmp_path, server, "ulimit -f 200", "-c", "second " + "word " * 20_000)
        assert done.returncode == 1 and "You said: 'second" in done.stdout, done.stderr
        err = " ".join(done.stderr.split())
        assert "the disk is full" in err and "is not saved" in err
        talk(tmp_path, server, "-c", "third")
        assert said(server)[0] == "first" and said(server)[-1] == "third"


@pytest.mark.case("SES-09")
@pytest.mark.parametrize("mask", [0o000, 0o022])
def test_what_we_keep_is_the_owners_alone_and_the_projects_files_follow_the_umask(
    tmp_path: Path, mask: int
) -> None:
    kept(tmp_path, "first", "one")
    database(tmp_path).chmod(0o644)
    before = os.umask(mask)
    try:
        with serve(
            Reply(calls=[("write", {"path": "new", "content": "x"})]), Reply("done")
        ) as server:
            talk(tmp_path, server, "-y", "go")
    finally:
        os.umask(before)
    data = database(tmp_path).parent
    assert (
        {mode(path) & 0o077 for path in [data, *data.iterdir()]} == {0}
        and mode(data) == 0o700
        and mode(database(tmp_path)) == 0o600
    )
    assert mode(tmp_path / "ws" / "new") == 0o666 & ~mask


# ---- which one, where, and what goes with it -------------------------------------------------------------------


@pytest.mark.case("SES-10")
@pytest.mark.parametrize("given", ["../x", "/etc/passwd", "", "a" * 5_000])
def test_what_is_no_id_is_refused_in_one_short_line(tmp_path: Path, given: str) -> None:
    with serve(echo) as server:
        err = talk(tmp_path, server, "-r", given, "x", code=2)
        assert err.startswith("coder: There is no session" if given else "coder: -r needs the ID")
        assert err.count("\n") == 1 and len(err) < 200 and not server.requests


@pytest.mark.case("SES-13")
def test_what_was_allowed_for_a_session_is_asked_again_when_it_goes_on(tmp_path: Path) -> None:
    def script(body: Body) -> Reply:
        return (
            Reply("done")
            if body["messages"][-1]["role"] == "tool"
            else Reply(calls=[("bash", {"command": "date >> log"})])
        )

    with serve(script) as server:
        with Terminal(tmp_path, server) as session:
            session.enter("go")
            session.expect("[y]es")
            session.enter("a")
            session.prompt()
            assert "[y]es" not in session.say("go again")
            log = session.ws / "log"
            assert len(log.read_text().splitlines()) == 2
            session.say("/new")
            session.enter("and again")  # another conversation
            session.expect("[y]es")
            session.settled()
            session.say("y")
            assert len(log.read_text().splitlines()) == 3
        with Terminal(tmp_path, server, "-c") as session:
            session.enter("go on")
            session.expect("[y]es")
            session.enter("n")
            session.prompt()
            assert len(log.read_text().splitlines()) == 3


@pytest.mark.case("SES-14")
def test_in_another_folder_that_is_said_and_only_what_lies_there_may_be_touched(
    tmp_path: Path,
) -> None:
    def script(body: Body) -> Reply:
        if body["messages"][-1]["role"] == "tool":
            return Reply("done")
        return Reply(
            calls=[
                ("write", {"path": path, "content": "x"})
                for path in (f"{tmp_path}/ws/PWN", "../PWN", "here")
            ]
        )

    for name in ("ws/other", "ws/.coder"):
        (tmp_path / name).mkdir(parents=True)
    session_id = kept(tmp_path, "first", "one")
    with serve(script) as server:
        err = " ".join(
            talk(tmp_path, server, "-C", "other", "-r", session_id, "-y", "write").split()
        )
        assert (
            f"This conversation began in {tmp_path}/ws; now files and permissions are those of {tmp_path}/ws/other."
            in err
        )
        answers = [
            message["content"]
            for message in server.requests[-1]["messages"]
            if message["role"] == "tool"
        ]
        assert ["outside the workspace" in answer for answer in answers] == [True, True, False]
    assert sorted(path.name for path in (tmp_path / "ws").rglob("*") if path.is_file()) == ["here"]


@pytest.mark.case("SES-16")
def test_with_a_home_that_cannot_be_written_it_works_in_memory_with_a_warning(
    tmp_path: Path,
) -> None:
    """A mount that is read-only, for which even root's writes fail."""
    home = tmp_path / "home"
    home.mkdir()
    hidden = f"unshare --user --map-root-user --mount bash -c 'mount --bind {home} {home} && mount -o remount,ro,bind {home}"
    if subprocess.run(
        ["bash", "-c", f"{hidden}'"], capture_output=True, timeout=PATIENCE
    ).returncode:
        pytest.skip("no mount namespace can be made here")
    with serve(Reply(calls=[("write", {"path": "new", "content": "x"})]), Reply("done")) as server:
        done = within(tmp_path, server, f'set -- {hidden} && exec "$@"\' bash "$@"', "-y", "go")
        assert (done.returncode, done.stdout) == (0, "done\n") and "not saved" in " ".join(
            done.stderr.split()
        ), done.stderr
    assert (tmp_path / "ws" / "new").exists() and not list(home.iterdir())
