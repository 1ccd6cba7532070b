"""Reading a trace: lines -> runs -> steps, and the figures of each step.

    for run in read("run.jsonl").runs:
        for step in run.steps:
            print(step.number, step.figures.seconds["model"])

trace.py tells what the lines are.
"""

from __future__ import annotations

import base64
import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, Literal

from coder.types import CoderError, Message

FORMAT = 1  # of the lines; trace.py writes it
Record = dict[str, Any]
BROKEN = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError)


class TraceError(CoderError):
    """The file is no trace, or a broken one."""


# ---- figures of a step

Kind = Literal["waits", "hooks", "model", "tools", "own"]
KINDS: tuple[Kind, ...] = ("waits", "hooks", "model", "tools", "own")  # the first has an overlap


@dataclass(frozen=True)
class Span:
    """What took time, from when to when."""

    kind: Kind
    start: float
    end: float
    title: str


@dataclass(frozen=True)
class Figures:
    """A step in numbers, or a whole run. `seconds` by kind add up to `wall`; "own" is this
    program's own work."""

    seconds: dict[Kind, float]
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


def shares(spans: list[Span], start: float, end: float) -> dict[Kind, float]:
    """The seconds from `start` to `end`, each moment given to one kind."""
    inner = {edge for span in spans for edge in (span.start, span.end) if start < edge < end}
    seconds = dict.fromkeys(KINDS, 0.0)
    for left, right in pairwise(sorted({start, end, *inner})):
        covering = {span.kind for span in spans if span.start <= left and span.end >= right}
        seconds[next((kind for kind in KINDS if kind in covering), "own")] += right - left
    return seconds


# What the columns of a table of steps are called, and what they show.
COLUMNS: dict[str, Callable[[Figures], str]] = {
    "messages": lambda f: f"{f.messages} {f.new:+}" if f.messages else "",
    "bytes": lambda f: short(f.size),
    "same": lambda f: "" if f.same is None else f"{int(100 * f.same)} %",
    "in": lambda f: short(f.input),
    "cached": lambda f: short(f.cached),
    "out": lambda f: short(f.output),
    "first": lambda f: "" if f.first is None else seconds(f.first),
    "model": lambda f: seconds(f.seconds["model"]),
    "tools": lambda f: seconds(f.seconds["tools"]),
    "hooks": lambda f: seconds(f.seconds["hooks"]),
    "waits": lambda f: seconds(f.seconds["waits"]),
    "own": lambda f: seconds(f.seconds["own"]),
    "retries": lambda f: str(f.retries or ""),
    "finish": lambda f: f.finish,
    "called": lambda f: counted(f.called),
}
WORDS = ("finish", "called")  # the columns that hold words
MEANING = (
    "messages: of the request, and how many more than the step before · "
    "same: how much of that step's messages begins this request unchanged, which is what a "
    "provider's cache can hold · in, cached, out: tokens · "
    "first: seconds to the first byte of the answer · "
    "model, tools, hooks, waits (for another attempt, for a person) and own (this program's work): "
    "seconds, which add up"
)


def short(number: int) -> str:
    """A number for a narrow column: 950, 1.2k, 34k, 5.6M; "" for none."""
    for unit, size in (("M", 1_000_000), ("k", 1_000)):
        if number >= size:
            return f"{number / size:.{1 if number < 10 * size else 0}f}{unit}"
    return str(number or "")


