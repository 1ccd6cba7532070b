"""The list of messages that is the state: building its entries, repairing it, making wire messages.

Servers refuse a list in which a tool call has no result or a result has no call. `repair` runs
before every request, so that a session is usable after anything; it changes no message in place
and is idempotent. Read `repair`, then `History`, then `wire_messages` (in wire.py; it is imported
here for all who work with messages): the rest are the small rules that they apply.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable
from typing import Any

from coder.providers.text import mend_all, new_id, safe_name
from coder.providers.text import text_of as text_of
from coder.providers.wire import ROLES as ROLES
from coder.providers.wire import ReadMessages, common_prefix
from coder.providers.wire import calls_of as calls_of
from coder.providers.wire import wire_messages as wire_messages
from coder.types import Message, ToolResult, Usage

FILE_TOOLS = {"write", "edit", "apply_patch"}  # they change only the files that a call names
NOTE_SIZE = 50  # characters, at most, of the note in a truncated text
NOT_RUN = "Not run: the run ended before this call."


def user(text: str | list[dict[str, Any]]) -> Message:
    """A user message, with its time."""
    return {
        "role": "user",
        "content": mend_all(content_of(text)),
        "meta": {"timestamp": now()},
    }


def tool_message(call_id: str, result: ToolResult) -> Message:
    """The message with the result of one call; never empty, which servers refuse."""
    meta: dict[str, Any] = {"timestamp": now()}
    if result.is_error:
        meta["is_error"] = True
    content = mend_all(content_of(result.content)) or "(no output)"
    return {
        "role": "tool",
        "tool_call_id": call_id,
        "content": content,
        "meta": meta,
    }


def now() -> int:
    """Milliseconds since the epoch; 0 for a clock that is not set."""
    return max(0, time.time_ns() // 1_000_000)


def newest(messages: list[Message]) -> Message:
    """The last message with a role of the API; {} if there is none."""
    for message in reversed(messages):
        if message.get("role") in ROLES:
            return message
    return {}


def reason_not_to_answer(messages: list[Message]) -> str:
    """Why a list has nothing that a model could answer; "" if it has."""
    last = newest(messages)
    if not last:
        return "there is no message to continue from"
    if last["role"] == "assistant" and not last.get("tool_calls"):
        return "the last message is a finished answer"
    return ""


def is_answer(message: Message) -> bool:
    """A whole answer of a model, with its calls or without."""
    return message.get("role") == "assistant" and not message.get("meta", {}).get("aborted")


def keep_usage(answer: Message, usage: Usage, messages_before: int) -> None:
    """Keep with an answer the tokens of it and of the messages before it."""
    count = {
        "input": usage.input,
        "output": usage.output,
        "messages": messages_before,
    }
    answer["meta"] = answer.get("meta", {}) | {"usage": count}


def kept_usage(messages: list[Message]) -> Usage:
    """What was kept with the newest answer; zeros if nothing was, or if there are more or fewer
    messages before it now.

    `messages` have to be in order (repair).
    """
    for index in reversed(range(len(messages))):
        if not is_answer(messages[index]):
            continue
        count = messages[index].get("meta", {}).get("usage")
        if isinstance(count, dict) and count.get("messages") == index:
            return Usage(count["input"], count["output"])
        return Usage()
    return Usage()


def forget_usage(messages: list[Message]) -> None:
    """Take out of the answers, in place, what was kept with them: other messages were counted."""
    for message in messages:
        if is_answer(message):
            message.get("meta", {}).pop("usage", None)


# ---- the form of a message ------------------------------------------------------------------


def checked_message(value: Any) -> Message | None:
    """A message whose fields have their types; the same object if they have, None without a role.

    Of a message with a custom role only "meta" is checked.
    """
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return None
    checked = dict(value)
    if not isinstance(checked.get("meta", {}), dict):
        del checked["meta"]
    if checked["role"] in ROLES:
        _check_fields(checked)
    return value if checked == value else checked


def _check_fields(message: Message) -> None:
    """Give the fields of an API message their types, in place."""
    if "tool_call_id" in message:
        message["tool_call_id"] = as_text(message["tool_call_id"])
    content = message.get("content")
    if not isinstance(content, str) and content is not None:
        message["content"] = content_of(content)
    calls = message.pop("tool_calls", None)
    if message["role"] == "assistant" and isinstance(calls, list):
        good = [_checked_call(call) for call in calls if isinstance(call, dict)]
        if good:
            message["tool_calls"] = good


def content_of(value: Any) -> str | list[dict[str, Any]]:
    """The value as the content of a message: text, or parts in the API's form."""
    if isinstance(value, list):
        return [_checked_part(part) for part in value]
    return as_text(value)


