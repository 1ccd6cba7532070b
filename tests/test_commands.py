"""Every command of a session, driven at a terminal that is narrow, usual and wide; what the screen shows is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from coder.cli.commands import COMMANDS
from coder.devtools.scripted import Body, Reply
from tests.harness import serve
from tests.terminal import Terminal, bare, rendered

CLEAR = "\x15"  # Ctrl+U: what stands at the prompt

# (entry, answer to a question behind it, what the screen shows then, with ... between its parts)
DRIVEN = [
    ("/help", "", "/exit exit (also Ctrl+D) !command run it in your terminal and add its"),
    ("/name The parser", "", "This conversation: The parser"),
    ("/last", "", "No tool was called yet."),
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
                if shown.startswith("You said"):  # the entry itself stands there like a prompt
                    session.expect("done · ")
                session.prompt()

                def is_shown(before: int = before, shown: str = shown) -> bool:
                    rows = rendered(session.output[before:], columns, 99)
                    text = " ".join(" ".join(rows).split())
                    return all(part in text for part in shown.split(" ... "))

                session.until(is_shown, f"{shown} behind {entry}")
                lines = bare(session.output[before:]).split("\n")
                if entry == "/help":  # further rows hang behind a key
                    last = next(at for at, row in enumerate(lines) if row.startswith("While"))
                    torn += [row for row in lines[:last] if row[:1].isalpha()]
                torn += [
                    line for line in lines if len(line.strip("\r").rpartition("\r")[2]) > columns
                ]
            session.enter("/exit")
            assert session.exit_code() == 0
    assert not torn
    driven = {entry.lstrip(CLEAR + "/").split()[0] for entry, _, _ in DRIVEN}
    assert {names.split()[0] for names in COMMANDS} - driven == {"exit"}
