"""The keys of the prompt and of runs, in a real terminal whose screen is read; files that an entry
attaches; questions."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import sys
import termios
import threading
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest

from coder.abort import Abort
from coder.agent.agent import Queue
from coder.cli.attach import attach
from coder.cli.input import edited
from coder.cli.keys import ESC_TWICE, Keys
from coder.cli.questions import always_offers
from coder.cli.screen import Screen
from coder.cli.typeahead import TypeAhead
from coder.devtools.scripted import Body, Reply
from coder.events import PermissionAsked
from coder.toolset import ToolContext
from tests.harness import contents, serve
from tests.terminal import PATIENCE, QUESTION, ROOT, OneShot, Run, Terminal, bare, rendered

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 20
SHIFT_TAB = "\x1b[Z"
ALT_ENTER = "\x1b\r"
CTRL_G = "\x07"
CTRL_J = "\n"
CTRL_R = "\x12"
CTRL_U = "\x15"
ESC = "\x1b"


def echo(body: Body) -> Reply:
    return Reply("Well.")


def users(body: Body) -> list[Any]:
    return contents(body["messages"], "user")


def waiting_for(name: str) -> Reply:
    """A command that runs until the file `name` is there, and one after it."""
    wait = f"until [ -e {name} ]; do sleep 0.02; done; echo over"
    return Reply(
        calls=[
            ("bash", {"command": wait}),
            ("bash", {"command": "echo second"}),
        ]
    )


def begin(session: Terminal) -> None:
    session.enter("begin")
    session.until(lambda: session.running("sleep"), "the command")


def shows(session: Terminal, *rows: str, columns: int = 80) -> None:
    """Wait until the screen ends with these rows."""

    def holds() -> bool:
        shown = [row for row in rendered(session.output, columns, 200) if row]
        return shown[-len(rows) :] == list(rows)

    session.until(holds, f"the rows {rows}")


# ---- the prompt --------------------------------------------------------------------------


@contextlib.contextmanager
def prompt(tmp_path: Path, columns: int = 80, **more: str) -> Iterator[Terminal]:
    """A session with a screen of so many columns, whose model says little."""
    with serve(echo) as server, Terminal(tmp_path, server, **more) as session:
        session.child.setwinsize(24, columns)
        yield session


def sends(session: Terminal, *entries: str, columns: int = 80) -> None:
    """Press Enter, and wait until these are the user's messages, and for the next prompt."""
    session.enter("")
    requests = session.server.requests
    session.until(
        lambda: requests and users(requests[-1]) == list(entries),
        f"{entries} are sent",
    )
    shows(session, "❯", columns=columns)


WIDTHS = pytest.mark.parametrize("columns", [40, 80, 200])


@WIDTHS
def test_ctrl_j_and_alt_enter_begin_a_new_line_of_the_entry(tmp_path: Path, columns: int) -> None:
    with prompt(tmp_path, columns) as session:
        session.type(f"one{CTRL_J}two{ALT_ENTER}three")
        shows(session, "❯ one", "two", "three", columns=columns)
        sends(session, "one\ntwo\nthree", columns=columns)


COMPLETED = {
    "/und": "/undo",
    "/agent pl": "/agent plan",
    "/agent x": "/agent x",
    "@": "@src/",  # no hidden file
    "@.h": "@.hidden",
    "@s": "@src/",
    "@src/call": "@src/call\\ me.py",
    "@src/call\\ m": "@src/call\\ me.py",
    "@src/": "@src/cal",
    "me@s": "me@s",
}


def test_tab_completes_a_command_what_can_follow_it_and_a_path(tmp_path: Path) -> None:
    (tmp_path / "ws" / "src").mkdir(parents=True)
    for name in (".hidden", "src/calc.py", "src/call me.py"):
        (tmp_path / "ws" / name).write_text("1\n")
    with prompt(tmp_path) as session:
        for typed, completed in COMPLETED.items():
            session.type(f"{typed}\t")
            shows(session, f"❯ {completed}")
            session.type(CTRL_U)


