"""edit: replace a piece of text in a file, or say what to do where it is not found.

The text is looked for as it is, then line by line: without white space at the ends, in another indentation, with
plain quotes and dashes; where more than one place fits, nothing is changed. Lines are changed as in a patch
(patch.py): a space before a line that stays, - before one that goes, + before a new one.
"""

from __future__ import annotations

import codecs
import difflib
import os
import re
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from itertools import accumulate, groupby, islice, takewhile
from operator import eq
from pathlib import Path
from typing import Any

from coder.tools import slips, workspace
from coder.tools.indentation import (
    as_new_lines,
    indent_of,
    indented,
    lines_without,
    reindent,
    shift,
)
from coder.toolset import ToolContext, tool
from coder.types import ToolError, ToolResult

MAX_EDIT = 50_000_000  # bytes of a file that is edited in memory
MAX_BELOW = 2_000  # characters in which the next line is looked for
MAX_LISTED = 20  # places that an error names
MAX_COMPARED = 4_000  # differing lines of both texts; difflib takes seconds for many more
HUNK = re.compile(r"(?<=[-+])\d+")  # the first numbers of a hunk's header
STRAY = re.compile("[\udc80-\udcff]")  # how a byte that is no UTF-8 is decoded

Place = tuple[int, int, str]  # start and end in a text, and what belongs there

# What is written for plain characters
PUNCTUATION = str.maketrans(
    "‘’‚‛“”„‟‐‑‒–—―−\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000",
    "''''\"\"\"\"-------" + 13 * " ",
)


def plain(line: str) -> str:
    return line.translate(PUNCTUATION)


VIEWS: tuple[Any, ...] = (str, str.rstrip, str.strip, lambda line: plain(line).strip())


