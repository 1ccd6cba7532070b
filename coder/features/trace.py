"""Trace: a file that keeps all of a run: what is sent and received byte for byte and when, the events, the time of the hooks.

    with Trace("run.jsonl") as trace:
        trace.attach(model)
        for event in trace.watch(run_loop(messages, model, tools, hooks=trace.hooks(hooks))):
            ...

One JSON object a line, {"t": seconds since the trace began, "of": which trace, "type": ...}. The type is that of an event,
with the event's fields, or one of these:

    trace        the first line: {"format": 1, "started": seconds since the epoch}
    model        {"name", "address", "context_window", "profile", "extra_body", "budgets"}
    request      {"n": its number, "bytes", "body": the JSON as it was sent}
    response     {"n", "status", "headers"}, where one came that is no refusal
    chunk        {"n", "text"}, or "base64" of what is no UTF-8
    response_end {"n", "error": null or the facts of the ModelError, "body" of a refusal}; missing where the request was given up
    hook         {"hook", "place", "seconds"}: its own time
    reply        {"to": the type of the event that asked, "answer", "seconds": how long it took}
    raised       {"error"}: what ended the run besides its own end

Deltas are not recorded: the chunks hold them. Keys of more than seven characters are written as ***, from when they are known.

What it leaves out: reading a trace (trace_file.py), showing one (trace_page.py, terminal/trace_table.py), running it again
(replay.py). A key that a model writes in pieces stands in the chunks in pieces.
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
from collections.abc import Callable, Generator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from coder.address import shown_url
from coder.ai import ChatModel
from coder.features.hooks import NAMES, HookChain, has
from coder.features.redact import Redactor
from coder.features.trace_file import FORMAT
from coder.types import Event, Hooks, ModelError, Nested, Notice, ReasoningDelta, Request, RunResult, TextDelta, ToolCallDelta, settle

DELTAS = (TextDelta, ReasoningDelta, ToolCallDelta)
SECRET = re.compile(r"auth|key|token|secret|cookie", re.I)  # headers of the user's whose values are not written
HEADERS = re.compile(r"content-(type|encoding|length)|date|server|via|cf-ray|retry-after.*|.*ratelimit.*|.*request-?id|.*processing-ms")
ERROR = ("kind", "message", "status", "request_id", "retryable", "retry_after", "param", "loading")
START = b'{"t": 0.0, "of": '  # how a trace begins

Run = Generator[Event, None, RunResult]


class Trace:
    """Appends to a file that only its owner can read. A line is one write, so that several processes may share a file, and a
    process that is killed leaves whole lines.

    Raises OSError where the file cannot be written, ValueError where it holds something else. What fails later ends the
    trace and not the run: `failure` says it, and `watch` tells it once.
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
        file, self._file = self._file, -1  # first, so that nobody writes to a number that is another file's by now
        if file >= 0:
            os.close(file)

    # -- where it looks

    def attach(self, model: ChatModel) -> None:
        """Record what this model sends and receives, from now on."""
        endpoint = model.endpoint
        with suppress(ModelError):  # one that no header can carry is never sent
            self.hide(endpoint.key_for(None))
        for name, value in endpoint.headers.items():
            if SECRET.search(name):
                self.hide(value)
        self.record("model", name=model.name, address=shown_url(endpoint.address or ""), context_window=model.context_window,
                    profile=dataclasses.asdict(model.profile), extra_body=model.extra_body, budgets=dict(model.budgets))
        model.tap = self.tap

    def watch(self, run: Run) -> Run:
        """The same run; its events are recorded before they are passed on, the replies to them afterwards."""
        try:
            while True:
                event = next(run)
                self.event(event)
                passed = time.monotonic()
                yield event
                self._reply(event, time.monotonic() - passed)
                if self.failure and self._file >= 0:
                    self.close()
                    yield Notice(f"The trace ends here: {self.failure}.")
        except StopIteration as end:
            result: RunResult = end.value
            return result
        except BaseException as error:  # told, and passed on
            self.record("raised", error=f"{type(error).__name__}: {error}".removesuffix(": "))
            raise
        finally:
            run.close()

    def hooks(self, hooks: Hooks) -> HookChain:
        """The same hooks, each call timed; the members of a chain one by one."""
        members = hooks.hooks if isinstance(hooks, HookChain) else [hooks]
        return HookChain(*(self.hooks(each) if isinstance(each, HookChain) else TimedHooks(each, self) for each in members))

    def hide(self, key: str | None) -> None:
        """Write *** wherever this occurs, also inside of JSON and of JSON inside of JSON, whoever wrote that."""
        self._redactor.hide(key)

    # -- what it writes

    def event(self, event: Event) -> None:
        """Record an event, unless it is a delta."""
        if isinstance(_innermost(event), DELTAS):
            return
        try:
            self.record(**event.to_dict())
        except (TypeError, ValueError, RecursionError) as error:  # a tool's details may hold anything
            self.record(event.type, unwritable=str(error))

    def _reply(self, event: Event, seconds: float) -> None:
        asked = _innermost(event)
        if hasattr(asked, "reply"):
            answer = getattr(asked, "answer", getattr(asked, "allowed", None))
            self.record("reply", to=asked.type, answer=answer, seconds=round(seconds, 6))

    def tap(self, sent: bytes) -> Callable[[Any], None]:
        """The `tap` of a ChatModel."""
        number = next(self._numbers)
        self._write("request", json.dumps({"n": number, "bytes": len(sent)})[1:-1].encode() + b', "body": ' + sent)

        def heard(got: Any) -> None:
            if isinstance(got, bytes):
                self.record("chunk", n=number, **self._chunk(got))
            elif got is None or isinstance(got, ModelError):
                refusal = {"body": got.body.decode("utf-8", "replace")} if got and got.body else {}
                self.record("response_end", n=number, error=got and {name: getattr(got, name) for name in ERROR}, **refusal)
            else:
                kept = {name: value for name, value in got.headers.items() if HEADERS.fullmatch(name.lower())}
                self.record("response", n=number, status=got.status_code, headers=kept)

        return heard

    def _chunk(self, data: bytes) -> dict[str, str]:
        try:
            return {"text": data.decode()}
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(self._redactor.data(data)).decode()}

    def record(self, type: str, **fields: Any) -> None:  # noqa: A002 (the name in the file)
        """Append one line. Raises TypeError or ValueError for what is no JSON."""
        line = json.dumps(fields, ensure_ascii=False, default=repr, skipkeys=True)[1:-1]
        self._write(type, line.encode("utf-8", "backslashreplace"))  # half a surrogate pair becomes its escape

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
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        facts = os.fstat(file)
        if stat.S_ISREG(facts.st_mode):
            _continued(file, Path(path), facts.st_size)
            os.fchmod(file, 0o600)
    except BaseException:
        os.close(file)
        raise
    return file


