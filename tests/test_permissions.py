"""Permissions: the rules' language, what is decided, the built-in protections, and how a run asks."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coder.agent.profiles import BUILT_IN
from coder.devtools.scripted import Reply
from coder.events import DoomLoop, Event, PermissionAsked, PermissionReplied, ToolEnd
from coder.hooks import HookChain
from coder.permissions.permissions import Permissions
from coder.permissions.rules import (
    Decision,
    Rule,
    RulesError,
    dead,
    denies_all,
    evaluate,
    fits,
    load_rules,
    rule_of,
    rules_of,
    tightening,
    unknown,
)
from coder.tools.bash import bash
from coder.tools.edit import edit
from coder.tools.files import ls, read, write
from coder.tools.patch import apply_patch
from coder.tools.search import glob, grep
from coder.toolset import Toolset, tool
from tests.harness import ask, serve


def decide(command: str, ws: Path, rules: Any = (), **options: Any) -> str:
    """What becomes of a command."""
    return (
        Permissions(rules_of(rules) if rules else (), **options).decide("bash", command, ws).action
    )


# ---- the rules' language ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern, fitting, others",
    [
        ("ls", ["ls"], ["lsof", "ls -la", ""]),
        ("ls *", ["ls", "ls -la", "ls "], ["lsof"]),
        ("git status*", ["git status", "git status -s", "git statusx"], ["git stash"]),
        ("*", ["", "x", "a\nb/c"], []),
        ("a?c", ["abc", "a/c"], ["ac", "abbc"]),
        ("*.py", ["a.py", "x/y.py"], ["a.pyc"]),
        ("a*b*c", ["abc", "a-b-c", "abbcc"], ["acb", "ab"]),
        ("a.c[x]", ["a.c[x]"], ["abcx", "a.cx"]),
        ("", [""], ["x"]),
    ],
)
def test_a_pattern_fits_all_of_a_text(pattern: str, fitting: list[str], others: list[str]) -> None:
    assert [text for text in fitting if not fits(pattern, text)] == []
    assert [text for text in others if fits(pattern, text)] == []


@given(st.text("ab*?", max_size=8), st.text("ab", max_size=8))
def test_fitting_is_what_fnmatch_says(pattern: str, text: str) -> None:
    from fnmatch import fnmatchcase

    assert fits(pattern, text) == fnmatchcase(text, pattern)


def test_no_pattern_takes_long() -> None:
    started = time.monotonic()
    fits("*a" * 30 + "b", "a" * 200_000)
    assert time.monotonic() - started < 5


def test_the_last_rule_that_fits_counts() -> None:
    rules = rules_of(
        {"*": "ask", "bash": {"git *": "allow", "git push *": "deny"}, "edit": "allow"}
    )
    found = {text: evaluate(("bash",), (text,), rules) for text in ("git log", "git push", "ls")}
    assert {text: rule and rule.action for text, rule in found.items()} == {
        "git log": "allow",
        "git push": "deny",
        "ls": "ask",
    }
    assert evaluate(("edit",), ("x",), rules) == Rule("edit", "*", "allow")
    assert evaluate(("edit",), ("x",), rules_of({"bash": "deny"})) is None


def test_a_rule_that_can_never_count_is_found() -> None:
    [sentence] = dead(rules_of({"bash": {"rm *": "deny"}, "*": "allow"}, "permissions.json"))
    assert (
        "`deny bash: rm *` (permissions.json) never counts" in sentence
        and "`allow *: *`" in sentence
    )
    assert (
        dead(rules_of({"*": "ask", "bash": {"*": "ask", "rm *": "deny", "rm -i *": "allow"}})) == []
    )
    assert dead(rules_of({"bash": {"git ?": "deny", "git *": "ask"}})) and not dead(
        rules_of({"bash": {"git *": "deny", "git ?": "ask"}})
    )
    assert dead(rules_of({"bash": {"a": "allow"}, "*": "allow"})) == [], "the answer is the same"


@pytest.mark.parametrize(
    "rules, all_denied",
    [
        ({"bash": "deny"}, True),
        ({"*": "deny"}, True),
        ({"bash": {"*": "deny", "ls": "ask"}}, False),
        ({"bash": {"ls": "allow", "*": "deny"}}, True),
        ({"bash": {"*": "allow", "ls": "deny"}}, False),
        ({}, False),
    ],
)
def test_what_is_denied_outright(rules: Any, all_denied: bool) -> None:
    assert denies_all(("bash",), rules_of(rules)) is all_denied


def test_rules_of_flags_are_a_kind_or_a_kind_and_a_pattern() -> None:
    assert rule_of("edit", "allow") == Rule("edit", "*", "allow", "a flag")
    assert rule_of("bash:git log: *", "deny").pattern == "git log: *"
    for wrong in ("git status *", "bash:", "", ":x", "bash: "):
        with pytest.raises(RulesError, match="KIND:PATTERN"):
            rule_of(wrong, "allow")


@pytest.mark.parametrize(
    "text, problem",
    [
        ("[]", "an object"),
        ('{"bash": "yes"}', '"yes" is not one of allow, ask, deny'),
        ("{", "Expecting"),
        ('{"bash": {"ls": ["allow"]}}', "is not one of"),
    ],
)
def test_a_file_of_rules_that_cannot_be_understood_is_an_error(
    tmp_path: Path, text: str, problem: str
) -> None:
    path = tmp_path / "permissions.json"
    path.write_text(text)
    with pytest.raises(RulesError, match=problem) as raised:
        load_rules(path)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


def test_the_users_rules_are_not_read_where_others_may_have_written_them(tmp_path: Path) -> None:
    path = tmp_path / "permissions.json"
    assert load_rules(path) == []
    path.write_text('{"read": {"~/x": "deny"}}')
    assert load_rules(path) == [Rule("read", os.path.expanduser("~/x"), "deny", "permissions.json")]
    path.chmod(0o666)
    with pytest.raises(RulesError, match="others may write"):
        load_rules(path)


def test_a_workspace_only_tightens(tmp_path: Path) -> None:
    assert tightening(tmp_path) == ([], [])
    path = tmp_path / ".coder" / "permissions.json"
    path.parent.mkdir()
    path.write_text('{"bash": {"*": "allow", "make *": "deny"}, "*": "allow"}')
    rules, notes = tightening(tmp_path)
    assert rules == [Rule("bash", "make *", "deny", ".coder/permissions.json")]
    assert (
        len(notes) == 2
        and "tightens" in notes[0]
        and "2 rules" in notes[1]
        and "allows nothing" in notes[1]
    )
    permissions = Permissions(rules_of({"bash": "allow"}), workspace=rules)
    assert [
        permissions.decide("bash", command, tmp_path).action
        for command in ("make", "make x", "pytest")
    ] == ["deny", "deny", "allow"]
    for text in ("{", "[]", "[" * 100_000):
        path.write_text(text)
        assert tightening(tmp_path)[0] == [] and "left out" in tightening(tmp_path)[1][0]
    path.unlink()
    os.mkfifo(path)
    assert tightening(tmp_path) == ([], [])
    path.unlink()
    path.symlink_to("/dev/zero")
    assert tightening(tmp_path) == ([], [])


# ---- commands --------------------------------------------------------------------------------------------


@pytest.fixture
def ws(tmp_path: Path) -> Path:
    folder = tmp_path / "ws"
    (folder / "sub").mkdir(parents=True)
    for name in ("f", ".env", ".env.example", "sub/g"):
        (folder / name).write_text("x")
    (folder / "out").symlink_to(tmp_path)
    return folder


@pytest.mark.parametrize(
    "command",
    [
        "pwd",
        "ls",
        "ls -la sub",
        "cat f sub/g",
        "head -n 5 f",
        "tail -c +3 f",
        "wc -l f | cat",
        "echo a 'b c'",
        "true",
        "cd sub && cat g",
        "cd sub; cat g || ls",
        "ls f 2>/dev/null",
        "cat .env.example",
        "cat f 2>&1 | head -3",
    ],
)
def test_plain_looking_inside_the_workspace_needs_no_rule(ws: Path, command: str) -> None:
    assert decide(command, ws) == "allow"


@pytest.mark.parametrize(
    "command",
    [
        "cat .env",
        "cat out/x",
        "cat ../f",
        "cat /etc/passwd",
        "cat ~/x",
        "ls ..",
        "cat -",
        "wc --files0-from=/etc/passwd",
        "wc --files0-from=f",
        "ls out",
        "cd .. && cat f",
        "cd sub && cat ../../f",
        "cd nowhere && cat ../f",
        "cd && ls",
        "cd - && ls",
        "cd /etc; cat passwd",
        "cd out; ls",
        "pushd sub && ls",
        "command cd / && ls",
        "cat f > g",
        "cat $HOME",
        "ls *",
        "echo $(id)",
        "find .",
        "git status",
        "sed -n 1p f",
        "sort f",
        "./ls",
        "/bin/ls",
        "LS",
        "env",
        "printf x",
    ],
)
def test_everything_else_asks(ws: Path, command: str) -> None:
    assert decide(command, ws) == "ask"


def test_a_rule_of_the_users_goes_before_what_is_harmless(ws: Path) -> None:
    assert (
        decide("ls", ws, {"bash": "ask"}) == "ask"
        and decide("cat f", ws, {"bash": {"cat *": "deny"}}) == "deny"
    )
    assert decide("cd sub && pytest -q", ws, {"bash": {"pytest *": "allow"}}) == "allow"
    assert decide("cd / && cat etc/passwd", ws, {"bash": {"cd *": "allow"}}) == "ask", (
        "allowed to go there, and yet not to read there"
    )


def test_a_line_takes_the_strictest_answer_of_its_parts(ws: Path) -> None:
    rules = {"bash": {"a *": "allow", "b *": "deny"}}
    assert [
        decide(each, ws, rules)
        for each in ("a 1; a 2", "a 1 && c", "a 1 | b", "c; b x", "a 1 &&", "a 1; ")
    ] == [
        "allow",
        "ask",
        "deny",
        "deny",
        "ask",
        "allow",
    ]


def test_what_is_not_plain_is_never_allowed_by_a_pattern(ws: Path) -> None:
    for command in (
        "touch $(id)",
        "a > b",
        "x=1 a",
        "a &",
        "(a)",
        "a *",
        "if a; then b; fi",
        "a `b`",
        "\\a",
        "a\rb",
        "a\0b",
    ):
        assert decide(command, ws, {"*": "allow"}) == "ask", command


def test_a_program_whose_name_holds_a_blank_fits_no_pattern_of_another(ws: Path) -> None:
    assert decide("'ls -la' x", ws, {"bash": {"ls *": "allow"}}) == "ask"


def test_a_deny_looks_through_wrappers_and_counts_for_yolo_too(ws: Path) -> None:
    for command in (
        "rm f",
        "/bin/rm f",
        "sudo rm f",
        "env X=1 rm f",
        "sh -c 'rm f'",
        "r\\m f",
        "'rm' f",
        "true; rm f",
        "$(rm f)",
        "x | xargs rm",
        "if a; then rm f; fi",
    ):
        assert decide(command, ws, {"bash": {"*": "allow", "rm *": "deny"}}, yolo=True) == "deny", (
            command
        )
    assert decide("rmdir f", ws, {"bash": {"rm *": "deny"}}, yolo=True) == "allow"
    assert decide("rm f", ws, {"bash": {"rm *": "deny", "rm f": "allow"}}) == "allow", (
        "the last that fits"
    )


def test_a_command_of_any_length_is_denied_and_one_that_nobody_reads_is_not_allowed(
    ws: Path,
) -> None:
    rules = {"bash": {"*": "allow", "touch *": "deny"}}
    assert decide("true && " * 60 + "touch PWN", ws, rules) == "deny"
    assert decide("true && " * 20_000 + "touch PWN", ws, rules) == "deny"
    assert decide("true && " * 20_000 + "true", ws, rules) == "ask"


# ---- paths -----------------------------------------------------------------------------------------------

GUARDED = [
    ".git/config",
    ".git/hooks/pre-commit",
    "sub/.GIT/config",
    "AGENTS.md",
    "sub/claude.md",
    ".bashrc",
    "sub/.zshenv",
    ".coder/permissions.json",
    ".vscode/tasks.json",
    ".envrc",
]


@pytest.mark.parametrize("path", GUARDED)
def test_what_gives_orders_is_asked_about_even_where_edits_are_allowed(path: str) -> None:
    permissions = Permissions(rules_of({"edit": "allow"}), flags=[rule_of("edit", "allow")])
    permissions.memory.add("edit", "*", own=False)
    assert permissions.decide("edit", "src/a.py", Path("/")).action == "allow"
    decision = permissions.decide("edit", path, Path("/"))
    assert (decision.action, decision.remember) == ("ask", "") and decision.why
    assert (
        Permissions(flags=[rule_of(f"edit:{path}", "allow")]).decide("edit", path, Path("/")).action
        == "allow"
    )
    firm = ".git/" in path.lower() or ".coder" in path
    assert Permissions(yolo=True).decide("edit", path, Path("/")).action == (
        "ask" if firm else "allow"
    )


def test_names_that_only_look_like_them_are_free() -> None:
    permissions = Permissions(rules_of({"edit": "allow"}))
    for path in (
        ".gitignore",
        "git/config",
        "docs/AGENTS.md.txt",
        "profile",
        "src/.github/x",
        "x.git/y",
    ):
        assert permissions.decide("edit", path, Path("/")).action == "allow", path


def test_our_own_folders_are_asked_about() -> None:
    permissions = Permissions(rules_of({"edit": "allow"}), private=[Path("/home/u/.config/coder")])
    assert permissions.decide("edit", "/home/u/.config/coder/hooks.json", Path("/")).action == "ask"
    assert permissions.decide("edit", "/home/u/.config/coder-x", Path("/")).action == "allow"


def test_reading_is_free_but_for_what_holds_secrets() -> None:
    permissions = Permissions()
    assert [
        permissions.decide("read", path, Path("/")).action
        for path in ("a", ".env", "x/id_rsa", ".env.example")
    ] == [
        "allow",
        "ask",
        "ask",
        "allow",
    ]
    permissions.memory.add("read", ".env", own=False)
    assert [
        permissions.decide("read", path, Path("/")).action for path in (".env", "sub/.env")
    ] == ["allow", "ask"]
    assert (
        Permissions(rules_of({"read": "deny"})).decide("read", ".env", Path("/")).action == "deny"
    )


# ---- layers ----------------------------------------------------------------------------------------------


def test_an_agent_loosens_what_the_user_is_asked_about_and_its_denials_hold_against_all(
    ws: Path,
) -> None:
    user, agent = (
        rules_of({"bash": {"make *": "deny"}}),
        rules_of({"bash": {"npm test": "allow"}, "edit": "deny"}),
    )
    permissions = Permissions(user, agent=agent, flags=[rule_of("edit", "allow")], yolo=True)
    assert permissions.decide("bash", "npm test", ws).action == "allow"
    assert permissions.decide("edit", "a", ws).action == "deny", "against a flag and yolo"
    permissions.memory.add("edit", "*", own=False)
    assert permissions.decide("edit", "a", ws).action == "deny", "against a yes of before"


def test_a_question_of_an_agents_stays_one_under_yolo_but_not_for_what_is_harmless(
    ws: Path,
) -> None:
    permissions = Permissions(agent=rules_of({"bash": "ask"}), yolo=True)
    assert [permissions.decide("bash", each, ws).action for each in ("ls", "pytest", "a > b")] == [
        "allow",
        "ask",
        "ask",
    ]
    assert (
        Permissions(rules_of({"bash": "ask"}), yolo=True).decide("bash", "pytest", ws).action
        == "allow"
    )


def test_for_a_sub_agent_the_stricter_of_both_holds(ws: Path) -> None:
    parent = Permissions(
        rules_of({"bash": {"touch *": "deny", "make *": "ask"}}), agent=rules_of({"edit": "deny"})
    )
    child = parent.child(rules_of({"bash": "allow", "edit": "allow", "read": {"secret": "deny"}}))
    assert [child.decide("bash", each, ws).action for each in ("touch x", "make", "pytest")] == [
        "deny",
        "ask",
        "ask",
    ]
    assert (
        child.decide("edit", "a", ws).action == "deny"
        and child.decide("read", "secret", ws).action == "deny"
    )
    assert parent.decide("read", "secret", ws).action == "allow"
    parent.agent = []
    assert child.decide("edit", "a", ws).action == "ask", "the parent's agent of now"
    child.memory.add("bash", "make", own=False)
    assert parent.decide("bash", "make", ws).action == "allow", "one memory for the session"


def test_unconfined_needs_a_rule_of_its_own_or_a_yes(ws: Path) -> None:
    def outside(command: str, **options: Any) -> str:
        return Permissions(**options).decide("unconfined", command, ws).action

    assert outside("ls", rules=rules_of({"*": "allow"}), yolo=True) == "ask"
    assert outside("ls", rules=rules_of({"unconfined": {"ls": "allow"}})) == "allow"
    assert (
        outside("rm x", rules=rules_of({"unconfined": "allow", "bash": {"rm *": "deny"}})) == "deny"
    )


def test_a_yes_for_the_session_is_for_exactly_this(ws: Path) -> None:
    permissions = Permissions()
    permissions.memory.add("bash", "npm test", own=False)
    permissions.memory.add("bash", "rm build/*", own=False)
    permissions.memory.add("bash", "git diff *", own=True)
    answers = {
        each: permissions.decide("bash", each, ws).action
        for each in (
            "npm test",
            "npm test x",
            "npm test; touch x",
            "rm build/*",
            "rm build/a/../..",
            "git diff",
            "git diff a",
            "git diff a; touch x",
            "git diff $(x)",
        )
    }
    assert answers == {
        "npm test": "allow",
        "npm test x": "ask",
        "npm test; touch x": "ask",
        "rm build/*": "allow",
        "rm build/a/../..": "ask",
        "git diff": "allow",
        "git diff a": "allow",
        "git diff a; touch x": "ask",
        "git diff $(x)": "ask",
    }


def test_of_a_folder_outside_all_is_remembered_which_is_shown(tmp_path: Path) -> None:
    decision = Permissions().decide("external_directory", str(tmp_path / "x"), tmp_path)
    assert decision == Decision("ask", f"{tmp_path}/*")


# ---- in a run --------------------------------------------------------------------------------------------


def results(events: list[Event]) -> list[str]:
    return [str(event.result.content) for event in events if isinstance(event, ToolEnd)]


def played(
    ws: Path,
    permissions: Permissions,
    *calls: tuple[str, Any],
    answer: Any = None,
    tools: Any = None,
) -> tuple[list[Event], list[PermissionAsked]]:
    """One answer with these calls; `answer` replies to what is asked."""
    asked: list[PermissionAsked] = []

    def each(event: Event) -> None:
        if isinstance(event, PermissionAsked):
            asked.append(event)
            if answer:
                answer(event)

    toolset = Toolset(tools or [read, write, edit, bash, ls, grep, apply_patch], cwd=ws)
    with serve(Reply("", calls=calls), Reply("Done.")) as server:
        events, result = ask(server, tools=toolset, hooks=HookChain(permissions), each=each)
        assert result.stop_reason == "stop"
    return events, asked


def test_a_person_is_shown_what_will_run_and_answers(ws: Path) -> None:
    calls = [
        ("bash", {"command": "touch one"}),
        ("bash", {"command": "touch one"}),
        ("bash", {"command": "touch two"}),
    ]
    events, asked = played(
        ws,
        Permissions(can_ask=True),
        *calls,
        answer=lambda event: event.reply("always" if "one" in event.pattern else "no", "not that"),
    )
    assert [(each.permission, each.pattern, each.remember) for each in asked] == [
        ("bash", "touch one", "touch one"),
        ("bash", "touch two", "touch two"),
    ]
    assert (ws / "one").exists() and not (ws / "two").exists()
    assert results(events)[2] == "Denied: the user said no: not that. Do not try it another way."
    assert [event.answer for event in events if isinstance(event, PermissionReplied)] == [
        "always",
        "no",
    ]


def test_a_pattern_of_the_persons_own_is_remembered(ws: Path) -> None:
    calls = [
        ("bash", {"command": "touch one"}),
        ("bash", {"command": "touch two"}),
        ("bash", {"command": "touch three; touch four"}),
        ("bash", {"command": "rm one"}),
    ]
    _, asked = played(
        ws,
        Permissions(can_ask=True),
        *calls,
        answer=lambda event: (
            event.reply("always", remember="touch *") if "touch" in event.pattern else None
        ),
    )
    assert [each.pattern for each in asked] == ["touch one", "rm one"]
    assert {"one", "two", "three", "four"} <= set(os.listdir(ws))


def test_nothing_can_be_remembered_where_nothing_may_be(ws: Path) -> None:
    permissions = Permissions(can_ask=True)
    calls = [
        ("write", {"path": "AGENTS.md", "content": "a"}),
        ("write", {"path": "sub/AGENTS.md", "content": "b"}),
    ]
    _, asked = played(
        ws, permissions, *calls, answer=lambda event: event.reply("always", remember="*")
    )
    assert (
        [each.remember for each in asked] == ["*", "*"]
        and len(asked) == 2
        and permissions.memory.rules == []
    )


def test_a_patch_is_asked_about_with_all_its_paths_and_takes_the_strictest_answer(ws: Path) -> None:
    patch = "*** Begin Patch\n*** Add File: a.py\n+1\n*** Add File: AGENTS.md\n+2\n*** End Patch"
    _, asked = played(
        ws,
        Permissions(rules_of({"edit": "allow"}), can_ask=True),
        ("apply_patch", {"patch": patch}),
    )
    assert [(each.pattern, each.remember, each.why) for each in asked] == [
        ("a.py, AGENTS.md", "", "later sessions follow what it says")
    ]
    assert not (ws / "a.py").exists()
    events, asked = played(
        ws,
        Permissions(rules_of({"edit": {"*": "allow", "a.py": "deny"}})),
        ("apply_patch", {"patch": patch.replace("AGENTS", "B")}),
    )
    assert (
        asked == []
        and results(events)[0].startswith("Denied: a rule denies edit")
        and not (ws / "B.md").exists()
    )


def test_where_nobody_can_be_asked_the_answer_is_no_and_says_how(ws: Path) -> None:
    events, asked = played(
        ws,
        Permissions(),
        ("bash", {"command": "touch x"}),
        ("bash", {"command": "touch x > y"}),
        ("write", {"path": ".git/config", "content": "n"}),
        ("read", {"path": ".env"}),
        ("read", {"path": "../f"}),
        ("read", {"path": "f"}),
        ("write", {"path": "new", "content": "n"}),
    )
    said = results(events)
    assert asked == [] and not (ws / "x").exists() and not (ws / "new").exists()
    assert (
        "-y allows it, or --allow 'bash:touch x'" in said[0]
        and "--allow" not in said[1]
        and "-y" in said[1]
        and "-y" not in said[2]
    )
    assert (
        "may hold secrets" in said[3]
        and "--allow read:.env" in said[3]
        and "external_directory" in said[4]
        and said[5].startswith("1\tx")
    )
    assert "--allow 'edit:*'" in said[6]


def test_a_denied_tool_is_not_offered_and_not_run(ws: Path) -> None:
    permissions = Permissions(
        rules_of({"bash": "deny", "ls": "deny"}), workspace=[Rule("edit", "*", "deny")]
    )
    assert [
        each.name for each in permissions.offered([read, write, edit, bash, ls, apply_patch])
    ] == ["read"]
    assert [
        each.name
        for each in permissions.child([Rule("read", "*", "deny")]).offered([read, bash, grep])
    ] == []
    events, _ = played(ws, permissions, ("bash", {"command": "ls"}), ("ls", {}))
    assert all(text.startswith("Denied: a rule denies the tool") for text in results(events))


def test_a_tool_of_ones_own_runs_unasked_until_a_rule_says_otherwise(ws: Path) -> None:
    @tool
    def deploy(to: str) -> str:
        """Deploy.

        to: where
        """
        return f"deployed to {to}"

    def said(rules: Any) -> str:
        events, asked = played(
            ws,
            Permissions(rules_of(rules), can_ask=True),
            ("deploy", {"to": "prod"}),
            tools=[deploy],
            answer=lambda event: event.reply("no"),
        )
        assert all(json.loads(each.pattern) == {"to": "prod"} for each in asked)
        return results(events)[0]

    assert said({}) == "deployed to prod"
    assert (
        "the user said no" in said({"deploy": "ask"})
        and "a rule denies" in said({"deploy": {"*prod*": "deny"}})
        and "the user said no" in said({"*": "ask"})
    )


def test_a_repetition_is_decided_by_a_rule_or_by_a_person(ws: Path) -> None:
    calls = [("ls", {})] * 3

    def unrun(permissions: Permissions, allow: bool = False) -> bool:
        with serve(Reply("", calls=calls), Reply("Done.")) as server:
            events, _ = ask(
                server,
                tools=Toolset([ls], cwd=ws),
                hooks=permissions,
                each=lambda event: event.reply(allow) if isinstance(event, DoomLoop) else None,
            )
        return results(events)[2].startswith("Not run")

    assert (
        unrun(Permissions())
        and unrun(Permissions(can_ask=True))
        and not unrun(Permissions(can_ask=True), allow=True)
    )
    assert not unrun(Permissions(rules_of({"doom_loop": "allow"}))) and unrun(
        Permissions(rules_of({"doom_loop": "deny"}), can_ask=True), allow=True
    )


def test_a_search_passes_over_what_may_not_be_read_unasked(ws: Path) -> None:
    for name in ("secret", "open", ".env"):
        (ws / name).write_text("needle")
    calls = [
        ("grep", {"pattern": "needle"}),
        ("grep", {"pattern": "needle", "path": "secret"}),
        ("grep", {"pattern": "needle", "path": ".env"}),
    ]
    for rules in ({"read": {"secret": "deny"}}, {"read": {"secret": "ask"}}):
        events, _ = played(ws, Permissions(rules_of(rules)), *calls)
        said = results(events)
        assert (
            said[0].splitlines()[0] == "open:1:needle"
            and "needle" not in said[0].partition("\n")[2]
            and "secret" in said[0]
        )
        assert said[1].startswith("Denied") and said[2].startswith("Denied")
    events, _ = played(ws, Permissions(rules_of({"read": "allow"}), yolo=True), *calls)
    assert [text.count("needle") for text in results(events)] == [2, 1, 1], (
        "-y answers for a file that is named, not for a search"
    )


# ---- what a stranger found -------------------------------------------------------------------------------


def test_going_up_after_a_link_is_not_followed(ws: Path) -> None:
    """Bash goes up by the letters of its folder, the kernel by the links (cd l/../.. read any file)."""
    (ws / "a" / "b" / "c").mkdir(parents=True)
    (ws / "l").symlink_to("a/b/c")
    for command in (
        "cd l/../.. && cat other/notes",
        "cd l && cd .. && cat ../x",
        "cd sub/.. && cat f",
        "cd .. && ls",
    ):
        assert decide(command, ws) == "ask", command


def test_many_cds_are_decided_at_once(ws: Path) -> None:
    started = time.monotonic()
    assert decide("cd sub && " * 200 + "ls", ws) == "ask"
    assert time.monotonic() - started < 5


def test_a_path_behind_a_command_that_may_have_changed_it_is_not_trusted(ws: Path) -> None:
    rules = {"bash": {"ln *": "allow", "make": "allow"}}
    assert decide("ln -s / r && cat r/etc/passwd", ws, rules) == "ask"
    assert decide("make | tail -n 5", ws, rules) == "allow", "a pipe has no path"
    assert decide("make && cat f", ws, rules) == "ask"


def test_looking_through_a_command_needs_what_reading_needs(ws: Path) -> None:
    (ws / "secrets").mkdir()
    for rules in ({"read": {"secrets/*": "deny"}}, {"read": "ask"}):
        assert decide("cat secrets/x", ws, rules) == "ask"
    assert (
        Permissions(workspace=[Rule("read", "secrets/*", "deny")])
        .decide("bash", "cat secrets/x", ws)
        .action
        == "ask"
    )
    assert (
        Permissions(agent=[Rule("read", "secrets/*", "deny")])
        .decide("bash", "head secrets/x", ws)
        .action
        == "ask"
    )


def test_a_program_of_the_workspace_is_not_the_systems(
    ws: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bin_folder = ws / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "cat").write_text("#!/bin/sh\ntouch PWN\n")
    (bin_folder / "cat").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}{os.pathsep}{os.environ['PATH']}")
    assert (
        decide("cat f", ws) == "ask"
        and decide("head f", ws) == "allow"
        and decide("echo f", ws) == "allow"
    )


def test_a_rule_for_unconfined_is_as_strict_as_one_for_bash(ws: Path) -> None:
    def outside(command: str, **options: Any) -> Decision:
        return Permissions(**options).decide("unconfined", command, ws)

    flags = [rule_of("unconfined:make *", "allow")]
    found = {
        each: outside(each, flags=flags, yolo=True).action
        for each in (
            "make x",
            "make x; touch y",
            "make $(rm -rf ../victim)",
            "make > ../x",
            "make && rm -rf ../victim",
        )
    }
    assert found == dict.fromkeys(found, "ask") | {"make x": "allow"}
    assert (
        outside("make x", flags=flags, workspace=[Rule("unconfined", "*", "deny")]).action == "deny"
    )
    assert outside("make x", flags=flags, agent=[Rule("unconfined", "*", "deny")]).action == "deny"
    assert outside("ls").remember == "ls"
    permissions = Permissions()
    permissions.memory.add("unconfined", "make *", own=True)
    assert permissions.decide("unconfined", "make x", ws).action == "allow"
    assert permissions.decide("bash", "make x", ws).action == "ask"


def test_a_question_of_an_agents_does_not_soften_a_deny(ws: Path) -> None:
    plan = [Rule("*", "*", "ask")]
    assert (
        Permissions(rules_of({"bash": {"git push *": "deny"}}), agent=plan)
        .decide("bash", "git push x", ws)
        .action
        == "deny"
    )
    assert Permissions(rules_of({"bash": "allow"}), agent=plan).decide(
        "bash", "make", ws
    ) == Decision("ask", "make", even_with_yolo=True)
    assert (
        Permissions(agent=plan, flags=[rule_of("bash:make", "allow")])
        .decide("bash", "make", ws)
        .action
        == "allow"
    )
    assert (
        Permissions(agent=plan, workspace=[Rule("bash", "ls", "ask")])
        .decide("bash", "ls", ws)
        .action
        == "ask"
    )


def test_a_path_is_meant_by_each_of_its_names(ws: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(ws.parent))
    permissions = Permissions(
        rules_of(
            {"read": {"~/ws/sub/*": "deny"}, "edit": {"sub/*": "allow", f"{ws}/sub/g": "deny"}}
        )
    )
    assert [
        permissions.decide("read", each, ws).action for each in ("sub/g", "f", str(ws / "sub/g"))
    ] == ["deny", "allow", "deny"]
    assert [
        permissions.decide("edit", each, ws).action
        for each in ("sub/x", "sub/g", str(ws / "sub/x"))
    ] == ["allow", "deny", "allow"]


def test_a_yes_for_a_folder_is_for_the_folder_and_what_is_in_it(ws: Path) -> None:
    permissions = Permissions()
    for asked, pattern, others in (
        (str(ws.parent), f"{ws.parent}/*", [str(ws.parent), str(ws.parent / "x")]),
        ("/nothing-here", "/*", ["/", "/x"]),
    ):
        remember = permissions.decide("external_directory", asked, ws).remember
        assert remember == pattern
        permissions.memory.add("external_directory", remember, own=False)
        assert all(
            permissions.decide("external_directory", each, ws).action == "allow" for each in others
        )


def test_rules_by_the_names_of_tools_count_and_unknown_ones_are_told(ws: Path) -> None:
    rules = rules_of(
        {"edit": "allow", "write": {"*.lock": "deny"}, "grep": "ask", "ls": {"sub": "deny"}}
    )
    calls = [
        ("write", {"path": "a.lock", "content": ""}),
        ("write", {"path": "a", "content": ""}),
        ("grep", {"pattern": "x"}),
        ("ls", {"path": "sub"}),
        ("ls", {}),
    ]
    events, asked = played(ws, Permissions(rules, can_ask=True), *calls)
    assert [text.startswith("Denied") for text in results(events)] == [
        True,
        False,
        True,
        True,
        False,
    ] and [each.permission for each in asked] == ["grep"]
    assert unknown(
        rules_of({"Bash": "deny", "edits": "deny", "bash": "ask", "*": "ask"}), ["bash", "edit"]
    ) == [
        f"The rule `deny {name}: *` (given) never counts: there is no kind and no tool {name!r}."
        for name in ("Bash", "edits")
    ]


def test_a_rule_is_not_called_dead_where_it_counts() -> None:
    assert dead(rules_of({"bash": {"git *": "allow", "git ??": "deny"}})) == []
    assert dead(rules_of({"bash": {"git a*": "allow", "git *": "deny"}})) != []


def test_a_name_that_stands_twice_in_a_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "permissions.json"
    path.write_text('{"bash": {"rm *": "deny"}, "bash": {"ls": "allow"}}')
    with pytest.raises(RulesError, match="bash stands there twice"):
        load_rules(path)
    path.write_text("[" * 100_000)
    with pytest.raises(RulesError):
        load_rules(path)


def test_long_lines_with_many_denies_are_decided_soon(ws: Path) -> None:
    rules = {"bash": {"*": "allow"} | {f"deny{number} *": "deny" for number in range(50)}}
    started = time.monotonic()
    assert decide(" && ".join(f"a{number} /x" for number in range(5_000)), ws, rules) == "ask"
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("agent", ["plan", "explore", "build"])
def test_every_agent_looks_around_without_a_question(ws: Path, agent: str) -> None:
    calls = [
        ("read", {"path": "f"}),
        ("grep", {"pattern": "x"}),
        ("glob", {"pattern": "*"}),
        ("ls", {}),
    ]
    events, asked = played(
        ws,
        Permissions(agent=BUILT_IN[agent].rules, can_ask=True),
        *calls,
        tools=[read, grep, glob, ls],
    )
    assert asked == [] and not any(text.startswith("Denied") for text in results(events))
