"""The command line: flags, one-shot runs and their output, exit codes.

In text mode stdout carries the answer and nothing else; progress, questions and errors go to stderr. A terminal gets what the
sanitiser leaves of the answer (text.py); a pipe or a file gets the answer as it is, since a program reads it. What it leaves
out: the session at the prompt (repl.py).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import itertools
import json
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from coder import __version__
from coder.address import is_loopback
from coder.terminal.config import ConfigError, Settings, config_folder, data_folder, load
from coder.terminal.private import clean_path, close_process, forget_key, own_folder
from coder.text import clean

if TYPE_CHECKING:
    from coder.features.permissions import Permissions
    from coder.features.sandbox import Sandbox
    from coder.features.trace import Trace
    from coder.terminal.keyboard import Keyboard
    from coder.terminal.memory import Memory
    from coder.terminal.repl import Repl
    from coder.terminal.screen import Screen
    from coder.terminal.session import Session
    from coder.types import Event

MOST_INPUT = 400_000  # bytes of stdin: about 100,000 tokens, and `yes |` never ends
AFTER_PROMPT = 0.02  # seconds: time for the prompt to be drawn before the imports begin
USAGE, LIMIT, TRANSIENT, INTERRUPTED = 2, 3, 75, 130
EXIT_CODES = {"stop": 0, "content_filter": 1, "error": 1, "max_steps": LIMIT, "max_time": LIMIT, "doom_loop": LIMIT, "length": LIMIT,
              "aborted": INTERRUPTED}
SESSION_VERBS = ("list", "search", "show", "fork", "rm", "-h", "--help")
LEVELS = ("off", "minimal", "low", "medium", "high", "xhigh")  # types.Reasoning, which is slow to import (a test compares)
PASSING = {"rate_limit", "server", "network", "incomplete", "empty"}  # errors that may be gone later


class Flags(argparse.ArgumentParser):
    """One whose errors, which hold what was given, are cleaned."""

    def error(self, message: str) -> NoReturn:
        super().error(clean(message))


def parser() -> argparse.ArgumentParser:
    flags = Flags(
        prog="python -m coder", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="A coding agent for the terminal. Without a PROMPT it opens a session; with one (or with text on stdin)\n"
                    "it answers and ends. `python -m coder --demo` shows it at work without a key.",
        epilog="exit codes: 0 done · 1 failed · 2 usage or configuration · 3 stopped by a limit · 75 try again later · 130 Ctrl+C\n"
               "settings: OPENAI_API_KEY, OPENAI_BASE_URL, OPENAI_MODEL and more, see .env.example\n"
               "also: python -m coder sessions, export ID, trace FILE (a run recorded with --trace), demo --port N")
    flags.add_argument("prompt", nargs="*", metavar="PROMPT", help="what to do; stdin next to it is context")
    flags.add_argument("-p", "--print", action="store_true", help="answer and end, also with no PROMPT on a terminal's stdin")
    flags.add_argument("-i", "--interactive", action="store_true", help="open a session with PROMPT as its first entry")
    flags.add_argument("-c", "--continue", dest="continue_", action="store_true", help="go on with the newest conversation of this folder")
    flags.add_argument("-r", "--resume", nargs="?", const="", metavar="ID", help="go on with this conversation; without ID choose one")
    flags.add_argument("--no-session", action="store_true", help="keep nothing of this conversation on disk")
    flags.add_argument("--agent", metavar="NAME", default="", help="who works: build (default), plan, or one of your own")
    flags.add_argument("--plan", dest="agent", action="store_const", const="plan", help="read and plan, change nothing: --agent plan")
    flags.add_argument("-y", "--yolo", action="store_true",
                       help="run commands and make edits without asking; what a rule denies stays denied, and a recursive delete outside\n"
                            "of the folder is asked about")
    flags.add_argument("--allow", dest="rules", action="append", type=lambda text: ("allow", text), metavar="RULE",
                       help="KIND or KIND:PATTERN that needs no yes, such as edit or 'bash:git diff *'")
    flags.add_argument("--deny", dest="rules", action="append", type=lambda text: ("deny", text), metavar="RULE",
                       help="and what is never done; of all rules the last that fits decides")
    flags.add_argument("--output-format", choices=["text", "json", "stream-json"], default="text",
                       help="json: one object at the end; stream-json: one event a line")
    flags.add_argument("--system-prompt", metavar="TEXT", default="", help="instead of ours")
    flags.add_argument("--append-system-prompt", metavar="TEXT", default="", help="after ours")
    flags.add_argument("-C", "--cwd", metavar="DIR", default=".", help="work in this folder")
    flags.add_argument("--trace", metavar="FILE", type=os.path.abspath,
                       help="append all that is sent and received, with times, to FILE; `trace FILE` shows it")
    flags.add_argument("--demo", action="store_true", help="repair a small broken project with a scripted model; no key, no network")
    flags.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")
    flags.add_argument("-v", "--verbose", action="store_true", help="show reasoning and whole outputs")
    flags.add_argument("--version", action="version", version=f"coder {__version__}")
    _add_settings(flags)
    return flags


def _add_settings(flags: argparse.ArgumentParser) -> None:
    """The flags that go before a setting of the same name, whose values are in `config.NAMES`."""
    flags.add_argument("-m", "--model", dest="OPENAI_MODEL", metavar="NAME", help="the model's name")
    flags.add_argument("--base-url", dest="OPENAI_BASE_URL", metavar="URL", help="an OpenAI-compatible server, mostly ending in /v1")
    flags.add_argument("--max-steps", dest="CODER_MAX_STEPS", type=int, metavar="N", help="model calls of one run (default 100)")
    flags.add_argument("--max-seconds", dest="CODER_MAX_SECONDS", type=float, metavar="S", help="seconds of one run (default: no limit)")
    flags.add_argument("--context-window", dest="CODER_CONTEXT_WINDOW", type=int, metavar="TOKENS", help="default by model family")
    flags.add_argument("--idle-timeout", dest="CODER_IDLE_TIMEOUT", type=float, metavar="S",
                       help="seconds without data until a stream is given up (default 180, 0: never)")
    flags.add_argument("--sandbox", dest="CODER_SANDBOX", choices=["auto", "on", "off"],
                       help="commands write only in this folder: where the kernel can do it (auto), or not at all without it (on)")
    flags.add_argument("--sandbox-network", dest="CODER_SANDBOX_NETWORK", choices=["on", "off"],
                       help="off: commands in the sandbox have no TCP (default on)")
    flags.add_argument("--allow-http", dest="CODER_ALLOW_HTTP", action="store_const", const="on",
                       help="also for a server on another machine (default: https, or http on this machine)")
    flags.add_argument("--reasoning", dest="CODER_REASONING", metavar="LEVEL", choices=LEVELS,
                       help=f"how much the model thinks: {', '.join(LEVELS)} (default off: as the server does by itself)")


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    _mend_streams()
    if argv[:1] == ["demo"] and all(word.startswith("-") or word.isdigit() for word in argv[1:]):
        from coder.features import demo

        return demo.main(argv[1:])
    try:
        if argv[:1] == ["trace"] and (len(argv) <= 2 or any(word.startswith("--html") for word in argv)):
            from coder.terminal import trace_table

            return trace_table.main(argv[1:])
        if argv[:1] == ["sessions"] and (len(argv) == 1 or argv[1] in SESSION_VERBS):
            from coder.terminal import sessions_command

            return sessions_command.main(argv[1:])
        if argv[:1] == ["export"] and len(argv) > 1 and (len(argv) == 2 or argv[2].startswith("-")):
            from coder.terminal import export_command

            return export_command.main(argv[1:])
        return _guarded(parser().parse_intermixed_args(argv))
    except ConfigError as error:
        sys.stderr.write(f"coder: {clean(str(error))}\n")
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has left, or the disk is full: nothing more to say to it
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):  # what they still hold must not fail once more at the very end
            os.dup2(null, stream.fileno())
        return 1


def _mend_streams() -> None:
    """A standard stream that is closed becomes the null device, so that no socket takes its number; a C locale gets ? for é."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (open to the end)
        elif mode == "w" and isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _guarded(arguments: argparse.Namespace) -> int:
    from coder.terminal.interrupts import in_order

    close_process()
    clean_path()
    with in_order():
        try:
            os.chdir(arguments.cwd)
        except OSError as error:
            raise ConfigError(f"--cwd {arguments.cwd}: {error.strerror}") from None
        if arguments.demo:
            return _demo(arguments)
        return _session(arguments, _prompt(arguments))


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
    note = threading.Timer(3, sys.stderr.write, ("coder: reading stdin; it goes on when that ends (Ctrl+D, or </dev/null)\n",))
    note.daemon = True
    note.start()
    try:
        data = sys.stdin.buffer.read(MOST_INPUT + 1)
        if len(data) <= MOST_INPUT:
            return data.decode("utf-8", "replace")
        sys.stderr.write(f"coder: only the first {MOST_INPUT:,} bytes of stdin are taken\n")
        return data[:MOST_INPUT].decode("utf-8", "replace") + f"\n... [cut after {MOST_INPUT} bytes]"
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
    settings = load(Path.cwd(), {name: value for name, value in vars(arguments).items() if name.isupper()})
    forget_key()
    if not arguments.no_session:
        with contextlib.suppress(OSError):  # the store says it
            own_folder(data_folder())
    arguments.trace = _trace(arguments.trace) if arguments.trace else None
    arguments.can_ask = interactive and sys.stderr.isatty() and arguments.output_format == "text" and not arguments.quiet
    if not one_shot:
        return _repl(settings, prompt, arguments)
    if settings.base_url and not (arguments.quiet or is_loopback(settings.base_url)):
        sys.stderr.write(f"{clean(settings.model)} at {settings.host}\n")  # config.py lets no other characters into an address
    session = _made(settings, arguments, can_ask=arguments.can_ask)
    memory = _remembered(session, arguments)
    try:
        code = _one_shot(session, prompt, arguments)
        memory.settle()
        return code or int(bool(memory.problem))
    finally:
        memory.close()


