"""The body of a request in the form that a Profile describes: pure functions over lists.

The same messages come out the same way each time, so that the beginning of a request stays what it was and the
provider's cache serves it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from operator import eq
from typing import Any

from coder.providers.profiles import BUDGET, EFFORT, LIMITS, Profile, Rejected, rejection
from coder.providers.reasoning import EXTRA_MEMBERS, THINK
from coder.providers.text import mend, mend_all
from coder.types import Message, ModelError, Reasoning, Request

# Tokens; pi-agent-core's numbers, which know nothing above "high".
BUDGETS: dict[str, int] = {"minimal": 128, "low": 512, "medium": 1024, "high": 2048, "xhigh": 2048}
NEEDED = {"model", "messages", "tools", "stream"}  # always sent
SYSTEM = {"system", "developer"}
CALL = {"id", "type", "function"}
BETWEEN: Message = {"role": "assistant", "content": "Understood."}  # a result and a user message
EMPTY = {"null": None, "empty": "", "absent": 0}  # 0: no content that a message can have


def request_body(
    model: str,
    request: Request,
    profile: Profile,
    rejected: Rejected,
    extra: Mapping[str, Any],
    budgets: Mapping[str, int],
) -> dict[str, Any]:
    """The JSON that is sent: nothing that is not needed, and at most one system message, the first.

    The profile's values give way to `extra`, and those to the request's own options.
    """
    body: dict[str, Any] = {
        "model": model,
        "messages": provider_messages(request, profile, {name for name, _ in rejected}),
        "stream": True,
    }
    if profile.stream_options:
        body["stream_options"] = {"include_usage": True}
    if request.tools:  # an empty list is an error on some servers
        body["tools"] = tool_schemas(request.tools, profile)
    if profile.cache_key and request.session_id:
        body["prompt_cache_key"] = request.session_id[:64]
    body |= thinking(profile, request.reasoning, budgets)
    body |= _options(request, extra, profile, rejected)
    return {
        name: value
        for name, value in body.items()
        if name in NEEDED or not rejected or rejection(name, value) not in rejected
    }


def thinking(
    profile: Profile, level: Reasoning, budgets: Mapping[str, int] = BUDGETS
) -> dict[str, Any]:
    """The members that ask for this much reasoning; none where it is off or the model cannot be asked."""
    if level == "off":
        return {}
    if level not in BUDGETS:
        names = ", ".join(BUDGETS)
        raise ValueError(f"reasoning is {level!r}, and has to be off or one of {names}")
    budget = max(profile.least_budget, budgets.get(level, BUDGETS[level]))
    words = {EFFORT: profile.efforts.get(level, level), BUDGET: budget}

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: filled(item) for name, item in value.items()}
        return words.get(value, value) if isinstance(value, str) else value

    return {name: filled(value) for name, value in profile.reasoning.items()}


def _options(
    request: Request, extra: Mapping[str, Any], profile: Profile, rejected: Rejected
) -> dict[str, Any]:
    """What is sent besides, without what the model does not take, the output limit under its name here."""
    own = dict(request.options)
    if not profile.temperature or request.reasoning != "off":
        own.pop("temperature", None)
    if not profile.parallel_tool_calls:
        own.pop("parallel_tool_calls", None)
    given = [each[name] for each in (own, extra) for name in LIMITS if name in each]
    options = {name: value for name, value in {**extra, **own}.items() if name not in LIMITS}
    names = sorted(LIMITS, key=lambda name: name != profile.output_limit)
    known = [name for name in names if rejection(name, None) not in rejected]
    if given and known:
        options[known[0]] = given[0]
    return options


# ---- messages --------------------------------------------------------------------------------------


def provider_messages(request: Request, profile: Profile, rejected: set[str]) -> list[Message]:
    """The messages as the server takes them. `rejected`: names of members that it does not."""
    own = [{"role": "system", "content": request.system}] if request.system else []
    system = [each for each in [*own, *request.messages] if each["role"] in SYSTEM]
    made: list[Message] = []
    if system:
        text = mend("\n\n".join(map(text_in, system)))
        made.append({"role": profile.system_role, "content": text})
    unwanted = EXTRA_MEMBERS - set(profile.echoed) | rejected
    images: list[Any] = []  # of the results of one turn
    names: dict[str, str] = {}  # call id -> tool
    for message in request.messages:
        role = message["role"]
        if role in SYSTEM:
            continue
        if images and role != "tool":
            made.append(_image_message(images))
            images = []
        if role == "assistant":
            if profile.tool_name:
                calls = message.get("tool_calls") or ()
                names = {call["id"]: call["function"]["name"] for call in calls}
            message = _assistant(message, profile, unwanted)
        elif role == "tool":
            name = names.get(message["tool_call_id"], "")
            message, found = _result(message, name, profile)
            images += found
        made.append(message)
    if images:
        made.append(_image_message(images))
    return _in_strict_turns(made) if profile.strict_turns else made


def _image_message(images: list[Any]) -> Message:
    text = {"type": "text", "text": "Images from the tool results above:"}
    return {"role": "user", "content": [text, *images]}


def _in_strict_turns(messages: list[Message]) -> list[Message]:
    """User messages in a row become one; an answer stands between a result and a user message."""
    made: list[Message] = []
    for message in messages:
        last = made[-1]["role"] if made else ""
        if message["role"] != "user" or last not in ("tool", "user"):
            made.append(message)
        elif last == "tool":
            made += [BETWEEN, message]
        else:
            content = _joined(made[-1].get("content"), message.get("content"))
            made[-1] = made[-1] | {"content": content}
    return made


def _joined(first: Any, second: Any) -> Any:
    """The contents of two messages as one: text, or parts where either has parts."""
    first, second = first or "", second or ""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    as_parts = ([{"type": "text", "text": c}] if isinstance(c, str) else c for c in (first, second))
    return [part for parts in as_parts for part in parts]


def text_in(message: Message) -> str:
    """The text of a message whose content may have parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    parts = (part.get("text") for part in content if isinstance(part, dict))
    return "\n".join(text for text in parts if isinstance(text, str))


