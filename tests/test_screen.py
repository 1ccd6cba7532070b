"""The screen: what may reach a terminal, where lines break, what is on it while the user waits,
what is shown of events.

The last are those of sub-agents, too: whose line is whose, and how their questions look.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from coder import events
from coder.cli.diff import diff_rows
from coder.cli.questions import exact_diff
from coder.cli.render import Renderer
from coder.cli.screen import SPINNER, Screen
from coder.cli.text_rows import breaks, one_line, wrap
from coder.devtools.scripted import Body, Reply
from coder.events import Event, ToolEnd, ToolStart
from coder.permissions import sanitize
from coder.permissions.sanitize import escape_invisible, is_invisible, strip_controls
from coder.types import ToolResult, Usage
from tests.harness import ask, contents, serve
from tests.terminal import QUESTION, Terminal, bare, rendered

calm = settings(deadline=None, suppress_health_check=list(HealthCheck))

DRIVES = {chr(code) for code in (*range(0x20), *range(0x7F, 0xA0))} - {"\n", "\t"}
HIDES = set(
    re.findall(
        "[\xad\u180e\u200b\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]",
        "".join(map(chr, range(0x110000))),
    )
)
SURROGATES = {chr(code) for code in range(0xD800, 0xE000)}
ANYTHING = st.text(
    st.one_of(
        st.characters(exclude_categories=()),
        st.sampled_from(sorted(DRIVES | HIDES)),
        st.sampled_from("\ud83d\udc00\n\t a]\x1b\x1b[];:?0 9mK\\\x07\x9b\x9c\x9d"),
    )
)
# OSC 52, 0 and 8 with both ends, erase, a question to the terminal, hidden text, DCS, APC, a full
# reset; the C1 forms; loose ones
EVIL = (
    "\x1b]52;c;QUJD\x07\x1b]0;title\x1b\\\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\\x1b[2J\x1b[6n"
    "\x1b[8m\x1bPq\x1b\\\x1b_apc\x1b\\\x1bc\x9b31m\x9b2J\x9d0;x\x9c\x90q\x9c\x08\x08\r\x7f\x0b\x0c\x0e\x05\0"
)
MARKUP = "[link=http://evil]x[/link] [/foo] [bold] [red]r"

# ---- the sanitiser -----------------------------------------------------------------------


def in_pieces(text: str, sizes: list[int]) -> list[str]:
    sanitizer = sanitize.TerminalSanitizer()
    shown = []
    at = 0
    for size in sizes:
        shown.append(sanitizer.feed(text[at : at + size]))
        at += size
    return [*shown, sanitizer.feed(text[at:]), sanitizer.flush()]


@calm
@given(
    ANYTHING,
    st.lists(st.integers(1, 4), max_size=50),
)
@example(EVIL, [1] * 200)
def test_nothing_that_drives_reorders_or_hides_is_left(text: str, sizes: list[int]) -> None:
    cleaned = strip_controls(text)
    assert not set(cleaned) & (DRIVES | HIDES - {"\u2029"} | SURROGATES)
    assert strip_controls(cleaned) == cleaned == "".join(in_pieces(text, sizes))
    left = iter(text)
    assert all(c in left for c in cleaned.replace("?", "")), "nothing is added or moved"
    if not re.search("[\x1b\x90\x98\x9b\x9d-\x9f]", text):  # no sequence: each goes alone
        stays = (c for c in text if c not in DRIVES | HIDES)
        assert cleaned == "".join("?" if c in SURROGATES else c for c in stays)


@calm
@given(ANYTHING)
@example("two\nlines, ~/größe 中 " + MARKUP)
def test_for_a_decision_every_character_is_seen_or_stands_as_a_code_point(text: str) -> None:
    shown = escape_invisible(text)
    assert not set(shown) & (DRIVES | SURROGATES | HIDES)
    assert shown == "".join(f"<U+{ord(c):04X}>" if is_invisible(c) else c for c in text)
    assert not any(map(is_invisible, "aé中\n\t[👩"))


# ---- text in rows ------------------------------------------------------------------------


@calm
@given(
    st.text(st.sampled_from("ab é中。\n\n  -\t😀가")),
    st.integers(5, 100),
)
@example("a" * 39 + " " + "b" * 40 + " next", 80)
def test_rows_fit_and_hold_all_of_the_text(text: str, width: int) -> None:
    rows = wrap(text, width).split("\n")
    assert "".join("".join(rows).split()) == "".join(text.split())
    assert len(rows) > text.count("\n")
    assert all(cell_len(row.rstrip()) <= width or not breaks().search(row.strip()) for row in rows)
    assert all(cell_len(one_line(row, width)) <= max(10, width) for row in rows)


ADDRESS = "https://example.com/" + "path/" * 16


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("a\tb\tcc dddd e ", 20, "a       b       cc\ndddd e "),
        ("aaaa bbbbbbbb", 10, "aaaa\nbbbbbbbb"),
        ("aa bb cc", 5, "aa bb\ncc"),
        (ADDRESS, 80, ADDRESS),
        (
            "中文字" * 9,
            20,
            "中文字" * 3 + "中\n文字" + "中文字" * 2 + "中文\n字" + "中文字" * 2,
        ),
        (f"see {ADDRESS} there", 80, f"see\n{ADDRESS}\nthere"),
    ],
)
def test_where_rows_break(text: str, width: int, shown: str) -> None:
    assert wrap(text, width) == shown


# ---- a terminal --------------------------------------------------------------------------


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True

    def rows(self, columns: int = 40) -> list[str]:
        shown = rendered(self.getvalue().replace("\n", "\r\n"), columns, 200)
        return "\n".join(shown).rstrip().split("\n")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


STEPS = {
    "write": Screen.write,
    "thought": lambda screen, text: [
        screen.line(),
        screen.write(text, "dim"),
        screen.line(),
    ],
    "line": Screen.line,
    "listed": lambda screen, text: screen.line(text, head="head "),
    "exact": lambda screen, text: screen.exact_line(
        (text, "bold"),
        (text, ""),
    ),
    "draft": lambda screen, text: screen.draft((one_line(text, 39), "")),
    "status": lambda screen, text: screen.status(
        text[:20],
        9,
        *text.split("b")[:3],
    ),
    "typed": lambda screen, text: screen.show_typed(text),
}
Steps = st.lists(
    st.tuples(
        st.sampled_from(list(STEPS)),
        st.text("ab c中\n", max_size=90),
    ),
    max_size=30,
)


@calm
@given(Steps)
@example(
    [
        ("status", "a"),
        ("typed", "x"),
        ("write", "a" * 40),
        ("write", " b"),
        ("line", "c"),
    ]
)
@example(
    [
        ("status", "a"),
        ("write", "a" * 85),
        ("typed", "x"),
        ("write", "b" * 40),
        ("typed", ""),
    ]
)
def test_what_waits_or_is_typed_never_tears_what_is_written(steps: list[tuple[str, str]]) -> None:
    """The same rows are there in the end as if nothing was ever shown below them."""
    shown = []
    for without in ("", "status typed"):
        stream = Tty()
        screen = Screen(stream)
        for kind, text in steps:
            if kind not in without:
                STEPS[kind](screen, text)  # type: ignore[operator]
        screen.status()
        screen.finish_line()
        shown.append(stream.rows())
    assert shown[0] == shown[1]


@pytest.mark.parametrize(
    ("env", "shown"),
    [
        ({}, "\x1b[1;31ma\x1b[0m\n\x1b[2mb\x1b[0m\n"),
        ({"NO_COLOR": "1"}, "\x1b[1ma\x1b[0m\n\x1b[2mb\x1b[0m\n"),
        ({"TERM": "dumb"}, "a\nb\n"),
    ],
)
def test_the_terminal_gets_the_styles_that_it_wants(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], shown: str
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    stream = Tty()
    screen = Screen(stream)
    screen.status("waiting", 9)
    screen.line("a", "bold red")
    screen.write("b", "dim")
    screen.finish_line()
    assert stream.getvalue() == shown


def test_the_answer_may_have_a_stream_of_its_own_and_lines_begin_a_line() -> None:
    stream = io.StringIO()
    answers = Tty()
    for screen in (Screen(stream), Screen(answers)):
        render = Renderer(Screen(stream), screen)
        render(events.TextDelta("half"))
        render(events.Notice("whole"))
    assert stream.getvalue() == "half\nwhole\nwhole\n"
    assert answers.getvalue() == "half\n"


class Clock:
    """The time, which a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_terminal_that_becomes_narrower_keeps_no_row_of_the_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Most terminals break their rows then, and the cursor goes with its text."""
    stream = Tty()
    screen = Screen(stream, Clock())
    screen.line("so far")
    screen.status("2 sub-agents", 9, "  one › find all the callers", "  two › thinking")
    screen.show_typed("")  # draws at once
    standing = "\n".join(stream.rows())
    drawn = len(stream.getvalue())
    monkeypatch.setenv("COLUMNS", "16")
    screen.line("more")
    screen.status()
    narrow = Tty()
    narrow.write(standing + stream.getvalue()[drawn:])
    assert narrow.rows(16) == ["so far", "more"]


# ---- events ------------------------------------------------------------------------------


def show(*shown: Event, stream: io.StringIO | None = None, **options: Any) -> str:
    """What comes to a screen that is no terminal, or to this stream."""
    screen = Screen(stream or io.StringIO())
    render = Renderer(screen, screen, **options)
    for event in shown:
        render(event)
    render.pause()
    return screen.stream.getvalue()  # type: ignore[attr-defined, no-any-return]


def tool(
    call_id: str, title: str, output: str = "out", *, failed: bool = False, name: str = "bash"
) -> list[Event]:
    result = ToolResult(output, failed)
    return [
        ToolStart(call_id, name, {}, title),
        ToolEnd(call_id, name, result, failed, 0.0),
    ]


CHANGES = "--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n-A = 1\n+A      = 1\n \tx  = 2\n"


def test_what_was_shown_with_its_question_is_not_shown_again_but_that_of_a_later_call_is() -> None:
    made = ToolEnd(
        "1",
        "edit",
        ToolResult("", details={"diff": CHANGES}),
        False,
        0,
    )
    asked = events.PermissionAsked("1", "edit", "f", "f", detail=CHANGES)
    start = ToolStart("1", "edit", {}, "edit f")
    row = "● edit f · +1 -1"
    assert show(start, asked, made).splitlines() == [row]
    assert show(start, asked, made, start, made).splitlines()[:3] == [row, row, "     1 - A = 1"]
    start, answered = tool("2", "ask_user", "red", name="ask_user")
    question = events.QuestionAsked("q", "Which?", [], "red", call_id="2")
    assert show(start, question, answered) == ""


def test_a_diff_to_decide_on_is_exact_and_no_line_of_a_file_is_taken_for_a_header() -> None:
    removed = "--- a/f\n+++ b/f\n@@ -1 +1 @@\n--- x\n+++ \x1b[8m\n"
    two = "@@ -7,2 +6,0 @@\n-a\n-b\n\\ No newline\n--- a/g\n+++ b/g\n@@ -1 +1 @@\n-f(old, 1)\n+f(new, 1)\n"
    rows = exact_diff(removed + two)
    assert "|".join("".join(text for text, _ in row) for row in rows) == (
        "  --- a/f|  +++ b/f|     1 - -- x|     1 + ++ <U+001B>[8m|     ⋮|     7 - a|     8 - b"
        r"|  \ No newline|  --- a/g|  +++ b/g|     1 - f(old, 1)|     1 + f(new, 1)"
    )
    marked = [text for row in rows for text, style in row if "reverse" in style]
    assert marked == ["old", "new"], "the words, where two lines are similar"


def test_hunks_are_parted_after_one_that_only_removes_too() -> None:
    rows = diff_rows("--- a/f\n+++ b/f\n@@ -1 +0,0 @@\n-a\n@@ -5 +4 @@\n-one\n+two\n")
    texts = ["".join(text for text, _ in row) for row in rows]
    assert texts == ["   1 - a", "   ⋮", "   5 - one", "   4 + two"]


LISTED = "total  8\n-rw  1 root    12 f"
CHANGED = "     1 - A = 1|     1 + A      = 1|     2       x  = 2"
PROGRESS = "10 %\r20 %\rall\r\nend\n"
NOTED = "hi\n[exit code 3]\n[a note]"
FAILED = {"is_error": True, "details": {"exit_code": 3}}


@pytest.mark.parametrize(
    ("title", "result", "rows"),
    [
        ("read x", ToolResult("a\nb"), "● read x · 2 lines"),
        ("grep x", ToolResult("a"), "● grep x · 1 line"),
        ("bash x", ToolResult("hi"), "● bash x|  hi"),
        ("bash x", ToolResult("hi\n[exit code 3]", **FAILED), "✗ bash x · exit 3|  hi"),
        ("bash x", ToolResult(NOTED, **FAILED), "✗ bash x · exit 3|  hi|  [a note]"),
        ("read x", ToolResult("Error: no x", True), "✗ read x|  Error: no x"),
        ("bash a   b", ToolResult(LISTED), "● bash a   b|  total  8|  -rw  1 root    12 f"),
        ("bash x", ToolResult(PROGRESS), "● bash x|  all|  end"),
        ("edit f", ToolResult("", details={"diff": CHANGES}), f"● edit f · +1 -1|{CHANGED}"),
    ],
)
def test_a_calls_line_says_what_came_of_it(title: str, result: ToolResult, rows: str) -> None:
    name = title.split()[0]
    end = ToolEnd("1", name, result, result.is_error, 0.0)
    assert show(
        ToolStart("1", name, {}, title),
        end,
    ).splitlines() == rows.split("|")


def test_all_of_the_last_output_can_be_shown() -> None:
    screen = Screen(stream := io.StringIO())
    render = Renderer(screen, None)
    render(ToolEnd("1", "bash", ToolResult(PROGRESS), False, 0))
    render.show_last(1)
    assert stream.getvalue().splitlines()[-3:] == ["bash", "  10 %20 %all", "  end"]


def test_neighbouring_reads_share_a_row_until_something_else_follows_or_it_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")

    def read(name: str, lines: int, kind: str = "read") -> list[Event]:
        return tool(name, f"{kind} {name}", "x\n" * lines, name=kind)

    long = f"{'long/' * 35}d.py"
    calls = [
        *read("a.py", 1),
        *read("b.py", 2),
        *read(long, 3),
        *read("e.py", 3),
    ]
    calls += [
        *read("src", 2, "ls"),
        events.TextDelta("So."),
        *read("f.py", 1),
    ]
    show(*calls, stream=(stream := Tty()))
    assert stream.rows(200) == [
        "● read a.py, b.py · 3 lines",
        f"● read {long} · 3 lines",
        "● read e.py · 3 lines",
        "● ls src · 2 lines",
        "",
        "So.",
        "● read f.py · 1 line",
    ]


@pytest.mark.parametrize(
    ("content", "colour"),
    [("Error: no x", 31), ("Denied: no", 33), ("so far\n[aborted by the user]", 33)],
)
def test_red_is_a_failure_of_ours_and_no_decision_of_the_user(content: str, colour: int) -> None:
    end = ToolEnd("1", "bash", ToolResult(content, True), True, 0)
    assert f"\x1b[1;{colour}m✗" in show(end, stream=Tty())


def test_what_is_left_of_the_context_is_shown_after_a_run_and_little_is_warned_of() -> None:
    end = events.RunEnd("stop", "well", Usage(800, 50), 1)
    done, warning = show(end, context_used=lambda: 0.85).splitlines()
    facts = r"done · 1 step · 800 in, 50 out · 15 % of the context left · [\d.]+ s"
    assert re.fullmatch(facts, done)
    assert "/compact" in warning


@pytest.mark.parametrize("after", [0.0, 60.0])
def test_the_end_of_a_long_run_rings_on_a_terminal(after: float) -> None:
    shown = show(
        events.RunEnd("stop", "well", Usage(), 1),
        stream=Tty(),
        notify_after=after,
    )
    assert ("\x1b]9;coder: done\x07\x07" in shown) is (after == 0)


def test_what_is_waited_for_is_in_the_last_row_with_its_seconds() -> None:
    clock = Clock()
    stream = Tty()
    screen = Screen(stream, clock)
    render = Renderer(screen, screen, limits=(31, 33))
    for event, shown in (
        (events.StepStart(1), "thinking no data for 6s of 31s"),
        (events.TextDelta("Half an answer"), "no data for 6s of 33s"),
        (ToolStart("1", "bash", {}, "bash make"), "bash make 6s"),
        (events.ToolUpdate("1", "one\ncompiling\n"), "bash make │ compiling 12s"),
    ):
        render(event)
        clock.now += 6
        screen.show_typed("words")  # draws at once
        assert stream.rows()[-1].lstrip(SPINNER).strip() == f"{shown} words"
        screen.show_typed("")
        row = stream.rows()[-1].lstrip(SPINNER).strip()
        assert row == (shown if len(shown) > 22 else f"{shown} · Ctrl+C stops"), "where it fits"
    render.pause()
    assert stream.rows() == ["Half an answer"]


def test_a_server_that_loads_and_text_that_comes_again_are_named_in_one_line() -> None:
    def shown(*replies: Reply) -> list[str]:
        screen = Screen(stream := io.StringIO())
        with serve(*replies) as server:
            ask(server, each=Renderer(screen, screen))
            assert len(server.requests) == len(replies)
        return stream.getvalue().splitlines()[:-1]

    waiting, answer = shown(
        *[Reply("Loading model", status=503)] * 9,
        Reply("ready now"),
    )
    assert waiting == "The server is not ready: Loading model. Waiting for it."
    assert answer == "ready now"
    again = Reply("It begins badly", close="reset", cut=3), Reply("It is done.")
    broken, warning, answer = shown(*again)
    assert broken == "It begins"
    assert answer == "It is done."
    assert warning.startswith("The connection broke")
    assert warning.endswith("is discarded.")


# ---- sub-agents --------------------------------------------------------------------------


def of(agent: str, session: str, *its: Event) -> list[Event]:
    return [events.Nested(agent, event, session, f"call-{session}") for event in its]


def test_what_a_child_does_is_a_line_with_its_task_but_not_what_it_reads_or_says() -> None:
    text = show(
        events.TextDelta("Ours "),
        ToolStart("call-s1", "task", {}, "explore: find it"),
        *of(
            "explore",
            "s1",
            events.RunStart(),
            events.TextDelta("theirs"),
            *tool("1", "ls src"),
        ),
        *of("general", "s2", events.RunStart(), *tool("1", "grep x")),
        *of("explore", "s1", *tool("2", "cat y", "no\nsuch", failed=True)),
        *of("explore", "s1", *tool("3", "read z", name="read")),
        *of(
            "explore",
            "s1",
            events.RunEnd("stop", "theirs", Usage(1200, 30), 3),
        ),
        ToolEnd("call-s1", "task", ToolResult("found\n\n[task_id: 1]"), False, 9),
        *of("general", "s2", events.Notice("look")),
        events.TextDelta("again"),
    )
    assert [re.sub(r"\d\.\d s$", "T", line) for line in text.splitlines()] == [
        "Ours ",
        "  explore: find it ● ls src",
        "  general ● grep x",
        "  explore: find it ✗ cat y",
        "  no",
        "● explore: find it · 3 steps · 1.2k in, 30 out · T",
        "  found",
        "  general: look",
        "",
        "again",
    ]


def script(body: Body) -> Reply:
    """Two tasks side by side, whose agents ask for a command each; then the end."""
    first = contents(body["messages"], "user")[0]
    done = body["messages"][-1]["role"] == "tool"
    if first.startswith("child "):
        touch = Reply(calls=[("bash", {"command": f"touch {first[6:]}"})])
        return Reply(f"{first} is done") if done else touch
    asked = {
        name: {
            "description": name,
            "prompt": f"child {name}",
        }
        for name in ("one", "two")
    }
    tasks = [
        (
            "task",
            {"agent": "general"} | each,
        )
        for each in asked.values()
    ]
    return Reply("Both.") if done else Reply(calls=tasks)


def test_a_childs_question_names_it_and_is_answered_for_it_alone(tmp_path: Path) -> None:
    with serve(script) as server, Terminal(tmp_path, server) as session:
        session.enter("go")
        made = []
        for answer in ("y", "no, not this"):
            asked = bare(session.expect(QUESTION))
            line = r"(general[^\r]*) asks: Run this command\?\r\n +touch (\w+)"
            who, name = re.findall(line, asked)[-1]
            made.append((who, name))
            session.enter(answer)
        ended = bare(session.prompt())
        assert sorted(made) == [("general: one", "one"), ("general: two", "two")], "by their calls"
        assert (session.ws / made[0][1]).exists()
        assert not (session.ws / made[1][1]).exists()
        assert f"{made[1][0]} ✗ bash touch {made[1][1]}" in ended
        assert "Both." in ended
        assert all(re.search(rf"{re.escape(who)} · 2 steps · ", ended) for who, _ in made)
        said = str([body["messages"] for body in server.requests])
        assert re.search("the user refused and wrote: (no, )?not this", said)
