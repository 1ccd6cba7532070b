"""The figures of a step in a trace, how its time is divided, and the table that shows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

Kind = Literal["waits", "hooks", "model", "tools", "own"]
KINDS: tuple[Kind, ...] = ("waits", "hooks", "model", "tools", "own")  # the first has an overlap


@dataclass(frozen=True)
class Span:
    """What took time, from when to when."""

    kind: Kind
    start: float
    end: float
    title: str


@dataclass(frozen=True)
class Figures:
    """A step in numbers, or a whole run. `seconds` by kind add up to `wall`; "own" is this
    program's own work."""

    seconds: dict[Kind, float]
    wall: float
    messages: int = 0  # of the last request
    new: int = 0  # since the step before
    size: int = 0  # bytes of the requests
    same: float | None = None
    input: int = 0
    cached: int = 0
    output: int = 0
    first: float | None = None
    retries: int = 0
    finish: str = ""
    called: list[str] = field(default_factory=list)


SUMS = ("new", "size", "input", "cached", "output", "retries")  # of the steps, for a run


def shares(spans: list[Span], start: float, end: float) -> dict[Kind, float]:
    """The seconds from `start` to `end`, each moment given to one kind."""
    inner = {edge for span in spans for edge in (span.start, span.end) if start < edge < end}
    seconds = dict.fromkeys(KINDS, 0.0)
    for left, right in pairwise(sorted({start, end, *inner})):
        covering = {span.kind for span in spans if span.start <= left and span.end >= right}
        seconds[next((kind for kind in KINDS if kind in covering), "own")] += right - left
    return seconds


# What the columns of a table of steps are called, and what they show.
COLUMNS: dict[str, Callable[[Figures], str]] = {
    "messages": lambda f: f"{f.messages} {f.new:+}" if f.messages else "",
    "bytes": lambda f: short(f.size),
    "same": lambda f: "" if f.same is None else f"{int(100 * f.same)} %",
    "in": lambda f: short(f.input),
    "cached": lambda f: short(f.cached),
    "out": lambda f: short(f.output),
    "first": lambda f: "" if f.first is None else seconds(f.first),
    "model": lambda f: seconds(f.seconds["model"]),
    "tools": lambda f: seconds(f.seconds["tools"]),
    "hooks": lambda f: seconds(f.seconds["hooks"]),
    "waits": lambda f: seconds(f.seconds["waits"]),
    "own": lambda f: seconds(f.seconds["own"]),
    "retries": lambda f: str(f.retries or ""),
    "finish": lambda f: f.finish,
    "called": lambda f: counted(f.called),
}
WORDS = ("finish", "called")  # the columns that hold words
MEANING = (
    "messages: of the request, and how many more than the step before · "
    "same: how much of that step's messages begins this request unchanged, which is what a "
    "provider's cache can hold · in, cached, out: tokens · "
    "first: seconds to the first byte of the answer · "
    "model, tools, hooks, waits (for another attempt, for a person) and own (this program's work): "
    "seconds, which add up"
)


def short(number: int) -> str:
    """A number for a narrow column: 950, 1.2k, 34k, 5.6M; "" for none."""
    for unit, size in (("M", 1_000_000), ("k", 1_000)):
        if number >= size:
            return f"{number / size:.{1 if number < 10 * size else 0}f}{unit}"
    return str(number or "")


def seconds(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def counted(names: list[str]) -> str:
    """read ×2, bash"""
    return ", ".join(
        name if names.count(name) == 1 else f"{name} ×{names.count(name)}"
        for name in dict.fromkeys(names)
    )
