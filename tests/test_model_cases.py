"""What a model does wrong, and what it then sees: tests/data/model_cases, a file for each kind of
mistake.

Each case goes over the wire: a server answers with the calls as the model wrote them, in a folder
as real projects have them, and the next request shows what the model reads. More cases of the same
kinds are in the tables of test_edit.py, test_indentation.py, test_patch.py, test_files.py,
test_search.py, test_processes.py and test_loop.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from coder.agent.profiles import BUILT_IN, AgentSpec, choices
from coder.agent.subagent import Equipment, Subagents
from coder.ai import ChatModel
from coder.devtools.scripted import Body, Reply, ScriptedServer
from coder.events import ToolEnd, ToolStart
from coder.hooks import Hooks
from coder.parts import PATCHING, TOOLS
from coder.toolset import Tool, Toolset
from coder.types import Limits
from tests.harness import FAST, all_of, ask, assert_all_valid, contents
from tests.model_workspace import make_workspace
from tests.workspace import held_by

CHILD = "You are the child."
DONE = Reply("done")
FOLDER = Path(__file__).parent / "data" / "model_cases"


# ---- the tables -----------------------------------------------------------------------------


@dataclass
class Case:
    """A mistake, and what the model sees of it.

    calls     one for each answer, or a list of them: the tool's name, a space, the arguments as the
              model wrote them
    also      other calls of which the rest is true, too
    says      answers that are text, after the calls
    outcome   taken: it did what was meant. refused: nothing was run, and the model has to call
              again. told: it was run, and the result says what is in the way. ends: the run ends
    sees      the newest result, or those of all calls; after a text, what the model is told. In it
              <any> is any text, <tools> the names of the tools, <ws> the folder
    becomes   the call as it is shown and stored
    leaves    what changed files hold then ("": they are gone); no other file changes
    changed   the text of a file that alone is changed, and the new one
    answer    the text of the run
    ends      why the run ends
    tools     "patching": what the GPT-5 family is offered
    needs     a program: without it the case is left out
    variant   it is not one of the 104 that are counted
    owed      the program does not do it yet
    """

    group: str
    name: str
    outcome: str
    calls: list[str | list[str]] = field(default_factory=list)
    also: list[str] = field(default_factory=list)
    says: list[str] = field(default_factory=list)
    sees: str | list[str] = ""
    becomes: str = ""
    leaves: dict[str, str] = field(default_factory=dict)
    changed: dict[str, list[str]] = field(default_factory=dict)
    answer: str = "done"
    ends: str = "stop"
    tools: str = "plain"
    needs: str = ""
    variant: bool = False
    owed: bool = False

    def __str__(self) -> str:
        return f"{self.group}: {self.name}"


@dataclass
class Sequence:
    """Answers that come again and again, until the run ends.

    That is after at most so many `requests`, or with another answer after so many `rounds`. <n> in
    a call is the number of the round.
    """

    name: str
    cycle: list[str | list[str]]
    requests: int = 0
    rounds: int = 0
    sees: str | list[str] = "<any>"

    def __str__(self) -> str:
        return self.name


def cases_of(group: str, row: dict[str, Any]) -> Iterator[Case]:
    case = Case(group, **row)
    yield case
    for call in case.also:
        yield replace(case, name=call, calls=[call], variant=True)


def rows_of(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = tomllib.loads((FOLDER / f"{name}.toml").read_text())["case"]
    return rows


COUNTED = {"names": 26, "parameters": 44, "json": 20, "lists": 14}  # the 104 common slips
GROUPS = (*COUNTED, "paths", "edit", "patch", "bash", "files", "search", "ends")

CASES = [case for group in GROUPS for row in rows_of(group) for case in cases_of(group, row)]
SEQUENCES = [Sequence(**row) for row in rows_of("sequences")]


def reply_of(answer: str | list[str], folder: Path, number: int = 0) -> Reply:
    calls = []
    for call in [answer] if isinstance(answer, str) else answer:
        written = call.replace("<ws>", str(folder)).replace(
            "<n>",
            str(number),
        )
        name, _, arguments = written.partition(" ")
        calls.append((name, arguments))
    return Reply(calls=calls)


# ---- playing them ---------------------------------------------------------------------------


class Play:
    """A run against a server that gives these answers, with all tools, in a folder."""

    def __init__(self, folder: Path, tools: str, replies: Iterable[Reply]) -> None:
        self.folder = folder
        before = files_of(folder)
        answers = iter(replies)

        def script(body: Body) -> Reply:
            if is_of_child(body):
                return Reply("The child has looked.")
            return next(answers, DONE)

        offered = PATCHING if tools == "patching" else TOOLS
        with ScriptedServer(script) as server:
            self.tools = Toolset([*offered, task_of(server)], cwd=folder)
            limits = Limits(max_steps=100)
            self.events, self.result = ask(server, tools=self.tools, limits=limits)
            assert_all_valid(server)
            self.requests = [body for body in server.requests if not is_of_child(body)]
        self.leaves = {
            name: text for name, text in files_of(folder).items() if text != before.pop(name, None)
        }
        self.leaves |= dict.fromkeys(before, "")

        # What was sent stays as it was, so that the providers' caches hit
        for earlier, later in pairwise(self.requests):
            assert later["tools"] == earlier["tools"]
            assert later["messages"][: len(earlier["messages"])] == earlier["messages"]

    @property
    def results(self) -> list[str]:
        return contents(self.result.messages, "tool")

    @property
    def stored(self) -> tuple[str, Any]:
        """The newest call as the model reads it."""
        calls = [call for each in self.result.messages for call in each.get("tool_calls") or ()]
        function = calls[-1]["function"]
        return function["name"], json.loads(function["arguments"])

    def check(self, seen: list[str], wanted: str | list[str]) -> None:
        """The newest of what was seen is what was wanted."""
        for pattern in reversed([wanted] if isinstance(wanted, str) else wanted):
            text = pattern.replace("<tools>", ", ".join(self.tools.tools))
            text = re.escape(text.replace("<ws>", str(self.folder)))
            newest = seen.pop() if seen else ""
            if not re.fullmatch(text.replace("<any>", "(?s:.*)"), newest):
                pytest.fail(f"seen: {newest}\nwanted: {pattern}", pytrace=False)


def param_of(case: Case) -> Any:
    marks = []
    if case.owed:
        marks.append(pytest.mark.xfail(reason="owed", strict=True))
    if case.needs and not shutil.which(case.needs):
        marks.append(pytest.mark.skip(reason=f"there is no {case.needs}"))
    return pytest.param(case, id=str(case), marks=marks)


def is_of_child(body: Body) -> bool:
    return bool(body["messages"][0]["content"] == CHILD)


def task_of(server: ScriptedServer) -> Tool:
    """The tool for sub-agents; each of them answers at once."""

    def equip(spec: AgentSpec, session_id: str) -> Equipment:
        return Equipment(
            ChatModel("m", base_url=server.url),
            Toolset(),
            CHILD,
            Hooks(),
        )

    return Subagents(choices(BUILT_IN, "subagent"), equip, retry=FAST).tool


def files_of(folder: Path) -> dict[str, str]:
    """The files and what they hold, but for git's own."""
    found = dict[str, str]()
    for parent, folders, files in os.walk(folder):
        if ".git" in folders:
            folders.remove(".git")
        for name in [*folders, *files]:
            path = Path(parent, name)
            held = held_by(path)
            if held is not None:
                text = held.decode("utf-8", "replace") if isinstance(held, bytes) else held
                found[str(path.relative_to(folder))] = text
    return found


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("model") / "original")


