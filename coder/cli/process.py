"""What is set up for the whole process: safe standard streams, memory that others cannot read,
signals.

The first Ctrl+C sets the run's Abort: the stream, the tools and the waits see it and end with the
history in order. Code that does not look at it within a second gets a KeyboardInterrupt. A second
Ctrl+C ends the program, as SIGTERM, SIGHUP and SIGQUIT do: it unwinds, kills our processes, and
restores the terminal, or is forced to after EXIT_AFTER seconds. In a session a second Ctrl+C ends
the program only if the run does not stop within STUCK_AFTER seconds.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import gc
import io
import os
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from coder.permissions.sanitize import strip_controls

if TYPE_CHECKING:
    from coder.abort import Abort
    from coder.events import Event, Events
    from coder.types import T

# Exit codes
USAGE = 2
LIMIT = 3
TRANSIENT = 75
INTERRUPTED = 130
PR_SET_DUMPABLE = 4
MAX_INPUT = 400_000  # bytes of stdin: about 100,000 tokens, and `yes |` never ends
PATIENCE = 3.0  # seconds
WAITING = "coder: waiting for the end of standard input (Ctrl+D, or start with </dev/null)\n"
WAKE_EVERY = 0.2  # seconds
FORCE_TICKS = 4  # of that clock, until code that does not look at the token is interrupted
EXIT_AFTER = 1.5  # seconds; the promise is two
STUCK_AFTER = 2.0  # seconds after Ctrl+C: a run that has not stopped by then will not
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

Handler = Callable[[int, FrameType | None], None]
at_end: list[Callable[[], None]] = []  # called when the program ends, perhaps twice
_exit_codes: list[int] = []  # the first one counts; empty until the shutdown begins
_runs: list[Abort] = []  # of the present runs


def ignore(number: int, frame: FrameType | None) -> None:
    """A handler by which a signal has no effect."""


def hide_process() -> None:
    """Let no other process read the memory and environment of this one, as far as this system can.

    A command can look into its parent: /proc/PID/environ and /proc/PID/mem belong to the same user.
    Not hidden: from root, and if another process has the key in its environment, such as the shell
    that started the program.
    """
    import ctypes  # late: not for --help, of whose 75 ms both take 4
    import resource

    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def mend_streams() -> None:
    """Replace a closed standard stream by the null device, so that no socket takes its number.

    If the locale is C, write ? for é, and read UTF-8; bytes that are no text are read, too.
    """
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
        elif name == "stdin":
            encoding = "utf-8" if stream.encoding == "ascii" else None
            # It may be no stream of a file
            with contextlib.suppress(AttributeError, io.UnsupportedOperation):
                stream.reconfigure(encoding=encoding, errors="replace")
        elif stream is getattr(sys, f"__{name}__"):
            raw = io.BufferedWriter(Output(stream.fileno(), needed=name == "stdout"))
            by_line = name == "stderr" or stream.isatty()
            text = io.TextIOWrapper(raw, stream.encoding, "replace", line_buffering=by_line)
            setattr(sys, name, text)


class Output(io.FileIO):
    """The file under stdout and stderr. Progress that cannot be written is dropped.

    If it is the answer (`needed`), a line gives the reason, and BrokenPipeError is raised, as if
    its reader had left.
    """

    def __init__(self, number: int, needed: bool) -> None:
        super().__init__(number, "w", closefd=False)
        self.needed = needed
        self.failed = False

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            # Of a terminal that is gone: its signal is on its way
            if not self.needed or error.errno == errno.EIO:
                return len(data)
            if error.errno != errno.EPIPE and not self.failed:
                sys.stderr.write(f"coder: the output cannot be written: {error.strerror}\n")
            self.failed = True
            raise BrokenPipeError from None


def read_stdin(always: bool) -> str:
    """All of stdin, up to MAX_INPUT bytes, if it is a pipe, a file or a socket, or `always`.

    A note names what is waited for, since a pipe left open looks like a hang.
    """
    mode = 0  # of a closed stdin
    with contextlib.suppress(OSError, ValueError):
        mode = os.fstat(sys.stdin.fileno()).st_mode
    if not (always or stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)):
        return ""
    data = _read_all(sys.stdin.fileno(), MAX_INPUT + 1)
    text = data[:MAX_INPUT].decode("utf-8", "replace")
    if len(data) <= MAX_INPUT:
        return text
    sys.stderr.write(f"coder: only the first {MAX_INPUT:,} bytes of stdin are taken\n")
    return f"{text}\n... [cut after {MAX_INPUT} bytes]"


def _read_all(number: int, most: int) -> bytes:
    """The bytes of a file until its end, at most so many; a note is written once it takes long."""
    data = b""
    note_at: float | None = time.monotonic() + PATIENCE
    while len(data) < most:
        patience = max(0.0, note_at - time.monotonic()) if note_at is not None else None
        if not select.select([number], [], [], patience)[0]:
            sys.stderr.write(WAITING)
            note_at = None
            continue
        piece = os.read(number, most - len(data))
        if not piece:
            break
        data += piece
    return data


def collect_garbage() -> None:
    """Switch the collector on, which `__main__.py` has switched off; it never looks at what was
    imported so far."""
    gc.freeze()
    gc.enable()


# ---- Ctrl+C --------------------------------------------------------------------------------------


class Interrupts:
    """Ctrl+C and Esc during the runs of a session."""

    presses = 0  # of Ctrl+C; the session sets it to 0 before each entry
    escaped = False
    at_prompt = False  # the prompt follows a run: until then a Ctrl+C is meant for the run
    _first_press = 0.0  # when it came (monotonic)

    def escape(self) -> None:
        """Stop the run as the first Ctrl+C does, from any thread; Esc twice ends nothing else."""
        self.escaped = True
        for abort in _runs:
            abort.set()

    @property
    def ended(self) -> bool:
        """Whether a signal has begun the shutdown."""
        return bool(_exit_codes)

    @contextmanager
    def stopping(self, abort: Abort) -> Iterator[None]:
        """While inside, signals stop the run of `abort`, so that its last event comes."""
        ticks = 0  # since it was stopped

        def force(number: int, frame: FrameType | None) -> None:
            nonlocal ticks
            if self.presses or self.escaped or self.ended:
                ticks += 1
            if ticks == FORCE_TICKS:
                raise KeyboardInterrupt

        if self.presses or self.escaped:  # before the run began
            abort.set()
        _runs.append(abort)
        try:
            with handling(signal.SIGINT, partial(self._press, abort)), wake_up(force):
                yield
        finally:
            _runs.remove(abort)
            if _exit_codes:
                raise SystemExit(_exit_codes[0])

    def _press(self, abort: Abort, number: int, frame: FrameType | None) -> None:
        """Ctrl+C during a run stops it; another one ends the program, in a session only if the
        run does not stop."""
        if not self.presses:
            self._first_press = time.monotonic()
        self.presses += 1
        abort.set()
        is_stuck = time.monotonic() - self._first_press > STUCK_AFTER
        leaves = self.presses > 1 and (is_stuck or not self.at_prompt)
        if leaves and begin_exit(128 + signal.SIGINT):
            raise KeyboardInterrupt

    def show_all(self, events: Events[T], abort: Abort, show: Callable[[Event], None]) -> T:
        """Show the events of a run to the end; signals stop it. Raises KeyboardInterrupt."""
        with self.stopping(abort), contextlib.closing(events):
            while True:
                try:  # by hand, without Returning: no frame more for each token
                    event = next(events)
                except StopIteration as end:
                    result: T = end.value
                    return result
                show(event)

    def count(self, number: int, frame: FrameType | None) -> None:
        """Take a Ctrl+C that comes shortly before or after a run, and breaks nothing off."""
        self.presses += 1


@contextmanager
def wake_up(handler: Handler = ignore, every: float = WAKE_EVERY) -> Iterator[None]:
    """While inside, a clock wakes the main thread and calls `handler`, `every` so many seconds.

    Python looks for signals before a call that blocks. One that comes between the look and the call
    does not wake the call, and would be seen when something is read, which may be never.
    """
    with handling(signal.SIGALRM, handler):
        clock = signal.setitimer(signal.ITIMER_REAL, every, every)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, *clock)


@contextmanager
def handling(number: int, handler: Handler = ignore) -> Iterator[None]:
    """While inside, `handler` takes this signal; by default it has no effect."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def defer_sigint() -> Iterator[None]:
    """While inside, Ctrl+C waits; it comes as KeyboardInterrupt at the end. For imports, which must
    not be left half done."""
    is_pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal is_pressed
        is_pressed = True

    with handling(signal.SIGINT, press):
        yield
    if is_pressed and not _exit_codes:
        raise KeyboardInterrupt


