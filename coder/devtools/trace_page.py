"""A trace as one page: a timeline, a table of the steps, all messages, requests and chunks to unfold.

Messages that a request only repeats stand where they came first.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from coder.devtools.trace_file import (
    COLUMNS,
    MEANING,
    WORDS,
    Exchange,
    Record,
    Recording,
    Run,
    Span,
    Step,
    open_file,
    seconds,
)
from coder.sessions.html import Markup, html_page, tag
from coder.types import Message

LANES: list[str] = ["model", "tools", "hooks", "waits"]
LANE, TICKS = 22, 5  # pixels; marks on the time axis
LEAST_BAR = 0.12  # percent of the width, for what took less
MOST_STEPS = 60  # that share the width of a window; more make the timeline wider
SHOWN_ELSEWHERE = re.compile(
    r"(run|step)_(start|end)|(message|tool)_start|response(_end)?|status|chunk|hook|trace|model"
)

STYLE = """
:root { --model: #3b76d8; --first: #a9c5f3; --tools: #2f9e63; --hooks: #b065d6; --waits: #e0962a; }
@media (prefers-color-scheme: dark) { :root { --model: #6ea0f2; --first: #34507f; --tools: #4fbf84;
  --hooks: #c68ae6; --waits: #eab160; } }
h2 { font-size: 1.1rem; margin-top: 2.2rem; }
p { color: var(--dim); }
p.why { color: var(--ink); font-weight: 600; white-space: pre-wrap; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .6rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th { color: var(--dim); font-weight: normal; }
.words { text-align: left; white-space: normal; }
figure { margin: 1rem 0; }
svg { display: block; } svg text { fill: var(--dim); font-size: 11px; }
svg text.tick { text-anchor: middle; } svg line { stroke: var(--line); }
rect.model { fill: var(--model); } rect.first { fill: var(--first); }
rect.tools { fill: var(--tools); fill-opacity: .75; }
rect.hooks { fill: var(--hooks); } rect.waits { fill: var(--waits); }
details { background: var(--box); } details details { background: var(--paper); }
summary b { margin-right: .5rem; }
a { color: inherit; }
"""


def page(recording: Recording, name: str) -> str:
    """The whole page of a trace; `name` is its title."""
    runs = [_run(run, number) for number, run in enumerate(recording.runs, 1)]
    if recording.cut:
        runs.append(tag("p", "A line was cut: the program was killed while it wrote."))
    return html_page(name, STYLE, tag("h1", name), tag("p", MEANING), *runs)


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read. Raises OSError."""
    with open(path, "wb", opener=open_file) as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text.encode("utf-8", "replace"))


# ---- a run ---------------------------------------------------------------------------------------


def _run(run: Run, number: int) -> Markup:
    name = run.model.get("name", "an unknown model")
    return tag(
        "section",
        tag("h2", f"Run {number} · {name} · {seconds(run.figures.wall)} s"),
        tag("p", run.why, class_="why"),
        _timeline(run, number),
        _table(run, number),
        *(_step(step, _anchor(number, step), run.start) for step in run.steps),
    )


def _anchor(run: int, step: Step) -> str:
    return f"r{run}s{step.number}"


def _table(run: Run, number: int) -> Markup:
    def row(kind: str, cells: Iterable[str]) -> Markup:
        classes = [{"class_": "words"} if name in WORDS else {} for name in ("", *COLUMNS)]
        return tag("tr", *(tag(kind, cell, **look) for cell, look in zip(cells, classes)))

    steps = [
        (tag("a", str(step.number), href=f"#{_anchor(number, step)}"), step.figures)
        for step in run.steps
    ]
    rows = [
        row("td", [name, *(show(figures) for show in COLUMNS.values())])
        for name, figures in [*steps, ("all", run.figures)]
    ]
    return tag("div", tag("table", row("th", ["step", *COLUMNS]), *rows), class_="wide")


def _timeline(run: Run, number: int) -> Markup:
    """One time axis, a lane for each kind; a request is light until its first byte. A bar is a
    link to its step."""
    length, height = max(run.end - run.start, 1e-6), LANE * len(LANES)

    def percent(seconds: float) -> float:
        return round(88 * seconds / length, 3)

    def bar(step: Step, look: str, span: Span) -> Markup:
        took = span.end - span.start
        place = {
            "x": f"{8 + percent(span.start - run.start)}%",
            "y": LANE * LANES.index(span.kind) + 3,
            "width": f"{max(percent(took), LEAST_BAR)}%",
            "height": LANE - 6,
        }
        title = tag("title", f"step {step.number} · {span.title} · {seconds(took)} s")
        return tag("a", tag("rect", title, class_=look, **place), href=f"#{_anchor(number, step)}")

    marks = [tag("text", kind, x=0, y=LANE * lane + 15) for lane, kind in enumerate(LANES)]
    for after in (length * tick / TICKS for tick in range(TICKS + 1)):
        x = f"{8 + percent(after)}%"
        marks.append(tag("line", x1=x, x2=x, y1=0, y2=height))
        marks.append(tag("text", f"{seconds(after)} s", x=x, y=height + 14, class_="tick"))
    bars = [bar(step, look, span) for step in run.steps for look, span in _bars(step)]
    width = "100%" if len(run.steps) <= MOST_STEPS else len(run.steps) * 20
    drawing = tag("svg", *marks, *bars, width=width, height=height + 20, role="img")
    return tag("figure", drawing, class_="wide")


def _bars(step: Step) -> Iterator[tuple[str, Span]]:
    """(class, span); a request's is drawn again from its first byte on."""
    for span in step.spans:
        yield "first" if span.kind == "model" else span.kind, span
    for exchange in step.exchanges:
        if exchange.chunks:
            end = exchange.ended or exchange.chunks[-1][0]
            yield "model", Span("model", exchange.chunks[0][0], end, f"answer {exchange.number}")


# ---- a step --------------------------------------------------------------------------------------


def _step(step: Step, name: str, start: float) -> Markup:
    figures, requests = step.figures, {exchange.number: exchange for exchange in step.exchanges}
    arguments = {record["id"]: record["arguments"] for record in step.of("tool_start")}
    parts = [
        _request(requests[record["n"]])
        if record["type"] == "request"
        else _record(record, arguments, start)
        for record in step.records
        if not SHOWN_ELSEWHERE.fullmatch(record["type"])
    ]
    if hooks := step.of("hook"):
        lines = [
            f"{each['t'] - start:9.3f} s  {each['seconds']:9.6f} s  {each['hook']}.{each['place']}"
            for each in hooks
        ]
        took = f"{len(hooks)} calls, {seconds(figures.seconds['hooks'])} s"
        parts.append(_fold("hooks", took, tag("pre", "\n".join(lines))))
    words = [figures.finish, COLUMNS["called"](figures), f"{seconds(figures.wall)} s"]
    return _fold(f"step {step.number}", " · ".join(filter(None, words)), *parts, id=name)


def _fold(title: str, text: str, *inside: Markup, bad: object = False, **more: str) -> Markup:
    name = tag("b", title, class_="bad") if bad else tag("b", title)
    summary = tag("summary", name, " ".join(text[:400].split())[:160])
    return tag("details", summary, *inside, **more)


def _record(record: Record, arguments: dict[str, Any], start: float) -> Markup:
    """An event that has no place of its own."""
    kind = record["type"]
    if kind == "message_end":
        return _message(record["message"])
    if kind == "tool_end":
        details = record["result"].get("details")
        shown = _json({"arguments": arguments.get(record["id"]), "details": details})
        text = f"{record['name']} · {seconds(record['seconds'])} s"
        return _fold("tool", text, shown, bad=record["is_error"])
    rest = _without(record, "t", "of", "type")
    text = f"at {record['t'] - start:.3f} s · {json.dumps(rest, ensure_ascii=False)[:200]}"
    bad = kind in ("retry", "raised", "hook_failed")
    return _fold(kind.replace("_", " "), text, _json(rest), bad=bad)


def _message(message: Message) -> Markup:
    content, rest = message.get("content"), _without(message, "role", "content", "meta")
    names = ", ".join(call["function"]["name"] for call in message.get("tool_calls") or ())
    inside = [tag("pre", content) if isinstance(content, str) else _json(content)]
    shown = [*(inside if content else []), *([_json(rest)] if rest else [])]
    bad = (message.get("meta") or {}).get("is_error")
    return _fold(message["role"], str(content or names), *shown, bad=bad)


def _request(exchange: Exchange) -> Markup:
    """What was sent and what came back, byte for byte."""
    messages, kept = exchange.messages, exchange.kept
    inside = [_message(message) for message in messages[kept:]]
    if kept:
        inside.insert(0, tag("p", f"The first {kept} messages are those of the request before."))
    rest = _json(_without(exchange.body, "messages"))
    inside += [_fold("body", "all but the messages", rest), _response(exchange)]
    title = f"request {exchange.number}{' of a sub-agent' if exchange.nested else ''}"
    text = f"{len(messages)} messages, {exchange.size} bytes"
    return _fold(title, text, *inside, bad=exchange.error)


def _response(exchange: Exchange) -> Markup:
    error, first = exchange.error, exchange.first
    text = "whole" if exchange.ended else "given up"
    if error:
        text = f"{error['kind']}: {error['message']}"
    text += f" · {len(exchange.chunks)} chunks"
    if first is not None:
        text += f", the first after {first:.3f} s"
    chunks = "\n".join(
        f"── {when - exchange.sent:.3f} s\n{data.decode('utf-8', 'backslashreplace')}"
        for when, data in exchange.chunks
    )
    facts = _json({"status": exchange.status, "headers": exchange.headers, "error": error})
    return _fold("response", text, facts, tag("pre", chunks), bad=error)


def _without(record: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in names}


def _json(value: Any) -> Markup:
    return tag("pre", json.dumps(value, ensure_ascii=False, indent=2))
