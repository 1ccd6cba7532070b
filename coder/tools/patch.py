"""apply_patch: changes to several files in one call, in the format that OpenAI's models know.

All of the patch is planned before anything is written, and a write that fails is taken back with those
before it: all or nothing. What the patch does not name stays byte for byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from coder.tools import paths, slips, workspace
from coder.tools.edit import MAX_LISTED, not_found
from coder.tools.indentation import lines_without
from coder.tools.text import Splice, Text, diff, load, load_known, shortened
from coder.toolset import ToolContext, tool
from coder.types import DeniedError, ToolError, ToolResult

HEADER = re.compile(r"^\*\*\* (Add|Update|Delete) File: *(\S.*?)[ \t]*$", re.M)
MOVE = re.compile(r"\*\*\* Move to: *(\S.*?)\s*")
# Models mostly guess git's line numbers
ANCHOR = re.compile(r"@@(?: ?-(?P<line>\d{1,9})[\d,]* \+[\d,]+ @@)? ?(?P<text>.*?)\s*")
FORMAT = (
    "A section begins with *** Add File:, *** Update File: or *** Delete File: and a path. In a new "
    "file each line begins with +, in a hunk with a space (stays), - (goes) or + (new)."
)
MARKS = "a line that stays begins with a space, one that goes with -, a new one with +."


def files_named(arguments: dict[str, Any]) -> str:
    """The title of a call: the files that a patch is about."""
    return ", ".join(found[2] for found in HEADER.finditer(str(arguments.get("patch", ""))))


@tool(
    title=files_named, permission="edit", default="ask", asks_itself=True, slips=slips.APPLY_PATCH
)
def apply_patch(ctx: ToolContext, patch: str) -> Generator[Any, None, ToolResult]:
    """Change, add, delete or rename files. All of the patch is applied, or nothing.

    Between the lines `*** Begin Patch` and `*** End Patch` is a section for each file, headed by
    `*** Add File: PATH` (then the content, + before each line), `*** Delete File: PATH` or
    `*** Update File: PATH` (to rename, `*** Move to: PATH` on the next line; then hunks, in file
    order). A hunk begins with `@@`, or `@@ LINE` to search after that line of the file. Then come
    whole lines without numbers: a space before each that stays, - before each that goes, + before
    each new one. Give 3 lines that stay before and after a change, more if that is not unique.
    `*** End of File` after a hunk ties it to the end of the file.

    patch: the whole patch; paths are relative to the workspace
    """
    changes = list[Change]()
    known = dict[Path, Any]()  # the state of each place that it touches
    for kind, path, text in sections_of(patch):
        try:
            change = yield from _plan(ctx, read_section(kind, path, text), known)
        except DeniedError:
            raise
        except (ToolError, OSError, UnicodeError) as error:
            way = "No file was changed. Send the whole patch again, corrected."
            raise ToolError(f"{kind} File {path}: {error}\n{way}") from None
        changes.append(change)
    whole = "\n".join(change.whole for change in changes)
    yield from ctx.ask("edit", [workspace.shown(ctx, place) for place in known], whole)
    for place, state in known.items():  # they may have changed while permission was asked
        workspace.refuse_changed(ctx, place, state)
    ctx.abort.check()
    _write_all(ctx, changes)
    details = {"diff": whole, "paths": [str(place) for place in known]}
    return ToolResult("\n".join(change.summary for change in changes), details=details)


# ---- the format -----------------------------------------------------------------------------


@dataclass
class Hunk:
    """`body` holds lines with their mark: space, - or +. `line`: the number that git's header has, or 0."""

    line: int = 0
    anchors: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    at_end: bool = False


@dataclass
class Section:
    """What a patch says of one file: Add, Update or Delete. The lines of a new file are one hunk."""

    kind: str
    path: str
    move: str = ""  # where the file is moved to
    hunks: list[Hunk] = field(default_factory=list)


def sections_of(patch: str) -> list[tuple[str, str, str]]:
    """(Add, Update or Delete; the path; the lines below) of each section. Raises ToolError if there is none."""
    text = patch.strip().replace("\r\n", "\n")
    found = re.fullmatch(r"\*\*\* Begin Patch *\n(.*?)\n?\*\*\* End Patch", text, re.S)
    if not found:
        wanted = "has to be *** Begin Patch, the last *** End Patch"
        raise ToolError(f"the first line of the patch {wanted}. Send it whole.")
    before, *parts = HEADER.split(found[1])
    if before.strip() or not parts:
        raise ToolError(f"this is no section of a patch: {before.strip()[:200]!r}. {FORMAT}")
    return list(zip(parts[::3], parts[1::3], parts[2::3]))


