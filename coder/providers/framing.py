"""What a connection brings: reads with a time limit, the head of an answer, and its body piece by
piece (RFC 9112)."""

from __future__ import annotations

import math
import re
import socket
import zlib
from collections.abc import Callable, Iterator, Mapping

from coder.types import ModelError

SLICE = 0.2  # seconds that one wait for a socket takes at most
READ_SIZE = 1 << 15  # bytes
MAX_HEADER = 65_536  # bytes of a line
MAX_HEADERS = 200  # lines
STATUS_LINE = re.compile(rb"HTTP/1\.\d (\d{3})\b.*\n")
MAX_CHUNK_HEAD = 4_096  # bytes of a chunk's size and its extensions
# A size and its extensions, after the line end of the chunk before it; 256 MiB are enough
CHUNK_HEAD = re.compile(rb"(?:\r?\n)?(0*[0-9a-fA-F]{1,7})\b.*\n")
END_OF_TRAILERS = re.compile(rb"\n\r?\n")
COMPRESSED = {"gzip", "x-gzip", "deflate"}
NOT_ASKED = "Switch the compression off at the server or at the gateway before it."
UNREADABLE = {"br", "zstd", "compress", "x-compress"}  # no other word means a compression


class Incoming:
    """What a socket receives. `seconds_left` says how long a read may wait.

    It waits in slices: a signal that comes after Python has looked for signals, and before the
    wait, does not end the wait. It is handled when the slice is over.
    """

    def __init__(self, sock: socket.socket, seconds_left: Callable[[], float]) -> None:
        self.sock = sock
        self.seconds_left = seconds_left
        self.ahead = b""  # received, and not read yet

    def read(self, size: int = READ_SIZE) -> bytes:
        """What comes next; b"" at the end. Raises OSError, and what `seconds_left` raises."""
        if self.ahead:
            data = self.ahead[:size]
            self.ahead = self.ahead[size:]
            return data
        while True:
            self.sock.settimeout(min(self.seconds_left(), SLICE))
            try:
                return self.sock.recv(size)
            except TimeoutError as error:
                if error.errno:  # the system's own: the other side does not answer any more
                    raise ConnectionError(error.strerror) from error

    def read_line(self) -> bytes:
        """Up to the end of a line; without one if the connection ends, or it is longer than
        MAX_HEADER."""
        data = self.ahead
        while b"\n" not in data and len(data) < MAX_HEADER:
            self.ahead = b""
            more = self.read()
            if not more:
                break
            data += more
        end = data.find(b"\n") + 1 or len(data)
        self.ahead = data[end:]
        return data[:end]

    def has_more(self) -> bool:
        """Whether something was received and not read, also by TLS."""
        pending = getattr(self.sock, "pending", None)
        return bool(self.ahead or (pending and pending()))


def read_head(incoming: Incoming) -> tuple[int, dict[str, str]]:
    """(status, headers with their names in lower case) of an answer.

    Raises OSError, and ValueError if it is no answer of HTTP.
    """
    status_line = STATUS_LINE.match(incoming.read_line())
    if not status_line:
        raise ValueError("no status line")
    headers: dict[str, str] = {}
    name = ""
    for _ in range(MAX_HEADERS + 1):
        line = incoming.read_line()
        if line.strip(b"\r") == b"\n":
            return int(status_line[1]), headers
        if not line.endswith(b"\n"):
            break
        text = line.decode("latin-1")
        if name and text.startswith((" ", "\t")):  # goes on with the line before it
            headers[name] += f" {text.strip()}"
            continue
        name, _, value = text.partition(":")
        name = name.strip().lower()
        headers[name] = value.strip()
    raise ValueError("the headers are cut or too many")


def is_framed(headers: Mapping[str, str]) -> bool:
    """Whether an answer says where it ends; otherwise the end of the connection ends it, and so
    does a break."""
    return "content-length" in headers or "transfer-encoding" in headers


def body_of(incoming: Incoming, headers: Mapping[str, str]) -> Iterator[bytes]:
    """The body of an answer, piece by piece as it comes.

    Raises OSError if it is cut, ValueError or zlib.error if it is malformed, and ModelError if its
    compression is not known.
    """
    if "chunked" in headers.get("transfer-encoding", "").lower():
        body = _unchunk(incoming)
    else:
        body = _plain(incoming, headers.get("content-length"))
    # no compression was asked for; the last one named is the outermost
    encodings = headers.get("content-encoding", "").lower().replace(",", " ").split()
    for encoding in reversed(encodings):
        if encoding in UNREADABLE:
            raise ModelError(
                "protocol",
                f"the answer is compressed with {encoding}, which was not asked for",
                advice=NOT_ASKED,
            )
        if encoding in COMPRESSED:
            body = _inflate(body, encoding)
    return body


def _inflate(body: Iterator[bytes], encoding: str) -> Iterator[bytes]:
    """Some servers send deflate without zlib's header, whose first byte ends in 8 (RFC 1950)."""
    start = next(body, b"")
    if not start:
        return
    is_bare = encoding == "deflate" and start[0] & 15 != 8
    window = -zlib.MAX_WBITS if is_bare else zlib.MAX_WBITS | 32
    inflate = zlib.decompressobj(window).decompress
    data = start
    while data:
        payload = inflate(data)
        if payload:
            yield payload
        data = next(body, b"")


def _plain(incoming: Incoming, length: str | None) -> Iterator[bytes]:
    """Without a length, up to the end of the connection."""
    left = math.inf if length is None else int(length)
    while left:
        data = incoming.read(int(min(left, READ_SIZE)))
        if not data:
            break
        left -= len(data)
        yield data
    if left and length is not None:
        raise ConnectionError("the body is cut")


def _unchunk(incoming: Incoming) -> Iterator[bytes]:
    """The payload of a chunked body: all whole chunks that a read brings are one piece."""
    data = bytearray()
    is_last = False
    while not is_last:
        data += _read_more(incoming)

        # The chunks that are there as a whole
        whole: list[bytearray] = []  # their payloads
        start = 0  # of the chunk after them
        head = CHUNK_HEAD.match(data)
        while head and not is_last:
            size = int(head[1], 16)
            end = head.end() + size
            if len(data) < end:
                break
            whole.append(data[head.end() : end])
            start = end
            is_last = size == 0
            head = CHUNK_HEAD.match(data, start)

        # The beginning of the next one stays
        del data[:start]
        if not (head or is_last):
            _check_beginning(data)
        payload = b"".join(whole)
        if payload:
            yield payload

    # Trailers up to an empty line, which may follow at once
    data = bytearray(b"\n") + data
    end_of_body = END_OF_TRAILERS.search(data)
    while not end_of_body:
        data += _read_more(incoming)
        end_of_body = END_OF_TRAILERS.search(data)
    rest = data[end_of_body.end() :]
    incoming.ahead = bytes(rest) + incoming.ahead


def _check_beginning(data: bytearray) -> None:
    """Raises ValueError for data in which the head of a chunk is not whole and cannot become so."""
    if b"\n" in data[2:] or len(data) > MAX_CHUNK_HEAD:
        raise ValueError("no chunk begins here")


def _read_more(incoming: Incoming) -> bytes:
    data = incoming.read()
    if not data:
        raise ConnectionError("the body is cut")
    return data