# ---- shutdown ----------------------------------------------------------------------------


@contextmanager
def graceful_shutdown() -> Iterator[None]:
    """Around the whole program: however it ends, afterwards no child process is left, and the
    terminal is restored."""
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, _exit)
    # By default it would end the program, if the clock of `wake_up` is late or left on
    signal.signal(signal.SIGALRM, ignore)
    sys.excepthook = _report_defect
    threading.excepthook = lambda args: _report_defect(*args[:3])
    try:
        yield
    finally:
        _exit_codes.append(0)  # from here on begin_exit refuses
        _clean_up()
        if any(_exit_codes):
            # Python's own end restores the default handlers, by which a late signal would change
            # the exit code
            for number in (*ENDING, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)


def begin_exit(code: int) -> bool:
    """Begin the shutdown with this exit code. False if it had begun before."""
    if _exit_codes:
        return False
    _exit_codes.append(code)
    # Not threading.Thread: a signal's handler must not wait for its lock
    _thread.start_new_thread(_force_exit, (code,))
    return True


def raise_on_sigint() -> None:
    """From here on Ctrl+C is a KeyboardInterrupt; before, it ends the program at once."""

    def press(number: int, frame: FrameType | None) -> None:
        if not _exit_codes:
            raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, press)


def _exit(number: int, frame: FrameType | None) -> None:
    if not begin_exit(128 + number):
        return
    for abort in _runs:
        abort.set()
    if not _runs:
        raise SystemExit(128 + number)


def _force_exit(code: int) -> None:
    for _ in range(10):  # in pieces: a machine that is suspended ends one at most
        time.sleep(EXIT_AFTER / 10)
    _clean_up()
    os._exit(code)


def _clean_up() -> None:
    """Restore the terminal, kill the child processes, remove the temporary folder; perhaps
    twice.
    """
    for restore in at_end:
        restore()
    bash = sys.modules.get("coder.tools.bash")
    if bash:
        bash.processes.stop_all()
    workspace = sys.modules.get("coder.tools.workspace")
    if workspace and workspace.private_folder.cache_info().currsize:
        import shutil

        shutil.rmtree(workspace.private_folder(), ignore_errors=True)


def _report_defect(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    """Replace Python's own traceback, which holds text of others unsanitised."""
    import traceback

    text = f"coder: internal error, in coder or in a plugin. {kind.__name__}: {error}\n"
    for frame in traceback.extract_tb(trace):
        text += f"  {frame.filename}:{frame.lineno}\n"
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(strip_controls(text))
        sys.stderr.flush()
