"""Tool calls out of the pieces that arrive: which piece belongs to which call, and what its arguments are.

`Calls.add` takes one piece of one delta; `Calls.finished` gives every call with its entry for the history. Each rule names
the observation behind it (T1 ...; tests/data/quirks.jsonl replays them), and none asks who the server is.
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
    """A tool call while it arrives. `index` is a key and no position (T4)."""

    index: Any = None
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    whole: dict[str, Any] | None = None  # T11: arguments that came as an object
    # T28: unknown members go back to the server
    extra: dict[str, Any] = field(default_factory=dict)

    def add(self, part: dict[str, Any], function: dict[str, Any]) -> None:
        self.id = self.id or _text(part.get("id"))  # set once, never joined (T5, T7)
        name = _text(function.get("name"))
        if name != self.name:  # T7: repeated, or the name so far, or really a piece
            self.name = name if name.startswith(self.name) else self.name + name
        arguments = function.get("arguments")
        if isinstance(arguments, dict) and arguments:
            self.whole = arguments
        elif arguments:
            self.pieces.append(str(arguments))
        self.extra |= {
            k: v
            for k, v in part.items()
            if k not in ("index", "id", "type", "function") and v is not None
        }

    def complete(self) -> bool:
        """A name and arguments that are whole, as far as one can see; parsed only where they may be."""
        arguments = self.whole
        if self.pieces and self.pieces[-1].rstrip().endswith(("}", '"')):
            arguments = parse_arguments(self.pieces)[0]
        return bool(self.name) and arguments is not None

    def repeated_by(self, arguments: Any) -> bool:
        """Are these, of a whole call, the arguments once more? (T29)"""
        return bool(
            _parsed(arguments)
            == (self.whole if self.whole is not None else parse_arguments(self.pieces)[0])
        )


class Calls:
    """The calls of one answer, in order of arrival. `tool_names` are the tools that were offered."""

    def __init__(self, tool_names: Container[str] = ()) -> None:
        self.tool_names = tool_names
        self.calls: list[_Call] = []

    def __bool__(self) -> bool:
        return bool(self.calls)

    def add(self, part: dict[str, Any]) -> ToolCallDelta:
        """Take one piece; what it adds, for the screen."""
        function = part.get("function") or {}  # T9
        call = self._find(part, function) or self._new(part)
        call.add(part, function)
        arguments = function.get("arguments") or ""
        return ToolCallDelta(
            call.id,
            call.name,
            mend(arguments if isinstance(arguments, str) else json.dumps(arguments)),
        )

    def _find(self, part: dict[str, Any], function: dict[str, Any]) -> _Call | None:
        """The call that this piece belongs to: by id, else by index, else the last one; None for a new call."""
        call_id, index, name = _text(part.get("id")), part.get("index"), _text(function.get("name"))
        arguments = function.get("arguments")
        # A call that could stand alone
        begins = bool(name and (arguments.strip() if isinstance(arguments, str) else arguments))
        here = (
            next((c for c in reversed(self.calls) if c.index == index), None)
            if index is not None
            else None
        )
        if call_id:
            known = next((c for c in reversed(self.calls) if c.id == call_id), None)
            # T24: no index
            again = bool(
                known
                and begins
                and index is None
                and known.complete()
                and not known.repeated_by(arguments)
            )
            if known and not again and (index is None or known.index == index or not name):
                return known
            if again:
                return None
            if index is None and self.calls and not (self.calls[-1].id or self.calls[-1].name):
                return self.calls[-1]  # T10: its arguments came first
            # T2: another id takes the index over; T24: the same id at another index, with a name, is another call
            return here if here and here.id in ("", call_id) else None
        found = here or (self.calls[-1] if self.calls and (index is None or not name) else None)
        # T6: a name after a whole call
        if found and ((begins and found.complete()) or self._another(found.name, name)):
            return None
        return found

    def _another(self, name: str, more: str) -> bool:
        """T12: the name of an offered tool behind another name is no piece of it; the call before it has no arguments."""
        return (
            bool(name)
            and more in self.tool_names
            and not more.startswith(name)
            and name + more not in self.tool_names
        )

    def _new(self, part: dict[str, Any]) -> _Call:
        self.calls.append(_Call(index=part.get("index")))
        return self.calls[-1]

    def finished(self) -> list[tuple[ToolCall, Message]]:
        """Each call and its form in the history."""
        made: list[tuple[ToolCall, Message]] = []
        seen: set[str] = set()
        for call in self.calls:
            if not (call.name or call.pieces or call.whole):
                continue
            arguments, problem = (
                (call.whole, "") if call.whole is not None else parse_arguments(call.pieces)
            )
            try:
                arguments, extra = mend_all(arguments), mend_all(call.extra)
            except ValueError as error:
                arguments, extra, problem = None, {}, str(error)
            call_id = mend(call.id) if call.id and call.id not in seen else new_id()  # T6, T24
            seen.add(call_id)
            name = self._name(call.name)
            text = json.dumps(arguments or {}, ensure_ascii=False)  # T12, R28: always valid JSON
            entry = {
                "id": call_id,
                "type": "function",
                "function": {"name": name, "arguments": text},
            } | extra
            made.append((ToolCall(call_id, name, arguments, problem), entry))
        return made

    def _name(self, name: str) -> str:
        """T23: prefix and tail go where an offered tool remains; T30, T32: nothing else that a server refuses."""
        core = name.split("<|")[0].rsplit(".", 1)[-1].strip()
        return core if core in self.tool_names else safe_name(name)


def _text(value: Any) -> str:
    """An id or a name; some servers send numbers."""
    return value if isinstance(value, str) else "" if value is None else str(value)


def _no_number(word: str) -> Any:
    # Python reads NaN and Infinity; no server takes them back
    raise ValueError(f"{word} is no JSON")


def _number(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _no_number(digits)


# T16: raw newlines inside strings
_decoder = json.JSONDecoder(strict=False, parse_constant=_no_number, parse_float=_number)


def _parsed(arguments: Any) -> Any:
    return parse_arguments([arguments])[0] if isinstance(arguments, str) else arguments


def parse_arguments(pieces: list[str]) -> tuple[dict[str, Any] | None, str]:
    """(the arguments, "") or (None, why not). Never closes a bracket or a quote that is missing (F7)."""
    raw = "".join(pieces).strip()
    if not raw:
        return {}, ""  # T12
    try:
        value = _decoder.decode(raw)
        if isinstance(value, str):
            value = _decoder.decode(value or "{}")  # T13: encoded twice
    except RecursionError:
        return None, "nested too deeply"
    except ValueError as error:
        if len(pieces) > 1 and all(b.startswith(a) for a, b in pairwise(pieces)):
            return parse_arguments(pieces[-1:])  # T15: each piece is the text so far
        value = _first_object(raw)
        if value is None:
            return None, f"not valid JSON: {error}"
    if value is None:
        return {}, ""
    return (
        (value, "")
        if isinstance(value, dict)
        else (None, f"no JSON object but {json.dumps(value)[:80]}")
    )


def _first_object(raw: str) -> Any:
    """The object at the start where what follows repeats it or holds no other; an empty first one gives way."""
    rest, found = raw, list[Any]()
    while rest.startswith("{"):
        try:
            value, end = _decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return None
        found.append(value)
        rest = rest[end:].strip()
    found = [value for value in found if value] or found[:1]  # T14
    alike = found and all(value == found[0] for value in found)  # T15
    return found[0] if alike and "{" not in rest else None  # T17
