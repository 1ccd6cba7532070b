"""Landlock and seccomp: a thread gives up rights for good, and what it starts has no more."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

# Landlock restricts a thread and what it starts. These can signal and trace each other, and nothing
# else (the kernel's Documentation/userspace-api/landlock.rst, uapi/linux/landlock.h). A seccomp
# filter (seccomp_filter.rst) covers what Landlock has no rights for: the limits of other processes
# (a CPU limit of 0 kills), their priorities, schedulers and processors, and, without a network, all
# sockets but local ones: Landlock knows TCP by bind and connect only, which TCP fast open, MPTCP
# and UDP avoid.

# Of BPF: code, instructions to skip if true, if false, value
Instruction = tuple[int, int, int, int]

# System calls, the same on all machines but Alpha
CREATE_RULESET = 444
ADD_RULE = 445
RESTRICT_SELF = 446
VERSION = 1  # flag of CREATE_RULESET: return the version of the interface
PATH_BENEATH = 1
# Of prctl(2)
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
FILTER_MODE = 2
# The first versions of the interface with rules for TCP, and with scopes
NETWORK_ABI = 4
FULL_ABI = 6

# Rights that change something, as bits, by the version that introduced them
WRITE_FILE = 1 << 1
REFER = 1 << 13
TRUNCATE = 1 << 14
IOCTL_DEV = 1 << 15
MAKE_AND_REMOVE = sum(1 << bit for bit in range(4, 13))
RIGHTS = {1: WRITE_FILE | MAKE_AND_REMOVE, 2: REFER, 3: TRUNCATE, 5: IOCTL_DEV}
FOLDER_RIGHTS = ~(1 << 6 | 1 << 11)  # no device nodes: with its own root could write to any disk
FILE_RIGHTS = WRITE_FILE | TRUNCATE | IOCTL_DEV  # those that a rule for a single file may name
TCP = 0b11  # bind and connect
SCOPE_SIGNAL = 0b10
SCOPES = 0b01 | SCOPE_SIGNAL  # abstract unix sockets and signals of others
# Dropped for root: SYS_MODULE, SYS_RAWIO, SYS_PTRACE, SYS_ADMIN, SYS_BOOT, SYS_TIME, PERFMON
# (reads the environment of any process), BPF. See capabilities(7).
CAPABILITIES = (16, 17, 19, 21, 22, 25, 38, 39)


class Calls(NamedTuple):
    """The numbers of system calls; 0 for none."""

    socket: int
    socketcall: int
    prlimit64: int
    setpriority: int
    ioprio_set: int
    # sched_setparam, sched_setscheduler, sched_setaffinity, sched_setattr
    scheduling: tuple[int, ...]


CALLS = {  # by AUDIT_ARCH
    0xC000003E: Calls(41, 0, 302, 141, 251, (142, 144, 203, 314)),  # x86_64
    0xC00000B7: Calls(198, 0, 261, 140, 30, (118, 119, 122, 274)),  # aarch64
    0x40000003: Calls(359, 102, 340, 97, 289, (154, 156, 241, 351)),  # i386
    0x40000028: Calls(281, 102, 369, 97, 314, (154, 156, 241, 380)),  # arm
}
MACHINES = {"x86_64", "aarch64"}  # those whose programs, 32-bit ones included, are all in the table
X32 = 0x40000000  # from here on: the calls of x86_64 by other numbers
IO_URING_SETUP = 425
# Codes of instructions (linux/bpf_common.h)
LOAD = 0x20
EQUAL = 0x15
AT_LEAST = 0x35
RETURN = 0x06
ALLOW_CALL: Instruction = (RETURN, 0, 0, 0x7FFF0000)
DENY: Instruction = (RETURN, 0, 0, 0x00050000 | errno.EACCES)
# What is loaded, by its offset in struct seccomp_data; of the arguments the low half is first
NUMBER = 0
ARCH = 4
FIRST = 16
SECOND = 24
THIRD = 32
# socket(family, ...): AF_UNIX and AF_NETLINK
LOCAL_SOCKETS = [
    (LOAD, 0, 0, FIRST),
    (EQUAL, 2, 0, 1),
    (EQUAL, 1, 0, 16),
    DENY,
    ALLOW_CALL,
]
# prlimit64(process, resource, new, old): process 0 is the caller; without `new` it only reads
OWN_LIMITS = [
    (LOAD, 0, 0, FIRST),
    (EQUAL, 5, 0, 0),
    (LOAD, 0, 0, THIRD),
    (EQUAL, 0, 2, 0),
    (LOAD, 0, 0, THIRD + 4),
    (EQUAL, 1, 0, 0),
    DENY,
    ALLOW_CALL,
]
# sched_setaffinity(process, ...) and the like: process 0 is the caller
OWN_PROCESS = [
    (LOAD, 0, 0, FIRST),
    (EQUAL, 1, 0, 0),
    DENY,
    ALLOW_CALL,
]
# From here on, the first argument of setpriority and ioprio_set means all processes of a user
PRIO_USER = 2
IOPRIO_WHO_USER = 3


def restrict(writable: Iterable[Path], network: bool = True, abi: int | None = None) -> bool:
    """Limit this thread, and what it starts, to changing files at and below `writable`.

    Its programs get no rights by set-user-ID, fewer of root's, and cannot change other processes'
    limits, priorities and scheduling. Without `network` it has local sockets only, or no TCP if
    seccomp is missing. `abi`: use no newer Landlock. Returns whether the kernel can do all of this.
    Raises OSError if it has no Landlock.
    """
    if abi is None:
        abi = _call("syscall", CREATE_RULESET, None, 0, VERSION)
    handled = sum(rights for since, rights in RIGHTS.items() if abi >= since)
    fields = [handled]
    if abi >= NETWORK_ABI:
        fields.append(0 if network else TCP)
    if abi >= FULL_ABI:
        fields.append(SCOPES)
    _enter_domain(fields, writable)
    with contextlib.suppress(OSError):  # only root can drop them, who alone has them
        for capability in CAPABILITIES:
            _call("prctl", PR_CAPBSET_DROP, capability, 0, 0, 0)
    return _filter_calls(network) and abi >= FULL_ABI


def limit_signals() -> None:
    """Let this thread, and what it starts, signal nothing else. Raises OSError if Landlock cannot.

    Links and moves between folders stay allowed everywhere: each set of rules denies them unless it
    allows them.
    """
    _enter_domain([REFER, 0, SCOPE_SIGNAL], [Path("/")])


def _enter_domain(fields: Sequence[int], writable: Iterable[Path]) -> None:
    """Restrict this thread by a set of rules: `fields` are those of struct landlock_ruleset_attr.

    The rights in the first one are left to it at and below `writable` alone, as far as that exists.
    Raises OSError.
    """
    handled = fields[0]
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = _call("syscall", CREATE_RULESET, attributes, len(attributes), 0)
    with contextlib.ExitStack() as closing:
        closing.callback(os.close, ruleset)
        for path in writable:
            try:
                fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            closing.callback(os.close, fd)
            is_folder = stat.S_ISDIR(os.fstat(fd).st_mode)
            rights = FOLDER_RIGHTS if is_folder else FILE_RIGHTS
            rule = struct.pack("=Qi", handled & rights, fd)
            _call("syscall", ADD_RULE, ruleset, PATH_BENEATH, rule, 0)
        _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _call("syscall", RESTRICT_SELF, ruleset, 0)


def _filter_calls(network: bool) -> bool:
    """Deny for good changing other processes' limits, priorities and scheduling.

    Without `network` also sockets other than unix and netlink ones, and io_uring, which opens
    sockets by itself. Calls of an unknown architecture are denied. False if seccomp does not work,
    or the machine is not in the table.
    """
    program = [(LOAD, 0, 0, ARCH)]
    for arch, calls in CALLS.items():
        part = [(LOAD, 0, 0, NUMBER), (AT_LEAST, 0, 1, X32), DENY]
        part += case(calls.prlimit64, OWN_LIMITS)
        part += case(calls.setpriority, _own_priority(PRIO_USER))
        part += case(calls.ioprio_set, _own_priority(IOPRIO_WHO_USER))
        for number in calls.scheduling:
            part += case(number, OWN_PROCESS)
        if not network:
            part += case(IO_URING_SETUP, [DENY])
            part += case(calls.socket, LOCAL_SOCKETS)
        if not network and calls.socketcall:
            part += case(calls.socketcall, [DENY])  # its arguments cannot be seen
        part.append(ALLOW_CALL)
        program += case(arch, part)
    return install_filter(program)


def install_filter(program: list[Instruction]) -> bool:
    """Filter this thread's system calls for good, and deny all of other architectures."""
    packed = b"".join([struct.pack("=HBBI", *instruction) for instruction in [*program, DENY]])
    code = ctypes.create_string_buffer(packed)
    header = struct.pack("@HP", len(packed) // 8, ctypes.addressof(code))
    with contextlib.suppress(OSError):
        if os.uname().machine in MACHINES:
            return _call("prctl", PR_SET_SECCOMP, FILTER_MODE, header, 0, 0) == 0
    return False


def _own_priority(users: int) -> list[Instruction]:
    """setpriority(which, who, ...): who 0 is the caller or its group; from `users` on, its user."""
    return [
        (LOAD, 0, 0, FIRST),
        (AT_LEAST, 2, 0, users),
        (LOAD, 0, 0, SECOND),
        (EQUAL, 1, 0, 0),
        DENY,
        ALLOW_CALL,
    ]


def case(value: int, part: list[Instruction]) -> list[Instruction]:
    """Run `part` if the loaded value is this one."""
    return [(EQUAL, 0, len(part), value), *part]


def _call(name: str, *arguments: int | bytes | None) -> int:
    """Call a function of the C library. Raises OSError."""
    if sys.platform != "linux":  # there the numbers are those of other system calls
        raise OSError(errno.ENOSYS, "this system is not Linux")
    values = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    result = function(*values)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)
