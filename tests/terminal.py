"""The program in a real pseudo-terminal, or as a child with pipes, and the checks that hold after
every test of it.

The checks, which hold whatever a session did: every request that was made is valid; no process of
the session is left; the terminal is as it was; no file was made outside the workspace and the home,
and nothing was left in the folder for temporary files; the key is in no file and in no byte of
output; no traceback. A process of a session is known by a variable in its environment, which all
its children inherit.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import termios
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pexpect
import pyte

from coder.devtools.scripted import ScriptedServer
from tests.harness import assert_all_valid

ROOT = Path(__file__).parents[1]
MARK = "CODER_TEST_MARK"
PATIENCE = 60  # seconds after which something that has to come is given up
PROMPTLY = 20.0  # seconds: what a fault holds up takes 30 and more, what works takes a tenth; a busy machine does nothing for some
# Behind a run: the title of the window. Readline asks for marked pastes directly before a prompt,
# not before an echoed entry
PROMPT = (
    r"\r\n(?:\x1b\][^\x07]*\x07|\x1b\[\?2004[hl]\r?|\r\n)*"
    r"\x1b\[\?2004h(?:(?:[\w-]+ )*> |\x1b\[1m(?:(?:\x1b\[\d+m)*[\w-]+(?:\x1b\[\d+m)* )*❯ \x1b\[0m)"
)
# The second: the title of the window
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b\][^\x07]*\x07")
QUESTION = "why not: "
PLANNED = "what to change: "  # the end of the question after a plan
MARKED = "\x1b[?2004h"
UNMARKED = "\x1b[?2004l"


def until(holds: Callable[[], Any], what: str = "", seconds: float = PATIENCE) -> None:
    """Wait for a condition; fail if it does not come."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"it did not come: {what}"
        time.sleep(0.01)


def bare(text: str) -> str:
    """Without what drives the terminal."""
    return ESCAPES.sub("", text)


def rendered(output: str, columns: int = 80, lines: int = 24) -> list[str]:
    """The rows of a terminal of this size that got this output."""
    screen = pyte.Screen(columns, lines)
    pyte.Stream(screen).feed(output)
    return [row.rstrip() for row in screen.display]


@contextlib.contextmanager
def promptly(seconds: float = PROMPTLY) -> Iterator[None]:
    """What is inside has to be over soon."""
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    assert took < seconds, f"it took {took:.1f} s"


def add_plugin(folder: Path, name: str, code: str) -> None:
    """A plugin of the user's, for the sessions whose place is `folder`."""
    plugins = folder / "home" / ".config" / "coder" / "plugins"
    plugins.mkdir(parents=True, exist_ok=True)
    (plugins / name).write_text(code)


def waits(number: int) -> bool:
    """Is this process asleep?"""
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def processes(mark: str) -> dict[int, str]:
    """The command lines of the living processes that carry a mark, by process id; a zombie is none
    of them."""
    found = {}
    for name in os.listdir("/proc"):  # a Path for each would take three times as long
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if mark.encode() in read_of_process(name, "environ"):
                line = read_of_process(name, "cmdline").replace(b"\0", b" ")
                found[int(name)] = line.decode("utf-8", "replace").strip()
    return found


def read_of_process(name: str, file: str) -> bytes:
    with open(f"/proc/{name}/{file}", "rb", buffering=0) as opened:
        return opened.read()


def running(mark: str, command: str) -> list[int]:
    """Those whose command line begins with `command`."""
    return [number for number, line in processes(mark).items() if line.startswith(command)]


def gone(mark: str, seconds: float = PROMPTLY) -> None:
    """No process carries the mark; one that has been killed may take a moment to go."""
    try:
        until(lambda: not processes(mark), "all processes gone", seconds)
    finally:
        left = processes(mark)
        for number in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        assert not left, f"still alive: {left}"