@WIDTHS
def test_shift_tab_changes_the_mode_and_keeps_the_line(tmp_path: Path, columns: int) -> None:
    """A line of several rows, too."""
    wide = "wide " * 60
    shown = f"plan ❯ {wide}".rstrip()
    rows = [shown[at : at + columns].rstrip() for at in range(0, len(shown), columns)]
    with prompt(tmp_path, columns) as session:
        session.type("words")
        for label in ("plan ", "yolo ", ""):
            session.type(SHIFT_TAB)
            shows(session, f"{label}❯ words", columns=columns)
        session.type(f"{CTRL_U}{wide}{SHIFT_TAB}")
        shows(session, *rows, columns=columns)
        session.type(f"{CTRL_U}{SHIFT_TAB}{SHIFT_TAB}")
        shows(session, "❯", columns=columns)


def test_ctrl_g_lets_the_editor_change_the_entry(tmp_path: Path) -> None:
    editor = tmp_path / "ws" / "editor"
    editor.parent.mkdir()
    editor.write_text('#!/bin/sh\nprintf "%s, edited\\nby hand\\n" "$(cat $1)" > $1\n')
    editor.chmod(0o755)
    with prompt(tmp_path, VISUAL=str(editor)) as session:
        session.type(f"a draft{CTRL_G}")
        shows(session, "❯ a draft, edited", "by hand")
        session.type("!")
        sends(session, "a draft, edited\nby hand!")


def test_ctrl_r_finds_an_older_entry_and_ctrl_g_ends_the_search(tmp_path: Path) -> None:
    older = "a draft\nby hand!"
    with prompt(tmp_path) as session:
        session.type(f"a draft{CTRL_J}by hand!")
        sends(session, older)
        session.type("the last one")
        sends(session, older, "the last one")
        session.type(f"{CTRL_R}draft")
        session.expect("hand!")
        session.type(CTRL_G)
        shows(session, "❯ a draft", "by hand!")
        sends(session, older, "the last one", older)


def held(session: Terminal) -> None:
    """Wait until a lone Esc has been given up. Nothing on the screen shows that, but the program
    has then read all keys, and its clock, at which it looks for one, has gone off since."""
    session.until(lambda: unread_keys(session) == 0, "all keys are read")
    before = wakes(session)
    session.until(lambda: wakes(session) >= before + 3, "the clock goes off")


def unread_keys(session: Terminal) -> int:
    """How many bytes wait in the terminal of the program."""
    terminal = os.open(f"/proc/{session.child.pid}/fd/0", os.O_RDONLY | os.O_NOCTTY)
    try:
        size = fcntl.ioctl(terminal, termios.FIONREAD, bytes(4))
    finally:
        os.close(terminal)
    return int.from_bytes(size, sys.byteorder)


def wakes(session: Terminal) -> int:
    """How often the program has waited for something."""
    status = Path(f"/proc/{session.child.pid}/status").read_text()
    return int(re.findall(r"^voluntary_ctxt_switches:\s*(\d+)$", status, re.M)[0])


def esc_twice(session: Terminal, *, pause: bool) -> None:
    """Press Esc twice, until that lists the entries: on a busy machine the second may come too late
    to belong to the first."""
    is_listed = False
    for _ in range(4):
        session.type(ESC)
        if pause:
            held(session)
        session.type(ESC)
        is_listed = session.child.expect_exact(["number: ", pexpect.TIMEOUT], timeout=3) == 0
        if is_listed:
            break
    assert is_listed, session.output[-1000:]


def test_a_lone_esc_at_the_prompt_takes_no_key_and_changes_nothing(tmp_path: Path) -> None:
    """Behind it a letter that Alt gives a meaning, a key that begins with Esc, and what readline
    knows nothing of."""
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        for keys in (
            ["abc\x1b[D\x1b[D", ESC, "fix\x1bf!"],
            [ESC, "build"],
            [ESC, "\x1b[Dc", ESC, "\x1b[D\x1b[Ca"],
            ["up", ESC, "\x1b[A\x1b[B?", ESC, "\x15/home/x"],
        ):
            if keys[0] == ESC:  # on the same empty line as the last one: it is no second one then
                session.child.expect([pexpect.TIMEOUT], timeout=ESC_TWICE)
            for each in keys:
                session.type(each)
                held(session)
            session.say("")
        assert users(server.requests[-1]) == ["afixbc!", "build", "ca", "/home/x"]
        session.type(f"{ESC}/tok")  # with no pause at all
        session.expect("/tok")
        assert "context: " in session.say("ens")


