"""Landlock, Linux's sandbox for everybody: a thread of ours that has given up rights, and starts children that have none more.

    thread = ConfinedThread(lambda: restrict([Path("/work")], DEVICES))
    process = thread.run(lambda: subprocess.Popen(...))

Landlock restricts the calling thread and what that starts, for good; our other threads keep their rights. So there is no
code between fork and exec and no helper program. All children of one thread share one domain: they may signal and trace each
other, and nobody outside of it. From the kernel's Documentation/userspace-api/landlock.rst and uapi/linux/landlock.h.

Without a network a filter of seccomp comes with it: Landlock knows TCP by bind and connect only, and TCP fast open, MPTCP and
UDP go around that. It leaves unix sockets and netlink, and no io_uring. From Documentation/userspace-api/seccomp_filter.rst.

What it leaves out: reading and executing, which stay free, and what Landlock has no words for; sandbox.py lists that.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # numbers of the system calls, the same on all machines but Alpha
VERSION = 1  # flag of CREATE_RULESET: give the version of the interface
PATH_BENEATH = 1
PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 22, 24, 38
FILTER_MODE = 2
NETWORK_ABI = 4  # the first with rules for TCP
FULL_ABI = 6  # the first that keeps all that sandbox.py promises
# What commands can do where the version is older than this.
GAPS = {3: "empty files elsewhere", 5: "give orders to devices", FULL_ABI: "signal other processes of yours and use their abstract sockets"}
PATIENCE = 1.0  # seconds that an interrupt waits for work that has begun

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

# Numbers of system calls by AUDIT_ARCH: socket, socketcall (0 where there is none); from the kernel's syscall tables.
SOCKETS = {0xC000003E: (41, 0), 0xC00000B7: (198, 0), 0x40000003: (359, 102), 0x40000028: (281, 102)}
MACHINES = {"x86_64", "aarch64"}  # those whose programs, also of 32 bits, are in the table
X32 = 0x40000000  # and above: x86_64's calls by other numbers
IO_URING_SETUP = 425
FAMILIES = (1, 16)  # AF_UNIX, AF_NETLINK
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06  # of BPF, from linux/bpf_common.h
ALLOW, DENY = 0x7FFF0000, 0x00050000 | errno.EACCES
NUMBER, ARCH, ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; the low half of the first argument


class LandlockError(OSError):
    """The kernel does not do it."""


def available() -> int:
    """The version of Landlock that this kernel has, 0 where it has none or we may not use it."""
    try:
        return _call(CREATE_RULESET, None, 0, VERSION)
    except OSError:
        return 0


def gaps(abi: int) -> list[str]:
    """What commands can do on a kernel with this version of Landlock and not on a newer one."""
    return [words for since, words in GAPS.items() if abi < since]


def can_filter() -> bool:
    """Does this kernel have filters of system calls, for a machine that we know?"""
    if sys.platform != "linux" or os.uname().machine not in MACHINES:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_SECCOMP, FILTER_MODE, None, 0, 0)  # changes nothing; the error tells, see seccomp(2)
    return ctypes.get_errno() == errno.EFAULT


def restrict(writable: Iterable[Path], network: bool = True, abi: int | None = None) -> None:
    """From here on this thread, and what it starts, changes files only at and below `writable`; programs that it starts get no
    rights by set-user-ID, and root's are fewer. Without `network` it has sockets for this machine only; where there are no filters
    (`can_filter`), it neither connects nor binds TCP. A path that is not there is left out. `abi`: use no newer version.
    Raises LandlockError.
    """
    abi = min(available(), available() if abi is None else abi)
    if not abi:
        raise LandlockError("this kernel has no Landlock, or it may not be used")
    handled = sum(rights for since, rights in RIGHTS.items() if abi >= since)
    tcp = 0 if network or abi < NETWORK_ABI else TCP
    fields = [handled, tcp, SCOPES][:1 if abi < NETWORK_ABI else 2 if abi < FULL_ABI else 3]
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = _call(CREATE_RULESET, attributes, len(attributes), 0)
    try:
        for path in writable:
            _allow(ruleset, path, handled)
        libc = ctypes.CDLL(None, use_errno=True)
        for capability in CAPABILITIES:  # fails for all but root, who alone has them
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
        _control(PR_SET_NO_NEW_PRIVS, 1)
        _call(RESTRICT_SELF, ruleset, 0)
        if not network and can_filter():
            _filter(without_network())
    finally:
        os.close(ruleset)


def without_network() -> list[tuple[int, int, int, int]]:
    """A program of BPF (code, steps to skip if true, if false, value) that denies sockets but unix and netlink ones, and io_uring.
    What comes by an architecture that it does not know is denied."""
    program = [(LOAD, 0, 0, ARCH)]
    for arch, (socket, socketcall) in SOCKETS.items():
        part = [(LOAD, 0, 0, NUMBER), (AT_LEAST, 0, 1, X32), (RETURN, 0, 0, DENY),
                (EQUAL, 0, 1, IO_URING_SETUP), (RETURN, 0, 0, DENY),
                *([(EQUAL, 0, 1, socketcall), (RETURN, 0, 0, DENY)] if socketcall else []),  # its arguments are out of sight
                (EQUAL, 1, 0, socket), (RETURN, 0, 0, ALLOW),
                (LOAD, 0, 0, ARGUMENT), *((EQUAL, len(FAMILIES) - at, 0, family) for at, family in enumerate(FAMILIES)),
                (RETURN, 0, 0, DENY), (RETURN, 0, 0, ALLOW)]
        program += [(EQUAL, 0, len(part), arch), *part]
    return [*program, (RETURN, 0, 0, DENY)]


def _filter(program: list[tuple[int, int, int, int]]) -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in program))
    _control(PR_SET_SECCOMP, FILTER_MODE, ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code))))


def _control(*arguments: Any) -> None:
    """prctl. Raises LandlockError."""
    if ctypes.CDLL(None, use_errno=True).prctl(*arguments, *[0] * (5 - len(arguments))):
        raise LandlockError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


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
    """A system call. Raises LandlockError, also where the number would be another call's."""
    if sys.platform != "linux":
        raise LandlockError("no Linux")
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(each) if isinstance(each, int) else each for each in arguments))
    if result < 0:
        raise LandlockError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)


class ConfinedThread:
    """A thread that runs `restrict` first, then what it is given, one after the other. Raises what `restrict` raises."""

    def __init__(self, restrict: Callable[[], None]) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        threading.Thread(target=self._work, daemon=True, name="sandbox").start()
        self.run(restrict)

    def run(self, work: Callable[[], T], discard: Callable[[T], object] | None = None) -> T:
        """Run it there; returns what it returns, raises what it raises. An interrupt that comes while we wait is raised when it is
        done, or PATIENCE seconds later; `discard` is given the value then."""
        job = _Job(work)
        self._jobs.put(job)
        if interrupt := _waited(job.done):
            if discard and job.done.is_set() and not job.error:
                discard(job.value)
            raise interrupt
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


def _waited(done: threading.Event) -> BaseException | None:
    """Wait for it, an interrupt notwithstanding; returns the first that came."""
    interrupt, end = None, float("inf")
    while not done.is_set() and (left := end - time.monotonic()) > 0:
        try:
            done.wait(min(left, threading.TIMEOUT_MAX))
        except BaseException as error:  # of a signal's handler, any
            interrupt, end = interrupt or error, min(end, time.monotonic() + PATIENCE)
    return interrupt


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
