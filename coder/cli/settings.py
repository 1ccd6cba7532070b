"""The settings: one table, from which the flags, the environment, the .env files and `coder config` come.

flags.py has the parser, config.py says which of several values counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
PRICES = '{"gpt-5": {"input": 1.25, "cached": 0.125, "output": 10}}'


class ConfigError(Exception):
    """What is missing or wrong, in one line with the way to mend it."""


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


def headers(text: str) -> dict[str, str]:
    given = json_object(text)
    for name, value in given.items():
        if not re.fullmatch(r"[\w.!#$%&'*+^`|~-]+: [ -~]+", f"{name}: {value}", re.A):
            raise ValueError(f"{name!r} cannot be sent")
    return {name: str(value) for name, value in given.items()}


def profile(text: str) -> dict[str, Any]:
    from coder.providers.profiles import profile_of

    profile_of("", "", given := json_object(text))
    return given


def prices(path: str) -> dict[str, Price]:
    from coder.providers.assembler import Price

    given = json_object(Path(path).expanduser().read_text("utf-8"))
    return {model: Price(**price) for model, price in given.items()}


# ---- the table -------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """What reads it, what its flag's value is called ("": a switch; None: no flag), what it has to be."""

    read: Reader
    value: str | None
    help: str


SETTINGS: dict[str, Setting] = {
    "OPENAI_API_KEY": Setting(KEY, None, "the key, in plain characters"),
    "OPENAI_BASE_URL": Setting(URL, "URL", "a server, such as http://127.0.0.1:8080/v1"),
    "OPENAI_MODEL": Setting(str, "NAME", "the model's name"),
    "CODER_CONTEXT_WINDOW": Setting(WHOLE, "TOKENS", "tokens (default by model family)"),
    "CODER_REASONING": Setting(LEVEL, "LEVEL", f"one of {', '.join(LEVELS)} (off)"),
    "CODER_IDLE_TIMEOUT": Setting(
        NUMBER, "S", "seconds without data until a retry (180; 0: never)"
    ),
    "CODER_FIRST_BYTE_TIMEOUT": Setting(NUMBER, None, "seconds until an answer begins (300)"),
    "CODER_RETRY_BASE": Setting(NUMBER, None, "seconds before the first retry, then doubled (2)"),
    "CODER_MAX_STEPS": Setting(WHOLE, "N", "a number of model calls per run (100)"),
    "CODER_MAX_SECONDS": Setting(NUMBER, "S", "a number of seconds per run (no limit)"),
    "CODER_PRICES": Setting(prices, None, f"a file with prices per million tokens: {PRICES}"),
    "CODER_PROFILE": Setting(profile, None, 'JSON for profiles.py: {"empty_content": "empty"}'),
    "CODER_EXTRA_BODY": Setting(json_object, None, 'JSON for every request: {"top_k": 20}'),
    "CODER_HEADERS": Setting(headers, None, 'JSON of headers: {"x-gateway-key": "..."}'),
    "CODER_TITLES": Setting(SWITCH, None, "on or off: the model names conversations (on)"),
    "CODER_ALLOW_HTTP": Setting(SWITCH, "", "on to allow http:// to another machine (off)"),
    "CODER_SANDBOX": Setting(SANDBOX, "auto|on|off", "auto, on (no command without it) or off"),
    "CODER_SANDBOX_NETWORK": Setting(SWITCH, "on|off", "on or off: commands have the network (on)"),
}
SECRET = ("OPENAI_API_KEY", "CODER_HEADERS")  # their values are not shown


def field_of(name: str) -> str:
    """The field of Settings that has a setting: CODER_MAX_STEPS -> max_steps."""
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


@dataclass(frozen=True)
class Settings:
    """Everything that decides which model is asked and how."""

    model: str = ""
    base_url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    context_window: int = 0
    idle_timeout: float = 180
    first_byte_timeout: float | None = None
    retry_base: float = 2
    max_steps: int = 100
    max_seconds: float | None = None
    reasoning: Reasoning = "off"
    titles: bool = True
    allow_http: bool = False
    sandbox: str = "auto"  # or on, off
    sandbox_network: bool = True
    prices: Mapping[str, Price] = field(default_factory=dict)
    profile: Mapping[str, Any] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
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
