"""A unified diff as rows: numbered lines, and the changed words of a changed line marked."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import chain, groupby

from coder.cli.text_rows import Parts
from coder.permissions.sanitize import strip_controls

HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
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


def signed_rows(lines: Sequence[str], shown: Callable[[str], str]) -> Iterator[tuple[str, Parts]]:
    """Each row with its sign: "-" or "+" if it is a changed line, "" for all others.

    The length of a hunk decides, so that no line of a file is taken for a header.
    """
    old = new = 0  # the numbers of the next lines
    old_end = new_end = 0  # those after the hunk
    for line in lines:
        sign = line[:1] or " "  # an empty line is one of the context
        text = shown(line[1:].expandtabs(4))
        hunk = HUNK.match(line)
        if sign == "-" and old < old_end:
            yield sign, _row(old, sign, text)
            old += 1
        elif sign == "+" and new < new_end:
            yield sign, _row(new, sign, text)
            new += 1
        elif sign == " " and new < new_end:
            yield "", _row(new, sign, text)
            old += 1
            new += 1
        elif hunk:
            if old_end or new_end:  # of an earlier hunk
                yield "", [("   ⋮", "dim")]
            old = int(hunk[1])
            new = int(hunk[3])
            old_end = old + int(hunk[2] or 1)
            new_end = new + int(hunk[4] or 1)
        elif sign == "\\":  # a remark, such as that no newline ends the file
            yield "", [(shown(line), "dim")]
        else:  # a name: another file begins
            yield "", [(shown(line), "bold")]
            old_end = new_end = 0


def _row(number: int, sign: str, text: str) -> Parts:
    colour = COLOURS[sign]
    return [(f"{number:>4} ", "dim"), (f"{sign} ", colour), (text, colour)]


def _mark_words(before: Parts, after: Parts) -> None:
    """Mark the words that changed, if the two lines are similar."""
    old_words = WORD.findall(before.pop()[0])
    new_words = WORD.findall(after.pop()[0])
    matcher = SequenceMatcher(None, old_words[:MAX_WORDS], new_words[:MAX_WORDS], autojunk=False)
    mark = " reverse" if matcher.ratio() >= SIMILAR else ""
    for tag, old_start, old_end, new_start, new_end in matcher.get_opcodes():
        style = "" if tag == "equal" else mark
        before.append(("".join(old_words[old_start:old_end]), f"red{style}"))
        after.append(("".join(new_words[new_start:new_end]), f"green{style}"))
    # The rest was not compared
    before.append(("".join(old_words[MAX_WORDS:]), "red"))
    after.append(("".join(new_words[MAX_WORDS:]), "green"))
