"""Reading a trace: lines -> runs -> steps, and what can be said of each step in figures.

    for run in read("run.jsonl").runs:
        for step in run.steps:
            print(step.number, step.figures.own)

Both ways to show one use the words at its end: what the columns are called and mean, and how their numbers are written.

What it leaves out: writing (trace.py, which tells what the lines are), the page (trace_page.py), the table on the terminal
(terminal/trace_table.py).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from coder.types import CoderError, Message

FORMAT = 1  # of the lines; trace.py writes it
MOST_SECONDS = 1e9  # thirty years: no run takes longer
MOST = 10**12  # bytes, tokens, steps
Record = dict[str, Any]
Kind = Literal["waits", "hooks", "model", "tools", "own"]
KINDS: tuple[Kind, ...] = ("waits", "hooks", "model", "tools", "own")  # where two overlap, the first has the time


class TraceError(CoderError):
    """The file is no trace, or a broken one."""


@dataclass
class Exchange:
    """One request and what came. Times are seconds since the trace began; `ended` is None where it was given up.

    `nested`: made while a tool ran, so by a sub-agent. `kept`: how many messages of the request before it, of the same model's
    main conversation, begin it unchanged; `same` is that in bytes, as a share of that request's messages (1.0: only appended),
    0.0 where the tools changed, None where there was none before.
    """

    number: int
    sent: float
    body: Record
    size: int
    nested: bool = False
    kept: int = 0
    before: int = 0  # messages of the request before it
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


@dataclass(frozen=True)
class Span:
    """What took time, from when to when."""

    kind: Kind
    start: float
    end: float
    title: str


@dataclass(frozen=True)
class Figures:
    """A step in numbers, or a whole run. `seconds` by kind add up to `wall`; "own" is what is left for this program itself."""

    messages: int  # of the last request
    new: int  # since the step before
    size: int  # bytes of the requests
    same: float | None
    input: int
    cached: int
    output: int
    first: float | None
    seconds: dict[Kind, float]
    wall: float
    retries: int
    finish: str
    called: list[str]


@dataclass
class Step:
    """From its step_start to the next one's; `end` is that of its step_end, or of the last line where there is none.

    `exchanges` are all requests made meanwhile, `asked` those of the run itself: attempts, and the last one's answer counts.
    """

    number: int
    start: float
    end: float
    records: list[Record]
    exchanges: list[Exchange]

    def of(self, *types: str) -> list[Record]:
        return [record for record in self.records if record["type"] in types]

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
            messages=len(last.messages) if last else 0, new=len(last.messages) - asked[0].before if last else 0,
            size=sum(each.size for each in asked), same=min((each.same for each in asked if each.same is not None), default=None),
            input=_count(usage.get("input", 0)), cached=_count(usage.get("cached", 0)), output=_count(usage.get("output", 0)),
            first=last.first if last else None, seconds=shares(self.spans, self.start, self.end), wall=self.end - self.start,
            retries=len(self.of("retry")), finish=str(end.get("finish_reason", "")),
            called=[str(record["name"]) for record in self.of("tool_start")])


@dataclass
class Run:
    """One run: its lines, its steps, and the model's line that stood before it."""

    records: list[Record]
    steps: list[Step]
    model: Record

    @property
    def start(self) -> float:
        return float(self.records[0]["t"])

    @property
    def end(self) -> float:
        return float((self.ended or self.records[-1])["t"])

    @property
    def ended(self) -> Record | None:
        """Its run_end."""
        return next((record for record in self.records if record["type"] == "run_end"), None)

    @property
    def figures(self) -> Figures:
        """The sums of the steps; what cannot be summed is the last step's, or nothing."""
        each = [step.figures for step in self.steps]
        seconds = {kind: sum(one.seconds[kind] for one in each) for kind in KINDS}
        between = self.end - self.start - sum(one.wall for one in each)
        seconds["own"] += max(0.0, between)
        return Figures(
            messages=each[-1].messages if each else 0, new=sum(one.new for one in each), size=sum(one.size for one in each), same=None,
            input=sum(one.input for one in each), cached=sum(one.cached for one in each), output=sum(one.output for one in each),
            first=None, seconds=seconds, wall=self.end - self.start, retries=sum(one.retries for one in each), finish="",
            called=[name for one in each for name in one.called])

    @property
    def why(self) -> str:
        """Why it stopped, in a line."""
        raised = next((record["error"] for record in self.records if record["type"] == "raised"), "")
        if not self.ended:
            return f"ended by {raised}" if raised else "no end: killed, or still at work"
        reason, error = self.ended["stop_reason"], self.ended["error"]
        return f"{reason}: {error['kind']}: {error['message']}" if error else f"{reason}: {self.ended['text']}"


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
            return [exchange for records in self.traces for exchange in _exchanges(records).values()]


