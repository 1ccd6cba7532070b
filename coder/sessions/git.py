"""What the user's git knows of a workspace: contents that undo need not keep, and which files are ignored.

Nothing of the repository is written, and of its settings only the rules of what is ignored count.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import select
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from coder.tools.repository import git_folders, repository_top
from coder.tools.secrets import environment
from coder.tools.workspace import make_private, read_small_file

MAX_ATTRIBUTES = 1_000_000  # bytes of a .gitattributes
MAX_GIT = 0.9  # seconds of a command; a longer one is killed
MAX_ASKED = 8_000  # bytes of paths in one question: a pipe has room for them
FIELDS = 4  # of an answer: the file of a rule, its line, the rule, the path
# What may give a file another content of the same size than its blob has
REWRITES = re.compile(rb"filter=|working-tree-encoding=")


def blob_id(data: bytes) -> str:
    """The name that git gives a content."""
    return hashlib.sha1(b"blob %d\0%b" % (len(data), data), usedforsecurity=False).hexdigest()


class Git:
    """What git knows of the files below `root`; nothing if there is no git, or no repository."""

    def __init__(self, root: str, data: str, deadline: Callable[[], float]) -> None:
        from coder.tools.bash import find_program  # late: what lists conversations needs no tools

        self.root = root
        self.top = repository_top(Path(root))
        self.deadline = deadline
        is_repository = os.path.lexists(self.top / ".git")
        self._program = find_program("git", root) if is_repository else ""
        self._git_folder = Path(data, "git")
        self._answering: subprocess.Popen[bytes] | None = None
        self._has_crashed = False  # while it was answering
        self.tracked: dict[str, str] = {}  # blob ids of files, or "": not seen when it changes
        self.blobs: set[str] = set()

    def _run(
        self, command: str, lines: Iterable[bytes] = (), *, apart: bool = True, wait: bool = False
    ) -> bytes | None:
        """What git prints; None if it fails, or takes too long. `wait`: it may. `apart`: see _variables."""
        if not self._program:
            return None
        variables = _environment()
        if apart:
            variables |= self._variables()
        seconds = min(MAX_GIT, self.deadline() - time.monotonic())
        try:
            done = subprocess.run(
                self._command(command),
                cwd=self.root,
                env=variables,
                input=b"".join(lines),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=None if wait else seconds,
            )
        except subprocess.TimeoutExpired:
            return None
        return done.stdout if done.returncode in (0, 1) else None

    def _command(self, command: str) -> list[str]:
        return [self._program, "-c", "core.fsmonitor=false", *command.split()]

    def _variables(self) -> dict[str, str]:
        """For the user's index and objects, read through a repository of this program, without any settings."""
        make_private(self._git_folder / "refs")
        (self._git_folder / "HEAD").touch(0o600)  # else the umask would decide
        (self._git_folder / "HEAD").write_text("ref: refs/heads/none\n")
        folders = git_folders(self.top)
        return {
            "GIT_DIR": str(self._git_folder),
            "GIT_WORK_TREE": str(self.top),
            "GIT_INDEX_FILE": str(folders[0] / "index"),
            "GIT_OBJECT_DIRECTORY": str(folders[-1] / "objects"),
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_NO_LAZY_FETCH": "1",
        }

    def read_index(self) -> None:
        """Find the tracked files, and the blobs that they were added as."""
        self.tracked = {}
        self.blobs = set()
        listing = self._run("ls-files -z -v --stage") or b""
        for line in listing.split(b"\0")[:-1]:
            facts, _, name = line.partition(b"\t")
            tag, _, blob, stage = facts.decode().split()
            is_watched = tag == "H" and stage == "0"  # no assume-unchanged, no conflict
            self.tracked[os.fsdecode(name)] = blob if is_watched else ""
            self.blobs.add(blob)

    def unchanged(self, files: Mapping[str, int], rules: Iterable[str]) -> dict[str, str]:
        """Blob ids of those of these files (with their sizes) that have the content of their blobs.

        Git knows that from their stamps. None, if a .gitattributes (`rules`, and those above) may give
        a file another content.
        """
        tracked = {path: self.tracked[path] for path in files if self.tracked.get(path)}
        if not tracked or self._are_rewritten(rules):
            return {}
        listing = self._run("ls-files -z -m")
        if listing is None:
            return {}
        modified = {os.fsdecode(name) for name in listing.split(b"\0")}
        ids = {f"{blob}\n".encode() for blob in tracked.values()}
        output = self._run("cat-file --batch-check=%(objectname)=%(objectsize)", ids) or b""
        sizes = set(output.decode().splitlines())
        unchanged: dict[str, str] = {}
        for path, blob in tracked.items():
            if path not in modified and f"{blob}={files[path]}" in sizes:
                unchanged[path] = blob
        return unchanged

    def _are_rewritten(self, rules: Iterable[str]) -> bool:
        """Does an attributes file name a filter or an encoding?"""
        root = Path(self.root)
        paths = [root / path for path in rules]
        paths += [up / ".gitattributes" for up in root.parents if up.is_relative_to(self.top)]
        paths.append(git_folders(self.top)[-1] / "info/attributes")
        return any(REWRITES.search(read_small_file(path, MAX_ATTRIBUTES) or b"") for path in paths)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """One process answers what `ignored` is asked in here, by the rules that it reads on the way."""
        try:
            yield
        finally:
            process = self._answering
            self._answering = None
            self._has_crashed = False
            if process:
                process.kill()
                process.communicate()

    def ignored(self, paths: Iterable[str]) -> set[str] | None:
        """What the user's git ignores of these paths, inside of `answering`; None: unknown."""
        if not self._program:
            return None
        ignored: set[str] = set()
        try:
            for few in _chunks([b"./%b\0" % os.fsencode(path) for path in paths]):
                ask = self._ask_again if self._has_crashed else self._ask
                ignored |= ask(few)
        except OSError:
            return None
        return ignored

    def _ask(self, paths: Sequence[bytes]) -> set[str]:
        """The ignored ones of so few paths that a pipe has room for them.

        Raises OSError if there is no answer in time.
        """
        if not self._answering:
            self._answering = subprocess.Popen(
                self._command("check-ignore --no-index --verbose --non-matching -z --stdin"),
                bufsize=0,
                cwd=self.root,
                env=_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        process = self._answering
        assert process.stdin and process.stdout
        process.stdin.write(b"".join(paths))
        end = min(time.monotonic() + MAX_GIT, self.deadline())
        output = b""
        while output.count(b"\0") < FIELDS * len(paths):
            left = max(0.0, end - time.monotonic())
            ready, _, _ = select.select([process.stdout], [], [], left)
            if not ready:
                raise TimeoutError
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                self._has_crashed = True  # as 2.39 does for a rule that holds 40 folders below
                return self._ask_again(paths)
            output += data
        fields = output.split(b"\0")
        rules = zip(fields[2::FIELDS], fields[3::FIELDS])
        # A rule with a ! takes back what another one ignores
        return {os.fsdecode(path[2:]) for rule, path in rules if rule and rule[:1] != b"!"}

    def _ask_again(self, paths: Sequence[bytes]) -> set[str]:
        """The same from a process of its own, which names no rules. Raises OSError."""
        output = self._run("check-ignore --no-index -z --stdin", paths, apart=False)
        if output is None:
            raise ChildProcessError
        return {os.fsdecode(name[2:]) for name in output.split(b"\0")[:-1]}

    def contents(self, blobs: Iterable[str]) -> dict[str, bytes]:
        """Those of these blobs that git has."""
        ids = [f"{blob}\n".encode() for blob in blobs]
        if not ids:
            return {}
        output = self._run("cat-file --batch", ids, wait=True) or b""
        contents: dict[str, bytes] = {}
        start = 0
        while start < len(output):
            end = output.index(b"\n", start)
            header = output[start:end].split()
            start = end + 1
            if len(header) == 3:  # id, type, size; else it is missing
                content = output[start : start + int(header[2])]
                contents[blob_id(content)] = content
                start += len(content) + 1
        return contents


def _environment() -> dict[str, str]:
    return {name: value for name, value in environment().items() if name[:4] != "GIT_"}


def _chunks(paths: Iterable[bytes]) -> Iterator[list[bytes]]:
    """The paths in lists of at most MAX_ASKED bytes, or of one."""
    few: list[bytes] = []
    size = 0
    for path in paths:
        if few and size + len(path) > MAX_ASKED:
            yield few
            few = []
            size = 0
        few.append(path)
        size += len(path)
    if few:
        yield few
