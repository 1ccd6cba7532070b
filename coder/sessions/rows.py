"""The rows of one session: how its list of messages and the events of its runs stand in the database.

A message is a row; its parts are what is shown and searched of it, and the states of its tool calls.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from operator import is_
from typing import Any, Literal

from coder.events import (
    Compacted,
    Event,
    RunEnd,
    RunStart,
    StepEnd,
    ToolEnd,
    ToolStart,
    hidden_usage,
)
from coder.history import calls_of, formed, now, text_of
from coder.providers.profiles import REASONING, THINK
from coder.providers.request import copied
from coder.providers.text import mend, mend_all
from coder.sessions.store import Store, Todo, add_usage, set_todos
from coder.types import Message

PartType = Literal["text", "reasoning", "tool", "compaction", "snapshot"]


def dumps(value: Any) -> str:
    """JSON that the database takes and `loaded` gives back, also lone surrogates. Raises ValueError."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
        with suppress(UnicodeEncodeError):
            text.encode()
            return text
        return json.dumps(value, default=str)
    except (TypeError, RecursionError) as error:  # a key that is no text; too many levels
        raise ValueError(str(error)) from None


def loaded(text: Any) -> Any:
    """What `dumps` wrote; None for what is no JSON, or is nested too deeply to be sent or written again."""
    with suppress(TypeError, ValueError, RecursionError):
        value = json.loads(text)
        mend_all(value)
        return value
    return None


def first_difference(before: Sequence[Message], after: Sequence[Message]) -> int | None:
    """The first place at which two lists have different objects."""
    same = list(map(is_, before, after))
    if False in same:
        return same.index(False)
    return None if len(before) == len(after) else len(same)


