"""Agents as data: the built-in ones, and those of the user's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coder.agent.profiles import BUILT_IN, AgentSpec, choices, load_agents
from coder.cli.app import TOOLS
from coder.permissions.permissions import Permissions
from coder.permissions.rules import Rule

READING = ["read", "grep", "glob", "ls"]
WRITING = ["read", "write", "edit", "bash", "grep", "glob", "ls"]


@pytest.mark.parametrize(
    "name, mode, hidden, tools",
    [
        ("build", "primary", False, [*WRITING, "todo"]),
        ("plan", "primary", False, ["read", "bash", "grep", "glob", "ls", "todo"]),
        ("general", "subagent", False, WRITING),
        ("explore", "subagent", False, READING),
        ("compaction", "primary", True, []),
        ("title", "primary", True, []),
        ("summary", "primary", True, []),
    ],
)
def test_rules_say_what_is_offered(name: str, mode: str, hidden: bool, tools: list[str]) -> None:
    spec = BUILT_IN[name]
    assert (spec.mode, spec.hidden, len(BUILT_IN)) == (mode, hidden, 7)
    offered = Permissions(agent=spec.rules, yolo=True).offered(TOOLS)
    assert [each.name for each in offered] == tools
    assert (spec in choices(BUILT_IN, "primary", "subagent")) is not hidden


REVIEWER = """---
name: whatever
description: "reviews: a change"
mode: subagent
model: gpt-5-mini
max_steps: 7
permissions:
  edit: deny
  # only looking
  bash:
    "*": deny
    "git diff *": allow
---

You review code.
---
Not a border.
"""


def agents_of(folder: Path, **files: str) -> tuple[dict[str, AgentSpec], list[str]]:
    for name, text in files.items():
        (folder / f"{name}.md").write_text(text)
    problems = list[str]()
    return load_agents(folder, problems.append), problems


def test_a_file_of_the_users_makes_an_agent(tmp_path: Path) -> None:
    agents, problems = agents_of(tmp_path, reviewer=REVIEWER)
    rules = [("edit", "*", "deny"), ("bash", "*", "deny"), ("bash", "git diff *", "allow")]
    made = tuple(Rule(*rule, "agent reviewer") for rule in rules)
    prompt = "You review code.\n---\nNot a border."
    assert problems == [] and list(agents)[:-1] == list(BUILT_IN)
    assert agents["reviewer"] == AgentSpec(
        "reviewer", "reviews: a change", "subagent", False, prompt, made, "gpt-5-mini", 7
    )


def test_a_file_with_a_built_in_name_changes_only_what_it_names(tmp_path: Path) -> None:
    agents, problems = agents_of(
        tmp_path,
        explore="---\nmodel: 'small'\n---\n",
        title="Find a funny title.",
        plain="\ufeff---\r\nmode: all\r\n---\r\nWindows.\r\n",
        plan="---\npermissions:\n  bash:\n    git log: allow\n---\n",
    )
    explore, title, found = agents["explore"], agents["title"], BUILT_IN["explore"]
    assert problems == [] and explore.model == "small"
    assert (explore.prompt, explore.rules) == (found.prompt, found.rules)
    assert (title.prompt, title.hidden) == ("Find a funny title.", True)
    assert agents["plain"].mode == "all" and agents["plain"].prompt == "Windows."
    added = Rule("bash", "git log", "allow", "agent plan")
    assert agents["plan"].rules == (*BUILT_IN["plan"].rules, added), "behind the built-in ones"


UNBOUNDED = "front matter has to be between two lines ---"


@pytest.mark.parametrize(
    "text, problem",
    [
        ("---\nmode: boss\n---\n", "mode: 'boss': it is not one of primary, subagent, all"),
        ("---\ntools: read\n---\n", "'tools' is no line of an agent's front matter; known: desc"),
        ("---\npermissions:\n  bash: maybe\n---\n", '"maybe" is not one of allow, ask, deny'),
        ("---\npermissions: allow\n---\n", "rules have to be an object"),
        ("---\nmax_steps: many\n---\n", "max_steps: 'many': "),
        ("---\nmax_steps: 0\n---\n", "max_steps: '0': it is no number from 1 on"),
        ("---\nmode: all\nmode: primary\n---\n", "mode is there twice"),
        ("---\nmodel:\n  a: b\n---\n", "'model' is no line"),
        *((f"---\n{line}\n---\n", "is not `key: value`") for line in ("- a", "\ta: b", "a:b")),
        ("\n---\npermissions:\n  edit: deny\n---\n", UNBOUNDED),
        ("---\nmode: all\n----\n", UNBOUNDED),
        ("\u200b---\nmode: all\n---\n", UNBOUNDED),
        ("<!-- an agent -->\n---\na: b\n---\n", UNBOUNDED),
        ("---\nnever closed: x\n", UNBOUNDED),
    ],
)
def test_a_file_that_makes_no_agent_is_reported(tmp_path: Path, text: str, problem: str) -> None:
    """Rules that are not read would make an agent that may do everything."""
    agents, [line] = agents_of(tmp_path, x=text)
    assert dict(agents) == BUILT_IN
    assert line.startswith("The agent x.md is ignored: ") and problem in line and "\n" not in line


def test_a_file_that_others_may_write_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "x.md").touch(0o600)
    os.chmod(tmp_path / "x.md", 0o666)
    agents, [problem] = agents_of(tmp_path, x="Hello.")
    assert dict(agents) == BUILT_IN and "other users can write" in problem
