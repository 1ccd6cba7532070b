"""Bytes from a model server: connections, past a proxy and with TLS, one request over one of them, and its answer.

An abort cannot end the opening of a connection (name lookup, handshakes): a worker thread does it, and is left behind.
The thread that asked sends and reads; an abort shuts the socket, which ends a read or a write that blocks.
"""

from __future__ import annotations

import base64
import io
import math
import os
import re
import select
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from glob import glob
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote, urlsplit

from coder.abort import Abort, run_in_thread
from coder.providers.errors import ADVICE
from coder.providers.text import shown_url
from coder.types import ErrorKind, ModelError

if TYPE_CHECKING:
    import ssl  # 10 ms that only https costs

LONGEST = 1e6  # seconds that a socket waits; more than the system takes is an error
CONNECT_TIMEOUT = 10.0  # seconds, for the connection and for each handshake
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
OWN_CA = "The certificate has to be valid for this host; SSL_CERT_FILE names authorities (PEM)."
PAST_PROXY = "Change that variable, or name the server's host in NO_PROXY."
PERHAPS_PLAIN = "A server that speaks http has an address with http://."
PERHAPS_TLS = "Where the server speaks TLS, OPENAI_BASE_URL begins with https://."
SLOW = "A slow server needs a longer CODER_FIRST_BYTE_TIMEOUT or CODER_IDLE_TIMEOUT."


class Server:
    """A server, by its base URL, and the connections to it that are kept for the next request. `redact` is applied to each
    piece of an answer."""

    def __init__(self, url: str, redact: Callable[[bytes], bytes]) -> None:
        self.url, self.redact = url, redact
        self.answered = False  # at least once
        self.kept: list[socket.socket] = []

    def __del__(self) -> None:
        for sock in self.kept:
            sock.close()

    def connect(self, check: Callable[[], object]) -> Iterator[socket.socket]:
        """One that was kept and not closed, then a new one. Raises ModelError, and what `check` raises, which is called
        meanwhile. A server that has not answered before is not tried again: its address may be wrong."""
        while self.kept:
            with suppress(IndexError):  # another thread took it
                sock = self.kept.pop()
                poll = select.poll()
                poll.register(sock, select.POLLIN)
                if not poll.poll(0):  # the server has sent nothing: an end is all that could come
                    yield sock
                    break
                sock.close()
        proxy, name = proxy_of(self.url)
        try:
            new = run_in_thread(lambda: _connect(self.url, proxy, name), check, "connect")
        except (OSError, ValueError) as error:
            raise _failure_of(error, self.url, name, self.answered) from error
        yield new


def _connect(url: str, proxy: str, name: str) -> socket.socket:
    """A connection that is ready for a request. Raises OSError or ModelError."""
    server, first = urlsplit(url), urlsplit(proxy or url)
    # at first: the certificates may not be there
    tls = load_tls(*map(os.environ.get, CERTIFICATES)) if server.scheme == "https" else None
    port = first.port or (443 if first.scheme == "https" else 80)
    sock = socket.create_connection((first.hostname or "", port), CONNECT_TIMEOUT)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if proxy:
            _open_tunnel(sock, first, server.netloc.rpartition("@")[2], name)
        return tls.wrap_socket(sock, server_hostname=server.hostname) if tls else sock
    except BaseException:
        sock.close()
        raise


def _open_tunnel(sock: socket.socket, proxy: SplitResult, place: str, name: str) -> None:
    place = place if re.search(r":\d+$", place) else f"{place}:443"
    head = f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n"
    if proxy.username or proxy.password:
        word = f"{unquote(proxy.username or '')}:{unquote(proxy.password or '')}"
        head += f"Proxy-Authorization: Basic {base64.b64encode(word.encode()).decode()}\r\n"
    sock.sendall(f"{head}\r\n".encode())
    with sock.makefile("rb", buffering=0) as file:
        status, _ = read_head(file)
    if status >= 300:
        message = f"{name} does not connect to {place}: HTTP status {status}"
        passing = status >= 500
        kind: ErrorKind = "network" if passing else "protocol"
        raise ModelError(kind, message, retryable=passing, advice=PAST_PROXY)