def read_section(kind: str, path: str, text: str) -> Section:
    """The hunks of a section. Raises ToolError for a line that has no place in it."""
    section = Section(kind, path)
    lines = text.strip("\n").split("\n")
    move = MOVE.fullmatch(lines[0])
    if move and kind == "Update":
        section.move = move[1]
        lines.pop(0)
    marks = {"Add": "+", "Delete": "", "Update": " -+"}[kind]
    for line in lines:
        _read_line(section, line, marks)
    for hunk in section.hunks:  # empty lines at the end only set it apart
        while hunk.body and not hunk.body[-1]:
            hunk.body.pop()
        hunk.body = [line or " " for line in hunk.body]
    is_whole = all(hunk.body for hunk in section.hunks) and (section.hunks or move)
    if kind == "Update" and not is_whole:
        raise ToolError("it has no hunk, or one without lines")
    return section


def _read_line(section: Section, line: str, marks: str) -> None:
    hunks = section.hunks
    anchor = ANCHOR.fullmatch(line) if section.kind == "Update" else None
    if anchor:
        if not hunks or hunks[-1].body:
            hunks.append(Hunk())
        hunks[-1].line = int(anchor["line"] or 0)
        if anchor["text"]:
            hunks[-1].anchors.append(anchor["text"])
    elif hunks and line.rstrip() == "*** End of File":
        hunks[-1].at_end = True
    elif hunks and not line:  # an empty line without its mark
        hunks[-1].body.append(line)
    elif line and line[0] in marks:
        if not hunks:
            hunks.append(Hunk())
        hunks[-1].body.append(line)
    elif line:
        raise ToolError(f"this line of the patch has no place there: {line[:200]!r}; {MARKS}")


# ---- where a hunk goes ----------------------------------------------------------------------


def apply_hunks(file: Text, hunks: list[Hunk], name: str) -> str:
    """The file's text with the hunks in it. Raises ToolError for one without a certain place."""
    places = list[Splice]()
    done = 0
    for number, hunk in enumerate(hunks, 1):
        try:
            at = _locate(file, hunk, done, name, number == len(hunks))
            places += file.changes(at, hunk.body)
        except ToolError as error:
            raise ToolError(f"hunk {number} of {len(hunks)}: {error}") from None
        done = at + len(lines_without("+", hunk.body))
    return file.spliced(places)


def _locate(file: Text, hunk: Hunk, start: int, name: str, is_last: bool) -> int:
    """The first line of the one place that fits, or of the first one after the anchors."""
    old = lines_without("+", hunk.body)
    if hunk.line:
        place = _place_by_number(file, hunk, old, start)
        if place is not None:
            return place
    for anchor in hunk.anchors:
        start = _find(file, [f" {anchor}"], start, name)[0] + 1
    if not old and is_last and not hunk.anchors:
        return len(file.lines)
    first = start
    if hunk.anchors and old:  # models repeat the anchor as the first line of the hunk
        first = start - 1
    if hunk.at_end:
        first = max(first, len(file.lines) - len(old))
    found = _find(file, hunk.body, first, name)
    is_anchored = hunk.anchors and not hunk.line and found[0] >= start
    if len(found) > 1 and not is_anchored:
        places = ", ".join(f"{at + 1}" for at in found[:MAX_LISTED])
        way = "Give more lines that stay around the change, or an anchor (@@ LINE) above it."
        raise ToolError(f"it fits at lines {places}. {way}")
    return found[0]


def _place_by_number(file: Text, hunk: Hunk, old: list[str], start: int) -> int | None:
    """The place of a hunk with git's header, if it is the only one, or the one that the header names.

    git names the function that a hunk is in, which may begin above the hunk before.
    """
    if not old and file.lines:
        raise ToolError("it has new lines only. Give 3 lines that stay before or after them.")
    fits = file.find(old, start)
    place = fits[0] if len(fits) == 1 else hunk.line - 1
    above = [file.find([anchor])[:1] for anchor in hunk.anchors]
    is_below = all(first and first[0] <= place for first in above)
    return place if place in fits and is_below else None


def _find(file: Text, body: list[str], start: int, name: str) -> list[int]:
    """Where the old ones of marked lines are, from `start`. Raises ToolError with advice if they are not there."""
    old = lines_without("+", body)
    found = file.find(old, start)
    if found:
        return found
    has_new = any(line[0] == "+" for line in body)
    new = lines_without("-", body) if has_new else []
    where = f"{name} after line {start}, where it has to be" if start else name
    raise not_found(file, old, new, where)


# ---- what is done to the files --------------------------------------------------------------


@dataclass
class Change:
    """What a section does: `data` takes the place of `old`, and what is `gone` goes."""

    title: str
    place: Path
    moved: str = ""  # git's words for a new name
    diff: str = ""  # "" if no line changes
    data: bytes | None = None
    old: bytes | None = None
    gone: Path | None = None
    had_changed: bool = False  # the file is not as the session had read it
    notes: str = ""

    @property
    def whole(self) -> str:
        """All that changes, for the user."""
        return "\n".join(filter(None, [self.moved, self.diff])) or self.title

    @property
    def summary(self) -> str:
        """What was done, for the model."""
        return f"{self.title}{self.notes}\n{shortened(self.diff)}".rstrip("\n")


