"""ParallelTools: a tool set that runs neighbouring calls which change nothing at the same time.

    run_loop(messages, model, ParallelTools([read, grep, edit]))

The start events come first, in the order of the answer; the tools' events come as they happen; the
history has the results in the order of the answer. Hooks and the consumer of the events are called
in the run's own thread, one at a time. A call of a tool that writes waits for those before it, and
those after it wait for it.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from typing import TypeAlias

from coder.abort import TICK, Abort
from coder.events import Event
from coder.toolset import Toolset
from coder.types import ToolCall, ToolResult

Work: TypeAlias = Generator[Event, None, ToolResult]
Output: TypeAlias = Event | ToolResult | BaseException
Outputs: TypeAlias = "queue.SimpleQueue[tuple[int, Output]]"

MAX_WORKERS = 8
GRACE = 0.3  # seconds for a tool to end after an abort; then its thread is abandoned


class ParallelTools(Toolset):
    """A Toolset whose `concurrent` tools run at the same time if their calls are neighbours."""

    def group_size(self, calls: list[ToolCall]) -> int:
        size = 0
        for call in calls[:MAX_WORKERS]:
            tool = self.tools.get(call.name)
            if tool is None or not tool.concurrent:
                break
            size += 1
        return max(1, size)

    def outputs_of(
        self, generators: Sequence[Work], abort: Abort
    ) -> Generator[tuple[int, Event | ToolResult], None, None]:
        """Run the calls at the same time; yields what Toolset.outputs_of does.

        Raises what a generator raises, or Aborted, after all have ended or GRACE after an abort.
        If it is closed early, it sets `abort`, so that the tools end.
        """
        if len(generators) < 2:
            yield from super().outputs_of(generators, abort)
            return
        outputs: Outputs = queue.SimpleQueue()
        workers = [_Worker(index, work, outputs) for index, work in enumerate(generators)]
        running = len(workers)
        errors: list[BaseException] = []
        try:
            for index, output in _take_until_aborted(outputs, abort):
                if isinstance(output, BaseException):
                    errors.append(output)
                else:
                    yield index, output
                workers[index].resume.release()
                if isinstance(output, ToolResult | BaseException):
                    running -= 1
                if not running:
                    break
            if errors:
                raise errors[0]
            abort.check()
        finally:
            if running:
                abort.set()
                _stop(workers)


def _take_until_aborted(outputs: Outputs, abort: Abort) -> Iterator[tuple[int, Output]]:
    """Take what the workers put, until GRACE after an abort."""
    deadline = math.inf
    while time.monotonic() <= deadline:
        if abort.is_set():
            deadline = min(deadline, time.monotonic() + GRACE)
        with contextlib.suppress(queue.Empty):
            yield outputs.get(timeout=TICK)


def _stop(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.stopped = True
        worker.resume.release()
    deadline = time.monotonic() + GRACE
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))


class _Worker(threading.Thread):
    """One work. After each event it waits until the event has been handled."""

    def __init__(self, index: int, work: Work, outputs: Outputs) -> None:
        super().__init__(daemon=True, name=f"tool call {index}")
        self.index = index
        self.work = work
        self.outputs = outputs
        self.resume = threading.Semaphore(0)
        self.stopped = False
        self.start()

    def run(self) -> None:
        try:
            while not self.stopped:
                self.outputs.put((self.index, next(self.work)))
                self.resume.acquire()
            self.work.close()
        except StopIteration as end:
            self.outputs.put((self.index, end.value))
        except BaseException as error:  # raised again in the run's thread
            self.outputs.put((self.index, error))
