"""Journal: how a list of messages and the events of its runs become rows.

A message that is new in the list is a new row; one that took the place of another was repaired, and is the same row; one that left
the list stays in the table, not active. The parts are what is shown and searched of a message, and the states of its calls.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from operator import is_
from typing import Any, Literal

from coder.events import Compacted, Event, Nested, RunEnd, RunStart, StepEnd, ToolEnd, ToolStart
from coder.history import calls_of, formed, now, text_of
from coder.providers.reasoning import REASONING, THINK
from coder.providers.request import copied
from coder.providers.text import mend, mend_all
from coder.sessions.store import add_usage
from coder.types import Message, Usage

PartType = Literal["text", "reasoning", "tool", "compaction", "snapshot"]
UNPLACED = -1  # the position of a row until all have theirs


def dumps(value: Any) -> str:
    """JSON that the database takes and `json.loads` gives back, also lone surrogates. Raises ValueError."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
        return text if _encodable(text) else json.dumps(value, default=str)
    except (TypeError, RecursionError) as error:  # a key that is no text; too many levels
        raise ValueError(str(error)) from None


def loaded(text: Any) -> Any:
    """What `dumps` wrote; None for what is no JSON, or is nested too deeply to be sent or written again."""
    with suppress(TypeError, ValueError, RecursionError):
        value = json.loads(text)
        mend_all(value)
        return value
    return None


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass
class Known:
    """What is in the database: the messages as objects of the list, their row ids, copies of them as they were written, and the
    parts of the newest calls."""

    seen: list[Message] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    copies: list[Message] = field(default_factory=list)
    # By call id: row id and data of the part
    calls: dict[str, tuple[int, dict[str, Any]]] = field(default_factory=dict)


def spent(event: Event) -> Usage | None:
    """What a hidden agent has used (the summarising one), whose run ends here: a run's own usage does not hold it, as it
    does that of a sub-agent, which has a session."""
    around, inner = None, event
    while isinstance(inner, Nested):
        around, inner = inner, inner.event
    return inner.usage if isinstance(inner, RunEnd) and around and not around.session_id else None


def same(before: Sequence[Message], after: Sequence[Message]) -> int:
    """The first place at which the objects of two lists differ, -1 where they are the same."""
    alike = list(map(is_, before, after))
    if False in alike:
        return alike.index(False)
    return -1 if len(before) == len(after) else len(alike)


def _role(message: Message) -> str:
    return str(message.get("role") or "")


def _meta(message: Message) -> dict[str, Any]:
    meta = message.get("meta")
    return meta if isinstance(meta, dict) else {}


