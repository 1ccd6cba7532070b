"""Read a trace, and show it as a table of its steps.

    for run in read("run.jsonl").runs:
        for step in run.steps:
            print(step.figures["model"])

trace.py says what the lines are; trace_page.py makes an HTML page of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from coder.devtools.trace import FORMAT
from coder.permissions.sanitize import strip_controls
from coder.providers.errors import MALFORMED
from coder.providers.wire import common_prefix
from coder.types import CoderError, Message

Record = dict[str, Any]


class TraceError(CoderError):
    """The file is no trace, or a broken one."""


# The figures of a step, in the order of the columns
COLUMNS = [
    "messages",
    "new",
    "bytes",
    "same %",
    "in",
    "cached",
    "out",
    "first",
    "model",
    "tools",
    "waits",
    "own",
    "retries",
    "finish",
    "called",
]

# ---- what a trace holds --------------------------------------------------------------------------


@dataclass
class Exchange:
    """One request and its answer: their lines.

    `nested`: made while a tool ran, so by a sub-agent. `previous`: the messages of the request
    before it in the main conversation.
    """

    request: Record
    nested: bool
    previous: list[Message]
    answer: list[Record] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        return list(self.request["body"]["messages"])

    @property
    def kept(self) -> int:
        """How many messages of the previous request begin this one unchanged."""
        return common_prefix(self.previous, self.messages)

    @property
    def same(self) -> int:
        """The same in percent of the previous request's bytes."""
        kept = json.dumps(self.previous[: self.kept])
        return 100 * len(kept) // len(json.dumps(self.previous))

    def of(self, kind: str) -> list[Record]:
        return [record for record in self.answer if record["type"] == kind]

    def after(self, kind: str) -> list[float]:
        """When lines of the answer came, in seconds after the request."""
        return [float(record["t"] - self.request["t"]) for record in self.of(kind)]

    def seconds(self, given_up: float) -> float:
        """How long its answer took.

        `given_up`: the time at which one without an end was given up.
        """
        ends = self.after("response_end")
        return ends[0] if ends else float(given_up - self.request["t"])


@dataclass
class Part:
    """A step, or a run with its steps: the lines from its start to its end, and the requests
    there.
    """

    records: list[Record] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    steps: list[Part] = field(default_factory=list)

    def of(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["type"] == kind]

    @property
    def wall(self) -> float:
        """Seconds from its start to its end."""
        return float(self.records[-1]["t"] - self.records[0]["t"])

    @cached_property
    def figures(self) -> dict[str, Any]:
        """What the columns of the table show, by their names."""
        figures = self._request_figures() | self._usage_figures() | self._time_figures()
        if self.steps:  # of a whole run these say nothing
            figures |= {"same %": "", "first": "", "finish": ""}
        return {name: figures[name] for name in COLUMNS}

    @property
    def own_exchanges(self) -> list[Exchange]:
        """Those of the main conversation."""
        return [exchange for exchange in self.exchanges if not exchange.nested]

    def _request_figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = {"messages": 0, "new": 0, "bytes": 0, "same %": "", "first": 0}
        exchanges = self.own_exchanges
        if not exchanges:
            return figures
        newest = exchanges[-1]
        figures["messages"] = len(newest.messages)
        figures["new"] = len(newest.messages) - len(exchanges[0].previous)
        figures["bytes"] = sum(exchange.request["bytes"] for exchange in exchanges)
        same = [exchange.same for exchange in exchanges if exchange.previous]
        if same:
            figures["same %"] = min(same)
        chunks = newest.after("chunk")
        if chunks:
            figures["first"] = chunks[0]
        return figures

    def _usage_figures(self) -> dict[str, Any]:
        ends = self.of("step_end")
        usages = [end["usage"] for end in ends]
        return {
            "in": sum(usage["input"] for usage in usages),
            "cached": sum(usage["cached"] for usage in usages),
            "out": sum(usage["output"] for usage in usages),
            "retries": len(self.of("retry")),
            "finish": ends[-1]["finish_reason"] if ends else "",
            "called": ", ".join(record["name"] for record in self.of("tool_start")),
        }

    def _time_figures(self) -> dict[str, float]:
        ended = self.records[-1]["t"]
        model = sum(exchange.seconds(given_up=ended) for exchange in self.own_exchanges)
        tools = self._sum("tool_end", "seconds")
        waits = self._sum("reply", "seconds") + self._sum("retry", "delay")
        own = max(0.0, self.wall - model - tools - waits)
        return {"model": model, "tools": tools, "waits": waits, "own": own}

    def _sum(self, kind: str, name: str) -> float:
        return float(sum(record.get(name, 0.0) for record in self.of(kind)))

    @property
    def model(self) -> str:
        return str(self.exchanges[0].request["body"]["model"]) if self.exchanges else "no model"

    @property
    def end(self) -> tuple[str, str]:
        """(why a run stopped, its answer or what went wrong)."""
        ends = self.of("run_end")
        if not ends:
            return "no end", "killed, or still at work"
        error = ends[0]["error"]
        text = f"{error['kind']}: {error['message']}" if error else str(ends[0]["text"])
        return str(ends[0]["stop_reason"]), text


