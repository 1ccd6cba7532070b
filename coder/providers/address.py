"""Where a base URL leads."""

from __future__ import annotations

import ipaddress
import os
import re
from contextlib import suppress
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


def proxy_of(url: str) -> tuple[str, str]:
    """(its address, the variable that names it) of the proxy of the environment for a server, which NO_PROXY may except.
    ("", "") where there is none, and for http, where it would read the key."""
    from urllib.request import getproxies, proxy_bypass  # late: 30 ms

    parts = urlsplit(url)
    known, host = getproxies(), parts.hostname or ""
    address = known.get("https") or known.get("all") or ""
    excepted = any(_within(host, entry.strip()) for entry in known.get("no", "").split(","))
    if (
        parts.scheme.lower() != "https"
        or not address
        or excepted
        or proxy_bypass(parts.netloc.rpartition("@")[2])
    ):
        return "", ""
    names = [
        name
        for word in ("https_proxy", "all_proxy")
        for name in (word, word.upper())
        if os.environ.get(name)
    ]
    return address if "://" in address else f"http://{address}", names[
        0
    ] if names else "the system's settings"


def _within(host: str, network: str) -> bool:
    """Is this an address of a network such as 10.0.0.0/8?"""
    with suppress(ValueError):
        return ipaddress.ip_address(host) in ipaddress.ip_network(network, strict=False)
    return False
