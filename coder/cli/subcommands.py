"""The subcommands: config, demo, tour, batch, sessions, export, trace. They take words and return
exit codes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from coder import settings, sources
from coder.cli.flags import subcommand_flags
from coder.cli.process import raise_on_sigint
from coder.cli.wording import session_line
from coder.permissions.sanitize import strip_controls
from coder.providers.text import shown_url
from coder.settings import needed

if TYPE_CHECKING:
    from coder.sessions.store import SessionInfo, Store


def _print(text: str) -> None:
    sys.stdout.write(strip_controls(text) + "\n")  # titles hold any text, whoever reads the list


def without_package(purpose: str, extra: str) -> settings.ConfigError:
    """What is said if the package of an extra is missing."""
    from coder.extend.installed import command_for  # late: only here

    return settings.ConfigError(f"{purpose} needs a package: {command_for(extra)}")


def config(words: Sequence[str]) -> int:
    """Print each setting with its value and its source, in the form of a .env."""
    subcommand_flags("config", "All settings, in the form of ~/.config/coder/.env.").parse_args(
        words
    )
    problem = ""
    server = sources.ENVIRONMENT
    found = sources.read_sources(Path.cwd())
    try:
        server = sources.server_source(found)
        sources.load(Path.cwd())
    except settings.ConfigError as error:
        problem = f"# Missing or wrong: {error}\n"
    chosen = sources.choose_texts(found, server)
    _print(f"# For {settings.config_folder()}/.env, which only you should be able to read")
    for name, setting in settings.SETTINGS.items():
        text, source = chosen.get(name, ("", ""))
        _print(f"# {setting.help}; from {source}" if source else f"# {setting.help}")
        if name == "OPENAI_BASE_URL":
            text = shown_url(text)
        if text and name in settings.SECRET:
            _print(f"# {name}=(not shown)")
        else:
            _print(settings.env_line(name, text))
    path = settings.config_folder() / "mcp.json"
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        _print(f"# MCP servers: {', '.join(json.loads(path.read_text())['mcpServers'])} ({path})")
    sys.stdout.write(problem)
    return 0


def demo(words: Sequence[str]) -> int:
    """Serve the demonstration's scripted model, alone and for any client."""
    module = needed("coder.devtools.demo", "demo")
    flags = subcommand_flags("demo", "Serve the demo's scripted model on loopback.")
    flags.add_argument(
        "--port",
        type=int,
        default=8321,
        help="default 8321; 0 takes a free one",
    )
    port = flags.parse_args(words).port
    try:
        server = module.demo_server(port)
    except (OSError, OverflowError) as error:
        flags.error(f"port {port}: {getattr(error, 'strerror', error)}")
    raise_on_sigint()
    sys.stderr.write(
        f"A scripted model, no language model, at {server.url} (model: script)\n"
        f"Try, in another terminal:\n  OPENAI_BASE_URL={server.url} OPENAI_MODEL=script "
        f'{settings.program()} "{module.PROMPT}"\nCtrl+C ends it.\n'
    )
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    return 0


def tour(words: Sequence[str]) -> int:
    """Teach how an agent works, in chapters with exercises."""
    return int(needed("coder.cli.tour", "tour").main(words))


def batch(words: Sequence[str]) -> int:
    """Do many tasks of a file."""
    return int(needed("coder.cli.batch", "batch").main(words))


def acp(words: Sequence[str]) -> int:
    """Serve an editor."""
    subcommand_flags(
        "acp",
        "The agent in an editor that speaks the Agent Client Protocol, which starts this command.",
        "Settings: docs/editors.md",
    ).parse_args(words)
    try:
        from coder.doors.acp import main  # late: the package is an extra
    except ModuleNotFoundError:
        raise without_package("acp", "acp") from None
    main()
    return 0


def mcp_server(words: Sequence[str]) -> int:
    """Serve the agent as a tool for MCP clients."""
    subcommand_flags(
        "mcp-server",
        "The agent as a tool, `code(prompt, cwd)`, for an MCP client, on standard input and output.",
    ).parse_args(words)
    try:
        from coder.doors.mcp_server import server  # late: the package is an extra
    except ModuleNotFoundError:
        raise without_package("mcp-server", "mcp") from None
    server.run()
    return 0


def serve(words: Sequence[str]) -> int:
    """Serve the agent over HTTP."""
    return int(needed("coder.cli.serve", "serve").main(words))


# ---- sessions ------------------------------------------------------------------------------------


def sessions(words: Sequence[str]) -> int:
    """List, search, fork and remove what was kept."""
    arguments = _read_sessions_words(words)
    with _open_store("sessions") as store:
        if arguments.verb == "list":
            return _list(store, arguments.all, arguments.json)
        if arguments.verb == "search":
            return _search(store, " ".join(arguments.words), arguments.json)
        # All are found before one goes: numbers are those of the list
        for info in [store.find(which, str(Path.cwd())) for which in arguments.words]:
            if arguments.verb == "fork":
                from coder.sessions.recorder import fork

                _print(fork(store, info.id))
            else:
                store.remove(info.id)
                _print(f"removed {_line(info)}")
    return 0


