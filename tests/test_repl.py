"""The session at the prompt, in a real terminal: entries, commands, questions and what is typed meanwhile."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path

import pytest

from coder.devtools.scripted import Body, Reply
from tests.harness import serve
from tests.terminal import PATIENCE, OneShot, Terminal, rendered

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b\][^\x07]*\x07")  # the second: the window's title


def echo(body: Body) -> Reply:
    return Reply(f"You said: {body['messages'][-1]['content']!r}")


def bare(text: str) -> str:
    return ESCAPES.sub("", text)


def test_a_conversation_goes_on_and_each_run_ends_with_its_line(tmp_path: Path) -> None:
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        first = bare(session.say("hello"))
        assert "You said: 'hello'" in first and re.search(
            r"done · 1 step · [\d.k]+ in, \d+ out · \d+\.\d s", first
        )
        session.say("again")
        assert [m["content"] for m in server.requests[1]["messages"][1:]] == [
            "hello",
            "You said: 'hello'",
            "again",
        ]


def test_the_banner_names_the_model_the_host_and_the_folder(tmp_path: Path) -> None:
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        assert f"script at 127.0.0.1:{server.port}" in session.output and "/ws" in session.output


def test_an_entry_of_several_lines_is_one_message(tmp_path: Path) -> None:
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        session.enter('"""one')
        session.expect(". ")
        session.enter("  two")
        session.expect(". ")
        session.say('three"""')
        session.enter("four\\")
        session.expect(". ")
        session.say("five")
        assert [body["messages"][-1]["content"] for body in server.requests] == [
            "one\n  two\nthree",
            "four\nfive",
        ]


BLOCK = "!touch x\n/yolo\n  exit\n"


@pytest.mark.parametrize(
    "block", [BLOCK, "/yolo\n!touch x", "\\\nexit\n", '"""Words."""\n!touch x\n', "\n/yolo\n"]
)
def test_a_pasted_block_is_one_message_and_no_command(tmp_path: Path, block: str) -> None:
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        session.paste(block)
        session.say("")
        assert [m["content"] for m in server.requests[0]["messages"][1:]] == [block.strip()]
        assert not (session.ws / "x").exists() and "Asking again" not in session.say("/yolo")


@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_a_block_of_a_terminal_that_marks_no_pastes_is_one_message_too(
    tmp_path: Path, term: str
) -> None:
    with serve(echo) as server, Terminal(tmp_path, server, TERM=term) as session:
        session.paste(BLOCK, marks=False)
        session.prompt()
        session.ready()
        session.paste("first\nsecond", marks=False)
        session.expect(". second")
        session.say(" line")
        assert [body["messages"][-1]["content"] for body in server.requests] == [
            BLOCK.strip(),
            "first\nsecond line",
        ]
        assert not (session.ws / "x").exists() and "Asking again" not in session.say("/yolo")


def test_a_block_that_is_pasted_at_a_question_is_no_yes(tmp_path: Path) -> None:
    for number, marks in enumerate((True, False)):
        replies = Reply(calls=[("bash", {"command": "touch PWN"})]), Reply("done")
        with serve(*replies) as server, Terminal(tmp_path / str(number), server) as session:
            session.enter("go")
            session.expect(QUESTION)
            session.paste("y\ny\n", marks=marks)
            session.say("") if marks else session.prompt()
            assert not (session.ws / "PWN").exists()


def test_the_commands_answer_without_asking_the_model(tmp_path: Path) -> None:
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        assert all(
            f"/{name}" in session.say("/help")
            for name in ("new", "resume", "model", "tools", "tokens", "summary", "init", "exit")
        )
        assert "Run a command in bash" in session.say("/tools")
        assert "script at 127.0.0.1" in session.say("/model")
        assert "no command /nonsense" in session.say("/nonsense").replace("There is ", "")
        assert "0 in, 0 out" in session.say("/tokens")
        assert server.requests == []


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("/Help", "did you mean /help?"),
        ("/my-cmd", "/help lists them."),
        ("/model_x", "did you mean /model?"),
        ("/\u5e2e\u52a9 me", "/help lists them."),
        ("/cmpact now", "did you mean /compact?"),
    ],
)
def test_what_looks_like_a_command_is_never_sent_and_the_nearest_is_said(
    tmp_path: Path, typed: str, hint: str
) -> None:
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        assert f"There is no command {typed.split()[0]}; {hint}" in bare(session.say(typed))
        assert server.requests == []


