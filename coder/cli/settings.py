"""The settings: one table of names, with what reads their values, and the object that holds them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from coder.providers.address import host_of

if TYPE_CHECKING:
    from coder.providers.usage import Price
    from coder.types import Reasoning

# Context windows in tokens, by the beginning of the model's name; the first that fits counts.
WINDOWS = (
    (r"gpt-5", 400_000),
    (r"gpt-4\.1", 1_000_000),
    (r"(gpt-4o|o\d)", 128_000),
    (r"claude", 200_000),
    (r"gemini", 1_000_000),
    (r"kimi", 256_000),
    (r"qwen3", 256_000),
    (r"deepseek", 128_000),
    (r"script$", 128_000),
)
DEFAULT_WINDOW = 128_000
# types.Reasoning, which is slow to import (a test compares)
LEVELS = ("off", "minimal", "low", "medium", "high", "xhigh")
DEFAULT_STEPS = 100
PRICES = '{"gpt-5": {"input": 1.25, "cached": 0.125, "output": 10}}, per million tokens'
ON, OFF = ("on", "1", "true", "yes"), ("off", "0", "false", "no")
HEADERS = '{"x-gateway-key": "..."}'


class ConfigError(Exception):
    """What is missing or wrong, in one line with the way to mend it."""


def window_of(model: str) -> int:
    """The context window of a model family, in tokens."""
    name = model.rsplit("/", 1)[-1].lower()
    return next((tokens for pattern, tokens in WINDOWS if re.match(pattern, name)), DEFAULT_WINDOW)


# ---- the values of settings; each raises ConfigError ----------------------------------------------


def number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}, and has to be a number") from None
    if not 0 <= value < 1e12:
        raise ConfigError(f"{name} is {text}, which is out of range")
    return value


def whole(name: str, text: str) -> int:
    return int(number(name, text))


def one_of(*words: str) -> Callable[[str, str], str]:
    """What reads a setting that is one of these words."""

    def read(name: str, text: str) -> str:
        if text.lower() not in words:
            raise ConfigError(f"{name} is {text!r}, and has to be one of {', '.join(words)}")
        return text.lower()

    return read


def switch(name: str, text: str) -> bool:
    if text.lower() not in (*ON, *OFF):
        raise ConfigError(f"{name} is {text!r}, and has to be on or off")
    return text.lower() in ON


def json_object(name: str, text: str, example: str = '{"top_k": 20}') -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"{name} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{name} has to be a JSON object, such as {example}")
    return value


def headers(name: str, text: str) -> dict[str, str]:
    """Raises without the values, which may be secrets."""
    given = json_object(name, text, HEADERS)
    for header, value in given.items():
        good = isinstance(value, str) and value.isascii() and value.isprintable()
        if not (good and re.fullmatch(r"[\w.!#$%&'*+^`|~-]+", header, re.A)):
            raise ConfigError(f"{name}: {header!r} is no header with a value that can be sent")
    return given


def prices(name: str, path: str) -> dict[str, Price]:
    """Of a file: {"model or pattern": {"input": 1.25, "cached": 0.125, "output": 10}}, per million tokens."""
    from coder.providers.usage import Price

    try:
        given = json.loads(Path(path).expanduser().read_text("utf-8"))
        found = {
            model: {key: float(value) for key, value in price.items()}
            for model, price in given.items()
        }
        if any(not 0 <= value < math.inf for price in found.values() for value in price.values()):
            raise ValueError
        return {model: Price(**price) for model, price in found.items()}
    except OSError as error:
        raise ConfigError(f"{name}: {path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError):
        raise ConfigError(f"{name}: {path} has to be like {PRICES}") from None


def address(name: str, url: str) -> str:
    """The address of a server."""
    try:
        parts = urlsplit(url)
        host = re.fullmatch(r"[\w.-]+|[0-9a-f:.]+", parts.hostname or "")
        good = parts.scheme in ("http", "https") and host and parts.port != 0
    except ValueError:
        good = False
    if not good or not url.isprintable() or re.search(r"\][^:/]", url):
        example = "http://127.0.0.1:8080/v1"
        raise ConfigError(f"{name} is {url!r}, and has to be an address such as {example}")
    return url


def key(name: str, text: str) -> str:
    if not text.strip().isascii() or not text.strip().isprintable():
        raise ConfigError(f"{name} holds characters that no header can carry: copy it again")
    return text.strip()


# Name -> (field of Settings, what reads the value, the default), in the order of env.example.
SETTINGS: dict[str, tuple[str, Callable[[str, str], Any], Any]] = {
    "OPENAI_API_KEY": ("api_key", key, None),
    "OPENAI_BASE_URL": ("base_url", address, None),
    "OPENAI_MODEL": ("model", lambda name, text: text, ""),
    "CODER_CONTEXT_WINDOW": ("context_window", whole, None),
    "CODER_REASONING": ("reasoning", one_of(*LEVELS), "off"),
    "CODER_IDLE_TIMEOUT": ("idle_timeout", number, 180.0),
    "CODER_FIRST_BYTE_TIMEOUT": ("first_byte_timeout", number, None),
    "CODER_RETRY_BASE": ("retry_base", number, 2.0),
    "CODER_MAX_STEPS": ("max_steps", whole, DEFAULT_STEPS),
    "CODER_MAX_SECONDS": ("max_seconds", number, None),
    "CODER_PRICES": ("prices", prices, {}),
    "CODER_PROFILE": ("profile", json_object, {}),
    "CODER_EXTRA_BODY": ("extra_body", json_object, {}),
    "CODER_HEADERS": ("headers", headers, {}),
    "CODER_TITLES": ("titles", switch, True),
    "CODER_ALLOW_HTTP": ("allow_http", switch, False),
    "CODER_SANDBOX": ("sandbox", one_of("auto", "on", "off"), "auto"),
    "CODER_SANDBOX_NETWORK": ("network", switch, True),
}
NAMES = tuple(SETTINGS)
Source = Mapping[str, str]


def value_of(name: str, source: Source) -> Any:
    """The value of a setting in a source, or its default."""
    _, parse, default = SETTINGS[name]
    return parse(name, source[name]) if source.get(name) else default


@dataclass(frozen=True)
class Settings:
    """Everything that decides which model is asked and how."""

    model: str
    base_url: str | None
    api_key: str | None
    context_window: int
    idle_timeout: float
    retry_base: float
    max_steps: int
    max_seconds: float | None
    reasoning: Reasoning = "off"
    titles: bool = True
    allow_http: bool = False
    sandbox: str = "auto"  # or on, off
    network: bool = True  # in the sandbox
    first_byte_timeout: float | None = None
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
