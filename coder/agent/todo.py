"""todo: the model's checklist for a long task, which people see as well.

The tool keeps nothing: the whole list comes with each call, and goes out with its result (`details["todo"]`). Whoever keeps
sessions keeps it (sessions.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from coder.history import calls_of, text_of, user
from coder.toolset import tool
from coder.types import Message, ToolError, ToolResult

MARKS = {"pending": "[ ]", "in_progress": "[>]", "done": "[x]"}
# What models say instead
WORDS = {
    "completed": "done",
    "complete": "done",
    "finished": "done",
    "in-progress": "in_progress",
    "doing": "in_progress",
    "todo": "pending",
    "open": "pending",
    "": "pending",
}
MOST = 50
NOTE = "Your checklist as it stands:\n"


@tool(title=lambda arguments: _progress(_items(arguments.get("items") or [])))
def todo(items: list[dict]) -> ToolResult:  # type: ignore[type-arg]
    """Keep a checklist for a task of three steps or more; the user sees it. Send it whole whenever a step begins or is done.

    items: {"text": "...", "status": "pending", "in_progress" or "done"}, in order
    """
    kept = _items(items)
    if len(kept) > MOST:
        raise ToolError(f"a checklist has at most {MOST} items; put several steps into one")
    return ToolResult(checklist(kept) or "The checklist is empty.", details={"todo": kept})


def _items(items: Any) -> list[dict[str, str]]:
    """The items as they are kept. Raises ToolError."""
    kept = []
    for item in items if isinstance(items, list) else [items]:
        given = item if isinstance(item, dict) else {}
        text = str(given.get("text") or given.get("content") or "").strip()
        status = str(given.get("status") or "").lower().strip()
        status = WORDS.get(status, status)
        if not text or status not in MARKS:
            raise ToolError(
                f'an item is {{"text": ..., "status": {", ".join(MARKS)}}}, not {item!r}'
            )
        kept.append({"text": " ".join(text.split()), "status": status})
    return kept


def _progress(items: Sequence[dict[str, str]]) -> str:
    return f"{sum(item['status'] == 'done' for item in items)} of {len(items)} done"


def checklist(items: Sequence[dict[str, str]]) -> str:
    """A line for each item."""
    return "\n".join(f"{MARKS[item['status']]} {item['text']}" for item in items)


def notes(messages: Sequence[Message]) -> list[Message]:
    """What is to be said again of the checklist where a history is shortened."""
    items = newest(messages)
    return [user(f"{NOTE}{items}")] if items else []


def newest(messages: Sequence[Message]) -> str:
    """The checklist as the newest call in a history left it, or the note in the place of a call that is no longer there; or ""."""
    for message in reversed(messages):
        if message.get("meta", {}).get("attached") and text_of(message).startswith(NOTE):
            return text_of(message).removeprefix(NOTE)
        for call in reversed(calls_of(message)):
            if call["function"]["name"] == "todo":
                try:
                    return checklist(
                        _items(json.loads(call["function"]["arguments"]).get("items") or [])
                    )
                except (ValueError, AttributeError, ToolError):
                    continue
    return ""
