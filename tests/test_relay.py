"""The relay between a client and a model's server, over real sockets.

P..: rows of the list of what pi-agent-core does.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from coder.abort import Abort
from coder.agent.agent import Agent
from coder.ai import ChatModel
from coder.devtools.relay import PATHS, Relay
from coder.devtools.scripted import Reply
from coder.events import Event, TextDelta
from coder.types import ModelError, Request
from tests.harness import FAST, ONE, add, drive, serve
from tests.terminal import promptly, until

TOKEN = "one-token-a-person"
KEY = "sk-UPSTREAM-KEY"
ASKED: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
}


@contextmanager
def relaying(upstream: str, origin: str = "") -> Iterator[str]:
    """A relay in front of a server with a key; its address."""
    with Relay(upstream, KEY, [TOKEN, "another"], origin=origin) as server:
        threading.Thread(
            target=server.serve_forever,
            args=(0.02,),
            daemon=True,
        ).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def through(url: str, token: str = TOKEN) -> ChatModel:
    return ChatModel("m", base_url=f"{url}/v1", api_key=token)


def send(
    url: str, body: Any = b"", token: str = TOKEN, method: str = "POST", path: str = "", **head: str
) -> tuple[http.client.HTTPResponse, str]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    path = path or PATHS.get(method, PATHS["POST"])
    connection.request(method, path, data, {"Authorization": f"Bearer {token}"} | head)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer, text


def test_an_agent_with_a_relay_works_as_one_before_the_model() -> None:
    """P57, P58: the same requests, the same events, the same list; the key where the token was."""
    seen: list[list[str]] = []
    for relayed in (False, True):
        replies = Reply("Let me see.", ONE.calls, reasoning="Hm, a sum."), Reply("Three.")
        with serve(*replies) as upstream, relaying(upstream.url) as url:
            model = through(url) if relayed else ChatModel("m", base_url=upstream.url)
            agent = Agent(model, tools=[add], system="Be brief.", retry=FAST)
            events: list[Event] = []
            agent.subscribe(events.append)
            assert agent.run("add").text == "Three."
            seen.append([event.type for event in events])
            assert not relayed or upstream.heads[0]["authorization"] == f"Bearer {KEY}"
            first, second = upstream.requests
            assert [m["role"] for m in second["messages"]][-2:] == ["assistant", "tool"]
            assert first["tools"][0]["function"]["name"] == "add"
    assert seen[0] == seen[1]


def test_answers_pass_as_they_are() -> None:
    chunks = [b'data: {"choices": [{"delta": {"content": "x"}}], "odd": 1}\n\n', b"data: [DONE]\n"]
    with serve(Reply(chunks=chunks)) as upstream, relaying(upstream.url) as url:
        answer, text = send(url, ASKED | {"stream": True, "odd": [1]})
        assert text.encode() == b"".join(chunks)
        assert answer.headers["Content-Type"] == "text/event-stream"
        assert upstream.requests == [ASKED | {"stream": True, "odd": [1]}]
        assert json.loads(send(url, method="GET")[1])["data"][0]["id"] == "script"


@pytest.mark.parametrize(
    ("how", "status", "word"),
    [
        ({"token": "wrong"}, 401, "token"),
        ({"token": ""}, 401, "token"),
        ({"Authorization": "Basic x"}, 401, "token"),
        ({"path": "/"}, 404, PATHS["POST"]),
        ({"body": b"", "Content-Length": "-1"}, 413, "Content-Length"),
        *(
            ({"body": b"", "Content-Length": n}, 413, "Content-Length")
            for n in ("9" * 5000, f"{9**9:030}")
        ),
    ],
)
def test_what_is_not_passed_on_says_why(how: dict[str, Any], status: int, word: str) -> None:
    with serve(Reply("never")) as upstream, relaying(upstream.url) as url:
        answer, text = send(url, **({"body": ASKED} | how))
        error = json.loads(text)["error"]
        assert answer.status == error["code"] == status
        assert word in error["message"]
        assert upstream.requests == []


def test_a_relay_needs_a_token() -> None:
    for tokens in ([], [""]):
        with pytest.raises(ValueError, match="open to everybody"):
            Relay("http://x", KEY, tokens)


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (Reply(f"no key {KEY}", status=401, headers={"x-request-id": KEY}), "auth"),
        (Reply(status=401, chunks=[b'{"error": {"message": "sk-UPSTR', b'EAM-KEY"}}']), "auth"),
        (Reply("slow down", status=429, headers={"retry-after": "3"}), "rate_limit"),
        (Reply("half", cut=2), "incomplete"),
        (Reply("half", cut=2, close="reset"), "incomplete"),
    ],
)
def test_an_error_of_the_server_arrives_without_the_key(reply: Reply, kind: str) -> None:
    with (
        serve(reply) as upstream,
        relaying(upstream.url) as url,
        pytest.raises(ModelError) as raised,
    ):
        drive(through(url).stream(Request(ASKED["messages"]), Abort()))
    error = raised.value
    assert error.kind == kind
    assert KEY not in f"{error.message}{error.request_id}"
    assert kind != "rate_limit" or (error.retryable and error.retry_after == 3)


def test_a_server_that_is_not_there_is_reported() -> None:
    with socket.socket() as taken:  # and not listening, so that nobody else gets the port
        taken.bind(("127.0.0.1", 0))
        with relaying(f"http://127.0.0.1:{taken.getsockname()[1]}/v1") as url:
            answer, text = send(url, ASKED)
    assert answer.status == 502
    assert "the model's server cannot be reached" in text


def test_an_abort_of_the_client_ends_the_request_to_the_model() -> None:
    reply = Reply("a long answer " * 500, pace=0.05)
    with serve(reply) as upstream, relaying(upstream.url) as url, promptly(20):
        agent = Agent(through(url), retry=FAST)
        agent.subscribe(lambda event: agent.abort() if isinstance(event, TextDelta) else None)
        assert agent.run("hi").stop_reason == "aborted"
        until(lambda: upstream.gone == 1)


def test_a_token_is_asked_for_before_each_call() -> None:
    """P06, P57: one that expires in the middle of a run."""
    tokens = iter([TOKEN, "another", "wrong"])
    with serve(ONE, Reply("3")) as server, relaying(server.url) as url:
        agent = Agent(
            through(url, "old"),
            tools=[add],
            get_api_key=lambda: next(tokens),
            retry=FAST,
        )
        assert agent.run("go").text == "3"
        result = agent.run("again")
        assert result.error
        assert result.error.kind == "auth"
        assert len(server.requests) == 2
        assert "the token is not known" in result.text


def test_a_web_page_of_the_named_origin_may_ask_and_no_other_is_named() -> None:
    app = "https://app.example"
    other = {"Origin": "https://other.example"}
    with serve(Reply("yes")) as server, relaying(server.url, app) as url:
        answers = [send(url, ASKED, method=each, **other)[0] for each in ("OPTIONS", "POST")]
        assert [answer.status for answer in answers] == [204, 200]
        assert {answer.headers["Access-Control-Allow-Origin"] for answer in answers} == {app}
        assert {answer.headers["Vary"] for answer in answers} == {"Origin"}
        assert "authorization" in answers[0].headers["Access-Control-Allow-Headers"]
        assert len(server.requests) == 1
    with serve(Reply("yes")) as server, relaying(server.url) as url:
        answer, _ = send(url, ASKED, **other)
        assert answer.status == 200
        assert answer.headers["Access-Control-Allow-Origin"] is None
