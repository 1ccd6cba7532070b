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

from coder.tools import slips, workspace
from coder.tools.edit import MAX_LISTED, Place, Text, advice, diff, load
from coder.tools.indentation import lines_without
from coder.toolset import ToolContext, tool
from coder.types import DeniedError, ToolError, ToolResult

HEADER = re.compile(r"^\*\*\* (Add|Update|Delete) File: *(\S.*?)[ \t]*$", re.M)
MOVE = re.compile(r"\*\*\* Move to: *(\S.*?)\s*")
ANCHOR = re.compile(r"@@(?: ?-[\d,]+ \+[\d,]+ @@)? ?(.*?)\s*")  # git's line numbers: never right
FORMAT = (
    "A section begins with *** Add File:, *** Update File: or *** Delete File: and a path. In a new "
    "file each line begins with +, in a hunk with a space (stays), - (goes) or + (new)."
)


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
    changes, known = list[Change](), dict[Path, Any]()  # the state of each place it touches
    for kind, path, body in sections_of(patch):
        try:
            move, hunks = hunks_of(kind, body)
            place = workspace.to_write(ctx, path, follow=kind == "Update" and not move)
            yield from workspace.ask_to_show(ctx, place)
            to = workspace.to_write(ctx, move, follow=False) if move else place
            changes.append(_plan(ctx, kind, place, to, hunks, known))
        except DeniedError:
            raise
        except (ToolError, OSError, UnicodeError) as error:
            way = "No file was changed. Send the whole patch again, corrected."
            raise ToolError(f"{kind} File {path}: {error}\n{way}") from None
    whole = "\n".join(change.diff for change in changes)
    yield from ctx.ask("edit", [workspace.shown(ctx, place) for place in known], whole)
    for place, state in known.items():  # they may have changed while permission was asked
        workspace.refuse_changed(ctx, place, state)
    ctx.abort.check()
    _write_all(ctx, changes)
    summary = "\n".join(f"{change.title}{change.note}" for change in changes)
    details = {"diff": whole, "paths": [str(place) for place in known]}
    return ToolResult(f"{summary}\n{whole}", details=details)


# ---- the format -----------------------------------------------------------------------------


@dataclass
class Hunk:
    """`body` holds lines with their mark: space, - or +."""

    anchors: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    at_end: bool = False


def sections_of(patch: str) -> Iterator[tuple[str, str, str]]:
    """(Add, Update or Delete; the path; the lines below) of each section. Raises ToolError where there is none."""
    text = patch.strip().replace("\r\n", "\n")
    found = re.fullmatch(r"\*\*\* Begin Patch *\n(.*?)\n?\*\*\* End Patch", text, re.S)
    if not found:
        wanted = "has to be *** Begin Patch, the last *** End Patch"
        raise ToolError(f"the first line of the patch {wanted}. Send it whole.")
    before, *parts = HEADER.split(found[1])
    if before.strip() or not parts:
        raise ToolError(f"this is no section of a patch: {before.strip()[:200]!r}. {FORMAT}")
    return zip(parts[::3], parts[1::3], parts[2::3])


def hunks_of(kind: str, text: str) -> tuple[str, list[Hunk]]:
    """(where the file is moved to, its hunks); the lines of a new file are one. Raises ToolError with a wrong line."""
    first, *lines = text.strip("\n").split("\n")
    move = MOVE.fullmatch(first) if kind == "Update" else None
    hunks, marks = list[Hunk](), {"Add": ("+", ""), "Delete": (), "Update": (" ", "-", "+", "")}
    for line in lines if move else [first, *lines]:
        anchor = ANCHOR.fullmatch(line) if kind == "Update" else None
        if anchor and (not hunks or hunks[-1].body):
            hunks.append(Hunk())
        if anchor:
            hunks[-1].anchors += [anchor[1]] if anchor[1] else []
        elif hunks and line.rstrip() == "*** End of File":
            hunks[-1].at_end = True
        elif line and not hunks and line[0] in marks[kind]:
            hunks.append(Hunk(body=[line]))
        elif hunks and line[:1] in marks[kind]:
            hunks[-1].body.append(line)
        elif line:
            raise ToolError(f"this line of the patch has no place there: {line[:200]!r}. {FORMAT}")
    for hunk in hunks:  # empty lines at the end only set it apart
        filled = max((at for at, line in enumerate(hunk.body, 1) if line), default=0)
        hunk.body = [line or " " for line in hunk.body[:filled]]
    is_whole = all(hunk.body for hunk in hunks) and (hunks or move)
    if kind == "Update" and not is_whole:
        raise ToolError("it has no hunk, or one without lines")
    return move[1] if move else "", hunks


