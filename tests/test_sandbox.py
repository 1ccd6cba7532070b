"""The sandbox: what a command cannot write, reach or leave behind, and what it can (SBX).

A run is a real one against the scripted server; what counts is what is on the disk afterwards.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from coder.abort import Abort
from coder.devtools.scripted import Reply
from coder.events import Event, Notice, PermissionAsked
from coder.hooks import HookChain, Hooks
from coder.permissions.landlock import restrict
from coder.permissions.permissions import Permissions
from coder.permissions.rules import Rule
from coder.permissions.sandbox import Sandbox
from coder.tools.bash import bash, output_of
from coder.tools.search import grep
from coder.toolset import ToolContext, Toolset
from coder.types import CoderError, ToolCall
from tests.harness import ask, serve, shell, table
from tests.terminal import ROOT, until

try:
    complete: bool | None = ThreadPoolExecutor(1).submit(restrict, []).result()
except OSError:
    complete = None
landlock = pytest.mark.skipif(complete is None, reason="this kernel has no Landlock for us")
seccomp = pytest.mark.skipif(not complete, reason="this kernel has an old Landlock, or no seccomp")
FINE = Reply("All is well.")


def confined(work: Callable[[], Any], *writable: Path, **options: Any) -> Any:
    """What this returns in a thread that may write nothing else."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(
            restrict,
            [*writable, Path("/dev/null")],
            **options,
        ).result()
        return thread.submit(work).result()


class Runs:
    """Runs commands of a model's, each a call of one answer. `results` are those of the newest."""

    def __init__(self, workspace: Path, *hooks: Hooks, **options: Any) -> None:
        self.sandbox = Sandbox(workspace, **options)
        self.tools = Toolset(
            self.sandbox.tools([bash, grep]),
            cwd=workspace,
        )
        self.hooks = HookChain(*hooks, self.sandbox)
        self.events: list[Event] = []

    def __call__(
        self, *lines: str, each: Callable[[Event], None] | None = None, **arguments: Any
    ) -> str:
        """The last command's result."""
        calls = [("bash", {"command": line} | arguments) for line in lines]
        with serve(Reply(calls=calls), FINE) as server:
            self.events, _ = ask(
                server,
                tools=self.tools,
                hooks=self.hooks,
                each=each,
            )
            messages = server.requests[-1]["messages"]
            self.results = [str(each["content"]) for each in messages if each["role"] == "tool"]
            self.schema = server.requests[0]["tools"][0]["function"]["parameters"]
        return self.results[-1]

    @property
    def notices(self) -> str:
        return "\n".join(event.text for event in self.events if isinstance(event, Notice))


def yes(event: Event) -> None:
    """The user's answer to each question."""
    if isinstance(event, PermissionAsked):
        event.reply("once")


def all_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Modes and contents of what is outside the workspace."""
    paths = [path for path in folder.rglob("*") if path.relative_to(folder).parts[0] != "ws"]
    return {
        str(each): (
            each.lstat().st_mode,
            b"" if each.is_dir() else each.read_bytes(),
        )
        for each in paths
    }


# ---- SBX-01: what may be written, and what else can be reached ----------------------------------


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
nice -n 19 nice => 19
chrt -i 0 chrt -p 0 | head -n 1 | sed 's/.*: //' => SCHED_IDLE
taskset -c 0 nproc => 1
ionice -c 3 ionice => idle
python3 -c 'import os; os.setpriority(os.PRIO_PGRP, 0, 7); print(os.nice(0))' => 7
mkdir -p $PIP_CACHE_DIR && [[ $PIP_CACHE_DIR == $TMPDIR/* ]] && echo yes => yes
sleep 300 > /dev/null & echo $! | tee pid | wc -l => 1
kill $(cat pid) && echo ended => ended
""")

