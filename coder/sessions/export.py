"""Export: a session as Markdown or as one HTML page for people, as JSON for programs.

    text = export(store, session_id, "md", redact=redactor(api_key))

It has all messages ever, also those that a compaction has replaced, which are marked. The page needs no
script and no network, and its policy allows neither; whatever a model or a tool wrote is text on it.
Secrets are removed from every format.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Literal

from coder.history import calls_of, formed, text_of
from coder.permissions.redact import REMOVED, Redactor, redacted, without_secrets
from coder.providers.profiles import REASONING, THINK
from coder.sessions.rows import loaded
from coder.sessions.store import SessionInfo, Store, StoreError
from coder.tools.secrets import is_secret
from coder.types import Message

Format = Literal["md", "json", "html"]
Redact = Callable[[str], str]
ATTACHED = {"image_url": "image", "input_audio": "sound", "file": "file"}
CONTROL = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {0x09, 0x0A})  # not allowed in HTML
ODD = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError)


def redactor(*secrets: str) -> Redact:
    """Removes these values, secrets of the environment (by their names), and what looks like a secret."""
    own = (value for name, value in os.environ.items() if is_secret(name))
    known = Redactor(*secrets, *own, instead=REMOVED)
    return lambda text: without_secrets(known.text(text))


def export(store: Store, session_id: str, format: Format, redact: Redact | None = None) -> str:  # noqa: A002 (its name everywhere)
    """The text of a file. Raises StoreError."""
    redact = redact or redactor()
    info = store.get(session_id)
    whole = redacted(_stored(store, info), redact)
    if format == "json":
        return json.dumps(whole, ensure_ascii=False, indent=2) + "\n"
    try:
        entries = list(_entries(whole["messages"]))
    except ODD as error:
        why = f"{type(error).__name__}: {error}"
        text = f"The session {info.id} holds what cannot be shown ({why})."[:300]
        raise StoreError(text) from error
    heading = redact(info.title or info.first[:80] or f"Session {info.id}")
    write = {"md": markdown, "html": page}[format]
    return write(heading, redact(_facts(info)), entries)


def _stored(store: Store, info: SessionInfo) -> dict[str, Any]:
    """Everything that is stored, as the JSON format has it."""
    session = asdict(info)
    del session["messages"], session["first"]
    names = ("type", "call_id", "state", "title", "start", "end", "text")
    by_message: dict[int | None, list[dict[str, Any]]] = {}
    for part in store.rows("SELECT * FROM part WHERE session = ? ORDER BY id", info.id):
        shown = {name: part[name] for name in names if part[name] is not None}
        by_message.setdefault(part["message"], []).append(shown | {"data": loaded(part["data"])})
    query = "SELECT * FROM message WHERE session = ? ORDER BY position"
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
        for row in store.rows(query, info.id)
    ]
    todos = list(map(asdict, store.todos(info.id)))
    rest = by_message.get(None, [])
    return {"session": session, "messages": messages, "parts": rest, "todos": todos}


def _facts(info: SessionInfo) -> str:
    usage = info.usage
    cost = f", ${usage.cost:.4f}" if usage.cost is not None else ""
    used = f"{usage.input:,} tokens in ({usage.cached:,} cached), {usage.output:,} out{cost}"
    times = f"{_when(info.created)} to {_when(info.updated)}"
    return _joined(info.id, info.model, info.directory, times, used)


def _when(time: int) -> str:
    """Local time."""
    return datetime.fromtimestamp(time / 1000).strftime("%Y-%m-%d %H:%M:%S") if time else ""


def _joined(*facts: str) -> str:
    return " · ".join(filter(None, facts))


# ---- the transcript ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Fold:
    """What is shown when it is opened: thoughts, or a tool call with its arguments, output and diff."""

    summary: str
    texts: Sequence[str]
    diff: str = ""
    failed: bool = False


@dataclass(frozen=True)
class Entry:
    """A message for people; `kind` is its role, "summary", or "note" (a compaction)."""

    kind: str
    text: str
    head: str = ""
    thoughts: Sequence[Fold] = ()
    calls: Sequence[Fold] = ()
    stopped: str = ""  # why the run ended here
    active: bool = True


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _entries(rows: list[dict[str, Any]]) -> Iterator[Entry]:
    """Results stand with their calls, and a compaction is an entry of its own."""
    read = [(row, message) for row in rows if (message := formed(row["message"])) is not None]
    for place, (row, message) in enumerate(read):
        for part in row["parts"]:
            if part["type"] == "compaction":
                yield Entry("note", _shortening(_object(part["data"])))
        if message["role"] == "tool":
            continue
        meta, tokens = message.get("meta", {}), _object(row["tokens"])
        kind = "summary" if meta.get("summary") else message["role"]
        used = f"{tokens['input']:,} in, {tokens['output']:,} out" if tokens else ""
        gone = "" if row["active"] else "no longer sent to the model"
        error = _object(row["error"])
        yield Entry(
            kind,
            _text(message),
            _joined(kind.capitalize(), _when(meta.get("timestamp") or 0), used, gone),
            _thoughts(message),
            list(_calls(row, message, read[place + 1 :])),
            f"Stopped ({error.get('stop_reason')}): {error.get('message')}" if error else "",
            row["active"],
        )


def _shortening(data: dict[str, Any]) -> str:
    before, after = _object(data.get("before")), _object(data.get("after"))
    names = [name for name in ("messages", "tokens") if name in before and name in after]
    figures = ", ".join(f"{before[name]:,} → {after[name]:,} {name}" for name in names)
    how = f"({data.get('trigger', 'manual')}){': ' if figures else ''}{figures}"
    return f"The conversation was shortened here {how}."


def _text(message: Message) -> str:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    kinds = [str(part.get("type")) for part in parts if isinstance(part, dict)]
    named = [f"[{ATTACHED.get(kind, 'attachment')}]" for kind in kinds if kind != "text"]
    return "\n".join(filter(None, [text_of(message), *named]))


def _thoughts(message: Message) -> list[Fold]:
    thoughts = (message.get(name) for name in (*REASONING, THINK))
    return [Fold("Thoughts", [each]) for each in thoughts if isinstance(each, str) and each][:1]


def _calls(
    row: dict[str, Any], message: Message, following: list[tuple[dict[str, Any], Message]]
) -> Iterator[Fold]:
    tools = {part.get("call_id"): part for part in row["parts"] if part["type"] == "tool"}
    outputs = _outputs(following)
    for call in calls_of(message):
        part = _object(tools.get(call.get("id")))
        data, function = _object(part.get("data")), _object(call.get("function"))
        title = " ".join(str(part.get("title") or function.get("name") or "?").split())
        took = f"{data['seconds']:.1f} s" if data.get("seconds") is not None else ""
        state = str(part.get("state") or "")
        texts = [_arguments(function.get("arguments") or ""), outputs.get(call.get("id") or "", "")]
        yield Fold(
            _joined(title, took, "" if state == "completed" else state),
            [*filter(None, texts)],
            _object(data.get("details")).get("diff") or "",
            state == "failed",
        )


def _outputs(following: list[tuple[dict[str, Any], Message]]) -> dict[str, str]:
    """The results behind an answer, by call id; the first of a call is the original, later ones are shortened."""
    outputs: dict[str, str] = {}
    for _, message in following:
        if message["role"] == "assistant":
            break
        if message["role"] == "tool":
            outputs.setdefault(message.get("tool_call_id") or "", _text(message))
    return outputs


def _arguments(sent: str) -> str:
    """One line for each argument; what is no object as it was sent."""
    arguments = loaded(sent)
    if not isinstance(arguments, dict):
        return str(sent)
    texts = [
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for value in arguments.values()
    ]
    return "\n".join(f"{name}: {text}" for name, text in zip(arguments, texts))


# ---- Markdown ----------------------------------------------------------------------------------


def markdown(heading: str, facts: str, entries: Sequence[Entry]) -> str:
    blocks = [block for entry in entries for block in _blocks(entry)]
    text = "\n\n".join([f"# {' '.join(heading.split())}", facts, *blocks])
    return text.translate(CONTROL) + "\n"


def _blocks(entry: Entry) -> Iterator[str]:
    if entry.kind == "note":
        yield f"---\n\n*{entry.text}*"
        return
    yield f"## {entry.head}"
    yield from map(_folded, entry.thoughts)
    if entry.text and entry.kind == "assistant":
        yield entry.text
    elif entry.text:
        yield "\n".join(f"> {line}".rstrip() for line in entry.text.split("\n"))
    yield from map(_folded, entry.calls)
    if entry.stopped:
        yield f"**{' '.join(entry.stopped.split())}**"


def _folded(fold: Fold) -> str:
    inside = [*map(_fenced, fold.texts), *([_fenced(fold.diff, "diff")] if fold.diff else [])]
    summary = f"<details><summary>{html.escape(fold.summary)}</summary>"
    return "\n\n".join([summary, *inside, "</details>"])


def _fenced(text: str, language: str = "") -> str:
    """A code block whose fence is longer than any in the text."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


