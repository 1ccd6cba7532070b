"""What outlives a session at the terminal: resuming, undo, compaction, titles, export; by the
program itself.

The cases of the group SES that need no program are in test_sessions.py.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyte
import pytest

from coder.cli import subcommands
from coder.devtools.scripted import Body, Reply, ScriptedServer, events
from coder.history import user
from coder.sessions.database import StoreError
from coder.sessions.recorder import Recorder
from coder.sessions.store import Store
from tests.harness import serve, shell
from tests.terminal import (
    PATIENCE,
    OneShot,
    Place,
    Run,
    Terminal,
    bare,
    rendered,
    until,
    untouched,
)


def echo(body: Body) -> Reply:
    return Reply(f"You said: {str(body['messages'][-1]['content'])[:50]!r}")


def said(server: ScriptedServer) -> list[str]:
    """The user's messages in the newest request."""
    messages = server.requests[-1]["messages"]
    return [message["content"] for message in messages if message["role"] == "user"]


def flat(text: str) -> str:
    return " ".join(bare(text).split())


def left(session: Terminal) -> str:
    """Leave; the id that the last line names."""
    assert session.leave() == 0
    found = re.search(r"coder -r ([0-9a-z]+)", session.output)
    assert found, session.output
    return found[1]


def talk(folder: Path, server: ScriptedServer, *arguments: str, code: int = 0) -> OneShot:
    """One run without a terminal, over when this returns."""
    with OneShot(folder, server, *arguments) as run:
        assert run.end() == code, run.err
        return run


def database(folder: Path) -> Path:
    return folder / "home" / ".data" / "coder" / "sessions.db"


def rows(folder: Path, query: str) -> list[tuple[object, ...]]:
    with contextlib.closing(sqlite3.connect(database(folder))) as db, db:
        return db.execute(query).fetchall()


def kept(folder: Path, *texts: str) -> str:
    """A conversation of an earlier run in the workspace, in which these were said by turns; its
    id."""
    roles = ("user", "assistant")
    with contextlib.closing(Store(database(folder))) as store:
        info = store.create(str(folder / "ws"))
        messages = [user(text) | {"role": roles[at % 2]} for at, text in enumerate(texts)]
        Recorder(store, info, messages).close()
    return info.id


# ---- which one goes on -------------------------------------------------------------------------


def test_a_conversation_is_resumed_as_the_newest_by_id_and_by_picker(tmp_path: Path) -> None:
    apples = kept(tmp_path, "about apples", "Green.")
    kept(tmp_path, "about pears", "You said: 'about pears'")
    with serve(echo) as server:
        with Terminal(tmp_path, server, "-c") as session:
            assert "❯ about pears" in bare(session.output)
            assert "You said: 'about pears'" in session.output
            session.say("and now?")
            assert said(server) == ["about pears", "and now?"]
            assert "without a name" in session.say("/name")
            assert "This conversation: Riper pears" in session.say("/name  Riper pears")
            left(session)
        with Terminal(tmp_path, server, "-r", apples, "--plan") as session:
            assert "Agent: plan." in session.output
            assert "continues" not in session.output
            session.enter("more")
            session.not_now()
            assert said(server) == ["about apples", "more"]
            assert left(session) == apples
        with Terminal(tmp_path, server) as session:
            session.enter("/resume")
            listed = bare(session.expect("number, name or id: "))
            rows_of = r"1 +now  about apples  {0}\r\n +more → You.*2 +now  Riper pears  {0}"
            assert re.search(rows_of.format(r"\(4 messages, script\)"), listed, re.S)
            session.type("\x1b")  # none of them
            session.prompt()
            session.enter("/resume")
            session.expect("number, name or id: ")
            session.enter("2")
            between = bare(session.expect("You said: 'and now?'"))
            assert between.split("\n")[1].strip() == "", "a blank row above it"
            session.prompt()
            session.say("riper")
            assert said(server) == ["about pears", "and now?", "riper"]
            assert "There is no session" in session.say("/resume zzzz")
            session.say("/new")
            session.say("/resume 2")  # of the list, not the beginning of an id
            session.enter("on")
            session.not_now()
            assert said(server) == ["about apples", "more", "on"]
            assert "no session" in session.say("/resume \u00b2")
        beginning = [server.requests[at]["messages"][0] for at in (0, -2)]
        assert beginning[0] == beginning[1]  # byte for byte


