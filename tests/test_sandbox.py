"""The sandbox: what a command cannot write, reach or leave behind, and what it can (SBX).

A run is a real one against the scripted server; what counts is what is on the disk afterwards.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from coder.abort import Abort
from coder.devtools.scripted import Body, Reply, ScriptedServer
from coder.events import Event, Notice, PermissionAsked
from coder.hooks import HookChain, Hooks
from coder.permissions.git_guard import GitGuard, writable_git_folders
from coder.permissions.landlock import (
    NETWORK_ABI,
    SandboxThread,
    available,
    call_filter,
    can_filter,
    gaps,
    restrict,
)
from coder.permissions.permissions import Permissions
from coder.permissions.rules import Rule
from coder.permissions.sandbox import Sandbox
from coder.tools.bash import bash
from coder.tools.process import environment, output_of
from coder.tools.search import grep
from coder.toolset import Tool, ToolContext, Toolset
from coder.types import ToolCall, ToolResult
from tests.harness import ask, serve
from tests.terminal import MARK, ROOT, OneShot, gone, processes, until

landlock = pytest.mark.skipif(not available(), reason="this kernel has no Landlock for us")
seccomp = pytest.mark.skipif(not can_filter(), reason="no filters of system calls here")
FINE = Reply("All is well.")


class Runs:
    """Runs commands of a model's, each a call of one answer. `results` are those of the newest."""

    def __init__(self, workspace: Path, *hooks: Hooks, **options: Any) -> None:
        self.sandbox = Sandbox(workspace, **options)
        self.tools = Toolset(self.sandbox.tools([bash, grep]), cwd=workspace)
        self.hooks = HookChain(*hooks, self.sandbox)
        self.events: list[Event] = []

    def __call__(
        self, *lines: str, each: Callable[[Event], None] | None = None, **arguments: Any
    ) -> str:
        """The last command's result."""
        calls = [("bash", {"command": line} | arguments) for line in lines]
        with serve(Reply(calls=calls), FINE) as server:
            self.events, _ = ask(server, tools=self.tools, hooks=self.hooks, each=each)
            messages = server.requests[-1]["messages"]
            self.results = [str(each["content"]) for each in messages if each["role"] == "tool"]
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
    for name in ("AUTHOR_NAME", "COMMITTER_NAME", "AUTHOR_EMAIL", "COMMITTER_EMAIL"):
        monkeypatch.setenv(f"GIT_{name}", "me@here")
    for name in ("CONFIG", "DATA", "CACHE"):
        monkeypatch.delenv(f"XDG_{name}_HOME", raising=False)
    return tmp_path / "ws"


@pytest.fixture
def repository(ws: Path) -> Path:
    git(ws, "init", "-q", "-b", "main")
    (ws / "file.txt").write_text("text\n")
    git(ws, "add", "-A")
    git(ws, "commit", "-qm", "first")
    (ws / ".git" / "hooks" / "commit-msg").write_text("#!/bin/sh\nexit 0\n")
    (ws / ".git" / "hooks" / "commit-msg").chmod(0o755)
    return ws


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What a test leaves in the background is ended."""
    value = os.urandom(8).hex()
    monkeypatch.setenv(MARK, value)
    yield value
    for number in processes(value):
        os.kill(number, signal.SIGKILL)


def yes(event: Event) -> None:
    """The user's answer to each question."""
    if isinstance(event, PermissionAsked):
        event.reply("once")


