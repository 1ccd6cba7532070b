"""Where the settings come from: flags, the environment, the user's .env, the folder's .env, defaults; in this order.

A key goes only to the server that was named in the same place, so that no file of a repository can send the user's
key elsewhere. The folder's .env can set the names below and nothing else. What it leaves out: settings that loosen
permissions; there are none.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from coder.address import is_loopback

# The settings of .env.example (a test compares the two).
NAMES = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_MODEL", "CODER_CONTEXT_WINDOW", "CODER_IDLE_TIMEOUT", "CODER_RETRY_BASE",
         "CODER_MAX_STEPS", "CODER_MAX_SECONDS")

# Context windows in tokens, by the beginning of the model's name; the first that fits counts.
WINDOWS = ((r"gpt-5", 400_000), (r"gpt-4\.1", 1_000_000), (r"(gpt-4o|o\d)", 128_000), (r"claude", 200_000), (r"gemini", 1_000_000),
           (r"kimi", 256_000), (r"qwen3", 256_000), (r"deepseek", 128_000), (r"script$", 128_000))
DEFAULT_WINDOW = 128_000
DEFAULT_STEPS = 100


class ConfigError(Exception):
    """What is missing or wrong, in one line with the way to mend it."""


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

    @property
    def host(self) -> str:
        return urlsplit(self.base_url or "https://api.openai.com").netloc.rpartition("@")[2]


def config_folder() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "coder"


def data_folder() -> Path:
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "coder"


def load(cwd: Path, flags: Mapping[str, object] | None = None) -> Settings:
    """The settings for a session in `cwd`. `flags` go by the names above; None means not given. Raises ConfigError."""
    given = {name: str(value) for name, value in (flags or {}).items() if value is not None}
    sources = [given, dict(os.environ), _dotenv(config_folder() / ".env"), _dotenv(cwd / ".env")]
    base_url, api_key = _server(sources)
    first = {name: next((source[name] for source in sources if source.get(name)), "") for name in NAMES}
    if not first["OPENAI_MODEL"]:
        raise ConfigError("no model is named: set OPENAI_MODEL, or give -m NAME")
    return Settings(
        model=first["OPENAI_MODEL"], base_url=base_url, api_key=api_key,
        context_window=int(_number(first, "CODER_CONTEXT_WINDOW", window_of(first["OPENAI_MODEL"]))),
        idle_timeout=_number(first, "CODER_IDLE_TIMEOUT", 180), retry_base=_number(first, "CODER_RETRY_BASE", 2),
        max_steps=int(_number(first, "CODER_MAX_STEPS", DEFAULT_STEPS)),
        max_seconds=_number(first, "CODER_MAX_SECONDS", 0) or None)


def _server(sources: list[dict[str, str]]) -> tuple[str | None, str | None]:
    """(base URL, key): a URL given as a flag with the user's own key, else both from the first source that has either."""
    flags, *others = sources
    if url := _address(flags):
        key = next((_key(source) for source in others[:2] if _key(source)), None)
        if key or is_loopback(url):
            return url, key
        others = []
    for place, source in zip(("the environment", "your .env", "the folder's .env"), others):
        url, key = _address(source), _key(source)
        if url and not key and not is_loopback(url):
            raise ConfigError(f"OPENAI_BASE_URL is set in {place} without OPENAI_API_KEY: a key and its server have to come from "
                              "the same place")
        if url or key:
            return url, key
    raise ConfigError("no key: set OPENAI_API_KEY (see .env.example), or name a server on this machine with OPENAI_BASE_URL; "
                      "`python -m coder --demo` needs neither")


def _address(source: Mapping[str, str]) -> str | None:
    """The base URL that a source names. Raises ConfigError where this is no address of a server."""
    url = source.get("OPENAI_BASE_URL")
    if not url:
        return None
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and re.fullmatch(r"[\w.-]+|[0-9a-f:.]+", parts.hostname or "") and parts.port != 0
    except ValueError:
        good = False
    if not good or not url.isprintable() or re.search(r"\][^:/]", url):
        raise ConfigError(f"OPENAI_BASE_URL is {url!r}, and has to be an address such as http://127.0.0.1:8080/v1")
    return url


def _key(source: Mapping[str, str]) -> str | None:
    key = (source.get("OPENAI_API_KEY") or "").strip()
    if not key.isascii() or not key.isprintable():
        raise ConfigError("OPENAI_API_KEY holds characters that no header can carry: copy it again")
    return key or None


def _dotenv(path: Path) -> dict[str, str]:
    """The known names in a .env file; no interpolation, so that no value can carry another one away."""
    if not path.is_file():
        return {}
    from dotenv import dotenv_values  # late: only where there is a file

    try:
        text = io.StringIO(path.read_text("utf-8", "replace"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    return {name: value for name, value in dotenv_values(stream=text, interpolate=False).items() if name in NAMES and value}


def _number(values: Mapping[str, str], name: str, default: float) -> float:
    try:
        number = float(values[name] or default)
    except ValueError:
        raise ConfigError(f"{name} is {values[name]!r}, and has to be a number") from None
    if not 0 <= number < 1e12:
        raise ConfigError(f"{name} is {values[name]}, which is out of range")
    return number


def window_of(model: str) -> int:
    """The context window of a model family, in tokens."""
    name = model.rsplit("/", 1)[-1].lower()
    return next((tokens for pattern, tokens in WINDOWS if re.match(pattern, name)), DEFAULT_WINDOW)