def test_help_stands_in_columns_and_what_we_say_is_broken_between_words(tmp_path: Path) -> None:
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        listed = [row for row in bare(session.say("/help")).split("\r\n") if row.startswith("  /")]
        assert len({re.match(r"  /\w+ +", row)[0].__len__() for row in listed}) == 1, listed  # type: ignore[index]
        session.child.setwinsize(24, 40)
        session.say("/yolo")
        rows = rendered(session.output, 40, 60)
        place = next(
            place for place, row in enumerate(rows) if row.startswith("Commands and edits")
        )
        assert rows[place : place + 2] == [
            "Commands and edits are no longer asked",
            "about; /yolo turns that off.",
        ]


def test_the_entry_of_i_is_shown_as_one(tmp_path: Path) -> None:
    with serve(echo) as server, Terminal(tmp_path, server, "-i", "look at this") as session:
        assert "> look at this" in bare(session.output).split("\r\n")
        assert server.requests[0]["messages"][-1]["content"] == "look at this"


@pytest.mark.parametrize("command", ["/help", "/tools", "/agent", "/permissions"])
def test_on_a_narrow_screen_a_list_hangs_its_explanations_and_cuts_none(
    tmp_path: Path, command: str
) -> None:
    with (
        serve(echo) as server,
        Terminal(tmp_path, server, "--deny", "bash:a command of ten words *") as session,
    ):
        session.child.setwinsize(24, 40)
        shown = bare(session.say(command)).replace("\r\n", "\n").replace("\r", "").split("\n")[1:]
        assert all(len(row) <= 40 and "…" not in row for row in shown), shown
        assert any(row.startswith(" " * 9) for row in shown), shown
        words = " ".join(" ".join(shown).split())
        for each in {
            "/help": ("changes of files, and its part of the conversation", "/sessions", "/clear"),
            "/tools": ("Prefer read, grep, glob and edit to cat, grep, find and sed.",),
            "/agent": ("plan",),
            "/permissions": ("commands, edits and places outside are asked about.",),
        }[command]:
            assert each in words


@pytest.mark.parametrize("leave", ["/exit", "quit"])
def test_exit_at_a_question_leaves_and_runs_nothing(tmp_path: Path, leave: str) -> None:
    with (
        serve(Reply(calls=[("bash", {"command": "touch PWN"})]), Reply("done")) as server,
        Terminal(tmp_path, server) as session,
    ):
        session.enter("go")
        session.expect(QUESTION)
        session.enter(leave)
        assert (
            session.exit_code() == 0
            and not (session.ws / "PWN").exists()
            and len(server.requests) == 1
        )


def test_an_export_that_cannot_be_written_is_said_in_words(tmp_path: Path) -> None:
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        session.say("hello")
        assert bare(session.say("/export no/such.md")).endswith(
            "no/such.md: No such file or directory"
        )


def test_another_model_takes_the_conversation_over(tmp_path: Path) -> None:
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        session.say("one")
        assert "other at" in session.say("/model other")
        session.say("two")
        assert [body["model"] for body in server.requests] == ["script", "other"]
        assert len(server.requests[1]["messages"]) == 4
        session.say("/model gpt-5-mini")
        session.say("three")
        offered = {tool["function"]["name"] for tool in server.requests[2]["tools"]}
        assert "apply_patch" in offered and "edit" not in offered


def test_clear_forgets_the_conversation(tmp_path: Path) -> None:
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        session.say("one")
        session.say("/clear")
        session.say("two")
        assert [m["content"] for m in server.requests[1]["messages"][1:]] == ["two"]


