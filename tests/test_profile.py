"""The request side of the model call: what each server and family is sent, what is left out, and what a server is believed."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from itertools import count, pairwise
from typing import Any

import pytest

from coder.ai import ChatModel
from coder.devtools.scripted import Body, Reply, ScriptedServer
from coder.events import Event, Notice
from coder.history import convert_to_llm
from coder.hooks import Hooks
from coder.loop import run_loop
from coder.providers.address import host_of
from coder.providers.profiles import TABLE, Profile
from coder.providers.request import BUDGETS, encoded
from coder.tools.bash import bash
from coder.tools.edit import edit
from coder.tools.files import ls, read, write
from coder.tools.patch import apply_patch
from coder.tools.search import glob, grep
from coder.toolset import Tool, Toolset, tool
from coder.types import Message, ModelError, Request, RunResult
from tests import harness
from tests.harness import FAST, ask, assert_all_valid, assert_valid, drive, types

ANY, OPENAI, MISTRAL = (
    "https://api.example.com/v1",
    "https://api.openai.com/v1",
    "https://api.mistral.ai/v1",
)
GEMINI = "https://generativelanguage.googleapis.com/v1beta/openai"
LEVELS = ("minimal", "low", "medium", "high", "xhigh")


NUMBERS = count()


def serve(*replies: Reply | Callable[[Body], Reply]) -> ScriptedServer:
    """A server with an address of its own: a later one may get its port, and what it refused is remembered by address."""
    server = harness.serve(*replies)
    server.url = f"http://127.0.0.1:{server.port}/{next(NUMBERS)}/v1"
    return server


def call(call_id: str, name: str = "look", **more: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}} | more


def calling(*calls: dict[str, Any], **more: Any) -> Message:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)} | more


def result(call_id: str, content: Any = "ok") -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def said(content: Any, role: str = "user", **more: Any) -> Message:
    return {"role": role, "content": content} | more


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def picture(name: str = "A") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{name}"}}


def offered(parameters: dict[str, Any], name: str = "look") -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "description": "d", "parameters": parameters},
    }


def sent(
    messages: list[Message], base_url: str = ANY, name: str = "m", **profile: Any
) -> list[Message]:
    """The messages as they would go out."""
    body: Body = ChatModel(name, base_url=base_url, api_key="k", profile=profile).body(
        Request(messages)
    )
    return list(body["messages"])


class Options(Hooks):
    """Members of the body that a program sets."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def before_llm_call(self, request: Request) -> None:
        request.options |= self.options


def talk(
    server: ScriptedServer,
    messages: list[Message] | None = None,
    name: str = "m",
    tools: Any = (),
    prompt: str = "go",
    **model: Any,
) -> tuple[list[Event], RunResult]:
    """One run with a model of that name."""
    chat = ChatModel(name, base_url=server.url, **model)
    return drive(
        run_loop([] if messages is None else messages, chat, tools, prompts=prompt, retry=FAST)
    )


# ---- what is sent to whom ----------------------------------------------------------------------------------

