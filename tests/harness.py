"""What the tests share: running the loop to its end, and the checks that hold after every
request."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from coder import Agent
from coder.abort import Abort
from coder.ai import ChatModel, Model
from coder.devtools.scripted import Body, Reply, ScriptedServer
from coder.events import Event
from coder.loop import run_loop
from coder.providers.errors import RetryPolicy
from coder.toolset import Tool, tool
from coder.types import Limits, Message, RunResult

FAST = RetryPolicy(base=0.01, cap=0.02)


def drive(run: Any, each: Callable[[Event], None] | None = None) -> tuple[list[Event], RunResult]:
    """All events of a run, and its result."""
    events: list[Event] = []
    while True:
        try:
            event = next(run)
        except StopIteration as end:
            return events, end.value
        events.append(event)
        if each:
            each(event)


def ask(
    server: ScriptedServer,
    prompt: str = "go",
    tools: Any = (),
    messages: list[dict[str, Any]] | None = None,
    model: dict[str, Any] | None = None,
    each: Callable[[Event], None] | None = None,
    **options: Any,
) -> tuple[list[Event], RunResult]:
    """One run against a scripted server."""
    chat = ChatModel("m", base_url=server.url, **(model or {}))
    return ask_model(chat, prompt, tools, messages, each, **options)


def ask_model(
    model: Model,
    prompt: str = "go",
    tools: Any = (),
    messages: list[dict[str, Any]] | None = None,
    each: Callable[[Event], None] | None = None,
    **options: Any,
) -> tuple[list[Event], RunResult]:
    """One run of a model."""
    options = {"retry": FAST, "limits": Limits(), "abort": Abort()} | options
    return drive(
        run_loop(
            [] if messages is None else messages,
            model,
            tools,
            prompt=prompt,
            **options,
        ),
        each,
    )


def agent_of(server: ScriptedServer, **options: Any) -> Agent:
    """An agent that can add."""
    return Agent(
        ChatModel("m", base_url=server.url),
        **{"tools": [add], "retry": FAST} | options,
    )


def sent(server: ScriptedServer, request: int = -1) -> list[Any]:
    """What the messages of a request hold."""
    return contents(server.requests[request]["messages"])


def results(server: ScriptedServer) -> list[Any]:
    """What the tools answered, by the newest request."""
    return contents(server.requests[-1]["messages"], "tool")


def commands(*lines: str) -> list[tuple[str, Any]]:
    """A call of bash for each line."""
    return [("bash", {"command": line}) for line in lines]


def serve(*replies: Reply | Callable[[Body], Reply]) -> ScriptedServer:
    """A server that gives these replies in turn, the last one again and again."""
    if len(replies) == 1 and callable(replies[0]):
        return ScriptedServer(replies[0])
    return ScriptedServer([reply for reply in replies if isinstance(reply, Reply)])


def quick(function: Callable[..., Any], **options: Any) -> Tool:
    """A tool of a function without a docstring."""
    parameters = inspect.signature(function).parameters
    function.__doc__ = "\n".join(
        [function.__name__, "", *(f"{each}: {each}" for each in parameters)]
    )
    return tool(**options)(function)


@quick
def add(a: int, b: int) -> str:
    return str(a + b)


ONE = Reply(calls=[("add", {"a": 1, "b": 2})])


def all_of(kind: type[Any], events: Sequence[Event]) -> list[Any]:
    """The events of a kind."""
    return [event for event in events if isinstance(event, kind)]


def roles(messages: Sequence[Message]) -> list[str]:
    return [message["role"] for message in messages]


def contents(messages: Sequence[Message], role: str = "") -> list[Any]:
    """What the messages (of a role) hold."""
    return [each.get("content") for each in messages if role in ("", each["role"])]


def types(events: Sequence[Event]) -> list[str]:
    return [event.type for event in events]


def assert_valid(body: Body) -> None:
    """What every server asks of a request: each call has one result right after it, and so on."""
    encoded = json.dumps(body, ensure_ascii=False).encode()  # a lone surrogate fails here
    assert not re.search(rb"(?<!\\)(\\\\)*\\u0000", encoded)
    assert b"\0" not in encoded
    messages = body["messages"]
    seen = set[str]()
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        assert message["role"] in ("system", "user", "assistant", "tool"), message
        assert "meta" not in message
        assert message["role"] != "tool", f"a result without its call: {message}"
        assert message["role"] != "system" or position == 1
        if message["role"] != "assistant":
            continue
        calls = message.get("tool_calls") or []
        assert calls or message.get("content"), f"an empty answer: {message}"
        for call in calls:
            assert call["id"], f"an id twice: {call}"
            assert call["id"] not in seen, f"an id twice: {call}"
            seen.add(call["id"])
            assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", call["function"]["name"]), call
            assert isinstance(json.loads(call["function"]["arguments"]), dict), call
        for call in calls:
            assert position < len(messages), f"no result for {call}"
            result = messages[position]
            position += 1
            assert result["role"] == "tool", (call, result)
            assert result["tool_call_id"] == call["id"], (call, result)
            assert result["content"], "an empty result"


def assert_all_valid(server: ScriptedServer) -> None:
    for body in server.requests:
        assert_valid(body)


def table(text: str) -> list[list[str]]:
    """Rows of `command => what is expected`, in which a tilde at an end goes on."""
    return [row.split(" => ") for row in text.strip().replace("~\n", "").split("\n")]


def shell(folder: Path, line: str) -> str:
    """What a line of bash says in a folder."""
    argv = ["bash", "--norc", "-c", line]
    null = subprocess.DEVNULL
    done = subprocess.run(
        argv,
        cwd=folder,
        stdin=null,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout.strip()


def to_become_links(workspace: Path, outside: Path, text: str) -> Callable[[], None]:
    """Folders `sub` and `in`, in the workspace and the same outside, each with files `a`; what is
    returned makes links of the former."""
    for root in (workspace, outside):
        for name in ("sub", "in/sub"):
            (root / name).mkdir(parents=True)
            (root / name / "a").write_text(text)

    def meanwhile() -> None:
        for name in ("sub", "in"):
            (workspace / name).rename(workspace / f"{name}-aside")
            (workspace / name).symlink_to(outside / name)

    return meanwhile
