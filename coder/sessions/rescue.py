"""Rescue: the rows of a damaged SQLite file, as far as they can be read, in a new one."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)  # what SQLite says of such a file
MAX_SKIPPED = 1000  # rows that cannot be read, one by one; after them, more and more at a time


def decoded(data: bytes) -> str:
    """A text of a row: bytes that are none would be an error for all rows."""
    return data.decode("utf-8", "replace")


def take_over(
    damaged: Path,
    fresh: Path,
    schema: str,
    completion: str,
) -> int:
    """Fill a new file, whose tables `schema` makes; `completion` is run at the end. Returns the
    number of rows.

    The damaged file is only read. Raises sqlite3.Error.
    """
    with (
        contextlib.closing(sqlite3.connect(fresh, isolation_level=None)) as new,
        contextlib.closing(sqlite3.connect(f"{damaged.as_uri()}?mode=ro", uri=True)) as old,
    ):
        old.text_factory = decoded
        new.executescript(schema)
        empty = new.total_changes
        new.execute("BEGIN")
        tables = new.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
        for [table] in tables:
            names = [f'"{column[1]}"' for column in new.execute(f"PRAGMA table_info({table})")]
            marks = ", ".join("?" * len(names))
            rows = _readable_rows(old, table, ", ".join(names))
            new.executemany(f"INSERT OR IGNORE INTO {table} VALUES ({marks})", rows)
        new.execute("COMMIT")
        new.executescript(completion)
        return new.total_changes - empty


def _readable_rows(db: sqlite3.Connection, table: str, columns: str) -> Iterator[Sequence[Any]]:
    """The rows of a table, but for those that cannot be read."""
    last = 0  # row ids begin at 1
    skipped = 0
    query = f"SELECT rowid, {columns} FROM {table} WHERE rowid > ? ORDER BY rowid"
    while last < 1 << 60:
        try:
            # Else a file that is shorter than its first page says is not read at all
            db.execute("PRAGMA writable_schema = ON")
            for row in db.execute(query, (last,)):
                last = row[0]
                skipped = 0
                yield row[1:]
            return
        except sqlite3.DatabaseError as error:
            code = error.sqlite_errorcode & 0xFF
            if code not in (*DAMAGED, sqlite3.SQLITE_ERROR):  # the latter: there is no such table
                raise
            skipped += 1
            last += 2 ** max(0, skipped - MAX_SKIPPED)
