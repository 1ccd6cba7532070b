"""Many tasks: each in a folder and a process of its own, one row of results for each.

    from coder import batch
    tasks = [batch.Task("one", "Mend the tests.", repo="~/project")]
    for row in batch.run(tasks, "results.jsonl", workers=4):
        print(row["id"], row["stop_reason"], row["patch"])

The file of results says what is done: a run that was killed goes on where it was. Only the process
that calls `run` writes it, a row at once, so that each task has one row whatever dies.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from coder.doors.files import BatchError as BatchError
from coder.doors.files import Results, Row, check_tasks
from coder.doors.files import Task as Task
from coder.doors.files import read_tasks as read_tasks
from coder.doors.workspace import WorkspaceError, workspace

Report = Callable[[Sequence[Row]], object]
TRIES = 3  # attempts at a task whose process is killed
USAGE = 2  # the exit code of a program whose flags or settings are wrong
SLICE = 0.5  # seconds of waiting at once
SAID = 500  # characters of what a failed process has said
# What a row has of the events of the program, by their types
REPORTED = {
    "run_start": ("session_id", "model"),
    "run_end": ("stop_reason", "text", "steps", "usage", "error"),
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one task, or all together, may take; None is no limit. `cost`: in the prices'
    currency."""

    steps: int | None = None
    seconds: float | None = None
    cost: float | None = None


@dataclass(frozen=True)
class Job:
    """A task, and how it is to be run."""

    task: Task
    flags: tuple[str, ...] = ()  # of the program
    limits: Limits = Limits()
    traces: str = ""  # the folder for the traces; "": none are written


# ---- one task ------------------------------------------------------------------------------------


def work(job: Job, running: Running | None = None) -> Row:
    """Do a task; its row. A process that is killed costs one of TRIES attempts.

    Raises BatchError if the program cannot run at all: then no task can be done.
    """
    running = running or Running()
    began = time.monotonic()
    tries = 0
    was_killed = True
    row: Row = {}
    while was_killed and tries < TRIES and not running.is_stopped:
        tries += 1
        row = attempt(job, running)
        was_killed = row.pop("was_killed", False)
    return row | {"tries": tries, "seconds": round(time.monotonic() - began, 2)}


def attempt(job: Job, running: Running) -> Row:
    """One attempt, in a folder of its own."""
    task = job.task
    row: Row = {"id": task.id, "stop_reason": "error", "text": "", "patch": ""}
    cwd = task.cwd and os.path.realpath(os.path.expanduser(task.cwd))
    repo = os.path.expanduser(task.repo)
    try:
        with workspace(cwd, repo, task.commit) as place:
            row |= run_program(job, place.folder, running)
            row["patch"] = place.patch()
    except WorkspaceError as error:
        row["text"] = str(error)
    return row


def run_program(job: Job, folder: Path, running: Running) -> Row:
    """Run the program on the task; what its events say. Raises BatchError for wrong flags."""
    trace = trace_of(job)
    command = [sys.executable, "-P", "-m", "coder.doors.worker", *flags_of(job, trace)]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [*command, "-C", str(folder)],
            cwd=folder.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            start_new_session=True,  # Ctrl+C is for the driver, which ends the others
        )
        with process, running.holding(process):
            row = follow(process, job)
            code = process.wait()
        said.seek(0)
        message = said.read().decode("utf-8", "replace").strip()[-SAID:]
    if code == USAGE:
        raise BatchError(message)
    if code < 0 or code == 128 + signal.SIGTERM:
        return {"was_killed": True, "text": f"the process was killed (exit code {code})"}
    if "stop_reason" not in row:
        row |= {"stop_reason": "error", "text": message}
    return row | {"exit_code": code, "trace": trace or None}


def flags_of(job: Job, trace: str) -> list[str]:
    """The flags of the program for a task; those of the task come last, and so they count."""
    words = ["-q", "-p", "--output-format", "stream-json", *job.flags]
    steps = job.task.max_steps or job.limits.steps
    seconds = job.task.max_seconds or job.limits.seconds
    given = {
        "--max-steps": steps,
        "--max-seconds": seconds,
        "--model": job.task.model,
        "--trace": trace,
    }
    for flag, value in given.items():
        if value:
            words += [flag, str(value)]
    return words


def trace_of(job: Job) -> str:
    """The file for the trace of a task."""
    if not job.traces:
        return ""
    name = re.sub(r"[^\w.-]", "_", job.task.id)[:100]
    return str(Path(job.traces).resolve() / f"{name}.jsonl")


def follow(process: subprocess.Popen[bytes], job: Job) -> Row:
    """Give the program its prompt and read its events; ends it if it costs more than it may."""
    assert process.stdin and process.stdout
    try:
        process.stdin.write(job.task.prompt.encode())
        process.stdin.close()
    except BrokenPipeError:  # it has ended already; its exit code says why
        pass
    row: Row = {}
    cost = 0.0
    is_stopped = False
    for line in process.stdout:
        if not line.endswith(b"\n"):  # it was killed
            break
        event = json.loads(line)
        for name in REPORTED.get(event["type"], ()):
            row[name] = event[name]
        if event["type"] == "step_end":
            cost += event["usage"]["cost"] or 0.0
        most = job.limits.cost
        if most is not None and cost > most and not is_stopped:
            is_stopped = True
            process.send_signal(signal.SIGINT)
    if "usage" in row:
        row["cost"] = row["usage"]["cost"]
    if is_stopped:
        row["stop_reason"] = "max_cost"
    return row


