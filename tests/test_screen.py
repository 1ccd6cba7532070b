"""The screen: what may reach a terminal, where lines break, and what a stream that is no terminal gets."""

from __future__ import annotations

import io
import itertools
import re
import sys
from pathlib import Path

import pexpect
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from coder.cli.render import Renderer, folded
from coder.cli.screen import Screen, Wrap, one_line
from coder.devtools.scripted import Reply, ScriptedServer
from coder.events import Event, PermissionAsked, ToolEnd, ToolStart
from coder.providers.text import Cleaner, clean, hides, visible
from coder.types import ToolResult
from tests.harness import serve
from tests.terminal import rendered
from tests.test_cli import Place

calm = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # on a busy machine, too

DRIVES = {chr(code) for code in (*range(0x20), *range(0x7F, 0xA0))} - {
    "\n",
    "\t",
}  # C0 but newline and tab, DEL, C1
HIDES = {
    chr(code)
    for code in (
        *range(0x202A, 0x202F),
        *range(0x2066, 0x206A),
        0xAD,
        0x180E,
        0x200B,
        0x2028,
        0x2029,
        0xFEFF,
        *range(0x2060, 0x2066),
        *range(0x206A, 0x2070),
        *range(0xFFF9, 0xFFFC),
        *range(0xE0000, 0xE0080),
    )
}
INTRODUCE = set("\x1b\x90\x98\x9b\x9d\x9e\x9f")  # an escape sequence
SURROGATES = {chr(code) for code in range(0xD800, 0xE000)}
ANYTHING = st.text(
    st.one_of(
        st.characters(exclude_categories=()),
        st.sampled_from(sorted(DRIVES | HIDES)),
        st.sampled_from("\ud83d\udc00\n\t a]\x1b\x1b[];:?0 9mK\\\x07\x9b\x9c\x9d"),
    )
)

# OSC 52, 0 and 8 with both ends, erase, a question to the terminal, hidden text, DCS, APC, a full reset; the C1 forms; loose ones
EVIL = (
    "\x1b]52;c;QUJD\x07\x1b]0;title\x1b\\\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\\x1b[2J\x1b[6n\x1b[8m\x1bPq\x1b\\\x1b_apc\x1b\\\x1bc"
    "\x9b31m\x9b2J\x9d0;x\x9c\x90q\x9c\x08\x08\r\x7f\x0b\x0c\x0e\x05\x00"
)
MARKUP = "[link=http://evil]x[/link] [/foo] [bold] [red]r"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


# ---- clean, plain, one_line ------------------------------------------------------------------------------


@calm
@given(ANYTHING)
@example(EVIL)
def test_whatever_is_cleaned_nothing_is_left_that_drives_a_terminal_reorders_or_hides(
    text: str,
) -> None:
    cleaned = clean(text)
    assert not set(cleaned) & (DRIVES | HIDES | SURROGATES)
    assert clean(cleaned) == cleaned
    left = iter(text)
    assert all(c in left for c in cleaned.replace("?", "")), "nothing is added or moved"


@calm
@given(ANYTHING.filter(lambda text: not set(text) & INTRODUCE))
def test_where_no_sequence_begins_each_character_is_kept_or_goes_alone(text: str) -> None:
    assert clean(text) == "".join(
        "?" if c in SURROGATES else c for c in text if c not in DRIVES | HIDES
    )


def in_pieces(text: str, sizes: list[int]) -> list[str]:
    cleaner, shown, at = Cleaner(), [], 0
    for size in sizes:
        shown.append(cleaner.feed(text[at : at + size]))
        at += size
    return [*shown, cleaner.feed(text[at:]), cleaner.end()]


@calm
@given(ANYTHING, st.lists(st.integers(1, 4), max_size=50))
@example(EVIL, [1] * 200)
def test_where_a_text_is_cut_makes_no_difference(text: str, sizes: list[int]) -> None:
    assert "".join(in_pieces(text, sizes)) == clean(text)


