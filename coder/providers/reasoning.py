"""What a model thinks: the names it comes under, tags in front of an answer, and what has to go back with the message."""

from __future__ import annotations

from itertools import chain
from typing import Any

REASONING = ("reasoning_content", "reasoning", "reasoning_text")  # C7: the first that is not empty
THINK = "think_tag"  # C9: the name under which thoughts between tags enter the history
# R26, T28
ECHOED = (
    "reasoning_content",
    "reasoning_details",
    "thinking_blocks",
    "extra_content",
    "reasoning_opaque",
)


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
        if groups and _goes_on(groups[-1], entry):
            groups[-1].append(entry)
        else:
            groups.append([entry])
    return [_merged(group) if len(group) > 1 else group[0] for group in groups]


def _goes_on(group: list[Any], entry: Any) -> bool:
    """Is this a further piece of the same entry? What is encrypted comes whole; a thought ends with its signature, which
    comes whole, too: another one belongs to a thought whose text is not shown."""
    last = group[-1]
    if (
        not (isinstance(last, dict) and isinstance(entry, dict))
        or "data" in last.keys() & entry.keys()
    ):
        return False
    more = entry.get("thinking") or (entry.get("type") == "thinking" and entry.get("signature"))
    if more and any(piece.get("signature") for piece in group):
        return False
    return all(entry.get(name) == last.get(name) for name in ("type", "index", "id"))


def _merged(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """Later members win; text grows."""
    merged = {name: value for piece in pieces for name, value in piece.items() if value is not None}
    for name in merged.keys() & {"thinking", "text", "summary"}:
        merged[name] = (
            "".join(piece[name] for piece in pieces if isinstance(piece.get(name), str))
            or merged[name]
        )
    return merged


class ThinkTag:
    """C9: thoughts in front of an answer, between tags that may be cut anywhere. Tags later in a text are text."""

    OPEN, CLOSE = "<think>", "</think>"
    MOST = 100  # characters of white space in front of a tag

    def __init__(self) -> None:
        self.held = ""
        self.split = self._before

    def _before(self, text: str) -> tuple[str, str]:
        """(thought, text) of this piece: at the start, while it may still become the tag."""
        self.held += text
        begun = self.held.lstrip()
        if begun.startswith(self.OPEN):
            self.held, self.split = "", self._inside
            return self._inside(begun[len(self.OPEN) :])
        if self.OPEN.startswith(begun) and len(self.held) < self.MOST:
            return "", ""
        self.split = self._text
        return "", self.held

    def _inside(self, text: str) -> tuple[str, str]:
        thought, closed, text = (self.held + text).partition(self.CLOSE)
        if closed:
            self.held, self.split = "", self._after
            return thought, self._after(text)[1]
        cut = next(
            (n for n in range(len(self.CLOSE) - 1, 0, -1) if thought.endswith(self.CLOSE[:n])), 0
        )
        self.held = thought[len(thought) - cut :]
        return thought[: len(thought) - cut], ""

    def _after(self, text: str) -> tuple[str, str]:
        """Behind the tag, while there is nothing but white space."""
        text = text.lstrip()
        if text:
            self.split = self._text
        return "", text

    def _text(self, text: str) -> tuple[str, str]:
        return "", text

    def rest(self) -> tuple[str, str]:
        """What was held back, when no more comes."""
        held = self.held if self.split in (self._before, self._inside) else ""
        thinking, self.held, self.split = self.split == self._inside, "", self._text
        return (held, "") if thinking else ("", held)
