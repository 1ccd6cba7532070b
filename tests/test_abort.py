"""Stopping: Ctrl+C at the moments of a session in a real terminal, the ways out of the program, and
the abort of the library.

After each of them the prompt is back or the program gone, no process is left, and the next request
is in order.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pexpect
import pytest

from coder.abort import Abort
from coder.ai import ChatModel
from coder.cli.process import Interrupts
from coder.devtools.scripted import Body, Reply, ScriptedServer
from coder.events import Event, Retry, RunEnd, RunStart, TextDelta, ToolEnd, ToolStart, ToolUpdate
from coder.history import wire_messages
from coder.loop import run_loop
from coder.providers.errors import RetryPolicy
from coder.tools.bash import bash
from coder.toolset import Toolset, tool
from coder.types import Message
from tests.harness import FAST, all_of, ask, ask_model, assert_valid, drive, serve, types
from tests.terminal import (
    PATIENCE,
    PROMPT,
    PROMPTLY,
    OneShot,
    Place,
    Terminal,
    add_plugin,
    gone,
    processes,
    promptly,
    rendered,
    running,
    until,
)
from tests.workspace import Workspace

FINE = Reply("All is well.")
SLEEP = "sleep 300"
HALF = Reply("alpha beta gamma delta", cut=4, close="hang")
FAMILY = "sleep 301 & setsid sleep 302 & (setsid sh -c 'sleep 303 & wait' &) ; sleep 300"
MEMBERS = ["sleep 300", "sleep 301", "sleep 302", "sleep 303"]
STUBBORN = "trap 'touch asked' TERM; while :; do sleep 0.01; done"


def command(*lines: str, **more: Any) -> Reply:
    return Reply(
        calls=[("bash", {"command": line}) for line in lines],
        **more,
    )


def of(role: str, body: Body) -> list[Any]:
    return [message["content"] for message in body["messages"] if message["role"] == role]


def press_until_it_leaves(terminal: Terminal) -> None:
    """Ctrl+C at the prompt: on a busy machine one may come too late to be the second."""
    for _ in range(4):
        terminal.ready()
        terminal.ctrl_c()
        if terminal.child.expect([PROMPT, pexpect.EOF]) == 1:
            break


# ---- Ctrl+C in a session -----------------------------------------------------------------


MOMENTS = {  # what the server answers, and what is on the screen before Ctrl+C
    "headers": (Reply("late " * 500, pace=0.001), ""),
    "text": (HALF, "gamma"),
    "arguments": (command("touch PWN # and so much more than fits", cut=3, close="hang"), "bash …"),
    "commands": (command("echo first", f"echo partial; {SLEEP}", "touch PWN"), "│ partial"),
    "retry": (
        Reply("busy", status=429, headers={"Retry-After": "60"}),
        "Attempt 2 in 60 s",
    ),
    "question": (command("cp PWN PWN2"), "why not: "),
}


@pytest.mark.case(
    "ABT-01",
    "ABT-02",
    "ABT-03",
    "ABT-04",
    "ABT-05",
    "ABT-07",
    "ABT-09",
    "INV-13",
)
def test_ctrl_c_at_each_moment_of_a_run_leads_to_the_prompt_and_on(tmp_path: Path) -> None:
    release = threading.Event()
    asked = list[Body]()

    def script(body: Body) -> Reply:
        asked.append(body)
        if (moment := of("user", body)[-1]) == "headers":
            release.wait(PATIENCE)
        return MOMENTS[moment][0] if moment in MOMENTS else FINE

    allowed = ("--allow", "bash:echo *", "--allow", "bash:sleep *", "--allow", "bash:touch *")
    with (
        ScriptedServer(script) as server,
        Terminal(tmp_path, server, *allowed) as terminal,
    ):
        for moment, (_, seen) in MOMENTS.items():
            before = len(asked)
            terminal.enter(moment)
            terminal.until(lambda before=before: len(asked) > before, moment)
            terminal.expect(seen)
            if moment == "commands":
                terminal.until(lambda: terminal.running(SLEEP), "the command")
            if moment == "question":  # half an answer
                terminal.type("maybe")
                terminal.expect("maybe")
            terminal.ctrl_c()
            with promptly():
                shown = terminal.prompt()
                assert "stopped by the user" in shown, moment
                assert "exit -" not in shown, moment
            if moment == "headers":
                release.set()
            if moment in ("headers", "text"):
                until(lambda moment=moment: server.gone >= 1 + (moment == "text"), "it is closed")
            assert not terminal.running(SLEEP)
            assert "All is well." in terminal.say(f"{moment}: and now?"), moment
        sent = server.requests[-1]
        assert of("user", sent) == [text for m in MOMENTS for text in (m, f"{m}: and now?")]
        said = of("assistant", sent)
        assert "alpha beta gamma" in said
        assert said.count("All is well.") == len(MOMENTS) - 1
        first, second, third, _ = of("tool", sent)
        assert first == "first"
        assert "Not run" in third
        assert "partial" in second
        assert "aborted by the user" in second
        assert "than fits" not in str(sent["messages"]), "of a call that was cut nothing is kept"
        assert not list(terminal.ws.iterdir())


LONG = ("w" * 99 + " ") * 110


@pytest.mark.case("ABT-08")
def test_ctrl_c_while_a_session_is_shortened_loses_nothing(tmp_path: Path) -> None:
    release = threading.Event()
    summaries = list[Body]()

    def script(body: Body) -> Reply:
        if "<conversation>" not in str(body["messages"][-1]["content"]):
            return Reply(LONG)
        summaries.append(body)
        release.wait(PATIENCE)
        return Reply("not now", status=500)

    small = {"CODER_CONTEXT_WINDOW": "8000"}
    with (
        ScriptedServer(script) as server,
        Terminal(tmp_path, server, **small) as terminal,
    ):
        for words in ("one", "two"):
            terminal.say(words)
        terminal.enter("three")
        terminal.until(lambda: summaries, "the request for a summary")
        terminal.ctrl_c()
        with promptly():
            assert "stopped by the user" in terminal.prompt()
        release.set()
        terminal.say("four")
        asked = server.requests[-1]
        assert of("user", asked) == ["one", "two", "three", "four"]
        assert [text.strip() for text in of("assistant", asked)] == [LONG.strip()] * 2
        file = terminal.home / ".data" / "coder" / "sessions.db"
        with contextlib.closing(sqlite3.connect(file)) as db:
            rows = db.execute("SELECT data FROM message ORDER BY position").fetchall()
        kept = [json.loads(data) for (data,) in rows]
        assert [row["content"] for row in kept if row["role"] == "user"] == of("user", asked)


@pytest.mark.case("ABT-11")
def test_ctrl_c_clears_the_line_and_twice_on_an_empty_one_leaves(tmp_path: Path) -> None:
    with serve(FINE) as server, Terminal(tmp_path, server) as terminal:
        terminal.type("nonsense")
        terminal.expect("nonsense")
        terminal.ctrl_c()
        assert "D exits" not in terminal.prompt()
        terminal.enter('"""half')
        terminal.expect(". ")
        terminal.ctrl_c()
        assert "Ctrl+C again or Ctrl+D exits" in terminal.prompt()
        assert "All is well." in terminal.say("hello")
        assert of("user", server.requests[0]) == ["hello"]
        press_until_it_leaves(terminal)
        assert terminal.exit_code() == 130


