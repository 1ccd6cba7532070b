"""The request side of the model call: what each server and model family is sent, and parameters
that servers reject."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from itertools import count, pairwise
from typing import Any

import pytest

from coder.ai import ChatModel
from coder.devtools.scripted import Body, Reply, ScriptedServer
from coder.events import Event, Notice
from coder.hooks import Hooks
from coder.loop import run_loop
from coder.providers.profiles import TABLE, profile_of
from coder.providers.request import REASONING_BUDGETS, RequestEncoder
from coder.providers.text import host_of
from coder.toolset import Toolset
from coder.types import Message, ModelError, Request, RunResult
from tests import harness
from tests.harness import FAST, ask, assert_all_valid, drive, quick, types
from tests.test_wire import chunk, stream

ANY = "https://api.example.com/v1"
OPENAI = "https://api.openai.com/v1"
MISTRAL = "https://api.mistral.ai/v1"
GEMINI = "https://generativelanguage.googleapis.com/v1beta/openai"
KIMI = "https://api.moonshot.ai/v1"
QWEN = "https://api.siliconflow.cn/v1"
LEVELS = ("minimal", "low", "medium", "high", "xhigh")
NUMBERS = count()


def serve(*replies: Reply | Callable[[Body], Reply]) -> ScriptedServer:
    """A server with an address of its own: a later one may get its port, and what it refused is
    remembered by address."""
    server = harness.serve(*replies)
    server.url = f"http://127.0.0.1:{server.port}/{next(NUMBERS)}/v1"
    return server


def call(call_id: str, name: str = "look", **more: Any) -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": "{}"},
    } | more


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


def sent(
    messages: list[Message], base_url: str = ANY, name: str = "m", **profile: Any
) -> list[Message]:
    """The messages as they would go out."""
    chat = ChatModel(name, base_url=base_url, api_key="k", profile=profile)
    return list(json.loads(chat.encoder.encode(Request(messages)))["messages"])


def body_for(base_url: str = ANY, name: str = "m", profile: Any = None, **request: Any) -> Body:
    chat = ChatModel(name, base_url=base_url, api_key="k", profile=profile)
    messages = request.pop("messages", [said("go")])
    made: Body = json.loads(
        chat.encoder.encode(
            Request(
                messages,
                request.pop("tools", []),
                **request,
            )
        )
    )
    return made


def of_role(body: Body, role: str) -> list[Message]:
    return [message for message in body["messages"] if message["role"] == role]


class Options(Hooks):
    """Members of the body that a program sets."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def before_llm_call(self, request: Request) -> None:
        request.options |= self.options


# ---- what is sent to whom ------------------------------------------------------------------------

IDS = {
    "dotted": "functions.look:0",
    "underscored": "call_" + "a" * 20,
    "sixty": "x" * 60,
    "seventy": "y" * 70,
    "nine": "abc123DEF",
}
MEMBERS = ["reasoning_content", "reasoning", "reasoning_text", "reasoning_details"]
MEMBERS += ["extra_content", "reasoning_opaque"]


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


def facts(base_url: str, name: str, **profile: Any) -> dict[str, Any]:
    """What is sent to a server and a model, by what is to be seen in the request."""
    model = ChatModel(name, base_url=base_url, api_key="k", profile=profile)

    def body(level: Any = "off", **options: Any) -> Body:
        asked = {"options": options, "reasoning": level, "session_id": "s"}
        made: Body = json.loads(
            model.encoder.encode(Request(conversation(), [], "Be kind.", **asked))
        )
        return made

    with_options = body(temperature=0.5, max_tokens=9, parallel_tool_calls=False)
    plain = body()
    assistant, calls, *_ = of_role(plain, "assistant")
    return {
        "members": plain.keys() - {"model", "messages", "tools", "stream"},
        "options": with_options.keys() - plain.keys(),
        "thinking": {
            level: {key: value for key, value in body(level).items() if key not in plain}
            for level in LEVELS
        },
        "roles": "".join(message["role"][0] for message in plain["messages"]),
        "content": calls.get("content", "absent"),
        "named": [each.get("name") for each in of_role(plain, "tool")] == ["look"] * 5,
        "ids": {label for label, each in IDS.items() if each in str(calls["tool_calls"])},
        "echoed": assistant.keys() - {"role", "content"},
        "text": assistant["content"],
        "key_header": model.profile.key_header,
    }


