"""Plan mode: what a command can change there (nothing), what is asked, and how a plan ends.

A run is a real one against the scripted server; what counts is what is on the disk afterwards.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from coder.agent.profiles import BUILT_IN
from coder.devtools.scripted import Body, Reply
from coder.events import Event, PermissionAsked
from coder.hooks import HookChain
from coder.permissions.permissions import Permissions
from coder.permissions.rules import rule_of, rules_of
from coder.permissions.sandbox import Sandbox
from coder.tools.bash import bash, run_command
from coder.tools.files import read, write
from coder.toolset import Tool, ToolContext, Toolset
from tests.harness import ask, commands, results, serve, shell, table
from tests.terminal import PATIENCE, PLANNED, OneShot, Terminal, bare
from tests.test_sandbox import deny_landlock, seccomp

OVER = "Plan mode is over: files can be changed now."
NO_SANDBOX = "Denied: plan mode changes nothing, and this command is not known to only read."


class Plans:
    """Commands of a model that plans. `asked`: the questions, which the user answers with
    `answer`."""

    def __init__(self, ws: Path, rules: Any = (), answer: str = "once", **options: Any) -> None:
        self.ws = ws
        self.answer = answer
        self.asked = list[str]()
        confined = options.pop("confined", True)
        self.sandbox = Sandbox(ws) if confined else None
        given = {"agent": BUILT_IN["plan"].rules, "read_only": True, "can_ask": True} | options
        self.permissions = Permissions(rules_of(rules) if rules else (), **given)
        self.hooks = HookChain(*filter(None, [self.permissions, self.sandbox]))

    def each(self, event: Event) -> None:
        if isinstance(event, PermissionAsked):
            self.asked.append(f"{event.permission}: {event.pattern} ({event.why})")
            event.reply(self.answer)  # type: ignore[arg-type]

    def __call__(self, *lines: str, **arguments: Any) -> list[str]:
        """The results."""
        tools = [bash, read, write]
        tools = self.sandbox.tools(tools, read_only=True) if self.sandbox else tools
        calls = [(name, given | arguments) for name, given in commands(*lines)]
        with serve(Reply(calls=calls), Reply("The plan.")) as server:
            ask(
                server,
                tools=Toolset(tools, cwd=self.ws),
                hooks=self.hooks,
                each=self.each,
            )
            self.schema = server.requests[0]["tools"][0]["function"]["parameters"]
            return [str(each) for each in results(server)]


def state(folder: Path) -> dict[str, Any]:
    """All that can be changed about what is in a folder, but when it was read."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        status = path.lstat()
        text = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        times = status.st_mtime_ns, status.st_ino, status.st_nlink
        found[str(path)] = (
            status.st_mode,
            times,
            os.listxattr(path, follow_symlinks=False),
            text,
        )
    return found


# ---- what a command can do -----------------------------------------------------------------------

CHANGES = r"""
touch x
touch file.txt
touch -d 2001-01-01 file.txt
echo a > x
echo a >> file.txt
: > file.txt
rm -rf build && git push --force
rm file.txt
mv file.txt x
ln file.txt x
ln -s file.txt x
mkdir x
rmdir build
mkfifo x
cp file.txt x
sed -i s/text/x/ file.txt
truncate -s 0 file.txt
python3 -c 'import os; os.truncate("file.txt", 0)'
chmod 777 file.txt
chmod -R a+w .
chown $UID file.txt
chgrp $(id -g) file.txt
chattr +A file.txt
python3 -c 'import os; os.utime("file.txt", (1, 1))'
python3 -c 'import os; os.setxattr("file.txt", "user.x", b"1")'
git commit -qam x
git add .
git config a.b c
git branch x
git stash
echo a > ../file
rm ../file
touch ~/x
chmod 600 ../file
echo a > /dev/shm/coder-plan
kill -9 $PPID
sh -c 'sleep 0.1; touch x' & wait
(sleep 0.2; touch late) > /dev/null 2>&1 &
python3 -c 'import ctypes; print(ctypes.CDLL(None).syscall(452, -100, b"file.txt", 0o777, 0)); open("x", "w")'
"""

