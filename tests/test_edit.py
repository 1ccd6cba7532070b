"""edit: the rungs and where each is taken, what is refused and in which words, what stays.

Every test runs the tool as the loop does, on real files, and looks at their bytes.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coder.types import DeniedError, ToolResult
from tests.terminal import promptly
from tests.workspace import Workspace


class Editing(Workspace):
    """A workspace in which `a` is the file that is edited."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.file = folder / "a"

    def edit(self, old: str, new: str, **more: Any) -> ToolResult:
        return self.call("edit", path="a", old_string=old, new_string=new, **more)

    def edited(self, before: bytes | str, old: str, new: str, **more: Any) -> bytes:
        """The bytes of a file after an edit that works."""
        self.holds(before)
        assert not self.edit(old, new, **more).is_error
        assert not [name for name in self.names() if name.startswith(".")]
        return self.file.read_bytes()

    def refused(self, before: bytes | str, old: str, new: str) -> str:
        """The text of an edit that does not work; the file is as it was."""
        self.holds(before)
        said = self.fails("edit", path="a", old_string=old, new_string=new)
        assert self.file.read_bytes() == (before.encode() if isinstance(before, str) else before)
        return said

    def holds(self, content: bytes | str) -> None:
        self.tools.seen.clear()
        self.put({"a": content})


@pytest.fixture
def ws(tmp_path: Path) -> Editing:
    return Editing(tmp_path)


# ---- the rungs ------------------------------------------------------------------------------

BLOCK = "class A:\n    def f(self):\n        one()\n        two()\n        return 1\n"
CALLS = "one()\ntwo()\n"
NUMBERED = BLOCK.replace("one", "1").replace("two", "2")
LEVEL = BLOCK.replace("        one()\n        two()", "        if 1:\n            one()")
DEF = "def f():\n\n    pass\n"
IF = "def f():\n\n    if 1:\n        stop()\n"
GO = "if 1:\n  go()\n"
ON = "if 2:\n  go()\n  stop()\n"
BOTH = "a\r\nb\nc\r\nd\ne\r"
CRLF = "a\r\nb\r\nc\r\n"

