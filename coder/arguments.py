"""The arguments of a call by the JSON schema of its tool: any legal schema, however deep.

Checked are type, enum, const, bounds and lengths, required, the members of objects, the items of
lists, allOf, anyOf, oneOf (as anyOf), and $ref within the schema. Other keywords are ignored.
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any
from urllib.parse import unquote

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
BOUNDS: tuple[tuple[Any, str, str, str], ...] = (
    ((int, float), "minimum", "maximum", ""),
    (str, "minLength", "maxLength", " characters long"),
    (list, "minItems", "maxItems", " long"),
)
JOINED = {"allOf", "anyOf", "oneOf", "patternProperties"}  # they name members, as `properties` does
MOST_HOPS = 20  # from one $ref to the next


def fit(value: Any, schema: Any, whole: dict[str, Any], where: str, exact: bool = False) -> Any:
    """The value as a schema in `whole` has it; `exact`: unconverted. Raises ToolError."""
    if schema is False:
        raise ToolError(f"{where} must not be given")
    schema = resolved(schema, whole)
    for part in schema.get("allOf") or ():
        value = fit(value, part, whole, where, exact)
    for parts in filter(None, (schema.get("anyOf"), schema.get("oneOf"))):
        value = _fit_any(value, parts, whole, where, exact)
    value = _of_type(value, schema.get("type") or [], where, exact)
    choice = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if choice is not None and value not in choice:
        raise ToolError(f"{where} has to be one of {', '.join(map(str, choice))}")
    for kind, least, most, unit in BOUNDS:
        if isinstance(value, kind):
            size = len(value) if unit else value
            if size < schema.get(least, size):
                raise ToolError(f"{where} has to be at least {schema[least]}{unit}")
            if size > schema.get(most, size):
                raise ToolError(f"{where} has to be at most {schema[most]}{unit}")
    if isinstance(value, list):
        first, rest = schema.get("prefixItems") or [], schema.get("items", True)
        if isinstance(rest, list):  # the form of older drafts
            first, rest = rest, schema.get("additionalItems", True)
        kinds = [*first, *[rest] * len(value)]
        return [
            fit(item, kind, whole, f"{where}[{place}]", exact)
            for place, (item, kind) in enumerate(zip(value, kinds))
        ]
    return _fit_members(value, schema, whole, where, exact) if isinstance(value, dict) else value


def _fit_any(value: Any, schemas: list[Any], whole: dict[str, Any], where: str, exact: bool) -> Any:
    """By the first schema that fits the value as it is, then converted; else the first error."""
    errors: list[ToolError] = []
    for attempt in (True,) if exact else (True, False):
        for schema in schemas:
            try:
                return fit(value, schema, whole, where, attempt)
            except ToolError as error:
                errors.append(error)
    raise errors[0]


def _fit_members(
    value: dict[str, Any], schema: dict[str, Any], whole: dict[str, Any], where: str, exact: bool
) -> dict[str, Any]:
    names = f"Its parameters: {', '.join(schema.get('properties') or {})}"
    schemas = {name: _member_schema(name, schema) for name in value}
    if unknown := [name for name in value if schemas[name] is False]:
        raise ToolError(f"{where} has no parameter {', '.join(unknown)}. {names}")
    given = {
        name: each
        for name, each in value.items()
        if each is not None or _takes_null(schemas[name], whole)
    }
    if missing := [name for name in schema.get("required") or () if name not in given]:
        raise ToolError(f"{where} needs {', '.join(missing)}. {names}")
    inside = f"{where}{'.' if ': ' in where else ': '}"
    return {
        name: fit(each, schemas[name], whole, inside + name, exact) for name, each in given.items()
    }


def _member_schema(name: str, schema: dict[str, Any]) -> Any:
    """The schema of an object's member; False where it may have none of this name."""
    own = schema.get("properties") or {}
    found = [own[name]] if name in own else []
    for pattern, each in (schema.get("patternProperties") or {}).items():
        try:
            found += [each] if re.search(pattern, name) else []
        except re.error:
            found.append(True)  # a pattern that Python cannot read may well be meant for it
    return {"allOf": found} if found else schema.get("additionalProperties", True)


def _takes_null(schema: Any, whole: dict[str, Any]) -> bool:
    try:
        return fit(None, schema, whole, "", exact=True) is None
    except ToolError:
        return False


def resolved(schema: Any, whole: dict[str, Any]) -> dict[str, Any]:
    """The schema that a $ref leads to, with what stands beside it; {} for one out of `whole`."""
    for _ in range(MOST_HOPS):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            break
        beside = {name: value for name, value in schema.items() if name != "$ref"}
        place, *steps = schema["$ref"].split("/")
        target: Any = whole if place == "#" else {}
        try:
            for step in steps:
                key = unquote(step).replace("~1", "/").replace("~0", "~")
                target = target[int(key) if isinstance(target, list) else key]
        except (LookupError, TypeError, ValueError):
            target = {}
        schema = target | beside if isinstance(target, dict) else beside
    return schema if isinstance(schema, dict) else {}


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
