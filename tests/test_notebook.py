"""In a notebook: a result shows what happened, and a cell that iterates a run can be
interrupted."""

from __future__ import annotations

import subprocess
import sys

import pytest

from coder import Agent, Reply, ScriptedModel, tool
from tests.harness import add
from tests.terminal import PATIENCE


@tool
def say(words: str) -> str:
    """Say something.

    words: what
    """
    return words * 100


def shown(*replies: Reply, prompt: str = "Add\n1 and 2.", **options: object) -> str:
    agent = Agent(
        ScriptedModel([Reply("Earlier."), *replies]),
        tools=[add, say],
        max_steps=2,
    )
    agent.run("An earlier question.")
    return agent.run(prompt, **options)._repr_markdown_()  # type: ignore[arg-type]


CALL = Reply(
    "Let me see.",
    calls=[("add", {"a": 1, "b": 2})],
)


def test_a_result_shows_the_question_the_calls_and_the_answer() -> None:
    assert shown(CALL, Reply("It is **3**.")) == (
        "> Add\n> 1 and 2.\n\n- `add(a=1, b=2)` → `3`\n\nIt is **3**."
    )


def test_long_results_are_cut_and_no_code_ends_early() -> None:
    text = shown(
        Reply(calls=[("say", {"words": "`x`"})]),
        Reply("Said."),
    )
    assert "`say(words=\"'x'\")` → `'x''x'" in text
    assert "…`" in text
    assert text.count("`") == 4


def test_a_run_that_did_not_end_well_says_so() -> None:
    assert shown(CALL, CALL).endswith("\n\n*The run ended with max_steps.*")


def test_the_program_s_own_question_is_not_shown_as_the_user_s() -> None:
    text = shown(
        Reply("no"),
        Reply('{"x": 1}'),
        output={"type": "object", "required": ["x"]},
    )
    assert text.startswith("> Add\n> 1 and 2.")
    assert "does not fit" not in text


CELLS = """
import code, os, signal, sys, threading
console = code.InteractiveConsole()
def cell(text):
    console.runcode(compile(text, "cell", "exec"))
cell('''
from coder import Agent, Reply, ScriptedModel
agent = Agent(ScriptedModel([Reply("word " * 5000, pace=0.01), Reply("word " * 5000), Reply("Fine.")]))
''')
cell('''
for event in agent.stream("Tell a story."):
    if event.type == "text_delta":
        os.kill(os.getpid(), signal.SIGINT)  # the stop button
'''.replace("os.kill", "import os, signal; os.kill"))
cell('''
for event in agent.stream("Another one."):
    if event.type == "text_delta":
        raise KeyboardInterrupt
''')
cell('''
print([message["role"] for message in agent.messages])
print(agent.run("And now?").text)
''')
"""


def test_a_cell_that_iterates_a_run_can_be_interrupted() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CELLS], capture_output=True, text=True, timeout=PATIENCE
    )
    roles = str(["user", "assistant"] * 2)
    assert done.stdout == f"{roles}\nFine.\n", done.stderr
    assert done.stderr.count("KeyboardInterrupt") >= 2


@pytest.mark.parametrize("arguments", ["{", "[1]"])
def test_arguments_that_are_no_object_are_shown_as_they_are(arguments: str) -> None:
    text = shown(Reply(calls=[("add", arguments)]), Reply("Sorry."))
    assert text.endswith("Sorry.")
    assert "- `add(" in text
