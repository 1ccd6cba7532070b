"""Profile: what a server and a model family take in a request, and which parameters can be dropped.

One table holds what differs from the plain form; nothing else asks which server it is. The user can
override every field (CODER_PROFILE, ChatModel(profile=...)). A parameter that a server rejects by
name is dropped, and if that helps, it is not sent again for as long as the process lives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coder.providers.text import JsonObject
from coder.types import ModelError, Usage

# In Profile.reasoning: the level's word, and its tokens
EFFORT = "$effort"
BUDGET = "$budget"
REASONING = ("reasoning_content", "reasoning", "reasoning_text")  # the first that is not empty
THINK = "think_tag"  # the name under which thoughts between tags enter the history
ECHOED = (  # members of an answer's message that go back with it, if a server's row has no others
    "reasoning_content",
    "reasoning_details",
    "thinking_blocks",
    "extra_content",
    "reasoning_opaque",
)
EXTRA_MEMBERS = frozenset({*REASONING, *ECHOED, THINK})  # of an assistant message, from its answer


@dataclass(frozen=True)
class Profile:
    """How one model of one server is asked. The defaults are the plain form, which most servers
    take."""

    output_limit: str = "max_tokens"  # or "max_completion_tokens"
    stream_options: bool = True  # asks for the usage
    parallel_tool_calls: bool = True  # may be sent, if it is set
    temperature: bool = True  # may be sent, if it is set and the model does not think
    # the members of the body that ask for reasoning
    reasoning: Mapping[str, Any] = field(default_factory=lambda: {"reasoning_effort": EFFORT})
    efforts: Mapping[str, str] = field(default_factory=dict)  # level -> its word here
    least_budget: int = 0  # tokens
    empty_content: str = "null"  # or "empty" or "absent": of a message with nothing but calls
    tool_name: bool = False  # results carry the tool's name
    strict_turns: bool = False  # no user message directly after a result or another user message
    ids: str = ""  # a pattern that call ids have to match
    echoed: tuple[str, ...] = ECHOED  # members of an assistant message that go back
    reasoning_filled: bool = False  # calls come with reasoning_content, also if it is empty
    cache_key: bool = False  # takes prompt_cache_key
    key_header: str = ""  # carries the key besides Authorization


LOCAL = r"^(localhost|127\.|\[::1\]|0\.0\.0\.0|10\.|192\.168\.|172\.(1[6-9]|2\d|3[01])\.)"
GEMINI = r"generativelanguage|aiplatform\.googleapis"
THINKERS = r"qwen3|glm-4|granite|hunyuan|nemotron"
MISTRAL = r"\b(mistral|ministral|codestral|devstral|magistral|pixtral)"
NINE = r"[a-zA-Z0-9]{9}"
NO_EXTREMES = {"minimal": "low", "xhigh": "high"}
MOSTLY_HIGH = dict.fromkeys(("minimal", "low", "medium", "xhigh"), "high")
BY_EFFORT = {"reasoning_effort": EFFORT}
SWITCH = {"thinking": {"type": "enabled"}}
TEMPLATE_THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
QWEN_BUDGET = {"enable_thinking": True, "thinking_budget": BUDGET}
CLAUDE_BUDGET = {"thinking": {"type": "enabled", "budget_tokens": BUDGET}}

# What differs on a server, for a model: patterns that are searched in host:port and in the model's
# name, lower case. Later rows win.
TABLE: tuple[JsonObject, ...] = (
    # model families, on any server
    dict(model=r"(^|/)(o\d\b|gpt-5)", output_limit="max_completion_tokens", temperature=False),
    dict(model=r"(^|/)o\d\b|gpt-oss", efforts=NO_EXTREMES),
    dict(model=r"(^|/)gpt-5", efforts={"xhigh": "high"}),
    dict(model=r"(^|/)gpt-5\.1", efforts=NO_EXTREMES),
    dict(model=r"(^|/)gpt-5\.[2-9]|codex-max", efforts={"minimal": "low"}),
    dict(model=r"claude", ids=r"[a-zA-Z0-9_-]{1,64}"),
    dict(model=MISTRAL, ids=NINE, strict_turns=True),
    dict(model=r"deepseek-r1", echoed=()),
    dict(model=r"minimax", reasoning={}, echoed=(*ECHOED, THINK)),
    # servers on this machine or network: reasoning is a switch of the chat template
    dict(server=LOCAL, model=THINKERS, reasoning=TEMPLATE_THINKING),
    dict(
        server=LOCAL, model=r"deepseek-v3", reasoning={"chat_template_kwargs": {"thinking": True}}
    ),
    dict(server=r":11434$|ollama", reasoning=BY_EFFORT, efforts=NO_EXTREMES, empty_content="empty"),
    dict(server=r":1234$", reasoning=BY_EFFORT, empty_content="empty"),
    # hosted servers
    dict(server=r"(^|\.)api\.openai\.com", output_limit="max_completion_tokens", cache_key=True),
    dict(server=r"(^|\.)api\.openai\.com|\.azure\.com", ids=r".{1,40}", echoed=()),
    dict(server=r"\.azure\.com", key_header="api-key"),
    dict(server=r"\.azure\.com", model=r"mistral", stream_options=False, ids=NINE),
    dict(
        server=r"openrouter\.ai",
        reasoning={"reasoning": {"effort": EFFORT}},
        echoed=("reasoning_details", "extra_content"),
    ),
    dict(server=r"api\.deepseek\.com", reasoning=SWITCH, reasoning_filled=True),
    dict(server=r"moonshot|api\.kimi", reasoning=SWITCH, reasoning_filled=True, cache_key=True),
    dict(server=r"\bz\.ai|bigmodel|volces\.com", reasoning=SWITCH),
    dict(server=r"dashscope|siliconflow", reasoning=QWEN_BUDGET),
    dict(server=GEMINI, tool_name=True, parallel_tool_calls=False, efforts={"xhigh": "high"}),
    dict(
        server=r"api\.mistral\.ai",
        stream_options=False,
        empty_content="empty",
        tool_name=True,
        strict_turns=True,
        ids=NINE,
        echoed=(),
        efforts=MOSTLY_HIGH,
    ),
    dict(server=r"api\.groq\.com", echoed=(), efforts=NO_EXTREMES),
    dict(server=r"api\.groq\.com", model=r"qwen", reasoning={"reasoning_effort": "default"}),
    dict(server=r"api\.cerebras\.ai", echoed=("reasoning",), efforts=NO_EXTREMES),
    dict(server=r"api\.anthropic\.com", reasoning=CLAUDE_BUDGET, least_budget=1024, echoed=()),
    dict(server=r"api\.x\.ai", efforts=NO_EXTREMES),
    dict(server=r"together\.(ai|xyz)", reasoning={"reasoning": {"enabled": True}}),
    dict(server=r"together\.(ai|xyz)", model=r"gpt-oss", reasoning=BY_EFFORT),
    dict(server=r"databricks", stream_options=False),
)


def profile_of(host: str, model: str, overrides: Mapping[str, Any] | None = None) -> Profile:
    """What fits a server ("api.openai.com", "127.0.0.1:8080") and a model. Raises ValueError if an
    override does not fit its field."""
    fields: JsonObject = {}
    for row in TABLE:
        is_server = re.search(row.get("server", ""), host.lower())
        if is_server and re.search(row.get("model", ""), model.lower()):
            fields |= row
    for pattern in ("server", "model"):
        fields.pop(pattern, None)
    for name, value in (overrides or {}).items():
        fields[name] = _check_field(name, value)
    return Profile(**fields)


def _check_field(name: str, value: Any) -> Any:
    defaults = vars(Profile())
    if name not in defaults:
        raise ValueError(f"{name!r} is no field of a profile; known: {', '.join(defaults)}")
    kind = type(defaults[name])
    if kind is tuple and isinstance(value, list):
        value = tuple(str(item) for item in value)
    if type(value) is not kind:
        raise ValueError(f"{name} cannot be {value!r}; it is {defaults[name]!r} by default")
    if name == "ids":
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"ids is no pattern: {error}") from None
    return value


# ---- dropping parameters that the server rejects -------------------------------------------------

OUTPUT_LIMITS = ("max_tokens", "max_completion_tokens")
# Added by this package, or how an answer is sampled. Other options may be a condition of the user's
# (store, routing), and are kept.
DROPPABLE = {
    *OUTPUT_LIMITS,
    "stream_options",
    "prompt_cache_key",
    "parallel_tool_calls",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
}
UNKNOWN = (
    r"unsupported|not support|unknown|unrecogni[sz]ed|unexpected|"
    r"not (be )?(permitted|allowed|accepted)|forbidden|extra|no longer|cannot find field|"
    r"is not (a )?(valid|known)|invalid (parameter|argument|field|property)"
)
WRONG = (
    r"must be one of|should be|invalid value|not (a )?valid|"
    r"(allowed|supported|permitted|expected) (values|one of)|expected one of"
)
SCHEMA_WORDS = r"response.?format|json.?schema|response mime|structured output|grammar"
NO_REASONING = r"does not support (thinking|reasoning)|\bthink value\b"  # Ollama
NEAR = 120  # characters between a parameter's name and the word that rejects it
LEARNT: dict[tuple[str, str], set[str]] = {}  # (address, model) -> rejected members


def droppable_param(error: ModelError, sent: Mapping[str, Any], profile: Profile) -> str | None:
    """What a rejected request can do without: a member of the body, or of its assistant messages,
    that the program added and the server's message names as unknown.

    If no such member is named, a schema for the answer is left out, whatever the message says: the
    prompt can describe it.
    """
    has_schema = schema_in(sent) is not None
    if has_schema and re.search(SCHEMA_WORDS, error.message, re.I):
        return "response_format"
    named = _named_param(error, sent, profile)
    return "response_format" if has_schema and named is None else named


def schema_in(options: Mapping[str, Any]) -> JsonObject | None:
    """The JSON schema that the answer has to fit, if one is asked for."""
    form = options.get("response_format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        schema: JsonObject = form["json_schema"]["schema"]
        return schema
    return None


def _named_param(error: ModelError, sent: Mapping[str, Any], profile: Profile) -> str | None:
    reasoning = profile.reasoning.keys() & sent.keys()
    candidates = sorted((sent.keys() & DROPPABLE) | reasoning)
    candidates.sort(key=len, reverse=True)  # a name may be a part of another
    candidates.sort(key=lambda name: name != error.param)
    for name in candidates:
        # reasoning levels are named by this package, so a wrong value counts, too
        words = f"{UNKNOWN}|{WRONG}" if name in reasoning else UNKNOWN
        is_named = error.param == name and re.search(words, error.message, re.I)
        if is_named or _rejects_member(error.message, name, sent[name], words):
            return name
    if reasoning and re.search(NO_REASONING, error.message, re.I):
        return min(reasoning)
    return _rejected_extra(error.message, sent["messages"])


def _rejected_extra(text: str, messages: list[JsonObject]) -> str | None:
    """A member of assistant messages and their calls that not every server knows."""
    names: set[str] = set()
    for message in messages:
        if message["role"] == "assistant":
            names.update(message, *(message.get("tool_calls") or ()))
    for name in sorted(EXTRA_MEMBERS & names):
        if _rejects(text, name, UNKNOWN):
            return name
    return None


def _rejects_member(text: str, name: str, value: Any, words: str) -> bool:
    """Also by a name inside the member, such as enable_thinking in chat_template_kwargs."""
    names = [name]
    if isinstance(value, dict):
        names += [key for key in value if "_" in key]
    return any(_rejects(text, one, words) for one in names)


def _rejects(text: str, name: str, words: str) -> bool:
    """Is one of the words near the name (or its camelCase form) in a server's message?"""
    camel = re.sub(r"_(\w)", lambda letter: letter[1].upper(), name)
    pattern = rf"(?<![\w-])({re.escape(name)}|{re.escape(camel)})(?![\w-])"
    for match in re.finditer(pattern, text):
        near = text[max(0, match.start() - NEAR) : match.end() + NEAR]
        if re.search(words, near, re.I):
            return True
    return False


