"""Real networks: a server that is not there, certificates, proxies, connections that close,
addresses as people paste them."""

from __future__ import annotations

import base64
import contextlib
import gc
import gzip
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from coder import __version__
from coder.abort import Abort
from coder.ai import ChatModel
from coder.devtools.scripted import Reply, ScriptedServer
from coder.events import Event
from coder.loop import run_loop
from coder.providers.errors import RetryPolicy, explain
from coder.providers.https import proxy_of, tls_context
from coder.types import Limits, RunResult
from tests.harness import FAST, ask_model, drive, serve, types
from tests.terminal import promptly

ONCE = RetryPolicy(max_delay=-1.0)
PROXIES = "http_proxy https_proxy all_proxy no_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY"


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXIES.split(), "SSL_CERT_FILE", "SSL_CERT_DIR", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


def talk(url: str | None, retry: RetryPolicy = FAST) -> tuple[list[Event], RunResult]:
    model = ChatModel("m", base_url=url, api_key="k")
    return drive(run_loop([], model, prompt="go", retry=retry))


def final(url: str) -> str:
    """What is said of a fault that is not tried again."""
    with promptly(20):
        events, result = talk(url)
    assert result.error
    assert result.error.kind == "protocol"
    assert "retry" not in types(events)
    assert result.text.startswith("Error: ")
    return explain(result.error)


# ---- nobody there --------------------------------------------------------------------------------


@pytest.fixture
def nobody() -> Iterator[str]:
    """host:port where nobody answers, and which nobody else gets."""
    with socket.socket() as taken:  # and not listening
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("place", ["", "no-such-host.invalid"])
def test_a_server_that_never_answered_is_not_tried_again(nobody: str, place: str) -> None:
    url = f"http://{place or nobody}/v1"
    events, result = talk(url)
    assert "retry" not in types(events)
    assert result.error
    assert result.error.kind == "network"
    assert result.text.startswith(f"Error: nothing answers at {url}: ")


