"""The pieces of tool calls -> whole calls. Servers number them by index, by id, by both or not at
all."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from coder.events import ToolCallDelta
from coder.providers.call_arguments import parse_arguments
from coder.providers.text import JsonObject, mend, mend_all, new_id, safe_name
from coder.types import Message, ToolCall

MEMBERS = {"index", "id", "type", "function"}  # of a piece of a call; others go back to the server


@dataclass(slots=True, eq=False)
class Call:
    """A tool call while it arrives. `index` is a key and no position."""

    index: Any = None
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)  # of the arguments
    extra: JsonObject = field(default_factory=dict)  # other members

    def is_complete(self) -> bool:
        """A name and arguments that are whole, as far as one can see."""
        last = self.pieces[-1].rstrip() if self.pieces else ""
        if not (self.name and last.endswith(("}", '"'))):  # parsed only if they may be whole
            return False
        return parse_arguments(self.pieces)[0] is not None

    def is_open(self) -> bool:
        """Whether arguments are missing, or a part of them."""
        if any(self.pieces):
            return self.arguments()[0] is None
        return bool(self.name)

    def arguments(self) -> tuple[JsonObject | None, str]:
        """As parse_arguments, of a call that is over. Some servers send the text so far with each
        piece."""
        parsed = parse_arguments(self.pieces)
        filled = [piece for piece in self.pieces if piece]
        if parsed[0] is None and all(b.startswith(a) for a, b in pairwise(filled)):
            return parse_arguments(filled[-1:])
        return parsed

    def finished(self, call_id: str) -> tuple[ToolCall, Message]:
        """The call, and its form in the history."""
        arguments, problem = self.arguments()
        try:
            arguments = mend_all(arguments)
            extra = mend_all(self.extra)
            text = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
        except ValueError as error:  # NaN, or nested too deeply
            arguments = None
            problem = f"not usable: {error}"
            extra = {}
            text = "{}"
        # some models put a prefix ("functions.") and a tail ("<|channel|>") to the name of a tool
        without_tail = self.name.partition("<|")[0]
        core = re.split(r"[.:/]", without_tail)[-1].strip()
        name = safe_name(core or self.name)
        entry = {
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": text},
        }
        return ToolCall(call_id, name, arguments or {}, problem), entry | extra


class ToolCallAssembler:
    """The calls of one answer, in order of arrival."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def add(self, part: JsonObject) -> ToolCallDelta:
        """Take one piece; returns what it adds, for the screen."""
        function = part.get("function") or {}
        name = as_text(function.get("name"))
        arguments = arguments_text(function.get("arguments"))
        call_id = as_text(part.get("id"))
        call = self._find_call(part.get("index"), call_id, name, arguments)
        if call is None:
            call = Call(part.get("index"))
            self.calls.append(call)
        call.id = call.id or call_id  # set once: some servers repeat it
        if name.startswith(call.name):
            call.name = name  # the name so far
        elif name != call.name:
            call.name += name  # a further piece of it
        call.pieces.append(arguments)
        for member, value in part.items():
            if member not in MEMBERS and value is not None:
                call.extra[member] = value
        return ToolCallDelta(call.id, call.name, mend(arguments))

    def _find_call(
        self,
        index: Any,
        call_id: str,
        name: str,
        arguments: str,
    ) -> Call | None:
        """The call that a piece belongs to: by id, else by index, else the last one; None for a new
        call."""
        if call_id:
            return self._find_by_id(index, call_id, name)
        call = self._newest_with("index", index)
        if call is None and self.calls and (index is None or not name):
            call = self.calls[-1]
        could_stand_alone = name and arguments.strip()
        if call and could_stand_alone and call.is_complete():
            return None
        return call

    def _find_by_id(self, index: Any, call_id: str, name: str) -> Call | None:
        """The call of a piece with an id; None for a new call.

        A piece with a known id, but another index and a name, begins another call. So does one with
        another id at a known index.
        """
        known = self._newest_with("id", call_id)
        if known and (index in (None, known.index) or not name):
            return known
        call = self._newest_with("index", index)
        return call if call and call.id in ("", call_id) else None

    def _newest_with(self, member: str, value: Any) -> Call | None:
        """None also if the value is None: many servers send no index."""
        for call in reversed(self.calls):
            if value is not None and getattr(call, member) == value:
                return call
        return None

    def finished(self) -> list[tuple[ToolCall, Message]]:
        """Each call and its form in the history."""
        made: list[tuple[ToolCall, Message]] = []
        seen: set[str] = set()
        for call in self.calls:
            if call.name or any(call.pieces):
                is_new = call.id and call.id not in seen
                call_id = mend(call.id) if is_new else new_id()
                seen.add(call_id)
                made.append(call.finished(call_id))
        return made


def arguments_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value)  # some servers send an object


def as_text(value: Any) -> str:
    """An id or a name; some servers send numbers."""
    return "" if value is None else str(value)
