"""A client of the openai package sends the requests: real clients, a real server, proxies,
aborts."""

from __future__ import annotations

import contextlib
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coder import __version__
from coder.abort import Abort
from coder.ai import ChatModel
from coder.devtools.scripted import Reply, ScriptedServer
from coder.events import Event
from coder.loop import run_loop
from coder.types import Request, RunResult
from tests.harness import FAST, add, drive, serve, types
from tests.late import Late
from tests.terminal import promptly
from tests.test_cli import Place
from tests.test_network import certificates, secure, server_tls

__all__ = ["certificates"]  # a fixture

httpx2 = Late("httpx2")
openai = Late("openai")
PROXIES = "http_proxy https_proxy all_proxy no_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY"


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXIES.split(), "OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def client_of(server: ScriptedServer, **options: Any) -> Any:
    return openai.OpenAI(**{"base_url": server.url, "api_key": "sk-of-the-client"} | options)


def talk(client: Any, *tools: Any, **options: Any) -> tuple[list[Event], RunResult]:
    model = ChatModel("m", client=client, **options)
    return drive(run_loop([], model, tools, prompt="go", retry=FAST))


# ---- what is sent --------------------------------------------------------------------------------


def test_a_run_with_tools_over_a_client_is_the_run_over_the_direct_connection() -> None:
    def replies() -> list[Reply]:
        return [
            Reply(
                "I add.",
                calls=[("add", {"a": 1, "b": 2})],
                reasoning="Well.",
            ),
            Reply("slow down", status=429),
            Reply("Three."),
        ]

    told = []
    bodies = []
    for by_client in (True, False):
        with serve(*replies()) as server:
            chosen = {"client": client_of(server)} if by_client else {"base_url": server.url}
            run = run_loop(
                [],
                ChatModel("m", **chosen),
                [add],
                prompt="go",
                retry=FAST,
            )
            events, result = drive(run)
        assert result.text == "Three."
        assert len(server.requests) == 3
        told.append(types(events))
        bodies.append(str(server.requests).replace("call_id", ""))
        assert server.connections == 1
    assert told[0] == told[1]
    assert len(bodies[0]) == len(bodies[1])


def test_the_clients_address_headers_and_query_are_sent_with_the_models_own_headers() -> None:
    more = {"default_headers": {"x-gateway": "a"}, "default_query": {"tenant": "7"}}
    with serve(Reply("well")) as server:
        _, result = talk(client_of(server, **more), headers={"X-Team": "ours"})
    assert result.text == "well"
    [head], [path] = server.heads, server.paths
    assert path == "/v1/chat/completions?tenant=7"
    assert head["authorization"] == "Bearer sk-of-the-client"
    assert head["x-gateway"] == "a"
    assert head["x-team"] == "ours"


def test_the_key_that_a_request_has_goes_before_the_clients() -> None:
    with serve(Reply("well")) as server:
        model = ChatModel("m", client=client_of(server))
        request = Request([{"role": "user", "content": "go"}], api_key="sk-of-the-hook")
        drive(model.stream(request, Abort()))
    assert server.heads[0]["authorization"] == "Bearer sk-of-the-hook"


@pytest.mark.parametrize("deployment", [None, "my gpt"])
def test_azure_with_a_token_provider(deployment: str | None) -> None:
    """A token for each request, and the model as a deployment in the path."""
    tokens = iter(["token-of-the-first-request", "token-of-the-second-request"])
    with serve(
        Reply(calls=[("add", {"a": 1, "b": 2})]),
        Reply("Three."),
    ) as server:
        client = openai.AzureOpenAI(
            azure_endpoint=server.url.removesuffix("/v1"),
            azure_deployment=deployment,
            api_version="2024-10-21",
            azure_ad_token_provider=lambda: next(tokens),
        )
        model = ChatModel("gpt-5", client=client)
        _, result = drive(
            run_loop(
                [],
                model,
                [add],
                prompt="go",
                retry=FAST,
            )
        )
    assert result.text == "Three."
    name = "my%20gpt" if deployment else "gpt-5"
    path = f"/openai/deployments/{name}/chat/completions?api-version=2024-10-21"
    assert server.paths == [path, path]
    words = [head["authorization"].removeprefix("Bearer token-of-the-") for head in server.heads]
    assert words == ["first-request", "second-request"]