@cache
def load_tls(file: str | None, folder: str | None) -> ssl.SSLContext:
    """TLS with the authorities of a file or a folder, else the system's. Raises ModelError."""
    import ssl

    known = ssl.get_default_verify_paths()
    try:
        if file or folder:
            named = ssl.create_default_context(cafile=file or None, capath=folder or None)
            # The user trusts these on purpose, so they are taken as curl takes them: an authority between counts as well,
            # and a company's proxy whose own lacks an extension, which Python refuses from 3.13 on
            named.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            named.verify_flags &= ~ssl.VERIFY_X509_STRICT
            return named
        if known.cafile or glob(f"{known.capath}/*.0"):
            return ssl.create_default_context()
        import httpx2  # where Python does not look for them: the openai client's own library does

        return httpx2.create_ssl_context()
    except OSError as error:
        message = f"the file of SSL_CERT_FILE or SSL_CERT_DIR cannot be loaded: {error}"
        raise ModelError("protocol", message, advice=OWN_CA) from error


def _failure_of(cause: Exception, url: str, proxy: str, answered: bool) -> ModelError:
    import ssl

    address = shown_url(url)
    if isinstance(cause, ssl.SSLCertVerificationError):
        why = cause.verify_message.rstrip(".")
        message = f"the certificate of {address} is refused: {why}"
        return ModelError("protocol", message, advice=OWN_CA)
    if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError):
        reason = (cause.reason or str(cause)).replace("_", " ").lower()
        message = f"{address} does not speak TLS as https needs it ({reason})"
        return ModelError("protocol", message, advice=PERHAPS_PLAIN)
    reason = getattr(cause, "strerror", "") or str(cause)
    message = f"nothing answers at {proxy or address}: {reason}"
    advice = PAST_PROXY if proxy else ""
    return ModelError("network", message, retryable=answered, advice=advice)


def proxy_of(url: str) -> tuple[str, str]:
    """(the URL of the environment's proxy for a server, what to call it); empty where NO_PROXY excepts it. Only for https:
    a proxy would read the key of an http request. Raises ModelError for a proxy of another kind than HTTP."""
    parts = urlsplit(url)
    variable = next((name for name in PROXIES if os.environ.get(name)), "")
    if parts.scheme != "https" or not variable:
        return "", ""
    from urllib.request import proxy_bypass  # late: 30 ms

    if proxy_bypass(f"{parts.hostname}:{parts.port or 443}"):
        return "", ""
    address = os.environ[variable]
    address = address if "://" in address else f"http://{address}"
    if not address.lower().startswith("http://"):
        message = f"{variable} is {shown_url(address)}, and has to begin with http://"
        raise ModelError("protocol", message, advice=PAST_PROXY)
    return address, f"the proxy {shown_url(address)} ({variable})"


# ---- one request ----------------------------------------------------------------------------------


class StreamingRequest:
    """One request and its answer. `cut` ends both at any moment, from any thread or signal handler."""

    def __init__(self, server: Server, url: str, abort: Abort, seconds: float) -> None:
        self.server, self.abort = server, abort
        self.url, self.status_code = url, 0
        self.headers: dict[str, str] = {}  # of the answer, names in lower case
        self._socket: socket.socket | None = None
        self._file: Any = None  # the socket's, to read from
        self._is_reusable = False  # the answer was read to its end, and the server keeps open
        self.within(seconds)

    def within(self, seconds: float) -> None:
        """Data has to come within so many seconds from now."""
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def cut(self) -> None:
        """End the connection."""
        if sock := self._socket:
            with suppress(OSError):  # not connected any more
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Leave the connection to the next request, if this one's answer was read to its end."""
        sock, self._socket = self._socket, None  # what is kept is not cut any more
        if sock:
            self._file.close()
            if self._is_reusable and not self.abort.is_set:
                self.server.kept.append(sock)
            else:
                sock.close()

    def send(self, message: bytes) -> None:
        """Send a request and read the head of its answer. Raises ModelError or Aborted."""
        server = self.server
        closed = f"the connection to {shown_url(server.url)} was closed before an answer"
        plain = not server.answered and self.url.startswith("http:")
        with self._as_model_error(closed, PERHAPS_TLS if plain else ""):
            for sock in server.connect(self._seconds_left):
                self._socket = sock
                self._file = io.BufferedReader(_Incoming(sock, self._seconds_left))
                sock.settimeout(self._seconds_left())
                try:
                    with suppress(ConnectionError):  # a refusal may come before all is sent
                        sock.sendall(message)
                    if self._file.peek(1):
                        break
                except OSError as error:
                    if isinstance(error, TimeoutError):
                        raise
                sock.close()  # the server had closed it, and has not seen the request
            else:
                raise ConnectionError
            status = 100
            while 100 <= status < 200:  # interim answers
                status, self.headers = read_head(self._file)
        self.status_code, server.answered = status, True

    def pieces(self) -> Iterator[bytes]:
        """The body, each piece what one read brings. Raises ModelError or Aborted."""
        message = "the connection broke in the middle of the answer"
        with self._as_model_error(message, ADVICE["incomplete"]):
            yield from map(self.server.redact, body_of(self._file, self.headers))
        self.abort.check()
        framed = not {"content-length", "transfer-encoding"}.isdisjoint(self.headers)
        self._is_reusable = framed and self.headers.get("connection", "").lower() != "close"

    def _seconds_left(self) -> float:
        self.abort.check()
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        return min(left, LONGEST)

    @contextmanager
    def _as_model_error(self, message: str, advice: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, zlib.error) as error:
            self.abort.check()
            if isinstance(error, TimeoutError):
                message, advice = f"no data for {self._seconds:g} s", SLOW
            raise ModelError("network", message, retryable=True, advice=advice) from error


