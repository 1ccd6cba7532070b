"""todo: the model's checklist for a long task, which the user sees as well.

The tool stores nothing: each call has the whole list, and its result carries it (`details["todo"]`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coder.toolset import tool
from coder.types import ToolError, ToolResult

MARKS = {"pending": "[ ]", "in_progress": "[>]", "done": "[x]"}
SYNONYMS = {"completed": "done", "in-progress": "in_progress", "": "pending"}  # models' words


def _make_title(arguments: dict[str, Any]) -> str:
    items = checked_items(arguments.get("items") or [])
    return f"{sum(item['status'] == 'done' for item in items)} of {len(items)} done"


@tool(title=_make_title)
def todo(items: list[dict]) -> ToolResult:  # type: ignore[type-arg]
    """Keep a checklist for a task of three steps or more; the user sees it. Send it whole whenever a step begins or is done.

    items: {"text": "...", "status": "pending", "in_progress" or "done"}, in order
    """
    checked = checked_items(items)
    return ToolResult(checklist(checked) or "The checklist is empty.", details={"todo": checked})


def checked_items(items: Any) -> list[dict[str, str]]:
    """The items as {"text", "status"}. Raises ToolError."""
    checked = []
    for item in items if isinstance(items, list) else [items]:
        given = item if isinstance(item, dict) else {}
        text = " ".join(str(given.get("text") or given.get("content") or "").split())
        status = str(given.get("status") or "")
        status = SYNONYMS.get(status, status)
        if not text or status not in MARKS:
            raise ToolError(f'an item is {{"text", "status": {", ".join(MARKS)}}}, not {item!r}')
        checked.append({"text": text, "status": status})
    return checked


def checklist(items: Sequence[dict[str, str]]) -> str:
    """A line for each item."""
    return "\n".join(f"{MARKS[item['status']]} {item['text']}" for item in items)
