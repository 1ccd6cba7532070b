"""Files, by the program itself: what lies outside the workspace, and what is asked about each time.

Group FIL of the reliability list; its other cases are with the tools.
"""

from __future__ import annotations

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
