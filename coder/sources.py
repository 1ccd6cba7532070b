"""Where settings come from, and which of several values counts.

The sources are flags and the environment, the user's .env, the folder's .env and the defaults, in
this order. A key goes only to the server that the same source names, so that no file of a
repository can send the user's key elsewhere. The folder's .env counts only if nothing else has a
key or a server: then it gives both and the model, and no more. A file that another user may have
written does not count. No setting loosens permissions.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from coder.providers.text import PROXIES, host_of, is_loopback, shown_url
from coder.settings import (
    API_KEY,
    BASE_URL,
    HEADERS,
    SECRET,
    SETTINGS,
    ConfigError,
    Missing,
    Settings,
    config_folder,
    field_of,
    program,
    value_of,
)
from coder.tools.secrets import header_secret

Sources = Mapping[str, Mapping[str, str]]  # the texts of settings, none of them empty, by source

ENVIRONMENT = "the environment"
USER = "your .env"
FOLDER = "the folder's .env"
OF_A_SERVER = (API_KEY, BASE_URL, HEADERS)  # all from one source
# What a folder may set. The rest costs money or time, weakens the model, names a file that is read
# or changes what is sent
OF_A_FOLDER = (API_KEY, BASE_URL, "OPENAI_MODEL")
# These do nothing in a workspace's .coder
OURS = (".env", "hooks.json", "mcp.json", "plugins", "agents")
MAX_FILE = 1 << 20  # bytes of a .env


def load(
    cwd: Path,
    flags: Mapping[str, Any] | None = None,
    config: Path | None = None,
    *,
    needs_server: bool = True,
) -> Settings:
    """The settings for a session in `cwd`. Raises ConfigError.

    `flags` has texts by the names of settings, other names do not count; `config` is the
    configuration folder, if it is not the user's. A program with a model of its own needs no
    server.
    """
    config = config or config_folder()
    sources = read_sources(cwd, flags, config)
    server = server_source(sources, config) if needs_server else ""
    values = {}
    for name, (text, _) in choose_texts(sources, server).items():
        values[field_of(name)] = value_of(name, text)
    settings = Settings(**values)
    check_address(settings)
    settings.max_seconds = settings.max_seconds or None
    settings.keys = tuple(secrets(sources))

    # What the user should know of where the settings come from
    notes = note_readable_key(config / ".env", sources[USER])
    if server == FOLDER:
        notes.append(f"Server and key come from the .env of this folder: {settings.host}.")
    notes += note_ignored(cwd, config, sources[FOLDER], server)
    proxy = proxy_for_client(settings.base_url)
    if proxy and settings.client == "direct":
        settings.client = "openai"
        notes.append(f"The openai client sends the requests, through {proxy}.")
    settings.notes = tuple(notes)
    if needs_server and not settings.model:
        raise Missing("no model: set OPENAI_MODEL, or use -m NAME", settings)
    return settings


def check_address(settings: Settings) -> None:
    """Raise ConfigError for a server on another machine that is not asked over TLS."""
    url = settings.base_url or ""
    is_plain = url.lower().startswith("http:")
    if is_plain and not is_loopback(url) and not settings.allow_http:
        raise ConfigError(
            f"OPENAI_BASE_URL is {shown_url(url)}, and what is sent there can be read on the way: "
            "take https, or give --allow-http (CODER_ALLOW_HTTP=on) for a server in a network that "
            "you trust"
        )


def proxy_for_client(url: str | None) -> str:
    """The environment's proxy that only the openai client can use; "" if there is none."""
    if not os.environ.keys() & PROXIES:
        return ""
    from coder.providers.https import proxy_of  # late: ssl takes 10 ms

    proxy = proxy_of(url or "https://api.openai.com/v1")
    return proxy.name if proxy and not proxy.is_plain else ""


def note_readable_key(file: Path, texts: Mapping[str, str]) -> list[str]:
    if texts.keys().isdisjoint(SECRET):
        return []
    from coder.permissions.ownership import is_readable_by_others  # late: only with a key

    if not is_readable_by_others(file):
        return []
    return [f"Other users may read the key in {file} (fix: chmod 600)."]


def note_ignored(
    cwd: Path,
    config: Path,
    texts: Mapping[str, str],
    server: str,
) -> list[str]:
    """A note on what the folder may not set."""
    used: Collection[str] = OF_A_FOLDER
    if server != FOLDER:
        used = (API_KEY,)  # which many projects have
    own = cwd / ".coder"
    ignored = [f"{name} in .env" for name in texts if name not in used]
    ignored += [f".coder/{name}" for name in OURS if os.path.lexists(own / name)]
    if not ignored or own == config:
        return []
    names = ", ".join(ignored)
    return [f"Ignored in this folder: {names}. These settings count only in {config}."]