def _read_sessions_words(words: Sequence[str]) -> argparse.Namespace:
    flags = subcommand_flags("sessions", "The conversations that were kept on this machine.")
    flags.add_argument(
        "verb",
        nargs="?",
        default="list",
        choices=("list", "search", "fork", "rm"),
        help="list (default), search WORDS, fork WHICH (prints the copy's ID), rm WHICH",
    )
    flags.add_argument(
        "words",
        nargs="*",
        help="words in titles and texts; or numbers of the list, names, IDs",
    )
    flags.add_argument(
        "-a",
        "--all",
        action="store_true",
        help="list those of all folders",
    )
    flags.add_argument(
        "--json",
        action="store_true",
        help="of list and search: an array with an object for each",
    )
    arguments = flags.parse_intermixed_args(words)
    if bool(arguments.words) == (arguments.verb == "list"):
        flags.error(f"{arguments.verb} takes {'no words' if arguments.words else 'words'}")
    if arguments.json and arguments.verb not in ("list", "search"):
        flags.error(f"--json is for list and search, not for {arguments.verb}")
    return arguments


@contextlib.contextmanager
def _open_store(purpose: str) -> Iterator[Store]:
    """The store of this user. Raises StoreError."""
    module = needed("coder.sessions.store", purpose)
    with contextlib.closing(module.Store(settings.data_folder() / module.FILE)) as store:
        yield store
        if store.notice:
            sys.stderr.write(f"coder: {strip_controls(store.notice)}\n")


def _print_json(value: list[dict[str, Any]]) -> None:
    # On a terminal with nothing in it that drives one
    text = json.dumps(value, ensure_ascii=sys.stdout.isatty(), indent=1)
    sys.stdout.write(text + "\n")


def _list(store: Store, of_all: bool, as_json: bool) -> int:
    infos = store.sessions(None if of_all else str(Path.cwd()))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    rows: list[dict[str, Any]] = []
    for number, info in enumerate(infos, 1):  # which `-r` takes, of this folder
        if as_json:
            rows.append(({} if of_all else {"number": number}) | asdict(info))
        elif of_all:
            _print(_line(info))
        else:
            _print(
                session_line(
                    info,
                    head=f"{number:>3}  ",
                    tail=f"  {info.id}",
                    width=width,
                )
            )
    if as_json:
        _print_json(rows)
    elif not infos:
        hint = "" if of_all else " of this folder; --all lists those of others"
        sys.stderr.write(f"There is no conversation{hint}.\n")
    return 0


def _search(store: Store, words: str, as_json: bool) -> int:
    hits = store.search(words)
    if as_json:
        _print_json([asdict(info) | {"snippet": snippet} for info, snippet in hits])
    else:
        below = "\n    " if sys.stdout.isatty() else "  "  # a program reads rows
        for info, snippet in hits:
            _print(f"{_line(info)}{below}{snippet}")
    return 0 if hits else 1


def _line(info: SessionInfo) -> str:
    folder = info.directory.replace("\n", "\\n")  # one row, whatever it is called
    return session_line(info, tail=f"  {info.id}  {folder}")


# ---- export and trace ----------------------------------------------------------------------------


def export(words: Sequence[str]) -> int:
    """Print a conversation as users read it, without secrets."""
    flags = subcommand_flags("export", "A conversation as readable text.")
    flags.add_argument("id", help="see `coder sessions`")
    module = needed("coder.sessions.export", "export")
    flags.add_argument("--format", choices=get_args(module.Format), default="md")
    arguments = flags.parse_args(words)
    secrets = sources.secrets(sources.read_sources(Path.cwd()))
    redactor = module.redactor(*secrets)
    with _open_store("export") as store:
        info = store.find(arguments.id, str(Path.cwd()))
        text = module.export(store, info.id, arguments.format, redactor)
    sys.stdout.write(strip_controls(text) if sys.stdout.isatty() else text)
    return 0


def trace(words: Sequence[str]) -> int:
    """Show a recorded run as a table of its steps or as its requests, or write it as a page."""
    report = needed("coder.devtools.trace_page", "trace")
    flags = subcommand_flags(
        "trace",
        "A run that was recorded with --trace FILE, step by step.",
        report.MEANING,
    )
    flags.add_argument("file", metavar="FILE")
    form = flags.add_mutually_exclusive_group()
    form.add_argument(
        "--diff",
        action="store_true",
        help="show what is new in each request instead, as --step does",
    )
    form.add_argument(
        "--html",
        metavar="OUT",
        help="write one page with every message instead; it needs no network",
    )
    arguments = flags.parse_args(words)
    try:
        text = report.show(arguments.file, arguments.html, arguments.diff)
    except OSError as error:
        path = error.filename or arguments.file
        raise settings.ConfigError(f"{path}: {error.strerror}") from None
    except report.TraceError as error:
        raise settings.ConfigError(f"{arguments.file}: {error}") from None
    sys.stdout.write(text)
    return 0
