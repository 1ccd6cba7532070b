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
    denies_all,
    fits,
    load_rules,
    load_workspace_rules,
    rule_of,
    rules_of,
    useless_rules,
)
from coder.tools.bash import bash
from coder.tools.edit import edit
from coder.tools.files import ls, read, write
from coder.tools.patch import apply_patch
from coder.tools.search import glob, grep
from coder.toolset import Toolset, tool
from tests.harness import ask, serve


@pytest.fixture
def ws(tmp_path: Path) -> Path:
    folder = tmp_path / "ws"
    (folder / "sub").mkdir(parents=True)
    for name in ("f", ".env", ".env.example", "sub/g"):
        (folder / name).write_text("x")
    (folder / "out").symlink_to(tmp_path)
    return folder


def decide(command: str, ws: Path, rules: Any = (), **options: Any) -> str:
    """What becomes of a command."""
    given = rules_of(rules) if rules else ()
    return Permissions(given, **options).decide("bash", command, ws).action


def actions(permissions: Permissions, kind: str, *texts: str, ws: Path = Path("/")) -> str:
    """What becomes of these, as the first letters: y(es), a(sk), d(eny)."""
    letters = {"allow": "y", "ask": "a", "deny": "d"}
    return "".join(letters[permissions.decide(kind, text, ws).action] for text in texts)