EDITS: dict[str, tuple[str, ...]] = {
    "exact": ("one\ntwo\nthree\n", "two\nth", "2\nTH", "one\n2\nTHree\n"),
    "no pattern": ("f(x)", "f(x)", r"g(\1\n)", r"g(\1\n)"),
    "line endings": (CRLF, "a\nb\n", "A\nnew\nB\n", "A\r\nnew\r\nB\r\nc\r\n"),
    "space at the end": ("k  \none  \ntwo\t\nk  \n", "one\ntwo", "1\n2", "k  \n1\n2\nk  \n"),
    "an empty line": ("x\n   \ny\n", "x\n\ny", "z", "z\n"),
    "less indentation": (indent(DEF, "    "), DEF, IF, indent(IF, "    ")),
    "a tab and spaces": (indent(DEF, "\t"), DEF, IF, indent(IF, "\t")),
    "more indentation": (f"{GO}end\n", indent(GO, "    "), indent(ON, "    "), f"{ON}end\n"),
    "only the old text lacks it": (BLOCK, CALLS, indent("1()\n2()\n", " " * 8), NUMBERED),
    "a new level": (BLOCK, CALLS, "if 1:\n    one()\n", LEVEL),
    "typographic": ("“a”\n“b” – it’s\n", '"b" - it\'s', "done", "“a”\ndone\n"),
    "plain": ("a = 'x'\n", "a = ‘x’", "a = ‘y’", "a = 'y'\n"),
    "lines that stay": (
        "“a”  \nto\u00a0b\nc\n",
        '"a"\nto b\nc',
        '"a"\nto b\nd',
        "“a”  \nto\u00a0b\nd\n",
    ),
    "no line is joined": ("a\nb\nc\n", "b\n", "B", "a\nB\nc\n"),
    "a line is joined": ("a\nb\n", "a\n", "a", "ab\n"),  # nothing else can be meant
    "a deleted line 1": (BLOCK, "        two()", "", BLOCK.replace("        two()\n", "")),
    "a deleted line 3": (CRLF, "b", "", "a\r\nc\r\n"),
    # A close fit goes before a loose one
    "space, none": ("2  \n3\n--\n2\n3\n", "2\n3\n", "X\n", "2  \n3\n--\nX\n"),
    "indentation, none": ("  2\n--\n\n2\n", "\n2\n", "X\n", "  2\n--\nX\n"),
    "quotes, none": ('“2”\n--\n"2"\n', '"2"', "X", "“2”\n--\nX\n"),
    "indentation, space": ("  2 \n  3\n--\n2 \n3\n", "2\n3\n", "X\n", "  2 \n  3\n--\nX\n"),
    "quotes, space": ('“2”\n3\n--\n"2" \n3\n', '"2"\n3\n', "X\n", "“2”\n3\n--\nX\n"),
    # Line endings stay
    "CRLF 1": (CRLF, "\nb", "\nB", "a\r\nB\r\nc\r\n"),
    "CRLF 2": (CRLF, "\nb", "\nb\nd", "a\r\nb\r\nd\r\nc\r\n"),
    "CRLF 3": (CRLF, "a\n", "a\n\n", "a\r\n\r\nb\r\nc\r\n"),
    "both 1": (BOTH, "b\n", "B\nB\n", "a\r\nB\nB\nc\r\nd\ne\r"),
    "both 2": ("a\r\nb\nc\r\n", "b\nc\n", "B\nc\nC\n", "a\r\nB\r\nc\r\nC\r\n"),
    "CRLF in all": ("a\r\nb\r\na\r\nb\r\n", "a\nb\n", "c\n", "c\r\nc\r\n", "all"),
    "both 3": (BOTH, "d\ne", "D", "a\r\nb\nc\r\nD\r"),
    # The mark and a missing newline at the end stay
    "mark": ("\ufefföne\ntwo", "two", "zwö\ndrei", "\ufefföne\nzwö\ndrei"),
    "no newline": ("öne\r\ntwo", "öne\ntwo\n", "öne\nzwö\ndrei\n", "öne\r\nzwö\r\ndrei"),
    "neither": ("\ufeffone\n  two", "two\n", "2\n", "\ufeffone\n  2"),
    # The numbers that read shows prove the place
    "numbers in the old text": ("x\ny\nz\n", "3\tz", "x", "x\ny\nx\n"),
    "numbers, less indentation": (BLOCK, "3\tone()\n4\ttwo()", "3\t1()\n4\t2()", NUMBERED),
    "numbers in both": ("a\n  b\nc\n", "2\t  b\n3\tc", "2\t  b\n3\td\n4\te", "a\n  b\nd\ne\n"),
    "numbers, and nothing new": ("a\nb\nc\n", "1|a\n2|b\n", "", "c\n"),
    "numbers that belong to the text": ("1\ta\n2\tb\n", "2\tb", "3\tb", "1\ta\n3\tb\n"),
    # Every place that does not overlap one before
    "words": ("a b a b a", "a", "aa", "aa b aa b aa", "all"),
    "newlines": ("a\nb", "\n", ", ", "a, b", "all"),  # the one at the end is not in the file
    "overlapping": ("xyxyxyx", "xyx", "N", "NyN", "all"),
    "one, a whole line": (BLOCK, "two()", "", BLOCK.replace("        two()\n", ""), "all"),
    "one, not quite": ("  a\n  b\nend\n", "a\nb\n", "c\nd\n", "  c\n  d\nend\n", "all"),
}


@pytest.mark.case("FIL-13", "FIL-15")
@pytest.mark.parametrize("case", EDITS)
def test_what_an_edit_changes(ws: Editing, case: str) -> None:
    before, old, new, after, *every = EDITS[case]
    assert (
        ws.edited(
            before,
            old,
            new,
            replace_all=bool(every),
        ).decode()
        == after
    )


NEAREST = "The nearest lines are"
SPACE = "White space differs"
UNCERTAIN = "the file has these lines in another indentation"
MADE = "the new text is already there, at line 3: nothing to do if that is the place"
LINES_1_3 = "old_string is in a at lines 1, 3."

