"""The tools that the user sees: `todo`, the model's checklist for a long task, and `ask_user`, its
question.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from coder.events import Event, QuestionAsked
from coder.providers.text import new_id
from coder.tools import slips
from coder.toolset import ToolContext, tool
from coder.types import ToolError, ToolResult

MARKS = {"pending": "[ ]", "in_progress": "[>]", "done": "[x]"}
TEXTS = ("text", "content", "step")  # our word for it, Claude's, codex's
SYNONYMS = {"completed": "done", "in-progress": "in_progress", "": "pending"}  # models' words
NO_ANSWER = "The user gave no answer. Go on with what you think best, and say what you assumed."


def _check_items(items: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The items as {"text", "status"}. Raises ToolError."""
    checked = []
    for item in items:
        texts = [str(item[name]) for name in TEXTS if item.get(name)]
        text = " ".join(texts[0].split()) if texts else ""
        status = str(item.get("status") or "")
        status = SYNONYMS.get(status, status)
        if not text or status not in MARKS:
            raise ToolError(f'an item is {{"text", "status": {", ".join(MARKS)}}}, not {item!r}')
        checked.append({"text": text, "status": status})
    return checked


def _make_title(arguments: dict[str, Any]) -> str:
    items = _check_items(arguments.get("items") or [])
    done = [item for item in items if item["status"] == "done"]
    return f"{len(done)} of {len(items)} done"


@tool(
    title=_make_title,
    permission="todo",
    default="allow",
    slips=slips.TODO,
)
def todo(items: list[dict]) -> ToolResult:  # type: ignore[type-arg]
    """Keep a checklist, which the user sees, for a task of three steps or more. Send it whole at
    each change.

    items: {text, status: pending, in_progress or done}, in order
    """
    checked = _check_items(items)
    lines = [f"{MARKS[item['status']]} {item['text']}" for item in checked]
    text = "\n".join(lines) or "The checklist is empty."
    return ToolResult(text, details={"todo": checked}, can_be_new=False)


@tool(
    title=lambda arguments: "",  # the question itself is on the screen
    permission="ask_user",
    default="allow",
    asks_itself=True,
)
def ask_user(
    ctx: ToolContext, question: str, options: list[str] | None = None
) -> Generator[Event, None, ToolResult]:
    """Ask the user one question, and wait. Only for a choice that is theirs and that you cannot
    find out.

    question: with all that is needed to decide
    options: 2 to 5 short answers to choose from; the user may give another one
    """
    asked = QuestionAsked(new_id(), question, options or [], call_id=ctx.call_id)
    yield asked
    ctx.abort.check()  # Ctrl+C at the question stops the run
    return ToolResult(asked.answer or NO_ANSWER)
