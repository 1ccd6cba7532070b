"""The relay: a real WSGI server between a client and a model, over real sockets.

P..: rows of the list of what pi-agent-core does.
"""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import pytest

from coder.abort import Abort
from coder.ai import ChatModel
from coder.errors import explain
from coder.features.agent import Agent
from coder.features.proxy import ProxyModel, relay
from coder.features.scripted import Reply
from coder.profile import BUDGET
from coder.tools import tool
from coder.types import Completion, Event, Limits, ModelError, Notice, ReasoningDelta, Request, TextDelta
from tests.harness import FAST, drive, serve
from tests.terminal import promptly, until

TOKEN = "one-token-a-person"


class Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class Silent(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(app: Callable[..., Iterable[bytes]]) -> Iterator[str]:
    """A WSGI application behind a real server; its address."""
    with make_server("127.0.0.1", 0, app, Server, Silent) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@contextmanager
def relaying(upstream: str, model: dict[str, Any] | None = None, **options: Any) -> Iterator[str]:
    """A relay in front of a model with a key; its address."""
    chat = ChatModel("m", base_url=upstream, **{"api_key": "sk-UPSTREAM-KEY"} | (model or {}))
    with serving(relay({"m": chat}, [TOKEN, "another"], **options)) as url:
        yield url


def post(url: str, body: Any, token: str = TOKEN, method: str = "POST", path: str = "/api/stream", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, data, {"Authorization": f"Bearer {token}"} | headers)
    answer = connection.getresponse()
    said = answer.read().decode()
    connection.close()
    return answer.status, said


@tool
def add(a: int, b: int) -> str:
    """Add.

    a: one
    b: other
    """
    return str(a + b)


ASKED = {"model": "m", "context": {"messages": [{"role": "user", "content": "hi"}]}}


def test_an_agent_behind_a_relay_works_as_one_before_the_model() -> None:
    """P57, P58."""
    two = [("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4})]
    replies = [Reply("Let me see.", calls=two, reasoning="Hm, two sums."), Reply("Seven.")]
    told: list[list[Event]] = []
    lists: list[list[dict[str, Any]]] = []
    bodies: list[list[dict[str, Any]]] = []
    for behind in (False, True):
        with serve(*replies) as upstream, relaying(upstream.url) as url:
            model = ProxyModel(url, TOKEN, "m") if behind else ChatModel("m", base_url=upstream.url)
            agent = Agent(model, tools=[add], system_prompt="Be brief.", thinking_level="low", retry=FAST)
            events: list[Event] = []
            agent.subscribe(events.append)
            assert agent.run("add").text == "Seven."
            told.append(events)
            lists.append([{k: v for k, v in m.items() if k != "meta"} for m in agent.messages])
            bodies.append(upstream.requests)
            assert not behind or upstream.heads[0]["authorization"] == "Bearer sk-UPSTREAM-KEY"
    for of in (lists, bodies):  # ids are made anew by each server
        for messages in of:
            text = json.dumps(messages)
            for number, call_id in enumerate(dict.fromkeys(c["id"] for m in agent_messages(messages) for c in m.get("tool_calls", ()))):
                text = text.replace(call_id, f"id{number}")
            messages[:] = json.loads(text)
    assert lists[0] == lists[1] and bodies[0] == bodies[1]
    for kind in (TextDelta, ReasoningDelta):
        assert [e.text for e in told[0] if isinstance(e, kind)] == [e.text for e in told[1] if isinstance(e, kind)]
    assert [e.type for e in told[0]] == [e.type for e in told[1]] and told[0][-1].usage == told[1][-1].usage


def agent_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [inner for message in messages for inner in message.get("messages", [message])]


def test_an_answer_crosses_the_wire_once() -> None:
    words, code = "word " * 400, {"a": 1, "b": int("7" * 900)}
    with serve(Reply(words, calls=[("add", code)])) as upstream, relaying(upstream.url) as url:
        status, said = post(url, ASKED | {"context": ASKED["context"] | {"tools": [add.schema]}})
        *deltas, done = [json.loads(line[6:]) for line in said.splitlines() if line.startswith("data: ")]
        assert status == 200 and said.count("word") == 400 and "sk-UPSTREAM" not in said
        assert json.loads("".join(each["arguments"] for each in deltas if each["type"] == "call")) == code
        assert done["type"] == "done" and len(json.dumps(done)) < 1000


BARE: dict[str, Any] = {"model": "m"}


@pytest.mark.parametrize(("body", "how", "status", "word"), [
    (ASKED, {"token": "wrong"}, 401, "token"), (ASKED, {"token": ""}, 401, "token"), (ASKED, {"token": TOKEN[:-1]}, 401, "token"),
    (ASKED, {"Authorization": "Basic x"}, 401, "token"), (ASKED, {"method": "GET"}, 405, "POST"),
    (ASKED, {"path": "/"}, 404, "/api/stream"), (ASKED | {"model": "gpt-99"}, {}, 404, "not found"),
    (ASKED | {"model": ["m"]}, {}, 400, "form"), (b"{oops", {}, 400, "form"), ([1], {}, 400, "form"),
    (BARE | {"context": {"messages": "hi"}}, {}, 400, "messages"), (BARE | {"context": {"messages": [{}]}}, {}, 400, "messages"),
    (BARE | {"context": {"messages": [], "tools": [{}]}}, {}, 400, "form"), (b"x" * 3000, {}, 413, "2000")])
def test_what_is_not_passed_on_says_why(body: Any, how: dict[str, str], status: int, word: str) -> None:
    with serve(Reply("never")) as upstream, relaying(upstream.url, max_body=2000) as url:
        came, said = post(url, body, **how)
        assert came == status and word in json.loads(said)["error"]["message"] and upstream.requests == []


def test_a_relay_needs_a_token() -> None:
    for tokens in ([], [""]):
        with pytest.raises(ValueError, match="open to everybody"):
            relay({}, tokens)


def test_an_error_of_the_model_comes_out_as_the_same_error_and_without_the_key() -> None:
    slow = Reply("slow down", status=429, headers={"retry-after": "3"})
    for reply, kind in ((Reply("no key sk-UPSTREAM-KEY", status=401), "auth"), (slow, "rate_limit"), (Reply("half", cut=2), "incomplete"),
                        (Reply("maximum context length is 5", status=400), "overflow")):
        with serve(reply) as upstream, relaying(upstream.url) as url:
            model = ProxyModel(url, TOKEN, "m")
            with pytest.raises(ModelError) as raised:
                drive(model.stream(Request([{"role": "user", "content": "hi"}]), Abort()))
        error = raised.value
        assert error.kind == kind and "UPSTREAM" not in error.message
        assert kind != "rate_limit" or (error.retryable and error.retry_after == 3)


def test_a_wrong_token_and_a_relay_that_is_not_there_are_said() -> None:
    with serve(Reply("x")) as upstream, relaying(upstream.url) as url:
        result = Agent(ProxyModel(url, "wrong", "m"), retry=FAST).run("hi")
        assert result.error and result.error.kind == "auth" and "the token is not known" in result.text
    gone = Agent(ProxyModel(url, TOKEN, "m"), retry=FAST).run("hi")
    assert gone.error and gone.error.kind == "network"


@contextmanager
def asking(url: str) -> Iterator[None]:
    """A client that asks the relay, and leaves at the end of the block."""
    data = json.dumps(ASKED).encode()
    head = f"POST /api/stream HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
        client.sendall(head.encode() + data)
        yield


@pytest.mark.parametrize("reply", [Reply("a long answer " * 500, pace=0.05), Reply("half", cut=3, close="hang")],
                         ids=["streaming", "stalled"])
def test_a_client_that_leaves_ends_the_request_to_the_model(reply: Reply) -> None:
    with serve(reply) as upstream, relaying(upstream.url) as url, promptly(20):
        with asking(url):
            until(lambda: upstream.requests)
        until(lambda: upstream.gone == 1)


def test_a_client_that_leaves_before_the_model_has_said_anything_ends_the_request_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as upstream, relaying(f"http://127.0.0.1:{upstream.getsockname()[1]}/v1") as url:
        upstream.settimeout(20)
        with asking(url):
            connection, _ = upstream.accept()
            connection.settimeout(20)
            received = b""
            while not received.endswith(b"}}"):
                received += connection.recv(100_000)
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):  # the relay waits, as the client does
                connection.recv(1)
        with connection:
            connection.settimeout(20)
            assert connection.recv(1) == b"", "the relay has hung up"


def test_an_abort_of_the_client_ends_the_request_to_the_model() -> None:
    with serve(Reply("a long answer " * 500, pace=0.05)) as upstream, relaying(upstream.url) as url, promptly(20):
        agent = Agent(ProxyModel(url, TOKEN, "m"), retry=FAST)
        agent.subscribe(lambda event: agent.abort() if isinstance(event, TextDelta) else None)
        assert agent.run("hi").stop_reason == "aborted"
        until(lambda: upstream.gone == 1)


# ---- what a request may hold -----------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "status"), [("\xb2", 411), ("-1", 411), ("many", 411), ("", 411), ("9" * 5000, 413), ("1" * 13, 413)])
def test_a_length_that_is_none_is_refused(length: str, status: int) -> None:
    with serve(Reply("never")) as upstream, relaying(upstream.url) as url:
        came, said = post(url, b"", **{"Content-Length": length})
        assert came == status and json.loads(said)["error"]["code"] == status and upstream.requests == []


@pytest.mark.parametrize("options", [{"reasoning": "much"}, {"reasoning": ["low"]}, {"budgets": {"low": "many"}}, {"budgets": {"low": -1}},
                                     {"budgets": [1]}, [1]])
def test_options_that_are_none_are_refused(options: Any) -> None:
    with serve(Reply("never")) as upstream, relaying(upstream.url) as url:
        came, said = post(url, ASKED | {"options": options})
        assert came == 400 and "form" in said and upstream.requests == []


def test_thinking_budgets_pass_the_relay() -> None:
    model = {"profile": {"reasoning": {"thinking_budget": BUDGET}}}
    with serve(Reply("fine")) as upstream, relaying(upstream.url, model) as url:
        Agent(ProxyModel(url, TOKEN, "m"), thinking_level="low", thinking_budgets={"low": 4321}).run("hi")
        assert upstream.requests[0]["thinking_budget"] == 4321


def test_an_option_that_the_relay_does_not_take_is_said_once() -> None:
    def options(request: Request) -> None:
        request.options |= {"top_k": 3, "seed": 7, "response_format": {"type": "json_object"}, "reasoning": {"effort": "low"}}

    with serve(Reply("fine")) as upstream, relaying(upstream.url) as url:
        agent = Agent(ProxyModel(url, TOKEN, "m"), before_llm_call=options)
        notices: list[str] = []
        agent.subscribe(lambda event: notices.append(event.text) if isinstance(event, Notice) else None)
        assert agent.run("one").text == agent.run("two").text == "fine"
        assert [body["seed"] for body in upstream.requests] == [7, 7]
        assert not {"top_k", "response_format", "reasoning"} & upstream.requests[0].keys()
    assert notices == [f"The relay does not take {name!r}, so it is left out." for name in ("reasoning", "response_format", "top_k")]


# ---- the two who run it ----------------------------------------------------------------------------------


class Broken:
    name, context_window = "m", 1000

    def stream(self, request: Request, abort: Abort) -> Generator[Event, None, Completion]:
        yield TextDelta("well, ")
        raise ZeroDivisionError("of the server's own business")


def test_a_bug_in_the_servers_model_is_logged_there_and_told_to_the_client_without_its_words(caplog: pytest.LogCaptureFixture) -> None:
    with serving(relay({"m": Broken()}, [TOKEN])) as url, caplog.at_level(logging.ERROR, "coder.relay"):
        result = Agent(ProxyModel(url, TOKEN, "m"), retry=FAST).run("hi")
    assert result.stop_reason == "error" and result.text == "Error: the model could not be asked (ZeroDivisionError)"
    [record] = caplog.records
    assert record.name == "coder.relay" and "of the server's own business" in caplog.text and "in stream" in caplog.text


def test_a_key_of_the_environment_is_not_told_to_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(Reply("Incorrect API key provided: sk-OF-THE-ENVIRONMENT", status=401)) as upstream:
        monkeypatch.setenv("OPENAI_BASE_URL", upstream.url)
        monkeypatch.setenv("OPENAI_API_KEY", " sk-OF-THE-ENVIRONMENT")
        with serving(relay({"m": ChatModel("m")}, [TOKEN])) as url:
            result = Agent(ProxyModel(url, TOKEN, "m"), retry=FAST).run("hi")
        assert upstream.heads[0]["authorization"] == "Bearer sk-OF-THE-ENVIRONMENT"
    assert result.error and result.error.kind == "auth" and result.text == "Error: Incorrect API key provided: ***"


# ---- a relay that is none --------------------------------------------------------------------------------


@contextmanager
def telling(*events: Any) -> Iterator[ProxyModel]:
    """The model behind a relay that sends these events, whatever they are."""
    def app(environ: dict[str, Any], start_response: Any) -> Iterator[bytes]:
        environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
        start_response("200 OK", [("Content-Type", "text/event-stream")])
        for event in events:
            yield b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"

    with serving(app) as url:
        yield ProxyModel(url, TOKEN, "m")


USAGE = {"input": 5, "output": 1, "cached": 0, "reasoning": 0, "estimated": False, "cost": None}
DONE = {"type": "done", "finish": "stop", "finish_reason": "stop", "message": {}, "calls": [], "problems": [], "usage": USAGE}
CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
CALLED = DONE | {"finish": "tool_calls", "finish_reason": "tool_calls", "calls": [CALL], "problems": [""]}
SAID = {"type": "text", "text": "hello"}


def test_what_a_relay_sends_in_the_right_form_is_an_answer() -> None:
    with telling(SAID, DONE) as model:
        assert Agent(model).run("hi").text == "hello"
    with telling(CALLED) as model:
        _, answer = drive(model.stream(Request([]), Abort()))
    assert answer.calls[0].arguments == {"a": 1, "b": 2} and answer.message["tool_calls"] == [CALL]  # type: ignore[attr-defined]


MALFORMED: dict[str, Any] = {
    "a text that is none": {"type": "text", "text": 5},
    "no text": {"type": "text"},
    "a thought that is none": {"type": "reasoning", "text": []},
    "a notice that is none": {"type": "notice", "text": {}},
    "a delta with a number as name": {"type": "call", "id": "1", "name": 5, "arguments": ""},
    "a delta with a number as id": {"type": "call", "id": 1, "name": "x", "arguments": ""},
    "a delta with null as arguments": {"type": "call", "id": "1", "name": "x", "arguments": None},
    "options that are none": {"type": "left_out", "options": 5},
    "an option that is none": {"type": "left_out", "options": [5]},
    "no object": [1],
    "a number": 5,
    "a string": "done",
    "no type": {},
    "no JSON": b"{oops",
    "nested without end": b"[" * 50_000,
    "an error without words": {"type": "error", "kind": "server"},
    "an error without a kind": {"type": "error", "message": "x"},
    "an error whose words are none": {"type": "error", "kind": "server", "message": 5},
    "usage in words": DONE | {"usage": USAGE | {"input": "many"}},
    "no usage": DONE | {"usage": None},
    "half a usage": DONE | {"usage": {}},
    "more tokens than there are": DONE | {"usage": USAGE | {"output": 10 ** 400}},
    "tokens below zero": DONE | {"usage": USAGE | {"cached": -1}},
    "a cost in words": DONE | {"usage": USAGE | {"cost": "much"}},
    "a cost that is no number": DONE | {"usage": USAGE | {"cost": float("nan")}},
    "calls in words": DONE | {"calls": "abc"},
    "a number as call": CALLED | {"calls": [5]},
    "a call with a number as name": CALLED | {"calls": [CALL | {"function": {"name": 5, "arguments": "{}"}}]},
    "a call without a name": CALLED | {"calls": [CALL | {"function": {"name": "", "arguments": "{}"}}]},
    "a call with a number as id": CALLED | {"calls": [CALL | {"id": 5}]},
    "a call without an id": CALLED | {"calls": [CALL | {"id": ""}]},
    "a call with an object as arguments": CALLED | {"calls": [CALL | {"function": {"name": "add", "arguments": {}}}]},
    "a call without a function": CALLED | {"calls": [{"id": "c1"}]},
    "an id twice": CALLED | {"calls": [CALL, CALL], "problems": ["", ""]},
    "problems missing": CALLED | {"problems": []},
    "a problem that is none": CALLED | {"problems": [5]},
    "a message in words": DONE | {"message": "abc"},
    "content that is none": DONE | {"message": {"content": 5}},
    "another word for the end": DONE | {"finish": "later"},
    "a number as reason": DONE | {"finish_reason": 3},
}


@pytest.mark.parametrize("what", MALFORMED)
def test_what_a_relay_sends_in_another_form_is_a_failed_attempt_and_breaks_no_run(what: str) -> None:
    with telling(SAID, MALFORMED[what], DONE) as model:
        agent = Agent(model, tools=[add], retry=FAST, limits=Limits(max_errors=1))
        result = agent.run("hi")
    assert result.stop_reason == "error" and result.error and result.error.kind == "protocol" and result.error.retryable
    assert "malformed" in result.text and [message["role"] for message in agent.messages] == ["user"]


def test_a_relay_cannot_say_whose_message_it_is_nor_put_calls_or_facts_of_ours_into_it() -> None:
    told = {"role": "system", "tool_calls": "abc", "meta": {"is_error": True}, "reasoning_content": "hm \ud800"}
    with telling(SAID, DONE | {"message": told}) as model:
        _, answer = drive(model.stream(Request([]), Abort()))
    message: dict[str, Any] = answer.message  # type: ignore[attr-defined]
    assert message == {"role": "assistant", "content": "hello", "reasoning_content": "hm \ufffd"}


def test_half_a_surrogate_pair_of_a_relay_is_mended_as_one_of_a_model_is() -> None:
    call = CALL | {"function": {"name": "add", "arguments": '{"a": "\ud800"}'}, "extra_content": ["\udc00"]}
    with telling({"type": "text", "text": "x\ud800"}, CALLED | {"calls": [call]}) as model:
        _, answer = drive(model.stream(Request([]), Abort()))
    assert json.dumps(answer.message, ensure_ascii=False).encode().count("\ufffd".encode()) == 3  # type: ignore[attr-defined]
    assert answer.calls[0].arguments == {"a": "\ufffd"}  # type: ignore[attr-defined]


@pytest.mark.parametrize(("arguments", "problem"), [
    ("[1]", "no JSON object"), ("{oops", "not valid JSON"), ('{"a": NaN}', "not valid JSON")])
def test_arguments_of_a_relay_that_are_none_are_told_to_the_model(arguments: str, problem: str) -> None:
    call = CALL | {"function": {"name": "add", "arguments": arguments}}
    with telling(CALLED | {"calls": [call]}) as model:
        agent = Agent(model, tools=[add], retry=FAST, limits=Limits(max_steps=1))
        agent.run("hi")
    assert agent.messages[-1]["role"] == "tool" and problem in agent.messages[-1]["content"]


@pytest.mark.parametrize(("field", "value"), [
    ("retry_after", "soon"), ("retry_after", -1), ("retry_after", float("nan")), ("retry_after", float("inf")), ("status", "429"),
    ("status", 7), ("request_id", 5), ("retryable", "no"), ("loading", "no"), ("kind", "nonsense"), ("kind", ["auth"])])
def test_what_an_error_says_in_another_form_is_left_out_and_the_error_stays(field: str, value: Any) -> None:
    with telling({"type": "error", "kind": "rate_limit", "message": "slow\x1b[2J down", field: value}) as model:
        result = Agent(model, retry=FAST, limits=Limits(max_errors=1)).run("hi")
    error = result.error
    assert error and error.kind == ("server" if field == "kind" else "rate_limit") and error.message == "slow [2J down"
    assert (error.status, error.retry_after, error.request_id, error.retryable, error.loading) == (None, None, None, False, False)
    assert explain(error)
