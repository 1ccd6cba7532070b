"""The SQLite file of the sessions: access rights, schema, transactions, and what happens when it cannot be used.

The file and its folder are for their owner alone (0600, 0700). In WAL mode a kill costs what was not committed,
and readers do not wait for the writer. A damaged file is renamed and a new one begun; a file of a newer version
or of another program is left alone.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from coder.types import CoderError

MEMORY = ":memory:"
APPLICATION = 0x636F6472  # application_id, which marks the file as ours
VERSION = 3  # user_version
BUSY = 2.0  # seconds to wait for another process that writes

# Makes a new file, and brings one of an older version to this one; to run it twice does no harm.
SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS session (
  id TEXT PRIMARY KEY, title TEXT NOT NULL DEFAULT '', directory TEXT NOT NULL,
  agent TEXT NOT NULL DEFAULT '', model TEXT NOT NULL DEFAULT '',
  parent TEXT REFERENCES session(id) ON DELETE SET NULL, forked INTEGER NOT NULL DEFAULT 0,
  created INTEGER NOT NULL, updated INTEGER NOT NULL,
  input INTEGER NOT NULL DEFAULT 0, output INTEGER NOT NULL DEFAULT 0,
  cached INTEGER NOT NULL DEFAULT 0, reasoning INTEGER NOT NULL DEFAULT 0,
  estimated INTEGER NOT NULL DEFAULT 0, cost REAL);
CREATE TABLE IF NOT EXISTS message (
  id INTEGER PRIMARY KEY, session TEXT NOT NULL REFERENCES session(id) ON DELETE CASCADE,
  position INTEGER NOT NULL, active INTEGER NOT NULL DEFAULT 1, role TEXT NOT NULL,
  finish TEXT, error TEXT, tokens TEXT, completed INTEGER, data TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS part (
  id INTEGER PRIMARY KEY, session TEXT NOT NULL REFERENCES session(id) ON DELETE CASCADE,
  message INTEGER REFERENCES message(id) ON DELETE CASCADE, type TEXT NOT NULL, call_id TEXT,
  state TEXT, title TEXT, start INTEGER, "end" INTEGER, data TEXT NOT NULL DEFAULT '{{}}');
CREATE TABLE IF NOT EXISTS todo (
  session TEXT NOT NULL REFERENCES session(id) ON DELETE CASCADE, position INTEGER NOT NULL,
  text TEXT NOT NULL, status TEXT NOT NULL, PRIMARY KEY (session, position));
CREATE INDEX IF NOT EXISTS session_by_parent ON session(parent);
CREATE INDEX IF NOT EXISTS message_by_place ON message(session, position, active);
CREATE INDEX IF NOT EXISTS part_by_message ON part(message);
CREATE INDEX IF NOT EXISTS part_by_session ON part(session);
DROP INDEX IF EXISTS message_by_session;
DROP TRIGGER IF EXISTS search_insert;
DROP TRIGGER IF EXISTS search_delete;
DELETE FROM part WHERE type IN ('text', 'reasoning', 'snapshot');
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {VERSION};
COMMIT;
"""

MEANING = {  # SQLite's primary result codes
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_IOERR: "the disk is full, or fails",
    sqlite3.SQLITE_READONLY: "it cannot be written",
    sqlite3.SQLITE_PERM: "permission denied",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened",
    sqlite3.SQLITE_BUSY: "another process has locked it",
    sqlite3.SQLITE_CORRUPT: "it is damaged",
    sqlite3.SQLITE_NOTADB: "it is not an SQLite database; move it away",
}


class StoreError(CoderError):
    """The sessions cannot be read or written; the text is one line for the user. `damaged`: the file is."""

    def __init__(self, text: str, damaged: bool = False) -> None:
        super().__init__(text)
        self.damaged = damaged


