"""apply_patch: the format, where hunks go, what stays as it is, what is refused, all or nothing.

Every test runs the tool as the loop does, on real files. Failing writes are real ones: a name that is too long, a limit
on the size of files.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import resource
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from coder.abort import Abort
from coder.tools.files import read, write
from coder.tools.patch import apply_patch
from coder.toolset import ToolContext, Toolset
from coder.types import Aborted, DeniedError, ToolCall, ToolResult
from tests.harness import to_become_links

TOO_LONG = "n" * 300  # no file system takes this name: the write fails, not the plan


class Workspace:
    """A folder and a session in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tools = Toolset([apply_patch, read, write], cwd=folder)
        self.asked: list[tuple[str, str, str]] = []
        self.when_asked: Callable[[], None] = lambda: None
        self.abort = Abort()

    def authorize(
        self, ctx: ToolContext, permission: str, patterns: Sequence[str], detail: str
    ) -> None:
        self.asked.append((permission, ", ".join(patterns), detail))
        self.when_asked()

    def call(self, name: str, **arguments: object) -> ToolResult:
        call = ToolCall("1", name, dict(arguments))
        ctx = self.tools.context(call, self.abort)
        ctx.authorize = self.authorize
        work = self.tools.run(call, ctx)
        while True:
            try:
                next(work)
            except StopIteration as end:
                return end.value

    def apply(
        self, body: str, begin: str = "*** Begin Patch\n", end: str = "\n*** End Patch"
    ) -> str:
        """Apply the sections in `body`; the result's text."""
        result = self.call("apply_patch", patch=begin + body.strip("\n") + end)
        assert not result.is_error, result.content
        assert isinstance(result.content, str)
        return result.content

    def refused(
        self, body: str, begin: str = "*** Begin Patch\n", end: str = "\n*** End Patch"
    ) -> str:
        """The error; no file may have changed."""
        before = self.files()
        result = self.call("apply_patch", patch=begin + body.strip("\n") + end)
        assert result.is_error, result.content
        assert self.files() == before
        assert isinstance(result.content, str)
        return result.content

    def put(self, **files: str | bytes) -> None:
        """Files by name; `_` in the name stands for the dot."""
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            (self.folder / name.replace("_", ".")).write_bytes(data)

    def data(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def text(self, name: str) -> str:
        return self.data(name).decode()

    def files(self) -> dict[str, object]:
        """All there is under the folder: names, modes, and contents or link targets."""
        return {
            str(path.relative_to(self.folder)): (
                path.lstat().st_mode,
                os.readlink(path)
                if path.is_symlink()
                else path.read_bytes()
                if path.is_file()
                else None,
            )
            for path in self.folder.rglob("*")
        }


@pytest.fixture
def ws(tmp_path: Path) -> Workspace:
    folder = tmp_path / "ws"
    folder.mkdir()
    return Workspace(folder)


# ---- the format ------------------------------------------------------------------------------------------


def test_one_patch_adds_updates_moves_and_deletes(ws: Workspace) -> None:
    ws.put(a_py="one\ntwo\nthree\n", b_py="x\ny\n", d_py="gone\n")
    content = ws.apply("""
*** Add File: new/c.py
+first
+
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
*** Delete File: d.py
""")
    assert ws.text("new/c.py") == "first\n\nthird\n"
    assert ws.text("a.py") == "one\n2\nthree\n"
    assert ws.text("moved/b2.py") == "x\nz\n"
    assert not (ws.folder / "b.py").exists() and not (ws.folder / "d.py").exists()
    assert content.splitlines()[:4] == ["A new/c.py", "M a.py", "R b.py -> moved/b2.py", "D d.py"]
    assert (
        "\n-two\n+2\n" in content
        and "rename from b.py\nrename to moved/b2.py\n" in content
        and "\n-gone" in content
    )


def test_details_hold_the_diff_and_all_paths(ws: Workspace) -> None:
    ws.put(a_py="one\n", b_py="x\n")
    patch = """*** Begin Patch
*** Update File: a.py
-one
+1
*** Update File: b.py
*** Move to: c.py
*** End Patch"""
    result = ws.call("apply_patch", patch=patch)
    assert result.details["paths"] == [str(ws.folder / name) for name in ("a.py", "b.py", "c.py")]
    assert result.details["diff"] == (
        "--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-one\n+1\nrename from b.py\nrename to c.py"
    )
    assert result.content == f"M a.py\nR b.py -> c.py\n{result.details['diff']}"


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ("<<'EOF'\n*** Begin Patch\n", "\n*** End Patch\nEOF\n"),
        ("<<EOF\n*** Begin Patch\n", "\n*** End Patch\nEOF"),
        ('apply_patch <<"PATCH"\n*** Begin Patch\n', "\n*** End Patch\nPATCH\n"),
        ("```diff\n*** Begin Patch\n", "\n*** End Patch\n```\n"),
        ("```bash\napply_patch <<'EOF'\n*** Begin Patch\n", "\n*** End Patch\nEOF\n```"),
        ("\n\n  *** Begin Patch  \n", "\n*** End Patch \n\n \n"),
        ("*** Begin Patch\n\n", "\n\n\n*** End Patch"),
    ],
)
def test_wrapping_and_blank_lines_around_the_patch_are_tolerated(
    ws: Workspace, begin: str, end: str
) -> None:
    ws.put(a_py="one\ntwo\n")
    ws.apply("*** Update File: a.py\n@@\n-one\n+1\n two", begin, end)
    assert ws.text("a.py") == "1\ntwo\n"


def test_crlf_in_the_patch_does_not_reach_an_lf_file(ws: Workspace) -> None:
    ws.put(a_py="one\ntwo\n")
    patch = "*** Begin Patch\n*** Update File: a.py\n@@\n-one\n+1\n two\n*** Add File: n.py\n+new\n*** End Patch\n"
    assert not ws.call("apply_patch", patch=patch.replace("\n", "\r\n")).is_error
    assert (ws.data("a.py"), ws.data("n.py")) == (b"1\ntwo\n", b"new\n")


def test_an_empty_context_line_may_lack_its_space(ws: Workspace) -> None:
    ws.put(a_py="one\n\ntwo\n\n\nthree\n")
    ws.apply("*** Update File: a.py\n@@\n one\n\n-two\n+2\n\n\n-three\n+3")
    assert ws.text("a.py") == "one\n\n2\n\n\n3\n"


def test_blank_lines_between_hunks_and_sections_are_no_context(ws: Workspace) -> None:
    ws.put(a_py="one\ntwo\nthree\n", b_py="x\n")
    ws.apply(
        "*** Update File: a.py\n\n@@\n-one\n+1\n\n@@\n-three\n+3\n*** End of File\n\n*** Add File: c.py\n+c\n\n"
        "*** Delete File: b.py\n\n"
    )
    assert (ws.text("a.py"), ws.text("c.py"), (ws.folder / "b.py").exists()) == (
        "1\ntwo\n3\n",
        "c\n",
        False,
    )


