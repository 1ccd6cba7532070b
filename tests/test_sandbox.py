"""The sandbox: what a command cannot write, signal or leave behind, and what it can. SBX-01 to SBX-06 of the reference.

A run is a real one against the scripted server; what counts is what lies on the disk afterwards.
"""

from __future__ import annotations

import ctypes
import http.server
import json
import os
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from coder.abort import Abort
from coder.features.git_config import NOT_PLAIN, entries
from coder.features.git_places import git_folders
from coder.features.hooks import HookChain
from coder.features.landlock import NETWORK_ABI, ConfinedThread, available, can_filter, restrict, without_network
from coder.features.permissions import Permissions
from coder.features.rules import Rule
from coder.features.sandbox import Sandbox, SandboxError
from coder.features.scripted import Body, Reply, ScriptedServer
from coder.features.watch import Change, Watch
from coder.tools import Tool, ToolContext, Toolset
from coder.tools.bash import bash
from coder.tools.process import environment, output_of
from coder.tools.search import grep
from coder.types import Event, Hooks, Notice, PermissionAsked, ToolCall, ToolResult
from tests.harness import ask, serve
from tests.terminal import MARK, ROOT, OneShot, gone, until

landlock = pytest.mark.skipif(not available(), reason="this kernel has no Landlock, or it may not be used here")
FINE = Reply("All is well.")


class Runs:
    """Runs commands of a model's, each a call of one answer. `results` and `notices` are those of the newest run."""

    def __init__(self, workspace: Path, *hooks: Hooks, **options: Any) -> None:
        self.sandbox = Sandbox(workspace, **options)
        self.tools = Toolset(self.sandbox.tools([bash, grep]), cwd=workspace)
        self.hooks = HookChain(*hooks, self.sandbox)
        self.events: list[Event] = []

    def __call__(self, *lines: str, each: Callable[[Event], None] | None = None, **arguments: Any) -> str:
        """The last command's result."""
        calls = [("bash", {"command": line} | arguments) for line in lines]
        with serve(Reply(calls=calls), FINE) as server:
            self.events, _ = ask(server, tools=self.tools, hooks=self.hooks, each=each)
            self.results = [str(message["content"]) for message in server.requests[-1]["messages"] if message["role"] == "tool"]
            self.schema = server.requests[0]["tools"][0]["function"]["parameters"]
        return self.results[-1]

    @property
    def notices(self) -> str:
        return "\n".join(event.text for event in self.events if isinstance(event, Notice))


@pytest.fixture
def ws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace; beside it a home with a file in it, and a file and a folder to be left alone."""
    for name in ("ws", "home", "beside"):
        (tmp_path / name).mkdir()
    (tmp_path / "home" / "file").write_text("kept")
    (tmp_path / "file").write_text("kept")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(name, "me@here")
    for name in ("CONFIG", "DATA", "CACHE"):
        monkeypatch.delenv(f"XDG_{name}_HOME", raising=False)
    return tmp_path / "ws"


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What a test leaves in the background is ended."""
    value = os.urandom(8).hex()
    monkeypatch.setenv(MARK, value)
    yield value
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if value.encode() in (entry / "environ").read_bytes() and int(entry.name) != os.getpid():
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            continue


def yes(event: Event) -> None:
    """The person's answer to each question."""
    if isinstance(event, PermissionAsked):
        event.reply("once")


def all_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """What lies outside the workspace: modes and contents."""
    return {str(path): (path.lstat().st_mode, b"" if path.is_dir() else path.read_bytes()) for path in folder.rglob("*")
            if "ws" not in path.relative_to(folder).parts[:1]}


def git(folder: Path, *argv: str) -> str:
    return subprocess.run(["git", *argv], cwd=folder, check=True, capture_output=True, text=True).stdout


# ---- SBX-01: what may be written -------------------------------------------------------------------------

WORKS = [
    pytest.param("echo a > file && cat file", "a", marks=pytest.mark.case("SBX-01"), id="in the workspace"),
    pytest.param("echo a > $TMPDIR/file && cat $TMPDIR/file", "a", marks=pytest.mark.case("SBX-01"), id="in the temporary folder"),
    pytest.param("echo a > /dev/null && echo yes", "yes", marks=pytest.mark.case("SBX-01"), id="to the null device"),
    pytest.param('f=$(mktemp) d=$(mktemp -d) && echo a > $f && echo b > $d/b && [[ $f == $TMPDIR/* ]] && echo yes', "yes", id="mktemp"),
    pytest.param("mkdir a b && echo c > a/f && mv a/f b/g && ln b/g a/h && cat a/h", "c", id="rename and link into another folder"),
    pytest.param("mv $(mktemp) here && ls here", "here", id="from the temporary folder into the workspace"),
    pytest.param("echo long > f && truncate -s 2 f && rm f && mkdir -p x/y && rmdir -p x/y && ln -s file link && echo yes", "yes",
                 id="the rest"),
    pytest.param("mkfifo p && (echo hi > p & cat p)", "hi", id="a FIFO"),
    pytest.param("echo a | tee /dev/stderr > /dev/stdout; cat <(echo b) - <<< c", "a\na\nb\nc", id="streams"),
    pytest.param("cat file.large <<< '' 2> /dev/null; cat <<< $(seq 20000) | tail -c 6", "20000", id="a here-string as large as a file"),
    pytest.param("python3 -c 'import socket; s = socket.socket(socket.AF_UNIX); s.bind(\"sock\"); print(1)'", "1", id="a unix socket"),
    pytest.param("python3 -c 'import multiprocessing as m; m.Lock(); print(1)'", "1", id="a semaphore"),
    pytest.param("stat -c %a $TMPDIR", "700", id="a folder of its own"),
    pytest.param("grep NoNewPrivs /proc/self/status", "NoNewPrivs:\t1", id="no rights from set-user-ID programs"),
    pytest.param("cat ../file", "kept", id="reading is free"),
]


@landlock
@pytest.mark.parametrize(("line", "output"), WORKS)
def test_what_commands_need_works(ws: Path, line: str, output: str) -> None:
    assert Runs(ws)(line) == output


FAILS = [
    pytest.param("echo a > ~/new", marks=pytest.mark.case("SBX-01"), id="a file in the home folder"),
    pytest.param("echo a > ../new", marks=pytest.mark.case("SBX-01"), id="a file beside the workspace"),
    pytest.param("mkdir ../new", id="a folder"),
    pytest.param("echo a >> ../file", id="a line more"),
    pytest.param("rm ../file", id="remove"),
    pytest.param("rmdir ../beside", id="remove a folder"),
    pytest.param("python3 -c 'import os; os.truncate(\"../file\", 0)'", id="truncate"),
    pytest.param("ln -s ../file link && echo a > link", id="through a link that leaves"),
    pytest.param("ln -s ../beside link && echo a > link/new", id="through a folder's link that leaves"),
    pytest.param("ln -s ../beside/new link && echo a > link", id="through a link to nothing"),
    pytest.param("ln ../file hard && echo a > hard", id="through a hard link"),
    pytest.param("echo a > a && mv a ../beside/a", id="move out"),
    pytest.param("mv ../file here", id="move in"),
    pytest.param("ln -s x ../beside/link", id="make a link"),
    pytest.param("mkfifo ../beside/p", id="make a FIFO"),
    pytest.param("python3 -c 'import os; os.rename(\"../beside\", \"../other\")'", id="rename a folder"),
    pytest.param("echo 5 > /proc/$PPID/oom_score_adj", id="a process file of ours"),
    pytest.param("tr '\\0' '\\n' < /proc/$PPID/environ > environ && cat environ", id="reading our environment"),
    pytest.param("head -c 1 /proc/$PPID/mem; : 2> /dev/null > /proc/$PPID/mem", id="our memory"),
    pytest.param("kill -9 $PPID", id="a signal to us"),
    pytest.param("python3 -c 'import time; time.clock_settime(time.CLOCK_REALTIME, time.time())'", id="the clock"),
    pytest.param("mknod disk b 7 0", id="a device node of its own"),
    pytest.param("[ $UID = 0 ] || exit 1; mount -t tmpfs none .", id="mount"),
    pytest.param("unshare -Urm mount -t tmpfs none .. && echo a > ../new", id="mount in a namespace of its own"),
    pytest.param("python3 -c 'import os; os.openpty()'", id="a terminal"),
    pytest.param("setsid -w sh -c 'echo a > ../new'", id="in a session of its own"),
    pytest.param("env -i bash -c 'echo a > ../new'", id="without its variables"),
]