def read_sources(
    cwd: Path,
    flags: Mapping[str, Any] | None = None,
    config: Path | None = None,
) -> Sources:
    """What each source has. Raises ConfigError for a file that cannot be read or trusted."""
    user = (config or config_folder()) / ".env"
    check_owner(user)
    given = {name: text for name, text in (flags or {}).items() if text}
    return {
        ENVIRONMENT: texts_of_settings(os.environ | given),
        USER: texts_of_settings(read_dotenv(user)),
        FOLDER: texts_of_settings(read_dotenv(cwd / ".env")),
    }


def check_owner(path: Path) -> None:
    """Raise ConfigError if there is such a file and another user may have written it."""
    if not path.is_file():
        return
    from coder.permissions.ownership import check_ownership  # late: only if there is a file

    try:
        check_ownership(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None


def read_dotenv(path: Path) -> Mapping[str, str | None]:
    """A .env file; no interpolation, so that no value can carry another one away."""
    if not path.is_file():
        return {}
    import io

    from dotenv import dotenv_values  # late: only if there is a file

    try:
        with path.open("rb") as file:
            stream = io.StringIO(file.read(MAX_FILE).decode("utf-8", "replace"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    return dotenv_values(stream=stream, interpolate=False)


def texts_of_settings(values: Mapping[str, str | None]) -> dict[str, str]:
    texts = {}
    for name in SETTINGS:
        text = (values.get(name) or "").strip()
        if text:
            texts[name] = text
    return texts


def server_source(sources: Sources, config: Path | None = None) -> str:
    """The first source that has a key or a server. Raises ConfigError if it has no key for its
    server, which needs one, and Missing if no source has either."""
    for source, texts in sources.items():
        url = ""
        if BASE_URL in texts:
            url = value_of(BASE_URL, texts[BASE_URL])
        has_key = API_KEY in texts
        if url and not has_key and not is_loopback(url):
            raise ConfigError(advise_pairing(sources, source, shown_url(url), config))
        if url or has_key:
            return source
    raise Missing(
        f"no key: set OPENAI_API_KEY (see `{program()} config`), or name a server on this machine "
        f"with OPENAI_BASE_URL; `{program()} --demo` needs neither"
    )


def advise_pairing(
    sources: Sources,
    source: str,
    url: str,
    config: Path | None,
) -> str:
    """What is wrong with a server without a key: whose the keys are, and how to pair them."""
    problems = [f"no {API_KEY} for {url}, which {source} names"]
    for name, texts in sources.items():
        if API_KEY in texts:
            problems.append(f"the key in {name} belongs to {host_of(texts.get(BASE_URL))}")
    file = (config or config_folder()) / ".env"
    has_free_key = API_KEY in sources[USER] and BASE_URL not in sources[USER]
    if source == USER:
        ways = f"write {API_KEY}=... next to it in {file}"
    elif source == FOLDER:
        ways = f"export {API_KEY}=... {BASE_URL}={url}"
    else:
        ways = f"export {API_KEY}=... with the key of this server"
        if has_free_key:
            other = f"if that key is for this server, write {BASE_URL}={url} next to it in {file}"
            ways = f"{other}; or {ways}"
    rule = "A key goes only to the server named in the same place (flags count as the environment)"
    return f"{'; '.join(problems)}. {rule}: {ways}"


def choose_texts(sources: Sources, server: str) -> dict[str, tuple[str, str]]:
    """The text of each setting, with its source; `server` is the source of the key."""
    found = {}
    for source in (FOLDER, USER, ENVIRONMENT):  # a later one counts more
        for name, text in sources[source].items():
            if name in OF_A_SERVER and source != server:
                continue
            if source == FOLDER and (server != FOLDER or name not in OF_A_FOLDER):
                continue
            found[name] = (text, source)
    return found


def secrets(sources: Sources) -> Iterator[str]:
    """What is redacted: the keys, and the secrets in the user's headers. Raises ConfigError."""
    for source, texts in sources.items():
        if API_KEY in texts:
            yield value_of(API_KEY, texts[API_KEY])
        if HEADERS not in texts or source == FOLDER:
            continue
        for header, value in value_of(HEADERS, texts[HEADERS]).items():
            secret = header_secret(header, value)
            if secret:
                yield secret
