"""The session at the prompt, in a real terminal: entries, commands, questions, and what is shown
while a run goes on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from coder.cli.keys import PASTE_BEGINS, PASTE_ENDS
from coder.devtools.scripted import Body, Reply
from tests.harness import serve
from tests.terminal import QUESTION, OneShot, Run, Terminal, bare, rendered


def echo(body: Body) -> Reply:
    return Reply(f"You said: {body['messages'][-1]['content']!r}")


def sent(body: Body) -> list[Any]:
    """The messages after the system's."""
    return [message["content"] for message in body["messages"][1:]]


def entered(server: Any) -> list[Any]:
    return [body["messages"][-1]["content"] for body in server.requests]


# ---- entries -----------------------------------------------------------------------------


TYPOS = {
    "/Help": "did you mean /help?",
    "/model_x": "did you mean /model?",
    "/\u5e2e\u52a9 me": "/help lists them.",
    "/cmpact now": "did you mean /compact?",
}


def test_a_conversation_goes_on_and_each_run_ends_with_its_line(tmp_path: Path) -> None:
    with (
        serve(echo) as server,
        Terminal(tmp_path, server, "-i", "look at this") as session,
    ):
        banner = f"script at 127.0.0.1:{server.port}"
        assert banner in session.output
        assert "/ws" in session.output
        assert "❯ look at this" in bare(session.output).split("\r\n"), "the entry of -i"
        for typed, hint in TYPOS.items():
            shown = bare(session.say(typed))
            assert f"There is no command {typed.split()[0]}; {hint}" in shown
        first = bare(session.say("/home/me/x.py is broken"))  # a path is no command
        assert "You said: '/home/me/x.py is broken'" in first
        assert re.search(
            r"done · 1 step · [\d.k]+ in, \d+ out · 99 % of the context left · \d+\.\d s", first
        )
        assert entered(server) == ["look at this", "/home/me/x.py is broken"]
        session.enter("/exit")
        assert session.exit_code() == 0


BLOCK = "!touch x\n/yolo\n  exit\n"
BLOCKS = [BLOCK, "/yolo\n!touch x", "\\\nexit\n", '"""Words."""\n!touch x\n', "\n/yolo\n"]


def test_an_entry_of_several_lines_is_one_message_and_no_command(tmp_path: Path) -> None:
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        for line in ('"""one', "  two", "four\\", '"""six'):
            session.enter(line)
            session.expect(". ")
            if line == "  two":
                session.say('three"""')
            elif line.startswith("four"):
                session.say("five")
        session.ctrl_d()  # ends an entry, too
        session.prompt()
        for block in BLOCKS:
            session.ready()
            session.paste(block)
            session.say("")
        session.ready()
        session.paste(BLOCK, marks=False)  # by a terminal that does not mark it
        session.prompt()
        typed = ["one\n  two\nthree", "four\nfive", "six"]
        assert entered(server) == [
            *typed,
            *map(str.strip, [*BLOCKS, BLOCK]),
        ]
        assert not (session.ws / "x").exists()
        assert "Asking again" not in session.say("/yolo")


def test_histories_are_kept_privately_and_the_folders_own_comes_first(tmp_path: Path) -> None:
    """Of several sessions, with blocks as one entry."""
    history = tmp_path / "data" / "coder" / "history"
    here = tmp_path / "here"
    shared = {"XDG_DATA_HOME": str(tmp_path / "data")}
    history.parent.mkdir(parents=True, mode=0o755)
    with serve(echo) as server:
        with (
            Terminal(tmp_path / "there", server, **shared) as there,
            Terminal(here, server, **shared) as session,
        ):
            session.say("here")
            session.ready()
            session.paste("!touch x\nlast")
            session.say("")
            there.say("there")
        modes = [each.stat().st_mode & 0o777 for each in (history, history.parent)]
        assert modes == [0o600, 0o700]
        history.write_text("of an older version\n" + history.read_text())
        with Terminal(here, server, **shared) as session:
            for row in ("last", "❯ here", "❯ there", "❯ of an older version"):
                session.type("\x1b[A")
                session.until(
                    lambda row=row: row in rendered(session.output, lines=200),
                    row,
                )
            session.type("\x1b[B" * 3)
            session.say("")
            session.say("!rmdir $PWD")  # the end needs no folder
            assert "exit code" not in session.output
        assert entered(server)[-1] == "!touch x\nlast"


