"""MCP: servers on stdio and HTTP, what becomes of their tools and results, and of servers that
fail."""

from __future__ import annotations

import json
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from coder.abort import Abort
from coder.cli.main import run
from coder.devtools.scripted import Body, Reply
from coder.extend.mcp import START, Servers, start
from tests.harness import ask, contents, results, sent, serve
from tests.terminal import OneShot, Terminal, gone, promptly, until

PROGRAM = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]
STDIO = {"command": PROGRAM[0], "args": PROGRAM[1:]}
SILENT = {"command": "sleep", "args": ["61"]}


def configure(folder: Path, **servers: Any) -> Path:
    """The mcp.json of the sessions whose place is `folder`."""
    path = folder / "home" / ".config" / "coder" / "mcp.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"mcpServers": servers}))
    return path


def connected(path: Path, number: int = 1) -> Servers:
    """The servers of a file, when all are ready, however long that takes."""
    servers = start(path)
    assert [*servers.wait(Abort())] == []
    assert len({each.name.partition("__")[0] for each in servers.tools()}) == number
    return servers


# ---- tools and results ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The same server on stdio and on HTTP."""
    folder = tmp_path_factory.mktemp("mcp")
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("OPENAI_API_KEY", "sk-canary")
        patch.setenv("WORD", 'ü"\\')
        patch.setenv("PLAIN", "word")
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
        site = {"type": "http", "url": url, "headers": {"X-Key": "${NOPE:-key} ${PLAIN}"}}
        number = listener.fileno()
        child = subprocess.Popen([*PROGRAM, "fd", f"{number}"], pass_fds=[number])
        path = configure(
            folder,
            io=STDIO | {"env": {"SAID": "${WORD}"}},
            site=site,
        )
        try:
            yield connected(path, 2)
        finally:
            start(path).close()
            child.kill()
            child.wait()


def test_the_names_of_tools_are_valid_and_unique_and_descriptions_cut(servers: Servers) -> None:
    tools = servers.tools()
    assert len({each.name for each in tools}) == len(tools) == 26
    assert all(re.fullmatch(r"(io|site)__[a-zA-Z0-9_-]{1,60}", each.name) for each in tools)
    assert all(len(each.name) <= 64 for each in tools)
    assert len(tools[0].description) == 2000
    assert {*tools[0].parameters} <= {"type", "properties", "required", "title"}
    calls = [(each.name, {}) for each in tools[10:13]]  # a strange name, and two that are cut
    with serve(Reply(calls=calls), Reply("done")) as model:
        ask(model, tools=tools)
        assert results(model) == ["ü", "1", "2"]


CALLS: dict[tuple[str, str], Any] = {
    ("add", '{"a": "1", "b": null}'): "11",
    ("add", '{"a": "one"}'): 'Error: io__add: a has to be of type integer, not "one"',
    ("add", '{"a": 1, "c": 2}'): "11",  # what the schema does not name is the server's to judge
    ("anything", '{"self": {"name": null}, "ctx": null, "the context": 1}'): "{'name': None} None",
    ("anything", '{"self": null}'): "None None",
    ("picture", "{}"): "a picture",
    ("no_picture", "{}"): "[image/png, 8 characters, not shown]",
    ("nothing", "{}"): "(no output)",
    ("fail", "{}"): "Error executing tool fail: no such cheese",
}


# A server without the package, which takes more than a second to import: argv has how it speaks,
# and the pages of its tools. A tool whose name begins with `large` has a result of 100 MB, `die`
# ends the server. On HTTP it first prints its port; `stubborn` is stdio, and deaf to its end and to
# SIGTERM.
RAW = """
import json, os, signal, sys, time, zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

way, pages = sys.argv[1], json.loads(sys.argv[2])

def pieces(asked):
    given = asked.get("params") or {}
    if given.get("name") == "die":
        os.write(2, b"\\x1b[31mout of cheese")
        os._exit(1)
    at = int(given.get("cursor") or 0)
    following = {"nextCursor": str(at + 1)} if at + 1 < len(pages) else {}
    results = {
        "initialize": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                       "serverInfo": {"name": "raw", "version": "1"}},
        "tools/list": {"tools": pages[at]} | following,
        "tools/call": {"content": [{"type": "text", "text": "called"}]},
    }
    answer = {"jsonrpc": "2.0", "id": asked["id"]}
    if asked["method"] in results:
        answer["result"] = results[asked["method"]]
    else:
        answer["error"] = {"code": -32601, "message": "Method not found"}
    if given.get("name") == "large_last":
        answer["id"] = answer.pop("id")
    before, called, after = json.dumps(answer).partition("called")
    yield before + called
    if given.get("name", "").startswith("large"):
        for _ in range(100):
            yield "x" * 1_000_000
    yield after

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200 if "id" in asked else 202)
        kind = "text/event-stream" if way == "sse" else "application/json"
        self.send_header("content-type", kind)
        packer = zlib.compressobj(1, wbits=31) if way == "gzip" else None
        if packer:
            self.send_header("content-encoding", "gzip")
        self.end_headers()
        if "id" not in asked:
            return
        parts = [*pieces(asked)]
        if way == "sse":
            parts = ["data: ", *parts, "\\n\\n"]
        for part in parts:
            self.wfile.write(packer.compress(part.encode()) if packer else part.encode())
        if packer:
            self.wfile.write(packer.flush())

if way == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if way in ("stdio", "stubborn"):
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" in asked:
            for part in pieces(asked):
                sys.stdout.write(part)
            print(flush=True)
    if way == "stubborn":
        time.sleep(60)
else:
    site = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(site.server_port, flush=True)
    site.serve_forever()
"""