@pytest.mark.parametrize("cut", range(1, 19))
def test_a_sequence_in_two_pieces_goes_whole_and_text_is_not_held_back(cut: int) -> None:
    text = "a\x1b[1;31mb\x1b]0;title\x07c"
    shown = in_pieces(text, [cut])
    assert "".join(shown) == "abc"
    assert shown[0] == ("ab" if cut > 8 else "a")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x9b31mred\x9b0m", "red"),
        ("\x1b[38;2;1;2;3mx", "x"),
        ("\x1b[?25lx\x1b[2 qy", "xy"),
        ("a\x1b]0;t\x07b", "ab"),
        ("a\x1b]0;t\x1b\\b", "ab"),
        ("a\x9d0;t\x9cb", "ab"),
        ("a\x1bP1$q\x1b\\b\x1b_x\x1b\\c\x1b^y\x1b\\d\x1bXz\x1b\\", "abcd"),
        ("a\x1bcb\x1b(Bc\x1b7d\x1b=e", "abcde"),
        ("a\x1b]0;never ended", "a]0;never ended"),
        ("a\x1b]0;over\nlines\x07b", "a]0;over\nlinesb"),
        ("a\x1b[31", "a[31"),
        ("a\x1b[\nb", "a[\nb"),
        (f"a\x1b]0;{'x' * 2000}\x07b", f"a]0;{'x' * 2000}b"),
        ("\x1b\x1b[31mx", "x"),
        ("\x1b\x1b\x1b", ""),
        ("abc\u202edef\u202c", "abcdef"),
        ("a\u2066b\u2069", "ab"),
        ("zero\u200bwidth\ufeff so\xadft \U000e0041\U000e0042", "zerowidth soft "),
    ],
)
def test_what_a_cleaned_text_looks_like(text: str, shown: str) -> None:
    assert clean(text) == shown


def test_a_megabyte_that_begins_sequences_without_end_is_cleaned_in_no_time() -> None:
    for text in (
        "\x1b]0;" * 200_000,
        "\x1b[" * 500_000,
        "\x9d" + "x" * 1_000_000,
        "\x1b" * 1_000_000,
    ):
        assert not set(clean(text)) & DRIVES


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain",
        "größe, 中文, עברית, हिन्दी",
        "👩\N{ZERO WIDTH JOINER}🚀 ❤️ e\N{COMBINING ACUTE ACCENT}",
        "می\N{ZERO WIDTH NON-JOINER}خواهم \N{RIGHT-TO-LEFT MARK}",
        "a\tb\nc\n",
        "\xa0",
        MARKUP,
    ],
)
def test_clean_keeps_what_people_read(text: str) -> None:
    assert clean(text) == text


@calm
@given(ANYTHING)
def test_visible_shows_everything_that_hides_or_drives(text: str) -> None:
    shown = visible(text)
    assert not set(shown) & (DRIVES | SURROGATES)
    assert not re.search(
        "[\u200b-\u200f\u202a-\u202e\u2060-\u206f\xad\ufeff\U000e0000-\U000e007f]", shown
    )
    for c in text:  # every character leaves a trace
        assert c in shown or f"<U+{ord(c):04X}>" in shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ls -l ~/größe 中", "ls -l ~/größe 中"),
        ("a\x1b[2Jb", "a<U+001B>[2Jb"),
        ("rm x\rls  ", "rm x<U+000D>ls  "),
        ("x\x08\x08", "x<U+0008><U+0008>"),
        ("\x9b", "<U+009B>"),
        ("a\u202eb\u2066c", "a<U+202E>b<U+2066>c"),
        ("a\u200bb", "a<U+200B>b"),
        ("\xad", "<U+00AD>"),
        ("\U000e0041", "<U+E0041>"),
        ("\ud800", "<U+D800>"),
        ("\0", "<U+0000>"),
        ("two\nlines", "two\nlines"),
        (MARKUP, MARKUP),
    ],
)
def test_visible_shows_code_points(text: str, shown: str) -> None:
    assert visible(text) == shown


@pytest.mark.parametrize(
    "c",
    "\u061c\u180e\u2028\u2029\u115f\u1160\u3164\uffa0\ufe0f\U000e0101\u034f\u17b4\u17b5\u2800"
    "\U0001d159\U0001d173\u3000\xa0\ufffc\ufff0\U0001bca0\U000e0fff\U00016fe4\u180f",
)
def test_visible_shows_the_other_invisible_characters_too(c: str) -> None:
    assert visible(f"a{c}b") == f"a<U+{ord(c):04X}>b" and hides(c)


@calm
@given(ANYTHING, st.integers(1, 200))
def test_one_line_is_one_line_of_at_most_the_width(text: str, width: int) -> None:
    line = one_line(text, width)
    assert not set(line) & (DRIVES | {"\n", "\t"})
    assert cell_len(line) <= max(10, width)


# ---- Wrap ------------------------------------------------------------------------------------------------


