"""apply_patch: changes to several files in one call, in the format that OpenAI's models know.

Promises: all or nothing; nothing outside the workspace; what the patch does not name stays byte for
byte (line endings, mark, encoding, mode, links).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from coder.tools.folder import remove, remove_folder, rename, temporary_name
from coder.tools.hunks import HEADER, Section, apply_hunks, parse
from coder.tools.workspace import (
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

INDENTED = re.compile(r"^[ \t]+(?=\*\*\* (?:(?:Add|Update|Delete) File|Move to):)", re.MULTILINE)


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
    try:
        plan = yield from _make_plan(ctx, patch)
    except ToolError as error:
        # A blank before a header makes it a line that stays, which the file does not have
        bare = INDENTED.sub("", patch)
        if isinstance(error, DeniedError) or bare == patch:
            raise
        plan = yield from _make_plan(ctx, bare)
    changes = list(plan.changes.values())
    whole = "\n".join(change.diff for change in changes)
    yield from ctx.ask("edit", [name for change in changes for name in change.names], whole)
    for place, state in plan.states.items():  # they may have changed while permission was asked
        if state != (_state_of(place) if os.path.lexists(place) else None):
            problem = "changed on disk meanwhile. No file was changed. Read it again first."
            raise ToolError(f"{shown(ctx, place)} {problem}")
    ctx.abort.check()
    notes = _write_all(ctx, changes)
    names = [f"{change.letter} {' -> '.join(change.names)}" for change in changes]
    summary = "\n".join(f"{name}{note}" for name, note in zip(names, notes))
    paths = [str(place) for change in changes for place in (change.source, change.place) if place]
    return ToolResult(f"{summary}\n{whole}", details={"diff": whole, "paths": paths})


# ---- what will be done ----------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """What the patch does to one place. Without `data` the file goes; `source` is moved there."""

    name: str
    place: Path
    was: str = ""  # the text before
    old: bytes | None = None  # the bytes before, where they are to be put back
    text: str = ""
    data: bytes | None = None
    source: Path | None = None
    source_name: str = ""

    @property
    def letter(self) -> str:
        if self.data is None:
            return "D"
        return "R" if self.source else "A" if self.old is None else "M"

    @property
    def names(self) -> list[str]:
        return [self.source_name, self.name] if self.source else [self.name]

    @property
    def diff(self) -> str:
        name = self.source_name or self.name
        changed = diff(self.was, self.text, name)
        if self.source:
            return f"rename from {name}\nrename to {self.name}\n{changed}".rstrip("\n")
        return changed or f"{self.letter} {name}"


class Plan:
    """The changes of a patch, computed before anything is written.

    `states` are those of all places that it touches, None for a place where nothing is.
    """

    def __init__(self, ctx: ToolContext) -> None:
        self.ctx = ctx
        self.changes: dict[Path, Change] = {}
        self.states: dict[Path, object] = {}

    def take(self, section: Section) -> None:
        """Plan a section. Raises ToolError, OSError, UnicodeError."""
        {"Add": self._add, "Update": self._update, "Delete": self._delete}[section.kind](section)

    def _delete(self, section: Section) -> None:
        place, text = _entry_at(self.ctx, section.path), ""
        name = self._claim_place(place)
        if not place.is_symlink():
            refuse_changed(self.ctx, place)
            with contextlib.suppress(ToolError):  # a binary file has no text to show, but may go
                text = load(self.ctx, place).text
        self.changes[place] = Change(name, place, text)

    def _add(self, section: Section) -> None:
        """A new file; one that is there, or that the patch deletes, is written anew."""
        place = _entry_at(self.ctx, section.path)
        text = "".join(f"{line[1:]}\n" for hunk in section.hunks for line in hunk.body)
        if place in self.changes and self.changes[place].data is None:
            change = self._load_change(place, self.changes.pop(place).name)
        elif place not in self.states and os.path.isfile(place) and not place.is_symlink():
            change = self._load_change(place, self._claim_place(place))
        else:
            name = self._claim_place(place, new=True)
            self.changes[place] = Change(name, place, text=text, data=text.encode())
            return
        file = decoded(change.old or b"", change.name)
        text = text.replace("\n", file.newline)
        self.changes[place] = replace(change, text=text, data=file.encoded(text))

    def _update(self, section: Section) -> None:
        place = to_write(self.ctx, section.path)
        change = self.changes.get(place)  # of an earlier section
        if not change or change.data is None or (section.move and change.old is None):
            change = self._load_change(place, self._claim_place(place))
        file = decoded((change.old if change.data is None else change.data) or b"", change.name)
        text = apply_hunks(file, section.hunks, change.name)
        if not section.move and text == file.text:
            raise ToolError("its old and new lines are the same: nothing to do")
        change = replace(change, text=text, data=file.encoded(text))
        if section.move:
            change = self._move_change(change, section)
        self.changes[change.place] = change

    def _move_change(self, change: Change, section: Section) -> Change:
        name, source = change.name, change.place
        if _entry_at(self.ctx, section.path) != source:
            way = f"Name {name} itself, or use mv."
            raise ToolError(f"it is a link to {name}, and links are not moved. {way}")
        to = _entry_at(self.ctx, section.move)
        new = self._claim_place(to, new=True)
        self.changes.pop(source, None)
        return replace(change, name=new, place=to, old=None, source=source, source_name=name)

    def _load_change(self, place: Path, name: str) -> Change:
        refuse_changed(self.ctx, place)
        file = load(self.ctx, place)
        return Change(name, place, file.text, file.encoded(file.text))

    def _claim_place(self, place: Path, new: bool = False) -> str:
        """Note the state of a place that the patch touches for the first time; returns its name."""
        name = shown(self.ctx, place)
        if place in self.states:
            way = "Put all that changes in it into one section."
            raise ToolError(f"{name} is in the patch twice. {way}")
        if new and os.path.lexists(place):
            way = "Change it with *** Update File, or take another name."
            raise ToolError(f"{name} exists already. {way}")
        self.states[place] = None if new else _state_of(place)
        return name


def _make_plan(ctx: ToolContext, patch: str) -> Generator[Any, None, Plan]:
    """What the patch does to each file."""
    sections, plan = parse(patch), Plan(ctx)
    yield from ask_to_show(ctx, *_places_to_show(ctx, sections))
    for section in sections:
        try:
            plan.take(section)
        except (ToolError, OSError, UnicodeError) as error:
            raise ToolError(
                f"{section.kind} File {section.path}: {error}\n"
                "No file was changed. Send the whole patch again, corrected."
            ) from None
    return plan


def _places_to_show(ctx: ToolContext, sections: list[Section]) -> list[Path]:
    """The files of which the patch shows lines; what is wrong with a path is reported later."""
    places = list[Path]()
    for section in sections:
        with contextlib.suppress(ToolError):
            place = (to_write if section.kind == "Update" else _entry_at)(ctx, section.path)
            places += [place] if section.kind != "Add" or os.path.lexists(place) else []
    return places


def _entry_at(ctx: ToolContext, path: str) -> Path:
    """The place of a path itself: folders resolved, a link at its end not followed.

    Raises ToolError for one outside the workspace.
    """
    resolve(ctx, path)  # raises for what is no path
    given = ctx.cwd / os.path.expanduser(path)
    place = resolve(ctx, str(given.parent)) / given.name
    if not inside(ctx, place):
        raise ToolError(f"{path} is outside the workspace {ctx.cwd}: nothing is written there")
    return place


def _state_of(place: Path) -> object:
    """What changes with a file or link. Raises ToolError for what is missing or neither."""
    if place.is_symlink():
        return os.readlink(place)
    with opened(place) as fd:
        return stamp(os.fstat(fd))


# ---- doing it -------------------------------------------------------------------------------


def _write_all(ctx: ToolContext, changes: list[Change]) -> list[str]:
    """Do all changes, or put back what was done. Returns a note for each."""
    seen, undo, aside = dict(ctx.seen), list[Callable[[], object]](), list[Path]()
    try:
        notes = [_write(ctx, change, undo, aside) for change in changes]
    except BaseException as error:
        problems = [problem for step in reversed(undo) if (problem := _undo_step(step))]
        known = {place: ctx.seen.get(place, before) for place, before in seen.items()}
        ctx.seen.clear()
        ctx.seen.update(known)
        if not isinstance(error, OSError | ToolError):
            raise
        end = "All files are as they were before."
        end = f"Not all could be put back: {'; '.join(problems)}" if problems else end
        raise ToolError(f"{error}\nThe patch was not applied. {end}") from None
    for place in aside:
        with contextlib.suppress(OSError, ToolError):
            remove(place)
    return notes


def _write(
    ctx: ToolContext, change: Change, undo: list[Callable[[], object]], aside: list[Path]
) -> str:
    """Do one change; each step is noted in `undo` before it, so that an interrupt loses nothing."""
    note, place, gone = "", change.place, change.source
    if change.data is not None:
        missing = [folder for folder in place.parents if not folder.exists()]
        undo += [partial(remove_folder, folder) for folder in reversed(missing)]
        undo.append(partial(_put_back, ctx, place, change.old))
        note = save(ctx, place, change.data, like=change.source)
    else:
        gone = place
    if gone:  # it only loses its name until all else is done: so it can come back whole
        hidden = gone.with_name(temporary_name())
        undo.append(partial(rename, hidden, gone.name))
        rename(gone, hidden.name)
        aside.append(hidden)
        ctx.seen.pop(gone, None)
    return note


def _put_back(ctx: ToolContext, place: Path, old: bytes | None) -> None:
    if old is None and os.path.lexists(place):
        remove(place)
    elif old is not None and place.read_bytes() != old:
        save(ctx, place, old)


def _undo_step(step: Callable[[], object]) -> str:
    """Undo a step and return what went wrong, mostly nothing. One that was not made needs none."""
    try:
        step()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, ToolError) as error:
        return str(error)
    return ""
