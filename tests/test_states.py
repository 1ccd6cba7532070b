"""The states of a run: every way in the drawing of docs/reading-guide.md is taken by a real run, and no other one."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest

from coder.devtools.scripted import Reply
from coder.events import Event, State, Status
from coder.history import user
from coder.hooks import FunctionHooks
from coder.toolset import tool
from coder.types import Limits, ModelError
from tests.harness import ask, serve

GUIDE = Path(__file__).parents[1] / "docs" / "reading-guide.md"
OVERFLOW = Reply("This model's maximum context length is 8 tokens", status=400)


@tool
def look() -> str:
    """Look."""
    return "nothing"


def refuse(request: Any) -> None:
    raise ModelError("bad_request", "not today")


def refuse_once() -> Callable[[Any], None]:
    errors = [ModelError("server", "not yet", retryable=True)]

    def before(request: Any) -> None:
        if errors:
            raise errors.pop()

    return before


def once(value: list[Any]) -> Callable[[], list[Any]]:
    return lambda: [value.pop()] if value else []


CALL, DONE = Reply(calls=[("look", {})]), Reply("done")
NO, STAYS = Reply("no", status=500), Reply("no", status=401)
FILTERED = Reply(calls=[("look", {})], finish="content_filter")
INITIALS = {"r": "running_tools", "a": "asking", "w": "waiting", "c": "compacting"}
INITIALS |= {"p": "preparing", "f": "finishing", "e": "ended"}


def hook(**functions: Any) -> dict[str, Any]:
    return {"hooks": FunctionHooks(**functions)}


MORE = hook(get_follow_up_messages=once([user("more")]))
SHORTER = hook(on_length=lambda m, trigger, u, a: trigger != "threshold")
# What is answered and put in, and the states that the run goes through, by their first letters.
RUNS: dict[str, tuple[list[Reply], dict[str, Any], str]] = {
    "an answer": ([DONE], {}, "pafe"),
    "a follow-up": ([DONE], MORE, "pafpafe"),
    "a tool": ([CALL, DONE], {}, "parpafe"),
    "the step limit": ([CALL], {"limits": Limits(max_steps=1)}, "parpe"),
    "the same call again": ([Reply(calls=[("look", {})] * 4)], {}, "pare"),
    "a transient failure": ([NO, DONE], {}, "pawpafe"),
    "an empty answer": ([Reply(""), DONE], {}, "pawpafe"),
    "a final failure": ([STAYS], {}, "pae"),
    "too many failures": ([NO], {"limits": Limits(max_errors=1)}, "pae"),
    "the output limit": ([Reply("half", finish="length")], {}, "pafe"),
    "the content filter, with a call": ([FILTERED], {}, "pae"),
    "a full context that was shortened": ([OVERFLOW, DONE], SHORTER, "pacpafe"),
    "a full context": ([OVERFLOW], {}, "pace"),
    "a request that a hook fails once": ([DONE], hook(before_llm_call=refuse_once()), "pwpafe"),
    "a request that a hook refuses": ([DONE], hook(before_llm_call=refuse), "pe"),
}


def states_of(events: list[Event]) -> list[str]:
    return [event.state for event in events if isinstance(event, Status)]


def spelled(initials: str) -> list[str]:
    return [INITIALS[initial] for initial in initials]


def drawn_ways() -> set[tuple[str, str]]:
    drawing = GUIDE.read_text().split("```mermaid\n")[1].split("\n```")[0]
    return set(re.findall(r"(\w+) --> (\w+)", drawing)) - {("run", "ended")}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_through_these_states(name: str) -> None:
    replies, options, states = RUNS[name]
    with serve(*replies) as server:
        events, _ = ask(server, tools=[look], **options)
    assert states_of(events) == spelled(states)


def test_every_way_in_the_drawing_is_taken_by_one_of_these_runs_and_no_other() -> None:
    taken = {way for _, _, states in RUNS.values() for way in pairwise(spelled(states))}
    assert taken == drawn_ways()
    assert {state for way in taken for state in way} == set(get_args(State))
