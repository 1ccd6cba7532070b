"""ParallelTools: a tool set that runs neighbouring calls which change nothing side by side.

    run_loop(messages, model, ParallelTools([read, grep, edit]))

The start events come first, in the order of the answer; the tools' events come as they happen; the results
stand in the history in the order of the answer. Hooks and the consumer of the events are called in the run's
own thread, one at a time. A call of a tool that writes waits for those before it, and those behind wait for it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator, Sequence
from typing import TypeAlias

from coder.abort import TICK, Abort
from coder.events import Event
from coder.toolset import Toolset
from coder.types import ToolCall, ToolResult

Work: TypeAlias = Generator[Event, None, ToolResult]
Outputs: TypeAlias = "queue.SimpleQueue[tuple[int, Event | ToolResult | BaseException]]"

MAX_WORKERS = 8
GRACE = 0.3  # seconds for a tool to end after an abort; then its thread is abandoned


class ParallelTools(Toolset):
    """A Toolset whose `concurrent` tools run side by side where their calls are neighbours."""

    def group_size(self, calls: list[ToolCall]) -> int:
        size = 0
        for call in calls[:MAX_WORKERS]:
            if call.name not in self.tools or not self.tools[call.name].concurrent:
                break
            size += 1
        return max(1, size)

    def together(
        self, works: Sequence[Work], abort: Abort
    ) -> Generator[tuple[int, Event | ToolResult], None, None]:
        """Run the works side by side, as Toolset.together.

        Raises what a work raises, or Aborted, after all works have ended or GRACE after an abort. Closed
        early, it sets `abort`, so that the tools end.
        """
        if len(works) == 1:
            yield from super().together(works, abort)
            return
        outputs: Outputs = queue.SimpleQueue()
        workers = [_Worker(place, work, outputs) for place, work in enumerate(works)]
        running, errors, deadline = len(works), list[BaseException](), 0.0
        try:
            while running and not (deadline and time.monotonic() > deadline):
                if abort.is_set:
                    deadline = deadline or time.monotonic() + GRACE
                try:
                    place, output = outputs.get(timeout=TICK)
                except queue.Empty:
                    continue
                if isinstance(output, BaseException):
                    errors.append(output)
                else:
                    yield place, output
                running -= isinstance(output, ToolResult | BaseException)
                workers[place].resume.release()
            for error in errors:
                raise error
            abort.check()
        finally:
            if running:
                abort.set()
                for worker in workers:
                    worker.stopped = True
                    worker.resume.release()
                deadline = time.monotonic() + GRACE
                for worker in workers:
                    worker.join(max(0.0, deadline - time.monotonic()))


class _Worker(threading.Thread):
    """One work. After each event it waits until the event has been handled."""

    def __init__(self, place: int, work: Work, outputs: Outputs) -> None:
        super().__init__(daemon=True, name=f"tool call {place}")
        self.place, self.work, self.outputs = place, work, outputs
        self.resume, self.stopped = threading.Semaphore(0), False
        self.start()

    def run(self) -> None:
        try:
            while not self.stopped:
                self.outputs.put((self.place, next(self.work)))
                self.resume.acquire()
            self.work.close()
        except StopIteration as end:
            self.outputs.put((self.place, end.value))
        except BaseException as error:  # raised again in the run's thread
            self.outputs.put((self.place, error))
