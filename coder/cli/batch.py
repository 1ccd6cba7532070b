"""`coder batch`: many tasks from a file, with a progress bar and a table at the end."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from coder.cli.flags import Flags, parser, subcommand_flags
from coder.cli.process import INTERRUPTED, LIMIT, raise_on_sigint
from coder.cli.subcommands import without_package
from coder.doors import batch
from coder.doors.batch import Engine, Limits
from coder.doors.files import Row
from coder.doors.workspace import is_dirty
from coder.permissions.sanitize import strip_controls

ABOUT = """\
Do many tasks, each in a folder and a process of its own. TASKS has a JSON object in each line: "id"
and "prompt", and either "cwd" (a folder, which is copied) or "repo" and "commit" (which are cloned);
also "model", "max_steps", "max_seconds". RESULTS gets a row for each; tasks that have one are not
done again, so the same command goes on after Ctrl+C or a kill. Flags after -- are those of coder."""


def main(words: Sequence[str]) -> int:
    """Do the tasks; returns the exit code."""
    arguments = read_words(words)
    console = Console(stderr=True, highlight=False)
    tasks = batch.read_tasks(arguments.tasks)
    for repo in sorted({task.repo for task in tasks if task.repo and is_dirty(task.repo)}):
        console.print(
            f"{repo} has changes without a commit, which the tasks do not have", markup=False
        )
    shown = Shown(console, len(tasks))
    raise_on_sigint()
    began = time.monotonic()
    try:
        with shown.progress:
            rows = batch.run(
                tasks,
                arguments.output,
                engine=make_engine(arguments),
                flags=arguments.flags,
                limits=Limits(
                    steps=arguments.max_steps,
                    seconds=arguments.max_seconds,
                    cost=arguments.max_cost,
                ),
                total=Limits(
                    steps=arguments.total_steps,
                    seconds=arguments.total_seconds,
                    cost=arguments.total_cost,
                ),
                traces=arguments.traces or "",
                report=shown.update,
            )
    except KeyboardInterrupt:
        console.print(f"Stopped. The same command goes on: {arguments.output} has what is done.")
        return INTERRUPTED
    console.print(table_of(rows, time.monotonic() - began))
    wanted = {task.id for task in tasks}
    return 0 if wanted <= {row["id"] for row in rows} else LIMIT


def make_flags() -> Flags:
    flags = subcommand_flags("batch", ABOUT)
    flags.add_argument("tasks", metavar="TASKS", help="a file of tasks, a JSON object in each line")
    flags.add_argument(
        "-o",
        "--output",
        metavar="RESULTS",
        required=True,
        help="a file of rows",
    )
    flags.add_argument(
        "--workers",
        type=count,
        default=4,
        metavar="N",
        help="tasks at a time (4)",
    )
    flags.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="local (default), or ray: a Ray cluster",
    )
    flags.add_argument(
        "--address",
        metavar="ADDRESS",
        help="of the cluster, such as auto; without one, a cluster of this machine",
    )
    flags.add_argument("--traces", metavar="DIR", help="write the trace of each task there")
    limits = (("steps", count, "N"), ("seconds", amount, "S"), ("cost", amount, "C"))
    for scope, about in (("max", "for each task"), ("total", "for all; then none begins")):
        for name, kind, metavar in limits:
            flags.add_argument(
                f"--{scope}-{name}",
                type=kind,
                metavar=metavar,
                help=f"{name} {about}",
            )
    return flags


def read_words(words: Sequence[str]) -> argparse.Namespace:
    """The words of the command. Raises ConfigError."""
    own = list(words)
    further: list[str] = []  # flags of each task
    if "--" in own:
        at = own.index("--")
        further = own[at + 1 :]
        del own[at:]
    flags = make_flags()
    arguments = flags.parse_args(own)
    parser().parse_args(further)  # what is wrong with them is said now
    arguments.flags = further
    if Path(arguments.tasks).resolve() == Path(arguments.output).resolve():
        flags.error("TASKS and RESULTS are the same file")
    return arguments


def count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def amount(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise ValueError(text)
    return number


def make_engine(arguments: argparse.Namespace) -> Engine:
    """Where the tasks run. Raises ConfigError if a package is missing."""
    if arguments.engine == "local":
        return batch.LocalEngine(arguments.workers)
    try:
        from coder.doors.ray_engine import RayEngine  # late: the package is an extra
    except ModuleNotFoundError:
        raise without_package("--engine ray", "ray") from None
    engine: Engine = RayEngine(arguments.workers, arguments.address)
    return engine


class Shown:
    """What is seen meanwhile: on a terminal a bar with the cost and the time left, else a line a
    row."""

    def __init__(self, console: Console, tasks: int) -> None:
        self._has_begun = False
        self.progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[cost]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.bar = self.progress.add_task("", total=tasks, cost="")

    def update(self, rows: Sequence[Row]) -> None:
        cost = sum(row.get("cost") or 0.0 for row in rows)
        shown = f"cost {cost:.2f}" if cost else ""
        self.progress.update(self.bar, completed=len(rows), cost=shown)
        if self._has_begun:  # the first call brings the rows of earlier runs
            self.progress.console.print(strip_controls(line_of(rows[-1])), markup=False)
        self._has_begun = True


def line_of(row: Row) -> str:
    """One task, as it has ended."""
    steps = row.get("steps") or 0
    line = f"{row['id']}  {row['stop_reason']}  {steps} steps  {row['seconds']} s"
    if row["stop_reason"] == "error":
        line += f"  {row['text']}"
    return line


def sums_of(rows: Sequence[Row]) -> list[str]:
    """The cells of a line of the table: what these tasks took together."""
    totals = Counter[str]()
    for row in rows:
        usage = row.get("usage") or {}
        totals["input"] += usage.get("input", 0)
        totals["output"] += usage.get("output", 0)
        for name in ("steps", "cost", "seconds"):
            totals[name] += row.get(name) or 0
    cost = f"{totals['cost']:.2f}" if totals["cost"] else "-"
    return [
        f"{len(rows)}",
        f"{totals['steps']:,}",
        f"{totals['input']:,}",
        f"{totals['output']:,}",
        cost,
        f"{totals['seconds'] / len(rows):.1f}",
    ]


def table_of(rows: Sequence[Row], seconds: float) -> Table:
    """How the tasks have ended."""
    table = Table("ended by", "tasks", "steps", "tokens in", "tokens out", "cost", "seconds a task")
    for reason in sorted({row["stop_reason"] for row in rows}):
        table.add_row(reason, *sums_of([row for row in rows if row["stop_reason"] == reason]))
    table.caption = f"{len(rows)} rows; this run took {seconds:.0f} s"
    return table
