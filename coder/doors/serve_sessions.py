"""The sessions of a server, side by side: what runs in each, and what is shown of it.

What is shown of a session is a list of messages (`base`) and the events since. So a client that
comes late gets both, and one that comes back gets what it has missed. Clients come and go; a run
goes on.

Everything is done in the thread of the event loop, except the runs themselves.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Literal

from starlette.exceptions import HTTPException

from coder.events import BaseEvent, Event, QuestionAsked, RunEnd, StepEnd
from coder.history import now
from coder.providers.wire import copied
from coder.session import Session
from coder.sessions.database import StoreError
from coder.sessions.snapshots import UndoResult
from coder.sessions.store import SessionInfo, Store, folder_name, to_model_messages
from coder.types import CoderError, Message

log = logging.getLogger("coder.serve")

MOST_EVENTS = 20_000  # of a session; before a step beyond it, they become messages
AT_WORK = "the session is at work: abort its run, or wait for the end"
SILENCE = 15.0  # seconds, after which a stream says that it is alive
NOT_THERE = 404
NOT_NOW = 409


# ---- events of the server ------------------------------------------------------------------------


class History(BaseEvent):
    """All messages so far; what was shown before is void. A stream begins with it."""

    type: ClassVar[Literal["history"]] = "history"
    messages: list[Message]


class Answered(BaseEvent):
    """A question was answered, by this client or another one; `id` is the question's."""

    type: ClassVar[Literal["answered"]] = "answered"
    id: str
    answer: str


class Failed(BaseEvent):
    """A run broke off because of a defect of the program or a plugin."""

    type: ClassVar[Literal["failed"]] = "failed"
    text: str


@dataclass
class Prompt:
    """What a client wants to be done; an agent and a model if it names them."""

    text: str = ""
    images: list[dict[str, Any]] = field(default_factory=list)
    agent: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """An event with its number; those of all sessions are numbered in one row."""

    number: int
    time: int  # milliseconds since the epoch
    event: dict[str, Any]


# ---- the sessions --------------------------------------------------------------------------------


class Live:
    """A session as the server has it."""

    def __init__(self, info: SessionInfo) -> None:
        self.info = info
        self.session: Session | None = None  # once something is to be done in it
        self.base: list[Message] = []
        self.start = 0  # the number of the newest event that is in `base`
        self.entries: list[Entry] = []  # the events since
        self.run: asyncio.Task[None] | None = None  # the newest one
        self.lock = asyncio.Lock()  # of whoever begins or takes back a run

    @property
    def is_busy(self) -> bool:
        return self.run is not None and not self.run.done()

    def since(self, number: int) -> list[Entry]:
        """The events after this number."""
        place = bisect_right(self.entries, number, key=attrgetter("number"))
        return self.entries[place:]

    def shorten(self) -> None:
        """Turn the events into messages if there are too many of them."""
        if len(self.entries) <= MOST_EVENTS:
            return
        messages = list(self.base)
        for entry in self.entries:
            if entry.event["type"] == "message_end":
                messages.append(entry.event["message"])
        self.base = messages
        self.start = self.entries[-1].number
        self.entries = []


