"""Failed model calls: the kind of an error, its message for the user, whether and when it is tried again.

One classifier for HTTP answers and for errors inside a stream. The rules come from what real servers send.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from coder.types import ErrorKind, ModelError

# What happened, where the server's own words may not say it.
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

# Overflow of the context in the words of the servers (lower case; # stands for a number).
OVERFLOW = r"""context_length_exceeded|model_context_window_exceeded|exceed_context_size_error|request_too_large|prompt_too_long
model_max_prompt_tokens_exceeded|model_context_exceeded|contextwindowexceedederror
maximum context length|exceeds? the context window|input tokens exceed|token count exceeds
prompt is too long|exceed context limit|input is too long|too many input tokens|too many tokens
exceeds the maximum number of tokens|input token limit is|maximum prompt length is
reduce the length of the messages|too large for model with|exceeded model token limit
context window exceeds limit|exceeds max length|range of input length should be
input length .{0,12}exceeds|must be less than max_seq_len|prompt token count of|longer than the model's context
is longer than the maximum model length|too long to fit into the model|context length is only|for a total of at least
exceeds the available context size|greater than the context length|exceeded .{0,7}context length
tokens \+ `?max_new_tokens|current length is # while limit|length of all messages is too long
exceeds the maximum allowed input length|configured context size is|exceeds max_seq_len|context length exceeded
context too long|token limit exceeded|request entity too large|couldn't fit with truncation""".replace(
    "\n", "|"
).replace("#", r"\d+")
OVERFLOW_CODES = {"20015", "1261"}  # SiliconFlow, Zhipu
NOT_OVERFLOW = r"max_(completion_)?tokens\W{0,3}.{0,40}is too large"  # the answer's limit
QUOTA_CODES = {"insufficient_quota", "exceeded_current_quota_error", "billing_not_active", "1113"}
QUOTA_WORDS = (
    r"\bbilling\b|exceeded your current quota|insufficient[ _]quota|usage limit|out of credits|"
    r"\b(insufficient|negative|not enough|no|low|account|arrears)\b.{0,20}\bbalance\b|"
    r"\bbalance\b.{0,20}(insufficient|low|not enough|depleted|exhausted|negative)"
)
AUTH_CODES = {"invalid_api_key", "authentication_error", "invalid_authentication_error"}
AUTH_CODES |= {"permission_error", "no_db_connection"}  # LiteLLM's word for a foreign key
THROTTLE_WORDS = r"\brate.?limit|too many requests|throttl|please wait|concurren"
MODEL_WORDS = (
    r"model_not_found|unknown model\b|(invalid|no such|no) model\b.{0,20}(name|id|found|:)|"
    r"unable to access model|not a valid model|"
    r"\bmodels?([ /:]+[\"'`]?[\w.:/@+-]+[\"'`]?)?[ ,]+(was |is |could )?"
    r"(not found|not exist|does(n't| not) exist|not be found|not available|not supported by this server)"
)
LOADING_WORDS = r"loading (the )?model|model.{0,60}\b(is )?(currently |still )?loading|warming up"
NOT_LOADING = r"\b(error|failed|unable|cannot|could not|terminated)\b"  # and never will be
TRANSIENT_400 = r"tool_use_failed|no models provided"
RETRYABLE = {408, 409, 425, 429, *range(500, 600)}
REQUEST_IDS = ("x-request-id", "request-id", "apim-request-id", "x-amzn-requestid", "cf-ray")
MAX_READ = 4000  # characters of an error that are looked at
MAX_SHOWN = 500  # characters of the server's own text


