"""Sessions: a conversation written down while it happens, and read again.

    recorder = Recorder(store, session_id)  # what the session holds is in recorder.messages
    for event in run_loop(recorder.messages, model, tools, prompts="Go on."):
        recorder(event)

What stands in the database is what is in the list, message by message and exactly: a kill loses at most the answer that was
coming. A message that leaves the list (compaction replaces many by a summary) stays in the table, marked as not active. The
state of each tool call is kept beside the messages, so that a session that was killed tells which calls were under way.

What it leaves out: what is known of a session without reading it (store.py), showing it (export.py).
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from operator import is_
from types import TracebackType
from typing import Any, Literal

from coder.features.claim import Claim
from coder.features.store import Store, StoreError, add_usage
from coder.history import now, repair, text_of, tool_message
from coder.reasoning import REASONING, THINK
from coder.text import mend
from coder.types import (
    Compacted,
    Event,
    Message,
    MessageEnd,
    MessageStart,
    Nested,
    RunEnd,
    RunStart,
    StepEnd,
    ToolEnd,
    ToolResult,
    ToolStart,
    Usage,
)

PartType = Literal["text", "reasoning", "tool", "compaction", "snapshot"]
DONE = ("completed", "failed")
WRITTEN = (RunStart, MessageStart, MessageEnd, ToolStart, ToolEnd, StepEnd, Compacted, RunEnd)
INTERRUPTED = "Interrupted: the program was ended while this ran. What it had done by then is done; look before you do it again."


# ---- reading ---------------------------------------------------------------------------------------------


def to_model_messages(store: Store, session_id: str) -> list[Message]:
    """The list of messages as it was in memory, repaired where a kill left it open. Raises StoreError.

    A call that had its result gets it; one that was under way is answered with INTERRUPTED, one that had not begun with
    history.NOT_RUN. None is ever run again by us.
    """
    return _closed(store, _rows(store, session_id)[0])


def _rows(store: Store, session_id: str) -> tuple[list[tuple[int, Message]], int]:
    """The active messages with their row ids, and how many could not be read."""
    rows = store.rows("SELECT id, data FROM message WHERE session = ? AND active ORDER BY position", session_id)
    read = [(row["id"], _message(row["data"])) for row in rows]
    readable = [(row_id, message) for row_id, message in read if message is not None]
    return readable, len(read) - len(readable)


def _message(data: Any) -> Message | None:
    try:
        message = json.loads(data)
    except (ValueError, TypeError):
        return None
    return message if isinstance(message, dict) else None


def _closed(store: Store, rows: Sequence[tuple[int, Message]]) -> list[Message]:
    """The messages, with every call answered."""
    messages = [message for _, message in rows]
    last = next((place for place in reversed(range(len(rows))) if messages[place].get("role") == "assistant"), None)
    if last is not None and messages[last].get("tool_calls"):
        answered = {message.get("tool_call_id") for message in messages[last:]}
        for part in store.rows("SELECT call_id, state, data FROM part WHERE message = ? AND type = 'tool'", rows[last][0]):
            if part["call_id"] not in answered and part["state"] != "pending":
                messages.append(tool_message(part["call_id"], _left(part)))
    return repair(messages)


def _left(part: sqlite3.Row) -> ToolResult:
    """The result of a call whose message was not written any more."""
    data = json.loads(part["data"])
    if part["state"] in DONE and "content" in data:
        return ToolResult(data["content"], is_error=part["state"] == "failed")
    return ToolResult(INTERRUPTED, is_error=True)


def parts(store: Store, session_id: str, kind: PartType) -> list[dict[str, Any]]:
    """The data of a session's parts of one type, in the order in which they came."""
    return [json.loads(row["data"]) for row in
            store.rows("SELECT data FROM part WHERE session = ? AND type = ? ORDER BY id", session_id, kind)]


def set_parts(store: Store, session_id: str, kind: PartType, records: Sequence[dict[str, Any]]) -> None:
    """Replace the parts of one type that belong to no message (the snapshots)."""
    with store.transaction() as db:
        db.execute("DELETE FROM part WHERE session = ? AND type = ? AND message IS NULL", (session_id, kind))
        db.executemany("INSERT INTO part (session, type, data) VALUES (?, ?, ?)", [(session_id, kind, dumps(each)) for each in records])