@tool(permission="edit", default="ask", asks_itself=True, slips=slips.EDIT)
def edit(
    ctx: ToolContext, path: str, old_string: str, new_string: str, replace_all: bool = False
) -> Generator[Any, None, ToolResult]:
    """Replace text in a file; not with sed.

    path: file
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
    file = load(ctx, target)
    old, new = (text.replace("\r\n", "\n") for text in (old_string, new_string))
    own = file.joined if file.is_ended or old != "\n" else file.joined[:-1]
    count = own.count(old) if replace_all else 0
    if count:
        text = file.restored(_replace_all(own, old, new, file.added))
    else:
        text = file.spliced(_find_change(file, old, new, name))
    if text == file.text:
        raise ToolError(f"old_string and new_string are the same in {name}: nothing to do")
    many = f" in {count} places" if count > 1 else ""
    result = yield from replace_text(ctx, target, known, file, text, f"Edited {name}{many}.")
    return ToolResult(f"{result.content}\n{result.details['diff']}", details=result.details)


def replace_text(
    ctx: ToolContext, target: Path, known: Any, old: Text, new: str, done: str
) -> Generator[Any, None, ToolResult]:
    """Ask for permission and write, unless the file is not any more in the state that is `known`."""
    data, changes = old.encoded(new), diff(old.text, new, workspace.shown(ctx, target))
    yield from ctx.ask("edit", workspace.shown(ctx, target), changes)
    workspace.refuse_changed(ctx, target, known)
    note = workspace.save(ctx, target, data)
    return ToolResult(f"{done}{note}", details={"diff": changes, "path": str(target)})


def _replace_all(text: str, old: str, new: str, newline: str) -> str:
    """The text with the new one in all places. Raises ToolError if the indentation of one is uncertain."""
    if "\n" not in new[:-1] and not indent_of(new):  # all at once
        return text.replace(old, new.replace("\n", newline))

    def fill(found: re.Match[str]) -> str:
        return _indent_span(text, found.start(), old, new).replace("\n", newline)

    return re.sub(re.escape(old), fill, text)


def _find_change(file: Text, old: str, new: str, name: str) -> list[Place]:
    """What changes at the one place that fits. Raises ToolError where there is none, or more."""
    wanted, given = (text.removesuffix("\n").split("\n") if text else [] for text in (old, new))
    overlapping = re.finditer(f"(?={re.escape(old)})", file.joined)  # of these, too, one is meant
    starts = [each.start() for each in islice(overlapping, MAX_LISTED)]
    found = [file.joined.count("\n", 0, at) for at in starts]
    if not starts and old.strip():
        found = file.find(wanted)
    if len(found) > 1:
        places = ", ".join(f"{at + 1}" for at in found[:MAX_LISTED])
        way = "Give more of the text around the one you mean, or set replace_all."
        raise ToolError(f"old_string is in {name} at lines {places}. {way}")
    if starts:
        new = _indent_span(file.joined, starts[0], old, new)
        return [_change_of_span(file.joined, starts[0], old, new)]
    if found:
        wanted = as_new_lines(file.lines[found[0] :], wanted, given)
        return file.changes(found[0], _marked_lines(wanted, given))
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


def _indent_span(text: str, start: int, old: str, new: str) -> str:
    """The new text of a span as it belongs there, if the old one leaves out the white space before it.

    Raises ToolError if that is uncertain.
    """
    missing = text[text.rfind("\n", 0, start) + 1 : start]
    lines = old.split("\n")
    if not missing or missing.strip() or not lines[0].strip():
        return new
    end = text.find("\n", start + len(old.rstrip("\n"))) + 1
    filled = [line for line in lines if line.strip()]
    below = _first_filled(text[end : end + MAX_BELOW].split("\n"))
    made = "\n".join(indented(missing, filled, new.split("\n"), below))
    return made.removeprefix(missing)


def _first_filled(lines: Iterable[str]) -> str:
    return next((line for line in lines if line.strip()), "")


def _marked_lines(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """The marked lines that turn one text into the other; white space at an end is no change."""
    body = list[str]()
    before, after = ([line.rstrip() for line in lines] for lines in (old, new))
    for tag, a, b, c, d in difflib.SequenceMatcher(None, before, after, False).get_opcodes():
        body += [(" " if tag == "equal" else "-") + line for line in old[a:b]]
        body += [f"+{line}" for line in new[c:d] if tag != "equal"]
    return body


# ---- text and lines -------------------------------------------------------------------------


def load(ctx: ToolContext, target: Path) -> Text:
    """The whole text of a file that is to be changed. Raises ToolError, also where it changed."""
    with workspace.opened(target) as file:
        size, name = os.fstat(file.fileno()).st_size, workspace.shown(ctx, target)
        if target in ctx.seen:
            workspace.refuse_changed(ctx, target, ctx.seen[target])
        if size > MAX_EDIT:
            raise ToolError(f"{name} has {size:,} bytes, too large to edit here: use a command")
        data = file.read()
    if b"\0" in data[:8192]:
        raise ToolError(f"{name} is a binary file of {size:,} bytes")
    bom = codecs.BOM_UTF8 if data.startswith(codecs.BOM_UTF8) else b""
    return Text(data[len(bom) :].decode("utf-8", "surrogateescape"), bom)


class Text:
    """The text of a file and its lines. Bytes that are no UTF-8 survive in it as surrogates.

    `joined` are the lines with a newline behind each. Where all lines end in CRLF, that is left out
    of them. In a file with both endings a CR is white space at the end of its line, and new lines get
    the ending that most have.
    """

    def __init__(self, text: str, bom: bytes = b"") -> None:
        self.text, self.bom = text, bom
        ends, crlf = text.count("\n"), text.count("\r\n")
        self.newline = "\r\n" if crlf * 2 > ends else "\n"
        self.is_crlf, self.is_ended = crlf == ends > 0, not text or text.endswith("\n")
        self.added = "\n" if self.is_crlf else self.newline  # the ending of a new line in `joined`
        plain_text = text.replace("\r\n", "\n") if self.is_crlf else text
        self.joined = plain_text if self.is_ended else f"{plain_text}\n"
        self.lines = self.joined.split("\n")[:-1]
        self.starts = [0, *accumulate(len(line) + 1 for line in self.lines)]

    def encoded(self, text: str) -> bytes:
        """The bytes of a changed text. Raises ToolError where they would be read otherwise."""
        stray = STRAY.search(self.text)
        if stray and not all(map(str.isascii, set(text) - set(self.text))):
            way = "Use a command that knows its encoding."
            raise ToolError(f"the file is not UTF-8: only ASCII can be added to it. {way}")
        return self.bom + text.encode("utf-8", "surrogateescape" if stray else "strict")

    def restored(self, joined: str) -> str:
        """Changed lines as they belong into the file."""
        text = joined if self.is_ended else joined.removesuffix("\n")
        return text.replace("\n", "\r\n") if self.is_crlf else text

    def spliced(self, places: Iterable[Place]) -> str:
        """The file's text with the places in `joined` filled."""
        parts, at = list[str](), 0
        for start, end, new in places:
            parts += [self.joined[at:start], new.replace("\n", self.added)]
            at = end
        return self.restored("".join([*parts, self.joined[at:]]))

    def find(self, wanted: Sequence[str], start: int = 0) -> list[int]:
        """From `start`, the lines at which all the wanted ones are, in the strictest view that finds them."""
        for view in VIEWS:
            seen, sought = list(map(view, self.lines)), list(map(view, wanted))
            spans = ((at, at + len(wanted)) for at in range(start, len(seen) - len(wanted) + 1))
            found = [
                at
                for at, end in spans
                if seen[at:end] == sought and shift(self.lines[at:end], wanted)
            ]
            if found:
                return found
        return []

    def changes(self, at: int, body: Sequence[str]) -> list[Place]:
        """What the marked lines change where their old ones fit at line `at`."""
        old, places = lines_without("+", body), list[Place]()
        own = self.lines[at : at + len(old)]
        if own == list(map(plain, own)) and old != list(map(plain, old)):
            body = list(map(plain, body))
        body = reindent(own, body, _first_filled(self.lines[at + len(old) :]))
        for stays, lines in groupby(body, lambda line: line[0] == " "):
            group = list(lines)
            end = at + len(lines_without("+", group))
            if not stays:
                new = "".join(f"{line}\n" for line in lines_without("-", group))
                places.append((self.starts[at], self.starts[end], new))
            at = end
        return places


