"""The clipboard: a program of the desktop or of tmux, else the terminal itself (OSC 52), which
works over ssh, too.

Whether a terminal takes OSC 52 cannot be known, so that both are tried, and the message does not
promise it.
"""

from __future__ import annotations

import base64
import os
import subprocess
import sys

from coder.cli.screen import Screen
from coder.permissions.sanitize import strip_controls

# By the variable that has to be set
PROGRAMS = (
    ("TMUX", ["tmux", "load-buffer", "-w", "-"]),
    ("WAYLAND_DISPLAY", ["wl-copy"]),
    ("DISPLAY", ["xclip", "-selection", "clipboard"]),
    ("DISPLAY", ["xsel", "--clipboard", "--input"]),
)
OF_MACOS = ["pbcopy"]
SECONDS = 2.0  # for a program to take it
MAX_SENT = 100_000  # characters that terminals take


def copy(text: str, screen: Screen) -> str:
    """Copy a text without control characters, which a shell would run when it is pasted.

    Returns how that was done; "" if it was not.
    """
    data = strip_controls(text).encode("utf-8", "replace")
    sent = base64.b64encode(data).decode()
    to_terminal = screen.live and os.environ.get("TERM") != "linux" and len(sent) <= MAX_SENT
    if to_terminal:
        screen.stream.write(f"\x1b]52;c;{sent}\x07")
        screen.stream.flush()
    program = _pipe(data)
    if program:
        return f"by {program}"
    return "by the terminal, if it takes that (OSC 52)" if to_terminal else ""


def _pipe(data: bytes) -> str:
    """The first program that takes it; "" for none."""
    programs = [argv for name, argv in PROGRAMS if os.environ.get(name)]
    if sys.platform == "darwin":
        programs.insert(0, OF_MACOS)
    null = subprocess.DEVNULL
    for argv in programs:
        try:
            done = subprocess.run(
                argv,
                input=data,
                stdout=null,
                stderr=null,
                timeout=SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            return argv[0]
    return ""
