"""Ways around the permissions, group PRM of the reliability list: a bypass is seen by the file PWN.

The other cases: PRM-17 in test_authority.py, PRM-21 in test_cases_sec.py, PRM-26 and 27 in
test_subagent.py, PRM-30 and 31 in test_cases_trm.py, PRM-32 in test_shell.py. Attacks of one line
are tried in bash itself first, so that a case cannot pass by not working.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from coder.devtools.scripted import Reply
from coder.events import Event, PermissionAsked
from coder.permissions.permissions import Permissions
from coder.permissions.rules import rules_of
from coder.tools.bash import bash
from coder.toolset import Toolset
from tests.harness import ask, commands, results, serve, shell
from tests.terminal import OneShot, Place, promptly

READING: dict[str, Any] = {
    "*": "ask",
    "bash": {"ls *": "allow", "echo *": "allow", "cat *": "allow", "git status *": "allow"},
}
NO_TOUCH: dict[str, Any] = {"bash": {"*": "allow", "touch *": "deny"}}
ASKED = "no user can be asked here"
DENIED = "a rule denies"
SCRIPT = "#!/bin/sh\ntouch PWN\n"


@pytest.fixture
def ws(tmp_path: Path) -> Path:
    return prepare(tmp_path / "ws")


def prepare(ws: Path) -> Path:
    """A folder with a file, and a program that makes PWN."""
    ws.mkdir(parents=True, exist_ok=True)
    (ws / "f").write_text("b\na\n")
    (ws / "x.sh").write_text(SCRIPT)
    (ws / "x.sh").chmod(0o755)
    return ws


def repository(ws: Path) -> Path:
    """With a change that `git diff` shows."""
    prepare(ws)
    clean = {
        "PATH": os.environ["PATH"],
        "HOME": str(ws),
        "GIT_CONFIG_NOSYSTEM": "1",
    }
    user = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (
        ["init", "-q"],
        ["add", "f"],
        ["commit", "-qm", "one"],
    ):
        subprocess.run(
            ["git", *user, *arguments],
            cwd=ws,
            env=clean,
            check=True,
        )
    (ws / "f").write_text("other\n")
    return ws


def ran(
    ws: Path,
    commands: Iterable[Any],
    permissions: Permissions,
    each: Callable[[Event], None] | None = None,
) -> list[str]:
    """What a run makes of these commands, or arguments of `bash`: one answer, a call each."""
    arguments = [each if isinstance(each, dict) else {"command": each} for each in commands]
    calls = [("bash", json.dumps(each)) for each in arguments]
    with (
        serve(
            Reply(calls=calls),
            Reply("Done."),
        ) as server,
        promptly(60),
    ):
        tools = Toolset([bash], cwd=ws)
        model = {"context_window": 9_000_000}
        ask(server, tools=tools, hooks=permissions, each=each, model=model)
        return results(server)


def works(
    folder: Path, commands: Iterable[str], before: Callable[[Path], Path] = prepare
) -> list[str]:
    """Which of these make PWN, if nothing hinders them."""
    found = []
    for at, command in enumerate(commands):
        place = before(folder / str(at))
        shell(place, command)
        found += [command] if (place / "PWN").exists() else []
    return found


def check_blocked(ws: Path, commands: list[str], rules: dict[str, Any], text: str = ASKED) -> None:
    found = ran(ws, commands, Permissions(rules_of(rules)))
    assert not (ws / "PWN").exists()
    assert [command for command, result in zip(commands, found) if text not in result] == []
    assert len(found) == len(commands)


# ---- one line that is more than it looks ---------------------------------------------------------

LINES = {
    "PRM-01": "ls && touch PWN ¦ ls || touch PWN ¦ ls; touch PWN",
    "PRM-02": "ls | tee PWN ¦ ls | xargs touch PWN",
    "PRM-03": "ls\ntouch PWN ¦ ls\r\ntouch PWN ¦ ls\rtouch PWN",
    "PRM-04": "ls & touch PWN ¦ ls |& tee PWN",
    "PRM-05": 'ls $(touch PWN) ¦ ls `touch PWN` ¦ echo "$(touch PWN)" ¦ echo "`touch PWN`" ¦ $(touch PWN)'
    " ¦ `touch PWN`",
    "PRM-06": "cat <(touch PWN) ¦ echo x > >(tee PWN)",
    "PRM-07": "echo x > PWN ¦ echo x >PWN ¦ echo x >> PWN ¦ echo x >| PWN ¦ echo x &> PWN ¦ echo x >& PWN"
    " ¦ echo x <> PWN ¦ echo x 2> PWN",
    "PRM-08": 'cat <<E\n$(touch PWN)\nE ¦ cat <<< $(touch PWN) ¦ cat <<< "$(touch PWN)"',
    "PRM-23": "ls #'\ntouch PWN #'",
}
NO_ATTACK = {"ls || touch PWN", "ls\rtouch PWN"}  # bash does not take it as it looks


@pytest.mark.case(
    "PRM-01", "PRM-02", "PRM-03", "PRM-04", "PRM-05", "PRM-06", "PRM-07", "PRM-08", "PRM-23"
)
@pytest.mark.parametrize("case", LINES)
def test_a_line_that_only_begins_well_is_asked(tmp_path: Path, ws: Path, case: str) -> None:
    lines = LINES[case].split(" ¦ ")
    attacks = [line for line in lines if line not in NO_ATTACK]
    assert works(tmp_path, attacks) == attacks
    check_blocked(ws, lines, READING)


@pytest.mark.case("PRM-16")
def test_what_the_users_file_allows_runs_and_a_pattern_fits_it_all(tmp_path: Path) -> None:
    """Through the program; else the cases would prove nothing."""
    lines = ["ls", "cat f | cat f", "echo 'a;b' && ls 2>&1", "lsof", "git statusx"]
    with serve(Reply(calls=commands(*lines)), Reply("x")) as server:
        place = Place(tmp_path, server)
        prepare(place.ws)
        path = place.home / ".config" / "coder" / "permissions.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(READING | {"bash": READING["bash"] | {"git status*": "allow"}}))
        with OneShot(tmp_path, server, "go") as run:
            assert run.end() == 0, run.err
    found = results(server)
    assert found[:3] == ["f\nx.sh", "b\na", "a;b\nf\nx.sh"]
    assert ASKED in found[3]
    assert "is not a git command" in found[4], "a star without a blank goes on"


@pytest.mark.case("PRM-09", "PRM-10")
def test_a_variable_or_an_option_in_front_makes_another_command_of_it(tmp_path: Path) -> None:
    rules = {"*": "ask", "bash": {**READING["bash"], "git diff *": "allow"}}
    attacks = ["GIT_EXTERNAL_DIFF=./x.sh git diff", "git -c core.fsmonitor=./x.sh status"]
    attacks += ["git -C . -c alias.s='!./x.sh' s", "git status -h; touch PWN"]
    assert works(tmp_path, attacks, repository) == attacks
    more = ["PAGER=./x.sh ls", "env GIT_EXTERNAL_DIFF=./x.sh git diff"]
    check_blocked(repository(tmp_path / "ws"), [*attacks, *more], rules)


@pytest.mark.case("PRM-11")
def test_a_repository_cannot_make_the_agent_run_its_programs(tmp_path: Path) -> None:
    def hostile(ws: Path) -> Path:
        hooks = repository(ws) / "hooks"
        hooks.mkdir()
        for name in ("pre-commit", "post-checkout", "post-index-change", "reference-transaction"):
            (hooks / name).write_text(SCRIPT)
            (hooks / name).chmod(0o755)
        (ws / ".gitattributes").write_text("* diff=x filter=x\n")
        with (ws / ".git" / "config").open("a") as config:
            config.write(
                "[core]\nfsmonitor = ./x.sh\nhooksPath = hooks\npager = ./x.sh\n"
                '[diff]\nexternal = ./x.sh\n[diff "x"]\ntextconv = ./x.sh\ncommand = ./x.sh\n'
                '[filter "x"]\nclean = ./x.sh\nsmudge = ./x.sh\n'
            )
        return ws

    assert works(tmp_path / "attack", ["git status"], hostile)
    calls = [
        ("write", {"path": "new", "content": "x"}),
        ("grep", {"pattern": "o"}),
        ("ls", {}),
    ]
    with serve(Reply(calls=calls), Reply("Hello.")) as server:
        hostile(Place(tmp_path, server).ws)
        with OneShot(tmp_path, server, "-y", "hello") as run:
            assert run.end() == 0
    assert (run.ws / "new").exists()
    assert not (run.ws / "PWN").exists()


@pytest.mark.case("PRM-12")
def test_programs_that_can_write_or_run_are_on_no_list(tmp_path: Path, ws: Path) -> None:
    lines = [
        *("find . -exec touch PWN ';'", "find . -fprint PWN", "sed 'w PWN' f", "sort -o PWN f"),
        *("sed '1e touch PWN' f", "tee PWN", "awk 'BEGIN{system(\"touch PWN\")}'", "./x.sh"),
        "tar cf /dev/null --checkpoint=1 --checkpoint-action=exec=./x.sh f",
        *("rg --pre ./x.sh a", "find . -name f -delete", "git status"),
    ]
    assert works(tmp_path, lines[:6]) == lines[:6]
    check_blocked(ws, lines, {})
    assert (ws / "f").exists()


@pytest.mark.case("PRM-13", "PRM-23")
def test_what_bash_would_expand_or_not_close_is_asked_about(ws: Path) -> None:
    lines = ["cat${IFS}f", "echo ${x@P}", "$'ls'", "ls {a,b}", "ls *", "echo $((1))", "echo ~"]
    check_blocked(ws, [*lines, 'echo "a" "b', "echo 'a"], READING)


@pytest.mark.case("PRM-14")
def test_a_denied_program_is_denied_in_every_form(tmp_path: Path, ws: Path) -> None:
    """More forms: test_shell.py."""
    attacks = [
        *(r"t\ouch PWN", "/usr/bin/touch PWN", "env -S 'touch PWN'", "timeout 1 touch PWN"),
        *("bash +e -c 'touch PWN'", "echo PWN | xargs touch", r"find f -exec touch PWN \;"),
        *("X=1 touch PWN", "if true; then touch PWN; fi", "cat <(touch PWN)", "> y touch PWN"),
    ]
    assert works(tmp_path, attacks) == attacks
    lines = [*attacks, "su '-ctouch PWN'", "script --command='touch PWN'"]
    check_blocked(ws, lines, NO_TOUCH, DENIED)


@pytest.mark.case("PRM-15", "PRM-33")
def test_long_and_deep_lines_are_decided_at_once(ws: Path) -> None:
    """The others can be told from nothing: they are asked about."""
    long = "true && " * 100_000 + "touch PWN"
    deep = "(" * 100_000 + "touch PWN" + ")" * 100_000
    with promptly(60):
        for line in ("true && " * 60 + "touch PWN", long, deep):
            assert Permissions(rules_of(NO_TOUCH)).decide("bash", line, ws).action == "deny"
        for line in (deep.replace("touch PWN", ""), "echo " + "a" * 1_000_000):
            assert Permissions(rules_of(READING)).decide("bash", line, ws).action == "ask"


@pytest.mark.case("PRM-20")
def test_no_variable_lasts_from_one_command_to_the_next(tmp_path: Path) -> None:
    ws = repository(tmp_path / "ws")
    rules = {"bash": {"git *": "allow", "export *": "allow"}}
    lines = ["export GIT_EXTERNAL_DIFF=./x.sh", "git diff"]
    first, second = ran(ws, lines, Permissions(rules_of(rules)))
    assert first.startswith("(no output")
    assert "+other" in second
    assert not (ws / "PWN").exists()


# ---- asking --------------------------------------------------------------------------------------


@pytest.mark.case("PRM-25")
def test_what_is_shown_is_what_runs_and_there_is_no_other_folder(ws: Path) -> None:
    command = "printf '%s' 'a\u202eb\u200b é \t$x' > made; pwd"
    shown: list[str] = []

    def each(event: Event) -> None:
        if isinstance(event, PermissionAsked):
            shown.append(event.pattern)
            event.reply("once")

    elsewhere = {"command": "touch PWN", "cwd": "..", "workdir": str(ws.parent)}
    found = ran(ws, [command, elsewhere], Permissions(can_ask=True), each)
    assert shown[0] == command
    assert str(ws) in found[0]
    assert (ws / "made").read_text() == "a\u202eb\u200b é \t$x"
    assert not (ws.parent / "PWN").exists()


@pytest.mark.case("PRM-29")
def test_a_command_that_is_no_text_is_not_run(ws: Path) -> None:
    wrong: list[Any] = [{"command": each} for each in (["touch", 1], {"x": "touch PWN"}, None, [])]
    wrong += [{"command": "echo fine", "cmd": "touch PWN"}]
    found = ran(ws, wrong, Permissions(yolo=True))
    assert not (ws / "PWN").exists()
    assert all(result.startswith("Error: bash") for result in found), found


@pytest.mark.case("PRM-29")
@pytest.mark.parametrize(
    "given",
    [
        {"command": ["touch", "PWN"]},
        {"cmd": "touch PWN"},
        {"command": ["bash", "-lc", "touch PWN"]},
    ],
)
def test_a_command_in_another_form_is_decided_on_by_its_text(ws: Path, given: Any) -> None:
    asked = list[str]()

    def each(event: Event) -> None:
        if isinstance(event, PermissionAsked):
            asked.append(event.pattern)

    ran(ws, [given], Permissions(can_ask=True), each)
    assert asked == ["touch PWN"]
    denied = Permissions(rules_of({"bash": {"touch *": "deny"}}), yolo=True)
    assert ran(ws, [given], denied)[0].startswith("Denied")
    assert not (ws / "PWN").exists()
