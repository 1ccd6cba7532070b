"""edit: replace a piece of text in a file, or say what to do if it is not found.

The text is looked for as it is, then line by line: without white space at the ends, in another indentation, with
plain quotes and dashes; if more than one place fits, nothing is changed. In a file that has changed since it was
read only the exact text counts. Lines are changed as in a patch (patch.py): a space before a line that stays, -
before one that goes, + before a new one.
"""

from __future__ import annotations

import codecs
import difflib
import os
import re
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import accumulate, groupby, islice
from pathlib import Path
from typing import Any

from coder.tools import paths, slips, workspace
from coder.tools.indentation import (
    as_new_lines,
    first_filled,
    indent_span,
    lines_without,
    reindent,
    shift,
)
from coder.toolset import ToolContext, tool
from coder.types import ToolError, ToolResult

MAX_EDIT = 50_000_000  # bytes of a file that is edited in memory
MAX_LISTED = 20  # places that an error names
MAX_COMPARED = 4_000  # differing lines of both texts; difflib takes seconds for many more
MAX_RUN = 10  # new lines in a row, or old ones, that a result repeats
AROUND = 3  # lines of a diff before and after a change
HUNK = re.compile(r"@@ -\d+(?:,\d+)? \+(?P<line>\d+)")
FIRST_LINE = re.compile(r"(?<=[-+])\d+")  # in the header of a hunk
STRAY = re.compile("[\udc80-\udcff]")  # how a byte that is no UTF-8 is decoded
NUMBERED = re.compile(r" *(?P<number>\d{1,9})[\t|→](?P<line>.*)")  # a line as `read` shows it
Place = tuple[int, int, str]  # start and end in a text, and what belongs there

# What is written for plain characters
PUNCTUATION = str.maketrans(
    "‘’‚‛“”„‟‐‑‒–—―−\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000",
    "''''\"\"\"\"-------" + 13 * " ",
)


def plain(line: str) -> str:
    return line.translate(PUNCTUATION)


def _without_ends(line: str) -> str:
    return plain(line).strip()


VIEWS: tuple[Callable[[str], str], ...] = (str, str.rstrip, str.strip, _without_ends)


