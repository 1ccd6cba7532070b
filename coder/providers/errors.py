"""What went wrong with a model call, is it worth another try, and what can a person do about it?

One classifier for HTTP answers and for errors inside a stream, one sentence for each kind, and one retry policy. The
rules come from what real servers send; ids like H1 or S8 name the observation behind a rule (tests/data/quirks.jsonl
replays them).
"""

from __future__ import annotations

import json
import math
import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from coder.types import ErrorKind, ModelError

# Overflow of the context in the words of the servers (lower case; # stands for a number).
OVERFLOW = r"""
context_length_exceeded|model_context_window_exceeded|exceed_context_size_error|request_too_large|prompt_too_long
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
context too long|token limit exceeded|request entity too large|couldn't fit with truncation
"""
OVERFLOW_CODES = {"20015", "1261"}  # SiliconFlow, Zhipu
NOT_OVERFLOW = (
    r"max_(completion_)?tokens\W{0,3}.{0,40}is too large"  # the answer's limit, not the context
)
# H2
QUOTA_CODES = {
    "insufficient_quota",
    "exceeded_current_quota_error",
    "billing_not_active",
    "1113",
}
QUOTA_WORDS = (
    r"\bbilling\b|exceeded your current quota|insufficient[ _]quota|usage limit|out of credits|"
    r"\b(insufficient|negative|not enough|no|low|account|arrears)\b.{0,20}\bbalance\b|"
    r"\bbalance\b.{0,20}(insufficient|low|not enough|depleted|exhausted|negative)"
)
# LiteLLM without a database, of a key that is not its own
AUTH_CODES = {
    "invalid_api_key",
    "authentication_error",
    "invalid_authentication_error",
    "permission_error",
    "no_db_connection",
}
# What it puts around a message
LITELLM = (
    r"(?s)\A(litellm\.\w+: *)+(\w+(Error|Exception)(: *| - *))*|[. ]*\n?Received Model Group=.*"
    r"|[. ]*LiteLLM Retried: .*"
)
THROTTLE_WORDS = r"\brate.?limit|too many requests|throttl|please wait|concurren"  # H3: looked for before overflow
MODEL_WORDS = (
    r"model_not_found|unknown model\b|(invalid|no such|no) model\b.{0,20}(name|id|found|:)|unable to access model|"
    r"not a valid model|\bmodels?([ /:]+[\"'`]?[\w.:/@+-]+[\"'`]?)?[ ,]+(was |is |could )?"
    r"(not found|not exist|does(n't| not) exist|not be found|not available|not supported by this server)"
)
LOADING_WORDS = (
    r"loading (the )?model|model.{0,60}\b(is )?(currently |still )?loading|warming up"  # H4
)
NOT_LOADING = r"\b(error|failed|unable|cannot|could not|terminated)\b"  # and never will be
TRANSIENT_400 = r"tool_use_failed|no models provided"  # H5
RETRYABLE = {408, 409, 425, 429, *range(500, 600)}  # H4
REQUEST_IDS = ("x-request-id", "request-id", "apim-request-id", "x-amzn-requestid", "cf-ray")
LONGEST = 4000  # characters of an error that are looked at
MAX_SHOWN = 500  # characters of the server's own text


def classify(status: int | None, body: Any, headers: Mapping[str, str] | None = None) -> ModelError:
    """The error that an answer stands for: `body` is the parsed JSON, or text; `status` None inside a stream."""
    # Of an HTML page only its title counts
    body = readable(body[:LONGEST]) if isinstance(body, str) else body
    code, kind_word, message, param = (text[:LONGEST] for text in _facts(body))
    if status is None or status < 400:
        # S8, H9: a numeric code is a status
        status = int(code) if re.fullmatch(r"[45]\d\d", code) else None
    words = f"{code} {kind_word} {message}".lower()
    headers = headers or {}
    asks = f"{message} {_details(body)[:LONGEST]}"
    kind, retryable = _kind(status, code, kind_word, words, retry_hint({}, asks) is not None)
    request_id = next((headers[name] for name in REQUEST_IDS if headers.get(name)), None)
    said = readable(re.sub(LITELLM, "", message)) or (
        f"HTTP status {status}" if status else "an error without words"
    )
    return ModelError(
        kind,
        said,
        status=status,
        retryable=retryable,
        request_id=request_id and readable(request_id[:100]),
        retry_after=retry_hint(headers, asks, limited=kind == "rate_limit"),
        param=param,
        loading=kind == "server"
        and bool(re.search(LOADING_WORDS, words))
        and not re.search(NOT_LOADING, words),
    )


