"""Export: a session as people read it, as Markdown or as one HTML page, and as JSON for programs.

    text = export(store, session_id, "md", redact=redactor(api_key))

All that was ever said is in it, also what a compaction has replaced, which is marked. The page needs no script and no network, and its
policy allows neither; folding is the browser's own. What looks like a secret is taken out of every format.
"""

from __future__ import annotations

import html
import json
import os
import re
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Literal

from coder.history import calls_of, formed, text_of
from coder.permissions.redact import REMOVED, Redactor, redacted, without_secrets
from coder.providers.reasoning import REASONING, THINK
from coder.sessions.html import CONTROL, Markup, html_page, tag
from coder.sessions.rows import loaded
from coder.sessions.store import SessionInfo, Store, StoreError
from coder.tools.environment import is_secret
from coder.types import Message, Usage

Format = Literal["md", "json", "html"]
Redact = Callable[[str], str]
ATTACHED = {"image_url": "image", "input_audio": "sound", "file": "file"}
GONE = "no longer sent to the model"


# ---- secrets ---------------------------------------------------------------------------------------------


def redactor(*secrets: str) -> Redact:
    """What takes out these values, those of our environment that are secrets by their names, and what is one by its shape."""
    own = (value for name, value in os.environ.items() if is_secret(name))
    known = Redactor(*secrets, *own, instead=REMOVED)
    return lambda text: without_secrets(known.text(text))


# ---- the transcript --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A tool call with what came of it; `seconds` None where it has not ended."""

    title: str
    state: str
    arguments: str
    output: str
    diff: str
    seconds: float | None


@dataclass(frozen=True)
class Entry:
    """A message as people read it. `time`: milliseconds since the epoch, 0 where unknown; `stopped`: why the run ended there."""

    who: str
    text: str
    time: int = 0
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    active: bool = True
    tokens: Usage | None = None
    stopped: str = ""


def export(store: Store, session_id: str, format: Format, redact: Redact | None = None) -> str:  # noqa: A002 (its name everywhere)
    """The text of a file. Raises StoreError."""
    redact = redact or redactor()
    info = store.get(session_id)
    rows = store.rows("SELECT * FROM message WHERE session = ? ORDER BY position", session_id)
    parts = store.rows("SELECT * FROM part WHERE session = ? ORDER BY id", session_id)
    if format == "json":
        return (
            json.dumps(
                redacted(_plain(store, info, rows, parts), redact), ensure_ascii=False, indent=2
            )
            + "\n"
        )
    try:
        entries = list(_entries(rows, parts, redact))
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise StoreError(
            f"The session {info.id} holds what cannot be shown ({type(error).__name__}: {error})."[
                :300
            ]
        ) from error
    return {"md": markdown, "html": page}[format](
        _heading(info, redact), _facts(info, redact), entries
    )


def _plain(
    store: Store, info: SessionInfo, rows: list[sqlite3.Row], parts: list[sqlite3.Row]
) -> dict[str, Any]:
    """Everything that is stored, as JSON has it."""
    session = {
        name: value for name, value in asdict(info).items() if name not in ("messages", "first")
    }
    by_message: dict[int | None, list[dict[str, Any]]] = {}
    for part in parts:
        shown = {
            name: part[name]
            for name in ("type", "call_id", "state", "title", "start", "end", "text")
            if part[name] is not None
        }
        by_message.setdefault(part["message"], []).append(shown | {"data": loaded(part["data"])})
    messages = [
        {
            "active": bool(row["active"]),
            "finish": row["finish"],
            "error": loaded(row["error"]),
            "tokens": loaded(row["tokens"]),
            "completed": row["completed"],
            "message": loaded(row["data"]),
            "parts": by_message.get(row["id"], []),
        }
        for row in rows
    ]
    return {
        "session": session,
        "messages": messages,
        "parts": by_message.get(None, []),
        "todos": list(map(asdict, store.todos(info.id))),
    }


def _object(text: str | None) -> dict[str, Any]:
    """A JSON object; an empty one for anything else."""
    value = loaded(text)
    return value if isinstance(value, dict) else {}