def test_an_empty_line_at_the_end_of_a_hunk_counts_where_it_decides(ws: Workspace) -> None:
    ws.put(a_py="x\ny\nx\n\n")
    ws.apply("*** Update File: a.py\n@@\n-x\n+1\n\n*** Add File: b.py")
    assert ws.text("a.py") == "x\ny\n1\n\n"


def test_a_file_without_lines_is_added_empty(ws: Workspace) -> None:
    assert ws.apply("*** Add File: pkg/__init__.py") == "A pkg/__init__.py\nA pkg/__init__.py"
    assert ws.data("pkg/__init__.py") == b""


def test_a_rename_needs_no_hunks(ws: Workspace) -> None:
    ws.put(a_py=b"one\r\ntwo")
    assert ws.apply("*** Update File: a.py\n*** Move to: b.py").startswith(
        "R a.py -> b.py\nrename from a.py"
    )
    assert list(ws.files()) == ["b.py"] and ws.data("b.py") == b"one\r\ntwo"


def test_lines_that_look_like_markers_are_text_behind_their_mark(ws: Workspace) -> None:
    ws.put(a_md="*** Begin Patch\n@@\n*** End Patch\n")
    ws.apply(
        "*** Update File: a.md\n *** Begin Patch\n-@@\n+*** End of File\n *** End Patch\n*** Add File: b.md\n+*** End Patch"
    )
    assert ws.text("a.md") == "*** Begin Patch\n*** End of File\n*** End Patch\n"
    assert ws.text("b.md") == "*** End Patch\n"


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ("", "first line of the patch"),
        ("*** Begin Patch", "first line of the patch"),
        ("*** Update File: a.py\n-one\n+1\n*** End Patch", "has to be *** Begin Patch"),
        ("*** Begin Patch\n*** Update File: a.py\n-one\n+1", "the last *** End Patch"),
        (
            "please apply\n*** Begin Patch\n*** Delete File: a.py\n*** End Patch",
            "has to be *** Begin Patch",
        ),
        (
            "cd sub && apply_patch <<EOF\n*** Begin Patch\n*** Delete File: a.py\n*** End Patch\nEOF",
            "has to be *** Begin Patch",
        ),
        ("*** Begin Patch\n*** End Patch", "the patch is empty"),
        ("*** Begin Patch\n\n*** End Patch", "the patch is empty"),
        ("*** Begin Patch\n-one\n+1\n*** End Patch", "no place there: '-one'"),
        (
            "*** Begin Patch\n*** Rename File: a.py\n*** End Patch",
            "no place there: '*** Rename File: a.py'",
        ),
        (
            "*** Begin Patch\n*** Update File:\n-one\n*** End Patch",
            "no place there: '*** Update File:'",
        ),
        ("*** Begin Patch\n*** Update File: a.py\none\n*** End Patch", "no place there: 'one'"),
        ("*** Begin Patch\n*** Update File: a.py\n*** End Patch", "a.py has no hunk"),
        ("*** Begin Patch\n*** Update File: a.py\n@@ one\n*** End Patch", "or one without lines"),
        (
            "*** Begin Patch\n*** Update File: a.py\n-one\n*** Move to: b.py\n*** End Patch",
            "no place there: '*** Move to: b.py'",
        ),
        (
            "*** Begin Patch\n*** Update File: a.py\n*** Move to: b.py\n*** Move to: c.py\n*** End Patch",
            "Move to: c.py'",
        ),
        (
            "*** Begin Patch\n*** Update File: a.py\n*** End of File\n*** End Patch",
            "no place there: '*** End of File'",
        ),
        (
            "*** Begin Patch\n*** Update File: a.py\n-one\n*** End of File\n+1\n*** End Patch",
            "no place there: '+1'",
        ),
        (
            "*** Begin Patch\n*** Delete File: a.py\n-one\n*** End Patch",
            "nothing follows Delete File",
        ),
        ("*** Begin Patch\n*** Add File: b.py\none\n*** End Patch", "no place there: 'one'"),
        (
            "*** Begin Patch\n*** Add File: b.py\n*** Move to: c.py\n+x\n*** End Patch",
            "no place there: '*** Move to: c.py'",
        ),
        ("*** Begin Patch\n*** Add File: b.py\n@@\n+x\n*** End Patch", "no place there: '@@'"),
    ],
)
def test_a_malformed_patch_is_refused_with_the_line_that_is_wrong(
    ws: Workspace, patch: str, said: str
) -> None:
    ws.put(a_py="one\n")
    assert said in ws.refused(patch, "", "")


def test_half_a_surrogate_pair_is_refused(ws: Workspace) -> None:
    said = ws.refused("*** Add File: ok.py\n+fine\n*** Add File: a.py\n+\ud83d")
    assert said.startswith("Error: Add File a.py: ") and "surrogates not allowed" in said


def test_the_model_is_told_the_format_briefly() -> None:
    assert len(apply_patch.description) < 900
    for word in (
        "*** Begin Patch",
        "*** Update File:",
        "*** Move to:",
        "@@",
        "*** End of File",
        "*** Add File:",
        "*** Delete File:",
        "*** End Patch",
    ):
        assert word in apply_patch.description
    assert list(apply_patch.parameters["properties"]) == ["patch"]


# ---- where a hunk goes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("value = 1  \t", "value = 1"),
        ("value = 1", "value = 1  "),
        ("say(“it’s – so”)", 'say("it\'s - so")'),
        ('say("it\'s - so")', "say(“it’s – so”)"),
        ("a\u00a0b", "a b"),
    ],
)
def test_a_line_is_found_though_space_or_punctuation_differs_and_stays_as_it_is(
    ws: Workspace, line: str, wanted: str
) -> None:
    ws.put(a_py=f"top\n{line}\nold\n")
    ws.apply(f"*** Update File: a.py\n@@\n {wanted}\n-old\n+new")
    assert ws.text("a.py") == f"top\n{line}\nnew\n"


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        (["x  ", "x"], "x"),
        (["  x", "x "], "x"),
        (["“x”", '"x" '], '"x"'),
        (["x", "x\t", "  x"], "x\t"),
    ],
)
def test_the_strictest_fit_wins_over_looser_ones(
    ws: Workspace, lines: list[str], wanted: str
) -> None:
    ws.put(a_py="".join(f"{line}\n" for line in lines))
    ws.apply(f"*** Update File: a.py\n@@\n {wanted}\n+here")
    assert [line.strip() for line in ws.text("a.py").splitlines()] == [
        line.strip() for line in [*lines[:2], "here", *lines[2:]]
    ]


def test_more_than_one_fit_is_refused_with_the_lines(ws: Workspace) -> None:
    ws.put(a_py="x = 1\ny\nx = 1\nz\nx = 1 \n")
    said = ws.refused("*** Update File: a.py\n@@\n-x = 1\n+x = 2")
    assert "Update File a.py: hunk 1 of 1: it fits at lines 1, 3. " in said and "@@ LINE" in said


