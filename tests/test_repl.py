"""The session at the prompt, in a real terminal: entries, commands, questions, and what is shown while a run goes on."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest

from coder.devtools.scripted import Body, Reply
from tests.harness import serve
from tests.terminal import PATIENCE, QUESTION, OneShot, Terminal, bare, rendered


def echo(body: Body) -> Reply:
    return Reply(f"You said: {body['messages'][-1]['content']!r}")


def sent(body: Body) -> list[Any]:
    """The messages behind the system's."""
    return [message["content"] for message in body["messages"][1:]]


def entered(server: Any) -> list[Any]:
    return [body["messages"][-1]["content"] for body in server.requests]


# ---- entries -----------------------------------------------------------------------------


def test_a_conversation_goes_on_and_each_run_ends_with_its_line(tmp_path: Path) -> None:
    with serve(echo) as server, Terminal(tmp_path, server, "-i", "look at this") as session:
        banner = f"script at 127.0.0.1:{server.port}"
        assert banner in session.output and "/ws" in session.output
        assert "❯ look at this" in bare(session.output).split("\r\n"), "the entry of -i"
        first = bare(session.say("/home/me/x.py is broken"))  # a path is no command
        assert "You said: '/home/me/x.py is broken'" in first
        assert re.search(
            r"done · 1 step · [\d.k]+ in, \d+ out · 99 % of the context left · \d+\.\d s", first
        )
        assert sent(server.requests[1])[::2] == ["look at this", "/home/me/x.py is broken"]
        session.enter("/exit")
        assert session.exit_code() == 0


BLOCK = "!touch x\n/yolo\n  exit\n"
BLOCKS = [BLOCK, "/yolo\n!touch x", "\\\nexit\n", '"""Words."""\n!touch x\n', "\n/yolo\n"]


def test_an_entry_of_several_lines_is_one_message_and_no_command(tmp_path: Path) -> None:
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        session.enter('"""one')
        session.expect(". ")
        session.enter("  two")
        session.expect(". ")
        session.say('three"""')
        session.enter("four\\")
        session.expect(". ")
        session.say("five")
        for block in BLOCKS:
            session.ready()
            session.paste(block)
            session.say("")
        typed = ["one\n  two\nthree", "four\nfive"]
        assert entered(server) == typed + [block.strip() for block in BLOCKS]
        assert not (session.ws / "x").exists() and "Asking again" not in session.say("/yolo")


@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_a_block_is_one_message_also_where_pastes_are_not_marked(tmp_path: Path, term: str) -> None:
    """Behind the entry of -i, which is echoed as one at a prompt is."""
    with serve(echo) as server, Terminal(tmp_path, server, "-i", "hi", TERM=term) as session:
        assert "You said" in session.output, "the prompt is not taken for there before it is"
        session.paste(BLOCK, marks=False)
        session.prompt()
        session.ready()
        session.paste("first\nsecond", marks=False)
        session.prompt()
        assert "second" in rendered(session.output), "in a row of its own"
        assert entered(server) == ["hi", BLOCK.strip(), "first\nsecond"]
        assert not (session.ws / "x").exists() and "Asking again" not in session.say("/yolo")


def test_the_history_is_kept_privately_and_a_block_comes_back_as_one_entry(tmp_path: Path) -> None:
    block = "!touch first\n!touch x\n!touch last"
    with serve(echo) as server:
        with Terminal(tmp_path, server) as session:
            session.say("before")
            session.ready()
            session.paste(block)
            session.say("")
        history = tmp_path / "home" / ".data" / "coder" / "history"
        assert "before" in history.read_text() and history.stat().st_mode & 0o777 == 0o600
        with Terminal(tmp_path, server) as session:
            session.type("\x1b[A")
            session.expect("touch last")
            session.say("")
            session.ready()
            session.type("\x1b[A\x1b[A")
            session.expect("before")
            session.say("")
            assert not list(session.ws.iterdir())
        assert entered(server) == ["before", block, block, "before"]


# ---- commands ----------------------------------------------------------------------------