def effort(**levels: str) -> dict[str, Any]:
    return {"thinking": {level: {"reasoning_effort": levels.get(level, level)} for level in LEVELS}}


def always(**members: Any) -> dict[str, Any]:
    return {"thinking": dict.fromkeys(LEVELS, members)}


def by_level(member: Callable[[str, int], dict[str, Any]]) -> dict[str, Any]:
    return {"thinking": {level: member(level, REASONING_BUDGETS[level]) for level in LEVELS}}


def options(text: str) -> dict[str, Any]:
    return {"options": {*text.split()}}


def members(text: str = "") -> dict[str, Any]:
    return {"members": {*text.split()}}


PLAIN = {
    **members("stream_options"),
    **options("temperature max_tokens parallel_tool_calls"),
    **effort(),
    "roles": "suaatttttuuu",
    "content": None,
    "named": False,
    "ids": {*IDS},
    "echoed": {"reasoning_content", "reasoning_details", "extra_content", "reasoning_opaque"},
    "text": "I look.",
    "key_header": "",
}
NO_TEMPERATURE = options("max_completion_tokens parallel_tool_calls")
RENAMED = options("temperature max_completion_tokens parallel_tool_calls")
TAME = effort(minimal="low", xhigh="high")
NO_XHIGH = effort(xhigh="high")
NINE: dict[str, Any] = {"ids": {"nine"}, "roles": "suaatttttau"}
FORTY = {"ids": {"dotted", "underscored", "nine"}}
NO_ECHO: dict[str, Any] = {"echoed": set()}
CACHED = members("stream_options prompt_cache_key")
TAGGED = {"text": "<think>hm</think>\n\nI look."}
SWITCHED = always(thinking={"type": "enabled"})
TEMPLATE = always(chat_template_kwargs={"enable_thinking": True})
TEMPLATE_V3 = always(chat_template_kwargs={"thinking": True})
QWEN_BUDGET = by_level(lambda _, n: {"enable_thinking": True, "thinking_budget": n})
CLAUDE = by_level(
    lambda _, n: {
        "thinking": {
            "type": "enabled",
            "budget_tokens": max(1024, n),
        }
    }
)
ROUTED = by_level(lambda level, _: {"reasoning": {"effort": level}})
GOOGLE = {**NO_XHIGH, "named": True, **options("temperature max_tokens")}
HIGH = effort(minimal="high", low="high", medium="high", xhigh="high")
OF_MISTRAL = {
    **NINE,
    **NO_ECHO,
    **HIGH,
    **members(),
    "content": "",
    "named": True,
}
OF_OPENAI = {**CACHED, **FORTY, **NO_ECHO}
FEW_ECHOES = {"echoed": {"reasoning_details", "extra_content"}}
OLLAMA = {**TAME, "content": ""}
AZURE = {**NO_ECHO, "key_header": "api-key"}

