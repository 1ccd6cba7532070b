"""Ways around the permissions, group PRM of the reliability list, through the real program: a bypass is seen by the file PWN.

The other cases of the group: PRM-17 in test_authority.py, PRM-26 and 27 in test_subagent.py, PRM-30 and 31 in test_cases_trm.py, PRM-32
in test_lexer.py. Attacks that are no more than a line are tried in bash itself first, so that a case cannot pass by not working.
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
from coder.history import text_of
from coder.permissions.permissions import Permissions
from coder.permissions.rules import rules_of
from coder.tools.bash import bash
from coder.toolset import Toolset
from tests.harness import ask, serve
from tests.terminal import OneShot, Place, promptly

READING: dict[str, Any] = {
    "*": "ask",
    "bash": {"ls *": "allow", "echo *": "allow", "cat *": "allow", "git status *": "allow"},
}
NO_TOUCH: dict[str, Any] = {"bash": {"*": "allow", "touch *": "deny"}}
ASKED, DENIED = "nobody can be asked here", "a rule denies"
SCRIPT = "#!/bin/sh\ntouch PWN\n"


def prepare(ws: Path) -> None:
    """A folder with a file, and a program that makes PWN."""
    ws.mkdir(parents=True, exist_ok=True)
    (ws / "f").write_text("b\na\n")
    (ws / "x.sh").write_text(SCRIPT)
    (ws / "x.sh").chmod(0o755)


def git(ws: Path, *arguments: str) -> None:
    clean = {"PATH": os.environ["PATH"], "HOME": str(ws), "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
        cwd=ws,
        env=clean,
        check=True,
        capture_output=True,
    )


def repository(ws: Path) -> None:
    """With a change that `git diff` shows."""
    prepare(ws)
    git(ws, "init", "-q")
    git(ws, "add", "f")
    git(ws, "commit", "-qm", "one")
    (ws / "f").write_text("other\n")


def whole(arguments: Iterable[Any]) -> Reply:
    """Calls of bash in one event, however long they are."""
    calls = [
        {
            "index": at,
            "id": f"call{at:05}",
            "type": "function",
            "function": {"name": "bash", "arguments": json.dumps(each)},
        }
        for at, each in enumerate(arguments)
    ]
    choices = [
        {
            "index": 0,
            "delta": {"role": "assistant", "tool_calls": calls},
            "finish_reason": "tool_calls",
        }
    ]
    return Reply(
        chunks=[
            b"data: " + json.dumps({"choices": choices}).encode() + b"\n\n",
            b"data: [DONE]\n\n",
        ]
    )


def results(
    folder: Path,
    commands: Iterable[Any],
    rules: dict[str, Any] | None,
    *flags: str,
    before: Callable[[Path], None] = prepare,
    **environment: str,
) -> list[str]:
    """What a one-shot run makes of these commands, or arguments of `bash`, under rules of the user's file: one answer, a call each."""
    calls = [each if isinstance(each, dict) else {"command": each} for each in commands]
    with serve(whole(calls), Reply("Done.")) as server:
        place = Place(folder, server)
        before(place.ws)
        if rules is not None:
            path = place.home / ".config" / "coder" / "permissions.json"
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps(rules))
        with (
            promptly(60),
            OneShot(
                folder, server, "--context-window", "9000000", *flags, "go", **environment
            ) as run,
        ):
            assert run.end() == 0, run.err
        return [
            text_of(message)
            for message in server.requests[-1]["messages"]
            if message["role"] == "tool"
        ]


def works(folder: Path, command: str, before: Callable[[Path], None] = prepare) -> bool:
    """Does this make PWN, where nothing hinders it?"""
    before(folder)
    subprocess.run(
        ["/bin/bash", "--noprofile", "--norc", "-c", command],
        cwd=folder,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=30,
    )
    return (folder / "PWN").exists()


def check_blocked(
    folder: Path,
    commands: Iterable[str],
    rules: dict[str, Any] | None,
    said: str = ASKED,
    before: Callable[[Path], None] = prepare,
) -> None:
    commands = list(commands)
    found = results(folder, commands, rules, before=before)
    assert not (folder / "ws" / "PWN").exists()
    assert [
        command for command, result in zip(commands, found) if said not in result
    ] == [] and len(found) == len(commands)


# ---- one line that is more than it looks -----------------------------------------------------------------

