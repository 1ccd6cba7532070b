"""A client of the openai package sends the requests, by its own address, credentials and proxies.

    ChatModel("gpt-5", client=openai.AzureOpenAI(...))

Nothing ends the waiting of a client. So it works in a thread of its own, and the thread that asked
looks at the abort and the clock while it waits for what that one receives. The package is imported
here and nowhere else, since that takes 0.5 s.
"""

from __future__ import annotations

import inspect
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import parse_qsl, quote

from coder.abort import Abort
from coder.providers import framing
from coder.providers.connection import BROKEN, CONNECT_TIMEOUT, SLOW, Redact
from coder.providers.endpoint import (
    COMPLETIONS,
    OPENAI,
    Endpoint,
    account_headers,
    base_of,
    check_status,
    hide_key,
)
from coder.providers.errors import ADVICE
from coder.providers.profiles import profile_of
from coder.providers.sse import Response
from coder.providers.text import host_of, shown_url
from coder.types import ModelError

OWN_WAY = "The address, the credentials and the proxy are those of the openai client."


class ClientEndpoint(Endpoint):
    """The server of a client. Raises ValueError for an asynchronous client."""

    def __init__(
        self,
        client: Any,
        model: str,
        headers: Mapping[str, str],
        redact: Redact | None = None,
    ) -> None:
        if inspect.iscoroutinefunction(client.post):
            raise ValueError("client= has to be a synchronous client, such as openai.OpenAI()")
        super().__init__(str(client.base_url), None, headers, redact)
        self.client = client
        self.model = model
        self._has_answered = False

    def key_for(self, api_key: str | None) -> str:
        """The key of a request, as far as it is known before the client sends it."""
        own = self.client.api_key
        return api_key or (own if isinstance(own, str) else "")

    @contextmanager
    def request(
        self,
        data: bytes,
        api_key: str | None,
        abort: Abort,
        seconds: float,
        path: str = COMPLETIONS,
    ) -> Iterator[Response]:
        abort.check()
        send = partial(self._send, data, api_key, path)
        response = ClientResponse(send, abort, seconds, self.redact)
        try:
            response.wait_for_head()
            self._has_answered = True
            check_status(response)
            yield response
        except ModelError as error:
            for key in (self.key_for(api_key).strip(), *response.sent_keys()):
                hide_key(error, key)
            raise
        finally:
            response.close()

    def _send(self, data: bytes, api_key: str | None, path: str) -> Any:
        """The response of httpx, whose body is not read yet, unless it is an error. Runs in the
        thread of the answer. Raises ModelError."""
        import httpx2
        import openai

        headers = dict(self.headers)
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        options = {
            "headers": headers,
            "max_retries": 0,
            "follow_redirects": False,
            "security": {"bearer_auth": True},
        }
        raw = {"cast_to": httpx2.Response, "stream": True, "stream_cls": openai.Stream}
        try:
            if not data:
                return self.client.get(path, options=options, **raw)
            is_azure = isinstance(self.client, openai.AzureOpenAI)
            if is_azure and "/deployments" not in self.client.base_url.path:
                # that class takes the name from a body that is a dictionary, and this one is bytes
                path = f"/deployments/{quote(self.model, safe='')}{path}"
            return self.client.post(
                path,
                content=data,
                options=options,
                **raw,
            )
        except openai.APIStatusError as error:
            return error.response
        except openai.APIConnectionError as error:
            raise self._no_answer(error.__cause__ or error) from error
        except Exception as error:  # no credentials, or what the user's own functions raise
            raise ModelError(
                "auth",
                f"the openai client has sent nothing: {type(error).__name__}: {error}",
                advice=OWN_WAY,
            ) from error

    def _no_answer(self, cause: BaseException) -> ModelError:
        """A server to which no connection was ever made is not tried again."""
        url = shown_url(str(self.client.base_url))
        # by name, since httpx and httpx2 have classes of their own
        was_connected = not type(cause).__name__.startswith(("Connect", "Proxy", "Unsupported"))
        return ModelError(
            "network",
            f"the openai client gets no answer from {url}: {cause}",
            retryable=was_connected or self._has_answered,
            advice=OWN_WAY,
        )


