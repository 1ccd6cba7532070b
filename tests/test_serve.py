"""`coder serve` from outside: sessions, streams, questions, restarts, and whoever must not come
in."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coder.devtools.scripted import ScriptedServer
from tests.harness import sent
from tests.late import Late, needs
from tests.serving import ENDS, TOKEN, Served, reply_by_prompt, until_type
from tests.terminal import OneShot, until

needs("starlette", "uvicorn", extra="serve")
serve_openapi = Late("coder.doors.serve_openapi")
serve_routes = Late("coder.doors.serve_routes")
ROOT = Path(__file__).parents[1]


@pytest.fixture
def model() -> Iterator[ScriptedServer]:
    with ScriptedServer(reply_by_prompt) as made:
        yield made


@pytest.fixture
def served(tmp_path: Path, model: ScriptedServer) -> Iterator[Served]:
    with Served(tmp_path, model) as made:
        yield made


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for the tests that leave no file and no open question behind."""
    folder = tmp_path_factory.mktemp("shared")
    with ScriptedServer(reply_by_prompt) as model, Served(folder, model) as made:
        yield made


def types_of(events: list[tuple[str, Any]]) -> list[str]:
    return [event["type"] for _, event in events]


# ---- a run ---------------------------------------------------------------------------------------


def test_a_prompt_is_answered_after_two_permissions(served: Served) -> None:
    session = served.new()
    served.prompt(session, f"write it, my key is {served.key}")
    asked = served.answer()
    assert asked["permission"] == "edit"
    assert "+<b>two</b>" in asked["metadata"]["diff"]
    assert not (served.ws / "made.txt").exists() or served.permission()["id"] != asked["id"]
    second = served.answer()
    assert second["permission"] == "bash"
    assert second["title"] == "touch by-command.txt"
    until(lambda: served.is_idle(session))
    assert (served.ws / "made.txt").exists()
    assert (served.ws / "by-command.txt").exists()
    prompt, answer, end = served.get(f"/session/{session}/message")
    assert prompt["info"]["role"] == "user"
    assert [part["type"] for part in answer["parts"]] == ["text", "tool", "tool"]
    states = [part["state"]["status"] for part in answer["parts"][1:]]
    assert states == ["completed", "completed"]
    assert end["parts"][0]["text"].startswith("Done")
    assert served.get("/session")[0]["id"] == session


def test_the_answer_to_a_prompt_is_the_last_message(shared: Served) -> None:
    session = shared.new()
    parts = [{"type": "text", "text": "hello"}]
    answer = shared.post(f"/session/{session}/message", parts=parts)
    assert answer["info"]["role"] == "assistant"
    assert answer["info"]["tokens"]["input"] > 0
    assert answer["parts"][0]["text"].startswith("# Hello")


def test_a_prompt_can_name_an_agent_and_hold_an_image(shared: Served) -> None:
    session = shared.new()
    url = "data:image/png;base64,iVBORw0KGgo="
    parts = [
        {"type": "text", "text": "hello"},
        {"type": "file", "mime": "image/png", "url": url},
    ]
    shared.post(f"/session/{session}/message", parts=parts, agent="plan")
    [_, image] = sent(shared.server)[-1]
    assert image["image_url"]["url"] == url
    names = {tool["function"]["name"] for tool in shared.server.requests[-1]["tools"]}
    assert "read" in names
    assert "write" not in names


def test_a_question_is_answered_by_whoever_comes_first(served: Served) -> None:
    session = served.new()
    served.prompt(session, "write")
    asked = served.permission()
    path = f"/session/{session}/permissions/{asked['id']}"
    assert served.ask("POST", path, {"response": "yes"})[0] == 400
    assert served.ask("POST", path, {"response": "reject"}) == (200, True)
    status, problem = served.ask("POST", path, {"response": "once"})
    assert status == 404
    assert "waits" in problem["data"]["message"]
    served.finish(session)
    assert not (served.ws / "made.txt").exists()


