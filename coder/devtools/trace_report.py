"""Read a trace, and show it: a table of its steps as text, or one HTML page.

    for run in read("run.jsonl").runs:
        for step in run.steps:
            print(step.figures["model"])

trace.py says what the lines are.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from html import escape
from operator import eq
from pathlib import Path
from typing import Any

from coder.devtools.timeline import STYLE, Span, draw
from coder.devtools.trace import FORMAT
from coder.history import text_of
from coder.permissions.sanitize import strip_controls
from coder.providers.errors import MALFORMED
from coder.types import CoderError, Message

MEANING = (
    "new: messages since the step before · same %: of the messages before that begin this request "
    "unchanged, so that a provider's cache can hold them · in, cached, out: tokens · first (byte), "
    "model, tools, waits (for the next attempt, for the user), own (coder's work): seconds"
)

Record = dict[str, Any]


class TraceError(CoderError):
    """The file is no trace, or a broken one."""


# ---- what a trace holds --------------------------------------------------------------------------


@dataclass
class Exchange:
    """One request and its answer: their lines. `nested`: made while a tool ran, so by a sub-agent.
    `previous`: the messages of the request before it in the main conversation."""

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
        return [*map(eq, self.previous, self.messages), False].index(False)

    @property
    def same(self) -> int:
        """The same in percent of the previous request's bytes."""
        return 100 * len(json.dumps(self.previous[: self.kept])) // len(json.dumps(self.previous))

    def of(self, kind: str) -> list[Record]:
        return [record for record in self.answer if record["type"] == kind]

    def after(self, kind: str) -> list[float]:
        """When lines of the answer came, in seconds after the request."""
        return [float(record["t"] - self.request["t"]) for record in self.of(kind)]


@dataclass
class Part:
    """A step, or a run with its steps: the lines from its start to its end, and the requests there."""

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
        asked = [each for each in self.exchanges if not each.nested]
        last, ends = asked[-1:], self.of("step_end")
        usages = [end["usage"] for end in ends]
        ended = self.records[-1]["t"]  # the end of an answer that was given up
        model = sum([*each.after("response_end"), ended - each.request["t"]][0] for each in asked)
        tools = self._sum("tool_end", "seconds")
        waits = self._sum("reply", "seconds") + self._sum("retry", "delay")
        figures: dict[str, Any] = {
            "messages": sum(len(each.messages) for each in last),
            "new": sum(len(each.messages) - len(asked[0].previous) for each in last),
            "bytes": sum(each.request["bytes"] for each in asked),
            "same %": min((each.same for each in asked if each.previous), default=""),
            "in": sum(usage["input"] for usage in usages),
            "cached": sum(usage["cached"] for usage in usages),
            "out": sum(usage["output"] for usage in usages),
            "first": sum(first for each in last for first in each.after("chunk")[:1]),
            "model": model,
            "tools": tools,
            "waits": waits,
            "own": max(0.0, self.wall - model - tools - waits),
            "retries": len(self.of("retry")),
            "finish": "".join(end["finish_reason"] for end in ends[-1:]),
            "called": ", ".join(record["name"] for record in self.of("tool_start")),
        }
        return figures | (dict.fromkeys(("same %", "first", "finish"), "") if self.steps else {})

    def _sum(self, kind: str, name: str) -> float:
        return float(sum(record.get(name, 0.0) for record in self.of(kind)))

    @property
    def model(self) -> str:
        return str(self.exchanges[0].request["body"]["model"]) if self.exchanges else "no model"

    @property
    def end(self) -> tuple[str, str]:
        """(why a run stopped, its answer or what went wrong)."""
        if not (ends := self.of("run_end")):
            return "no end", "killed, or still at work"
        error = ends[0]["error"]
        text = f"{error['kind']}: {error['message']}" if error else ends[0]["text"]
        return str(ends[0]["stop_reason"]), str(text)


# ---- reading -------------------------------------------------------------------------------------


@dataclass
class Recording:
    """What a file holds: its runs, all requests, also those outside of runs, and its first line
    about a model."""

    runs: list[Part] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    model: Record = field(default_factory=dict)


def read(path: str | Path) -> Recording:
    """Read a file; lines that a kill has cut are left out. Raises OSError or TraceError."""
    lines = Path(path).read_bytes().split(b"\n")
    records = [record for record in map(_parse_line, lines) if record]
    if not records or (records[0]["type"], records[0].get("format")) != ("trace", FORMAT):
        raise TraceError("it is no trace")
    with understood():
        return _recording(records)


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


