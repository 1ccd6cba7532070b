"""Snapshots: the files of the workspace before and after each step, so that what the agent changed can be taken back.

    snapshots = Snapshots(workspace, data)
    for event in run_loop(...):
        snapshots(event, abort)
    snapshots.undo()

They lie in a git repository of our own in the data folder (row A17: a git snapshot at the start and the end of every step).
Nothing of the user's git is written, no configuration of the user's or of the workspace is read but the ignore rules, and no
filter, hook or monitor that a workspace names is run. The start of a step is its first tool: a step whose tools change
nothing has no snapshots, and what the user changes while the model answers is nobody's but the user's.

Of modes the executable bit is kept, as git does. Not kept, and named in `lost`: files above MAX_FILE, git repositories inside
of the workspace (submodules too), and what was ignored before. Off for the session, with one notice, where git is missing or
the tree is too large.

What it leaves out: ignored files, all that lies outside of the workspace, commits, sockets, FIFOs and devices; the
conversation, which the session cuts at `place`; a `redo` in another process than its `undo`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coder.abort import Abort
from coder.features.git import Entry, Git, SnapshotError, State, TooLong
from coder.features.restoring import Way, Writer, is_relative
from coder.features.shadow import MAX_FILES, Shadow
from coder.types import (
    Aborted,
    Event,
    Message,
    MessageEnd,
    Notice,
    RunEnd,
    RunStart,
    StepEnd,
    StepStart,
    T,
    ToolEnd,
    ToolError,
    ToolResult,
    ToolStart,
)

SECONDS = 10.0  # that one snapshot may take
AFTER_ABORT = 1.0  # the same where a person waits for the prompt
IDLE_DAYS = 60  # that the repository of a workspace stays in which nobody works
DAY = 86_400.0
OUTSIDE = "What was done outside of the workspace, to ignored files or in git itself stays as it is."
ID = re.compile(r"[0-9a-f]{40,64}")


# ---- what is recorded ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepSnapshot:
    """The trees around a step's tools; "" where one could not be taken. `made` and `gone` are empty folders, `lost` the
    paths that differ and whose contents are not kept. `named` are those that its tools say they changed; where none of them could
    change others (`open` is false), other changes are somebody else's. Paths are relative to the workspace."""

    step: int
    before: str
    after: str
    made: Sequence[str] = ()
    gone: Sequence[str] = ()
    lost: Sequence[str] = ()
    named: Sequence[str] = ()
    open: bool = True