# (base URLs, models, how the request differs from the plain form)
ROWS: list[tuple[str, str, dict[str, Any]]] = [
    (ANY, "some-model", {}),
    (ANY, "o1 openai/o4-mini O3 gpt-5.1 gpt-5.1-codex", NO_TEMPERATURE | TAME),
    (ANY, "gpt-5 openai/GPT-5-mini gpt-5-codex", NO_TEMPERATURE | NO_XHIGH),
    (ANY, "gpt-5.1-codex-max gpt-5.2 gpt-5.9-codex", NO_TEMPERATURE | effort(minimal="low")),
    (ANY, "codex-max", effort(minimal="low")),
    (ANY, "gpt-oss-120b", TAME),
    (ANY, "anthropic/claude-sonnet-4", {"ids": {"underscored", "sixty", "nine"}}),
    (ANY, "mistral-large ministral-8b codestral devstral magistral pixtral x/Mistral-Nemo", NINE),
    (ANY, "deepseek-ai/DeepSeek-R1", NO_ECHO),
    (ANY, "MiniMax-M2", {**always(), **TAGGED}),
    ("http://localhost:80/v1 http://127.0.0.1/v1 http://[::1]:8000/v1", "Qwen3-8B", TEMPLATE),
    ("http://0.0.0.0/v1 http://10.1.2.3/v1 http://192.168.1.5/v1", "Qwen3-8B", TEMPLATE),
    ("http://172.16.0.1/v1 http://172.20.0.1/v1 http://172.31.255.1/v1", "glm-4.6", TEMPLATE),
    ("http://localhost:8000/v1", "granite-3.3 hunyuan-a13b nemotron-nano", TEMPLATE),
    ("http://localhost:8000/v1", "deepseek-v3.1", TEMPLATE_V3),
    ("http://localhost:11434/v1 https://ollama.com/v1", "llama3 qwen3:8b", OLLAMA),
    ("http://192.168.0.2:1234/v1", "qwen3-8b", {"content": ""}),
    (OPENAI, "gpt-4o", {**OF_OPENAI, **RENAMED}),
    ("https://API.openai.com:443/v1", "gpt-5", {**OF_OPENAI, **NO_TEMPERATURE, **NO_XHIGH}),
    ("https://r.openai.azure.com/openai/v1", "gpt-4o", {**AZURE, **FORTY}),
    ("https://r.services.ai.azure.com/v1", "Mistral-Large", {**AZURE, **NINE, **members()}),
    ("https://openrouter.ai/api/v1", "x/y minimax/minimax-m2", {**ROUTED, **FEW_ECHOES}),
    ("https://api.deepseek.com/v1", "deepseek-chat", SWITCHED),
    (f"{KIMI} https://api.kimi.com/coding/v1", "kimi-k2", {**SWITCHED, **CACHED}),
    ("https://api.z.ai/api/paas/v4 https://open.bigmodel.cn/api/paas/v4", "glm-4.6", SWITCHED),
    ("https://ark.cn-beijing.volces.com/api/v3", "doubao", SWITCHED),
    (f"https://dashscope.aliyuncs.com/compatible-mode/v1 {QWEN}", "qwen3-max", QWEN_BUDGET),
    (f"{GEMINI} https://europe-aiplatform.googleapis.com/v1", "gemini-3-pro", GOOGLE),
    (MISTRAL, "open-mixtral", OF_MISTRAL),
    ("https://api.groq.com/openai/v1", "llama-3.3", {**NO_ECHO, **TAME}),
    ("https://api.groq.com/openai/v1", "qwen3", {**NO_ECHO, **always(reasoning_effort="default")}),
    ("https://api.cerebras.ai/v1", "zai", {**TAME, "echoed": {"reasoning"}}),
    ("https://api.anthropic.com/v1", "opus", {**NO_ECHO, **CLAUDE}),
    ("https://api.x.ai/v1", "grok-4", TAME),
    ("https://api.together.xyz/v1 https://api.together.ai/v1", "openai/gpt-oss-20b", TAME),
    ("https://api.together.xyz/v1", "qwen", always(reasoning={"enabled": True})),
    ("https://adb-1.azuredatabricks.net/serving-endpoints", "llama", members()),
    # what only looks like one of these
    (ANY, "solo1 gpt-4o chatgpt-4o-latest proto3 xgpt-5 gpt-osx claud xmistral mini-max", {}),
    (ANY, "deepseek-v3 qwen3-8b glm-4.6 foo-o3d marco-o1", {}),
    ("http://110.1.2.3/v1 http://172.15.0.1/v1 http://172.32.0.1/v1", "qwen3-8b", {}),
    ("http://8.8.8.8:10/v1 http://my-localhost.example/v1", "qwen3-8b", {}),
    ("https://xyz.ai/v1 https://api.max.ai/v1 https://h:12345/v1 https://h:114345/v1", "m", {}),
    ("https://not-api-openai.com/v1 https://azure.com.example/v1", "m", {}),
]


@pytest.mark.parametrize(("urls", "models", "differences"), ROWS)
def test_each_server_gets_its_own_form(urls: str, models: str, differences: dict[str, Any]) -> None:
    for url in urls.split():
        for name in models.split():
            assert facts(url, name) == PLAIN | differences, (url, name)
            plain = {"model", "messages", "stream", "stream_options", "prompt_cache_key"}
            seen = body_for(url, name, session_id="s").keys()
            assert seen <= plain, "no reasoning where it is off"


NAMES = [f"{row.get('server', 'any server')} {row.get('model', 'any model')}" for row in TABLE]