def _plan(
    ctx: ToolContext, section: Section, known: dict[Path, Any]
) -> Generator[Any, None, Change]:
    """Plan a section. Raises ToolError, OSError, UnicodeError."""
    path = section.path
    if section.kind != "Add":
        path = paths.without_prefix(ctx, path)
    is_followed = section.kind == "Update" and not section.move
    place = to = workspace.to_write(ctx, path, follow=is_followed)
    yield from workspace.ask_to_show(ctx, place)
    if section.move:
        to = workspace.to_write(ctx, section.move, follow=False)
    state = workspace.state_of(place)
    if known.keys() & {place, to}:
        raise ToolError("it is in the patch twice. Put all that changes in it into one section.")
    if to != place and workspace.state_of(to):
        raise ToolError(f"{workspace.shown(ctx, to)} exists already. Take another name.")
    known[place] = state
    if to != place:
        known[to] = None
    with paths.naming_near(ctx, path):
        if section.kind == "Delete":
            return _plan_removal(ctx, place)
        if section.kind == "Add":
            return _plan_file(ctx, place, section, is_there=state is not None)
        return _plan_update(ctx, place, to, section)


def _plan_removal(ctx: ToolContext, place: Path) -> Change:
    name = workspace.shown(ctx, place)
    if not place.is_symlink():
        with workspace.opened(place, name) as file:
            digest = ctx.seen.get(place)
            if digest and digest != hashlib.file_digest(file, "sha256").digest():
                raise workspace.changed_error(name)
    return Change(f"D {name}", place, gone=place)


def _plan_file(ctx: ToolContext, place: Path, section: Section, is_there: bool) -> Change:
    """A new file, or one that the model has read and writes anew."""
    name = workspace.shown(ctx, place)
    file = load_known(ctx, place) if is_there else Text("")
    text = "".join(line[1:] + file.newline for hunk in section.hunks for line in hunk.body)
    if is_there and text == file.text:
        raise ToolError("its old and new lines are the same: nothing to do")
    return Change(
        title=f"{'M' if is_there else 'A'} {name}",
        place=place,
        diff=diff(file.text, text, name),
        data=file.encoded(text),
        old=file.encoded(file.text) if is_there else None,
    )


def _plan_update(ctx: ToolContext, place: Path, to: Path, section: Section) -> Change:
    name = workspace.shown(ctx, place)
    file = load(ctx, place)
    text = apply_hunks(file, section.hunks, name)
    changes = diff(file.text, text, name)
    data = file.encoded(text)
    if to != place:
        new = workspace.shown(ctx, to)
        return Change(
            title=f"R {name} -> {new}",
            place=to,
            moved=f"rename from {name}\nrename to {new}",
            diff=changes,
            data=data,
            gone=place,
            had_changed=file.has_changed,
        )
    if text == file.text:
        raise ToolError("its old and new lines are the same: nothing to do")
    return Change(
        title=f"M {name}",
        place=place,
        diff=changes,
        data=data,
        old=file.encoded(file.text),
        had_changed=file.has_changed,
    )


def _write_all(ctx: ToolContext, changes: list[Change]) -> None:
    """Do all changes, or take back what was done. A file that goes first only loses its name."""
    aside = list[Path]()
    problems = list[str]()
    seen = dict(ctx.seen)
    try:
        with contextlib.ExitStack() as undo:
            later: Any = partial(undo.callback, _attempt, problems)
            for change in changes:
                place = change.place
                gone = change.gone
                if change.data is not None:
                    for folder in reversed([each for each in place.parents if not each.exists()]):
                        later(workspace.remove, folder, os.rmdir)
                    like = os.lstat(gone) if gone else None
                    change.notes = workspace.save(
                        ctx, place, change.data, like, had_changed=change.had_changed
                    )
                    if change.old is None:
                        later(workspace.remove, place)
                    else:
                        later(workspace.save, ctx, place, change.old)
                if gone:
                    aside.append(gone.with_name(workspace.temporary_name()))
                    _rename(gone, aside[-1].name)
                    later(_rename, aside[-1], gone.name)
            undo.pop_all()
    except (OSError, ToolError) as error:
        ctx.seen.clear()
        ctx.seen.update(seen)
        end = "All files are as they were before."
        end = f"Not all could be put back: {'; '.join(problems)}" if problems else end
        raise ToolError(f"{error}\nThe patch was not applied. {end}") from None
    for place in aside:
        _attempt(problems, workspace.remove, place)


def _attempt(problems: list[str], step: Callable[..., object], *arguments: Any) -> None:
    """Take a step and note what goes wrong, but for what is not there."""
    try:
        step(*arguments)
    except (OSError, ToolError) as error:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            problems.append(str(error))


def _rename(place: Path, name: str) -> None:
    with workspace.folder_of(place) as folder:
        os.rename(place.name, name, src_dir_fd=folder, dst_dir_fd=folder)