def _kind(
    status: int | None, code: str, kind_word: str, words: str, hinted: bool
) -> tuple[ErrorKind, bool]:
    """(kind, retryable), in this order: quota, auth, throttling, overflow, model, status (codes before words: H2)."""
    throttled = re.search(THROTTLE_WORDS, words) is not None
    # Gemini words a limit per minute like an empty account
    if (
        status == 402
        or {code, kind_word} & QUOTA_CODES
        or (re.search(QUOTA_WORDS, words) and not (throttled or hinted))
    ):
        return "quota", False
    if status in (401, 403) or {code, kind_word} & AUTH_CODES:
        return "auth", False
    if status == 429 or throttled:
        return "rate_limit", True
    if (
        status == 413
        or code in OVERFLOW_CODES
        or (_overflow().search(words) and not re.search(NOT_OVERFLOW, words))
    ):
        return "overflow", False
    if status == 404 or (
        status in (None, 400, 422)
        and re.search(MODEL_WORDS, words)
        and not re.search(TRANSIENT_400, words)
    ):
        return "not_found", False
    if status in RETRYABLE:
        return "server", True
    if status is not None or kind_word == "invalid_request_error":
        return "bad_request", re.search(TRANSIENT_400, words) is not None
    return "server", True  # an error without a number, inside a stream: a failed attempt


@cache
def _overflow() -> re.Pattern[str]:
    return re.compile("|".join(line.replace("#", r"\d+") for line in OVERFLOW.split("\n") if line))


def _facts(body: Any) -> tuple[str, str, str, str]:
    """(code, type, message, param) from any of the shapes that an error comes in (H7, S8)."""
    if isinstance(body, list):
        body = next((item for item in body if isinstance(item, dict)), {})  # Gemini: a list of one
    if not isinstance(body, dict):
        return "", "", str(body or ""), ""
    if isinstance(body.get("errors"), list):
        body = next((item for item in body["errors"] if isinstance(item, dict)), body)
    error = body.get("error")
    source = error if isinstance(error, dict) and error else body
    said = next((source[key] for key in SAID if source.get(key)), "")
    message = ": ".join(
        filter(None, [error if isinstance(error, str) else "", _sentence(said) if said else ""])
    )
    metadata = source.get("metadata")
    # OpenRouter: the cause behind its own sentence (H9)
    if isinstance(metadata, dict) and metadata.get("raw"):
        message = f"{message}: {metadata['raw']}"
    return (
        str(source.get("code") or ""),
        str(source.get("type") or ""),
        message,
        str(source.get("param") or ""),
    )


def _details(body: Any) -> str:
    """Where Gemini puts how long to wait (H1): a list beside its message."""
    body = body[0] if isinstance(body, list) and body else body
    error = body.get("error") if isinstance(body, dict) else None
    details = error.get("details") if isinstance(error, dict) else None
    return str(details) if isinstance(details, list) else ""


SAID = ("message", "detail", "msg", "error_description", "reason")


def _sentence(said: Any, depth: int = 5) -> str:
    """Text from what may be a list of complaints, each with its place (FastAPI, Mistral)."""
    if not depth or not isinstance(said, list | dict):
        return str(said)[:LONGEST] if depth else ""
    if isinstance(said, list):
        return "; ".join(_sentence(each, depth - 1) for each in said[:10])
    place = ".".join(str(part) for part in said["loc"]) if isinstance(said.get("loc"), list) else ""
    inner = next((_sentence(said[key], depth - 1) for key in SAID if said.get(key)), "")
    return ": ".join(filter(None, [place, inner])) or json.dumps(said, default=str)[:LONGEST]


