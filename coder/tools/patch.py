"""apply_patch: changes to several files in one call, in the format that OpenAI's models know.

All of the patch is planned before anything is written, and a write that fails is taken back with those
before it: all or nothing. What the patch does not name stays byte for byte.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from coder.tools.edit import MAX_LISTED, VIEWS, Lines, Place, advice, diff, lines_without
from coder.tools.workspace import (
    Text,
    ask_to_show,
    folder_of,
    load,
    opened,
    refuse_changed,
    remove,
    save,
    shown,
    state_of,
    temporary_name,
    to_write,
)
from coder.toolset import ToolContext, tool
from coder.types import ToolError, ToolResult

HEADER = re.compile(r"\*\*\* (Add|Update|Delete) File: *(\S.*?)\s*")
MOVE = re.compile(r"\*\*\* Move to: *(\S.*?)\s*")
ANCHOR = re.compile(
    r"@@(?: ?-\d+(?:,\d+)? \+\d+(?:,\d+)? @@)? ?(.*?)\s*"
)  # git's numbers: never right
FORMAT = (
    "A section begins with *** Add File:, *** Update File: or *** Delete File: and a path. In a new "
    "file each line begins with +, in a hunk with a space (stays), - (goes) or + (new)."
)
MARKS = {"Add": "+", "Delete": "", "Update": " -+"}  # what a line may begin with


def files_named(arguments: dict[str, Any]) -> str:
    """The title of a call: the files that a patch is about."""
    lines = str(arguments.get("patch", "")).splitlines()
    return ", ".join(found[2] for line in lines if (found := HEADER.fullmatch(line)))


@tool(title=files_named)
def apply_patch(ctx: ToolContext, patch: str) -> Generator[Any, None, ToolResult]:
    """Change, add, delete or rename files. All of the patch is applied, or nothing.

    Its first line is `*** Begin Patch`, its last `*** End Patch`; between them a section for each
    file, headed by `*** Add File: PATH` (then the content, + before each line), `*** Delete
    File: PATH` (nothing follows) or `*** Update File: PATH` (to rename, `*** Move to: PATH` on
    the next line; then hunks, in file order). A hunk begins with a line `@@`, or `@@ LINE` to
    search after that line of the file, such as `@@ class A`; several may follow one another.
    Then come whole lines of the file without line numbers: a space before each line that stays,
    - before each that goes, + before each new one. Give 3 lines that stay before and after a
    change, more if that is not unique. A line `*** End of File` after a hunk ties it to the end
    of the file.

    patch: the whole patch; paths are relative to the workspace
    """
    sections, places, changes = parse(patch), list[Path](), list[Change]()
    for section in sections:
        with _about(section):
            follow = section.kind == "Update" and not section.move
            places.append(to_write(ctx, section.path, follow))
    yield from ask_to_show(ctx, *places)
    known = dict[Path, Any]()  # the state of each place that the patch touches
    for section, place in zip(sections, places):
        with _about(section):
            changes.append(_plan(ctx, section, place, known))
    whole = "\n".join(change.diff for change in changes)
    yield from ctx.ask("edit", [shown(ctx, place) for place in known], whole)
    for place, state in known.items():  # they may have changed while permission was asked
        refuse_changed(ctx, place, state)
    ctx.abort.check()
    notes = _write_all(ctx, changes)
    summary = "\n".join(f"{change.title}{note}" for change, note in zip(changes, notes))
    details = {"diff": whole, "paths": [str(place) for place in known]}
    return ToolResult(f"{summary}\n{whole}", details=details)


# ---- the format -----------------------------------------------------------------------------


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
    lines, sections = patch.strip().replace("\r\n", "\n").split("\n"), list[Section]()
    if [line.strip() for line in lines[:1] + lines[-1:]] != ["*** Begin Patch", "*** End Patch"]:
        wanted = "has to be *** Begin Patch, the last *** End Patch"
        raise ToolError(f"the first line of the patch {wanted}. Send it whole.")
    for line in lines[1:-1]:
        if header := HEADER.fullmatch(line):
            sections.append(Section(header[1], header[2]))
        elif line.strip() if not sections else not _take_line(sections[-1], line):
            raise ToolError(f"this line of the patch has no place there: {line[:200]!r}. {FORMAT}")
    for section in sections:
        for hunk in section.hunks:  # empty lines at the end only set it apart
            filled = max((at for at, line in enumerate(hunk.body, 1) if line), default=0)
            hunk.body = [line or " " for line in hunk.body[:filled]]
        is_whole = section.hunks or section.move or section.kind != "Update"
        if not is_whole or not all(hunk.body for hunk in section.hunks):
            raise ToolError(f"*** Update File: {section.path} has no hunk, or one without lines")
    if not sections:
        raise ToolError(f"the patch is empty. {FORMAT}")
    return sections


def _take_line(section: Section, line: str) -> bool:
    """Take a line into the section; False if it does not belong there."""
    hunk = section.hunks[-1] if section.hunks else None
    if section.kind == "Update" and (move := MOVE.fullmatch(line)) and not hunk:
        section.move = move[1]
    elif section.kind == "Update" and (anchor := ANCHOR.fullmatch(line)):
        if not hunk or hunk.body:
            section.hunks.append(hunk := Hunk())
        hunk.anchors += [anchor[1]] if anchor[1] else []
    elif section.kind == "Update" and hunk and line.rstrip() == "*** End of File":
        hunk.at_end = True
    elif line and line[0] not in MARKS[section.kind]:
        return False
    elif hunk:
        hunk.body.append(line)
    elif line:
        section.hunks.append(Hunk(body=[line]))
    return True


# ---- where a hunk goes ----------------------------------------------------------------------


def apply_hunks(file: Text, hunks: list[Hunk], name: str) -> str:
    """The file's text with the hunks in it. Raises ToolError for one without a certain place."""
    lines, places, done = Lines(file), list[Place](), 0
    for number, hunk in enumerate(hunks, 1):
        try:
            at = _locate(lines, hunk, done, name, number == len(hunks))
            places += lines.changes(at, hunk.body)
        except ToolError as error:
            raise ToolError(f"hunk {number} of {len(hunks)}: {error}") from None
        done = at + len(lines_without("+", hunk.body))
    return lines.spliced(places)


