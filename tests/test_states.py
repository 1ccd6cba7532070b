"""The states of a run: every way in the table is taken by a real run, no other one, and README draws the table."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from coder.abort import Abort
from coder.features.hooks import FunctionHooks
from coder.features.scripted import Reply
from coder.history import user
from coder.states import FROM_ANYWHERE, TRANSITIONS, Machine, State, diagram
from coder.tools import tool
from coder.types import Event, Limits, ModelError, TextDelta
from tests.harness import ask, serve

README = Path(__file__).parents[1] / "README.md"
OVERFLOW = Reply("This model's maximum context length is 8 tokens", status=400)


@tool
def look() -> str:
    """Look."""
    return "nothing"


def refuse(request: Any) -> None:
    raise ModelError("bad_request", "not today")


def once(value: list[Any]) -> Callable[[], list[Any]]:
    return lambda: [value.pop()] if value else []


CALL, DONE = Reply(calls=[("look", {})]), Reply("done")
# What is answered and put in, and the states that the run goes through.
RUNS: dict[str, tuple[list[Reply], dict[str, Any], str]] = {
    "an answer": ([DONE], {}, "ready preparing asking deciding finishing ended"),
    "a follow-up": ([DONE], {"hooks": FunctionHooks(get_follow_up_messages=once([user("more")]))},
                    "ready preparing asking deciding finishing ready preparing asking deciding finishing ended"),
    "a tool": ([CALL, DONE], {}, "ready preparing asking deciding running_tools ready preparing asking deciding finishing ended"),
    "the step limit": ([CALL], {"limits": Limits(max_steps=1)}, "ready preparing asking deciding running_tools ready ended"),
    "the same call again": ([Reply(calls=[("look", {})] * 4)], {}, "ready preparing asking deciding running_tools ended"),
    "a failure that passes": ([Reply("no", status=500), DONE], {},
                              "ready preparing asking deciding waiting preparing asking deciding finishing ended"),
    "a failure that stays": ([Reply("no", status=401)], {}, "ready preparing asking deciding ended"),
    "too many failures": ([Reply("no", status=500)], {"limits": Limits(max_errors=1)}, "ready preparing asking deciding ended"),
    "the output limit": ([Reply("half", finish="length")], {}, "ready preparing asking deciding ended"),
    "the content filter, with a call": ([Reply(calls=[("look", {})], finish="content_filter")], {},
                                        "ready preparing asking deciding ended"),
    "a full context that was shortened": ([OVERFLOW, DONE],
                                          {"hooks": FunctionHooks(on_length=lambda m, trigger, u, a: trigger != "threshold")},
                                          "ready preparing asking deciding compacting preparing asking deciding finishing ended"),
    "a full context": ([OVERFLOW], {}, "ready preparing asking deciding compacting ended"),
    "a hook's no": ([DONE], {"hooks": FunctionHooks(before_llm_call=refuse)}, "ready preparing deciding ended"),
}


def path(caplog: pytest.LogCaptureFixture) -> list[str]:
    ways = [record.getMessage().split(":")[0].split(" -> ") for record in caplog.records if record.name == "coder.loop"]
    assert all(before[1] == after[0] for before, after in pairwise(ways))
    return [ways[0][0], *(way[1] for way in ways)]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_through_these_states(name: str, caplog: pytest.LogCaptureFixture) -> None:
    replies, options, states = RUNS[name]
    with caplog.at_level(logging.DEBUG, "coder.loop"), serve(*replies) as server:
        ask(server, tools=[look], **options)
    assert path(caplog) == states.split()


def test_every_way_in_the_table_is_taken_by_one_of_these_runs() -> None:
    words = [states.split() for _, _, states in RUNS.values()]
    taken = {(State(a), State(b)) for states in words for a, b in pairwise(states)}
    assert taken == TRANSITIONS.keys()


def test_an_abort_leads_to_the_end_from_where_the_run_is(caplog: pytest.LogCaptureFixture) -> None:
    abort = Abort()

    def stop(event: Event) -> None:
        if isinstance(event, TextDelta):
            abort.set()

    with caplog.at_level(logging.DEBUG, "coder.loop"), serve(Reply("one two three", pace=0.05)) as server:
        _, result = ask(server, abort=abort, each=stop)
    assert result.stop_reason == "aborted" and path(caplog) == ["ready", "preparing", "asking", "ended"]
    assert caplog.records[-1].getMessage().endswith(FROM_ANYWHERE)


def test_a_way_that_is_not_in_the_table_is_a_bug_that_shows() -> None:
    machine = Machine()
    with pytest.raises(RuntimeError, match="cannot go from ready to running_tools"):
        machine.to(State.RUNNING_TOOLS)
    assert machine.state is State.READY


def test_readme_draws_the_table() -> None:
    drawn = README.read_text().split("```mermaid\n")[1].split("\n```")[0]
    assert drawn == diagram()
    assert all(f"{state.value} " in drawn for state in State if state is not State.ENDED)