def _assistant(message: Message, profile: Profile, unwanted: set[str]) -> Message:
    """Only the members that go back, content in the server's form, ids that fit."""
    if not unwanted.isdisjoint(message):
        message = {name: value for name, value in message.items() if name not in unwanted}
    if thought := message.get(THINK):
        message = {name: value for name, value in message.items() if name != THINK}
        message["content"] = f"<think>{thought}</think>\n\n{message.get('content') or ''}"
    calls = message.get("tool_calls")
    if not calls:
        return message
    made = [_call(call, profile, unwanted) for call in calls]
    if any(ours is not theirs for ours, theirs in zip(made, calls)):
        message = message | {"tool_calls": made}
    if profile.reasoning_filled and "reasoning_content" not in message:
        message = message | {"reasoning_content": ""}
    empty = EMPTY[profile.empty_content]
    if not message.get("content") and message.get("content", 0) != empty:
        message = {name: value for name, value in message.items() if name != "content"}
        if profile.empty_content != "absent":
            message["content"] = empty
    return message


def _call(call: dict[str, Any], profile: Profile, unwanted: set[str]) -> dict[str, Any]:
    if not CALL.issuperset(call):
        known = CALL | set(profile.echoed) - unwanted
        call = {name: value for name, value in call.items() if name in known}
    call_id = _valid_id(call["id"], profile)
    return call if call_id == call["id"] else call | {"id": call_id}


def _result(message: Message, name: str, profile: Profile) -> tuple[Message, list[Any]]:
    """A result as plain text, which every server takes, and its images, which most take in a user message only."""
    images: list[Any] = []
    content = message["content"]
    if isinstance(content, list) and not profile.tool_images:
        parts = [part for part in content if isinstance(part, dict)]
        images = [part for part in parts if not isinstance(part.get("text"), str)]
        nothing = "(see the image below)" if images else "(no output)"
        message = message | {"content": text_in(message) or nothing}
    call_id = _valid_id(message["tool_call_id"], profile)
    if call_id != message["tool_call_id"]:
        message = message | {"tool_call_id": call_id}
    return (message | {"name": name} if name else message), images


def _valid_id(call_id: str, profile: Profile) -> str:
    """An id goes back as it came, unless another server gave it and it does not match here."""
    if not profile.ids or re.fullmatch(profile.ids, call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]


# ---- tools -----------------------------------------------------------------------------------------

KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}


