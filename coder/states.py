"""The states of a run and the ways between them: one table, which the loop obeys and README.md draws.

The loop says where it goes with `Machine.to`, which refuses a way that is not in the table. To watch a run go through its
states, switch on the logger "coder.loop" at level DEBUG.

What it leaves out: why the loop takes one way and not another (decision.py for an answer, loop.py for the rest).
"""

from __future__ import annotations

import logging
from enum import Enum

log = logging.getLogger("coder.loop")


class State(Enum):
    READY = "ready"  # between two steps: limits are looked at
    PREPARING = "preparing"  # queued messages enter the history, which is repaired, maybe shortened, made a request
    ASKING = "asking"  # the request is out, the answer comes in
    DECIDING = "deciding"  # the table in decision.py
    WAITING = "waiting"  # after a failed attempt
    COMPACTING = "compacting"  # the history was too long for the model
    RUNNING_TOOLS = "running_tools"
    FINISHING = "finishing"  # the model is done; does somebody want more?
    ENDED = "ended"


# (from, to) -> when
TRANSITIONS: dict[tuple[State, State], str] = {
    (State.READY, State.PREPARING): "a step begins",
    (State.READY, State.ENDED): "max_steps",
    (State.PREPARING, State.ASKING): "the request is made",
    (State.PREPARING, State.DECIDING): "a hook refuses the request",
    (State.ASKING, State.DECIDING): "an answer, or an error",
    (State.DECIDING, State.RUNNING_TOOLS): "tool calls",
    (State.DECIDING, State.FINISHING): "no calls",
    (State.DECIDING, State.WAITING): "an error worth another try",
    (State.DECIDING, State.COMPACTING): "the context is full",
    (State.DECIDING, State.ENDED): "error, length, content_filter",
    (State.WAITING, State.PREPARING): "another attempt",
    (State.COMPACTING, State.PREPARING): "shorter now",
    (State.COMPACTING, State.ENDED): "cannot be shortened",
    (State.RUNNING_TOOLS, State.READY): "results are in",
    (State.RUNNING_TOOLS, State.ENDED): "doom_loop",
    (State.FINISHING, State.READY): "a follow-up",
    (State.FINISHING, State.ENDED): "stop",
}
NEXT = {state: tuple(b for a, b in TRANSITIONS if a is state) for state in State}  # tuples: a state's hash is slow
FROM_ANYWHERE = "aborted, max_time, or an exception"  # leads to ENDED


class Machine:
    """Where a run is."""

    def __init__(self) -> None:
        self.state = State.READY
        self._next = NEXT[self.state]

    def to(self, state: State) -> None:
        """Go there. Raises RuntimeError where the table knows no such way: the loop has a bug."""
        if state not in self._next:
            raise RuntimeError(f"a run cannot go from {self.state.value} to {state.value}")
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s -> %s: %s", self.state.value, state.value, TRANSITIONS[self.state, state])
        self.state, self._next = state, NEXT[state]

    def end(self) -> None:
        """Go to the end, from anywhere."""
        if self.state is not State.ENDED:
            log.debug("%s -> %s: %s", self.state.value, State.ENDED.value, FROM_ANYWHERE)
            self.state = State.ENDED


def diagram() -> str:
    """The table as a Mermaid state diagram."""
    rows = [f"        {a.value} --> {b.value}: {when}" for (a, b), when in TRANSITIONS.items() if b is not State.ENDED]
    ends = [f"    {a.value} --> [*]: {when}" for (a, b), when in TRANSITIONS.items() if b is State.ENDED]
    return "\n".join(["stateDiagram-v2", "    state run {", "        [*] --> ready", *rows, "    }", *ends,
                      f"    run --> [*]: {FROM_ANYWHERE}"])