def _locate(lines: Lines, hunk: Hunk, start: int, name: str, is_last: bool) -> int:
    """The first line of the one place that fits, or of the first one after the anchors."""
    for anchor in hunk.anchors:
        start = _find(lines, Hunk(body=[f" {anchor}"]), start, name)[0] + 1
    size = len(lines_without("+", hunk.body))
    if not size and is_last and not hunk.anchors:
        return len(lines.lines)
    # Models repeat the anchor as the first line of the hunk: its own line is looked at too.
    found = _find(lines, hunk, start - 1 if hunk.anchors and size else start, name)
    if len(found) > 1 and (not hunk.anchors or found[0] < start):
        fits = ", ".join(f"{at + 1}" for at in found[:MAX_LISTED])
        way = "Give more lines that stay around the change, or an anchor (@@ LINE) above it."
        raise ToolError(f"it fits at lines {fits}. {way}")
    return found[0]


def _find(lines: Lines, hunk: Hunk, start: int, name: str) -> list[int]:
    """Where the old lines are, from `start`, in the strictest view that finds them."""
    old, new = lines_without("+", hunk.body), lines_without("-", hunk.body)
    first = max(start, len(lines.lines) - len(old)) if hunk.at_end else start
    if found := next(filter(None, (lines.fits(old, view, first) for view in VIEWS)), []):
        return found
    if found := next(filter(None, (lines.fits(old, view) for view in VIEWS)), []):
        where = "at the end of the file" if hunk.at_end else f"behind line {start}"
        way = "Put hunks in the order of the file."
        raise ToolError(f"it is at line {found[0] + 1}, but has to be {where}. {way}")
    new = new if any(line[0] == "+" for line in hunk.body) else []
    raise ToolError(advice(lines.lines, old, new, name, ("its old text", "its new text")))


# ---- what will be done ----------------------------------------------------------------------