class ClientResponse:
    """A response that a thread receives. `send` gives that of httpx."""

    def __init__(
        self,
        send: Callable[[], Any],
        abort: Abort,
        seconds: float,
        redact: Redact | None,
    ) -> None:
        self.url = ""
        self.status_code = 0
        self.headers: Mapping[str, str] = {}
        self._abort = abort
        self._redact = redact
        self._response: Any = None
        self._is_given_up = False
        # the response, the pieces of its body, and None at its end; a ModelError ends it earlier
        self._received: SimpleQueue[Any] = SimpleQueue()
        self.set_deadline(seconds)
        threading.Thread(
            target=self._receive,
            args=(send,),
            daemon=True,
            name="openai",
        ).start()

    def _receive(self, send: Callable[[], Any]) -> None:
        """The work of the thread."""
        try:
            with closing(send()) as response:
                self._response = response
                self._received.put(response)
                pieces = response.iter_bytes()
                piece: bytes | None = b""
                while piece is not None and not self._is_given_up:
                    piece = next(pieces, None)
                    self._received.put(piece)
        except ModelError as error:
            self._received.put(error)
        except Exception as error:  # httpx and httpx2 have classes of their own
            broken = ModelError(
                "network",
                BROKEN,
                retryable=True,
                advice=ADVICE["incomplete"],
            )
            broken.__cause__ = error
            self._received.put(broken)

    def set_deadline(self, seconds: float) -> None:
        """Data has to come within so many seconds from now."""
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def wait_for_head(self) -> None:
        """Raises ModelError or Aborted."""
        response = self._take()
        self.url = str(response.url)
        self.status_code = response.status_code
        self.headers = {name.lower(): value for name, value in response.headers.items()}

    @property
    def is_framed(self) -> bool:
        """Whether a cut of the body is noticed."""
        return framing.is_framed(self.headers)

    def pieces(self) -> Iterator[bytes]:
        """The body, piece by piece as it comes. Raises ModelError or Aborted."""
        piece = self._take()
        while piece is not None:
            yield self._redact(piece) if self._redact else piece
            piece = self._take()

    def _take(self) -> Any:
        """What the thread receives next. Raises Aborted, ModelError, also for the time limit."""
        while True:
            self._abort.check()
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise ModelError(
                    "network",
                    f"no data for {self._seconds:g} s",
                    retryable=True,
                    advice=SLOW,
                )
            try:
                received = self._received.get(timeout=min(left, framing.SLICE))
            except Empty:
                continue
            if isinstance(received, ModelError):
                raise received
            return received

    def sent_keys(self) -> list[str]:
        """The credentials that went out with the request."""
        if self._response is None:
            return []
        headers = self._response.request.headers
        return [headers.get(name, "").split(" ")[-1] for name in ("authorization", "api-key")]

    def close(self) -> None:
        """End the request, unless all of its answer was read. Before its head has come only the
        server can end it: the thread is left to wait."""
        self._is_given_up = True
        if self._response is None or self._response.is_closed:
            return
        stream = self._response.extensions.get("network_stream")  # a transport may have none
        sock = stream.get_extra_info("socket") if stream else None
        if sock:
            with suppress(OSError):  # not connected any more
                socket.socket.shutdown(sock, socket.SHUT_RDWR)


def make_client(base_url: str | None, api_key: str | None) -> Any:
    """The client of a server whose address and key are known; proxies and certificates are those
    of the environment. Raises ModelError."""
    import httpx2
    import openai

    address, _, query = base_of(base_url or OPENAI).partition("?")
    key = api_key or "none"
    key_header = profile_of(host_of(address), "").key_header
    try:
        client = openai.OpenAI(
            base_url=address,
            api_key=key,
            default_query=dict(parse_qsl(query)),
            default_headers={key_header: key} if key_header else {},
            timeout=httpx2.Timeout(None, connect=CONNECT_TIMEOUT),  # the rest is ours
        )
    except (ImportError, ValueError) as error:  # of a proxy
        raise ModelError("protocol", f"the openai client cannot be made: {error}") from error
    if not account_headers(address):
        client.organization = None
        client.project = None
    return client
