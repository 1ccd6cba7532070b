"""Bytes from a model server: connections that are kept, one request over one of them, and its
answer.

An abort cannot end the opening of a connection (name lookup, handshakes): a worker thread does it,
and is left alone. The thread that asked sends and reads; an abort shuts the socket, which ends a
read or a write that blocks.
"""

from __future__ import annotations

import errno
import os
import re
import select
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from coder.abort import Abort, run_in_thread
from coder.providers.errors import ADVICE
from coder.providers.framing import SLICE, Incoming, body_of, is_framed, read_head
from coder.providers.text import shown_url
from coder.types import ModelError

if TYPE_CHECKING:
    from coder.providers.https import Proxy

Redact = Callable[[bytes], bytes]  # applied to each piece of an answer

CONNECT_TIMEOUT = 10.0  # seconds, for the connection and for each handshake
PORTS = {"http": 80, "https": 443}
HEAD_START = 0.25  # seconds of an address before the next one (RFC 8305)
# seconds that an idle connection is kept: a NAT may have forgotten it later, and nobody says so
KEEP_FOR = 5.0
# A clock that goes on while the machine sleeps; on macOS, which has no BOOTTIME, MONOTONIC does
CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
# By option, as far as the system has it: a connection whose other side is gone ends after 90 s
PROBES = {
    "TCP_KEEPIDLE": 30,
    "TCP_KEEPALIVE": 30,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 6,
}
# seconds: if a kept connection ends so soon after a request was sent, the server has not begun to
# work on it, and it is sent again
RESEND_WITHIN = 1.0
SWITCHING = 101  # a status below 200 after which nothing of HTTP comes
TOO_IDLE = 408  # the status with which some servers end a kept connection
NO_BODY = (204, 304)  # statuses of answers without one, whatever the headers say
PERHAPS_TLS = "If the server speaks TLS, OPENAI_BASE_URL begins with https://."
BROKEN = "the connection broke in the middle of the answer"
SLOW = "A slow server needs a longer CODER_FIRST_BYTE_TIMEOUT or CODER_IDLE_TIMEOUT."


class Server:
    """A server, by its base URL, and the connections to it that are kept for the next request."""

    def __init__(self, url: str, redact: Redact | None) -> None:
        self.url = url
        self.redact = redact
        self.is_secure = urlsplit(url).scheme == "https"
        self.has_answered = False  # at least once
        self._kept: list[tuple[socket.socket, float]] = []  # and until when

    def __del__(self) -> None:
        for sock, _ in self._kept:
            sock.close()

    def keep(self, sock: socket.socket, headers: Mapping[str, str]) -> None:
        """Keep a connection for the next request, not longer than the server's headers promise."""
        seconds = KEEP_FOR
        if "keep-alive" in headers:
            promised = re.search(r"timeout\s*=\s*(\d{1,9})", headers["keep-alive"], re.I)
            if promised:
                seconds = min(KEEP_FOR, int(promised[1]))
        self._kept.append((sock, time.clock_gettime(CLOCK) + seconds))

    def take(self) -> socket.socket | None:
        """A connection that was kept, None if there is none that can still be open."""
        while self._kept:
            with suppress(IndexError):  # another thread took it
                sock, until = self._kept.pop()
                poll = select.poll()
                poll.register(sock, select.POLLIN)
                # If there is something to read, the server has ended it: nothing else can come
                if time.clock_gettime(CLOCK) < until and not poll.poll(0):
                    return sock
                sock.close()
        return None

    def open(self, check: Callable[[], object]) -> socket.socket:
        """A new connection. `check` is called while waiting; what it raises ends the wait. Raises
        ModelError, too."""
        proxy = None
        if self.is_secure:
            from coder.providers.https import plain_proxy_of  # late: ssl takes 10 ms

            proxy = plain_proxy_of(self.url)
        try:
            return run_in_thread(lambda: _connect(self.url, proxy), check, "connect")
        except (OSError, ValueError) as error:
            raise self._failure_of(error, proxy) from error

    def alert(self, error: Exception) -> ModelError | None:
        """The error of a connection that the server has ended by an alert of TLS, None for any
        other end."""
        if "ALERT" not in str(getattr(error, "reason", "")):
            return None
        from coder.providers.https import tls_failure

        failure = tls_failure(error, shown_url(self.url))
        if failure:
            failure.retryable = self.has_answered
        return failure

    def _failure_of(self, cause: Exception, proxy: Proxy | None) -> ModelError:
        """A server that has not answered before is not tried again: its address may be wrong."""
        name = shown_url(self.url)
        advice = ""
        if self.is_secure:
            from coder.providers.https import PAST_PROXY, tls_failure

            failure = tls_failure(cause, name)
            if failure:
                return failure
            if proxy:
                name = proxy.name
                advice = PAST_PROXY
        reason = getattr(cause, "strerror", "") or str(cause)
        return ModelError(
            "network",
            f"nothing answers at {name}: {reason}",
            retryable=self.has_answered,
            advice=advice,
        )


