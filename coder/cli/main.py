"""The command line: what is to be done, and with what; nothing slow is loaded before it is needed.

`main` sets the process up, `run` does what the words ask for: a subcommand, one task, or a session
at the prompt.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from coder import __version__
from coder.cli import process
from coder.cli.flags import parser
from coder.permissions.sanitize import strip_controls
from coder.settings import (
    ConfigError,
    Missing,
    Settings,
    config_folder,
    data_folder,
    needed,
    optional,
)
from coder.tools.secrets import clean_path

if TYPE_CHECKING:
    from coder.cli.repl import Repl
    from coder.cli.screen import Screen
    from coder.session import Session

SUBCOMMANDS = (
    "acp",
    "batch",
    "config",
    "demo",
    "export",
    "mcp-server",
    "serve",
    "sessions",
    "tour",
    "trace",
)
AFTER_PROMPT = 0.02  # seconds: time for the prompt to be drawn before the imports begin


def main(argv: Sequence[str] | None = None) -> int:
    """Set the process up and run the program; returns its exit code."""
    process.mend_streams()
    os.environ["PATH"] = clean_path(os.environ.get("PATH", os.defpath))  # also for libraries
    try:
        try:
            with process.graceful_shutdown():
                return run(sys.argv[1:] if argv is None else argv)
        finally:
            # Here, not at Python's own end, where a failure has another message and exit code
            sys.stdout.flush()
    except KeyboardInterrupt:
        return process.INTERRUPTED
    except BrokenPipeError:  # the reader of the output has left, or the disk is full
        # What stdout still holds goes nowhere: at Python's end it would fail once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def run(argv: Sequence[str]) -> int:
    """Do what the words ask for; returns the exit code. What is wrong with them is written to
    stderr in one line."""
    try:
        check_clock()
        if argv and argv[0] in SUBCOMMANDS:
            process.hide_process()
            enter(".")
            subcommands = needed("coder.cli.subcommands", argv[0])
            subcommand = getattr(subcommands, argv[0].replace("-", "_"))
            return int(subcommand(argv[1:]))
        flags, words = split_at_dashes(argv)  # argparse loses words after a --
        arguments = parser().parse_intermixed_args(flags)  # --help and --version end here
        process.hide_process()  # before the key is read, and anything is started
        arguments.prompt += words
        from coder.sources import load  # late: not for --help

        enter(arguments.cwd)
        with contextlib.ExitStack() as demo:  # with --demo, a server that runs until the end
            if arguments.demo:
                prompt = demo.enter_context(demonstration(arguments))
            else:
                prompt = prompt_of(arguments)
            decide_mode(arguments, prompt)
            try:
                settings = load(Path.cwd(), vars(arguments))  # -m has the name OPENAI_MODEL there
            except Missing as missing:
                from coder.cli.models import complete  # late: only here

                settings = complete(missing, arguments)
            os.environ.pop("OPENAI_API_KEY", None)  # no import finds it there
            if not arguments.one_task:
                return run_interactive(settings, arguments, prompt)
            from coder.cli.one_shot import one_shot

            process.raise_on_sigint()
            return one_shot(open_session(settings, arguments), arguments, prompt)
    except Exception as error:
        from coder.types import CoderError  # late: 6 ms

        if not isinstance(error, ConfigError | CoderError):
            raise
        sys.stderr.write(f"coder: {strip_controls(str(error))}\n")
        return process.USAGE


def open_session(settings: Settings, arguments: argparse.Namespace) -> Session:
    """The session that the flags want. Raises ConfigError and CoderError."""
    from coder.session import Session
    from coder.tools.processes import adopt_orphans

    # For the whole process: a Session leaves that alone, since it may be in another program
    adopt_orphans()
    redaction = optional("coder.permissions.redact")
    if redaction:
        redaction.redact_logs(redaction.Redactor(*settings.keys))

    # The MCP servers, which may have been started by _load_later
    mcp_file = config_folder() / "mcp.json"
    servers = None
    if mcp_file.exists():
        servers = needed("coder.extend.mcp", str(mcp_file)).start(mcp_file, Path.cwd())
        process.at_end.append(servers.close)

    session = Session.open(
        Path.cwd(),
        agent=arguments.agent,
        resume=arguments.resume or arguments.continue_ or "",  # True (-c): the newest
        rules=arguments.rules,
        ask=arguments.can_ask,
        yolo=arguments.yolo,
        keep=not arguments.no_session,
        one_task=arguments.one_task,
        compaction=not arguments.no_compaction,
        servers=servers,
        system=arguments.system_prompt,
        append_system=arguments.append_system_prompt,
        settings=settings,
        trace=arguments.trace,
    )
    if arguments.image:
        names = ", ".join(f"{path} (image)" for path, _ in arguments.image)
        session.notices.append(f"attached: {names}")
    return session


def check_clock() -> None:
    """Raises ConfigError for a time that does not fit into Python's own: no module that logs could
    be imported.
    """
    try:
        time.time()
    except OverflowError:
        raise ConfigError("the clock of this machine is later than the year 2261: set it") from None


def split_at_dashes(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The words before the first `--`, and those after it."""
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def enter(folder: str) -> None:
    """Work in this folder. Raises ConfigError, also if the present one was removed."""
    try:
        os.chdir(folder)
        os.getcwd()
    except OSError as error:
        problem = f"--cwd {folder}: {error.strerror}"
        if folder == ".":  # no --cwd
            problem = "the working directory no longer exists: change to another one"
        raise ConfigError(problem) from None


