"""The demo: the script behind its server, what it says when tools fail, and the server for other clients and on bad days."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from coder.devtools import demo
from coder.devtools.demo import PROMPT, demo_server, scratch_project, script
from coder.devtools.scripted import Body, Reply, ScriptedServer
from coder.tools.bash import bash
from coder.tools.edit import edit
from coder.tools.files import ls, read
from coder.toolset import Tool, Toolset, tool
from coder.types import Limits, RunResult, ToolResult
from tests.harness import ask, assert_all_valid, serve
from tests.test_cli import Place, eventually

SUCCESS = re.compile(r"repaired|tests? pass", re.I)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The broken project, in a folder that is gone after the test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return scratch_project()


def suite(folder: Path) -> subprocess.CompletedProcess[str]:
    """The project's own tests, run by somebody else."""
    return subprocess.run(
        [sys.executable, "-m", "unittest"], cwd=folder, capture_output=True, text=True, timeout=60
    )


# ---- the project ---------------------------------------------------------------------------------


def test_the_project_of_the_demo_is_broken_before(project: Path) -> None:
    before = suite(project)
    assert before.returncode != 0
    assert (
        "NameError" in before.stderr
        and "ZeroDivisionError" in before.stderr
        and "FAILED" in before.stderr
    )


def test_the_demo_does_not_touch_the_original(project: Path) -> None:
    original = Path(demo.__file__).parent / "demo_project"
    assert project.parent != original.parent
    assert {path.name for path in project.iterdir()} == {
        path.name for path in original.iterdir() if path.is_file()
    }
    (project / "stats.py").unlink()
    assert (original / "stats.py").exists()


# ---- what the script says ------------------------------------------------------------------------


def run_demo(project: Path, *tools: Tool) -> RunResult:
    """A run over the project with these tools instead of ours of the same name."""
    ours = {each.name: each for each in (ls, bash, read, edit)}
    with demo_server(pace=0) as server:
        toolset = Toolset((ours | {each.name: each for each in tools}).values(), cwd=project)
        _, result = ask(server, PROMPT, toolset, limits=Limits(max_steps=40))
    assert_all_valid(server)
    return result


def texts(result: RunResult) -> str:
    """All that the model said."""
    return "\n".join(
        message["content"] or "" for message in result.messages if message["role"] == "assistant"
    )


def calls(result: RunResult) -> list[str]:
    return [
        call["function"]["name"]
        for message in result.messages
        for call in message.get("tool_calls") or ()
    ]


def test_with_good_tools_it_repairs_and_reports_each_change(project: Path) -> None:
    result = run_demo(project)
    assert result.stop_reason == "stop"
    assert calls(result) == ["ls", "bash", "read", "edit", "edit", "bash"]
    assert result.text.count("\n- stats.py: ") == 2 and suite(project).returncode == 0
    assert texts(result).startswith("I am a script, not a language model")
    again = run_demo(project)
    assert calls(again) == ["ls", "bash"] and not SUCCESS.search(texts(again))
    assert again.text.endswith("> OK")


def tool_that_says(name: str, output: str, is_error: bool = False) -> Tool:
    @tool(name=name)
    def fake(path: str = "", command: str = "", old_string: str = "", new_string: str = "") -> Any:
        """Say something.

        path: unused
        command: unused
        old_string: unused
        new_string: unused
        """
        return ToolResult(output, is_error)

    return fake


@pytest.mark.parametrize(
    ("name", "output", "is_error"),
    [
        ("ls", "(empty)", False),
        ("bash", "purple monkey", False),
        ("bash", "", False),
        ("bash", "Denied: not now", True),
        ("bash", "Ran 4 tests in 0.1s\n\nFAILED (errors=1)\n[exit code 1]", True),
        ("read", "1\tprint('hello')", False),
        ("edit", "the disk is on fire", True),
        ("edit", "Edited stats.py.", False),  # a lie, which the tests show
    ],
)
def test_a_broken_tool_is_reported_and_no_success_is_claimed(
    project: Path, name: str, output: str, is_error: bool
) -> None:
    result = run_demo(project, tool_that_says(name, output, is_error))
    assert result.stop_reason == "stop" and not SUCCESS.search(texts(result)), texts(result)
    assert "not what my script expects" in result.text and suite(project).returncode != 0
    assert not output or name == "edit" or output.splitlines()[-1] in result.text


