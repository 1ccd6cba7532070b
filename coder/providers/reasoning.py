"""What a model thinks: the names it comes under, tags before an answer, and what goes back with the message."""

from __future__ import annotations

from itertools import chain
from typing import Any, Literal

REASONING = ("reasoning_content", "reasoning", "reasoning_text")  # the first that is not empty
THINK = "think_tag"  # the name under which thoughts between tags enter the history
ECHOED = (
    *("reasoning_content", "reasoning_details", "thinking_blocks"),
    *("extra_content", "reasoning_opaque"),
)
# What the assembler may add to an assistant message.
EXTRA_MEMBERS = {*REASONING, *ECHOED, THINK}


def joined(pieces: list[Any]) -> Any:
    """One member of a message from its pieces: texts are joined, objects take what is new, entries of lists go on."""
    if all(isinstance(piece, str) for piece in pieces):
        return "".join(pieces)
    if all(isinstance(piece, dict) for piece in pieces):
        return _merged(pieces)
    if not all(isinstance(piece, list) for piece in pieces):
        return pieces[-1]
    groups: list[list[Any]] = []  # of pieces of one entry
    for entry in chain.from_iterable(pieces):
        if groups and _continues(groups[-1], entry):
            groups[-1].append(entry)
        else:
            groups.append([entry])
    return [_merged(group) if len(group) > 1 else group[0] for group in groups]


def _continues(group: list[Any], entry: Any) -> bool:
    """Is this a further piece of the same entry? What is encrypted comes whole; a thought ends with its signature, which
    comes whole, too: another one belongs to a thought whose text is not shown."""
    last = group[-1]
    if not (isinstance(last, dict) and isinstance(entry, dict)):
        return False
    if "data" in last or "data" in entry:
        return False
    more = entry.get("thinking") or (entry.get("type") == "thinking" and entry.get("signature"))
    if more and any(piece.get("signature") for piece in group):
        return False
    return all(entry.get(name) == last.get(name) for name in ("type", "index", "id"))


def _merged(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """Later members win; text grows."""
    merged = {name: value for piece in pieces for name, value in piece.items() if value is not None}
    for name in merged.keys() & {"thinking", "text", "summary"}:
        texts = [piece[name] for piece in pieces if isinstance(piece.get(name), str)]
        merged[name] = "".join(texts) or merged[name]
    return merged


class ThinkTag:
    """Thoughts before an answer, between tags that may be cut anywhere. Tags later in a text are text."""

    OPEN, CLOSE = "<think>", "</think>"
    MAX_SPACE = 100  # characters of white space before a tag

    def __init__(self) -> None:
        self.state: Literal["before", "inside", "behind", "text"] = "before"
        self._held = ""  # what may be the beginning of a tag

    def split(self, text: str) -> tuple[str, str]:
        """(thought, text) of this piece, as far as it is known by now."""
        if self.state == "before":
            self._held += text
            begun = self._held.lstrip()
            if self.OPEN.startswith(begun) and len(self._held) < self.MAX_SPACE:
                return "", ""
            text = self._held
            self.state = "text"
            if begun.startswith(self.OPEN):
                self.state, self._held, text = "inside", "", begun[len(self.OPEN) :]
        thought = ""
        if self.state == "inside":
            thought, closed, text = (self._held + text).partition(self.CLOSE)
            if not closed:
                lengths = range(len(self.CLOSE) - 1, 0, -1)
                cut = next((n for n in lengths if thought.endswith(self.CLOSE[:n])), 0)
                thought, self._held = thought[: len(thought) - cut], thought[len(thought) - cut :]
                return thought, ""
            self.state = "behind"
        if self.state == "behind":  # white space between the tag and the text is dropped
            text = text.lstrip()
            self.state = "text" if text else "behind"
        return thought, text

    def rest(self) -> tuple[str, str]:
        """What was held back, when no more comes."""
        held = self._held if self.state in ("before", "inside") else ""
        thinking, self.state = self.state == "inside", "text"
        return (held, "") if thinking else ("", held)
