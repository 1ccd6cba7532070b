"""Why a text for edit or apply_patch is not in a file: the likely cause, and the nearest lines."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coder.tools.text import Text

MAX_NEAREST = 40  # lines that an error shows


@dataclass(frozen=True)
class Slip:
    """What models write that is not in the file: a pattern, what to say, and what is meant."""

    pattern: str
    cause: str
    meant: str | Callable[[re.Match[str]], str] = ""


ENTITIES = {"&lt;": "<", "&gt;": ">", "&amp;": "&", "&quot;": '"', "&#39;": "'"}
SLIPS = (
    Slip(
        r"(?m)^ *\d+[\t|→]",
        cause="It seems to hold line numbers, which are not part of the file.",
    ),
    Slip(
        r"\\n",
        meant="\n",
        cause=r"It holds \n as two characters: send real newlines.",
    ),
    Slip(
        r"""\\(?=["'`])|&(?:lt|gt|amp|quot|#39);""",
        meant=lambda escape: ENTITIES.get(escape[0], ""),
        cause=r"It seems escaped (\", &gt;): give the characters of the file.",
    ),
    Slip(
        r"(?m)^\s*(?:#|//|/\*|--)?\s*(?:\.\.\.|…).*$",
        cause="... stands for nothing: give all lines.",
    ),
    Slip(
        r"(?m)^(?:[-+]|(?:<{5,}|={5,}|>{5,}|```).*$)",
        cause=(
            "It has marks of a diff or of Markdown (-, +, <<<<<<<, ```): give only the file's text."
        ),
    ),
)


def advice(
    file: Text,
    old: Sequence[str],
    new: Sequence[str],
    name: str,
) -> str:
    """What a model needs to mend a change: the nearest lines with numbers and the likely cause."""
    starts = range(len(file.lines)) if any(new) else ()
    done = [at for at in starts if file.lines[at : at + len(new)] == new]
    if len(done) == 1:
        there = f"the new text is already there, at line {done[0] + 1}"
        return f"the old text is not in {name}; {there}: nothing to do if that is the place."
    meant, cause = _find_cause(file, old)
    first = _nearest_line(file.lines, [line.strip() for line in meant])
    if first < 0:
        way = "Read the file, or search for the text with grep."
        return f"the old text is not in {name}, nor anything like it. {way}"
    if not cause:
        near = file.lines[first : first + len(old)]
        cause = _say_difference(file, old, near)
    start = max(0, first - 1)
    end = first + min(len(old), MAX_NEAREST) + 1
    numbered = enumerate(file.lines[start:end], start + 1)
    text = "\n".join(f"{number}\t{line}" for number, line in numbered)
    way = "The nearest lines are (copy without the numbers)"
    return f"the old text is not in {name}. {cause} {way}:\n{text}"


def _say_difference(file: Text, old: Sequence[str], near: Sequence[str]) -> str:
    if _without_space(near) == _without_space(old):
        return "White space differs (indentation, or space inside a line)."
    if file.has_changed:
        return "The file has changed since it was read."
    return "It differs, or the file has changed."


def _without_space(lines: Sequence[str]) -> str:
    return "".join("".join(lines).split())


def _find_cause(file: Text, old: Sequence[str]) -> tuple[list[str], str]:
    """(the old lines without a slip that keeps some from being found, what to say of it or "")."""
    own = {"", *(line.strip() for line in file.lines)}

    def count_unknown(text: str) -> int:
        return sum(line.strip() not in own for line in text.split("\n"))

    text = "\n".join(old)
    for slip in SLIPS:
        meant = re.sub(slip.pattern, slip.meant, text)
        if count_unknown(meant) < count_unknown(text):
            return meant.split("\n"), slip.cause
    return list(old), ""


def _nearest_line(lines: list[str], wanted: list[str]) -> int:
    """The line at which the wanted ones would begin, by the rarest or a similar one, or -1."""
    bare = [line.strip() for line in lines]
    count = Counter(bare)
    there = [line for line in wanted if line and count[line]]
    if there:
        anchor = like = min(there, key=lambda line: count[line])
    else:
        anchor = max(wanted, key=len)
        similar = difflib.get_close_matches(anchor, bare[:5000], 1)
        if not similar:
            return -1
        like = similar[0]
    return max(0, bare.index(like) - wanted.index(anchor))
