"""asyncio: a run works in a thread and its events come to the event loop; an async tool works in a
thread with an event loop of its own.

Imported late, since asyncio takes 40 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from coder.abort import TICK, Abort
from coder.events import Event, Events, drain
from coder.types import Aborted, T

GRACE = 0.3  # seconds for a coroutine to end after an abort
QUEUED = 100  # events that wait for a consumer that is slower than the run; then the run waits


def run_coroutine(work: Coroutine[Any, Any, T], abort: Abort) -> Generator[None, None, T]:
    """What a coroutine returns: it runs to its end in a thread with a loop of its own.

    Yields every TICK meanwhile. An abort cancels it; if it has not ended GRACE later, its thread
    goes on alone. Raises Aborted.
    """
    working: Future[T] = Future()

    def run() -> None:
        try:
            working.set_result(asyncio.run(_until_aborted(work, abort)))
        except asyncio.CancelledError:
            working.set_exception(Aborted(abort.reason or "cancelled"))
        except BaseException as error:
            working.set_exception(error)

    threading.Thread(target=run, daemon=True, name="async tool").start()
    left = GRACE
    while not wait([working], TICK).done and left > 0:
        if abort.is_set():
            left -= TICK
        yield
    abort.check()
    return working.result()


async def _until_aborted(work: Coroutine[Any, Any, T], abort: Abort) -> T:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)

    def cancel() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended
            loop.call_soon_threadsafe(task.cancel)

    with abort.calling(cancel):
        return await task


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
        """Returns whether there is room for an event. After an abort it does not wait: perhaps
        nobody takes events any more."""
        while not token.is_set():
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