def test_overlapping_fits_are_more_than_one(ws: Workspace) -> None:
    ws.put(a_py="x\nx\nx\n")
    assert "lines 1, 2." in ws.refused("*** Update File: a.py\n@@\n x\n-x")


def test_each_hunk_is_searched_after_the_one_before_it(ws: Workspace) -> None:
    ws.put(a_py="x\ny\nx\nz\nx\n")
    ws.apply("*** Update File: a.py\n@@\n-x\n+1\n y\n@@\n-x\n+2\n z\n@@\n-x\n+3")
    assert ws.text("a.py") == "1\ny\n2\nz\n3\n"


def test_hunks_out_of_order_are_refused_with_the_reason(ws: Workspace) -> None:
    ws.put(a_py="one\ntwo\nthree\n")
    said = ws.refused("*** Update File: a.py\n@@\n-three\n+3\n@@\n-one\n+1")
    assert (
        "hunk 2 of 2: its old text is at line 1, but has to be after line 3" in said
        and "in the order of the file" in said
    )


def test_an_anchor_chooses_the_first_place_after_it(ws: Workspace) -> None:
    ws.put(a_py="    x\ndef f():\n    x\ndef g():\n    x\ndef h():\n    x\n")
    ws.apply("*** Update File: a.py\n@@ def g():\n-    x\n+    y")
    assert ws.text("a.py") == "    x\ndef f():\n    x\ndef g():\n    y\ndef h():\n    x\n"


def test_anchors_narrow_the_place_one_after_the_other(ws: Workspace) -> None:
    ws.put(
        a_py="class A:\n    def f(self):\n        x\nclass B:\n    def e(self):\n        x\n    def f(self):\n        x\n"
    )
    ws.apply("*** Update File: a.py\n@@ class B:\n@@     def f(self):\n-        x\n+        y")
    assert ws.text("a.py").splitlines()[2::5] == ["        x", "        y"]


@pytest.mark.parametrize(
    "anchor",
    ["@@ def g():", "@@def g():  ", "@@   def g():", "@@ -3,2 +3,2 @@ def g():", "@@\n@@ def g():"],
)
def test_an_anchor_is_found_though_its_writing_differs(ws: Workspace, anchor: str) -> None:
    ws.put(a_py="def f():\n    x\ndef g():\n    x\n")
    ws.apply(f"*** Update File: a.py\n{anchor}\n-    x\n+    y")
    assert ws.text("a.py") == "def f():\n    x\ndef g():\n    y\n"


def test_git_line_numbers_are_no_anchor(ws: Workspace) -> None:
    ws.put(a_py="one\ntwo\n")
    ws.apply("*** Update File: a.py\n@@ -7,1 +7,1 @@\n-two\n+2")
    assert ws.text("a.py") == "one\n2\n"


def test_an_anchor_that_is_nowhere_is_refused_with_the_nearest_line(ws: Workspace) -> None:
    ws.put(a_py="def first(a, b):\n    x\n")
    said = ws.refused("*** Update File: a.py\n@@ def first(a, c):\n-    x\n+    y")
    assert (
        "its anchor is not in a.py" in said
        and "1\tdef first(a, b):" in said
        and "old_string" not in said
    )


def test_an_anchor_before_the_preceding_hunk_is_refused_with_the_reason(ws: Workspace) -> None:
    ws.put(a_py="def f():\n    x\n    y\n")
    said = ws.refused("*** Update File: a.py\n@@\n-    x\n+    z\n@@ def f():\n-    y\n+    z")
    assert "hunk 2 of 2: its anchor is at line 1, but has to be after line 2" in said


def test_the_anchor_may_be_repeated_as_the_first_line_of_its_hunk(ws: Workspace) -> None:
    ws.put(a_py="x\ndef f():\n    x\n")
    ws.apply("*** Update File: a.py\n@@ def f():\n def f():\n-    x\n+    y")
    assert ws.text("a.py") == "x\ndef f():\n    y\n"


def test_a_repeated_anchor_that_fits_again_later_is_refused(ws: Workspace) -> None:
    ws.put(a_py="class A:\n def f():\n  x\nclass B:\n def f():\n  x\n")
    assert "it fits at lines 2, 5." in ws.refused(
        "*** Update File: a.py\n@@  def f():\n  def f():\n-  x\n+  y"
    )


def test_end_of_file_ties_a_hunk_to_the_end(ws: Workspace) -> None:
    ws.put(a_py="x\ny\nx\n")
    ws.apply("*** Update File: a.py\n@@\n-x\n+z\n*** End of File")
    assert ws.text("a.py") == "x\ny\nz\n"


def test_end_of_file_does_not_lead_back_into_the_hunk_before(ws: Workspace) -> None:
    ws.put(a_py="x\n")
    ws.refused("*** Update File: a.py\n@@\n-x\n+y\n@@\n-x\n+z\n*** End of File")


def test_end_of_file_where_the_text_is_not_at_the_end_is_refused(ws: Workspace) -> None:
    ws.put(a_py="x\ny\n")
    assert "is at line 1, but has to be at the end of the file" in ws.refused(
        "*** Update File: a.py\n@@\n-x\n+z\n*** End of File"
    )


def test_added_lines_without_context_go_after_the_anchor_or_to_the_end(ws: Workspace) -> None:
    ws.put(a_py="one\ntwo\n", b_py="one\ntwo\n", c_py="")
    ws.apply(
        "*** Update File: a.py\n@@ one\n+1.5\n*** Update File: b.py\n@@\n+3\n*** End of File\n"
        "*** Update File: c.py\n@@\n+first"
    )
    assert (ws.text("a.py"), ws.text("b.py"), ws.text("c.py")) == (
        "one\n1.5\ntwo\n",
        "one\ntwo\n3\n",
        "first\n",
    )


def test_added_lines_without_any_place_are_refused(ws: Workspace) -> None:
    ws.put(a_py="one\ntwo\n")
    assert "it fits at lines 1, 2, 3." in ws.refused(
        "*** Update File: a.py\n@@\n+new\n@@\n-two\n+2"
    )


def test_added_lines_alone_in_the_last_hunk_go_to_the_end(ws: Workspace) -> None:
    ws.put(a_py="one\ntwo\n", b_py=b"one\r\ntwo")
    ws.apply(
        "*** Update File: a.py\n@@\n-one\n+1\n@@\n+three\n+\n+four\n*** Update File: b.py\n@@\n+three"
    )
    assert ws.text("a.py") == "1\ntwo\nthree\n\nfour\n"
    assert ws.data("b.py") == b"one\r\ntwo\r\nthree"


