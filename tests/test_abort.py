"""Stopping: Ctrl+C at every moment of a session in a real terminal, signals, and the abort of the library.

After each of them the prompt is back or the program gone, no process is left, and the next request is in order.
The ids of the cases are in tests/data/cases.toml.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest

from coder.abort import Abort
from coder.ai import ChatModel
from coder.devtools.scripted import Body, Reply, ScriptedServer
from coder.events import Event, Retry, RunEnd, TextDelta, ToolEnd, ToolUpdate
from coder.history import convert_to_llm
from coder.loop import run_loop
from coder.providers.errors import RetryPolicy
from coder.tools.bash import bash
from coder.tools.search import grep
from coder.toolset import Toolset, tool
from coder.types import Limits, Message
from tests.harness import FAST, ask, assert_all_valid, assert_valid, drive, serve
from tests.terminal import (
    MARK,
    PATIENCE,
    PROMPT,
    PROMPTLY,
    OneShot,
    Terminal,
    add_plugin,
    gone,
    processes,
    promptly,
    running,
    until,
)

FINE = Reply("All is well.")
SLEEP = "sleep 300"


def command(line: str, **more: Any) -> Reply:
    return Reply(calls=[("bash", {"command": line})], **more)


def held(release: threading.Event, *after: Reply) -> Callable[[Body], Reply]:
    """Sends nothing at all for the first request until `release` is set; then it does, and sees whether anybody is there."""
    left = iter(after)

    def script(_: Body) -> Reply:
        if not release.is_set():
            release.wait(PATIENCE)
            return Reply("late " * 500, pace=0.001)
        return next(left, FINE)

    return script


def results(body: Body) -> list[str]:
    """What the tools answered."""
    return [message["content"] for message in body["messages"] if message["role"] == "tool"]


def goes_on(terminal: Terminal, server: ScriptedServer) -> Body:
    """The next message works; returns its request."""
    assert "All is well." in terminal.say("and now?")
    asked = [
        message["content"]
        for message in server.requests[-1]["messages"]
        if message["role"] == "user"
    ]
    assert asked[-1] == "and now?"
    return server.requests[-1]


# ---- Ctrl+C in a session ---------------------------------------------------------------------------------


@pytest.mark.case("ABT-01")
def test_ctrl_c_while_waiting_for_headers(tmp_path: Path) -> None:
    release = threading.Event()
    with ScriptedServer(held(release)) as server, Terminal(tmp_path, server) as terminal:
        terminal.enter("hello")
        terminal.until(lambda: server.requests)
        terminal.ctrl_c()
        with promptly():
            assert "stopped by you" in terminal.prompt()
        release.set()
        until(lambda: server.gone == 1, "the server sees that the connection is closed")
        goes_on(terminal, server)


@pytest.mark.case("ABT-02")
def test_ctrl_c_in_the_middle_of_text(tmp_path: Path) -> None:
    with (
        serve(Reply("alpha beta gamma delta", cut=4, close="hang"), FINE) as server,
        Terminal(tmp_path, server) as terminal,
    ):
        terminal.enter("hello")
        terminal.expect("beta")
        terminal.ctrl_c()
        with promptly():
            assert "stopped by you" in terminal.prompt()
        until(lambda: server.gone == 1, "the server sees that the connection is closed")
        messages = goes_on(terminal, server)["messages"]
        assert [message["content"] for message in messages if message["role"] == "assistant"] == [
            "alpha beta gamma"
        ]


@pytest.mark.case("ABT-03")
def test_ctrl_c_in_the_middle_of_a_calls_arguments(tmp_path: Path) -> None:
    half = command(
        "touch PWN # and so much more that it does not fit into one piece", cut=3, close="hang"
    )
    with serve(half, FINE) as server, Terminal(tmp_path, server, "-y") as terminal:
        terminal.enter("hello")
        terminal.expect("bash …")
        terminal.ctrl_c()
        with promptly():
            assert "stopped by you" in terminal.prompt()
        body = goes_on(terminal, server)
        assert not any(message.get("tool_calls") for message in body["messages"])
        assert "touch" not in str(body["messages"])
        assert not (terminal.ws / "PWN").exists()


@pytest.mark.case("ABT-04")
def test_ctrl_c_in_bash(tmp_path: Path) -> None:
    with (
        serve(command(f"echo partial; {SLEEP}"), FINE) as server,
        Terminal(tmp_path, server, "-y") as terminal,
    ):
        terminal.enter("hello")
        terminal.expect("partial\x1b")  # what it has written is on the screen while it goes on
        terminal.until(lambda: terminal.running(SLEEP))
        terminal.ctrl_c()
        with promptly():
            assert "stopped by you" in terminal.prompt()
        assert not terminal.running(SLEEP)
        [result] = results(goes_on(terminal, server))
        assert "partial" in result and "aborted by the user" in result


@pytest.mark.case("ABT-05")
def test_ctrl_c_in_the_second_of_three_calls(tmp_path: Path) -> None:
    calls = [("bash", {"command": line}) for line in ("echo first", SLEEP, "touch PWN")]
    with serve(Reply(calls=calls), FINE) as server, Terminal(tmp_path, server, "-y") as terminal:
        terminal.enter("hello")
        terminal.until(lambda: terminal.running(SLEEP))
        terminal.ctrl_c()
        with promptly():
            terminal.prompt()
        first, second, third = results(goes_on(terminal, server))
        assert first == "first" and "aborted by the user" in second and "Not run" in third
        assert not (terminal.ws / "PWN").exists()


@pytest.mark.case("ABT-07")
def test_ctrl_c_during_a_wait_for_the_next_attempt(tmp_path: Path) -> None:
    busy = Reply("busy", status=429, headers={"Retry-After": "60"})
    with serve(busy, FINE) as server, Terminal(tmp_path, server) as terminal:
        terminal.enter("hello")
        terminal.expect("Attempt 2 in 60 s")
        terminal.ctrl_c()
        with promptly():
            assert "stopped by you" in terminal.prompt()
        goes_on(terminal, server)
        assert len(server.requests) == 2


@pytest.mark.case("ABT-09")
def test_ctrl_c_at_the_question_runs_nothing(tmp_path: Path) -> None:
    with serve(command("touch PWN"), FINE) as server, Terminal(tmp_path, server) as terminal:
        terminal.enter("hello")
        terminal.expect("or why not: ")
        terminal.ctrl_c()
        with promptly():
            assert "stopped by you" in terminal.prompt()
        terminal.type("seen")
        terminal.expect("seen")  # the echo is on
        terminal.ctrl_c()
        terminal.prompt()
        assert len(results(goes_on(terminal, server))) == 1
        assert not (terminal.ws / "PWN").exists()


def test_ctrl_c_at_the_question_with_half_an_answer_typed(tmp_path: Path) -> None:
    with serve(command("touch PWN"), FINE) as server, Terminal(tmp_path, server) as terminal:
        terminal.enter("hello")
        terminal.expect("or why not: ")
        terminal.type("y")
        terminal.expect("y")
        terminal.ctrl_c()
        with promptly():
            assert "stopped by you" in terminal.prompt()
        goes_on(terminal, server)
        assert not (terminal.ws / "PWN").exists()


@pytest.mark.case("ABT-10")
def test_ctrl_c_twice_ends_the_program_while_a_command_ignores_it(tmp_path: Path) -> None:
    stubborn = "trap 'touch asked' TERM; while :; do sleep 0.01; done"
    with serve(command(stubborn)) as server, Terminal(tmp_path, server, "-y") as terminal:
        terminal.enter("hello")
        terminal.until(lambda: terminal.running("sleep 0.01"))
        with promptly():
            terminal.ctrl_c()
            terminal.until((terminal.ws / "asked").exists)
            terminal.ctrl_c()
            assert terminal.exit_code() == 130


@pytest.mark.case("ABT-10")
def test_ctrl_c_twice_ends_the_program_also_when_the_first_has_stopped_the_run(
    tmp_path: Path,
) -> None:
    with serve(command(SLEEP)) as server, Terminal(tmp_path, server, "-y") as terminal:
        terminal.enter("hello")
        terminal.until(lambda: terminal.running(SLEEP))
        with promptly():
            terminal.ctrl_c()
            terminal.prompt()
            terminal.ready()
            terminal.ctrl_c()
            assert terminal.exit_code() == 130


@pytest.mark.case("ABT-11")
def test_ctrl_c_at_an_empty_prompt_says_what_a_second_does(tmp_path: Path) -> None:
    with serve(FINE) as server, Terminal(tmp_path, server) as terminal:
        terminal.ctrl_c()
        assert "Ctrl+C again leaves" in terminal.prompt()
        terminal.ready()
        terminal.ctrl_c()
        with promptly():
            assert terminal.exit_code() == 130


@pytest.mark.case("ABT-11")
def test_ctrl_d_at_an_empty_prompt_leaves_well(tmp_path: Path) -> None:
    with serve(FINE) as server, Terminal(tmp_path, server) as terminal, promptly():
        assert terminal.leave() == 0


def test_ctrl_c_with_text_at_the_prompt_clears_it(tmp_path: Path) -> None:
    with serve(FINE) as server, Terminal(tmp_path, server) as terminal:
        terminal.type("nonsense")
        terminal.expect("nonsense")
        terminal.ctrl_c()
        assert "again leaves" not in terminal.prompt()
        terminal.type('"""half')
        terminal.enter("")
        terminal.expect(". ")
        terminal.ctrl_c()
        terminal.prompt()
        assert len(goes_on(terminal, server)["messages"]) == 2  # the system's and ours


