"""Recorded answers of real providers come out with their text, calls and usage. They are no part of the repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coder.devtools.scripted import Reply
from coder.events import ReasoningDelta, Retry, StepEnd
from coder.providers.assembler import read_usage
from tests.harness import ask, serve

FILE = Path(__file__).parent.parent.parent / "shared" / "corpora" / "recorded.jsonl"
RECORDED = [json.loads(line) for line in FILE.read_text().splitlines()] if FILE.is_file() else []


@pytest.mark.skipif(not RECORDED, reason=f"the recorded answers are not here: {FILE.name}")
@pytest.mark.parametrize("case", RECORDED, ids=lambda case: case["id"])
def test_a_recorded_answer_comes_out_as_it_was(case: dict[str, Any]) -> None:
    expect = case["expect"]
    with serve(Reply(chunks=[case["body"].encode()]), Reply("(the next answer)")) as server:
        events, result = ask(server)
    if expect["error"]:
        errors = [event.error.message for event in events if isinstance(event, Retry)] + [
            result.error.message if result.error else ""
        ]
        assert any(expect["error"]["message"] in error for error in errors)
        return
    step = next(event for event in events if isinstance(event, StepEnd))
    calls = [call["function"] for call in step.message.get("tool_calls") or []]
    assert (step.message["content"] or "") == expect["text"]
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    assert (
        reasoning == expect["reasoning"] or '"thinking"' in case["body"]
    )  # what was noted left thinking in parts of content out
    assert [call["name"] for call in calls] == [call["name"] for call in expect["tool_calls"]]
    assert [json.loads(call["arguments"]) for call in calls] == [
        json.loads(call["arguments"] or "{}") for call in expect["tool_calls"]
    ]
    if expect["usage"]:
        assert step.usage == read_usage(expect["usage"]) and step.usage.input > 0
