"""edit: replace a piece of text in a file, or say what to do where it is not found.

Five rungs are tried in turn, each taken only where one place fits; only that span changes. No
looser rung follows: a wrong edit costs more than a failure that shows the right place.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from itertools import chain, islice
from typing import Any

from coder.tools.advice import advice
from coder.tools.matching import (
    Lines,
    Place,
    View,
    indentation,
    lines_of,
    loosest,
    marked_lines,
    numbered,
    opens,
    plain,
)
from coder.tools.workspace import (
    Text,
    ask_to_show,
    diff,
    load,
    refuse_changed,
    refuse_other,
    save,
    shown,
    to_write,
)
from coder.toolset import ToolContext, tool
from coder.types import ToolError, ToolResult

MAX_PLACES = 100_000  # in one call; each takes memory
MAX_DIFF = 4_000_000  # places times lines that are compared for a diff: about a second

# By whole lines or by characters, and in which view.
RUNGS: tuple[tuple[bool, View], ...] = (
    (False, str),
    (True, str.rstrip),
    (True, str.strip),
    (False, plain),
    (True, loosest),
)


@tool
def edit(
    ctx: ToolContext, path: str, old_string: str, new_string: str, replace_all: bool = False
) -> Generator[Any, None, ToolResult]:
    """Replace text in a file. Do not use sed or cat for this.

    path: file, absolute or in the workspace
    old_string: the text to replace, exactly as in the file without line numbers, and long enough
        to be unique
    new_string: the text to put there
    replace_all: replace every occurrence
    """
    target = to_write(ctx, path)
    name = shown(ctx, target)
    if not old_string:
        way = "To create a file use write; to insert, give the line beside the place."
        raise ToolError(f"old_string is empty. {way}")
    if old_string == new_string:
        raise ToolError("old_string and new_string are the same: nothing to do")
    yield from ask_to_show(ctx, target)
    file = load(ctx, target)
    refuse_changed(ctx, target)
    old, new = (text.replace("\r\n", "\n") for text in (old_string, new_string))
    lines = Lines(file)
    places = find_places(lines, old, new, replace_all, name)
    text = lines.spliced(chain.from_iterable(places))
    if text == file.text:
        raise ToolError(f"{name} would stay as it is: nothing to do")
    data = file.encoded(text)
    changes = _diff_of(file, lines, places, name)
    yield from ctx.ask("edit", name, changes)
    refuse_other(ctx, target, file)
    note = save(ctx, target, data)
    many = f" in {len(places)} places" if len(places) > 1 else ""
    text = f"Edited {name}{many}.{note}\n{changes}"
    return ToolResult(text, details={"diff": changes, "path": str(target)})


def _diff_of(file: Text, lines: Lines, places: list[list[Place]], name: str) -> str:
    """The diff; of the first places alone where there are many: it takes places times lines."""
    some = places[: max(1, MAX_DIFF // (len(lines.lines) + 1))]
    more = f"\n(the first {len(some)} of {len(places)} places)" if len(some) < len(places) else ""
    return diff(file.text, lines.spliced(chain.from_iterable(some)), name) + more


def find_places(file: Lines, old: str, new: str, every: bool, name: str) -> list[list[Place]]:
    """For each place that fits, in order, its changes.

    Raises ToolError with the way out where there is none, or more than one.
    """
    ended = old.endswith("\n") or not new
    wanted, given = lines_of(old), lines_of(new) if ended else new.split("\n")
    text = file.text if file.ended else file.text[:-1]
    for whole, view in RUNGS:
        if whole:
            starts = file.fits(wanted, view) if old.strip() else []
        else:
            starts = list(islice(_starts_of(view(text), view(old)), MAX_PLACES))
        if len(starts) == MAX_PLACES:
            way = "Give more text, or use a command."
            raise ToolError(f"old_string is in {name} {MAX_PLACES:,} times or more. {way}")
        if len(starts) > 1 and not every:
            lines = [at + 1 if whole else text.count("\n", 0, at) + 1 for at in starts[:20]]
            places = f"{len(starts)} times, at lines {', '.join(map(str, lines))}"
            way = "Give more of the text around the one you mean, or set replace_all."
            raise ToolError(f"old_string is in {name} {places}. {way}")
        if starts and whole:
            body = marked_lines(wanted, given)
            return [
                file.changes(at, body, twice=True) for at in _without_overlaps(starts, len(wanted))
            ]
        if starts:
            return [
                [_change_of_span(file, at, old, new)] for at in _without_overlaps(starts, len(old))
            ]
    raise ToolError(advice(file.lines, wanted, given, name, ("old_string", "new_string")))


def _starts_of(text: str, piece: str) -> Iterator[int]:
    """Also those that overlap: of these, too, only one may be meant."""
    at = text.find(piece)
    while at >= 0:
        yield at
        at = text.find(piece, at + 1)


def _without_overlaps(starts: list[int], size: int) -> list[int]:
    """Those that do not overlap one before."""
    apart = starts[:1]
    for start in starts[1:]:
        if start >= apart[-1] + size:
            apart.append(start)
    return apart


def _change_of_span(file: Lines, start: int, old: str, new: str) -> Place:
    """The change of a span that fits by characters.

    A line that is whole but for white space goes with that and its newline; no lines are joined.
    """
    text, end = file.text, start + len(old)
    if text[start:end] != old:
        new = file.respelled(text[start:end], old, new)
    first, last = text.rfind("\n", 0, start) + 1, text.find("\n", end)
    before = text[first:start]
    closed, alone = old.endswith("\n"), not before.strip()
    if not new and alone and closed:
        return Place(first, end, "")
    if not new and alone and old.strip() and old[0] != "\n" and not text[end:last].strip():
        return Place(first, last + 1, "")
    if closed and not new.endswith("\n") and new != old[:-1]:
        new += "\n"
    if before and alone and old.split("\n")[0].strip() and new.strip():
        line = before + old.split("\n")[0]
        if indentation(new) == indentation(line):
            start = first
        elif indentation(new) != indentation(old) or not _is_indentation_clear(line, old, new):
            number = text.count("\n", 0, start) + 1
            raise ToolError(
                "old_string begins behind the indentation of its line, so the indentation of "
                "new_string is not certain. Write whole lines in both. The line is:\n"
                + numbered([line], number)
            )
    return Place(start, end, new)


def _is_indentation_clear(line: str, old: str, new: str) -> bool:
    """Is the indentation of the second new line and on certain, if the old text lacks its own?"""
    first, *rest = [each for each in lines_of(new) if each.strip()]
    if not rest or (not indentation(old) and len(old.strip().split("\n")) > 1):
        return True
    deeper = indentation(old) or opens(first) or re.match(r"\s*[]})?:.+*/|&-]", rest[0])
    return not deeper and all(each.startswith(indentation(line)) for each in rest)
