"""The demo: the script of its server, what it says when tools fail, and the server for other
clients and on bad days."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coder.cli.main import run
from coder.devtools.demo import PROMPT, demo_server, scratch_project, script
from coder.devtools.scripted import Reply
from coder.tools.bash import bash
from coder.tools.edit import edit
from coder.tools.files import ls, read
from coder.toolset import Tool, Toolset
from coder.types import Limits, RunResult
from tests.harness import ask, assert_all_valid, serve
from tests.test_cli import Place

SUCCESS = re.compile(r"repaired|tests? pass", re.I)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The broken project, in a folder that is gone after the test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return scratch_project()


def suite(folder: Path) -> subprocess.CompletedProcess[str]:
    """The project's own tests."""
    argv = [sys.executable, "-m", "unittest"]
    return subprocess.run(
        argv,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )


# ---- what the script says ------------------------------------------------------------------------


def run_demo(project: Path, *tools: Tool) -> RunResult:
    """A run over the project with these tools instead of ours of the same name."""
    ours = {each.name: each for each in (ls, bash, read, edit, *tools)}
    with demo_server(pace=0) as server:
        toolset = Toolset(ours.values(), cwd=project)
        _, result = ask(server, PROMPT, toolset, limits=Limits(max_steps=40))
    assert_all_valid(server)
    return result


def answers(result: RunResult) -> str:
    """All that the model said."""
    messages = [message for message in result.messages if message["role"] == "assistant"]
    return "\n".join(message["content"] or "" for message in messages)


def test_with_good_tools_it_repairs_a_copy_and_reports_each_change(project: Path) -> None:
    before = suite(project).stderr
    assert "NameError" in before
    assert "ZeroDivisionError" in before
    assert "FAILED" in before
    result = run_demo(project)
    assert result.stop_reason == "stop"
    assert result.steps == 6
    assert result.text.count("\n- stats.py: ") == 2
    assert suite(project).returncode == 0
    assert answers(result).startswith("I am a script, not a language model")
    again = run_demo(project)
    assert again.steps == 3
    assert not SUCCESS.search(answers(again))
    assert again.text.rstrip().endswith("OK")


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("ls", "(empty)"),
        ("bash", "Denied: not now"),
        ("bash", "Ran 4 tests in 0.1s\n\nFAILED (errors=1)\n[exit code 1]"),
        ("edit", "Edited stats.py."),  # a lie, which the tests show
    ],
)
def test_a_broken_tool_is_reported_as_no_success(project: Path, name: str, output: str) -> None:
    parameters = {"properties": {}, "additionalProperties": True}
    result = run_demo(project, Tool(name, "Say something.", parameters, lambda **_: output))
    assert result.stop_reason == "stop", answers(result)
    assert not SUCCESS.search(answers(result)), answers(result)
    assert "not what my script expects" in result.text
    assert suite(project).returncode != 0
    assert name == "edit" or output.splitlines()[-1] in result.text


def test_without_its_tools_it_says_what_it_is_and_which_it_needs() -> None:
    tools = [
        {
            "type": "function",
            "function": {"name": name},
        }
        for name in ("ls", "bash", "edit")
    ]
    text = script(
        {
            "messages": [{"role": "user", "content": "hi"}],
            "tools": tools,
        }
    ).text
    assert text.startswith("I am a script")
    assert "the tools read, which were not offered" in text


# ---- the program ---------------------------------------------------------------------------------


def test_the_demo_repairs_its_project_without_a_key_or_a_network(tmp_path: Path) -> None:
    place = Place(tmp_path)
    nowhere = dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY"), "http://127.0.0.1:9")
    done = place.coder("--demo", CODER_RETRY_BASE="0.01", **nowhere)
    assert done.returncode == 0, done.stderr
    found = re.search(r"^See for yourself: cd (\S+) && python3 -m unittest$", done.stderr, re.M)
    assert found
    repaired = Path(found[1])
    assert repaired.parent == place.temp and list(place.ws.iterdir()) == []  # a scratch copy
    assert suite(repaired).returncode == 0
    assert done.stdout.startswith("Repaired, and all 4 tests pass now.")
    assert "A script answers instead of a language model" in done.stderr


def test_the_server_alone_serves_any_client_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    child = Place(tmp_path).start("demo", "--port", "0")
    assert child.stderr
    try:
        lines = [child.stderr.readline() for _ in range(3)]
        found = re.search(r"OPENAI_BASE_URL=http://127\.0\.0\.1:(\d+)/v1", "".join(lines))
        assert found
        assert "no language model" in lines[0]
        assert " python -m coder " in lines[2]
        status, text = request(int(found[1]), HELLO)
        assert status == 200
        assert "I am a script" in text
    finally:
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=20)
    assert child.returncode == 0


def test_a_port_in_use_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(["demo", "--port", str(port)]) == 2
    usage, line = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: ")
    assert usage.endswith(" demo [-h] [--port PORT]")
    assert line == f"coder: port {port}: Address already in use"


# ---- the server ----------------------------------------------------------------------------------

HELLO = {"model": "script", "messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"


def request(port: int, body: Any, path: str = PATH, method: str = "POST") -> tuple[int, str]:
    """(status, text)."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(
        method,
        path,
        body if isinstance(body, str) else json.dumps(body),
    )
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


@pytest.mark.parametrize("body", ["3", '{"messages":[3]}', '{"messages":[{}]}', "{", "{}"])
def test_what_is_no_request_is_an_error_of_the_client(body: str) -> None:
    with demo_server() as server:
        status, text = request(server.port, body)
        assert status == 400
        assert "messages" in text
        assert not server.requests


def test_it_answers_as_a_stream_and_at_once() -> None:
    """A stream has its usage only if it was asked for: simple clients read choices[0]."""
    with serve(
        Reply(
            "I say",
            [("ls", {}), ("read", "{nonsense")],
        )
    ) as server:
        answer = json.loads(request(server.port, HELLO)[1])
        for options, expected in (
            ({}, 0),
            ({"include_usage": True}, 1),
        ):
            status, text = request(server.port, HELLO | {"stream": True, "stream_options": options})
            *events, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
            chunks = [json.loads(event) for event in events]
            assert status == 200
            assert done == "[DONE]"
            assert sum(not chunk["choices"] for chunk in chunks) == expected
            assert chunks[-1 - expected]["choices"][0]["finish_reason"] == "tool_calls"
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert answer["usage"]["total_tokens"] > 0
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    assert choice["message"]["content"] == "I say"
    assert [each["arguments"] for each in functions] == ["{}", "{nonsense"]
