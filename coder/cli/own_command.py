"""The user's own commands at the prompt: they have the terminal, as in a shell, and no question is asked.

`run_relayed` gives a command a pseudo-terminal and passes keys and output on, so that the output can be kept;
`run_directly` gives it our terminal. Ctrl+C goes to the command in both.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import re
import selectors
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from coder.abort import TICK
from coder.cli.input import text_of_keys
from coder.cli.signals import handling
from coder.cli.terminal_modes import LFLAG, raw, tty_flags
from coder.permissions.sanitize import strip_controls
from coder.tools.bash import Output, shell
from coder.tools.process import DRAIN, QUIET, READ, environment

# An editor, a pager
FULL_SCREEN = re.compile(r"\x1b\[\?(?:1049|1047|47)h.*?(?:\x1b\[\?(?:1049|1047|47)l|$)", re.S)


def run_directly(command: str, cwd: Path) -> int:
    """Run it on our terminal; its exit code. Raises OSError, ToolError."""
    with _signals_ignored(), tty_flags():
        return subprocess.run(
            [shell(), "-c", command], cwd=cwd, env=_environment(), check=False
        ).returncode


def run_relayed(command: str, cwd: Path, redact: Callable[[str], str]) -> tuple[str, int, str]:
    """Run it on a pseudo-terminal: (its output as text, its exit code, the keys that it did not read).

    What is shown goes through `redact`. Raises OSError, ToolError.
    """
    output, last = Output(), b""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    master, slave = os.openpty()

    def resize(*_: object) -> None:
        termios.tcsetwinsize(slave, termios.tcgetwinsize(sys.stdin.fileno()))

    with contextlib.ExitStack() as stack:
        stack.callback(output.close)
        stack.callback(os.close, master)
        stack.callback(os.close, slave)
        resize()
        stack.enter_context(handling(signal.SIGWINCH, resize))
        process = subprocess.Popen(
            [shell(), "-c", command],
            cwd=cwd,
            env=_environment(),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=partial(fcntl.ioctl, 0, termios.TIOCSCTTY, 0),
        )
        stack.callback(process.wait)
        stack.callback(process.kill)  # where it has not ended by itself
        with _signals_ignored(), raw():
            for data in _relay(process, master):
                _write(redact(decoder.decode(data)))
                output.add(data)
                last = data
            _write(redact(decoder.decode(b"", True)))
        text = re.sub(r"\r+(?=\n|$)", "", FULL_SCREEN.sub("", output.text()))
        text = strip_controls(re.sub(r"[^\n]*\r", "", text))  # a line that was written over
        sys.stdout.write("\n" if text and not last.endswith(b"\n") else "")
        return text, process.wait(), _unread_keys(slave)


def _relay(process: subprocess.Popen[bytes], master: int) -> Iterator[bytes]:
    """Pass our keys on, and yield the output until the process has ended."""
    keyboard, keys, ended = sys.stdin.fileno(), b"", 0.0
    os.set_blocking(master, False)  # a command that does not read holds up nothing
    with selectors.DefaultSelector() as watched:
        watched.register(keyboard, selectors.EVENT_READ)
        watched.register(master, selectors.EVENT_READ)
        while True:
            # Asked before looking: what it wrote is there by then
            over = process.poll() is not None
            ready = [key.fd for key, _ in watched.select(TICK)]
            if master in ready:
                yield os.read(master, READ)
            if keyboard in ready and not keys and not over:
                keys = os.read(keyboard, READ)
            if keys:
                with contextlib.suppress(BlockingIOError):
                    keys = keys[os.write(master, keys) :]
            if over:
                ended = ended or time.monotonic()
                if master not in ready or time.monotonic() - ended > DRAIN:
                    return


def _unread_keys(slave: int) -> str:
    """What was typed and is still there."""
    attributes = termios.tcgetattr(slave)
    attributes[LFLAG] &= ~termios.ICANON
    termios.tcsetattr(slave, termios.TCSANOW, attributes)
    os.set_blocking(slave, False)
    try:
        return text_of_keys(os.read(slave, READ))
    except BlockingIOError:
        return ""


def _environment() -> dict[str, str]:
    """Without secrets, but with the user's own pager and editor."""
    kept = {name: value for name, value in environment().items() if name not in QUIET}
    return kept | {name: os.environ[name] for name in QUIET if name in os.environ}


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    """While inside, Ctrl+C and Ctrl+\\ are for the command alone."""
    sys.stdout.flush()
    with handling(signal.SIGINT), handling(signal.SIGQUIT):
        yield


def _write(text: str) -> None:
    data = text.encode("utf-8", "surrogateescape")  # the bytes that it was made of
    while data:
        data = data[os.write(sys.stdout.fileno(), data) :]
