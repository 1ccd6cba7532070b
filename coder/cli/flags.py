"""The flags of the command line. A setting has one, too, by its row in settings.py."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any, NoReturn

from coder import __version__
from coder.settings import SETTINGS, ConfigError, field_of, needed, program, value_of

DESCRIPTION = """\
A coding agent for the terminal. Without a PROMPT it opens a session; with one (or with text on stdin)
it answers and exits. `%(prog)s --demo` shows it at work without a key."""
BELOW = {
    "exit codes": "0 done · 1 failed · 2 usage or configuration · 3 stopped by a limit · 75 try again later · 130 Ctrl+C",
    "settings": "OPENAI_API_KEY, OPENAI_BASE_URL, OPENAI_MODEL and more: see `%(prog)s config`",
    "also": "%(prog)s config, sessions, export ID, trace FILE (a run recorded with --trace), demo --port N, tour, "
    "acp (for editors)",
}


def read_rule(action: str, text: str) -> object:
    return needed("coder.permissions.rules", "a rule").rule_of(text, action)


def check_flag(name: str, flag: str, text: str) -> str:
    """The text that a flag gives a setting. Raises ConfigError; an empty text counts as none."""
    text = text.strip()
    if text:
        value_of(name, text, flag)
    return text


def open_trace(path: str) -> object:
    """The file of --trace. Raises ConfigError."""
    try:
        return needed("coder.devtools.trace", "--trace").Trace(path)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--trace {path}: {why}") from None


ON: dict[str, Any] = {"action": "store_true"}
RULES: dict[str, Any] = {"dest": "rules", "action": "append", "default": []}
# The names, what the value is called ("": a switch), the help; FURTHER has what else argparse has
# to know. Paths are those of the folder that the program is started in.
FLAGS = (
    ("-p --print", "", "answer and exit, also with no PROMPT on a terminal's stdin"),
    ("-i --interactive", "", "open a session with PROMPT as its first entry"),
    ("-c --continue", "", "continue the newest conversation of this folder"),
    ("-r --resume", "WHICH", "continue a conversation, by number, name or ID; alone: choose one"),
    ("--no-session", "", "keep nothing of this conversation on disk"),
    ("--no-compaction", "", "never shorten the conversation; a full context ends the run"),
    ("--agent", "NAME", "the agent: build (default), plan, or one of your own"),
    ("--plan", "", "read and plan, change nothing: --agent plan"),
    ("-y --yolo", "", "do not ask about commands and edits; what a rule denies stays denied"),
    ("--allow", "RULE", "KIND or KIND:PATTERN to allow, such as edit or 'bash:git diff *'"),
    ("--deny", "RULE", "KIND or KIND:PATTERN to deny; the last rule that matches decides"),
    ("--output-format", "FORMAT", "text, json (one object) or stream-json (one event a line)"),
    ("--system-prompt", "TEXT", "replace the system prompt"),
    ("--append-system-prompt", "TEXT", "add to the system prompt"),
    ("--image", "FILE", "attach an image to the first prompt; can be given again"),
    ("-C --cwd", "DIR", "work in this folder"),
    ("--trace", "FILE", "append all that is sent and received to FILE; `trace FILE` shows it"),
    ("--demo", "", "repair a small broken project with a scripted model; no key, no network"),
    ("--step", "", "stop before each request and each tool, and show what is new"),
    ("--plain", "", "show answers as they come, without styles for their Markdown"),
    ("-q --quiet", "", "no progress on stderr"),
    ("-v --verbose", "", "show reasoning and whole outputs"),
    ("--version", "", "show program's version number and exit"),
)
FURTHER: dict[str, dict[str, Any]] = {
    "--cwd": {"default": "."},
    "--continue": ON | {"dest": "continue_"},
    "--resume": {"nargs": "?", "const": ""},
    "--plan": {"dest": "agent", "action": "store_const", "const": "plan", "default": ""},
    "--plain": {"dest": "CODER_MARKDOWN", "action": "store_const", "const": "off"},
    "--agent": {"default": ""},
    "--system-prompt": {"default": ""},
    "--append-system-prompt": {"default": ""},
    "--allow": RULES | {"type": partial(read_rule, "allow")},
    "--deny": RULES | {"type": partial(read_rule, "deny")},
    "--output-format": {"choices": ("text", "json", "stream-json"), "default": "text"},
    "--image": {
        "action": "append",
        "default": [],
        "type": lambda path: (path, needed("coder.cli.attach", "--image").image(path)),
    },
    "--trace": {"type": open_trace},
    "--version": {"action": "version", "version": f"coder {__version__}"},
}


class Flags(argparse.ArgumentParser):
    """A parser whose errors are a ConfigError, below the usage."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        raise ConfigError(message)


def subcommand_flags(command: str, about: str, below: str = "") -> Flags:
    return Flags(prog=f"{program()} {command}", description=about, epilog=below)


def parser() -> Flags:
    """All flags.

    The text for a setting is under the setting's name; None if its flag is not given.
    """
    flags = Flags(prog=program(), usage="%(prog)s [FLAGS] [PROMPT]", description=DESCRIPTION)
    flags.add_argument(
        "prompt",
        nargs="*",
        metavar="PROMPT",
        help="what to do; stdin next to it is context",
    )
    for row, value, text in FLAGS:
        names = row.split()
        options = FURTHER.get(names[-1], {})
        if value:
            options = options | {"metavar": value}
        elif not options:
            options = ON
        flags.add_argument(*names, help=text, **options)

    # Those of the settings: a switch if its value has no name
    for name, setting in SETTINGS.items():
        if setting.value is None:
            continue
        flag = f"--{field_of(name).replace('_', '-')}"
        names = ["-m", flag] if name == "OPENAI_MODEL" else [flag]
        options = {"action": "store_const", "const": "on"}
        if setting.value:
            options = {"metavar": setting.value, "type": partial(check_flag, name, flag)}
        flags.add_argument(
            *names,
            dest=name,
            help=setting.help,
            **options,
        )
    for title, text in BELOW.items():
        flags.add_argument_group(title, text)
    return flags