def _trace(path: str) -> Trace:
    from coder.features.trace import Trace

    try:
        return Trace(path)
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--trace {path}: {error}") from None


def _made(settings: Settings, arguments: argparse.Namespace, can_ask: bool) -> Session:
    from coder.features.agents import choices, load_agents
    from coder.features.command_hooks import HooksError, command_hooks
    from coder.features.plugins import load_plugins
    from coder.features.redact import redact_logs
    from coder.features.rules import RulesError
    from coder.terminal.kit import PATCHING, TOOLS
    from coder.terminal.session import Session

    agents, notices = load_agents(config_folder() / "agents")
    name = arguments.agent or "build"
    if name not in (known := [each.name for each in choices(agents, "primary", "all")]):
        raise ConfigError(f"there is no agent {name!r}; there are {', '.join(known)}")
    try:
        permissions, told = _permissions(arguments, can_ask)
        hooks = command_hooks(config_folder() / "hooks.json")
    except (HooksError, RulesError) as error:
        raise ConfigError(str(error)) from None
    plugins = load_plugins(config_folder() / "plugins", {each.name for each in (*TOOLS, *PATCHING)} | {"task"})
    sandbox = _sandbox(settings)
    session = Session(settings, Path.cwd(), permissions, agents=agents, agent=name, system=arguments.system_prompt,
                      extra=arguments.append_system_prompt, hooks=hooks, plugins=plugins, sandbox=sandbox, trace=arguments.trace)
    session.notices += [*notices, *told, *(sandbox.notices if sandbox else [])]
    redact_logs(session.redactor)
    return session


