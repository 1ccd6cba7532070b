"""errors.py: what servers say, in their own words -> the kind, the wait, and one line for the
user."""

from __future__ import annotations

import json
import time
from email.utils import formatdate
from typing import Any

import pytest

from coder.devtools.scripted import Reply
from coder.events import Retry
from coder.providers.errors import RetryPolicy, classify, explain, happened, retry_hint
from coder.settings import SETTINGS
from coder.types import ModelError
from tests.harness import ask, serve
from tests.test_readme import PAGES


def said(message: str = "no", **more: Any) -> dict[str, Any]:
    return {"error": {"message": message} | more}


def name(value: object) -> str:
    return json.dumps(value, default=str)[:70]


# ---- the kind, in the order of the rules ---------------------------------------------------------

AUTH_WORDS = "invalid_api_key authentication_error invalid_authentication_error permission_error"
POOR = ("Insufficient", "Negative", "Not enough", "No", "Low", "The account's", "In arrears:")
SPENT = ("insufficient", "low", "not enough", "depleted", "exhausted", "negative")
EXTRA = {"loc": ["body", "tools"], "msg": "Extra inputs are not permitted"}
SPENT_PLAN = "You exceeded your current quota, please check your plan and billing"
TPM = "Request too large on tokens per minute, see /settings/billing"
VLLM = {"object": "error", "message": "The model `x` does not exist.", "code": 40401}
PULL = {"error": 'model "x" not found, try pulling it first'}
LITELLM = "litellm.ContextWindowExceededError: litellm.BadRequestError: OpenAIException - no room"

TRANSIENT = [  # a bad request, and yet worth another try
    said("Failed to call a function.", code="tool_use_failed"),  # Groq
    said("The model called a tool that does not exist", code="tool_use_failed"),
    said("No models provided"),  # OpenRouter
]