def test_a_session_continues_no_single_task_but_a_task_does(tmp_path: Path) -> None:
    with serve(echo) as server:
        talk(tmp_path, server, "task 0")
        with Run(tmp_path, server, "-c") as refused:
            refused.expect("no conversation of a session in this folder")
            assert refused.exit_code() == 2
            assert "-r lists them" in flat(refused.output)
        with Terminal(tmp_path, server) as session:
            session.say("in the session")
        talk(tmp_path, server, "task 1")
        talk(tmp_path, server, "-c", "task 2")
        assert said(server) == ["task 1", "task 2"]
        with Terminal(tmp_path, server, "-c") as session:
            session.say("on")
            assert said(server) == ["in the session", "on"]
        talk(tmp_path, server, "-c", "a task in it")
        talk(tmp_path, server, "task 3")
        with Terminal(tmp_path, server, "-c") as session:
            session.say("and on")
            assert said(server) == ["in the session", "on", "a task in it", "and on"]
        # One that a session has taken up is a session's from then on
        task = rows(tmp_path, "SELECT session FROM message WHERE data LIKE '%task 3%'")[0][0]
        with Terminal(tmp_path, server, "-r", str(task)) as session:
            session.say("taken up")
        talk(tmp_path, server, "task 4")
        with contextlib.closing(sqlite3.connect(database(tmp_path))) as db, db:
            older = """UPDATE message SET data = replace(data, '"one_task":', '"one_task": ')"""
            db.execute(older)
        with Terminal(tmp_path, server, "-c") as session:
            session.say("once more")
            assert said(server) == ["task 3", "taken up", "once more"]
        assert not any("one_task" in str(body) for body in server.requests)


@pytest.mark.parametrize("height", [12, 24])
def test_the_newest_of_many_conversations_stays_on_the_screen(tmp_path: Path, height: int) -> None:
    class Low(Terminal):
        columns = 40
        lines = height

    for number in range(14):
        kept(tmp_path, f"question {number}", "answer")
    with serve(echo) as server, Low(tmp_path, server) as session:
        session.enter("/resume")
        session.expect("number, name or id: ")
        screen = rendered(session.output, 40, height)
        assert any(row.startswith("  1     now  question") for row in screen)
        session.type("\x1b")
        session.prompt()


def test_one_task_is_kept_too_and_what_cannot_be_resumed_is_one_line(tmp_path: Path) -> None:
    with serve(echo) as server:
        for arguments, why in (
            (["-c", "x"], "no conversation in this folder"),
            (["-c", "--no-session", "x"], "--no-session and -c cannot be used together"),
        ):
            run = talk(tmp_path, server, *arguments, code=2)
            assert why in run.err
            assert run.err.count("\n") == 1
            assert not server.requests
        assert rows(tmp_path, "SELECT count(*) FROM session") == [(0,)]
        assert not list(database(tmp_path).with_name("sessions.db.locks").iterdir())
        for arguments, wanted in (
            (["one"], ["one"]),
            (["--no-session", "two"], ["two"]),
            (["-c", "three"], ["one", "three"]),
        ):
            talk(tmp_path, server, *arguments)
            assert said(server) == wanted


def test_sessions_are_listed_searched_exported_forked_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ws").mkdir()
    monkeypatch.chdir(tmp_path / "ws")
    monkeypatch.setenv("XDG_DATA_HOME", str(database(tmp_path).parents[1]))
    monkeypatch.setenv("OPENAI_API_KEY", "mycompany.plain.0815")

    def run(*words: str, code: int = 0) -> str:
        verb = {"sessions": subcommands.sessions, "export": subcommands.export}[words[0]]
        assert verb(words[1:]) == code
        return capsys.readouterr().out

    apples = kept(tmp_path, "about apples", "The needle is in the haystack.")
    secret = kept(tmp_path, "about pears", "sk-abcdefghijklmnopqrstuvwx, mycompany.plain.0815.")
    assert [row.split()[:4] for row in run("sessions").splitlines()] == [
        ["1", "now", "about", "pears"],
        ["2", "now", "about", "apples"],
    ]
    assert "needle is in" in run("sessions", "search", "needle")
    assert run("sessions", "search", "nowhere", code=1) == ""
    text = run("export", secret[:14])
    assert "about pears" in text
    assert "sk-abc" not in text
    assert "mycompany" not in text
    assert "<html" in run("export", "2", "--format", "html")
    copied = run("sessions", "fork", "2").strip()
    with pytest.raises(StoreError, match="zzz"):  # no list is left half removed
        run("sessions", "rm", copied, "zzz")
    removed = run("sessions", "rm", "1", "2")  # of the list, in which the copy is the first
    assert re.findall("removed .*(apples|pears).*", removed) == ["apples", "pears"]
    monkeypatch.chdir(tmp_path)
    assert run("sessions", "list") == ""
    assert apples in run("sessions", "--all")


