"""The flags of the command line, and its exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from coder import __version__
from coder.permissions.sanitize import strip_controls

USAGE, LIMIT, TRANSIENT, INTERRUPTED = 2, 3, 75, 130
EXIT_CODES = {
    "stop": 0,
    "content_filter": 1,
    "error": 1,
    "max_steps": LIMIT,
    "max_time": LIMIT,
    "doom_loop": LIMIT,
    "length": LIMIT,
    "aborted": INTERRUPTED,
}
FORMATS = ("text", "json", "stream-json")
# Types.Reasoning, which is slow to import (a test compares)
LEVELS = (
    "off",
    "minimal",
    "low",
    "medium",
    "high",
    "xhigh",
)


class UsageError(Exception):
    """The command line is wrong; stderr says how."""


class Flags(argparse.ArgumentParser):
    """One whose errors, which hold what was given, are cleaned."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        sys.stderr.write(f"{self.prog}: error: {strip_controls(message)}\n")
        raise UsageError(message)


def program() -> str:
    """How the program was started."""
    return "python -m coder" if os.path.basename(sys.argv[0]) == "__main__.py" else "coder"


def parser() -> argparse.ArgumentParser:
    flags = Flags(
        prog=program(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="A coding agent for the terminal. Without a PROMPT it opens a session; with one (or with text on stdin)\n"
        f"it answers and ends. `{program()} --demo` shows it at work without a key.",
        epilog="exit codes: 0 done · 1 failed · 2 usage or configuration · 3 stopped by a limit · 75 try again later · 130 Ctrl+C\n"
        f"settings: OPENAI_API_KEY, OPENAI_BASE_URL, OPENAI_MODEL and more: see `{program()} config`\n"
        f"also: {program()} config, sessions, export ID, trace FILE (a run recorded with --trace), demo --port N",
    )
    flags.add_argument(
        "prompt", nargs="*", metavar="PROMPT", help="what to do; stdin next to it is context"
    )
    flags.add_argument(
        "-p",
        "--print",
        action="store_true",
        help="answer and end, also with no PROMPT on a terminal's stdin",
    )
    flags.add_argument(
        "-i",
        "--interactive",
        action="store_true",
        help="open a session with PROMPT as its first entry",
    )
    flags.add_argument(
        "-c",
        "--continue",
        dest="continue_",
        action="store_true",
        help="go on with the newest conversation of this folder",
    )
    flags.add_argument(
        "-r",
        "--resume",
        nargs="?",
        const="",
        metavar="ID",
        help="go on with this conversation; without ID choose one",
    )
    flags.add_argument(
        "--no-session", action="store_true", help="keep nothing of this conversation on disk"
    )
    flags.add_argument(
        "--agent",
        metavar="NAME",
        default="",
        help="who works: build (default), plan, or one of your own",
    )
    flags.add_argument(
        "--plan",
        dest="agent",
        action="store_const",
        const="plan",
        help="read and plan, change nothing: --agent plan",
    )
    flags.add_argument(
        "-y",
        "--yolo",
        action="store_true",
        help="run commands and make edits without asking; what a rule denies stays denied, and a recursive delete outside\n"
        "of the folder is asked about",
    )
    flags.add_argument(
        "--allow",
        dest="rules",
        action="append",
        type=lambda text: ("allow", text),
        metavar="RULE",
        help="KIND or KIND:PATTERN that needs no yes, such as edit or 'bash:git diff *'",
    )
    flags.add_argument(
        "--deny",
        dest="rules",
        action="append",
        type=lambda text: ("deny", text),
        metavar="RULE",
        help="and what is never done; of all rules the last that fits decides",
    )
    flags.add_argument(
        "--output-format",
        choices=FORMATS,
        default="text",
        help="json: one object at the end; stream-json: one event a line",
    )
    flags.add_argument("--system-prompt", metavar="TEXT", default="", help="instead of ours")
    flags.add_argument("--append-system-prompt", metavar="TEXT", default="", help="after ours")
    flags.add_argument("-C", "--cwd", metavar="DIR", default=".", help="work in this folder")
    flags.add_argument(
        "--trace",
        metavar="FILE",
        type=os.path.abspath,
        help="append all that is sent and received, with times, to FILE; `trace FILE` shows it",
    )
    flags.add_argument(
        "--demo",
        action="store_true",
        help="repair a small broken project with a scripted model; no key, no network",
    )
    flags.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")
    flags.add_argument(
        "-v", "--verbose", action="store_true", help="show reasoning and whole outputs"
    )
    flags.add_argument("--version", action="version", version=f"coder {__version__}")
    _add_settings(flags)
    return flags


def format_of(argv: Sequence[str]) -> str:
    """The output format that a command line asks for, whatever else is wrong with it."""
    flags = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    flags.add_argument("--output-format", choices=FORMATS, default="text")
    try:
        return str(flags.parse_known_args(argv)[0].output_format)
    except argparse.ArgumentError:
        return "text"


def _add_settings(flags: argparse.ArgumentParser) -> None:
    """The flags that go before a setting of the same name, whose values are in `config.NAMES`."""
    flags.add_argument(
        "-m", "--model", dest="OPENAI_MODEL", metavar="NAME", help="the model's name"
    )
    flags.add_argument(
        "--base-url",
        dest="OPENAI_BASE_URL",
        metavar="URL",
        help="an OpenAI-compatible server, mostly ending in /v1",
    )
    flags.add_argument(
        "--max-steps",
        dest="CODER_MAX_STEPS",
        type=int,
        metavar="N",
        help="model calls of one run (default 100)",
    )
    flags.add_argument(
        "--max-seconds",
        dest="CODER_MAX_SECONDS",
        type=float,
        metavar="S",
        help="seconds of one run (default: no limit)",
    )
    flags.add_argument(
        "--context-window",
        dest="CODER_CONTEXT_WINDOW",
        type=int,
        metavar="TOKENS",
        help="default by model family",
    )
    flags.add_argument(
        "--idle-timeout",
        dest="CODER_IDLE_TIMEOUT",
        type=float,
        metavar="S",
        help="seconds without data until a stream is given up (default 180, 0: never)",
    )
    flags.add_argument(
        "--sandbox",
        dest="CODER_SANDBOX",
        choices=["auto", "on", "off"],
        help="commands write only in this folder: where the kernel can do it (auto), or not at all without it (on)",
    )
    flags.add_argument(
        "--sandbox-network",
        dest="CODER_SANDBOX_NETWORK",
        choices=["on", "off"],
        help="off: commands in the sandbox have no network (default on)",
    )
    flags.add_argument(
        "--allow-http",
        dest="CODER_ALLOW_HTTP",
        action="store_const",
        const="on",
        help="also for a server on another machine (default: https, or http on this machine)",
    )
    flags.add_argument(
        "--reasoning",
        dest="CODER_REASONING",
        metavar="LEVEL",
        choices=LEVELS,
        help=f"how much the model thinks: {', '.join(LEVELS)} (default off: as the server does by itself)",
    )
