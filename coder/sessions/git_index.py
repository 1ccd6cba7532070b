"""Which files of a workspace are as git has them, so that they need not be read.

    index = GitIndex(git)
    index.read()              # the tracked files, and the blobs that they were added as
    index.begin_compare()     # works while the folders are listed
    index.compare(found)      # what has not changed up to `begin_compare`
    index.find_few(paths)     # which of these few files git has in another form
    index.begin_search()      # works meanwhile
    index.find_converted()    # what git has in another form; `inodes` are known then
    index.find_special()      # what has other permissions

Git knows from the time and size of a file that it has not changed, without reading it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
import struct
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

from coder.sessions.folder_scan import Level
from coder.sessions.git import Git, own_environment
from coder.tools.repository import git_folders
from coder.tools.workspace import TOOL_FOLDERS, read_small_file, state_of

ATTRIBUTES = ".gitattributes"
MAX_ATTRIBUTES = 1_000_000  # bytes of a .gitattributes
MAX_SECONDS = 20.0  # of a command that goes through all files
SAMPLE = 100  # files that may tell which permissions are usual
# An entry of a listing: whether git looks for changes, the mode; the blob; the stage; the path
FACTS = slice(0, 9)
BLOB = slice(9, 49)
STAGE = slice(49, 52)
PATH = slice(52, None)
FILE = "H 100644 "
PROGRAM = "H 100755 "
LINK = "H 120000 "
NO_CONFLICT = " 0\t"
INODE = re.compile(rb"\tino: (\d+)\n")  # of a file when it was added
SIZE = re.compile(rb"\n  size: (\d+)\t")
# In the file of the index: the inode of a file and its size, before the blob and the path
ENTRY = struct.Struct(">20xI12xI")
# What may give a file another content of the same size than its blob has
REWRITES = rb"filter=|working-tree-encoding="


class GitIndex:
    """The tracked files below the root of `git`, and which of them are as they were added.

    `tracked` are the files with their blob ids, `folders` those which they are in. Git sees changes
    of those that are `compared`. `changed` are the files that git has no more as they are; of the
    others git knows the `inodes`. A file has one name and the `usual_mode`, if it is not one of
    `modes` or found to be special.
    """

    def __init__(self, git: Git) -> None:
        self.git = git
        self.tracked: dict[str, str] = {}
        self.blobs: frozenset[str] = frozenset()
        self.folders: set[str] = set()
        self.compared: Collection[str] = ()
        self.changed: set[str] = set()
        self.inodes: dict[str, int] = {}
        self.usual_mode = 0
        self.modes: dict[str, int] = {}
        self._stamp: tuple[int, ...] | None = None  # of the file of the index
        self._data = b""  # of that file
        self._unseen: set[str] = set()  # git does not see when one of these changes
        # Of all entries of the index, in their order
        self._paths: list[str] = []
        self._blobs: list[str] = []
        # At work
        self._comparing: subprocess.Popen[bytes] | None = None
        self._searching: subprocess.Popen[bytes] | None = None

    def read(self) -> None:
        """Find the tracked files, and the blobs that they were added as."""
        self._stamp = self._index_stamp()
        listing = self.git.start("ls-files -z -v --stage")
        with contextlib.suppress(OSError):
            self._data = self._index_path().read_bytes()
        entries = os.fsdecode(self.git.output(listing, MAX_SECONDS) or b"").split("\0")
        entries.pop()  # what is after the last one
        self._paths = [entry[PATH] for entry in entries]
        self._blobs = [entry[BLOB] for entry in entries]
        self.tracked = dict(zip(self._paths, self._blobs))
        self.blobs = frozenset(self._blobs)
        self.usual_mode = self._usual_mode()
        self._note_others(entries)
        self._note_folders()

    def _note_others(self, entries: list[str]) -> None:
        """Note programs, links, and what git does not see changes of."""
        program_mode = self.usual_mode | (self.usual_mode & 0o444) >> 2
        modes = {PROGRAM: program_mode, LINK: stat.S_IFLNK | 0o777}
        for entry in [entry for entry in entries if entry[FACTS] != FILE]:
            mode = modes.get(entry[FACTS])
            if mode:
                self.modes[entry[PATH]] = mode
            else:
                self._unseen.add(entry[PATH])
        self._unseen |= {entry[PATH] for entry in entries if entry[STAGE] != NO_CONFLICT}
        self.compared = self.tracked.keys() - self._unseen if self._unseen else self.tracked

    def _note_folders(self) -> None:
        """Note the folders of the files, and those that they are in."""
        self.folders = {path.rpartition("/")[0] for path in self.tracked}
        for folder in list(self.folders):
            while folder:
                folder = folder.rpartition("/")[0]
                self.folders.add(folder)

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

    def begin_compare(self) -> None:
        """Let git look for changed files, when those in `folders` are reported from now on."""
        if self.tracked:
            self._comparing = self.git.start(
                "diff-files -z --name-only --relative --ignore-submodules"
            )

    def compare(self, found: Level) -> dict[str, str]:
        """The files that are as they were added, with their blobs, in folders that were found."""
        modified = self.git.output(self._comparing, MAX_SECONDS)
        is_same_index = self._stamp == self._index_stamp()  # git may have written it since `read`
        if modified is None or not is_same_index or self._are_rewritten(found):
            self.changed = set(self.tracked)
            return {}
        paths = os.fsdecode(modified).split("\0")[:-1]
        self.changed = self._unseen.union(paths)
        unlisted = self.folders - found.folders
        if unlisted:
            for path in self.compared:
                if os.path.dirname(path) in unlisted:
                    self.changed.add(path)
        as_added = dict(self.tracked)
        for path in self.changed:
            as_added.pop(path, None)
        return as_added

    def find_special(self) -> set[str]:
        """Find files with several names or other permissions; all if no program can tell."""
        searching = self._searching
        special = self.git.programs.output(searching, MAX_SECONDS) if searching else None
        if special is None:
            return set(self.tracked)
        return {name.removeprefix("./") for name in os.fsdecode(special).split("\0")}

    def begin_search(self) -> None:
        """Let a program look for files that have several names, or other permissions."""
        from coder.tools.bash import find_program  # late: what lists conversations needs no tools

        find = find_program("find", self.git.root)
        if not find:
            return
        # Folders of tools may be large; nothing in them is tracked, or they are searched
        skipped = TOOL_FOLDERS - {os.path.basename(folder) for folder in self.folders}
        names = " -o ".join(f"-name {name}" for name in sorted(skipped))
        usual = {self.usual_mode, *self.modes.values()}
        plain = " -o ".join(
            f"-type {'f' if stat.S_ISREG(mode) else 'l'} -links 1 -perm {stat.S_IMODE(mode):o}"
            for mode in usual
        )
        search = f". ( {names} ) -prune -o ! -type d ! ( {plain} ) -print0"
        self._searching = self.git.programs.start(
            [find, *search.split()],
            own_environment(),
        )

    def find_converted(self) -> set[str]:
        """Find files whose blobs have other sizes: git keeps them with other ends of lines, for
        example.

        They are not as they were added. All are found if git cannot say; another version may print
        something else.
        """
        found: set[str] = set()
        counting = self._count(self._blobs)
        listing_facts = self.git.start("ls-files -z --stage --debug")
        facts = self.git.output(listing_facts, MAX_SECONDS) or b""
        inodes = [int(number) for number in INODE.findall(facts)]
        self.inodes = dict(zip(self._paths, inodes))
        sizes = SIZE.findall(facts)
        del facts  # 200 bytes for each file
        blob_sizes = self._counted(counting)
        if not len(self._paths) == len(sizes) == len(blob_sizes):
            found = set(self._paths)
        elif sizes != blob_sizes:
            for path, size, blob_size in zip(self._paths, sizes, blob_sizes):
                if size != blob_size:
                    found.add(path)
        self._data = b""
        self.changed |= found
        return found

    def find_few(self, paths: Collection[str]) -> set[str] | None:
        """The same of a few tracked files, whose `inodes` are known then.

        None if the index has another format.
        """
        found: set[str] = set()
        above = os.path.relpath(self.git.root, self.git.top)
        blobs = [self.tracked[path] for path in paths]
        blob_sizes = self._counted(self._count(blobs))
        if len(blob_sizes) != len(blobs):
            return None
        for path, blob, blob_size in zip(paths, blobs, blob_sizes):
            name = os.fsencode(os.path.normpath(f"{above}/{path}"))
            end = b"%b%b%b\0" % (bytes.fromhex(blob), len(name).to_bytes(2, "big"), name)
            start = self._data.find(end) - ENTRY.size
            if start < 0:
                return None
            self.inodes[path], size = ENTRY.unpack_from(self._data, start)
            if blob_size != b"%d" % size:
                found.add(path)
        self.changed |= found
        return found

    def _count(self, blobs: Sequence[str]) -> subprocess.Popen[bytes] | None:
        """Let git look for the sizes of these blobs."""
        ids = "\n".join([*blobs, ""])
        command = "cat-file --batch-check=%(objectsize) --buffer"
        return self.git.start(command, [ids.encode()])

    def _counted(self, counting: subprocess.Popen[bytes] | None) -> list[bytes]:
        return (self.git.output(counting, MAX_SECONDS) or b"").split(b"\n")[:-1]

    def _index_path(self) -> Path:
        return git_folders(self.git.top)[0] / "index"

    def _index_stamp(self) -> tuple[int, ...] | None:
        return state_of(self._index_path())

    def _are_rewritten(self, found: Level) -> bool:
        """Does an attributes file name a filter or an encoding?"""
        root = Path(self.git.root)
        top = self.git.top
        shared = git_folders(top)[-1]
        files = [shared / "info/attributes"]
        for above in root.parents:
            if above.is_relative_to(top):
                files.append(above / ATTRIBUTES)
        for folder in self.folders:
            path = f"{folder}/{ATTRIBUTES}".lstrip("/")
            if path in self.tracked or path in found.files:
                files.append(root / path)
        for file in files:
            rules = read_small_file(file, MAX_ATTRIBUTES) or b""
            if re.search(REWRITES, rules):
                return True
        return False
