"""A trace as one page: a timeline, a table of the steps, and every message, request and chunk to unfold.

The page needs no script and no network, and its policy allows neither: folding is the browser's own. Whatever a model wrote is
text on it: only what `tag` has made is markup. trace_page.html is its frame.

What it leaves out: messages that a request only repeats; they stand where they came first.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
from pathlib import Path
from string import Template
from typing import Any

from coder.features.trace_file import COLUMNS, MEANING, Exchange, Record, Recording, Run, Span, Step, seconds
from coder.types import Message

FRAME = Path(__file__).with_name("trace_page.html")
CONTROL = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {0x09, 0x0A})  # no text in HTML
LANES: list[str] = ["model", "tools", "hooks", "waits"]
LANE, TICKS = 22, 5  # pixels; marks on the time axis
LEAST_BAR = 0.12  # percent of the width: what took less is seen, too
MOST_STEPS = 60  # that share the width of a window; more make the timeline wider
SHOWN_ELSEWHERE = {"run_start", "run_end", "status", "step_start", "step_end", "message_start", "response", "chunk", "response_end",
                   "tool_start", "hook", "trace", "model"}


class Markup(str):
    """HTML that needs no escaping."""


def tag(name: str, *children: str, **attributes: object) -> Markup:
    """An element. Children are text, unless they are Markup; `class_` is the attribute class."""
    said = "".join(f' {key.rstrip("_").replace("_", "-")}="{_escaped(str(value))}"' for key, value in attributes.items())
    return Markup(f"<{name}{said}>{''.join(map(_escaped, children))}</{name}>")


def _escaped(text: str) -> str:
    return text if isinstance(text, Markup) else html.escape(text.translate(CONTROL))


def page(recording: Recording, name: str) -> str:
    """The whole page of a trace; `name` is its title."""
    frame = FRAME.read_text(encoding="utf-8")
    style = frame.partition("<style>")[2].partition("</style>")[0]
    body = [tag("h1", name), tag("p", MEANING), *(_run(run, number) for number, run in enumerate(recording.runs, 1))]
    if recording.cut:
        body.append(tag("p", "A line was cut: the program was killed while it wrote."))
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return Template(frame).substitute(hash=f"sha256-{digest}", title=_escaped(name), body="\n".join(body))


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read. Raises OSError."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text.encode("utf-8", "replace"))


# ---- a run -----------------------------------------------------------------------------------------------


def _run(run: Run, number: int) -> Markup:
    steps = [_step(step, f"r{number}s{step.number}", run.start) for step in run.steps]
    title = f"Run {number} · {run.model.get('name', 'an unknown model')} · {seconds(run.figures.wall)} s"
    return tag("section", tag("h2", title), tag("p", run.why, class_="why"), _timeline(run, number), _table(run, number), *steps)


def _table(run: Run, number: int) -> Markup:
    rows = [(tag("a", str(step.number), href=f"#r{number}s{step.number}"), step.figures) for step in run.steps]
    words = {heading: {"class_": "words"} if heading in ("finish", "called") else {} for heading in COLUMNS}
    head = tag("tr", *(tag("th", heading, **words.get(heading, {})) for heading in ("step", *COLUMNS)))
    lines = [tag("tr", tag("td", name), *(tag("td", show(figures), **words[heading]) for heading, show in COLUMNS.items()))
             for name, figures in [*rows, ("all", run.figures)]]
    return tag("div", tag("table", head, *lines), class_="wide")


def _timeline(run: Run, number: int) -> Markup:
    """One time axis, a lane for each kind; a request is light until its first byte. A bar leads to its step."""
    length, height = max(run.end - run.start, 1e-6), LANE * len(LANES)

    def percent(seconds: float) -> float:
        return round(88 * seconds / length, 3)

    def bar(step: Step, look: str, span: Span) -> Markup:
        title = tag("title", f"step {step.number} · {span.title} · {seconds(span.end - span.start)} s")
        y, width = LANE * LANES.index(span.kind) + 3, max(percent(span.end - span.start), LEAST_BAR)
        rect = tag("rect", title, class_=look, x=f"{8 + percent(span.start - run.start)}%", y=y, width=f"{width}%", height=LANE - 6)
        return tag("a", rect, href=f"#r{number}s{step.number}")

    marks = [tag("text", kind, x=0, y=LANE * lane + 15) for lane, kind in enumerate(LANES)]
    for after in (length * tick / TICKS for tick in range(TICKS + 1)):
        x = f"{8 + percent(after)}%"
        marks += [tag("line", x1=x, x2=x, y1=0, y2=height), tag("text", f"{seconds(after)} s", x=x, y=height + 14, class_="tick")]
    bars = [bar(step, look, span) for step in run.steps for look, span in _bars(step)]
    width = "100%" if len(run.steps) <= MOST_STEPS else len(run.steps) * 20
    return tag("figure", tag("svg", *marks, *bars, width=width, height=height + 20, role="img"), class_="wide")


def _bars(step: Step) -> list[tuple[str, Span]]:
    """(class, span); a request's is drawn again from its first byte on."""
    bars: list[tuple[str, Span]] = []
    for span in step.spans:
        bars.append(("first" if span.kind == "model" else span.kind, span))
    for exchange in step.exchanges:
        if exchange.chunks:
            end = exchange.ended or exchange.chunks[-1][0]
            bars.append(("model", Span("model", exchange.chunks[0][0], end, f"answer {exchange.number}")))
    return bars