@contextmanager
def understood() -> Iterator[None]:
    """Inside, a trace is looked at. Raises TraceError where it holds what no trace of ours does."""
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError) as error:
        raise TraceError(f"it holds what is no line of a trace ({type(error).__name__}: {error})"[:200]) from error


# ---- lines -----------------------------------------------------------------------------------------------


def read(path: str | Path) -> Recording:
    """A trace's lines, by who wrote them. Raises OSError or TraceError."""
    lines = Path(path).read_bytes().split(b"\n")
    found = [_record(line) for line in lines]
    traces: dict[str, list[Record]] = {}
    cut = False
    for number, (record, line) in enumerate(zip(found, lines), 1):
        if record and record["type"] == "trace" and record["of"] not in traces:
            if record.get("format") != FORMAT:
                raise TraceError(f"it is a trace of another format: {record.get('format')!r}")
            traces[record["of"]] = []
        if record and record["of"] in traces:
            traces[record["of"]].append(record)
        elif not record and (number == len(lines) or _begins(found[number])):
            cut = cut or bool(line)
        else:
            raise TraceError(f"line {number} is broken" if traces else "it is no trace")
    if not traces:
        raise TraceError("it is no trace")
    return Recording(list(traces.values()), cut)


def _record(line: bytes) -> Record | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    proper = isinstance(value, dict) and isinstance(value.get("type"), str) and isinstance(value.get("of"), str)
    return value if proper and _is_time(value.get("t")) and _is_time(value.get("seconds", 0)) else None


def _is_time(value: Any) -> bool:
    """Is this a number of seconds? NaN is none, and neither is what no clock shows."""
    return isinstance(value, int | float) and 0 <= value <= MOST_SECONDS


def _count(value: Any) -> int:
    """A number of bytes, tokens or steps. Raises ValueError, TypeError or OverflowError where it is none that can be meant."""
    if not 0 <= int(value) <= MOST:
        raise ValueError(f"{value!r:.40} is no number of anything")
    return int(value)


def _begins(record: Record | None) -> bool:
    return record is not None and record["type"] == "trace"


# ---- requests --------------------------------------------------------------------------------------------


def _exchanges(records: list[Record]) -> dict[int, Exchange]:
    """The requests of one trace, by number."""
    found: dict[int, Exchange] = {}
    running = 0  # tools
    previous: Exchange | None = None
    for record in records:
        kind, exchange = record["type"], found.get(record.get("n", 0))
        running += (kind == "tool_start") - (kind == "tool_end")
        if kind == "request":
            number, size = _count(record["n"]), _count(record["bytes"])
            exchange = found[record["n"]] = Exchange(number, record["t"], record["body"], size, nested=running > 0)
            if not exchange.nested:
                _compare(exchange, previous)
                previous = exchange
        elif exchange and kind == "response":
            exchange.status, exchange.headers = record["status"], record["headers"]
        elif exchange and kind == "chunk":
            data = base64.b64decode(record["base64"]) if "base64" in record else record["text"].encode("utf-8", "surrogatepass")
            exchange.chunks.append((record["t"], data))
        elif exchange and kind == "response_end":
            exchange.ended, exchange.error = record["t"], record["error"]
    return found


