"""edit: replace a piece of text in a file, or say what to do if it is not found.

The text is looked for as it is, then line by line: without white space at the ends, in another
indentation, with plain quotes and dashes; if several places fit, nothing is changed. In a file that
has changed since it was read only the exact text counts. Lines are changed as in a patch
(patch.py): a space before a line that stays, - before one that goes, + before a new one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Generator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from coder.tools import paths, slips, workspace
from coder.tools.indentation import as_new_lines, indent_span
from coder.tools.text import Splice, Text, diff, lines_of, load, marked, shortened
from coder.toolset import ToolContext, tool
from coder.types import ToolError, ToolResult

MAX_LISTED = 20  # places that an error names
NUMBERED = r" *(?P<number>\d{1,9})[\t|→](?P<line>.*)"  # a line as `read` shows it


@tool(
    permission="edit",
    default="ask",
    asks_itself=True,
    slips=slips.EDIT,
)
def edit(
    ctx: ToolContext,
    path: str,
    old_string: str,
    new_string: str,
    replace_all: bool = False,
) -> Generator[Any, None, ToolResult]:
    """Replace text in a file.

    path: file
    old_string: the text to replace, exactly as in the file without line numbers, and long enough
        to be unique
    new_string: the text to put there
    replace_all: replace every occurrence
    """
    target = workspace.to_write(ctx, path)
    name = workspace.shown(ctx, target)
    state = workspace.state_of(target)
    if not old_string:
        if state:
            raise ToolError(
                f"old_string is empty, and {name} is there. "
                "To insert, give the line next to the place; to write the whole file use write."
            )
        return (yield from create_file(ctx, target, new_string))
    yield from workspace.ask_to_show(ctx, target)
    with paths.naming_near(ctx, path, way=". To create it use write."):
        file = load(ctx, target)
    old = old_string.replace("\r\n", "\n")
    new = new_string.replace("\r\n", "\n")
    count = file.searched(old).count(old) if replace_all else 0
    many = f" in {count} places" if count > 1 else ""
    text = _replaced(file, old, new, name, count)
    if text == file.text:
        raise ToolError(f"old_string and new_string are the same in {name}: nothing to do")
    changes, notes = yield from replace_text(ctx, target, state, file, text)
    lines = lines_of(changes)
    done = f"Edited {name}{many}{lines}.{notes}"
    # A model knows what it asked for. It is shown what was written otherwise, or changed by others
    is_as_asked = text == file.restored(file.searched(old).replace(old, new))
    if file.has_changed or not is_as_asked or not lines:
        done += f"\n{shortened(changes)}"
    return ToolResult(done, details={"diff": changes, "path": str(target)})


def _replaced(
    file: Text,
    old: str,
    new: str,
    name: str,
    count: int,
) -> str:
    """The text of the file after the change; `count`: how often to replace, 0 for the only
    place.
    """
    removes_one = count == 1 and not new  # which may take its line with it
    if count and not removes_one:
        return _replace_all(file, old, new)
    return file.spliced(_find_change(file, old, new, name))


def create_file(ctx: ToolContext, target: Path, content: str) -> Generator[Any, None, ToolResult]:
    """Ask for permission and write a file that was not there."""
    changes, notes = yield from replace_text(ctx, target, None, Text(""), content)
    done = f"Created {workspace.shown(ctx, target)} ({len(content.splitlines())} lines).{notes}"
    return ToolResult(done, details={"diff": changes, "path": str(target)})


def replace_text(
    ctx: ToolContext,
    target: Path,
    state: Any,
    old: Text,
    new: str,
) -> Generator[Any, None, tuple[str, str]]:
    """Ask for permission and write, unless the file is not in this `state` any more.

    Returns (the diff, notes for the model).
    """
    data = old.encoded(new)
    name = workspace.shown(ctx, target)
    changes = diff(old.text, new, name)
    yield from ctx.ask("edit", name, changes)
    workspace.refuse_changed(ctx, target, state)
    return changes, workspace.save(ctx, target, data, had_changed=old.has_changed)


def _replace_all(file: Text, old: str, new: str) -> str:
    """The file's text, replaced in all places. Raises ToolError if an indentation is uncertain."""
    text = file.searched(old)

    def new_at(match: re.Match[str]) -> str:
        return indent_span(text, match.start(), old, new).replace("\n", file.added)

    if "\n" not in new[:-1] and not new[:1].isspace():
        replaced = text.replace(old, new.replace("\n", file.added))
    else:
        replaced = re.sub(re.escape(old), new_at, text)
    return file.restored(replaced)


