"""An OpenAI-compatible server on loopback with scripted answers: real HTTP and event streams.

    with ScriptedServer([Reply("Hello.")]) as server:
        ...  # base URL: server.url; what was asked: server.requests

A script is a list of replies (the last repeats), or a function from the request's body to a reply. A
reply can also be a failure: an error status, a stall, a cut stream, bytes of any kind.

The demo and the tests use it; `python -m coder demo --port N` runs it alone. It serves
/chat/completions (streamed or not) and /models.
"""

from __future__ import annotations

import json
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

MODEL = "script"
Body = dict[str, Any]


@dataclass
class Reply:
    """One answer. `calls` are (name, arguments) pairs; arguments may be text, to send invalid JSON.

    `chunks`, if given, are the bytes of the body, one write each, instead of an answer made of the
    other fields. `close`: "eof" ends the body properly, "reset" breaks the connection, "hang"
    leaves it open and silent; `cut` sends only so many events of the answer before that. `pace`:
    seconds between two writes; `hold`: seconds before the status line.
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
    usage: bool = True


Script = Callable[[Body], Reply]


class ScriptedServer:
    """Serves from its own thread between `start` and `stop`, or as a context manager. `port` 0 takes
    a free one.

    `requests` are the bodies received, `heads` their headers, `paths` their paths, `times` when each
    came and `sent` when its answer was out (monotonic seconds), `connections` the number of
    connections so far, `gone` that of answers whose client had left before their end, `unreadable`
    the bodies that were no requests.
    """

    def __init__(self, script: Script | Sequence[Reply], port: int = 0) -> None:
        self.script = script if callable(script) else _in_turn(script)
        self.requests: list[Body] = []
        self.unreadable: list[bytes] = []
        self.heads: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.times: list[float] = []
        self.sent: list[float] = []
        self.connections = 0
        self.gone = 0
        self.stopping = threading.Event()
        self._server = _Server(("127.0.0.1", port), _Handler)
        self._server.owner = self
        self.port: int = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> ScriptedServer:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def stop(self) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> ScriptedServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def serve(self) -> None:
        """Serve in this thread until interrupted."""
        self._server.serve_forever()


def _in_turn(replies: Sequence[Reply]) -> Script:
    """A script that gives the replies in turn; the last one repeats."""
    left = iter(replies)
    last = Reply("(the script is empty)")
    lock = threading.Lock()

    def next_reply(_: Body) -> Reply:
        nonlocal last
        with lock:
            last = next(left, last)
        return last

    return next_reply


# ---- the events of an answer ---------------------------------------------------------------------


def events(reply: Reply, body: Body) -> Iterator[bytes]:
    """The event stream of a reply, one event at a time."""
    for delta in _deltas(reply):
        yield _event(delta)
    if reply.finish is not None:
        yield _event({}, reply.finish or ("tool_calls" if reply.calls else "stop"))
    asked = (body.get("stream_options") or {}).get("include_usage")
    if reply.usage and asked:  # unasked, it breaks simple clients
        yield _data({"choices": [], "usage": _usage(reply, body)})
    yield b"data: [DONE]\n\n"


def _deltas(reply: Reply) -> Iterator[Body]:
    yield {"role": "assistant", "content": ""}
    for word in _words(reply.reasoning):
        yield {"reasoning_content": word}
    for word in _words(reply.text):
        yield {"content": word}
    for index, (name, arguments) in enumerate(reply.calls):
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        call_id = f"call{time.monotonic_ns() % 10**9:09}{index}"
        function = {"name": name, "arguments": ""}
        call = {"index": index, "id": call_id, "type": "function", "function": function}
        yield {"tool_calls": [call]}
        for piece in re.findall(r"(?s).{1,24}", text):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def _words(text: str) -> list[str]:
    return re.findall(r"\s*\S+|\s+$", text)


def _frame() -> Body:
    return {
        "id": "chatcmpl-script",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": MODEL,
    }


def _event(delta: Body, finish: str | None = None) -> bytes:
    return _data({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def _data(chunk: Body) -> bytes:
    return b"data: " + json.dumps(_frame() | chunk).encode() + b"\n\n"


def _usage(reply: Reply, body: Body) -> Body:
    """Four characters a token, which is what this server counts in."""
    sent = len(json.dumps(body)) // 4
    got = (len(reply.text) + len(json.dumps(list(reply.calls)))) // 4
    return {"prompt_tokens": sent, "completion_tokens": got, "total_tokens": sent + got}


def completion(reply: Reply, body: Body) -> Body:
    """The answer to a request that does not ask for a stream."""
    calls = []
    for index, (name, arguments) in enumerate(reply.calls):
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        function = {"name": name, "arguments": text}
        calls.append({"id": f"call{index}", "type": "function", "function": function})
    message: Body = {"role": "assistant", "content": reply.text or None}
    if calls:
        message["tool_calls"] = calls
    finish = reply.finish or ("tool_calls" if calls else "stop")
    return _frame() | {
        "object": "chat.completion",
        "usage": _usage(reply, body),
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
    }


# ---- HTTP ----------------------------------------------------------------------------------------


def _parse_request(raw: bytes) -> Body | None:
    """The request, if it is one."""
    try:
        body = json.loads(raw)
    except ValueError:
        return None
    return body if isinstance(body, dict) and isinstance(body.get("messages"), list) else None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    owner: ScriptedServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that left; anything else is shown as usual."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.server.owner.connections += 1
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the library's name)
        pass

    def do_GET(self) -> None:
        if self.path.rstrip("/").endswith("/models"):
            model = {"id": MODEL, "object": "model", "owned_by": "coder"}
            self._json(200, {"object": "list", "data": [model]})
        else:
            self._fail(404, f"nothing at {self.path}", "not_found")

    def do_POST(self) -> None:
        owner, arrived = self.server.owner, time.monotonic()
        length = int(self.headers.get("content-length", 0))
        raw = self.rfile.read(length)
        if not self.path.partition("?")[0].endswith("/chat/completions"):
            self._fail(404, f"nothing at {self.path}", "not_found")
            return
        body = _parse_request(raw)
        if body is None:
            if len(raw) == length:  # else the client has left in the middle of it
                owner.unreadable.append(raw)
            message = "the body has to be JSON with messages"
            self._fail(400, message, "invalid_request_error")
            return
        owner.times.append(arrived)
        owner.paths.append(self.path)
        owner.heads.append({name.lower(): value for name, value in self.headers.items()})
        owner.requests.append(body)
        try:
            self._answer(owner.script(body), body)
            owner.sent.append(time.monotonic())
        except (ConnectionError, TimeoutError):
            owner.gone += 1
            self.close_connection = True

    def _answer(self, reply: Reply, body: Body) -> None:
        self.server.owner.stopping.wait(reply.hold)
        if not reply.status:
            self._end("reset")
        elif reply.chunks is not None:
            self._stream(reply, reply.chunks)
        elif reply.status != 200:
            error = {"message": reply.text, "code": reply.status}
            self._json(reply.status, {"error": error}, reply.headers)
        elif body.get("stream"):
            self._stream(reply, list(events(reply, body))[: reply.cut])
        else:
            self._json(200, completion(reply, body))

    def _stream(self, reply: Reply, chunks: Sequence[bytes]) -> None:
        """One HTTP chunk and one write each."""
        self.send_response(reply.status)
        for name, value in ({"content-type": "text/event-stream"} | reply.headers).items():
            self.send_header(name, value)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for chunk in chunks:
            if chunk:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            if reply.pace:
                self.server.owner.stopping.wait(reply.pace)
        self._end(reply.close)

    def _end(self, close: str) -> None:
        if close == "eof":
            self.wfile.write(b"0\r\n\r\n")
            return
        self.close_connection = True
        if close == "hang":  # until the client leaves, or we do
            self.connection.settimeout(0.05)
            while not self.server.owner.stopping.is_set():
                try:
                    if not self.connection.recv(1):
                        raise ConnectionResetError
                except TimeoutError:
                    continue
        reset = struct.pack("ii", 1, 0)  # instead of a proper end
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        self.connection.close()

    def _fail(self, status: int, message: str, kind: str) -> None:
        self._json(status, {"error": {"message": message, "type": kind}})

    def _json(self, status: int, value: Body, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        ours = {"content-type": "application/json", "content-length": str(len(data))}
        self.send_response(status)
        for name, text in {**ours, **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(data)
