"""Patterns for paths: ** is any number of folders, * and ? cross none."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

MAX_WAYS = 1000  # that the braces of a pattern may stand for


class Glob:
    """A pattern for paths below a folder: ** is any number of folders, * and ? cross none.

    Without a slash it is for names at any depth; a ! in front turns it round. It comes from a
    model: each path is matched in linear time.
    """

    def __init__(self, pattern: str) -> None:
        self.is_negated = pattern.startswith("!")
        ways = [pattern.removeprefix("!").removeprefix("./").replace("[^", "[!")]
        while len(ways) < MAX_WAYS and (found := re.search(r"\{([^{}]*)\}", ways[0])):
            head, tail = ways[0][: found.start()], ways[0][found.end() :]
            ways = [*ways[1:], *(f"{head}{choice}{tail}" for choice in found[1].split(","))]
        self.ways = [way.split("/") if "/" in way else ["**", way] for way in ways]
        for way in self.ways:
            way[-1:] = ["**", "*"] if way[-1] in ("", "**") else way[-1:]

    def names(self) -> list[str]:
        """Patterns of which one fits the name of each file, for the programs; [] for any name."""
        names = [way[-1] for way in self.ways]
        are_plain = all(re.fullmatch(r"[\w.?*-]+", name) and name != "*" for name in names)
        return names if are_plain and not self.is_negated else []

    def matches(self, *paths: str) -> bool:
        """Is one of these paths, of one file as it is seen from different folders, meant?"""
        return any(self.is_negated != self._fits_any(path.split("/")) for path in paths)

    def _fits_any(self, names: list[str]) -> bool:
        return any(_fits(names, way) for way in self.ways)


def _fits(names: list[str], parts: list[str]) -> bool:
    """Of all the ways in which the parts so far fit, follow how many names they take."""
    taken = {0}
    for part in parts:
        if part == "**":
            taken = set(range(min(taken), len(names) + 1)) if taken else taken
        else:
            taken = {n + 1 for n in taken if n < len(names) and fnmatchcase(names[n], part)}
    return len(names) in taken
