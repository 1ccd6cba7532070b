"""How this package was installed, for a message that says how to add what it lacks."""

from __future__ import annotations

import json
import shlex
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

NAME = "coder-agent"


def command_for(extra: str) -> str:
    """The shell command that installs this package with an extra, as it was installed."""
    try:
        package: Distribution | None = distribution(NAME)
    except PackageNotFoundError:  # its folder is on the path
        package = None
    return f"{_installer(package)} {_source(package, extra)}"


def _installer(package: Distribution | None) -> str:
    """uv and pipx leave a file in their environments; else see `INSTALLER` (PEP 376)."""
    if Path(sys.prefix, "uv-receipt.toml").exists():
        return "uv tool install"
    if Path(sys.prefix, "pipx_metadata.json").exists():
        return "pipx install --force"
    python = shlex.quote(sys.executable)
    if package and (package.read_text("INSTALLER") or "").strip() == "uv":
        return f"uv pip install --python {python}"
    return f"{python} -m pip install"


def _source(package: Distribution | None, extra: str) -> str:
    """What to install: a folder or an address, if it was one (PEP 610), or the name."""
    text = package.read_text("direct_url.json") if package else None
    if not text:
        return shlex.quote(f"{NAME}[{extra}]")
    origin = json.loads(text)
    url = origin["url"]
    if "dir_info" in origin:
        folder = shlex.quote(f"{unquote(urlsplit(url).path)}[{extra}]")
        is_editable = origin["dir_info"].get("editable")
        return f"-e {folder}" if is_editable else folder
    if "vcs_info" in origin:
        url = f"{origin['vcs_info']['vcs']}+{url}"
    return shlex.quote(f"{NAME}[{extra}] @ {url}")
