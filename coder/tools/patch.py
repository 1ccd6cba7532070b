"""apply_patch: changes to several files in one call, in the format that GPT-5-class models are trained on.

Promises: all or nothing; nothing outside the workspace; a hunk goes only where one place fits, or to the first place
after its anchor; what it does not name stays byte for byte (line endings, mark, encoding, mode, links).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from coder.tools.folder import remove, remove_folder, rename, temporary_name
from coder.tools.matching import VIEWS, Lines, Place, advice, without
from coder.tools.workspace import (
    Text,
    ask_to_show,
    decoded,
    diff,
    inside,
    load,
    opened,
    refuse_changed,
    resolve,
    save,
    shown,
    stamp,
    to_write,
)
from coder.toolset import ToolContext, tool
from coder.types import DeniedError, ToolError, ToolResult

HEADER = re.compile(r"\*\*\* (Add|Update|Delete) File: *(\S.*?)\s*")
INDENTED = re.compile(r"^[ \t]+(?=\*\*\* (?:(?:Add|Update|Delete) File|Move to):)", re.MULTILINE)
MOVE = re.compile(r"\*\*\* Move to: *(\S.*?)\s*")
# Git's line numbers may be there: never right
ANCHOR = re.compile(r"@@(?: ?-\d+(?:,\d+)? \+\d+(?:,\d+)? @@)? ?(.*?)\s*")
# What models put around: a fence, a heredoc
BEFORE = re.compile(r"(```\w*|(apply_patch\s*)?<<-?\s*['\"]?\w+['\"]?)?")
AFTER = re.compile(r"(```|\w+)?")
MARKS = {"Add": "+", "Delete": "", "Update": " -+"}  # what a line may begin with


def files_named(arguments: dict[str, Any]) -> str:
    """For people: the files that a patch is about."""
    lines = str(arguments.get("patch", "")).splitlines()
    return ", ".join(found[2] for line in lines if (found := HEADER.fullmatch(line)))


@tool(title=files_named)
def apply_patch(ctx: ToolContext, patch: str) -> Generator[Any, None, ToolResult]:
    """Change, add, delete or rename files. All of the patch is applied, or nothing.

    Its first line is `*** Begin Patch`, its last `*** End Patch`; between them a section for each file, headed by
    `*** Add File: PATH` (then the content, + before each line), `*** Delete File: PATH` (nothing follows) or
    `*** Update File: PATH` (to rename, `*** Move to: PATH` on the next line; then hunks, in file order).
    A hunk begins with a line `@@`, or `@@ LINE` to search after that line of the file, such as `@@ class A`; several may
    follow one another. Then come whole lines of the file without line numbers: a space before each line that stays, -
    before each that goes, + before each new one. Give 3 lines that stay before and after a change, more if that
    is not unique. A line `*** End of File` after a hunk ties it to the end of the file.

    patch: the whole patch; paths are relative to the workspace
    """
    try:
        changes, claimed = yield from _plan(ctx, patch)
    except (
        ToolError
    ) as error:  # a blank before a header makes it a line that stays, which the file does not have
        bare = INDENTED.sub("", patch)
        if isinstance(error, DeniedError) or bare == patch:
            raise
        changes, claimed = yield from _plan(ctx, bare)
    whole = "\n".join(change.diff for change in changes)
    yield from ctx.ask("edit", [name for change in changes for name in change.names], whole)
    for place, state in claimed.items():  # the person may have taken a while to answer
        if state != (_state(place) if os.path.lexists(place) else None):
            raise ToolError(
                f"{shown(ctx, place)} changed on disk meanwhile. No file was changed. Read it again first."
            )
    ctx.abort.check()
    notes = _written(ctx, changes)
    summary = "\n".join(
        f"{change.letter} {' -> '.join(change.names)}{note}" for change, note in zip(changes, notes)
    )
    paths = [str(place) for change in changes for place in (change.place, change.to) if place]
    return ToolResult(f"{summary}\n{whole}", details={"diff": whole, "paths": paths})


# ---- the format ------------------------------------------------------------------------------------------


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
    for line in _inner(patch):
        if header := HEADER.fullmatch(line):
            sections.append(Section(header[1], header[2]))
        elif line if not sections else not _taken(sections[-1], line):
            raise ToolError(
                f"this line of the patch has no place there: {line[:200]!r}. A section begins with *** Add File:, "
                "*** Update File: or *** Delete File: and a path. In a new file each line begins with +, in a hunk "
                "with a space (stays), - (goes) or + (new); nothing follows Delete File."
            )
    for section in sections:
        if section.kind == "Update" and not (
            all(hunk.body for hunk in section.hunks) and (section.hunks or section.move)
        ):
            raise ToolError(
                f"*** Update File: {section.path} has no hunk, or one without lines. Give the lines to change."
            )
    if not sections:
        raise ToolError(
            "the patch is empty. Put a section for each file between *** Begin Patch and *** End Patch."
        )
    return sections


def _inner(patch: str) -> list[str]:
    """The lines between the first and the last, freed of the wrapping that models put around."""
    lines = patch.replace("\r\n", "\n").split("\n")
    while lines and BEFORE.fullmatch(lines[0].strip()):
        lines.pop(0)
    while lines and AFTER.fullmatch(lines[-1].strip()):
        lines.pop()
    if [line.strip() for line in lines[:1] + lines[-1:]] != ["*** Begin Patch", "*** End Patch"]:
        raise ToolError(
            "the first line of the patch has to be *** Begin Patch, the last *** End Patch. Send it whole."
        )
    return lines[1:-1]


def _taken(section: Section, line: str) -> bool:
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


# ---- where a hunk goes -----------------------------------------------------------------------------------


def patched(file: Text, hunks: list[Hunk], name: str) -> str:
    """The file's text with the hunks in it. Raises ToolError naming the hunk that has no certain place."""
    lines, places, done = Lines(file), list[Place](), 0
    for number, hunk in enumerate(hunks, 1):
        try:
            at, body = _located(lines, hunk, done, name, last=number == len(hunks))
            places += lines.changes(at, body)
        except ToolError as error:
            raise ToolError(f"hunk {number} of {len(hunks)}: {error}") from None
        done = at + len(without("+", body))
    return lines.spliced(places)


