"""The visible end of a conversation that is taken up again: what was said last, and which tools were called."""

from __future__ import annotations

import json
from collections.abc import Sequence

from coder.cli.screen import Screen, one_line
from coder.history import calls_of, text_of
from coder.providers.text import clean
from coder.toolset import Toolset
from coder.types import Message, ToolCall

TURNS = 2
LINES = 12  # of a user's message


def replay(
    screen: Screen, tools: Toolset, messages: Sequence[Message], turns: int | None = TURNS
) -> None:
    """Show the last `turns` turns; None: all."""
    begins = [place for place, message in enumerate(messages) if message.get("role") == "user"]
    start = begins[-turns] if turns and len(begins) >= turns else 0
    if start:
        screen.line(f"… {start} earlier message{'' if start == 1 else 's'}", "dim")
    failed = {
        message.get("tool_call_id")
        for message in messages
        if message.get("meta", {}).get("is_error")
    }
    for message in messages[start:]:
        _show(screen, tools, message, failed)


def _show(screen: Screen, tools: Toolset, message: Message, failed: set[str | None]) -> None:
    text = clean(text_of(message)).rstrip()
    if message.get("role") == "user" and text:
        lines = text.split("\n")
        screen.line(
            "> " + "\n  ".join(lines[:LINES] + (["…"] if len(lines) > LINES else [])), "bold"
        )
    elif message.get("role") == "assistant":
        if text:
            screen.answer(text)
            screen.finish_line()
        for call in calls_of(message):
            screen.print(
                "✗ " if call["id"] in failed else "● ",
                "bold red" if call["id"] in failed else "green",
            )
            screen.print(one_line(_title(tools, call["function"]), screen.width - 2) + "\n", "")


def _title(tools: Toolset, function: dict[str, str]) -> str:
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        arguments = None
    return tools.title(
        ToolCall("", function["name"], arguments if isinstance(arguments, dict) else None)
    )
