"""apply_patch: changes to several files in one call, in the format that OpenAI's models know.

All of the patch is planned before anything is written, and a write that fails is taken back with
those before it: all or nothing. What the patch does not name stays byte for byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from coder.tools import paths, slips, workspace
from coder.tools.edit import not_found, refuse_several
from coder.tools.indentation import lines_without
from coder.tools.patch_format import HEADER, Hunk, Section, read_section, sections_of
from coder.tools.text import Splice, Text, diff, load, load_known, shortened
from coder.toolset import ToolContext, tool
from coder.types import DeniedError, ToolError, ToolResult

NOTHING_TO_DO = "its old and new lines are the same: nothing to do"


def files_named(arguments: dict[str, Any]) -> str:
    """The title of a call: the files that a patch is about."""
    headers = re.finditer(HEADER, str(arguments.get("patch", "")))
    return ", ".join(header[2] for header in headers)


@tool(
    title=files_named,
    permission="edit",
    default="ask",
    asks_itself=True,
    slips=slips.APPLY_PATCH,
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
    states = dict[Path, Any]()  # of all paths that the patch changes
    for kind, path, text in sections_of(patch):
        try:
            change = yield from _plan(ctx, read_section(kind, path, text), states)
        except DeniedError:
            raise
        except (ToolError, OSError, UnicodeError) as error:
            raise ToolError(
                f"{kind} File {path}: {error}\n"
                "No file was changed. Send the whole patch again, corrected."
            ) from None
        changes.append(change)
    whole = "\n".join(change.whole for change in changes)
    yield from ctx.ask("edit", [workspace.shown(ctx, target) for target in states], whole)
    # The files may have changed while permission was asked
    for target, state in states.items():
        workspace.refuse_changed(ctx, target, state)
    ctx.abort.check()
    _write_all(ctx, changes)
    details = {"diff": whole, "paths": [str(target) for target in states]}
    return ToolResult("\n".join(change.summary for change in changes), details=details)


# ---- the place of a hunk --------------------------------------------------------------------


def apply_hunks(file: Text, hunks: list[Hunk], name: str) -> str:
    """The file's text with the hunks in it. Raises ToolError for one without a certain place."""
    splices = list[Splice]()
    done = 0
    for number, hunk in enumerate(hunks, 1):
        is_last = number == len(hunks)
        try:
            at = _locate(
                file,
                hunk,
                start=done,
                name=name,
                is_last=is_last,
            )
            splices += file.changes(at, hunk.body)
        except ToolError as error:
            raise ToolError(f"hunk {number} of {len(hunks)}: {error}") from None
        done = at + len(lines_without("+", hunk.body))
    return file.spliced(splices)


def _locate(
    file: Text,
    hunk: Hunk,
    start: int,
    name: str,
    is_last: bool,
) -> int:
    """The first line of the one place that fits, or of the first one after the anchors."""
    old = lines_without("+", hunk.body)
    if hunk.line:
        at = _find_by_number(file, hunk, old, start)
        if at is not None:
            return at
    if is_last and not old and not hunk.anchors:
        return len(file.lines)
    for anchor in hunk.anchors:
        start = _find(file, [f" {anchor}"], start, name)[0] + 1
    fits = _find(file, hunk.body, _first_line(file, hunk, old, start), name)
    is_below_anchor = bool(hunk.anchors) and fits[0] >= start
    if hunk.line or not is_below_anchor:
        refuse_several(
            fits,
            found="it fits",
            way="Give more lines that stay around the change, or an anchor (@@ LINE) above it.",
        )
    return fits[0]


def _first_line(
    file: Text,
    hunk: Hunk,
    old: list[str],
    start: int,
) -> int:
    """The first line at which a hunk may be that comes after the line before `start`."""
    if hunk.anchors and old:  # models repeat the anchor as the first line of the hunk
        start -= 1
    if hunk.at_end:
        start = max(start, len(file.lines) - len(old))
    return start


def _find_by_number(
    file: Text,
    hunk: Hunk,
    old: list[str],
    start: int,
) -> int | None:
    """The place of a hunk with git's header: the only one, or else the one with that number.

    git names the function that a hunk is in, which may begin above the hunk before.
    """
    if not old and file.lines:
        raise ToolError("it has new lines only. Give 3 lines that stay before or after them.")
    fits = file.find(old, start)
    at = fits[0] if len(fits) == 1 else hunk.line - 1
    if at not in fits:
        return None
    for anchor in hunk.anchors:
        lines = file.find([anchor])
        if not lines or lines[0] > at:
            return None
    return at


def _find(
    file: Text,
    body: list[str],
    start: int,
    name: str,
) -> list[int]:
    """The lines at which the old ones of marked lines are, from `start`. Raises ToolError."""
    old = lines_without("+", body)
    fits = file.find(old, start)
    if fits:
        return fits
    has_new = any(line[0] == "+" for line in body)
    new = lines_without("-", body) if has_new else []
    if start:
        name = f"{name} after line {start}, where it has to be"
    raise not_found(file, old, new, name)


# ---- what is done to the files --------------------------------------------------------------


@dataclass(eq=False)
class Change:
    """What a section does: `data` replaces `old` at `target`, and the file `gone` goes."""

    title: str
    target: Path
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
        return f"{self.moved}\n{self.diff}".strip("\n") or self.title

    @property
    def summary(self) -> str:
        """What was done, for the model."""
        return f"{self.title}{self.notes}\n{shortened(self.diff)}".rstrip("\n")


