"""repair: any list becomes one that servers accept, in the same way each time, and again without a
change."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coder.history import NOT_RUN, History, repair, user, wire_messages
from coder.types import Message
from tests.harness import assert_valid

IDS = st.sampled_from(["a", "b", "c", "", None])
FUNCTIONS = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["bash", "no such.tool", "", "x" * 80]),
        "arguments": st.sampled_from(["{}", '{"a": 1}', '{"a": 1', "[]", "", None]),
    }
)
CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "id": IDS,
            "type": st.just("function"),
            "function": FUNCTIONS,
        }
    ),
    max_size=3,
)
TEXTS = st.sampled_from(["text", "", None])
MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {
                "role": st.just("user"),
                "content": st.sampled_from(["hello", "hi"]),
            }
        ),
        st.fixed_dictionaries(
            {"role": st.just("assistant"), "content": TEXTS}, optional={"tool_calls": CALLS}
        ),
        st.fixed_dictionaries(
            {
                "role": st.just("tool"),
                "tool_call_id": IDS,
                "content": TEXTS,
            }
        ),
        st.fixed_dictionaries(
            {
                "role": st.just("notification"),
                "text": st.just("for the screen"),
            }
        ),
    ),
    max_size=12,
)


@settings(max_examples=100, deadline=None)
@given(MESSAGES)
def test_any_list_becomes_valid_and_stays_as_it_then_is(messages: list[Message]) -> None:
    before = copy.deepcopy(messages)
    fixed = repair(messages)
    assert messages == before, "the list that was given is not changed"
    assert_valid({"messages": wire_messages(fixed)})
    others = [each | {"meta": {"model": "another"}} for each in fixed]
    assert_valid({"messages": wire_messages(others, "this")})
    assert repair(fixed) == fixed
    assert all(ours is again for ours, again in zip(fixed, repair(fixed))), (
        "what is in order is not even copied"
    )


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), MESSAGES),
        min_size=1,
        max_size=4,
    )
)
def test_repairing_a_list_while_it_changes_at_its_end_gives_a_valid_one_too(
    pieces: list[tuple[int, list[Message]]],
) -> None:
    growing: list[Message] = []
    history = History(growing)
    for lost, piece in pieces:
        growing[max(0, len(growing) - lost) :] = piece
        history.repair()
        assert_valid({"messages": wire_messages(growing)})
        assert repair(growing) == growing


def call(*ids: str) -> Message:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": i, "type": "function", "function": {"name": "bash", "arguments": "{}"}}
            for i in ids
        ],
    }


def result(call_id: str, content: Any = "ok") -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


REPAIRS: dict[str, tuple[list[Message], list[Any]]] = {
    "a call without a result gets one right after it": (
        [
            user("go"),
            call("a", "b"),
            result("a"),
            user("and?"),
        ],
        ["go", None, "ok", NOT_RUN, "and?"],
    ),
    "results come in the order of their calls and only once": (
        [
            call("a", "b"),
            result("b", "B"),
            result("a", "A"),
            result("a", "2"),
            result("z", "Z"),
        ],
        [None, "A", "B"],
    ),
    "a result that comes after a user message moves to its call": (
        [call("a"), user("meanwhile"), result("a", "A")],
        [None, "A", "meanwhile"],
    ),
    "empty answers go and empty results say so": (
        [
            user("x"),
            {"role": "assistant", "content": ""},
            call("a"),
            result("a", ""),
        ],
        ["x", None, "(no output)"],
    ),
}


@pytest.mark.parametrize("what", REPAIRS)
def test_a_repaired_list(what: str) -> None:
    messages, contents = REPAIRS[what]
    assert [m.get("content") for m in repair(messages)] == contents


def test_thoughts_are_sent_to_any_model_but_another_one() -> None:
    answer = {"role": "assistant", "content": "so", "reasoning_content": "why"}
    [ours] = wire_messages([answer | {"meta": {"model": "m"}}], "m")
    [anyones] = wire_messages([answer | {"meta": {"model": "m"}}])
    [theirs] = wire_messages([answer | {"meta": {"model": "m"}}], "other")
    assert ours == anyones == answer
    assert "reasoning_content" not in theirs
