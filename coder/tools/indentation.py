"""The indentation of new lines where the old ones were given in another one than the file has.

Models leave white space out in three ways: of all lines, of the first line only, or of the old text only. Which lines
lack it is told by how the lines fit to each other and to the line below; what fits in two ways, or in none, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from coder.types import ToolError

MAX_BELOW = 2_000  # characters in which the next line is looked for
OPENING = re.compile(r"[:\\=]$")  # the end of a line that deeper lines follow
PROSE = re.compile(r"#|//|/\*|\*|--")  # the begin of a comment: how it ends says nothing
LEAVING = re.compile(r"(?:return|raise|break|continue)\b")  # nothing follows next to it
STRING = re.compile(r"""(['"])(?:\\.|(?!\1).)*\1""")
REMARK = re.compile(r"\s+#.*|(?<=[;{}])\s*//.*")
WAY = "Write the old and the new lines with the white space that the file has."
UNCERTAIN = f"the file has these lines in another indentation. {WAY}"


def lines_without(mark: str, body: Iterable[str]) -> list[str]:
    """The old lines are those without +, the new ones those without -."""
    return [line[1:] for line in body if line[0] != mark]


def shift(own: Sequence[str], wanted: Sequence[str]) -> tuple[str, str] | None:
    """(white space that the file has more, has less) in front; None if lines differ in that."""
    pairs = [(indent_of(line), indent_of(want)) for line, want in zip(own, wanted) if want.strip()]
    if not pairs:
        return "", ""
    more = less = ""
    ours, theirs = pairs[0]
    if ours.endswith(theirs):
        more = ours.removesuffix(theirs)
    else:
        less = theirs.removesuffix(ours)
    is_even = all(less + ours == more + theirs for ours, theirs in pairs)
    return (more, less) if is_even else None


def indent_of(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def as_new_lines(own: Sequence[str], old: Sequence[str], new: Sequence[str]) -> list[str]:
    """Old lines in the indentation of the file, if the new ones have it and only the old ones lack it."""
    more, _ = shift(own, old) or ("", "")
    least_old = _least_indent(old)
    least_new = _least_indent(new)
    if more and least_new is not None and least_new == (least_old or 0) + len(more):
        return [f"{more}{line}" if line.strip() else line for line in old]
    return list(old)


def _least_indent(lines: Iterable[str]) -> int | None:
    """Characters in front of the line that has fewest; None if all lines are empty."""
    return min((len(indent_of(line)) for line in lines if line.strip()), default=None)


def first_filled(lines: Iterable[str]) -> str:
    return next((line for line in lines if line.strip()), "")


def indent_span(text: str, start: int, old: str, new: str) -> str:
    """The new text of a span as it belongs there, if the old one leaves out the white space before it.

    Raises ToolError if that is uncertain.
    """
    missing = text[text.rfind("\n", 0, start) + 1 : start]
    lines = old.split("\n")
    if not missing or missing.strip() or not lines[0].strip():
        return new
    end = text.find("\n", start + len(old.rstrip("\n"))) + 1
    filled = [line for line in lines if line.strip()]
    below = first_filled(text[end : end + MAX_BELOW].split("\n"))
    made = "\n".join(indented(missing, filled, new.split("\n"), below))
    return made.removeprefix(missing)


def reindent(own: Sequence[str], body: Sequence[str], below: str) -> Sequence[str]:
    """The marked lines, with the new ones in the indentation of the file, whose lines are `own`, then `below`.

    If the old ones lack it, so may the new ones. Raises ToolError if that is uncertain.
    """
    more, less = shift(own, lines_without("+", body)) or ("", "")
    added = _indents("+", body)
    replaced = _indents("-", body)
    kept = _indents(" ", body)
    if not added or not (more or less):
        return body
    if more and len(kept) + len(replaced) == 1:
        return _reindent_around_one(more, body, below)
    least = min(added, key=len)
    if replaced:
        further = len(least) - min(len(indent) for indent in replaced)
        is_either = False
    else:
        further = 0
        # Such an indentation is in the file, but not in the lines that were given: it may be the file's own
        is_either = least not in kept and least in [indent_of(line) for line in own]
    if further == len(more) - len(less):
        return body
    has_room = all(indent.startswith(less) for indent in added)
    if further or is_either or not has_room:
        raise ToolError(UNCERTAIN)
    lines = list[str]()
    for line in body:
        is_new = line[0] == "+" and bool(line[1:].strip())
        lines.append(f"+{more}{line[1:].removeprefix(less)}" if is_new else line)
    return lines


def _indents(mark: str, body: Iterable[str]) -> list[str]:
    """The white space in front of the filled lines with this mark."""
    return [indent_of(line[1:]) for line in body if line[0] == mark and line[1:].strip()]


def _reindent_around_one(missing: str, body: Sequence[str], below: str) -> list[str]:
    """The same for one old line, which lacks `missing`."""
    old = [line for line in lines_without("+", body) if line.strip()]
    made = iter(indented(missing, old, lines_without("-", body), below))
    lines = list[str]()
    for line in body:
        if line[0] == "-":
            lines.append(line)
            continue
        new = f"+{next(made)}"
        lines.append(new if line[0] == "+" else line)
    return lines


def indented(missing: str, old: Sequence[str], new: Sequence[str], below: str) -> list[str]:
    """New lines as the file has them, if the first old one was given without its white space `missing`.

    `old` are the filled lines, all but the first as in the file; `below` is the filled one after them.
    Raises ToolError if it is uncertain which of the new lines lack the white space, too.
    """
    filled = [at for at, line in enumerate(new) if line.strip()]
    if not filled:
        return list(new)
    texts = [new[at] for at in filled]
    given = indent_of(old[0])
    first = indent_of(texts[0])
    if first != given:
        # Only the old line lacks it; one that is the same but for white space may be meant otherwise
        if first == missing + given and texts != [missing + old[0]]:
            return list(new)
        raise ToolError(UNCERTAIN)
    lacking = filled[:1]
    is_one_to_several = len(old) == 1 and len(texts) > 1
    if is_one_to_several and _lack_all(missing, old[0], texts, below):
        lacking = filled
    return [f"{missing}{line}" if at in lacking else line for at, line in enumerate(new)]


def _lack_all(missing: str, old: str, new: Sequence[str], below: str) -> bool:
    """Do all new lines lack the white space that the one old line lacks? Else only the first does.

    Raises ToolError if both may be so, or neither.
    """
    given = indent_of(old)
    own = missing + given
    indents = [indent_of(line) for line in new]
    is_first = all(each.startswith(own) or own.startswith(each) for each in indents)
    if old in new[1:]:  # a line that stays would lose its level
        is_first = False
    if given and given in indents[1:]:  # the first line has a part of it, and others the same part
        is_first = False
    if is_first:
        is_first = _follows_first(len(own), new, below)
    is_every = all(len(each) >= len(given) for each in indents)
    if is_every:
        is_every = _follows_every(missing, given, new, below)
    if is_first == is_every:
        raise ToolError(UNCERTAIN)
    # It would change the lines of a text, or mix tabs and spaces
    has_text = any(_is_quoted(line) for line in new)
    is_mixed = not set("".join(indents)) <= set(own)
    if is_every and (has_text or is_mixed):
        raise ToolError(UNCERTAIN)
    return is_every


def _follows_first(own: int, new: Sequence[str], below: str) -> bool:
    """Do new lines fit to the first one at the level `own`, and the line below, which stays, to the last one?"""
    second = _second(new)
    opens, _ = _opens(new[0], second)
    is_deeper = len(indent_of(second)) > own
    if is_deeper != opens:
        return False
    last = len(indent_of(new[-1]))
    if last == own:
        return True
    least = min(len(indent_of(line)) for line in new[1:])
    opens, _ = _opens(new[-1], below)
    return opens or len(indent_of(below)) <= least


def _follows_every(missing: str, given: str, new: Sequence[str], below: str) -> bool:
    """The same if all of them are to be moved by `missing`."""
    first = new[0].strip()
    second = _second(new)
    last = len(indent_of(new[-1]))
    is_back = last == len(given)
    if is_back:
        return True
    if len(indent_of(below)) > last + len(missing):
        return False
    opens, column = _opens(first, second)
    level = len(indent_of(second)) - len(given)
    is_deeper = level > 0
    if is_deeper != opens:
        return False
    if level == 0 and LEAVING.match(first):
        return False
    own = missing + given
    if level + len(given) <= len(own):
        return True
    # One level is less than all of them, but in brackets
    step = _step(own)
    usual = step if column == len(first) else column  # if only the first line lacks it
    is_aligned = level in (column, 2 * step) or level + len(given) != len(own) + usual
    return column > 0 and is_aligned


def _step(indent: str) -> int:
    """Characters of a level, by a guess."""
    if "\t" in indent:
        return 1
    return 2 if len(indent) % 4 else 4


def _second(new: Sequence[str]) -> str:
    """The line after the first one; comments stand anywhere."""
    return next((line for line in new[1:] if not PROSE.match(line.strip())), new[1])


def _is_quoted(line: str) -> bool:
    """Does a text of several lines begin or end here?"""
    return any(line.count(quotes) % 2 for quotes in ('"""', "'''", "`"))


def _opens(first: str, second: str) -> tuple[bool, int]:
    """Has the second line to stand deeper than the first? And after how many characters a bracket is open, or 0."""
    first = first.strip()
    if PROSE.match(first) or _is_quoted(first):
        return False, 0
    code = STRING.sub(lambda found: "_" * len(found[0]), first)
    code = REMARK.sub("", code)
    columns = list[int]()
    for at, char in enumerate(code, 1):
        if char in "([{":
            columns.append(at)
        elif char in ")]}" and columns:
            columns.pop()
    column = columns[-1] if columns else 0
    if second.strip().startswith((")", "]", "}")):
        return False, column
    is_open = column > 0 or bool(OPENING.search(code))
    return is_open, column