def _entries(rows: list[sqlite3.Row], parts: list[sqlite3.Row], redact: Redact) -> Iterator[Entry]:
    """The transcript: results stand with their calls, and a compaction is an entry of its own."""
    messages = [
        (row, message) for row in rows if (message := formed(loaded(row["data"]))) is not None
    ]
    tools = {(part["message"], part["call_id"]): part for part in parts if part["type"] == "tool"}
    shortened = {
        part["message"]: _object(part["data"]) for part in parts if part["type"] == "compaction"
    }
    for place, (row, message) in enumerate(messages):
        if row["id"] in shortened:
            yield Entry("note", _shortening(shortened[row["id"]]))
        if row["role"] == "tool":
            continue
        outputs = _outputs(messages[place + 1 :])
        calls = [
            _call(call, tools.get((row["id"], call.get("id"))), outputs, redact)
            for call in calls_of(message)
        ]
        meta = message.get("meta", {})
        who = "summary" if meta.get("summary") else row["role"]
        tokens = _object(row["tokens"])
        thought = next(
            (message[name] for name in (*REASONING, THINK) if isinstance(message.get(name), str)),
            "",
        )
        yield Entry(
            who,
            redact(_text(message)),
            meta.get("timestamp") or 0,
            redact(thought),
            calls,
            bool(row["active"]),
            Usage(**tokens) if tokens else None,
            redact(_stopped(_object(row["error"]))),
        )


def _text(message: Message) -> str:
    content = message.get("content")
    kinds = (
        [str(part.get("type")) for part in content if isinstance(part, dict)]
        if isinstance(content, list)
        else []
    )
    text = text_of(message) if isinstance(content, str | list) else ""
    return "\n".join(
        filter(
            None,
            [text, *(f"[{ATTACHED.get(kind, 'attachment')}]" for kind in kinds if kind != "text")],
        )
    )


def _outputs(following: list[tuple[sqlite3.Row, Message]]) -> dict[str, str]:
    """The results behind an answer, by call id; the first of a call is the original, later ones have been shortened."""
    outputs: dict[str, str] = {}
    for row, message in following:
        if row["role"] == "assistant":
            break
        if row["role"] == "tool":
            outputs.setdefault(message.get("tool_call_id") or "", _text(message))
    return outputs


def _call(
    call: dict[str, Any], part: sqlite3.Row | None, outputs: dict[str, str], redact: Redact
) -> Call:
    function = call.get("function") or {}
    data = (part and _object(part["data"])) or {}
    sent = function.get("arguments") or ""
    arguments = loaded(sent)
    shown = (
        "\n".join(
            f"{name}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
            for name, value in arguments.items()
        )
        if isinstance(arguments, dict)
        else str(sent)
    )
    title = (part and part["title"]) or function.get("name") or "?"
    diff = (data.get("details") or {}).get("diff") or ""
    return Call(
        redact(" ".join(title.split())),
        part["state"] if part else "",
        redact(shown),
        redact(outputs.get(call.get("id") or "", "")),
        redact(diff),
        data.get("seconds"),
    )


def _shortening(data: dict[str, Any]) -> str:
    before, after = data.get("before") or {}, data.get("after") or {}
    figures = ", ".join(
        f"{before[name]:,} → {after[name]:,} {name}"
        for name in ("messages", "tokens")
        if name in before and name in after
    )
    return f"The conversation was shortened here ({data.get('trigger', 'manual')}){': ' + figures if figures else ''}."


def _stopped(error: dict[str, Any] | None) -> str:
    return f"Stopped ({error.get('stop_reason')}): {error.get('message')}" if error else ""


def _heading(info: SessionInfo, redact: Redact) -> str:
    return redact(info.title or info.first[:80] or f"Session {info.id}")


def _facts(info: SessionInfo, redact: Redact) -> str:
    usage = info.usage
    cost = f", ${usage.cost:.4f}" if usage.cost is not None else ""
    used = f"{usage.input:,} tokens in ({usage.cached:,} cached), {usage.output:,} out{cost}"
    times = f"{_when(info.created)} to {_when(info.updated)}"
    return " · ".join(
        filter(None, [info.id, redact(info.model), redact(info.directory), times, used])
    )


def _when(time: int) -> str:
    """Local time."""
    return datetime.fromtimestamp(time / 1000).strftime("%Y-%m-%d %H:%M:%S") if time else ""


