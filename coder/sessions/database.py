"""Private SQLite files.

A file and its folder are for their owner alone (0600, 0700). In WAL mode a kill costs what was not
committed, and readers do not wait for the writer.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from coder.sessions.rescue import DAMAGED, decoded, take_over
from coder.tools.workspace import make_private
from coder.types import CoderError

MEMORY = ":memory:"
BUSY = 2.0  # seconds to wait for another process that writes


class StoreError(CoderError):
    """The file cannot be read or written; the text is one line for the user."""


class DamageError(StoreError):
    """The file is damaged; a new one has taken its place, with what could be read of it."""


class Database:
    """A connection, usable from any thread; `path` ":memory:" keeps everything in memory.

    `notice` is "", or one line for the user: the file was damaged. `generation` counts the files
    that were opened. Raises StoreError.
    """

    what = "The file"  # as the user knows it
    # application_id and user_version, which mark it as this program's
    application = 0
    version = 0
    wal = True
    schema = ""  # makes a new file, or makes an older one this version; harmless if run twice
    completion = ""  # adds what rows that were taken over from a damaged file need

    def __init__(self, path: Path | str) -> None:
        self.in_memory = str(path) == MEMORY
        # The real one: a new file is made next to it, and takes its place
        self.path = Path(path if self.in_memory else os.path.realpath(path))
        self.notice = ""
        self.generation = 0
        self._lock = threading.RLock()
        self._inode = 0
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
        """The rows of a query; of a damaged file those that could be taken over."""
        try:
            return self._query(sql, values)
        except DamageError:
            return self._query(sql, values)

    def _query(self, sql: str, values: Sequence[Any]) -> list[sqlite3.Row]:
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
                with self._explain_errors():
                    if self._db.in_transaction:  # left by an interrupt between two lines
                        self._db.rollback()
                    yield self._db
            except DamageError:
                self._replace()
                raise DamageError(self.notice) from None

    def _open(self) -> None:
        with self._explain_errors(), contextlib.ExitStack() as failing:
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
        """Refuse a file of another program, without a change to it; bring one that is to this
        version."""
        db.row_factory = sqlite3.Row
        db.text_factory = decoded
        db.create_function("lower", 1, str.lower)  # SQLite's own knows ASCII only
        db.execute("PRAGMA foreign_keys = ON")
        # The tables first: another process may be making them, and marks the file together with
        # them
        has_tables = db.execute("SELECT 1 FROM sqlite_schema").fetchone()
        [application] = db.execute("PRAGMA application_id").fetchone()
        [version] = db.execute("PRAGMA user_version").fetchone()
        is_new = not application and not has_tables
        if application != self.application and not is_new:
            raise StoreError(f"{self.what} {self.path}: it belongs to another program.")
        if version > self.version:
            newer = "was made by a newer version of coder: update this one"
            raise StoreError(f"{self.what} {self.path} {newer}.")
        if not self.in_memory:
            self._make_private()
        if self.wal:
            with contextlib.suppress(sqlite3.OperationalError):  # another process is doing it
                db.execute("PRAGMA journal_mode = WAL")
            # A kill loses nothing that was committed; a power cut, the newest
            db.execute("PRAGMA synchronous = NORMAL")
        else:
            db.execute("PRAGMA synchronous = OFF")
        if version < self.version or not has_tables:
            db.executescript(self.schema)

    def _make_private(self) -> None:
        """Also what SQLite has made next to it; what it makes later has the mode of the file."""
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.chmod(f"{self.path}{suffix}", 0o600)

    def _replace(self) -> None:
        """Rename the damaged file, and put a new one in its place, with what can be read of it.

        If another process has put one there meanwhile, open that.
        """
        self.close()
        aside = f"{self.path}.damaged-{time.strftime('%Y%m%d-%H%M%S')}"
        fresh = Path(f"{self.path}.{os.getpid()}.new")
        taken = 0
        with self._explain_errors(), contextlib.ExitStack() as ending:
            os.close(os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
            ending.callback(fresh.unlink, missing_ok=True)
            taken = take_over(self.path, fresh, self.schema, self.completion)
            if self.path.stat().st_ino == self._inode:
                for suffix in ("-wal", "-shm", ""):
                    with contextlib.suppress(FileNotFoundError):
                        os.replace(f"{self.path}{suffix}", f"{aside}{suffix}")
                os.replace(fresh, self.path)
        rest = ", with what can be read of it" if taken else ""
        begun = f"{self.what} was damaged; a new one was begun{rest}."
        self.notice = f"{begun} The damaged file is kept as {aside}."
        self._open()

    @contextlib.contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Raise a StoreError for what SQLite and the system raise."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            kind = DamageError if code in DAMAGED else StoreError
            raise kind(f"{self.what} {self.path}: {error}.") from None
        except OSError as error:
            raise StoreError(f"{self.what} {self.path}: {error.strerror or error}.") from None