def test_esc_right_before_a_run_stops_it() -> None:
    interrupts = Interrupts()
    abort = Abort()
    interrupts.escape()
    with interrupts.stopping(abort):
        assert abort.is_set()


SLOW_PLUGIN = """
import pathlib, time
pathlib.Path("loading").touch()
while not pathlib.Path("go").exists():
    time.sleep(0.01)
def setup(api):
    pass
"""


def test_ctrl_c_right_after_the_first_entry_comes_back_to_the_prompt(tmp_path: Path) -> None:
    """Whatever is being imported then."""
    release = threading.Event()

    def script(body: Body) -> Reply:
        return FINE if release.is_set() or not release.wait(PATIENCE) else Reply("late")

    with ScriptedServer(script) as server, Terminal(tmp_path, server) as terminal:
        terminal.enter("hello")
        terminal.expect("hello\r\n")
        terminal.child.sendintr()
        with promptly():
            terminal.child.expect(
                r"\r\n?(?:\x1b\][^\x07]*\x07|\x1b\[\?2004[hl]\r?)*(?:> |\x1b\[1m❯)"
            )
        release.set()
        assert "All is well." in terminal.say("and now?")


def test_ctrl_c_while_a_conversation_is_loaded_opens_it_once(tmp_path: Path) -> None:
    with ScriptedServer([FINE, FINE]) as server:
        with Terminal(tmp_path, server) as terminal:
            terminal.say("hello")
        add_plugin(tmp_path, "slow.py", SLOW_PLUGIN)
        terminal = Terminal(tmp_path, server, "-c", "-i", "given up")
        terminal.until((terminal.ws / "loading").exists, "the plugin is loaded")
        terminal.child.sendintr()
        terminal.expect("^C")
        (terminal.ws / "go").touch()
        with terminal:
            assert "All is well." in terminal.say("more")
            assert "given up" not in terminal.output


