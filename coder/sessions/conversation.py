"""The conversation of an agent as it is kept: its record, its title, its sub-agents', and going
back to an older one.

A subscriber of the agent's events. If the conversation is not kept, the states of its files lie in
a private temporary folder; one task that is not kept has none, since nothing can undo it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coder import events
from coder.agent.agent import Agent
from coder.events import Event, RunEnd
from coder.history import text_of
from coder.sessions.database import MEMORY, StoreError
from coder.sessions.recorder import Recorder
from coder.sessions.snapshots import Snapshots
from coder.sessions.store import (
    FILE,
    SessionInfo,
    Store,
    folder_name,
    open_store,
    to_model_messages,
)
from coder.tools.workspace import private_folder
from coder.types import Message

if TYPE_CHECKING:
    from coder.agent.subagent import Subagents
    from coder.agent.titles import Titler

ONE_TASK = "one_task"  # in the `meta` of the prompt of a single task
NOT_SAVED = " This session is not saved."


class Conversation:
    """Keeps the conversation of `agent`, which works in `folder`, and the states of the files
    there.

    `data` is the program's data folder; `tell` gets lines for the user. `one_task`: there is one
    run only. `agent_name`, `make_titler` (of the first prompt), `count_usage` (which gets the
    events of hidden agents) and `subagents` are set by the session, before its first run.
    """

    def __init__(
        self,
        agent: Agent,
        store: Store,
        folder: Path,
        data: Path,
        *,
        tell: Callable[[str], None],
        one_task: bool,
    ) -> None:
        self.agent = agent
        self.store = store
        self.folder = folder
        self.tell = tell
        self.one_task = one_task
        self.agent_name = ""
        self.make_titler: Callable[[str], Titler] | None = None
        self.count_usage: Callable[[Event], None] = lambda event: None
        self.subagents: Subagents | None = None
        self.titler: Titler | None = None
        self._children: dict[str, Recorder] = {}  # of the sub-agents at work
        self.covers_files = not (one_task and store.in_memory)
        if store.in_memory and self.covers_files:
            data = private_folder()
        self.snapshots = Snapshots(folder, data, tell=tell)
        self._adopt(self._new())
        agent.subscribe(self)

    # -- which conversation it is

    def _new(self) -> Recorder:
        info = self.store.create(
            str(self.folder),
            agent=self.agent_name,
            model=self.agent.state.model.name,
        )
        return Recorder(self.store, info, [], tell=self.tell)

    def begin(self) -> None:
        """Begin a new conversation; the one before stays on disk."""
        self._leave()
        self._adopt(self._new())

    def resume(self, which: str) -> SessionInfo | None:
        """Continue the one that `Store.find` finds; None if it is the present one.

        Raises StoreError; then the present one stays.
        """
        info = self.store.find(which)
        if info.id == self.recorder.session_id:
            return None
        recorder = Recorder(self.store, info, tell=self.tell)
        self._leave()
        self._adopt(recorder)
        return info

    def newest(self) -> str:
        """The id of the newest conversation of the folder. Raises StoreError.

        A session passes over single tasks, one task does not.
        """
        infos = self.store.sessions(str(self.folder), 1 if self.one_task else 1000)
        users = "SELECT 1 FROM message WHERE session = ? AND role = 'user'"
        # With a space if an older version has written it
        query = f"{users} AND NOT instr(replace(data, ': ', ':'), ?) LIMIT 1"
        for info in infos:
            if self.one_task or self.store.rows(query, info.id, f'"{ONE_TASK}":true'):
                return info.id
        if infos:
            raise StoreError(
                "there is no conversation of a session in this folder to continue, only single tasks; "
                "-r lists them"
            )
        raise StoreError("there is no conversation in this folder to continue")

    def rename(self, title: str) -> None:
        """Give it this name, in place of what the model may find. Raises StoreError."""
        if self.titler:
            self.titler.stop()
            self.titler = None
        self.recorder.info.title = title
        self.store.rename(self.recorder.session_id, title)

    def keep_agent(self) -> None:
        """Write down who works, also before the first message comes. Raises StoreError."""
        info = self.recorder.info
        info.agent = self.agent_name
        with self.store.transaction() as db:
            info.write(db)

    def _adopt(self, recorder: Recorder) -> None:
        """Let the agent work on the messages of this record."""
        self.recorder = recorder
        state = self.agent.state
        harmless = {"todo"}
        for name, tool in state.tools.tools.items():
            if tool.changes_nothing:
                harmless.add(name)
        self.snapshots.harmless = harmless
        self.snapshots.open(recorder.session_id, resumed=bool(recorder.messages))
        state.messages = recorder.messages
        self.agent.session_id = recorder.session_id
        state.tools.seen.clear()

    def _leave(self) -> None:
        if self.titler:
            self.titler.stop()
        self._take_title()
        self.titler = None
        self.recorder.close()

    def resumable(self) -> Sequence[SessionInfo]:
        """Those of this folder that can be resumed, the newest first."""
        present = self.recorder.session_id
        infos = self.store.sessions(str(self.folder))
        return [info for info in infos if info.id != present]

    @property
    def is_kept(self) -> bool:
        """Whether it can be resumed by its id."""
        return not self.recorder.problem and not self.store.in_memory

    @property
    def began_elsewhere(self) -> str:
        """The folder that it began in, if that is another one than now."""
        directory = self.recorder.info.directory
        return "" if directory == folder_name(str(self.folder)) else directory

    def close(self) -> None:
        self.settle()
        self.snapshots.close()
        self._leave()
        self.store.close()

    # -- what happens in it

    def __call__(self, event: Event) -> None:
        if isinstance(event, events.DELTAS):
            return
        if isinstance(event, events.MessageEnd) and self.one_task:
            _mark_task(event.message)
        self._record(event)
        if self.covers_files:
            self.snapshots(event, self.agent.token)
        if isinstance(event, events.MessageEnd):
            self._begin_title(event.message)
        self._take_title()

    def _record(self, event: Event) -> None:
        if isinstance(event, events.RunStart):
            info = self.recorder.info
            info.model = self.agent.state.model.name
            info.agent = self.agent_name
        # Another agent, that a tool has run, is in no list: it is not kept
        kept = self.subagents.children if self.subagents else {}
        if isinstance(event, events.Nested) and event.session_id in kept:
            self._record_child(event)
        self.recorder(event)
        if self.store.notice:  # a damaged file may be noticed at any moment
            self.tell(self.store.notice)
            self.store.notice = ""

    def settle(self) -> None:
        """After a run, however it ended: write how the history was repaired, and what undo needs.

        It can be called again. The end of a run has written what was changed in place; `close`
        looks for such changes once more.
        """
        self.snapshots.finish()
        while self._children:  # one that was aborted is kept as far as it came
            _, recorder = self._children.popitem()
            recorder.close()
        self.recorder.sync(in_place=False)

    def _begin_title(self, message: Message) -> None:
        has_title = self.titler or self.recorder.info.title
        if self.make_titler and not has_title:
            self.titler = self.make_titler(text_of(message))

    def _take_title(self) -> None:
        if self.titler and self.titler.title:
            title = self.titler.title
            event = events.Nested("title", RunEnd("stop", title, self.titler.usage, 1))
            self._record(event)
            self.count_usage(event)
            with contextlib.suppress(StoreError):  # the recorder reports it, too
                self.rename(title)

    # -- sub-agents: each has a session of its own, in which `task_id` finds it again

    def _record_child(self, event: events.Nested) -> None:
        """Write an event of a sub-agent's run in its session, which is open until the run ends."""
        child = event.session_id
        if isinstance(event.event, events.RunStart):
            with contextlib.suppress(StoreError):  # another process has it
                self._children[child] = self._open_child(event.agent, child)
        recorder = self._children.get(child)
        if recorder is None:
            return
        recorder(event.event)
        if isinstance(event.event, RunEnd):
            del self._children[child]
            recorder.close()

    def _open_child(self, agent: str, session_id: str) -> Recorder:
        """Raises StoreError."""
        assert self.subagents  # whose event this is
        child = self.subagents.children[session_id]
        info = self.store.create(
            str(self.folder),
            session_id=session_id,
            agent=agent,
            parent=self.recorder.session_id,
            model=child.spec.model or self.agent.state.model.name,
        )
        with contextlib.suppress(StoreError):  # it is new
            info = self.store.get(session_id)
        return Recorder(self.store, info, child.messages)

    def load_child(self, task_id: str) -> tuple[str, list[Message]] | None:
        """(agent, messages) of a child of this session, as an earlier process has kept it."""
        with contextlib.suppress(StoreError):
            info = self.store.get(task_id)
            is_ours = info.parent == self.recorder.session_id
            if is_ours and not info.forked:
                return info.agent, to_model_messages(self.store, task_id)
        return None


def _mark_task(message: Message) -> None:
    if message["role"] == "user":
        message.setdefault("meta", {})[ONE_TASK] = True


def open_conversation(
    agent: Agent,
    folder: Path,
    data: Path,
    *,
    tell: Callable[[str], None],
    keep: bool,
    one_task: bool,
    resume: str | bool,
) -> Conversation:
    """A new conversation, the one that `resume` names, or the newest for True. Raises
    StoreError."""
    store, notice = open_store(data / FILE if keep else MEMORY)
    store.notice = ""
    if notice and resume:  # there is nothing to resume
        store.close()
        raise StoreError(notice.removesuffix(NOT_SAVED))
    if notice:
        tell(notice)
    made = Conversation(
        agent,
        store,
        folder,
        data,
        tell=tell,
        one_task=one_task,
    )
    if not resume:
        return made
    try:
        if resume is True:
            made.resume(made.newest())
        else:  # also a number of the list
            made.resume(store.find(str(resume), str(folder)).id)
    except StoreError as error:
        made.close()
        raise StoreError(store.notice or str(error)) from None
    return made