# ---- the rules' language ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern, fitting, others",
    [
        ("ls", ["ls"], ["lsof", "ls -la", ""]),
        ("ls *", ["ls", "ls -la", "ls "], ["lsof"]),
        ("git status*", ["git status", "git status -s", "git statusx"], ["git stash"]),
        ("*", ["", "x", "a\nb/c"], []),
        ("a?c", ["abc", "a/c"], ["ac", "abbc"]),
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


def test_no_pattern_and_no_line_takes_long(ws: Path) -> None:
    started = time.monotonic()
    fits("*a" * 30 + "b", "a" * 200_000)
    rules = {"bash": {"*": "allow"} | {f"deny{number} *": "deny" for number in range(50)}}
    assert decide(" && ".join(f"a{number} /x" for number in range(5_000)), ws, rules) == "ask"
    assert decide("cd sub && " * 200 + "ls", ws) == "ask"
    assert time.monotonic() - started < 20


def test_the_last_rule_that_fits_counts(ws: Path) -> None:
    rules = {"*": "ask", "bash": {"git *": "allow", "git push *": "deny"}, "edit": "allow"}
    permissions = Permissions(rules_of(rules))
    assert actions(permissions, "bash", "git log", "git push", "make", ws=ws) == "yda"
    assert actions(permissions, "edit", "x") == "y"


def test_rules_that_can_never_count_are_found() -> None:
    def useless(rules: Any) -> list[str]:
        return useless_rules(rules_of(rules, "p.json"), ["bash", "edit"])

    [sentence] = useless({"bash": {"rm *": "deny"}, "*": "allow"})
    assert "`deny bash: rm *` (p.json) has no effect" in sentence and "`allow *: *`" in sentence
    assert len(useless({"bash": {"git ?": "deny", "git *": "ask"}})) == 1
    for rules in (
        {"bash": {"git *": "deny", "git ?": "ask"}},
        {"bash": {"git *": "allow", "git ??": "deny"}},
        {"*": "ask", "bash": {"*": "ask", "rm *": "deny", "rm -i *": "allow"}},
        {"bash": {"a": "allow"}, "*": "allow"},  # the answer is the same
    ):
        assert useless(rules) == []
    [sentence] = useless({"Bash": "deny", "bash": "ask"})
    assert "there is no kind and no tool 'Bash'" in sentence


@pytest.mark.parametrize(
    "rules, all_denied",
    [
        ({"bash": "deny"}, True),
        ({"*": "deny"}, True),
        ({"bash": {"*": "deny", "ls": "ask"}}, False),
        ({"bash": {"ls": "allow", "*": "deny"}}, True),
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
        ('{"bash": {"rm *": "deny"}, "bash": {"ls": "allow"}}', "twice: bash, bash"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_file_of_rules_that_is_none_is_an_error(tmp_path: Path, text: str, problem: str) -> None:
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
    with pytest.raises(RulesError, match="other users can write"):
        load_rules(path)


def test_a_workspace_only_tightens(tmp_path: Path) -> None:
    assert load_workspace_rules(tmp_path) == ([], [])
    path = tmp_path / ".coder" / "permissions.json"
    path.parent.mkdir()
    path.write_text('{"bash": {"*": "allow", "make *": "deny"}, "*": "allow"}')
    rules, notes = load_workspace_rules(tmp_path)
    assert rules == [Rule("bash", "make *", "deny", ".coder/permissions.json")]
    assert notes == [".coder/permissions.json can only deny and ask: 1 of its 3 rules count."]
    permissions = Permissions(rules_of({"bash": "allow"}), workspace=rules)
    assert actions(permissions, "bash", "make", "make x", "pytest", ws=tmp_path) == "ddy"
    for text in ("{", "[]", "[" * 100_000):
        path.write_text(text)
        rules, notes = load_workspace_rules(tmp_path)
        assert rules == [] and "is ignored" in notes[0]
    path.unlink()
    os.mkfifo(path)
    assert load_workspace_rules(tmp_path) == ([], [])
    path.unlink()
    path.symlink_to("/dev/zero")
    assert load_workspace_rules(tmp_path) == ([], [])


# ---- commands --------------------------------------------------------------------------------------------

FREE = [
    *("pwd", "ls", "ls -la sub", "cat f sub/g", "head -n 5 f", "tail -c +3 f", "wc -l f | cat"),
    *("echo a 'b c'", "true", "cd sub && cat g", "cd sub; cat g || ls", "ls f 2>/dev/null"),
    *("cat .env.example", "cat f 2>&1 | head -3"),
]
# Bash goes up by the letters of its folder, the kernel by the links: `cd l/../..` could be anywhere.
ASKED = [
    *("cat .env", "cat out/x", "cat ../f", "cat /etc/passwd", "cat ~/x", "ls ..", "ls out"),
    *(
        "cat -",
        "cat -n 5",
        "wc --files0-from=f",
        "cd .. && cat f",
        "cd sub && cat ../../f",
        "cd && ls",
    ),
    *("cd nowhere && cat ../f", "cd - && ls", "cd /etc; cat passwd", "cd out; ls", "cd .. && ls"),
    *("pushd sub && ls", "command cd / && ls", "cd l/../.. && cat x", "cd l && cd .. && cat ../x"),
    *("cd sub/.. && cat f", "cat f > g", "cat $HOME", "ls *", "echo $(id)", "find .", "git status"),
    *("sed -n 1p f", "sort f", "./ls", "/bin/ls", "LS", "env", "printf x"),
]


def test_only_plain_looking_inside_the_workspace_needs_no_rule(ws: Path) -> None:
    (ws / "a" / "b" / "c").mkdir(parents=True)
    (ws / "l").symlink_to("a/b/c")
    (ws / "5").symlink_to("/etc/passwd")
    assert [command for command in FREE if decide(command, ws) != "allow"] == []
    assert [command for command in ASKED if decide(command, ws) != "ask"] == []


COMMANDS: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"bash": "ask"}, {"ls": "ask"}),  # a rule goes before what is free
    ({"bash": {"cat *": "deny"}}, {"cat f": "deny"}),
    ({"bash": {"pytest *": "allow"}}, {"cd sub && pytest -q": "allow"}),
    ({"bash": {"cd *": "allow"}}, {"cd / && cat etc/passwd": "ask"}),
    # a line takes the strictest answer of its parts
    (
        {"bash": {"a *": "allow", "b *": "deny"}},
        {
            "a 1; a 2": "allow",
            "a 1 && c": "ask",
            "a 1 | b": "deny",
            "c; b x": "deny",
            "a &&": "ask",
        },
    ),
    # what is not plain is never allowed by a pattern
    ({"*": "allow"}, dict.fromkeys(["touch $(id)", "a > b", "x=1 a", "a &", "(a)", "a *"], "ask")),
    ({"*": "allow"}, dict.fromkeys(["if a; then b; fi", "a `b`", "\\a", "a\rb", "a\0b"], "ask")),
    ({"bash": {"ls *": "allow"}}, {"'ls -la' x": "ask"}),
    # the last rule that fits; a command of any length is denied, one that is not read is asked about
    ({"bash": {"rm *": "deny", "rm f": "allow"}}, {"rm f": "allow", "rm g": "deny"}),
    (
        {"bash": {"*": "allow", "touch *": "deny"}},
        {"true && " * 20_000 + "touch x": "deny", "true && " * 20_000 + "true": "ask"},
    ),
    # behind a command that may have changed it a path is not trusted; a pipe has no path
    (
        {"bash": {"ln *": "allow", "make": "allow"}},
        {
            "ln -s / r && cat r/etc/passwd": "ask",
            "make | tail -n 5": "allow",
            "make && cat f": "ask",
        },
    ),
    ({"read": {"secrets/*": "deny"}}, {"cat secrets/x": "ask"}),
    ({"read": "ask"}, {"cat secrets/x": "ask"}),
]


@pytest.mark.parametrize(("rules", "expected"), COMMANDS)
def test_what_becomes_of_a_command(ws: Path, rules: Any, expected: dict[str, str]) -> None:
    (ws / "secrets").mkdir()
    assert {command: decide(command, ws, rules) for command in expected} == expected


def test_a_deny_counts_for_yolo_too(ws: Path) -> None:
    """Every disguise: test_shell.py."""
    rules = {"bash": {"*": "allow", "rm *": "deny"}}
    for command in ("rm f", "sudo rm f", "sh -c 'rm f'", "r\\m f", "x | xargs rm"):
        assert decide(command, ws, rules, yolo=True) == "deny", command
    assert decide("rmdir f", ws, rules, yolo=True) == "allow"


# ---- paths -----------------------------------------------------------------------------------------------

GUARDED = [
    *(".git/config", ".git/hooks/pre-commit", "sub/.GIT/config", "AGENTS.md", "sub/claude.md"),
    *(".bashrc", "sub/.zshenv", ".coder/permissions.json", ".vscode/tasks.json", ".envrc"),
]


@pytest.mark.parametrize("path", GUARDED)
def test_what_gives_orders_is_asked_about_even_where_edits_are_allowed(path: str) -> None:
    permissions = Permissions(rules_of({"edit": "allow"}), flags=[rule_of("edit", "allow")])
    permissions.memory.add("edit", "*", own=False)
    decision = permissions.decide("edit", path, Path("/"))
    assert (decision.action, decision.always_pattern) == ("ask", "") and decision.reason
    named = Permissions(flags=[rule_of(f"edit:{path}", "allow")])
    assert actions(named, "edit", path) == "y"
    is_even_with_yolo = ".git/" in path.lower() or ".coder" in path
    assert actions(Permissions(yolo=True), "edit", path) == ("a" if is_even_with_yolo else "y")


def test_other_paths_are_free() -> None:
    ours = Path("/home/u/.config/coder")
    permissions = Permissions(rules_of({"edit": "allow"}), private=[ours])
    free = [".gitignore", "git/config", "docs/AGENTS.md.txt", "profile", "src/.github/x", "x.git/y"]
    assert actions(permissions, "edit", *free, f"{ours}-x") == "y" * 7
    assert actions(permissions, "edit", f"{ours}/hooks.json") == "a"


def test_reading_is_free_but_for_what_holds_secrets() -> None:
    permissions = Permissions()
    assert actions(permissions, "read", "a", ".env", "x/id_rsa", ".env.example") == "yaay"
    permissions.memory.add("read", ".env", own=False)
    assert actions(permissions, "read", ".env", "sub/.env") == "ya"
    assert actions(Permissions(rules_of({"read": "deny"})), "read", ".env") == "d"


def test_a_path_is_meant_by_each_of_its_names(ws: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(ws.parent))
    edits = {"sub/*": "allow", f"{ws}/sub/g": "deny"}
    permissions = Permissions(rules_of({"read": {"~/ws/sub/*": "deny"}, "edit": edits}))
    assert actions(permissions, "read", "sub/g", "f", f"{ws}/sub/g", ws=ws) == "dyd"
    assert actions(permissions, "edit", "sub/x", "sub/g", f"{ws}/sub/x", ws=ws) == "ydy"


# ---- layers ----------------------------------------------------------------------------------------------

PLAN = [Rule("*", "*", "ask")]


def test_an_agent_loosens_what_is_asked_and_its_denials_hold(ws: Path) -> None:
    agent = rules_of({"bash": {"npm test": "allow"}, "edit": "deny"})
    permissions = Permissions(agent=agent, flags=[rule_of("edit", "allow")], yolo=True)
    permissions.memory.add("edit", "*", own=False)
    assert actions(permissions, "bash", "npm test", ws=ws) == "y"
    assert actions(permissions, "edit", "a", ws=ws) == "d", "against a flag, -y and a yes of before"


def test_a_question_of_an_agents_stays_one_under_yolo_and_does_not_soften_a_deny(ws: Path) -> None:
    permissions = Permissions(agent=rules_of({"bash": "ask"}), yolo=True)
    assert actions(permissions, "bash", "ls", "pytest", "a > b", ws=ws) == "yaa"
    assert decide("pytest", ws, {"bash": "ask"}, yolo=True) == "allow"
    denied = rules_of({"bash": {"git push *": "deny"}})
    assert actions(Permissions(denied, agent=PLAN), "bash", "git push x", ws=ws) == "d"
    flags = [rule_of("bash:make", "allow")]
    assert actions(Permissions(agent=PLAN, flags=flags), "bash", "make", ws=ws) == "y"
    workspace = [Rule("bash", "ls", "ask")]
    assert actions(Permissions(agent=PLAN, workspace=workspace), "bash", "ls", ws=ws) == "a"
    secret = [Rule("read", "secrets/*", "deny")]
    for options in ({"workspace": secret}, {"agent": secret}):
        assert decide("cat secrets/x", ws, **options) == "ask"


def test_for_a_sub_agent_the_stricter_of_both_holds(ws: Path) -> None:
    rules = rules_of({"bash": {"touch *": "deny", "make *": "ask"}})
    parent = Permissions(rules, agent=rules_of({"edit": "deny"}))
    child = parent.child(rules_of({"bash": "allow", "edit": "allow", "read": {"secret": "deny"}}))
    assert actions(child, "bash", "touch x", "make", "pytest", ws=ws) == "daa"
    assert actions(child, "edit", "a") + actions(child, "read", "secret") == "dd"
    assert actions(parent, "read", "secret") == "y"
    parent.agent = []
    assert actions(child, "edit", "a") == "a", "the parent's agent of now"
    child.memory.add("bash", "make", own=False)
    assert actions(parent, "bash", "make", ws=ws) == "y", "one memory for the session"


def test_unconfined_needs_a_rule_of_its_own_or_a_yes(ws: Path) -> None:
    def outside(*commands: str, **options: Any) -> str:
        return actions(Permissions(**options), "unconfined", *commands, ws=ws)

    assert outside("ls", rules=rules_of({"*": "allow"}), yolo=True) == "a"
    assert outside("ls", rules=rules_of({"unconfined": {"ls": "allow"}})) == "y"
    rules = rules_of({"unconfined": "allow", "bash": {"rm *": "deny"}})
    assert outside("rm x", rules=rules) == "d"
    flags, deny = [rule_of("unconfined:make *", "allow")], [Rule("unconfined", "*", "deny")]
    commands = ["make x", "make x; touch y", "make $(rm -rf ../v)", "make > ../x", "make && rm x"]
    assert outside(*commands, flags=flags, yolo=True) == "yaaaa"
    assert outside("make x", flags=flags, workspace=deny) == "d"
    assert outside("make x", flags=flags, agent=deny) == "d"
    permissions = Permissions()
    permissions.memory.add("unconfined", "make *", own=True)
    assert actions(permissions, "unconfined", "make x", ws=ws) == "y"
    assert actions(permissions, "bash", "make x", ws=ws) == "a"


def test_a_yes_for_the_session_is_for_exactly_this(ws: Path) -> None:
    permissions = Permissions()
    permissions.memory.add("bash", "npm test", own=False)
    permissions.memory.add("bash", "rm build/*", own=False)
    permissions.memory.add("bash", "git diff *", own=True)
    commands = ["npm test", "npm test x", "npm test; touch x", "rm build/*", "rm build/a/../.."]
    assert actions(permissions, "bash", *commands, ws=ws) == "yaaya"
    commands = ["git diff", "git diff a", "git diff a; touch x", "git diff $(x)"]
    assert actions(permissions, "bash", *commands, ws=ws) == "yyaa"


def test_a_yes_for_a_folder_is_for_the_folder_and_what_is_in_it(ws: Path) -> None:
    permissions, parent = Permissions(), str(ws.parent)
    for asked, pattern, others in (
        (parent, f"{parent}/*", [parent, f"{parent}/x"]),
        ("/nothing-here", "/*", ["/", "/x"]),
    ):
        assert permissions.decide("external_directory", asked, ws) == Decision("ask", pattern)
        permissions.memory.add("external_directory", pattern, own=False)
        assert actions(permissions, "external_directory", *others, ws=ws) == "yy"


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

    toolset = Toolset(tools or [read, write, edit, bash, ls, grep, glob, apply_patch], cwd=ws)
    with serve(Reply("", calls=calls), Reply("Done.")) as server:
        events, result = ask(server, tools=toolset, hooks=HookChain(permissions), each=each)
        assert result.stop_reason == "stop"
    return events, asked


def commands(*lines: str) -> list[tuple[str, Any]]:
    return [("bash", {"command": line}) for line in lines]


def test_the_user_is_shown_what_will_run_and_answers(ws: Path) -> None:
    events, asked = played(
        ws,
        Permissions(can_ask=True),
        *commands("touch one", "touch one", "touch two"),
        answer=lambda event: event.reply("always" if "one" in event.pattern else "no", "not that"),
    )
    assert [(each.permission, each.pattern, each.remember) for each in asked] == [
        ("bash", "touch one", "touch one"),
        ("bash", "touch two", "touch two"),
    ]
    assert (ws / "one").exists() and not (ws / "two").exists()
    assert results(events)[2] == "Denied: the user refused: not that. Do not try it another way."
    replied = [event.answer for event in events if isinstance(event, PermissionReplied)]
    assert replied == ["always", "no"]


def test_a_pattern_of_the_users_own_is_remembered(ws: Path) -> None:
    def answer(event: PermissionAsked) -> None:
        if "touch" in event.pattern:
            event.reply("always", remember="touch *")

    lines = commands("touch one", "touch two", "touch three; touch four", "rm one")
    _, asked = played(ws, Permissions(can_ask=True), *lines, answer=answer)
    assert [each.pattern for each in asked] == ["touch one", "rm one"]
    assert {"one", "two", "three", "four"} <= set(os.listdir(ws))


def test_nothing_can_be_remembered_where_nothing_may_be(ws: Path) -> None:
    permissions = Permissions(can_ask=True)
    paths = ("AGENTS.md", "sub/AGENTS.md")
    calls = [("write", {"path": path, "content": "a"}) for path in paths]
    answer = {"answer": lambda event: event.reply("always", remember="*")}
    assert len(played(ws, permissions, *calls, **answer)[1]) == 2
    assert permissions.memory.rules == []


def test_a_patch_is_asked_about_with_all_its_paths_and_takes_the_strictest_answer(ws: Path) -> None:
    patch = "*** Begin Patch\n*** Add File: a.py\n+1\n*** Add File: AGENTS.md\n+2\n*** End Patch"
    permissions = Permissions(rules_of({"edit": "allow"}), can_ask=True)
    _, asked = played(ws, permissions, ("apply_patch", {"patch": patch}))
    assert [(each.pattern, each.remember, each.why) for each in asked] == [
        ("a.py, AGENTS.md", "", "later sessions follow its instructions")
    ]
    assert not (ws / "a.py").exists()
    permissions = Permissions(rules_of({"edit": {"*": "allow", "a.py": "deny"}}))
    call = ("apply_patch", {"patch": patch.replace("AGENTS", "B")})
    events, asked = played(ws, permissions, call)
    assert asked == [] and results(events)[0].startswith("Denied: a rule denies edit")
    assert not (ws / "B.md").exists()


def test_where_nobody_can_be_asked_the_answer_is_no_and_says_how(ws: Path) -> None:
    events, asked = played(
        ws,
        Permissions(),
        *commands("touch x", "touch x > y"),
        ("write", {"path": ".git/config", "content": "n"}),
        ("read", {"path": ".env"}),
        ("read", {"path": "../f"}),
        ("read", {"path": "f"}),
        ("write", {"path": "new", "content": "n"}),
    )
    texts = results(events)
    assert asked == [] and not (ws / "x").exists() and not (ws / "new").exists()
    assert "-y allows it, or --allow 'bash:touch x'" in texts[0]
    assert "-y" in texts[1] and "--allow" not in texts[1] and "-y" not in texts[2]
    assert "may hold secrets" in texts[3] and "--allow read:.env" in texts[3]
    assert "external_directory" in texts[4] and texts[5].startswith("1\tx")
    assert "--allow 'edit:*'" in texts[6]


def test_a_denied_tool_is_not_offered_and_not_run(ws: Path) -> None:
    rules, workspace = rules_of({"bash": "deny", "ls": "deny"}), [Rule("edit", "*", "deny")]
    permissions = Permissions(rules, workspace=workspace)
    offered = permissions.offered([read, write, edit, bash, ls, apply_patch])
    assert [each.name for each in offered] == ["read"]
    child = permissions.child([Rule("read", "*", "deny")])
    assert child.offered([read, bash, grep]) == []
    events, _ = played(ws, permissions, *commands("ls"), ("ls", {}))
    assert all(text.startswith("Denied: a rule denies the tool") for text in results(events))


def test_rules_by_the_names_of_tools_count(ws: Path) -> None:
    rules = {"edit": "allow", "write": {"*.lock": "deny"}, "grep": "ask", "ls": {"sub": "deny"}}
    events, asked = played(
        ws,
        Permissions(rules_of(rules), can_ask=True),
        ("write", {"path": "a.lock", "content": ""}),
        ("write", {"path": "a", "content": ""}),
        ("grep", {"pattern": "x"}),
        ("ls", {"path": "sub"}),
        ("ls", {}),
    )
    denied = [text.startswith("Denied") for text in results(events)]
    assert denied == [True, False, True, True, False]
    assert [each.permission for each in asked] == ["grep"]


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({}, "deployed to prod"),
        ({"deploy": "ask"}, "Denied: the user refused"),
        ({"deploy": {"*prod*": "deny"}}, "Denied: a rule denies"),
        ({"*": "ask"}, "Denied: the user refused"),
    ],
)
def test_a_tool_of_ones_own_runs_unasked_but_for_a_rule(ws: Path, rules: Any, text: str) -> None:
    @tool
    def deploy(to: str) -> str:
        """Deploy.

        to: where
        """
        return f"deployed to {to}"

    events, asked = played(
        ws,
        Permissions(rules_of(rules), can_ask=True),
        ("deploy", {"to": "prod"}),
        tools=[deploy],
        answer=lambda event: event.reply("no"),
    )
    assert results(events)[0].startswith(text)
    assert all(json.loads(each.pattern) == {"to": "prod"} for each in asked)


