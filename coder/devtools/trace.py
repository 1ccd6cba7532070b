"""Trace: a file that keeps all of a run: bytes sent and received, times, events.

    with Trace("run.jsonl") as trace:
        trace.attach(model)
        for event in trace.watch(run_loop(messages, model, tools, hooks=trace.hooks(hooks))):
            ...

One JSON object a line, {"t": seconds since the trace began, "type": ...}. The type is that of an
event, with the event's fields, or one of these:

    trace        the first line: {"format": 2, "started": seconds since the epoch}
    model        {"name", "address", "context_window", "profile", "extra_body", "budgets"}
    request      {"n": its number, "bytes", "body": the JSON as it was sent}
    response     {"n", "status", "headers"}, unless the request was refused
    chunk        {"n", "text"}, bytes that are no UTF-8 as lone surrogates (surrogateescape)
    response_end {"n", "error": null or the fields of the ModelError, "body" of a refusal};
                 missing if the request was given up
    reply        {"to": the type of the event that asked, "answer", "seconds": how long it took}

Deltas are not recorded, since the chunks hold them. Keys are written as ***, from when they are
known; one that a model writes in pieces is in the chunks in pieces.
"""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from coder import events
from coder.ai import ChatModel, Model
from coder.events import Events, Notice, Returning
from coder.hooks import FunctionHooks, HookChain, Hooks
from coder.permissions.redact import Redactor
from coder.providers.sse import Response
from coder.providers.text import shown_url
from coder.tools.secrets import header_secret
from coder.types import ModelError, RunResult

FORMAT = 2


class Trace:
    """Appends to a file that only its owner can read. A line is one write, so a process that is
    killed leaves whole lines.

    Raises OSError if the file cannot be written, ValueError if it holds something else. What
    fails later ends the trace and not the run: `watch` yields one notice.
    """

    def __init__(self, path: str | Path) -> None:
        self._failure = ""  # not reported yet
        self._redactor = Redactor(instead="***")
        # Takes a key, which is *** in the file from then on, also inside JSON
        self.hide = self._redactor.hide
        self._numbers = count(1)  # of the requests
        self._start = time.monotonic()
        self._file = _open(path)
        self.record("trace", format=FORMAT, started=time.time())

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write no more."""
        file = self._file
        self._file = -1
        if file >= 0:
            os.close(file)

    def attach(self, model: Model) -> Model:
        """Record what this model sends and receives, from now on.

        Returns the model to use: this one, or another one for it, if it is no ChatModel.
        """
        if not isinstance(model, ChatModel):
            from coder.devtools.traced_model import TracedModel  # late: it is rarely needed

            self.record("model", name=model.name, context_window=model.context_window)
            return TracedModel(model, self)
        endpoint = model.endpoint
        with suppress(ModelError):  # a key that no header can carry is never sent
            self.hide(endpoint.key_for(None))
        for name, value in endpoint.headers.items():
            self.hide(header_secret(name, value))
        self.record(
            "model",
            name=model.name,
            address=shown_url(endpoint.address),
            context_window=model.context_window,
            profile=dataclasses.asdict(model.profile),
            extra_body=model.extra_body,
            budgets=dict(model.reasoning_budgets),
        )
        model.tap = self.tap
        return model

    def watch(self, run: Events[RunResult]) -> Events[RunResult]:
        """The same run; its events are recorded before they are passed on, replies afterwards."""
        with Returning(run) as traced:
            for event in traced:
                inner = events.innermost(event)
                if not isinstance(inner, events.DELTAS):
                    self.record(**event.to_dict())
                passed = time.monotonic()
                yield event
                if events.is_question(event):
                    answer = getattr(inner, "answer", getattr(inner, "allowed", None))
                    seconds = round(time.monotonic() - passed, 6)
                    self.record(
                        "reply",
                        to=inner.type,
                        answer=answer,
                        seconds=seconds,
                    )
                if self._failure:
                    yield Notice(f"The trace ends here: {self._failure}.")
                    self._failure = ""
        return traced.value

    def hooks(self, hooks: Hooks) -> HookChain:
        """The same hooks; the keys that they give a request are hidden from then on."""
        hiding = FunctionHooks(before_llm_call=lambda request: self.hide(request.api_key))
        return HookChain(hiding, hooks, hiding)

    def tap(self, sent: bytes) -> TracedAnswer:
        """The `tap` of a ChatModel."""
        number = next(self._numbers)
        self._write("request", b'"n": %d, "bytes": %d, "body": %s' % (number, len(sent), sent))
        return TracedAnswer(self, number)

    def record(self, type: str, **fields: Any) -> None:  # noqa: A002 (the name in the file)
        """Append one line."""
        try:
            text = json.dumps(
                fields,
                ensure_ascii=False,
                default=repr,
                skipkeys=True,
            )
        except (ValueError, RecursionError) as error:  # the details of a tool hold anything
            text = json.dumps({"unwritable": str(error)})
        self._write(type, text[1:-1].encode("utf-8", "backslashreplace"))  # surrogates as \udc80

    def _write(self, kind: str, fields: bytes) -> None:
        if self._file < 0:
            return
        seconds = round(time.monotonic() - self._start, 6)
        head = json.dumps({"type": kind, "t": seconds})[:-1].encode()
        line = head + (b", " if fields else b"") + self._redactor.data(fields) + b"}\n"
        try:
            os.write(self._file, line)
        except OSError as error:
            self._failure = error.strerror or str(error)
            self.close()


class TracedAnswer:
    """Records the answer to the request of this number."""

    def __init__(self, trace: Trace, number: int) -> None:
        self.trace = trace
        self.number = number

    def head(self, response: Response) -> None:
        headers = {k: v for k, v in response.headers.items() if "cookie" not in k.lower()}
        self.trace.record(
            "response",
            n=self.number,
            status=response.status_code,
            headers=headers,
        )

    def piece(self, data: bytes) -> None:
        self.trace.record(
            "chunk",
            n=self.number,
            text=data.decode("utf-8", "surrogateescape"),
        )

    def ended(self, error: ModelError | None) -> None:
        if error is None:
            self.trace.record("response_end", n=self.number, error=None)
            return
        facts = {field.name: getattr(error, field.name) for field in dataclasses.fields(error)}
        body = facts.pop("body").decode("utf-8", "surrogateescape")
        self.trace.record(
            "response_end",
            n=self.number,
            error=facts,
            body=body,
        )


def _open(path: str | Path) -> int:
    """A descriptor to append to. What a kill has left of a last line is ended."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        facts = os.fstat(file)
        if facts.st_size:
            if not os.pread(file, 100, 0).startswith(b'{"type": "trace"'):
                raise ValueError("it holds something else than a trace")
            if os.pread(file, 1, facts.st_size - 1) != b"\n":
                os.write(file, b"\n")
        if stat.S_ISREG(facts.st_mode):
            os.fchmod(file, 0o600)
    except BaseException:
        os.close(file)
        raise
    return file