def test_a_token_provider_that_fails_is_said_and_nothing_is_sent() -> None:
    def fail() -> str:
        raise RuntimeError("az login has expired")

    with serve(Reply("well")) as server:
        client = openai.AzureOpenAI(
            azure_endpoint=server.url, api_version="1", azure_ad_token_provider=fail
        )
        events, result = talk(client)
    assert not server.requests
    assert "retry" not in types(events)
    assert result.error
    assert result.error.kind == "auth"
    assert "RuntimeError: az login has expired" in result.text


def test_a_key_that_no_header_can_carry_is_not_shown() -> None:
    with serve(Reply("well")) as server:
        result = talk(client_of(server, api_key="sk-of-the-client\n"))[1]
    assert result.error
    assert "sk-of" not in result.text
    assert "sk-of" not in result.error.advice


def test_a_client_inside_a_wrapper_that_traces_is_used_through_it() -> None:
    class Traced:
        def __init__(self, client: Any) -> None:
            self.client = client
            self.sent: list[str] = []

        def __getattr__(self, name: str) -> Any:
            return getattr(self.client, name)

        def post(self, path: str, **options: Any) -> Any:
            self.sent.append(path)
            return self.client.post(path, **options)

    with serve(Reply("well")) as server:
        traced = Traced(client_of(server))
        assert talk(traced)[1].text == "well"
    assert traced.sent == ["/chat/completions"]


def test_an_asynchronous_client_and_a_second_address_are_refused() -> None:
    with pytest.raises(ValueError, match="synchronous"):
        ChatModel("m", client=openai.AsyncOpenAI(api_key="k"))
    with pytest.raises(ValueError, match="of its own"):
        ChatModel("m", client=openai.OpenAI(api_key="k"), base_url="http://127.0.0.1:1/v1")


def test_the_models_of_a_clients_server_are_listed() -> None:
    with serve(Reply("well")) as server:
        server.models = ["a", "b"]
        assert ChatModel(
            "m",
            client=client_of(server),
        ).endpoint.models() == ["a", "b"]


# ---- what comes back -----------------------------------------------------------------------------


def test_errors_are_those_of_the_direct_connection() -> None:
    replies = {
        "auth": Reply("the key sk-of-the-client is wrong", status=401),
        "not_found": Reply("The model 'm' does not exist", status=404),
        "overflow": Reply("maximum context length is 10", status=400),
        "protocol": Reply(chunks=[b"<html><title>Sign in</title>"]),
        "incomplete": Reply(chunks=[]),
    }
    for kind, reply in replies.items():
        with serve(reply) as server:
            error = talk(client_of(server))[1].error
        assert error
        assert error.kind == kind
        assert "sk-of" not in error.message
    with serve(
        Reply(
            "",
            status=307,
            headers={"location": "http://other.example/v1"},
        )
    ) as server:
        text = talk(client_of(server))[1].text
    assert "redirects to http://other.example/v1; redirects are not followed" in text


def test_retries_are_the_loops() -> None:
    with serve(Reply("busy", status=503), Reply("well")) as server:
        events, result = talk(client_of(server, max_retries=5))
    assert result.text == "well"
    assert types(events).count("retry") == 1


def test_an_answer_that_breaks_is_a_failed_attempt() -> None:
    with serve(
        Reply("half an answer", cut=2, close="reset"),
        Reply("well"),
    ) as server:
        events, result = talk(client_of(server))
    assert result.text == "well"
    assert types(events).count("retry") == 1


def test_a_server_that_is_not_there_is_said_and_not_tried_again() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        events, result = talk(openai.OpenAI(base_url=url, api_key="k"))
    assert result.error
    assert result.error.kind == "network"
    assert "retry" not in types(events)
    assert f"no answer from {url}: " in result.text