def advice(lines: list[str], old: list[str], new: list[str], name: str) -> str:
    """What a model needs to mend a change: the nearest lines with numbers and the likely cause."""
    made = [at for at in range(len(lines)) if any(new) and lines[at : at + len(new)] == new]
    if len(made) == 1:
        end = f"the new text is, at line {made[0] + 1}: this edit seems to be made already."
        return f"the old text is not in {name}, but {end}"
    bare = [re.sub(r"^\s*\d+(\t|\|)", "", line) for line in old]
    first = _nearest_line(lines, [line.strip() for line in bare])
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


def _nearest_line(lines: list[str], wanted: list[str]) -> int:
    """The first of the lines around the rarest of the wanted ones, or one like it; -1 for none."""
    bare = [line.strip() for line in lines]
    count = Counter(bare)
    known = [line for line in wanted if line and count[line]]
    anchor = min(known, key=lambda line: count[line]) if known else max(wanted, key=len)
    like = (known and [anchor]) or difflib.get_close_matches(anchor, bare[:5000], 1)
    return max(0, bare.index(like[0]) - wanted.index(anchor)) if like else -1


def diff(old: str, new: str, name: str) -> str:
    """A unified diff with three lines around; in words where no line differs but its ending."""
    before, after = old.splitlines(), new.splitlines()
    if before == after:
        return "(only line endings, or the newline at the end, differ)" if old != new else ""
    head = len(list(takewhile(bool, map(eq, before, after))))
    tail = len(list(takewhile(bool, map(eq, before[head:][::-1], after[head:][::-1]))))
    first, last = max(0, head - 3), max(0, tail - 3)
    before, after = (lines[first : len(lines) - last] for lines in (before, after))
    if len(before) + len(after) > MAX_COMPARED:  # all in one hunk
        sizes = f"-{min(1, len(before))},{len(before)} +{min(1, len(after))},{len(after)}"
        lines = [f"@@ {sizes} @@", *map("-{}".format, before), *map("+{}".format, after)]
    else:
        lines = list(difflib.unified_diff(before, after, lineterm=""))[2:]
    for at, line in enumerate(lines):
        if line.startswith("@"):
            lines[at] = HUNK.sub(lambda number: f"{int(number[0]) + first}", line)
    text = "\n".join([f"--- a/{name}", f"+++ b/{name}", *lines])
    return text.encode("utf-8", "replace").decode()