BLOCKING_PLUGIN = """
import pathlib, time
def block(event):
    if event.type == "text_delta" and not pathlib.Path("go").exists():
        pathlib.Path("blocked").touch()
        time.sleep(300)
def setup(api):
    api.subscribe(block)
"""


def test_code_that_does_not_look_at_the_abort_is_interrupted(tmp_path: Path) -> None:
    add_plugin(tmp_path, "blocking.py", BLOCKING_PLUGIN)
    with ScriptedServer([FINE]) as server, Terminal(tmp_path, server) as terminal:
        terminal.enter("hello")
        terminal.until((terminal.ws / "blocked").exists, "the plugin blocks")
        terminal.ctrl_c()
        with promptly():
            terminal.prompt()
        (terminal.ws / "go").touch()
        terminal.ready()
        assert "All is well." in terminal.say("and now?")


# ---- the ways out ------------------------------------------------------------------------


def twice(terminal: Terminal) -> None:
    terminal.ctrl_c()
    terminal.prompt()
    press_until_it_leaves(terminal)


def by_signals(*numbers: signal.Signals) -> Callable[[Terminal], None]:
    """Also while the program shuts down."""

    def send(terminal: Terminal) -> None:
        for number in numbers:
            if terminal.child.isalive():
                os.kill(terminal.child.pid, number)
                terminal.child.expect([pexpect.TIMEOUT, pexpect.EOF], timeout=0.02)

    return send


def hang_up(terminal: Terminal) -> None:
    terminal.hang_up()
    until(lambda: not processes(terminal.mark))


MANY = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT] * 5
HELD_UP = """
import atexit, time
def wait():
    while True: time.sleep(1)
def setup(api): atexit.register(wait)
"""