def test_an_address_that_is_dead_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host has dead addresses, one that refuses and one that answers; connecting to the first
    hangs, their queue is full."""
    with (
        contextlib.ExitStack() as stack,
        serve(Reply("well")) as server,
        promptly(),
    ):
        dead = stack.enter_context(
            socket.create_server(
                ("127.0.0.1", 0),
                backlog=0,
            )
        ).getsockname()
        for _ in range(4):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(dead)
        refusing = stack.enter_context(socket.socket())
        refusing.bind(("127.0.0.1", 0))
        there = [
            *[dead] * 4,
            refusing.getsockname(),
            ("127.0.0.1", server.port),
        ]
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", each) for each in there]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)  # the name service
        assert talk("http://three.example/v1")[1].text == "well"
        assert server.connections == 1


# ---- certificates --------------------------------------------------------------------------------


AUTHORITIES = {"ca": "good", "company": "inside", "between": "below"}  # and servers of theirs
OPENAI = (
    "api.openai.com",
    "eu.api.openai.com",
    "api.openai.com.example",
    "notopenai.com",
    "llm.example",
)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority `ca.pem`, and certificates of it for servers: good, old, and of OpenAI; a
    company's authority, which says nothing of what its key is for, as many do, and a server's
    certificate of that; and one between the first and a server."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(arguments: str) -> None:
        try:
            command = ["openssl", *shlex.split(arguments)]
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
        except FileNotFoundError:
            pytest.skip("there is no openssl to make certificates with")

    key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    usage = "-addext keyUsage=critical,keyCertSign,cRLSign"
    for name, extension in (("ca", usage), ("company", "")):
        subject = f"-subj /CN={name} {extension}"
        openssl(f"req -x509 {key} -days 9 {subject} -keyout {name}.key -out {name}.pem")
    server = "-addext subjectAltName=DNS:localhost"
    between = f"-addext basicConstraints=critical,CA:TRUE {usage}"
    for name, authority, extensions, days in (
        ("good", "ca", server, 9),
        ("old", "ca", server, -1),
        ("openai", "ca", f"-addext subjectAltName=DNS:{',DNS:'.join(OPENAI)}", 9),
        ("inside", "company", server, 9),
        ("between", "ca", between, 9),
        ("below", "between", server, 9),
    ):
        openssl(f"req {key} -subj /CN={name} {extensions} -keyout {name}.key -out {name}.req")
        signing = f"-CA {authority}.pem -CAkey {authority}.key -copy_extensions copy -days {days}"
        openssl(f"x509 -req -in {name}.req {signing} -out {name}.pem")
    for name in AUTHORITIES:
        (folder / f"{name}-folder").mkdir()
        shutil.copy(folder / f"{name}.pem", folder / f"{name}-folder")
        openssl(f"rehash {name}-folder")
    return folder


def server_tls(certificates: Path, name: str = "good") -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / f"{name}.pem", certificates / f"{name}.key")
    return context


@contextmanager
def https(certificates: Path, name: str = "good") -> Iterator[ScriptedServer]:
    with secure(serve(Reply("well")), server_tls(certificates, name)) as server:
        yield server


def secure(server: ScriptedServer, context: ssl.SSLContext) -> ScriptedServer:
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.url = f"https://localhost:{server.port}/v1"
    return server


@pytest.mark.parametrize(
    ("name", "trusted", "said"),
    [
        ("good", False, "unable to get local issuer certificate. The certificate has"),
        ("old", True, "certificate has expired. "),
        ("openai", True, "certificate is not valid for 'localhost'. "),
    ],
)
def test_a_certificate_that_is_refused_is_said_at_once(
    certificates: Path, monkeypatch: pytest.MonkeyPatch, name: str, trusted: bool, said: str
) -> None:
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "ca.pem"))
    with https(certificates, name) as server:
        text = final(server.url)
    assert text.startswith(f"the certificate of {server.url} is refused: ")
    assert said in text


@pytest.mark.parametrize("authority", AUTHORITIES)
@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "SSL_CERT_DIR"])
def test_authorities_may_be_configured(
    certificates: Path, monkeypatch: pytest.MonkeyPatch, variable: str, authority: str
) -> None:
    """Also those that Python refuses from 3.13 on if they are the system's, and one that is
    between."""
    place = f"{authority}.pem" if variable == "SSL_CERT_FILE" else f"{authority}-folder"
    monkeypatch.setenv(variable, str(certificates / place))
    with https(certificates, AUTHORITIES[authority]) as server:
        assert talk(server.url)[1].text == "well"


def test_if_python_knows_no_authorities_the_clients_own_library_finds_them(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some builds of Python are: an empty variable takes the place of what was compiled in."""
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.setenv(name, "")
    known = ssl.get_default_verify_paths()
    assert known.cafile is None
    assert known.capath is None
    with https(certificates) as server:
        assert "unable to get local issuer certificate" in final(server.url)
    found = tls_context()
    assert found.verify_mode == ssl.CERT_REQUIRED
    assert found.check_hostname
    usual = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt")
    if any(Path(each).exists() for each in usual):
        assert found.cert_store_stats()["x509_ca"] > 0


