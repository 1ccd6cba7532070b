"""Strings that every JSON encoder and every server takes (text, tool names, call ids), and addresses as they are shown."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit, urlunsplit

if TYPE_CHECKING:
    from coder.types import Message


def mend(text: str) -> str:
    """Join surrogate pairs that came apart; what no encoder takes (a lone half, NUL) becomes U+FFFD."""
    if not text.isascii():
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text.replace("\0", "\ufffd") if "\0" in text else text


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


def text_of(message: Message) -> str:
    """The text of a message, whatever the form of its content."""
    content = message.get("content")
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    texts = (part.get("text") for part in content if isinstance(part, dict))
    return "\n".join(text for text in texts if isinstance(text, str))


def safe_name(name: str) -> str:
    """A tool name that every server takes back in the history."""
    return re.sub(r"[^a-zA-Z0-9_-]", "_", name)[:64] or "unknown"


def new_id() -> str:
    """Nine alphanumerics: fits every server."""
    return os.urandom(5).hex()[:9]


# ---- addresses -------------------------------------------------------------------------------------


def _parts(url: str) -> SplitResult:
    """The parts of a URL, empty where it is none."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


def is_loopback(url: str | None) -> bool:
    """Is this a server on this machine, by its address alone? False for what is no URL."""
    host = _parts(url or "").hostname or ""
    return host in ("localhost", "::1") or bool(re.fullmatch(r"127(\.\d+){3}", host))


def host_of(url: str | None) -> str:
    """host:port of a base URL, without what may stand before an @; the openai client's own server where there is none."""
    return _parts(url or "https://api.openai.com").netloc.rpartition("@")[2]


def shown_url(url: str) -> str:
    """An address for an error's line: without user, password and query, which may hold a key, and not too long."""
    parts = _parts(url)
    shown = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    return (shown or url.rpartition("@")[2].partition("?")[0]).rstrip("/")[:300]
