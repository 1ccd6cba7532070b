"""The end of the program, however it comes: the cases ABT-09 to ABT-16 as far as test_abort.py does not have them.

Afterwards no process is left, also none that made a session of its own, the terminal is as it was, and the session can be
taken up: each call in it has its result.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest

from coder.cli.input import EXIT_AFTER_RUN as BOTH
from coder.devtools.scripted import Body, Reply, ScriptedServer
from tests.harness import serve
from tests.terminal import (
    PATIENCE,
    OneShot,
    Place,
    Terminal,
    add_plugin,
    processes,
    promptly,
    until,
)

FINE = Reply("All is well.")
ALL_KINDS = "sleep 301 & setsid sleep 302 & (setsid sh -c 'sleep 303 & wait' &) ; sleep 300"
SLEEPS = ["sleep 300", "sleep 301", "sleep 302", "sleep 303"]


def command(line: str) -> Reply:
    return Reply(calls=[("bash", {"command": line})])


def taken_up(place: Place, server: ScriptedServer) -> list[dict[str, Any]]:
    """The conversation of the folder goes on, and its next request is in order; returns the results of tools in it."""
    server.script = lambda body: FINE
    with OneShot(place.folder, server, "-c", "and now?") as run:
        assert run.end() == 0
    messages: list[dict[str, Any]] = server.requests[-1]["messages"]
    assert [m["content"] for m in messages if m["role"] == "user"] == ["hello", "and now?"]
    return [message for message in messages if message["role"] == "tool"]


# ---- the ways out ----------------------------------------------------------------------------------------


def twice(terminal: Terminal) -> None:
    pressed = time.monotonic()
    terminal.ctrl_c()
    terminal.until(lambda: not terminal.running("sleep 300"))
    terminal.ctrl_c()
    if terminal.child.expect_exact([pexpect.EOF, "Ctrl+C again leaves"]):
        assert time.monotonic() - pressed > BOTH, (
            "only on a busy machine the second comes too late to be one"
        )
        terminal.ctrl_c()


def again_and_again(terminal: Terminal) -> None:
    """Also while the program clears up."""
    for _ in range(30):
        if terminal.child.isalive():
            terminal.child.sendintr()
            terminal.child.expect([pexpect.TIMEOUT, pexpect.EOF], timeout=0.02)


def by_signals(*numbers: signal.Signals) -> Any:
    def send(terminal: Terminal) -> None:
        for number in numbers:
            if terminal.child.isalive():
                os.kill(terminal.child.pid, number)
                terminal.child.expect([pexpect.TIMEOUT, pexpect.EOF], timeout=0.02)

    return send


WAYS = {
    "ctrl+c twice": pytest.param(twice, 130, marks=pytest.mark.case("ABT-10"), id="Ctrl+C twice"),
    "ctrl+c often": pytest.param(
        again_and_again, 130, marks=pytest.mark.case("ABT-10"), id="Ctrl+C again and again"
    ),
    "sigterm": pytest.param(
        by_signals(signal.SIGTERM), 143, marks=pytest.mark.case("ABT-12"), id="SIGTERM"
    ),
    "sighup": pytest.param(
        by_signals(signal.SIGHUP), 129, marks=pytest.mark.case("ABT-12"), id="SIGHUP"
    ),
    "sigquit": pytest.param(by_signals(signal.SIGQUIT), 131, id="SIGQUIT"),
    "all": pytest.param(
        by_signals(*[signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGTERM] * 5),
        143,
        id="many signals",
    ),
}


@pytest.mark.parametrize(("way", "code"), WAYS.values())
def test_whichever_way_the_program_ends_nothing_is_left_and_the_session_goes_on(
    tmp_path: Path, way: Any, code: int
) -> None:
    with serve(command(ALL_KINDS)) as server:
        with Terminal(tmp_path, server, "-y") as terminal:
            terminal.enter("hello")
            terminal.until(lambda: all(map(terminal.running, SLEEPS)))
            terminal.settled()
            with promptly():
                way(terminal)
                assert terminal.exit_code() == code
            assert terminal.output.rindex("\x1b[?2004l") > terminal.output.rindex("\x1b[?2004h")
        assert len(taken_up(terminal, server)) == 1


@pytest.mark.case("ABT-13")
def test_a_closed_terminal_leaves_nothing_and_the_session_goes_on(tmp_path: Path) -> None:
    with serve(command(ALL_KINDS)) as server:
        with Terminal(tmp_path, server, "-y") as terminal:
            terminal.enter("hello")
            terminal.until(lambda: all(map(terminal.running, SLEEPS)))
            with promptly():
                terminal.hang_up()
                until(lambda: not processes(terminal.mark))
        assert len(taken_up(terminal, server)) == 1


@pytest.mark.case("ABT-14")
def test_a_one_shot_run_that_is_stopped_can_be_taken_up(tmp_path: Path) -> None:
    with serve(command(f"echo partial; {ALL_KINDS}")) as server:
        with OneShot(tmp_path, server, "-y", "hello") as run:
            until(lambda: all(map(run.running, SLEEPS)))
            run.kill(signal.SIGINT)
            with promptly():
                assert run.end() == 130
            assert run.out == ""
        (result,) = taken_up(run, server)
        assert "partial" in result["content"] and "aborted by the user" in result["content"]


@pytest.mark.case("ABT-12")
def test_who_holds_the_end_up_is_left_behind(tmp_path: Path) -> None:
    """A plugin that waits for ever while the program ends: after the promised time the end is made without it."""
    add_plugin(
        tmp_path,
        "slow.py",
        "import atexit, time\ndef wait():\n    while True: time.sleep(1)\n"
        "def setup(api): atexit.register(wait)\n",
    )
    with serve(command(ALL_KINDS)) as server, Terminal(tmp_path, server, "-y") as terminal:
        terminal.enter("hello")
        terminal.until(lambda: all(map(terminal.running, SLEEPS)))
        terminal.kill(signal.SIGTERM)
        with promptly():
            assert terminal.exit_code() == 143


@pytest.mark.case("ABT-09")
@pytest.mark.parametrize("typed", ["", "y"])
def test_ctrl_c_at_the_question_ends_the_run_with_a_result_and_an_echo(
    tmp_path: Path, typed: str
) -> None:
    with serve(command("touch PWN"), FINE) as server, Terminal(tmp_path, server) as terminal:
        terminal.enter("hello")
        terminal.expect("or why not: ")
        terminal.type(typed)
        terminal.expect(typed)
        terminal.ctrl_c()
        with promptly():
            assert "stopped by you" in terminal.prompt()
        terminal.type("seen")
        terminal.expect("seen")
        terminal.enter("")
        terminal.prompt()
        sent = server.requests[-1]["messages"]
        assert [message["role"] for message in sent[1:]] == [
            "user",
            "assistant",
            "tool",
            "user",
        ] and sent[-1]["content"] == "seen"
        assert not (terminal.ws / "PWN").exists()


# ---- Ctrl+Z ----------------------------------------------------------------------------------------------


class Shell(Terminal):
    """A shell with jobs, for the program to be started in."""

    def __init__(self, folder: Path, server: ScriptedServer) -> None:
        super().__init__(folder, server, "--version")
        self.child.expect(pexpect.EOF)
        self.child.close()
        self.child = pexpect.spawn(
            "/bin/bash",
            ["--norc", "--noprofile", "-i"],
            cwd=str(self.ws),
            env=self.environment | {"PS1": "$ "},
            dimensions=(24, 80),
            encoding="utf-8",
            codec_errors="replace",
            timeout=PATIENCE,
        )
        self.child.logfile_read = self.log
        self.child.delaybeforesend = None

    def __enter__(self) -> Shell:
        self.expect("$ ")
        return self

    def modes(self) -> list[Any]:
        return termios.tcgetattr(self.child.child_fd)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    replies = [command("sh ticks"), FINE]

    def script(body: Body) -> Reply:
        return replies.pop(0) if len(replies) > 1 else replies[0]

    with ScriptedServer(script) as server, Shell(tmp_path, server) as shell:
        (shell.ws / "ticks").write_text(
            "for i in 1 2 3 4 5 6 7 8 9; do sleep 0.5; echo tick $i; done; sleep 300"
        )
        yield shell


@pytest.mark.case("ABT-16")
def test_ctrl_z_stops_the_program_fg_goes_on_and_ctrl_c_still_stops_the_run(shell: Shell) -> None:
    shell.enter(f"{sys.executable} -m coder -y")
    shell.prompt()
    shell.ready()
    shell.enter("hello")
    shell.expect("tick 1")
    working = shell.modes()
    shell.type("\x1a")
    shell.expect("Stopped")
    shell.expect("$ ")
    assert shell.output.rindex("\x1b[?2004l") > shell.output.rindex(
        "\x1b[?2004h", 0, shell.output.rindex("Stopped")
    )
    shell.enter("stty -a | tr ' ' '\\n' | grep -x -e '-\\?echo' -e '-\\?icanon' | tr '\\n' ' '")
    assert (
        re.search(r"\r\n.*icanon.*echo", shell.expect("$ ")) and "-icanon -echo" not in shell.output
    )
    shell.enter("fg")
    shell.expect("tick")
    until(lambda: shell.modes() == working)
    shell.type("half a line")
    shell.expect("half a line")
    with promptly():
        shell.child.sendintr()
        shell.expect("stopped by you")
    shell.prompt()
    shell.enter("")  # the line that was typed
    shell.expect("All is well.")
    shell.prompt()
    shell.ready()
    shell.ctrl_d()
    shell.expect("$ ")
    shell.enter("exit 0")
    assert shell.exit_code() == 0


@pytest.mark.case("ABT-16")
def test_a_program_that_ctrl_z_has_stopped_can_be_ended_from_the_shell(shell: Shell) -> None:
    """It is in the background then, where a change of the terminal's modes would stop it again."""
    shell.enter(f"{sys.executable} -m coder -y")
    shell.prompt()
    shell.ready()
    shell.enter("hello")
    shell.expect("tick 1")
    shell.type("\x1a")
    shell.expect("Stopped")
    shell.expect("$ ")
    with promptly():
        shell.enter("kill %1")
        shell.until(lambda: not shell.running(f"{sys.executable} -m coder"))

    def told() -> bool:  # before a prompt that comes after the shell has heard of it
        shell.enter("")
        return "Exit 143" in shell.output

    shell.until(told, "the exit code")
    shell.enter("exit 0")
    assert shell.exit_code() == 0