@pytest.mark.parametrize(
    ("rules", "can_ask", "allow", "runs"),
    [
        ({}, False, False, False),
        ({}, True, False, False),
        ({}, True, True, True),
        ({"doom_loop": "allow"}, False, False, True),
        ({"doom_loop": "deny"}, True, True, False),
    ],
)
def test_a_repetition_is_decided_by_a_rule_or_by_the_user(
    ws: Path, rules: Any, can_ask: bool, allow: bool, runs: bool
) -> None:
    def each(event: Event) -> None:
        if isinstance(event, DoomLoop):
            event.reply(allow)

    permissions = Permissions(rules_of(rules), can_ask=can_ask)
    for hooks in permissions, permissions.child([]):
        with serve(Reply("", calls=[("ls", {})] * 3), Reply("Done.")) as server:
            events, _ = ask(server, tools=Toolset([ls], cwd=ws), hooks=hooks, each=each)
        assert results(events)[2].startswith("Not run") != runs


def test_a_search_passes_over_what_may_not_be_read_unasked(ws: Path) -> None:
    for name in ("secret", "open", ".env"):
        (ws / name).write_text("needle")
    paths: list[dict[str, str]] = [{}, {"path": "secret"}, {"path": ".env"}]
    calls = [("grep", {"pattern": "needle"} | path) for path in paths]
    for action in ("deny", "ask"):
        rules = rules_of({"read": {"secret": action}})
        everywhere, secret, env = results(played(ws, Permissions(rules), *calls)[0])
        assert everywhere == "open:1:needle"
        assert secret.startswith("Denied") and env.startswith("Denied")
    permissions = Permissions(rules_of({"read": "allow"}), yolo=True)
    counts = [text.count("needle") for text in results(played(ws, permissions, *calls)[0])]
    assert counts == [2, 1, 1], "-y answers for a file that is named, not for a search"


@pytest.mark.parametrize("agent", ["plan", "explore", "build"])
def test_every_agent_looks_around_without_a_question(ws: Path, agent: str) -> None:
    permissions = Permissions(agent=BUILT_IN[agent].rules, can_ask=True)
    calls = [("read", {"path": "f"}), ("grep", {"pattern": "x"}), ("glob", {"pattern": "*"})]
    events, asked = played(ws, permissions, *calls, ("ls", {}))
    assert asked == [] and not [text for text in results(events) if text.startswith("Denied")]
