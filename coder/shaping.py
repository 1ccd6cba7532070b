"""Messages and tool schemas as a server wants them: pure functions over lists, told by a Profile what to do.

The same messages come out the same way each time, so that the beginning of a request stays what it was and the provider's
cache serves it. What it leaves out: what keeps a history valid anywhere (history.py).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from coder.reasoning import ECHOED, REASONING, THINK
from coder.types import Message

if TYPE_CHECKING:
    from coder.profile import Profile

PLAIN = {"role", "content", "tool_calls"}
CALL = {"id", "type", "function"}
OURS = {*REASONING, *ECHOED, THINK}  # what wire.py may have put into an assistant message
BETWEEN: Message = {"role": "assistant", "content": "Understood."}  # R16: where a user message must not follow a result


def shaped(messages: Iterable[Message], profile: Profile, refused: set[str]) -> list[Message]:
    """The messages as the profile wants them; those that are so already are the same objects."""
    made: list[Message] = []
    images: list[Any] = []  # of the results of one turn
    names: dict[str, str] = {}  # call id -> tool
    unwanted = OURS - set(profile.echoed) | refused
    plain = not (profile.ids or profile.tool_name or profile.strict_turns or profile.empty_content != "null")
    for message in messages:
        role = message["role"]
        if plain and not images and _is_plain(message, role):  # most are, and a late step costs no more than an early one
            made.append(message)
            continue
        if images and role != "tool":
            _append(made, _attached(images), profile)
            images = []
        if role == "assistant":
            names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls") or ()} if profile.tool_name else {}
            message = _assistant(message, profile, unwanted)
        elif role == "tool":
            message, found = _result(message, names.get(message["tool_call_id"], ""), profile)
            images += found
        _append(made, message, profile)
    if images:
        _append(made, _attached(images), profile)
    return made


def _is_plain(message: Message, role: str) -> bool:
    """Is there nothing in a message that any server could want otherwise?"""
    if role == "assistant":
        return message.keys() <= PLAIN and all(call.keys() == CALL for call in message.get("tool_calls") or ())
    return role != "tool" or isinstance(message["content"], str)


def _append(made: list[Message], message: Message, profile: Profile) -> None:
    last = made[-1]["role"] if made else ""
    if profile.strict_turns and message["role"] == "user" and last == "tool":
        made.append(BETWEEN)
    if profile.strict_turns and message["role"] == last == "user":
        made[-1] = made[-1] | {"content": _joined(made[-1]["content"], message["content"])}
    else:
        made.append(message)


def _joined(first: Any, second: Any) -> Any:
    """The contents of two messages as one: text, or parts where either has parts."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [part for content in (first, second)
            for part in ([{"type": "text", "text": content}] if isinstance(content, str) else content)]


def _assistant(message: Message, profile: Profile, unwanted: set[str]) -> Message:
    """Only what goes back there (R26), content as it has to be (R13), ids that fit (T31)."""
    if message.keys() & unwanted:
        message = {name: value for name, value in message.items() if name not in unwanted}
    if thought := message.get(THINK):
        message = {name: value for name, value in message.items() if name != THINK}
        message["content"] = f"<think>{thought}</think>\n\n{message.get('content') or ''}"
    if calls := message.get("tool_calls"):
        fitting = [_call(call, profile, unwanted) for call in calls]
        if any(ours is not theirs for ours, theirs in zip(fitting, calls)):
            message = message | {"tool_calls": fitting}
        if not message.get("content") and profile.empty_content != "null":
            message = {name: value for name, value in message.items() if name != "content"}
            message |= {"content": ""} if profile.empty_content == "empty" else {}
    return message


def _call(call: dict[str, Any], profile: Profile, unwanted: set[str]) -> dict[str, Any]:
    if extra := {name for name in call.keys() - CALL if name not in profile.echoed or name in unwanted}:
        call = {name: value for name, value in call.items() if name not in extra}
    fit = _fitting(call["id"], profile)
    return call if fit == call["id"] else call | {"id": fit}


def _result(message: Message, name: str, profile: Profile) -> tuple[Message, list[Any]]:
    """A result as plain text (R20), and its images, which go into a message of their own (R19)."""
    images: list[Any] = []
    if isinstance(message["content"], list) and not profile.tool_images:
        texts = [part["text"] for part in message["content"] if isinstance(part.get("text"), str)]
        images = [part for part in message["content"] if not isinstance(part.get("text"), str)]
        message = message | {"content": "\n".join(texts) or "(see the image below)"}
    fit = _fitting(message["tool_call_id"], profile)
    if fit != message["tool_call_id"]:
        message = message | {"tool_call_id": fit}
    return (message | {"name": name} if name else message), images


def _attached(images: list[Any]) -> Message:
    return {"role": "user", "content": [{"type": "text", "text": "Images from the tool results above:"}, *images]}


def _fitting(call_id: str, profile: Profile) -> str:
    """T22: an id is opaque and goes back as it came; T31: unless it does not fit, which one of another server may not."""
    if not profile.ids or re.fullmatch(profile.ids, call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]


# ---- tools -----------------------------------------------------------------------------------------------


def tool_schemas(tools: list[dict[str, Any]], profile: Profile) -> list[dict[str, Any]]:
    """The tools, their schemas without words that are refused (R21) and with a type for each property (R22)."""
    if not (profile.schema_without or profile.typed_schema):
        return tools
    made = []
    for tool in tools:
        function = tool["function"]
        parameters = function.get("parameters") or {}
        schema = _schema(parameters, parameters.get("$defs") or {}, profile, ())
        made.append(tool | {"function": function | {"parameters": schema}})
    return made


def _schema(schema: Any, definitions: dict[str, Any], profile: Profile, inside: tuple[str, ...]) -> Any:
    """One schema and those in it. A reference is replaced by what it names; one to itself by any object."""
    if not isinstance(schema, dict):
        return schema
    name = str(schema.get("$ref", "")).rsplit("/", 1)[-1]
    if name and "$ref" in profile.schema_without:
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        target = definitions.get(name, {}) if name not in inside else {"type": "object"}
        return _schema(target | rest, definitions, profile, (*inside, name))
    schema = _in_fewer_words(schema, set(profile.schema_without))

    def into(key: str, value: Any) -> Any:
        if key == "properties" and isinstance(value, dict):
            return {each: _typed(_schema(of, definitions, profile, inside), profile) for each, of in value.items()}
        if isinstance(value, list):
            return [_schema(each, definitions, profile, inside) for each in value]
        return _schema(value, definitions, profile, inside)

    return {key: into(key, value) for key, value in schema.items()}


def _in_fewer_words(schema: dict[str, Any], without: set[str]) -> dict[str, Any]:
    """The same meant without the words that are refused, as far as others say it."""
    if "const" in schema.keys() & without:
        schema = schema | {"enum": [schema["const"]]}
    if "oneOf" in schema.keys() & without:
        schema = schema | {"anyOf": schema["oneOf"]}
    for part in schema["allOf"] if "allOf" in schema.keys() & without else ():
        schema = schema | part
    return {key: value for key, value in schema.items() if key not in without and (key, value) != ("enum", [])}


KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def _typed(schema: Any, profile: Profile) -> Any:
    """R22: a type, where one is missing: that of the values it may have, else text."""
    if not profile.typed_schema or not isinstance(schema, dict) or schema.keys() & {"type", "anyOf", "oneOf", "allOf", "$ref"}:
        return schema
    kind = "object" if "properties" in schema else "array" if "items" in schema else "string"
    values = schema.get("enum")
    return schema | {"type": KINDS.get(type(values[0]), kind) if values else kind}