@landlock
@pytest.mark.parametrize("line", FAILS)
def test_what_a_command_cannot_do(ws: Path, line: str) -> None:
    before = all_of(ws.parent)
    runs = Runs(ws)
    result = runs(line)
    assert "[exit code" in result, result
    assert all_of(ws.parent) == before
    assert f"[in the sandbox commands write only in {ws} and $TMPDIR ({runs.sandbox.temporary}). " in result or "exit 1" in line


@landlock
def test_a_child_in_the_background_stays_confined(ws: Path, mark: str) -> None:
    runs = Runs(ws)
    runs("(until [ -e go ]; do sleep 0.01; done; echo a > ../new; echo a > over) > /dev/null 2>&1 &")
    (ws / "go").touch()
    until((ws / "over").exists)
    assert not (ws.parent / "new").exists()


@landlock
def test_our_own_threads_are_not_confined(ws: Path) -> None:
    """Not the one that runs the tools, nor one that is started while a command runs."""
    done: list[threading.Thread] = []

    def write(event: Event) -> None:
        if not done:
            done.append(threading.Thread(target=(ws.parent / "from a thread").touch))
            done[0].start()

    Runs(ws)("echo hi", each=write)
    done[0].join()
    (ws.parent / "from here").touch()
    assert (ws.parent / "from a thread").exists()
    assert "NoNewPrivs:\t0" in Path("/proc/self/status").read_text()


@landlock
def test_commands_may_end_what_earlier_ones_have_started_and_nothing_else(ws: Path, mark: str) -> None:
    other = subprocess.Popen(["sleep", "300"])
    try:
        runs = Runs(ws)
        assert runs("sleep 300 > /dev/null & echo $! > pid", "kill $(cat pid) && echo ended") == "ended"
        assert "Operation not permitted" in runs(f"kill {other.pid}")
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@landlock
def test_a_workspace_that_was_made_anew_can_be_written(ws: Path) -> None:
    runs = Runs(ws)
    assert runs('echo a > a; rm -rf "$PWD"; true').endswith(("(no output)", "Permission denied", "directory"))
    shutil.rmtree(ws, ignore_errors=True)
    ws.mkdir()
    assert runs("echo b > b && cat b") == "b"


