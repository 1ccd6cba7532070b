"""What servers refuse in a request, in the words of the tour's server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from coder.devtools.scripted import Body
from coder.types import Message

PATH = "/v1/chat/completions"
ROLES = ("system", "developer", "user", "assistant", "tool")


class RefusedError(Exception):
    """A server refuses the request; the text says why."""


def check_head(path: str, headers: Mapping[str, str], key: str) -> None:
    """The address of a request and its headers. Raises RefusedError."""
    if path != PATH:
        raise RefusedError(f"its address is {path}, not {PATH}")
    if not headers.get("content-type", "").startswith("application/json"):
        raise RefusedError("the header Content-Type is not: application/json")
    if headers.get("authorization") != f"Bearer {key}":
        raise RefusedError("the header Authorization is not: Bearer $OPENAI_API_KEY")


def check_request(body: Body) -> None:
    """Raises RefusedError for what a strict server refuses."""
    try:
        check_messages(body["messages"])
        for tool in body.get("tools") or []:
            member(tool, "type", "a tool")
            function = member(tool, "function", "a tool")
            member(function, "name", "the function of a tool")
    except (TypeError, AttributeError):
        raise RefusedError("the messages or the tools do not have the form of the API") from None


def member(thing: Any, name: str, what: str) -> Any:
    """Raises RefusedError if it is not there."""
    if not isinstance(thing, dict):
        raise RefusedError(f"{what} is no JSON object")
    if name not in thing:
        raise RefusedError(f"{what} has no {name}")
    return thing[name]


def check_messages(messages: list[Message]) -> None:
    open_calls: list[str] = []  # ids of calls without a result so far
    for message in messages:
        role = message["role"]
        if role not in ROLES:
            raise RefusedError(f"{role!r} is no role")
        if role != "assistant":
            check_content(message)
        if role == "tool":
            take_result(message, open_calls)
            continue
        check_closed(open_calls)
        if role == "assistant":
            open_calls = ids_of_calls(message)
    check_closed(open_calls)
    if not any(message["role"] == "user" for message in messages):
        raise RefusedError("there is no message of the user")


def check_content(message: Message) -> None:
    what = f"a message with the role {message['role']}"
    content = member(message, "content", what)
    if not isinstance(content, (str, list)):
        raise RefusedError(f"the content of {what} is no text")


def take_result(message: Message, open_calls: list[str]) -> None:
    call_id = member(message, "tool_call_id", "a message with the role tool")
    if call_id not in open_calls:
        raise RefusedError(
            f"a result has the tool_call_id {call_id!r}, and no open call has this id"
        )
    open_calls.remove(call_id)


def check_closed(open_calls: list[str]) -> None:
    if open_calls:
        raise RefusedError(f"the call {open_calls[0]} has no result right after its message")


def ids_of_calls(message: Message) -> list[str]:
    """The calls of an answer, each of which has to get a result."""
    calls = message.get("tool_calls") or []
    if not calls and not message.get("content"):
        raise RefusedError("an assistant message has neither a text nor a call")
    ids: list[str] = []
    for call in calls:
        call_id = member(call, "id", "a call")
        function = member(call, "function", "a call")
        member(function, "name", "the function of a call")
        arguments = member(function, "arguments", "the function of a call")
        if not isinstance(arguments, str):
            raise RefusedError(f"the arguments of the call {call_id} are no text with JSON in it")
        if not is_object(arguments):
            raise RefusedError(f"the arguments of the call {call_id} are no JSON object")
        ids.append(call_id)
    return ids


def is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False
