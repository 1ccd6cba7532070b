"""Where the lines of a change go in a file, and what is written there; for edit and apply_patch.

A change is a list of marked lines, as in a patch: a space before a line that stays, - before one
that goes, + before a new one. Lines that stay are never written, so they keep their white space,
punctuation and ending. New lines get the indentation and punctuation that the lines around them
prove; a change without that proof is refused, because a wrong line costs more than an error that
shows the right ones.
"""

from __future__ import annotations

import difflib
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby

from coder.tools.workspace import Text
from coder.types import ToolError

# What is written for plain characters; each pair is one character long, so offsets hold.
PUNCTUATION = str.maketrans(
    "‘’‚‛“”„‟‐‑‒–—―−\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000",
    "''''\"\"\"\"-------" + 13 * " ",
)
View = Callable[[str], str]


def plain(text: str) -> str:
    return text.translate(PUNCTUATION)


def loosest(line: str) -> str:
    return plain(line).strip()


VIEWS: tuple[View, ...] = (str, str.rstrip, str.strip, loosest)


# ---- lines -------------------------------------------------------------------------------------


def lines_of(text: str) -> list[str]:
    return text.removesuffix("\n").split("\n") if text else []


def lines_without(mark: str, body: Sequence[str]) -> list[str]:
    """The old lines are those without +, the new ones those without -."""
    return [line[1:] for line in body if line[0] != mark]


