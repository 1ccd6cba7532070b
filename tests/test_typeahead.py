"""What is typed while the agent works and before a prompt is drawn: the line editor, the keyboard, and runs in a real terminal."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest

from coder.agent.agent import Queue
from coder.cli.screen import Screen
from coder.cli.typeahead import LineEditor, TypeAhead
from coder.devtools.scripted import Body, Reply
from tests.harness import serve
from tests.terminal import PATIENCE, ROOT, Terminal, rendered, until, waits

QUESTION = "or why not: "
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b\][^\x07]*\x07")


def said(body: Body) -> list[str]:
    return [message["content"] for message in body["messages"] if message["role"] == "user"]


def waiting_for(name: str) -> Reply:
    """A command that runs until the file `name` is there, and one behind it."""
    wait = f"until [ -e {name} ]; do sleep 0.02; done; echo over"
    return Reply(calls=[("bash", {"command": wait}), ("bash", {"command": "echo second"})])


# ---- the line ----------------------------------------------------------------------------


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
        ("a\x1bb\x04\x01c\x0c", [], "abc"),
        ("one\\\rtwo\r", ["one\ntwo"], ""),
        ("\x1b[200~a\r\nb\x1b[201~c\rd", ["a\n\nbc"], "d"),
        ("a\tb grüße 好\r", ["a\tb grüße 好"], ""),
        # sequences that are none, or go on no further: what follows is not swallowed
        ("\x1b[\rhello\r", ["[", "hello"], ""),
        ("\x1b[é\ra\x1b[\x1b[Ab", ["[é"], "a[b"),
        ("\x1b\rhi", [""], "hi"),
        ("\x1b]hi\rthere\r", ["]hi", "there"], ""),
        ("\x1bO\rhi\r", ["O", "hi"], ""),
        # answers of the terminal, and the function keys of the Linux console
        ("a\x1b]11;rgb:0000/0000/0000\x07b\x1bP1+r544e\x1b\\c\x1b[[Ad\x1b[5;10Re", [], "abcde"),
    ],
)
def test_keys_become_lines(keys: str, lines: list[str], left: str) -> None:
    whole, single = LineEditor(), LineEditor()
    assert (whole.feed(keys.encode()), whole.text) == (lines, left)
    each = [line for byte in keys.encode() for line in single.feed(bytes([byte]))]
    assert (each, single.text) == (lines, left)


def test_bytes_that_are_no_text_are_marked_and_without_a_terminal_nothing_is_read(
    tmp_path: Path,
) -> None:
    assert LineEditor().feed(b"a\xffb\r") == ["a\ufffdb"]
    with (tmp_path / "out").open("w") as out:
        keys = TypeAhead(Screen(out), Queue(), Queue())
        with keys.listening(), keys.paused():
            pass
        assert not keys.unsent_lines() and not keys.partial_line()
    assert (tmp_path / "out").read_text() == ""


# ---- the prompt, and a Ctrl+C that comes while it is drawn -------------------------------

KEYBOARD = """
import os, random, signal, sys, termios, threading, time
from pathlib import Path
from coder.cli.input import Keyboard

def press():
    os.kill(os.getpid(), signal.SIGINT)

keyboard = Keyboard(Path("history"))
"""


@contextlib.contextmanager
def keyboard(folder: Path, code: str, **env: str) -> Iterator[Any]:
    """A program with our keyboard in a terminal."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | env
    child = pexpect.spawn(
        sys.executable,
        ["-c", KEYBOARD + code],
        cwd=str(folder),
        timeout=PATIENCE,
        encoding="utf-8",
        env=environment,  # type: ignore[arg-type]
    )
    try:
        yield child
    finally:
        child.close(force=True)


ENTRIES = "for entry in keyboard.entries(): print('entered', entry.encode())"
PRESS_FIRST = f"""
presses = iter([press])
keyboard.before_prompt = lambda: next(presses, lambda: None)()
keyboard.early = ["half a li\\u00f1e"]
{ENTRIES}
"""
DEAF = f"""
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGINT}})  # now that thread gets it
{ENTRIES}
"""
LONG = f"""
keyboard.early = ["half a line " * 10_000]
print("begun", flush=True)
{ENTRIES}
"""


@pytest.mark.parametrize(
    ("locale", "shown", "entered"),
    [("C.UTF-8", "half a li\u00f1e", b"half a li\xc3\xb1e"), ("C", "half a li?e", b"half a li?e")],
)
def test_ctrl_c_before_a_prompt_is_drawn_loses_nothing_that_waits_for_it(
    tmp_path: Path, locale: str, shown: str, entered: bytes
) -> None:
    with keyboard(tmp_path, PRESS_FIRST, LC_ALL=locale) as child:
        child.expect_exact(f"> {shown}")
        child.send("\r")
        child.expect_exact(f"entered {entered!r}")
        child.expect_exact("> ")
        until(lambda: waits(child.pid), "the program waits")
        child.sendintr()
        child.expect_exact("Ctrl+C again or Ctrl+D exits")