@landlock
def test_several_at_a_time_are_confined(ws: Path) -> None:
    sandbox, results = Sandbox(ws), list[bytes]()

    def one() -> None:
        ctx = ToolContext(ws, Abort())
        sandbox.before_tool_call(call := ToolCall("1", "bash", {}), ctx)
        results.append(b"".join(output_of(["sh", "-c", "echo a > ../new || echo no"], ws, Abort(), 20, confine=ctx.confine)))
        list(sandbox.after_tool_call(call, ToolResult("")))

    threads = [threading.Thread(target=one) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert [b"no" in result for result in results] == [True] * 8 and not (ws.parent / "new").exists()


# ---- searches --------------------------------------------------------------------------------------------


class Noted:
    """A confinement that notes its use."""

    def __init__(self) -> None:
        self.said: list[str] = []

    @property
    def environment(self) -> Mapping[str, str]:
        return {"MORE": "1"}

    def start(self, start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        self.said.append("start")
        return start()

    def ended(self) -> None:
        self.said.append("ended")


@pytest.mark.parametrize(("tool", "arguments"), [(bash, {"command": "echo $MORE"}), (bash, {"command": "sleep 300", "timeout": 1}),
                                                 (grep, {"pattern": "x"})])
def test_bash_and_grep_start_their_children_in_the_confinement_of_the_call(ws: Path, tool: Tool, arguments: dict[str, Any]) -> None:
    tools, noted = Toolset([tool], cwd=ws), Noted()
    call = ToolCall("1", tool.name, arguments)
    ctx = tools.context(call, Abort())
    ctx.confine = noted
    list(tools.run(call, ctx))
    assert noted.said == ["start", "ended"]


def test_a_child_that_is_left_half_way_is_told_to_its_confinement(ws: Path) -> None:
    noted = Noted()
    work = output_of(["sh", "-c", "echo $MORE; sleep 300"], ws, Abort(), 100, confine=noted)
    assert next(data for data in work if data) == b"1\n"
    work.close()
    assert noted.said == ["start", "ended"]


@landlock
@pytest.mark.parametrize("name", ["grep", "glob"])
def test_a_search_writes_nothing_at_all(ws: Path, name: str) -> None:
    sandbox, ctx = Sandbox(ws), ToolContext(ws, Abort())
    sandbox.before_tool_call(ToolCall("1", name, {}), ctx)
    out = b"".join(output_of(["sh", "-c", "echo a > new; echo a > $TMPDIR/new; echo b > /dev/null; cat ../file"], ws, Abort(), 20,
                             confine=ctx.confine))
    assert out.endswith(b"kept") and out.count(b"ermission denied") + out.count(b"cannot create") >= 2
    assert not (ws / "new").exists() and not (sandbox.temporary / "new").exists()


@landlock
def test_a_search_finds_what_there_is(ws: Path) -> None:
    (ws / "a.txt").write_text("needle\n")
    runs = Runs(ws)
    with serve(Reply(calls=[("grep", {"pattern": "needle"})]), FINE) as server:
        ask(server, tools=runs.tools, hooks=runs.hooks)
        assert server.requests[-1]["messages"][-1]["content"] == "a.txt:1:needle"


# ---- the network -----------------------------------------------------------------------------------------


@pytest.mark.skipif(available() < NETWORK_ABI, reason="the Landlock of this kernel, if any, knows no TCP")
def test_tcp_can_be_turned_off(ws: Path) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        connect = f"exec 3<>/dev/tcp/127.0.0.1/{server.server_port} && echo connected"
        listen = "python3 -c 'import socket; socket.create_server((\"127.0.0.1\", 0)); print(\"bound\")'"
        runs = Runs(ws)
        assert runs(connect) == "connected" and runs(listen) == "bound"
        runs = Runs(ws, network=False)
        for line in (connect, listen):
            result = runs(line)
            assert "ermission denied" in result and "and have no network" in result
        assert "have no network" in runs.sandbox.summary
        server.shutdown()


def filtered(work: str) -> str:
    return f"python3 -c 'import ctypes, os, socket, sys; {work}'"


@landlock
@pytest.mark.skipif(not can_filter(), reason="no filters of system calls here")
@pytest.mark.parametrize("abi", [None, 3])
def test_without_a_network_there_are_sockets_for_this_machine_only(ws: Path, abi: int | None) -> None:
    """Also where Landlock knows no TCP."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        at = server.getsockname()
        runs = Runs(ws, network=False, abi=abi)
        for line in (f"socket.socket().sendto(b\"x\", 0x20000000, {at})".replace("'", '"'),  # TCP fast open
                     "socket.socket(type=socket.SOCK_STREAM, proto=262)", "socket.socket(type=socket.SOCK_DGRAM)",
                     "socket.socket(socket.AF_INET6)", "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
                     "os.execvp(\"python3\", [\"python3\", \"-c\", \"import socket; socket.socket()\"])",
                     "sys.exit(13 if ctypes.CDLL(None, use_errno=True).syscall(425, 1, 0) and ctypes.get_errno() == 13 else 0)"):
            result = runs(filtered(line.replace("'", '"')))
            assert "[exit code" in result and ("ermission denied" in result or "code 13" in result), line
        assert runs(filtered("socket.socketpair(); socket.socket(socket.AF_UNIX); socket.if_nameindex(); print(1)")) == "1"
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert not any("network" in notice for notice in runs.sandbox.notices)
    assert Runs(ws)(filtered("socket.socket(type=socket.SOCK_DGRAM); print(1)")) == "1", "with a network there is no filter"


def run_filter(program: list[tuple[int, int, int, int]], number: int, arch: int, argument: int) -> int:
    """What seccomp's machine makes of a call, as far as our filter uses it."""
    data, value, at = {0: number, 4: arch, 16: argument}, 0, 0
    while True:
        code, true, false, given = program[at]
        if code == 0x06:
            return given
        if code == 0x20:
            value = data[given]
        else:
            at += true if (value == given if code == 0x15 else value >= given) else false
        at += 1


@pytest.mark.parametrize(("arch", "number"), [(0xC000003E, 41), (0xC00000B7, 198), (0x40000003, 359), (0x40000028, 281)])
def test_the_filter_knows_the_calls_of_each_machine(arch: int, number: int) -> None:
    program = without_network()
    allowed = [family for family in range(50) if run_filter(program, number, arch, family) == 0x7FFF0000]
    assert allowed == [1, 16]
    denied = [each for each in range(600) if run_filter(program, each, arch, 2) != 0x7FFF0000]
    assert denied == sorted({number, 425, *([102] if arch < 0x50000000 else [])})
    assert run_filter(program, 0x40000000 + 41, arch, 2) == run_filter(program, 0, 0xC0000015, 0) == 0x00050000 | 13


@pytest.mark.skipif(can_filter(), reason="this machine has filters")
def test_without_filters_it_is_said_that_udp_goes_on(ws: Path) -> None:
    assert "network" in Sandbox(ws, network=False).notices[-1] or not available()


# ---- SBX-03: our own folders -----------------------------------------------------------------------------


@pytest.mark.case("SBX-03")
@landlock
def test_our_folders_that_are_not_there_are_not_made_by_a_command(ws: Path) -> None:
    config, data = ws / ".config" / "coder", ws / ".local" / "share" / "coder"
    runs = Runs(ws, config=config, data=data)
    result = runs(f"mkdir -p {config}/plugins {data} && echo OPENAI_BASE_URL=http://evil > {config}/.env && "
                  f"echo evil > {config}/plugins/a.py && touch {data}/sessions.db && echo made")
    assert not config.exists() and not data.exists()
    assert result.startswith("made\n[undone: .config/coder (new), .local/share/coder (new). ")
    assert "undone: .config/coder (new), .local/share/coder (new)." in runs.notices
    elsewhere = ws.parent / "home" / ".config" / "coder"
    result = Runs(ws, config=elsewhere, data=elsewhere / "data")(f"mkdir -p {elsewhere}")
    assert "Permission denied" in result and not elsewhere.parent.exists()


@pytest.mark.case("SBX-03")
def test_our_folders_that_are_there_are_put_back_as_they_were(ws: Path) -> None:
    config, data = ws / ".config" / "coder", ws / ".local" / "coder"
    shadow = data / "snapshots" / "1" / "config"
    for path in (config / "plugins" / "own.py", config / ".env", config / "hooks.json", shadow):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
        path.chmod(0o600)
    before = {path: (path.lstat().st_mode, path.is_file() and path.read_bytes()) for path in (*config.rglob("*"), shadow)}
    runs = Runs(ws, config=config, data=data)
    result = runs("cd .config/coder && echo evil >> .env && rm hooks.json && chmod 666 plugins/own.py && ln -s /etc/passwd plugins/b.py "
                  f"&& mkdir agents && echo evil > agents/a.md && echo evil >> {shadow} && touch {data}/sessions.db "
                  f"&& mkdir {data}/snapshots/2 && touch {data}/snapshots/2/config")
    assert {path: (path.lstat().st_mode, path.is_file() and path.read_bytes()) for path in (*config.rglob("*"), shadow)} == before
    for name in (".env (changed)", "hooks.json (removed)", "plugins/own.py (changed)", "plugins/b.py (new)", "agents (new)",
                 "snapshots/1/config (changed)"):
        assert name in result
    assert (data / "sessions.db").exists() and (data / "snapshots" / "2" / "config").exists()  # ours, too, write there meanwhile
    assert "agents/a.md" not in result and runs("cd .config/coder && ls -a") == ".\n..\n.env\nhooks.json\nplugins"


def test_a_link_that_leads_to_our_folder_does_not_lead_elsewhere_afterwards(ws: Path) -> None:
    """What counts is what we would read, whatever folder of the way was exchanged."""
    (ws / ".config" / "coder").mkdir(parents=True)
    (ws / ".config" / "coder" / ".env").write_text("mine")
    runs = Runs(ws, config=ws / ".config" / "coder")
    runs("mv .config old && mkdir -p evil/coder && echo evil > evil/coder/.env && ln -s evil .config")
    assert (ws / ".config" / "coder" / ".env").read_text() == "mine"


@landlock
def test_putting_back_writes_nothing_outside_of_the_workspace(ws: Path) -> None:
    """The way to our folder is led out of the workspace: it is told, and what lies there is left alone."""
    theirs = ws.parent / "beside" / "coder"
    for folder, text in ((ws / ".config" / "coder", "mine"), (theirs, "theirs")):
        folder.mkdir(parents=True)
        (folder / ".env").write_text(text)
    result = Runs(ws, config=ws / ".config" / "coder")("mv .config old; ln -s ../beside .config")
    assert (theirs / ".env").read_text() == "theirs" and [path.name for path in theirs.iterdir()] == [".env"]
    assert ".config/coder/.env (changed; not undone: Permission denied)" in result


# ---- SBX-04: what git runs -------------------------------------------------------------------------------


@pytest.fixture
def repository(ws: Path) -> Path:
    git(ws, "init", "-q", "-b", "main")
    (ws / "file.txt").write_text("text\n")
    git(ws, "add", "-A")
    git(ws, "commit", "-qm", "first")
    (ws / ".git" / "hooks" / "commit-msg").write_text("#!/bin/sh\nexit 0\n")
    (ws / ".git" / "hooks" / "commit-msg").chmod(0o755)
    return ws


def state(folder: Path) -> dict[str, Any]:
    """What git would run in there."""
    paths = [folder / ".git", *folder.glob(".git/config*"), *folder.glob(".git/hooks/**/*"), *folder.glob(".git/modules/**/config"),
             *folder.glob(".git/modules/**/hooks/*"), *folder.glob(".git/commondir"), *folder.glob(".git/worktrees/*/co[nm]*")]
    return {str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else
            (path.stat().st_mode, path.is_file() and path.read_bytes()) for path in paths if path.suffix != ".sample"}


UNDONE = [
    pytest.param("echo evil > .git/hooks/pre-commit; chmod +x .git/hooks/pre-commit; git config core.fsmonitor ./evil",
                 ".git/config (core.fsmonitor), .git/hooks/pre-commit (new)", marks=pytest.mark.case("SBX-04"), id="hook and config"),
    pytest.param("echo evil >> .git/hooks/commit-msg", ".git/hooks/commit-msg (changed)", id="a hook that was there"),
    pytest.param("chmod 600 .git/hooks/commit-msg", ".git/hooks/commit-msg (changed)", id="its mode"),
    pytest.param("rm .git/hooks/commit-msg", ".git/hooks/commit-msg (removed)", id="a hook less"),
    pytest.param("ln -s ../../evil .git/hooks/post-checkout", ".git/hooks/post-checkout (new)", id="a hook that is a link"),
    pytest.param("ln -sf ../../evil .git/hooks/commit-msg", ".git/hooks/commit-msg (changed)", id="a hook that becomes a link"),
    pytest.param("mkdir -p .git/hooks/pre-push.d/a; touch .git/hooks/pre-push.d/a/b", ".git/hooks/pre-push.d (new)", id="a hooks' folder"),
    pytest.param("mv .git/hooks .git/h; mkdir evil; touch evil/commit-msg evil/pre-push; ln -s ../evil .git/hooks",
                 ".git/hooks (new), .git/hooks/commit-msg (removed)", id="another hooks folder"),
    pytest.param("rm .git/config; mkdir .git/config", ".git/config (changed)", id="config becomes a folder"),
    pytest.param("cp .git/config c; mv c evil; ln -sf ../evil .git/config", ".git/config (changed)", id="config becomes a link"),
    pytest.param("rm .git/config; mkfifo .git/config", ".git/config (changed)", id="config becomes a FIFO"),
    pytest.param("printf '[core]\\n\\tpager = evil\\n' > .git/config.worktree",
                 ".git/config.worktree (core.pager)", id="the other config"),
    pytest.param("mkdir evil; cp -r .git/* evil; echo ../evil > .git/commondir", ".git/commondir (new)", id="commondir"),
    pytest.param("cp -r .git evil; mv .git evil/old; echo gitdir: evil > .git", ".git (changed)", id="a .git that leads elsewhere"),
    pytest.param("printf '\\t[core] pager = evil\\n' >> .git/config", f".git/config ({NOT_PLAIN})", id="section and key in a line"),
    pytest.param("printf '[core]\\n\\tfilemode = \\\\\\n pager = evil\\n' >> .git/config", f"({NOT_PLAIN})", id="a line that goes on"),
    pytest.param("printf '[user]\\n\\tname = a\\r[core]pager=evil\\n' >> .git/config", f"({NOT_PLAIN})", id="a carriage return"),
    pytest.param("printf '\\tpager = evil\\n' > .git/config; cat .git/config", f"({NOT_PLAIN})", id="no section"),
    pytest.param("head -c 2M /dev/zero | tr '\\0' ' ' >> .git/config", ".git/config (changed)", id="too large to be read"),
    pytest.param("git config core.pager evil & wait; sleep 300", ".git/config (core.pager)", id="timed out"),
]


@pytest.mark.parametrize(("line", "told"), UNDONE)
def test_what_git_would_run_is_undone_and_told(repository: Path, line: str, told: str) -> None:
    before = state(repository)
    runs = Runs(repository)
    result = runs(line, timeout=1 if "300" in line else 20)
    assert "[undone: " in result and told in result, result
    assert told in runs.notices
    # a command that has moved the whole repository away has done just that
    assert state(repository) == ({".git": before[".git"]} if "mv .git " in line else before)


def undone_keys(repository: Path, *settings: str) -> list[str]:
    """Which of these, each given to `git config` alone, are undone."""
    watch, found = Watch(repository), list[str]()
    for setting in settings:
        watch.begin()
        git(repository, "config", *setting.split(" ", 1))
        found += [change.what for change in watch.end(lambda work: work())]
    return found


def test_keys_that_name_a_program_count(repository: Path) -> None:
    """Those of git's documentation that name or lead to a program, and some that git does not know."""
    runs = ("core.pager less", "core.editor vi", "core.hooksPath hooks", "core.sshCommand ssh -v", "core.gitProxy p", "core.askPass p",
            "core.alternateRefsCommand p", "core.worktree /", "core.attributesFile a", "core.fsmonitor ./evil", "pager.log p",
            "sequence.editor p", "diff.external p", "diff.pdf.textconv p", "diff.pdf.command p", "merge.m.driver p", "filter.f.clean p",
            "filter.f.smudge p", "filter.f.process p", "alias.st !status", "credential.helper p", "credential.https://a.b.helper p",
            "include.path ../x", "includeIf.gitdir:/.path x", "gpg.program p", "gpg.ssh.program p", "gpg.ssh.defaultKeyCommand p",
            "sendemail.smtpServer /p", "sendemail.toCmd p", "man.m.cmd p", "browser.b.cmd p", "difftool.d.cmd p", "mergetool.m.path p",
            "interactive.diffFilter p", "remote.origin.uploadpack p", "remote.origin.receivepack p", "remote.origin.vcs p",
            "uploadpack.packObjectsHook p", "tar.zip.command p", "trailer.t.command p", "protocol.ext.allow always", "imap.tunnel p",
            "init.templateDir t", "gc.recentObjectsHook p", "pull.twohead p", "hook.h.command p", "annex.x-command p", "web.browser b",
            "url.ext::p.insteadOf https://", "branch.main.mergeOptions -sx", "user.a.name b",
            "remote.origin.url ext::sh -c evil", "branch.main.remote ext::sh", "submodule.s.update !evil", "submodule.s.url foo::bar",
            "core.hooksPath 1", "core.hooksPath true", "include.path 1", "core.attributesFile on", "init.templateDir 2",
            "http.sslVerify false", "alias.s bisect run ./evil", "alias.s fetch --upload-pack=evil .", "alias.s -c core.pager=evil log",
            "alias.s status; !evil", "alias.s pull ext::evil", "alias.s diff --output=.git/hooks/x", "merge.tool ../../evil",
            "gui.recentRepo x")
    lowered = [f"{setting.split(' ')[0].split('.', 1)[0].lower()}" for setting in runs]
    found = undone_keys(repository, *runs)
    assert [key.split(".", 1)[0] for key in found] == lowered
    assert "pager" not in git(repository, "config", "--list")


def test_keys_that_name_none_pass(repository: Path) -> None:
    plain = ("user.name me", "user.email a@b", "core.autocrlf input", "core.fileMode false", "color.ui auto", "pull.rebase true",
             "push.default simple", "remote.origin.url https://a/b", "remote.origin.url git@a:b/c", "remote.my.fork.url ssh://a/b",
             "branch.feature/x.remote origin", "branch.v1.2.merge refs/heads/v1.2", "branch.main.description two \\ words \"x\" # y",
             "submodule.s.update rebase", "commit.gpgSign true", "extensions.worktreeConfig true", "http.postBuffer 1",
             "core.fsmonitor false", "core.fscache true", "core.sharedRepository group", "credential.useHttpPath yes", "core.pager 1",
             "log.date iso", "format.pretty oneline", "i18n.commitEncoding utf-8", "merge.tool meld", "rebase.updateRefs true",
             "am.threeWay true", "maintenance.strategy incremental", "maintenance.gc.enabled 0", "receive.denyCurrentBranch updateInstead",
             "versionsort.suffix -rc", "grep.patternType perl", "alias.st status", "alias.lg log --oneline --graph -20")
    assert undone_keys(repository, *plain) == []
    assert "name = me" in (repository / ".git" / "config").read_text()


def test_what_git_reads_in_a_configuration_we_read_too() -> None:
    data = (b'[core]\n\tbare\n; c\n[Remote "A.b\\"c"]\n\tURL = x # y\n  fetch=\n[x "y"] # c\n[z] a = b\n\t\\\nb\n'
            b'[core]\n\tb = c\\\n\td = e\nf = g')
    assert entries(data) == [("core.bare", ""), ('remote.A.b\\"c.url', "x # y"), ('remote.A.b\\"c.fetch', ""), (NOT_PLAIN, '[x "y"] # c'),
                             (NOT_PLAIN, "[z] a = b"), (NOT_PLAIN, "\t\\"), (NOT_PLAIN, "b"), (NOT_PLAIN, "\tb = c\\"),
                             (NOT_PLAIN, "\td = e"), ("core.f", "g")]


def test_lines_that_were_there_before_do_not_count(repository: Path) -> None:
    with (repository / ".git" / "config").open("a") as file:
        file.write("[alias] st = status\n[core]\n\tpager = less \\\n -R\n")
    runs = Runs(repository)
    assert runs("git checkout -qb side && git branch -q -u main && git config user.name x && echo done") == "done"
    assert "undone" in runs("sed -i 's/ -R/ -R; evil/' .git/config") and "evil" not in (repository / ".git" / "config").read_text()


LEGITIMATE = [
    pytest.param("git init -q new && cd new && git add -A && git commit -qm x --allow-empty && git log --format=%s", "x", id="init below"),
    pytest.param("echo b > b && git add b && git commit -qm second && git log -1 --format=%s", "second", id="commit"),
    pytest.param("git remote add origin https://a/b && git checkout -qb side && git branch -q -u main && git stash -q; echo yes", "yes",
                 id="remote"),
    pytest.param("git clone -q . copy && git -C copy status -s && git worktree add -q tree && cd tree && "
                 "git commit -q --allow-empty -m t && echo yes", "yes", id="clone, worktree"),
    pytest.param("git clone -q . ../ws/inner && git -c protocol.file.allow=always submodule --quiet add $PWD/inner deep/sub 2>/dev/null; "
                 "git commit -qm s && git config -f .git/modules/deep/sub/config core.worktree", "../../../../deep/sub", id="submodule"),
    pytest.param("git gc -q && git tag v1 && git notes add -m n && git tag", "v1", id="gc, tag"),
    pytest.param("rm -rf .git && echo gone", "gone", id="no repository any more"),
]


@landlock
@pytest.mark.parametrize(("line", "output"), LEGITIMATE)
def test_the_daily_work_of_git_passes(repository: Path, line: str, output: str) -> None:
    runs = Runs(repository)
    assert runs(line) == output
    assert runs.notices == ""


def test_a_repository_that_a_command_makes_passes_without_what_runs(ws: Path) -> None:
    runs = Runs(ws)
    assert runs("git init -q && git config user.name n && git status -s && echo yes") == "yes" and not runs.notices
    shutil.rmtree(ws / ".git")
    assert ".git/config (core.pager)" in runs("git init -q && git config core.pager evil")
    assert (ws / ".git" / "HEAD").exists() and not (ws / ".git" / "config").exists()


def test_hooks_and_config_of_submodules_and_worktrees_count(repository: Path) -> None:
    runs = Runs(repository)
    runs("git clone -q . inner && git -c protocol.file.allow=always submodule --quiet add $PWD/inner a/sub && git worktree add -q tree && "
         "git config extensions.worktreeConfig true && git -C tree config --worktree user.name x && echo done")
    assert runs.results == ["done"]
    before = state(repository)
    result = runs("touch .git/modules/a/sub/hooks/pre-commit; git -C a/sub config core.pager evil; "
                  "git -C tree config --worktree core.pager e; echo ../../../evil > .git/worktrees/tree/commondir; "
                  "git -C a/sub config core.worktree /etc")
    for name in (".git/modules/a/sub/hooks/pre-commit (new)", ".git/modules/a/sub/config (core.worktree, core.pager)",
                 ".git/worktrees/tree/config.worktree (core.pager)", ".git/worktrees/tree/commondir (changed)"):
        assert name in result
    assert state(repository) == before


@landlock
def test_undoing_writes_nothing_outside_of_the_workspace(repository: Path) -> None:
    """A command exchanges the folder of the hooks for one of the person's: what is in there is left alone."""
    target = repository.parent / "beside"
    (target / "pre-push").write_text("the person's")
    runs = Runs(repository)
    runs(f"rm -r .git/hooks; ln -s {target} .git/hooks")
    assert [path.name for path in target.iterdir()] == ["pre-push"]
    result = runs(f"mv .git old; ln -s {target} .git")
    assert [path.name for path in target.iterdir()] == ["pre-push"] and ".git (changed)" in result


def test_another_repository_that_git_was_led_to_is_left_as_it_is(repository: Path) -> None:
    """What lies there is new only to us."""
    other = repository / "other"
    other.mkdir()
    git(other, "init", "-q")
    git(other, "config", "alias.st", "status")
    (other / ".git" / "hooks" / "pre-push").write_text("theirs")
    result = Runs(repository)("mv .git old; echo gitdir: other/.git > .git")
    assert ".git (changed)" in result and "other" not in result
    assert git(other, "config", "alias.st") == "status\n" and (other / ".git" / "hooks" / "pre-push").read_text() == "theirs"


def test_a_change_that_cannot_be_undone_is_told(repository: Path) -> None:
    """A hook that is too large to be kept: the change stays, and is said."""
    hook = repository / ".git" / "hooks" / "pre-push"
    hook.write_bytes(b"#" * (2 << 20))
    assert "pre-push (changed; not undone: " in Runs(repository)("echo evil >> .git/hooks/pre-push")
    assert hook.stat().st_size == (2 << 20) + 5


@landlock
def test_what_the_background_changes_is_told_at_the_next_occasion_and_left(repository: Path, mark: str) -> None:
    runs = Runs(repository)
    runs("(until [ -e go ]; do sleep 0.01; done; git config core.pager evil; touch over) > /dev/null 2>&1 &")
    assert not runs.sandbox.since()
    (repository / "go").touch()
    until((repository / "over").exists)
    runs("echo next")
    assert runs.notices == "Changed since the last command, and left so: .git/config (core.pager)."
    git(repository, "config", "core.editor", "evil")
    assert runs.sandbox.since() == ["Changed since the last command, and left so: .git/config (core.editor)."]
    assert not runs.sandbox.since()


@landlock
def test_one_task_ends_with_what_the_background_has_changed(tmp_path: Path) -> None:
    def script(body: Body) -> Reply:
        if body["messages"][-1]["role"] == "user":
            late = "(until [ -e go ]; do sleep 0.01; done; git config core.pager evil; touch over) > /dev/null 2>&1 &"
            return Reply(calls=[("bash", {"command": late})])
        (tmp_path / "ws" / "go").touch()
        until((tmp_path / "ws" / "over").exists)
        return Reply("done")

    (tmp_path / "ws").mkdir()
    git(tmp_path / "ws", "init", "-q")
    with ScriptedServer(script) as server, OneShot(tmp_path, server, "-y", "go") as run:
        assert run.end() == 0 and run.out == "done\n"
        assert run.err.endswith("Changed since the last command, and left so: .git/config (core.pager).\n")


def test_commands_side_by_side_are_compared_with_the_state_before_both(repository: Path) -> None:
    """The second begins after the first has made its change, and ends before it."""
    watch = Watch(repository)
    watch.begin()
    git(repository, "config", "core.pager", "evil")
    assert watch.begin() == []
    changed = [Change(repository / ".git" / "config", "core.pager")]
    assert watch.end(lambda work: work()) == changed
    git(repository, "config", "core.editor", "evil")
    assert [change.what for change in watch.end(lambda work: work())] == ["core.editor"]
    assert "evil" not in (repository / ".git" / "config").read_text()


# ---- where git's folder lies elsewhere -------------------------------------------------------------------


@landlock
def test_in_a_folder_of_a_repository_and_in_a_linked_worktree_one_can_commit(repository: Path) -> None:
    below, tree = repository / "below", repository.parent / "tree"
    below.mkdir()
    git(repository, "worktree", "add", "-q", str(tree))
    for folder in (below, tree):
        runs = Runs(folder)
        assert runs("echo a > new && git add new && git commit -qm inside && git log -1 --format=%s") == "inside"
        assert "Permission denied" in runs(f"echo a > {repository}/file.txt")
        assert "hooks/pre-push (new)" in runs("touch $(git rev-parse --git-common-dir)/hooks/pre-push")
    assert not (repository / ".git" / "hooks" / "pre-push").exists()


@pytest.mark.parametrize("planted", ["gitdir", "commondir", "link", "submodule"])
def test_a_git_file_is_not_believed_alone(ws: Path, planted: str) -> None:
    """What lies in the workspace came from anybody, and must not open another folder for writing."""
    home = ws.parent / "home" / "repo"
    home.mkdir()
    git(home, "init", "-q")
    if planted == "gitdir":
        (ws / ".git").write_text(f"gitdir: {home}/.git\n")
    elif planted == "link":
        (ws / ".git").symlink_to(home / ".git")
    else:
        inner = ws / "inner" / "worktrees" / "x" if planted == "commondir" else ws / "inner"
        inner.mkdir(parents=True)
        (inner / "HEAD").write_text("ref: refs/heads/main\n")
        (inner / "gitdir").write_text(str(ws / ".git"))
        (inner / "config").write_text(f"[core]\n\tworktree = {ws}\n")
        (inner / "commondir").write_text(str(home / ".git"))
        (ws / ".git").write_text(f"gitdir: {inner}\n")
    assert all(folder.is_relative_to(ws) for folder in git_folders(ws))


# ---- folders that are made to break the look ------------------------------------------------------------

STRANGE = {"a HEAD whose name is too long": "mkdir .git; ln -s $(printf a%.0s {1..300}) .git/HEAD",
           "a .git that leads to too long a name": "echo gitdir: $(printf a%.0s {1..5000}) > .git",
           "a .git with a NUL": "printf 'gitdir: a\\0b' > .git", "a .git that leads to itself": "ln -s .git .git",
           "a commondir with a NUL": "git init -q; printf 'a\\0b' > .git/commondir",
           "a worktree with a NUL":
               "mkdir g; echo x > g/HEAD; printf '[core]\\n\\tworktree = a\\0b\\n' > g/config; echo gitdir: g > .git",
           "hooks that lead to too long a name": "git init -q; printf '[core]\\n\\thooksPath = %05000d\\n' 1 >> .git/config",
           "a .git that is closed": "mkdir .git; chmod 000 .git",
           "a .git in a closed folder": "echo gitdir: ../beside/x > .git; chmod 000 ../beside"}


@landlock
@pytest.mark.parametrize("line", STRANGE.values(), ids=STRANGE)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_no_folder_turns_the_sandbox_off(ws: Path, line: str) -> None:
    script = "runs = Runs(Path.cwd())\nprint(json.dumps([runs.sandbox.notices, runs('echo a > ../new; ls ..; echo end')]))"
    subprocess.run(["bash", "-c", line], cwd=ws, check=True)
    try:
        notices, result = json.loads(in_a_child(ws, script, without_override))
    finally:
        (ws.parent / "beside").chmod(0o755)
    assert notices == [] and "Permission denied" in result and not (ws.parent / "new").exists()


EVIL = "printf '#!/bin/sh' > .git/hooks/pre-commit; chmod +x .git/hooks/pre-commit; "
DEEP = """python3 - <<'END'
import os
os.chdir('.git')
for at in range(400):
    os.mkdir(name := 'modules' if at % 9 == 0 else 'a')
    os.chdir(name)
    if at % 9 == 8: open('HEAD', 'w').close()
END
"""
BREAKING = {
    "submodules in submodules": (DEEP, ""),
    "many submodules": ("mkdir -p .git/modules; cd .git/modules; mkdir $(seq 3000); cd ../..",
                        ".git/modules (holds too much to be looked at; not undone"),
    "a closed submodule": ("mkdir -p .git/modules/x; chmod 000 .git/modules/x", ".git/modules/x (cannot be looked into)"),
    "closed hooks": ("chmod 311 .git/hooks", ".git/hooks (cannot be looked into)"),
    "closed worktrees": ("mkdir .git/worktrees; chmod 000 .git/worktrees", ".git/worktrees (cannot be looked into)"),
    "many hooks": ("cd .git/hooks; for i in {1..3000}; do : > f$i; done; cd ../..", ".git/hooks (holds too much to be looked at)"),
    "many samples": ("cd .git/hooks; for i in {1..3000}; do : > f$i.sample; done; cd ../..", ".git/hooks (holds too much to be looked at)"),
}


@pytest.mark.parametrize(("line", "told"), BREAKING.values(), ids=BREAKING)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_hook_does_not_hide_behind_what_breaks_the_look(repository: Path, line: str, told: str) -> None:
    script = f"runs = Runs(Path.cwd())\nprint(json.dumps([runs({EVIL + line!r}), runs.notices, runs('echo next'), runs.notices]))"
    first, notices, second, later = json.loads(in_a_child(repository, script, without_override))
    assert not (repository / ".git" / "hooks" / "pre-commit").exists()
    assert (repository / ".git" / "hooks" / "commit-msg").exists()
    assert "[undone: " in first and told in first and told in notices
    assert (second, later) == ("next", "")
    assert len(first) < 3000 and first.count("too much") <= 1, "told once, and in few words"


def test_what_was_closed_is_open_again(repository: Path) -> None:
    script = "runs = Runs(Path.cwd())\nruns('chmod 311 .git/hooks; mkdir -p .git/modules/x; chmod 000 .git/modules .git/modules/x')"
    in_a_child(repository, script, without_override)
    assert all((repository / ".git" / name).stat().st_mode & 0o700 == 0o700 for name in ("hooks", "modules", "modules/x"))


def test_an_interrupt_does_not_keep_a_hook_from_being_undone(repository: Path) -> None:
    """Ctrl+C, twice, while the look goes on."""
    sandbox = Sandbox(repository)
    ctx, call = ToolContext(repository, Abort()), ToolCall("1", "bash", {})
    sandbox.before_tool_call(call, ctx)
    assert ctx.confine
    hooks = repository / ".git" / "hooks"
    ctx.confine.start(lambda: subprocess.Popen(["true"])).wait()
    for name in ["pre-commit", *map(str, range(1000))]:
        (hooks / name).touch()
    pressing = threading.Event()

    def press() -> None:
        pressing.wait()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.005)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        try:
            pressing.set()
            ctx.confine.ended()
        finally:
            thread.join()
    # on a busy machine it is at work for longer than an interrupt waits for it
    until(lambda: {path.name for path in hooks.iterdir() if path.suffix != ".sample"} == {"commit-msg"}, "the hooks undone")
    told: list[str] = []
    until(lambda: told.extend(sandbox.since()) or told, "something told")
    assert "undone: .git/hooks/" in told[0], "what an interrupt has kept from being told is told at the end"


def test_the_look_keeps_little_of_what_is_planted(repository: Path) -> None:
    watch = Watch(repository)
    watch.begin()
    for number in range(100):
        (repository / ".git" / "hooks" / str(number)).write_bytes(b"#" * 1_000_000)
    tracemalloc.start()
    try:
        assert len(watch.end(lambda work: work())) == 100
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_the_look_keeps_little_of_what_was_there(repository: Path) -> None:
    hooks = repository / ".git" / "hooks"
    for number in range(40):
        (hooks / str(number)).write_bytes(b"#" * 1_000_000)
    watch = Watch(repository)
    tracemalloc.start()
    try:
        watch.begin()
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()
    for path in hooks.glob("?"):
        path.write_bytes(b"!" * 1_000_000)
    changes = watch.end(lambda work: work())
    assert len(changes) == 10 and any(not each.problem for each in changes), "those that were kept are put back, of others it is told"


# ---- ways around the look --------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ['""!touch evil', '"!touch evil"', '!""touch'])
def test_quotes_do_not_hide_what_git_runs(repository: Path, value: str) -> None:
    for text in (f'[submodule "s"]\n\tupdate = {value}\n', '[remote "o"]\n\turl = e""xt::sh -c evil\n'):
        watch = Watch(repository)
        watch.begin()
        with (repository / ".git" / "config").open("a") as file:
            file.write(text)
        assert len(watch.end(lambda work: work())) == 1


def test_a_submodule_that_becomes_a_link_counts(repository: Path) -> None:
    inner = repository / ".git" / "modules" / "sub"
    git(repository, "init", "-q", "--bare", str(inner))
    runs = Runs(repository)
    told = "mv .git/modules/sub .m && ln -s ../../.m .git/modules/sub && git config -f .m/config core.fsmonitor evil"
    assert ".git/modules/sub (new)" in runs(told) and not inner.is_symlink()
    assert ".git/modules (new)" in runs("rm -r .git/modules && ln -s ../.m .git/modules")
    assert ".git/worktrees (new)" in runs("ln -s ../.m .git/worktrees")


def test_the_folders_that_the_configuration_leads_to_count(repository: Path) -> None:
    (repository / ".husky" / "_").mkdir(parents=True)
    (repository / ".husky" / "pre-commit").write_text("mine")
    (repository / ".gitconfig").write_text("[include]\n\tpath = more # and more\n")
    git(repository, "config", "core.hooksPath", ".husky/_")
    git(repository, "config", "include.path", "../.gitconfig")
    (repository / "more").write_text("[core]\n")
    result = Runs(repository)("echo evil >> .husky/pre-commit; touch .husky/_/pre-push; git config -f more core.pager evil; "
                              "git config -f .gitconfig core.editor evil; git config -f .gitconfig user.name x")
    for told in (".husky/pre-commit (changed)", ".husky/_/pre-push (new)", "more (core.pager)", ".gitconfig (core.editor)"):
        assert told in result
    assert (repository / ".husky" / "pre-commit").read_text() == "mine" and (repository / "more").read_text() == "[core]\n"


def test_a_folder_that_a_command_makes_the_hooks_folder_is_not_emptied(repository: Path) -> None:
    """Its files are the person's, and were no hooks before. Nor is the workspace a hooks folder."""
    (repository / "src").mkdir()
    (repository / "src" / "a.py").touch()
    assert "[undone: .git/config (core.hookspath)." in Runs(repository)("git config core.hooksPath src; touch src/b.py")
    git(repository, "config", "core.hooksPath", ".")
    assert Runs(repository)("touch new; echo ok") == "ok"
    assert (repository / "src" / "a.py").exists() and (repository / "src" / "b.py").exists() and (repository / "new").exists()


def test_a_workspace_that_becomes_a_bare_repository_runs_nothing(ws: Path) -> None:
    (ws / "hooks").mkdir()
    (ws / "hooks" / "useThis.ts").write_text("mine")
    runs = Runs(ws)
    assert "HEAD (new)" in runs("git init -q --bare .; git config core.pager evil") and not (ws / "HEAD").exists()
    assert (ws / "hooks" / "useThis.ts").read_text() == "mine"
    shutil.rmtree(ws / "hooks")
    assert runs("rm -rf config; git init -q --bare . && echo made") == "made" and (ws / "HEAD").exists()
    result = runs("git config core.pager evil; touch hooks/pre-push")
    assert "[undone: config (core.pager), hooks/pre-push (new)" in result and not (ws / "hooks" / "pre-push").exists()


def test_a_rebase_that_would_run_something_counts(repository: Path) -> None:
    todo = repository / ".git" / "rebase-merge" / "git-rebase-todo"
    runs = Runs(repository)
    assert "git-rebase-todo (exec)" in runs("mkdir .git/rebase-merge; echo ' x  evil' > .git/rebase-merge/git-rebase-todo")
    assert not todo.exists()
    assert runs("echo pick 123 exec > .git/rebase-merge/git-rebase-todo; echo ok") == "ok" and todo.exists()


def test_what_ends_outside_first_does_not_accept_what_the_other_has_planted(repository: Path) -> None:
    watch = Watch(repository)
    watch.begin()
    watch.begin()
    (repository / ".git" / "hooks" / "pre-commit").touch()
    assert [each.what for each in watch.end(None)] == ["new"]
    assert [each.what for each in watch.end(lambda work: work())] == ["new"]
    assert not (repository / ".git" / "hooks" / "pre-commit").exists()


@landlock
def test_the_ways_to_servers_that_the_environment_names_are_closed(ws: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("TMUX", "STY", "DBUS_SESSION_BUS_ADDRESS", "DOCKER_HOST")
    for name in names:
        monkeypatch.setenv(name, "x")
    line = f"echo {' '.join(f'${{{name}-none}}' for name in names)}"
    assert Runs(ws)(line) == "none none none none"
    assert Runs(ws, Permissions(can_ask=True))(line, unconfined=True, each=yes) == "x x x x"


def test_a_path_of_relative_folders_alone_is_not_the_workspace(ws: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "bin:.")
    assert environment()["PATH"] == os.defpath


# ---- SBX-05: no sandbox ----------------------------------------------------------------------------------

# A filter of seccomp: the system call 444, landlock_create_ruleset, fails; all others go on. (code, if true, if not, value)
FILTER = [(0x20, 0, 0, 0), (0x15, 0, 1, 444), (0x06, 0, 0, 0x00050000 | 38), (0x06, 0, 0, 0x7FFF0000)]


def without_landlock() -> None:
    """For the `preexec_fn` of a child: it and its children run on a kernel without Landlock."""
    libc = ctypes.CDLL(None, use_errno=True)
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in FILTER))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(FILTER), ctypes.addressof(code)))
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0