# Were it not denied, a line would change this process or OTHER at most: user 64123 has no processes
FAILS = r"""
echo a > ~/new
echo a > ../new
rm ../file
python3 -c 'import os; os.truncate("../file", 0)'
ln -s ../file link && echo a > link
ln ../file hard && echo a > hard
echo a > a && mv a ../beside/a
mv ../file here
python3 -c 'import os; os.rename("../beside", "../other")'
tr '\0' '\n' < /proc/$PPID/environ > environ && cat environ
head -c 1 /proc/$PPID/mem; : 2> /dev/null > /proc/$PPID/mem
kill -9 $PPID
kill $OTHER
prlimit --pid $PPID --cpu=100000:100000
renice -n 1 -p $PPID
renice -n 1 -p $OTHER
renice -n 1 -g $OTHER
python3 -c 'import os; os.setuid(64123); os.setpriority(os.PRIO_USER, 0, 1)'
chrt -b -p 0 $PPID
python3 -c 'import os; os.sched_setparam(int(os.environ["OTHER"]), os.sched_param(0))'
python3 -c 'import os; os.sched_setscheduler(int(os.environ["OTHER"]), 5, os.sched_param(0))'
taskset -cp 0 $PPID
taskset -cp 0 $OTHER
ionice -c 2 -n 5 -p $PPID
ionice -c 2 -n 5 -u 64123
python3 -c 'import time; time.clock_settime(time.CLOCK_REALTIME, time.time())'
mknod disk b 7 0
[ $UID = 0 ] || exit 1; mount -t tmpfs none .
unshare -Urm mount -t tmpfs none .. && echo a > ../new
python3 -c 'import os; os.openpty()'
"""


@landlock
@pytest.mark.case("SBX-01")
def test_what_commands_need_works(ws: Path, mark: str) -> None:
    runs = Runs(ws)
    runs(*(line for line, _ in WORKS))
    found = [result.replace("\n", " ") for result in runs.results]
    assert list(zip([line for line, _ in WORKS], found)) == [tuple(row) for row in WORKS]
    assert "NoNewPrivs:\t0" in Path("/proc/self/status").read_text(), "we are not confined"
    (ws.parent / "from here").touch()


def standing(number: int) -> list[object]:
    """What of a process others could change: limits, priority, scheduling, processors, and rank of
    input and output."""
    ionice = subprocess.run(
        ["ionice", "-p", str(number)],
        capture_output=True,
        check=True,
    ).stdout
    return [
        Path(f"/proc/{number}/limits").read_text(),
        os.getpriority(os.PRIO_PROCESS, number),
        os.sched_getscheduler(number),
        os.sched_getaffinity(number),
        ionice,
    ]


