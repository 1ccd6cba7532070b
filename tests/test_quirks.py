"""Real servers' answers, byte for byte, through ChatModel and the loop: what each has to come out
as.

The cases and their format: tests/data/quirks.jsonl; each names the quirk and a public report of it.
"""

from __future__ import annotations

import base64
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from coder.devtools.scripted import Body, Reply, ScriptedServer
from coder.events import ReasoningDelta, Retry, StepEnd, ToolEnd
from coder.providers.profiles import read_usage
from coder.toolset import Tool
from tests.harness import all_of, ask, assert_all_valid

CORPUS = Path(__file__).parent / "data" / "quirks.jsonl"
CASES = [json.loads(line) for line in CORPUS.read_text().splitlines()]
# Cases that are a matter of taste, where ours is the corpus's other reading, and why.
OTHERWISE = {
    "tc-in-text": "a call that a model writes as text may be one that it quotes: the model is asked again",
    "ch-cumulative-text": "text that repeats what came before cannot be told from a true repeat",
    "ht-overflow-400-empty": "a 400 without a word may be anything",
}


# Whole answers in the forms that providers have, written by hand; and recorded ones, which are no
# part of the repository
WRITTEN = Path(__file__).parent / "data" / "recorded.jsonl"
FILE = Path(__file__).parents[2] / "shared" / "corpora" / "recorded.jsonl"
RECORDED = [json.loads(line) for each in (WRITTEN, FILE) if each.is_file() for line in each.open()]


def case_id(case: dict[str, Any]) -> str:
    return str(case["id"])


def offered(name: str, *parameters: str) -> Tool:
    properties = {each: {"type": "string"} for each in parameters}
    schema = {"type": "object", "properties": properties, "required": [*parameters]}
    return Tool(name, name, schema, lambda **_: "done")


SIGNATURES = "read_file path; write_file path content; bash command; list_dir path; now"
TOOLS = [offered(*words.split()) for words in SIGNATURES.split("; ")]


def reply(case: dict[str, Any]) -> Reply:
    """The case as an answer of the test server: its writes, pauses and its way to close."""
    encoding = case.get("encoding", "utf-8")
    encode = base64.b64decode if encoding == "base64" else lambda text: text.encode(encoding)
    chunks = [encode(text) for text in case["body_chunks"]]
    headers = case.get("headers") or {}
    close = case.get("close", "eof")
    pace = case.get("pause_ms", 3) / 1000
    return Reply(
        status=case["status"],
        headers=headers,
        chunks=chunks,
        close=close,
        pace=pace,
    )


def play(case: dict[str, Any]) -> dict[str, Any]:
    """Run one case to its end; what came out, in the words of the corpus."""
    answers = [reply({"status": 200} | each) for each in (case, *case.get("then", []))]
    times: list[float] = []
    attempts = 0

    def script(body: Body) -> Reply:
        nonlocal attempts
        times.append(time.monotonic())
        newest = body["messages"][-1]
        if newest["role"] == "tool" or "Nothing was run" in newest["content"]:
            return Reply("enough")
        attempts += 1
        return answers[min(attempts, len(answers)) - 1]

    given = case.get("client", {})
    options = {"context_window": given.get("context_window", 128_000)}
    options["idle_timeout"] = given.get("idle_timeout_s", 30)
    messages: list[dict[str, Any]] = []
    started = time.monotonic()
    with ScriptedServer(script) as server:
        events, result = ask(server, tools=TOOLS, messages=messages, model=options)
        assert_all_valid(server)
    first = next((e for e in events if isinstance(e, StepEnd)), None)
    message = first.message if first else {}
    failed = {e.id for e in events if isinstance(e, ToolEnd) and e.is_error}
    made = [(call["id"], call["function"]) for call in message.get("tool_calls") or []]
    calls = [
        function | {"arguments": None if i in failed else json.loads(function["arguments"])}
        for i, function in made
    ]
    error = result.error.kind if result.error else None
    finish = "error" if error else ("tool_calls" if calls else result.stop_reason)
    cut = any("cut at the output limit" in str(m.get("content")) for m in messages)
    if result.stop_reason == "length" or (calls and len(failed) == len(calls) and cut):
        finish = "error" if error else "length"
        calls = []
    return {
        "text": message.get("content") or "",
        "tool_calls": calls,
        "finish": finish,
        "error": error,
        "retried": attempts > 1,
        "ids": [i for i, _ in made],
        "usage": first.usage if first else None,
        "seconds": time.monotonic() - started,
        "delay": times[1] - times[0] if len(times) > 1 else 0.0,
        "message": message,
        "reasoning": "".join(e.text for e in events if e.type == "reasoning_delta"),
    }


