"""Loops of a model: calls that bring nothing new.

Calls are equal if their names and arguments are. The result of a call that could not be made is
never new, and neither is the model's own checklist. Three rules, each for one run:

- Equal calls of one answer run once, unless a call between them may have changed something.
- The third equal call in a row is not run, if the two before it had equal results (the threshold is
  in Limits); the same call once more ends the run. A poll whose output changes is never refused.
- If the last calls brought no (call, result) that is new in the run, the newest result says so. A
  few more end the run, if the model has read that.
"""

from __future__ import annotations

import json
from typing import Any

from coder.history import as_text
from coder.types import ToolCall, ToolResult

SAME_AS_ABOVE = "Same call as above in this answer; its result is above."
STALE_CALLS = 8  # without anything new: the result says so
STALE_CALLS_TO_END = 12
NOTHING_NEW = (
    f"[Nothing new in the last {STALE_CALLS} calls: they repeat. "
    "Change the approach, or end with what is in the way.]"
)


class Repetitions:
    """The calls of one run so far, as far as they repeat."""

    def __init__(self, threshold: int) -> None:
        self.threshold = threshold  # 3: the third equal call in a row is not run
        self.has_calls = False  # whether a call was made, with or without success
        self.stale = 0  # calls in a row that brought nothing new
        # Calls of this answer whose results still hold: none since then may have changed something
        self._unchanged: set[str] = set()
        self._newest = ("", "")  # call, result
        self._in_a_row = 0  # how often the newest call came in a row with this result
        self._seen: set[tuple[str, str]] = set()
        self._has_note = False  # whether one of the stale results says that nothing is new
        self._model_was_told = False  # whether that is in an earlier answer's results: it was read

    def begin_answer(self) -> None:
        self._unchanged.clear()
        self._model_was_told = self._has_note

    def seen_in_answer(self, call: ToolCall) -> bool:
        """Is the call equal to one of this answer after which nothing was changed?"""
        # Arguments that could not be read may differ
        return not call.problem and _key(call) in self._unchanged

    def add_to_answer(self, call: ToolCall, changes_nothing: bool) -> None:
        """Count a call of this answer, before it is run."""
        if call.problem:
            return
        if not changes_nothing:
            self._unchanged.clear()
        self._unchanged.add(_key(call))

    def times_in_a_row(self, call: ToolCall) -> int:
        """Which equal call in a row this one is, since the result last changed: 1, 2, ..."""
        newest_call, _ = self._newest
        return self._in_a_row + 1 if _key(call) == newest_call else 1

    def add_not_run(self, call: ToolCall) -> None:
        """Count a call that repeats the newest one too often, and so is not run."""
        self._in_a_row = self.times_in_a_row(call)
        self.stale += 1

    def allow(self) -> None:
        """Count anew: the user or a hook allows the repetition."""
        self._newest = ("", "")
        self._in_a_row = 0
        self._forget_stale()

    def add_result(self, call: ToolCall, result: ToolResult) -> None:
        """Count a call and its result. After many without anything new the result gets a note."""
        self.has_calls = True
        outcome = (_key(call), as_text(result.content))
        if outcome != self._newest:
            self._newest = outcome
            self._in_a_row = 0
        self._in_a_row += 1
        self.stale += 1
        if result.can_be_new and outcome not in self._seen:
            self._forget_stale()
        self._seen.add(outcome)
        if self.stale >= STALE_CALLS and not self._has_note:
            result.content = _with_note(result.content)
            self._has_note = True

    def _forget_stale(self) -> None:
        self.stale = 0
        self._has_note = False

    @property
    def is_stuck(self) -> bool:
        """Were there too many calls without anything new after the model was told?"""
        return self._model_was_told and self.stale >= STALE_CALLS_TO_END


def _key(call: ToolCall) -> str:
    arguments = call.problem or json.dumps(call.arguments, sort_keys=True)
    return f"{call.name} {arguments}"


def _with_note(content: Any) -> Any:
    if isinstance(content, list):
        return [*content, {"type": "text", "text": NOTHING_NEW}]
    return f"{content}\n{NOTHING_NEW}"
