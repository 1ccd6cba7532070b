"""Failed model calls: the kind of an error, its message for the user, whether and when it is tried
again.

One classifier for HTTP answers and for errors inside a stream. The rules come from what real
servers send.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from coder.providers.error_signs import EMPTY_ACCOUNT, LOADING, NO_MODEL, SIGNS, TRANSIENT_400
from coder.providers.text import JsonObject, dictionaries
from coder.types import ErrorKind, ModelError

# What happened, if the server's own words do not say it.
HAPPENED: dict[ErrorKind, str] = {
    "overflow": "the conversation is too long for the model",
    "rate_limit": "too many requests",
    "quota": "quota exceeded",
    "auth": "the key was rejected",
    "bad_request": "the request was rejected",
    "not_found": "not found",
    "server": "the server failed",
}
# What the user can do.
ADVICE: dict[ErrorKind, str] = {
    "overflow": "Begin a new conversation, shorten this one, or use a model with a larger context.",
    "rate_limit": "Try again later.",
    "quota": "Check the account of OPENAI_API_KEY.",
    "auth": "Check OPENAI_API_KEY, and that it belongs to this server (OPENAI_BASE_URL).",
    "bad_request": "CODER_PROFILE and CODER_EXTRA_BODY change what is sent.",
    "not_found": "Check the model's name (OPENAI_MODEL) and the base URL (OPENAI_BASE_URL).",
    "server": "Try again later.",
    "incomplete": "If it breaks after the same time again, a proxy may have a time limit.",
    "empty": "Try again, or use another model (OPENAI_MODEL).",
    "network": "Check the base URL (OPENAI_BASE_URL) and that the server runs.",
    "protocol": "Check the base URL (OPENAI_BASE_URL): it mostly ends in /v1.",
}

REQUEST_IDS = ("x-request-id", "request-id", "apim-request-id", "x-amzn-requestid", "cf-ray")
MAX_READ = 4000  # characters of an error that are looked at
MAX_SHOWN = 500  # characters of the server's own text


def classify(
    status: int | None,
    body: Any,
    headers: Mapping[str, str] | None = None,
) -> ModelError:
    """The error that an answer means: `body` is the parsed JSON, or text; `status` None inside a
    stream."""
    headers = headers or {}
    if isinstance(body, str):
        body = readable(body[:MAX_READ])
    said = _read_body(body)
    if status is None or status < 400:  # a numeric code is a status
        status = int(said.code) if re.fullmatch(r"[45]\d\d", said.code) else None
    whole = f"{said.message} {body}"[: 2 * MAX_READ]  # Gemini puts the wait next to its message
    words = f"{said.code} {said.kind} {said.message}".lower()
    asks_to_wait = retry_hint({}, whole) is not None
    kind = _kind_of(status, {said.code, said.kind}, words, asks_to_wait)
    may_pass = kind in ("rate_limit", "server")  # the same request may succeed later
    if kind == "bad_request":
        may_pass = TRANSIENT_400.are_in(words)
    nothing = f"HTTP status {status}" if status else "an error without a message"
    return ModelError(
        kind,
        readable(said.message) or nothing,
        status=status,
        request_id=_request_id(headers),
        retryable=may_pass,
        retry_after=retry_hint(headers, whole),
        param=said.param,
        loading=kind == "server" and LOADING.are_in(words),
    )


def _request_id(headers: Mapping[str, str]) -> str | None:
    for name in REQUEST_IDS:
        if headers.get(name):
            return readable(headers[name][:100]) or None
    return None


def _kind_of(
    status: int | None,
    codes: set[str],
    words: str,
    asks_to_wait: bool,
) -> ErrorKind:
    for sign in SIGNS:
        # A server that says when to come back has an account that is not empty
        is_contradicted = asks_to_wait and sign.words == EMPTY_ACCOUNT
        if sign.fits(status, codes, words) and not is_contradicted:
            return sign.kind
    if status in (None, 400, 422) and NO_MODEL.are_in(words):
        return "not_found"
    if status is None and "invalid_request_error" not in codes:
        return "server"  # an error without a number, inside a stream
    return "bad_request"


# ---- the body of an error ------------------------------------------------------------------------

SAID = ("message", "detail", "msg", "error_description", "reason")


class Said(NamedTuple):
    """What an error says, each at most MAX_READ characters."""

    code: str = ""
    kind: str = ""  # its member `type`
    message: str = ""
    param: str = ""


def _read_body(body: Any) -> Said:
    """From any of the shapes that an error comes in."""
    errors = dictionaries(body)  # Gemini: a list of one
    if isinstance(body, dict):
        errors = dictionaries(body.get("errors")) or [body]
    if not errors:
        text = "" if isinstance(body, list) else str(body or "")
        return Said(message=text[:MAX_READ])
    body = errors[0]
    error = body.get("error")
    if isinstance(error, dict) and error:
        return _read_error(error)
    said = _read_error(body)
    if isinstance(error, str):
        said = said._replace(message=join(": ", error, said.message)[:MAX_READ])
    return said


def _read_error(error: JsonObject) -> Said:
    message = _read_sentence(error)
    metadata = error.get("metadata")
    if isinstance(metadata, dict) and metadata.get("raw"):  # OpenRouter: the upstream's error
        message = join(": ", message, str(metadata["raw"]))
    return Said(
        code=_read_member(error, "code"),
        kind=_read_member(error, "type"),
        message=message[:MAX_READ],
        param=_read_member(error, "param"),
    )


def _read_member(source: JsonObject, name: str) -> str:
    return str(source.get(name) or "")[:MAX_READ]


def _read_sentence(said: Any, depth: int = 5) -> str:
    """The text in an error, which may be a list of complaints, each with its place (FastAPI,
    Mistral)."""
    if not depth:
        return ""
    if isinstance(said, list):
        return "; ".join(_read_sentence(item, depth - 1) for item in said[:10])
    if not isinstance(said, dict):
        return str(said)
    steps = said.get("loc")
    where = ""
    if isinstance(steps, list):
        where = ".".join(str(step) for step in steps)
    for name in SAID:
        if said.get(name):
            return join(": ", where, _read_sentence(said[name], depth - 1))
    return where


def join(separator: str, *texts: str) -> str:
    """Those of the texts that are not empty, as one."""
    return separator.join(text for text in texts if text)


def readable(text: str) -> str:
    """The server's text in one line: an HTML page is named by its title, control characters go,
    length is capped."""
    if re.match(r"\s*<(!doctype|html|head|body)", text, re.I):
        title = re.search(r"<(title|h1)[^>]*>(.*?)</\1>", text, re.I | re.S)
        text = f"an HTML page: {title[2]}" if title else "an HTML page"
    printable = [c if c.isprintable() else " " for c in text[: 4 * MAX_SHOWN]]
    text = " ".join("".join(printable).split())
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


# What reading an answer raises whose members are not of the kind that the API has.
MALFORMED = (AttributeError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError)


@contextmanager
def refuse_malformed() -> Iterator[None]:
    """Inside, an answer is read. Raises ModelError if it is malformed."""
    try:
        yield
    except MALFORMED as error:
        message = f"the answer is malformed ({type(error).__name__}: {error})"[:200]
        raise ModelError("protocol", message, retryable=True) from error


# ---- messages for the user -----------------------------------------------------------------------


def happened(error: ModelError) -> str:
    """What happened, in the server's words if it has any: "the key was rejected: bad key (HTTP 401,
    request r1)"."""
    said = error.message.strip().rstrip(".:")
    what = HAPPENED.get(error.kind, "")
    if error.status == 403:
        what = "access was denied"
    facts = []
    if error.status and "HTTP status" not in said:
        facts.append(f"HTTP {error.status}")
    if error.request_id:
        facts.append(f"request {error.request_id}")
    text = join(": ", what, said)
    return f"{text} ({', '.join(facts)})" if facts else text


