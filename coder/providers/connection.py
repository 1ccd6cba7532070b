"""Connections to a model server, a request over one of them, and the bytes of its answer.

The thread that asked sends and reads. An abort shuts the socket, which ends a read or a write that blocks. Opening a
connection cannot be ended so (name lookup, handshakes): a worker thread does it, and an abort leaves it behind.
"""

from __future__ import annotations

import base64
import io
import os
import re
import select
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from glob import glob
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote, urlsplit

from coder.abort import Abort, run_in_thread
from coder.providers.errors import ADVICE
from coder.providers.response import body_of, read_head
from coder.providers.text import shown_url
from coder.types import ModelError

if TYPE_CHECKING:
    import ssl  # 10 ms that only https costs

CONNECT_TIMEOUT = 10.0  # seconds, for the connection and for each handshake
LONGEST = 1e6  # seconds that a socket waits; more than the system takes is an error
PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
OWN_CA = "The certificate has to be valid for this host; SSL_CERT_FILE names authorities (PEM)."
PAST_PROXY = "Change that variable, or name the server's host in NO_PROXY."
PERHAPS_TLS = "Where the server speaks TLS, OPENAI_BASE_URL begins with https://."
PERHAPS_PLAIN = "A server that speaks http has an address with http://."
SLOW = "A slow server needs a longer CODER_FIRST_BYTE_TIMEOUT or CODER_IDLE_TIMEOUT."


class StreamingRequest:
    """One request and its answer. `cut` ends both at any moment, from any thread or signal handler."""

    def __init__(
        self,
        connections: Connections,
        url: str,
        abort: Abort,
        seconds: float,
        redact: Callable[[bytes], bytes] = bytes,
    ) -> None:
        self.connections, self.abort, self.redact = connections, abort, redact
        self.url, self.status_code = url, 0
        self.headers: dict[str, str] = {}  # of the answer, names in lower case
        self._socket: socket.socket | None = None
        self._file: Any = None  # the socket's, to read from
        self._reusable = False  # the answer was read to its end, and the server keeps open
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
            if self._reusable and not self.abort.is_set:
                self.connections.kept.append(sock)
            else:
                sock.close()

    def send(self, message: bytes) -> None:
        """Send a request and read the head of its answer. Raises ModelError or Aborted."""
        with self._as_model_error(self.connections.closed):
            idle = self.connections.idle()
            if not (idle and self._is_answered(idle, message)):
                # the server had closed the idle connection, and has not seen the request
                new = self.connections.open(self._left)
                if not self._is_answered(new, message):
                    raise ConnectionError
            status = 100
            while 100 <= status < 200:  # interim answers
                status, self.headers = read_head(self._file)
        self.status_code, self.connections.answered = status, True

    def _is_answered(self, sock: socket.socket, message: bytes) -> bool:
        """Send a request. Has something of an answer come? False where the connection ends before."""
        if self._socket:
            self._socket.close()
        self._socket, self._file = sock, io.BufferedReader(_Incoming(sock, self._left))
        sock.settimeout(self._left())
        try:
            with suppress(ConnectionError):  # a refusal may come before the whole request is sent
                sock.sendall(message)
            if self._file.peek(1):
                return True
        except TimeoutError:
            raise
        except OSError:
            pass
        self._file.close()
        return False

    def pieces(self) -> Iterator[bytes]:
        """The body, each piece what one read brings. Raises ModelError or Aborted."""
        with self._as_model_error(_broken_answer):
            yield from map(self.redact, body_of(self._file, self.headers))
        self.abort.check()
        framed = not {"content-length", "transfer-encoding"}.isdisjoint(self.headers)
        self._reusable = framed and self.headers.get("connection", "").lower() != "close"

    def _left(self) -> float:
        """Seconds to the deadline. Raises TimeoutError behind it, or Aborted."""
        self.abort.check()
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return min(left, LONGEST)

    @contextmanager
    def _as_model_error(self, failure: Callable[[], ModelError]) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            message = f"no data for {self._seconds:g} s"
            raise ModelError("network", message, retryable=True, advice=SLOW) from error
        except (OSError, ValueError, zlib.error) as error:
            self.abort.check()
            raise failure() from error


class _Incoming(io.RawIOBase):
    """What a socket receives. No read, however small, goes on for more than the seconds that are `left` before it."""

    def __init__(self, sock: socket.socket, left: Callable[[], float]) -> None:
        self.sock, self.left = sock, left

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.sock.settimeout(self.left())
        return self.sock.recv_into(buffer)


def _broken_answer() -> ModelError:
    message = "the connection broke in the middle of the answer"
    return ModelError("network", message, retryable=True, advice=ADVICE["incomplete"])


# ---- connections -----------------------------------------------------------------------------------