# ---- opening a connection ------------------------------------------------------------------------


def _connect(url: str, proxy: Proxy | None) -> socket.socket:
    """A connection that is ready for a request. Raises OSError, ValueError or ModelError."""
    server = urlsplit(url)
    if server.scheme != "https":
        return _dial(server)
    from coder.providers.https import open_tunnel, tls_context

    tls = tls_context()  # at first: the certificates may not be there
    sock = _dial(urlsplit(proxy.url) if proxy else server)
    try:
        if proxy:
            open_tunnel(sock, proxy, server.netloc.rpartition("@")[2], CONNECT_TIMEOUT)
        return tls.wrap_socket(sock, server_hostname=server.hostname)
    except BaseException:
        sock.close()
        raise


def _dial(url: SplitResult) -> socket.socket:
    """A connection to the first address of a host that takes one.

    All are tried side by side, each HEAD_START after the one before it, or as soon as that one
    fails. Raises OSError: why the last one failed.
    """
    addresses = _look_up(url)
    trying: dict[int, socket.socket] = {}  # by file number
    poll = select.poll()
    failure = OSError("no address")
    deadline = time.monotonic() + CONNECT_TIMEOUT
    try:
        while addresses or trying:
            if addresses:
                try:
                    sock = _begin_connecting(addresses.pop(0))
                except OSError as error:
                    failure = error
                    continue
                trying[sock.fileno()] = sock
                poll.register(sock, select.POLLOUT)
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            for number, _ in poll.poll(1000 * (HEAD_START if addresses else left)):
                sock = trying.pop(number)
                poll.unregister(number)
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if not code:
                    sock.settimeout(CONNECT_TIMEOUT)
                    return sock
                sock.close()
                failure = OSError(code, os.strerror(code))
        raise failure
    finally:
        for sock in trying.values():
            sock.close()


def _look_up(url: SplitResult) -> list[tuple[Any, ...]]:
    """The addresses of a host, as getaddrinfo has them, but in turns from its two families: all of
    one may be dead."""
    host = url.hostname or ""
    # For a str, Python loads its tables of international names (4 ms)
    name = host.encode() if host.isascii() else host
    port = url.port or PORTS.get(url.scheme, 80)
    addresses = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    preferred_family = addresses[0][0]
    preferred = [address for address in addresses if address[0] == preferred_family]
    others = [address for address in addresses if address[0] != preferred_family]
    turns = chain.from_iterable(zip_longest(preferred, others))
    return [address for address in turns if address]


def _begin_connecting(info: tuple[Any, ...]) -> socket.socket:
    """A socket that connects to an address of getaddrinfo. Raises OSError."""
    family, kind, protocol, _, address = info
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in PROBES.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        sock.setblocking(False)
        code = sock.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))
    except BaseException:
        sock.close()
        raise
    return sock


# ---- one request ---------------------------------------------------------------------------------


