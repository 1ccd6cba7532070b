"""docs/models.md: its adapter for a Messages API, as it is there, against a server; a trace of any
model."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from coder import (
    Abort,
    Agent,
    Completion,
    Event,
    Events,
    Limits,
    Model,
    Reply,
    Request,
    ScriptedModel,
    TextDelta,
    Trace,
    run_loop,
)
from coder.devtools.trace_report import read
from tests.harness import FAST, add, contents, drive
from tests.terminal import promptly, until

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
Answer = tuple[int, dict[str, str], Sequence[dict[str, Any]]]  # status, headers, events


class MessagesServer(ThreadingHTTPServer):
    """A server of the Messages API with prepared answers. An event {"type": "hang"} waits for the
    client."""

    daemon_threads = True

    def __init__(self, *answers: Answer) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = list(answers)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []

    def __enter__(self) -> MessagesServer:
        threading.Thread(
            target=self.serve_forever,
            args=(0.02,),
            daemon=True,
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: MessagesServer

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the library's name)
        pass

    def do_POST(self) -> None:
        assert self.path == "/v1/messages"
        self.server.keys.append(self.headers["x-api-key"])
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        status, headers, events = self.server.answers.pop(0)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        for event in events:
            if event["type"] == "hang":
                self.connection.settimeout(60)
                assert self.connection.recv(1) == b""
                return
            self.wfile.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())


def answer(*blocks: dict[str, Any], reason: str = "end_turn") -> Answer:
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"usage": {"input_tokens": 12}}}
    ]
    for index, block in enumerate(blocks):
        if block["type"] == "text":
            start = {"type": "text", "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            start = block | {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": start.pop("raw")}
        events.append({"type": "content_block_start", "index": index, "content_block": start})
        events.append({"type": "content_block_delta", "index": index, "delta": delta})
        events.append({"type": "content_block_stop", "index": index})
    delta = {"stop_reason": reason}
    events.append({"type": "message_delta", "delta": delta, "usage": {"output_tokens": 3}})
    return 200, {}, [*events, {"type": "message_stop"}]


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def use(raw: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": "toolu_1", "name": "add", "raw": raw}


def model_of(server: MessagesServer) -> Model:
    """The model of the page."""
    [_, code] = re.findall(
        r"^```python\n(.*?)^```$",
        PAGE.read_text(),
        re.M | re.S,
    )
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, "models.md", "exec"), names)
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    made: Model = names["MessagesModel"]("claude", url, "sk-own")
    return made


@pytest.fixture
def calling() -> Iterator[MessagesServer]:
    first = answer(text("Let me see. "), use('{"a": 1, "b": 2}'), reason="tool_use")
    with MessagesServer(first, answer(text("It is 3."))) as server:
        yield server


def test_a_conversation_with_tools(calling: MessagesServer) -> None:
    agent = Agent(
        model_of(calling),
        tools=[add],
        system="Be brief.",
        get_api_key=lambda: "sk-hook",
    )
    texts: list[str] = []
    agent.subscribe(lambda e: texts.append(e.text) if isinstance(e, TextDelta) else None)
    result = agent.run("Add 1 and 2.")
    assert result.text == "It is 3."
    assert result.steps == 2
    assert result.usage.input == 24
    assert result.usage.output == 6
    assert texts == ["Let me see. ", "It is 3."]
    first, second = calling.bodies
    assert first["system"] == "Be brief."
    assert first["messages"] == [{"role": "user", "content": [text("Add 1 and 2.")]}]
    assert first["tools"][0]["input_schema"]["required"] == ["a", "b"]
    said, result_block = second["messages"][1:]
    tool_use = {
        "type": "tool_use",
        "id": "toolu_1",
        "name": "add",
        "input": {"a": 1, "b": 2},
    }
    assert said["content"] == [text("Let me see. "), tool_use]
    assert result_block["content"] == [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text("3")]}
    ]
    assert calling.keys == ["sk-hook", "sk-hook"]


def test_arguments_that_are_no_json_are_told_to_the_model() -> None:
    cut = answer(use('{"a": 1, "b"'), reason="tool_use")
    with MessagesServer(cut, answer(text("Sorry."))) as server:
        agent = Agent(model_of(server), tools=[add])
        agent.run("go")
    [said] = contents(agent.messages, "tool")
    assert "not valid JSON" in said
    assert server.bodies[1]["messages"][1]["content"][0]["input"] == {}


BUSY: Answer = (429, {"retry-after": "0.01"}, [])
CUT: Answer = (
    200,
    {},
    answer(text("half"))[2][:3],
)
OVERLOADED: Answer = (
    200,
    {},
    [{"type": "error", "error": {"message": "overloaded"}}],
)


@pytest.mark.parametrize(
    "failure",
    [BUSY, CUT, OVERLOADED],
    ids=["busy", "cut", "overloaded"],
)
def test_what_may_pass_is_tried_again(failure: Answer) -> None:
    with MessagesServer(failure, answer(text("Hello."))) as server:
        assert Agent(model_of(server), retry=FAST).run("Hi").text == "Hello."
        assert len(server.bodies) == 2


def test_what_does_not_pass_ends_the_run() -> None:
    with MessagesServer((401, {}, [])) as server:
        result = Agent(model_of(server), retry=FAST).run("Hi")
    assert result.error
    assert (result.error.kind, result.error.status) == ("auth", 401)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        model: Any = model_of(server)
        model.url = model.url._replace(netloc=f"127.0.0.1:{closed.getsockname()[1]}")
        limits = Limits(max_errors=2)
        result = Agent(model, retry=FAST, limits=limits).run("Hi")
    assert result.error
    assert result.error.kind == "network"


@pytest.mark.parametrize(
    "before",
    [0, 3],
    ids=["before the answer", "within the answer"],
)
def test_an_abort_ends_a_stream_that_is_silent(before: int) -> None:
    silent: Answer = (
        200,
        {},
        [
            *answer(text("half"))[2][:before],
            {"type": "hang"},
        ],
    )
    with MessagesServer(silent) as server:
        agent = Agent(model_of(server))

        def stop() -> None:
            until(lambda: server.bodies)
            agent.abort()

        threading.Thread(target=stop).start()
        with promptly():
            assert agent.run("Hi").stop_reason == "aborted"


def test_a_trace_has_what_any_model_is_asked_and_answers(
    calling: MessagesServer, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    with Trace(path) as trace:
        agent = Agent(
            trace.attach(model_of(calling)),
            tools=[add],
            get_api_key=lambda: "sk-hook",
        )
        for _ in trace.watch(agent.stream("Add 1 and 2.")):
            pass
    recording = read(path)
    [run] = recording.runs
    first, second = recording.exchanges
    assert [each["content"] for each in first.messages] == ["Add 1 and 2."]
    assert [each["role"] for each in second.messages] == ["user", "assistant", "tool"]
    assert run.steps[0].figures["in"] == 12
    assert recording.model["name"] == "claude"
    assert "sk-hook" not in path.read_text()
    again = Agent(ScriptedModel.from_trace(path), tools=[add])
    assert again.run("Add 1 and 2.").text == "It is 3."


def test_a_trace_has_the_errors_of_any_model(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with MessagesServer((401, {}, [])) as server, Trace(path) as trace:
        Agent(trace.attach(model_of(server))).run("Hi")
    assert read(path).exchanges[0].of("response_end")[0]["error"]["kind"] == "auth"


def test_a_scripted_model_keeps_what_it_was_asked_as_it_was_then() -> None:
    model = ScriptedModel(
        [
            Reply(calls=[("add", {"a": 1, "b": 2})]),
            Reply("3"),
        ]
    )
    agent = Agent(model, tools=[add], system="Be brief.", reasoning="low")
    agent.run("go")
    first, second = model.requests
    assert isinstance(first, Request)
    assert (first.system, first.reasoning) == ("Be brief.", "low")
    assert [contents(each.messages)[0] for each in (first, second)] == ["go", "go"]
    assert [len(each.messages) for each in (first, second)] == [1, 3]
    assert [len(each["messages"]) for each in model.bodies] == [2, 4], "with the system prompt"


def test_an_abort_ends_a_model_that_never_looks_at_it() -> None:
    class Endless:
        name = "endless"
        context_window = 8_000

        def stream(self, request: Request, abort: Abort) -> Events[Completion]:
            while True:
                time.sleep(0.005)
                yield TextDelta("more ")

    def stop(event: Event) -> None:
        if isinstance(event, TextDelta):
            agent.abort()

    agent = Agent(Endless())
    agent.subscribe(stop)
    assert agent.run("go").stop_reason == "aborted"
    limited = drive(run_loop([], Endless(), prompt="go", limits=Limits(max_seconds=0.2)))
    assert limited[1].stop_reason == "max_time"


def test_the_shortest_model_of_the_page_answers() -> None:
    shortest, _ = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    names: dict[str, Any] = {}
    exec(compile(shortest, str(PAGE), "exec"), names)
    assert Agent(names["Echo"]()).run("Hello.").text == "Hello."
