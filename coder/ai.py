"""ChatModel: one streamed chat completion with tools, through the openai client.

The client makes the connection, the credentials and the request; the stream is read here, to its end, so that one
connection serves a whole run. Two measured reasons: the client's typed `create()` walks the whole history again for
every request (459 ms at 400 steps, against 10), and its stream costs 200 µs a token and drops the connection (against 15).

What it leaves out: ending a request from outside (connection.py), retries (loop.py), the meaning of the bytes (wire.py)
and of errors (errors.py). The client's own retries are off, and redirects are not followed: they would carry the
conversation to another host.
"""

from __future__ import annotations

import json
import math
import os
import ssl
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from coder.abort import Abort
from coder.address import is_loopback
from coder.connection import Line
from coder.errors import classify
from coder.types import Completion, Event, Message, ModelError, Request
from coder.wire import Assembler, sse

CONNECT_TIMEOUT = 10.0  # seconds
AFTER_FINISH = 3.0  # seconds to wait for usage and [DONE] after a finish_reason (F14)
AFTER_DONE = 0.25  # seconds to wait for the end of the body, so that the connection can be used again
FIRST_BYTE_TIMEOUT = 300.0  # seconds: a long prompt on a local server takes minutes (S12)
MAX_BODY = 50_000_000  # bytes of an answer that is no event stream
OUR_HEADERS = {"host", "accept", "accept-encoding", "authorization", "connection", "content-length", "content-type", "user-agent"}


