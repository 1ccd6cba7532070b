"""Connections to a model server, opened directly or through a proxy, and why there is none.

Name lookup, connecting and handshakes cannot be interrupted, so they run in a worker thread, which an abort leaves
behind. Everything later runs in the thread that asked: shutting the socket ends a read that blocks.
"""

from __future__ import annotations

import base64
import errno
import http.client
import ipaddress
import os
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from coder.abort import TICK, Abort
from coder.providers.address import shown_url
from coder.types import ModelError

CONNECT_TIMEOUT = 10.0  # seconds, for the connection and for each handshake
SECOND_TRY = 0.5  # seconds before it


@dataclass(frozen=True)
class Proxy:
    """A proxy of the environment; `variable` is the name that it was found under."""

    url: str
    variable: str

    def __str__(self) -> str:
        return f"the proxy {shown_url(self.url)} ({self.variable})"


class ProxyError(Exception):
    """The proxy answered and did not connect; `transient`: it may do so later."""

    def __init__(self, message: str, transient: bool) -> None:
        super().__init__(message)
        self.transient = transient


def proxy_of(url: str) -> Proxy | None:
    """The environment's proxy for a server, unless NO_PROXY excepts it. Only for https: a proxy would read the key of
    an http request."""
    from urllib.request import getproxies, proxy_bypass  # late: 30 ms

    parts = urlsplit(url)
    if parts.scheme != "https":
        return None
    known, host = getproxies(), parts.hostname or ""
    address = known.get("https") or known.get("all") or ""
    excepted = any(_is_within(host, entry.strip()) for entry in known.get("no", "").split(","))
    if not address or excepted or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    names = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
    variable = next((name for name in names if os.environ.get(name)), "the system's settings")
    address = address if "://" in address else f"http://{address}"
    if address.partition("://")[0].lower() not in ("http", "socks5", "socks5h"):
        message = f"{variable} is {shown_url(address)}, and has to begin with http:// or socks5://"
        raise ModelError("protocol", message, advice=PAST_PROXY)
    return Proxy(address, variable)


def _is_within(host: str, network: str) -> bool:
    """Is this an address of a network such as 10.0.0.0/8?"""
    with suppress(ValueError):
        return ipaddress.ip_address(host) in ipaddress.ip_network(network, strict=False)
    return False


# ---- opening -------------------------------------------------------------------------------------


def connect(url: str, proxy: Proxy | None, tls: Callable[[], ssl.SSLContext]) -> socket.socket:
    """A connection to a server, ready for a request. Raises OSError (ssl.SSLError is one) or ProxyError."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    place = (host, port)
    if proxy:
        there = urlsplit(proxy.url)
        usual = 80 if there.scheme == "http" else 1080
        place = (there.hostname or "", there.port or usual)
    context = tls() if parts.scheme == "https" else None  # at first: it may not be there
    sock = socket.create_connection(place, CONNECT_TIMEOUT)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if proxy:
            (_tunnel if there.scheme == "http" else _socks)(sock, proxy, host, port)
        return context.wrap_socket(sock, server_hostname=host) if context else sock
    except BaseException:
        sock.close()
        raise


def _credentials(proxy: Proxy) -> tuple[str, str]:
    parts = urlsplit(proxy.url)
    return unquote(parts.username or ""), unquote(parts.password or "")


def _tunnel(sock: socket.socket, proxy: Proxy, host: str, port: int) -> None:
    """Let an HTTP proxy connect to the server (CONNECT)."""
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    head = f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n"
    name, password = _credentials(proxy)
    if name or password:
        word = base64.b64encode(f"{name}:{password}".encode()).decode()
        head += f"Proxy-Authorization: Basic {word}\r\n"
    sock.sendall(f"{head}\r\n".encode())
    answer = http.client.HTTPResponse(sock, method="CONNECT")
    answer.begin()
    answer.close()
    if answer.status >= 300:
        raise ProxyError(f"{answer.status} {answer.reason}".strip(), answer.status >= 500)


def _socks(sock: socket.socket, proxy: Proxy, host: str, port: int) -> None:
    """Let a SOCKS 5 proxy connect to the server, which it looks up itself (RFC 1928, RFC 1929)."""
    name, password = (each.encode() for each in _credentials(proxy))
    sock.sendall(b"\x05\x02\x00\x02" if name else b"\x05\x01\x00")
    with sock.makefile("rb", buffering=0) as file:
        version, method = _exactly(file, 2)
        if method == 2 and name:
            sock.sendall(b"\x01" + bytes([len(name)]) + name + bytes([len(password)]) + password)
            if _exactly(file, 2)[1]:
                raise ProxyError("user or password refused", transient=False)
        elif version != 5 or method:
            raise ProxyError("it wants another way to log in", transient=False)
        place = host.encode("idna")
        sock.sendall(b"\x05\x01\x00\x03" + bytes([len(place)]) + place + struct.pack(">H", port))
        _, code, _, kind = _exactly(file, 4)
        if code:
            raise ProxyError(f"could not connect (SOCKS reply {code})", transient=True)
        _exactly(file, {1: 6, 4: 18}.get(kind) or _exactly(file, 1)[0] + 2)  # its own address


def _exactly(file: Any, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = file.read(size - len(data))
        if not more:
            raise ConnectionResetError("the proxy closed the connection")
        data += more
    return data


def in_background(
    open_socket: Callable[[], socket.socket], check: Callable[[], object]
) -> socket.socket:
    """What `open_socket` returns, run in a worker thread; raises what it raises.

    `check` is called every TICK seconds; where it raises, the socket is closed as soon as there is one.
    """
    outcome: list[socket.socket | BaseException] = []
    done, left = threading.Event(), threading.Event()

    def close() -> None:
        for each in outcome:
            if isinstance(each, socket.socket):
                each.close()

    def work() -> None:
        try:
            outcome.append(open_socket())
        except BaseException as error:
            outcome.append(error)
        done.set()
        if left.is_set():
            close()

    threading.Thread(target=work, daemon=True, name="connect").start()
    try:
        while not done.wait(TICK):
            check()
        check()
    except BaseException:
        left.set()
        close()
        raise
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def is_open(sock: socket.socket) -> bool:
    """Is an idle connection still open? The server has sent nothing, so an end is all that can be read."""
    looker = select.poll()
    looker.register(sock, select.POLLIN)
    return not looker.poll(0)


class Connections:
    """The connections to one server: idle ones that an earlier request has left, and new ones."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answered = False  # the server did, at least once
        self._idle: list[socket.socket] = []
        self._tls: ssl.SSLContext | None = None

    def idle(self) -> socket.socket | None:
        """One that the server has not closed."""
        while self._idle:
            with suppress(IndexError):  # another thread took it
                sock = self._idle.pop()
                if is_open(sock):
                    return sock
                sock.close()
        return None

    def keep(self, sock: socket.socket) -> None:
        """Keep a connection for the next request."""
        self._idle.append(sock)

    def open(self, abort: Abort, check: Callable[[], object]) -> socket.socket:
        """A new one. Where nothing answers at an address that never did, it is tried twice and no more. Raises
        ModelError, Aborted, and what `check` raises, which is called meanwhile."""
        try:
            return self._open(check)
        except Unreachable:
            if self.answered:
                raise
        abort.wait(SECOND_TRY)
        try:
            return self._open(check)
        except Unreachable as failure:
            failure.retryable = False
            raise

    def _open(self, check: Callable[[], object]) -> socket.socket:
        proxy = proxy_of(self.url)
        try:
            return in_background(lambda: connect(self.url, proxy, self.tls), check)
        except (OSError, ValueError, http.client.HTTPException, ProxyError) as error:
            raise connect_error(error, self.url, proxy) from error

    def tls(self) -> ssl.SSLContext:
        """The authorities that the openai client itself would trust; loading them takes 50 ms. Raises ModelError."""
        if self._tls is None:
            import httpx2  # the openai client's own HTTP library

            try:
                self._tls = httpx2.create_ssl_context()
            except OSError as error:
                names = (name for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if os.environ.get(name))
                said = " and ".join(f"{name} is {os.environ[name]}" for name in names)
                place = said or "these are the authorities of the system"
                message = f"{place}, and cannot be loaded: {error.strerror or error}"
                raise ModelError("protocol", message, advice=OWN_CA) from error
        return self._tls

    def closed(self) -> ModelError:
        """The error of a connection that ended before an answer."""
        plain = not self.answered and self.url.startswith("http:")
        place = str(proxy_of(self.url) or shown_url(self.url))
        return closed(place, PERHAPS_TLS if plain else "")


