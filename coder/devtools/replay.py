"""ScriptedModel: a model without a server, which answers from a script or from a recorded trace.

    Agent(ScriptedModel([Reply(calls=[("ls", {})]), Reply("Done.")]), tools=[ls])
    Agent(ScriptedModel.from_trace("run.jsonl"), tools=[ls])

It is a ChatModel whose bytes come from here, so the request's body and the reading of the answer
are the same code.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from coder.abort import Abort
from coder.ai import ChatModel
from coder.devtools.scripted import MODEL, Body, Reply
from coder.devtools.trace_report import Exchange, read
from coder.providers.errors import classify
from coder.providers.http import Endpoint
from coder.types import ModelError

OPTIONS = ("name", "context_window", "profile", "extra_body", "budgets")  # of a model, in a trace
Played = tuple[Reply, ModelError | None]  # an answer, and the error in its place or behind it


class ScriptedModel(ChatModel):
    """A model with given replies. `requests` are the bodies it was sent; one request too many is a
    ModelError. `options` are ChatModel's."""

    def __init__(self, replies: Iterable[Reply], name: str = MODEL, **options: Any) -> None:
        address = f"script:{secrets.token_hex(4)}"  # its own: what is learnt is kept by address
        super().__init__(name, base_url=address, **options)
        self.requests: list[Body] = []
        self.endpoint = _Player([(each, _failure(each)) for each in replies], self.requests)

    @classmethod
    def from_trace(cls, path: str | Path) -> ScriptedModel:
        """The model of a trace: each answer is the recorded one, byte for byte and at once, each
        failure too. Raises OSError, or TraceError where the file is no trace."""
        recording = read(path)
        options = {name: recording.model[name] for name in OPTIONS if name in recording.model}
        model = cls([], **options)
        model.endpoint = _Player(map(_recorded, recording.exchanges), model.requests)
        return model


def _failure(reply: Reply) -> ModelError | None:
    if reply.status not in (0, 200):
        return classify(reply.status, reply.error(), reply.headers)
    broke = reply.close == "reset" or not reply.status
    return ModelError("network", "the connection broke", retryable=True) if broke else None


def _recorded(exchange: Exchange) -> Played:
    chunks = [each["text"].encode("utf-8", "surrogateescape") for each in exchange.of("chunk")]
    headers = next((each["headers"] for each in exchange.of("response")), dict[str, str]())
    missing = {"kind": "incomplete", "message": "the trace ends in the middle of this answer"}
    error = next((each["error"] for each in exchange.of("response_end")), missing)
    return Reply(chunks=chunks, headers=headers), ModelError(**error) if error else None


class _Player(Endpoint):
    """An endpoint that plays one answer for each request."""

    def __init__(self, answers: Iterable[Played], requests: list[Body]) -> None:
        super().__init__("script:", None, {})
        self.answers, self.requests = iter(answers), requests

    @contextmanager
    def post(self, data: bytes, api_key: str | None, abort: Abort, seconds: float) -> Iterator[Any]:
        body = json.loads(data)
        self.requests.append(body)
        end = ModelError("protocol", "the script is at its end, and the run asks for more")
        reply, error = next(self.answers, (Reply(status=0), end))
        abort.wait(reply.hold)
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
        no_deadline = {"within": lambda seconds: None, "status_code": 200, "url": "script"}
        yield SimpleNamespace(headers=headers, pieces=pieces, **no_deadline)
