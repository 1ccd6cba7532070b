"""Memory: what outlives a session at the terminal. Its record on disk, its title, and taking up an older one.

A subscriber of the session's events. Where the conversation is not kept, the states of its files lie in our private folder, which
goes with us; there are none where nobody can ask for them (one task that is not kept).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coder.agent.profiles import choices
from coder.agent.titles import Titler
from coder.cli.app import App
from coder.cli.child_records import ChildRecords
from coder.cli.config import ConfigError, data_folder
from coder.events import Event, MessageStart, RunEnd, RunStart, StepEnd, ToolEnd
from coder.history import text_of, user
from coder.sessions.database import MEMORY
from coder.sessions.recorder import Recorder, parts, set_parts
from coder.sessions.snapshots import Snapshots, UndoResult, place
from coder.sessions.store import SessionInfo, Store, StoreError, Todo, folder_name, open_store
from coder.tools.process import private_folder
from coder.types import Message

TAKEN_BACK = (
    "I have taken back what you did last ({}). What is said of it above, in a summary, does not hold any more: look at the "
    "files before you go on."
)
STAYS = "The conversation was shortened meanwhile, so that its summary still tells of it; the model was told that it was taken back."


@dataclass(frozen=True)
class Cut:
    """What an undo took out of the list at a place, `before` being the message in front of it, and the note it put there."""

    at: int
    before: Message | None
    messages: Sequence[Message]
    note: Message | None

    @property
    def words(self) -> str:
        """What the person had said, in one line."""
        return " ".join(text_of(self.messages[0]).split()) if self.messages else ""


class Memory:
    """Keeps `session` in `store`, and the states of its files in the folder `data`.

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
        self._told = store.notice  # told already, by whoever opened it
        self.undoable = not (one_task and store.in_memory)
        self.data = Path(os.devnull) if store.in_memory else data
        if store.in_memory and self.undoable:
            with contextlib.suppress(OSError):  # then it is a place in which nothing can be
                self.data = Path(private_folder())
        self.titler: Titler | None = None
        self.title = ""
        self.recorder: Recorder | None = None
        self.children = ChildRecords(app, store)
        self.snapshots = self._no_snapshots()
        self._kept: list[dict[str, Any]] = []  # records of the snapshots on disk
        self.undone: list[Cut] = []  # what undo has taken out of the conversation, the newest last
        self.begin()
        app.agent.subscribe(self)

    # -- which session it is

    def begin(self) -> None:
        """A new session; the one before stays on disk."""
        recorder: Recorder | None = None
        try:
            new = self.store.create(
                str(self.app.cwd), agent=self.app.spec.name, model=self.app.model.name
            )
            recorder = Recorder(self.store, new, [], tell=self.app.notices.append)
        except StoreError as error:
            self.app.notices.append(f"{error} The conversation is not saved.")
        self._leave()
        self._take(recorder)

    def resume(self, given: str) -> SessionInfo:
        """Go on with the session of this id, or beginning of one. Raises StoreError; then the present one goes on."""
        info = self.store.find(given)
        if self.recorder and info.id == self.recorder.session_id:
            return info
        recorder = Recorder(self.store, info.id, tell=self.app.notices.append)
        try:
            records = self._records(info.id)
        except StoreError:
            recorder.close()
            raise
        self._leave()
        self._take(recorder, info.title, records)
        self._tell_of_damage()
        self._work_on(info.agent)
        if info.directory != folder_name(str(self.app.cwd)):
            self.app.notices.append(
                f"This conversation began in {info.directory}; now files and permissions are those of "
                f"{self.app.cwd}."
            )
        return info

    def _work_on(self, agent: str) -> None:
        """With the agent that it was left with."""
        if agent != self.app.spec.name and agent in [
            each.name for each in choices(self.app.agents, "primary", "all")
        ]:
            self.app.work_as(agent)
            self.app.notices.append(f"{agent} goes on, as before: {self.app.spec.description}.")

    def latest(self) -> SessionInfo | None:
        """The newest of this folder."""
        return self.store.latest(str(self.app.cwd))

    def list(self) -> Sequence[SessionInfo]:
        """Those of this folder that can be taken up, the newest first."""
        own = self.recorder.session_id if self.recorder else ""
        return [info for info in self.store.sessions(str(self.app.cwd)) if info.id != own]

    def _records(self, session_id: str) -> Sequence[Mapping[str, Any]]:
        """What is kept of its runs. Raises StoreError."""
        with contextlib.suppress(ValueError):  # no JSON any more
            return parts(self.store, session_id, "snapshot")
        return ()

    def _take(
        self, recorder: Recorder | None, title: str = "", records: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """This is the session from now on; all that may fail was done before."""
        self.recorder, self.title = recorder, title
        self.snapshots.close()
        self.snapshots = self._no_snapshots()
        self.undone.clear()
        # A record of somebody else's making: there is nothing to undo
        with contextlib.suppress(ValueError):
            self.snapshots.restore(records)
        self._kept = self.snapshots.records()
        self.app.adopt(
            recorder.messages if recorder else [], recorder.session_id if recorder else ""
        )

    def _no_snapshots(self) -> Snapshots:
        harmless = {
            each.name
            for each in self.app.agent.state.tools.tools.values()
            if each.concurrent and each.name != "task"
        } | {"todo"}
        snapshots = Snapshots(self.app.cwd, self.data, harmless=harmless)
        if not self.undoable:
            snapshots.off = "one task that is not kept has none"
        return snapshots

    def _leave(self) -> None:
        self._named()
        self.children.close()
        if self.titler:
            self.titler.stop()
            self.titler = None
        if self.recorder:
            self.recorder.close()
            self.recorder = None

    @property
    def problem(self) -> str:
        """Why the conversation is not saved; "" where it is."""
        return self.recorder.problem if self.recorder else "The conversation is not saved."

    @property
    def session_id(self) -> str:
        """The id with which the conversation can be taken up; "" where it is not kept."""
        return (
            self.recorder.session_id
            if self.recorder and not (self.problem or self.store.in_memory)
            else ""
        )

    def close(self) -> str:
        """The end; returns the id with which the session can be taken up, "" where nothing was said or nothing is kept."""
        session_id = self.session_id if self.app.agent.messages else ""
        if self.recorder:
            self.settle()
        self._leave()
        self.snapshots.close()
        self.store.close()
        return session_id

    def settle(self) -> None:
        """Behind a run, however it ended: keep how the history was repaired, and which states of the files belong to it."""
        self.snapshots.finish()
        if self.recorder:
            self.recorder.sync()
        self._keep_snapshots()

    def _keep_snapshots(self) -> None:
        """Step by step, each once: a run that is killed can be undone, too."""
        kept, records = self._kept, self.snapshots.records()
        if (recorder := self.recorder) and not recorder.problem and records != kept:
            more = records[: len(kept)] == kept
            with contextlib.suppress(StoreError):  # all that is missing is written the next time
                set_parts(
                    self.store,
                    recorder.session_id,
                    "snapshot",
                    records[len(kept) :] if more else records,
                    more,
                )
                self._kept = records

    def undo(self) -> UndoResult:
        """Take back the last run: what it did to the files, and its part of the conversation; with a problem, nothing.

        What the person has done since, and told the model, stays in the conversation.
        """
        done = self.snapshots.undo()
        if done.problem or not done.run:
            return done
        messages = self.app.agent.messages
        at = place(done.run, messages)
        note = (
            user(TAKEN_BACK.format(", ".join(done.paths) or "no file"))
            if _summed_up(messages, at)
            else None
        )
        at = len(messages) if at is None else at
        self.undone.append(Cut(at, messages[at - 1] if at else None, messages[at:], note))
        messages[at:] = [
            *(each for each in messages[at:] if each.get("meta", {}).get("own")),
            *([note] if note else []),
        ]
        self._taken_up()
        return dataclasses.replace(done, note=STAYS if note else "")

    def redo(self) -> UndoResult:
        """Do again what was undone last."""
        done = self.snapshots.redo()
        if not done.problem and self.undone:
            cut, messages = self.undone.pop(), self.app.agent.messages
            same = (
                cut.at <= len(messages) and (messages[cut.at - 1] if cut.at else None) is cut.before
            )
            at = cut.at if same else len(messages)
            again = {id(each) for each in [*cut.messages, cut.note]}
            messages[at:] = [
                *cut.messages,
                *(each for each in messages[at:] if id(each) not in again),
            ]
            self._taken_up()
        return done

    def _taken_up(self) -> None:
        """Go on with a list that was changed."""
        self.app.folder_files.take_up(self.app.agent.messages)
        self.settle()

    def sync(self) -> None:
        """Write down what has been done to the messages outside of a run."""
        if self.recorder:
            self.recorder.sync()

    # -- what happens in it

    def __call__(self, event: Event) -> None:
        self.snapshots(event, self.app.agent.token)
        self.app.notices += [notice.text for notice in self.snapshots.taken_notices()]
        self._tell_of_damage()
        if not self.recorder:
            return
        self.recorder(event)
        self.children(event)
        if isinstance(event, RunStart):
            self.undone.clear()
            self._quietly(
                lambda: self.store.set_model(
                    self.app.agent.session_id, self.app.model.name, self.app.spec.name
                )
            )
        elif isinstance(event, StepEnd):
            self._keep_snapshots()
        elif isinstance(event, RunEnd):
            self.settle()
        if isinstance(event, MessageStart) and event.message.get("role") == "user":
            self._call_it(event.message)
        elif isinstance(event, ToolEnd) and event.name == "todo" and "todo" in event.result.details:
            self._todo(event.result.details["todo"])
        self._named()

    def _tell_of_damage(self) -> None:
        """The file may turn out to be damaged whenever it is read, and is mended then."""
        if self.store.notice != self._told:
            self._told = self.store.notice
            self.app.notices.append(self._told)

    def _call_it(self, message: Message) -> None:
        """Begin to look for a title, with the first words."""
        if self.titles and not (self.title or self.titler):
            self.titler = Titler(self.app.chat_model(self.app.model.name), text_of(message))

    def _named(self) -> None:
        if self.recorder and self.titler and self.titler.title:
            self.title, self.titler = self.titler.title, None
            self._quietly(lambda: self.store.rename(self.app.agent.session_id, self.title))

    def _todo(self, items: Sequence[dict[str, str]]) -> None:
        self._quietly(
            lambda: self.store.set_todos(
                self.app.agent.session_id, [Todo(**item) for item in items]
            )
        )

    def _quietly(self, write: Callable[[], None]) -> None:
        # The recorder tells when the disk fails; once is enough
        with contextlib.suppress(StoreError):
            write()


def _summed_up(messages: Sequence[Message], at: int | None) -> bool:
    """Does a summary tell of the run whose first message stands at this place, or nowhere any more?"""
    if at is None:
        return True
    begun = messages[at].get("meta", {}).get("timestamp", 0)
    metas = [each.get("meta", {}) for each in messages[:at]]
    return any(meta.get("summary") and meta.get("timestamp", 0) >= begun for meta in metas)


def memory_of(
    app: App, arguments: argparse.Namespace, *, titles: bool = False, one_task: bool = False
) -> Memory:
    """The memory of a session: a new conversation, or the one that -c or -r names. Raises ConfigError."""
    if arguments.no_session and (arguments.continue_ or arguments.resume):
        flag = "-r" if arguments.resume else "-c"
        raise ConfigError(f"--no-session and {flag} exclude each other: give one of them")
    store, notice = open_store(MEMORY if arguments.no_session else data_folder() / "sessions.db")
    app.notices += [notice] if notice else []
    memory = Memory(app, store, data_folder(), titles=titles, one_task=one_task)
    try:
        if arguments.resume:
            memory.resume(arguments.resume)
        elif arguments.continue_ and (newest := memory.latest()):
            memory.resume(newest.id)
        elif arguments.continue_:
            raise ConfigError("there is no conversation of this folder to continue")
        if arguments.agent:
            app.work_as(arguments.agent)
    except (StoreError, ConfigError) as error:
        memory.close()
        raise ConfigError(str(error)) from None
    return memory
