"""Commands that drop their mark, leave their group and lose their parent end all the same, and
nothing else does.

A command is told by what it waits for: its line names a file of the test.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coder.devtools.scripted import Body, Reply
from coder.permissions.sandbox import Sandbox
from tests.harness import results, serve, shell
from tests.terminal import ROOT, OneShot, Terminal, read_of_process, until
from tests.test_sandbox import FINE, landlock, seccomp

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is left is found in /proc")
PLANT = r"printf '#!/bin/sh\n' > .git/hooks/pre-commit"
WAYS = {
    "cleared": "env -i sleep {n} >/dev/null 2>&1 &",
    "apart": "env -i setsid sleep {n} >/dev/null 2>&1 &",
    "orphan": "(env -i setsid sleep {n} >/dev/null 2>&1 &)",
    "child of a marked one": "setsid bash -c 'env -i setsid sleep {n}; true' >/dev/null 2>&1 &",
    "another mark": "(CODER_COMMAND=x setsid sleep {n} >/dev/null 2>&1 &)",
}


def lines() -> dict[int, str]:
    """The command lines of all living processes."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            line = read_of_process(name, "cmdline").replace(b"\0", b" ")
            found[int(name)] = line.decode("utf-8", "replace").strip()
    return found


def sleeping(seconds: str) -> list[int]:
    return [number for number, line in lines().items() if line == f"sleep {seconds}"]


@pytest.fixture
def seconds() -> Iterator[str]:
    """For `sleep`: a number that no other process has. What sleeps so long at the end of the test
    is ended."""
    value = f"3{int.from_bytes(os.urandom(4), 'big')}"
    yield value
    for number in [each for each, line in lines().items() if line.startswith(f"sleep {value}")]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def started(way: str, seconds: str) -> str:
    """A line that ends its part when the child sleeps."""
    begun = f'until pgrep -x -f "sleep {seconds}" >/dev/null; do sleep 0.02; done'
    return f"{WAYS[way].format(n=seconds)}\n{begun}"


UNCOVERED = ("kill -9", "off")
ENDS: dict[str, Callable[[OneShot], object]] = {
    "normal": lambda run: None,
    "Ctrl+C": lambda run: run.kill(signal.SIGINT),
    "TERM": lambda run: run.kill(signal.SIGTERM),
    "kill -9": lambda run: run.kill(signal.SIGKILL),
}


@pytest.mark.case("PRC-03")
@pytest.mark.parametrize(
    ("end", "sandbox"),
    # After a kill -9, without a sandbox, only what has kept its mark is found
    [(end, sandbox) for end in ENDS for sandbox in ("auto", "off") if (end, sandbox) != UNCOVERED],
)
def test_nothing_outlives_the_program(tmp_path: Path, seconds: str, end: str, sandbox: str) -> None:
    names = {way: f"{seconds}.{number}" for number, way in enumerate(WAYS)}
    parts = [started(way, name) for way, name in names.items()]
    parts += [] if end == "normal" else ["exec sleep 300"]
    replies = (
        Reply(
            calls=[
                (
                    "bash",
                    {"command": "\n".join(parts)},
                )
            ]
        ),
        FINE,
    )
    flags = ("-y", "--sandbox", sandbox, "go")
    with serve(*replies) as server, OneShot(tmp_path, server, *flags) as run:
        if end != "normal":
            until(lambda: run.running("sleep 300"), "all of it runs")
            assert all(map(sleeping, names.values()))
        ENDS[end](run)
        run.end()
        until(lambda: not any(map(sleeping, names.values())), "all of it has ended")
        for path in run.temp.iterdir():  # of a killed one
            shell(run.temp, f"rm -r {path.name}")


