"""What others write on our terminal: the cases TRM, and the two of PRM about who answers a
question.

Each text of others comes with marks around every sequence: the sequence must not reach the
terminal, the marks must.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import shlex
import sqlite3
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coder.cli.input import QUIET
from coder.cli.questions import Prompter
from coder.cli.render import Renderer
from coder.cli.screen import Screen
from coder.devtools.scripted import Body, Reply, ScriptedServer
from coder.permissions.permissions import Permissions
from coder.tools.bash import bash
from coder.tools.files import write
from coder.toolset import Toolset
from tests.harness import ask, serve
from tests.terminal import QUESTION, OneShot, Place, Run, Terminal, add_plugin, promptly

SEQUENCES = (  # noqa: SIM905
    "\x1b]52;c;QUJD\x07 \x1b]52;c;QUJD\x1b\\ \x1b]0;coder:EVIL\x07 \x1b]8;;http://evil.example\x1b\\ \x1b]8;;\x1b\\ "
    "\x1b[2J \x1b[6n \x1b[8m \x1b[?25l \x1bPq\x1b\\ \x1b_apc\x1b\\ \x1bc \x9b2J \x9d0;x\x9c \x90q\x9c \x08\x08\x08 "
    "\r \x7f \x0e \x05 \u202e \u2066 \u200b \ufeff \U000e0041"
).split(" ")
MARKED = [f"a{place}a{sequence}z{place}z" for place, sequence in enumerate(SEQUENCES)]
LEFT = [f"a{place}az{place}z" for place, _ in enumerate(SEQUENCES)]
INLINE = " ".join(MARKED)
NAMES = [mark for mark in MARKED if "/" not in mark]
MARKUP = "[link=http://x.example]x[/link] [/foo] [bold]b[/] :smile: [red]"

# All that we send ourselves: colours, the status row, marked pastes.
OWN = re.compile(
    r"\x1b\[(?:[0-4]|1;3[16]|3[12346](?:;7)?)?m|\r?(?:\x1b\[\dA)?\x1b\[[JK]|\x1b\[\?2004[hl]\r?|\r\n"
)
DRIVES = {chr(code) for code in (*range(0x20), *range(0x7F, 0xA0))} - {"\n", "\t"}
UNSEEN = set("\u202e\u2066\u200b\ufeff\U000e0041")


def shown(output: str) -> str:
    """What the user reads. Fails if anything but our own sequences drives the terminal."""
    assert "\x1b]0;coder:EVIL" not in output
    text = OWN.sub(lambda own: "\n" if own[0] == "\r\n" else "", output)
    assert not set(text) & (DRIVES | UNSEEN), sorted(set(text) & (DRIVES | UNSEEN))
    return text


def assert_readable(output: str) -> None:
    """All marks are there, without what stood between them; a screen may break its lines, and take
    spaces for it."""
    text = re.sub(r"\s", "", shown(output))
    assert [each for each in LEFT if each not in text] == []


def output_of(folder: Path, server: ScriptedServer, *arguments: str, code: int = 0) -> str:
    """All that one task put on its terminal."""
    with Run(folder, server, *arguments) as run:
        assert run.exit_code() in (code, 75 if code else 0)
        return run.output


def call(name: str, **arguments: object) -> tuple[str, dict[str, object]]:
    return name, arguments


# ---- what reaches the terminal -----------------------------------------------------------


def letter_by_letter(reasoning: str, text: str) -> Reply:
    """An answer whose every letter is an event of its own."""
    deltas = [{"reasoning_content": c} for c in reasoning] + [{"content": c} for c in text]
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
    events = [f"data: {json.dumps({'choices': [each]})}\n\n".encode() for each in choices]
    return Reply(chunks=[*events, b"data: [DONE]\n\n"])


@pytest.mark.case("TRM-02")
def test_no_word_of_the_model_drives_the_terminal_wherever_it_is_cut(tmp_path: Path) -> None:
    for reasoning, text in ((f"thought {INLINE} so", "said"), ("", f"said {INLINE} so")):
        with serve(letter_by_letter(reasoning, text)) as server:
            assert_readable(
                output_of(
                    tmp_path / (text + "x")[:5],
                    server,
                    "-v",
                    "go",
                )
            )


@pytest.mark.case("TRM-02")
def test_if_a_program_reads_the_answer_it_is_as_the_model_gave_it(tmp_path: Path) -> None:
    with serve(Reply(INLINE)) as server:
        with OneShot(tmp_path / "text", server, "go") as run:
            run.end()
            assert run.out == f"{INLINE}\n"
        with OneShot(tmp_path / "json", server, "--output-format", "json", "go") as run:
            run.end()
            assert json.loads(run.out)["text"] == INLINE
        stream = ("--output-format", "stream-json", "go")
        assert "a0a" in shown(output_of(tmp_path / "stream", server, *stream))


@pytest.mark.case("TRM-01", "TRM-03", "TRM-09")
def test_no_file_name_or_branch_drives_the_terminal_and_markup_is_text(tmp_path: Path) -> None:
    old = "\n".join(MARKED)
    new = "\n".join(f"{mark}!" for mark in MARKED)
    calls = [
        *(
            call(
                "write",
                path=name,
                content=old,
            )
            for name in NAMES[:3]
        ),
        call("bash", command="cat evil"),
        call("read", path="evil"),
        call("bash", command="ls -a"),
        call("ls"),
        call("read", path=f"no{INLINE}"),
        call(f"tool{INLINE}"),
        call("edit", path=NAMES[0], old_string=old, new_string=new),
        call("bash", command=f"echo '{MARKUP}'"),
        call("write", path="[bold]f[/foo]", content=MARKUP),
        call(f"{MARKUP}"),
    ]
    replies = Reply(f"First {MARKUP}", calls, reasoning=f"Hm {MARKUP}"), Reply(f"Last {MARKUP}")
    with (
        serve(*replies) as server,
        Run(tmp_path, server, "-v", "-y", "go") as run,
    ):
        (run.ws / "evil").write_text("\n".join(MARKED))
        for name in NAMES[3:]:
            (run.ws / name).write_text("x")
        (run.ws / ".git").mkdir()
        (run.ws / ".git" / "HEAD").write_text(f"ref: refs/heads/{INLINE}\n")
        assert run.exit_code() == 0
        assert_readable(run.output)
        assert "z1z!" in shown(run.output)
        text = " ".join(shown(run.output).split())
        for before in ("Hm ", "First ", "echo '", "Last ", "1 + "):
            assert f"{before}{MARKUP}" in text, (before, text)
        assert "[bold]f[/foo]" in text


@pytest.mark.case("TRM-03")
@pytest.mark.parametrize(
    "refusal",
    [
        Reply(INLINE, status=400),
        Reply(
            json.dumps({"error": {"message": INLINE, "code": INLINE}}),
            status=401,
        ),
        Reply(status=500, chunks=[f"<html><title>{INLINE}</title></html>".encode()]),
    ],
    ids=["text", "JSON", "HTML"],
)
def test_no_server_and_no_models_name_drives_the_terminal(tmp_path: Path, refusal: Reply) -> None:
    with serve(refusal) as server:
        assert "a0a" in shown(output_of(tmp_path, server, "-m", f"m{INLINE}", "go", code=1))


REFUSED = [
    ["--trace", f"none/{INLINE}", "go"],
    ["-r", INLINE, "go"],
    ["-C", INLINE, "go"],
    [f"--{MARKED[5]}"],
    ["--base-url", f"http://{INLINE}", "go"],
    ["sessions", "fork", INLINE],
    ["trace", INLINE],
    ["export", "x", f"--{INLINE}"],
    ["demo", f"--{INLINE}"],
]


@pytest.mark.case("TRM-03")
def test_what_is_refused_is_cleaned_in_the_line(tmp_path: Path) -> None:
    with serve(Reply("never")) as server:
        place = Place(tmp_path, server)
        for words in REFUSED:
            done = place.shell(f"{{coder}} {shlex.join(words)}")
            assert done.returncode == 2
            assert server.requests == []
            assert re.search(r"a[05]a.*z[05]z", shown(done.stderr), re.S), words


@pytest.mark.case("TRM-03", "TRM-10")
def test_no_name_change_title_or_link_drives_a_sessions_terminal(tmp_path: Path) -> None:
    link = "[https://good.example](https://bad.example/path)"
    replies = [
        Reply(
            f"Writing. {INLINE}",
            [call("write", path=NAMES[2], content=INLINE)],
        ),
        Reply(f"See {link} and <https://also.example>."),
    ]
    model = {"OPENAI_MODEL": f"m{INLINE}"}
    with (
        serve(*replies) as server,
        Terminal(tmp_path, server, "-y", **model) as session,
    ):
        assert f"m{LEFT[0]}" in shown(session.output.replace("\x08", ""))
        for text in ("go", "/diff", "/undo"):
            assert re.search(
                "a2a.*z2z",
                shown(session.say(text).replace("\x08", "")),
                re.S,
            ), text
        text = " ".join(
            shown(
                session.output.replace(
                    "\x08",
                    "",
                )
            ).split()
        )
        # What is shown, and where it leads
        assert "https://good.example (https://bad.example/path)" in text
        assert "\x1b]8" not in session.output
        session.ctrl_c()  # what was undone is at the prompt
        session.prompt()


# ---- questions ---------------------------------------------------------------------------

HIDDEN = {
    "ls\r; touch PWN": "ls<U+000D>; touch PWN",
    "touch PWN\x08\x08ls": "touch PWN<U+0008><U+0008>ls",
    "touch PWN\nls\x1b[A": "touch PWN ls<U+001B>[A",
    "ls \x1b[8m; touch PWN": "ls <U+001B>[8m; touch PWN",
    "ls \x9b8m; touch PWN": "ls <U+009B>8m; touch PWN",
    "ls # \u202eNWP hcuot\u202c": "ls # <U+202E>NWP hcuot<U+202C>",
    "a\u2066b\u2067c\u2069": "a<U+2066>b<U+2067>c<U+2069>",
    "to\u200buch\u2060 \ufeffPWN": "to<U+200B>uch<U+2060> <U+FEFF>PWN",
    "echo \U000e0041\U000e0042": "echo <U+E0041><U+E0042>",
    "to\xaduch PWN": "to<U+00AD>uch PWN",
    "touch\u3164PWN": "touch<U+3164>PWN",
}
GAPS = [
    " " * 400,
    "\n" * 60,
    "\t" * 100,
    " \n" * 60,
    " : " * 3000,
]


@pytest.mark.case("TRM-04", "TRM-05", "TRM-06")
def test_a_question_shows_what_hides_itself_and_what_is_pushed_out_of_sight(tmp_path: Path) -> None:
    calls = [
        *(call("bash", command=command) for command in HIDDEN),
        call("write", path="f\u202egpj.sh\u200b", content="to\u200buch\x1b[8m"),
        *(call("bash", command=f"ls{gap}; touch PWN") for gap in GAPS),
    ]
    stream = io.StringIO()
    questions = list[str]()

    def refuse(*given: str) -> str:
        questions.append(stream.getvalue().removeprefix("".join(questions)))
        return "n"

    keyboard: Any = SimpleNamespace(answer=refuse)
    prompter = Prompter(Renderer(Screen(stream), None), keyboard)
    with serve(Reply(calls=calls), Reply("done")) as server:
        tools = Toolset([bash, write], cwd=tmp_path)
        ask(server, tools=tools, hooks=Permissions(can_ask=True), each=prompter)
    said = [*HIDDEN.values(), "f<U+202E>gpj.sh<U+200B>"]
    for part, text in zip(said, questions, strict=False):
        assert part in " ".join(shown(text).split()), (part, text)
        assert re.search(r"Warning: \d+ invisible or control characters", text)
    assert "1 + to<U+200B>uch<U+001B>[8m" in questions[len(HIDDEN)]
    far = questions[len(said) :]
    assert ["; touch PWN" in text[-400:] for text in far] == [True] * len(GAPS)
    assert not list(tmp_path.iterdir())


# ---- the end -----------------------------------------------------------------------------

CRASH = """
import os, signal, time
class Crash(BaseException): ...
def crash() -> str:
    '''C.'''
    open('crashing', 'w')
    LINE
    time.sleep(5)
    return ''
