"""Where the settings come from: flags, the environment, the user's .env, the folder's .env, defaults; in this order.

A key goes only to the server that was named in the same place, so that no file of a repository can send the user's
key elsewhere. The folder's .env counts only where nothing else has a key or a server: then it gives both and the model, and no
more. A file that somebody else may have written does not count.

No setting loosens permissions.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args
from urllib.parse import urlsplit

from coder.cli.flags import program
from coder.providers.address import host_of, is_loopback, shown_url
from coder.tools.environment import header_secret

if TYPE_CHECKING:
    from coder.providers.usage import Price
    from coder.types import Reasoning

# The settings of env.example (a test compares the two).
NAMES = (
    "OPENAI_API_KEY",
    "OPENAI_BASE_URL",
    "OPENAI_MODEL",
    "CODER_CONTEXT_WINDOW",
    "CODER_REASONING",
    "CODER_IDLE_TIMEOUT",
    "CODER_FIRST_BYTE_TIMEOUT",
    "CODER_RETRY_BASE",
    "CODER_MAX_STEPS",
    "CODER_MAX_SECONDS",
    "CODER_PRICES",
    "CODER_PROFILE",
    "CODER_EXTRA_BODY",
    "CODER_HEADERS",
    "CODER_TITLES",
    "CODER_ALLOW_HTTP",
    "CODER_SANDBOX",
    "CODER_SANDBOX_NETWORK",
)
# What a folder may say. The rest costs money or time, weakens the model, names a file that we read or changes what is sent.
OF_A_FOLDER = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_MODEL")
PLACES = ("the environment", "your .env", "the folder's .env")
# Of config_folder(): in a workspace's .coder they do nothing, which is said
OURS = (
    ".env",
    "hooks.json",
    "plugins",
    "agents",
)
LONGEST = 1 << 20  # bytes of a .env

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
    reasoning: Reasoning = "off"
    titles: bool = True
    sandbox: str = "auto"  # or on, off
    network: bool = True  # in the sandbox
    first_byte_timeout: float | None = None
    prices: Mapping[str, Price] = field(default_factory=dict)
    profile: Mapping[str, Any] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    # All of the person's, to be taken out of what is shown
    keys: tuple[str, ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()  # what a person should know of where the settings came from

    @property
    def host(self) -> str:
        return host_of(self.base_url)

    def price_of(self, model: str) -> Price | None:
        """The price of a model: under its own name, else under the first pattern that fits ("deepseek-*")."""
        return self.prices.get(model) or next(
            (price for name, price in self.prices.items() if fnmatchcase(model, name)), None
        )


def config_folder() -> Path:
    return _base("XDG_CONFIG_HOME", ".config") / "coder"


def data_folder() -> Path:
    return _base("XDG_DATA_HOME", ".local/share") / "coder"


def _base(name: str, default: str) -> Path:
    """A relative value counts as none (the XDG base directory specification): it would lie in the folder that is worked in. So would
    a relative HOME: raises ConfigError."""
    given, home = (
        Path(os.environ.get(name, "")),
        Path("" if os.environ.get("HOME") == "" else os.path.expanduser("~")),
    )
    if not home.is_absolute():
        raise ConfigError(f"HOME is {os.environ.get('HOME', '')!r}, and has to be an absolute path")
    return given if given.is_absolute() else home / default


def load(cwd: Path, flags: Mapping[str, object] | None = None) -> Settings:
    """The settings for a session in `cwd`. `flags` go by the names above; None means not given. Raises ConfigError."""
    given = {name: str(value) for name, value in (flags or {}).items() if value is not None}
    folder = _dotenv(cwd / ".env")
    sources = [
        given,
        dict(os.environ),
        _of_the_user(),
        {name: value for name, value in folder.items() if name in OF_A_FOLDER},
    ]
    base_url, api_key, place = _server(sources)
    counts = place == PLACES[-1]
    sources = sources if counts else sources[:-1]
    first = {
        name: next((source[name] for source in sources if source.get(name)), "") for name in NAMES
    }
    if not first["OPENAI_MODEL"]:
        raise ConfigError("no model is named: set OPENAI_MODEL, or give -m NAME")
    if base_url and not _switch(first, "CODER_ALLOW_HTTP", False):
        _refuse_plain(base_url)
    return Settings(
        keys=tuple(dict.fromkeys(secret for source in sources for secret in _secrets(source))),
        notes=tuple(_notes(cwd, folder, counts, base_url)),
        model=first["OPENAI_MODEL"],
        base_url=base_url,
        api_key=api_key,
        context_window=int(
            _number(first, "CODER_CONTEXT_WINDOW", window_of(first["OPENAI_MODEL"]))
        ),
        idle_timeout=_number(first, "CODER_IDLE_TIMEOUT", 180),
        retry_base=_number(first, "CODER_RETRY_BASE", 2),
        first_byte_timeout=_number(first, "CODER_FIRST_BYTE_TIMEOUT", 0)
        if first["CODER_FIRST_BYTE_TIMEOUT"]
        else None,
        max_steps=int(_number(first, "CODER_MAX_STEPS", DEFAULT_STEPS)),
        max_seconds=_number(first, "CODER_MAX_SECONDS", 0) or None,
        reasoning=_reasoning(first["CODER_REASONING"]),
        titles=_switch(first, "CODER_TITLES", True),
        sandbox=_sandbox(first["CODER_SANDBOX"]),
        network=_switch(first, "CODER_SANDBOX_NETWORK", True),
        prices=_prices(first["CODER_PRICES"]),
        profile=_profile(first["CODER_PROFILE"], host_of(base_url), first["OPENAI_MODEL"]),
        extra_body=_object("CODER_EXTRA_BODY", first["CODER_EXTRA_BODY"]),
        headers=_headers_for(place, sources),
    )


def _refuse_plain(url: str) -> None:
    """Raises ConfigError for http to another machine."""
    if url.lower().startswith("http:") and not is_loopback(url):
        raise ConfigError(
            f"OPENAI_BASE_URL is {shown_url(url)}, and what is sent there can be read on the way: take https, or give "
            "--allow-http (CODER_ALLOW_HTTP=on) for a server in a network that you trust"
        )


def _of_the_user() -> dict[str, str]:
    """The user's .env. Raises ConfigError where somebody else may have written it."""
    path = config_folder() / ".env"
    if not path.is_file():
        return {}
    from coder.permissions.ownership import check_ownership  # late: only where there is a file

    try:
        check_ownership(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    return _dotenv(path)


def _notes(
    cwd: Path, folder: Mapping[str, str], counts: bool, base_url: str | None
) -> Iterator[str]:
    """What a person should know: that the folder names the server, and what it holds for us that does not count."""
    if counts:
        yield f"Server and key come from the .env of this folder: {host_of(base_url)}."
    unused = [
        name
        for name in folder
        if name not in OF_A_FOLDER or not (counts or name == "OPENAI_API_KEY")
    ]
    strange = [f"{', '.join(unused)} in .env"] if unused else []
    strange += [f".coder/{name}" for name in OURS if os.path.lexists(cwd / ".coder" / name)]
    if strange and cwd / ".coder" != config_folder():
        yield f"Not taken from this folder: {'; '.join(strange)}. Such settings count in {config_folder()} only."


def _server(sources: list[dict[str, str]]) -> tuple[str | None, str | None, str]:
    """(base URL, key, their place): a URL given as a flag with the user's own key, else both from the first source that has either."""
    flags, *others = sources
    if url := _address(flags):
        key = next((_key(source) for source in others[:2] if _key(source)), None)
        if key or is_loopback(url):
            return url, key, "a flag"
        others = []
    for place, source in zip(PLACES, others):
        url, key = _address(source), _key(source)
        if url and not key and not is_loopback(url):
            raise ConfigError(
                f"OPENAI_BASE_URL is set in {place} without OPENAI_API_KEY: a key and its server have to come from "
                "the same place"
            )
        if url or key:
            return url, key, place
    raise ConfigError(
        f"no key: set OPENAI_API_KEY (see `{program()} config`), or name a server on this machine with OPENAI_BASE_URL; "
        f"`{program()} --demo` needs neither"
    )


def _address(source: Mapping[str, str]) -> str | None:
    """The base URL that a source names. Raises ConfigError where this is no address of a server."""
    url = source.get("OPENAI_BASE_URL")
    if not url:
        return None
    try:
        parts = urlsplit(url)
        good = (
            parts.scheme in ("http", "https")
            and re.fullmatch(r"[\w.-]+|[0-9a-f:.]+", parts.hostname or "")
            and parts.port != 0
        )
    except ValueError:
        good = False
    if not good or not url.isprintable() or re.search(r"\][^:/]", url):
        raise ConfigError(
            f"OPENAI_BASE_URL is {url!r}, and has to be an address such as http://127.0.0.1:8080/v1"
        )
    return url


def _key(source: Mapping[str, str]) -> str | None:
    key = (source.get("OPENAI_API_KEY") or "").strip()
    if not key.isascii() or not key.isprintable():
        raise ConfigError("OPENAI_API_KEY holds characters that no header can carry: copy it again")
    return key or None


def _headers_for(place: str, sources: list[dict[str, str]]) -> dict[str, str]:
    """The headers that go to the server of `place`, which may be secrets, too: not those that stand in another place for another
    server; never to the server of a folder."""
    near = {PLACES[0]: sources[1:2], PLACES[-1]: []}.get(place, sources[1:3])
    return next(filter(None, map(_headers, near)), {})


def _headers(source: Mapping[str, str]) -> dict[str, str]:
    """CODER_HEADERS of one source. Raises ConfigError, without the values."""
    given = _object("CODER_HEADERS", source.get("CODER_HEADERS", ""), '{"x-gateway-key": "..."}')
    for name, value in given.items():
        good = isinstance(value, str) and value.isascii() and value.isprintable()
        if not (good and re.fullmatch(r"[\w.!#$%&'*+^`|~-]+", name, re.A)):
            raise ConfigError(f"CODER_HEADERS: {name!r} is no header with a value that can be sent")
    return given


def _secrets(source: Mapping[str, str]) -> Iterator[str]:
    """What is to be taken out of what is shown: the key, and those headers that hold secrets. Any other value may be a plain
    word, which the files that the model reads hold, too."""
    yield from filter(None, [_key(source), *starmap(header_secret, _headers(source).items())])


def keys_of(cwd: Path) -> list[str]:
    """The keys of all sources, to be taken out of what is shown. Raises ConfigError."""
    sources = [dict(os.environ), _of_the_user(), _dotenv(cwd / ".env")]
    return [secret for source in sources for secret in _secrets(source)]


def _dotenv(path: Path) -> dict[str, str]:
    """The known names in a .env file; no interpolation, so that no value can carry another one away."""
    if not path.is_file():
        return {}
    from dotenv import dotenv_values  # late: only where there is a file

    try:
        with path.open("rb") as file:
            text = io.StringIO(file.read(LONGEST).decode("utf-8", "replace"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    return {
        name: value
        for name, value in dotenv_values(stream=text, interpolate=False).items()
        if name in NAMES and value
    }


def _number(values: Mapping[str, str], name: str, default: float) -> float:
    try:
        number = float(values[name] or default)
    except ValueError:
        raise ConfigError(f"{name} is {values[name]!r}, and has to be a number") from None
    if not 0 <= number < 1e12:
        raise ConfigError(f"{name} is {values[name]}, which is out of range")
    return number


def _switch(values: Mapping[str, str], name: str, default: bool) -> bool:
    word = values[name].lower()
    if word not in ("", "on", "off", "1", "0", "true", "false", "yes", "no"):
        raise ConfigError(f"{name} is {values[name]!r}, and has to be on or off")
    return word in ("on", "1", "true", "yes") if word else default


def _sandbox(word: str) -> str:
    if word.lower() not in ("", "auto", "on", "off"):
        raise ConfigError(f"CODER_SANDBOX is {word!r}, and has to be auto, on or off")
    return word.lower() or "auto"


def _reasoning(word: str) -> Reasoning:
    """A level of reasoning. Raises ConfigError where it is none."""
    if not word:
        return "off"
    from coder.types import Reasoning

    if word.lower() not in get_args(Reasoning):
        raise ConfigError(
            f"CODER_REASONING is {word!r}, and has to be one of {', '.join(get_args(Reasoning))}"
        )
    return cast(Reasoning, word.lower())


def _object(name: str, text: str, example: str = '{"top_k": 20}') -> dict[str, Any]:
    """A setting that is a JSON object."""
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"{name} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{name} has to be a JSON object, such as {example}")
    return value


def _profile(text: str, host: str, model: str) -> dict[str, Any]:
    """What overrides the table of profiles.py. Raises ConfigError where that knows no such field or value."""
    if not text:
        return {}
    from coder.providers.profiles import profile_of

    given = _object("CODER_PROFILE", text)
    try:
        profile_of(host, model, given)
    except ValueError as error:
        raise ConfigError(f"CODER_PROFILE: {error}") from None
    return given


def _prices(path: str) -> dict[str, Price]:
    """{"model or pattern": {"input": 1.25, "cached": 0.125, "output": 10}} in a file, per million tokens."""
    if not path:
        return {}
    from coder.providers.usage import Price

    try:
        text = Path(path).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"CODER_PRICES: {path} cannot be read: {getattr(error, 'strerror', '') or 'no text'}"
        ) from None
    try:
        prices = {
            name: {key: float(value) for key, value in price.items()}
            for name, price in json.loads(text).items()
        }
        if any(not 0 <= value < math.inf for price in prices.values() for value in price.values()):
            raise ValueError
        return {name: Price(**price) for name, price in prices.items()}
    except (ValueError, TypeError, AttributeError):
        raise ConfigError(f"CODER_PRICES: {path} has to be like {PRICES}") from None


PRICES = '{"gpt-5": {"input": 1.25, "cached": 0.125, "output": 10}}, per million tokens'


def window_of(model: str) -> int:
    """The context window of a model family, in tokens."""
    name = model.rsplit("/", 1)[-1].lower()
    return next((tokens for pattern, tokens in WINDOWS if re.match(pattern, name)), DEFAULT_WINDOW)
