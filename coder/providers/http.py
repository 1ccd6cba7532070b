"""Endpoint: one server's address, its key, and requests to it. StreamingRequest: one request and its answer.

Requests are made and sent here. The openai client, whose import takes 0.15 s, supplies what it knows of OpenAI's own server
(address, organisation, project), and is not imported for any other. Redirects are not followed: they would carry the
conversation to another host. Retries are the loop's. The thread that asked sends and reads; an abort shuts the socket,
which ends a read or a write that blocks.
"""

from __future__ import annotations

import io
import json
import os
import re
import select
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urljoin, urlsplit

from coder.abort import Abort
from coder.providers.connection import body_of, open_connection, read_head
from coder.providers.errors import ADVICE, classify
from coder.providers.response import well_formed
from coder.providers.text import shown_url
from coder.types import ModelError

CALL, LIST = "/chat/completions", "/models"
MAX_ERROR = 1_000_000  # bytes of an error's body that are read
LONGEST = 1e6  # seconds that a socket waits; more than the system takes is an error
PERHAPS_TLS = "Where the server speaks TLS, OPENAI_BASE_URL begins with https://."
SLOW = "A slow server needs a longer CODER_FIRST_BYTE_TIMEOUT or CODER_IDLE_TIMEOUT."
HEADER = re.compile(r"[!-9;-~]+: [\t -~]*")


class Endpoint:
    """Where requests go; address and key as for a ChatModel. `key_header`: a further header for the key. `redact` is applied
    to each piece that is read of an answer."""

    def __init__(
        self,
        base_url: str | None,
        api_key: str | None,
        headers: Mapping[str, str],
        redact: Callable[[bytes], bytes] = bytes,
    ) -> None:
        self.kept: list[socket.socket] = []  # connections for the next request
        self.base_url, self.api_key, self.key_header = base_url, api_key, ""
        self.redact = redact
        self.headers = {name.lower(): value for name, value in headers.items()}
        self.address = self._base_of(base_url or os.environ.get("OPENAI_BASE_URL") or "") or None
        self.base = ""  # the resolved address, from the first request on
        self.answered = False  # the server did, at least once
        self._defaults: dict[str, str] = {}  # headers of each request

    def __del__(self) -> None:
        for sock in self.kept:
            sock.close()

    def _base_of(self, url: str) -> str:
        """A base URL, also where the address of the call itself was pasted."""
        place, mark, query = url.partition("?")
        return place.rstrip("/").removesuffix(CALL) + mark + query

    @contextmanager
    def post(
        self, data: bytes, api_key: str | None, abort: Abort, seconds: float, path: str = CALL
    ) -> Iterator[StreamingRequest]:
        """Send `data`, or ask for the LIST; inside, the answer can be read. Within `seconds` the first of it has to come.
        Raises ModelError for what is no answer, or Aborted."""
        abort.check()
        key = self.key_for(api_key)
        self.base = self.base or self._find_base(key)
        base, mark, query = self.base.partition("?")  # Azure's ?api-version=
        url = base.rstrip("/") + path + mark + query
        message = self._head(url, path, key, len(data)) + data
        request = StreamingRequest(self, url, abort, seconds)
        with abort.calling(request.cut):
            try:
                request.send(message)
                if request.status_code >= 300:
                    raise self._refusal(request)
                yield request
            except ModelError as error:  # a server's text may repeat the key that it was sent
                if len(key) > 7:
                    error.message = error.message.replace(key, "***")
                    error.request_id = error.request_id and error.request_id.replace(key, "***")
                raise
            finally:
                request.close()

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

    def models(self, seconds: float = 5.0, abort: Abort | None = None) -> list[str]:
        """The names of the server's models. Raises ModelError and Aborted."""
        with self.post(b"", None, abort or Abort(), seconds, LIST) as answer, well_formed():
            listing = json.loads(b"".join(answer.pieces()))
            return [str(model["id"]) for model in listing["data"] or ()]

    def key_for(self, api_key: str | None) -> str:
        """The key of a request. Raises ModelError where OpenAI's own server has none, or where no header can carry it; it
        is not shown."""
        key = api_key or self.api_key or ("" if self.base_url else os.environ.get("OPENAI_API_KEY"))
        own = self.headers.keys() & {"authorization", "api-key", self.key_header}
        if not (key or self.address or own):
            ways = "set OPENAI_API_KEY, or give api_key= or a base_url="
            raise ModelError("auth", f"no key: {ways}; nothing was sent")
        key = (key or "none").strip()
        if not (key.isascii() and key.isprintable()):
            message = "the key holds characters that no header can carry: copy it again"
            raise ModelError("auth", message)
        return key

    def _find_base(self, key: str) -> str:
        """The address, at the first request. Raises ModelError for one that is none."""
        from coder import __version__  # late: it imports this module's users

        address, self._defaults = self.address, {"user-agent": f"coder/{__version__}"}
        if not address:
            client = openai_client(key)
            address = str(client.base_url)
            given = client.default_headers.items()  # some are marked as left out
            self._defaults = {
                name.lower(): value for name, value in given if isinstance(value, str)
            }
        with suppress(ValueError):
            parts = urlsplit(address)
            known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            if known and re.fullmatch("[!-~]+", address):
                return address
        message = f"{shown_url(address)!r} is no base URL: it has to begin with http:// or https://"
        raise ModelError("protocol", message)

    def _head(self, url: str, path: str, key: str, size: int) -> bytes:
        """Request line and headers. Raises ModelError for a header that cannot be sent."""
        parts = urlsplit(url)
        headers = {
            "host": parts.netloc.rpartition("@")[2],
            "accept": "application/json",
            "content-type": "application/json",
            "authorization": f"Bearer {key}",
            **self._defaults,
            "accept-encoding": "identity",
            **self.headers,
            **({self.key_header: key} if self.key_header else {}),
            "content-length": str(size),
        }
        lines = [f"{name}: {value}" for name, value in headers.items()]
        if not all(map(HEADER.fullmatch, lines)):  # not shown: it may be a key
            raise ModelError("protocol", "a header of the request holds what cannot be sent")
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        method = "POST" if path == CALL else "GET"
        return "\r\n".join([f"{method} {target} HTTP/1.1", *lines, "", ""]).encode()

    def _refusal(self, request: StreamingRequest) -> ModelError:
        """The error of a status that is none of success. What can be read of the body counts; some break off."""
        url, status = shown_url(request.url), request.status_code
        if status < 400:
            location = urljoin(request.url, request.headers.get("location", ""))
            target = shown_url(self._base_of(location))
            message = f"{url} redirects to {target}; redirects are not followed"
            advice = "Set OPENAI_BASE_URL to where the server is."
            return ModelError("protocol", message, status=status, advice=advice)
        body = b""
        with suppress(ModelError):
            for piece in request.pieces():
                body += piece
                if len(body) >= MAX_ERROR:
                    break
        try:
            said = json.loads(body)
        except (ValueError, RecursionError):
            said = body.decode("utf-8", "replace")
        error = classify(status, said, request.headers)
        error.body = body[:MAX_ERROR]
        if status == 404 and "model" not in error.message.lower():
            error.message += f" at {url}"
            error.advice = "" if "/v1" in url else ADVICE["protocol"]
        return error


