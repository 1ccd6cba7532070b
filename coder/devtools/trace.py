"""Trace: a file that keeps all of a run: bytes sent and received, times, events, the time of hooks.

    with Trace("run.jsonl") as trace:
        trace.attach(model)
        for event in trace.watch(run_loop(messages, model, tools, hooks=trace.hooks(hooks))):
            ...

One JSON object a line, {"t": seconds since the trace began, "of": which trace, "type": ...}. The
type is that of an event, with the event's fields, or one of these:

    trace        the first line: {"format": 1, "started": seconds since the epoch}
    model        {"name", "address", "context_window", "profile", "extra_body", "budgets"}
    request      {"n": its number, "bytes", "body": the JSON as it was sent}
    response     {"n", "status", "headers"}, unless the request was refused
    chunk        {"n", "text"}, or "base64" of what is no UTF-8
    response_end {"n", "error": null or the fields of the ModelError, "body" of a refusal};
                 missing where the request was given up
    hook         {"hook", "place", "seconds"}: its own time
    reply        {"to": the type of the event that asked, "answer", "seconds": how long it took}
    raised       {"error"}: the exception that ended the run

Deltas are not recorded, since the chunks hold them. Keys are written as ***, from when they are
known; one that a model writes in pieces stands in the chunks in pieces.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from coder.ai import ChatModel
from coder.devtools.trace_file import FORMAT, open_file
from coder.events import (
    Event,
    Events,
    Notice,
    ReasoningDelta,
    Returning,
    TextDelta,
    ToolCallDelta,
    innermost,
    resolve,
)
from coder.hooks import HOOK_NAMES, HookChain, Hooks, implements
from coder.permissions.redact import Redactor
from coder.providers.address import shown_url
from coder.tools.environment import header_secret
from coder.types import ModelError, Request, RunResult

DELTAS = (TextDelta, ReasoningDelta, ToolCallDelta)
HEADERS = re.compile(
    r"content-(type|encoding|length)|date|server|via|cf-ray|retry-after.*"
    r"|.*ratelimit.*|.*request-?id|.*processing-ms"
)
ERROR = ("kind", "message", "status", "request_id", "retryable", "retry_after", "param", "loading")
START = b'{"t": 0.0, "of": '  # how a trace begins

Run = Events[RunResult]


class Trace:
    """Appends to a file that only its owner can read. A line is one write, so that several
    processes may share a file, and a process that is killed leaves whole lines.

    Raises OSError where the file cannot be written, ValueError where it holds something else. What
    fails later ends the trace and not the run: `failure` says why, and `watch` yields one notice.
    """

    def __init__(self, path: str | Path) -> None:
        self.failure = ""
        self._redactor = Redactor(instead="***")
        self._numbers = count(1)  # of the requests
        self._id = secrets.token_hex(4)
        self._start = time.monotonic()
        self._file = _opened(path)
        self.record("trace", format=FORMAT, started=time.time())

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write no more."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    # -- where it looks

    def attach(self, model: ChatModel) -> None:
        """Record what this model sends and receives, from now on."""
        endpoint = model.endpoint
        with suppress(ModelError):  # one that no header can carry is never sent
            self.hide(endpoint.key_for(None))
        for name, value in endpoint.headers.items():
            self.hide(header_secret(name, value))
        self.record(
            "model",
            name=model.name,
            address=shown_url(endpoint.address or ""),
            context_window=model.context_window,
            profile=dataclasses.asdict(model.profile),
            extra_body=model.extra_body,
            budgets=dict(model.budgets),
        )
        model.tap = self.tap

    def watch(self, run: Run) -> Run:
        """The same run; its events are recorded before they are passed on, replies afterwards."""
        try:
            with Returning(run) as events:
                for event in events:
                    self.event(event)
                    passed = time.monotonic()
                    yield event
                    self._reply(event, time.monotonic() - passed)
                    if self.failure and self._file >= 0:
                        self.close()
                        yield Notice(f"The trace ends here: {self.failure}.")
            return events.value
        except BaseException as error:
            self.record("raised", error=f"{type(error).__name__}: {error}".removesuffix(": "))
            raise

    def hooks(self, hooks: Hooks) -> HookChain:
        """The same hooks, each call timed; the members of a chain one by one."""
        if isinstance(hooks, HookChain):
            return HookChain(*map(self.hooks, hooks.hooks))
        return HookChain(TimedHooks(hooks, self))

    def hide(self, key: str | None) -> None:
        """Write *** wherever this key occurs, also inside JSON."""
        self._redactor.hide(key)

    # -- what it writes

    def event(self, event: Event) -> None:
        """Record an event, unless it is a delta."""
        if isinstance(innermost(event), DELTAS):
            return
        try:
            self.record(**event.to_dict())
        except (TypeError, ValueError, RecursionError) as error:  # a tool's details hold anything
            self.record(event.type, unwritable=str(error))

    def _reply(self, event: Event, seconds: float) -> None:
        asked = innermost(event)
        if hasattr(asked, "reply"):
            answer = getattr(asked, "answer", getattr(asked, "allowed", None))
            self.record("reply", to=asked.type, answer=answer, seconds=round(seconds, 6))

    def tap(self, sent: bytes) -> Callable[[Any], None]:
        """The `tap` of a ChatModel."""
        number = next(self._numbers)
        head = json.dumps({"n": number, "bytes": len(sent)})[1:-1].encode()
        self._write("request", head + b', "body": ' + sent)

        def receive(got: Any) -> None:
            if isinstance(got, bytes):
                self.record("chunk", n=number, **self._chunk(got))
            elif got is None:
                self.record("response_end", n=number, error=None)
            elif isinstance(got, ModelError):
                body = {"body": got.body.decode("utf-8", "replace")} if got.body else {}
                fields = {name: getattr(got, name) for name in ERROR}
                self.record("response_end", n=number, error=fields, **body)
            else:
                headers = {k: v for k, v in got.headers.items() if HEADERS.fullmatch(k.lower())}
                self.record("response", n=number, status=got.status_code, headers=headers)

        return receive

    def _chunk(self, data: bytes) -> dict[str, str]:
        try:
            return {"text": data.decode()}
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(self._redactor.data(data)).decode()}

    def record(self, type: str, **fields: Any) -> None:  # noqa: A002 (the name in the file)
        """Append one line. Raises TypeError or ValueError for what is no JSON."""
        line = json.dumps(fields, ensure_ascii=False, default=repr, skipkeys=True)[1:-1]
        self._write(type, line.encode("utf-8", "backslashreplace"))  # half a surrogate pair

    def _write(self, kind: str, fields: bytes) -> None:
        if self._file < 0 or self.failure:
            return
        seconds = round(time.monotonic() - self._start, 6) if kind != "trace" else 0.0
        head = json.dumps({"t": seconds, "of": self._id, "type": kind})[:-1].encode()
        line = head + (b", " if fields else b"") + self._redactor.data(fields) + b"}\n"
        try:
            if os.write(self._file, line) < len(line):
                self.failure = "the disk is full"
        except OSError as error:
            self.failure = error.strerror or str(error)


def _opened(path: str | Path) -> int:
    """A file to append to: a new one, a trace, or no regular file at all."""
    file = open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        facts = os.fstat(file)
        if stat.S_ISREG(facts.st_mode):
            if facts.st_size:
                _end_line(file, Path(path), facts.st_size)
            os.fchmod(file, 0o600)
    except BaseException:
        os.close(file)
        raise
    return file


def _end_line(file: int, path: Path, size: int) -> None:
    """End a line of a trace that a kill has cut. Raises ValueError for a file that is no trace."""
    with path.open("rb") as there:
        if there.read(len(START)) != START[:size]:
            raise ValueError("it holds something else than a trace")
        there.seek(-1, os.SEEK_END)
        if there.read(1) != b"\n":
            os.write(file, b"\n")


class TimedHooks(Hooks):
    """One hook, each of its calls recorded with its own time, without that of its consumers."""

    def __init__(self, hook: Hooks, trace: Trace) -> None:
        self.hook, self.trace = hook, trace
        self.name = str(getattr(hook, "name", "") or type(hook).__name__)
        for name in HOOK_NAMES:
            if implements(hook, name):
                setattr(self, name, partial(self._timed, name))

    def _timed(self, name: str, *args: Any) -> Events[Any]:
        own, started = 0.0, time.monotonic()
        try:
            with Returning(resolve(getattr(self.hook, name)(*args))) as work:
                for event in work:
                    own += time.monotonic() - started
                    yield event
                    started = time.monotonic()
        finally:
            seconds = round(own + time.monotonic() - started, 6)
            self.trace.record("hook", hook=self.name, place=name, seconds=seconds)
        if name == "get_api_key":
            self.trace.hide(work.value)
        elif args and isinstance(args[0], Request):
            self.trace.hide(args[0].api_key)
        return work.value
