"""Profile: what a server and a model family take in a request; and the request's body in these terms.

One table says what differs from the plain form. Nothing else in the package knows a vendor's name. A person can override
every field (CODER_PROFILE, ChatModel(profile=...)), and a server that names a member it does not take is believed: the
request goes out again without it, for as long as the process lives.

What it leaves out: sending (ai.py). Shaping messages is shaping.py's.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from coder.reasoning import ECHOED, THINK
from coder.shaping import shaped, tool_schemas
from coder.text import mend
from coder.types import Message, ModelError, Reasoning, Request

EFFORT, BUDGET = "$effort", "$budget"  # stand for the level's word and its tokens in Profile.reasoning
BUDGETS: dict[str, int] = {"minimal": 128, "low": 512, "medium": 1024, "high": 2048, "xhigh": 2048}  # tokens (seed 002)


@dataclass(frozen=True)
class Profile:
    """How one model behind one server wants to be asked. The defaults are the plain form, which most servers take."""

    output_limit: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"  # R2: its name; sent only where it is set
    system_role: Literal["system", "developer"] = "system"  # R4
    stream_options: bool = True  # R1: asks for the usage
    parallel_tool_calls: bool = True  # R6: may be sent, where it is set
    temperature: bool = True  # R9: may be sent, where it is set and the model does not think
    reasoning: Mapping[str, Any] = field(default_factory=lambda: {"reasoning_effort": EFFORT})  # R10: members of the body
    efforts: Mapping[str, str] = field(default_factory=dict)  # R10: level -> its word here
    least_budget: int = 0  # tokens
    empty_content: Literal["null", "empty", "absent"] = "null"  # R13: of an assistant message with nothing but calls
    tool_name: bool = False  # R17: results carry the tool's name
    strict_turns: bool = False  # R16: no user message behind a result or behind another
    tool_images: bool = False  # R19: results may hold images
    schema_without: tuple[str, ...] = ()  # R21: words that a tool's schema must not use
    typed_schema: bool = False  # R22: each property needs a type
    ids: str = ""  # T31: a pattern that call ids have to match
    echoed: tuple[str, ...] = ECHOED  # R26: members of an assistant message that go back
    cache_key: bool = False  # R6: takes prompt_cache_key
    key_header: str = ""  # carries the key beside Authorization


# Gemini's endpoint knows the schema language of its own API (R21).
FEW_WORDS = ("$schema", "$ref", "$defs", "additionalProperties", "const", "exclusiveMinimum", "exclusiveMaximum", "propertyNames",
             "patternProperties", "oneOf", "allOf", "default", "title")
LOCAL = r"^(localhost|127\.|\[::1\]|0\.0\.0\.0|10\.|192\.168\.|172\.(1[6-9]|2\d|3[01])\.)"
NO_EXTREMES = {"minimal": "low", "xhigh": "high"}
SWITCH: dict[str, Any] = {"thinking": {"type": "enabled"}}

# (server, model, what differs). Patterns are searched in host:port and in the model's name, lower case; later rows win.
TABLE: tuple[tuple[str, str, dict[str, Any]], ...] = (
    # model families, whoever serves them
    ("", r"\b(o\d|gpt-5)", {"output_limit": "max_completion_tokens", "temperature": False}),
    ("", r"\bo\d|gpt-oss", {"efforts": NO_EXTREMES}),
    ("", r"\bgpt-5(?![.\d])", {"efforts": {"xhigh": "high"}}),
    ("", r"\bgpt-5\.1(?!-codex-max)", {"efforts": NO_EXTREMES}),
    ("", r"\bgpt-5\.[2-9]|codex-max", {"efforts": {"minimal": "low"}}),
    ("", r"claude", {"ids": r"[a-zA-Z0-9_-]{1,64}"}),
    ("", r"\b(mistral|ministral|codestral|devstral|magistral|pixtral)", {"ids": r"[a-zA-Z0-9]{9}", "strict_turns": True}),
    ("", r"deepseek-r1", {"echoed": ()}),
    ("", r"minimax", {"reasoning": {}, "echoed": (*ECHOED, THINK)}),
    # servers on this machine or network: thinking is a switch of the chat template
    (LOCAL, r"qwen3|glm-4|granite|hunyuan|nemotron", {"reasoning": {"chat_template_kwargs": {"enable_thinking": True}}}),
    (LOCAL, r"deepseek-v3", {"reasoning": {"chat_template_kwargs": {"thinking": True}}}),
    (r":11434$|ollama", "", {"reasoning": {"reasoning_effort": EFFORT}, "efforts": NO_EXTREMES, "empty_content": "empty"}),
    (r":1234$", "", {"reasoning": {"reasoning_effort": EFFORT}, "empty_content": "empty"}),
    # servers
    (r"^api\.openai\.com", "", {"output_limit": "max_completion_tokens", "cache_key": True, "ids": r".{1,40}", "echoed": ()}),
    (r"\.azure\.com", "", {"ids": r".{1,40}", "key_header": "api-key", "echoed": ()}),
    (r"\.azure\.com", r"mistral", {"stream_options": False, "ids": r"[a-zA-Z0-9]{9}"}),
    (r"openrouter\.ai", "", {"reasoning": {"reasoning": {"effort": EFFORT}}, "echoed": ("reasoning_details", "extra_content")}),
    (r"api\.deepseek\.com", "", {"reasoning": SWITCH}),
    (r"moonshot|api\.kimi", "", {"reasoning": SWITCH, "cache_key": True, "typed_schema": True}),
    (r"\bz\.ai|bigmodel", "", {"reasoning": SWITCH}),
    (r"volces\.com", "", {"reasoning": SWITCH}),
    (r"dashscope|siliconflow", "", {"reasoning": {"enable_thinking": True, "thinking_budget": BUDGET}}),
    (r"generativelanguage|aiplatform\.googleapis", "", {
        "efforts": {"xhigh": "high"}, "tool_name": True, "schema_without": FEW_WORDS, "parallel_tool_calls": False}),
    (r"api\.mistral\.ai", "", {
        "stream_options": False, "empty_content": "empty", "tool_name": True, "strict_turns": True, "ids": r"[a-zA-Z0-9]{9}",
        "echoed": (), "efforts": {"minimal": "high", "low": "high", "medium": "high", "xhigh": "high"}}),
    (r"api\.groq\.com", "", {"echoed": (), "efforts": NO_EXTREMES}),
    (r"api\.groq\.com", r"qwen", {"reasoning": {"reasoning_effort": "default"}}),
    (r"api\.cerebras\.ai", "", {"echoed": ("reasoning",), "efforts": NO_EXTREMES}),
    (r"api\.anthropic\.com", "", {
        "reasoning": {"thinking": {"type": "enabled", "budget_tokens": BUDGET}}, "least_budget": 1024, "echoed": ()}),
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
    """Overrides as the fields have them: what comes from JSON is of the right kind and a word that the field knows."""
    plain, checked = Profile(), {}
    for name, value in overrides.items():
        if name not in Profile.__annotations__:
            raise ValueError(f"{name!r} is no field of a profile; there are {', '.join(Profile.__annotations__)}")
        default: Any = getattr(plain, name)
        value = tuple(value) if isinstance(default, tuple) and isinstance(value, list) else value
        words = re.findall(r"'(\w+)'", str(Profile.__annotations__[name]).replace('"', "'"))
        if type(value) is not type(default) or (words and value not in words):
            raise ValueError(f"{name} cannot be {value!r}; it is {default!r} by default" + (f", or {', '.join(words)}" if words else ""))
        if isinstance(value, str):
            re.compile(value)  # ids is a pattern
        checked[name] = value
    return checked


# ---- the body --------------------------------------------------------------------------------------------

# What each server took no offence at is remembered for the process: (base URL, model) -> members that it refused.
REFUSED: dict[tuple[str, str], set[str]] = {}
NEEDED = {"model", "messages", "tools", "stream"}  # without these it is no request of ours
LIMITS = ("max_tokens", "max_completion_tokens")


def body(model: str, request: Request, profile: Profile, refused: set[str], *, extra: Mapping[str, Any],
         budgets: Mapping[str, int]) -> dict[str, Any]:
    """The JSON that is sent: nothing in it that is not needed (R3, R6-R8), exactly one system message, first (R5).

    What the table says gives way to `extra`, and that to the request's own options.
    """
    system: list[Message] = [{"role": profile.system_role, "content": mend(request.system)}] if request.system else []
    made: dict[str, Any] = {"model": model, "messages": system + shaped(request.messages, profile, refused), "stream": True}
    if profile.stream_options:
        made["stream_options"] = {"include_usage": True}
    if request.tools:
        made["tools"] = tool_schemas(request.tools, profile)  # R11: no tools, no member
    if profile.cache_key and request.session_id:
        made["prompt_cache_key"] = request.session_id[:64]
    made |= thinking(profile, request.reasoning, budgets)
    made |= extra
    made |= _options(request, profile, refused)
    return {name: value for name, value in made.items() if name in NEEDED or name not in refused}


def thinking(profile: Profile, level: Reasoning, budgets: Mapping[str, int] = BUDGETS) -> dict[str, Any]:
    """The members that ask for this much thought; none where it is off or the model cannot be asked (R10)."""
    if level == "off":
        return {}
    words = {EFFORT: profile.efforts.get(level, level), BUDGET: max(profile.least_budget, budgets.get(level, BUDGETS[level]))}
    filled: dict[str, Any] = _filled(dict(profile.reasoning), words)
    return filled


def _filled(value: Any, words: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        return {name: _filled(item, words) for name, item in value.items()}
    return words.get(value, value) if isinstance(value, str) else value


def _options(request: Request, profile: Profile, refused: set[str]) -> dict[str, Any]:
    """The request's options, without those that the model does not take, the output limit under the name it has here."""
    options = dict(request.options)
    if not profile.temperature or request.reasoning != "off":
        options.pop("temperature", None)
    if not profile.parallel_tool_calls:
        options.pop("parallel_tool_calls", None)
    limit = [options.pop(name) for name in LIMITS if name in options]
    name = next((name for name in sorted(LIMITS, key=lambda each: each != profile.output_limit) if name not in refused), None)
    if limit and name:
        options[name] = limit[0]
    return options


# ---- believing a server ----------------------------------------------------------------------------------

UNKNOWN = r"unsupported|not supported|unknown|unrecognized|unexpected|not permitted|not allowed|forbidden|extra"


def dispensable(error: ModelError, sent: Mapping[str, Any], profile: Profile) -> str | None:
    """The member that a refused request can do without: one that we sent and the server names (R1, R2, R6, R9, R10, R26)."""
    if error.kind != "bad_request":
        return None
    words = f"{error.param} {error.message}"
    for name in sorted(sent.keys() - NEEDED, key=len, reverse=True):
        inner = [key for key in sent[name] if "_" in key] if isinstance(sent[name], dict) else []
        if any(_names(words, each) for each in (name, *inner)):
            return name
    if not re.search(UNKNOWN, words, re.I):
        return None
    asked = next((name for name in profile.reasoning if name in sent), None)
    if asked and re.search(r"does not support (thinking|reasoning)", words, re.I):  # Ollama
        return asked
    echoed = {name for message in sent["messages"] if message["role"] == "assistant" for name in message}
    return next((name for name in echoed - {"role", "content", "tool_calls"} if _names(words, name)), None)


def _names(words: str, name: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", words) is not None