def test_a_command_of_ones_own_is_run_unasked_and_added_but_not_with_two_marks(
    tmp_path: Path,
) -> None:
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        assert bare(session.say("!echo a; echo b | sed s/b/ab/; exit 3")).endswith(
            "\ra\r\nab\r\n[exit code 3]"
        )
        assert "secret" in session.say("!!echo secret")
        session.say("!printf 'one\\rtwo\\033[31mred\\n\\nend'")
        session.enter("!printf '\\033[?1049hscreen\\033[?1049l'")
        session.expect("\x1b[?1049l\x1b[?2004h> ")
        session.say("well?")
        sent = [
            m["content"].partition("` myself. Its output:\n")[2] or m["content"]
            for m in server.requests[0]["messages"][1:]
        ]
        assert sent == ["a\nab\n[exit code 3]", "twored\n\nend", "(no output)", "well?"]


@pytest.mark.parametrize("mark", ["!", "!!"])
def test_a_command_of_ones_own_has_the_terminal_as_in_a_shell(tmp_path: Path, mark: str) -> None:
    asks = "test -t 0 && test -t 1 && stty size && read -p 'your 'name? name && echo hello $name < /dev/tty"
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        session.enter(f"{mark}{asks}")
        assert "24 80" in session.expect("your name?")  # shown as it comes
        session.enter("Ada")
        session.expect("hello Ada")
        session.prompt()
        session.ready()
        session.enter(f"{mark}while read -rsn1 key; do echo key $key; done")
        session.until(lambda: session.running("/bin/bash"), "the command")
        session.type("x")
        session.expect("key x")
        session.ctrl_c()
        session.prompt()
        assert server.requests == []


def test_what_commands_of_ones_own_leave_in_the_background(tmp_path: Path) -> None:
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        session.say("!!sleep 17.31 >log &")
        session.say("!sleep 17.32 & until pgrep -fx 'sleep 17.32'; do :; done")
        session.say("!setsid sleep 17.33 & until pgrep -fx 'sleep 17.33'; do :; done")
        session.until(lambda: not session.running("sleep 17.32"), "the hang-up")
        assert session.running("sleep 17.31") and session.running("sleep 17.33")
        session.leave()
        for number in session.running("sleep 17.33"):
            os.kill(number, signal.SIGKILL)


@pytest.mark.parametrize("mark", ["!", "!!"])
def test_ctrl_c_twice_during_a_command_of_ones_own_ends_the_command_alone(
    tmp_path: Path, mark: str
) -> None:
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        session.enter(f"{mark}trap 'echo no' INT; echo ready; sleep 300; sleep 301")
        session.expect("\rready")
        session.until(lambda: session.running("sleep 300"), "the first")
        session.child.sendintr()
        session.until(lambda: session.running("sleep 301"), "the second")
        session.child.sendintr()
        session.child.sendintr()
        session.prompt()
        session.ready()
        assert "You said: 'hello'" in session.say("hello")


def test_keys_that_a_command_of_ones_own_did_not_read_stand_at_the_prompt(tmp_path: Path) -> None:
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        session.enter("!echo ready; until [ -e go ]; do sleep 0.02; done")
        session.expect("\rready")
        session.type("half a line")
        session.expect("half a line")
        (session.ws / "go").touch()
        session.prompt()
        session.expect("half a line")
        session.say("")
        assert server.requests[0]["messages"][-1]["content"] == "half a line"


def test_lists_count_in_words_and_leave_out_what_was_taken_back_whole(tmp_path: Path) -> None:
    for server in (serve(Reply("no", status=400)), serve(echo)):
        with server, Terminal(tmp_path, server) as session:
            session.say("hello")
            if len(server.requests) and "You said" in session.output:
                assert "2 messages" in session.say("/tokens")
                session.say("/undo")
                session.ctrl_c()
                session.prompt()
    with serve(echo) as server, OneShot(tmp_path, server, "sessions") as run:
        run.end()
        assert re.fullmatch(r"\w+ +now +hello +\(1 message\)\n", run.out)


def test_exit_leaves_with_zero(tmp_path: Path) -> None:
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        session.enter("/exit")
        assert session.exit_code() == 0


def test_the_history_is_kept_privately_and_comes_back(tmp_path: Path) -> None:
    with serve(echo) as server:
        with Terminal(tmp_path, server) as session:
            session.say("remember me")
        history = tmp_path / "home" / ".data" / "coder" / "history"
        assert "remember me" in history.read_text() and history.stat().st_mode & 0o777 == 0o600
        with Terminal(tmp_path, server) as session:
            session.type("\x1b[A")
            session.expect("remember me")
            session.say("")
            assert server.requests[1]["messages"][-1]["content"] == "remember me"


