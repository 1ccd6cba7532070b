"""What is new in each request of a conversation since the one before, in lines for a person.

    changes = RequestChanges()
    for body in bodies:
        print("\\n".join(changes.lines(body["messages"], system, tools)))

Step mode shows it before a request is sent, `coder trace FILE --diff` for a recorded run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from coder.history import as_text
from coder.providers.wire import common_prefix, copied
from coder.types import Message, Usage

WIDTH = 100  # characters of a message that are shown in its line


class RequestChanges:
    """Compares each request with the one before."""

    def __init__(self) -> None:
        self.requests = 0
        self._sent: list[Message] = []  # copies of the messages of the newest request
        self._system = ""
        self._tools = 0

    def count_same(self, messages: list[Message]) -> int:
        """How many messages at the beginning are those of the request before."""
        return common_prefix(self._sent, messages)

    def lines(self, messages: list[Message], system: str, tools: int) -> Iterator[str]:
        """A heading with the request's size, and a line for each message that is new."""
        same = self.count_same(messages)
        size = size_of(messages)
        share = 100 * size_of(messages[:same]) // max(1, size)
        yield (
            f"== Request {self.requests + 1}: {len(messages)} messages, {size:,} characters, "
            f"about {size // 4:,} tokens; {share} % as in the request before (cached)"
        )
        if system != self._system or tools != self._tools:
            yield f"  + system, {len(system):,} characters, and {tools} tools"
        gone = len(self._sent) - same
        if gone:
            yield f"  - {gone} messages changed or gone: what follows is not cached"
        for message in messages[same:]:
            yield f"  + {line_of(message)}"

    def keep(self, messages: list[Message], system: str, tools: int) -> None:
        """What was sent in the end, for the comparison with the next request."""
        self.requests += 1
        self._sent = copied(messages)
        self._system = system
        self._tools = tools


def answer_lines(message: Message, finish: str, usage: Usage) -> list[str]:
    """The answer to a request: why it ended, its tokens, its message."""
    tokens = f"{usage.input:,} tokens in ({usage.cached:,} cached), {usage.output:,} out"
    return [f"-- Answer ({finish}): {tokens}", f"  + {line_of(message)}"]


def size_of(messages: list[Message]) -> int:
    """Characters of the messages as JSON."""
    return sum(len(json.dumps(message, ensure_ascii=False)) for message in messages)


def line_of(message: Message) -> str:
    """A message in a line: its role, its text, its calls."""
    text = as_text(message.get("content"))
    calls = [
        f"{call['function']['name']}({call['function']['arguments']})"
        for call in message.get("tool_calls") or ()
    ]
    line = " ".join(" ".join([text, *calls]).split())
    if len(line) > WIDTH:
        line = f"{line[:WIDTH]} ... ({len(line):,} characters)"
    return f"{message['role']}: {line}"