@pytest.mark.parametrize("row", TABLE, ids=NAMES)
def test_every_row_of_the_table_is_a_profile_and_has_a_row_here(row: dict[str, Any]) -> None:
    fields = {name: value for name, value in row.items() if name not in ("server", "model")}
    profile_of("", "", fields)  # raises ValueError if a name or a value is wrong
    tested = [
        (url, model)
        for urls, models, differences in ROWS
        for url in urls.split()
        for model in models.split()
        if differences
    ]
    assert any(
        re.search(row.get("server", ""), host_of(url).lower())
        and re.search(row.get("model", ""), model.lower())
        for url, model in tested
    ), "no row of ROWS has this server and model: add one"


def test_the_plain_form_has_nothing_that_is_not_needed() -> None:
    with serve(Reply("x")) as server:
        ask(server)
        ask(server, tools=Toolset([say], session_id="s"), system="Be kind.")
    ours = {"role": "user", "content": "go"}
    first = {"model": "m", "messages": [ours], "stream": True}
    assert server.requests[0] == first | {"stream_options": {"include_usage": True}}
    assert server.requests[1] == server.requests[0] | {
        "messages": [{"role": "system", "content": "Be kind."}, ours],
        "tools": [say.schema],
    }


# ---- every field can be overridden ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("base_url", "profile", "differences"),
    [
        (
            ANY,
            {"reasoning": {"a": {"b": "$effort"}}},
            by_level(lambda w, _: {"a": {"b": w}}),
        ),
        (QWEN, {"least_budget": 9999}, always(enable_thinking=True, thinking_budget=9999)),
        (ANY, {"empty_content": "absent"}, {"content": "absent"}),
        (
            MISTRAL,
            {"ids": "", "strict_turns": False},
            {"ids": {*IDS}, "roles": "suaatttttuuu"},
        ),
        (
            MISTRAL,
            {"echoed": ["reasoning", "think_tag"]},
            {"echoed": {"reasoning"}, **TAGGED},
        ),
    ],
)
def test_the_user_can_override_fields(
    base_url: str, profile: dict[str, Any], differences: dict[str, Any]
) -> None:
    assert facts(base_url, "m", **profile) == facts(base_url, "m") | differences


def test_an_empty_thought_between_tags_leaves_nothing_in_the_request() -> None:
    answer = said("Done.", "assistant", think_tag="")
    made = sent([said("go"), answer, said("on")], echoed=["think_tag"])
    assert made[1] == said("Done.", "assistant")