def test_a_command_that_is_not_there_is_not_sent(tmp_path: Path) -> None:
    typos = {
        "/Help": "did you mean /help?",
        "/my-cmd": "/help lists them.",
        "/model_x": "did you mean /model?",
        "/\u5e2e\u52a9 me": "/help lists them.",
        "/cmpact now": "did you mean /compact?",
    }
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        for typed, hint in typos.items():
            shown = bare(session.say(typed))
            assert f"There is no command {typed.split()[0]}; {hint}" in shown
        assert server.requests == []


def test_another_model_takes_the_conversation_over_and_clear_forgets_it(tmp_path: Path) -> None:
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        session.say("one")
        said = bare(session.say("/export no/such.md"))
        assert said.endswith("no/such.md: No such file or directory")
        assert "other at" in session.say("/model other")
        session.say("two")
        assert [body["model"] for body in server.requests] == ["script", "other"]
        assert len(server.requests[1]["messages"]) == 4
        session.say("/model gpt-5-mini")
        session.say("three")
        offered = {tool["function"]["name"] for tool in server.requests[2]["tools"]}
        assert "apply_patch" in offered and "edit" not in offered
        session.say("/model gpt-4.1")
        assert "of 1.00M tokens" in bare(session.say("/tokens")), "its own window"
        session.say("/clear")
        session.say("four")
        assert sent(server.requests[-1]) == ["four"]


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


@pytest.mark.parametrize("mark", ["!", "!!"])
def test_a_command_of_ones_own_has_the_keys_and_ctrl_c_alone(tmp_path: Path, mark: str) -> None:
    asks = "read -p 'your 'name? name && echo hello $name"
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        session.enter(f"{mark}{asks}")
        session.expect("your name?")  # shown as it comes
        session.enter("Ada")
        session.expect("hello Ada")
        session.prompt()
        session.ready()
        session.enter(f"{mark}trap 'echo no' INT; echo ready; sleep 300; sleep 301")
        session.expect("\rready")
        session.until(lambda: session.running("sleep 300"), "the first")
        session.child.sendintr()
        session.until(lambda: session.running("sleep 301"), "the second")
        session.child.sendintr()
        session.prompt()
        session.ready()
        assert server.requests == [] and "You said: 'hello'" in session.say("hello")


# ---- questions ---------------------------------------------------------------------------


def touch(*names: str) -> Reply:
    return Reply(calls=[("bash", {"command": f"touch {name}"}) for name in names])


