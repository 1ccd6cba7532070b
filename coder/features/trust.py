"""Trust: is a file, whose code or commands are going to be run, the user's own?

What it leaves out: the folders above the file's own, whose owner could put others in their place, and what the file says.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path


def check_trusted(path: Path) -> None:
    """Raises PermissionError, in one line, where somebody else than the user and root may have written the file or may put
    another one into its folder; OSError where there is none. For a link that holds for both ends; the folder of the far
    end may be one that all share, if nobody can remove there what is not his (the sticky bit)."""
    target = path.resolve(strict=True)
    _check(path.parent)
    _check(target)
    if target.parent != path.parent.resolve():
        _check(target.parent, shared=True)


def _check(place: Path, shared: bool = False) -> None:
    facts = place.stat()
    if facts.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{place} belongs to somebody else")
    others = facts.st_mode & stat.S_IWOTH or (facts.st_mode & stat.S_IWGRP and not _is_ours_alone(facts.st_gid))
    if others and not (shared and facts.st_mode & stat.S_ISVTX):
        raise PermissionError(f"others may write to {place} (chmod go-w mends that)")


def _is_ours_alone(group: int) -> bool:
    """Is this the group that systems with umask 002 give each user, with nobody else in it?"""
    try:
        me, members = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group).gr_mem
    except KeyError:
        return False
    return {*members, *(user.pw_name for user in pwd.getpwall() if user.pw_gid == group)} == {me}
