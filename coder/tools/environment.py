"""Which variables and headers hold secrets, by their names and by passwords in addresses."""

from __future__ import annotations

import os
import re

SECRET = re.compile(
    "KEY|TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|DATABASE_URL|CONNECTION_STRING|CODER_HEADERS"
    "|_(?:PWD|PASS|PAT|DSN)(?:_|$)|(?<!COM|ASK)(?<!BY)PASS$",  # an ASKPASS is a program
    re.I,
)
# A colon and digits before a path are a port; what stands alone before an @ is mostly a token.
SCHEME = re.compile("(?:basic|bearer|token) +", re.I)  # in front of a header's secret
PASSWORD = re.compile(r"://[^\s/@:\[]*:(?!\d+[/?#])[^\s@]+@|https?://[^\s/@:?#]+@", re.I)
HARMLESS = {
    "SSH_AUTH_SOCK",
    "XAUTHORITY",  # names of sockets and files, without which git and X do not work
    "GIT_AUTHOR_NAME",
    "GIT_AUTHOR_EMAIL",
    "GIT_AUTHOR_DATE",
}
# Where there is one, nothing reaches the network without its password
PROXY = re.compile("[a-z]+_proxy", re.I)


def is_secret(name: str, value: str = "") -> bool:
    """Is a variable of this name a secret, or does its value hold a password or token?"""
    return name not in HARMLESS and bool(
        SECRET.search(name) or (PASSWORD.search(value) and not PROXY.fullmatch(name))
    )


def clean_path(path: str) -> str:
    """Take the relative folders out of a PATH: the `ls` or `git` of a workspace must not be run.

    An empty PATH would mean the workspace, too; the system's own takes its place.
    """
    return os.pathsep.join(filter(os.path.isabs, path.split(os.pathsep))) or os.defpath


def header_secret(name: str, value: str) -> str:
    """The secret in a header, without the scheme in front of it; "" where there is none."""
    if scheme := SCHEME.match(value):
        return value[scheme.end() :]
    return value if is_secret(name, value) or "cookie" in name.lower() else ""