class StreamingRequest:
    """One request and its answer. `cut` ends both at any moment, from any thread or signal handler."""

    def __init__(self, endpoint: Endpoint, url: str, abort: Abort, seconds: float) -> None:
        self.endpoint, self.abort = endpoint, abort
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
                self.endpoint.kept.append(sock)
            else:
                sock.close()

    def send(self, message: bytes) -> None:
        """Send a request and read the head of its answer. Raises ModelError or Aborted."""
        endpoint = self.endpoint
        closed = f"the connection to {shown_url(endpoint.base)} was closed before an answer"
        plain = not endpoint.answered and self.url.startswith("http:")
        with self._as_model_error(closed, PERHAPS_TLS if plain else ""):
            idle = endpoint.idle()
            if not (idle and self._is_answered(idle, message)):
                # the server had closed the idle connection, and has not seen the request
                new = open_connection(endpoint.base, endpoint.answered, self._left)
                if not self._is_answered(new, message):
                    raise ConnectionError
            status = 100
            while 100 <= status < 200:  # interim answers
                status, self.headers = read_head(self._file)
        self.status_code, endpoint.answered = status, True

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
        message = "the connection broke in the middle of the answer"
        with self._as_model_error(message, ADVICE["incomplete"]):
            yield from map(self.endpoint.redact, body_of(self._file, self.headers))
        self.abort.check()
        framed = not {"content-length", "transfer-encoding"}.isdisjoint(self.headers)
        self._reusable = framed and self.headers.get("connection", "").lower() != "close"

    def _left(self) -> float:
        """Seconds to the deadline. Raises TimeoutError behind it, or Aborted."""
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
    """What a socket receives. No read, however small, goes on for more than the seconds that are `left` before it."""

    def __init__(self, sock: socket.socket, left: Callable[[], float]) -> None:
        self.sock, self.left = sock, left

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.sock.settimeout(self.left())
        return self.sock.recv_into(buffer)


def openai_client(api_key: str) -> Any:
    """The openai package's client, imported at the first need."""
    import openai

    return openai.OpenAI(api_key=api_key, max_retries=0)
