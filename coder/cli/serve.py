"""`coder serve`: its flags, its token, and the socket on which it listens."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from coder.cli.flags import subcommand_flags
from coder.cli.process import collect_garbage, handling
from coder.cli.subcommands import without_package
from coder.permissions.redact import Redactor, redact_logs
from coder.sessions.store import FILE, Store
from coder.settings import data_folder
from coder.sources import load
from coder.tools.processes import adopt_orphans

LOOPBACK = "127.0.0.1"
TOKEN = "CODER_SERVE_TOKEN"  # in the environment; on a command line every user could read it
MIN_TOKEN = 16  # characters
ABOUT = f"""\
The agent over HTTP: for clients of opencode's API, for curl, and as a page for a browser. Whoever
asks needs the token. It is a random one, which is printed here once, or that of {TOKEN}."""


def main(words: Sequence[str]) -> int:
    """Serve until Ctrl+C; returns the exit code."""
    flags = subcommand_flags("serve", ABOUT)
    flags.add_argument("--port", type=int, default=4096, help="default 4096; 0 takes a free one")
    about = f"listen on another address than {LOOPBACK}; {TOKEN} has to be set"
    flags.add_argument("--host", metavar="ADDRESS", default=LOOPBACK, help=about)
    arguments = flags.parse_args(words)
    token = os.environ.pop(TOKEN, "")
    if token and not re.fullmatch(f"[!-~]{{{MIN_TOKEN},}}", token):
        flags.error(f"{TOKEN} needs at least {MIN_TOKEN} characters, of ASCII and without blanks")
    if arguments.host != LOOPBACK and not token:
        flags.error(f"--host needs a token of your own, in {TOKEN}")
    try:
        from coder.doors.serve import serve  # late: the packages are an extra
    except ModuleNotFoundError:
        raise without_package("serve", "serve") from None
    settings = load(Path.cwd())  # what is wrong with them is said now
    store = Store(data_folder() / FILE)
    try:
        listener = listen(arguments.host, arguments.port)
    except (OSError, OverflowError) as error:
        flags.error(f"port {arguments.port}: {getattr(error, 'strerror', error)}")
    # For the whole process, which no other program shares
    adopt_orphans()
    redact_logs(Redactor(*settings.keys))
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    url = f"http://{host}:{listener.getsockname()[1]}/"
    lines = f"Serving {url}\n"
    if not token:
        token = secrets.token_urlsafe(24)
        lines += f"Token: {token}\nPage: {url}#token={token}\n"

    def ready() -> None:
        sys.stdout.write(lines)
        sys.stdout.flush()

    collect_garbage()
    with handling(signal.SIGINT):  # the server has its own handler, and raises the signal again
        serve(store, listener, host, token, ready)
    return 0


def listen(host: str, port: int) -> socket.socket:
    """Raises OSError and OverflowError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen()
    return listener