@pytest.mark.parametrize("marks", [True, False])
def test_a_pasted_block_comes_back_from_the_history_as_one_entry(
    tmp_path: Path, marks: bool
) -> None:
    block = "!touch first\n!touch x\n!touch last"
    with serve(echo) as server:
        with Terminal(tmp_path, server) as session:
            session.say("before")
            session.paste(block, marks=marks)
            if not marks:
                session.expect(". !touch last")
            session.say("")
        with Terminal(tmp_path, server) as session:
            session.type("\x1b[A")
            session.expect("touch last")
            session.say("")
            session.type("\x1b[A\x1b[A")
            session.expect("before")
            session.say("")
            assert not list(session.ws.iterdir())
        sent = [body["messages"][-1]["content"] for body in server.requests]
        assert sent == ["before", block, block, "before"]


def test_of_a_block_that_was_given_up_no_line_is_in_the_history(tmp_path: Path) -> None:
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        session.say("before")
        session.paste("!touch x\n!touch last", marks=False)
        session.expect(". !touch last")
        session.ctrl_c()
        session.prompt()
        session.ready()
        session.type("\x1b[A")
        session.expect("before")
        session.say("")
        assert not list(session.ws.iterdir())


# ---- questions -------------------------------------------------------------------------------------------


def touch(name: str) -> Reply:
    return Reply(calls=[("bash", {"command": f"touch {name}"})])


QUESTION = "or why not: "


def test_a_command_runs_after_a_yes_and_is_shown_whole_before(tmp_path: Path) -> None:
    with serve(touch("PWN"), Reply("done")) as server, Terminal(tmp_path, server) as session:
        session.enter("go")
        asked = bare(session.expect(QUESTION))
        assert (
            "Run this command?" in asked
            and "touch PWN" in asked
            and not (session.ws / "PWN").exists()
        )
        session.say("y")
        assert (session.ws / "PWN").exists()


def test_the_question_says_on_a_narrow_screen_what_always_allows_and_that_enter_is_no(
    tmp_path: Path,
) -> None:
    with serve(touch("a"), Reply("done")) as server, Terminal(tmp_path, server) as session:
        session.child.setwinsize(24, 40)
        session.enter("go")
        asked = bare(session.expect(QUESTION)).split("Run this command?")[1] + QUESTION
        assert all(len(row) <= 40 for row in asked.split("\r\n")), asked
        words = " ".join(asked.split())
        assert "[a]lways allows exactly this in this session" in words
        assert "Enter alone is no" in words
        session.say("")
        assert not (session.ws / "a").exists()


def test_a_no_with_a_reason_reaches_the_model(tmp_path: Path) -> None:
    with serve(touch("PWN"), Reply("as you like")) as server, Terminal(tmp_path, server) as session:
        session.enter("go")
        session.expect(QUESTION)
        session.say("use mktemp instead")
        assert not (session.ws / "PWN").exists()
        assert (
            "the user said no: use mktemp instead" in server.requests[1]["messages"][-1]["content"]
        )


def test_always_holds_for_exactly_that_command_and_this_session(tmp_path: Path) -> None:
    with (
        serve(touch("a"), touch("a"), touch("b"), Reply("done")) as server,
        Terminal(tmp_path, server) as session,
    ):
        session.enter("go")
        session.expect(QUESTION)
        session.enter("a")
        assert "touch b" in bare(session.expect(QUESTION)), "the second time it was not asked"
        session.say("n")
        assert (session.ws / "a").exists() and not (session.ws / "b").exists()


def test_an_edit_is_asked_with_its_diff_and_always_covers_the_next(tmp_path: Path) -> None:
    first = Reply(
        calls=[
            ("write", {"path": "f", "content": "one\n"}),
            ("edit", {"path": "f", "old_string": "one", "new_string": "two"}),
        ]
    )
    with serve(first, Reply("done")) as server, Terminal(tmp_path, server) as session:
        session.enter("go")
        asked = bare(session.expect(QUESTION))
        assert "Make this change?" in asked and "+one" in asked and not (session.ws / "f").exists()
        shown = bare(session.say("a"))
        assert (session.ws / "f").read_text() == "two\n" and "-one" in shown and "+two" in shown