# kind -> (status, body); a text stands for an error with that message
KINDS: dict[str, list[tuple[int | None, Any]]] = {
    "quota": [  # codes before words, words only where nothing speaks of a rate
        (402, "Payment Required"),
        (429, said("Rate limit: your plan is used up", code="insufficient_quota")),
        (429, said("\u4f59\u989d\u4e0d\u8db3", code="1113")),
        (403, said("Your account is not active", code="billing_not_active")),
        (400, "Your credit balance is too low to access the Anthropic API"),
        *((400, f"{word} balance") for word in POOR),
        *((403, f"your balance is {word}") for word in SPENT),
        (429, SPENT_PLAN),
        (429, "You have hit your usage limit"),
        (None, said("No money", code=402)),
    ],
    "auth": [
        (401, "Rate limit of an unknown key"),
        (403, "Forbidden"),
        *((400, said(code=word)) for word in AUTH_WORDS.split()),
        *((400, said(type=word)) for word in AUTH_WORDS.split()),
        (400, said("No connected db.", type="no_db_connection", code="400")),  # LiteLLM
    ],
    "rate_limit": [  # before overflow
        (429, ""),
        (400, "rate limit exceeded"),
        (400, said("x", code="rate_limit_exceeded")),
        (400, "ThrottlingException: too many tokens"),
        (400, "Too many requests: the prompt is too long to serve now"),
        (429, "insufficient quota: 4 concurrent requests"),
        (413, said(TPM, code="rate_limit_exceeded")),
        (None, said("later", code=429)),
    ],
    "overflow": [  # before the status or the name of a model
        (400, said(LITELLM, code="400")),
        (413, ""),
        (500, "prompt is too long"),
        (404, "This endpoint's maximum context length is 4096 tokens"),
        (None, said("too long", type="exceed_context_size_error", code=400)),
    ],
    "not_found": [
        (404, ""),
        (400, "Invalid model name passed in model=x. Call `/v1/models` to view"),  # LiteLLM
        (400, said("Model Not Exist", type="invalid_request_error")),  # DeepSeek
        (400, said("Invalid model: x", type="invalid_model", code="1500")),  # Mistral
        (400, said("x is not a valid model ID", code=400)),  # OpenRouter
        (422, VLLM),
        (400, "model 'x' doesn't exist"),
        (404, PULL),  # Ollama
        (None, PULL),
        (400, [said("models/x is not found for API version v1beta")]),  # Gemini
        (400, said("no", code="model_not_found")),  # OpenAI
        (400, "No such model id"),
        (400, "Unable to access model: x"),
        (400, "model x not supported by this server"),
    ],
    "server": [
        *((status, "oops") for status in (408, 409, 425, 500, 502, 503, 504, 520, 524, 529, 599)),
        (500, "model 'x' not found"),
        (None, "oops"),
        (None, {"object": "error", "message": "Internal Server Error", "code": 500}),
    ],
    "bad_request": [
        (400, 'Unknown name "store"'),
        *((400, body) for body in TRANSIENT),
        (422, {"detail": [EXTRA]}),
        (None, said("tools[0] is wrong", type="invalid_request_error")),
        (400, said("oops", code=500)),
        (400, "string too long, maximum length 10485760"),
        (400, "max_tokens is too large: 99999. This model supports at most 16384 tokens"),
        (400, "max_tokens is too large: 9999. The model's maximum context length is 8192 tokens"),
        (400, "'max_completion_tokens' is too large: the maximum context length is 8192"),
        *((400, f"Invalid JSON at column {number}") for number in (1261, 20015)),
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_of_its_kind(kind: str) -> None:
    for status, body in KINDS[kind]:
        retryable = kind in ("rate_limit", "server") or body in TRANSIENT
        error = classify(status, said(body) if isinstance(body, str) and body else body)
        assert error.kind == kind, (status, body)
        assert error.retryable == retryable, (status, body)


TOO_LONG = """
This model's maximum context length is 8192 tokens.
The token count exceeds the model's limit
Input is too long for requested model.
The input token count (9) exceeds the maximum number of tokens allowed (8).
Please reduce the length of the messages or completion.
invalid params, context window exceeds limit (2013)
Input length 9 exceeds the maximum length 8
The input (9 tokens) is longer than the model's context length (8 tokens)
context length is only 8 tokens
tokens to keep is greater than the context length
`inputs` tokens + `max_new_tokens` must be <= 8. Given: 9
the prompt exceeds the maximum allowed input length of 8 tokens
Context length exceeded
Request Entity Too Large
"""
TOO_LONG_CODES = """
context_length_exceeded model_context_window_exceeded exceed_context_size_error request_too_large
prompt_too_long model_max_prompt_tokens_exceeded model_context_exceeded 20015 1261
"""


def test_a_context_that_is_too_long_is_known_in_every_providers_words() -> None:
    bodies = [said(text) for text in TOO_LONG.strip().split("\n")]
    bodies += [said(code=code) for code in TOO_LONG_CODES.split()]
    for body in bodies:
        assert classify(400, body).kind == classify(None, body).kind == "overflow", body


LOADING = [
    (503, said("Loading model", code=503, type="unavailable_error")),  # llama.cpp
    (500, {"error": "llm server loading model"}),  # Ollama
    (503, {"error": "Model google/gemma-2 is currently loading", "estimated_time": 20.0}),
    (503, said("the model x is still loading")),
    (503, said("we are loading the model")),
    (500, said("warming up")),
]
NOT_LOADING = [
    (500, said("model failed to load")),
    (503, said("Service Unavailable")),
    (429, said("loading model")),
    (401, said("loading model")),
    *((500, said(f"{word} loading model x")) for word in ("error", "failed", "unable to go on")),
    *((500, said(f"{word} loading model x")) for word in ("cannot go on", "terminated while")),
]


def test_a_server_that_loads_its_model_is_told_from_one_that_cannot() -> None:
    for rows, loading in ((LOADING, True), (NOT_LOADING, False)):
        assert [row for row in rows if classify(*row).loading is not loading] == []


# ---- the words -----------------------------------------------------------------------------------

FIELDS = [
    {"loc": ["body", "tools", 0], "msg": "field required"},
    {"loc": [], "msg": "and more"},
]
PAGE = "  <!DOCTYPE html>\n<html><head><title>502\nBad Gateway</title></head><body>x</body></html>"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (said("bad key", code="x"), "bad key"),
        ({"error": "no such thing"}, "no such thing"),
        ({"detail": "Not Found"}, "Not Found"),
        ({"detail": FIELDS}, "body.tools.0: field required; and more"),
        ({"object": "error", "message": "flat"}, "flat"),
        ([said("in a list")], "in a list"),
        (["x", said("second")], "second"),
        *((nothing, "HTTP status 400") for nothing in ([], "", None, {"error": {}})),
        ("plain\ntext", "plain text"),
        (said("Provider error", metadata={"raw": "busy"}), "Provider error: busy"),
        (said("x", metadata="raw"), "x"),
        (PAGE, "an HTML page: 502 Bad Gateway"),
        ("<html><body><h1>Not here</h1></body></html>", "an HTML page: Not here"),
        ("a < b and <html>", "a < b and <html>"),
        (said("a\x1b[31mb\x00\u202ec\r\nd"), "a [31mb c d"),
        ("x" * 600, "x" * 500 + "\u2026"),
        (
            {"errors": [{"message": "bad schema", "code": 5007}], "success": False},
            "bad schema",
        ),
        ({"error": "invalid_token", "error_description": "expired"}, "invalid_token: expired"),
    ],
    ids=name,
)
def test_the_message_is_found_in_any_body(body: Any, message: str) -> None:
    error = classify(400, body)
    assert error.message == message
    assert happened(error).isprintable()
    assert explain(error).isprintable()