@pytest.mark.parametrize(
    ("profile", "text"),
    [
        ({"outputlimit": "x"}, r"'outputlimit' is no field of a profile; known: .*key_header"),
        ({"empty_content": None}, r"empty_content cannot be None; it is 'null' by default"),
        ({"strict_turns": 1}, r"strict_turns cannot be 1; it is False by default"),
        ({"echoed": "reasoning_content"}, r"echoed cannot be 'reasoning_content'"),
        ({"ids": "("}, "ids"),
    ],
)
def test_an_override_that_does_not_fit_is_an_error_at_once(profile: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ChatModel("m", base_url=ANY, profile=profile)


# ---- parameters that the server rejects ----------------------------------------------------------

# More requests than any of these tests makes: a fault must not become an endless loop
MAX_ASKED = 12


def answer(body: Any, status: int = 400) -> Reply:
    chunks = [json.dumps(body).encode()]
    return Reply(status=status, headers={"content-type": "application/json"}, chunks=chunks)


def refusal(message: str, param: str | None = None, status: int = 400) -> Reply:
    error = {"message": message, "type": "invalid_request_error", "param": param}
    return answer({"error": error}, status)


def has(body: Body, member: str) -> bool:
    return member in body or any(member in each for each in of_role(body, "assistant"))


def until_without(member: str, saying: Reply) -> Callable[[Body], Reply]:
    """A server that takes no request with this member."""
    left = iter(range(MAX_ASKED))
    return lambda body: saying if has(body, member) and next(left, -1) >= 0 else Reply("fine")


THOUGHTS = {"reasoning_content": "t", "reasoning_details": [{"text": "t"}]}
THOUGHT = [said("a"), said("b", "assistant", **THOUGHTS)]
FORBIDDEN = {"type": "extra_forbidden", "msg": "Extra inputs are not permitted", "input": {}}
FORBIDDEN["loc"] = ["body", "stream_options"]
GEMINI_UNKNOWN = (
    'Invalid JSON payload received. Unknown name "prompt_cache_key": Cannot find field.'
)
GROQ_ECHO = (
    "'messages.1' : for 'role:assistant' the following must be satisfied[('messages.1' : property "
    "'reasoning_content' is unsupported)]"
)
NO_SUCH_TEMPERATURE = (
    "Unsupported value: 'temperature' does not support 0.5 with this model. "
    "Only the default (1) value is supported."
)
CACHE = {
    "model": {"profile": {"cache_key": True}},
    "tools": Toolset(session_id="s"),
}
SWITCH = {"profile": {"reasoning": {"thinking": {"type": "enabled"}}}}
HIGHLY: dict[str, Any] = {"reasoning": "high"}
Dropped = tuple[str, dict[str, Any], bool]  # a member, the options of the run, was it asked for?
USAGE: Dropped = ("stream_options", {}, False)
ECHO: Dropped = ("reasoning_content", {"messages": THOUGHT}, False)
ECHO_2: Dropped = ("reasoning_details", {"messages": THOUGHT}, False)
EFFORT: Dropped = ("reasoning_effort", HIGHLY, True)
CACHE_KEY: Dropped = ("prompt_cache_key", CACHE, False)
WARM: Dropped = ("temperature", {"hooks": Options(temperature=0.5)}, True)
SWITCHING: Dropped = ("thinking", HIGHLY | {"model": SWITCH}, True)
IN_STREAM = b'data: {"error": {"code": 400, "message": "stream_options is not supported"}}\n\n'
AT_ECHO = FORBIDDEN | {"loc": ["body", "messages", 1, "assistant", "reasoning_details"]}

# what the server answers, and what is dropped
REJECTIONS: dict[str, tuple[Reply, str, dict[str, Any], bool]] = {
    "Mistral": (
        answer({"object": "error", "message": {"detail": [FORBIDDEN]}}, 422),
        *USAGE,
    ),
    "FastAPI": (answer({"detail": [FORBIDDEN]}, 422), *USAGE),
    "a part": (refusal("Unrecognized request argument supplied: include_usage"), *USAGE),
    "inside a stream": (Reply(chunks=[IN_STREAM]), *USAGE),
    "Gemini": (
        answer([{"error": {"code": 400, "message": GEMINI_UNKNOWN}}]),
        *CACHE_KEY,
    ),
    "OpenAI temperature": (refusal(NO_SUCH_TEMPERATURE, "temperature"), *WARM),
    "OpenAI": (refusal("Unrecognized request argument supplied: reasoning_effort"), *EFFORT),
    "Groq": (refusal("`reasoning_effort` must be one of `none` or `default`"), *EFFORT),
    "a switch": (refusal("Unknown parameter: thinking.type", status=422), *SWITCHING),
    "Groq echo": (refusal(GROQ_ECHO), *ECHO),
    "Mistral echo": (answer({"detail": [AT_ECHO]}, 422), *ECHO_2),
    "Ollama": (refusal('"llama3" does not support thinking'), *EFFORT),
    "xAI": (answer({"error": "Model m does not support parameter reasoningEffort."}), *EFFORT),
}


@pytest.mark.parametrize("case", REJECTIONS)
def test_a_parameter_that_the_server_names_is_dropped_and_the_answer_comes(case: str) -> None:
    saying, member, options, asked_for = REJECTIONS[case]

    def run(server: ScriptedServer) -> tuple[list[Event], RunResult]:
        return ask(
            server,
            **options | {"messages": copy.deepcopy(options.get("messages", []))},
        )

    def without(value: dict[str, Any]) -> dict[str, Any]:
        return {name: each for name, each in value.items() if name != member}

    def notices(events: list[Event]) -> list[str]:
        return [event.text for event in events if isinstance(event, Notice)]

    with (
        serve(until_without(member, saying)) as server,
        serve(Reply("x")) as other,
    ):
        events, end = run(server)
        assert end.text == "fine"
        assert len(server.requests) == 2
        first, second = server.requests
        assert has(first, member)
        assert second == without(first) | {"messages": [*map(without, first["messages"])]}
        assert "retry" not in types(events)
        said = [f"The server rejects {member!r}; it is no longer sent."] * asked_for
        assert notices(events) == said
        again, end = run(server)
        assert end.text == "fine", "a second model knows it already"
        assert len(server.requests) == 3, "a second model knows it already"
        assert notices(again) == []
        run(other)
        assert has(other.requests[0], member), "another server may take it"


@pytest.mark.parametrize("given", ["max_tokens", "max_completion_tokens"])
def test_an_output_limit_that_is_rejected_goes_out_under_its_other_name(given: str) -> None:
    no = refusal("Unsupported parameter: 'max_tokens' is not supported.", "max_tokens")
    with serve(until_without("max_tokens", no)) as server:
        for _ in range(2):
            events, _ = ask(server, hooks=Options(**{given: 7}))
            assert not {"retry", "notice"} & {*types(events)}
    assert [body.get("max_tokens") for body in server.requests] == [7, None, None]
    assert [body.get("max_completion_tokens") for body in server.requests] == [None, 7, 7]


BACK = "The reasoning_content in the thinking mode must be passed back to the API."
STRANGE_CODE = {"message": "stream_options is not supported", "code": "invalid_api_key"}
CALLED = {
    "messages": [
        said("a"),
        calling(call("a")),
        result("a"),
    ]
}
ANSWERED: dict[str, Any] = {"messages": THOUGHT}


@pytest.mark.parametrize(
    ("saying", "options"),
    [
        (refusal("Unknown parameter: 'top_k'.", "top_k"), {}),
        (refusal("Unknown parameter: 'stream_options_of_old'."), {}),
        (refusal("messages.0.name is not supported"), {"messages": [said("a", name="Ann")]}),
        (refusal("Unsupported parameter: 'model'", "model"), {}),
        (refusal("tools is not supported", "tools"), CALLED),
        (refusal(BACK), ANSWERED | HIGHLY | {"model": SWITCH}),
        (refusal('"m" does not support thinking'), {}),
        (answer({"detail": "stream_options"}, 401), {}),
        (answer({"error": STRANGE_CODE}), {}),
        (
            refusal("Something"),
            {"hooks": Options(logit_bias={50256: -100})},
        ),
    ],
)
def test_an_error_that_names_no_parameter_is_final(saying: Reply, options: dict[str, Any]) -> None:
    with serve(saying) as server:
        options = options | {"messages": copy.deepcopy(options.get("messages", []))}
        events, end = ask(server, **options)
    assert end.error
    assert end.stop_reason == "error"
    assert len(server.requests) == 1
    assert not {"retry", "notice"} & {*types(events)}


def test_an_answer_that_began_is_not_asked_for_again() -> None:
    half = stream(chunk(content="half"), done=False)
    with serve(Reply(chunks=[*half, IN_STREAM])) as server:
        _, end = ask(server)
    assert end.error
    assert len(server.requests) == 1


# ---- messages ------------------------------------------------------------------------------------


def test_strict_turns_put_an_answer_between_a_result_and_the_user() -> None:
    first = [calling(call("a")), result("a")]
    second = [calling(call("b")), result("b")]
    history = [
        said("go"),
        *first,
        said("stop"),
        said("now"),
        *second,
        said("next"),
    ]
    between = said("Understood.", "assistant")
    strict = [
        said("go"),
        *first,
        between,
        said("stop\n\nnow"),
        *second,
        between,
        said("next"),
    ]
    assert sent(history, strict_turns=True) == strict
    assert sent(history) == history


@quick
def look(name: str) -> list[dict[str, Any]]:
    return [words(f"seen {name}"), picture(name)]


@quick
def say(text: str) -> str:
    return text


def test_each_turn_has_its_own_pictures_and_a_user_message_comes_after_them() -> None:
    second = [words("x"), picture("B"), words("y")]
    history = [
        calling(call("a")),
        result("a", [picture("A")]),
        calling(call("b")),
    ]
    history += [result("b", second), said("and?")]
    made = sent(history)
    texts = [m["content"] for m in made if m["role"] == "tool"]
    assert texts == ["(see the image below)", "x\ny"]
    assert [m["role"][0] for m in made] == ["a", "t", "u", "a", "t", "u", "u"]
    strict = sent(history, strict_turns=True)
    assert [m["role"][0] for m in strict] == ["a", "t", "a", "u", "a", "t", "a", "u"]
    assert strict[-1]["content"][1:] == [picture("B"), words("and?")]
    assert sent(
        [
            calling(call("a")),
            result("a", [words("x")]),
        ]
    )[1:] == [result("a", "x")]


def ids_of(messages: list[Message]) -> list[str]:
    calls = [each["id"] for m in messages for each in m.get("tool_calls", ())]
    return calls + [m["tool_call_id"] for m in messages if "tool_call_id" in m]


@pytest.mark.parametrize("pattern", [r"[a-zA-Z0-9]{9}", r"[a-zA-Z0-9_-]{1,64}", r".{1,40}"])
def test_ids_that_do_not_match_are_replaced_alike_in_call_and_result(pattern: str) -> None:
    given = [*IDS.values()]
    history = [calling(*map(call, given)), *map(result, given)]
    made = ids_of(sent(history, ids=pattern))
    assert made[:5] == made[5:]
    assert len({*made}) == 5
    assert all(re.fullmatch(pattern, each) for each in made[:5])
    for new, old in zip(made, IDS.values()):
        assert new == old or not re.fullmatch(pattern, old)
    assert ids_of(sent(history)) == given * 2, "an id goes back as it came"


EVERYTHING: dict[str, Any] = {
    "empty_content": "absent",
    "tool_name": True,
    "strict_turns": True,
    "ids": r"[a-zA-Z0-9]{9}",
    "echoed": ["reasoning", "think_tag"],
    "cache_key": True,
}


def step(number: int) -> Reply:
    """Thoughts and two calls at once; in every other step some text."""
    calls = [
        ("look", {"name": str(number)}),
        ("say", {"text": f"{number} of 4"}),
    ]
    return Reply("On it." if number % 2 else "", calls, f"think {number}")


@pytest.mark.parametrize(
    "profile",
    [{}, EVERYTHING],
    ids=["", "all"],
)
def test_a_long_list_is_sent_in_one_go_as_it_is_step_by_step(profile: dict[str, Any]) -> None:
    """Also after a message far back was changed."""

    def encoder() -> RequestEncoder:
        return ChatModel("m", base_url=ANY, api_key="k", profile=profile).encoder

    history = [said("go"), said("Be brief.", "system")]
    by_steps = encoder()
    for number in range(120):
        name = f"call-{number}"
        history += [calling(call(name)), result(name, [words("x"), picture(name)])]
        if number % 5 == 0:
            history += [said("Faster.", "system"), said("and?"), said("Well?")]
        grown = by_steps.encode(Request(history))
    in_one_go = encoder()
    assert in_one_go.encode(Request(history)) == grown
    history[70] = history[70] | {"content": "changed"}
    changed = encoder().encode(Request(history))
    assert changed != grown
    assert in_one_go.encode(Request(history)) == changed
    assert by_steps.encode(Request(history)) == changed


@pytest.mark.parametrize(
    "profile",
    [{}, EVERYTHING],
    ids=["", "all"],
)
def test_each_request_begins_with_the_bytes_of_the_one_before(profile: dict[str, Any]) -> None:
    class Steer(Hooks):
        def get_steering_messages(self) -> list[Message]:
            return [said("Hurry.")] if len(server.requests) == 2 else []

    sent: list[bytes] = []
    replies = step(1), Reply("no", status=500), *(step(number) for number in range(2, 5))
    model = {"profile": profile, "tap": sent.append}
    with serve(*replies, Reply("done"), Reply("done")) as server:
        messages: list[Message] = []
        for prompt in ("go", "more"):
            ask(
                server,
                prompt,
                [look, say],
                messages,
                model,
                hooks=Steer(),
                reasoning="low",
            )
        assert_all_valid(server)
    assert len(sent) == 7
    for before, after in pairwise(sent):
        assert after.startswith(before.removesuffix(b"]}"))


# ---- what a model thought goes back to it, and to no other ---------------------------------------


SIGNED = {"google": {"thought_signature": "c2ln"}}
TEXT_DETAIL = {"type": "reasoning.text", "index": 0}
ENCRYPTED = {"type": "reasoning.encrypted", "index": 1, "data": "x"}
HALF_CALL = {"name": "say", "arguments": '{"text"'}
THINKING = stream(
    chunk(reasoning_content="I "),
    chunk(reasoning_content="add."),
    chunk(reasoning_details=[TEXT_DETAIL | {"text": "I "}]),
    chunk(reasoning_details=[TEXT_DETAIL | {"text": "add.", "signature": "s"}]),
    chunk(reasoning_details=[ENCRYPTED], reasoning_opaque="op"),
    chunk(extra_content=SIGNED, reasoning_opaque="aque"),
    chunk(
        tool_calls=[
            call(
                "a",
                index=0,
                extra_content=SIGNED,
                function=HALF_CALL,
            )
        ]
    ),
    chunk(tool_calls=[{"index": 0, "function": {"arguments": ': "x"}'}}]),
    chunk("tool_calls"),
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
    "reasoning_details": [TEXT_DETAIL | {"text": "I add.", "signature": "s"}, ENCRYPTED],
    "tool_calls": [SIGNED_CALL],
}


def test_thoughts_and_signatures_go_back_to_the_model_that_had_them_and_to_no_other() -> None:
    messages: list[Message] = []
    with serve(
        Reply(chunks=THINKING),
        Reply("one"),
        Reply("two"),
        Reply("three"),
    ) as server:
        for name in ("thinker", "other", "thinker"):
            chat = ChatModel(name, base_url=server.url)
            drive(run_loop(messages, chat, [say], prompt="go", retry=FAST))
        assert_all_valid(server)
    first, second, third = (body["messages"][1] for body in server.requests[1:])
    assert first == BACK_AGAIN
    assert third == BACK_AGAIN
    bare = {name: value for name, value in SIGNED_CALL.items() if name != "extra_content"}
    assert second == {"role": "assistant", "content": None, "tool_calls": [bare]}
    assert messages[1]["reasoning_content"] == "I add.", "the list itself keeps it"


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        object(),
        {1, 2},
        b"x",
    ],
)
def test_an_option_that_is_no_json_is_an_error_and_nothing_is_sent(value: object) -> None:
    with serve(Reply("x")) as server:
        for options in (
            {"hooks": Options(temperature=value)},
            {"model": {"extra_body": {"deep": [{"er": value}]}}},
        ):
            _, end = ask(server, **options)
            assert end.error
            assert end.error.kind == "bad_request"
            assert "no JSON" in end.text
        assert not server.requests


