"""What a command of plan mode may not do beside writing: change modes, owners, times and the like, and ask
a server of this machine to change something.

Landlock (landlock.py) has no rights for these, so a second filter of system calls denies them.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from coder.permissions.landlock import (
    ALLOW,
    ARCH,
    CALLS,
    DENY,
    EQUAL,
    FIRST,
    LOAD,
    NUMBER,
    Instruction,
    install_filter,
    restrict,
)

X86_64, AARCH64 = 0xC000003E, 0xC00000B7  # AUDIT_ARCH
# From asm/unistd.h: truncate, which Landlock covers since version 3 only, chmod, fchmod, chown, fchown,
# lchown, utime, setxattr and removexattr in their three forms, utimes, fchownat, futimesat, fchmodat,
# utimensat; on aarch64 those of them that it has
CALLS_THAT_CHANGE = {
    X86_64: (
        *(76, 90, 91, 92, 93, 94, 132, 188, 189, 190, 197, 198, 199),
        *(235, 260, 261, 268, 280),
    ),
    AARCH64: (45, 5, 6, 7, 14, 15, 16, 52, 53, 54, 55, 88),
}
# fchmodat2, setxattrat, removexattrat, file_setattr: one number on all machines
NEWER_CALLS = (452, 463, 466, 469)
IOCTL = {X86_64: 16, AARCH64: 29}
SECOND = 24  # in struct seccomp_data, as FIRST: the request of an ioctl
FLAGS_OF_A_FILE = (0x40086602, 0x401C5820)  # FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR: ioctl_fs(2)
UNIX = 1  # the family of a socket


def make_reader(scratch: Path) -> ThreadPoolExecutor | None:
    """Make a thread whose children can change nothing but this folder; None where that cannot be."""
    thread = ThreadPoolExecutor(1)
    places = [scratch, *(Path("/dev", name) for name in ("null", "zero", "full"))]
    try:
        scratch.mkdir(mode=0o700, exist_ok=True)
        thread.submit(restrict, places, network=False).result()
        return thread if thread.submit(deny_changes).result() else None
    except OSError:
        return None


def deny_changes() -> bool:
    """Deny them in this thread, and in what it starts, for good.

    To be called after `restrict` without a network. Programs of other architectures, 32-bit ones too,
    can do nothing then. False where seccomp does not work, or not on this machine.
    """
    program: list[Instruction] = [(LOAD, 0, 0, ARCH)]
    for arch, numbers in CALLS_THAT_CHANGE.items():
        part: list[Instruction] = [(LOAD, 0, 0, NUMBER)]
        for number in (*numbers, *NEWER_CALLS):
            part += _deny_where(number)
        part += _deny_argument(CALLS[arch][0], FIRST, UNIX)
        part += _deny_argument(IOCTL[arch], SECOND, *FLAGS_OF_A_FILE)
        part += [ALLOW]
        program += [(EQUAL, 0, len(part), arch), *part]
    return install_filter(program)


def _deny_where(value: int) -> list[Instruction]:
    """Deny the call if the loaded value is this one."""
    return [(EQUAL, 0, 1, value), DENY]


def _deny_argument(call: int, place: int, *values: int) -> list[Instruction]:
    """Deny this call where its argument at `place` is one of the values."""
    tests: list[Instruction] = [(LOAD, 0, 0, place)]
    for value in values:
        tests += _deny_where(value)
    tests += [ALLOW]
    return [(EQUAL, 0, len(tests), call), *tests]
