"""Snapshots: what each step of a run changed in the workspace, so that it can be taken back.

    snapshots = Snapshots(workspace, data, tell=print)
    for event in run_loop(...):
        snapshots(event, abort)
    snapshots.undo()

A subscriber of events. All files are looked at beside the first answer of a run; what changes between the first
tool of a step and its end counts as the run's. Where tools name the files that they have changed, only these count.
What differs from how the run left it is never overwritten: then nothing is done, and the paths are named.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coder.abort import Abort
from coder.events import Event, MessageEnd, RunEnd, RunStart, StepEnd, ToolEnd, ToolStart
from coder.sessions.snapshot_store import SnapshotError, SnapshotStore
from coder.sessions.workspace_files import SECONDS, Entry, Pair, WorkspaceFiles
from coder.tools.edit import diff
from coder.tools.workspace import folder_of, remove, temporary_name
from coder.types import Message, ToolError

ERRORS = (SnapshotError, OSError)
OFF = "/undo does not cover file changes in this session: {}."
PARTLY = (
    "/undo covers only part of this folder: {:,} files are too many, or too large together, to be "
    "read at the start."
)
LOST = "Changed, and not covered by /undo: {}."
NAMED = 5  # paths in a notice


@dataclass
class RunSnapshot:
    """One run: `message` is the time of its user message, or 0 where it went on without one.

    A step which changed something is {"files": {path: [before, after]}, "lost": [path]}, without
    what is empty; before and after are [mode, blob id], or null for no file. A step that is not
    known is {"problem": text}.
    """

    message: int = 0
    steps: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class UndoResult:
    """What `undo` or `redo` did: the `paths` of this `run` that were written or removed.

    With a `problem` nothing counts as done; `conflicts` were changed since, `lost` are not kept and stay.
    """

    run: RunSnapshot | None = None
    paths: Sequence[str] = ()
    conflicts: Sequence[str] = ()
    lost: Sequence[str] = ()
    problem: str = ""


def place(run: RunSnapshot, messages: Sequence[Message]) -> int | None:
    """Where in the list the user message of a run is; None: nowhere, or no longer (compacted)."""
    places = range(len(messages) - 1, -1, -1)
    return next((at for at in places if _time_of(messages[at]) == run.message), None)


def _time_of(message: Message) -> Any:
    return message.get("role") == "user" and message.get("meta", {}).get("timestamp")


class Snapshots:
    """The `runs` of a session and what they changed; `undone` are those that were taken back.

    The newest are the last. `data` is the program's data folder, `harmless` the names of tools that
    change nothing. `tell` gets lines for the user. Where it cannot work, `off` says why.
    """

    def __init__(
        self,
        workspace: Path,
        data: Path,
        *,
        harmless: Collection[str] = (),
        tell: Callable[[str], object] = lambda text: None,
    ) -> None:
        self.harmless, self.tell = harmless, tell
        self.runs: list[RunSnapshot] = []
        self.undone: list[RunSnapshot] = []
        self.off = ""
        self.root = os.path.realpath(workspace)
        self._store = SnapshotStore(self.root, data)
        self._files = WorkspaceFiles(self.root, self._store)
        self._session = ""
        self._unsaved: list[dict[str, Any]] = []
        self._first_look: threading.Thread | None = None
        self._began = 0.0
        self._told: set[str] = set()
        self._in_step = False  # a tool has begun
        self._unnamed: set[str] = set()  # calls of the step that do not name what they changed
        self._named: set[str] = set()  # paths that the others name

    def open(self, session_id: str, resumed: bool = False) -> None:
        """Continue with the runs of this session."""
        self._session, self.runs, self.undone, self._unsaved = session_id, [], [], []
        with contextlib.suppress(*ERRORS):
            for record in self._store.records(session_id) if resumed else ():
                if "message" in record:
                    self.runs.append(RunSnapshot(record["message"]))
                elif self.runs:  # else what was before it is no longer kept
                    self.runs[-1].steps.append(record)

    # ---- taking them

    def __call__(self, event: Event, abort: Abort | None = None) -> None:
        match event:
            case RunStart():
                self.undone.clear()
                self.runs.append(RunSnapshot())
                self._unsaved.append({"message": 0})
                self._start_look()
            case MessageEnd(message={"role": "user"} as message) if self._unsaved:
                if not self.runs[-1].message:
                    self.runs[-1].message = _time_of(message) or 0
                    self._unsaved[-1]["message"] = self.runs[-1].message
            case ToolStart(id=call_id, name=name) if name not in self.harmless:
                self._unnamed.add(call_id)
                self._begin_step(abort or Abort())
            case ToolEnd(id=call_id, result=result) if call_id in self._unnamed:
                paths = result.details.get("paths") or [result.details.get("path")]
                self._add_named(call_id, [path for path in paths if isinstance(path, str)])
            case StepEnd() | RunEnd():
                self.finish()
        if isinstance(event, RunEnd):
            self._save()

    def _add_named(self, call_id: str, paths: Sequence[str]) -> None:
        """A tool that changes certain files and no others names them in its details."""
        inner = [os.path.relpath(os.path.join(self.root, path), self.root) for path in paths]
        if inner:
            self._unnamed.discard(call_id)
            self._named |= {path for path in inner if not f"{path}/".startswith("../")}

    def _start_look(self) -> None:
        """Look at all files, in a worker thread; again, where there was no time for all."""
        done = self._files.ready and not self._files.left_out
        if not (self.off or done or (self._first_look and self._first_look.is_alive())):
            self._began, self._files.deadline = time.monotonic(), float("inf")
            self._first_look = threading.Thread(target=self._look_first, daemon=True)
            self._first_look.start()

    def _look_first(self) -> None:
        try:
            self._files.start()
        except ERRORS as error:
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
            self._tell_once(PARTLY.format(self._files.left_out))

    def _await_look(self, abort: Abort | None = None) -> None:
        """Wait for the end of the first look, which may take SECONDS, and which an abort cuts short."""
        self._files.deadline = max(self._began + SECONDS, time.monotonic())
        while self._first_look and self._first_look.is_alive():
            self._first_look.join(0.05)
            if abort and abort.is_set:
                self._files.deadline = 0
                return

    def finish(self) -> None:
        """End the step under way. To be called behind a run that was broken off, too."""
        if not self._in_step:
            return
        step = self._look(None if self._unnamed else self._named)
        self._in_step, self._unnamed, self._named = False, set(), set()
        if self.runs and step:
            self.runs[-1].steps.append(step)
            self._save(step)
        if lost := step.get("lost"):
            self._tell_once(LOST.format(", ".join(lost[:NAMED])))

    def _look(self, paths: Collection[str] | None) -> dict[str, Any]:
        """What has changed since the last look, as a step has it."""
        looking = self._first_look and self._first_look.is_alive()
        if not self.off and self._files.ready and not looking:
            try:
                return self._files.look(paths)
            except ERRORS as error:
                self._switch_off(error)
        return {"problem": self.off or "the run was aborted before its files were known"}

    def _switch_off(self, error: Exception) -> None:
        self.off = str(error)
        self._tell_once(OFF.format(self.off))

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self.tell(text)

    def _save(self, *records: dict[str, Any]) -> None:
        """Write records, behind those that wait; where that fails, undo works as long as the process does."""
        self._unsaved += records
        with contextlib.suppress(*ERRORS):
            self._store.append(self._session, self._unsaved)
            self._unsaved = []

    def close(self) -> None:
        """End what is under way."""
        while self._first_look and self._first_look.is_alive():
            self._files.deadline = 0
            self._first_look.join(0.05)
        self._files.close()

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
        if not source:
            return UndoResult(problem=f"There is nothing to {'undo' if back else 'redo'}.")
        run = source[-1]
        self._await_look()
        try:
            plan, torn = net_change(run.steps)
            goals = {path: pair[::-1] if back else pair for path, pair in plan.items()}
            now = {path: self._files.entry(path) for path in goals}
            goals = {path: pair for path, pair in goals.items() if now[path] != pair[1]}
            conflicts = [path for path in goals if path in torn or now[path] != goals[path][0]]
            if not conflicts:
                self._write({path: goal for path, (_, goal) in goals.items()})
        except (*ERRORS, ToolError) as error:
            return UndoResult(run, problem=f"The files of this run cannot be restored: {error}.")
        if conflicts:
            text = "Nothing was done: these files were changed since."
            return UndoResult(run, conflicts=sorted(conflicts), problem=text)
        target.append(source.pop())
        if back:
            with contextlib.suppress(*ERRORS):  # as where it cannot be saved
                self._save()
                self._store.drop_run(self._session)
        else:
            self._save({"message": run.message}, *run.steps)
        lost = sorted({path for step in run.steps for path in step.get("lost", ())})
        return UndoResult(run, sorted(goals), lost=lost)

    def _write(self, goals: Mapping[str, Entry | None]) -> None:
        """Write files as they are to be. Raises OSError, ToolError, SnapshotError: some is done, and to do it
        again does the rest. Folders that become empty go; an empty folder is neither kept nor made."""
        root, removed = Path(self.root), [path for path, goal in goals.items() if goal is None]
        # Nothing is done where one is missing
        blobs = self._store.blobs({goal[1] for goal in goals.values() if goal})
        for path in removed:
            with contextlib.suppress(FileNotFoundError):
                remove(root / path)
        emptied = {root / above for path in removed for above in Path(path).parents}
        _remove_empty(sorted(emptied - {root}, reverse=True))
        for path, goal in sorted(goals.items()):
            if goal:
                _remove_empty(Path(each) for each, *_ in os.walk(root / path, topdown=False))
                put_file(root / path, goal[0], blobs[goal[1]])

    def diff(self, run: RunSnapshot | None = None) -> str:
        """A unified diff of what a run changed, or all runs. Raises SnapshotError."""
        runs = self.runs if run is None else [run]
        files, _ = net_change(step for each in runs for step in each.steps)
        changes = [(path, *pair) for path, pair in sorted(files.items()) if pair[0] != pair[1]]
        self._await_look()
        blobs = self._store.blobs({each[1] for _, *pair in changes for each in pair if each})
        return "".join(_file_diff(*change, blobs) for change in changes)


def net_change(steps: Iterable[dict[str, Any]]) -> tuple[dict[str, Pair], set[str]]:
    """What steps have changed together, from before the first to after the last, and the paths that the user
    has changed between two of them. Raises SnapshotError where a step is not known."""
    files: dict[str, Pair] = {}
    torn = set[str]()
    for step in steps:
        if "problem" in step:
            raise SnapshotError(step["problem"])
        for path, pair in step.get("files", {}).items():
            old, new = (entry and (entry[0], entry[1]) for entry in pair)  # lists, out of JSON
            first, last = files.get(path, (old, old))
            files[path] = first, new
            torn |= {path} if last != old else set()
    return files, torn


def _file_diff(path: str, old: Entry | None, new: Entry | None, blobs: Mapping[str, bytes]) -> str:
    before, after = (blobs[entry[1]] if entry else b"" for entry in (old, new))
    lines = [f"diff --git a/{path} b/{path}"]
    if old and new and old[0] != new[0]:
        lines.append(f"old mode {old[0]:o}\nnew mode {new[0]:o}")
    elif not (old and new):
        lines.append("deleted file" if old else "new file")
    if b"\0" in before[:8192] + after[:8192]:
        lines.append(f"Binary files a/{path} and b/{path} differ")
    elif before != after:
        texts = [each.decode("utf-8", "replace") for each in (before, after)]
        lines.append(diff(texts[0], texts[1], path))
    return "\n".join(lines) + "\n"


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError, ToolError):
            remove(folder, os.rmdir)


def put_file(target: Path, mode: int, data: bytes) -> None:
    """Put a file or link in its place at once, in a folder behind no link. Raises OSError, ToolError."""
    name, flags = temporary_name(), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with folder_of(target, make=True) as folder:
        try:
            if stat.S_ISLNK(mode):
                os.symlink(data, os.fsencode(name), dir_fd=folder)
            else:
                with open(os.open(name, flags, 0o600, dir_fd=folder), "wb") as file:
                    file.write(data)
                    os.fchmod(file.fileno(), stat.S_IMODE(mode))
            os.replace(name, target.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)
            raise