REFUSALS = {
    "shifted differently": ("    one\n      two\n", "one\ntwo", "1\n2", SPACE),
    "a tab for spaces": ("\tone\n    two\n", "one\ntwo", "1\n2", SPACE),
    "new lines as the file has them": ("  a\n\n  b\n", "a\n\nb\n", "a\n  x\nb\n", UNCERTAIN),
    "no room to the left": (f"{GO}end\n", indent(GO, "    "), "    if 1:\n left\n", UNCERTAIN),
    "exact twice": ("say hi\n\nsay hi\n", "say hi", "x", LINES_1_3),
    "space at the end twice": ("say  \nhi\nsay \nhi\n", "say\nhi", "x", LINES_1_3),
    "indentation twice": ("  say\n  hi\n    say\n    hi\n", "say\nhi\n", "x", LINES_1_3),
    "punctuation twice": ("say “hi”\nsay ‘hi’ “hi”\nsay “hi”\n", 'say "hi"', "x", LINES_1_3),
    "overlapping": ("x\ny\nx\ny\nx\n", "x\ny\nx", "z", LINES_1_3),
    "words between": ("start\n    middle\nend\n", "start\n    other\nend", "x", NEAREST),
    "joined lines": ("start\n    middle\nend\n", "start middle end", "x", "is not in a"),
    "a half line": ("say “hi” to all\n", 'say "hi"', "x", "is not in a"),
    "neither level": (BLOCK, CALLS, "    if 1:\n        three()\n", UNCERTAIN),
    "empty": ("one", "", "two", "old_string is empty, and a is there. To insert, give the line"),
    "the same": ("one", "one", "one", "are the same in a: nothing to do"),
    "made already": ("a\nb\nnew text\n", "old text", "new text", MADE),
    "unlike anything": ("one\ntwo\n", "qqqqqqqqqqqqqq", "x", "nor anything like it. Read the file"),
    "nothing but space": ("one\ntwo\n", "\n\n\n\n", "x", "nor anything like it"),
    "composed": ("cafe\u0301 one\n", "caf\u00e9 one", "x", "is not in a"),
    "half a pair": ("one", "one", "\ud83d", "surrogates not allowed"),
    "binary": ("text\0text", "text", "x", "is a binary file"),
    "numbers 1": ("def g():\n    return 2\n", "1\tdef g():\n2\t    x", "y", "hold line numbers"),
    "space inside": ("def f():\n    a(1)\n", "def f():\n    a( 1 )\n", "x", SPACE),
    "a line break in words": (
        "a = 1\nb = 2\n",
        "a = 1\\nb = 2",
        "x",
        r"It holds \n as two characters",
    ),
    "escaped quotes": ('f("x")\n', 'f(\\"x\\")', "x", "It seems escaped"),
    "escaped marks": ("a = b -> c & d\n", "a = b -&gt; c &amp; d", "x", "It seems escaped"),
    "lines left out": (
        BLOCK,
        "    def f(self):\n    ...\n        return 1",
        "x",
        "... stands for nothing",
    ),
    "a comment for lines": (
        BLOCK,
        "    def f(self):\n    # ... rest\n        return 1",
        "x",
        "... stands for",
    ),
    "lines of a diff": (BLOCK, "-        one()\n+        1()", "x", "It has marks of a diff"),
    "a block of two texts": (
        BLOCK,
        "<<<<<<< SEARCH\n        one()\n=======\n1\n>>>>>>> REPLACE",
        "x",
        "marks of",
    ),
    "a fence": (BLOCK, "```python\n        one()\n        2()\n```", "x", "or of Markdown"),
    "other numbers": (BLOCK, "2\tone()\n3\ttwo()", "x", "hold line numbers"),
    "numbers and none": (
        BLOCK,
        "3\t        one()\n4\t        two()",
        "3\t        1()\n        2()",
        "hold line numbers",
    ),
    "numbers in another order": (BLOCK, "3\t        one()", "4\t        1()", "hold line numbers"),
    "a giant number": (BLOCK, "9" * 5000 + "\t        one()", "x", "hold line numbers"),
    "numbers of one of two": ("x\ny\nx\n", "3\tx", "z", "hold line numbers"),
    "numbers, almost": (BLOCK, "3\t        one()\n4\t        to()", "x", "hold line numbers"),
    "the way to copy": (BLOCK, "        ones()", "x", "(copy without the numbers):\n2\t    def"),
    "other words": ("def f():\n    a()\n", "def f():\n    b()\n", "x", "or the file has changed"),
}


@pytest.mark.case("FIL-24")
@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_refused_and_why(ws: Editing, case: str) -> None:
    before, old, new, why = REFUSALS[case]
    assert why in ws.refused(before, old, new)


