"""The list of the reliability cases (tests/data/cases.toml), and which tests carry their ids."""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
LIST: dict[str, Any] = tomllib.loads((TESTS / "data" / "cases.toml").read_text())
CASES: dict[str, str] = LIST["cases"]
GROUPS: dict[str, str] = LIST["groups"]


@cache
def carried(folder: Path = TESTS) -> dict[str, list[str]]:
    """Where each id is ("file:line"), read from the marks `pytest.mark.case("ID", ...)` of the
    files.

    Raises ValueError for a mark whose ids are not plain strings.
    """
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(folder.glob("test_*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "mark.case" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.case":
                place = f"{path.name}:{node.lineno}"
                ids = [each.value for each in node.args if isinstance(each, ast.Constant)]
                if not ids or len(ids) != len(node.args) or node.keywords:
                    raise ValueError(f"{place}: the ids of a case have to be plain strings")
                for each in ids:
                    places[str(each)].append(place)
    return places