def seconds(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def counted(names: list[str]) -> str:
    """read ×2, bash"""
    return ", ".join(
        name if names.count(name) == 1 else f"{name} ×{names.count(name)}"
        for name in dict.fromkeys(names)
    )


# ---- what a trace holds


@dataclass
class Exchange:
    """One request and its answer. Times are seconds since the trace began; `ended` is None where
    the request was given up.

    `nested`: made while a tool ran, so by a sub-agent. `before`: how many messages the request
    before it had, in the same model's main conversation; `kept`: how many of these begin this
    request unchanged; `same`: their bytes as a share (1.0: messages were only appended), 0.0 where
    the tools changed, None where there was no request before.
    """

    number: int
    sent: float
    body: Record
    size: int
    nested: bool = False
    kept: int = 0
    before: int = 0
    same: float | None = None
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    error: Record | None = None
    ended: float | None = None

    @property
    def messages(self) -> list[Message]:
        return list(self.body["messages"])

    @property
    def first(self) -> float | None:
        """Seconds to the first byte of the body."""
        return self.chunks[0][0] - self.sent if self.chunks else None


@dataclass
class Step:
    """From its step_start to the next one's; `end`: the time of its step_end, or of its last line.

    `exchanges` are all requests made meanwhile, `asked` those of the run itself (its attempts).
    """

    number: int
    start: float
    end: float
    records: list[Record]
    exchanges: list[Exchange]

    def of(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["type"] == kind]

    @property
    def asked(self) -> list[Exchange]:
        return [each for each in self.exchanges if not each.nested]

    @cached_property
    def spans(self) -> list[Span]:
        return sorted(_spans(self), key=lambda span: span.start)

    @cached_property
    def figures(self) -> Figures:
        asked, end = self.asked, next(iter(self.of("step_end")), {})
        last, usage = asked[-1] if asked else None, end.get("usage") or {}
        return Figures(
            messages=len(last.messages) if last else 0,
            new=len(last.messages) - asked[0].before if last else 0,
            size=sum(each.size for each in asked),
            same=min((each.same for each in asked if each.same is not None), default=None),
            input=int(usage.get("input", 0)),
            cached=int(usage.get("cached", 0)),
            output=int(usage.get("output", 0)),
            first=last.first if last else None,
            seconds=shares(self.spans, self.start, self.end),
            wall=self.end - self.start,
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
    def start(self) -> float:
        return float(self.records[0]["t"])

    @property
    def end(self) -> float:
        return float((self.of("run_end") or self.records[-1])["t"])

    @property
    def figures(self) -> Figures:
        """The sums of the steps; what cannot be summed is the last step's, or nothing."""
        each = [step.figures for step in self.steps]
        wall = self.end - self.start
        seconds = {kind: sum(one.seconds[kind] for one in each) for kind in KINDS}
        seconds["own"] += max(0.0, wall - sum(one.wall for one in each))
        sums: dict[str, Any] = {name: sum(getattr(one, name) for one in each) for name in SUMS}
        messages = each[-1].messages if each else 0
        called = [name for one in each for name in one.called]
        return Figures(seconds, wall, messages, called=called, **sums)

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
    """A file's traces, one after the other, with their runs. `cut`: a line was cut by a kill."""

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


# ---- lines ---------------------------------------------------------------------------------------


def open_file(path: str | Path, flags: int) -> int:
    """A descriptor; a new file is private. Raises OSError, also for a pipe without a reader."""
    try:
        file = os.open(path, flags | os.O_NONBLOCK, 0o600)
    except OSError as error:
        why = "nobody reads this pipe" if error.errno == errno.ENXIO else error.strerror
        raise OSError(error.errno, why, str(path)) from None
    os.set_blocking(file, True)
    return file


def read(path: str | Path) -> Recording:
    """A trace's lines, by who wrote them. Raises OSError or TraceError."""
    with open(path, "rb", opener=open_file) as file:
        lines = file.read().split(b"\n")
    records = [_record(line) for line in lines]
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


def _record(line: bytes) -> Record | None:
    try:
        value: Record = json.loads(line)
        return value | {"t": float(value["t"]), "type": str(value["type"]), "of": str(value["of"])}
    except BROKEN:
        return None


# ---- requests ------------------------------------------------------------------------------------


def _exchanges(records: list[Record]) -> dict[int, Exchange]:
    """The requests of one trace, by number."""
    found: dict[int, Exchange] = {}
    running = 0  # tools
    previous: Exchange | None = None
    for record in records:
        kind = record["type"]
        running += (kind == "tool_start") - (kind == "tool_end")
        if kind == "request":
            number, nested = int(record["n"]), running > 0
            made = Exchange(number, record["t"], record["body"], int(record["bytes"]), nested)
            found[number] = made
            if not nested:
                _compare(made, previous)
                previous = made
        elif exchange := found.get(record.get("n", 0)):
            _add(exchange, record)
    return found


def _add(exchange: Exchange, record: Record) -> None:
    """Add a line about an answer to its request."""
    match record["type"]:
        case "response":
            exchange.status, exchange.headers = record["status"], record["headers"]
        case "chunk" if "base64" in record:
            exchange.chunks.append((record["t"], base64.b64decode(record["base64"])))
        case "chunk":
            data = record["text"].encode("utf-8", "surrogatepass")
            exchange.chunks.append((record["t"], data))
        case "response_end":
            exchange.ended, exchange.error = record["t"], record["error"]


def _compare(exchange: Exchange, previous: Exchange | None) -> None:
    """Set what of a request was in the one before it, at the same place."""
    if not previous:
        return
    old, new = previous.messages, exchange.messages
    exchange.before = len(old)
    exchange.kept = _alike(old, new)
    if previous.body.get("tools") != exchange.body.get("tools"):  # which stand before the messages
        exchange.same = 0.0
        return
    if exchange.kept == len(old):
        exchange.same = 1.0
        return
    texts = [json.dumps(each[exchange.kept : exchange.kept + 1])[:-1] for each in (old, new)]
    exchange.same = (_size(old[: exchange.kept]) + _alike(*texts)) / _size(old)


def _alike(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many items, or characters, begin both."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b)))


def _size(messages: list[Message]) -> int:
    return sum(len(json.dumps(message)) + 1 for message in messages)


# ---- runs and steps ------------------------------------------------------------------------------


def _runs(records: list[Record]) -> Iterator[Run]:
    exchanges = _exchanges(records)
    models = [record for record in records if record["type"] == "model"]
    for first, group in _groups(records, "run_start"):
        before = [record for record in models if record["t"] <= first["t"]]
        yield Run(group, list(_steps(group, exchanges)), before[-1] if before else Record())


def _groups(records: list[Record], kind: str) -> Iterator[tuple[Record, list[Record]]]:
    """Each line of this type, with all lines from it to the next one."""
    starts = [place for place, record in enumerate(records) if record["type"] == kind]
    for start, end in pairwise([*starts, len(records)]):
        yield records[start], records[start:end]


def _steps(records: list[Record], exchanges: dict[int, Exchange]) -> Iterator[Step]:
    for first, group in _groups(records, "step_start"):
        last = next((record for record in group if record["type"] == "step_end"), group[-1])
        made = [exchanges[record["n"]] for record in group if record["type"] == "request"]
        yield Step(int(first["step"]), first["t"], last["t"], group, made)


def _spans(step: Step) -> Iterator[Span]:
    """What took time in a step."""
    for exchange in step.asked:
        last = exchange.ended or (exchange.chunks[-1][0] if exchange.chunks else step.end)
        yield Span("model", exchange.sent, last, f"request {exchange.number}")
    for record in step.of("hook"):
        title = f"{record['hook']}.{record['place']}"
        yield Span("hooks", record["t"] - record["seconds"], record["t"], title)
    for record in step.of("reply"):
        title = f"the user's answer to {record['to']}"
        yield Span("waits", record["t"] - record["seconds"], record["t"], title)
    busy = [record["t"] for record in step.of("status") if record["status"] == "busy"]
    for record in step.of("retry"):
        again = next((time for time in busy if time >= record["t"]), step.end)
        yield Span("waits", record["t"], again, f"before attempt {record['attempt'] + 1}")
    ends = {record["id"]: record["t"] for record in step.of("tool_end")}
    for record in step.of("tool_start"):
        title = str(record["title"] or record["name"])
        yield Span("tools", record["t"], ends.get(record["id"], step.end), title)
