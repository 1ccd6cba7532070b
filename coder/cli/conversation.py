"""The conversation at the terminal as it is kept: its record, its title, resuming an older one, undo and redo.

A subscriber of the session's events. Where the conversation is not kept, the states of its files lie in a
private temporary folder; one task that is not kept has none, since nothing can undo it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coder.agent.profiles import choices
from coder.cli.app import App
from coder.cli.config import ConfigError, data_folder
from coder.cli.optional import optional
from coder.events import (
    Event,
    MessageEnd,
    Nested,
    ReasoningDelta,
    RunEnd,
    RunStart,
    StepEnd,
    TextDelta,
    ToolCallDelta,
)
from coder.history import text_of, user
from coder.sessions.database import MEMORY
from coder.sessions.recorder import Recorder, parts, to_model_messages
from coder.sessions.rows import first_difference
from coder.sessions.snapshots import Snapshots, UndoResult, place
from coder.sessions.store import SessionInfo, Store, StoreError, folder_name, open_store
from coder.tools.process import private_folder
from coder.types import Message

if TYPE_CHECKING:
    from coder.agent.titles import Titler

TAKEN_BACK = (
    "I have taken back what you did last ({}). What is said of it above, in a summary, does not hold any "
    "more: look at the files before you go on."
)
SUMMARISED = (
    "The conversation was shortened meanwhile, so that its summary still tells of it; the model was told "
    "that it was taken back."
)


@dataclass(frozen=True)
class UndoEntry:
    """The list of messages before an undo and after it."""

    before: list[Message]
    after: list[Message]

    @property
    def removed(self) -> list[Message]:
        kept = set(map(id, self.after))
        return [message for message in self.before if id(message) not in kept]

    @property
    def words(self) -> str:
        """The prompt of the run that was undone, in one line."""
        return " ".join(text_of(self.removed[0]).split()) if self.removed else ""


class Conversation:
    """Keeps the conversation of `app` in `store`, and the states of its files in the folder `data`.

    `titles`: let the model find a title, beside the first run. `one_task`: the session ends with its first run.
    """

    def __init__(
        self,
        app: App,
        store: Store,
        data: Path,
        *,
        titles: bool = False,
        one_task: bool = False,
    ) -> None:
        self.app, self.store, self.titles = app, store, titles
        self.undoable, self.data = not (one_task and store.in_memory), data
        if store.in_memory:
            self.data = Path(os.devnull)
            with contextlib.suppress(OSError):  # then nothing can be kept for undo
                self.data = Path(private_folder()) if self.undoable else self.data
        self.title = ""
        self.titler: Titler | None = None
        self.recorder: Recorder | None = None
        self.undone: list[UndoEntry] = []  # the newest last
        self.children = ChildRecorders(app, store)
        self.snapshots = self._new_snapshots()
        self._reported = store.notice
        self._kept_records = 0  # of undo, that are on disk
        self._model = ("", "")  # model and agent, as they are on disk
        self.begin()
        app.agent.subscribe(self)

    def _new_snapshots(self) -> Snapshots:
        snapshots = Snapshots(self.app.cwd, self.data, harmless=self._harmless())
        if not self.undoable:
            snapshots.off = "one task that is not kept has none"
        return snapshots

    def _harmless(self) -> set[str]:
        """The names of tools that change nothing."""
        tools = self.app.agent.state.tools.tools.values()
        return {each.name for each in tools if each.concurrent and each.name != "task"} | {"todo"}

    # -- which session it is

    def begin(self) -> None:
        """Begin a new session; the one before stays on disk."""
        recorder, app = None, self.app
        self._model = app.model.name, app.spec.name
        try:
            new = self.store.create(str(app.cwd), model=app.model.name, agent=app.spec.name)
            recorder = self._recorder(new, [])
        except StoreError as error:
            app.notices.append(f"{error} The conversation is not saved.")
        self._adopt(recorder, self._new_snapshots())

    def resume(self, given: str) -> SessionInfo:
        """Continue the session with this id, or beginning of one. Raises StoreError; then the present one continues."""
        info, app = self.store.find(given), self.app
        if self.recorder and info.id == self.recorder.session_id:
            return info
        recorder, snapshots = self._recorder(info.id), self._new_snapshots()
        try:
            with contextlib.suppress(ValueError):  # records that another program has changed
                snapshots.restore(parts(self.store, info.id, "snapshot"))
        except StoreError:
            recorder.close()
            raise
        self._adopt(recorder, snapshots, info.title)
        self._model = info.model, info.agent
        primary = [each.name for each in choices(app.agents, "primary", "all")]
        if info.agent != app.spec.name and info.agent in primary:
            app.work_as(info.agent)
            app.notices.append(f"{info.agent} goes on, as before: {app.spec.description}.")
        if info.directory != folder_name(str(app.cwd)):
            app.notices.append(
                f"This conversation began in {info.directory}; now files and permissions are those of "
                f"{app.cwd}."
            )
        return info

    def _recorder(self, session_id: str, messages: list[Message] | None = None) -> Recorder:
        tell, harmless = self.app.notices.append, self._harmless()
        return Recorder(self.store, session_id, messages, tell=tell, harmless=harmless)

    def _adopt(self, recorder: Recorder | None, snapshots: Snapshots, title: str = "") -> None:
        """Leave the present session and continue with this one; all that may fail was done before."""
        self._leave()
        self.recorder, self.snapshots, self.title = recorder, snapshots, title
        self._kept_records = snapshots.record_count
        self.undone.clear()
        messages, session_id = (recorder.messages, recorder.session_id) if recorder else ([], "")
        self.app.adopt(messages, session_id)
        self._report_damage()

    def _leave(self) -> None:
        self._take_title()
        self.children.close()
        if self.titler:
            self.titler.stop()
        if self.recorder:
            self.recorder.close()
        self.titler = self.recorder = None
        self.snapshots.close()

    def latest(self) -> SessionInfo | None:
        """The newest of this folder."""
        return self.store.latest(str(self.app.cwd))

    def list(self) -> Sequence[SessionInfo]:
        """Those of this folder that can be resumed, the newest first."""
        own = self.recorder.session_id if self.recorder else ""
        return [info for info in self.store.sessions(str(self.app.cwd)) if info.id != own]

    @property
    def problem(self) -> str:
        """Why the conversation is not saved; "" where it is."""
        return self.recorder.problem if self.recorder else "The conversation is not saved."

    @property
    def session_id(self) -> str:
        """The id with which the conversation can be resumed; "" where it is not kept."""
        kept = self.recorder and not (self.problem or self.store.in_memory)
        return self.recorder.session_id if self.recorder and kept else ""

    def close(self) -> str:
        """The end; returns the id with which the session can be resumed, "" where there is nothing to resume."""
        session_id = self.session_id if self.app.agent.messages else ""
        self.settle()
        self._leave()
        self.store.close()
        return session_id

    # -- what happens in it

    def __call__(self, event: Event) -> None:
        if isinstance(event, TextDelta | ReasoningDelta | ToolCallDelta):
            return
        ends = isinstance(event, StepEnd | RunEnd)
        if not ends:  # written first: a look at the files takes its time
            self._record(event)
        self.snapshots(event, self.app.agent.token)
        self.app.notices += [notice.text for notice in self.snapshots.taken_notices()]
        if ends:
            self._keep_undo()
            self._record(event)
        if isinstance(event, RunStart):
            self.undone.clear()
        elif self.titles and isinstance(event, MessageEnd) and not (self.title or self.titler):
            self._begin_title(event.message)
        self._take_title()
        self._report_damage()

    def _begin_title(self, message: Message) -> None:
        if module := optional("coder.agent.titles"):
            self.titler = module.Titler(self.app.chat_model(self.app.model.name), text_of(message))

    def _record(self, event: Event) -> None:
        if self.recorder:
            self.recorder(event)
            self.children(event)
            model = self.app.model.name, self.app.spec.name
            if isinstance(event, RunStart) and model != self._model:
                self._model = model
                self._quietly(lambda: self.store.set_model(self.app.agent.session_id, *model))

    def settle(self) -> None:
        """Behind a run, however it ended: write how the history was repaired, and what belongs to undo."""
        self.snapshots.finish()
        self._keep_undo()
        self.sync()

    def sync(self) -> None:
        """Write what has been done to the messages outside of a run."""
        if self.recorder:
            self.recorder.sync()

    def _keep_undo(self) -> None:
        """Step by step: a run that is killed can be undone, too."""
        if self.recorder and self.snapshots.record_count > self._kept_records:
            records = self.snapshots.records()
            self.recorder.keep_undo(records[self._kept_records :], more=True)
            self._kept_records = len(records)

    def _take_title(self) -> None:
        if self.recorder and self.titler and self.titler.title:
            title, self.titler = self.titler.title, None
            self.title = title
            self._quietly(lambda: self.store.rename(self.app.agent.session_id, title))

    def _report_damage(self) -> None:
        """A damaged file may be noticed whenever it is read or written."""
        if self.store.notice != self._reported:
            self._reported = self.store.notice
            self.app.notices.append(self._reported)

    def _quietly(self, write: Callable[[], None]) -> None:
        with contextlib.suppress(StoreError):  # the recorder reports it, too
            write()

    # -- undo

    def undo(self) -> UndoResult:
        """Take back the last run: what it did to the files, and its part of the conversation; with a problem, nothing.

        The user's own commands since then stay in the conversation.
        """
        done = self.snapshots.undo()
        if done.problem or not done.run:
            return done
        messages = self.app.agent.messages
        at = place(done.run, messages)
        summarised = _is_summarised(messages, at)
        after = messages[: len(messages) if at is None else at]
        after += [each for each in messages[len(after) :] if each.get("meta", {}).get("own")]
        if summarised:
            after.append(user(TAKEN_BACK.format(", ".join(done.paths) or "no file")))
        self.undone.append(UndoEntry(messages[:], after))
        self._replace_messages(after)
        return dataclasses.replace(done, note=SUMMARISED if summarised else "")

    def redo(self) -> UndoResult:
        """Do again what was undone last."""
        done = self.snapshots.redo()
        if not done.problem and self.undone:
            entry, messages = self.undone.pop(), self.app.agent.messages
            since = messages[len(entry.after) :]
            same = first_difference(entry.after, messages[: len(entry.after)]) is None
            self._replace_messages([*entry.before, *since] if same else [*messages, *entry.removed])
        return done

    def _replace_messages(self, messages: Sequence[Message]) -> None:
        self.app.agent.messages[:] = messages
        if self.app.folder_files:
            self.app.folder_files.take_up(self.app.agent.messages)
        if self.recorder:
            records = self.snapshots.records()
            self.recorder.keep_undo(records)
            self._kept_records = len(records)
        self.settle()


def _is_summarised(messages: Sequence[Message], at: int | None) -> bool:
    """Does a summary tell of the run whose first message is at this place, or no longer in the list?"""
    if at is None:
        return True
    begun = messages[at].get("meta", {}).get("timestamp", 0)
    metas = [each.get("meta", {}) for each in messages[:at]]
    return any(meta.get("summary") and meta.get("timestamp", 0) >= begun for meta in metas)


class ChildRecorders:
    """Keeps the sessions of sub-agents beside that of their parent, so that `task_id` finds them again."""

    def __init__(self, app: App, store: Store) -> None:
        self.app, self.store = app, store
        self.open: dict[str, Recorder] = {}  # of the children at work
        if app.subagents:
            app.subagents.load = self.load

    def __call__(self, event: Event) -> None:
        if isinstance(event, Nested) and event.session_id:
            with contextlib.suppress(StoreError):
                self._opened(event)(event.event)
                if isinstance(event.event, RunEnd):
                    self.open.pop(event.session_id).close()
        elif isinstance(event, RunEnd):
            self.close()

    def _opened(self, event: Nested) -> Recorder:
        app = self.app
        assert app.subagents  # whose event this is
        child = app.subagents.children[event.session_id]
        if child.id not in self.open:
            try:
                self.store.get(child.id)
            except StoreError:
                names = {"agent": event.agent, "parent": app.agent.session_id}
                names["model"] = app.agents[event.agent].model or app.model.name
                self.store.create(str(app.cwd), session_id=child.id, **names)
            self.open[child.id] = Recorder(self.store, child.id, child.messages)
        return self.open[child.id]

    def close(self) -> None:
        """No child is at work any more; one that was aborted is kept as far as it came."""
        while self.open:
            self.open.popitem()[1].close()

    def load(self, task_id: str) -> tuple[str, list[Message]] | None:
        """(agent, messages) of a child of this session, from an earlier process; None where there is none."""
        with contextlib.suppress(StoreError):
            info = self.store.get(task_id)
            if info.parent == self.app.agent.session_id and not info.forked:
                return info.agent, to_model_messages(self.store, task_id)
        return None


def open_conversation(
    app: App, arguments: argparse.Namespace, *, titles: bool = False, one_task: bool = False
) -> Conversation:
    """A new conversation, or the one that -c or -r names. Raises ConfigError."""
    resumes = arguments.continue_ or arguments.resume
    if arguments.no_session and resumes:
        flag = "-r" if arguments.resume else "-c"
        raise ConfigError(f"--no-session and {flag} exclude each other: give one of them")
    store, notice = open_store(MEMORY if arguments.no_session else data_folder() / "sessions.db")
    if notice and resumes:  # there is nothing to resume then
        store.close()
        raise ConfigError(notice.removesuffix(" This session is not saved."))
    app.notices += [notice] if notice else []
    conversation = Conversation(app, store, data_folder(), titles=titles, one_task=one_task)
    try:
        if arguments.resume:
            conversation.resume(arguments.resume)
        elif arguments.continue_ and (newest := conversation.latest()):
            conversation.resume(newest.id)
        elif arguments.continue_:
            raise ConfigError("there is no conversation of this folder to continue")
        if arguments.agent:
            app.work_as(arguments.agent)
    except (StoreError, ConfigError) as error:
        conversation.close()
        raise ConfigError(store.notice or str(error)) from None
    return conversation