READS = r"""
sed -n 1p file.txt => text
cat file.txt | tr a-z A-Z => TEXT
python3 -c 'print(1 + 1)' => 2
grep -rn text . --include=*.txt => ./file.txt:1:text
cat <<< $(seq 20000) | tail -c 6 => 20000
echo b > $TMPDIR/a && sort $TMPDIR/a => b
f=$(mktemp) && echo c > $f && cat $f && rm $f => c
echo a > /dev/null; echo yes => yes
git log --format=%s | sed s/first/one/ => one
[ -d build ] && awk 'END {print NR}' file.txt => 1
python3 -c 'import socket; a, b = socket.socketpair(); a.send(b"x"); print(b.recv(1))' => b'x'
python3 -c 'import subprocess; print(subprocess.run(["echo", "hi"], capture_output=True).stdout)' => b'hi\n'
"""


@seccomp
@pytest.mark.parametrize("yolo", [False, True])
def test_a_command_of_a_plan_changes_nothing_and_asks_nothing(repository: Path, yolo: bool) -> None:
    (repository / "build").mkdir()
    shell(repository, "git status")  # refreshes the index
    before = state(repository.parent)
    lines = CHANGES.strip().split("\n")
    plans = Plans(repository, yolo=yolo)
    found = plans(*lines)
    shell(repository, "sleep 0.5")  # one of them goes on in the background
    after = state(repository.parent)
    assert {path for path in before | after if before.get(path) != after.get(path)} == set()
    assert not Path("/dev/shm/coder-plan").exists()
    assert plans.asked == []
    assert not [text for text in found if text.startswith("Denied")]
    hints = [line for line, text in zip(lines, found) if "[in plan mode commands write" in text]
    assert {"touch x", "echo a > x", "chmod 777 file.txt"} < {*hints}
    assert "unconfined" not in str(found)


@seccomp
def test_a_command_of_a_plan_reads_what_it_wants(repository: Path) -> None:
    (repository / "build").mkdir()
    plans = Plans(repository)
    rows = table(READS)
    found = plans(*(line for line, _ in rows))
    assert [[line, text] for (line, _), text in zip(rows, found)] == rows
    assert plans.asked == []


@seccomp
def test_a_command_of_a_plan_reaches_no_network_and_no_server_of_this_machine(ws: Path) -> None:
    path = str(ws.parent / "sock")
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        unix.bind(path)
        unix.listen()
        port = tcp.getsockname()[1]
        unix_client = f"import socket; socket.socket(socket.AF_UNIX).connect({path!r})"
        udp = f"import socket; socket.socket(type=2).sendto(b'x', ('127.0.0.1', {port}))"
        lines = [f"exec 3<>/dev/tcp/127.0.0.1/{port} && echo connected"]
        lines += [f'python3 -c "{script}; print(1)"' for script in (unix_client, udp)]
        plans = Plans(ws)
        for text in plans(*lines, f"curl -sS -X POST http://127.0.0.1:{port} || exit 1"):
            assert "[exit code" in text, text
            assert "[in plan mode commands write nothing" in text, text
        build = Sandbox(ws)
        tools = Toolset(build.tools([bash]), cwd=ws)
        with serve(
            Reply(calls=commands(*lines[:2])),
            Reply("Done."),
        ) as server:
            ask(server, tools=tools, hooks=HookChain(Permissions(yolo=True), build))
            assert results(server) == ["connected", "1"], "the servers were there"