@pytest.mark.parametrize(
    "limits",
    [{"first_byte_timeout": 0.3}, {"idle_timeout": 0.3}],
)
def test_the_time_limits_are_the_models(limits: dict[str, float]) -> None:
    hold = 30 if "first_byte_timeout" in limits else 0
    with serve(
        Reply("a b c", hold=hold, cut=2, close="hang"),
        Reply("well"),
    ) as server:
        events, result = talk(client_of(server), **limits)
    retries = [event for event in events if event.type == "retry"]  # more than one if all is slow
    assert result.text == "well"
    assert "no data for 0.3 s" in str(retries[0].error)


# ---- aborts --------------------------------------------------------------------------------------

STALLS = {
    "before the first byte": Reply("never", hold=30),
    "after the first byte": Reply("a b c", cut=2, close="hang"),
}


def stalled_run(server: ScriptedServer, phase: str) -> RunResult:
    """Aborted from another thread as soon as the phase is reached."""
    abort = Abort()
    has_begun = threading.Event()

    def watch(event: Event) -> None:
        if event.type == "text_delta":
            has_begun.set()

    def act() -> None:
        while not server.requests or (phase.startswith("after") and not has_begun.is_set()):
            threading.Event().wait(0.01)
        abort.set()

    threading.Thread(target=act, daemon=True).start()
    model = ChatModel("m", client=client_of(server))
    run = run_loop([], model, prompt="go", retry=FAST, abort=abort)
    with promptly():
        return drive(run, watch)[1]


@pytest.mark.parametrize("phase", STALLS)
def test_an_abort_from_another_thread_ends_a_stalled_request(phase: str) -> None:
    with serve(STALLS[phase]) as server:
        assert stalled_run(server, phase).stop_reason == "aborted"