def truncate_content(value: Any, max_chars: int) -> str | list[dict[str, Any]]:
    """The content of a result; of each text in it at most so many characters, and a note."""
    content = content_of(value)
    if isinstance(content, str):
        return truncate(content, max_chars)
    parts = []
    for part in content:
        if part.get("text"):
            part = part | {"text": truncate(part["text"], max_chars)}
        parts.append(part)
    return parts


def truncate(text: str, max_chars: int) -> str:
    """The first and the last half of so many characters, and a note how many are missing."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    missing = len(text) - max_chars
    return f"{text[:half]}\n\n... [truncated {missing} characters] ...\n\n{text[-half:]}"


def as_text(value: Any) -> str:
    """Text as it is, nothing for None, anything else as JSON, objects by their members."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    return json.dumps(value, ensure_ascii=False, default=_members_of)


def _members_of(value: Any) -> Any:
    """What JSON has of an object: its members, if it is a dataclass or a model of pydantic."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return str(value)


def _checked_part(part: Any) -> dict[str, Any]:
    """A part of content in the API's form: anything unknown as text, an image of MCP as a URL."""
    if not isinstance(part, dict) or not isinstance(part.get("text", ""), str):
        return {"type": "text", "text": as_text(part)}
    if part.get("type") == "image" and part.get("data") and part.get("mimeType"):
        url = f"data:{part['mimeType']};base64,{part['data']}"
        return {"type": "image_url", "image_url": {"url": url}}
    return part


def image_part(image: dict[str, Any]) -> dict[str, Any]:
    """An image in the API's form. Raises ValueError for anything else."""
    part = _checked_part(image)
    if part.get("type") != "image_url":
        form = '{"type": "image", "data": base64, "mimeType": "image/png"}'
        raise ValueError(f"an image is {form} or an image_url part")
    return part


def _checked_call(call: dict[str, Any]) -> dict[str, Any]:
    """A call whose id, name and arguments are text; the same object if they are."""
    function = call.get("function")
    if not isinstance(function, dict):
        function = {}
    call_id = call.get("id")
    name = function.get("name")
    arguments = function.get("arguments")
    if isinstance(call_id, str) and isinstance(name, str) and isinstance(arguments, str):
        return call
    texts = {"name": as_text(name), "arguments": as_text(arguments)}
    return call | {"id": as_text(call_id), "function": function | texts}


# ---- repairing a list -----------------------------------------------------------------------


def repair(messages: list[Message], used_ids: Iterable[str] = ()) -> list[Message]:
    """A list that every server accepts; messages that are in order are the same objects.

    Each message is checked (`checked_message`). Each call gets exactly one result, right after its
    message and in its order; a missing one is made up. Results without a call and assistant
    messages with neither text nor calls are dropped. Ids of calls are made unique (`used_ids`:
    those before this list), names and arguments made acceptable. Messages with a custom role stay
    as they are, but for a broken meta.
    """
    checked = [checked_message(message) for message in messages]
    usable = [message for message in checked if message is not None]
    return put_in_order(usable, used_ids)


def put_in_order(usable: list[Message], used_ids: Iterable[str] = ()) -> list[Message]:
    """`repair` of messages that are checked already."""
    ids = set(used_ids)
    repaired: list[Message] = []
    for index, message in enumerate(usable):
        role = message["role"]
        if role == "tool":
            continue  # results are taken with their calls, below
        if role != "assistant":
            repaired.append(message)
        elif message.get("tool_calls"):
            answer = _with_good_calls(message, ids)
            repaired.append(answer)
            repaired += _matching_results(message, answer, _results_after(index, usable))
        elif text_of(message):
            repaired.append(message)
    return repaired


