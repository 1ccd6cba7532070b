"""Agents as data: the built-in ones, and those of the user's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coder.agent.profiles import (
    BUILT_IN,
    AgentError,
    AgentSpec,
    choices,
    load_agents,
    mapping,
    split,
)
from coder.cli.kit import TOOLS
from coder.permissions.permissions import Permissions
from coder.permissions.rules import Rule


def test_the_seven_of_the_seed_are_there_with_their_modes() -> None:
    assert {each.name: (each.mode, each.hidden) for each in BUILT_IN.values()} == {
        "build": ("primary", False),
        "plan": ("primary", False),
        "general": ("subagent", False),
        "explore": ("subagent", False),
        "compaction": ("primary", True),
        "title": ("primary", True),
        "summary": ("primary", True),
    }
    assert [each.name for each in choices(BUILT_IN, "primary", "all")] == ["build", "plan"]
    assert [each.name for each in choices(BUILT_IN, "subagent", "all")] == ["general", "explore"]


@pytest.mark.parametrize(
    "name, tools",
    [
        ("build", ["read", "write", "edit", "bash", "grep", "glob", "ls", "todo"]),
        ("plan", ["read", "bash", "grep", "glob", "ls", "todo"]),
        ("general", ["read", "write", "edit", "bash", "grep", "glob", "ls"]),
        ("explore", ["read", "grep", "glob", "ls"]),
        ("compaction", []),
        ("title", []),
        ("summary", []),
    ],
)
def test_what_an_agent_may_never_do_it_is_not_offered(name: str, tools: list[str]) -> None:
    assert [
        each.name for each in Permissions(agent=BUILT_IN[name].rules, yolo=True).offered(TOOLS)
    ] == tools


REVIEWER = """---
name: whatever
description: "reviews: a change"
mode: subagent
model: gpt-5-mini
temperature: 0.2
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


def test_a_file_of_the_users_makes_an_agent(tmp_path: Path) -> None:
    (tmp_path / "reviewer.md").write_text(REVIEWER)
    agents, problems = load_agents(tmp_path)
    source = "agent reviewer"
    assert problems == [] and list(agents)[:-1] == list(BUILT_IN)
    assert agents["reviewer"] == AgentSpec(
        "reviewer",
        "reviews: a change",
        "subagent",
        False,
        "You review code.\n---\nNot a border.",
        (
            Rule("edit", "*", "deny", source),
            Rule("bash", "*", "deny", source),
            Rule("bash", "git diff *", "allow", source),
        ),
        "gpt-5-mini",
        0.2,
        7,
    )


def test_a_file_with_a_built_in_name_changes_only_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "explore.md").write_text("---\nmodel: small\n---\n")
    (tmp_path / "title.md").write_text("Find a funny title.")
    (tmp_path / "plain.md").write_text("\ufeff---\r\nmode: all\r\n---\r\nWindows.\r\n")
    agents, _ = load_agents(tmp_path)
    assert (
        agents["explore"].model == "small"
        and agents["explore"].prompt == BUILT_IN["explore"].prompt
    )
    assert agents["explore"].rules == BUILT_IN["explore"].rules
    assert (agents["title"].prompt, agents["title"].hidden, agents["title"].temperature) == (
        "Find a funny title.",
        True,
        0.3,
    )
    assert agents["plain"].mode == "all" and agents["plain"].prompt == "Windows."