def test_a_hunk_that_is_nowhere_is_refused_with_the_nearest_lines(ws: Workspace) -> None:
    ws.put(
        a_py="".join(f"line {n}\n" for n in range(1, 50))
        + "def total(items):\n    return sum(items)\n"
    )
    said = ws.refused(
        "*** Update File: a.py\n@@\n-line 3\n+line three\n@@\n def total(items):\n-    return sum(item)\n+    return 0"
    )
    assert said.startswith("Error: Update File a.py: hunk 2 of 2: its old text is not in a.py.")
    assert "50\tdef total(items):\n51\t    return sum(items)" in said
    assert "No file was changed. Send the whole patch again" in said and "_string" not in said


def test_the_nearest_lines_are_shown_as_they_are(ws: Workspace) -> None:
    ws.put(a_py="def edit(old_string, new_string):\n    pass\n")
    said = ws.refused("*** Update File: a.py\n@@\n-def edit(old_string, new_text):\n+x\n     pass")
    assert (
        "1\tdef edit(old_string, new_string):\n" in said and "its old text is not in a.py" in said
    )


def test_a_change_that_is_made_already_is_told_as_such(ws: Workspace) -> None:
    ws.put(a_py="one\n2\nthree\n")
    assert "its new text is, at line 1: this edit seems to be made already" in ws.refused(
        "*** Update File: a.py\n@@\n one\n-two\n+2\n three"
    )


def test_a_patch_that_changes_nothing_is_refused(ws: Workspace) -> None:
    ws.put(a_py="one\n")
    assert "nothing to do" in ws.refused("*** Update File: a.py\n@@\n-one\n+one")
    assert "nothing to do" in ws.refused("*** Update File: a.py\n@@\n one")


@pytest.mark.parametrize(
    ("patch", "new"),
    [
        (
            "-if a:\n-    b\n+if c:\n+\n+    d",
            "    if c:\n\n        d\n",
        ),  # the patch lost four spaces
        (
            "-        if a:\n-            b\n+        if c:\n+            d",
            "    if c:\n        d\n",
        ),  # it has four too many
        (
            "-if a:\n-    b\n+    if c:\n+        d",
            "    if c:\n        d\n",
        ),  # only its old lines lost them
        (" if a:\n-    b\n+        c", "    if a:\n        c\n"),
        ("-if a:\n-    b", ""),
    ],
)
def test_new_lines_are_shifted_if_they_are_off_as_the_old_ones(
    ws: Workspace, patch: str, new: str
) -> None:
    ws.put(a_py="    if a:\n        b\n")
    ws.apply(f"*** Update File: a.py\n@@\n{patch}")
    assert ws.text("a.py") == new


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ("-if a:\n-  b\n+if c:\n+  d", "White space differs"),  # two for four
        (" if a:\n-\tb\n+\td", "White space differs"),
        ("-        if a:\n-            b\n+        if c:\n+d", "not certain"),
        ("-b\n+if c:\n+    b", "not certain"),  # wrapped, or b as it is in the file
        (" if a:\n+    if c:\n     b", "not certain"),
    ],
)
def test_a_patch_of_another_indentation_is_refused_with_the_lines(
    ws: Workspace, patch: str, said: str
) -> None:
    ws.put(a_py="    if a:\n        b\n")
    message = ws.refused(f"*** Update File: a.py\n@@\n{patch}")
    assert said in message and "2\t        b" in message


def test_new_lines_have_the_punctuation_of_the_file(ws: Workspace) -> None:
    ws.put(a_py="a = 'x'\nb = \"y\"\nc = “z”\n", b_py="a = 'x'\nb = \"y\"\n")
    ws.apply("*** Update File: b.py\n@@\n a = ‘x’\n-b\u00a0= “y”\n+b\u00a0= “it’s”")
    assert ws.text("b.py") == "a = 'x'\nb = \"it's\"\n"
    assert "not certain" in ws.refused("*** Update File: a.py\n@@\n-a = ‘x’\n-b = “y”\n+a = “x”")


# ---- what stays as it is ---------------------------------------------------------------------------------


def test_in_a_crlf_file_only_the_named_line_differs(ws: Workspace) -> None:
    lines = [b"line %d" % n for n in range(100)]
    ws.put(a_txt=b"\r\n".join(lines) + b"\r\n")
    ws.apply("*** Update File: a.txt\n@@\n line 49\n-line 50\n+fifty\n+and more\n line 51")
    lines[50:51] = [b"fifty", b"and more"]
    assert ws.data("a.txt") == b"\r\n".join(lines) + b"\r\n"


def test_mixed_line_endings_stay_and_new_lines_follow_those_around(ws: Workspace) -> None:
    ws.put(a_txt=b"a\r\nb\nc\r\nd\ne\n")
    ws.apply("*** Update File: a.txt\n@@\n a\n-b\n+B\n c\n+C\n d\n-e\n+E")
    assert ws.data("a.txt") == b"a\r\nB\nc\r\nC\r\nd\nE\n"


def test_a_line_added_before_all_others_has_the_ending_of_most(ws: Workspace) -> None:
    ws.put(a_txt=b"a\r\nb\r\n")
    ws.apply("*** Update File: a.txt\n@@\n+top\n a")
    assert ws.data("a.txt") == b"top\r\na\r\nb\r\n"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_mark_and_encoding_stay(ws: Workspace, encoding: str) -> None:
    ws.put(a_txt="é one\r\ntwo\r\n".encode(encoding))
    ws.apply("*** Update File: a.txt\n@@\n é one\n-two\n+zwei ü")
    assert ws.data("a.txt") == "é one\r\nzwei ü\r\n".encode(encoding)


def test_of_a_latin_1_file_only_the_ascii_words_change(ws: Workspace) -> None:
    ws.put(a_txt="caf\xe9\none\ncr\xe8me\n".encode("latin-1"))
    ws.apply("*** Update File: a.txt\n@@\n-one\n+two")
    assert ws.data("a.txt") == "caf\xe9\ntwo\ncr\xe8me\n".encode("latin-1")
    assert "not UTF-8" in ws.refused("*** Update File: a.txt\n@@\n-two\n+d\xe9j\xe0")


@pytest.mark.parametrize(
    ("before", "hunk", "after"),
    [
        (b"a\nb", "-b\n+c", b"a\nc"),
        (b"a\r\nb", "-b\n+c\n+d", b"a\r\nc\r\nd"),
        (b"a\nb", " b\n+c", b"a\nb\nc"),
        (b"a\nb", "-a\n+x", b"x\nb"),
        (b"a\nb", "-b", b"a"),
        (b"a\nb\n", "-b", b"a\n"),
        (b"a\n", "-a", b""),
        (b"a\nb\n", " b\n+c", b"a\nb\nc\n"),
        (b"a\nb\r", "-a\n+x", b"x\nb\r"),
    ],
)
def test_the_end_of_the_file_keeps_or_lacks_its_newline(
    ws: Workspace, before: bytes, hunk: str, after: bytes
) -> None:
    ws.put(a_txt=before)
    ws.apply(f"*** Update File: a.txt\n@@\n{hunk}\n*** Add File: other\n+x")
    assert ws.data("a.txt") == after


