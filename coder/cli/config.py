"""Where the settings come from: flags and the environment, the user's .env, the folder's .env, defaults; in this order.

A key goes only to the server that was named in the same place, so that no file of a repository can send the user's
key elsewhere. The folder's .env counts only where nothing else has a key or a server: then it gives both and the model,
and no more. A file that another user may have written does not count. No setting loosens permissions.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from coder.cli.settings import SETTINGS, ConfigError, Missing, Settings, field_of, program, value_of
from coder.providers.text import is_loopback, shown_url
from coder.tools.secrets import header_secret

KEY, URL, HEADERS = "OPENAI_API_KEY", "OPENAI_BASE_URL", "CODER_HEADERS"
OF_A_SERVER = (KEY, URL, HEADERS)  # all from one place
# What a folder may set. The rest costs money or time, weakens the model, names a file that we read or changes what is sent.
OF_A_FOLDER = (KEY, URL, "OPENAI_MODEL")
ENVIRONMENT, USER, FOLDER = "the environment", "your .env", "the folder's .env"
# These do nothing in a workspace's .coder
OURS = (".env", "hooks.json", "mcp.json", "plugins", "agents")
MAX_FILE = 1 << 20  # bytes of a .env

Sources = Mapping[str, Mapping[str, str]]  # by place the settings' texts, none of them empty


def config_folder() -> Path:
    return _base("XDG_CONFIG_HOME", ".config") / "coder"


def data_folder() -> Path:
    return _base("XDG_DATA_HOME", ".local/share") / "coder"


def _base(name: str, default: str) -> Path:
    """A relative value counts as none: it would lie in the folder that is worked in."""
    given = Path(os.environ.get(name, ""))
    return given if given.is_absolute() else Path.home() / default


def load(cwd: Path, flags: Mapping[str, Any] | None = None) -> Settings:
    """The settings for a session in `cwd`; `flags` has texts by the names of settings. Raises ConfigError."""
    sources = read_sources(cwd, flags)
    place = server_place(sources)
    found = choose(sources, place)
    values = {field_of(name): value_of(name, text) for name, (text, _) in found.items()}
    settings = Settings(**values)
    url = settings.base_url or ""
    if url.lower().startswith("http:") and not (is_loopback(url) or settings.allow_http):
        raise ConfigError(
            f"OPENAI_BASE_URL is {shown_url(url)}, and what is sent there can be read on the way: take https, or give "
            "--allow-http (CODER_ALLOW_HTTP=on) for a server in a network that you trust"
        )
    settings = replace(
        settings,
        max_seconds=settings.max_seconds or None,
        keys=tuple(secrets(sources)),
        notes=tuple(_notes(cwd, sources, settings.host if place == FOLDER else "")),
    )
    if not settings.model:
        raise Missing("no model: set OPENAI_MODEL, or use -m NAME", settings)
    return settings


def read_sources(cwd: Path, flags: Mapping[str, Any] | None = None) -> Sources:
    """What each place has. Raises ConfigError for a file that cannot be read or trusted."""
    user = config_folder() / ".env"
    if user.is_file():
        from coder.permissions.rules import check_ownership  # late: only where there is a file

        try:
            check_ownership(user)
        except OSError as error:
            raise ConfigError(f"{user}: {error.strerror or error}") from None
    given = {name: text for name, text in (flags or {}).items() if name in SETTINGS and text}
    places = {ENVIRONMENT: os.environ | given, USER: _dotenv(user), FOLDER: _dotenv(cwd / ".env")}
    return {
        place: {name: text for name in SETTINGS if (text := (source.get(name) or "").strip())}
        for place, source in places.items()
    }


def _dotenv(path: Path) -> Mapping[str, str | None]:
    """A .env file; no interpolation, so that no value can carry another one away."""
    if not path.is_file():
        return {}
    from dotenv import dotenv_values  # late: only where there is a file

    try:
        with path.open("rb") as file:
            stream = io.StringIO(file.read(MAX_FILE).decode("utf-8", "replace"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    return dotenv_values(stream=stream, interpolate=False)


def server_place(sources: Sources) -> str:
    """The first place that has a key or a server. Raises ConfigError where the other one is missing there."""
    for place, source in sources.items():
        url = value_of(URL, source[URL]) if URL in source else ""
        if url and KEY not in source and not is_loopback(url):
            raise ConfigError(
                f"OPENAI_BASE_URL has no OPENAI_API_KEY beside it in {place}: a key goes only to the server named in "
                "the same place (a flag counts as the environment)"
            )
        if url or KEY in source:
            return place
    raise Missing(
        f"no key: set OPENAI_API_KEY (see `{program()} config`), or name a server on this machine with OPENAI_BASE_URL; "
        f"`{program()} --demo` needs neither"
    )


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
        if KEY in source:
            yield value_of(KEY, source[KEY])
        if HEADERS in source and place != FOLDER:
            for header, value in value_of(HEADERS, source[HEADERS]).items():
                yield from filter(None, [header_secret(header, value)])


def _notes(cwd: Path, sources: Sources, host: str) -> Iterator[str]:
    """What the user should know: that the folder names the server, `host`, and what in it does not count."""
    if host:
        yield f"Server and key come from the .env of this folder: {host}."
    used = OF_A_FOLDER if host else (KEY,)  # many projects have a key
    ignored = [f"{name} in .env" for name in sources[FOLDER] if name not in used]
    ignored += [f".coder/{name}" for name in OURS if os.path.lexists(cwd / ".coder" / name)]
    if ignored and cwd / ".coder" != config_folder():
        yield f"Ignored in this folder: {', '.join(ignored)}. These settings count only in {config_folder()}."
