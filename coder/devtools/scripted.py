"""Scripted answers instead of a language model: a server on loopback, and a model without one.

    with ScriptedServer([Reply("Hello.")]) as server:
        ...  # base URL: server.url; what was asked: server.requests
    Agent(ScriptedModel([Reply(calls=[("ls", {})]), Reply("Done.")]), tools=[ls])
    Agent(ScriptedModel.from_trace("run.jsonl"), tools=[ls])

The server speaks the OpenAI protocol in real HTTP and event streams: /chat/completions (streamed or
not) and /models. The model is a ChatModel whose bytes come from here. A reply can also be a
failure: an error status, a stall, a cut stream, bytes of any kind.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from coder.abort import Abort
from coder.ai import ChatModel
from coder.devtools.trace_report import Exchange, read
from coder.events import Events
from coder.providers.endpoint import Endpoint
from coder.providers.errors import classify
from coder.providers.wire import copied
from coder.types import Completion, ModelError, Request

MODEL = "script"
Body = dict[str, Any]
Script = Callable[[Body], "Reply"]


@dataclass
class Reply:
    """One answer. `calls` are (name, arguments) pairs; arguments may be text, to send invalid JSON.

    `chunks`, if given, are the bytes of the body, one write each, instead of an answer made of the
    other fields. `close`: "eof" ends the body properly, "reset" breaks the connection, "hang"
    leaves it open and silent; `cut` sends only so many events of the answer before that. `pace`:
    seconds between two writes; `hold`: seconds before the status line. `status` 0: none at all.
    """

    text: str = ""
    calls: Sequence[tuple[str, Any]] = ()
    reasoning: str = ""
    finish: str | None = ""  # "": stop or tool_calls; None: none at all
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    chunks: Sequence[bytes] | None = None
    close: Literal["eof", "reset", "hang"] = "eof"
    cut: int | None = None
    pace: float = 0.0
    hold: float = 0.0
    failure: ModelError | None = None  # instead of the answer or after it; of a model only

    def body(self, asked: Body) -> Iterable[bytes]:
        """The pieces of a streamed answer. A subclass may wait between two of them."""
        if self.chunks is not None:
            return self.chunks
        return list(events(self, asked))[: self.cut]

    def error(self) -> Body:
        """The body of an answer with an error status."""
        return {"error": {"message": self.text, "code": self.status}}


# ---- the events of an answer ---------------------------------------------------------------------


def events(reply: Reply, body: Body) -> Iterator[bytes]:
    """The event stream of a reply, one event at a time."""
    for delta in _deltas(reply):
        yield _data([{"index": 0, "delta": delta, "finish_reason": None}])
    if reply.finish is not None:
        yield _data([{"index": 0, "delta": {}, "finish_reason": _finish(reply)}])
    if (body.get("stream_options") or {}).get("include_usage"):  # unasked, it breaks simple clients
        yield _data([], usage=_usage(reply, body))
    yield b"data: [DONE]\n\n"


def completion(reply: Reply, body: Body) -> Body:
    """The answer to a request that does not ask for a stream."""
    message = {"role": "assistant", "content": reply.text, "tool_calls": _calls(reply)}
    choice = {"index": 0, "message": message, "finish_reason": _finish(reply)}
    return _frame("chat.completion") | {"choices": [choice], "usage": _usage(reply, body)}


def _deltas(reply: Reply) -> Iterator[Body]:
    yield {"role": "assistant", "content": ""}
    for word in _words(reply.reasoning):
        yield {"reasoning_content": word}
    for word in _words(reply.text):
        yield {"content": word}
    for index, call in enumerate(_calls(reply)):
        function = call["function"]
        yield {"tool_calls": [{"index": index, **call, "function": function | {"arguments": ""}}]}
        for piece in re.findall(r"(?s).{1,24}", function["arguments"]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def _calls(reply: Reply) -> list[Body]:
    calls: list[Body] = []
    for name, arguments in reply.calls:
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments)
        function = {"name": name, "arguments": arguments}
        call_id = f"call{secrets.token_hex(5)}"
        calls.append({"id": call_id, "type": "function", "function": function})
    return calls


def _words(text: str) -> list[str]:
    return re.findall(r"\s*\S+|\s+$", text)


def _finish(reply: Reply) -> str | None:
    if reply.finish != "":
        return reply.finish
    return "tool_calls" if reply.calls else "stop"


def _frame(kind: str) -> Body:
    return {"id": "chatcmpl-script", "object": kind, "created": int(time.time()), "model": MODEL}


def _data(choices: list[Body], **more: Any) -> bytes:
    chunk = _frame("chat.completion.chunk") | {"choices": choices} | more
    return b"data: %s\n\n" % json.dumps(chunk).encode()


def _usage(reply: Reply, body: Body) -> Body:
    """The tokens, counted as four characters each."""
    sent = len(json.dumps(body)) // 4
    got = (len(reply.text) + len(json.dumps(list(reply.calls)))) // 4
    return {"prompt_tokens": sent, "completion_tokens": got, "total_tokens": sent + got}


# ---- the server ----------------------------------------------------------------------------------


def in_order(replies: Sequence[Reply]) -> Script:
    """One reply after the other; the last one is repeated."""
    last = replies[-1] if replies else Reply("(the script is empty)")
    ordered = chain(replies, repeat(last))

    def script(body: Body) -> Reply:
        return next(ordered)

    return script


class ScriptedServer(ThreadingHTTPServer):
    """A context manager that serves from a thread of its own. `port` 0 takes a free one.

    `requests` are the bodies received, `heads` their headers, `paths` their paths, `times` when
    each came and `sent` when its answer was out (monotonic seconds), `connections` counts
    connections and `gone` answers whose client left before their end. `models` are the names at
    /models.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, script: Script | Sequence[Reply], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.script = script if callable(script) else in_order(script)
        self.requests: list[Body] = []
        self.heads: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.times: list[float] = []
        self.sent: list[float] = []
        self.connections = 0
        self.gone = 0
        self.models = [MODEL]
        self.stopping = threading.Event()
        self.port: int = self.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> ScriptedServer:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that left; anything else is shown as usual."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ScriptedServer

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the library's name)
        pass

    def do_GET(self) -> None:
        """The list of models, whatever is asked for."""
        models = [{"id": name} for name in self.server.models]
        self._json(200, {"object": "list", "data": models})

    def do_POST(self) -> None:
        server = self.server
        arrived = time.monotonic()
        raw = self.rfile.read(int(self.headers.get("content-length", 0)))
        if not self.path.partition("?")[0].endswith("/chat/completions"):
            self._json(404, {"error": {"message": f"nothing at {self.path}"}})
            return
        try:
            body = json.loads(raw)
            "".join(message["role"] for message in body["messages"])
        except (ValueError, LookupError, TypeError):
            self._json(400, {"error": {"message": "messages has to be a list of messages"}})
            return
        server.times.append(arrived)
        server.paths.append(self.path)
        server.heads.append({name.lower(): value for name, value in self.headers.items()})
        server.requests.append(body)
        try:
            self._answer(server.script(body), body)
            server.sent.append(time.monotonic())
        except (ConnectionError, TimeoutError):
            server.gone += 1
            self.close_connection = True

    def _answer(self, reply: Reply, body: Body) -> None:
        self.server.stopping.wait(reply.hold)
        if not reply.status:
            self._break()
        elif reply.status != 200 and reply.chunks is None:
            self._json(reply.status, reply.error(), reply.headers)
        elif body.get("stream") or reply.chunks is not None:
            self._stream(reply, reply.body(body))
        else:
            self._json(200, completion(reply, body))

    def _stream(self, reply: Reply, chunks: Iterable[bytes]) -> None:
        """One HTTP chunk and one write each."""
        headers = {"content-type": "text/event-stream", "transfer-encoding": "chunked"}
        self._head(reply.status, headers | reply.headers)
        for chunk in chunks:
            if chunk:  # an empty one would end the answer
                self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                self.server.stopping.wait(reply.pace)
        if reply.close == "eof":
            self.wfile.write(b"0\r\n\r\n")
            return
        if reply.close == "hang" and not self.connection.recv(1):  # until the client leaves
            raise ConnectionResetError
        self._break()

    def _break(self) -> None:
        """Reset the connection instead of ending the answer."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def _json(self, status: int, value: Body, headers: Mapping[str, str] = {}) -> None:
        data = json.dumps(value).encode()
        own = {"content-type": "application/json", "content-length": str(len(data))}
        self._head(status, own | dict(headers))
        self.wfile.write(data)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


# ---- the model -----------------------------------------------------------------------------------

# What a trace has of a model, and the option that it becomes
TRACED = {
    "name": "name",
    "context_window": "context_window",
    "profile": "profile",
    "extra_body": "extra_body",
    "budgets": "reasoning_budgets",
}


class ScriptedModel(ChatModel):
    """A model with given replies.

    `requests` are what it was asked, `bodies` the JSON that a server would have received; one
    request too many is a ModelError. `options` are ChatModel's.
    """

    def __init__(self, replies: Iterable[Reply], name: str = MODEL, **options: Any) -> None:
        address = f"script:{secrets.token_hex(4)}"  # its own: what is learnt is kept by address
        super().__init__(name, base_url=address, **options)
        self.requests: list[Request] = []
        self.bodies: list[Body] = []
        self.endpoint = _Player(replies, self.bodies)

    def stream(self, request: Request, abort: Abort) -> Events[Completion]:
        messages = copied(request.messages)  # the run changes them in place
        self.requests.append(replace(request, messages=messages))
        return super().stream(request, abort)

    @classmethod
    def from_trace(cls, path: str | Path) -> ScriptedModel:
        """The model of a trace: each answer is the recorded one, byte for byte and at once.

        So is each failure. Raises OSError, or TraceError if the file is no trace.
        """
        recording = read(path)
        model = recording.model
        options = {option: model[name] for name, option in TRACED.items() if name in model}
        return cls([_recorded_reply(exchange) for exchange in recording.exchanges], **options)


def _recorded_reply(exchange: Exchange) -> Reply:
    chunks = [line["text"].encode("utf-8", "surrogateescape") for line in exchange.of("chunk")]
    reply = Reply(chunks=chunks)
    for line in exchange.of("response"):
        reply.headers = line["headers"]
    error: Body = {"kind": "incomplete", "message": "the trace ends in the middle of this answer"}
    for line in exchange.of("response_end"):
        error = line["error"]
    if error:
        reply.failure = ModelError(**error)
    return reply


def _failure(reply: Reply) -> ModelError | None:
    """The error in which a reply ends, if it does."""
    if reply.failure:
        return reply.failure
    if reply.status not in (0, 200):
        return classify(reply.status, reply.error(), reply.headers)
    if reply.close == "reset" or reply.status == 0:
        return ModelError("network", "the connection broke", retryable=True)
    return None


class _Player(Endpoint):
    """An endpoint that plays one reply for each request."""

    def __init__(self, replies: Iterable[Reply], bodies: list[Body]) -> None:
        super().__init__("script:", None, {})
        self.replies = iter(replies)
        self.bodies = bodies

    @contextmanager
    def request(
        self,
        data: bytes,
        api_key: str | None,
        abort: Abort,
        seconds: float,
        path: str = "",
    ) -> Iterator[Any]:
        body = json.loads(data)
        self.bodies.append(body)
        end = ModelError("protocol", "the script is at its end, and the run asks for more")
        reply = next(self.replies, Reply(status=0, failure=end))
        abort.wait(reply.hold)
        error = _failure(reply)
        chunks = reply.body(body) if reply.status == 200 else ()
        if error and not chunks:
            raise error

        def pieces() -> Iterator[bytes]:
            for chunk in chunks:
                yield chunk
                abort.wait(reply.pace)
            abort.wait(math.inf if reply.close == "hang" else 0.0)
            if error:
                raise error

        headers = {"content-type": "text/event-stream"} | reply.headers
        facts = {"status_code": 200, "url": "script", "headers": headers, "is_framed": True}
        yield SimpleNamespace(pieces=pieces, set_deadline=lambda seconds: None, **facts)