def tool_schemas(tools: list[dict[str, Any]], profile: Profile) -> list[dict[str, Any]]:
    """The tools as the server takes them. Only hand-written schemas use what has to change."""
    if not (profile.schema_without or profile.typed_schema):
        return tools
    made = []
    for tool in tools:
        function = tool.get("function") or {}
        whole = function.get("parameters") or {}
        known = {**(whole.get("definitions") or {}), **(whole.get("$defs") or {})}
        schema = _schema(whole, profile, known)
        made.append(tool | {"function": function | {"parameters": schema}} if function else tool)
    return made


def _schema(
    schema: Any, profile: Profile, known: dict[str, Any], inside: tuple[str, ...] = ()
) -> Any:
    """A schema without rejected keywords: what references and allOf stand for is put in, const and oneOf become enum and
    anyOf, the rest goes. `known`: the definitions, `inside`: the references around this schema."""
    if isinstance(schema, list):
        return [_schema(each, profile, known, inside) for each in schema]
    if not isinstance(schema, dict):
        return schema
    without = set(profile.schema_without)
    schema, inside = _resolved(schema, without, known, inside)
    if "const" in schema and "const" in without:
        schema = schema | {"enum": [schema["const"]]}
    if "oneOf" in schema and "oneOf" in without:
        schema = {"anyOf": schema["oneOf"]} | schema
    made = {}
    for key, value in schema.items():
        if key in without or (key, value) == ("enum", []):
            continue
        if key == "properties" and isinstance(value, dict):  # names, which may be keywords
            inner = {name: _schema(of, profile, known, inside) for name, of in value.items()}
            made[key] = {name: _typed(of, profile) for name, of in inner.items()}
        elif key in ("enum", "required", "default", "examples"):
            made[key] = value
        else:
            made[key] = _schema(value, profile, known, inside)
    return made


def _resolved(
    schema: dict[str, Any], without: set[str], known: dict[str, Any], inside: tuple[str, ...]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(the schema with its reference put in, the references around it): one to itself stands for any object."""
    while "$ref" in schema and "$ref" in without:
        name = str(schema["$ref"]).rsplit("/", 1)[-1]
        target = known.get(name, {}) if name not in (*inside, "#") else {"type": "object"}
        schema = target | {key: value for key, value in schema.items() if key != "$ref"}
        inside = (*inside, name)
    for part in schema["allOf"] if "allOf" in schema.keys() & without else ():
        whole, inside = _resolved(part, without, known, inside)
        schema = whole | schema
    return schema, inside


def _typed(schema: Any, profile: Profile) -> Any:
    """With a type, where the server needs one and it is missing: that of its values, else text."""
    if not (profile.typed_schema and isinstance(schema, dict)):
        return schema
    if schema.keys() & {"type", "anyOf", "oneOf", "allOf", "$ref"}:
        return schema
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    kind = "object" if "properties" in schema else "array" if "items" in schema else "string"
    return schema | {"type": KINDS.get(type(values[0]), kind) if values else kind}


# ---- copies ----------------------------------------------------------------------------------------


def unchanged(copies: list[Message], messages: list[Message]) -> int:
    """How many messages at the beginning are as they were when the copies were made."""
    if copies == messages[: len(copies)]:  # quick: a text is the same object in both
        return len(copies)
    same = list(map(eq, copies, messages))
    return same.index(False) if False in same else len(same)


def copied(value: Any) -> Any:
    """A copy of a JSON value, which shows later whether the value was changed in place."""
    if isinstance(value, dict):
        return {name: copied(each) for name, each in value.items()}
    return [copied(each) for each in value] if isinstance(value, list) else value


# ---- encoding --------------------------------------------------------------------------------------

NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")  # escaped; not where the backslash itself is


def encoded(body: dict[str, Any]) -> bytes:
    """The bytes of a request, without what no server accepts (lone surrogates, NUL). Raises ModelError for what is no
    JSON."""
    try:
        try:
            data = _dumped(body)
            if b"\\u0000" not in data or not NUL.search(data):
                return data
        except UnicodeEncodeError:
            pass
        return _dumped(mend_all(body))
    except (TypeError, ValueError, RecursionError) as error:
        raise ModelError("bad_request", f"what was to be sent is no JSON: {error}") from error


def _dumped(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
