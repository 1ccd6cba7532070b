"""The list of messages that is the state: building its entries, repairing it, making wire messages.

Servers refuse a history in which a tool call has no result or a result has no call. `repair` runs
before every request, so that a session is usable after anything; it is pure and idempotent.
"""

from __future__ import annotations

import json
import time
from itertools import takewhile
from operator import is_
from typing import Any

from coder.providers.text import mend_all, new_id, safe_name
from coder.providers.text import text_of as text_of
from coder.types import Message, ToolResult, Usage

ROLES = {"user", "assistant", "tool", "system", "developer"}
NOT_RUN = "Not run: the run ended before this call."


def user(text: str | list[dict[str, Any]]) -> Message:
    """A user message, stamped."""
    return {"role": "user", "content": mend_all(content_of(text)), "meta": {"timestamp": now()}}


def tool_message(call_id: str, result: ToolResult) -> Message:
    """The message that answers one call; never empty, which servers refuse."""
    meta = {"timestamp": now()} | ({"is_error": True} if result.is_error else {})
    content = mend_all(content_of(result.content)) or "(no output)"
    return {"role": "tool", "tool_call_id": call_id, "content": content, "meta": meta}


def now() -> int:
    """Milliseconds since the epoch; 0 for a clock that is not set."""
    return max(0, time.time_ns() // 1_000_000)


def newest(messages: list[Message]) -> Message:
    """The last message with a role of the API; {} where there is none."""
    return next((each for each in reversed(messages) if each.get("role") in ROLES), {})


def nothing_to_answer(messages: list[Message]) -> str:
    """Why a list has nothing that a model could answer; "" where it has."""
    last = newest(messages)
    if not last:
        return "there is no message to continue from"
    done = last["role"] == "assistant" and not last.get("tool_calls")
    return "the last message is a finished answer" if done else ""


def is_answer(message: Message) -> bool:
    """A whole answer of a model, with its calls or without."""
    return message.get("role") == "assistant" and not message.get("meta", {}).get("aborted")


def stamp_usage(message: Message, usage: Usage, sent: int) -> None:
    """Keep with an answer what was counted for it, and how many messages were sent for it."""
    count = {"input": usage.input, "output": usage.output, "messages": sent}
    message["meta"] = message.get("meta", {}) | {"usage": count}


def stamped_usage(messages: list[Message]) -> Usage:
    """The tokens of the newest answer and of what was sent for it, where these are still the messages before it.

    `messages` have to be in order (repair).
    """
    places = (place for place in reversed(range(len(messages))) if is_answer(messages[place]))
    place = next(places, None)
    count = messages[place].get("meta", {}).get("usage") if place is not None else None
    if not isinstance(count, dict) or count.get("messages") != place:
        return Usage()
    return Usage(count["input"], count["output"])


def forget_usage(messages: list[Message]) -> None:
    """In place, where the messages that were counted have been replaced."""
    for message in filter(is_answer, messages):
        message.get("meta", {}).pop("usage", None)


# ---- the form of a message ------------------------------------------------------------------


def formed(value: Any) -> Message | None:
    """A message whose fields have their types; the same object if they have, None without a role.

    Of a message with a custom role only "meta" is checked.
    """
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return None
    made = dict(value)
    if not isinstance(made.get("meta", {}), dict):
        del made["meta"]
    if made["role"] in ROLES:
        if "tool_call_id" in made:
            made["tool_call_id"] = as_text(made["tool_call_id"])
        if made.get("content") is not None:
            made["content"] = content_of(made["content"])
        given = made.pop("tool_calls", None)
        given = given if isinstance(given, list) else []
        calls = [_form_call(call) for call in given if isinstance(call, dict)]
        if calls and made["role"] == "assistant":
            made["tool_calls"] = calls
    return value if made == value else made


def content_of(value: Any) -> str | list[dict[str, Any]]:
    """What may stand in a message: text, or parts in the API's form."""
    return [_form_part(part) for part in value] if isinstance(value, list) else as_text(value)


def truncate_content(value: Any, limit: int) -> str | list[dict[str, Any]]:
    """The content of a result; each text in it in at most `limit` characters."""
    content = content_of(value)
    if isinstance(content, str):
        return truncate(content, limit)
    texts = (truncate(part.get("text", ""), limit) for part in content)
    return [part | {"text": text} if text else part for part, text in zip(content, texts)]


def truncate(text: str, limit: int) -> str:
    """The first and the last half of `limit` characters, and how many are missing between them."""
    if len(text) <= limit:
        return text
    half, missing = limit // 2, len(text) - limit
    return f"{text[:half]}\n\n... [truncated {missing} characters] ...\n\n{text[-half:]}"


def calls_of(message: Message) -> list[dict[str, Any]]:
    """The calls of an answer; a message of another role has none, whatever stands in it."""
    return message.get("tool_calls") or [] if message.get("role") == "assistant" else []


def as_text(value: Any) -> str:
    """Text as it is, nothing for None, anything else as JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False, default=str)


def _form_part(part: Any) -> dict[str, Any]:
    if not isinstance(part, dict) or not isinstance(part.get("text", ""), str):
        return {"type": "text", "text": as_text(part)}
    if part.get("type") == "image" and part.get("data") and part.get("mimeType"):
        url = f"data:{part['mimeType']};base64,{part['data']}"
        return {"type": "image_url", "image_url": {"url": url}}
    return part


def image_part(image: dict[str, Any]) -> dict[str, Any]:
    """An image in the API's form. Raises ValueError where it is none."""
    part = _form_part(image)
    if part.get("type") != "image_url":
        form = '{"type": "image", "data": base64, "mimeType": "image/png"}'
        raise ValueError(f"an image is {form} or an image_url part")
    return part


def _form_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"] if isinstance(call.get("function"), dict) else {}
    function = function | {name: as_text(function.get(name)) for name in ("name", "arguments")}
    return call | {"id": as_text(call.get("id")), "function": function}


# ---- repairing a list -----------------------------------------------------------------------


def repair(messages: list[Message], taken: set[str] | None = None) -> list[Message]:
    """A list that every server accepts; messages that are in order are the same objects.

    Each message is `formed`. Each call gets exactly one result, right behind its message and in its
    order; a missing one is made up. Results without a call and assistant messages with neither text
    nor calls are dropped. Ids are made unique (`taken`: those used before this list), names and
    arguments made acceptable. Messages with a custom role stay as they are.
    """
    taken = set() if taken is None else taken
    messages = [message for message in map(formed, messages) if message is not None]
    fixed: list[Message] = []
    for place, message in enumerate(messages):
        role = message["role"]
        if role not in ROLES:
            fixed.append(message)
        elif calls_of(message):
            following = map(messages.__getitem__, range(place + 1, len(messages)))  # no copy
            turn = takewhile(lambda each: each["role"] != "assistant", following)
            results = [each for each in turn if each["role"] == "tool"]
            fixed += _answer_calls(message, results, taken)
        elif role != "tool" and (role != "assistant" or text_of(message)):
            fixed.append(message)  # the results are taken with their calls, above
    return fixed


def _answer_calls(message: Message, results: list[Message], taken: set[str]) -> list[Message]:
    """An assistant message with calls, and one result for each."""
    calls, answers = [], []
    for call in message["tool_calls"]:
        fixed = _mend_call(call, taken)
        taken.add(fixed["id"])
        calls.append(fixed)
        found = next((each for each in results if each.get("tool_call_id") == call["id"]), None)
        results = [each for each in results if each is not found]
        answers.append(_fit_result(found, fixed["id"]))
    same = all(ours is theirs for ours, theirs in zip(calls, message["tool_calls"]))
    return [message if same else message | {"tool_calls": calls}, *answers]


def _fit_result(found: Message | None, call_id: str) -> Message:
    if found is None:
        return tool_message(call_id, ToolResult(NOT_RUN, is_error=True))
    if found.get("tool_call_id") == call_id and found.get("content"):
        return found
    return found | {"tool_call_id": call_id, "content": found.get("content") or "(no output)"}


def _mend_call(call: dict[str, Any], taken: set[str]) -> dict[str, Any]:
    """The call with id, name and arguments that servers take; the same object if it has them."""
    function = call["function"]
    call_id, name, arguments = call["id"], function["name"], function["arguments"]
    good_id = call_id if call_id and call_id not in taken else new_id()
    good_arguments = arguments if _is_object(arguments) else "{}"
    if (good_id, safe_name(name), good_arguments) == (call_id, name, arguments):
        return call
    function = function | {"name": safe_name(name), "arguments": good_arguments}
    return call | {"id": good_id, "type": "function", "function": function}


def _is_object(arguments: Any) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, TypeError, RecursionError):
        return False


