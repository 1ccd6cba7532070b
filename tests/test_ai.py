"""The model call itself: addresses, keys, proxies, what is sent."""

from __future__ import annotations

import json
import threading

import pytest

from coder import __version__, ai
from coder.abort import Abort
from coder.ai import ChatModel
from coder.devtools.scripted import Body, Reply, ScriptedServer
from coder.events import drain
from coder.history import user
from coder.loop import run_loop
from coder.providers.errors import RetryPolicy, classify
from coder.types import Request, RunResult
from tests.harness import FAST, ask, ask_model, drive, serve
from tests.terminal import promptly, until


def test_what_is_for_this_machine_goes_through_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(Reply("there")) as proxy, serve(Reply("here")) as server:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        _, result = ask(server)
        assert result.text == "here"
        assert proxy.connections == 0


@pytest.mark.parametrize(
    "url", ["localhost:8080/v1", "http://h\u00e4/v1", "/v1", "ftp://127.0.0.1/v1", "http://h:x/v1"]
)
def test_an_address_that_is_none_is_said_at_once(url: str) -> None:
    _, result = drive(
        run_loop(
            [],
            ChatModel("m", base_url=url),
            prompt="go",
            retry=FAST,
        )
    )
    assert result.error
    assert result.error.kind == "protocol"
    assert "no base URL" in result.text
    assert result.text.startswith("Error: ")


def test_extra_fields_and_headers_go_out_with_each_request() -> None:
    with serve(Reply("x")) as server:
        extra = {"top_k": 3, "messages": []}
        ask(server, model={"extra_body": extra, "headers": {"x-team": "ours"}})
        chat = ChatModel("m", base_url=server.url, extra_body=extra)
        assert chat.encoder.encode(Request([user("hi")])).count(b'"messages"') == 1
        assert server.requests[0]["top_k"] == 3
        assert server.heads[0]["x-team"] == "ours"
        assert server.heads[0]["user-agent"] == f"coder/{__version__}"


def test_what_the_environment_has_for_others_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    headers = "Authorization: Bearer REAL\nX-Gateway-Key: gw-secret"
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", headers)
    monkeypatch.setenv("OPENAI_ORG_ID", "org-secret")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "proj-secret")
    with serve(Reply("x")) as server:
        for key in (None, "mine"):
            ask(server, model={"api_key": key})
        sent = json.dumps(server.heads)
    assert "secret" not in sent
    assert "REAL" not in sent
    assert [head["authorization"] for head in server.heads] == ["Bearer none", "Bearer mine"]


def test_a_query_and_a_header_for_the_key_go_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Azure's older addresses."""
    with serve(Reply("x")) as server:
        url = f"{server.url}?api-version=2024-10-21"
        profile = {"key_header": "api-key"}
        chat = ChatModel("m", base_url=url, api_key="mine", profile=profile)
        ask_model(chat)
        assert server.paths == ["/v1/chat/completions?api-version=2024-10-21"]
        [head] = server.heads
        assert head["api-key"] == "mine"
        assert head["authorization"] == "Bearer mine"


def test_the_example_at_the_top_of_the_file_is_put_together_as_it_says() -> None:
    doc = ai.__doc__ or ""
    stream = doc.partition("cut anywhere:\n")[2].partition("Each piece")[0]
    lines = [" ".join(event.split()) for event in stream.split("data: ")[1:]]
    body = "".join(f"data: {line}\n\n" for line in lines).encode()
    with serve(Reply(chunks=[body])) as server:
        chat = ChatModel("m", base_url=server.url)
        answer = drain(
            chat.stream(
                Request([user("What is 2 + 3?")]),
                Abort(),
            )
        )
    written = doc.partition("enters the conversation:\n")[2].partition("Read ")[0]
    assert answer.message == json.loads(written)
    assert [(call.name, call.arguments) for call in answer.calls] == [("add", {"a": 2, "b": 3})]


