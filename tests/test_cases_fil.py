"""Files, by the program itself: what lies outside the workspace, what is no file, odd names, and what is asked about each time.

Group FIL of the reliability list; its other cases are with the tools, in test_files.py, test_edit.py, test_patch.py and test_search.py.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from coder.devtools.scripted import Reply, ScriptedServer
from tests.harness import serve
from tests.terminal import OneShot, Terminal

Call = tuple[str, dict[str, Any]]


def outcomes(server: ScriptedServer) -> list[str]:
    """What the model was told of its calls."""
    return [
        message["content"]
        for message in server.requests[-1]["messages"]
        if message["role"] == "tool"
    ]


def told(folder: Path, *calls: Call, arguments: tuple[str, ...] = (), **more: str) -> list[str]:
    """What the model is told of these calls, in one run without a terminal."""
    with (
        serve(Reply(calls=list(calls)), Reply("done")) as server,
        OneShot(folder, server, *arguments, "go", **more) as run,
    ):
        assert run.end() == 0, run.err
        assert len(outcomes(server)) == len(calls)
        return outcomes(server)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    }


def reading(*paths: str) -> list[Call]:
    return [("read", {"path": path}) for path in paths]


def writing(*paths: str) -> list[Call]:
    return [("write", {"path": path, "content": "PWN"}) for path in paths]


# ---- outside the workspace -----------------------------------------------------------------------------------


@pytest.mark.case("FIL-01", "FIL-02", "FIL-03")
def test_without_a_person_to_ask_nothing_outside_is_read_searched_or_listed(tmp_path: Path) -> None:
    for name in ("secret", "home/secret", "ws-evil/secret", "ws-evil/TOP-SECRET"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("TOP-SECRET words\n")
    (tmp_path / "ws" / "a").mkdir(parents=True)
    (tmp_path / "ws" / "l").symlink_to("../secret")
    evil = str(tmp_path / "ws-evil")
    paths = ["../secret", "a/../../secret", "~/secret", "l", "../ws-evil/secret", f"{evil}/secret"]
    calls = [
        *reading(*paths),
        *(("grep", {"pattern": "words", "path": path}) for path in (evil, "../ws-evil", "l")),
        ("glob", {"pattern": "*", "path": evil}),
        ("ls", {"path": evil}),
        ("glob", {"pattern": "../ws-evil/*"}),
        ("grep", {"pattern": "words"}),
    ]
    *outside, inside = told(tmp_path, *calls)
    assert "TOP-SECRET" not in "".join([*outside, inside])
    assert all(said.startswith("Denied: ") for said in outside[:-1]), outside
    assert "No files found" in outside[-1]


@pytest.mark.case("FIL-02", "FIL-03", "FIL-05", "FIL-07")
def test_nothing_outside_is_written_whatever_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "ws-evil").mkdir()
    (tmp_path / "out").write_text("old\n")
    (tmp_path / "ws").mkdir()
    for name, target in (("l", "../out"), ("dangling", "../PWN"), ("folder", "../ws-evil")):
        (tmp_path / "ws" / name).symlink_to(target)
    calls = [
        *reading("l"),
        *writing("l", "dangling", "folder/PWN", "../ws-evil/PWN", str(tmp_path / "PWN"), "~/PWN"),
        ("edit", {"path": "l", "old_string": "old", "new_string": "PWN"}),
    ]
    seen, *refused = told(tmp_path, *calls, arguments=("-y",))
    assert "old" in seen and all("outside the workspace" in said for said in refused), refused
    patches = [
        "*** Add File: ../PWN\n+x",
        f"*** Add File: {tmp_path}/PWN\n+x",
        "*** Update File: mine\n*** Move to: ../PWN\n-m\n+x",
        "*** Add File: dangling\n+x",
        "*** Delete File: ../out",
    ]
    (tmp_path / "ws" / "mine").write_text("m\n")
    whole = [
        (
            "apply_patch",
            {"patch": f"*** Begin Patch\n*** Add File: good\n+x\n{patch}\n*** End Patch"},
        )
        for patch in patches
    ]
    assert all(
        "No file was changed" in said
        for said in told(tmp_path, *whole, arguments=("-y", "-m", "gpt-5"))
    )
    assert {
        name: data for name, data in contents(tmp_path).items() if not name.startswith("home/")
    } == {"out": b"old\n", "ws/mine": b"m\n"}
    assert not os.path.lexists(tmp_path / "home" / "PWN")


# ---- asked about each time -----------------------------------------------------------------------------------

ORDERS = (
    ".git/hooks/pre-commit",
    ".git/config",
    "sub/.git/config",
    "door/post-commit",
    ".bashrc",
    "sub/.profile",
    ".config/coder/.env",
    ".config/coder/hooks.json",
    ".config/coder/plugins/x.py",
)


def home_with_a_repository(folder: Path) -> Path:
    """A workspace that is the home as well, so that all of it lies inside."""
    ws = folder / "ws"
    (ws / ".git" / "hooks").mkdir(parents=True)
    (ws / "door").symlink_to(".git/hooks")
    return ws


@pytest.mark.case("FIL-31")
def test_where_edits_are_allowed_what_gives_orders_is_not_written_unasked(tmp_path: Path) -> None:
    ws = home_with_a_repository(tmp_path)
    places = {"HOME": str(ws), "XDG_CONFIG_HOME": str(ws / ".config")}
    *orders, plain = told(
        tmp_path, *writing(*ORDERS, "plain"), arguments=("--allow", "edit"), **places
    )
    assert plain.startswith("Created ") and all(said.startswith("Denied: ") for said in orders), (
        orders
    )
    assert list(contents(ws)) == ["plain"]


@pytest.mark.case("FIL-31")
def test_a_yes_to_all_edits_of_the_session_does_not_hold_for_what_gives_orders(
    tmp_path: Path,
) -> None:
    ws = home_with_a_repository(tmp_path)
    answers = [
        Reply(calls=writing("one", "two", ".git/hooks/pre-commit", ".git/config", ".bashrc")),
        Reply("done"),
    ]
    with serve(*answers) as server, Terminal(tmp_path, server) as session:
        session.enter("go")
        session.expect("[y]es")
        session.enter("a")
        for name in ("pre-commit", "config", ".bashrc"):
            session.expect(name)
            session.expect("[y]es")
            session.enter("n")
        session.prompt()
        assert [said.split(":")[0] for said in outcomes(server)] == [
            "Created one (1 lines).",
            "Created two (1 lines).",
            *["Denied"] * 3,
        ]
    assert sorted(contents(ws)) == ["one", "two"]


@pytest.mark.skipif(not Path("/proc/self/exe").is_symlink(), reason="no /proc")
def test_a_link_that_cannot_be_read_is_an_error_result_and_the_run_goes_on(tmp_path: Path) -> None:
    """As while it is replaced: it is there, and reading it fails. That of a process which has ended always does."""
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    (tmp_path / "ws" / "sub").mkdir(parents=True)
    (tmp_path / "ws" / "sub" / "file").write_text("words\n")
    for name in ("l", "AGENTS.md", "sub/AGENTS.md"):
        (tmp_path / "ws" / name).symlink_to(f"/proc/{ended.pid}/exe")
    links = [
        *reading("l"),
        *writing("l", "l/a"),
        ("ls", {"path": "l"}),
        ("grep", {"pattern": "x", "path": "l"}),
        ("edit", {"path": "l", "old_string": "a", "new_string": "b"}),
        ("bash", {"command": "cat l"}),
    ]
    shown, *errors = told(tmp_path, *reading("sub/file"), *links)
    ended.wait()
    assert shown == "1\twords"
    assert all(
        each.startswith("Error: ") and "cannot be resolved: No such file" in each for each in errors
    ), errors