def _head(entry: Entry) -> str:
    tokens = f"{entry.tokens.input:,} in, {entry.tokens.output:,} out" if entry.tokens else ""
    return " · ".join(
        filter(
            None, [entry.who.capitalize(), _when(entry.time), tokens, "" if entry.active else GONE]
        )
    )


def _call_head(call: Call) -> str:
    took = "" if call.seconds is None else f"{call.seconds:.1f} s"
    return " · ".join(
        filter(None, [call.title, took, "" if call.state == "completed" else call.state])
    )


# ---- Markdown --------------------------------------------------------------------------------------------


def markdown(heading: str, facts: str, entries: list[Entry]) -> str:
    blocks = [
        f"# {' '.join(heading.split())}",
        facts,
        *(block for entry in entries for block in _blocks(entry)),
    ]
    return "\n\n".join(blocks).translate(CONTROL) + "\n"


def _blocks(entry: Entry) -> Iterator[str]:
    if entry.who == "note":
        yield f"---\n\n*{entry.text}*"
        return
    yield f"## {_head(entry)}"
    if entry.reasoning:
        yield _folded("Thoughts", entry.reasoning)
    if entry.text:
        yield (
            entry.text
            if entry.who == "assistant"
            else "\n".join(f"> {line}".rstrip() for line in entry.text.split("\n"))
        )
    for call in entry.calls:
        yield _folded(
            _call_head(call), *filter(None, [call.arguments, call.output]), diff=call.diff
        )
    if entry.stopped:
        yield f"**{' '.join(entry.stopped.split())}**"


def _folded(summary: str, *texts: str, diff: str = "") -> str:
    inside = [*map(_fenced, texts), *([_fenced(diff, "diff")] if diff else [])]
    return "\n\n".join(
        [f"<details><summary>{html.escape(summary)}</summary>", *inside, "</details>"]
    )


def _fenced(text: str, language: str = "") -> str:
    """A code block whose fence is longer than any in the text."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


# ---- HTML ------------------------------------------------------------------------------------------------

STYLE = """
:root { --add: #1f7a45; --cut: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --add: #5fc48a; --cut: #f0786f; } }
body { max-width: 60rem; }
h2 { font-size: .85rem; color: var(--dim); font-weight: normal; margin: 0 0 .3rem; }
p.facts, p.note { color: var(--dim); }
p.note { border-top: 1px solid var(--line); padding-top: .6rem; font-style: italic; }
section { margin: 1.2rem 0; }
section.user { background: var(--box); border-radius: 6px; padding: .6rem .8rem; }
section.gone { opacity: .65; border-left: 3px solid var(--line); padding-left: .8rem; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; }
.add { color: var(--add); } .cut { color: var(--cut); }
"""


def page(heading: str, facts: str, entries: list[Entry]) -> str:
    return html_page(
        heading,
        STYLE,
        tag("h1", heading),
        tag("p", facts, class_="facts"),
        *map(_section, entries),
    )


def _section(entry: Entry) -> Markup:
    if entry.who == "note":
        return tag("p", entry.text, class_="note")
    inside = [tag("h2", _head(entry))]
    if entry.reasoning:
        inside.append(tag("details", tag("summary", "Thoughts"), tag("pre", entry.reasoning)))
    if entry.text:
        inside.append(tag("p", entry.text, class_="text"))
    for call in entry.calls:
        texts = [tag("pre", text) for text in (call.arguments, call.output) if text]
        summary = tag(
            "summary", _call_head(call), class_="bad" if call.state == "failed" else "good"
        )
        inside.append(
            tag("details", summary, *texts, *([_coloured(call.diff)] if call.diff else []))
        )
    if entry.stopped:
        inside.append(tag("p", entry.stopped, class_="bad"))
    kind = re.sub("[^a-z]", "", entry.who)
    return tag("section", *inside, class_=kind if entry.active else f"{kind} gone")


def _coloured(diff: str) -> Markup:
    kinds = {"+": "add", "-": "cut"}
    return tag(
        "pre",
        *(
            tag("span", line + "\n", class_=kinds.get(line[:1], "same"))
            for line in diff.split("\n")
        ),
    )