# ---- tokens and money ----------------------------------------------------------------------------

MAX_COUNT = 1e12  # tokens; what is more, or no number at all, is not counted
CACHED = ("prompt_cache_hit_tokens", "cached_tokens", "cache_read_input_tokens")
CHARS_PER_TOKEN = 4  # of English prose and code; an estimate is marked as one


def read_usage(usage: JsonObject) -> Usage | None:
    """Tokens from every known shape; None if nothing is counted."""
    into = _find_part(usage, "prompt_tokens_details", "input_tokens_details")
    out = _find_part(usage, "completion_tokens_details", "output_tokens_details")
    sent = _read_number(usage, "prompt_tokens", "input_tokens", "prompt_eval_count")
    got = _read_number(usage, "completion_tokens", "output_tokens", "eval_count")
    cached = _read_number(into, "cached_tokens") or _read_number(usage, *CACHED)
    reasoning = _read_number(out, "reasoning_tokens") or _read_number(usage, "reasoning_tokens")
    left_over = _read_number(usage, "total_tokens") - sent - got
    # Anthropic: the cache is counted apart from the input
    if cached > sent or (left_over > 0 and left_over == cached):
        sent += cached + _read_number(usage, "cache_creation_input_tokens")
    # xAI, Gemini: reasoning is counted apart from the output
    elif left_over > 0 and reasoning in (0, left_over):
        got += left_over
        reasoning = left_over
    return Usage(sent, got, cached, reasoning) if sent + got else None


def _find_part(usage: JsonObject, *names: str) -> JsonObject:
    for name in names:
        part = usage.get(name)
        if isinstance(part, dict):
            return part
    return {}


def _read_number(counts: JsonObject, *names: str) -> int:
    for name in names:
        number = counts.get(name)
        if isinstance(number, int | float) and 0 <= number < MAX_COUNT:
            return int(number)
    return 0


@dataclass(frozen=True, slots=True)
class Price:
    """What a million tokens cost, in one currency. `cached` None: as much as other input. Raises
    ValueError."""

    input: float
    output: float
    cached: float | None = None

    def __post_init__(self) -> None:
        for price in (self.input, self.output, self.cached or 0):
            if not (isinstance(price, int | float) and price >= 0):
                raise ValueError(f"{price!r} is no price")

    def of(self, usage: Usage) -> float:
        """The price of these tokens."""
        cached = self.input if self.cached is None else self.cached
        fresh = max(0, usage.input - usage.cached)
        return (fresh * self.input + usage.cached * cached + usage.output * self.output) / 1_000_000