IDS = {
    "dotted": "functions.look:0",
    "underscored": "call_" + "a" * 20,
    "sixty": "x" * 60,
    "seventy": "y" * 70,
    "nine": "abc123DEF",
}
MEMBERS = (
    "reasoning_content",
    "reasoning",
    "reasoning_text",
    "reasoning_details",
    "extra_content",
    "reasoning_opaque",
)
WORDS = (
    "$schema",
    "$ref",
    "$defs",
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
PARAMETERS = {
    "$schema": "s",
    "title": "T",
    "type": "object",
    "additionalProperties": False,
    "propertyNames": {"pattern": "a"},
    "patternProperties": {"^x": {"type": "string"}},
    "$defs": {"Kind": {"type": "string"}},
    "properties": {
        "kind": {"$ref": "#/$defs/Kind"},
        "same": {"const": "a"},
        "free": {"description": "anything"},
        "size": {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 9, "default": 2},
        "either": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        "both": {"allOf": [{"type": "string"}]},
    },
}


def conversation() -> list[Message]:
    """A history with one of everything that a server may mind."""
    return [
        said("go"),
        said("I look.", "assistant", think_tag="hm", **dict.fromkeys(MEMBERS, "t")),
        calling(*(call(each) for each in IDS.values())),
        result(IDS["dotted"], [words("seen"), picture()]),
        *(result(each) for each in list(IDS.values())[1:]),
        said("and"),
        said("more"),
    ]


def words_in(schema: Any) -> set[str]:
    """The words of the schema language in a schema and those within it; names of properties are none."""
    if isinstance(schema, list):
        return set().union(*map(words_in, schema))
    if not isinstance(schema, dict):
        return set()
    inner = [
        words_in(list(value.values()) if key in ("properties", "$defs") else value)
        for key, value in schema.items()
    ]
    return set(schema).union(*inner)


def facts(base_url: str, name: str, **profile: Any) -> dict[str, Any]:
    """What is sent to a server and a model, by what is to be seen in the request."""
    model = ChatModel(name, base_url=base_url, api_key="k", profile=profile)

    def body(level: Any = "off", **options: Any) -> Body:
        return model.body(
            Request(
                conversation(),
                [offered(PARAMETERS)],
                "Be kind.",
                options=options,
                reasoning=level,
                session_id="s",
            )
        )

    with_options, plain = body(temperature=0.5, max_tokens=9, parallel_tool_calls=False), body()
    assistant, calls = [message for message in plain["messages"] if message["role"] == "assistant"][
        :2
    ]
    results = [message for message in plain["messages"] if message["role"] == "tool"]
    schema = plain["tools"][0]["function"]["parameters"]
    return {
        "members": plain.keys() - {"model", "messages", "tools", "stream"},
        "options": with_options.keys() - plain.keys(),
        "thinking": {
            level: {key: value for key, value in body(level).items() if key not in plain}
            for level in LEVELS
        },
        "roles": "".join(message["role"][0] for message in plain["messages"]),
        "content": calls.get("content", "absent"),
        "named": [message.get("name") for message in results] == ["look"] * 5,
        "pictures": isinstance(results[0]["content"], list),
        "ids": {
            label
            for label, each in IDS.items()
            if each in [made["id"] for made in calls["tool_calls"]]
        },
        "echoed": assistant.keys() - {"role", "content"},
        "text": assistant["content"],
        "words": words_in(schema) & {*WORDS},
        "typed": "type" in schema["properties"]["free"],
        "key_header": model.profile.key_header,
    }


def effort(**levels: str) -> dict[str, Any]:
    return {"thinking": {level: {"reasoning_effort": levels.get(level, level)} for level in LEVELS}}


def always(**members: Any) -> dict[str, Any]:
    return {"thinking": dict.fromkeys(LEVELS, members)}


PLAIN = {
    "members": {"stream_options"},
    "options": {"temperature", "max_tokens", "parallel_tool_calls"},
    **effort(),
    "roles": "suaatttttuuu",
    "content": None,
    "named": False,
    "pictures": False,
    "ids": {*IDS},
    "echoed": {"reasoning_content", "reasoning_details", "extra_content", "reasoning_opaque"},
    "text": "I look.",
    "words": {*WORDS},
    "typed": False,
    "key_header": "",
}
THINKER = {"options": {"max_completion_tokens", "parallel_tool_calls"}}
TAME = effort(minimal="low", xhigh="high")
NINE: dict[str, Any] = {"ids": {"nine"}, "roles": "suaatttttau"}
FORTY = {"ids": {"dotted", "underscored", "nine"}}
NO_ECHO: dict[str, Any] = {"echoed": set()}
SWITCHED = always(thinking={"type": "enabled"})
OF_OPENAI: dict[str, Any] = {"members": {"stream_options", "prompt_cache_key"}, **FORTY, **NO_ECHO}
TEMPLATE = always(chat_template_kwargs={"enable_thinking": True})
KIMI = {**SWITCHED, "members": {"stream_options", "prompt_cache_key"}, "typed": True}
BUDGET: dict[str, Any] = {
    "thinking": {
        level: {"enable_thinking": True, "thinking_budget": tokens}
        for level, tokens in (
            ("minimal", 128),
            ("low", 512),
            ("medium", 1024),
            ("high", 2048),
            ("xhigh", 2048),
        )
    }
}
GOOGLE = {
    **effort(xhigh="high"),
    "named": True,
    "words": set(),
    "options": {"temperature", "max_tokens"},
}
OF_MISTRAL = {
    **NINE,
    **NO_ECHO,
    **effort(minimal="high", low="high", medium="high", xhigh="high"),
    "members": set(),
    "content": "",
    "named": True,
}
ANTHROPIC: dict[str, Any] = {
    **NO_ECHO,
    "thinking": {
        level: {"thinking": {"type": "enabled", "budget_tokens": max(1024, tokens)}}
        for level, tokens in BUDGETS.items()
    },
}
OLLAMA = {**TAME, "content": ""}

# (base URL, model, how the request differs from the plain form)
CASES: list[tuple[str, str, dict[str, Any]]] = [
    (ANY, "some-model", {}),
    # families
    *(
        (ANY, name, THINKER | TAME)
        for name in ("o1", "o3-mini", "openai/o4-mini", "O3", "gpt-5.1", "gpt-5.1-codex")
    ),
    *(
        (ANY, name, THINKER | effort(xhigh="high"))
        for name in ("gpt-5", "openai/GPT-5-mini", "gpt-5-codex")
    ),
    *(
        (ANY, name, THINKER | effort(minimal="low"))
        for name in ("gpt-5.1-codex-max", "gpt-5.2", "gpt-5.9-codex")
    ),
    (ANY, "codex-max", effort(minimal="low")),
    (ANY, "gpt-oss-120b", TAME),
    (ANY, "anthropic/claude-sonnet-4", {"ids": {"underscored", "sixty", "nine"}}),
    *(
        (ANY, name, NINE)
        for name in (
            "mistral-large-latest",
            "ministral-8b",
            "codestral",
            "devstral-small",
            "magistral",
            "pixtral-12b",
            "mistralai/Mistral-Nemo",
        )
    ),
    (ANY, "deepseek-ai/DeepSeek-R1", NO_ECHO),
    (ANY, "MiniMax-M2", {**always(), "text": "<think>hm</think>\n\nI look."}),
    # servers on this machine or network
    *(
        (f"http://{host}:8000/v1", "Qwen/Qwen3-8B", TEMPLATE)
        for host in (
            "localhost",
            "127.0.0.1",
            "[::1]",
            "0.0.0.0",
            "10.1.2.3",
            "192.168.1.5",
            "172.16.0.1",
            "172.20.0.1",
            "172.31.255.1",
        )
    ),
    *(
        ("http://localhost:8000/v1", name, TEMPLATE)
        for name in ("glm-4.6", "granite-3.3", "hunyuan-a13b", "nemotron-nano")
    ),
    ("http://localhost:8000/v1", "deepseek-v3.1", always(chat_template_kwargs={"thinking": True})),
    ("http://localhost:11434/v1", "llama3", OLLAMA),
    ("http://localhost:11434/v1", "qwen3:8b", OLLAMA),
    ("https://ollama.com/v1", "glm-4.6", OLLAMA),
    ("http://192.168.0.2:1234/v1", "qwen3-8b", {"content": ""}),
    # servers
    (
        OPENAI,
        "gpt-4o",
        {**OF_OPENAI, "options": {"temperature", "max_completion_tokens", "parallel_tool_calls"}},
    ),
    ("https://API.openai.com:443/v1", "gpt-5", {**OF_OPENAI, **THINKER, **effort(xhigh="high")}),
    (
        "https://r.openai.azure.com/openai/v1",
        "gpt-4o",
        {**FORTY, **NO_ECHO, "key_header": "api-key"},
    ),
    (
        "https://r.services.ai.azure.com/openai/v1",
        "Mistral-Large",
        {**NINE, **NO_ECHO, "members": set(), "key_header": "api-key"},
    ),
    (
        "https://openrouter.ai/api/v1",
        "x/y",
        {
            "thinking": {level: {"reasoning": {"effort": level}} for level in LEVELS},
            "echoed": {"reasoning_details", "extra_content"},
        },
    ),
    (
        "https://openrouter.ai/api/v1",
        "minimax/minimax-m2",
        {
            "echoed": {"reasoning_details", "extra_content"},
            "thinking": {level: {"reasoning": {"effort": level}} for level in LEVELS},
        },
    ),
    ("https://api.deepseek.com/v1", "deepseek-chat", SWITCHED),
    ("https://api.moonshot.ai/v1", "kimi-k2", KIMI),
    ("https://api.kimi.com/coding/v1", "kimi-for-coding", KIMI),
    ("https://api.z.ai/api/paas/v4", "glm-4.6", SWITCHED),
    ("https://open.bigmodel.cn/api/paas/v4", "glm-4.6", SWITCHED),
    ("https://ark.cn-beijing.volces.com/api/v3", "doubao", SWITCHED),
    ("https://dashscope.aliyuncs.com/compatible-mode/v1", "qwen3-max", BUDGET),
    ("https://api.siliconflow.cn/v1", "qwen", BUDGET),
    (GEMINI, "gemini-3-pro", GOOGLE),
    ("https://europe-aiplatform.googleapis.com/v1", "google/gemini", GOOGLE),
    (MISTRAL, "open-mixtral", OF_MISTRAL),
    ("https://api.groq.com/openai/v1", "llama-3.3", {**NO_ECHO, **TAME}),
    (
        "https://api.groq.com/openai/v1",
        "qwen/qwen3-32b",
        {**NO_ECHO, **always(reasoning_effort="default")},
    ),
    ("https://api.cerebras.ai/v1", "zai", {**TAME, "echoed": {"reasoning"}}),
    ("https://api.anthropic.com/v1", "opus", ANTHROPIC),
    ("https://api.x.ai/v1", "grok-4", TAME),
    *(
        (f"https://api.together.{end}/v1", "qwen", always(reasoning={"enabled": True}))
        for end in ("xyz", "ai")
    ),
    *((f"https://api.together.{end}/v1", "openai/gpt-oss-20b", TAME) for end in ("xyz", "ai")),
    ("https://adb-1.azuredatabricks.net/serving-endpoints", "llama", {"members": set()}),
]


@pytest.mark.parametrize(
    ("base_url", "name", "differences"),
    CASES,
    ids=[f"{host_of(url)} {name}" for url, name, _ in CASES],
)
def test_each_server_and_family_is_asked_in_its_own_way(
    base_url: str, name: str, differences: dict[str, Any]
) -> None:
    assert facts(base_url, name) == PLAIN | differences


def test_every_row_of_the_table_has_a_case() -> None:
    def of(server: str, family: str) -> bool:
        return any(
            re.search(server, host_of(url).lower()) and re.search(family, name.lower())
            for url, name, _ in CASES
        )

    assert [(server, family) for server, family, _ in TABLE if not of(server, family)] == []


@pytest.mark.parametrize(
    ("base_url", "name"),
    [
        *(
            (ANY, name)
            for name in (
                "solo1",
                "gpt-4o",
                "gpt-4.1",
                "chatgpt-4o-latest",
                "proto3",
                "xgpt-5",
                "gpt-osx",
                "claud",
                "xmistral",
                "mini-max",
                "deepseek-v3",
                "deepseek-chat",
                "qwen3-8b",
                "glm-4.6",
                "olmo-2",
            )
        ),
        (ANY, "foo-o3d"),
        (ANY, "marco-o1"),
        *(
            (f"http://{host}/v1", "qwen3-8b")
            for host in (
                "110.1.2.3",
                "172.15.0.1",
                "172.32.0.1",
                "8.8.8.8:10",
                "my-localhost.example",
            )
        ),
        *(
            (f"https://{host}/v1", "m")
            for host in (
                "xyz.ai",
                "api.max.ai",
                "apixxxai.example",
                "h:12345",
                "h:114345",
                "h:11234",
                "not-api-openai.com",
                "myapi.openai.com",
                "azure.com.example",
            )
        ),
    ],
)
def test_what_only_looks_like_a_family_is_asked_in_the_plain_form(base_url: str, name: str) -> None:
    assert facts(base_url, name) == PLAIN


def test_the_plain_form_has_nothing_that_is_not_needed() -> None:
    with serve(Reply("x")) as server:
        ask(server)
        ask(server, tools=Toolset([ls], session_id="s"), system="Be kind.")
    ours = {"role": "user", "content": "go"}
    assert server.requests[0] == {
        "model": "m",
        "messages": [ours],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert server.requests[1] == server.requests[0] | {
        "messages": [{"role": "system", "content": "Be kind."}, ours],
        "tools": [ls.schema],
    }


def test_an_address_of_the_environment_is_not_taken_for_openai(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serve(Reply("x")) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        drive(
            run_loop(
                [], ChatModel("m", api_key="k"), Toolset(session_id="s"), prompts="go", retry=FAST
            )
        )
    assert server.requests and "prompt_cache_key" not in server.requests[0]


# ---- every field, and what a person says of it -------------------------------------------------------------

OVERRIDES: list[
    tuple[str, str, dict[str, Any], dict[str, Any]]
] = [  # (base URL, model, profile, differences from the same without it)
    (
        ANY,
        "m",
        {"output_limit": "max_completion_tokens"},
        {"options": {"temperature", "max_completion_tokens", "parallel_tool_calls"}},
    ),
    (ANY, "o3", {"output_limit": "max_tokens"}, {"options": {"max_tokens", "parallel_tool_calls"}}),
    (ANY, "m", {"system_role": "developer"}, {"roles": "duaatttttuuu"}),
    (ANY, "m", {"system_role": "system"}, {}),
    (ANY, "m", {"stream_options": False}, {"members": set()}),
    (MISTRAL, "m", {"stream_options": True}, {"members": {"stream_options"}}),
    (ANY, "m", {"parallel_tool_calls": False}, {"options": {"temperature", "max_tokens"}}),
    (
        GEMINI,
        "m",
        {"parallel_tool_calls": True},
        {"options": {"temperature", "max_tokens", "parallel_tool_calls"}},
    ),
    (ANY, "m", {"temperature": False}, {"options": {"max_tokens", "parallel_tool_calls"}}),
    (
        ANY,
        "gpt-5",
        {"temperature": True},
        {"options": {"temperature", "max_completion_tokens", "parallel_tool_calls"}},
    ),
    (ANY, "m", {"reasoning": {}}, always()),
    (
        ANY,
        "m",
        {"reasoning": {"a": {"b": {"c": "$effort"}}, "tokens": "$budget", "on": True}},
        {
            "thinking": {
                level: {"a": {"b": {"c": level}}, "tokens": tokens, "on": True}
                for level, tokens in BUDGETS.items()
            }
        },
    ),
    (ANY, "m", {"efforts": {"low": "tiny", "high": "huge"}}, effort(low="tiny", high="huge")),
    ("https://api.x.ai/v1", "m", {"efforts": {}}, effort()),
    (
        "https://api.siliconflow.cn/v1",
        "m",
        {"least_budget": 600},
        {
            "thinking": {
                level: {"enable_thinking": True, "thinking_budget": max(600, tokens)}
                for level, tokens in BUDGETS.items()
            }
        },
    ),
    (ANY, "m", {"empty_content": "empty"}, {"content": ""}),
    (ANY, "m", {"empty_content": "absent"}, {"content": "absent"}),
    (MISTRAL, "m", {"empty_content": "null"}, {"content": None}),
    (ANY, "m", {"tool_name": True}, {"named": True}),
    (GEMINI, "m", {"tool_name": False}, {"named": False}),
    (ANY, "m", {"strict_turns": True}, {"roles": "suaatttttau"}),
    (MISTRAL, "m", {"strict_turns": False}, {"roles": "suaatttttuuu"}),
    (ANY, "m", {"tool_images": True}, {"pictures": True, "roles": "suaatttttuu"}),
    (ANY, "m", {"tool_images": False}, {}),
    (ANY, "m", {"schema_without": ["const", "title"]}, {"words": {*WORDS} - {"const", "title"}}),
    (GEMINI, "m", {"schema_without": ()}, {"words": {*WORDS}}),
    (ANY, "m", {"typed_schema": True}, {"typed": True}),
    ("https://api.moonshot.ai/v1", "m", {"typed_schema": False}, {"typed": False}),
    (ANY, "m", {"ids": "[a-z]+"}, {"ids": {"sixty", "seventy"}}),
    (MISTRAL, "m", {"ids": ""}, {"ids": {*IDS}}),
    (ANY, "m", {"echoed": []}, {"echoed": set()}),
    (
        MISTRAL,
        "m",
        {"echoed": ["reasoning", "think_tag"]},
        {"echoed": {"reasoning"}, "text": "<think>hm</think>\n\nI look."},
    ),
    (ANY, "m", {"cache_key": True}, {"members": {"stream_options", "prompt_cache_key"}}),
    (OPENAI, "m", {"cache_key": False}, {"members": {"stream_options"}}),
    (ANY, "m", {"key_header": "x-key"}, {"key_header": "x-key"}),
    ("https://r.openai.azure.com/v1", "m", {"key_header": ""}, {"key_header": ""}),
]


@pytest.mark.parametrize(
    ("base_url", "name", "profile", "differences"),
    OVERRIDES,
    ids=[f"{host_of(o[0])} {o[2]}" for o in OVERRIDES],
)
def test_a_person_can_override_each_field(
    base_url: str, name: str, profile: dict[str, Any], differences: dict[str, Any]
) -> None:
    assert facts(base_url, name, **profile) == facts(base_url, name) | differences


def test_every_field_is_overridden_both_ways() -> None:
    values: dict[str, list[Any]] = {name: [] for name in Profile.__annotations__}
    for _, _, profile, _ in OVERRIDES:
        for name, value in profile.items():
            values[name].append(value)
    once = {
        name for name, given in values.items() if len({json.dumps(value) for value in given}) < 2
    }
    assert once == {"least_budget", "reasoning_filled"}, (
        "which is a number, and has a test of its own"
    )


def test_an_override_is_what_goes_over_the_wire() -> None:
    profile = {
        "system_role": "developer",
        "stream_options": False,
        "cache_key": True,
        "key_header": "x-key",
        "reasoning": {"think": "$effort"},
    }
    with serve(Reply("x")) as server:
        chat = ChatModel("m", base_url=server.url, api_key="k1", profile=profile)
        tools = Toolset(session_id="s" * 80)
        drive(
            run_loop([], chat, tools, prompts="go", system="Be kind.", reasoning="low", retry=FAST)
        )
    assert server.requests == [
        {
            "model": "m",
            "messages": [
                {"role": "developer", "content": "Be kind."},
                {"role": "user", "content": "go"},
            ],
            "stream": True,
            "prompt_cache_key": "s" * 64,
            "think": "low",
        }
    ]
    assert server.heads[0]["x-key"] == "k1"


def test_a_cache_key_needs_a_session() -> None:
    assert "prompt_cache_key" not in ChatModel("m", base_url=OPENAI, api_key="k").body(
        Request([said("go")])
    )


@pytest.mark.parametrize(
    ("profile", "text"),
    [
        (
            {"outputlimit": "x"},
            r"'outputlimit' is no field of a profile; known: output_limit, .*key_header",
        ),
        (
            {"output_limit": "max"},
            r"output_limit cannot be 'max'; .* or max_tokens, max_completion_tokens",
        ),
        ({"system_role": "tool"}, r"system_role cannot be 'tool'; .* or system, developer"),
        ({"empty_content": None}, r"empty_content cannot be None; .*null, empty, absent"),
        ({"stream_options": "no"}, r"stream_options cannot be 'no'; it is True by default"),
        ({"strict_turns": 1}, r"strict_turns cannot be 1; it is False by default"),
        ({"least_budget": True}, r"least_budget cannot be True; it is 0 by default"),
        ({"least_budget": "9"}, r"least_budget cannot be '9'"),
        ({"reasoning": "high"}, r"reasoning cannot be 'high'"),
        ({"efforts": ["low"]}, r"efforts cannot be \['low'\]"),
        ({"echoed": "reasoning_content"}, r"echoed cannot be 'reasoning_content'"),
        ({"ids": 9}, r"ids cannot be 9"),
        ({"ids": "("}, "ids"),
        ({"echoed": [["a"]]}, "echoed"),
    ],
)
def test_an_override_that_is_none_is_said_at_once(profile: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ChatModel("m", base_url=ANY, profile=profile)


def test_what_a_program_sets_wins_over_extra_body_and_that_over_the_table() -> None:
    chat = ChatModel(
        "m",
        base_url=ANY,
        api_key="k",
        extra_body={
            "reasoning_effort": "extra",
            "stream_options": {"include_usage": False},
            "temperature": 1,
            "seed": 1,
        },
    )
    body = chat.body(Request([said("go")], options={"seed": 2, "top_p": 0.5}, reasoning="high"))
    assert body == {
        "model": "m",
        "messages": [said("go")],
        "stream": True,
        "stream_options": {"include_usage": False},
        "reasoning_effort": "extra",
        "temperature": 1,
        "seed": 2,
        "top_p": 0.5,
    }


# ---- how much to think -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "member"),
    [
        ("off", {}),
        ("minimal", {"reasoning_effort": "minimal"}),
        ("low", {"reasoning_effort": "low"}),
        ("medium", {"reasoning_effort": "medium"}),
        ("high", {"reasoning_effort": "high"}),
        ("xhigh", {"reasoning_effort": "xhigh"}),
    ],
)
def test_a_level_goes_out_with_every_request_and_off_is_nothing(
    level: Any, member: dict[str, Any]
) -> None:
    with serve(Reply(calls=[("ls", {})]), Reply("x")) as server:
        ask(server, reasoning=level, tools=[ls])
    for body in server.requests:
        assert {name: body[name] for name in body if "reason" in name or "think" in name} == member
    assert len(server.requests) == 2


def test_off_sends_nothing_to_any_server() -> None:
    for base_url, name, _ in CASES:
        body = ChatModel(name, base_url=base_url, api_key="k").body(
            Request([said("go")], session_id="s")
        )
        assert body.keys() <= {
            "model",
            "messages",
            "stream",
            "stream_options",
            "prompt_cache_key",
        }, (base_url, name)


def budget(level: Any, base_url: str = "https://api.siliconflow.cn/v1", **model: Any) -> Any:
    body = ChatModel("m", base_url=base_url, api_key="k", **model).body(
        Request([], reasoning=level)
    )
    return body.get("thinking_budget") or body["thinking"]["budget_tokens"]


def test_budgets_are_those_of_the_levels_unless_others_are_given() -> None:
    assert [budget(level) for level in LEVELS] == [128, 512, 1024, 2048, 2048]
    assert [budget(level, budgets={"low": 7, "xhigh": 9999}) for level in LEVELS] == [
        128,
        7,
        1024,
        2048,
        9999,
    ]


def test_a_budget_is_never_below_the_least_that_the_server_takes() -> None:
    anthropic = "https://api.anthropic.com/v1"
    assert [budget(level, anthropic) for level in LEVELS] == [1024, 1024, 1024, 2048, 2048]
    assert (
        budget("low", anthropic, budgets={"low": 3000}) == 3000
        and budget("low", anthropic, budgets={"low": 3}) == 1024
    )


def test_a_model_that_thinks_gets_no_temperature() -> None:
    with serve(Reply("x")) as server:
        ask(server, hooks=Options(temperature=0.3, top_p=0.9))
        ask(server, hooks=Options(temperature=0.3, top_p=0.9), reasoning="low")
        ask(server, hooks=Options(temperature=0.3), model={"profile": {"temperature": False}})
    assert [(body.get("temperature"), body.get("top_p")) for body in server.requests] == [
        (0.3, 0.9),
        (None, 0.9),
        (None, None),
    ]


@pytest.mark.parametrize(
    ("options", "profile", "limit"),
    [
        ({"max_tokens": 5}, {}, {"max_tokens": 5}),
        ({"max_completion_tokens": 5}, {}, {"max_tokens": 5}),
        ({"max_tokens": 5, "max_completion_tokens": 5}, {}, {"max_tokens": 5}),
        (
            {"max_tokens": 5},
            {"output_limit": "max_completion_tokens"},
            {"max_completion_tokens": 5},
        ),
        (
            {"max_completion_tokens": 5},
            {"output_limit": "max_completion_tokens"},
            {"max_completion_tokens": 5},
        ),
        ({}, {}, {}),
    ],
)
def test_the_output_limit_goes_out_once_and_under_its_name_here(
    options: Any, profile: Any, limit: Any
) -> None:
    with serve(Reply("x")) as server:
        ask(server, hooks=Options(**options), model={"profile": profile})
    assert {
        name: value for name, value in server.requests[0].items() if name.startswith("max_")
    } == limit


# ---- believing a server ------------------------------------------------------------------------------------


def answer(body: Any, status: int = 400) -> Reply:
    return Reply(
        status=status,
        headers={"content-type": "application/json"},
        chunks=[json.dumps(body).encode()],
    )


def refusal(message: str, param: str | None = None, status: int = 400, **more: Any) -> Reply:
    return answer(
        {"error": {"message": message, "type": "invalid_request_error", "param": param, **more}},
        status,
    )


def has(body: Body, member: str) -> bool:
    return member in body or any(
        member in message for message in body["messages"] if message["role"] == "assistant"
    )


OFTEN = (
    12  # more requests than any of these tests makes: a fault must not become a loop without end
)


def until_without(member: str, saying: Reply) -> Callable[[Body], Reply]:
    """A server that takes no request with this member."""
    left = iter(range(OFTEN))
    return lambda body: (
        saying if has(body, member) and next(left, None) is not None else Reply("fine")
    )


def refusing(*members: str) -> ScriptedServer:
    """A server that takes none of these members, and names one at a time."""
    left = iter(range(OFTEN))

    def script(body: Body) -> Reply:
        named = next((name for name in members if name in body), "")
        return (
            refusal(f"Unknown parameter: '{named}'", named)
            if named and next(left, None) is not None
            else Reply("fine")
        )

    return serve(script)


def always_no(saying: Reply) -> ScriptedServer:
    return serve(*[saying] * OFTEN, Reply("asked too often"))


THOUGHT = [
    said("a"),
    said("b", "assistant", reasoning_content="t", reasoning_details=[{"text": "t"}]),
]
FORBIDDEN = {
    "type": "extra_forbidden",
    "loc": ["body", "stream_options"],
    "msg": "Extra inputs are not permitted",
    "input": {},
}
USAGE: tuple[str, dict[str, Any], bool] = ("stream_options", {}, False)
SWITCH = {"profile": {"reasoning": {"thinking": {"type": "enabled"}}}}

# (what the server says, the member, how we are asked, is it something that the user asked for)
REFUSALS: dict[str, tuple[Reply, str, dict[str, Any], bool]] = {
    "Mistral": (
        answer(
            {
                "object": "error",
                "message": {"detail": [FORBIDDEN]},
                "type": "invalid_request_error",
            },
            422,
        ),
        *USAGE,
    ),
    "FastAPI": (answer({"detail": [FORBIDDEN]}, 422), *USAGE),
    "Databricks": (
        answer(
            {
                "error_code": "BAD_REQUEST",
                "message": 'BAD_REQUEST: json: unknown field "stream_options"',
            }
        ),
        *USAGE,
    ),
    "a part of it": (refusal("Unrecognized request argument supplied: include_usage"), *USAGE),
    "only the param": (refusal("This is not supported here.", "stream_options"), *USAGE),
    "plain text": (
        Reply(
            status=400,
            chunks=[b"unknown member stream_options"],
            headers={"content-type": "text/plain"},
        ),
        *USAGE,
    ),
    "inside a stream": (
        Reply(
            chunks=[
                b'data: {"error": {"code": 400, "message": "stream_options is not supported"}}\n\n'
            ]
        ),
        *USAGE,
    ),
    "Gemini": (
        answer(
            [
                {
                    "error": {
                        "code": 400,
                        "status": "INVALID_ARGUMENT",
                        "message": 'Invalid JSON payload received. Unknown name "prompt_cache_key": Cannot find field.',
                    }
                }
            ]
        ),
        "prompt_cache_key",
        {"model": {"profile": {"cache_key": True}}, "tools": Toolset(session_id="s")},
        False,
    ),
    "OpenAI temperature": (
        refusal(
            "Unsupported value: 'temperature' does not support 0.5 with this model. Only the default (1) value is "
            "supported.",
            "temperature",
            code="unsupported_value",
        ),
        "temperature",
        {"hooks": Options(temperature=0.5)},
        True,
    ),
    "OpenAI extra": (
        refusal("Unknown parameter: 'top_k'.", "top_k", code="unknown_parameter"),
        "top_k",
        {"model": {"extra_body": {"top_k": 3}}},
        True,
    ),
    "OpenAI effort": (
        refusal("Unrecognized request argument supplied: reasoning_effort"),
        "reasoning_effort",
        {"reasoning": "high"},
        True,
    ),
    "Groq effort": (
        refusal("`reasoning_effort` must be one of `none` or `default`"),
        "reasoning_effort",
        {"reasoning": "low"},
        True,
    ),
    "LiteLLM": (
        refusal(
            "litellm.UnsupportedParamsError: x does not support parameters: ['parallel_tool_calls'], for model=m. To drop "
            "these, set `litellm.drop_params=True`"
        ),
        "parallel_tool_calls",
        {"hooks": Options(parallel_tool_calls=False)},
        True,
    ),
    "a template": (
        refusal("unexpected keyword argument 'enable_thinking'"),
        "chat_template_kwargs",
        {
            "reasoning": "low",
            "model": {
                "profile": {"reasoning": {"chat_template_kwargs": {"enable_thinking": True}}}
            },
        },
        True,
    ),
    "a switch": (
        refusal("Unknown parameter: thinking.type", status=422),
        "thinking",
        {"reasoning": "low", "model": SWITCH},
        True,
    ),
    "Groq echo": (
        refusal(
            "'messages.1' : for 'role:assistant' the following must be satisfied[('messages.1' : property "
            "'reasoning_content' is unsupported)]"
        ),
        "reasoning_content",
        {"messages": THOUGHT},
        False,
    ),
    "Cerebras echo": (
        answer(
            {
                "message": "messages.1.assistant.reasoning_content: property 'messages.1.assistant.reasoning_content' is "
                "unsupported",
                "type": "invalid_request_error",
                "param": "validation_error",
                "code": "wrong_api_format",
            }
        ),
        "reasoning_content",
        {"messages": THOUGHT},
        False,
    ),
    "another echo": (
        refusal("Unsupported property: reasoning_details"),
        "reasoning_details",
        {"messages": THOUGHT},
        False,
    ),
    "Mistral echo": (
        answer(
            {
                "detail": [
                    FORBIDDEN | {"loc": ["body", "messages", 1, "assistant", "reasoning_details"]}
                ]
            },
            422,
        ),
        "reasoning_details",
        {"messages": THOUGHT},
        False,
    ),
}
DEAF = {
    "Ollama": (
        refusal('"llama3" does not support thinking'),
        "reasoning_effort",
        {"reasoning": "high"},
        True,
    ),
    "Ollama level": (
        refusal('think value "medium" is not supported for this model'),
        "reasoning_effort",
        {"reasoning": "medium"},
        True,
    ),
    "xAI": (
        answer(
            {
                "code": "Client specified an invalid argument",
                "error": "Model m does not support parameter reasoningEffort.",
            }
        ),
        "reasoning_effort",
        {"reasoning": "high"},
        True,
    ),
}


@pytest.mark.parametrize("case", [*REFUSALS, *((name) for name in DEAF)])
def test_a_member_that_the_server_names_is_left_out_and_the_answer_comes(case: str) -> None:
    saying, member, options, asked_for = (REFUSALS | DEAF)[case]

    def run(server: ScriptedServer) -> tuple[list[Event], RunResult]:
        return ask(server, **options | {"messages": copy.deepcopy(options.get("messages", []))})

    with serve(until_without(member, saying)) as server, serve(Reply("x")) as other:
        events, end = run(server)
        assert end.text == "fine" and len(server.requests) == 2
        first, second = server.requests
        assert has(first, member) and not has(second, member)
        without = [
            {name: value for name, value in message.items() if name != member}
            for message in first["messages"]
        ]
        assert second == {name: value for name, value in first.items() if name != member} | {
            "messages": without
        }
        assert "retry" not in types(events)
        notices = [event.text for event in events if isinstance(event, Notice)]
        assert len(notices) == asked_for and all(f"rejects {member!r}" in text for text in notices)
        again, end = run(server)
        assert end.text == "fine" and len(server.requests) == 3, (
            "a second model of that name knows it already"
        )
        assert len([event for event in again if isinstance(event, Notice)]) == asked_for, (
            "whose user is told as well"
        )
        run(other)
        assert has(other.requests[0], member), "and another server is another matter"


@pytest.mark.parametrize(
    "wording",
    [
        "Unsupported property: {}",
        "{} is not supported",
        'Unknown name "{}" at messages[1]',
        "unrecognized member: {}",
        "UNEXPECTED FIELD {}",
        "{} is not permitted",
        "property {} is not allowed",
        "messages.1.{}: forbidden",
        "extra field `{}`",
    ],
)
def test_a_member_of_an_old_answer_is_left_out_whatever_the_words(wording: str) -> None:
    with serve(
        until_without("reasoning_content", refusal(wording.format("reasoning_content")))
    ) as server:
        _, end = ask(server, messages=copy.deepcopy(THOUGHT))
    assert end.text == "fine" and len(server.requests) == 2


def test_what_was_refused_is_remembered_by_the_name_of_the_model() -> None:
    with serve(
        until_without("stream_options", refusal("stream_options is not supported"))
    ) as server:
        talk(server)
        talk(server, name="other")
    assert [has(body, "stream_options") for body in server.requests] == [True, False, True, False]


def test_a_refusal_is_no_failed_attempt_of_the_run() -> None:
    replies = [
        Reply(status=503, text="busy"),
        refusal("stream_options is not supported"),
        Reply(status=503, text="busy"),
        Reply("fine"),
    ]
    with serve(*replies) as server:
        events, end = ask(server)
    assert (
        end.text == "fine"
        and types(events).count("retry") == 2
        and [has(b, "stream_options") for b in server.requests] == [True, True, False, False]
    )


def test_an_output_limit_that_is_refused_goes_out_under_its_other_name() -> None:
    openai = refusal(
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
        "max_tokens",
        code="unsupported_parameter",
    )
    for options in ({"max_tokens": 7}, {"max_completion_tokens": 7}):
        with serve(until_without("max_tokens", openai)) as server:
            events, end = ask(server, hooks=Options(**options))
            assert end.text == "fine" and "retry" not in types(events)
            talk(server)
            ask(server, hooks=Options(**options))
        assert [body.get("max_tokens") for body in server.requests] == [7, None, None, None]
        assert [body.get("max_completion_tokens") for body in server.requests] == [None, 7, None, 7]


def test_nothing_is_said_of_a_limit_that_is_only_renamed() -> None:
    with serve(
        until_without("max_tokens", refusal("Unsupported parameter: 'max_tokens'", "max_tokens"))
    ) as server:
        events, _ = ask(server, hooks=Options(max_tokens=7))
    assert server.requests[1]["max_completion_tokens"] == 7 and "notice" not in types(events)


def test_an_output_limit_that_is_refused_under_both_names_is_left_out() -> None:
    with refusing("max_tokens", "max_completion_tokens") as server:
        events, end = ask(server, hooks=Options(max_tokens=7))
    assert end.text == "fine" and len(server.requests) == 3 and types(events).count("notice") == 1


def test_what_is_asked_for_is_left_out_one_by_one() -> None:
    with refusing("stream_options", "top_k", "seed", "reasoning_effort") as server:
        events, end = ask(
            server, hooks=Options(seed=1), model={"extra_body": {"top_k": 3}}, reasoning="high"
        )
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert end.text == "fine" and len(server.requests) == 5 and "retry" not in types(events)
    assert [re.findall(r"'(\w+)'", text) for text in notices] == [
        ["top_k"],
        ["seed"],
        ["reasoning_effort"],
    ]


BACK = "The reasoning_content in the thinking mode must be passed back to the API."
ALTERNATE = "Conversation roles must alternate user/assistant/user/assistant/..."


@pytest.mark.parametrize(
    ("saying", "options"),
    [
        (refusal("Unknown parameter: 'top_k'.", "top_k"), {}),
        (refusal("Unknown parameter: 'stream_option'."), {}),
        (refusal("Unknown parameter: 'my_stream_options'."), {}),
        (refusal("Unknown parameter: 'stream_options_of_old'."), {}),
        (refusal("messages.0.name is not supported"), {"messages": [said("a", name="Ann")]}),
        (refusal("Unsupported parameter: 'model'", "model"), {}),
        (refusal("Unknown parameter: 'messages'", "messages"), {}),
        (refusal("m does not support tools: tools is not supported", "tools"), {"tools": [ls]}),
        (refusal("'stream' is not supported", "stream"), {}),
        (refusal("Unknown member 'role' in messages.0"), {"messages": THOUGHT}),
        (refusal("Unsupported: content of the assistant"), {"messages": THOUGHT}),
        (
            refusal("tool_calls are not allowed here"),
            {"messages": [said("a"), calling(call("a")), result("a")]},
        ),
        (
            refusal("The reasoning of this model is not supported, nor is details of it"),
            {"messages": THOUGHT},
        ),
        (refusal(BACK), {"messages": THOUGHT}),
        (refusal(BACK), {"messages": THOUGHT, "reasoning": "high"}),
        (refusal('"m" does not support thinking'), {}),
        (
            refusal("Invalid type for 'messages[0].content', which is not supported: enabled"),
            {"reasoning": "high", "model": SWITCH},
        ),
        (refusal("Invalid value"), {"reasoning": "high", "hooks": Options(temperature=1)}),
        (refusal(""), {"reasoning": "high"}),
        (answer({"detail": "stream_options"}, 401), {}),
        (
            answer(
                {
                    "error": {
                        "message": "stream_options is not supported",
                        "code": "invalid_api_key",
                    }
                },
                400,
            ),
            {},
        ),
        (refusal(BACK), {"messages": THOUGHT, "reasoning": "high", "model": SWITCH}),
        (refusal(ALTERNATE), {"model": {"extra_body": {"user": "me"}}}),
    ],
    ids=lambda value: (
        json.dumps(value, default=str)[:70]
        if isinstance(value, dict)
        else b"".join(value.chunks or ()).decode()[:70]
    ),
)
def test_an_error_that_names_no_member_of_ours_is_an_error_at_once(
    saying: Reply, options: dict[str, Any]
) -> None:
    with always_no(saying) as server:
        events, end = ask(
            server, **options | {"messages": copy.deepcopy(options.get("messages", []))}
        )
    assert end.error and end.stop_reason == "error" and len(server.requests) == 1
    assert not {"retry", "notice"} & {*types(events)}


def test_options_with_keys_that_are_numbers_break_nothing_when_the_server_says_no() -> None:
    with always_no(refusal("Something else is wrong")) as server:
        _, end = ask(server, hooks=Options(logit_bias={50256: -100}))
    assert (
        end.error
        and len(server.requests) == 1
        and server.requests[0]["logit_bias"] == {"50256": -100}
    )


def test_a_server_that_refuses_everything_comes_to_an_end() -> None:
    everything = "not supported: model messages tools stream stream_options reasoning_effort top_k role content reasoning_content seed"
    with always_no(refusal(everything)) as server:
        _, end = ask(
            server,
            tools=[ls],
            messages=copy.deepcopy(THOUGHT),
            model={"extra_body": {"top_k": 3}},
            hooks=Options(seed=1),
            reasoning="high",
        )
        assert end.error and end.error.kind == "bad_request" and len(server.requests) == 6
        last = server.requests[-1]
        assert last.keys() == {"model", "messages", "tools", "stream"}
        assert last["messages"][1].keys() == {"role", "content", "reasoning_details"}


def test_an_answer_that_began_is_not_asked_for_again_without_a_member() -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": "half"}}]}
    error = {"error": {"code": 400, "message": "stream_options is not supported"}}
    with always_no(
        Reply(chunks=[b"data: %s\n\n" % json.dumps(each).encode() for each in (chunk, error)])
    ) as server:
        _, end = ask(server)
    assert end.error and len(server.requests) == 1


def test_a_member_of_a_call_that_the_server_names_is_left_out() -> None:
    history = [said("a"), calling(call("a", extra_content={"google": {}})), result("a")]

    saying = refusal("messages.1.tool_calls.0.extra_content: Extra inputs are not permitted")
    with serve(
        lambda body: (
            saying
            if "extra_content" in json.dumps(body) and len(server.requests) < OFTEN
            else Reply("fine")
        )
    ) as server:
        _, end = ask(server, messages=history)
    assert end.text == "fine" and len(server.requests) == 2


# ---- messages ----------------------------------------------------------------------------------------------


def test_content_of_a_message_with_nothing_but_calls_is_null_empty_or_absent() -> None:
    history = [
        said("go"),
        calling(call("a")),
        result("a"),
        calling(call("b"), content="I look."),
        result("b"),
    ]
    for form, content in (("null", None), ("empty", ""), ("absent", "absent")):
        assert [m.get("content", "absent") for m in sent(history, empty_content=form)] == [
            "go",
            content,
            "ok",
            "I look.",
            "ok",
        ]


def test_empty_content_of_a_message_with_calls_is_null_where_null_is_the_form() -> None:
    assert sent([calling(call("a"), content=""), result("a")])[0]["content"] is None


def test_a_list_of_calls_that_is_null_is_none() -> None:
    history = [said("go"), said("Hello.", "assistant", tool_calls=None), said("more")]
    for profile in ({}, {"strict_turns": True}, {"empty_content": "empty"}, {"tool_name": True}):
        assert [m["content"] for m in sent(history, **profile)] == ["go", "Hello.", "more"]
    with serve(Reply("fine")) as server:
        _, end = ask(server, messages=history)
    assert end.text == "fine"


def test_a_result_carries_the_name_of_its_own_tool() -> None:
    history = [
        calling(call("a", "ls"), call("b", "grep")),
        result("a"),
        result("b"),
        calling(call("c", "glob")),
        result("c"),
    ]
    assert [m["name"] for m in sent(history, tool_name=True) if m["role"] == "tool"] == [
        "ls",
        "grep",
        "glob",
    ]
    named = sent(history, tool_name=True, ids="[a-z]{9}")
    assert [m["name"] for m in named if m["role"] == "tool"] == ["ls", "grep", "glob"], (
        "also where its id is another now"
    )
    assert not any("name" in m for m in sent(history))
    assert not any("name" in m for m in sent([result("z")], tool_name=True))


def test_strict_turns_put_an_answer_between_a_result_and_the_user() -> None:
    history = [
        said("go"),
        calling(call("a")),
        result("a"),
        said("stop"),
        said("now"),
        calling(call("b")),
        result("b"),
        said("Fine.", "assistant"),
        said("next"),
    ]
    strict = sent(history, strict_turns=True)
    assert [(m["role"], m.get("content")) for m in strict] == [
        ("user", "go"),
        ("assistant", None),
        ("tool", "ok"),
        ("assistant", "Understood."),
        ("user", "stop\n\nnow"),
        ("assistant", None),
        ("tool", "ok"),
        ("assistant", "Fine."),
        ("user", "next"),
    ]
    assert sent(history) == history


@pytest.mark.parametrize(
    ("contents", "joined"),
    [
        (["a", "b", "c"], "a\n\nb\n\nc"),
        (["a", [picture()]], [words("a"), picture()]),
        ([[picture()], "b"], [picture(), words("b")]),
        (
            [[words("a"), picture()], [words("b")], "c"],
            [words("a"), picture(), words("b"), words("c")],
        ),
    ],
)
def test_user_messages_in_a_row_are_one_in_strict_turns(contents: list[Any], joined: Any) -> None:
    history = [said(content) for content in contents]
    before = copy.deepcopy(history)
    assert sent(history, strict_turns=True) == [said(joined)] and history == before
    assert sent(history) == history


@tool
def look(name: str) -> list[dict[str, Any]]:
    """Look.

    name: at what
    """
    return [words(f"seen {name}"), picture(name)]


@tool
def say(text: str) -> str:
    """Say.

    text: what
    """
    return text


def test_pictures_of_a_turn_follow_all_its_results_in_one_message() -> None:
    calls = [("look", {"name": "A"}), ("say", {"text": "hello"}), ("look", {"name": "B"})]
    with serve(Reply(calls=calls), Reply("fine")) as server:
        ask(server, tools=[look, say])
        assert_all_valid(server)
    assert server.requests[1]["messages"][2:] == [
        {"role": "tool", "tool_call_id": made["id"], "content": text}
        for made, text in zip(
            server.requests[1]["messages"][1]["tool_calls"],
            ["seen A", "hello", "seen B"],
            strict=True,
        )
    ] + [said([words("Images from the tool results above:"), picture("A"), picture("B")])]


def test_pictures_stay_in_the_result_where_a_server_takes_them_there() -> None:
    with serve(Reply(calls=[("look", {"name": "A"})]), Reply("fine")) as server:
        ask(server, tools=[look], model={"profile": {"tool_images": True}})
    assert [m["role"] for m in server.requests[1]["messages"]] == ["user", "assistant", "tool"]
    assert server.requests[1]["messages"][2]["content"] == [words("seen A"), picture("A")]


def test_each_turn_has_its_own_pictures_and_a_user_message_comes_behind_them() -> None:
    history = [
        calling(call("a")),
        result("a", [picture("A")]),
        calling(call("b")),
        result("b", [words("x"), picture("B"), words("y")]),
        said("and?"),
    ]
    shaped = sent(history)
    assert [m["role"] for m in shaped] == [
        "assistant",
        "tool",
        "user",
        "assistant",
        "tool",
        "user",
        "user",
    ]
    assert [m["content"] for m in shaped if m["role"] == "tool"] == [
        "(see the image below)",
        "x\ny",
    ]
    assert [m["content"][1:] for m in shaped if isinstance(m["content"], list)] == [
        [picture("A")],
        [picture("B")],
    ]
    strict = sent(history, strict_turns=True)
    assert [m["role"] for m in strict] == [
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
    assert strict[-1]["content"] == [
        words("Images from the tool results above:"),
        picture("B"),
        words("and?"),
    ]


def test_a_result_of_text_parts_is_plain_text_and_has_no_message_beside_it() -> None:
    shaped = sent([calling(call("a")), result("a", [words("x"), words("y")])])
    assert shaped[1:] == [result("a", "x\ny")]


def ids_of(messages: Sequence[Message]) -> list[str]:
    return [each["id"] for m in messages for each in m.get("tool_calls", ())] + [
        m["tool_call_id"] for m in messages if "tool_call_id" in m
    ]


def test_ids_that_do_not_fit_are_made_to_fit_alike_in_call_and_result() -> None:
    history = [
        calling(*(call(each) for each in IDS.values())),
        *(result(each) for each in IDS.values()),
    ]
    for pattern in (r"[a-zA-Z0-9]{9}", r"[a-zA-Z0-9_-]{1,64}", r".{1,40}"):
        made = ids_of(sent(history, ids=pattern))
        assert (
            made[:5] == made[5:]
            and len({*made}) == 5
            and all(re.fullmatch(pattern, each) for each in made)
        )
        assert [new for new, old in zip(made, IDS.values()) if re.fullmatch(pattern, old)] == [
            old for old in IDS.values() if re.fullmatch(pattern, old)
        ]
        assert ids_of(sent(history, ids=pattern)) == made, "the same each time"
    assert ids_of(sent(history)) == [*IDS.values()] * 2, "an id is opaque (T22)"


def test_an_id_becomes_the_same_in_every_process() -> None:
    assert (
        ids_of(sent([calling(call("functions.look:0")), result("functions.look:0")], MISTRAL))
        == ["ec0002042"] * 2
    )


def test_an_id_that_no_encoder_takes_is_made_to_fit_too() -> None:
    made = ids_of(sent([calling(call("a\ud800")), result("a\ud800")], MISTRAL))
    assert made[0] == made[1] and re.fullmatch(r"[a-zA-Z0-9]{9}", made[0])


def test_thoughts_between_tags_go_back_between_tags() -> None:
    first = Reply("<think>hm</think>\n\nI look.", calls=[("say", {"text": "x"})])
    with serve(first, Reply("<think>so</think>fine"), Reply("end")) as server:
        messages: list[Message] = []
        profile = {"echoed": ["think_tag"]}
        ask(server, tools=[say], messages=messages, model={"profile": profile})
        ask(server, tools=[say], messages=messages, model={"profile": profile})
        ask(server, tools=[say], messages=messages)
    assert [m["content"] for m in server.requests[2]["messages"] if m["role"] == "assistant"] == [
        "<think>hm</think>\n\nI look.",
        "<think>so</think>\n\nfine",
    ]
    assert [m["content"] for m in server.requests[3]["messages"] if m["role"] == "assistant"] == [
        "I look.",
        "fine",
        "end",
    ]
    assert not any(has(body, "think_tag") for body in server.requests)


def test_thoughts_before_a_bare_call_are_its_content() -> None:
    history = [calling(call("a"), think_tag="hm"), result("a")]
    for form in ("null", "empty", "absent"):
        assert sent(history, echoed=["think_tag"], empty_content=form)[0] == calling(
            call("a"), content="<think>hm</think>\n\n"
        )
    assert sent(history)[0] == calling(call("a"))


def test_what_stands_on_a_call_goes_back_only_where_it_is_wanted() -> None:
    history = [calling(call("a", extra_content={"google": {}}, strange=1)), result("a")]
    assert sent(history)[0]["tool_calls"] == [call("a", extra_content={"google": {}})]
    assert sent(history, echoed=[])[0]["tool_calls"] == [call("a")]
    assert sent(history, echoed=["strange"])[0]["tool_calls"] == [call("a", strange=1)]


def test_there_is_one_system_message_and_it_is_first() -> None:
    body = ChatModel("m", base_url=ANY, api_key="k").body(
        Request([said("Old.", "system"), said("go")], system="Be kind.")
    )
    assert [m["role"] for m in body["messages"]] == ["system", "user"]


EVERYTHING: dict[str, Any] = {
    "empty_content": "absent",
    "tool_name": True,
    "strict_turns": True,
    "schema_without": list(WORDS),
    "typed_schema": True,
    "ids": r"[a-zA-Z0-9]{9}",
    "echoed": ["reasoning", "think_tag"],
    "system_role": "developer",
    "cache_key": True,
}


def test_nothing_that_is_shaped_changes_in_memory() -> None:
    request = Request(
        conversation(),
        [offered(PARAMETERS)],
        "Be kind.",
        options={"max_tokens": 5, "temperature": 1},
        reasoning="low",
        session_id="s",
    )
    before, extra = copy.deepcopy(request), {"metadata": {"a": 1}}
    chat = ChatModel("m", base_url=ANY, api_key="k", profile=EVERYTHING, extra_body=extra)
    first = chat.body(request)
    assert chat.body(request) == first and request == before and extra == {"metadata": {"a": 1}}
    assert first["messages"] != before.messages


def streamed(*deltas: dict[str, Any], finish: str = "stop") -> Reply:
    """An answer of these deltas."""
    ends = [{"delta": delta, "finish_reason": None} for delta in deltas] + [
        {"delta": {}, "finish_reason": finish}
    ]
    lines = [
        b"data: %s\n\n" % json.dumps({"choices": [{"index": 0} | each]}).encode() for each in ends
    ]
    return Reply(chunks=[*lines, b"data: [DONE]\n\n"])


def step(number: int) -> Reply:
    """Two calls at once, thoughts of each kind, a foreign id; in every other step some text."""
    return streamed(
        {
            "reasoning_content": f"think {number}",
            "reasoning_details": [{"type": "reasoning.text", "index": 0, "text": f"t{number}"}],
        },
        {"content": f"<think>aside {number}</think>" + ("On it." if number % 2 else "")},
        *(
            {
                "tool_calls": [
                    call(
                        f"functions.{name}:{number}",
                        index=index,
                        extra_content={"google": {"n": number}},
                        function={"name": name, "arguments": json.dumps(arguments)},
                    )
                ]
            }
            for index, (name, arguments) in enumerate(
                [("look", {"name": str(number)}), ("say", {"text": f"{number} of 4"})]
            )
        ),
        finish="tool_calls",
    )


@pytest.mark.parametrize(
    "profile",
    [
        {},
        {"empty_content": "empty"},
        {"empty_content": "absent"},
        {"tool_name": True},
        {"strict_turns": True},
        {"tool_images": True},
        {"ids": r"[a-zA-Z0-9]{9}"},
        {"echoed": []},
        {"echoed": ["think_tag", "extra_content"]},
        {"system_role": "developer"},
        EVERYTHING,
    ],
    ids=str,
)
def test_the_beginning_of_a_request_is_that_of_the_one_before(profile: dict[str, Any]) -> None:
    class Steer(Hooks):
        def get_steering_messages(self) -> list[Message]:
            return [said("Hurry.")] if len(server.requests) == 2 else []

    with serve(*(step(number) for number in range(1, 5)), Reply("done"), Reply("done")) as server:
        messages: list[Message] = []
        for prompt in ("go", "more"):
            ask(
                server,
                prompt,
                [look, say],
                messages,
                {"profile": profile},
                hooks=Steer(),
                system="Be kind.",
                reasoning="low",
            )
        assert_valid_turns(server)
    assert len(server.requests) == 6
    sequences = [[json.dumps(message) for message in body["messages"]] for body in server.requests]
    for earlier, later in pairwise(sequences):
        assert later[: len(earlier)] == earlier and len(later) > len(earlier)
    assert len({json.dumps(body["tools"]) for body in server.requests}) == 1


def assert_valid_turns(server: ScriptedServer) -> None:
    for body in server.requests:
        messages = [
            m | {"role": "system"} if m["role"] == "developer" else m for m in body["messages"]
        ]
        assert_valid(body | {"messages": messages})


# ---- schemas -----------------------------------------------------------------------------------------------


def schema_for(base_url: str, schema: dict[str, Any], **profile: Any) -> Any:
    """The schema of one property, as it would go out."""
    definitions = {"$defs": schema.pop("$defs")} if "$defs" in schema else {}
    parameters = {"type": "object", "properties": {"p": schema}} | definitions
    before = copy.deepcopy(parameters)
    body = ChatModel("m", base_url=base_url, api_key="k", profile=profile).body(
        Request([], [offered(parameters)])
    )
    assert parameters == before
    made = body["tools"][0]["function"]["parameters"]
    assert made["type"] == "object" and list(made["properties"]) == ["p"]
    return made["properties"]["p"]


@pytest.mark.parametrize("word", WORDS)
def test_a_word_that_a_server_refuses_is_nowhere_in_a_schema(word: str) -> None:
    inner = {
        "type": "string",
        word: [{"type": "string"}]
        if word in ("oneOf", "allOf")
        else {}
        if word == "$defs"
        else "#/x",
    }
    schema = {
        "type": "object",
        "properties": {"a": inner, "b": {"type": "array", "items": inner}, "c": {"anyOf": [inner]}},
    }
    assert word in words_in(schema_for(ANY, copy.deepcopy(schema)))
    assert word not in words_in(schema_for(GEMINI, schema))


@pytest.mark.parametrize("word", [*WORDS, "properties", "enum", "type"])
def test_a_property_may_be_called_like_such_a_word(word: str) -> None:
    inner = {
        "type": "object",
        "properties": {word: {"type": "string", "description": "d"}},
        "required": [word],
    }
    for base_url in (GEMINI, "https://api.moonshot.ai/v1", ANY):
        assert schema_for(base_url, copy.deepcopy(inner)) == inner


@pytest.mark.parametrize(
    ("schema", "made"),
    [
        ({"const": "a"}, {"enum": ["a"]}),
        (
            {"type": "string", "enum": [], "description": "d"},
            {"type": "string", "description": "d"},
        ),
        ({"type": "string", "enum": ["a"]}, {"type": "string", "enum": ["a"]}),
        (
            {"oneOf": [{"const": 1}, {"type": "string", "title": "T"}]},
            {"anyOf": [{"enum": [1]}, {"type": "string"}]},
        ),
        (
            {"description": "d", "allOf": [{"type": "string"}, {"minLength": 2}]},
            {"description": "d", "type": "string", "minLength": 2},
        ),
        (
            {"$ref": "#/$defs/A", "$defs": {"A": {"type": "string", "title": "T"}}},
            {"type": "string"},
        ),
        (
            {
                "$ref": "#/$defs/A",
                "description": "mine",
                "$defs": {"A": {"type": "string", "description": "its"}},
            },
            {"type": "string", "description": "mine"},
        ),
        (
            {
                "$ref": "#/$defs/A",
                "$defs": {
                    "A": {"type": "array", "items": {"$ref": "#/$defs/B"}},
                    "B": {"const": 1},
                },
            },
            {"type": "array", "items": {"enum": [1]}},
        ),
        (
            {
                "$ref": "#/$defs/Node",
                "$defs": {
                    "Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}
                },
            },
            {"type": "object", "properties": {"next": {"type": "object"}}},
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/A"}, "b": {"$ref": "#/$defs/A"}},
                "$defs": {"A": {"type": "string"}},
            },
            {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}},
        ),
        (
            {
                "$ref": "#/$defs/A",
                "$defs": {
                    "A": {"anyOf": [{"$ref": "#/$defs/B"}, {"type": "null"}]},
                    "B": {"items": {"$ref": "#/$defs/A"}},
                },
            },
            {"anyOf": [{"items": {"type": "object"}}, {"type": "null"}]},
        ),
        (
            {
                "$ref": "#/$defs/A",
                "$defs": {
                    "A": {"items": {"$ref": "#/$defs/B"}},
                    "B": {"items": {"$ref": "#/$defs/B"}},
                },
            },
            {"items": {"items": {"type": "object"}}},
        ),
        ({"$ref": "#/$defs/Gone", "description": "d"}, {"description": "d"}),
        ({"type": "object", "additionalProperties": True}, {"type": "object"}),
        (
            {
                "description": "d",
                "allOf": [{"$ref": "#/$defs/A"}],
                "$defs": {"A": {"type": "string", "enum": ["a"]}},
            },
            {"description": "d", "type": "string", "enum": ["a"]},
        ),
        ({"allOf": [{"const": "a"}]}, {"enum": ["a"]}),
        ({"$ref": "#"}, {"type": "object"}),
        (
            {"type": "object", "enum": [{"title": "x"}]},
            {"type": "object", "enum": [{"title": "x"}]},
        ),
    ],
)
def test_a_schema_means_the_same_in_fewer_words(
    schema: dict[str, Any], made: dict[str, Any]
) -> None:
    assert schema_for(GEMINI, schema) == made


def test_definitions_by_their_older_name_are_found() -> None:
    parameters = {
        "type": "object",
        "definitions": {"A": {"type": "string"}},
        "properties": {"a": {"$ref": "#/definitions/A"}},
    }
    body = ChatModel("m", base_url=GEMINI, api_key="k").body(Request([], [offered(parameters)]))
    assert body["tools"][0]["function"]["parameters"]["properties"] == {"a": {"type": "string"}}


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({}, "string"),
        ({"description": "d"}, "string"),
        ({"enum": ["a"]}, "string"),
        ({"enum": [1, 2]}, "integer"),
        ({"enum": [True]}, "boolean"),
        ({"enum": [1.5]}, "number"),
        ({"enum": [[1]]}, "array"),
        ({"enum": [None]}, "string"),
        ({"enum": []}, "string"),
        ({"properties": {}}, "object"),
        ({"items": {"type": "string"}}, "array"),
        ({"type": "number"}, "number"),
        ({"type": ["string", "null"]}, ["string", "null"]),
        ({"const": "a"}, "string"),
        ({"const": 3}, "integer"),
        ({"anyOf": [{"type": "string"}]}, None),
        ({"oneOf": []}, None),
        ({"allOf": [{"minLength": 1}]}, None),
        ({"$ref": "#/$defs/A"}, None),
    ],
)
def test_each_property_has_a_type_where_a_server_needs_it(
    schema: dict[str, Any], kind: Any
) -> None:
    inner = {"type": "object", "properties": {"in": copy.deepcopy(schema)}}
    typed = schema_for("https://api.moonshot.ai/v1", copy.deepcopy(schema))
    assert typed.get("type") == kind and {k: v for k, v in typed.items() if k != "type"} == {
        k: v for k, v in schema.items() if k != "type" and (k, v) != ("enum", [])
    }
    assert (
        schema_for("https://api.moonshot.ai/v1", inner)["properties"]["in"].get("type") == kind
    ), "also deeper down"
    assert schema_for(ANY, copy.deepcopy(schema)) == schema