def all_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Modes and contents of what is outside the workspace."""
    paths = [path for path in folder.rglob("*") if path.relative_to(folder).parts[0] != "ws"]
    return {
        str(each): (each.lstat().st_mode, b"" if each.is_dir() else each.read_bytes())
        for each in paths
    }


def git(folder: Path, *argv: str) -> str:
    return subprocess.run(
        ["git", *argv], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


# ---- SBX-01: what may be written, and what else can be reached ----------------------------------


def table(text: str) -> list[list[str]]:
    """Rows of `command => what is expected`, in which a tilde at an end goes on."""
    return [row.split(" => ") for row in text.strip().replace("~\n", "").split("\n")]


WORKS = table(r"""
echo a > file && cat file => a
echo a > $TMPDIR/file && cat $TMPDIR/file => a
echo a > /dev/null && echo yes => yes
f=$(mktemp) d=$(mktemp -d) && echo a > $f && echo b > $d/b && [[ $f == $TMPDIR/* ]] && echo 1 => 1
mkdir a b && echo c > a/f && mv a/f b/g && ln b/g a/h && cat a/h => c
mv $(mktemp) here && ls here => here
echo long > f && truncate -s 2 f && rm f && mkdir -p x/y && rmdir -p x/y && ln -s . l && ls l/b => g
mkfifo p && (echo hi > p & cat p) => hi
echo a | tee /dev/stderr > /dev/stdout | cat; cat <(echo b) => a a b
cat <<< $(seq 20000) | tail -c 6 => 20000
python3 -c 'import socket as s; s.socket(s.AF_UNIX).bind("sock"); print(1)' => 1
python3 -c 'import multiprocessing as m; m.Lock(); print(1)' => 1
echo $(stat -c %a $TMPDIR $TMPDIR/..) => 700 700
grep -o NoNewPrivs:.* /proc/self/status | tr -d '\t' => NoNewPrivs:1
cat ../file => kept
ulimit -n 100 && ulimit -n => 100
prlimit --cpu=100 prlimit --cpu --output=SOFT --noheadings | tr -d ' ' => 100
prlimit --pid $$ --cpu --output=RESOURCE --noheadings => CPU
n=PIP_CACHE_DIR; mkdir -p ${!n} && [[ ${!n} == $TMPDIR/* ]] && echo ${DOCKER_HOST-none} => none
sleep 300 > /dev/null & echo $! | tee pid | wc -l => 1
kill $(cat pid) && echo ended => ended
""")

FAILS = {
    "a file in the home folder": "echo a > ~/new",
    "a file beside the workspace": "echo a > ../new",
    "a folder": "mkdir ../new",
    "one more line": "echo a >> ../file",
    "remove": "rm ../file",
    "remove a folder": "rmdir ../beside",
    "truncate": "python3 -c 'import os; os.truncate(\"../file\", 0)'",
    "through a link that leaves": "ln -s ../file link && echo a > link",
    "through a folder's link that leaves": "ln -s ../beside dir && echo a > dir/new",
    "through a link to nothing": "ln -s ../beside/new none && echo a > none",
    "through a hard link": "ln ../file hard && echo a > hard",
    "move out": "echo a > a && mv a ../beside/a",
    "move in": "mv ../file here",
    "make a link": "ln -s x ../beside/link",
    "make a FIFO": "mkfifo ../beside/p",
    "rename a folder": 'python3 -c \'import os; os.rename("../beside", "../other")\'',
    "a process file of ours": "echo 5 > /proc/$PPID/oom_score_adj",
    "reading our environment": "tr '\\0' '\\n' < /proc/$PPID/environ > environ && cat environ",
    "our memory": "head -c 1 /proc/$PPID/mem; : 2> /dev/null > /proc/$PPID/mem",
    "a signal to us": "kill -9 $PPID",
    "a signal to another process": "kill $OTHER",
    "our limits": "prlimit --pid $PPID --cpu=100000:100000",
    "one of our limits": "prlimit --pid $PPID --nofile=64:",
    "the clock": "python3 -c 'import time; time.clock_settime(time.CLOCK_REALTIME, time.time())'",
    "a device node of its own": "mknod disk b 7 0",
    "mount": "[ $UID = 0 ] || exit 1; mount -t tmpfs none .",
    "mount in a namespace of its own": "unshare -Urm mount -t tmpfs none .. && echo a > ../new",
    "a terminal": "python3 -c 'import os; os.openpty()'",
    "in a session of its own": "setsid -w sh -c 'echo a > ../new'",
    "without its variables": "env -i bash -c 'echo a > ../new'",
}


@landlock
@pytest.mark.case("SBX-01")
def test_what_commands_need_works(ws: Path, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "x")
    runs = Runs(ws)
    runs(*(line for line, _ in WORKS))
    found = [result.replace("\n", " ") for result in runs.results]
    assert list(zip([line for line, _ in WORKS], found)) == [tuple(row) for row in WORKS]
    assert "NoNewPrivs:\t0" in Path("/proc/self/status").read_text(), "we are not confined"
    (ws.parent / "from here").touch()


@landlock
@seccomp
@pytest.mark.case("SBX-01")
def test_what_a_command_cannot_do(ws: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, limits = all_of(ws.parent), Path("/proc/self/limits").read_text()
    runs = Runs(ws)
    with subprocess.Popen(["sleep", "300"]) as other:
        monkeypatch.setenv("OTHER", str(other.pid))
        runs(*FAILS.values())
        assert other.poll() is None
        other.kill()
    hint = f"[in the sandbox commands write only in {ws} and $TMPDIR ({runs.sandbox.temporary}). "
    for name, result in zip(FAILS, runs.results):
        assert "[exit code" in result and (hint in result or name == "mount"), (name, result)
    assert all_of(ws.parent) == before
    assert Path("/proc/self/limits").read_text() == limits


@landlock
@seccomp
def test_a_command_that_would_kill_the_agent_leaves_nothing_behind(tmp_path: Path) -> None:
    """A CPU limit of 0 kills a process that none of the command's signals reaches."""
    line = "prlimit --pid $PPID --cpu=0:0; echo evil > .git/hooks/pre-commit"
    (tmp_path / "ws").mkdir()
    git(tmp_path / "ws", "init", "-q")
    with serve(Reply(calls=[("bash", {"command": line})]), FINE) as server:
        with OneShot(tmp_path, server, "-y", "go") as run:
            assert (run.end(), run.out) == (0, "All is well.\n")
        assert "Permission denied" in str(server.requests[-1]["messages"][-1])
    assert not (tmp_path / "ws" / ".git" / "hooks" / "pre-commit").exists()


@landlock
def test_a_child_in_the_background_stays_confined(ws: Path, mark: str) -> None:
    runs = Runs(ws)
    runs(
        "(until [ -e go ]; do sleep 0.01; done; echo a > ../new; echo a > over) > /dev/null 2>&1 &"
    )
    (ws / "go").touch()
    until((ws / "over").exists)
    assert not (ws.parent / "new").exists()


@landlock
def test_a_workspace_that_was_made_anew_can_be_written(ws: Path) -> None:
    runs = Runs(ws)
    runs('echo a > a; rm -rf "$PWD"; true')
    shutil.rmtree(ws, ignore_errors=True)
    ws.mkdir()
    assert runs("echo b > b && cat b") == "b"


@landlock
def test_several_at_a_time_are_confined_and_compared(repository: Path) -> None:
    sandbox, results = Sandbox(repository), list[bytes]()
    hooks = repository / ".git" / "hooks"

    def one(number: int) -> None:
        ctx = ToolContext(repository, Abort())
        sandbox.before_tool_call(call := ToolCall("1", "bash", {}), ctx)
        line = f"touch .git/hooks/{number}; echo a > ../new || echo no"
        output = output_of(["sh", "-c", line], repository, Abort(), 20, confine=ctx.confine)
        results.append(b"".join(output))
        list(sandbox.after_tool_call(call, ToolResult("")))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert [b"no" in result for result in results] == [True] * 8
    assert not (repository.parent / "new").exists()
    assert [each.name for each in hooks.iterdir() if each.suffix != ".sample"] == ["commit-msg"]


def test_a_relative_path_is_not_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "bin:.")
    assert environment()["PATH"] == os.defpath


# ---- searches, and the start of children in general ---------------------------------------------


class Noted:
    """A confinement that notes its use."""

    def __init__(self) -> None:
        self.used: list[str] = []

    @property
    def environment(self) -> Mapping[str, str]:
        return {"MORE": "1"}

    def start(self, start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        self.used.append("start")
        return start()

    def ended(self) -> None:
        self.used.append("ended")


def test_children_are_started_in_the_confinement_of_the_call_which_is_told_of_their_end(
    ws: Path,
) -> None:
    """Of bash, after a time-out as well, of a search, and of one that is left half way."""
    cases: list[tuple[Tool, dict[str, Any]]] = [
        (bash, {"command": "echo $MORE"}),
        (bash, {"command": "sleep 300", "timeout": 1}),
        (grep, {"pattern": "x"}),
    ]
    for tool, arguments in cases:
        tools, noted = Toolset([tool], cwd=ws), Noted()
        ctx = tools.context(call := ToolCall("1", tool.name, arguments), Abort())
        ctx.confine = noted
        list(tools.run(call, ctx))
        assert noted.used == ["start", "ended"]
    noted = Noted()
    work = output_of(["sh", "-c", "echo $MORE; sleep 300"], ws, Abort(), 100, confine=noted)
    assert next(data for data in work if data) == b"1\n"
    work.close()
    assert noted.used == ["start", "ended"]


@landlock
def test_a_search_finds_what_there_is_and_writes_nothing(ws: Path) -> None:
    (ws / "a.txt").write_text("needle\n")
    runs = Runs(ws)
    with serve(Reply(calls=[("grep", {"pattern": "needle"})]), FINE) as server:
        ask(server, tools=runs.tools, hooks=runs.hooks)
        assert server.requests[-1]["messages"][-1]["content"] == "a.txt:1:needle"
    for name in ("grep", "glob"):
        runs.sandbox.before_tool_call(ToolCall("1", name, {}), ctx := ToolContext(ws, Abort()))
        line = "echo a > new; echo a > $TMPDIR/new; echo b > /dev/null && cat ../file"
        out = b"".join(output_of(["sh", "-c", line], ws, Abort(), 20, confine=ctx.confine))
        assert out.endswith(b"kept")
    assert not (ws / "new").exists() and not (runs.sandbox.temporary / "new").exists()


# ---- the network, and the filter of system calls ------------------------------------------------


@pytest.mark.skipif(available() < NETWORK_ABI, reason="this Landlock, if any, knows no TCP")
def test_tcp_can_be_turned_off(ws: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = f"exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]} && echo connected"
        listen = "python3 -c 'import socket; socket.create_server((\"127.0.0.1\", 0)); print(2)'"
        runs = Runs(ws)
        runs(connect, listen)
        assert runs.results == ["connected", "2"]
        runs = Runs(ws, network=False)
        runs(connect, listen)
        for result in runs.results:
            assert "ermission denied" in result and "and have no network" in result


@landlock
@seccomp
@pytest.mark.parametrize("abi", [available(), 3])
def test_without_a_network_there_are_sockets_for_this_machine_only(abi: int) -> None:
    """Also where Landlock knows no TCP."""
    script = """
import ctypes, socket, sys
def denied(work):
    try: work()
    except PermissionError: return True
at = ("127.0.0.1", int(sys.argv[1]))
print(denied(lambda: socket.socket().sendto(b"x", 0x20000000, at)),
      *(denied(lambda: socket.socket(*each)) for each in [(2, 1, 262), (2, 2), (10,), (17, 3)]),
      ctypes.CDLL(None, use_errno=True).syscall(425, 1, 0) < 0 and ctypes.get_errno() == 13)
socket.socketpair(); socket.socket(socket.AF_UNIX); socket.if_nameindex()
"""

    def output() -> str:
        argv = [sys.executable, "-c", script, str(server.getsockname()[1])]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = SandboxThread(lambda: restrict([Path("/dev/null")], network=False, abi=abi))
        assert thread.run(output) == "True " * 5 + "True\n"
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()
        assert "True" not in SandboxThread(lambda: restrict([Path("/dev/null")])).run(output)[10:-5]


def run_filter(
    program: list[tuple[int, int, int, int]], number: int, arch: int, *arguments: int
) -> bool:
    """Whether seccomp's machine would allow a call, as far as our filter uses it."""
    data = {0: number, 4: arch}
    for at, value in enumerate(arguments):
        data |= {16 + 8 * at: value & 0xFFFFFFFF, 20 + 8 * at: value >> 32}
    value, at = 0, 0
    while program[at][0] != 0x06:
        code, true, false, given = program[at]
        at += 1
        if code == 0x20:
            value = data[given]
        else:
            at += true if (value == given if code == 0x15 else value >= given) else false
    return {0x7FFF0000: True, 0x00050000 | 13: False}[program[at][3]]


X86, ARM = (
    [(0xC000003E, 41, 302), (0x40000003, 359, 340)],
    [(0xC00000B7, 198, 261), (0x40000028, 281, 369)],
)


@pytest.mark.parametrize(("arch", "socket_call", "prlimit"), X86 + ARM)
def test_the_filter_knows_the_calls_of_each_machine(
    arch: int, socket_call: int, prlimit: int
) -> None:
    for network in (True, False):
        program = call_filter(network)

        def allows(number: int, *arguments: int, arch: int = arch) -> bool:
            return run_filter(program, number, arch, *arguments)  # noqa: B023

        families = [family for family in range(50) if allows(socket_call, family, 1, 0)]
        assert families == (list(range(50)) if network else [1, 16])
        others = {number for number in range(600) if not allows(number, 2, 0, 1)}
        offline = {socket_call, 425, *([102] if arch < 0x50000000 else [])}
        assert others == {prlimit} | (set() if network else offline)
        # (process, resource, new limits): our own may be set, those of others only be read
        assert allows(prlimit, 0, 0, 1) and allows(prlimit, 7, 0, 0)
        assert not allows(prlimit, 7, 0, 1 << 32)
        assert not allows(0x40000000 + 1, 1, 0, 0) and not allows(0, 1, 0, 0, arch=0xC0000015)


# ---- SBX-03: our own folders --------------------------------------------------------------------


@pytest.mark.case("SBX-03")
@landlock
def test_our_folders_that_do_not_exist_get_nothing_from_a_command(ws: Path) -> None:
    config, rules = ws / ".config" / "coder", ws / ".coder"
    runs = Runs(ws, config=config, data=ws / ".local" / "coder")
    new = [rules / "permissions.json", config / ".env", config / "plugins" / "a.py"]
    lines = [f"mkdir -p {path.parent}; echo evil > {path}" for path in new]
    result = runs("; ".join([*lines, "echo made"]))
    assert not [each for each in (*config.rglob("*"), *rules.rglob("*")) if not each.is_dir()]
    names = (
        ".coder/permissions.json (new), .config/coder/.env (new), .config/coder/plugins/a.py (new)"
    )
    assert result.startswith(f"made\n[put back: {names}. ") and names in runs.notices
    elsewhere = ws.parent / "home" / ".config" / "coder"
    result = Runs(ws, config=elsewhere, data=ws.parent / "data")(f"mkdir -p {elsewhere}")
    assert "Permission denied" in result and not elsewhere.exists()


@pytest.mark.case("SBX-03")
def test_our_folders_that_exist_are_put_back_as_they_were(ws: Path) -> None:
    config, data = ws / ".config" / "coder", ws / ".local" / "coder"
    shadow = data / "snapshots" / "git" / "config"
    names = ("plugins/own.py", ".env", "hooks.json")
    for path in [*(config / name for name in names), shadow, ws / ".coder" / "permissions.json"]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
        path.chmod(0o600)

    def state() -> dict[Path, object]:
        paths = [*config.rglob("*"), *(ws / ".coder").rglob("*"), shadow]
        return {path: facts(path) for path in paths}

    before = state()
    runs = Runs(ws, config=config, data=data)
    others = f"touch {data}/sessions.db"
    result = runs(
        f"echo evil >> .coder/permissions.json; echo evil >> {shadow}; {others}; cd .config/coder; "
        "echo evil >> .env; rm hooks.json; chmod 666 plugins/own.py; ln -s /etc/passwd plugins/b.py"
    )
    assert state() == before
    for name in ("/.env (changed)", "hooks.json (removed)", "plugins/own.py (changed)"):
        assert name in result
    for name in ("b.py (new)", "git/config (changed)", ".coder/permissions.json (changed)"):
        assert name in result
    assert (data / "sessions.db").exists(), "coder writes there as well"


@landlock
def test_a_way_to_our_folder_that_becomes_a_link_leads_nowhere(ws: Path) -> None:
    theirs, ours = ws.parent / "beside" / "coder", ws / ".config" / "coder"
    for folder, text in ((ours, "mine"), (theirs, "theirs")):
        folder.mkdir(parents=True)
        (folder / ".env").write_text(text)
    runs = Runs(ws, config=ours)
    runs(
        "mv .config old && mkdir -p evil/coder && echo evil > evil/coder/.env && ln -s evil .config"
    )
    assert (ours / ".env").read_text() == "mine"
    assert "(changed; not put back: Permission denied)" in runs(
        "rm .config; ln -s ../beside .config"
    )
    assert [(each.name, each.read_text()) for each in theirs.iterdir()] == [(".env", "theirs")]


# ---- SBX-04: what git runs or obeys -------------------------------------------------------------


def state_of(folder: Path) -> dict[str, Any]:
    """What git would run or obey in a repository."""
    names = "config config.worktree hooks/**/* commondir info/attributes remotes/* branches/*"
    paths = [path for name in names.split() for path in folder.glob(f".git/{name}")]
    return {
        str(each.relative_to(folder)): facts(each) for each in paths if each.suffix != ".sample"
    }


def facts(path: Path) -> tuple[int, object]:
    if path.is_symlink():
        return 0, os.readlink(path)
    return path.stat().st_mode, path.is_file() and path.read_bytes()


PUT_BACK = table(r"""
echo evil > .git/hooks/pre-commit; chmod +x .git/hooks/pre-commit; git config core.fsmonitor ./e ~
 => .git/config (changed), .git/hooks/pre-commit (new)
echo evil >> .git/hooks/commit-msg => .git/hooks/commit-msg (changed)
chmod 600 .git/hooks/commit-msg => .git/hooks/commit-msg (changed)
rm .git/hooks/commit-msg => .git/hooks/commit-msg (removed)
rm -r .git/hooks => .git/hooks (removed), .git/hooks/commit-msg (removed)
ln -s ../../evil .git/hooks/post-checkout => .git/hooks/post-checkout (new)
ln -sf ../../evil .git/hooks/commit-msg => .git/hooks/commit-msg (changed)
rm .git/hooks/commit-msg; mkdir .git/hooks/commit-msg => .git/hooks/commit-msg (changed)
mkdir -p .git/hooks/x.d/a; touch .git/hooks/x.d/a/b => .git/hooks/x.d/a/b (new)
mv .git/hooks .git/h; mkdir evil; touch evil/commit-msg; ln -s ../evil .git/hooks ~
 => .git/hooks (changed)
rm .git/config; mkdir .git/config => .git/config (changed)
cp .git/config c; mv c copy; ln -sf ../copy .git/config => .git/config (changed)
rm .git/config; mkfifo .git/config => .git/config (holds what is no file)
printf '[core]\n\tpager = evil\n' > .git/config.worktree => .git/config.worktree (new)
mkdir e; cp -r .git/* e; echo ../e > .git/commondir => .git/commondir (new)
echo '* filter=evil' >> .git/info/attributes => .git/info/attributes (new)
mkdir .git/remotes; echo URL: evil > .git/remotes/origin => .git/remotes/origin (new)
head -c 2M /dev/zero >> .git/config => .git/config (changed)
git config alias.st 'grep --open-fil=evil x' => .git/config (changed)
git config user.name x => .git/config (changed)
rm .git/config; ln -s $'[core]\n\tbare = false\n' .git/config => .git/config (changed)
touch $'.git/hooks/a\nb' => .git/hooks/a\nb (new)
git remote add origin https://a/b; git checkout -qb side && git branch -qu main ~
 => .git/config (changed)
git config core.pager evil & wait; sleep 300 => .git/config (changed)
cp -r .git copied; mv .git moved; echo gitdir: copied > .git; mv .git x; mv moved .git; ~
cp x .git/commondir => .git/commondir (new)
""")
WAY = "(git config, git remote add, git branch -u), make that call again with unconfined true"


@pytest.mark.case("SBX-04")
def test_any_change_of_what_git_would_run_or_obey_is_put_back(repository: Path) -> None:
    before, runs = state_of(repository), Runs(repository)
    for line, names in PUT_BACK:
        result = runs(line, timeout=1 if "300" in line else 20)
        assert f"[put back: {names}" in result or f", {names}" in result, (line, result)
        assert names in runs.notices and f"To do it on purpose {WAY}" in result
        after = state_of(repository)
        left = {each for each in after if each.endswith((".d", ".d/a"))}
        assert {name: after[name] for name in after if name not in left} == before, line
    assert git(repository, "branch", "--list", "side"), "what else the command did stays"


def test_a_push_after_a_command_runs_no_planted_program(repository: Path) -> None:
    """The URL of a remote leads to a repository in the workspace, with a hook of its own."""
    git(repository, "init", "-q", "--bare", str(repository.parent / "real.git"))
    git(repository, "remote", "add", "origin", "../real.git")
    hook = "evil.git/hooks/pre-receive"
    plant = f"git init -q --bare evil.git; echo 'touch ../ran' > {hook}; chmod +x {hook}"
    Runs(repository)(
        f"{plant}; git remote set-url origin ./evil.git; git push -q origin main; rm -f ran"
    )
    assert (repository / hook).exists()
    git(repository, "push", "-q", "origin", "main")
    assert not (repository / "ran").exists() and git(repository, "ls-remote", "../real.git")


DAILY = table("""
git init -q n && cd n && git add -A && git commit -qm x --allow-empty && git log --format=%s => x
echo b > b && git add b && git commit -qm second && git log -1 --format=%s => second
git checkout -qb side && git stash -q; git switch -q main; git rebase -q side && echo yes => yes
git clone -q . copy && git -C copy remote -v | wc -l => 2
git worktree add -q tree && cd tree && git commit -qm t --allow-empty && git log -1 --format=%s => t
git gc -q && git tag v1 && git notes add -m n && git tag => v1
mv .git away && mv away .git && git tag => v1
mv .git away; echo ok => ok
mv away .git; git status -s | head -1 => ?? b2
rm -rf .git && echo gone => gone
""")


@landlock
def test_the_daily_work_of_git_passes(repository: Path) -> None:
    (repository / "b2").touch()
    runs = Runs(repository)
    for line, output in DAILY:
        assert (runs(line), runs.notices) == (output, ""), line


def test_a_repository_that_a_command_makes_stays_without_what_would_run(ws: Path) -> None:
    runs = Runs(ws)
    made = "git init -q && git add -A && git commit -qm x --allow-empty && git log --format=%s"
    assert runs(made) == "x" and not runs.notices
    shutil.rmtree(ws / ".git")
    result = runs(f"{made} && git config core.pager evil && touch .git/hooks/pre-push")
    assert "[put back: .git/config (changed), .git/hooks/pre-push (new)" in result
    assert git(ws, "log", "--format=%s") == "x\n" and "evil" not in git(ws, "config", "--list")
    shutil.rmtree(ws / ".git")
    linked = (
        "git init -q; mv .git/config evil; cd .git; ln -s $'[core]\\n\\tbare = false\\n' config"
    )
    assert "[put back: .git/config (new)" in Runs(ws)(linked)
    shutil.rmtree(ws / ".git")
    git(ws, "init", "-q")
    below = ws / "below"
    below.mkdir()
    assert "[put back: .git (new)" in Runs(below)(
        "cp -r ../.git r; git init -q -b x --separate-git-dir=r ."
    )
    result = Runs(below)(
        "printf '[core]\\n\\thooksPath = 0\\n' > c; git init -q && cat c >> .git/config"
    )
    assert (
        "[put back: .git/config (new)" in result
        and git(below, "rev-parse", "--git-dir") == ".git\n"
    )


def test_a_workspace_does_not_become_a_repository_itself(ws: Path) -> None:
    """With HEAD, objects and refs in it git takes a folder for one."""
    assert "HEAD (new)" in Runs(ws)("git init -q --bare .; git config core.pager evil")
    assert subprocess.run(["git", "status"], cwd=ws, capture_output=True).returncode == 128
    shutil.rmtree(ws)
    ws.mkdir()
    git(ws, "init", "-q", "--bare")
    result = Runs(ws)("git config core.pager evil; touch hooks/pre-push")
    assert "[put back: config (changed), hooks/pre-push (new)" in result


@landlock
def test_putting_back_leaves_other_places_as_they_are(repository: Path) -> None:
    target, other, runs = repository.parent / "beside", repository / "other", Runs(repository)
    (target / "pre-push").write_text("the user's")
    other.mkdir()
    git(other, "init", "-q")
    (other / ".git" / "hooks" / "pre-push").write_text("theirs")
    before = state_of(other)
    runs(f"rm -r .git/hooks; ln -s {target} .git/hooks")
    result = runs(f"mv .git old; ln -s {target} .git")
    assert "[put back: .git (changed)" in result and not os.path.lexists(repository / ".git")
    result = runs("mv old .git; mv .git old; echo gitdir: other/.git > .git")
    assert (
        "[put back: .git (changed)" in result
        and "other" not in result
        and state_of(other) == before
    )
    assert [path.name for path in target.iterdir()] == ["pre-push"]


def test_what_is_too_large_to_be_compared_is_reported_at_the_start(repository: Path) -> None:
    (repository / ".git" / "hooks" / "pre-push").write_bytes(b"#" * (9 << 20))
    sandbox = Sandbox(repository)
    unguarded = "Not guarded against changes by commands: .git/hooks (holds too much)."
    assert sandbox.notices[-1] == unguarded


# ---- SBX-04: from the first command of a session to its end, and after that ---------------------

WAIT = "until [ -e go ]; do sleep 0.01; done"
LATE = f"({WAIT}; git config core.pager evil; touch over) > /dev/null 2>&1 &"
LEFT = "Changed since the last command, and left so:"


@landlock
def test_what_changes_between_commands_is_reported_once(repository: Path, mark: str) -> None:
    runs = Runs(repository)
    runs(LATE)
    assert not runs.sandbox.since()
    (repository / "go").touch()
    until((repository / "over").exists)
    runs("echo next")
    assert runs.notices == f"{LEFT} .git/config (changed)."
    git(repository, "config", "core.editor", "vi")
    assert runs.sandbox.since() == [f"{LEFT} .git/config (changed)."]
    assert not runs.sandbox.since()
    assert runs("git config core.editor") == "vi"


@landlock
def test_one_task_ends_with_what_the_background_changed(tmp_path: Path) -> None:
    def script(body: Body) -> Reply:
        if body["messages"][-1]["role"] == "user":
            return Reply(calls=[("bash", {"command": LATE})])
        (tmp_path / "ws" / "go").touch()
        until((tmp_path / "ws" / "over").exists)
        return Reply("done")

    (tmp_path / "ws").mkdir()
    git(tmp_path / "ws", "init", "-q")
    with ScriptedServer(script) as server, OneShot(tmp_path, server, "-y", "go") as run:
        assert run.end() == 0 and run.out == "done\n"
        assert run.err.endswith(f"{LEFT} .git/config (changed).\n")


@landlock
def test_the_next_start_reports_what_a_killed_session_left(tmp_path: Path) -> None:
    ws = tmp_path / "ws"
    ws.mkdir()
    git(ws, "init", "-q")
    plant = "echo evil > .git/hooks/pre-push; sleep 300"
    with (
        serve(Reply(calls=[("bash", {"command": plant})])) as server,
        OneShot(tmp_path, server, "-y", "go") as run,
    ):
        until((ws / ".git" / "hooks" / "pre-push").exists)
        run.kill(signal.SIGKILL)
        run.child.wait()
        run.stop()
        shutil.rmtree(run.temp)
        run.temp.mkdir()
    for told in (True, False):
        with (
            serve(Reply(calls=[("bash", {"command": "true"})]), FINE) as server,
            OneShot(tmp_path, server, "-y", "go") as run,
        ):
            assert run.end() == 0
        message = "Changed since its last command began, and left so: .git/hooks/pre-push (new)."
        assert (message in run.err) == told
    assert not list((run.home / ".data" / "coder").glob("guarded/*"))


def test_commands_side_by_side_are_compared_with_the_state_before_both(repository: Path) -> None:
    """The second begins after the first has made its change, and ends before it."""
    guard, config = GitGuard(repository), repository / ".git" / "config"
    changed = {str(config): "changed"}
    guard.begin()
    git(repository, "config", "core.pager", "evil")
    assert guard.begin() == {}
    assert guard.end() == changed
    git(repository, "config", "core.editor", "evil")
    assert guard.begin() == {} and guard.end(allowed=True) == changed, "the other may have done it"
    assert guard.end() == changed and "evil" not in config.read_text()


def test_an_interrupt_does_not_keep_a_hook_from_being_put_back(repository: Path) -> None:
    """Ctrl+C, twice, meanwhile."""
    sandbox, hooks = Sandbox(repository), repository / ".git" / "hooks"
    sandbox.before_tool_call(ToolCall("1", "bash", {}), ctx := ToolContext(repository, Abort()))
    assert ctx.confine
    ctx.confine.start(lambda: subprocess.Popen(["true"])).wait()
    for name in ["pre-commit", *map(str, range(900))]:
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
    told = sandbox.since()  # waits for it, where that takes longer than an interrupt is held
    assert {path.name for path in hooks.iterdir() if path.suffix != ".sample"} == {"commit-msg"}
    assert len(told) == 1 and "and 891 more" in told[0] and told[0].endswith("; put back.")


# ---- SBX-04: folders of git elsewhere, and folders made to break the comparison -----------------


@landlock
def test_below_a_repository_in_a_worktree_and_in_a_submodule(repository: Path) -> None:
    below, tree, sub = repository / "below", repository.parent / "tree", repository / "sub"
    below.mkdir()
    git(repository, "worktree", "add", "-q", str(tree))
    git(repository, "clone", "-q", ".", "../beside/origin")
    add = ["submodule", "--quiet", "add", "../beside/origin", "sub"]
    git(repository, "-c", "protocol.file.allow=always", *add)
    for folder in (below, tree, sub):
        runs = Runs(folder)
        made = runs("echo a > new; git add new; git commit -qm inside && git log -1 --format=%s")
        assert made == "inside"
        assert "Permission denied" in runs(f"echo a > {repository}/file.txt")
        hook = "$(git rev-parse --git-common-dir)/hooks/pre-push"
        result = runs(f"touch {hook}; git config --local core.pager evil")
        assert "hooks/pre-push (new)" in result and "config (changed)" in result
        if folder != below:
            result = runs(f"rm .git; echo gitdir: {repository.parent}/evil > .git")
            assert "[put back: .git (changed)" in result
            assert git(folder, "log", "-1", "--format=%s") == "inside\n"
    assert not [*repository.glob(".git/**/hooks/pre-push")]


@pytest.mark.parametrize("planted", ["gitdir", "commondir", "link", "submodule"])
def test_a_git_file_is_not_believed_alone(ws: Path, planted: str) -> None:
    """What is in the workspace came from anybody, and must not open another folder for writing."""
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
    assert all(folder.is_relative_to(ws) for folder in writable_git_folders(ws))


STRANGE = table(r"""
mkdir .git; ln -s $(printf a%.0s {1..300}) .git/HEAD => a HEAD whose name is too long
echo gitdir: $(printf a%.0s {1..5000}) > .git => a .git that leads to too long a name
printf 'gitdir: a\0b' > .git => a .git with a NUL
ln -s .git .git => a .git that leads to itself
git init -q; printf 'a\0b' > .git/commondir => a commondir with a NUL
mkdir g; echo x > g/HEAD; printf '[core]\n\tworktree = a\0b\n' > g/config; ~
echo gitdir: g > .git => a worktree with a NUL
mkdir .git; chmod 000 .git => a .git that is closed
echo gitdir: ../beside/x > .git; chmod 000 ../beside => a .git in a closed folder
""")
EVIL = "printf '#!/bin/sh' > .git/hooks/pre-commit; chmod +x .git/hooks/pre-commit; "
BREAKING = table("""
chmod 311 .git/hooks => .git/hooks (cannot be read)
mkdir .git/hooks/a; chmod 000 .git/hooks/a => .git/hooks (cannot be read)
chmod 000 .git/hooks .git/info .git => .git (changed)
cd .git/hooks; touch f{1..20000}; cd ../.. => .git/hooks (holds too much)
cd .git/hooks; touch {1..3000}.sample; cd ../.. => .git/hooks (holds too much)
mkfifo .git/hooks/p; ln -s /dev/zero .git/hooks/z => .git/hooks (holds what is no file)
for i in {1..40}; do head -c 1000000 /dev/zero > .git/hooks/a$i; done => .git/hooks (holds too much)
""")


def without_override() -> None:
    """For the `preexec_fn` of a child: modes of files hold for root as well there."""
    for capability in (1, 2):  # DAC_OVERRIDE, DAC_READ_SEARCH
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)


def in_a_child(folder: Path, script: str, first: Callable[[], None]) -> Any:
    code = f"from tests.test_sandbox import *\n{script}"
    argv = [sys.executable, "-W", "ignore", "-c", code]
    pipes: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60}
    path = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=folder, env=path, preexec_fn=first, **pipes)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@landlock
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # preexec_fn beside threads
def test_no_folder_turns_the_sandbox_off(ws: Path) -> None:
    places = []
    for number, (line, _) in enumerate(STRANGE):
        places.append(ws / str(number) / "ws")
        places[-1].mkdir(parents=True)
        (ws / str(number) / "beside").mkdir()
        subprocess.run(["bash", "-c", line], cwd=places[-1], check=True)
    script = f"""
found = []
for folder in map(Path, {[str(each) for each in places]}):
    runs = Runs(folder)
    found.append([runs.sandbox.notices, runs("echo a > ../new; ls ..; echo end"), runs.notices])
print(json.dumps(found))"""
    try:
        found = in_a_child(ws, script, without_override)
    finally:
        for number in range(len(STRANGE)):
            (ws / str(number) / "beside").chmod(0o755)
    for (_, name), (notices, result, changes), place in zip(STRANGE, found, places):
        assert "Permission denied" in result and (notices, changes) == ([], ""), name
        assert not (place.parent / "new").exists(), name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_hook_does_not_hide_behind_what_breaks_the_comparison(repository: Path) -> None:
    script = """
runs, found = Runs(Path.cwd()), []
for line, names in BREAKING:
    found += [(names, runs(EVIL + line), runs.notices, runs("echo next"), runs.notices)]
print(json.dumps(found))"""
    for names, first, told, second, later in in_a_child(repository, script, without_override):
        assert "[put back: " in first and names in first and names in told, (names, first)
        assert (second, later) == ("next", ""), names
        assert len(first) < 2500 and "\n" not in told, f"{names}: one line, and bounded"
    hooks = repository / ".git" / "hooks"
    assert {each.name for each in hooks.iterdir() if each.suffix != ".sample"} == {"commit-msg"}
    assert facts(hooks / "commit-msg") == (0o100755, b"#!/bin/sh\nexit 0\n")


