"""Sessions: a conversation written down while it happens, and read again.

    with SessionStore("sessions.db") as store:
        session = store.open()  # a new one; open(id) continues an existing one
        agent = Agent("gpt-5", session=session)
        run = session.watch(run_loop(session.messages, model, prompt="Go on."))  # without an Agent

The active rows of a session are its list of messages, exactly; one that a compaction replaces stays, not active.
The state of each tool call is written before the tool runs, so that a kill costs at most the answer that was coming.
"""

from __future__ import annotations

import logging
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Generator
from dataclasses import asdict, replace
from itertools import chain, repeat
from operator import attrgetter, is_not
from pathlib import Path
from typing import Any

from coder import events
from coder.events import Event
from coder.history import calls_of, checked_message, now
from coder.providers.request import copied
from coder.providers.text import mend
from coder.sessions.database import DamageError, StoreError
from coder.sessions.store import Row, SessionInfo, SessionLock, Store, dumps, to_model_messages
from coder.types import Message, RunResult

log = logging.getLogger("coder.sessions")

KEPT = {"message_end", "tool_start", "tool_end", "step_end", "compacted", "run_end", "nested"}
DUE = {"tool_start", "compacted", "run_end"}  # behind which it is written at once


def fork(store: Store, session_id: str) -> str:
    """Copy the messages of a session into a new one, to go on with; its id. Raises StoreError."""
    old = store.get(session_id)
    names = {"title": old.title, "agent": old.agent, "model": old.model}
    info = store.create(old.directory, parent=old.id, forked=True, **names)
    recorder = Recorder(store, info, to_model_messages(store, old.id))
    recorder.close()
    if recorder.problem or not recorder.messages:
        raise StoreError(recorder.problem or f"The session {old.id} has no message to copy.")
    return info.id


