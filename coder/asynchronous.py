"""A run for asyncio: it works in a thread of its own, and its events come to the event loop.

Imported by the methods of Session for asyncio alone, since asyncio takes 40 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor

from coder.abort import TICK, Abort
from coder.events import Event, Events, drain
from coder.types import T

QUEUED = 100  # events that wait for a consumer that is slower than the run; then the run waits


async def result_of(run: Events[T], token: Abort) -> T:
    """What a run returns when it has ended. If the task is cancelled, `token` aborts the run."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="session")
    working = asyncio.get_running_loop().run_in_executor(thread, drain, run)
    try:
        return await asyncio.shield(working)
    finally:
        token.set()
        thread.shutdown(wait=False)
        await asyncio.wait([working])


async def stream_events(run: Events[T], token: Abort) -> AsyncGenerator[Event, None]:
    """The events of a run, which `token` aborts.

    To leave the loop aborts it, too, and waits for its end.
    """
    loop = asyncio.get_running_loop()
    room = threading.Semaphore(QUEUED)
    arrived: asyncio.Queue[Event | None] = asyncio.Queue()
    is_left = threading.Event()

    def wait_for_room() -> bool:
        """False if the run is aborted meanwhile: its loop may have been left without an end."""
        while not token.is_set:
            if room.acquire(timeout=TICK):
                return True
        return room.acquire(blocking=False)

    def work() -> None:
        with contextlib.closing(run):
            for event in run:
                if not is_left.is_set() and wait_for_room():
                    loop.call_soon_threadsafe(arrived.put_nowait, event)

    thread = ThreadPoolExecutor(1, thread_name_prefix="session")
    working = loop.run_in_executor(thread, work)
    working.add_done_callback(lambda done: arrived.put_nowait(None))
    try:
        while (event := await arrived.get()) is not None:
            room.release()
            yield event
        await working  # raises what the run has raised
    finally:
        token.set()
        is_left.set()
        room.release()  # of an event that waits for it
        thread.shutdown(wait=False)
        await asyncio.wait([working])