@dataclass
class Change:
    """What a section does: `data` takes the place of `old`, and what is `gone` goes."""

    title: str
    diff: str
    place: Path
    data: bytes | None = None
    old: bytes | None = None
    gone: Path | None = None


@contextlib.contextmanager
def _about(section: Section) -> Iterator[None]:
    """Name the section in an error."""
    try:
        yield
    except (ToolError, OSError, UnicodeError) as error:
        way = "No file was changed. Send the whole patch again, corrected."
        raise ToolError(f"{section.kind} File {section.path}: {error}\n{way}") from None


def _plan(ctx: ToolContext, section: Section, place: Path, known: dict[Path, Any]) -> Change:
    """Plan a section. Raises ToolError, OSError, UnicodeError."""
    name, state = shown(ctx, place), state_of(place)
    to = to_write(ctx, section.move, follow=False) if section.move else place
    if known.keys() & {place, to}:
        raise ToolError("it is in the patch twice. Put all that changes in it into one section.")
    if to != place and state_of(to):
        raise ToolError(f"{shown(ctx, to)} exists already. Take another name.")
    known |= {place: state, to: state if to == place else None}
    if section.kind == "Delete":
        if not place.is_symlink():
            with opened(place):
                refuse_changed(ctx, place, ctx.seen.get(place, state))
        return Change(f"D {name}", f"D {name}", place, gone=place)
    file = load(ctx, place) if state or section.kind == "Update" else Text("")
    if section.kind == "Add":
        text = "".join(line[1:] + file.newline for hunk in section.hunks for line in hunk.body)
    else:
        text = apply_hunks(file, section.hunks, name)
    data, changed = file.encoded(text), diff(file.text, text, name)
    if to != place:
        new = shown(ctx, to)
        whole = f"rename from {name}\nrename to {new}\n{changed}".rstrip("\n")
        return Change(f"R {name} -> {new}", whole, to, data, gone=place)
    if state and text == file.text:
        raise ToolError("its old and new lines are the same: nothing to do")
    title = f"{'M' if state else 'A'} {name}"
    return Change(title, changed or title, place, data, file.encoded(file.text) if state else None)


# ---- doing it -------------------------------------------------------------------------------


def _write_all(ctx: ToolContext, changes: list[Change]) -> list[str]:
    """Do all changes, or take back what was done. Returns a note for each, mostly empty."""
    undo, aside = list[Callable[[], object]](), list[Path]()
    try:
        notes = [_write(ctx, change, undo, aside) for change in changes]
    except BaseException as error:
        problems = list(filter(None, map(_problem_of, reversed(undo))))
        if not isinstance(error, OSError | ToolError):
            raise
        end = "All files are as they were before."
        end = f"Not all could be put back: {'; '.join(problems)}" if problems else end
        raise ToolError(f"{error}\nThe patch was not applied. {end}") from None
    for place in aside:
        _problem_of(partial(remove, place))
    return notes


def _write(
    ctx: ToolContext, change: Change, undo: list[Callable[[], object]], aside: list[Path]
) -> str:
    """Do one change, and note how it is undone: a file that goes first only loses its name."""
    note, place, old, gone = "", change.place, change.old, change.gone
    if change.data is not None:
        made = [folder for folder in place.parents if not folder.exists()]
        undo += [partial(remove, folder, os.rmdir) for folder in reversed(made)]
        note = save(ctx, place, change.data, os.lstat(gone) if gone else None)
        undo.append(partial(remove, place) if old is None else partial(save, ctx, place, old))
    if gone:
        hidden = gone.with_name(temporary_name())
        _rename(gone, hidden.name)
        undo.append(partial(_rename, hidden, gone.name))
        aside.append(hidden)
    return note


def _rename(place: Path, name: str) -> None:
    with folder_of(place) as folder:
        os.rename(place.name, name, src_dir_fd=folder, dst_dir_fd=folder)


def _problem_of(step: Callable[[], object]) -> str:
    """Take a step back and return what went wrong. One that was not made needs none."""
    try:
        step()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, ToolError) as error:
        return str(error)
    return ""
