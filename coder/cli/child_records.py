"""Child records: the sessions of sub-agents, kept beside that of their parent, so that `task_id` finds them again."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from coder.events import Event, Nested, RunEnd
from coder.sessions.recorder import Recorder, to_model_messages
from coder.sessions.store import Store, StoreError
from coder.types import Message

if TYPE_CHECKING:
    from coder.cli.app import App


class ChildRecords:
    """Follows the `nested` events of a session's runs."""

    def __init__(self, app: App, store: Store) -> None:
        self.app, self.store = app, store
        self.open: dict[str, Recorder] = {}  # of the children at work
        app.subagents.load = self.load

    def __call__(self, event: Event) -> None:
        if isinstance(event, Nested) and event.session_id:
            with contextlib.suppress(StoreError):
                self._keep(event)
        elif isinstance(event, RunEnd):
            self.close()

    def _keep(self, event: Nested) -> None:
        child = self.app.subagents.children[event.session_id]
        if child.id not in self.open:
            self._create(child.id, event.agent)
            self.open[child.id] = Recorder(self.store, child.id, child.messages)
        self.open[child.id](event.event)
        if isinstance(event.event, RunEnd):
            self._end(child.id)

    def _create(self, child_id: str, agent: str) -> None:
        try:
            self.store.get(child_id)
        except StoreError:
            model = self.app.agents[agent].model or self.app.model.name
            self.store.create(
                str(self.app.cwd),
                agent=agent,
                model=model,
                parent=self.app.agent.session_id,
                session_id=child_id,
            )

    def _end(self, child_id: str) -> None:
        recorder = self.open.pop(child_id)
        recorder.sync()
        recorder.close()

    def close(self) -> None:
        """No child is at work any more; one that was broken off is kept as far as it came."""
        for child_id in list(self.open):
            self._end(child_id)

    def load(self, task_id: str) -> tuple[str, list[Message]] | None:
        """(agent, messages) of a child of this session, from an earlier process; None where there is none."""
        try:
            info = self.store.get(task_id)
            if info.parent != self.app.agent.session_id or info.forked:
                return None
            return info.agent, to_model_messages(self.store, task_id)
        except StoreError:
            return None
