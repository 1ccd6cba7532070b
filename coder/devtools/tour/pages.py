"""The pages of the tour, with links into the code of this package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).parent / "pages"
LINK = re.compile(r"\[(?P<name>[\w.]+)\]\((?P<target>\.\./[\w/.]+\.py)\)")
ROOT = Path(__file__).parents[3]  # what the package is in


def page(number: int) -> str:
    """The Markdown of a chapter, as it is in the repository."""
    return (FOLDER / f"{number:02}.md").read_text(encoding="utf-8")


def with_places(text: str) -> str:
    """The links into the code as PATH:LINE, which editors and terminals open, and where it is."""
    placed = LINK.sub(lambda link: f"[{link['name']}]({place_of(link)})", text)
    return f"{placed}\nThe code is in {ROOT}.\n"


def place_of(link: re.Match[str]) -> str:
    path = (FOLDER / link["target"]).resolve()
    return f"{path.relative_to(ROOT)}:{line_of(path, link['name'])}"


def line_of(path: Path, name: str) -> int:
    """The line in which a function, a class or a method (`Class.method`) begins; 1 if it is not
    there.
    """
    line = 1
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    for part in name.split("."):
        found = [node for node in nodes if getattr(node, "name", "") == part]
        if not found:
            return 1
        line = found[-1].lineno  # the last of several is no overload
        nodes = getattr(found[-1], "body", [])
    return line