def raw(*names: str, **schema: Any) -> list[dict[str, Any]]:
    """Tools of these names as a server lists them."""
    return [
        {
            "name": name,
            "inputSchema": {"type": "object", **schema},
        }
        for name in names
    ]


@contextmanager
def raw_server(way: str, *pages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The entry of a server that has these pages of tools."""
    arguments = ["-c", RAW, way, json.dumps(pages)]
    if way in ("stdio", "stubborn"):
        yield {"command": sys.executable, "args": arguments}
        return
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, *arguments], **quiet) as child:
        assert child.stdout
        yield {"url": f"http://127.0.0.1:{int(child.stdout.readline())}/mcp"}
        child.kill()


def test_all_pages_of_a_servers_tools_are_read(tmp_path: Path) -> None:
    with raw_server(
        "stdio",
        raw("a"),
        raw("b"),
        raw("c"),
    ) as paged:
        tools = connected(configure(tmp_path, paged=paged)).tools()
        assert [each.name for each in tools] == ["paged__a", "paged__b", "paged__c"]
        with serve(
            Reply(calls=[("paged__c", {})]),
            Reply("done"),
        ) as model:
            ask(model, tools=tools)
            assert results(model) == ["called"]


@pytest.mark.parametrize("way", ["stdio", "http", "sse"])
def test_an_incomplete_schema_leaves_out_that_tool_only(tmp_path: Path, way: str) -> None:
    schemas: list[Any] = [
        None,
        [],
        "x",
        {},
        {"type": "string"},
    ]
    bad = [{"name": f"bad{at}", "inputSchema": schema} for at, schema in enumerate(schemas)]
    first = [{"name": "none"}, *raw("a"), *bad]
    with raw_server(
        way,
        first,
        [*raw("b"), {"inputSchema": {"type": "object"}}],
    ) as odd:
        servers = start(configure(tmp_path, odd=odd))
        [notice] = servers.wait(Abort())
        names = "none, bad0, bad1, bad2, bad3, bad4, None"
        assert notice.text.startswith(f"MCP server odd: tools left out: {names} (")
        assert [each.name for each in servers.tools()] == ["odd__a", "odd__b"]
        with serve(
            Reply(calls=[("odd__b", {})]),
            Reply("done"),
        ) as model:
            ask(model, tools=servers.tools())
            assert results(model) == ["called"]
        servers.close()


@pytest.mark.parametrize("way", ["stdio", "http", "sse", "gzip"])
def test_a_result_of_100_mb_is_cut_and_the_connection_goes_on(tmp_path: Path, way: str) -> None:
    with raw_server(way, raw("large", "large_last", "small")) as entry:
        servers = connected(configure(tmp_path, io=entry))
        [server] = servers.servers
        client = server.client
        calls: list[tuple[str, Any]] = [
            ("io__large", {}),
            ("io__large_last", {}),
            ("io__small", {}),
        ]
        before = peak()
        with serve(Reply(calls=calls), Reply("done")) as model:
            ask(model, tools=servers.tools())
            first, second, third = results(model)
        assert first == second
        assert "the result was over 16 MB" in first
        assert len(first) < 200
        assert third == "called" and server.client is client  # the same connection
        assert peak() - before < 150_000_000
        servers.close()


def peak() -> int:
    """The most memory in bytes that this process has had."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def test_calls_reach_the_server_and_its_results_the_model(servers: Servers) -> None:
    for server in ("io", "site"):
        calls = [(f"{server}__{name}", given) for name, given in CALLS]
        with serve(Reply(calls=calls), Reply("done")) as model:
            ask(model, tools=servers.tools())
            assert results(model) == [each.replace("io_", f"{server}_") for each in CALLS.values()]
            assert "data:image/png;base64,iVBORw0KGgo" in json.dumps(sent(model)[-1])


def test_a_program_gets_no_key_and_starts_in_the_configuration_folder(servers: Servers) -> None:
    calls = [("io__facts", {"variable": name}) for name in ("OPENAI_API_KEY", "SAID")]
    calls.append(("site__header", {"name": "x-key"}))
    with serve(Reply(calls=calls), Reply("done")) as model:
        ask(model, tools=servers.tools())
        key, said, header = results(model)
        assert json.loads(key)["variable"] is None
        assert json.loads(key)["folder"].endswith("/home/.config/coder")
        assert json.loads(said)["variable"] == 'ü"\\'
        assert header == "key word"


def test_what_a_server_says_besides_fills_no_disk(servers: Servers, tmp_path: Path) -> None:
    with serve(
        Reply(calls=[("io__chat", {"file": str(tmp_path / "ok")})]),
        Reply(""),
    ) as model:
        ask(model, tools=servers.tools())
    until((tmp_path / "ok").exists)


def test_a_server_that_ended_is_started_again_by_the_next_call(tmp_path: Path) -> None:
    with raw_server("stdio", raw("die", "a")) as entry:
        servers = connected(configure(tmp_path, io=entry))
        calls: list[tuple[str, Any]] = [("io__die", {}), ("io__a", {})]
        with serve(Reply(calls=calls), Reply("done")) as model:
            ask(model, tools=servers.tools())
            died, called = results(model)
        assert "the MCP server io ended" in died
        assert "out of cheese" in died
        assert called == "called"
        servers.close()


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (STDIO | {"args": ["-c", "import sys; sys.exit('no cheese')"]}, "closed: no cheese"),
        ({"command": "no-such-program"}, "No such file or directory: 'no-such-program'"),
        ({"url": "https://${NOT_SET}"}, "the variable NOT_SET is not set"),
        ({"url": "http://127.0.0.1:9/mcp"}, "connection"),
        ({"url": "http://127.0.0.1:9/mcp", "type": "sse"}, "a server needs a command, or a url"),
        ({"command": 1}, "Input should be a valid string"),
        ([1], "a server needs a command, or a url"),
    ],
)
def test_a_server_that_does_not_start_costs_one_line(tmp_path: Path, entry: Any, why: str) -> None:
    servers = start(configure(tmp_path, bad=entry, worse=entry))
    [notice] = servers.wait(Abort())
    assert notice.text.startswith("MCP servers left out: bad, worse (")
    assert why in notice.text
    assert "\n" not in notice.text
    assert servers.tools() == [] == [*servers.wait(Abort())]
    servers.close()