def test_esc_twice_goes_back_to_before_an_entry_that_is_chosen(tmp_path: Path) -> None:
    made = Reply(calls=[("write", {"path": "made", "content": "x"})])
    replies = Reply("1"), made, Reply("2"), Reply("3"), Reply("4"), Reply("5")
    with serve(*replies) as server, Terminal(tmp_path, server, "-y") as session:
        session.type(ESC + ESC)
        session.expect("no entry to go back to")
        session.prompt()
        for entry in ("one", "two\nlines", "three"):
            session.say(entry)
        session.ready()
        session.type("half")
        for pause in (True, False):  # between the two
            esc_twice(session, pause=pause)
            rows = [row for row in rendered(session.output, lines=100) if row]
            assert rows[-4:-1] == ["  1  three", "  2  two lines", "  3  one"]
            session.enter("" if pause else "2")
            shows(session, "yolo ❯ half" if pause else "yolo ❯ two lines")
        assert not (session.ws / "made").exists()
        session.enter("!")
        shows(session, "yolo ❯ half")
        session.enter("")
        shows(session, "yolo ❯")
        session.enter("/back 7")
        shows(session, "There is no entry 7.", "yolo ❯")
        said = [users(body) for body in server.requests[-2:]]
        assert said == [["one", "two lines!"], ["one", "two lines!", "half"]]


def test_a_paste_that_is_taller_than_the_screen_is_folded_and_sent_whole(tmp_path: Path) -> None:
    """Where the cursor is; at its recall from the history, too. Others are in the line as they
    are."""
    tall, other = ("\n".join(f"{word} {n}" for n in range(60)) for word in ("line", "row"))
    wide = "wide " * 2000
    low = "one\n  two"
    mark = "[60 lines pasted]"
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        session.type("see  ok\x1b[D\x1b[D\x1b[D")
        session.paste(tall)
        session.type("!")
        shows(session, f"❯ see {mark}! ok")
        session.enter("")
        session.until(lambda: server.requests, "it is sent")
        shows(session, "❯")
        for pasted in (tall, other, wide, low):
            session.settled()
            session.paste(pasted)
        shows(session, f"❯ {mark}[60 lines pasted'][1 line pasted]one", "  two")
        session.type(SHIFT_TAB + CTRL_U + SHIFT_TAB + SHIFT_TAB + "\x1b[A")
        shows(session, f"❯ see {mark}! ok")
        session.enter("")
        session.until(lambda: len(server.requests) == 2, "it is sent")
        shows(session, "❯")
        session.paste("🎉" * 30_000 + "\n" + low)
        session.enter("")
        session.until(lambda: len(server.requests) == 3, "it is sent")
        shows(session, "❯")
        whole = f"see {tall}! ok"
        assert users(server.requests[-1]) == [
            whole,
            whole,
            "🎉" * 30_000 + "\n" + low,
        ]
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        session.type("\x1b[A\x1b[A")
        shows(session, f"❯ {mark}")
        session.enter("")
        session.until(lambda: server.requests, "it is sent")
        shows(session, "❯")
        assert users(server.requests[-1]) == [whole]