def test_an_answer_is_for_a_question_of_its_kind_and_session(served: Served) -> None:
    session = served.new()
    other = served.new()
    served.prompt(session, "write")
    asked = served.permission()["id"]
    answer = {"answers": [["always"]]}
    assert served.ask("POST", f"/question/{asked}/reply", answer)[0] == 404
    path = f"/session/{other}/permissions/{asked}"
    assert served.ask("POST", path, {"response": "once"})[0] == 404
    assert served.permission()["id"] == asked


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
@pytest.mark.parametrize("prefix", ["", "setsid --wait "], ids=["plain", "session of its own"])
def test_a_command_cannot_answer_with_the_token(served: Served, prefix: str) -> None:
    session = served.new()
    ask = (
        f"{sys.executable} -c 'import urllib.request as r; "
        f'print(r.urlopen(r.Request("{served.url}permission", '
        f'headers={{"Authorization": "Bearer {TOKEN}"}})).read())\''
    )
    served.prompt(session, f"itself: {prefix}{ask}")
    served.answer()
    until(lambda: served.is_idle(session))
    assert "HTTP Error 403: Forbidden" in served.texts(session)[-1]


@pytest.mark.skipif(sys.platform != "linux", reason="it sets a limit of another process")
@pytest.mark.parametrize("sent_bytes", [b"", b"GET / HTTP/1.1\r\n"], ids=["idle", "half"])
def test_silent_connections_stop_nobody(served: Served, sent_bytes: bytes) -> None:
    resource.prlimit(served.child.pid, resource.RLIMIT_NOFILE, (128, 128))
    silent = []
    for _ in range(300):
        connection = socket.create_connection(("127.0.0.1", served.port))
        silent.append(connection)
        with contextlib.suppress(OSError):  # it was ended to make room
            connection.send(sent_bytes)
        # Also keeps the queue of those that wait to be accepted short: one more would wait a second
        if len(silent) % 10 == 0:
            assert served.get("/session") == []
    for connection in silent:
        connection.close()


def test_strangers_write_nothing_to_the_terminal(served: Served) -> None:
    upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Host": "evil.example"}
    assert served.ask("GET", "/", None, **upgrade)[0] == 400
    served.kill(signal.SIGTERM)
    _, errors = served.child.communicate()
    assert errors == b""


def test_a_question_of_the_model_is_listed_and_answered(shared: Served) -> None:
    session = shared.new()
    shared.prompt(session, "colour")
    until(lambda: shared.get("/question"))
    [asked] = shared.get("/question")
    [question] = asked["questions"]
    assert question["question"] == "Which one?"
    assert [option["label"] for option in question["options"]] == ["red", "blue"]
    shared.post(f"/question/{asked['id']}/reply", answers=[["blue"]])
    until(lambda: shared.is_idle(session))
    assert "blue" in shared.texts(session)[-1]
    assert shared.get("/question") == []


def test_commands_do_not_get_the_token(shared: Served) -> None:
    session = shared.new()
    shared.prompt(session, "environment")
    shared.finish(session)
    answer = shared.texts(session)[-1]
    assert "HOME=" in answer
    assert TOKEN not in answer


def test_an_abort_ends_the_run_also_at_its_very_beginning(shared: Served) -> None:
    session = shared.new()
    with shared.events(f"/session/{session}/event") as events:
        shared.prompt(session, "long")
        assert shared.post(f"/session/{session}/abort") is True
        assert until_type(events, "run_end")[-1][1]["stop_reason"] == "aborted"
        shared.prompt(session, "long")
        until_type(events, "text_delta")
        assert shared.post(f"/session/{session}/abort") is True
        assert until_type(events, "run_end")[-1][1]["stop_reason"] == "aborted"
    answer = shared.get(f"/session/{session}/message")[-1]
    assert answer["info"]["error"]["name"] == "MessageAbortedError"
    assert answer["parts"][0]["text"].startswith("word")


