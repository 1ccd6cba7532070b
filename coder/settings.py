"""The settings: one table, from which flags, environment, .env files and `coder config` come; and which of several values
counts: flags and the environment, the user's .env, the folder's .env, defaults; in this order.

A key goes only to the server that was named in the same place, so that no file of a repository can send the user's
key elsewhere. The folder's .env counts only where nothing else has a key or a server: then it gives both and the model,
and no more. A file that another user may have written does not count. No setting loosens permissions.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from coder.providers.text import PROXIES, host_of, is_loopback, shown_url
from coder.tools.secrets import header_secret

if TYPE_CHECKING:
    from coder.providers.profiles import Price
    from coder.types import Reasoning

# What a text has to match as a whole, and what reads it; raises ValueError, OSError or TypeError for what is no value
Kind = tuple[str, Callable[[str], Any]]
Sources = Mapping[str, Mapping[str, str]]  # by place the settings' texts, none of them empty

# Context windows in tokens, by the beginning of the model's name; the first that fits counts.
WINDOWS = (
    (r"gpt-5", 400_000),
    (r"gpt-4\.1|gemini", 1_000_000),
    (r"claude", 200_000),
    (r"kimi|qwen3", 256_000),
    (r"", 128_000),
)
LEVELS = ("off", "minimal", "low", "medium", "high", "xhigh")  # types.Reasoning, slow to import
LEVEL_HELP = f"one of {', '.join(LEVELS)} (off)"
PRICES = '{"gpt-5": {"input": 1.25, "cached": 0.125, "output": 10}}'


class ConfigError(Exception):  # no CoderError: 6 ms for `coder --help`
    """What is missing or wrong, in one line with the way to mend it."""


class Missing(ConfigError):
    """No server is named or, with the settings of one, no model."""

    def __init__(self, message: str, settings: Settings | None = None) -> None:
        super().__init__(message)
        self.settings = settings


def optional(name: str) -> Any:
    """Import a module; None if it, or a module of this package that it imports, was deleted."""
    try:
        __import__(name)  # which -X importtime shows, unlike import_module
        return sys.modules[name]
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "coder":
            raise
        return None


def needed(name: str, purpose: str) -> Any:
    """Import the module that `purpose`, which the user asked for, needs. Raises ConfigError."""
    module = optional(name)
    if module is None:
        raise ConfigError(f"{purpose} is not available: {name} or a part of it was deleted")
    return module


def program() -> str:
    """How the program was started."""
    return "python -m coder" if os.path.basename(sys.argv[0]) == "__main__.py" else "coder"


def config_folder() -> Path:
    return _base_folder("XDG_CONFIG_HOME", ".config") / "coder"


def data_folder() -> Path:
    return _base_folder("XDG_DATA_HOME", ".local/share") / "coder"


def _base_folder(name: str, default: str) -> Path:
    """A relative value counts as none: it would lie in the folder that is worked in."""
    given = Path(os.environ.get(name, ""))
    return given if given.is_absolute() else Path.home() / default


def window_of(model: str) -> int:
    """The context window of a model family, in tokens."""
    name = model.rsplit("/", 1)[-1].lower()
    return next(tokens for pattern, tokens in WINDOWS if re.match(pattern, name))


def keep_of(window: int) -> int:
    """The tokens of tool output that a pruning leaves.

    An eighth of the window, since what stays is paid for in each later request. 200 steps of 8 KB in 128,000 tokens cost
    1.71 million tokens (with a tenth for what is cached) where 16,000 stay, and 2.09 where 40,000 do. In 200 steps that
    look at files again and again six more have to be read again (22 in place of 16), and it costs 1.68 in place of 1.88.
    A small window keeps up to a third: with an eighth of 48,000 only the newest file would stay.
    """
    return min(max(16_000, window // 8), window // 3)


# ---- what reads a value ----------------------------------------------------------------------------


def read_object(text: str) -> dict[str, Any]:
    import json  # late: 2 ms

    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value


def read_body(text: str) -> dict[str, Any]:
    if "messages" in (given := read_object(text)):
        raise ValueError("its messages are those of the conversation")
    return given


def read_headers(text: str) -> dict[str, str]:
    given = read_object(text)
    for name, value in given.items():
        if not re.fullmatch(r"[\w.!#$%&'*+^`|~-]+: [ -~]+", f"{name}: {value}", re.A):
            raise ValueError(f"{name!r} cannot be sent")
    return {name: str(value) for name, value in given.items()}


def read_profile(text: str) -> dict[str, Any]:
    from coder.providers.profiles import profile_of

    profile_of("", "", given := read_object(text))
    return given


def read_prices(path: str) -> dict[str, Price]:
    from coder.providers.profiles import Price

    given = read_object(Path(path).expanduser().read_text("utf-8"))
    return {model: Price(**price) for model, price in given.items()}


# ---- the table -------------------------------------------------------------------------------------


WHOLE: Kind = (r"\d{1,12}", int)
NUMBER: Kind = (r"\d{1,12}(\.\d+)?", float)
SWITCH: Kind = ("on|off", lambda text: text.lower() == "on")
LEVEL: Kind = ("|".join(LEVELS), str.lower)
SANDBOX: Kind = ("auto|on|off", str.lower)
CLIENT: Kind = ("direct|openai", str.lower)
PLAIN: Kind = ("[!-~]+", str)
HOST = r"([^\s/@?#\\]*@)?([\w.-]+|\[[0-9a-f:.]+\])(:[1-9]\d{0,4})?"
ADDRESS: Kind = (rf"https?://{HOST}([/?#][!-~]*)?", str)
ANY = "(?s).*"


def setting(default: Any, kind: Kind, help: str, value: str | None = None) -> Any:  # noqa: A002 (what it is)
    """`help` is what a text has to be, `value` what the flag's is called ("": a switch; None: there is no flag)."""
    return SimpleNamespace(default=default, kind=kind, help=help, value=value)