def prompt_of(arguments: argparse.Namespace) -> str:
    """The prompt: the words of the command line, and after them what came on stdin, as their
    context; without words, what came on stdin.
    """
    words = " ".join(arguments.prompt).strip()
    if arguments.interactive:  # stdin is the keyboard
        return words
    needs_stdin = arguments.print and not words  # also from a terminal
    piped = process.read_stdin(always=needs_stdin)
    if not piped.strip():
        return words
    if not words:
        return piped.strip()
    return f"{words}\n\n<stdin>\n{piped}\n</stdin>"


@contextlib.contextmanager
def demonstration(arguments: argparse.Namespace) -> Iterator[str]:
    """While inside, a scripted model is served, and the folder is a scratch copy of a project with
    a bug. Yields the prompt.
    """
    from coder.cli.screen import Screen

    demo = needed("coder.devtools.demo", "--demo")
    folder = demo.scratch_project()
    os.chdir(folder)
    screen = Screen(sys.stderr)
    screen.line(
        "This is a demonstration. A script answers instead of a language model, through a real server on this "
        f"machine; requests, tools, files and tests are real. It works in a scratch copy: {folder}\n"
    )
    screen.entry(demo.PROMPT)
    screen.line()
    with demo.demo_server() as server:
        arguments.no_session = True
        arguments.yolo = True
        arguments.OPENAI_BASE_URL = server.url
        arguments.OPENAI_MODEL = "script"
        yield demo.PROMPT
    sys.stderr.write(f"\nSee for yourself: cd {folder} && python3 -m unittest\n")


def decide_mode(arguments: argparse.Namespace, prompt: str) -> None:
    """Add to the arguments what follows from them. Raises ConfigError for what cannot be done.

    `one_task`: answer and exit, open no session. `can_ask`: there is a screen for questions.
    `is_resumed`: a conversation is continued.
    """
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if arguments.interactive and not terminal:
        raise ConfigError("-i needs a terminal")
    has_task = prompt or arguments.print or not terminal
    arguments.one_task = bool(has_task) and not arguments.interactive
    if arguments.one_task:
        check_task(arguments, prompt)
    arguments.can_ask = terminal and shows_questions(arguments)
    arguments.is_resumed = arguments.continue_ or arguments.resume is not None
    check_together(arguments)


def shows_questions(arguments: argparse.Namespace) -> bool:
    """Whether there is a screen for questions: in a session, and in a task that shows progress."""
    if not arguments.one_task:
        return True
    return sys.stderr.isatty() and arguments.output_format == "text" and not arguments.quiet


