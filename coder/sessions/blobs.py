"""What undo keeps in a file of its own: contents of files, except those that git has."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from pathlib import Path

from coder.sessions.database import Database
from coder.sessions.file_states import State
from coder.sessions.git import Git, blob_id

MAX_STORED = 100_000_000  # bytes of a workspace's contents; steps may double it
MAX_WAITING = 2_000_000  # bytes of contents in memory, before they are stored
DAY = 86_400  # seconds
KEPT_DAYS = 30


class BlobStore(Database):
    """What undo keeps of a workspace: contents of files by their git blob ids, and what runs have
    changed.

    One file for each workspace; contents are compressed, and removed KEPT_DAYS after their last
    use. Raises StoreError.
    """

    what = "The file of undo"
    version = 1
    wal = False
    schema = """
    PRAGMA auto_vacuum = full;
    CREATE TABLE IF NOT EXISTS blob (id TEXT PRIMARY KEY, used INTEGER, data BLOB);
    CREATE TABLE IF NOT EXISTS run (id INTEGER PRIMARY KEY, session TEXT, time INTEGER, data TEXT);
    CREATE TABLE IF NOT EXISTS file (path BLOB PRIMARY KEY, state TEXT) WITHOUT ROWID;
    DROP TABLE IF EXISTS look;
    PRAGMA user_version = 1;
    """

    def __init__(self, root: str, data: str, git: Git) -> None:
        name = f"{hashlib.sha256(os.fsencode(root)).hexdigest()}.db"
        super().__init__(Path(data, "snapshots", name))
        self.git = git
        self.in_git: Collection[str] = ()  # contents that git has
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
        """The id of a content, which `flush` will store if git does not have it."""
        blob = blob_id(data)
        with self._lock:
            if blob not in self._waiting_blobs and blob not in self.in_git:
                self._waiting_blobs[blob] = data
                self._waiting_bytes += len(data)
            if self._waiting_bytes > MAX_WAITING:
                self.flush()
        return blob

    def flush(self) -> None:
        """Store what waits."""
        with self._lock:
            waiting = self._waiting_blobs
            self._waiting_blobs = {}
            self._waiting_bytes = 0
            if not waiting:
                return
            now = int(time.time())
            rows = [(blob, now, zlib.compress(data, 1)) for blob, data in waiting.items()]
            update = "ON CONFLICT DO UPDATE SET used = excluded.used"
            self.execute(f"INSERT INTO blob VALUES (?, ?, ?) {update}", *rows)

    def blobs(self, ids: Set[str]) -> dict[str, bytes]:
        """The contents with these ids that are still kept, here or by git."""
        query = "SELECT id, data FROM blob WHERE id IN (SELECT value FROM json_each(?))"
        contents: dict[str, bytes] = {}
        for row in self.rows(query, json.dumps(list(ids))):
            with contextlib.suppress(zlib.error, TypeError):  # damaged
                contents[row["id"]] = zlib.decompress(row["data"])
        return contents | self.git.contents(ids - contents.keys())

    def saved_states(self, in_git: Collection[str]) -> dict[str, State]:
        """The files as earlier processes have read them, if their contents are kept, or
        `in_git`."""
        kept = {row["id"] for row in self.rows("SELECT id FROM blob")}
        states: dict[str, State] = {}
        for row in self.rows("SELECT path, state FROM file"):
            state = State(*json.loads(row["state"]))
            if state.blob in kept or state.blob in in_git:
                path = os.fsdecode(row["path"])
                states[path] = state
        return states

    def save_states(self, states: Mapping[str, State]) -> None:
        """Store what was read, for later processes too."""
        self.flush()
        rows = [(os.fsencode(path), json.dumps(state)) for path, state in states.items()]
        self.execute("INSERT OR REPLACE INTO file VALUES (?, ?)", *rows)

    def forget_states(self, paths: Iterable[str]) -> None:
        rows = [(os.fsencode(path),) for path in paths]
        self.execute("DELETE FROM file WHERE path = ?", *rows)

    def prune(self, used: Collection[str]) -> None:
        """Remove what was not used for KEPT_DAYS, also of other workspaces.

        If there is little room, what was not used for a day.
        """
        now = int(time.time())
        a_day_ago = now - DAY
        oldest = now - KEPT_DAYS * DAY
        [row] = self.rows("SELECT min(used) AS used FROM blob")
        if row["used"] and row["used"] < a_day_ago:
            ids = "id IN (SELECT value FROM json_each(?))"
            self.execute(f"UPDATE blob SET used = ? WHERE {ids}", (now, json.dumps(list(used))))
            is_full = self.stored > 1.5 * MAX_STORED
            oldest_blob = a_day_ago if is_full else oldest
            self.execute("DELETE FROM blob WHERE used < ?", (oldest_blob,))
            self.execute("DELETE FROM run WHERE time < ?", (oldest,))
        for entry in list(os.scandir(self.path.parent)):
            # Another process may have removed it: the journal of a workspace of its own
            with contextlib.suppress(FileNotFoundError):
                if entry.stat().st_mtime < oldest:
                    os.unlink(entry.path)
