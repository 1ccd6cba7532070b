"""The command line: what is to be done, and with what; nothing slow is loaded before it is needed."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import itertools
import os
import shlex
import stat
import sys
import threading
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coder import __version__
from coder.cli.config import ConfigError, Settings, config_folder, data_folder, load
from coder.cli.flags import INTERRUPTED, USAGE, UsageError, format_of, parser, program
from coder.cli.lazy import make_lazy
from coder.cli.private import close_process, forget_key, own_folder
from coder.permissions.sanitize import strip_controls
from coder.providers.address import is_loopback
from coder.tools.environment import clean_path

if TYPE_CHECKING:
    from coder.agent.instructions import Instruction
    from coder.cli.input import Keyboard
    from coder.cli.repl import Repl
    from coder.cli.screen import Screen
    from coder.devtools.trace import Trace

MOST_INPUT = 400_000  # bytes of stdin: about 100,000 tokens, and `yes |` never ends
AFTER_PROMPT = 0.02  # seconds: time for the prompt to be drawn before the imports begin
SUBCOMMANDS = {
    "config": "config",
    "demo": "demo",
    "export": "export ID",
    "help": "--help",
    "sessions": "sessions",
    "trace": "trace FILE",
}
ONE_EDIT = 0.8  # of difflib: a letter too many, missing, or wrong
SESSION_VERBS = ("list", "search", "show", "fork", "rm", "-h", "--help")


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    _mend_streams()
    try:
        try:
            return _checked(argv)
        finally:
            sys.stdout.flush()  # what fails at Python's own end would be told in its words, with a code of its own
    except KeyboardInterrupt:
        return INTERRUPTED
    # The reader of our output has left, or the disk is full: nothing more to say to it
    except BrokenPipeError:
        # What it still holds must not fail once more at the very end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _checked(argv: list[str]) -> int:
    """Do what the command line asks for; where it cannot be met, stderr says why, and stdout in the formats for programs."""
    try:
        return _command(argv)
    except UsageError as error:  # which stderr has by now
        problem = str(error)
    except (ConfigError, FileNotFoundError) as error:
        problem = str(error)
        if isinstance(error, FileNotFoundError):
            if _has_folder():
                raise
            problem = "the folder that this was started in is gone: go to another one"
        sys.stderr.write(f"coder: {strip_controls(problem)}\n")
    if (output_format := format_of(argv)) != "text":
        from coder.cli.one_shot import refused

        refused(problem, output_format)
    return USAGE


def _has_folder() -> bool:
    try:
        return bool(os.getcwd())
    except OSError:
        return False


def _command(argv: list[str]) -> int:
    if argv == ["config"]:
        sys.stdout.write(Path(__file__).parents[1].joinpath("env.example").read_text("utf-8"))
        return 0
    if argv[:1] == ["demo"] and all(word.startswith("-") or word.isdigit() for word in argv[1:]):
        from coder.cli.signals import raise_on_sigint
        from coder.devtools import demo

        raise_on_sigint()
        return demo.main(argv[1:])
    if argv[:1] == ["trace"] and (
        len(argv) <= 2 or any(word.startswith("--html") for word in argv)
    ):
        from coder.cli import trace_table

        return trace_table.main(argv[1:])
    if argv[:1] == ["sessions"] and (len(argv) == 1 or argv[1] in SESSION_VERBS):
        from coder.cli import sessions_command

        return sessions_command.main(argv[1:])
    if argv[:1] == ["export"] and len(argv) > 1 and (len(argv) == 2 or argv[2].startswith("-")):
        from coder.cli import export_command

        return export_command.main(argv[1:])
    return _guarded(parser().parse_intermixed_args(argv))


def _mend_streams() -> None:
    """A standard stream that is closed becomes the null device, so that no socket takes its number; a C locale gets ? for é."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (open to the end)
        elif mode == "w" and stream is getattr(sys, f"__{name}__"):
            raw = io.BufferedWriter(_Output(stream.fileno(), needed=name == "stdout"))
            tty = name == "stderr" or stream.isatty()
            setattr(
                sys, name, io.TextIOWrapper(raw, stream.encoding, "replace", line_buffering=tty)
            )


