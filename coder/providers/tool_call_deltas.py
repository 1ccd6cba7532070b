"""Tool calls out of the pieces that arrive: which piece belongs to which call, and what its arguments are.

`ToolCallAssembler.add` takes one piece of one delta; `finished` gives every call with its entry for the history. No rule
asks which server it is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container
from dataclasses import dataclass, field
from itertools import pairwise
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
    whole: dict[str, Any] | None = None  # arguments that came as an object
    extra: dict[str, Any] = field(default_factory=dict)  # unknown members go back to the server

    def add(self, part: dict[str, Any], function: dict[str, Any]) -> None:
        self.id = self.id or _text(part.get("id"))  # set once: some servers repeat it
        name = _text(function.get("name"))
        if name != self.name:  # the name so far, or a further piece of it
            self.name = name if name.startswith(self.name) else self.name + name
        arguments = function.get("arguments")
        if isinstance(arguments, dict) and arguments:
            self.whole = arguments
        elif arguments:
            self.pieces.append(str(arguments))
        known = ("index", "id", "type", "function")
        self.extra |= {k: v for k, v in part.items() if k not in known and v is not None}

    def arguments(self) -> tuple[dict[str, Any] | None, str]:
        """(the arguments, "") or (None, why not)."""
        return parse_arguments(self.pieces) if self.whole is None else (self.whole, "")

    def is_complete(self) -> bool:
        """A name and arguments that are whole, as far as one can see; parsed only where they may be."""
        ends = bool(self.pieces) and self.pieces[-1].rstrip().endswith(("}", '"'))
        return bool(self.name and (self.whole or ends) and self.arguments()[0] is not None)


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
        call = self._find(part, function)
        if call is None:
            call = _Call(part.get("index"))
            self.calls.append(call)
        call.add(part, function)
        arguments = function.get("arguments") or ""
        shown = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return ToolCallDelta(call.id, call.name, mend(shown))

    def _find(self, part: dict[str, Any], function: dict[str, Any]) -> _Call | None:
        """The call that this piece belongs to: by id, else by index, else the last one; None for a new call."""
        index, name, arguments = (
            part.get("index"),
            _text(function.get("name")),
            function.get("arguments"),
        )
        given = arguments.strip() if isinstance(arguments, str) else arguments
        begins = bool(name and given)  # it could stand alone
        here = self._last(index=index) if index is not None else None
        if call_id := _text(part.get("id")):
            return self._by_id(call_id, here, part, begins)
        found = here or (self.calls[-1] if self.calls and (index is None or not name) else None)
        if found and ((begins and found.is_complete()) or self._is_another(found.name, name)):
            return None  # a name after a whole call
        return found

    def _by_id(
        self, call_id: str, here: _Call | None, part: dict[str, Any], begins: bool
    ) -> _Call | None:
        function, index = part.get("function") or {}, part.get("index")
        known = self._last(id=call_id)
        if known and begins and index is None and known.is_complete():
            # the same id without an index: the call once more, or another one
            return known if _parsed(function["arguments"]) == known.arguments()[0] else None
        if known and (index is None or known.index == index or not function.get("name")):
            return known
        last = self.calls[-1] if self.calls else None
        if index is None and last and not (last.id or last.name):
            return last  # its arguments came first
        # another id takes the index over; the same id at another index, with a name, is another call
        return here if here and here.id in ("", call_id) else None

    def _last(self, **known: Any) -> _Call | None:
        """The newest call with this id or index."""
        ((member, value),) = known.items()
        return next((c for c in reversed(self.calls) if getattr(c, member) == value), None)

    def _is_another(self, name: str, more: str) -> bool:
        """The name of an offered tool behind another name is no piece of it; the call before it has no arguments."""
        offered = more in self.tool_names and name + more not in self.tool_names
        return bool(name) and offered and not more.startswith(name)

    def finished(self) -> list[tuple[ToolCall, Message]]:
        """Each call and its form in the history."""
        made: list[tuple[ToolCall, Message]] = []
        seen: set[str] = set()
        for call in self.calls:
            if not (call.name or call.pieces or call.whole):
                continue
            arguments, problem = call.arguments()
            try:
                arguments, extra = mend_all(arguments), mend_all(call.extra)
            except ValueError as error:
                arguments, extra, problem = None, {}, str(error)
            call_id = mend(call.id) if call.id and call.id not in seen else new_id()
            seen.add(call_id)
            name = self._valid_name(call.name)
            text = json.dumps(arguments or {}, ensure_ascii=False)  # servers refuse invalid JSON
            function = {"name": name, "arguments": text}
            entry = {"id": call_id, "type": "function", "function": function} | extra
            made.append((ToolCall(call_id, name, arguments, problem), entry))
        return made

    def _valid_name(self, name: str) -> str:
        """Without the prefix ("functions.") and tail ("<|channel|>") that some models add to an offered tool's name."""
        core = name.split("<|")[0].rsplit(".", 1)[-1].strip()
        return core if core in self.tool_names else safe_name(name)


def _text(value: Any) -> str:
    """An id or a name; some servers send numbers."""
    return value if isinstance(value, str) else "" if value is None else str(value)


# ---- arguments -------------------------------------------------------------------------------------


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")  # Python reads NaN and Infinity; no server takes them


def _number(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _no_number(digits)


# not strict: models write raw newlines inside strings
_decoder = json.JSONDecoder(strict=False, parse_constant=_no_number, parse_float=_number)


def _parsed(arguments: Any) -> Any:
    return parse_arguments([arguments])[0] if isinstance(arguments, str) else arguments


def parse_arguments(pieces: list[str]) -> tuple[dict[str, Any] | None, str]:
    """(the arguments, "") or (None, why not). Never closes a bracket or a quote that is missing: the call may be cut."""
    raw = "".join(pieces).strip()
    if not raw:
        return {}, ""
    try:
        value = _decoder.decode(raw)
        if isinstance(value, str):
            value = _decoder.decode(value or "{}")  # encoded twice
    except RecursionError:
        return None, "nested too deeply"
    except ValueError as error:
        if len(pieces) > 1 and all(b.startswith(a) for a, b in pairwise(pieces)):
            return parse_arguments(pieces[-1:])  # each piece is the text so far
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
            value, end = _decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return None
        found.append(value)
        rest = rest[end:].strip()
    found = [value for value in found if value] or found[:1]
    alike = found and all(value == found[0] for value in found)
    return found[0] if alike and "{" not in rest else None
