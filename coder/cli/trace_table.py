"""A trace as tables for the terminal: one for each run, a row for each step, and one for all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coder.devtools.trace_file import Recording, Run
from coder.devtools.trace_page import COLUMNS, WORDS, seconds
from coder.permissions.sanitize import strip_controls

if TYPE_CHECKING:
    from rich.table import Table

ANY_WIDTH = 1000  # columns, where stdout is no screen
MAX_WHY = 300  # characters of the line that says why a run stopped


def tables(recording: Recording) -> str:
    """All runs, as wide as the terminal that stdout is, or as plain text."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = ANY_WIDTH
    with console.capture() as capture:
        for number, run in enumerate(recording.runs, 1):
            model = "an unknown model"
            if run.model:
                model = f"{run.model['name']} at {run.model['address'] or 'the default server'}"
            title = f"run {number} of {len(recording.runs)}"
            heading = f"{title} · {model} · {seconds(run.figures.wall)} s"
            console.print(one_line(heading), style="bold")
            console.print(_table(run, console.is_terminal))
            console.print(one_line(run.why[:MAX_WHY]), end="\n\n")
        if not recording.runs:
            console.print("There is no run in it.")
        if recording.cut:
            console.print("A line was cut: the program was killed while it wrote.")
    return "\n".join(line.rstrip() for line in capture.get().split("\n"))


def _table(run: Run, narrow: bool) -> Table:
    """The table of a run; a narrow one has no columns that hold nothing."""
    from rich.table import Table

    figures = [step.figures for step in run.steps] + [run.figures]
    columns = {name: [show(each) for each in figures] for name, show in COLUMNS.items()}
    if narrow:
        columns = {name: cells for name, cells in columns.items() if {*cells} - {"", "0.00"}}
    table = Table(box=None, padding=(0, 1 if narrow else 2, 0, 0), header_style="dim")
    table.add_column("step", justify="right", no_wrap=True)
    for name in columns:
        if name in WORDS:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    steps = [*(str(step.number) for step in run.steps), "all"]
    for step, *cells in zip(steps, *columns.values()):
        table.add_row(step, *map(one_line, cells), style="bold" if step == "all" else "")
    return table


def one_line(text: str) -> str:
    return " ".join(strip_controls(text).split())