class Place:
    """A workspace, a home and a folder for temporary files, and the environment of a session in
    them."""

    child: Any = None

    def __init__(self, folder: Path, server: ScriptedServer, **more: str) -> None:
        self.server = server
        self.ws = folder / "ws"
        self.home = folder / "home"
        self.temp = folder / "temp"
        for each in (self.ws, self.home, self.temp):
            each.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.around = self.outside("*")  # with what was left by a process that had the same number
        self.mark = os.urandom(8).hex()
        self.key = f"sk-CANARY-{os.urandom(8).hex()}"
        config = {
            f"XDG_{name}_HOME": str(self.home / f".{name.lower()}")
            for name in ("CONFIG", "DATA", "CACHE", "STATE")
        }
        self.environment = (
            {
                "PATH": os.environ["PATH"],
                "HOME": str(self.home),
                "TMPDIR": str(self.temp),
                "TERM": "xterm-256color",
                "LANG": "C.UTF-8",
                "PYTHONPATH": str(ROOT),
                MARK: self.mark,
                "OPENAI_BASE_URL": server.url,
                "OPENAI_API_KEY": self.key,
                "OPENAI_MODEL": "script",
                "CODER_RETRY_BASE": "0.01",
                "CODER_TITLES": "off",
            }
            | config
            | more
        )

    def running(self, command: str) -> list[int]:
        return running(self.mark, command)

    def shell(self, line: str) -> subprocess.CompletedProcess[str]:
        """Run a line of bash with {coder} in it, and check."""
        argv = ["bash", "-c", line.format(coder=f"{sys.executable} -m coder")]
        options: dict[str, Any] = {
            "cwd": self.ws,
            "env": self.environment,
            "encoding": "utf-8",
        }
        options |= {"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": PATIENCE}
        done = subprocess.run(argv, **options)
        self.check(done.stdout + done.stderr)
        return done

    def stop(self) -> None:
        """End what a failed test has left."""
        for number in processes(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)

    def outside(self, process: int | str) -> set[Path]:
        """What lies next to the workspace and the home, and what this process left where the system
        keeps temporary files."""
        found = set(Path("/tmp").glob(f"coder-{process}-*"))
        for entry in self.folder.iterdir():
            if entry not in (self.ws, self.home, self.temp):
                found |= {entry, *entry.rglob("*")}
        return found

    def check(self, output: str) -> None:
        """What holds after every session."""
        assert "Traceback" not in output, output
        assert "Exception ignored" not in output, output
        assert self.key not in output
        gone(self.mark)
        assert_all_valid(self.server)
        assert not list(self.temp.iterdir()), "left in the folder for temporary files"
        made = self.outside(self.child.pid if self.child else "none") - self.around
        assert not made, f"made outside: {made}"
        for path in (path for root in (self.ws, self.home) for path in root.rglob("*")):
            assert not path.is_file() or self.key.encode() not in path.read_bytes(), path


def untouched() -> list[Any]:
    """The attributes of a terminal that nobody has used."""
    master, slave = os.openpty()
    try:
        return termios.tcgetattr(slave)
    finally:
        os.close(master)
        os.close(slave)


