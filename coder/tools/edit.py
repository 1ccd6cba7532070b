"""edit: replace a piece of text in a file, or say what to do where it is not found.

The text is looked for as it is, then line by line: without white space at the ends, in another
indentation, with plain quotes and dashes. A rung is taken only where one place fits: a wrong edit
costs more than a failure that shows the right place.

Lines are changed as in a patch, which is applied with the same functions (patch.py): a space before a
line that stays, - before one that goes, + before a new one. Lines that stay are not written.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import accumulate, groupby, islice
from pathlib import Path
from typing import Any

from coder.tools import workspace
from coder.toolset import ToolContext, tool
from coder.types import ToolError, ToolResult

MAX_LISTED = 20  # places that an error names
MAX_COMPARED = 4_000  # differing lines of both texts; difflib takes seconds for many more
HUNK = re.compile(r"(?<=[-+])\d+")  # the first numbers of a hunk's header

Place = tuple[int, int, str]  # start and end in a text, and what belongs there
View = Callable[[str], str]

# What is written for plain characters
PUNCTUATION = str.maketrans(
    "‘’‚‛“”„‟‐‑‒–—―−\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000",
    "''''\"\"\"\"-------" + 13 * " ",
)


def plain(line: str) -> str:
    return line.translate(PUNCTUATION)


VIEWS: tuple[View, ...] = (str, str.rstrip, str.strip, lambda line: plain(line).strip())


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
    target = workspace.to_write(ctx, path)
    name, known = workspace.shown(ctx, target), workspace.state_of(target)
    if not old_string:
        way = "To create a file use write; to insert, give the line beside the place."
        raise ToolError(f"old_string is empty. {way}")
    yield from workspace.ask_to_show(ctx, target)
    file = workspace.load(ctx, target)
    old, new = (text.replace("\r\n", "\n") for text in (old_string, new_string))
    lines = Lines(file)
    own = lines.text if lines.is_ended or old != "\n" else lines.text[:-1]
    count = own.count(old) if replace_all else 0
    if count:
        text = lines.restored(own.replace(old, new.replace("\n", lines.newline)))
    else:
        text = lines.spliced(_find_change(lines, old, new, name))
    if text == file.text:
        raise ToolError(f"old_string and new_string are the same in {name}: nothing to do")
    many = f" in {count} places" if count > 1 else ""
    result = yield from replace_text(ctx, target, known, file, text, f"Edited {name}{many}.")
    return ToolResult(f"{result.content}\n{result.details['diff']}", details=result.details)


def replace_text(
    ctx: ToolContext, target: Path, known: Any, old: workspace.Text, new: str, done: str
) -> Generator[Any, None, ToolResult]:
    """Ask for permission and write, unless the file is not any more in the state that is `known`."""
    data, changes = old.encoded(new), diff(old.text, new, workspace.shown(ctx, target))
    yield from ctx.ask("edit", workspace.shown(ctx, target), changes)
    workspace.refuse_changed(ctx, target, known)
    note = workspace.save(ctx, target, data)
    details = {"diff": changes, "path": str(target)}
    return ToolResult(f"{done}{note}", details=details)


def _find_change(file: Lines, old: str, new: str, name: str) -> list[Place]:
    """What changes at the one place that fits. Raises ToolError where there is none, or more."""
    wanted, given = lines_of(old), lines_of(new)
    overlapping = re.finditer(f"(?={re.escape(old)})", file.text)  # of these, too, one is meant
    starts = [each.start() for each in islice(overlapping, MAX_LISTED)]
    found = [file.text.count("\n", 0, at) for at in starts]
    if not starts and old.strip():
        found = file.find(wanted)
    if len(found) > 1:
        places = ", ".join(f"{at + 1}" for at in found[:MAX_LISTED])
        way = "Give more of the text around the one you mean, or set replace_all."
        raise ToolError(f"old_string is in {name} at lines {places}. {way}")
    if starts:
        return [_change_of_span(file.text, starts[0], old, new)]
    if found:
        return file.changes(found[0], marked_lines(wanted, given))
    raise ToolError(advice(file.lines, wanted, given, name))


def _change_of_span(text: str, start: int, old: str, new: str) -> Place:
    """The change of a span. What is a line but for white space goes with that and its newline."""
    end, closed = start + len(old), old.endswith("\n")
    first = text.rfind("\n", 0, start) + 1
    is_alone = not text[first:start].strip() and (closed or text[end : end + 1] == "\n")
    if not new and is_alone and old.strip():
        return first, end if closed else end + 1, ""
    if closed and not new.endswith("\n") and new != old[:-1]:
        new += "\n"  # no lines are joined
    return start, end, new


# ---- lines ----------------------------------------------------------------------------------


class Lines:
    """A file's text with a newline at its end, and its lines.

    Where all lines end in CRLF, the text has plain endings. In a file with both endings a CR is white
    space at the end of its line, and new lines get the ending that most have.
    """

    def __init__(self, file: workspace.Text) -> None:
        ends = file.text.count("\n")
        self.is_crlf = file.text.count("\r\n") == ends > 0
        self.newline = "\n" if self.is_crlf else file.newline
        self.is_ended = not file.text or file.text.endswith("\n")
        text = file.text.replace("\r\n", "\n") if self.is_crlf else file.text
        self.text = text if self.is_ended else f"{text}\n"
        self.lines = self.text.split("\n")[:-1]
        self.starts = [0, *accumulate(len(line) + 1 for line in self.lines)]

    def restored(self, text: str) -> str:
        """A changed text as it belongs into the file."""
        text = text if self.is_ended else text.removesuffix("\n")
        return text.replace("\n", "\r\n") if self.is_crlf else text

    def spliced(self, places: Iterable[Place]) -> str:
        """The file's text with the places filled."""
        parts, at = list[str](), 0
        for start, end, new in places:
            parts += [self.text[at:start], new.replace("\n", self.newline)]
            at = end
        return self.restored("".join([*parts, self.text[at:]]))

    def find(self, wanted: Sequence[str], start: int = 0) -> list[int]:
        """From `start`, the lines at which all the wanted ones are, in the strictest view that finds them."""
        return next(filter(None, (self._fits(wanted, view, start) for view in VIEWS)), [])

    def _fits(self, wanted: Sequence[str], view: View, start: int) -> list[int]:
        """The lines at which all the wanted ones are in a view, shifted alike."""
        seen, sought = [view(line) for line in self.lines], [view(line) for line in wanted]
        size = len(sought)
        return [
            at
            for at in range(start, len(seen) - size + 1)
            if seen[at : at + size] == sought
            and shift(self.lines[at : at + size], wanted) is not None
        ]

    def changes(self, at: int, body: Sequence[str]) -> list[Place]:
        """What the marked lines change where their old ones fit at line `at`."""
        old, places = lines_without("+", body), list[Place]()
        own = self.lines[at : at + len(old)]
        if own == list(map(plain, own)) and old != list(map(plain, old)):
            body = list(map(plain, body))
        body = _reindented(own, body)
        for stays, lines in groupby(body, lambda line: line[0] == " "):
            group = list(lines)
            end = at + len(lines_without("+", group))
            if not stays:
                new = "".join(f"{line}\n" for line in lines_without("-", group))
                places.append((self.starts[at], self.starts[end], new))
            at = end
        return places


