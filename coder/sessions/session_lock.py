"""The lock of a session: one program at a time writes it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import ClassVar

from coder.sessions.database import MEMORY, StoreError


class SessionLock:
    """The single-writer lock of a session, until `release`; the kernel releases it on SIGKILL, too.

    `store` is the path of the database. Raises StoreError if the session is open already, in this
    process or another one.
    """

    _held: ClassVar[set[str]] = set()  # paths, of this process

    def __init__(self, store: Path, session_id: str) -> None:
        self._path = store.with_name(f"{store.name}.locks") / session_id
        self._fd = -1
        self._name = os.path.realpath(self._path)
        if str(store) != MEMORY:
            self._lock_file(session_id)
        elif self._name in self._held:
            raise StoreError(f"The session {session_id} is open already in this program.")
        self._held.add(self._name)

    def _lock_file(self, session_id: str) -> None:
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            while self._fd < 0 or not os.fstat(self._fd).st_nlink:
                self._release_file()  # its holder has removed it between opening and locking it
                self._fd = os.open(self._path, flags, 0o600)
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            place = "already in this program" if self._name in self._held else "in another process"
            raise StoreError(f"The session {session_id} is open {place}.") from None
        except OSError:
            pass  # a file system without locks; or nothing can be written, which is reported then

    def release(self) -> None:
        self._held.discard(self._name)
        self._release_file()

    def _release_file(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                if os.fstat(self._fd).st_nlink:
                    self._path.unlink()  # while the lock is still held
            os.close(self._fd)
            self._fd = -1