def test_in_a_pipe_each_session_is_one_row_or_an_object_of_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws\nodd").mkdir()
    ids = [kept(tmp_path, "about apples\nand more", "Green."), kept(tmp_path, "pears", "Ripe.")]
    with contextlib.closing(Store(database(tmp_path))) as store:
        odd = store.create(str(tmp_path / "ws\nodd"), title="an\x1b[2J odd\nname")
        Recorder(store, odd, [user("apples, too " + "long " * 90)]).close()
    monkeypatch.chdir(tmp_path / "ws")
    monkeypatch.setenv("XDG_DATA_HOME", str(database(tmp_path).parents[1]))

    def printed(words: str, code: int = 0) -> str:
        assert subcommands.sessions(words.split()) == code
        return capsys.readouterr().out

    for words, number in (
        ("", 2),
        ("--all", 3),
        ("search apples", 2),
    ):
        lines = printed(words).splitlines()
        assert len(lines) == number, lines
        assert "\x1b" not in "".join(lines), lines
        found = json.loads(printed(f"{words} --json"))
        assert len(found) == number
        for line, each in zip(lines, found):
            assert each["id"] in line
    assert "Green" not in printed("search apples")
    assert "apples, too long" in printed("search apples")
    first = json.loads(printed("--json"))[0]
    assert first["number"] == 1
    assert first["id"] == ids[1]
    assert first["first"] == "pears"
    assert first["directory"] == str(tmp_path / "ws")
    assert first["messages"] == 2
    assert first["usage"]["input"] == 0
    assert first["updated"] >= first["created"] > 0
    hits = json.loads(printed("search apples --json"))
    assert hits[0]["directory"].endswith("ws\nodd")
    assert "long" in hits[0]["snippet"]
    assert "number" not in hits[0]
    assert json.loads(printed("search nowhere --json", 1)) == []
    with serve(echo) as server:
        place = Place(tmp_path, server)
        assert place.shell("{coder} sessions --json").stdout == printed("--json")
        for words in ("rm", "fork"):
            done = place.shell(f"{{coder}} sessions {words} 1 --json")
            assert done.returncode == 2
            assert "--json" in done.stderr


@pytest.mark.case("SES-14")
def test_in_another_folder_only_what_lies_there_may_be_touched(tmp_path: Path) -> None:
    paths = [f"{tmp_path}/ws/PWN", "../PWN", "here"]
    writes = Reply(calls=[("write", {"path": path, "content": "x"}) for path in paths])
    for name in ("ws/other", "ws/.coder"):
        (tmp_path / name).mkdir(parents=True)
    session_id = kept(tmp_path, "first", "one")
    with serve(writes, Reply("done")) as server:
        run = talk(tmp_path, server, "-C", "other", "-r", session_id, "-y", "write")
        began = f"This conversation began in {tmp_path}/ws; now files and permissions are those of"
        assert f"{began} {tmp_path}/ws/other." in flat(run.err)
        messages = server.requests[-1]["messages"]
        answers = [each["content"] for each in messages if each["role"] == "tool"]
        assert ["outside the workspace" in answer for answer in answers] == [True, True, False]
    assert sorted(path.name for path in (tmp_path / "ws").rglob("*") if path.is_file()) == ["here"]


@pytest.mark.case("SES-13")
def test_what_was_allowed_for_a_session_is_asked_again_when_it_goes_on(tmp_path: Path) -> None:
    def script(body: Body) -> Reply:
        answered = body["messages"][-1]["role"] == "tool"
        return Reply("done") if answered else Reply(calls=[("bash", {"command": "date >> log"})])

    with serve(script) as server:
        with Terminal(tmp_path, server) as session:
            for entry, answer in (
                ("go", "a"),
                ("/new", ""),
                ("and again", "y"),
            ):
                session.enter(entry)
                if answer:
                    session.expect("[y]es")
                    session.settled()
                    session.enter(answer)
                session.prompt()
                assert "[y]es" not in session.say("go again") if answer == "a" else True
            assert len((session.ws / "log").read_text().splitlines()) == 3
        with Terminal(tmp_path, server, "-c") as session:
            session.enter("go on")
            session.expect("[y]es")
            session.enter("n")
            session.prompt()
            assert len((session.ws / "log").read_text().splitlines()) == 3


# ---- a file that is damaged, foreign, full or held ---------------------------------------------


@pytest.mark.case("SES-12")
def test_a_full_disk_is_said_the_answer_comes_and_the_exit_code_is_not_zero(tmp_path: Path) -> None:
    kept(tmp_path, "first", "one")
    with serve(echo) as server:
        words = "second " + "word " * 20_000
        done = Place(tmp_path, server).shell(f"ulimit -f 70; {{coder}} -c '{words}'")
        assert done.returncode == 1, done.stderr
        assert "You said: 'second" in done.stdout, done.stderr
        assert "disk" in flat(done.stderr)
        assert "is not saved" in flat(done.stderr)
        talk(tmp_path, server, "-c", "third")
        assert said(server)[0] == "first"
        assert said(server)[-1] == "third"