def classify(status: int | None, body: Any, headers: Mapping[str, str] | None = None) -> ModelError:
    """The error that an answer stands for: `body` is the parsed JSON, or text; `status` None inside a stream."""
    if isinstance(body, str):
        body = readable(body[:MAX_READ])
    code, kind_word, message, param = (text[:MAX_READ] for text in _read_fields(body))
    if status is None or status < 400:  # a numeric code is a status
        status = int(code) if re.fullmatch(r"[45]\d\d", code) else None
    words, headers = f"{code} {kind_word} {message}".lower(), headers or {}
    whole = f"{message} {body}"[: 2 * MAX_READ]  # Gemini puts the wait beside its message
    kind, retryable = _kind_of(status, {code, kind_word}, words, retry_hint({}, whole) is not None)
    loading = kind == "server" and re.search(LOADING_WORDS, words)
    request_id = next((headers[name] for name in REQUEST_IDS if headers.get(name)), "")
    nothing = f"HTTP status {status}" if status else "an error without a message"
    return ModelError(
        kind,
        readable(message) or nothing,
        status=status,
        retryable=retryable,
        request_id=readable(request_id[:100]) or None,
        retry_after=retry_hint(headers, whole),
        param=param,
        loading=bool(loading and not re.search(NOT_LOADING, words)),
    )


def _kind_of(
    status: int | None, codes: set[str], words: str, hinted: bool
) -> tuple[ErrorKind, bool]:
    """(kind, retryable). The order counts, and codes come before words: a throttled request may speak of tokens like an
    overflow, and Gemini words a limit per minute like an empty account."""
    throttled = bool(re.search(THROTTLE_WORDS, words))
    empty = re.search(QUOTA_WORDS, words) and not (throttled or hinted)
    if status == 402 or codes & QUOTA_CODES or empty:
        return "quota", False
    if status in (401, 403) or codes & AUTH_CODES:
        return "auth", False
    if status == 429 or throttled:
        return "rate_limit", True
    too_long = re.search(OVERFLOW, words) and not re.search(NOT_OVERFLOW, words)
    if status == 413 or codes & OVERFLOW_CODES or too_long:
        return "overflow", False
    transient = bool(re.search(TRANSIENT_400, words))
    unknown = status in (None, 400, 422) and re.search(MODEL_WORDS, words) and not transient
    if status == 404 or unknown:
        return "not_found", False
    if status in RETRYABLE:
        return "server", True
    if status is not None or "invalid_request_error" in codes:
        return "bad_request", transient
    return "server", True  # an error without a number, inside a stream


SAID = ("message", "detail", "msg", "error_description", "reason")


def _read_fields(body: Any) -> tuple[str, str, str, str]:
    """(code, type, message, param) from any of the shapes that an error comes in."""
    if isinstance(body, dict) and isinstance(body.get("errors"), list):
        body = body["errors"] or body
    if isinstance(body, list):  # Gemini: a list of one
        body = next((item for item in body if isinstance(item, dict)), {})
    if not isinstance(body, dict):
        return "", "", str(body or ""), ""
    error = body.get("error")
    source = error if isinstance(error, dict) and error else body
    parts = [error if isinstance(error, str) else "", _read_sentence(source)]
    metadata = source.get("metadata")
    if isinstance(metadata, dict) and metadata.get("raw"):  # OpenRouter: the upstream's error
        parts.append(str(metadata["raw"]))
    code, kind, param = (str(source.get(name) or "") for name in ("code", "type", "param"))
    return code, kind, ": ".join(filter(None, parts)), param


def _read_sentence(said: Any, depth: int = 5) -> str:
    """The text in an error, which may be a list of complaints, each with its place (FastAPI, Mistral)."""
    if not depth or not isinstance(said, list | dict):
        return str(said) if depth else ""
    if isinstance(said, list):
        return "; ".join(_read_sentence(each, depth - 1) for each in said[:10])
    place = ".".join(map(str, said["loc"])) if isinstance(said.get("loc"), list) else ""
    text = next((_read_sentence(said[name], depth - 1) for name in SAID if said.get(name)), "")
    return ": ".join(filter(None, [place, text]))


def readable(text: str) -> str:
    """The server's text in one line: an HTML page is named by its title, control characters go, length is capped."""
    if re.match(r"\s*<(!doctype|html|head|body)", text, re.I):
        title = re.search(r"<(title|h1)[^>]*>(.*?)</\1>", text, re.I | re.S)
        text = "an HTML page" + (f": {title[2]}" if title else "")
    text = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * MAX_SHOWN]).split())
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


# What reading an answer raises whose members are not of the kind that the API has.
MALFORMED = (AttributeError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError)