def test_form_feeds_and_line_separators_do_not_part_lines(ws: Workspace) -> None:
    ws.put(a_txt="a\x0cb\u2028c\n\x1d\nold\n")
    ws.apply("*** Update File: a.txt\n@@\n a\x0cb\u2028c\n \x1d\n-old\n+new\x0bline")
    assert ws.text("a.txt") == "a\x0cb\u2028c\n\x1d\nnew\x0bline\n"


@pytest.mark.case("FIL-16")
@pytest.mark.parametrize("mode", [0o755, 0o640, 0o600])
def test_the_mode_stays_also_in_a_move(ws: Workspace, mode: int) -> None:
    ws.put(a_sh="one\n", b_sh="one\n")
    for name in ("a.sh", "b.sh"):
        (ws.folder / name).chmod(mode)
    ws.apply(
        "*** Update File: a.sh\n-one\n+two\n*** Update File: b.sh\n*** Move to: c.sh\n-one\n+two"
    )
    assert [stat.S_IMODE((ws.folder / name).stat().st_mode) for name in ("a.sh", "c.sh")] == [
        mode,
        mode,
    ]


def test_an_update_through_a_link_changes_its_target_and_leaves_the_link(ws: Workspace) -> None:
    ws.put(t="one\n")
    (ws.folder / "l").symlink_to("t")
    assert ws.apply("*** Update File: l\n-one\n+two").startswith("M t\n")
    assert os.readlink(ws.folder / "l") == "t" and ws.text("t") == "two\n"


@pytest.mark.parametrize("target", ["t", "nowhere", "folder", "/etc/passwd"])
def test_deleting_a_link_takes_the_link_only(ws: Workspace, target: str) -> None:
    ws.put(t="one\n")
    (ws.folder / "folder").mkdir()
    (ws.folder / "l").symlink_to(target)
    assert ws.apply("*** Delete File: l").startswith("D l\n")
    assert sorted(ws.files()) == ["folder", "t"]


def test_moving_a_link_is_refused(ws: Workspace) -> None:
    ws.put(t="one\n")
    (ws.folder / "l").symlink_to("t")
    assert "links are not moved" in ws.refused("*** Update File: l\n*** Move to: m")


def test_other_hard_links_keep_the_old_content_and_that_is_said(ws: Workspace) -> None:
    ws.put(a_txt="one\n")
    os.link(ws.folder / "a.txt", ws.folder / "b.txt")
    assert ws.apply("*** Update File: a.txt\n-one\n+two").startswith(
        "M a.txt Note: the file had 2 hard links"
    )
    assert ws.text("b.txt") == "one\n"


def test_a_binary_file_can_be_deleted_and_not_updated(ws: Workspace) -> None:
    ws.put(a_bin=b"\0\1\2\n")
    assert "binary file" in ws.refused("*** Update File: a.bin\n-x\n+y")
    assert ws.apply("*** Delete File: a.bin") == "D a.bin\nD a.bin"
    assert ws.files() == {}


# ---- what is refused -------------------------------------------------------------------------------------


@pytest.mark.case("FIL-07")
@pytest.mark.parametrize(
    "section",
    [
        "*** Add File: ../PWN\n+x",
        "*** Add File: {out}/PWN\n+x",
        "*** Add File: door/PWN\n+x",
        "*** Add File: a/../../PWN\n+x",
        "*** Update File: ../secret\n-s\n+x",
        "*** Update File: link\n-s\n+x",
        "*** Update File: door/secret\n-s\n+x",
        "*** Update File: good\n*** Move to: ../PWN",
        "*** Update File: good\n*** Move to: {out}/PWN\n-g\n+x",
        "*** Update File: good\n*** Move to: door/PWN",
        "*** Update File: ../secret\n*** Move to: mine",
        "*** Delete File: ../secret",
        "*** Delete File: {out}/secret",
        "*** Delete File: door/secret",
        "*** Add File: ../ws-evil/PWN\n+x",
        "*** Delete File: ..",
        "*** Add File: a\0b\n+x",
    ],
)
def test_one_path_outside_the_workspace_rejects_the_whole_patch(
    ws: Workspace, section: str
) -> None:
    out = ws.folder.parent
    (out / "secret").write_text("s\n")
    (ws.folder / "door").symlink_to(out)
    (ws.folder / "link").symlink_to(out / "secret")
    ws.put(good="g\n", first="f\n")
    before = sorted(path.name for path in out.iterdir())
    said = ws.refused(
        "*** Update File: first\n-f\n+x\n" + section.format(out=out) + "\n*** Add File: last\n+x"
    )
    assert "outside the workspace" in said or "NUL" in said or "File ..: " in said
    assert (
        sorted(path.name for path in out.iterdir()) == before
        and (out / "secret").read_text() == "s\n"
    )
    assert ws.asked == []


def test_paths_that_lead_back_inside_are_fine(ws: Workspace) -> None:
    ws.put(a_py="one\n")
    ws.apply(f"*** Update File: ../ws/a.py\n-one\n+two\n*** Add File: {ws.folder}/b.py\n+x")
    assert (ws.text("a.py"), ws.text("b.py")) == ("two\n", "x\n")


def test_a_tilde_may_begin_a_name(ws: Workspace) -> None:
    ws.put(**{"~old": "x\n"})
    ws.apply("*** Add File: ~new\n+x\n*** Delete File: ~old")
    assert list(ws.files()) == ["~new"]


@pytest.mark.case("FIL-08")
def test_one_hunk_that_does_not_apply_leaves_all_files_alone(ws: Workspace) -> None:
    ws.put(a_py="one\n", b_py="two\n", c_py="three\n")
    said = ws.refused(
        "*** Update File: a.py\n-one\n+1\n*** Update File: b.py\n*** Move to: b2.py\n-two\n+2\n"
        "*** Add File: n/new.py\n+x\n*** Delete File: a2.py\n*** Update File: c.py\n-four\n+4"
    )
    assert "Delete File a2.py" in said
    assert "Update File c.py: hunk 1 of 1" in ws.refused(
        "*** Update File: a.py\n-one\n+1\n*** Update File: b.py\n-two\n+2\n*** Update File: c.py\n-four\n+4"
    )
    assert ws.asked == []


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("*** Add File: link\n+x", "link exists already. Change it with *** Update File"),
        ("*** Add File: folder\n+x", "folder exists already"),
        ("*** Add File: dangling\n+x", "dangling exists already"),
        ("*** Update File: b.py\n-x\n+y", "there is no file"),
        ("*** Update File: dangling\n-x\n+y", "there is no file"),
        ("*** Update File: folder\n-x\n+y", "is a folder"),
        ("*** Update File: pipe\n-x\n+y", "is not a regular file"),
        ("*** Delete File: b.py", "there is no file"),
        (f"*** Delete File: {TOO_LONG}", "File name too long"),
        (f"*** Update File: {TOO_LONG}\n-x\n+y", "File name too long"),
        ("*** Delete File: folder", "is a folder"),
        ("*** Delete File: .", "is a folder"),
        ("*** Delete File: pipe", "is not a regular file"),
        ("*** Update File: a.py\n*** Move to: other.py", "other.py exists already"),
        ("*** Update File: a.py\n*** Move to: a.py", "a.py is in the patch twice"),
        ("*** Update File: a.py\n*** Move to: dangling", "dangling exists already"),
    ],
)
def test_a_section_that_cannot_be_done_is_refused(ws: Workspace, section: str, said: str) -> None:
    ws.put(a_py="one\n", other_py="x\n")
    (ws.folder / "folder").mkdir()
    (ws.folder / "dangling").symlink_to("nowhere")
    (ws.folder / "link").symlink_to("a.py")
    os.mkfifo(ws.folder / "pipe")
    error = ws.refused("*** Add File: first.py\n+x\n" + section)
    assert said in error and "No file was changed." in error


