"""Models by name: what a server has, servers of this machine, and the choice at a first start.

Imported only if a server or a name is missing, for /model, and after an error about a model that is
not there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import sys
from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path

from coder.abort import Abort
from coder.ai import ChatModel
from coder.cli.process import USAGE
from coder.cli.wording import by_number, first_of
from coder.providers.endpoint import Endpoint
from coder.providers.errors import explain
from coder.settings import (
    ConfigError,
    Missing,
    Settings,
    client_of,
    config_folder,
    env_line,
    program,
)
from coder.sources import FOLDER, load, read_sources, server_source
from coder.tools.workspace import make_private
from coder.types import CoderError, ModelError

# On which servers listen by default, by their documentation
PORTS = {"Ollama": 11434, "llama.cpp": 8080, "LM Studio": 1234, "vLLM": 8000}
OLLAMA_HOST = r"(http://)?(localhost|127\.0\.0\.1|0\.0\.0\.0)?:(\d{1,5})/?"  # of this machine
LISTING = 3.0  # seconds; if nobody listens it takes none
MAX_ROWS = 15
MAX_NAME = 200  # characters
NO_CHAT = r"embed|whisper|\btts|dall-e|moderation|rerank|transcribe|realtime|audio|image|sora"
NOTHING = """\
coder needs a language model, and neither a key nor a server is named.

{servers}
The ways to go on:
  a key      export OPENAI_API_KEY=... OPENAI_MODEL=gpt-5
             or the same without `export` in {file};
             OPENAI_BASE_URL=... next to it names another provider
  a server   {command}
             on this machine; it needs no key
  a look     {program} --demo
