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
LEAVING = re.compile(r"(?:return|raise|break|continue)\b")  # nothing follows beside it
STRING = re.compile(r"""(['"])(?:\\.|(?!\1).)*\1""")
REMARK = re.compile(r"\s+#.*|(?<=[;{}])\s*//.*")
WAY = "Write the old and the new lines with the white space that the file has."
UNCERTAIN = f"the file has these lines in another indentation. {WAY}"


def lines_without(mark: str, body: Iterable[str]) -> list[str]:
    """The old lines are those without +, the new ones those without -."""
    return [line[1:] for line in body if line[0] != mark]


def shift(own: Sequence[str], wanted: Sequence[str]) -> tuple[str, str] | None:
    """(white space that the file has more, has less) in front; None where lines differ in that."""
    pairs = [(indent_of(line), indent_of(want)) for line, want in zip(own, wanted) if want.strip()]
    ours, theirs = pairs[0] if pairs else ("", "")
    shorter = ours.endswith(theirs)
    more, less = (ours.removesuffix(theirs), "") if shorter else ("", theirs.removesuffix(ours))
    return (more, less) if all(less + line == more + want for line, want in pairs) else None


def indent_of(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def as_new_lines(own: Sequence[str], old: Sequence[str], new: Sequence[str]) -> list[str]:
    """Old lines in the indentation of the file, if the new ones have it and only the old ones lack it."""
    more, _ = shift(own, old) or ("", "")
    theirs, ours = ([len(indent_of(line)) for line in each if line.strip()] for each in (old, new))
    if more and ours and min(ours) == min(theirs) + len(more):
        return [more + line if line.strip() else line for line in old]
    return list(old)


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

    Where the old ones lack it, so may the new ones. Raises ToolError where that is uncertain.
    """
    old = lines_without("+", body)
    more, less = shift(own, old) or ("", "")
    filled = [(line[0], indent_of(line[1:])) for line in body if line[1:].strip()]
    added = [indent for mark, indent in filled if mark == "+"]
    replaced = [len(indent) for mark, indent in filled if mark == "-"]
    if not (more or less) or not added:
        return body
    if more and len(filled) - len(added) == 1:
        return _reindent_around_one(more, body, below)
    further = min(map(len, added)) - min(replaced) if replaced else 0
    if further == len(more) - len(less):
        return body
    kept, owned = {indent for mark, indent in filled if mark == " "}, set(map(indent_of, own))
    is_either = not replaced and min(added, key=len) in owned - kept  # it may be the file's own
    if further or is_either or not all(indent.startswith(less) for indent in added):
        raise ToolError(UNCERTAIN)
    return [
        f"+{more}{line[1:].removeprefix(less)}" if line[0] == "+" and line[1:].strip() else line
        for line in body
    ]


def _reindent_around_one(missing: str, body: Sequence[str], below: str) -> list[str]:
    """The same for one old line, which lacks `missing`."""
    old = [line for line in lines_without("+", body) if line.strip()]
    made = iter(indented(missing, old, lines_without("-", body), below))
    lines = list[str]()
    for line in body:
        new = line if line[0] == "-" else f"+{next(made)}"
        lines.append(new if line[0] == "+" else line)
    return lines


def indented(missing: str, old: Sequence[str], new: Sequence[str], below: str) -> list[str]:
    """New lines as the file has them, where the first old one was given without its white space `missing`.

    `old` are the filled lines, all but the first as in the file; `below` is the filled one after them.
    Raises ToolError if it is uncertain which of the new lines lack the white space, too.
    """
    filled = [at for at, line in enumerate(new) if line.strip()]
    texts = [new[at] for at in filled]
    if not texts:
        return list(new)
    lacking = list[int]()
    if indent_of(texts[0]) == indent_of(old[0]):
        is_first = len(old) > 1 or len(texts) == 1 or not _lack_all(missing, old[0], texts, below)
        lacking = filled[:1] if is_first else filled
    elif indent_of(texts[0]) != missing + indent_of(old[0]) or texts == [missing + old[0]]:
        raise ToolError(UNCERTAIN)
    return [missing + line if at in lacking else line for at, line in enumerate(new)]


def _lack_all(missing: str, old: str, new: Sequence[str], below: str) -> bool:
    """Do all new lines lack the white space that the one old line lacks? Else only the first does.

    Raises ToolError if both may be so, or neither.
    """
    own, given = missing + indent_of(old), indent_of(old)
    indents = [indent_of(line) for line in new]
    is_comparable = all(each.startswith(own) or own.startswith(each) for each in indents)
    # A line that stays would lose its level
    is_first = is_comparable and old not in new[1:] and _follows_first(len(own), new, below)
    is_every = min(map(len, indents)) >= len(given) and _follows_every(missing, given, new, below)
    if is_every and (any(map(_is_quoted, new)) or not set("".join(indents)) <= set(own)):
        raise ToolError(UNCERTAIN)  # it would change the lines of a text, or mix tabs and spaces
    if is_first == is_every:
        raise ToolError(UNCERTAIN)
    return is_every


def _follows_first(own: int, new: Sequence[str], below: str) -> bool:
    """Do new lines fit to the first one at the level `own`, and the line below, which stays, to the last one?"""
    second, last = _second(new), len(indent_of(new[-1]))
    opens, _ = _opens(new[0], second)
    if (len(indent_of(second)) > own) != opens:
        return False
    return len(indent_of(below)) <= last or last == own or _opens(new[-1], below)[0]


def _follows_every(missing: str, given: str, new: Sequence[str], below: str) -> bool:
    """The same where all of them are to be moved by `missing`."""
    first, second, last = new[0].strip(), _second(new), len(indent_of(new[-1]))
    if last != len(given) and len(indent_of(below)) > last + len(missing):
        return False
    opens, column = _opens(first, second)
    level = len(indent_of(second)) - len(given)
    fits = (level > 0) == opens and not (level == 0 and LEAVING.match(first))
    own = missing + given
    if level + len(given) > len(own):  # one level is less than all of them, but in brackets
        step = _step(own)
        usual = step if column == len(first) else column  # where only the first line lacks it
        is_aligned = level in (column, 2 * step) or level + len(given) != len(own) + usual
        fits = fits and column > 0 and is_aligned
    return fits or last == len(given)


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
    code, columns = REMARK.sub("", code), list[int]()
    for at, char in enumerate(code, 1):
        if char in "([{":
            columns.append(at)
        elif char in ")]}" and columns:
            columns.pop()
    closes = second.strip()[:1] in (")", "]", "}")
    column = columns[-1] if columns else 0
    return not closes and (column > 0 or bool(OPENING.search(code))), column
