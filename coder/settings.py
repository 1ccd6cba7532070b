"""The settings: one table, from which flags, environment, .env files and `coder config` come.

Which of several values counts is in sources.py.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from coder.providers.text import host_of

if TYPE_CHECKING:
    from coder.providers.profiles import Price
    from coder.types import Reasoning

# A pattern that the whole text has to match, and what makes the value of it; that raises
# ValueError, OSError or TypeError if the text is no value
Form = tuple[str, Callable[[str], Any]]

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


class ConfigError(Exception):  # not a CoderError, whose module takes 6 ms of `coder --help`
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

    An eighth of the window, since what stays is paid for in each later request. 200 steps of 8 KB
    in 128,000 tokens cost 1.71 million tokens (with a tenth for what is cached) if 16,000 stay, and
    2.09 if 40,000 do. In 200 steps that look at files again and again six more have to be read
    again (22 instead of 16), and it costs 1.68 instead of 1.88. A small window keeps up to a third:
    with an eighth of 48,000 only the newest file would stay.
    """
    return min(max(16_000, window // 8), window // 3)


# ---- what reads a value --------------------------------------------------------------------------


def read_object(text: str) -> dict[str, Any]:
    import json  # late: 2 ms

    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value


def read_body(text: str) -> dict[str, Any]:
    given = read_object(text)
    if "messages" in given:
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

    given = read_object(text)
    profile_of("", "", given)
    return given


def read_prices(path: str) -> dict[str, Price]:
    from coder.providers.profiles import Price

    given = read_object(Path(path).expanduser().read_text("utf-8"))
    return {model: Price(**price) for model, price in given.items()}


# ---- the table -----------------------------------------------------------------------------------


WHOLE: Form = (r"\d{1,12}", int)
NUMBER: Form = (r"\d{1,12}(\.\d+)?", float)
SWITCH: Form = ("on|off", lambda text: text.lower() == "on")
LEVEL: Form = ("|".join(LEVELS), str.lower)
SANDBOX: Form = ("auto|on|off", str.lower)
CLIENT: Form = ("direct|openai", str.lower)
PLAIN: Form = ("[!-~]+", str)
HOST = r"([^\s/@?#\\]*@)?([\w.-]+|\[[0-9a-f:.]+\])(:[1-9]\d{0,4})?"
ADDRESS: Form = (rf"https?://{HOST}([/?#][!-~]*)?", str)
ANY = "(?s).*"


def setting(
    default: Any,
    form: Form,
    help: str,  # noqa: A002 (what it is)
    value: str | None = None,
) -> Any:
    """A row of the table. `help` is what a text has to be, `value` what the flag's value is called
    ("": the flag is a switch; None: there is no flag).
    """
    return SimpleNamespace(
        default=default,
        form=form,
        help=help,
        value=value,
    )


class Settings:  # not a dataclass, which takes 8 ms of `coder --help`
    """Everything that decides which model is asked and how.

    The class has the rows of the table, which SETTINGS lists below; an object has the values.
    `max_steps` is CODER_MAX_STEPS and --max-steps.
    """

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
        fields = vars(self)
        for name, row in SETTINGS.items():
            fields[field_of(name)] = row.default
        fields["keys"] = ()
        fields["notes"] = ()
        fields.update(values)

    @property
    def host(self) -> str:
        return host_of(self.base_url)

    def price_of(self, model: str) -> Price | None:
        """The price under the model's own name, else under the first pattern that fits it."""
        if model in self.prices:
            return self.prices[model]
        for pattern, price in self.prices.items():
            if fnmatchcase(model, pattern):  # such as "deepseek-*"
                return price
        return None


API_KEY = "OPENAI_API_KEY"
BASE_URL = "OPENAI_BASE_URL"
HEADERS = "CODER_HEADERS"
OPENAI = ("api_key", "base_url", "model")  # the openai client has the same names for these
SETTINGS: dict[str, Any] = {}  # the rows of Settings, by the name in the environment
for _field, _row in vars(Settings).items():
    if isinstance(_row, SimpleNamespace):
        _prefix = "OPENAI" if _field in OPENAI else "CODER"
        SETTINGS[f"{_prefix}_{_field.upper()}"] = _row
SECRET = (API_KEY, HEADERS)  # their values are not shown


def field_of(name: str) -> str:
    """The field of Settings, such as max_steps of CODER_MAX_STEPS."""
    return name.partition("_")[2].lower()


def value_of(name: str, text: str, flag: str = "") -> Any:
    """The value of a setting. Raises ConfigError, which names the setting or the flag."""
    row = SETTINGS[name]
    pattern, convert = row.form
    try:
        if not re.fullmatch(pattern, text, re.A | re.I):
            raise ValueError
        return convert(text)
    except (OSError, ValueError, TypeError) as error:
        given = "the value" if name in SECRET else repr(text)
        why = f" ({error})" if str(error) else ""
        raise ConfigError(f"{flag or name}: {given} has to be {row.help}{why}") from None


def env_line(name: str, text: str) -> str:
    """A setting as a line of a .env."""
    if text.isalnum() or not text:
        return f"{name}={text}"
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"{name}='{escaped}'"


def client_of(settings: Settings) -> Any:
    """The client of the openai package that sends the requests; None if the direct connection does.
    Raises ModelError."""
    if settings.client == "direct":
        return None
    from coder.providers.openai_client import make_client  # late: the package takes 0.5 s

    return make_client(settings.base_url, settings.api_key)