def test_sessions_work_side_by_side_in_their_folders(served: Served, tmp_path: Path) -> None:
    other = served.ws / "other"
    other.mkdir()
    sessions = {served.new(): served.ws, served.new(other): other}
    for session in sessions:
        served.prompt(session, "write")
    until(lambda: len(served.get("/permission")) == 2, "a question of each")
    assert {asked["sessionID"] for asked in served.get("/permission")} == sessions.keys()
    for session, folder in sessions.items():
        served.finish(session)
        assert (folder / "made.txt").exists()
        assert (folder / "by-command.txt").exists()
    [listed] = served.get(f"/session?directory={other}")
    assert listed["directory"] == str(other)


def test_the_last_run_is_undone_and_done_again(served: Served) -> None:
    session = served.new()
    served.prompt(session, "hello")
    until(lambda: served.is_idle(session))
    with (
        served.events(f"/session/{session}/event") as events,
        served.events("/event") as others,
    ):
        until_type(events, "run_end")
        until_type(others, "server.connected")
        served.prompt(session, "write")
        served.finish(session)
        until_type(events, "run_end")
        undone = served.post(f"/session/{session}/revert")["revert"]
        assert undone["prompt"] == "write"
        [(_, history)] = until_type(events, "history")
        assert [message["role"] for message in history["messages"]] == ["user", "assistant"]
        until_type(others, "message.removed")
    assert not list(served.ws.glob("*.txt"))
    assert len(served.get(f"/session/{session}/message")) == 2
    served.post(f"/session/{session}/unrevert")
    assert (served.ws / "made.txt").exists()
    first = served.get(f"/session/{session}/message")[0]["info"]["id"]
    assert served.ask("POST", f"/session/{session}/revert", {"messageID": first})[0] == 400


# ---- clients that go and come back ---------------------------------------------------------------


def test_a_client_that_comes_back_gets_what_it_missed(served: Served) -> None:
    session = served.new()
    path = f"/session/{session}/event"
    with served.events(path) as events:
        served.prompt(session, "write")
        first = until_type(events, "permission_asked")
    # Nobody listens, and the run goes on
    served.finish(session)
    with served.events(path, last=first[-1][0]) as events:
        rest = until_type(events, "run_end")
    with served.events(path) as events:
        whole = until_type(events, "run_end")
    assert types_of(whole)[0] == "history"
    assert "answered" in types_of(rest)
    assert [event_id for event_id, _ in first + rest] == [event_id for event_id, _ in whole]


def test_a_client_of_all_sessions_gets_what_it_missed(served: Served) -> None:
    session = served.new()
    with served.events("/event") as events:
        until_type(events, "server.connected")
        served.prompt(session, "write")
        first = until_type(events, "permission.asked")
    served.finish(session)
    with served.events("/event", last=first[-1][0]) as events:
        rest = until_type(events, "session.idle")
    assert {"permission.replied", "message.part.updated", "session.idle"} <= {*types_of(rest)}
    assert "permission.asked" in types_of(rest)  # the second one, and not the first again
    asked = [event["properties"]["id"] for _, event in rest if event["type"] == "permission.asked"]
    assert first[-1][1]["properties"]["id"] not in asked


def test_after_a_kill_the_session_goes_on(tmp_path: Path, model: ScriptedServer) -> None:
    with Served(tmp_path, model) as first:
        session = first.new()
        with first.events(f"/session/{session}/event") as events:
            first.prompt(session, "write")
            last = until_type(events, "permission_asked")[-1][0]
        first.crash()
    with Served(tmp_path, model) as second:
        assert [each["id"] for each in second.get("/session")] == [session]
        with second.events(f"/session/{session}/event", last=last) as events:
            _, history = next(events)
            roles = [message["role"] for message in history["messages"]]
            assert roles == ["user", "assistant", "tool", "tool"]
            second.prompt(session, "hello again")
            until_type(events, "run_end")
        assert second.texts(session)[0] == "write"
        assert second.texts(session)[-1].startswith("# Hello")


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, id="int"),
        pytest.param(signal.SIGTERM, id="term"),
    ],
)
def test_a_signal_ends_the_server_its_runs_and_its_streams(
    tmp_path: Path, model: ScriptedServer, number: signal.Signals
) -> None:
    with Served(tmp_path, model) as served:
        session = served.new()
        with (
            served.events("/event") as events,
            served.events(f"/session/{session}/event") as own,
        ):
            until_type(events, "server.connected")
            served.prompt(session, "long")
            until_type(own, "text_delta")
            served.kill(number)
            until_type(own, *ENDS)
            assert list(own) == []  # its end
        assert served.end() == (0 if number == signal.SIGINT else 143)
        assert served.err == ""