@pytest.mark.parametrize("delay", [0.03, 0.1, 0.2, 0.3])
def test_ctrl_c_right_after_the_first_entry_comes_back_to_the_prompt(
    tmp_path: Path, delay: float
) -> None:
    release = threading.Event()
    with ScriptedServer(held(release)) as server, Terminal(tmp_path, server) as terminal:
        terminal.enter("hello")
        terminal.expect("hello\r\n")
        time.sleep(delay)  # whatever goes on then
        terminal.child.sendintr()
        with promptly():
            # a ^C that is not shown ends no line
            terminal.child.expect(PROMPT.replace(r"\r\n", r"\r\n?", 1))
        release.set()
        goes_on(terminal, server)


def test_ctrl_c_stops_a_command_of_the_persons_own(tmp_path: Path) -> None:
    with serve(FINE) as server, Terminal(tmp_path, server) as terminal:
        terminal.enter(f"!{SLEEP}")
        terminal.until(lambda: terminal.running(SLEEP))
        terminal.ctrl_c()
        with promptly():
            terminal.prompt()
        assert not terminal.running(SLEEP)
        goes_on(terminal, server)


def test_every_run_of_a_session_can_be_stopped(tmp_path: Path) -> None:
    """Not only the first: the connection that is shut is always the one in use."""
    half = Reply("alpha beta gamma", cut=3, close="hang")
    with (
        serve(half, FINE, half, FINE, half, FINE) as server,
        Terminal(tmp_path, server) as terminal,
    ):
        for _ in range(3):
            terminal.enter("hello")
            terminal.expect("alpha")
            terminal.ctrl_c()
            with promptly():
                assert "stopped by you" in terminal.prompt()
            goes_on(terminal, server)