# ---- commands of the user's own ----------------------------------------------------------


def test_a_command_of_ones_own_is_added_but_not_with_two_marks(tmp_path: Path) -> None:
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        shown = bare(session.say("!echo a; echo b >&2 | sed s/b/ab/; exit 3"))
        assert shown.endswith("\ra\r\nb\r\n[exit code 3]")
        assert "secret" in session.say("!!test -t 1 && echo secret")
        session.say("!printf 'one\\rtwo\\033[31mred\\n\\nend\\n'")
        session.say("!true")
        session.say("!printf abc")  # the prompt begins a line
        session.say("well?")
        outputs = [
            text.partition("` myself. Its output:\n")[2] or text
            for text in sent(server.requests[0])
        ]
        assert outputs == ["a\nb\n[exit code 3]", "twored\n\nend", "(no output)", "abc", "well?"]
        session.say("!echo after the run")
        session.say("/undo")  # takes back the run alone
        session.say("")
        assert ["after the run" in text for text in sent(server.requests[1])] == [
            *[False] * 4,
            True,
            False,
        ]


def test_a_command_of_ones_own_has_the_keys_and_ctrl_c_alone(tmp_path: Path) -> None:
    asks = "read -p 'your 'name? name && echo hello $name"
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        for mark in ("!", "!!"):
            session.enter(f"{mark}{asks}")
            session.expect("your name?")  # shown as it comes
            session.enter("Ada")
            session.expect("hello Ada")
            session.prompt()
            session.ready()
            session.enter(f"{mark}trap 'echo no' INT; echo ready; sleep 300; sleep 301")
            session.expect("\rready")
            for seconds in (300, 301):
                command = f"sleep {seconds}"
                session.until(lambda command=command: session.running(command), command)
                session.child.sendintr()
            session.prompt()
            session.ready()
        assert server.requests == []
        assert "You said: 'hello'" in session.say("hello")


# ---- questions ---------------------------------------------------------------------------


def touch(*names: str) -> Reply:
    return Reply(calls=[("bash", {"command": f"touch {name}"}) for name in names])


def bash(*commands: str) -> Reply:
    return Reply(calls=[("bash", {"command": command}) for command in commands])


@pytest.mark.parametrize("columns", [40, 120])
def test_one_key_answers_a_question_and_words_are_a_reason(tmp_path: Path, columns: int) -> None:
    """What is to be done is directly above the answer; "always" holds for exactly that command,
    or for the pattern."""
    replies = touch(*"abaacdfgh"), bash("git gc --auto", "git gc"), Reply("done")
    with serve(*replies) as server, Terminal(tmp_path, server) as session:
        session.child.setwinsize(24, columns)
        session.enter("go")
        words = "Run this command? touch a [y]es, [a]lways exactly this, [n]o, or why not:"
        for keys, next_one in (
            ("y", "touch b"),
            ("u|se mktemp\x7fp instead\r", "touch a"),
            ("a", "touch c"),
            ("\r", "touch d"),
            (" yes, but later\r", "touch f"),
            (" y|\x07", "touch g"),  # Ctrl+G gives the answer up
            ("\x04", "touch h"),
            ("n", "git gc"),
        ):
            session.expect(QUESTION)
            shown = " ".join(rendered(session.output, columns, 100)).split("Run this")[-1]
            assert f"Run this {' '.join(shown.split())}" == words
            words = words.replace(words[18:25], next_one)
            begin, _, end = keys.rpartition("|")
            if begin:
                session.type(begin)
                session.expect(f"not: {begin.strip()}")
            session.type(end)
            session.expect(next_one)
        session.expect("always git gc *")
        session.expect(QUESTION)
        session.type("p")
        session.prompt()
        assert [path.name for path in session.ws.iterdir()] == ["a"]
        denied = str(server.requests[-1]["messages"])
        assert "the user refused and wrote: use mktemp instead'" in denied
        assert "the user refused and wrote: yes, but later'" in denied


