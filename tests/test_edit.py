"""edit: the five rungs and where each is taken, what is refused and in which words, what stays.

Every test runs the tool as the loop does, on real files, and looks at their bytes.
"""

from __future__ import annotations

import codecs
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, event, example, given, settings
from hypothesis import strategies as st

from coder.types import DeniedError, ToolResult
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
def ws(tmp_path: Path) -> Editing:
    return Editing(tmp_path)


# ---- the rungs ------------------------------------------------------------------------------

BLOCK = "class A:\n    def f(self):\n        one()\n        two()\n        return 1\n"
DEF = "def f():\n\n    pass\n"
IF = "def f():\n\n    if 1:\n        stop()\n"
TYPOGRAPHIC = "say “hello” – it’s"
PLAIN = 'say "hello" - it\'s'

EDITS = {
    "exact": ("one\ntwo\nthree\n", "two\nth", "2\nTH", "one\n2\nTHree\n"),
    "a part of a line": ("one two", "one ", "", "two"),
    "all of a file": ("one", "one", "", ""),
    "no pattern": ("f(x)", "f(x)", r"g(\1\n)", r"g(\1\n)"),
    "line endings": ("a\r\nb\r\nc\r\n", "a\nb\n", "A\nnew\nB\n", "A\r\nnew\r\nB\r\nc\r\n"),
    "other line endings": ("a\nb\nc\n", "a\r\nb\r\n", "A\r\nB\r\n", "A\nB\nc\n"),
    "space at the end": ("k  \none  \ntwo\t\nk  \n", "one\ntwo", "1\n2", "k  \n1\n2\nk  \n"),
    "less space at the end": ("k\none\ntwo\nk\n", "one   \ntwo\n", "1\n2\n", "k\n1\n2\nk\n"),
    "an empty line": ("x\n   \ny\n", "x\n\ny", "z", "z\n"),
    "less indentation": (
        *("class A:\n    def f():\n\n        pass\n", DEF, IF),
        "class A:\n    def f():\n\n        if 1:\n            stop()\n",
    ),
    "a tab and spaces": (
        *("class A:\n\tdef f():\n  \n\t    pass\n", DEF, IF),
        "class A:\n\tdef f():\n  \n\t    if 1:\n\t        stop()\n",
    ),
    "more indentation": (
        *("if 1:\n  go()\nend\n", "    if 1:\n      go()\n"),
        *("    if 2:\n      go()\n      stop()\n", "if 2:\n  go()\n  stop()\nend\n"),
    ),
    "typographic": (f"“a”\n{TYPOGRAPHIC} to “b”\n", PLAIN, "done", "“a”\ndone to “b”\n"),
    "plain": (f"“a”\n{PLAIN} to “b”\n", TYPOGRAPHIC, "done", "“a”\ndone to “b”\n"),
    "across lines": ("a\r\n“b”\r\nc–d\r\ne\r\n", '"b"\nc-d', "x\ny", "a\r\nx\r\ny\r\ne\r\n"),
    "no line is joined": ("a\nb\nc\n", "b\n", "B", "a\nB\nc\n"),
    "the end of a line": ("a  # note\nb\n", "  # note\n", "", "a\nb\n"),
    "a line is joined": ("a\nb\n", "a\n", "a", "ab\n"),  # nothing else can be meant
    "an empty line less": ("a\n\nb\n", "\n\n", "\n", "a\nb\n"),
    "lines that stay": (
        *("say “hi”  \nto\u00a0all\nend\n", 'say "hi"\nto all\nend', 'say "hi"\nto all\nstop'),
        "say “hi”  \nto\u00a0all\nstop\n",
    ),
    "not doubled 1": (BLOCK, "one()", "        zero()", BLOCK.replace("one", "zero")),
    "not doubled 2": (BLOCK, "    one()", "        zero()", BLOCK.replace("one", "zero")),
    "not doubled 3": (
        *(BLOCK, "one()\n        two()", "        zero()\n        two()"),
        BLOCK.replace("one", "zero"),
    ),
    "a line more": (
        *(BLOCK, "one()", "zero()\n        half()"),
        BLOCK.replace("one()", "zero()\n        half()"),
    ),
}


@pytest.mark.parametrize("case", EDITS)
def test_what_an_edit_changes(ws: Editing, case: str) -> None:
    before, old, new, after = EDITS[case]
    assert ws.edited(before, old, new).decode() == after