@seccomp
@pytest.mark.skipif(sys.platform != "linux", reason="no seccomp here")
def test_without_a_sandbox_what_may_change_something_is_denied(repository: Path) -> None:
    lines = ["touch x", "git status --short", "ls", "cat file.txt && python3 -c 1"]
    with ThreadPoolExecutor(1) as thread:  # a kernel without Landlock
        thread.submit(deny_landlock).result()
        plans = thread.submit(
            Plans,
            repository,
            {"bash": "allow"},
            yolo=True,
        ).result()
        assert plans.sandbox
        assert not plans.sandbox.active
        old_kernel = thread.submit(plans, *lines).result()
    off = Plans(repository, confined=False, flags=[rule_of("bash", "allow")])  # --sandbox off
    for found in old_kernel, off(*lines):
        assert found[0].startswith(NO_SANDBOX)
        assert found[3].startswith(NO_SANDBOX)
        assert found[1] == "(no output)"
        assert found[2] == "file.txt"
    assert not (repository / "x").exists()


# ---- rules and questions -------------------------------------------------------------------------

DECIDED = """
{"bash": "allow"} => touch x => confined
{"*": "allow"} => touch x > y => confined
{"bash": {"touch *": "ask"}} => touch x => asked
{"bash": {"touch *": "ask"}} => touch x > y => asked
{"bash": {"touch *": "deny"}} => touch x => denied
{} => cat .env => asked
{} => grep KEY .env => asked
{} => python3 x.py --key=$HOME/.ssh/id_rsa => asked
{} => tar c ~/.aws/credentials => asked
{"read": {"mine/*": "deny"}} => sort mine/x => asked
{} => sort file.txt => confined
{} => git push --force => confined
{} => ls => free
"""


def test_what_is_decided_about_a_command_of_a_plan(ws: Path) -> None:
    for rules, line, expected in table(DECIDED):
        plan = {"agent": BUILT_IN["plan"].rules, "read_only": True}
        given = Permissions(rules_of(json.loads(rules)), **plan)
        child = Permissions(
            rules_of(json.loads(rules)),
            **plan,
        ).child(BUILT_IN["general"].rules)
        for each in given, child:
            found = each.decide("bash", line, ws)
            words = {"ask": "asked", "deny": "denied", "allow": "free"}
            word = words[found.action]
            if found.is_confined and word == "free":
                word = "confined"
            assert word == expected, line
            assert found.is_confined or expected in ("free", "denied")
            assert each.decide("unconfined", line, ws).action == "deny"
            assert each.decide("edit", "x", ws).action == "deny"


@seccomp
@pytest.mark.parametrize("agent", ["plan", "explore"])
def test_no_built_in_agent_lifts_what_the_user_denies(agent: str) -> None:
    given = rules_of({"read": {"mine/*": "deny"}, "task": "deny", "todo": "deny"})
    permissions = Permissions(given, agent=BUILT_IN[agent].rules)
    for kind, text in (
        ("read", "mine/x"),
        ("task", "general"),
        ("todo", "{}"),
    ):
        assert permissions.decide(kind, text, Path("/")).action == "deny"
    assert permissions.decide("read", "x", Path("/")).action == "allow"


def test_a_yes_in_a_plan_is_for_reading(ws: Path) -> None:
    (ws / ".env").write_text("KEY=1\n")
    (ws / "link").symlink_to(".env")
    plans = Plans(ws)
    plans("sort link")
    assert plans.asked == ["bash: sort link (it names a file that may hold secrets)"]
    plans.asked.clear()
    line = "sort .env; touch .env x"
    [found] = plans(line)
    assert plans.asked == [f"bash: {line} (it names a file that may hold secrets)"]
    assert found.startswith("KEY=1")
    assert not (ws / "x").exists()
    [found] = Plans(ws, can_ask=False)(line)
    assert found.startswith("Denied: bash needs permission (it names a file that may hold secrets)")
    [found] = Plans(ws, yolo=True, can_ask=False)(line)
    assert found.startswith("KEY=1")
    assert not (ws / "x").exists()