class _Output(io.FileIO):
    """What lies under stdout and stderr. Progress that cannot be written is dropped; for the answer (`needed`) a line says why, and
    BrokenPipeError is raised, as where its reader has left."""

    def __init__(self, number: int, needed: bool) -> None:
        super().__init__(number, "w", closefd=False)
        self.needed, self.failed = needed, False

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            # Of a terminal that is gone: the signal that says so is on its way
            if not self.needed or error.errno == errno.EIO:
                return len(data)
            if error.errno != errno.EPIPE and not self.failed:
                sys.stderr.write(f"coder: the output cannot be written: {error.strerror}\n")
            self.failed = True
            raise BrokenPipeError from None


def _guarded(arguments: argparse.Namespace) -> int:
    from coder.cli.signals import graceful_shutdown

    close_process()
    make_lazy()
    os.environ["PATH"] = clean_path(os.environ.get("PATH", os.defpath))  # also for libraries
    with graceful_shutdown():
        try:
            os.chdir(arguments.cwd)
        except OSError as error:
            raise ConfigError(f"--cwd {arguments.cwd}: {error.strerror}") from None
        if arguments.demo:
            return _demo(arguments)
        _no_typo(arguments)
        return _session(arguments, _prompt(arguments))


def _no_typo(arguments: argparse.Namespace) -> None:
    """Refuse what looks like a subcommand: as a prompt it would cost money."""
    words = arguments.prompt
    if not 1 <= len(words) <= 2 or arguments.print or arguments.interactive:
        return
    for near in get_close_matches(words[0].lower(), SUBCOMMANDS, 1, ONE_EDIT):
        raise ConfigError(
            f"did you mean `{program()} {SUBCOMMANDS[near]}`? "
            f"To ask the model: {program()} -p {shlex.join(words)}"
        )


def _prompt(arguments: argparse.Namespace) -> str:
    """The words of the command line, and stdin where it is no terminal: alone it is the prompt, beside one its context."""
    words = " ".join(arguments.prompt).strip()
    piped = "" if arguments.interactive or not _has_input() else _read_stdin()
    if words and piped.strip():
        return f"{words}\n\n<stdin>\n{piped}\n</stdin>"
    return words or piped.strip()


def _has_input() -> bool:
    """Is there something to read on stdin, a pipe or a file? The null device and a closed stdin have nothing."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _read_stdin() -> str:
    """All of it, up to MOST_INPUT bytes. A pipe that nobody closes is said after a while, since it looks like a hang."""
    note = threading.Timer(
        3,
        sys.stderr.write,
        ("coder: reading stdin; it goes on when that ends (Ctrl+D, or </dev/null)\n",),
    )
    note.daemon = True
    note.start()
    try:
        data = sys.stdin.buffer.read(MOST_INPUT + 1)
        if len(data) <= MOST_INPUT:
            return data.decode("utf-8", "replace")
        sys.stderr.write(f"coder: only the first {MOST_INPUT:,} bytes of stdin are taken\n")
        return (
            data[:MOST_INPUT].decode("utf-8", "replace") + f"\n... [cut after {MOST_INPUT} bytes]"
        )
    finally:
        note.cancel()
        note.join()  # a thread that writes while the interpreter ends would abort it


def _session(arguments: argparse.Namespace, prompt: str) -> int:
    """A session at the prompt, or one run."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    one_shot = (bool(prompt) or arguments.print or not interactive) and not arguments.interactive
    if one_shot and arguments.resume == "":
        raise ConfigError("-r needs the ID of a conversation here; `coder sessions` lists them")
    if one_shot and not prompt and not sys.stdin.isatty():
        raise ConfigError("nothing to do: give a PROMPT, or text on stdin")
    if arguments.interactive and not interactive:
        raise ConfigError("-i needs a terminal")
    if one_shot and not prompt:
        prompt = _read_stdin().strip()
    settings = load(
        Path.cwd(), {name: value for name, value in vars(arguments).items() if name.isupper()}
    )
    forget_key()
    if not arguments.no_session:
        with contextlib.suppress(OSError):  # the store says it
            own_folder(data_folder())
    arguments.trace = _trace(arguments.trace) if arguments.trace else None
    arguments.can_ask = (
        interactive
        and sys.stderr.isatty()
        and arguments.output_format == "text"
        and not arguments.quiet
    )
    if not one_shot:
        return _repl(settings, prompt, arguments)
    if settings.base_url and not (arguments.quiet or is_loopback(settings.base_url)):
        # Config.py lets no other characters into an address
        sys.stderr.write(f"{strip_controls(settings.model)} at {settings.host}\n")
    from coder.cli.app import build_app
    from coder.cli.conversation import open_conversation
    from coder.cli.one_shot import one_shot as run

    app = build_app(settings, arguments, can_ask=arguments.can_ask)
    memory = open_conversation(app, arguments, one_task=True)
    try:
        code = run(app, prompt, arguments, memory.session_id)
        memory.settle()
        return code or int(bool(memory.problem))
    finally:
        memory.close()
        for text in app.left_behind():
            sys.stderr.write(f"{strip_controls(text)}\n")