class Recorder:
    """Writes a session: a subscriber of its runs' events. Raises StoreError where another process has it.

    `messages` is the list that the runs work on; without it the session is read. Where writing fails, `tell` is called
    once with a line for the user, and the end of each run tries again; `problem` is the line while it fails, else "".
    """

    def __init__(
        self,
        store: Store,
        info: SessionInfo,
        messages: list[Message] | None = None,
        *,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.store, self.info, self.tell = store, info, tell
        self.session_id, self.problem = info.id, ""
        self.taken = False  # by an Agent, whose conversation it is
        self._rows: list[Row] | None = None  # None: what is in the file has to be read
        self._generation = 0  # of the file in which they are
        self._waiting: list[Event] = []  # for the next transaction
        self._calls: dict[str, int] = {}  # the newest part of each call id
        self._lock = SessionLock(store.path, info.id)
        try:
            if messages is None:
                rows = self._read_rows()
                messages = to_model_messages(store, info.id, tell, rows)
                self._rows = rows
            self.messages = messages
        except BaseException:
            self._lock.release()
            raise

    def __call__(self, event: Event) -> None:
        if event.type not in KEPT:
            return
        names_task = isinstance(event, events.Nested) and event.session_id and _is_prompt(event)
        if event.type == "nested" and not names_task and not events.hidden_usage(event):
            return
        self._waiting.append(event)
        has_results = isinstance(event, events.StepEnd) and event.tool_results
        due = _is_prompt(event) or has_results or event.type in DUE
        if due and (not self.problem or isinstance(event, events.RunEnd)):
            self.sync()

    def watch(self, run: Generator[Event, None, RunResult]) -> Generator[Event, None, RunResult]:
        """The events of a run on `messages`, which is written. Raises ValueError behind one that worked on another list."""
        try:
            with events.Returning(run) as watched:
                for event in watched:
                    self(event)
                    yield event
        finally:
            self.sync()
        result = watched.value
        if result.messages is not self.messages:
            raise ValueError("the run had another list than its session's `messages`")
        return result

    def close(self) -> None:
        """Write what has changed and release the session."""
        self.sync()
        self._lock.release()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def sync(self) -> None:
        """Write what has changed in the list, also outside of a run, in one transaction."""
        try:
            try:
                self._write()
            except DamageError:  # a new file was begun, and gets all that is in memory
                self._write()
        except (StoreError, ValueError) as error:
            if not self.problem:
                self.problem = f"{error} The conversation goes on, but is not saved."
                self.tell(self.problem)
        else:
            if self.problem:
                self.problem = ""
                self.tell("The conversation is saved again.")

    def _write(self) -> None:
        # A failure leaves it unknown, and so does an interrupt behind the commit
        rows, self._rows = self._rows, None
        if rows is None or self._generation != self.store.generation:
            rows = self._match(self._read_rows())
        waiting = self._waiting
        differs = map(is_not, map(attrgetter("message"), rows), self.messages)
        place = [*differs, True].index(True)  # of the first other object
        same = len(rows) == len(self.messages) == place
        if same and not waiting and all(row.copy == row.message for row in rows):
            self._rows = rows
            return
        ends = [event.usage for event in waiting if isinstance(event, events.RunEnd)]
        usage = sum([*ends, *filter(None, map(events.hidden_usage, waiting))], self.info.usage)
        info = replace(self.info, updated=now(), usage=usage)
        with self.store.transaction() as db:
            info.write(db)
            self._write_all(db, rows, place)
        self._rows, self.info, self._waiting = rows, info, []

    def _read_rows(self) -> list[Row]:
        self._generation = self.store.generation  # first: reading may bring a new file
        rows = self.store.rows_sent(self.session_id)
        calls = "SELECT call_id, id FROM part WHERE session = ? AND type = 'tool' ORDER BY id"
        self._calls = dict(map(tuple, self.store.rows(calls, self.session_id)))
        return rows

    def _match(self, rows: list[Row]) -> list[Row]:
        """Rows of the file; one with the text of a message of the list is this message."""
        ours = defaultdict[str, list[Message]](list)
        for message in reversed(self.messages):
            ours[dumps(message)].append(message)
        for row in rows:
            if same := ours[dumps(row.copy)]:
                row.message = same.pop()
        return rows

    # -- in one transaction

    def _write_all(self, db: sqlite3.Connection, rows: list[Row], place: int) -> None:
        """Bring `rows`, also in the file, to what the list and the waiting events tell. `place`: the first difference."""
        waiting = self._waiting
        shortened = any(isinstance(event, events.Compacted) for event in waiting)
        # Within a run the list only grows
        if not waiting or shortened or isinstance(waiting[-1], events.RunEnd):
            for row in rows:
                if row.copy != row.message:
                    _update(db, "message", row.id, data=dumps(row.message))
                    row.copy = copied(row.message)
        newest = max(map(attrgetter("id"), rows), default=0)
        self._write_list(db, rows, place, shortened)
        for event in waiting if rows else ():
            answers = (row.id for row in reversed(rows) if row.message.get("role") == "assistant")
            match event:
                case events.ToolStart(id=call_id, title=title):
                    self._update_call(db, call_id, state="running", title=mend(title), start=now())
                case events.Nested(session_id=child, call_id=call_id) if child:
                    # With which a call that a kill interrupts is answered (store.to_model_messages)
                    named = "UPDATE part SET data = json_set(data, '$.task_id', ?) WHERE id = ?"
                    db.execute(named, (child, self._calls.get(mend(call_id), 0)))
                case events.ToolEnd():
                    self._write_result(db, event)
                case events.StepEnd(finish_reason=reason, usage=usage) if event.message:
                    tokens = dumps(asdict(usage))
                    _update(db, "message", next(answers, 0), finish=reason, tokens=tokens)
                case events.Compacted():
                    data = {name: each for name, each in event.to_dict().items() if name != "type"}
                    new = (row.id for row in rows if row.id > newest)  # of a summary
                    values = {"message": next(new, rows[-1].id), "type": "compaction"}
                    self._insert(db, "part", **values, data=dumps(data))
                case events.RunEnd(stop_reason=reason) if reason != "stop":
                    why = {"stop_reason": reason, "message": event.text}
                    why |= event.error.to_dict() if event.error else {}
                    _update(db, "message", rows[-1].id, error=dumps(why))

    def _write_list(
        self, db: sqlite3.Connection, rows: list[Row], place: int, shortened: bool
    ) -> None:
        """From the first difference on, the rows of the messages. One that is still there keeps its row, moved to the
        end; so does one that was repaired: another of the same role stands in its place. All others get new rows;
        those of messages that are gone become inactive."""
        query = "SELECT coalesce(max(position), -1) FROM message WHERE session = ?"
        [last] = db.execute(query, (self.session_id,)).fetchone()
        messages, old, rows[place:] = self.messages[place:], rows[place:], []
        free, staying = {id(row.message): row for row in old}, set(map(id, messages))
        places = chain([] if shortened else old, repeat(None))
        for position, (message, before) in enumerate(zip(messages, places), last + 1):
            row = free.pop(id(message), None)
            if not row and before and id(before.message) not in staying:
                is_mended = before.message.get("role") == message.get("role")
                row = free.pop(id(before.message), None) if is_mended else None
            if row:
                _update(db, "message", row.id, position=position, data=dumps(message))
            row_id = row.id if row else self._insert_message(db, message, position)
            rows.append(Row(row_id, message, copied(message)))
        used = {row.id for row in rows[place:]}
        for row in old:
            if row.id not in used:
                _update(db, "message", row.id, active=0)

    def _insert_message(self, db: sqlite3.Connection, message: Message, position: int) -> int:
        """Its row; that of an answer with its calls, that of a result with the end of its call."""
        role, completed = str(message.get("role") or ""), now()
        values = {"role": role, "completed": completed if role == "assistant" else None}
        row_id = self._insert(db, "message", position=position, **values, data=dumps(message))
        for call in calls_of(checked_message(message) or {}):
            name, call_id = call["function"]["name"], mend(call["id"])
            values = {"call_id": call_id, "state": "pending", "title": mend(name)}
            values |= {"message": row_id, "type": "tool", "data": dumps({"name": name})}
            self._calls[call_id] = self._insert(db, "part", **values)
        if role == "tool":
            state = "failed" if (message.get("meta") or {}).get("is_error") else "completed"
            call_id = str(message.get("tool_call_id"))
            self._update_call(db, call_id, state=state, end=completed)
        return row_id

    def _write_result(self, db: sqlite3.Connection, event: events.ToolEnd) -> None:
        """What a tool has for programs; its result is in the list."""
        details = event.result.details
        data = {"name": event.name, "details": details, "seconds": event.seconds}
        self._update_call(db, event.id, data=dumps(data))
        items = details.get("todo") if event.name == "todo" else None
        if isinstance(items, list):
            db.execute("DELETE FROM todo WHERE session = ?", (self.session_id,))
            for at, item in enumerate(item for item in items if isinstance(item, dict)):
                texts = {name: mend(str(item.get(name))) for name in ("text", "status")}
                self._insert(db, "todo", position=at, **texts)

    def _update_call(self, db: sqlite3.Connection, call_id: str, **columns: Any) -> None:
        _update(db, "part", self._calls.get(mend(call_id), 0), **columns)

    def _insert(self, db: sqlite3.Connection, table: str, **columns: Any) -> int:
        names = ", ".join(("session", *columns))
        marks = ", ".join("?" * (len(columns) + 1))
        values = (self.session_id, *columns.values())
        return db.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", values).lastrowid or 0


def _is_prompt(event: Event) -> bool:
    """A message of the user's, or of the agent whose task this is."""
    inner = events.innermost(event)
    return isinstance(inner, events.MessageEnd) and inner.message.get("role") == "user"


def _update(db: sqlite3.Connection, table: str, row_id: int, **columns: Any) -> None:
    names = ", ".join(f'"{name}" = ?' for name in columns)
    db.execute(f"UPDATE {table} SET {names} WHERE id = ?", (*columns.values(), row_id))


class SessionStore(Store):
    """A store for a program of the user's own; what it has opened is closed with it. Raises StoreError."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
        self._sessions: list[Recorder] = []

    def open(self, session_id: str = "", *, directory: Path | str = "") -> Recorder:
        """A conversation that is kept: the one with this id, or beginning of one, or a new one of
        `directory` (the present folder, if none is given). Problems go to the logger "coder.sessions"."""
        new = self.create(str(directory or Path.cwd())) if not session_id else None
        self._sessions.append(Recorder(self, new or self.find(session_id), tell=log.warning))
        return self._sessions[-1]

    def close(self) -> None:
        """Close the file, and before it the sessions that are open."""
        for session in self._sessions:
            session.close()
        super().close()
