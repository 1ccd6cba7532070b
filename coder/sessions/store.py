"""Store: what is known of each session, and finding one again.

    store, notice = open_store(data / "sessions.db")
    store.sessions("/project"), store.find("0m3x"), store.search("timeout")

Ids are short, sort by time and consist of lower-case letters and digits. One that the user gives is
only ever compared with those in the table.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from coder.history import calls_of, checked_message, now, put_in_order, text_of, tool_message
from coder.providers.text import DEEPEST, mend
from coder.providers.wire import ReadMessages, common_prefix, copied
from coder.sessions.database import MEMORY, Database, StoreError
from coder.sessions.rescue import decoded
from coder.sessions.schema import (
    ACTIVE,
    APPLICATION,
    COLUMNS,
    COMPLETION,
    DATA,
    INFO,
    LISTED,
    NAMES,
    SCHEMA,
    TEXTS,
    USAGE,
    VERSION,
)
from coder.sessions.session_lock import SessionLock
from coder.types import Message, ToolResult, Usage

FILE = "sessions.db"  # in the folder of the program's data
# As a request has it, so that a row can be sent (request.py)
JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=str)
MAX_HITS = 1000  # messages that a search looks at, the newest
MAX_FOUND = 50  # sessions
MAX_ENDING = 50  # messages at the end in which the newest question is looked for
MAX_TITLE = 200  # characters
AROUND = 40  # characters of a snippet on either side
INTERRUPTED = (
    "Interrupted: the program was ended while this ran. Its effects so far remain; "
    "check them before you repeat it."
)


@dataclass(slots=True)
class SessionInfo:
    """A session as a list shows it.

    Times are milliseconds since the epoch; `parent` is the session it was forked from, or whose
    sub-agent it belongs to; `first` is the beginning of its first text; `messages` counts those
    that are sent.
    """

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
        """Within a transaction, add the session, or update what may change in it."""
        values = {name: getattr(self, name) for name in COLUMNS} | asdict(self.usage)
        values |= {name: mend(text) for name, text in values.items() if isinstance(text, str)}
        names = ", ".join(values)
        marks = ", ".join(f":{name}" for name in values)
        changed = ", ".join(f"{name} = :{name}" for name in ("agent", "model", "updated", *USAGE))
        insert = f"INSERT INTO session ({names}) VALUES ({marks})"
        db.execute(f"{insert} ON CONFLICT (id) DO UPDATE SET {changed}", values)


@dataclass(slots=True)
class Row:
    """An active row of the table: its id, the message, a copy as it was written, and its JSON as
    it was read, if it is UTF-8 without NaN."""

    id: int
    message: Message
    copy: Any
    data: bytes = b""


class Store(Database):
    """All sessions of the user. Raises StoreError, also from every method."""

    what = "The file of the sessions"
    application = APPLICATION
    version = VERSION
    schema = SCHEMA
    completion = COMPLETION

    # -- making and changing

    def create(self, directory: str, *, session_id: str = "", **names: Any) -> SessionInfo:
        """A new session; `names`: its agent, model, parent, title. A Recorder writes it with its
        first message."""
        new_id = f"{now():011x}{os.urandom(2).hex()}"
        used_id = session_id or new_id
        return SessionInfo(used_id, folder_name(directory), created=now(), **names)

    def rename(self, session_id: str, title: str) -> None:
        title = mend(" ".join(title.split()))[:MAX_TITLE]
        with self.transaction() as db:
            db.execute("UPDATE session SET title = ? WHERE id = ?", (title, session_id))

    def remove(self, session_id: str) -> None:
        """Remove a session and those of its sub-agents, but not its forks. Raises StoreError if one
        is open."""
        query = "SELECT id FROM session WHERE id = ? OR (parent = ? AND NOT forked)"
        ids = [row["id"] for row in self.rows(query, session_id, session_id)]
        with contextlib.ExitStack() as locks:
            for removed in ids:
                locks.callback(SessionLock(self.path, removed).release)
            with self.transaction() as db:
                for removed in ids:
                    db.execute("DELETE FROM session WHERE id = ?", (removed,))

    # -- finding

    def sessions(self, directory: str | None = None, limit: int = 1000) -> list[SessionInfo]:
        """Those with messages, of a folder or all, the newest first; without those of
        sub-agents."""
        condition = LISTED
        values = []
        if directory is not None:
            condition += " AND directory = ?"
            values.append(folder_name(directory))
        newest = "ORDER BY updated DESC, id DESC"
        chosen = f"SELECT id FROM session WHERE {condition} {newest} LIMIT {limit:d}"
        return self._infos(f"WHERE id IN ({chosen}) {newest}", *values)

    def get(self, session_id: str) -> SessionInfo:
        for info in self._infos("WHERE id = ?", session_id):
            return info
        raise StoreError(f"There is no session {session_id!r}.")

    def find(self, given: str, directory: str | None = None) -> SessionInfo:
        """The session with this id or name, or whose id or name begins like this.

        With a directory also the one with this number in its list.
        """
        word = mend(given.strip())[:MAX_TITLE].lower()
        if directory is not None and re.fullmatch(r"[1-9]\d{0,3}", word):
            number = int(word)
            listed = self.sessions(directory, number)
            if len(listed) == number:
                return listed[-1]
        ids = self._ids_of(word) if word else []
        if not ids:
            raise StoreError(f"There is no session {given[:40]!r}.")
        if len(ids) > 1:
            raise StoreError(f"Several sessions begin with {given}: {', '.join(ids[:20])}.")
        return self.get(ids[0])

    def _ids_of(self, word: str) -> list[str]:
        """The sessions with this id or name; without any, those whose id or name begins like
        this."""
        exact = []
        begun = []
        for session_id, title in self.rows(NAMES):
            names = (session_id, title.lower())
            if word in names:
                exact.append(session_id)
            if any(name.startswith(word) for name in names):
                begun.append(session_id)
        return exact or begun

    def ending(self, session_id: str) -> tuple[str, str]:
        """The newest question and the answer to it, or "": the beginnings of their texts, in a line
        each."""
        condition = "AND role IN ('user', 'assistant') ORDER BY position DESC"
        texts: dict[str, str] = {}
        query = f"SELECT role, {DATA} {ACTIVE} {condition} LIMIT {MAX_ENDING}"
        for row in self.rows(query, session_id):
            text = _first_words(row["data"])
            if text:
                texts.setdefault(row["role"], text)
            if "user" in texts:
                break
        return texts.get("user", ""), texts.get("assistant", "")

    def search(self, words: str) -> list[tuple[SessionInfo, str]]:
        """Sessions whose title, or one of whose texts, has all the words, the newest first.

        Each with the words around its newest hit. Parts of words count.
        """
        wanted = mend(words).lower().split()
        if not wanted:
            return []
        tests = []
        values = []
        for word in wanted:
            spelling = json.dumps(word, ensure_ascii=False)[1:-1]  # as the rows have it
            if word.isascii():
                # LIKE, which knows the case of ASCII only, is three times as fast as a function in
                # Python
                tests.append("data LIKE '%' || ? || '%' ESCAPE '!'")
                values.append(re.sub("([!%_])", r"!\1", spelling))
            else:
                tests.append("instr(lower(data), ?)")
                values.append(spelling)
        condition = " AND ".join(tests)
        hits: dict[str, str] = {}
        for select in TEXTS:
            query = f"{select} {condition} ORDER BY id DESC LIMIT {MAX_HITS}"
            for row in self.rows(query, *values):
                text = _text_in(row["data"])
                if all(word in text.lower() for word in wanted):  # and not in its JSON alone
                    hits.setdefault(row["session"], text)
        chosen = "WHERE id IN (SELECT value FROM json_each(?)) ORDER BY updated DESC, id DESC"
        infos = self._infos(chosen, json.dumps(list(hits)))[:MAX_FOUND]
        return [(info, _snippet(hits[info.id], wanted)) for info in infos]

    def rows_sent(self, session_id: str) -> list[Row]:
        """The active rows of a session; the message of one that cannot be used is empty."""
        # As bytes: SQLite calls `decoded` for each text
        query = f"SELECT id, CAST(data AS BLOB) {ACTIVE} ORDER BY position"
        found = self.rows(query, session_id)
        values, sendable = _loaded_all([data for _, data in found])
        rows = []
        for (row_id, _), value, data in zip(found, values, sendable):
            try:
                copy = copied(value, DEEPEST)
                message = checked_message(value) or {}
            except ValueError:  # nested too deeply
                message = {}
            rows.append(Row(row_id, message, copy if message else {}, data))
        return rows

    def _infos(self, condition: str, *values: Any) -> list[SessionInfo]:
        infos = []
        for row in self.rows(INFO + condition, *values):
            info = SessionInfo(**{name: row[name] for name in COLUMNS})
            info.forked = bool(row["forked"])
            info.usage = Usage(**{name: row[name] for name in USAGE})
            info.usage.estimated = bool(row["estimated"])
            info.messages = row["messages"]
            info.first = _first_words(row["first"])
            infos.append(info)
        return infos


def open_store(path: Path | str) -> tuple[Store, str]:
    """The store, and "" or one line for the user. If the file cannot be used, it is a store in
    memory."""
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
    """The list of messages as it was in memory, repaired if a kill left it open. Raises StoreError.

    A call that had begun is answered with INTERRUPTED, and with the id of its task, if a sub-agent
    worked for it; one that had not with history.NOT_RUN. None is ever run again by the program.
    `tell` gets a line for the user if something cannot be used. `rows`: the `rows_sent`, if they
    were read.
    """
    if rows is None:
        rows = store.rows_sent(session_id)
    messages = [row.message for row in rows if row.message]
    lost = len(rows) - len(messages)
    results = _interrupted_results(store, newest_answer(rows))
    in_order = ReadMessages(put_in_order(messages + results))
    copies = [row.copy for row in rows]
    in_order.copies = copies[: common_prefix(copies, in_order)]
    in_order.rows = [row.data for row in rows]
    if in_order != messages:
        lost += _count_lost_results(messages)
    if lost:
        tell(f"Left out of the session, since it cannot be used: {lost} of {len(rows)} messages.")
    return in_order


def newest_answer(rows: Sequence[Row]) -> int:
    """The id of its row; 0 if there is none."""
    for row in reversed(rows):
        if row.message.get("role") == "assistant":
            return row.id
    return 0


def _count_lost_results(messages: list[Message]) -> int:
    """Results without a call."""
    calls = {call["id"] for message in messages for call in calls_of(message)}
    results = [message.get("tool_call_id") for message in messages if message["role"] == "tool"]
    return len([call_id for call_id in results if call_id not in calls])


def _interrupted_results(store: Store, answer: int) -> list[Message]:
    """Results for the calls of this answer that had begun; `repair` takes those that are needed."""
    query = "SELECT call_id, data FROM part WHERE message = ? AND state <> 'pending' ORDER BY id"
    results = []
    for part in store.rows(query, answer):
        text = INTERRUPTED
        data = loaded(part["data"])
        if isinstance(data, dict) and data.get("task_id"):
            text += f"\n\n[task_id: {data['task_id']}]"
        results.append(tool_message(part["call_id"], ToolResult(text, is_error=True)))
    return results


# -- rows and texts


def dumps(value: Any) -> str:
    """JSON that the database takes, also of lone surrogates. Raises ValueError."""
    try:
        text = JSON.encode(value)
        with contextlib.suppress(UnicodeEncodeError):
            text.encode()
            return text
        return json.dumps(value, default=str)
    except (TypeError, RecursionError) as error:  # a key that is no text; too many levels
        raise ValueError(str(error)) from None


def loaded(text: Any) -> Any:
    """The value of a JSON text; None for what is no JSON, or is nested too deeply to be sent or
    written again."""
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        value = json.loads(text)
        copied(value, DEEPEST)  # raises ValueError
        return value
    return None


def _loaded_all(rows: list[Any]) -> tuple[list[Any], list[bytes]]:
    """`loaded` of each, but a value may be nested too deeply; and the rows, b"" for what cannot be
    sent. Read in one go, they share the names of their members: a long session is then read and
    compared faster."""
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        # No text of JSON goes on after the end of a line
        lines = b",\n".join(rows).decode()
        # No server takes NaN, which is no int
        values: list[Any] = json.loads(f"[{lines}]", parse_constant=int)
        if len(values) == len(rows):
            return values, rows
    # One of them is damaged
    return [loaded(decoded(row or b"")) for row in rows], [b"" for _ in rows]


def folder_name(path: str) -> str:
    """A folder as the database takes it: bytes that are no text become escapes."""
    return path.encode("utf-8", "backslashreplace").decode()


def _snippet(text: str, words: Sequence[str]) -> str:
    """The text around the first of the words, in one line."""
    start = max(0, min(text.lower().find(word) for word in words) - AROUND)
    end = start + 2 * AROUND + len(words[0])
    snippet = " ".join(text[start:end].split())
    if start > 0:
        snippet = f"…{snippet}"
    if end < len(text):
        snippet = f"{snippet}…"
    return snippet


def _text_in(data: Any) -> str:
    """The text of a message as a row has it."""
    return text_of(checked_message(loaded(data)) or {})


def _first_words(data: Any) -> str:
    """The beginning of its text, in one line."""
    return " ".join(_text_in(data)[:200].split())