def _continued(file: int, path: Path, size: int) -> None:
    """A trace goes on behind a line that a kill has cut. Raises ValueError for what is none: nothing is written to it."""
    if not size:
        return
    with path.open("rb") as there:
        if there.read(len(START)) != START[:size]:
            raise ValueError("it holds something else than a trace")
        there.seek(-1, os.SEEK_END)
        if there.read(1) != b"\n":
            os.write(file, b"\n")


def _innermost(event: Event) -> Event:
    """The event of the sub-agent that a nested one is about."""
    while isinstance(event, Nested):
        event = event.event
    return event


class TimedHooks(Hooks):
    """One hook, each of its calls recorded with the time that it took itself; nothing where it does nothing."""

    def __init__(self, hook: Hooks, trace: Trace) -> None:
        self.hook, self.trace = hook, trace
        self.name = str(getattr(hook, "name", "") or type(hook).__name__)
        for name in NAMES:
            if has(hook, name):
                setattr(self, name, self._timed(name))

    def _timed(self, name: str) -> Callable[..., Generator[Event, None, Any]]:
        def call(*args: Any) -> Generator[Event, None, Any]:
            own, started = 0.0, time.monotonic()
            work = self._called(name, args)
            try:
                while True:
                    event = next(work)
                    own += time.monotonic() - started
                    try:
                        yield event
                    finally:
                        started = time.monotonic()
            except StopIteration as end:
                self._learn(name, args, end.value)
                return end.value
            finally:
                self.trace.record("hook", hook=self.name, place=name, seconds=round(own + time.monotonic() - started, 6))
                work.close()

        return call

    def _called(self, name: str, args: tuple[Any, ...]) -> Generator[Event, None, Any]:
        return (yield from settle(getattr(self.hook, name)(*args)))

    def _learn(self, name: str, args: tuple[Any, ...], value: Any) -> None:
        """Keys that a hook gives are not written."""
        if name == "get_api_key":
            self.trace.hide(value)
        elif args and isinstance(args[0], Request):
            self.trace.hide(args[0].api_key)