@landlock
def test_a_hook_that_was_to_come_later_does_not_come(tmp_path: Path) -> None:
    """And what is in the record of the guarded files is gone with the session."""
    (tmp_path / "ws").mkdir()
    shell(tmp_path / "ws", "git init -q")
    late = f"until [ -e go ]; do sleep 0.02; done; {PLANT}; touch over"
    (tmp_path / "ws" / "late.sh").write_text(late)
    line = "env -i setsid timeout 60 bash late.sh >/dev/null 2>&1 &"
    begun = "until pgrep -f late.s[h] >/dev/null; do sleep 0.02; done"
    call = Reply(calls=[("bash", {"command": f"{line} {begun}"})])
    with (
        serve(call, FINE) as server,
        OneShot(tmp_path, server, "-y", "go") as run,
    ):
        assert run.end() == 0
        (run.ws / "go").touch()
        until(lambda: not [each for each in lines().values() if each.endswith("bash late.sh")])
        assert not (run.ws / "over").exists()
        assert not (run.ws / ".git/hooks/pre-commit").exists()
        assert not list(run.home.rglob("guarded/*"))


@pytest.mark.case("PRC-05")
@pytest.mark.parametrize("sandbox", ["auto", "off"])
def test_a_timeout_ends_what_its_command_started_and_no_other(
    tmp_path: Path, seconds: str, sandbox: str
) -> None:
    """A server of an earlier command lives on until the session ends, with or without its mark, and
    with what it starts."""
    left = [f"{seconds}.{digit}" for digit in "123"]
    kept = [f"{seconds}.{digit}" for digit in "456"]
    late = f"until [ -e go ]; do sleep 0.02; done; (setsid sleep {kept[2]} &)"
    earlier = f"{started('orphan', kept[0])}; setsid sleep {kept[1]} >/dev/null 2>&1 &\n"
    earlier += f"({late}) >/dev/null 2>&1 &"
    parts = [f"touch go; until pgrep -x -f 'sleep {kept[2]}' >/dev/null; do sleep 0.02; done"]
    parts += [started(way, each) for way, each in zip(("cleared", "apart", "orphan"), left)]
    alive: list[bool] = []

    def script(body: Body) -> Reply:
        count = sum(message["role"] == "tool" for message in body["messages"])
        if count == 2:
            until(lambda: not any(map(sleeping, left)))
            alive.extend(bool(sleeping(each)) for each in kept)
            return FINE
        line = ["; ".join(parts) + "; exec sleep 300", earlier][not count]
        return Reply(
            calls=[
                (
                    "bash",
                    {"command": line, "timeout": [5, 60][not count]},
                )
            ]
        )

    flags = ("-y", "--sandbox", sandbox, "go")
    with serve(script) as server, OneShot(tmp_path, server, *flags) as run:
        assert run.end() == 0
        assert "[stopped after 5 s" in results(server)[1]
        assert alive == [True, True, True]
        until(lambda: not any(map(sleeping, kept)))


def test_orphans_that_end_leave_no_zombies(tmp_path: Path) -> None:
    zombies: list[list[str]] = []
    runs: list[OneShot] = []
    name = os.urandom(8).hex()
    late = "touch begun; until [ -e go ]; do sleep 0.02; done"
    made = (
        f"for i in 1 2 3; do (env -i setsid true &); done; (env -i setsid sh -c '{late}' {name}. &)"
    )
    ended = f"while pgrep -f '{name}[.]' >/dev/null; do sleep 0.02; done"
    until_ended = f"until [ -e begun ]; do sleep 0.02; done; touch go; {ended}"

    def script(body: Body) -> Reply:
        until(lambda: runs)
        states = shell(tmp_path, f"ps -o stat= --ppid {runs[0].child.pid}").split()
        zombies.append([state for state in states if state.startswith("Z")])
        if len(zombies) > 2:
            return FINE
        return Reply(
            calls=[
                (
                    "bash",
                    {"command": [made, until_ended][len(zombies) - 1]},
                )
            ]
        )

    with (
        serve(script) as server,
        OneShot(tmp_path, server, "-y", "--sandbox", "off", "go") as run,
    ):
        runs.append(run)
        assert run.end() == 0
        assert zombies[2] == []


