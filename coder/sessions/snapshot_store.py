"""Contents of files of a workspace, and records of what runs have changed: what undo keeps.

All lies in one private SQLite file for each workspace in the data folder, contents compressed, and goes
KEPT_DAYS after its last use.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import threading
import time
import zlib
from collections.abc import Collection, Sequence, Set
from pathlib import Path
from typing import Any

from coder.sessions.database import connect, make_private
from coder.sessions.git_objects import blob_id, read_blobs
from coder.types import CoderError

MAX_STORED = 100_000_000  # bytes of a workspace's contents; steps may double it
MAX_WAITING = 8_000_000  # bytes of contents in memory, before they are stored
KEPT_DAYS = 30
SCHEMA = """
CREATE TABLE IF NOT EXISTS blob (id TEXT PRIMARY KEY, used INTEGER, data BLOB);
CREATE TABLE IF NOT EXISTS record (id INTEGER PRIMARY KEY, session TEXT, time INTEGER, data TEXT);
CREATE TABLE IF NOT EXISTS look (id INTEGER PRIMARY KEY, data TEXT);
"""


class SnapshotError(CoderError):
    """The states of files could not be taken or read; the text is for the user."""


class SnapshotStore:
    """Contents of files, and records of what runs have changed. Methods raise SnapshotError."""

    def __init__(self, root: str, data: Path) -> None:
        self.root, self.data = root, os.path.realpath(data)
        self.path = Path(
            self.data, "snapshots", f"{hashlib.sha256(os.fsencode(root)).hexdigest()}.db"
        )
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None
        self._waiting: dict[str, bytes] = {}
        self._waiting_bytes = 0

    def execute(self, sql: str, *rows: Sequence[object]) -> list[sqlite3.Row]:
        """A query with one row of values, or a statement with many."""
        try:
            with self._lock:
                db = self._db = self._db or self._open()
                if sql.startswith("SELECT"):
                    return db.execute(sql, *rows).fetchall()
                db.execute("BEGIN IMMEDIATE")
                with db:  # commits, or rolls back
                    db.executemany(sql, rows)
                return []
        except (sqlite3.Error, OSError) as error:
            if type(error) is sqlite3.DatabaseError:  # it is damaged: the next process begins anew
                self.path.unlink(missing_ok=True)
            raise SnapshotError(str(error)) from None

    def _open(self) -> sqlite3.Connection:
        make_private(self.path)
        self.path.parent.chmod(0o700)
        db = connect(str(self.path))
        db.executescript("PRAGMA auto_vacuum = full; PRAGMA synchronous = off;" + SCHEMA)
        os.utime(self.path)  # in use
        return db

    @property
    def stored(self) -> int:
        """Bytes on disk, or about to be."""
        return os.path.getsize(self.path) + self._waiting_bytes

    def add(self, data: bytes) -> str:
        """The id of a content, which `flush` will store."""
        name = blob_id(data)
        if name not in self._waiting:
            self._waiting[name] = data
            self._waiting_bytes += len(data)
        if self._waiting_bytes > MAX_WAITING:
            self.flush()
        return name

    def flush(self) -> None:
        waiting, self._waiting, self._waiting_bytes = self._waiting, {}, 0
        if waiting:
            now = int(time.time())
            rows = [(name, now, zlib.compress(data, 1)) for name, data in waiting.items()]
            insert = (
                "INSERT INTO blob VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET used = excluded.used"
            )
            self.execute(insert, *rows)

    def blobs(self, names: Set[str]) -> dict[str, bytes]:
        """The contents with these ids, ours or git's. Raises SnapshotError where one is no longer kept."""
        found = {}
        for name in names:
            for row in self.execute("SELECT data FROM blob WHERE id = ?", (name,)):
                found[name] = zlib.decompress(row["data"])
        if missing := names - found.keys():
            found |= read_blobs(self.root, self.data, missing)
        if names - found.keys():
            raise SnapshotError("the snapshots are no longer kept")
        return found

    def prune(self, used: Collection[str]) -> None:
        """Remove what was not used for KEPT_DAYS, and all of other workspaces; where there is little room, after a day."""
        now = int(time.time())
        old, [row] = now - KEPT_DAYS * 86_400, self.execute("SELECT min(used) AS used FROM blob")
        if row["used"] and row["used"] < now - 86_400:
            ids = "id IN (SELECT value FROM json_each(?))"
            self.execute(f"UPDATE blob SET used = ? WHERE {ids}", (now, json.dumps([*used])))
            oldest = now - 86_400 if self.stored > 1.5 * MAX_STORED else old
            self.execute("DELETE FROM blob WHERE used < ?", (oldest,))
            self.execute("DELETE FROM record WHERE time < ?", (old,))
        for entry in list(os.scandir(self.path.parent)):
            if entry.stat(follow_symlinks=False).st_mtime < old:
                shutil.rmtree(entry.path, ignore_errors=True)
                Path(entry.path).unlink(missing_ok=True)

    # ---- records of a session

    def records(self, session: str) -> list[dict[str, Any]]:
        """In their order: {"message": time} for each run, and its steps behind it."""
        rows = self.execute("SELECT data FROM record WHERE session = ? ORDER BY id", (session,))
        return [json.loads(row["data"]) for row in rows]

    def append(self, session: str, records: Sequence[dict[str, Any]]) -> None:
        now = int(time.time())
        rows = [(session, now, json.dumps(record)) for record in records]
        self.execute("INSERT INTO record (session, time, data) VALUES (?, ?, ?)", *rows)

    def drop_run(self, session: str) -> None:
        """Remove the records of the newest run."""
        newest = """SELECT max(id) FROM record WHERE session = ?1 AND data LIKE '{"message"%'"""
        self.execute(f"DELETE FROM record WHERE session = ?1 AND id >= ({newest})", (session,))
