"""Profile: what a server and a model family take in a request; and the request's body in these terms.

One table says what differs from the plain form; no rule beside it asks who the server is. A person can override every
field (CODER_PROFILE, ChatModel(profile=...)), and a server that says which member it does not take is believed: the
request goes out again without it, and where that helps, it stays out for as long as the process lives.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from coder.providers.reasoning import ECHOED, THINK
from coder.providers.request import OURS, SYSTEM, Shaper, text_in, tool_schemas
from coder.providers.text import mend
from coder.types import ModelError, Reasoning, Request

# Stand for the level's word and its tokens in Profile.reasoning
EFFORT, BUDGET = (
    "$effort",
    "$budget",
)
# Tokens; pi-agent-core's numbers, which know nothing above "high".
BUDGETS: dict[str, int] = {"minimal": 128, "low": 512, "medium": 1024, "high": 2048, "xhigh": 2048}


@dataclass(frozen=True)
class Profile:
    """How one model behind one server wants to be asked. The defaults are the plain form, which most servers take."""

    output_limit: Literal["max_tokens", "max_completion_tokens"] = (
        "max_tokens"  # R2: its name; sent only where it is set
    )
    system_role: Literal["system", "developer"] = "system"  # R4
    stream_options: bool = True  # R1: asks for the usage
    parallel_tool_calls: bool = True  # R6: may be sent, where it is set
    temperature: bool = True  # R9: may be sent, where it is set and the model does not think
    # R10: members of the body
    reasoning: Mapping[str, Any] = field(default_factory=lambda: {"reasoning_effort": EFFORT})
    efforts: Mapping[str, str] = field(default_factory=dict)  # R10: level -> its word here
    least_budget: int = 0  # tokens
    empty_content: Literal["null", "empty", "absent"] = (
        "null"  # R13: of an assistant message with nothing but calls
    )
    tool_name: bool = False  # R17: results carry the tool's name
    strict_turns: bool = False  # R16: no user message behind a result or behind another
    tool_images: bool = False  # R19: results may hold images
    schema_without: tuple[str, ...] = ()  # R21: words that a tool's schema must not use
    typed_schema: bool = False  # R22: each property needs a type
    ids: str = ""  # T31: a pattern that call ids have to match
    echoed: tuple[str, ...] = ECHOED  # R26: members of an assistant message that go back
    reasoning_filled: bool = (
        False  # R26: calls come with reasoning_content, "" where nothing was thought
    )
    cache_key: bool = False  # R6: takes prompt_cache_key
    key_header: str = ""  # carries the key beside Authorization


# Gemini's endpoint knows the schema language of its own API (R21).
UNKNOWN_THERE = (
    "$schema",
    "$ref",
    "$defs",
    "definitions",
    "additionalProperties",
    "const",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "propertyNames",
    "patternProperties",
    "oneOf",
    "allOf",
    "default",
    "title",
)
LOCAL = r"^(localhost|127\.|\[::1\]|0\.0\.0\.0|10\.|192\.168\.|172\.(1[6-9]|2\d|3[01])\.)"
NO_EXTREMES = {"minimal": "low", "xhigh": "high"}
SWITCH: dict[str, Any] = {"thinking": {"type": "enabled"}}

# (server, model, what differs). Patterns are searched in host:port and in the model's name, lower case; later rows win.
TABLE: tuple[tuple[str, str, dict[str, Any]], ...] = (
    # model families, whoever serves them
    ("", r"(^|/)(o\d\b|gpt-5)", {"output_limit": "max_completion_tokens", "temperature": False}),
    ("", r"(^|/)o\d\b|gpt-oss", {"efforts": NO_EXTREMES}),
    ("", r"(^|/)gpt-5", {"efforts": {"xhigh": "high"}}),
    ("", r"(^|/)gpt-5\.1", {"efforts": NO_EXTREMES}),
    ("", r"(^|/)gpt-5\.[2-9]|codex-max", {"efforts": {"minimal": "low"}}),
    ("", r"claude", {"ids": r"[a-zA-Z0-9_-]{1,64}"}),
    (
        "",
        r"\b(mistral|ministral|codestral|devstral|magistral|pixtral)",
        {"ids": r"[a-zA-Z0-9]{9}", "strict_turns": True},
    ),
    ("", r"deepseek-r1", {"echoed": ()}),
    ("", r"minimax", {"reasoning": {}, "echoed": (*ECHOED, THINK)}),
    # servers on this machine or network: thinking is a switch of the chat template
    (
        LOCAL,
        r"qwen3|glm-4|granite|hunyuan|nemotron",
        {"reasoning": {"chat_template_kwargs": {"enable_thinking": True}}},
    ),
    (LOCAL, r"deepseek-v3", {"reasoning": {"chat_template_kwargs": {"thinking": True}}}),
    (
        r":11434$|ollama",
        "",
        {
            "reasoning": {"reasoning_effort": EFFORT},
            "efforts": NO_EXTREMES,
            "empty_content": "empty",
        },
    ),
    (r":1234$", "", {"reasoning": {"reasoning_effort": EFFORT}, "empty_content": "empty"}),
    # servers
    (
        r"(^|\.)api\.openai\.com",
        "",
        {
            "output_limit": "max_completion_tokens",
            "cache_key": True,
            "ids": r".{1,40}",
            "echoed": (),
        },
    ),
    (r"\.azure\.com", "", {"ids": r".{1,40}", "key_header": "api-key", "echoed": ()}),
    (r"\.azure\.com", r"mistral", {"stream_options": False, "ids": r"[a-zA-Z0-9]{9}"}),
    (
        r"openrouter\.ai",
        "",
        {
            "reasoning": {"reasoning": {"effort": EFFORT}},
            "echoed": ("reasoning_details", "extra_content"),
        },
    ),
    (r"api\.deepseek\.com", "", {"reasoning": SWITCH, "reasoning_filled": True}),
    (
        r"moonshot|api\.kimi",
        "",
        {"reasoning": SWITCH, "reasoning_filled": True, "cache_key": True, "typed_schema": True},
    ),
    (r"\bz\.ai|bigmodel", "", {"reasoning": SWITCH}),
    (r"volces\.com", "", {"reasoning": SWITCH}),
    (
        r"dashscope|siliconflow",
        "",
        {"reasoning": {"enable_thinking": True, "thinking_budget": BUDGET}},
    ),
    (
        r"generativelanguage|aiplatform\.googleapis",
        "",
        {
            "efforts": {"xhigh": "high"},
            "tool_name": True,
            "schema_without": UNKNOWN_THERE,
            "parallel_tool_calls": False,
        },
    ),
    (
        r"api\.mistral\.ai",
        "",
        {
            "stream_options": False,
            "empty_content": "empty",
            "tool_name": True,
            "strict_turns": True,
            "ids": r"[a-zA-Z0-9]{9}",
            "echoed": (),
            "efforts": {"minimal": "high", "low": "high", "medium": "high", "xhigh": "high"},
        },
    ),
    (r"api\.groq\.com", "", {"echoed": (), "efforts": NO_EXTREMES}),
    (r"api\.groq\.com", r"qwen", {"reasoning": {"reasoning_effort": "default"}}),
    (r"api\.cerebras\.ai", "", {"echoed": ("reasoning",), "efforts": NO_EXTREMES}),
    (
        r"api\.anthropic\.com",
        "",
        {
            "reasoning": {"thinking": {"type": "enabled", "budget_tokens": BUDGET}},
            "least_budget": 1024,
            "echoed": (),
        },
    ),
    (r"api\.x\.ai", "", {"efforts": NO_EXTREMES}),
    (r"together\.(ai|xyz)", "", {"reasoning": {"reasoning": {"enabled": True}}}),
    (r"together\.(ai|xyz)", r"gpt-oss", {"reasoning": {"reasoning_effort": EFFORT}}),
    (r"databricks", "", {"stream_options": False}),
)


def profile_of(host: str, model: str, overrides: Mapping[str, Any] | None = None) -> Profile:
    """What fits a server ("api.openai.com", "127.0.0.1:8080") and a model. Raises ValueError where an override is none."""
    found: dict[str, Any] = {}
    for server, family, changes in TABLE:
        if re.search(server, host.lower()) and re.search(family, model.lower()):
            found |= changes
    return dataclasses.replace(Profile(**found), **_checked(overrides or {}))


def _checked(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides as the fields have them: of the right kind, and a word that the field knows."""
    hints, plain = get_type_hints(Profile), Profile()
    checked: dict[str, Any] = {}
    for name, given in overrides.items():
        if name not in hints:
            raise ValueError(f"{name!r} is no field of a profile; there are {', '.join(hints)}")
        default: Any = getattr(plain, name)
        value: Any = (
            tuple(given) if isinstance(default, tuple) and isinstance(given, list) else given
        )
        words = get_args(hints[name]) if get_origin(hints[name]) is Literal else ()
        texts = (
            value
            if isinstance(value, tuple)
            else value.values()
            if name == "efforts" and isinstance(value, dict)
            else ()
        )
        if (
            type(value) is not type(default)
            or (words and value not in words)
            or not all(isinstance(each, str) for each in texts)
        ):
            raise ValueError(
                f"{name} cannot be {value!r}; it is {default!r} by default"
                + (f", or {', '.join(words)}" if words else "")
            )
        if name == "key_header" and not re.fullmatch(r"[A-Za-z0-9-]*", value):
            raise ValueError(f"key_header cannot be {value!r}: it is the name of a header")
        checked[name] = value
    try:
        re.compile(checked.get("ids", ""))
    except re.error as error:
        raise ValueError(f"ids is no pattern: {error}") from None
    return checked