# ---- whoever must not come in --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param({"Authorization": "Bearer wrong"}, 401, id="wrong token"),
        pytest.param({"Authorization": ""}, 401, id="no token"),
        pytest.param({"Host": "evil.example"}, 400, id="a name that leads here"),
        pytest.param({"Host": "127.0.0.1.evil.example:80"}, 400, id="a name that looks like ours"),
        pytest.param({"Origin": "http://evil.example"}, 403, id="another page"),
        pytest.param({"Origin": "null"}, 403, id="a page without an origin"),
        pytest.param({"Host": "localhost"}, 200, id="another name of ours"),
    ],
)
def test_who_may_ask(shared: Served, headers: dict[str, str], status: int) -> None:
    for path in ("/session", "/event", "/doc"):
        connection, answer = shared.connect("GET", path, None, headers)
        assert answer.status == status
        connection.close()


@pytest.mark.parametrize(
    "others",
    [
        pytest.param(["http://evil.example"], id="another page's after ours"),
        pytest.param([], id="ours alone"),
    ],
)
def test_a_request_has_one_origin_at_most(shared: Served, others: list[str]) -> None:
    own = shared.url.rstrip("/")
    connection = http.client.HTTPConnection("127.0.0.1", shared.port)
    connection.putrequest("GET", "/session")
    connection.putheader("Authorization", f"Bearer {TOKEN}")
    for origin in [own, *others]:
        connection.putheader("Origin", origin)
    connection.endheaders()
    assert connection.getresponse().status == (403 if others else 200)
    connection.close()


def test_the_page_is_for_everybody_and_holds_nothing(shared: Served) -> None:
    connection, answer = shared.connect("GET", "/", None, {"Authorization": ""})
    text = answer.read().decode()
    connection.close()
    assert answer.status == 200
    assert TOKEN not in text
    assert "script-src 'sha256-" in answer.headers["content-security-policy"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        pytest.param("/session/none/message", {}, 404, id="unknown session"),
        pytest.param("/session/none/abort", {}, 404, id="abort of an unknown session"),
        pytest.param("/permission/none/reply", {"reply": "once"}, 404, id="unknown question"),
        pytest.param("/permission/none/reply", {"reply": "yes"}, 400, id="unknown word"),
        pytest.param("/permission/none/reply", {"reply": ["once"]}, 400, id="no word"),
        pytest.param("/question/none/reply", {"answers": 3}, 400, id="no answers"),
        pytest.param("/session/ID/message", b"{", 400, id="no JSON"),
        pytest.param("/session/ID/message", b"[]", 400, id="no object"),
        pytest.param("/session/ID/message", {}, 400, id="no parts"),
        pytest.param("/session/ID/message", {"parts": []}, 400, id="empty"),
        pytest.param(
            "/session/ID/message",
            {"parts": [{"type": "agent"}]},
            400,
            id="other part",
        ),
        pytest.param(
            "/session/ID/message", {"parts": [], "noReply": True}, 400, id="not supported"
        ),
        pytest.param(
            "/session/ID/message",
            {"parts": 1, "model": 2},
            400,
            id="no parts at all",
        ),
        pytest.param(
            "/session/ID/message",
            {"parts": [{"type": "text", "text": "x"}], "agent": "nobody"},
            400,
            id="unknown agent",
        ),
        pytest.param("/session/ID/revert", {}, 409, id="nothing to undo"),
        pytest.param("/session?directory=/nowhere", {}, 400, id="missing folder"),
        pytest.param("/nowhere", {}, 404, id="unknown path"),
    ],
)
def test_bad_input_has_a_status_and_a_line(
    shared: Served, path: str, body: Any, status: int
) -> None:
    session = shared.new()
    found, problem = shared.ask("POST", path.replace("ID", session), body)
    assert found == status
    assert len(problem["data"]["message"].splitlines()) == 1
    assert shared.is_idle(session)


