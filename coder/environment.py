"""Which variables of an environment are secrets, by their names.

What it leaves out: what becomes of them: tools/process.py keeps them from commands, terminal/private.py from other processes.
"""

from __future__ import annotations

import re

SECRET = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.I)
HARMLESS = {"SSH_AUTH_SOCK", "XAUTHORITY",  # names of sockets and files, without which git and X do not work
            "GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_AUTHOR_DATE"}


def is_secret(name: str) -> bool:
    """Is a variable of this name a secret?"""
    return bool(SECRET.search(name)) and name not in HARMLESS
