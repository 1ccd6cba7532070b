"""Snapshots: what each step of a run changed in the workspace, so that it can be taken back.

    snapshots = Snapshots(workspace, data)
    for event in run_loop(...):
        snapshots(event, abort)
    snapshots.undo()

A subscriber of events. All files are looked at beside the first answer of a run; a step begins with
its first tool and ends with its last, and what changed in between counts as the run's. Where tools
name the files that they have changed, only these count. What differs from how the run left it is
never overwritten: then nothing is done, and the paths are named.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coder.abort import Abort
from coder.events import (
    Event,
    MessageEnd,
    Notice,
    RunEnd,
    RunStart,
    StepEnd,
    StepStart,
    ToolEnd,
    ToolStart,
)
from coder.sessions.file_changes import SECONDS, Pair, WorkspaceFiles
from coder.sessions.restore_plan import RestorePlan, is_relative, net_change
from coder.sessions.snapshot_repo import SnapshotError, SnapshotRepo
from coder.tools.edit import diff
from coder.types import Message, ToolError

ERRORS = (SnapshotError, sqlite3.Error, OSError)
OFF = "/undo does not cover file changes in this session: {}."
PARTLY = (
    "/undo covers only part of this folder: {:,} files are too many, or too large together, to be "
    "read at the start."
)
LOST = "Changed, and not covered by /undo: {}."
NAMED = 5  # paths in a notice


@dataclass
class RunSnapshot:
    """One run: `message` is the key of its user message, or "" where it went on without one.

    A step which changed something is {"files": {path: [before, after]}, "lost": [path]}, without
    what is empty; before and after are [mode, blob id], or null for no file. A step that is not
    known is {"problem": text}.
    """

    message: str = ""
    steps: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class UndoResult:
    """What `undo` or `redo` did: the `paths` of this `run` that were written or removed.

    With a `problem` nothing counts as done; `conflicts` are the paths that were changed since.
    `lost` were changed by the run and are not kept: they stay as they are.
    """

    run: RunSnapshot | None = None
    paths: Sequence[str] = ()
    conflicts: Sequence[str] = ()
    lost: Sequence[str] = ()
    note: str = ""
    problem: str = ""


def key_of(message: Message) -> str:
    """What a message is known by, also after it was stored and loaded."""
    facts = [message.get("role"), message.get("content"), message.get("meta", {}).get("timestamp")]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def place(run: RunSnapshot, messages: Sequence[Message]) -> int | None:
    """Where in the list the user message of a run is; None: nowhere, or no longer (compacted)."""
    places = range(len(messages) - 1, -1, -1)
    return next((at for at in places if key_of(messages[at]) == run.message), None)


class Snapshots:
    """The `runs` of a session and what they changed; `undone` are those that were taken back.

    The newest are the last. `data` is the program's data folder, `harmless` the names of tools that
    change nothing. Where it cannot work, `off` says why, and `taken_notices` once.
    """

    def __init__(self, workspace: Path, data: Path, *, harmless: Collection[str] = ()) -> None:
        self.harmless = harmless
        self.runs: list[RunSnapshot] = []
        self.undone: list[RunSnapshot] = []
        self.off = ""
        self._repo = SnapshotRepo(workspace, data)
        self._files = WorkspaceFiles(self._repo)
        self._first_look: threading.Thread | None = None
        self._look_began = 0.0
        self._notices: list[str] = []
        self._noticed: set[str] = set()  # these also in the past
        self._step = 0
        self._in_step = False  # a tool has begun
        self._unnamed: set[str] = set()  # calls of the step that do not name what they changed
        self._named: set[str] = set()  # paths that the others name

    # ---- taking them

    def __call__(self, event: Event, abort: Abort | None = None) -> None:
        match event:
            case RunStart():
                self.undone.clear()
                self.runs.append(RunSnapshot())
                self._step = 0
                self._start_look()
            case MessageEnd(message={"role": "user"} as message) if self._step <= 1:
                if self.runs and not self.runs[-1].message:
                    self.runs[-1].message = key_of(message)
            case StepStart(step=step):
                self._step = step
            case ToolStart(id=call_id, name=name) if name not in self.harmless:
                self._unnamed.add(call_id)
                self._begin_step(abort or Abort())
            case ToolEnd(id=call_id, result=result) if call_id in self._unnamed:
                paths = result.details.get("paths") or [result.details.get("path")]
                self._add_named(call_id, [path for path in paths if isinstance(path, str)])
            case StepEnd() | RunEnd():
                self.finish()

    def _add_named(self, call_id: str, paths: Sequence[str]) -> None:
        """A tool that changes certain files and no others names them in its details."""
        root = self._repo.root
        inner = [os.path.relpath(os.path.join(root, path), root) for path in paths]
        if inner:
            self._unnamed.discard(call_id)
            self._named |= {path for path in inner if is_relative(path)}

    def _start_look(self) -> None:
        """Look at all files, in a worker thread."""
        if not self.off and not (self._first_look and self._first_look.is_alive()):
            self._look_began = time.monotonic()
            self._first_look = threading.Thread(target=self._look_first, daemon=True)
            self._first_look.start()

    def _look_first(self) -> None:
        try:
            self._files.start()
        except ERRORS as error:
            if not self._files.stopped:
                self._switch_off(error)

    def _begin_step(self, abort: Abort) -> None:
        """In front of a step's first tool: what has changed up to now is not the run's."""
        if self._in_step:
            return
        self._in_step = True
        if not self._first_look:
            self._start_look()
        self._await_look(abort)
        self._look(None)
        if self._files.left_out:
            self._notice(PARTLY.format(self._files.left_out))

    def _await_look(self, abort: Abort | None = None) -> None:
        """Wait for the end of the first look, which an abort cuts short."""
        deadline = max(self._look_began + SECONDS, time.monotonic())
        while self._first_look and self._first_look.is_alive() and not self.off:
            self._first_look.join(0.05)
            if abort and abort.is_set:
                self._files.stop()
            self._files.hurried |= time.monotonic() > deadline
            if time.monotonic() > deadline + SECONDS:  # a file system that does not answer
                self._switch_off(SnapshotError("the folder takes too long to be read"))

    def finish(self) -> None:
        """End the step under way. To be called behind a run that was broken off, too."""
        if not self._in_step:
            return
        step = self._look(None if self._unnamed else self._named)
        self._in_step, self._unnamed, self._named = False, set(), set()
        if self.runs and step:
            self.runs[-1].steps.append(step)
        if lost := step.get("lost"):
            self._notice(LOST.format(", ".join(lost[:NAMED])))

    def _look(self, paths: Collection[str] | None) -> dict[str, Any]:
        """What has changed since the last look, as a step has it."""
        if not self.off and self._files.ready:
            try:
                return self._files.look(paths)
            except ERRORS as error:
                self._switch_off(error)
        return {"problem": self.off or "the run was aborted before its files were known"}

    def _switch_off(self, error: Exception) -> None:
        self.off = str(error)
        self._notice(OFF.format(self.off))
        if type(error) is sqlite3.DatabaseError:  # what it is for a damaged file
            self._repo.remove()

    def _notice(self, text: str) -> None:
        if text not in self._noticed:
            self._noticed.add(text)
            self._notices.append(text)

    def taken_notices(self) -> list[Notice]:
        """What the user should know, each once."""
        texts, self._notices = self._notices, []
        return [Notice(text) for text in texts]

    def close(self) -> None:
        """End what is under way."""
        while self._first_look and self._first_look.is_alive() and not self.off:
            self._files.stop()
            self._first_look.join(0.05)
        self._files.close()

    # ---- keeping them

    def records(self) -> list[dict[str, Any]]:
        """The runs as JSON has them: {"message": key} for each, and its steps behind it."""
        return [row for run in self.runs for row in ({"message": run.message}, *run.steps)]

    def restore(self, records: Iterable[Mapping[str, Any]]) -> None:
        """The runs of a session that goes on. Raises ValueError for what is no record; then none."""
        runs: list[RunSnapshot] = []
        self.runs, self.undone = [], []
        try:
            for record in records:
                if "message" in record:
                    runs.append(RunSnapshot(str(record["message"])))
                else:
                    runs[-1].steps.append({**record})
        except (IndexError, TypeError):
            raise ValueError("it is no record of a run") from None
        self.runs = runs

    # ---- taking back

    def undo(self) -> UndoResult:
        """Take back what the last run changed in the workspace; with a conflict, nothing."""
        return self._travel(self.runs, self.undone, back=True)

    def redo(self) -> UndoResult:
        """Do again what was undone last."""
        return self._travel(self.undone, self.runs, back=False)

    def _travel(
        self, source: list[RunSnapshot], target: list[RunSnapshot], back: bool
    ) -> UndoResult:
        word = "undo" if back else "redo"
        if not source:
            return UndoResult(problem=f"There is nothing to {word}.")
        run = source[-1]
        if self._in_step:
            return UndoResult(run, problem=f"There is no {word} during a run.")
        self._await_look()
        try:
            plan = RestorePlan(self._files, net_change(run.steps), back)
            conflicts = plan.conflicts()
            if not conflicts:
                plan.write(self._repo)
        except (*ERRORS, ToolError) as error:
            text = f"The files of this run cannot be restored: {error}."
            return UndoResult(run, problem=text)
        if conflicts:
            text = "Nothing was done: these files were changed since."
            return UndoResult(run, conflicts=conflicts, problem=text)
        target.append(source.pop())
        lost = sorted({path for step in run.steps for path in step.get("lost", ())})
        return UndoResult(run, sorted(plan.files), lost=lost)

    def diff(self, run: RunSnapshot | None = None) -> str:
        """A unified diff of what a run changed, or all runs. Raises SnapshotError."""
        runs = self.runs if run is None else [run]
        files = net_change(step for each in runs for step in each.steps).files
        changes = [(path, pair) for path, pair in sorted(files.items()) if pair[0] != pair[1]]
        self._await_look()
        try:
            blobs = self._repo.blobs({entry[1] for _, pair in changes for entry in pair if entry})
        except (sqlite3.Error, OSError) as error:
            raise SnapshotError(str(error)) from None
        return "".join(_file_diff(path, pair, blobs) for path, pair in changes)


def _file_diff(path: str, pair: Pair, blobs: Mapping[str, bytes]) -> str:
    """In git's form."""
    old, new = (blobs[entry[1]] if entry else b"" for entry in pair)
    modes = [f"{entry[0]:o}" if entry else "" for entry in pair]
    lines = [f"diff --git a/{path} b/{path}"]
    if not pair[0]:
        lines.append(f"new file mode {modes[1]}")
    elif not pair[1]:
        lines.append(f"deleted file mode {modes[0]}")
    elif modes[0] != modes[1]:
        lines += [f"old mode {modes[0]}", f"new mode {modes[1]}"]
    if b"\0" in old[:8192] + new[:8192]:
        lines.append(f"Binary files a/{path} and b/{path} differ")
    elif old != new:
        lines.append(diff(old.decode("utf-8", "replace"), new.decode("utf-8", "replace"), path))
    return "\n".join(lines) + "\n"
