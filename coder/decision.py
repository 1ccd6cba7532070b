"""What follows on an answer: one pure function over one table.

The first row that fits decides. README.md shows the same table, and a test compares the two. What it leaves out: doing it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from coder.types import Finish, ModelError

FULL = 0.8  # part of the context window from which `length` means a full context and not the output limit (pulse-coder's rule)


class Decision(Enum):
    RUN_TOOLS = auto()
    ANSWER_CUT = auto()
    END = auto()
    COMPACT = auto()
    END_LENGTH = auto()
    END_FILTERED = auto()
    RETRY = auto()
    FAIL = auto()


@dataclass(frozen=True)
class Facts:
    """What the decision looks at: one answer, or the error instead of it."""

    calls: bool = False
    finish: Finish | None = None
    full: bool = False  # the context is at least 80 % full
    error: ModelError | None = None


@dataclass(frozen=True)
class Row:
    has: str
    condition: str
    then: str
    decision: Decision
    fits: Callable[[Facts], bool]


DECISIONS = (
    Row("an error", "the context overflowed", "compaction, then again; if it cannot: end with `length`", Decision.COMPACT,
        lambda f: f.error is not None and f.error.kind == "overflow"),
    Row("an error, a cut stream or nothing at all", "worth another try", "a failed attempt: wait, then again", Decision.RETRY,
        lambda f: f.error is not None and f.error.retryable),
    Row("an error", "of any other kind", "end with `error`", Decision.FAIL, lambda f: f.error is not None),
    Row("anything", "finish_reason `content_filter`", "end with `content_filter` and a notice", Decision.END_FILTERED,
        lambda f: f.finish == "content_filter"),
    Row("tool calls", "finish_reason `length`", "none is run, each is told that the answer was cut; next step",
        Decision.ANSWER_CUT, lambda f: f.calls and f.finish == "length"),
    Row("tool calls", "any other finish_reason", "run them, next step", Decision.RUN_TOOLS, lambda f: f.calls),
    Row("no calls", "`length`, and the context is at least 80 % full", "compaction, then again; if it cannot: end with `length`",
        Decision.COMPACT, lambda f: f.finish == "length" and f.full),
    Row("no calls", "`length` otherwise", "end with `length`: the output limit", Decision.END_LENGTH,
        lambda f: f.finish == "length"),
    Row("no calls", "any other finish_reason", "end with `stop`", Decision.END, lambda f: True),
)


def decide(facts: Facts) -> Decision:
    return next(row.decision for row in DECISIONS if row.fits(facts))
