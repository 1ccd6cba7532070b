"""The command line: what is to be done, and with what; nothing slow is loaded before it is needed.

`main` sets the process up, `run` does what the words ask for: a subcommand, one task, or a session at the prompt.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from coder import __version__
from coder.cli.config import config_folder, data_folder, load
from coder.cli.process import has_input, hide_process, mend_streams, needed, optional, read_stdin
from coder.cli.settings import INTERRUPTED, USAGE, ConfigError, Missing, Settings, parser
from coder.cli.signals import defer_sigint, graceful_shutdown, raise_on_sigint
from coder.permissions.sanitize import strip_controls
from coder.providers.text import is_loopback
from coder.tools.secrets import clean_path

if TYPE_CHECKING:
    from coder.cli.repl import Repl
    from coder.cli.screen import Screen

SUBCOMMANDS = ("config", "demo", "export", "sessions", "trace")
AFTER_PROMPT = 0.02  # seconds: time for the prompt to be drawn before the imports begin


def main(argv: Sequence[str] | None = None) -> int:
    """Set the process up and run the program; returns its exit code."""
    mend_streams()
    hide_process()
    os.environ["PATH"] = clean_path(os.environ.get("PATH", os.defpath))  # also for libraries
    try:
        try:
            with graceful_shutdown():
                return run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()  # what fails at Python's own end would have a message and code of its own
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has left, or the disk is full
        # What it still holds must not fail once more at the very end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def run(argv: Sequence[str]) -> int:
    """Do what the words ask for; returns the exit code. What is wrong with them stands on stderr in one line."""
    try:
        if argv and argv[0] in SUBCOMMANDS:
            enter(".")
            return int(getattr(needed("coder.cli.subcommands", argv[0]), argv[0])(argv[1:]))
        at = [*argv, "--"].index("--")  # argparse loses words behind it
        arguments = parser().parse_intermixed_args(argv[:at])
        arguments.prompt += argv[at + 1 :]
        enter(arguments.cwd or ".")
        demo = arguments.demo and demonstration(arguments)
        with demo or contextlib.nullcontext(prompt_of(arguments)) as prompt:
            one_task = is_one_task(arguments, prompt)
            settings = settings_of(arguments)
            os.environ.pop("OPENAI_API_KEY", None)  # no import finds it there
            arguments.trace = open_trace(arguments.trace)
            if not one_task:
                return open_prompt(settings, arguments, prompt)
            if settings.base_url and not (arguments.quiet or is_loopback(settings.base_url)):
                sys.stderr.write(strip_controls(f"{settings.model} at {settings.host}\n"))
            from coder.cli.one_shot import one_shot

            return one_shot(settings, arguments, prompt)
    except Exception as error:
        from coder.types import CoderError  # late: 6 ms

        if not isinstance(error, ConfigError | CoderError):
            raise
        sys.stderr.write(f"coder: {strip_controls(str(error))}\n")
        return USAGE


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The settings, also where no server or no model is named. Raises ConfigError, and SystemExit behind what was shown."""
    try:
        return load(Path.cwd(), vars(arguments))
    except Missing as missing:
        from coder.cli.models import complete  # late: only here

        return complete(missing, arguments)


def enter(folder: str) -> None:
    """Work in this folder. Raises ConfigError, also where the present one was removed."""
    try:
        os.chdir(folder)
        os.getcwd()
    except OSError as error:
        gone = "the working directory no longer exists: change to another one"
        raise ConfigError(gone if folder == "." else f"--cwd {folder}: {error.strerror}") from None


def prompt_of(arguments: argparse.Namespace) -> str:
    """The words of the command line, and stdin where it is no terminal: alone it is the prompt, beside one its context."""
    words = " ".join(arguments.prompt).strip()
    reads = has_input() or (arguments.print and not words)
    piped = read_stdin() if reads and not arguments.interactive else ""
    if words and piped.strip():
        return f"{words}\n\n<stdin>\n{piped}\n</stdin>"
    return words or piped.strip()


