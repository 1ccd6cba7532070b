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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Literal

from coder.history import calls_of, formed, text_of
from coder.permissions.redact import REMOVED, Redactor, redacted, without_secrets
from coder.providers.profiles import REASONING, THINK
from coder.sessions.store import SessionInfo, Store, loaded
from coder.tools.secrets import is_secret
from coder.types import Message

Format = Literal["md", "json", "html"]
Redact = Callable[[str], str]
JSON_COLUMNS = {"data", "error", "tokens"}
CONTROL = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {0x09, 0x0A})  # not allowed in HTML


def redactor(*secrets: str) -> Redact:
    """Removes these values, secrets of the environment (by their names), and what looks like a secret."""
    own = (value for name, value in os.environ.items() if is_secret(name))
    known = Redactor(*secrets, *own, instead=REMOVED)
    return lambda text: without_secrets(known.text(text))


def export(store: Store, session_id: str, format: Format, redact: Redact | None = None) -> str:  # noqa: A002 (its name everywhere)
    """The text of a file. Raises StoreError."""
    redact, info = redact or redactor(), store.get(session_id)
    whole = redacted(_stored(store, info), redact)
    if format == "json":
        return json.dumps(whole, ensure_ascii=False, indent=2) + "\n"
    heading = " ".join(redact(info.title or info.first[:80] or f"Session {info.id}").split())
    facts, entries = redact(_facts(info)), list(_entries(whole["messages"]))
    return {"md": _markdown, "html": _page}[format](heading, facts, entries)


def _stored(store: Store, info: SessionInfo) -> dict[str, Any]:
    """Everything that is stored, as the JSON format has it."""
    parts: dict[int, list[dict[str, Any]]] = {}
    for row in store.rows("SELECT * FROM part WHERE session = ? ORDER BY id", info.id):
        parts.setdefault(row["message"], []).append(_decoded(row))
    rows = store.rows("SELECT * FROM message WHERE session = ? ORDER BY position", info.id)
    todos = store.rows("SELECT text, status FROM todo WHERE session = ?", info.id)
    return {
        "session": asdict(info),
        "messages": [_decoded(row) | {"parts": parts.get(row["id"], [])} for row in rows],
        "todos": [dict(row) for row in todos],
    }


def _decoded(row: Any) -> dict[str, Any]:
    facts = dict(row)
    return facts | {name: loaded(facts[name]) for name in JSON_COLUMNS & facts.keys()}


def _facts(info: SessionInfo) -> str:
    used = (
        f"{info.usage.input:,} tokens in ({info.usage.cached:,} cached), {info.usage.output:,} out"
    )
    cost = f"${info.usage.cost:.4f}" if info.usage.cost is not None else ""
    times = f"{_when(info.created)} to {_when(info.updated)}"
    return _joined(info.id, info.model, info.directory, times, used, cost)


def _when(time: int) -> str:
    """Local time."""
    return datetime.fromtimestamp(time / 1000).strftime("%Y-%m-%d %H:%M:%S") if time else ""


def _joined(*facts: str) -> str:
    return " · ".join(filter(None, facts))


# ---- the transcript ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A text, or with a summary what is shown when it is opened: thoughts, or a call with its result and diff."""

    texts: Sequence[str]
    summary: str = ""
    diff: str = ""
    failed: bool = False


@dataclass(frozen=True)
class Entry:
    """A message for people; without blocks the head is a remark (a compaction). `kind` is its role, or "summary"."""

    head: str
    kind: str = "note"
    blocks: Sequence[Block] = ()
    active: bool = True


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _entries(rows: Sequence[dict[str, Any]]) -> Iterator[Entry]:
    """Results stand with their calls, and a compaction is an entry of its own."""
    read = [(row, message) for row in rows if (message := formed(row["data"])) is not None]
    for place, (row, message) in enumerate(read):
        for part in row["parts"]:
            if part["type"] == "compaction":
                yield Entry(_shortening(_object(part["data"])))
        if message["role"] == "tool":
            continue
        meta, tokens, error = message.get("meta", {}), _object(row["tokens"]), _object(row["error"])
        kind = "summary" if meta.get("summary") else message["role"]
        used = f"{tokens['input']:,} in, {tokens['output']:,} out" if tokens else ""
        gone = "" if row["active"] else "no longer sent to the model"
        head = _joined(kind.capitalize(), _when(meta.get("timestamp") or 0), used, gone)
        stopped = f"Stopped ({error.get('stop_reason')}): {error.get('message')}"
        blocks = [
            *_thoughts(message),
            *([Block([text])] if (text := _text(message)) else []),
            *_calls(row["parts"], message, (each for _, each in read[place + 1 :])),
            *([Block([" ".join(stopped.split())], failed=True)] if error else []),
        ]
        yield Entry(head, re.sub("[^a-z]", "", kind), blocks or [Block([""])], row["active"])


def _shortening(data: dict[str, Any]) -> str:
    before, after = _object(data.get("before")), _object(data.get("after"))
    figures = [f"{before[name]:,} → {after.get(name, 0):,} {name}" for name in before]
    return (
        f"The conversation was shortened here ({', '.join([str(data.get('trigger')), *figures])})."
    )


def _text(message: Message) -> str:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    kinds = [str(part.get("type")).removesuffix("_url") for part in parts]
    return "\n".join(
        filter(None, [text_of(message), *(f"[{kind}]" for kind in kinds if kind != "text")])
    )


