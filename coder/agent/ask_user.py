"""ask_user: a question of the model's to the user. Offered only where the user can answer."""

from __future__ import annotations

from collections.abc import Generator

from coder.events import Event, QuestionAsked
from coder.toolset import ToolContext, tool
from coder.types import ToolResult

NO_ANSWER = "The user gave no answer. Go on with what you think best, and say what you assumed."


@tool(title=lambda arguments: "")  # the question itself is on the screen
def ask_user(
    ctx: ToolContext, question: str, options: list[str] | None = None
) -> Generator[Event, None, ToolResult]:
    """Ask the user one question, and wait. Only for a choice that is theirs and that you cannot find out.

    question: with all that is needed to decide
    options: 2 to 5 short answers to choose from; the user may give another one
    """
    asked = QuestionAsked(ctx.call_id, question, options or [])
    yield asked
    ctx.abort.check()  # Ctrl+C at the question stops the run
    return ToolResult(asked.answer or NO_ANSWER)
