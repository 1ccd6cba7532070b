"""What is sent of the messages of a run, and how many of them are unchanged since the last request.

To convert all messages of a long run would take longer than the rest of a step. So only the new
ones are converted, unless a hook or a model looks at the messages of a request.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from coder.types import Message, Request

ROLES = {"user", "assistant", "tool", "system", "developer"}
NESTED = (dict, list)
FLAT = (str, int)
NO_LIMIT = sys.maxsize
META = b',"meta":'  # as a row has it; within a string the quotes would be escaped
SURROGATE_OR_NUL = rb"\\u([dD]|0000)"  # perhaps: what no server accepts is mended


class RunRequest(Request):
    """The request of a run, whose `messages` are made when somebody looks at them.

    `source`: the run's own messages; None from then on, or if others were set.
    """

    source: list[Message] | None = None
    model = ""  # its name, for `wire_messages`

    @classmethod
    def of(cls, source: list[Message], model: str, **fields: Any) -> RunRequest:
        made = cls(messages=[], **fields)
        made.source = source
        made.model = model
        return made

    @property
    def messages(self) -> list[Message]:
        if self.source is not None:
            self.messages = wire_messages(self.source, self.model)
        return self._messages

    @messages.setter
    def messages(self, messages: list[Message]) -> None:
        self._messages = messages
        self.source = None


class ReadMessages(list[Message]):
    """The list of a session that was read, in order (history.repair).

    `copies`: of the messages at its beginning, as they were read. Nobody changes them, so one that
    is equal to its copy is in order still, and need not be copied again. `rows`: their JSON as it
    was read, b"" for one that cannot be sent.
    """

    copies: Sequence[Message] = ()
    rows: Sequence[bytes] = ()

    def copy(self) -> ReadMessages:
        made = ReadMessages(self)
        made.copies = self.copies
        made.rows = self.rows
        return made


def unconverted(request: Request) -> list[Message]:
    """The messages of a request, before their conversion if nobody has looked at them: those of a
    run, as they are in its list. `wire_messages` makes the same of both."""
    if isinstance(request, RunRequest) and request.source is not None:
        return request.source
    return request.messages


def wire_messages(messages: list[Message], model: str = "") -> list[Message]:
    """What is sent of the messages: all without "meta", and none with a custom role.

    Those that another model than `model` wrote go without its thoughts and signatures.
    """
    wire: list[Message] = []
    for message in choose_messages(messages, model):
        sent = message.copy()
        sent.pop("meta", None)
        wire.append(sent)
    return wire


def choose_messages(messages: list[Message], model: str) -> list[Message]:
    """`wire_messages`, but "meta" stays, so that most are the same objects."""
    chosen: list[Message] = []
    for message in messages:  # inline: there may be thousands
        role = message.get("role")
        if role not in ROLES:
            continue
        if model and role == "assistant":
            writer = message.get("meta", {}).get("model", model)
            if writer != model:
                message = _without_thoughts(message)
        chosen.append(message)
    return chosen


def _without_thoughts(answer: Message) -> Message:
    """Only the members of an answer that the API itself has."""
    wire = _only(answer, "role", "content")
    calls = calls_of(answer)
    if calls:
        wire["tool_calls"] = [_only(call, "id", "type", "function") for call in calls]
    return wire


def _only(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def calls_of(message: Message) -> list[dict[str, Any]]:
    """The calls of an answer; a message of another role has none, whatever its fields say."""
    if message.get("role") != "assistant":
        return []
    return message.get("tool_calls") or []


def common_prefix(old: Sequence[Message], new: list[Message]) -> int:
    """How many messages at the beginning of both lists are equal, also in their depth."""
    # There may be thousands, and mostly all are: lists are compared without a call for each
    if new[: len(old)] == old:
        return len(old)
    return count_alike(operator.eq, old, new)


def count_alike(
    are_alike: Callable[[Message, Message], bool],
    old: Sequence[Message],
    new: list[Message],
) -> int:
    """How many messages at the beginning of both lists are alike."""
    return [*map(are_alike, old, new), False].index(False)


def copied(value: Any, levels: int = NO_LIMIT) -> Any:
    """A copy of a JSON value, by which one sees later whether the value was changed in place.

    Raises ValueError if it is nested in more than so many levels.
    """
    if not levels and isinstance(value, NESTED):
        raise ValueError("nested too deeply")
    if isinstance(value, dict):
        copy = value.copy()
        for name, item in value.items():
            if type(item) not in FLAT:  # most are: a call for each would take long
                copy[name] = copied(item, levels - 1)
        return copy
    if isinstance(value, list):
        return [copied(item, levels - 1) for item in value]
    return value


def as_read(start: int, messages: list[Message]) -> tuple[Sequence[Message], Sequence[bytes]]:
    """The copies of the messages from `start` on that are as they were read, and the rows from the
    beginning to their end."""
    if not isinstance(messages, ReadMessages):
        return (), ()
    copies = messages.copies[start:]
    same = common_prefix(copies, messages[start:])
    return copies[:same], messages.rows[: start + same]


def join_rows(messages: list[Message], rows: Sequence[bytes]) -> bytes:
    """The JSON of these messages without "meta", from their rows; b"" if it cannot be taken from
    each: it has it once, as the last member."""
    if len(rows) < len(messages):
        return b""
    objects = []
    for message, row in zip(messages, rows):
        sent, _, meta = row.partition(META)
        # In a row that was written by hand, it may have been found in the contents
        is_outermost = meta.count(b"}") == meta.count(b"{") + 1
        if not is_outermost or META in meta or next(reversed(message)) != "meta":
            return b""
        objects.append(sent)
    data = b"},".join(objects) + b"}"
    return b"" if re.search(SURROGATE_OR_NUL, data) else data
