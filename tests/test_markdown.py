"""Streamed Markdown: styled row by row, the same for any cut of the stream, never wider than the
screen."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coder.cli.markdown import Markdown
from coder.cli.text_rows import cell_count

LONG = "word " * 40


def paint(text: str, style: str) -> str:
    """Styles as tags, so that a test reads them."""
    return f"<{style}>{text}</>" if style and text.strip() else text


def rows(text: str, width: int = 80) -> list[str]:
    markdown = Markdown(paint)
    return (markdown.feed(text, width) + markdown.finish()).splitlines()


def shown(text: str, width: int = 80) -> list[str]:
    return [re.sub(r"</?[a-z ]*>", "", row) for row in rows(text, width)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", ["plain"]),
        ("# One\n### Three", ["<bold cyan>One</>", "<bold>Three</>"]),
        ("#hashtag", ["#hashtag"]),
        ("a **bold** b", ["a <bold>bold</> b"]),
        ("an *italic* word", ["an <italic>italic</> word"]),
        ("***both***", ["<bold>both</>"]),
        ("**a `b` c**", ["<bold>a </><bold cyan>b</><bold> c</>"]),
        ("`**no stars**` and ``a ` b``", ["<cyan>**no stars**</> and <cyan>a ` b</>"]),
        ("2 * 3 * 4, 2*3* 4, f(*args, **kw)", ["2 * 3 * 4, 2*3* 4, f(*args, **kw)"]),
        ("*.py and **/*.ts", ["*.py and **/*.ts"]),
        ("snake_case and __init__", ["snake_case and __init__"]),
        ("**never closed", ["**never closed"]),
        ("`never closed", ["`never closed"]),
        (r"\*no\* and a\b", [r"*no* and a\b"]),
        ("[name](http://a.b/c)", ["<underline>name</><dim> (http://a.b/c)</>"]),
        ("[http://a.b](http://a.b)", ["<underline>http://a.b</>"]),
        ("list[int](x y) [1]", ["list[int](x y) [1]"]),
        ("- one\n* two\n  + three", ["• one", "• two", "  • three"]),
        ("\t- one", ["    • one"]),
        ("- [ ] open\n- [x] done", ["☐ open", "☑ done"]),
        ("1. a\n10) b", ["1. a", "10) b"]),
        ("> said", ["<dim>│ said</>"]),
        ("---", ["<dim>" + "─" * 40 + "</>"]),
        ("-5 degrees\n*x", ["-5 degrees", "*x"]),
        ("a\n\nb", ["a", "", "b"]),
        ("```\na **b**\n  c\n```\nd", ["<dim>──</>", "a **b**", "  c", "<dim>──</>", "d"]),
        ("```nothing-known\nx = 1", ["<dim>── nothing-known ──</>", "x = 1"]),
        # Characters of no width, with which a line of code may begin
        ("```\n\u0301\n\u200fa", ["<dim>──</>", "\u0301", "\u200fa"]),
        ("~~~\n```\n~~~", ["<dim>──</>", "```", "<dim>──</>"]),
        ("~~gone~~ and ~~**both**~~", ["<strike>gone</> and <strike bold>both</>"]),
        ("~5 and ~/.x, ~~ no ~~, a~~b", ["~5 and ~/.x, ~~ no ~~, a~~b"]),
        ("~~never closed", ["~~never closed"]),
        # What ends code: as many of the same mark or more, alone, at most three blanks further in
        # than what began it
        ("```\na\n```` \nb", ["<dim>──</>", "a", "<dim>──</>", "b"]),
        ("```\na\n```\u00a0\nb", ["<dim>──</>", "a", "<dim>──</>", "b"]),
        ("````\n```\na\n````\nb", ["<dim>──</>", "```", "a", "<dim>──</>", "b"]),
        ("```\n~~~\n```~~~\n```\nb", ["<dim>──</>", "~~~", "```~~~", "<dim>──</>", "b"]),
        (
            "```none\n1. a\n    ```sh\n    ls\n    ```\n2. **b**\n```\nc",
            [
                *("<dim>── none ──</>", "1. a", "    ```sh", "    ls", "    ```", "2. **b**"),
                *("<dim>──</>", "c"),
            ],
        ),
        ("   ```\na\n      ```\nb", ["<dim>──</>", "a", "<dim>──</>", "b"]),
        (
            "- ```sh\n  ls\n  ```\n- *b*",
            ["• <dim>── sh ──</>", "  ls", "<dim>──</>", "• <italic>b</>"],
        ),
        (
            "10. ```\n    ls\n    ```\n*b*",
            ["10. <dim>──</>", "    ls", "<dim>──</>", "<italic>b</>"],
        ),
    ],
)
def test_marks_become_styles_and_what_is_no_mark_stays(text: str, expected: list[str]) -> None:
    assert rows(text) == expected
    markdown = Markdown(paint)
    letter_by_letter = "".join(markdown.feed(each, 80) for each in text)
    assert (letter_by_letter + markdown.finish()).splitlines() == expected


def test_a_long_line_of_open_marks_comes_whole() -> None:
    """In one piece, as a server sends it that does not stream: it took half a minute."""
    assert " ".join(shown("*a [b " * 10_000)).split() == ["*a", "[b"] * 10_000


def test_code_is_highlighted_and_its_lines_are_not_broken() -> None:
    long = "x = " + "1 + " * 50 + "1"
    found = rows(f'```python\nreturn 1  # why\nx = """a\nb = 1\n"""\ny = 2\n{long}\n```', 40)
    assert found[1] == "<blue>return</> <cyan>1</>  <dim># why</>"
    assert found[3] == "<green>b = 1</>"
    assert found[5] == "y = <cyan>2</>"
    assert shown(f"```python\n{long}\n```", 40)[1] == long


@pytest.mark.parametrize("mark", ["- ", "  10. ", "> "])
def test_further_rows_of_an_item_or_a_quote_hang_below_its_text(mark: str) -> None:
    first, *others = shown(mark + LONG, 40)
    indent = "│ " if mark == "> " else " " * len(mark)
    assert len(others) > 3
    assert first.split()[1] == "word"
    assert all(row.startswith(indent + "word") for row in others)


@pytest.mark.parametrize("mark", ["- ", "> ", "1. ", ""])
def test_an_indentation_as_wide_as_the_screen_ends_and_loses_no_word(mark: str) -> None:
    for width in (1, 2, 3, 24, 26):
        assert shown(" " * 24 + mark + "wörd 日本", width)[-1].endswith("本")
    markdown = Markdown(paint)
    markdown.feed(" " * 24 + mark + "x", 80)
    assert "end" in markdown.feed(" word end\n", 20), "the screen has become narrower"
    assert shown(" " * 4000 + "x")[-1].strip() == "x", "in no time"


@pytest.mark.parametrize(
    ("width", "widest"),
    [
        (200, 100),
        (101, 100),
        (100, 100),
        (60, 60),
    ],
)
def test_prose_is_at_most_100_columns_wide_but_not_code_and_tables(width: int, widest: int) -> None:
    for mark in ("", "- ", "> ", "## ", "  1. "):
        found = shown(mark + LONG, width)
        assert widest - 6 < max(map(cell_count, found)) <= widest, mark
    assert max(
        map(
            cell_count,
            shown(f"| a |\n|-|\n| {LONG}|\n", width),
        )
    ) > min(width - 7, 150)
    assert shown(f"```\n{LONG}\n```", width)[1] == LONG.rstrip()


TABLE = "| name | what it is |\n|---|:-:|\n| `a` | **first** |\n| 日本語 | x\\|y |\n"


def test_a_table_is_set_when_it_ends() -> None:
    markdown = Markdown(paint)
    assert markdown.feed(TABLE, 80) == ""
    markdown.feed("\n", 80)
    assert shown(TABLE) == [
        "name   │ what it is",
        "───────┼───────────",
        "a      │   first",
        "日本語 │    x|y",
    ]
    aligned = shown("| n | side |\n|--:|:--|---|\n| 10 | a | b |\n")
    assert aligned[0] == " n │ side │"
    assert aligned[2] == "10 │ a    │ b"
    assert "<bold>name" in rows(TABLE)[0]
    assert "<bold>first</>" in rows(TABLE)[2]


def test_a_table_that_is_wider_than_the_screen_is_wrapped_in_its_cells() -> None:
    found = shown(f"| a | b |\n|-|-|\n| x | {LONG}|\n", 40)
    assert len(found) > 5
    assert all(cell_count(row) <= 40 for row in found)
    assert " ".join(row[4:] for row in found[2:]).split() == LONG.split()
    assert shown("| a | b | c | d |\n|-|-|-|-|\n", 10) == ["| a | b | c | d |", "|-|-|-|-|"]


MARKS = (
    "**",
    "*",
    "`",
    "~~",
    "```\n",
    "- ```\n",
    "    ```\n",
    "# ",
    "- ",
    "> ",
    "1. ",
    "| a | b |\n",
    "|-|-|\n",
    "[x](y)",
)
PIECES = st.sampled_from(
    (
        *MARKS,
        "word ",
        "\n",
        "日本語",
        " ",
        " " * 9,
        "\t",
    )
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(PIECES, max_size=40).map("".join),
    st.integers(1, 9),
    st.sampled_from([12, 40, 80]),
)
def test_any_cut_of_the_stream_gives_the_same_rows(text: str, size: int, width: int) -> None:
    markdown = Markdown(paint)
    streamed = ""
    for start in range(0, len(text), size):
        streamed += markdown.feed(text[start : start + size], width)
        assert isinstance(markdown.row, str)
    assert (streamed + markdown.finish()).splitlines() == rows(text, width)
    if "```" not in text:
        assert all(cell_count(row) <= width for row in shown(text, width))
