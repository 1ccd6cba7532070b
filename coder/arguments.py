"""The JSON schema of a tool's arguments: made of a function's signature, and what a call is checked
against.

Checked are type, enum, required, properties, additionalProperties and items, at any depth. Other
keywords are ignored: what they describe goes to the function as it came.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from inspect import Parameter
from typing import Any, Literal, Union, get_args, get_origin

from coder.slips import Arguments
from coder.types import ToolError

Schema = dict[str, Any]
Hints = Mapping[str, str]

JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object"}
PYTHON_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": types.NoneType,
}
BOOLEANS = {"true": True, "false": False, "1": True, "0": False}  # by their text in lower case
NO_HINTS: Hints = {}
WAY_OUT = "Use another hint, or write the schema yourself: tool(schema={...})"
Take = Callable[[Any, str], Any]  # (a JSON value, where it is) -> the Python value, or a ToolError

# Lines of a docstring
PARAMETER = r"(?P<name>\w+): (?P<text>.+)"
FORMS = (
    PARAMETER,
    r"\*{0,2}(?P<name>\w+)(?: \([^)]*\))?: ?(?P<text>.*)",  # Google
    r":param (?:[^:]* )?\*{0,2}(?P<name>\w+): ?(?P<text>.*)",  # Sphinx
    r"(?P<name>\w+)(?: : .*)?(?P<text>)",  # NumPy: the text is in the next line
)
HEADING = r"(Args|Arguments|Parameters|Attributes):?|-+|:type .*"
ANOTHER_PART = r"(Returns?|Yields?|Raises|Examples?|Notes?):?$|:(return|raise|rtype)"

# ---- from a signature to a schema -----------------------------------------------------------


def described_schema(
    where: str,
    doc: str,
    signature: Mapping[str, Parameter],
    type_hints: Mapping[str, Any],
) -> tuple[str, Schema, dict[str, Take]]:
    """What the model is sent of a function: (its description, the schema of its arguments). The
    third value is for parameters whose hints are not plain: what makes their Python values.

    Raises TypeError for a parameter without a hint or a description.
    """
    description, texts = parse_docstring(doc, signature)
    properties: Schema = {}
    takes: dict[str, Take] = {}
    required = []
    for name, parameter in signature.items():
        if name not in type_hints:
            raise TypeError(f"{where}: {name!r} needs a type hint")
        hint = without_none(type_hints[name])
        schema = plain_schema(hint)
        if schema is None:
            from coder.schemas import adapter_of  # late: no built-in tool needs it

            adapter = adapter_of(hint, f"{where}: {name}")
            schema = adapter.schema
            takes[name] = adapter.take
        if name in texts:
            schema = schema | {"description": texts[name]}
        if "description" not in schema:
            raise TypeError(f"{where}: describe {name!r} in its docstring, as `{name}: ...`")
        properties[name] = schema
        if parameter.default is parameter.empty:
            required.append(name)
    return description, {"type": "object", "properties": properties, "required": required}, takes


def parse_docstring(doc: str, names: Container[str]) -> tuple[str, dict[str, str]]:
    """(the text, {parameter: its description}) of a docstring; `Note: ...` is no parameter.

    Parameters are described as `name: ...`, or in the form of Google, NumPy or Sphinx.
    """
    description: list[str] = []
    texts: dict[str, str] = {}
    name = ""  # the parameter that the lines are about
    for line in doc.splitlines():
        words = " ".join(line.split())
        named = _named_parameter(words, names, is_list=bool(texts))
        if named:
            name = named["name"]
            texts[name] = named["text"] or ""
        elif re.fullmatch(HEADING, words):
            name = ""
        elif re.match(ANOTHER_PART, words):
            name = ""
            description.append(words)
        elif words and name:
            texts[name] = f"{texts[name]} {words}".strip()
        elif words:
            description.append(words)
    return " ".join(description), texts


def _named_parameter(
    words: str,
    names: Container[str],
    is_list: bool,
) -> re.Match[str] | None:
    """The parameter that a line begins to describe. Within a list of them it may be unknown."""
    for form in FORMS:
        found = re.fullmatch(form, words)
        if found and (found["name"] in names or (is_list and form is PARAMETER)):
            return found
    return None


def without_none(hint: Any) -> Any:
    """X of X | None: a parameter with a null has its default, see `fit`."""
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not types.NoneType]
        if len(kinds) == 1:
            return kinds[0]
    return hint


def plain_schema(hint: Any) -> Schema | None:
    """The JSON schema of a plain hint: str, int, float, bool, dict, a list of them, Literal."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin is list:
        items = plain_schema(arguments[0])
        return {"type": "array", "items": items} if items else None
    if origin is Literal:
        kinds = {type(value) for value in arguments}
        kind = kinds.pop()
        if not kinds and kind in JSON_TYPES:
            return {"type": JSON_TYPES[kind], "enum": list(arguments)}
        return None
    if isinstance(hint, type) and hint in JSON_TYPES:
        return {"type": JSON_TYPES[hint]}
    return None


