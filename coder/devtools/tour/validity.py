"""What servers refuse in a request, in the words of the tour's server."""

from __future__ import annotations

import json
from typing import Any

from coder.devtools.scripted import Body
from coder.types import Message

ROLES = ("system", "developer", "user", "assistant", "tool")


class RefusedError(Exception):
    """A server refuses the request; the text says why."""


def check_request(body: Body) -> None:
    """Raises RefusedError for what a strict server refuses."""
    try:
        check_messages(body["messages"])
        for tool in body.get("tools") or []:
            _ = tool["function"]["name"] + tool["type"]
    except (LookupError, TypeError, AttributeError) as error:
        form = "the messages or the tools do not have the form of the API"
        raise RefusedError(f"{form} ({error!r})") from None


def check_messages(messages: list[Message]) -> None:
    open_calls: list[str] = []  # ids of calls without a result so far
    for message in messages:
        role = message["role"]
        if role not in ROLES:
            raise RefusedError(f"{role!r} is no role")
        if role == "tool":
            take_result(message, open_calls)
            continue
        check_closed(open_calls)
        if role == "assistant":
            open_calls = ids_of_calls(message)
    check_closed(open_calls)
    if not any(message["role"] == "user" for message in messages):
        raise RefusedError("there is no message of the user")


def take_result(message: Message, open_calls: list[str]) -> None:
    call_id = message["tool_call_id"]
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
    for call in calls:
        if not is_object(call["function"]["arguments"]):
            raise RefusedError(f"the arguments of the call {call['id']} are no JSON object")
    return [call["id"] for call in calls]


def is_object(arguments: Any) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False
