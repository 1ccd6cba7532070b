"""ScriptedModel: a model without a server, which answers from a script or from a recorded trace.

    Agent(ScriptedModel([Reply(calls=[("ls", {})]), Reply("Done.")]), tools=[ls])
    Agent(ScriptedModel.from_trace("run.jsonl"), tools=[ls])

It is a ChatModel whose bytes come from here, so the request's body and the reading of the answer
are the same code. scripted.py has a real server.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from coder.abort import Abort
from coder.ai import ChatModel
from coder.devtools.scripted import MODEL, Body, Reply, events
from coder.devtools.trace_file import Exchange, read, understood
from coder.providers.errors import classify
from coder.providers.http import Endpoint
from coder.types import ModelError

OPTIONS = ("context_window", "profile", "extra_body", "budgets")  # of a ChatModel, in a trace


class ScriptedModel(ChatModel):
    """A model with given replies. `requests` are the bodies it was sent; one request too many is a
    ModelError. `options` are ChatModel's."""

    def __init__(self, replies: Sequence[Reply], name: str = MODEL, **options: Any) -> None:
        left = iter(replies)
        self._set_up(lambda body: _answer_reply(next(left, None), body), name, options)

    @classmethod
    def from_trace(cls, path: str | Path, *, strict: bool = False) -> ScriptedModel:
        """The model of a trace: each answer is the recorded one, byte for byte and at once, each
        failure too. `strict`: a request that differs from the recorded one, other than in the id of
        the session, is a ModelError that names the first difference. Raises OSError, or TraceError
        where the file is no trace."""
        recording = read(path)
        left = iter(recording.exchanges)
        with understood():
            lines = [record for records in recording.traces for record in records]
            first = next((record for record in lines if record["type"] == "model"), {"name": MODEL})
            options = {name: first[name] for name in OPTIONS if name in first}
            model = cls.__new__(cls)
            model._set_up(
                lambda body: _answer_exchange(next(left, None), body, strict),
                first["name"],
                options,
            )
        return model

    def _set_up(
        self, answer: Callable[[Body], Answer], name: str, options: Mapping[str, Any]
    ) -> None:
        address = (
            f"script:{secrets.token_hex(4)}"  # its own, since what is learnt is kept by address
        )
        super().__init__(name, base_url=address, **options)
        self.requests: list[Body] = []
        self.endpoint = _Player(answer, self.requests)


@dataclass
class Answer:
    """An answer as the HTTP library gives it, and an error instead of it or behind it."""

    chunks: Sequence[bytes] = ()
    headers: dict[str, str] = field(default_factory=dict)
    error: ModelError | None = None
    hold: float = 0.0
    pace: float = 0.0
    hang: bool = False  # until the abort, behind the chunks
    status_code: int = 200
    url: str = "script"
    abort: Abort = field(default_factory=Abort)

    def pieces(self) -> Iterator[bytes]:
        for chunk in self.chunks:
            yield chunk
            self.abort.wait(self.pace)
        self.abort.wait(math.inf if self.hang else 0.0)
        if self.error:
            raise self.error

    def within(self, seconds: float) -> None:
        """There are no deadlines."""


class _Player(Endpoint):
    """An endpoint whose answers come from a function of the body."""

    def __init__(self, answer: Callable[[Body], Answer], requests: list[Body]) -> None:
        super().__init__("script:", None, {})
        self.answer, self.requests = answer, requests

    @contextmanager
    def post(self, data: bytes, api_key: str | None, abort: Abort, seconds: float) -> Iterator[Any]:
        body = json.loads(data)
        self.requests.append(body)
        answer = self.answer(body)
        answer.abort = abort
        abort.wait(answer.hold)
        if answer.error and not answer.chunks:
            raise answer.error
        yield answer


def _answer_reply(reply: Reply | None, body: Body) -> Answer:
    """A reply in the place of a response."""
    if reply is None:
        raise ModelError("protocol", "the script is at its end, and the run asks for more")
    if reply.status not in (0, 200):
        said = {"error": {"message": reply.text, "code": reply.status}}
        return Answer(error=classify(reply.status, said, reply.headers), hold=reply.hold)
    broke = reply.close == "reset" or not reply.status
    error = ModelError("network", "the connection broke", retryable=True) if broke else None
    chunks = list(events(reply, body))[: reply.cut] if reply.chunks is None else reply.chunks
    headers = {"content-type": "text/event-stream"} | reply.headers
    return Answer(
        chunks if reply.status else (),
        headers,
        error,
        reply.hold,
        reply.pace,
        reply.close == "hang",
    )


def _answer_exchange(exchange: Exchange | None, body: Body, strict: bool) -> Answer:
    """A recorded answer in the place of a response."""
    if exchange is None:
        raise ModelError("protocol", "the trace is at its end, and the run asks for more")
    if strict and (found := difference(_without_session(body), _without_session(exchange.body))):
        raise ModelError("protocol", f"request {exchange.number} is not the recorded one: {found}")
    error = ModelError(**exchange.error) if exchange.error else None
    if exchange.ended is None:
        error = ModelError("incomplete", "the trace ends in the middle of this answer")
    return Answer([data for _, data in exchange.chunks], exchange.headers, error)


def _without_session(body: Body) -> Body:
    return {name: value for name, value in body.items() if name != "prompt_cache_key"}


def difference(asked: Any, recorded: Any, place: str = "") -> str:
    """Where two JSON values differ first, and how; "" where they do not. A text of the trace with
    *** in it, where a key was, matches any text."""
    if isinstance(asked, dict) and isinstance(recorded, dict):
        pairs = [
            (f"{place}.{name}".removeprefix("."), asked.get(name), recorded.get(name))
            for name in {**recorded, **asked}
        ]
    elif isinstance(asked, list) and isinstance(recorded, list):
        both = zip_longest(asked, recorded)
        pairs = [(f"{place}[{index}]", one, other) for index, (one, other) in enumerate(both)]
    elif asked == recorded or (isinstance(asked, str) and "***" in str(recorded)):
        return ""
    else:
        return f"{place} is {repr(asked)[:80]} and was {repr(recorded)[:80]}"
    return next((found for where, a, b in pairs if (found := difference(a, b, where))), "")
