"""What git keeps of a workspace's files, so that undo need not copy it: the index, and blobs.

Nothing of the user's repository is written, and none of its settings, hooks or filters is obeyed:
its objects are read through an empty repository in the data folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import shutil
import stat
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from coder.tools.process import environment
from coder.tools.workspace import git_folders, read_small_file, repository_top

MAX_INDEX = 100_000_000  # bytes
ENTRY = struct.Struct(">10I20sH")  # times, device, inode, mode, owner, size, blob, flags
EXTENDED, STAGE = 0x40, 0x3000  # in the first byte of the flags, and in both
# What may give a file another content of the same size than its blob has. A pointer of LFS is short.
REWRITES = re.compile(rb"filter=(?!lfs\s)|working-tree-encoding=")
Info = os.stat_result


def blob_id(data: bytes) -> str:
    """The name that git gives a content."""
    return hashlib.sha1(b"blob %d\0%b" % (len(data), data), usedforsecurity=False).hexdigest()


def find_git(root: str) -> str:
    """git, unless the workspace holds it; "" where there is none, or no repository."""
    if os.path.lexists(repository_top(Path(root)) / ".git"):
        for place in environment().get("PATH", os.defpath).split(os.pathsep):
            found = shutil.which("git", path=place)
            if found and not Path(os.path.realpath(found)).is_relative_to(root):
                return found
    return ""


def run_git(
    command: Sequence[str],
    root: str,
    given: bytes,
    deadline: Callable[[], float] = lambda: math.inf,
    **variables: str,
) -> tuple[int, bytes]:
    """The exit code and output of git; it is killed at the deadline, which may change meanwhile."""
    own = {name: value for name, value in environment().items() if name[:4] != "GIT_"}
    with tempfile.TemporaryFile() as file:
        file.write(given)
        file.seek(0)
        process = subprocess.Popen(
            command, cwd=root, env=own | variables, stdin=file, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
    with process:
        while True:
            try:
                output, _ = process.communicate(timeout=0.05)
                return process.returncode, output
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline():
                    process.kill()


class Index:
    """The `entries` of tracked files below `root`, by path.

    There are none where the index is damaged, or of another kind than version 2 or 3 with SHA-1.
    """

    def __init__(self, root: str) -> None:
        self.entries: dict[str, bytes] = {}
        self._written = 0
        top = repository_top(Path(root))
        index = git_folders(top)[0] / "index"
        inside = "" if Path(root) == top else f"{Path(root).relative_to(top)}/"
        with contextlib.suppress(OSError, ValueError, struct.error):
            self._written = index.stat().st_mtime_ns
            data = read_small_file(index, MAX_INDEX) or b""
            version, count = struct.unpack_from(">4xII", data)
            if version not in (2, 3) or hashlib.sha1(data[:-20]).digest() != data[-20:]:
                return
            at = 12
            for _ in range(count):
                name = at + ENTRY.size + (2 if data[at + ENTRY.size - 2] & EXTENDED else 0)
                end = data.index(b"\0", name)
                path = os.fsdecode(data[name:end])
                if path.startswith(inside):
                    self.entries[path[len(inside) :]] = data[at : at + ENTRY.size]
                at += end - at + 8 & ~7

    def paths(self) -> set[str]:
        """Of the files, and of all folders that they are in."""
        found, above = set(self.entries), set(self.entries)
        while above := {path.rpartition("/")[0] for path in above} - found:
            found |= above
        return found

    def name(self, path: str) -> str:
        return self.entries[path][40:60].hex()

    def blob(self, path: str, info: Info) -> str:
        """What git has of a file; "" where it was changed since, or while the index was written."""
        if path not in self.entries:
            return ""
        ctime, cnano, mtime, mnano, _, inode, mode, _, _, size, _, flags = ENTRY.unpack(
            self.entries[path]
        )
        modified, kind = mtime * 10**9 + mnano, stat.S_IFMT(info.st_mode)
        same = (
            (modified, size, inode) == (info.st_mtime_ns, info.st_size, info.st_ino & 0xFFFFFFFF)
            and ctime * 10**9 + cnano == info.st_ctime_ns
            and (mode == kind or mode == kind | (0o755 if info.st_mode & 0o100 else 0o644))
        )
        return self.name(path) if same and modified < self._written and not flags & STAGE else ""


def is_plain(root: str, attributes: Collection[str]) -> bool:
    """Has an unchanged file whose blob has its size the content of that, by these .gitattributes?"""
    paths = [os.path.join(root, path) for path in attributes]
    paths.append(str(git_folders(repository_top(Path(root)))[-1] / "info/attributes"))
    return not any(REWRITES.search(read_small_file(path, MAX_INDEX) or b"") for path in paths)


def read_objects(
    root: str,
    data: str,
    names: Collection[str],
    what: str = "--batch",
    deadline: Callable[[], float] = lambda: math.inf,
) -> bytes:
    """What `git cat-file` prints of objects."""
    git, own = find_git(root) if names else "", os.path.join(data, "git")
    if not git:
        return b""
    os.makedirs(os.path.join(own, "refs"), exist_ok=True)
    Path(own, "HEAD").write_text("ref: refs/heads/none\n")
    objects = str(git_folders(repository_top(Path(root)))[-1] / "objects")
    given = "".join(f"{name}\n" for name in names).encode()
    variables = {"GIT_DIR": own, "GIT_OBJECT_DIRECTORY": objects, "GIT_NO_LAZY_FETCH": "1"}
    return run_git([git, "cat-file", what], own, given, deadline, **variables)[1]


def read_blobs(root: str, data: str, names: Collection[str]) -> dict[str, bytes]:
    """The contents with these names that the user's repository has. Raises OSError."""
    output, at = read_objects(root, data, names), 0
    found = {}
    while at < len(output):
        end = output.index(b"\n", at)
        header, at = output[at:end].split(), end + 1
        if len(header) == 3:  # else it is missing
            content = output[at : at + int(header[2])]
            found[blob_id(content)] = content
            at += len(content) + 1
    return found
