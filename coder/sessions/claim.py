"""Claim: the right to write a session, held by one process at a time.

A lock of the kernel's on a file of its own: it is given back also by kill -9.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from coder.sessions.database import MEMORY, StoreError


class Claim:
    """Held until `release`. `store` is the path of the database; `session_id` is one that stands in it.

    Raises StoreError where somebody else holds it.
    """

    def __init__(self, store: Path, session_id: str) -> None:
        self._fd: int | None = None
        self._path = store.with_name(f"{store.name}.locks") / session_id
        if str(store) == MEMORY:
            return
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            while self._fd is None:
                self._fd = _locked(self._path, session_id)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, str(os.getpid()).encode(), 0)
        except OSError as error:
            self.release()
            raise StoreError(
                f"The session {session_id} cannot be claimed: {error.strerror}."
            ) from None

    def release(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()  # while it is still ours
            os.close(self._fd)
            self._fd = None


def _locked(path: Path, session_id: str) -> int | None:
    """The file, locked; None where its holder has removed it between our opening and our locking it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    locked: int | None = None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(FileNotFoundError):
            locked = fd if os.path.samestat(os.fstat(fd), os.stat(path)) else None
    except BlockingIOError:
        holder = os.pread(fd, 20, 0).decode("ascii", "replace") or "unknown"
        own = holder == str(os.getpid())
        where = "this process" if own else f"another process (pid {holder})"
        raise StoreError(f"The session {session_id} is open in {where}.") from None
    finally:
        if locked is None:
            os.close(fd)
    return locked
