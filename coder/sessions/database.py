"""Private SQLite files, and what undo keeps in one of them: contents of files, beside those that git has.

A file and its folder are for their owner alone (0600, 0700). In WAL mode a kill costs what was not committed, and
readers do not wait for the writer. Of the user's git nothing is written, and none of its settings is obeyed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sqlite3
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Self

from coder.tools.secrets import environment
from coder.tools.workspace import git_folders, make_private, read_small_file, repository_top
from coder.types import CoderError

MEMORY = ":memory:"
BUSY = 2.0  # seconds to wait for another process that writes
MAX_STORED = 100_000_000  # bytes of a workspace's contents; steps may double it
MAX_WAITING = 8_000_000  # bytes of contents in memory, before they are stored
MAX_ATTRIBUTES = 1_000_000  # bytes of a .gitattributes
MAX_GIT = 0.9  # seconds of a command, behind which it is killed
KEPT_DAYS = 30
# What may give a file another content of the same size than its blob has
REWRITES = re.compile(rb"filter=|working-tree-encoding=")


class StoreError(CoderError):
    """The file cannot be read or written; the text is one line for the user."""


class DamageError(StoreError):
    """The file is damaged; behind this error a new one has been begun."""


class Database:
    """A connection, usable from any thread; `path` ":memory:" keeps everything in memory. Raises StoreError.

    `notice` is "", or one line for the user: the file was damaged. `generation` counts the files that were opened.
    """

    what = "The file"  # it is, for the user
    application, version = 0, 0  # application_id and user_version, which mark it as this program's
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
        begun = f"{self.what} was damaged; a new one was begun."
        self.notice = f"{begun} The damaged file is kept as {aside}."
        with self._explain_errors():
            if self.path.stat().st_ino == self._inode:
                for suffix in ("-wal", "-shm", ""):
                    with contextlib.suppress(FileNotFoundError):
                        os.replace(f"{self.path}{suffix}", f"{aside}{suffix}")
        self._open()

    @contextlib.contextmanager
    def _explain_errors(self) -> Iterator[None]:
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
            raise StoreError(f"{self.what} {self.path}: {error.strerror or error}.") from None


def blob_id(data: bytes) -> str:
    """The name that git gives a content."""
    return hashlib.sha1(b"blob %d\0%b" % (len(data), data), usedforsecurity=False).hexdigest()


class Git:
    """What git knows of the files below `root`; nothing where there is no git, or no repository."""

    def __init__(self, root: str, data: str, deadline: Callable[[], float]) -> None:
        from coder.tools.bash import find_program  # late: what lists conversations needs no tools

        self.root, self.top, self.deadline = root, repository_top(Path(root)), deadline
        self._program = find_program("git", root) if os.path.lexists(self.top / ".git") else ""
        self._git_folder = Path(data, "git")
        self.tracked: dict[str, str] = {}  # blob ids of files, or "": not seen when it changes
        self.blobs: set[str] = set()

    def _run(
        self, command: str, lines: Iterable[bytes] = (), *, apart: bool = True, wait: bool = False
    ) -> bytes | None:
        """What git prints; None where it fails, or would have to `wait`. `apart`: see _variables."""
        if not self._program:
            return None
        own = {name: value for name, value in environment().items() if name[:4] != "GIT_"}
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                [self._program, "-c", "core.fsmonitor=false", *command.split()], cwd=self.root,
                env=own | (self._variables() if apart else {}), input=b"".join(lines),
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                timeout=None if wait else min(MAX_GIT, self.deadline() - time.monotonic()),
            )  # fmt: skip
            return done.stdout if done.returncode in (0, 1) else None
        return None

    def _variables(self) -> dict[str, str]:
        """For the user's index and objects, read through a repository of this program, without the settings of any other."""
        make_private(self._git_folder / "refs")
        (self._git_folder / "HEAD").touch(0o600)  # else the umask would decide
        (self._git_folder / "HEAD").write_text("ref: refs/heads/none\n")
        folders = git_folders(self.top)
        places = {
            "DIR": self._git_folder,
            "WORK_TREE": self.top,
            "INDEX_FILE": folders[0] / "index",
        }
        places |= {"OBJECT_DIRECTORY": folders[-1] / "objects", "CONFIG_GLOBAL": Path(os.devnull)}
        given = {f"GIT_{name}": str(place) for name, place in places.items()}
        return given | {"GIT_CONFIG_NOSYSTEM": "1", "GIT_NO_LAZY_FETCH": "1"}

    def read_index(self) -> None:
        """Find the tracked files, and the blobs that they were added as."""
        self.tracked, self.blobs = {}, set()
        for line in (self._run("ls-files -z -v --stage") or b"").split(b"\0")[:-1]:
            facts, _, name = line.partition(b"\t")
            tag, _, blob, stage = facts.decode().split()
            self.tracked[os.fsdecode(name)] = blob if (tag, stage) == ("H", "0") else ""
            self.blobs.add(blob)

    def unchanged(self, files: Mapping[str, int], rules: Iterable[str]) -> dict[str, str]:
        """Blob ids of those of these files (with their sizes) that have the content of their blobs, as git knows from
        their stamps, and no .gitattributes (`rules`, and those above) rewrites."""
        root = Path(self.root)
        places = [root / path for path in rules]
        places += [up / ".gitattributes" for up in root.parents if up.is_relative_to(self.top)]
        places.append(git_folders(self.top)[-1] / "info/attributes")
        texts = (read_small_file(place, MAX_ATTRIBUTES) or b"" for place in places)
        seen = {path: blob for path in files if (blob := self.tracked.get(path))}
        is_plain = seen and not any(map(REWRITES.search, texts))
        changed = self._run("ls-files -z -m") if is_plain else None
        if changed is None:
            return {}
        names = set(map(os.fsdecode, changed.split(b"\0")))
        given = {f"{blob}\n".encode() for blob in seen.values()}
        output = self._run("cat-file --batch-check=%(objectname)=%(objectsize)", given) or b""
        sizes = set(output.decode().splitlines())
        same = {path: blob for path, blob in seen.items() if f"{blob}={files[path]}" in sizes}
        return {path: blob for path, blob in same.items() if path not in names}

    def ignored(self, paths: Iterable[str]) -> set[str] | None:
        """What the user's git ignores of these paths; None: unknown."""
        given = (b"./%b\0" % os.fsencode(path) for path in paths)
        output = self._run("check-ignore --no-index -z --stdin", given, apart=False)
        if output is None:
            return None
        return {os.fsdecode(name[2:]) for name in output.split(b"\0")[:-1]}

    def contents(self, blobs: Iterable[str]) -> dict[str, bytes]:
        """Those of these blobs that git has."""
        given = [f"{blob}\n".encode() for blob in blobs]
        output = (self._run("cat-file --batch", given, wait=True) if given else b"") or b""
        found, at = {}, 0
        while at < len(output):
            end = output.index(b"\n", at)
            header, at = output[at:end].split(), end + 1
            if len(header) == 3:  # else it is missing
                content = output[at : at + int(header[2])]
                found[blob_id(content)] = content
                at += len(content) + 1
        return found


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
        found = {row["id"]: zlib.decompress(row["data"]) for row in rows}
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
            if entry.stat(follow_symlinks=False).st_mtime < old:
                Path(entry.path).unlink(missing_ok=True)