def test_the_parameter_and_the_requests_id_are_passed_on() -> None:
    assert classify(400, said(param="store")).param == "store"
    assert classify(400, said(param=None)).param == ""
    for header in ("x-request-id", "request-id", "apim-request-id", "x-amzn-requestid", "cf-ray"):
        assert classify(500, "", {header: "r\x1b1", "server": "x"}).request_id == "r 1"
        assert classify(500, "", {header: ""}).request_id is None


# kind and facts | message | line
EXPLAINED = """
auth status=401 request_id=r1 | bad key. | the key was rejected: bad key (HTTP 401, request r1). KEY
rate_limit status=429 retry_after=20.4 | HTTP status 429 | too many requests: HTTP status 429. The server asks to wait 20 s. LATER
overflow status=413 | | the conversation is too long for the model (HTTP 413). NEW
quota status=402 | pay: | quota exceeded: pay (HTTP 402). Check the account of OPENAI_API_KEY.
auth status=403 | no | access was denied: no (HTTP 403). KEY
network | reset | reset. Check the base URL (OPENAI_BASE_URL) and that the server runs.
protocol advice=Stop. | no | no. Stop.
"""
ADVICE = {
    "KEY": "Check OPENAI_API_KEY, and that it belongs to this server (OPENAI_BASE_URL).",
    "LATER": "Try again later.",
    "NEW": "Begin a new conversation, shorten this one, or use a model with a larger context.",
}
READ = {"status": int, "retry_after": float}


@pytest.mark.parametrize("row", EXPLAINED.strip().split("\n"))
def test_an_error_is_one_line_that_says_what_to_do(row: str) -> None:
    facts, message, line = (cell.strip() for cell in row.split("|"))
    kind, *given = facts.split()
    pairs = (fact.split("=") for fact in given)
    error = ModelError(
        kind,
        message,
        **{key: READ.get(key, str)(value) for key, value in pairs},
    )  # type: ignore[arg-type]
    first, _, last = line.rpartition(" ")
    assert explain(error) == f"{first} {ADVICE.get(last, last)}"


def test_an_error_over_the_wire_keeps_its_status_words_and_id_and_gains_no_secret() -> None:
    headers = {"x-request-id": "r1", "content-type": "text/plain"}
    bad = Reply(status=401, headers=headers, chunks=[b"bad \xff key\r\n"])
    with serve(bad) as server:
        _, result = ask(
            server,
            model={"api_key": "sk-CANARY", "headers": {"x-team": "sk-CANARY"}},
        )
    assert result.error
    line = "the key was rejected: bad \ufffd key (HTTP 401, request r1). "
    assert explain(result.error).startswith(line)
    assert "CANARY" not in f"{explain(result.error)}{result.error.to_dict()}{result.text}"


SHAPES = ["[" * 100000, '{"error": ' * 50000, "{", "null", "3", '[[[{"error": 1}]]]', '"words"']
SHAPES.append('{"detail": ' + "[" * 900 + "]" * 900 + "}")


@pytest.mark.parametrize("body", SHAPES, ids=name)
def test_an_error_of_any_shape_breaks_nothing(body: str) -> None:
    with serve(
        Reply(
            status=400,
            chunks=[body.encode()],
        )
    ) as server:
        _, result = ask(server)
    assert result.error
    assert result.error.kind == "bad_request"
    assert len(result.text) < 600


