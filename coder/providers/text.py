"""Strings that every JSON encoder and every server takes (text, tool names, call ids), and addresses as they are shown."""

from __future__ import annotations

import os
import re
from typing import Any
from urllib.parse import urlsplit, urlunsplit


def mend(text: str) -> str:
    """Join surrogate pairs that came apart; what no encoder takes (a lone half, NUL) becomes U+FFFD."""
    if text.isascii():
        return text.replace("\0", "\ufffd") if "\0" in text else text
    return (
        text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace("\0", "\ufffd")
    )


DEEPEST = 100  # levels of a JSON value; nobody means more, and Python's own limit is not far


def mend_all(value: Any, left: int = DEEPEST) -> Any:
    """`mend` for every string inside a JSON value. Raises ValueError where it is nested too deeply."""
    if isinstance(value, str):
        return mend(value)
    if not left:
        raise ValueError("nested too deeply")
    if isinstance(value, list | tuple):
        return [mend_all(item, left - 1) for item in value]
    if isinstance(value, dict):
        return {
            mend(key) if isinstance(key, str) else key: mend_all(item, left - 1)
            for key, item in value.items()
        }
    return value


def safe_name(name: str) -> str:
    """A tool name that every server takes back in the history."""
    return re.sub(r"[^a-zA-Z0-9_-]", "_", name)[:64] or "unknown"


def new_id() -> str:
    """Nine alphanumerics: fits every server."""
    return os.urandom(5).hex()[:9]


# ---- addresses -------------------------------------------------------------------------------------


def is_loopback(url: str | None) -> bool:
    """Is this a server on this machine, by its address alone? False for what is no URL."""
    try:
        host = urlsplit(url or "").hostname or ""
    except ValueError:
        return False
    return host in ("localhost", "::1") or bool(re.fullmatch(r"127(\.\d+){3}", host))


def host_of(url: str | None) -> str:
    """host:port of a base URL, without what may stand before an @; the openai client's own server where there is none."""
    try:
        return urlsplit(url or "https://api.openai.com").netloc.rpartition("@")[2]
    except ValueError:
        return ""


def shown_url(url: str) -> str:
    """An address for an error's line: without user, password and query, which may hold a key, and not too long."""
    try:
        parts = urlsplit(url)
        return urlunsplit(
            (parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "")
        ).rstrip("/")[:300]
    except ValueError:
        return url.rpartition("@")[2].partition("?")[0][:300]