class Settings:  # no dataclass: 8 ms for `coder --help`
    """Everything that decides which model is asked and how. `max_steps` is CODER_MAX_STEPS and --max-steps."""

    api_key: str | None = setting(None, PLAIN, "the key, in plain characters")
    base_url: str | None = setting(
        None, ADDRESS, "a server, such as http://127.0.0.1:8080/v1", "URL"
    )
    model: str = setting("", (ANY, str), "the model's name", "NAME")
    context_window: int = setting(0, WHOLE, "tokens (default by model family)", "TOKENS")
    reasoning: Reasoning = setting("off", LEVEL, LEVEL_HELP, "LEVEL")
    idle_timeout: float = setting(180.0, NUMBER, "seconds without data (180; 0: no limit)", "S")
    first_byte_timeout: float | None = setting(None, NUMBER, "seconds to the first data (300)")
    retry_base: float = setting(2.0, NUMBER, "seconds before the first retry, then doubled (2)")
    max_steps: int = setting(100, WHOLE, "a number of model calls per run (100)", "N")
    max_seconds: float | None = setting(None, NUMBER, "seconds per run (no limit)", "S")
    prices: Mapping[str, Price] = setting({}, (ANY, read_prices), f"a file with prices: {PRICES}")
    profile: Mapping[str, Any] = setting({}, (ANY, read_profile), 'JSON, as {"tool_name": true}')
    extra_body: Mapping[str, Any] = setting({}, (ANY, read_body), 'JSON of requests: {"top_k": 20}')
    headers: Mapping[str, str] = setting(
        {}, (ANY, read_headers), 'JSON of headers: {"x-key": "..."}'
    )
    markdown: bool = setting(True, SWITCH, "on or off: answers on a terminal in styles (on)")
    bell: bool = setting(True, SWITCH, "on or off: ring when a run of over 10 s ends or asks (on)")
    titles: bool = setting(True, SWITCH, "on or off: the model names conversations (on)")
    allow_http: bool = setting(False, SWITCH, "on to allow http:// to another machine (off)", "")
    sandbox: str = setting("auto", SANDBOX, "auto, on (none runs without it) or off", "auto|on|off")
    sandbox_network: bool = setting(True, SWITCH, "on or off: commands have network (on)", "on|off")
    client: str = setting(
        "direct", CLIENT, "direct or openai: what sends requests (direct)", "NAME"
    )
    keys: tuple[str, ...]  # of all sources, to be redacted
    notes: tuple[str, ...]  # what the user should know of where the settings came from

    def __init__(self, **values: Any) -> None:
        defaults = {field_of(name): each.default for name, each in SETTINGS.items()}
        vars(self).update(defaults | {"keys": (), "notes": ()} | values)

    @property
    def host(self) -> str:
        return host_of(self.base_url)

    def price_of(self, model: str) -> Price | None:
        """The price of a model: under its own name, else under the first pattern that fits ("deepseek-*")."""
        fitting = (self.prices[name] for name in self.prices if fnmatchcase(model, name))
        return self.prices.get(model) or next(fitting, None)


