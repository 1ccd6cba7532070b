"""Sessions: a conversation written down while it happens, and read again.

    with SessionStore("sessions.db") as store:
        session = store.open()  # a new one; open(id) goes on with one that is there
        agent = Agent("gpt-5", session=session)
        for event in session.watch(run_loop(session.messages, model, tools, prompts="Go on.")):  # or without an Agent
            ...

What stands in the database is what is in the list, message by message and exactly: a kill loses at most the answer that was
coming. A message that leaves the list (compaction replaces many by a summary) stays in the table, marked as not active. The
state of each tool call is kept beside the messages, so that a session that was killed tells which calls were under way.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from coder.events import (
    Compacted,
    Event,
    MessageEnd,
    MessageStart,
    Returning,
    RunEnd,
    RunStart,
    StepEnd,
    ToolEnd,
    ToolStart,
)
from coder.history import calls_of, formed, repair, tool_message
from coder.providers.request import copied
from coder.sessions.claim import Claim
from coder.sessions.journal import Change, Known, PartType, dumps, loaded, same, spent
from coder.sessions.store import Store, StoreError
from coder.types import Message, RunResult, ToolResult

log = logging.getLogger("coder.sessions")

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
    read = [(row["id"], formed(loaded(row["data"]))) for row in rows]
    readable = [(row_id, message) for row_id, message in read if message is not None]
    return readable, len(read) - len(readable)


def _closed(store: Store, rows: Sequence[tuple[int, Message]]) -> list[Message]:
    """The messages, with every call answered."""
    messages = [message for _, message in rows]
    last = next(
        (
            place
            for place in reversed(range(len(rows)))
            if messages[place].get("role") == "assistant"
        ),
        None,
    )
    if last is not None and calls_of(messages[last]):
        answered = {message.get("tool_call_id") for message in messages[last:]}
        for part in store.rows(
            "SELECT call_id, state, data FROM part WHERE message = ? AND type = 'tool'",
            rows[last][0],
        ):
            if part["call_id"] not in answered and part["state"] != "pending":
                messages.append(tool_message(part["call_id"], _left(part)))
    return repair(messages)


def _left(part: sqlite3.Row) -> ToolResult:
    """The result of a call whose message was not written any more."""
    data = loaded(part["data"])
    if part["state"] in DONE and isinstance(data, dict) and "content" in data:
        return ToolResult(data["content"], is_error=part["state"] == "failed")
    return ToolResult(INTERRUPTED, is_error=True)


def parts(store: Store, session_id: str, kind: PartType) -> list[dict[str, Any]]:
    """The data of a session's parts of one type, in the order in which they came; without those that cannot be read."""
    rows = store.rows(
        "SELECT data FROM part WHERE session = ? AND type = ? ORDER BY id", session_id, kind
    )
    return [data for row in rows if isinstance(data := loaded(row["data"]), dict)]


def set_parts(
    store: Store,
    session_id: str,
    kind: PartType,
    records: Sequence[dict[str, Any]],
    more: bool = False,
) -> None:
    """Replace the parts of one type that belong to no message (the snapshots), or add `more` to them."""
    with store.transaction() as db:
        if not more:
            db.execute(
                "DELETE FROM part WHERE session = ? AND type = ? AND message IS NULL",
                (session_id, kind),
            )
        db.executemany(
            "INSERT INTO part (session, type, data) VALUES (?, ?, ?)",
            [(session_id, kind, dumps(each)) for each in records],
        )


def _orphans(messages: Sequence[Message]) -> int:
    """How many results belong to no call."""
    calls = {call.get("id") for message in messages for call in calls_of(message)}
    return sum(
        message.get("role") == "tool" and message.get("tool_call_id") not in calls
        for message in messages
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun} is" if number == 1 else f"{number} {noun}s are"


# ---- writing ---------------------------------------------------------------------------------------------