def without_override() -> None:
    """For the `preexec_fn` of a child: modes of files hold for root as well there, as they do for others."""
    for capability in (1, 2):  # DAC_OVERRIDE, DAC_READ_SEARCH
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)


def in_a_child(folder: Path, script: str, first: Callable[[], None] = without_landlock) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", f"from tests.test_sandbox import *\n{script}"], cwd=folder, timeout=60,
                          capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, preexec_fn=first)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.case("SBX-05")
@pytest.mark.skipif(sys.platform != "linux", reason="no seccomp here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # preexec_fn beside threads
def test_without_landlock_there_is_a_warning_or_a_refusal(ws: Path) -> None:
    git(ws, "init", "-q")
    said = json.loads(in_a_child(ws, """
from coder.features.sandbox import SandboxError
runs = Runs(Path.cwd())
first = runs("echo a > ../new; git config core.pager evil; exit 1")
try:
    Sandbox(Path.cwd(), required=True)
except SandboxError as error:
    print(json.dumps([runs.sandbox.notices, str(error), runs.sandbox.summary, first, runs.schema, available()]))
"""))
    notices, error, summary, first, schema, abi = said
    assert len(notices) == 1 and notices[0].startswith("No sandbox: this kernel has no Landlock")
    assert error.startswith("there is no sandbox on this system: this kernel has no Landlock")
    assert summary == "" and abi == 0 and "unconfined" not in schema["properties"]
    assert (ws.parent / "new").exists(), "nothing is confined"
    assert "[undone: .git/config (core.pager)" in first and "unconfined" not in first  # compared all the same


def test_on_another_system_the_numbers_of_linux_are_not_called(ws: Path) -> None:
    said = json.loads(in_a_child(ws, """
sys.platform = "freebsd14"
try:
    restrict([])
except OSError:
    print(json.dumps([available(), can_filter(), "NoNewPrivs:\\t0" in Path("/proc/self/status").read_text(), Sandbox(Path.cwd()).active]))
""", lambda: None))
    assert said == [0, False, True, False]


@landlock
@pytest.mark.parametrize(("abi", "words"), [(1, ["empty files", "devices", "signal"]), (2, ["empty files", "devices", "signal"]),
                                            (3, ["devices", "signal"]), (4, ["devices", "signal"]), (5, ["signal"])])
def test_what_an_older_kernel_cannot_do_is_told_and_insisting_refuses(ws: Path, abi: int, words: list[str]) -> None:
    if abi > available():
        pytest.skip("this kernel is older itself")
    notices = Sandbox(ws, abi=abi).notices
    assert [word for word in ("empty files", "devices", "signal") if word in notices[0]] == words
    with pytest.raises(SandboxError, match="not whole"):
        Sandbox(ws, abi=abi, required=True)
    run = Runs(ws, abi=abi)
    assert ("exit" in run("python3 -c 'import os; os.truncate(\"../file\", 0)'")) == (abi >= 3), "the notice tells the truth"


@landlock
def test_with_landlock_there_is_no_warning(ws: Path) -> None:
    sandbox = Sandbox(ws, required=True)
    assert sandbox.notices == [] and sandbox.summary == "Sandbox: commands write only in this folder and a temporary one."


@landlock
def test_a_workspace_that_holds_the_home_folder_is_told_of(ws: Path) -> None:
    for folder in (ws.parent / "home", ws.parent):
        assert Sandbox(folder).notices == ["This folder holds your home folder: the sandbox lets commands write to all of it."]


# ---- SBX-06: without the sandbox after all ---------------------------------------------------------------


@landlock
@pytest.mark.case("SBX-06")
def test_outside_the_sandbox_a_new_yes_is_needed(ws: Path) -> None:
    """The command itself is allowed by a rule; to run it outside is asked for each time, with the whole command."""
    asked: list[tuple[str, str]] = []

    def answer(event: Event) -> None:
        if isinstance(event, PermissionAsked):
            asked.append((event.permission, event.pattern))
            event.reply("once" if "yes" in event.pattern else "no")

    runs = Runs(ws, Permissions(can_ask=True, yolo=True))
    assert "make the call again with unconfined true" in runs("echo yes > ../new", each=answer) and asked == []
    assert runs("echo yes > ../new", unconfined=True, each=answer) == "(no output)"
    assert (ws.parent / "new").read_text() == "yes\n" and asked == [("unconfined", "echo yes > ../new")]
    assert "Denied" in runs("echo no > ../new", unconfined=True, each=answer)
    assert (ws.parent / "new").read_text() == "yes\n" and len(asked) == 2
    assert "Permission denied" in runs("echo no > ../new", unconfined=False, each=answer), "the yes was for one call"


@landlock
@pytest.mark.case("SBX-06")
@pytest.mark.parametrize("permissions", [Permissions(can_ask=False), Permissions([Rule("bash", "*", "allow")], can_ask=False),
                                         Permissions(yolo=True), None])
def test_where_nobody_can_be_asked_it_is_denied(ws: Path, permissions: Permissions | None) -> None:
    runs = Runs(ws, *filter(None, [permissions]))
    assert runs("echo a > ../new", unconfined=True).startswith("Denied")
    assert runs("echo a > ../new", unconfined="true").startswith("Denied")
    assert not (ws.parent / "new").exists()


@landlock
def test_a_change_that_was_allowed_outside_stays_and_is_told(repository: Path) -> None:
    runs = Runs(repository, Permissions(can_ask=True, yolo=True))
    runs("true")
    assert runs("git config core.pager less; echo $TMPDIR", unconfined=True, each=yes) == os.environ.get("TMPDIR", "(no output)")
    assert runs.notices == "A command outside of the sandbox changed .git/config (core.pager)."
    assert runs("git config user.name x; echo next") == "next" and not runs.notices
    assert "pager = less" in (repository / ".git" / "config").read_text()


@landlock
@pytest.mark.parametrize("line", ["exit 1", "echo Permission denied", "ls nothing-here", "(echo EPERMX; exit 1)"])
def test_a_command_that_fails_for_another_reason_gets_no_hint(ws: Path, line: str) -> None:
    assert "sandbox" not in Runs(ws)(line)


@landlock
def test_the_tool_is_as_ever_but_for_one_parameter(ws: Path) -> None:
    made, other = Sandbox(ws).tools([bash, grep])
    assert other is grep and (made.name, made.description) == (bash.name, bash.description)
    assert made.parameters["required"] == bash.parameters["required"]
    assert {name: value for name, value in made.parameters["properties"].items() if name != "unconfined"} == bash.parameters["properties"]
    assert "unconfined" not in bash.parameters["properties"], "the tool itself was changed"
    assert made.title_of({"command": "ls"}) == bash.title_of({"command": "ls"}) == "bash ls"
    assert made.title_of({"command": "ls", "unconfined": True}) == "bash ls (outside of the sandbox)"


# ---- real work in it -------------------------------------------------------------------------------------


@landlock
def test_pytest_and_the_caches_of_package_tools_work(ws: Path) -> None:
    (ws / "test_a.py").write_text("def test_a(tmp_path):\n    (tmp_path / 'a').touch()\n")
    runs = Runs(ws)
    assert "1 passed" in runs(f"{sys.executable} -m pytest -q -p no:cacheprovider test_a.py")
    caches = "PIP_CACHE_DIR UV_CACHE_DIR npm_config_cache GOCACHE"
    assert runs(f"for name in {caches}; do mkdir -p ${{!name}} && [[ ${{!name}} == $TMPDIR/* ]] && echo a > ${{!name}}/a && echo yes; done"
                ) == "yes\nyes\nyes\nyes"


# ---- the thread that starts the children -----------------------------------------------------------------


@landlock
def test_a_thread_that_cannot_be_confined_says_so(ws: Path) -> None:
    def fail() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        ConfinedThread(fail)
    thread = ConfinedThread(lambda: restrict([ws]))
    with pytest.raises(FileNotFoundError):
        thread.run(lambda: (ws / "nothing").read_bytes())
    with pytest.raises(PermissionError):
        thread.run((ws.parent / "new").touch)
    assert thread.run(lambda: 3) == 3, "it goes on after an error"
    thread.run((ws / "new").touch)
    thread.end()


def test_what_an_interrupt_keeps_from_us_is_discarded() -> None:
    """Ctrl+C while a child is being started: there is no process of ours that nobody knows of."""
    mark = os.urandom(8).hex()
    ended: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(["sleep", "300"], env=os.environ | {MARK: mark})
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)  # the main thread is in its wait, where the signal finds it
        return process

    def discard(process: subprocess.Popen[bytes]) -> None:
        ended.append(process)
        process.kill()
        process.wait()

    with pytest.raises(KeyboardInterrupt):
        ConfinedThread(lambda: None).run(start, discard)
    assert len(ended) == 1
    gone(mark)


def test_private_folders_are_private(ws: Path) -> None:
    folder = Sandbox(ws).temporary
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
