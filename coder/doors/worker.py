"""The process of one task: the program, which ends with the process that started it (on Linux).

python -P -m coder.doors.worker FLAGS
"""

from __future__ import annotations

import ctypes
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """If the parent is killed, this process gets SIGTERM (prctl(2)): nobody would read its
    answer."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


if __name__ == "__main__":
    end_with_parent()
    runpy.run_module("coder", run_name="__main__", alter_sys=True)
