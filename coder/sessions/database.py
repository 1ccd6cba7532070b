"""The file that the sessions live in: SQLite, its rights, its schema, transactions, and what is told when it cannot be used.

One file in the user's data folder, readable by its owner alone (0600, also its -wal and -shm; a folder made here is 0700). In
WAL mode a kill costs what was not committed, and readers do not wait for the writer. A file that is damaged is set aside and
what can be read of it is copied into a new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coder.types import CoderError

APPLICATION = 0x636F6472  # application_id: by it a database of ours is known
MAGIC = b"SQLite format 3\0"
BUSY = 5.0  # seconds to wait for another process that writes
BRIEF = 0.1  # the same from then on, until a transaction succeeds: a run asks for many
MEMORY = ":memory:"
TABLES = ("session", "message", "part", "todo")

# One script for each version of the schema; user_version is how many have been run.
SCHEMA = (
    """
CREATE TABLE session (
  id TEXT PRIMARY KEY, title TEXT NOT NULL DEFAULT '', directory TEXT NOT NULL,
  agent TEXT NOT NULL DEFAULT '', model TEXT NOT NULL DEFAULT '',
  parent TEXT REFERENCES session(id) ON DELETE SET NULL, forked INTEGER NOT NULL DEFAULT 0,
  created INTEGER NOT NULL, updated INTEGER NOT NULL,
  input INTEGER NOT NULL DEFAULT 0, output INTEGER NOT NULL DEFAULT 0, cached INTEGER NOT NULL DEFAULT 0,
  reasoning INTEGER NOT NULL DEFAULT 0, estimated INTEGER NOT NULL DEFAULT 0, cost REAL);
CREATE TABLE message (
  id INTEGER PRIMARY KEY, session TEXT NOT NULL REFERENCES session(id) ON DELETE CASCADE, position INTEGER NOT NULL,
  active INTEGER NOT NULL DEFAULT 1, role TEXT NOT NULL, finish TEXT, error TEXT, tokens TEXT, completed INTEGER, data TEXT NOT NULL);
CREATE TABLE part (
  id INTEGER PRIMARY KEY, session TEXT NOT NULL REFERENCES session(id) ON DELETE CASCADE,
  message INTEGER REFERENCES message(id) ON DELETE CASCADE, type TEXT NOT NULL, call_id TEXT, state TEXT, title TEXT,
  start INTEGER, "end" INTEGER, text TEXT, data TEXT NOT NULL DEFAULT '{}');
CREATE TABLE todo (
  session TEXT NOT NULL REFERENCES session(id) ON DELETE CASCADE, position INTEGER NOT NULL, text TEXT NOT NULL, status TEXT NOT NULL,
  PRIMARY KEY (session, position));
CREATE INDEX session_by_directory ON session(directory, updated);
CREATE INDEX session_by_parent ON session(parent);
CREATE INDEX message_by_session ON message(session, position);
CREATE INDEX part_by_message ON part(message);
CREATE INDEX part_by_session ON part(session, type);
""",
)

# The index of texts, where the library can make one. Trigrams find parts of words, and words of languages without spaces.
SEARCH = """
CREATE VIRTUAL TABLE IF NOT EXISTS search USING fts5(text, content='part', content_rowid='id', tokenize='trigram');
CREATE TRIGGER search_insert AFTER INSERT ON part WHEN new.text IS NOT NULL BEGIN
  INSERT INTO search(rowid, text) VALUES (new.id, new.text); END;
CREATE TRIGGER search_delete AFTER DELETE ON part WHEN old.text IS NOT NULL BEGIN
  INSERT INTO search(search, rowid, text) VALUES ('delete', old.id, old.text); END;