def test_a_file_of_authorities_that_is_none_is_said(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong in ("no-such.pem", "ca.key"):
        monkeypatch.setenv("SSL_CERT_FILE", str(certificates / wrong))
        assert "SSL_CERT_DIR cannot be loaded" in final("https://localhost:9/v1")


def test_http_on_an_https_port_and_the_reverse_are_said_at_once(certificates: Path) -> None:
    with serve(Reply("well")) as server:
        assert "has an address with http://" in final(server.url.replace("http://", "https://"))
    with https(certificates) as server:
        error = talk(server.url.replace("https://", "http://"))[1].error
        assert error
        assert "was closed before an answer" in error.message
        assert explain(error).endswith("OPENAI_BASE_URL begins with https://.")


@pytest.mark.parametrize("version", ["TLSv1_2", "TLSv1_3"])
def test_a_server_that_wants_a_client_certificate_is_said_at_once(
    certificates: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """In TLS 1.3 its alert comes when the client believes to be connected."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "ca.pem"))
    context = server_tls(certificates)
    context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(certificates / "ca.pem")

    def refuse(caller: socket.socket) -> None:
        with caller.dup() as open_on, contextlib.suppress(OSError):
            with contextlib.suppress(ssl.SSLError):
                context.wrap_socket(caller, server_side=True).recv(1)
            while open_on.recv(65536):  # a reset might overtake the alert
                pass

    with listening(refuse) as port:
        text = final(f"https://localhost:{port}/v1")
    assert " refuses the connection (" in text
    assert "alert" in text
    assert "If it asks for a client certificate: none is sent." in text


# ---- proxies -------------------------------------------------------------------------------------


@contextmanager
def listening(answer: Callable[[socket.socket], object]) -> Iterator[int]:
    """A server that gives each connection to `answer` and closes it; its port."""

    def work() -> None:
        with contextlib.suppress(OSError):
            while True:
                caller = door.accept()[0]
                with caller:
                    answer(caller)

    with socket.create_server(("127.0.0.1", 0)) as door:
        threading.Thread(target=work, daemon=True).start()
        yield door.getsockname()[1]
        door.shutdown(socket.SHUT_RDWR)


THERE = "https://llm.example/v1"


@pytest.mark.parametrize(
    ("name", "status", "passes"),
    [
        ("HTTPS_PROXY", "407 Proxy Authentication Required", False),
        ("ALL_PROXY", "403 Forbidden", False),
        ("ALL_PROXY", "502 Bad Gateway", True),  # it may reach the server later
    ],
)
def test_a_refusing_proxy_is_named_and_asked_again_if_it_fails(
    monkeypatch: pytest.MonkeyPatch, name: str, status: str, passes: bool
) -> None:
    def refuse(caller: socket.socket) -> None:
        asked.append(caller.recv(65536))
        caller.sendall(f"HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n".encode())

    asked: list[bytes] = []
    with listening(refuse) as port, promptly(20):
        monkeypatch.setenv(name, f"http://me:SECRET@127.0.0.1:{port}")
        events, result = talk(THERE)
    assert asked[0].startswith(b"CONNECT llm.example:443")
    assert result.error
    assert ("retry" in types(events)) == (len(asked) > 1) == passes
    assert result.error.kind == ("network" if passes else "protocol")
    assert explain(result.error).startswith(
        f"the proxy http://127.0.0.1:{port} ({name}) does not connect to llm.example:443: "
        f"HTTP status {status[:3]}. Change that"
    )


def test_a_proxy_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, nobody: str) -> None:
    monkeypatch.setenv("ALL_PROXY", nobody)
    events, result = talk(THERE)
    assert f"nothing answers at the proxy http://{nobody} (ALL_PROXY): " in result.text
    assert "retry" not in types(events)
    assert result.error
    assert "NO_PROXY" in explain(result.error)


@contextmanager
def tunnel(port: int) -> Iterator[tuple[str, list[bytes]]]:
    """A proxy that connects one caller to a port of this machine; its address, and what it was
    asked."""
    asked: list[bytes] = []

    def passed(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def serve_one(caller: socket.socket) -> None:
        asked.append(caller.recv(65536))
        with socket.create_connection(("127.0.0.1", port)) as server:
            caller.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
            back = threading.Thread(target=passed, args=(server, caller), daemon=True)
            back.start()
            passed(caller, server)
            back.join(5)

    with listening(serve_one) as door:
        yield f"http://me:S%3ACRET@127.0.0.1:{door}", asked


def test_openai_gets_what_it_knows_and_a_proxy_no_key_of_ours(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "ca.pem"))
    monkeypatch.setenv("OPENAI_ORG_ID", "org-1")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-env")
    with (
        https(certificates, "openai") as server,
        tunnel(server.port) as (address, asked),
    ):
        monkeypatch.setenv("HTTPS_PROXY", address)
        model = ChatModel("m", headers={"x-team": "ours"})
        assert ask_model(model)[1].text == "well"
        [head] = server.heads
        assert server.paths == ["/v1/chat/completions"]
        assert head["host"] == "api.openai.com"
        assert head["openai-organization"] == "org-1"
        assert head["x-team"] == "ours"
        assert head["authorization"] == "Bearer sk-env"
        assert head["user-agent"] == f"coder/{__version__}"
        assert not [name for name in head if name.startswith("x-stainless")]
        place = "api.openai.com:443"
        word = base64.b64encode(b"me:S:CRET").decode()
        assert asked[0].decode() == (
            f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\nProxy-Authorization: Basic {word}\r\n\r\n"
        )


@pytest.mark.parametrize(
    ("place", "gets"),
    [
        ("api.openai.com", True),
        ("eu.api.openai.com", True),
        ("API.OpenAI.com:443", True),
        ("api.openai.com.example", False),
        ("notopenai.com", False),
        ("llm.example", False),
    ],
)
def test_organisation_and_project_go_to_openai_however_it_is_named(
    certificates: Path, monkeypatch: pytest.MonkeyPatch, place: str, gets: bool
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "ca.pem"))
    monkeypatch.setenv("OPENAI_ORG_ID", "org-1")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "proj-1")
    with (
        https(certificates, "openai") as server,
        tunnel(server.port) as (address, _),
    ):
        monkeypatch.setenv("HTTPS_PROXY", address)
        assert talk(f"https://{place}/v1")[1].text == "well"
        [head] = server.heads
    named = head.get("openai-organization"), head.get("openai-project")
    assert named == (("org-1", "proj-1") if gets else (None, None))
    assert head["user-agent"] == f"coder/{__version__}"


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:port", "http://[::1:9", "http://:1", "socks5://127.0.0.1:1080"]
)
def test_a_wrong_address_of_a_proxy_is_said(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("HTTPS_PROXY", address)
    events, result = talk(THERE)
    assert result.error
    assert "HTTPS_PROXY" in result.text
    assert "retry" not in types(events)
    assert "socks" not in address or "has to begin with http://" in result.text


NO_PROXY = [  # host and port of a server, the entries that except it, the entries that do not
    (
        "llm.example",
        "llm.example, *, EXAMPLE, .example, *.example, llm.example:443, .llm.example, llm.example.",
        "lm.example, xllm.example, a.llm.example, example:80, llm.example:8443, exampl, 0.0.0.0/0, .",
    ),
    ("llm.example:8443", "example:8443, llm.example", "llm.example:443"),
    ("a.b.corp", "*.corp, .b.corp", "c.corp, *.b.corpo, corp.b"),
    (
        "10.1.2.3",
        "10.0.0.0/8, 10.1.2.3, 10.1.2.3:443, 10.1.2.3/32, 10.9.9.9/8, 0.0.0.0/0",
        "10.0.0.0/16, 3, 2.3, .2.3, 10.1.2.3:80, 10.0.0.0/99, 10.0.0, ::/0, 10.1.2.30",
    ),
    ("10.1.2.3:8443", "10.1.2.3:8443, 10.0.0.0/8", "10.1.2.3:443"),
    (
        "[::1]",
        "[::1], ::1, [::1]:443, ::/96, 0:0:0:0:0:0:0:1, [::]/96",
        "[::1]:80, ::2, [::2], fd00::/8, 1, 127.0.0.1, 0.0.0.0/0",
    ),
    ("[fd12::7]:8443", "fd00::/8, [fd12::7]:8443, [fd12::7], fd12::7", "[fd12::7]:443, fe80::/10"),
]


@pytest.mark.parametrize(
    ("place", "within", "outside"),
    NO_PROXY,
    ids=lambda value: value[:20],
)
def test_no_proxy_lists_names_addresses_and_networks(
    monkeypatch: pytest.MonkeyPatch, place: str, within: str, outside: str
) -> None:
    url = f"https://{place}/v1"
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        assert proxy_of(url)
        assert not proxy_of(f"http://{place}/v1")
        for entry in within.split(", "):
            for entries in (entry, f"x.example,{entry}", f" local {entry.upper()} "):
                monkeypatch.setenv(name, entries)
                assert proxy_of(url) is None, entries
        for entries in (*outside.split(", "), outside, ",", ""):
            monkeypatch.setenv(name, entries)
            assert proxy_of(url), entries


@pytest.mark.parametrize(
    "through_proxy",
    [False, True],
    ids=["TLS", "CONNECT"],
)
def test_an_abort_ends_any_handshake(monkeypatch: pytest.MonkeyPatch, through_proxy: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"127.0.0.1:{silent.getsockname()[1]}"
        if through_proxy:
            monkeypatch.setenv("HTTPS_PROXY", f"http://{place}")
        abort = Abort()
        threading.Timer(0.3, abort.set).start()
        model = ChatModel("m", base_url=THERE if through_proxy else f"https://{place}/v1")
        events, result = ask_model(model, abort=abort)
    assert result.stop_reason == "aborted", "it was given up"
    assert "retry" not in types(events), "it was given up"


def test_a_refusal_that_comes_before_the_whole_request_is_sent_is_read() -> None:
    def refuse(caller: socket.socket) -> None:
        caller.recv(1000)
        caller.sendall(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
        caller.shutdown(socket.SHUT_WR)
        while caller.recv(1 << 20):
            pass

    with listening(refuse) as port:
        model = ChatModel("m", base_url=f"http://127.0.0.1:{port}/v1")
        _, result = drive(
            run_loop(
                [],
                model,
                prompt="x" * 5_000_000,
                retry=FAST,
            )
        )
    assert result.error
    assert (result.error.kind, result.error.status) == ("overflow", 413)


# ---- bodies --------------------------------------------------------------------------------------

EVENT = b'data: {"choices": [{"delta": {"content": "well"}, "finish_reason": "stop"}]}\n\n'
BODY = EVENT + b"data: [DONE]\n\n"
HALF = len(BODY) // 2


def chunked(*parts: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + end


CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
GZIP = b"content-encoding: gzip\r\n" + CHUNKED
CUT = "in the middle of the answer"
CLOSED = "before an answer"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (CHUNKED + chunked(BODY), "well"),
        (CHUNKED + chunked(BODY[:HALF], BODY[HALF:]), "well"),
        (
            CHUNKED + chunked(*(bytes([byte]) for byte in BODY)),
            "well",
        ),
        (CHUNKED + chunked(BODY, end=b"0;x=1\r\nTrailer: a\r\n\r\n"), "well"),
        (CHUNKED + b"%X ; name=value\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY), "well"),
        (b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY), "well"),
        (b"\r\n" + BODY, "well"),
        (GZIP + chunked(gzip.compress(BODY)), "well"),
        (GZIP + chunked(b"no gzip"), CUT),
        (CHUNKED + chunked(EVENT[:9], end=b""), CUT),
        (CHUNKED + b"0000%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY), "well"),
        (CHUNKED + b"zz\r\n" + BODY, CUT),
        (CHUNKED + b"f" * 8 + b"\r\n" + BODY, CUT),
        (CHUNKED + b"-5\r\n" + BODY, CUT),
        (CHUNKED + b"5" * 10_000, CUT),
        (b"content-length: 999\r\n\r\n" + EVENT[:9], CUT),
        (b"x" * 70_000, CLOSED),
    ],
    ids=range(17),
)
@pytest.mark.parametrize(
    "size",
    [1, 1 << 20],
    ids=["bytes", "whole"],
)
def test_a_body_is_read_in_each_form_but_not_broken(answer: bytes, said: str, size: int) -> None:
    head = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\n"
    whole = head + b"content-type: text/event-stream\r\n" + answer
    parts = [whole[i : i + size] for i in range(0, len(whole), size)]

    def send(caller: socket.socket) -> None:
        caller.recv(65536)
        for part in parts[:100_000]:
            caller.sendall(part)
        if b"zz" in answer or b"fff" in answer or b"555" in answer:  # and the connection stays open
            caller.recv(1)

    with listening(send) as port, promptly(20):
        assert said in talk(f"http://127.0.0.1:{port}/v1", ONCE)[1].text


def answering(*answers: bytes) -> Callable[[socket.socket], None]:
    """Give these answers, each to a request of one connection; then close it."""

    def answer(caller: socket.socket) -> None:
        for each in answers:
            if not read_request(caller):
                return
            caller.sendall(each)

    return answer


def read_request(caller: socket.socket) -> bytes:
    """A request, to the end of its body; b"" where the client has left."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = caller.recv(65536)
        if not more:
            return b""
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    left = int(head.lower().partition(b"content-length: ")[2].split()[0]) - len(body)
    while left > 0:
        left -= len(caller.recv(left))
    return data


OK = b"HTTP/1.1 200 OK\r\n"
LENGTH = b"content-length: %d\r\n\r\n%s"
BARE = zlib.compress(BODY)[2:-4]  # without the header and the sum of zlib


@pytest.mark.parametrize(
    ("encoding", "body", "said"),
    [
        *((word, BODY, "well") for word in (b"", b"identity", b"none", b"utf-8", b"aws-chunked")),
        *((word, BODY, "well") for word in (b"identity, identity", b" , ", b"UTF-8", b"*")),
        *((word, gzip.compress(BODY), "well") for word in (b"gzip", b"x-gzip", b"GZIP")),
        *((word, gzip.compress(BODY), "well") for word in (b"gzip, identity", b"none,gzip")),
        *((b"deflate", body, "well") for body in (zlib.compress(BODY), BARE)),
        (b"deflate, gzip", gzip.compress(zlib.compress(BODY)), "well"),
        *(
            (
                word,
                b"\x8b\x00\x80",
                word.decode(),
            )
            for word in (b"br", b"zstd")
        ),
        (b"gzip, br", b"\x8b\x00\x80", "compressed with br"),
    ],
)
def test_gzip_and_deflate_are_read_and_what_is_no_compression_is_ignored(
    encoding: bytes, body: bytes, said: str
) -> None:
    answer = OK + b"content-encoding: %s\r\n" % encoding + LENGTH % (len(body), body)
    with listening(answering(answer)) as port, promptly(20):
        events, result = talk(f"http://127.0.0.1:{port}/v1")
    assert said in result.text
    assert "retry" not in types(events)
    assert said == "well" or "which was not asked for" in result.text


def test_an_unreadable_error_keeps_its_status() -> None:
    answer = b"HTTP/1.1 401 No\r\ncontent-encoding: br\r\n" + LENGTH % (1, b"x")
    with listening(answering(answer)) as port:
        error = talk(f"http://127.0.0.1:{port}/v1")[1].error
    assert error
    assert (error.kind, error.status) == ("auth", 401)


JSON_BODY = b'{"choices": [{"message": {"content": "well"}, "finish_reason": "stop"}]}'


@pytest.mark.parametrize(
    ("answer", "said", "kind"),
    [
        (
            OK + b"x-a: 1\r\n  transfer-encoding: chunked\r\n" + LENGTH % (len(BODY), BODY),
            "well",
            "",
        ),
        (OK + b"transfer-encoding:\r\n\t chunked\r\n\r\n" + chunked(BODY), "well", ""),
        (OK + b"x-a: 1\r\n \r\n" + LENGTH % (len(BODY), BODY), "well", ""),
        (
            b"HTTP/1.1 200 OK\ntransfer-encoding: chunked\n\n"
            + b"%x\n%s\n0\n\n" % (len(JSON_BODY), JSON_BODY),
            "well",
            "",
        ),
        (OK + b"\r\n" + JSON_BODY, "well", ""),
        (OK + b"\r\n" + JSON_BODY[:50], "cut off", "incomplete"),
        (OK + b"\r\n" + JSON_BODY[:-1], "cut off", "incomplete"),
        (OK + LENGTH % (50, JSON_BODY[:50]), "not an API answer", "protocol"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "sent nothing", "incomplete"),
        (b"HTTP/1.1 204 No Content\r\n" + CHUNKED, "sent nothing", "incomplete"),
        (b"HTTP/1.1 302 Found\r\nlocation: http://[\r\n\r\n", "to http://[", "protocol"),
        (b"HTTP/1.1 302 Found\r\nlocation: //[x/\r\n\r\n", "to //[x", "protocol"),
        *(
            (
                b"HTTP/1.1 %s Odd\r\n" % status + LENGTH % (len(BODY), BODY),
                status.decode(),
                "protocol",
            )
            for status in (b"000", b"099", b"101", b"600", b"999")
        ),
    ],
    ids=lambda value: repr(value)[2:40],
)
def test_an_odd_head_is_read_and_an_answer_that_is_none_ends_at_once(
    answer: bytes, said: str, kind: str
) -> None:
    """The connection stays open if the answer says where it ends."""
    stays = not (answer.startswith(OK + b"\r\n"))
    done = threading.Event()

    def send(caller: socket.socket) -> None:
        read_request(caller)
        caller.sendall(answer)
        if stays:
            done.wait(60)

    with listening(send) as port, promptly(20):
        try:
            result = talk(f"http://127.0.0.1:{port}/v1", ONCE)[1]
        finally:
            done.set()
    assert said in result.text
    assert (result.error.kind if result.error else "") == kind


@pytest.mark.parametrize(
    ("start", "more"),
    [(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), (b"HTTP/1.1 200 OK\r\nx: ", b"y"), (b"", b"H")],
    ids=["interim answers", "a header", "a status line"],
)
def test_a_head_without_an_end_is_not_waited_for(start: bytes, more: bytes) -> None:
    def send(caller: socket.socket) -> None:
        caller.sendall(start)
        while not done.wait(0.02):
            caller.sendall(more)

    done = threading.Event()
    with listening(send) as port:
        model = ChatModel("m", base_url=f"http://127.0.0.1:{port}/v1", first_byte_timeout=0.3)
        run = run_loop(
            [],
            model,
            prompt="go",
            retry=ONCE,
            limits=Limits(max_seconds=20),
        )
        assert "no data for 0.3 s" in drive(run)[1].text
        done.set()


# ---- connections that are kept -------------------------------------------------------------------


# What the server says of it, the seconds between two requests, and the connections that they need
KEPT: dict[str, tuple[str, float, int]] = {
    "nothing, soon": ("", 0, 1),
    "nothing, late": ("", 5.2, 2),
    "a minute, soon": ("timeout=60, max=100", 0, 1),
    "ten minutes, late": ("timeout=600", 5.2, 2),
    "a second, late": ("max=5; Timeout = 1", 1.2, 2),
    "no second, soon": ("timeout=0", 0, 2),
}


def test_a_connection_is_kept_for_5_s_or_for_as_long_as_the_server_says() -> None:
    def connections_of(name: str) -> int:
        promise, pause, _ = KEPT[name]
        with serve(Reply("well", headers={"Keep-Alive": promise})) as server:
            model = ChatModel("m", base_url=server.url)
            for wait in (0, pause):
                threading.Event().wait(wait)
                assert ask_model(model)[1].text == "well"
            return server.connections

    with ThreadPoolExecutor(len(KEPT)) as pool:  # the seconds pass at the same time
        needed = dict(zip(KEPT, pool.map(connections_of, KEPT)))
    assert needed == {name: connections for name, (*_, connections) in KEPT.items()}


def test_a_connection_is_probed_while_nothing_comes() -> None:
    """So that a NAT does not forget it, and one that is gone is noticed."""
    with serve(Reply("well")) as server:
        model = ChatModel("m", base_url=server.url)
        ask_model(model)
        [kept] = [each for each in gc.get_objects() if is_connected(each, server.port)]
        assert kept.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if sys.platform == "linux":
            assert 0 < kept.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60


def is_connected(thing: object, port: int) -> bool:
    try:
        return isinstance(thing, socket.socket) and thing.getpeername()[1] == port
    except (OSError, ReferenceError):
        return False


EVIL = BODY.replace(b"well", b"evil")
SURPLUS = OK + LENGTH % (len(EVIL), EVIL)


@pytest.mark.parametrize("framing", ["length", "chunked", "204"])
@pytest.mark.parametrize(
    "apart",
    [True, False],
    ids=["head apart", "at once"],
)
@pytest.mark.parametrize(
    "secure",
    [True, False],
    ids=["TLS", "plain"],
)
def test_what_comes_after_an_answer_is_no_answer_to_the_next_request(
    certificates: Path, monkeypatch: pytest.MonkeyPatch, secure: bool, apart: bool, framing: str
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "ca.pem"))
    answers = {
        "length": OK + LENGTH % (len(BODY), BODY),
        "chunked": OK + CHUNKED + chunked(BODY, end=b"0\r\nTrailer: x\r\n\r\n"),
        "204": b"HTTP/1.1 204 No Content\r\n\r\n",
    }
    answer = answers[framing] + SURPLUS
    head, end, rest = answer.partition(b"\r\n\r\n")
    writes = [head + end, rest] if apart else [answer]  # each of them is one record of TLS
    secured = server_tls(certificates)

    def reply(caller: socket.socket) -> None:
        wrapped = secured.wrap_socket(caller, server_side=True) if secure else caller
        with contextlib.suppress(OSError), wrapped:
            while read_request(wrapped):
                for each in writes:
                    wrapped.sendall(each)

    with listening(reply) as port, promptly(30):
        url = f"https://localhost:{port}/v1" if secure else f"http://127.0.0.1:{port}/v1"
        model = ChatModel("m", base_url=url)
        texts = [
            drive(
                run_loop(
                    [],
                    model,
                    prompt="go",
                    retry=ONCE,
                )
            )[1].text
            for _ in range(3)
        ]
    assert [("evil" in text, "well" in text) for text in texts] == [(False, framing != "204")] * 3


def hanging_up(answer: bytes, seconds: float) -> Callable[[socket.socket], None]:
    """On each connection one request is answered well; the next one, so many seconds later, as
    given."""

    def reply(caller: socket.socket) -> None:
        answering(OK + LENGTH % (len(BODY), BODY))(caller)
        if read_request(caller):
            threading.Event().wait(seconds)
            caller.sendall(answer)

    return reply


TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\n" + LENGTH % (1, b"x")


@pytest.mark.parametrize(
    ("answer", "seconds", "retries"),
    [
        (b"", 0, 0),
        (b"", 1.3, 1),
        (TIMED_OUT, 0, 0),
        (TIMED_OUT, 1.3, 1),
    ],
    ids=["closed at once", "closed late", "408 at once", "408 late"],
)
def test_a_request_that_a_server_had_for_a_while_is_not_sent_again_unseen(
    answer: bytes, seconds: float, retries: int
) -> None:
    counted = []
    with listening(hanging_up(answer, seconds)) as port:
        for _ in range(3):  # a busy machine may stand still for a second
            model = ChatModel("m", base_url=f"http://127.0.0.1:{port}/v1")
            runs = [ask_model(model) for _ in range(2)]
            assert [result.text for _, result in runs] == ["well", "well"]
            counted.append([types(events).count("retry") for events, _ in runs])
            if counted[-1] == [0, retries]:
                break
    assert counted[-1] == [0, retries], counted


def test_a_408_on_a_new_connection_is_a_failed_attempt() -> None:
    with listening(answering(TIMED_OUT)) as port:
        error = talk(f"http://127.0.0.1:{port}/v1", ONCE)[1].error
    assert error
    assert error.status == 408


# ---- words ---------------------------------------------------------------------------------------


def explained(reply: Reply, path: Callable[[str], str] = lambda url: url) -> str:
    with serve(reply) as server:
        error = talk(path(server.url))[1].error
    assert error
    return explain(error).replace(f"http://127.0.0.1:{server.port}", "URL")


def test_a_break_in_the_middle_of_an_answer_is_said_with_its_likely_cause() -> None:
    for reply in Reply("half an answer", cut=2, close="reset"), Reply("half an answer", cut=2):
        text = explained(reply)
        assert "in the middle of the answer" in text or "cut off" in text
        assert "time limit" in text
    assert explained(Reply(chunks=[])).startswith("the server sent nothing. ")


def test_a_404_shows_where_and_hints_at_v1() -> None:
    missing = Reply("Not Found", status=404)
    assert explained(missing, lambda url: url.removesuffix("/v1")) == (
        "not found: Not Found at URL/chat/completions (HTTP 404). Check the base URL (OPENAI_BASE_URL): it mostly ends in /v1."
    )
    assert "at URL/v1/chat/completions (HTTP 404). Check the model's name" in explained(missing)
    assert " at " not in explained(Reply("The model 'x' does not exist", status=404))


@pytest.mark.parametrize(
    "more", ["/chat/completions", "/chat/completions/", "/chat/completions?api-version=1"]
)
def test_a_pasted_address_of_the_call_is_taken(more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(Reply("well")) as server:
        assert talk(server.url + more)[1].text == "well"
        monkeypatch.setenv("OPENAI_BASE_URL", server.url + more)
        assert talk(None)[1].text == "well"
        assert {path.partition("?")[0] for path in server.paths} == {"/v1/chat/completions"}


def test_a_path_that_begins_with_two_slashes_is_sent_as_it_is() -> None:
    asked: list[bytes] = []
    with listening(lambda caller: asked.append(caller.recv(65536))) as port:
        talk(f"http://127.0.0.1:{port}//v1", ONCE)
    assert asked[0].startswith(b"POST //v1/chat/completions HTTP/1.1")