def memory_of(process: int) -> int:
    """The most memory that it has had, in MB."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(re.findall(r"VmHWM:\s*(\d+) kB", status)[0]) // 1000


@pytest.mark.parametrize(
    "is_chunked",
    [
        pytest.param(True, id="chunked"),
        pytest.param(False, id="sized"),
    ],
)
def test_a_body_that_is_too_large_is_refused_and_not_kept(shared: Served, is_chunked: bool) -> None:
    session = shared.new()
    before = memory_of(shared.child.pid)
    connection = http.client.HTTPConnection("127.0.0.1", shared.port, timeout=60)
    piece = b" " * 1_000_000
    size = 100 * len(piece)
    assert size > serve_routes.MAX_BODY
    connection.putrequest("POST", f"/session/{session}/message")
    connection.putheader("Authorization", f"Bearer {TOKEN}")
    if is_chunked:
        connection.putheader("Transfer-Encoding", "chunked")
    else:
        connection.putheader("Content-Length", str(size))
    connection.endheaders()
    try:
        for _ in range(100):
            connection.send(b"%x\r\n%s\r\n" % (len(piece), piece) if is_chunked else piece)
    except OSError:
        pass  # the server has heard enough
    assert connection.getresponse().status == 413
    connection.close()
    assert memory_of(shared.child.pid) - before < 40
    assert shared.get(f"/session/{session}")["id"] == session


def test_a_second_writer_of_a_session_is_refused(served: Served, model: ScriptedServer) -> None:
    session = served.new()
    served.prompt(session, "write")
    served.permission()
    parts = [{"type": "text", "text": "hello"}]
    for path in ("message", "prompt_async", "revert"):
        body = {} if path == "revert" else {"parts": parts}
        status, problem = served.ask("POST", f"/session/{session}/{path}", body)
        assert status == 409
        assert "at work" in problem["data"]["message"]
    # Another program that has the same sessions
    data = str(served.home / ".data")
    with Served(served.ws / "other", model, XDG_DATA_HOME=data) as other:
        assert other.texts(session)[0] == "write"
        status, problem = other.ask("POST", f"/session/{session}/message", {"parts": parts})
        assert status == 409
        assert "open in another process" in problem["data"]["message"]
    served.finish(session)


# ---- the command line ----------------------------------------------------------------------------


def test_a_port_in_use_is_one_line(served: Served, model: ScriptedServer) -> None:
    with OneShot(
        served.ws / "other",
        model,
        "serve",
        "--port",
        str(served.port),
    ) as second:
        assert second.end() == 2
        assert second.err.splitlines()[-1] == f"coder: port {served.port}: Address already in use"


@pytest.mark.parametrize(
    ("flags", "token", "line"),
    [
        pytest.param(["--host", "0.0.0.0"], "", "--host needs a token of your own", id="no token"),
        pytest.param([], "short", "needs at least 16 characters", id="short token"),
        pytest.param(["--port", "70000"], "", "port 70000", id="no port"),
    ],
)
def test_wrong_flags_are_one_line(
    tmp_path: Path, model: ScriptedServer, flags: list[str], token: str, line: str
) -> None:
    with OneShot(tmp_path, model, "serve", *flags, CODER_SERVE_TOKEN=token) as wrong:
        assert wrong.end() == 2
        assert line in wrong.err.splitlines()[-1]


def test_a_random_token_is_printed_once(tmp_path: Path, model: ScriptedServer) -> None:
    with Served(tmp_path, model, CODER_SERVE_TOKEN="") as served:
        assert served.child.stdout
        token = served.child.stdout.readline().decode().removeprefix("Token: ").strip()
        page = served.child.stdout.readline().decode().removeprefix("Page: ").strip()
        assert page == f"{served.url}#token={token}"
        assert len(token) >= 32
        assert served.ask("GET", "/session")[0] == 401
        served.token = token
        assert served.get("/session") == []


def test_another_address_is_served_under_its_own_name(
    tmp_path: Path, model: ScriptedServer
) -> None:
    with Served(tmp_path, model, "--host", "localhost") as served:
        assert served.url.startswith("http://localhost:")
        assert served.get("/session") == []


# ---- OpenAPI, opencode's SDK, curl ---------------------------------------------------------------


def test_the_openapi_file_is_what_the_classes_say(shared: Served) -> None:
    """`python -m coder.doors.serve_openapi > docs/openapi.json` stores it again."""
    described = serve_openapi.openapi()
    stored = json.loads((ROOT / "docs" / "openapi.json").read_text())
    assert stored == described, "store it again: the docstring of this test has the command"
    assert shared.get("/doc") == described


def test_the_events_of_a_run_are_as_the_openapi_file_says(served: Served) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    described = json.loads((ROOT / "docs" / "openapi.json").read_text())
    schema = {"$ref": "#/components/schemas/Event", "components": described["components"]}
    check = jsonschema.Draft202012Validator(schema)
    session = served.new()
    with served.events(f"/session/{session}/event") as events:
        served.prompt(session, "write")
        served.finish(session)
        seen = until_type(events, "run_end")
    for _, event in seen:
        check.validate(event)
    with pytest.raises(jsonschema.ValidationError):
        check.validate({"type": "text_delta", "text": 3})


@pytest.mark.skipif(
    "not os.environ.get('OPENCODE_SDK')", reason="OPENCODE_SDK names no node_modules"
)
def test_the_sdk_of_opencode_is_a_client(served: Served) -> None:
    script = served.folder / "temp" / "client.mjs"
    [code] = re.findall(
        r"```js\n(.*?)```",
        (ROOT / "docs" / "serve.md").read_text(),
        re.S,
    )
    script.write_text(code)
    modules = script.with_name("node_modules")
    modules.symlink_to(os.environ["OPENCODE_SDK"])
    done = subprocess.run(
        ["node", str(script), served.url],
        env=os.environ | {"CODER_SERVE_TOKEN": TOKEN},
        capture_output=True,
        text=True,
        timeout=60,
    )
    modules.unlink()
    script.unlink()
    assert done.returncode == 0, done.stderr
    assert "tools: write completed, bash completed" in done.stdout
    assert "listed: true" in done.stdout
    assert re.search("events: .*permission.updated.* session.idle", done.stdout)


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_curl_alone_is_a_client(served: Served) -> None:
    page = (ROOT / "README.md").read_text()
    [walk] = [each for each in re.findall(r"```sh\n(.*?)```", page, re.S) if "curl" in each]
    assert "http://127.0.0.1:4096" in walk
    walk = walk.replace("http://127.0.0.1:4096", served.url.rstrip("/"))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", walk],
        env=os.environ | {"CODER_SERVE_TOKEN": TOKEN},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert (served.ws / "made.txt").exists()
    assert (served.ws / "by-command.txt").exists()
    assert '"status":"completed"' in done.stdout


def test_the_extra_is_named_if_it_is_missing(tmp_path: Path, model: ScriptedServer) -> None:
    for name in ("starlette", "uvicorn"):
        (tmp_path / "shadow" / name).mkdir(parents=True)
        (tmp_path / "shadow" / name / "__init__.py").write_text("raise ModuleNotFoundError\n")
    paths = f"{tmp_path / 'shadow'}{os.pathsep}{ROOT}"
    with OneShot(tmp_path / "place", model, "serve", PYTHONPATH=paths) as lacking:
        assert lacking.end() == 2
        assert "serve needs a package: " in lacking.err
        assert "[serve]" in lacking.err


def test_nothing_of_it_is_imported_for_a_task() -> None:
    code = "import sys, coder.cli.main, coder.cli.one_shot; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0
    late = {"starlette", "uvicorn", "asyncio", "coder.doors", "coder.cli.serve"}
    assert late & {*done.stdout.split()} == set(), "import these in the function that needs them"
