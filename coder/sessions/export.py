"""Export: a session as Markdown or as one HTML page for people, as JSON for programs.

    text = export(store, session_id, "md", redact=redactor(api_key))

It has all messages ever, also those that a compaction has replaced, which are marked. The page
needs no script and no network, and its policy allows neither; whatever a model or a tool wrote is
text on it. Secrets are removed from every format.
"""

from __future__ import annotations

import html
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import cache
from itertools import islice
from typing import Any, Literal, assert_never

from coder.history import calls_of, checked_message, text_of
from coder.permissions.redact import REMOVED, Redactor, redacted, without_secrets
from coder.providers.profiles import REASONING, THINK
from coder.sessions.store import SessionInfo, Store, loaded
from coder.tools.secrets import is_secret
from coder.types import Message

Format = Literal["md", "html", "json"]
Redact = Callable[[str], str]
JSON_COLUMNS = {"data", "error", "tokens"}
LINK = re.compile("https?://|mailto:", re.I)
CONTROL = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {0x09, 0x0A})  # not allowed in HTML


def redactor(*secrets: str) -> Redact:
    """Removes these values, secrets of the environment (by name), and what looks like a secret."""
    own = (value for name, value in os.environ.items() if is_secret(name))
    known = Redactor(*secrets, *own, instead=REMOVED)
    return lambda text: without_secrets(known.text(text))


def export(
    store: Store,
    session_id: str,
    format: Format,  # noqa: A002 (its name everywhere)
    redact: Redact | None = None,
) -> str:
    """The text of a file. Raises StoreError."""
    redact = redact or redactor()
    info = store.get(session_id)
    stored = redacted(_read(store, info), redact)
    if format == "json":
        return json.dumps(stored, ensure_ascii=False, indent=2) + "\n"
    title = info.title or info.first[:80] or f"Session {info.id}"
    heading = " ".join(redact(title).split())
    pieces = [
        ("title", heading),
        ("facts", redact(_facts(info))),
        *_pieces(stored["messages"]),
    ]
    shown = [(FORMS[form], text) for form, text in pieces if text]
    if format == "md":
        blocks = [markdown(text) for (markdown, _), text in shown]
        document = "\n\n".join(block for block in blocks if block) + "\n"
    elif format == "html":
        body = "".join(page(text) for (_, page), text in shown)
        document = PAGE.format(html.escape(heading), body)
    else:
        assert_never(format)
    return document.translate(CONTROL)


def _read(store: Store, info: SessionInfo) -> dict[str, Any]:
    """All that is stored of a session, each message with its parts."""
    messages = _rows(store, "message WHERE session = ? ORDER BY position", info.id)
    parts = _rows(store, "part WHERE session = ? ORDER BY id", info.id)
    parts_of = defaultdict[int, list[dict[str, Any]]](list)
    for part in parts:
        parts_of[part["message"]].append(part)
    for row in messages:
        row["parts"] = parts_of[row["id"]]
    todos = store.rows("SELECT text, status FROM todo WHERE session = ?", info.id)
    return {
        "session": asdict(info),
        "messages": messages,
        "todos": [dict(todo) for todo in todos],
    }


def _facts(info: SessionInfo) -> str:
    """The line below the title."""
    usage = info.usage
    times = f"{_format_time(info.created)} to {_format_time(info.updated)}"
    used = f"{usage.input:,} tokens in ({usage.cached:,} cached), {usage.output:,} out"
    cost = ""
    if usage.cost is not None:
        cost = f"${usage.cost:.4f}"
    return _join_facts(info.id, info.model, info.directory, times, used, cost)


def _rows(store: Store, which: str, session_id: str) -> list[dict[str, Any]]:
    """Rows of a table, with the values of their JSON."""
    rows = [dict(row) for row in store.rows(f"SELECT * FROM {which}", session_id)]
    for row in rows:
        for name in JSON_COLUMNS & row.keys():
            row[name] = loaded(row[name])
    return rows


def _format_time(time: int) -> str:
    """Local time."""
    return datetime.fromtimestamp(time / 1000).strftime("%Y-%m-%d %H:%M:%S") if time else ""


def _join_facts(*facts: str) -> str:
    return " · ".join(fact for fact in facts if fact)


# ---- the transcript: pieces, each with the name of a form ----------------------------------------

Pieces = Iterator[tuple[str, str]]  # those without a text are left out
END = "-"  # the text of a piece that has none to show


