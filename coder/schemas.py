"""Type hints as JSON schemas, and JSON values as the Python values that the hints promise.

    adapter = adapter_of(Person, "tool greet: person")
    adapter.schema                             # what the model is sent
    adapter.take({"name": "Ada"}, "person")    # Person(name="Ada")

Loaded when a hint is not plain (arguments.py knows the plain ones), so by no built-in tool.
Pydantic is not imported: a class of its models is known by its methods.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import types
from collections.abc import Callable, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from coder.arguments import PYTHON_TYPES, WAY_OUT, Schema, fit, parse_docstring, plain_schema
from coder.types import ToolError

FORMATS = {"date": "date", "datetime": "date-time", "time": "time"}  # by the class's name
WRAPPERS = (Annotated, Required, NotRequired)  # of another hint


class TypeAdapter:
    """What a hint means: a JSON schema, and the Python values that its JSON values become."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema

    def take(self, value: Any, where: str) -> Any:
        """The Python value of a JSON value. Raises ToolError if it does not fit."""
        return self._convert(fit(value, self.schema, where), where)

    def _convert(self, value: Any, where: str) -> Any:
        """The Python value of a JSON value that fits the schema."""
        return value


class Made(TypeAdapter):
    """A value that a function makes of the JSON value: a date, a member of an Enum, a model."""

    def __init__(self, schema: Schema, factory: Callable[[Any], Any]) -> None:
        super().__init__(schema)
        self.factory = factory

    def _convert(self, value: Any, where: str) -> Any:
        try:
            return self.factory(value)
        except Exception as error:  # the class is the user's
            raise ToolError(f"{where}: {explain(error)}") from None


