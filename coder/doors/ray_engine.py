"""Tasks on a Ray cluster: Ray places them, limits how many run, and starts again what is lost."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

import ray

from coder.doors.batch import SLICE, Job, work
from coder.doors.files import BatchError, Row

RESTARTS = 20  # of a task whose worker or node is lost, in addition to batch.TRIES
PATIENCE = 5.0  # seconds for a connection: Ray itself tries for more than a minute


class RayEngine:
    """The cluster at `address` ("auto" is the one of this machine); without one, a cluster of this
    machine alone. `room`: how many tasks are in flight; each takes one CPU. The package has to be
    installed on every node, and a folder of a task has to be there. Raises BatchError."""

    def __init__(self, room: int, address: str | None = None) -> None:
        self.room = room
        if not ray.is_initialized():
            try:
                check_address(address or "")
                ray.init(address=address, log_to_driver=False)
            except (OSError, ValueError, RuntimeError) as error:
                why = str(error).partition("\n")[0]
                raise BatchError(f"Ray cannot be used: {why}") from None
        self._work = ray.remote(num_cpus=1, max_retries=RESTARTS)(work)

    def start(self, job: Job) -> Any:
        return self._work.remote(job)

    def ended(self, handles: Iterable[Any]) -> Iterable[Any]:
        ready, _ = ray.wait(list(handles), num_returns=1, timeout=SLICE)
        return list(ready)

    def row(self, handle: Any) -> Row:
        try:
            row: Row = ray.get(handle)
        except ray.exceptions.RayTaskError as error:
            cause = error.as_instanceof_cause()
            if isinstance(cause, BatchError):
                raise cause from None
            raise BatchError(str(cause)) from None
        except ray.exceptions.RayError as error:
            raise BatchError(f"the cluster: {error}") from None
        return row

    def close(self) -> None:
        ray.shutdown()


def check_address(address: str) -> None:
    """Raise OSError if nothing listens at HOST:PORT or ray://HOST:PORT, ValueError for a bad port.

    Other addresses, such as auto, have no port and are Ray's to find.
    """
    place = urlsplit(address if "://" in address else f"//{address}")
    if not place.port:
        return
    try:
        socket.create_connection((place.hostname, place.port), PATIENCE).close()
    except OSError as error:
        raise OSError(f"{address}: {error}") from None