LINES = {
    "PRM-01": ["ls && touch PWN", "ls || touch PWN", "ls; touch PWN"],
    "PRM-02": ["ls | tee PWN", "ls | xargs touch PWN"],
    "PRM-03": ["ls\ntouch PWN", "ls\r\ntouch PWN", "ls\rtouch PWN"],
    "PRM-04": ["ls & touch PWN", "ls |& tee PWN"],
    "PRM-05": [
        "ls $(touch PWN)",
        "ls `touch PWN`",
        'echo "$(touch PWN)"',
        'echo "`touch PWN`"',
        "$(touch PWN)",
        "`touch PWN`",
    ],
    "PRM-06": ["cat <(touch PWN)", "echo x > >(tee PWN)"],
    "PRM-07": [
        "echo x > PWN",
        "echo x >PWN",
        "echo x >> PWN",
        "echo x >| PWN",
        "echo x &> PWN",
        "echo x >& PWN",
        "echo x <> PWN",
        "echo x 2> PWN",
    ],
    "PRM-08": ["cat <<E\n$(touch PWN)\nE", "cat <<< $(touch PWN)", 'cat <<< "$(touch PWN)"'],
    "PRM-23": ["ls #'\ntouch PWN #'"],
}
NO_ATTACK = {"ls || touch PWN", "ls\rtouch PWN"}  # bash does not take it as it looks


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(LINES["PRM-01"], marks=pytest.mark.case("PRM-01"), id="PRM-01"),
        pytest.param(LINES["PRM-02"], marks=pytest.mark.case("PRM-02"), id="PRM-02"),
        pytest.param(LINES["PRM-03"], marks=pytest.mark.case("PRM-03"), id="PRM-03"),
        pytest.param(LINES["PRM-04"], marks=pytest.mark.case("PRM-04"), id="PRM-04"),
        pytest.param(LINES["PRM-05"], marks=pytest.mark.case("PRM-05"), id="PRM-05"),
        pytest.param(LINES["PRM-06"], marks=pytest.mark.case("PRM-06"), id="PRM-06"),
        pytest.param(LINES["PRM-07"], marks=pytest.mark.case("PRM-07"), id="PRM-07"),
        pytest.param(LINES["PRM-08"], marks=pytest.mark.case("PRM-08"), id="PRM-08"),
        pytest.param(LINES["PRM-23"], marks=pytest.mark.case("PRM-23"), id="PRM-23"),
    ],
)
def test_a_line_that_begins_like_an_allowed_command_is_asked_about(
    tmp_path: Path, lines: list[str]
) -> None:
    assert [
        line
        for at, line in enumerate(lines)
        if line not in NO_ATTACK and not works(tmp_path / str(at), line)
    ] == []
    check_blocked(tmp_path, lines, READING)


def test_what_the_rules_allow_runs(tmp_path: Path) -> None:
    """Else the cases would prove nothing."""
    assert results(
        tmp_path, ["ls", "ls -a f", "cat f | cat f", "echo 'a;b' && ls 2>&1"], READING
    ) == ["f\nx.sh", "f", "b\na", "a;b\nf\nx.sh"]


@pytest.mark.case("PRM-09", "PRM-10")
def test_a_variable_or_an_option_in_front_makes_another_command_of_it(tmp_path: Path) -> None:
    rules = {"*": "ask", "bash": {**READING["bash"], "git diff *": "allow"}}
    attacks = [
        "GIT_EXTERNAL_DIFF=./x.sh git diff",
        "git -c core.fsmonitor=./x.sh status",
        "git -C . -c alias.s='!./x.sh' s",
        "git status -h; touch PWN",
    ]
    assert [
        line for at, line in enumerate(attacks) if not works(tmp_path / str(at), line, repository)
    ] == []
    check_blocked(
        tmp_path,
        [*attacks, "PAGER=./x.sh ls", "env GIT_EXTERNAL_DIFF=./x.sh git diff"],
        rules,
        before=repository,
    )


