"""The settings: one table, from which the flags, the environment, the .env files and `coder config` come; and the parser
of the command line, with its exit codes.

The field `max_steps` is CODER_MAX_STEPS in the environment and --max-steps on the command line. config.py says which of
several values counts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from coder import __version__
from coder.providers.text import host_of

if TYPE_CHECKING:
    from coder.providers.assembler import Price
    from coder.types import Reasoning

Reader = Callable[[str], Any]  # raises ValueError, OSError or TypeError for what is no value

# Context windows in tokens, by the beginning of the model's name; the first that fits counts.
WINDOWS = (
    (r"gpt-5", 400_000),
    (r"gpt-4\.1|gemini", 1_000_000),
    (r"claude", 200_000),
    (r"kimi|qwen3", 256_000),
    (r"", 128_000),
)
LEVELS = ("off", "minimal", "low", "medium", "high", "xhigh")  # types.Reasoning, slow to import
ADDRESS = r"https?://([^\s/@?#\\]*@)?([\w.-]+|\[[0-9a-f:.]+\])(:[1-9]\d{0,4})?([/?#][!-~]*)?"
LEVEL_HELP = f"one of {', '.join(LEVELS)} (off)"
PRICES = '{"gpt-5": {"input": 1.25, "cached": 0.125, "output": 10}}'


class ConfigError(Exception):  # no CoderError: 6 ms for `coder --help`
    """What is missing or wrong, in one line with the way to mend it."""


class Missing(ConfigError):
    """No server is named or, with the settings of one, no model."""

    def __init__(self, message: str, settings: Settings | None = None) -> None:
        super().__init__(message)
        self.settings = settings


def window_of(model: str) -> int:
    """The context window of a model family, in tokens."""
    name = model.rsplit("/", 1)[-1].lower()
    return next(tokens for pattern, tokens in WINDOWS if re.match(pattern, name))


# ---- what reads a value ----------------------------------------------------------------------------


def matching(pattern: str, convert: Reader = str) -> Reader:
    """What reads a text that matches a pattern as a whole."""

    def read(text: str) -> Any:
        if not re.fullmatch(pattern, text, re.A | re.I):
            raise ValueError
        return convert(text)

    return read


WHOLE = matching(r"\d{1,12}", int)
NUMBER = matching(r"\d{1,12}(\.\d+)?", float)
SWITCH = matching("on|off", lambda text: text.lower() == "on")
LEVEL = matching("|".join(LEVELS), str.lower)
SANDBOX = matching("auto|on|off", str.lower)
KEY, URL = matching("[!-~]+"), matching(ADDRESS)


def json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value


def read_body(text: str) -> dict[str, Any]:
    if "messages" in (given := json_object(text)):
        raise ValueError("its messages are those of the conversation")
    return given


def read_headers(text: str) -> dict[str, str]:
    given = json_object(text)
    for name, value in given.items():
        if not re.fullmatch(r"[\w.!#$%&'*+^`|~-]+: [ -~]+", f"{name}: {value}", re.A):
            raise ValueError(f"{name!r} cannot be sent")
    return {name: str(value) for name, value in given.items()}


def read_profile(text: str) -> dict[str, Any]:
    from coder.providers.profiles import profile_of

    profile_of("", "", given := json_object(text))
    return given


def read_prices(path: str) -> dict[str, Price]:
    from coder.providers.assembler import Price

    given = json_object(Path(path).expanduser().read_text("utf-8"))
    return {model: Price(**price) for model, price in given.items()}


# ---- the table -------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """What reads a text, what that has to be, what the flag's value is called ("": a switch; None: no flag)."""

    read: Reader
    help: str
    value: str | None = None


def setting(default: Any, *of: Any) -> Any:
    """A field with these of Setting; `dict` as default stands for an empty one."""
    metadata, visible = {"setting": Setting(*of)}, KEY not in of
    if default is dict:
        return field(default_factory=dict, metadata=metadata, repr=False)
    return field(default=default, metadata=metadata, repr=visible)


