"""Where a base URL leads."""

from __future__ import annotations

import re
from urllib.parse import urlsplit, urlunsplit


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
