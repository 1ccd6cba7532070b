"""Store: what is known of each session, finding one again, and the lock of the process that writes one.

    store, notice = open_store(data / "sessions.db")
    session_id = store.create(directory=str(cwd), model="gpt-5")

Ids are short, sort by time and are words of small letters and digits. One that the user gives is only
ever compared with those in the table.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import sqlite3
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from coder.history import now
from coder.providers.text import mend
from coder.sessions.database import MEMORY, Database, StoreError
from coder.types import Usage

__all__ = ["MEMORY", "SearchHit", "SessionInfo", "Store", "StoreError", "Todo", "open_store"]

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
ID = re.compile("[0-9a-z]{1,32}")
MAX_HITS = 1000  # texts that a search looks at, the newest
AROUND = 40  # characters of a snippet on either side


@dataclass(frozen=True, slots=True)
class Todo:
    text: str
    status: str


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session as a list shows it. Times are milliseconds since the epoch; `parent` is the session
    it was forked from, or whose sub-agent it belongs to; `first` is the beginning of its first text;
    `messages` counts those that are sent."""

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
class SearchHit:
    """A session that a search found, and the words around its newest hit."""

    session: SessionInfo
    snippet: str


USAGE = ("input", "output", "cached", "reasoning", "estimated", "cost")
INFO = """SELECT session.*,
  (SELECT count(*) FROM message WHERE message.session = session.id AND active = 1) AS messages,
  (SELECT substr(text, 1, 200) FROM part WHERE part.session = session.id AND type = 'text'
   ORDER BY part.id LIMIT 1) AS first
  FROM session """
LISTED = """(parent IS NULL OR forked)
  AND EXISTS (SELECT 1 FROM message WHERE message.session = session.id AND active = 1)"""
FAMILY = """WITH RECURSIVE family(id) AS (SELECT id FROM session WHERE id = ? UNION
  SELECT session.id FROM session JOIN family ON parent = family.id WHERE NOT forked)
  SELECT id FROM family"""

FORK = (
    """INSERT INTO session (id, title, directory, agent, model, parent, forked, created, updated)
  SELECT :new, title, directory, agent, model, id, 1, :time, :time FROM session WHERE id = :old""",
    """INSERT INTO message (session, position, active, role, finish, error, tokens, completed, data)
  SELECT :new, position, active, role, finish, error, tokens, completed, data
  FROM message WHERE session = :old ORDER BY position""",
    """INSERT INTO part (session, message, type, call_id, state, title, start, "end", text, data)
  SELECT :new, copy.id, type, call_id, state, title, start, "end", text, part.data
  FROM part LEFT JOIN message AS old ON old.id = part.message
  LEFT JOIN message AS copy ON copy.session = :new AND copy.position = old.position
  WHERE part.session = :old ORDER BY part.id""",
    """INSERT INTO todo
  SELECT :new, position, text, status FROM todo WHERE session = :old""",
)