def _compare(exchange: Exchange, previous: Exchange | None) -> None:
    """What of a request was in the one before it, at the same place."""
    if not previous:
        return
    old, new = previous.messages, exchange.messages
    exchange.before = len(old)
    exchange.kept = _largest(min(len(old), len(new)), lambda count: old[:count] == new[:count])
    a, b = _serialised(old), _serialised(new)
    alike = previous.body.get("tools") == exchange.body.get("tools")  # which stand in front of the messages
    exchange.same = _largest(min(len(a), len(b)), lambda count: a[:count] == b[:count]) / max(1, len(a)) if alike else 0.0


def _serialised(messages: list[Message]) -> bytes:
    """As they were sent, without the bracket that closes them."""
    return json.dumps(messages, ensure_ascii=False, separators=(",", ":"))[:-1].encode("utf-8", "surrogatepass")


def _largest(most: int, holds: Callable[[int], bool]) -> int:
    """The largest count up to `most` that holds, where all smaller ones hold too."""
    least = 0
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if holds(middle) else (least, middle - 1)
    return least


# ---- runs and steps --------------------------------------------------------------------------------------


def _runs(records: list[Record]) -> Iterator[Run]:
    exchanges, model = _exchanges(records), Record()
    starts = [place for place, record in enumerate(records) if record["type"] == "run_start"]
    for start, end in pairwise([*starts, len(records)]):
        model = next((record for record in reversed(records[:start]) if record["type"] == "model"), model)
        yield Run(records[start:end], list(_steps(records[start:end], exchanges)), model)


def _steps(records: list[Record], exchanges: dict[int, Exchange]) -> Iterator[Step]:
    starts = [place for place, record in enumerate(records) if record["type"] == "step_start"]
    for start, end in pairwise([*starts, len(records)]):
        own = records[start:end]
        last = next((record for record in own if record["type"] == "step_end"), own[-1])
        yield Step(_count(own[0]["step"]), own[0]["t"], last["t"], own,
                   [exchanges[record["n"]] for record in own if record["type"] == "request"])


def _spans(step: Step) -> Iterator[Span]:
    """What took time in a step."""
    for exchange in step.exchanges:
        last = exchange.ended or (exchange.chunks[-1][0] if exchange.chunks else step.end)
        if not exchange.nested:
            yield Span("model", exchange.sent, last, f"request {exchange.number}")
    for record in step.of("hook"):
        yield Span("hooks", record["t"] - record["seconds"], record["t"], f"{record['hook']}.{record['place']}")
    for record in step.of("reply"):
        yield Span("waits", record["t"] - record["seconds"], record["t"], f"a person's answer to {record['to']}")
    for record in step.of("retry"):
        again = (each["t"] for each in step.of("status") if each["t"] >= record["t"] and each["status"] == "busy")
        yield Span("waits", record["t"], next(again, step.end), f"before attempt {_count(record['attempt']) + 1}")
    ends = {record["id"]: record["t"] for record in step.of("tool_end")}
    for record in step.of("tool_start"):
        yield Span("tools", record["t"], ends.get(record["id"], step.end), str(record["title"] or record["name"]))


def shares(spans: list[Span], start: float, end: float) -> dict[Kind, float]:
    """The seconds from `start` to `end`, each moment given to one kind."""
    edges = sorted({start, end, *(edge for span in spans for edge in (span.start, span.end) if start < edge < end)})
    seconds = dict.fromkeys(KINDS, 0.0)
    for left, right in pairwise(edges):
        covering = {span.kind for span in spans if span.start <= left and span.end >= right}
        seconds[next((kind for kind in KINDS if kind in covering), "own")] += right - left
    return seconds


# ---- words -----------------------------------------------------------------------------------------------

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
MEANING = ("messages: of the request, and how many more than the step before · same: how much of that step's messages begins this "
           "request unchanged, which is what a provider's cache can hold · in, cached, out: tokens · first: seconds to the first "
           "byte of the answer · model, tools, hooks, waits (for another attempt, for a person) and own (this program's work): "
           "seconds, which add up")


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
    return ", ".join(name if names.count(name) == 1 else f"{name} ×{names.count(name)}" for name in dict.fromkeys(names))
