"""What a command of plan mode may not do apart from writing.

It may not change modes, owners, times and the like, nor ask a server of this machine to change
something. Landlock (landlock.py) has no rights for these, so a second filter of system calls denies
them.
"""

from __future__ import annotations

from pathlib import Path

from coder.permissions.job_thread import JobThread
from coder.permissions.landlock import (
    ALLOW_CALL,
    ARCH,
    CALLS,
    DENY,
    FIRST,
    LOAD,
    NUMBER,
    SECOND,
    Instruction,
    case,
    install_filter,
    restrict,
)

# AUDIT_ARCH
X86_64 = 0xC000003E
AARCH64 = 0xC00000B7
# From asm/unistd.h, by their numbers on the two architectures (0: there is none). Landlock covers
# truncate since version 3 only.
CALLS_THAT_CHANGE = {
    "truncate": (76, 45),
    "chmod": (90, 0),
    "fchmod": (91, 52),
    "chown": (92, 0),
    "fchown": (93, 55),
    "lchown": (94, 0),
    "utime": (132, 0),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "utimes": (235, 0),
    "fchownat": (260, 54),
    "futimesat": (261, 0),
    "fchmodat": (268, 53),
    "utimensat": (280, 88),
}
# fchmodat2, setxattrat, removexattrat, file_setattr: one number on all machines
NEWER_CALLS = (452, 463, 466, 469)
IOCTL = {X86_64: 16, AARCH64: 29}
# The second argument of an ioctl: FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR (ioctl_fs(2))
FLAGS_OF_A_FILE = (0x40086602, 0x401C5820)
UNIX = 1  # the family of a socket


def make_reader(scratch: Path) -> JobThread | None:
    """Make a thread whose children can change this folder alone; None if the kernel cannot."""
    thread = JobThread()
    writable = [scratch, Path("/dev/null"), Path("/dev/zero"), Path("/dev/full")]
    try:
        scratch.mkdir(mode=0o700, exist_ok=True)
        thread.submit(restrict, writable, network=False).result()
        is_denied = thread.submit(deny_changes).result()
    except OSError:
        return None
    return thread if is_denied else None


def deny_changes() -> bool:
    """Deny them in this thread, and in what it starts, for good.

    To be called after `restrict` without a network. Programs of other architectures, 32-bit ones
    too, can do nothing then. False if seccomp does not work, or not on this machine.
    """
    program: list[Instruction] = [(LOAD, 0, 0, ARCH)]
    for column, arch in enumerate((X86_64, AARCH64)):
        numbers = [number[column] for number in CALLS_THAT_CHANGE.values() if number[column]]
        part: list[Instruction] = [(LOAD, 0, 0, NUMBER)]
        for number in (*numbers, *NEWER_CALLS):
            part += case(number, [DENY])
        part += _deny_argument(CALLS[arch].socket, FIRST, UNIX)
        part += _deny_argument(IOCTL[arch], SECOND, *FLAGS_OF_A_FILE)
        part.append(ALLOW_CALL)
        program += case(arch, part)
    return install_filter(program)


def _deny_argument(call: int, offset: int, *values: int) -> list[Instruction]:
    """Deny this call if its argument at `offset` is one of the values."""
    tests: list[Instruction] = [(LOAD, 0, 0, offset)]
    for value in values:
        tests += case(value, [DENY])
    tests.append(ALLOW_CALL)
    return case(call, tests)