def _sandbox(settings: Settings) -> Sandbox | None:
    """Raises ConfigError where there has to be one and cannot."""
    from coder.features.sandbox import Sandbox, SandboxError

    if settings.sandbox == "off":
        return None
    try:
        return Sandbox(Path.cwd(), required=settings.sandbox == "on", network=settings.network, config=config_folder(), data=data_folder())
    except SandboxError as error:
        raise ConfigError(f"--sandbox on: {error}") from None


def _permissions(arguments: argparse.Namespace, can_ask: bool) -> tuple[Permissions, list[str]]:
    """Those of the user's file, the flags and the folder, and what a person should know of them. Raises RulesError."""
    from coder.features.permissions import Permissions
    from coder.features.rules import dead, load_rules, rule_of, tightening

    rules = load_rules(config_folder() / "permissions.json")
    flags = [rule_of(text, action) for action, text in arguments.rules or []]
    workspace, told = tightening(Path.cwd())
    return Permissions(rules, flags=flags, workspace=workspace, private=[config_folder(), data_folder()], can_ask=can_ask,
                       yolo=arguments.yolo), dead([*rules, *flags]) + told


def _remembered(session: Session, arguments: argparse.Namespace, titles: bool = False) -> Memory:
    """The session's memory: a new conversation, or the one that -c or -r names. Raises ConfigError."""
    from coder.features.database import MEMORY
    from coder.features.store import StoreError, open_store
    from coder.terminal.memory import Memory

    store, notice = open_store(MEMORY if arguments.no_session else data_folder() / "sessions.db")
    session.notices += [notice] if notice else []
    memory = Memory(session, store, data_folder(), titles=titles)
    try:
        if arguments.resume:
            memory.resume(arguments.resume)
        elif arguments.continue_ and (newest := memory.latest()):
            memory.resume(newest.id)
        elif arguments.continue_:
            raise ConfigError("there is no conversation of this folder to continue")
    except (StoreError, ConfigError) as error:
        memory.close()
        raise ConfigError(str(error)) from None
    return memory


