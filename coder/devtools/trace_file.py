"""Read a trace: lines -> runs -> steps, and the figures of each step.

    for run in read("run.jsonl").runs:
        for step in run.steps:
            print(step.number, step.figures.seconds["model"])

trace.py says what the lines are.
"""

from __future__ import annotations

import base64
import errno
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from coder.types import CoderError, Message

FORMAT = 1  # of the lines; trace.py writes it
KINDS = ("waits", "hooks", "model", "tools", "own")  # of time; the first has an overlap
BROKEN = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError)

Record = dict[str, Any]
Span = tuple[str, float, float]  # what took time, by kind, from when to when


class TraceError(CoderError):
    """The file is no trace, or a broken one."""


# ---- what a trace holds --------------------------------------------------------------------------


@dataclass
class Exchange:
    """One request and its answer. Times are seconds since the trace began; `ended` is None where
    the request was given up.

    `nested`: made while a tool ran, so by a sub-agent. `previous`: the messages of the request
    before it in the main conversation.
    """

    number: int
    sent: float
    body: Record
    size: int
    nested: bool = False
    previous: list[Message] = field(default_factory=list)
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    error: Record | None = None
    ended: float | None = None

    @property
    def messages(self) -> list[Message]:
        return list(self.body["messages"])

    @cached_property
    def kept(self) -> int:
        """How many messages of the previous request begin this one unchanged."""
        return _common_length(self.previous, self.messages)

    @cached_property
    def same(self) -> float | None:
        """The share of the previous request's messages that begins this one, in bytes: what a
        provider's cache can hold. None where there was no request before."""
        if not self.previous:
            return None
        old, new = (json.dumps(messages)[:-1] for messages in (self.previous, self.messages))
        return _common_length(old, new) / len(old)

    @property
    def first(self) -> float | None:
        """Seconds to the first byte of the body."""
        return self.chunks[0][0] - self.sent if self.chunks else None


def _common_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many items, or characters, begin both."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b)))


@dataclass(frozen=True)
class Figures:
    """A step in numbers, or a whole run. `seconds` by kind add up to `wall`; "own" is this
    program's own work."""

    seconds: dict[str, float]
    wall: float
    messages: int = 0  # of the last request
    new: int = 0  # since the step before
    size: int = 0  # bytes of the requests
    same: float | None = None
    input: int = 0
    cached: int = 0
    output: int = 0
    first: float | None = None
    retries: int = 0
    finish: str = ""
    called: list[str] = field(default_factory=list)


SUMS = ("new", "size", "input", "cached", "output", "retries")  # of the steps, for a run


@dataclass
class Step:
    """From its step_start to the next one's, with all requests made meanwhile."""

    records: list[Record]
    exchanges: list[Exchange]

    @property
    def number(self) -> int:
        return int(self.records[0]["step"])

    def of(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["type"] == kind]

    @cached_property
    def figures(self) -> Figures:
        start, end = self.records[0], (self.of("step_end") or self.records)[-1]
        asked = [each for each in self.exchanges if not each.nested]  # the attempts of the run
        last, usage = asked[-1] if asked else None, end.get("usage") or {}
        return Figures(
            messages=len(last.messages) if last else 0,
            new=len(last.messages) - len(asked[0].previous) if last else 0,
            size=sum(each.size for each in asked),
            same=min((each.same for each in asked if each.same is not None), default=None),
            **{name: int(usage.get(name, 0)) for name in ("input", "cached", "output")},
            first=last.first if last else None,
            seconds=shares(list(_spans(self, asked, end["t"])), start["t"], end["t"]),
            wall=end["t"] - start["t"],
            retries=len(self.of("retry")),
            finish=str(end.get("finish_reason", "")),
            called=[str(record["name"]) for record in self.of("tool_start")],
        )


@dataclass
class Run:
    """One run: its lines, its steps, and the model's line that stood before it."""

    records: list[Record]
    steps: list[Step]
    model: Record

    def of(self, kind: str) -> Record | None:
        return next((record for record in self.records if record["type"] == kind), None)

    @property
    def figures(self) -> Figures:
        """The sums of the steps; what cannot be summed is the last step's, or nothing."""
        each = [step.figures for step in self.steps]
        wall = (self.of("run_end") or self.records[-1])["t"] - self.records[0]["t"]
        seconds = {kind: sum(one.seconds[kind] for one in each) for kind in KINDS}
        seconds["own"] += max(0.0, wall - sum(one.wall for one in each))
        sums: dict[str, Any] = {name: sum(getattr(one, name) for one in each) for name in SUMS}
        called = [name for one in each for name in one.called]
        return Figures(seconds, wall, each[-1].messages if each else 0, called=called, **sums)

    @property
    def why(self) -> str:
        """Why it stopped, in a line."""
        end, raised = self.of("run_end"), self.of("raised")
        if not end:
            return f"ended by {raised['error']}" if raised else "no end: killed, or still at work"
        error = end["error"]
        text = f"{error['kind']}: {error['message']}" if error else end["text"]
        return f"{end['stop_reason']}: {text}"


@dataclass
class Recording:
    """A file's traces, one after the other. `cut`: a line was cut by a kill. Properties raise
    TraceError."""

    traces: list[list[Record]]
    cut: bool

    @cached_property
    def runs(self) -> list[Run]:
        with understood():
            return [run for records in self.traces for run in _runs(records)]

    @cached_property
    def exchanges(self) -> list[Exchange]:
        with understood():
            return [each for records in self.traces for each in _exchanges(records).values()]


