"""Commands in the real program, group PRC of the reliability list; tests/test_processes.py has the rest of the group."""

from __future__ import annotations

from pathlib import Path

import pytest

from coder.devtools.scripted import Reply
from tests.harness import serve
from tests.terminal import OneShot, promptly

FINE = Reply("All is well.")


def results_of(folder: Path, *calls: tuple[str, dict[str, object]]) -> list[str]:
    """What each call of one answer came to, in a run that may do everything."""
    with serve(Reply(calls=calls), FINE) as server, OneShot(folder, server, "-y", "go") as run:
        assert run.end() == 0, run.err
        return [
            message["content"]
            for message in server.requests[-1]["messages"]
            if message["role"] == "tool"
        ]


@pytest.mark.case("PRC-14", "PRC-16", "PRC-19", "PRC-20")
def test_what_a_command_does_to_itself_stays_its_own(tmp_path: Path) -> None:
    ws = tmp_path / "ws"
    ws.mkdir()
    for folder, word in ((tmp_path, "beside"), (ws, "inside")):
        (folder / "f").write_text(f"{word}\n")
    lines = [
        "ls /proc/self/fd",
        "kill -9 $$",
        r"printf '\xff\xfe\x00\x1b[31m'",
        "cd ..; export A=1; pwd",
        "pwd; echo $A; cat f",
    ]
    descriptors, killed, bytes_, there, here, read = results_of(
        tmp_path, *(("bash", {"command": line}) for line in lines), ("read", {"path": "./f"})
    )
    assert descriptors == "0\n1\n2\n3", "the last is the listing's own"
    assert killed == "[killed by signal 9 (SIGKILL)]"
    assert bytes_ == "\ufffd\ufffd\ufffd\x1b[31m"
    assert (
        (there, here) == (str(tmp_path), f"{ws}\n\ninside")
        and "inside" in read
        and "beside" not in read
    )


@pytest.mark.case("PRC-01", "PRC-02", "PRC-03")
def test_children_in_the_background_hold_nothing_up_and_end_with_the_program(
    tmp_path: Path,
) -> None:
    """The check at the end sees that none is left. What becomes of them is said to the model in the tool's own words."""
    lines = [
        "sleep 300 & echo hi",
        "(while :; do echo x; sleep .01; done) & echo hi",
        "setsid sleep 301 & echo hi",
        "pgrep -f 'sleep 30[01]'",
    ]
    with promptly(20):
        first, second, third, alive = results_of(
            tmp_path, *(("bash", {"command": line}) for line in lines)
        )
    assert first == third == "hi" and "hi" in second.split() and set(second.split()) <= {"hi", "x"}
    assert len(alive.split()) >= 2, "they live as long as the session"