def readable(text: str) -> str:
    """The server's text in one line: an HTML page is named by its title, control characters go, length is capped."""
    if re.match(r"\s*<(!doctype|html|head|body)", text, re.I):
        title = re.search(r"<(title|h1)[^>]*>(.*?)</\1>", text, re.I | re.S)
        text = "an HTML page" + (f": {title[2]}" if title else "")
    text = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * MAX_SHOWN]).split())
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


# ---- for people ------------------------------------------------------------------------------------------

# What happened, where the words after it are somebody else's; the other kinds are our words, and say it themselves.
HAPPENED = {
    "overflow": "the conversation is too long for the model",
    "rate_limit": "too many requests",
    "quota": "no credit left",
    "auth": "the key was refused",
    "bad_request": "the request was refused",
    "not_found": "not found",
    "server": "the server failed",
}
ADVICE = {
    "overflow": "Start anew, shorten the conversation, or take a model with a larger context.",
    "rate_limit": "Try again later.",
    "quota": "Look at the account behind OPENAI_API_KEY.",
    "auth": "Check OPENAI_API_KEY, and that it belongs to this server (OPENAI_BASE_URL).",
    "bad_request": "CODER_PROFILE and CODER_EXTRA_BODY change what is sent.",
    "not_found": "Check the model's name (OPENAI_MODEL) and the base URL (OPENAI_BASE_URL).",
    "server": "Try again later.",
    "incomplete": "Where it breaks again after the same time, a proxy on the way may have a time limit.",
    "empty": "Try again, or take another model (OPENAI_MODEL).",
    "network": "Check the base URL (OPENAI_BASE_URL) and that the server runs.",
    "protocol": "Check the base URL (OPENAI_BASE_URL): it mostly ends in /v1.",
}
TOOLS = "Take a model that can call tools (OPENAI_MODEL)."
SLOW = "A slow server needs a longer CODER_FIRST_BYTE_TIMEOUT or CODER_IDLE_TIMEOUT."


def happened(error: ModelError) -> str:
    """What happened, in the server's words where it has any: "the key was refused: bad key (HTTP 401, request r1)"."""
    said = error.message.strip().rstrip(".:")
    status = (
        f"HTTP {error.status}" if error.status and said != f"HTTP status {error.status}" else ""
    )
    facts = list(filter(None, [status, error.request_id and f"request {error.request_id}"]))
    what = "access was refused" if error.status == 403 else HAPPENED.get(error.kind, "")
    return ": ".join(filter(None, [what, said])) + (f" ({', '.join(facts)})" if facts else "")


def explain(error: ModelError) -> str:
    """One line for a person: what happened, and what to do."""
    wait = f"The server asks to wait {error.retry_after:.0f} s." if error.retry_after else ""
    return " ".join(filter(None, [f"{happened(error)}.", wait, _advice(error)]))


def _advice(error: ModelError) -> str:
    if error.advice:
        return error.advice
    if error.kind in ("bad_request", "not_found") and re.search(
        r"\btools?\b.{0,40}support|support.{0,40}\btools?\b", error.message, re.I
    ):
        return TOOLS
    # Nginx, Go
    if error.kind == "bad_request" and re.search(
        r"http request .{0,20}https (port|server)", error.message, re.I
    ):
        return "Write https:// in OPENAI_BASE_URL."
    if error.kind == "network" and error.message.startswith("no data"):
        return SLOW
    return ADVICE.get(error.kind, "")


# ---- how long to wait ------------------------------------------------------------------------------------


WAIT = (
    r"(?:try again in|reset after|retry in|retry after|retrydelay\W{1,5})\s{0,5}"
    r"([\d.]{1,20}\s?(?:ms|m|h|s)?[\dms.]{0,20})"
)


