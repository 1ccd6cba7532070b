"""The SQLite file of the sessions: access rights, schema, transactions, and what happens when it cannot be used.

One file in the user's data folder, readable by its owner alone (0600, also its -wal and -shm; a folder
that is made here is 0700). In WAL mode a kill costs what was not committed, and readers do not wait for
the writer. A damaged file is renamed and a new one begun; a search index that does not open is rebuilt.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coder.types import CoderError

APPLICATION = 0x636F6472  # application_id, which marks the file as ours
MAGIC = b"SQLite format 3\0"
BUSY = 2.0  # seconds to wait for another process that writes
MEMORY = ":memory:"

# One script for each version of the schema; user_version is how many have been run.
SCHEMA = (
    """
CREATE TABLE session (
  id TEXT PRIMARY KEY, title TEXT NOT NULL DEFAULT '', directory TEXT NOT NULL,
  agent TEXT NOT NULL DEFAULT '', model TEXT NOT NULL DEFAULT '',
  parent TEXT REFERENCES session(id) ON DELETE SET NULL, forked INTEGER NOT NULL DEFAULT 0,
  created INTEGER NOT NULL, updated INTEGER NOT NULL,
  input INTEGER NOT NULL DEFAULT 0, output INTEGER NOT NULL DEFAULT 0,
  cached INTEGER NOT NULL DEFAULT 0, reasoning INTEGER NOT NULL DEFAULT 0,
  estimated INTEGER NOT NULL DEFAULT 0, cost REAL);
CREATE TABLE message (
  id INTEGER PRIMARY KEY, session TEXT NOT NULL REFERENCES session(id) ON DELETE CASCADE,
  position INTEGER NOT NULL, active INTEGER NOT NULL DEFAULT 1, role TEXT NOT NULL,
  finish TEXT, error TEXT, tokens TEXT, completed INTEGER, data TEXT NOT NULL);
CREATE TABLE part (
  id INTEGER PRIMARY KEY, session TEXT NOT NULL REFERENCES session(id) ON DELETE CASCADE,
  message INTEGER REFERENCES message(id) ON DELETE CASCADE, type TEXT NOT NULL, call_id TEXT,
  state TEXT, title TEXT, start INTEGER, "end" INTEGER, text TEXT, data TEXT NOT NULL DEFAULT '{}');
CREATE TABLE todo (
  session TEXT NOT NULL REFERENCES session(id) ON DELETE CASCADE, position INTEGER NOT NULL,
  text TEXT NOT NULL, status TEXT NOT NULL, PRIMARY KEY (session, position));
CREATE INDEX session_by_directory ON session(directory, updated);
CREATE INDEX session_by_parent ON session(parent);
CREATE INDEX message_by_session ON message(session, position);
CREATE INDEX part_by_message ON part(message);
CREATE INDEX part_by_session ON part(session, type);
""",
    """
DROP INDEX message_by_session;
CREATE INDEX message_by_session ON message(session, active, position);
""",
)

# The index of texts. Trigrams find parts of words, and words of languages without spaces.
SEARCH = """
CREATE VIRTUAL TABLE search
  USING fts5(text, content='part', content_rowid='id', tokenize='trigram');
CREATE TRIGGER search_insert AFTER INSERT ON part WHEN new.text IS NOT NULL BEGIN
  INSERT INTO search(rowid, text) VALUES (new.id, new.text); END;
CREATE TRIGGER search_delete AFTER DELETE ON part WHEN old.text IS NOT NULL BEGIN
  INSERT INTO search(search, rowid, text) VALUES ('delete', old.id, old.text); END;
INSERT INTO search(search) VALUES ('rebuild');
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
    """A connection, usable from any thread. `path` ":memory:" keeps everything in memory. Raises StoreError.

    `notice` is "", or one line for the user: the file was damaged and a new one begun; `generation` counts these.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.notice, self.generation = "", 0
        self._lock = threading.RLock()
        try:
            self._db = self._open()
        except StoreError as error:
            if not error.damaged:
                raise
            self._replace()

    @property
    def in_memory(self) -> bool:
        return str(self.path) == MEMORY

    def close(self) -> None:
        with self._lock, contextlib.suppress(sqlite3.Error):
            self._db.close()

    def rows(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        """The rows of a query."""
        with self._lock:
            try:
                with explained(self.path):
                    return self._db.execute(sql, values).fetchall()
            except StoreError as error:
                if not error.damaged or self.in_memory:
                    raise
            generation = self.generation
            self._recover()
            if self.generation != generation:
                raise StoreError(self.notice, damaged=True)
            with explained(self.path):
                return self._db.execute(sql, values).fetchall()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing. Not to be nested. Behind a StoreError that is `damaged` the file is usable again."""
        with self._lock:
            try:
                with explained(self.path), self._committed() as db:
                    yield db
            except StoreError as error:
                if error.damaged and not self.in_memory:
                    self._recover()
                raise

    @contextlib.contextmanager
    def _committed(self) -> Iterator[sqlite3.Connection]:
        if self._db.in_transaction:  # left by an interrupt between two lines of this
            self._db.rollback()
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield self._db
            self._db.commit()
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._db.rollback()
            raise

    # -- opening

    def _open(self) -> sqlite3.Connection:
        with explained(self.path):
            if not self.in_memory:
                _create_private(self.path)
            db = connect(str(self.path))
            try:
                _refuse_foreign(db, self.path)
                if not self.in_memory:
                    self._inode = os.stat(self.path).st_ino
                    _tighten(self.path)
                _set_wal_mode(db)
                migrate(db)
                open_index(db)
            except BaseException:
                db.close()
                raise
            return db

    def _recover(self) -> None:
        """Rebuild the search index; where that is not what is damaged, begin a new file."""
        with contextlib.suppress(sqlite3.Error):
            with self._committed() as db:
                drop_index(db)
            if self._db.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok":
                open_index(self._db)
                return
        self._db.close()
        self._replace()

    def _replace(self) -> None:
        """Rename the damaged file and open a new one; where another process has done so, open that."""
        self.notice = "The file of the sessions was damaged; another process has begun a new one."
        with explained(self.path):
            inode = os.stat(self.path).st_ino
            if inode == getattr(self, "_inode", inode):
                aside = f"{self.path}.damaged-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
                for suffix in ("-wal", ""):
                    with contextlib.suppress(FileNotFoundError):
                        os.replace(f"{self.path}{suffix}", f"{aside}{suffix}")
                Path(f"{self.path}-shm").unlink(missing_ok=True)
                self.notice = (
                    "The file of the sessions was damaged; a new one was begun. The damaged file is "
                    f"kept as {aside}."
                )
        self._db = self._open()
        self.generation += 1


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Raise a StoreError for what SQLite and the system raise."""
    try:
        yield
    except sqlite3.Error as error:
        code = _code(error)
        damaged = (
            code == sqlite3.SQLITE_CORRUPT
            or (code == sqlite3.SQLITE_NOTADB and _has_magic(path))
            # So FTS5 reports a damaged index; constraints of tables have extended codes
            or getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_CONSTRAINT
        )
        code = sqlite3.SQLITE_CORRUPT if damaged else code
        meaning = MEANING.get(code, str(error).rstrip("."))
        raise StoreError(f"The file of the sessions {path}: {meaning}.", damaged) from None
    except OSError as error:
        raise StoreError(f"The file of the sessions {path}: {error.strerror or error}.") from None


def _code(error: BaseException) -> int:
    """The primary result code; 0 for what is not SQLite's."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _has_magic(path: Path) -> bool:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC
    return False


