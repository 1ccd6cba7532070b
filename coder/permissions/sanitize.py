"""Sanitise text of others for a terminal, and show exactly what a decision is about.

`TerminalSanitizer` strips what drives a terminal, reorders the text or cannot be seen from text
that streams; `strip_controls` does it for a whole string. `escape_invisible` drops nothing: what
the user could not see becomes a code point.
"""

from __future__ import annotations

import re

# C0 without newline and tab, DEL, C1, which 8-bit terminals read as ESC and a letter; what reorders
# the text around it (but not the plain marks, which are for prose); and what no script or emoji
# needs: soft hyphen, zero-width, separators, deprecated formats, tags.
_UNWANTED = (
    "\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\xad\u180e\u200b\u2028\u2029\u2060-\u2065"
    "\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
)
# Patterns are compiled at their first use: a start needs none of them
_DROPPED = f"[{_UNWANTED}]"
_SUSPECT = f"[{_UNWANTED}\ud800-\udfff]"
# Printable by its class and yet blank: fillers, variation selectors, empty patterns and notes.
_BLANK = (
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\ufffc"
    "\U00013441\U00013442\U00016fe4\U0001d159\U000e0100-\U000e01ef]"
)
_CSI = r"(?:\x1b\[|\x9b)[0-?]{0,64}[ -/]{0,8}"
# OSC, DCS, APC, PM and SOS: titles, links, images. A longer one is shown as text.
_STRING = "(?:\x1b[\\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]{0,1000}"
_LETTER = "\x1b[ -/]{0,8}"
_SEQUENCE = (
    f"{_CSI}[@-~]|{_STRING}(?:\x07|\x9c|\x1b\\\\)|{_LETTER}[0-OQ-WYZ\\\\`-~]"
    f"|(?P<begun>(?:{_CSI}|{_STRING}\x1b?|{_LETTER})\\Z)"
)


class TerminalSanitizer:
    """Text as it comes, in pieces that are cut anywhere."""

    def __init__(self) -> None:
        self._held_text = ""  # may be the beginning of a sequence

    def feed(self, text: str) -> str:
        """What can be shown by now."""
        if not self._held_text and not re.search(_SUSPECT, text):
            return text
        text = self._held_text + text
        self._held_text = ""
        return _strip(re.sub(_SEQUENCE, self._take, text))

    def flush(self) -> str:
        """The rest; the text ends here."""
        held = self._held_text
        self._held_text = ""
        return _strip(held)

    def _take(self, sequence: re.Match[str]) -> str:
        self._held_text = sequence["begun"] or ""
        return ""


def strip_controls(text: str) -> str:
    """A whole text: no control character but newline and tab is left."""
    if not re.search(_SUSPECT, text):
        return text
    sanitizer = TerminalSanitizer()
    return sanitizer.feed(text) + sanitizer.flush()


def _strip(text: str) -> str:
    return re.sub(_DROPPED, "", text).encode("utf-8", "replace").decode()


def escape_invisible(text: str) -> str:
    """The exact text, with <U+202E> for each character that the user would not see."""
    if text.isprintable() and text.isascii():
        return text
    return "".join(f"<U+{ord(c):04X}>" if is_invisible(c) else c for c in text)


def is_invisible(c: str) -> bool:
    """Whether a character other than newline and tab cannot be seen on a screen."""
    return c not in "\n\t" and (not c.isprintable() or bool(re.match(_BLANK, c)))
