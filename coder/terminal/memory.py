"""Memory: what outlives a session at the terminal. Its record on disk, its title, and taking up an older one.

A subscriber of the session's events. What it leaves out: the record itself (features/sessions.py), how a list of sessions
looks (sessions_command.py), the states of the files themselves (features/snapshots.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from coder.abort import Abort
from coder.features.sessions import Recorder, parts, set_parts
from coder.features.snapshots import Snapshots, Undone, place
from coder.features.store import SessionInfo, Store, StoreError, Todo
from coder.features.titles import Titler
from coder.history import text_of
from coder.terminal.session import Session
from coder.types import Aborted, Event, Message, MessageStart, RunEnd, RunStart, StepEnd, ToolEnd


class Memory:
    """Keeps `session` in `store`, and the states of its files in the folder `data`.

    `titles`: let the model find a title, beside the first run.
    """

    def __init__(self, session: Session, store: Store, data: Path, *, titles: bool = False) -> None:
        self.session, self.store, self.data, self.titles = session, store, data, titles
        self.titler: Titler | None = None
        self.title = ""
        self.recorder: Recorder | None = None
        self.snapshots = self._no_snapshots()
        self.undone: list[list[Message]] = []  # what undo has taken out of the conversation, the newest last
        self.begin()
        session.subscribers.append(self)

    # -- which session it is

    def begin(self) -> None:
        """A new session; the one before stays on disk."""
        self._leave()
        try:
            new = self.store.create(str(self.session.cwd), model=self.session.model.name)
            self._take(Recorder(self.store, new, [], tell=self.session.notices.append), "")
        except StoreError as error:
            self.session.notices.append(f"{error} The conversation is not saved.")
            self.session.adopt([])

    def resume(self, given: str) -> SessionInfo:
        """Go on with the session of this id, or beginning of one. Raises StoreError; then the present one goes on."""
        info = self.store.find(given)
        if self.recorder and info.id == self.recorder.session_id:
            return info
        recorder = Recorder(self.store, info.id, tell=self.session.notices.append)
        self._leave()
        self._take(recorder, info.title)
        if info.directory != str(self.session.cwd):
            self.session.notices.append(f"This conversation began in {info.directory}; now files and permissions are those of "
                                        f"{self.session.cwd}.")
        return info

    def latest(self) -> SessionInfo | None:
        """The newest of this folder."""
        return self.store.latest(str(self.session.cwd))

    def list(self) -> Sequence[SessionInfo]:
        """Those of this folder that can be taken up, the newest first."""
        own = self.recorder.session_id if self.recorder else ""
        return [info for info in self.store.sessions(str(self.session.cwd)) if info.id != own]

    def _take(self, recorder: Recorder, title: str) -> None:
        self.recorder, self.title = recorder, title
        self.snapshots = self._no_snapshots()
        self.undone.clear()
        with contextlib.suppress(ValueError):  # a record of somebody else's making: there is nothing to undo
            self.snapshots.restore(parts(self.store, recorder.session_id, "snapshot"))
        self.session.adopt(recorder.messages, recorder.session_id)

    def _no_snapshots(self) -> Snapshots:
        harmless = {each.name for each in self.session.tools.tools.values() if each.concurrent} | {"todo"}
        return Snapshots(self.session.cwd, self.data, harmless=harmless)

    def _leave(self) -> None:
        self._named()
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

    def close(self) -> str:
        """The end; returns the id with which the session can be taken up, "" where nothing was said or nothing is kept."""
        kept = self.recorder and self.session.messages and not self.recorder.problem and not self.store.in_memory
        session_id = self.recorder.session_id if self.recorder and kept else ""
        if self.recorder:
            self.settle()
        self._leave()
        with contextlib.suppress(Aborted):
            self.snapshots.prune(Abort())
        self.store.close()
        return session_id

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

    def undo(self) -> Undone:
        """Take back the last run: what it did to the files, and its part of the conversation; with a problem, nothing."""
        done = self.snapshots.undo()
        at = place(done.run, self.session.messages) if done.run and not done.problem else None
        if not done.problem:
            self.undone.append(self.session.messages[at:] if at is not None else [])
            del self.session.messages[len(self.session.messages) if at is None else at:]
            self.settle()
            self.sync()
        return done

    def redo(self) -> Undone:
        """Do again what was undone last."""
        done = self.snapshots.redo()
        if not done.problem:
            self.session.messages += self.undone.pop() if self.undone else []
            self.settle()
            self.sync()
        return done

    def sync(self) -> None:
        """Write down what has been done to the messages outside of a run."""
        if self.recorder:
            self.recorder.sync()

    # -- what happens in it

    def __call__(self, event: Event) -> None:
        self.snapshots(event, self.session.abort)
        self.session.notices += [notice.text for notice in self.snapshots.taken_notices()]
        if not self.recorder:
            return
        self.recorder(event)
        if isinstance(event, RunStart):
            self.undone.clear()
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