def test_a_constant_gets_the_type_of_its_value() -> None:
    assert schema_for(ANY, {"const": 3}, typed_schema=True, schema_without=["const"]) == {
        "type": "integer",
        "enum": [3],
    }


def test_a_property_that_may_be_anything_breaks_nothing() -> None:
    parameters = {"type": "object", "properties": {"p": True}, "required": ["p"]}
    assert ChatModel("m", base_url=GEMINI, api_key="k").body(Request([], [offered(parameters)]))[
        "tools"
    ] == [offered(parameters)]


def test_a_tool_without_parameters_stays_one() -> None:
    bare = {"type": "function", "function": {"name": "now", "description": "d"}}
    assert ChatModel("m", base_url=ANY, api_key="k").body(Request([], [bare]))["tools"] == [bare]
    assert (
        ChatModel("m", base_url=GEMINI, api_key="k").body(Request([], [bare]))["tools"][0][
            "function"
        ]["name"]
        == "now"
    )


@pytest.mark.parametrize("base_url", [GEMINI, "https://api.moonshot.ai/v1", ANY])
def test_the_built_in_tools_need_no_other_words(base_url: str) -> None:
    tools = Toolset([read, write, ls, edit, bash, grep, glob, apply_patch]).schemas
    assert ChatModel("m", base_url=base_url, api_key="k").body(Request([], tools))["tools"] == tools


