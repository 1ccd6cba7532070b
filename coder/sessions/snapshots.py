"""Snapshots: what each step of a run changed in the workspace, so that it can be taken back.

    snapshots = Snapshots(workspace, data, tell=print)
    for event in run_loop(messages, ...):
        snapshots(event, abort)
    snapshots.undo(messages)

A subscriber of events. All files are looked at beside the first answer of a run; what changes between the first
tool of a step and its end counts as the run's, but not what changes while a question to the user stands.
What differs from how the run left it is never overwritten: then nothing is done, and the paths are named.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from coder import events
from coder.abort import Abort
from coder.events import Event
from coder.history import text_of, user
from coder.sessions.database import StoreError
from coder.sessions.workspace_files import SECONDS, Entry, Pair, WorkspaceFiles
from coder.tools.text import diff
from coder.tools.workspace import remove
from coder.types import Message

ERRORS = (StoreError, OSError)
OFF = "/undo does not cover file changes in this session. {}"
PARTLY = "/undo covers only part of this folder: {:,} files are too many, or too large, to be read."
CHANGED = "Nothing was done: these files were changed since: {}."
LOST = "Changed, and not covered by /undo: {}."
NAMED = 5  # paths in a notice
TAKEN_BACK = (
    "I have undone your last changes ({}). The summary above may still contain them: look at the files before "
    "you go on."
)


@dataclass
class RunSnapshot:
    """One run: `message` is the time of its user message, or 0 where it went on without one.

    `steps` are those which changed something; where one is not known, `problem` says why. Once undone, `removed` are
    the messages that stood at a `place` in the list, `left` those there now.
    """

    message: int = 0
    steps: list[dict[str, Pair]] = field(default_factory=list)
    problem: str = ""
    row: int = 0  # in the file
    place: int = 0
    removed: list[Message] = field(default_factory=list)
    left: list[Message] = field(default_factory=list)


@dataclass
class UndoResult:
    """What `undo` or `redo` did: the `paths` that were written or removed; the contents of `lost` are no longer kept.

    `prompt` is that of the run. With a `problem` nothing counts as done.
    """

    paths: Sequence[str] = ()
    lost: Sequence[str] = ()
    problem: str = ""
    prompt: str = ""


class Snapshots:
    """The `runs` of a session and what they changed; `undone` are those that were taken back.

    The newest are the last. `data` is the program's data folder. `tell` gets lines for the user.
    """

    def __init__(
        self, workspace: Path, data: Path, *, tell: Callable[[str], object] = lambda text: None
    ) -> None:
        self.tell = tell
        self.harmless: Collection[str] = ()  # names of tools that change nothing
        self.runs: list[RunSnapshot] = []
        self.undone: list[RunSnapshot] = []
        self.off = ""  # why it cannot work
        self.root = os.path.realpath(workspace)
        self._files = WorkspaceFiles(self.root, os.path.realpath(data))
        self._session = ""
        self._first_look = threading.Thread()  # of all files
        self._look_began = 0.0
        self._reported_notices: set[str] = set()
        self._in_step = False  # a tool has begun
        self._is_answering = (
            False  # in a step: the event before was a question, which is answered now
        )

    def open(self, session_id: str, resumed: bool = False) -> None:
        """Continue with the runs of this session."""
        self._session, self.runs, self.undone = session_id, [], []
        with contextlib.suppress(*ERRORS):
            if resumed:
                query = "SELECT id, data FROM run WHERE session = ? ORDER BY id"
                for row in self._files.store.rows(query, session_id):
                    message, steps, problem = json.loads(row["data"])
                    steps = [{path: _pair(pair) for path, pair in step.items()} for step in steps]
                    self.runs.append(RunSnapshot(message, steps, problem, row["id"]))

    # ---- taking them

    def __call__(self, event: Event, abort: Abort | None = None) -> None:
        if self._is_answering:
            self._begin_step(abort)
        match event:
            case events.RunStart():
                self.undone.clear()
                self.runs.append(RunSnapshot())
                done = self._files.ready and not self._files.left_out
                if not (self.off or done or self._first_look.is_alive()):
                    self._look_began, self._files.deadline = time.monotonic(), math.inf
                    self._first_look = threading.Thread(target=self._look_first, daemon=True)
                    self._first_look.start()
            case events.MessageEnd(message={"role": "user"} as message) if self.runs:
                stamp = message.get("meta", {}).get("timestamp")
                self.runs[-1].message = self.runs[-1].message or stamp or 0
            case events.ToolStart(name=name) if name not in self.harmless:
                self._begin_step(abort)
            case events.StepEnd() | events.RunEnd():
                self.finish()
        # Beside a sub-agent that asks others may work on: what they change then is taken for the user's, too
        if self._in_step and hasattr(events.innermost(event), "reply"):
            self.finish()
            self._is_answering = True
        if isinstance(event, events.RunEnd):
            self._save(self.runs[-1])

    def _look_first(self) -> None:
        """Look at all files, in a worker thread; again, where there was no time for all."""
        try:
            self._files.start()
            if notice := self._files.store.notice:
                self._tell_once(notice)
        except ERRORS as error:
            self._switch_off(error)

    def _begin_step(self, abort: Abort | None) -> None:
        """In front of a tool: what has changed up to now is not the run's."""
        if self._in_step:
            return
        self._in_step = True
        self._await_look(abort)
        self._look()
        if self._files.left_out:
            self._tell_once(PARTLY.format(self._files.left_out))

    def _await_look(self, abort: Abort | None = None, seconds: float = SECONDS) -> None:
        """Wait for the end of the first look, which may take these seconds, or until now."""
        self._files.deadline = max(self._look_began + seconds, time.monotonic())
        while self._first_look.is_alive() and not (abort and abort.is_set):
            self._first_look.join(0.05)

    def finish(self) -> None:
        """End the step under way. To be called behind a run that was broken off, too."""
        self._is_answering = False
        if not self._in_step:
            return
        step, lost = self._look()
        self._in_step = False
        if step:
            self.runs[-1].steps.append(step)
            self._save(self.runs[-1])
        if lost:
            self._tell_once(LOST.format(", ".join(lost[:NAMED])))

    def _look(self) -> tuple[dict[str, Pair], Sequence[str]]:
        """What has changed since the last look; and the paths of which that is not kept."""
        if not self.off and self._files.ready and not self._first_look.is_alive():
            try:
                return self._files.look()
            except ERRORS as error:
                self._switch_off(error)
        self.runs[-1].problem = self.off or "the run was aborted before its files were known"
        return {}, ()

    def _switch_off(self, error: Exception) -> None:
        self.off = str(error)
        self._tell_once(OFF.format(self.off))

    def _tell_once(self, text: str) -> None:
        if text not in self._reported_notices:
            self._reported_notices.add(text)
            self.tell(text)

    def _save(self, run: RunSnapshot, keep: bool = True) -> None:
        """Write what a run has changed, or remove it. Where that fails, undo works as long as the process does."""
        data = json.dumps((run.message, run.steps, run.problem), default=astuple)
        values = run.row or None, self._session, int(time.time()), data
        with contextlib.suppress(*ERRORS), self._files.store.transaction() as db:
            db.execute("DELETE FROM run WHERE id = ?", (run.row,))
            insert = "INSERT INTO run VALUES (?, ?, ?, ?)"
            run.row = db.execute(insert, values).lastrowid or 0 if keep else 0

    def close(self) -> None:
        """End what is under way."""
        self._await_look(seconds=0)
        self._files.close()

    # ---- taking back

    def undo(self, messages: list[Message]) -> UndoResult:
        """Take back what the last run changed in the workspace, and its part of `messages`, but for what the user's own
        commands have added since; with a problem, nothing."""
        done = self._travel(self.runs, self.undone, back=True)
        if done.problem:
            return done
        run = self.undone[-1]
        metas = [each.get("meta", {}) for each in messages]
        run.place = len(messages)  # it went on without a prompt, or that was compacted
        for at, message in enumerate(messages):
            if message.get("role") == "user" and metas[at].get("timestamp") == run.message:
                run.place = at
        run.removed = messages[run.place :]
        run.left = [each for each in run.removed if each.get("meta", {}).get("own")]
        if not run.removed or any(meta.get("summary") for meta in metas[: run.place]):
            run.left.append(user(TAKEN_BACK.format(", ".join(done.paths) or "no file")))
        done.prompt = text_of(run.removed[0]) if run.removed else ""
        messages[run.place :] = run.left
        return done

    def redo(self, messages: list[Message]) -> UndoResult:
        """Do again what was undone last."""
        done = self._travel(self.undone, self.runs, back=False)
        if not done.problem:
            run = self.runs[-1]
            messages[run.place : run.place + len(run.left)] = run.removed
        return done

    def _travel(
        self, source: list[RunSnapshot], target: list[RunSnapshot], back: bool
    ) -> UndoResult:
        if not source:
            return UndoResult(problem=f"There is nothing to {'undo' if back else 'redo'}.")
        run = source[-1]
        self._await_look()
        try:
            plan, torn = net_change([run])
            goals = {path: pair[::-1] if back else pair for path, pair in plan.items()}
            now = {path: self._files.entry(path) for path in goals}
            goals = {path: pair for path, pair in goals.items() if now[path] != pair[1]}
            changed = [path for path in goals if path in torn or now[path] != goals[path][0]]
            if changed:
                return UndoResult(problem=CHANGED.format(", ".join(sorted(changed))))
            lost = self._write({path: goal for path, (_, goal) in goals.items()})
        except ERRORS as error:
            why = str(error).rstrip(".")
            return UndoResult(problem=f"The files of this run cannot be restored: {why}.")
        target.append(source.pop())
        self._save(run, keep=not back)
        return UndoResult(sorted(goals.keys() - lost), sorted(lost))

    def _write(self, goals: Mapping[str, Entry | None]) -> set[str]:
        """Write files as they are to be, but those whose contents are lost, which it returns. Raises OSError,
        StoreError: some is done, and to do it again does the rest. Folders that become empty go; an
        empty folder is neither kept nor made."""
        root, removed = Path(self.root), [path for path, goal in goals.items() if goal is None]
        blobs = self._files.store.blobs({goal.blob for goal in goals.values() if goal})
        made = dict[int, str]()
        for path in removed:
            with contextlib.suppress(FileNotFoundError):
                remove(root / path)
        emptied = {root / above for path in removed for above in Path(path).parents}
        _remove_empty(sorted(emptied - {root}, reverse=True))
        for path, goal in sorted(goals.items()):
            if goal and goal.blob in blobs:
                _remove_empty(Path(each) for each, *_ in os.walk(root / path, topdown=False))
                self._files.put(path, blobs[goal.blob], goal, made)
        return {path for path, goal in goals.items() if goal and goal.blob not in blobs}

    def diff(self, run: RunSnapshot | None = None) -> str:
        """A unified diff of what a run changed, or all runs. Raises StoreError."""
        files, _ = net_change([run] if run else self.runs)
        changes = [(path, *pair) for path, pair in sorted(files.items()) if pair[0] != pair[1]]
        self._await_look()
        blobs = self._files.store.blobs(
            {each.blob for _, *pair in changes for each in pair if each}
        )
        return "".join(_file_diff(*change, blobs) for change in changes)