def _located(lines: Lines, hunk: Hunk, start: int, name: str, last: bool) -> tuple[int, list[str]]:
    """(index of the first line, the marked lines as they fit there), after `start` and the anchors."""
    for anchor in hunk.anchors:
        found = _fits(lines, [anchor], start) or _lost(
            lines, Hunk(body=[f" {anchor}"]), start, name, "its anchor"
        )
        start = found[0] + 1
    # Only new lines: they go to the end
    if last and not hunk.anchors and not without("+", hunk.body):
        return len(lines.lines), hunk.body
    kept = max((number for number, line in enumerate(hunk.body, 1) if line != " "), default=0)
    for body in (hunk.body, hunk.body[:kept]):  # empty lines at the end may only set it apart
        old = without("+", body)
        # Models repeat the anchor as the first line of the hunk: its own line is looked at too.
        found = _fits(lines, old, start - 1 if hunk.anchors and old else start, hunk.at_end)
        if len(found) > 1 and (not hunk.anchors or found[0] < start):
            raise ToolError(
                f"it fits at lines {', '.join(str(at + 1) for at in found[:20])}. Give more lines that stay around "
                "the change, or above it an anchor (@@ LINE) that is not part of the hunk."
            )
        if found:
            return found[0], body
    return _lost(lines, hunk, start, name, "its old text")


def _fits(lines: Lines, wanted: list[str], start: int, at_end: bool = False) -> list[int]:
    """Where the wanted lines are, from `start`, in the strictest view in which they are anywhere."""
    first = max(start, len(lines.lines) - len(wanted)) if at_end else start
    return next((found for view in VIEWS if (found := lines.fits(wanted, view, first))), [])


def _lost(lines: Lines, hunk: Hunk, start: int, name: str, what: str) -> NoReturn:
    """Say what a model needs to mend a hunk that is nowhere."""
    old = without("+", hunk.body)
    if found := _fits(lines, old, 0):
        there = (
            "at the end of the file"
            if hunk.at_end
            else f"after line {start}, where the anchor or hunk before it ends"
        )
        raise ToolError(
            f"{what} is at line {found[0] + 1}, but has to be {there}. Put hunks in the order of the file."
        )
    raise ToolError(advice(lines.lines, old, without("-", hunk.body), name, (what, "its new text")))