# ---- checking the arguments of a call -------------------------------------------------------


def fit(
    value: Any,
    schema: Any,
    where: str,
    hints: Hints = NO_HINTS,
) -> Any:
    """The value as the schema describes it. `hints`: what to write instead of an unknown parameter.

    A value of another type is taken if it is certain what was meant: "10" for 10, the JSON text of
    a list or an object. A null is left out if the parameter is not required and cannot be null.
    Raises ToolError, which the model reads.
    """
    if not isinstance(schema, dict):
        return value
    value = _convert(value, _types_of(schema), where)
    if "enum" in schema and value not in schema["enum"]:
        choices = ", ".join(str(choice) for choice in schema["enum"])
        raise ToolError(f"{where} has to be one of {choices}")
    if isinstance(value, list):
        items = schema.get("items")
        return [fit(item, items, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict):
        return _fit_members(value, schema, where, hints)
    return value


def _fit_members(
    members: Arguments,
    schema: Schema,
    where: str,
    hints: Hints,
) -> Arguments:
    _check_names(members, schema, where, hints)
    properties = schema.get("properties") or {}
    required = schema.get("required") or ()
    prefix = f"{where}." if ": " in where else f"{where}: "
    fitted = {}
    for name, value in members.items():
        if value is None and name not in required and not _may_be_null(properties.get(name)):
            continue
        try:
            fitted[name] = fit(value, properties.get(name), prefix + name)
        except ToolError as error:
            if name not in hints:
                raise
            raise ToolError(f"{error}; {hints[name]}") from None
    return fitted


def _check_names(
    members: Arguments,
    schema: Schema,
    where: str,
    hints: Hints,
) -> None:
    """Raise ToolError for a parameter that is unknown or missing."""
    names = f"Its parameters: {', '.join(schema.get('properties') or ())}"
    unknown = _unknown_names(members, schema)
    if unknown:
        ways = "".join(f"; {hints[name]}" for name in unknown if name in hints)
        raise ToolError(f"{where} has no parameter {', '.join(unknown)}{ways}. {names}")
    missing = [name for name in schema.get("required") or () if name not in members]
    if missing:
        raise ToolError(f"{where} needs {', '.join(missing)}. {names}")


def _unknown_names(members: Arguments, schema: Schema) -> list[str]:
    """Those that a closed schema does not have."""
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    if not is_closed:
        return []
    properties = schema.get("properties") or {}
    return [name for name in members if name not in properties]


def _types_of(schema: Any) -> list[str]:
    """The types that a schema names; [] is any type."""
    if not isinstance(schema, dict):
        return []
    kinds = schema.get("type") or []
    return [kinds] if isinstance(kinds, str) else kinds


def _may_be_null(schema: Any) -> bool:
    kinds = _types_of(schema)
    return not kinds or "null" in kinds


def _convert(value: Any, kinds: list[str], where: str) -> Any:
    """A value of one of these types; text that is the JSON of one counts."""
    if not kinds or _has_any_type(value, kinds):
        return value
    converted = value
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            converted = json.loads(value)
    if "integer" in kinds and isinstance(converted, float) and converted.is_integer():
        converted = int(converted)
    if "boolean" in kinds and isinstance(converted, str | int):
        converted = BOOLEANS.get(str(converted).lower(), converted)
    if _has_any_type(converted, kinds):
        return converted
    shown = json.dumps(value)[:80]
    raise ToolError(f"{where} has to be of type {' or '.join(kinds)}, not {shown}")


def _has_any_type(value: Any, kinds: list[str]) -> bool:
    return any(_has_type(value, kind) for kind in kinds)


def _has_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool) and kind in ("integer", "number"):
        return False
    return isinstance(value, PYTHON_TYPES.get(kind, object))