def test_what_the_user_has_started_outlives_the_program(tmp_path: Path, seconds: str) -> None:
    line = f"!env -u CODER_TEST_MARK setsid sleep {seconds} >/dev/null 2>&1 &"
    with serve(
        Reply(calls=[("bash", {"command": "sleep 300 &"})]),
        FINE,
    ) as server:
        with Terminal(tmp_path, server, "-y") as terminal:
            terminal.say("hello")
            terminal.say(line)
            until(lambda: sleeping(seconds))
        assert sleeping(seconds)


def test_next_to_what_the_user_has_started_no_orphan_of_a_command_is_left(
    tmp_path: Path, seconds: str
) -> None:
    """The user's, without a session of its own, is a child of the program as the orphans are."""
    users = [f"{seconds}.1{number}" for number in range(4)]
    orphans = [f"{seconds}.2{number}" for number in range(3)]
    own = "".join(f"sleep {each} >/dev/null 2>&1 & " for each in users)
    lost = "".join(f"(env -i setsid sleep {each} >/dev/null 2>&1 &); " for each in orphans)
    begun = f"until pgrep -x -f 'sleep {orphans[-1]}' >/dev/null; do sleep 0.02; done"
    with serve(
        Reply(calls=[("bash", {"command": lost + begun})]),
        FINE,
    ) as server:
        with Terminal(tmp_path, server, "-y", CODER_SANDBOX="off") as terminal:
            terminal.say(f"!{own}")
            until(lambda: all(map(sleeping, users)))
            terminal.say("hello")
            until(lambda: all(map(sleeping, orphans)), "all orphans")
        until(lambda: not any(map(sleeping, orphans)), "the orphans have ended")


# ---- in a program of the user's ------------------------------------------------------------------

LIBRARY = """
import os, signal, subprocess, sys, time
from pathlib import Path
from coder.abort import Abort
from coder.permissions.sandbox import Sandbox
from coder.tools import processes
from coder.tools.bash import bash
from coder.toolset import ToolContext
from coder.types import ToolCall
from tests.terminal import until
from tests.test_orphans import sleeping, started
from tests.workspace import Workspace

def own(seconds, **options):
    argv = ["env", "-i", "sleep", seconds] if options else ["sleep", seconds]
    null = subprocess.DEVNULL
    return subprocess.Popen(argv, start_new_session=bool(options), stdout=null, stderr=null)

class Confined(Workspace):
    sandbox = None
    def run(self, call):
        ctx = ToolContext(self.tools.cwd, self.abort, call_id=call.id, seen=self.tools.seen)
        ctx.authorize = self.authorize
        if self.sandbox:
            self.sandbox.before_tool_call(call, ctx)
        run = self.tools.run(call, ctx)
        while True:
            try:
                self.each(next(run))
            except StopIteration as end:
                return end.value

seconds = sys.argv[1]
mine = [own(f"{seconds}.1"), own(f"{seconds}.2", apart=True)]
ws = Confined(Path.cwd(), bash)
def during(event):
    if len(mine) < 4:
        mine.extend([own(f"{seconds}.3"), own(f"{seconds}.4", apart=True)])
ws.each = during
"""


def in_a_program(folder: Path, seconds: str, script: str) -> str:
    """What a program of the user's prints that runs commands; its own four children live when it
    has ended."""
    argv = [sys.executable, "-c", LIBRARY + script, seconds]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        argv,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0
    for digit in "1234":
        [number] = sleeping(f"{seconds}.{digit}")
        os.kill(number, signal.SIGKILL)
    return done.stdout


def test_a_program_keeps_its_own_children_and_their_exit_codes(ws: Path, seconds: str) -> None:
    script = """
line = f"echo a; sleep 0.3; {started('cleared', seconds + '.5')}; {started('apart', seconds + '.6')}; exec sleep 300"
ended = subprocess.Popen(["sh", "-c", "exit 7"], start_new_session=True)
ws.call("bash", command=line, timeout=5)
until(lambda: not sleeping(f"{seconds}.5") and not sleeping(f"{seconds}.6"))
ws.call("bash", command=f"env -i sleep {seconds}.7 >/dev/null 2>&1 &")
print([each.poll() for each in mine], ended.wait())
"""
    assert in_a_program(ws, seconds, script) == "[None, None, None, None] 7\n"
    until(lambda: not sleeping(f"{seconds}.7"), "the group has ended")