def test_without_its_tools_it_says_what_it_is_and_which_it_needs() -> None:
    asked: Body = {"messages": [{"role": "user", "content": "hi"}]}
    for names, missing in (("", "bash, edit, ls, read"), ("ls bash edit", "read")):
        tools = [{"type": "function", "function": {"name": name}} for name in names.split()]
        assert script(asked | {"tools": tools}) == Reply(
            f"I am a script, not a language model. I need the tools {missing}, "
            "which were not offered."
        )


# ---- the server alone, for any client ------------------------------------------------------------


@contextlib.contextmanager
def serving(place: Place, *arguments: str) -> Iterator[tuple[str, int, subprocess.Popen[str]]]:
    """`python -m coder demo ...`: (what it says, its port, the process)."""
    child = place.start("demo", *arguments)
    assert child.stderr
    try:
        lines = [child.stderr.readline() for _ in range(3)]
        found = re.search(r"http://127\.0\.0\.1:(\d+)/v1 ", lines[0])
        assert found, lines
        yield "".join(lines), int(found[1]), child
    finally:
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=20)
    assert child.returncode == 0


def post(port: int, body: Any, path: str = "/v1/chat/completions") -> tuple[int, str, str]:
    """(status, content type, text) of a plain request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(
            "POST",
            path,
            body if isinstance(body, str) else json.dumps(body),
            {"Content-Type": "application/json"},
        )
        answer = connection.getresponse()
        return answer.status, answer.headers.get_content_type(), answer.read().decode()
    finally:
        connection.close()


HELLO = {"model": "script", "messages": [{"role": "user", "content": "hi"}]}
OFFERED = {
    "tools": [
        {"type": "function", "function": {"name": name, "parameters": {}}}
        for name in ("ls", "bash", "read", "edit")
    ]
}


def test_the_server_alone_serves_any_client_and_ends_with_ctrl_c(place: Place) -> None:
    with serving(place, "--port", "0") as (said, port, _):
        assert "no language model" in said and f"OPENAI_BASE_URL=http://127.0.0.1:{port}/v1" in said
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=20) as answer:
            assert [model["id"] for model in json.load(answer)["data"]] == ["script"]
        whole(port)
        streamed(port)
        for method, path in (
            ("GET", "/v1/nothing"),
            ("GET", "/"),
            ("POST", "/v1/embeddings"),
            ("POST", "/v1/responses"),
        ):
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}{path}", b"{}" if method == "POST" else None, method=method
            )
            with pytest.raises(urllib.error.HTTPError) as raised:
                urllib.request.urlopen(request, timeout=20)
            assert raised.value.code == 404 and path in json.load(raised.value)["error"]["message"]
        for nonsense in ("{", "", "[]", "null", '{"model": "script"}', '{"messages": "hi"}'):
            status, kind, text = post(port, nonsense)
            assert (status, kind) == (400, "application/json") and json.loads(text)["error"][
                "message"
            ]
        whole(port)


def whole(port: int) -> None:
    """A request that asks for no stream."""
    status, kind, text = post(port, HELLO | OFFERED)
    assert (status, kind) == (200, "application/json")
    answer = json.loads(text)
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"].startswith(
        "I am a script, not a language model"
    )
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]) == ("function", {"name": "ls", "arguments": "{}"})
    assert (
        answer["usage"]["total_tokens"]
        == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]
        > 0
    )


def streamed(port: int) -> None:
    """A stream, with its usage only where it was asked for: a simple client reads choices[0] of each event."""
    for asked, expected in (({}, 0), ({"stream_options": {"include_usage": True}}, 1)):
        status, kind, text = post(port, HELLO | OFFERED | asked | {"stream": True})
        assert (status, kind) == (200, "text/event-stream")
        *events, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert done == "[DONE]"
        chunks = [json.loads(event) for event in events]
        assert [bool(chunk["choices"]) for chunk in chunks].count(False) == expected
        said = "".join(
            chunk["choices"][0]["delta"].get("content") or ""
            for chunk in chunks
            if chunk["choices"]
        )
        assert said.startswith("I am a script, not a language model")
        assert chunks[-1 - expected]["choices"][0]["finish_reason"] == "tool_calls"
        assert [chunk["usage"]["total_tokens"] > 0 for chunk in chunks if chunk.get("usage")] == [
            True
        ] * expected


def test_one_shot_without_leave_to_run_commands_claims_nothing(place: Place, project: Path) -> None:
    with demo_server(pace=0) as server:
        done = place.coder("-C", str(project), PROMPT, server=server)
    assert done.returncode == 0 and "Denied: bash needs a yes" in done.stdout
    assert not SUCCESS.search(done.stdout) and suite(project).returncode != 0


def test_a_port_in_use_is_said_in_one_line(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = place.coder("demo", "--port", str(port))
    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "",
        f"port {port}: Address already in use\n",
    )


def test_demo_as_a_first_word_of_a_prompt_is_a_prompt(place: Place) -> None:
    with serve(Reply("Hello.")) as server:
        done = place.coder("demo", "of", "what?", server=server)
    assert (done.returncode, done.stdout) == (0, "Hello.\n")


# ---- the server's bad days -----------------------------------------------------------------------


class Raw:
    """A request over a bare socket, and what comes back byte for byte."""

    def __init__(self, server: ScriptedServer, stream: bool = True) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=20)
        body = json.dumps(HELLO | {"stream": stream}).encode()
        self.socket.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
            % len(body)
            + body
        )
        self.data = b""

    def until(self, enough: Callable[[bytes], bool]) -> bytes:
        while not enough(self.data):
            piece = self.socket.recv(65536)
            assert piece, self.data
            self.data += piece
        return self.data

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def test_a_429_comes_with_its_headers_and_text() -> None:
    with (
        serve(Reply("slow down", status=429, headers={"retry-after": "7"})) as server,
        Raw(server) as raw,
    ):
        head, _, body = raw.until(lambda data: data.endswith(b"}}")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 429 ") and b"retry-after: 7" in head
    assert json.loads(body) == {"error": {"message": "slow down", "code": 429}}


def test_a_stall_leaves_the_connection_open_and_silent_until_the_client_goes() -> None:
    with serve(Reply("one two", cut=2, close="hang")) as server:
        with Raw(server) as raw:
            raw.until(lambda data: b'"one"' in data)
            raw.socket.settimeout(0.3)
            with pytest.raises(TimeoutError):
                raw.socket.recv(1)
            assert server.gone == 0
        eventually(lambda: server.gone == 1)


def test_a_cut_stream_ends_properly_and_too_early() -> None:
    with serve(Reply("one two three", cut=3)) as server, Raw(server) as raw:
        data = raw.until(lambda data: data.endswith(b"0\r\n\r\n"))
    assert b'"one"' in data and b'" two"' in data and b"three" not in data and b"DONE" not in data


@pytest.mark.parametrize(
    ("reply", "before"),
    [(Reply("one two", cut=2, close="reset"), b'"one"'), (Reply(status=0), b"")],
)
def test_a_reset_is_a_reset_after_what_was_sent(reply: Reply, before: bytes) -> None:
    with serve(reply) as server, Raw(server) as raw:
        with pytest.raises(ConnectionResetError):
            raw.until(lambda data: False)
        assert before in raw.data
        assert bool(raw.data) == bool(before)


def test_bad_json_and_other_bytes_arrive_as_they_are_in_as_many_writes() -> None:
    chunks = [b"data: {nonsense\n\n", b"", b"\xff\xfe\0", b"data: [DONE]\n\n"]
    with serve(Reply(chunks=chunks, pace=0.01)) as server, Raw(server) as raw:
        body = raw.until(lambda data: data.endswith(b"0\r\n\r\n")).partition(b"\r\n\r\n")[2]
    assert (
        body
        == b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks if chunk)
        + b"0\r\n\r\n"
    )
    with serve(Reply("", [("ls", "{nonsense")])) as server:
        assert (
            json.loads(post(server.port, HELLO)[2])["choices"][0]["message"]["tool_calls"][0][
                "function"
            ]["arguments"]
            == "{nonsense"
        )


def test_a_connection_serves_many_requests_and_the_last_reply_repeats() -> None:
    with serve(Reply("one"), Reply("two", status=503), Reply("three")) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        got = []
        for _ in range(4):
            connection.request("POST", "/v1/chat/completions", json.dumps(HELLO))
            got.append(json.loads(connection.getresponse().read()))
        connection.close()
    assert [
        answer["choices"][0]["message"]["content"]
        if "choices" in answer
        else answer["error"]["message"]
        for answer in got
    ] == ["one", "two", "three", "three"]
    assert (server.connections, len(server.requests), len(server.heads), server.gone) == (
        1,
        4,
        4,
        0,
    )


def test_a_script_sees_the_body_and_a_client_that_breaks_off_is_no_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    seen: list[Body] = []

    def script(body: Body) -> Reply:
        seen.append(body)
        return Reply("word " * 2000, pace=0.001)

    with serve(script) as server:
        with Raw(server) as raw:
            raw.until(lambda data: b"word" in data)
            raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        eventually(lambda: server.gone == 1)
        assert seen == [HELLO | {"stream": True}] == server.requests
    assert capfd.readouterr().err == ""


# ---- from end to end: both take their time, since the script speaks at a pace that one can follow


Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module", autouse=True)
def demonstrations(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, tuple[Place, Future[Done]]]]:
    """They run beside the other tests."""
    alone, other = Place(tmp_path_factory.mktemp("demo")), Place(tmp_path_factory.mktemp("client"))

    def with_another_server() -> Done:
        shutil.copytree(Path(demo.__file__).parent / "demo_project", other.ws, dirs_exist_ok=True)
        with serving(other, "--port", "0") as (_, port, _):
            return other.coder(
                "-y", PROMPT, OPENAI_BASE_URL=f"http://127.0.0.1:{port}/v1", OPENAI_MODEL="script"
            )

    nowhere = dict.fromkeys(
        ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9"
    )
    with ThreadPoolExecutor(2) as pool:
        yield {
            "alone": (
                alone,
                pool.submit(alone.coder, "--demo", CODER_RETRY_BASE="0.01", **nowhere),
            ),
            "client": (other, pool.submit(with_another_server)),
        }


def test_the_demo_repairs_its_project_without_a_key_or_a_network(
    demonstrations: dict[str, tuple[Place, Future[Done]]],
) -> None:
    """Every proxy that was set led nowhere."""
    place, future = demonstrations["alone"]
    done = future.result()
    assert done.returncode == 0, done.stderr
    found = re.search(r"^See for yourself: cd (\S+) && python3 -m unittest$", done.stderr, re.M)
    assert found
    repaired = Path(found[1])
    assert repaired.parent == place.temp and list(place.ws.iterdir()) == []  # a scratch copy
    after = suite(repaired)
    assert after.returncode == 0 and "Ran 4 tests" in after.stderr and "OK" in after.stderr
    assert done.stdout.startswith("Repaired, and all 4 tests pass now.")
    assert "is now `return sum(values) / len(values) if len(values) else 0`" in done.stdout
    assert "A script answers in the place of a language model" in done.stderr
    assert "I am a script, not a language model" in done.stderr


def test_one_shot_against_the_server_alone_repairs_a_project(
    demonstrations: dict[str, tuple[Place, Future[Done]]],
) -> None:
    place, future = demonstrations["client"]
    done = future.result()
    assert done.returncode == 0 and done.stdout.startswith("Repaired, and all 4 tests pass now.")
    assert "I am a script, not a language model" in done.stderr  # what it says on the way
    assert suite(place.ws).returncode == 0