class Store(Database):
    """All sessions of the user. Raises StoreError, also from every method."""

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
        """A new session; its id, which may be given. Lists show it when it has a message."""
        session_id, time = session_id or _new_id(), now()
        names = "id, title, directory, agent, model, parent, created, updated"
        place = folder_name(directory)
        values = (session_id, mend(title), place, mend(agent), mend(model), parent, time, time)
        with self.transaction() as db:
            db.execute(f"INSERT INTO session ({names}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
        return session_id

    def fork(self, session_id: str) -> str:
        """A copy of a session to go on with, without what it has cost; its id."""
        names = {"old": self.get(session_id).id, "new": _new_id(), "time": now()}
        with self.transaction() as db:
            for statement in FORK:
                db.execute(statement, names)
        return str(names["new"])

    def rename(self, session_id: str, title: str) -> None:
        self._set(session_id, title=" ".join(title.split()))

    def set_model(self, session_id: str, model: str, agent: str = "") -> None:
        self._set(session_id, model=model, agent=agent)

    def _set(self, session_id: str, **texts: str) -> None:
        names = ", ".join(f"{name} = ?" for name in texts)
        with self.transaction() as db:
            values = (*map(mend, texts.values()), session_id)
            db.execute(f"UPDATE session SET {names} WHERE id = ?", values)

    def remove(self, session_id: str) -> None:
        """Remove a session and those of its sub-agents, but not its forks. Raises StoreError where one is open."""
        family = [row["id"] for row in self.rows(FAMILY, session_id)]
        with contextlib.ExitStack() as locks:
            for each in family:
                locks.callback(SessionLock(self.path, each).release)
            with self.transaction() as db:
                db.executemany("DELETE FROM session WHERE id = ?", [(each,) for each in family])

    def discard_empty(self, session_id: str) -> None:
        """Remove a session that has no message."""
        unused = "NOT EXISTS (SELECT 1 FROM message WHERE session = session.id)"
        with self.transaction() as db:
            db.execute(f"DELETE FROM session WHERE id = ? AND {unused}", (session_id,))

    # -- finding

    def sessions(self, directory: str | None = None, limit: int = 1000) -> list[SessionInfo]:
        """Those with messages, of a folder or all, the newest first; without those of sub-agents."""
        here = "AND directory = ?" if directory is not None else ""
        chosen = f"SELECT * FROM session WHERE {LISTED} {here} ORDER BY updated DESC, id DESC LIMIT {limit:d}"
        values = [folder_name(directory)] if directory is not None else []
        query = INFO.replace("FROM session ", f"FROM ({chosen}) AS session")
        return [_info(row) for row in self.rows(f"{query} ORDER BY updated DESC, id DESC", *values)]

    def latest(self, directory: str) -> SessionInfo | None:
        """The newest of a folder."""
        return next(iter(self.sessions(directory, 1)), None)

    def get(self, session_id: str) -> SessionInfo:
        found = self.rows(f"{INFO} WHERE id = ?", session_id)
        if not found:
            raise _unknown(session_id)
        return _info(found[0])

    def find(self, given: str) -> SessionInfo:
        """The session with this id, or whose id begins like this."""
        given = given.strip().lower()
        if not ID.fullmatch(given):
            raise _unknown(given, ": an id is a word of small letters and digits")
        begins = f"{INFO} WHERE id >= ? AND id < ? ORDER BY id LIMIT 20"
        infos = [_info(row) for row in self.rows(begins, given, given + "{")]
        if not infos:
            raise _unknown(given)
        if len(infos) > 1 and infos[0].id != given:
            ids = ", ".join(info.id for info in infos)
            raise StoreError(f"Several sessions begin with {given}: {ids}.")
        return infos[0]

    def search(self, words: str, limit: int = 50) -> list[SearchHit]:
        """Sessions whose title, or one of whose texts, has all the words, the newest first. Parts of words count."""
        wanted = mend(words).split()
        if not wanted:
            return []
        hits: dict[str, str] = {}
        for row in [*self._texts(wanted), *self._titles(wanted)]:
            hits.setdefault(row["session"], row["text"] or "")
        query = f"{INFO} WHERE id IN ({','.join('?' * len(hits))}) ORDER BY updated DESC, id DESC"
        rows = self.rows(f"{query} LIMIT {limit:d}", *hits)
        return [SearchHit(_info(row), _snippet(hits[row["id"]], wanted)) for row in rows]

    def _titles(self, words: Sequence[str]) -> list[sqlite3.Row]:
        fits, values = _like("title", words)
        query = f"SELECT id AS session, title AS text FROM session WHERE {fits} LIMIT {MAX_HITS}"
        return self.rows(query, *values)

    def _texts(self, words: Sequence[str]) -> list[sqlite3.Row]:
        fits, values = _like("text", words)
        if min(map(len, words)) >= 3:  # a trigram has three
            quoted = " AND ".join('"' + word.replace('"', '""') + '"' for word in words)
            newest = f"search MATCH ? ORDER BY rowid DESC LIMIT {MAX_HITS}"
            query = f"SELECT session, text FROM part WHERE id IN (SELECT rowid FROM search WHERE {newest})"
            with contextlib.suppress(StoreError):  # the library has no index
                return self.rows(f"{query} ORDER BY id DESC", quoted)
        query = f"SELECT session, text FROM part WHERE type = 'text' AND {fits}"
        return self.rows(f"{query} ORDER BY id DESC LIMIT {MAX_HITS}", *values)

    # -- the checklist

    def todos(self, session_id: str) -> list[Todo]:
        rows = self.rows("SELECT * FROM todo WHERE session = ? ORDER BY position", session_id)
        return [Todo(row["text"], row["status"]) for row in rows]


def open_store(path: Path | str) -> tuple[Store, str]:
    """The store, and "" or one line for the user. Where the file cannot be used, it is a store in memory."""
    try:
        store = Store(path)
    except StoreError as error:
        return Store(MEMORY), f"{error} This session is not saved."
    return store, store.notice


# -- writing within a transaction


def add_usage(db: sqlite3.Connection, session_id: str, usage: Usage) -> None:
    names = ", ".join(f"{name} = :{name}" for name in USAGE)
    for row in db.execute("SELECT * FROM session WHERE id = ?", (session_id,)).fetchall():
        total = asdict(_usage(row) + usage) | {"id": session_id}
        db.execute(f"UPDATE session SET {names} WHERE id = :id", total)


def set_todos(db: sqlite3.Connection, session_id: str, todos: Sequence[Todo]) -> None:
    rows = [(session_id, at, mend(todo.text), todo.status) for at, todo in enumerate(todos)]
    db.execute("DELETE FROM todo WHERE session = ?", (session_id,))
    db.executemany("INSERT INTO todo VALUES (?, ?, ?, ?)", rows)


# -- rows and texts


def folder_name(path: str) -> str:
    """A folder as the database takes it: bytes that are no text become escapes."""
    return path.encode("utf-8", "backslashreplace").decode()


def _new_id() -> str:
    """The time in milliseconds to the base 36, in eight characters (until 2059), and four random ones."""
    time, word = now(), ""
    while time:
        time, digit = divmod(time, len(DIGITS))
        word = DIGITS[digit] + word
    return word.rjust(8, "0") + "".join(secrets.choice(DIGITS) for _ in range(4))


def _unknown(given: str, why: str = "") -> StoreError:
    short = given if len(given) <= 40 else given[:40] + "…"
    return StoreError(f"There is no session {short!r}{why}.")


def _usage(row: sqlite3.Row) -> Usage:
    facts = {name: row[name] for name in USAGE}
    return Usage(**facts | {"estimated": bool(row["estimated"])})


def _info(row: sqlite3.Row) -> SessionInfo:
    names = ("id", "title", "directory", "agent", "model", "parent", "created", "updated")
    return SessionInfo(
        **{name: row[name] for name in (*names, "messages")},
        forked=bool(row["forked"]),
        usage=_usage(row),
        first=" ".join((row["first"] or "").split()),
    )


def _like(column: str, words: Sequence[str]) -> tuple[str, list[str]]:
    """A condition that all words stand in a column, and its values."""
    patterns = ["%" + re.sub(r"([%_\\])", r"\\\1", word) + "%" for word in words]
    return " AND ".join(f"{column} LIKE ? ESCAPE '\\'" for _ in words), patterns


def _snippet(text: str, words: Sequence[str]) -> str:
    """What stands around the first of the words, in one line."""
    places = [place for word in words if (place := text.casefold().find(word.casefold())) >= 0]
    start = max(0, min(places, default=0) - AROUND)
    end = start + 2 * AROUND + len(words[0])
    cut = " ".join(text[start:end].split())
    return f"{'…' if start else ''}{cut}{'…' if end < len(text) else ''}"


# -- one writer for each session


class SessionLock:
    """The single-writer lock of a session, until `release`; the kernel releases it on SIGKILL, too.

    `store` is the path of the database. Raises StoreError where another process has it.
    """

    def __init__(self, store: Path, session_id: str) -> None:
        self._fd: int | None = None
        self._path = store.with_name(f"{store.name}.locks") / session_id
        if str(store) == MEMORY:
            return
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            while self._fd is None or not os.fstat(self._fd).st_nlink:
                self.release()  # its holder has removed it between our opening and our locking it
                self._lock(session_id)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, str(os.getpid()).encode(), 0)
        except OSError as error:
            text = f"The session {session_id} cannot be locked: {error.strerror}."
            raise StoreError(text) from None

    def _lock(self, session_id: str) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._path, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._fd = fd
        except BlockingIOError:
            holder = os.pread(fd, 20, 0).decode("ascii", "replace") or "unknown"
            os.close(fd)
            own = holder == str(os.getpid())
            where = "this process" if own else f"another process (pid {holder})"
            raise StoreError(f"The session {session_id} is open in {where}.") from None

    def release(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):
                if os.fstat(self._fd).st_nlink:
                    self._path.unlink()  # while it is still ours
            os.close(self._fd)
            self._fd = None