def test_a_missing_file_comes_with_names_like_it(ws: Workspace) -> None:
    ws.put(config_py="one\n")
    assert "Did you mean" in ws.refused("*** Update File: confg.py\n-one\n+1")


@pytest.mark.parametrize(
    "sections",
    [
        "*** Delete File: a.py\n*** Update File: a.py\n-one\n+1",
        "*** Delete File: a.py\n*** Add File: a.py\n+1\n*** Add File: a.py\n+1",
        "*** Update File: a.py\n-one\n+1\n*** Add File: a.py\n+1",
        "*** Add File: b.py\n+1\n*** Add File: b.py\n+2",
        "*** Add File: b.py\n+1\n*** Update File: a.py\n*** Move to: b.py",
    ],
)
def test_the_same_file_twice_is_refused(ws: Workspace, sections: str) -> None:
    ws.put(a_py="one\ntwo\n")
    (ws.folder / "sub").mkdir()
    (ws.folder / "l").symlink_to("a.py")
    said = ws.refused(sections)
    assert "twice" in said or "exists already" in said


@pytest.mark.parametrize("second", ["a.py", "l", "./sub/../a.py"])
def test_sections_for_one_file_are_done_one_after_the_other(ws: Workspace, second: str) -> None:
    ws.put(a_py=b"\xef\xbb\xbfone\r\ntwo\r\n")
    (ws.folder / "sub").mkdir()
    (ws.folder / "l").symlink_to("a.py")
    content = ws.apply(
        f"*** Update File: a.py\n-two\n+2\n*** Update File: {second}\n-one\n+1\n 2\n"
        "*** Add File: b.py\n+x\n*** Update File: b.py\n x\n+y"
    )
    assert ws.data("a.py") == b"\xef\xbb\xbf1\r\n2\r\n" and ws.text("b.py") == "x\ny\n"
    assert (
        content.splitlines()[:2] == ["M a.py", "A b.py"]
        and content.count("-one\n-two\n+1\n+2") == 1
    )
    assert [asked[:2] for asked in ws.asked] == [("edit", "a.py, b.py")]


def test_the_second_section_of_a_file_may_rename_it(ws: Workspace) -> None:
    ws.put(a_py="one\ntwo\n")
    ws.apply("*** Update File: a.py\n-one\n+1\n*** Update File: a.py\n*** Move to: b.py\n-two\n+2")
    assert {name: ws.text(name) for name in ws.files()} == {"b.py": "1\n2\n"}


@pytest.mark.parametrize(
    "body", ["*** Add File: a.py\n+new", "*** Delete File: a.py\n*** Add File: a.py\n+new"]
)
def test_a_file_that_is_there_is_written_anew(ws: Workspace, body: str) -> None:
    ws.put(a_py=b"one\r\ntwo\r\n")
    (ws.folder / "a.py").chmod(0o750)
    assert ws.apply(body).startswith("M a.py\n")
    assert (
        ws.data("a.py") == b"new\r\n" and stat.S_IMODE((ws.folder / "a.py").stat().st_mode) == 0o750
    )
    [(permission, name, shown)] = ws.asked
    assert (permission, name) == ("edit", "a.py") and "-one\n-two\n+new" in shown
    ws.put(a_py="someone else's\n")
    assert "a.py changed on disk since it was read" in ws.refused(body)


def test_what_is_written_anew_comes_back_if_the_patch_fails(ws: Workspace) -> None:
    ws.put(a_py="one\n", b_py="two\n")
    ws.refused(
        f"*** Delete File: a.py\n*** Add File: a.py\n+1\n*** Add File: b.py\n+2\n*** Add File: {TOO_LONG}\n+x"
    )


def test_blanks_before_a_header_are_tolerated(ws: Workspace) -> None:
    ws.put(a_py="one\ntwo\n", b_py="x\n", c_py="gone\n")
    ws.apply(
        "  *** Update File: a.py\n@@\n-one\n+1\n two\n *** Update File: b.py\n@@\n-x\n+y\n\t*** Delete File: c.py\n"
        " *** Add File: d.py\n+d"
    )
    assert {name: ws.text(name) for name in ws.files()} == {
        "a.py": "1\ntwo\n",
        "b.py": "y\n",
        "d.py": "d\n",
    }


def test_a_line_that_looks_like_a_header_stays_where_the_file_has_it(ws: Workspace) -> None:
    ws.put(a_md="one\n*** Update File: b.py\n", b_py="x\n")
    ws.apply("*** Update File: a.md\n@@\n-one\n+1\n *** Update File: b.py\n@@\n+end")
    assert ws.text("a.md") == "1\n*** Update File: b.py\nend\n"


@pytest.mark.parametrize("section", ["*** Update File: a.py\n-one\n+1", "*** Delete File: a.py"])
def test_a_file_that_changed_since_it_was_read_is_refused(ws: Workspace, section: str) -> None:
    ws.put(a_py="one\n")
    ws.call("read", path="a.py")
    ws.put(a_py="one\nand more\n")
    assert "a.py changed on disk since it was read" in ws.refused(
        "*** Add File: b.py\n+x\n" + section
    )
    ws.call("read", path="a.py")
    ws.apply(section)


def test_patches_in_a_row_need_no_reading_in_between(ws: Workspace) -> None:
    ws.put(a_py="one\n")
    ws.call("read", path="a.py")
    ws.apply("*** Update File: a.py\n-one\n+two")
    ws.apply("*** Update File: a.py\n-two\n+three")
    assert ws.text("a.py") == "three\n"