def marked_lines(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """The marked lines that turn one text into the other; white space at an end is no change."""
    body = list[str]()
    for tag, a, b, c, d in steps(*([line.rstrip() for line in each] for each in (old, new))):
        body += [(" " if tag == "equal" else "-") + line for line in old[a:b]]
        body += [f"+{line}" for line in new[c:d] if tag != "equal"]
    return body


def steps(old: Sequence[str], new: Sequence[str]) -> Sequence[tuple[str, int, int, int, int]]:
    return difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()


def indentation(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def shift(own: Sequence[str], wanted: Sequence[str]) -> tuple[str, str] | None:
    """(white space that the file has more, has less) in front; None where lines differ in that."""
    both = [(plain(line), plain(want)) for line, want in zip(own, wanted) if want.strip()]
    pairs = [(indentation(line), indentation(want)) for line, want in both]
    ours, theirs = pairs[0] if pairs else ("", "")
    shorter = ours.endswith(theirs)
    more, less = (ours.removesuffix(theirs), "") if shorter else ("", theirs.removesuffix(ours))
    return (more, less) if all(less + line == more + want for line, want in pairs) else None


def _proofs_of_indentation(own: Sequence[str], body: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Are the new lines of each group indented as the `old` ones, or as those of the `file`?

    With each: does it prove it alone, or only contradict another?
    """
    old, at = lines_without("+", body), 0
    for stays, lines in groupby(body, lambda line: line[0] == " "):
        group = list(lines)
        first, at = at, at + len(lines_without("+", group))
        new = [] if stays else [line for line in lines_without("-", group) if line.strip()]
        if not new:
            continue
        for line in {line.rstrip() for line in new} & {line.rstrip() for line in own[first:at]}:
            yield "file", _has_words(line)
        replaced = [line for line in old[first:at] if line.strip()]
        if replaced:
            similar = len(replaced) == len(new) or _are_similar(replaced[0], new[0])
            for measure in (_first, _least):
                yield from _proof(measure(replaced), measure(own[first:at]), measure(new), similar)
        elif not opens("".join(own[:first]).rstrip()):  # alike to both its neighbours
            above, beside = _first(own[:first][::-1]), _first(own[first:])
            if above == beside >= 0:
                yield from _proof(_first(old[first:]), beside, _first(new), True)


def _proof(old: int, own: int, new: int, alone: bool) -> Iterator[tuple[str, bool]]:
    if new in (old, own):
        yield "old" if new == old else "file", alone


def _has_words(line: str) -> bool:
    return bool(re.search(r"\w", line))


def _are_similar(line: str, other: str) -> bool:
    return difflib.SequenceMatcher(None, line.strip(), other.strip()).ratio() > 0.6


def _first(lines: Sequence[str]) -> int:
    return next((len(indentation(line)) for line in lines if line.strip()), -1)


def _least(lines: Sequence[str]) -> int:
    return min((len(indentation(line)) for line in lines if line.strip()), default=-1)


def opens(line: str) -> bool:
    """May the next line belong deeper than this one?"""
    return bool(re.search(r"([:{(\[,\\=+|&]|\b(do|then|else))\s*$", line))


def numbered(lines: Sequence[str], first: int) -> str:
    return "\n".join(f"{number}\t{line}" for number, line in enumerate(lines[:40], first))


def _has_typographic(meant: dict[str, set[str]]) -> bool:
    """Is there a typographic character in the change where the file has a plain one?"""
    return any(plain(ours) == ours for theirs, forms in meant.items() for ours in forms - {theirs})


def _code_points(characters: set[str]) -> str:
    return " and ".join(f"{each} (U+{ord(each):04X})" for each in sorted(characters))


# ---- a file ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A span of `Lines.text` and what belongs there."""

    start: int
    end: int
    new: str


class Lines:
    """A file's text with plain line endings and a newline at its end, and its lines."""

    def __init__(self, file: Text) -> None:
        self.newline = file.newline
        self.ended = not file.text or file.text.endswith("\n")
        self.file = file if self.ended else replace(file, text=file.text + file.newline)
        self.text = self.file.text.replace("\r\n", "\n")
        self.lines = self.text.split("\n")[:-1]
        self.starts = [0, *accumulate(len(line) + 1 for line in self.lines)]

    def spliced(self, places: Iterable[Place]) -> str:
        """The file's own text with the places filled."""
        raw, parts, at = self.file.text, list[str](), 0
        for place in places:
            start, end = (
                spot + bisect_left(self.file.breaks, spot) for spot in (place.start, place.end)
            )
            parts += [raw[at:start], place.new.replace("\n", self._newline_at(start, end))]
            at = end
        text = "".join([*parts, raw[at:]])
        return text if self.ended else text.removesuffix(self.newline)

    def _newline_at(self, start: int, end: int) -> str:
        """Of the lines that are replaced, or the line before those that are added."""
        raw = self.file.text
        at = start - 1 if start == end and start else raw.find("\n", start)
        return self.newline if at < 0 else "\r\n" if raw[at - 1 : at + 1] == "\r\n" else "\n"

    def fits(self, wanted: Sequence[str], view: View, start: int = 0) -> list[int]:
        """From `start`, the lines at which all the wanted ones are in a view, shifted alike."""
        seen, sought = [view(line) for line in self.lines], [view(line) for line in wanted]
        size = len(sought)
        return [
            at
            for at in range(start, len(seen) - size + 1)
            if seen[at : at + size] == sought
            and shift(self.lines[at : at + size], wanted) is not None
        ]

    def changes(self, at: int, body: Sequence[str], twice: bool = False) -> list[Place]:
        """What the marked lines change where their old ones fit at line `at`.

        `twice`: lines that stay were written in the old text and in the new one. Raises ToolError.
        """
        old, places = lines_without("+", body), list[Place]()
        own = self.lines[at : at + len(old)]
        try:
            new = iter(self._respelled(own, old, self._reindented(own, body, twice)))
        except ToolError as error:
            raise ToolError(
                f"{error} The lines of the file are:\n{numbered(own, at + 1)}"
            ) from None
        start, text = at, ""
        # The last one ends a group of changed lines
        for mark in [line[0] for line in body] + [" "]:
            if mark == "+":
                text += next(new) + "\n"
            elif mark == "-":
                at += 1
            else:
                if text or at > start:
                    places.append(Place(self.starts[start], self.starts[at], text))
                next(new, None)
                at += 1
                start, text = at, ""
        return places

    def _reindented(self, own: list[str], body: Sequence[str], twice: bool) -> list[str]:
        """The new lines in the file's indentation."""
        old, new = lines_without("+", body), lines_without("-", body)
        more, less = shift(own, old) or ("", "")
        written = [line for line in body if line[1:].strip()]
        if not (more or less) or not any(line[0] == "+" for line in written):
            return new
        proofs = set(_proofs_of_indentation(own, body))
        if twice:
            proofs |= {("old", _has_words(line)) for line in written if line[0] == " "}
            proofs.update(_proof(_least(old), _least(own), _least(new), False))
        said = {each for each, _ in proofs} if any(alone for _, alone in proofs) else set()
        if said == {"file"}:
            return new
        if said == {"old"} and all(line[1:].startswith(less) for line in written):
            moved = [more + line.removeprefix(less) if line.strip() else line for line in new]
            levels = {indentation(line) for line in old if line.strip()}
            if len(levels) > 1 or levels >= {indentation(line) for line in new if line.strip()}:
                return moved
        raise ToolError(
            "the file has the old lines in another indentation, and whether the new ones lack it too "
            "is not certain. Write both with the indentation of the file."
        )

    def _respelled(self, own: list[str], old: list[str], new: list[str]) -> list[str]:
        level = [
            indentation(line) + want.strip() + line[len(line.rstrip()) :] if line.strip() else line
            for line, want in zip(own, old)
        ]
        if level == own:
            return new
        return self.respelled("\n".join(own), "\n".join(level), "\n".join(new)).split("\n")

    def respelled(self, own: str, old: str, new: str) -> str:
        """`new` in the punctuation of the file, which has `own` for an `old` of the same length."""
        meant = defaultdict[str, set[str]](set)
        for ours, theirs in zip(own, old):
            meant[theirs].add(ours)
        parts, at = list[str](), 0
        before, after = old.splitlines(keepends=True), new.splitlines(keepends=True)
        for _, a, b, c, d in steps(before, after):
            was, now = "".join(before[a:b]), "".join(after[c:d])
            for tag, i, j, k, m in (
                steps(was, now) if was != now else [("equal", 0, len(was), 0, 0)]
            ):
                kept = tag == "equal"
                parts += (
                    own[at + i : at + j]
                    if kept
                    else [self._form_of(each, meant) for each in now[k:m]]
                )
            at += len(was)
        return "".join(parts)

    @cached_property
    def _characters(self) -> set[str]:
        return set(self.text)

    def _form_of(self, character: str, meant: dict[str, set[str]]) -> str:
        """A character of new text in the one form that the file has of it.

        As it is where the old text does not show that the change has other forms than the file.
        """
        known = meant.get(character, {character})
        typed = plain(character) == character
        if known == {character} and (typed or character in meant or not _has_typographic(meant)):
            return character
        forms = {other for other in self._characters if plain(other) == plain(character)}
        if len(forms) == 1:
            return forms.pop()
        if not forms or (typed and character in known):
            return plain(character)
        raise ToolError(
            f"the old text has other punctuation than the file, and which of {_code_points(forms)} "
            "the new one is to have is not certain. Write both with the characters of the file, or "
            "without these lines."
        )
