"""A run's result as a notebook shows it: the question, the calls and the answer, as Markdown."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coder.types import Message, RunResult

SHOWN = 120  # characters of arguments and of a result


def result_as_markdown(result: RunResult) -> str:
    messages = messages_of_run(result.messages)
    results = {each["tool_call_id"]: each for each in messages if each["role"] == "tool"}
    blocks = []
    for message in messages:
        if is_prompt(message):
            blocks.append("> " + _text(message).replace("\n", "\n> "))
        for call in message.get("tool_calls") or ():
            arguments = _arguments(call["function"]["arguments"])
            answer = _text(results.get(call["id"], {}))
            blocks.append(f"- {_code(call['function']['name'] + arguments)} → {_code(answer)}")
    blocks.append(result.text)
    if result.stop_reason != "stop":
        blocks.append(f"*The run ended with {result.stop_reason}.*")
    return "\n\n".join(blocks)


def messages_of_run(messages: list[Message]) -> list[Message]:
    """Those from the newest prompt on."""
    for index in reversed(range(len(messages))):
        if is_prompt(messages[index]):
            return messages[index:]
    return messages


def is_prompt(message: Message) -> bool:
    """A question of the user's, not of the program, which asks again for a structured answer."""
    return message["role"] == "user" and not message.get("meta", {}).get("asks_again")


def _text(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join([part.get("text") or f"[{part['type']}]" for part in content])


def _arguments(text: str) -> str:
    try:
        given: dict[str, Any] = json.loads(text)
        shown = [f"{name}={json.dumps(given[name], ensure_ascii=False)}" for name in given]
    except (ValueError, TypeError):  # as the model wrote it
        shown = [text]
    return f"({', '.join(shown)})"


def _code(text: str) -> str:
    """One line of code; a backtick in it would end it."""
    line = " ".join(text.split()).replace("`", "'")
    return f"`{line[:SHOWN]}…`" if len(line) > SHOWN else f"`{line}`"
