"""Sessions: a conversation written down while it happens, and read again.

    with SessionStore("sessions.db") as store:
        session = store.open()  # a new one; open(id) continues an existing one
        agent = Agent("gpt-5", session=session)
        run = session.watch(run_loop(session.messages, model, prompt="Go on."))  # without an Agent

The active rows of a session are its list of messages, exactly; one that a compaction replaces is
kept, but is not active. The state of each tool call is written before the tool runs, so that a
kill costs at most the answer that was coming.
"""

from __future__ import annotations

import operator
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Generator
from dataclasses import asdict, replace
from typing import Any

from coder import events
from coder.events import Event
from coder.history import calls_of, checked_message, now
from coder.providers.text import dictionaries, mend
from coder.providers.wire import copied, count_alike
from coder.sessions.database import DamageError, StoreError
from coder.sessions.session_lock import SessionLock
from coder.sessions.store import (
    Row,
    SessionInfo,
    Store,
    dumps,
    newest_answer,
    to_model_messages,
)
from coder.types import Message, RunResult, Usage

KEPT = {"message_end", "tool_start", "tool_end", "step_end", "compacted", "run_end"}
DUE = {"tool_start", "compacted", "run_end"}  # after these it is written at once


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
    """Writes a session: a subscriber of its runs' events. Raises StoreError if another process has
    it.

    `messages` is the list that the runs work on; without it the session is read. If writing fails,
    `tell` is called once with a line for the user, and the end of each run tries again; `problem`
    is the line while it fails, else "".
    """

    def __init__(
        self,
        store: Store,
        info: SessionInfo,
        messages: list[Message] | None = None,
        *,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.store = store
        self.info = info
        self.tell = tell
        self.session_id = info.id
        self.problem = ""
        self.taken = False  # by an Agent, whose conversation it is
        self._rows: list[Row] | None = None  # None: what is in the file has to be read
        self._written: list[Message] = []  # the messages of the rows, the same objects
        self._generation = 0  # of the file that was read: the store may begin a new one
        self._waiting: list[Event] = []  # for the next transaction
        self._calls: dict[str, int] = {}  # by call id: the newest part, as far as it was needed
        self._lock = SessionLock(store.path, info.id)
        try:
            if messages is None:
                self._rows = self._read_rows()
                self._written = [row.message for row in self._rows]
                messages = to_model_messages(store, info.id, tell, self._rows)
            self.messages = messages
        except BaseException:
            self._lock.release()
            raise

    def __call__(self, event: Event) -> None:
        if not _is_kept(event):
            return
        self._waiting.append(event)
        may_write = not self.problem or isinstance(event, events.RunEnd)
        if may_write and _is_due(event):
            self.sync()

    def watch(self, run: Generator[Event, None, RunResult]) -> Generator[Event, None, RunResult]:
        """The events of a run on `messages`, which is written.

        Raises ValueError if it worked on another list.
        """
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

    def sync(self, *, in_place: bool = True) -> None:
        """Write what has changed in the list, also outside of a run, in one transaction.
        `in_place`: also a message that is the same object, for which all have to be compared."""
        try:
            try:
                self._write(in_place)
            except DamageError:  # a new file was begun, and gets all that is in memory
                self._write(in_place)
        except (StoreError, ValueError) as error:
            if not self.problem:
                self.problem = f"{error} The conversation goes on, but is not saved."
                self.tell(self.problem)
        else:
            if self.problem:
                self.problem = ""
                self.tell("The conversation is saved again.")

    def _write(self, in_place: bool) -> None:
        # The rows as they are in the file
        rows = self._rows
        if rows is None or self._generation != self.store.generation:
            rows = self._match(self._read_rows())
            self._written = [row.message for row in rows]

        # Unknown until all is done: after a failure or an interrupt the file is read again
        self._rows = None

        # Nothing to do: the list has the same messages, none changed in place, and no event waits
        known = self._count_known()
        is_same = len(rows) == len(self.messages) == known and not self._waiting
        if is_same and in_place:
            is_same = [row.copy for row in rows] == self._written
        if is_same:
            self._rows = rows
            return

        # The session, its messages and what the events say, or nothing of it
        info = replace(self.info, updated=now(), usage=self._usage())
        with self.store.transaction() as db:
            info.write(db)
            self._write_changes(db, rows, known)
        self._rows = rows
        self.info = info
        self._waiting = []

    def _count_known(self) -> int:
        """How many rows at the beginning have the messages of the list.

        Within a run the last row tells: the list grows, and what was changed or replaced before it
        is written at the end of the run.
        """
        written = self._written
        if not written:
            return 0
        last = len(written) - 1
        has_last = last < len(self.messages) and self.messages[last] is written[last]
        if has_last and self._is_in_run():
            return len(written)
        return count_alike(operator.is_, written, self.messages)

    def _is_in_run(self) -> bool:
        """Does a run go on that has not shortened the list?"""
        waiting = self._waiting
        is_running = bool(waiting) and not isinstance(waiting[-1], events.RunEnd)
        return is_running and not self._was_shortened()

    def _usage(self) -> Usage:
        """That of the session, with the runs and hidden agents that have ended meanwhile."""
        usage = self.info.usage
        for event in self._waiting:
            if isinstance(event, events.RunEnd):
                usage += event.usage
            hidden = events.hidden_usage(event)
            if hidden:
                usage += hidden
        return usage

    def _read_rows(self) -> list[Row]:
        self._generation = self.store.generation  # first: reading may bring a new file
        self._calls = {}  # they may be of another file
        return self.store.rows_sent(self.session_id)

    def _match(self, rows: list[Row]) -> list[Row]:
        """Rows of the file; one with the text of a message of the list gets this message."""
        by_text = defaultdict[str, list[Message]](list)
        for message in reversed(self.messages):
            by_text[dumps(message)].append(message)
        for row in rows:
            same = by_text[dumps(row.copy)]
            if same:
                row.message = same.pop()
        return rows

    def _write_changes(self, db: sqlite3.Connection, rows: list[Row], known: int) -> None:
        """Bring `rows`, also in the file, to what the list and the waiting events say, in a
        transaction. `known`: see `_count_known`."""
        if not self._is_in_run():  # else the list has only grown
            for row in rows:
                if row.copy != row.message:  # it was changed in place
                    _update(db, "message", row.id, data=dumps(row.message))
                    row.copy = copied(row.message)
        new = self._write_list(db, rows, known)
        if rows:
            first_new = new[0] if new else rows[-1].id
            for event in self._waiting:
                self._write_event(db, event, rows, first_new)

    def _write_event(
        self, db: sqlite3.Connection, event: Event, rows: list[Row], first_new: int
    ) -> None:
        """What an event says of a message or a call; `rows` are those of the list by now."""
        match event:
            case events.ToolStart():
                title = mend(event.title)
                self._update_call(db, event.id, state="running", title=title, start=now())
            case events.Nested(session_id=child) if child:
                # Its session, which `to_model_messages` names if a kill interrupts the call
                part = self._part_of(db, event.call_id)
                update = "UPDATE part SET data = json_set(data, '$.task_id', ?) WHERE id = ?"
                db.execute(update, (child, part))
            case events.ToolEnd():
                self._write_result(db, event)
            case events.StepEnd() if event.message:
                tokens = dumps(asdict(event.usage))
                answer = newest_answer(rows)
                _update(db, "message", answer, finish=event.finish_reason, tokens=tokens)
            case events.Compacted():
                data = event.to_dict()
                del data["type"]
                # The first new message is the summary
                self._insert(db, "part", message=first_new, type="compaction", data=dumps(data))
            case events.RunEnd(stop_reason=reason) if reason != "stop":
                why = {"stop_reason": reason, "message": event.text}
                if event.error:
                    why |= event.error.to_dict()
                _update(db, "message", rows[-1].id, error=dumps(why))

    def _write_list(self, db: sqlite3.Connection, rows: list[Row], known: int) -> list[int]:
        """Write the list from the first difference on; the ids of the rows that are new.

        A message that is still there keeps its row, moved to the end; so does one that was
        repaired. All others get new rows; those of messages that are gone become inactive.
        """
        query = "SELECT coalesce(max(position), -1) FROM message WHERE session = ?"
        [last] = db.execute(query, (self.session_id,)).fetchone()
        messages = self.messages[known:]
        old = rows[known:]
        del rows[known:]
        kept = self._rows_to_keep(old, messages)
        new = []
        for position, message in enumerate(messages, last + 1):
            row = kept.pop(id(message), None)
            if row:
                row_id = row.id
                _update(db, "message", row_id, position=position, data=dumps(message))
            else:
                row_id = self._insert_message(db, message, position)
                new.append(row_id)
            rows.append(Row(row_id, message, copied(message)))
        self._written[known:] = messages
        used = {row.id for row in rows[known:]}
        for row in old:
            if row.id not in used:
                _update(db, "message", row.id, active=0)
        return new

    def _rows_to_keep(self, old: list[Row], messages: list[Message]) -> dict[int, Row]:
        """The old rows that messages of the list go on to have, by the `id` of the message."""
        staying = {id(message) for message in messages}
        kept = {id(row.message): row for row in old if id(row.message) in staying}
        if self._was_shortened():
            return kept
        for row, message in zip(old, messages):
            # A repaired message is another object of the same role at the same index
            is_gone = id(row.message) not in staying
            if is_gone and row.message.get("role") == message.get("role"):
                kept.setdefault(id(message), row)
        return kept

    def _was_shortened(self) -> bool:
        return any(isinstance(event, events.Compacted) for event in self._waiting)

    def _insert_message(self, db: sqlite3.Connection, message: Message, position: int) -> int:
        """Its row: of an answer with its calls, of a result with the end of its call."""
        role = str(message.get("role") or "")
        time = now()
        row_id = self._insert(
            db,
            "message",
            position=position,
            role=role,
            completed=time if role == "assistant" else None,
            data=dumps(message),
        )
        for call in calls_of(checked_message(message) or {}):
            name = call["function"]["name"]
            call_id = mend(call["id"])
            self._calls[call_id] = self._insert(
                db,
                "part",
                message=row_id,
                type="tool",
                call_id=call_id,
                state="pending",
                title=mend(name),
                data=dumps({"name": name}),
            )
        if role == "tool":
            is_error = (message.get("meta") or {}).get("is_error")
            state = "failed" if is_error else "completed"
            self._update_call(db, str(message.get("tool_call_id")), state=state, end=time)
        return row_id

    def _write_result(self, db: sqlite3.Connection, event: events.ToolEnd) -> None:
        """What a tool has for programs; its result is in the list."""
        details = event.result.details
        data = {"name": event.name, "details": details, "seconds": event.seconds}
        self._update_call(db, event.id, data=dumps(data))
        if event.name != "todo" or not isinstance(details.get("todo"), list):
            return
        db.execute("DELETE FROM todo WHERE session = ?", (self.session_id,))
        for position, item in enumerate(dictionaries(details["todo"])):
            text = mend(str(item.get("text")))
            status = mend(str(item.get("status")))
            self._insert(db, "todo", position=position, text=text, status=status)

    def _update_call(self, db: sqlite3.Connection, call_id: str, **columns: Any) -> None:
        _update(db, "part", self._part_of(db, call_id), **columns)

    def _part_of(self, db: sqlite3.Connection, call_id: str) -> int:
        """The newest part of a call; 0 if it has none."""
        known = mend(call_id)
        if known not in self._calls:  # it was made before the session was read
            newest = "SELECT coalesce(max(id), 0) FROM part WHERE session = ? AND call_id = ?"
            [self._calls[known]] = db.execute(newest, (self.session_id, known)).fetchone()
        return self._calls[known]

    def _insert(self, db: sqlite3.Connection, table: str, **columns: Any) -> int:
        names = ", ".join(("session", *columns))
        marks = ", ".join("?" * (len(columns) + 1))
        values = (self.session_id, *columns.values())
        return db.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", values).lastrowid or 0


def _is_kept(event: Event) -> bool:
    """Is it written? Of a sub-agent only that there is one, and what its run used."""
    if isinstance(event, events.Nested):
        names_task = bool(event.session_id) and _is_prompt(event)
        return names_task or events.hidden_usage(event) is not None
    return event.type in KEPT


def _is_due(event: Event) -> bool:
    """Is it to be written at once?"""
    if isinstance(event, events.StepEnd):
        return bool(event.tool_results)
    return event.type in DUE or _is_prompt(event)


def _is_prompt(event: Event) -> bool:
    """Is it a message of the user, or of the agent whose task this is?"""
    inner = events.innermost(event)
    return isinstance(inner, events.MessageEnd) and inner.message.get("role") == "user"


def _update(db: sqlite3.Connection, table: str, row_id: int, **columns: Any) -> None:
    names = ", ".join(f'"{name}" = ?' for name in columns)
    db.execute(f"UPDATE {table} SET {names} WHERE id = ?", (*columns.values(), row_id))