# ---- what a model thought goes back to it, and to no other ------------------------------------------------

SIGNED = {"google": {"thought_signature": "c2ln"}}
THINKING = streamed(
    {"reasoning_content": "I "},
    {"reasoning_content": "add."},
    {"reasoning_details": [{"type": "reasoning.text", "index": 0, "text": "I "}]},
    {
        "reasoning_details": [
            {"type": "reasoning.text", "index": 0, "text": "add.", "signature": "s"}
        ]
    },
    {
        "reasoning_details": [{"type": "reasoning.encrypted", "index": 1, "data": "x"}],
        "reasoning_opaque": "op",
    },
    {"extra_content": SIGNED, "reasoning_opaque": "aque"},
    {
        "tool_calls": [
            call(
                "a", index=0, extra_content=SIGNED, function={"name": "say", "arguments": '{"text"'}
            )
        ]
    },
    {"tool_calls": [{"index": 0, "function": {"arguments": ': "x"}'}}]},
    finish="tool_calls",
)
SIGNED_CALL = call(
    "a", "say", extra_content=SIGNED, function={"name": "say", "arguments": '{"text": "x"}'}
)
BACK_AGAIN = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "I add.",
    "extra_content": SIGNED,
    "reasoning_opaque": "opaque",
    "reasoning_details": [
        {"type": "reasoning.text", "index": 0, "text": "I add.", "signature": "s"},
        {"type": "reasoning.encrypted", "index": 1, "data": "x"},
    ],
    "tool_calls": [SIGNED_CALL],
}


