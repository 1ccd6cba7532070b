"""Export: a session as Markdown or as one HTML page for people, as JSON for programs.

    text = export(store, session_id, "md", redact=redactor(api_key))

It has all messages ever, also those that a compaction has replaced, which are marked. The page needs no
script and no network, and its policy allows neither; whatever a model or a tool wrote is text on it.
Secrets are removed from every format.
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
from itertools import chain, repeat, takewhile
from typing import Any, Literal

from coder.history import calls_of, checked_message, text_of
from coder.permissions.redact import REMOVED, Redactor, redacted, without_secrets
from coder.providers.profiles import REASONING, THINK
from coder.sessions.store import Store, loaded
from coder.tools.secrets import is_secret
from coder.types import Message

Format = Literal["md", "html", "json"]
Redact = Callable[[str], str]
JSON_COLUMNS = {"data", "error", "tokens"}
LINK = re.compile("https?://|mailto:", re.I)
CONTROL = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {0x09, 0x0A})  # not allowed in HTML


def redactor(*secrets: str) -> Redact:
    """Removes these values, secrets of the environment (by their names), and what looks like a secret."""
    own = (value for name, value in os.environ.items() if is_secret(name))
    known = Redactor(*secrets, *own, instead=REMOVED)
    return lambda text: without_secrets(known.text(text))


def export(store: Store, session_id: str, format: Format, redact: Redact | None = None) -> str:  # noqa: A002 (its name everywhere)
    """The text of a file. Raises StoreError."""
    redact, info = redact or redactor(), store.get(session_id)
    parts = _rows(store, "part WHERE session = ? ORDER BY id", info.id)
    messages = _rows(store, "message WHERE session = ? ORDER BY position", info.id)
    of_message = defaultdict[int, list[dict[str, Any]]](list)
    for part in parts:
        of_message[part["message"]].append(part)
    for row in messages:
        row["parts"] = of_message[row["id"]]
    todos = store.rows("SELECT text, status FROM todo WHERE session = ?", info.id)
    stored = {"session": asdict(info), "messages": messages, "todos": [*map(dict, todos)]}
    whole = redacted(stored, redact)
    if format == "json":
        return json.dumps(whole, ensure_ascii=False, indent=2) + "\n"
    heading = " ".join(redact(info.title or info.first[:80] or f"Session {info.id}").split())
    usage, times = info.usage, f"{_format_time(info.created)} to {_format_time(info.updated)}"
    used = f"{usage.input:,} tokens in ({usage.cached:,} cached), {usage.output:,} out"
    cost = f"${usage.cost:.4f}" if usage.cost is not None else ""
    facts = redact(_join_facts(info.id, info.model, info.directory, times, used, cost))
    pieces = [("title", heading), ("facts", facts), *_pieces(whole["messages"])]
    if format == "md":
        written = (FORMS[form][0](text) for form, text in pieces if text)
        text = "\n\n".join(filter(None, written)) + "\n"
    else:
        body = "".join(FORMS[form][1](text) for form, text in pieces if text)
        text = PAGE.format(html.escape(heading), body)
    return text.translate(CONTROL)


def _rows(store: Store, which: str, session_id: str) -> list[dict[str, Any]]:
    """Rows of a table, with the values of their JSON."""
    rows = map(dict, store.rows(f"SELECT * FROM {which}", session_id))
    return [row | {name: loaded(row[name]) for name in JSON_COLUMNS & row.keys()} for row in rows]


def _format_time(time: int) -> str:
    """Local time."""
    return datetime.fromtimestamp(time / 1000).strftime("%Y-%m-%d %H:%M:%S") if time else ""


def _join_facts(*facts: str) -> str:
    return " · ".join(filter(None, facts))


# ---- the transcript: pieces, each with the name of a form -----------------------------------------

Pieces = Iterator[tuple[str, str]]


def _pieces(rows: Sequence[dict[str, Any]]) -> Pieces:
    """Results stand with their calls, and a compaction is a note of its own."""
    read = [(row, message) for row in rows if (message := checked_message(row["data"])) is not None]
    for place, (row, message) in enumerate(read):
        for part in row["parts"]:
            if part["type"] == "compaction":
                data = part["data"] or {}
                before, after = data.get("before") or {}, data.get("after") or {}
                figures = [f"{before[name]:,} → {after.get(name, 0):,} {name}" for name in before]
                shown = ", ".join([str(data.get("trigger")), *figures])
                yield "note", f"The conversation was shortened here ({shown})."
        if message["role"] == "tool":
            continue
        meta, tokens, error = message.get("meta", {}), row["tokens"], row["error"]
        kind = "summary" if meta.get("summary") else message["role"]
        used = f"{tokens['input']:,} in, {tokens['output']:,} out" if tokens else ""
        gone = "" if row["active"] else "no longer sent to the model"
        yield "section", f"{re.sub('[^a-z]', '', kind)}{' gone' if gone else ''}"
        yield (
            "head",
            _join_facts(kind.capitalize(), _format_time(meta.get("timestamp") or 0), used, gone),
        )
        thoughts = (message.get(name) for name in (*REASONING, THINK))
        for thought in [each for each in thoughts if each and isinstance(each, str)][:1]:
            yield from [("fold", "Thoughts"), ("code", thought), ("end fold", "-")]
        yield "said" if kind == "assistant" else "quoted", _text(message)
        following = (read[at][1] for at in range(place + 1, len(read)))
        yield from _calls(row["parts"], message, following)
        if error:
            stopped = f"Stopped ({error.get('stop_reason')}): {error.get('message')}"
            yield "stopped", " ".join(stopped.split())
        yield "end section", "-"


def _calls(
    parts: Sequence[dict[str, Any]], message: Message, following: Iterable[Message]
) -> Pieces:
    """The calls of an answer with their results. The first result of a call is the original, a later one shortened."""
    outputs: dict[str, str] = {}
    for each in takewhile(lambda each: each["role"] != "assistant", following):
        if each["role"] == "tool":
            outputs.setdefault(each.get("tool_call_id") or "", _text(each))
    tools = (part for part in parts if part["type"] == "tool")
    for call, part in zip(calls_of(message), chain(tools, repeat({}))):
        data, state = part.get("data") or {}, part.get("state") or ""
        title = " ".join((part.get("title") or call["function"]["name"]).split()) or "?"
        took = f"{data['seconds']:.1f} s" if data.get("seconds") is not None else ""
        yield "fold", _join_facts(title, took, "" if state == "completed" else state)
        yield "code", _arguments(call["function"]["arguments"])
        yield "code", outputs.get(call["id"], "")
        details = data.get("details")
        diff = details.get("diff") if isinstance(details, dict) else ""
        yield "diff", diff if isinstance(diff, str) else ""  # a plugin may put anything there
        yield "end fold", "-"


def _text(message: Message) -> str:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    kinds = [str(part.get("type")).removesuffix("_url") for part in parts]
    attached = [f"[{kind}]" for kind in kinds if kind != "text"]
    return "\n".join(filter(None, [text_of(message), *attached]))


def _arguments(sent: str) -> str:
    """One line for each argument; what is no object as it was sent."""
    arguments = loaded(sent)
    if not isinstance(arguments, dict):
        return sent
    texts = (
        each if isinstance(each, str) else json.dumps(each, ensure_ascii=False)
        for each in arguments.values()
    )
    return "\n".join(map(": ".join, zip(arguments, texts)))


# ---- the forms ------------------------------------------------------------------------------------


def _fence(text: str, language: str = "") -> str:
    """A code block whose fence is longer than any in the text."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def _colour_diff(diff: str) -> str:
    colours = {"+": ' class="add"', "-": ' class="cut"'}
    return "".join(
        f"<span{colours.get(line[:1], '')}>{line}\n</span>" for line in diff.splitlines()
    )


@cache
def _renderer() -> Callable[[str], str]:
    """What makes HTML of a model's Markdown, which nobody has to trust: none of its HTML, links to pages alone, no image."""
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