"""


def models_of(endpoint: Endpoint, near: str = "", abort: Abort | None = None) -> list[str]:
    """The server's models for conversations, those nearest to a name first.

    Raises ModelError and Aborted.
    """
    listed = dict.fromkeys(endpoint.models(LISTING, abort))
    names = [name for name in listed if name.isprintable() and len(name) <= MAX_NAME]
    names = [name for name in names if not re.search(NO_CHAT, name, re.I)] or names
    near = near.lower()

    def distance(name: str) -> tuple[bool, float]:
        return near not in name.lower(), -SequenceMatcher(None, near, name.lower()).ratio()

    return sorted(names, key=distance) if near else names


def advise(error: ModelError, model: ChatModel, abort: Abort) -> None:
    """If the server does not have this model, let the error name those that it has."""
    with contextlib.suppress(CoderError):
        names = models_of(model.endpoint, model.name, abort=abort)
        if names and model.name not in names:
            error.advice = f"Choose with -m or /model; the server has: {first_of(names)}."


# ---- a first start -------------------------------------------------------------------------------


def complete(missing: Missing, arguments: argparse.Namespace) -> Settings:
    """The settings with the only model of the server, or with what the user chooses.

    Raises ConfigError, and SystemExit if the user chooses nothing of what is on the screen.
    """
    settings = missing.settings
    visible = sys.stderr.isatty() and not arguments.quiet
    has_server = settings is not None and bool(settings.base_url)
    if not visible and not has_server:  # OpenAI's own has many
        raise missing
    if settings is None:
        arguments.OPENAI_BASE_URL, arguments.OPENAI_MODEL = _choose_server(arguments.can_ask)
        return load(Path.cwd(), vars(arguments))
    names = _names_of(settings, missing)
    if len(names) == 1:
        settings.model = names[0]
    elif visible and names:
        sys.stderr.write(f"coder: {missing}. {settings.host} has:{_numbered(names)}\n")
        settings.model = _choose_model(names, arguments)
    else:
        raise ConfigError(f"{missing}; the server has: {first_of(names) or 'none'}")
    return settings


def _names_of(settings: Settings, missing: Missing) -> list[str]:
    """The models of the server. Raises ConfigError."""
    try:
        return models_of(_endpoint_of(settings), near="" if settings.base_url else "gpt-5")
    except ModelError as error:
        raise ConfigError(f"{missing}; {explain(error)}") from None


def _endpoint_of(settings: Settings) -> Endpoint:
    client = client_of(settings)
    if client is None:
        return Endpoint(settings.base_url, settings.api_key, settings.headers)
    from coder.providers.openai_client import ClientEndpoint  # late: as the client

    return ClientEndpoint(client, "", settings.headers)


def _choose_model(names: Sequence[str], arguments: argparse.Namespace) -> str:
    """The model that the user names; it is kept for the usual server."""
    model = by_number(names, _answer("number or name: ", arguments.can_ask))
    # A flag or a folder names a server for now, and the usual one may have no such model
    source = server_source(read_sources(Path.cwd(), vars(arguments)))
    is_for_now = arguments.OPENAI_BASE_URL or source == FOLDER
    _keep(not is_for_now, OPENAI_MODEL=model)
    return model


def _choose_server(can_ask: bool) -> tuple[str, str]:
    """(URL, model) of a server of this machine, which is kept; all other ways are shown."""
    file = config_folder() / ".env"
    options, servers = _find_servers()
    url, model = options[0] if options else (_local_url(PORTS["Ollama"]), "NAME")
    command = f"{program()} --base-url {url} -m {shlex.quote(model)}"
    sys.stderr.write(
        NOTHING.format(
            servers=servers,
            file=file,
            command=command,
            program=program(),
        )
    )
    answer = _answer(f"number (kept in {file}): ", can_ask and bool(options))
    numbers = [str(number) for number in range(1, len(options) + 1)]
    if answer not in numbers:
        raise ConfigError(f"{answer} is no number of the list")
    url, model = options[numbers.index(answer)]
    _keep(True, OPENAI_BASE_URL=url, OPENAI_MODEL=model)
    return url, model


def _find_servers() -> tuple[list[tuple[str, str]], str]:
    """((URL, model) of the servers of this machine, the list of them for the screen)."""
    ports = dict(PORTS)
    own = re.fullmatch(OLLAMA_HOST, os.environ.get("OLLAMA_HOST", ""))
    if own:
        ports["Ollama"] = int(own[3])
    options: list[tuple[str, str]] = []
    listed = "On this machine:\n"
    for name, port in ports.items():
        url = _local_url(port)
        with contextlib.suppress(CoderError):
            names = models_of(Endpoint(url, None, {}))
            listed += f"  {name} at {url}{_numbered(names, above=len(options))}\n"
            options += [(url, model) for model in names[:MAX_ROWS]]
    if options:
        return options, listed
    usual = ", ".join(f"{name} {port}" for name, port in PORTS.items())
    return [], f"No server with a model answers on this machine at the ports of\n{usual}.\n"


def _local_url(port: int) -> str:
    return f"http://127.0.0.1:{port}/v1"


def _keep(for_good: bool, **chosen: str) -> None:
    """Add the choice to the user's .env, whose last lines count. If that cannot be done, or the
    choice is for this start only, show how."""
    file = config_folder() / ".env"
    lines = "".join(f"{env_line(name, text)}\n" for name, text in chosen.items())
    with contextlib.suppress(OSError):
        make_private(file.parent, close=True)
        if for_good:
            with open(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "a+b") as opened:
                opened.seek(0)
                kept = opened.read()
                if kept and not kept.endswith(b"\n"):  # an editor may have ended no line
                    opened.write(b"\n")
                opened.write(lines.encode())
            sys.stderr.write(f"Kept in {file}.\n")
            return
    sys.stderr.write(f"To keep this choice: echo {shlex.quote(lines.rstrip())} >> {file}\n")


def _answer(question: str, can_ask: bool) -> str:
    """What the user enters. Raises SystemExit if that is nothing."""
    answer = ""
    if can_ask:
        sys.stderr.write(question)
        sys.stderr.flush()
        answer = sys.stdin.readline().strip()
    if not answer:
        raise SystemExit(USAGE)
    return answer


def _numbered(names: Sequence[str], above: int = 0) -> str:
    """The first of them in rows, each with its number; there are `above` rows before."""
    rows = ""
    for number, name in enumerate(names[:MAX_ROWS], above + 1):
        rows += f"\n{number:>5}  {name}"
    left_out = len(names) - MAX_ROWS
    return f"{rows}\n       and {left_out} more" if left_out > 0 else rows
