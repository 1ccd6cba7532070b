"""Words for the screen: how a run ended, an error, tokens, a session in a list, help."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from coder.cli.text_rows import cell_count, one_line
from coder.events import RunEnd
from coder.permissions.sanitize import strip_controls
from coder.providers.errors import explain
from coder.providers.text import plural
from coder.types import ModelError, RunResult, Usage

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
TOO_LONG = "stopped: the conversation is too long for the model"
CUT = "stopped: the context is full, so that the answer is cut"
FULL = "/compact shortens the conversation, /new begins another."
MAX_RUN_LINE = 78  # columns
LIMITS = ("max_steps", "max_time")  # the run can go on after these
ATTACHED = "\n\n<attached "  # begins each file after the words of an entry
AGES = {"d": 86_400, "h": 3_600, "min": 60}  # seconds
# What /help shows after the commands, and /permissions above the rules
KEYS = {
    "!command": "run it in your terminal and add its output to the conversation",
    "!!command": "only run it",
    "@path": "attach a file, an image or a folder's list; Tab completes it",
    "Ctrl+J": 'a new line (or Alt+Enter); """ begins and ends an entry of several lines',
    "Ctrl+R": "search the history",
}
BACK = (
    "Go back to before which entry? Its run and all after it are undone, with their file changes."
)
WORKING = (
    "While the agent works: a line steers it, Esc stops it, "
    "+line and commands wait until it is done."
)
RULES = (
    "The last rule that matches an action decides. Without one, reading in this folder is allowed, "
    "and so are commands that only read (ls, cat, find, rg, git diff and the like); other "
    "commands, edits, paths outside and tools that are not built in ask."
)


# ---- a run -----------------------------------------------------------------------------------


def why_stopped(end: RunEnd | RunResult) -> str:
    """Why a run stopped. A full context is told apart from an answer at the output limit."""
    if not is_full(end):
        return STOPPED[end.stop_reason]
    return CUT if has_cut_answer(end) else TOO_LONG


def is_full(end: RunEnd | RunResult) -> bool:
    """Whether the context is full, so that the same conversation cannot go on."""
    return end.error is not None and end.error.kind == "overflow"


def has_cut_answer(end: RunEnd | RunResult) -> bool:
    """Whether a full context has cut an answer, which is no error of the server's."""
    from coder.model_call import CONTEXT_LIMIT  # late: a list of sessions needs none of the loop

    return is_full(end) and end.text != CONTEXT_LIMIT


def error_text(text: str, error: ModelError) -> str:
    """The server's words and advice, in one line. `text` is that of RunEnd."""
    head = text.partition(":")[0] if text.startswith("Failed after") else "Error"
    return strip_controls(f"{head}: {explain(error)}")


def tokens(usage: Usage) -> str:
    """Tokens in (how many of them cached) and out (how many of them reasoning), and their cost;
    ~ marks an estimate."""
    about = "~" if usage.estimated else ""
    cached = f" ({count(usage.cached)} cached)" if usage.cached else ""
    thought = f" ({count(usage.reasoning)} reasoning)" if usage.reasoning else ""
    text = f"{about}{count(usage.input)} in{cached}, {about}{count(usage.output)} out{thought}"
    if usage.cost is None:
        return text
    digits = 2 if usage.cost >= 1 else 4
    return f"{text}, {about}${usage.cost:.{digits}f}"


def run_line(end: RunEnd, used: float, seconds: float) -> str:
    """The line after a run: why it stopped, steps, tokens if any are known, what is left of the
    context, seconds.

    If it takes more than MAX_RUN_LINE columns, words are left out, then the reasoning among the
    tokens, then what was cached.
    """
    left = f"{max(0, 100 - 100 * used):.0f} % left"
    without_reasoning = replace(end.usage, reasoning=0)
    for usage, context in (
        (end.usage, left.replace("left", "of the context left")),
        (end.usage, left),
        (without_reasoning, left),
        (replace(without_reasoning, cached=0), left),
    ):
        facts = [why_stopped(end), plural(end.steps, "step")]
        if usage.input or usage.output:
            facts.append(tokens(usage))
        if used:
            facts.append(context)
        line = " · ".join([*facts, f"{seconds:.1f} s"])
        if cell_count(line) <= MAX_RUN_LINE:
            break
    return line


# ---- entries, sessions, names ----------------------------------------------------------------


def words_of(text: str) -> str:
    """An entry without what was attached to it."""
    return text.partition(ATTACHED)[0]


def session_line(
    info: SessionInfo,
    head: str = "",
    tail: str = "",
    width: int = 0,
) -> str:
    """A session in a list, between `head` and `tail`: its age, what it is about, its size and
    model; in one row of `width` columns, if that is given."""
    about = " ".join(strip_controls(info.title or info.first).split())
    facts = plural(info.messages, "message")
    model = strip_controls(info.model)
    if model:
        facts += f", {model}"
    head = f"{head}{age(info.updated / 1000):>6}  "
    tail = f"  ({facts}){tail}"
    if not width:
        return head + about + tail
    about = one_line(about, max(16, width - cell_count(head + tail)))
    return one_line(head + about + tail, width)


def age(updated: float) -> str:
    """How long ago this was (in seconds since the epoch), in its largest unit."""
    seconds = max(0.0, time.time() - updated)
    for unit, size in AGES.items():
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return "now"


def count(number: int) -> str:
    if number < 1000:
        return str(number)
    return f"{number / 1000:.1f}k" if number < 1_000_000 else f"{number / 1e6:.2f}M"


def first_of(names: Sequence[str], most: int = 15) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def by_number(values: Sequence[str], answer: str) -> str:
    """The value with this number, from 1; any other answer is returned as it is."""
    number = int(answer) if answer.isdecimal() else 0
    return values[number - 1] if 0 < number <= len(values) else answer
