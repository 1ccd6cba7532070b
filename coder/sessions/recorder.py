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
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, repeat
from operator import attrgetter, is_not
from pathlib import Path
from typing import Any

from coder import events
from coder.events import Event
from coder.history import calls_of, formed, now
from coder.providers.request import copied
from coder.providers.text import mend
from coder.sessions.store import (
    ACTIVE,
    SessionInfo,
    SessionLock,
    Store,
    StoreError,
    dumps,
    to_model_messages,
    write_info,
)
from coder.types import Message, RunResult

log = logging.getLogger("coder.sessions")

KEPT = {"message_end", "tool_start", "tool_end", "step_end", "compacted", "run_end", "nested"}


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


@dataclass(slots=True)
class Row:
    """An active row of the table: its id, the message in the list, and a copy as it was written."""

    id: int
    message: Message
    copy: Message


class Recorder:
    """Writes a session: a subscriber of its runs' events. Raises StoreError where another process has it.

    `messages` is the list that the runs work on. Without it the session is read, and `recorder.messages`
    is the list. Where writing fails, `tell` is called once with a line for the user, the conversation
    continues in memory, and the end of each run tries again; `problem` is the line while it fails, else "".
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
        self._waiting: list[Event] = []
        self._lock: SessionLock | None = SessionLock(store.path, info.id)
        try:
            if messages is None:
                messages = to_model_messages(store, info.id, tell)
            self.messages = messages
        except BaseException:
            self._lock.release()
            raise

    def __call__(self, event: Event) -> None:
        if event.type not in KEPT or (event.type == "nested" and not events.hidden_usage(event)):
            return
        self._waiting.append(event)
        if _is_due(event) and (not self.problem or isinstance(event, events.RunEnd)):
            self._save()

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
            raise ValueError(
                "the run worked on another list than the `messages` of its session, so that it was not kept"
            )
        return result

    def sync(self) -> None:
        """Write what has changed in the list, also outside of a run."""
        self._save()

    def close(self) -> None:
        """Write what has changed and release the session."""
        if self._lock:
            self.sync()
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _save(self) -> None:
        """One transaction. A damaged file is replaced, and all that is in memory written into the new one."""
        waiting, self._waiting = self._waiting, []
        try:
            try:
                self._write(waiting)
            except StoreError as error:
                if not error.damaged:
                    raise
                self._write(waiting)
        except (StoreError, ValueError) as error:
            self._waiting = waiting
            if not self.problem:
                self.problem = f"{error} The conversation goes on, but is not saved."
                self.tell(self.problem)
            return
        if self.problem:
            self.problem = ""
            self.tell("The conversation is saved again.")

    def _write(self, waiting: Sequence[Event]) -> None:
        # A failure leaves it unknown, and so does an interrupt behind the commit
        rows, self._rows = self._rows, None
        if rows is None or self._generation != self.store.generation:
            rows = self._rows_in_file()
        same = len(rows) == len(self.messages) == _first_difference(rows, self.messages)
        if same and not waiting and all(row.copy == row.message for row in rows):
            self._rows = rows
            return
        ends = [event.usage for event in waiting if isinstance(event, events.RunEnd)]
        usage = sum([*ends, *filter(None, map(events.hidden_usage, waiting))], self.info.usage)
        info = replace(self.info, updated=now(), usage=usage)
        with self.store.transaction() as db:
            write_info(db, info)
            Transaction(db, info.id, rows).write(self.messages, waiting)
        self._rows, self.info = rows, info

    def _rows_in_file(self) -> list[Row]:
        """The active rows. One with the text of a message of ours is this message, others are to go."""
        ours = defaultdict[str, list[Message]](list)
        for message in reversed(self.messages):
            ours[dumps(message)].append(message)
        rows = []
        for row in self.store.rows(ACTIVE, self.session_id):
            same = ours[row["data"]]
            message = same.pop() if same else {"role": row["role"]}
            rows.append(Row(row["id"], message, copied(message)))
        self._generation = self.store.generation
        return rows


def _is_due(event: Event) -> bool:
    """Is it written now, and not with what follows at once: the end of the step, or the next call?"""
    match event:
        case events.MessageEnd(message=message):
            return message.get("role") == "user"
        case events.StepEnd(tool_results=results):
            return bool(results)
    return isinstance(event, events.ToolStart | events.Compacted | events.RunEnd)


def _first_difference(rows: Sequence[Row], messages: Sequence[Message]) -> int:
    """The first place at which a list has another object than the rows."""
    differs = list(map(is_not, map(attrgetter("message"), rows), messages))
    return differs.index(True) if True in differs else len(differs)


class Transaction:
    """The statements that bring the rows of a session to what a list and the events of its runs tell."""

    def __init__(self, db: sqlite3.Connection, session_id: str, rows: list[Row]) -> None:
        self.db, self.session_id, self.rows = db, session_id, rows
        self._new: list[int] = []  # rows
        newest = "SELECT coalesce(max(position), -1) FROM message WHERE session = ?"
        self._position: int = db.execute(newest, (session_id,)).fetchone()[0]

    def write(self, messages: Sequence[Message], waiting: Sequence[Event]) -> None:
        shortened = any(isinstance(event, events.Compacted) for event in waiting)
        # Within a run the list only grows
        if not waiting or shortened or isinstance(waiting[-1], events.RunEnd):
            for row in self.rows:
                if row.copy != row.message:
                    self._update("message", row.id, data=dumps(row.message))
                    row.copy = copied(row.message)
        self._write_list(messages, shortened)
        for event in waiting:
            self._write_event(event)

    def _write_list(self, messages: Sequence[Message], shortened: bool) -> None:
        """From the first difference on, the rows of `messages`.

        A message that is still there keeps its row, moved to the end. So does one that was repaired, for which
        another of the same role stands in its place. All others get new rows; those of messages that are gone
        become inactive.
        """
        place = _first_difference(self.rows, messages)
        old, self.rows[place:] = self.rows[place:], []
        rows, unused = {id(row.message): row.id for row in old}, {row.id for row in old}
        staying = set(map(id, messages[place:]))
        for message, before in zip(messages[place:], chain(old, repeat(None))):
            row_id = rows.pop(id(message), 0)
            replaced = before and not (row_id or shortened or id(before.message) in staying)
            if before and replaced and before.message.get("role") == message.get("role"):
                row_id = rows.pop(id(before.message), 0)
            if row_id:
                self._position += 1
                values = {"data": dumps(message)} if replaced else {}
                self._update("message", row_id, position=self._position, **values)
            row_id = row_id or self._insert(message)
            unused.discard(row_id)
            self.rows.append(Row(row_id, message, copied(message)))
        for row_id in unused:
            self._update("message", row_id, active=0)

    def _insert(self, message: Message) -> int:
        self._position += 1
        role = str(message.get("role") or "")
        completed = now() if role == "assistant" else None
        values = {"position": self._position, "role": role, "completed": completed}
        row_id = self._add("message", **values, data=dumps(message))
        self._new.append(row_id)
        for call in calls_of(formed(message) or {}):
            name, data = mend(call["function"]["name"]), dumps({"name": call["function"]["name"]})
            values = {"call_id": mend(call["id"]), "state": "pending", "title": name, "data": data}
            self._add("part", message=row_id, type="tool", **values)
        if role == "tool":
            self._finish_call(message)
        return row_id

    def _write_event(self, event: Event) -> None:
        match event:
            case events.ToolStart(id=call_id, title=title):
                self._update_call(call_id, state="running", title=mend(title), start=now())
            case events.ToolEnd():
                self._write_result(event)
            case events.StepEnd(finish_reason=reason, usage=usage) if event.message:
                self._update("message", self._answer(), finish=reason, tokens=dumps(asdict(usage)))
            case events.Compacted() if self.rows:
                data = {name: value for name, value in event.to_dict().items() if name != "type"}
                first = [*self._new, self.rows[-1].id][0]  # for a summary, the row of it
                self._add("part", message=first, type="compaction", data=dumps(data))
            case events.RunEnd(stop_reason=reason) if reason != "stop" and self.rows:
                why = {"stop_reason": reason, "message": event.text}
                why |= event.error.to_dict() if event.error else {}
                self._update("message", self.rows[-1].id, error=dumps(why))

    def _write_result(self, event: events.ToolEnd) -> None:
        """The end of a call; its result is in the list."""
        details = event.result.details
        data = {"name": event.name, "details": details, "seconds": event.seconds}
        state = "failed" if event.is_error else "completed"
        self._update_call(event.id, state=state, end=now(), data=dumps(data))
        items = details.get("todo") if event.name == "todo" else None
        if isinstance(items, list):
            self.db.execute("DELETE FROM todo WHERE session = ?", (self.session_id,))
            for at, item in enumerate(item for item in items if isinstance(item, dict)):
                text, status = mend(str(item.get("text"))), mend(str(item.get("status")))
                self._add("todo", position=at, text=text, status=status)

    def _finish_call(self, message: Message) -> None:
        """The result of a call has come into the list: where no event told its end, this is it."""
        is_error = bool((message.get("meta") or {}).get("is_error"))
        call_id = mend(str(message.get("tool_call_id")))
        self.db.execute(
            'UPDATE part SET state = iif("end", state, ?), "end" = coalesce("end", ?) '
            "WHERE message = ? AND call_id = ?",
            ("failed" if is_error else "completed", now(), self._answer(), call_id),
        )

    def _answer(self) -> int:
        """The row of the newest answer, whose calls are at work."""
        answers = (row.id for row in reversed(self.rows) if row.message.get("role") == "assistant")
        return next(answers, 0)

    def _update_call(self, call_id: str, **columns: Any) -> None:
        names = ", ".join(f'"{name}" = ?' for name in columns)
        values = (*columns.values(), self._answer(), mend(call_id))
        self.db.execute(f"UPDATE part SET {names} WHERE message = ? AND call_id = ?", values)

    def _add(self, table: str, **columns: Any) -> int:
        names = ", ".join(f'"{name}"' for name in ("session", *columns))
        marks = ", ".join("?" * (len(columns) + 1))
        values = (self.session_id, *columns.values())
        row = self.db.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", values)
        return row.lastrowid or 0

    def _update(self, table: str, row_id: int, **columns: Any) -> None:
        names = ", ".join(f'"{name}" = ?' for name in columns)
        self.db.execute(f"UPDATE {table} SET {names} WHERE id = ?", (*columns.values(), row_id))


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
