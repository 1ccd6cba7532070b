"""A conversation in a line of a list."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from coder.providers.text import clean

if TYPE_CHECKING:
    from coder.sessions.store import SessionInfo


def line_of(info: SessionInfo) -> str:
    """A session in a line: id, age, what it is about."""
    return f"{info.id}  {age(info.updated):>8}  {' '.join(clean(info.title or info.first).split())}  ({counted(info.messages)})"


def counted(messages: int) -> str:
    return f"{messages} message{'' if messages == 1 else 's'}"


def age(milliseconds: int) -> str:
    """How long ago, in the largest unit."""
    seconds = max(0.0, time.time() - milliseconds / 1000)
    steps: Sequence[tuple[float, str]] = ((86_400, "d"), (3_600, "h"), (60, "min"))
    return next(
        (f"{seconds / size:.0f} {unit} ago" for size, unit in steps if seconds >= size), "now"
    )
