"""Private SQLite files, and what undo keeps in one of them: contents of files, beside those that git has.

A file and its folder are for their owner alone (0600, 0700). In WAL mode a kill costs what was not committed, and
readers do not wait for the writer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from pathlib import Path
from typing import Any, Self

from coder.sessions.git import Git, blob_id
from coder.sessions.rescue import DAMAGED, decoded, take_over
from coder.tools.workspace import make_private
from coder.types import CoderError

MEMORY = ":memory:"
BUSY = 2.0  # seconds to wait for another process that writes
MAX_STORED = 100_000_000  # bytes of a workspace's contents; steps may double it
MAX_WAITING = 8_000_000  # bytes of contents in memory, before they are stored
KEPT_DAYS = 30


class StoreError(CoderError):
    """The file cannot be read or written; the text is one line for the user."""


class DamageError(StoreError):
    """The file is damaged; behind this error there is a new one, with what could be read of it."""


class Database:
    """A connection, usable from any thread; `path` ":memory:" keeps everything in memory. Raises StoreError.

    `notice` is "", or one line for the user: the file was damaged. `generation` counts the files that were opened.
    """

    what = "The file"  # it is, for the user
    application, version = 0, 0  # application_id and user_version, which mark it as this program's
    wal = True
    schema = ""  # makes a new file, or makes an older one this version; harmless if run twice
    completion = ""  # adds what rows that were taken over from a damaged file need

    def __init__(self, path: Path | str) -> None:
        self.in_memory = str(path) == MEMORY
        # What is beside the file, and takes its place, is so where a link leads to it
        self.path = Path(path if self.in_memory else os.path.realpath(path))
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
        """Refuse a file of another program, without a change to it; bring one that is to this version."""
        db.row_factory = sqlite3.Row
        db.text_factory = decoded
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
        """Rename the damaged file, and put a new one in its place, with what can be read of it; or open the one that
        another process has put there meanwhile."""
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


class BlobStore(Database):
    """What undo keeps of a workspace: contents of files by their git blob ids, and what runs have changed.

    One file for each workspace; contents are compressed, and go KEPT_DAYS after their last use. Raises StoreError.
    """

    what, wal = "The file of undo", False
    schema = """
    PRAGMA auto_vacuum = full;
    CREATE TABLE IF NOT EXISTS blob (id TEXT PRIMARY KEY, used INTEGER, data BLOB);
    CREATE TABLE IF NOT EXISTS run (id INTEGER PRIMARY KEY, session TEXT, time INTEGER, data TEXT);
    CREATE TABLE IF NOT EXISTS look (id INTEGER PRIMARY KEY, data TEXT);
    """

    def __init__(self, root: str, data: str, deadline: Callable[[], float]) -> None:
        name = f"{hashlib.sha256(os.fsencode(root)).hexdigest()}.db"
        super().__init__(Path(data, "snapshots", name))
        self.git = Git(root, data, deadline)
        self._waiting_blobs: dict[str, bytes] = {}
        self._waiting_bytes = 0
        with contextlib.suppress(OSError):
            self.path.parent.chmod(0o700)
            os.utime(self.path)  # in use

    def execute(self, sql: str, *rows: Sequence[object]) -> None:
        """A statement for each of these rows of values."""
        with self.transaction() as db:
            db.executemany(sql, rows)

    @property
    def stored(self) -> int:
        """Bytes on disk, or about to be."""
        return os.path.getsize(self.path) + self._waiting_bytes

    def add(self, data: bytes) -> str:
        """The id of a content, which `flush` will store where git does not have it."""
        name = blob_id(data)
        if name not in self._waiting_blobs and name not in self.git.blobs:
            self._waiting_blobs[name] = data
            self._waiting_bytes += len(data)
        if self._waiting_bytes > MAX_WAITING:
            self.flush()
        return name

    def flush(self) -> None:
        """Store what waits."""
        waiting, self._waiting_blobs, self._waiting_bytes = self._waiting_blobs, {}, 0
        if waiting:
            now = int(time.time())
            rows = [(name, now, zlib.compress(data, 1)) for name, data in waiting.items()]
            known = "ON CONFLICT DO UPDATE SET used = excluded.used"
            self.execute(f"INSERT INTO blob VALUES (?, ?, ?) {known}", *rows)

    def blobs(self, names: Set[str]) -> dict[str, bytes]:
        """The contents with these ids that are still kept, here or by git."""
        query = "SELECT id, data FROM blob WHERE id IN (SELECT value FROM json_each(?))"
        rows = self.rows(query, json.dumps([*names]))
        found = {}
        for row in rows:
            with contextlib.suppress(zlib.error, TypeError):  # damaged
                found[row["id"]] = zlib.decompress(row["data"])
        return found | self.git.contents(names - found.keys())

    def prune(self, used: Collection[str]) -> None:
        """Remove what was not used for KEPT_DAYS, and all of other workspaces; where there is little room, after a day."""
        now = int(time.time())
        day, old = now - 86_400, now - KEPT_DAYS * 86_400
        [row] = self.rows("SELECT min(used) AS used FROM blob")
        if row["used"] and row["used"] < day:
            ids = "id IN (SELECT value FROM json_each(?))"
            self.execute(f"UPDATE blob SET used = ? WHERE {ids}", (now, json.dumps([*used])))
            oldest = day if self.stored > 1.5 * MAX_STORED else old
            self.execute("DELETE FROM blob WHERE used < ?", (oldest,))
            self.execute("DELETE FROM run WHERE time < ?", (old,))
        for entry in list(os.scandir(self.path.parent)):
            # Another process may have removed it: the journal of a workspace of its own
            with contextlib.suppress(FileNotFoundError):
                if entry.stat().st_mtime < old:
                    os.unlink(entry.path)