POOR = [
    {"LC_ALL": "C"},
    {"LC_ALL": "C", "PYTHONUTF8": "0"},
    {"LC_ALL": "xx_YY.UTF-8"},
]
POOR += [{"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "utf-8:strict"}]  # as in most other locales


@pytest.mark.parametrize(
    "poor",
    POOR,
    ids=["C", "C without UTF-8", "unknown", "strict"],
)
def test_a_poor_locale_takes_every_character_and_so_does_the_next_start(
    tmp_path: Path, poor: dict[str, str]
) -> None:
    """What readline deletes is a character, not a byte; a command sees the locale that the user has
    set."""
    with serve(echo) as server:
        for keys, sent in (("größ\x7fe → 中", "gröe → 中�"), ("\x1b[A\x1b[A!", "gröe → 中�!")):
            with Run(tmp_path, server, **poor) as session:
                session.expect("\x1b[0m")  # the prompt
                session.settled()
                session.type(keys)
                if "中" in keys:
                    os.write(session.child.child_fd, b"\xff")  # no text
                session.enter("")
                session.expect("1 step")
                session.expect("\x1b[0m")
                session.settled()
                session.enter("!echo is $LC_ALL")
                session.expect(f"is {poor['LC_ALL']}")
                session.expect("\x1b[0m")
                assert users(server.requests[-1])[0] == sent
                assert session.leave() == 0


@pytest.mark.parametrize(
    ("editor", "why"),
    [("no-such-editor", ""), ("false", "exit code 1. ")],
)
def test_an_editor_that_fails_leaves_the_entry_as_it_was(
    editor: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", editor)
    assert edited("a draft") == "a draft"
    assert f"{why}$EDITOR is {editor}." in capsys.readouterr().out


# ---- a line during runs --------------------------------------------------------------------------


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
    line = TypeAhead(Screen(io.StringIO()), Queue(), Queue())
    keys = Keys()
    assert [line.take(keys.feed(read.encode())) for read in reads][-1] == entry
    assert line.text == left


def test_a_plus_alone_asks_the_model_nothing_and_keys_are_taken_out() -> None:
    line = TypeAhead(Screen(io.StringIO()), Queue(), Queue())
    line.redact = lambda text: text.replace("KEY", "***")
    for entry in ("+", "+ later KEY", "now KEY"):
        line.enter(entry)
    assert line.take_lines() == ["now ***", "later ***"]


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
        assert [users(body) for body in server.requests] == [
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
        assert users(server.requests[-1]) == ["begin", "in between", "look at this other things"]
        session.ready()
        session.type("\x1b[A\x1b[A")
        session.expect("in between")
        session.say("")
        assert users(server.requests[-1])[-1] == "in between"


def test_a_command_that_is_stopped_stops_those_after_it(tmp_path: Path) -> None:
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
        assert users(server.requests[-1]) == ["begin", "not so!", "later", "half"]


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
        assert users(server.requests[-1]) == ["begin", "!touch x\n/exit\n+two"] * 2
        assert not (session.ws / "x").exists()


def test_a_question_is_answered_by_later_keys_and_the_line_goes_on(tmp_path: Path) -> None:
    typed = threading.Event()
    replies = iter(
        [
            Reply(calls=[("bash", {"command": "touch hi"})]),
            waiting_for("go"),
            Reply("x"),
        ]
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
        assert users(server.requests[-1]) == ["begin", "half a line"]


def test_esc_stops_a_run_and_a_key_that_begins_with_it_does_not(tmp_path: Path) -> None:
    replies = waiting_for("never"), Reply("Well.")
    with serve(*replies) as server, Terminal(tmp_path, server, "-y") as session:
        begin(session)
        for keys in ("\x1b[A", "\x1bf", "\x1bOP", "half"):
            session.type(keys)
        session.expect("half")
        session.type(ESC + ESC)
        assert "stopped by the user" in session.prompt()
        shows(session, "yolo ❯ half")
        session.say(" a line")
        assert users(server.requests[-1]) == ["begin", "half a line"]
        assert len(server.requests) == 2


ASK_USER = "ask_user", {"question": "Which?", "options": []}


@pytest.mark.parametrize("typed", ["", "a reason", "answer: "])
def test_esc_at_a_question_stops_the_run(tmp_path: Path, typed: str) -> None:
    """Also if words have been begun, and at a question of the model's."""
    call = ASK_USER if typed == "answer: " else ("bash", {"command": "touch made"})
    replies = (
        Reply(
            calls=[
                call,
                ("bash", {"command": "touch more"}),
            ]
        ),
        Reply("Well."),
    )
    with serve(*replies) as server, Terminal(tmp_path, server) as session:
        session.enter("begin")
        session.expect(typed if call == ASK_USER else QUESTION)
        if typed == "a reason":
            session.type(typed)
            session.expect(typed)
            held(session)
        session.type(ESC)
        assert "stopped by the user" in session.prompt()
        session.say("and on")
        assert users(server.requests[-1]) == ["begin", "and on"]
        assert len(server.requests) == 2
        assert not list(session.ws.iterdir())


def test_esc_at_the_question_of_one_task_ends_it(tmp_path: Path) -> None:
    call = Reply(calls=[("bash", {"command": "touch made"})])
    with (
        serve(call, Reply("Well.")) as server,
        Run(tmp_path, server, "make it") as session,
    ):
        session.expect(QUESTION)
        session.type(ESC)
        assert session.exit_code() == 130
        assert len(server.requests) == 1


# ---- files and images --------------------------------------------------------------------


def test_letters_of_a_path_find_files_and_the_list_shows_at_the_first_tab(tmp_path: Path) -> None:
    ws = tmp_path / "ws"
    for name in ("src/parser/tokens.py", "tests/test_tokens.py", "to/ken/x.py", "lib/two words.c"):
        (ws / name).parent.mkdir(parents=True, exist_ok=True)
        (ws / name).write_text("1\n")
    for number in range(300):
        (ws / f"many{number:03}").touch()
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        for typed, shown in (
            ("see @tok\t", ["❯ see @src/parser/tokens.py"]),
            ("@s/pt\t", ["❯ @src/parser/tokens.py"]),
            ("@tWOw\t", ["❯ @lib/two\\ words.c"]),
            ("@nothing\t", ["❯ @nothing"]),
            ("@_tok\t", ["❯ @tests/test_tokens.py"]),
            ("@kens\t", ["@src/parser/tokens.py", "@tests/test_tokens.py", "❯ @kens"]),
            ("/res\t", ["/reset   /resume", "❯ /res"]),
        ):
            session.type(typed)
            shows(session, *shown)
            session.type(CTRL_U)
        session.type("@m\t\t")
        shows(session, "❯ @many")
        more = "\n".join(rendered(session.output, lines=200))
        assert "… 140 more" in more, more
        session.type(CTRL_U)
        said = bare(session.say("see @tok, @src/parser/tokens.py"))
        assert "attached: src/parser/tokens.py (1 line), not tok (there is no such file)" in said


def test_files_that_are_too_long_together_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, lines in {"a": 1, "b": 21, "c": 1}.items():
        Path(name).write_text("word\n" * lines)
    text, _, notes = attach(
        "see @a @b @c",
        ToolContext(tmp_path, Abort()),
        most=50,
    )
    assert notes == ["a (1 line)", "not b (more than 50 characters in all)", "c (1 line)"]
    assert text.count("<attached") == 2


def test_an_entry_attaches_the_files_that_it_names(tmp_path: Path) -> None:
    """A file outside the folder, too, and one that may hold secrets; the keys in it are taken
    out."""
    ws = tmp_path / "ws"
    (ws / "sub").mkdir(parents=True)
    (ws / "a b.txt").write_text("first\nsecond\n")
    (ws / "picture.png").write_bytes(PNG)
    (ws / "data.bin").write_bytes(b"a\0b")
    (ws / "sub" / "long").write_text("word\n" * 9_000)
    outside = tmp_path / "home" / ".env"
    outside.parent.mkdir()
    outside.write_text("PLAIN=here\n")
    entry = f"see @a\\ b.txt, @picture.png @sub @{outside} (@data.bin) @sub/long @gone me@sub @dataclass"
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        outside.write_text(f"PLAIN=here\nKEY={session.key}\n")
        session.child.setwinsize(24, 200)
        session.say(entry)
        outside.unlink()
        text, image = users(server.requests[-1])[0]
        assert image["image_url"]["url"].endswith(b64encode(PNG).decode())
        words, *files = text["text"].split("\n\n<attached ")
        assert words == entry
        assert files[0] == 'path="a b.txt">\nfirst\nsecond\n</attached>'
        assert files[1] == 'path="sub">\nlong\n</attached>'
        assert "PLAIN=here" in files[2]
        assert session.key not in files[2]
        assert "use offset=2001 to go on" in files[3]
        assert len(files) == 4
        shown = " ".join(rendered(session.output, 200, 50))
        assert "attached: a b.txt (2 lines), picture.png (image), sub (1 line), " in shown
        assert "not gone (there is no such file), not dataclass (there is" in shown
        assert "not data.bin (data.bin is a binary file of 3 bytes)" in shown
        session.say("/undo")
        shows(
            session,
            *(f"❯ {entry}"[at : at + 200] for at in range(0, len(entry) + 2, 200)),
            columns=200,
        )
        session.type(CTRL_U)


def test_an_image_goes_with_the_first_prompt_in_both_modes(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(PNG)
    flags = ("--image", "../picture.png") * 2
    with serve(echo) as server:
        with OneShot(tmp_path / "a", server, *flags, "what is it?") as once:
            assert once.end() == 2
            assert "../picture.png: No such file" in once.err
        with OneShot(tmp_path, server, *flags, "what is it?") as once:
            assert once.end() == 0
        with Terminal(tmp_path, server, *flags) as session:
            session.say("what is it?")
            session.say("and now?")
        (tmp_path / "ws/fake.png").write_text("no picture")
        with OneShot(tmp_path, server, "--image", "fake.png", "hi") as once:
            assert once.end() == 2
            assert "fake.png: it is no image" in once.err
        for body in server.requests[:2]:
            text, *images = users(body)[0]
            assert text["text"] == "what is it?"
            assert len(images) == 2
        assert users(server.requests[2])[1] == "and now?"


class Plain(Terminal):
    pattern = "\r\n❯ "


def shadowed(folder: Path, readline: str) -> dict[str, str]:
    """The environment of a session that finds this module in the place of readline."""
    shadow = folder / "home" / "shadow"
    shadow.mkdir(parents=True)
    (shadow / "readline.py").write_text(readline)
    return {"PYTHONPATH": f"{shadow}:{ROOT}"}


def test_without_readline_lines_and_answers_end_with_enter(tmp_path: Path) -> None:
    path = shadowed(tmp_path, "raise ImportError\n")
    call = Reply(calls=[("bash", {"command": "touch here"})])
    with (
        serve(call, Reply("Well.")) as server,
        Plain(tmp_path, server, **path) as session,
    ):
        session.enter("go")
        session.expect("why not: ")
        session.enter("y")
        session.prompt()
        assert (session.ws / "here").exists()
        session.say("and on")
        assert users(server.requests[-1]) == ["go", "and on"]
        assert session.say("/undo").endswith("\r\nand on"), "it is above the prompt"


LIBEDIT = """
'A readline built with libedit, which drops what is prefilled.'
def __getattr__(name):
    return lambda *given: 0
"""
WAITING = """
'It waits where its terminal is gone, and looks at no signal.'
import builtins, ctypes, signal, sys
def wait(prompt):
    sys.stdout.write(prompt)
    sys.stdout.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
    ctypes.CDLL(None).pause()
builtins.input = wait
"""


def test_a_terminal_that_is_gone_ends_a_session_on_libedit(tmp_path: Path) -> None:
    shadow = shadowed(tmp_path, LIBEDIT + WAITING)
    with serve(echo) as server, Run(tmp_path, server, **shadow) as session:
        session.expect("❯ ")
        session.settled()
        session.hang_up()  # after which no process may be left


def test_on_libedit_queued_lines_stand_above_the_prompts_one_by_one(tmp_path: Path) -> None:
    shadow = shadowed(tmp_path, LIBEDIT)
    replies = waiting_for("never"), Reply("Well.")
    with (
        serve(*replies) as server,
        Run(tmp_path, server, "-y", **shadow) as session,
    ):
        session.expect("❯ ")
        session.type("begin\n")
        session.until(lambda: session.running("sleep"), "the command")
        for entry in ("first", "second"):
            session.enter(entry)
            session.expect("queued")
        session.ctrl_c()
        session.expect("\nfirst\r\n")
        session.expect("❯ ")
        session.type("on\n")
        session.expect("Well.")
        session.expect("\nsecond\r\n")
        session.expect("❯ ")
        assert session.leave() == 0


CI = "npm run test:ci -- -x"
EXACT = [
    *("rm -rf x", "git -c a=b diff", "git diff | sh", "git 'a b'", "npm run", "cd x && git diff"),
    *("git $X", "sudo git diff", "git diff; rm x"),
]


@pytest.mark.parametrize(
    ("permission", "pattern", "remember", "offers"),
    [
        ("bash", "git diff HEAD", "git diff HEAD", {"a": "git diff HEAD", "p": "git diff *"}),
        ("bash", CI, "…", {"a": CI, "p": "npm run test:ci *"}),
        *(("bash", command, command, {"a": command}) for command in EXACT),
        ("edit", "src/a.py", "*", {"a": "src/a.py", "p": "*"}),
        ("edit", "a.py, b.py", "*", {"p": "*"}),
        ("edit", "*", "*", {"p": "*"}),
        ("edit", ".git/config", "", {}),
        ("external_directory", "/etc/hosts", "/etc/*", {"a": "/etc/hosts", "p": "/etc/*"}),
        ("read", ".env", ".env", {"a": ".env"}),
    ],
)
def test_what_a_key_would_allow_for_the_session(
    permission: str, pattern: str, remember: str, offers: dict[str, str]
) -> None:
    """An exact rule is not offered if a star or a list of files would make a pattern of it."""
    asked = PermissionAsked("1", permission, pattern, remember)
    assert {key: stored for key, (_, stored) in always_offers(asked).items()} == offers


@pytest.mark.parametrize(
    ("permission", "pattern", "remember", "words"),
    [
        ("bash", "git diff HEAD", "git diff HEAD", "[a]lways exactly this, [p] always git diff *"),
        ("unconfined", "git fetch", "git fetch", "[a]lways exactly this"),
        ("edit", "src/a.py", "*", "[a]lways this file, [p] always edit here"),
        ("read", ".env", ".env", "[a]lways this file"),
        (
            "external_directory",
            "/etc/hosts",
            "/etc/*",
            "[a]lways exactly this, [p] always read in /etc",
        ),
        ("external_directory", "/x", "/*", "[a]lways exactly this, [p] always read in /"),
        ("mcp", "time__now", "time__now", "[a]lways this tool, [p] always tools of time"),
        ("deploy", '{"to": "x"}', '{"to": "x"}', "[a]lways exactly this, [p] always deploy"),
        ("task", "general", "general", "[a]lways exactly this"),
    ],
)
def test_what_a_key_would_allow_is_said_in_words(
    permission: str, pattern: str, remember: str, words: str
) -> None:
    asked = PermissionAsked("1", permission, pattern, remember)
    offers = always_offers(asked)
    assert ", ".join(f"[{key}]{text}" for key, (text, _) in offers.items()) == words
    if permission == "deploy":
        assert offers["p"][1] == "*"


@pytest.mark.parametrize(
    ("typed", "sent"),
    [("a line\r", "a line"), ("half ", "half a line")],
)
def test_what_was_typed_before_the_start_is_not_lost(tmp_path: Path, typed: str, sent: str) -> None:
    with serve(echo) as server, Run(tmp_path, server) as session:
        session.type(typed)
        if typed == "half ":
            shows(session, "❯ half")
            session.type("a line\r")
        session.expect("done · 1 step")
        session.prompt()
        session.ready()
        assert session.leave() == 0
        assert users(server.requests[-1]) == [sent]


STOPPED_DURING_A_WRITE = """
import io, os, signal, sys
from coder.cli import keys, process

class Stopped(process.Output):
    def write(self, data):
        if bytes(data).startswith(b"hello"):
            os.kill(os.getpid(), signal.SIGTSTP)  # no shell: the default action is nothing
        return super().write(data)

keys.keep_modes()
sys.stdout = io.TextIOWrapper(io.BufferedWriter(Stopped(1, needed=True)), line_buffering=True)
draw = lambda: print("drawn")
with keys.tty_flags(off="ICANON"), keys.drawn_again(draw):
    print("hello")
print("over")
"""


def test_ctrl_z_during_a_write_breaks_nothing(tmp_path: Path) -> None:
    child = pexpect.spawn(
        sys.executable, ["-c", STOPPED_DURING_A_WRITE], cwd=ROOT, timeout=PATIENCE
    )
    child.expect_exact("over")
    assert b"hello" in child.before
    assert b"Traceback" not in child.before
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