# ---- HTML --------------------------------------------------------------------------------------

STYLE = """
:root { color-scheme: light dark; --dim: #777; --line: #8885; --bad: #d0453c; --good: #2c9557; }
body { margin: 1.5rem auto; max-width: 60rem; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; }
h1, summary, pre, .text { overflow-wrap: anywhere; }
h1 { font-size: 1.3rem; }
h2, .facts, .note { color: var(--dim); font-size: .85rem; font-weight: normal; margin: .3rem 0; }
.note { border-top: 1px solid var(--line); padding-top: .6rem; font-style: italic; }
details { border: 1px solid var(--line); border-radius: 5px; margin: .35rem 0; padding: .3rem .6rem; }
pre { font: 12.5px/1.4 ui-monospace, monospace; max-height: 32rem; overflow-y: auto; }
pre, .text { white-space: pre-wrap; margin: .3rem 0; }
section { margin: 1.2rem 0; }
.user { background: var(--line); border-radius: 6px; padding: .6rem .8rem; }
.gone { opacity: .65; border-left: 3px solid var(--line); padding-left: .8rem; }
.bad, .cut { color: var(--bad); } .add { color: var(--good); }
"""


class Markup(str):
    """HTML that needs no escaping."""


def tag(name: str, *children: str, css: str = "") -> Markup:
    """An element. Children are text, unless they are Markup."""
    attribute = f' class="{html.escape(css)}"' if css else ""
    return Markup(f"<{name}{attribute}>{''.join(map(_escaped, children))}</{name}>")