# ---- signals, a terminal that goes away, one-shot --------------------------------------------------------


@pytest.mark.case("ABT-12")
def test_sigterm_during_a_command_ends_all_of_it(tmp_path: Path) -> None:
    with (
        serve(command(f"setsid sleep 301 & {SLEEP}")) as server,
        Terminal(tmp_path, server, "-y") as terminal,
    ):
        terminal.enter("hello")
        terminal.until(lambda: terminal.running(SLEEP) and terminal.running("sleep 301"))
        terminal.kill(signal.SIGTERM)
        with promptly():
            assert terminal.exit_code() == 143


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_at_the_prompt_ends_in_order(tmp_path: Path, number: signal.Signals) -> None:
    with serve(FINE) as server, Terminal(tmp_path, server) as terminal:
        terminal.say("hello")
        terminal.ready()
        terminal.kill(number)
        with promptly():
            assert terminal.exit_code() == 128 + number
        assert "hello" in (terminal.home / ".data" / "coder" / "history").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_as_soon_as_the_prompt_is_there(tmp_path: Path, number: signal.Signals) -> None:
    with serve(FINE) as server:
        terminal = Terminal(tmp_path, server)
        try:
            terminal.prompt()
            os.kill(terminal.child.pid, number)
            with promptly():
                terminal.child.expect(
                    PROMPT if number == signal.SIGINT else pexpect.EOF, timeout=PROMPTLY
                )
        finally:
            terminal.stop()
            terminal.child.close(force=True)


