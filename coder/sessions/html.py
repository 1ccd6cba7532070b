"""Pages without scripts: elements, escaping, and the frame of a page (an export, a trace).

A page's policy allows no network and no script: folding is the browser's own. Whatever a model or a
tool wrote is text on it, since only what `tag` has made is markup.
"""

from __future__ import annotations

import base64
import hashlib
import html

CONTROL = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {0x09, 0x0A})  # not allowed in HTML

STYLE = """
:root { color-scheme: light dark; --ink: #1b1d21; --dim: #666c75; --paper: #fff; --line: #d9dce1;
  --box: #f5f6f8; --bad: #c8342b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e6ea; --dim: #9aa1ac; --paper: #16181c;
  --line: #363b44; --box: #1f2228; --bad: #f0786f; } }
body { margin: 1.5rem auto; max-width: 75rem; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif;
  color: var(--ink); background: var(--paper); }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; }
details { border: 1px solid var(--line); border-radius: 5px; margin: .35rem 0; }
details > :not(summary) { margin: .4rem .6rem; }
summary { cursor: pointer; padding: .3rem .6rem; overflow-wrap: anywhere; }
pre { font: 12.5px/1.4 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  max-height: 32rem; overflow-y: auto; }
.bad { color: var(--bad); }
"""


class Markup(str):
    """HTML that needs no escaping."""


def tag(name: str, *children: str, **attributes: object) -> Markup:
    """An element. Children are text, unless they are Markup; `class_` is the attribute class."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escaped(str(value))}"'
        for key, value in attributes.items()
    )
    return Markup(f"<{name}{written}>{''.join(map(_escaped, children))}</{name}>")


def _escaped(text: str) -> str:
    return text if isinstance(text, Markup) else html.escape(text.translate(CONTROL))


def html_page(title: str, style: str, *body: Markup) -> str:
    """A whole page; `style` is CSS of its own, behind that of all pages."""
    style = STYLE + style
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="referrer" content="no-referrer">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        tag("title", title),
        f"<style>{style}</style>",
    ]
    content = tag("head", *map(Markup, head)), tag("body", *body)
    return f"<!doctype html>\n{tag('html', *content, lang='en')}\n"