def differences(case: dict[str, Any], came: dict[str, Any], expect: dict[str, Any]) -> list[str]:
    """What is not as expected."""
    wrong = [
        f"{name}: {came[name]!r} for {expect[name]!r}"
        for name in ("tool_calls", "finish", "error", "retried", "ids")
        if name in expect and came[name] != expect[name]
    ]
    if not expect["error"] and came["text"] != expect["text"]:
        wrong.append(f"text: {came['text']!r} for {expect['text']!r}")
    if expect.get("unique_ids") and len(set(came["ids"])) != len(came["ids"]):
        wrong.append(f"ids twice: {came['ids']}")
    if "reasoning" in expect and came["reasoning"] != expect["reasoning"]:
        wrong.append(f"reasoning: {came['reasoning']!r} for {expect['reasoning']!r}")
    for name, number in (expect.get("usage") or {}).items():
        if not expect["error"] and getattr(came["usage"], name) != number:
            wrong.append(f"usage.{name}: {came['usage']} for {number}")
    if came["delay"] < expect.get("min_delay_s", 0):
        wrong.append(f"came again after {came['delay']:.2f} s")
    if came["seconds"] > max(25, expect.get("max_seconds", 60)):  # of the 30 of the idle time-out
        wrong.append(f"took {came['seconds']:.1f} s")
    for path, value in (expect.get("echo") or {}).items():
        found: Any = came["message"]
        for part in (
            path.replace("[", ".")
            .replace(
                "]",
                "",
            )
            .split(".")
        ):
            found = found[int(part)] if part.isdigit() else (found or {}).get(part)
        if found != value:
            wrong.append(f"echo {path}: {found!r} for {value!r}")
    return wrong


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_an_answer_of_a_real_server_comes_out_right(case: dict[str, Any]) -> None:
    came = play(case)
    readings = [
        case["expect"],
        *({**case["expect"], **change} for change in case.get("alt", [])),
    ]
    if case["strictness"] == "may":
        readings = readings[1:] if case["id"] in OTHERWISE else readings[:1]
    found = [differences(case, came, expect) for expect in readings]
    wrong = " | or ".join("; ".join(each) for each in found)
    assert [] in found, f"{case['quirk']} ({case['ref']}): {wrong}"


def test_every_case_of_the_corpus_is_known_by_group() -> None:
    groups = Counter(case["id"].split("-")[0] for case in CASES)
    assert groups == {
        "tc": 37,
        "fr": 23,
        "ch": 18,
        "ss": 32,
        "ht": 30,
    }
    assert Counter(case["strictness"] for case in CASES)["may"] == len(OTHERWISE) + 1


@pytest.mark.parametrize("case", RECORDED, ids=case_id)
def test_a_recorded_answer_comes_out_as_it_was(case: dict[str, Any]) -> None:
    expect = case["expect"]
    with ScriptedServer(
        [
            Reply(chunks=[case["body"].encode()]),
            Reply("(the next)"),
        ]
    ) as server:
        events, result = ask(server)
    if expect["error"]:
        errors = [event.error for event in all_of(Retry, events)] + [result.error]
        assert any(expect["error"]["message"] in str(error) for error in errors)
        return
    step = all_of(StepEnd, events)[0]
    calls = [call["function"] for call in step.message.get("tool_calls") or []]
    named = [
        (
            call["name"],
            json.loads(call["arguments"] or "{}"),
        )
        for call in expect["tool_calls"]
    ]
    assert [
        (
            call["name"],
            json.loads(call["arguments"]),
        )
        for call in calls
    ] == named
    assert (step.message["content"] or "") == expect["text"]
    assert step.finish_reason == (expect["finish"] or step.finish_reason)
    # thoughts in parts of the content were not noted
    thoughts = "".join(event.text for event in all_of(ReasoningDelta, events))
    assert thoughts == expect["reasoning"] or '"thinking"' in case["body"]
    if expect["usage"]:
        assert step.usage == read_usage(expect["usage"])
        assert step.usage.input > 0
