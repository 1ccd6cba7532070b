"""edit: replace a piece of text in a file, and say what to do when it is not found.

Five rungs, tried in turn, each taken only where exactly one place fits; only that span of the file changes. No looser
rung follows: a guess that edits the wrong place costs more than a failure that shows the right one.

What it leaves out: several edits in one call (apply_patch does that).
"""

from __future__ import annotations

import difflib
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from coder.tools import ToolContext, tool
from coder.tools.workspace import Text, ask_to_show, diff, load, refuse_changed, refuse_other, save, shown, to_write
from coder.types import ToolError, ToolResult

MAX_PLACES = 100_000  # in one call; each takes memory
MAX_DIFF = 4_000_000  # places times lines that are compared for a diff: about a second

# What models and people write for each other's plain characters; each pair is one character long, so offsets hold.
PUNCTUATION = str.maketrans("‘’‚‛“”„‟‐‑‒–—―−\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000",
                            "''''\"\"\"\"-------" + 13 * " ")


@dataclass(frozen=True)
class Place:
    """A span of the file's text and what belongs there."""

    start: int
    end: int
    new: str


@tool
def edit(ctx: ToolContext, path: str, old_string: str, new_string: str,
         replace_all: bool = False) -> Generator[Any, None, ToolResult]:
    """Replace text in a file. Do not use sed or cat for this.

    path: file, absolute or in the workspace
    old_string: the text to replace, exactly as in the file without line numbers, and long enough to be unique
    new_string: the text to put there
    replace_all: replace every occurrence
    """
    target = to_write(ctx, path)
    name = shown(ctx, target)
    if not old_string:
        raise ToolError("old_string is empty. To create a file use write; to insert, give the line beside the place.")
    if old_string == new_string:
        raise ToolError("old_string and new_string are the same: nothing to do")
    yield from ask_to_show(ctx, target)
    file = load(ctx, target)
    refuse_changed(ctx, target)
    places = find(file, old_string, new_string, replace_all, name)
    data = file.encoded(spliced(file.text, places))
    changes = _changes(file.text, places, name)
    yield from ctx.ask("edit", name, changes)
    refuse_other(ctx, target, file)
    note = save(ctx, target, data)
    many = f" in {len(places)} places" if len(places) > 1 else ""
    return ToolResult(f"Edited {name}{many}.{note}\n{changes}", details={"diff": changes, "path": str(target)})


def spliced(text: str, places: list[Place]) -> str:
    """`text` with its places filled."""
    parts, at = [], 0
    for place in places:
        parts += [text[at:place.start], place.new]
        at = place.end
    return "".join([*parts, text[at:]])


