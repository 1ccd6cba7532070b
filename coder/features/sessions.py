"""Sessions: a conversation written down while it happens, and read again.

    recorder = Recorder(store, session_id)  # what the session holds is in recorder.messages
    for event in run_loop(recorder.messages, model, tools, prompts="Go on."):
        recorder(event)

What stands in the database is what is in the list, message by message and exactly: a kill loses at most the answer that was
coming. A message that leaves the list (compaction replaces many by a summary) stays in the table, marked as not active. The
state of each tool call is kept beside the messages, so that a session that was killed tells which calls were under way.

What it leaves out: the rows (journal.py), what is known of a session without reading it (store.py), showing it (export.py).
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from coder.features.claim import Claim
from coder.features.journal import Change, Known, PartType, dumps, same, spent
from coder.features.store import Store, StoreError
from coder.history import repair, tool_message
from coder.types import (
    Compacted,
    Event,
    Message,
    MessageEnd,
    MessageStart,
    RunEnd,
    RunStart,
    StepEnd,
    ToolEnd,
    ToolResult,
    ToolStart,
)

DONE = ("completed", "failed")
WRITTEN = (RunStart, MessageStart, MessageEnd, ToolStart, ToolEnd, StepEnd, Compacted, RunEnd)
ACTIVE = "SELECT id, data FROM message WHERE session = ? AND active ORDER BY position"
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
    rows = store.rows(ACTIVE, session_id)
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


def _orphans(messages: Sequence[Message]) -> int:
    """How many results belong to no call."""
    calls = {call.get("id") for message in messages for call in message.get("tool_calls") or ()}
    return sum(message.get("role") == "tool" and message.get("tool_call_id") not in calls for message in messages)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun} is" if number == 1 else f"{number} {noun}s are"


# ---- writing ---------------------------------------------------------------------------------------------


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
        self._known: Known | None = None
        self._compacted = False  # and that is not written yet
        store.get(session_id)
        self._claim = Claim(store.path, session_id)
        try:
            self.messages = self._read() if messages is None else messages
        except BaseException:
            self._claim.release()
            raise

    def _read(self) -> list[Message]:
        """What the session holds."""
        rows, lost = _rows(self.store, self.session_id)
        self._known = Known([message for _, message in rows], [row_id for row_id, _ in rows], self._calls())
        if lost:
            self.tell(f"{_counted(lost, 'message')} left out of the session: what stands in the file cannot be read.")
        if orphans := _orphans(self._known.seen):
            self.tell(f"{_counted(orphans, 'result')} left out of the session: no tool call belongs to it.")
        return _closed(self.store, rows)

    def __call__(self, event: Event) -> None:
        self._compacted = self._compacted or isinstance(event, Compacted)
        if (isinstance(event, WRITTEN) or spent(event)) and (not self.problem or isinstance(event, RunEnd)):
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
        if isinstance(event, MessageStart | MessageEnd | None) and self._known and same(self._known.seen, self.messages) == -1:
            return
        known, self._known = self._known, None  # a failure leaves it unknown, and so does an interrupt behind the commit
        try:
            known = known or self._bound()
            with self.store.transaction() as db:
                Change(db, self.session_id, known).write(self.messages, event, self._compacted)
        except (StoreError, ValueError) as error:
            self._failed(str(error) if isinstance(error, StoreError) else f"A message cannot be written: {error}.")
            return
        self._known, self._compacted = known, False
        if self.problem:
            self.problem = ""
            self.tell("The conversation is saved again.")

    def _failed(self, why: str) -> None:
        if not self.problem:
            self.problem = f"{why} The conversation goes on, but is not saved."
            self.tell(self.problem)

    def _bound(self) -> Known:
        """What is in the database, by comparison: rows with the text of our messages are these messages."""
        known = Known(calls=self._calls())
        for place, row in enumerate(self.store.rows(ACTIVE, self.session_id)):
            ours = self.messages[place] if place < len(self.messages) else None
            known.seen.append(ours if ours is not None and dumps(ours) == row["data"] else {"role": ""})
            known.ids.append(row["id"])
        return known

    def _calls(self) -> dict[str, tuple[int, dict[str, Any]]]:
        """The parts of the newest calls."""
        rows = self.store.rows("SELECT id, call_id, data FROM part WHERE type = 'tool' AND message = "
                               "(SELECT max(id) FROM message WHERE session = ? AND role = 'assistant')", self.session_id)
        return {row["call_id"]: (row["id"], json.loads(row["data"])) for row in rows}
