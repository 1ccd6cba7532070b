"""The text of a call's arguments -> a JSON object. Takes the slips of models whose meaning is
certain.

Certain means: the whole text parses once the slip is mended, and no string in it was touched but
for escapes that JSON does not have. A bracket or a quote that is missing is never added: the call
may have been cut.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from itertools import pairwise
from typing import Any

from coder.providers.text import JsonObject, dictionaries

Parsed = tuple[JsonObject | None, str]  # (the arguments, "") or (None, what is wrong with them)

DECODER = json.JSONDecoder(strict=False)  # models write raw newlines inside strings
FREE_FORM = "*** Begin Patch"  # codex's patch tool takes bare text, which it calls its input

FENCE = r"(?s)```(?:json)?\s*\n(.*?)\n?\s*```"
SLIP = (
    r'(?s)(?P<string>"(?:[^"\\]|\\.)*")'
    r"|(?P<comma>,(?=\s*[}\]]))"
    r"|\b(?P<word>None|True|False)\b"
)
JSON_WORDS = {"None": "null", "True": "true", "False": "false"}
ESCAPE = r"(?s)\\(.)"
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
        mended = _mend(raw)
        if mended is None:
            return None, _say_what_is_wrong(error)
        return mended, ""
    return _as_object(value)


def _as_object(value: Any) -> Parsed:
    if value is None:
        return {}, ""
    if isinstance(value, dict):
        return value, ""
    objects = dictionaries(value)
    if objects and len(value) == 1:
        return objects[0], ""
    return None, f"no JSON object but {json.dumps(value)[:80]}"


def _say_what_is_wrong(error: ValueError) -> str:
    """The error with the place in the model's own words, which are nowhere else in its history."""
    if not isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error}"
    text = error.doc
    at = error.pos
    if at >= len(text):
        return f"not valid JSON: they end too early, at …{text[-2 * AROUND :]}"
    if error.msg.startswith("Unterminated string"):
        return f"not valid JSON: the string that begins at {text[at : at + AROUND]} has no end"
    start = max(0, at - AROUND)
    end = at + AROUND
    before = "…" if start else ""
    after = "…" if end < len(text) else ""
    why = error.msg
    if text[:at].rstrip().endswith('"') and why.startswith("Expecting ',' delimiter"):
        why = r'a " inside a string is written \"'
    return f"not valid JSON near {before}{text[start:end]}{after}: {why}"


# ---- slips ---------------------------------------------------------------------------------------


def _mend(raw: str) -> JsonObject | None:
    """The object that a text is without its slips, None if it is still none."""
    value = _repeated_object(raw)
    if value is not None:
        return value
    fenced = re.fullmatch(FENCE, raw)
    text = fenced[1] if fenced else raw
    try:
        value = DECODER.decode(re.sub(SLIP, _mend_slip, text))
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else _python_dictionary(text)


def _repeated_object(raw: str) -> JsonObject | None:
    """The object that a text begins with, if what follows is the same object again, or has none.

    An empty object does not count if one that is not empty follows. None for any other text.
    """
    rest = raw
    objects: list[JsonObject] = []
    while rest.startswith("{"):
        try:
            value, end = DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            return None
        objects.append(value)
        rest = rest[end:].strip()
    filled = [value for value in objects if value] or objects[:1]
    is_one = filled and all(value == filled[0] for value in filled)
    return filled[0] if is_one and "{" not in rest else None


def _mend_slip(slip: re.Match[str]) -> str:
    if slip["comma"]:
        return ""
    if slip["word"]:
        return JSON_WORDS[slip["word"]]
    return re.sub(ESCAPE, _mend_escape, slip["string"])


def _mend_escape(escape: re.Match[str]) -> str:
    r"""A backslash before a character that JSON does not escape is meant: \d in a pattern, \$ in a
    command."""
    return escape[0] if escape[1] in ESCAPES else "\\" + escape[0]


def _python_dictionary(text: str) -> JsonObject | None:
    """The value of a Python dictionary, None if it is not one. Strings next to each other, which
    Python joins, are none."""
    if not text.startswith("{'"):
        return None
    try:
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        kinds = [token.type for token in tokens]
        value = ast.literal_eval(text)
        json.dumps(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, tokenize.TokenError):
        return None
    is_joined = any(pair == (tokenize.STRING, tokenize.STRING) for pair in pairwise(kinds))
    return value if isinstance(value, dict) and not is_joined else None