@pytest.mark.case("PRM-31")
def test_lines_that_came_before_the_question_do_not_answer_it_but_steer(tmp_path: Path) -> None:
    held = Reply("wait", calls=[("bash", {"command": "touch PWN"})], hold=1.0)
    with serve(held, Reply("done")) as server, Terminal(tmp_path, server) as session:
        session.enter("go")
        session.until(lambda: server.requests, "the request")
        session.enter("y")
        session.expect("queued: y")
        session.enter("y")
        session.expect(QUESTION)
        assert not (session.ws / "PWN").exists()
        session.say("n")
        assert not (session.ws / "PWN").exists()
        assert [m["content"] for m in server.requests[-1]["messages"] if m["role"] == "user"] == [
            "go",
            "y",
            "y",
        ]


@pytest.mark.case("TRM-04", "TRM-05")
def test_what_drives_a_terminal_is_shown_as_code_points_in_a_question(tmp_path: Path) -> None:
    tricky = "echo harmless \x1b[8m; touch PWN\r\u202eecho"
    with (
        serve(Reply(calls=[("bash", {"command": tricky})]), Reply("ok")) as server,
        Terminal(tmp_path, server) as session,
    ):
        session.enter("go")
        asked = session.expect(QUESTION)
        assert "echo harmless <U+001B>[8m; touch PWN<U+000D><U+202E>echo" in bare(asked)
        assert "Careful: 3 characters in this cannot be seen" in bare(asked)
        session.say("n")


def test_a_repeated_call_asks_whether_to_go_on(tmp_path: Path) -> None:
    same = Reply(calls=[("ls", {})])
    with serve(same, same, same, Reply("done")) as server, Terminal(tmp_path, server) as session:
        session.enter("go")
        session.expect("3 times in a row")
        session.expect("[y/N] ")
        assert "done · 4 steps" in bare(session.say("y"))


def test_a_diff_is_shown_to_its_last_line_and_to_the_end_of_each(tmp_path: Path) -> None:
    """What looks like a header of a diff is a line like any other, and nothing is cut."""
    content = (
        "-- keep\n++ os.system('evil')\n"
        + "x = '"
        + "a" * 100
        + "'; evil()\n"
        + "line\n" * 80
        + "last()\n"
    )
    with (
        serve(Reply(calls=[("write", {"path": "f", "content": content})]), Reply("ok")) as server,
        Terminal(tmp_path, server) as session,
    ):
        session.enter("go")
        asked = bare(session.expect(QUESTION)).replace("\r\n", "\n")
        assert (
            "+++ os.system('evil')" in asked
            and "+-- keep" in asked
            and "'; evil()" in asked
            and "+last()" in asked
        )
        session.say("n")


def test_always_does_not_cover_what_git_runs(tmp_path: Path) -> None:
    hook = ("write", {"path": ".git/hooks/pre-commit", "content": "evil\n"})
    replies = Reply(calls=[("write", {"path": "f", "content": "x\n"}), hook]), Reply("ok")
    with serve(*replies) as server, Terminal(tmp_path, server) as session:
        session.enter("go")
        session.expect(QUESTION)
        session.enter("a")
        assert ".git/hooks/pre-commit" in bare(session.expect(QUESTION))
        session.say("n")
        assert (session.ws / "f").exists() and not (session.ws / ".git").exists()


def test_a_path_is_no_command(tmp_path: Path) -> None:
    with serve(echo) as server, Terminal(tmp_path, server) as session:
        assert "You said: '/home/me/x.py is broken'" in bare(session.say("/home/me/x.py is broken"))


def test_another_model_brings_its_own_window_unless_the_person_gave_one(tmp_path: Path) -> None:
    with serve(echo) as server:
        with Terminal(tmp_path / "a", server) as session:
            session.say("/model gpt-4.1")
            assert "of 1.00M tokens" in bare(session.say("/tokens"))
        with Terminal(tmp_path / "b", server, CODER_CONTEXT_WINDOW="5000") as session:
            session.say("/model gpt-4.1")
            assert "of 5.0k tokens" in bare(session.say("/tokens"))


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


