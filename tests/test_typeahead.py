"""What is typed while the agent works: the line editor by itself, and steering, following up and commands in a real terminal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

from coder.agent.agent import Queue
from coder.cli.screen import Screen
from coder.cli.typeahead import LineEditor, TypeAhead
from coder.devtools.scripted import Body, Reply
from tests.harness import serve
from tests.terminal import PATIENCE, ROOT, Terminal, rendered, until, waits

QUESTION = "or why not: "
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[78]|\x1b\][^\x07]*\x07")


def said(body: Body) -> list[str]:
    return [message["content"] for message in body["messages"] if message["role"] == "user"]


def standing(output: str) -> str:
    """What stands on the screen in the end: what was painted in a line and wiped is gone."""
    return "\n".join(
        line.rstrip("\r").rpartition("\r")[2] for line in ESCAPES.sub("", output).split("\n")
    )


def waiting_for(name: str) -> Reply:
    """A command that runs until the file `name` is there."""
    return Reply(
        calls=[
            ("bash", {"command": f"until [ -e {name} ]; do sleep 0.02; done; echo over"}),
            ("bash", {"command": "echo second"}),
        ]
    )


# ---- the line ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "lines", "left"),
    [
        ("one\rtwo", ["one"], "two"),
        ("one\ntwo\n", ["one", "two"], ""),
        ("\r\r", ["", ""], ""),
        ("abx\x7fc\b\b", [], "a"),
        ("\x7fa", [], "a"),
        ("abc\x15d", [], "d"),
        ("one two  \x17three", [], "one three"),
        ("a\x1b[Ab\x1b[1;5Cc\x1bOHd", [], "abcd"),
        ("a\x1bb", [], "ab"),
        ("a\x04\x01b\x0c", [], "ab"),
        ("one\\\rtwo\r", ["one\ntwo"], ""),
        ("\x1b[200~a\r\nb\x1b[201~c\rd", ["a\n\nbc"], "d"),
        ("a\tb", [], "a\tb"),
        ("grüße 好\r", ["grüße 好"], ""),
        # sequences that are none, or go on no further: what follows is not swallowed
        ("\x1b[\rhello\r", ["[", "hello"], ""),
        ("\x1b[é\r", ["[é"], ""),
        ("a\x1b[\x1b[Ab", [], "a[b"),
        ("\x1b\rhi", [""], "hi"),
        ("\x1b]hi\rthere\r", ["]hi", "there"], ""),
        ("\x1bO\rhi\r", ["O", "hi"], ""),
        # answers of the terminal, and the function keys of the Linux console
        ("a\x1b]11;rgb:0000/0000/0000\x07b", [], "ab"),
        ("a\x1bP1+r544e\x1b\\b", [], "ab"),
        ("a\x1b[[Ab", [], "ab"),
        ("a\x1b[5;10Rb", [], "ab"),
    ],
)
def test_keys_become_lines(keys: str, lines: list[str], left: str) -> None:
    whole, byte_by_byte = LineEditor(), LineEditor()
    assert whole.feed(keys.encode()) == lines and whole.text == left
    assert [
        line for byte in keys.encode() for line in byte_by_byte.feed(bytes([byte]))
    ] == lines and byte_by_byte.text == left


def test_bytes_that_are_no_text_are_marked() -> None:
    line = LineEditor()
    assert line.feed(b"a\xffb\r") == ["a\ufffdb"]


def test_without_a_terminal_nothing_is_listened_to(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out:
        keys = TypeAhead(Screen(out), Queue(), Queue())
        with keys.listening(), keys.paused():
            pass
        assert not keys.unsent_lines() and not keys.partial_line()
    assert (tmp_path / "out").read_text() == ""


# ---- in a session ------------------------------------------------------------------------------------------


def test_a_line_steers_and_one_with_a_plus_follows_up(tmp_path: Path) -> None:
    with (
        serve(waiting_for("go"), Reply("steered"), Reply("followed")) as server,
        Terminal(tmp_path, server, "-y") as session,
    ):
        session.enter("begin")
        session.until(lambda: session.running("sleep"), "the command")
        session.enter("+and then this")
        session.expect("queued: and then this")
        session.enter("what about that")
        session.expect("queued (2): what about that")
        (session.ws / "go").touch()
        shown = standing(session.prompt())
        assert [said(body) for body in server.requests] == [
            ["begin"],
            ["begin", "what about that"],
            ["begin", "what about that", "and then this"],
        ]
        assert "Skipped due to queued user message." in str(server.requests[1]["messages"])
        assert (
            shown.index("\n> what about that")
            < shown.index("steered")
            < shown.index("\n> and then this")
            < shown.index("followed")
        )


def test_that_a_line_is_queued_is_seen_however_long_it_is(tmp_path: Path) -> None:
    with (
        serve(waiting_for("go"), Reply("steered")) as server,
        Terminal(tmp_path, server, "-y") as session,
    ):
        session.enter("begin")
        session.until(lambda: session.running("sleep"), "the command")
        session.enter("first of all " + "look " * 30)
        session.expect("queued: first of all look")
        session.type("and then " + "wait " * 30 + "a bit")
        session.expect("wait a bit")
        assert any(
            row.find("queued: first of all") < row.find("wait a bit") != -1 and "queued" in row
            for row in rendered(session.output)
        ), rendered(session.output)
        session.type("\x15")
        (session.ws / "go").touch()
        session.prompt()


def test_a_line_that_comes_too_late_to_steer_goes_on_with_the_run(tmp_path: Path) -> None:
    with (
        serve(Reply("a long answer of many words", pace=0.15), Reply("more")) as server,
        Terminal(tmp_path, server) as session,
    ):
        session.enter("begin")
        session.expect("long")
        session.enter("and this")
        session.expect("more")
        session.prompt()
        assert [said(body) for body in server.requests] == [["begin"], ["begin", "and this"]]


def test_commands_wait_until_the_run_is_over(tmp_path: Path) -> None:
    with (
        serve(waiting_for("go"), Reply("done")) as server,
        Terminal(tmp_path, server, "-y") as session,
    ):
        session.enter("begin")
        session.until(lambda: session.running("sleep"), "the command")
        session.enter("/tokens")
        session.expect("queued: /tokens")
        session.enter("!touch mine")
        session.expect("queued (2)")
        assert not (session.ws / "mine").exists()
        (session.ws / "go").touch()
        session.expect("done")
        session.expect("context: ")
        session.prompt()
        session.until((session.ws / "mine").exists, "the second command")
        assert len(server.requests) == 2


def test_a_path_is_no_command(tmp_path: Path) -> None:
    with (
        serve(waiting_for("go"), Reply("done")) as server,
        Terminal(tmp_path, server, "-y") as session,
    ):
        session.enter("begin")
        session.until(lambda: session.running("sleep"), "the command")
        session.type("/home/me/x.py is broken\r")
        session.expect("queued: ")
        (session.ws / "go").touch()
        session.prompt()
        assert said(server.requests[1]) == ["begin", "/home/me/x.py is broken"]


def test_what_is_typed_and_not_entered_stands_at_the_next_prompt(tmp_path: Path) -> None:
    with (
        serve(waiting_for("go"), Reply("done"), Reply("again")) as server,
        Terminal(tmp_path, server, "-y") as session,
    ):
        session.enter("begin")
        session.until(lambda: session.running("sleep"), "the command")
        session.type("half a li")
        session.expect("> half a li")
        (session.ws / "go").touch()
        session.prompt()
        session.expect("half a li")
        session.say("ne")
        assert said(server.requests[-1]) == ["begin", "half a line"]


def test_what_was_queued_when_the_run_is_stopped_stands_at_the_next_prompts_entry_by_entry(
    tmp_path: Path,
) -> None:
    with (
        serve(waiting_for("go"), Reply("again")) as server,
        Terminal(tmp_path, server, "-y") as session,
    ):
        session.enter("begin")
        session.until(lambda: session.running("sleep"), "the command")
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


@pytest.mark.parametrize("marks", [True, False])
def test_a_paste_of_several_lines_is_one_message_and_no_command(
    tmp_path: Path, marks: bool
) -> None:
    with (
        serve(waiting_for("go"), Reply("done")) as server,
        Terminal(tmp_path, server, "-y") as session,
    ):
        session.enter("begin")
        session.until(lambda: session.running("sleep"), "the command")
        session.paste("!touch x\n/exit\n+two", marks=marks)
        session.expect("> !touch x⏎/exit⏎+two")
        session.enter("")
        session.expect("queued: !touch x⏎/exit⏎+two")
        (session.ws / "go").touch()
        session.prompt()
        assert (
            said(server.requests[1]) == ["begin", "!touch x\n/exit\n+two"]
            and not (session.ws / "x").exists()
        )


def test_a_question_is_answered_by_what_is_typed_after_it_and_the_line_under_way_goes_on(
    tmp_path: Path,
) -> None:
    held = Reply(calls=[("bash", {"command": "touch hi"})], hold=1.0)
    with (
        serve(held, waiting_for("go"), Reply("done")) as server,
        Terminal(tmp_path, server) as session,
    ):
        session.enter("begin")
        session.until(lambda: server.requests, "the request")
        session.type("half ")
        session.expect("> half")
        session.expect(QUESTION)
        session.enter("y")
        session.expect(QUESTION)
        session.enter("y")
        session.until(lambda: session.running("sleep"), "the command")
        session.type("a line\r")
        session.expect("queued: half a line")
        (session.ws / "go").touch()
        session.prompt()
        assert said(server.requests[-1]) == ["begin", "half a line"]


def test_what_is_typed_while_text_streams_is_seen_all_the_time_and_does_not_tear_it(
    tmp_path: Path,
) -> None:
    """On a row of its own. The second line of the answer fills its row to the last column."""
    text = "\n".join(
        [
            " ".join(f"word{number}" for number in range(40)),
            "a" * 39 + " " + "b" * 40 + " next",
            "中文字" * 20,
            "The end.",
        ]
    )
    with (
        serve(Reply(text, pace=0.02), Reply("ok")) as server,
        Terminal(tmp_path, server) as session,
    ):
        session.enter("begin")
        session.expect("word2")
        session.type("typing")
        session.expect("typing")

        def streams() -> bool:
            shown = rendered(session.output)
            assert "> typing" in shown or "The end." in shown, shown
            return "The end." not in shown

        session.until(lambda: not streams())
        session.prompt()
        session.expect("typing")
        shown = rendered(session.output)
        begin, end = (
            next(place for place, row in enumerate(shown) if row.startswith(word))
            for word in ("word0", "done")
        )
        rows = shown[begin:end]
        assert " ".join(rows[:-5]).split() == [f"word{number}" for number in range(40)]
        assert rows[-5:] == [
            "a" * 39 + " " + "b" * 40,
            "next",
            "中文字" * 13 + "中",
            "文字" + "中文字" * 6,
            "The end.",
        ]
        session.ctrl_c()
        session.prompt()


def test_the_terminals_modes_come_back_after_a_run_that_is_stopped_by_a_signal(
    tmp_path: Path,
) -> None:
    with serve(waiting_for("go")) as server, Terminal(tmp_path, server, "-y") as session:
        session.enter("begin")
        session.until(lambda: session.running("sleep"), "the command")
        session.kill(signal.SIGTERM)
        assert session.exit_code() == 143
        assert session.output.rindex("\x1b[?2004l") > session.output.rindex("\x1b[?2004h")


def test_lines_of_a_run_are_in_the_history(tmp_path: Path) -> None:
    with (
        serve(waiting_for("go"), Reply("done"), Reply("again")) as server,
        Terminal(tmp_path, server, "-y") as session,
    ):
        session.enter("begin")
        session.until(lambda: session.running("sleep"), "the command")
        session.type("in between\r")
        session.expect("queued: ")
        (session.ws / "go").touch()
        session.prompt()
        session.ready()
        session.type("\x1b[A")
        session.expect("in between")
        session.say("")
        assert said(server.requests[-1]) == ["begin", "in between", "in between"]


def test_who_stops_one_of_several_entries_finds_the_others_at_the_prompt(tmp_path: Path) -> None:
    with (
        serve(waiting_for("go"), Reply("done")) as server,
        Terminal(tmp_path, server, "-y") as session,
    ):
        session.enter("begin")
        session.until(lambda: session.running("sleep"), "the command")
        session.enter("!sleep 17.5")
        session.expect("queued: !sleep 17.5")
        session.enter("!touch precious")
        session.expect("queued (2)")
        session.type("half")
        session.expect("> half")
        (session.ws / "go").touch()
        session.until(lambda: session.running("sleep 17.5"), "the person's own command")
        session.ctrl_c()
        session.prompt()
        session.expect("!touch precious")
        assert not (session.ws / "precious").exists()
        session.ctrl_c()
        session.prompt()
        session.expect("half")
        session.ctrl_c()
        session.prompt()


def test_ctrl_c_behind_a_run_loses_nothing_that_was_typed(tmp_path: Path) -> None:
    """The last line of a run is on the screen before it is over for us."""
    with (
        serve(waiting_for("go"), Reply("done")) as server,
        Terminal(tmp_path, server, "-y") as session,
    ):
        session.enter("begin")
        session.until(lambda: session.running("sleep"), "the command")
        session.enter("/tokens")
        session.expect("queued: /tokens")
        session.type("half")
        session.expect("> half")
        (session.ws / "go").touch()
        session.expect(" out · ")
        session.child.sendintr()  # before the end of the run, or at one of the prompts

        def behind_the_run() -> str:
            return ESCAPES.sub("", session.output).rpartition(" out · ")[2]

        session.until(
            lambda: "> half" in behind_the_run() or behind_the_run().endswith("> /tokens"),
            "an entry at a prompt",
        )
        if "> half" not in behind_the_run():
            session.ctrl_c()
            session.until(lambda: "> half" in behind_the_run(), "the other one")
        session.kill(signal.SIGTERM)
        assert session.exit_code() == 128 + signal.SIGTERM


INTERRUPTED = """
import os, signal
from pathlib import Path
from coder.cli.input import Keyboard

