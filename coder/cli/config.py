"""Where the settings come from: flags, the environment, the user's .env, the folder's .env, defaults; in this order.

A key goes only to the server that was named in the same place, so that no file of a repository can send the user's
key elsewhere. The folder's .env counts only where nothing else has a key or a server: then it gives both and the model,
and no more. A file that another user may have written does not count. No setting loosens permissions.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from itertools import starmap
from pathlib import Path
from typing import Any

from coder.cli.flags import program
from coder.cli.settings import NAMES, SETTINGS, ConfigError, Settings, Source, value_of, window_of
from coder.providers.address import host_of, is_loopback, shown_url
from coder.tools.secrets import header_secret

# What a folder may set. The rest costs money or time, weakens the model, names a file that we read or changes what is sent.
OF_A_FOLDER = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_MODEL")
SERVER = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "CODER_HEADERS")  # all from one source
PLACES = ("the environment", "your .env", "the folder's .env")
# Of config_folder(): in a workspace's .coder they do nothing, which is reported
OURS = (".env", "hooks.json", "plugins", "agents")
MAX_FILE = 1 << 20  # bytes of a .env


def config_folder() -> Path:
    return _base("XDG_CONFIG_HOME", ".config") / "coder"


def data_folder() -> Path:
    return _base("XDG_DATA_HOME", ".local/share") / "coder"


def _base(name: str, default: str) -> Path:
    """A relative value counts as none (the XDG base directory specification): it would lie in the folder that is
    worked in. So would a relative HOME: raises ConfigError."""
    given = Path(os.environ.get(name, ""))
    home = Path("" if os.environ.get("HOME") == "" else os.path.expanduser("~"))
    if not home.is_absolute():
        raise ConfigError(f"HOME is {os.environ.get('HOME', '')!r}, and has to be an absolute path")
    return given if given.is_absolute() else home / default


def load(cwd: Path, flags: Mapping[str, object] | None = None) -> Settings:
    """The settings for a session in `cwd`. `flags` go by the names above; None means not given. Raises ConfigError."""
    given = {name: str(value) for name, value in (flags or {}).items() if value is not None}
    folder = _dotenv(cwd / ".env")
    allowed = {name: value for name, value in folder.items() if name in OF_A_FOLDER}
    sources: list[Source] = [given, dict(os.environ), _of_the_user(), allowed]
    base_url, api_key, place = _server(sources)
    counts = place == PLACES[-1]
    sources = sources if counts else sources[:-1]
    first = {name: next((s[name] for s in sources if s.get(name)), "") for name in NAMES}
    values = {SETTINGS[name][0]: value_of(name, first) for name in NAMES if name not in SERVER}
    values |= {"base_url": base_url, "api_key": api_key}
    if not values["model"]:
        raise ConfigError("no model: set OPENAI_MODEL, or use -m NAME")
    if base_url and not values["allow_http"]:
        _refuse_plain(base_url)
    if values["profile"]:
        _check_profile(host_of(base_url), values["model"], values["profile"])
    values["context_window"] = values["context_window"] or window_of(values["model"])
    values["max_seconds"] = values["max_seconds"] or None
    return Settings(
        **values,
        headers=_headers_for(place, sources),
        keys=tuple(dict.fromkeys(secret for source in sources for secret in _secrets(source))),
        notes=tuple(_notes(cwd, folder, counts, base_url)),
    )


def _check_profile(host: str, model: str, profile: Mapping[str, Any]) -> None:
    """Raises ConfigError where profiles.py knows no such field or value."""
    from coder.providers.profiles import profile_of

    try:
        profile_of(host, model, profile)
    except ValueError as error:
        raise ConfigError(f"CODER_PROFILE: {error}") from None


def _refuse_plain(url: str) -> None:
    """Raises ConfigError for http to another machine."""
    if url.lower().startswith("http:") and not is_loopback(url):
        raise ConfigError(
            f"OPENAI_BASE_URL is {shown_url(url)}, and what is sent there can be read on the way: take https, or give "
            "--allow-http (CODER_ALLOW_HTTP=on) for a server in a network that you trust"
        )


def _of_the_user() -> Source:
    """The user's .env. Raises ConfigError where another user may have written it."""
    path = config_folder() / ".env"
    if not path.is_file():
        return {}
    from coder.permissions.rules import check_ownership  # late: only where there is a file

    try:
        check_ownership(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    return _dotenv(path)


def _notes(cwd: Path, folder: Source, counts: bool, base_url: str | None) -> Iterator[str]:
    """What the user should know: that the folder names the server, and what in it does not count."""
    if counts:
        yield f"Server and key come from the .env of this folder: {host_of(base_url)}."
    used = OF_A_FOLDER if counts else ("OPENAI_API_KEY",)
    unused = [name for name in folder if name not in used]
    strange = [f"{', '.join(unused)} in .env"] if unused else []
    strange += [f".coder/{name}" for name in OURS if os.path.lexists(cwd / ".coder" / name)]
    if strange and cwd / ".coder" != config_folder():
        yield f"Ignored in this folder: {'; '.join(strange)}. These settings count only in {config_folder()}."


def _server(sources: list[Source]) -> tuple[str | None, str | None, str]:
    """(base URL, key, their place): a URL given as a flag with the user's own key, else both from the first source
    that has either."""
    flags, *others = sources
    if url := value_of("OPENAI_BASE_URL", flags):
        found = next(filter(None, (value_of("OPENAI_API_KEY", each) for each in others[:2])), None)
        if found or is_loopback(url):
            return url, found, "a flag"
        others = []
    for place, source in zip(PLACES, others):
        url, api_key = value_of("OPENAI_BASE_URL", source), value_of("OPENAI_API_KEY", source)
        if url and not api_key and not is_loopback(url):
            raise ConfigError(
                f"OPENAI_BASE_URL is set in {place} without OPENAI_API_KEY: a key and its server have to come from "
                "the same place"
            )
        if url or api_key:
            return url, api_key or None, place
    raise ConfigError(
        f"no key: set OPENAI_API_KEY (see `{program()} config`), or name a server on this machine with OPENAI_BASE_URL; "
        f"`{program()} --demo` needs neither"
    )


def _headers_for(place: str, sources: list[Source]) -> dict[str, str]:
    """The headers for the server of `place`, which may be secrets, too: not those that stand in another place for
    another server; never for the server of a folder."""
    near = {PLACES[0]: sources[1:2], PLACES[-1]: []}.get(place, sources[1:3])
    return next(filter(None, (value_of("CODER_HEADERS", source) for source in near)), {})


def _secrets(source: Source) -> Iterator[str]:
    """What is redacted: the key, and those headers that hold secrets. Any other value may be a plain word, which the
    files that the model reads hold, too."""
    yield from filter(None, [value_of("OPENAI_API_KEY", source)])
    yield from filter(None, starmap(header_secret, value_of("CODER_HEADERS", source).items()))


def keys_of(cwd: Path) -> list[str]:
    """The keys of all sources, to be redacted. Raises ConfigError."""
    sources: list[Source] = [dict(os.environ), _of_the_user(), _dotenv(cwd / ".env")]
    return [secret for source in sources for secret in _secrets(source)]


def _dotenv(path: Path) -> dict[str, str]:
    """The known names in a .env file; no interpolation, so that no value can carry another one away."""
    if not path.is_file():
        return {}
    from dotenv import dotenv_values  # late: only where there is a file

    try:
        with path.open("rb") as file:
            stream = io.StringIO(file.read(MAX_FILE).decode("utf-8", "replace"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    found = dotenv_values(stream=stream, interpolate=False)
    return {name: value for name, value in found.items() if name in NAMES and value}