@pytest.mark.slow
def test_a_server_that_says_nothing_is_left_out_in_the_end(tmp_path: Path) -> None:
    servers = start(configure(tmp_path, slow=SILENT))
    [notice] = servers.wait(Abort())
    assert notice.text == f"MCP servers left out: slow (not ready after {START} s)"
    servers.close()


def test_a_server_that_is_late_is_reported_once_and_joins_when_it_is_ready(tmp_path: Path) -> None:
    with raw_server("stdio", raw("a")) as entry:
        servers = start(configure(tmp_path, io=entry, slow=SILENT))
        [notice] = servers.wait(Abort(), 0)
        assert re.match(r"MCP servers still starting: (io, )?slow\. ", notice.text)
        until(servers.tools)
        with promptly():
            assert [*servers.wait(Abort())] == []
        servers.close()


@pytest.mark.parametrize("text", ["{", "[]", '{"servers": {}}', '{"mcpServers": [1]}'])
def test_a_file_that_cannot_be_read_costs_one_line(tmp_path: Path, text: str) -> None:
    path = configure(tmp_path)
    path.write_text(text)
    [notice] = start(path).wait(Abort())
    assert notice.text.startswith(f"{path} is ignored: ")


# ---- in the program ------------------------------------------------------------------------------

ADD = ("io__add", {"a": 1})