# ---- the body --------------------------------------------------------------------------------------------

NEEDED = {"model", "messages", "tools", "stream"}  # without these it is no request of ours
LIMITS = ("max_tokens", "max_completion_tokens")


def request_body(
    model: str,
    request: Request,
    profile: Profile,
    refusals: Refusals,
    shape: Shaper,
    *,
    extra: Mapping[str, Any],
    budgets: Mapping[str, int],
) -> dict[str, Any]:
    """The JSON that is sent: nothing in it that is not needed (R3, R6-R8), exactly one system message, first (R5).

    What the table says gives way to `extra`, and that to the request's own options.
    """
    ours = [{"role": "system", "content": request.system}] if request.system else []
    system = [message for message in [*ours, *request.messages] if message["role"] in SYSTEM]
    made: dict[str, Any] = {
        "model": model,
        "messages": shape(request.messages, profile, refusals.names()),
        "stream": True,
    }
    if system:
        text = mend("\n\n".join(text_in(message) for message in system))
        made["messages"] = [{"role": profile.system_role, "content": text}, *made["messages"]]
    if profile.stream_options:
        made["stream_options"] = {"include_usage": True}
    if request.tools:
        made["tools"] = tool_schemas(request.tools, profile)  # R11: no tools, no member
    if profile.cache_key and request.session_id:
        made["prompt_cache_key"] = request.session_id[:64]
    made |= thinking(profile, request.reasoning, budgets)
    made |= _options(request, extra, profile, refusals)
    return {
        name: value
        for name, value in made.items()
        if name in NEEDED or not refusals.has(name, value)
    }


