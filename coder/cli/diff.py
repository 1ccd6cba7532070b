"""A unified diff as rows: numbered lines, and the changed words of a changed line marked."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import chain, groupby

from coder.cli.text_rows import Parts
from coder.permissions.sanitize import strip_controls
from coder.tools.text import HUNK

WORD = re.compile(r"\w+|\s+|.")
COLOURS = {"-": "red", "+": "green", " ": ""}
MAX_WORDS = 100  # at the beginning of a line, among which the changed ones are looked for
MAX_MARKED = 400  # lines of a diff in which changed words are marked
SIMILAR = 0.5  # ratio of difflib from which two lines are one line that was changed


def diff_rows(changes: str, shown: Callable[[str], str] = strip_controls) -> list[Parts]:
    """The rows of a diff; that of a line of a file is (number, sign, text...).

    The names of the files are left out if there is one file. `shown`: what a line looks like.
    """
    lines = changes.removesuffix("\n").split("\n")
    mark_words = len(lines) <= MAX_MARKED
    if changes.startswith("--- ") and "\n--- " not in changes:
        lines = lines[2:]
    rows: list[Parts] = []
    for _, group in groupby(signed_rows(lines, shown), key=is_change):
        by_sign: dict[str, list[Parts]] = {"-": [], "+": []}  # those removed come first
        for sign, row in group:
            by_sign.setdefault(sign, []).append(row)
        if mark_words:
            for before, after in zip(by_sign["-"], by_sign["+"]):
                _mark_words(before, after)
        rows += chain.from_iterable(by_sign.values())
    return rows


def is_change(signed_row: tuple[str, Parts]) -> bool:
    return bool(signed_row[0])


class Hunk:
    """The numbers of the lines in a hunk, whose length its header tells."""

    def __init__(self, header: re.Match[str]) -> None:
        self.old = int(header["old_line"])
        self.old_end = self.old + int(header["old"] or 1)
        self.new = int(header["line"])
        self.new_end = self.new + int(header["new"] or 1)

    @property
    def is_open(self) -> bool:
        return self.old < self.old_end or self.new < self.new_end

    def count(self, sign: str) -> int:
        """The number of the next line, which has this sign."""
        number = self.old if sign == "-" else self.new
        if sign != "+":
            self.old += 1
        if sign != "-":
            self.new += 1
        return number


def signed_rows(lines: Sequence[str], shown: Callable[[str], str]) -> Iterator[tuple[str, Parts]]:
    """Each row with its sign: "-" or "+" if it is a changed line, "" for all others.

    The length of a hunk decides, so that no line of a file is taken for a header.
    """
    hunk: Hunk | None = None
    for line in lines:
        sign = line[:1] or " "  # an empty line is one of the context
        header = re.match(HUNK, line)
        if hunk and hunk.is_open and sign in COLOURS:
            text = shown(line[1:].expandtabs(4))
            yield sign.strip(), _row(hunk.count(sign), sign, text)
        elif header:
            if hunk:
                yield "", [("   ⋮", "dim")]
            hunk = Hunk(header)
        elif sign == "\\":  # a remark, such as that no newline ends the file
            yield "", [(shown(line), "dim")]
        else:  # a name: another file begins
            yield "", [(shown(line), "bold")]
            hunk = None


def _row(number: int, sign: str, text: str) -> Parts:
    colour = COLOURS[sign]
    return [(f"{number:>4} ", "dim"), (f"{sign} ", colour), (text, colour)]


def _mark_words(before: Parts, after: Parts) -> None:
    """Mark the words that changed, if the two lines are similar."""
    old_words = WORD.findall(before.pop()[0])
    new_words = WORD.findall(after.pop()[0])
    matcher = SequenceMatcher(
        None,
        old_words[:MAX_WORDS],
        new_words[:MAX_WORDS],
        autojunk=False,
    )
    mark = " reverse" if matcher.ratio() >= SIMILAR else ""
    for tag, old_start, old_end, new_start, new_end in matcher.get_opcodes():
        style = "" if tag == "equal" else mark
        before.append(("".join(old_words[old_start:old_end]), f"red{style}"))
        after.append(("".join(new_words[new_start:new_end]), f"green{style}"))
    # The rest was not compared
    before.append(("".join(old_words[MAX_WORDS:]), "red"))
    after.append(("".join(new_words[MAX_WORDS:]), "green"))