@pytest.mark.case("ABT-10", "ABT-12", "ABT-13")
@pytest.mark.parametrize(
    ("way", "code", "plugin"),
    [
        pytest.param(twice, 130, "", id="Ctrl+C twice"),
        pytest.param(by_signals(signal.SIGQUIT), 131, "", id="SIGQUIT"),
        pytest.param(by_signals(*MANY), 143, "", id="many signals"),
        pytest.param(by_signals(signal.SIGTERM), 143, HELD_UP, id="code that holds the end up"),
        pytest.param(hang_up, 0, "", id="the terminal is closed"),
    ],
)
def test_whichever_way_the_program_ends_nothing_is_left_and_the_session_goes_on(
    tmp_path: Path, way: Callable[[Terminal], None], code: int, plugin: str
) -> None:
    if plugin:
        add_plugin(tmp_path, "plugin.py", plugin)
    line = f"{FAMILY.rpartition(';')[0]}; {STUBBORN}"
    with serve(command(line)) as server:
        with Terminal(tmp_path, server, "-y") as terminal:
            terminal.enter("hello")
            terminal.until(
                lambda: all(
                    map(
                        terminal.running,
                        [*MEMBERS[1:], "sleep 0.01"],
                    )
                )
            )
            terminal.settled()
            with promptly():
                way(terminal)
                assert not code or terminal.exit_code() == code
            modes = [terminal.output.rindex(f"\x1b[?2004{mode}") for mode in "hl"]
            assert not code or modes == sorted(modes)
        if code in (0, 130, 143) and not plugin:
            assert len(resumed(terminal, server)) == 1


HOLDING = """
import time
from pathlib import Path

def hold() -> str:
    "Let nothing end."
    Path("holding").touch()
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass

def setup(api): api.add_tool(hold)
"""


def test_the_last_resort_leaves_nothing_after_code_that_lets_nothing_end(tmp_path: Path) -> None:
    """No process, no temporary folder, no mode of the terminal, and the session goes on."""
    add_plugin(tmp_path, "plugin.py", HOLDING)
    calls = [("bash", {"command": "sleep 301 > /dev/null & seq 9999"}), ("hold", {})]
    with serve(Reply(calls=calls)) as server:
        with Terminal(tmp_path, server, "-y") as terminal:
            terminal.enter("hello")
            terminal.until((terminal.ws / "holding").exists, "the tool holds")
            terminal.until(lambda: terminal.running("sleep 301"), "the command runs")
            with promptly():
                terminal.kill(signal.SIGTERM)
                assert terminal.exit_code() == 143
        assert len(resumed(terminal, server)) == 2


def resumed(place: Place, server: ScriptedServer) -> list[str]:
    """The session of the folder goes on, and its next request is in order; returns the results of
    tools in it."""
    server.script = lambda body: FINE
    with OneShot(place.folder, server, "-c", "and now?") as run:
        assert run.end() == 0
    assert of("user", server.requests[-1]) == ["hello", "and now?"]
    return of("tool", server.requests[-1])


@pytest.mark.parametrize("pause", [0.0, 0.1])
def test_only_at_the_prompt_does_another_ctrl_c_leave(tmp_path: Path, pause: float) -> None:
    """Pressed twice during a run, it stops the run, however soon the prompt is back. If the machine
    stands still between the two, the second is one at the prompt: then all is done once more."""
    slow = command(f"echo busy; {STUBBORN}")
    for attempt in "123":
        with (
            serve(slow, HALF, FINE) as server,
            Terminal(tmp_path / attempt, server, "-y") as terminal,
        ):
            runs = {"hello": "busy", "more": "gamma"}
            if all(stays(terminal, entry, seen, pause) for entry, seen in runs.items()):
                terminal.enter("and now?")
                terminal.expect("All is well.")
                terminal.prompt()
                press_until_it_leaves(terminal)
                assert terminal.exit_code() == 130
                return
    pytest.fail("it has left each time")


def stays(terminal: Terminal, entry: str, seen: str, pause: float) -> bool:
    """Press Ctrl+C twice during a run; is the program still there half a second after its
    prompt?"""
    terminal.enter(entry)
    terminal.expect(seen)
    for _ in range(2):
        terminal.child.sendintr()
        terminal.child.expect([pexpect.TIMEOUT, pexpect.EOF], timeout=pause)
    come = [
        terminal.child.expect_exact(["stopped by the user", pexpect.EOF]),
        terminal.child.expect([PROMPT, pexpect.EOF]),
        terminal.child.expect([pexpect.TIMEOUT, pexpect.EOF], timeout=0.5),
    ]
    return come == [0, 0, 0]