@dataclass
class Settings:
    """Everything that decides which model is asked and how."""

    api_key: str | None = setting(None, KEY, "the key, in plain characters")
    base_url: str | None = setting(None, URL, "a server, such as http://127.0.0.1:8080/v1", "URL")
    model: str = setting("", str, "the model's name", "NAME")
    context_window: int = setting(0, WHOLE, "tokens (default by model family)", "TOKENS")
    reasoning: Reasoning = setting("off", LEVEL, LEVEL_HELP, "LEVEL")  # noqa: RUF009
    idle_timeout: float = setting(180, NUMBER, "seconds without data (180; 0: no limit)", "S")
    first_byte_timeout: float | None = setting(None, NUMBER, "seconds to the first data (300)")
    retry_base: float = setting(2, NUMBER, "seconds before the first retry, then doubled (2)")
    max_steps: int = setting(100, WHOLE, "a number of model calls per run (100)", "N")
    max_seconds: float | None = setting(None, NUMBER, "seconds per run (no limit)", "S")
    prices: Mapping[str, Price] = setting(dict, read_prices, f"a file with prices: {PRICES}")
    profile: Mapping[str, Any] = setting(dict, read_profile, 'JSON, as {"tool_name": true}')
    extra_body: Mapping[str, Any] = setting(dict, read_body, 'JSON of requests: {"top_k": 20}')
    headers: Mapping[str, str] = setting(dict, read_headers, 'JSON of headers: {"x-key": "..."}')
    markdown: bool = setting(True, SWITCH, "on or off: answers on a terminal in styles (on)")
    bell: bool = setting(True, SWITCH, "on or off: ring when a run of over 10 s ends or asks (on)")
    titles: bool = setting(True, SWITCH, "on or off: the model names conversations (on)")
    allow_http: bool = setting(False, SWITCH, "on to allow http:// to another machine (off)", "")
    sandbox: str = setting("auto", SANDBOX, "auto, on (none runs without it) or off", "auto|on|off")
    sandbox_network: bool = setting(True, SWITCH, "on or off: commands have network (on)", "on|off")
    keys: tuple[str, ...] = field(default=(), repr=False)  # of all sources, to be redacted
    notes: tuple[str, ...] = ()  # what the user should know of where the settings came from

    @property
    def host(self) -> str:
        return host_of(self.base_url)

    def price_of(self, model: str) -> Price | None:
        """The price of a model: under its own name, else under the first pattern that fits ("deepseek-*")."""
        return self.prices.get(model) or next(
            (price for name, price in self.prices.items() if fnmatchcase(model, name)), None
        )


OPENAI = ("api_key", "base_url", "model")  # the openai client has the same names for these
SETTINGS: dict[str, Setting] = {
    f"{'OPENAI' if each.name in OPENAI else 'CODER'}_{each.name.upper()}": each.metadata["setting"]
    for each in fields(Settings)
    if each.metadata
}
SECRET = ("OPENAI_API_KEY", "CODER_HEADERS")  # their values are not shown


def field_of(name: str) -> str:
    """The field of a setting: CODER_MAX_STEPS -> max_steps."""
    return name.partition("_")[2].lower()


def value_of(name: str, text: str) -> Any:
    """The value of a setting. Raises ConfigError."""
    setting = SETTINGS[name]
    try:
        return setting.read(text)
    except (OSError, ValueError, TypeError) as error:
        given = "the value" if name in SECRET else repr(text)
        why = f" ({error})" if str(error) else ""
        raise ConfigError(f"{name}: {given} has to be {setting.help}{why}") from None


def env_line(name: str, text: str) -> str:
    """A setting as a line of a .env."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"{name}={text}" if text.isalnum() or not text else f"{name}='{escaped}'"


# ---- the command line ------------------------------------------------------------------------------

USAGE, LIMIT, TRANSIENT, INTERRUPTED = 2, 3, 75, 130
EXIT_CODES = {"stop": 0, "error": 1, "content_filter": 1, "aborted": INTERRUPTED}  # others: LIMIT
DESCRIPTION = """\
A coding agent for the terminal. Without a PROMPT it opens a session; with one (or with text on stdin)
it answers and exits. `%(prog)s --demo` shows it at work without a key."""
BELOW = {
    "exit codes": "0 done · 1 failed · 2 usage or configuration · 3 stopped by a limit · 75 try again later · 130 Ctrl+C",
    "settings": "OPENAI_API_KEY, OPENAI_BASE_URL, OPENAI_MODEL and more: see `%(prog)s config`",
    "also": "%(prog)s config, sessions, export ID, trace FILE (a run recorded with --trace), demo --port N",
}

ON: dict[str, Any] = {"action": "store_true"}
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
    ("--output-format", "FORMAT", "text, json (one object) or stream-json (one event a line)"),
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
    "--continue": ON | {"dest": "continue_"},
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
    flags = Flags(prog=program(), usage="%(prog)s [FLAGS] [PROMPT]", description=DESCRIPTION)
    what = "what to do; stdin next to it is context"
    flags.add_argument("prompt", nargs="*", metavar="PROMPT", help=what)
    for names, value, text in FLAGS:
        options = FURTHER.get(names.split()[-1], {} if value else ON)
        options = options | ({"metavar": value} if value else {})
        flags.add_argument(*names.split(), help=text, **options)
    for name, setting in SETTINGS.items():
        if setting.value is not None:
            given = setting.value
            options = {"metavar": given} if given else {"action": "store_const", "const": "on"}
            short = ["-m"] if name == "OPENAI_MODEL" else []
            words = [*short, f"--{field_of(name).replace('_', '-')}"]
            flags.add_argument(*words, dest=name, help=setting.help, **options)
    for title, text in BELOW.items():
        flags.add_argument_group(title, text)
    return flags