# ---- what a request has in common with the one before is encoded once ----------------------------


def a_text_is_changed(messages: list[Message]) -> None:
    messages[0]["content"] = "changed"


def arguments_are_changed(messages: list[Message]) -> None:
    messages[1]["tool_calls"][0]["function"]["arguments"] = '{"path": "changed"}'


def a_message_is_taken_out(messages: list[Message]) -> None:
    del messages[3]


def a_system_message_comes_first(messages: list[Message]) -> None:
    messages.insert(0, said("Be brief.", "system"))


def a_system_message_comes_last(messages: list[Message]) -> None:
    messages.append(said("Be brief.", "system"))


def all_are_replaced(messages: list[Message]) -> None:
    messages[:] = [said("new")]


def one_is_no_json(messages: list[Message]) -> None:
    messages.append(said(object()))


@pytest.mark.parametrize(
    "change",
    [
        a_text_is_changed,
        arguments_are_changed,
        a_message_is_taken_out,
        a_system_message_comes_first,
        a_system_message_comes_last,
        all_are_replaced,
        one_is_no_json,
    ],
)
def test_each_request_is_what_a_client_without_an_earlier_one_sends(
    change: Callable[[list[Message]], None],
) -> None:
    def encoded(chat: ChatModel) -> bytes | str:
        try:
            return chat.encoder.encode(Request(messages))
        except ModelError as error:
            return error.kind

    messages = [
        said("go"),
        calling(call("a")),
        result("a"),
        said("done", "assistant"),
        said("on"),
    ]
    before = copy.deepcopy(messages)
    chat = ChatModel("m", base_url=ANY, api_key="k")
    encoded(chat)
    change(messages)
    assert encoded(chat) == encoded(ChatModel("m", base_url=ANY, api_key="k"))
    messages[:] = before  # also after one that could not be encoded
    assert encoded(chat) == encoded(ChatModel("m", base_url=ANY, api_key="k"))
