"""Store: what is known of each session, finding one again, and the lock of the process that writes one.

    store, notice = open_store(data / "sessions.db")
    store.sessions("/project"), store.find("0m3x"), store.search("timeout")

Ids are short, sort by time and are words of small letters and digits. One that the user gives is only
ever compared with those in the table.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any

from coder.history import calls_of, formed, now, repair, text_of, tool_message
from coder.providers.request import copied
from coder.providers.text import DEEPEST, mend, mend_all
from coder.sessions.database import MEMORY, Database, StoreError
from coder.types import Message, ToolResult, Usage

APPLICATION = 0x636F6472  # application_id, which marks the file as this program's
VERSION = 3  # user_version
MAX_HITS = 1000  # messages that a search looks at, the newest
MAX_FOUND = 50  # sessions
MAX_ENDING = 50  # messages at the end in which the newest question is looked for
MAX_TITLE = 200  # characters
AROUND = 40  # characters of a snippet on either side
USAGE = tuple(each.name for each in fields(Usage))
COLUMNS = ("id", "title", "directory", "agent", "model", "parent", "forked", "created", "updated")

SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS session (
  id TEXT PRIMARY KEY, title TEXT NOT NULL DEFAULT '', directory TEXT NOT NULL,
  agent TEXT NOT NULL DEFAULT '', model TEXT NOT NULL DEFAULT '',
  parent TEXT REFERENCES session(id) ON DELETE SET NULL, forked INTEGER NOT NULL DEFAULT 0,
  created INTEGER NOT NULL, updated INTEGER NOT NULL,
  input INTEGER NOT NULL DEFAULT 0, output INTEGER NOT NULL DEFAULT 0,
  cached INTEGER NOT NULL DEFAULT 0, reasoning INTEGER NOT NULL DEFAULT 0,
  estimated INTEGER NOT NULL DEFAULT 0, cost REAL);
CREATE TABLE IF NOT EXISTS message (
  id INTEGER PRIMARY KEY, session TEXT NOT NULL REFERENCES session(id) ON DELETE CASCADE,
  position INTEGER NOT NULL, active INTEGER NOT NULL DEFAULT 1, role TEXT NOT NULL,
  finish TEXT, error TEXT, tokens TEXT, completed INTEGER, data TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS part (
  id INTEGER PRIMARY KEY, session TEXT NOT NULL REFERENCES session(id) ON DELETE CASCADE,
  message INTEGER REFERENCES message(id) ON DELETE CASCADE, type TEXT NOT NULL, call_id TEXT,
  state TEXT, title TEXT, start INTEGER, "end" INTEGER, data TEXT NOT NULL DEFAULT '{{}}');
CREATE TABLE IF NOT EXISTS todo (
  session TEXT NOT NULL REFERENCES session(id) ON DELETE CASCADE, position INTEGER NOT NULL,
  text TEXT NOT NULL, status TEXT NOT NULL, PRIMARY KEY (session, position));
CREATE INDEX IF NOT EXISTS session_by_parent ON session(parent);
CREATE INDEX IF NOT EXISTS message_by_place ON message(session, position, active);
CREATE INDEX IF NOT EXISTS part_by_message ON part(message);
CREATE INDEX IF NOT EXISTS part_by_session ON part(session);
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {VERSION};
COMMIT;
"""

# A value of another kind, which a damaged file may hold, as one of this kind
KINDS = dict.fromkeys(COLUMNS, "TEXT")
KINDS |= dict.fromkeys(("forked", "created", "updated", *USAGE), "INTEGER")
INFO = f"""SELECT {", ".join(f"CAST({name} AS {kind}) AS {name}" for name, kind in KINDS.items())},
  (SELECT count(*) FROM message WHERE session = session.id AND active = 1) AS messages,
  (SELECT CAST(data AS TEXT) FROM message WHERE session = session.id
   ORDER BY position LIMIT 1) AS first
  FROM session """
ACTIVE = """SELECT id, role, CAST(data AS TEXT) AS data FROM message
  WHERE session = ? AND active = 1 ORDER BY position"""