def test_what_the_plan_denies_is_named_as_the_plans_and_a_rules_as_a_rules(ws: Path) -> None:
    def change(ctx: ToolContext) -> Iterator[Event]:
        yield from ctx.ask("edit", "x.py")

    def look(ctx: ToolContext) -> Iterator[Event]:
        yield from ctx.ask("read", "mine/x")

    plans = Plans(ws, {"read": {"mine/*": "deny"}})
    tools = [
        Tool(
            "change",
            "",
            {},
            change,
            context="ctx",
            permission="web",
            asks_itself=True,
        ),
        Tool(
            "look",
            "",
            {},
            look,
            context="ctx",
            permission="web",
            asks_itself=True,
        ),
    ]
    with serve(
        Reply(calls=[("change", {}), ("look", {})]),
        Reply("The plan."),
    ) as server:
        ask(
            server,
            tools=Toolset(tools, cwd=ws),
            hooks=plans.hooks,
            each=plans.each,
        )
        assert results(server) == [
            "Denied: plan mode changes no file. The user ends it.",
            "Denied: a rule denies read mine/x. Do not try it another way.",
        ]


@seccomp
def test_outside_the_sandbox_is_not_offered_and_is_denied(ws: Path) -> None:
    plans = Plans(
        ws,
        {"unconfined": "allow"},
        flags=[rule_of("unconfined", "allow")],
    )
    [found] = plans("touch x", unconfined=True)
    assert "unconfined" not in plans.schema["properties"]
    assert found.startswith("Error: bash has no parameter unconfined.")
    plans.sandbox = None  # a tool that a plugin made, say
    outside = lambda ctx: run_command(ctx, "touch x", permission="unconfined")  # noqa: E731
    ask_outside = Tool("bash", "", {}, outside, context="ctx", asks_itself=True)
    with serve(
        Reply(calls=[("bash", {})]),
        Reply("The plan."),
    ) as server:
        ask(
            server,
            tools=Toolset([ask_outside], cwd=ws),
            hooks=plans.hooks,
            each=plans.each,
        )
        [found] = results(server)
    assert found.startswith("Denied: in plan mode no command runs outside the sandbox")
    assert plans.asked == []
    assert not (ws / "x").exists()


# ---- at the terminal -----------------------------------------------------------------------------


def planner(body: Body) -> Reply:
    """A model that plans with a command, and when it may, does what is planned."""
    last = body["messages"][-1]
    is_planning = "You are planning" in body["messages"][0]["content"]
    if last["role"] == "tool":
        return Reply("The plan: touch x." if is_planning else "It is done.")
    return Reply(calls=commands("touch planned" if is_planning else "touch x"))


def told(server: Any) -> list[str]:
    """What the user has said, by the newest request."""
    return [m["content"] for m in server.requests[-1]["messages"] if m["role"] == "user"]


@seccomp
def test_a_plan_ends_with_a_question_and_a_yes_carries_it_out(tmp_path: Path) -> None:
    with (
        serve(planner) as server,
        Terminal(tmp_path, server, "--plan", "-y") as session,
    ):
        session.enter("go")
        shown = bare(session.expect(PLANNED))
        assert "✗ bash touch planned" in shown
        assert "Run this command?" not in shown
        assert shown.endswith("Go on with this plan? yes, no, or ")
        session.type("yes, but use y\r")
        session.expect("❯ yes, but use y")
        session.expect(PLANNED)
        assert told(server) == ["go", "yes, but use y"]
        assert [*session.ws.iterdir()] == []
        session.type("y")  # a letter alone is the beginning of words
        session.expect("y")
        session.type("\r")
        session.expect("Agent build:")
        ended = bare(session.prompt())
        assert "It is done." in ended
        assert (session.ws / "x").exists()
        assert told(server)[2:] == [OVER, "Carry out this plan."]
        offered = [each["function"]["name"] for each in server.requests[-1]["tools"]]
        assert "edit" in offered
        assert not (session.ws / "planned").exists()
        assert PLANNED not in session.say("more")


