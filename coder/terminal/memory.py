"""Memory: what outlives a session at the terminal. Its record on disk, its title, and taking up an older one.

A subscriber of the session's events. Where the conversation is not kept, the states of its files lie in a folder for temporary
files, which goes with us (a kill leaves it).

What it leaves out: the record itself (features/sessions.py), how a list of sessions looks (sessions_command.py), the states of
the files themselves (features/snapshots.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coder.abort import Abort
from coder.features.agents import choices
from coder.features.sessions import Recorder, parts, set_parts
from coder.features.snapshots import SECONDS, Snapshots, Undone, place
from coder.features.store import SessionInfo, Store, StoreError, Todo, folder_name
from coder.features.titles import Titler
from coder.history import text_of, user
from coder.terminal.child_records import ChildRecords
from coder.terminal.session import Session
from coder.types import Aborted, Event, Message, MessageStart, RunEnd, RunStart, StepEnd, ToolEnd

QUICKLY = 2.0  # seconds that tidying up may take where nobody sees why it takes time
TAKEN_BACK = ("I have taken back what you did last ({}). What is said of it above, in a summary, does not hold any more: look at the "
              "files before you go on.")
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

    `titles`: let the model find a title, beside the first run.
    """

    def __init__(self, session: Session, store: Store, data: Path, *, titles: bool = False) -> None:
        self.session, self.store, self.titles = session, store, titles
        self._told = store.notice  # told already, by whoever opened it
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self.data = self._gone_with_us() if store.in_memory else data
        self.titler: Titler | None = None
        self.title = ""
        self.recorder: Recorder | None = None
        self.children = ChildRecords(session, store)
        self.snapshots = self._no_snapshots()
        self.undone: list[Cut] = []  # what undo has taken out of the conversation, the newest last
        self.begin()
        session.subscribers.append(self)

    # -- which session it is

    def begin(self) -> None:
        """A new session; the one before stays on disk."""
        recorder: Recorder | None = None
        try:
            new = self.store.create(str(self.session.cwd), agent=self.session.agent.name, model=self.session.model.name)
            recorder = Recorder(self.store, new, [], tell=self.session.notices.append)
        except StoreError as error:
            self.session.notices.append(f"{error} The conversation is not saved.")
        self._leave()
        self._take(recorder)

    def resume(self, given: str) -> SessionInfo:
        """Go on with the session of this id, or beginning of one. Raises StoreError; then the present one goes on."""
        info = self.store.find(given)
        if self.recorder and info.id == self.recorder.session_id:
            return info
        recorder = Recorder(self.store, info.id, tell=self.session.notices.append)
        try:
            records = self._records(info.id)
        except StoreError:
            recorder.close()
            raise
        self._leave()
        self._take(recorder, info.title, records)
        self._tell_of_damage()
        self._work_on(info.agent)
        if info.directory != folder_name(str(self.session.cwd)):
            self.session.notices.append(f"This conversation began in {info.directory}; now files and permissions are those of "
                                        f"{self.session.cwd}.")
        return info

    def _work_on(self, agent: str) -> None:
        """With the agent that it was left with."""
        if agent != self.session.agent.name and agent in [each.name for each in choices(self.session.agents, "primary", "all")]:
            self.session.work_as(agent)
            self.session.notices.append(f"{agent} goes on, as before: {self.session.agent.description}.")

    def latest(self) -> SessionInfo | None:
        """The newest of this folder."""
        return self.store.latest(str(self.session.cwd))

    def list(self) -> Sequence[SessionInfo]:
        """Those of this folder that can be taken up, the newest first."""
        own = self.recorder.session_id if self.recorder else ""
        return [info for info in self.store.sessions(str(self.session.cwd)) if info.id != own]

    def _records(self, session_id: str) -> Sequence[Mapping[str, Any]]:
        """What is kept of its runs. Raises StoreError."""
        with contextlib.suppress(ValueError):  # no JSON any more
            return parts(self.store, session_id, "snapshot")
        return ()

    def _take(self, recorder: Recorder | None, title: str = "", records: Sequence[Mapping[str, Any]] = ()) -> None:
        """This is the session from now on; all that may fail was done before."""
        self.recorder, self.title = recorder, title
        self.snapshots = self._no_snapshots()
        self.undone.clear()
        with contextlib.suppress(ValueError):  # a record of somebody else's making: there is nothing to undo
            self.snapshots.restore(records)
        self.session.adopt(recorder.messages if recorder else [], recorder.session_id if recorder else "")

    def _gone_with_us(self) -> Path:
        """A folder that goes at our end; where none can be made, a place in which nothing can be."""
        try:
            self._temporary = tempfile.TemporaryDirectory(prefix="coder-", ignore_cleanup_errors=True)
        except OSError:
            return Path(os.devnull)
        return Path(self._temporary.name)

    def _no_snapshots(self) -> Snapshots:
        harmless = {each.name for each in self.session.tools.tools.values() if each.concurrent and each.name != "task"} | {"todo"}
        return Snapshots(self.session.cwd, self.data, harmless=harmless)

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

    def close(self, show: Callable[[str], None] | None = None) -> str:
        """The end; returns the id with which the session can be taken up, "" where nothing was said or nothing is kept.

        `show` is told what takes time, mostly nothing, and "" behind it; without it there is less time.
        """
        kept = self.recorder and self.session.messages and not self.recorder.problem and not self.store.in_memory
        session_id = self.recorder.session_id if self.recorder and kept else ""
        if self.recorder:
            self.settle()
        self._leave()
        self._tidy(show)
        self.store.close()
        if self._temporary:
            self._temporary.cleanup()
        return session_id

    def _tidy(self, show: Callable[[str], None] | None) -> None:
        """Throw away old states of files, once a day."""
        if self._temporary or not self.snapshots.prune_due():
            return
        if show:
            show("tidying up old states of files")
        with contextlib.suppress(Aborted):
            self.snapshots.prune(Abort(), SECONDS if show else QUICKLY)
        if show:
            show("")

    def settle(self) -> None:
        """Behind a run, however it ended: keep how the history was repaired, and which states of the files belong to it."""
        self.snapshots.finish()
        if self.recorder:
            self.recorder.sync()
        self._keep_snapshots()

    def _keep_snapshots(self) -> None:
        """Step by step: a run that is killed can be undone, too."""
        if (recorder := self.recorder) and not recorder.problem:
            self._quietly(lambda: set_parts(self.store, recorder.session_id, "snapshot", self.snapshots.records()))

    def undo(self, warn: Callable[[Sequence[str]], None] = lambda paths: None) -> Undone:
        """Take back the last run: what it did to the files, and its part of the conversation; with a problem, nothing.

        What the person has done since, and told the model, stays in the conversation. `warn`: as for Snapshots.undo.
        """
        done = self.snapshots.undo(warn)
        if done.problem or not done.run:
            return done
        messages = self.session.messages
        at = place(done.run, messages)
        note = user(TAKEN_BACK.format(", ".join(done.paths) or "no file")) if _summed_up(messages, at) else None
        at = len(messages) if at is None else at
        self.undone.append(Cut(at, messages[at - 1] if at else None, messages[at:], note))
        messages[at:] = [*(each for each in messages[at:] if each.get("meta", {}).get("own")), *([note] if note else [])]
        self._taken_up()
        return dataclasses.replace(done, note=" ".join(filter(None, [done.note, STAYS if note else ""])))

    def redo(self) -> Undone:
        """Do again what was undone last."""
        done = self.snapshots.redo()
        if not done.problem and self.undone:
            cut, messages = self.undone.pop(), self.session.messages
            same = cut.at <= len(messages) and (messages[cut.at - 1] if cut.at else None) is cut.before
            at = cut.at if same else len(messages)
            again = {id(each) for each in [*cut.messages, cut.note]}
            messages[at:] = [*cut.messages, *(each for each in messages[at:] if id(each) not in again)]
            self._taken_up()
        return done

    def _taken_up(self) -> None:
        """Go on with a list that was changed."""
        self.session.folder_files.take_up(self.session.messages)
        self.settle()

    def sync(self) -> None:
        """Write down what has been done to the messages outside of a run."""
        if self.recorder:
            self.recorder.sync()

    # -- what happens in it

    def __call__(self, event: Event) -> None:
        self.snapshots(event, self.session.abort)
        self.session.notices += [notice.text for notice in self.snapshots.taken_notices()]
        self._tell_of_damage()
        if not self.recorder:
            return
        self.recorder(event)
        self.children(event)
        if isinstance(event, RunStart):
            self.undone.clear()
            self._quietly(lambda: self.store.set_model(self.session.session_id, self.session.model.name, self.session.agent.name))
            self._keep_snapshots()
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
            self.session.notices.append(self._told)

    def _call_it(self, message: Message) -> None:
        """Begin to look for a title, with the first words."""
        if self.titles and not (self.title or self.titler):
            self.titler = Titler(self.session.chat_model(), text_of(message))

    def _named(self) -> None:
        if self.recorder and self.titler and self.titler.title:
            self.title, self.titler = self.titler.title, None
            self._quietly(lambda: self.store.rename(self.session.session_id, self.title))

    def _todo(self, items: Sequence[dict[str, str]]) -> None:
        self._quietly(lambda: self.store.set_todos(self.session.session_id, [Todo(**item) for item in items]))

    def _quietly(self, write: Callable[[], None]) -> None:
        with contextlib.suppress(StoreError):  # the recorder tells when the disk fails; once is enough
            write()


def _summed_up(messages: Sequence[Message], at: int | None) -> bool:
    """Does a summary tell of the run whose first message stands at this place, or nowhere any more?"""
    if at is None:
        return True
    begun = messages[at].get("meta", {}).get("timestamp", 0)
    metas = [each.get("meta", {}) for each in messages[:at]]
    return any(meta.get("summary") and meta.get("timestamp", 0) >= begun for meta in metas)