class Database:
    """A connection, usable from any thread; `path` ":memory:" keeps everything in memory. Raises StoreError.

    `notice` is "", or one line for the user: the file was damaged. `generation` counts the files that were
    opened: behind a StoreError that is `damaged`, a new one is.
    """

    def __init__(self, path: Path | str) -> None:
        self.path, self.in_memory = Path(path), str(path) == MEMORY
        self.notice, self.generation = "", 0
        self._lock, self._inode = threading.RLock(), 0
        try:
            self._open()
        except StoreError as error:
            self._replace(error)

    def close(self) -> None:
        with self._lock, contextlib.suppress(sqlite3.Error):
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rows(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        """The rows of a query."""
        with self._lock:
            try:
                with self._explained():
                    return self._db.execute(sql, values).fetchall()
            except StoreError as error:
                self._replace(error)
                raise StoreError(self.notice, damaged=True) from None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing. Not to be nested."""
        with self._lock:
            try:
                with self._explained():
                    if self._db.in_transaction:  # left by an interrupt between two lines of this
                        self._db.rollback()
                    self._db.execute("BEGIN IMMEDIATE")
                    try:
                        yield self._db
                        self._db.commit()
                    except BaseException:
                        with contextlib.suppress(sqlite3.Error):
                            self._db.rollback()
                        raise
            except StoreError as error:
                self._replace(error)
                raise

    def _open(self) -> None:
        with self._explained():
            if not self.in_memory:
                make_private(self.path)
                self._inode = self.path.stat().st_ino
            self._db = connect(str(self.path))
            try:
                self._prepare(self._db)
            except BaseException:
                self._db.close()
                raise
        self.generation += 1

    def _prepare(self, db: sqlite3.Connection) -> None:
        """Refuse a file that is not ours, without a change to it; bring one that is to this version."""
        # The tables first: another process may be making them, and marks the file together with them
        filled = db.execute("SELECT 1 FROM sqlite_schema").fetchone()
        application, version = (
            db.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("application_id", "user_version")
        )
        if application not in (0, APPLICATION) or (filled and not application):
            raise StoreError(
                f"The file of the sessions {self.path}: it belongs to another program."
            )
        if version > VERSION:
            newer = "was made by a newer version of coder: update this one"
            raise StoreError(f"The file of the sessions {self.path} {newer}.")
        if not self.in_memory:
            for suffix in (
                "",
                "-wal",
                "-shm",
            ):  # SQLite gives those that it makes the mode of the first
                with contextlib.suppress(FileNotFoundError):
                    os.chmod(f"{self.path}{suffix}", 0o600)
        set_wal_mode(db)
        # With WAL a kill loses nothing that was committed; a power cut, the newest
        db.execute("PRAGMA synchronous = NORMAL")
        if version < VERSION:
            db.executescript(SCHEMA)
            with contextlib.suppress(sqlite3.DatabaseError):  # the index of version 2 may not open
                db.execute("DROP TABLE IF EXISTS search")

    def _replace(self, error: StoreError) -> None:
        """Behind an error that is not damage, raise it. Else rename the file, and open a new one, or the
        one that another process has begun meanwhile."""
        if not error.damaged or self.in_memory:
            raise error
        self.close()
        aside = f"{self.path}.damaged-{time.strftime('%Y%m%d-%H%M%S')}"
        self.notice = f"The file of the sessions was damaged; a new one was begun. The damaged file is kept as {aside}."
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
            if code == sqlite3.SQLITE_NOTADB:
                with open(
                    self.path, "rb"
                ) as file:  # a database whose first words are right is damaged
                    code = sqlite3.SQLITE_CORRUPT if file.read(6) == b"SQLite" else code
            meaning = MEANING.get(code, str(error).rstrip("."))
            damaged = code == sqlite3.SQLITE_CORRUPT
            raise StoreError(f"The file of the sessions {self.path}: {meaning}.", damaged) from None
        except OSError as error:
            why = error.strerror or error
            raise StoreError(f"The file of the sessions {self.path}: {why}.") from None


def connect(name: str) -> sqlite3.Connection:
    db = sqlite3.connect(name, timeout=BUSY, isolation_level=None, check_same_thread=False)
    db.row_factory = sqlite3.Row
    # Bytes that are no text would be an error for all rows
    db.text_factory = lambda data: data.decode("utf-8", "replace")
    db.execute("PRAGMA foreign_keys = ON")
    return db


def set_wal_mode(db: sqlite3.Connection) -> None:
    """Switch to WAL, which the file remembers; SQLite itself does not wait for another process here."""
    end = time.monotonic() + BUSY
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise
            time.sleep(0.01)


def make_private(path: Path) -> None:
    """Make a file and its folders, for their owner alone, where they are missing."""
    missing = [folder for folder in path.parents if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
