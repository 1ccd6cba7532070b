"""Make a history shorter without a model: notes for old tool output, cut texts, a transcript as text.

    [Old tool output removed: read src/x.py, 12,000 characters. Run it again if you need it.]

Pure functions over lists; a message is replaced, never changed. Sizes are bytes of the JSON that is sent:
about usage.CHARS_PER_TOKEN of them are a token in any script, since what takes more bytes takes more tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

from coder.history import ROLES, calls_of, text_of
from coder.run import truncate
from coder.types import Message

JSON = json.JSONEncoder(ensure_ascii=False, default=str)
IMAGE = 6_000  # bytes an image counts as: 1,500 tokens, what providers count for a large one
MIN_SAVING = 200  # bytes that a note has to save
MARKER = 50  # bytes of truncate's marker
ABOUT = 80  # characters of what a call was about
PIECES = (1_000_000, 2_000, 500)  # bytes of one piece of a transcript: the first that fits
INSTRUCTIONS = re.compile(
    r'(?:\n\n<instructions path="[^"\n]*">\n(?:(?!</instructions>).)*\n</instructions>)+\Z', re.S
)


def size(messages: Iterable[Message]) -> int:
    """Bytes of these messages in a request; roles of the user's own are not sent and count nothing."""
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


def shortened(text: str, limit: int) -> str:
    """The first and the last half of `limit` bytes together, with a marker in between."""
    total = size_of(text)
    return text if total <= limit else truncate(text, len(text) * max(0, limit - MARKER) // total)


def is_users(message: Message) -> bool:
    """Is it a message of the user's, and none that compaction put there?"""
    ours = message.get("meta", {}).keys() & {"summary", "attached"}
    return message.get("role") == "user" and not ours


def is_summary(message: Message) -> bool:
    return bool(message.get("meta", {}).get("summary"))


# ---- pruning --------------------------------------------------------------------------------


def prune(messages: list[Message], keep: int, cut: bool = False) -> list[Message]:
    """The list with older tool output as notes; ids, order and number of the messages stay.

    Kept are the newest `keep` bytes of output, and that which the model has not seen yet; `cut`: where the
    latter alone is more than `keep`, each output is cut to its share. `messages` have to be in order
    (history.repair).
    """
    answers = (place for place, each in enumerate(messages) if each["role"] == "assistant")
    unseen = 1 + max(answers, default=-1)
    calls = {call["id"]: call["function"] for each in messages for call in calls_of(each)}
    shorter, left = messages[:], keep
    if cut:
        shorter[unseen:] = fitted(messages[unseen:], keep)
    for place in range(len(messages) - 1, -1, -1):
        message = messages[place]
        if message["role"] == "tool":
            left -= _size(message)
            if left < 0 and place < unseen:
                shorter[place] = _noted(message, calls[message["tool_call_id"]])
    return shorter


def fitted(messages: list[Message], limit: int) -> list[Message]:
    """The list with its tool output cut to `limit` bytes together; what is within its share stays whole."""
    results = [message for message in messages if message["role"] == "tool"]
    if size(results) <= max(0, limit):
        return messages
    share = max(0, limit) // len(results)
    return [_cut(each, share) if each["role"] == "tool" else each for each in messages]


def _cut(message: Message, limit: int) -> Message:
    if _size(message) <= limit:
        return message
    beside = _size(message) - size_of(text_of(message))
    text = shortened(text_of(message), limit - beside) or "[image removed]"
    return message | {"content": text, "meta": message.get("meta", {}) | {"cut": True}}


def _noted(message: Message, function: dict[str, Any]) -> Message:
    """A result without its output. Instruction files that came with it (instructions.py) stay."""
    text, images = text_of(message), _images(message)
    files = INSTRUCTIONS.search(text)
    first = next((v for v in json.loads(function["arguments"]).values() if isinstance(v, str)), "")
    about = " ".join(f"{function['name']} {first}".split())
    limit = len(function["name"]) + 1 + ABOUT
    about = about if len(about) <= limit else about[:limit] + "..."
    extent = [f"{len(text):,} characters"] if text or not images else []
    extent += [f"{images} image{'s' if images > 1 else ''}"] if images else []
    removed = f"[Old tool output removed: {about}, {' and '.join(extent)}."
    note = f"{removed} Run it again if you need it.]{files[0] if files else ''}"
    noted = message | {"content": note, "meta": message.get("meta", {}) | {"pruned": True}}
    return noted if _size(message) - _size(noted) >= MIN_SAVING else message


# ---- as text --------------------------------------------------------------------------------


def transcript(messages: list[Message], limit: int) -> str:
    """The messages as text of about `limit` bytes: long pieces are cut, then the oldest messages left out.

    As text, so that every server takes it, whatever calls are open in it, and nothing in it is taken for a
    turn of the request that it is part of. An earlier summary, or the first user message, has half of the
    room and is never left out.
    """
    names = {call["id"]: call["function"]["name"] for each in messages for call in calls_of(each)}
    chosen = [
        each
        for each in messages
        if each["role"] in ROLES and not each.get("meta", {}).get("attached")
    ]
    pin = next(iter([*filter(is_summary, chosen), *filter(is_users, chosen)]), None)
    for piece in PIECES:
        limits = [limit // 2 if each is pin else piece for each in chosen]
        entries = [_entry(each, names, most) for each, most in zip(chosen, limits)]
        if sum(map(size_of, entries)) <= limit:
            return "\n\n".join(entries)
    pinned = [entry for each, entry in zip(chosen, entries) if each is pin]
    others = [entry for each, entry in zip(chosen, entries) if each is not pin]
    room = limit - sum(map(size_of, pinned))
    gone = sum(total > room for total in accumulate(map(size_of, reversed(others))))
    return "\n\n".join([*pinned, f"[{gone} older messages are left out here]", *others[gone:]])


def _entry(message: Message, names: dict[str, str], limit: int) -> str:
    """One message as text, each piece of at most `limit` bytes; nothing in it ends a <conversation>."""
    role = message["role"]
    if is_summary(message):
        role = "earlier summary"
    elif role == "tool":
        role = f"result of {names.get(message['tool_call_id'], 'a tool')}"
    text = text_of(message)
    lines = [f"[{role}]", *([shortened(text, limit)] if text else [])]
    lines += ["[image]"] * _images(message)
    for call in calls_of(message):
        function = call["function"]
        lines.append(f"calls {function['name']} {shortened(function['arguments'], limit)}")
    return "\n".join(lines).replace("</conversation", "<\\/conversation")
