"""The model call itself: addresses, keys, proxies, what is sent."""

from __future__ import annotations

import json

import pytest

from coder.ai import ChatModel
from coder.features.scripted import Reply
from coder.loop import run_loop
from tests.harness import FAST, ask, drive, serve


def test_what_is_meant_for_this_machine_goes_through_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(Reply("there")) as proxy, serve(Reply("here")) as server:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        _, result = ask(server)
        assert result.text == "here" and proxy.connections == 0


@pytest.mark.parametrize("url", ["localhost:8080/v1", "http://[::1]x/v1", "/v1", "ftp://127.0.0.1/v1"])
def test_an_address_that_is_none_is_said_at_once(url: str) -> None:
    _, result = drive(run_loop([], ChatModel("m", base_url=url), prompts="go", retry=FAST))
    assert result.error and result.error.kind == "protocol" and "no base URL" in result.text and result.text.startswith("Error: ")


def test_a_server_that_is_not_there_is_named() -> None:
    with serve(Reply("x")) as server:
        url = server.url
    _, result = drive(run_loop([], ChatModel("m", base_url=url), prompts="go", retry=FAST))
    assert result.error and result.error.kind == "network" and f"nothing answers at {url}" in result.error.message


def test_an_address_of_ones_own_never_gets_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-CANARY")
    with serve(Reply("x")) as server:
        ask(server)
        ask(server, model={"api_key": "mine"})
        assert [head["authorization"] for head in server.heads] == ["Bearer none", "Bearer mine"]


def test_extra_fields_and_headers_go_out_with_each_request() -> None:
    with serve(Reply("x")) as server:
        ask(server, model={"extra_body": {"top_k": 3}, "headers": {"x-team": "ours"}})
        assert server.requests[0]["top_k"] == 3 and server.heads[0]["x-team"] == "ours"


@pytest.mark.parametrize("chunk", [
    {"choices": [None]}, {"choices": {"a": 1}}, {"choices": [{"delta": "hi"}]}, {"choices": [{"delta": {"tool_calls": [None]}}]},
    {"choices": [{"delta": {"tool_calls": [{"function": "x"}]}}]},
    {"choices": [{"delta": {"tool_calls": [{"id": 7, "function": {"name": 1}}]}}]},
    {"choices": [{"delta": {}, "finish_reason": 1}]}, {"choices": [], "usage": {"prompt_tokens_details": [1]}},
    {"choices": [], "usage": {"prompt_tokens": float("nan")}}], ids=lambda chunk: json.dumps(chunk)[:60])
def test_a_malformed_answer_is_a_failed_attempt_and_breaks_nothing(chunk: object) -> None:
    bad = Reply(chunks=[b"data: " + json.dumps(chunk).encode() + b"\n\n", b"data: [DONE]\n\n"])
    with serve(bad, Reply("fine")) as server:
        _, result = ask(server)
    assert result.text == "fine" or result.error


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' * 100_000])
def test_arguments_and_events_of_any_depth_break_nothing(text: str) -> None:
    with serve(Reply(calls=[("x", text)]), Reply("fine")) as server:
        _, result = ask(server)
    assert result.text == "fine"
    with serve(Reply(chunks=[f"data: {text}\n\n".encode()]), Reply("fine")) as server:
        _, result = ask(server)
    assert result.text == "fine"


def test_what_the_environment_holds_for_another_server_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "Authorization: Bearer REAL\nX-Gateway-Key: gw-secret")
    monkeypatch.setenv("OPENAI_ORG_ID", "org-secret")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "proj-secret")
    with serve(Reply("x")) as server:
        ask(server, model={"api_key": "mine"})
        sent = json.dumps(server.heads)
    assert "secret" not in sent and "REAL" not in sent and server.heads[0]["authorization"] == "Bearer mine"


def test_a_query_in_the_address_and_a_header_for_the_key_go_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Azure's older addresses."""
    with serve(Reply("x")) as server:
        chat = ChatModel("m", base_url=f"{server.url}?api-version=2024-10-21", api_key="mine", profile={"key_header": "api-key"})
        drive(run_loop([], chat, prompts="go", retry=FAST))
        assert server.paths == ["/v1/chat/completions?api-version=2024-10-21"]
        assert (server.heads[0]["api-key"], server.heads[0]["authorization"]) == ("mine", "Bearer mine")


def test_a_host_that_nobody_knows_is_named() -> None:
    _, result = drive(run_loop([], ChatModel("m", base_url="http://no-such-host.invalid/v1"), prompts="go", retry=FAST))
    assert result.error and result.error.kind == "network" and "'no-such-host.invalid'" in result.text