@pytest.mark.parametrize(
    "text, problem",
    [
        ("---\nmode: boss\n---\n", "'boss' is not one of primary, subagent, all"),
        (
            "---\ntools: read\n---\n",
            "there is no tools in front of an agent; there are description,",
        ),
        ("---\npermissions:\n  bash: maybe\n---\n", '"maybe" is not one of allow, ask, deny'),
        ("---\npermissions: allow\n---\n", "rules have to be an object"),
        ("---\ntemperature: hot\n---\n", "'hot' has to be a number"),
        ("---\ntemperature: nan\n---\n", "'nan' has to be a number"),
        ("---\nmax_steps: inf\n---\n", "'inf' has to be a number"),
        ("---\nmax_steps: 1e400\n---\n", "'1e400' has to be a number"),
        ("---\nmode: all\nmode: primary\n---\n", "mode is there twice"),
        ("\n---\npermissions:\n  edit: deny\n---\n", "bounds no front matter"),
        ("---\nmodel:\n  a: b\n---\n", "has to be text"),
        ("---\n- a\n---\n", "the line '- a' is not `key: value`"),
    ],
)
def test_a_file_that_makes_none_is_left_out_with_a_word(
    tmp_path: Path, text: str, problem: str
) -> None:
    (tmp_path / "x.md").write_text(text)
    agents, [said] = load_agents(tmp_path)
    assert dict(agents) == BUILT_IN
    assert said.startswith("The agent x.md is left out: ") and problem in said and "\n" not in said


def test_a_file_that_others_may_write_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "x.md").write_text("Hello.")
    os.chmod(tmp_path / "x.md", 0o666)
    (tmp_path / "Bad Name.md").write_text("Hello.")
    agents, problems = load_agents(tmp_path)
    assert dict(agents) == BUILT_IN and len(problems) == 2
    assert "small letters" in problems[0] and "others may write" in problems[1]


def test_front_matter_is_between_two_lines_of_dashes_at_the_beginning() -> None:
    assert split("---\na: b\n---") == ({"a": "b"}, "")
    assert split("a: b\n") == ({}, "a: b")
    for text in ("a\n---\nb: c\n---\n", "---\nnever closed: x\n"):
        with pytest.raises(AgentError):
            split(text)
    assert split("") == ({}, "")


def test_the_part_of_yaml_that_is_read() -> None:
    lines = [
        "a: 1",
        "b:",
        "    'x: y': \"z\"",
        "    c:",
        "      d: e",
        "    f: g",
        "",
        "# no",
        "h: 'i'",
        "url: http://x",
        "j:",
    ]
    assert mapping(lines) == {
        "a": "1",
        "b": {"x: y": "z", "c": {"d": "e"}, "f": "g"},
        "h": "i",
        "url": "http://x",
        "j": {},
    }
    for line in ("no colon", "\ta: b", "[1]", "a:b"):
        with pytest.raises(AgentError):
            mapping([line])


@pytest.mark.parametrize(
    "text",
    [
        "\n---\nmode: all\n---\n",
        " ---\nmode: all\n---\n",
        "---\nmode: all\n----\n",
        "----\nmode: all\n----\n",
        "\u200b---\nmode: all\n---\n",
        "---\rmode: all\r---\r",
        "\n" * 9 + "---\n",
        "<!-- an agent -->\n---\na: b\n---\n",
        "1\n2\n3\n4\n -----  \n",
    ],
)
def test_front_matter_that_is_not_recognised_makes_no_agent(text: str) -> None:
    with pytest.raises(AgentError, match="bounds no front matter"):
        split(text)


def test_dashes_further_down_are_text() -> None:
    assert split("1\n2\n3\n4\n5\n---\n") == ({}, "1\n2\n3\n4\n5\n---")
    assert split("---\na: b\n---\n---\n") == ({"a": "b"}, "---")


def test_a_key_that_is_there_twice_is_an_error_at_any_depth() -> None:
    assert mapping(["a: 1", "b:", "  a: 2"]) == {"a": "1", "b": {"a": "2"}}
    for lines in (["a: 1", "a: 2"], ["b:", "  a: 1", "  'a': 2"], ["b:", "  a: 1", "b:", "  a: 2"]):
        with pytest.raises(AgentError, match="is there twice"):
            mapping(lines)


def test_the_rules_of_a_file_come_behind_the_built_in_ones(tmp_path: Path) -> None:
    (tmp_path / "plan.md").write_text("---\npermissions:\n  bash:\n    git log: allow\n---\n")
    agents, problems = load_agents(tmp_path)
    assert problems == []
    assert agents["plan"].rules == (
        *BUILT_IN["plan"].rules,
        Rule("bash", "git log", "allow", "agent plan"),
    )