INSERT INTO search(search) VALUES ('rebuild');
"""
NO_SEARCH = "DROP TRIGGER IF EXISTS search_insert; DROP TRIGGER IF EXISTS search_delete;"

MEANING = {  # SQLite's primary result codes, for people
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_IOERR: "the disk is full, or fails",
    sqlite3.SQLITE_READONLY: "it cannot be written",
    sqlite3.SQLITE_PERM: "it may not be used",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened",
    sqlite3.SQLITE_BUSY: "another process keeps it busy",
    sqlite3.SQLITE_CORRUPT: "it is damaged",
    sqlite3.SQLITE_NOTADB: "it is not an SQLite database; move it away",
}


class StoreError(CoderError):
    """The sessions cannot be read or written; the text is one line for a person. `damaged`: parts of the file may still be read."""

    def __init__(self, text: str, damaged: bool = False) -> None:
        super().__init__(text)
        self.damaged = damaged


class Database:
    """A connection, usable from any thread. `path` ":memory:" keeps everything in memory. Raises StoreError.

    `notice` tells what a person should know of the opening: "", or that the file was damaged.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.notice = ""
        self._lock = threading.RLock()
        self._patience = BUSY
        try:
            self._db = self._opened()
        except StoreError as error:
            if not error.damaged:
                raise
            self.notice = rescue(self.path)
            self._db = self._opened()

    @property
    def in_memory(self) -> bool:
        return str(self.path) == MEMORY

    def close(self) -> None:
        with self._lock, contextlib.suppress(sqlite3.Error):
            self._db.close()

    def rows(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        """What a query gives. Where the file turns out to be damaged, it is replaced by what can be read of it."""
        with self._lock:
            try:
                with explained(self.path):
                    return self._db.execute(sql, values).fetchall()
            except StoreError as error:
                if not error.damaged or self.in_memory:
                    raise
            self._db.close()
            self.notice = rescue(self.path)
            self._db = self._opened()
            with explained(self.path):
                return self._db.execute(sql, values).fetchall()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing. Not to be nested."""
        with self._lock, explained(self.path):
            if self._db.in_transaction:  # left by an interrupt between two lines of this
                self._db.rollback()
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
                self._db.commit()
                self._wait(BUSY)
            except BaseException as error:
                with contextlib.suppress(sqlite3.Error):
                    self._db.rollback()
                    self._wait(BRIEF if _code(error) == sqlite3.SQLITE_BUSY else self._patience)
                raise

    def _wait(self, seconds: float) -> None:
        """How long to wait for another process from now on."""
        if seconds != self._patience:
            self._db.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")
            self._patience = seconds

    # -- opening

    def _opened(self) -> sqlite3.Connection:
        with explained(self.path):
            if not self.in_memory:
                _refuse_foreign(self.path)
                _private(self.path)
            db = connect(str(self.path))
            try:
                _in_wal_mode(db)
                migrate(db)
            except BaseException:
                db.close()
                raise
            return db


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """What SQLite and the system raise, as a StoreError."""
    try:
        yield
    except sqlite3.Error as error:
        code = _code(error)
        damaged = code == sqlite3.SQLITE_CORRUPT or (
            code == sqlite3.SQLITE_NOTADB and _is_sqlite(path)
        )
        code = sqlite3.SQLITE_CORRUPT if damaged else code
        meaning = MEANING.get(code, str(error).rstrip("."))
        raise StoreError(f"The file of the sessions {path}: {meaning}.", damaged) from None
    except OSError as error:
        raise StoreError(f"The file of the sessions {path}: {error.strerror or error}.") from None


def _code(error: BaseException) -> int:
    """The primary result code; 0 for what is none of SQLite's."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _is_sqlite(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def connect(name: str, *, uri: bool = False) -> sqlite3.Connection:
    db = sqlite3.connect(name, timeout=BUSY, isolation_level=None, check_same_thread=False, uri=uri)
    db.row_factory = _row
    db.text_factory = _text  # bytes that are no text would be an error for all rows
    db.execute("PRAGMA foreign_keys = ON")
    # With WAL a kill loses nothing that was committed; a power cut, the newest
    db.execute("PRAGMA synchronous = NORMAL")
    return db


def _row(cursor: sqlite3.Cursor, values: tuple[Any, ...]) -> sqlite3.Row:
    """No column of ours holds bytes: whoever wrote some meant text."""
    return sqlite3.Row(
        cursor, tuple(_text(value) if isinstance(value, bytes) else value for value in values)
    )


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _private(path: Path) -> None:
    """Make the file and its folder for their owner alone; tighten a file that is there."""
    missing = [folder for folder in path.parents if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
    if path.is_symlink() and not path.exists():  # opening it would make a file where the link leads
        raise StoreError(
            f"The file of the sessions {path} is a link that leads nowhere: remove it."
        )
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    for each in _files(path):  # SQLite gives those that it makes the mode of the first
        if each.exists() and each.stat().st_mode & 0o077:
            each.chmod(0o600)


def _files(path: Path) -> list[Path]:
    return [path, *(path.with_name(path.name + suffix) for suffix in ("-wal", "-shm"))]


def _refuse_foreign(path: Path) -> None:
    """Raise for a file of a newer version or of another program, without a change to it."""
    if not path.exists() or not path.stat().st_size:
        return
    with contextlib.closing(connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
        version, application = (
            db.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("user_version", "application_id")
        )
        if application not in (0, APPLICATION) or (
            not application and db.execute("SELECT 1 FROM sqlite_schema").fetchone()
        ):
            raise StoreError(f"The file of the sessions {path}: it belongs to another program.")
    if version > len(SCHEMA):
        raise StoreError(
            f"The file of the sessions {path} was made by a newer version of coder: update this one."
        )


def _in_wal_mode(db: sqlite3.Connection) -> None:
    """Switch to WAL, which is remembered in the file; SQLite does not wait by itself where another process is at it, too."""
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
    """Bring the schema to this version, and the index of texts with it."""
    if db.execute("PRAGMA user_version").fetchone()[0] < len(SCHEMA):
        db.execute("BEGIN IMMEDIATE")
        # Again: another process may have been faster
        version = db.execute("PRAGMA user_version").fetchone()[0]
        for script in SCHEMA[version:]:
            _run(db, script)
        db.execute(f"PRAGMA application_id = {APPLICATION}")
        db.execute(f"PRAGMA user_version = {len(SCHEMA)}")
        db.execute("COMMIT")
    _index(db)


def _index(db: sqlite3.Connection) -> None:
    """Make the index of texts; where this library cannot, take away what would ask for it."""
    there = db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'search_insert'").fetchone()
    try:
        if there:
            db.execute("SELECT 1 FROM search LIMIT 0")
            return
        db.execute("BEGIN IMMEDIATE")
        if not db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'search_insert'").fetchone():
            _run(db, SEARCH)
        db.execute("COMMIT")
    except sqlite3.OperationalError as error:
        if db.in_transaction:
            db.execute("ROLLBACK")
        if _code(error) != sqlite3.SQLITE_ERROR:  # no such module, no such tokenizer
            raise
        if there:
            _run(db, NO_SEARCH)


def _run(db: sqlite3.Connection, script: str) -> None:
    """A script, statement by statement; executescript would commit first."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            db.execute(statement)
            statement = ""


# ---- a damaged file --------------------------------------------------------------------------------------


def rescue(path: Path) -> str:
    """Copy what can be read of a damaged file into a new one, and keep the old one under another name. Says so in one line.

    The new file takes the place of the old one at once, so that a kill leaves the one or the other.
    """
    with explained(path), _alone(path):
        if _sound(path):
            return ""  # another process has done it
        aside = path.with_name(
            f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
        )
        new = path.with_name(f"{path.name}.new-{os.getpid()}")
        with contextlib.ExitStack() as failed:
            for made in (new, *_files(aside)):
                failed.callback(made.unlink, missing_ok=True)
            for old, kept in zip(_files(path)[:2], _files(aside)):
                if old.exists():
                    shutil.copyfile(old, kept)
                    kept.chmod(0o600)
            os.close(os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600))
            counted = _copied(aside, new)
            for each in _files(path)[1:]:
                each.unlink(missing_ok=True)  # else they would be taken for the new file's
            os.replace(new, path)
            failed.pop_all()
    return (
        f"The file of the sessions was damaged. What could be read of it: {counted['message']} messages, in {counted['session']} "
        f"of the sessions. The damaged file is kept as {aside}."
    )


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time."""
    lock = os.open(
        path.with_name(path.name + ".rescue"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
    )
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _sound(path: Path) -> bool:
    try:
        with contextlib.closing(connect(str(path))) as db:
            return bool(db.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok")
    except sqlite3.DatabaseError:
        return False


def _copied(damaged: Path, new: Path) -> dict[str, int]:
    """Copy row by row; returns how many rows there are of each table."""
    with (
        contextlib.closing(sqlite3.connect(damaged, isolation_level=None)) as source,
        contextlib.closing(connect(str(new))) as target,
    ):
        source.execute("PRAGMA writable_schema = ON")  # else a file that was cut is not read at all
        migrate(target)
        target.execute("PRAGMA foreign_keys = OFF")
        target.execute("BEGIN")
        for table in TABLES:
            columns = [row["name"] for row in target.execute(f"PRAGMA table_info({table})")]
            insert = (
                f"INSERT OR IGNORE INTO {table} (rowid, {', '.join(map(_quoted, columns))}) "
                f"VALUES ({', '.join('?' * (len(columns) + 1))})"
            )
            for row in _readable(source, table, columns):
                with contextlib.suppress(sqlite3.IntegrityError, sqlite3.InterfaceError):
                    target.execute(insert, tuple(row))
        target.execute(
            "INSERT OR IGNORE INTO session (id, directory, created, updated) SELECT DISTINCT session, '', 0, 0 FROM message"
        )
        target.execute(
            "DELETE FROM part WHERE message IS NOT NULL AND message NOT IN (SELECT id FROM message)"
        )
        for table in ("part", "todo"):
            target.execute(f"DELETE FROM {table} WHERE session NOT IN (SELECT id FROM session)")
        target.execute("COMMIT")
        return {
            table: target.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in TABLES
        }


def _quoted(name: str) -> str:
    return f'"{name}"'


GAP = 5_000  # rows that are asked for one by one behind a page that cannot be read


def _readable(db: sqlite3.Connection, table: str, columns: list[str]) -> Iterator[tuple[Any, ...]]:
    """The rows of a table that can be read, in the order of their rowids."""
    names = ", ".join(map(_quoted, columns))
    last, tried = -1, 0
    while tried <= GAP:
        try:
            for row in db.execute(
                f"SELECT rowid, {names} FROM {table} WHERE rowid > ? ORDER BY rowid",
                (last + tried,),
            ):
                last, tried = row[0], 0
                yield tuple(row)
            return
        except sqlite3.DatabaseError:
            tried += 1
