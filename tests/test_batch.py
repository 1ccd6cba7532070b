"""`coder batch` from outside: one row a task whatever dies, patches that apply, limits, bad
input."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from coder.devtools.scripted import Body, Reply, ScriptedServer
from coder.doors import batch
from tests.harness import shell
from tests.terminal import PATIENCE, OneShot, gone, until

Row = dict[str, Any]
YOLO = ("--", "-y")


def change_files(body: Body) -> Reply:
    """Two calls, which change the folder and commit a part of it, and an answer."""
    done = sum(message["role"] == "tool" for message in body["messages"])
    if done == 0:
        return Reply(calls=[("write", {"path": "new.txt", "content": "new\n"})])
    if done == 1:
        command = "echo two >> old.txt; rm gone.txt; git commit -qam 'by the task' || true"
        return Reply(calls=[("bash", {"command": command})])
    return Reply("Done.")


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(change_files) as made:
        yield made


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with a text, a text that is no UTF-8, and a file that git ignores."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "old.txt").write_text("one\n")
    (folder / "gone.txt").write_bytes(b"caf\xe9\n")
    (folder / ".gitignore").write_text("ignored\n")
    (folder / "ignored").write_text("x")
    name = "-c user.name=n -c user.email=e@x"
    shell(folder, f"git init -q -b main && git add . && git {name} commit -qm first")
    return folder


class Place(OneShot):
    """`coder batch` in a folder with a file of tasks."""

    results: Path

    def __init__(
        self,
        folder: Path,
        server: ScriptedServer,
        tasks: Sequence[Mapping[str, Any]] | str,
        *words: str,
        **more: str,
    ) -> None:
        self.results = folder / "ws" / "results.jsonl"
        if not isinstance(tasks, str):
            tasks = "".join(f"{json.dumps(task)}\n" for task in tasks)
        (folder / "ws").mkdir(exist_ok=True)
        (folder / "ws" / "tasks.jsonl").write_text(tasks)
        names = ("AUTHOR_NAME", "COMMITTER_NAME", "AUTHOR_EMAIL", "COMMITTER_EMAIL")
        more |= {f"GIT_{name}": "me@here" for name in names}
        super().__init__(
            folder, server, "batch", "tasks.jsonl", "-o", "results.jsonl", *words, **more
        )

    def rows(self) -> list[Row]:
        return [json.loads(line) for line in self.results.read_text().splitlines()]

    def workers(self) -> list[int]:
        """The processes of the tasks."""
        path = Path(f"/proc/{self.child.pid}/task")
        children: list[int] = []
        for thread in path.iterdir():
            with suppress(OSError):
                children += map(int, (thread / "children").read_text().split())
        return [pid for pid in children if b"doors.worker" in command_of(pid)]


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def applies(patch: str, project: Path, copy: Path) -> None:
    """The patch makes of the project what the task has made of its folder."""
    subprocess.run(["cp", "-a", project, copy], check=True)
    subprocess.run(
        ["git", "apply", "-"],
        cwd=copy,
        input=patch.encode(),
        check=True,
    )
    assert (copy / "old.txt").read_text() == "one\ntwo\n"
    assert (copy / "new.txt").read_text() == "new\n"
    assert not (copy / "gone.txt").exists()


# ---- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["cwd", "repo"])
def test_a_patch_is_whole_and_applies(
    tmp_path: Path, server: ScriptedServer, project: Path, source: str
) -> None:
    task = {"id": "a", "prompt": "Change it.", source: str(project)}
    with Place(tmp_path, server, [task], "--traces", "traces", *YOLO) as place:
        assert place.end() == 0, place.err
    [row] = place.rows()
    assert row["id"] == "a"
    assert row["stop_reason"] == "stop"
    assert row["text"] == "Done."
    assert row["steps"] == 3
    assert row["usage"]["input"] > 0
    assert row["tries"] == 1
    assert Path(row["trace"]).name == "a.jsonl"
    assert Path(row["trace"]).stat().st_size > 1000
    applies(row["patch"], project, tmp_path / "copy")
    assert (project / "old.txt").read_text() == "one\n"  # the folder itself is as it was
    assert "1 rows" in place.err


def test_a_repo_is_cloned_at_its_commit_and_a_task_may_have_no_folder(
    tmp_path: Path, server: ScriptedServer, project: Path
) -> None:
    first = shell(project, "git rev-parse HEAD").strip()
    shell(project, "git -c user.name=n -c user.email=e@x commit -qam x --allow-empty")
    (project / "old.txt").write_text("not in a commit\n")
    tasks = [
        {"id": "old", "prompt": "x", "repo": str(project), "commit": first},
        {"id": "empty", "prompt": "x", "model": "another"},
    ]
    with Place(tmp_path, server, tasks, "--workers", "1", *YOLO) as place:
        assert place.end() == 0, place.err
    assert "changes without a commit" in place.err
    old, empty = place.rows()
    assert "+two" in old["patch"]  # and not as binary, since another file is no UTF-8
    assert "not in a commit" not in old["patch"]
    assert empty["model"] == "another"
    assert "+new" in empty["patch"]


def test_without_yolo_the_rules_hold(tmp_path: Path, server: ScriptedServer, project: Path) -> None:
    task = {"id": "a", "prompt": "x", "cwd": str(project)}
    with Place(tmp_path, server, [task], "--", "--deny", "edit") as place:
        assert place.end() == 0, place.err
    assert "new.txt" not in place.rows()[0]["patch"]


def test_a_failed_task_has_a_row_and_the_others_go_on(
    tmp_path: Path, server: ScriptedServer, project: Path
) -> None:
    tasks = [
        {"id": "no repo", "prompt": "x", "repo": str(tmp_path / "nowhere")},
        {"id": "no commit", "prompt": "x", "repo": str(project), "commit": "f00"},
        {"id": "good", "prompt": "x"},
    ]
    with Place(tmp_path, server, tasks, *YOLO) as place:
        assert place.end() == 0, place.err
    rows = {row["id"]: row for row in place.rows()}
    assert "nowhere" in rows["no repo"]["text"]
    assert "f00" in rows["no commit"]["text"]
    assert rows["good"]["stop_reason"] == "stop"


# ---- what dies -----------------------------------------------------------------------------------


class Held:
    """A script that answers so many requests at once, and the others when `may_go_on` is set."""

    def __init__(self, answered: int) -> None:
        self.left = answered
        self.lock = threading.Lock()
        self.may_go_on = threading.Event()

    def __call__(self, body: Body) -> Reply:
        with self.lock:
            self.left -= 1
            is_held = self.left < 0
        if is_held:
            self.may_go_on.wait(PATIENCE)
        return Reply("Done.")


def test_a_killed_worker_costs_one_attempt(tmp_path: Path) -> None:
    with (
        ScriptedServer([Reply(hold=PATIENCE), Reply("Done.")]) as server,
        Place(tmp_path, server, [{"id": "a", "prompt": "x"}]) as place,
    ):
        until(lambda: server.requests)
        os.kill(place.workers()[0], signal.SIGKILL)
        assert place.end() == 0, place.err
        shell(Path(place.environment["TMPDIR"]), "rm -rf coder-*")  # of what was killed
    [row] = place.rows()
    assert row["stop_reason"] == "stop"
    assert row["tries"] == 2


def test_after_a_kill_of_the_driver_the_same_command_goes_on(tmp_path: Path) -> None:
    tasks = [{"id": f"{number}", "prompt": "x"} for number in range(6)]
    script = Held(2)
    with ScriptedServer(script) as server:
        first = Place(tmp_path, server, tasks, "--workers", "2")
        try:
            until(lambda: first.results.exists() and len(first.rows()) >= 2)
            first.kill(signal.SIGKILL)
            first.child.wait()
            gone(first.mark, PATIENCE)  # workers end with the driver
        finally:
            first.stop()
            first.child.communicate()
            script.may_go_on.set()
        with first.results.open("a") as file:
            file.write('{"id": "5", "stop_rea')  # as a kill cuts it
        done = len(first.results.read_text().splitlines()) - 1
        assert done < 6
        shell(Path(first.environment["TMPDIR"]), "rm -rf coder-*")
        with Place(tmp_path, server, tasks, "--workers", "2") as place:
            assert place.end() == 0, place.err
    ids = [row["id"] for row in place.rows()]
    assert sorted(ids) == [task["id"] for task in tasks]


def press_ctrl_c(process: int) -> None:
    os.kill(process, signal.SIGINT)


def press_ctrl_c_unseen(process: int) -> None:
    """As if it came between Python's look for signals and a wait: another thread gets it, and so
    the main thread does not wake up."""
    threads = {int(path.name) for path in Path(f"/proc/{process}/task").iterdir()}
    other = min(threads - {process})
    assert ctypes.CDLL(None).tgkill(process, other, signal.SIGINT) == 0


@pytest.mark.parametrize("press", [press_ctrl_c, press_ctrl_c_unseen])
def test_ctrl_c_ends_the_workers_and_leaves_a_file_that_can_be_gone_on_with(
    tmp_path: Path,
    press: Callable[[int], None],
) -> None:
    tasks = [{"id": f"{number}", "prompt": "x"} for number in range(4)]
    script = Held(1)
    with ScriptedServer(script) as server:
        with Place(tmp_path, server, tasks, "--workers", "2") as place:
            until(lambda: place.results.exists() and len(place.rows()) >= 1)
            until(lambda: place.workers())
            press(place.child.pid)
            assert place.end() == 130
            assert "The same command goes on" in place.err
        assert len(place.rows()) < 4
        script.may_go_on.set()
        with Place(tmp_path, server, tasks, "--workers", "4") as place:
            assert place.end() == 0, place.err
    assert len(place.rows()) == 4


# ---- limits --------------------------------------------------------------------------------------


def test_limits_of_a_task(tmp_path: Path, server: ScriptedServer) -> None:
    tasks = [
        {"id": "of all", "prompt": "x"},
        {"id": "its own", "prompt": "x", "max_steps": 2},
    ]
    with Place(tmp_path, server, tasks, "--max-steps", "1", *YOLO) as place:
        assert place.end() == 0, place.err
    rows = {row["id"]: row for row in place.rows()}
    assert rows["of all"]["stop_reason"] == "max_steps"
    assert rows["of all"]["steps"] == 1
    assert rows["its own"]["steps"] == 2


def priced(tmp_path: Path) -> dict[str, str]:
    """The environment in which each token costs 1."""
    file = tmp_path / "prices.json"
    file.write_text(json.dumps({"*": {"input": 1e6, "output": 1e6}}))
    return {"CODER_PRICES": str(file)}


def test_a_task_that_costs_too_much_is_ended(tmp_path: Path, server: ScriptedServer) -> None:
    tasks = [{"id": "a", "prompt": "x"}]
    with Place(
        tmp_path,
        server,
        tasks,
        "--max-cost",
        "1",
        *YOLO,
        **priced(tmp_path),
    ) as place:
        assert place.end() == 0, place.err
    [row] = place.rows()
    assert row["stop_reason"] == "max_cost"
    assert row["cost"] > 1
    assert row["steps"] < 3


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["--total-cost", "1"], id="cost"),
        pytest.param(["--total-steps", "3"], id="steps"),
        pytest.param(["--total-seconds", "0.000001"], id="seconds"),
    ],
)
def test_limits_of_all_begin_no_further_task(
    tmp_path: Path, server: ScriptedServer, words: list[str]
) -> None:
    tasks = [{"id": f"{number}", "prompt": "x"} for number in range(3)]
    words = ["--workers", "1", *words]
    with Place(
        tmp_path,
        server,
        tasks,
        *words,
        *YOLO,
        **priced(tmp_path),
    ) as place:
        assert place.end() == 3
    expected = 0 if "--total-seconds" in words else 1
    assert len(place.rows()) == expected


def test_a_limit_of_cost_needs_prices(tmp_path: Path, server: ScriptedServer) -> None:
    tasks = [{"id": "a", "prompt": "x"}]
    with Place(tmp_path, server, tasks, "--total-cost", "1", *YOLO) as place:
        assert place.end() == 2
    assert "CODER_PRICES" in place.err
    assert place.rows() == []


# ---- bad input -----------------------------------------------------------------------------------

GOOD = '{"id": "a", "prompt": "x"}\n'


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        pytest.param(GOOD + "{no", "tasks.jsonl, line 2:", id="no JSON"),
        pytest.param(GOOD + "[1]", "line 2: the task has to be of type object", id="no object"),
        pytest.param('{"prompt": "x"}', "line 1: the task needs id", id="no id"),
        pytest.param('{"id": "a"}', "line 1: the task needs prompt", id="no prompt"),
        pytest.param(GOOD + GOOD, "two tasks have the id 'a'", id="an id twice"),
        pytest.param('{"id": "a", "prompt": "x", "dir": "y"}', "has no parameter dir", id="a typo"),
        pytest.param(
            '{"id": 1, "prompt": "x"}', "id has to be of type string", id="a number as id"
        ),
        pytest.param(
            '{"id": "a", "prompt": "x", "max_steps": "many"}',
            "max_steps has to be of type integer",
            id="steps",
        ),
        pytest.param('{"id": "a", "prompt": ""}', "it needs an id and a prompt", id="empty"),
        pytest.param(
            '{"id": "a", "prompt": "x", "max_seconds": 0}', "a limit is above zero", id="zero"
        ),
        pytest.param(
            '{"id": "a", "prompt": "x", "cwd": "/nowhere"}', "no folder /nowhere", id="no folder"
        ),
        pytest.param(
            '{"id": "a", "prompt": "x", "cwd": "/", "repo": "y"}', "not both", id="cwd and repo"
        ),
    ],
)
def test_wrong_tasks_run_nothing(
    tmp_path: Path, server: ScriptedServer, tasks: str, said: str
) -> None:
    with Place(tmp_path, server, tasks) as place:
        assert place.end() == 2
    assert said in place.err
    assert place.err.count("\n") == 1
    assert server.requests == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(["--workers", "0"], "--workers", id="no workers"),
        pytest.param(["--total-cost", "-1"], "--total-cost", id="a cost below zero"),
        pytest.param(["--", "--no-such-flag"], "--no-such-flag", id="a flag of coder"),
        pytest.param(["-o", "tasks.jsonl"], "the same file", id="the tasks as results"),
    ],
)
def test_wrong_words(tmp_path: Path, server: ScriptedServer, words: list[str], said: str) -> None:
    with Place(tmp_path, server, GOOD, *words) as place:
        assert place.end() == 2
    assert said in place.err
    assert server.requests == []


def test_wrong_settings_write_no_row(tmp_path: Path, server: ScriptedServer) -> None:
    with Place(tmp_path, server, GOOD, OPENAI_BASE_URL="nonsense") as place:
        assert place.end() == 2
    assert "nonsense" in place.err
    assert place.rows() == []


def test_a_file_that_holds_something_else_is_left_alone(
    tmp_path: Path, server: ScriptedServer
) -> None:
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws" / "results.jsonl").write_text("notes of mine\nand more")
    with Place(tmp_path, server, GOOD) as place:
        assert place.end() == 2
    assert "line 1: no row of results" in place.err
    assert place.results.read_text() == "notes of mine\nand more"


def test_two_runs_cannot_write_one_file(tmp_path: Path) -> None:
    script = Held(0)
    with (
        ScriptedServer(script) as server,
        Place(tmp_path, server, GOOD) as first,
    ):
        until(lambda: server.requests)
        second = subprocess.run(
            [sys.executable, "-m", "coder", "batch", "tasks.jsonl", "-o", "results.jsonl"],
            cwd=first.ws,
            env=first.environment,
            capture_output=True,
            text=True,
        )
        assert second.returncode == 2
        assert "another run writes this file" in second.stderr
        script.may_go_on.set()
        assert first.end() == 0
    assert len(first.rows()) == 1


# ---- from a program ------------------------------------------------------------------------------


def test_a_program_gets_all_rows(
    tmp_path: Path,
    server: ScriptedServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    monkeypatch.setenv("OPENAI_MODEL", "m")
    monkeypatch.setenv("HOME", str(tmp_path))
    results = tmp_path / "results.jsonl"
    seen: list[int] = []
    first = batch.run(
        [batch.Task("1", "x")],
        results,
        flags=["-y"],
    )
    tasks = [batch.Task("1", "x"), batch.Task("2", "x")]
    both = batch.run(
        tasks,
        results,
        report=lambda rows: seen.append(len(rows)),
    )
    assert [row["id"] for row in first] == ["1"]
    assert [row["id"] for row in both] == ["1", "2"]
    assert seen == [1, 2]


def test_a_cluster_gives_the_same_rows(tmp_path: Path, server: ScriptedServer) -> None:
    pytest.importorskip("ray")
    tasks = [{"id": f"{number}", "prompt": "x"} for number in range(4)]
    words = ["--engine", "ray", "--workers", "2"]
    # Names of Ray's sockets have at most 107 characters
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as short,
        Place(tmp_path, server, tasks, *words, *YOLO, RAY_TMPDIR=short) as place,
    ):
        assert place.end() == 0, place.err
    assert sorted(row["id"] for row in place.rows()) == ["0", "1", "2", "3"]


def test_a_cluster_that_is_not_there_is_one_line(tmp_path: Path, server: ScriptedServer) -> None:
    pytest.importorskip("ray")
    words = ["--engine", "ray", "--address", "auto"]
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as short,
        Place(tmp_path, server, GOOD, *words, RAY_TMPDIR=short) as place,
    ):
        assert place.end() == 2
    assert "Ray cannot be used: " in place.err
    assert "internal error" not in place.err


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_an_address_where_nothing_listens_is_one_line(
    tmp_path: Path, server: ScriptedServer, form: str
) -> None:
    pytest.importorskip("ray")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # it does not listen
        address = form.format(taken.getsockname()[1])
        with Place(tmp_path, server, GOOD, "--engine", "ray", "--address", address) as place:
            assert place.end() == 2
    problem = f"Ray cannot be used: {address}: [Errno 111] Connection refused\n"
    assert place.err.endswith(problem)


def test_without_ray_one_line_says_what_to_install(tmp_path: Path, server: ScriptedServer) -> None:
    try:
        import ray  # noqa: F401
    except ModuleNotFoundError:
        pass
    else:
        pytest.skip("ray is installed")
    with Place(tmp_path, server, GOOD, "--engine", "ray") as place:
        assert place.end() == 2
    assert "--engine ray needs a package: " in place.err
    assert "[ray]" in place.err
