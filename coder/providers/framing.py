"""What a connection brings: reads with a time limit, the head of an answer, and its body piece by piece (RFC 9112)."""

from __future__ import annotations

import math
import re
import socket
import zlib
from collections.abc import Callable, Iterator, Mapping

from coder.types import ModelError

SLICE = 0.2  # seconds that one wait for a socket takes at most
READ_SIZE = 1 << 15  # bytes
MAX_HEADER, MAX_HEADERS = 65_536, 200  # bytes of a line, and lines
STATUS_LINE = re.compile(rb"HTTP/1\.\d (\d{3})\b.*\n")
MAX_CHUNK_HEAD = 4_096  # bytes of a chunk's size and its extensions
CHUNK_HEAD = re.compile(rb"(?:\r?\n)?(0*[0-9a-fA-F]{1,7})\b.*\n")  # 256 MiB are enough
COMPRESSED = {"gzip", "x-gzip", "deflate"}
NOT_ASKED = "Switch the compression off at the server or at the gateway before it."
UNREADABLE = {"br", "zstd", "compress", "x-compress"}  # no other word stands for a compression


class Incoming:
    """What a socket receives. A read ends with TimeoutError where no seconds are `left`.

    It waits in slices: a signal that comes between Python's look for signals and the wait does not wake it, and is
    handled when the slice is over.
    """

    def __init__(self, sock: socket.socket, left: Callable[[], float]) -> None:
        self.sock = sock
        self.left = left
        self.ahead = b""  # received, and not read yet

    def read(self, size: int = READ_SIZE) -> bytes:
        """What comes next; b"" at the end. Raises OSError, and what `left` raises."""
        if self.ahead:
            data = self.ahead[:size]
            self.ahead = self.ahead[size:]
            return data
        while True:
            self.sock.settimeout(min(self.left(), SLICE))
            try:
                return self.sock.recv(size)
            except TimeoutError as error:
                if error.errno:  # the system's own: the other side does not answer any more
                    raise ConnectionError(error.strerror) from error

    def read_line(self) -> bytes:
        """Up to the end of a line; without one where the connection ends, or where it is longer than MAX_HEADER."""
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
    """(status, headers with their names in lower case) of an answer. Raises OSError, or ValueError for what is none."""
    found = STATUS_LINE.match(incoming.read_line())
    if not found:
        raise ValueError("no status line")
    headers: dict[str, str] = {}
    name = ""
    for _ in range(MAX_HEADERS + 1):
        line = incoming.read_line()
        if line.strip(b"\r") == b"\n":
            return int(found[1]), headers
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
    """Whether an answer says where it ends; otherwise the end of the connection ends it, and so does a break."""
    return "content-length" in headers or "transfer-encoding" in headers


def body_of(incoming: Incoming, headers: Mapping[str, str]) -> Iterator[bytes]:
    """The body of an answer, piece by piece as it comes. Raises OSError where it is cut, ValueError or zlib.error for
    what is none, ModelError for a compression that is not known."""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        body = _unchunk(incoming)
    else:
        body = _plain(incoming, headers.get("content-length"))
    # no compression was asked for; the last one named is the outermost
    for encoding in reversed(re.split(r"[\s,]+", headers.get("content-encoding", "").lower())):
        if encoding in UNREADABLE:
            message = f"the answer is compressed with {encoding}, which was not asked for"
            raise ModelError("protocol", message, advice=NOT_ASKED)
        if encoding in COMPRESSED:
            body = _inflate(body, encoding)
    return body


def _inflate(body: Iterator[bytes], encoding: str) -> Iterator[bytes]:
    """Some servers send deflate without the header of zlib, whose first byte ends in 8 (RFC 1950)."""
    start = next(body, b"")
    if not start:
        return
    is_bare = encoding == "deflate" and start[0] & 15 != 8
    inflate = zlib.decompressobj(-zlib.MAX_WBITS if is_bare else zlib.MAX_WBITS | 32).decompress
    data = start
    while data:
        if payload := inflate(data):
            yield payload
        data = next(body, b"")


def _plain(incoming: Incoming, length: str | None) -> Iterator[bytes]:
    left = math.inf if length is None else int(length)  # without one: to the end of the connection
    while left and (data := incoming.read(int(min(left, READ_SIZE)))):
        left -= len(data)
        yield data
    if left and length is not None:
        raise ConnectionError("the body is cut")


def _unchunk(incoming: Incoming) -> Iterator[bytes]:
    """The payload of a chunked body: all whole chunks that a read brings are one piece."""
    data, size = bytearray(), 1
    while size or b"\n\r\n" not in data:
        more = incoming.read()
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
    incoming.ahead = bytes(data.partition(b"\n\r\n")[2]) + incoming.ahead