class Recorder:
    """Writes a session down: a subscriber of its runs' events. Raises StoreError where another process has the session.

    `messages` is the list that the runs work on. Without it the session is read, and `recorder.messages` is the list. What changes
    the list outside of a run is written by `sync`. Where writing fails, `tell` is called once with a line for a person, the
    conversation goes on in memory, and the end of each run tries again; `problem` is the line while it fails, else "".
    """

    def __init__(
        self,
        store: Store,
        session_id: str,
        messages: list[Message] | None = None,
        *,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.store, self.session_id, self.tell = store, session_id, tell
        self.problem = ""
        self._known: Known | None = None
        self._compacted = False  # and that is not written yet
        self._closed = False
        self.taken = False  # by an Agent, whose conversation it is
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
        seen = [message for _, message in rows]
        self._known = Known(seen, [row_id for row_id, _ in rows], copied(seen), self._calls())
        if lost:
            self.tell(
                f"{_counted(lost, 'message')} left out of the session: what stands in the file cannot be read."
            )
        if orphans := _orphans(self._known.seen):
            self.tell(
                f"{_counted(orphans, 'result')} left out of the session: no tool call belongs to it."
            )
        return _closed(self.store, rows)

    def __call__(self, event: Event) -> None:
        self._compacted = self._compacted or isinstance(event, Compacted)
        if (isinstance(event, WRITTEN) or spent(event)) and (
            not self.problem or isinstance(event, RunEnd)
        ):
            self._save(event)

    def watch(self, run: Generator[Event, None, RunResult]) -> Generator[Event, None, RunResult]:
        """The events of a run on `messages`, which is written down. Raises ValueError behind one that worked on another list."""
        try:
            with Returning(run) as watched:
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
        """Write what has changed in the list."""
        self._save(None)

    def close(self) -> None:
        """Write what has changed, and let others have the session. One in which nothing was said is removed."""
        if self._closed:
            return
        try:
            self.sync()
            self._closed = True
            self.store.discard_empty(self.session_id)
        except StoreError:
            pass  # told already, or to be told to the next who opens it
        finally:
            self._claim.release()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _save(self, event: Event | None) -> None:
        """One transaction, if there is anything to write."""
        if (
            isinstance(event, MessageStart | MessageEnd | None)
            and self._known
            and same(self._known.seen, self.messages) == -1
            and (event or self._known.copies == self._known.seen)
        ):
            return
        # A failure leaves it unknown, and so does an interrupt behind the commit
        known, self._known = (
            self._known,
            None,
        )
        try:
            known = known or self._bound()
            with self.store.transaction() as db:
                Change(db, self.session_id, known).write(self.messages, event, self._compacted)
        except (StoreError, ValueError) as error:
            self._failed(
                str(error)
                if isinstance(error, StoreError)
                else f"A message cannot be written: {error}."
            )
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
            known.seen.append(
                ours if ours is not None and dumps(ours) == row["data"] else {"role": ""}
            )
            known.ids.append(row["id"])
        known.copies[:] = copied(known.seen)
        return known

    def _calls(self) -> dict[str, tuple[int, dict[str, Any]]]:
        """The parts of the newest calls."""
        rows = self.store.rows(
            "SELECT id, call_id, data FROM part WHERE type = 'tool' AND message = "
            "(SELECT max(id) FROM message WHERE session = ? AND role = 'assistant')",
            self.session_id,
        )
        return {row["call_id"]: (row["id"], loaded(row["data"]) or {}) for row in rows}


class SessionStore(Store):
    """A store for a program of one's own; what it has opened is closed with it. Raises StoreError."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
        self._sessions: list[Recorder] = []

    def open(self, session_id: str = "", *, directory: Path | str = "") -> Recorder:
        """A conversation that is kept: the one with this id, or beginning of one, or a new one of `directory` (else the folder that
        we are in). What a person should know of it goes to the logger "coder.sessions"."""
        known = (
            self.find(session_id).id if session_id else self.create(str(directory or Path.cwd()))
        )
        self._sessions.append(Recorder(self, known, tell=log.warning))
        return self._sessions[-1]

    def close(self) -> None:
        """Close the file, and before it the sessions that are open."""
        for session in self._sessions:
            session.close()
        super().close()

    def __enter__(self) -> SessionStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
