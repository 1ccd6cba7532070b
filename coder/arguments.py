"""The JSON schema of a tool's arguments: made of a function's signature, and what a call is checked against.

Checked are type, enum, required, properties, additionalProperties and items, at any depth. Other
keywords are ignored: what they describe goes to the function as it came.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Container, Mapping
from contextlib import suppress
from inspect import Parameter
from typing import Any, Literal, Union, get_args, get_origin

from coder.types import ToolError

JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object"}
KINDS: dict[str, Any] = {name: kind for kind, name in JSON_TYPES.items()}
KINDS |= {"number": (int, float), "array": list, "null": type(None)}
BOOLEANS = {"true": True, "false": False, "1": True, "0": False}  # by their text in lower case
PARAMETER = re.compile(r"(?P<name>\w+): (?P<text>.+)")  # a line of a docstring
NO_HINTS: Mapping[str, str] = {}

# ---- from a signature to a schema -----------------------------------------------------------


def described_schema(
    where: str, doc: str, signature: Mapping[str, Parameter], hints: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """(the description, the schema) of a function with this docstring. Raises TypeError."""
    description, described = _parse_docstring(doc, signature)
    properties = dict[str, Any]()
    for name in signature:
        if name not in described:
            raise TypeError(f"{where}: describe {name!r} in its docstring, as `{name}: ...`")
        schema = _schema_of(hints.get(name), f"{where}: {name}")
        properties[name] = schema | {"description": described[name]}
    required = [name for name, each in signature.items() if each.default is each.empty]
    return description, {"type": "object", "properties": properties, "required": required}


def _parse_docstring(doc: str, names: Container[str]) -> tuple[str, dict[str, str]]:
    """(the text, {parameter: description}) of a docstring; `Note: ...` is no parameter."""
    description: list[str] = []
    described: dict[str, str] = {}
    name = ""  # the parameter that the lines are about
    for line in doc.splitlines():
        words = " ".join(line.split())
        found = PARAMETER.match(words)
        if found and (described or found["name"] in names):
            name = found["name"]
            described[name] = found["text"]
        elif not name:
            description.append(words)
        elif words:
            described[name] += f" {words}"
    text = " ".join(each for each in description if each)
    return text.removesuffix(" Args:"), described


def _schema_of(hint: Any, where: str) -> dict[str, Any]:
    """The JSON schema of a type hint, in the words that every server knows: type, items, enum."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin in (Union, types.UnionType):
        kinds = [kind for kind in arguments if kind is not type(None)]
        if len(kinds) == 1:
            return _schema_of(kinds[0], where)
    if origin is list:
        return {"type": "array", "items": _schema_of(arguments[0], where)}
    if origin is Literal:
        kinds = list({type(value) for value in arguments})
        if len(kinds) == 1 and kinds[0] in JSON_TYPES:
            return {"type": JSON_TYPES[kinds[0]], "enum": list(arguments)}
    kind = origin or hint
    if kind in JSON_TYPES:
        return {"type": JSON_TYPES[kind]}
    known = "str, int, float, bool, dict, list[...], Literal[...] or one of them | None"
    raise TypeError(f"{where} has the hint {hint!r}: use {known}")


# ---- checking the arguments of a call -------------------------------------------------------


def fit(value: Any, schema: Any, where: str, hints: Mapping[str, str] = NO_HINTS) -> Any:
    """The value as the schema describes it. `hints`: what to write instead of an unknown parameter.

    A value of another type is taken where it is certain: "10" for 10, a list or object encoded once more.
    A null for what may be left out is left out, where it has another type. Raises ToolError, which the model reads.
    """
    if not isinstance(schema, dict):
        return value
    value = _convert(value, _types_of(schema), where)
    if value not in schema.get("enum", [value]):
        raise ToolError(f"{where} has to be one of {', '.join(map(str, schema['enum']))}")
    if isinstance(value, list):
        return [fit(each, schema.get("items"), f"{where}[{n}]") for n, each in enumerate(value)]
    if isinstance(value, dict):
        return _fit_members(value, schema, where, hints)
    return value


def _fit_members(
    value: dict[str, Any], schema: dict[str, Any], where: str, hints: Mapping[str, str]
) -> dict[str, Any]:
    properties = schema.get("properties") or {}
    required = schema.get("required") or ()
    _check_names(value, schema, where, hints)
    inside = f"{where}." if ": " in where else f"{where}: "
    fitted: dict[str, Any] = {}
    for name, each in value.items():
        kinds = _types_of(properties.get(name))
        is_nullable = not kinds or "null" in kinds
        if each is None and not is_nullable and name not in required:
            continue
        try:
            fitted[name] = fit(each, properties.get(name), f"{inside}{name}")
        except ToolError as error:
            if name not in hints:
                raise
            raise ToolError(f"{error}; {hints[name]}") from None
    return fitted


def _check_names(
    value: dict[str, Any], schema: dict[str, Any], where: str, hints: Mapping[str, str]
) -> None:
    """Raises ToolError for a parameter that is unknown or missing."""
    properties = schema.get("properties") or {}
    names = f"Its parameters: {', '.join(properties)}"
    unknown = [name for name in value if name not in properties]
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    if unknown and is_closed:
        ways = "".join(f"; {hints[name]}" for name in unknown if name in hints)
        raise ToolError(f"{where} has no parameter {', '.join(unknown)}{ways}. {names}")
    missing = [name for name in schema.get("required") or () if name not in value]
    if missing:
        raise ToolError(f"{where} needs {', '.join(missing)}. {names}")


def _types_of(schema: Any) -> list[str]:
    """The types that a schema names; [] is any type."""
    kinds: str | list[str] = []
    if isinstance(schema, dict):
        kinds = schema.get("type") or []
    return [kinds] if isinstance(kinds, str) else kinds


def _convert(value: Any, kinds: list[str], where: str) -> Any:
    """A value of one of these types; text that is the JSON of one counts."""
    if not kinds or _has_any_type(value, kinds):
        return value
    other = value
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            other = json.loads(value)
    if "integer" in kinds and isinstance(other, float) and other.is_integer():
        other = int(other)
    if "boolean" in kinds and isinstance(other, str | int):
        other = BOOLEANS.get(str(other).lower(), other)
    if _has_any_type(other, kinds):
        return other
    raise ToolError(f"{where} has to be of type {' or '.join(kinds)}, not {json.dumps(value)[:80]}")


def _has_any_type(value: Any, kinds: list[str]) -> bool:
    return any(_has_type(value, kind) for kind in kinds)


def _has_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool) and kind in ("integer", "number"):
        return False
    return isinstance(value, KINDS.get(kind, object))