def convert_to_llm(messages: list[Message], model: str = "") -> list[Message]:
    """The wire messages: without "meta" and custom roles, and, where another model than `model` wrote a
    message, without its thoughts and signatures."""
    wire: list[Message] = []
    for message in messages:  # without a call of a function for each: there may be thousands
        if message.get("role") in ROLES:
            sent = message.copy()
            writer = sent.pop("meta", {}).get("model", model)
            is_foreign = model and writer != model and message["role"] == "assistant"
            wire.append(_without_thoughts(sent) if is_foreign else sent)
    return wire


def _without_thoughts(message: Message) -> Message:
    wire: Message = {name: message[name] for name in ("role", "content") if name in message}
    if calls := calls_of(message):
        names = ("id", "type", "function")
        wire["tool_calls"] = [{name: c[name] for name in names if name in c} for c in calls]
    return wire


class History:
    """`repair` for the list of a run, in place. The messages at its beginning that it has repaired before are not checked
    again, so that a late step costs little more than the first one."""

    def __init__(self, messages: list[Message]) -> None:
        self.messages = messages
        self._repaired_messages: list[Message] = []
        self._call_ids: set[str] = set()  # of the calls in them

    def repair(self) -> None:
        messages, repaired = self.messages, self._repaired_messages
        known = [*map(is_, repaired, messages), False].index(False)
        if known == len(messages) == len(repaired):
            return
        while known and messages[known - 1].get("role") == "tool":
            known -= 1  # the last turn again: results of its calls may be among the new messages
        known -= bool(known and messages[known - 1].get("tool_calls"))
        self._call_ids -= {call["id"] for each in repaired[known:] for call in calls_of(each)}
        messages[known:] = repair(messages[known:], self._call_ids)
        repaired[known:] = messages[known:]