# ---- SBX-05: no sandbox -------------------------------------------------------------------------

# A filter of seccomp: the system call 444, landlock_create_ruleset, fails; all others go on.
NO_LANDLOCK = [
    (0x20, 0, 0, 0),
    (0x15, 0, 1, 444),
    (0x06, 0, 0, 0x00050000 | 38),
    (0x06, 0, 0, 0x7FFF0000),
]


def without_landlock() -> None:
    """For the `preexec_fn` of a child: it and its children run on a kernel without Landlock."""
    libc = ctypes.CDLL(None, use_errno=True)
    code = ctypes.create_string_buffer(
        b"".join(struct.pack("=HBBI", *each) for each in NO_LANDLOCK)
    )
    program = ctypes.create_string_buffer(
        struct.pack("@HP", len(NO_LANDLOCK), ctypes.addressof(code))
    )
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0


@pytest.mark.case("SBX-05")
@pytest.mark.skipif(sys.platform != "linux", reason="no seccomp here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_without_landlock_there_is_a_warning_or_a_refusal(ws: Path) -> None:
    git(ws, "init", "-q")
    script = """
from coder.permissions.sandbox import SandboxError
runs = Runs(Path.cwd())
first = runs("echo a > ../new; git config core.pager evil; exit 1")
try:
    Sandbox(Path.cwd(), required=True)
except SandboxError as error:
    print(json.dumps([runs.sandbox.notices, str(error), first, runs.schema]))
"""
    notices, error, first, schema = in_a_child(ws, script, without_landlock)
    assert len(notices) == 1 and notices[0].startswith("No sandbox: this kernel has no Landlock")
    assert (
        error.startswith("No sandbox: this kernel has no Landlock")
        and "unconfined" not in schema["properties"]
    )
    assert (ws.parent / "new").exists(), "nothing is confined"
    assert (
        "[put back: .git/config (changed)" in first and "unconfined" not in first
    )  # compared all the same


@landlock
def test_what_a_kernel_lacks_is_said_and_with_all_of_it_nothing_is(ws: Path) -> None:
    words = ("empty files", "devices", "signal", "limits", "use the network", "TCP")
    rows: dict[tuple[bool, int, bool], tuple[str, ...]] = {
        (False, 1, False): words[:5],
        (True, 3, True): words[1:3],
        (False, 5, True): words[2:3],
        (False, 6, False): words[3:],
        (False, 6, True): (),
        (True, 7, False): words[3:4],
    }
    for row, expected in rows.items():
        assert tuple(word for word in words if word in " ".join(gaps(*row))) == expected, row
    assert Sandbox(ws, required=True).notices == gaps(network=True) == []
    for folder in (ws.parent / "home", ws.parent):
        notices = Sandbox(folder).notices
        assert notices == [
            "This folder holds your home folder: the sandbox lets commands write to all of it."
        ]


@landlock
@pytest.mark.parametrize("abi", range(1, available() + 1))
def test_older_versions_of_landlock_are_used_as_far_as_they_go(ws: Path, abi: int) -> None:
    thread = SandboxThread(lambda: restrict([ws], abi=abi))
    with pytest.raises(PermissionError):
        thread.run((ws.parent / "new").touch)
    thread.run((ws / "new").touch)
    if abi >= 3:
        with pytest.raises(PermissionError):
            thread.run(lambda: os.truncate(ws.parent / "file", 0))
    thread.end()


# ---- SBX-06: without the sandbox after all ------------------------------------------------------


@landlock
@pytest.mark.case("SBX-06")
def test_outside_the_sandbox_a_new_permission_is_needed(ws: Path) -> None:
    """The command itself is allowed by a rule; to run it outside is asked for each time."""
    asked: list[tuple[str, str]] = []

    def answer(event: Event) -> None:
        if isinstance(event, PermissionAsked):
            asked.append((event.permission, event.pattern))
            event.reply("once" if "yes" in event.pattern else "no")

    runs = Runs(ws, Permissions(can_ask=True, yolo=True))
    assert "with unconfined true" in runs("echo yes > ../new", each=answer) and asked == []
    assert runs("echo yes > ../new", unconfined=True, each=answer) == "(no output)"
    assert (ws.parent / "new").read_text() == "yes\n" and asked == [
        ("unconfined", "echo yes > ../new")
    ]
    assert "Denied" in runs("echo no > ../new", unconfined=True, each=answer)
    assert (ws.parent / "new").read_text() == "yes\n" and len(asked) == 2
    assert "Permission denied" in runs("echo no > ../new", unconfined=False, each=answer), (
        "it was for one call"
    )


@landlock
@pytest.mark.case("SBX-06")
@pytest.mark.parametrize(
    "permissions",
    [
        Permissions(can_ask=False),
        Permissions([Rule("bash", "*", "allow")]),
        Permissions(yolo=True),
        None,
    ],
)
def test_where_nobody_can_be_asked_it_is_denied(ws: Path, permissions: Permissions | None) -> None:
    runs = Runs(ws, *filter(None, [permissions]))
    for value in (True, "true"):
        assert runs("echo a > ../new", unconfined=value).startswith("Denied")
    assert not (ws.parent / "new").exists()


@landlock
def test_a_change_that_was_allowed_outside_stays_and_is_reported(repository: Path) -> None:
    runs = Runs(repository, Permissions(can_ask=True, yolo=True))
    temporary = os.environ.get("TMPDIR", "(no output)")
    assert runs("git config core.pager less; echo $TMPDIR", unconfined=True, each=yes) == temporary
    assert runs.notices == "A command outside of the sandbox changed .git/config (changed)."
    assert runs("echo next") == "next" and not runs.notices
    assert "put back" in runs("git config core.pager evil")
    assert git(repository, "config", "core.pager") == "less\n"


@landlock
def test_the_tool_is_as_ever_but_for_one_parameter(ws: Path) -> None:
    made, other = Sandbox(ws).tools([bash, grep])
    assert other is grep and (made.name, made.description) == (bash.name, bash.description)
    assert made.parameters["required"] == bash.parameters["required"]
    properties = made.parameters["properties"]
    assert {
        name: properties[name] for name in properties if name != "unconfined"
    } == bash.parameters["properties"]
    assert made.title_of({"command": "ls"}) == bash.title_of({"command": "ls"}) == "bash ls"
    assert (
        made.title_of({"command": "ls", "unconfined": True}) == "bash ls (outside of the sandbox)"
    )


# ---- the thread that starts the children --------------------------------------------------------


@landlock
def test_a_confined_thread_raises_the_errors_of_its_jobs_and_goes_on(ws: Path) -> None:
    def fail() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        SandboxThread(fail)
    thread = SandboxThread(lambda: restrict([ws]))
    with pytest.raises(FileNotFoundError):
        thread.run(lambda: (ws / "nothing").read_bytes())
    with pytest.raises(PermissionError):
        thread.run((ws.parent / "new").touch)
    assert thread.run(lambda: 3) == 3
    thread.end()


def test_a_child_that_an_interrupt_keeps_from_its_owner_is_ended(
    repository: Path, mark: str
) -> None:
    """Ctrl+C while a child is being started: no process stays that nobody knows."""
    sandbox = Sandbox(repository)
    sandbox.before_tool_call(ToolCall("1", "bash", {}), ctx := ToolContext(repository, Abort()))

    def start() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(["sleep", "300"], start_new_session=True)
        (repository / ".git" / "hooks" / "pre-push").touch()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)  # the main thread waits, where the signal finds it
        return process

    assert ctx.confine
    with pytest.raises(KeyboardInterrupt):
        ctx.confine.start(start)
    gone(mark)
    assert not (repository / ".git" / "hooks" / "pre-push").exists()
    assert sandbox.since() == ["A command changed .git/hooks/pre-push (new); put back."]
