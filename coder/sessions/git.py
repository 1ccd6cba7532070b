"""What the user's git knows of a workspace: which files are ignored, and contents that undo need
not keep.

Nothing of the repository is written, and of its settings only the rules of what is ignored count.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

from coder.tools.repository import git_folders, repository_top
from coder.tools.secrets import environment
from coder.tools.workspace import make_private, read_small_file

MAX_SECONDS = 0.9  # of a question; what takes longer is killed
MAX_ASKED = 8_000  # bytes of paths in one question: a pipe has room for them
HEAD = b"ref: refs/heads/none\n"
FIELDS = 4  # of an answer: the file of a rule, its line, the rule, the path


def blob_id(data: bytes) -> str:
    """The name that git gives a content."""
    return hashlib.sha1(b"blob %d\0%b" % (len(data), data), usedforsecurity=False).hexdigest()


class Programs:
    """Programs that were started and work at the same time; `close` ends them, also from another
    thread.

    Input and output are files, so that none waits until somebody reads or writes a pipe.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._outputs: dict[subprocess.Popen[bytes], IO[bytes]] = {}  # of those at work
        self._is_closed = False

    def start(
        self,
        command: Sequence[str],
        variables: dict[str, str],
        lines: Iterable[bytes] = (),
    ) -> subprocess.Popen[bytes]:
        """Start a program with these lines as its input. Raises OSError."""
        output = tempfile.TemporaryFile()  # noqa: SIM115 (`output` closes it)
        with tempfile.TemporaryFile() as given:
            given.writelines(lines)
            given.seek(0)
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=variables,
                stdin=given,
                stdout=output,
                stderr=subprocess.DEVNULL,
            )
        self._outputs[process] = output
        if self._is_closed:
            process.kill()
        return process

    def output(self, process: subprocess.Popen[bytes], seconds: float | None) -> bytes | None:
        """What a program prints; None if it fails, or takes longer than these seconds."""
        with contextlib.ExitStack() as waiting:
            if seconds is not None:
                killer = threading.Timer(seconds, process.kill)
                killer.start()
                waiting.callback(killer.cancel)
            process.wait()
        with self._outputs.pop(process) as output:
            output.seek(0)
            return output.read() if process.returncode in (0, 1) else None

    def close(self) -> None:
        """End what works, and what is started from now on."""
        self._is_closed = True
        for process in list(self._outputs):
            process.kill()


class Git:
    """What git says of the files below `root`; nothing if there is no git, or no repository."""

    def __init__(self, root: str, data: str, programs: Programs) -> None:
        from coder.tools.bash import find_program  # late: what lists conversations needs no tools

        self.root = root
        self.top = repository_top(Path(root))
        self.programs = programs
        is_repository = os.path.lexists(self.top / ".git")
        self._program = find_program("git", root) if is_repository else ""
        self._git_folder = Path(data, "git")
        self._answering: subprocess.Popen[bytes] | None = None
        self._has_crashed = False  # while it was answering

    def start(self, command: str, lines: Iterable[bytes] = ()) -> subprocess.Popen[bytes] | None:
        """Start a command that reads the user's index and objects, without any settings."""
        if not self._program:
            return None
        return self.programs.start(self._command(command), self._variables(), lines)

    def output(
        self, process: subprocess.Popen[bytes] | None, seconds: float | None = MAX_SECONDS
    ) -> bytes | None:
        """What a command prints; None if it fails, or takes longer. No `seconds`: it may."""
        return self.programs.output(process, seconds) if process else None

    def _command(self, command: str) -> list[str]:
        return [self._program, "-c", "core.fsmonitor=false", *command.split()]

    def _variables(self) -> dict[str, str]:
        """Lead git to the user's index and objects by way of a repository of this program."""
        head = self._git_folder / "HEAD"
        if read_small_file(head) != HEAD:  # another git may be reading it
            make_private(self._git_folder / "refs")
            head.touch(0o600)  # else the umask would decide
            head.write_bytes(HEAD)
        folder, shared = git_folders(self.top)
        return own_environment() | {
            "GIT_DIR": str(self._git_folder),
            "GIT_WORK_TREE": str(self.top),
            "GIT_INDEX_FILE": str(folder / "index"),
            "GIT_OBJECT_DIRECTORY": str(shared / "objects"),
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_NO_LAZY_FETCH": "1",
        }

    # ---- what is ignored

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """One process answers what `ignored` is asked in here, by the rules that it reads on the
        way."""
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
            self._answering = self._begin_answering()
        process = self._answering
        assert process.stdin
        assert process.stdout
        process.stdin.write(b"".join(paths))
        end = time.monotonic() + MAX_SECONDS
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

    def _begin_answering(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command("check-ignore --no-index --verbose --non-matching -z --stdin"),
            bufsize=0,
            cwd=self.root,
            env=own_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def _ask_again(self, paths: Sequence[bytes]) -> set[str]:
        """The same from a process of its own, which names no rules. Raises OSError."""
        command = self._command("check-ignore --no-index -z --stdin")
        process = self.programs.start(command, own_environment(), paths)
        output = self.output(process)
        if output is None:
            raise ChildProcessError
        return {os.fsdecode(name[2:]) for name in output.split(b"\0")[:-1]}

    # ---- contents

    def contents(self, blobs: Iterable[str]) -> dict[str, bytes]:
        """Those of these blobs that git has."""
        ids = [f"{blob}\n".encode() for blob in blobs]
        if not ids:
            return {}
        output = self.output(self.start("cat-file --batch", ids), seconds=None) or b""
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


def own_environment() -> dict[str, str]:
    """The environment without secrets, and without what would lead git elsewhere."""
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
