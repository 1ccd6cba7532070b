"""Snapshots: what each step of a run changed in the workspace, so that it can be taken back.

    snapshots = Snapshots(workspace, data, tell=print)
    for event in run_loop(messages, ...):
        snapshots(event, abort)
    snapshots.undo(messages)

A subscriber of events. A thread looks at all files while the model answers. What changes between
the first tool of a step and its end counts as the run's, but not what changes while a question
waits for the user. What differs from how the run left it is never overwritten: then nothing is
done, and the paths are named.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from coder import events
from coder.abort import Abort
from coder.events import Event
from coder.history import FILE_TOOLS, text_of, user
from coder.sessions.changes import (
    RunSnapshot,
    blobs_of,
    diff_of,
    named,
    net_change,
    renumber,
    reversed_pairs,
)
from coder.sessions.database import StoreError
from coder.sessions.file_states import Entry, Pair, is_linked_otherwise
from coder.sessions.workspace_files import Changes, WorkspaceFiles
from coder.types import Message

ERRORS = (StoreError, OSError)
SURVEY_SECONDS = 3.0  # for which a tool may wait until it is known which files there are
READING_SECONDS = 0.4  # for which it may wait until all are read, from the start of the run
CLOSING_SECONDS = 0.1  # for which the program waits at its end for the thread
PATCHED = r"(?m)^\*\*\* (?:(?:Add|Update|Delete) File|Move to): (.*?) *$"
OFF = "/undo does not cover file changes in this session. {}"
PARTLY = "/undo covers only part of this folder: {:,} files are too many to be kept."
NOT_LISTED = "/undo covers only part of this folder yet: its files are still being listed."
NOT_READ = "/undo covers only part of this folder yet: {:,} files are still being read."
CHANGED = "Nothing was done: these files were changed since: {}."
LOST = "Changed, and not covered by /undo: {}."
LEFT = "Left as they are, since undo has no earlier state of them: {}."
BEGAN_EARLY = "A command of this run began before all files were listed: it may have changed more."
ABORTED = "the run was aborted before its files were known"
TAKEN_BACK = (
    "I have undone your last changes ({}). The summary above may still contain them: look at the files before "
    "you go on."
)


@dataclass
class UndoResult:
    """What `undo` or `redo` did: the `paths` that were written or removed.

    What the files of `lost` were is not kept, or they were there before the run but not known: so
    these were left as they are. `is_partly_known`: the run began a command before it was known
    which files there are; more may have changed. `prompt` is that of the run. With a `problem`
    nothing counts as done.
    """

    paths: Sequence[str] = ()
    lost: Sequence[str] = ()
    problem: str = ""
    prompt: str = ""
    is_partly_known: bool = False

    def warnings(self, listed: Callable[[Sequence[str]], str]) -> list[str]:
        """What the user should know of it, a sentence each; `listed` writes paths."""
        found = []
        if self.lost:
            found.append(LEFT.format(listed(self.lost)))
        if self.is_partly_known:
            found.append(BEGAN_EARLY)
        return found


class Snapshots:
    """The `runs` of a session and what they changed; `undone` are those that were taken back.

    The newest are the last. `data` is the program's data folder. `tell` gets lines for the user.
    A tool waits at most `patience` seconds until it is known which files there are, and at most
    `reading` seconds from the start of the run until all are read.
    """

    def __init__(
        self,
        workspace: Path,
        data: Path,
        *,
        tell: Callable[[str], object] = lambda text: None,
        patience: float = SURVEY_SECONDS,
        reading: float = READING_SECONDS,
    ) -> None:
        self.tell = tell
        self.patience = patience
        self.reading = reading
        self.harmless: Collection[str] = ()  # names of tools that change nothing
        self.runs: list[RunSnapshot] = []
        self.undone: list[RunSnapshot] = []
        self.off = ""  # why it cannot work
        self.root = os.path.realpath(workspace)
        self._files = WorkspaceFiles(self.root, os.path.realpath(data))
        self._session = ""
        self._first_look: threading.Thread | None = None
        self._look_began = 0.0
        self._reported_notices: set[str] = set()
        # In a run that is partly known: the files that were read before its first command
        self._known_before: set[str] = set()
        self._in_step = False  # has a tool begun?
        self._is_answering = False  # in a step: was the event before a question?

    def open(self, session_id: str, resumed: bool = False) -> None:
        """Continue with the runs of this session."""
        self._session = session_id
        self.runs = []
        self.undone = []
        if resumed:
            query = "SELECT id, data FROM run WHERE session = ? ORDER BY id"
            with contextlib.suppress(*ERRORS):
                for row in self._files.store.rows(query, session_id):
                    self.runs.append(RunSnapshot.from_json(row["data"], row["id"]))

    # ---- taking them

    def __call__(self, event: Event, abort: Abort | None = None) -> None:
        if self._is_answering:  # the question is answered, and the step goes on
            self._begin_step(abort)
        match event:
            case events.RunStart():
                self.undone.clear()
                self.runs.append(RunSnapshot())
                self._files.begin_run()
                self._begin_look()
            case events.MessageEnd(message={"role": "user"} as message) if self.runs:
                self._note_prompt(message)
            case events.ToolStart(name=name) if name not in self.harmless:
                self._begin_step(abort)
            case events.StepEnd() | events.RunEnd():
                self.finish()
        self._follow(events.innermost(event))
        if isinstance(event, events.RunEnd):
            self._save(self.runs[-1])

    def _follow(self, event: Event) -> None:
        """In a step: a question, also of a sub-agent, and what a tool is about to write."""
        if not self._in_step:
            return
        if isinstance(event, events.ToolStart) and event.name not in self.harmless:
            self._begin_tool(event)
        # While a sub-agent asks, others may work on: what they change then is taken for the user's,
        # too
        if hasattr(event, "reply"):
            self.finish()
            self._is_answering = True

    def _begin_tool(self, tool: events.ToolStart) -> None:
        """Read the files that a call names, before the tool writes them."""
        patch = str(tool.arguments.get("patch", ""))
        names = re.findall(PATCHED, patch)
        if "path" in tool.arguments:
            names.append(str(tool.arguments["path"]))
        for name in names:
            path = os.path.join(self.root, name)
            with contextlib.suppress(ValueError, *ERRORS):  # it may be no path
                # A link may be replaced, or what it leads to
                for whole in {os.path.normpath(path), os.path.realpath(path)}:
                    inside = whole.removeprefix(f"{self.root}/")
                    if inside != whole:
                        self._files.keep(inside)
        run = self.runs[-1]
        is_known = self._files.known.is_surveyed or tool.name in FILE_TOOLS
        if not is_known and not run.is_partly_known:
            run.is_partly_known = True
            self._known_before = set(self._files.known.polled)

    def _note_prompt(self, message: Message) -> None:
        """The first message of the user's in a run is its prompt."""
        run = self.runs[-1]
        if not run.message:
            run.message = message.get("meta", {}).get("timestamp") or 0

    def _begin_look(self) -> None:
        """Begin to look at all files, once in a session."""
        if self.off or self._first_look:
            return
        self._look_began = time.monotonic()
        self._first_look = threading.Thread(target=self._look_at_all, daemon=True)
        self._first_look.start()

    def _look_at_all(self) -> None:
        """What the thread does."""
        try:
            self._files.look_at_all()
            if notice := self._files.store.notice:
                self._tell_once(notice)
        except ERRORS as error:
            self._switch_off(error)

    def _begin_step(self, abort: Abort | None) -> None:
        """Before a tool: what has changed up to now is not the run's."""
        if self._in_step:
            return
        self._await_look(abort)
        self._in_step = True
        try:
            self._files.begin_step()
        except ERRORS as error:
            self._switch_off(error)
        is_aborted = abort is not None and abort.is_set()
        if is_aborted and not self._files.known.is_surveyed:
            self.runs[-1].problem = ABORTED
        elif not self.off:
            self._tell_what_is_not_covered()

    def _await_look(self, abort: Abort | None) -> None:
        """Wait until the files are known; if they are, a little longer until all are read."""
        known = self._files.known
        known.is_needed.set()
        while self._first_look and self._first_look.is_alive():
            seconds = self.patience
            if known.is_surveyed:
                seconds = min(seconds, self.reading)
            if known.is_checked.is_set() and not known.unread:
                seconds = min(seconds, self.reading / 2)  # permissions are all that is missing
            is_aborted = abort is not None and abort.is_set()
            if is_aborted or time.monotonic() > self._look_began + seconds:
                return
            self._first_look.join(0.02)

    def _tell_what_is_not_covered(self) -> None:
        if self._files.left_out:
            self._tell_once(PARTLY.format(self._files.left_out))
        if self._first_look is None or not self._first_look.is_alive():
            return
        known = self._files.known
        if not known.is_surveyed:
            self._tell_once(NOT_LISTED)
        elif known.unread:
            self._tell_once(NOT_READ.format(len(known.unread)), kind=NOT_READ)

    def finish(self) -> None:
        """End the present step. To be called after a run that was broken off, too."""
        self._is_answering = False
        if not self._in_step:
            return
        self._in_step = False
        run = self.runs[-1]
        try:
            changes = self._files.end_step()
        except ERRORS as error:
            self._switch_off(error)
            changes = Changes()
        if self.off:
            run.problem = self.off
            return
        if changes.files:
            run.steps.append(changes.files)
        lost = set(changes.lost)
        if run.is_partly_known:  # what a step began with may be the work of the run's first command
            lost |= changes.files.keys() - self._known_before
        if lost:
            run.lost = sorted({*run.lost, *lost})
            self._tell_once(LOST.format(named(lost)))
        if changes.files or lost:
            self._save(run)

    def _switch_off(self, error: Exception) -> None:
        self.off = str(error)
        self._tell_once(OFF.format(self.off))

    def _tell_once(self, text: str, kind: str = "") -> None:
        """Tell the user, but only one notice of a kind."""
        if (kind or text) not in self._reported_notices:
            self._reported_notices.add(kind or text)
            self.tell(text)

    def _save(self, run: RunSnapshot) -> None:
        """Write what a run has changed. If that fails, undo works as long as the process does."""
        values = (
            run.row or None,
            self._session,
            int(time.time()),
            run.to_json(),
        )
        with contextlib.suppress(*ERRORS), self._files.store.transaction() as db:
            insert = "INSERT OR REPLACE INTO run VALUES (?, ?, ?, ?)"
            run.row = db.execute(insert, values).lastrowid or 0

    def _forget(self, run: RunSnapshot) -> None:
        with contextlib.suppress(*ERRORS):
            self._files.store.execute("DELETE FROM run WHERE id = ?", (run.row,))
            run.row = 0

    def close(self) -> None:
        """End what is under way."""
        self._files.close()
        if self._first_look:
            self._first_look.join(CLOSING_SECONDS)

    # ---- taking back

    def undo(self, messages: list[Message]) -> UndoResult:
        """Take back what the last run changed in the workspace, and its part of `messages`.

        What the user's own commands have added since stays. With a problem, nothing is done.
        """
        if not self.runs:
            return UndoResult(problem="There is nothing to undo.")
        run = self.runs[-1]
        done = self._change_files(run, is_undo=True)
        if done.problem:
            return done
        self.undone.append(self.runs.pop())
        self._forget(run)
        # Its messages: all from its prompt on
        run.place = _place_of(run, messages)
        run.removed = messages[run.place :]
        run.left = [message for message in run.removed if message.get("meta", {}).get("own")]
        kept = messages[: run.place]
        is_summarized = any(message.get("meta", {}).get("summary") for message in kept)
        if not run.removed or is_summarized:
            run.left.append(user(TAKEN_BACK.format(", ".join(done.paths) or "no file")))
        if run.removed:
            done.prompt = text_of(run.removed[0])
        messages[run.place :] = run.left
        return done

    def redo(self, messages: list[Message]) -> UndoResult:
        """Do again what was undone last."""
        if not self.undone:
            return UndoResult(problem="There is nothing to redo.")
        run = self.undone[-1]
        done = self._change_files(run, is_undo=False)
        if not done.problem:
            self.runs.append(self.undone.pop())
            self._save(run)
            messages[run.place : run.place + len(run.left)] = run.removed
        return done

    def _change_files(self, run: RunSnapshot, is_undo: bool) -> UndoResult:
        """Make the files of a run what they were before it, or after it."""
        try:
            files, torn = net_change([run])
            if is_undo:
                files = reversed_pairs(files)
            goals: dict[str, Entry | None] = {}
            changed: list[str] = []
            for path in sorted(files.keys() - set(run.lost)):
                expected, goal = files[path]
                now = self._files.reader.entry_now(path)
                if now != goal:
                    goals[path] = goal
                    if path in torn or now != expected:
                        changed.append(path)
                elif is_linked_otherwise(expected, goal):
                    goals[path] = goal
            if changed:
                return UndoResult(problem=CHANGED.format(", ".join(changed)))
            lost = self._files.restore.write(goals)
            runs = [*self.runs, *self.undone]
            for stored in renumber(runs, self._files.restore.new_inodes):
                self._save(stored)
        except ERRORS as error:
            why = str(error).rstrip(".")
            return UndoResult(problem=f"The files of this run cannot be restored: {why}.")
        return UndoResult(
            paths=sorted(goals.keys() - lost),
            lost=sorted(lost.union(run.lost)),
            is_partly_known=run.is_partly_known,
        )

    def diff(self, run: RunSnapshot | None = None) -> str:
        """A unified diff of what a run changed, or all runs. Raises StoreError."""
        files: dict[str, Pair]
        files, _ = net_change([run] if run else self.runs)
        return diff_of(files, self._files.store.blobs(blobs_of(files.values())))


def _place_of(run: RunSnapshot, messages: list[Message]) -> int:
    """Where the prompt of a run is; at the end if there was none, or if it was compacted."""
    place = len(messages)
    for number, message in enumerate(messages):
        is_prompt = message.get("role") == "user"
        if is_prompt and message.get("meta", {}).get("timestamp") == run.message:
            place = number
    return place