def _pieces(rows: Sequence[dict[str, Any]]) -> Pieces:
    """Results are shown with their calls, and a compaction is a note of its own."""
    read = []
    for row in rows:
        message = checked_message(row["data"])
        if message is not None:
            read.append((row, message))
    for index, (row, message) in enumerate(read):
        for part in row["parts"]:
            if part["type"] == "compaction":
                yield "note", _compaction(part["data"] or {})
        if message["role"] != "tool":
            following = (later for _, later in islice(read, index + 1, None))
            yield from _section(row, message, following)


def _compaction(data: dict[str, Any]) -> str:
    """What a compaction has done to the conversation, with its figures."""
    before = data.get("before") or {}
    after = data.get("after") or {}
    facts = [str(data.get("trigger"))]
    for name, count in before.items():
        facts.append(f"{count:,} → {after.get(name, 0):,} {name}")
    return f"The conversation was shortened here ({', '.join(facts)})."


def _section(row: dict[str, Any], message: Message, following: Iterable[Message]) -> Pieces:
    """A message that is no result, with the messages after it."""
    meta = message.get("meta", {})
    kind = "summary" if meta.get("summary") else message["role"]
    css_class = re.sub("[^a-z]", "", kind)
    gone = ""
    if not row["active"]:
        gone = "no longer sent to the model"
        css_class += " gone"
    used = ""
    if row["tokens"]:
        used = f"{row['tokens']['input']:,} in, {row['tokens']['output']:,} out"
    time = _format_time(meta.get("timestamp") or 0)
    yield "section", css_class
    yield "head", _join_facts(kind.capitalize(), time, used, gone)
    thought = _thought(message)
    if thought:
        yield "fold", "Thoughts"
        yield "code", thought
        yield "end fold", END
    yield "said" if kind == "assistant" else "quoted", _text(message)
    yield from _calls(row["parts"], message, following)
    error = row["error"]
    if error:
        stopped = f"Stopped ({error.get('stop_reason')}): {error.get('message')}"
        yield "stopped", " ".join(stopped.split())
    yield "end section", END


def _thought(message: Message) -> str:
    """The first of the fields for reasoning that has text."""
    for name in (*REASONING, THINK):
        thought = message.get(name)
        if thought and isinstance(thought, str):
            return thought
    return ""


def _calls(
    parts: Sequence[dict[str, Any]], message: Message, following: Iterable[Message]
) -> Pieces:
    """The calls of an answer with their results."""
    outputs = _outputs(following)
    tools = (part for part in parts if part["type"] == "tool")
    for call in calls_of(message):
        part = next(tools, {})
        data = part.get("data") or {}
        yield "fold", _call_title(call["function"]["name"], part, data)
        yield "code", _arguments(call["function"]["arguments"])
        yield "code", outputs.get(call["id"], "")
        details = data.get("details")
        diff = details.get("diff") if isinstance(details, dict) else None
        if isinstance(diff, str):  # a plugin may put anything there
            yield "diff", diff
        yield "end fold", END


def _outputs(following: Iterable[Message]) -> dict[str, str]:
    """The results up to the next answer, by the id of their call.

    The first result of a call is the original, a later one was shortened.
    """
    outputs: dict[str, str] = {}
    for message in following:
        if message["role"] == "assistant":
            break
        if message["role"] == "tool":
            outputs.setdefault(message.get("tool_call_id") or "", _text(message))
    return outputs


def _call_title(name: str, part: dict[str, Any], data: dict[str, Any]) -> str:
    title = " ".join((part.get("title") or name).split()) or "?"
    seconds = data.get("seconds")
    took = "" if seconds is None else f"{seconds:.1f} s"
    state = part.get("state") or ""
    if state == "completed":
        state = ""
    return _join_facts(title, took, state)


def _text(message: Message) -> str:
    """The text of a message, and a line for each part that is none."""
    text = text_of(message)
    lines = [text] if text else []
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            kind = str(part.get("type")).removesuffix("_url")
            if kind != "text":
                lines.append(f"[{kind}]")
    return "\n".join(lines)


def _arguments(sent: str) -> str:
    """A line for each argument; what is not an object as it was sent."""
    arguments = loaded(sent)
    if not isinstance(arguments, dict):
        return sent
    lines = []
    for name, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines.append(f"{name}: {text}")
    return "\n".join(lines)


# ---- the forms -----------------------------------------------------------------------------------


