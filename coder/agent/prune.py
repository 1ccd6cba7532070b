"""Pruning: old tool output in a history becomes a short note, which makes room without asking a model.

    [Old tool output removed: read src/x.py, 12,000 characters. Run it again if you need it.]

Pure functions over lists; a message is replaced, never changed. Sizes are bytes of the JSON that is sent: usage.CHARS_PER_TOKEN
of them are about a token in any script, since what takes more bytes takes more tokens, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from coder.history import ROLES, calls_of, text_of
from coder.run import truncate
from coder.types import Message

JSON = json.JSONEncoder(ensure_ascii=False, default=str)  # made once: sizes are asked for often
IMAGE = 6_000  # bytes that an image counts as: 1,500 tokens, what providers count for a large one, however long its data is
WORTH = 200  # bytes that a note has to save
MARKER = 50  # bytes of truncate's marker
ABOUT = 80  # characters of what a call was about
INSTRUCTIONS = re.compile(
    r'(?:\n\n<instructions path="[^"\n]*">\n(?:(?!</instructions>).)*\n</instructions>)+\Z', re.S
)


def size(messages: Iterable[Message]) -> int:
    """Bytes of these messages in a request; those with a role of the user's own are not sent and count nothing."""
    return sum(map(_size, messages))


def _size(message: Message) -> int:
    if message.get("role") not in ROLES:
        return 0
    sent = {name: value for name, value in message.items() if name != "meta"}
    if images := _images(message):
        sent["content"] = [part for part in message["content"] if "image_url" not in part]
    return size_of(sent) + images * IMAGE


def _images(message: Message) -> int:
    content = message.get("content")
    return sum("image_url" in part for part in content) if isinstance(content, list) else 0


def size_of(value: Any) -> int:
    """Bytes of a value as JSON."""
    text = JSON.encode(value)
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def shortened(text: str, most: int) -> str:
    """The first and the last half of `most` bytes together, with a marker in between."""
    found = size_of(text)
    return text if found <= most else truncate(text, len(text) * max(0, most - MARKER) // found)


def is_said(message: Message) -> bool:
    """Is it a message of the user's, and none that compaction put there?"""
    return message.get("role") == "user" and not message.get("meta", {}).keys() & {
        "summary",
        "attached",
    }


def prune(messages: list[Message], keep: int, turns: int = 0, cut: bool = False) -> list[Message]:
    """The list with older tool output as notes; ids, order and number of the messages stay.

    The newest `keep` bytes of output stay, that of the last `turns` user turns, and that which the model has not seen yet:
    with `cut`, where it alone is more than `keep`, each output of it is cut to its share. `messages` have to be in order
    (history.repair).
    """
    unseen = 1 + max(
        (place for place, each in enumerate(messages) if each["role"] == "assistant"), default=-1
    )
    said = [place for place, each in enumerate(messages) if is_said(each)]
    until = min(unseen, said[-min(turns, len(said))] if turns and said else unseen)
    calls = {call["id"]: call["function"] for each in messages for call in calls_of(each)}
    shorter, left = messages[:], keep
    if cut:
        shorter[unseen:] = fitted(messages[unseen:], keep)
    for place in range(len(messages) - 1, -1, -1):
        message = messages[place]
        if message["role"] == "tool":
            left -= _size(message)
            if left < 0 and place < until:
                shorter[place] = _noted(message, calls[message["tool_call_id"]])
    return shorter


def fitted(messages: list[Message], most: int) -> list[Message]:
    """The list with its tool output cut to `most` bytes together, each to its share; what fits is left alone."""
    results = [message for message in messages if message["role"] == "tool"]
    if size(results) <= max(0, most):
        return messages
    share = max(0, most) // len(results)
    return [_cut(message, share) if message["role"] == "tool" else message for message in messages]


def _cut(message: Message, most: int) -> Message:
    beside = _size(message) - size_of(text_of(message))
    text = shortened(text_of(message), most - beside) or "[image removed]"
    return (
        message
        if _size(message) <= most
        else message | {"content": text, "meta": message.get("meta", {}) | {"cut": True}}
    )


def _noted(message: Message, function: dict[str, Any]) -> Message:
    """A result without its output. Instruction files that came with it (agent/instructions.py) stay."""
    text = text_of(message)
    files = INSTRUCTIONS.search(text)
    note = f"[Old tool output removed: {_about(function)}, {_extent(message)}. Run it again if you need it.]"
    noted = message | {
        "content": note + (files[0] if files else ""),
        "meta": message.get("meta", {}) | {"pruned": True},
    }
    return noted if _size(message) - _size(noted) >= WORTH else message


def _about(function: dict[str, Any]) -> str:
    """The tool, and its first argument that is text: the path, the command, the pattern."""
    first = next(
        (value for value in json.loads(function["arguments"]).values() if isinstance(value, str)),
        "",
    )
    line = " ".join(first.split())
    return f"{function['name']} {line[:ABOUT]}{'...' if len(line) > ABOUT else ''}".strip()


def _extent(message: Message) -> str:
    text, images = text_of(message), _images(message)
    shown = f"{images} image{'s' if images > 1 else ''}" if images else ""
    return " and ".join(
        filter(None, [f"{len(text):,} characters" if text or not images else "", shown])
    )
