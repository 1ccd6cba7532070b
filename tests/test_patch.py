"""apply_patch: the format, where hunks go, what stays as it is, what is refused, all or nothing.

Every test runs the tool as the loop does, on real files. Failing writes are real ones: a name that
is too long, a limit on the size of files.
"""

from __future__ import annotations

import difflib
import os
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tests.workspace import Workspace, patch_of

TOO_LONG = "n" * 300  # no file system takes this name: the write fails, not the plan


class Patching(Workspace):
    """A workspace whose files are looked at by name."""

    def apply(self, *sections: str) -> str:
        return self(**patch_of(*sections))

    def refused(self, *sections: str) -> str:
        """The error; no file may have changed."""
        before = self.files()
        said = self.fails(**patch_of(*sections))
        assert self.files() == before
        return said

    def data(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def text(self, name: str) -> str:
        return self.data(name).decode()


@pytest.fixture
def ws(tmp_path: Path) -> Patching:
    folder = tmp_path / "ws"
    folder.mkdir()
    return Patching(folder)


# ---- the format ----------------------------------------------------------------------------------


@pytest.mark.case("FIL-16")
def test_one_patch_adds_updates_moves_and_deletes(ws: Patching) -> None:
    """Permission is asked for once, with all names and the whole diff. Modes stay."""
    ws.put({"a.py": "one\ntwo\nthree\n", "b.py": "x\ny\n", "d.bin": b"\0"})
    for name, mode in {"a.py": 0o755, "b.py": 0o600}.items():
        (ws.folder / name).chmod(mode)
    before = ws.files()
    asked_before = dict[str, object]()
    ws.when_asked = lambda: asked_before.update(ws.files())
    result = ws.call(
        **patch_of("""
*** Add File: new/c.py
+first

+third
*** Update File: a.py
@@
 one
-two
+2
 three
*** Update File: b.py
*** Move to: moved/b2.py
@@
-y
+z
*** Delete File: d.bin
""")
    )
    assert ws.text("new/c.py") == "first\n\nthird\n"
    assert ws.text("moved/b2.py") == "x\nz\n"
    assert ws.names() == ["a.py", "moved", "new"]
    assert ws.text("a.py") == "one\n2\nthree\n"
    assert (
        result.content
        == """\
A new/c.py
@@ -0,0 +1,3 @@
+first
+
+third
M a.py
@@ -1,3 +1,3 @@
 one
-two
+2
 three
R b.py -> moved/b2.py
@@ -1,2 +1,2 @@
 x
-y
+z
D d.bin"""
    )
    assert len(result.details["paths"]) == 5
    assert result.details["diff"] == ws.details[0]
    moved = "rename from b.py\nrename to moved/b2.py\n"
    assert all(piece in ws.details[0] for piece in ("\n-two\n+2\n", moved, "D d.bin"))
    assert ws.asked == [("edit", "new/c.py, a.py, b.py, moved/b2.py, d.bin")]
    assert asked_before == before
    modes = [stat.S_IMODE(ws.files()[name][0]) for name in ("a.py", "moved/b2.py")]
    assert modes == [0o755, 0o600]


MALFORMED = [
    ("*** Update File: a.py\n-one\n+1\n*** End Patch", "has to be *** Begin Patch"),
    ("*** Begin Patch\n*** Update File: a.py\n-one\n+1", "the last *** End Patch"),
    ("*** Begin Patch\n\n*** End Patch", "is no section of a patch: ''"),
]
MALFORMED += [
    (f"*** Begin Patch\n{sections}\n*** End Patch", said)
    for sections, said in [
        ("-one\n+1", "is no section of a patch: '-one"),
        ("*** Update File:\n-one", "is no section of a patch: '*** Update File:"),
        ("*** Update File: a.py\none", "no place there: 'one'"),
        ("*** Update File: a.py", "a.py: it has no hunk"),
        ("*** Update File: a.py\n@@ one", "or one without lines"),
        ("*** Update File: a.py\n-one\n*** Move to: b.py", "no place there: '*** Move to: b.py'"),
        ("*** Delete File: a.py\n-one", "no place there: '-one'"),
        ("*** Add File: b.py\none", "no place there: 'one'"),
        ("*** Add File: ok.py\n+x\n*** Add File: b.py\n+\ud83d", "Add File b.py: 'utf-8' codec"),
    ]
]


@pytest.mark.parametrize(("patch", "said"), MALFORMED)
def test_a_malformed_patch_is_refused_with_its_line(ws: Patching, patch: str, said: str) -> None:
    ws.put({"a.py": "one\n"})
    before = ws.files()
    assert said in ws.fails("apply_patch", patch=patch)
    assert ws.files() == before


def test_what_models_write_otherwise_is_tolerated(ws: Patching) -> None:
    """Blank lines around and between sections, CRLF, lines that look like markers."""
    files = {"a.py": "one\ntwo\n", "b.py": "x\r\ny", "c.py": "gone\n"}
    ws.put(files | {"d.md": "*** Begin Patch\n@@\n"})
    body = "\n*** Update File: a.py\n\n@@\n-one\n+1\n\n@@\n two\n+3\n\n*** Update File: b.py\n"
    body += "*** Move to: e.py\n*** Delete File: c.py\n\n*** Add File: pkg/__init__.py\n"
    body += "*** Update File: d.md\n *** Begin Patch\n-@@\n+*** End Patch\n\n"
    body = f"\n *** Begin Patch \n{body}*** End Patch\n\n".replace("\n", "\r\n")
    assert "A pkg/__init__.py" in ws("apply_patch", patch=body)
    assert {name: ws.data(name) for name in ws.files() if name != "pkg"} == {
        "a.py": b"1\ntwo\n3\n",
        "e.py": b"x\r\ny",
        "pkg/__init__.py": b"",
        "d.md": b"*** Begin Patch\n*** End Patch\n",
    }


# ---- where a hunk goes ----------------------------------------------------------------------

IF = "    if a:\n        b\n"
TWO = "    x\ndef f():\n    x\ndef g():\n    x\ndef h():\n    x\n"
CLASSES = "class A:\n    def f(self):\n        x\nclass B:\n    def f(self):\n        x\n"
HUNKS = {
    "a context line without its space": ("one\n\ntwo\n", " one\n\n-two\n+2", "one\n\n2\n"),
    "space at the end": ("top\nv = 1  \t\nold\n", " v = 1\n-old\n+new", "top\nv = 1  \t\nnew\n"),
    "typographic": ("say(“it’s”)\nold\n", ' say("it\'s")\n-old\n+new', "say(“it’s”)\nnew\n"),
    "the strictest fit": ("x  \nx\n", " x\n+here", "x  \nx\nhere\n"),
    "in order": ("x\ny\nx\nz\n", "-x\n+1\n y\n@@\n-x\n+2\n z", "1\ny\n2\nz\n"),
    "an anchor": (
        TWO,
        "@@ def g():\n-    x\n+    y",
        TWO.replace("g():\n    x", "g():\n    y"),
    ),
    "git's numbers": (
        TWO,
        "@@ -5 +5 @@ def g():\n-    x\n+    y",
        TWO.replace("g():\n    x", "g():\n    y"),
    ),
    "git's numbers alone": ("x\nx\nx\n", "@@ -2 +2 @@\n-x\n+y", "x\ny\nx\n"),
    "git's function above the hunk before": (
        "def f():\n    1\n    2\n    3\n",
        "@@ -2 +2 @@ def f():\n-    1\n+    one\n@@ -9 +9 @@ def f():\n-    3\n+    three",
        "def f():\n    one\n    2\n    three\n",
    ),
    "two anchors": (
        *(CLASSES, "@@ class B:\n@@     def f(self):\n-        x\n+        y"),
        CLASSES.removesuffix("x\n") + "y\n",
    ),
    "the anchor repeated": ("x\nf\nx\n", "@@ f\n f\n-x\n+y", "x\nf\ny\n"),
    "the end of the file": ("x\ny\nx\n", "-x\n+z\n*** End of File", "x\ny\nz\n"),
    "new lines at the end": ("one\ntwo\n", "+3\n*** End of File", "one\ntwo\n3\n"),
    "new lines in an empty file": ("", "+first", "first\n"),
    "new lines in the last hunk": ("one\n", "-one\n+1\n@@\n+2\n+\n+3", "1\n2\n\n3\n"),
    "shifted to the right": (IF, "-if a:\n-    b\n+if c:\n+\n+    d", "    if c:\n\n        d\n"),
    "partly off": (IF, " if a:\n-    b\n+        c", "    if a:\n        c\n"),
    "line endings": ("1\r\n2\r\n3\r\n", " 1\n-2\n+a\n+b\n 3", "1\r\na\r\nb\r\n3\r\n"),
    "before all others": ("a\r\nb\r\n", "+top\n a", "top\r\na\r\nb\r\n"),
    "an open end 1": ("a\nb", "-b\n+c", "a\nc"),
}


@pytest.mark.parametrize("case", HUNKS)
def test_what_hunks_change(ws: Patching, case: str) -> None:
    before, hunks, after = HUNKS[case]
    ws.put({"a.txt": before})
    start = "" if hunks.startswith("@@") else "@@\n"
    ws.apply(f"*** Update File: a.txt\n{start}{hunks}\n*** Add File: other\n+x")
    assert ws.text("a.txt") == after


NOWHERE = (
    "".join(f"line {n}\n" for n in range(1, 50)) + "def total(items):\n    return sum(items)\n"
)
TOTAL = " def total(items):\n-    return sum(item)"
REFUSED = {
    "two fits": ("x\ny\nx\nz\nx \n", "-x\n+2", "1 of 1: it fits at lines 1, 3. "),
    "out of order": ("one\ntwo\n", "-two\n@@\n-one", "after line 2, where it has to be"),
    "the end, twice": ("x\n", "-x\n+y\n@@\n-x\n+z\n*** End of File", "hunk 2 of 2"),
    "wrong numbers": ("x\nx\nx\n", "@@ -7 +7 @@\n-x\n+y", "it fits at lines 1, 2, 3."),
    "wrong numbers in a function": (
        TWO,
        "@@ -3 +3 @@ def g():\n-    x\n+    y",
        "it fits at lines 5, 7.",
    ),
    "only numbers": (
        "x\ny\n",
        "@@ -1,0 +2 @@ x\n+new",
        "it has new lines only. Give 3 lines that stay",
    ),
    "numbers below the function": (
        "x\nf\nz\n",
        "@@ -1 +1 @@ f\n-x\n+y",
        "after line 1, where it has to be",
    ),
    "new lines anywhere": ("one\ntwo\n", "+new\n@@\n-two\n+2", "it fits at lines 1, 2, 3."),
    "nowhere": (NOWHERE, f"-line 3\n@@\n{TOTAL}", "2 of 2: the old text is not in a.txt"),
    "nearest lines": (NOWHERE, TOTAL, "50\tdef total(items):\n51\t"),
    "no change": ("one\n", "-one\n+one", "nothing to do"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_hunks_without_a_certain_place_are_refused(ws: Patching, case: str) -> None:
    before, hunks, said = REFUSED[case]
    ws.put({"a.txt": before})
    start = "" if hunks.startswith("@@") else "@@\n"
    message = ws.refused(f"*** Update File: a.txt\n{start}{hunks}")
    assert said in message
    assert "No file was changed. Send the whole patch again" in message
    assert "_string" not in message


# ---- what stays as it is --------------------------------------------------------------------


def test_a_link_is_deleted_itself_changed_through_and_not_moved(ws: Patching) -> None:
    ws.put({"t": "one\n"}, l="t", dangling="nowhere", out="/etc/passwd")
    assert "l cannot be opened" in ws.refused("*** Update File: l\n*** Move to: m")
    os.link(ws.folder / "t", ws.folder / "hard")
    said = ws.apply("*** Update File: l\n-one\n+two")
    assert said.startswith("M t Note: the file had 2 hard links")
    assert ws.text("t") == "two\n"
    assert ws.text("hard") == "one\n"
    for name in ("l", "dangling", "out"):
        assert ws.apply(f"*** Delete File: {name}") == f"D {name}"
    assert ws.files().keys() == {"t", "hard"}


# ---- what is refused -----------------------------------------------------------------------------


OUTSIDE = "outside the workspace"
NO_FILE = "there is no file"
TWICE = "is in the patch twice"
CHANGE = "*** Update File: {}\n-x\n+y".format
MOVE = "*** Update File: {}\n*** Move to: {}".format
ADD = "*** Add File: {}\n+x".format
DELETE = "*** Delete File: {}".format
SECTIONS = [
    *((ADD(path), OUTSIDE) for path in ("../PWN", "door/PWN")),
    *((CHANGE("link"), OUTSIDE), (DELETE("door/secret"), OUTSIDE)),
    *((MOVE(path, "mine"), OUTSIDE) for path in ("../secret", "door/PWN")),
    *((MOVE("a.py", path), OUTSIDE) for path in ("../PWN", "door/PWN")),
    *((DELETE(".."), "File ..: "), (ADD("a\0b"), "NUL")),
    (f"{ADD('n/new.py')}\n{CHANGE('a.py')}", "Update File a.py: hunk 1 of 1"),
    *((ADD("folder"), "folder is a folder"), (ADD("dangling"), "dangling cannot be opened")),
    *((CHANGE(path), NO_FILE) for path in ("b.py", "dangling", "a/b.py")),
    (CHANGE("sub/other.py"), "there is no file sub/other.py; did you mean other.py?"),
    *((CHANGE(path), "is ") for path in ("folder", "pipe")),
    (DELETE("b.py"), NO_FILE),
    *((DELETE(path), "is ") for path in ("folder", ".", "pipe")),
    *((MOVE("a.py", path), "exists") for path in ("other.py", "dangling")),
    (f"{DELETE('a.py')}\n{ADD('a.py')}", TWICE),
    ("*** Update File: a.py\n-one\n+1\n*** Update File: ./folder/../a.py\n-one\n+2", TWICE),
    (f"{ADD('b.py')}\n{MOVE('a.py', 'b.py')}", TWICE),
]


@pytest.mark.case("FIL-07", "FIL-08")
@pytest.mark.parametrize(("section", "said"), SECTIONS)
def test_one_bad_section_rejects_the_whole_patch(ws: Patching, section: str, said: str) -> None:
    out = ws.folder.parent
    files = {
        "../secret": "s\n",
        "folder/": "",
        "a.py": "one\n",
        "other.py": "x\n",
        "first": "f\n",
    }
    os.mkfifo(
        ws.put(
            files,
            door="..",
            link="../secret",
            dangling="nowhere",
        )
        / "pipe"
    )
    before = sorted(path.name for path in out.iterdir())
    error = ws.refused(f"*** Update File: first\n-f\n+x\n{section}\n*** Add File: last\n+x")
    assert said in error
    assert "No file was changed." in error
    assert sorted(path.name for path in out.iterdir()) == before
    assert ws.asked == []
    assert (out / "secret").read_text() == "s\n"


def test_a_file_that_is_there_is_written_anew_if_it_was_read(ws: Patching) -> None:
    body = "*** Add File: a.py\n+new"
    ws.put({"a.py": "one\r\ntwo\r\n"})
    assert "a.py exists and was not read as it is now. Read it first" in ws.refused(body)
    ws("read", path="a.py")
    ws.asked.clear()
    (ws.folder / "a.py").chmod(0o750)
    assert ws.apply(body).startswith("M a.py\n")
    assert ws.data("a.py") == b"new\r\n"
    assert stat.S_IMODE((ws.folder / "a.py").stat().st_mode) == 0o750
    shown = ws.details[-1]
    assert ws.asked == [("edit", "a.py")]
    assert "-one\n-two\n+new" in shown
    ws.put({"a.py": "someone else's\nnew\n"})
    for section in (body, "*** Delete File: a.py"):
        assert "a.py changed on disk since it was read" in ws.refused(section)


def test_a_file_that_has_changed_since_it_was_read_is_changed_if_the_text_is_exact(
    ws: Patching,
) -> None:
    ws.put({"a.py": "one\ntwo\n"})
    ws("read", path="a.py")
    ws.put({"a.py": "zero\none\n  two\n"})
    loose = ws.refused("*** Update File: a.py\n-one\n-two\n+1\n+2")
    assert "White space differs" in loose
    said = ws.apply("*** Update File: a.py\n-one\n+1")
    assert said.startswith("M a.py Note: the file had changed since it was read.\n@@ ")
    assert "Note" not in ws.apply("*** Update File: a.py\n-1\n+one")
    assert "was not read as it is now" in ws.refused("*** Add File: a.py\n+x")


def test_a_patch_that_is_taken_back_leaves_what_was_read_as_it_was(ws: Patching) -> None:
    ws.put({"a.py": "one\n"})
    too_long = f"*** Add File: {TOO_LONG}\n+x"
    assert "File name too long" in ws.refused("*** Update File: a.py\n-one\n+1", too_long)
    assert "was not read" in ws.refused("*** Add File: a.py\n+x")


# ---- asking, and all or nothing ------------------------------------------------------------------


def test_a_write_that_fails_in_the_middle_puts_everything_back(ws: Patching) -> None:
    files = {"a.sh": b"\xef\xbb\xbfone\r\n", "b.py": "two\n", "c.py": "three\n"}
    ws.put(files | {"never.py": "read\n"}, l="a.sh")
    (ws.folder / "a.sh").chmod(0o750)
    (ws.folder / "c.py").chmod(0o604)
    for name in ("a.sh", "b.py", "c.py"):
        ws.call("read", path=name)
    said = ws.refused(
        f"*** Update File: a.sh\n-one\n+1\n*** Update File: b.py\n*** Move to: deep/er/b.py\n-two\n+2\n"
        f"*** Delete File: c.py\n*** Delete File: l\n*** Add File: n/new.py\n+x\n*** Update File: never.py\n-read\n+1\n"
        f"*** Add File: sub/{TOO_LONG}\n+x\n*** Add File: after.py\n+x"
    )
    assert "File name too long" in said
    assert "The patch was not applied. All files are as they were before." in said
    # and none of them counts as changed
    ws.apply("*** Update File: a.sh\n-one\n+1\n*** Delete File: c.py")


# ---- the property --------------------------------------------------------------------------------

# Lines that seem to be marks, and any others but what makes a file binary, ends a line or is half
# of a pair
ODD = ["a ", " a", "@@ a", "+a", "-a", "*** End Patch", "*** End of File", "a\u2028b", "\x0c"]
TEXT = st.characters(exclude_characters="\n\r\0\ufeff", exclude_categories=["Cs"])
LINE = st.sampled_from(["", "a", "b", *ODD]) | st.text(TEXT, max_size=12)
LINES = st.lists(LINE, max_size=12)


@settings(max_examples=100, deadline=None)
@given(
    LINES,
    LINES,
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
)
@example([], ["x"], "\n", True)
@example(["x"], [], "\n", False)
@example(["a", ""], ["a"], "\r\n", True)
def test_any_lines_turn_into_others(a: list[str], b: list[str], newline: str, ends: bool) -> None:
    assume(a != b and (ends or (a and a[-1])))  # else a last empty line is no line
    before = (newline.join(a) + (newline if a and ends else "")).encode()
    newline = "\r\n" if b"\r\n" in before else "\n"
    after = (newline.join(b) + (newline if b and (ends or not a) else "")).encode()
    body = ["*** Update File: f", "@@"]
    for tag, a1, a2, b1, b2 in difflib.SequenceMatcher(
        None,
        a,
        b,
        autojunk=False,
    ).get_opcodes():
        body += [(" " if tag == "equal" else "-") + line for line in a[a1:a2]]
        body += [f"+{line}" for line in b[b1:b2] if tag != "equal"]
    with tempfile.TemporaryDirectory() as folder:
        ws = Patching(Path(folder).resolve())
        ws.put({"f": before})
        ws.apply("\n".join(body))
        assert ws.data("f") == after
