"""Spans of time as a drawing: an axis with seconds, and a row for each kind of span. SVG, for a page without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LABELS, ROW, AXIS = 1000, 80, 22, 18  # units of the drawing; of the labels on the left
TICKS = 5
LEAST = 1.5  # units of a bar: what took no time is seen, too
STYLE = """
svg { display: block; width: 100%; font: 11px system-ui; margin: .5rem 0 }
svg text { fill: #777 } svg .tick { text-anchor: middle } svg line { stroke: #8885 }
rect { fill: #3b76d8 } .first { fill-opacity: .4 } .tools { fill: #2f9e63 }
.sub-agents { fill: #b065d6 } .waits { fill: #e0962a }
"""


@dataclass(frozen=True)
class Span:
    """What took from `begin` to `end`, in seconds. `kind` names its row, `look` its class in the style, `link` the id of
    what it leads to."""

    kind: str
    look: str
    title: str
    begin: float
    end: float
    link: str


def draw(spans: Sequence[Span], begin: float, end: float) -> str:
    """The drawing of all spans between two times, rows in the order in which their kinds come; "" without a span."""
    kinds = list(dict.fromkeys(each.kind for each in spans))
    if not kinds:
        return ""
    scale = (WIDTH - LABELS) / max(end - begin, 1e-6)
    height = ROW * len(kinds)
    parts = []
    for tick in range(TICKS):
        seconds = (end - begin) * tick / TICKS
        x = LABELS + seconds * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}"/>')
        label = f'<text class="tick" x="{x:.1f}" y="{height + 13}">{seconds:.2f} s</text>'
        parts.append(label)
    for number, kind in enumerate(kinds):
        parts.append(f'<text x="0" y="{ROW * number + 15}">{escape(kind)}</text>')
    for each in spans:
        x = LABELS + (each.begin - begin) * scale
        width = max(LEAST, (each.end - each.begin) * scale)
        y = ROW * kinds.index(each.kind) + 3
        place = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 6}"'
        title = f"<title>{escape(each.title)} · {each.end - each.begin:.3f} s</title>"
        bar = f'<rect class="{each.look}" {place}>{title}</rect>'
        parts.append(f'<a href="#{escape(each.link)}">{bar}</a>')
    box = f"0 0 {WIDTH + LABELS // 4} {height + AXIS}"
    return f'<svg role="img" viewBox="{box}">{"".join(parts)}</svg>\n'