def test_a_new_conversation_begins_next_to_a_damaged_file(tmp_path: Path) -> None:
    """Its beginning is whole, so that it can be opened."""
    kept(tmp_path, "first", "one")
    with database(tmp_path).open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (database(tmp_path).stat().st_size - 4096))
    with serve(echo) as server:
        run = talk(tmp_path, server, "second")
        assert "You said: 'second'" in run.out
        assert "was damaged; a new one was begun" in flat(run.err)
        talk(tmp_path, server, "-c", "third")
        assert said(server) == ["second", "third"]


# ---- the rows of a run ---------------------------------------------------------------------------


def test_the_line_after_a_run_fits_78_columns_whatever_there_is_to_say(tmp_path: Path) -> None:
    """What a long line leaves out first is the reasoning among the tokens, then what was cached."""
    usage = {"prompt_tokens": 123_456, "completion_tokens": 12_345}
    usage |= {"prompt_tokens_details": {"cached_tokens": 100_000}}
    (tmp_path / "prices.json").write_text('{"script": {"input": 1, "output": 1}}')

    def script(body: Body) -> Reply:
        thought = {} if "short" in str(body["messages"][-1]) else {"reasoning_tokens": 1_234}
        details = usage | {"completion_tokens_details": thought}
        *chunks, end = events(Reply("Well."), {})
        counted = b"data: " + json.dumps({"choices": [], "usage": details}).encode() + b"\n\n"
        return Reply(chunks=[*chunks, counted, end])

    prices = {"CODER_PRICES": str(tmp_path / "prices.json")}
    for folder, more in ("a", prices), ("b", {}):
        with (
            serve(script) as server,
            Terminal(tmp_path / folder, server, **more) as session,
        ):
            for entry in ("long", "short"):
                session.say(entry)
                [line] = [row for row in rendered(session.output) if row.startswith("done")][-1:]
                assert len(line) <= 78, line
                assert re.search(r"\d\.\d s$", line), line
                assert "123.5k in" in line
                assert "left" in line
                assert ("$0." in line) is bool(more)
                assert ("cached" in line) is (not more), line


def test_the_seconds_of_a_run_leave_out_the_time_that_a_question_waited(tmp_path: Path) -> None:
    touch = Reply(calls=[("bash", {"command": "touch new"})])
    with (
        serve(touch, Reply("Done.")) as server,
        Terminal(tmp_path, server) as session,
    ):
        began = time.monotonic()
        session.enter("go")
        session.expect("why not: ")
        asked = time.monotonic()
        time.sleep(0.6)  # the user thinks
        thought = time.monotonic() - asked
        session.type("y")
        shown = bare(session.prompt())
        took = time.monotonic() - began
    found = re.search(r"done · 2 steps · .* · (\d+\.\d) s", shown)
    assert found, (found, took)
    assert float(found[1]) <= took - thought + 0.05, (found, took)


def test_a_blank_row_stands_above_an_answer_and_above_a_question(tmp_path: Path) -> None:
    """And one is enough, if nothing is between entry and question."""
    touch = Reply(calls=[("bash", {"command": "touch new"})])
    told = Reply("I need a file.", [("bash", {"command": "touch other"})])
    replies = [Reply("Hello."), touch, told, Reply("Done.")]
    with serve(*replies) as server:
        with Terminal(tmp_path, server) as session:
            session.say("hi")
            session.enter("go")
            for _ in range(2):
                session.expect("why not: ")
                session.settled()
                session.type("y")
            session.prompt()
            shown = rendered(session.output, lines=99)
        at = shown.index("❯ hi")
        assert shown[at : at + 3] == ["❯ hi", "", "Hello."]
        asked = [at for at, row in enumerate(shown) if row == "Run this command?"]
        assert shown[asked[0] - 2 : asked[0]] == ["❯ go", ""]
        assert shown[asked[1] - 2 : asked[1]] == ["I need a file.", ""]
        with Terminal(tmp_path, server, "-c") as session:
            shown = rendered(session.output, lines=99)
        at = shown.index("❯ go")
        assert shown[at : at + 4] == ["❯ go", "", "Done.", ""]
        assert shown[at + 4]


@pytest.mark.parametrize("no_color", ["", "1"])
def test_yolo_is_yellow_at_the_prompt(tmp_path: Path, no_color: str) -> None:
    options: dict[str, Any] = {"NO_COLOR": no_color} if no_color else {}
    with (
        serve(echo) as server,
        Terminal(tmp_path, server, "-y", **options) as session,
    ):
        screen = pyte.Screen(80, 24)
        pyte.Stream(screen).feed(session.output)
        row = screen.display.index(next(each for each in screen.display if "yolo ❯" in each))
        cells = [screen.buffer[row][column] for column in range(6)]
        assert "".join(each.data for each in cells) == "yolo ❯"
        assert {each.fg for each in cells[:4]} == {"default" if no_color else "brown"}
        assert cells[5].fg == "default"
        assert all(each.bold for each in cells[:4])