def retry_hint(headers: Mapping[str, str], message: str, limited: bool = True) -> float | None:
    """Seconds that the server asks us to wait, in any of the forms of H1: headers first, then its text.

    When a limit is reset, which some servers say with every answer, counts only where it is one (`limited`).
    """
    for name, unit in (
        ("retry-after-ms", 0.001),
        ("x-ms-retry-after-ms", 0.001),
        ("retry-after", 1.0),
    ):
        if name in headers and (seconds := _seconds(headers[name], unit)) is not None:
            return seconds
    for name in (
        ("x-ratelimit-reset", "x-ratelimit-reset-requests", "x-ratelimit-reset-tokens")
        if limited
        else ()
    ):
        if name in headers and (seconds := _seconds(headers[name], 1.0)) is not None:
            return seconds
    found = re.search(WAIT, message, re.I)
    return _seconds(found[1], 1.0) if found else None


def _seconds(text: str, unit: float) -> float | None:
    """A number of `unit`s, an epoch time in s or ms, a duration such as 6m0s, or an HTTP date; None if none of them."""
    text = text[:100].strip()
    try:
        number = float(text) * unit
    except ValueError:
        return _duration(text) if re.match(r"[\d.]", text) else _until(text)
    if not math.isfinite(number):
        return None
    if number > 1e11:
        return max(0.0, number / 1000 - time.time())
    return max(0.0, number - time.time()) if number > 1.5e9 else max(0.0, number)


def _duration(text: str) -> float | None:
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(ms|h|m|s)", text)
    sizes = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
    return sum(float(number) * sizes[unit] for number, unit in parts) if parts else None


def _until(date: str) -> float | None:
    from email.utils import parsedate_to_datetime  # late: slow to import, seldom needed

    try:
        return max(0.0, parsedate_to_datetime(date).timestamp() - time.time())
    except (ValueError, OverflowError, TypeError):
        return None


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """min(base * 2^(n-1), cap) seconds with jitter, never less than the server asks; no wait above `max_delay`.

    Waiting for a server that loads its model counts as no error for `loading` seconds in all (H4). Subclass it and
    override `delay` for a provider with other habits.
    """

    base: float = 2.0
    cap: float = 30.0
    max_delay: float = 60.0
    loading: float = 180.0

    def delay(self, error: ModelError, attempt: int) -> float | None:
        """Seconds to wait after failed attempt number `attempt` (1, 2, ...), or None to give up."""
        if not error.retryable or (error.retry_after or 0) > self.max_delay:
            return None
        backoff: float = max(
            min(self.base * 2 ** (attempt - 1), self.cap), 0.1 if error.loading else 0
        )
        return max(backoff * random.uniform(0.75, 1.0), error.retry_after or 0)


class Failures:
    """The failed attempts at one answer: how long to wait before the next, what to say when giving up."""

    def __init__(self, policy: RetryPolicy, limit: int) -> None:
        self.policy, self.limit = policy, limit
        self.errors = 0
        self.attempts = 0  # in a row of the same cause
        self._cause: tuple[str, bool] = ("", False)
        self._loading_since = 0.0

    def delay(self, error: ModelError) -> float | None:
        """Seconds to wait, None to give up. Waiting for a model to load is no error for `policy.loading` seconds."""
        cause = (error.kind, error.loading)
        self.attempts = self.attempts + 1 if cause == self._cause else 1
        self._cause = cause
        self._loading_since = (self._loading_since or time.monotonic()) if error.loading else 0.0
        waited = time.monotonic() - self._loading_since if self._loading_since else math.inf
        self.errors += waited > self.policy.loading
        if self.errors >= self.limit:
            return None
        return self.policy.delay(error, max(self.errors, 1))

    def text(self, error: ModelError) -> str:
        wait = error.retry_after or 0
        asked = f" (the server asks to wait {wait:.0f} s)" if wait > self.policy.max_delay else ""
        failed = "Error" if self.errors < 2 else f"Failed after {self.errors} errors"
        return f"{failed}: {error.message}{asked}"