@pytest.mark.case("PRM-11")
def test_a_repository_cannot_make_the_agent_run_its_programs(tmp_path: Path) -> None:
    def hostile(ws: Path) -> None:
        repository(ws)
        hooks = ws / "hooks"
        hooks.mkdir()
        for name in (
            "pre-commit",
            "post-checkout",
            "post-index-change",
            "reference-transaction",
            "post-commit",
            "fsmonitor-watchman",
        ):
            (hooks / name).write_text(SCRIPT)
            (hooks / name).chmod(0o755)
        (ws / ".gitattributes").write_text("* diff=x filter=x\n")
        with (ws / ".git" / "config").open("a") as config:
            config.write(
                '[core]\nfsmonitor = ./x.sh\nhooksPath = hooks\npager = ./x.sh\n[diff]\nexternal = ./x.sh\n[diff "x"]\n'
                'textconv = ./x.sh\ncommand = ./x.sh\n[filter "x"]\nclean = ./x.sh\nsmudge = ./x.sh\n'
            )

    assert works(tmp_path / "attack", "git status", hostile)
    with serve(
        Reply(
            calls=[
                ("write", {"path": "new", "content": "x"}),
                ("grep", {"pattern": "other"}),
                ("ls", {}),
            ]
        ),
        Reply("Hello."),
    ) as server:
        hostile(Place(tmp_path, server).ws)
        with OneShot(tmp_path, server, "-y", "hello") as run:
            assert run.end() == 0
    assert (run.ws / "new").exists() and not (run.ws / "PWN").exists()


@pytest.mark.case("PRM-12")
def test_programs_that_can_write_or_run_something_are_on_no_built_in_list(tmp_path: Path) -> None:
    lines = [
        "find . -exec touch PWN ';'",
        "find . -name f -delete",
        "find . -fprint PWN",
        "sed 'w PWN' f",
        "sed '1e touch PWN' f",
        "rg --pre ./x.sh a",
        "sort -o PWN f",
        "sort --compress-program ./x.sh f",
        "tar cf /dev/null --checkpoint=1 --checkpoint-action=exec=./x.sh f",
        "awk 'BEGIN{system(\"touch PWN\")}'",
        "uniq f PWN",
        "tee PWN",
        "git status",
        "xargs touch PWN",
        "./x.sh",
        "touch PWN",
    ]
    check_blocked(tmp_path, lines, None)
    assert (tmp_path / "ws" / "f").exists()
    assert (
        works(tmp_path / "a", lines[0])
        and works(tmp_path / "b", lines[2])
        and works(tmp_path / "c", lines[4])
    )


@pytest.mark.case("PRM-13", "PRM-23")
def test_what_bash_would_expand_or_not_close_is_asked_about(tmp_path: Path) -> None:
    check_blocked(
        tmp_path,
        [
            "cat${IFS}f",
            "echo ${x@P}",
            "echo ${x:=v}",
            "$'ls'",
            "ls {a,b}",
            "ls *",
            "echo $((1))",
            "echo ~",
            "ls ?",
            'echo "a" "b',
            "echo 'a",
        ],
        READING,
    )


# ---- a denied program in disguise ------------------------------------------------------------------------

DISGUISES = [
    r"t\ouch PWN",
    "to''uch PWN",
    '"touch" PWN',
    "/usr/bin/touch PWN",
    "command touch PWN",
    "env touch PWN",
    "env -S 'touch PWN'",
    "nohup touch PWN",
    "timeout 1 touch PWN",
    "nice touch PWN",
    "time touch PWN",
    "exec touch PWN",
    "builtin eval touch PWN",
    "eval 'touch PWN'",
    "sh -c 'touch PWN'",
    "bash -lc 'touch PWN'",
    "echo PWN | xargs touch",
    "find f -exec touch PWN ';'",
    r"find f -exec touch PWN \;",
    "true; touch PWN",
    "X=1 touch PWN",
    "if true; then touch PWN; fi",
    "$(touch PWN)",
    "cat <(touch PWN)",
    "touch PWN &",
    "> y touch PWN",
]


@pytest.mark.case("PRM-14")
def test_a_denied_program_is_denied_in_every_form(tmp_path: Path) -> None:
    assert [line for at, line in enumerate(DISGUISES) if not works(tmp_path / str(at), line)] == []
    check_blocked(tmp_path, DISGUISES, NO_TOUCH, DENIED)


@pytest.mark.case("PRM-15", "PRM-33")
def test_long_and_deep_lines_are_decided_at_once(tmp_path: Path) -> None:
    """The last two can be told from nothing: they are asked about, which is a no here."""
    lines = [
        "true && " * 60 + "touch PWN",
        "true && " * 100_000 + "touch PWN",
        "(" * 100_000 + "touch PWN" + ")" * 100_000,
    ]
    check_blocked(tmp_path / "denied", lines, NO_TOUCH, DENIED)
    check_blocked(
        tmp_path / "asked",
        ["(" * 100_000 + ")" * 100_000, "echo " + "a" * 1_000_000, "ls $(" + "a" * 1_000_000 + ")"],
        READING,
    )