class Items(TypeAdapter):
    """A list, or a tuple of any length."""

    def __init__(self, item: TypeAdapter, factory: Callable[[list[Any]], Any]) -> None:
        super().__init__({"type": "array", "items": item.schema})
        self.item = item
        self.factory = factory

    def _convert(self, value: list[Any], where: str) -> Any:
        taken = [self.item.take(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return self.factory(taken)


class Places(TypeAdapter):
    """A tuple with a hint for each of its places."""

    def __init__(self, places: Sequence[TypeAdapter]) -> None:
        super().__init__(
            {
                "type": "array",
                "items": one_of(places),
                "minItems": len(places),
                "maxItems": len(places),
            }
        )
        self.places = places

    def _convert(self, value: list[Any], where: str) -> tuple[Any, ...]:
        if len(value) != len(self.places):
            raise ToolError(f"{where} has to have {len(self.places)} items, not {len(value)}")
        taken = []
        for index, place in enumerate(self.places):
            taken.append(place.take(value[index], f"{where}[{index}]"))
        return tuple(taken)


class Table(TypeAdapter):
    """A dictionary whose values have one hint."""

    def __init__(self, item: TypeAdapter) -> None:
        super().__init__({"type": "object", "additionalProperties": item.schema})
        self.item = item

    def _convert(self, value: dict[str, Any], where: str) -> dict[str, Any]:
        return {name: self.item.take(item, f"{where}.{name}") for name, item in value.items()}


class Choice(TypeAdapter):
    """A union: the first option that takes the value. Those of the value's own JSON type are tried
    first; what is inside of a list or an object is not compared."""

    def __init__(self, options: Sequence[TypeAdapter]) -> None:
        super().__init__(one_of(options))
        self.options = options

    def take(self, value: Any, where: str) -> Any:
        problems = []
        for option in sorted(
            self.options,
            key=lambda option: not _is_of(value, option.schema),
        ):
            try:
                return option.take(value, where)
            except ToolError as error:
                problems.append(str(error))
        raise ToolError("; or ".join(problems))


class Fields(Made):
    """A dataclass or a TypedDict: made of an object, each member of which has a hint."""

    def __init__(self, members: Mapping[str, TypeAdapter], schema: Schema, made: type) -> None:
        super().__init__(schema, lambda taken: made(**taken))
        self.members = members

    def _convert(self, value: dict[str, Any], where: str) -> Any:
        taken = {}
        for name, member in value.items():
            taken[name] = self.members[name].take(member, f"{where}.{name}")
        return super()._convert(taken, where)


def one_of(adapters: Sequence[TypeAdapter]) -> Schema:
    """The schema of what fits any of these."""
    different: list[Schema] = []
    for adapter in adapters:
        if adapter.schema not in different:
            different.append(adapter.schema)
    return different[0] if len(different) == 1 else {"anyOf": different}


def _is_of(value: Any, schema: Schema) -> bool:
    """Has the JSON value the type of the schema, without a conversion?"""
    if schema.get("type") == "number":
        return type(value) in (int, float)
    return type(value) is PYTHON_TYPES.get(str(schema.get("type")))


def explain(error: Exception) -> str:
    """What is wrong, in one line; an error of pydantic has a list of it."""
    errors = getattr(error, "errors", None)
    if errors is None:
        return str(error)
    lines = []
    for each in errors():
        place = ".".join([str(part) for part in each["loc"]])
        lines.append(f"{place}: {each['msg']}" if place else each["msg"])
    return "; ".join(lines)


# ---- from a hint to its adapter ------------------------------------------------------------------


def adapter_of(hint: Any, where: str) -> TypeAdapter:
    """The adapter of a hint; `where` names it in errors.

    Raises TypeError for a hint that no JSON schema can express, with the way out.
    """
    try:
        return _read(hint, where)
    except RecursionError:
        raise TypeError(f"{where}: {_name(hint)} contains itself. {WAY_OUT}") from None


def _read(hint: Any, where: str) -> TypeAdapter:
    for read in READERS:
        adapter = read(hint, where)
        if adapter is not None:
            return adapter
    raise TypeError(f"{where} has the hint {_name(hint)}, which makes no schema. {WAY_OUT}")


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)


def _read_simple(hint: Any, where: str) -> TypeAdapter | None:
    schema = plain_schema(hint)
    if hint in (Any, object):
        schema = {}
    if hint is types.NoneType:
        schema = {"type": "null"}
    return None if schema is None else TypeAdapter(schema)


def _read_wrapped(hint: Any, where: str) -> TypeAdapter | None:
    """Annotated[X, "text"], or with an annotation that has a `description`; Required and
    NotRequired, which say nothing about a value."""
    if get_origin(hint) not in WRAPPERS:
        return None
    adapter = _read(get_args(hint)[0], where)
    for note in getattr(hint, "__metadata__", ()):
        text = note if isinstance(note, str) else getattr(note, "description", None)
        if text:
            adapter.schema = adapter.schema | {"description": text}
            break
    return adapter


def _read_union(hint: Any, where: str) -> TypeAdapter | None:
    if get_origin(hint) not in (Union, types.UnionType):
        return None
    return Choice([_read(each, where) for each in get_args(hint)])


def _read_container(hint: Any, where: str) -> TypeAdapter | None:
    """list[X], tuple[X, ...], tuple[X, Y], dict[str, X]."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin is list:
        return Items(_read(arguments[0], where), list)
    if origin is tuple and arguments[1:] == (...,):
        return Items(_read(arguments[0], where), tuple)
    if origin is tuple:
        return Places([_read(each, where) for each in arguments])
    if origin is dict and arguments[0] is str:
        return Table(_read(arguments[1], where))
    return None


def _read_enum(hint: Any, where: str) -> TypeAdapter | None:
    """A member goes by its value."""
    if not (isinstance(hint, type) and issubclass(hint, enum.Enum)):
        return None
    values = [member.value for member in hint]
    schema = plain_schema(Literal[*values])
    if schema is None:
        raise TypeError(f"{where}: the values of {_name(hint)} are not all text, or all numbers")
    return Made(schema, hint)


def _read_time(hint: Any, where: str) -> TypeAdapter | None:
    """date, datetime and time, in the form of ISO 8601."""
    if not (isinstance(hint, type) and hasattr(hint, "fromisoformat")):
        return None
    schema = {"type": "string", "format": FORMATS.get(hint.__name__, "date-time")}
    return Made(schema, hint.fromisoformat)


def _read_model(hint: Any, where: str) -> TypeAdapter | None:
    """A model of pydantic."""
    if not hasattr(hint, "model_json_schema"):
        return None
    schema = hint.model_json_schema()
    inlined = _inlined(schema, schema.get("$defs", {}))
    # As JSON: in strict mode a model takes a date as text from there alone
    return Made(inlined, lambda value: hint.model_validate_json(json.dumps(value)))


def _inlined(schema: Any, definitions: Mapping[str, Schema]) -> Any:
    """A schema without references, which not every server follows, and without titles."""
    if isinstance(schema, list):
        return [_inlined(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made: Schema = {}
    for name, value in schema.items():
        if name == "$ref":
            made |= _inlined(definitions[value.rpartition("/")[2]], definitions)
        elif name != "$defs" and not (name == "title" and isinstance(value, str)):
            made[name] = _inlined(value, definitions)
    return made


def _read_dataclass(hint: Any, where: str) -> TypeAdapter | None:
    if not (isinstance(hint, type) and dataclasses.is_dataclass(hint)):
        return None
    names = []
    required = []
    for field in dataclasses.fields(hint):
        if not field.init:
            continue
        names.append(field.name)
        if field.default is field.default_factory is dataclasses.MISSING:
            required.append(field.name)
    return _fields(hint, names, required, where)


def _read_typed_dict(hint: Any, where: str) -> TypeAdapter | None:
    # By its members: typing_extensions has a class of its own
    if not hasattr(hint, "__required_keys__"):
        return None
    hints = get_type_hints(hint, include_extras=True)
    required = []
    for name, member in hints.items():
        mark = get_origin(member)  # first: the class does not see it in an annotation that is text
        if mark is Required or (mark is not NotRequired and name in hint.__required_keys__):
            required.append(name)
    return _fields(hint, list(hints), required, where)


def _fields(hint: type, names: Sequence[str], required: list[str], where: str) -> Fields:
    """The adapter of a class with these members, which its docstring describes, or Annotated."""
    hints = get_type_hints(hint, include_extras=True)
    _, texts = parse_docstring(hint.__doc__ or "", names)
    members = {}
    properties = {}
    for name in names:
        members[name] = _read(hints[name], f"{where}.{name}")
        properties[name] = members[name].schema
        if name in texts:
            properties[name] = properties[name] | {"description": texts[name]}
    schema = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    return Fields(members, schema, hint)


READERS: Sequence[Callable[[Any, str], TypeAdapter | None]] = (
    _read_simple,
    _read_wrapped,
    _read_union,
    _read_container,
    _read_enum,
    _read_time,
    _read_model,
    _read_dataclass,
    _read_typed_dict,
)