@pytest.fixture
def ws(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "ws"))


# ---- the tests ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [param_of(case) for case in CASES])
def test_what_the_model_sees_of_a_mistake(ws: Path, case: Case) -> None:
    leaves = dict(case.leaves)
    for name, (old, new) in case.changed.items():
        text = (ws / name).read_text()
        assert text.count(old) == 1
        leaves[name] = text.replace(old, new)
    answers = [reply_of(answer, ws) for answer in case.calls]
    texts = [Reply(text) for text in case.says]
    play = Play(ws, case.tools, [*answers, *texts])
    seen = play.results
    if case.says:
        seen = ["", *contents(play.result.messages, "user")[1:]]
    play.check(seen, case.sees)
    play.check([play.result.text], case.answer)
    assert play.leaves == leaves
    assert play.result.stop_reason == case.ends
    if case.outcome in ("taken", "refused") and case.calls:
        assert all_of(ToolEnd, play.events)[-1].is_error is (case.outcome == "refused")
    if case.becomes:
        name, _, arguments = case.becomes.partition(" ")
        assert play.stored == (name, json.loads(arguments))
        assert all_of(ToolStart, play.events)[-1].name == name


def test_at_most_40_of_the_104_common_slips_cost_a_call() -> None:
    counted = [case for case in CASES if case.group in COUNTED and not case.variant]
    assert Counter(case.group for case in counted) == COUNTED
    wasted = [str(case) for case in counted if case.outcome != "taken" or case.owed]
    assert len(wasted) <= 40, wasted


@pytest.mark.parametrize("sequence", SEQUENCES, ids=str)
def test_only_what_brings_nothing_new_is_a_loop(ws: Path, sequence: Sequence) -> None:
    most = sequence.rounds or 60 // len(sequence.cycle)
    replies = [
        reply_of(answer, ws, number + 1) for number in range(most) for answer in sequence.cycle
    ]
    play = Play(ws, "plain", replies)
    if sequence.rounds:
        assert play.result.stop_reason == "stop"
        assert play.result.text == "done"
        play.check(play.results, sequence.sees)
    else:
        assert play.result.stop_reason == "doom_loop"
        assert len(play.requests) <= sequence.requests
