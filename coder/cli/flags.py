"""The flags of the command line, and its exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, NoReturn

from coder import __version__
from coder.cli.settings import SETTINGS, ConfigError, field_of

USAGE, LIMIT, TRANSIENT, INTERRUPTED = 2, 3, 75, 130
EXIT_CODES = {"stop": 0, "error": 1, "content_filter": 1, "aborted": INTERRUPTED}  # others: LIMIT
DESCRIPTION = """\
A coding agent for the terminal. Without a PROMPT it opens a session; with one (or with text on stdin)
it answers and exits. `{0} --demo` shows it at work without a key."""
EPILOG = """\
exit codes: 0 done · 1 failed · 2 usage or configuration · 3 stopped by a limit · 75 try again later · 130 Ctrl+C
settings: OPENAI_API_KEY, OPENAI_BASE_URL, OPENAI_MODEL and more: see `{0} config`
also: {0} config, sessions, export ID, trace FILE (a run recorded with --trace), demo --port N"""

SWITCH: dict[str, Any] = {"action": "store_true"}
# The names, what the value is called ("": a switch), the help; FURTHER has what else argparse has to know.
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
    ("--output-format", "", "json: one object at the end; stream-json: one event a line"),
    ("--system-prompt", "TEXT", "replace the system prompt"),
    ("--append-system-prompt", "TEXT", "add to the system prompt"),
    ("--image", "FILE", "attach an image to the first prompt; can be given again"),
    ("-C --cwd", "DIR", "work in this folder"),
    ("--trace", "FILE", "append all that is sent and received to FILE; `trace FILE` shows it"),
    ("--demo", "", "repair a small broken project with a scripted model; no key, no network"),
    ("--plain", "", "show answers as they come, without styles for their Markdown"),
    ("-q --quiet", "", "no progress on stderr"),
    ("-v --verbose", "", "show reasoning and whole outputs"),
    ("--version", "", "show program's version number and exit"),
)
FURTHER: dict[str, dict[str, Any]] = {
    "--continue": SWITCH | {"dest": "continue_"},
    "--resume": {"nargs": "?", "const": ""},
    "--plan": {"dest": "agent", "action": "store_const", "const": "plan"},
    "--plain": {"dest": "CODER_MARKDOWN", "action": "store_const", "const": "off"},
    "--allow": {"dest": "rules", "action": "append", "type": lambda text: ("allow", text)},
    "--deny": {"dest": "rules", "action": "append", "type": lambda text: ("deny", text)},
    "--output-format": {"choices": ("text", "json", "stream-json"), "default": "text"},
    "--image": {"action": "append"},
    "--trace": {"type": os.path.abspath},
    "--version": {"action": "version", "version": f"coder {__version__}"},
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
    """All flags. What one gives a setting is a text under the setting's name, None where it is not given."""
    flags = Flags(
        prog=program(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=DESCRIPTION.format(program()),
        epilog=EPILOG.format(program()),
    )
    what = "what to do; stdin next to it is context"
    flags.add_argument("prompt", nargs="*", metavar="PROMPT", help=what)
    for names, value, text in FLAGS:
        options = FURTHER.get(names.split()[-1], {} if value else SWITCH)
        options = options | ({"metavar": value} if value else {})
        flags.add_argument(*names.split(), help=text, **options)
    for name, setting in SETTINGS.items():
        if setting.value is not None:
            given = setting.value
            options = {"metavar": given} if given else {"action": "store_const", "const": "on"}
            short = ["-m"] if name == "OPENAI_MODEL" else []
            words = [*short, f"--{field_of(name).replace('_', '-')}"]
            flags.add_argument(*words, dest=name, help=setting.help, **options)
    return flags
