"""The columns of a table of steps, and a trace as one HTML page: that table, and below it every line
of each step to unfold.

The page holds no script and may load nothing. Messages that a request only repeats are left out.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from html import escape
from pathlib import Path

from coder.devtools.trace_file import (
    Exchange,
    Figures,
    Record,
    Recording,
    Run,
    Step,
    open_file,
)

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
    "called": lambda f: ", ".join(f.called),
}
WORDS = ("finish", "called")  # the columns that hold words
MEANING = (
    "messages: of the request, and how many more than the step before · "
    "same: how much of that step's messages begins this request unchanged, which is what a "
    "provider's cache can hold · in, cached, out: tokens · "
    "first: seconds to the first byte of the answer · "
    "model, tools, hooks, waits (for another attempt, for the user) and own (this program's work): "
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


# ---- the page ------------------------------------------------------------------------------------

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{name}</title><style>
:root {{ color-scheme: light dark }}
body {{ margin: 1.5rem auto; max-width: 75rem; padding: 0 1rem; font: 15px/1.5 system-ui }}
table {{ display: block; overflow-x: auto }}
th, td {{ padding: .1rem .6rem; text-align: right }}
details {{ margin: .3rem 0 .3rem 1rem }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; max-height: 32rem; overflow-y: auto }}
</style></head><body><h1>{name}</h1><p>{meaning}</p>
{runs}
</body></html>
"""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # not allowed in HTML
# Not shown as lines of their own: what other lines repeat, and what a request's line shows.
LEFT_OUT = (
    *("step_start", "message_start", "tool_start", "status", "response", "chunk", "response_end"),
    *("hook", "model", "trace"),
)


def page(recording: Recording, name: str) -> str:
    """The whole page of a trace; `name` is its title."""
    runs = [_run(run, number) for number, run in enumerate(recording.runs, 1)]
    if recording.cut:
        runs.append("<p>A line was cut: the program was killed while it wrote.</p>")
    return PAGE.format(name=_text(name), meaning=_text(MEANING), runs="\n".join(runs))


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read. Raises OSError."""
    with open(path, "wb", opener=open_file) as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text.encode("utf-8", "replace"))


def _run(run: Run, number: int) -> str:
    model = run.model.get("name", "an unknown model")
    figures = [(str(step.number), step.figures) for step in run.steps] + [("all", run.figures)]
    rows = [[name, *(show(each) for show in COLUMNS.values())] for name, each in figures]
    return "\n".join(
        [
            f"<h2>Run {number} · {_text(model)} · {seconds(run.figures.wall)} s</h2>",
            f"<p><b>{_text(run.why)}</b></p>",
            f"<table>{_row('th', ['step', *COLUMNS])}{''.join(_row('td', row) for row in rows)}</table>",
            *(_step(step) for step in run.steps),
        ]
    )


def _row(cell: str, texts: list[str]) -> str:
    return f"<tr>{''.join(f'<{cell}>{_text(text)}</{cell}>' for text in texts)}</tr>"


def _step(step: Step) -> str:
    requests = {exchange.number: exchange for exchange in step.exchanges}
    inside = [
        _request(requests[record["n"]]) if record["type"] == "request" else _line(record)
        for record in step.records
        if record["type"] not in LEFT_OUT
    ]
    called = COLUMNS["called"](step.figures)
    title = f"step {step.number} · {seconds(step.figures.wall)} s · {step.figures.finish} {called}"
    return _fold(title, "".join(inside))


def _line(record: Record) -> str:
    """An event with its fields."""
    fields = {name: value for name, value in record.items() if name not in ("t", "of", "type")}
    start = json.dumps(fields, ensure_ascii=False)[:160]
    return _fold(f"{record['t']:.3f} s · {record['type']} · {start}", _pre(fields))


def _request(exchange: Exchange) -> str:
    """What was sent and what came back; of the messages those that are new."""
    body = exchange.body | {"messages": exchange.messages[exchange.kept :]}
    facts = {"status": exchange.status, "headers": exchange.headers, "error": exchange.error}
    chunks = [
        f"── {when - exchange.sent:.3f} s\n{data.decode('utf-8', 'backslashreplace')}"
        for when, data in exchange.chunks
    ]
    inside = [
        f"<p>{exchange.kept} messages of the request before, and:</p>" if exchange.kept else "",
        _pre(body),
        _pre(facts),
        _fold(f"{len(chunks)} chunks", f"<pre>{_text(chr(10).join(chunks))}</pre>"),
    ]
    who = " of a sub-agent" if exchange.nested else ""
    title = f"request {exchange.number}{who} · {exchange.size} bytes"
    return _fold(title if exchange.ended else f"{title} · given up", "".join(inside))


def _fold(title: str, inside: str) -> str:
    return f"<details><summary>{_text(title)}</summary>{inside}</details>\n"


def _pre(value: object) -> str:
    return f"<pre>{_text(json.dumps(value, ensure_ascii=False, indent=1))}</pre>"


def _text(text: str) -> str:
    return escape(CONTROL.sub("", text))