def _find_change(
    file: Text,
    old: str,
    new: str,
    name: str,
) -> list[Splice]:
    """What changes at the one place that fits. Raises ToolError if none fits, or several do."""
    # Of two that overlap, too, only one is meant
    overlapping = re.finditer(f"(?={re.escape(old)})", file.joined)
    starts = [match.start() for match in islice(overlapping, MAX_LISTED)]
    found = f"old_string is in {name}"
    way = "Give more of the text around the one you mean, or set replace_all."
    if starts:
        refuse_several([file.joined.count("\n", 0, start) for start in starts], found, way)
        new = indent_span(file.joined, starts[0], old, new)
        return [_change_of_span(file.joined, starts[0], old, new)]
    old_lines = old.removesuffix("\n").split("\n")
    new_lines = new.removesuffix("\n").split("\n") if new else []
    fits = file.find(old_lines) if old.strip() else []
    if not fits:
        old_lines, new_lines, fits = _without_proved_numbers(file, old_lines, new_lines)
    if not fits:
        raise not_found(file, old_lines, new_lines, name)
    refuse_several(fits, found, way)
    old_lines = as_new_lines(file.lines[fits[0] :], old_lines, new_lines)
    return file.changes(fits[0], _marked_lines(old_lines, new_lines))


def refuse_several(fits: Sequence[int], found: str, way: str) -> None:
    """Raises ToolError if what was `found` is at several lines; `way`: what to do then."""
    if len(fits) > 1:
        numbers = ", ".join(f"{at + 1}" for at in fits[:MAX_LISTED])
        raise ToolError(f"{found} at lines {numbers}. {way}")


def not_found(
    file: Text,
    old: Sequence[str],
    new: Sequence[str],
    name: str,
) -> ToolError:
    from coder.tools.advice import advice  # late: most edits fit

    return ToolError(advice(file, old, new, name))


def _change_of_span(
    text: str,
    start: int,
    old: str,
    new: str,
) -> Splice:
    """The change of a span. A line that would only keep white space goes, with its newline."""
    end = start + len(old)
    has_newline = old.endswith("\n")
    first = text.rfind("\n", 0, start) + 1
    is_whole_start = not text[first:start].strip()
    is_whole_end = has_newline or text[end : end + 1] == "\n"
    if not new and is_whole_start and is_whole_end and old.strip():
        if not has_newline:
            end += 1
        return first, end, ""
    if has_newline and not new.endswith("\n") and new != old[:-1]:
        new += "\n"  # no lines are joined
    return start, end, new


def _marked_lines(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """The marked lines that turn one text into the other; white space at an end is no change."""
    before = [line.rstrip() for line in old]
    after = [line.rstrip() for line in new]
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    body = list[str]()
    for tag, old_start, old_end, new_start, new_end in matcher.get_opcodes():
        if tag == "equal":
            body += marked(" ", old[old_start:old_end])
        else:
            body += marked("-", old[old_start:old_end])
            body += marked("+", new[new_start:new_end])
    return body


# ---- line numbers that models copy ----------------------------------------------------------


def _without_proved_numbers(
    file: Text, old: list[str], new: list[str]
) -> tuple[list[str], list[str], list[int]]:
    """(old lines, new lines, their only place) without the numbers that `read` shows.

    Only if the numbers are those of the place; the new lines begin with the same number, or have
    none. Else the place is [].
    """
    first, plain_old = _without_numbers(old)
    if any(re.fullmatch(NUMBERED, line) for line in new):
        new_first, plain_new = _without_numbers(new)
    else:
        new_first, plain_new = first, new
    if first > 0 and first == new_first and file.find(plain_old) == [first - 1]:
        return plain_old, plain_new, [first - 1]
    return old, new, []


def _without_numbers(lines: Sequence[str]) -> tuple[int, list[str]]:
    """(the first number, the lines without), if all lines are numbered in order; else (0, [])."""
    first = 0
    rest = list[str]()
    for line in lines:
        numbered = re.fullmatch(NUMBERED, line)
        if not numbered:
            return 0, []
        number = int(numbered["number"])
        if not rest:
            first = number
        if number != first + len(rest):
            return 0, []
        rest.append(numbered["line"])
    return first, rest