# ---- a step ----------------------------------------------------------------------------------------------


def _step(step: Step, name: str, start: float) -> Markup:
    figures, requests = step.figures, {exchange.number: exchange for exchange in step.exchanges}
    arguments = {record["id"]: record["arguments"] for record in step.of("tool_start")}
    said = [figures.finish, COLUMNS["called"](figures), f"{seconds(figures.wall)} s"]
    parts = [_request(requests[record["n"]]) if record["type"] == "request" else _record(record, arguments, start)
             for record in step.records if record["type"] not in SHOWN_ELSEWHERE]
    if hooks := step.of("hook"):
        lines = [f"{record['t'] - start:9.3f} s  {record['seconds']:9.6f} s  {record['hook']}.{record['place']}" for record in hooks]
        parts.append(fold("hooks", f"{len(hooks)} calls, {seconds(figures.seconds['hooks'])} s", tag("pre", "\n".join(lines))))
    return tag("details", _summary(f"step {step.number}", " · ".join(filter(None, said))), *parts, id=name)


def fold(title: str, text: str, *inside: Markup, bad: bool = False) -> Markup:
    return tag("details", _summary(title, text, bad), *inside)


def _summary(title: str, text: str, bad: bool = False) -> Markup:
    return tag("summary", tag("b", title, **{"class_": "bad"} if bad else {}), " ".join(text[:400].split())[:160])


def _record(record: Record, arguments: dict[str, Any], start: float) -> Markup:
    """An event, as far as it has no better place."""
    kind = record["type"]
    if kind == "message_end":
        return _message(record["message"])
    if kind == "tool_end":
        text = f"{record['name']} · {seconds(record['seconds'])} s"
        return fold("tool", text, _json({"arguments": arguments.get(record["id"]), "details": record["result"].get("details")}),
                    bad=bool(record["is_error"]))
    rest = {key: value for key, value in record.items() if key not in ("t", "of", "type")}
    return fold(kind.replace("_", " "), f"at {record['t'] - start:.3f} s · {json.dumps(rest, ensure_ascii=False)[:200]}", _json(rest),
                bad=kind in ("retry", "raised", "hook_failed"))


def _message(message: Message) -> Markup:
    content, rest = message.get("content"), {key: value for key, value in message.items() if key not in ("role", "content", "meta")}
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)
    names = ", ".join(call["function"]["name"] for call in message.get("tool_calls") or ())
    inside = [tag("pre", text)] if isinstance(content, str) else [_json(content)] if content else []
    return fold(message["role"], text or names, *inside, *([_json(rest)] if rest else []),
                bad=bool((message.get("meta") or {}).get("is_error")))


def _request(exchange: Exchange) -> Markup:
    """What was sent and what came back, byte for byte."""
    messages = exchange.messages
    rest = {key: value for key, value in exchange.body.items() if key != "messages"}
    inside = [tag("p", f"The first {exchange.kept} messages are those of the request before.")] if exchange.kept else []
    inside += [_message(message) for message in messages[exchange.kept:]]
    inside += [fold("body", "all but the messages", _json(rest)), _response(exchange)]
    whose = " of a sub-agent" if exchange.nested else ""
    return fold(f"request {exchange.number}{whose}", f"{len(messages)} messages, {exchange.size} bytes", *inside, bad=bool(exchange.error))


def _response(exchange: Exchange) -> Markup:
    if exchange.error:
        said = f"{exchange.error['kind']}: {exchange.error['message']}"
    else:
        said = "whole" if exchange.ended else "given up"
    first = f", the first after {exchange.first:.3f} s" if exchange.first is not None else ""
    chunks = "\n".join(f"── {when - exchange.sent:.3f} s\n{data.decode('utf-8', 'backslashreplace')}" for when, data in exchange.chunks)
    facts = _json({"status": exchange.status, "headers": exchange.headers, "error": exchange.error})
    return fold("response", f"{said} · {len(exchange.chunks)} chunks{first}", facts, tag("pre", chunks), bad=bool(exchange.error))


def _json(value: Any) -> Markup:
    return tag("pre", json.dumps(value, ensure_ascii=False, indent=2))
