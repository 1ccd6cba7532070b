"""The conversation at the terminal as it is kept: its record, its title, resuming an older one, undo and redo.

A subscriber of the agent's events. Where the conversation is not kept, the states of its files lie in a
private temporary folder; one task that is not kept has none, since nothing can undo it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coder import events
from coder.agent.profiles import choices
from coder.cli.app import App
from coder.cli.config import data_folder
from coder.cli.optional import optional
from coder.cli.settings import ConfigError
from coder.events import Event, RunEnd, StepEnd
from coder.history import text_of, user
from coder.sessions.recorder import Recorder, parts, to_model_messages
from coder.sessions.snapshots import Snapshots, UndoResult, place
from coder.sessions.store import MEMORY, SessionInfo, Store, StoreError, folder_name, open_store
from coder.tools.process import private_folder
from coder.types import Message

if TYPE_CHECKING:
    from coder.agent.titles import Titler

TAKEN_BACK = (
    "I have undone your last changes ({}). The summary above still contains them: look at the files before "
    "you go on."
)
SUMMARISED = (
    "The conversation was shortened meanwhile, and its summary still contains this run; the model has been "
    "informed that it was undone."
)
DELTAS = (events.TextDelta, events.ReasoningDelta, events.ToolCallDelta)


@dataclasses.dataclass(frozen=True)
class UndoEntry:
    """The list of messages before an undo and after it; `words`: the prompt of the run that was undone."""

    before: list[Message]
    after: list[Message]
    words: str


class Conversation:
    """Keeps the conversation of `app` in `store`, and the states of its files in the folder `data`.

    `titles`: let the model find a title, beside the first run. `one_task`: there is one run only.
    """

    def __init__(
        self, app: App, store: Store, data: Path, *, titles: bool = False, one_task: bool = False
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
        self.snapshots = Snapshots(app.cwd, self.data)
        self.snapshots.off = "" if self.undoable else "one task that is not kept has none"
        self._notice = store.notice  # the last that was reported
        self._saved_records = 0  # of undo
        self.begin()
        app.agent.subscribe(self)

    def _harmless(self) -> set[str]:
        """The names of tools that change nothing."""
        tools = self.app.agent.state.tools.tools.values()
        return {each.name for each in tools if each.concurrent and each.name != "task"} | {"todo"}

    # -- which session it is

    def begin(self) -> None:
        """Begin a new session; the one before stays on disk."""
        recorder, app = None, self.app
        try:
            new = self.store.create(str(app.cwd), agent=app.spec.name, model=app.model.name)
            recorder = self._recorder(new, [])
        except StoreError as error:
            app.notices.append(f"{error} The conversation is not saved.")
        self._adopt(recorder)

    def resume(self, given: str) -> SessionInfo:
        """Continue the session with this id, or beginning of one. Raises StoreError; then the present one stays."""
        info, app = self.store.find(given), self.app
        if self.recorder and info.id == self.recorder.session_id:
            return info
        records, recorder = parts(self.store, info.id, "snapshot"), self._recorder(info.id)
        self._adopt(recorder, info.title, records)
        primary = [each.name for each in choices(app.agents, "primary", "all")]
        if info.agent != app.spec.name and info.agent in primary:
            app.work_as(info.agent)
            app.notices.append(f"Agent {info.agent} continues: {app.spec.description}.")
        if info.directory != folder_name(str(app.cwd)):
            began = f"This conversation began in {info.directory}"
            app.notices.append(f"{began}; now files and permissions are those of {app.cwd}.")
        return info

    def _recorder(self, session_id: str, messages: list[Message] | None = None) -> Recorder:
        tell, harmless = self.app.notices.append, self._harmless()
        return Recorder(self.store, session_id, messages, tell=tell, harmless=harmless)

    def _adopt(
        self, recorder: Recorder | None, title: str = "", records: Sequence[Any] = ()
    ) -> None:
        """Leave the present session and continue with this one; all that may fail was done before."""
        self._leave()
        self.recorder, self.title = recorder, title
        self.snapshots.harmless = self._harmless()
        with contextlib.suppress(ValueError):  # records that another program has changed
            self.snapshots.restore(records)
        self._saved_records = len(self.snapshots.records())
        self.undone.clear()
        self.app.adopt(*((recorder.messages, recorder.session_id) if recorder else ([], "")))

    def _leave(self) -> None:
        self.children.close()
        if self.titler:
            self.titler.stop()
        if self.recorder:
            self._take_title()
            self.recorder.close()
        self.titler = self.recorder = None

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
        self.snapshots.close()
        self.store.close()
        return session_id

    # -- what happens in it

    def __call__(self, event: Event) -> None:
        if isinstance(event, DELTAS):
            return
        ends = isinstance(event, StepEnd | RunEnd)
        if not ends:  # written first: a look at the files takes its time
            self._record(event)
        self.snapshots(event, self.app.agent.token)
        self.app.notices += [notice.text for notice in self.snapshots.taken_notices()]
        if ends:
            self._keep_undo()
            self._record(event)
        if isinstance(event, events.RunStart):
            self.undone.clear()
        elif self.titles and isinstance(event, events.MessageEnd) and not self.title:
            self._begin_title(event.message)
        if self.recorder:
            self._take_title()
        if self.store.notice != self._notice:  # a damaged file may be noticed at any moment
            self._notice = self.store.notice
            self.app.notices.append(self._notice)

    def _record(self, event: Event) -> None:
        if self.recorder:
            if isinstance(event, events.RunStart):
                self.recorder.set_model(self.app.model.name, self.app.spec.name)
            self.recorder(event)
            self.children(event)

    def settle(self) -> None:
        """Behind a run, however it ended: write how the history was repaired, and what belongs to undo."""
        self.snapshots.finish()
        self._keep_undo()
        self.sync()

    def sync(self) -> None:
        """Write what has been done to the messages outside of a run."""
        if self.recorder:
            self.recorder.sync()

    def _keep_undo(self, again: bool = False) -> None:
        """Step by step, so that a run that is killed can be undone, too. `again`: all records are others."""
        records = self.snapshots.records()
        if self.recorder and (again or len(records) > self._saved_records):
            new = records if again else records[self._saved_records :]
            self.recorder.keep_undo(new, more=not again)
            self._saved_records = len(records)

    def _begin_title(self, message: Message) -> None:
        if not self.titler and (module := optional("coder.agent.titles")):
            self.titler = module.Titler(self.app.chat_model(self.app.model.name), text_of(message))

    def _take_title(self) -> None:
        if self.titler and self.titler.title:
            found = RunEnd("stop", self.titler.title, self.titler.usage, 1)
            self._record(events.Nested("title", found))
            self.app.usage += self.titler.usage
            self.title, self.titler = self.titler.title, None
            with contextlib.suppress(StoreError):  # the recorder reports it, too
                self.store.rename(self.app.agent.session_id, self.title)

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
        after = messages[:at]
        removed = messages[len(after) :]
        after += [each for each in removed if each.get("meta", {}).get("own")]
        if summarised:
            after.append(user(TAKEN_BACK.format(", ".join(done.paths) or "no file")))
        words = " ".join(text_of(removed[0]).split()) if removed else ""
        self.undone.append(UndoEntry(messages[:], after, words))
        self._replace_messages(after)
        return dataclasses.replace(done, note=SUMMARISED if summarised else "")

    def redo(self) -> UndoResult:
        """Do again what was undone last."""
        done = self.snapshots.redo()
        if not done.problem and self.undone:
            entry, messages = self.undone.pop(), self.app.agent.messages
            old, new = messages[: len(entry.after)], messages[len(entry.after) :]
            if old != entry.after:  # shortened since
                kept = [each for each in entry.before if each not in entry.after]
                self._replace_messages([*messages, *kept])
            else:
                self._replace_messages([*entry.before, *new])
        return done

    def _replace_messages(self, messages: Sequence[Message]) -> None:
        self.app.agent.messages[:] = messages
        if self.app.folder_files:
            self.app.folder_files.forget()
        self._keep_undo(again=True)
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
        if isinstance(event, events.Nested) and event.session_id:
            with contextlib.suppress(StoreError):
                self._opened(event)(event.event)
                if isinstance(event.event, RunEnd):
                    self.open.pop(event.session_id).close()
        elif isinstance(event, RunEnd):
            self.close()

    def _opened(self, event: events.Nested) -> Recorder:
        app = self.app
        assert app.subagents  # whose event this is
        child = app.subagents.children[event.session_id]
        if child.id not in self.open:
            if not self.load(child.id):
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
    flag = "-r" if arguments.resume else "-c" if arguments.continue_ else ""
    if arguments.no_session and flag:
        raise ConfigError(f"--no-session and {flag} cannot be used together")
    store, notice = open_store(MEMORY if arguments.no_session else data_folder() / "sessions.db")
    if notice and flag:  # there is nothing to resume then
        store.close()
        raise ConfigError(notice.removesuffix(" This session is not saved."))
    app.notices += [notice] if notice else []
    conversation = Conversation(app, store, data_folder(), titles=titles, one_task=one_task)
    try:
        newest = store.latest(str(app.cwd)) if flag == "-c" else None
        if flag == "-c" and not newest:
            raise ConfigError("there is no conversation in this folder to continue")
        if flag:
            conversation.resume(newest.id if newest else arguments.resume)
        if arguments.agent:
            app.work_as(arguments.agent)
    except (StoreError, ConfigError) as error:
        conversation.close()
        raise ConfigError(store.notice or str(error)) from None
    return conversation
