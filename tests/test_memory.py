"""What outlives a session at the terminal: going on with conversations, undo, compaction, titles, export; in a real terminal."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sqlite3
from pathlib import Path

import pytest

from coder.devtools.scripted import Body, Reply
from coder.history import user
from coder.sessions.recorder import Recorder
from coder.sessions.store import Store
from tests.harness import serve
from tests.terminal import OneShot, Terminal, promptly, until

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b\][^\x07]*\x07")
ID = re.compile(r"coder -r ([0-9a-z]+)")


def echo(body: Body) -> Reply:
    return Reply(f"You said: {body['messages'][-1]['content']!r}")


def said(body: Body) -> list[str]:
    return [message["content"] for message in body["messages"] if message["role"] == "user"]


def bare(text: str) -> str:
    return ESCAPES.sub("", text)


def left(session: Terminal) -> str:
    """Leave; the id that the last line names."""
    assert session.leave() == 0
    found = ID.search(session.output)
    assert found, session.output
    return found[1]


def test_c_goes_on_with_the_newest_of_the_folder_and_shows_its_end(tmp_path: Path) -> None:
    with serve(echo) as server:
        for words in ("the first", "the second"):
            with Terminal(tmp_path, server) as session:
                session.say(words)
                left(session)
        with Terminal(tmp_path, server, "-c") as session:
            assert (
                "> the second" in bare(session.output)
                and "You said: 'the second'" in session.output
            )
            session.say("and now?")
            assert said(server.requests[-1]) == ["the second", "and now?"]
        assert (
            server.requests[-1]["messages"][0] == server.requests[1]["messages"][0]
        )  # the same beginning, byte for byte


def test_r_goes_on_with_a_named_one_and_the_picker_chooses(tmp_path: Path) -> None:
    with serve(echo) as server:
        ids = []
        for words in ("about apples", "about pears"):
            with Terminal(tmp_path, server) as session:
                session.say(words)
                ids.append(left(session))
        with Terminal(tmp_path, server, "-r", ids[0]) as session:
            session.say("more")
            assert said(server.requests[-1]) == ["about apples", "more"]
        with Terminal(tmp_path, server) as session:
            session.enter("/resume")
            listed = bare(session.expect("number or id: "))
            assert listed.index("about apples") < listed.index("about pears")  # the newest first
            session.enter("2")
            session.expect("You said: 'about pears'")
            session.prompt()
            session.say("riper")
            assert said(server.requests[-1]) == ["about pears", "riper"]
            assert "There is no session" in session.say("/resume zzzz")
            session.say("/new")
            session.say("something else")
            assert said(server.requests[-1]) == ["something else"]


def test_one_task_is_kept_too_and_can_be_gone_on_with(tmp_path: Path) -> None:
    with serve(echo) as server:
        for arguments, wanted in (
            (["one"], ["one"]),
            (["-c", "two"], ["one", "two"]),
            (["--no-session", "three"], ["three"]),
            (["-c", "four"], ["one", "two", "four"]),
        ):
            with OneShot(tmp_path, server, *arguments) as run:
                assert run.end() == 0
                assert said(server.requests[-1]) == wanted


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-c", "x"], "no conversation of this folder"),
        (["-r", "zz9", "--print", "x"], "no session"),
        (["x", "-r"], "-r needs the ID"),
        (["-r", "../../etc/passwd", "x"], "no session"),
    ],
)
def test_what_cannot_be_gone_on_with_is_one_line_and_two(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    with serve(echo) as server, OneShot(tmp_path, server, *arguments) as run:
        assert (
            run.end() == 2 and said in run.err and run.err.count("\n") == 1 and not server.requests
        )


@pytest.mark.case("SES-07")
def test_a_second_process_on_the_same_conversation_is_refused_and_may_fork(tmp_path: Path) -> None:
    with (
        serve(echo) as server,
        Terminal(tmp_path, server, TMPDIR=str(tmp_path / "home")) as session,
    ):  # each checks its own
        session.say("mine")
        with OneShot(tmp_path, server, "-c", "also mine") as other:
            assert other.end() == 2 and "open in another process" in other.err
        session_id = re.findall("[0-9a-z]{12}", sessions(tmp_path, server, "list"))[0]
        fork = sessions(tmp_path, server, "fork", session_id).strip()
        with OneShot(tmp_path, server, "-r", fork, "on") as other:
            assert other.end() == 0 and said(server.requests[-1]) == ["mine", "on"]
        session.say("still mine")
        assert said(server.requests[-1]) == ["mine", "still mine"]


def sessions(folder: Path, server: object, *arguments: str) -> str:
    with OneShot(folder, server, "sessions", *arguments) as run:  # type: ignore[arg-type]
        run.end()
        return run.out + run.err


def test_they_are_listed_searched_shown_exported_and_removed(tmp_path: Path) -> None:
    with serve(
        Reply("The needle is in the haystack.", [("ls", {})]),
        Reply("Found: sk-abcdefghijklmnopqrstuvwx."),
    ) as server:
        with OneShot(tmp_path, server, "where is it?") as run:
            assert run.end() == 0
        session_id = sessions(tmp_path, server, "list").split()[0]
        assert "where is it?" in sessions(tmp_path, server)
        assert (
            "needle is in" in sessions(tmp_path, server, "search", "needle")
            and sessions(tmp_path, server, "search", "nowhere") == ""
        )
        assert "● ls" in sessions(tmp_path, server, "show", session_id[:10])
        with OneShot(tmp_path, server, "export", session_id) as run:
            assert run.end() == 0 and "The needle" in run.out and "sk-abc" not in run.out
        for ending in ("html", "json"):
            with OneShot(tmp_path, server, "export", session_id, "-o", f"out.{ending}") as run:
                assert run.end() == 0 and (run.ws / f"out.{ending}").stat().st_mode & 0o777 == 0o600
        with OneShot(tmp_path, server, "export", session_id, "-o", "out.html") as run:
            assert run.end() == 2 and "exists" in run.err
        assert "removed" in sessions(tmp_path, server, "rm", session_id)
        assert "no conversation" in sessions(tmp_path, server, "list") and "no session" in sessions(
            tmp_path, server, "show", session_id
        )


def test_undo_takes_back_files_and_words_and_redo_brings_them_again(tmp_path: Path) -> None:
    change = Reply(
        "I change it.",
        [("bash", {"command": "sed -i s/one/two/ a; rm b; mkdir d; echo new > d/c"})],
    )
    with (
        serve(change, Reply("Changed."), echo(dict(messages=[{"content": "x"}]))) as server,
        Terminal(tmp_path, server, "-y") as session,
    ):
        (session.ws / "a").write_text("one\n")
        (session.ws / "b").write_text("bee\n")
        session.say("change it")
        (session.ws / "mine").write_text("the user's\n")
        shown = bare(session.say("/diff"))
        assert "-one" in shown and "+two" in shown and "+new" in shown and "the user's" not in shown
        assert "Taken back: a, b, d/c." in bare(session.say("/undo"))
        assert (
            sorted(path.name for path in session.ws.iterdir()) == ["a", "b", "mine"]
            and (session.ws / "a").read_text() == "one\n"
        )
        session.ctrl_c()  # the words of the run stand at the prompt, to be changed
        session.prompt()
        assert (
            "Done again" in bare(session.say("/redo"))
            and (session.ws / "d" / "c").read_text() == "new\n"
        )
        session.say("/undo")
        session.type("\x15")
        session.say("something else")
        assert said(server.requests[-1]) == ["something else"]
        (session.ws / "a").write_text("the user's own\n")
        assert "nothing to redo" in session.say("/redo")


def test_what_was_undone_is_not_there_when_the_conversation_goes_on(tmp_path: Path) -> None:
    with serve(echo) as server:
        with Terminal(tmp_path, server) as session:
            session.say("stays")
            session.say("goes")
            session.say("/undo")
            session.ctrl_c()
            session.prompt()
        with Terminal(tmp_path, server, "-c") as session:
            session.say("on")
            assert said(server.requests[-1]) == ["stays", "on"]


def test_a_conversation_is_summarised_on_demand_and_goes_on_from_there(tmp_path: Path) -> None:
    def script(body: Body) -> Reply:
        if "<conversation>" in str(body["messages"][-1]["content"]):
            return Reply(
                "## Goal\nCount the sheep.\n## Instructions\nnone\n## Discoveries\nnone\n## Accomplished\nnone\n## Files\nnone"
            )
        return Reply("word " * 400)

    with serve(script) as server:
        with Terminal(tmp_path, server) as session:
            for number in range(4):
                session.say(f"question {number} " + "x" * 1_000)
            assert "The conversation was shortened from" in bare(session.say("/compact the sheep"))
            assert "the sheep" in server.requests[-1]["messages"][-1]["content"]
            session.say("and then?")
            assert "Count the sheep." in str(server.requests[-1]["messages"][1])
            messages = len(server.requests[-1]["messages"])
        with Terminal(tmp_path, server, "-c") as session:
            session.say("on")
            assert len(
                server.requests[-1]["messages"]
            ) == messages + 2 and "Count the sheep." in str(server.requests[-1]["messages"][1])


def test_a_title_is_found_beside_the_first_run(tmp_path: Path) -> None:
    def script(body: Body) -> Reply:
        if "conversations their titles" in str(body["messages"][0]["content"]):
            return Reply("Counting all the sheep")
        return Reply("One, two.", hold=0.5)

    with serve(script) as server:
        with Terminal(tmp_path, server, CODER_TITLES="on") as session:
            session.say("count")
            until(lambda: len(server.requests) == 2, "both requests")
            session.say("again")
            assert (
                "\x1b]0;coder: Counting all the sheep\x07" in session.output
                and "\x1b]0;coder at work: ws\x07" in session.output
            )
        assert "Counting all the sheep" in sessions(tmp_path, server)
        with OneShot(tmp_path, server, "count", CODER_TITLES="on") as run:
            assert run.end() == 0 and len(server.requests) == 4  # none for one task


def test_the_instruction_files_are_named_at_the_start_and_sent(tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws" / "AGENTS.md").write_text("Always say please.")
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        assert "Instructions: AGENTS.md" in session.output
        session.say("hello")
        assert "Always say please." in server.requests[0]["messages"][0]["content"]


def test_the_checklist_is_shown_and_kept(tmp_path: Path) -> None:
    items = [
        {"text": "look", "status": "done"},
        {"text": "change \x1b[31mit", "status": "in_progress"},
    ]
    with (
        serve(Reply(calls=[("todo", {"items": items})]), Reply("done")) as server,
        Terminal(tmp_path, server) as session,
    ):
        shown = session.say("go")
        assert "☑ look" in shown and "▸ change it" in shown
        with sqlite3.connect(session.home / ".data" / "coder" / "sessions.db") as db:
            assert db.execute("SELECT text, status FROM todo ORDER BY position").fetchall() == [
                ("look", "done"),
                ("change \x1b[31mit", "in_progress"),
            ]


@pytest.mark.case("SES-16")
def test_a_read_only_home_is_said_and_the_answer_comes_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".data").write_text("a file where the folder should be")
    with serve(echo) as server, OneShot(tmp_path, server, "hello") as run:
        assert run.end() == 0 and "You said: 'hello'" in run.out and "not saved" in run.err


def test_a_key_of_the_users_own_file_is_in_no_export(tmp_path: Path) -> None:
    config = tmp_path / "home" / ".config" / "coder"
    config.mkdir(parents=True)
    with serve(Reply("Your key is mycompany.plain.0815.")) as server:
        (config / ".env").write_text("OPENAI_API_KEY=mycompany.plain.0815\n")
        with OneShot(tmp_path, server, "what is it?") as run:
            assert run.end() == 0
        (run.ws / ".env").write_text("OPENAI_API_KEY=another.plain.4711\n")
        session_id = sessions(tmp_path, server, "list").split()[0]
        with OneShot(tmp_path, server, "export", session_id) as run:
            assert run.end() == 0 and "Your key is" in run.out and "mycompany" not in run.out
        (config / ".env").unlink()
        (run.ws / ".env").unlink()


def test_a_run_that_was_killed_can_be_undone_as_far_as_it_came(tmp_path: Path) -> None:
    steps = [
        Reply(calls=[("bash", {"command": "echo a > a"})]),
        Reply("done"),
        Reply(calls=[("bash", {"command": "echo b > b"})]),
    ]
    with serve(*steps, Reply("never", cut=2, close="hang")) as server:
        with Terminal(tmp_path, server, "-y") as session:
            session.say("first")
            session.enter("second")
            session.until(lambda: len(server.requests) == 4, "the answer behind the tool")
            session.kill(signal.SIGTERM)
            assert session.exit_code() == 143
        with Terminal(tmp_path, server, "-c") as session:
            assert "Taken back: b." in bare(session.say("/undo"))
            assert (session.ws / "a").exists() and not (session.ws / "b").exists()
            session.expect("second")
            session.ctrl_c()
            session.prompt()
            assert "Taken back: a." in bare(session.say("/undo"))
            session.expect("first")
            session.ctrl_c()
            session.prompt()


@pytest.mark.parametrize("command", ["list", "search x", "show x"])
def test_a_file_that_is_no_database_is_one_line(tmp_path: Path, command: str) -> None:
    data = tmp_path / "home" / ".data" / "coder"
    data.mkdir(parents=True)
    (data / "sessions.db").write_text("this is no database at all, but a text of some length " * 20)
    with serve(echo) as server, OneShot(tmp_path, server, "sessions", *command.split()) as run:
        assert run.end() == 2 and run.err.startswith("coder: ") and run.err.count("\n") == 1


def test_a_number_that_is_none_is_no_number(tmp_path: Path) -> None:
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        session.say("one")
        session.say("/new")
        session.enter("/resume")
        session.expect("number or id: ")
        assert "no session" in session.say("\u00b2")


# ---- what is left behind, and what is not ------------------------------------------------------------------


def rows(folder: Path, query: str) -> list[tuple[object, ...]]:
    with sqlite3.connect(folder / "home" / ".data" / "coder" / "sessions.db") as db:
        return db.execute(query).fetchall()


def test_a_conversation_that_is_not_kept_leaves_no_state_of_a_file_and_can_be_undone(
    tmp_path: Path,
) -> None:
    with serve(Reply(calls=[("bash", {"command": "echo new > a"})]), Reply("done")) as server:
        with Terminal(tmp_path, server, "--no-session", "-y") as session:
            (session.ws / "a").write_text("old\n")
            session.say("change it")
            assert (
                "Taken back: a." in bare(session.say("/undo"))
                and (session.ws / "a").read_text() == "old\n"
            )
            assert (
                "Done again: a." in bare(session.say("\x15/redo"))
                and (session.ws / "a").read_text() == "new\n"
            )
        assert not (
            session.home / ".data" / "coder" / "snapshots"
        ).exists()  # and the folder for temporary files is empty


@pytest.mark.parametrize("arguments", [["--no-session"], []])
def test_one_task_takes_states_of_the_files_only_where_it_can_be_gone_on_with(
    tmp_path: Path, arguments: list[str]
) -> None:
    programs, calls = tmp_path / "home" / "bin", tmp_path / "home" / "calls"
    programs.mkdir(parents=True)
    (programs / "git").write_text(
        f'#!/bin/sh\necho "$@" >> {calls}\nexec {shutil.which("git")} "$@"\n'
    )
    (programs / "git").chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    with (
        serve(Reply(calls=[("bash", {"command": "echo new > a"})]), Reply("done")) as server,
        OneShot(tmp_path, server, "-y", *arguments, "change it", PATH=path) as run,
    ):
        assert run.end() == 0
    assert ("status" in (calls.read_text() if calls.exists() else "")) == (not arguments)


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("session.title", b"\xff\xfe"),
        ("session.updated", "soon"),
        ("session.input", b"\xff"),
        ("message.data", DEEP),
        ("message.data", b"\xff"),
        ("message.tokens", DEEP),
        ("message.error", "[1]"),
        ("part.text", b"\xff"),
        ("part.data", DEEP),
        ("part.data", "7"),
    ],
)
def test_a_row_of_somebody_elses_making_is_one_line_at_most(
    tmp_path: Path, column: str, value: object
) -> None:
    with serve(
        Reply("I look.", [("bash", {"command": "echo hi"})], reasoning="hm"), Reply("done")
    ) as server:
        with OneShot(tmp_path, server, "-y", "my question") as run:
            assert run.end() == 0
        table, name = column.split(".")
        with (
            contextlib.closing(sqlite3.connect(run.home / ".data" / "coder" / "sessions.db")) as db,
            db,
        ):
            session_id = db.execute("SELECT id FROM session").fetchone()[0]
            db.execute(f"UPDATE {table} SET {name} = ?", (value,))
        for arguments in (
            ["sessions"],
            ["sessions", "search", "question"],
            ["sessions", "show", session_id],
            ["export", session_id],
            ["export", session_id, "--format", "json"],
            ["sessions", "fork", session_id],
            ["-q", "-c", "go on"],
        ):
            with OneShot(tmp_path, server, *arguments) as run:
                assert run.end() == 0 and run.out and not run.err, run.err
                assert session_id in run.out or arguments[0] != "sessions" or "fork" in arguments


def test_a_link_that_leads_nowhere_is_no_file_of_sessions(tmp_path: Path) -> None:
    with serve(echo) as server:
        for arguments in (["sessions"], ["hi"]):
            (tmp_path / "home" / ".data" / "coder").mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                (tmp_path / "home" / ".data" / "coder" / "sessions.db").symlink_to(
                    tmp_path / "home" / "target"
                )
            with OneShot(tmp_path, server, *arguments) as run:
                assert run.end() == (2 if arguments == ["sessions"] else 0)
                assert (
                    "is a link that leads nowhere" in run.err.replace("\n", " ")
                    and not (tmp_path / "home" / "target").exists()
                )


def test_nothing_to_go_on_with_leaves_nothing(tmp_path: Path) -> None:
    with serve(echo) as server:
        for arguments, why in (
            (["-c", "x"], "no conversation of this folder"),
            (["-r", "zz9", "x"], "no session 'zz9'"),
            (["-c", "--no-session", "x"], "--no-session and -c exclude each other"),
            (["-r", "zz9", "--no-session", "x"], "--no-session and -r exclude each other"),
        ):
            with OneShot(tmp_path, server, *arguments) as run:
                assert run.end() == 2 and why in run.err
    assert rows(tmp_path, "SELECT count(*) FROM session") == [(0,)]
    assert not list((tmp_path / "home" / ".data" / "coder" / "sessions.db.locks").iterdir())


# ---- what belongs to a conversation goes and comes with it -------------------------------------------------


def test_instructions_of_a_sub_folder_come_once_in_each_conversation_and_go_with_what_is_undone(
    tmp_path: Path,
) -> None:
    def script(body: Body) -> Reply:
        return (
            Reply("done")
            if body["messages"][-1]["role"] == "tool"
            else Reply(calls=[("read", {"path": "sub/file"})])
        )

    def come() -> bool:
        return "about sub" in server.requests[-1]["messages"][-1]["content"]

    with serve(script) as server:
        with Terminal(tmp_path, server) as session:
            (session.ws / "sub").mkdir()
            (session.ws / "sub" / "file").write_text("x\n")
            (session.ws / "sub" / "AGENTS.md").write_text("about sub\n")
            shown = []
            for entry in ("one", "two", "/undo", "\x15/undo", "\x15three", "/new", "four"):
                session.say(entry)
                shown += [come()] if "/" not in entry else []
            assert shown == [True, False, True, True]
        with Terminal(tmp_path, server, "-c") as session:
            session.say("five")
            assert not come()


def summarised(body: Body) -> Reply:
    """A model that has a checklist, answers at length and sums up."""
    last = str(body["messages"][-1]["content"])
    if "<conversation>" in last:
        return Reply(
            "## Goal\nCount the sheep.\n## Instructions\nnone\n## Discoveries\nnone\n## Accomplished\nnone\n## Files\nnone"
        )
    if last == "plan":
        return Reply(
            calls=[("todo", {"items": [{"text": "count the black ones", "status": "in_progress"}]})]
        )
    if last == "write":
        return Reply(calls=[("write", {"path": "a", "content": "made\n"})])
    return Reply("word " * 400)


def test_the_checklist_outlives_every_compaction_and_an_undo_behind_one_is_told_to_the_model(
    tmp_path: Path,
) -> None:
    with serve(summarised) as server, Terminal(tmp_path, server, "-y") as session:
        session.say("plan")
        for _ in range(2):
            for number in range(3):
                session.say(f"question {number} " + "x" * 1_000)
            assert "The conversation was shortened from" in bare(session.say("/compact"))
        session.say("and now?")
        assert [text for text in said(server.requests[-1]) if "[>] count the black ones" in text]
        session.say("write")
        session.say("one more " + "x" * 3_000)
        session.say("/compact")
        session.say("/undo")  # of the newest, which is not in the summary
        shown = bare(session.say("\x15/undo"))
        assert (
            "Taken back: a." in shown
            and "its summary still tells of it" in " ".join(shown.split())
            and not (session.ws / "a").exists()
        )
        session.say("\x15/redo")
        session.say("/undo")
        session.say("\x15go on")
        told = [
            text.startswith("I have taken back what you did last (a).")
            for text in said(server.requests[-1])
        ]
        assert told[-2] and sum(told) == 1


def test_what_the_person_ran_stays_when_the_run_before_it_is_taken_back(tmp_path: Path) -> None:
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        session.say("first")
        session.say("!echo mine")
        session.say("/undo")
        session.say("\x15second")
        ran, second = said(server.requests[-1])
        assert ran.startswith("I ran `echo mine` myself") and second == "second"
        session.say("/undo")
        assert "nothing to undo" in session.say("\x15/undo")
        session.say("/redo")
        session.say("third")
        assert said(server.requests[-1]) == [ran, "second", "third"]


def test_what_was_undone_comes_again_in_its_place(tmp_path: Path) -> None:
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        session.say("first")
        session.say("!echo mine")
        session.say("second")
        for entry in ("/undo", "\x15/undo", "\x15/redo", "/redo", "third"):
            session.say(entry)
        assert [text[:5] for text in said(server.requests[-1])] == [
            "first",
            "I ran",
            "secon",
            "third",
        ]


def test_ctrl_c_does_not_leave_an_undo_half_done(tmp_path: Path) -> None:
    many = 1_000
    with (
        serve(Reply(calls=[("bash", {"command": "rm -r many"})]), Reply("done")) as server,
        Terminal(tmp_path, server, "-y") as session,
    ):
        folder = session.ws / "many"
        folder.mkdir()
        for number in range(many):
            (folder / str(number)).write_text(str(number))
        session.say("remove it")
        session.enter("/undo")
        session.until(
            lambda: folder.exists() and len(list(folder.iterdir())) > 5, "the first files"
        )
        assert len(list(folder.iterdir())) < many, "it is not over yet"
        session.child.sendintr()
        assert "many/0" in bare(session.prompt())
        assert sorted(int(path.name) for path in folder.iterdir()) == list(range(many))
        session.type("\x15")


# ---- what fails is said, and does not take long --------------------------------------------------------------


def test_why_there_is_no_summary_is_said(tmp_path: Path) -> None:
    with (
        serve(Reply("hello"), Reply("no such luck", status=400)) as server,
        Terminal(tmp_path, server) as session,
    ):
        session.say("hi")
        assert (
            "There is no summary: " in (shown := bare(session.say("/summary")))
            and "no such luck" in shown
        )


def making(body: Body) -> Reply:
    """A model that makes a file when it is told to."""
    return (
        Reply(calls=[("bash", {"command": "echo 1 > a"})])
        if body["messages"][-1]["content"] == "make it"
        else echo(body)
    )


def test_a_database_that_another_process_holds_costs_one_wait_and_a_conversation_begins_anew_all_the_same(
    tmp_path: Path,
) -> None:
    with serve(making) as server, Terminal(tmp_path, server, "-y") as session:
        session.say("make it")
        with sqlite3.connect(
            session.home / ".data" / "coder" / "sessions.db", isolation_level=None
        ) as other:
            other.execute("BEGIN IMMEDIATE")
            with promptly(
                25
            ):  # five seconds once; for each time that something is written it would be more
                assert "another process keeps it busy" in " ".join(
                    bare(session.say("goes on")).split()
                )
                assert "another process keeps it busy" in " ".join(
                    bare(session.say("/new")).split()
                )
                session.say("anew")
                assert said(server.requests[-1]) == ["anew"]
                session.say("/undo")
                assert (
                    "nothing to undo" in session.say("\x15/undo") and (session.ws / "a").exists()
                )  # of the conversation before
            other.execute("ROLLBACK")
        session.say("/new")
        session.say("is kept")
        assert rows(tmp_path, "SELECT text FROM part WHERE text = 'is kept'")


def test_a_conversation_that_another_process_has_is_refused_and_the_present_one_goes_on(
    tmp_path: Path,
) -> None:
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        session.say("mine")
        with contextlib.closing(Store(session.home / ".data" / "coder" / "sessions.db")) as store:
            with Recorder(store, store.create(str(session.ws)), [user("yours")]) as other:
                other.sync()
                assert "open in another process" in " ".join(
                    bare(session.say(f"/resume {other.session_id}")).split()
                )
            session.say("goes on")
            assert said(server.requests[-1]) == ["mine", "goes on"] and rows(
                tmp_path, "SELECT text FROM part WHERE text = 'goes on'"
            )


def test_names_that_are_no_text_are_kept_apart(tmp_path: Path) -> None:
    one, two = (os.fsdecode(b"caf" + letter) for letter in (b"\xe9", b"\xe8"))
    with serve(echo) as server:
        (tmp_path / "ws").mkdir()
        for name in (one, two):
            (tmp_path / "ws" / name).mkdir()
        for arguments, wanted in (
            (["-C", one, "-m", os.fsdecode(b"m\xe9"), "in one"], ["in one"]),
            (["-C", two, "in two"], ["in two"]),
            (["-C", one, "-c", "on"], ["in one", "on"]),
        ):
            with OneShot(tmp_path, server, *arguments) as run:
                assert run.end() == 0, run.err
                assert said(server.requests[-1]) == wanted and "began in" not in run.err