class HttpExchange:
    """One request and its answer. `cut` ends both, from any thread or signal handler."""

    def __init__(self, server: Server, url: str, abort: Abort, seconds: float) -> None:
        self.server = server
        self.abort = abort
        self.url = url
        self.status_code = 0
        self.headers: dict[str, str] = {}  # of the answer, names in lower case
        self._socket: socket.socket | None = None
        self._incoming: Incoming | None = None  # what the socket receives
        self._asked_at = 0.0  # when the request was sent
        self._is_reusable = False  # the answer was read to its end, and the server keeps open
        self.set_deadline(seconds)

    def set_deadline(self, seconds: float) -> None:
        """Data has to come within so many seconds from now."""
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def cut(self) -> None:
        """End the connection."""
        sock = self._socket
        if sock:
            with suppress(OSError):  # not connected any more
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Leave the connection to the next request, if this one's answer was read to its end and
        nothing came after it."""
        sock = self._socket
        self._socket = None  # what is kept is not cut any more
        if not sock or not self._incoming:
            return
        # What comes after an answer without a body may still be on its way
        is_clean = self.status_code not in NO_BODY and not self._incoming.has_more()
        if self._is_reusable and is_clean and not self.abort.is_set():
            self.server.keep(sock, self.headers)
        else:
            sock.close()

    @property
    def is_framed(self) -> bool:
        """Whether a cut of the body is noticed; otherwise it looks like the end."""
        return is_framed(self.headers)

    # -- the request

    def send_and_read_head(self, message: bytes) -> None:
        """Send a request and read the head of its answer. Raises ModelError or Aborted."""
        server = self.server
        closed = f"the connection to {shown_url(server.url)} was closed before an answer"
        perhaps_tls = not (server.has_answered or server.is_secure)
        with self._as_model_error(closed, PERHAPS_TLS if perhaps_tls else ""):
            has_answer = self._send_over_kept(message)
            if not has_answer:
                has_answer = self._try_on(server.open(self._seconds_left), message)
            if not has_answer:
                raise ConnectionError
        server.has_answered = True

    def _send_over_kept(self, message: bytes) -> bool:
        """`_try_on` with kept connections; False if none is left. Raises ConnectionError if one was
        ended while the server may have worked on the request: that is a failed attempt, and not
        repeated unseen."""
        sock = self.server.take()
        while sock:
            has_answer = self._try_on(sock, message)
            if has_answer and self.status_code != TOO_IDLE:
                return True
            is_late = time.monotonic() - self._asked_at >= RESEND_WITHIN
            if is_late and has_answer:
                return True
            if is_late:
                raise ConnectionError
            sock.close()  # the server has ended it before it took the request
            sock = self.server.take()
        return False

    def _try_on(self, sock: socket.socket, message: bytes) -> bool:
        """Send a request and read the head of its answer; False if the server hung up."""
        self._socket = sock
        incoming = Incoming(sock, self._seconds_left)
        self._incoming = incoming

        # The request
        with suppress(ConnectionError):  # a refusal may come before all is sent
            self._send_all(sock, message)
        self._asked_at = time.monotonic()

        # The first bytes of an answer, or the end
        try:
            incoming.ahead = incoming.read()  # put back: read_head reads them again
        except OSError as error:  # the end, too, unless it is one of these
            if isinstance(error, TimeoutError) or self.server.alert(error):
                raise
        if not incoming.ahead:
            return False

        # The head of the answer
        status = 100
        while 100 <= status < 200 and status != SWITCHING:  # interim answers
            status, self.headers = read_head(incoming)
        self.status_code = status
        return True

    def _send_all(self, sock: socket.socket, message: bytes) -> None:
        """Send it, waiting in slices, as Incoming does. Raises OSError."""
        rest = memoryview(message)
        while rest:
            sock.settimeout(min(self._seconds_left(), SLICE))
            try:
                rest = rest[sock.send(rest) :]
            except TimeoutError as error:
                if error.errno:  # the system has given up; else only the slice is over
                    raise ConnectionError(error.strerror) from error

    # -- the answer

    def pieces(self) -> Iterator[bytes]:
        """The body, each piece what one read brings. Raises ModelError or Aborted."""
        has_body = self.status_code not in NO_BODY
        if has_body and self._incoming:
            with self._as_model_error(BROKEN, ADVICE["incomplete"]):
                body = body_of(self._incoming, self.headers)
                redact = self.server.redact
                if redact:
                    body = map(redact, body)
                yield from body
        self.abort.check()
        ends_by_itself = self.is_framed or not has_body  # not by the end of the connection
        closes = "close" in self.headers.get("connection", "").lower()
        self._is_reusable = ends_by_itself and not closes

    def _seconds_left(self) -> float:
        self.abort.check()
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        return left

    @contextmanager
    def _as_model_error(self, message: str, advice: str) -> Iterator[None]:
        """A failure inside becomes a ModelError with this message, if no more is known of it."""
        try:
            yield
        except (OSError, ValueError, zlib.error) as error:
            self.abort.check()
            alert = self.server.alert(error)
            if alert:
                raise alert from error
            if isinstance(error, TimeoutError):
                message = f"no data for {self._seconds:g} s"
                advice = SLOW
            raise ModelError(
                "network",
                message,
                retryable=True,
                advice=advice,
            ) from error
