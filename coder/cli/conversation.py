"""The conversation at the terminal as it is kept: its record, its title, resuming an older one.

A subscriber of the agent's events. Where the conversation is not kept, the states of its files lie in a
private temporary folder; one task that is not kept has none, since nothing can undo it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from coder import events
from coder.cli.app import App
from coder.cli.process import needed, optional
from coder.cli.settings import ConfigError, data_folder
from coder.events import Event, RunEnd
from coder.history import text_of
from coder.sessions.database import MEMORY, StoreError
from coder.sessions.recorder import Recorder
from coder.sessions.snapshots import Snapshots
from coder.sessions.store import SessionInfo, Store, folder_name, open_store, to_model_messages
from coder.tools.workspace import private_folder
from coder.types import Message

if TYPE_CHECKING:
    from coder.agent.titles import Titler

ONE_TASK = "one_task"  # in the `meta` of the prompt of a single task
DELTAS = {"text_delta", "reasoning_delta", "tool_call_delta"}


class Conversation:
    """Keeps the conversation of `app` in `store`, and the states of its files.

    `titles`: let the model find a title, beside the first run. `one_task`: there is one run only.
    """

    def __init__(self, app: App, store: Store, *, titles: bool, one_task: bool) -> None:
        self.app, self.store, self.one_task = app, store, one_task
        self.titles = optional("coder.agent.titles") if titles else None
        self.titler: Titler | None = None
        self._children: dict[str, Recorder] = {}  # of the sub-agents at work
        if app.subagents:
            app.subagents.load = self.load_child
        self.covers_files = not (one_task and store.in_memory)
        data = private_folder() if store.in_memory and self.covers_files else data_folder()
        self.snapshots = Snapshots(app.cwd, data, tell=app.notices.append)
        self._adopt(self._new())
        app.agent.subscribe(self)

    # -- which session it is

    def _new(self) -> Recorder:
        app = self.app
        info = self.store.create(str(app.cwd), agent=app.spec.name, model=app.model.name)
        return Recorder(self.store, info, [], tell=app.notices.append)

    def begin(self) -> None:
        """Begin a new session; the one before stays on disk."""
        self._leave()
        self._adopt(self._new())

    def resume(self, given: str, agent: str = "") -> None:
        """Continue the session with this id, or beginning of one, with its agent or another one.

        Raises StoreError; then the present one stays.
        """
        info, app = self.store.find(given), self.app
        if info.id == self.recorder.session_id:
            return
        recorder = Recorder(self.store, info, tell=app.notices.append)
        self._leave()
        self._adopt(recorder)
        spec = app.agents.get(info.agent)
        app.was_planning = bool(spec and spec.read_only)
        agent = agent or info.agent
        if agent != app.spec.name and agent in app.primary:
            app.work_as(agent)
            app.notices.append(f"Agent {agent} continues: {app.spec.description}.")
        if info.directory != folder_name(str(app.cwd)):
            began = f"This conversation began in {info.directory}"
            app.notices.append(f"{began}; now files and permissions are those of {app.cwd}.")

    def rename(self, title: str) -> None:
        """Give the session this name, in place of what the model may find. Raises StoreError."""
        if self.titler:
            self.titler.stop()
            self.titler = None
        self.recorder.info.title = title
        self.store.rename(self.recorder.session_id, title)

    def _adopt(self, recorder: Recorder) -> None:
        self.recorder = recorder
        tools = self.app.agent.state.tools.tools.values()
        names = {each.name for each in tools if each.concurrent and each.name != "task"} | {"todo"}
        self.snapshots.harmless = names
        self.snapshots.open(recorder.session_id, resumed=bool(recorder.messages))
        self.app.adopt(recorder.messages, recorder.session_id)

    def _leave(self) -> None:
        if self.titler:
            self.titler.stop()
        self._take_title()
        self.titler = None
        self.recorder.close()

    def resumable(self) -> Sequence[SessionInfo]:
        """Those of this folder that can be resumed, the newest first."""
        infos = self.store.sessions(str(self.app.cwd))
        return [info for info in infos if info.id != self.recorder.session_id]

    @property
    def session_id(self) -> str:
        """The id with which the conversation can be resumed; "" where it is not kept."""
        return "" if self.recorder.problem or self.store.in_memory else self.recorder.session_id

    def close(self) -> str:
        """The end; returns the id with which the session can be resumed, "" where there is nothing to resume."""
        self.settle()
        session_id = self.session_id if self.app.agent.messages else ""
        self._leave()
        self.snapshots.close()
        self.store.close()
        return session_id

    def export(self, file: str) -> Path:
        """Write it to a file, whose ending gives the format; never over one that is there. Raises ConfigError."""
        self.recorder.sync()
        module = needed("coder.sessions.export", "/export")
        path = Path(os.path.expanduser(file or f"session-{self.recorder.session_id}.md"))
        form = path.suffix.removeprefix(".") or "md"
        if form not in get_args(module.Format):
            endings = " or ".join(f".{name}" for name in get_args(module.Format))
            raise ConfigError(f"a file of an export ends in {endings}, not in .{form}")
        redactor = module.redactor(*self.app.settings.keys)
        text = module.export(self.store, self.recorder.session_id, form, redactor)
        write_new(path, text)
        return path

    # -- what happens in it

    def __call__(self, event: Event) -> None:
        if event.type in DELTAS:
            return
        if (
            self.one_task
            and isinstance(event, events.MessageEnd)
            and event.message["role"] == "user"
        ):
            event.message.setdefault("meta", {})[ONE_TASK] = True
        self._record(event)
        if self.covers_files:
            self.snapshots(event, self.app.agent.token)
        has_title = self.titler or self.recorder.info.title
        if isinstance(event, events.MessageEnd) and self.titles and not has_title:
            spec = self.app.agents["title"]
            model = self.app.chat_model(spec.model or self.app.model.name)
            self.titler = self.titles.Titler(model, text_of(event.message), spec.prompt)
        self._take_title()

    def _record(self, event: Event) -> None:
        if isinstance(event, events.RunStart):
            info = self.recorder.info
            info.model, info.agent = self.app.model.name, self.app.spec.name
        if isinstance(event, events.Nested) and event.session_id:
            self._record_child(event)
        self.recorder(event)
        if self.store.notice:  # a damaged file may be noticed at any moment
            self.app.notices.append(self.store.notice)
            self.store.notice = ""

    def settle(self) -> None:
        """Behind a run, however it ended: write how the history was repaired, and what belongs to undo."""
        self.snapshots.finish()
        while self._children:  # one that was aborted is kept as far as it came
            self._children.popitem()[1].close()
        self.recorder.sync()

    def _take_title(self) -> None:
        if self.titler and (title := self.titler.title):
            self._record(events.Nested("title", RunEnd("stop", title, self.titler.usage, 1)))
            self.app.usage += self.titler.usage
            with contextlib.suppress(StoreError):  # the recorder reports it, too
                self.rename(title)

    # -- sub-agents, each of which has a session of its own beside this one, where `task_id` finds it again

    def _record_child(self, event: events.Nested) -> None:
        """Write an event of a sub-agent's run in its session, which is open until the run ends."""
        child = event.session_id
        if isinstance(event.event, events.RunStart):
            with contextlib.suppress(StoreError):  # another process has it
                self._children[child] = self._open_child(event.agent, child)
        recorder = self._children.get(child)
        if recorder:
            recorder(event.event)
        if recorder and isinstance(event.event, RunEnd):
            self._children.pop(child).close()

    def _open_child(self, agent: str, session_id: str) -> Recorder:
        """Raises StoreError."""
        app, store = self.app, self.store
        assert app.subagents  # whose event this is
        names = {"agent": agent, "parent": self.recorder.session_id}
        names["model"] = app.agents[agent].model or app.model.name
        info = store.create(str(app.cwd), session_id=session_id, **names)
        with contextlib.suppress(StoreError):  # it is new
            info = store.get(session_id)
        return Recorder(store, info, app.subagents.children[session_id].messages)

    def load_child(self, task_id: str) -> tuple[str, list[Message]] | None:
        """(agent, messages) of a child of this session, as an earlier process has kept it; None where there is none."""
        with contextlib.suppress(StoreError):
            info = self.store.get(task_id)
            if info.parent == self.recorder.session_id and not info.forked:
                return info.agent, to_model_messages(self.store, task_id)
        return None


