"""Check the arguments of a call by the JSON schema of its tool.

Checked are type, enum, required, properties, additionalProperties and items, at any depth. Other
keywords are ignored: what they describe goes to the function as it came.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from coder.types import ToolError

KINDS: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


def fit(value: Any, schema: Any, where: str) -> Any:
    """The value as the schema describes it.

    A value of another type is taken where it is certain: "10" for 10, a list or object encoded once more.
    A null for what may be left out is left out. Raises ToolError in words that the model can use.
    """
    if not isinstance(schema, dict):
        return value
    value = _of_type(value, schema.get("type") or [], where)
    if value not in schema.get("enum", [value]):
        raise ToolError(f"{where} has to be one of {', '.join(map(str, schema['enum']))}")
    if isinstance(value, list):
        return [fit(each, schema.get("items"), f"{where}[{n}]") for n, each in enumerate(value)]
    return _members(value, schema, where) if isinstance(value, dict) else value


def _members(value: dict[str, Any], schema: dict[str, Any], where: str) -> dict[str, Any]:
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    names = f"Its parameters: {', '.join(properties)}"
    unknown = [name for name in value if name not in properties]
    if unknown and schema.get("additionalProperties") is False:
        raise ToolError(f"{where} has no parameter {', '.join(unknown)}. {names}")
    if missing := [name for name in required if name not in value]:
        raise ToolError(f"{where} needs {', '.join(missing)}. {names}")
    given = {name: each for name, each in value.items() if each is not None or name in required}
    inside = f"{where}{'.' if ': ' in where else ': '}"
    return {name: fit(each, properties.get(name), inside + name) for name, each in given.items()}


def _of_type(value: Any, kinds: str | list[str], where: str) -> Any:
    """A value of one of these types; text that is the JSON of one counts."""
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not kinds or any(_is(value, kind) for kind in kinds):
        return value
    other = value
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            other = json.loads(value)
    if "integer" in kinds and isinstance(other, float) and other.is_integer():
        other = int(other)
    if any(_is(other, kind) for kind in kinds):
        return other
    raise ToolError(f"{where} has to be of type {' or '.join(kinds)}, not {json.dumps(value)[:80]}")


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool) and kind in ("integer", "number"):
        return False
    return isinstance(value, KINDS.get(kind, object))