def _thoughts(message: Message) -> list[Block]:
    thoughts = (message.get(name) for name in (*REASONING, THINK))
    return [Block([each], "Thoughts") for each in thoughts if each and isinstance(each, str)][:1]


def _calls(
    parts: Sequence[dict[str, Any]], message: Message, following: Iterable[Message]
) -> Iterator[Block]:
    """The calls of an answer with their results. The first result of a call is the original, a later one shortened."""
    outputs: dict[str, str] = {}
    for each in following:
        if each["role"] == "assistant":
            break
        if each["role"] == "tool":
            outputs.setdefault(each.get("tool_call_id") or "", _text(each))
    tools = [part for part in parts if part["type"] == "tool"]
    for at, call in enumerate(calls_of(message)):
        part = tools[at] if at < len(tools) else {}
        data, state = _object(part.get("data")), part.get("state") or ""
        title = " ".join((part.get("title") or call["function"]["name"]).split()) or "?"
        took = f"{data['seconds']:.1f} s" if data.get("seconds") is not None else ""
        texts = [_arguments(call["function"]["arguments"]), outputs.get(call["id"], "")]
        summary = _joined(title, took, "" if state == "completed" else state)
        diff = _object(data.get("details")).get("diff") or ""
        yield Block([*filter(None, texts)], summary, diff, state == "failed")


def _arguments(sent: str) -> str:
    """One line for each argument; what is no object as it was sent."""
    arguments = loaded(sent)
    if not isinstance(arguments, dict):
        return sent
    texts = {name: json.dumps(value, ensure_ascii=False) for name, value in arguments.items()}
    texts |= {name: value for name, value in arguments.items() if isinstance(value, str)}
    return "\n".join(f"{name}: {text}" for name, text in texts.items())


# ---- Markdown ----------------------------------------------------------------------------------


def _markdown(heading: str, facts: str, entries: Sequence[Entry]) -> str:
    pieces = [f"# {heading}", facts]
    for entry in entries:
        pieces.append(f"## {entry.head}" if entry.blocks else f"---\n\n*{entry.head}*")
        pieces += [_piece(block, entry.kind != "assistant") for block in entry.blocks]
    return "\n\n".join(filter(None, pieces)).translate(CONTROL) + "\n"


def _piece(block: Block, quoted: bool) -> str:
    if block.summary:
        inside = [
            *map(_fenced, block.texts),
            *([_fenced(block.diff, "diff")] if block.diff else []),
        ]
        summary = f"<details><summary>{html.escape(block.summary)}</summary>"
        return "\n\n".join([summary, *inside, "</details>"])
    [text] = block.texts
    if block.failed:
        return f"**{text}**"
    return "\n".join(f"> {line}".rstrip() for line in text.split("\n")) if text and quoted else text


def _fenced(text: str, language: str = "") -> str:
    """A code block whose fence is longer than any in the text."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


# ---- HTML --------------------------------------------------------------------------------------

STYLE = """
:root { color-scheme: light dark; --dim: #777; --line: #8885; --bad: #d0453c; --good: #2c9557; }
body { margin: 1.5rem auto; max-width: 60rem; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; }
h1, summary, pre, p { overflow-wrap: anywhere; }
h1 { font-size: 1.3rem; }
h2, .facts, .note { color: var(--dim); font-size: .85rem; font-weight: normal; }
details { border: 1px solid var(--line); border-radius: 5px; margin: .35rem 0; padding: .3rem .6rem; }
pre { font: 12.5px/1.4 ui-monospace, monospace; max-height: 32rem; overflow-y: auto; }
pre, p { white-space: pre-wrap; margin: .3rem 0; }
.user { background: var(--line); border-radius: 6px; padding: .6rem .8rem; }
.gone { opacity: .65; border-left: 3px solid var(--line); padding-left: .8rem; }
.bad, .cut { color: var(--bad); } .add { color: var(--good); }
"""


def _page(heading: str, facts: str, entries: Sequence[Entry]) -> str:
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="referrer" content="no-referrer">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_escaped(heading)}</title><style>{STYLE}</style></head>\n<body>"
        f'<h1>{_escaped(heading)}</h1><p class="facts">{_escaped(facts)}</p>\n'
        f"{''.join(map(_section, entries))}</body></html>\n"
    )


def _escaped(text: str) -> str:
    return html.escape(text.translate(CONTROL))


def _section(entry: Entry) -> str:
    if not entry.blocks:
        return f'<p class="note">{_escaped(entry.head)}</p>\n'
    css = entry.kind if entry.active else f"{entry.kind} gone"
    inside = "".join(map(_element, entry.blocks))
    return f'<section class="{css}"><h2>{_escaped(entry.head)}</h2>{inside}</section>\n'


def _element(block: Block) -> str:
    css = ' class="bad"' if block.failed else ""
    if not block.summary:
        return f"<p{css}>{_escaped(block.texts[0])}</p>"
    colours = {"+": ' class="add"', "-": ' class="cut"'}
    lines = block.diff.splitlines() if block.diff else []
    spans = [f"<span{colours.get(line[:1], '')}>{_escaped(line)}\n</span>" for line in lines]
    texts = [*map(_escaped, block.texts), *(["".join(spans)] if spans else [])]
    inside = "".join(f"<pre>{text}</pre>" for text in texts)
    return f"<details><summary{css}>{_escaped(block.summary)}</summary>{inside}</details>"