def test_thoughts_and_signatures_go_back_to_the_model_that_had_them_and_to_no_other() -> None:
    messages: list[Message] = []
    with serve(THINKING, Reply("one"), Reply("two"), Reply("three")) as server:
        talk(server, messages, "thinker", [say])
        talk(server, messages, "other", [say])
        talk(server, messages, "thinker", [say])
        assert_all_valid(server)
    first, second, third = (body["messages"][1] for body in server.requests[1:])
    assert first == BACK_AGAIN and third == BACK_AGAIN
    bare = {name: value for name, value in SIGNED_CALL.items() if name != "extra_content"}
    assert second == {"role": "assistant", "content": None, "tool_calls": [bare]}
    assert messages[1]["reasoning_content"] == "I add.", "the list itself keeps it"


def test_reasoning_that_is_empty_goes_back_empty() -> None:
    with serve(
        streamed(
            {"reasoning_content": ""},
            {"tool_calls": [call("a", "say", index=0)]},
            finish="tool_calls",
        ),
        Reply("x"),
    ) as server:
        ask(server, tools=[say])
    assert server.requests[1]["messages"][1]["reasoning_content"] == ""


def test_reasoning_goes_back_under_the_name_it_came_with_or_not_at_all() -> None:
    for name, echoed, back in (
        ("reasoning", ["reasoning"], True),
        ("reasoning", [], False),
        ("reasoning_text", ["reasoning"], False),
        ("reasoning_content", ["reasoning_content"], True),
        ("reasoning_content", [], False),
    ):
        with serve(streamed({name: "hm"}, {"content": "one"}), Reply("two")) as server:
            messages: list[Message] = []
            for _ in range(2):
                talk(server, messages, profile={"echoed": echoed})
        assert server.requests[1]["messages"][1] == {"role": "assistant", "content": "one"} | (
            {name: "hm"} if back else {}
        )