WIDTHS = st.integers(5, 100)
PIECES = st.lists(
    st.integers(1, 70), max_size=200
)  # how long each piece is; the last one is the rest
WORD = st.text("abcdefgh.,-é", min_size=1, max_size=20)
BETWEEN = st.sampled_from([" ", " ", " ", "  ", "\n", "\n\n", " \n", "\n    "])
PROSE = st.lists(st.tuples(WORD, BETWEEN), max_size=60).map(
    lambda pairs: "".join(map("".join, pairs)).rstrip() + "\n"
)
CHINESE = st.text("中文字。，（", min_size=1, max_size=120)
MIXED = st.lists(st.tuples(WORD | CHINESE, BETWEEN | st.just("")), max_size=60).map(
    lambda pairs: "".join(map("".join, pairs))
)


def fed(text: str, width: int, pieces: list[int] | None = None) -> str:
    """What a screen writes of a text that comes in pieces."""
    wrap, written, at = Wrap(), "", 0
    for size in pieces or []:
        written += wrap.add(text[at : at + size], width)
        at += size
    return written + wrap.add(text[at:], width) + wrap.rest()


def rows(text: str, width: int, pieces: list[int] | None = None) -> list[str]:
    """What stands on a terminal then."""
    written = fed(text, width, pieces)
    return rendered(
        written.replace("\n", "\r\n"), width, written.count("\n") + len(written) // width + 2
    )


def words(text: str) -> list[str]:
    """Those that are not to be broken; a Chinese character is one."""
    return re.findall("[中文字。，（]|[^\\s中文字。，（]+", text)


def assert_whole(text: str, width: int, pieces: list[int] | None = None) -> None:
    """No word is broken that fits, no blank row is there that the text does not have, and no row ends before it has to."""
    shown, paragraphs = rows(text, width, pieces), text.rstrip().split("\n")
    for paragraph in paragraphs:
        wanted, row = words(paragraph), shown.pop(0)
        assert bool(row.strip()) == bool(wanted), (paragraph, row)
        while (have := words(row)) != wanted:
            assert have and have == wanted[: len(have)], (paragraph, row)
            gap = re.match(r"\s*", paragraph.partition(have[-1])[2])
            assert cell_len(row) + cell_len(wanted[len(have)]) + bool(gap and gap[0]) > width - 4, (
                "it ends too early"
            )
            wanted, row = wanted[len(have) :], shown.pop(0)
    assert not any(map(str.strip, shown)), shown


@calm
@given(PROSE | MIXED, st.integers(20, 200), PIECES)
@example("a" * 39 + " " + "b" * 40 + " next", 80, [])
@example("a" * 79 + " |\n" + "b" * 80 + " \n\n" + " " * 30 + "c" * 79 + "\n", 80, [1] * 300)
@example("x" * 50 + " " + "y" * 150 + " z", 200, [7] * 40)
def test_on_a_terminal_no_word_is_broken_that_fits_and_no_row_is_blank_that_is_not_in_the_text(
    text: str, width: int, pieces: list[int]
) -> None:
    assert_whole(text, width, pieces)
    assert fed(text, width, pieces) == fed(text, width), "it does not matter how the text is cut"


@calm
@given(st.text(st.sampled_from("ab é中。`~\n\n  -\t😀가")) | ANYTHING.map(clean), WIDTHS, PIECES)
@example("``` ```\n```\n", 5, [1, 1, 1, 1])
def test_wrap_changes_nothing_but_blanks_and_newlines(
    text: str, width: int, pieces: list[int]
) -> None:
    output = fed(text, width, pieces)
    assert "".join(output.split()) == "".join(text.split()) and output.count("\n") >= text.count(
        "\n"
    )


def test_a_tab_is_the_blanks_that_it_shows() -> None:
    assert fed("a\tb\tcc dddd e ", 20) == "a       b       cc\ndddd e "


def test_the_last_word_of_a_text_is_kept_whole_too() -> None:
    assert fed("aaaa bbbbbbbb", 10) == "aaaa\nbbbbbbbb"


def test_a_long_address_is_not_broken_by_a_newline_in_its_middle() -> None:
    address = "https://example.com/" + "path/" * 16
    assert address in fed(f"see {address} there\n", 80, [5] * 100)


CODE = st.text(st.sampled_from("ab (){}=中\n    \t~`")).filter(
    lambda code: not re.search("^ *```", code, re.M)
)


@calm
@given(PROSE, CODE, PROSE, WIDTHS, PIECES)
def test_code_in_fences_is_left_as_it_is(
    before: str, code: str, after: str, width: int, pieces: list[int]
) -> None:
    block = f"```python\n{code}\n```\n"
    output = fed(before + block + after, width, pieces)
    lines = output[output.index("```") :].split("\n")
    assert [line.split() for line in block.rstrip("\n").split("\n")] == [
        line.split() for line in lines[: block.count("\n")]
    ]


