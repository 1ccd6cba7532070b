"""The format of apply_patch, and where its hunks go in a file.

A hunk goes only where one place fits, or to the first place after its anchor.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NoReturn

from coder.tools.advice import advice
from coder.tools.matching import VIEWS, Lines, Place, lines_without
from coder.tools.workspace import Text
from coder.types import ToolError

HEADER = re.compile(r"\*\*\* (Add|Update|Delete) File: *(\S.*?)\s*")
MOVE = re.compile(r"\*\*\* Move to: *(\S.*?)\s*")
# Git's line numbers may be there: never right
ANCHOR = re.compile(r"@@(?: ?-\d+(?:,\d+)? \+\d+(?:,\d+)? @@)? ?(.*?)\s*")
# What models put around: a fence, a heredoc
BEFORE = re.compile(r"(```\w*|(apply_patch\s*)?<<-?\s*['\"]?\w+['\"]?)?")
AFTER = re.compile(r"(```|\w+)?")
FORMAT = (
    "A section begins with *** Add File:, *** Update File: or *** Delete File: and a path. In a new "
    "file each line begins with +, in a hunk with a space (stays), - (goes) or + (new); nothing "
    "follows Delete File."
)
MARKS = {"Add": "+", "Delete": "", "Update": " -+"}  # what a line may begin with


@dataclass
class Hunk:
    """`body` holds lines with their mark: space, - or +."""

    anchors: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    at_end: bool = False


@dataclass
class Section:
    """What the patch says of one file; a new one is a single hunk."""

    kind: str
    path: str
    move: str = ""
    hunks: list[Hunk] = field(default_factory=list)


def parse(patch: str) -> list[Section]:
    """The sections of a patch. Raises ToolError with the line that is wrong."""
    sections: list[Section] = []
    for line in _lines_between(patch):
        if header := HEADER.fullmatch(line):
            sections.append(Section(header[1], header[2]))
        elif line if not sections else not _take_line(sections[-1], line):
            raise ToolError(f"this line of the patch has no place there: {line[:200]!r}. {FORMAT}")
    for section in sections:
        if section.kind == "Update" and not (
            all(hunk.body for hunk in section.hunks) and (section.hunks or section.move)
        ):
            problem = "has no hunk, or one without lines. Give the lines to change."
            raise ToolError(f"*** Update File: {section.path} {problem}")
    if not sections:
        way = "Put a section for each file between *** Begin Patch and *** End Patch."
        raise ToolError(f"the patch is empty. {way}")
    return sections


def _lines_between(patch: str) -> list[str]:
    """The lines between the first and the last, freed of the wrapping that models put around."""
    lines = patch.replace("\r\n", "\n").split("\n")
    while lines and BEFORE.fullmatch(lines[0].strip()):
        lines.pop(0)
    while lines and AFTER.fullmatch(lines[-1].strip()):
        lines.pop()
    if [line.strip() for line in lines[:1] + lines[-1:]] != ["*** Begin Patch", "*** End Patch"]:
        wanted = "has to be *** Begin Patch, the last *** End Patch"
        raise ToolError(f"the first line of the patch {wanted}. Send it whole.")
    return lines[1:-1]


def _take_line(section: Section, line: str) -> bool:
    """Take a line into the section; False if it does not belong there."""
    hunk, update = section.hunks[-1] if section.hunks else None, section.kind == "Update"
    if not line and not (update and hunk and not hunk.at_end):
        return True
    if update and (move := MOVE.fullmatch(line)) and not hunk and not section.move:
        section.move = move[1]
        return True
    if update and (anchor := ANCHOR.fullmatch(line)):
        if not hunk or hunk.body:
            section.hunks.append(hunk := Hunk())
        hunk.anchors += [anchor[1]] if anchor[1] else []
        return True
    if hunk and hunk.at_end:
        return False
    if update and hunk and line.rstrip() == "*** End of File":
        hunk.at_end = True
        return True
    if line and line[0] not in MARKS[section.kind]:
        return False
    if not hunk:
        section.hunks.append(hunk := Hunk())
    hunk.body.append(line or " ")
    return True


# ---- where a hunk goes ----------------------------------------------------------------------


def apply_hunks(file: Text, hunks: list[Hunk], name: str) -> str:
    """The file's text with the hunks in it. Raises ToolError for one without a certain place."""
    lines, places, done = Lines(file), list[Place](), 0
    for number, hunk in enumerate(hunks, 1):
        try:
            at, body = _locate(lines, hunk, done, name, last=number == len(hunks))
            places += lines.changes(at, body)
        except ToolError as error:
            raise ToolError(f"hunk {number} of {len(hunks)}: {error}") from None
        done = at + len(lines_without("+", body))
    return lines.spliced(places)


def _locate(lines: Lines, hunk: Hunk, start: int, name: str, last: bool) -> tuple[int, list[str]]:
    """(index of the first line, the marked lines as they fit), after `start` and the anchors."""
    for anchor in hunk.anchors:
        found = _find_lines(lines, [anchor], start) or _raise_not_found(
            lines, Hunk(body=[f" {anchor}"]), start, name, "its anchor"
        )
        start = found[0] + 1
    # Only new lines: they go to the end
    if last and not hunk.anchors and not lines_without("+", hunk.body):
        return len(lines.lines), hunk.body
    kept = max((number for number, line in enumerate(hunk.body, 1) if line != " "), default=0)
    for body in (hunk.body, hunk.body[:kept]):  # empty lines at the end may only set it apart
        old = lines_without("+", body)
        # Models repeat the anchor as the first line of the hunk: its own line is looked at too.
        found = _find_lines(lines, old, start - 1 if hunk.anchors and old else start, hunk.at_end)
        if len(found) > 1 and (not hunk.anchors or found[0] < start):
            raise ToolError(
                f"it fits at lines {', '.join(str(at + 1) for at in found[:20])}. Give more lines that "
                "stay around the change, or above it an anchor (@@ LINE) outside the hunk."
            )
        if found:
            return found[0], body
    return _raise_not_found(lines, hunk, start, name, "its old text")


def _find_lines(lines: Lines, wanted: list[str], start: int, at_end: bool = False) -> list[int]:
    """Where the wanted lines are, from `start`, in the strictest view that finds them."""
    first = max(start, len(lines.lines) - len(wanted)) if at_end else start
    return next((found for view in VIEWS if (found := lines.fits(wanted, view, first))), [])


def _raise_not_found(lines: Lines, hunk: Hunk, start: int, name: str, what: str) -> NoReturn:
    """Say what a model needs to mend a hunk that is nowhere."""
    old = lines_without("+", hunk.body)
    if found := _find_lines(lines, old, 0):
        there = f"after line {start}, where the anchor or hunk before it ends"
        there = "at the end of the file" if hunk.at_end else there
        way = "Put hunks in the order of the file."
        raise ToolError(f"{what} is at line {found[0] + 1}, but has to be {there}. {way}")
    new = lines_without("-", hunk.body) if any(line[0] == "+" for line in hunk.body) else []
    raise ToolError(advice(lines.lines, old, new, name, (what, "its new text")))