def test_messages_lose_what_is_not_the_apis_and_what_only_their_model_understands() -> None:
    stamp: Message = {"meta": {"timestamp": 1}}
    own, foreign = {"meta": {"timestamp": 1, "model": "m"}}, {"meta": {"model": "other"}}
    thought = {
        "reasoning_content": "t",
        "extra_content": SIGNED,
        "reasoning_details": [{"text": "t"}],
        "think_tag": "t",
    }
    signed = calling(call("a", extra_content=SIGNED), **thought)
    messages = [
        said("go", **stamp),
        said("for the screen", "note", **stamp),
        signed | own,
        result("a") | stamp,
        signed | foreign,
        result("a"),
        said("x", "assistant", **thought),
        said("y", "assistant", **thought) | stamp,
    ]
    before = copy.deepcopy(messages)
    wire = convert_to_llm(messages, "m")
    assert wire == [
        said("go"),
        signed,
        result("a"),
        calling(call("a")),
        result("a"),
        messages[6],
        said("y", "assistant", **thought),
    ]
    assert convert_to_llm(messages)[3] == signed, "where no model is named, nothing is foreign"
    assert messages == before


# ---- bytes -------------------------------------------------------------------------------------------------

BAD = "a\0b\ud83dc\ud83d\ude00"
GOOD = "a\ufffdb\ufffdc\U0001f600"