API_KEY, BASE_URL, HEADERS = "OPENAI_API_KEY", "OPENAI_BASE_URL", "CODER_HEADERS"
OPENAI = ("api_key", "base_url", "model")  # the openai client has the same names for these
SETTINGS: dict[str, Any] = {
    f"{'OPENAI' if field in OPENAI else 'CODER'}_{field.upper()}": each
    for field, each in vars(Settings).items()
    if isinstance(each, SimpleNamespace)
}
SECRET = (API_KEY, HEADERS)  # their values are not shown
OF_A_SERVER = (API_KEY, BASE_URL, HEADERS)  # all from one place
# What a folder may set. The rest costs money or time, weakens the model, names a file that is read or changes what is sent.
OF_A_FOLDER = (API_KEY, BASE_URL, "OPENAI_MODEL")
ENVIRONMENT, USER, FOLDER = "the environment", "your .env", "the folder's .env"
# These do nothing in a workspace's .coder
OURS = (".env", "hooks.json", "mcp.json", "plugins", "agents")
MAX_FILE = 1 << 20  # bytes of a .env


def field_of(name: str) -> str:
    return name.partition("_")[2].lower()


def value_of(name: str, text: str, flag: str = "") -> Any:
    """The value of a setting. Raises ConfigError, which names the setting or the flag."""
    pattern, convert = SETTINGS[name].kind
    try:
        if not re.fullmatch(pattern, text, re.A | re.I):
            raise ValueError
        return convert(text)
    except (OSError, ValueError, TypeError) as error:
        given = "the value" if name in SECRET else repr(text)
        why = f" ({error})" if str(error) else ""
        raise ConfigError(f"{flag or name}: {given} has to be {SETTINGS[name].help}{why}") from None


def env_line(name: str, text: str) -> str:
    """A setting as a line of a .env."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"{name}={text}" if text.isalnum() or not text else f"{name}='{escaped}'"


# ---- which value counts ----------------------------------------------------------------------------


def load(
    cwd: Path,
    flags: Mapping[str, Any] | None = None,
    config: Path | None = None,
    *,
    needs_server: bool = True,
) -> Settings:
    """The settings for a session in `cwd`. Raises ConfigError.

    `flags` has texts by the names of settings; `config` is the configuration folder, if it is not
    the user's. A program with a model of its own needs no server.
    """
    config = config or config_folder()
    sources = read_sources(cwd, flags, config)
    place = server_place(sources, config) if needs_server else ""
    found = choose(sources, place)
    values = {name: value_of(name, text) for name, (text, _) in found.items()}
    settings = Settings(**{field_of(name): value for name, value in values.items()})
    url = settings.base_url or ""
    if url.lower().startswith("http:") and not (is_loopback(url) or settings.allow_http):
        raise ConfigError(
            f"OPENAI_BASE_URL is {shown_url(url)}, and what is sent there can be read on the way: take https, or give "
            "--allow-http (CODER_ALLOW_HTTP=on) for a server in a network that you trust"
        )
    settings.max_seconds = settings.max_seconds or None
    settings.keys = tuple(secrets(sources))
    notes = _remarks(cwd, config, sources, place, settings.host)
    proxy = proxy_for_client(url)
    if proxy and settings.client == "direct":
        settings.client = "openai"
        notes.append(f"The openai client sends the requests, through {proxy}.")
    settings.notes = tuple(notes)
    if needs_server and not settings.model:
        raise Missing("no model: set OPENAI_MODEL, or use -m NAME", settings)
    return settings


def proxy_for_client(url: str) -> str:
    """The environment's proxy that only the openai client can use; "" if there is none."""
    if not os.environ.keys() & PROXIES:
        return ""
    from coder.providers.https import proxy_of  # late: ssl takes 10 ms

    proxy = proxy_of(url or "https://api.openai.com/v1")
    return proxy.name if proxy and not proxy.is_plain else ""


def client_of(settings: Settings) -> Any:
    """The client of the openai package that sends the requests; None if the direct connection does.
    Raises ModelError."""
    if settings.client == "direct":
        return None
    from coder.providers.openai_client import make_client  # late: the package takes 0.5 s

    return make_client(settings.base_url, settings.api_key)


