"""The command line: what is to be done, and with what; nothing slow is loaded before it is needed.

`main` sets the process up, `run` does what the words ask for: a subcommand, or with `start` one task or a session
at the prompt.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coder import __version__
from coder.cli.config import config_folder, data_folder, load
from coder.cli.flags import INTERRUPTED, USAGE, parser, program
from coder.cli.optional import collect_garbage, needed, optional
from coder.cli.process import drop_api_key, has_input, hide_process, mend_streams, read_stdin
from coder.cli.settings import ConfigError, Settings
from coder.permissions.sanitize import strip_controls
from coder.providers.text import is_loopback
from coder.tools.secrets import clean_path

if TYPE_CHECKING:
    from coder.cli.input import Keyboard
    from coder.cli.repl import Repl
    from coder.cli.screen import Screen

SUBCOMMANDS = ("config", "demo", "export", "sessions", "trace")
AFTER_PROMPT = 0.02  # seconds: time for the prompt to be drawn before the imports begin


def main(argv: Sequence[str] | None = None) -> int:
    """Set the process up and run the program; returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    mend_streams()
    try:
        try:
            if argv and argv[0] in SUBCOMMANDS:
                return run(argv)
            from coder.cli.signals import graceful_shutdown

            hide_process()
            path = os.environ.get("PATH", os.defpath)
            os.environ["PATH"] = clean_path(path)  # also for libraries
            with graceful_shutdown():
                return run(argv)
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
        return demonstrate(arguments) if arguments.demo else start(arguments, prompt_of(arguments))
    except ConfigError as error:
        sys.stderr.write(f"coder: {strip_controls(str(error))}\n")
        return USAGE


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


def demonstrate(arguments: argparse.Namespace) -> int:
    """A run of the scripted model over a scratch copy of the broken project."""
    demo = needed("coder.devtools.demo", "--demo")
    if arguments.prompt or arguments.resume is not None or arguments.continue_:
        raise ConfigError("--demo has a task of its own: no PROMPT, -c or -r beside it")
    os.chdir(folder := demo.scratch_project())
    sys.stderr.write(
        "This is a demonstration. A script answers in the place of a language model, through a real server on this\n"
        f"machine; requests, tools, files and tests are real. It works in a scratch copy: {folder}\n\n> {demo.PROMPT}\n"
    )
    with demo.demo_server() as server:
        arguments.no_session, arguments.yolo = True, True
        arguments.OPENAI_BASE_URL, arguments.OPENAI_MODEL = server.url, "script"
        code = start(arguments, demo.PROMPT)
    sys.stderr.write(f"\nSee for yourself: cd {folder} && python3 -m unittest\n")
    return code


def start(arguments: argparse.Namespace, prompt: str) -> int:
    """One task, or a session at the prompt; returns the exit code. Raises ConfigError."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    one_task = not arguments.interactive and bool(prompt or arguments.print or not terminal)
    if arguments.interactive and not terminal:
        raise ConfigError("-i needs a terminal")
    if one_task and arguments.resume == "":
        raise ConfigError("-r needs the ID of a conversation here; `coder sessions` lists them")
    if one_task and not prompt:
        raise ConfigError("nothing to do: give a PROMPT, or text on stdin")
    settings = load(Path.cwd(), vars(arguments))
    drop_api_key()
    arguments.trace = open_trace(arguments.trace)
    visible = sys.stderr.isatty() and arguments.output_format == "text" and not arguments.quiet
    arguments.can_ask = terminal and visible
    arguments.files, arguments.notices = None, []
    if not one_task:
        return open_prompt(settings, arguments, prompt)
    if settings.base_url and not (arguments.quiet or is_loopback(settings.base_url)):
        sys.stderr.write(strip_controls(f"{settings.model} at {settings.host}\n"))
    from coder.cli.one_shot import one_shot

    return one_shot(settings, arguments, prompt)


def open_trace(path: str | None) -> object:
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
    from coder.cli.input import Keyboard, Leave
    from coder.cli.screen import Screen
    from coder.cli.signals import raise_on_sigint

    screen = Screen(sys.stdout)
    keyboard = Keyboard(data_folder() / "history")
    repl: Repl | None = None
    screen.line(_banner(settings, arguments))
    _load_behind(bool(settings.base_url))
    raise_on_sigint()
    try:
        if arguments.continue_ or arguments.resume is not None:
            repl = _make_repl(settings, arguments, screen, keyboard)
        if first:
            screen.line(f"> {first}", "bold")
        for entry in itertools.chain([first] if first else [], keyboard.entries()):
            try:
                repl = repl or _make_repl(settings, arguments, screen, keyboard)
                repl.take(entry)
            except KeyboardInterrupt:  # between an entry and its run: the entry is given up
                screen.line()  # behind the ^C
    except Leave as leave:
        return int(leave.code or 0)
    finally:
        keyboard.close()
        kept = repl.conversation.close() if repl else ""
        for text in repl.app.left_behind() if repl else ():
            screen.line(text, "yellow")
        if kept:
            screen.line(f"Continue this conversation: {program()} -r {kept}", "dim")
    return 0


def _banner(settings: Settings, arguments: argparse.Namespace) -> str:
    """What stands above the prompt. Reads the instruction files, for the session that follows."""
    if module := optional("coder.agent.instructions"):
        arguments.files = module.instructions(Path.cwd(), config_folder(), arguments.notices.append)
    files = ", ".join(each.path for each in arguments.files or ())
    return (
        f"coder {__version__} · {settings.model} at {settings.host} · {Path.cwd()}\n"
        + (f"Instructions: {files}\n" if files else "")
        + "/help lists the commands; Ctrl+C stops a run, Ctrl+D exits."
    )


def _make_repl(
    settings: Settings, arguments: argparse.Namespace, screen: Screen, keyboard: Keyboard
) -> Repl:
    """What takes the entries, with the imports it needs."""
    from coder.cli.signals import defer_sigint

    with defer_sigint():
        from coder.cli.app import App

        module = needed("coder.cli.conversation", "the session at the prompt")
        repl_class = needed("coder.cli.repl", "the session at the prompt").Repl
        app = App(settings, arguments, can_ask=True)
        conversation = module.open_conversation(app, arguments, titles=settings.titles)
        repl: Repl = repl_class(app, conversation, screen, keyboard, verbose=arguments.verbose)
        collect_garbage()
    if arguments.resume == "":
        repl.commands.run("resume", "")
    elif arguments.resume or arguments.continue_:
        repl.replay()
    return repl


def _load_behind(own_server: bool) -> None:
    """Import what the first run needs, while the user reads and types."""

    def import_all() -> None:
        if not own_server:
            from coder.providers.http import openai_client

            openai_client("none")  # the slowest first
        for name in ("rich.cells", "coder.cli.repl"):
            optional(name)

    behind = threading.Timer(AFTER_PROMPT, import_all)
    behind.daemon = True
    behind.start()