def _trace(path: str) -> Trace:
    from coder.devtools.trace import Trace

    try:
        return Trace(path)
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--trace {path}: {error}") from None


def _repl(settings: Settings, first: str, arguments: argparse.Namespace) -> int:
    """The session at the prompt. The prompt comes first; what is slow to load is loaded behind it."""
    from coder.agent.instructions import instructions
    from coder.cli.input import Keyboard, Leave
    from coder.cli.screen import Screen
    from coder.cli.signals import raise_on_sigint

    screen = Screen(sys.stdout)
    keyboard = Keyboard(data_folder() / "history", before_prompt=_load_behind)
    remarks: list[str] = []
    found = instructions(Path.cwd(), config_folder(), remarks.append)
    files = ", ".join(each.path for each in found)
    who = f" · agent {arguments.agent}" if arguments.agent else ""
    screen.line(
        f"coder {__version__} · {settings.model} at {settings.host} · {Path.cwd()!s}{who}\n"
        f"{f'Instructions: {files}{chr(10)}' if files else ''}/help lists the commands; Ctrl+C stops a run, Ctrl+D leaves."
    )
    make_repl = partial(_loaded, settings, arguments, screen, keyboard, found, remarks)
    repl: Repl | None = None
    raise_on_sigint()
    try:
        if arguments.continue_ or arguments.resume is not None:
            repl = make_repl()
        if first:
            screen.line(f"> {first}", "bold")
        for entry in itertools.chain([first] if first else [], keyboard.entries()):
            try:
                repl = repl or make_repl()
                repl.take(entry)
            except KeyboardInterrupt:  # between an entry and its run: the entry is given up
                screen.line()  # behind the ^C
    except Leave as leave:
        return leave.code
    finally:
        keyboard.close()
        screen.title("")
        kept = repl.memory.close() if repl else ""
        for text in repl.app.left_behind() if repl else ():
            screen.line(text, "yellow")
        if kept:
            screen.line(f"Go on with this conversation: {program()} -r {kept}", "dim")
    return 0


def _loaded(
    settings: Settings,
    arguments: argparse.Namespace,
    screen: Screen,
    keyboard: Keyboard,
    files: Sequence[Instruction],
    remarks: list[str],
) -> Repl:
    """What takes the entries, with the imports it needs."""
    from coder.cli.signals import defer_sigint

    with defer_sigint():
        from coder.cli.app import build_app
        from coder.cli.conversation import open_conversation
        from coder.cli.repl import Repl

        app = build_app(settings, arguments, can_ask=True, files=files)
        app.notices += remarks
        repl = Repl(
            app,
            open_conversation(app, arguments, titles=settings.titles),
            screen,
            keyboard,
            verbose=arguments.verbose,
        )
    if arguments.resume == "":
        repl.commands.run("resume", "")
    elif arguments.resume or arguments.continue_:
        repl.replay()
    return repl


@cache
def _load_behind() -> None:
    """Import what the first run needs, while the person reads and types."""

    def load() -> None:
        from coder.providers import http

        http.load()  # the slowest first
        import rich.console  # noqa: F401

        import coder.cli.repl  # noqa: F401

    behind = threading.Timer(AFTER_PROMPT, load)
    behind.daemon = True
    behind.start()


def _demo(arguments: argparse.Namespace) -> int:
    """The scripted server, a scratch copy of the broken project, and a run over them."""
    from coder.devtools.demo import PROMPT, demo_server, scratch_project

    folder = scratch_project()
    os.chdir(folder)
    sys.stderr.write(
        "This is a demonstration. A script answers in the place of a language model, through a real server on this\n"
        f"machine; requests, tools, files and tests are real. It works in a scratch copy: {folder}\n\n> {PROMPT}\n"
    )
    with demo_server() as server:
        arguments.no_session = True
        arguments.yolo, arguments.OPENAI_BASE_URL, arguments.OPENAI_MODEL = (
            True,
            server.url,
            "script",
        )
        code = _session(arguments, PROMPT)
    sys.stderr.write(f"\nSee for yourself: cd {folder} && python3 -m unittest\n")
    return code