class SessionRows:
    """What is in the database of a session, and writing more of it.

    `seen` are the messages as objects of the list, `copies` the same as they were written, `ids` their rows.
    """

    def __init__(self, store: Store, session_id: str, seen: list[Message], ids: list[int]) -> None:
        self.session_id, self.seen, self.ids = session_id, seen, ids
        self.copies: list[Message] = copied(seen)
        newest = "SELECT max(position) AS newest FROM message WHERE session = ?"
        place = store.rows(newest, session_id)[0]["newest"]
        self._next = 0 if place is None else place + 1
        calls = (
            "SELECT id, call_id FROM part WHERE type = 'tool' AND message = "
            "(SELECT max(id) FROM message WHERE session = ? AND role = 'assistant')"
        )
        # The parts of the newest calls
        self._calls = {row["call_id"]: row["id"] for row in store.rows(calls, session_id)}
        # Parts of calls whose results came into the list -> an error?
        self._answered: dict[int, bool] = {}
        self._summary: int | None = None  # the row of a summary that came into the list

    def write(
        self,
        db: sqlite3.Connection,
        messages: list[Message],
        events: Sequence[Event],
        undo: Sequence[tuple[bool, list[dict[str, Any]]]] = (),
    ) -> None:
        """Write what is new in the list, what the events tell, and records of undo, within a transaction."""
        self.db = db
        self._answered, self._summary = {}, None
        shortened = any(isinstance(event, Compacted) for event in events)
        # Within a run the list grows; elsewhere anything may have happened to it
        last = len(self.seen) - 1
        grew = len(messages) > last and (last < 0 or messages[last] is self.seen[last])
        if not grew or shortened or not events or isinstance(events[-1], RunEnd):
            self._rewrite_changed(messages, shortened)
        for message in messages[len(self.seen) :]:
            self._append(message, self._insert(message))
        for event in events:
            self._write_event(event)
        for part_id, is_error in self._answered.items():
            self._finish_call(part_id, is_error)
        for more, records in undo:
            self._write_undo(more, records)

    def hold(self, messages: list[Message]) -> bool:
        """Is the list in the file as it is now?"""
        return first_difference(self.seen, messages) is None and self.copies == self.seen

    # -- the list

    def _rewrite_changed(self, messages: list[Message], shortened: bool) -> None:
        """Messages that were changed in place; and from the first difference on, the list as it is now."""
        if self.copies != self.seen:
            for at, message in enumerate(self.seen):
                if self.copies[at] != message:
                    self._replace(self.ids[at], message)
            self.copies[:] = copied(self.seen)
        place = first_difference(self.seen, messages)
        if place is not None and place < len(self.seen):
            self._rewrite_from(place, messages[place:], repaired=not shortened)

    def _rewrite_from(self, place: int, messages: list[Message], repaired: bool) -> None:
        """The rows from `place` on are those of `messages`, moved behind all others.

        A message that is still there keeps its row; so does one that was `repaired`, for which another of
        the same role stands in its place. The rows of all others stay, not active.
        """
        old = list(zip(self.seen[place:], self.ids[place:]))
        rows = {id(message): row_id for message, row_id in old}
        kept, unused = set(map(id, messages)), {row_id for _, row_id in old}
        for lists in (self.seen, self.ids, self.copies):
            del lists[place:]
        for at, message in enumerate(messages):
            row_id = rows.pop(id(message), None)
            before = old[at][0] if at < len(old) else None
            if row_id is None and repaired and before is not None and _is_repair(before, message):
                row_id = None if id(before) in kept else rows.pop(id(before), None)
                if row_id is not None:
                    self._replace(row_id, message)
            if row_id is None:
                row_id = self._insert(message)
            else:
                self._update("message", row_id, position=self._position())
            unused.discard(row_id)
            self._append(message, row_id)
        for row_id in unused:
            self._update("message", row_id, active=0)

    def _append(self, message: Message, row_id: int) -> None:
        self.seen.append(message)
        self.copies.append(copied(message))
        self.ids.append(row_id)

    def _position(self) -> int:
        self._next += 1
        return self._next - 1

    def _insert(self, message: Message) -> int:
        role, is_answer = _role(message), _role(message) == "assistant"
        row_id = self._add(
            "message",
            position=self._position(),
            role=role,
            completed=now() if is_answer else None,
            data=dumps(message),
        )
        meta = _meta(message)
        if meta.get("summary"):
            self._summary = self._summary or row_id
        self._add_texts(row_id, message)
        if is_answer:
            self._calls.clear()
        for call in calls_of(formed(message) or {}):
            name = str((call.get("function") or {}).get("name"))
            call_id = str(call.get("id"))
            self._calls[call_id] = self._add_part(
                row_id,
                "tool",
                {"name": name},
                call_id=mend(call_id),
                state="pending",
                title=mend(name),
            )
        part = self._calls.get(str(message.get("tool_call_id"))) if role == "tool" else None
        if part is not None:
            self._answered[part] = bool(meta.get("is_error"))
        return row_id

    def _replace(self, row_id: int, message: Message) -> None:
        """The row of a message that was changed; its calls are the same, with other ids perhaps."""
        self._update("message", row_id, data=dumps(message), role=_role(message))
        texts = "DELETE FROM part WHERE message = ? AND type IN ('text', 'reasoning')"
        self.db.execute(texts, (row_id,))
        self._add_texts(row_id, message)
        query = "SELECT id FROM part WHERE message = ? AND type = 'tool' ORDER BY id"
        parts = self.db.execute(query, (row_id,)).fetchall()
        for part, call in zip(parts, calls_of(formed(message) or {})):
            self._update("part", part["id"], call_id=mend(str(call.get("id"))))
            self._calls[str(call.get("id"))] = part["id"]

    def _add_texts(self, row_id: int, message: Message) -> None:
        """The texts of a message, for search and display."""
        text = text_of(message)
        if text and _role(message) != "tool":
            self._add_part(row_id, "text", text=mend(text))
        thoughts = (message.get(name) for name in (*REASONING, THINK))
        thought = next((each for each in thoughts if isinstance(each, str) and each), "")
        if thought:
            self._add_part(row_id, "reasoning", {"text": thought})

    # -- events

    def _write_event(self, event: Event) -> None:
        match event:
            case ToolStart(id=call_id, title=title):
                self._set_call(call_id, state="running", title=mend(title), start=now())
            case ToolEnd():
                self._write_result(event)
            case StepEnd():
                self._write_step(event)
            case Compacted():
                newest = self.ids[-1] if self.ids else None
                data = {name: value for name, value in event.to_dict().items() if name != "type"}
                self._add_part(self._summary or newest, "compaction", data)
            case RunStart() | RunEnd():
                changed = "UPDATE session SET updated = ? WHERE id = ?"
                self.db.execute(changed, (now(), self.session_id))
        if usage := hidden_usage(event):
            add_usage(self.db, self.session_id, usage)
        if isinstance(event, RunEnd):
            self._write_end(event)

    def _write_result(self, event: ToolEnd) -> None:
        result = event.result
        data = {"name": event.name, "details": result.details, "seconds": event.seconds}
        if self._calls.get(event.id) not in self._answered:  # else it is in the list
            data["content"] = result.content
        state = "failed" if event.is_error else "completed"
        self._set_call(event.id, state=state, end=now(), data=dumps(data))
        items = result.details.get("todo") if event.name == "todo" else None
        if isinstance(items, list):
            facts = [item for item in items if isinstance(item, dict)]
            todos = [Todo(str(item.get("text")), str(item.get("status"))) for item in facts]
            set_todos(self.db, self.session_id, todos)

    def _finish_call(self, part_id: int, is_error: bool) -> None:
        """The result of a call is in the list: its part need not keep it, and has an end."""
        self.db.execute(
            "UPDATE part SET data = iif(json_valid(data), json_remove(data, '$.content'), data), "
            "\"end\" = coalesce(\"end\", ?), state = iif(state IN ('completed', 'failed'), state, ?) "
            "WHERE id = ?",
            (now(), "failed" if is_error else "completed", part_id),
        )

    def _write_step(self, event: StepEnd) -> None:
        places = reversed(range(len(self.seen)))
        at = next((at for at in places if self.seen[at] is event.message), None)
        if at is not None:
            tokens = dumps(asdict(event.usage))
            self._update("message", self.ids[at], finish=event.finish_reason, tokens=tokens)

    def _write_end(self, event: RunEnd) -> None:
        """What the run has used, and why it stopped, unless it was done."""
        add_usage(self.db, self.session_id, event.usage)
        if event.stop_reason != "stop" and self.ids:
            why = {"stop_reason": event.stop_reason, "message": event.text}
            why |= event.error.to_dict() if event.error else {}
            self._update("message", self.ids[-1], error=dumps(why))

    def _write_undo(self, more: bool, records: list[dict[str, Any]]) -> None:
        if not more:
            old = "DELETE FROM part WHERE session = ? AND type = 'snapshot' AND message IS NULL"
            self.db.execute(old, (self.session_id,))
        for record in records:
            self._add_part(None, "snapshot", record)

    # -- statements

    def _set_call(self, call_id: str, **columns: Any) -> None:
        """Another state of a call. One that is in no message (a history that was repaired) has none."""
        if call_id in self._calls:
            self._update("part", self._calls[call_id], **columns)

    def _add_part(
        self, row_id: int | None, kind: PartType, data: dict[str, Any] | None = None, **columns: Any
    ) -> int:
        return self._add("part", message=row_id, type=kind, data=dumps(data or {}), **columns)

    def _add(self, table: str, **columns: Any) -> int:
        names = ", ".join(f'"{name}"' for name in ("session", *columns))
        marks = ", ".join("?" * (len(columns) + 1))
        values = (self.session_id, *columns.values())
        row = self.db.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", values)
        assert row.lastrowid
        return row.lastrowid

    def _update(self, table: str, row_id: int, **columns: Any) -> None:
        names = ", ".join(f'"{name}" = ?' for name in columns)
        self.db.execute(f"UPDATE {table} SET {names} WHERE id = ?", (*columns.values(), row_id))


def _is_repair(before: Message, message: Message) -> bool:
    return _role(before) in (_role(message), "")


def _role(message: Message) -> str:
    return str(message.get("role") or "")


def _meta(message: Message) -> dict[str, Any]:
    meta = message.get("meta")
    return meta if isinstance(meta, dict) else {}