def _with_good_calls(message: Message, used_ids: set[str]) -> Message:
    """An answer whose calls servers take; the same object if they do already. Their ids are added
    to `used_ids`."""
    calls: list[dict[str, Any]] = []
    for call in message["tool_calls"]:
        call_id = call["id"]
        if not call_id or call_id in used_ids:
            call_id = new_id()
        used_ids.add(call_id)
        calls.append(_mended_call(call, call_id))
    if calls == message["tool_calls"]:
        return message
    return message | {"tool_calls": calls}


def _mended_call(call: dict[str, Any], call_id: str) -> dict[str, Any]:
    """The call with this id, and with a name and arguments that servers take."""
    function = call["function"]
    arguments = function["arguments"] if _is_object(function["arguments"]) else "{}"
    mended = {"name": safe_name(function["name"]), "arguments": arguments}
    if call_id == call["id"] and mended.items() <= function.items():
        return call
    return call | {"id": call_id, "type": "function", "function": function | mended}


def _results_after(index: int, messages: list[Message]) -> list[Message]:
    """The tool results between the answer at `index` and the next answer."""
    results = []
    for following in range(index + 1, len(messages)):
        message = messages[following]
        if message["role"] == "assistant":
            break
        if message["role"] == "tool":
            results.append(message)
    return results


def _matching_results(written: Message, answer: Message, results: list[Message]) -> list[Message]:
    """One result for each call of an answer, in its order.

    Results are found by the ids that were `written`. Of calls with one id, each has its own.
    """
    matching = []
    left = results.copy()
    for call, mended in zip(written["tool_calls"], answer["tool_calls"]):
        own = (result for result in left if result.get("tool_call_id") == call["id"])
        result = next(own, None)
        if result is not None:
            left.remove(result)
        matching.append(_fit_result(result, mended["id"]))
    return matching


def _fit_result(result: Message | None, call_id: str) -> Message:
    """The result as servers take it: with the id of its call, and not empty."""
    if result is None:
        return tool_message(call_id, ToolResult(NOT_RUN, is_error=True))
    if result.get("tool_call_id") == call_id and result.get("content"):
        return result
    return result | {"tool_call_id": call_id, "content": result.get("content") or "(no output)"}


def _call_ids(messages: list[Message]) -> set[str]:
    return {call["id"] for message in messages for call in calls_of(message)}


def _is_object(arguments: Any) -> bool:
    """Is this the text of a JSON object?"""
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, TypeError, RecursionError):
        return False


class History:
    """`repair` for the list of a run, in place.

    The messages at its beginning that it has repaired before, or that are still as they were read
    from a session (ReadMessages), are not checked again: a late step costs little more than the
    first one, and a long session is taken up soon. Whoever changes one in place makes a new
    History.
    """

    def __init__(self, messages: list[Message]) -> None:
        self.messages = messages
        self._repaired: list[Message] = []  # the list as the last repair has left it
        if isinstance(messages, ReadMessages):
            self._repaired += messages.copies
        self._ids = _call_ids(self._repaired)

    def repair(self) -> None:
        # What is at the beginning as after the last repair is in order
        messages = self.messages
        known = common_prefix(self._repaired, messages)
        if known == len(messages) == len(self._repaired):
            return
        # Back before the last known answer: its results may be among the new messages
        while known and messages[known - 1].get("role") == "tool":
            known -= 1
        if known and messages[known - 1].get("tool_calls"):
            known -= 1
        # Ids of calls that left the list, or are repaired again, are free
        self._ids -= _call_ids(self._repaired[known:])
        # All others are repaired
        messages[known:] = repair(messages[known:], self._ids)
        # From here on known messages are told by identity, which is fast. So one that is changed in
        # place is not noticed
        self._repaired = messages[:]
        self._ids |= _call_ids(messages[known:])
