"""`python -m coder trace FILE`: a recorded run as a table of its steps, or as a page.

What it leaves out: reading the file and its figures (features/trace_file.py), the page itself (features/trace_page.py).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from coder.features.trace_file import COLUMNS, MEANING, Recording, Run, TraceError, read, seconds, understood
from coder.terminal.config import ConfigError
from coder.terminal.flags import Flags
from coder.text import clean

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

LEFT = {"finish", "called"}  # columns of words
ANY_WIDTH = 1000  # columns, where nobody looks at a screen
LONGEST = 300  # characters of the line that says why a run stopped


def main(argv: list[str]) -> int:
    """Run the subcommand. Raises ConfigError for a file that cannot be read, written or understood."""
    flags = Flags(prog="python -m coder trace", description="A run that was recorded with --trace FILE, step by step.", epilog=MEANING)
    flags.add_argument("file", metavar="FILE")
    flags.add_argument("--html", metavar="OUT", help="write one page with a timeline and every message instead; it needs no network")
    arguments = flags.parse_args(argv)
    try:
        recording = read(arguments.file)
        shown = _page(recording, arguments) if arguments.html else _tables(recording)
    except OSError as error:
        raise ConfigError(_line(f"{error.filename or arguments.file}: {error.strerror}")) from None
    except TraceError as error:
        raise ConfigError(_line(f"{arguments.file}: {error}")) from None
    sys.stdout.write(shown)
    sys.stdout.flush()
    return 0


def _page(recording: Recording, arguments: argparse.Namespace) -> str:
    from coder.features.trace_page import page, write_private

    if Path(arguments.html).exists() and Path(arguments.html).samefile(arguments.file):
        raise TraceError("the page cannot be written over its own trace")
    with understood():
        text = page(recording, Path(arguments.file).name)
    write_private(Path(arguments.html), text)
    return clean(arguments.html) + "\n"


def _tables(recording: Recording) -> str:
    """All runs, for the terminal that stdout is, or as plain text."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = ANY_WIDTH
    with console.capture() as capture, understood():
        for number, run in enumerate(recording.runs, 1):
            _show(console, run, f"run {number} of {len(recording.runs)}")
        if not recording.runs:
            console.print("There is no run in it.")
        if recording.cut:
            console.print("A line was cut: the program was killed while it wrote.")
    return "\n".join(line.rstrip() for line in capture.get().split("\n"))


def _show(console: Console, run: Run, title: str) -> None:
    model = f"{run.model.get('name', '')} at {run.model.get('address') or 'the default server'}" if run.model else "an unknown model"
    console.print(_text(f"{title} · {model} · {seconds(run.figures.wall)} s", "bold"))
    rows = [(str(step.number), step.figures) for step in run.steps]
    cells = [[number, *(show(figures) for show in COLUMNS.values())] for number, figures in [*rows, ("all", run.figures)]]
    console.print(_fitting(console, ["step", *COLUMNS], cells))
    console.print(_text(run.why[:LONGEST]))
    console.print()


def _fitting(console: Console, headings: list[str], cells: list[list[str]]) -> RenderableType:
    """A table; on a screen that is too narrow for it, without the columns that hold nothing."""
    table = _table(headings, cells)
    if console.measure(table, options=console.options.update(max_width=ANY_WIDTH)).maximum <= console.width:
        return table
    nothing = {"", "0.00"}
    held = [place for place in range(len(headings)) if not {row[place] for row in cells} <= nothing]
    return _table([headings[place] for place in held], [[row[place] for place in held] for row in cells], gap=1)


def _table(headings: list[str], cells: list[list[str]], gap: int = 2) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, gap, 0, 0), header_style="dim")
    for heading in headings:
        words = heading in LEFT
        table.add_column(heading, justify="left" if words else "right", no_wrap=not words, overflow="fold" if words else "ellipsis")
    for number, row in enumerate(cells, 1):
        table.add_row(*map(_text, row), style="bold" if number == len(cells) else "")
    return table


def _text(text: str, style: str = "") -> RenderableType:
    """A line of anybody's text: no markup in it."""
    from rich.text import Text

    return Text(_line(text), style)


def _line(text: str) -> str:
    """In one line, cleaned."""
    return " ".join(clean(text).split())
