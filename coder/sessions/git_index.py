"""Which files of a workspace are as git has them, so that they need not be read.

    index = GitIndex(git)
    index.read()                     # the tracked files, and the blobs that they were added as
    index.begin_search()             # works while the folders are listed and watched
    index.compare(attribute_files)   # when they are: what has changed up to now
    index.blob_of(path)

Git knows from the time and size of a file that it has not changed, without reading it.
"""

from __future__ import annotations

import itertools
import os
import re
import stat
import subprocess
from collections.abc import Iterable
from pathlib import Path

from coder.sessions.git import Git, own_environment
from coder.tools.repository import git_folders
from coder.tools.workspace import TOOL_FOLDERS, read_small_file, state_of

MAX_ATTRIBUTES = 1_000_000  # bytes of a .gitattributes
MAX_SECONDS = 5.0  # of a command that goes through all files
SAMPLE = 100  # files that may tell which permissions are usual
# An entry of the index: tag, permissions, blob, stage, path; then facts of the file when it was added
ENTRY = re.compile(
    r"(?P<tag>\S) \d+ (?P<blob>\w+) (?P<stage>\d)\t(?P<path>[^\0]+)\0"
    r"(?:  .*\n){4}  size: (?P<size>\d+)\t.*\n"
)
# What may give a file another content of the same size than its blob has
REWRITES = re.compile(rb"filter=|working-tree-encoding=")


class GitIndex:
    """The tracked files below the root of `git`, and which of them are as they were added.

    `tracked` are blob ids of files, or "" if git does not see when one changes. `folders` are
    those which they are in. Files of `special` have to be looked at although git has their
    content: links, files with several names, and those with permissions that are not `mode`.
    """

    def __init__(self, git: Git) -> None:
        self.git = git
        self.tracked: dict[str, str] = {}
        self.blobs: frozenset[str] = frozenset()
        self.folders: set[str] = set()
        self.mode = 0
        self.has_special = True  # is it unknown which files are special?
        self.special: set[str] = set()
        self._sizes: dict[str, str] = {}  # of files when they were added
        self._changed: set[str] = set()
        self._is_compared = False
        self._stamp: tuple[int, ...] | None = None  # of the file of the index
        self._search: subprocess.Popen[bytes] | None = None

    def read(self) -> None:
        """Find the tracked files, and the blobs that they were added as."""
        self._stamp = self._index_stamp()
        started = self.git.start("ls-files -z -v --stage --debug")
        listing = os.fsdecode(self.git.output(started, MAX_SECONDS) or b"")
        for entry in ENTRY.finditer(listing):
            tag, blob, stage, path, size = entry.groups()
            is_seen = tag == "H" and stage == "0"  # no assume-unchanged, no conflict
            self.tracked[path] = blob if is_seen else ""
            self._sizes[path] = size
        self.blobs = frozenset(self.tracked.values())
        self.folders = _folders_of(self.tracked)
        self.mode = self._usual_mode()

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
        """Let a program look for files that are special, which takes as long as the listing."""
        from coder.tools.bash import find_program  # late: what lists conversations needs no tools

        find = find_program("find", self.git.root)
        if not find or not self.tracked:
            return
        # Folders of tools may be large; nothing in them is tracked, or they are searched
        skipped = TOOL_FOLDERS - {os.path.basename(folder) for folder in self.folders}
        names = " -o ".join(f"-name {name}" for name in sorted(skipped))
        usual = f"-perm {stat.S_IMODE(self.mode):o} -links 1 -type f"
        command = f"{find} . ( {names} ) -prune -o ! -type d ! ( {usual} ) -print0"
        self._search = self.git.programs.start(command.split(), own_environment())

    def compare(self, attribute_files: Iterable[str]) -> None:
        """Find what is not as it was added. To be called when changes are reported."""
        if not self.tracked:
            return
        blobs = [f"{blob}\n".encode() for blob in self.tracked.values() if blob]
        sizes = self.git.start("cat-file --batch-check=%(objectsize) --buffer", blobs)
        modified = self.git.start("ls-files -z -m")
        blob_sizes = (self.git.output(sizes, MAX_SECONDS) or b"").decode().splitlines()
        changed = self.git.output(modified, MAX_SECONDS)
        if self._search:
            special = self.git.programs.output(self._search, MAX_SECONDS)
            self.has_special = special is None
            names = os.fsdecode(special or b"").split("\0")
            self.special = {name.removeprefix("./") for name in names}
        is_complete = changed is not None and len(blob_sizes) == len(blobs)
        is_the_same = self._stamp == self._index_stamp()  # git may have written it since `read`
        if is_complete and is_the_same and not self._are_rewritten(attribute_files):
            self._changed = set(os.fsdecode(changed or b"").split("\0"))
            self._changed |= self._converted(blob_sizes)
            self._is_compared = True
        self._sizes = {}

    def _converted(self, blob_sizes: list[str]) -> set[str]:
        """Files whose blobs have another size: git keeps them with other ends of lines, for example."""
        seen = [path for path, blob in self.tracked.items() if blob]
        return {path for path, size in zip(seen, blob_sizes) if self._sizes[path] != size}

    def _index_stamp(self) -> tuple[int, ...] | None:
        return state_of(git_folders(self.git.top)[0] / "index")

    def _are_rewritten(self, attribute_files: Iterable[str]) -> bool:
        """Does an attributes file name a filter or an encoding?"""
        root = Path(self.git.root)
        top = self.git.top
        paths = [root / path for path in attribute_files]
        paths += [up / ".gitattributes" for up in root.parents if up.is_relative_to(top)]
        paths.append(git_folders(top)[-1] / "info/attributes")
        return any(REWRITES.search(read_small_file(path, MAX_ATTRIBUTES) or b"") for path in paths)

    def blob_of(self, path: str) -> str:
        """The blob that holds the content of a file; "" if it has to be read."""
        if not self._is_compared or path in self._changed:
            return ""
        return self.tracked.get(path, "")

    def plain_blob_of(self, path: str) -> str:
        """The same, if the file also has one name and the permissions `mode`."""
        if self.has_special or path in self.special:
            return ""
        return self.blob_of(path)


def _folders_of(paths: Iterable[str]) -> set[str]:
    """The folders that these paths are in, at any depth."""
    found = {path.rpartition("/")[0] for path in paths}
    above = found
    while above:
        above = {path.rpartition("/")[0] for path in above} - found
        found |= above
    return found