# ---- where a hunk goes ----------------------------------------------------------------------


def apply_hunks(file: Text, hunks: list[Hunk], name: str) -> str:
    """The file's text with the hunks in it. Raises ToolError for one without a certain place."""
    places, done = list[Place](), 0
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
    for anchor in hunk.anchors:
        start = _find(file, [anchor], [], start, name)[0] + 1
    old, new = lines_without("+", hunk.body), lines_without("-", hunk.body)
    if not old and is_last and not hunk.anchors:
        return len(file.lines)
    # Models repeat the anchor as the first line of the hunk: its own line is looked at too.
    first = start - 1 if hunk.anchors and old else start
    first = max(first, len(file.lines) - len(old)) if hunk.at_end else first
    has_new = any(line[0] == "+" for line in hunk.body)
    found = _find(file, old, new if has_new else [], first, name)
    if len(found) > 1 and (not hunk.anchors or found[0] < start):
        fits = ", ".join(f"{at + 1}" for at in found[:MAX_LISTED])
        way = "Give more lines that stay around the change, or an anchor (@@ LINE) above it."
        raise ToolError(f"it fits at lines {fits}. {way}")
    return found[0]


def _find(file: Text, old: list[str], new: list[str], start: int, name: str) -> list[int]:
    """Where the old lines are, from `start`. Raises ToolError with advice where they are not."""
    if found := file.find(old, start):
        return found
    where = f"{name} behind line {start}, where it has to be" if start else name
    raise ToolError(advice(file.lines, old, new, where))


@dataclass
class Change:
    """What a section does: `data` takes the place of `old`, and what is `gone` goes."""

    title: str
    diff: str
    place: Path
    data: bytes | None = None
    old: bytes | None = None
    gone: Path | None = None
    note: str = ""


def _plan(
    ctx: ToolContext, kind: str, place: Path, to: Path, hunks: list[Hunk], known: dict[Path, Any]
) -> Change:
    """Plan a section. Raises ToolError, OSError, UnicodeError."""
    name, state = workspace.shown(ctx, place), workspace.state_of(place)
    if known.keys() & {place, to}:
        raise ToolError("it is in the patch twice. Put all that changes in it into one section.")
    if to != place and workspace.state_of(to):
        raise ToolError(f"{workspace.shown(ctx, to)} exists already. Take another name.")
    known |= {place: state, to: state if to == place else None}
    if kind == "Delete":
        if not place.is_symlink():
            with workspace.opened(place):
                workspace.refuse_changed(ctx, place, ctx.seen.get(place, state))
        return Change(f"D {name}", f"D {name}", place, gone=place)
    file = load(ctx, place) if state or kind == "Update" else Text("")
    if kind == "Update":
        text = apply_hunks(file, hunks, name)
    else:
        text = "".join(line[1:] + file.newline for hunk in hunks for line in hunk.body)
    data, changed = file.encoded(text), diff(file.text, text, name)
    if to != place:
        new = workspace.shown(ctx, to)
        whole = f"rename from {name}\nrename to {new}\n{changed}".rstrip("\n")
        return Change(f"R {name} -> {new}", whole, to, data, gone=place)
    if state and text == file.text:
        raise ToolError("its old and new lines are the same: nothing to do")
    title = f"{'M' if state else 'A'} {name}"
    return Change(title, changed or title, place, data, file.encoded(file.text) if state else None)


def _write_all(ctx: ToolContext, changes: list[Change]) -> None:
    """Do all changes, or take back what was done. A file that goes first only loses its name."""
    aside, problems = list[Path](), list[str]()
    try:
        with contextlib.ExitStack() as undo:
            later: Any = partial(undo.callback, _attempt, problems)
            for change in changes:
                place, gone = change.place, change.gone
                if change.data is not None:
                    for folder in reversed([each for each in place.parents if not each.exists()]):
                        later(workspace.remove, folder, os.rmdir)
                    like = os.lstat(gone) if gone else None
                    change.note = workspace.save(ctx, place, change.data, like)
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