def _repl(settings: Settings, first: str, arguments: argparse.Namespace) -> int:
    """The session at the prompt. The prompt comes first; what is slow to load is loaded behind it."""
    from coder.features.instructions import instructions
    from coder.terminal.keyboard import Keyboard, Leave
    from coder.terminal.screen import Screen

    screen = Screen(sys.stdout)
    keyboard = Keyboard(data_folder() / "history", waiting=_load_behind)
    files = ", ".join(each.path for each in instructions(Path.cwd(), config_folder()))
    screen.line(f"coder {__version__} · {clean(settings.model)} at {clean(settings.host)} · {clean(str(Path.cwd()))}\n"
                f"{f'Instructions: {clean(files)}{chr(10)}' if files else ''}/help lists the commands; Ctrl+C stops a run, Ctrl+D leaves.")
    repl: Repl | None = None
    try:
        if arguments.continue_ or arguments.resume is not None:
            repl = _loaded(settings, arguments, screen, keyboard)
        for entry in itertools.chain([first] if first else [], keyboard.entries()):
            try:
                repl = repl or _loaded(settings, arguments, screen, keyboard)
                repl.take(entry)
            except KeyboardInterrupt:  # between an entry and its run: the entry is given up
                screen.write("\n")  # behind the ^C
    except Leave as leave:
        return leave.code
    finally:
        keyboard.close()
        screen.title("")
        if repl and (kept := repl.memory.close(screen.status)):
            screen.line(f"Go on with this conversation: coder -r {kept}", "dim")
    return 0


def _loaded(settings: Settings, arguments: argparse.Namespace, screen: Screen, keyboard: Keyboard) -> Repl:
    """What takes the entries, with the imports it needs."""
    from coder.terminal.interrupts import held

    with held():
        from coder.terminal.repl import Repl

        session = _made(settings, arguments, can_ask=True)
        repl = Repl(session, _remembered(session, arguments, titles=settings.titles), screen, keyboard, verbose=arguments.verbose)
    if arguments.resume == "":
        repl.commands.run("resume", "")
    elif arguments.resume or arguments.continue_:
        repl.replay()
    return repl