def lines_of(text: str) -> list[str]:
    return text.removesuffix("\n").split("\n") if text else []


def lines_without(mark: str, body: Iterable[str]) -> list[str]:
    """The old lines are those without +, the new ones those without -."""
    return [line[1:] for line in body if line[0] != mark]


def marked_lines(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """The marked lines that turn one text into the other; white space at an end is no change."""
    body = list[str]()
    before, after = ([line.rstrip() for line in lines] for lines in (old, new))
    for tag, a, b, c, d in difflib.SequenceMatcher(None, before, after, False).get_opcodes():
        body += [(" " if tag == "equal" else "-") + line for line in old[a:b]]
        body += [f"+{line}" for line in new[c:d] if tag != "equal"]
    return body


def shift(own: Sequence[str], wanted: Sequence[str]) -> tuple[str, str] | None:
    """(white space that the file has more, has less) in front; None where lines differ in that."""
    pairs = [(_indent(line), _indent(want)) for line, want in zip(own, wanted) if want.strip()]
    ours, theirs = pairs[0] if pairs else ("", "")
    shorter = ours.endswith(theirs)
    more, less = (ours.removesuffix(theirs), "") if shorter else ("", theirs.removesuffix(ours))
    return (more, less) if all(less + line == more + want for line, want in pairs) else None


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _reindented(own: Sequence[str], body: Sequence[str]) -> Sequence[str]:
    """The marked lines, with the new ones in the indentation of the file, whose lines are `own`.

    Where the old ones lack it, so may the new ones. Raises ToolError where that is uncertain.
    """
    old = [line for line in body if line[0] != "+"]
    more, less = shift(own, [line[1:] for line in old]) or ("", "")
    added = [line[1:] for line in body if line[0] == "+" and line[1:].strip()]
    replaced = [(line[1:], mine) for line, mine in zip(old, own) if line[0] == "-"]
    theirs, ours = map(_least_indent, zip(*replaced)) if replaced else (-1, -1)
    new = _least_indent(added)
    if not (more or less) or not added or (replaced and new == ours):
        return body
    if (replaced and new != theirs) or not all(line.startswith(less) for line in added):
        raise ToolError(
            "the file has these lines in another indentation. Write it as the file has it."
        )
    return [
        f"+{more}{line[1:].removeprefix(less)}" if line[0] == "+" and line[1:].strip() else line
        for line in body
    ]


def _least_indent(lines: Iterable[str]) -> int:
    return min((len(_indent(line)) for line in lines if line.strip()), default=-1)


# ---- what to do where nothing fits ----------------------------------------------------------


def advice(lines: list[str], old: list[str], new: list[str], name: str) -> str:
    """What a model needs to mend a change: the nearest lines with numbers and the likely cause."""
    made = [at for at in range(len(lines)) if any(new) and lines[at : at + len(new)] == new]
    if len(made) == 1:
        end = f"the new text is, at line {made[0] + 1}: this edit seems to be made already."
        return f"the old text is not in {name}, but {end}"
    bare = [re.sub(r"^\s*\d+(\t|\|)", "", line) for line in old]
    first = _nearest(lines, [line.strip() for line in bare])
    if first < 0:
        way = "Read the file, or search for the text with grep."
        return f"the old text is not in {name}, nor anything like it. {way}"
    cause, near = "It differs, or the file has changed.", lines[first : first + len(old)]
    if bare != old:
        cause = "It seems to hold line numbers, which are not part of the file."
    elif "".join("".join(near).split()) == "".join("".join(old).split()):
        cause = "White space differs (indentation, or space inside a line)."
    around = enumerate(lines[max(0, first - 1) : first + min(len(old), 40) + 1], max(1, first))
    text = "\n".join(f"{number}\t{line}" for number, line in around)
    return f"the old text is not in {name}. {cause} The nearest lines are:\n{text}"


def _nearest(lines: list[str], wanted: list[str]) -> int:
    """The first of the lines around the rarest of the wanted ones, or one like it; -1 for none."""
    bare = [line.strip() for line in lines]
    count = Counter(bare)
    known = [line for line in wanted if line and count[line]]
    anchor = min(known, key=lambda line: count[line]) if known else max(wanted, key=len)
    like = (known and [anchor]) or difflib.get_close_matches(anchor, bare[:5000], 1)
    return max(0, bare.index(like[0]) - wanted.index(anchor)) if like else -1


# ---- what has changed -----------------------------------------------------------------------


def diff(old: str, new: str, name: str) -> str:
    """A unified diff with three lines around; in words where no line differs but its ending."""
    before, after = old.splitlines(), new.splitlines()
    if before == after:
        return "(only line endings, or the newline at the end, differ)" if old != new else ""
    head = _in_common(before, after)
    first, last = max(0, head - 3), max(0, _in_common(before[head:][::-1], after[head:][::-1]) - 3)
    before, after = (lines[first : len(lines) - last] for lines in (before, after))
    if len(before) + len(after) > MAX_COMPARED:  # all in one hunk
        sizes = f"-{min(1, len(before))},{len(before)} +{min(1, len(after))},{len(after)}"
        lines = [
            f"@@ {sizes} @@",
            *(f"-{line}" for line in before),
            *(f"+{line}" for line in after),
        ]
    else:
        lines = list(difflib.unified_diff(before, after, lineterm=""))[2:]
    for at, line in enumerate(lines):
        if line.startswith("@"):
            lines[at] = HUNK.sub(lambda number: f"{int(number[0]) + first}", line)
    text = "\n".join([f"--- a/{name}", f"+++ b/{name}", *lines])
    return text.encode("utf-8", "replace").decode()


def _in_common(lines: list[str], others: list[str]) -> int:
    """The number of lines that both begin with."""
    pairs = enumerate(zip(lines, others))
    return next((at for at, (a, b) in pairs if a != b), min(len(lines), len(others)))