NEAREST = "The nearest lines are"
UNCERTAIN = "not certain"
SPACE = "White space differs"
LINES_1_3 = "old_string is in a 2 times, at lines 1, 3."

REFUSALS = {
    "shifted differently": ("    one\n      two\n", "one\ntwo", "1\n2", SPACE),
    "a tab for spaces": ("\tone\n    two\n", "one\ntwo", "1\n2", SPACE),
    "no room to the left": (
        *("if 1:\n  go()\nend\n", "    if 1:\n      go()\n", "    if 1:\n  left\n", UNCERTAIN),
    ),
    "exact twice": ("say hi\n\nsay hi\n", "say hi", "x", LINES_1_3),
    "line endings twice": ("say\r\nhi\r\nsay\r\nhi\r\n", "say\nhi", "x", LINES_1_3),
    "space at the end twice": ("say  \nhi\nsay \nhi\n", "say\nhi", "x", LINES_1_3),
    "indentation twice": ("  say\n  hi\n    say\n    hi\n", "say\nhi\n", "x", LINES_1_3),
    "punctuation twice": ("say “hi”\nsay ‘hi’ “hi”\nsay “hi”\n", 'say "hi"', "x", LINES_1_3),
    "overlapping": ("x\ny\nx\ny\nx\n", "x\ny\nx", "z", LINES_1_3),
    "overlapping, shifted": (" x\n y\n x\n y\n x\n", "x\ny\nx", "z", LINES_1_3),
    "many": ("foo\nbar\nfoo foo\n", "foo", "x", "3 times, at lines 1, 3, 3."),
    "words between": ("start\n    middle\nend\n", "start\n    other\nend", "x", NEAREST),
    "joined lines": ("start\n    middle\nend\n", "start middle end", "x", "is not in a"),
    "letters": ("start\n    middle\nend\n", "strat", "x", NEAREST),
    "case": ("start\n    middle\nend\n", "START", "x", "is not in a"),
    "wrapped, or as in the file": (
        *(BLOCK, "    one()\n    two()\n", "    if 1:\n        one()\n", UNCERTAIN),
    ),
    "no level of the old lines": (
        *(BLOCK, "            one()\n            two()\n", "    if 1:\n        three()\n"),
        UNCERTAIN,
    ),
    "mixed levels": (BLOCK, "one()\n        two()\n", "    one()\n        three()\n", UNCERTAIN),
    "a second line": (BLOCK, "two()", "two()\nthree()", UNCERTAIN),
    "a deeper line": (BLOCK, "two()", "if 1:\n        three()", UNCERTAIN),
    "an unproved unit": (BLOCK, "  def f(self):\n", "  def f(self):\n    zero()\n", UNCERTAIN),
    "another unit": (BLOCK, "  def f(self):\n    one()\n", "  def f(self):\n    0\n", SPACE),
    "quotes": ("“one” and “two”\n", '"one" and "two"', '"one" and "2" and "3"', "“ (U+201C)"),
    "empty": ("one", "", "two", "old_string is empty. To create a file use write"),
    "the same": ("one", "one", "one", "are the same: nothing to do"),
    "made already": (
        *("a\nb\nnew text\n", "old text", "new text"),
        "new_string is, at line 3: this edit seems to be made already",
    ),
    "unlike anything": ("one\ntwo\n", "qqqqqqqqqqqqqq", "x", "nor anything like it. Read the file"),
    "of an empty file": ("", "one", "x", "nor anything like it"),
    "composed": ("cafe\u0301 one\n", "caf\u00e9 one", "x", "is not in a"),
    "half a pair": ("one", "one", "\ud83d", "surrogates not allowed"),
    "a stray byte": ("one", "one", "\udcff", "surrogates not allowed"),
    "binary": ("text\0text", "text", "x", "is a binary file"),
}


@pytest.mark.case("FIL-24")
@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_refused_and_why(ws: Editing, case: str) -> None:
    before, old, new, why = REFUSALS[case]
    message = ws.refused(before, old, new)
    assert why in message
    if why == UNCERTAIN:
        assert "The lines of the file are:" in message or "The line is:" in message