class Terminal(Place):
    """The program in a terminal. A context manager: it leaves with Ctrl+D, if the test has not, and
    checks."""

    columns = 80
    lines = 24
    pattern = PROMPT

    def __init__(self, folder: Path, server: ScriptedServer, *arguments: str, **more: str) -> None:
        super().__init__(folder, server, **more)
        self.log = io.StringIO()
        self.attributes: list[Any] = []
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # a fork next to the server's thread
            self.spawn(sys.executable, ["-m", "coder", *arguments], self.environment)

    def spawn(self, program: str, arguments: list[str], environment: dict[str, str]) -> None:
        """Start a program at the terminal, in the workspace."""
        self.child = pexpect.spawn(
            program,
            arguments,
            cwd=str(self.ws),
            env=environment,  # type: ignore[arg-type]
            dimensions=(self.lines, self.columns),
            encoding="utf-8",
            codec_errors="replace",
            timeout=PATIENCE,
        )
        self.child.logfile_read = self.log
        self.child.delaybeforesend = None

    def __enter__(self) -> Terminal:
        self.prompt()
        self.ready()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                if not self.child.closed and self.child.isalive():
                    assert self.leave() == 0
                elif not self.child.closed and not self.attributes:
                    self.exit_code()
                self.check(self.output)
                assert self.child.closed or self.attributes == untouched(), (
                    "the modes of the terminal"
                )
        finally:
            self.stop()
            self.child.close(force=True)
            self.child.ptyproc.wait()

    @property
    def output(self) -> str:
        """All that came to the screen so far."""
        return self.log.getvalue()

    # -- keys

    def type(self, text: str) -> None:
        self.child.send(text)

    def enter(self, text: str) -> None:
        self.child.send(f"{text}\r")

    def paste(self, text: str, *, marks: bool = True) -> None:
        """As a terminal does it: a newline is sent as Enter; with marks around all of it where the
        program has asked for them, and the terminal knows them."""
        self.settled()
        keys = text.replace("\n", "\r")
        asked = self.output.rfind(MARKED) > self.output.rfind(UNMARKED)
        self.type(f"\x1b[200~{keys}\x1b[201~" if asked and marks else keys)

    def ctrl_c(self) -> None:
        self.settled()
        self.child.sendintr()

    def ctrl_d(self) -> None:
        self.settled()  # between a prompt and readline's own mode of the terminal the system would take the key
        self.child.sendeof()

    # -- what comes

    def expect(self, text: str) -> str:
        """Wait for a text; returns what came before it."""
        self.child.expect_exact(text)
        return str(self.child.before)

    def prompt(self) -> str:
        self.child.expect(self.pattern)
        return str(self.child.before)

    def ready(self) -> None:
        """Wait until the prompt takes keys, which is a little after it has been drawn: type one,
        and take it back."""
        self.type("~")
        self.expect("~")
        self.type("\x7f")
        self.expect("\b")

    def settled(self) -> None:
        """Wait until the program waits. What it draws can be seen before it looks at its keys."""
        until(lambda: waits(self.child.pid), "the program waits")

    def until(self, holds: Callable[[], Any], what: str = "") -> None:
        """Wait for a condition while the screen is read, so that the program is not held up."""

        def read_and_ask() -> Any:
            self.child.expect([pexpect.TIMEOUT, pexpect.EOF], timeout=0.01)
            return holds()

        try:
            until(read_and_ask, what)
        except AssertionError as error:
            error.add_note(f"the end of the screen: {self.output[-1000:]!r}")
            raise

    def say(self, text: str) -> str:
        """Enter a text and wait for the next prompt; returns what the screen showed."""
        self.enter(text)
        return self.prompt()

    def not_now(self) -> str:
        """Wait for the question after a plan, and leave it open; returns what the screen
        showed."""
        shown = self.expect(PLANNED)
        self.settled()
        self.type("\r")
        self.prompt()
        return shown

    # -- the end

    def kill(self, number: signal.Signals) -> None:
        self.settled()
        os.kill(self.child.pid, number)

    def hang_up(self) -> None:
        """Close the terminal, as a window that is closed does."""
        self.child.ptyproc.fileobj.close()
        self.child.closed = self.child.ptyproc.closed = True

    def exit_code(self) -> int:
        """Wait for the end; a signal comes out as its negative number."""
        self.child.expect(pexpect.EOF)
        self.attributes = termios.tcgetattr(self.child.child_fd)
        self.child.wait()
        return int(
            self.child.exitstatus if self.child.exitstatus is not None else -self.child.signalstatus
        )

    def leave(self) -> int:
        self.ctrl_d()
        return self.exit_code()


class Run(Terminal):
    """Without waiting for a prompt: one task, or what comes before the first prompt."""

    def __enter__(self) -> Run:
        return self


class OneShot(Place):
    """The program with pipes in the place of a terminal. A context manager, as above."""

    def __init__(self, folder: Path, server: ScriptedServer, *arguments: str, **more: str) -> None:
        super().__init__(folder, server, **more)
        self.child = subprocess.Popen(
            [sys.executable, "-m", "coder", *arguments],
            cwd=self.ws,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.out = self.err = ""

    def __enter__(self) -> OneShot:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self.end()
                self.check(self.out + self.err)
        finally:
            self.stop()
            self.child.communicate()

    def kill(self, number: signal.Signals) -> None:
        self.child.send_signal(number)

    def end(self) -> int:
        """Wait for it; returns the exit code."""
        if self.child.returncode is None:
            out, err = self.child.communicate(timeout=PATIENCE)
            self.out = out.decode("utf-8")
            self.err = err.decode("utf-8")
        return self.child.returncode