@dataclass
class RunSnapshot:
    """One run: `message` is the key (`key_of`) of the user message it began with, or "" where it went on without one."""

    message: str = ""
    steps: list[StepSnapshot] = field(default_factory=list)

    @property
    def before(self) -> str:
        return self.steps[0].before if self.steps else ""

    @property
    def after(self) -> str:
        return self.steps[-1].after if self.steps else ""

    @property
    def lost(self) -> list[str]:
        return sorted({path for step in self.steps for path in step.lost})

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: {"message", "steps": [{"step", "before", "after", "made", "gone", "lost", "named", "open"}]}."""
        steps = [{name: list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
                  for name, value in dataclasses.asdict(step).items()} for step in self.steps]
        return {"message": self.message, "steps": steps}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> RunSnapshot:
        """Raises ValueError for what `to_dict` does not give."""
        try:
            steps = [StepSnapshot(**step) for step in record["steps"]]
            ids = [tree for step in steps for tree in (step.before, step.after)]
            paths = [path for step in steps for path in (*step.made, *step.gone, *step.lost, *step.named)]
            if not all(tree == "" or ID.fullmatch(tree) for tree in ids) or not all(map(is_relative, paths)):
                raise ValueError("it names no tree, or a path outside of the workspace")
            return cls(str(record["message"]), steps)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it is no record of a run: {error}") from None


@dataclass(frozen=True)
class Undone:
    """What `undo` or `redo` did: the `paths` that were written or removed, and the `run` that they belong to.

    With a `problem` nothing counts as done, and the run stays where it was; `conflicts` are the paths that somebody else has
    changed since. `lost` are those that the run changed and that are not kept, `others` those that somebody else changed while it
    ran: both are left as they are. `note` is what is never taken back, said once.
    """

    run: RunSnapshot | None = None
    paths: Sequence[str] = ()
    conflicts: Sequence[str] = ()
    lost: Sequence[str] = ()
    others: Sequence[str] = ()
    note: str = ""
    problem: str = ""


def key_of(message: Message) -> str:
    """What a message is known by, also after it was stored and loaded."""
    facts = [message.get("role"), message.get("content"), message.get("meta", {}).get("timestamp")]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def place(run: RunSnapshot, messages: Sequence[Message]) -> int | None:
    """Where in the list the user message of a run stands; None where it is no longer there (compacted), or never was."""
    return next((at for at in range(len(messages) - 1, -1, -1) if key_of(messages[at]) == run.message), None)


# ---- the snapshots of a session --------------------------------------------------------------------------


class Snapshots:
    """The runs of a session and what they changed in the workspace; a subscriber of their events.

    `data` is the data folder of the program; the repository is made in it, 0700, when it is first needed. `harmless` are the
    names of tools that change nothing, `seconds` what one snapshot may take, `max_files` how many files it may have. Where it
    cannot work, `off` says why, and `taken_notices` tells it once. `runs` are the runs of the session, `undone` those that
    `undo` has taken back, the newest last in both.
    """

    def __init__(self, workspace: Path, data: Path, *, harmless: Collection[str] = (), seconds: float = SECONDS,
                 max_files: int = MAX_FILES) -> None:
        self.harmless = harmless
        self.seconds = seconds
        self.runs: list[RunSnapshot] = []
        self.undone: list[RunSnapshot] = []
        self.off = ""
        self._shadow = Shadow(workspace, data, max_files)
        self._notices: list[Notice] = []
        self._step = 0
        self._before: State | None = None
        self._used = False  # has the step under way begun a tool?
        self._silent: set[str] = set()  # the calls of the step that have not said what they changed
        self._named: set[str] = set()  # what the others have
        self._told = False
        if not self._shadow.program:
            self._switch_off("git was not found")

    # -- taking them

    def track(self, abort: Abort) -> str:
        """The id of the tree that the workspace is now, or "" where they are off. Raises Aborted."""
        state = self._look(abort, self.seconds)
        return state.tree if state else ""

    def __call__(self, event: Event, abort: Abort | None = None) -> None:
        """Take what an event asks for: the state before the first tool of a step, and after the step.

        `abort` is the run's. When it is set, the state after the step is still taken, in AFTER_ABORT seconds.
        """
        match event:
            case RunStart():
                self.undone.clear()
                self.runs.append(RunSnapshot())
                self._step = 0
            case MessageEnd(message={"role": "user"} as message) if self._step <= 1 and self.runs and not self.runs[-1].message:
                self.runs[-1].message = key_of(message)
            case StepStart(step=step):
                self._step = step
            case ToolStart(id=call_id, name=name) if name not in self.harmless:
                self._silent.add(call_id)
                self._begin(abort or Abort())
            case ToolEnd(id=call_id, result=result) if call_id in self._silent:
                self._told_of(call_id, result)
            case StepEnd() | RunEnd():
                self.finish(abort)

    def _begin(self, abort: Abort) -> None:
        """In front of the first tool of a step."""
        if self._used:
            return
        self._used = True
        with contextlib.suppress(Aborted):
            self._before = self._look(abort, self.seconds)

    def _told_of(self, call_id: str, result: ToolResult) -> None:
        """A tool that changes certain files and no others says which, in `details`: "path" or "paths"."""
        paths = result.details.get("paths") or [path for path in [result.details.get("path")] if path]
        inner = [os.path.relpath(path, self._shadow.workspace) for path in paths if isinstance(path, str)]
        if inner:
            self._silent.discard(call_id)
            self._named |= {path for path in inner if is_relative(path)}

    def finish(self, abort: Abort | None = None) -> None:
        """End the step under way. To be called behind a run that was broken off, which may tell no end of its step."""
        if not self._used:
            return
        before, self._before, self._used = self._before, None, False
        try:
            after = self._look(abort or Abort(), self.seconds)
        except Aborted:
            after = self._look(Abort(), AFTER_ABORT)
        if self.runs:
            step = self._between(before, after)
            self.runs[-1].steps.append(dataclasses.replace(step, named=sorted(self._named), open=bool(self._silent)))
        self._named, self._silent = set(), set()

    def _between(self, before: State | None, after: State | None) -> StepSnapshot:
        lost: list[str] | None = []
        if before and after and before != after:
            lost = self._in_turn(lambda git: self._shadow.lost(git, before, after), Abort(), self.seconds)
        if before is None or after is None or lost is None:
            return StepSnapshot(self._step, "", "")
        return StepSnapshot(self._step, before.tree, after.tree, sorted(after.folders - before.folders),
                            sorted(before.folders - after.folders), lost)

    def _look(self, abort: Abort, seconds: float) -> State | None:
        return self._in_turn(self._shadow.look, abort, seconds)

    def _in_turn(self, work: Callable[[Git], T], abort: Abort, seconds: float) -> T | None:
        """Do something with the repository; where that fails, it is off from then on. Raises Aborted."""
        if self.off:
            return None
        try:
            with self._shadow.turn(abort, seconds) as git:
                return work(git)
        except (SnapshotError, OSError) as error:
            if not isinstance(error, TooLong) or seconds >= self.seconds:  # in a hurry it may fail, and work the next time
                self._switch_off(str(error))
            return None

    def _switch_off(self, reason: str) -> None:
        self.off = reason
        self._notices.append(Notice(f"No snapshots in this session, so no /undo of file changes: {reason}."))

    def taken_notices(self) -> list[Notice]:
        """What a person should know, each once."""
        notices, self._notices = self._notices, []
        return notices

    # -- keeping them

    def records(self) -> list[dict[str, Any]]:
        """The runs as JSON has them."""
        return [run.to_dict() for run in self.runs]

    def restore(self, records: Iterable[Mapping[str, Any]]) -> None:
        """The runs of a session that goes on. Raises ValueError for what `records` does not give."""
        self.runs, self.undone = [RunSnapshot.from_dict(record) for record in records], []

    # -- taking back

    def undo(self, warn: Callable[[Sequence[str]], None] = lambda paths: None) -> Undone:
        """Take back what the last run changed in the workspace; with a problem or a conflict, nothing.

        `warn` is called before anything is written, with the paths that somebody else may have changed: no tool has named them, and
        one was running that can change anything.
        """
        return self._travel(self.runs, self.undone, back=True, warn=warn)

    def redo(self) -> Undone:
        """Do again what was undone last."""
        return self._travel(self.undone, self.runs, back=False)

    def _travel(self, source: list[RunSnapshot], target: list[RunSnapshot], back: bool,
                warn: Callable[[Sequence[str]], None] = lambda paths: None) -> Undone:
        word = "undo" if back else "redo"
        if not source:
            return Undone(problem=f"There is nothing to {word}.")
        run = source[-1]
        if self._used:
            return Undone(run, problem=f"There is no {word} during a run.")
        try:
            paths, conflicts, others = self._moved(run, back, warn) if run.steps else ([], [], [])
        except (SnapshotError, OSError, ToolError) as error:
            return Undone(run, problem=f"The files of this run cannot be brought back: {error}.")
        if conflicts:
            return Undone(run, conflicts=conflicts, problem="Nothing was done: these files were changed since.")
        target.append(source.pop())
        note, self._told = ("" if self._told or not run.steps else OUTSIDE), self._told or bool(run.steps)
        return Undone(run, paths, lost=run.lost, others=others, note=note)

    def _moved(self, run: RunSnapshot, back: bool, warn: Callable[[Sequence[str]], None]) -> tuple[list[str], list[str], list[str]]:
        """The paths that were written, or those that are in the way of it; and those that are not the run's."""
        if self.off:
            raise SnapshotError(self.off)
        if not all(step.before and step.after for step in run.steps):
            raise SnapshotError("no snapshot could be taken in one of its steps")
        with self._shadow.turn(Abort(), self.seconds) as git:
            way = self._way(git, [run], back)
            writer = Writer(self._shadow.workspace, way, git.entries(self._shadow.look(git).tree))
            if conflicts := writer.conflicts():
                return [], conflicts, []
            goals = [goal[1] for _, goal in writer.todo.values() if goal]
            if git.missing(goals):
                raise SnapshotError(GONE)
            if unsure := sorted(way.unsure & set(writer.todo)):
                warn(unsure)
            git.deadline += 60.0  # what is begun is ended
            writer.write(git.contents)
        return sorted(writer.todo), [], sorted(way.others)

    def _way(self, git: Git, runs: Iterable[RunSnapshot], back: bool) -> Way:
        """All that the runs changed, as one change."""
        way = Way()
        made: dict[str, bool] = {}
        for step in (step for run in runs for step in run.steps if step.before and step.after):
            if git.missing([step.before, step.after]):
                raise SnapshotError(GONE)
            for path, (old, new) in git.changes(step.before, step.after).items():
                if not _kept(path, step, old, new):
                    continue
                if not step.open and path not in step.named:
                    way.others.add(path)
                    continue
                way.unsure |= {path} if path not in step.named else set()
                first, last = way.files.get(path, (old, old))
                way.torn |= {path} if last != old else set()
                way.files[path] = first, new
            for folder, is_made in [*((each, True) for each in step.made), *((each, False) for each in step.gone)]:
                made[folder] = made.get(folder, is_made) if back else is_made
        way.files = {path: pair[::-1] if back else pair for path, pair in way.files.items() if pair[0] != pair[1] or path in way.torn}
        way.make = {folder for folder, is_made in made.items() if is_made != back}
        way.remove = set(made) - way.make
        return way

    def diff(self, run: RunSnapshot | None = None) -> str:
        """A unified diff of what a run changed, or all runs of the session; binary files are named.

        Raises SnapshotError where there are no snapshots, or no longer.
        """
        if self.off:
            raise SnapshotError(self.off)
        with self._shadow.turn(Abort(), self.seconds) as git:
            changes = self._way(git, self.runs if run is None else [run], back=False).files
            return self._shadow.diff(git, changes) if changes else ""

    def prune_due(self) -> bool:
        """Is there something that may be old? Once a day."""
        stamp = self._shadow.folder / "pruned"
        return not self.off and self._shadow.folder.exists() and not (stamp.exists() and _age(stamp) < DAY)

    def prune(self, abort: Abort, seconds: float = SECONDS) -> None:
        """Throw away what is old: in this repository, once a day, what no snapshot of KEPT_DAYS needs; those of workspaces in
        which nobody worked for IDLE_DAYS. What fails is tried again the next day. Raises Aborted."""
        if not self.prune_due():
            return
        shadow, stamp = self._shadow, self._shadow.folder / "pruned"
        begun = stamp.exists()
        with contextlib.suppress(SnapshotError, OSError):
            stamp.touch(0o600)
            for other in shadow.folder.parent.iterdir():
                if other != shadow.folder and _age(other / "lock") > IDLE_DAYS * DAY:
                    shutil.rmtree(other, ignore_errors=True)
            if begun:  # in a new one there is nothing old
                with shadow.turn(abort, seconds) as git:
                    shadow.collect(git)


GONE = "the snapshots are no longer kept"


def _kept(path: str, step: StepSnapshot, old: Entry | None, new: Entry | None) -> bool:
    """Are both contents known? A repository inside of the workspace has a commit in the place of one."""
    return path not in step.lost and not any(entry and entry[0] == "160000" for entry in (old, new))


def _age(path: Path) -> float:
    """Seconds since a file was last written; 0 where there is none."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0
