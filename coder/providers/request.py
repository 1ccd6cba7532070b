"""Messages and tool schemas as a server wants them: pure functions over lists, told by a Profile what to do.

The same messages come out the same way each time, so that the beginning of a request stays what it was and the provider's
cache serves it.
"""

from __future__ import annotations

import hashlib
import json
import re
from operator import eq
from typing import TYPE_CHECKING, Any

from coder.providers.reasoning import ECHOED, REASONING, THINK
from coder.providers.text import mend_all
from coder.types import Message, ModelError

if TYPE_CHECKING:
    from coder.providers.profiles import Profile

CALL = {"id", "type", "function"}
OURS = {*REASONING, *ECHOED, THINK}  # what assembler.py may have put into an assistant message
SYSTEM = {"system", "developer"}
# R16: where a user message must not follow a result
BETWEEN: Message = {
    "role": "assistant",
    "content": "Understood.",
}


EMPTY = {"null": None, "empty": "", "absent": 0}  # R13; 0 is no content that a message can have


class Shaper:
    """Messages as a profile wants them. Of a list that only grows, what was shaped for the last request is used again, up
    to the newest answer: nothing behind one changes what is in front of it."""

    def __init__(self) -> None:
        self._last: tuple[Any, list[Message], list[tuple[int, int]], list[Message]] = (
            None,
            [],
            [],
            [],
        )

    def __call__(
        self, messages: list[Message], profile: Profile, refused: set[str]
    ) -> list[Message]:
        terms, before, marks, made = self._last
        now = (id(profile), frozenset(refused))
        known = unchanged(before, messages) if terms == now else 0
        marks = [mark for mark in marks if mark[0] <= known]
        start, kept = marks[-1] if marks else (0, 0)
        made = made[:kept]
        work = _Work(profile, refused, made)
        for position, message in enumerate(messages[start:], start):
            if message["role"] == "assistant" and position > start:
                work.flush()
                marks.append((position, len(made)))
            work.take(message)
        work.flush()
        # At once: another thread may use the same model
        self._last = (
            now,
            [*before[:known], *map(copied, messages[known:])],
            marks,
            made,
        )
        return made[:]


class _Work:
    """Shaping one list, message by message, onto `made`."""

    def __init__(self, profile: Profile, refused: set[str], made: list[Message]) -> None:
        self.profile, self.made = profile, made
        self.unwanted = OURS - set(profile.echoed) | refused
        self.images: list[Any] = []  # of the results of one turn
        self.names: dict[str, str] = {}  # call id -> tool

    def take(self, message: Message) -> None:
        role = message["role"]
        if role in SYSTEM:
            return  # R5: it is in the first message, with the others
        if role != "tool":
            self.flush()
        if role == "assistant":
            if self.profile.tool_name:
                self.names = {
                    call["id"]: call["function"]["name"] for call in message.get("tool_calls") or ()
                }
            message = _assistant(message, self.profile, self.unwanted)
        elif role == "tool":
            message, found = _result(
                message, self.names.get(message["tool_call_id"], ""), self.profile
            )
            self.images += found
        self._append(message)

    def flush(self) -> None:
        """R19: the images of a turn, behind all its results."""
        if self.images:
            images, self.images = self.images, []
            self._append(
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Images from the tool results above:"},
                        *images,
                    ],
                }
            )

    def _append(self, message: Message) -> None:
        last = self.made[-1]["role"] if self.made else ""
        if self.profile.strict_turns and message["role"] == "user" and last == "tool":
            self.made.append(BETWEEN)
        if self.profile.strict_turns and message["role"] == last == "user":
            self.made[-1] = self.made[-1] | {
                "content": _joined(self.made[-1].get("content"), message.get("content"))
            }
        else:
            self.made.append(message)


def text_in(message: Message) -> str:
    """The text of a message whose content may have parts."""
    content = message.get("content") or ""
    return (
        content
        if isinstance(content, str)
        else "\n".join(
            part["text"]
            for part in content
            if isinstance(part, dict) and isinstance(part.get("text"), str)
        )
    )


def _joined(first: Any, second: Any) -> Any:
    """The contents of two messages as one: text, or parts where either has parts."""
    first, second = first or "", second or ""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [
        part
        for content in (first, second)
        for part in ([{"type": "text", "text": content}] if isinstance(content, str) else content)
    ]


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
        if profile.reasoning_filled and "reasoning_content" not in message:
            message = message | {"reasoning_content": ""}
        if not message.get("content") and message.get("content", 0) != EMPTY[profile.empty_content]:
            message = {name: value for name, value in message.items() if name != "content"}
            if profile.empty_content != "absent":
                message["content"] = EMPTY[profile.empty_content]
    return message


def _call(call: dict[str, Any], profile: Profile, unwanted: set[str]) -> dict[str, Any]:
    if extra := {
        name for name in call.keys() - CALL if name not in profile.echoed or name in unwanted
    }:
        call = {name: value for name, value in call.items() if name not in extra}
    fit = _fitting(call["id"], profile)
    return call if fit == call["id"] else call | {"id": fit}