class Connections:
    """The connections to one server: idle ones that an earlier request has left, and new ones. `url` is its base URL,
    `address` how that is shown."""

    def __init__(self, url: str) -> None:
        self.url, self.address = url, shown_url(url)
        self.answered = False  # the server did, at least once
        self._place = self.address  # what a connection goes to: the server, or the proxy before it
        self.kept: list[socket.socket] = []  # for the next request
        self._tls: ssl.SSLContext | None = None

    def __del__(self) -> None:
        for sock in self.kept:
            sock.close()

    def idle(self) -> socket.socket | None:
        """One that the server has not closed: it has sent nothing, so an end is all that can be read."""
        while self.kept:
            with suppress(IndexError):  # another thread took it
                sock = self.kept.pop()
                poll = select.poll()
                poll.register(sock, select.POLLIN)
                if not poll.poll(0):
                    return sock
                sock.close()
        return None

    def open(self, check: Callable[[], object]) -> socket.socket:
        """A new one. Raises ModelError, and what `check` raises, which is called meanwhile."""
        proxy, self._place = proxy_of(self.url)
        self._place = self._place or self.address
        try:
            return run_in_thread(lambda: self._connect(proxy), check, "connect")
        except (OSError, ValueError) as error:
            failure = self._failure_of(error)
            failure.advice = failure.advice or (PAST_PROXY if proxy else "")
            raise failure from error

    def _connect(self, proxy: str) -> socket.socket:
        """A connection that is ready for a request. Raises OSError (ssl.SSLError is one) or ModelError."""
        server = urlsplit(self.url)
        first = urlsplit(proxy or self.url)
        # at first: the certificates may not be there
        tls = self._load_tls() if server.scheme == "https" else None
        port = first.port or (443 if first.scheme == "https" else 80)
        sock = socket.create_connection((first.hostname or "", port), CONNECT_TIMEOUT)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if proxy:
                self._open_tunnel(sock, first, server.netloc.rpartition("@")[2])
            return tls.wrap_socket(sock, server_hostname=server.hostname) if tls else sock
        except BaseException:
            sock.close()
            raise

    def _open_tunnel(self, sock: socket.socket, proxy: SplitResult, place: str) -> None:
        """Let a proxy connect to the server (CONNECT)."""
        place = place if re.search(r":\d+$", place) else f"{place}:443"
        head = f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n"
        if proxy.username or proxy.password:
            word = f"{unquote(proxy.username or '')}:{unquote(proxy.password or '')}"
            head += f"Proxy-Authorization: Basic {base64.b64encode(word.encode()).decode()}\r\n"
        sock.sendall(f"{head}\r\n".encode())
        with sock.makefile("rb", buffering=0) as file:
            status, _ = read_head(file)
        if status >= 300:
            message = f"{self._place} does not connect to {place}: HTTP status {status}"
            raise ModelError("protocol", message, retryable=status >= 500, advice=PAST_PROXY)

    def _load_tls(self) -> ssl.SSLContext:
        """TLS with the authorities of SSL_CERT_FILE or SSL_CERT_DIR, else the system's. Raises ModelError."""
        if self._tls is None:
            import ssl

            file, folder = (os.environ.get(f"SSL_CERT_{name}") or None for name in ("FILE", "DIR"))
            known = ssl.get_default_verify_paths()
            try:
                if file or folder or known.cafile or glob(f"{known.capath}/*.0"):
                    self._tls = ssl.create_default_context(cafile=file, capath=folder)
                else:  # not where Python looks for them
                    import httpx2  # the openai client's own HTTP library knows further places

                    self._tls = httpx2.create_ssl_context()
            except OSError as error:
                message = f"the file of SSL_CERT_FILE or SSL_CERT_DIR cannot be loaded: {error}"
                raise ModelError("protocol", message, advice=OWN_CA) from error
        return self._tls

    def closed(self) -> ModelError:
        """The error of a connection that ended before an answer."""
        plain = not self.answered and self.url.startswith("http:")
        message = f"the connection to {self._place} was closed before an answer"
        advice = PERHAPS_TLS if plain else ""
        return ModelError("network", message, retryable=True, advice=advice)

    def _failure_of(self, cause: Exception) -> ModelError:
        """Why there is no connection. An address that never answered is not tried again: it may be wrong."""
        import ssl

        if isinstance(cause, ssl.SSLCertVerificationError):
            why = cause.verify_message.rstrip(".")
            message = f"the certificate of {self.address} is refused: {why}"
            return ModelError("protocol", message, advice=OWN_CA)
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError):
            reason = (cause.reason or str(cause)).replace("_", " ").lower()
            message = f"{self.address} does not speak TLS as https needs it ({reason})"
            return ModelError("protocol", message, advice=PERHAPS_PLAIN)
        reason = getattr(cause, "strerror", "") or str(cause)
        message = f"nothing answers at {self._place}: {reason}"
        return ModelError("network", message, retryable=self.answered)


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