class Sessions:
    """Those of the user."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.live: dict[str, Live] = {}
        self.number = 0  # of the newest event
        self.is_closing = False
        self._server = secrets.token_hex(4)  # tells numbers of an earlier server apart
        self._news = asyncio.Event()  # set with the next event, and replaced

    def infos(self, directory: Path) -> list[SessionInfo]:
        """The sessions of a folder: those without a message, and then the newest first."""
        kept = self.store.sessions(str(directory))
        ids = {info.id for info in kept}
        folder = folder_name(str(directory))
        new = []
        for live in self.live.values():
            info = live.info
            is_left_out = info.id in ids or info.parent
            if info.directory == folder and not is_left_out:
                new.append(info)
        return new + kept

    def at_work(self) -> list[Live]:
        return [live for live in self.live.values() if live.is_busy]

    def find(self, session_id: str) -> Live:
        """A session by its id. Raises HTTPException."""
        live = self.live.get(session_id)
        if live is None:
            try:
                live = Live(self.store.get(session_id))
            except StoreError:
                raise HTTPException(NOT_THERE, f"there is no session {session_id!r}") from None
            self.live[session_id] = live
        if live.session is None:  # another program may have written it meanwhile
            live.base = to_model_messages(self.store, session_id)
        else:
            with suppress(StoreError):  # it has no message yet
                live.info = self.store.get(session_id)
        return live

    async def create(self, directory: Path) -> Live:
        """A new session in a folder. Raises CoderError."""
        session = await asyncio.to_thread(Session.open, directory)
        assert session.conversation  # its modules were imported above
        live = Live(session.conversation.recorder.info)
        live.session = session
        self.live[session.id] = live
        return live

    async def _open(self, live: Live) -> Session:
        """The session, to work in it. Raises HTTPException if it is at work, here or elsewhere."""
        if live.is_busy:
            raise HTTPException(NOT_NOW, AT_WORK)
        if live.session is None:
            info = live.info
            try:
                opening = asyncio.to_thread(Session.open, info.directory, resume=info.id)
                live.session = await opening
            except StoreError as error:
                raise HTTPException(NOT_NOW, str(error)) from None
            self._show_again(live, live.session)
        return live.session

    # -- what is done in a session

    async def prompt(self, live: Live, wanted: Prompt) -> None:
        """Begin a run. Raises HTTPException during another one, and CoderError."""
        async with live.lock:
            session = await self._open(live)
            if wanted.agent or wanted.model:
                await asyncio.to_thread(
                    session.use,
                    agent=wanted.agent,
                    model=wanted.model,
                )
            # Begun here, not in the task: an abort counts from now on
            text = wanted.text.strip("\n")
            events = session.aprompt(text, wanted.images)
            run = self._follow_run(live, events)
            live.run = asyncio.create_task(run)

    async def _follow_run(self, live: Live, run: AsyncGenerator[Event, None]) -> None:
        try:
            async with aclosing(run) as events:
                async for event in events:
                    self.publish(live, event)
                    if isinstance(event, StepEnd | RunEnd):
                        live.shorten()
        except Exception as error:
            log.exception("a run of session %s broke off", live.info.id)
            self.publish(live, Failed(f"{type(error).__name__}: {error}"))

    async def abort(self, live: Live) -> None:
        """End the run, if there is one, and wait for its end."""
        if live.session and live.run:
            live.session.cancel()
            await asyncio.wait([live.run])

    async def travel(self, live: Live, change: Callable[[Session], UndoResult]) -> str:
        """Undo or redo a run; its prompt. Raises HTTPException, with the reason why not."""
        async with live.lock:
            session = await self._open(live)
            result = await asyncio.to_thread(change, session)
            if result.problem:
                raise HTTPException(NOT_NOW, result.problem)
            self._show_again(live, session)
            return result.prompt

    def answer(
        self,
        question_id: str,
        answer: str,
        reason: str = "",
        *,
        is_text: bool = False,
        of: Live | None = None,
    ) -> None:
        """Answer a permission, or with `is_text` a question of the model, `of` one session or any.

        Raises HTTPException if it does not wait (any more).
        """
        for live in self.at_work():
            assert live.session
            if of not in (None, live):
                continue
            for question in live.session.questions:
                takes_text = isinstance(question, QuestionAsked)
                if question.id != question_id or takes_text != is_text:
                    continue
                if live.session.answer(question_id, answer, reason=reason):
                    self.publish(live, Answered(question_id, answer))
                    return
        raise HTTPException(NOT_THERE, f"no question {question_id!r} waits for an answer")

    async def close(self) -> None:
        """End all runs, and release the sessions. Streams end, too."""
        for live in self.at_work():
            await self.abort(live)
        self.is_closing = True
        self._wake()
        for live in list(self.live.values()):
            if live.session:
                await asyncio.to_thread(live.session.close)
        self.store.close()

    # -- what is shown of it

    def publish(self, live: Live, event: BaseEvent) -> None:
        """Number an event, and wake those who wait for one."""
        self.number += 1
        # As it is now: the run may change its messages later
        text = json.dumps(event.to_dict(), default=str)
        entry = Entry(
            number=self.number,
            time=now(),
            event=json.loads(text),
        )
        live.entries.append(entry)
        self._wake()

    def _show_again(self, live: Live, session: Session) -> None:
        """Show the messages of an idle session, in place of what was shown."""
        self.number += 1
        live.base = copied(session.messages)
        live.start = self.number
        live.entries = []
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def wait(self, seen: int) -> bool:
        """Wait for a newer event than `seen`, but not for long; False if none will ever come."""
        if self.number == seen and not self.is_closing:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), SILENCE)
        return self.number != seen or not self.is_closing

    def id_of(self, number: int) -> str:
        """The id of an event in a stream."""
        return f"{self._server}.{number}"

    def number_of(self, event_id: str) -> int | None:
        """The number of an event by its id; None if it is not one of this server's."""
        server, _, number = event_id.partition(".")
        if server == self._server and number.isdecimal() and len(number) < 20:
            return int(number)
        return None


def real_folder(directory: str) -> Path:
    """The folder that a client names; "" is that of the server. Raises CoderError for what is no
    path."""
    try:
        folder = Path(os.path.realpath(directory))  # "" is the working directory
        folder.is_dir()
    except (OSError, ValueError):  # too long, a NUL
        raise CoderError(f"{directory[:80]!r} is no path") from None
    return folder