def dumps(value: Any) -> str:
    """JSON that the database takes and `json.loads` gives back, also lone surrogates."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, default=str)
    return text


# ---- writing ---------------------------------------------------------------------------------------------


@dataclass
class _Known:
    """What is in the database: the messages as objects of the list, their row ids, and the parts of the newest calls."""

    seen: list[Message] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    calls: dict[str, tuple[int, dict[str, Any]]] = field(default_factory=dict)  # by call id: row id and data of the part

    def copy(self) -> _Known:
        return _Known(self.seen[:], self.ids[:], dict(self.calls))


class Recorder:
    """Writes a session down: a subscriber of its runs' events. Raises StoreError where another process has the session.

    `messages` is the list that the runs work on. Without it the session is read, and `recorder.messages` is the list. What changes
    the list outside of a run is written by `sync`. Where writing fails, `tell` is called once with a line for a person, the
    conversation goes on in memory, and the end of each run tries again; `problem` is the line while it fails, else "".
    """

    def __init__(self, store: Store, session_id: str, messages: list[Message] | None = None, *,
                 tell: Callable[[str], None] = lambda text: None) -> None:
        self.store, self.session_id, self.tell = store, session_id, tell
        self.problem = ""
        store.get(session_id)
        self._claim = Claim(store.path, session_id)
        self._known: _Known | None = None
        if messages is None:
            rows, lost = _rows(store, session_id)
            self._known = _Known([message for _, message in rows], [row_id for row_id, _ in rows])
            messages = _closed(store, rows)
            if lost:
                tell(f"{lost} message{'s' * (lost > 1)} of the session cannot be read and {'are' if lost > 1 else 'is'} left out.")
        self.messages = messages

    def __call__(self, event: Event) -> None:
        if (isinstance(event, WRITTEN) or _spent(event)) and (not self.problem or isinstance(event, RunEnd)):
            self._save(event)

    def sync(self) -> None:
        """Write what has changed in the list."""
        self._save(None)

    def close(self) -> None:
        """Let others have the session. One in which nothing was said is removed."""
        try:
            self.store.discard_empty(self.session_id)
        except StoreError:
            pass  # told already, or to be told to the next who opens it
        finally:
            self._claim.release()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _save(self, event: Event | None) -> None:
        """One transaction, if there is anything to write."""
        if isinstance(event, MessageStart | MessageEnd | None) and self._known and _same(self._known.seen, self.messages) == -1:
            return
        known, self._known = self._known, None  # an interrupt between the commit and the last line leaves it unknown
        try:
            known = known.copy() if known else self._bound()
            with self.store.transaction() as db:
                _Change(db, self.session_id, known).write(self.messages, event)
        except (StoreError, ValueError, RecursionError) as error:
            if not self.problem:
                self.problem = f"{error} The conversation goes on, but is not saved."
                self.tell(self.problem)
            return
        self._known = known
        if self.problem:
            self.problem = ""
            self.tell("The conversation is saved again.")

    def _bound(self) -> _Known:
        """What is in the database, by comparison: rows with the text of our messages are these messages."""
        known = _Known()
        for place, row in enumerate(self.store.rows("SELECT id, data FROM message WHERE session = ? AND active ORDER BY position",
                                                    self.session_id)):
            ours = self.messages[place] if place < len(self.messages) else None
            known.seen.append(ours if ours is not None and dumps(ours) == row["data"] else {"role": ""})
            known.ids.append(row["id"])
        for part in self.store.rows("SELECT id, call_id, data FROM part WHERE type = 'tool' AND message IN (SELECT max(id) FROM message "
                                    "WHERE session = ? AND role = 'assistant')", self.session_id):
            known.calls[part["call_id"]] = part["id"], json.loads(part["data"])
        return known


def _spent(event: Event) -> Usage | None:
    """What a sub-agent has used (the summarising one, too), whose run ends here: a run's own usage does not hold it."""
    inner = event
    while isinstance(inner, Nested):
        inner = inner.event
    return inner.usage if isinstance(inner, RunEnd) and inner is not event else None