def test_ctrl_c_that_does_not_wake_the_prompt_is_seen_all_the_same(tmp_path: Path) -> None:
    with keyboard(tmp_path, DEAF) as child:
        child.expect_exact("> ")
        child.sendintr()
        child.expect_exact("Ctrl+C again or Ctrl+D exits")


def test_ctrl_c_while_a_long_line_is_drawn_at_the_prompt_is_seen(tmp_path: Path) -> None:
    with keyboard(tmp_path, LONG) as child:
        child.expect_exact("begun")
        # The terminal takes no more, because nobody reads what is on it
        syscall = Path(f"/proc/{child.pid}/syscall")
        until(lambda: syscall.read_text().startswith("1 0x1 "), "the line is drawn")
        child.sendintr()
        child.expect(r"half a line \s*\r\n")
        child.expect_exact("> ")


PRESSED = (
    KEYBOARD
    + """
master, slave = os.openpty()
report = os.fdopen(os.dup(1), "w")
os.dup2(slave, 0)
os.dup2(slave, 1)
shown, chance = bytearray(), random.Random(1)

def look():
    while True:
        shown.extend(os.read(master, 4096))

def press_after(seconds):
    begun.wait()
    time.sleep(seconds)
    press()

threading.Thread(target=look, daemon=True).start()
for number in range(int(sys.argv[1])):
    begun, result = threading.Event(), ""
    keyboard.early, keyboard._hinted, keyboard.before_prompt = ["half a line"], -100.0, begun.set
    shown.clear()
    thread = threading.Thread(target=press_after, args=(chance.uniform(0, 0.0005),))
    thread.start()
    try:
        keyboard.line("> ", keyboard.early)
    except KeyboardInterrupt:
        result = "".join(keyboard.early)
    thread.join()
    end = time.monotonic() + 10
    while not result and time.monotonic() < end:  # given up by the user, who saw it
        result = "half a line" if b"half a line" in shown else ""
    termios.tcflush(0, termios.TCIFLUSH)
    print(result, file=report, flush=True)
"""
)


@pytest.mark.parametrize("presses", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_ctrl_c_while_a_prompt_is_drawn_is_seen_and_loses_nothing_that_waits_for_it(
    tmp_path: Path, presses: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRESSED, str(presses)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.stdout.split("\n") == ["half a line"] * presses + [""], done.stderr


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
        shown = ESCAPES.sub("", session.output)
        places = [shown.rindex(text) for text in (f"> {path}", "steered", "> and then this")]
        assert places == sorted(places)


def test_a_line_that_came_too_late_for_a_tool_is_the_next_of_the_run(tmp_path: Path) -> None:
    replies = Reply("long " * 30, pace=0.02), Reply("more")
    with serve(*replies) as server, Terminal(tmp_path, server) as session:
        session.enter("begin")
        session.expect("long")
        session.enter("and this")
        session.expect("more")
        session.prompt()
        assert [said(body) for body in server.requests] == [["begin"], ["begin", "and this"]]


def test_what_is_typed_and_not_entered_stands_at_the_next_prompt_and_lines_are_in_the_history(
    tmp_path: Path,
) -> None:
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


def test_what_was_queued_when_the_run_is_stopped_stands_at_the_next_prompts_entry_by_entry(
    tmp_path: Path,
) -> None:
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
        for _ in range(2):
            session.expect(QUESTION)
            session.enter("y")
        session.until(lambda: session.running("sleep"), "the command")
        session.enter("a line")
        session.expect("queued: half a line")
        (session.ws / "go").touch()
        session.prompt()
        assert said(server.requests[-1]) == ["begin", "half a line"]


def test_ctrl_c_in_one_of_several_entries_leaves_the_others_at_the_prompt(tmp_path: Path) -> None:
    replies = waiting_for("go"), Reply("done")
    with serve(*replies) as server, Terminal(tmp_path, server, "-y") as session:
        begin(session)
        session.enter("!sleep 17.5")
        session.expect("queued: !sleep 17.5")
        session.enter("!touch precious")
        session.expect("queued (2)")
        session.type("half")
        session.expect("> half")
        (session.ws / "go").touch()
        session.until(lambda: session.running("sleep 17.5"), "the user's own command")
        session.ctrl_c()
        session.prompt()
        session.expect("!touch precious")
        assert not (session.ws / "precious").exists()
        for text in ("half", ""):
            session.ctrl_c()
            session.prompt()
            session.expect(text)


def test_ctrl_c_behind_a_run_loses_nothing_that_was_typed(tmp_path: Path) -> None:
    """The last line of a run is on the screen before it is over for us."""
    replies = waiting_for("go"), Reply("done")
    with serve(*replies) as server, Terminal(tmp_path, server, "-y") as session:
        begin(session)
        session.enter("/tokens")
        session.expect("queued: /tokens")
        session.type("half")
        session.expect("> half")
        (session.ws / "go").touch()
        session.expect(" out · ")
        # Before the end of the run, or at one of the prompts. The terminal's own key would
        # make the kernel drop what is on its way to the screen
        os.kill(session.child.pid, signal.SIGINT)

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
