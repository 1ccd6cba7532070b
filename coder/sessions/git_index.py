"""Which files of a workspace are as git has them, so that they need not be read.

    index = GitIndex(git)
    index.read()              # the tracked files, and the blobs that they were added as
    index.begin_search()      # works while the folders are listed and watched
    index.compare(listed)     # when they are: what has changed up to now

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
# An entry of a listing: "H 100644 ", the blob, " 0", a tab, the path
HEAD = "H "  # git is not told to ignore changes
BLOB = slice(9, 49)
STAGE = slice(49, 52)
PATH = slice(52, None)
NO_CONFLICT = " 0\t"
SIZE = re.compile(rb"\n  size: (\d+)\t")  # of a file when it was added
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
        self._paths: list[str] = []  # of all entries of the index
        self._stamp: tuple[int, ...] | None = None  # of the file of the index
        # At work while the folders are listed
        self._sizes: subprocess.Popen[bytes] | None = None
        self._blob_sizes: subprocess.Popen[bytes] | None = None
        self._search: subprocess.Popen[bytes] | None = None

    def read(self) -> None:
        """Find the tracked files, and the blobs that they were added as."""
        self._stamp = self._index_stamp()
        listing = self.git.output(self.git.start("ls-files -z -v --stage"), MAX_SECONDS) or b""
        entries = os.fsdecode(listing).split("\0")[:-1]
        self._paths = [entry[PATH] for entry in entries]
        blobs = [entry[BLOB] for entry in entries]
        self.tracked = dict(zip(self._paths, blobs))
        for entry in entries:
            if not entry.startswith(HEAD) or entry[STAGE] != NO_CONFLICT:
                self.tracked[entry[PATH]] = ""
        self.blobs = frozenset(blobs)
        self.folders = _folders_of(self.tracked)
        self.mode = self._usual_mode()
        if entries:
            question = "\n".join(blobs).encode()
            command = "cat-file --batch-check=%(objectsize) --buffer"
            self._sizes = self.git.start("ls-files -z --stage --debug")
            self._blob_sizes = self.git.start(command, [question, b"\n"])

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
        if not self.tracked:
            return
        modified = self._names(
            self.git.start("diff-files -z --name-only --relative --ignore-submodules")
        )
        converted = self._converted()
        is_same_index = self._stamp == self._index_stamp()  # git may have written it since `read`
        if (
            modified is None
            or converted is None
            or not is_same_index
            or self._are_rewritten(listed)
        ):
            return
        self.as_added = {
            path: blob for path, blob in self.tracked.items() if blob and path in listed
        }
        for path in modified | converted:
            self.as_added.pop(path, None)
        special = self._names(self._search)
        if special is not None:  # else no program can tell
            self.plain = dict(self.as_added)
            for path in special:
                self.plain.pop(path.removeprefix("./"), None)

    def _names(self, process: subprocess.Popen[bytes] | None) -> set[str] | None:
        """The paths that a program prints; None if it fails."""
        names = self.git.output(process, MAX_SECONDS)
        return None if names is None else set(os.fsdecode(names).split("\0"))

    def _converted(self) -> set[str] | None:
        """Files whose blobs have other sizes: git keeps them with other ends of lines, for example.

        None if git cannot say; another version may print something else.
        """
        sizes = SIZE.findall(self.git.output(self._sizes, MAX_SECONDS) or b"")
        blob_sizes = (self.git.output(self._blob_sizes, MAX_SECONDS) or b"").split(b"\n")[:-1]
        if not len(self._paths) == len(sizes) == len(blob_sizes):
            return None
        if sizes == blob_sizes:
            return set()
        return {
            path
            for path, size, blob_size in zip(self._paths, sizes, blob_sizes)
            if size != blob_size
        }

    def _index_stamp(self) -> tuple[int, ...] | None:
        return state_of(git_folders(self.git.top)[0] / "index")

    def _are_rewritten(self, listed: Set[str]) -> bool:
        """Does an attributes file name a filter or an encoding?"""
        root = Path(self.git.root)
        top = self.git.top
        shared = git_folders(top)[-1]
        files = [shared / "info/attributes"]
        for folder in root.parents:
            if folder.is_relative_to(top):
                files.append(folder / ATTRIBUTES)
        for name in self.folders:
            path = f"{name}/{ATTRIBUTES}".lstrip("/")
            if path in listed:
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
