"""Bytes from a model server: a connection, past a proxy and with TLS, and the head and the body of an answer over it.

An abort cannot end the opening of a connection (name lookup, handshakes): a worker thread does it, and is left behind.
"""

from __future__ import annotations

import base64
import os
import re
import socket
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from glob import glob
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote, urlsplit

from coder.abort import run_in_thread
from coder.providers.text import shown_url
from coder.types import ErrorKind, ModelError

if TYPE_CHECKING:
    import ssl  # 10 ms that only https costs

CONNECT_TIMEOUT = 10.0  # seconds, for the connection and for each handshake
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
OWN_CA = "The certificate has to be valid for this host; SSL_CERT_FILE names authorities (PEM)."
PAST_PROXY = "Change that variable, or name the server's host in NO_PROXY."
PERHAPS_PLAIN = "A server that speaks http has an address with http://."


def open_connection(url: str, answered: bool, check: Callable[[], object]) -> socket.socket:
    """A new connection to the server of a URL. Raises ModelError, and what `check` raises, which is called meanwhile. A
    server that has not `answered` before is not tried again: its address may be wrong."""
    proxy, name = proxy_of(url)
    try:
        return run_in_thread(lambda: _connect(url, proxy, name), check, "connect")
    except (OSError, ValueError) as error:
        failure = _failure_of(error, url, name, answered)
        failure.advice = failure.advice or (PAST_PROXY if proxy else "")
        raise failure from error


def _connect(url: str, proxy: str, name: str) -> socket.socket:
    """A connection that is ready for a request. Raises OSError (ssl.SSLError is one) or ModelError."""
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
        if file or folder or known.cafile or glob(f"{known.capath}/*.0"):
            return ssl.create_default_context(cafile=file or None, capath=folder or None)
        import httpx2  # where Python does not look for them: the openai client's own library does

        return httpx2.create_ssl_context()
    except OSError as error:
        message = f"the file of SSL_CERT_FILE or SSL_CERT_DIR cannot be loaded: {error}"
        raise ModelError("protocol", message, advice=OWN_CA) from error


def _failure_of(cause: Exception, url: str, proxy: str, answered: bool) -> ModelError:
    """Why there is no connection."""
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
    return ModelError("network", message, retryable=answered)


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
    if length is None:  # up to the end of the connection
        while data := file.read1(READ_SIZE):
            yield data
        return
    left = int(length)
    while left:
        data = _read_more(file, left)
        left -= len(data)
        yield data


def _unchunk(file: Any) -> Iterator[bytes]:
    """The payload of a chunked body: all whole chunks that a read brings are one piece."""
    data, size = bytearray(), 1
    while size:
        data += _read_more(file)
        parts = list[bytes]()
        while size and (head := CHUNK_HEAD.match(data)):
            size = int(head[1], 16)
            end = head.end() + size
            if len(data) < end:
                break
            parts.append(bytes(data[head.end() : end]))
            del data[:end]
        if not head and (b"\n" in data[2:] or len(data) > MAX_CHUNK_HEAD):
            raise ValueError("no chunk begins here")
        if payload := b"".join(parts):
            yield payload
    data[:0] = b"\n"  # behind the last chunk: trailers up to an empty line
    while b"\n\r\n" not in data:
        data += _read_more(file)


def _read_more(file: Any, most: int = READ_SIZE) -> bytes:
    data: bytes = file.read1(min(most, READ_SIZE))
    if not data:
        raise ConnectionError("the body is cut")
    return data