class Change:
    """One transaction's writing. `known` is changed along."""

    def __init__(self, db: sqlite3.Connection, session_id: str, known: Known) -> None:
        self.db, self.session_id, self.known = db, session_id, known
        self.summary: int | None = None  # row id of a summary that came into the list

    def write(self, messages: list[Message], event: Event | None, compacted: bool) -> None:
        """What is new in the list, and what the event tells. `compacted`: the list was shortened, so that nothing in it is a repair."""
        if isinstance(event, Nested):  # the list is not its business, and may be under change
            add_usage(self.db, self.session_id, spent(event) or Usage())
            return
        self._take(messages, compacted, looked_through=isinstance(event, StepEnd | RunEnd | None))
        match event:
            case ToolStart():
                self._tool(event.id, "running", title=mend(event.title), start=now())
            case ToolEnd():
                data = {
                    "name": event.name,
                    "content": event.result.content,
                    "details": event.result.details,
                    "seconds": event.seconds,
                }
                self._tool(
                    event.id, "failed" if event.is_error else "completed", end=now(), data=data
                )
            case StepEnd():
                self._step(event)
            case Compacted():
                newest = self.known.ids[-1] if self.known.ids else None
                data = {name: value for name, value in event.to_dict().items() if name != "type"}
                self._part(self.summary or newest, "compaction", data=data)
            case RunStart() | RunEnd():
                self.db.execute(
                    "UPDATE session SET updated = ? WHERE id = ?", (now(), self.session_id)
                )
        if isinstance(event, RunEnd):
            self._end(event)

    # -- messages

    def _take(self, messages: list[Message], compacted: bool, looked_through: bool) -> None:
        """Make the table what the list is; `looked_through`: also where a message was changed in place."""
        known, place = self.known, same(self.known.seen, messages)
        if (looked_through or -1 < place < len(known.seen)) and known.copies != known.seen:
            for at, message in enumerate(known.seen):
                if known.copies[at] != message:  # changed in place
                    self._replace(known.ids[at], message)
            known.copies[:] = map(copied, known.seen)
        if place == -1:
            return
        if place < len(known.seen):
            self._rearrange(place, messages[place:], compacted)
        else:
            end = self._end_of_table()
            for offset, message in enumerate(messages[place:]):
                known.ids.append(self._insert(message, end + offset))
        known.seen[:] = messages
        known.copies[place:] = map(copied, messages[place:])

    def _end_of_table(self) -> int:
        row = self.db.execute(
            "SELECT max(position) FROM message WHERE session = ?", (self.session_id,)
        ).fetchone()
        return 0 if row[0] is None else int(row[0]) + 1

    def _rearrange(self, place: int, after: list[Message], compacted: bool) -> None:
        """From `place` on the list has changed: keep the rows of messages that are still there, in their order.

        What took the place of another was repaired, and is the same row; at a compaction, and where nothing took its place,
        the old row stays, not active.
        """
        known = self.known
        before, ids = known.seen[place:], known.ids[place:]
        pairs = list(zip(before, ids))
        del known.ids[place:]
        fresh: dict[
            int | None, list[int]
        ] = {}  # new rows, by the row in front of which they come; None is the end
        old, new = 0, 0
        for kept_old, kept_new in [*_kept(before, after), (len(before), len(after))]:
            anchor = ids[kept_old] if kept_old < len(ids) else None
            fresh[anchor] = self._exchange(pairs[old:kept_old], after[new:kept_new], compacted)
            known.ids += ids[kept_old : kept_old + 1]
            old, new = kept_old + 1, kept_new + 1
        rows = self.db.execute(
            f"SELECT id FROM message WHERE session = ? AND position <> {UNPLACED} ORDER BY position",
            (self.session_id,),
        )
        order = [
            each for row in [*(row[0] for row in rows), None] for each in (*fresh.get(row, ()), row)
        ][:-1]
        self.db.executemany(
            "UPDATE message SET position = ?1 WHERE id = ?2 AND position <> ?1",
            list(enumerate(order)),
        )

    def _exchange(
        self, gone: list[tuple[Message, int]], come: list[Message], compacted: bool
    ) -> list[int]:
        """Put messages in the place of others; returns the ids of new rows."""
        fresh = []
        for message in come:
            if gone and not compacted and _role(gone[0][0]) in (_role(message), ""):
                self._replace(gone[0][1], message)
                self.known.ids.append(gone.pop(0)[1])
            else:
                fresh.append(self._insert(message, UNPLACED))
                self.known.ids.append(fresh[-1])
        self.db.executemany(
            "UPDATE message SET active = 0 WHERE id = ?", [(row_id,) for _, row_id in gone]
        )
        return fresh

    def _insert(self, message: Message, position: int) -> int:
        role = _role(message)
        row = self.db.execute(
            "INSERT INTO message (session, position, role, completed, data) VALUES (?, ?, ?, ?, ?)",
            (
                self.session_id,
                position,
                role,
                now() if role == "assistant" else None,
                dumps(message),
            ),
        )
        assert row.lastrowid
        if _meta(message).get("summary"):
            self.summary = row.lastrowid
        self._parts(row.lastrowid, message)
        if role == "assistant":
            self.known.calls.clear()
        for call in calls_of(formed(message) or {}):
            call_id, data = (
                str(call.get("id")),
                {"name": str((call.get("function") or {}).get("name"))},
            )
            part = self._part(
                row.lastrowid,
                "tool",
                call_id=mend(call_id),
                state="pending",
                title=mend(data["name"]),
                data=data,
            )
            self.known.calls[call_id] = part, data
        if role == "tool":
            self._answered(message)
        return row.lastrowid

    def _replace(self, row_id: int, message: Message) -> None:
        """The row of a message that was repaired; its calls are the same, with other ids perhaps."""
        self.db.execute(
            "UPDATE message SET data = ?, role = ? WHERE id = ?",
            (dumps(message), _role(message), row_id),
        )
        self.db.execute(
            "DELETE FROM part WHERE message = ? AND type IN ('text', 'reasoning')", (row_id,)
        )
        self._parts(row_id, message)
        rows = self.db.execute(
            "SELECT id, data FROM part WHERE message = ? AND type = 'tool' ORDER BY id", (row_id,)
        ).fetchall()
        for row, call in zip(rows, calls_of(formed(message) or {})):
            self.db.execute(
                "UPDATE part SET call_id = ? WHERE id = ?", (mend(str(call.get("id"))), row["id"])
            )
            self.known.calls[str(call.get("id"))] = row["id"], loaded(row["data"]) or {}

    # -- parts

    def _parts(self, row_id: int, message: Message) -> None:
        """The texts of a message, for search and display."""
        text = text_of(message)
        # A role of one's own may have anything for its content
        if text and isinstance(text, str) and _role(message) != "tool":
            self._part(row_id, "text", text=mend(text))
        thought = next(
            (
                message[name]
                for name in (*REASONING, THINK)
                if isinstance(message.get(name), str) and message[name]
            ),
            "",
        )
        if thought:
            self._part(row_id, "reasoning", data={"text": thought})

    def _part(
        self,
        row_id: int | None,
        kind: PartType,
        *,
        data: dict[str, Any] | None = None,
        **columns: Any,
    ) -> int:
        columns |= {
            "session": self.session_id,
            "message": row_id,
            "type": kind,
            "data": dumps(data or {}),
        }
        row = self.db.execute(
            f"INSERT INTO part ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})",
            tuple(columns.values()),
        )
        assert row.lastrowid
        return row.lastrowid

    def _tool(self, call_id: str, state: str, **columns: Any) -> None:
        """Another state of a call. One that is in no message (a history that was repaired) has none."""
        if call_id not in self.known.calls:
            return
        part_id, _ = self.known.calls[call_id]
        if "data" in columns:
            self.known.calls[call_id] = part_id, columns["data"]
            columns["data"] = dumps(columns["data"])
        columns["state"] = state
        names = ", ".join(f'"{name}" = ?' for name in columns)
        self.db.execute(f"UPDATE part SET {names} WHERE id = ?", (*columns.values(), part_id))

    def _answered(self, message: Message) -> None:
        """The result of a call is in the list: the part need not keep it, and has an end, whatever events came."""
        found = self.known.calls.get(str(message.get("tool_call_id")))
        if found is None:
            return
        part_id, data = found
        data = {name: value for name, value in data.items() if name != "content"}
        state = "failed" if _meta(message).get("is_error") else "completed"
        self.db.execute(
            'UPDATE part SET data = ?, "end" = coalesce("end", ?), '
            "state = CASE WHEN state IN ('completed', 'failed') THEN state ELSE ? END WHERE id = ?",
            (dumps(data), now(), state, part_id),
        )

    # -- ends

    def _step(self, event: StepEnd) -> None:
        places = [
            place
            for place in reversed(range(len(self.known.seen)))
            if self.known.seen[place] is event.message
        ]
        if places:
            self.db.execute(
                "UPDATE message SET finish = ?, tokens = ?, completed = coalesce(completed, ?) WHERE id = ?",
                (event.finish_reason, dumps(asdict(event.usage)), now(), self.known.ids[places[0]]),
            )

    def _end(self, event: RunEnd) -> None:
        """What the run has used, and why it stopped, where that is not because it was done."""
        add_usage(self.db, self.session_id, event.usage)
        if event.stop_reason != "stop" and self.known.ids:
            why = {"stop_reason": event.stop_reason, "message": event.text} | (
                event.error.to_dict() if event.error else {}
            )
            self.db.execute(
                "UPDATE message SET error = ? WHERE id = ?", (dumps(why), self.known.ids[-1])
            )


def _kept(before: Sequence[Message], after: Sequence[Message]) -> list[tuple[int, int]]:
    """The places (before, after) of the objects that are in both lists, as far as their order is the same."""
    places = {id(message): place for place, message in enumerate(before)}
    kept: list[tuple[int, int]] = []
    for place, message in enumerate(after):
        old = places.get(id(message), -1)
        if old > (kept[-1][0] if kept else -1):
            kept.append((old, place))
    return kept
