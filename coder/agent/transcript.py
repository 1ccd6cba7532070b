"""A conversation as text, for the model that writes a summary of it.

As text, so that every server takes it, whatever calls are open in it, and nothing in it is taken
for a turn of the request that it is part of. Results are named by their calls and indented, so no
output can pass for a turn.
"""

from __future__ import annotations

import re

from coder.agent.measure import shortened, size_of_value
from coder.agent.pruning import outputs_of
from coder.history import calls_of, text_of
from coder.types import Message

PIECE = 500  # bytes of one message that stay at least
TURN = r"(?m)^\[(?=user|assistant|system|result|earlier)"


def transcript(messages: list[Message], limit: int) -> str:
    """The messages as text of at most `limit` bytes: long ones are cut, then the middle is left
    out.

    What the user said is cut last. `messages` have to be in order (history.repair).
    """
    heads = {}
    for output in outputs_of(messages):
        heads[id(output.message)] = f"{output.name} {output.subject}".strip()
    piece = limit
    while True:
        entries = []
        for message in messages:
            most = limit // 2 if message["role"] == "user" else piece
            if message["role"] in ("user", "assistant", "tool"):
                entries.append(_write_entry(message, most, heads.get(id(message), "")))
        text = "\n\n".join(entries)
        piece //= 2
        if size_of_value(text) <= limit or piece < PIECE:
            return shortened(text, limit)


def _write_entry(message: Message, limit: int, called: str) -> str:
    """One message as text, each piece of at most `limit` bytes; nothing in it ends a
    <conversation>.
    """
    text = shortened(text_of(message), limit)
    if message["role"] == "tool":
        indented = "\n".join(f"  {line}" for line in text.splitlines())
        return _safe(f"[result of {called}]\n{indented}")
    head = message["role"]
    if message.get("meta", {}).get("summary"):
        head = "earlier summary"
    pieces = [f"[{head}]", re.sub(TURN, "  [", text)]
    for call in calls_of(message):
        function = call["function"]
        pieces.append(f"calls {function['name']} {shortened(function['arguments'], limit)}")
    return _safe("\n".join(piece for piece in pieces if piece))


def _safe(text: str) -> str:
    return text.replace("</conversation", "<\\/conversation")