def test_the_result_is_the_place_and_what_was_not_written_as_given(ws: Editing) -> None:
    """The user's diff is whole, and has the names of the file, too."""
    hunk = "@@ -1,3 +1,3 @@\n one\n-two\n+2\n three"
    for old, shown in (("two", ""), ("two  ", f"\n{hunk}")):
        ws.holds("one\ntwo\nthree\n")
        result = ws.edit(old, "2")
        assert result.content == f"Edited a, line 2.{shown}"
        assert result.details == {"diff": f"--- a/a\n+++ b/a\n{hunk}", "path": str(ws.file)}
    ws.holds("    one\n    two\n")
    indented = ws.edit("one\ntwo", "1\n2")
    assert indented.content == (
        "Edited a, lines 1-2.\n@@ -1,2 +1,2 @@\n-    one\n-    two\n+    1\n+    2"
    )
    ws.holds("a\nb\na\n")
    every = ws.edit("a", "c\nd", replace_all=True)
    assert every.content == "Edited a in 2 places, lines 1-5."
    ws.holds("a\nb\n")
    assert ws.edit("b\n", "").content == "Edited a, line 2."
    ws.holds("a\r\nb\n")
    assert ws.edit("a\r", "a").content == (
        "Edited a.\n(only line endings, or the newline at the end, differ)"
    )


def test_of_many_lines_in_a_row_the_result_repeats_the_first_and_the_last(ws: Editing) -> None:
    ws.holds("one\ntwo\nthree\n")
    new = [f"    line {number}" for number in range(31)]
    result = ws.edit("two  ", "\n".join(new))
    shown = ["@@ -1,3 +1,33 @@", " one", "-two", f"+{new[0]}", "+ ... (29 lines)", f"+{new[-1]}"]
    assert result.content == "\n".join(["Edited a, lines 2-32.", *shown, " three"])
    assert all(f"+{line}\n" in result.details["diff"] for line in new)
    back = str(ws.edit("\n".join(new) + "  ", "two").content)
    assert f"\n-{new[0]}\n- ... (29 lines)\n-{new[-1]}\n+two\n" in back
    few = str(
        ws.edit(
            "two  ",
            "\n".join(new[:10]),
        ).content
    )
    assert "@@" in few
    assert "..." not in few


def test_replace_all_in_20_000_lines_takes_seconds(ws: Editing) -> None:
    before = "".join(f"line {number} foo\r\nother {number}\r\n" for number in range(10_000))
    with promptly(60):
        after = ws.edited(before, "foo\n", "longer\n", replace_all=True).decode()
        assert after == before.replace("foo", "longer")
        assert ws.edited("a" * 5_000_000, "aa", "b", replace_all=True) == b"b" * 2_500_000
    assert "+line 0 longer" in ws.details[0]


# ---- a file that others change --------------------------------------------------------------

NOTE = "Note: the file had changed since it was read."


def test_a_file_that_was_touched_only_is_as_it_was_read(ws: Editing) -> None:
    ws.holds("one\ntwo\n")
    ws("read", path="a")
    for old, new in (("one", "1"), ("two", "2")):
        os.utime(ws.file, ns=(1, 1))
        assert "Note" not in str(ws.edit(old, new).content)
        ws.file.write_bytes(ws.file.read_bytes())
    assert ws("write", path="a", content="3\n") == "Overwrote a: 1 lines, was 2."


def test_the_exact_text_is_edited_in_a_file_that_a_formatter_changed(ws: Editing) -> None:
    ws.holds("one\ntwo\n  three\n")
    ws("read", path="a")
    ws.file.write_text("one\n\ntwo\n    three\n")
    loose = ws.fails("edit", path="a", old_string="  two\n  three", new_string="x")
    assert "White space differs" in loose
    assert "4\t    three" in loose
    gone = ws.fails("edit", path="a", old_string="  three (3)\nend", new_string="x")
    assert "The file has changed since it was read." in gone
    first, *_ = str(ws.edit("two", "2").content).split("\n")
    assert first == f"Edited a, line 3. {NOTE}"
    assert NOTE not in str(ws.edit("one", "1").content)
    # The model has seen its own changes only
    assert "was not read as it is now" in ws.fails("write", path="a", content="x")
    ws("read", path="a")
    ws("write", path="a", content="x")


def test_an_edit_of_a_file_that_was_not_read_does_not_count_as_reading_it(ws: Editing) -> None:
    ws.holds("one\ntwo\n")
    ws.edit("two", "2")
    assert "was not read as it is now" in ws.fails("write", path="a", content="x")


# ---- the way out ----------------------------------------------------------------------------


