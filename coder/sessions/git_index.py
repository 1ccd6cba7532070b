"""Which files of a workspace are as git has them, so that they need not be read.

    index = GitIndex(git)
    index.read()                     # the tracked files, and the blobs that they were added as
    index.begin_search()             # works while the folders are listed and watched
    index.compare(listed)            # when they are: what has changed up to now
    index.find_plain()

Git knows from the time and size of a file that it has not changed, without reading it.
"""

from __future__ import annotations

import itertools
import os
import re
import stat
import subprocess
from collections.abc import Iterable, Set
from pathlib import Path

from coder.sessions.git import Git, own_environment
from coder.tools.repository import git_folders
from coder.tools.workspace import TOOL_FOLDERS, read_small_file, state_of

ATTRIBUTES = ".gitattributes"
MAX_ATTRIBUTES = 1_000_000  # bytes of a .gitattributes
MAX_SECONDS = 20.0  # of a command that goes through all files
SAMPLE = 100  # files that may tell which permissions are usual
FACTS = 5  # lines about a file when it was added, of which the last has its size
# What may give a file another content of the same size than its blob has
REWRITES = rb"filter=|working-tree-encoding="


class GitIndex:
    """The tracked files below the root of `git`, and which of them are as they were added.

    `tracked` are blob ids of files, or "" if git does not see when one changes. `folders` are
    those which they are in. `as_added` are the files whose content git has, with their blobs.
    Of these, `plain` have one name and the permissions `mode`: nothing else need be known.
    """

    def __init__(self, git: Git) -> None:
        self.git = git
        self.tracked: dict[str, str] = {}
        self.blobs: frozenset[str] = frozenset()
        self.folders: set[str] = set()
        self.as_added: dict[str, str] = {}
        self.plain: dict[str, str] = {}
        self.mode = 0
        self._sizes: dict[str, str] = {}  # of the files that git sees, when they were added
        self._stamp: tuple[int, ...] | None = None  # of the file of the index
        self._search: subprocess.Popen[bytes] | None = None

    def read(self) -> None:
        """Find the tracked files, and the blobs that they were added as."""
        self._stamp = self._index_stamp()
        started = self.git.start("ls-files -z -v --stage --debug")
        listing = self.git.output(started, MAX_SECONDS) or b""
        try:
            self._read_listing(os.fsdecode(listing))
        except ValueError:  # another version of git prints something else
            self.tracked = {}
            self._sizes = {}
        self.blobs = frozenset(self.tracked.values())
        self.folders = _folders_of(self.tracked)
        self.mode = self._usual_mode()

    def _read_listing(self, listing: str) -> None:
        """After each entry come facts of the file, with the next entry at their end."""
        entry, *parts = listing.split("\0")
        for part in parts:
            *_, size, following = part.split("\n", FACTS)
            self._add(entry, size)
            entry = following

    def _add(self, entry: str, size: str) -> None:
        facts, _, path = entry.partition("\t")
        tag, _, blob, stage = facts.split(" ")
        self.tracked[path] = ""
        if tag == "H" and stage == "0":  # neither told not to look, nor a conflict
            self.tracked[path] = blob
            number, _, _ = size.partition("\t")
            self._sizes[path] = number.removeprefix("  size: ")

    def _usual_mode(self) -> int:
        """The permissions that a file has which git does not take for a program."""
        for path in itertools.islice(self.tracked, SAMPLE):
            try:
                mode = os.lstat(os.path.join(self.git.root, path)).st_mode
            except OSError:
                continue
            if stat.S_ISREG(mode) and not mode & 0o111:
                return mode
        return stat.S_IFREG | 0o644

    def begin_search(self) -> None:
        """Let a program look for files that are not plain, while the folders are listed."""
        from coder.tools.bash import find_program  # late: what lists conversations needs no tools

        find = find_program("find", self.git.root)
        if not find or not self.tracked:
            return
        # Folders of tools may be large; nothing in them is tracked, or they are searched
        skipped = TOOL_FOLDERS - {os.path.basename(folder) for folder in self.folders}
        names = " -o ".join(f"-name {name}" for name in sorted(skipped))
        permissions = f"{stat.S_IMODE(self.mode):o}"
        plain = f"-type f -links 1 -perm {permissions}"
        search = f". ( {names} ) -prune -o ! -type d ! ( {plain} ) -print0"
        command = [find, *search.split()]
        self._search = self.git.programs.start(command, own_environment())

    def compare(self, listed: Set[str]) -> None:
        """Find which of the listed files are as they were added, when changes are reported."""
        if not self._sizes:
            return
        blobs = [self.tracked[path] for path in self._sizes]
        question = "\n".join(blobs).encode()
        # Both at the same time
        counting = self.git.start(
            "cat-file --batch-check=%(objectsize) --buffer",
            [question, b"\n"],
        )
        comparing = self.git.start("ls-files -z -m")
        blob_sizes = self.git.output(counting, MAX_SECONDS) or b""
        modified = self.git.output(comparing, MAX_SECONDS)
        sizes = blob_sizes.decode().splitlines()
        is_complete = modified is not None and len(sizes) == len(blobs)
        is_same_index = self._stamp == self._index_stamp()  # git may have written it since `read`
        if is_complete and is_same_index and not self._are_rewritten(listed):
            unlike = set(os.fsdecode(modified or b"").split("\0"))
            unlike |= self._converted(sizes)
            self.as_added = dict(zip(self._sizes, blobs))
            unlike |= self.as_added.keys() - listed
            for path in unlike & self.as_added.keys():
                del self.as_added[path]
        self._sizes = {}

    def _converted(self, blob_sizes: list[str]) -> set[str]:
        """Files whose blobs have other sizes: git keeps them with other ends of lines, for example."""
        found: set[str] = set()
        for (path, size), blob_size in zip(self._sizes.items(), blob_sizes):
            if size != blob_size:
                found.add(path)
        return found

    def find_plain(self) -> None:
        """Find which of the files as added are plain: none, if no program can tell."""
        if not self._search:
            return
        names = self.git.programs.output(self._search, MAX_SECONDS)
        if names is None:
            return
        special = {name.removeprefix("./") for name in os.fsdecode(names).split("\0")}
        self.plain = dict(self.as_added)
        for path in special & self.plain.keys():
            del self.plain[path]

    def _index_stamp(self) -> tuple[int, ...] | None:
        return state_of(git_folders(self.git.top)[0] / "index")

    def _are_rewritten(self, listed: Iterable[str]) -> bool:
        """Does an attributes file name a filter or an encoding?"""
        root = Path(self.git.root)
        top = self.git.top
        shared = git_folders(top)[-1]
        files = [shared / "info/attributes"]
        for folder in root.parents:
            if folder.is_relative_to(top):
                files.append(folder / ATTRIBUTES)
        for path in listed:
            if path.endswith(ATTRIBUTES):
                files.append(root / path)
        for file in files:
            rules = read_small_file(file, MAX_ATTRIBUTES) or b""
            if re.search(REWRITES, rules):
                return True
        return False


def _folders_of(paths: Iterable[str]) -> set[str]:
    """The folders that these paths are in, at any depth."""
    found = {path.rpartition("/")[0] for path in paths}
    above = found
    while above:
        above = {path.rpartition("/")[0] for path in above} - found
        found |= above
    return found