def test_what_was_added_or_updated_counts_as_read_and_what_went_does_not(ws: Workspace) -> None:
    ws.put(a_py="one\n", d_py="x\n", m_py="x\n")
    for name in ("a.py", "d.py", "m.py"):
        ws.call("read", path=name)
    ws.apply(
        "*** Add File: n.py\n+x\n*** Update File: a.py\n-one\n+two\n*** Delete File: d.py\n"
        "*** Update File: m.py\n*** Move to: m2.py"
    )
    assert {path.name for path in ws.tools.seen} == {"a.py", "n.py", "m2.py"}
    ws.put(d_py="someone else's\n")
    assert ws.call("write", path="d.py", content="mine").is_error
    assert not ws.call("write", path="m2.py", content="mine").is_error


# ---- asking, and all or nothing --------------------------------------------------------------------------


def test_leave_is_asked_once_with_all_names_and_the_whole_diff(ws: Workspace) -> None:
    ws.put(a_py="one\n", b_py="x\n", d_bin=b"\0")
    ws.when_asked = lambda: asked_before.update(ws.files())
    asked_before: dict[str, object] = {}
    before = ws.files()
    ws.apply(
        "*** Update File: a.py\n-one\n+two\n*** Update File: b.py\n*** Move to: c.py\n-x\n+y\n*** Delete File: d.bin\n"
        "*** Add File: e.py\n+new"
    )
    [(permission, names, shown)] = ws.asked
    assert (permission, names) == ("edit", "a.py, b.py, c.py, d.bin, e.py")
    assert all(
        piece in shown
        for piece in ("-one\n+two", "rename from b.py\nrename to c.py", "-x\n+y", "D d.bin", "+new")
    )
    assert asked_before == before


def test_a_no_leaves_everything_alone(ws: Workspace) -> None:
    def no() -> None:
        raise DeniedError("not today")

    ws.put(a_py="one\n")
    ws.when_asked = no
    assert (
        ws.refused("*** Update File: a.py\n-one\n+two\n*** Add File: b.py\n+x")
        == "Denied: not today"
    )


@pytest.mark.parametrize(
    ("section", "name", "content"),
    [
        ("*** Update File: a.py\n-one\n+1", "a.py", "one\nmore\n"),
        ("*** Update File: a.py\n*** Move to: b.py", "b.py", "x\n"),
        ("*** Delete File: a.py", "a.py", "more\n"),
        ("*** Add File: b.py\n+x", "b.py", "x\n"),
        ("*** Update File: a.py\n-one\n+1", "a.py", None),
        ("*** Delete File: a.py", "a.py", None),
    ],
)
def test_what_changes_while_the_person_is_asked_is_not_overwritten(
    ws: Workspace, section: str, name: str, content: str | None
) -> None:
    def meanwhile() -> None:
        (ws.folder / name).unlink() if content is None else (ws.folder / name).write_text(content)
        before.update(ws.files())

    before: dict[str, object] = {}
    ws.put(a_py="one\n")  # never read: only what the patch itself has seen can tell
    ws.when_asked = meanwhile
    result = ws.call(
        "apply_patch", patch=f"*** Begin Patch\n*** Add File: c.py\n+x\n{section}\n*** End Patch"
    )
    assert f"{name} changed on disk meanwhile" in str(result.content) and result.is_error
    assert ws.files() == before


def test_an_abort_while_the_person_is_asked_leaves_everything_alone(ws: Workspace) -> None:
    ws.put(a_py="one\n")
    ws.when_asked = ws.abort.set
    with pytest.raises(Aborted):
        ws.call("apply_patch", patch="*** Begin Patch\n*** Delete File: a.py\n*** End Patch")
    assert ws.text("a.py") == "one\n"


def test_a_write_that_fails_in_the_middle_puts_everything_back(ws: Workspace) -> None:
    ws.put(a_sh=b"\xef\xbb\xbfone\r\n", b_py="two\n", c_py="three\n", never_py="read\n")
    (ws.folder / "a.sh").chmod(0o750)
    (ws.folder / "c.py").chmod(0o604)
    (ws.folder / "l").symlink_to("a.sh")
    for name in ("a.sh", "b.py", "c.py"):
        ws.call("read", path=name)
    seen = dict(ws.tools.seen)
    said = ws.refused(
        f"*** Update File: a.sh\n-one\n+1\n*** Update File: b.py\n*** Move to: deep/er/b.py\n-two\n+2\n"
        f"*** Delete File: c.py\n*** Delete File: l\n*** Add File: n/new.py\n+x\n*** Update File: never.py\n-read\n+1\n"
        f"*** Add File: sub/{TOO_LONG}\n+x\n*** Add File: after.py\n+x"
    )
    assert (
        "File name too long" in said
        and "The patch was not applied. All files are as they were before." in said
    )
    assert ws.tools.seen.keys() == seen.keys()
    ws.apply(
        "*** Update File: a.sh\n-one\n+1\n*** Delete File: c.py"
    )  # and none of them counts as changed


def test_a_folder_in_which_someone_else_puts_a_file_stays(ws: Workspace) -> None:
    ws.put(a_py="one\n")
    ws.apply("*** Add File: sub/a.py\n+x")
    ws.refused(f"*** Add File: sub/b.py\n+x\n*** Add File: {TOO_LONG}\n+x")
    assert ws.text("sub/a.py") == "x\n"


def test_a_file_may_give_way_to_a_folder_and_comes_back_if_that_fails(ws: Workspace) -> None:
    ws.put(a="one\n")
    ws.refused(f"*** Delete File: a\n*** Add File: a/b\n+x\n*** Add File: a/{TOO_LONG}\n+x")
    ws.apply("*** Delete File: a\n*** Add File: a/b\n+x")
    assert ws.text("a/b") == "x\n"


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_file_that_outgrows_the_limit_of_the_system_stays_whole(ws: Workspace) -> None:
    ws.put(a_txt="one\n" + "x" * 9000, b_txt="two\n")
    many = "\n".join("+" + "x" * 99 for _ in range(1000))
    with file_size_limit(4096):
        said = ws.refused(f"*** Update File: b.txt\n-two\n+2\n*** Update File: a.txt\n one\n{many}")
    assert (
        "a.txt could not be written, and is as it was: File too large" in said
        and "All files are as they were before" in said
    )


def test_a_file_cannot_be_added_below_a_file(ws: Workspace) -> None:
    ws.put(a_py="one\n")
    assert "All files are as they were before" in ws.refused(
        "*** Add File: b.py\n+x\n*** Add File: a.py/sub/c.py\n+x"
    )


def test_what_cannot_be_put_back_is_named(ws: Workspace) -> None:
    ws.put(a_txt="one\n" + "x" * 9000 + "\n", b_txt="two\n")
    patch = (
        "*** Begin Patch\n*** Update File: b.txt\n-two\n+2\n*** Update File: a.txt\n one\n-"
        + "x" * 9000
        + f"\n*** Add File: {TOO_LONG}\n*** End Patch"
    )
    with file_size_limit(4096):
        result = ws.call("apply_patch", patch=patch)
    assert f"Not all could be put back: {ws.folder}/a.txt could not be written" in str(
        result.content
    )
    assert (ws.text("a.txt"), ws.text("b.txt")) == ("one\n", "two\n")