def test_an_abort_of_one_run_leaves_another_of_the_same_model_alone() -> None:
    def script(body: Body) -> Reply:
        if "slow" in body["messages"][-1]["content"]:
            return Reply("a long answer " * 30, pace=0.02)
        silent = "silent" in body["messages"][-1]["content"]
        return Reply("never", hold=30) if silent else Reply("quick")

    with serve(script) as server:
        chat = ChatModel("m", base_url=server.url)
        abort = Abort()
        results = dict[str, RunResult]()

        def run(prompt: str, token: Abort) -> None:
            results[prompt] = drive(
                run_loop(
                    [],
                    chat,
                    prompt=prompt,
                    retry=FAST,
                    abort=token,
                )
            )[1]

        run("quick", Abort())
        workers = [
            threading.Thread(target=run, args=(prompt, token))
            for prompt, token in (("slow", Abort()), ("silent", abort))
        ]
        for worker in workers:
            worker.start()
            until(lambda: len(server.requests) > workers.index(worker) + 1)  # noqa: B023 (asked at once)
        abort.set()
        for worker in workers:
            worker.join(30)
        assert results["silent"].stop_reason == "aborted"
        assert results["slow"].text == "a long answer " * 30


ENDLESS = ("retry-after: 1." + "1." * 50_000, "try again in 1." + "1." * 50_000)
ENDLESS += ("retrydelay" + " " * 100_000, "<html>" + "<title>" * 30_000)
ENDLESS += ("model " * 50_000, "balance " * 50_000)


@pytest.mark.parametrize("text", ENDLESS, ids=lambda text: text[:12])
def test_no_text_of_a_server_holds_us_up(text: str) -> None:
    with promptly():
        classify(400, {"error": {"message": text}}, {"retry-after": text})
        classify(500, text, {"retry-after": text, "x-request-id": text})


@pytest.mark.parametrize("key", ["sk-SECRET-\n-KEY", "sk-SECRET-é", "sk-SECRET\0"])
def test_a_key_that_no_header_can_carry_is_said_and_not_shown(key: str) -> None:
    with serve(Reply("x")) as server:
        events, result = ask(server, model={"api_key": key})
        assert not server.requests
        assert "SECRET" not in str(events)
        assert result.error
        assert result.error.kind == "auth"
        assert ask(server, model={"api_key": " sk-SECRET \n"})[1].text == "x"
        assert server.heads[0]["authorization"] == "Bearer sk-SECRET"


def test_a_missing_key_or_model_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    _, result = drive(
        run_loop(
            [],
            ChatModel("m"),
            prompt="go",
            retry=FAST,
        )
    )
    assert result.error
    assert result.error.kind == "auth"
    assert result.steps == 1
    assert result.text.startswith("Error: no key: set OPENAI_API_KEY")
    with pytest.raises(ValueError, match="no model"):
        ChatModel("")


def test_a_key_is_shown_in_no_error() -> None:
    secret = "sk-SECRET-12345678"
    moved = Reply("there", status=302, headers={"location": "http://x/?key=SECRET"})
    refused = Reply(f"Incorrect key {secret}", status=401, headers={"x-request-id": secret})
    with serve(refused, moved) as server:
        errors = [
            ask(
                server,
                model={"api_key": secret},
            )[1].error
            for _ in range(2)
        ]
    assert errors[0]
    assert errors[0].request_id == "***"
    said = [str(error) for error in errors]
    address = server.url.replace("http://", "http://user:SECRET@") + "?key=SECRET"
    said += [
        drive(
            run_loop(
                [],
                ChatModel("m", base_url=address),
                prompt="go",
                retry=FAST,
            )
        )[1].text
    ]
    assert "SECRET" not in " ".join(said)
    assert "***" in said[0]
    assert "redirects to http://x" in said[1]
    assert "nothing answers" in said[2]


def test_a_server_that_never_ends_to_load_is_given_up() -> None:
    with serve(Reply("Loading model", status=503)) as server, promptly(20):
        _, result = ask(server, retry=RetryPolicy(base=0, loading=1.0))
        assert result.error
        assert result.error.loading
        assert 5 <= len(server.requests) < 40


def test_a_server_without_a_script_says_so() -> None:
    with ScriptedServer([]) as server:
        assert ask(server)[1].text == "(the script is empty)"