@cache
def _load_behind() -> None:
    """Import what the first run needs, while the person reads and types."""
    def load() -> None:
        import openai  # noqa: F401, I001 (the slowest first)
        import rich.console  # noqa: F401
        import coder.terminal.repl  # noqa: F401

    behind = threading.Timer(AFTER_PROMPT, load)
    behind.daemon = True
    behind.start()


def _one_shot(session: Session, prompt: str, arguments: argparse.Namespace) -> int:
    with _shown(arguments, session.stalls) as show:
        result = session.run(prompt, show)
    if arguments.output_format == "json":
        end = {"stop_reason": result.stop_reason, "text": result.text, "usage": dataclasses.asdict(result.usage), "steps": result.steps,
               "error": result.error and result.error.to_dict(), "session_id": session.tools.session_id, "messages": result.messages}
        _print(_json(end))
    elif arguments.output_format == "text" and not sys.stdout.isatty() and result.stop_reason not in ("error", "aborted"):
        _print(result.text)
    if result.error and arguments.quiet and arguments.output_format == "text":
        from coder.terminal.render import error_text

        sys.stderr.write(error_text(result.text, result.error) + "\n")  # quiet is without progress, not without errors
    if result.error and result.error.kind in PASSING:
        return TRANSIENT
    return EXIT_CODES[result.stop_reason]


@contextlib.contextmanager
def _shown(arguments: argparse.Namespace, limits: tuple[float, float]) -> Iterator[Callable[[Any], None]]:
    """What is done with the events of a one-shot run. `limits`: seconds to the first byte and between two."""
    if arguments.output_format == "stream-json":
        yield lambda event: _print(_json(event.to_dict()))
        return
    from coder.terminal.asking import Asker
    from coder.terminal.keyboard import Keyboard
    from coder.terminal.render import Renderer
    from coder.terminal.screen import Screen
    from coder.types import MessageEnd

    to_terminal = arguments.output_format == "text" and sys.stdout.isatty()
    null = open(os.devnull, "w") if arguments.quiet else None  # noqa: SIM115 (closed below)
    screen = Screen(null or sys.stderr, sys.stdout)
    render = Renderer(screen, show_text=to_terminal, verbose=arguments.verbose, limits=limits)
    asker = Asker(screen, render, Keyboard(data_folder() / "history", waiting=lambda: None)) if arguments.can_ask else None

    def show(event: Event) -> None:
        """What the model says before it is done is progress; only the last of it is the answer."""
        if not to_terminal and isinstance(event, MessageEnd) and event.message.get("tool_calls") and event.message["content"]:
            screen.line(clean(event.message["content"]))
        render(event)
        if asker:
            asker(event)

    try:
        yield show
    finally:
        screen.status("")
        screen.finish_line()
        if null:
            null.close()


def _json(value: Any) -> str:
    """In a line; on a terminal with nothing in it but printable ASCII."""
    text = json.dumps(value, ensure_ascii=sys.stdout.isatty(), default=repr)
    return text.replace("\x7f", "\\u007f") if sys.stdout.isatty() else text


def _print(text: str) -> None:
    """A line on stdout. Raises BrokenPipeError, having said why where it is not the reader who left."""
    try:
        sys.stdout.write(text.encode("utf-8", "replace").decode() + "\n")
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            sys.stderr.write(f"coder: the output cannot be written: {error.strerror}\n")
        raise BrokenPipeError from None


def _demo(arguments: argparse.Namespace) -> int:
    """The scripted server, a scratch copy of the broken project, and a run over them."""
    from coder.features.demo import PROMPT, demo_server, scratch_project

    folder = scratch_project()
    os.chdir(folder)
    sys.stderr.write("This is a demonstration. A script answers in the place of a language model, through a real server on this\n"
                     f"machine; requests, tools, files and tests are real. It works in a scratch copy: {folder}\n\n> {PROMPT}\n")
    with demo_server() as server:
        arguments.no_session = True
        arguments.yolo, arguments.OPENAI_BASE_URL, arguments.OPENAI_MODEL = True, server.url, "script"
        code = _session(arguments, PROMPT)
    sys.stderr.write(f"\nSee for yourself: cd {folder} && python3 -m unittest\n")
    return code