def setup(api):
    api.add_tool(crash)
"""


@pytest.mark.case("TRM-11")
@pytest.mark.parametrize(
    ("line", "code"),
    [("raise Crash('boom \\x1b[2J\\u202e')", 1), ("os.kill(os.getpid(), signal.SIGTERM)", 143)],
)
def test_a_crash_in_a_run_leaves_the_terminal_as_was(tmp_path: Path, line: str, code: int) -> None:
    background = call("bash", command="setsid sleep 300 & sleep 301 & echo here")
    add_plugin(tmp_path, "crash.py", CRASH.replace("LINE", line))
    replies = Reply(calls=[background, call("crash")])
    with serve(replies) as server, Terminal(tmp_path, server, "-y") as session:
        session.enter("go")
        session.until((session.ws / "crashing").exists)
        with promptly():
            assert session.exit_code() == code
        output = session.output
        assert output.rindex("\x1b[?2004l") > output.rindex("\x1b[?2004h")
        assert "\x1b[2J" not in output
        assert code != 1 or "internal error, in coder or in a plugin. Crash: boom" in output


@pytest.mark.case("TRM-12")
def test_a_poor_locale_is_no_reason_to_fail(tmp_path: Path) -> None:
    first = Reply("Größe 中 👩", [call("bash", command="echo é")], reasoning="größer")
    poor = {"LC_ALL": "C", "LANG": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    with serve(first, Reply("Größe 中")) as server:
        with OneShot(tmp_path / "a", server, "-v", "-y", "größer", **poor) as run:
            assert run.end() == 0
            assert run.out == "Gr??e ?\n"
        with Run(tmp_path / "b", server, "-v", "-y", "go", **poor) as shown_run:
            assert shown_run.exit_code() == 0


@pytest.mark.case("TRM-12")
@pytest.mark.parametrize(
    ("pipe", "codes"),
    [
        ("| head -1", {0, 1}),
        ("--output-format stream-json | head -1", {1}),
        ("2>&1 | :", {1}),
        ("2>&1 >/dev/null | :", {0}),
        (">&-", {0}),
    ],
)
def test_no_reader_that_leaves_is_a_traceback(tmp_path: Path, pipe: str, codes: set[int]) -> None:
    long = "line\n" * 2000
    replies = Reply(long, [call("bash", command="echo hi; sleep 0.2")]), Reply(long)
    with serve(*replies) as server:
        line = f"{{coder}} -y go {pipe}; exit ${{{{PIPESTATUS[0]}}}}"
        done = Place(tmp_path, server).shell(line)
        assert done.returncode in codes, done


@pytest.mark.case("TRM-13")
def test_no_old_session_drives_the_terminal_in_lists_or_when_resumed(tmp_path: Path) -> None:
    replies = [
        Reply(INLINE, [call("bash", command=f"echo '{INLINE}'")]),
        Reply(f"Bye {INLINE}"),
    ]
    with serve(*replies) as server:
        with OneShot(tmp_path, server, "-y", f"ask {INLINE}") as run:
            run.end()
        file = run.home / ".data" / "coder" / "sessions.db"
        with contextlib.closing(sqlite3.connect(file)) as database, database:
            (session_id,) = database.execute("select id from session").fetchone()
            database.execute("update session set title = ?", (f"{INLINE}\nsecond line",))
        for words in ("sessions list -a", "sessions search ask", f"export {session_id}"):
            output = output_of(tmp_path, server, *words.split())
            assert re.search("a0a.*z0z", shown(output), re.S), words
        with Run(tmp_path, server, "-r") as session:
            session.expect("number, name or id: ")
            session.enter("1")
            session.prompt()
            session.ready()
            assert "a0az0z" in shown(session.output.replace("\x08", ""))


# ---- who answers -------------------------------------------------------------------------

TOUCH = Reply(calls=[call("bash", command="touch PWN")])


@pytest.mark.case("PRM-30")
@pytest.mark.parametrize("line", ["yes | {coder} go", "{coder} -p < answers"])
def test_what_is_piped_in_answers_no_question(tmp_path: Path, line: str) -> None:
    def script(body: Body) -> Reply:
        return Reply("done") if body["messages"][-1]["role"] == "tool" else TOUCH

    with serve(script) as server:
        place = Place(tmp_path, server)
        (place.ws / "answers").write_text("y\n" * 100)
        with promptly(20):
            assert place.shell(line).returncode == 0
        assert not (place.ws / "PWN").exists()
        assert "no user can be asked here" in server.requests[1]["messages"][-1]["content"]


@pytest.mark.case("PRM-31")
def test_keys_that_come_while_a_question_appears_do_not_answer_it(tmp_path: Path) -> None:
    """They come one by one, without a pause, from before the question until after its text is
    there. If the machine stood still in between, that was a pause, and they come once more."""
    held = Reply("wait", calls=TOUCH.calls, hold=0.3)
    pause = math.inf
    attempts = map(str, range(5))
    while pause >= QUIET:
        typed_at: list[float] = []

        def press_y(session: Terminal, typed_at: list[float] = typed_at) -> None:
            session.type("y\r")
            typed_at.append(time.monotonic())

        with (
            serve(held, Reply("done")) as server,
            Terminal(tmp_path / next(attempts), server) as session,
        ):
            session.enter("go")
            session.until(lambda server=server: server.requests, "the request")
            while "Run this command?" not in session.output:
                press_y(session)
                session.until(lambda: True)
            for _ in range(5):
                press_y(session)
                time.sleep(0.02)
            pause = max(later - earlier for earlier, later in pairwise(typed_at))
            session.expect(QUESTION)
            if pause < QUIET:
                assert not (session.ws / "PWN").exists()
                session.enter("n")
                session.expect("y y y")  # nothing that was typed is lost
                assert not (session.ws / "PWN").exists()
            session.ctrl_c()
            session.prompt()
            session.type("\x15")  # Ctrl+U: what was typed early may stand there
