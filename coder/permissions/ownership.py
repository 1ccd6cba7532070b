"""Ownership: is a file whose code or commands are going to be run the user's own?"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path


def check_ownership(path: Path) -> None:
    """Raise PermissionError, in one line, where another user may have written or replaced this file.

    OSError where there is none. For a link both ends are checked; the folder of the far end may be
    one that all share, if users can remove only their own files there (the sticky bit).
    """
    target = path.resolve(strict=True)
    _check(path.parent)
    _check(target)
    if target.parent != path.parent.resolve():
        _check(target.parent, shared=True)


def _check(place: Path, shared: bool = False) -> None:
    status = place.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{place} belongs to another user")
    by_group = status.st_mode & stat.S_IWGRP and not _is_ours_alone(status.st_gid)
    others = by_group or status.st_mode & stat.S_IWOTH
    if others and not (shared and status.st_mode & stat.S_ISVTX):
        raise PermissionError(f"other users can write to {place} (fix: chmod go-w)")


def _is_ours_alone(group: int) -> bool:
    """Tell whether this is the group of the user alone that systems with umask 002 give each user."""
    try:
        me, members = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group).gr_mem
    except KeyError:
        return False
    return {*members, *(user.pw_name for user in pwd.getpwall() if user.pw_gid == group)} == {me}
