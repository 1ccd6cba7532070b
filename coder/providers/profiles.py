"""Profile: what a server and a model family take in a request, and which parameters can be dropped.

One table holds what differs from the plain form; nothing else asks which server it is. The user can override every field
(CODER_PROFILE, ChatModel(profile=...)). A parameter that a server rejects by name is dropped, and where that helps, it
is not sent again for as long as the process lives.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from coder.types import ModelError

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


Row = tuple[str, str, dict[str, Any]]


def _row(server: str, model: str, **changes: Any) -> Row:
    return server, model, changes


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
TABLE: tuple[Row, ...] = (
    # model families, on any server
    _row("", r"(^|/)(o\d\b|gpt-5)", output_limit="max_completion_tokens", temperature=False),
    _row("", r"(^|/)o\d\b|gpt-oss", efforts=NO_EXTREMES),
    _row("", r"(^|/)gpt-5", efforts={"xhigh": "high"}),
    _row("", r"(^|/)gpt-5\.1", efforts=NO_EXTREMES),
    _row("", r"(^|/)gpt-5\.[2-9]|codex-max", efforts={"minimal": "low"}),
    _row("", r"claude", ids=r"[a-zA-Z0-9_-]{1,64}"),
    _row("", MISTRAL, ids=NINE, strict_turns=True),
    _row("", r"deepseek-r1", echoed=()),
    _row("", r"minimax", reasoning={}, echoed=(*ECHOED, THINK)),
    # servers on this machine or network, where reasoning is a switch of the chat template
    _row(LOCAL, THINKERS, reasoning=TEMPLATE_THINKING),
    _row(LOCAL, r"deepseek-v3", reasoning={"chat_template_kwargs": {"thinking": True}}),
    _row(r":11434$|ollama", "", reasoning=BY_EFFORT, efforts=NO_EXTREMES, empty_content="empty"),
    _row(r":1234$", "", reasoning=BY_EFFORT, empty_content="empty"),
    # hosted servers
    _row(r"(^|\.)api\.openai\.com", "", output_limit="max_completion_tokens", cache_key=True),
    _row(r"(^|\.)api\.openai\.com|\.azure\.com", "", ids=r".{1,40}", echoed=()),
    _row(r"\.azure\.com", "", key_header="api-key"),
    _row(r"\.azure\.com", r"mistral", stream_options=False, ids=NINE),
    _row(r"openrouter\.ai", "", reasoning={"reasoning": {"effort": EFFORT}}),
    _row(r"openrouter\.ai", "", echoed=("reasoning_details", "extra_content")),
    _row(r"api\.deepseek\.com", "", reasoning=SWITCH, reasoning_filled=True),
    _row(r"moonshot|api\.kimi", "", reasoning=SWITCH, reasoning_filled=True),
    _row(r"moonshot|api\.kimi", "", cache_key=True),
    _row(r"\bz\.ai|bigmodel", "", reasoning=SWITCH),
    _row(r"volces\.com", "", reasoning=SWITCH),
    _row(r"dashscope|siliconflow", "", reasoning=QWEN_BUDGET),
    _row(GEMINI, "", tool_name=True, parallel_tool_calls=False),
    _row(GEMINI, "", efforts={"xhigh": "high"}),
    _row(r"api\.mistral\.ai", "", stream_options=False, empty_content="empty", tool_name=True),
    _row(r"api\.mistral\.ai", "", strict_turns=True, ids=NINE, echoed=(), efforts=MOSTLY_HIGH),
    _row(r"api\.groq\.com", "", echoed=(), efforts=NO_EXTREMES),
    _row(r"api\.groq\.com", r"qwen", reasoning={"reasoning_effort": "default"}),
    _row(r"api\.cerebras\.ai", "", echoed=("reasoning",), efforts=NO_EXTREMES),
    _row(r"api\.anthropic\.com", "", reasoning=CLAUDE_BUDGET, least_budget=1024, echoed=()),
    _row(r"api\.x\.ai", "", efforts=NO_EXTREMES),
    _row(r"together\.(ai|xyz)", "", reasoning={"reasoning": {"enabled": True}}),
    _row(r"together\.(ai|xyz)", r"gpt-oss", reasoning=BY_EFFORT),
    _row(r"databricks", "", stream_options=False),
)


def profile_of(host: str, model: str, overrides: Mapping[str, Any] | None = None) -> Profile:
    """What fits a server ("api.openai.com", "127.0.0.1:8080") and a model. Raises ValueError where an override does not
    fit its field."""
    found: dict[str, Any] = {}
    for server, family, changes in TABLE:
        if re.search(server, host.lower()) and re.search(family, model.lower()):
            found |= changes
    return dataclasses.replace(Profile(**found), **_checked(overrides or {}))


def _checked(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides, each of its field's kind."""
    defaults, checked = vars(Profile()), dict[str, Any]()
    for name, value in overrides.items():
        if name not in defaults:
            raise ValueError(f"{name!r} is no field of a profile; known: {', '.join(defaults)}")
        default = defaults[name]
        if isinstance(default, tuple) and isinstance(value, list):
            value = tuple(map(str, value))
        if type(value) is not type(default):
            raise ValueError(f"{name} cannot be {value!r}; it is {default!r} by default")
        checked[name] = value
    try:
        re.compile(checked.get("ids", ""))
    except re.error as error:
        raise ValueError(f"ids is no pattern: {error}") from None
    return checked


# ---- dropping parameters that the server rejects ---------------------------------------------------

LIMITS = ("max_tokens", "max_completion_tokens")
# By us, or how an answer is sampled. Other options may be a condition of the user's (store, routing), and are kept.
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
LEARNT: dict[tuple[str, str], frozenset[str]] = {}  # (address, model) -> rejected members


def droppable_param(error: ModelError, sent: Mapping[str, Any], profile: Profile) -> str | None:
    """What a rejected request can do without: a member of the body, or of its assistant messages, that the program
    added and the server's message names as unknown."""
    if error.kind != "bad_request":
        return None
    text, thinking = error.message, profile.reasoning.keys() & sent.keys()
    names = sent.keys() & DROPPABLE | thinking
    for name in sorted(names, key=lambda each: (each != error.param, -len(each), each)):
        # the word for a reasoning level is ours, so a wrong value counts, too
        words = f"{UNKNOWN}|{WRONG}" if name in thinking else UNKNOWN
        inner = [key for key in sent[name] if "_" in key] if isinstance(sent[name], dict) else []
        if any(_rejects(text, each, words) for each in (name, *inner)):
            return name
        if error.param == name and re.search(words, text, re.I):
            return name
    if thinking and re.search(r"does not support (thinking|reasoning)|\bthink value\b", text, re.I):
        return min(thinking)  # Ollama
    members = sorted(EXTRA_MEMBERS & set(_members(sent["messages"])))
    return next((name for name in members if _rejects(text, name, UNKNOWN)), None)


def _members(messages: list[dict[str, Any]]) -> Iterator[str]:
    for message in messages:
        if message["role"] == "assistant":
            yield from message
            for call in message.get("tool_calls") or ():
                yield from call


def _rejects(text: str, name: str, words: str) -> bool:
    """Does one of the words stand near the name (or its camelCase form) in a server's message?"""
    camel = re.sub(r"_(\w)", lambda found: found[1].upper(), name)
    places = re.finditer(rf"(?<![\w-])({re.escape(name)}|{re.escape(camel)})(?![\w-])", text)
    near = (text[max(0, found.start() - NEAR) : found.end() + NEAR] for found in places)
    return any(re.search(words, part, re.I) for part in near)