def test_code_in_an_indented_fence_is_left_as_it_is() -> None:
    text = "1. Do:\n   ```\n   some_function(with_an_argument, another)\n   ```\n"
    assert fed(text, 20) == text


@calm
@given(st.text("中文字。，", min_size=1, max_size=200), st.integers(10, 80), PIECES)
def test_chinese_flows_without_spaces_and_fills_its_lines(
    text: str, width: int, pieces: list[int]
) -> None:
    *lines, last = fed(text, width, pieces).split("\n")
    assert all(width - 1 <= cell_len(line) <= width for line in lines)
    assert cell_len(last) <= width and "".join([*lines, last]) == text


def test_words_show_as_soon_as_they_are_whole_and_endless_ones_in_parts() -> None:
    wrap = Wrap()
    assert [wrap.add(piece, 80) for piece in ("Hel", "lo", " wor", "ld\n", "中", "文x")] == [
        "",
        "",
        "Hello",
        " world\n",
        "中",
        "文",
    ]
    assert wrap.rest() == "x"
    assert wrap.add("y" * 81, 80) == "y" * 81


# ---- a stream that is no terminal ------------------------------------------------------------------------


@calm
@given(
    st.lists(
        st.tuples(st.sampled_from(["answer", "line", "status", "print", "finish"]), ANYTHING),
        max_size=20,
    )
)
@example([("answer", "\x9b1"), ("print", "0")])
@example([("answer", "\x9b1"), ("line", ""), ("print", "\x1b"), ("answer", "[m")])
def test_a_stream_that_is_no_terminal_gets_no_escape_and_no_repainting(
    steps: list[tuple[str, str]],
) -> None:
    stream = io.StringIO()
    screen = Screen(stream)
    assert not screen.live
    for kind, text in steps:
        match kind:
            case "answer":
                screen.answer(text)
            case "line":
                screen.line(text, "bold red")
            case "status":
                screen.status(text)
            case "print":
                screen.print(text, "dim")
            case "finish":
                screen.finish_line()
    screen.finish_line()
    assert not set(stream.getvalue()) & (DRIVES | HIDES)
    shown = [
        clean("".join(text for _, text in group))
        if kind == "answer"
        else "".join(clean(text) for _, text in group)
        for kind, group in itertools.groupby(
            (each for each in steps if each[0] != "status"), key=lambda each: each[0]
        )
        if kind != "finish"
    ]
    assert "".join(stream.getvalue().split()) == "".join(
        "".join(shown).split()
    )  # rich makes spaces of a tab


def test_a_line_begins_at_the_beginning_of_a_line() -> None:
    stream = io.StringIO()
    screen = Screen(stream)
    screen.answer("half")
    screen.line("whole", "red")
    screen.line()
    screen.finish_line()
    screen.finish_line()
    assert stream.getvalue() == "half\nwhole\n\n"


# ---- a real terminal -------------------------------------------------------------------------------------

STYLE = re.compile(r"\x1b\[[\d;]*m|\r\x1b\[K")  # all that we send ourselves


def on_terminal(
    place: Place, server: ScriptedServer, *arguments: str, columns: int = 80, **env: str
) -> tuple[str, int]:
    """One-shot under a pty: (all that came out of it, exit code)."""
    child = pexpect.spawn(
        sys.executable,
        ["-m", "coder", *arguments],
        cwd=str(place.ws),
        env=place.env(server, **env),
        timeout=60,
        dimensions=(24, columns),
    )
    data = child.read()
    child.close()
    return data.decode("utf-8"), child.exitstatus


def evil_run() -> ScriptedServer:
    """The same in every place that a model has: reasoning, text, arguments, a file's name, content and output, a tool's name."""
    calls = [
        ("bash", {"command": f"cat evil; : '{EVIL.replace(chr(0), '')}'"}),
        ("write", {"path": "n\x1b[2J\x9b2J.txt", "content": EVIL[:-1]}),
        ("ls", {}),
        ("bash", {"command": f"printf '%s' '{MARKUP}'; exit 3"}),
        ("no\x1b[2J", {"x": EVIL}),
    ]
    return serve(
        Reply(f"Say {EVIL} {MARKUP} said.", calls, reasoning=f"Think {EVIL} {MARKUP} thought."),
        Reply(f"{MARKUP}\nBye {EVIL} " + "and some more words of prose " * 5 + "end."),
    )