def test_sigterm_in_the_middle_of_text(tmp_path: Path) -> None:
    with (
        serve(Reply("alpha beta gamma", cut=3, close="hang")) as server,
        Terminal(tmp_path, server) as terminal,
    ):
        terminal.enter("hello")
        terminal.expect("alpha")
        terminal.kill(signal.SIGTERM)
        with promptly():
            assert terminal.exit_code() == 143


@pytest.mark.case("ABT-13")
def test_a_closed_terminal_ends_the_program_and_its_commands(tmp_path: Path) -> None:
    with (
        serve(command(f"setsid sleep 301 & {SLEEP}")) as server,
        Terminal(tmp_path, server, "-y") as terminal,
    ):
        terminal.enter("hello")
        terminal.until(lambda: terminal.running(SLEEP) and terminal.running("sleep 301"))
        with promptly():
            terminal.hang_up()
            until(lambda: not processes(terminal.mark))


def test_a_closed_terminal_ends_the_program_at_the_prompt(tmp_path: Path) -> None:
    with serve(FINE) as server, Terminal(tmp_path, server) as terminal:
        terminal.say("hello")
        with promptly():
            terminal.hang_up()
            until(lambda: not processes(terminal.mark))


@pytest.mark.case("ABT-14")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_to_a_one_shot_run_in_bash(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with (
        serve(command(f"setsid sleep 301 & echo partial; {SLEEP}")) as server,
        OneShot(tmp_path, server, "-y", "hello") as run,
    ):
        until(lambda: run.running(SLEEP) and run.running("sleep 301"))
        run.kill(number)
        with promptly():
            assert run.end() == code
        assert run.out == ""


@pytest.mark.parametrize("output_format", ["text", "json"])
@pytest.mark.parametrize(
    ("number", "code", "by"),
    [
        (signal.SIGINT, 130, "you"),
        (signal.SIGTERM, 143, "SIGTERM"),
        (signal.SIGHUP, 129, "SIGHUP"),
    ],
)
def test_the_last_line_of_a_one_shot_run_names_what_stopped_it(
    tmp_path: Path, output_format: str, number: signal.Signals, code: int, by: str
) -> None:
    with (
        serve(Reply("alpha beta gamma", cut=2, close="hang")) as server,
        OneShot(tmp_path, server, "--output-format", output_format, "hello") as run,
    ):
        until(lambda: server.requests)
        run.kill(number)
        with promptly():
            assert run.end() == code
        assert run.err.splitlines()[-1].startswith(f"stopped by {by}")
        assert run.err.count("stopped by") == 1


def test_sigint_to_a_one_shot_run_that_waits_for_headers(tmp_path: Path) -> None:
    release = threading.Event()
    with ScriptedServer(held(release)) as server, OneShot(tmp_path, server, "hello") as run:
        until(lambda: server.requests)
        run.kill(signal.SIGINT)
        with promptly():
            assert run.end() == 130
        release.set()


def test_sigint_to_a_one_shot_run_in_the_middle_of_text(tmp_path: Path) -> None:
    with serve(Reply("alpha beta gamma", cut=3, close="hang")) as server:
        with OneShot(tmp_path, server, "--output-format", "stream-json", "hello") as run:
            assert run.child.stdout
            for line in run.child.stdout:
                if b"beta" in line:
                    break
            run.kill(signal.SIGINT)
            with promptly():
                assert run.end() == 130
            assert '"stop_reason": "aborted"' in run.out.splitlines()[-1]
        assert server.gone == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_that_does_not_wake_the_read_is_seen_all_the_same(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """As one that comes between Python's look for signals and the read that blocks. Here another thread of the process gets it."""
    add_plugin(
        tmp_path,
        "deaf.py",
        "import signal\ndef setup(api): api.subscribe(told)\n"
        f"def told(event): signal.pthread_sigmask(signal.SIG_BLOCK, {{{number}}})\n",
    )
    with (
        serve(Reply("alpha beta gamma", cut=3, close="hang")) as server,
        OneShot(tmp_path, server, "--output-format", "stream-json", "hello") as run,
    ):
        assert run.child.stdout
        for line in run.child.stdout:
            if b"beta" in line:
                break
        run.kill(number)
        with promptly():
            assert run.end() == code


def test_two_sigints_to_a_one_shot_run(tmp_path: Path) -> None:
    stubborn = "trap 'touch asked' TERM; while :; do sleep 0.01; done"
    with serve(command(stubborn)) as server, OneShot(tmp_path, server, "-y", "hello") as run:
        until(lambda: run.running("sleep 0.01"))
        with promptly():
            run.kill(signal.SIGINT)
            until((run.ws / "asked").exists)
            run.kill(signal.SIGINT)
            assert run.end() == 130


# ---- the library: a token that another thread sets -------------------------------------------------------


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Children are known by it, and none may be left."""
    value = os.urandom(8).hex()
    monkeypatch.setenv(MARK, value)
    yield value
    gone(value)


def stopped(
    server: ScriptedServer,
    when: Callable[[], Any],
    tools: Any = (),
    each: Callable[[Event], None] | None = None,
    **options: Any,
) -> tuple[list[Event], list[Message]]:
    """A run in this thread whose token another thread sets when a condition holds: it has to end within two seconds of it.

    Returns the events, and the history, which is in order.
    """
    abort, over, messages, set_at = Abort(), threading.Event(), list[Message](), list[float]()

    def set_it() -> None:
        until(lambda: when() or over.is_set())
        set_at.append(time.monotonic())
        abort.set()

    thread = threading.Thread(target=set_it)
    thread.start()
    try:
        events, result = ask(
            server, tools=tools, messages=messages, each=each, abort=abort, **options
        )
        ended = time.monotonic()
    finally:
        over.set()
        thread.join()
    assert set_at and ended - set_at[0] < 2
    assert result.stop_reason == "aborted" and isinstance(events[-1], RunEnd)
    assert_valid(
        {
            "messages": [
                message
                for message in convert_to_llm(messages)
                if message.get("content") or message.get("tool_calls")
            ]
        }
    )
    assert_all_valid(server)
    return events, messages


def test_an_abort_while_the_server_sends_no_headers(mark: str) -> None:
    release = threading.Event()
    with ScriptedServer(held(release)) as server:
        stopped(server, lambda: server.requests)
        release.set()
        until(lambda: server.gone == 1)


def test_an_abort_of_a_stalled_stream(mark: str) -> None:
    came = threading.Event()
    with serve(Reply("alpha beta gamma", cut=3, close="hang")) as server:
        _, messages = stopped(
            server,
            came.is_set,
            each=lambda event: came.set() if isinstance(event, TextDelta) else None,
        )
        until(lambda: server.gone == 1)
        assert messages[-1]["role"] == "assistant" and messages[-1]["meta"]["aborted"]


def test_an_abort_in_bash(mark: str, tmp_path: Path) -> None:
    with serve(command(f"echo partial; {SLEEP}")) as server:
        _, messages = stopped(server, lambda: running(mark, SLEEP), Toolset([bash], cwd=tmp_path))
    assert messages[-1]["content"] == "partial\n[aborted by the user]"


def test_an_abort_during_a_wait_for_the_next_attempt(mark: str) -> None:
    waiting = threading.Event()
    with serve(Reply("busy", status=503)) as server:
        stopped(
            server,
            waiting.is_set,
            each=lambda event: waiting.set() if isinstance(event, Retry) else None,
            retry=RetryPolicy(base=60),
        )
        assert len(server.requests) == 1


def test_an_abort_in_grep(mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ws, program = tmp_path / "ws", tmp_path / "rg"
    ws.mkdir()
    program.write_text("#!/bin/sh\nexec /bin/sleep 300\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    with serve(Reply(calls=[("grep", {"pattern": "x"})])) as server:
        _, messages = stopped(server, lambda: running(mark, "/bin/sleep"), Toolset([grep], cwd=ws))
    assert "aborted by the user" in messages[-1]["content"]


def test_an_abort_between_two_calls(mark: str, tmp_path: Path) -> None:
    abort, messages = Abort(), list[Message]()
    with serve(
        Reply(
            calls=[("bash", {"command": line}) for line in ("echo first", "touch PWN", "touch PWN")]
        )
    ) as server:
        _, result = ask(
            server,
            tools=Toolset([bash], cwd=tmp_path),
            messages=messages,
            abort=abort,
            each=lambda event: abort.set() if isinstance(event, ToolEnd) else None,
        )
    assert result.stop_reason == "aborted"
    assert [message["content"] for message in messages[-3:]] == [
        "first",
        *["Not run: aborted by the user."] * 2,
    ]
    assert not (tmp_path / "PWN").exists()


def test_an_abort_before_the_run_asks_nobody(mark: str) -> None:
    abort = Abort()
    abort.set()
    with serve(FINE) as server:
        _, result = ask(server, abort=abort)
        assert result.stop_reason == "aborted" and not server.requests


def test_an_abort_while_a_command_writes_without_end(mark: str, tmp_path: Path) -> None:
    with serve(command("yes")) as server:
        _, messages = stopped(server, lambda: running(mark, "yes"), Toolset([bash], cwd=tmp_path))
    assert "aborted by the user" in messages[-1]["content"]


class Deaf:
    """A server whose queue of connections is full: connecting to it hangs until `accept`."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=0)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/v1"
        self.sockets = [self.socket]
        for _ in range(4):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(self.socket.getsockname())
            self.sockets.append(one)

    def accept(self) -> None:
        """Take every connection, and answer none."""

        def take() -> None:
            with contextlib.suppress(OSError):
                while True:
                    self.sockets.append(self.socket.accept()[0])

        threading.Thread(target=take, daemon=True).start()

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        for one in self.sockets:
            one.close()


@pytest.mark.parametrize(
    "answers",
    [False, True],
    ids=["the server stays deaf", "the connection comes about after the abort"],
)
def test_an_abort_while_the_connection_is_made(answers: bool) -> None:
    server, abort, ended = Deaf(), Abort(), threading.Event()
    model = ChatModel("m", base_url=server.url)

    def run() -> None:
        drive(run_loop([], model, prompts="go", abort=abort, retry=FAST))
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        until(lambda: somebody_is_in("create_connection"))
        abort.set()
        if answers:
            server.accept()
        assert ended.wait(2)
    finally:
        server.close()
        thread.join()


def somebody_is_in(function: str) -> bool:
    """Is a thread inside a function of this name?"""
    return any(
        frame.f_code.co_name == function
        for newest in sys._current_frames().values()
        for frame, _ in traceback.walk_stack(newest)
    )


# ---- the library: interrupts, consumers that leave, clocks -----------------------------------------------


def test_a_keyboard_interrupt_in_a_tool_ends_the_run_in_order_and_then_climbs(mark: str) -> None:
    @tool
    def pressed() -> str:
        """Press Ctrl+C."""
        signal.raise_signal(signal.SIGINT)
        return "never"

    messages, events = list[Message](), list[Event]()
    with serve(Reply("So:", calls=[("pressed", {}), ("pressed", {})])) as server:
        run = run_loop(
            messages, ChatModel("m", base_url=server.url), [pressed], prompts="go", retry=FAST
        )
        with pytest.raises(KeyboardInterrupt):
            for event in run:
                events.append(event)
    assert isinstance(events[-1], RunEnd) and events[-1].stop_reason == "aborted"
    assert_valid({"messages": convert_to_llm(messages)})
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]


def consumed(
    server: ScriptedServer,
    messages: list[Message],
    until_event: Callable[[Event], bool],
    **options: Any,
) -> Any:
    """A run whose consumer has stopped at an event."""
    run = run_loop(
        messages, ChatModel("m", base_url=server.url), prompts="go", retry=FAST, **options
    )
    while not until_event(next(run)):
        pass
    return run


def test_a_consumer_that_leaves_in_the_middle_of_bash_leaves_nothing_behind(
    mark: str, tmp_path: Path
) -> None:
    messages: list[Message] = []
    calls = [
        ("bash", {"command": f"echo partial; setsid sleep 301 & {SLEEP}"}),
        ("bash", {"command": "touch PWN"}),
    ]
    with serve(Reply(calls=calls)) as server:
        run = consumed(
            server,
            messages,
            lambda event: isinstance(event, ToolUpdate),
            tools=Toolset([bash], cwd=tmp_path),
        )
        until(lambda: running(mark, SLEEP) and running(mark, "sleep 301"))
        with promptly():
            run.close()
    gone(mark)
    assert_valid({"messages": convert_to_llm(messages)})
    assert "partial" in messages[-2]["content"] and "Not run" in messages[-1]["content"]
    assert not (tmp_path / "PWN").exists()


def test_a_consumer_that_leaves_in_the_middle_of_text_closes_the_connection(mark: str) -> None:
    messages: list[Message] = []
    with serve(Reply("alpha beta gamma", cut=3, close="hang")) as server:
        run = consumed(server, messages, lambda event: isinstance(event, TextDelta))
        with promptly():
            run.close()
        until(lambda: server.gone == 1)
    assert messages[-1]["role"] == "assistant"
    assert_valid({"messages": convert_to_llm(messages)})


@pytest.mark.parametrize(
    "reply",
    [
        Reply("alpha beta gamma", cut=3, close="hang"),
        Reply(chunks=[], close="hang"),
        command(SLEEP),
    ],
    ids=["a stalled stream", "no stream", "a sleeping command"],
)
def test_the_time_limit_ends_what_does_not_end(mark: str, tmp_path: Path, reply: Reply) -> None:
    messages: list[Message] = []
    with serve(reply) as server, promptly(1 + PROMPTLY):
        _, result = ask(
            server,
            tools=Toolset([bash], cwd=tmp_path),
            messages=messages,
            limits=Limits(max_seconds=1),
        )
    assert result.stop_reason == "max_time"
    assert_valid({"messages": convert_to_llm(messages)})


def test_the_time_limit_ends_a_wait_for_the_next_attempt(mark: str) -> None:
    with serve(Reply("busy", status=503)) as server, promptly(1 + PROMPTLY):
        _, result = ask(server, retry=RetryPolicy(base=60), limits=Limits(max_seconds=1))
    assert result.stop_reason == "max_time"