def write_new(path: Path, text: str) -> None:
    """Write a file for the user alone, never over one that is there. Raises ConfigError."""
    try:
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(number, "w", encoding="utf-8", errors="replace") as opened:
            opened.write(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def newest(store: Store, folder: str, *, tasks: bool) -> SessionInfo:
    """The newest conversation of a folder, without `tasks` the newest that is no single task. Raises ConfigError."""
    infos = store.sessions(folder, 1 if tasks else 1000)
    query = (
        "SELECT 1 FROM message WHERE session = ? AND role = 'user' AND NOT instr(data, ?) LIMIT 1"
    )
    for info in infos:
        if tasks or list(store.rows(query, info.id, f'"{ONE_TASK}": true')):
            return info
    if infos:
        raise ConfigError(
            "there is no conversation of a session in this folder to continue, only single tasks; -r lists them"
        )
    raise ConfigError("there is no conversation in this folder to continue")


def open_conversation(app: App, *, titles: bool = False, one_task: bool = False) -> Conversation:
    """A new conversation, or the one that -c or -r names. Raises ConfigError and StoreError."""
    arguments = app.arguments
    flag = "-r" if arguments.resume else "-c" if arguments.continue_ else ""
    if arguments.no_session and flag:
        raise ConfigError(f"--no-session and {flag} cannot be used together")
    store, notice = open_store(MEMORY if arguments.no_session else data_folder() / "sessions.db")
    if notice and flag:  # there is nothing to resume then
        store.close()
        raise ConfigError(notice.removesuffix(" This session is not saved."))
    app.notices += [notice] if notice else []
    store.notice = ""
    conversation = Conversation(app, store, titles=titles, one_task=one_task)
    try:
        if flag == "-c":
            chosen = newest(store, str(app.cwd), tasks=one_task)
            conversation.resume(chosen.id, arguments.agent or "")
        elif flag:
            chosen = store.find(arguments.resume, str(app.cwd))
            conversation.resume(chosen.id, arguments.agent or "")
    except (StoreError, ConfigError) as error:
        conversation.close()
        raise ConfigError(store.notice or str(error)) from None
    return conversation