@contextmanager
def well_formed() -> Iterator[None]:
    """Inside, an answer is read. Raises ModelError where it is malformed."""
    try:
        yield
    except MALFORMED as error:
        message = f"the answer is malformed ({type(error).__name__}: {error})"[:200]
        raise ModelError("protocol", message, retryable=True) from error


# ---- messages for the user -------------------------------------------------------------------------


def happened(error: ModelError) -> str:
    """What happened, in the server's words where it has any: "the key was rejected: bad key (HTTP 401, request r1)"."""
    said = error.message.strip().rstrip(".:")
    status = f"HTTP {error.status}" if error.status and "HTTP status" not in said else ""
    request = f"request {error.request_id}" if error.request_id else ""
    what = "access was denied" if error.status == 403 else HAPPENED.get(error.kind, "")
    known = ", ".join(filter(None, [status, request]))
    return ": ".join(filter(None, [what, said])) + (f" ({known})" if known else "")


def explain(error: ModelError) -> str:
    """One line for the user: what happened, and what to do."""
    wait = f"The server asks to wait {error.retry_after:.0f} s." if error.retry_after else ""
    return " ".join(filter(None, [f"{happened(error)}.", wait, error.advice or ADVICE[error.kind]]))


# ---- how long to wait ------------------------------------------------------------------------------

WAIT = (
    r"(?:try again in|reset after|retry in|retry after|retrydelay\W{1,5})\s{0,5}"
    r"([\d.]{1,20}\s?(?:ms|m|h|s)?[\dms.]{0,20})"
)
WAIT_HEADERS = {"retry-after-ms": 0.001, "x-ms-retry-after-ms": 0.001, "retry-after": 1.0}
SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def retry_hint(headers: Mapping[str, str], message: str) -> float | None:
    """Seconds that the server asks to wait: by a header, else by its text."""
    for name, unit in WAIT_HEADERS.items():
        if name in headers and (seconds := _read_seconds(headers[name], unit)) is not None:
            return seconds
    found = re.search(WAIT, message, re.I)
    return _read_seconds(found[1], 1.0) if found else None


def _read_seconds(text: str, unit: float) -> float | None:
    """A number of `unit`s, a duration such as 6m0s, or an HTTP date; None if none of them."""
    text = text[:100].strip()
    with suppress(ValueError):
        number = float(text) * unit
        return max(0.0, number) if math.isfinite(number) else None
    if text[:1].isdigit() and (parts := re.findall(r"(\d+(?:\.\d+)?)\s*(ms|h|m|s)", text)):
        return sum(float(part) * SECONDS[name] for part, name in parts)
    from email.utils import parsedate_to_datetime  # late: slow to import, seldom needed

    with suppress(ValueError, OverflowError, TypeError):
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    return None


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """min(base * 2^(n-1), cap) seconds with jitter, never less than the server asks; no wait above `max_delay`.

    Waiting for a server that loads its model counts as no error for `loading` seconds in all. Subclass it and
    override `delay` for a provider with other habits.
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
    """The failed attempts at one answer: how long to wait before the next, what to say when giving up."""

    def __init__(self, policy: RetryPolicy, limit: int) -> None:
        self.policy, self.limit = policy, limit
        self.errors = self.attempts = 0  # an attempt that found the server loading is no error
        self._loading_since = 0.0

    def delay(self, error: ModelError) -> float | None:
        """Seconds to wait, None to give up."""
        now = time.monotonic()
        self.attempts += 1
        self._loading_since = (self._loading_since or now) if error.loading else 0.0
        if not error.loading or now - self._loading_since > self.policy.loading:
            self.errors += 1
        if self.errors >= self.limit:
            return None
        return self.policy.delay(error, max(self.errors, 1))

    def text(self, error: ModelError) -> str:
        """What the run ends with."""
        wait = error.retry_after or 0
        asked = f" (the server asks to wait {wait:.0f} s)" if wait > self.policy.max_delay else ""
        failed = "Error" if self.errors < 2 else f"Failed after {self.errors} errors"
        return f"{failed}: {error.message}{asked}"