@contextlib.contextmanager
def demonstration(arguments: argparse.Namespace) -> Iterator[str]:
    """While inside, a scripted model is served, and the folder is a scratch copy of the broken project; its prompt."""
    from coder.cli.screen import Screen

    demo = needed("coder.devtools.demo", "--demo")
    if arguments.prompt or arguments.resume is not None or arguments.continue_:
        raise ConfigError("--demo has a task of its own: no PROMPT, -c or -r beside it")
    os.chdir(folder := demo.scratch_project())
    screen = Screen(sys.stderr)
    screen.line(
        "This is a demonstration. A script answers in the place of a language model, through a real server on this "
        f"machine; requests, tools, files and tests are real. It works in a scratch copy: {folder}\n"
    )
    screen.entry(demo.PROMPT)
    with demo.demo_server() as server:
        arguments.no_session, arguments.yolo = True, True
        arguments.OPENAI_BASE_URL, arguments.OPENAI_MODEL = server.url, "script"
        yield demo.PROMPT
    sys.stderr.write(f"\nSee for yourself: cd {folder} && python3 -m unittest\n")


def is_one_task(arguments: argparse.Namespace, prompt: str) -> bool:
    """Whether to answer and exit, not to open a session. Raises ConfigError where neither can be done."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    visible = sys.stderr.isatty() and arguments.output_format == "text" and not arguments.quiet
    arguments.can_ask = terminal and visible
    if arguments.interactive:
        if not terminal:
            raise ConfigError("-i needs a terminal")
        return False
    one_task = bool(prompt or arguments.print or not terminal)
    if one_task and arguments.resume == "":
        raise ConfigError("-r needs the ID of a conversation here; `coder sessions` lists them")
    if one_task and not prompt:
        raise ConfigError("nothing to do: give a PROMPT, or text on stdin")
    return one_task


def open_trace(path: str | None) -> object:
    """The file of --trace."""
    if path is None:
        return None
    try:
        return needed("coder.devtools.trace", "--trace").Trace(path)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--trace {path}: {why}") from None


# ---- the prompt ----------------------------------------------------------------------------------


def open_prompt(settings: Settings, arguments: argparse.Namespace, first: str) -> int:
    """The session at the prompt. The prompt comes first; what is slow to load is loaded behind it."""
    from coder.cli.input import Keyboard, Leave, mode
    from coder.cli.screen import Screen

    screen = Screen(sys.stdout)
    keyboard = Keyboard(data_folder() / "history")
    keyboard.label = partial(mode, arguments.agent or "build", arguments.yolo)

    @cache
    def load_session() -> Repl:
        module = needed("coder.cli.repl", "the session at the prompt")
        repl: Repl = module.Repl(settings, arguments, screen, keyboard)
        return repl

    def session() -> Repl:
        with defer_sigint():  # around the cache: a second Repl could not open the conversation
            return load_session()

    keyboard.candidates = lambda before, word: session().commands.complete(before, word)
    show_top(screen, settings, arguments)
    _load_behind(bool(settings.base_url))
    raise_on_sigint()
    arguments.can_ask = True
    at_once = [first] if first or arguments.continue_ or arguments.resume is not None else []
    try:
        for entry in itertools.chain(at_once, keyboard.entries()):
            try:
                session().begin(first)
                session().take(entry)
            except KeyboardInterrupt:  # between an entry and its run: the entry is given up
                first = ""
                screen.line()  # behind the ^C
    except Leave as leave:
        return int(leave.code or 0)
    finally:
        keyboard.close()
        if load_session.cache_info().currsize:
            load_session().close()
    return 0


def show_top(screen: Screen, settings: Settings, arguments: argparse.Namespace) -> None:
    """What stands above the first prompt: where the session is, and what is not as usual in it."""
    screen.line(f"coder {__version__} · {settings.model} at {settings.host} · {Path.cwd()}")
    screen.line("/help lists the commands; Ctrl+C stops a run, Ctrl+D exits.")
    agent = arguments.agent or "build"
    remarks = {
        f"Agent: {agent}.": agent != "build",
        "Commands and edits are not asked about (yolo).": arguments.yolo,
        "Commands run without the sandbox.": settings.sandbox == "off",
    }
    if text := " ".join(remark for remark, holds in remarks.items() if holds):
        screen.line(text, "yellow")
    screen.line()


def _load_behind(own_server: bool) -> None:
    """Import what the first run needs, while the user reads and types."""

    def import_all() -> None:
        path = config_folder() / "mcp.json"
        if path.exists() and (mcp := optional("coder.extend.mcp")):
            mcp.start(path)  # its programs start meanwhile
        if not own_server:
            from coder.providers.http import openai_client

            openai_client("none")  # the slowest first
        for name in ("rich.cells", "coder.cli.repl"):
            optional(name)

    behind = threading.Timer(AFTER_PROMPT, import_all)
    behind.daemon = True
    behind.start()