# ---- what will be done, and doing it ---------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """One file's part, wholly computed. `data` goes to `to`, or to `place`; a `place` that gets none goes."""

    letter: str
    names: list[str]
    diff: str
    place: Path
    to: Path | None = None
    data: bytes | None = None
    before: bytes | None = None
    was: str = ""  # the text that `diff` begins with


def _plan(
    ctx: ToolContext, patch: str
) -> Generator[Any, None, tuple[list[Change], dict[Path, object]]]:
    """What the patch does to each file, and the state of each place that it touches."""
    sections, claimed = parse(patch), dict[Path, object]()
    yield from ask_to_show(ctx, *_shown_of(ctx, sections))
    changes: dict[Path, Change] = {}
    for section in sections:
        try:
            change = DO[section.kind](ctx, section, changes, claimed)
        except (ToolError, OSError, UnicodeError) as error:
            raise ToolError(
                f"{section.kind} File {section.path}: {error}\n"
                "No file was changed. Send the whole patch again, corrected."
            ) from None
        changes[change.place] = change
    return list(changes.values()), claimed


def _shown_of(ctx: ToolContext, sections: list[Section]) -> list[Path]:
    """The files of which the patch shows lines; what is wrong with a path is said later."""
    places = list[Path]()
    for section in sections:
        with contextlib.suppress(ToolError):
            place = (to_write if section.kind == "Update" else _entry)(ctx, section.path)
            places += [place] if section.kind != "Add" or os.path.lexists(place) else []
    return places


def _deleted(
    ctx: ToolContext, section: Section, changes: dict[Path, Change], claimed: dict[Path, object]
) -> Change:
    place, text = _entry(ctx, section.path), ""
    name = _claim(ctx, place, claimed)
    if not place.is_symlink():
        refuse_changed(ctx, place)
        with contextlib.suppress(ToolError):  # a binary file has no text to show, but may go
            text = load(ctx, place).text
    return Change("D", [name], diff(text, "", name) or f"D {name}", place)


def _added(
    ctx: ToolContext, section: Section, changes: dict[Path, Change], claimed: dict[Path, object]
) -> Change:
    """A new file; one that is there, or that the patch deletes, is written anew."""
    place = _entry(ctx, section.path)
    text = "".join(f"{line[1:]}\n" for hunk in section.hunks for line in hunk.body)
    if place in changes and changes[place].letter == "D":
        name = changes.pop(place).names[0]
    elif place not in claimed and os.path.isfile(place) and not place.is_symlink():
        name = _claim(ctx, place, claimed)
        refuse_changed(ctx, place)
    else:
        name = _claim(ctx, place, claimed, new=True)
        changed = diff("", text, name) or f"A {name}"
        return Change("A", [name], changed, place, data=text.encode())
    file = load(ctx, place)
    text = text.replace("\n", file.newline)
    return _modified("M", name, place, file.encoded(file.text), file, file.text, text)


def _modified(
    letter: str, name: str, place: Path, before: bytes | None, file: Text, was: str, text: str
) -> Change:
    changed = diff(was, text, name)
    return Change(letter, [name], changed, place, None, file.encoded(text), before, was)


def _updated(
    ctx: ToolContext, section: Section, changes: dict[Path, Change], claimed: dict[Path, object]
) -> Change:
    place, entry = to_write(ctx, section.path), _entry(ctx, section.path)
    earlier = changes.get(place)
    if earlier and earlier.letter in ("M" if section.move else "AM"):  # the next section of a file
        name, before, was, letter = earlier.names[0], earlier.before, earlier.was, earlier.letter
        file = decoded(earlier.data or b"", name)
        del changes[place]
    else:
        name, letter = _claim(ctx, place, claimed), "M"
        refuse_changed(ctx, place)
        file = load(ctx, place)
        before, was = file.encoded(file.text), file.text
    if entry != place and entry not in claimed:
        _claim(ctx, entry, claimed)
    text = patched(file, section.hunks, name)
    if not section.move and text == file.text:
        raise ToolError("its old and new lines are the same: nothing to do")
    change = _modified(letter, name, place, before, file, was, text)
    if not section.move:
        return change
    if entry != place:
        raise ToolError(
            f"it is a link to {name}, and links are not moved. Name {name} itself, or use mv."
        )
    to = _entry(ctx, section.move)
    names = [name, _claim(ctx, to, claimed, new=True)]
    moved = f"rename from {name}\nrename to {names[1]}\n{change.diff}".rstrip("\n")
    return replace(change, letter="R", names=names, diff=moved, to=to, before=None)


