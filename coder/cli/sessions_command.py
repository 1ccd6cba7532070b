"""`coder sessions`: list, search, show, fork and remove what was kept."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from coder.cli.config import data_folder
from coder.cli.flags import Flags, program
from coder.cli.wording import session_line
from coder.permissions.sanitize import strip_controls
from coder.sessions.store import SessionInfo, Store, StoreError

VERBS = ("list", "search", "show", "fork", "rm")


def sessions_file() -> Path:
    return data_folder() / "sessions.db"


def main(argv: Sequence[str]) -> int:
    """Run it; returns the exit code."""
    flags = Flags(
        prog=f"{program()} sessions",
        description="The conversations that were kept on this machine.",
    )
    verbs = flags.add_subparsers(dest="verb", metavar="|".join(VERBS))
    listing = verbs.add_parser("list", help="those of this folder, the newest first (the default)")
    listing.add_argument("-a", "--all", action="store_true", help="of all folders")
    verbs.add_parser("search", help="those with these words in title or text").add_argument(
        "words", nargs="+"
    )
    verbs.add_parser("show", help="what was said, and which tools were called").add_argument("id")
    verbs.add_parser("fork", help="make a copy to go on with; prints its id").add_argument("id")
    verbs.add_parser("rm", help="remove them for ever").add_argument("ids", nargs="+", metavar="id")
    given = flags.parse_args(argv)
    try:
        with contextlib.closing(Store(sessions_file())) as store:
            code = _DO[given.verb or "list"](store, given)
            if store.notice:
                sys.stderr.write(f"coder: {strip_controls(store.notice)}\n")
            return code
    except StoreError as error:
        sys.stderr.write(f"coder: {strip_controls(str(error))}\n")
        return 2


def _say(text: str) -> None:
    """A line on stdout. A title is somebody's text, whether a terminal or a program reads the list."""
    sys.stdout.write(strip_controls(text) + "\n")


def _list(store: Store, given: argparse.Namespace) -> int:
    everywhere = getattr(given, "all", False)
    infos = store.sessions(None if everywhere else str(Path.cwd()))
    for info in infos:
        _say(f"{session_line(info)}{f'  {info.directory}' if everywhere else ''}")
    if not infos:
        sys.stderr.write(
            "There is no conversation"
            + (".\n" if everywhere else " of this folder; --all lists those of others.\n")
        )
    return 0


def _search(store: Store, given: argparse.Namespace) -> int:
    found = store.search(" ".join(given.words))
    for each in found:
        _say(f"{session_line(each.session)}  {each.session.directory}\n    {each.snippet}")
    return 0 if found else 1


def _show(store: Store, given: argparse.Namespace) -> int:
    from coder.cli.app import TOOLS
    from coder.cli.render import print_history
    from coder.cli.screen import Screen
    from coder.cli.wording import tokens
    from coder.sessions.recorder import to_model_messages  # late: the other verbs need none of it
    from coder.toolset import Toolset

    info = store.find(given.id)
    screen = Screen(sys.stdout)
    screen.line(
        f"{session_line(info)}\n{info.directory} · {info.model} · {tokens(info.usage)}", "dim"
    )
    print_history(screen, Toolset(TOOLS), to_model_messages(store, info.id), turns=0)
    return 0


def _fork(store: Store, given: argparse.Namespace) -> int:
    _say(store.fork(store.find(given.id).id))
    return 0


def _remove(store: Store, given: argparse.Namespace) -> int:
    for each in given.ids:
        info: SessionInfo = store.find(each)
        store.remove(info.id)
        _say(f"removed {session_line(info)}")
    return 0


_DO: dict[str, Callable[[Store, argparse.Namespace], int]] = {
    "list": _list,
    "search": _search,
    "show": _show,
    "fork": _fork,
    "rm": _remove,
}
