"""What a model needs to mend a change whose old text is not in the file."""

from __future__ import annotations

import difflib
import re
from collections import Counter

from coder.tools.matching import lines_of, numbered, steps


def advice(
    lines: list[str], old: list[str], new: list[str], name: str, what: tuple[str, str]
) -> str:
    """What a model needs: the nearest lines with numbers, the likely cause, one next step.

    `what`: how the call names its old and its new text.
    """
    text, added = "\n".join(lines), "\n".join(new).strip()
    made = re.findall(rf"^[ \t]*{re.escape(added)}[ \t]*$", text, re.M) if added else []
    if len(made) == 1:  # as whole lines: a word that happens to be in the file says nothing
        line = text.count("\n", 0, text.find(made[0])) + 1
        made_already = f"{what[1]} is, at line {line}: this edit seems to be made already."
        return f"{what[0]} is not in {name}, but {made_already}"
    wanted = lines_of("\n".join(old).strip("\n")) or [""]
    first, likeness = _nearest(lines, wanted)
    if likeness < 0.5:
        way = "Read the file, or search for the text with grep."
        return f"{what[0]} is not in {name}, nor anything like it. {way}"
    cause = _cause(lines, first, wanted, what[0])
    return (
        f"{what[0]} is not in {name}. {cause} The nearest lines are:\n"
        f"{numbered(lines[max(0, first - 1) : first + len(wanted) + 1], max(1, first))}\n"
        f"Copy {what[0]} from them, without the line numbers."
    )


def _cause(lines: list[str], first: int, wanted: list[str], what: str) -> str:
    written = [line for line in wanted if line.strip()]
    if written and all(re.match(r"\s*\d+(\t|\||: )", line) for line in written):
        return "It seems to hold line numbers, which are not part of the file."
    first = max(0, first - len(wanted))
    around = lines[first : first + 3 * len(wanted) + 9]
    edits = list(steps(*(["".join(line.split()) for line in each] for each in (around, wanted))))
    for end in (0, -1):  # lines of the file before the first one and behind the last
        if edits[end][0] == "delete":
            edits.pop(end)
    edits = [each for each in edits if each[0] != "equal"]
    kinds = {each[0] for each in edits}
    if not kinds:
        return "White space differs (indentation, or space inside a line)."
    if kinds == {"delete"}:
        at = first + edits[0][1]
        return f"It lacks line {at + 1} of the file: {lines[at].strip()[:200]!r}."
    if kinds == {"insert"}:
        return f"The file has no such line there: {wanted[edits[0][3]].strip()[:200]!r}."
    return "The text differs, or the file has changed since it was read."


def _nearest(lines: list[str], wanted: list[str]) -> tuple[int, float]:
    """(index of the first line, likeness 0 to 1) of the run of lines most like the wanted ones."""
    bare = [line.strip() for line in lines]
    target = [re.sub(r"^\s*\d+(\t|\|)", "", line).strip() for line in wanted]
    longest = target.index(max(target, key=len))
    looked_for, count = set(target), Counter(bare)
    anchors = [number for number, line in enumerate(bare) if line and line in looked_for]
    if not anchors:
        best = difflib.get_close_matches(target[longest], bare[:5000], 1, 0.5)
        anchors = [bare.index(best[0])] if best else []
    anchors.sort(key=lambda anchor: count[bare[anchor]])  # the rarest lines say most
    starts = {
        max(0, anchor - (target.index(bare[anchor]) if bare[anchor] in target else longest))
        for anchor in anchors[: 2000 // len(target) + 20]
    }
    found = ((_likeness(bare[at : at + len(target)], target), -at) for at in starts)
    likeness, at = max(found, default=(0.0, 0))
    return -at, likeness


def _likeness(lines: list[str], wanted: list[str]) -> float:
    """By letters; of many lines by lines: difflib leaves out what is frequent in a long text."""
    if len(wanted) > 20:
        return difflib.SequenceMatcher(None, lines, wanted).ratio()
    return difflib.SequenceMatcher(None, "\n".join(lines), "\n".join(wanted)).ratio()