def net_change(runs: Iterable[RunSnapshot]) -> tuple[dict[str, Pair], set[str]]:
    """What runs have changed, from before the first step to after the last, and the paths that the user
    has changed between two of them. Raises StoreError where a step is not known."""
    files: dict[str, Pair] = {}
    torn = set[str]()
    for run in runs:
        if run.problem:
            raise StoreError(run.problem)
        for path, pair in (each for step in run.steps for each in step.items()):
            old, new = pair
            first, last = files.get(path, (old, old))
            files[path] = first, new
            torn |= {path} if last != old else set()
    return files, torn


def _pair(entries: Iterable[list[Any] | None]) -> Pair:
    """A pair out of JSON."""
    before, after = (entry and Entry(*entry) for entry in entries)
    return before or None, after or None


def _file_diff(path: str, old: Entry | None, new: Entry | None, blobs: Mapping[str, bytes]) -> str:
    before, after = (blobs.get(entry.blob) if entry else b"" for entry in (old, new))
    lines = [f"diff --git a/{path} b/{path}"]
    if old and new and old.mode != new.mode:
        lines.append(f"old mode {old.mode:o}\nnew mode {new.mode:o}")
    elif not (old and new):
        lines.append("deleted file" if old else "new file")
    if before is None or after is None:
        lines.append(f"The contents of {path} are no longer kept")
    elif b"\0" in before[:8192] + after[:8192]:
        lines.append(f"Binary files a/{path} and b/{path} differ")
    elif before != after:
        texts = [each.decode("utf-8", "replace") for each in (before, after)]
        lines.append(diff(texts[0], texts[1], path))
    return "\n".join(lines) + "\n"


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            remove(folder, os.rmdir)