@pytest.mark.parametrize(
    ("looser", "closer", "old"),
    [
        ("two  \nthree\n", "two\nthree\n", "two\nthree\n"),
        ("  two\n  three\n", "\ntwo\nthree\n", "\ntwo\nthree\n"),
        ("“two”\n", '"two"\n', '"two"'),
        ("  two \n  three\n", "two \nthree\n", "two\nthree\n"),
        ("“two”\nthree\n", '"two" \nthree\n', '"two"\nthree\n'),
    ],
)
def test_a_close_fit_goes_before_a_loose(ws: Editing, looser: str, closer: str, old: str) -> None:
    after = ws.edited(f"{looser}between\n{closer}end\n", old, "X\n").decode()
    assert after.startswith(f"{looser}between\nX\n")
    assert "two" not in after.removeprefix(looser)


@pytest.mark.parametrize("off", ["", "  ", "        ", "\t    "])
@pytest.mark.parametrize("given", ["old", "file"])
def test_shared_lines_tell_whether_new_is_off_too(ws: Editing, off: str, given: str) -> None:
    """Only old_string in a wrong indentation, or both; the result is the same."""
    old = f"{off}def f(self):\n{off}    one()\n{off}    two()\n"
    lead = off if given == "old" else "    "
    new = f"{lead}def f(self):\n{lead}    one()\n{lead}    three()\n"
    assert ws.edited(BLOCK, old, new).decode() == BLOCK.replace("two", "three")


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("        two()", ""),
        ("two()\n", ""),
        ("        one()\n        two()", "        one()"),
        ("one()\n        two()\n", "one()"),
    ],
)
def test_a_deleted_line_takes_its_newline(ws: Editing, old: str, new: str, newline: str) -> None:
    before = BLOCK.replace("\n", newline)
    after = BLOCK.replace("        two()\n", "").replace("\n", newline)
    assert ws.edited(before, old, new).decode() == after


def test_straight_quotes_and_spaces_stay_straight(ws: Editing) -> None:
    code = "a = \"x\"  # it's\nb = 'y'\nc = 2\n"
    curly = str.maketrans({'"': "“", "'": "’", " ": "\u00a0"})
    old, new = "a = \"x\"  # it's\nb = 'y'", 'a = "x"  # it\'s\nb = \'z\' + "é"'
    after = code.replace("'y'", "'z' + \"é\"")
    assert ws.edited(code, old.translate(curly), new.translate(curly)).decode() == after
    assert ws.edited(code, old.translate(curly), new).decode() == after


# ---- replace_all ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "old", "new", "after"),
    [
        ("a b a b a", "a", "aa", "aa b aa b aa"),
        ("one", "one", "two", "two"),
        ("a\r\nb\r\na\r\nb\r\n", "a\nb\n", "c\n", "c\r\nc\r\n"),
        ("  a \n  b\n\n a\n b\n", "a\nb", "c\nd", "  c\n  d\n\n c\n d\n"),
        ("xyxyxyx", "xyx", "N", "NyN"),
        ("x \ny \nx \ny \nx \nend\n", "x\ny\nx", "N", "N\ny \nx \nend\n"),
    ],
)
def test_replace_all_replaces_every_place_that_does_not_overlap_one_before(
    ws: Editing, before: str, old: str, new: str, after: str
) -> None:
    assert ws.edited(before, old, new, replace_all=True).decode() == after


def test_the_result_is_a_diff_of_the_change(ws: Editing) -> None:
    ws.holds("one\ntwo\nthree\n")
    result = ws.edit("two", "2")
    changes = "--- a/a\n+++ b/a\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three"
    assert result.content == f"Edited a.\n{changes}"
    assert result.details == {"diff": changes, "path": str(ws.file)}
    ws.holds("a\nb\na\n")
    assert str(ws.edit("a", "c", replace_all=True).content).startswith("Edited a in 2 places.\n---")


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_replace_all_in_20_000_lines_takes_seconds(ws: Editing, newline: str) -> None:
    lines = (f"line {number} foo{newline}other {number}{newline}" for number in range(10_000))
    before, new = "".join(lines), "a longer word"
    started = time.monotonic()
    after = ws.edited(before, "foo\n", f"{new}\n", replace_all=True).decode()
    assert after == before.replace("foo", new)
    assert time.monotonic() - started < 15
    detail = ws.details[0]
    assert detail.endswith(" of 10000 places)") and "+line 0 a longer word" in detail
    message = ws.refused("a" * 5_000_000, "aa", "b", replace_all=True)
    assert "in a 100,000 times or more" in message


# ---- the way out ----------------------------------------------------------------------------