def check_together(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for flags that cannot be used together, or not without a screen."""
    if arguments.step and not arguments.can_ask:
        raise ConfigError("--step needs a terminal, and no -q or --output-format")
    if arguments.is_resumed and arguments.no_session:
        flag = "-c" if arguments.resume is None else "-r"
        raise ConfigError(f"--no-session and {flag} cannot be used together")


def check_task(arguments: argparse.Namespace, prompt: str) -> None:
    """Raises ConfigError if there is no task, or a list would have to be shown first."""
    if arguments.resume == "":
        raise ConfigError("-r needs the ID of a conversation here; `coder sessions` lists them")
    if not prompt:
        raise ConfigError("nothing to do: give a PROMPT, or text on stdin")


# ---- the prompt ----------------------------------------------------------------------------------


def run_interactive(settings: Settings, arguments: argparse.Namespace, first: str) -> int:
    """The session at the prompt. The prompt is shown first; what is slow to load comes later."""
    from coder.cli.input import Keyboard, Leave, mode
    from coder.cli.screen import Screen

    screen = Screen(sys.stdout)
    keyboard = Keyboard(data_folder() / "history")
    keyboard.label = partial(mode, arguments.agent or "build", arguments.yolo)

    repls: list[Repl] = []  # empty until the first entry; from then on it has one

    def the_repl() -> Repl:
        # No interrupt between opening and keeping it: the next entry would open a second session,
        # on a conversation that the first one has locked
        with process.defer_sigint():
            if not repls:
                module = needed("coder.cli.repl", "the session at the prompt")
                opened = open_session(settings, arguments)
                repls.append(module.Repl(opened, arguments, screen, keyboard))
        return repls[0]

    keyboard.candidates = lambda before, word: the_repl().commands.complete(before, word)
    show_top(screen, settings, arguments)
    _load_later()
    process.raise_on_sigint()
    at_once = []  # entries before those of the keyboard
    if first or arguments.is_resumed:
        at_once.append(first)
    try:
        for entry in itertools.chain(at_once, keyboard.entries()):
            try:
                the_repl().begin(first)  # does nothing from the second entry on
                the_repl().take(entry)
            except KeyboardInterrupt:  # between an entry and its run: the entry is given up
                first = ""
                screen.line()  # after the ^C
    except Leave as leave:
        return int(leave.code or 0)
    finally:
        keyboard.close()
        for repl in repls:
            repl.close()
    return 0


def show_top(screen: Screen, settings: Settings, arguments: argparse.Namespace) -> None:
    """Show what is above the first prompt: where the session is, and what is not as usual in it."""
    agent = arguments.agent or "build"
    model = settings.model
    if agent not in ("build", "plan") or (config_folder() / "agents" / f"{agent}.md").exists():
        from coder.agent.profiles import choose, load_agents  # late: 9 ms

        model = choose(load_agents(config_folder() / "agents"), agent).model or model
    screen.line(f"coder {__version__} · {model} at {settings.host} · {Path.cwd()}")
    screen.line("/help lists the commands; Ctrl+C stops a run, Ctrl+D exits.")
    unusual = []
    if agent != "build":
        unusual.append(f"Agent: {agent}.")
    if arguments.yolo:
        unusual.append("Commands and edits are not asked about (yolo).")
    if settings.sandbox == "off":
        unusual.append("Commands run without the sandbox.")
    if unusual:
        screen.line(" ".join(unusual), "yellow")
    screen.line()


def _load_later() -> None:
    """Import what the first run needs, while the user reads and types."""
    import threading

    def import_all() -> None:
        path = config_folder() / "mcp.json"
        mcp = optional("coder.extend.mcp") if path.exists() else None
        if mcp:
            mcp.start(path, Path.cwd())  # its programs start meanwhile; open_session gets them
        for name in ("rich.cells", "coder.cli.repl"):
            optional(name)

    later = threading.Timer(AFTER_PROMPT, import_all)
    later.daemon = True
    later.start()