def _remarks(cwd: Path, config: Path, sources: Sources, place: str, host: str) -> list[str]:
    """What the user should know of where the settings come from."""
    used: tuple[str, ...] = (API_KEY,)  # which many projects have
    notes: list[str] = []
    if any(name in sources[USER] for name in SECRET):
        from coder.permissions.ownership import is_readable_by_others  # late: only with a key

        if is_readable_by_others(file := config / ".env"):
            notes.append(f"Other users may read the key in {file} (fix: chmod 600).")
    if place == FOLDER:
        used = OF_A_FOLDER
        notes.append(f"Server and key come from the .env of this folder: {host}.")
    ignored = [f"{name} in .env" for name in sources[FOLDER] if name not in used]
    ignored += [f".coder/{name}" for name in OURS if os.path.lexists(cwd / ".coder" / name)]
    if ignored and cwd / ".coder" != config:
        where = f"These settings count only in {config}."
        notes.append(f"Ignored in this folder: {', '.join(ignored)}. {where}")
    return notes


def read_sources(
    cwd: Path, flags: Mapping[str, Any] | None = None, config: Path | None = None
) -> Sources:
    """What each place has. Raises ConfigError for a file that cannot be read or trusted."""
    user = (config or config_folder()) / ".env"
    if user.is_file():
        from coder.permissions.ownership import check_ownership  # late: only where there is a file

        try:
            check_ownership(user)
        except OSError as error:
            raise ConfigError(f"{user}: {error.strerror or error}") from None
    given = {name: text for name, text in (flags or {}).items() if text}
    places = {ENVIRONMENT: os.environ | given, USER: _dotenv(user), FOLDER: _dotenv(cwd / ".env")}
    return {
        place: {name: text for name in SETTINGS if (text := (source.get(name) or "").strip())}
        for place, source in places.items()
    }


def _dotenv(path: Path) -> Mapping[str, str | None]:
    """A .env file; no interpolation, so that no value can carry another one away."""
    if not path.is_file():
        return {}
    import io

    from dotenv import dotenv_values  # late: only where there is a file

    try:
        with path.open("rb") as file:
            stream = io.StringIO(file.read(MAX_FILE).decode("utf-8", "replace"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    return dotenv_values(stream=stream, interpolate=False)


def server_place(sources: Sources, config: Path | None = None) -> str:
    """The first place that has a key or a server. Raises ConfigError where the other one is missing there."""
    for place, source in sources.items():
        url = value_of(BASE_URL, source[BASE_URL]) if BASE_URL in source else ""
        if url and API_KEY not in source and not is_loopback(url):
            raise ConfigError(_advise_pairing(sources, place, shown_url(url), config))
        if url or API_KEY in source:
            return place
    raise Missing(
        f"no key: set OPENAI_API_KEY (see `{program()} config`), or name a server on this machine with OPENAI_BASE_URL; "
        f"`{program()} --demo` needs neither"
    )


def _advise_pairing(sources: Sources, place: str, url: str, config: Path | None) -> str:
    """What is wrong with a server that has no key beside it: whose the keys are, and how to pair them."""
    file = (config or config_folder()) / ".env"
    keys = [
        f"the key in {each} belongs to {host_of(source.get(BASE_URL))}"
        for each, source in sources.items()
        if API_KEY in source
    ]
    ways = [f"export {API_KEY}=... with the key of this server"]
    if place == USER:
        ways = [f"write {API_KEY}=... next to it in {file}"]
    elif place == FOLDER:
        ways = [f"export {API_KEY}=... {BASE_URL}={url}"]
    elif API_KEY in sources[USER] and BASE_URL not in sources[USER]:
        ways.insert(
            0, f"if that key is for this server, write {BASE_URL}={url} next to it in {file}"
        )
    problem = f"no {API_KEY} for {url}, which {place} names"
    rule = "A key goes only to the server named in the same place (flags count as the environment)"
    return f"{'; '.join([problem, *keys])}. {rule}: {'; or '.join(ways)}"


def choose(sources: Sources, server: str) -> dict[str, tuple[str, str]]:
    """The text of each setting, with its place; `server` is the place of the key and what belongs to it."""
    found = {}
    for place in (FOLDER, USER, ENVIRONMENT):
        for name, text in sources[place].items():
            foreign = place == FOLDER and (server != FOLDER or name not in OF_A_FOLDER)
            if not foreign and (place == server or name not in OF_A_SERVER):
                found[name] = text, place
    return found


def secrets(sources: Sources) -> Iterator[str]:
    """What is redacted: the keys, and those of the user's headers that hold secrets. Raises ConfigError."""
    for place, source in sources.items():
        if API_KEY in source:
            yield value_of(API_KEY, source[API_KEY])
        if HEADERS in source and place != FOLDER:
            for header, value in value_of(HEADERS, source[HEADERS]).items():
                yield from filter(None, [header_secret(header, value)])
