"""What is typed while the agent works and before a prompt is drawn: the line editor, the keyboard, and runs in a real terminal."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import pytest

from coder.agent.agent import Queue
from coder.cli.keys import Keys
from coder.cli.repl import TypeAhead
from coder.cli.screen import Screen
from coder.devtools.scripted import Body, Reply
from tests.harness import serve
from tests.terminal import PATIENCE, QUESTION, Terminal, bare, rendered


def said(body: Body) -> list[str]:
    return [message["content"] for message in body["messages"] if message["role"] == "user"]


def waiting_for(name: str) -> Reply:
    """A command that runs until the file `name` is there, and one behind it."""
    wait = f"until [ -e {name} ]; do sleep 0.02; done; echo over"
    return Reply(calls=[("bash", {"command": wait}), ("bash", {"command": "echo second"})])


# ---- the line ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reads", "entry", "left"),
    [
        (["one", "\r"], "one", ""),
        (["one\rtwo"], "", "one\ntwo"),  # at once: it was pasted
        (["one\rtwo\r"], "one\ntwo", ""),
        (["one", "\n", "two\x1b\rthree", "\r"], "one\ntwo\nthree", ""),  # Ctrl+J, Alt+Enter
        (["\r"], "", ""),
        (["abx\x7fc\b\b"], "", "a"),
        (["\x7fa"], "", "a"),
        (["abc\x15d"], "", "d"),
        (["one two  \x17three"], "", "one three"),
        (["a\x1b[Ab\x1b[1;5Cc\x1bOHd\x1b[[Ae\x1bfg"], "", "abcdeg"),
        (["a\x1b", "[A\x04\x01b\x0c"], "", "ab"),
        (["a\x1b[1", ";5Cb\x1b[", "200~c\rd\x1b[201", "~\r"], "abc\nd", ""),
        (["a\tb grüße 好\r"], "a\tb grüße 好", ""),
        (["\x1b[\rhello\r"], "hello", ""),
    ],
)
def test_keys_become_an_entry(reads: list[str], entry: str, left: str) -> None:
    line, keys = TypeAhead(Screen(io.StringIO()), Queue(), Queue()), Keys()
    assert [line.take(keys.feed(read.encode())) for read in reads][-1] == entry
    assert line.text == left


def test_a_plus_alone_asks_the_model_nothing_and_keys_are_taken_out() -> None:
    line = TypeAhead(Screen(io.StringIO()), Queue(), Queue())
    line.redact = lambda text: text.replace("KEY", "***")
    for entry in ("+", "+ later KEY", "now KEY"):
        line.enter(entry)
    assert line.take_lines() == ["now ***", "later ***"]


# ---- during runs -------------------------------------------------------------------------


def begin(session: Terminal) -> None:
    session.enter("begin")
    session.until(lambda: session.running("sleep"), "the command")


def test_a_line_steers_one_with_a_plus_follows_up_and_commands_wait(tmp_path: Path) -> None:
    replies = waiting_for("go"), Reply("steered"), Reply("followed")
    with serve(*replies) as server, Terminal(tmp_path, server, "-y") as session:
        begin(session)
        for line, shown in (
            ("+and then this", "queued: and then this"),
            ("/home/me/x.py is what", "queued (2): /home/me/x.py is"),
            ("/tokens", "queued (3)"),
            ("!touch mine", "queued (4)"),
        ):
            session.enter(line)
            session.expect(shown)
        assert not (session.ws / "mine").exists()
        (session.ws / "go").touch()
        session.expect("followed")
        session.expect("context: ")
        session.until((session.ws / "mine").exists, "the command of the user's own")
        session.prompt()
        session.ready()
        path = "/home/me/x.py is what"
        assert [said(body) for body in server.requests] == [
            ["begin"],
            ["begin", path],
            ["begin", path, "and then this"],
        ]
        shown = bare(session.output)
        places = [shown.rindex(text) for text in (f"❯ {path}", "steered", "❯ and then this")]
        assert places == sorted(places)


def test_what_is_not_entered_stands_at_the_prompt_and_lines_in_history(tmp_path: Path) -> None:
    """On a narrow terminal, too, where it is shown in one row."""
    replies = waiting_for("go"), Reply("done"), Reply("again")
    with serve(*replies) as server, Terminal(tmp_path, server, "-y") as session:
        session.child.setwinsize(24, 24)
        begin(session)
        session.enter("in between")
        session.expect("queued: ")
        session.type("look at this other thing")
        session.expect("hing\x1b")
        shown = [row for row in rendered(session.output, 24) if row]
        assert [row for row in shown if "hing" in row] == shown[-1:]
        session.child.setwinsize(24, 80)
        (session.ws / "go").touch()
        session.prompt()
        session.expect("look at this other thing")
        session.say("s")
        assert said(server.requests[-1]) == ["begin", "in between", "look at this other things"]
        session.ready()
        session.type("\x1b[A\x1b[A")
        session.expect("in between")
        session.say("")
        assert said(server.requests[-1])[-1] == "in between"


def test_a_command_that_is_stopped_stops_those_behind_it(tmp_path: Path) -> None:
    replies = waiting_for("go"), Reply("done")
    with serve(*replies) as server, Terminal(tmp_path, server, "-y") as session:
        begin(session)
        for entry in ("!sleep 300", "!touch mine"):
            session.enter(entry)
            session.expect("queued")
        (session.ws / "go").touch()
        session.until(lambda: session.running("sleep 300"), "the user's own command")
        session.ctrl_c()
        session.prompt()
        session.expect("!touch mine")
        assert not (session.ws / "mine").exists()
        session.type("\x15")  # Ctrl+U


def test_what_was_queued_at_a_stop_stands_at_the_prompts_one_by_one(tmp_path: Path) -> None:
    replies = waiting_for("go"), Reply("again")
    with serve(*replies) as server, Terminal(tmp_path, server, "-y") as session:
        begin(session)
        for entry in ("not so", "/tokens", "+later"):
            session.enter(entry)
            session.expect("queued")
        session.type("hal")
        session.expect("> hal")
        session.ctrl_c()
        session.prompt()
        session.expect("not so")
        session.say("!")
        session.expect("later")
        session.say("")
        session.expect("/tokens")
        assert "context: " in session.say("")
        session.expect("hal")
        session.say("f")
        assert said(server.requests[-1]) == ["begin", "not so!", "later", "half"]


def test_a_paste_of_several_lines_is_one_message_and_no_command(tmp_path: Path) -> None:
    replies = waiting_for("go0"), Reply("done"), waiting_for("go1"), Reply("done")
    with serve(*replies) as server, Terminal(tmp_path, server, "-y") as session:
        for number, marks in enumerate((True, False)):
            begin(session)
            session.paste("!touch x\n/exit\n+two", marks=marks)
            session.expect("> !touch x⏎/exit⏎+two")
            session.enter("")
            session.expect("queued: !touch x⏎/exit⏎+two")
            (session.ws / f"go{number}").touch()
            session.prompt()
            session.ready()
        assert said(server.requests[-1]) == ["begin", "!touch x\n/exit\n+two"] * 2
        assert not (session.ws / "x").exists()


def test_a_question_is_answered_by_later_keys_and_the_line_goes_on(tmp_path: Path) -> None:
    typed = threading.Event()
    replies = iter(
        [Reply(calls=[("bash", {"command": "touch hi"})]), waiting_for("go"), Reply("x")]
    )
    with (
        serve(lambda body: next(replies) if typed.wait(PATIENCE) else Reply("late")) as server,
        Terminal(tmp_path, server) as session,
    ):
        session.enter("begin")
        session.until(lambda: server.requests, "the request")
        session.type("half ")
        session.expect("> half")
        typed.set()
        for _ in range(2):
            session.expect(QUESTION)
            session.enter("y")
        session.until(lambda: session.running("sleep"), "the command")
        session.enter("a line")
        session.expect("queued: half a line")
        (session.ws / "go").touch()
        session.prompt()
        assert said(server.requests[-1]) == ["begin", "half a line"]
