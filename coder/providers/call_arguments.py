"""The text of a call's arguments -> a JSON object. Takes the slips of models whose meaning is certain.

Certain means: the whole text parses once the slip is mended, and no string in it was touched but for escapes that
JSON does not have. A bracket or a quote that is missing is never added: the call may have been cut.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

Parsed = tuple[dict[str, Any] | None, str]  # (the arguments, "") or (None, what is wrong with them)

DECODER = json.JSONDecoder(strict=False)  # models write raw newlines inside strings
FREE_FORM = "*** Begin Patch"  # codex's patch tool takes bare text, which it calls its input

FENCE = re.compile(r"```(?:json)?\s*\n(.*?)\n?\s*```", re.DOTALL)
SLIP = re.compile(
    r'(?P<string>"(?:[^"\\]|\\.)*")'
    r"|(?P<comma>,(?=\s*[}\]]))"
    r"|\b(?P<word>None|True|False)\b",
    re.DOTALL,
)
JSON_WORDS = {"None": "null", "True": "true", "False": "false"}
ESCAPE = re.compile(r"\\(.)", re.DOTALL)
ESCAPES = "\"\\/bfnrtu'"  # those of JSON; \' may mean ' or \', so it stays an error
AROUND = 20  # characters that an error quotes on each side of the place


def parse_arguments(pieces: list[str]) -> Parsed:
    raw = "".join(pieces).strip()
    if not raw:
        return {}, ""
    if raw.startswith(FREE_FORM):
        return {"input": raw}, ""
    try:
        value = DECODER.decode(raw)
        if isinstance(value, str):
            value = DECODER.decode(value or "{}")  # encoded twice
    except RecursionError:
        return None, "nested too deeply"
    except ValueError as error:  # also for a number with thousands of digits
        value = _repeated_object(raw)
        if value is None:
            value = _mended_object(raw)
        if value is None:
            return None, _say_what_is_wrong(error)
    if value is None:
        return {}, ""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        return value[0], ""
    if not isinstance(value, dict):
        return None, f"no JSON object but {json.dumps(value)[:80]}"
    return value, ""


def _repeated_object(raw: str) -> Any:
    """The object at the start where what follows repeats it or holds no other; an empty first one gives way."""
    rest, found = raw, list[Any]()
    while rest.startswith("{"):
        try:
            value, end = DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            return None
        found.append(value)
        rest = rest[end:].strip()
    found = [value for value in found if value] or found[:1]
    alike = found and all(value == found[0] for value in found)
    return found[0] if alike and "{" not in rest else None


# ---- slips ------------------------------------------------------------------------------------------


def _mended_object(raw: str) -> dict[str, Any] | None:
    """The object that the text is without its slips; None if it is still none."""
    fenced = FENCE.fullmatch(raw)
    text = fenced[1] if fenced else raw
    for candidate in _candidates(text):
        if isinstance(candidate, dict):
            return candidate
    return None


def _candidates(text: str) -> Iterator[Any]:
    try:
        yield DECODER.decode(SLIP.sub(_mend_slip, text))
    except (ValueError, RecursionError):
        yield None
    yield _python_value(text)


def _mend_slip(found: re.Match[str]) -> str:
    if found["comma"]:
        return ""
    if found["word"]:
        return JSON_WORDS[found["word"]]
    return ESCAPE.sub(_mend_escape, found["string"])


def _mend_escape(found: re.Match[str]) -> str:
    r"""A backslash before a character that JSON does not escape is meant: \d in a pattern, \$ in a command."""
    return found[0] if found[1] in ESCAPES else "\\" + found[0]


def _python_value(text: str) -> Any:
    """The value of a Python dictionary, None if it is none. Strings side by side, which Python joins, are none."""
    if not text.startswith("{'"):
        return None
    try:
        kinds = [found.type for found in tokenize.generate_tokens(io.StringIO(text).readline)]
        value = ast.literal_eval(text)
        json.dumps(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, tokenize.TokenError):
        return None
    pairs = pairwise(kinds)
    is_joined = any(pair == (tokenize.STRING, tokenize.STRING) for pair in pairs)
    return None if is_joined else value


def _say_what_is_wrong(error: ValueError) -> str:
    """The error with the place in the model's own words, which stand nowhere else in its history."""
    if not isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error}"
    text, at = error.doc, error.pos
    if at >= len(text):
        return f"not valid JSON: they end too early, at …{text[-2 * AROUND :]}"
    if error.msg.startswith("Unterminated string"):
        return f"not valid JSON: the string that begins at {text[at : at + AROUND]} has no end"
    start, end = max(0, at - AROUND), at + AROUND
    before = "…" if start else ""
    after = "…" if end < len(text) else ""
    why = error.msg
    if text[:at].rstrip().endswith('"') and error.msg.startswith("Expecting ',' delimiter"):
        why = r'a " inside a string is written \"'
    return f"not valid JSON near {before}{text[start:end]}{after}: {why}"