# ---- the end by a signal -------------------------------------------------------------------------


@dataclass
class Silent(Reply):
    """The beginning of an answer; once the program has read it, a comment, and no more."""

    is_read: threading.Event = field(default_factory=threading.Event)

    def body(self, asked: Body) -> Iterator[bytes]:
        yield from super().body(asked)
        self.is_read.wait(PATIENCE)
        yield b": a comment\n\n"


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        pytest.param(4, "alpha beta gamma", id="a text"),
        pytest.param(1, "First I look.", id="no text yet"),
    ],
)
@pytest.mark.parametrize("form", ["json", "stream-json"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_text_of_a_task_that_a_signal_ends_is_the_answer_so_far(
    tmp_path: Path,
    number: signal.Signals,
    form: str,
    pieces: int,
    text: str,
) -> None:
    (tmp_path / "home").mkdir()
    trace = tmp_path / "home" / "run.jsonl"
    look = Reply("First I look.", [("ls", {})])
    half = Silent("alpha beta gamma", cut=pieces, close="hang")
    flags = "--trace", str(trace), "--output-format", form
    with (
        serve(look, half) as server,
        OneShot(tmp_path, server, *flags, "hello") as run,
    ):

        def has_come(last: str) -> bool:
            lines = trace.read_text().split("\n") if trace.exists() else []
            chunks = [line for line in lines if '"n": 2' in line and '"chunk"' in line]
            return any(last in line for line in chunks)

        # The trace has a piece before the run has its events: they are through when the next comes
        until(lambda: has_come("gamma" if pieces == 4 else "assistant"), "the beginning")
        half.is_read.set()
        until(lambda: has_come(": a comment"), "the comment after it")
        run.kill(number)
        assert run.end() == 128 + number
    end = json.loads(run.out.splitlines()[-1])
    assert end["stop_reason"] == "aborted"
    assert end["text"] == text


# ---- when the context is full --------------------------------------------------------------------

MEASURED = 100_000  # tokens that the server counts for each request
TOO_LONG = Reply("This model's maximum context length is 8192 tokens.", status=400)
# What the server answers, the window, and what the screen shows of the end
ENDS = {
    "output": (
        *(Reply("Half an answer", finish="length"), 400_000),
        "stopped: the answer reached the output limit · 1 step",
    ),
    "cut": (
        *(Reply("Half an answer", finish="length"), 110_000),
        "stopped: the context is full, so that the answer is cut · 1 step",
    ),
    "request": (TOO_LONG, 400_000, "stopped: the conversation is too long for the model · 1 step"),
}
ADVICE = "/compact shortens the conversation, /new begins another."


@pytest.mark.parametrize("name", ENDS)
def test_a_full_context_is_no_answer_that_reached_the_output_limit(
    tmp_path: Path, name: str
) -> None:
    reply, window, ended = ENDS[name]

    def script(body: Body) -> Reply:
        if reply.status != 200:
            return reply
        pieces = [
            re.sub(rb'(prompt_tokens": ?)\d+', rb"\g<1>%d" % MEASURED, each)
            for each in events(reply, body)
        ]
        return Reply(chunks=pieces)

    flags = "--no-compaction", f"--context-window={window}"
    with serve(script) as server:
        with Terminal(tmp_path, server, *flags) as session:
            session.say("a question")
            shown = [row for row in rendered(session.output) if row]
            assert any(row.startswith(ended) for row in shown), shown
            assert (ADVICE in flat("\n".join(shown))) is (name != "output")
            assert ("Error: the conversation is too long" in flat(session.output)) is (
                name == "request"
            )
        with OneShot(tmp_path, server, "-c", *flags, "go on") as run:
            assert run.end() == 3
            assert ended in run.err
            assert ("coder -r" in run.err and "/compact" in run.err) is (name != "output")
        with OneShot(tmp_path, server, "-q", *flags, "go on") as run:
            assert run.end() == 3
            why = ended.removesuffix(" · 1 step") if name != "request" else "Error: "
            assert run.err.startswith(why)
            assert run.err.count("\n") == 1
        with OneShot(tmp_path, server, "--output-format=json", *flags, "go on") as run:
            assert run.end() == 3
            kind = (json.loads(run.out)["error"] or {}).get("kind")
            assert kind == (None if name == "output" else "overflow")


# ---- two sessions in a folder --------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="only a sandbox guards files")
def test_a_session_that_is_open_in_another_tab_was_not_killed(tmp_path: Path) -> None:
    """Git's configuration changes during the open session, by the user's own hand."""

    def script(body: Body) -> Reply:
        done = body["messages"][-1]["role"] == "tool"
        return Reply("Done.") if done else Reply(calls=[("bash", {"command": "touch new"})])

    def started() -> str:
        argv = [sys.executable, "-m", "coder", "--plan", "look"]
        options: dict[str, Any] = {
            "cwd": first.ws,
            "env": first.environment,
            "timeout": PATIENCE,
        }
        null = subprocess.DEVNULL
        done = subprocess.run(
            argv,
            stdin=null,
            capture_output=True,
            text=True,
            **options,
        )
        assert done.returncode == 0, done.stderr
        return flat(done.stderr)

    with serve(script) as server, Terminal(tmp_path, server, "-y") as first:
        shell(first.ws, "git init -q")
        first.say("go")
        assert (first.ws / "new").exists()
        shell(first.ws, "git config user.name me")
        assert "killed" not in started()
        assert "killed" not in started(), "the end of another session changes nothing"
        first.kill(signal.SIGKILL)
        assert first.exit_code() == -signal.SIGKILL
        first.attributes = untouched()  # nobody could put the terminal's back
        notice = started()
        assert "session in this folder was killed" in notice
        assert ".git/config" in notice
        assert "killed" not in started(), "it is reported once"


# ---- undo --------------------------------------------------------------------------------------


def test_undo_takes_back_files_and_words_and_redo_brings_them_again(tmp_path: Path) -> None:
    command = "sed -i s/one/two/ a; rm b; mkdir d; echo new > d/c"
    change = Reply("I change it.", [("bash", {"command": command})])
    with serve(change, Reply("Changed.")) as server:
        with Terminal(tmp_path, server, "-y") as session:
            (session.ws / "a").write_text("one\n")
            (session.ws / "b").write_text("bee\n")
            session.say("change it")
            (session.ws / "mine").write_text("the user's\n")
            shown = bare(session.say("/diff"))
            assert "- one" in shown
            assert "+ two" in shown
            assert "+ new" in shown
            assert "the user's" not in shown
            assert "Undone: a, b, d/c." in bare(session.say("/undo"))
            assert sorted(path.name for path in session.ws.iterdir()) == ["a", "b", "mine"]
            assert (session.ws / "a").read_text() == "one\n"
            session.ctrl_c()  # the words of the run stand at the prompt, to be changed
            session.prompt()
            assert "Redone" in bare(session.say("/redo"))
            assert (session.ws / "d" / "c").read_text() == "new\n"
            session.say("/undo")
            session.say("\x15something else")
            assert said(server) == ["something else"]
            assert "nothing to redo" in session.say("/redo")
        with Terminal(tmp_path, server, "-c") as session:
            session.say("on")
            assert said(server) == ["something else", "on"]


def test_a_run_that_was_killed_can_be_undone_as_far_as_it_came(tmp_path: Path) -> None:
    steps = [
        *(
            Reply(calls=[("bash", {"command": "echo a > a"})]),
            Reply("done"),
        ),
        Reply(calls=[("bash", {"command": "echo b > b"})]),
    ]
    with serve(*steps, Reply("never", cut=2, close="hang")) as server:
        with Terminal(tmp_path, server, "-y") as session:
            session.say("first")
            session.enter("second")
            session.until(lambda: len(server.requests) == 4, "the answer after the tool")
            session.kill(signal.SIGTERM)
            assert session.exit_code() == 143
        with Terminal(tmp_path, server, "-c") as session:
            assert "Undone: b." in bare(session.say("/undo"))
            assert (session.ws / "a").exists()
            assert not (session.ws / "b").exists()
            session.expect("second")
            assert "Undone: a." in bare(session.say("\x15/undo"))
            session.expect("first")
            session.ctrl_c()
            session.prompt()


def test_a_conversation_that_is_not_kept_can_be_undone(tmp_path: Path) -> None:
    change = Reply(calls=[("bash", {"command": "echo new > a"})])
    with serve(change, Reply("done")) as server:
        with Terminal(tmp_path, server, "--no-session", "-y") as session:
            (session.ws / "a").write_text("old\n")
            session.say("change it")
            assert "Undone: a." in bare(session.say("/undo"))
            assert (session.ws / "a").read_text() == "old\n"
            session.type("\x15")
        assert not (session.home / ".data" / "coder" / "snapshots").exists()


def test_ctrl_c_does_not_leave_an_undo_half_done(tmp_path: Path) -> None:
    change = Reply(calls=[("bash", {"command": "echo new > a"})])
    with (
        serve(change, Reply("done")) as server,
        Terminal(tmp_path, server, "-y") as session,
    ):
        (session.ws / "a").write_text("old\n")
        session.say("change it")
        [states] = (session.home / ".data" / "coder" / "snapshots").glob("*.db")
        with contextlib.closing(sqlite3.connect(states, isolation_level=None)) as db:
            db.execute("BEGIN IMMEDIATE")  # for which the undo waits, after the files
            session.enter("/undo")
            session.until(lambda: (session.ws / "a").read_text() == "old\n", "the file")
            # Not by a key, at which the kernel drops what is being printed
            session.kill(signal.SIGINT)
        assert "Undone: a." in bare(session.prompt())
        session.type("\x15")


# ---- sub-agents --------------------------------------------------------------------------------

WAITS = "touch begun; until [ -e go ]; do sleep 0.05; done"
SILENCE = Reply("never heard", cut=2, close="hang")
LOOK = Reply(calls=[("ls", {})])
FOUND = Reply("Found it.")
# When the program is killed: the replies that its sub-agent has got, and what is then kept of it:
# the roles of its messages with the ends of their steps, and the states of its calls
KILLS = {
    "before the first answer": ([SILENCE], "user -", ""),
    "while a tool works": (
        [Reply(calls=[("bash", {"command": WAITS})])],
        "user -, assistant -",
        f"running: bash {WAITS}",
    ),
    "before the second answer": (
        [LOOK, SILENCE],
        "user -, assistant tool_calls, tool -",
        "completed: ls",
    ),
    "after the last answer": (
        [LOOK, FOUND],
        "user -, assistant tool_calls, tool -, assistant stop",
        "completed: ls",
    ),
}


def is_child(body: Body) -> bool:
    return "You are a sub-agent" in str(body["messages"][0]["content"])


def delegate(body: Body) -> Reply:
    """A model that hands its work over; later it goes on with the task that its list names."""
    written = str(body["messages"])
    if body["messages"][-1]["role"] == "tool":
        return Reply("Done.") if "Go on." in written else SILENCE
    named = re.search(r"\[task_id: (\w+)\]", written)
    more = {"prompt": "Go on.", "task_id": named[1]} if named else {"prompt": "Look."}
    return Reply(calls=[("task", {"description": "find it"} | more)])


@pytest.mark.parametrize("moment", KILLS)
def test_a_kill_loses_at_most_the_answer_in_flight_of_a_sub_agent(
    tmp_path: Path, moment: str
) -> None:
    """What is kept can be exported and gone on with: the call that was interrupted names its
    task."""
    replies, messages, calls = KILLS[moment]
    coming = [*replies]

    def script(body: Body) -> Reply:
        return coming.pop(0) if is_child(body) else delegate(body)

    with serve(script) as server:
        run = OneShot(tmp_path, server, "-y", "--output-format", "stream-json", "find it")
        asked = 1 + len(replies) + (replies[-1] is FOUND)
        until(lambda: len(server.requests) == asked, "the last request")
        if WAITS in calls:
            until((run.ws / "begun").exists, "the tool")
        run.kill(signal.SIGKILL)
        assert run.end() == -signal.SIGKILL
        (run.ws / "go").touch()
        run.stop()
        for folder in run.temp.iterdir():  # as a killed program leaves them
            shutil.rmtree(folder)

        [child] = set(re.findall(r'"session_id": "(\w{12})"', run.out))
        of_child = f"WHERE session = '{child}' ORDER BY id"
        kept = rows(tmp_path, f"SELECT role, coalesce(finish, '-') FROM message {of_child}")
        assert ", ".join(f"{role} {finish}" for role, finish in kept) == messages
        counted = rows(tmp_path, f"SELECT tokens NOT NULL FROM message {of_child}")
        assert [bool(each) for (each,) in counted] == [finish != "-" for _, finish in kept]
        parts = rows(tmp_path, f"SELECT state || ': ' || title, start > 0 FROM part {of_child}")
        assert parts == [(calls, 1)] * bool(calls)

        listed = run.shell("{coder} sessions").stdout
        exported = run.shell("{coder} export " + child).stdout
        assert listed.count("find it") == 1
        assert "Look." not in listed
        assert "Look." in exported
        assert calls.partition(": ")[2] in exported

        coming.append(Reply("Here."))
        with OneShot(tmp_path, server, "-y", "-c", "go on") as run:
            assert run.end() == 0
            assert run.out == "Done.\n"
        *before, prompt = [body for body in server.requests if is_child(body)][-1]["messages"][1:]
        expected = [role for role, _ in kept] + ["tool"] * (WAITS in calls)
        assert [each["role"] for each in before] == expected
        assert prompt["content"] == "Go on."
        assert ("Interrupted: the program was ended" in str(before)) == (WAITS in calls)
        answers = rows(tmp_path, f"SELECT data ->> 'content', finish FROM message {of_child}")
        assert answers[-1] == ("Here.", "stop")
        if replies[-1] is FOUND:
            summed = f"(SELECT sum(tokens ->> 'output') FROM message {of_child})"
            query = f"SELECT output > 0, output = {summed} FROM session WHERE id = '{child}'"
            assert rows(tmp_path, query) == [(1, 1)]


# ---- what goes and comes with a conversation ---------------------------------------------------


def summarised(body: Body) -> Reply:
    """A model that has a checklist, answers at length and sums up."""
    last = str(body["messages"][-1]["content"])
    if "<conversation>" in last:
        names = ("Goal", "Instructions", "Discoveries", "Accomplished", "Files")
        return Reply("\n".join(f"## {name}\nCount the sheep." for name in names))
    if last == "plan":
        item = {"text": "count \x1b[31mthe black ones", "status": "in_progress"}
        return Reply(calls=[("todo", {"items": [item]})])
    return Reply("word " * 400)


def test_what_was_summed_up_and_the_checklist_go_on(tmp_path: Path) -> None:
    with serve(summarised) as server:
        with Terminal(tmp_path, server, "-y") as session:
            assert "▸ count the black ones" in session.say("plan")
            assert rows(tmp_path, "SELECT status FROM todo") == [("in_progress",)]
            for number in range(3):
                session.say(f"question {number} " + "x" * 1_000)
            assert "The conversation was shortened from" in bare(session.say("/compact the sheep"))
            assert "the sheep" in server.requests[-1]["messages"][-1]["content"]
            session.say("and now?")
            messages = len(server.requests[-1]["messages"])
        with Terminal(tmp_path, server, "-c") as session:
            session.say("on")
            assert len(server.requests[-1]["messages"]) == messages + 2
            sent = [str(each["content"]) for each in server.requests[-1]["messages"]]
            [summary] = [text for text in sent if "<summary>" in text]
            assert "Count the sheep." in summary
            assert "The checklist now:" in summary


def test_the_agents_for_titles_summaries_and_compaction_are_those_of_their_files(
    tmp_path: Path,
) -> None:
    """Their prompts and their models; what they used is in the session."""
    agents = tmp_path / "home" / ".config" / "coder" / "agents"
    agents.mkdir(parents=True)
    for name in ("title", "summary", "compaction"):
        (agents / f"{name}.md").write_text(f"---\nmodel: {name}-model\n---\nYou do the {name}.\n")

    def script(body: Body) -> Reply:
        system = str(body["messages"][0]["content"])
        told = {"title": "Sheep", "summary": "Sheep were counted.", "compaction": "## Goal\nSheep."}
        return Reply(
            next(
                (told[n] for n in told if f"do the {n}." in system),
                "word " * 400,
            )
        )

    with (
        serve(script) as server,
        Terminal(tmp_path, server, CODER_TITLES="on") as session,
    ):
        session.say("count the sheep")
        until(lambda: len(server.requests) == 2, "both requests")
        for number in range(3):
            session.say(f"question {number} " + "x" * 1_000)
        shown = bare(session.say("/summary"))
        assert "Sheep were counted." in shown
        assert "shortening" not in shown
        assert "The conversation was shortened from" in bare(session.say("/compact"))
        asked = {body["model"]: body["messages"] for body in server.requests}
        assert {*asked} == {"script", "title-model", "summary-model", "compaction-model"}
        for name in ("title", "summary", "compaction"):
            system, user_ = (each["content"] for each in asked[f"{name}-model"])
            assert system == f"You do the {name}."
            assert "count the sheep" in user_
        assert all("tools" not in b for b in server.requests if b["model"] != "script")
        session.say("/new")
        assert rows(tmp_path, "SELECT title FROM session") == [("Sheep",)]
        summed = "SELECT sum(tokens ->> 'output') FROM message"
        [(used, counted)] = rows(tmp_path, f"SELECT output, ({summed}) FROM session")
        assert used > counted > 0


def test_a_title_is_found_during_the_first_run(tmp_path: Path) -> None:
    is_asked = threading.Event()

    def script(body: Body) -> Reply:
        if "conversations their titles" in str(body["messages"][0]["content"]):
            is_asked.set()
            return Reply("Counting all the sheep")
        # The first run goes on until a title is asked for
        return Reply("One, two." if is_asked.wait(PATIENCE) else "No title.")

    def is_kept() -> bool:  # by the first run, or by the next, if the title was slow
        session.say("again")
        return rows(tmp_path, "SELECT title FROM session") == [("Counting all the sheep",)]

    with (
        serve(script) as server,
        Terminal(tmp_path, server, CODER_TITLES="on") as session,
    ):
        assert "One, two." in session.say("count")
        until(is_kept, "the title")
        assert "No title." not in session.output
