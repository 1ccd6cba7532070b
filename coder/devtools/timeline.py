"""Spans of time as a drawing in SVG, for a page without scripts: an axis with seconds, a row for
each kind of span.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# Lengths in units of the drawing
WIDTH = 1000
LABELS = 80  # width of the labels on the left
ROW = 22  # height of a row
AXIS = 18  # height of the axis
LEAST = 1.5  # width of a bar: what took no time is seen, too
TICKS = 5
STYLE = """
svg { display: block; width: 100%; font: 11px system-ui; margin: .5rem 0 }
svg text { fill: #777 } svg .tick { text-anchor: middle } svg line { stroke: #8885 }
rect { fill: #3b76d8 } .first { fill-opacity: .4 } .tools { fill: #2f9e63 }
.sub-agents { fill: #b065d6 } .waits { fill: #e0962a }
"""


@dataclass(frozen=True)
class Span:
    """What took from `begin` to `end`, in seconds.

    `kind` names its row, `look` its class in the style, `link` the id of what it leads to.
    """

    kind: str
    look: str
    title: str
    begin: float
    end: float
    link: str


def draw(spans: Sequence[Span], begin: float, end: float) -> str:
    """The drawing of all spans between two times, rows in the order in which their kinds come; ""
    without a span.
    """
    kinds = list(dict.fromkeys(span.kind for span in spans))
    if not kinds:
        return ""
    scale = (WIDTH - LABELS) / max(end - begin, 1e-6)
    height = ROW * len(kinds)
    parts = []
    for tick in range(TICKS):
        seconds = (end - begin) * tick / TICKS
        x = LABELS + seconds * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{height + 13}">{seconds:.2f} s</text>')
    for number, kind in enumerate(kinds):
        parts.append(f'<text x="0" y="{ROW * number + 15}">{escape(kind)}</text>')
    for span in spans:
        seconds = span.end - span.begin
        x = LABELS + (span.begin - begin) * scale
        y = ROW * kinds.index(span.kind) + 3
        width = max(LEAST, seconds * scale)
        box = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 6}"'
        title = f"<title>{escape(span.title)} · {seconds:.3f} s</title>"
        bar = f'<rect class="{span.look}" {box}>{title}</rect>'
        parts.append(f'<a href="#{escape(span.link)}">{bar}</a>')
    box = f"0 0 {WIDTH + LABELS // 4} {height + AXIS}"
    return f'<svg role="img" viewBox="{box}">{"".join(parts)}</svg>\n'
