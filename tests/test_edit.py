"""edit: the five rungs and where each is taken, what is refused and with which words, and what of a file stays as it is.

Every test runs the tool as the loop does, on real files, and looks at their bytes.
"""

from __future__ import annotations

import codecs
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, event, example, given, settings
from hypothesis import strategies as st

from coder.abort import Abort
from coder.tools.edit import edit
from coder.tools.files import ls, read, write
from coder.toolset import ToolContext, Toolset
from coder.types import DeniedError, ToolCall, ToolResult


class Workspace:
    """A session with the file tools in a folder, in which `a` is the file that is edited."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "a"
        self.tools = Toolset([read, write, edit, ls], cwd=folder)
        self.asked: list[tuple[str, str, str]] = []
        self.when_asked: Callable[[], None] = lambda: None

    def authorize(
        self, ctx: ToolContext, permission: str, patterns: Sequence[str], detail: str
    ) -> None:
        self.asked.append((permission, ", ".join(patterns), detail))
        self.when_asked()

    def run(self, name: str, **arguments: Any) -> ToolResult:
        call = ToolCall("1", name, arguments)
        ctx = self.tools.context(call, Abort())
        ctx.authorize = self.authorize
        work = self.tools.run(call, ctx)
        while True:
            try:
                next(work)
            except StopIteration as end:
                return end.value

    def edit(self, old: str, new: str, **more: Any) -> ToolResult:
        return self.run("edit", path="a", old_string=old, new_string=new, **more)

    def edited(self, before: bytes | str, old: str, new: str, **more: Any) -> bytes:
        """The bytes of a file after an edit that works."""
        self.holds(before)
        result = self.edit(old, new, **more)
        assert not result.is_error, result.content
        assert [name for name in os.listdir(self.file.parent) if name.startswith(".")] == []
        return self.file.read_bytes()

    def refused(self, before: bytes | str, old: str, new: str, **more: Any) -> str:
        """The text of an edit that does not work; the file is as it was."""
        self.holds(before)
        result = self.edit(old, new, **more)
        assert result.is_error, result.content
        assert self.file.read_bytes() == (before.encode() if isinstance(before, str) else before)
        assert isinstance(result.content, str)
        return result.content

    def holds(self, content: bytes | str) -> None:
        self.tools.seen.clear()
        self.file.write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.fixture
def ws(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


# ---- the rungs -------------------------------------------------------------------------------------------


def test_exact_text_is_replaced_and_nothing_else(ws: Workspace) -> None:
    assert ws.edited("one\ntwo\nthree\n", "two\nth", "2\nTH") == b"one\n2\nTHree\n"
    assert ws.edited("one two", "one ", "") == b"two"
    assert ws.edited("one", "one", "") == b""
    assert ws.edited("f(x)", "f(x)", r"g(\1\n)") == rb"g(\1\n)"


def test_line_endings_need_not_be_those_of_the_file(ws: Workspace) -> None:
    """FIL-13"""
    assert ws.edited(b"a\r\nb\r\nc\r\n", "a\nb\n", "A\nnew\nB\n") == b"A\r\nnew\r\nB\r\nc\r\n"
    assert ws.edited(b"a\nb\nc\n", "a\r\nb\r\n", "A\r\nB\r\n") == b"A\nB\nc\n"


def test_trailing_space_need_not_be_that_of_the_file(ws: Workspace) -> None:
    assert (
        ws.edited("keep  \none  \ntwo\t\nkeep  \n", "one\ntwo", "1\n2") == b"keep  \n1\n2\nkeep  \n"
    )
    assert ws.edited("keep\none\ntwo\nkeep\n", "one   \ntwo\n", "1\n2\n") == b"keep\n1\n2\nkeep\n"
    assert ws.edited("x\n   \ny\n", "x\n\ny", "z") == b"z\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "class A:\n    def f():\n\n        pass\n",
            "class A:\n    def f():\n\n        if 1:\n            stop()\n",
        ),
        (
            "class A:\n\tdef f():\n  \n\t    pass\n",
            "class A:\n\tdef f():\n  \n\t    if 1:\n\t        stop()\n",
        ),
        (
            "class A:\n\n\n      def f():\n\n          pass\n",
            "class A:\n\n\n      def f():\n\n          if 1:\n              stop()\n",
        ),
    ],
)
def test_text_that_is_indented_less_than_the_file_is_shifted(
    ws: Workspace, before: str, after: str
) -> None:
    old, new = "def f():\n\n    pass\n", "def f():\n\n    if 1:\n        stop()\n"
    assert ws.edited(before, old, new).decode() == after


def test_text_that_is_indented_more_than_the_file_is_shifted(ws: Workspace) -> None:
    assert (
        ws.edited(
            "if 1:\n  go()\nend\n",
            "    if 1:\n      go()\n",
            "    if 2:\n      go()\n      stop()\n",
        )
        == b"if 2:\n  go()\n  stop()\nend\n"
    )
    assert "not certain" in ws.refused(
        "if 1:\n  go()\nend\n", "    if 1:\n      go()\n", "    if 1:\n  no room to the left\n"
    )


@pytest.mark.parametrize("before", ["    one\n      two\n", "    one\n  two\n", "\tone\n    two\n"])
def test_lines_that_are_not_all_shifted_alike_are_not_taken(ws: Workspace, before: str) -> None:
    assert "White space differs" in ws.refused(before, "one\ntwo", "1\n2")


@pytest.mark.parametrize(
    ("before", "old"),
    [
        ("say “hello” – it’s", 'say "hello" - it\'s'),
        ('say "hello" - it\'s', "say “hello” — it’s"),
        ('say\u00a0"hello" - it\'s', 'say "hello" - it\'s'),
    ],
)
def test_typographic_characters_fit_the_plain_ones(ws: Workspace, before: str, old: str) -> None:
    assert (
        ws.edited(f"“first”\n{before} to all “last”\n", old, "done").decode()
        == "“first”\ndone to all “last”\n"
    )


def test_typographic_characters_fit_across_lines_of_a_crlf_file(ws: Workspace) -> None:
    assert (
        ws.edited("a\r\n“b”\r\nc–d\r\ne\r\n".encode(), '"b"\nc-d', "x\ny")
        == b"a\r\nx\r\ny\r\ne\r\n"
    )


@pytest.mark.parametrize(
    ("fits_twice", "old"),
    [
        ("say hi\n\nsay hi\n", "say hi"),
        ("say\r\nhi\r\nsay\r\nhi\r\n", "say\nhi"),
        ("say  \nhi\nsay \nhi\n", "say\nhi"),
        ("  say\n  hi\n    say\n    hi\n", "say\nhi\n"),
        ("say “hi”\nsay ‘hi’ “hi”\nsay “hi”\n", 'say "hi"'),
    ],
    ids=["exact", "line endings", "trailing space", "indentation", "punctuation"],
)
def test_a_rung_is_taken_only_where_exactly_one_place_fits(
    ws: Workspace, fits_twice: str, old: str
) -> None:
    message = ws.refused(fits_twice.encode(), old, "x")
    assert "old_string is in a 2 times, at lines 1, 3." in message
    assert "replace_all" in message


@pytest.mark.parametrize(
    ("looser", "closer", "old"),
    [
        ("two  \nthree\n", "two\nthree\n", "two\nthree\n"),
        ("  two\n  three\n", "\ntwo\nthree\n", "\ntwo\nthree\n"),
        ("“two”\n", '"two"\n', '"two"'),
        ("  two \n  three\n", "two \nthree\n", "two\nthree\n"),
        ("“two”\nthree\n", '"two" \nthree\n', '"two"\nthree\n'),
    ],
    ids=[
        "trailing space",
        "indentation",
        "punctuation",
        "trailing space before indentation",
        "trailing space before punctuation",
    ],
)
def test_a_place_that_fits_closely_is_taken_before_a_looser_one(
    ws: Workspace, looser: str, closer: str, old: str
) -> None:
    after = ws.edited(f"{looser}between\n{closer}end\n", old, "X\n").decode()
    assert after.startswith(f"{looser}between\nX\n")
    assert "two" not in after.removeprefix(looser)


def test_nothing_looser_is_tried(ws: Workspace) -> None:
    for old in (
        "start\n    something else\nend",
        "start middle end",
        "start\\nmiddle",
        "strat",
        "START",
    ):
        ws.refused("start\n    middle\nend\n", old, "x")


def test_places_that_overlap_are_two(ws: Workspace) -> None:
    assert "2 times, at lines 1, 3." in ws.refused("x\ny\nx\ny\nx\n", "x\ny\nx", "z")
    assert "2 times, at lines 1, 3." in ws.refused(" x\n y\n x\n y\n x\n", "x\ny\nx", "z")


BLOCK = "class A:\n    def f(self):\n        one()\n        two()\n        return 1\n"


@pytest.mark.parametrize("off", ["", "  ", "        ", "\t    "])
@pytest.mark.parametrize("given", ["old", "file"])
def test_lines_that_old_and_new_share_tell_whether_new_is_off_too(
    ws: Workspace, off: str, given: str
) -> None:
    """Only old_string in a wrong indentation, or both; the result is the same."""
    old = f"{off}def f(self):\n{off}    one()\n{off}    two()\n"
    lead = off if given == "old" else "    "
    new = f"{lead}def f(self):\n{lead}    one()\n{lead}    three()\n"
    assert ws.edited(BLOCK, old, new).decode() == BLOCK.replace("two", "three")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "    one()\n    two()\n",
            "    if 1:\n        one()\n",
        ),  # wrapped, or one() as it is in the file
        ("            one()\n            two()\n", "    if 1:\n        three()\n"),
        ("one()\n        two()\n", "    one()\n        three()\n"),
        ("two()", "two()\nthree()"),
        ("two()", "if 1:\n        three()"),
    ],
)
def test_where_the_indentation_of_new_is_not_certain_it_is_refused_with_the_lines(
    ws: Workspace, old: str, new: str
) -> None:
    message = ws.refused(BLOCK, old, new)
    assert "not certain" in message
    assert "\t        two()" in message or "\t        one()" in message


def test_a_unit_of_indentation_that_the_old_lines_do_not_prove_is_refused(ws: Workspace) -> None:
    assert "not certain" in ws.refused(BLOCK, "  def f(self):\n", "  def f(self):\n    zero()\n")
    assert "White space differs" in ws.refused(
        BLOCK, "  def f(self):\n    one()\n", "  def f(self):\n    zero()\n"
    )


def test_an_indentation_is_never_doubled(ws: Workspace) -> None:
    after = BLOCK.replace("one()", "zero()")
    assert ws.edited(BLOCK, "one()", "        zero()").decode() == after
    assert (
        ws.edited(BLOCK, "one()\n        two()", "        zero()\n        two()").decode() == after
    )
    assert ws.edited(BLOCK, "    one()", "        zero()").decode() == after
    assert ws.edited(BLOCK, "one()", "zero()\n        half()").decode() == BLOCK.replace(
        "one()", "zero()\n        half()"
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("        two()", ""),
        ("        two()\n", ""),
        ("two()", ""),
        ("two()\n", ""),
        ("        one()\n        two()", "        one()"),
        ("        one()\n        two()\n", "        one()"),
        ("one()\n        two()\n", "one()"),
    ],
)
def test_a_line_that_is_deleted_goes_with_its_newline(ws: Workspace, old: str, new: str) -> None:
    assert ws.edited(BLOCK, old, new).decode() == BLOCK.replace("        two()\n", "")
    assert ws.edited(BLOCK.replace("\n", "\r\n"), old, new).decode() == BLOCK.replace(
        "        two()\n", ""
    ).replace("\n", "\r\n")


def test_lines_are_not_joined(ws: Workspace) -> None:
    assert ws.edited("a\nb\nc\n", "b\n", "B") == b"a\nB\nc\n"
    assert ws.edited("a  # note\nb\n", "  # note\n", "") == b"a\nb\n"
    assert ws.edited("a\nb\n", "a\n", "a") == b"ab\n"  # nothing else can be meant
    assert ws.edited("a\n\nb\n", "\n\n", "\n") == b"a\nb\n"


def test_straight_quotes_and_spaces_stay_straight(ws: Workspace) -> None:
    code = "a = \"x\"  # it's\nb = 'y'\nc = 2\n"
    curly = str.maketrans({'"': "“", "'": "’", " ": "\u00a0"})
    old, new = "a = \"x\"  # it's\nb = 'y'", 'a = "x"  # it\'s\nb = \'z\' + "é"'
    assert ws.edited(code, old.translate(curly), new.translate(curly)).decode() == code.replace(
        "'y'", "'z' + \"é\""
    )
    assert ws.edited(code, old.translate(curly), new).decode() == code.replace("'y'", "'z' + \"é\"")


def test_lines_that_only_stay_are_the_file_s_own(ws: Workspace) -> None:
    before = "say “hi”  \nto\u00a0all\nend\n"
    assert ws.edited(
        before, 'say "hi"\nto all\nend', 'say "hi"\nto all\nstop'
    ).decode() == before.replace("end", "stop")


def test_punctuation_that_the_file_does_not_decide_is_refused(ws: Workspace) -> None:
    message = ws.refused("“one” and “two”\n", '"one" and "two"', '"one" and "two" and "three"')
    assert "not certain" in message
    assert "“ (U+201C)" in message


# ---- replace_all -----------------------------------------------------------------------------------------


def test_replace_all_replaces_every_place(ws: Workspace) -> None:
    assert ws.edited("a b a b a", "a", "aa", replace_all=True) == b"aa b aa b aa"
    assert ws.edited("one", "one", "two", replace_all=True) == b"two"
    assert ws.edited(b"a\r\nb\r\na\r\nb\r\n", "a\nb\n", "c\n", replace_all=True) == b"c\r\nc\r\n"
    assert (
        ws.edited("  a \n  b\n\n a\n b\n", "a\nb", "c\nd", replace_all=True)
        == b"  c\n  d\n\n c\n d\n"
    )
    ws.holds("a\nb\na\n")
    result = ws.edit("a", "c", replace_all=True)
    assert isinstance(result.content, str)
    assert result.content.startswith("Edited a in 2 places.\n--- a/a\n+++ b/a\n")
    assert "is not in a" in ws.refused("one", "two", "three", replace_all=True)


@pytest.mark.parametrize(
    ("before", "old", "after"),
    [
        ("xyxyxyx", "xyx", "NyN"),
        ("x \ny \nx \ny \nx \nend\n", "x\ny\nx", "N\ny \nx \nend\n"),
        ("aaaaa", "aa", "NNa"),
    ],
)
def test_replace_all_takes_of_places_that_overlap_the_first(
    ws: Workspace, before: str, old: str, after: str
) -> None:
    assert ws.edited(before, old, "N", replace_all=True).decode() == after


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_replace_all_in_20_000_lines_takes_seconds(ws: Workspace, newline: str) -> None:
    before = "".join(
        f"line {number} foo{newline}other {number}{newline}" for number in range(10_000)
    )
    started = time.monotonic()
    assert ws.edited(
        before, "foo\n", "a longer word\n", replace_all=True
    ).decode() == before.replace("foo", "a longer word")
    assert time.monotonic() - started < 15
    _, _, detail = ws.asked[0]
    assert detail.endswith(" of 10000 places)")
    assert "+line 0 a longer word" in detail


def test_a_text_that_is_almost_everywhere_is_refused_in_little_memory(ws: Workspace) -> None:
    assert "in a 100,000 times or more" in ws.refused("a" * 5_000_000, "aa", "b", replace_all=True)


# ---- what is refused, and the way out --------------------------------------------------------------------


def test_an_empty_old_string_is_refused(ws: Workspace) -> None:
    assert "old_string is empty. To create a file use write" in ws.refused("one", "", "two")
    assert "old_string is empty" in ws.refused("", "", "two")


def test_an_edit_that_changes_nothing_is_refused(ws: Workspace) -> None:
    assert "are the same: nothing to do" in ws.refused("one", "one", "one")


def test_several_places_are_named_by_their_lines(ws: Workspace) -> None:
    assert "3 times, at lines 1, 3, 3." in ws.refused("foo\nbar\nfoo foo\n", "foo", "x")
    assert ws.refused("x\n" * 100, "x", "y").count(", ") < 25


def test_an_edit_that_was_made_already_is_recognised(ws: Workspace) -> None:
    message = ws.refused("a\nb\nnew text\n", "old text", "new text")
    assert "new_string is, at line 3: this edit seems to be made already" in message
    assert "made already" in ws.refused(b"a\r\nnew\r\ntext\r\n", "old\ntext", "new\ntext")
    assert "made already" not in ws.refused("new\nnew\n", "old", "new")


def test_copied_line_numbers_are_recognised_and_the_lines_are_shown(ws: Workspace) -> None:
    text = "def f():\n    return 1\n\n\ndef g():\n    return 2\n"
    for old in ("5\tdef g():\n6\t    return 2", "    5|def g():\n    6|    return 2"):
        message = ws.refused(text, old, "def h():\n    return 3")
        assert "It seems to hold line numbers, which are not part of the file." in message
        assert "5\tdef g():\n6\t    return 2" in message
        assert "without the line numbers" in message


def test_the_nearest_lines_are_shown_with_their_numbers_and_the_cause(ws: Workspace) -> None:
    text = "".join(f"value_{number} = compute({number})\n" for number in range(1, 200))
    message = ws.refused(text, "value_120 = compute(120)\nvalue_121 = compte(121)\n", "x")
    assert (
        "119\tvalue_119 = compute(119)\n120\tvalue_120 = compute(120)\n121\tvalue_121 = compute(121)\n122\t"
        in message
    )
    assert "The text differs, or the file has changed since it was read." in message
    assert "White space differs" in ws.refused("if  x :\n    go( )\n", "if x:\n    go()", "y")
    message = ws.refused(text, text.replace("compute(7)", "c(7)"), "x")
    assert "7\tvalue_7 = compute(7)\n" in message
    assert len(message) < 3000


def test_the_nearest_lines_are_found_among_many_that_are_common(ws: Workspace) -> None:
    block = "    if found:\n        return None\n    else:\n        pass\n"
    blocks = [f"def f{number}():\n{block}" for number in range(1000)]
    old = f"def  f700():\n{block}def f701():\n{block.replace('pass', 'return 1')}"
    started = time.monotonic()
    message = ws.refused("".join(blocks), old, "x")
    assert "3501\tdef f700():\n" in message
    assert "3506\tdef f701():\n" in message
    assert time.monotonic() - started < 10


def test_a_text_unlike_anything_is_answered_with_what_to_do(ws: Workspace) -> None:
    message = ws.refused("one\ntwo\n", "qqqqqqqqqqqqqq", "x")
    assert "nor anything like it. Read the file, or search for the text with grep." in message
    assert "nor anything like it" in ws.refused("", "one", "x")


@pytest.mark.parametrize("old", ["\n\n\n\n", "  \t  \n"])
def test_white_space_that_is_not_there_is_not_taken_for_line_numbers(
    ws: Workspace, old: str
) -> None:
    assert "line numbers" not in ws.refused("one\ntwo\n", old, "x")


@pytest.mark.parametrize(
    ("old", "cause"),
    [
        ("def f():\n    c()\n", "It lacks line 3 of the file: 'a()'."),
        ("def f():\n    a()\n    c()\n", "It lacks line 4 of the file: 'b()'."),
        ("# top\n    a()\n    b()\n", "It lacks line 2 of the file: 'def f():'."),
        (
            "def f():\n    a()\n    b()\n    x()\n    c()\n",
            "The file has no such line there: 'x()'.",
        ),
        (
            "def f():\n    a( )\n    b()\n",
            "White space differs (indentation, or space inside a line).",
        ),
        (
            "def f():\n   a()\n    b()\n",
            "White space differs (indentation, or space inside a line).",
        ),
        (
            "def f():\n    a()\n    bb()\n",
            "The text differs, or the file has changed since it was read.",
        ),
    ],
)
def test_the_cause_of_a_failure_is_the_real_one(ws: Workspace, old: str, cause: str) -> None:
    assert cause in ws.refused("# top\ndef f():\n    a()\n    b()\n    c()\n    d()\n", old, "x")


def test_a_file_that_is_missing_binary_or_too_large_is_refused(ws: Workspace) -> None:
    result = ws.edit("a", "b")
    assert result.is_error
    assert "there is no file" in result.content
    assert "is a binary file" in ws.refused(b"text\0text", "text", "x")
    with open(ws.file, "wb") as file:
        file.truncate(51_000_000)
    result = ws.edit("a", "b")
    assert result.is_error
    assert "has 51,000,000 bytes, too large to edit here" in result.content


def test_a_denied_edit_is_not_made(ws: Workspace) -> None:
    def deny() -> None:
        raise DeniedError("no")

    ws.when_asked = deny
    assert ws.refused("one\n", "one", "two") == "Denied: no"
    assert ws.asked == [("edit", "a", "--- a/a\n+++ b/a\n@@ -1 +1 @@\n-one\n+two")]


@pytest.mark.parametrize("was_read", [True, False])
def test_what_the_user_writes_while_being_asked_is_not_overwritten(
    ws: Workspace, was_read: bool
) -> None:
    """FIL-19"""
    ws.holds("one\n")
    if was_read:
        ws.run("read", path="a")
    ws.when_asked = lambda: ws.file.write_text("one\nthe user's\n") and None
    result = ws.edit("one", "two")
    assert result.is_error
    assert "a changed on disk" in result.content
    assert ws.file.read_text() == "one\nthe user's\n"


def test_a_file_that_is_deleted_while_the_user_is_asked_is_not_brought_back(ws: Workspace) -> None:
    ws.holds("one\n")
    ws.when_asked = ws.file.unlink
    result = ws.edit("one", "two")
    assert result.is_error
    assert "a changed on disk" in result.content
    assert not ws.file.exists()


# ---- what stays as it is ---------------------------------------------------------------------------------


def test_the_result_is_a_diff_of_the_change(ws: Workspace) -> None:
    ws.holds("one\ntwo\nthree\n")
    result = ws.edit("two", "2")
    assert result.content == "Edited a.\n--- a/a\n+++ b/a\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three"
    assert result.details == {
        "diff": "--- a/a\n+++ b/a\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three",
        "path": str(ws.file),
    }


@pytest.mark.case("FIL-13")
def test_of_a_crlf_file_only_the_bytes_of_the_line_change(ws: Workspace) -> None:
    """FIL-13"""
    lines = [b"line %d of the file\r\n" % number for number in range(100)]
    after = ws.edited(b"".join(lines), "line 50 of the file\n", "line fifty\nand a half\n")
    assert after == b"".join([*lines[:50], b"line fifty\r\nand a half\r\n", *lines[51:]])


@pytest.mark.parametrize(
    ("old", "new", "after"),
    [
        ("\nb", "\nB", b"a\r\nB\r\nc\r\n"),
        ("\nb", "", b"a\r\nc\r\n"),
        ("\nb", "\nb\nd", b"a\r\nb\r\nd\r\nc\r\n"),
        ("b\n", "", b"a\r\nc\r\n"),
        ("a\n", "a\n\n", b"a\r\n\r\nb\r\nc\r\n"),
        ("b", "b\nd", b"a\r\nb\r\nd\r\nc\r\n"),
    ],
)
def test_a_crlf_is_never_cut_in_two(ws: Workspace, old: str, new: str, after: bytes) -> None:
    """FIL-13"""
    assert ws.edited(b"a\r\nb\r\nc\r\n", old, new) == after


def test_mixed_line_endings_stay_mixed_outside_of_the_span(ws: Workspace) -> None:
    """FIL-13"""
    before = b"a\r\nb\nc\r\nd\ne\r"
    assert ws.edited(before, "b\n", "B\nB\n") == b"a\r\nB\nB\nc\r\nd\ne\r"
    assert ws.edited(before, "c\n", "C\nC\n") == b"a\r\nb\nC\r\nC\r\nd\ne\r"
    assert ws.edited(before, "d\ne", "D") == b"a\r\nb\nc\r\nD\r"


@pytest.mark.case("FIL-15")
@pytest.mark.parametrize(
    ("mark", "encoding"),
    [
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
        (b"", "utf-8"),
    ],
)
def test_the_byte_order_mark_and_a_missing_newline_at_the_end_are_kept(
    ws: Workspace, mark: bytes, encoding: str
) -> None:
    """FIL-15"""
    for newline in ("\n", "\r\n"):
        before, after = (
            mark + newline.join(lines).encode(encoding)
            for lines in (["öne", "two"], ["öne", "zwö", "drei"])
        )
        assert ws.edited(before, "two", "zwö\ndrei") == after
        assert ws.edited(before, "öne\ntwo\n", "öne\nzwö\ndrei\n") == after
        before, after = (mark + f"one{newline}  {word}".encode(encoding) for word in ("two", "2"))
        assert ws.edited(before, "two\n", "2\n") == after


@pytest.mark.case("FIL-18")
def test_bytes_of_other_encodings_survive_exactly(ws: Workspace) -> None:
    """FIL-18"""
    for encoding, text in (
        ("latin-1", "Größe\nword\nà la carte\n"),
        ("shift-jis", "日本語\nword\nﾃｽﾄ ソ表\n"),
        ("cp1252", "“word” – €\n"),
        ("euc-kr", "한국어 word\n"),
        ("gb18030", "中文 word 文件\n"),
    ):
        for newline in ("\n", "\r\n"):
            before = text.replace("\n", newline).encode(encoding)
            assert ws.edited(before, "word", "another") == before.replace(b"word", b"another")
            assert ws.edited(before.replace(b"word", b"word  "), "d  ", "") == before.replace(
                b"word", b"wor"
            )


def test_one_bad_byte_does_not_keep_a_utf8_file_from_being_edited(ws: Workspace) -> None:
    """FIL-18"""
    before = "é café word\n".encode() + b"\xff\n"
    assert ws.edited(before, "word", "another") == before.replace(b"word", b"another")
    assert ws.edited(before, "café", "cafe") == before.replace("café".encode(), b"cafe")


def test_text_beyond_ascii_is_not_put_into_a_file_that_is_not_utf8(ws: Workspace) -> None:
    """FIL-18"""
    for new in ("wörd", "\ufffd", "“", "\udce9"):
        message = ws.refused("Größe word".encode("latin-1"), "word", new)
        assert "the file is not UTF-8: only ASCII can be added to it" in message


def test_half_a_character_is_not_written(ws: Workspace) -> None:
    for new in ("\ud83d", "\udcff", "\udc80"):
        assert "surrogates not allowed" in ws.refused("one", "one", new)


@pytest.mark.case("FIL-24")
def test_composed_and_decomposed_characters_are_not_confused(ws: Workspace) -> None:
    """FIL-24"""
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    ws.refused(f"{decomposed} one\n", f"{composed} one", "x")
    before = f"{decomposed}\nword\n{composed}\n"
    assert ws.edited(before, "word", "x").decode() == f"{decomposed}\nx\n{composed}\n"


@pytest.mark.case("FIL-17", "FIL-23")
def test_a_link_stays_a_link_and_a_hard_link_is_mentioned(ws: Workspace) -> None:
    """FIL-17, FIL-23"""
    target = ws.file.with_name("target")
    target.write_text("one")
    ws.file.symlink_to("target")
    assert ws.edit("one", "two").content.startswith("Edited target.\n")
    assert (ws.file.is_symlink(), target.read_text()) == (True, "two")
    os.link(target, ws.file.with_name("other"))
    assert (
        "the file had 2 hard links; the others keep the old content"
        in ws.edit("two", "three").content
    )
    assert ws.file.with_name("other").read_text() == "two"


# ---- properties ------------------------------------------------------------------------------------------

ENDINGS = st.sampled_from(["\n", "\r\n"])
PIECES = st.text(
    st.sampled_from(["a", "b", " ", "\t", "é", "“", "\u0301", "😀", "\u2028"]), max_size=4
)
BYTES = st.text(
    st.sampled_from(["a", "b", " ", "\udce9", "\udcff"]), max_size=4
)  # bytes that are no UTF-8 among the letters


@st.composite
def spans(draw: st.DrawFn, pieces: st.SearchStrategy[str]) -> tuple[list[str], slice]:
    """The characters of a file with any endings (a line ending is one of them), and a span that is there once."""
    units: list[str] = []
    for piece, ending in draw(st.lists(st.tuples(pieces, ENDINGS), min_size=1, max_size=8)):
        units += [*piece, ending]
    if len(units) > 1 and draw(st.booleans()):
        units.pop()
    flat = ["\n" if unit == "\r\n" else unit for unit in units]
    found = [
        slice(start, end)
        for start in range(len(flat))
        for end in range(start + 1, min(start + 12, len(flat)) + 1)
        if sum(flat[at : at + end - start] == flat[start:end] for at in range(len(flat))) == 1
        and not any("\udc80" <= unit <= "\udcff" for unit in flat[start:end])
    ]
    assume(found)
    return units, draw(st.sampled_from(found))


def check_one_span(units: list[str], span: slice, new: str, mark: bytes) -> None:
    """Edit a span of a file, given with plain line endings, and look at every byte around it. Deletes
    of whole lines and new lines of an uncertain indentation are left to their own tests."""
    old = "".join(units[span]).replace("\r\n", "\n")
    lead = "".join(units[: span.start]).split("\n")[-1]
    uncertain = lead and new and (new[0].isspace() or old[0].isspace() or "\n" in new)
    assume(old != new and (lead.strip() or (new and not uncertain)))
    before, inner, after = (
        "".join(part).encode("utf-8", "surrogateescape")
        for part in (units[: span.start], units[span], units[span.stop :])
    )
    before = mark + before
    with tempfile.TemporaryDirectory() as folder:
        changed = Workspace(Path(folder)).edited(before + inner + after, old, new)
    middle = changed[len(before) : len(changed) - len(after)]
    assert (changed[: len(before)], changed[len(changed) - len(after) :]) == (before, after)
    assert middle.decode().replace("\r\n", "\n") in (new, f"{new}\n" if old.endswith("\n") else new)
    endings = {unit for unit in units if unit in ("\n", "\r\n")}
    if endings == {"\r\n"}:
        assert b"\n" not in middle.replace(b"\r\n", b"")
    if endings == {"\n"}:
        assert b"\r" not in middle


@settings(max_examples=200, deadline=None)
@given(
    spans(PIECES),
    st.text(st.sampled_from("xyé \n"), max_size=6),
    st.sampled_from([b"", codecs.BOM_UTF8]),
)
@example((["a", "\r\n", "b"], slice(1, 3)), "\nx\ny", b"")
@example((["a", "\r\n", "b"], slice(1, 3)), "", b"")
def test_an_edit_changes_one_span_and_every_byte_around_it_stays(
    place: tuple[list[str], slice], new: str, mark: bytes
) -> None:
    check_one_span(*place, new, mark)


@settings(max_examples=100, deadline=None)
@given(spans(BYTES), st.text(st.sampled_from("xy \n"), max_size=6))
def test_bytes_that_are_no_utf8_stay_around_the_span(
    place: tuple[list[str], slice], new: str
) -> None:
    """FIL-18"""
    check_one_span(*place, new, b"")


INDENTS, SPACES = st.sampled_from(["", " ", "  ", "\t", "    "]), st.sampled_from(["", " ", "\t "])
LINES = st.lists(
    st.tuples(INDENTS, SPACES, ENDINGS, st.sampled_from(['"x"', "“x”"])), min_size=1, max_size=8
)


@settings(max_examples=300, deadline=None)
@given(
    LINES,
    st.integers(0, 7),
    st.integers(1, 4),
    INDENTS,
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_a_loose_edit_changes_the_lines_it_names_or_nothing(
    parts: list[tuple[str, str, str, str]],
    first: int,
    count: int,
    indent: str,
    strip: bool,
    dedent: bool,
    closed: bool,
) -> None:
    """Lines with any indentation, trailing space, quotes and endings; an edit that gets some of these wrong."""
    lines = [
        f"{before}line{number:02} = {value}{behind}{ending}"
        for number, (before, behind, ending, value) in enumerate(parts)
    ]
    first = min(first, len(lines) - 1)
    block = [line.removesuffix("\n").removesuffix("\r") for line in lines[first : first + count]]
    if strip:
        block = [line.rstrip() for line in block]
    if dedent:
        block = [indent + line.lstrip() for line in block]
    newline = "\n" if closed else ""
    old, new = (
        "\n".join(block).replace("“", '"').replace("”", '"') + newline,
        "new one\n  new two" + newline,
    )
    content = "".join(lines).encode()
    before, after = "".join(lines[:first]).encode(), "".join(lines[first + count :]).encode()
    with tempfile.TemporaryDirectory() as folder:
        ws = Workspace(Path(folder))
        ws.holds(content)
        result = ws.edit(old, new)
        changed = ws.file.read_bytes()
    event(f"is_error={result.is_error}")
    if result.is_error:
        assert changed == content
    else:
        assert changed.startswith(before)
        assert changed.endswith(after)
        assert (
            "".join(changed[len(before) : len(changed) - len(after)].decode().split())
            == "newonenewtwo"
        )


SOUP = st.text(st.sampled_from('ab“" \t\r\n'), max_size=20)


@settings(max_examples=200, deadline=None)
@given(SOUP, SOUP, PIECES, st.booleans())
def test_any_edit_works_or_leaves_the_file_and_says_why(
    text: str, old: str, new: str, every: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ws = Workspace(Path(folder))
        ws.holds(text)
        result = ws.edit(old, new, replace_all=every)
        assert "failed" not in result.content
        if result.is_error:
            assert ws.file.read_bytes() == text.encode()


# ---- files that are not read unasked ---------------------------------------------------------------------


def test_of_a_secret_file_nothing_is_shown_without_a_question(ws: Workspace) -> None:
    def no() -> None:
        raise DeniedError("no")

    (ws.file.parent / ".env").write_text("# db\nDB_USER=x\nDB_PASSWORD=hunter2\n")
    (ws.file.parent / "link").symlink_to(".env")
    ws.when_asked = no
    for path in (".env", "link"):
        for old in ("# db\nDB_USER=x\nDB_PASSWORD=y\n", "DB_USER=x"):
            result = ws.run("edit", path=path, old_string=old, new_string="z")
            assert result.content == "Denied: no"
    assert [asked[:2] for asked in ws.asked] == [("read", ".env")] * 4


def test_after_a_yes_a_secret_file_is_edited_like_others(ws: Workspace) -> None:
    (ws.file.parent / ".env").write_text("A=1\nB=2\n")
    assert "-A=1\n+A=3" in str(
        ws.run("edit", path=".env", old_string="A=1", new_string="A=3").content
    )
    assert [asked[:2] for asked in ws.asked] == [("read", ".env"), ("edit", ".env")]
    ws.holds("x")
    ws.edit("x", "y")
    assert [asked[0] for asked in ws.asked[2:]] == ["edit"]
