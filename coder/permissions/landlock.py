"""Landlock and seccomp: a thread that gives up rights for good; its child processes have no more.

    thread = ThreadPoolExecutor(1)
    thread.submit(restrict, [Path("/work"), Path("/dev/null")]).result()
    process = thread.submit(subprocess.Popen, ["make"]).result()

Landlock restricts the calling thread and what it starts; the other threads keep their rights. So
there is no code between fork and exec, no helper program, and nothing to install. Children of one
thread share one Landlock domain: they can signal and trace each other and nothing outside of it.
See the kernel's Documentation/userspace-api/landlock.rst and uapi/linux/landlock.h.

A seccomp filter covers what Landlock has no rights for: the resource limits of other processes (a
CPU limit of 0 kills), and, without a network, all sockets but local ones: Landlock knows TCP by
bind and connect only, which TCP fast open, MPTCP and UDP avoid. See
Documentation/userspace-api/seccomp_filter.rst.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

# Of BPF: code, instructions to skip if true, if false, value
Instruction = tuple[int, int, int, int]

# System calls, the same on all machines but Alpha; and constants of prctl(2).
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION = 1  # flag of CREATE_RULESET: return the version of the interface
PATH_BENEATH = 1
PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 22, 24, 38
FILTER_MODE = 2

NETWORK_ABI, FULL_ABI = 4, 6  # the first versions with rules for TCP, and with scopes

# Rights that change something, as bits, by the version that introduced them.
WRITE_FILE, REFER, TRUNCATE, IOCTL_DEV = 1 << 1, 1 << 13, 1 << 14, 1 << 15
MAKE_AND_REMOVE = sum(1 << bit for bit in range(4, 13))
RIGHTS = {1: WRITE_FILE | MAKE_AND_REMOVE, 2: REFER, 3: TRUNCATE, 5: IOCTL_DEV}
FOLDER_RIGHTS = ~(1 << 6 | 1 << 11)  # no device nodes: with its own root could write to any disk
FILE_RIGHTS = WRITE_FILE | TRUNCATE | IOCTL_DEV  # those that a rule for a single file may name
TCP = 0b11  # bind and connect
SCOPES = 0b11  # abstract unix sockets and signals of others
# Dropped for root: SYS_MODULE, SYS_RAWIO, SYS_PTRACE, SYS_ADMIN, SYS_BOOT, SYS_TIME, PERFMON
# (reads the environment of any process), BPF. See capabilities(7).
CAPABILITIES = (16, 17, 19, 21, 22, 25, 38, 39)

# By AUDIT_ARCH, the numbers of socket, socketcall (0: none) and prlimit64.
CALLS = {
    0xC000003E: (41, 0, 302),  # x86_64
    0xC00000B7: (198, 0, 261),  # aarch64
    0x40000003: (359, 102, 340),  # i386
    0x40000028: (281, 102, 369),  # arm
}
MACHINES = {"x86_64", "aarch64"}  # those whose programs, 32-bit ones included, are all in the table
X32 = 0x40000000  # from here on: the calls of x86_64 by other numbers
IO_URING_SETUP = 425
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06  # linux/bpf_common.h
ALLOW: Instruction = (RETURN, 0, 0, 0x7FFF0000)
DENY: Instruction = (RETURN, 0, 0, 0x00050000 | errno.EACCES)
NUMBER, ARCH, FIRST, THIRD = 0, 4, 16, 32  # in struct seccomp_data; arguments: low half first
# socket(family, ...): AF_UNIX and AF_NETLINK.
LOCAL_SOCKETS = [(LOAD, 0, 0, FIRST), (EQUAL, 2, 0, 1), (EQUAL, 1, 0, 16), DENY, ALLOW]
# prlimit64(process, resource, new, old): process 0 is the caller; without `new` it only reads.
OWN_LIMITS = [
    *[(LOAD, 0, 0, FIRST), (EQUAL, 5, 0, 0)],
    *[(LOAD, 0, 0, THIRD), (EQUAL, 0, 2, 0), (LOAD, 0, 0, THIRD + 4), (EQUAL, 1, 0, 0)],
    *[DENY, ALLOW],
]


def restrict(writable: Iterable[Path], network: bool = True, abi: int | None = None) -> bool:
    """Limit this thread, and what it starts, to changing files at and below `writable`.

    Its programs get no rights by set-user-ID, fewer of root's, and cannot change other processes'
    limits. Without `network` it has local sockets only. A path that does not exist is left out.
    `abi`: use no newer Landlock. Returns whether the kernel can do all of this; where seccomp is
    missing, only TCP is denied. Raises OSError.
    """
    if abi is None:
        abi = _call("syscall", CREATE_RULESET, None, 0, VERSION)
    handled = sum(rights for since, rights in RIGHTS.items() if abi >= since)
    fields = [handled, 0 if network else TCP, SCOPES]
    fields = fields[: 1 if abi < NETWORK_ABI else 2 if abi < FULL_ABI else 3]
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
            rule = struct.pack("=Qi", handled & (FOLDER_RIGHTS if is_folder else FILE_RIGHTS), fd)
            _call("syscall", ADD_RULE, ruleset, PATH_BENEATH, rule, 0)
        with contextlib.suppress(OSError):  # only root can drop them, who alone has them
            for capability in CAPABILITIES:
                _call("prctl", PR_CAPBSET_DROP, capability, 0, 0, 0)
        _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _call("syscall", RESTRICT_SELF, ruleset, 0)
    return _filter_calls(network) and abi >= FULL_ABI


def _filter_calls(network: bool) -> bool:
    """Deny for good changing other processes' limits and, without `network`, sockets other than unix
    and netlink ones, and io_uring, which opens sockets by itself. Calls of an unknown architecture
    are denied. False where seccomp does not work, or the machine is not in the table."""
    program = [(LOAD, 0, 0, ARCH)]
    for arch, (socket, socketcall, prlimit) in CALLS.items():
        part = [(LOAD, 0, 0, NUMBER), (AT_LEAST, 0, 1, X32), DENY, *_case(prlimit, OWN_LIMITS)]
        if not network:
            part += [*_case(IO_URING_SETUP, [DENY]), *_case(socket, LOCAL_SOCKETS)]
            part += _case(socketcall, [DENY]) if socketcall else []  # its arguments cannot be seen
        program += _case(arch, [*part, ALLOW])
    packed = b"".join(struct.pack("=HBBI", *each) for each in [*program, DENY])
    code = ctypes.create_string_buffer(packed)
    header = struct.pack("@HP", len(packed) // 8, ctypes.addressof(code))
    try:
        return os.uname().machine in MACHINES and not _call(
            "prctl", PR_SET_SECCOMP, FILTER_MODE, header, 0, 0
        )
    except OSError:
        return False


def _case(value: int, part: list[Instruction]) -> list[Instruction]:
    """Run `part` where the loaded value is this one."""
    return [(EQUAL, 0, len(part), value), *part]


def _call(name: str, *arguments: int | bytes | None) -> int:
    """Call a function of the C library. Raises OSError."""
    if sys.platform != "linux":  # where the numbers are those of other system calls
        raise OSError(errno.ENOSYS, "this system is not Linux")
    given = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result = getattr(ctypes.CDLL(None, use_errno=True), name)(*given)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)
