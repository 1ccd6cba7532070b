"""Profile: what a server and a model family take in a request, and which parameters can be dropped.

One table holds what differs from the plain form; nothing else asks which server it is. The user can override every field
(CODER_PROFILE, ChatModel(profile=...)). A parameter that a server rejects by name is dropped, and where that helps, it
is not sent again for as long as the process lives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from coder.types import ModelError, Usage

EFFORT, BUDGET = "$effort", "$budget"  # in Profile.reasoning: the level's word, and its tokens
REASONING = ("reasoning_content", "reasoning", "reasoning_text")  # the first that is not empty
THINK = "think_tag"  # the name under which thoughts between tags enter the history
ECHOED = (
    *("reasoning_content", "reasoning_details", "thinking_blocks"),
    *("extra_content", "reasoning_opaque"),
)
EXTRA_MEMBERS = frozenset({*REASONING, *ECHOED, THINK})  # of an assistant message, from its answer


@dataclass(frozen=True)
class Profile:
    """How one model behind one server is asked. The defaults are the plain form, which most servers take."""

    output_limit: str = "max_tokens"  # or "max_completion_tokens"
    stream_options: bool = True  # asks for the usage
    parallel_tool_calls: bool = True  # may be sent, where it is set
    temperature: bool = True  # may be sent, where it is set and the model does not think
    # the members of the body that ask for reasoning
    reasoning: Mapping[str, Any] = field(default_factory=lambda: {"reasoning_effort": EFFORT})
    efforts: Mapping[str, str] = field(default_factory=dict)  # level -> its word here
    least_budget: int = 0  # tokens
    empty_content: str = "null"  # or "empty" or "absent": of a message with nothing but calls
    tool_name: bool = False  # results carry the tool's name
    strict_turns: bool = False  # no user message directly after a result or another user message
    ids: str = ""  # a pattern that call ids have to match
    echoed: tuple[str, ...] = ECHOED  # members of an assistant message that go back
    reasoning_filled: bool = False  # calls come with reasoning_content, also where it is empty
    cache_key: bool = False  # takes prompt_cache_key
    key_header: str = ""  # carries the key beside Authorization


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

# (server, model, what differs). Patterns are searched in host:port and in the model's name, lower case; later rows win.
TABLE: tuple[tuple[str, str, dict[str, Any]], ...] = (
    # model families, on any server
    ("", r"(^|/)(o\d\b|gpt-5)", dict(output_limit="max_completion_tokens", temperature=False)),
    ("", r"(^|/)o\d\b|gpt-oss", dict(efforts=NO_EXTREMES)),
    ("", r"(^|/)gpt-5", dict(efforts={"xhigh": "high"})),
    ("", r"(^|/)gpt-5\.1", dict(efforts=NO_EXTREMES)),
    ("", r"(^|/)gpt-5\.[2-9]|codex-max", dict(efforts={"minimal": "low"})),
    ("", r"claude", dict(ids=r"[a-zA-Z0-9_-]{1,64}")),
    ("", MISTRAL, dict(ids=NINE, strict_turns=True)),
    ("", r"deepseek-r1", dict(echoed=())),
    ("", r"minimax", dict(reasoning={}, echoed=(*ECHOED, THINK))),
    # servers on this machine or network, where reasoning is a switch of the chat template
    (LOCAL, THINKERS, dict(reasoning=TEMPLATE_THINKING)),
    (LOCAL, r"deepseek-v3", dict(reasoning={"chat_template_kwargs": {"thinking": True}})),
    (r":11434$|ollama", "", dict(reasoning=BY_EFFORT, efforts=NO_EXTREMES, empty_content="empty")),
    (r":1234$", "", dict(reasoning=BY_EFFORT, empty_content="empty")),
    # hosted servers
    (r"(^|\.)api\.openai\.com", "", dict(output_limit="max_completion_tokens", cache_key=True)),
    (r"(^|\.)api\.openai\.com|\.azure\.com", "", dict(ids=r".{1,40}", echoed=())),
    (r"\.azure\.com", "", dict(key_header="api-key")),
    (r"\.azure\.com", r"mistral", dict(stream_options=False, ids=NINE)),
    (r"openrouter\.ai", "", dict(reasoning={"reasoning": {"effort": EFFORT}})),
    (r"openrouter\.ai", "", dict(echoed=("reasoning_details", "extra_content"))),
    (r"api\.deepseek\.com", "", dict(reasoning=SWITCH, reasoning_filled=True)),
    (r"moonshot|api\.kimi", "", dict(reasoning=SWITCH, reasoning_filled=True, cache_key=True)),
    (r"\bz\.ai|bigmodel|volces\.com", "", dict(reasoning=SWITCH)),
    (r"dashscope|siliconflow", "", dict(reasoning=QWEN_BUDGET)),
    (GEMINI, "", dict(tool_name=True, parallel_tool_calls=False)),
    (GEMINI, "", dict(efforts={"xhigh": "high"})),
    (r"api\.mistral\.ai", "", dict(stream_options=False, empty_content="empty", tool_name=True)),
    (r"api\.mistral\.ai", "", dict(strict_turns=True, ids=NINE, echoed=(), efforts=MOSTLY_HIGH)),
    (r"api\.groq\.com", "", dict(echoed=(), efforts=NO_EXTREMES)),
    (r"api\.groq\.com", r"qwen", dict(reasoning={"reasoning_effort": "default"})),
    (r"api\.cerebras\.ai", "", dict(echoed=("reasoning",), efforts=NO_EXTREMES)),
    (r"api\.anthropic\.com", "", dict(reasoning=CLAUDE_BUDGET, least_budget=1024, echoed=())),
    (r"api\.x\.ai", "", dict(efforts=NO_EXTREMES)),
    (r"together\.(ai|xyz)", "", dict(reasoning={"reasoning": {"enabled": True}})),
    (r"together\.(ai|xyz)", r"gpt-oss", dict(reasoning=BY_EFFORT)),
    (r"databricks", "", dict(stream_options=False)),
)


def profile_of(host: str, model: str, overrides: Mapping[str, Any] | None = None) -> Profile:
    """What fits a server ("api.openai.com", "127.0.0.1:8080") and a model. Raises ValueError where an override does not
    fit its field."""
    found: dict[str, Any] = {}
    for server, family, changes in TABLE:
        if re.search(server, host.lower()) and re.search(family, model.lower()):
            found |= changes
    defaults, checked = vars(Profile()), dict[str, Any]()
    for name, value in (overrides or {}).items():
        if name not in defaults:
            raise ValueError(f"{name!r} is no field of a profile; known: {', '.join(defaults)}")
        kind = type(defaults[name])
        checked[name] = tuple(map(str, value)) if (kind, type(value)) == (tuple, list) else value
        if type(checked[name]) is not kind:
            raise ValueError(f"{name} cannot be {value!r}; it is {defaults[name]!r} by default")
    try:
        re.compile(checked.get("ids", ""))
    except re.error as error:
        raise ValueError(f"ids is no pattern: {error}") from None
    return Profile(**found | checked)


# ---- dropping parameters that the server rejects ---------------------------------------------------

LIMITS = ("max_tokens", "max_completion_tokens")
# Added by this package, or how an answer is sampled. Other options may be a condition of the user's (store, routing), and are kept.
DROPPABLE = {
    *("stream_options", "prompt_cache_key"),
    *("temperature", "top_p", "top_k", "min_p", "seed", "parallel_tool_calls"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", *LIMITS),
}
UNKNOWN = (
    r"unsupported|not support|unknown|unrecogni[sz]ed|unexpected|not (be )?(permitted|allowed|accepted)|forbidden|extra|"
    r"no longer|cannot find field|is not (a )?(valid|known)|invalid (parameter|argument|field|property)"
)
WRONG = (
    r"must be one of|should be|invalid value|not (a )?valid|"
    r"(allowed|supported|permitted|expected) (values|one of)|expected one of"
)
NEAR = 120  # characters between a parameter's name and the word that rejects it
LEARNT: dict[tuple[str, str], set[str]] = {}  # (address, model) -> rejected members


def droppable_param(error: ModelError, sent: Mapping[str, Any], profile: Profile) -> str | None:
    """What a rejected request can do without: a member of the body, or of its assistant messages, that the program
    added and the server's message names as unknown."""
    if error.kind != "bad_request":
        return None
    text, thinking = error.message, profile.reasoning.keys() & sent.keys()
    names = sent.keys() & DROPPABLE | thinking
    for name in sorted(names, key=lambda each: (each != error.param, -len(each), each)):
        # reasoning levels are named by this package, so a wrong value counts, too
        words = f"{UNKNOWN}|{WRONG}" if name in thinking else UNKNOWN
        inner = [key for key in sent[name] if "_" in key] if isinstance(sent[name], dict) else []
        if any(_rejects(text, each, words) for each in (name, *inner)):
            return name
        if error.param == name and re.search(words, text, re.I):
            return name
    if thinking and re.search(r"does not support (thinking|reasoning)|\bthink value\b", text, re.I):
        return min(thinking)  # Ollama
    answers = [each for each in sent["messages"] if each["role"] == "assistant"]
    calls = [call for each in answers for call in each.get("tool_calls") or ()]
    members = sorted(EXTRA_MEMBERS.intersection(chain(*answers, *calls)))
    return next((name for name in members if _rejects(text, name, UNKNOWN)), None)