def test_one_task_waits_for_the_servers_and_what_a_rule_allows_is_called(tmp_path: Path) -> None:
    """Sub-agents have the tools as well, except those that only read. A project's files start
    nothing."""
    ws = tmp_path / "ws"
    marks = []
    for place in (".mcp.json", ".coder/mcp.json"):
        (ws / place).parent.mkdir(parents=True, exist_ok=True)
        touch = {"command": "touch", "args": [f"{ws}/{place}.ran"]}
        (ws / place).write_text(json.dumps({"mcpServers": {"evil": touch}}))
        marks.append(ws / f"{place}.ran")
    tasks = [
        {
            "agent": name,
            "description": "x",
            "prompt": "go",
        }
        for name in ("general", "explore")
    ]
    calls = [("task", each) for each in tasks] + [ADD]

    def script(body: Body) -> Reply:
        said = contents(body["messages"], "tool")
        if any(each["function"]["name"] == "task" for each in body["tools"]):  # no sub-agent
            return Reply(
                calls=calls[len(said) :][:1],
                text="done" if said[2:] else "",
            )
        return Reply(str(said[0])) if said else Reply(calls=[ADD])

    with raw_server("stubborn", raw("add")) as entry, serve(script) as model:
        configure(tmp_path, io=entry, bad={"command": "no-such-program"})
        with OneShot(tmp_path, model, "--allow", "mcp:io__a*", "go") as child:
            assert child.end() == 0, child.err
        general, explore, own = results(model)
        assert general.startswith("called")
        assert "a rule denies the tool" in explore
        assert own == "called"
        assert child.err.count("MCP servers left out: bad (") == 1
        assert "Ignored in this folder: .coder/mcp.json" in child.err
    assert not any(mark.exists() for mark in marks)


def test_a_session_asks_remembers_a_tool_or_a_server_and_stops_a_call(tmp_path: Path) -> None:
    configure(tmp_path, io=STDIO)
    file = tmp_path / "ws" / "state"
    calls = [
        Reply(calls=[ADD]),
        Reply(
            calls=[
                ("io__add", {"a": 2}),
                ("io__picture", {}),
            ]
        ),
    ]
    calls += [
        Reply("added"),
        Reply(calls=[("io__wait", {"file": str(file)})]),
        Reply("end"),
    ]
    with serve(*calls) as model, Terminal(tmp_path, model) as terminal:
        terminal.enter("go")
        terminal.expect("Call this tool of an MCP server?")
        terminal.expect("[a]lways this tool, [p] always tools of io")
        terminal.expect("why not: ")
        terminal.type("a")
        assert terminal.expect("why not: ").count("MCP server?") == 1
        terminal.type("p")
        assert "a picture" in terminal.prompt()
        assert results(model) == ["11", "12", "a picture"]
        terminal.enter("wait")
        terminal.until(lambda: file.exists() and file.read_text() == "called", "the call")
        with promptly():
            terminal.ctrl_c()
            terminal.prompt()
        terminal.until(lambda: file.read_text() == "cancelled", "the call is cancelled")
        assert "  io__wait" in terminal.say("/tools")


def test_the_list_of_tools_says_which_servers_have_none_in_it_yet(tmp_path: Path) -> None:
    with raw_server("stdio", raw("a")) as entry, serve(Reply("hi")) as model:
        configure(tmp_path, io=entry, bad={"command": "no-such-program"}, slow=SILENT)
        with Terminal(tmp_path, model) as terminal:
            seen = " ".join(terminal.say("/tools").split())
            while "io (ready)" not in seen:
                assert "MCP servers not in this list yet" in seen
                assert "slow (still starting)" in seen
                seen = " ".join(terminal.say("/tools").split())
            assert "No such file or directory: 'no-such-program')" in seen
            assert "io__a" not in seen


def test_a_list_with_all_servers_says_nothing_of_them(tmp_path: Path) -> None:
    with raw_server("stdio", raw("a")) as entry, serve(Reply("hi")) as model:
        configure(tmp_path, io=entry)
        with Terminal(tmp_path, model) as terminal:
            terminal.say("go")
            seen = terminal.say("/tools")
            assert "io__a" in seen
            assert "MCP servers" not in seen