DEAF = """
import time
def block(event):
    while event.type == "text_delta":
        try:
            open("blocked", "w").close()
            time.sleep(300)
        except BaseException:
            pass
def setup(api):
    api.subscribe(block)
"""


def test_a_run_that_nothing_stops_can_be_left_with_ctrl_c(tmp_path: Path) -> None:
    add_plugin(tmp_path, "deaf.py", DEAF)
    with serve(FINE) as server, Terminal(tmp_path, server) as terminal:
        terminal.enter("hello")
        terminal.until((terminal.ws / "blocked").exists, "the plugin blocks")
        with promptly():
            for _ in range(60):  # else a program that never leaves would hold the tests up
                if terminal.child.isalive():
                    terminal.child.sendintr()
                    terminal.child.expect([pexpect.TIMEOUT, pexpect.EOF], timeout=0.5)
            assert terminal.exit_code() == 130


def test_a_signal_at_the_prompt_ends_in_order(tmp_path: Path) -> None:
    with serve(FINE) as server, Terminal(tmp_path, server) as terminal:
        terminal.say("hello")
        terminal.ready()
        terminal.kill(signal.SIGTERM)
        with promptly():
            assert terminal.exit_code() == 143
        assert "hello" in (terminal.home / ".data" / "coder" / "history").read_text()


def test_ctrl_c_as_soon_as_the_prompt_is_there_is_seen(tmp_path: Path) -> None:
    with serve(FINE) as server:
        terminal = Terminal(tmp_path, server)
        try:
            terminal.prompt()
            os.kill(terminal.child.pid, signal.SIGINT)
            terminal.expect("Ctrl+C again")
        finally:
            terminal.stop()
            terminal.child.close(force=True)


# ---- one task ----------------------------------------------------------------------------


