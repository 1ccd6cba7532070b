"""StreamingRequest: one request and its answer, read by the thread that asked for it.

An abort or a deadline ends it at any moment: a read that blocks returns when its socket is shut.
"""

from __future__ import annotations

import http.client
import math
import re
import socket
import ssl
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from coder.abort import Abort
from coder.providers.connection import Connections
from coder.providers.errors import ADVICE
from coder.types import ModelError

STALE = 1.0  # seconds after a request in which a connection that the server had closed shows it
READ_SIZE = 1 << 15  # bytes
CHUNK_HEAD = re.compile(rb"(?:\r?\n)?([0-9a-fA-F]{1,15})[^\n]*\n")


class StreamingRequest:
    """One request, and its answer as it comes. `cut` ends both at any moment, from any thread or signal handler."""

    def __init__(
        self,
        connections: Connections,
        abort: Abort,
        seconds: float,
        redact: Callable[[bytes], bytes] = bytes,
    ) -> None:
        self.connections, self.abort, self.redact = connections, abort, redact
        self.url, self.status_code = connections.url, 0
        self.headers: Any = {}  # by name in any case
        self._socket: socket.socket | None = None
        self._answer: http.client.HTTPResponse | None = None
        self._whole = False  # the answer was read to its end
        self._timeout = -1.0  # the socket's
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
        if self._answer:
            self._answer.close()
        sock, self._socket = self._socket, None  # what is kept is not cut any more
        if sock and self._whole and not self.abort.is_set:
            self.connections.keep(sock)
        elif sock:
            sock.close()

    # -- sending

    def send(self, url: str, message: bytes) -> None:
        """Send a request, and read the head of the answer. Raises ModelError, or Aborted."""
        self.url = url
        try:
            self._answer = self._exchange(message)
        except TimeoutError as error:
            raise self._silence() from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.abort.check()
            raise self.connections.closed() from error
        self.connections.answered = True
        self.status_code, self.headers = self._answer.status, self._answer.headers

    def _exchange(self, message: bytes) -> http.client.HTTPResponse:
        """The answer with its head read. A connection that the server had closed before the request came is replaced:
        it cannot have begun to work on it."""
        idle, began = self.connections.idle(), time.monotonic()
        answer = self._first_bytes(idle, message) if idle else None
        if not answer and not (idle and time.monotonic() - began > STALE):
            self.abort.check()
            answer = self._first_bytes(self.connections.open(self.abort, self._check), message)
        if not answer:
            raise http.client.RemoteDisconnected("no answer")
        answer.begin()
        while 100 <= answer.status < 200:  # interim answers
            answer.headers = answer.msg = None  # type: ignore[assignment]
            answer.begin()
        return answer

    def _first_bytes(self, sock: socket.socket, message: bytes) -> http.client.HTTPResponse | None:
        """An answer of which something has come; None where the connection ends before."""
        if self._socket:
            self._socket.close()
        self._socket, self._timeout = sock, -1.0
        self.abort.check()
        self._limit()
        answer = http.client.HTTPResponse(sock, method="POST")
        with suppress(ConnectionError, ssl.SSLError):
            with suppress(ConnectionError):  # a refusal may come before the whole request is sent
                sock.sendall(message)
            if answer.fp.peek(1):
                return answer
        answer.close()
        return None

    def _check(self) -> None:
        self.abort.check()
        if time.monotonic() > self._deadline:
            raise self._silence()

    def _limit(self) -> None:
        """Let the next read or write end at the deadline."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if self._socket and not self._timeout - 0.05 < left <= self._timeout:  # a system call
            self._timeout = left
            self._socket.settimeout(None if math.isinf(left) else left)

    # -- reading

    def pieces(self) -> Iterator[bytes]:
        """The body, each piece what one read brings. Raises ModelError, or Aborted."""
        assert self._answer
        try:
            body = body_of(self._answer, self._limit)
            if "content-encoding" in self.headers:  # although none was asked for
                body = _decoded(body, self.headers["content-encoding"])
            yield from map(self.redact, body)
        except TimeoutError as error:
            raise self._silence() from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.abort.check()
            message = "the connection broke in the middle of the answer"
            advice = ADVICE["incomplete"]
            raise ModelError("network", message, retryable=True, advice=advice) from error
        self.abort.check()
        self._whole = not self._answer.will_close

    def _silence(self) -> ModelError:
        return ModelError("network", f"no data for {self._seconds:g} s", retryable=True)


# ---- the body --------------------------------------------------------------------------------------


def body_of(answer: http.client.HTTPResponse, wait: Callable[[], object]) -> Iterator[bytes]:
    """The body of an answer, each piece what one read brings. `wait` is called before each read. Raises OSError, or
    HTTPException where the body is cut or malformed."""
    if answer.chunked:
        yield from _unchunked(answer.fp, wait)
        return
    left = answer.length  # None: up to the end of the connection
    while left != 0:
        wait()
        data = answer.fp.read1(READ_SIZE if left is None else min(left, READ_SIZE))
        if not data and left:
            raise http.client.IncompleteRead(b"", left)
        if not data:
            return
        left = left and left - len(data)
        yield data


def _unchunked(file: Any, wait: Callable[[], object]) -> Iterator[bytes]:
    """The payload of a chunked body. http.client would return each chunk alone and read its head with three calls."""
    data, left, last = b"", 0, False  # what is not taken apart yet, what is missing of a chunk
    while not last:
        wait()
        more = file.read1(READ_SIZE)
        if not more:
            raise http.client.IncompleteRead(b"", left)
        data += more
        parts, at = list[bytes](), 0
        while True:
            part = data[at : at + left]
            parts.append(part)
            at, left = at + len(part), left - len(part)
            head = None if left else CHUNK_HEAD.match(data, at)
            if not head:
                break
            at, left = head.end(), int(head[1], 16)
            if not left:
                last = True
                break
        data = data[at:]
        if not (left or last) and (data.find(b"\n", 2) >= 0 or len(data) > READ_SIZE):
            raise http.client.HTTPException("the size of a chunk is none")
        if payload := b"".join(parts):
            yield payload
    data = b"\n" + data  # behind the last chunk: trailers up to an empty line
    while b"\n\r\n" not in data and b"\n\n" not in data:
        wait()
        more = file.read1(READ_SIZE)
        if not more or len(data) > READ_SIZE:
            raise http.client.IncompleteRead(data)
        data += more


def _decoded(body: Iterator[bytes], encoding: str) -> Iterator[bytes]:
    if encoding.lower() not in ("identity", "gzip", "x-gzip", "deflate"):
        message = f"the answer cannot be decoded: its encoding is {encoding!r}"
        raise ModelError("protocol", message, retryable=True)
    decoder = zlib.decompressobj(zlib.MAX_WBITS | 32)  # either form, by its head
    try:
        for piece in body:
            if data := piece if encoding.lower() == "identity" else decoder.decompress(piece):
                yield data
    except zlib.error as error:
        message = f"the answer cannot be decoded: {error}"
        raise ModelError("protocol", message, retryable=True) from error
