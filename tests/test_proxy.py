"""The relay: a real WSGI server between a client and a model, over real sockets."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import pytest

from coder.abort import Abort
from coder.ai import ChatModel
from coder.features.agent import Agent
from coder.features.proxy import ProxyModel, relay
from coder.features.scripted import Reply, ScriptedServer
from coder.tools import tool
from coder.types import Event, ModelError, ReasoningDelta, Request, TextDelta
from tests.harness import FAST, drive, serve
from tests.terminal import promptly, until

TOKEN = "one-token-a-person"


class Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class Silent(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def relaying(upstream: ScriptedServer, **options: Any) -> Iterator[str]:
    """A relay in front of a model with a key; its address."""
    app = relay({"m": ChatModel("m", base_url=upstream.url, api_key="sk-UPSTREAM-KEY")}, [TOKEN, "another"], **options)
    with make_server("127.0.0.1", 0, app, Server, Silent) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


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
        with serve(*replies) as upstream, relaying(upstream) as url:
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
    with serve(Reply(words, calls=[("add", code)])) as upstream, relaying(upstream) as url:
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
    with serve(Reply("never")) as upstream, relaying(upstream, max_body=2000) as url:
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
        with serve(reply) as upstream, relaying(upstream) as url:
            model = ProxyModel(url, TOKEN, "m")
            with pytest.raises(ModelError) as raised:
                drive(model.stream(Request([{"role": "user", "content": "hi"}]), Abort()))
        error = raised.value
        assert error.kind == kind and "UPSTREAM" not in error.message
        assert kind != "rate_limit" or (error.retryable and error.retry_after == 3)


def test_a_wrong_token_and_a_relay_that_is_not_there_are_said() -> None:
    with serve(Reply("x")) as upstream, relaying(upstream) as url:
        result = Agent(ProxyModel(url, "wrong", "m"), retry=FAST).run("hi")
        assert result.error and result.error.kind == "auth" and "the token is not known" in result.text
    gone = Agent(ProxyModel(url, TOKEN, "m"), retry=FAST).run("hi")
    assert gone.error and gone.error.kind == "network"


@pytest.mark.parametrize("reply", [Reply("a long answer " * 500, pace=0.05), Reply("half", cut=3, close="hang"), Reply("never", hold=60)],
                         ids=["streaming", "stalled", "silent"])
def test_a_client_that_leaves_ends_the_request_to_the_model(reply: Reply) -> None:
    with serve(reply) as upstream, relaying(upstream) as url, promptly(20):
        data = json.dumps(ASKED).encode()
        head = f"POST /api/stream HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {len(data)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
            client.sendall(head.encode() + data)
            until(lambda: upstream.requests)
        if not reply.hold:  # a server that has not begun to answer does not look whether anybody listens
            until(lambda: upstream.gone == 1)


def test_an_abort_of_the_client_ends_the_request_to_the_model() -> None:
    with serve(Reply("a long answer " * 500, pace=0.05)) as upstream, relaying(upstream) as url, promptly(20):
        agent = Agent(ProxyModel(url, TOKEN, "m"), retry=FAST)
        agent.subscribe(lambda event: agent.abort() if isinstance(event, TextDelta) else None)
        assert agent.run("hi").stop_reason == "aborted"
        until(lambda: upstream.gone == 1)