presses = iter([lambda: os.kill(os.getpid(), signal.SIGINT)])
keyboard = Keyboard(Path("history"), before_prompt=lambda: next(presses, lambda: None)())
keyboard.early = ["half a li\\u00f1e"]
for entry in keyboard.entries():
    print("entered", entry.encode())
"""


@pytest.mark.parametrize(
    ("locale", "shown", "entered"),
    [("C.UTF-8", "half a li\u00f1e", b"half a li\xc3\xb1e"), ("C", "half a li?e", b"half a li?e")],
)
def test_ctrl_c_before_a_prompt_is_drawn_loses_nothing_that_waits_for_it(
    tmp_path: Path, locale: str, shown: str, entered: bytes
) -> None:
    child = pexpect.spawn(
        sys.executable,
        ["-c", INTERRUPTED],
        cwd=str(tmp_path),
        timeout=PATIENCE,
        encoding="utf-8",
        env=os.environ | {"PYTHONPATH": str(ROOT), "LC_ALL": locale},
    )  # type: ignore[arg-type]
    try:
        child.expect_exact(f"> {shown}")
        child.send("\r")
        child.expect_exact(f"entered {entered!r}")
        child.expect_exact("> ")
        until(lambda: waits(child.pid), "the program waits")
        child.sendintr()
        child.expect_exact("Ctrl+C again leaves")
    finally:
        child.close(force=True)


DEAF = """
import signal, threading
from pathlib import Path
from coder.cli.input import Keyboard

threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # now that thread gets it
for entry in Keyboard(Path("history"), before_prompt=lambda: None).entries():
    pass
"""


def test_ctrl_c_that_does_not_wake_the_prompt_is_seen_all_the_same(tmp_path: Path) -> None:
    child = pexpect.spawn(
        sys.executable,
        ["-c", DEAF],
        cwd=str(tmp_path),
        timeout=PATIENCE,
        encoding="utf-8",
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # type: ignore[arg-type]
    try:
        child.expect_exact("> ")
        child.sendintr()
        child.expect_exact("Ctrl+C again leaves")
    finally:
        child.close(force=True)


PRESSED = """
import os, random, signal, sys, termios, threading, time
from pathlib import Path
from coder.cli.input import Keyboard

master, slave = os.openpty()
report = os.fdopen(os.dup(1), "w")
os.dup2(slave, 0)
os.dup2(slave, 1)
shown = bytearray()

def look():
    while True:
        shown.extend(os.read(master, 4096))

def press(after):
    begun.wait()
    time.sleep(after)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=look, daemon=True).start()
chance, keyboard = random.Random(1), Keyboard(Path("history"), before_prompt=lambda: None)
for number in range(100):
    begun, result = threading.Event(), ""
    keyboard.early, keyboard._hinted, keyboard.before_prompt = ["half a line"], -100.0, begun.set
    shown.clear()
    thread = threading.Thread(target=press, args=(chance.uniform(0, 0.0005),))
    thread.start()
    try:
        keyboard.line("> ", keyboard.early)
    except KeyboardInterrupt:
        result = "".join(keyboard.early)
    thread.join()
    end = time.monotonic() + 10
    while not result and time.monotonic() < end:  # given up by who saw it
        result = "half a line" if b"half a line" in shown else ""
    termios.tcflush(0, termios.TCIFLUSH)
    print(result, file=report, flush=True)
