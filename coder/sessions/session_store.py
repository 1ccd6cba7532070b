"""SessionStore: the sessions of a program of the user's own."""

from __future__ import annotations

import logging
from pathlib import Path

from coder.sessions.recorder import Recorder
from coder.sessions.store import Store

log = logging.getLogger("coder.sessions")


class SessionStore(Store):
    """A store for a program of the user's own, which closes what it opened. Raises StoreError.

    `which` is the id of a session, its name, or the beginning of either, as `find` takes it.
    """

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
        self._sessions: list[Recorder] = []

    def rename(self, which: str, title: str) -> None:
        super().rename(self.find(which).id, title)

    def remove(self, which: str) -> None:
        """Remove a session and those of its sub-agents, but not its forks."""
        super().remove(self.find(which).id)

    def open(self, which: str = "", *, directory: Path | str = "") -> Recorder:
        """A conversation that is kept: an older one, or without a name a new one.

        A new one is of `directory`, or of the current folder. Problems go to the logger
        "coder.sessions".
        """
        if which:
            info = self.find(which)
        else:
            info = self.create(str(directory or Path.cwd()))
        recorder = Recorder(self, info, tell=log.warning)
        self._sessions.append(recorder)
        return recorder

    def close(self) -> None:
        """Close the file, and before it the sessions that are open."""
        for session in self._sessions:
            session.close()
        super().close()
