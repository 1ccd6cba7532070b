"""The times that are promised, measured.

    python tests/bench/promises.py        ten seconds; fails where one is missed by a factor of 5

Each figure is the median of some runs, without the round trip of the same kind of run that has
nothing to wait for: the machine's speed drifts. Where something has to wait (the retry, the grace
of a command), too little fails as well.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from coder.abort import Abort  # noqa: E402
from coder.ai import ChatModel  # noqa: E402
from coder.devtools.scripted import Reply, ScriptedServer  # noqa: E402
from coder.loop import run_loop  # noqa: E402
from coder.providers.errors import RetryPolicy  # noqa: E402
from coder.tools.bash import bash  # noqa: E402
from coder.toolset import Toolset  # noqa: E402
from coder.types import Limits  # noqa: E402
from tests.harness import drive  # noqa: E402
from tests.terminal import Terminal, until  # noqa: E402

FACTOR = 5
DEAF = "trap '' TERM INT; echo begun > begun; while :; do sleep 0.02; done"
WRITING = "(while :; do echo more; done) & sleep 0.2"
PLUGIN = """
import time
from pathlib import Path

def wait() -> str:
    "Look at no token."
    Path("begun").touch()
    time.sleep(60)

def hold() -> str:
    "Let nothing end."
    Path("begun").touch()
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass

def setup(api):
    api.add_tool(wait)
    api.add_tool(hold)