def _same(before: Sequence[Message], after: Sequence[Message]) -> int:
    """The first place at which the objects of two lists differ, -1 where they are the same."""
    same = list(map(is_, before, after))
    if False in same:
        return same.index(False)
    return -1 if len(before) == len(after) else len(same)


def _role(message: Message) -> str:
    return str(message.get("role") or "")


def _meta(message: Message) -> dict[str, Any]:
    meta = message.get("meta")
    return meta if isinstance(meta, dict) else {}


class _Change:
    """One transaction's writing. `known` is changed along."""

    def __init__(self, db: sqlite3.Connection, session_id: str, known: _Known) -> None:
        self.db, self.session_id, self.known = db, session_id, known
        self.summary: int | None = None  # row id of a summary that came into the list

    def write(self, messages: list[Message], event: Event | None) -> None:
        self.take(messages, compacted=isinstance(event, Compacted))
        match event:
            case ToolStart():
                self._tool(event.id, "running", title=mend(event.title), start=now())
            case ToolEnd():
                data = {"name": event.name, "content": event.result.content, "details": event.result.details, "seconds": event.seconds}
                self._tool(event.id, "failed" if event.is_error else "completed", end=now(), data=data)
            case StepEnd():
                self._step(event)
            case Compacted():
                newest = self.known.ids[-1] if self.known.ids else None
                data = {name: value for name, value in event.to_dict().items() if name != "type"}
                self._part(self.summary or newest, "compaction", data=data)
            case RunStart() | RunEnd():
                self.db.execute("UPDATE session SET updated = ? WHERE id = ?", (now(), self.session_id))
            case Nested() if usage := _spent(event):
                add_usage(self.db, self.session_id, usage)
        if isinstance(event, RunEnd):
            self._end(event)

    # -- messages

    def take(self, messages: list[Message], compacted: bool) -> None:
        """Make the table what the list is."""
        known, place = self.known, _same(self.known.seen, messages)
        if place == -1:
            return
        if place < len(known.seen):
            self._rearrange(place, messages[place:], compacted)
        else:
            end = self._end_of_table()
            for offset, message in enumerate(messages[place:]):
                known.ids.append(self._insert(message, end + offset))
        known.seen[:] = messages

    def _end_of_table(self) -> int:
        row = self.db.execute("SELECT max(position) FROM message WHERE session = ?", (self.session_id,)).fetchone()
        return 0 if row[0] is None else int(row[0]) + 1

    def _rearrange(self, place: int, after: list[Message], compacted: bool) -> None:
        """From `place` on the list has changed: keep the rows of messages that are still there, in their order.

        What took the place of another was repaired, and is the same row; at a compaction, and where nothing took its place,
        the old row stays, not active.
        """
        known = self.known
        before, ids = known.seen[place:], known.ids[place:]
        order = [row[0] for row in self.db.execute("SELECT id FROM message WHERE session = ? ORDER BY position", (self.session_id,))]
        del known.ids[place:]
        old, new = 0, 0
        for kept_old, kept_new in [*_kept(before, after), (len(before), len(after))]:
            anchor = order.index(ids[kept_old]) if kept_old < len(ids) else len(order)
            gone, come = list(zip(before, ids))[old:kept_old], after[new:kept_new]
            fresh = self._exchange(gone, come, compacted)
            order[anchor:anchor] = fresh
            known.ids += ids[kept_old:kept_old + 1]
            old, new = kept_old + 1, kept_new + 1
        self.db.executemany("UPDATE message SET position = ?1 WHERE id = ?2 AND position <> ?1", list(enumerate(order)))

    def _exchange(self, gone: list[tuple[Message, int]], come: list[Message], compacted: bool) -> list[int]:
        """Put messages in the place of others; returns the ids of new rows."""
        fresh = []
        for message in come:
            if gone and not compacted and _role(gone[0][0]) in (_role(message), ""):
                self._replace(gone[0][1], message)
                self.known.ids.append(gone.pop(0)[1])
            else:
                fresh.append(self._insert(message, -1))
                self.known.ids.append(fresh[-1])
        self.db.executemany("UPDATE message SET active = 0 WHERE id = ?", [(row_id,) for _, row_id in gone])
        return fresh

    def _insert(self, message: Message, position: int) -> int:
        role = _role(message)
        row = self.db.execute("INSERT INTO message (session, position, role, completed, data) VALUES (?, ?, ?, ?, ?)",
                              (self.session_id, position, role, now() if role == "assistant" else None, dumps(message)))
        assert row.lastrowid
        if _meta(message).get("summary"):
            self.summary = row.lastrowid
        self._parts(row.lastrowid, message)
        for call in message.get("tool_calls") or ():
            call_id, data = str(call.get("id")), {"name": str((call.get("function") or {}).get("name"))}
            part = self._part(row.lastrowid, "tool", call_id=mend(call_id), state="pending", title=mend(data["name"]), data=data)
            self.known.calls[call_id] = part, data
        if role == "tool":
            self._answered(message)
        return row.lastrowid

    def _replace(self, row_id: int, message: Message) -> None:
        """The row of a message that was repaired; its calls are the same, with other ids perhaps."""
        self.db.execute("UPDATE message SET data = ?, role = ? WHERE id = ?", (dumps(message), _role(message), row_id))
        self.db.execute("DELETE FROM part WHERE message = ? AND type IN ('text', 'reasoning')", (row_id,))
        self._parts(row_id, message)
        rows = self.db.execute("SELECT id, data FROM part WHERE message = ? AND type = 'tool' ORDER BY id", (row_id,)).fetchall()
        for row, call in zip(rows, message.get("tool_calls") or ()):
            self.db.execute("UPDATE part SET call_id = ? WHERE id = ?", (mend(str(call.get("id"))), row["id"]))
            self.known.calls[str(call.get("id"))] = row["id"], json.loads(row["data"])
        if _role(message) == "tool":
            self._answered(message)

    # -- parts

    def _parts(self, row_id: int, message: Message) -> None:
        """The texts of a message, for search and display."""
        text = text_of(message)
        if text and isinstance(text, str) and _role(message) != "tool":  # a role of one's own may have anything for its content
            self._part(row_id, "text", text=mend(text))
        thought = next((message[name] for name in (*REASONING, THINK) if isinstance(message.get(name), str) and message[name]), "")
        if thought:
            self._part(row_id, "reasoning", data={"text": thought})

    def _part(self, row_id: int | None, kind: PartType, *, data: dict[str, Any] | None = None, **columns: Any) -> int:
        columns |= {"session": self.session_id, "message": row_id, "type": kind, "data": dumps(data or {})}
        row = self.db.execute(f"INSERT INTO part ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})", tuple(columns.values()))
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
        self.db.execute("UPDATE part SET data = ?, \"end\" = coalesce(\"end\", ?), "
                        "state = CASE WHEN state IN ('completed', 'failed') THEN state ELSE ? END WHERE id = ?",
                        (dumps(data), now(), state, part_id))

    # -- ends

    def _step(self, event: StepEnd) -> None:
        places = [place for place in reversed(range(len(self.known.seen))) if self.known.seen[place] is event.message]
        if places:
            self.db.execute("UPDATE message SET finish = ?, tokens = ?, completed = coalesce(completed, ?) WHERE id = ?",
                            (event.finish_reason, dumps(asdict(event.usage)), now(), self.known.ids[places[0]]))

    def _end(self, event: RunEnd) -> None:
        """What the run has used, and why it stopped, where that is not because it was done."""
        add_usage(self.db, self.session_id, event.usage)
        if event.stop_reason != "stop" and self.known.ids:
            why = {"stop_reason": event.stop_reason, "message": event.text} | (event.error.to_dict() if event.error else {})
            self.db.execute("UPDATE message SET error = ? WHERE id = ?", (dumps(why), self.known.ids[-1]))


def _kept(before: Sequence[Message], after: Sequence[Message]) -> list[tuple[int, int]]:
    """The places (before, after) of the objects that are in both lists, as far as their order is the same."""
    places = {id(message): place for place, message in enumerate(before)}
    kept: list[tuple[int, int]] = []
    for place, message in enumerate(after):
        old = places.get(id(message), -1)
        if old > (kept[-1][0] if kept else -1):
            kept.append((old, place))
    return kept