@pytest.mark.parametrize("phase", STALLS)
def test_sigint_ends_a_stalled_request(place: Place, phase: str) -> None:
    words = ["--client", "openai", "--output-format", "stream-json", "hi"]
    with serve(STALLS[phase]) as server:
        program = subprocess.Popen(
            [sys.executable, "-m", "coder", *words],
            cwd=place.ws,
            env=place.env(server),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
        assert program.stdout
        awaited = "text_delta" if phase.startswith("after") else '"asking"'
        assert any(awaited in line for line in program.stdout)
        while not server.requests:
            threading.Event().wait(0.01)
        with promptly():
            program.send_signal(signal.SIGINT)
            program.communicate()
    assert program.returncode == 130


def test_the_server_sees_that_an_aborted_answer_is_not_wanted() -> None:
    with serve(STALLS["after the first byte"]) as server, promptly():
        stalled_run(server, "after the first byte")
        while not server.gone:
            threading.Event().wait(0.01)


# ---- proxies -------------------------------------------------------------------------------------


def test_a_client_with_a_proxy_of_its_own_asks_there() -> None:
    with serve(Reply("well")) as proxy:
        http = httpx2.Client(proxy=f"http://127.0.0.1:{proxy.port}")
        client = openai.OpenAI(base_url="http://llm.example/v1", api_key="k", http_client=http)
        assert talk(client)[1].text == "well"
    assert proxy.paths == ["http://llm.example/v1/chat/completions"]


def test_a_client_with_an_authority_and_a_certificate_of_its_own(certificates: Path) -> None:
    secured = server_tls(certificates)
    secured.verify_mode = ssl.CERT_REQUIRED
    secured.load_verify_locations(certificates / "ca.pem")
    with secure(serve(Reply("well")), secured) as server:
        trusted = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
        for has_certificate in (False, True):
            if has_certificate:
                trusted.load_cert_chain(certificates / "good.pem", certificates / "good.key")
            client = client_of(server, http_client=httpx2.Client(verify=trusted))
            result = talk(client)[1]
            assert (result.text == "well") == has_certificate, result.text


# ---- the command line ----------------------------------------------------------------------------


def test_the_command_line_sends_by_the_client_if_it_is_asked_to(place: Place) -> None:
    """The key of the server, and neither its User-Agent nor an account that belongs to another."""
    with serve(Reply("well")) as server:
        by_flag = place.coder(
            "--client",
            "openai",
            "hi",
            server=server,
            OPENAI_API_KEY="sk-own",
            OPENAI_ORG_ID="org-1",
        )
        by_default = place.coder("hi", server=server)
    assert by_flag.stdout == by_default.stdout == "well\n"
    clients, direct = server.heads
    assert clients["authorization"] == "Bearer sk-own"
    assert "openai-organization" not in clients
    assert clients["user-agent"].startswith("OpenAI/Python")
    assert direct["user-agent"] == f"coder/{__version__}"


def test_a_model_is_found_by_the_client_too(place: Place) -> None:
    with serve(Reply("well")) as server:
        env = {"OPENAI_BASE_URL": server.url, "CODER_CLIENT": "openai"}
        assert place.coder("hi", **env).stdout == "well\n"
    assert server.requests[0]["model"] == "script"


def test_openais_own_address_needs_no_import_of_the_package(place: Place) -> None:
    asks_openai = (
        "import sys; from coder import ChatModel, run_loop\n"
        "events = list(run_loop([], ChatModel('m'), prompt='go'))\n"
        "print(events[-1].text, 'openai' in sys.modules, 'httpx2' in sys.modules)"
    )
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        proxy = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        env = {"OPENAI_API_KEY": "sk-own", "HTTPS_PROXY": proxy}
        done = place.coder(python=("-c", asks_openai), **env)
    assert f"nothing answers at the proxy {proxy}" in done.stdout, done.stderr
    assert done.stdout.endswith("False False\n")


@contextlib.contextmanager
def listening(serve_one: Callable[[socket.socket], object]) -> Iterator[int]:
    """A server that gives each connection to `serve_one`, in a thread of its own; its port."""

    def work() -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = door.accept()
                threading.Thread(
                    target=serve_one,
                    args=(caller,),
                    daemon=True,
                ).start()

    with socket.create_server(("127.0.0.1", 0)) as door:
        threading.Thread(target=work, daemon=True).start()
        yield door.getsockname()[1]
        door.shutdown(socket.SHUT_RDWR)


def pass_on(caller: socket.socket, port: int) -> None:
    """Both ways between a caller and a port of this machine, to the end."""

    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    with socket.create_connection(("127.0.0.1", port)) as server:
        back = threading.Thread(target=copy, args=(server, caller), daemon=True)
        back.start()
        copy(caller, server)
        back.join(5)


def through_proxy(place: Place, proxy: str, certificates: Path) -> str:
    """What the program says with this proxy in its environment."""
    env = {"ALL_PROXY": proxy, "SSL_CERT_FILE": str(certificates / "ca.pem")}
    env |= {"OPENAI_BASE_URL": "https://localhost/v1", "OPENAI_MODEL": "m"}
    done = place.coder("hi", **env)
    assert done.stdout == "well\n", done.stderr
    return done.stderr


def test_an_https_proxy_is_used_by_the_client_and_said_once(
    place: Place, certificates: Path
) -> None:
    asked: list[bytes] = []
    secured = server_tls(certificates)

    def tunnel(caller: socket.socket) -> None:
        with secured.wrap_socket(caller, server_side=True) as secure_caller:
            asked.append(secure_caller.recv(65536))
            secure_caller.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
            pass_on(secure_caller, server.port)

    with (
        secure(serve(Reply("well")), server_tls(certificates)) as server,
        listening(tunnel) as port,
    ):
        said = through_proxy(place, f"https://localhost:{port}", certificates)
    assert asked[0].startswith(b"CONNECT localhost:443")
    notice = f"The openai client sends the requests, through the proxy https://localhost:{port}"
    assert said.count(notice) == 1


def test_a_socks_proxy_is_used_by_the_client(place: Place, certificates: Path) -> None:
    pytest.importorskip("socksio")
    asked: list[bytes] = []

    def socks(caller: socket.socket) -> None:
        with caller:
            caller.recv(3)  # version 5, one way to authenticate: none
            caller.sendall(b"\5\0")
            asked.append(caller.recv(65536))
            caller.sendall(b"\5\0\0\1\0\0\0\0\0\0")
            pass_on(caller, server.port)

    with (
        secure(serve(Reply("well")), server_tls(certificates)) as server,
        listening(socks) as port,
    ):
        said = through_proxy(place, f"socks5://127.0.0.1:{port}", certificates)
    assert b"localhost" in asked[0]
    assert "The openai client sends the requests" in said