class Putting(Hooks):
    def before_llm_call(self, request: Request) -> None:
        request.messages.append({"role": "user", "content": [words(BAD)], BAD: [BAD]})
        request.options["metadata"] = {BAD: (BAD,)}
        request.options["user"] = BAD


def test_what_no_encoder_takes_is_mended_wherever_it_comes_from() -> None:
    named = Tool(
        "t",
        BAD,
        {"type": "object", "properties": {"x": {"type": "string", "description": BAD}}},
        str,
    )
    with serve(Reply("fine")) as server:
        _, end = ask(
            server, BAD, [named], system=BAD, hooks=Putting(), model={"extra_body": {"stop": [BAD]}}
        )
        assert_all_valid(server)
    assert end.text == "fine"
    assert server.requests == [
        {
            "model": "m",
            "stream": True,
            "stream_options": {"include_usage": True},
            "stop": [GOOD],
            "metadata": {GOOD: [GOOD]},
            "user": GOOD,
            "messages": [
                said(GOOD, "system"),
                said(GOOD),
                {"role": "user", "content": [words(GOOD)], GOOD: [GOOD]},
            ],
            "tools": [
                offered(
                    {
                        "type": "object",
                        "properties": {"x": {"type": "string", "description": GOOD}},
                    },
                    "t",
                )
                | {
                    "function": named.schema["function"]
                    | {
                        "description": GOOD,
                        "parameters": {
                            "type": "object",
                            "properties": {"x": {"type": "string", "description": GOOD}},
                        },
                    }
                }
            ],
        }
    ]


