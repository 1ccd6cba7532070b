"""`python -m coder trace FILE`: a recorded run as a table of its steps, or as a page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from coder.cli.config import ConfigError
from coder.cli.flags import Flags, program
from coder.devtools.trace_file import Recording, Run, TraceError, read, understood
from coder.devtools.trace_page import COLUMNS, MEANING, WORDS, page, seconds, write_private
from coder.permissions.sanitize import strip_controls

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

ANY_WIDTH = 1000  # columns, where stdout is no screen
LONGEST = 300  # characters of the line that says why a run stopped


def main(argv: list[str]) -> int:
    """Run the subcommand. Raises ConfigError for a file that cannot be read, written or understood."""
    flags = Flags(
        prog=f"{program()} trace",
        description="A run that was recorded with --trace FILE, step by step.",
        epilog=MEANING,
    )
    flags.add_argument("file", metavar="FILE")
    flags.add_argument(
        "--html",
        metavar="OUT",
        help="write one page with every message instead; it needs no network",
    )
    arguments = flags.parse_args(argv)
    try:
        recording = read(arguments.file)
        shown = _page(recording, arguments) if arguments.html else _tables(recording)
    except OSError as error:
        raise ConfigError(
            _line(f"{error.filename or arguments.html or arguments.file}: {error.strerror}")
        ) from None
    except TraceError as error:
        raise ConfigError(_line(f"{arguments.file}: {error}")) from None
    sys.stdout.write(shown)
    sys.stdout.flush()
    return 0


def _page(recording: Recording, arguments: argparse.Namespace) -> str:
    if Path(arguments.html).exists() and Path(arguments.html).samefile(arguments.file):
        raise TraceError("the page cannot be written over its own trace")
    with understood():
        text = page(recording, Path(arguments.file).name)
    write_private(Path(arguments.html), text)
    return strip_controls(arguments.html) + "\n"


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
    model = "an unknown model"
    if run.model:
        model = f"{run.model['name']} at {run.model['address'] or 'the default server'}"
    console.print(_line(f"{title} · {model} · {seconds(run.figures.wall)} s"), style="bold")
    rows = [(str(step.number), step.figures) for step in run.steps]
    cells = [
        [number, *(show(figures) for show in COLUMNS.values())]
        for number, figures in [*rows, ("all", run.figures)]
    ]
    table, wide = _table(cells), console.options.update(max_width=ANY_WIDTH)
    if console.measure(table, options=wide).maximum > console.width:
        table = _table(cells, narrow=True)
    console.print(table)
    console.print(_line(run.why[:LONGEST]))
    console.print()


def _table(cells: list[list[str]], narrow: bool = False) -> Table:
    """A row for each list of cells; `narrow`: without the columns that hold nothing."""
    from rich.table import Table

    columns = list(zip(["step", *COLUMNS], *cells))
    if narrow:
        columns = [column for column in columns if not {*column[1:]} <= {"", "0.00"}]
    table = Table(box=None, padding=(0, 1 if narrow else 2, 0, 0), header_style="dim")
    for heading, *_ in columns:
        if heading in WORDS:
            table.add_column(heading, overflow="fold")
        else:
            table.add_column(heading, justify="right", no_wrap=True)
    *rows, last = zip(*(column[1:] for column in columns))
    for row in rows:
        table.add_row(*map(_line, row))
    table.add_row(*map(_line, last), style="bold")
    return table


def _line(text: str) -> str:
    """In one line, cleaned."""
    return " ".join(strip_controls(text).split())