class ChatModel:
    """A model behind an OpenAI-compatible endpoint.

    `base_url` None is the client's default, and then a missing key is taken from OPENAI_API_KEY; an address given here
    never gets a key that was not given with it. `idle_timeout`: seconds without an event that carries data (comments do
    not count: S15), `first_byte_timeout`: seconds to the first of them; 0 is no limit. `extra_body` and `headers` go
    out with every request.
    """

    def __init__(self, name: str, *, base_url: str | None = None, api_key: str | None = None, context_window: int = 128_000,
                 idle_timeout: float = 180.0, first_byte_timeout: float = FIRST_BYTE_TIMEOUT,
                 headers: Mapping[str, str] | None = None, extra_body: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self.base_url = base_url
        self.api_key = api_key
        self.context_window = context_window
        self.idle_timeout = idle_timeout or math.inf
        self.first_byte_timeout = first_byte_timeout or math.inf
        self.headers = dict(headers or {})
        self.extra_body = dict(extra_body or {})
        self._client: Any = None
        self._newest: Any = None  # the network stream of the newest connection
        self._here = threading.local()  # the line and the key of the request that this thread sends

    # -- the one public verb

    def stream(self, request: Request, abort: Abort) -> Generator[Event, None, Completion]:
        """Yield the deltas of one answer, return it whole. Raises ModelError or Aborted."""
        abort.check()
        assembler = Assembler({tool["function"]["name"] for tool in request.tools})
        failure: ModelError | None = None
        with Line(self._newest, self.first_byte_timeout) as line, abort.calling(line.cut):
            try:
                response = line.open(lambda: self._send(request, line), abort)
                self._newest = line.stream
                yield from _well_formed(self._read(response, assembler, line))
            except ModelError as error:
                failure = error
        abort.check()
        if line.fired and not assembler.ended:
            failure = ModelError("network", f"no data for {line.seconds:g} s", retryable=True)
        if failure and not (failure.kind == "network" and assembler.ended):  # F14: whole, only the connection stayed open
            raise failure
        try:
            answer = assembler.completion()
        except MALFORMED as error:
            raise _malformed(error) from error
        return self._judged(answer, request)

    def _judged(self, answer: Completion, request: Request) -> Completion:
        """F10: a full window and no room for a word is an overflow. C3: usage that was not reported is estimated."""
        usage = answer.usage
        if usage.estimated:  # four characters a token
            usage.input = len(json.dumps(self.body(request))) // 4
            usage.output = len(json.dumps(answer.message)) // 4
        empty = not (answer.text or answer.calls or usage.output)
        if answer.finish == "length" and empty and usage.input >= 0.99 * self.context_window:
            raise ModelError("overflow", "the context is full")
        return answer

    def body(self, request: Request) -> dict[str, Any]:
        """The JSON that is sent: nothing in it that is not needed (R6), exactly one system message, first (R5)."""
        system: list[Message] = [{"role": "system", "content": request.system}] if request.system else []
        body = {"model": self.name, "messages": system + request.messages, "stream": True,
                "stream_options": {"include_usage": True}}
        if request.tools:
            body["tools"] = request.tools  # R11: no tools, no member
        return body | self.extra_body | request.options

    # -- the connection

    def _send(self, request: Request, line: Line) -> Any:
        """Send the request; the response with its headers read. Raises ModelError."""
        import openai

        self._here.line, self._here.key = line, request.api_key or self.api_key or "none"
        try:
            client = self._connected(openai)
            if request.api_key:
                client = client.with_options(api_key=request.api_key)
            return client.post("/chat/completions", body=self.body(request), cast_to=object, stream=True,
                               stream_cls=openai.Stream[object]).response
        except openai.APIStatusError as error:
            raise self._status_error(error.response) from error
        except openai.APIConnectionError as error:
            raise self._network_error(error.__cause__ or error) from error

    def _connected(self, openai: Any) -> Any:
        """The client, made at the first request. Raises ModelError where the base URL is none."""
        if self._client is not None:
            return self._client
        import httpx2  # the openai client's own HTTP library

        plain = (self.base_url or "").startswith("http://")
        # loading the authorities takes 50 ms; without any, a connection that does use TLS fails, and is not trusted
        tls: Any = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if plain else True
        transport = openai.DefaultHttpxClient(
            follow_redirects=False, verify=tls, event_hooks={"request": [self._trace]},
            trust_env=not is_loopback(self.base_url))  # what is meant for this machine goes through no proxy
        timeout = openai.Timeout(None, connect=CONNECT_TIMEOUT)  # reading is timed by the line
        key = self.api_key or (None if self.base_url else os.environ.get("OPENAI_API_KEY"))
        try:
            self._client = openai.OpenAI(
                base_url=self.base_url, api_key=key or "none", max_retries=0, timeout=timeout,  # H12, R29
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

    # -- reading

    def _read(self, response: Any, assembler: Assembler, line: Line) -> Iterator[Event]:
        """Feed the assembler to the end of the body."""
        with self._reading(response):
            if "event-stream" not in response.headers.get("content-type", "event-stream"):
                yield from self._read_whole(response, assembler)
                return
            encoded = "content-encoding" in response.headers  # S14
            for event, data in sse(response.iter_bytes() if encoded else response.iter_raw()):
                if assembler.done or data == "[DONE]":
                    assembler.done = True  # S7: what follows is read, so that the connection can serve again, and ignored
                    line.within(AFTER_DONE)
                    continue
                yield from assembler.feed(_parse(event, data))
                line.within(AFTER_FINISH if assembler.finish_reason else self.idle_timeout)

    def _read_whole(self, response: Any, assembler: Assembler) -> Iterator[Event]:
        """S10: an answer that is no event stream: a completion, an error, or something else altogether."""
        body = b"".join(_at_most(response.iter_bytes(), MAX_BODY))
        if body.lstrip().startswith((b"data:", b"event:", b":")):
            for event, data in sse([body]):
                if data == "[DONE]":
                    break
                yield from assembler.feed(_parse(event, data))
            assembler.done = True
            return
        try:
            chunk = json.loads(body)
        except ValueError:
            chunk = None
        if not isinstance(chunk, dict) or not (chunk.get("choices") or chunk.get("error") or chunk.get("object") == "error"):
            raise ModelError("protocol", f"not an API answer from {response.url}: check the base URL")
        yield from assembler.feed(chunk)
        assembler.done = True

    @contextmanager
    def _reading(self, response: Any) -> Iterator[None]:
        """Turn what the HTTP library raises into ModelError; close the response on every way out."""
        import httpx2  # the openai client's own HTTP library

        try:
            yield
        except httpx2.HTTPError as error:
            raise self._network_error(error) from error
        finally:
            response.close()

    def _network_error(self, cause: BaseException) -> ModelError:
        if type(cause).__name__ == "UnsupportedProtocol":
            return ModelError("protocol", f"{self.base_url!r} is no base URL: it has to begin with http:// or https://")
        refused = isinstance(cause.__cause__, ConnectionRefusedError) or "refused" in str(cause).lower()
        hint = f": nothing answers at {self._client.base_url}" if refused else ""
        return ModelError("network", f"{cause or type(cause).__name__}{hint}", retryable=True)

    def _status_error(self, response: Any) -> ModelError:
        if 300 <= response.status_code < 400:
            return ModelError("protocol", f"{response.url} redirects to {response.headers.get('location')}, which is not "
                              "followed: set the base URL to where the server is", status=response.status_code)
        text = response.text
        try:
            body = json.loads(text)
        except ValueError:
            body = text
        return classify(response.status_code, body, response.headers)


# What reading an answer raises whose members are not of the kind that the API says.
MALFORMED = (AttributeError, TypeError, ValueError, KeyError, IndexError, OverflowError, RecursionError)


def _malformed(error: Exception) -> ModelError:
    return ModelError("protocol", f"the answer is malformed ({type(error).__name__}: {error})"[:200], retryable=True)


def _well_formed(events: Iterator[Event]) -> Iterator[Event]:
    """The events of an answer. Raises ModelError where it is malformed: no server may break a run."""
    try:
        yield from events
    except MALFORMED as error:
        raise _malformed(error) from error


def _parse(event: str, data: str) -> Any:
    """The JSON of one event. Raises ModelError where it is none: a piece of the answer is lost (S13)."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        if event == "error":
            return {"error": data}
        raise ModelError("protocol", f"the stream holds what is no JSON: {data[:80]!r}", retryable=True) from error
    return value if event != "error" or (isinstance(value, dict) and value.get("error")) else {"error": value}  # S8


def _at_most(chunks: Iterator[bytes], limit: int) -> Iterator[bytes]:
    for chunk in chunks:
        limit -= len(chunk)
        if limit < 0:
            raise ModelError("protocol", "the answer is too large and no event stream")
        yield chunk
