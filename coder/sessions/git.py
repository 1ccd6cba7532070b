"""What the user's git knows of a workspace: undo reads there what it need not keep, and which files are ignored.

Nothing of the repository is written, and none of its settings is obeyed but the rules of what is ignored.
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

from coder.tools.secrets import environment
from coder.tools.workspace import git_folders, make_private, read_small_file, repository_top

MAX_ATTRIBUTES = 1_000_000  # bytes of a .gitattributes
MAX_GIT = 0.9  # seconds of a command, behind which it is killed
MAX_ASKED = 8_000  # bytes of paths in one question: a pipe has room for them
FIELDS = 4  # of an answer: the file of a rule, its line, the rule, the path
# What may give a file another content of the same size than its blob has
REWRITES = re.compile(rb"filter=|working-tree-encoding=")


def blob_id(data: bytes) -> str:
    """The name that git gives a content."""
    return hashlib.sha1(b"blob %d\0%b" % (len(data), data), usedforsecurity=False).hexdigest()


class Git:
    """What git knows of the files below `root`; nothing where there is no git, or no repository."""

    def __init__(self, root: str, data: str, deadline: Callable[[], float]) -> None:
        from coder.tools.bash import find_program  # late: what lists conversations needs no tools

        self.root, self.top, self.deadline = root, repository_top(Path(root)), deadline
        self._program = find_program("git", root) if os.path.lexists(self.top / ".git") else ""
        self._git_folder = Path(data, "git")
        self._answering: subprocess.Popen[bytes] | None = None
        self._has_crashed = False  # while it was answering
        self.tracked: dict[str, str] = {}  # blob ids of files, or "": not seen when it changes
        self.blobs: set[str] = set()

    def _run(
        self, command: str, lines: Iterable[bytes] = (), *, apart: bool = True, wait: bool = False
    ) -> bytes | None:
        """What git prints; None where it fails, or would have to `wait`. `apart`: see _variables."""
        if not self._program:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                self._command(command), cwd=self.root,
                env=_environment() | (self._variables() if apart else {}), input=b"".join(lines),
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                timeout=None if wait else min(MAX_GIT, self.deadline() - time.monotonic()),
            )  # fmt: skip
            return done.stdout if done.returncode in (0, 1) else None
        return None

    def _command(self, command: str) -> list[str]:
        return [self._program, "-c", "core.fsmonitor=false", *command.split()]

    def _variables(self) -> dict[str, str]:
        """For the user's index and objects, read through a repository of this program, without the settings of any other."""
        make_private(self._git_folder / "refs")
        (self._git_folder / "HEAD").touch(0o600)  # else the umask would decide
        (self._git_folder / "HEAD").write_text("ref: refs/heads/none\n")
        folders = git_folders(self.top)
        places = {
            "DIR": self._git_folder,
            "WORK_TREE": self.top,
            "INDEX_FILE": folders[0] / "index",
        }
        places |= {"OBJECT_DIRECTORY": folders[-1] / "objects", "CONFIG_GLOBAL": Path(os.devnull)}
        given = {f"GIT_{name}": str(place) for name, place in places.items()}
        return given | {"GIT_CONFIG_NOSYSTEM": "1", "GIT_NO_LAZY_FETCH": "1"}

    def read_index(self) -> None:
        """Find the tracked files, and the blobs that they were added as."""
        self.tracked, self.blobs = {}, set()
        for line in (self._run("ls-files -z -v --stage") or b"").split(b"\0")[:-1]:
            facts, _, name = line.partition(b"\t")
            tag, _, blob, stage = facts.decode().split()
            self.tracked[os.fsdecode(name)] = blob if (tag, stage) == ("H", "0") else ""
            self.blobs.add(blob)

    def unchanged(self, files: Mapping[str, int], rules: Iterable[str]) -> dict[str, str]:
        """Blob ids of those of these files (with their sizes) that have the content of their blobs, as git knows from
        their stamps, and no .gitattributes (`rules`, and those above) rewrites."""
        root = Path(self.root)
        places = [root / path for path in rules]
        places += [up / ".gitattributes" for up in root.parents if up.is_relative_to(self.top)]
        places.append(git_folders(self.top)[-1] / "info/attributes")
        texts = (read_small_file(place, MAX_ATTRIBUTES) or b"" for place in places)
        seen = {path: blob for path in files if (blob := self.tracked.get(path))}
        is_plain = seen and not any(map(REWRITES.search, texts))
        changed = self._run("ls-files -z -m") if is_plain else None
        if changed is None:
            return {}
        names = set(map(os.fsdecode, changed.split(b"\0")))
        given = {f"{blob}\n".encode() for blob in seen.values()}
        output = self._run("cat-file --batch-check=%(objectname)=%(objectsize)", given) or b""
        sizes = set(output.decode().splitlines())
        same = {path: blob for path, blob in seen.items() if f"{blob}={files[path]}" in sizes}
        return {path: blob for path, blob in same.items() if path not in names}

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """One process answers what `ignored` is asked in here, by the rules that it reads on the way."""
        try:
            yield
        finally:
            process, self._answering, self._has_crashed = self._answering, None, False
            if process:
                process.kill()
                process.communicate()

    def ignored(self, paths: Iterable[str]) -> set[str] | None:
        """What the user's git ignores of these paths, inside of `answering`; None: unknown."""
        if not self._program:
            return None
        found = set[str]()
        try:
            for few in _chunks([b"./%b\0" % os.fsencode(path) for path in paths]):
                found |= self._ask_again(few) if self._has_crashed else self._ask(few)
        except OSError:
            return None
        return found

    def _ask(self, paths: Sequence[bytes]) -> set[str]:
        """The ignored ones of so few paths that a pipe has room for them. Raises OSError if there is no answer in time."""
        command = self._command("check-ignore --no-index --verbose --non-matching -z --stdin")
        self._answering = process = self._answering or subprocess.Popen(
            command, bufsize=0, cwd=self.root, env=_environment(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert process.stdin and process.stdout
        process.stdin.write(b"".join(paths))
        end = min(time.monotonic() + MAX_GIT, self.deadline())
        output = b""
        while output.count(b"\0") < FIELDS * len(paths):
            left = max(0.0, end - time.monotonic())
            ready, _, _ = select.select([process.stdout], [], [], left)
            if not ready:
                raise TimeoutError
            if not (data := os.read(process.stdout.fileno(), 1 << 16)):
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
        given = [f"{blob}\n".encode() for blob in blobs]
        output = (self._run("cat-file --batch", given, wait=True) if given else b"") or b""
        found, at = {}, 0
        while at < len(output):
            end = output.index(b"\n", at)
            header, at = output[at:end].split(), end + 1
            if len(header) == 3:  # else it is missing
                content = output[at : at + int(header[2])]
                found[blob_id(content)] = content
                at += len(content) + 1
        return found


def _environment() -> dict[str, str]:
    return {name: value for name, value in environment().items() if name[:4] != "GIT_"}


def _chunks(paths: Iterable[bytes]) -> Iterator[list[bytes]]:
    """The paths in lists of at most MAX_ASKED bytes, or of one."""
    few, size = list[bytes](), 0
    for path in paths:
        if few and size + len(path) > MAX_ASKED:
            yield few
            few, size = [], 0
        few.append(path)
        size += len(path)
    if few:
        yield few
