"""What only https needs: TLS with the system's authorities, and the environment's proxy.

A proxy is taken for https alone, since it would read the key of an http request.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import re
import socket
import ssl
import time
from functools import cache
from glob import glob
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from coder.providers.framing import Incoming, read_head
from coder.providers.text import PROXIES, shown_url
from coder.types import ModelError

OWN_CA = "The certificate has to be valid for this host; SSL_CERT_FILE names authorities (PEM)."
OWN_CERTIFICATE = "If it asks for a client certificate: none is sent. A gateway that has one can."
PAST_PROXY = "Change that variable, or name the server's host in NO_PROXY."
BY_CLIENT = "A client of the openai package takes SOCKS and https proxies: ChatModel(client=...)."
PERHAPS_PLAIN = "A server that speaks http has an address with http://."


# ---- TLS -----------------------------------------------------------------------------------------


def tls_context() -> ssl.SSLContext:
    """TLS with the authorities that the environment names, else the system's. Raises ModelError."""
    try:
        return _load_tls(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
    except OSError as error:
        raise ModelError(
            "protocol",
            f"the file of SSL_CERT_FILE or SSL_CERT_DIR cannot be loaded: {error}",
            advice=OWN_CA,
        ) from error


@cache
def _load_tls(file: str | None, folder: str | None) -> ssl.SSLContext:
    if file or folder:
        named = ssl.create_default_context(cafile=file or None, capath=folder or None)
        # The user trusts these on purpose, so they are taken as curl takes them: an authority in
        # the middle counts as well, and a company's proxy whose own lacks an extension, which
        # Python refuses from 3.13 on
        named.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        named.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return named
    paths = ssl.get_default_verify_paths()
    if paths.cafile or glob(f"{paths.capath}/*.0"):
        return ssl.create_default_context()
    import httpx2  # if Python finds no authorities: the openai client's own library does

    return httpx2.create_ssl_context()


def tls_failure(cause: Exception, address: str) -> ModelError | None:
    """Why TLS did not come about, or was ended by an alert of the server's; None for a connection
    that broke."""
    if isinstance(cause, ssl.SSLCertVerificationError):
        why = cause.verify_message.rstrip(".")
        return ModelError(
            "protocol",
            f"the certificate of {address} is refused: {why}",
            advice=OWN_CA,
        )
    if not isinstance(cause, ssl.SSLError) or isinstance(cause, ssl.SSLEOFError):
        return None
    reason = (cause.reason or str(cause)).replace("_", " ").lower()
    if "alert" in reason:
        return ModelError(
            "protocol",
            f"{address} refuses the connection ({reason})",
            advice=OWN_CERTIFICATE,
        )
    return ModelError(
        "protocol",
        f"{address} does not speak TLS as https needs it ({reason})",
        advice=PERHAPS_PLAIN,
    )


# ---- proxies -------------------------------------------------------------------------------------


class Proxy(NamedTuple):
    url: str
    name: str  # what to call it: its address, and the variable that names it

    @property
    def is_plain(self) -> bool:
        """Whether it is spoken to in plain HTTP, as the direct connection does."""
        return self.url.lower().startswith("http://")


def proxy_of(url: str) -> Proxy | None:
    """The environment's proxy for a server; None if there is none or by NO_PROXY."""
    parts = urlsplit(url)
    variable = next((name for name in PROXIES if os.environ.get(name)), "")
    if parts.scheme != "https" or not variable:
        return None
    host = (parts.hostname or "").rstrip(".")
    excepted = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    entries = re.split(r"[\s,]+", excepted.lower())
    if any(_covers(entry, host, parts.port or 443) for entry in entries):
        return None
    address = os.environ[variable]
    if "://" not in address:
        address = f"http://{address}"
    return Proxy(address, f"the proxy {shown_url(address)} ({variable})")


def plain_proxy_of(url: str) -> Proxy | None:
    """As proxy_of. Raises ModelError for a proxy that the direct connection cannot use."""
    proxy = proxy_of(url)
    if proxy and not proxy.is_plain:
        raise ModelError(
            "protocol",
            f"{proxy.name} has to begin with http:// for the direct connection",
            advice=BY_CLIENT,
        )
    return proxy


def _covers(entry: str, host: str, port: int) -> bool:
    """Whether an entry of NO_PROXY is about a server. As curl and Go read it: an address or a
    network, or a name with all names below it; perhaps with a port; * is every server."""
    if entry == "*":
        return True
    before, _, last = entry.rpartition(":")
    has_port = last.isdecimal() and (":" not in before or before.endswith("]"))
    if has_port:  # and not a part of an IPv6 address
        if int(last) != port:
            return False
        entry = before
    entry = entry.replace("[", "").replace("]", "")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        name = entry.removeprefix("*").strip(".")
        return bool(name) and f".{host}".endswith(f".{name}")
    try:
        return address in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False


def open_tunnel(
    sock: socket.socket,
    proxy: Proxy,
    server: str,
    seconds: float,
) -> None:
    """Let a proxy connect `sock` to a server, host:port, within so many seconds. Raises OSError,
    ValueError, or ModelError if it refuses."""
    if not re.search(r":\d+$", server):
        server += ":443"
    head = f"CONNECT {server} HTTP/1.1\r\nHost: {server}\r\n"
    parts = urlsplit(proxy.url)
    if parts.username or parts.password:
        user = unquote(parts.username or "")
        password = unquote(parts.password or "")
        encoded = base64.b64encode(f"{user}:{password}".encode()).decode()
        head += f"Proxy-Authorization: Basic {encoded}\r\n"
    sock.sendall(f"{head}\r\n".encode())
    deadline = time.monotonic() + seconds

    def left() -> float:
        if time.monotonic() >= deadline:
            raise TimeoutError("timed out")
        return seconds

    status, _ = read_head(Incoming(sock, left))
    sock.settimeout(seconds)
    if status >= 300:
        may_pass = status >= 500
        raise ModelError(
            "network" if may_pass else "protocol",
            f"{proxy.name} does not connect to {server}: HTTP status {status}",
            retryable=may_pass,
            advice=PAST_PROXY,
        )