@landlock
@seccomp
@pytest.mark.parametrize("end", ["", "ws.sandbox.since()", "os.kill(os.getpid(), 9)"])
def test_a_sandbox_takes_what_it_confined_and_nothing_else(
    ws: Path, seconds: str, end: str
) -> None:
    script = f"""
ws.sandbox = Sandbox(ws.folder, data=ws.folder.parent / "data")
ws.call("bash", command="echo a; sleep 0.3; " + started("orphan", seconds + ".5"))
ws.sandbox.confined.submit(lambda: None).result()
assert sleeping(seconds + ".5") and len(mine) == 4
{end or "pass"}
assert not {bool(end)} or not sleeping(seconds + ".5")
print([each.poll() for each in mine], list((ws.folder.parent / "data").rglob("*.json")) == [])
"""
    if "kill" in end:
        with pytest.raises(AssertionError):
            in_a_program(ws, seconds, script)
    else:
        none = [None] * 4
        assert in_a_program(ws, seconds, script) == f"{none} {bool(end)}\n"
    until(lambda: not sleeping(f"{seconds}.5"))


@landlock
def test_the_record_stays_if_something_could_go_on(repository: Path, seconds: str) -> None:
    """Without what proves that signals are limited, nothing unmarked is ended; the next start
    reports what has changed."""
    script = """
import ctypes
ctypes.CDLL(None).prctl(processes.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # the guard comes here, to be waited for
outside = processes.main_guard()
os.kill(outside, 9)
os.waitpid(outside, 0)
ws.sandbox = Sandbox(ws.folder, data=ws.folder.parent / "data")
ws.call("bash", command="echo a; sleep 0.3; " + started("orphan", seconds + ".5"))
print(ws.sandbox.since(), bool(sleeping(seconds + ".5")))
"""
    assert in_a_program(repository, seconds, script) == "[] True\n"
    (repository / ".git/hooks/pre-push").touch()
    [notice] = Sandbox(repository, data=repository.parent / "data").notices
    assert ".git/hooks/pre-push (new)" in notice


SESSIONS = """
import sys
from contextlib import ExitStack
from pathlib import Path
from coder import Reply, Session
from coder.tools.processes import adopt_orphans
from tests.harness import commands, drive, serve
from tests.terminal import until
from tests.test_orphans import sleeping, started

def opened(name):
    line = started("orphan", f"{seconds}.{name}") + "; echo $TMPDIR > temporary; touch $TMPDIR/file"
    server = servers.enter_context(serve(Reply(calls=commands(line)), Reply("Done.")))
    folder = Path(name)
    folder.mkdir()
    settings = {"OPENAI_BASE_URL": server.url, "CODER_TITLES": "off"}
    session = Session.open(folder, model="m", settings=settings, yolo=True)
    drive(session.prompt("go"))
    return session

adopt_orphans()
seconds = sys.argv[1]
servers = ExitStack()
one, two = opened("1"), opened("2")
print(Path("1/temporary").read_text() != Path("2/temporary").read_text())
one.close()
until(lambda: not sleeping(f"{seconds}.1"))
print(len(sleeping(f"{seconds}.2")), Path(Path("2/temporary").read_text().strip(), "file").exists())
two.close()
until(lambda: not sleeping(f"{seconds}.2"))
servers.close()
"""


@landlock
@seccomp
def test_a_session_that_is_closed_ends_its_own_commands_alone(tmp_path: Path, seconds: str) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("CODER_")}
    env |= {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    argv = [sys.executable, "-c", SESSIONS, seconds]
    done = subprocess.run(
        argv, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True, timeout=60
    )
    assert done.stdout == "True\n1 True\n"
