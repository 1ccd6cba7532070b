"""Blobs of a workspace, kept for undo: the contents of its files as they were; and what git ignores.

A blob is known by the id that git gives it. What the user's own repository holds is not copied: it
is read from there, and checked against its id. All else lies compressed in one SQLite file for each
workspace in the data folder, and goes KEPT_DAYS after it was last needed.

Git runs with an empty repository of ours, so that no configuration, filter, hook or monitor of a
workspace is read or run, and nothing of the user's git is written. Of the user's own configuration
only ~/.config/git/ignore counts. Without git, the folders that tools make are ignored.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import sqlite3
import subprocess
import time
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coder.tools.process import environment
from coder.tools.workspace import escaped, git_folders, read_small_file, repository_top
from coder.types import CoderError

KEPT_DAYS = 30
MAX_STORED = 100_000_000  # bytes of a workspace's blobs; steps may double it
MAX_WAITING = 8_000_000  # bytes of blobs in memory, before they are stored
MAX_PATHS = 500  # that git is asked about one by one
GIT_SECONDS = 2.0  # that a look waits for git: an ignore file may be a FIFO
READ_SECONDS = 60.0  # that reading blobs from git may take
TOOL_FOLDERS = {"node_modules", "__pycache__", "venv", ".venv", ".tox", ".mypy_cache", ".cache"}
SCHEMA = """
CREATE TABLE IF NOT EXISTS blob (id TEXT PRIMARY KEY, used INTEGER, data BLOB);
CREATE TABLE IF NOT EXISTS file
    (path BLOB PRIMARY KEY, mode INTEGER, id TEXT, stamp INTEGER) WITHOUT ROWID;
"""


class SnapshotError(CoderError):
    """A snapshot could not be taken or read; the text is for the user."""


def blob_id(data: bytes) -> str:
    """The id that git gives a blob."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