"""


def test_ctrl_c_while_a_prompt_is_drawn_is_seen_and_loses_nothing_that_waits_for_it(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRESSED],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.stdout.split("\n") == ["half a line"] * 100 + [""], done.stderr


LONG = """
from pathlib import Path
from coder.cli.input import Keyboard

keyboard = Keyboard(Path("history"), before_prompt=lambda: None)
keyboard.early = ["half a line " * 10_000]
print("begun", flush=True)
for entry in keyboard.entries():
    pass
"""


def test_ctrl_c_while_a_long_line_is_drawn_at_the_prompt_is_seen(tmp_path: Path) -> None:
    child = pexpect.spawn(
        sys.executable,
        ["-c", LONG],
        cwd=str(tmp_path),
        timeout=PATIENCE,
        encoding="utf-8",
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # type: ignore[arg-type]

    def writes() -> bool:
        """The terminal takes no more, because nobody reads what is on it."""
        return Path(f"/proc/{child.pid}/syscall").read_text().startswith("1 0x1 ")

    try:
        child.expect_exact("begun")
        until(writes, "the line is drawn")
        child.sendintr()
        child.expect(r"half a line \s*\r\n")
        child.expect_exact("> ")
    finally:
        child.close(force=True)


@pytest.mark.parametrize("columns", [16, 24, 40])
def test_typing_in_a_narrow_terminal_repaints_one_line(tmp_path: Path, columns: int) -> None:
    with (
        serve(waiting_for("go"), Reply("done")) as server,
        Terminal(tmp_path, server, "-y") as session,
    ):
        session.child.setwinsize(24, columns)
        session.enter("begin")
        session.until(lambda: session.running("sleep"), "the command")
        session.type("look at this other thing")
        session.expect("thing")
        shown = rendered(session.output, columns)
        assert [row for row in shown if "thing" in row] == [row for row in shown if row][-1:]
        (session.ws / "go").touch()
        session.prompt()
        session.ctrl_c()
        session.prompt()
