"""The flags of the command line, and its exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from coder import __version__
from coder.cli.settings import LEVELS, ConfigError

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

DESCRIPTION = """\
A coding agent for the terminal. Without a PROMPT it opens a session; with one (or with text on stdin)
it answers and exits. `{0} --demo` shows it at work without a key."""
EPILOG = """\
exit codes: 0 done · 1 failed · 2 usage or configuration · 3 stopped by a limit · 75 try again later · 130 Ctrl+C
settings: OPENAI_API_KEY, OPENAI_BASE_URL, OPENAI_MODEL and more: see `{0} config`
also: {0} config, sessions, export ID, trace FILE (a run recorded with --trace), demo --port N"""

SWITCH = {"action": "store_true"}
# Names, the value's name ("" for a switch), help; in FURTHER the rest of what argparse wants to know.
FLAGS = (
    ("-p --print", "", "answer and exit, also with no PROMPT on a terminal's stdin"),
    ("-i --interactive", "", "open a session with PROMPT as its first entry"),
    ("-c --continue", "", "continue the newest conversation of this folder"),
    ("-r --resume", "ID", "continue this conversation; without ID choose one"),
    ("--no-session", "", "keep nothing of this conversation on disk"),
    ("--no-compaction", "", "never shorten the conversation; a full context ends the run"),
    ("--agent", "NAME", "the agent: build (default), plan, or one of your own"),
    ("--plan", "", "read and plan, change nothing: --agent plan"),
    ("-y --yolo", "", "do not ask about commands and edits; what a rule denies stays denied"),
    ("--allow", "RULE", "KIND or KIND:PATTERN to allow, such as edit or 'bash:git diff *'"),
    ("--deny", "RULE", "KIND or KIND:PATTERN to deny; the last rule that matches decides"),
    ("--output-format", "", "json: one object at the end; stream-json: one event a line"),
    ("--system-prompt", "TEXT", "replace the system prompt"),
    ("--append-system-prompt", "TEXT", "add to the system prompt"),
    ("-C --cwd", "DIR", "work in this folder"),
    ("--trace", "FILE", "append all that is sent and received to FILE; `trace FILE` shows it"),
    ("--demo", "", "repair a small broken project with a scripted model; no key, no network"),
    ("-q --quiet", "", "no progress on stderr"),
    ("-v --verbose", "", "show reasoning and whole outputs"),
    ("--version", "", "show program's version number and exit"),
    # These go before a setting, whose name in `config.NAMES` is their `dest`.
    ("-m --model", "NAME", "the model's name"),
    ("--base-url", "URL", "an OpenAI-compatible server, mostly ending in /v1"),
    ("--max-steps", "N", "model calls of one run (default 100)"),
    ("--max-seconds", "S", "seconds of one run (default: no limit)"),
    ("--context-window", "TOKENS", "default by model family"),
    ("--idle-timeout", "S", "seconds without data until a request is repeated (180; 0: never)"),
    ("--sandbox", "", "commands write only in this folder; on: none runs without that (auto)"),
    ("--sandbox-network", "", "off: commands in the sandbox have no network (default on)"),
    ("--allow-http", "", "allow http:// to another machine (default: https, or this machine)"),
    ("--reasoning", "LEVEL", f"how much the model thinks: {', '.join(LEVELS)} (default off)"),
)
FURTHER: dict[str, dict[str, Any]] = {
    "--continue": SWITCH | {"dest": "continue_"},
    "--resume": {"nargs": "?", "const": ""},
    "--agent": {"default": ""},
    "--plan": {"dest": "agent", "action": "store_const", "const": "plan"},
    "--allow": {"dest": "rules", "action": "append", "type": lambda text: ("allow", text)},
    "--deny": {"dest": "rules", "action": "append", "type": lambda text: ("deny", text)},
    "--output-format": {"choices": FORMATS, "default": "text"},
    "--system-prompt": {"default": ""},
    "--append-system-prompt": {"default": ""},
    "--cwd": {"default": "."},
    "--trace": {"type": os.path.abspath},
    "--version": {"action": "version", "version": f"coder {__version__}"},
    "--model": {"dest": "OPENAI_MODEL"},
    "--base-url": {"dest": "OPENAI_BASE_URL"},
    "--max-steps": {"dest": "CODER_MAX_STEPS", "type": int},
    "--max-seconds": {"dest": "CODER_MAX_SECONDS", "type": float},
    "--context-window": {"dest": "CODER_CONTEXT_WINDOW", "type": int},
    "--idle-timeout": {"dest": "CODER_IDLE_TIMEOUT", "type": float},
    "--sandbox": {"dest": "CODER_SANDBOX", "choices": ("auto", "on", "off")},
    "--sandbox-network": {"dest": "CODER_SANDBOX_NETWORK", "choices": ("on", "off")},
    "--allow-http": {"dest": "CODER_ALLOW_HTTP", "action": "store_const", "const": "on"},
    "--reasoning": {"dest": "CODER_REASONING", "choices": LEVELS},
}


class Flags(argparse.ArgumentParser):
    """A parser whose errors are a ConfigError, below the usage."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        raise ConfigError(message)


def program() -> str:
    """How the program was started."""
    return "python -m coder" if os.path.basename(sys.argv[0]) == "__main__.py" else "coder"


def parser() -> Flags:
    flags = Flags(
        prog=program(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=DESCRIPTION.format(program()),
        epilog=EPILOG.format(program()),
    )
    what = "what to do; stdin next to it is context"
    flags.add_argument("prompt", nargs="*", metavar="PROMPT", help=what)
    for names, value, text in FLAGS:
        further = FURTHER.get(names.split()[-1], {} if value else SWITCH)
        options: dict[str, Any] = further | ({"metavar": value} if value else {})
        flags.add_argument(*names.split(), help=text, **options)
    return flags


def format_of(argv: Sequence[str]) -> str:
    """The output format that a command line asks for, whatever else is wrong with it."""
    flags = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    flags.add_argument("--output-format", choices=FORMATS, default="text")
    try:
        return str(flags.parse_known_args(argv)[0].output_format)
    except argparse.ArgumentError:
        return "text"