def _plan(
    ctx: ToolContext, section: Section, states: dict[Path, Any]
) -> Generator[Any, None, Change]:
    """Plan a section, and note the states of its files. Raises ToolError, OSError, UnicodeError."""
    path = section.path
    if section.kind != "Add":
        path = paths.without_prefix(ctx, path)
    is_followed = section.kind == "Update" and not section.move
    target = workspace.to_write(ctx, path, follow=is_followed)
    yield from workspace.ask_to_show(ctx, target)
    new_target = target
    if section.move:
        new_target = workspace.to_write(ctx, section.move, follow=False)
    state = workspace.state_of(target)
    if target in states or new_target in states:
        raise ToolError("it is in the patch twice. Put all that changes in it into one section.")
    if new_target != target and workspace.state_of(new_target):
        raise ToolError(f"{workspace.shown(ctx, new_target)} exists already. Take another name.")
    states[target] = state
    states.setdefault(new_target, None)
    with paths.naming_near(ctx, path):
        if section.kind == "Delete":
            return _plan_removal(ctx, target)
        if section.kind == "Add":
            return _plan_file(ctx, target, section, is_there=state is not None)
        return _plan_update(ctx, target, new_target, section)


def _plan_removal(ctx: ToolContext, target: Path) -> Change:
    name = workspace.shown(ctx, target)
    if not target.is_symlink():
        with workspace.opened(target, name) as file:
            digest = ctx.seen.get(target)
            if digest and digest != hashlib.file_digest(file, "sha256").digest():
                raise workspace.changed_error(name)
    return Change(f"D {name}", target, gone=target)


def _plan_file(
    ctx: ToolContext,
    target: Path,
    section: Section,
    is_there: bool,
) -> Change:
    """A new file, or one that the model has read and writes anew."""
    name = workspace.shown(ctx, target)
    file = load_known(ctx, target) if is_there else Text("")
    text = "".join(line[1:] + file.newline for hunk in section.hunks for line in hunk.body)
    change = Change(
        title=f"A {name}",
        target=target,
        diff=diff(file.text, text, name),
        data=file.encoded(text),
    )
    if is_there:
        if text == file.text:
            raise ToolError(NOTHING_TO_DO)
        change.title = f"M {name}"
        change.old = file.encoded(file.text)
    return change


def _plan_update(
    ctx: ToolContext,
    target: Path,
    new_target: Path,
    section: Section,
) -> Change:
    name = workspace.shown(ctx, target)
    file = load(ctx, target)
    text = apply_hunks(file, section.hunks, name)
    change = Change(
        title=f"M {name}",
        target=new_target,
        diff=diff(file.text, text, name),
        data=file.encoded(text),
        had_changed=file.has_changed,
    )
    if new_target != target:
        new_name = workspace.shown(ctx, new_target)
        change.title = f"R {name} -> {new_name}"
        change.moved = f"rename from {name}\nrename to {new_name}"
        change.gone = target
    elif text == file.text:
        raise ToolError(NOTHING_TO_DO)
    else:
        change.old = file.encoded(file.text)
    return change


def _write_all(ctx: ToolContext, changes: list[Change]) -> None:
    """Do all changes, or take back what was done."""
    aside = list[Path]()
    problems = list[str]()
    seen = dict(ctx.seen)
    try:
        with contextlib.ExitStack() as undo:
            later: Any = partial(undo.callback, _attempt, problems)
            for change in changes:
                if change.data is not None:
                    _write(ctx, change, change.data, later)
                if change.gone:
                    aside.append(_put_aside(change.gone, later))
            undo.pop_all()
    except (OSError, ToolError) as error:
        ctx.seen.clear()
        ctx.seen.update(seen)
        end = "All files are as they were before."
        if problems:
            end = f"Not all could be put back: {'; '.join(problems)}"
        raise ToolError(f"{error}\nThe patch was not applied. {end}") from None
    for target in aside:
        _attempt(problems, workspace.remove, target)


def _write(
    ctx: ToolContext,
    change: Change,
    data: bytes,
    later: Any,
) -> None:
    """Write a file; `later` takes the steps that would take this back."""
    target = change.target
    missing = [folder for folder in target.parents if not folder.exists()]
    for folder in reversed(missing):
        later(workspace.remove, folder, os.rmdir)
    like = os.lstat(change.gone) if change.gone else None
    change.notes = workspace.save(ctx, target, data, like, had_changed=change.had_changed)
    if change.old is None:
        later(workspace.remove, target)
    else:
        later(workspace.save, ctx, target, change.old)


def _put_aside(target: Path, later: Any) -> Path:
    """Give a file that goes another name, until all changes are done. Returns its path."""
    aside = target.with_name(workspace.temporary_name())
    _rename(target, aside.name)
    later(_rename, aside, target.name)
    return aside


def _attempt(problems: list[str], step: Callable[..., object], *arguments: Any) -> None:
    """Take a step and note what goes wrong, except if something is not there."""
    try:
        step(*arguments)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ToolError) as error:
        problems.append(str(error))


def _rename(target: Path, name: str) -> None:
    with workspace.folder_of(target) as folder:
        os.rename(
            target.name,
            name,
            src_dir_fd=folder,
            dst_dir_fd=folder,
        )
