"""The list of the reliability cases, and which tests carry their ids: read from the files, nothing is imported or run.

What it leaves out: what the cases say in full; each test's own words do.
"""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
LIST: dict[str, Any] = tomllib.loads((TESTS / "data" / "cases.toml").read_text())
CASES: dict[str, str] = LIST["cases"]
GROUPS: dict[str, str] = LIST["groups"]


@cache
def carried(folder: Path = TESTS) -> dict[str, list[str]]:
    """Where each id stands: the places ("file:line") of its marks, by id.

    Raises ValueError where a mark is not on a test or a parameter of one, or its ids are no plain strings.
    """
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text(), path.name)
        fitting = {id(mark) for node in ast.walk(tree) for mark in _fitting(node)}
        for mark in _marks(tree):
            place = f"{path.name}:{mark.lineno}"
            ids = [
                each.value
                for each in mark.args
                if isinstance(each, ast.Constant) and isinstance(each.value, str)
            ]
            if id(mark) not in fitting or not ids or len(ids) != len(mark.args) or mark.keywords:
                raise ValueError(
                    f"{place}: a case has to be a plain string, on a test or in a pytest.param"
                )
            for each in ids:
                places[each].append(place)
    return places


def _marks(node: ast.AST) -> Iterator[ast.Call]:
    """All `pytest.mark.case(...)` in a piece of a file."""
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and _named(each.func, "case", "mark", "pytest"):
            yield each


def _named(node: ast.AST, *names: str) -> bool:
    """Is it this dotted name? The last part comes first."""
    name, *before = names
    if not before:
        return isinstance(node, ast.Name) and node.id == name
    return isinstance(node, ast.Attribute) and node.attr == name and _named(node.value, *before)


def _fitting(node: ast.AST) -> Iterator[ast.Call]:
    """The marks that a test carries by this node: a decorator of a test function, or the `marks` of a parameter."""
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
        for decorator in node.decorator_list:
            yield from _marks(decorator)
    if isinstance(node, ast.Call) and _named(node.func, "param", "pytest"):
        for keyword in node.keywords:
            yield from _marks(keyword)