INTERRUPTED = (
    "Interrupted: the program was ended while this ran. Its effects so far remain; "
    "check them before you repeat it."
)
# With what is looked for behind them. Apart, since the newest messages end the first one early
TEXTS = (
    """SELECT session, data FROM
    (SELECT id, session, role, CAST(data AS TEXT) AS data FROM message)
    WHERE role IN ('user', 'assistant') AND""",
    """SELECT id AS session, data FROM
    (SELECT id, json_object('role', 'user', 'content', CAST(title AS TEXT)) AS data FROM session)
    WHERE""",
)
NAMES = "SELECT CAST(id AS TEXT), CAST(title AS TEXT) FROM session ORDER BY id"
# A session whose own row cannot be read, of its messages
COMPLETION = """INSERT OR IGNORE INTO session (id, directory, created, updated)
  SELECT session, '', coalesce(min(completed), 0), coalesce(max(completed), 0)
  FROM message GROUP BY session;"""
LISTED = """(parent IS NULL OR forked)
  AND EXISTS (SELECT 1 FROM message WHERE session = session.id AND active = 1)"""


@dataclass(slots=True)
class SessionInfo:
    """A session as a list shows it. Times are milliseconds since the epoch; `parent` is the session
    it was forked from, or whose sub-agent it belongs to; `first` is the beginning of its first text;
    `messages` counts those that are sent."""

    id: str
    directory: str
    title: str = ""
    agent: str = ""
    model: str = ""
    parent: str | None = None
    forked: bool = False
    created: int = 0
    updated: int = 0
    usage: Usage = field(default_factory=Usage)
    messages: int = 0
    first: str = ""

    def write(self, db: sqlite3.Connection) -> None:
        """Within a transaction, write what may change in a session, or the session where it is not there."""
        values = {name: getattr(self, name) for name in COLUMNS} | asdict(self.usage)
        values |= {name: mend(text) for name, text in values.items() if isinstance(text, str)}
        names, marks = ", ".join(values), ", ".join(f":{name}" for name in values)
        changed = ", ".join(f"{name} = :{name}" for name in ("agent", "model", "updated", *USAGE))
        insert = f"INSERT INTO session ({names}) VALUES ({marks})"
        db.execute(f"{insert} ON CONFLICT (id) DO UPDATE SET {changed}", values)


@dataclass(slots=True)
class Row:
    """An active row of the table: its id, the message, and a copy as it was written."""

    id: int
    message: Message
    copy: Any


