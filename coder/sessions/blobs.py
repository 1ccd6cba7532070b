"""What undo keeps in a file of its own: contents of files, except those that git has."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from pathlib import Path

from coder.sessions.database import Database
from coder.sessions.file_states import State
from coder.sessions.git import Git, blob_id

MAX_STORED = 100_000_000  # bytes of a workspace's contents; steps may double it
MAX_WAITING = 2_000_000  # bytes of contents in memory, before they are stored
PACK = 250_000  # bytes that are compressed at once: for each small file that would take longer
DAY = 86_400  # seconds
KEPT_DAYS = 30
# The ids of the contents in a pack; a damaged row has none
IDS = "json_each(CASE WHEN json_valid(places) THEN places ELSE '{}' END)"
# Does a pack have one of these contents?
HAS_ONE = f"EXISTS (SELECT 1 FROM {IDS} WHERE key IN (SELECT value FROM json_each(?)))"

Places = dict[str, tuple[int, int]]  # where contents start and end in a pack, by their ids

Seen = dict[str, State]  # files of one folder, by their paths


class BlobStore(Database):
    """What undo keeps of a workspace: contents of files by their git blob ids, and what runs have
    changed.

    One file for each workspace. Contents are compressed in packs, with the `places` at which each
    starts and ends; a pack is removed KEPT_DAYS after the last use of one of them. Raises
    StoreError.
    """

    what = "The file of undo"
    version = 2
    wal = False
    schema = """
    PRAGMA auto_vacuum = full;
    BEGIN IMMEDIATE;
    CREATE TABLE IF NOT EXISTS pack (id INTEGER PRIMARY KEY, used INTEGER, places TEXT, data BLOB);
    CREATE TABLE IF NOT EXISTS run (id INTEGER PRIMARY KEY, session TEXT, time INTEGER, data TEXT);
    CREATE TABLE IF NOT EXISTS seen (folder BLOB PRIMARY KEY, states TEXT) WITHOUT ROWID;
    -- Version 1 kept each content by itself
    CREATE TABLE IF NOT EXISTS blob (id TEXT PRIMARY KEY, used INTEGER, data BLOB);
    INSERT INTO pack (used, places, data) SELECT used, json_object(id, json_array(0, NULL)), data FROM blob;
    DROP TABLE blob;
    DROP TABLE IF EXISTS file;
    PRAGMA user_version = 2;
    COMMIT;
    """

    def __init__(self, root: str, data: str, git: Git) -> None:
        name = f"{hashlib.sha256(os.fsencode(root)).hexdigest()}.db"
        super().__init__(Path(data, "snapshots", name))
        self.git = git
        self.in_git: Collection[str] = ()  # contents that git has
        self.kept: set[str] = set()  # contents that need not be stored again
        [row] = self.rows("SELECT coalesce(max(id), 0) AS id FROM pack")
        self._newest_pack: int = row["id"]  # of those that were looked at
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
            is_kept = blob in self.kept or blob in self.in_git
            if not is_kept and blob not in self._waiting_blobs:
                self._waiting_blobs[blob] = data
                self._waiting_bytes += len(data)
            if self._waiting_bytes > MAX_WAITING:
                self.flush()
        return blob

    def flush(self) -> None:
        """Store what waits, but no pack that another process has stored meanwhile: two may read the
        same files at once."""
        with self._lock:
            waiting = self._waiting_blobs
            self._waiting_blobs = {}
            self._waiting_bytes = 0
            if not waiting:
                return
            now = int(time.time())
            packs = [(places, zlib.compress(data, 1)) for places, data in _packs(waiting)]
            with self.transaction() as db:
                new = f"SELECT pack.id AS pack, key FROM pack, {IDS} WHERE pack.id > ?"
                for row in db.execute(new, (self._newest_pack,)).fetchall():
                    self.kept.add(row["key"])
                    self._newest_pack = max(self._newest_pack, row["pack"])
                for places, data in packs:
                    if not self.kept.issuperset(places):
                        values = (now, json.dumps(places), data)
                        insert = "INSERT INTO pack (used, places, data) VALUES (?, ?, ?)"
                        db.execute(insert, values)
            self.kept.update(waiting)

    def blobs(self, ids: Set[str]) -> dict[str, bytes]:
        """The contents with these ids that are still kept, here or by git."""
        contents: dict[str, bytes] = {}
        query = f"SELECT places, data FROM pack WHERE {HAS_ONE}"
        for row in self.rows(query, json.dumps(list(ids))):
            places = json.loads(row["places"])
            with contextlib.suppress(zlib.error, TypeError):  # damaged
                data = zlib.decompress(row["data"])
                for blob in ids & places.keys():
                    start, end = places[blob]
                    contents[blob] = data[start:end]
        return contents | self.git.contents(ids - contents.keys())

    def saved_states(self) -> dict[str, Seen]:
        """The files of each folder as earlier processes have read them, if their contents are
        kept, or git has them."""
        self.kept = {row["key"] for row in self.rows(f"SELECT key FROM pack, {IDS}")}
        saved: dict[str, Seen] = {}
        for row in self.rows("SELECT folder, states FROM seen"):
            states: Seen = {}
            with contextlib.suppress(ValueError):  # damaged
                for path, facts in json.loads(row["states"]).items():
                    state = State(*facts)
                    if state.blob in self.kept or state.blob in self.in_git:
                        states[path] = state
            folder = os.fsdecode(row["folder"])
            saved[folder] = states
        return saved

    def save_states(self, folders: Mapping[str, Seen]) -> None:
        """Store what is known of the files of these folders, for later processes too."""
        self.flush()
        rows = [(os.fsencode(folder), json.dumps(states)) for folder, states in folders.items()]
        self.execute("INSERT OR REPLACE INTO seen VALUES (?, ?)", *rows)

    def prune(self, used: Collection[str]) -> None:
        """Remove what was not used for KEPT_DAYS, also of other workspaces.

        If there is little room, what was not used for a day.
        """
        self.kept = set(used)  # of others the time of their last use may be long ago
        now = int(time.time())
        a_day_ago = now - DAY
        oldest = now - KEPT_DAYS * DAY
        [row] = self.rows("SELECT min(used) AS used FROM pack")
        if row["used"] and row["used"] < a_day_ago:
            update = f"UPDATE pack SET used = ? WHERE {HAS_ONE}"
            self.execute(update, (now, json.dumps(list(used))))
            is_full = self.stored > 1.5 * MAX_STORED
            oldest_pack = a_day_ago if is_full else oldest
            self.execute("DELETE FROM pack WHERE used < ?", (oldest_pack,))
            self.execute("DELETE FROM seen WHERE states = '{}'", ())
            self.execute("DELETE FROM run WHERE time < ?", (oldest,))
        for entry in list(os.scandir(self.path.parent)):
            # Another process may have removed it: the journal of a workspace of its own
            with contextlib.suppress(FileNotFoundError):
                if entry.stat().st_mtime < oldest:
                    os.unlink(entry.path)


def _packs(contents: Mapping[str, bytes]) -> Iterator[tuple[Places, bytearray]]:
    """The contents, some at a time: where each starts and ends, and all of them."""
    places: Places = {}
    data = bytearray()
    for blob, content in contents.items():
        start = len(data)
        data += content
        places[blob] = start, len(data)
        if len(data) > PACK:
            yield places, data
            places = {}
            data = bytearray()
    if places:
        yield places, data