@pytest.mark.parametrize("term", ["dumb", "xterm-256color"])
def test_nothing_of_the_models_drives_the_terminal_and_markup_is_text(
    place: Place, term: str
) -> None:
    (place.ws / "evil").write_text(EVIL)
    with evil_run() as server:
        out, code = on_terminal(place, server, "-v", "-y", "go", TERM=term, columns=60)
    assert code == 0
    assert "\x1b[8m" not in out and "\x1b[31m\x1b" not in out
    bare = STYLE.sub("", out).replace("\r\n", "\n")
    assert not set(bare) & DRIVES, bare
    assert (bare == out.replace("\r\n", "\n")) == (term == "dumb")
    if term == "xterm-256color":
        assert "\x1b[32m" in out and "\x1b[2m" in out  # our own colours
    text = " ".join(bare.split())
    for words in (
        "Say link",
        "n.txt",
        *MARKUP.split(" "),
        "Think",
        "thought.",
        "Say",
        "said.",
        "Bye",
        "end.",
    ):
        assert words in text, (words, bare)
    assert text.count("[link=http://evil]x[/link]") >= 4  # reasoning, text, output, the answer
    prose = bare[bare.index("and some more") : bare.index("end.")]
    assert all(cell_len(line.rstrip()) <= 60 for line in prose.split("\n"))


def test_what_a_server_says_in_an_error_is_text_and_no_color_is_obeyed(place: Place) -> None:
    for no_color in ("1", ""):
        with serve(Reply(f"no {EVIL} {MARKUP} model", status=400)) as server:
            out, code = on_terminal(
                place, server, "-m", f"m{EVIL[:-1]}", "go", TERM="xterm-256color", NO_COLOR=no_color
            )
        assert code == 1
        assert not set(STYLE.sub("", out).replace("\r\n", "\n")) & DRIVES
        assert MARKUP in " ".join(STYLE.sub("", out).split()) and "]52;c;QUJD" in out
        codes = set(
            itertools.chain.from_iterable(
                found.split(";") for found in re.findall(r"\x1b\[([\d;]*)m", out)
            )
        )
        coloured = {
            number for number in codes if number and (30 <= int(number) <= 49 or int(number) >= 90)
        }
        assert coloured == (set() if no_color else {"31"})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"ls{' ' * 400}; x", "ls <400 blanks> ; x"),
        (f"ls{' ' * 59}; x", f"ls{' ' * 59}; x"),
        ("ls" + "\n" * 61 + "x", "ls\n<60 empty lines>\nx"),
        ("ls" + " \t\n" * 60 + "x", "ls \t\n<59 empty lines>\nx"),
        ("a\n\n\nb", "a\n\n\nb"),
    ],
)
def test_blanks_that_push_the_rest_out_of_sight_are_counted(text: str, shown: str) -> None:
    assert folded(text) == shown


# ---- white space ------------------------------------------------------------------------------------------


def told(*events: Event) -> list[str]:
    stream = io.StringIO()
    render = Renderer(Screen(stream))
    for event in events:
        render(event)
    return stream.getvalue().splitlines()


def test_the_white_space_of_titles_outputs_and_changes_is_shown_as_it_is() -> None:
    changes = "--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n-A = 1\n+A      = 1\n \tx  = 2\n"
    listed = ToolResult("total  8\n-rw  1 root    12 f")
    ran = told(
        ToolStart("1", "bash", {}, "bash ls -l  'a   b'"), ToolEnd("1", "bash", listed, False, 0)
    )
    assert ran == ["● bash ls -l  'a   b'", "  total  8", "  -rw  1 root    12 f"]
    made = ToolEnd("1", "edit", ToolResult("", details={"diff": changes}), False, 0)
    assert told(ToolStart("1", "edit", {}, "edit f"), made) == [
        "● edit f",
        "  @@ -1,2 +1,2 @@",
        "  -A = 1",
        "  +A      = 1",
        "       x  = 2",
    ]


def test_no_empty_line_follows_on_a_change_that_was_asked_about_or_on_a_whole_one() -> None:
    changes = "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n"
    asked = PermissionAsked("1", "edit", "f", "f", detail=changes)
    made = ToolEnd("1", "edit", ToolResult("", details={"diff": changes}), False, 0)
    assert told(ToolStart("1", "edit", {}, "edit f"), asked, made) == ["● edit f"]
    stream = io.StringIO()
    Renderer(Screen(stream)).whole_diff(changes)
    assert stream.getvalue().splitlines() == ["  @@ -1 +1 @@", "  -a", "  +b"]