"""
ONCE = RetryPolicy(max_delay=-1.0)
DONE = b"data: [DONE]\n\n"
FINISHED = b'data: {"choices":[{"index":0,"delta":{"content":"Hi"},"finish_reason":"stop"}]}\n\n'
STALL = Reply("a b", cut=2, close="hang")
HELLO = Reply("Hello.")


@dataclass(frozen=True)
class Promise:
    """`seconds` at most, and as many at least if it `waits`; `source`: where it is promised."""

    name: str
    seconds: float
    source: str
    measure: Callable[[Path], list[float]]
    waits: bool = False

    def is_kept(self, took: float) -> bool:
        return took < self.seconds * FACTOR and not (self.waits and took < self.seconds / FACTOR)


# ---- in this process: a run of the library -------------------------------------------------------


def run_time(reply: Any, abort: Abort | None = None, **options: Any) -> float:
    """Seconds of a run whose model gives this answer."""
    retry = options.pop("retry", ONCE)
    tools = options.pop("tools", [])
    with ScriptedServer([reply]) as server:
        model = ChatModel("m", base_url=server.url, **options)
        began = time.monotonic()
        drive(
            run_loop(
                [],
                model,
                tools,
                prompt="go",
                retry=retry,
                abort=abort,
            )
        )
        return time.monotonic() - began


def beyond(measure: Callable[[], float], count: int = 3) -> list[float]:
    """What several runs take, side by side, without the round trip of one that answers at once."""
    usual = statistics.median(run_time(HELLO) for _ in range(count))
    return [max(0.0, took - usual) for took in side_by_side(measure, count)]


def side_by_side(measure: Callable[[], float], count: int = 3) -> list[float]:
    with ThreadPoolExecutor(count) as threads:
        return [each.result() for each in [threads.submit(measure) for _ in range(count)]]


def after_finish(folder: Path) -> list[float]:
    return beyond(lambda: run_time(Reply(chunks=[FINISHED], close="hang")))


def after_done(folder: Path) -> list[float]:
    return beyond(
        lambda: run_time(
            Reply(
                chunks=[FINISHED, DONE],
                close="hang",
            )
        )
    )


def first_byte(folder: Path) -> list[float]:
    return beyond(lambda: run_time(Reply("late", hold=30), first_byte_timeout=0.5))


def idle(folder: Path) -> list[float]:
    return beyond(lambda: run_time(STALL, idle_timeout=0.5))


def first_retry(folder: Path) -> list[float]:
    """Between the failure and the request after it, as the library has it by default."""

    def gap() -> float:
        with ScriptedServer([Reply("broken", status=500), HELLO]) as server:
            model = ChatModel("m", base_url=server.url)
            drive(run_loop([], model, prompt="go"))
            return server.times[1] - server.times[0]

    return beyond(gap)


def connect(folder: Path) -> list[float]:
    """To a machine that does not answer at all: a socket whose queue is full drops what comes."""
    with contextlib.ExitStack() as open_sockets:
        listening = open_sockets.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(4):
            filling = open_sockets.enter_context(socket.socket())
            filling.setblocking(False)
            filling.connect_ex(listening.getsockname())
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        limits = Limits(max_seconds=10 * FACTOR)
        abort = Abort()
        began = time.monotonic()
        model = ChatModel("m", base_url=url, first_byte_timeout=10 * FACTOR)
        drive(
            run_loop(
                [],
                model,
                prompt="go",
                retry=ONCE,
                limits=limits,
                abort=abort,
            )
        )
        return [time.monotonic() - began]


def aborted(folder: Path) -> list[float]:
    """From `Abort.set` in another thread to the end of a run whose server is silent."""

    def stopped() -> float:
        abort = Abort()
        times = list[float]()

        def stop() -> None:
            times.append(time.monotonic())
            abort.set()

        threading.Timer(0.3, stop).start()
        run_time(STALL, abort)
        return time.monotonic() - times[0]

    return side_by_side(stopped)


def grace(folder: Path) -> list[float]:
    """From the TERM to the KILL of a command that is deaf to it: from the end of its time to its
    result."""

    def ended() -> float:
        abort = Abort()
        place = Path(tempfile.mkdtemp(dir=folder))
        with ScriptedServer(
            [
                Reply(calls=[("bash", {"command": DEAF})]),
                HELLO,
            ]
        ) as server:
            run = run_loop(
                [],
                ChatModel("m", base_url=server.url),
                Toolset([bash], cwd=place),
                prompt="go",
                abort=abort,
            )
            with ThreadPoolExecutor(1) as thread:
                running = thread.submit(drive, run)
                until(lambda: (place / "begun").exists(), "the command")
                began = time.monotonic()
                abort.set()
                running.result()
                return time.monotonic() - began

    return side_by_side(ended)


def background(folder: Path) -> list[float]:
    """A child in the background writes on and on."""
    usual = [command_time(folder, "sleep 0.2") for _ in range(3)]
    held = [command_time(folder, WRITING) for _ in range(3)]
    return [max(0.0, each - statistics.median(usual)) for each in held]


def command_time(folder: Path, line: str) -> float:
    with ScriptedServer(
        [
            Reply(calls=[("bash", {"command": line})]),
            HELLO,
        ]
    ) as server:
        model = ChatModel("m", base_url=server.url)
        tools = Toolset([bash], cwd=folder)
        drive(run_loop([], model, tools, prompt="go"))
        return server.times[1] - server.sent[0]


# ---- the program ---------------------------------------------------------------------------------


@contextlib.contextmanager
def program(folder: Path, server: ScriptedServer, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """One task, as a child, with PLUGIN's tools."""
    plugins = folder / ".config" / "coder" / "plugins"
    plugins.mkdir(parents=True)
    (plugins / "tools.py").write_text(PLUGIN)
    env = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")} | {
        "OPENAI_BASE_URL": server.url,
        "OPENAI_MODEL": "m",
        "HOME": str(folder),
        "PYTHONPATH": str(ROOT),
    }
    argv = [sys.executable, "-m", "coder", "-y", "-q", *more, "go"]
    null = subprocess.DEVNULL
    with subprocess.Popen(
        argv,
        cwd=folder,
        env=env,
        stdin=null,
        stdout=null,
        stderr=null,
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def exit_time(folder: Path, reply: Reply, *signals: int) -> float:
    """Seconds from the last of these signals, 0.1 s apart, to the end of the program."""
    place = Path(tempfile.mkdtemp(dir=folder))
    with (
        ScriptedServer([reply, HELLO]) as server,
        program(place, server) as child,
    ):
        until(
            lambda: (place / "begun").exists() or (server.requests and not reply.calls), "the run"
        )
        time.sleep(0.3)  # what comes has to be waited for in silence
        for number in signals:
            time.sleep(0.1)
            child.send_signal(number)
        began = time.monotonic()
        child.wait(60)
        return time.monotonic() - began


def exits(reply: Reply, *signals: int) -> Callable[[Path], list[float]]:
    return lambda folder: side_by_side(lambda: exit_time(folder, reply, *signals))


def prompt_time(folder: Path) -> list[float]:
    """From Ctrl+C in a session to the next prompt, without the round trip of an answer."""
    with (
        ScriptedServer(
            lambda body: STALL if "stall" in str(body["messages"][-1]) else HELLO
        ) as server,
        Terminal(Path(tempfile.mkdtemp(dir=folder)), server) as terminal,
    ):
        usual = [timed(lambda: terminal.say("hello")) for _ in range(3)]
        return [
            max(
                0.0,
                interrupted(terminal) - statistics.median(usual),
            )
            for _ in range(3)
        ]


def interrupted(terminal: Terminal) -> float:
    asked = len(terminal.server.requests)
    terminal.enter("stall")
    terminal.until(lambda: len(terminal.server.requests) > asked, "the request")
    terminal.expect("a")
    terminal.settled()

    def press() -> None:
        terminal.child.sendintr()
        terminal.prompt()

    return timed(press)


def timed(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


# ---- all of them ---------------------------------------------------------------------------------

COMMAND = Reply(calls=[("bash", {"command": DEAF})])
CODE = Reply(calls=[("wait", {})])
HOLDING = Reply(calls=[("hold", {})])
INT = signal.SIGINT
TERM = signal.SIGTERM
PROMISES = (
    Promise("Ctrl+C in a session, to the prompt", 1.0, "README", prompt_time),
    Promise("Ctrl+C in an answer that stalls", 1.0, "README", exits(STALL, INT)),
    Promise("Ctrl+C in a command deaf to TERM", 1.0, "README", exits(COMMAND, INT)),
    Promise("Ctrl+C in code that does not look", 1.0, "README", exits(CODE, INT)),
    Promise("Ctrl+C twice", 2.0, "cli/process.py", exits(COMMAND, INT, INT)),
    Promise("SIGTERM in a command deaf to it", 2.0, "cli/process.py", exits(COMMAND, TERM)),
    Promise("SIGTERM in code that lets nothing end", 2.0, "cli/process.py", exits(HOLDING, TERM)),
    Promise("an abort in another thread", 0.5, "abort.py", aborted),
    Promise("from TERM to KILL", 0.5, "tools/bash.py", grace, waits=True),
    Promise("output that does not end", 0.2, "tools/bash.py", background),
    Promise("a finish without an end mark", 3.0, "providers/sse.py", after_finish, waits=True),
    Promise("an end mark without an end", 0.25, "providers/sse.py", after_done),
    Promise("first byte (of 0.5 s)", 0.5, "docs/servers.md", first_byte, waits=True),
    Promise("silence in an answer (of 0.5 s)", 0.5, "docs/servers.md", idle, waits=True),
    Promise("the first retry", 2.0, "docs/servers.md", first_retry, waits=True),
    Promise("a connection", 10.0, "providers/connection.py", connect, waits=True),
)


def main() -> int:
    """Measure all, those of the program next to those that mostly wait; returns the exit code."""
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(3) as lanes:
        folder = Path(name)
        futures = {each: lanes.submit(each.measure, folder) for each in reversed(PROMISES)}
        took = {each: futures[each].result() for each in PROMISES}
    broken = 0
    for each, values in took.items():
        middle = statistics.median(values)
        is_kept = each.is_kept(middle)
        broken += not is_kept
        extent = f"({min(values):.2f} to {max(values):.2f})"
        end = "" if is_kept else "   not kept!"
        print(
            f"{each.name:<38} {middle:6.2f} s of {each.seconds:5.2f}   {extent}   {each.source}{end}"
        )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
