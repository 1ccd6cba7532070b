"""Sizes of messages in a request, and what fits into a size.

Sizes are bytes of the JSON that is sent: about CHARS_PER_TOKEN of them are a token in any script,
since what takes more bytes takes more tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from coder.history import NOTE_SIZE, ROLES, text_of, truncate
from coder.types import Message

JSON = json.JSONEncoder(ensure_ascii=False, default=str)
IMAGE = r"data:image/[^\"]*"
IMAGE_SIZE = "x" * 6_000  # bytes: 1,500 tokens, what providers count for a large image


def size(messages: Iterable[Message]) -> int:
    """Bytes of these messages in a request; roles of the user's own are not sent and count
    nothing.
    """
    total = 0
    for message in messages:
        if message.get("role") in ROLES:
            total += size_of_value(message | {"meta": None})
    return total


def size_of_value(value: Any) -> int:
    """Bytes of a JSON value; an image counts as the tokens that providers take for it."""
    text = JSON.encode(value)
    if "data:image/" in text:
        text = re.sub(IMAGE, IMAGE_SIZE, text)
    if text.isascii():
        return len(text)
    return len(text.encode("utf-8", "surrogatepass"))


def shortened(text: str, limit: int) -> str:
    """The first and the last half of `limit` bytes together, with a note in between."""
    total = size_of_value(text)
    if total <= limit:
        return text
    return truncate(text, len(text) * max(0, limit - NOTE_SIZE) // total)


def cut(message: Message, limit: int) -> Message:
    """The message, or one with so much of its text that it has about `limit` bytes."""
    whole = size([message])
    if whole <= limit:
        return message
    text = text_of(message)
    kept = shortened(text, limit - whole + size_of_value(text))
    return message | {"content": kept or "[image removed]"}
