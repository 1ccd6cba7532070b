"""ParallelTools: a tool set that runs neighbouring calls which change nothing side by side.

    run_loop(messages, model, ParallelTools([read, grep, edit]))

All starts come first, in the order of the answer; what the tools say and their ends come as they happen, so that a slow
one holds up nobody's display; the results stand in the history in the order of the answer. Hooks and the consumer of
the events notice no threads: they are called in the run's own, one at a time. A question that a tool asks is answered before
that tool goes on.

A call of a tool that writes waits for those before it, and those behind it wait for that.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from typing import TypeAlias

from coder.abort import TICK, Abort
from coder.events import Event
from coder.toolset import Toolset
from coder.types import ToolCall, ToolResult

MOST = 8  # calls at a time
GRACE = (
    0.3  # seconds for a tool to end by itself after an abort; then it is left behind in its thread
)

Work: TypeAlias = Generator[Event, None, ToolResult]


class ParallelTools(Toolset):
    """A Toolset whose `concurrent` tools run side by side where their calls are neighbours, at most MOST at a time."""

    def groups(self, calls: list[ToolCall]) -> Iterable[list[ToolCall]]:
        groups: list[list[ToolCall]] = []
        for call in calls:
            if (
                groups
                and len(groups[-1]) < MOST
                and self._concurrent(call)
                and self._concurrent(groups[-1][-1])
            ):
                groups[-1].append(call)
            else:
                groups.append([call])
        return groups

    def _concurrent(self, call: ToolCall) -> bool:
        return call.name in self.tools and self.tools[call.name].concurrent

    def together(
        self, works: Sequence[Work], abort: Abort
    ) -> Generator[tuple[int, Event | ToolResult], None, None]:
        together = side_by_side if len(works) > 1 else super().together
        return together(works, abort)


class _Worker:
    """One work in a thread. After each event it waits until the event has been dealt with."""

    def __init__(
        self,
        place: int,
        work: Work,
        said: queue.SimpleQueue[tuple[_Worker, Event | ToolResult | BaseException]],
    ) -> None:
        self.place, self.work, self.said = place, work, said
        self.over = False
        self.go_on = threading.Semaphore(0)
        self.leave = False  # somebody has broken off the whole
        self.thread = threading.Thread(target=self._run, daemon=True, name=f"tool call {place}")
        self.thread.start()

    def _run(self) -> None:
        try:
            while not self.leave:
                self.said.put((self, next(self.work)))
                self.go_on.acquire()
            self.work.close()
        except StopIteration as end:
            self.said.put((self, end.value))
        except BaseException as error:  # told to the run's thread, which raises it
            self.said.put((self, error))

    def left(self) -> None:
        self.leave = True
        self.go_on.release()


def side_by_side(
    works: Sequence[Work], abort: Abort
) -> Generator[tuple[int, Event | ToolResult], None, None]:
    """Like `Toolset.together`, but all at once. Raises Aborted after all works have ended, or GRACE after an abort.

    Raises what a work raises. Broken off, it sets `abort` so that the tools end, and waits for them no longer than GRACE.
    """
    said: queue.SimpleQueue[tuple[_Worker, Event | ToolResult | BaseException]] = (
        queue.SimpleQueue()
    )
    workers = [_Worker(place, work, said) for place, work in enumerate(works)]
    errors: list[BaseException] = []
    deadline = 0.0
    try:
        while not all(worker.over for worker in workers):
            if abort.is_set:
                deadline = deadline or time.monotonic() + GRACE
            if deadline and time.monotonic() > deadline:
                break
            try:
                worker, what = said.get(timeout=TICK)
            except queue.Empty:
                continue
            if isinstance(what, BaseException):
                worker.over = True
                errors.append(what)
                continue
            worker.over = isinstance(what, ToolResult)
            yield worker.place, what
            worker.go_on.release()
        for error in errors:
            raise error
        abort.check()
    finally:
        if not all(worker.over for worker in workers):
            abort.set()
        _leave([worker for worker in workers if not worker.over])


def _leave(workers: Sequence[_Worker]) -> None:
    deadline = time.monotonic() + GRACE
    for worker in workers:
        worker.left()
    for worker in workers:
        worker.thread.join(max(0.0, deadline - time.monotonic()))