# ---- reading -------------------------------------------------------------------------------------


@dataclass
class Recording:
    """What a file holds: its runs, all requests (also those outside of runs), its first line about
    a model.
    """

    runs: list[Part] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    model: Record = field(default_factory=dict)


def read(path: str | Path) -> Recording:
    """Read a file; lines that a kill has cut are left out. Raises OSError or TraceError."""
    lines = Path(path).read_bytes().split(b"\n")
    parsed = [_parse_line(line) for line in lines]
    records = [record for record in parsed if record]
    if not records or records[0]["type"] != "trace" or records[0].get("format") != FORMAT:
        raise TraceError("it is no trace")
    reader = _Reader()
    with understood():
        for record in records:
            reader.begin(record)
            for part in reader.parts:
                part.records.append(record)
            reader.end(record)
    return reader.recording


@contextmanager
def understood() -> Iterator[None]:
    try:
        yield
    except MALFORMED as error:
        raise TraceError(f"a line is broken: {type(error).__name__}: {error}"[:200]) from error


def _parse_line(line: bytes) -> Record | None:
    try:
        value: Record = json.loads(line)
        return value | {"t": float(value["t"]), "type": str(value["type"])}
    except MALFORMED:
        return None


class _Reader:
    """Goes through the lines in order, and knows the run and the step that each belongs to."""

    def __init__(self) -> None:
        self.recording = Recording()
        self.begin_process()

    def begin_process(self) -> None:
        self.parts: list[Part] = []  # the current run, and its current step
        self.running_tools = 0
        self.previous: list[Message] = []
        self.sent: dict[int, Exchange] = {}

    def begin(self, record: Record) -> None:
        kind = record["type"]
        if kind == "trace":
            self.begin_process()
        elif kind == "model":
            self.recording.model = self.recording.model or record
        elif kind == "run_start":
            self.parts = [Part()]
            self.running_tools = 0
            self.recording.runs += self.parts
        elif kind == "step_start":
            self.parts[1:] = [Part()]
            self.parts[0].steps.append(self.parts[1])
        elif kind == "request":
            self.add_request(record)
        elif kind in ("response", "chunk", "response_end"):
            self.sent[record["n"]].answer.append(record)

    def add_request(self, record: Record) -> None:
        exchange = Exchange(record, self.running_tools > 0, self.previous)
        if not exchange.nested:
            self.previous = exchange.messages
        self.sent[record["n"]] = exchange
        self.recording.exchanges.append(exchange)
        for part in self.parts:
            part.exchanges.append(exchange)

    def end(self, record: Record) -> None:
        kind = record["type"]
        if kind == "tool_start":
            self.running_tools += 1
        elif kind == "tool_end":
            self.running_tools -= 1
        elif kind == "run_end":
            self.parts = []
        elif kind == "step_end":
            del self.parts[1:]


# ---- showing -------------------------------------------------------------------------------------


def table(recording: Recording) -> str:
    """For each run a line for each step, without columns that hold nothing."""
    runs = []
    for number, run in enumerate(recording.runs, 1):
        of = f"run {number} of {len(recording.runs)}"
        title = f"{of} · {one_line(run.model)} · {run.wall:.2f} s"
        runs += [title, _steps(run), one_line(": ".join(run.end))[:300], ""]
    return "\n".join(runs or ["There is no run in it.", ""])


def _steps(run: Part) -> str:
    """A heading, a line for each step, and one for all."""
    aligned = []
    for column in columns_of(run):
        width = max(len(cell) for cell in column)
        aligned.append([cell.rjust(width) for cell in column])
    return "\n".join("  ".join(row) for row in zip(*aligned))


def columns_of(run: Part) -> list[list[str]]:
    """The columns of its table, each with its heading; none that holds nothing."""
    parts = [*run.steps, run]
    columns = [["step", *(str(number) for number in range(1, len(parts))), "all"]]
    for name in run.figures:
        cells = [_cell(part.figures[name]) for part in parts]
        if set(cells) - {"", "0.00"}:
            columns.append([name, *cells])
    return columns


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    return one_line(str(value or ""))


def one_line(text: str) -> str:
    return " ".join(strip_controls(text).split())