# ---- the property ----------------------------------------------------------------------------------------

# Any text but what ends a line, what makes a file binary or seems to be a mark, and half surrogate pairs.
LINE = st.one_of(
    st.sampled_from(
        [
            "",
            " ",
            "a",
            "b",
            "a ",
            " a",
            "\ta",
            "@@",
            "@@ a",
            "+a",
            "-a",
            "***",
            "*** End Patch",
            "*** End of File",
            "*** Add File: x",
            "```",
            "“a”",
            '"a"',
            "\x0c",
            "a\u2028b",
        ]
    ),
    st.text(
        st.characters(exclude_characters="\n\r\0\ufeff", exclude_categories=["Cs"]), max_size=12
    ),
)
LINES = st.lists(LINE, max_size=12)


def patch_between(a: list[str], b: list[str], context: int) -> str:
    """The patch a perfect model would send: a hunk for each group of changes, with so many lines around."""
    out = ["*** Begin Patch", "*** Update File: f"]
    for group in difflib.SequenceMatcher(None, a, b, autojunk=False).get_grouped_opcodes(context):
        out.append("@@")
        for tag, a1, a2, b1, b2 in group:
            out += [" " + line for line in a[a1:a2]] if tag == "equal" else []
            out += ["-" + line for line in a[a1:a2]] if tag in ("replace", "delete") else []
            out += ["+" + line for line in b[b1:b2]] if tag in ("replace", "insert") else []
    return "\n".join([*out, "*** End Patch"])


def applied(
    a: list[str], b: list[str], context: int, newline: str, final: str
) -> tuple[ToolResult, bytes, bytes]:
    """(the result, what is in the file afterwards, what should be)."""
    before = (newline.join(a) + (final if a else "")).encode()
    newline = "\r\n" if b"\r\n" in before else "\n"
    after = (newline.join(b) + ((final if a else newline) if b else "")).encode()
    with tempfile.TemporaryDirectory() as folder:
        ws = Workspace(Path(folder).resolve())
        ws.put(f=before)
        result = ws.call("apply_patch", patch=patch_between(a, b, context))
        found = ws.data("f")
        if result.is_error:
            assert found == before
        return result, found, after


@settings(max_examples=300, deadline=None)
@given(LINES, LINES, st.sampled_from(["\n", "\r\n"]), st.booleans())
@example([], ["x"], "\n", True)
@example(["x"], [], "\n", False)
@example(["a", ""], ["a"], "\r\n", True)
def test_a_patch_with_the_whole_file_as_context_turns_any_lines_into_any_others(
    a: list[str], b: list[str], newline: str, ends: bool
) -> None:
    assume(
        a != b and (ends or (a and a[-1]))
    )  # without a last newline a last empty line is no line
    result, found, after = applied(a, b, len(a), newline, newline if ends else "")
    assert not result.is_error, result.content
    assert found == after


@settings(max_examples=300, deadline=None)
@given(
    st.lists(LINE, max_size=12, unique_by=lambda line: line),
    LINES,
    st.integers(1, 3),
    st.sampled_from(["\n", "\r\n"]),
)
def test_a_patch_with_little_context_always_applies_to_lines_that_are_all_different(
    a: list[str], b: list[str], context: int, newline: str
) -> None:
    assume(a != b)
    result, found, after = applied(a, b, context, newline, newline)
    assert not result.is_error, result.content
    assert found == after


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.sampled_from("ab "), max_size=14),
    st.lists(st.sampled_from("ab "), max_size=14),
    st.integers(1, 3),
)
def test_where_lines_repeat_a_patch_is_applied_rightly_or_refused_as_ambiguous(
    a: list[str], b: list[str], context: int
) -> None:
    assume(a != b)
    result, found, after = applied(a, b, context, "\n", "\n")
    assert found == after or (result.is_error and "it fits at lines" in str(result.content))


def test_people_are_shown_the_files_that_a_patch_is_about() -> None:
    patch = "*** Begin Patch\n*** Add File: new.py\n+x\n*** Delete File: sub/old.py\n*** End Patch"
    assert apply_patch.title_of({"patch": patch}) == "apply_patch new.py, sub/old.py"
    assert apply_patch.title_of({}) == "apply_patch"


# ---- files that are not read unasked ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "section",
    [
        "*** Update File: .env\n A=1\n-B=hunter3",
        "*** Delete File: .env",
        "*** Update File: .env\n*** Move to: b",
        "*** Update File: link\n-A=1\n+A=2",
    ],
)
def test_of_a_secret_file_nothing_is_shown_without_a_question(ws: Workspace, section: str) -> None:
    def no() -> None:
        raise DeniedError("no")

    ws.put(_env="A=1\nB=hunter2\n", a_py="x\n")
    (ws.folder / "link").symlink_to(".env")
    ws.when_asked = no
    assert (
        ws.refused(f"*** Update File: a.py\n-x\n+y\n{section}\n*** Delete File: ../outside")
        == "Denied: no"
    )
    assert ws.asked == [("read", ".env", "")]


def test_a_new_file_of_such_a_name_is_asked_about_once(ws: Workspace) -> None:
    ws.put(a_py="x\n")
    ws.apply("*** Add File: .env\n+A=1\n*** Delete File: a.py")
    assert [asked[:2] for asked in ws.asked] == [("edit", ".env, a.py")]
    ws.apply("*** Delete File: .env")
    assert [asked[0] for asked in ws.asked] == ["edit", "read", "edit"]


# ---- a folder that becomes a link in the middle ----------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        "*** Add File: sub/new\n+x",
        "*** Add File: sub/deep/new\n+x",
        "*** Update File: sub/a\n-one\n+PWN",
        "*** Delete File: sub/a",
        "*** Update File: sub/a\n*** Move to: b",
        "*** Update File: a\n*** Move to: sub/b",
        "*** Update File: in/sub/a\n-one\n+PWN",
        "*** Delete File: in/sub/a",
    ],
)
def test_a_folder_that_becomes_a_link_while_the_person_is_asked_leads_nowhere(
    ws: Workspace, tmp_path: Path, body: str
) -> None:
    outside = tmp_path / "outside"
    meanwhile = to_become_links(ws.folder, outside, "one\n")
    for root in (ws.folder, outside):
        for name in ("sub", "in/sub"):
            (root / name / "a").chmod(0o640)
        (root / "a").write_text("one\n")
        (root / "a").chmod(0o600)
    before = {
        path: (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in outside.rglob("*")
    }
    ws.when_asked = meanwhile
    result = ws.call("apply_patch", patch=f"*** Begin Patch\n{body}\n*** End Patch")
    assert result.is_error and "a link has taken its place" in str(result.content)
    assert {
        path: (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in outside.rglob("*")
    } == before
    assert ws.text("a") == ws.text("sub-aside/a") == ws.text("in-aside/sub/a") == "one\n"
