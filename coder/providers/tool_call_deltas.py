"""Tool calls out of the pieces that arrive: which piece belongs to which call, and what its arguments are.

`ToolCallAssembler.add` takes one piece of one delta; `finished` gives every call with its entry for the history. No rule
asks which server it is.
"""

from __future__ import annotations

import json
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

from coder.events import ToolCallDelta
from coder.providers.text import mend, mend_all, new_id, safe_name
from coder.types import Message, ToolCall


@dataclass(slots=True)
class _Call:
    """A tool call while it arrives. `index` is a key and no position."""

    index: Any = None
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)  # of the arguments
    extra: dict[str, Any] = field(default_factory=dict)  # unknown members go back to the server

    def add(self, part: dict[str, Any], name: str, arguments: str) -> None:
        self.id = self.id or _as_text(part.get("id"))  # set once: some servers repeat it
        if name != self.name:  # the name so far, or a further piece of it
            self.name = name if name.startswith(self.name) else self.name + name
        self.pieces.append(arguments)
        known = ("index", "id", "type", "function")
        self.extra |= {k: v for k, v in part.items() if k not in known and v is not None}

    def is_complete(self) -> bool:
        """A name and arguments that are whole, as far as one can see; parsed only where they may be."""
        ends = "".join(self.pieces[-1:]).rstrip().endswith(("}", '"'))
        return bool(self.name) and ends and parse_arguments(self.pieces)[0] is not None


class ToolCallAssembler:
    """The calls of one answer, in order of arrival. `tool_names` are the tools that were offered."""

    def __init__(self, tool_names: Container[str] = ()) -> None:
        self.tool_names = tool_names
        self.calls: list[_Call] = []

    def __bool__(self) -> bool:
        return bool(self.calls)

    def add(self, part: dict[str, Any]) -> ToolCallDelta:
        """Take one piece; what it adds, for the screen."""
        function = part.get("function") or {}
        name, given = _as_text(function.get("name")), function.get("arguments")
        # some servers send an object
        arguments = given if isinstance(given, str) else "" if given is None else json.dumps(given)
        call = self._find_call(part, name, begins=bool(name and arguments.strip()))
        if call is None:
            call = _Call(part.get("index"))
            self.calls.append(call)
        call.add(part, name, arguments)
        return ToolCallDelta(call.id, call.name, mend(arguments))

    def _find_call(self, part: dict[str, Any], name: str, begins: bool) -> _Call | None:
        """The call that this piece belongs to: by id, else by index, else the last one; None for a new call. A piece that
        `begins` could stand alone."""
        index, call_id = part.get("index"), _as_text(part.get("id"))
        here = self._newest_with("index", index) if index is not None else None
        if not call_id:
            found = here or (self.calls[-1] if self.calls and (index is None or not name) else None)
            return None if found and begins and found.is_complete() else found
        known = self._newest_with("id", call_id)
        if known and (index is None or known.index == index or not name):
            return known
        # another id takes the index over; the same id at another index, with a name, is another call
        return here if here and here.id in ("", call_id) else None

    def _newest_with(self, member: str, value: Any) -> _Call | None:
        """The newest call with this id or index."""
        return next((c for c in reversed(self.calls) if getattr(c, member) == value), None)

    def finished(self) -> list[tuple[ToolCall, Message]]:
        """Each call and its form in the history."""
        made: list[tuple[ToolCall, Message]] = []
        seen: set[str] = set()
        for call in self.calls:
            if not (call.name or any(call.pieces)):
                continue
            arguments, problem = parse_arguments(call.pieces)
            try:
                arguments, extra = mend_all(arguments), mend_all(call.extra)
                text = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
            except ValueError as error:  # NaN, or nested too deeply
                arguments, extra, problem, text = None, {}, f"not usable: {error}", "{}"
            call_id = mend(call.id) if call.id and call.id not in seen else new_id()
            seen.add(call_id)
            name = self._valid_name(call.name)
            function = {"name": name, "arguments": text}
            entry = {"id": call_id, "type": "function", "function": function} | extra
            made.append((ToolCall(call_id, name, arguments, problem), entry))
        return made

    def _valid_name(self, name: str) -> str:
        """Without the prefix ("functions.") and tail ("<|channel|>") that some models add to an offered tool's name."""
        core = name.split("<|")[0].rsplit(".", 1)[-1].strip()
        return core if core in self.tool_names else safe_name(name)


def _as_text(value: Any) -> str:
    """An id or a name; some servers send numbers."""
    return value if isinstance(value, str) else "" if value is None else str(value)


# ---- arguments -------------------------------------------------------------------------------------


DECODER = json.JSONDecoder(strict=False)  # models write raw newlines inside strings


def parse_arguments(pieces: list[str]) -> tuple[dict[str, Any] | None, str]:
    """(the arguments, "") or (None, why not). Never closes a bracket or a quote that is missing: the call may be cut."""
    raw = "".join(pieces).strip()
    if not raw:
        return {}, ""
    try:
        value = DECODER.decode(raw)
        if isinstance(value, str):
            value = DECODER.decode(value or "{}")  # encoded twice
    except RecursionError:
        return None, "nested too deeply"
    except ValueError as error:
        value = _repeated_object(raw)
        if value is None:
            return None, f"not valid JSON: {error}"
    if value is None:
        return {}, ""
    if not isinstance(value, dict):
        return None, f"no JSON object but {json.dumps(value)[:80]}"
    return value, ""


def _repeated_object(raw: str) -> Any:
    """The object at the start where what follows repeats it or holds no other; an empty first one gives way."""
    rest, found = raw, list[Any]()
    while rest.startswith("{"):
        try:
            value, end = DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            return None
        found.append(value)
        rest = rest[end:].strip()
    found = [value for value in found if value] or found[:1]
    alike = found and all(value == found[0] for value in found)
    return found[0] if alike and "{" not in rest else None
