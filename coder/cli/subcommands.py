"""The subcommands: config, demo, sessions, export and trace. Each takes its words and returns the exit code."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coder.cli.config import data_folder, keys_of
from coder.cli.flags import Flags, program
from coder.cli.optional import needed
from coder.cli.settings import ConfigError
from coder.cli.wording import session_line
from coder.permissions.sanitize import strip_controls

if TYPE_CHECKING:
    from coder.sessions.store import Store

Verb = Callable[["Store", argparse.Namespace], int]
FORMATS = ("md", "html", "json")


def _flags(name: str, description: str, epilog: str = "") -> Flags:
    return Flags(prog=f"{program()} {name}", description=description, epilog=epilog)


def config(words: Sequence[str]) -> int:
    """Print the settings that there are, to be put into a .env."""
    sys.stdout.write(Path(__file__).parents[1].joinpath("env.example").read_text("utf-8"))
    return 0


def demo(words: Sequence[str]) -> int:
    """Serve the demonstration's scripted model."""
    from coder.cli.signals import raise_on_sigint

    module = needed("coder.devtools.demo", "demo")
    raise_on_sigint()
    return int(module.main(list(words)))


# ---- sessions ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _open_store(purpose: str) -> Iterator[Store]:
    """The store of this user. What goes wrong with it is a ConfigError."""
    module = needed("coder.sessions.store", purpose)
    try:
        with contextlib.closing(module.Store(data_folder() / "sessions.db")) as store:
            yield store
            if store.notice:
                sys.stderr.write(f"coder: {strip_controls(store.notice)}\n")
    except module.StoreError as error:
        raise ConfigError(str(error)) from None


def sessions(words: Sequence[str]) -> int:
    """List, search, show, fork and remove what was kept."""
    flags = _flags("sessions", "The conversations that were kept on this machine.")
    verbs = flags.add_subparsers(dest="verb", metavar="list|search|show|fork|rm")
    flags.add_argument("-a", "--all", action="store_true", help="of all folders")
    flags.set_defaults(verb="list", run=_list)
    for name, (run, text, argument, number) in VERBS.items():
        verb = verbs.add_parser(name, help=text)
        verb.set_defaults(run=run)
        if argument:
            verb.add_argument(argument, nargs=number)
        else:
            verb.add_argument(
                "-a", "--all", action="store_true", default=argparse.SUPPRESS, help="of all folders"
            )
    given = flags.parse_args(words)
    with _open_store("sessions") as store:
        return int(given.run(store, given))


def _print(text: str) -> None:
    sys.stdout.write(strip_controls(text) + "\n")  # titles hold any text, whoever reads the list


def _list(store: Store, given: argparse.Namespace) -> int:
    infos = store.sessions(None if given.all else str(Path.cwd()))
    for info in infos:
        _print(f"{session_line(info)}{f'  {info.directory}' if given.all else ''}")
    if not infos:
        where = "" if given.all else " of this folder; --all lists those of others"
        sys.stderr.write(f"There is no conversation{where}.\n")
    return 0


def _search(store: Store, given: argparse.Namespace) -> int:
    found = store.search(" ".join(given.words))
    for each in found:
        _print(f"{session_line(each.session)}  {each.session.directory}\n    {each.snippet}")
    return 0 if found else 1


def _show(store: Store, given: argparse.Namespace) -> int:
    from coder.cli.render import print_history
    from coder.cli.screen import Screen
    from coder.cli.setup import TOOLS  # late: the other verbs need none of these
    from coder.cli.wording import tokens
    from coder.sessions.recorder import to_model_messages
    from coder.toolset import Toolset

    info = store.find(given.id)
    screen = Screen(sys.stdout)
    screen.line(
        f"{session_line(info)}\n{info.directory} · {info.model} · {tokens(info.usage)}", "dim"
    )
    print_history(screen, Toolset(TOOLS), to_model_messages(store, info.id), turns=0)
    return 0


def _fork(store: Store, given: argparse.Namespace) -> int:
    _print(store.fork(store.find(given.id).id))
    return 0


def _remove(store: Store, given: argparse.Namespace) -> int:
    for each in given.id:
        info = store.find(each)
        store.remove(info.id)
        _print(f"removed {session_line(info)}")
    return 0


# What it does, the help, the argument and how many of it there may be
VERBS: dict[str, tuple[Verb, str, str, str | None]] = {
    "list": (_list, "those of this folder, the newest first (the default)", "", None),
    "search": (_search, "those with these words in title or text", "words", "+"),
    "show": (_show, "what was said, and which tools were called", "id", None),
    "fork": (_fork, "make a copy to continue; prints its id", "id", None),
    "rm": (_remove, "delete them", "id", "+"),
}


# ---- export --------------------------------------------------------------------------------------


def export(words: Sequence[str]) -> int:
    """Write a conversation as users read it, on stdout or into a file. Secrets are taken out of it."""
    flags = _flags("export", "A conversation as readable text, on stdout or in a file.")
    flags.add_argument("id", help="see `coder sessions`")
    flags.add_argument("--format", choices=FORMATS, default="md")
    output = "a new file; its ending names the format"
    flags.add_argument("-o", "--output", metavar="FILE", help=output)
    given = flags.parse_args(words)
    keys = keys_of(Path.cwd())
    module = needed("coder.sessions.export", "export")
    with _open_store("export") as store:
        session_id = store.find(given.id).id
        if given.output:
            path = write_export(store, session_id, given.output, *keys)
            sys.stderr.write(f"Written to {path}.\n")
            return 0
        text = module.export(store, session_id, given.format, module.redactor(*keys))
    sys.stdout.write(strip_controls(text) if sys.stdout.isatty() else text)
    return 0


def write_export(store: Store, session_id: str, name: str, *keys: str) -> Path:
    """Write the file, private and new. Its ending says its format; without a name it has the session's id. Raises
    StoreError, and ConfigError for another ending and for a file that cannot be written or exists."""
    module = needed("coder.sessions.export", "export")
    path = Path(os.path.expanduser(name or f"session-{session_id}.md"))
    ending = path.suffix.removeprefix(".") or "md"
    if ending not in FORMATS:
        endings = ", ".join(f".{each}" for each in FORMATS)
        raise ConfigError(f"a file of an export ends in {endings}, not in .{ending}")
    text = module.export(store, session_id, ending, module.redactor(*keys))
    try:
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(number, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    return path


# ---- trace ---------------------------------------------------------------------------------------


def trace(words: Sequence[str]) -> int:
    """Show a recorded run as a table of its steps, or write it as a page."""
    report = needed("coder.devtools.trace_report", "trace")
    about = "A run that was recorded with --trace FILE, step by step."
    flags = _flags("trace", about, report.MEANING)
    flags.add_argument("file", metavar="FILE")
    html = "write one page with every message instead; it needs no network"
    flags.add_argument("--html", metavar="OUT", help=html)
    given = flags.parse_args(words)
    try:
        text = report.show(given.file, given.html)
    except OSError as error:
        raise ConfigError(f"{error.filename or given.file}: {error.strerror}") from None
    except report.TraceError as error:
        raise ConfigError(f"{given.file}: {error}") from None
    sys.stdout.write(text)
    return 0