def _result(message: Message, name: str, profile: Profile) -> tuple[Message, list[Any]]:
    """A result as plain text (R20), and its images, which go into a message of their own (R19)."""
    images: list[Any] = []
    if isinstance(message["content"], list) and not profile.tool_images:
        images = [
            part
            for part in message["content"]
            if isinstance(part, dict) and not isinstance(part.get("text"), str)
        ]
        message = message | {
            "content": text_in(message) or ("(see the image below)" if images else "(no output)")
        }
    fit = _fitting(message["tool_call_id"], profile)
    if fit != message["tool_call_id"]:
        message = message | {"tool_call_id": fit}
    return (message | {"name": name} if name else message), images


def _fitting(call_id: str, profile: Profile) -> str:
    """T22: an id is opaque and goes back as it came; T31: unless it does not fit, which one of another server may not."""
    if not profile.ids or re.fullmatch(profile.ids, call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]


# ---- tools -----------------------------------------------------------------------------------------------


MOST_SCHEMAS = 2000  # in one tool: a definition may name others twice, and these again


def tool_schemas(tools: list[dict[str, Any]], profile: Profile) -> list[dict[str, Any]]:
    """The tools, their schemas without words that are refused (R21) and with a type for each property (R22)."""
    if not (profile.schema_without or profile.typed_schema):
        return tools
    made = []
    for tool in tools:
        function = tool.get("function") or {}
        parameters = function.get("parameters") or {}
        schema = _Schemas(parameters, profile).plain(parameters, ())
        made.append(tool | {"function": function | {"parameters": schema}} if function else tool)
    return made


class _Schemas:
    """The schema of one tool's parameters, with those in it."""

    def __init__(self, whole: dict[str, Any], profile: Profile) -> None:
        self.profile, self.without = profile, set(profile.schema_without)
        self.definitions = {**(whole.get("definitions") or {}), **(whole.get("$defs") or {})}
        self.left = MOST_SCHEMAS

    def plain(self, schema: Any, inside: tuple[str, ...]) -> Any:
        if isinstance(schema, list):
            return [self.plain(each, inside) for each in schema]
        if not isinstance(schema, dict):
            return schema
        self.left -= 1
        schema, inside = (
            self._whole(schema, inside) if self.left > 0 else ({"type": "object"}, inside)
        )
        return {
            key: self._under(key, value, inside)
            for key, value in schema.items()
            if key not in self.without and (key, value) != ("enum", [])
        }

    def _under(self, key: str, value: Any, inside: tuple[str, ...]) -> Any:
        # Names of the user's, which may be words of ours
        if key == "properties" and isinstance(value, dict):
            return {
                name: _typed(self.plain(of, inside), self.profile) for name, of in value.items()
            }
        return (
            value
            if key in ("enum", "required", "default", "examples")
            else self.plain(value, inside)
        )

    def _whole(
        self, schema: dict[str, Any], inside: tuple[str, ...]
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The same meant without the words that are refused: references and allOf put in, const and oneOf said otherwise."""
        refused = schema.keys() & self.without
        if "$ref" in refused:
            name = str(schema["$ref"]).rsplit("/", 1)[-1]
            rest = {key: value for key, value in schema.items() if key != "$ref"}
            # To itself: any object
            target = {"type": "object"} if name in (*inside, "#") else self.definitions.get(name)
            return self._whole((target if isinstance(target, dict) else {}) | rest, (*inside, name))
        for part in schema["allOf"] if "allOf" in refused else ():
            part, inside = self._whole(part, inside)
            joined = {
                "properties": schema.get("properties", {}) | part.get("properties", {}),
                "required": [*schema.get("required", []), *part.get("required", [])],
            }
            schema = schema | part | {key: value for key, value in joined.items() if value}
        if "const" in refused:
            schema = schema | {"enum": [schema["const"]]}
        if "oneOf" in refused and "anyOf" not in schema:
            schema = schema | {"anyOf": schema["oneOf"]}
        return schema, inside


KINDS = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
}


def _typed(schema: Any, profile: Profile) -> Any:
    """R22: a type, where one is missing: that of the values it may have, else text."""
    if (
        not profile.typed_schema
        or not isinstance(schema, dict)
        or schema.keys() & {"type", "anyOf", "oneOf", "allOf", "$ref"}
    ):
        return schema
    kind = "object" if "properties" in schema else "array" if "items" in schema else "string"
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return schema | {"type": KINDS.get(type(values[0]), kind) if values else kind}


def unchanged(copies: list[Message], messages: list[Message]) -> int:
    """How many messages at the beginning are as they were when the copies were made."""
    # Nearly always, and quick: a text is the same object in both
    if copies == messages[: len(copies)]:
        return len(copies)
    same = list(map(eq, copies, messages))
    return same.index(False) if False in same else len(same)


def copied(value: Any) -> Any:
    """A copy of a JSON value, which shows later whether the value was changed in place."""
    if isinstance(value, dict):
        return {name: copied(each) for name, each in value.items()}
    return [copied(each) for each in value] if isinstance(value, list) else value


# ---- encoding --------------------------------------------------------------------------------------------

NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")  # escaped; not where the backslash itself is


def encoded(body: dict[str, Any]) -> bytes:
    """The bytes of a request, without what no encoder accepts. Raises ModelError for what is no JSON."""
    try:
        data = _dumped(body)
        if data is None or (b"\\u0000" in data and NUL.search(data)):  # a hook may have put it in
            data = _dumped(mend_all(body)) or b""
        return data
    except (TypeError, ValueError, RecursionError) as error:
        raise ModelError("bad_request", f"what was to be sent is no JSON: {error}") from error


def _dumped(body: Any) -> bytes | None:
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return None