# ---- what goes wrong ------------------------------------------------------------------------------

REFUSED = {
    errno.ECONNREFUSED,
    errno.ETIMEDOUT,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.EHOSTDOWN,
}
OWN_CA = (
    "SSL_CERT_FILE names a file with the authorities to trust (PEM), also with one of your own."
)
PAST_PROXY = "Mend that variable, or name the server's host in NO_PROXY."
PERHAPS_TLS = "Where the server speaks TLS, OPENAI_BASE_URL begins with https://."
CERTIFICATES = {  # by OpenSSL's numbers
    9: "Check this machine's clock.",
    10: "The server needs a new one; or check this machine's clock.",
    62: "OPENAI_BASE_URL needs a name that the certificate is for.",
    64: "OPENAI_BASE_URL needs an address that the certificate is for.",
}


class Unreachable(ModelError):
    """There is no connection to the server, or to the proxy before it."""


def connect_error(cause: Exception, url: str, proxy: Proxy | None) -> ModelError:
    """Why there is no connection to `url`."""
    url, place = shown_url(url), str(proxy or shown_url(url))
    advice = PAST_PROXY if proxy else ""
    if isinstance(cause, ProxyError):
        message = f"{place} does not connect to {url}: {cause}"
        kind = "network" if cause.transient else "protocol"
        return ModelError(kind, message, retryable=cause.transient, advice=PAST_PROXY)  # type: ignore[arg-type]
    if isinstance(cause, ssl.SSLError) and (error := _tls_error(cause, url)):
        return error
    said = ""
    if isinstance(cause, socket.gaierror | ValueError):  # a port or a host that is none
        said = f"the host of {place} is not known: {getattr(cause, 'strerror', cause)}"
    elif isinstance(cause, OSError) and cause.errno in REFUSED:
        said = f"nothing answers at {place}"
    elif isinstance(cause, TimeoutError):
        said = f"nothing answers at {place} within {CONNECT_TIMEOUT:g} s"
    if said:
        return Unreachable("network", said, retryable=True, advice=advice)
    return closed(place, advice)


def closed(place: str, advice: str = "") -> ModelError:
    """The connection ended before an answer."""
    message = f"{place} closed the connection before an answer"
    return ModelError("network", message, retryable=True, advice=advice)


def _tls_error(cause: ssl.SSLError, url: str) -> ModelError | None:
    """None where the connection only broke."""
    if isinstance(cause, ssl.SSLCertVerificationError):
        message = f"the certificate of {url} is refused: {cause.verify_message.rstrip('.')}"
        return ModelError("protocol", message, advice=CERTIFICATES.get(cause.verify_code, OWN_CA))
    if isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return None
    reason = (cause.reason or str(cause)).replace("_", " ").lower()
    return ModelError(
        "protocol",
        f"{url} does not speak TLS as https needs it ({reason})",
        advice="A server that speaks http has an address with http://.",
    )
