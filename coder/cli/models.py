"""Models by name: what a server has, servers of this machine, and the choice at a first start.

Imported only where a server or a name is missing, for /model, and behind an error about a model that is not there.
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
from coder.providers.errors import explain
from coder.providers.http import Endpoint
from coder.settings import (
    FOLDER,
    ConfigError,
    Missing,
    Settings,
    config_folder,
    env_line,
    load,
    program,
    read_sources,
    server_place,
)
from coder.tools.workspace import make_private
from coder.types import CoderError, ModelError

# Where servers listen by default, by their documentation
PORTS = {"Ollama": 11434, "llama.cpp": 8080, "LM Studio": 1234, "vLLM": 8000}
OLLAMA_HOST = r"(http://)?(localhost|127\.0\.0\.1|0\.0\.0\.0)?:(\d{1,5})/?"  # of this machine
LISTING = 3.0  # seconds; where nobody listens it takes none
MAX_ROWS, MAX_NAME = 15, 200
NO_CHAT = r"embed|whisper|\btts|dall-e|moderation|rerank|transcribe|realtime|audio|image|sora"
NOTHING = """\
coder needs a language model, and neither a key nor a server is named.

{found}
The ways to go on:
  a key      export OPENAI_API_KEY=... OPENAI_MODEL=gpt-5
             or the same without `export` in {file};
             OPENAI_BASE_URL=... beside it names another provider
  a server   {command}
             on this machine; it needs no key
  a look     {program} --demo
"""


def models_of(endpoint: Endpoint, near: str = "", abort: Abort | None = None) -> list[str]:
    """The server's models for conversations, those nearest to a name first. Raises ModelError and Aborted."""
    known = dict.fromkeys(endpoint.models(LISTING, abort))
    names = [name for name in known if name.isprintable() and len(name) <= MAX_NAME]
    names = [name for name in names if not re.search(NO_CHAT, name, re.I)] or names
    near = near.lower()

    def distance(name: str) -> tuple[bool, float]:
        return near not in name.lower(), -SequenceMatcher(None, near, name.lower()).ratio()

    return sorted(names, key=distance) if near else names


def advise(error: ModelError, model: ChatModel, abort: Abort) -> None:
    """Where the server does not have this model, let the error name those that it has."""
    with contextlib.suppress(CoderError):
        names = models_of(model.endpoint, model.name, abort=abort)
        if names and model.name not in names:
            error.advice = f"Choose with -m or /model; the server has: {first_of(names)}."


# ---- a first start -------------------------------------------------------------------------------


def complete(missing: Missing, arguments: argparse.Namespace) -> Settings:
    """The settings with the only model of the server, or with what the user chooses. Raises ConfigError, and SystemExit
    where nothing is chosen of what is on the screen."""
    settings, visible = missing.settings, sys.stderr.isatty() and not arguments.quiet
    if not visible and not (settings and settings.base_url):  # OpenAI's has many
        raise missing
    if not settings:
        arguments.OPENAI_BASE_URL, arguments.OPENAI_MODEL = _server(arguments.can_ask)
        return load(Path.cwd(), vars(arguments))
    endpoint = Endpoint(settings.base_url, settings.api_key, settings.headers)
    try:
        names = models_of(endpoint, "" if settings.base_url else "gpt-5")
    except ModelError as error:
        raise ConfigError(f"{missing}; {explain(error)}") from None
    if len(names) == 1:
        settings.model = names[0]
    elif visible and names:
        sys.stderr.write(f"coder: {missing}. {settings.host} has:{_number_names(names)}\n")
        settings.model = by_number(names, _answer("number or name: ", arguments.can_ask))
        # A flag or a folder names a server for now, and the usual one may have no model of this name
        place = server_place(read_sources(Path.cwd(), vars(arguments)))
        is_for_now = arguments.OPENAI_BASE_URL or place == FOLDER
        _keep(not is_for_now, OPENAI_MODEL=settings.model)
    else:
        raise ConfigError(f"{missing}; the server has: {first_of(names) or 'none'}")
    return settings


def _server(can_ask: bool) -> tuple[str, str]:
    """(URL, model) of a server of this machine, which is kept; and on the screen all other ways."""
    options = list[tuple[str, str]]()
    file, found = config_folder() / ".env", "On this machine:\n"
    own = re.fullmatch(OLLAMA_HOST, os.environ.get("OLLAMA_HOST", ""))
    for name, port in (PORTS | ({"Ollama": int(own[3])} if own else {})).items():
        url = f"http://127.0.0.1:{port}/v1"
        with contextlib.suppress(CoderError):
            names = models_of(Endpoint(url, None, {}))
            found += f"  {name} at {url}{_number_names(names, len(options))}\n"
            options += [(url, each) for each in names[:MAX_ROWS]]
    if not options:
        ports = ", ".join(f"{name} {port}" for name, port in PORTS.items())
        found = f"No server with a model answers on this machine at the ports of\n{ports}.\n"
    url, model = options[0] if options else (f"http://127.0.0.1:{PORTS['Ollama']}/v1", "NAME")
    command = f"{program()} --base-url {url} -m {shlex.quote(model)}"
    sys.stderr.write(NOTHING.format(found=found, file=file, command=command, program=program()))
    answer = _answer(f"number (kept in {file}): ", can_ask and bool(options))
    numbers = [str(number) for number in range(1, len(options) + 1)]
    if answer not in numbers:
        raise ConfigError(f"{answer} is no number of the list")
    url, model = options[numbers.index(answer)]
    _keep(True, OPENAI_BASE_URL=url, OPENAI_MODEL=model)
    return url, model


def _keep(for_good: bool, **chosen: str) -> None:
    """Add it to the user's .env, whose last lines count. Where that cannot be done, or it is for this start, show how."""
    file = config_folder() / ".env"
    lines = "".join(f"{env_line(name, text)}\n" for name, text in chosen.items())
    with contextlib.suppress(OSError):
        make_private(file.parent, close=True)
        if for_good:
            with open(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "a+b") as opened:
                opened.seek(0)
                last = opened.read()[-1:]  # an editor may have ended no line
                opened.write((b"" if last in (b"", b"\n") else b"\n") + lines.encode())
            sys.stderr.write(f"Kept in {file}.\n")
            return
    sys.stderr.write(f"To keep this choice: echo {shlex.quote(lines.rstrip())} >> {file}\n")


def _answer(question: str, can_ask: bool) -> str:
    """What the user enters. Raises SystemExit where that is nothing."""
    if can_ask:
        sys.stderr.write(question)
        sys.stderr.flush()
        if answer := sys.stdin.readline().strip():
            return answer
    raise SystemExit(USAGE)


def _number_names(names: Sequence[str], above: int = 0) -> str:
    """The first of them in rows, each with its number."""
    rows = [f"{number:>5}  {name}" for number, name in enumerate(names[:MAX_ROWS], above + 1)]
    more = [f"       and {len(names) - MAX_ROWS} more"] if names[MAX_ROWS:] else []
    return "".join(f"\n{row}" for row in [*rows, *more])