class Store(Database):
    """All sessions of the user. Raises StoreError, also from every method."""

    what, application, version, schema = "The file of the sessions", APPLICATION, VERSION, SCHEMA
    completion = COMPLETION

    # -- making and changing

    def create(self, directory: str, *, session_id: str = "", **names: Any) -> SessionInfo:
        """A new session, with an agent, a model, a parent, a title. A Recorder writes it with its first message."""
        new_id = f"{now():011x}{os.urandom(2).hex()}"
        return SessionInfo(session_id or new_id, folder_name(directory), created=now(), **names)

    def rename(self, session_id: str, title: str) -> None:
        with self.transaction() as db:
            values = mend(" ".join(title.split()))[:MAX_TITLE], session_id
            db.execute("UPDATE session SET title = ? WHERE id = ?", values)

    def remove(self, session_id: str) -> None:
        """Remove a session and those of its sub-agents, but not its forks. Raises StoreError where one is open."""
        family_of = "SELECT id FROM session WHERE id = ? OR (parent = ? AND NOT forked)"
        family = [row["id"] for row in self.rows(family_of, session_id, session_id)]
        with contextlib.ExitStack() as locks:
            for each in family:
                locks.callback(SessionLock(self.path, each).release)
            with self.transaction() as db:
                db.executemany("DELETE FROM session WHERE id = ?", [(each,) for each in family])

    # -- finding

    def sessions(self, directory: str | None = None, limit: int = 1000) -> list[SessionInfo]:
        """Those with messages, of a folder or all, the newest first; without those of sub-agents."""
        here = "AND directory = ?" if directory is not None else ""
        chosen = f"SELECT id FROM session WHERE {LISTED} {here} ORDER BY updated DESC, id DESC LIMIT {limit:d}"
        values = [folder_name(directory)] if directory is not None else []
        return self._infos(f"WHERE id IN ({chosen}) ORDER BY updated DESC, id DESC", *values)

    def get(self, session_id: str) -> SessionInfo:
        for info in self._infos("WHERE id = ?", session_id):
            return info
        raise StoreError(f"There is no session {session_id!r}.")

    def find(self, given: str, directory: str | None = None) -> SessionInfo:
        """The session with this id or name, or whose id or name begins like this; with a directory also the one
        with this number in its list."""
        word = mend(given.strip())[:MAX_TITLE].lower()
        if directory is not None and re.fullmatch(r"[1-9]\d{0,3}", word):
            for info in self.sessions(directory, int(word))[int(word) - 1 :]:
                return info
        names = [(row[0], row[1].lower()) for row in self.rows(NAMES)]
        exact = [each[0] for each in names if word in each]
        begun = [each[0] for each in names if each[0].startswith(word) or each[1].startswith(word)]
        ids = exact or begun
        if not word or not ids:
            raise StoreError(f"There is no session {given[:40]!r}.")
        if len(ids) > 1:
            raise StoreError(f"Several sessions begin with {given}: {', '.join(ids[:20])}.")
        return self.get(ids[0])

    def ending(self, session_id: str) -> tuple[str, str]:
        """The newest question and the answer to it, or "": the beginnings of their texts, in a line each."""
        chosen = ACTIVE.replace("AND active", "AND role IN ('user', 'assistant') AND active")
        texts: dict[str, str] = {}
        for row in self.rows(f"{chosen} DESC LIMIT {MAX_ENDING}", session_id):
            text = " ".join(text_of(formed(loaded(row["data"])) or {})[:200].split())
            if text:
                texts.setdefault(row["role"], text)
            if text and row["role"] == "user":
                break
        return texts.get("user", ""), texts.get("assistant", "")

    def search(self, words: str) -> list[tuple[SessionInfo, str]]:
        """Sessions whose title, or one of whose texts, has all the words, the newest first, each with the words
        around its newest hit. Parts of words count."""
        wanted = mend(words).lower().split()
        # LIKE, which knows the case of ASCII only, is three times as fast as a function in Python
        tests = ("data LIKE '%' || ? || '%' ESCAPE '!'", "instr(lower(data), ?)")
        fits = " AND ".join(tests[not word.isascii()] for word in wanted) or "FALSE"
        texts = (json.dumps(word, ensure_ascii=False)[1:-1] for word in wanted)
        spelled = [re.sub("([!%_])", r"!\1", each) if each.isascii() else each for each in texts]
        hits: dict[str, str] = {}
        queries = (f"{select} {fits} ORDER BY id DESC LIMIT {MAX_HITS}" for select in TEXTS)
        for row in chain.from_iterable(self.rows(query, *spelled) for query in queries):
            text = text_of(formed(loaded(row["data"])) or {})
            if all(word in text.lower() for word in wanted):  # and not in its JSON alone
                hits.setdefault(row["session"], text)
        chosen = "WHERE id IN (SELECT value FROM json_each(?)) ORDER BY updated DESC, id DESC"
        infos = self._infos(chosen, json.dumps([*hits]))[:MAX_FOUND]
        return [(info, _snippet(hits[info.id], wanted)) for info in infos]

    def rows_sent(self, session_id: str) -> list[Row]:
        """The active rows of a session; the message of one that cannot be used is empty."""
        read = ((row["id"], loaded(row["data"])) for row in self.rows(ACTIVE, session_id))
        usable = ((row_id, value, formed(value)) for row_id, value in read)
        return [Row(at, each or {}, copied(value) if each else {}) for at, value, each in usable]

    def _infos(self, condition: str, *values: Any) -> list[SessionInfo]:
        infos = []
        for row in self.rows(INFO + condition, *values):
            usage = {name: row[name] for name in USAGE} | {"estimated": bool(row["estimated"])}
            first = " ".join(text_of(formed(loaded(row["first"])) or {})[:200].split())
            facts = {name: row[name] for name in COLUMNS} | {"forked": bool(row["forked"])}
            facts |= {"usage": Usage(**usage), "messages": row["messages"], "first": first}
            infos.append(SessionInfo(**facts))
        return infos