@pytest.mark.case("PRM-16")
def test_a_pattern_fits_the_whole_command(tmp_path: Path) -> None:
    rules = {"*": "ask", "bash": {"ls": "allow", "git status*": "allow"}}
    ls, lsof, long, status, other = results(
        tmp_path, ["ls", "lsof", "ls -la", "git status -s", "git statusx"], rules, before=repository
    )
    assert ls == "f\nx.sh" and ASKED in lsof and ASKED in long
    assert "M f" in status and "is not a git command" in other, "a star without a blank goes on"


@pytest.mark.case("PRM-20")
def test_no_variable_lasts_from_one_command_to_the_next(tmp_path: Path) -> None:
    said = results(
        tmp_path,
        ["export GIT_EXTERNAL_DIFF=./x.sh", "git diff"],
        {"*": "ask", "bash": {"git *": "allow", "export *": "allow"}},
        before=repository,
    )
    assert said[0] == "(no output)" and "+other" in said[1]
    assert not (tmp_path / "ws" / "PWN").exists()


@pytest.mark.case("PRM-21")
def test_programs_and_start_files_of_the_folder_are_not_taken_for_the_systems(
    tmp_path: Path,
) -> None:
    def trap(ws: Path) -> None:
        prepare(ws)
        for name in ("ls", ".bashrc", ".bash_profile", ".profile", "env.sh"):
            (ws / name).write_text(SCRIPT)
            (ws / name).chmod(0o755)

    ws = tmp_path / "ws"
    [said] = results(
        tmp_path,
        ["ls"],
        READING,
        before=trap,
        PATH=f".:{os.environ['PATH']}",
        BASH_ENV=str(ws / "env.sh"),
        ENV=str(ws / "env.sh"),
    )
    assert not (ws / "PWN").exists() and "env.sh\nf\n" in said


# ---- asking ----------------------------------------------------------------------------------------------


@pytest.mark.case("PRM-24")
def test_a_yes_for_the_session_is_for_exactly_what_was_shown(tmp_path: Path) -> None:
    lines = ["ls -la", "ls -la", "ls -la; touch PWN", "touch PWN", "ls -la sub"]
    asked: list[str] = []

    def each(event: Event) -> None:
        if isinstance(event, PermissionAsked):
            asked.append(event.pattern)
            event.reply("always" if event.pattern == "ls -la" else "no")

    with serve(
        Reply(calls=[("bash", {"command": line}) for line in lines]), Reply("Done.")
    ) as server:
        ask(
            server,
            tools=Toolset([bash], cwd=tmp_path),
            hooks=Permissions(rules_of({"bash": "ask"}), can_ask=True),
            each=each,
        )
    assert asked == ["ls -la", *lines[2:]] and not (tmp_path / "PWN").exists()


@pytest.mark.case("PRM-25")
def test_what_is_shown_is_what_runs_and_there_is_no_other_folder(tmp_path: Path) -> None:
    command = "printf '%s' 'a\u202eb\u200b é \t$x' > made; pwd"
    shown: list[str] = []

    def each(event: Event) -> None:
        if isinstance(event, PermissionAsked):
            shown.append(event.pattern)
            event.reply("once")

    ws = tmp_path / "ws"
    ws.mkdir()
    calls = [
        ("bash", {"command": command}),
        ("bash", {"command": "touch PWN", "cwd": "..", "workdir": str(tmp_path)}),
    ]
    with serve(Reply(calls=calls), Reply("Done.")) as server:
        ask(server, tools=Toolset([bash], cwd=ws), hooks=Permissions(can_ask=True), each=each)
        said = [
            message["content"]
            for message in server.requests[-1]["messages"]
            if message["role"] == "tool"
        ]
    assert (
        shown[0] == command
        and (ws / "made").read_text() == "a\u202eb\u200b é \t$x"
        and str(ws) in said[0]
    )
    assert not (tmp_path / "PWN").exists()


@pytest.mark.case("PRM-29")
def test_a_command_that_is_no_text_is_not_run(tmp_path: Path) -> None:
    wrong = [
        {"command": ["touch", "PWN"]},
        {"command": {"x": "touch PWN"}},
        {"command": None},
        {"cmd": "touch PWN"},
        {"command": "echo fine", "cmd": "touch PWN"},
    ]
    found = results(tmp_path, wrong, None, "-y")
    assert not (tmp_path / "ws" / "PWN").exists()
    assert all(result.startswith("Error: bash") for result in found), found
