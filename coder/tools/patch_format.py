"""The format of a patch: sections for files, and in them hunks of marked lines."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from coder.types import ToolError

HEADER = r"(?m)^\*\*\* (Add|Update|Delete) File: *(\S.*?)[ \t]*$"
MOVE = r"\*\*\* Move to: *(\S.*?)\s*"
# Models mostly guess git's line numbers
ANCHOR = r"@@(?: ?-(?P<line>\d{1,9})[\d,]* \+[\d,]+ @@)? ?(?P<text>.*?)\s*"
FORMAT = (
    "A section begins with *** Add File:, *** Update File: or *** Delete File: and a path. In a new "
    "file each line begins with +, in a hunk with a space (stays), - (goes) or + (new)."
)
MARKS = {"Add": "+", "Delete": "", "Update": " -+"}  # of the lines of a section
MARKS_MEAN = "a line that stays begins with a space, one that goes with -, a new one with +."


@dataclass
class Hunk:
    """Changes next to each other in a file.

    `body` holds lines with their mark: space, - or +. `line`: the number in git's header, or 0.
    """

    line: int = 0
    anchors: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    at_end: bool = False


@dataclass
class Section:
    """The part of a patch for one file: Add, Update or Delete. A new file is one hunk."""

    kind: str
    path: str
    move: str = ""  # where the file is moved to
    hunks: list[Hunk] = field(default_factory=list)


def sections_of(patch: str) -> list[tuple[str, str, str]]:
    """(Add, Update or Delete; the path; the lines below) of all sections.

    Raises ToolError if there is no section.
    """
    text = patch.strip().replace("\r\n", "\n")
    envelope = re.fullmatch(r"\*\*\* Begin Patch *\n(.*?)\n?\*\*\* End Patch", text, re.S)
    if not envelope:
        raise ToolError(
            "the first line of the patch has to be *** Begin Patch, the last *** End Patch. "
            "Send it whole."
        )
    before, *parts = re.split(HEADER, envelope[1])
    if before.strip() or not parts:
        raise ToolError(f"this is no section of a patch: {before.strip()[:200]!r}. {FORMAT}")
    return list(zip(parts[::3], parts[1::3], parts[2::3]))


def read_section(kind: str, path: str, text: str) -> Section:
    """The hunks of a section. Raises ToolError for a line that has no place in it."""
    section = Section(kind, path)
    lines = text.strip("\n").split("\n")
    move = re.fullmatch(MOVE, lines[0])
    if move and kind == "Update":
        section.move = move[1]
        lines.pop(0)
    for line in lines:
        _read_line(section, line)
    for hunk in section.hunks:
        hunk.body = _without_end(hunk.body)
    is_whole = all(hunk.body for hunk in section.hunks)
    is_empty = not section.hunks and not section.move
    if kind == "Update" and (is_empty or not is_whole):
        raise ToolError("it has no hunk, or one without lines")
    return section


def _read_line(section: Section, line: str) -> None:
    hunks = section.hunks
    anchor = re.fullmatch(ANCHOR, line) if section.kind == "Update" else None
    if anchor:
        _add_anchor(hunks, anchor)
    elif hunks and line.rstrip() == "*** End of File":
        hunks[-1].at_end = True
    elif line and line[0] not in MARKS[section.kind]:
        raise ToolError(f"this line of the patch has no place there: {line[:200]!r}; {MARKS_MEAN}")
    elif line or hunks:  # an empty line in a hunk is one without its mark
        if not hunks:
            hunks.append(Hunk())
        hunks[-1].body.append(line)


def _add_anchor(hunks: list[Hunk], anchor: re.Match[str]) -> None:
    """Begin a hunk, or tell more about one that has no lines yet."""
    if not hunks or hunks[-1].body:
        hunks.append(Hunk())
    hunks[-1].line = int(anchor["line"] or 0)
    if anchor["text"]:
        hunks[-1].anchors.append(anchor["text"])


def _without_end(body: list[str]) -> list[str]:
    """The lines of a hunk without the empty ones that only set it apart; the others get a mark."""
    end = len(body)
    while end and not body[end - 1]:
        end -= 1
    return [line or " " for line in body[:end]]