def _escaped(text: str) -> str:
    return text if isinstance(text, Markup) else html.escape(text.translate(CONTROL))


def page(heading: str, facts: str, entries: Sequence[Entry]) -> str:
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="referrer" content="no-referrer">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{tag('title', heading)}<style>{STYLE}</style>"
    )
    body = tag("h1", heading), tag("p", facts, css="facts"), *map(_section, entries)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>{tag("body", *body)}</html>\n'


def _section(entry: Entry) -> Markup:
    if entry.kind == "note":
        return tag("p", entry.text, css="note")
    kind = re.sub("[^a-z]", "", entry.kind)
    return tag(
        "section",
        tag("h2", entry.head),
        *map(_details, entry.thoughts),
        *([tag("p", entry.text, css="text")] if entry.text else []),
        *map(_details, entry.calls),
        *([tag("p", entry.stopped, css="bad")] if entry.stopped else []),
        css=kind if entry.active else f"{kind} gone",
    )


def _details(fold: Fold) -> Markup:
    css = {"+": "add", "-": "cut"}
    lines = fold.diff.split("\n") if fold.diff else []
    spans = [tag("span", line + "\n", css=css.get(line[:1], "")) for line in lines]
    return tag(
        "details",
        tag("summary", fold.summary, css="bad" if fold.failed else ""),
        *(tag("pre", text) for text in fold.texts),
        *([tag("pre", *spans)] if spans else []),
    )
