"""The indentation that a model leaves out: what edit and apply_patch make of it is what was meant,
or a refusal.

Edits are made from the source of the standard library: what is there is the text that was
meant, and the file is what it was before a statement was added, put into a block or written in
several lines.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent, indent

import pytest

from tests.workspace import Workspace, patch_of

UNCERTAIN = "the file has these lines in another indentation"
TAIL = "    one()\n    two()\n"

ALL = "    1()\n    2()\n    two()\nif 1:\n    1()\n    2()\n    two()\n"

# file, old, new, the file afterwards
EDITS = {
    "a whole new text": (TAIL, "one()\n    two()", "    one()\n    2()", "    one()\n    2()\n"),
    "both begin bare": (TAIL, "one()\n    two()", "one()\n    2()", "    one()\n    2()\n"),
    "one line, whole": (TAIL, "two()", "    2()", "    one()\n    2()\n"),
    "one line with its newline": (TAIL, "one()\n", "    1()\n", "    1()\n    two()\n"),
    "all lines lack it": (TAIL, "one()", "1()\n2()", "    1()\n    2()\n    two()\n"),
    "a line that stays": (TAIL, "two()", "2()\ntwo()", "    one()\n    2()\n    two()\n"),
    "a block": (TAIL, "two()", "if 2:\n    two()", "    one()\n    if 2:\n        two()\n"),
    "a whole block": (TAIL, "two()", "if 2:\n        2()", "    one()\n    if 2:\n        2()\n"),
    "the first is bare": (TAIL, "two()", "2()\n    3()", "    one()\n    2()\n    3()\n"),
    "an end of the block": (
        f"def f():\n{TAIL}",
        "two()",
        "return 2\n\ndef g():\n    pass",
        "def f():\n    one()\n    return 2\n\ndef g():\n    pass\n",
    ),
    "a bracket": (TAIL, "two()", "two(\n    2,\n)", "    one()\n    two(\n        2,\n    )\n"),
    "a part of a line": ("  f(1) + 2\n  y\n", "f(1)", "g()\nf(3)", "  g()\n  f(3) + 2\n  y\n"),
    "tabs": ("\tif 1:\n\t\tx\n\t\ty\n", "x", "if 2:\n\tx", "\tif 1:\n\t\tif 2:\n\t\t\tx\n\t\ty\n"),
    "CRLF": ("  a\r\n  b\r\n", "a\n", "a\nc\n", "  a\r\n  c\r\n  b\r\n"),
    "a docstring": (
        '  """x"""\n  y\n',
        '"""x"""',
        '"""x:\n\n  z\n  """',
        '  """x:\n\n  z\n  """\n  y\n',
    ),
    "every place": (f"{TAIL}if 1:\n{TAIL}", "one()", "1()\n2()", ALL),
}
REFUSED = {
    "neither level": (TAIL, "two()", "  2()"),
    "another level of the first": (TAIL, "one()\n    two()", "        1()\n    two()"),
    "only white space in front": (TAIL, "two()", "    two()"),
    "the margin or the block": (f"def f():\n{TAIL}", "two()", "two()\nthree()"),
    "a loop after a return, in a part of it": (
        "        return 1\n",
        "    return 1\n",
        "    return 1\n    for a in b:\n      two()\n",
    ),
    "a block around what stays": (
        "    try:\n        return 1\n    except E:\n        pass\n",
        "return 1",
        "return 1\nfor a in b:\n    two()",
    ),
    "spaces in a file with tabs": ("\tone()\n\ttwo()\n", "one()", "if 1:\n    one()"),
}


@pytest.fixture
def ws(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


@pytest.mark.parametrize("case", EDITS)
def test_new_lines_get_the_indentation_of_the_file(ws: Workspace, case: str) -> None:
    before, old, new, after = EDITS[case]
    ws.put({"a": before})
    ws("edit", path="a", old_string=old, new_string=new, replace_all=case == "every place")
    assert (ws.folder / "a").read_bytes().decode() == after


@pytest.mark.parametrize("case", REFUSED)
def test_an_uncertain_indentation_is_refused_with_the_way_out(ws: Workspace, case: str) -> None:
    before, old, new = REFUSED[case]
    ws.put({"a": before})
    for every in (False, True):
        said = ws.fails(
            "edit",
            path="a",
            old_string=old,
            new_string=new,
            replace_all=every,
        )
        assert UNCERTAIN in said
        assert "with the white space that the file has" in said
    assert (ws.folder / "a").read_text() == before


# ---- source of the standard library ---------------------------------------------------------


@dataclass
class Edit:
    """`before` becomes `after` between two other parts of a file."""

    head: list[str]
    before: list[str]
    after: list[str]
    tail: list[str]

    def mapped(self, each: Callable[[str], str]) -> Edit:
        parts = (self.head, self.before, self.after, self.tail)
        return Edit(*([each(line) for line in part] for part in parts))


@cache
def sources() -> list[tuple[list[str], list[list[ast.stmt]]]]:
    """The lines of modules, and the indented blocks of statements in them."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for name in (
        "argparse",
        "configparser",
        "difflib",
        "inspect",
        "shutil",
        "tarfile",
        "zipfile/__init__",
    ):
        place = library / f"{name}.py"
        if not place.exists():
            continue
        text = place.read_text("utf-8")
        inner = (getattr(node, "body", None) for node in ast.walk(ast.parse(text)))
        blocks = [body for body in inner if isinstance(body, list) and body[0].col_offset]
        found.append((text.split("\n"), blocks))
    return found