def test_the_nearest_lines_are_shown_with_their_numbers(ws: Editing) -> None:
    lines = [f"value_{number} = compute({number})\n" for number in range(1, 200)]
    old = "value_120 = compute(120)\nvalue_121 = compte(121)\n"
    message = ws.refused("".join(lines), old, "x")
    assert "".join(f"{number}\t{lines[number - 1]}" for number in range(119, 122)) in message
    text = "".join(lines)
    message = ws.refused(text, text.replace("compute(7)", "c(7)"), "x")
    assert "7\tvalue_7 = compute(7)\n" in message
    assert len(message) < 3000
    block = "    if found:\n        return None\n    else:\n        pass\n"
    blocks = [f"def f{number}():\n{block}" for number in range(1000)]  # most lines are common
    old = f"def  f700():\n{block}def f701():\n{block.replace('pass', 'return 1')}"
    with promptly(60):
        message = ws.refused("".join(blocks), old, "x")
    assert "3501\tdef f700():\n" in message
    assert "3506\tdef f701():\n" in message


def deny() -> None:
    raise DeniedError("no")


def test_a_denied_edit_is_not_made_and_that_of_a_missing_or_too_large_file(ws: Editing) -> None:
    assert "there is no file a. To create it use write." in str(ws.edit("a", "b").content)
    ws.file.touch()
    os.truncate(ws.file, 51_000_000)
    assert "has 51,000,000 bytes, too large to edit here" in str(ws.edit("a", "b").content)
    ws.when_asked = deny
    assert ws.refused("one\n", "one", "two") == "Denied: no"
    assert ws.asked == [("edit", "a")]
    assert ws.details == ["--- a/a\n+++ b/a\n@@ -1 +1 @@\n-one\n+two"]


def test_an_empty_old_text_creates_a_file_that_is_not_there(ws: Editing) -> None:
    assert ws("edit", path="new/a", old_string="", new_string="x\n") == "Created new/a (1 lines)."
    assert (ws.folder / "new/a").read_text() == "x\n"
    assert ws.asked == [("edit", "new/a")]
    assert "new/a is there" in ws.fails("edit", path="new/a", old_string="", new_string="y")


def test_of_a_secret_file_nothing_is_shown_without_permission(ws: Editing) -> None:
    ws.put({".env": "A=1\nB=2\n"}, link=".env")
    asked = ws.when_asked
    ws.when_asked = deny
    for path in (".env", "link"):
        patch = f"*** Begin Patch\n*** Update File: {path}\n A=1\n-B=3\n*** End Patch"
        assert ws.fails("apply_patch", patch=patch) == "Denied: no"
        assert ws.fails("edit", path=path, old_string="A=3", new_string="") == "Denied: no"
    ws.when_asked = asked
    assert "-A=1\n+A=3" in ws("edit", path=".env", old_string="A=1 ", new_string="A=3")
    assert ws.asked == [("read", ".env")] * 5 + [("edit", ".env")]


# ---- what stays as it is --------------------------------------------------------------------


@pytest.mark.case("FIL-18")
@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("latin-1", "Größe\r\nword\r\nà la carte\r\n"),
        ("shift-jis", "日本語\nword\nﾃｽﾄ ソ表\n"),
        ("cp1252", "“word” – €\n"),
        ("gb18030", "中文 word 文件\n"),
    ],
)
def test_bytes_of_other_encodings_survive_exactly(ws: Editing, encoding: str, text: str) -> None:
    before = text.encode(encoding)
    assert ws.edited(before, "word", "another") == before.replace(b"word", b"another")
    for new in ("wörd", "\ufffd", "\udce9"):
        message = ws.refused(before, "word", new)
        assert "the file is not UTF-8: only ASCII can be added to it" in message
    before = "é café word\n".encode() + b"\xff\n"
    assert ws.edited(before, "café", "cafe") == before.replace("café".encode(), b"cafe")


# ---- properties -----------------------------------------------------------------------------

SOUP = st.text(st.sampled_from('ab“" \t\r\n'), max_size=20)


@settings(max_examples=100, deadline=None)
@given(
    SOUP,
    SOUP,
    st.text(st.sampled_from("xyé \n"), max_size=4),
    st.booleans(),
)
def test_any_edit_works_or_changes_nothing(text: str, old: str, new: str, every: bool) -> None:
    assume(old)
    with tempfile.TemporaryDirectory() as folder:
        ws = Editing(Path(folder))
        ws.holds(text)
        result = ws.edit(old, new, replace_all=every)
        assert "failed" not in result.content
        if result.is_error:
            assert ws.file.read_bytes() == text.encode()
        elif text.count(old) == 1 and "\r" not in text + old and old.strip() and new:
            end = "\n" if old.endswith("\n") and not new.endswith("\n") and new != old[:-1] else ""
            assert ws.file.read_text() == text.replace(old, new + end)