class Running:
    """The processes of this machine's tasks, so that a driver that ends can end them."""

    def __init__(self) -> None:
        self.is_stopped = False
        self._processes: set[subprocess.Popen[bytes]] = set()

    @contextmanager
    def holding(self, process: subprocess.Popen[bytes]) -> Iterator[None]:
        """While inside, `stop` ends the process."""
        self._processes.add(process)
        try:
            if self.is_stopped:  # between its start and this
                process.terminate()
            yield
        finally:
            self._processes.discard(process)

    def stop(self) -> None:
        self.is_stopped = True
        for process in list(self._processes):
            process.terminate()


# ---- all tasks -----------------------------------------------------------------------------------


class Engine(Protocol):
    """Where tasks run. `room`: how many at a time."""

    room: int

    def start(self, job: Job) -> Any:
        """Begin a job; a handle of it."""
        ...

    def ended(self, handles: Iterable[Any]) -> Iterable[Any]:
        """Wait until some jobs have ended, or for SLICE seconds; the handles of those that have.

        A Ctrl+C that comes after Python has looked for signals, and before the wait, does not end
        the wait. It is handled when the slice is over.
        """
        ...

    def row(self, handle: Any) -> Row:
        """The row of a job that has ended. Raises BatchError."""
        ...

    def close(self) -> None:
        """End what still runs."""
        ...


class LocalEngine:
    """Processes of this machine, one for each of `workers` threads, which wait for them."""

    def __init__(self, workers: int) -> None:
        self.room = workers
        self._running = Running()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="task")

    def start(self, job: Job) -> Future[Row]:
        return self._pool.submit(work, job, self._running)

    def ended(self, handles: Iterable[Future[Row]]) -> Iterable[Future[Row]]:
        return wait(handles, timeout=SLICE, return_when=FIRST_COMPLETED).done

    def row(self, handle: Future[Row]) -> Row:
        return handle.result()

    def close(self) -> None:
        self._running.stop()
        self._pool.shutdown(cancel_futures=True)


def show_nothing(rows: Sequence[Row]) -> None:
    """A report that nobody reads."""


def run(
    tasks: Iterable[Task],
    results: str | Path,
    *,
    workers: int = 4,
    engine: Engine | None = None,
    flags: Sequence[str] = (),
    limits: Limits = Limits(),
    total: Limits = Limits(),
    traces: str | Path = "",
    report: Report = show_nothing,
) -> list[Row]:
    """Do the tasks that have no row yet; all rows of the file.

    `flags` are those of the program for each task, `limits` are each task's. If what all rows have
    taken goes beyond `total`, no further task begins (its seconds are those of this call). `engine`
    replaces the `workers` on this machine. `report` gets all rows, at first and after each new one,
    which is the last. Raises BatchError, before
    anything is run if the tasks are wrong.
    """
    todo = list(tasks)
    check_tasks(todo)
    if traces:
        Path(traces).mkdir(parents=True, exist_ok=True)
    with Results(results) as file:
        done = {row["id"] for row in file.rows}
        jobs = [
            Job(task, tuple(flags), limits, str(traces)) for task in todo if task.id not in done
        ]
        engine = engine or LocalEngine(workers)
        try:
            drive(jobs, engine, file, total, report)
        finally:
            engine.close()
        return file.rows


def drive(
    jobs: list[Job],
    engine: Engine,
    file: Results,
    total: Limits,
    report: Report,
) -> None:
    """Keep the engine at work until all jobs have a row, or the limits of all are reached."""
    began = time.monotonic()
    report(file.rows)
    waiting = deque(jobs)
    handles: set[Any] = set()
    while True:
        while waiting and len(handles) < engine.room and not is_over(file.rows, total, began):
            handles.add(engine.start(waiting.popleft()))
        if not handles:
            return
        for handle in engine.ended(handles):
            handles.discard(handle)
            row = engine.row(handle)
            if total.cost is not None and row.get("steps") and row.get("cost") is None:
                raise BatchError(f"task {row['id']}: its cost is not known; CODER_PRICES says it")
            file.add(row)
            report(file.rows)


def is_over(rows: Sequence[Row], total: Limits, began: float) -> bool:
    """Have all tasks together taken what they may?"""
    taken = {
        "seconds": time.monotonic() - began,
        "steps": sum(row.get("steps") or 0 for row in rows),
        "cost": sum(row.get("cost") or 0.0 for row in rows),
    }
    for name, amount in taken.items():
        limit = getattr(total, name)
        if limit is not None and amount >= limit:
            return True
    return False