def connect(name: str) -> sqlite3.Connection:
    db = sqlite3.connect(name, timeout=BUSY, isolation_level=None, check_same_thread=False)
    db.row_factory = sqlite3.Row
    # Bytes that are no text would be an error for all rows
    db.text_factory = lambda data: data.decode("utf-8", "replace")
    db.execute("PRAGMA foreign_keys = ON")
    # With WAL a kill loses nothing that was committed; a power cut, the newest
    db.execute("PRAGMA synchronous = NORMAL")
    return db


def _create_private(path: Path) -> None:
    """Make the file and its folders, for their owner alone, where they are missing."""
    missing = [folder for folder in path.parents if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


def _tighten(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):  # SQLite gives those that it makes the mode of the first
        with contextlib.suppress(FileNotFoundError):
            if os.stat(f"{path}{suffix}").st_mode & 0o077:
                os.chmod(f"{path}{suffix}", 0o600)


def _refuse_foreign(db: sqlite3.Connection, path: Path) -> None:
    """Raise for a file of a newer version or of another program, without a change to it."""
    # The tables first: another process may be making them, and marks the file together with them
    filled = db.execute("SELECT 1 FROM sqlite_schema").fetchone()
    version, application = (
        db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("user_version", "application_id")
    )
    unmarked = filled and not application
    if application not in (0, APPLICATION) or unmarked:
        raise StoreError(f"The file of the sessions {path}: it belongs to another program.")
    if version > len(SCHEMA):
        raise StoreError(
            f"The file of the sessions {path} was made by a newer version of coder: update this one."
        )


def _set_wal_mode(db: sqlite3.Connection) -> None:
    """Switch to WAL, which the file remembers; SQLite itself does not wait for another process here."""
    end = time.monotonic() + BUSY
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if _code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise
            time.sleep(0.01)


def migrate(db: sqlite3.Connection) -> None:
    """Bring the schema to this version."""
    if db.execute("PRAGMA user_version").fetchone()[0] == len(SCHEMA):
        return
    db.execute("BEGIN IMMEDIATE")
    # Again: another process may have been faster
    version = db.execute("PRAGMA user_version").fetchone()[0]
    for script in SCHEMA[version:]:
        _run(db, script)
    db.execute(f"PRAGMA application_id = {APPLICATION}")
    db.execute(f"PRAGMA user_version = {len(SCHEMA)}")
    db.execute("COMMIT")


def _run(db: sqlite3.Connection, script: str) -> None:
    """A script, statement by statement; executescript would commit first."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            db.execute(statement)
            statement = ""


# ---- the search index --------------------------------------------------------------------------


def open_index(db: sqlite3.Connection) -> None:
    """Make the index where it is missing or does not open; without it where the library cannot."""
    with contextlib.suppress(sqlite3.DatabaseError):
        if db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'search_insert'").fetchone():
            db.execute("SELECT rowid FROM search LIMIT 1").fetchone()
            return
    db.execute("BEGIN IMMEDIATE")
    try:
        drop_index(db)
        try:
            _run(db, SEARCH)
        except sqlite3.OperationalError as error:
            if _code(error) != sqlite3.SQLITE_ERROR:  # no such module, no such tokenizer
                raise
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise


def drop_index(db: sqlite3.Connection) -> None:
    """Remove the index table by table: `DROP TABLE search` would have to open it."""
    for name in ("search_insert", "search_delete"):
        db.execute(f"DROP TRIGGER IF EXISTS {name}")
    db.execute("PRAGMA writable_schema = ON")
    try:
        db.execute("DELETE FROM sqlite_schema WHERE name = 'search'")
        shadows = "SELECT name FROM sqlite_schema WHERE type = 'table' AND name GLOB 'search_*'"
        for row in db.execute(shadows).fetchall():
            db.execute(f'DROP TABLE "{row["name"]}"')
    finally:
        db.execute("PRAGMA writable_schema = RESET")
