"""The two files of a batch: its tasks, and its results, a JSON object in each line."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from coder.schemas import adapter_of
from coder.types import CoderError, ToolError

Row = dict[str, Any]


class BatchError(CoderError):
    """Nothing can be run as asked; what is done so far is in the file of results."""


@dataclass(frozen=True)
class Task:
    """One thing to do: in a copy of the folder `cwd`, or in a clone of `repo` at `commit`, or in an
    empty folder. `model`, `max_steps` and `max_seconds` replace those of all tasks."""

    id: str
    prompt: str
    cwd: str = ""
    repo: str = ""
    commit: str = ""
    model: str = ""
    max_steps: int | None = None
    max_seconds: float | None = None


# ---- the tasks -----------------------------------------------------------------------------------


def read_tasks(path: str | Path) -> list[Task]:
    """The tasks of a file, a JSON object in each line. Raises BatchError, which names the line."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BatchError(f"{path}: {getattr(error, 'strerror', error)}") from None
    adapter = adapter_of(Task, "a task")
    tasks: list[Task] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            tasks.append(adapter.take(json.loads(line), "the task"))
        except (ValueError, ToolError) as error:
            raise BatchError(f"{path}, line {number}: {error}") from None
    return tasks


def check_tasks(tasks: Sequence[Task]) -> None:
    """Raise BatchError for tasks that cannot be told apart, or cannot be done."""
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise BatchError(f"two tasks have the id {task.id!r}")
        seen.add(task.id)
        if not task.id or not task.prompt:
            raise BatchError(f"task {task.id!r}: it needs an id and a prompt")
        for limit in (task.max_steps, task.max_seconds):
            if limit is not None and limit <= 0:
                raise BatchError(f"task {task.id}: a limit is above zero")
        if task.cwd and task.repo:
            raise BatchError(f"task {task.id}: give cwd or repo, not both")
        if task.commit and (not task.repo or task.commit.startswith("-")):
            raise BatchError(f"task {task.id}: a commit is one of a repo")
        folder = task.cwd and os.path.expanduser(task.cwd)
        if folder and not os.path.isdir(folder):
            raise BatchError(f"task {task.id}: there is no folder {task.cwd}")


# ---- the results ---------------------------------------------------------------------------------


class Results:
    """The file of results: a row a line. `rows` are those that are in it.

    Raises BatchError if another run writes it, or if it holds something else. A last line that a
    kill has cut is removed; its task is done again.
    """

    def __init__(self, path: str | Path) -> None:
        self.rows: list[Row] = []
        try:
            self.file = open(path, "a+b")  # noqa: SIM115 (closed by __exit__)
        except OSError as error:
            raise BatchError(f"{path}: {error.strerror}") from None
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.file.close()
            raise BatchError(f"{path}: another run writes this file") from None
        try:
            self._read(path)
        except BatchError:
            self.file.close()
            raise

    def _read(self, path: str | Path) -> None:
        self.file.seek(0)
        data = self.file.read()
        whole, _, cut = data.rpartition(b"\n")
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                row = json.loads(line)
                row["id"], row["stop_reason"]  # each row has them
            except (ValueError, LookupError, TypeError):
                message = f"{path}, line {number}: no row of results; nothing was changed"
                raise BatchError(message) from None
            self.rows.append(row)
        if cut:
            self.file.truncate(len(data) - len(cut))

    def add(self, row: Row) -> None:
        """Append a row; it is on the disk when this returns."""
        self.file.write(json.dumps(row).encode() + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())
        self.rows.append(row)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