def _fence(text: str, language: str = "") -> str:
    """A code block whose fence is longer than any in the text."""
    runs = re.findall("`+", text)
    longest = max(map(len, runs), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _colour_diff(diff: str) -> str:
    colours = {"+": ' class="add"', "-": ' class="cut"'}
    spans = []
    for line in diff.splitlines():
        colour = colours.get(line[:1], "")
        spans.append(f"<span{colour}>{line}\n</span>")
    return "".join(spans)


@cache
def _renderer() -> Callable[[str], str]:
    """What makes HTML of a model's Markdown, which nobody has to trust.

    None of its HTML is kept and no image; its links lead to pages only.
    """
    try:
        from markdown_it import MarkdownIt  # late: for a page only; rich brings it
    except ImportError:
        return _tag("<p>{}</p>")
    options = {"html": False, "breaks": True, "maxNesting": 100}
    renderer = MarkdownIt("commonmark", options).enable(["table", "strikethrough"])
    renderer.disable("image")  # its address stays a link
    renderer.validateLink = lambda url: bool(LINK.match(url))  # type: ignore[method-assign]
    return lambda text: f'<div class="said">{renderer.render(text)}</div>'


def _tag(form: str) -> Callable[[str], str]:
    return lambda text: form.format(html.escape(text))


# Of each piece: as Markdown; as HTML
FORMS: dict[str, tuple[Callable[[str], str], Callable[[str], str]]] = {
    "title": ("# {}".format, _tag("<h1>{}</h1>")),
    "facts": (str, _tag('<p class="facts">{}</p>\n')),
    "note": ("---\n\n*{}*".format, _tag('<p class="note">{}</p>\n')),
    "section": ("".format, _tag('<section class="{}">')),
    "head": ("## {}".format, _tag("<h2>{}</h2>")),
    "said": (str, lambda text: _renderer()(text)),
    "quoted": (
        lambda text: "\n".join(f"> {line}".rstrip() for line in text.split("\n")),
        _tag("<p>{}</p>"),
    ),
    "stopped": ("**{}**".format, _tag('<p class="bad">{}</p>')),
    "fold": (
        lambda text: f"<details><summary>{html.escape(text)}</summary>",
        _tag("<details><summary>{}</summary>"),
    ),
    "code": (_fence, _tag("<pre>{}</pre>")),
    "diff": (
        lambda text: _fence(text, "diff"),
        lambda text: f"<pre>{_colour_diff(html.escape(text))}</pre>",
    ),
    "end fold": ("</details>".format, _tag("</details>")),
    "end section": ("".format, _tag("</section>\n")),
}
# It holds no script and may load nothing
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="referrer" content="no-referrer">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{}</title><style>
:root {{ color-scheme: light dark; --dim: #777; --line: #8885; --bad: #d0453c; --good: #2c9557 }}
body {{ margin: 1.5rem auto; max-width: 60rem; padding: 0 1rem; font: 15px/1.5 system-ui }}
h1, summary, pre, p {{ overflow-wrap: anywhere }}
h1 {{ font-size: 1.3rem }}
h2, .facts, .note {{ color: var(--dim); font-size: .85rem; font-weight: normal }}
details {{ border: 1px solid var(--line); margin: .35rem 0; padding: .3rem .6rem }}
pre {{ font: 12.5px/1.4 ui-monospace, monospace; max-height: 32rem; overflow-y: auto }}
pre, p {{ white-space: pre-wrap; margin: .3rem 0 }}
.user {{ background: var(--line); padding: .6rem .8rem }}
.gone {{ opacity: .65; border-left: 3px solid var(--line); padding-left: .8rem }}
.said {{ overflow-wrap: anywhere }}
.said > * {{ margin: .5rem 0 }}
.said p {{ white-space: normal }}
.said :is(h1, h2, h3, h4, h5, h6) {{ color: inherit; font-size: 1rem; font-weight: bold }}
.said h1 {{ font-size: 1.15rem }}
.said code {{ font: .9em ui-monospace, monospace }}
.said pre {{ background: var(--line); padding: .5rem .7rem }}
.said pre code {{ font: inherit }}
.said table {{ border-collapse: collapse; display: block; overflow-x: auto }}
.said :is(th, td) {{ border: 1px solid var(--line); padding: .15rem .5rem }}
.said blockquote {{ border-left: 3px solid var(--line); padding-left: .8rem }}
.bad, .cut {{ color: var(--bad) }}
.add {{ color: var(--good) }}
</style></head>
<body>{}</body></html>
"""