class SessionLock:
    """The single-writer lock of a session, until `release`; the kernel releases it on SIGKILL, too.

    `store` is the path of the database. Raises StoreError where another process has it.
    """

    def __init__(self, store: Path, session_id: str) -> None:
        self._path = store.with_name(f"{store.name}.locks") / session_id
        self._fd = -1
        if str(store) == MEMORY:
            return
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            while self._fd < 0 or not os.fstat(self._fd).st_nlink:
                self.release()  # its holder has removed it between opening and locking it
                self._fd = os.open(self._path, flags, 0o600)
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise StoreError(f"The session {session_id} is open in another process.") from None
        except OSError:
            pass  # a file system without locks; or nothing can be written, which is reported then

    def release(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                if os.fstat(self._fd).st_nlink:
                    self._path.unlink()  # while the lock is still held
            os.close(self._fd)
            self._fd = -1


def open_store(path: Path | str) -> tuple[Store, str]:
    """The store, and "" or one line for the user. Where the file cannot be used, it is a store in memory."""
    try:
        store = Store(path)
    except StoreError as error:
        return Store(MEMORY), f"{error} This session is not saved."
    return store, store.notice


# -- messages


def to_model_messages(
    store: Store,
    session_id: str,
    tell: Callable[[str], None] = lambda text: None,
    rows: Sequence[Row] | None = None,
) -> list[Message]:
    """The list of messages as it was in memory, repaired where a kill left it open. Raises StoreError.

    A call that had begun is answered with INTERRUPTED, and with the id of its task, if a sub-agent worked for
    it; one that had not with history.NOT_RUN. None is ever run again by the program. `tell` gets a line for the
    user where something cannot be used. `rows`: the `rows_sent`, where they were read.
    """
    rows = store.rows_sent(session_id) if rows is None else rows
    messages = [row.message for row in rows if row.message]
    calls = {call["id"] for message in messages for call in calls_of(message)}
    results = [each.get("tool_call_id") for each in messages if each["role"] == "tool"]
    if lost := len(rows) - len(messages) + sum(each not in calls for each in results):
        tell(f"Left out of the session, since it cannot be used: {lost} of {len(rows)} messages.")
    answers = [row.id for row in rows if row.message.get("role") == "assistant"]
    query = "SELECT call_id, data FROM part WHERE message = ? AND state <> 'pending' ORDER BY id"
    for part in store.rows(query, answers[-1]) if answers else ():
        data = loaded(part["data"])
        task = data.get("task_id") if isinstance(data, dict) else ""
        text = f"{INTERRUPTED}\n\n[task_id: {task}]" if task else INTERRUPTED
        messages.append(tool_message(part["call_id"], ToolResult(text, is_error=True)))
    return repair(messages)


# -- rows and texts


def dumps(value: Any) -> str:
    """JSON that the database takes, also of lone surrogates. Raises ValueError."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
        with contextlib.suppress(UnicodeEncodeError):
            text.encode()
            return text
        return json.dumps(value, default=str)
    except (TypeError, RecursionError) as error:  # a key that is no text; too many levels
        raise ValueError(str(error)) from None


def loaded(text: Any) -> Any:
    """The value of a JSON text; None for what is no JSON, or is nested too deeply to be sent or written again."""
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        value = json.loads(text)
        if text.count("[") + text.count("{") > DEEPEST:
            mend_all(value)
        return value
    return None


def folder_name(path: str) -> str:
    """A folder as the database takes it: bytes that are no text become escapes."""
    return path.encode("utf-8", "backslashreplace").decode()


def _snippet(text: str, words: Sequence[str]) -> str:
    """What stands around the first of the words, in one line."""
    start = max(0, min(text.lower().find(word) for word in words) - AROUND)
    end = start + 2 * AROUND + len(words[0])
    cut = " ".join(text[start:end].split())
    return f"{'…' if start else ''}{cut}{'…' if end < len(text) else ''}"