@pytest.mark.parametrize("way", ["/plan\r", "/agent build\r", "/mode\r", "\x1b[Z"])
def test_the_model_is_told_that_plan_mode_is_over_however_it_was_left(
    tmp_path: Path, way: str
) -> None:
    with (
        serve(Reply("Well.")) as server,
        Terminal(tmp_path, server, "--plan") as session,
    ):
        session.enter("go")
        session.not_now()
        session.ready()
        session.type(way)
        session.expect("❯ ")
        session.ready()
        session.say("do it")
        assert told(server) == ["go", OVER, "do it"]
        session.say("/undo")
        session.ready()
        session.type("\x15")
        session.say("more")
        assert told(server) == ["go", OVER, "more"], "once, and also where the run was taken back"


def test_a_plan_that_is_not_taken_up_leaves_the_prompt_in_plan_mode(tmp_path: Path) -> None:
    answers = {"Enter": "\r", "Esc": "\x1b", "a word": "no\r", "Ctrl+D": "\x04"}
    with (
        serve(Reply("A plan.")) as server,
        Terminal(tmp_path, server, "--plan") as session,
    ):
        for name, keys in answers.items():
            session.enter(name)
            session.expect(PLANNED)
            session.settled()
            session.type(keys)
            session.prompt()
            assert bare(session.output).endswith("plan ❯ "), name
            assert told(server)[-1] == name
            session.ready()
        assert len(server.requests) == len(answers)
        session.enter("on")
        session.expect(PLANNED)
        session.settled()
        session.ctrl_c()
        session.prompt()
        session.ready()
        assert told(server) == [*answers, "on"]


def test_a_command_can_stand_at_the_question_and_what_was_typed_before_goes_first(
    tmp_path: Path,
) -> None:
    replies = iter([Reply("A plan."), Reply("Another."), Reply("Third.")])
    is_queued = threading.Event()

    def script(body: Body) -> Reply:
        reply = next(replies)
        if reply.text == "Another.":
            is_queued.wait(PATIENCE)
        return reply

    with (
        serve(script) as server,
        Terminal(tmp_path, server, "--plan") as session,
    ):
        session.enter("go")
        session.expect(PLANNED)
        session.settled()
        session.enter("/agent")
        assert "* plan" in bare(session.prompt())
        session.ready()
        session.enter("again")
        session.until(lambda: len(server.requests) == 2)
        session.enter("+and then this")
        session.expect("queued: and then this")
        is_queued.set()
        session.expect(PLANNED)
        session.settled()
        assert told(server) == ["go", "again", "and then this"]
        session.type("\r")
        session.prompt()


@seccomp
def test_one_task_in_plan_mode_asks_nothing_and_says_why_it_cannot(tmp_path: Path) -> None:
    task = ("task", {"description": "d", "prompt": "p", "agent": "general"})

    def script(body: Body) -> Reply:
        said = [each["content"] for each in body["messages"] if each["role"] == "tool"]
        if said:
            return Reply("; ".join(said))
        has_task = any(each["function"]["name"] == "task" for each in body["tools"])
        assert "unconfined" not in str(body["tools"])
        return Reply(
            calls=[
                *commands("touch x"),
                *([task] if has_task else []),
            ]
        )

    with serve(script) as server:
        with OneShot(tmp_path, server, "--plan", "-y", "--allow", "bash", "go") as run:
            assert run.end() == 0
            assert run.out.count("touch: cannot touch 'x': Permission denied") == 2, "a child, too"
            assert run.out.count("[in plan mode commands write nothing") == 2
        with OneShot(tmp_path, server, "--plan", "-y", "--sandbox", "off", "go") as run:
            assert run.end() == 0
            assert run.out.count(NO_SANDBOX) == 2
        assert [*run.ws.iterdir()] == []
        assert PLANNED not in run.err
