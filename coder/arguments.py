"""Check the arguments of a call by the JSON schema of its tool.

Checked are type, enum, const, required, properties, additionalProperties, items, anyOf and oneOf, at any
depth: all that `@tool` writes, and most of what stands in a schema written by hand. Other keywords are ignored.
"""

from __future__ import annotations

import contextlib
import json
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


def fit(value: Any, schema: Any, where: str, exact: bool = False) -> Any:
    """The value as the schema describes it; `exact`: without conversion.

    A value of another type is taken where it is certain: "10" for 10, a list or object encoded once more.
    A null for what may be left out is left out. Raises ToolError in words that the model can use.
    """
    if not isinstance(schema, dict):
        return value
    if choices := [*schema.get("anyOf", ()), *schema.get("oneOf", ())]:
        value = _fit_any(value, choices, where, exact)
    value = _of_type(value, schema.get("type") or [], where, exact)
    allowed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if allowed is not None and value not in allowed:
        raise ToolError(f"{where} has to be one of {', '.join(map(str, allowed))}")
    if isinstance(value, list):
        items = enumerate(value)
        return [fit(each, schema.get("items"), f"{where}[{n}]", exact) for n, each in items]
    return _fit_members(value, schema, where, exact) if isinstance(value, dict) else value


def _fit_any(value: Any, schemas: list[Any], where: str, exact: bool) -> Any:
    """By the first schema that fits the value as it is, then converted; else the first error."""
    errors: list[ToolError] = []
    for attempt in (True,) if exact else (True, False):
        for schema in schemas:
            try:
                return fit(value, schema, where, attempt)
            except ToolError as error:
                errors.append(error)
    raise errors[0]


def _fit_members(
    value: dict[str, Any], schema: dict[str, Any], where: str, exact: bool
) -> dict[str, Any]:
    properties = schema.get("properties") or {}
    others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
    names = f"Its parameters: {', '.join(properties)}"
    if unknown := [name for name in value if name not in properties and others is False]:
        raise ToolError(f"{where} has no parameter {', '.join(unknown)}. {names}")
    schemas = {name: properties.get(name, others) for name in value}
    given = {n: each for n, each in value.items() if each is not None or _takes_null(schemas[n])}
    if missing := [name for name in schema.get("required") or () if name not in given]:
        raise ToolError(f"{where} needs {', '.join(missing)}. {names}")
    inside = f"{where}{'.' if ': ' in where else ': '}"
    return {name: fit(each, schemas[name], inside + name, exact) for name, each in given.items()}


def _takes_null(schema: Any) -> bool:
    try:
        return fit(None, schema, "", exact=True) is None
    except ToolError:
        return False


def _of_type(value: Any, kinds: str | list[str], where: str, exact: bool) -> Any:
    """A value of one of these types; text that is the JSON of one counts, unless `exact`."""
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not kinds or any(_is(value, kind) for kind in kinds):
        return value
    other = value
    if isinstance(value, str) and not exact:
        with contextlib.suppress(ValueError):
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