def test_a_dumb_terminal_takes_blocks_and_answers_with_a_line(tmp_path: Path) -> None:
    replies = touch("a", "b", "c"), Reply("done")
    with (
        serve(*replies) as server,
        Terminal(tmp_path, server, TERM="dumb") as session,
    ):
        session.paste("first\nsecond", marks=False)
        for answer in ("Yes", "n yes, but later", "always"):
            session.expect(QUESTION)
            session.enter(answer)
        session.prompt()
        assert "second" in rendered(session.output), "in a row of its own"
        assert sorted(path.name for path in session.ws.iterdir()) == ["a", "c"]
        assert sent(server.requests[0]) == ["first\nsecond"]
        assert "the user refused and wrote: yes, but later'" in str(server.requests[-1]["messages"])


@pytest.mark.case("FIL-31")
def test_an_edit_is_asked_whole_and_always_does_not_cover_what_git_runs(tmp_path: Path) -> None:
    long = "'" + "a" * 100 + "'; evil()\n"
    content = f"-- keep\n++ os.system('evil')\nx = {long}" + "line\n" * 80 + "last()\n"
    first = [("write", {"path": "g", "content": content})]
    second = [
        ("write", {"path": "f", "content": "one\n"}),
        ("edit", {"path": "f", "old_string": "one", "new_string": "two"}),
        ("write", {"path": ".git/hooks/pre-commit", "content": "evil\n"}),
    ]
    replies = Reply(calls=first), Reply(calls=second), Reply("done")
    with serve(*replies) as server, Terminal(tmp_path, server) as session:
        session.enter("go")
        asked = bare(session.expect(QUESTION)).replace("\r\n", "\n")
        assert "Make this change?" in asked
        below = asked.split("more than the screen shows.)")[1]  # again, what the last key would do
        assert below.split("[")[0].split() == ["Make", "this", "change?", "g"]
        assert "[a]lways this file, [p] always edit here, [n]o, or" in " ".join(below.split())
        for part in ("+ ++ os.system('evil')", "+ -- keep", "'; evil()", "+ last()"):
            assert part in asked, "what looks like a header is a line like any other"
        session.type("n")
        session.expect(QUESTION)
        session.type("p")
        shown = bare(session.expect(QUESTION))
        assert (session.ws / "f").read_text() == "two\n"
        assert "- one" in shown
        assert "+ two" in shown
        assert ".git/hooks/pre-commit" in shown
        assert "[a]lways" not in shown
        session.enter("a")  # is not offered, so it is a reason
        session.prompt()
        assert sorted(path.name for path in session.ws.iterdir()) == ["f"]


TYPED = dict.fromkeys(["y", "y\r", "y\n", "yes\n"], True)
TYPED |= dict.fromkeys(["n\n", "\n", "y\ry\r", f"{PASTE_BEGINS}y\ry\r{PASTE_ENDS}\r"], False)


def test_an_answer_may_end_with_enter_or_newline_and_a_paste_is_none(tmp_path: Path) -> None:
    asks = ("ask_user", {"question": "Which?", "options": []})
    same = Reply(calls=[("ls", {})])
    replies = touch(*map(str, range(len(TYPED)))), Reply(calls=[asks]), same, same, same
    with (
        serve(*replies, Reply("done")) as server,
        Terminal(tmp_path, server) as session,
    ):
        session.enter("go")
        for typed in TYPED:
            session.expect(QUESTION)
            session.settled()
            session.type(typed)
        session.expect("answer: ")
        session.type("the blue one\n")
        session.expect("called 3 times")
        session.expect("[y/N] ")
        assert "done · 6 steps" in bare(session.say("y"))
        made = [(session.ws / str(number)).exists() for number in range(len(TYPED))]
        assert made == [*TYPED.values()]
        assert "the blue one" in sent(server.requests[-1])


