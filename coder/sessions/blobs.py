"""Contents of files by their git blob ids, and records of what runs have changed: what undo keeps.

What git has of the files is read there: nothing of the user's repository is written, and none of its
settings, hooks or filters is obeyed, since it is read through an empty repository in the data folder. All else
lies in one private SQLite file for each workspace, compressed, and goes KEPT_DAYS after its last use.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import subprocess
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from coder.sessions.database import Database
from coder.tools.bash import find_program
from coder.tools.secrets import environment
from coder.tools.workspace import git_folders, make_private, read_small_file, repository_top

MAX_STORED = 100_000_000  # bytes of a workspace's contents; steps may double it
MAX_WAITING = 8_000_000  # bytes of contents in memory, before they are stored
MAX_ATTRIBUTES = 1_000_000  # bytes of a .gitattributes
MAX_GIT = 0.9  # seconds of a command, behind which it is killed
KEPT_DAYS = 30
# What may give a file another content of the same size than its blob has
REWRITES = re.compile(rb"filter=|working-tree-encoding=")


def blob_id(data: bytes) -> str:
    """The name that git gives a content."""
    return hashlib.sha1(b"blob %d\0%b" % (len(data), data), usedforsecurity=False).hexdigest()


class Git:
    """What git knows of the files below `root`; nothing where there is no git, or no repository."""

    def __init__(self, root: str, data: str) -> None:
        self.root, self.top = root, repository_top(Path(root))
        self.deadline: Callable[[], float] = lambda: math.inf  # of the look under way
        self._program = find_program("git", root) if os.path.lexists(self.top / ".git") else ""
        self._own = os.path.join(data, "git")

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
        """For the user's index and objects without the settings of any repository or user."""
        make_private(Path(self._own, "refs"))
        head = Path(self._own, "HEAD")
        head.touch(0o600)  # else the umask would decide
        head.write_text("ref: refs/heads/none\n")
        folders = git_folders(self.top)
        places = {"WORK_TREE": self.top, "INDEX_FILE": folders[0] / "index", "DIR": self._own}
        places |= {"OBJECT_DIRECTORY": folders[-1] / "objects", "CONFIG_GLOBAL": os.devnull}
        given = {f"GIT_{name}": str(place) for name, place in places.items()}
        return given | {"GIT_CONFIG_NOSYSTEM": "1", "GIT_NO_LAZY_FETCH": "1"}

    def tracked(self) -> dict[str, tuple[str, bool]]:
        """The tracked files: the blob id of each as it was added, and whether git sees when it changes."""
        found = {}
        for line in (self._run("ls-files -z -v --stage") or b"").split(b"\0")[:-1]:
            facts, _, name = line.partition(b"\t")
            tag, _, blob, stage = facts.decode().split()
            found[os.fsdecode(name)] = blob, (tag, stage) == ("H", "0")
        return found

    def unchanged(self, blobs: Mapping[str, str]) -> dict[str, int]:
        """Which of these tracked files are as they were added, as git knows from their stamps; bytes of their blobs."""
        changed = self._run("ls-files -z -m") if blobs else None
        if changed is None:
            return {}
        names = set(map(os.fsdecode, changed.split(b"\0")))
        given = (f"{blob}\n".encode() for blob in set(blobs.values()))
        output = self._run("cat-file --batch-check=%(objectname)=%(objectsize)", given) or b""
        sizes = dict(line.split("=") for line in output.decode().splitlines() if "=" in line)
        return {
            path: int(sizes[blob])
            for path, blob in blobs.items()
            if path not in names and blob in sizes
        }

    def is_plain(self, attributes: Iterable[str]) -> bool:
        """Has an unchanged file whose blob has its size the content of that, by these .gitattributes and those above?"""
        root = Path(self.root)
        files = [root / path for path in attributes]
        files += [up / ".gitattributes" for up in root.parents if up.is_relative_to(self.top)]
        files.append(git_folders(self.top)[-1] / "info/attributes")
        texts = (read_small_file(file, MAX_ATTRIBUTES) or b"" for file in files)
        return not any(map(REWRITES.search, texts))

    def ignored(self, paths: Iterable[str]) -> set[str] | None:
        """What the user's git ignores of these paths; None: unknown."""
        given = (b"./%b\0" % os.fsencode(path) for path in paths)
        output = self._run("check-ignore --no-index -z --stdin", given, apart=False)
        if output is None:
            return None
        return {os.fsdecode(name[2:]) for name in output.split(b"\0")[:-1]}

    def contents(self, blobs: Iterable[str]) -> dict[str, bytes]:
        """Those of these blobs that git has."""
        given = (f"{blob}\n".encode() for blob in blobs)
        output, at = self._run("cat-file --batch", given, wait=True) or b"", 0
        found = {}
        while at < len(output):
            end = output.index(b"\n", at)
            header, at = output[at:end].split(), end + 1
            if len(header) == 3:  # else it is missing
                content = output[at : at + int(header[2])]
                found[blob_id(content)] = content
                at += len(content) + 1
        return found


class BlobStore(Database):
    """Contents of files, and records of what runs have changed. Raises StoreError."""

    what, wal = "The file of undo", False
    schema = """
    PRAGMA auto_vacuum = full;
    CREATE TABLE IF NOT EXISTS blob (id TEXT PRIMARY KEY, used INTEGER, data BLOB);
    CREATE TABLE IF NOT EXISTS run (id INTEGER PRIMARY KEY, session TEXT, time INTEGER, data TEXT);
    CREATE TABLE IF NOT EXISTS look (id INTEGER PRIMARY KEY, data TEXT);
    """

    def __init__(self, root: str, data: str) -> None:
        name = f"{hashlib.sha256(os.fsencode(root)).hexdigest()}.db"
        super().__init__(Path(data, "snapshots", name))
        self.git = Git(root, data)
        self.elsewhere: Collection[str] = ()  # ids of contents that git has
        self._waiting: dict[str, bytes] = {}
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
        if name not in self._waiting and name not in self.elsewhere:
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
            known = "ON CONFLICT DO UPDATE SET used = excluded.used"
            self.execute(f"INSERT INTO blob VALUES (?, ?, ?) {known}", *rows)

    def blobs(self, names: Set[str]) -> dict[str, bytes]:
        """The contents with these ids that are still kept, by us or by git."""
        found = {}
        for name in names:
            for row in self.rows("SELECT data FROM blob WHERE id = ?", name):
                found[name] = zlib.decompress(row["data"])
        if missing := names - found.keys():
            found |= self.git.contents(missing)
        return found

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

    # ---- what the runs of a session have changed

    def runs(self, session: str) -> list[list[Any]]:
        """Data and row of each, in their order."""
        rows = self.rows("SELECT id, data FROM run WHERE session = ? ORDER BY id", session)
        return [[*json.loads(row["data"]), row["id"]] for row in rows]

    def save_run(self, session: str, row: int, data: Sequence[Any]) -> int:
        """Write a run, over its row where it has one; the row."""
        values = row or None, session, int(time.time()), json.dumps(data)
        with self.transaction() as db:
            insert = "INSERT OR REPLACE INTO run VALUES (?, ?, ?, ?)"
            return db.execute(insert, values).lastrowid or 0

    def drop_run(self, row: int) -> None:
        self.execute("DELETE FROM run WHERE id = ?", (row,))
