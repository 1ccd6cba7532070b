"""What a model thinks: the names it comes under, tags in front of an answer, and what has to go back with the message.

What it leaves out: how much a model is asked to think (profile.py), and the rest of an answer (wire.py).
"""

from __future__ import annotations

from typing import Any

REASONING = ("reasoning_content", "reasoning", "reasoning_text")  # C7: the first that is not empty
THINK = "think_tag"  # C9: the name under which thoughts between tags enter the history
ECHOED = ("reasoning_content", "reasoning_details", "extra_content", "reasoning_opaque")  # R26, T28


def joined(before: Any, piece: Any) -> Any:
    """Two pieces of one member: texts and lists grow, objects take what is new; an entry that goes on is one entry."""
    if not (before and piece):
        return before or piece
    if isinstance(before, str) and isinstance(piece, str):
        return before + piece
    if isinstance(before, dict) and isinstance(piece, dict):
        return before | piece
    if not (isinstance(before, list) and isinstance(piece, list)):
        return piece
    for entry in piece:
        last = before[-1] if before else None
        goes_on = isinstance(entry, dict) and isinstance(last, dict) and all(
            entry.get(key) == last.get(key) for key in ("type", "index", "id"))
        before = [*before[:-1], _grown(last, entry)] if goes_on else [*before, entry]
    return before


def _grown(entry: Any, piece: dict[str, Any]) -> dict[str, Any]:
    grown: dict[str, Any] = entry | piece
    for name in ("text", "summary"):
        if isinstance(entry.get(name), str) and isinstance(piece.get(name), str):
            grown[name] = entry[name] + piece[name]
    return grown


class ThinkTag:
    """C9: thoughts in front of an answer, between tags that may be cut anywhere. Tags later in a text are text."""

    OPEN, CLOSE = "<think>", "</think>"

    def __init__(self) -> None:
        self.held = ""
        self.split = self._before

    def _before(self, text: str) -> tuple[str, str]:
        """(thought, text) of this piece: at the start, while it may still become the tag."""
        self.held += text
        begun = self.held.lstrip()
        if begun.startswith(self.OPEN):
            self.held, self.split = "", self._inside
            return self._inside(begun[len(self.OPEN):])
        if self.OPEN.startswith(begun):
            return "", ""
        self.split = self._text
        return "", self.held

    def _inside(self, text: str) -> tuple[str, str]:
        thought, closed, text = (self.held + text).partition(self.CLOSE)
        if closed:
            self.held, self.split = "", self._after
            return thought, self._after(text)[1]
        cut = next((n for n in range(len(self.CLOSE) - 1, 0, -1) if thought.endswith(self.CLOSE[:n])), 0)
        self.held = thought[len(thought) - cut:]
        return thought[:len(thought) - cut], ""

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
