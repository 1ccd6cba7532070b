"""Commands of the person's own at the prompt: they have the terminal, as in a shell, and no question is asked.

`relayed` gives a command a terminal of its own, between which and ours all keys and all output are passed on, so that the output
can be kept; `direct` gives it ours. Ctrl+C is the command's in both.
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
from coder.cli.terminal_modes import LFLAG, raw, tty_flags
from coder.permissions.sanitize import strip_controls
from coder.tools.bash import Output, shell
from coder.tools.process import DRAIN, QUIET, READ, environment

# An editor, a pager
FULL_SCREEN = re.compile(r"\x1b\[\?(?:1049|1047|47)h.*?(?:\x1b\[\?(?:1049|1047|47)l|$)", re.S)


def direct(command: str, cwd: Path) -> int:
    """Run it on our terminal; its exit code. Raises OSError, ToolError."""
    with _left_to_it(), tty_flags():
        return subprocess.run(_line(command), cwd=cwd, env=_environment(), check=False).returncode


def relayed(command: str, cwd: Path, redact: Callable[[str], str]) -> tuple[str, int, str]:
    """Run it on a terminal of its own: (its output as text, its exit code, the keys that it did not read). What is shown goes
    through `redact`. Raises OSError, ToolError."""
    output, last = Output(), b""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    ours, its = os.openpty()
    with contextlib.ExitStack() as ending:
        ending.callback(output.close)
        ending.callback(os.close, ours)
        ending.callback(os.close, its)
        ending.enter_context(_same_size(its))
        process = subprocess.Popen(
            _line(command),
            cwd=cwd,
            env=_environment(),
            stdin=its,
            stdout=its,
            stderr=its,
            start_new_session=True,
            preexec_fn=partial(fcntl.ioctl, 0, termios.TIOCSCTTY, 0),
        )
        ending.callback(process.wait)
        ending.callback(process.kill)  # where it has not ended by itself
        with _left_to_it(), raw():
            for data in _passed_on(process, ours):
                if data:
                    _show(redact(decoder.decode(data)))
                    output.add(data)
                    last = data
            _show(redact(decoder.decode(b"", True)))
        text = re.sub(r"\r+(?=\n|$)", "", FULL_SCREEN.sub("", output.text()))
        text = strip_controls(re.sub(r"[^\n]*\r", "", text))  # a line that was written over
        sys.stdout.write("\n" if text and not last.endswith(b"\n") else "")
        return text, process.wait(), _unread(its)


def _passed_on(process: subprocess.Popen[bytes], ours: int) -> Iterator[bytes]:
    """Pass our keys on, and yield the output, b"" when nothing comes, until the process has ended."""
    keyboard, keys, ended = sys.stdin.fileno(), b"", 0.0
    os.set_blocking(ours, False)  # a command that does not read holds up nothing
    with selectors.DefaultSelector() as watched:
        watched.register(keyboard, selectors.EVENT_READ)
        watched.register(ours, selectors.EVENT_READ)
        while True:
            # Asked before looking: what it wrote is there by then
            over = process.poll() is not None
            ready = [key.fd for key, _ in watched.select(TICK)]
            if ours in ready:
                yield os.read(ours, READ)
            elif not ready:
                yield b""
            if keyboard in ready and not keys and not over:
                keys = os.read(keyboard, READ)
            if keys:
                with contextlib.suppress(BlockingIOError):
                    keys = keys[os.write(ours, keys) :]
            if over:
                ended = ended or time.monotonic()
                if ours not in ready or time.monotonic() - ended > DRAIN:
                    return


def _unread(its: int) -> str:
    """What was typed and is still there."""
    attributes = termios.tcgetattr(its)
    attributes[LFLAG] &= ~termios.ICANON
    termios.tcsetattr(its, termios.TCSANOW, attributes)
    os.set_blocking(its, False)
    try:
        return text_of_keys(os.read(its, READ))
    except BlockingIOError:
        return ""


def _line(command: str) -> list[str]:
    return [shell(), "-c", command]


def _environment() -> dict[str, str]:
    """Without our secrets, but with the person's own pager and editor."""
    kept = {name: value for name, value in environment().items() if name not in QUIET}
    return kept | {name: os.environ[name] for name in QUIET if name in os.environ}


@contextlib.contextmanager
def _left_to_it() -> Iterator[None]:
    """While inside, Ctrl+C and Ctrl+\\ are the command's alone."""
    sys.stdout.flush()
    before = [
        (number, signal.signal(number, lambda number, frame: None))
        for number in (signal.SIGINT, signal.SIGQUIT)
    ]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


@contextlib.contextmanager
def _same_size(its: int) -> Iterator[None]:
    """While inside, its terminal is as large as ours."""

    def resize(*_: object) -> None:
        termios.tcsetwinsize(its, termios.tcgetwinsize(sys.stdin.fileno()))

    resize()
    before = signal.signal(signal.SIGWINCH, resize)
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)


def _show(text: str) -> None:
    data = text.encode("utf-8", "surrogateescape")  # the bytes that it was made of
    while data:
        data = data[os.write(sys.stdout.fileno(), data) :]