def lines_of(statement: ast.stmt) -> slice:
    assert statement.end_lineno
    above = getattr(statement, "decorator_list", [])
    return slice(
        min(each.lineno for each in (statement, *above)) - 1,
        statement.end_lineno,
    )


def edits(chance: random.Random) -> Iterator[Edit]:
    """Of one line mostly: others are put before it or after it, a block around it; or one of
    several lines changes."""
    while True:
        lines, blocks = chance.choice(sources())
        block = chance.choice(blocks)
        at = chance.randrange(len(block))
        group = block[at : at + chance.choice([1, 2, 3])]
        whole = slice(
            lines_of(group[0]).start,
            lines_of(group[-1]).stop,
        )
        after = lines[whole]
        kept = lines_of(chance.choice([group[0], group[-1]]))
        before = lines[kept]
        if chance.random() < 0.3:
            before = [*after]
            after = [f"{line} # new" if line == after[-1] else line for line in after]
        elif len(group) == 1 and isinstance(
            group[0],
            ast.If | ast.For | ast.With,
        ):
            inner = lines_of(group[0].body[0])
            level = " " * group[0].col_offset
            before = [level + line.strip() for line in lines[inner]]
        is_short = len(before) == 1 or before[:-1] == after[:-1]
        if before != after and is_short and len(after) < 20 and "\t" not in "".join(after):
            yield Edit(
                lines[: whole.start],
                before,
                after,
                lines[whole.stop :],
            )


def bare(lines: list[str]) -> list[str]:
    return [lines[0].lstrip(), *lines[1:]]


def at_margin(lines: list[str]) -> list[str]:
    return dedent("\n".join(lines)).split("\n")


def as_it_is(lines: list[str]) -> list[str]:
    return lines


def with_tabs(line: str) -> str:
    rest = line.lstrip(" ")
    level, odd = divmod(len(line) - len(rest), 4)
    return "\t" * level + " " * odd + rest


FORMS = {
    "first lines bare": (bare, bare),
    "only the old one bare": (bare, as_it_is),
    "both at the margin": (at_margin, at_margin),
    "only the old one at the margin": (at_margin, as_it_is),
}


@pytest.mark.parametrize("style", ["spaces", "tabs", "CRLF"])
@pytest.mark.parametrize("form", FORMS)
def test_an_edit_of_real_source_is_the_one_that_was_meant_or_is_refused(
    ws: Workspace, form: str, style: str
) -> None:
    """Both tools; apply_patch if the old lines are one, or lack the same."""
    count = Counter[str]()
    chance = random.Random(20)
    newline = "\r\n" if style == "CRLF" else "\n"
    old_form, new_form = FORMS[form]
    for edit, _ in zip(edits(chance), range(30)):
        if style == "tabs":
            edit = edit.mapped(with_tabs)
        before = newline.join(
            [
                *edit.head,
                *edit.before,
                *edit.tail,
            ]
        )
        after = newline.join(
            [
                *edit.head,
                *edit.after,
                *edit.tail,
            ]
        )
        old = old_form(edit.before)
        new = new_form(edit.after)
        calls = [
            {
                "name": "edit",
                "path": "a",
                "old_string": "\n".join(old),
                "new_string": "\n".join(new),
            }
        ]
        is_there = old[0] in edit.head + edit.tail  # at the margin: a patch is for that line
        if (len(old) == 1 or old_form is at_margin) and not is_there:
            body = indent("\n".join(old), "-", bool) + "\n" + indent("\n".join(new), "+", bool)
            calls.append(patch_of(f"*** Update File: a\n@@\n{body}"))
        for call in calls:
            ws.tools.seen.clear()
            ws.put({"a": before})
            result = ws.call(**call)
            made = (ws.folder / "a").read_bytes().decode()
            what = f"{call['name']}: {old}\n{new}\n{result.content}"
            assert made == (before if result.is_error else after), what
            is_right = not result.is_error or "at lines" in str(result.content)
            count[str(call["name"]) + (" right" if is_right else " refused")] += 1
    assert count["edit right"] > 20, count