def _recording(records: list[Record]) -> Recording:
    made, under_way = Recording(), list[Part]()
    for record in records:
        kind = record["type"]
        if kind == "trace":  # another process begins
            under_way, tools, previous, sent = [], 0, list[Message](), dict[int, Exchange]()
        elif kind == "model":
            made.model = made.model or record
        elif kind == "run_start":
            under_way, tools = [Part()], 0
            made.runs += under_way
        elif kind == "step_start":
            under_way[1:] = [Part()]
            under_way[0].steps.append(under_way[1])
        elif kind == "request":
            exchange = sent[record["n"]] = Exchange(record, tools > 0, previous)
            previous = previous if exchange.nested else exchange.messages
            for requests in (made.exchanges, *(part.exchanges for part in under_way)):
                requests.append(exchange)
        elif kind in ("response", "chunk", "response_end"):
            sent[record["n"]].answer.append(record)
        tools += (kind == "tool_start") - (kind == "tool_end")
        for part in under_way:
            part.records.append(record)
        if kind in ("run_end", "step_end"):
            del under_way[kind == "step_end" :]
    return made


# ---- showing -------------------------------------------------------------------------------------


def show(file: str, html: str = "") -> str:
    """The table of a trace; or the path of the page that was written. Raises OSError or TraceError."""
    with understood():
        recording = read(file)
        if not html:
            return table(recording)
        text = page(recording, Path(file).name).encode("utf-8", "replace")
    if os.path.exists(html) and os.path.samefile(html, file):
        raise TraceError("the page cannot be written over its own trace")
    with open(html, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
        os.fchmod(out.fileno(), 0o600)
        out.write(text)
    return f"{_one_line(html)}\n"


def table(recording: Recording) -> str:
    """For each run a line for each step, without columns that hold nothing."""
    runs = []
    for number, run in enumerate(recording.runs, 1):
        of = f"run {number} of {len(recording.runs)}"
        title = f"{of} · {_one_line(run.model)} · {run.wall:.2f} s"
        runs += [title, _steps(run), _one_line(": ".join(run.end))[:300], ""]
    return "\n".join(runs or ["There is no run in it.", ""])


def _steps(run: Part) -> str:
    """A heading, a line for each step, and one for all."""
    columns = _columns(run)
    widths = [max(map(len, column)) for column in columns]
    return "\n".join("  ".join(map(str.rjust, row, widths)) for row in zip(*columns))


def _columns(run: Part) -> list[list[str]]:
    """The columns of its table, each with its heading; none that holds nothing."""
    parts = [*run.steps, run]
    columns = [["step", *(str(number) for number in range(1, len(parts))), "all"]]
    for name in run.figures:
        cells = [_cell(part.figures[name]) for part in parts]
        columns += [[name, *cells]] if {*cells} - {"", "0.00"} else []
    return columns


def _cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else _one_line(str(value or ""))


def _one_line(text: str) -> str:
    return " ".join(strip_controls(text).split())


# It holds no script and may load nothing.
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title><style>
:root {{ color-scheme: light dark }}
body {{ margin: 1rem auto; max-width: 75rem; padding: 0 .7rem; font: 15px/1.5 system-ui }}
h1, summary {{ overflow-wrap: anywhere }}
h1 {{ font-size: 1.2rem; white-space: pre-wrap }}
details {{ margin: .3rem 0 .3rem .5rem }}
div {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }}
th, td {{ padding: .1rem .4rem; text-align: right; border-bottom: 1px solid #8885; white-space: nowrap }}
th {{ color: #777; font-weight: normal }}
.words {{ text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 5rem }}
{timeline}pre {{ white-space: pre-wrap; overflow-wrap: anywhere; max-height: 32rem; overflow-y: auto }}
</style></head><body>
{runs}
<p>{meaning}</p></body></html>
"""
WORDS = ("finish", "called")  # columns that are no numbers
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # not allowed in HTML
# The lines that are shown; the others are repeated in these, or of interest to programs only.
SHOWN = {
    *("request", "message_end", "tool_update", "tool_end", "nested", "retry", "compacted"),
    *("notice", "permission_asked", "question_asked", "doom_loop", "reply"),
}


def page(recording: Recording, title: str) -> str:
    """The whole page of a trace: each run with what was asked, its answer, the table, and the steps
    to unfold. Messages that a request only repeats are left out."""
    runs = ""
    for at, run in enumerate(recording.runs, 1):
        reason, text = run.end
        said = [record["message"] for record in run.of("message_end")]
        prompt = next((text_of(each) for each in said if each["role"] == "user"), "(went on)")
        runs += f"<h1>{_text(prompt)}</h1>\n"
        runs += _fold(f"{reason} · {run.wall:.2f} s · {run.model}", f"<pre>{_text(text)}</pre>")
        links = [f"run{at}step{number}" for number in range(1, len(run.steps) + 1)]
        began = run.records[0]["t"]
        runs += draw([*_spans(run, links)], began, began + run.wall) + _html_table(run)
        for number, (step, link) in enumerate(zip(run.steps, links), 1):
            runs += _step(step, number, link)
    runs = runs or "<p>There is no run in it.</p>"
    return PAGE.format(title=_text(title), meaning=_text(MEANING), timeline=STYLE, runs=runs)


def _html_table(run: Part) -> str:
    heads, *rows = zip(*_columns(run))
    looks = [' class="words"' if name in WORDS else "" for name in heads]
    lines = ""
    for kind, row in ("th", heads), *(("td", row) for row in rows):
        cells = (f"<{kind}{look}>{_text(cell)}</{kind}>" for look, cell in zip(looks, row))
        lines += f"<tr>{''.join(cells)}</tr>\n"
    return f"<div><table>{lines}</table></div>\n"


def _spans(run: Part, links: list[str]) -> Iterator[Span]:
    """What its time went into, kind by kind; `links`: the ids of its steps."""
    for kind, read_times in TIMES.items():
        for number, (step, link) in enumerate(zip(run.steps, links), 1):
            for look, title, begin, end in read_times(step):
                yield Span(kind, look, _text(f"step {number} · {title}"), begin, end, link)


Times = Iterator[
    tuple[str, str, float, float]
]  # the look, the title, the begin and the end of each


def _model_times(step: Part, nested: bool = False) -> Times:
    look, last = "sub-agents" if nested else "model", step.records[-1]["t"]
    for each in step.exchanges:
        if each.nested != nested:
            continue
        sent, title = each.request["t"], f"request {each.request['n']}"
        end = (
            sent + [*each.after("response_end"), last - sent][0]
        )  # of one that was given up: the last
        first = sent + [*each.after("chunk"), end - sent][0]
        yield f"{look} first", f"{title} until its first byte", sent, first
        yield look, title, first, end


def _tool_times(step: Part) -> Times:
    starts = {each["id"]: each for each in step.of("tool_start")}
    for each in step.of("tool_end"):
        start = starts.get(each["id"], each | {"title": each["name"]})
        yield "tools", _one_line(start["title"])[:100], start["t"], each["t"]


def _wait_times(step: Part) -> Times:
    for each in step.of("retry"):
        yield "waits", f"attempt {each['attempt'] + 1}", each["t"], each["t"] + each["delay"]
    for each in step.of("reply"):
        yield "waits", f"the user, {each['to']}", each["t"] - each["seconds"], each["t"]


TIMES: dict[str, Callable[[Part], Times]] = {
    "model": _model_times,
    "tools": _tool_times,
    "sub-agents": partial(_model_times, nested=True),
    "waits": _wait_times,
}


def _step(step: Part, number: int, link: str) -> str:
    sent = {each.request["n"]: each for each in step.exchanges}
    inside = ""
    for record in step.records:
        if record["type"] not in SHOWN:
            continue
        fields = {name: value for name, value in record.items() if name not in ("t", "type")}
        if record["type"] == "request":
            exchange = sent[record["n"]]
            fields["body"] = fields["body"] | {"messages": exchange.messages[exchange.kept :]}
        start = json.dumps(fields, ensure_ascii=False)[:160]
        whole = json.dumps(fields, ensure_ascii=False, indent=1)
        whole = re.sub(r"(?<!\\)\\n", "\n", whole)  # lines of a text as such
        title = f"{record['t']:.3f} s · {record['type']} · {start}"
        inside += _fold(title, f"<pre>{_text(whole)}</pre>")
    what = step.figures["called"] or step.figures["finish"]
    return _fold(f"step {number} · {step.wall:.2f} s · {what}", inside, f' id="{link}"')


def _fold(title: str, inside: str, attributes: str = "") -> str:
    return f"<details{attributes}><summary>{_text(title)}</summary>{inside}</details>\n"


def _text(text: str) -> str:
    return escape(CONTROL.sub("", text))