def test_copied_line_numbers_are_recognised_and_the_lines_are_shown(ws: Editing) -> None:
    text = "def f():\n    return 1\n\n\ndef g():\n    return 2\n"
    for old in ("5\tdef g():\n6\t    return 2", "    5|def g():\n    6|    return 2"):
        message = ws.refused(text, old, "def h():\n    return 3")
        assert "It seems to hold line numbers, which are not part of the file." in message
        assert "5\tdef g():\n6\t    return 2" in message
    for old in ("\n\n\n\n", "  \t  \n"):
        assert "line numbers" not in ws.refused("one\ntwo\n", old, "x")


def test_the_nearest_lines_are_shown_with_their_numbers_and_the_cause(ws: Editing) -> None:
    lines = [f"value_{number} = compute({number})\n" for number in range(1, 200)]
    old = "value_120 = compute(120)\nvalue_121 = compte(121)\n"
    message = ws.refused("".join(lines), old, "x")
    nearest = "".join(f"{number}\t{lines[number - 1]}" for number in range(119, 122))
    assert nearest in message
    assert "The text differs, or the file has changed since it was read." in message
    text = "".join(lines)
    message = ws.refused(text, text.replace("compute(7)", "c(7)"), "x")
    assert "7\tvalue_7 = compute(7)\n" in message and len(message) < 3000


def test_the_nearest_lines_are_found_among_many_that_are_common(ws: Editing) -> None:
    block = "    if found:\n        return None\n    else:\n        pass\n"
    blocks = [f"def f{number}():\n{block}" for number in range(1000)]
    old = f"def  f700():\n{block}def f701():\n{block.replace('pass', 'return 1')}"
    started = time.monotonic()
    message = ws.refused("".join(blocks), old, "x")
    assert "3501\tdef f700():\n" in message and "3506\tdef f701():\n" in message
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("old", "cause"),
    [
        ("def f():\n    c()\n", "It lacks line 3 of the file: 'a()'."),
        ("# top\n    a()\n    b()\n", "It lacks line 2 of the file: 'def f():'."),
        ("def f():\n    a()\n    b()\n    x()\n    c()\n", "has no such line there: 'x()'."),
        ("def f():\n    a( )\n    b()\n", "White space differs"),
        ("def f():\n   a()\n    b()\n", "White space differs"),
        ("def f():\n    a()\n    bb()\n", "The text differs, or the file has changed"),
    ],
)
def test_the_cause_of_a_failure_is_the_real_one(ws: Editing, old: str, cause: str) -> None:
    assert cause in ws.refused("# top\ndef f():\n    a()\n    b()\n    c()\n    d()\n", old, "x")


def test_a_file_that_is_missing_or_too_large_is_refused(ws: Editing) -> None:
    assert "there is no file" in str(ws.edit("a", "b").content)
    with open(ws.file, "wb") as file:
        file.truncate(51_000_000)
    assert "has 51,000,000 bytes, too large to edit here" in str(ws.edit("a", "b").content)


def deny() -> None:
    raise DeniedError("no")


def test_a_denied_edit_is_not_made(ws: Editing) -> None:
    ws.when_asked = deny
    assert ws.refused("one\n", "one", "two") == "Denied: no"
    assert ws.asked == [("edit", "a")]
    assert ws.details == ["--- a/a\n+++ b/a\n@@ -1 +1 @@\n-one\n+two"]


@pytest.mark.parametrize("content", ["one\nthe user's\n", None])
@pytest.mark.parametrize("was_read", [True, False])
def test_the_users_own_change_stays(ws: Editing, was_read: bool, content: str | None) -> None:
    def meanwhile() -> None:
        if content is None:
            ws.file.unlink()
        else:
            ws.file.write_text(content)

    ws.holds("one\n")
    if was_read:
        ws.call("read", path="a")
    ws.when_asked = meanwhile
    result = ws.edit("one", "two")
    assert result.is_error and "a changed on disk" in result.content
    assert (ws.file.read_text() if ws.file.exists() else None) == content


def test_of_a_secret_file_nothing_is_shown_without_permission(ws: Editing) -> None:
    (ws.file.parent / ".env").write_text("A=1\nB=2\n")
    (ws.file.parent / "link").symlink_to(".env")
    asked = ws.when_asked
    ws.when_asked = deny
    for path, old in ((".env", "A=1\nC=y\n"), ("link", "A=1")):
        assert ws.call("edit", path=path, old_string=old, new_string="z").content == "Denied: no"
    ws.when_asked = asked
    result = ws.call("edit", path=".env", old_string="A=1", new_string="A=3")
    assert "-A=1\n+A=3" in str(result.content)
    assert ws.asked == [("read", ".env")] * 3 + [("edit", ".env")]