@tool(permission="edit", default="ask", asks_itself=True, slips=slips.EDIT)
def edit(
    ctx: ToolContext, path: str, old_string: str, new_string: str, replace_all: bool = False
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
    known = workspace.state_of(target)
    if not old_string:
        if known:
            way = "To insert, give the line next to the place; to write the whole file use write."
            raise ToolError(f"old_string is empty, and {name} is there. {way}")
        return (yield from create_file(ctx, target, new_string))
    yield from workspace.ask_to_show(ctx, target)
    with paths.naming_near(ctx, path, way=". To create it use write."):
        file = load(ctx, target)
    old = old_string.replace("\r\n", "\n")
    new = new_string.replace("\r\n", "\n")
    # The newline that ends `joined` may not be in the file
    own = file.joined if file.is_ended or old != "\n" else file.joined[:-1]
    count = own.count(old) if replace_all else 0
    if count > 1 or (count and new):  # one that goes may take its line with it
        text = file.restored(_replace_all(own, old, new, file.added))
    else:
        text = file.spliced(_find_change(file, old, new, name))
    if text == file.text:
        raise ToolError(f"old_string and new_string are the same in {name}: nothing to do")
    many = f" in {count} places" if count > 1 else ""
    changes, notes = yield from replace_text(ctx, target, known, file, text)
    place = lines_of(changes)
    done = f"Edited {name}{many}{place}.{notes}"
    # A model knows the text that it gave. It is shown what was written otherwise, and what others have changed
    is_as_given = text == file.restored(own.replace(old, new))
    if file.has_changed or not is_as_given or not place:
        done += f"\n{shortened(changes)}"
    return ToolResult(done, details={"diff": changes, "path": str(target)})


def create_file(ctx: ToolContext, target: Path, content: str) -> Generator[Any, None, ToolResult]:
    """Ask for permission and write a file that was not there."""
    changes, notes = yield from replace_text(ctx, target, None, Text(""), content)
    done = f"Created {workspace.shown(ctx, target)} ({len(content.splitlines())} lines).{notes}"
    return ToolResult(done, details={"diff": changes, "path": str(target)})


def replace_text(
    ctx: ToolContext, target: Path, known: Any, old: Text, new: str
) -> Generator[Any, None, tuple[str, str]]:
    """Ask for permission and write, unless the file is not any more in the state that is `known`.

    Returns (the diff, notes for the model).
    """
    data = old.encoded(new)
    name = workspace.shown(ctx, target)
    changes = diff(old.text, new, name)
    yield from ctx.ask("edit", name, changes)
    workspace.refuse_changed(ctx, target, known)
    return changes, workspace.save(ctx, target, data, had_changed=old.has_changed)


def _replace_all(text: str, old: str, new: str, newline: str) -> str:
    """The text with the new one in all places. Raises ToolError if the indentation of one is uncertain."""
    if "\n" not in new[:-1] and not new[:1].isspace():  # all at once
        return text.replace(old, new.replace("\n", newline))

    def fill(found: re.Match[str]) -> str:
        return indent_span(text, found.start(), old, new).replace("\n", newline)

    return re.sub(re.escape(old), fill, text)


def _find_change(file: Text, old: str, new: str, name: str) -> list[Place]:
    """What changes at the one place that fits. Raises ToolError if there is none, or more."""
    wanted = old.removesuffix("\n").split("\n")
    given = new.removesuffix("\n").split("\n") if new else []
    overlapping = re.finditer(f"(?={re.escape(old)})", file.joined)  # of these, too, one is meant
    starts = [each.start() for each in islice(overlapping, MAX_LISTED)]
    found = [file.joined.count("\n", 0, at) for at in starts]
    if not starts and old.strip():
        found = file.find(wanted)
    if not found:
        wanted, given, found = _without_proved_numbers(file, wanted, given)
    if len(found) > 1:
        places = ", ".join(f"{at + 1}" for at in found[:MAX_LISTED])
        way = "Give more of the text around the one you mean, or set replace_all."
        raise ToolError(f"old_string is in {name} at lines {places}. {way}")
    if starts:
        new = indent_span(file.joined, starts[0], old, new)
        return [_change_of_span(file.joined, starts[0], old, new)]
    if found:
        wanted = as_new_lines(file.lines[found[0] :], wanted, given)
        return file.changes(found[0], _marked_lines(wanted, given))
    raise not_found(file, wanted, given, name)


def not_found(file: Text, old: Sequence[str], new: Sequence[str], name: str) -> ToolError:
    from coder.tools.advice import advice  # late: most edits fit

    return ToolError(advice(file, old, new, name))


def _change_of_span(text: str, start: int, old: str, new: str) -> Place:
    """The change of a span. What is a line but for white space goes with that and its newline."""
    end = start + len(old)
    closed = old.endswith("\n")
    first = text.rfind("\n", 0, start) + 1
    begins_line = not text[first:start].strip()
    ends_line = closed or text[end : end + 1] == "\n"
    if not new and begins_line and ends_line and old.strip():
        return first, end if closed else end + 1, ""
    if closed and not new.endswith("\n") and new != old[:-1]:
        new += "\n"  # no lines are joined
    return start, end, new


def _marked_lines(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """The marked lines that turn one text into the other; white space at an end is no change."""
    before = [line.rstrip() for line in old]
    after = [line.rstrip() for line in new]
    body = list[str]()
    for tag, a, b, c, d in difflib.SequenceMatcher(None, before, after, False).get_opcodes():
        if tag == "equal":
            body += [f" {line}" for line in old[a:b]]
        else:
            body += [f"-{line}" for line in old[a:b]]
            body += [f"+{line}" for line in new[c:d]]
    return body


# ---- line numbers in what is given ----------------------------------------------------------


def _without_proved_numbers(
    file: Text, wanted: list[str], given: list[str]
) -> tuple[list[str], list[str], list[int]]:
    """(old lines, new lines, their only place) without the numbers that `read` shows, if they are those of the place.

    The new lines have numbers from the same one on, or none.
    """
    first, old = _without_numbers(wanted)
    new_first, new = _without_numbers(given)
    if not any(NUMBERED.fullmatch(line) for line in given):
        new_first = first
        new = given
    is_proved = first > 0 and first == new_first and file.find(old) == [first - 1]
    return (old, new, [first - 1]) if is_proved else (wanted, given, [])


def _without_numbers(lines: Sequence[str]) -> tuple[int, list[str]]:
    """(the first number, the lines without), if each has one that follows the one before; else (0, [])."""
    found = [NUMBERED.fullmatch(line) for line in lines]
    numbers = [int(each["number"]) for each in found if each]
    if not numbers or numbers != list(range(numbers[0], numbers[0] + len(lines))):
        return 0, []
    return numbers[0], [each["line"] for each in found if each]


# ---- text and lines -------------------------------------------------------------------------


def load(ctx: ToolContext, target: Path) -> Text:
    """The whole text of a file that is to be changed. Raises ToolError."""
    name = workspace.shown(ctx, target)
    with workspace.opened(target, name) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_EDIT:
            raise ToolError(f"{name} has {size:,} bytes, too large to edit here: use a command")
        data = file.read()
    if b"\0" in data[:8192]:
        raise ToolError(f"{name} is a binary file of {size:,} bytes")
    digest = ctx.seen.get(target)
    has_changed = digest is not None and digest != workspace.digest_of(data)
    bom = codecs.BOM_UTF8 if data.startswith(codecs.BOM_UTF8) else b""
    return Text(data[len(bom) :].decode("utf-8", "surrogateescape"), bom, has_changed)


def load_known(ctx: ToolContext, target: Path) -> Text:
    """The text of a file that is to be overwritten. Raises ToolError if the model does not know it as it is."""
    file = load(ctx, target)
    name = workspace.shown(ctx, target)
    if file.has_changed:
        raise workspace.changed_error(name)
    if ctx.seen.get(target) is None:
        way = "Read it first, or change a part of it."
        raise ToolError(f"{name} exists and was not read as it is now. {way}")
    return file


class Text:
    """The text of a file and its lines. Bytes that are no UTF-8 survive in it as surrogates.

    `joined` are the lines with a newline after each. If all lines end in CRLF, that is left out
    of them. In a file with both endings a CR is white space at the end of its line, and new lines get
    the ending that most have. `has_changed`: the file is not as the session has read it.
    """

    def __init__(self, text: str, bom: bytes = b"", has_changed: bool = False) -> None:
        self.text = text
        self.bom = bom
        self.has_changed = has_changed
        ends = text.count("\n")
        crlf = text.count("\r\n")
        self.newline = "\r\n" if crlf * 2 > ends else "\n"
        self.is_crlf = crlf == ends > 0
        self.is_ended = not text or text.endswith("\n")
        self.added = "\n" if self.is_crlf else self.newline  # the ending of a new line in `joined`
        plain_text = text.replace("\r\n", "\n") if self.is_crlf else text
        self.joined = plain_text if self.is_ended else f"{plain_text}\n"
        self.lines = self.joined.split("\n")[:-1]
        self.starts = [0, *accumulate(len(line) + 1 for line in self.lines)]

    def encoded(self, text: str) -> bytes:
        """The bytes of a changed text. Raises ToolError if they would be read otherwise."""
        is_stray = STRAY.search(self.text) is not None
        new_characters = set(text) - set(self.text)
        if is_stray and not "".join(new_characters).isascii():
            way = "Use a command that knows its encoding."
            raise ToolError(f"the file is not UTF-8: only ASCII can be added to it. {way}")
        return self.bom + text.encode("utf-8", "surrogateescape" if is_stray else "strict")

    def restored(self, joined: str) -> str:
        """Changed lines as they belong into the file."""
        text = joined if self.is_ended else joined.removesuffix("\n")
        return text.replace("\n", "\r\n") if self.is_crlf else text

    def spliced(self, places: Iterable[Place]) -> str:
        """The file's text with the places in `joined` filled."""
        parts = list[str]()
        at = 0
        for start, end, new in places:
            parts.append(self.joined[at:start])
            parts.append(new.replace("\n", self.added))
            at = end
        parts.append(self.joined[at:])
        return self.restored("".join(parts))

    def find(self, wanted: Sequence[str], start: int = 0) -> list[int]:
        """From `start`, the lines at which all the wanted ones are, in the strictest view that finds them."""
        for view in VIEWS[:1] if self.has_changed else VIEWS:
            seen = [view(line) for line in self.lines]
            sought = [view(line) for line in wanted]
            found = list[int]()
            for at in range(start, len(seen) - len(wanted) + 1):
                end = at + len(wanted)
                if seen[at:end] == sought and shift(self.lines[at:end], wanted):
                    found.append(at)
            if found:
                return found
        return []

    def changes(self, at: int, body: Sequence[str]) -> list[Place]:
        """What the marked lines change if their old ones fit at line `at`."""
        old = lines_without("+", body)
        own = self.lines[at : at + len(old)]
        is_plain = own == [plain(line) for line in own]
        if is_plain and old != [plain(line) for line in old]:
            body = [plain(line) for line in body]
        body = reindent(own, body, first_filled(self.lines[at + len(old) :]))
        places = list[Place]()
        for stays, lines in groupby(body, lambda line: line[0] == " "):
            group = list(lines)
            end = at + len(lines_without("+", group))
            if not stays:
                new = "".join(f"{line}\n" for line in lines_without("-", group))
                places.append((self.starts[at], self.starts[end], new))
            at = end
        return places


# ---- diffs ----------------------------------------------------------------------------------


def diff(old: str, new: str, name: str) -> str:
    """A unified diff with three lines around; in words if no line differs but its ending."""
    before = old.splitlines()
    after = new.splitlines()
    if before == after:
        return "(only line endings, or the newline at the end, differ)" if old != new else ""
    # What is the same at both ends is left out: difflib would compare it
    first = max(0, _count_equal(before, after) - AROUND)
    last = max(0, _count_equal(before[first:][::-1], after[first:][::-1]) - AROUND)
    before = before[first : len(before) - last]
    after = after[first : len(after) - last]
    if len(before) + len(after) > MAX_COMPARED:  # all in one hunk
        sizes = f"-{min(1, len(before))},{len(before)} +{min(1, len(after))},{len(after)}"
        lines = [f"@@ {sizes} @@"]
        lines += [f"-{line}" for line in before]
        lines += [f"+{line}" for line in after]
    else:
        lines = list(difflib.unified_diff(before, after, lineterm="", n=AROUND))[2:]
    for at, line in enumerate(lines):
        if line.startswith("@"):
            lines[at] = FIRST_LINE.sub(lambda number: f"{int(number[0]) + first}", line)
    text = "\n".join([f"--- a/{name}", f"+++ b/{name}", *lines])
    return text.encode("utf-8", "replace").decode()


def _count_equal(before: list[str], after: list[str]) -> int:
    """How many lines are the same from the start on."""
    count = 0
    for old, new in zip(before, after):
        if old != new:
            break
        count += 1
    return count


def lines_of(changes: str) -> str:
    """`, lines 3-5`: where a diff changes the new text; "" if no line differs."""
    touched = list[int]()
    number = 0
    for line in changes.split("\n")[2:]:
        header = HUNK.match(line)
        if header:
            number = int(header["line"])
            continue
        if line[:1] in ("+", "-"):
            touched.append(number)
        if line[:1] != "-":
            number += 1
    if not touched:
        return ""
    if touched[0] == touched[-1]:
        return f", line {touched[0]}"
    return f", lines {touched[0]}-{touched[-1]}"


def shortened(changes: str) -> str:
    """The hunks of a diff, for the model that knows what it wrote: of a long run of lines the first and the last."""
    if not changes.startswith("---"):
        return changes
    lines = list[str]()
    for mark, run in groupby(changes.split("\n")[2:], lambda line: line[0]):
        group = list(run)
        if mark in ("+", "-") and len(group) > MAX_RUN:
            group = [group[0], f"{mark} ... ({len(group) - 2} lines)", group[-1]]
        lines += group
    return "\n".join(lines)
