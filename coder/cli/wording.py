"""Words for the screen: how a run ended, what it used, an error, a session in a list."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from coder.cli.screen import cell_count, one_line
from coder.events import RunEnd
from coder.permissions.sanitize import strip_controls
from coder.providers.errors import explain
from coder.types import ModelError, Usage

if TYPE_CHECKING:
    from coder.sessions.store import SessionInfo

STOPPED = {
    "stop": "done",
    "length": "stopped: the answer reached the output limit",
    "content_filter": "stopped by the content filter",
    "max_steps": "stopped: the step limit is reached",
    "max_time": "stopped: the time limit is reached",
    "doom_loop": "stopped: the model repeats itself",
    "aborted": "stopped by the user",
    "error": "failed",
}
LIMITS = ("max_steps", "max_time")  # behind which the run can go on
ATTACHED = "\n\n<attached "  # begins each file behind the words of an entry
AGES = ((86_400, "d"), (3_600, "h"), (60, "min"))  # seconds, unit


def summary(event: RunEnd, seconds: float, used: float = 0.0) -> str:
    """The line after a run: why it stopped, steps, tokens where any are known, what is left of the context, seconds.

    `used`: the share of the context window that the newest answer took.
    """
    steps = f"{event.steps} step{'s' if event.steps != 1 else ''}"
    given = [tokens(event.usage)] if event.usage.input or event.usage.output else []
    left = [f"{max(0, 100 - 100 * used):.0f} % of the context left"] if used else []
    return " · ".join([STOPPED[event.stop_reason], steps, *given, *left, f"{seconds:.1f} s"])


def error_text(text: str, error: ModelError) -> str:
    """The server's words and advice, in one line. `text` is that of RunEnd."""
    head = text.partition(":")[0] if text.startswith("Failed after") else "Error"
    return strip_controls(f"{head}: {explain(error)}")


def tokens(usage: Usage) -> str:
    """Tokens in (how many of them cached) and out (how many of them reasoning), and their cost; ~ marks an estimate."""
    about = "~" if usage.estimated else ""
    cached = f" ({count(usage.cached)} cached)" if usage.cached else ""
    thought = f" ({count(usage.reasoning)} reasoning)" if usage.reasoning else ""
    text = f"{about}{count(usage.input)} in{cached}, {about}{count(usage.output)} out{thought}"
    if usage.cost is None:
        return text
    return f"{text}, {about}${usage.cost:.{2 if usage.cost >= 1 else 4}f}"


def words_of(text: str) -> str:
    """An entry without what was attached to it."""
    return text.partition(ATTACHED)[0]


def count(number: int) -> str:
    if number < 1000:
        return str(number)
    return f"{number / 1000:.1f}k" if number < 1_000_000 else f"{number / 1e6:.2f}M"


def session_line(info: SessionInfo, head: str = "", tail: str = "", width: int = 0) -> str:
    """A session in a list, between `head` and `tail`: its age, what it is about, its size and model. In one row of
    `width` columns, if that is given."""
    about = " ".join(strip_controls(info.title or info.first).split())
    seconds = max(0.0, time.time() - info.updated / 1000)
    age = next((f"{seconds / size:.0f} {unit}" for size, unit in AGES if seconds >= size), "now")
    facts = ", ".join(filter(None, [message_count(info.messages), strip_controls(info.model)]))
    head, tail = f"{head}{age:>6}  ", f"  ({facts}){tail}"
    if not width:
        return head + about + tail
    about = one_line(about, max(16, width - cell_count(head + tail)))
    return one_line(head + about + tail, width)


def message_count(messages: int) -> str:
    return f"{messages} message{'' if messages == 1 else 's'}"


def first_of(names: Sequence[str], most: int = 15) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def by_number(values: Sequence[str], answer: str) -> str:
    """The value with this number, from 1; what is none stands for itself."""
    number = int(answer) if answer.isdecimal() else 0
    return values[number - 1] if 0 < number <= len(values) else answer