def test_one_task_at_a_terminal_asks_too(tmp_path: Path) -> None:
    replies = touch("PWN"), Reply("done")
    with serve(*replies) as server, Run(tmp_path, server, "make it") as session:
        session.expect(QUESTION)
        session.enter("y")
        assert session.exit_code() == 0
        assert (session.ws / "PWN").exists()


# ---- models, reasoning, prices ----------------------------------------------------------


def test_another_model_or_level_of_reasoning_holds_from_the_next_request_on(tmp_path: Path) -> None:
    thinking = Reply("Four.", reasoning="Two and two. ")
    with (
        serve(thinking) as server,
        Terminal(tmp_path, server, "--reasoning", "low") as session,
    ):
        assert "Two and" not in bare(session.say("one"))
        said = bare(session.say("/export no/such.md"))
        assert said.endswith("no/such.md: No such file or directory")
        assert "reasoning: high, hidden" in session.say("/reasoning high")
        assert "reasoning: high, shown" in session.say("/reasoning show")
        assert "other at" in session.say("/model other")
        shown = session.say("two")
        assert re.search(r"\x1b\[2m\s*Two.*Four\.", shown, re.S)
        assert "Two and two." in bare(shown)
        assert len(server.requests[1]["messages"]) == 4
        session.say("/reasoning hide")
        session.say("/reasoning off")
        assert "Two and" not in bare(session.say("three"))
        efforts = [
            (
                body["model"],
                body.get("reasoning_effort"),
            )
            for body in server.requests
        ]
        assert efforts == [("script", "low"), ("other", "high"), ("other", None)]
        session.say("/model gpt-5-mini")
        session.say("four")
        offered = {tool["function"]["name"] for tool in server.requests[-1]["tools"]}
        assert "apply_patch" in offered
        assert "edit" not in offered
        session.say("/model gpt-4.1")
        assert "of 1.00M tokens" in bare(session.say("/tokens")), "its own window"
        session.say("/clear")
        session.say("five")
        assert sent(server.requests[-1]) == ["five"]


def test_an_error_is_one_line_and_costs_are_said_if_prices_are_set(tmp_path: Path) -> None:
    prices = tmp_path / "prices.json"
    prices.write_text('{"script": {"input": 1000, "output": 1000}}')
    refused = Reply("No \x1b[31msuch\x07 key", status=401, headers={"x-request-id": "req_7"})
    options = {"CODER_PRICES": str(prices), "CODER_CONTEXT_WINDOW": "5000"}
    with (
        serve(refused, Reply("four")) as server,
        Terminal(tmp_path, server, **options) as session,
    ):
        said = session.say("hello")
        assert "\x1b[31mNo" not in said
        assert "\x07" not in bare(said)
        error = "Error: the key was rejected: No [31msuch key (HTTP 401, request req_7). Check OPENAI_API_KEY"
        assert error in " ".join(bare(said).split())
        assert re.search(r"in, \d+ out, \$\d+\.\d\d", session.say("hello"))
        session.say("/model gpt-4.1")
        shown = bare(session.say("/tokens"))
        assert re.search(r"this session: .*\$\d", shown)
        assert "of 5.0k tokens" in shown, "the user's window holds for each model"


def test_an_empty_entry_goes_on_once_at_a_limit(tmp_path: Path) -> None:
    replies = Reply(calls=[("ls", {})]), Reply("well")
    with (
        serve(*replies) as server,
        Terminal(tmp_path, server, "--max-steps=1") as session,
    ):
        assert "the step limit is reached" in session.say("go")
        session.type("\x1b[Z")  # another mode changes nothing of that
        session.expect("plan ❯ ")
        session.enter("")
        assert "well" in session.not_now()
        assert entered(server)[-1] == "continue"
        session.say("")
        assert len(server.requests) == 2
    with (
        serve(*replies) as server,
        OneShot(tmp_path, server, "--max-steps=1", "go") as run,
    ):
        assert run.end() == 3
        assert re.search(r"To go on: python -m coder -r \w+ continue", run.err)
