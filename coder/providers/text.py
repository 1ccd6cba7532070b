"""Strings that every JSON encoder and every server takes: mended text, tool names, call ids."""

from __future__ import annotations

import os
import re
from typing import Any


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
