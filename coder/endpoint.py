"""Endpoint: one server's address, its key and its connections, through the openai client.

The client makes the connection, the credentials and the request. Its own retries are off, and redirects are not followed:
they would carry the conversation to another host. What happens before an answer comes is turned into ModelError here.

What it leaves out: what is sent (profile.py), reading the answer (ai.py), ending a request from outside (connection.py).
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl

from coder.address import is_loopback
from coder.connection import Line
from coder.errors import classify
from coder.types import ModelError

CONNECT_TIMEOUT = 10.0  # seconds
OUR_HEADERS = {"host", "accept", "accept-encoding", "authorization", "connection", "content-length", "content-type", "user-agent"}


class Endpoint:
    """Where requests go. `base_url` None is the client's default, and then a missing key is taken from OPENAI_API_KEY;
    an address given here never gets a key that was not given with it. `key_header`: a header that carries the key, too."""

    def __init__(self, base_url: str | None, api_key: str | None, headers: Mapping[str, str], key_header: str = "") -> None:
        self.base_url, self.api_key, self.headers, self.key_header = base_url, api_key, dict(headers), key_header
        self.newest: Any = None  # the network stream of the newest connection
        self._client: Any = None
        self._here = threading.local()  # the line and the key of the request that this thread sends

    def send(self, data: bytes, api_key: str | None, line: Line) -> Any:
        """Send a request's body; the response with its headers read. Raises ModelError."""
        import openai

        self._here.line, self._here.key = line, api_key or self.api_key or "none"
        try:
            client = self._connected(openai)
            if api_key:
                client = client.with_options(api_key=api_key)
            return client.post("/chat/completions", content=data, cast_to=object, stream=True,
                               stream_cls=openai.Stream[object]).response
        except openai.APIStatusError as error:
            raise _status_error(error.response) from error
        except openai.APIConnectionError as error:
            raise self.network_error(error.__cause__ or error) from error

    def network_error(self, cause: BaseException) -> ModelError:
        """What the HTTP library raised, in our terms."""
        if type(cause).__name__ == "UnsupportedProtocol":
            return ModelError("protocol", f"{self.base_url!r} is no base URL: it has to begin with http:// or https://")
        causes = list(_causes(cause))
        if any(isinstance(each, ConnectionRefusedError) or "refused" in str(each).lower() for each in causes):
            return ModelError("network", f"nothing answers at {self._client.base_url}", retryable=True)
        if any(isinstance(each, socket.gaierror) for each in causes):
            return ModelError("network", f"no host {self._client.base_url.host!r} is known: {causes[-1]}", retryable=True)
        return ModelError("network", str(cause) or type(cause).__name__, retryable=True)

    @contextmanager
    def reading(self, response: Any) -> Iterator[None]:
        """Turn what the HTTP library raises while a body is read into ModelError; close the response on every way out."""
        import httpx2  # the openai client's own HTTP library

        try:
            yield
        except httpx2.HTTPError as error:
            raise self.network_error(error) from error
        finally:
            response.close()

    def _connected(self, openai: Any) -> Any:
        """The client, made at the first request. Raises ModelError where the base URL is none."""
        if self._client is not None:
            return self._client
        import httpx2  # the openai client's own HTTP library

        address, _, query = (self.base_url or "").partition("?")
        # loading the authorities takes 50 ms; without any, a connection that does use TLS fails, and is not trusted
        tls: Any = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if address.startswith("http://") else True
        transport = openai.DefaultHttpxClient(
            follow_redirects=False, verify=tls, event_hooks={"request": [self._trace]},
            trust_env=not is_loopback(self.base_url))  # what is meant for this machine goes through no proxy
        timeout = openai.Timeout(None, connect=CONNECT_TIMEOUT)  # reading is timed by the line
        key = self.api_key or (None if self.base_url else os.environ.get("OPENAI_API_KEY"))
        try:
            self._client = openai.OpenAI(
                base_url=address or None, api_key=key or "none", max_retries=0, timeout=timeout,  # H12, R29
                default_query=dict(parse_qsl(query)),  # Azure's older addresses end in ?api-version=
                default_headers={"Accept-Encoding": "identity", **self.headers}, http_client=transport)  # S14
        except httpx2.InvalidURL as error:
            raise ModelError("protocol", f"{self.base_url!r} is no base URL: {error}") from error
        return self._client

    def _trace(self, request: Any) -> None:
        """Tell the line of this thread's request which connection it gets; see that nothing goes out that is not meant to."""
        line: Line = self._here.line

        def seen(event: str, info: dict[str, Any]) -> None:
            if event.endswith(("connect_tcp.complete", "start_tls.complete")):
                line.connected(info["return_value"])

        request.extensions["trace"] = seen
        if self.base_url:  # the client adds what it finds in the environment, which belongs to another server
            for name in set(request.headers) - OUR_HEADERS - {name.lower() for name in self.headers}:
                del request.headers[name]
            request.headers["Authorization"] = self.headers.get("Authorization") or f"Bearer {self._here.key}"
            if self.key_header:
                request.headers[self.key_header] = self._here.key


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it came from, down to the system's."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _status_error(response: Any) -> ModelError:
    if 300 <= response.status_code < 400:
        return ModelError("protocol", f"{response.url} redirects to {response.headers.get('location')}, which is not "
                          "followed: set the base URL to where the server is", status=response.status_code)
    text = response.text
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = text
    return classify(response.status_code, body, response.headers)
