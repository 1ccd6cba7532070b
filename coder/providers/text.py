"""Strings: what every encoder and every server takes, texts that come in pieces, addresses as they
are shown."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import SplitResult, urlsplit, urlunsplit

if TYPE_CHECKING:
    from coder.types import Message

JsonObject = dict[str, Any]


def mend(text: str) -> str:
    """Join surrogate pairs that came apart; what no encoder takes (a lone half, NUL) becomes
    U+FFFD."""
    if not text.isascii():
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text.replace("\0", "\ufffd") if "\0" in text else text


DEEPEST = 100  # levels of a JSON value; nobody means more, and Python's own limit is not far


def mend_all(value: Any, left: int = DEEPEST) -> Any:
    """`mend` for every string inside a JSON value. Raises ValueError if it is nested too deeply."""
    if isinstance(value, str):
        return mend(value)
    if not left:
        raise ValueError("nested too deeply")
    if isinstance(value, list | tuple):
        return [mend_all(item, left - 1) for item in value]
    if isinstance(value, dict):
        return {_mend_key(key): mend_all(item, left - 1) for key, item in value.items()}
    return value


def _mend_key(key: Any) -> Any:
    return mend(key) if isinstance(key, str) else key


def dictionaries(value: Any) -> list[JsonObject]:
    """The dictionaries in a list; [] for a value that is no list."""
    if not isinstance(value, list):
        return []
    return [item for item in value if isinstance(item, dict)]


def strings(parts: list[JsonObject], name: str) -> list[str]:
    """The member of this name of all parts in which it is a string."""
    return [part[name] for part in parts if isinstance(part.get(name), str)]


def text_of(message: Message) -> str:
    """The text of a message, whatever the form of its content."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "\n".join(strings(dictionaries(content), "text"))


NO_NAME = "unknown"  # of a call that came without one


@lru_cache(100)
def safe_name(name: str) -> str:
    """A tool name that every server takes back in the history."""
    return re.sub(r"[^a-zA-Z0-9_-]", "_", name)[:64] or NO_NAME


def new_id() -> str:
    """Nine alphanumerics: fits every server."""
    return os.urandom(5).hex()[:9]


# ---- pieces of an answer -------------------------------------------------------------------------


class ThinkTag:
    """Thoughts before an answer, between tags that may be cut anywhere. Tags later in a text are
    text."""

    OPEN = "<think>"
    CLOSE = "</think>"

    def __init__(self) -> None:
        self.state: Literal["before", "inside", "after", "text"] = "before"
        self._held = ""  # what may be the beginning of a tag

    def split(self, text: str) -> tuple[str, str]:
        """(thought, text) of this piece, as far as it is known by now."""
        thought = ""
        text = self._held + text
        self._held = ""
        if self.state == "before":
            text = self._take_open_tag(text)
        if self.state == "inside":
            thought, text = self._take_thought(text)
        if self.state == "after":  # white space between the tag and the text is dropped
            text = text.lstrip()
            if text:
                self.state = "text"
        return thought, text

    def _take_open_tag(self, text: str) -> str:
        """What comes after the tag, or the text without one; holds what may be its beginning."""
        begun = text.lstrip()
        if self.OPEN.startswith(begun):
            self._held = text
            return ""
        if begun.startswith(self.OPEN):
            self.state = "inside"
            return begun.removeprefix(self.OPEN)
        self.state = "text"
        return text

    def _take_thought(self, text: str) -> tuple[str, str]:
        """(thought, what comes after its end)."""
        thought, closed, rest = text.partition(self.CLOSE)
        if closed:
            self.state = "after"
            return thought, rest
        at = thought.rfind("<")
        if at >= 0 and self.CLOSE.startswith(thought[at:]):
            self._held = thought[at:]
            thought = thought[:at]
        return thought, ""

    def rest(self) -> tuple[str, str]:
        """(thought, text) that was held back, when no more comes."""
        held = self._held
        was_inside = self.state == "inside"
        self._held = ""
        self.state = "text"
        return (held, "") if was_inside else ("", held)


def join_pieces(pieces: list[Any]) -> Any:
    """One member of a message from its pieces: texts are joined, objects merged, and lists joined;
    neighbours in these that are pieces of one entry are merged."""
    kinds = {type(piece) for piece in pieces}
    if kinds == {str}:
        return "".join(pieces)
    if kinds == {dict}:
        return _merge_pieces(pieces)
    if kinds != {list}:
        return pieces[-1]
    groups: list[list[Any]] = []  # of pieces of one entry
    for entry in chain.from_iterable(pieces):
        if groups and _continues_entry(groups[-1][-1], entry):
            groups[-1].append(entry)
        else:
            groups.append([entry])
    return [_merge_pieces(group) if len(group) > 1 else group[0] for group in groups]


def _continues_entry(last: Any, entry: Any) -> bool:
    """Is this a further piece of the same entry? A signature ends one; what is encrypted comes
    whole."""
    if not (isinstance(last, dict) and isinstance(entry, dict)):
        return False
    if last.get("signature") or "data" in last or "data" in entry:
        return False
    return all(entry.get(name) == last.get(name) for name in ("type", "index", "id"))


def _merge_pieces(pieces: list[JsonObject]) -> JsonObject:
    merged: JsonObject = {}
    for piece in pieces:
        merged |= {name: value for name, value in piece.items() if value is not None}
    for name in merged.keys() & {"thinking", "text", "summary"}:
        merged[name] = "".join(strings(pieces, name)) or merged[name]
    return merged


# ---- addresses -----------------------------------------------------------------------------------

PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")  # variables, for https


def _parts(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


def is_loopback(url: str | None) -> bool:
    """Is this a server on this machine, by its address alone? False for what is no URL."""
    host = _parts(url or "").hostname or ""
    return host in ("localhost", "::1") or bool(re.fullmatch(r"127(\.\d+){3}", host))


def host_of(url: str | None) -> str:
    """host:port of a base URL, without what may come before an @; of OpenAI's own server for None
    and ""."""
    return _parts(url or "https://api.openai.com").netloc.rpartition("@")[2]


def shown_url(url: str) -> str:
    """An address for an error's line: without user, password and query, which may hold a key, and
    not too long."""
    parts = _parts(url)
    host = parts.netloc.rpartition("@")[2]
    shown = urlunsplit((parts.scheme, host, parts.path, "", ""))
    if not shown:  # no URL
        shown = url.rpartition("@")[2].partition("?")[0]
    return shown.rstrip("/")[:300]


def plural(number: int, noun: str) -> str:
    """`1 call`, `2 calls`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