@landlock
@seccomp
@pytest.mark.case("SBX-01")
def test_what_a_command_cannot_do(ws: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = all_of(ws.parent)
    limits = standing(os.getpid())
    runs = Runs(ws)
    with subprocess.Popen(["sleep", "300"], start_new_session=True) as other:
        monkeypatch.setenv("OTHER", str(other.pid))
        others = standing(other.pid)
        try:
            runs(*FAILS.strip().split("\n"))
            assert other.poll() is None
            assert standing(other.pid) == others
        finally:
            other.kill()
    hint = f"[in the sandbox commands write only in {ws} and $TMPDIR ({runs.sandbox.temporary}). "
    for line, result in zip(
        FAILS.strip().split("\n"),
        runs.results,
    ):
        assert "[exit code" in result, result
        assert hint in result or "exit 1; mount" in line, result
    assert all_of(ws.parent) == before
    assert standing(os.getpid()) == limits


@landlock
def test_a_child_in_the_background_stays_confined(ws: Path, mark: str) -> None:
    runs = Runs(ws)
    runs(f"({WAIT}; echo a > ../new; echo a > over) > /dev/null 2>&1 &")
    (ws / "go").touch()
    until((ws / "over").exists)
    assert not (ws.parent / "new").exists()


# ---- searches, and the start of children in general ---------------------------------------------


@landlock
def test_a_search_finds_what_there_is_and_is_confined(ws: Path) -> None:
    (ws / "a.txt").write_text("needle\n")
    runs = Runs(ws)
    with serve(
        Reply(calls=[("grep", {"pattern": "needle"})]),
        FINE,
    ) as server:
        ask(server, tools=runs.tools, hooks=runs.hooks)
        assert server.requests[-1]["messages"][-1]["content"] == "a.txt\n1:needle"
    runs.sandbox.before_tool_call(
        ToolCall("1", "grep", {}),
        ctx := ToolContext(ws, Abort()),
    )
    line = "echo a > ../new; echo b > /dev/null && cat ../file"
    out = b"".join(
        output_of(
            ["sh", "-c", line],
            ws,
            Abort(),
            20,
            confine=ctx.confine,
        )
    )
    assert out.endswith(b"kept")
    assert not (ws.parent / "new").exists()


# ---- the network, and the filter of system calls ------------------------------------------------


@seccomp
def test_the_network_can_be_turned_off_which_the_model_is_told(ws: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = f"exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]} && echo connected"
        assert Runs(ws)(connect) == "connected"
        result = Runs(ws, network=False)(connect)
        assert "ermission denied" in result
        assert "and have no network" in result


@landlock
@seccomp
@pytest.mark.parametrize("abi", [None, 3])
def test_without_a_network_there_are_sockets_for_this_machine_only(abi: int | None) -> None:
    """Also if Landlock knows no TCP."""
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
        argv = [
            sys.executable,
            "-c",
            script,
            str(server.getsockname()[1]),
        ]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout

    with socket.create_server(("127.0.0.1", 0)) as server:
        assert confined(output, network=False, abi=abi) == "True " * 5 + "True\n"
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()
        assert "True" not in confined(output)[10:-5]


CAPABILITIES = {  # capabilities(7)
    "CAP_SYS_MODULE": 16,
    "CAP_SYS_RAWIO": 17,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_SYS_BOOT": 22,
    "CAP_SYS_TIME": 25,
    "CAP_PERFMON": 38,
    "CAP_BPF": 39,
}


@landlock
@pytest.mark.case("SBX-01")
def test_commands_of_root_lose_the_capabilities_that_the_documents_name(ws: Path) -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    assert set(re.findall(r"`(CAP_\w+)`", text)) == CAPABILITIES.keys()
    lines = Runs(ws)("grep -E 'Cap(Prm|Eff|Bnd)' /proc/self/status").split("\n")
    assert len(lines) == 3
    sets = [int(line.split()[1], 16) for line in lines]
    is_root = os.geteuid() == 0
    for name, number in CAPABILITIES.items():
        kept = [each >> number & 1 for each in sets]
        assert not any(kept if is_root else kept[:2]), name
    assert not is_root or all(each & 1 for each in sets), "CAP_CHOWN is left"


# Makes a call of the 32-bit ABI: an address below 4 GB, machine code with int 0x80
I386 = """
import ctypes, mmap, os, sys
code = bytes.fromhex("53 89f8 89f3 89d1 31d2 cd80 5b c3")  # push rbx; eax, ebx, ecx of arguments; edx 0; int 0x80
page = mmap.mmap(-1, 4096, prot=7)
page.write(code)
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int)(address)
print(*(call(*map(int, each.split(","))) for each in sys.argv[1:]))
"""


@landlock
@seccomp
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="calls of x86")
def test_calls_by_other_numbers_are_no_way_out(ws: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """x32, which a kernel may have; what no program of the tests above calls; and 32-bit calls:
    setpriority, ioprio_set and the four of scheduling, for another process and for the caller,
    which may also read its limits."""
    script = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
calls = [({1 << 30} + call, 0, 0, 0, 0) for call in (39, 41, 141, 302)]
calls += [(call, os.getppid(), 0, 0) for call in (142, 144, 203, 314)]  # of scheduling
calls += [(251, 3, 0, -1)]  # ioprio_set for all of the user, and no rank, were it to come so far
for call in calls:
    print(libc.syscall(*call), ctypes.get_errno())
"""
    (ws / "x32.py").write_text(script)
    assert Runs(ws)(f"{sys.executable} x32.py") == "\n".join(["-1 13"] * 9)
    (ws / "i386.py").write_text(I386)
    own = ["97,0,0", "289,1,0", "154,0,0", "156,0,9", "241,0,0", "351,0,0", "340,0,0"]
    other = [f"97,0,{os.getpid()}", f"289,1,{os.getpid()}"]
    other += [f"{number},{os.getpid()},0" for number in (154, 156, 241, 351)]
    line = f"{sys.executable} i386.py {' '.join([*other, *own])}"
    found = Runs(ws)(line)
    if "SIGSEGV" in found:
        pytest.skip("this kernel runs no 32-bit programs")
    codes = [int(each) for each in found.split("\n")[0].split()]
    assert codes[: len(other)] == [-13] * len(other), found
    assert -13 not in codes[len(other) :], found


# ---- what is put back: the rest is in test_git_guard.py ------------------------------------------

WAY = "(git config, git remote add, git branch -u), make that call again with unconfined true"


def test_a_change_of_gits_own_files_is_put_back_and_reported(repository: Path) -> None:
    """Of a command that ends, and of one that takes too long."""
    runs = Runs(repository)
    names = ".git/config (changed), .git/hooks/pre-push (new)"
    line = "git config core.pager evil; touch .git/hooks/pre-push; "
    for result in (runs(f"{line}echo made"), runs(f"{line}sleep 300", timeout=3)):
        assert f"[put back: {names}. " in result
        assert WAY in result or not runs.sandbox.active
        assert runs.notices == f"A command changed {names}; put back."
    assert "evil" not in shell(repository, "git config --list")
    assert not (repository / ".git" / "hooks" / "pre-push").exists()


@landlock
@pytest.mark.case("SBX-03")
def test_a_way_to_our_folder_that_becomes_a_link_leads_nowhere(ws: Path) -> None:
    theirs = ws.parent / "beside" / "coder"
    ours = ws / ".config" / "coder"
    for folder, text in ((ours, "mine"), (theirs, "theirs")):
        folder.mkdir(parents=True)
        (folder / ".env").write_text(text)
    runs = Runs(ws, config=ours)
    runs("mv .config old; mkdir -p evil/coder; echo evil > evil/coder/.env; ln -s evil .config")
    assert (ours / ".env").read_text() == "mine"
    result = runs("rm .config; ln -s ../beside .config")
    assert "(changed; not put back: Permission denied)" in result
    assert [(each.name, each.read_text()) for each in theirs.iterdir()] == [(".env", "theirs")]


@landlock
def test_git_works_below_a_repository_in_a_worktree_and_in_a_submodule(repository: Path) -> None:
    below = repository / "below"
    tree = repository.parent / "tree"
    sub = repository / "sub"
    add = "git -c protocol.file.allow=always submodule --quiet add $PWD/../beside/origin sub"
    line = "mkdir below; git worktree add -q ../tree; git clone -q . ../beside/origin"
    shell(repository, f"{line}; {add}")
    for folder in (below, tree, sub):
        runs = Runs(folder)
        made = runs("echo a > new; git add new; git commit -qm inside && git log -1 --format=%s")
        assert made == "inside"
        assert "Permission denied" in runs(f"echo a > {repository}/file.txt")


WAIT = "until [ -e go ]; do sleep 0.01; done"
LATE = f"({WAIT}; git config core.pager evil; touch over) > /dev/null 2>&1 &"
LEFT = "Changed outside the sandbox or since the last command, and not put back:"


@landlock
def test_what_changes_between_commands_is_reported_once(repository: Path, mark: str) -> None:
    runs = Runs(repository)
    runs(LATE)
    (repository / "go").touch()
    until((repository / "over").exists)
    runs("echo next")
    assert runs.notices == f"{LEFT} .git/config (changed)."
    shell(repository, "git config core.editor vi")
    assert runs.sandbox.since() == [f"{LEFT} .git/config (changed)."]
    assert not runs.sandbox.since()
    assert runs("git config core.editor") == "vi"


KILLED = """
import os, signal, subprocess, sys
from pathlib import Path
from coder.abort import Abort
from coder.permissions.sandbox import Sandbox
from coder.toolset import ToolContext
from coder.types import ToolCall

folder, data = map(Path, sys.argv[1:])
sandbox, ctx = Sandbox(folder, data=data), ToolContext(folder, Abort())
sandbox.before_tool_call(ToolCall("1", "bash", {}), ctx)
ctx.confine.start(lambda: subprocess.Popen(["touch", folder / ".git/hooks/pre-push"])).wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_start_reports_what_a_killed_session_left(repository: Path) -> None:
    """A session that is killed in the middle of a command does not come to its end."""
    data = repository.parent / "data"
    assert not Sandbox(repository, data=data).notices
    assert not data.exists()
    first = subprocess.run(
        [sys.executable, "-c", KILLED, repository, data],
        cwd=ROOT,
    )
    assert first.returncode == -signal.SIGKILL
    message = "were changed, and not put back: .git/hooks/pre-push (new). Look at them before"
    second = Sandbox(repository, data=data)
    assert message in "".join(second.notices)
    second.since()
    assert not Sandbox(repository, data=data).notices
    assert not list(data.glob("guarded/*"))
    subprocess.run([sys.executable, "-c", KILLED, repository, data], cwd=ROOT)
    [record] = data.glob("guarded/*")
    for broken in ("", "{", "[1]", '{"a": {}}', "[" * 100_000):
        record.write_text(broken)
        Sandbox(repository, data=data)


# ---- SBX-05: no sandbox -------------------------------------------------------------------------


def deny_landlock() -> None:
    """In this thread, and those that it starts, landlock_create_ruleset, system call 444, fails
    from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    steps = [
        (32, 0, 0, 0),
        (21, 0, 1, 444),
        (6, 0, 0, 0x50000 | 38),
        (6, 0, 0, 0x7FFF0000),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in steps))
    program = struct.pack("@HP", len(steps), ctypes.addressof(code))
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.create_string_buffer(program), 0, 0) == 0


@pytest.mark.case("SBX-05")
@pytest.mark.skipif(sys.platform != "linux", reason="no seccomp here")
def test_without_landlock_there_is_a_warning_or_a_refusal(ws: Path) -> None:
    shell(ws, "git init -q")
    with ThreadPoolExecutor(1) as thread:
        thread.submit(deny_landlock).result()
        runs = thread.submit(Runs, ws).result()
        line = "echo a > ../new; git config core.pager less; exit 1"
        thread.submit(runs, line).result()
        with pytest.raises(CoderError, match="No sandbox: this kernel has no Landlock"):
            thread.submit(Sandbox, ws, required=True).result()
    [notice] = runs.sandbox.notices
    assert notice.startswith("No sandbox: this kernel has no Landlock")
    assert "unconfined" not in runs.schema["properties"]
    assert (ws.parent / "new").exists(), "nothing is confined"
    assert shell(ws, "git config core.pager") == "less", "and nothing is put back"


@landlock
def test_a_folder_that_holds_the_home_is_reported(ws: Path) -> None:
    assert Sandbox(ws, required=bool(complete)).notices == []
    for folder in (ws.parent / "home", ws.parent):
        assert "This folder holds your home folder" in Sandbox(folder).notices[-1]


@landlock
@pytest.mark.parametrize("abi", [1, 3, None])
def test_older_versions_of_landlock_are_used_as_far_as_they_go(ws: Path, abi: int | None) -> None:
    confined((ws / "new").touch, ws, abi=abi)
    works = [
        (ws.parent / "new").touch,
        lambda: os.truncate(ws.parent / "file", 0),
    ]
    for work in works[: 1 if abi == 1 else 2]:
        with pytest.raises(PermissionError):
            confined(work, ws, abi=abi)


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
    assert "with unconfined true" in runs("echo yes > ../new", each=answer)
    assert asked == []
    assert runs("echo yes > ../new", unconfined=True, each=answer) == "(no output)"
    assert (ws.parent / "new").read_text() == "yes\n"
    assert asked == [("unconfined", "echo yes > ../new")]
    assert "Denied" in runs("echo no > ../new", unconfined=True, each=answer)
    assert (ws.parent / "new").read_text() == "yes\n"
    assert len(asked) == 2
    assert "Permission denied" in runs("echo no > ../new", unconfined=False, each=answer), (
        "it was for one call"
    )


@landlock
@pytest.mark.case("SBX-06")
@pytest.mark.parametrize(
    "permissions",
    [
        *(
            Permissions(can_ask=False),
            Permissions([Rule("bash", "*", "allow")]),
        ),
        *(Permissions(yolo=True), None),
    ],
)
def test_if_nobody_can_be_asked_it_is_denied(ws: Path, permissions: Permissions | None) -> None:
    runs = Runs(ws, *filter(None, [permissions]))
    for value in (True, "true"):
        assert runs("echo a > ../new", unconfined=value).startswith("Denied")
    assert not (ws.parent / "new").exists()


@landlock
def test_a_change_that_was_allowed_outside_stays_and_is_reported(repository: Path) -> None:
    runs = Runs(repository, Permissions(can_ask=True, yolo=True))
    temporary = os.environ.get("TMPDIR", "(no output)")
    assert runs("git config core.pager less; echo $TMPDIR", unconfined=True, each=yes) == temporary
    assert runs.notices == f"{LEFT} .git/config (changed)."
    assert runs("echo next") == "next"
    assert not runs.notices
    assert "put back" in runs("git config core.pager evil")
    assert shell(repository, "git config core.pager") == "less"


@landlock
def test_threads_of_a_sandbox_that_nobody_holds_end(tmp_path: Path) -> None:
    def count() -> int:
        return [thread.name for thread in threading.enumerate()].count("jobs")

    before = count()  # of other tests
    runs = Runs(tmp_path)
    assert runs("echo done") == "done"
    assert count() >= 3
    runs.sandbox.since()
    del runs
    gc.collect()
    until(lambda: count() <= before)