DO = {"Add": _added, "Update": _updated, "Delete": _deleted}


def _entry(ctx: ToolContext, path: str) -> Path:
    """The place of a path itself: folders resolved, a link at its end not followed. Refuses one outside the workspace."""
    resolve(ctx, path)  # refuses what is no path
    given = ctx.cwd / os.path.expanduser(path)
    place = resolve(ctx, str(given.parent)) / given.name
    if not inside(ctx, place):
        raise ToolError(f"{path} is outside the workspace {ctx.cwd}: nothing is written there")
    return place


def _claim(ctx: ToolContext, place: Path, claimed: dict[Path, object], new: bool = False) -> str:
    """Note that this patch touches a place, and return its name. Raises ToolError if it cannot, or does so already."""
    name = shown(ctx, place)
    if place in claimed:
        raise ToolError(
            f"{name} is in the patch twice. Put all that changes in it into one section."
        )
    if new and os.path.lexists(place):
        raise ToolError(
            f"{name} exists already. Change it with *** Update File, or take another name."
        )
    claimed[place] = None if new else _state(place)
    return name


def _state(place: Path) -> object:
    """Equal states, equal content. Raises ToolError for what is missing and for what is neither file nor link."""
    if place.is_symlink():
        return os.readlink(place)
    with opened(place) as fd:
        return stamp(os.fstat(fd))


def _written(ctx: ToolContext, changes: list[Change]) -> list[str]:
    """Do all changes, or put back what was done. Returns a note for each."""
    seen, undo, aside = dict(ctx.seen), list[Callable[[], object]](), list[Path]()
    try:
        notes = [_done(ctx, change, undo, aside) for change in changes]
    except BaseException as error:
        lost = [problem for step in reversed(undo) if (problem := _undone(step))]
        known = {place: ctx.seen.get(place, stamp) for place, stamp in seen.items()}
        ctx.seen.clear()
        ctx.seen.update(known)
        if not isinstance(error, OSError | ToolError):
            raise
        end = (
            f"Not all could be put back: {'; '.join(lost)}"
            if lost
            else "All files are as they were before."
        )
        raise ToolError(f"{error}\nThe patch was not applied. {end}") from None
    for place in aside:
        with contextlib.suppress(OSError, ToolError):
            remove(place)
    return notes


def _done(
    ctx: ToolContext, change: Change, undo: list[Callable[[], object]], aside: list[Path]
) -> str:
    """Do one change. How to undo a step is noted before it, so that an interrupt in between loses nothing."""
    note, place, target = "", change.place, change.to or change.place
    if change.data is not None:
        undo += [
            partial(remove_folder, folder)
            for folder in reversed(target.parents)
            if not folder.exists()
        ]
        undo.append(partial(_put_back, ctx, target, change.before))
        note = save(ctx, target, change.data, like=place if change.to else None)
    # It only loses its name until all else is done: so it can come back whole
    if change.letter in "DR":
        hidden = place.with_name(temporary_name())
        undo.append(partial(rename, hidden, place.name))
        rename(place, hidden.name)
        aside.append(hidden)
        ctx.seen.pop(place, None)
    return note


def _put_back(ctx: ToolContext, place: Path, before: bytes | None) -> None:
    if before is None and os.path.lexists(place):
        remove(place)
    elif before is not None and place.read_bytes() != before:
        save(ctx, place, before)


def _undone(step: Callable[[], object]) -> str:
    """Undo a step; a step that was noted and not made needs nothing. Returns what went wrong, mostly empty."""
    try:
        step()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, ToolError) as error:
        return str(error)
    return ""