# ---- what stays as it is --------------------------------------------------------------------


@pytest.mark.case("FIL-13")
@pytest.mark.parametrize(
    ("before", "old", "new", "after"),
    [
        (b"a\r\nb\r\nc\r\n", "\nb", "\nB", b"a\r\nB\r\nc\r\n"),
        (b"a\r\nb\r\nc\r\n", "\nb", "", b"a\r\nc\r\n"),
        (b"a\r\nb\r\nc\r\n", "\nb", "\nb\nd", b"a\r\nb\r\nd\r\nc\r\n"),
        (b"a\r\nb\r\nc\r\n", "b\n", "", b"a\r\nc\r\n"),
        (b"a\r\nb\r\nc\r\n", "a\n", "a\n\n", b"a\r\n\r\nb\r\nc\r\n"),
        (b"a\r\nb\r\nc\r\n", "b", "b\nd", b"a\r\nb\r\nd\r\nc\r\n"),
        (b"a\r\nb\nc\r\nd\ne\r", "b\n", "B\nB\n", b"a\r\nB\nB\nc\r\nd\ne\r"),
        (b"a\r\nb\nc\r\nd\ne\r", "c\n", "C\nC\n", b"a\r\nb\nC\r\nC\r\nd\ne\r"),
        (b"a\r\nb\nc\r\nd\ne\r", "d\ne", "D", b"a\r\nb\nc\r\nD\r"),
    ],
)
def test_mixed_newlines_stay(ws: Editing, before: bytes, old: str, new: str, after: bytes) -> None:
    assert ws.edited(before, old, new) == after


@pytest.mark.case("FIL-15")
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["utf-8-sig", "utf-16", "utf-8"])
def test_the_mark_and_a_missing_last_newline_are_kept(ws: Editing, mark: str, newline: str) -> None:
    before, after = (
        newline.join(lines).encode(mark) for lines in (["öne", "two"], ["öne", "zwö", "drei"])
    )
    assert ws.edited(before, "two", "zwö\ndrei") == after
    assert ws.edited(before, "öne\ntwo\n", "öne\nzwö\ndrei\n") == after
    before, after = (f"one{newline}  {word}".encode(mark) for word in ("two", "2"))
    assert ws.edited(before, "two\n", "2\n") == after


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


# ---- properties ------------------------------------------------------------------------------------------

ENDINGS = st.sampled_from(["\n", "\r\n"])
PIECES = st.text(
    st.sampled_from(["a", "b", " ", "\t", "é", "“", "\u0301", "😀", "\u2028"]), max_size=4
)


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
        changed = Editing(Path(folder)).edited(before + inner + after, old, new)
    middle = changed[len(before) : len(changed) - len(after)]
    assert (changed[: len(before)], changed[len(changed) - len(after) :]) == (before, after)
    assert middle.decode().replace("\r\n", "\n") in (new, f"{new}\n" if old.endswith("\n") else new)
    endings = {unit for unit in units if unit in ("\n", "\r\n")}
    if endings == {"\r\n"}:
        assert b"\n" not in middle.replace(b"\r\n", b"")
    if endings == {"\n"}:
        assert b"\r" not in middle


@settings(max_examples=100, deadline=None)
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


INDENTS, SPACES = st.sampled_from(["", " ", "  ", "\t", "    "]), st.sampled_from(["", " ", "\t "])
LINES = st.lists(
    st.tuples(INDENTS, SPACES, ENDINGS, st.sampled_from(['"x"', "“x”"])), min_size=1, max_size=8
)


@settings(max_examples=100, deadline=None)
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
        ws = Editing(Path(folder))
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


@settings(max_examples=100, deadline=None)
@given(SOUP, SOUP, PIECES, st.booleans())
def test_any_edit_works_or_changes_nothing(text: str, old: str, new: str, every: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ws = Editing(Path(folder))
        ws.holds(text)
        result = ws.edit(old, new, replace_all=every)
        assert "failed" not in result.content
        if result.is_error:
            assert ws.file.read_bytes() == text.encode()