def _changes(text: str, places: list[Place], name: str) -> str:
    """The diff; of the first places only where there are too many, because the time grows with places times lines."""
    some = places[:max(1, MAX_DIFF // (text.count("\n") + 1))]
    more = f"\n(the first {len(some)} of {len(places)} places)" if len(some) < len(places) else ""
    return diff(text, spliced(text, some), name) + more


# ---- finding the place -----------------------------------------------------------------------------------


def find(file: Text, old: str, new: str, every: bool, name: str) -> list[Place]:
    """The places to change, in order. Raises ToolError with the way out where there is none, or more than one."""
    for rung in RUNGS:
        places = list(islice(rung(file, old, new), MAX_PLACES))
        if len(places) == MAX_PLACES:
            raise ToolError(f"old_string is in {name} {MAX_PLACES:,} times or more. Give more text, or use a command.")
        if len(places) == 1 or (places and every):
            return _apart(places)
        if places:
            lines = ", ".join(str(file.text.count("\n", 0, place.start) + 1) for place in places[:20])
            raise ToolError(f"old_string is in {name} {len(places)} times, at lines {lines}. Give more of the text around the "
                            "one you mean, or set replace_all.")
    raise ToolError(advice(file.text.replace("\r\n", "\n"), old.replace("\r\n", "\n"), new.replace("\r\n", "\n"), name))


def _apart(places: list[Place]) -> list[Place]:
    """Those that do not overlap one before."""
    apart = places[:1]
    for place in places[1:]:
        if place.start >= apart[-1].end:
            apart.append(place)
    return apart


Rung = Callable[[Text, str, str], Iterator[Place]]


def _exact(file: Text, old: str, new: str) -> Iterator[Place]:
    for start in _occurrences(file.text, old):
        if file.text[start] == "\n" and file.text[start - 1:start] == "\r":
            continue  # half of a CRLF; the next rung takes it whole
        yield Place(start, start + len(old), _endings(new, file, start, start + len(old)))


def _line_endings(file: Text, old: str, new: str) -> Iterator[Place]:
    """The file's CRLF against LF, or the other way round."""
    old, flat = old.replace("\r\n", "\n"), file.text.replace("\r\n", "\n")
    for start, end in ((at, at + len(old)) for at in _occurrences(flat, old)):
        yield _raw(file, start, end, new)


def _trailing_space(file: Text, old: str, new: str) -> Iterator[Place]:
    yield from _by_lines(file, old, new, str.rstrip)


def _indentation(file: Text, old: str, new: str) -> Iterator[Place]:
    """The same lines, all shifted by the same white space; the new text is shifted with them."""
    yield from _by_lines(file, old, new, str.strip, shift=True)


def _punctuation(file: Text, old: str, new: str) -> Iterator[Place]:
    flat = file.text.replace("\r\n", "\n").translate(PUNCTUATION)
    plain = old.replace("\r\n", "\n").translate(PUNCTUATION)
    for start in _occurrences(flat, plain):
        yield _raw(file, start, start + len(plain), new)


RUNGS: tuple[Rung, ...] = (_exact, _line_endings, _trailing_space, _indentation, _punctuation)


def _occurrences(text: str, piece: str) -> Iterator[int]:
    """Also those that overlap: of these, too, only one may be meant."""
    at = text.find(piece)
    while at >= 0:
        yield at
        at = text.find(piece, at + 1)


def _by_lines(file: Text, old: str, new: str, view: Callable[[str], str], shift: bool = False) -> Iterator[Place]:
    """Whole lines of the file that are those of `old` when looked at through `view`."""
    flat = file.text.replace("\r\n", "\n")
    lines, wanted = flat.split("\n"), old.replace("\r\n", "\n").removesuffix("\n").split("\n")
    seen, looked_for = [view(line) for line in lines], [view(line) for line in wanted]
    if not any(looked_for):
        return
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    for first in range(len(lines) - len(wanted) + 1):
        if seen[first:first + len(wanted)] != looked_for:
            continue
        text: str | None = new
        if shift:
            text = _shifted(lines[first:first + len(wanted)], wanted, new)
        if text is not None:
            end = starts[first + len(wanted)] - (0 if old.endswith("\n") else 1)
            if end > len(flat):  # the last line of a file without a newline at its end, which stays so
                end, text = len(flat), text.removesuffix("\n")
            yield _raw(file, starts[first], end, text)


def _shifted(lines: list[str], wanted: list[str], new: str) -> str | None:
    """`new` indented as the file is, if every line differs from the wanted one by the same leading white space."""
    pairs = [(line, want) for line, want in zip(lines, wanted) if line.strip()]
    indents = [(line[:len(line) - len(line.lstrip())], want[:len(want) - len(want.lstrip())]) for line, want in pairs]
    ours, theirs = indents[0]
    if ours.endswith(theirs):
        more, less = ours[:len(ours) - len(theirs)], ""
    elif theirs.endswith(ours):
        more, less = "", theirs[:len(theirs) - len(ours)]
    else:
        return None
    if any(less + line != more + want for line, want in indents):
        return None
    shifted = []
    for line in new.split("\n"):
        if line.strip() and not line.startswith(less):
            return None
        shifted.append(more + line[len(less):] if line.strip() else line)
    return "\n".join(shifted)


def _raw(file: Text, start: int, end: int, new: str) -> Place:
    """The place in the file's own text for a span of its text with plain line endings."""
    start, end = start + bisect_left(file.breaks, start), end + bisect_left(file.breaks, end)
    return Place(start, end, _endings(new, file, start, end))


def _endings(new: str, file: Text, start: int, end: int) -> str:
    """`new` with the line endings of the place it goes to."""
    span = file.text[start:end]
    newline = ("\r\n" if "\r\n" in span else "\n") if "\n" in span else file.newline
    return new.replace("\r\n", "\n").replace("\n", newline)


# ---- when there is no such place -------------------------------------------------------------------------


def advice(text: str, old: str, new: str, name: str) -> str:
    """What a model needs to mend its call: the nearest lines with numbers, the likely cause, one next step."""
    lines, wanted = text.split("\n"), old.strip("\n").split("\n")
    made = re.findall(rf"^[ \t]*{re.escape(new.strip())}[ \t]*$", text, re.M) if new.strip() else []
    if len(made) == 1:  # as whole lines: a word that happens to be in the file says nothing
        line = text.count("\n", 0, text.find(made[0])) + 1
        return f"old_string is not in {name}, but new_string is, at line {line}: this edit seems to be made already."
    first, likeness = _nearest(lines, wanted)
    if likeness < 0.5:
        return f"old_string is not in {name}, nor anything like it. Read the file, or search for the text with grep."
    near = lines[max(0, first - 1):first + len(wanted) + 1]
    numbered = "\n".join(f"{number}\t{line}" for number, line in enumerate(near[:40], max(0, first - 1) + 1))
    return (f"old_string is not in {name}. {_cause(near, wanted)} The nearest lines are:\n{numbered}\n"
            "Copy old_string from them, without the line numbers.")


def _cause(near: list[str], wanted: list[str]) -> str:
    written = [line for line in wanted if line.strip()]
    if written and all(re.match(r"\s*\d+(\t|\||: )", line) for line in written):
        return "It seems to hold line numbers, which are not part of the file."
    if {"".join(line.split()) for line in wanted} <= {"".join(line.split()) for line in near}:
        return "White space differs (indentation, or space inside a line)."
    return "The text differs, or the file has changed since it was read."


def _nearest(lines: list[str], wanted: list[str]) -> tuple[int, float]:
    """(index of the first line, likeness 0 to 1) of the run of lines most like the wanted ones."""
    bare, target = [line.strip() for line in lines], [re.sub(r"^\s*\d+(\t|\|)", "", line).strip() for line in wanted]
    looked_for = set(target)
    anchors = [number for number, line in enumerate(bare) if line and line in looked_for]
    if not anchors:
        best = difflib.get_close_matches(max(target, key=len), bare[:5000], 1, 0.5)
        anchors = [bare.index(best[0])] if best else []
    count = Counter(bare)
    anchors.sort(key=lambda anchor: count[bare[anchor]])  # the rarest lines say most
    starts = {max(0, anchor - (target.index(bare[anchor]) if bare[anchor] in target else target.index(max(target, key=len))))
              for anchor in anchors[:2000 // len(target) + 20]}
    likeness, at = max(((_likeness(bare[at:at + len(target)], target), -at) for at in starts), default=(0.0, 0))
    return -at, likeness


def _likeness(lines: list[str], wanted: list[str]) -> float:
    """By letters; of many lines by lines, because difflib leaves out what is frequent in a long text."""
    if len(wanted) > 20:
        return difflib.SequenceMatcher(None, lines, wanted).ratio()
    return difflib.SequenceMatcher(None, "\n".join(lines), "\n".join(wanted)).ratio()
