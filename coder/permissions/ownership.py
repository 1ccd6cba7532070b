"""Whose a file is: nothing that another user may have written configures the agent."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path


def check_ownership(path: Path) -> None:
    """Raise PermissionError if another user may have written or replaced this file.

    OSError if there is none. A link may lead into a folder that all share, if users can replace
    only their own files there (the sticky bit).
    """
    target = path.resolve(strict=True)
    for checked in (path.parent, target, target.parent):
        status = checked.stat()
        if status.st_uid not in (os.geteuid(), 0):
            raise PermissionError(f"{checked} belongs to another user")
        if checked != path.parent and status.st_mode & stat.S_ISVTX:
            continue
        by_group = status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)
        if by_group or status.st_mode & stat.S_IWOTH:
            raise PermissionError(f"other users can write to {checked} (fix: chmod go-w)")


def is_readable_by_others(path: Path) -> bool:
    """Whether other users may read this file and enter the folders above it. Raises OSError."""
    target = path.resolve(strict=True)
    can_be_read = _is_open_to_others(target, 0o444)
    return can_be_read and all(_is_open_to_others(folder, 0o111) for folder in target.parents)


def _is_open_to_others(path: Path, bits: int) -> bool:
    """Whether another user has one of these rights. Raises OSError."""
    status = path.stat()
    others = 0o007 if _is_own_group(status.st_gid) else 0o077
    return bool(status.st_mode & bits & others)


def _is_own_group(number: int) -> bool:
    """Tell whether this group is the user's alone, as systems with umask 002 have it."""
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
        group = grp.getgrgid(number)
    except KeyError:
        return False
    return group.gr_name == name and set(group.gr_mem) <= {name}
