"""The relay: a real WSGI server between a client and a model's server, over real sockets.

P..: rows of the list of what pi-agent-core does.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import pytest

from coder.abort import Abort
from coder.agent.agent import Agent
from coder.ai import ChatModel
from coder.devtools.relay import PATH, Upstream, relay
from coder.devtools.scripted import Reply
from coder.events import Event, TextDelta
from coder.toolset import tool
from coder.types import Limits, ModelError, Request
from tests.harness import FAST, drive, serve
from tests.terminal import promptly, until

TOKEN, KEY = "one-token-a-person", "sk-UPSTREAM-KEY"
ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


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
def relaying(upstream: str, **options: Any) -> Iterator[str]:
    """A relay in front of a server with a key; its address."""
    models = {"m": Upstream(upstream, KEY), "mine": Upstream(upstream, KEY, "theirs")}
    with serving(relay(models, [TOKEN, "another"], **options)) as url:
        yield url


def behind(url: str, token: str = TOKEN) -> ChatModel:
    return ChatModel("m", base_url=f"{url}/v1", api_key=token)


def post(
    url: str, body: Any, token: str = TOKEN, method: str = "POST", path: str = PATH, **headers: str
) -> tuple[http.client.HTTPResponse, str]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, data, {"Authorization": f"Bearer {token}"} | headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer, text


@tool
def add(a: int, b: int) -> str:
    """Add.

    a: one
    b: other
    """
    return str(a + b)


def test_an_agent_behind_a_relay_works_as_one_before_the_model() -> None:
    """P57, P58: the same requests, the same events, the same list; the key where the token was."""
    calls = [("add", {"a": 1, "b": 2})]
    types: list[list[str]] = []
    for relayed in (False, True):
        replies = Reply("Let me see.", calls=calls, reasoning="Hm, a sum."), Reply("Three.")
        with serve(*replies) as upstream, relaying(upstream.url) as url:
            model = behind(url) if relayed else ChatModel("m", base_url=upstream.url)
            agent = Agent(model, tools=[add], system="Be brief.", retry=FAST)
            events: list[Event] = []
            agent.subscribe(events.append)
            assert agent.run("add").text == "Three."
            types.append([event.type for event in events])
            assert not relayed or upstream.heads[0]["authorization"] == f"Bearer {KEY}"
            first, second = upstream.requests
            assert [m["role"] for m in second["messages"]][-2:] == ["assistant", "tool"]
            assert first["tools"][0]["function"]["name"] == "add"
    assert types[0] == types[1]


def test_answers_pass_as_they_are_and_a_model_may_have_another_name_there() -> None:
    chunks = [
        b'data: {"choices": [{"delta": {"content": "x"}}], "odd": 1}\n\n',
        b"data: [DONE]\n\n",
    ]
    with serve(Reply(chunks=chunks)) as upstream, relaying(upstream.url) as url:
        answer, text = post(url, ASKED | {"model": "mine", "stream": True, "odd": [1]})
        assert text.encode() == b"".join(chunks)
        assert answer.headers["Content-Type"] == "text/event-stream"
        assert upstream.requests[0] == ASKED | {"model": "theirs", "stream": True, "odd": [1]}
        _, whole = post(url, ASKED)  # the scripted answer is the same, asked for at once
        assert whole == text


@pytest.mark.parametrize(
    ("body", "how", "status", "word"),
    [
        (ASKED, {"token": "wrong"}, 401, "token"),
        (ASKED, {"token": ""}, 401, "token"),
        (ASKED, {"Authorization": "Basic x"}, 401, "token"),
        (ASKED, {"method": "GET"}, 405, "POST"),
        (ASKED, {"path": "/"}, 404, PATH),
        (ASKED | {"model": "gpt-99"}, {}, 404, "not found"),
        (ASKED | {"model": ["m"]}, {}, 400, "model"),
        (b"{oops", {}, 400, "JSON"),
        (b"x" * 3000, {}, 413, "2000"),
        (b"", {"Content-Length": "-1"}, 411, "Content-Length"),
        (b"", {"Content-Length": "9" * 5000}, 413, "2000"),
    ],
)
def test_what_is_not_passed_on_says_why(
    body: Any, how: dict[str, str], status: int, word: str
) -> None:
    with serve(Reply("never")) as upstream, relaying(upstream.url, max_body=2000) as url:
        answer, text = post(url, body, **how)
        error = json.loads(text)["error"]
        assert answer.status == error["code"] == status
        assert word in error["message"] and upstream.requests == []


def test_a_relay_needs_a_token() -> None:
    for tokens in ([], [""]):
        with pytest.raises(ValueError, match="open to everybody"):
            relay({}, tokens)


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (Reply(f"no key {KEY}", status=401, headers={"x-request-id": KEY}), "auth"),
        (Reply("slow down", status=429, headers={"retry-after": "3"}), "rate_limit"),
        (Reply("maximum context length is 5", status=400), "overflow"),
        (Reply("half", cut=2), "incomplete"),
        (Reply("half", cut=2, close="reset"), "incomplete"),
    ],
)
def test_an_error_of_the_server_arrives_as_the_same_error_and_without_the_key(
    reply: Reply, kind: str
) -> None:
    request = Request(ASKED["messages"])
    with (
        serve(reply) as upstream,
        relaying(upstream.url) as url,
        pytest.raises(ModelError) as raised,
    ):
        drive(behind(url).stream(request, Abort()))
    error = raised.value
    assert error.kind == kind and KEY not in f"{error.message}{error.request_id}"
    assert kind != "rate_limit" or (error.retryable and error.retry_after == 3)


def test_a_wrong_token_and_servers_that_are_not_there_are_said() -> None:
    with serve(Reply("x")) as upstream, relaying(upstream.url) as url:
        result = Agent(behind(url, "wrong"), retry=FAST).run("hi")
        assert result.error and result.error.kind == "auth"
        assert "the token is not known" in result.text
    with relaying(upstream.url) as url:
        result = Agent(behind(url), retry=FAST, limits=Limits(max_errors=1)).run("hi")
        assert result.error and result.error.status == 502 and result.error.retryable
        assert "the model's server cannot be reached" in result.text


# ---- who leaves ----------------------------------------------------------------------------------


def test_an_abort_of_the_client_ends_the_request_to_the_model() -> None:
    reply = Reply("a long answer " * 500, pace=0.05)
    with serve(reply) as upstream, relaying(upstream.url) as url, promptly(20):
        agent = Agent(behind(url), retry=FAST)
        agent.subscribe(lambda event: agent.abort() if isinstance(event, TextDelta) else None)
        assert agent.run("hi").stop_reason == "aborted"
        until(lambda: upstream.gone == 1)


# ---- web pages, and tokens that expire -----------------------------------------------------------


def test_a_token_is_asked_for_before_each_call() -> None:
    """P06, P57: one that expires in the middle of a run."""
    tokens = iter([TOKEN, "another", "wrong"])
    given = []

    def token() -> str:
        given.append(next(tokens))
        return given[-1]

    replies = Reply(calls=[("add", {"a": 1, "b": 2})]), Reply("3")
    with serve(*replies) as server, relaying(server.url) as url:
        agent = Agent(behind(url, "old"), tools=[add], get_api_key=token, retry=FAST)
        assert agent.run("go").text == "3" and given == [TOKEN, "another"]
        result = agent.run("again")
        assert result.error and result.error.kind == "auth" and len(server.requests) == 2


def test_a_web_page_of_the_named_origin_may_ask_and_no_other_is_named() -> None:
    app, other = "https://app.example", {"Origin": "https://other.example"}
    with serve(Reply("yes")) as server, relaying(server.url, origin=app) as url:
        answers = [post(url, ASKED, method=each, **other)[0] for each in ("OPTIONS", "POST", "GET")]
        assert [answer.status for answer in answers] == [204, 200, 405]
        assert {answer.headers["Access-Control-Allow-Origin"] for answer in answers} == {app}
        assert {answer.headers["Vary"] for answer in answers} == {"Origin"}
        assert "authorization" in answers[0].headers["Access-Control-Allow-Headers"]
        assert answers[0].headers["Access-Control-Allow-Methods"] == "POST"
        assert len(server.requests) == 1
    with serve(Reply("yes")) as server, relaying(server.url) as url:
        answer, _ = post(url, ASKED, **other)
        assert answer.status == 200 and answer.headers["Access-Control-Allow-Origin"] is None