@pytest.mark.parametrize(
    ("length", "denied", "is_said"),
    [
        (1_000, "x", 1),
        (1_000, "big", 0),
        (900, "x", 0),
    ],
)
def test_many_tools_are_said_once_with_the_servers_and_their_sizes(
    tmp_path: Path, length: int, denied: str, is_said: int
) -> None:
    """A tool takes some 100 characters more than its description; those that a rule denies are not
    sent."""
    many = [each | {"description": "d" * length} for each in raw(*map(str, range(38)))]
    rule = f"mcp:{denied}__*"
    with raw_server("stdio", many) as big, raw_server("stdio", raw("a")) as small:
        configure(tmp_path, big=big, small=small)
        call = Reply(calls=[("ls", {})])
        with (
            serve(call, Reply("hi")) as model,
            OneShot(tmp_path, model, "--deny", rule, "go") as child,
        ):
            assert child.end() == 0, child.err
            said = re.findall(r"The tools of MCP servers take ([\d,]+) characters .*", child.err)
            assert len(said) == is_said, child.err
            tools = [each for each in model.requests[0]["tools"] if "__" in str(each)]
            total = sum(len(json.dumps(each)) for each in tools)
            assert said == [f"{total:,}"] * is_said
            if is_said:
                own = len(json.dumps(tools[-1]))
                assert f"big {total - own:,}, small {own:,}" in " ".join(child.err.split())


def test_the_configuration_names_the_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home" / ".config"))
    path = configure(tmp_path, io=STDIO, site={})
    assert run(["config"]) == 0
    assert f"# MCP servers: io, site ({path})" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_server_outlives_the_program(tmp_path: Path, number: signal.Signals) -> None:
    """Nor does one that has not answered yet delay the end."""
    with raw_server("stubborn", raw("a")) as entry, serve(Reply("hi")) as model:
        configure(tmp_path, io=entry, slow=SILENT)
        with OneShot(tmp_path, model, "go") as child:
            for line in (f"{sys.executable} -c {RAW}", "sleep 61"):
                until(lambda: child.running(line), "the servers")  # noqa: B023
            child.kill(number)
            with promptly():
                child.end()
            gone(child.mark)
            shutil.rmtree(child.temp)  # what nobody could tidy up
            child.temp.mkdir()


def test_ctrl_c_ends_the_wait_for_a_server(tmp_path: Path) -> None:
    configure(tmp_path, slow=SILENT)
    with serve(Reply("hi")) as model, Terminal(tmp_path, model) as terminal:
        terminal.enter("go")
        terminal.expect("thinking")
        with promptly():
            terminal.ctrl_c()
            terminal.expect("stopped by the user")
        terminal.prompt()
        assert model.requests == []


FOLDER = {"url": "file:///a%20b/coder", "dir_info": {}}
EDITABLE = {"url": "file:///coder", "dir_info": {"editable": True}}
GIT = {"url": "https://x.org/coder", "vcs_info": {"vcs": "git", "commit_id": "0"}}
REPORT = """
import pathlib, sys
from coder.abort import Abort
from coder.extend.mcp import start
servers = start(pathlib.Path(sys.argv[1]))
print([each.text for each in servers.wait(Abort())])
servers.close()
"""


@pytest.mark.parametrize(
    ("mark", "installer", "source", "command"),
    [
        ("uv-receipt.toml", "uv", FOLDER, "uv tool install '/a b/coder[mcp]'"),
        ("uv-receipt.toml", "uv", None, "uv tool install 'coder-agent[mcp]'"),
        ("pipx_metadata.json", "uv", EDITABLE, "pipx install --force -e '/coder[mcp]'"),
        ("", "pip", FOLDER, "{python} -m pip install '/a b/coder[mcp]'"),
        ("", "pip", GIT, "{python} -m pip install 'coder-agent[mcp] @ git+https://x.org/coder'"),
        ("", "uv", EDITABLE, "uv pip install --python {python} -e '/coder[mcp]'"),
    ],
)
def test_without_the_package_one_line_says_how_this_installation_gets_it(
    tmp_path: Path, mark: str, installer: str, source: Any, command: str
) -> None:
    """In an environment of its own, as uv, pipx and pip leave one."""
    place = tmp_path / "environment"
    venv.create(place, symlinks=True)
    [packages] = place.glob("lib/python*/site-packages")
    info = packages / "coder_agent-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: coder-agent\nVersion: 1\n")
    (info / "INSTALLER").write_text(installer)
    if source:
        (info / "direct_url.json").write_text(json.dumps(source))
    if mark:
        (place / mark).touch()
    (packages / "mcp.py").write_text("raise ImportError('there is no mcp here')")
    (packages / "more.pth").write_text(sysconfig.get_path("purelib"))  # the other packages
    path = configure(tmp_path, io=STDIO, site={"url": "http://127.0.0.1:9/mcp"})
    python = place / "bin" / "python"
    said = subprocess.run(
        [python, "-c", REPORT, path],
        env={"PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    fix = command.format(python=python)
    why = f"there is no mcp here (fix: {fix})"
    assert said.stdout == f"{[f'MCP servers left out: io, site ({why})']!r}\n", said.stderr