def bash(*commands: str) -> Reply:
    return Reply(calls=[("bash", {"command": command}) for command in commands])


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_one_key_answers_a_question_and_words_are_a_reason(tmp_path: Path, columns: int) -> None:
    """What is to be done stands directly above the answer; "always" holds for exactly that command, or for the pattern."""
    replies = touch(*"abac"), touch(*"defg"), bash("git gc --auto", "git gc"), Reply("done")
    with serve(*replies) as server, Terminal(tmp_path, server) as session:
        session.child.setwinsize(24, columns)
        session.enter("go")
        words = "Run this command? touch a [y]es, [a]lways exactly this, [n]o, or why not:"
        for keys, next_one in (
            ("y", "touch b"),
            ("u|se mktemp\x7fp instead\r", "touch a"),
            ("a", "touch c"),
            ("\r", "touch d"),
            ("\x1b", "touch e"),
            (" yes, but later\r", "touch f"),
            (" y|\x07", "touch g"),  # Ctrl+G gives the answer up
            ("\x04", "git gc"),
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
        assert sorted(path.name for path in session.ws.iterdir()) == ["a"]
        denied = str(server.requests[-1]["messages"])
        assert "the user refused: use mktemp instead." in denied
        assert "the user refused: yes, but later." in denied


def test_a_dumb_terminal_answers_with_a_line(tmp_path: Path) -> None:
    replies = touch("a", "b", "c"), Reply("done")
    with serve(*replies) as server, Terminal(tmp_path, server, TERM="dumb") as session:
        session.enter("go")
        for answer in ("Yes", "n yes, but later", "always"):
            session.expect(QUESTION)
            session.enter(answer)
        session.prompt()
        assert sorted(path.name for path in session.ws.iterdir()) == ["a", "c"]
        assert "the user refused: yes, but later." in str(server.requests[-1]["messages"])


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
        assert "[a]lways exactly this, [p] always edit: *, [n]o, or" in " ".join(below.split())
        for part in ("+ ++ os.system('evil')", "+ -- keep", "'; evil()", "+ last()"):
            assert part in asked, "what looks like a header is a line like any other"
        session.type("n")
        session.expect(QUESTION)
        session.type("p")
        shown = bare(session.expect(QUESTION))
        assert (session.ws / "f").read_text() == "two\n" and "- one" in shown and "+ two" in shown
        assert ".git/hooks/pre-commit" in shown and "[a]lways" not in shown
        session.enter("a")  # is not offered, so it is a reason
        session.prompt()
        assert sorted(path.name for path in session.ws.iterdir()) == ["f"]


def test_a_paste_is_no_yes(tmp_path: Path) -> None:
    replies = touch("PWN", "PWN2", "PWN3"), Reply("done")
    with serve(*replies) as server, Terminal(tmp_path, server) as session:
        session.enter("go")
        for marks in (True, False):
            session.expect(QUESTION)
            session.paste("y\ny\n", marks=marks)
            if marks:
                session.enter("")
        session.expect(QUESTION)
        session.say("n")
        assert not list(session.ws.iterdir())


@pytest.mark.parametrize(
    ("typed", "made"),
    [("y", True), ("y\r", True), ("y\n", True), ("yes\n", True), ("n\n", False), ("\n", False)],
)
def test_an_answer_may_end_with_enter_or_newline(tmp_path: Path, typed: str, made: bool) -> None:
    asks = Reply(calls=[("ask_user", {"question": "Which?", "options": []})])
    with serve(touch("PWN"), asks, Reply("done")) as server, Terminal(tmp_path, server) as session:
        session.enter("go")
        session.expect(QUESTION)
        session.type(typed)
        session.expect("answer: ")
        session.type("the blue one\n")
        session.expect("done · 3 steps")
        session.prompt()
        assert (session.ws / "PWN").exists() == made
        assert server.requests[-1]["messages"][-1]["content"] == "the blue one"


def test_a_repeated_call_asks_whether_to_go_on(tmp_path: Path) -> None:
    same = Reply(calls=[("ls", {})])
    with serve(same, same, same, Reply("done")) as server, Terminal(tmp_path, server) as session:
        session.enter("go")
        session.expect("called 3 times")
        session.expect("[y/N] ")
        assert "done · 4 steps" in bare(session.say("y"))


def test_one_task_at_a_terminal_asks_too(tmp_path: Path) -> None:
    with serve(touch("PWN"), Reply("done")) as server:
        session = Terminal(tmp_path, server, "make it")
        try:
            session.expect(QUESTION)
            session.enter("y")
            assert session.exit_code() == 0 and (session.ws / "PWN").exists()
        finally:
            session.stop()
            session.child.close(force=True)


def test_of_a_line_of_progress_the_last_state_is_shown_and_all_of_it_behind_last(
    tmp_path: Path,
) -> None:
    progress = bash(r"printf '10 %%\r20 %%\rall\r\nend\n'")
    with serve(progress, Reply("done")) as server, Terminal(tmp_path, server, "-y") as session:
        rows = rendered(session.say("go"))
        assert rows[rows.index("  all") + 1] == "  end"
        assert "  10 %20 %all" in rendered(session.say("/last"))


def test_the_newest_line_of_a_long_command_that_runs_is_shown(tmp_path: Path) -> None:
    long = bash(f": {'word ' * 40}; echo compiling; sleep 99")
    with serve(long, Reply("done")) as server, Terminal(tmp_path, server, "-y") as session:
        session.enter("go")
        session.expect("… │ compiling")
        session.ctrl_c()
        assert "stopped by the user" in session.prompt()


# ---- reasoning, waiting, prices ----------------------------------------------------------


def test_reasoning_is_hidden_or_dim_and_its_level_goes_out_next(tmp_path: Path) -> None:
    thinking = Reply("Four.", reasoning="Two and two. ")
    with serve(thinking) as server, Terminal(tmp_path, server, "--reasoning", "low") as session:
        assert "Two and" not in bare(session.say("how much?"))
        assert "reasoning: high, hidden" in session.say("/reasoning high")
        assert "accepts off, minimal" in session.say("/reasoning much")
        assert "reasoning: high, shown" in session.say("/reasoning show")
        shown = session.say("how much?")
        assert re.search(r"\x1b\[2m\s*Two.*Four\.", shown, re.S) and "Two and two." in bare(shown)
        session.say("/reasoning hide")
        session.say("/reasoning off")
        assert "Two and" not in bare(session.say("how much?"))
        efforts = [body.get("reasoning_effort") for body in server.requests]
        assert efforts == ["low", "high", None]


def test_silence_is_counted_on_the_screen_before_and_in_an_answer(tmp_path: Path) -> None:
    """It is counted from the fifth second on: two sessions wait at the same time."""
    half, release = Reply("Half an answer here", cut=4, close="hang"), threading.Event()
    with (
        serve(lambda body: Reply("late" if release.wait(PATIENCE) else "never")) as slow,
        serve(half) as broken,
        Terminal(tmp_path / "a", slow, CODER_FIRST_BYTE_TIMEOUT="31") as waiting,
        Terminal(tmp_path / "b", broken, CODER_IDLE_TIMEOUT="33") as stalled,
    ):
        waiting.enter("slow")
        stalled.enter("stall")
        assert "thinking" in waiting.expect("s of 31s")
        release.set()
        stalled.expect("s of 33s")
        rows = rendered(stalled.output)
        place = next(place for place, row in enumerate(rows) if row.startswith("Half an"))
        assert re.match(r". no data for \ds of 33s", rows[place + 1])
        assert "late" in waiting.prompt()
        stalled.ctrl_c()
        assert re.search(r"stopped by the user · 1 step · [\d.]+ s", bare(stalled.prompt()))


def test_a_server_that_loads_its_model_is_waited_for_with_one_line(tmp_path: Path) -> None:
    loading = Reply("Loading model", status=503)
    with serve(*[loading] * 9, Reply("ready now")) as server, Terminal(tmp_path, server) as session:
        said = bare(session.say("hello"))
        assert said.count("The server is not ready: Loading model. Waiting for it.") == 1
        assert "ready now" in said and "Attempt" not in said and len(server.requests) == 10


def test_an_error_is_one_line_and_costs_are_said_where_prices_are(tmp_path: Path) -> None:
    prices = tmp_path / "prices.json"
    prices.write_text('{"script": {"input": 1000, "output": 1000}}')
    refused = Reply("No \x1b[31msuch\x07 key", status=401, headers={"x-request-id": "req_7"})
    options = {"CODER_PRICES": str(prices), "CODER_CONTEXT_WINDOW": "5000"}
    with serve(refused, Reply("four")) as server, Terminal(tmp_path, server, **options) as session:
        said = session.say("hello")
        assert "\x1b[31mNo" not in said and "\x07" not in bare(said)
        error = "Error: the key was rejected: No [31msuch key (HTTP 401, request req_7). Check OPENAI_API_KEY"
        assert error in " ".join(bare(said).split())
        assert re.search(r"in, \d+ out, \$\d+\.\d\d", session.say("hello"))
        session.say("/model gpt-4.1")
        shown = bare(session.say("/tokens"))
        assert re.search(r"this session: .*\$\d", shown)
        assert "of 5.0k tokens" in shown, "the user's window holds for each model"


def test_what_is_unusual_is_said_and_an_empty_entry_goes_on_at_limits(tmp_path: Path) -> None:
    flags = "--yolo", "--plan", "--sandbox=off", "--max-steps=1"
    replies = Reply(calls=[("ls", {})]), Reply("well")
    with serve(*replies) as server, Terminal(tmp_path, server, *flags) as session:
        top = " ".join(bare(session.output).split())
        for remark in ("Agent: plan.", "(yolo).", "without the sandbox."):
            assert remark in top
        assert "the step limit is reached" in session.say("go")
        session.type("\x1b[Z")  # another mode changes nothing of that
        session.expect("❯ ")
        assert "well" in session.say("") and entered(server)[-1] == "continue"
        session.say("")
        assert len(server.requests) == 2, "once"
    with serve(*replies) as server, OneShot(tmp_path, server, "--max-steps=1", "go") as run:
        assert run.end() == 3
        assert re.search(r"To go on: python -m coder -r \w+ continue", run.err)