# ---- thinking, waiting, prices ---------------------------------------------------------------------------

THINKING = Reply("Four.", reasoning="Two and two. ")


def test_what_the_model_thinks_is_hidden_or_shown_dim(tmp_path: Path) -> None:
    with serve(THINKING) as server, Terminal(tmp_path, server) as session:
        assert "Two and" not in bare(session.say("how much?"))
        assert "reasoning: off, shown" in session.say("/reasoning show")
        shown = session.say("how much?")
        assert re.search(r"\x1b\[2m\s*Two.*Four\.", shown, re.S) and "Two and two." in bare(shown)
        session.say("/reasoning hide")
        assert "Two and" not in bare(session.say("how much?"))


def test_the_level_of_reasoning_goes_out_with_the_next_request(tmp_path: Path) -> None:
    with serve(THINKING) as server, Terminal(tmp_path, server, "--reasoning", "low") as session:
        session.say("one")
        assert "reasoning: high, hidden" in session.say("/reasoning high")
        assert "takes off, minimal" in session.say("/reasoning much")
        session.say("two")
        session.say("/reasoning off")
        session.say("three")
        assert [body.get("reasoning_effort") for body in server.requests] == ["low", "high", None]


def test_a_member_that_the_server_refuses_is_said_once_and_left_out(tmp_path: Path) -> None:
    def strict(body: Body) -> Reply:
        return (
            Reply("Unknown parameter: 'reasoning_effort'.", status=400)
            if "reasoning_effort" in body
            else Reply("fine")
        )

    with serve(strict) as server, Terminal(tmp_path, server, "--reasoning", "high") as session:
        first, second = bare(session.say("one")), bare(session.say("two"))
        assert (
            "does not take 'reasoning_effort'" in first
            and "fine" in first
            and "done · 1 step" in first
        )
        assert "does not take" not in second and len(server.requests) == 3


def test_silence_is_counted_on_the_screen_before_an_answer_and_behind_half_of_one(
    tmp_path: Path,
) -> None:
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
        place = next(
            place for place, row in enumerate(rendered(stalled.output)) if row.startswith("Half an")
        )
        assert re.match(r". waiting · no data for \ds of 33s", rendered(stalled.output)[place + 1])
        assert "late" in waiting.prompt()
        stalled.ctrl_c()
        assert re.search(r"stopped by you · 1 step · [\d.]+ s", bare(stalled.prompt()))


def test_a_server_that_loads_its_model_is_waited_for_with_one_line(tmp_path: Path) -> None:
    loading = Reply("Loading model", status=503)
    with serve(*[loading] * 9, Reply("ready now")) as server, Terminal(tmp_path, server) as session:
        said = bare(session.say("hello"))
        assert said.count("The server is not ready: Loading model. Waiting for it.") == 1
        assert "ready now" in said and "Attempt" not in said and len(server.requests) == 10


def test_what_a_run_cost_is_said_where_prices_were_given(tmp_path: Path) -> None:
    prices = tmp_path / "prices.json"
    prices.write_text('{"script": {"input": 1000, "output": 1000}}')
    with (
        serve(Reply("four")) as server,
        Terminal(tmp_path, server, CODER_PRICES=str(prices)) as session,
    ):
        assert re.search(r"in, \d+ out, \$\d+\.\d\d", session.say("hello"))
        assert re.search(r"this session: .*\$\d", session.say("/tokens"))


def test_an_error_is_one_line_with_what_the_server_said_and_what_to_do(tmp_path: Path) -> None:
    refused = Reply("No \x1b[31msuch\x07 key", status=401, headers={"x-request-id": "req_7"})
    with serve(refused) as server, Terminal(tmp_path, server) as session:
        said = session.say("hello")
        assert "\x1b[31mNo" not in said and "\x07" not in bare(said)
        assert (
            "Error: the key was refused: No [31msuch key (HTTP 401, request req_7). Check OPENAI_API_KEY"
            in " ".join(bare(said).split())
        )