def thinking(
    profile: Profile, level: Reasoning, budgets: Mapping[str, int] = BUDGETS
) -> dict[str, Any]:
    """The members that ask for this much thought; none where it is off or the model cannot be asked (R10)."""
    if level == "off":
        return {}
    if level not in BUDGETS:
        raise ValueError(
            f"reasoning is {level!r}, and has to be off or one of {', '.join(BUDGETS)}"
        )
    words = {
        EFFORT: profile.efforts.get(level, level),
        BUDGET: max(profile.least_budget, budgets.get(level, BUDGETS[level])),
    }
    filled: dict[str, Any] = _filled(dict(profile.reasoning), words)
    return filled


def _filled(value: Any, words: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        return {name: _filled(item, words) for name, item in value.items()}
    return words.get(value, value) if isinstance(value, str) else value


def _options(
    request: Request, extra: Mapping[str, Any], profile: Profile, refusals: Refusals
) -> dict[str, Any]:
    """What is sent besides, without options that the model does not take, the output limit under the name it has here."""
    options = dict(request.options)
    if not profile.temperature or request.reasoning != "off":
        options.pop("temperature", None)
    if not profile.parallel_tool_calls:
        options.pop("parallel_tool_calls", None)
    options = {**{name: value for name, value in extra.items() if name not in LIMITS}, **options}
    limit = [given[name] for given in (request.options, extra) for name in LIMITS if name in given]
    for name in LIMITS:
        options.pop(name, None)
    names = sorted(LIMITS, key=lambda each: each != profile.output_limit)
    known = [name for name in names if not refusals.has(name, None)]
    if limit and known:
        options[known[0]] = limit[0]
    return options


# ---- believing a server ----------------------------------------------------------------------------------

# What it takes to do without: what we add ourselves, and how an answer is sampled. Anything else that a person set may
# be a condition (store, provider routing), and is not dropped.
ADDED = {"stream_options", "prompt_cache_key"}
SAMPLING = {
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "parallel_tool_calls",
    *LIMITS,
}
UNKNOWN = (
    r"unsupported|not support|unknown|unrecogni[sz]ed|unexpected|not (be )?(permitted|allowed|accepted)|forbidden|extra|"
    r"no longer|cannot find field|is not (a )?(valid|known)|invalid (parameter|argument|field|property)"
)
WRONG = r"must be one of|should be|invalid value|not (a )?valid|(allowed|supported|permitted|expected) (values|one of)|expected one of"
NEAR = 120  # characters between a member's name and the word that refuses it
SHARED: dict[
    tuple[str, str], set[tuple[str, str]]
] = {}  # (address, model) -> what all who ask there have learned


class Refusals:
    """Members that a server does not take, each with the value that it refused; a limit and an echo whatever their value.

    Known to all who ask the same model at the same address, for as long as the process lives.
    """

    def __init__(self, address: str, model: str) -> None:
        self._known = SHARED.setdefault((address, model), set())
        self._tried: frozenset[tuple[str, str]] = frozenset()

    def names(self) -> set[str]:
        return {name for name, _ in self._tried | self._known}

    def has(self, name: str, value: Any) -> bool:
        return bool(self._tried or self._known) and _entry(name, value) in self._tried | self._known

    def with_one(self, name: str, value: Any) -> Refusals:
        """One more, to be tried."""
        more = copy(self)
        more._tried = self._tried | {_entry(name, value)}
        return more

    def learn(self, tried: Refusals) -> None:
        """It was right to leave these out."""
        self._known |= tried._tried


def _entry(name: str, value: Any) -> tuple[str, str]:
    return name, "" if name in LIMITS or name in OURS else json.dumps(
        value, sort_keys=True, default=str
    )


def dispensable(error: ModelError, sent: Mapping[str, Any], profile: Profile) -> str | None:
    """The member that a refused request can do without: one that we sent, and of which the server says that it does not
    know it (R1, R2, R6, R9, R10, R26)."""
    if error.kind != "bad_request":
        return None
    text, asked = error.message, profile.reasoning.keys() & sent.keys()
    droppable = sent.keys() & (ADDED | SAMPLING) | asked
    for name in sorted(droppable, key=lambda each: (each != error.param, -len(each), each)):
        inner = (
            [key for key in sent[name] if "_" in str(key)] if isinstance(sent[name], dict) else []
        )
        # Which word of ours for a level it is, is our choice
        words = f"{UNKNOWN}|{WRONG}" if name in asked else UNKNOWN
        if any(_says(text, each, words) for each in (name, *inner)) or (
            error.param == name and re.search(words, text, re.I)
        ):
            return name
    # Ollama
    if asked and re.search(r"does not support (thinking|reasoning)|\bthink value\b", text, re.I):
        return min(asked)
    members = {
        name for message in sent["messages"] if message["role"] == "assistant" for name in message
    }
    members |= {
        name
        for message in sent["messages"]
        for call in message.get("tool_calls") or ()
        for name in call
    }
    return next((name for name in sorted(members & OURS) if _says(text, name, UNKNOWN)), None)


def _says(text: str, name: str, words: str) -> bool:
    """Does a text say one of these words of this member, and not of another?"""
    camel = re.sub(r"_(\w)", lambda found: found[1].upper(), name)
    for found in re.finditer(rf"(?<![\w-])({re.escape(name)}|{re.escape(camel)})(?![\w-])", text):
        if re.search(words, text[max(0, found.start() - NEAR) : found.end() + NEAR], re.I):
            return True
    return False
