"""A private SQLite file: access rights, transactions, and what happens when it cannot be used.

The file and its folder are for their owner alone (0600, 0700). In WAL mode a kill costs what was not committed,
and readers do not wait for the writer. A damaged file is renamed and a new one begun; a file of a newer version
or of another program is left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from coder.tools.workspace import make_private
from coder.types import CoderError

MEMORY = ":memory:"
BUSY = 2.0  # seconds to wait for another process that writes


class StoreError(CoderError):
    """The file cannot be read or written; the text is one line for the user."""


class DamageError(StoreError):
    """The file is damaged; behind this error a new one has been begun."""


class Database:
    """A connection, usable from any thread; `path` ":memory:" keeps everything in memory. Raises StoreError.

    `notice` is "", or one line for the user: the file was damaged. `generation` counts the files that were opened.
    """

    what = "The file"  # it is, for the user
    application, version = 0, 0  # application_id and user_version, which mark it as ours
    wal = True
    schema = ""  # makes a new file, or makes an older one this version; harmless if run twice

    def __init__(self, path: Path | str) -> None:
        self.path, self.in_memory = Path(path), str(path) == MEMORY
        self.notice, self.generation = "", 0
        self._lock, self._inode = threading.RLock(), 0
        try:
            self._open()
        except DamageError:
            self._replace()

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rows(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        """The rows of a query."""
        with self._connection() as db:
            return db.execute(sql, values).fetchall()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing."""
        with self._connection() as db:
            db.execute("BEGIN IMMEDIATE")
            with db:  # commits, or rolls back
                yield db

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """For one thread at a time, not to be nested. A file that proves damaged is replaced."""
        with self._lock:
            try:
                with self._explained():
                    if self._db.in_transaction:  # left by an interrupt between two lines
                        self._db.rollback()
                    yield self._db
            except DamageError:
                self._replace()
                raise DamageError(self.notice) from None

    def _open(self) -> None:
        with self._explained(), contextlib.ExitStack() as failing:
            if not self.in_memory:
                make_private(self.path.parent)
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
                self._inode = self.path.stat().st_ino
            options: dict[str, Any] = {"isolation_level": None, "check_same_thread": False}
            self._db = sqlite3.connect(str(self.path), timeout=BUSY, **options)
            failing.callback(self._db.close)
            self._prepare(self._db)
            failing.pop_all()
        self.generation += 1

    def _prepare(self, db: sqlite3.Connection) -> None:
        """Refuse a file that is not ours, without a change to it; bring one that is to this version."""
        db.row_factory = sqlite3.Row
        # Bytes that are no text would be an error for all rows
        db.text_factory = lambda data: data.decode("utf-8", "replace")
        db.create_function("lower", 1, str.lower)  # SQLite's own knows ASCII only
        db.execute("PRAGMA foreign_keys = ON")
        # The tables first: another process may be making them, and marks the file together with them
        filled = db.execute("SELECT 1 FROM sqlite_schema").fetchone()
        [application] = db.execute("PRAGMA application_id").fetchone()
        [version] = db.execute("PRAGMA user_version").fetchone()
        if application != self.application and (application or filled):
            raise StoreError(f"{self.what} {self.path}: it belongs to another program.")
        if version > self.version:
            newer = "was made by a newer version of coder: update this one"
            raise StoreError(f"{self.what} {self.path} {newer}.")
        # SQLite gives those that it makes the mode of the first
        for suffix in ("", "-wal", "-shm") if not self.in_memory else ():
            with contextlib.suppress(FileNotFoundError):
                os.chmod(f"{self.path}{suffix}", 0o600)
        if self.wal:
            with contextlib.suppress(sqlite3.OperationalError):  # another process is doing it
                db.execute("PRAGMA journal_mode = WAL")
        # With WAL a kill loses nothing that was committed; a power cut, the newest
        db.execute(f"PRAGMA synchronous = {'NORMAL' if self.wal else 'OFF'}")
        if version < self.version or not filled:
            db.executescript(self.schema)

    def _replace(self) -> None:
        """Rename the damaged file, and open a new one, or the one that another process has begun meanwhile."""
        self.close()
        aside = f"{self.path}.damaged-{time.strftime('%Y%m%d-%H%M%S')}"
        kept = f"The damaged file is kept as {aside}."
        self.notice = f"{self.what} was damaged; a new one was begun. {kept}"
        with self._explained():
            if self.path.stat().st_ino == self._inode:
                for suffix in ("-wal", "-shm", ""):
                    with contextlib.suppress(FileNotFoundError):
                        os.replace(f"{self.path}{suffix}", f"{aside}{suffix}")
        self._open()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise a StoreError for what SQLite and the system raise."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            damaged = code == sqlite3.SQLITE_CORRUPT
            if code == sqlite3.SQLITE_NOTADB:
                with open(self.path, "rb") as file:  # else it is another program's
                    damaged = file.read(6) == b"SQLite"
            kind = DamageError if damaged else StoreError
            raise kind(f"{self.what} {self.path}: {error}.") from None
        except OSError as error:
            why = error.strerror or error
            raise StoreError(f"{self.what} {self.path}: {why}.") from None


class SessionLock:
    """The single-writer lock of a session, until `release`; the kernel releases it on SIGKILL, too.

    `store` is the path of the database. Raises StoreError where another process has it.
    """

    def __init__(self, store: Path, session_id: str) -> None:
        self._path = store.with_name(f"{store.name}.locks") / session_id
        self._fd = -1
        if str(store) == MEMORY:
            return
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            while self._fd < 0 or not os.fstat(self._fd).st_nlink:
                self.release()  # its holder has removed it between our opening and our locking it
                self._fd = os.open(self._path, flags, 0o600)
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise StoreError(f"The session {session_id} is open in another process.") from None
        except OSError:
            pass  # a file system without locks; or nothing can be written, which is reported then

    def release(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                if os.fstat(self._fd).st_nlink:
                    self._path.unlink()  # while it is still ours
            os.close(self._fd)
            self._fd = -1