@contextmanager
def understood() -> Iterator[None]:
    """Raise TraceError where what is read inside is not as trace.py writes it."""
    try:
        yield
    except BROKEN as error:
        what = f"{type(error).__name__}: {error}"
        raise TraceError(f"it holds what is no line of a trace ({what})"[:200]) from error


# ---- reading -------------------------------------------------------------------------------------


def open_file(path: str | Path, flags: int) -> int:
    """A descriptor; a new file is private. Raises OSError, also for a pipe without a reader."""
    try:
        file = os.open(path, flags | os.O_NONBLOCK, 0o600)
    except OSError as error:
        why = "no process reads this pipe" if error.errno == errno.ENXIO else error.strerror
        raise OSError(error.errno, why, str(path)) from None
    os.set_blocking(file, True)
    return file


def read(path: str | Path) -> Recording:
    """A trace's lines, by the process that wrote them. Raises OSError or TraceError."""
    with open(path, "rb", opener=open_file) as file:
        lines = file.read().split(b"\n")
    records = [_parse_line(line) for line in lines]
    traces: dict[str, list[Record]] = {}
    cut = False
    for number, (record, behind) in enumerate(zip(records, [*records[1:], None]), 1):
        if record and record["type"] == "trace":
            if record.get("format") != FORMAT:
                raise TraceError(f"it is a trace of another format: {record.get('format')!r}")
            traces[record["of"]] = []
        if record and record["of"] in traces:
            traces[record["of"]].append(record)
        elif not record and (number == len(lines) or (behind and behind["type"] == "trace")):
            cut = cut or bool(lines[number - 1])
        else:
            raise TraceError(f"line {number} is broken" if traces else "it is no trace")
    if not traces:
        raise TraceError("it is no trace")
    return Recording(list(traces.values()), cut)


def _parse_line(line: bytes) -> Record | None:
    try:
        value: Record = json.loads(line)
        return value | {"t": float(value["t"]), "type": str(value["type"]), "of": str(value["of"])}
    except BROKEN:
        return None


def _runs(records: list[Record]) -> Iterator[Run]:
    exchanges = _exchanges(records)
    for group in _groups(records, "run_start"):
        models = [
            each for each in records if each["type"] == "model" and each["t"] <= group[0]["t"]
        ]
        steps = [
            Step(part, [exchanges[each["n"]] for each in part if each["type"] == "request"])
            for part in _groups(group, "step_start")
        ]
        yield Run(group, steps, models[-1] if models else Record())


def _groups(records: list[Record], kind: str) -> Iterator[list[Record]]:
    """Each line of this type, with all lines from it to the next one."""
    starts = [place for place, record in enumerate(records) if record["type"] == kind]
    for start, end in pairwise([*starts, len(records)]):
        yield records[start:end]


def _exchanges(records: list[Record]) -> dict[int, Exchange]:
    """The requests of one trace, by number."""
    found: dict[int, Exchange] = {}
    running = 0  # tools
    previous: list[Message] = []
    for record in records:
        kind = record["type"]
        running += (kind == "tool_start") - (kind == "tool_end")
        exchange = found.get(record.get("n", 0))
        if kind == "request":
            number, size = int(record["n"]), int(record["bytes"])
            made = Exchange(number, record["t"], record["body"], size, nested=running > 0)
            if not made.nested:
                made.previous, previous = previous, made.messages
            found[number] = made
        elif exchange and kind == "response":
            exchange.status, exchange.headers = record["status"], record["headers"]
        elif exchange and kind == "chunk":
            exchange.chunks.append((record["t"], _bytes_of(record)))
        elif exchange and kind == "response_end":
            exchange.ended, exchange.error = record["t"], record["error"]
    return found


def _bytes_of(chunk: Record) -> bytes:
    if "base64" in chunk:
        return base64.b64decode(chunk["base64"])
    return str(chunk["text"]).encode("utf-8", "surrogatepass")


# ---- time ----------------------------------------------------------------------------------------


def _spans(step: Step, asked: list[Exchange], end: float) -> Iterator[Span]:
    """What took time in a step, which ends at `end`."""
    for exchange in asked:
        last = exchange.chunks[-1][0] if exchange.chunks else end
        yield "model", exchange.sent, exchange.ended or last
    for kind, records in (("hooks", step.of("hook")), ("waits", step.of("reply"))):
        for record in records:
            yield kind, record["t"] - record["seconds"], record["t"]
    busy = [record["t"] for record in step.of("status") if record["status"] == "busy"]
    for record in step.of("retry"):
        yield "waits", record["t"], next((time for time in busy if time >= record["t"]), end)
    ends = {record.get("id"): record["t"] for record in step.of("tool_end")}  # or unwritable
    for record in step.of("tool_start"):
        yield "tools", record["t"], ends.get(record["id"], end)


def shares(spans: list[Span], start: float, end: float) -> dict[str, float]:
    """The seconds from `start` to `end`, each moment given to one kind."""
    inner = {edge for span in spans for edge in span[1:] if start < edge < end}
    seconds = dict.fromkeys(KINDS, 0.0)
    for left, right in pairwise(sorted({start, end, *inner})):
        covering = {kind for kind, begin, stop in spans if begin <= left and stop >= right}
        seconds[next((kind for kind in KINDS if kind in covering), "own")] += right - left
    return seconds
