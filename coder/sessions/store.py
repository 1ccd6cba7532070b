"""Store: what is known of each session, and finding one again.

    store, notice = open_store(data / "sessions.db")
    session_id = store.create(directory=str(cwd), model="gpt-5")

Ids are short, sort by time and are words of small letters and digits. One that a person gives is only ever compared with those
in the table.
"""

from __future__ import annotations

import re
import secrets
import sqlite3
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from coder.history import now
from coder.providers.text import mend
from coder.sessions.claim import Claim
from coder.sessions.database import MEMORY, Database, StoreError
from coder.types import Usage

__all__ = ["MEMORY", "Found", "SessionInfo", "Store", "StoreError", "Todo", "open_store"]

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
ID = re.compile("[0-9a-z]{1,32}")
FOUND = 1000  # texts that a search looks at, the newest
MOST = 1 << 46  # milliseconds until the year 4199, tokens
AROUND = 40  # characters of a snippet on either side


@dataclass(frozen=True, slots=True)
class Todo:
    text: str
    status: str


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session as a list shows it. Times are milliseconds since the epoch; `parent` is the session it was forked from, or whose
    sub-agent it belongs to; `first` is the beginning of what its user said first; `messages` counts those that are sent."""

    id: str
    title: str
    directory: str
    agent: str
    model: str
    parent: str | None
    forked: bool
    created: int
    updated: int
    usage: Usage = field(default_factory=Usage)
    messages: int = 0
    first: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """A session that a search found, and the words around the newest hit."""

    session: SessionInfo
    snippet: str


USAGE = ("input", "output", "cached", "reasoning", "estimated", "cost")
INFO = """SELECT session.*, (SELECT count(*) FROM message WHERE message.session = session.id AND active) AS messages,
  (SELECT substr(part.text, 1, 200) FROM message JOIN part ON part.message = message.id
   WHERE message.session = session.id AND message.role = 'user' AND part.type = 'text' ORDER BY message.position LIMIT 1) AS first
  FROM session """
OWN = "(parent IS NULL OR forked) AND EXISTS (SELECT 1 FROM message WHERE message.session = session.id AND active)"


class Store(Database):
    """The sessions of a person. Raises StoreError, also from every method."""

    # -- making and changing

    def create(
        self,
        directory: str,
        *,
        agent: str = "",
        model: str = "",
        parent: str | None = None,
        title: str = "",
        session_id: str = "",
    ) -> str:
        """A new session; its id, which may be given. It shows up in lists when it has a message."""
        session_id, time = session_id or _new_id(), now()
        with self.transaction() as db:
            db.execute(
                "INSERT INTO session (id, title, directory, agent, model, parent, created, updated) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    session_id,
                    mend(title),
                    folder_name(directory),
                    mend(agent),
                    mend(model),
                    parent,
                    time,
                    time,
                ),
            )
        return session_id

    def fork(self, session_id: str) -> str:
        """A copy of a session to go on with, without what it has cost; its id."""
        new, time = _new_id(), now()
        with self.transaction() as db:
            made = db.execute(
                """INSERT INTO session (id, title, directory, agent, model, parent, forked, created, updated)
                SELECT ?, title, directory, agent, model, id, 1, ?, ? FROM session WHERE id = ?""",
                (new, time, time, session_id),
            )
            if not made.rowcount:
                raise StoreError(f"There is no session {_shown(session_id)}.")
            columns = "position, active, role, finish, error, tokens, completed, data"
            db.execute(
                f"INSERT INTO message (session, {columns}) SELECT ?, {columns} FROM message WHERE session = ? ORDER BY position",
                (new, session_id),
            )
            db.execute(
                """INSERT INTO part (session, message, type, call_id, state, title, start, "end", text, data)
                SELECT ?1, copy.id, type, call_id, state, title, start, "end", text, part.data FROM part
                LEFT JOIN message AS old ON old.id = part.message
                LEFT JOIN message AS copy ON copy.session = ?1 AND copy.position = old.position
                WHERE part.session = ?2 ORDER BY part.id""",
                (new, session_id),
            )
            db.execute(
                "INSERT INTO todo SELECT ?, position, text, status FROM todo WHERE session = ?",
                (new, session_id),
            )
        return new

    def rename(self, session_id: str, title: str) -> None:
        self._set(session_id, title=" ".join(mend(title).split()))

    def touch(self, session_id: str) -> None:
        """Something was done in it now."""
        self._set(session_id, updated=now())

    def set_model(self, session_id: str, model: str, agent: str = "") -> None:
        self._set(session_id, model=mend(model), agent=mend(agent))

    def _set(self, session_id: str, **values: Any) -> None:
        with self.transaction() as db:
            names = ", ".join(f"{name} = ?" for name in values)
            db.execute(f"UPDATE session SET {names} WHERE id = ?", (*values.values(), session_id))

    def add_usage(self, session_id: str, usage: Usage) -> None:
        """To what the session has used so far; the Recorder does it for the runs that it sees."""
        with self.transaction() as db:
            add_usage(db, session_id, usage)

    def remove(self, session_id: str) -> None:
        """Remove a session and those of its sub-agents; what was forked from it stays. Raises StoreError where one is open."""
        family = [
            row["id"]
            for row in self.rows(
                """WITH RECURSIVE family(id) AS (SELECT id FROM session WHERE id = ? UNION
            SELECT session.id FROM session JOIN family ON parent = family.id WHERE NOT forked) SELECT id FROM family""",
                session_id,
            )
        ]
        claims: list[Claim] = []
        try:
            for each in family:
                claims.append(Claim(self.path, each))
            with self.transaction() as db:
                db.executemany("DELETE FROM session WHERE id = ?", [(each,) for each in family])
        finally:
            for claim in claims:
                claim.release()

    def discard_empty(self, session_id: str) -> None:
        """Remove a session in which nothing was said."""
        with self.transaction() as db:
            db.execute(
                "DELETE FROM session WHERE id = ? AND NOT EXISTS (SELECT 1 FROM message WHERE session = session.id)",
                (session_id,),
            )

    # -- finding

    def sessions(self, directory: str | None = None, limit: int = 1000) -> list[SessionInfo]:
        """Those with messages, of a folder or all, the newest first; without those of sub-agents."""
        where, values = (
            (f"{OWN} AND directory = ?", [folder_name(directory)])
            if directory is not None
            else (OWN, [])
        )
        return [
            _info(row)
            for row in self.rows(
                f"{INFO} WHERE {where} ORDER BY updated DESC, id DESC LIMIT {limit:d}", *values
            )
        ]

    def latest(self, directory: str) -> SessionInfo | None:
        """The one to continue in a folder."""
        return next(iter(self.sessions(directory, 1)), None)

    def get(self, session_id: str) -> SessionInfo:
        found = self.rows(f"{INFO} WHERE id = ?", session_id)
        if not found:
            raise StoreError(f"There is no session {_shown(session_id)}.")
        return _info(found[0])

    def find(self, given: str) -> SessionInfo:
        """The session that a person means by an id or the beginning of one."""
        given = given.strip().lower()
        if not ID.fullmatch(given):
            raise StoreError(
                f"There is no session {_shown(given)}: an id is a word of small letters and digits."
            )
        rows = self.rows(
            f"{INFO} WHERE id >= ? AND id < ? ORDER BY id LIMIT 20", given, given + "{"
        )
        infos = [_info(row) for row in rows]
        exact = [info for info in infos if info.id == given]
        if not infos:
            raise StoreError(f"There is no session {_shown(given)}.")
        if len(infos) > 1 and not exact:
            raise StoreError(
                f"Several sessions begin with {given}: {', '.join(info.id for info in infos)}."
            )
        return (exact or infos)[0]

    def search(self, words: str, limit: int = 50) -> list[Found]:
        """Sessions in whose title, or in one text of which, all the words stand, the newest first. Parts of words count."""
        wanted = mend(words).split()
        if not wanted:
            return []
        hits: dict[str, str] = {}
        for row in [*self._texts(wanted), *self._titles(wanted)]:
            hits.setdefault(row["session"], _snippet(row["text"] or "", wanted))
        found = [
            Found(_info(row), hits[row["id"]])
            for row in self.rows(f"{INFO} WHERE id IN ({','.join('?' * len(hits))})", *hits)
        ]
        return sorted(
            found, key=lambda each: (each.session.updated, each.session.id), reverse=True
        )[:limit]

    def _titles(self, words: Sequence[str]) -> list[sqlite3.Row]:
        return self.rows(
            f"SELECT id AS session, title AS text FROM session WHERE {_like('title', words)} LIMIT {FOUND}",
            *map(_pattern, words),
        )

    def _texts(self, words: Sequence[str]) -> list[sqlite3.Row]:
        if min(map(len, words)) >= 3:  # a trigram has three
            query = " AND ".join('"' + word.replace('"', '""') + '"' for word in words)
            try:
                return self.rows(
                    "SELECT part.session, part.text FROM search JOIN part ON part.id = search.rowid "
                    f"WHERE search MATCH ? ORDER BY part.id DESC LIMIT {FOUND}",
                    query,
                )
            except StoreError:
                pass  # the library has no index
        return self.rows(
            f"SELECT session, text FROM part WHERE type = 'text' AND {_like('text', words)} ORDER BY id DESC LIMIT {FOUND}",
            *map(_pattern, words),
        )

    # -- what belongs to a session beside its messages

    def todos(self, session_id: str) -> list[Todo]:
        return [
            Todo(row["text"], row["status"])
            for row in self.rows(
                "SELECT * FROM todo WHERE session = ? ORDER BY position", session_id
            )
        ]

    def set_todos(self, session_id: str, todos: Sequence[Todo]) -> None:
        with self.transaction() as db:
            db.execute("DELETE FROM todo WHERE session = ?", (session_id,))
            db.executemany(
                "INSERT INTO todo VALUES (?, ?, ?, ?)",
                [
                    (session_id, place, mend(todo.text), todo.status)
                    for place, todo in enumerate(todos)
                ],
            )


def open_store(path: Path | str) -> tuple[Store, str]:
    """The store, and what a person should know of it, mostly nothing. Where the file cannot be used it is one in memory."""
    try:
        store = Store(path)
    except StoreError as error:
        return Store(MEMORY), f"{error} This session is not saved."
    return store, store.notice


def add_usage(db: sqlite3.Connection, session_id: str, usage: Usage) -> None:
    for row in db.execute("SELECT * FROM session WHERE id = ?", (session_id,)).fetchall():
        total = asdict(_usage(row) + usage)
        db.execute(
            f"UPDATE session SET {', '.join(f'{name} = :{name}' for name in USAGE)} WHERE id = :id",
            total | {"id": session_id},
        )


def folder_name(path: str) -> str:
    """A folder as the database takes it: bytes that are no text become escapes, so that two such folders are two."""
    return path.encode("utf-8", "backslashreplace").decode()


def _new_id() -> str:
    """The time in milliseconds to the base 36, in eight characters (until 2059), and four by chance."""
    time, word = now(), ""
    while time:
        time, digit = divmod(time, len(DIGITS))
        word = DIGITS[digit] + word
    return word.rjust(8, "0") + "".join(secrets.choice(DIGITS) for _ in range(4))


def _shown(given: str) -> str:
    return repr(given if len(given) <= 40 else given[:40] + "…")


def _usage(row: sqlite3.Row) -> Usage:
    cost = row["cost"] if isinstance(row["cost"], int | float) else None
    input_, output, cached, reasoning = (_number(row[name]) for name in USAGE[:4])
    return Usage(input_, output, cached, reasoning, bool(row["estimated"]), cost)


def _info(row: sqlite3.Row) -> SessionInfo:
    first = " ".join((row["first"] or "").split())
    return SessionInfo(
        row["id"],
        row["title"],
        row["directory"],
        row["agent"],
        row["model"],
        row["parent"],
        bool(row["forked"]),
        _number(row["created"]),
        _number(row["updated"]),
        _usage(row),
        row["messages"],
        first,
    )


def _number(value: Any) -> int:
    """A count or a time; 0 for what is neither."""
    return int(value) if isinstance(value, int | float) and 0 <= value < MOST else 0


def _like(column: str, words: Sequence[str]) -> str:
    return " AND ".join(f"{column} LIKE ? ESCAPE '\\'" for _ in words)


def _pattern(word: str) -> str:
    return "%" + re.sub(r"([%_\\])", r"\\\1", word) + "%"


def _snippet(text: str, words: Sequence[str]) -> str:
    """What stands around the first of the words, in one line."""
    places = [place for word in words if (place := text.casefold().find(word.casefold())) >= 0]
    start = max(0, min(places, default=0) - AROUND)
    cut = " ".join(text[start : start + 2 * AROUND + len(words[0])].split())
    return f"{'…' if start else ''}{cut}{'…' if start + 2 * AROUND + len(words[0]) < len(text) else ''}"
