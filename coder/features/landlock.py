"""Landlock, Linux's sandbox for everybody: a thread of ours that has given up rights, and starts children that have none more.

    thread = ConfinedThread(lambda: restrict([Path("/work")], DEVICES))
    process = thread.run(lambda: subprocess.Popen(...))

Landlock restricts the calling thread and what that starts, for good; our other threads keep their rights. So there is no
code between fork and exec and no helper program. All children of one thread share one domain: they may signal and trace each
other, and nobody outside of it. From the kernel's Documentation/userspace-api/landlock.rst and uapi/linux/landlock.h.

What it leaves out: reading and executing, which stay free, and what Landlock has no words for; sandbox.py lists that.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # numbers of the system calls, the same on all machines but Alpha
VERSION = 1  # flag of CREATE_RULESET: give the version of the interface
PATH_BENEATH = 1
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38
NETWORK_ABI = 4  # the first with rules for TCP

# Rights that change something, as bits, with the version that brought them. Where one is not known, its act is not confined.
WRITE_FILE, TRUNCATE, IOCTL_DEV = 1 << 1, 1 << 14, 1 << 15
MAKE_AND_REMOVE = sum(1 << bit for bit in range(4, 13))
DEVICE_NODES = 1 << 6 | 1 << 11  # never given: with a node of its own, root would write to any disk
RIGHTS = {1: WRITE_FILE | MAKE_AND_REMOVE, 2: 1 << 13, 3: TRUNCATE, 5: IOCTL_DEV}  # 13 is REFER: link or rename into another folder
FILE_RIGHTS = WRITE_FILE | TRUNCATE | IOCTL_DEV  # those that a rule for a single file may name
TCP = 0b11  # bind and connect
# What root may do beside files, and a child of a confined thread may not: SYS_MODULE, SYS_RAWIO, SYS_PTRACE, SYS_ADMIN, SYS_BOOT,
# SYS_TIME, PERFMON (reads the environment of any process), BPF. From capabilities(7).
CAPABILITIES = (16, 17, 19, 21, 22, 25, 38, 39)
SCOPES = 0b11  # abstract unix sockets and signals of others, since version 6


def available() -> int:
    """The version of Landlock that this kernel has, 0 where it has none or we may not use it."""
    try:
        return _call(CREATE_RULESET, None, 0, VERSION)
    except OSError:
        return 0


def restrict(writable: Iterable[Path], network: bool = True) -> None:
    """From here on this thread, and what it starts, changes files only at and below `writable`; programs that it starts get no
    rights by set-user-ID, and root's are fewer. Without `network` it neither connects nor binds TCP. A path that is not there is
    left out. Raises OSError.
    """
    abi = available()
    if not abi:
        raise OSError("this kernel has no Landlock, or it may not be used")
    handled = sum(rights for since, rights in RIGHTS.items() if abi >= since)
    tcp = 0 if network or abi < NETWORK_ABI else TCP
    fields = [handled, tcp, SCOPES][:1 if abi < NETWORK_ABI else 2 if abi < 6 else 3]
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = _call(CREATE_RULESET, attributes, len(attributes), 0)
    try:
        for path in writable:
            _allow(ruleset, path, handled)
        libc = ctypes.CDLL(None, use_errno=True)
        for capability in CAPABILITIES:  # fails for all but root, who alone has them
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
        if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        _call(RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: Path, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        rights &= ~DEVICE_NODES
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= FILE_RIGHTS
        _call(ADD_RULE, ruleset, PATH_BENEATH, struct.pack("=Qi", rights, fd), 0)
    finally:
        os.close(fd)


def _call(number: int, *arguments: int | bytes | None) -> int:
    """A system call. Raises OSError."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        result = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(each) if isinstance(each, int) else each for each in arguments))
    except (AttributeError, TypeError):  # a system without the function
        raise OSError("no Linux") from None
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)


class ConfinedThread:
    """A thread that runs `restrict` first, then what it is given, one after the other. Raises what `restrict` raises."""

    def __init__(self, restrict: Callable[[], None]) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        threading.Thread(target=self._work, daemon=True, name="sandbox").start()
        self.run(restrict)

    def run(self, work: Callable[[], T], discard: Callable[[T], object] | None = None) -> T:
        """Run it there; returns what it returns, raises what it raises. `discard` is given the value where an interrupt comes
        while we wait."""
        job = _Job(work)
        self._jobs.put(job)
        try:
            job.done.wait()
        except BaseException:
            job.done.wait()
            if discard and not job.error:
                discard(job.value)
            raise
        if job.error:
            raise job.error
        value: T = job.value
        return value

    def end(self) -> None:
        """Let the thread end; what it has started goes on."""
        self._jobs.put(None)

    def _work(self) -> None:
        while job := self._jobs.get():
            job.do()


class _Job:
    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.value: Any = None
        self.error: BaseException | None = None
        self.done = threading.Event()

    def do(self) -> None:
        try:
            self.value = self.work()
        except BaseException as error:  # raised where the work comes from
            self.error = error
        self.done.set()
