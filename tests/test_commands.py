"""Every command of a session, driven at a terminal that is narrow, usual and wide; what the screen
shows is read."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest

import coder.cli.commands  # noqa: F401  (which fills the table)
from coder.cli.command_table import COMMANDS
from coder.devtools.scripted import Body, Reply
from tests.harness import serve
from tests.terminal import OneShot, Terminal, bare, promptly, rendered

CLEAR = "\x15"  # Ctrl+U: what is at the prompt

# (entry, answer to a question after it, what the screen shows then, with ... between its parts)
DRIVEN = [
    ("/help", "", "/exit exit (also Ctrl+D) !command run it in your terminal and add its"),
    ("/name The parser", "", "This conversation: The parser"),
    ("/last", "", "No tool was called yet."),
    ("/copy", "", "Copied 15 characters by the terminal, if it takes that (OSC 52)"),
    ("/model", "2", "* script 2 other-model number or name: 2 other-model at 127.0.0.1"),
    ("/agent", "", "* build"),
    ("/plan", "", "Agent plan:"),
    ("/agent build", "", "Agent build:"),
    ("/permissions", "", "The last rule that matches an action decides. Without one,"),
    ("/mode", "", "plan ❯"),
    ("/mode", "", "yolo ❯"),
    ("/mode", "", "/mode ❯"),
    ("/yolo", "", "Commands and edits are no longer asked about; /yolo turns that off."),
    ("/yolo", "", "Asking again."),
    ("/reasoning low", "", "reasoning: low, hidden"),
    (
        "/reasoning much",
        "",
        "/reasoning accepts off, minimal, low, medium, high, xhigh, show or hide.",
    ),
    ("/tools", "", "bash Run a command in bash"),
    ("/skills", "", "There are no skills. They are folders with a SKILL.md: docs/settings.md"),
    ("/tokens", "", "this session: "),
    ("/summary", "", "said <conversation>"),
    ("/compact", "", "stays as it is: there is nothing old in it."),
    ("/diff", "", "No file was changed."),
    ("/export out.md", "", "Written to out.md."),
    ("/undo", "", "Undone: no file was changed."),
    (f"{CLEAR}/redo", "", "Redone: no file was changed."),
    ("/back", "1", "1 hello number: 1 Undone: no file was changed."),
    (f"{CLEAR}/redo", "", "Redone: no file was changed."),
    ("/new", "", "A new conversation."),
    ("/resume", "1", "1 now The parser (2 messages ... hello → You said hello. ... id: 1"),
    ("/editor some words", "", "❯ some words"),
    (f"{CLEAR}/init", "", "You said"),
    ("/review", "", "You said"),
]


def echo(body: Body) -> Reply:
    return Reply(f"You said {str(body['messages'][-1]['content'])[:20]}.")


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_every_command_answers_in_rows_that_fit(tmp_path: Path, columns: int) -> None:
    class Resized(Terminal):
        pass

    Resized.columns = columns
    torn = []
    with serve(echo) as server:
        server.models = ["script", "other-model"]
        with Resized(tmp_path, server, EDITOR="true") as session:
            session.say("hello")
            for entry, answer, shown in DRIVEN:
                before = len(session.output)
                session.enter(entry)
                if answer:
                    session.expect(": ")
                    session.enter(answer)
                if shown.startswith("You said"):  # the entry itself looks like a prompt there
                    session.expect("done · ")
                session.prompt()

                def is_shown(before: int = before, shown: str = shown) -> bool:
                    rows = rendered(session.output[before:], columns, 99)
                    text = " ".join(" ".join(rows).split())
                    return all(part in text for part in shown.split(" ... "))

                session.until(is_shown, f"{shown} after {entry}")
                lines = bare(session.output[before:]).split("\n")
                if entry == "/help":  # further rows follow a key
                    last = next(at for at, row in enumerate(lines) if row.startswith("While"))
                    torn += [row for row in lines[:last] if row[:1].isalpha()]
                for line in lines:
                    row = line.strip("\r").rpartition("\r")[2]
                    is_path = re.fullmatch(r"/\S+", row)  # which the terminal breaks, to be copied
                    if len(row) > columns and not is_path:
                        torn.append(line)
            session.enter("/exit")
            assert session.exit_code() == 0
    assert not torn, (
        "too wide for the terminal: shorten the words of a help, cut with one_line, "
        "or give a path a row of its own"
    )
    driven = {entry.lstrip(CLEAR + "/").split()[0] for entry, _, _ in DRIVEN}
    assert COMMANDS.keys() - driven == {"exit", "step"}, (  # test_step.py has the latter
        "add a row to DRIVEN"
    )


# ---- /copy, /last N and /review ------------------------------------------------------------------

ANSWER = "An **answer**.\n\n```sh\nls ~/é\n```"


def copied(output: str) -> str:
    """What a terminal that takes OSC 52 has on its clipboard."""
    *_, sent = re.findall(r"\x1b\]52;c;([A-Za-z0-9+/=]*)\x07", output)
    return base64.b64decode(sent).decode()


def test_an_answer_is_copied_as_the_model_wrote_it(tmp_path: Path) -> None:
    evil = Reply("run\x1b[2J\x07 this\r\x08")
    with (
        serve(Reply(ANSWER), evil) as server,
        Terminal(tmp_path, server) as session,
    ):
        assert "There is no answer yet." in session.say("/copy")
        session.say("go")
        assert f"Copied {len(ANSWER)} characters by the terminal" in bare(session.say("/copy"))
        assert copied(session.output) == ANSWER
        assert "Written to out.md." in session.say("/copy out.md")
        assert (session.ws / "out.md").read_text() == f"{ANSWER}\n"
        assert "File exists" in session.say("/copy out.md")
        session.say("go")
        session.say("/copy")
        assert copied(session.output) == "run this"


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ('cat > "$HOME/clipboard"', "by xclip"),
        ("exit 1", "by the terminal, if it takes that"),
        ("sleep 100", "by the terminal, if it takes that"),
    ],
)
def test_a_program_of_the_desktop_copies_too(tmp_path: Path, script: str, told: str) -> None:
    program = tmp_path / "home" / "bin" / "xclip"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{script.replace('sleep', 'exec sleep')}\n")
    program.chmod(0o755)
    desktop = {"DISPLAY": ":9", "PATH": f"{program.parent}:/usr/bin:/bin"}
    with (
        serve(Reply(ANSWER)) as server,
        Terminal(tmp_path, server, **desktop) as session,
    ):
        session.say("go")
        with promptly():
            assert told in bare(session.say("/copy"))
        if told == "by xclip":
            assert (session.home / "clipboard").read_text() == ANSWER
        assert copied(session.output) == ANSWER


def test_if_nothing_takes_a_copy_a_file_is_named_as_the_way(tmp_path: Path) -> None:
    with (
        serve(Reply(ANSWER)) as server,
        Terminal(tmp_path, server, TERM="linux") as session,
    ):
        session.say("go")
        shown = bare(session.say("/copy"))
        assert "no clipboard" in shown
        assert "/copy FILE" in shown
        assert "\x1b]52" not in session.output


def test_an_older_tools_output_is_shown_by_its_number(tmp_path: Path) -> None:
    calls = [
        (
            "bash",
            {"command": f"seq {n}01 {n}20"},
        )
        for n in (1, 2, 3)
    ]
    with (
        serve(Reply(calls=calls), Reply("done")) as server,
        Terminal(tmp_path, server, "-y") as session,
    ):
        session.say("go")
        for entry, first in (
            ("/last", "301"),
            ("/last 1", "301"),
            ("/last 3", "101"),
        ):
            shown = [row.strip() for row in bare(session.say(entry)).split("\n")]
            assert f"bash seq {first} {first[0]}20" in shown
            assert first in shown
            assert sum(row.isdecimal() for row in shown) == 20
        for entry in ("/last 4", "/last 0", "/last all", "/last \u00b2"):
            shown = session.say(entry)
            rows = [row.split() for row in bare(shown).split("\n")]
            assert ["1", "bash", "seq", "301", "320"] in rows
            assert ["3", "bash", "seq", "101", "120"] in rows


def test_a_review_is_asked_for_and_a_file_of_that_name_is_used_instead(tmp_path: Path) -> None:
    def entered() -> str:
        return str(server.requests[-1]["messages"][-1]["content"])

    with serve(echo) as server:
        with Terminal(tmp_path, server) as session:
            session.say("/review")
            assert "uncommitted" in entered()
            assert "Change no file" in entered()
            session.say("/review HEAD~2 and the tests")
            assert "HEAD~2 and the tests" in entered()
            assert "uncommitted" not in entered()
        with OneShot(tmp_path, server, "/review main..") as run:
            assert run.end() == 0
        assert "main.." in entered()
        assert "Change no file" in entered()
        own = tmp_path / "home" / ".config" / "coder" / "commands" / "review.md"
        own.parent.mkdir(parents=True)
        own.write_text("Look at $1 my way.")
        with Terminal(tmp_path, server) as session:
            session.say("/review this")
            assert entered() == "Look at this my way."
            assert "ignored" not in session.output