def _rejects(text: str, name: str, words: str) -> bool:
    """Does one of the words stand near the name (or its camelCase form) in a server's message?"""
    camel = re.sub(r"_(\w)", lambda found: found[1].upper(), name)
    places = re.finditer(rf"(?<![\w-])({re.escape(name)}|{re.escape(camel)})(?![\w-])", text)
    near = (text[max(0, found.start() - NEAR) : found.end() + NEAR] for found in places)
    return any(re.search(words, part, re.I) for part in near)


# ---- tokens and money ------------------------------------------------------------------------------

MAX_COUNT = 1e12  # tokens; what is more, or no number at all, is not counted
CHARS_PER_TOKEN = 4  # of English prose and code; an estimate is marked as one


def read_usage(usage: dict[str, Any]) -> Usage | None:
    """Tokens from every known shape; None where nothing is counted."""
    into = _find_part(usage, "prompt_tokens_details", "input_tokens_details")
    out = _find_part(usage, "completion_tokens_details", "output_tokens_details")
    sent = _read_number(usage, "prompt_tokens", "input_tokens", "prompt_eval_count")
    got = _read_number(usage, "completion_tokens", "output_tokens", "eval_count")
    names = ("prompt_cache_hit_tokens", "cached_tokens", "cache_read_input_tokens")
    cached = _read_number(into, "cached_tokens") or _read_number(usage, *names)
    reasoning = _read_number(out, "reasoning_tokens") or _read_number(usage, "reasoning_tokens")
    beside = _read_number(usage, "total_tokens") - sent - got
    if cached > sent or (beside > 0 and beside == cached):  # Anthropic: the cache beside the input
        sent, beside = sent + cached + _read_number(usage, "cache_creation_input_tokens"), 0
    if beside > 0 and reasoning in (0, beside):  # xAI, Gemini: reasoning beside the output
        got, reasoning = got + beside, beside
    return Usage(sent, got, cached, reasoning) if sent + got else None


def _find_part(usage: dict[str, Any], *names: str) -> dict[str, Any]:
    return next((usage[name] for name in names if isinstance(usage.get(name), dict)), {})


def _read_number(of: dict[str, Any], *names: str) -> int:
    numbers = (of[name] for name in names if isinstance(of.get(name), int | float))
    return next((int(number) for number in numbers if 0 <= number < MAX_COUNT), 0)


@dataclass(frozen=True, slots=True)
class Price:
    """What a million tokens cost, in one currency. `cached` None: as much as other input. Raises ValueError."""

    input: float
    output: float
    cached: float | None = None

    def __post_init__(self) -> None:
        for each in (self.input, self.output, self.cached or 0):
            if not (isinstance(each, int | float) and each >= 0):
                raise ValueError(f"{each!r} is no price")

    def of(self, usage: Usage) -> float:
        """The price of these tokens."""
        cached = self.input if self.cached is None else self.cached
        fresh = max(0, usage.input - usage.cached)
        return (fresh * self.input + usage.cached * cached + usage.output * self.output) / 1_000_000