@pytest.mark.case("ABT-14")
@pytest.mark.parametrize(
    ("number", "code", "output_format"),
    [
        (signal.SIGINT, 130, "text"),
        (signal.SIGTERM, 143, "json"),
        (signal.SIGHUP, 129, "text"),
    ],
)
def test_a_signal_to_a_one_shot_run_in_bash_stops_all_of_it_and_is_named(
    tmp_path: Path, number: signal.Signals, code: int, output_format: str
) -> None:
    with serve(command(f"echo partial; {FAMILY}")) as server:
        options = ("-y", "--output-format", output_format, "hello")
        with OneShot(tmp_path, server, *options) as run:
            until(lambda: all(map(run.running, MEMBERS)))
            run.kill(number)
            with promptly():
                assert run.end() == code
        by = "the user" if number == signal.SIGINT else "a signal"
        assert run.err.splitlines()[-1].startswith(f"stopped by {by}")
        assert run.err.count("stopped by") == 1
        if output_format == "json":
            assert json.loads(run.out)["stop_reason"] == "aborted"
        else:
            assert run.out == ""
        if number == signal.SIGINT:
            (result,) = resumed(run, server)
            assert "partial" in result
            assert "aborted by the user" in result


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143)],
)
def test_a_signal_in_text_ends_events(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Also one that does not wake the read, as one that comes between Python's look for signals and
    a read that blocks.

    Here another thread of the process gets it.
    """
    block = f"signal.pthread_sigmask(signal.SIG_BLOCK, {{{number}}})"
    setup = "import signal\ndef setup(api): api.subscribe(block)\n"
    add_plugin(tmp_path, "deaf.py", f"{setup}def block(event): {block}\n")
    with serve(HALF) as server:
        with OneShot(tmp_path, server, "--output-format", "stream-json", "hello") as run:
            assert run.child.stdout
            assert any(b"beta" in line for line in iter(run.child.stdout.readline, b""))
            run.kill(number)
            with promptly():
                assert run.end() == code
        assert '"stop_reason": "aborted"' in run.out.splitlines()[-1]
        assert server.gone == 1


# ---- Ctrl+Z ------------------------------------------------------------------------------


def rows(terminal: Terminal) -> list[str]:
    return [row for row in rendered(terminal.output, lines=200) if row]


class Shell(Terminal):
    """A shell with jobs, for the program to be started in."""

    def __init__(self, folder: Path, server: ScriptedServer) -> None:
        super().__init__(folder, server, "--version")
        self.child.expect(pexpect.EOF)
        self.child.close()
        environment = self.environment | {"PS1": "$ "}
        self.spawn("/bin/bash", ["--norc", "--noprofile", "-i"], environment)

    def __enter__(self) -> Shell:
        self.expect("$ ")
        return self

    def stop_program(self) -> None:
        self.type("\x1a")
        self.expect("Stopped")
        self.expect("$ ")


def test_the_prompt_and_a_question_are_drawn_again_after_fg(tmp_path: Path) -> None:
    with (
        serve(command("touch made"), FINE) as server,
        Shell(tmp_path, server) as shell,
    ):
        shell.enter(f"{sys.executable} -m coder")
        Terminal.prompt(shell)
        shell.ready()
        shell.type("half\x1b[D\x1b[D")
        shell.expect("half\b\b")
        for _ in range(2):
            shell.stop_program()
            shell.enter("fg")
            shell.until(lambda: rows(shell)[-1] == "❯ half", "the line")
        shell.enter("lo")
        shell.expect("why not: ")
        shell.stop_program()
        shell.enter("fg")
        shell.expect("why not: ")
        shell.enter("y")
        shell.expect("All is well.")
        assert of("user", server.requests[-1]) == ["halolf"]
        assert (shell.ws / "made").exists()
        Terminal.prompt(shell)
        shell.ctrl_d()
        shell.expect("$ ")
        shell.enter("exit")
        assert shell.exit_code() == 0


@pytest.mark.case("ABT-16")
def test_ctrl_z_gives_the_terminal_to_the_shell_and_fg_takes_it_back(tmp_path: Path) -> None:
    ticks = "for i in 1 2 3 4 5 6 7 8 9; do sleep 0.5; echo tick $i; done; sleep 300"
    replies = iter([command("sh ticks"), FINE, command("sh ticks")])
    with (
        serve(lambda body: next(replies)) as server,
        Shell(tmp_path, server) as shell,
    ):
        (shell.ws / "ticks").write_text(ticks)
        shell.enter(f"{sys.executable} -m coder -y")
        Terminal.prompt(shell)
        shell.ready()
        shell.enter("hello")
        shell.expect("tick 1")
        working = termios.tcgetattr(shell.child.child_fd)
        shell.stop_program()
        stopped = shell.output.rindex("Stopped")
        off, on = (shell.output.rindex(f"\x1b[?2004{c}", 0, stopped) for c in "lh")
        assert off > on, "pastes are not marked for the shell"
        shell.enter("stty -a | tr ' ' '\\n' | grep -x -e '-\\?echo' -e '-\\?icanon' | tr '\\n' ' '")
        assert re.search(r"\r\n.*icanon.*echo", shell.expect("$ "))
        assert "-icanon -echo" not in shell.output
        shell.enter("fg")
        shell.expect("tick")
        until(lambda: termios.tcgetattr(shell.child.child_fd) == working)
        shell.type("half a line")
        shell.expect("half a line")
        with promptly():
            shell.child.sendintr()
            shell.expect("stopped by the user")
        shell.prompt()
        shell.enter("")  # the line that was typed
        shell.expect("All is well.")
        shell.prompt()
        shell.ready()
        # In the background a change of the terminal's modes would stop it again
        shell.enter("once more")
        shell.expect("tick 1")
        shell.stop_program()
        with promptly():
            shell.enter("kill %1")
            shell.until(lambda: not shell.running(f"{sys.executable} -m coder"))

        def told() -> bool:  # before a prompt that comes after the shell has heard of it
            shell.enter("")
            return "Exit 143" in shell.output

        shell.until(told, "the exit code")
        shell.enter("exit 0")
        assert shell.exit_code() == 0


# ---- the library: a token that another thread sets ---------------------------------------


@pytest.mark.parametrize(
    ("reply", "moment"),
    [
        (Reply("late", hold=60), RunStart),
        (HALF, TextDelta),
        (Reply("busy", status=503), Retry),
        (command(f"echo partial; {SLEEP}"), ToolUpdate),
        (command("yes"), ToolUpdate),
    ],
    ids=["headers", "text", "retry", "bash", "a flood"],
)
def test_an_abort_ends_a_run(mark: str, tmp_path: Path, reply: Reply, moment: type[Event]) -> None:
    abort = Abort()
    come = threading.Event()
    over = threading.Event()
    messages = list[Message]()
    set_at: list[float] = []

    def set_it() -> None:
        until(lambda: over.is_set() or (come.is_set() and server.requests))
        set_at.append(time.monotonic())
        abort.set()

    def each(event: Event) -> None:
        if isinstance(event, moment):
            come.set()

    options = {"messages": messages, "abort": abort, "retry": RetryPolicy(base=60)}
    with serve(reply) as server:
        (thread := threading.Thread(target=set_it)).start()
        try:
            events, result = ask(
                server,
                "go",
                Toolset([bash], cwd=tmp_path),
                each=each,
                **options,
            )
            ended = time.monotonic()
        finally:
            over.set()
            thread.join()
        until(lambda: moment is not TextDelta or server.gone == 1, "it is closed")
        assert len(server.requests) == 1
    assert ended - set_at[0] < PROMPTLY
    assert result.stop_reason == "aborted"
    assert isinstance(events[-1], RunEnd)
    assert_valid({"messages": wire_messages(messages)})
    assert not reply.calls or "aborted by the user" in messages[-1]["content"]
    gone(mark)


def test_an_abort_while_the_connection_is_made() -> None:
    """The server's queue of connections is full, so that connecting hangs."""
    abort = Abort()
    with contextlib.ExitStack() as sockets:
        server = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            one = sockets.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(server.getsockname())
        model = ChatModel("m", base_url=f"http://127.0.0.1:{server.getsockname()[1]}/v1")
        threading.Timer(0.3, abort.set).start()
        events, result = ask_model(model, abort=abort)
    assert result.stop_reason == "aborted", "it was given up"
    assert "retry" not in types(events), "it was given up"


# ---- the library: interrupts, consumers that leave --------------------------------------


def test_a_keyboard_interrupt_in_a_tool_ends_the_run_in_order_and_then_climbs() -> None:
    @tool
    def pressed() -> str:
        """Press Ctrl+C."""
        signal.raise_signal(signal.SIGINT)
        return "never"

    messages = list[Message]()
    events = list[Event]()
    with serve(
        Reply(
            "So:",
            calls=[("pressed", {}), ("pressed", {})],
        )
    ) as server:
        model = ChatModel("m", base_url=server.url)
        run = run_loop(messages, model, [pressed], prompt="go", retry=FAST)
        with pytest.raises(KeyboardInterrupt):
            for event in run:
                events.append(event)
    assert isinstance(events[-1], RunEnd)
    assert events[-1].stop_reason == "aborted"
    assert_valid({"messages": wire_messages(messages)})
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    [start], [end] = all_of(ToolStart, events), all_of(ToolEnd, events)
    assert start.id == end.id
    assert end.is_error
    assert end.result.content == messages[2]["content"]


@pytest.mark.parametrize("moment", ["read", "write"])
def test_a_signal_that_does_not_wake_a_script_interrupts_it(moment: str) -> None:
    """One that comes between Python's look for signals and a call that blocks: here another thread
    gets it."""
    asked = threading.Event()

    def begin_an_answer() -> None:
        caller = sockets.enter_context(server.accept()[0])
        while moment == "read" and b"go" not in caller.recv(65536):
            pass
        if moment == "read":
            caller.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        asked.set()

    def interrupt() -> None:
        if asked.wait(30):
            threading.Event().wait(0.5)  # until the other thread waits, or the socket is full
            os.kill(os.getpid(), signal.SIGINT)

    with contextlib.ExitStack() as sockets:
        server = sockets.enter_context(socket.create_server(("127.0.0.1", 0)))
        threads = [threading.Thread(target=each) for each in (begin_an_answer, interrupt)]
        for thread in threads:
            thread.start()
        prompt = "go" if moment == "read" else "x" * 50_000_000
        address = f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        model = ChatModel("m", base_url=address, first_byte_timeout=30)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with promptly(), pytest.raises(KeyboardInterrupt):
                drive(run_loop([], model, prompt=prompt, retry=FAST))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for thread in threads:
                thread.join(30)


@pytest.mark.parametrize("moment", [ToolUpdate, TextDelta])
def test_a_consumer_that_leaves_leaves_none(mark: str, tmp_path: Path, moment: type[Event]) -> None:
    messages: list[Message] = []
    calls = command(f"echo partial; setsid sleep 301 & {SLEEP}", "touch PWN")
    with serve(calls if moment is ToolUpdate else HALF) as server:
        model = ChatModel("m", base_url=server.url)
        tools = Toolset([bash], cwd=tmp_path)
        run = run_loop(messages, model, tools, prompt="go", retry=FAST)
        while not isinstance(next(run), moment):
            pass
        if moment is ToolUpdate:
            until(lambda: running(mark, SLEEP) and running(mark, "sleep 301"))
        with promptly():
            run.close()
        gone(mark)
        until(lambda: moment is ToolUpdate or server.gone == 1)
    assert_valid({"messages": wire_messages(messages)})
    if moment is ToolUpdate:
        assert "partial" in messages[-2]["content"]
        assert "Not run" in messages[-1]["content"]
    assert not (tmp_path / "PWN").exists()


# ---- a large file ------------------------------------------------------------------------


@pytest.mark.case("ABT-18")
@pytest.mark.parametrize(
    "rounds",
    [4, pytest.param(100, marks=pytest.mark.slow)],
)
def test_ctrl_c_in_a_large_write_leaves_the_old_or_the_new_one(tmp_path: Path, rounds: int) -> None:
    """Each round begins with a quick one to its end, which gives the span in which the next is
    interrupted."""
    old, new = ((word * 249_999 + "\n") * 2 for word in ("old ", "new "))
    file = tmp_path / "file"
    chance = random.Random(18)
    interrupted = 0

    def write_new(after: float) -> bool:
        """Write, and press Ctrl+C so many seconds later, or never; was it in time?"""
        file.write_text(old)
        ws = Workspace(tmp_path)
        ws("read", path="file", limit=1)
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, after)
                ws("write", path="file", content=new)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            return True
        return False

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(50 * rounds):
            began = time.monotonic()
            write_new(0)
            assert file.read_text() == new
            in_time = write_new(chance.uniform(1e-6, time.monotonic() - began))
            interrupted += in_time
            assert file.read_text() in ((old, new) if in_time else (new,))
            assert os.listdir(tmp_path) == ["file"]
            if interrupted == rounds:
                break
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted == rounds


def test_an_end_while_the_private_folder_is_made_leaves_none(tmp_path: Path) -> None:
    code = (
        "import sys; from coder.tools import workspace\n"
        "workspace.fcntl.flock = lambda *given: sys.exit(143)\n"
        "workspace.private_folder()"
    )
    env = os.environ | {"TMPDIR": str(tmp_path)}
    assert (
        subprocess.run(
            [sys.executable, "-c", code],
            env=env,
            check=False,
        ).returncode
        == 143
    )
    assert os.listdir(tmp_path) == []