class SnapshotRepo:
    """The blobs of one workspace. Methods raise SnapshotError, sqlite3.Error and OSError."""

    def __init__(self, workspace: Path, data: Path) -> None:
        self.root = os.path.realpath(workspace)
        self.data = os.path.realpath(data)
        self.folder = os.path.join(self.data, "snapshots")
        self._name = os.path.join(self.folder, blob_id(os.fsencode(self.root)))
        self._db: sqlite3.Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: dict[str, bytes] = {}
        self._waiting_bytes = 0

    @property
    def db(self) -> sqlite3.Connection:
        """The database, opened when it is first needed."""
        if self._db is None:
            self._make_folder()
            path = f"{self._name}.db"
            os.close(os.open(path, os.O_CREAT | os.O_CLOEXEC, 0o600))
            db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            if not os.path.getsize(path):  # it writes, even where it is set
                db.execute("PRAGMA auto_vacuum = full")
            db.executescript("PRAGMA synchronous = off;" + SCHEMA)
            os.utime(path)  # in use
            self._db = db
        return self._db

    def _make_folder(self) -> None:
        Path(self.folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(self.folder, 0o700)
        for part in ("git", "git/objects", "git/refs"):
            Path(self.folder, part).mkdir(mode=0o700, exist_ok=True)
        _write_private(os.path.join(self.folder, "git", "HEAD"), b"ref: refs/heads/none\n")
        self._program = _find_git(self.root)
        self.passed_over = {".git"} if self._program else {".git", *TOOL_FOLDERS}
        self._top = str(repository_top(Path(self.root)))
        config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
        rules = [f"{config}/git/ignore", f"{self._top}/.git/info/exclude"]
        texts = [read_small_file(os.path.realpath(rule), 1_000_000) or b"" for rule in rules]
        _write_private(f"{self._name}.rules", b"\n".join(texts))

    def stop(self) -> None:
        """End a git that another thread waits for."""
        if process := self._process:
            process.kill()

    def remove(self) -> None:
        """Remove a database that is damaged; the next process begins anew."""
        Path(f"{self._name}.db").unlink(missing_ok=True)

    def prune(self) -> None:
        """Remove what was not needed for KEPT_DAYS: blobs, and all of other workspaces.

        Where there is little room left, blobs go after a day.
        """
        old = int(time.time()) - KEPT_DAYS * 86_400
        crowded = self.stored > 1.5 * MAX_STORED
        unused = "SELECT id FROM blob WHERE used < ? AND id NOT IN (SELECT id FROM file)"
        rows = self.db.execute(unused, (int(time.time()) - 86_400 if crowded else old,)).fetchall()
        self._write(("DELETE FROM blob WHERE id = ?", rows))
        for entry in list(os.scandir(self.folder)):
            if entry.name != "git" and entry.stat(follow_symlinks=False).st_mtime < old:
                shutil.rmtree(entry.path, ignore_errors=True)
                Path(entry.path).unlink(missing_ok=True)

    # ---- blobs

    @property
    def stored(self) -> int:
        """Bytes on disk, or about to be."""
        return os.path.getsize(f"{self._name}.db") + self._waiting_bytes

    def add(self, data: bytes) -> str:
        """The id of a blob that `flush` will store."""
        name = blob_id(data)
        if name not in self._waiting:
            self._waiting[name] = data
            self._waiting_bytes += len(data)
        return name

    def flush(self, ask_git: bool = False, above: int = 0) -> None:
        """Store the blobs that wait, where they have at least so many bytes.

        `ask_git`: leave out those that the user's git has.
        """
        if not self._waiting or self._waiting_bytes < above:
            return
        waiting, self._waiting, self._waiting_bytes = self._waiting, {}, 0
        names = self._missing_in_git(waiting) if ask_git else waiting
        store = "INSERT INTO blob VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET used = excluded.used"
        now = int(time.time())
        self._write((store, [(name, now, zlib.compress(waiting[name], 1)) for name in names]))

    def blobs(self, names: Collection[str]) -> dict[str, bytes]:
        """The blobs with these ids. Raises SnapshotError where one is no longer kept."""
        select = "SELECT data FROM blob WHERE id = ?"
        rows = {name: self.db.execute(select, (name,)).fetchone() for name in names}
        found = {name: zlib.decompress(row[0]) for name, row in rows.items() if row}
        found |= self._ask_git([name for name in rows if name not in found], data=True)
        if any(name not in found or blob_id(found[name]) != name for name in rows):
            raise SnapshotError("the snapshots are no longer kept")
        return found

    # ---- files as they were at the last look: what has the same stamp is not read again

    def load_files(self) -> dict[str, tuple[int, str, int]]:
        """Path -> mode, blob id, stamp; of those whose blob is kept, or that were left out ("")."""
        columns = "path, mode, file.id, stamp, blob.id"
        select = f"SELECT {columns} FROM file LEFT JOIN blob ON blob.id = file.id"
        rows = self.db.execute(select).fetchall()
        gone = self._missing_in_git({row[2] for row in rows if row[2] and not row[4]})
        return {os.fsdecode(row[0]): row[1:4] for row in rows if row[2] not in gone}

    def save_files(self, files: Mapping[str, Sequence[object]], gone: Iterable[str]) -> None:
        """Set these files and remove those that are gone. Blobs of both count as used until now."""
        changed = [(os.fsencode(path),) for path in (*files, *gone)]
        use = f"UPDATE blob SET used = {time.time():.0f} WHERE id IN (SELECT id FROM file WHERE path = ?)"
        rows = [(os.fsencode(path), *row) for path, row in files.items()]
        delete, insert = "DELETE FROM file WHERE path = ?", "INSERT INTO file VALUES (?, ?, ?, ?)"
        self._write((use, changed), (delete, changed), (insert, rows))

    def _write(self, *statements: tuple[str, Sequence[Sequence[object]]]) -> None:
        if not any(rows for _, rows in statements):
            return
        self.db.execute("BEGIN IMMEDIATE")
        with self.db:  # commits, or rolls back
            for statement, rows in statements:
                self.db.executemany(statement, rows)

    # ---- git

    def ignored(self, paths: Sequence[str] = ()) -> set[str]:
        """What git ignores of these paths, or of all: files, and folders as a whole."""
        if not (self.db and self._program):
            return {path for path in paths if os.path.basename(path) in self.passed_over}
        asked = [path or "." for path in paths] if 0 < len(paths) <= MAX_PATHS else ["."]
        options = ["--porcelain", "-z", "--ignored=matching", "-unormal", "--"]
        lines = self._run_git("status", *options, *asked, seconds=GIT_SECONDS).split(b"\0")
        found = {os.fsdecode(line[3:]) for line in lines if line.startswith(b"!! ")}
        inner = os.path.relpath(self.root, self._top)
        prefix = "" if inner == "." else f"{inner}/"
        if any(prefix.startswith(path) for path in found if path.endswith("/")):
            self._top = self.root  # ignored as a whole: who works in such a folder wants to
            return self.ignored(paths)
        return {path.removeprefix(prefix).rstrip("/") for path in found}

    def _missing_in_git(self, names: Collection[str]) -> set[str]:
        return set(names) - self._ask_git(names).keys()

    def _ask_git(self, names: Collection[str], data: bool = False) -> dict[str, bytes]:
        """Those of the blobs that the user's git has; their data only where it is asked for."""
        if not names or not self._object_folder():
            return {}
        given = "".join(f"{name}\n" for name in names).encode()
        option = "--batch" if data else "--batch-check"
        answer = io.BytesIO(self._run_git("cat-file", option, given=given))
        found = {}
        for line in answer:
            name, *facts = line.decode().split()
            if len(facts) == 2:  # type and size; else "missing"
                found[name] = answer.read(int(facts[1]) + 1)[:-1] if data else b""
        return found

    def _object_folder(self) -> str:
        """The objects of the user's repository, also of one with several working trees; or ""."""
        place = str(git_folders(Path(self._top))[-1] / "objects")
        return place if self._program and os.path.isdir(place) and ":" not in place else ""

    def _run_git(self, *argv: str, given: bytes = b"", seconds: float = READ_SECONDS) -> bytes:
        """What git prints. Raises SnapshotError where it fails or takes longer."""
        options = ["--literal-pathspecs", "-c", "core.fsmonitor=false"]
        options += ["-c", f"core.excludesFile={self._name}.rules"]
        env = {name: value for name, value in environment().items() if name[:4] != "GIT_"}
        env |= {
            "GIT_DIR": os.path.join(self.folder, "git"),
            "GIT_WORK_TREE": self._top,
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": self._object_folder(),
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_OPTIONAL_LOCKS": "0",
            "LC_ALL": "C",
        }
        pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = [self._program, *options, *argv]
        with subprocess.Popen(
            command, cwd=self.root, env=env, start_new_session=True, **pipes
        ) as self._process:
            try:
                answer, error = self._process.communicate(given, seconds)
            except subprocess.TimeoutExpired:
                raise SnapshotError("git takes too long in this folder") from None
            finally:
                self._process.kill()
        if self._process.returncode:
            line = error.decode("utf-8", "replace").strip().partition("\n")[0]
            raise SnapshotError(f"git failed: {escaped(line)[:300]}")
        return bytes(answer)


def _find_git(workspace: str) -> str:
    """git, unless the workspace holds it; "" where there is none."""
    for place in environment().get("PATH", os.defpath).split(os.pathsep):
        found = shutil.which("git", path=place)
        paths = [Path(found), Path(os.path.realpath(found))] if found else []
        if found and not any(path.is_relative_to(workspace) for path in paths):
            return found
    return ""


def _write_private(path: str, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "wb") as file:
        file.write(data)
