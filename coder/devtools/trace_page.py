"""A trace as one HTML page, or as a table on the terminal: what `coder trace` shows."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from coder.devtools.timeline import STYLE, Span, draw
from coder.devtools.trace_diff import diff
from coder.devtools.trace_report import (
    Part,
    Record,
    Recording,
    TraceError,
    columns_of,
    one_line,
    read,
    table,
    understood,
)
from coder.history import text_of

MEANING = (
    "new: messages since the step before · same %: of the messages before that begin this request "
    "unchanged, so that a provider's cache can hold them · in, cached, out: tokens · first (byte), "
    "model, tools, waits (for the next attempt, for the user), own (coder's work): seconds"
)


def show(file: str, html: str = "", requests: bool = False) -> str:
    """The table of a trace, or its requests; or the path of the page that was written.

    Raises OSError or TraceError.
    """
    with understood():
        recording = read(file)
        if requests:
            return diff(recording)
        if not html:
            return table(recording)
        text = page(recording, Path(file).name).encode("utf-8", "replace")
    if os.path.exists(html) and os.path.samefile(html, file):
        raise TraceError("the page cannot be written over its own trace")
    with open(
        html,
        "wb",
        opener=lambda path, flags: os.open(path, flags, 0o600),
    ) as out:
        os.fchmod(out.fileno(), 0o600)
        out.write(text)
    return f"{one_line(html)}\n"


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
    "request",
    "message_end",
    "tool_update",
    "tool_end",
    "nested",
    "retry",
    "compacted",
    "notice",
    "permission_asked",
    "question_asked",
    "doom_loop",
    "reply",
}


def page(recording: Recording, title: str) -> str:
    """The whole page of a trace. Messages that a request only repeats are left out."""
    runs = "".join(_run_section(run, number) for number, run in enumerate(recording.runs, 1))
    runs = runs or "<p>There is no run in it.</p>"
    return PAGE.format(
        title=_text(title),
        meaning=_text(MEANING),
        timeline=STYLE,
        runs=runs,
    )


def _run_section(run: Part, run_number: int) -> str:
    """What was asked, the answer, the timeline, the table, and the steps to unfold."""
    prompt = "(went on)"
    for record in run.of("message_end"):
        if record["message"]["role"] == "user":
            prompt = text_of(record["message"])
            break
    reason, text = run.end
    began = run.records[0]["t"]
    links = [f"run{run_number}step{number}" for number in range(1, len(run.steps) + 1)]
    section = f"<h1>{_text(prompt)}</h1>\n"
    section += _fold(f"{reason} · {run.wall:.2f} s · {run.model}", f"<pre>{_text(text)}</pre>")
    section += draw(list(_spans(run, links)), began, began + run.wall)
    section += _html_table(run)
    for number, (step, link) in enumerate(zip(run.steps, links), 1):
        section += _step(step, number, link)
    return section


def _html_table(run: Part) -> str:
    heads, *rows = zip(*columns_of(run))
    lines = _html_row("th", heads, heads)
    for row in rows:
        lines += _html_row("td", row, heads)
    return f"<div><table>{lines}</table></div>\n"


def _html_row(kind: str, cells: Sequence[str], heads: Sequence[str]) -> str:
    row = ""
    for cell, head in zip(cells, heads):
        look = ' class="words"' if head in WORDS else ""
        row += f"<{kind}{look}>{_text(cell)}</{kind}>"
    return f"<tr>{row}</tr>\n"


def _spans(run: Part, links: list[str]) -> Iterator[Span]:
    """What its time went into, kind by kind; `links`: the ids of its steps."""
    for kind, read_times in TIMES.items():
        for number, (step, link) in enumerate(zip(run.steps, links), 1):
            for look, title, begin, end in read_times(step):
                title = CONTROL.sub("", f"step {number} · {title}")
                yield Span(kind, look, title, begin, end, link)


Times = Iterator[tuple[str, str, float, float]]  # look, title, begin and end


def _model_times(step: Part, nested: bool = False) -> Times:
    look = "sub-agents" if nested else "model"
    ended = step.records[-1]["t"]
    for exchange in step.exchanges:
        if exchange.nested != nested:
            continue
        sent = exchange.request["t"]
        end = sent + exchange.seconds(given_up=ended)
        chunks = exchange.after("chunk")
        first = sent + chunks[0] if chunks else end
        title = f"request {exchange.request['n']}"
        yield f"{look} first", f"{title} until its first byte", sent, first
        yield look, title, first, end


def _tool_times(step: Part) -> Times:
    starts = {start["id"]: start for start in step.of("tool_start")}
    for end in step.of("tool_end"):
        start = starts.get(end["id"], end | {"title": end["name"]})
        yield "tools", one_line(start["title"])[:100], start["t"], end["t"]


def _wait_times(step: Part) -> Times:
    for retry in step.of("retry"):
        yield "waits", f"attempt {retry['attempt'] + 1}", retry["t"], retry["t"] + retry["delay"]
    for reply in step.of("reply"):
        yield "waits", f"the user, {reply['to']}", reply["t"] - reply["seconds"], reply["t"]


TIMES: dict[str, Callable[[Part], Times]] = {
    "model": _model_times,
    "tools": _tool_times,
    "sub-agents": partial(_model_times, nested=True),
    "waits": _wait_times,
}


def _step(step: Part, number: int, link: str) -> str:
    sent = {exchange.request["n"]: exchange for exchange in step.exchanges}
    inside = ""
    for record in step.records:
        if record["type"] not in SHOWN:
            continue
        fields = dict(record)
        del fields["t"], fields["type"]
        if record["type"] == "request":
            exchange = sent[record["n"]]
            fields["body"] = fields["body"] | {"messages": exchange.messages[exchange.kept :]}
        inside += _line(record, fields)
    what = step.figures["called"] or step.figures["finish"]
    return _fold(f"step {number} · {step.wall:.2f} s · {what}", inside, f' id="{link}"')


def _line(record: Record, fields: dict[str, Any]) -> str:
    """One line of a trace, to unfold."""
    start = json.dumps(fields, ensure_ascii=False)[:160]
    whole = json.dumps(fields, ensure_ascii=False, indent=1)
    whole = re.sub(r"(?<!\\)\\n", "\n", whole)  # lines of a text as such
    title = f"{record['t']:.3f} s · {record['type']} · {start}"
    return _fold(title, f"<pre>{_text(whole)}</pre>")


def _fold(title: str, inside: str, attributes: str = "") -> str:
    return f"<details{attributes}><summary>{_text(title)}</summary>{inside}</details>\n"


def _text(text: str) -> str:
    return escape(CONTROL.sub("", text))
