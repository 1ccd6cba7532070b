"""Sessions: a conversation written down while it happens, and read again.

    with SessionStore("sessions.db") as store:
        session = store.open()  # a new one; open(id) continues an existing one
        agent = Agent("gpt-5", session=session)
        for event in session.watch(run_loop(session.messages, model, tools, prompt="Go on.")):  # without an Agent
            ...

The rows of a session are its list of messages, exactly. A message that leaves the list (compaction
replaces many by a summary) keeps its row, marked as not active. The state of each tool call is written
before the tool runs, so that a kill costs at most the answer that was coming, and what is loaded then
tells which calls had begun.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from coder.events import (
    Compacted,
    Event,
    MessageEnd,
    Nested,
    Returning,
    RunEnd,
    RunStart,
    StepEnd,
    ToolEnd,
    ToolStart,
    hidden_usage,
)
from coder.history import calls_of, formed, repair, tool_message
from coder.sessions.rows import PartType, SessionRows, dumps, loaded
from coder.sessions.store import SessionLock, Store, StoreError
from coder.types import Message, RunResult, ToolResult

log = logging.getLogger("coder.sessions")

DONE = ("completed", "failed")
KEPT = {RunStart, MessageEnd, ToolStart, ToolEnd, StepEnd, Compacted, RunEnd, Nested}
INTERRUPTED = (
    "Interrupted: the program was ended while this ran. Its effects so far remain; "
    "check them before you repeat it."
)


# ---- reading -----------------------------------------------------------------------------------


def to_model_messages(store: Store, session_id: str) -> list[Message]:
    """The list of messages as it was in memory, repaired where a kill left it open. Raises StoreError.

    A call that had its result gets it; one that was under way is answered with INTERRUPTED, one that had
    not begun with history.NOT_RUN. None is ever run again by the program.
    """
    return _with_results(store, _rows(store, session_id)[0])


def parts(store: Store, session_id: str, kind: PartType) -> list[dict[str, Any]]:
    """The data of a session's parts of one type, in their order; without those that cannot be read."""
    query = "SELECT data FROM part WHERE session = ? AND type = ? ORDER BY id"
    found = (loaded(row["data"]) for row in store.rows(query, session_id, kind))
    return [data for data in found if isinstance(data, dict)]


def _rows(store: Store, session_id: str) -> tuple[list[tuple[int, Message]], int]:
    """The active messages with their row ids, and how many could not be read."""
    query = "SELECT id, data FROM message WHERE session = ? AND active = 1 ORDER BY position"
    read = [(row["id"], formed(loaded(row["data"]))) for row in store.rows(query, session_id)]
    readable = [(row_id, message) for row_id, message in read if message is not None]
    return readable, len(read) - len(readable)


def _with_results(store: Store, rows: Sequence[tuple[int, Message]]) -> list[Message]:
    """The messages, with every call answered."""
    messages = [message for _, message in rows]
    places = (at for at in reversed(range(len(rows))) if messages[at].get("role") == "assistant")
    last = next(places, None)
    if last is not None and calls_of(messages[last]):
        answered = {message.get("tool_call_id") for message in messages[last:]}
        query = "SELECT call_id, state, data FROM part WHERE message = ? AND type = 'tool'"
        for part in store.rows(query, rows[last][0]):
            if part["call_id"] not in answered and part["state"] != "pending":
                messages.append(tool_message(part["call_id"], _result_of(part)))
    return repair(messages)


def _result_of(part: sqlite3.Row) -> ToolResult:
    """The result of a call whose message was not written."""
    data = loaded(part["data"])
    if part["state"] in DONE and isinstance(data, dict) and "content" in data:
        return ToolResult(data["content"], is_error=part["state"] == "failed")
    return ToolResult(INTERRUPTED, is_error=True)


def _orphans(messages: Sequence[Message]) -> int:
    """How many results have no call."""
    calls = {call.get("id") for message in messages for call in calls_of(message)}
    results = [message for message in messages if message.get("role") == "tool"]
    return sum(message.get("tool_call_id") not in calls for message in results)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun} is" if number == 1 else f"{number} {noun}s are"


# ---- writing -----------------------------------------------------------------------------------