@pytest.mark.parametrize(
    "text",
    ["plain", "ä€\U0001f600", "a\0b", "\ud800", "\udfff\ud800", "\\u0000", "\u2028\x7f", BAD],
)
def test_a_request_is_utf8_without_nul_and_escapes_nothing_that_needs_it_not(text: str) -> None:
    data = encoded({"messages": [{"content": text, text: 1}]})
    made = json.loads(data.decode())["messages"][0]["content"]
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert made == whole.replace("\0", "\ufffd") and b"\0" not in data
    assert "ä" not in text or text.encode() in data
    assert b": " not in data and b", " not in data


def test_a_pair_of_surrogates_is_one_character() -> None:
    assert json.loads(encoded({"a": "\ud83d\ude00"})) == {"a": "\U0001f600"}


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), -float("inf"), object(), {1, 2}, b"x"],
    ids=["nan", "inf", "-inf", "object", "set", "bytes"],
)
def test_an_option_that_is_no_json_is_an_error_and_nothing_is_sent(value: object) -> None:
    with serve(Reply("x")) as server:
        for options in (
            {"hooks": Options(temperature=value)},
            {"model": {"extra_body": {"deep": [{"er": value}]}}},
        ):
            _, end = ask(server, **options)
            assert (
                end.error
                and end.error.kind == "bad_request"
                and "no JSON" in end.text
                and not server.requests
            )


def test_an_option_of_any_depth_is_an_error_and_no_crash() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ModelError, match="no JSON"):
        encoded({"a": deep})


def test_calls_carry_reasoning_even_where_nothing_was_thought() -> None:
    """R26: DeepSeek and Kimi, also after a change of model."""
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call("a")]},
        {"role": "tool", "tool_call_id": "a", "content": "x"},
        {"role": "assistant", "content": "done"},
    ]
    chat = ChatModel("m", base_url="https://api.deepseek.com", api_key="k")
    assert [
        message.get("reasoning_content") for message in chat.body(Request(messages))["messages"]
    ] == ["", None, None]
    plain = ChatModel(
        "m", base_url="https://api.deepseek.com", api_key="k", profile={"reasoning_filled": False}
    )
    assert "reasoning_content" not in plain.body(Request(messages))["messages"][0]
