"""Permissions: the rules' language, what is decided, the built-in protections, and how a run
asks."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import shlex
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

import coder.agent
import coder.tools
from coder import parts
from coder.agent.profiles import BUILT_IN
from coder.agent.subagent import Subagents
from coder.agent.user_tools import ask_user
from coder.devtools.scripted import Reply
from coder.events import (
    DoomLoop,
    Event,
    PermissionAsked,
    PermissionReplied,
    QuestionAsked,
    ToolStart,
)
from coder.hooks import HookChain
from coder.permissions.permissions import Permissions
from coder.permissions.rules import (
    Decision,
    Rule,
    RulesError,
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
from coder.toolset import Tool, ToolContext, Toolset, tool
from tests.harness import all_of, ask, commands, results, serve, table


@pytest.fixture
def ws(tmp_path: Path) -> Path:
    folder = tmp_path / "ws"
    (folder / "sub").mkdir(parents=True)
    for name in ("f", ".env", ".env.example", "sub/g"):
        (folder / name).write_text("x")
    (folder / "out").symlink_to(tmp_path)
    return folder


def permissions(rules: Any = (), **options: Any) -> Permissions:
    """Layers are written as in a file, flags as on the command line."""
    layers = {name: rules_of(options.pop(name, {})) for name in ("agent", "workspace")}
    flags = [rule_of(each, "allow") for each in options.pop("flags", ())]
    return Permissions(
        rules_of(rules) if rules else (),
        flags=flags,
        **layers,
        **options,
    )


def actions(given: Permissions, kind: str, *texts: str, ws: Path = Path("/")) -> str:
    """What becomes of these, as the first letters: y(es), a(sk), d(eny)."""
    letters = {"allow": "y", "ask": "a", "deny": "d"}
    return "".join(letters[given.decide(kind, text, ws).action] for text in texts)


# ---- the rules' language -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern, fitting, others",
    [
        ("ls", ["ls"], ["lsof", "ls -la", ""]),
        ("ls *", ["ls", "ls -la", "ls "], ["lsof"]),
        ("git status*", ["git status", "git status -s", "git statusx"], ["git stash"]),
        ("*", ["", "x", "a\nb/c"], []),
        ("a?c*e", ["abce", "abcde/e"], ["ace", "abc", "abced"]),
        ("a.c[x]", ["a.c[x]"], ["abcx", "a.cx"]),
    ],
)
def test_a_pattern_fits_all_of_a_text(pattern: str, fitting: list[str], others: list[str]) -> None:
    assert [text for text in [*fitting, *others] if fits(pattern, text)] == fitting


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        ({"bash": {"rm *": "deny"}, "*": "allow"}, "`allow *: *` (p.json) comes later"),
        ({"Bash": "deny", "bash": "ask"}, "there is no such kind"),
        ({"bash": {"git ?": "deny", "git *": "ask"}}, "`ask bash: git *`"),
        ({"bash": {"git *": "deny", "git ?": "ask"}}, ""),
        ({"bash": {"git *": "allow", "git ??": "deny"}}, ""),
        (
            {"*": "ask", "bash": {"*": "ask", "rm *": "deny", "rm -i *": "allow"}},
            "",
        ),
        ({"bash": {"a": "allow"}, "*": "allow"}, ""),  # the answer is the same
    ],
)
def test_rules_that_can_never_count_are_found(rules: Any, problem: str) -> None:
    found = useless_rules(rules_of(rules, "p.json"), ["bash", "edit"])
    assert len(found) == bool(problem)
    assert problem in "".join(found)


@pytest.mark.parametrize(
    "text, problem",
    [
        ("[]", "an object"),
        ('{"bash": "yes"}', '"yes" is not one of allow, ask, deny'),
        ("{", "Expecting"),
        ('{"bash": {"rm *": "deny"}, "bash": {"ls": "allow"}}', "twice: bash, bash"),
        ("[" * 100_000, "recursion"),
        ('{"write": "deny"}', "write is no kind: rules for it have the kind edit"),
    ],
)
def test_a_file_of_rules_that_is_none_is_an_error(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / ".coder" / "permissions.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(RulesError, match=problem) as raised:
        load_rules(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)
    rules, [note] = load_workspace_rules(tmp_path)
    assert rules == []
    assert "is ignored" in note


def test_the_users_rules_are_not_read_if_others_may_have_written_them(tmp_path: Path) -> None:
    path = tmp_path / "permissions.json"
    assert load_rules(path) == []
    path.write_text('{"read": {"~/x": "deny"}}')
    assert load_rules(path) == [
        Rule(
            "read",
            os.path.expanduser("~/x"),
            "deny",
            "permissions.json",
        )
    ]
    path.chmod(0o666)
    with pytest.raises(RulesError, match="other users can write"):
        load_rules(path)


def test_rules_that_only_the_systems_administrator_can_write_are_read() -> None:
    own = os.geteuid()
    if own == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(RulesError, match=r"/etc/passwd: (Expecting|Extra)"):  # no JSON
            load_rules(Path("/etc/passwd"))
    finally:
        os.seteuid(own)


def test_a_workspace_only_tightens(tmp_path: Path) -> None:
    assert load_workspace_rules(tmp_path) == ([], [])
    path = tmp_path / ".coder" / "permissions.json"
    path.parent.mkdir()
    path.write_text('{"bash": {"*": "allow", "make *": "deny"}, "*": "allow"}')
    rules, notes = load_workspace_rules(tmp_path)
    assert rules == [Rule("bash", "make *", "deny", ".coder/permissions.json")]
    assert notes == [".coder/permissions.json can only deny and ask: 1 of its 3 rules count."]
    path.unlink()
    os.mkfifo(path)
    assert load_workspace_rules(tmp_path) == ([], [])


# ---- commands ------------------------------------------------------------------------------------

FREE = """
pwd ¦ ls ¦ ls -la sub ¦ cat f sub/g ¦ head -n 5 f ¦ tail -c +3 f ¦ wc -l f | cat ¦ echo a 'b c' ¦ true
cd sub && cat g ¦ cd sub; cat g || ls ¦ ls f 2>/dev/null ¦ cat .env.example ¦ cat f 2>&1 | head -3
find . -name f
"""
# Bash goes up by the letters of its folder, the kernel by the links: `cd l/../..` could be
# anywhere.
ASKED = """
cat .env ¦ cat out/x ¦ cat ../f ¦ cat /etc/passwd ¦ cat ~/x ¦ ls .. ¦ ls out ¦ cat - ¦ cat -n 5
wc --files0-from=f ¦ cd .. && cat f ¦ cd sub && cat ../../f ¦ cd nowhere && cat ../f ¦ cd - && ls
cd /etc; cat passwd ¦ cd out; ls ¦ cd && ls ¦ pushd sub && ls ¦ command cd / && ls ¦ cd l/../.. && cat x
cd l && cd .. && cat ../x ¦ cd sub/.. && cat f ¦ cat f > g ¦ cat $HOME ¦ ls * ¦ echo $(id) ¦ git status
sed -n 1p f ¦ sort f ¦ ./ls ¦ /bin/ls ¦ LS ¦ env ¦ printf x ¦ ls -LR ¦ ls -R --dereference ¦ ls -aLR sub
wc --files f ¦ wc --f f
"""


def test_only_plain_looking_inside_the_workspace_needs_no_rule(ws: Path) -> None:
    (ws / "a" / "b" / "c").mkdir(parents=True)
    (ws / "l").symlink_to("a/b/c")
    (ws / "5").symlink_to("/etc/passwd")
    for text, letter in (FREE, "y"), (ASKED, "a"):
        lines = text.strip().replace("\n", " ¦ ").split(" ¦ ")
        assert [
            each for each in lines if actions(Permissions(), "bash", each, ws=ws) != letter
        ] == []


LONG = "true && " * 20_000
# Rules, other layers and options, => a letter for each command
DECIDED = r"""
# a rule goes before what is free
{"bash": "ask"} => a => ls
{"bash": {"cat *": "deny"}} => d => cat f
{"bash": {"pytest *": "allow"}} => y => cd sub && pytest -q
{"bash": {"cd *": "allow"}} => a => cd / && cat etc/passwd
# the last rule that fits
{"*": "ask", "bash": {"git *": "allow", "git push *": "deny"}, "edit": "allow"} ~
 => yda => git log ¦ git push ¦ make
{"bash": {"rm *": "deny", "rm f": "allow"}} => yd => rm f ¦ rm g
# a line takes the strictest answer of its parts
{"bash": {"a *": "allow", "b *": "deny"}} => yadda => a 1; a 2 ¦ a 1 && c ¦ a 1 | b ¦ c; b x ¦ a &&
# what is not plain is never allowed by a pattern (more of it: test_shell.py)
{"*": "allow"} => aaaaaa => touch $(id) ¦ a > b ¦ x=1 a ¦ a & ¦ (a) ¦ if a; then b; fi
{"bash": {"ls *": "allow"}} => a => 'ls -la' x
# a command of any length is denied, one that is not read is asked about
{"bash": {"*": "allow", "touch *": "deny"}} => da => LONGtouch x ¦ LONGtrue
# after a command that may have changed it a path is not trusted; a pipe has no path
{"bash": {"ln *": "allow", "make": "allow"}} ~
 => aya => ln -s / r && cat r/x ¦ make | tail -n 5 ¦ make && cat f
{"read": {"sub/*": "deny"}} => a => cat sub/g
{"read": "ask"} => a => cat f
# the workspace's rules and an agent's denial hold, against a flag and -y
{"bash": "allow"} => {"workspace": {"bash": {"make *": "deny"}}} => ddy => make ¦ make x ¦ pytest
{} => {"agent": {"bash": {"npm test": "allow"}}} => y => npm test
{} => {"agent": {"bash": {"a": "deny"}}, "flags": ["bash"], "yolo": true} => d => a
# an agent's question stays one under -y, unless a flag decides, and does not soften a deny
{} => {"agent": {"bash": "ask"}, "yolo": true} => yaa => ls ¦ a ¦ a > b
{"bash": "ask"} => {"yolo": true} => y => a
{"bash": {"rm *": "deny"}} => {"agent": {"*": "ask"}} => d => rm x
{} => {"agent": {"*": "ask"}, "flags": ["bash:make *"], "yolo": true} => ya => make ¦ make $x
{} => {"agent": {"*": "ask"}, "workspace": {"bash": {"ls": "ask"}}} => a => ls
{} => {"agent": {"read": {"f": "deny"}}} => a => cat f
"""
OUTSIDE = """
{"*": "allow"} => {"yolo": true} => a => ls
{"unconfined": {"ls": "allow"}} => y => ls
{"unconfined": "allow", "bash": {"rm *": "deny"}} => d => rm x
{} => {"flags": ["unconfined:make *"], "yolo": true} ~
 => yaaa => make x ¦ make; touch y ¦ make $(x) ¦ make > ../x
{} => {"flags": ["unconfined"], "workspace": {"unconfined": "deny"}} => d => make x
"""
# A rule about reading means a place outside where it names it
ELSEWHERE = """
{"read": "allow"} => a => /out/x
{"read": {"/out/*": "allow"}} => y => /out/x
{"*": "allow"} => y => /out/x
{"*": "allow", "read": {"/out/*": "deny"}} => d => /out/x
{} => {"agent": {"external_directory": "deny", "read": "allow"}} => d => /out/x
"""
TABLES = {"bash": DECIDED, "unconfined": OUTSIDE, "external_directory": ELSEWHERE}


@pytest.mark.parametrize("kind", TABLES)
def test_what_is_decided(ws: Path, kind: str) -> None:
    for rules, *options, letters, texts in table(re.sub("(?m)^#.*\n", "", TABLES[kind])):
        given = permissions(
            json.loads(rules),
            **json.loads("".join(options) or "{}"),
        )
        found = actions(
            given,
            kind,
            *texts.replace("LONG", LONG).split(" ¦ "),
            ws=ws,
        )
        assert found == letters, (rules, options, texts)


def test_no_pattern_allows_a_command_of_more_than_10_000_characters(ws: Path) -> None:
    given = permissions({"bash": {"echo *": "allow"}})
    lines = ["echo ".ljust(length, "x") for length in (10_000, 10_001)]
    assert actions(given, "bash", *lines, ws=ws) == "ya"


# ---- paths ---------------------------------------------------------------------------------------

GUARDED = """.git/config .git/hooks/pre-commit sub/.GIT/config AGENTS.md sub/claude.md .bashrc
    sub/.zshenv .coder/permissions.json .agents/skills/x/run .envrc"""


@pytest.mark.parametrize("path", GUARDED.split())
def test_what_gives_orders_is_asked_about_even_if_edits_are_allowed(path: str) -> None:
    given = permissions({"edit": "allow"}, flags=["edit"])
    given.memory.append(Rule("edit", "*", "allow", "you", False))
    decision = given.decide("edit", path, Path("/"))
    assert (decision.action, decision.always_pattern) == ("ask", "")
    assert decision.reason
    assert actions(permissions(flags=[f"edit:{path}"]), "edit", path) == "y"
    is_even_with_yolo = ".git/" in path.lower() or ".coder" in path
    assert actions(permissions(yolo=True), "edit", path) == ("a" if is_even_with_yolo else "y")


def test_other_paths_are_free_but_for_what_holds_secrets() -> None:
    ours = Path("/home/u/.config/coder")
    given = permissions({"edit": "allow"}, private=[ours])
    free = [".gitignore", "git/config", "docs/AGENTS.md.txt", "profile", "src/.github/x", "x.git/y"]
    assert actions(given, "edit", *free, f"{ours}-x", f"{ours}/hooks.json") == "y" * 7 + "a"
    assert actions(given, "read", "a", ".env", "x/id_rsa", ".env.example") == "yaay"
    given.memory.append(Rule("read", ".env", "allow", "you", True))
    assert actions(given, "read", ".env", "sub/.env") == "ya"


def test_a_path_is_meant_by_each_of_its_names(ws: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(ws.parent))
    edits = {"sub/*": "allow", f"{ws}/sub/g": "deny"}
    given = permissions({"read": {"~/ws/sub/*": "deny"}, "edit": edits})
    assert actions(given, "read", "sub/g", "f", f"{ws}/sub/g", ws=ws) == "dyd"
    assert actions(given, "edit", "sub/x", "sub/g", f"{ws}/sub/x", ws=ws) == "ydy"


def test_for_a_sub_agent_the_stricter_of_both_holds(ws: Path) -> None:
    parent = permissions(
        {"bash": {"touch *": "deny", "make *": "ask"}},
        agent={"edit": "deny"},
    )
    child = parent.child(
        rules_of(
            {
                "bash": "allow",
                "edit": "allow",
                "read": {"secret": "deny"},
            }
        )
    )
    assert actions(child, "bash", "touch x", "make", "pytest", ws=ws) == "daa"
    assert actions(child, "edit", "a") + actions(child, "read", "secret") == "dd"
    assert actions(parent, "read", "secret") == "y"
    parent.agent = []
    assert actions(child, "edit", "a") == "a", "the parent's agent of now"
    child.memory.append(Rule("bash", "make", "allow", "you", True))
    assert actions(parent, "bash", "make", ws=ws) == "y", "one memory for the session"


@pytest.mark.case("PRM-24")
def test_a_yes_for_the_session_is_for_exactly_this(ws: Path) -> None:
    given = permissions()
    for pattern, is_exact in (
        ("npm test", True),
        ("rm build/*", True),
        ("git diff *", False),
    ):
        given.memory.append(Rule("bash", pattern, "allow", "you", is_exact))
    lines = ["npm test", "npm test x", "npm test; touch x", "rm build/*", "rm build/a/../.."]
    assert actions(given, "bash", *lines, ws=ws) == "yaaya"
    lines = ["git diff", "git diff a", "git diff a; touch x", "git diff $(x)"]
    assert actions(given, "bash", *lines, ws=ws) == "yyaa"
    assert actions(given, "unconfined", *lines, ws=ws) == "aaaa"


def test_a_yes_for_a_folder_is_for_the_folder_and_what_is_in_it(ws: Path) -> None:
    given = permissions()
    parent = str(ws.parent)
    for asked, pattern, others in (
        (parent, f"{parent}/*", [parent, f"{parent}/x"]),
        ("/nothing-here", "/*", ["/", "/x"]),
    ):
        assert given.decide("external_directory", asked, ws) == Decision("ask", pattern)
        given.memory.append(Rule("external_directory", pattern, "allow", "you", False))
        assert actions(given, "external_directory", *others, ws=ws) == "yy"


# ---- in a run ------------------------------------------------------------------------------------


def played(
    ws: Path, given: Permissions, *calls: tuple[str, Any], answer: Any = None, tools: Any = None
) -> tuple[list[str], list[PermissionAsked]]:
    """The results of these calls, and what was asked about them; `answer` replies."""
    asked: list[PermissionAsked] = []

    def each(event: Event) -> None:
        if isinstance(event, PermissionAsked):
            asked.append(event)
            if answer:
                answer(event)

    toolset = Toolset(
        tools or [read, write, edit, bash, ls, grep, glob, apply_patch],
        cwd=ws,
    )
    with serve(Reply("", calls=calls), Reply("Done.")) as server:
        events, result = ask(
            server,
            tools=toolset,
            hooks=HookChain(given),
            each=each,
        )
        assert result.stop_reason == "stop"
        replied = [(event.id, event.answer) for event in all_of(PermissionReplied, events)]
        assert replied == [(event.id, event.answer) for event in asked]
        return results(server), asked


@pytest.mark.case("PRM-24")
def test_the_user_is_shown_what_will_run_and_answers(ws: Path) -> None:
    def answer(event: PermissionAsked) -> None:
        event.reply("always" if "one" in event.pattern else "no", "not that")

    calls = commands("touch one", "touch one", "touch two")
    found, asked = played(ws, Permissions(can_ask=True), *calls, answer=answer)
    shown = [(each.permission, each.pattern, each.remember) for each in asked]
    assert shown == [("bash", name, name) for name in ("touch one", "touch two")]
    assert (ws / "one").exists()
    assert not (ws / "two").exists()
    assert found[2] == "Denied: the user refused and wrote: not that"
    assert [event.answer for event in asked] == ["always", "no"]


def test_a_pattern_of_the_users_own_is_remembered_if_something_may_be(ws: Path) -> None:
    def answer(event: PermissionAsked) -> None:
        if "rm" not in event.pattern:
            event.reply("always", remember="touch *" if "touch" in event.pattern else "*")

    calls = commands("touch one", "touch two", "touch three; touch four", "rm one")
    calls += [("write", {"path": path, "content": "a"}) for path in ("AGENTS.md", "sub/AGENTS.md")]
    _, asked = played(ws, Permissions(can_ask=True), *calls, answer=answer)
    shown = [each.pattern for each in asked]
    assert shown == ["touch one", "rm one", "AGENTS.md", "sub/AGENTS.md"]
    assert {"one", "two", "three", "four"} <= set(os.listdir(ws))


def test_each_question_has_an_id_of_its_own_and_names_its_call(tmp_path: Path) -> None:
    """A file outside that may hold secrets: two questions of one call; then one of a repetition."""
    folder = tmp_path / "ws"
    folder.mkdir()
    (tmp_path / ".env").write_text("x")
    answered: list[Event] = []

    def each(event: Event) -> None:
        if isinstance(event, PermissionAsked | QuestionAsked | DoomLoop):
            answered.append(event)
        if isinstance(event, PermissionAsked):
            event.reply("once")

    again = Reply("", calls=[("read", {"path": "../.env"})])
    last = Reply(
        "",
        calls=[*again.calls, ("ask_user", {"question": "?"})],
    )
    tools = Toolset([read, ask_user], cwd=folder)
    with serve(again, again, last, Reply("Done.")) as server:
        hooks = Permissions(can_ask=True)
        events, _ = ask(server, tools=tools, hooks=hooks, each=each)
    given = [each.to_dict() for each in answered]
    kinds = [each.get("permission", each["type"]) for each in given]
    twice = ["external_directory", "read"] * 2
    assert kinds == [*twice, "doom_loop", "question_asked"]
    assert len({each["id"] for each in given}) == len(given)
    assert all(each["id"] for each in given)
    first, second, third, fourth = (each.id for each in all_of(ToolStart, events))
    assert [each["call_id"] for each in given] == [first, first, second, second, third, fourth]
    replied = [each.id for each in all_of(PermissionReplied, events)]
    assert replied == [each["id"] for each in given[:4]]


def test_a_patch_is_asked_about_with_all_its_paths_and_takes_the_strictest_answer(ws: Path) -> None:
    patch = "*** Begin Patch\n*** Add File: a.py\n+1\n*** Add File: AGENTS.md\n+2\n*** End Patch"
    given = permissions({"edit": "allow"}, can_ask=True)
    _, asked = played(ws, given, ("apply_patch", {"patch": patch}))
    [(pattern, remember, why)] = [(each.pattern, each.remember, each.why) for each in asked]
    assert (pattern, remember) == ("a.py, AGENTS.md", "")
    assert "programs or later" in why
    call = ("apply_patch", {"patch": patch.replace("AGENTS", "B")})
    found, asked = played(
        ws,
        permissions({"edit": {"*": "allow", "a.py": "deny"}}),
        call,
    )
    assert asked == []
    assert found[0].startswith("Denied: a rule denies edit")
    assert not (ws / "a.py").exists()
    assert not (ws / "B.md").exists()


def test_if_nobody_can_be_asked_the_answer_is_no_and_says_how(ws: Path) -> None:
    paths = [("read", {"path": path}) for path in (".env", "../f", "f")]
    edits = [("write", {"path": path, "content": "n"}) for path in (".git/config", "new")]
    calls = [
        *commands("touch x", "touch x > y"),
        *paths,
        *edits,
        ("own", {"a": "*"}),
    ]
    own = Tool("own", "", {"properties": {"a": {}}}, str)
    found, asked = played(
        ws,
        Permissions(),
        *calls,
        tools=[read, write, bash, own],
    )
    run, unclear, secret, outside, inside, guarded, edited, others = found
    assert asked == []
    assert not (ws / "x").exists()
    assert not (ws / "new").exists()
    assert "-y allows it, or --allow 'bash:touch x'" in run
    assert "-y" in unclear
    assert "--allow" not in unclear
    assert "-y" not in guarded
    assert "may hold secrets" in secret
    assert "--allow read:.env" in secret
    assert "external_directory" in outside
    assert inside.startswith("x")
    assert "--allow 'edit:*'" in edited
    assert "-y allows it, or --allow 'own:*'." in others


@pytest.mark.parametrize("line", ["sort  x 2>&1", "cd sub && touch 'a b' | sort", "rm '*'"])
def test_the_flags_that_a_denial_names_allow_the_command(ws: Path, line: str) -> None:
    found, _ = played(ws, Permissions(), *commands(line))
    way, _, end = found[0].rpartition("; ")[2].partition(". Do not ")
    assert end == "try another way: say in your answer that you need it."
    words = shlex.split(way)
    rules = [rule_of(word, "allow") for word in words if word.startswith("bash:")]
    assert (
        Permissions(flags=rules).decide_without_yolo("bash", line, ws).action == "allow"
    ) == bool(rules)
    assert bool(rules) == ("*" not in line)


def test_a_denied_tool_is_not_offered_and_not_run(ws: Path) -> None:
    for rules in (
        {"*": "deny"},
        {"bash": {"ls": "allow", "*": "deny"}},
    ):
        assert permissions(rules).offered([bash]) == []
    assert permissions({"bash": {"*": "deny", "ls": "ask"}}).offered([bash]) == [bash]
    given = permissions({"bash": "deny"}, workspace={"edit": "deny"})
    offered = given.offered([read, write, edit, bash, ls, apply_patch])
    assert [each.name for each in offered] == ["read", "ls"]
    assert given.child([Rule("read", "*", "deny")]).offered([read, bash, grep]) == []
    found, _ = played(
        ws,
        given,
        *commands("ls"),
        ("write", {"path": "a", "content": ""}),
    )
    assert all(text.startswith("Denied: a rule denies the tool") for text in found)


@pytest.mark.parametrize(
    ("rules", "agent", "letters"),
    [
        ({}, "build", "aa"),
        ({"mcp": {"io__get": "allow"}}, "build", "ya"),
        ({"*": "allow", "mcp": {"io__s*": "deny"}}, "build", "yd"),
        ({"mcp": "allow"}, "plan", "aa"),
        ({"mcp": "allow"}, "explore", "dd"),
    ],
)
def test_tools_of_mcp_servers_ask_and_have_a_kind(rules: Any, agent: str, letters: str) -> None:
    given = Permissions(rules_of(rules), agent=BUILT_IN[agent].rules)
    assert actions(given, "mcp", "io__get", "io__set") == letters
    tools = [Tool(name, "", {}, str, permission="mcp") for name in ("io__get", "io__set")]
    assert [each not in given.offered(tools) for each in tools] == [x == "d" for x in letters]


def test_a_kind_is_for_all_of_its_tools_and_asks_once(ws: Path) -> None:
    rules = {
        "edit": {"*": "allow", "*.lock": "deny"},
        "read": {"f": "ask", "sub": "deny"},
    }
    calls: list[tuple[str, Any]] = [
        *(
            (
                "write",
                {"path": path, "content": ""},
            )
            for path in ("a.lock", "a")
        ),
        *(
            (
                "grep",
                {"pattern": "x", "path": path},
            )
            for path in ("f", "sub")
        ),
        *(("ls", {"path": "sub"}), ("ls", {})),
    ]
    given = permissions(rules, can_ask=True)
    found, asked = played(
        ws,
        given,
        *calls,
        answer=lambda event: event.reply("once"),
    )
    denied = [text.startswith("Denied") for text in found]
    assert denied == [True, False, False, True, True, False]
    assert [(each.permission, each.pattern) for each in asked] == [("read", "f")]


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({}, "Denied: the user refused"),
        ({"deploy": "allow"}, "deployed to prod"),
        ({"deploy": {"*prod*": "allow"}}, "deployed to prod"),
        ({"*": "allow"}, "deployed to prod"),
        ({"deploy": "ask"}, "Denied: the user refused"),
        ({"deploy": {"*prod*": "deny"}}, "Denied: a rule denies"),
    ],
)
def test_a_tool_that_declares_nothing_asks_by_its_name(ws: Path, rules: Any, text: str) -> None:
    @tool
    def deploy(to: str) -> str:
        """Deploy.

        to: where
        """
        return f"deployed to {to}"

    given = permissions(rules, can_ask=True)
    call = ("deploy", {"to": "prod"})
    found, asked = played(
        ws,
        given,
        call,
        tools=[deploy],
        answer=lambda event: event.reply("no"),
    )
    assert found[0].startswith(text)
    kinds = [(each.permission, json.loads(each.pattern)) for each in asked]
    assert kinds == [("deploy", {"to": "prod"})] * ("refused" in text)
    with serve(Reply("", calls=[call]), Reply("Done.")) as server:  # without permissions
        ask(server, tools=[deploy])
        assert results(server) == ["deployed to prod"]


@pytest.mark.parametrize(
    ("options", "rules", "asks"),
    [
        ({"permission": "web"}, {}, ["web: {"]),
        ({"permission": "web"}, {"web": "allow"}, []),
        ({"permission": "web"}, {"fetch": "allow"}, ["web: {"]),
        ({"permission": "web", "default": "allow"}, {}, []),
        ({"permission": "web", "default": "allow"}, {"web": "ask"}, ["web: {"]),
        ({"default": "allow"}, {}, []),
        ({"permission": "read"}, {}, ["read: ."]),
        ({"permission": "read", "default": "allow"}, {}, []),
        ({"permission": "web", "asks_itself": True}, {}, ["web: a.org"]),
        (
            {"permission": "web", "asks_itself": True},
            {"web": {"a.*": "allow"}},
            [],
        ),
        ({"permission": "web", "asks_itself": True, "default": "allow"}, {}, []),
        ({"asks_itself": True}, {}, ["web: a.org"]),  # no kind that anyone knows
    ],
)
def test_a_tool_carries_its_permission_and_its_default(
    ws: Path, options: Any, rules: Any, asks: list[str]
) -> None:
    @tool(**options)
    def fetch(url: str, ctx: ToolContext) -> Generator[Event, None, str]:
        """Fetch.

        url: where
        """
        if options.get("asks_itself"):
            yield from ctx.ask("web", url)
        return "fetched"

    given = permissions(rules, can_ask=True)
    call = ("fetch", {"url": "a.org"})
    yes = lambda event: event.reply("once")  # noqa: E731
    found, asked = played(ws, given, call, tools=[fetch], answer=yes)
    assert found == ["fetched"]
    shown = [f"{each.permission}: {each.pattern}" for each in asked]
    assert len(shown) == len(asks), shown
    assert all(map(str.startswith, shown, asks)), shown
    child = given.child(rules_of({"web": "allow"}))
    assert len(
        played(
            ws,
            child,
            call,
            tools=[fetch],
            answer=yes,
        )[1]
    ) == len(asks)
    plan = Permissions(agent=BUILT_IN["plan"].rules, yolo=True, can_ask=True)
    planned = played(
        ws,
        plan,
        call,
        tools=[fetch],
        answer=yes,
    )[1]
    assert len(planned) == (options.get("permission") != "read"), "whatever it declares"


def test_every_built_in_tool_declares_its_permission() -> None:
    """What declares none asks by its own name, which is no kind that the documents know."""
    found: dict[str, Tool] = {
        "task": Subagents(
            [BUILT_IN["general"]],
            pytest.fail,
        ).tool
    }
    for package in coder.tools, coder.agent:
        for each in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            members = vars(importlib.import_module(each.name)).values()
            found |= {made.name: made for made in members if isinstance(made, Tool)}
    assert {made.name for made in (*parts.TOOLS, *parts.PATCHING)} < {*found}
    assert [name for name, made in found.items() if not made.permission] == [], (
        'declare it: @tool(permission="KIND", default="ask")'
    )
    defaults = {made.permission: made.default for made in found.values()}
    allowed = ["read", "task", "todo", "ask_user"]
    assert defaults == dict.fromkeys(["edit", "bash"], "ask") | dict.fromkeys(allowed, "allow"), (
        "add a new kind here, with its default"
    )


def test_a_default_is_a_word_that_is_known() -> None:
    with pytest.raises(TypeError, match="tool str: default has to be allow or ask, not 'alow'"):
        tool(name="str", default="alow")(lambda: "")  # type: ignore[call-overload]


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

    given = permissions(rules, can_ask=can_ask)
    for hooks in given, given.child([]):
        with serve(
            *[Reply("", calls=[("ls", {})])] * 3,
            Reply("Done."),
        ) as server:
            ask(
                server,
                tools=Toolset([ls], cwd=ws),
                hooks=hooks,
                each=each,
            )
            assert results(server)[2].startswith("Not run") != runs


def test_a_search_passes_over_what_may_not_be_read_unasked(ws: Path) -> None:
    for name in ("secret", "open", ".env"):
        (ws / name).write_text("needle")
    paths: list[dict[str, str]] = [
        {},
        {"path": "secret"},
        {"path": ".env"},
    ]
    calls = [("grep", {"pattern": "needle"} | path) for path in paths]
    for action in ("deny", "ask"):
        given = permissions({"read": {"secret": action}})
        everywhere, secret, env = played(ws, given, *calls)[0]
        assert everywhere == "open\n1:needle"
        assert secret.startswith("Denied")
        assert env.startswith("Denied")
    for who in ({"can_ask": True}, {"yolo": True}):
        given = permissions({"read": "ask"}, **who)
        yes = played(
            ws,
            given,
            calls[0],
            answer=lambda asked: asked.reply("once"),
        )
        assert yes[0][0] == "open\n1:needle\n\nsecret\n1:needle"
        assert (
            len(
                played(
                    ws,
                    given,
                    calls[2],
                    answer=lambda asked: asked.reply("once"),
                )[1]
            )
            < 2
        )
    given = permissions({"read": "allow"}, yolo=True)
    counts = [text.count("needle") for text in played(ws, given, *calls)[0]]
    assert counts == [2, 1, 1], "-y answers for a file that is named, not for a search"


@pytest.mark.parametrize("agent", ["plan", "explore", "build"])
def test_every_agent_looks_around_without_a_question(ws: Path, agent: str) -> None:
    given = Permissions(agent=BUILT_IN[agent].rules, can_ask=True)
    calls = [
        ("read", {"path": "f"}),
        ("grep", {"pattern": "x"}),
        ("glob", {"pattern": "*"}),
    ]
    found, asked = played(ws, given, *calls, ("ls", {}))
    assert asked == []
    assert not [text for text in found if text.startswith("Denied")]
