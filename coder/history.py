"""The list of messages that is the state: building its entries, repairing it, turning it into wire messages.

`repair` is what keeps a session usable after anything: servers refuse a history in which a tool call has no result, a
result has no call, or a string holds what their encoder rejects (R14, R15, R18, R24, T24, T32). It is pure and
idempotent, and runs before every request.

What it leaves out: shortening (features/compaction.py).
"""

from __future__ import annotations

import json
import time
from operator import is_
from typing import Any

from coder.text import mend, mend_all, new_id, safe_name
from coder.types import Message, ToolResult

ROLES = {"user", "assistant", "tool", "system", "developer"}
NOT_RUN = "Not run: the run ended before this call."


def user(text: str | list[dict[str, Any]]) -> Message:
    """A user message, stamped."""
    return {"role": "user", "content": mend_all(text), "meta": {"timestamp": now()}}


def tool_message(call_id: str, result: ToolResult) -> Message:
    """The message that answers one call; never empty (R18)."""
    meta = {"timestamp": now()} | ({"is_error": True} if result.is_error else {})
    return {"role": "tool", "tool_call_id": call_id, "content": mend_all(result.content) or "(no output)", "meta": meta}


def now() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


def text_of(message: Message) -> str:
    """The text of a message, whatever the form of its content."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    return content or ""


def repair(messages: list[Message], taken: set[str] | None = None) -> list[Message]:
    """A list that every server accepts; messages that are in order are the same objects.

    Each call gets exactly one result, right behind its message and in its order; a missing one is made up. Results
    without a call and assistant messages with neither text nor calls are dropped. Ids are made unique (`taken`: those
    used before this list), names and arguments made acceptable. Messages with a role of the user's own are left alone.
    """
    taken = set() if taken is None else taken
    fixed: list[Message] = []
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        role = message.get("role")
        if role == "tool":
            continue  # its call's turn has taken it, or it has none
        if role == "assistant" and not message.get("tool_calls"):
            if text_of(message):
                fixed.append(_clean(message))
        elif role == "assistant":
            until = next((k for k in range(position, len(messages)) if messages[k].get("role") == "assistant"), len(messages))
            results = [m for m in messages[position:until] if m.get("role") == "tool"]
            fixed += _answered(message, results, taken)
        else:
            fixed.append(_clean(message) if role in ROLES else message)
    return fixed


def _answered(message: Message, results: list[Message], taken: set[str]) -> list[Message]:
    """An assistant message with calls, and one result for each."""
    calls, answers = [], []
    for call in message["tool_calls"]:
        fixed = _acceptable(call, taken)
        taken.add(fixed["id"])
        calls.append(fixed)
        found = next((result for result in results if result.get("tool_call_id") == call.get("id")), None)
        results = [result for result in results if result is not found]
        answers.append(_result(found, fixed["id"]))
    same = all(ours is theirs for ours, theirs in zip(calls, message["tool_calls"]))
    return [_clean(message if same else message | {"tool_calls": calls}), *answers]


def _result(found: Message | None, call_id: str) -> Message:
    if found is None:
        return tool_message(call_id, ToolResult(NOT_RUN, is_error=True))
    if found.get("tool_call_id") != call_id or not found.get("content"):
        found = found | {"tool_call_id": call_id, "content": found.get("content") or "(no output)"}
    return _clean(found)


def _acceptable(call: dict[str, Any], taken: set[str]) -> dict[str, Any]:
    """The call with an id of its own, a name and arguments that servers take; the same object if it has them."""
    function = call.get("function") or {}
    call_id, name, arguments = call.get("id"), str(function.get("name") or ""), function.get("arguments")
    good_id = call_id if isinstance(call_id, str) and call_id and call_id not in taken else new_id()
    good_arguments = arguments if _is_object(arguments) else "{}"
    if (good_id, safe_name(name), good_arguments) == (call_id, name, arguments):
        return call
    return call | {"id": good_id, "type": "function",
                   "function": function | {"name": safe_name(name), "arguments": good_arguments}}


def _is_object(arguments: Any) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, TypeError):
        return False


def _clean(message: Message) -> Message:
    """Without what no encoder takes; the same object if there is nothing of it. What is nested too deeply goes."""
    try:
        cleaned: Message = mend_all(message)
    except ValueError:
        cleaned = {name: value for name, value in message.items() if name in ("role", "tool_call_id", "meta")}
        cleaned |= {"content": mend(text_of(message)) or "(unreadable)"} | ({} if "tool_calls" not in message else {
            "tool_calls": [{name: call[name] for name in ("id", "type", "function")} for call in message["tool_calls"]]})
    return message if cleaned == message else cleaned


class Repairer:
    """`repair` for a list that only grows: what was in order at the last request is not looked at again.

    So a step late in a long run costs no more than the first one. A message that is replaced is noticed, whatever its
    place; one that is changed in place is not.
    """

    def __init__(self) -> None:
        self._done: list[Message] = []
        self._taken: set[str] = set()  # the ids in it

    def __call__(self, messages: list[Message]) -> None:
        """Repair `messages` in place."""
        known = _same(self._done, messages)
        while known and messages[known - 1].get("role") == "tool":
            known -= 1  # back to in front of the last turn with calls, whose results may be among the new ones
        known -= bool(known and messages[known - 1].get("tool_calls"))
        self._taken -= _ids(self._done[known:])
        messages[known:] = repair(messages[known:], self._taken)
        self._done = messages[:]


def _same(before: list[Message], now: list[Message]) -> int:
    """How many messages at the beginning are the same objects."""
    same = list(map(is_, before, now))
    return same.index(False) if False in same else len(same)


def _ids(messages: list[Message]) -> set[str]:
    return {call["id"] for message in messages for call in message.get("tool_calls") or ()}


def convert_to_llm(messages: list[Message], model: str = "") -> list[Message]:
    """Wire messages: without private facts, without the roles of the user's own, and without what only the model that
    wrote a message understands, where that is another than `model` (R26)."""
    return Converter(model)(messages)


class Converter:
    """`convert_to_llm` for a list that only grows: what was converted for the last request is used again."""

    def __init__(self, model: str = "") -> None:
        self._model = model
        self._done: list[Message] = []
        self._wire: list[Message | None] = []  # None for a message that is not sent

    def __call__(self, messages: list[Message]) -> list[Message]:
        known = _same(self._done, messages)
        self._wire[known:] = [_public(message, self._model) for message in messages[known:]]
        self._done = messages[:]
        return [message for message in self._wire if message is not None]


def _public(message: Message, model: str) -> Message | None:
    if message.get("role") not in ROLES:
        return None
    if "meta" not in message:
        return message
    meta = message["meta"]
    if model and meta.get("model", model) != model:
        return _plain(message)
    return {key: value for key, value in message.items() if key != "meta"}


def _plain(message: Message) -> Message:
    """An assistant message as any model takes it: no thoughts, no signatures."""
    plain = {key: value for key, value in message.items() if key in ("role", "content", "tool_calls")}
    if "tool_calls" in plain:
        plain["tool_calls"] = [{key: call[key] for key in ("id", "type", "function") if key in call} for call in plain["tool_calls"]]
    return plain