class _Incoming(io.RawIOBase):
    """What a socket receives: no read, however small, takes longer than the seconds that are `left`."""

    def __init__(self, sock: socket.socket, left: Callable[[], float]) -> None:
        self.sock, self.left = sock, left

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.sock.settimeout(self.left())
        return self.sock.recv_into(buffer)


# ---- connection -> bytes ---------------------------------------------------------------------------

READ_SIZE = 1 << 15  # bytes
MAX_HEADER, MAX_HEADERS = 65_536, 200  # bytes of a line, and lines
STATUS_LINE = re.compile(rb"HTTP/1\.\d (\d{3})\b.*\n")
MAX_CHUNK_HEAD = 4_096  # bytes of a chunk's size and its extensions
CHUNK_HEAD = re.compile(rb"(?:\r?\n)?(0*[0-9a-fA-F]{1,7})\b.*\n")  # 256 MiB are enough


def read_head(file: Any) -> tuple[int, dict[str, str]]:
    """(status, headers with their names in lower case) of an answer. Raises OSError, or ValueError for what is none."""
    found = STATUS_LINE.match(file.readline(MAX_HEADER))
    if not found:
        raise ValueError("no status line")
    headers: dict[str, str] = {}
    while (line := file.readline(MAX_HEADER)).strip() and len(headers) < MAX_HEADERS:
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    if line.strip(b"\r") != b"\n":
        raise ValueError("the headers are cut or too many")
    return int(found[1]), headers


def body_of(file: Any, headers: Mapping[str, str]) -> Iterator[bytes]:
    """The body of an answer, piece by piece as it comes. Raises OSError where it is cut, ValueError or zlib.error."""
    chunked = "chunked" in headers.get("transfer-encoding", "").lower()
    body = _unchunk(file) if chunked else _plain(file, headers.get("content-length"))
    if headers.get("content-encoding", "identity").lower() == "identity":
        return body
    inflate = zlib.decompressobj(zlib.MAX_WBITS | 32).decompress  # although none was asked for
    return filter(None, map(inflate, body))


def _plain(file: Any, length: str | None) -> Iterator[bytes]:
    left = math.inf if length is None else int(length)  # without one: to the end of the connection
    while left and (data := file.read1(min(left, READ_SIZE))):
        left -= len(data)
        yield data
    if left and length is not None:
        raise ConnectionError("the body is cut")


def _unchunk(file: Any) -> Iterator[bytes]:
    """The payload of a chunked body: all whole chunks that a read brings are one piece."""
    data, size = bytearray(), 1
    while size or b"\n\r\n" not in data:
        more = file.read1(READ_SIZE)
        if not more:
            raise ConnectionError("the body is cut")
        data += more
        parts = list[bytes]()
        while size and (head := CHUNK_HEAD.match(data)):
            size = int(head[1], 16)
            end = head.end() + size
            if len(data) < end:
                break
            parts.append(bytes(data[head.end() : end]))
            del data[:end]
            if not size:  # behind the last chunk: trailers up to an empty line
                data[:0] = b"\n"
        if size and not head and (b"\n" in data[2:] or len(data) > MAX_CHUNK_HEAD):
            raise ValueError("no chunk begins here")
        if payload := b"".join(parts):
            yield payload
