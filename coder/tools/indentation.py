"""The indentation of new lines, if the old ones were written in another one than the file has.

Models leave out white space in three ways: in all lines, in the first line only, or in the old text
only. Which lines lack it shows in how the lines fit to each other and to the line below; what fits
in two ways, or in no way, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from coder.types import ToolError

MAX_BELOW = 2_000  # characters in which the next line is looked for
OPENING = r"[:\\=]$"  # the end of a line that deeper lines follow
COMMENT = r"#|//|/\*|\*|--"  # how a comment ends says nothing about the next line
LEAVING = r"(?:return|raise|break|continue)\b"  # no line of the same level follows
STRING = r"""(['"])(?:\\.|(?!\1).)*\1"""
REMARK = r"\s+#.*|(?<=[;{}])\s*//.*"
WAY = "Write the old and the new lines with the white space that the file has."
UNCERTAIN = f"the file has these lines in another indentation. {WAY}"


def lines_without(mark: str, body: Iterable[str]) -> list[str]:
    """The texts of marked lines: the old ones are those without +, the new ones those without -."""
    return [line[1:] for line in body if line[0] != mark]


def shift(own: Sequence[str], wanted: Sequence[str]) -> tuple[str, str] | None:
    """(white space that only the file has, that only the wanted lines have) in front of each line.

    None if that differs from line to line.
    """
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


def filled(lines: Iterable[str]) -> list[str]:
    """The lines that are not empty."""
    return [line for line in lines if line.strip()]


def first_filled(lines: Iterable[str]) -> str:
    return next((line for line in lines if line.strip()), "")


def as_new_lines(own: Sequence[str], old: Sequence[str], new: Sequence[str]) -> list[str]:
    """Old lines in the indentation of the file, if the new ones have it and the old ones not."""
    more, _ = shift(own, old) or ("", "")
    if more and filled(new) and _least_indent(new) == _least_indent(old) + len(more):
        return _deeper(more, old)
    return list(old)


def _least_indent(lines: Iterable[str]) -> int:
    """Characters in front of the line that has fewest."""
    widths = [len(indent_of(line)) for line in filled(lines)]
    return min(widths, default=0)


def _deeper(indent: str, lines: Iterable[str]) -> list[str]:
    return [f"{indent}{line}" if line.strip() else line for line in lines]


def indent_span(
    text: str,
    start: int,
    old: str,
    new: str,
) -> str:
    """The new text of a span, indented if the old one leaves out the white space in front of it.

    Raises ToolError if that is uncertain.
    """
    missing = text[text.rfind("\n", 0, start) + 1 : start]
    lines = old.split("\n")
    if not missing or missing.strip() or not lines[0].strip():
        return new
    last = start + len(old.rstrip("\n"))
    end = text.find("\n", last) + 1
    below = first_filled(text[end : end + MAX_BELOW].split("\n"))
    new_lines = indented(missing, filled(lines), new.split("\n"), below)
    return "\n".join(new_lines).removeprefix(missing)


def reindent(own: Sequence[str], body: Sequence[str], below: str) -> Sequence[str]:
    """The marked lines, with the new ones in the indentation of the file.

    `own` are the file's lines, `below` the filled one after them. If the old lines lack white
    space, the new ones may lack it, too. Raises ToolError if that is uncertain.
    """
    more, less = shift(own, lines_without("+", body)) or ("", "")
    if more == less or not _indents("+", body):
        return body
    if more and len(_indents(" ", body)) + len(_indents("-", body)) == 1:
        return _reindent_around_one(more, body, below)
    if _has_indent_of_file(own, body, len(more) - len(less)):
        return body
    return [_reindented(line, more, less) for line in body]


def _has_indent_of_file(own: Sequence[str], body: Sequence[str], difference: int) -> bool:
    """Do only the old lines differ from the file, by this many characters of indentation?

    If not, the new lines differ by as many. Raises ToolError if that is uncertain.
    """
    replaced = _indents("-", body)
    least = min(_indents("+", body), key=len)
    further = 0
    if replaced:
        further = len(least) - len(min(replaced, key=len))
    if further == difference:
        return True
    if further:
        raise ToolError(UNCERTAIN)
    # If the file has this indentation, but not in the lines that stay, it may be the file's own
    is_own = least in [indent_of(line) for line in own]
    if is_own and not replaced and least not in _indents(" ", body):
        raise ToolError(UNCERTAIN)
    return False


def _reindented(line: str, more: str, less: str) -> str:
    """A marked line: if it is new, with white space added in front, or taken away."""
    text = line[1:]
    if line[0] != "+" or not text.strip():
        return line
    if not text.startswith(less):
        raise ToolError(UNCERTAIN)
    return f"+{more}{text.removeprefix(less)}"


def _indents(mark: str, body: Iterable[str]) -> list[str]:
    """The white space in front of the filled lines with this mark."""
    texts = [line[1:] for line in body if line[0] == mark]
    return [indent_of(text) for text in filled(texts)]


def _reindent_around_one(missing: str, body: Sequence[str], below: str) -> list[str]:
    """The same for one old line, which lacks `missing`."""
    old = filled(lines_without("+", body))
    new = iter(indented(missing, old, lines_without("-", body), below))
    lines = list[str]()
    for line in body:
        mark = line[0]
        text = line[1:] if mark == "-" else next(new)
        lines.append(f"+{text}" if mark == "+" else line)
    return lines


def indented(
    missing: str,
    old: Sequence[str],
    new: Sequence[str],
    below: str,
) -> list[str]:
    """New lines as the file has them, if the first old one lacks the white space `missing`.

    `old` are the filled lines, all but the first as in the file; `below` is the filled one after
    them. Raises ToolError if it is uncertain which of the new lines lack the white space, too.
    """
    texts = filled(new)
    if not texts:
        return list(new)
    indent = indent_of(old[0])
    first = indent_of(texts[0])
    if first != indent:
        # Only the old line lacks it; one that is the same but for white space may be meant
        # otherwise
        if first == missing + indent and texts != [missing + old[0]]:
            return list(new)
        raise ToolError(UNCERTAIN)
    is_one_to_several = len(old) == 1 and len(texts) > 1
    if is_one_to_several and _lack_all(missing, old[0], texts, below):
        return _deeper(missing, new)
    at = new.index(texts[0])
    return [*new[:at], f"{missing}{texts[0]}", *new[at + 1 :]]


def _lack_all(
    missing: str,
    old: str,
    new: Sequence[str],
    below: str,
) -> bool:
    """Do all new lines lack the white space that the one old line lacks? Else only the first does.

    Raises ToolError if both may be so, or neither.
    """
    may_lack_first = _may_lack_first(missing, old, new) and _follows_first(
        len(missing + indent_of(old)), new, below
    )
    is_deep_enough = _least_indent(new) >= len(indent_of(old))
    may_lack_all = is_deep_enough and _follows_all(missing, indent_of(old), new, below)
    if may_lack_first == may_lack_all:
        raise ToolError(UNCERTAIN)
    if may_lack_all:
        _refuse_to_move(new, missing + indent_of(old))
    return may_lack_all


def _may_lack_first(missing: str, old: str, new: Sequence[str]) -> bool:
    """May only the first new line lack white space, as far as the indentations tell?"""
    indent = indent_of(old)
    own = missing + indent
    further = [indent_of(line) for line in new[1:]]
    if old in new[1:]:  # a line that stays would lose its level
        return False
    if indent and indent in further:  # the first line has a part of it, and others the same part
        return False
    return all(other.startswith(own) or own.startswith(other) for other in further)


def _refuse_to_move(new: Sequence[str], own: str) -> None:
    """Raises ToolError if moving would change lines of a string, or mix tabs and spaces."""
    indents = "".join(indent_of(line) for line in new)
    if any(_is_quoted(line) for line in new) or not set(indents) <= set(own):
        raise ToolError(UNCERTAIN)


def _follows_first(own: int, new: Sequence[str], below: str) -> bool:
    """Do new lines fit to the first one at the level `own`, and the line below to the last one?"""
    second = _second(new)
    opens, _ = _opens(new[0], second)
    is_deeper = len(indent_of(second)) > own
    if is_deeper != opens:
        return False
    last = len(indent_of(new[-1]))
    if last == own:
        return True
    opens, _ = _opens(new[-1], below)
    return opens or len(indent_of(below)) <= _least_indent(new[1:])


def _follows_all(
    missing: str,
    indent: str,
    new: Sequence[str],
    below: str,
) -> bool:
    """The same if all of them, which begin at `indent`, are moved by `missing`."""
    first = new[0].strip()
    second = _second(new)
    last = len(indent_of(new[-1]))
    if last == len(indent):
        return True
    if len(indent_of(below)) > last + len(missing):
        return False
    opens, column = _opens(first, second)
    level = len(indent_of(second)) - len(indent)
    is_deeper = level > 0
    if is_deeper != opens:
        return False
    if level == 0 and re.match(LEAVING, first):
        return False
    if level <= len(missing):
        return True
    # One level is less than all of them, but in brackets
    step = _step(missing + indent)
    if level in (column, 2 * step):
        return column > 0
    usual = step if column == len(first) else column  # if only the first line lacks it
    return column > 0 and level != len(missing) + usual


def _step(indent: str) -> int:
    """Characters of a level, by a guess."""
    if "\t" in indent:
        return 1
    return 2 if len(indent) % 4 else 4


def _second(new: Sequence[str]) -> str:
    """The line after the first one, if possible not a comment: those are indented anyhow."""
    return next(
        (line for line in new[1:] if not re.match(COMMENT, line.strip())),
        new[1],
    )


def _is_quoted(line: str) -> bool:
    """Does a text of several lines begin or end here?"""
    return any(line.count(quotes) % 2 for quotes in ('"""', "'''", "`"))


def _opens(first: str, second: str) -> tuple[bool, int]:
    """(has the second line to be deeper than the first; characters up to an open bracket, or 0)."""
    first = first.strip()
    if re.match(COMMENT, first) or _is_quoted(first):
        return False, 0
    code = re.sub(
        STRING,
        lambda match: "_" * len(match[0]),
        first,
    )
    code = re.sub(REMARK, "", code)
    column = _open_bracket(code)
    if second.strip().startswith((")", "]", "}")):
        return False, column
    return column > 0 or bool(re.search(OPENING, code)), column


def _open_bracket(code: str) -> int:
    """The number of characters up to the innermost bracket that is open at the end, or 0."""
    columns = [0]
    for column, char in enumerate(code, 1):
        if char in "([{":
            columns.append(column)
        elif char in ")]}" and len(columns) > 1:
            columns.pop()
    return columns[-1]
