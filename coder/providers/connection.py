"""Line: the connection of one request, which an abort or a deadline can end at any moment.

The request goes out from a thread, because nothing else can be left while a name is looked up or a server does not
answer the door; the same thread then watches the deadlines. The answer is read by the caller: a read that blocks returns
when the socket is shut under it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from coder.abort import TICK, Abort
from coder.types import ModelError

WATCH = 0.25  # seconds between two looks at the deadline


class Line:
    """One request's connection. `stream` is its network stream: at first the newest of the client, which is used again.

    A time-out of the HTTP library would not do for the deadlines: it counts every byte, also a server's comments (S15),
    and cannot change while a body is read (F14). Moving ours is one assignment.
    """

    def __init__(self, stream: Any, seconds: float) -> None:
        self.stream = stream
        self.is_cut = False
        self.fired = False  # a deadline has passed
        self._opened = threading.Event()
        self._over = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None
        self.within(seconds)

    def within(self, seconds: float) -> None:
        """Something has to come within so many seconds from now."""
        self.seconds = seconds
        self._deadline = time.monotonic() + seconds

    def __enter__(self) -> Line:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._over.set()
        if kind:
            self.cut()

    def open(self, send: Callable[[], Any], abort: Abort) -> Any:
        """What `send` returns: the response. Raises what it raises, Aborted, or ModelError when the deadline passes first."""
        threading.Thread(target=self._work, args=(send,), daemon=True).start()
        while not self._opened.wait(TICK):
            abort.check()
            self._look()
            if self.fired:
                raise ModelError("network", "no answer", retryable=True)
        if self._error:
            raise self._error
        return self._value

    def connected(self, stream: Any) -> None:
        """Note the network stream; end it at once if the request was given up meanwhile."""
        self.stream = stream
        if self.is_cut:
            self.cut()

    def cut(self) -> None:
        """End the connection, from any thread or signal handler."""
        self.is_cut = True
        sock = self.stream and self.stream.get_extra_info("socket")
        if sock:
            with suppress(OSError):  # not connected any more
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def _work(self, send: Callable[[], Any]) -> None:
        try:
            self._value = send()
        except BaseException as error:
            self._error = error
        self._opened.set()
        while not self.fired and not self._over.wait(
            max(0.0, min(self._deadline - time.monotonic(), WATCH))
        ):
            self._look()

    def _look(self) -> None:
        if time.monotonic() >= self._deadline:
            self.fired = True
            self.cut()