def explain(error: ModelError) -> str:
    """One line for the user: what happened, and what to do."""
    wait = f"The server asks to wait {error.retry_after:.0f} s." if error.retry_after else ""
    return join(" ", f"{happened(error)}.", wait, error.advice or ADVICE[error.kind])


# ---- how long to wait ----------------------------------------------------------------------------

WAIT = (
    r"(?:try again in|reset after|retry in|retry after|retrydelay\W{1,5})\s{0,5}"
    r"([\d.]{1,20}\s?(?:ms|m|h|s)?[\dms.]{0,20})"
)
WAIT_HEADERS = {"retry-after-ms": 0.001, "x-ms-retry-after-ms": 0.001, "retry-after": 1.0}
SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def retry_hint(headers: Mapping[str, str], message: str) -> float | None:
    """Seconds that the server asks to wait: by a header, else by its text; None if it does not."""
    for name, unit in WAIT_HEADERS.items():
        if name in headers:
            seconds = _read_seconds(headers[name], unit)
            if seconds is not None:
                return seconds
    wait = re.search(WAIT, message, re.I)
    return _read_seconds(wait[1], 1.0) if wait else None


def _read_seconds(text: str, unit: float) -> float | None:
    """A number of `unit`s, a duration such as 6m0s, or an HTTP date; None if none of them."""
    text = text[:100].strip()
    with suppress(ValueError):
        number = float(text) * unit
        return max(0.0, number) if math.isfinite(number) else None
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(ms|h|m|s)", text)
    if parts and text[0].isdigit():
        return sum(float(number) * SECONDS[unit_name] for number, unit_name in parts)
    from email.utils import parsedate_to_datetime  # late: slow to import, seldom needed

    with suppress(ValueError, OverflowError, TypeError):
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    return None


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """min(base * 2^(n-1), cap) seconds with jitter, never less than the server asks; no wait above
    `max_delay`.

    Waiting for a server that loads its model counts as no error for `loading` seconds in all.
    Subclass it and override `delay` for a provider with other habits.
    """

    base: float = 2.0
    cap: float = 30.0
    max_delay: float = 60.0
    loading: float = 180.0

    def delay(self, error: ModelError, attempt: int) -> float | None:
        """Seconds to wait after failed attempt number `attempt` (1, 2, ...), or None to give up."""
        asked = error.retry_after or 0.0
        if not error.retryable or asked > self.max_delay:
            return None
        least = 0.1 if error.loading else 0.0
        backoff = max(min(self.base * 2.0 ** (attempt - 1), self.cap), least)
        return max(backoff * random.uniform(0.75, 1.0), asked)


class Failures:
    """The failed attempts at one answer: how long to wait before the next, what to say when giving
    up."""

    def __init__(self, policy: RetryPolicy, max_errors: int) -> None:
        self.policy = policy
        self.max_errors = max_errors
        self.attempts = 0  # all that failed, also those that are no errors: an empty answer
        self.errors = 0  # that count against max_errors
        self._loading_since = 0.0

    def add(self, error: ModelError) -> float | None:
        """Count an attempt that failed; returns the seconds to wait, or None to give up.

        An attempt that found the server loading its model is no error, for a time.
        """
        now = time.monotonic()
        self.attempts += 1
        if not error.loading:
            self._loading_since = 0.0
        elif not self._loading_since:
            self._loading_since = now
        if not error.loading or now - self._loading_since > self.policy.loading:
            self.errors += 1
        if self.errors >= self.max_errors:
            return None
        return self.policy.delay(error, max(self.errors, 1))

    def text(self, error: ModelError) -> str:
        """What the run ends with."""
        failed = "Error" if self.errors < 2 else f"Failed after {self.errors} errors"
        text = f"{failed}: {error.message}"
        wait = error.retry_after or 0
        if wait > self.policy.max_delay:
            text += f" (the server asks to wait {wait:.0f} s)"
        return text
