"""Strings that every encoder, every server and every terminal takes: mended text, tool names, call ids, text to be shown.

`Cleaner` is the one sanitiser for text that we did not write, and `clean` its form for a whole string; `visible` is the
exact form, for what a person decides on.
"""

from __future__ import annotations

import os
import re
from typing import Any


def mend(text: str) -> str:
    """Join surrogate pairs that came apart; what no encoder takes (a lone half, NUL) becomes U+FFFD (S6, R24, R25)."""
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


# ---- text on a screen ------------------------------------------------------------------------------------

# Drives a terminal: C0 without newline and tab, DEL, C1, which 8-bit terminals read as ESC and a letter.
CONTROLS = {*range(0x20), *range(0x7F, 0xA0)} - {0x0A, 0x09}
# Reorders the text around it: embeddings, overrides, isolates. The plain marks (U+200E, U+200F, U+061C) are for prose.
REORDERS = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}
# Nothing to see, and no script or emoji needs it: soft hyphen, zero-width, separators, deprecated formats, the tag block.
UNNEEDED = {
    0xAD,
    0x180E,
    0x200B,
    0x2028,
    0x2029,
    *range(0x2060, 0x2066),
    *range(0x206A, 0x2070),
    0xFEFF,
    *range(0xFFF9, 0xFFFC),
    *range(0xE0000, 0xE0080),
}
# Printable by its class and yet nothing to see. Unicode's Default_Ignorable_Code_Point, as far as it is (the rest is of the classes
# Cf and Cn): the grapheme joiner, Hangul's and Khmer's fillers, variation selectors. Then what looks blank: Braille's empty
# pattern, Khitan's filler, Egyptian blanks, the null note head, the place of an object.
IGNORABLE = {
    0x34F,
    0x115F,
    0x1160,
    0x17B4,
    0x17B5,
    *range(0x180B, 0x1810),
    0x3164,
    *range(0xFE00, 0xFE10),
    0xFFA0,
    *range(0xE0100, 0xE01F0),
}
UNSEEN = IGNORABLE | {0x2800, 0x13441, 0x13442, 0x16FE4, 0x1D159, 0xFFFC}

_DROPPED = dict.fromkeys(CONTROLS | REORDERS | UNNEEDED)
_SUSPECT = re.compile(f"[{''.join(map(chr, sorted(_DROPPED)))}\ud800-\udfff]")
_TEXT = "[^\x07\x1b\x9c\n]{0,1000}"  # of a title, a link, an image: what is longer is no such thing, and is shown
_SEQUENCE = re.compile(  # CSI, strings with their end (OSC, DCS, APC, PM, SOS), and ESC with a letter
    f"(?:\x1b\\[|\x9b)[0-?]{{0,64}}[ -/]{{0,8}}[@-~]|(?:\x1b[\\]PX^_]|[\x9d\x90\x98\x9e\x9f]){_TEXT}(?:\x07|\x9c|\x1b\\\\)"
    "|\x1b[ -/]{0,8}[0-OQ-WYZ\\\\`-~]"
)
_BEGUN = re.compile(
    f"(?:\x1b\\[|\x9b)[0-?]{{0,64}}[ -/]{{0,8}}|(?:\x1b[\\]PX^_]|[\x9d\x90\x98\x9e\x9f]){_TEXT}\x1b?|\x1b[ -/]{{0,8}}"
)
_INTRODUCES = re.compile("[\x1b\x90\x98\x9b\x9d-\x9f]")


class Cleaner:
    """Text of others as it comes, in pieces that are cut anywhere, without what drives a terminal, reorders or hides.

    An escape sequence goes whole, also one that comes in two pieces; text goes on to be readable, in its logical order.
    Whatever is fed, no control character but newline and tab comes out, and the pieces make no difference to the whole.
    """

    def __init__(self) -> None:
        self._held = ""  # what may be the beginning of a sequence

    def feed(self, text: str) -> str:
        """What can be shown by now."""
        if not self._held and not _SUSPECT.search(text):
            return text
        text, self._held = self._held + text, ""
        shown, at = [], 0
        while found := _INTRODUCES.search(text, at):
            shown.append(text[at : found.start()])
            if sequence := _SEQUENCE.match(text, found.start()):
                at = sequence.end()
            elif _BEGUN.fullmatch(text, found.start()):
                self._held = text[found.start() :]
                return _without_controls("".join(shown))
            else:
                at = found.end()  # it introduces nothing, and goes alone
        return _without_controls("".join([*shown, text[at:]]))

    def end(self) -> str:
        """The rest; the text ends here."""
        held, self._held = self._held, ""
        return _without_controls(held)


def clean(text: str) -> str:
    """A whole text, as `Cleaner` shows it."""
    if not _SUSPECT.search(text):
        return text
    cleaner = Cleaner()
    return cleaner.feed(text) + cleaner.end()


def _without_controls(text: str) -> str:
    return text.translate(_DROPPED).encode("utf-8", "replace").decode()


def visible(text: str) -> str:
    """Exact text, for a decision: what drives a terminal, reorders text or cannot be seen stands as a code point, <U+202E>."""
    return (
        text
        if text.isprintable() and text.isascii()
        else "".join(f"<U+{ord(c):04X}>" if hides(c) else c for c in text)
    )


def hides(c: str) -> bool:
    """Is this a character, other than newline and tab, that a person does not see?"""
    return c not in "\n\t" and (not c.isprintable() or ord(c) in UNSEEN)


def safe_name(name: str) -> str:
    """A tool name that every server takes back in the history (R23)."""
    return re.sub(r"[^a-zA-Z0-9_-]", "_", name)[:64] or "unknown"


def new_id() -> str:
    """Nine alphanumerics: fits every server (T31)."""
    return os.urandom(5).hex()[:9]