@pytest.mark.parametrize(
    "bad",
    [
        Reply(status=500, chunks=[b"half"], close="reset"),
        Reply(status=500, chunks=[b"no gzip"], headers={"content-encoding": "gzip"}),
        Reply(status=500, chunks=[b"x" * 500_000] * 3, close="hang"),
    ],
    ids=["reset", "gzip", "endless"],
)
def test_an_error_whose_body_cannot_be_read_is_judged_by_its_status(bad: Reply) -> None:
    with serve(bad, Reply("fine")) as server:
        events, result = ask(server, model={"first_byte_timeout": 5})
    assert result.text == "fine"
    assert [event.error.kind for event in events if isinstance(event, Retry)] == ["server"]


# ---- how long to wait ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "message", "seconds"),
    [
        ({"retry-after": "7"}, "", 7.0),
        ({"retry-after": " 1.5 "}, "", 1.5),
        ({"retry-after": "0"}, "", 0.0),
        ({"retry-after-ms": "700", "retry-after": "9"}, "", 0.7),
        ({"x-ms-retry-after-ms": "600", "retry-after": "9"}, "", 0.6),
        ({"retry-after": "Mon, 01 Jan 2024 00:00:00 GMT"}, "", 0.0),
        *(({"retry-after": word}, "", None) for word in ("soon", "inf", "nan")),
        ({"retry-after-ms": "soon", "retry-after": "4"}, "", 4.0),
        ({"retry-after": "soon"}, "try again in 3s", 3.0),
        ({"retry-after": "2"}, "try again in 9s", 2.0),
        ({}, "Please try again in 600ms. Thank you", 0.6),
        ({}, "try again in 2 minutes", 120.0),
        ({}, "Try again in 1h30m0s.", 5400.0),
        ({}, "Please retry in 38.5s.", 38.5),
        ({}, "'retryDelay': '7s'", 7.0),
        ({}, "", None),
        ({}, "Please retry after 20 seconds.", 20.0),
    ],
    ids=name,
)
def test_the_wait_is_found_in_every_form(headers: Any, message: str, seconds: float | None) -> None:
    assert retry_hint(headers, message) == (seconds if seconds is None else pytest.approx(seconds))


@pytest.mark.case("NET-06")
def test_a_moment_is_a_wait_from_now_on() -> None:
    hint = retry_hint(
        {"retry-after": formatdate(time.time() + 1000, usegmt=True)},
        "",
    )
    assert hint is not None
    assert 900 < hint <= 1000


def test_geminis_wait_stands_in_its_details() -> None:
    details = [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "7s"}]
    for message in ("Resource has been exhausted (e.g. check quota).", SPENT_PLAN):
        error = classify(429, [said(message, code=429, details=details)])
        assert error.kind == "rate_limit"
        assert error.retryable is True
        assert error.retry_after == 7.0


def test_the_policy_doubles_with_jitter_up_to_a_cap_and_never_waits_less_than_it_is_asked() -> None:
    policy = RetryPolicy(base=2, cap=30, max_delay=60)

    def asking(wait: float | None) -> ModelError:
        return ModelError("server", "", retryable=True, retry_after=wait)

    for attempt, most in (
        (1, 2),
        (2, 4),
        (3, 8),
        (5, 30),
        (50, 30),
    ):
        delays = [
            policy.delay(
                asking(None),
                attempt,
            )
            or 0
            for _ in range(50)
        ]
        assert most * 0.75 <= min(delays) < max(delays) <= most
    assert [policy.delay(asking(wait), 1) for wait in (9, 60, 61)] == [9, 60, None]
    assert policy.delay(ModelError("auth", ""), 1) is None


def test_the_waits_of_the_program_and_of_a_library_program_are_those_of_the_documents() -> None:
    policy = RetryPolicy()
    base, cap, most = round(policy.base), round(policy.cap), round(policy.max_delay)
    setting = SETTINGS["CODER_RETRY_BASE"]
    assert setting.default == policy.base, (
        "change `retry_base` in settings.py, which the program uses"
    )
    assert f"({base})" in setting.help, "change the help of `retry_base` in settings.py"
    said = {
        "docs/library.md": [f"RetryPolicy(base={base}, cap={cap}, max_delay={most})"],
        "docs/servers.md": [
            f"retried after {base}, {2 * base}, {4 * base}, ... {cap} seconds",
            f"obeyed up to {most} seconds",
        ],
    }
    for page, sentences in said.items():
        text = " ".join(PAGES[page].split())
        assert [each for each in sentences if each not in text] == [], f"change it in {page}"