class Recorder:
    """Writes a session: a subscriber of its runs' events. Raises StoreError where another process has it.

    `messages` is the list that the runs work on. Without it the session is read, and `recorder.messages`
    is the list. `harmless` are the names of tools that change nothing: their start need not be written
    before they run. Where writing fails, `tell` is called once with a line for the user, the conversation
    continues in memory, and the end of each run tries again; `problem` is the line while it fails, else "".
    """

    def __init__(
        self,
        store: Store,
        session_id: str,
        messages: list[Message] | None = None,
        *,
        tell: Callable[[str], None] = lambda text: None,
        harmless: Collection[str] = (),
    ) -> None:
        self.store, self.session_id, self.tell, self.harmless = store, session_id, tell, harmless
        self.problem = ""
        self.taken = False  # by an Agent, whose conversation it is
        self._rows: SessionRows | None = None  # None: what is in the file has to be read
        self._waiting: list[Event] = []
        self._undo: list[tuple[bool, list[dict[str, Any]]]] = []  # records of undo to be written
        self._running = 0  # tools
        self._closed = False
        self._info, self._generation = store.get(session_id), store.generation
        self._lock = SessionLock(store.path, session_id)
        try:
            self.messages = self._read() if messages is None else messages
        except BaseException:
            self._lock.release()
            raise

    def _read(self) -> list[Message]:
        rows, lost = _rows(self.store, self.session_id)
        seen = [message for _, message in rows]
        self._rows = SessionRows(self.store, self.session_id, seen, [row_id for row_id, _ in rows])
        for count, noun, why in (
            (lost, "message", "what stands in the file cannot be read"),
            (_orphans(seen), "result", "no tool call belongs to it"),
        ):
            if count:
                self.tell(f"{_counted(count, noun)} left out of the session: {why}.")
        return _with_results(self.store, rows)

    def __call__(self, event: Event) -> None:
        if type(event) not in KEPT or (isinstance(event, Nested) and not hidden_usage(event)):
            return
        self._waiting.append(event)
        if self._is_due(event) and (not self.problem or isinstance(event, RunEnd)):
            self._save()

    def _is_due(self, event: Event) -> bool:
        """Is it written now, and not with what follows on it at once? Two transactions a step: in front
        of its first tool, and at its end; and one more for each further tool that may change something."""
        match event:
            case MessageEnd(message=message):
                return message.get("role") == "user"
            case ToolStart(name=name):
                self._running += 1
                return name not in self.harmless or self._has_new_answer()
            case ToolEnd(name=name):
                self._running -= 1
                return self._running > 0 and name not in self.harmless
            case StepEnd() | RunEnd():
                self._running = 0
        return isinstance(event, StepEnd | RunEnd | Compacted)

    def _has_new_answer(self) -> bool:
        seen = self._rows.seen if self._rows else []
        newest = self.messages[-1] if self.messages else {}
        return newest.get("role") == "assistant" and not (seen and seen[-1] is newest)

    def set_model(self, model: str, agent: str) -> None:
        """Write the model and the agent that work from now on, where they are others."""
        if (model, agent) != (self._info.model, self._info.agent) and not self.problem:
            with suppress(StoreError):
                self.store.set_model(self.session_id, model, agent)
                self._info = replace(self._info, model=model, agent=agent)

    def keep_undo(self, records: Sequence[dict[str, Any]], more: bool = False) -> None:
        """Write the records of undo with what is written next: in place of those before, or as `more`."""
        self._undo = [*(self._undo if more else ()), (more, list(records))]

    def watch(self, run: Generator[Event, None, RunResult]) -> Generator[Event, None, RunResult]:
        """The events of a run on `messages`, which is written. Raises ValueError behind one that worked on another list."""
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
        """Write what has changed in the list, also outside of a run."""
        if self._waiting or self._undo or not (self._rows and self._rows.hold(self.messages)):
            self._save()

    def close(self) -> None:
        """Write what has changed and release the session. One without a message is removed."""
        if self._closed:
            return
        try:
            self.sync()
            self._closed = True
            if not (self._rows and self._rows.seen):
                self.store.discard_empty(self.session_id)
        except StoreError:
            pass  # reported already, or to be reported when the file is opened again
        finally:
            self._lock.release()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _save(self) -> None:
        """One transaction. A damaged file is replaced, and all that is in memory written into the new one."""
        events, self._waiting, undo = self._waiting, [], self._undo
        try:
            try:
                self._write(events)
            except StoreError as error:
                if not error.damaged:
                    raise
                self._write(events)
        except (StoreError, ValueError) as error:
            self._waiting, self._undo = events, undo
            text = str(error) if isinstance(error, StoreError) else ""
            self._fail(text or f"A message cannot be written: {error}.")
            return
        if self.problem:
            self.problem = ""
            self.tell("The conversation is saved again.")

    def _write(self, events: Sequence[Event]) -> None:
        # A failure leaves it unknown, and so does an interrupt behind the commit
        rows, self._rows = self._rows, None
        if self._generation != self.store.generation:
            rows = None
            self._create_again()
        rows = rows or self._rows_by_text()
        with self.store.transaction() as db:
            rows.write(db, self.messages, events, self._undo)
        self._rows, self._undo = rows, []

    def _rows_by_text(self) -> SessionRows:
        """What is in the file, by comparison: rows with the text of our messages are these messages."""
        query = "SELECT id, data FROM message WHERE session = ? AND active = 1 ORDER BY position"
        seen: list[Message] = []
        found = self.store.rows(query, self.session_id)
        for place, row in enumerate(found):
            ours = self.messages[place] if place < len(self.messages) else None
            same = ours is not None and dumps(ours) == row["data"]
            seen.append(ours if ours is not None and same else {"role": ""})
        return SessionRows(self.store, self.session_id, seen, [row["id"] for row in found])

    def _create_again(self) -> None:
        """Create the session in a file that was begun anew."""
        info = self._info
        names = {"agent": info.agent, "model": info.model, "title": info.title}
        self.store.create(info.directory, session_id=info.id, **names)
        self._generation = self.store.generation

    def _fail(self, why: str) -> None:
        if not self.problem:
            self.problem = f"{why} The conversation goes on, but is not saved."
            self.tell(self.problem)


class SessionStore(Store):
    """A store for a program of the user's own; what it has opened is closed with it. Raises StoreError."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
        self._sessions: list[Recorder] = []

    def open(self, session_id: str = "", *, directory: Path | str = "") -> Recorder:
        """A conversation that is kept: the one with this id, or beginning of one, or a new one of
        `directory` (the present folder, if none is given). Problems go to the logger "coder.sessions"."""
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

    def __exit__(self, *_: object) -> None:
        self.close()
