"""Snapshots: the files of the workspace before and after each step, so that what the agent changed can be taken back.

    snapshots = Snapshots(workspace, data)
    for event in run_loop(...):
        snapshots(event, abort)
    snapshots.undo()

They lie in a git repository of our own in the data folder (row A17: a git snapshot at the start and the end of every step).
Nothing of the user's git is written, no configuration of the user's or of the workspace is read but the ignore rules, and no
filter, hook or monitor that a workspace names is run. The start of a step is its first tool: a step whose tools change
nothing has no snapshots, and what the user changes while the model answers is nobody's but the user's.

Of modes the executable bit is kept, as git does. Not kept, and named in `lost`: files above MAX_FILE, git repositories inside
of the workspace (submodules too), and what was ignored before. Off for the session, with one notice, where git is missing or
the tree is too large.

What it leaves out: ignored files, all that lies outside of the workspace, commits, sockets, FIFOs and devices; the
conversation, which the session cuts at `place`; a `redo` in another process than its `undo`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coder.abort import TICK, Abort
from coder.tools.process import GRACE, environment
from coder.tools.workspace import escaped, replace
from coder.types import (
    Aborted,
    CoderError,
    Event,
    Message,
    MessageEnd,
    Notice,
    RunEnd,
    RunStart,
    StepEnd,
    StepStart,
    T,
    ToolError,
    ToolStart,
)

MAX_FILE = 2_000_000  # bytes of a file that is kept
MAX_FILES = 50_000  # in a workspace
MAX_FOLDERS = 1_000  # empty ones that are kept
SECONDS = 10.0  # that one snapshot may take
AFTER_ABORT = 1.0  # the same where a person waits for the prompt
KEPT_DAYS = 14  # that objects stay which no snapshot of today needs
IDLE_DAYS = 60  # that the repository of a workspace stays in which nobody works
BULK = 100  # new files from which on they go into one pack instead of a file each
AT_ONCE = 50  # contents that are held in memory at a time
DAY = 86_400.0

CONFIG = """[core]
\trepositoryFormatVersion = 0
\tbare = false
\tfileMode = true
\tsymlinks = true
\tignoreCase = false
\tautocrlf = false
\tsafecrlf = false
\tquotePath = false
\tprecomposeUnicode = false
\tprotectHFS = false
\tprotectNTFS = false
\tfsmonitor = false
\thooksPath = /dev/null
\tattributesFile = /dev/null
\tcompression = 1
[gc]
\tauto = 0
[maintenance]
\tauto = false
"""
ATTRIBUTES = "* -text -ident !eol !filter !working-tree-encoding !diff !merge\n"  # these win over every .gitattributes
OUTSIDE = "What was done outside of the workspace, to ignored files or in git itself stays as it is."
ID = re.compile(r"[0-9a-f]{40,64}")
REPOSITORY = "040000"  # how a folder that is a repository of its own is known among the files that are left out

Entry = tuple[str, str]  # mode and id of a file, as git has them
Pair = tuple[Entry | None, Entry | None]  # before, after; None: not there


class SnapshotError(CoderError):
    """A snapshot could not be taken or read; the text is for a person."""


class TooLong(SnapshotError):
    """It was not done in the seconds there were."""


class GitFailed(SnapshotError):
    """git ended with an error; `said` is what it wrote about it."""

    def __init__(self, said: bytes) -> None:
        line = said.decode("utf-8", "replace").strip().partition("\n")[0]
        super().__init__(f"git says: {escaped(line).rstrip('.')[:300]}")
        self.said = said


# ---- what is recorded ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepSnapshot:
    """The trees around a step's tools; "" where one could not be taken. `made` and `gone` are empty folders, `lost` the
    paths that differ and whose contents are not kept. Paths are relative to the workspace."""

    step: int
    before: str
    after: str
    made: Sequence[str] = ()
    gone: Sequence[str] = ()
    lost: Sequence[str] = ()


@dataclass
class RunSnapshot:
    """One run: `message` is the key (`key_of`) of the user message it began with, or "" where it went on without one."""

    message: str = ""
    steps: list[StepSnapshot] = field(default_factory=list)

    @property
    def before(self) -> str:
        return self.steps[0].before if self.steps else ""

    @property
    def after(self) -> str:
        return self.steps[-1].after if self.steps else ""

    @property
    def lost(self) -> list[str]:
        return sorted({path for step in self.steps for path in step.lost})

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: {"message", "steps": [{"step", "before", "after", "made", "gone", "lost"}]}."""
        steps = [{name: list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
                  for name, value in dataclasses.asdict(step).items()} for step in self.steps]
        return {"message": self.message, "steps": steps}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> RunSnapshot:
        """Raises ValueError for what `to_dict` does not give."""
        try:
            steps = [StepSnapshot(**step) for step in record["steps"]]
            ids = [tree for step in steps for tree in (step.before, step.after)]
            paths = [path for step in steps for path in (*step.made, *step.gone, *step.lost)]
            if not all(tree == "" or ID.fullmatch(tree) for tree in ids) or not all(map(_is_relative, paths)):
                raise ValueError("it names no tree, or a path outside of the workspace")
            return cls(str(record["message"]), steps)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it is no record of a run: {error}") from None


@dataclass(frozen=True)
class Undone:
    """What `undo` or `redo` did: the `paths` that were written or removed, and the `run` that they belong to.

    With a `problem` nothing counts as done, and the run stays where it was; `conflicts` are the paths that somebody else has
    changed since. `lost` are those that the run changed and that are not kept; `note` what is never taken back, said once.
    """

    run: RunSnapshot | None = None
    paths: Sequence[str] = ()
    conflicts: Sequence[str] = ()
    lost: Sequence[str] = ()
    note: str = ""
    problem: str = ""


def key_of(message: Message) -> str:
    """What a message is known by, also after it was stored and loaded."""
    facts = [message.get("role"), message.get("content"), message.get("meta", {}).get("timestamp")]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def place(run: RunSnapshot, messages: Sequence[Message]) -> int | None:
    """Where in the list the user message of a run stands; None where it is no longer there (compacted), or never was."""
    return next((at for at in range(len(messages) - 1, -1, -1) if key_of(messages[at]) == run.message), None)


def _is_relative(path: str) -> bool:
    return bool(path) and not path.startswith("/") and ".." not in path.split("/")


# ---- the repository --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """The workspace at one time. `left_out` are files that are not in the tree: path -> what tells their state."""

    tree: str
    folders: frozenset[str] = frozenset()  # that hold nothing but folders
    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Git:
    """Runs git in a repository that nobody else writes to meanwhile: the lock is the child's too, so that it also holds for
    a child that outlives us."""

    argv: list[str]
    root: Path
    environment: dict[str, str]
    abort: Abort
    deadline: float
    lock: int

    def __call__(self, *argv: str, given: bytes = b"", codes: Iterable[int] = (0,), cwd: Path | None = None, **variables: str) -> bytes:
        """What a git command writes. Raises SnapshotError, GitFailed, Aborted."""
        with tempfile.TemporaryFile() as file:  # a pipe would have to be fed between two looks at the clock
            file.write(given)
            file.seek(0)
            process = subprocess.Popen([*self.argv, *argv], cwd=cwd or self.root, env=self.environment | variables, stdin=file,
                                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, pass_fds=(self.lock,))
        with process:
            try:
                out, said = self._outcome(process)
            except BaseException:
                _end(process)
                raise
        if process.returncode not in codes:
            raise GitFailed(said)
        return out

    def _outcome(self, process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
        while True:
            try:
                return process.communicate(timeout=TICK)
            except subprocess.TimeoutExpired:
                self.abort.check()
            if time.monotonic() > self.deadline:
                raise TooLong("it takes too long in this workspace")

    def changes(self, before: str, after: str) -> dict[str, Pair]:
        """The files that differ between two trees."""
        facts = _names(self("diff-tree", "-r", "-z", "--raw", "--no-renames", "--no-abbrev", before, after)) if before != after else []
        found: dict[str, Pair] = {}
        for fact, path in zip(facts[::2], facts[1::2]):
            old_mode, mode, old, new, _ = fact.removeprefix(":").split(" ")
            found[path] = _entry(old_mode, old), _entry(mode, new)
        return found

    def entries(self, tree: str) -> dict[str, Entry]:
        """All files of a tree."""
        rows = [fact.partition("\t") for fact in _names(self("ls-tree", "-r", "-z", tree))]
        return {path: (fact.split(" ")[0], fact.split(" ")[2]) for fact, _, path in rows}

    def contents(self, ids: Sequence[str]) -> list[bytes]:
        """The contents of files."""
        data, at, found = self("cat-file", "--batch", given="\n".join([*ids, ""]).encode()), 0, list[bytes]()
        for _ in ids:
            begin = data.index(b"\n", at) + 1
            end = begin + int(data[at:begin].split(b" ")[2])
            found.append(data[begin:end])
            at = end + 1
        return found

    def keep(self, *trees: str) -> None:
        """Count these as new, with all that is in them, when old objects are thrown away."""
        self("mktree", "-z", given=_listed(f"040000 tree {tree}\t{number}" for number, tree in enumerate(trees)))

    def missing(self, ids: Sequence[str]) -> bool:
        return b" missing\n" in self("cat-file", "--batch-check", given="\n".join([*ids, ""]).encode())


def _entry(mode: str, name: str) -> Entry | None:
    return (mode, name) if mode != "000000" else None


def _names(listing: bytes) -> list[str]:
    return [os.fsdecode(name) for name in listing.split(b"\0")[:-1]]


def _listed(names: Iterable[str]) -> bytes:
    return b"".join(os.fsencode(name) + b"\0" for name in names)


def _end(process: subprocess.Popen[bytes]) -> None:
    """TERM, at which git takes its lock away, and KILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)


class Shadow:
    """The repository of one workspace."""

    def __init__(self, workspace: Path, data: Path, max_files: int) -> None:
        self.workspace = Path(os.path.realpath(workspace))
        self.data = Path(os.path.realpath(data))
        self.folder = self.data / "snapshots" / hashlib.sha256(os.fsencode(self.workspace)).hexdigest()[:32]
        self.max_files = max_files
        self.program = _program(self.workspace)
        self.root, self.prefix = self.workspace, ""  # where paths count from, and the workspace in it: "" or "a/b/"
        self._git: list[str] = []
        self._seen: tuple[int, int, int] | None = None  # the index as we left it
        self._tree = ""  # of that index

    @property
    def index(self) -> Path:
        return self.folder / (f"index-{hashlib.sha256(os.fsencode(self.prefix)).hexdigest()[:8]}" if self.prefix else "index")

    @contextlib.contextmanager
    def turn(self, abort: Abort, seconds: float) -> Iterator[Git]:
        """The repository to ourselves. Raises SnapshotError, OSError, Aborted."""
        deadline = time.monotonic() + seconds
        if not self._git or not (self.folder / "HEAD").exists():
            self._make()
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not _locked(lock):
                if time.monotonic() > deadline:
                    raise TooLong("another process keeps the snapshots of this workspace busy")
                abort.wait(0.01)
            os.utime(lock)  # somebody works here
            for left in self.folder.glob("*.lock"):  # by a git that was killed: one that lives would have the lock
                left.unlink(missing_ok=True)
            git = Git(self._git, self.root, self._environment(), abort, deadline, lock)
            if self._git == [self.program]:
                self._read_rules(git)
            yield git
        finally:
            os.close(lock)

    def _make(self) -> None:
        """The folder, or what is missing of it; nothing of it depends on how git is set up here."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.folder.parent.chmod(0o700)
        for name in ("", "objects", "refs", "info"):
            (self.folder / name).mkdir(mode=0o700, exist_ok=True)
        self.folder.chmod(0o700)
        _put(self.folder / "config", CONFIG.encode())
        _put(self.folder / "info" / "attributes", ATTRIBUTES.encode())
        _put(self.folder / "HEAD", b"ref: refs/heads/none\n")
        self.root, self.prefix = _top(self.workspace), ""
        self._git = [self.program]
        self._tree = ""

    def _read_rules(self, git: Git) -> None:
        """What the user ignores: in the repository's own list, and everywhere. Ours is the data folder."""
        rules = _read(self.root / ".git" / "info" / "exclude")
        if self.data.is_relative_to(self.root):
            inside = re.sub(r"([\\*?\[\]!# ])", r"\\\1", str(self.data.relative_to(self.root)))
            rules += f"\n/{inside}/\n".encode("utf-8", "surrogateescape")
        _put(self.folder / "info" / "exclude", rules)
        asked = dataclasses.replace(git, environment=_clean(environment()))
        everywhere = os.fsdecode(asked("config", "--global", "--path", "core.excludesFile", codes=range(256), cwd=self.folder)).strip()
        default = Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"), "git", "ignore")
        file = Path(everywhere) if everywhere.startswith("/") else default
        self._git = git.argv = [self.program, "-c", f"core.excludesFile={file if file.is_file() else '/dev/null'}"]
        if self.root != self.workspace:
            self._look_from_above(git)

    def _look_from_above(self, git: Git) -> None:
        """The workspace in its repository, whose rules hold for it; but not where they ignore all of it."""
        self.prefix = f"{self.workspace.relative_to(self.root)}/"
        git.environment = self._environment()
        if git("check-ignore", "--no-index", "-z", "--stdin", given=_listed([self.prefix.rstrip("/")]), codes=(0, 1)):
            self.root, self.prefix = self.workspace, ""
            git.root, git.environment = self.root, self._environment()

    def _environment(self) -> dict[str, str]:
        """Ours, with nothing in it that steers git, and no home in which it would look for settings."""
        return _clean(environment()) | {
            "GIT_DIR": str(self.folder), "GIT_WORK_TREE": str(self.root), "GIT_INDEX_FILE": str(self.index), "HOME": str(self.folder),
            "XDG_CONFIG_HOME": str(self.folder), "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_SYSTEM": "/dev/null",
            "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_ATTR_NOSYSTEM": "1", "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}

    # -- the workspace as it is

    def look(self, git: Git) -> State:
        """The state now. What git cannot read again is made anew."""
        try:
            return self._look(git)
        except GitFailed:
            self.index.unlink(missing_ok=True)
            self._tree = ""
            return self._look(git)

    def _look(self, git: Git) -> State:
        add, remove, left_out = self._sorted(self._list(git, "-t", "--modified", "--deleted"))
        if self._count() + len(add) > self.max_files:
            raise SnapshotError(f"the workspace has more than {self.max_files:,} files")
        if add or remove or not self._tree or self._seen != _signature(self.index):
            self._update(git, add, remove)
            self._tree = git("write-tree", *([f"--prefix={self.prefix}"] if self.prefix and self._count() else [])).decode().strip()
            self._seen = _signature(self.index)
        return State(self._tree, self._folders(git), {self._inner(path): what for path, what in left_out.items()})

    def _list(self, git: Git, *options: str) -> list[str]:
        """Files of the workspace that are not in the index and not ignored, and what the options add."""
        here = ["--", self.prefix.rstrip("/")] if self.prefix else []
        return _names(git("--literal-pathspecs", "ls-files", "-z", "--others", "--exclude-standard", *options, *here))

    def _inner(self, path: str) -> str:
        return path.removeprefix(self.prefix)

    def _sorted(self, listing: Iterable[str]) -> tuple[list[str], list[str], dict[str, str]]:
        """Of what differs from the index: what to add, what to remove, what to leave out."""
        add, remove, left_out = set[str](), set[str](), dict[str, str]()
        real = _Real(self.root)
        for tag, path in ((line[0], line[2:]) for line in listing):
            if path.endswith("/"):
                left_out[path] = REPOSITORY
            elif (info := real.stat(path)) is None or not (stat.S_ISLNK(info.st_mode) or stat.S_ISREG(info.st_mode)):
                remove |= {path} if tag != "?" else set()
            elif info.st_size > MAX_FILE or not (stat.S_ISLNK(info.st_mode) or os.access(self.root / path, os.R_OK)):
                left_out[path] = f"{info.st_size}:{info.st_mtime_ns}"
                remove |= {path} if tag != "?" else set()
            else:
                add.add(path)
        return sorted(add), sorted(remove), left_out

    def _update(self, git: Git, add: Sequence[str], remove: Sequence[str]) -> None:
        """Bring the index up to date. git passes over names that it has for itself (.GIT)."""
        if remove:
            git("update-index", "--force-remove", "-z", "--stdin", given=_listed(remove))
        bulk = ["-c", "core.bigFileThreshold=1"] if len(add) > BULK else []
        git(*bulk, "update-index", "-q", "--refresh", "--add", "--remove", "--replace", "-z", "--stdin", given=_listed(add), codes=(0, 1))

    def _folders(self, git: Git) -> frozenset[str]:
        """The folders that hold nothing but folders."""
        listed = self._list(git, "--directory")
        found = (folder for name in listed if name.endswith("/") for folder in _bare(self.root / name))
        inner = (os.path.relpath(folder, self.workspace) for folder in itertools.islice(found, MAX_FOLDERS))
        return frozenset(folder for folder in inner if folder != ".")

    def _count(self) -> int:
        """Files in the index, from its head: a name, a version, a number."""
        with contextlib.suppress(FileNotFoundError), open(self.index, "rb") as file:
            return int.from_bytes(file.read(12)[8:], "big")
        return 0

    # -- what differs

    def lost(self, git: Git, before: State, after: State) -> list[str]:
        """The paths that differ and whose contents, before or after, are not kept. The trees are kept from now on."""
        paths = before.left_out.keys() | after.left_out.keys()
        lost = {path for path in paths if before.left_out.get(path) != after.left_out.get(path)}
        changes = git.changes(before.tree, after.tree)
        if changes:
            git.keep(before.tree, after.tree)
        new = [path for path, (old, _) in changes.items() if old is None]
        hidden = tuple(path for path, what in before.left_out.items() if what == REPOSITORY)
        lost |= {path for path in new if path in before.left_out or path.startswith(hidden)}
        if any(path.rpartition("/")[2] == ".gitignore" for path in changes):
            lost |= set(self._ignored(git, before.tree, new))
        return sorted(path.rstrip("/") for path in lost)

    def _ignored(self, git: Git, tree: str, paths: Sequence[str]) -> list[str]:
        """Which of these the rules of a tree ignore: they may have been there, and nobody knows their contents."""
        rules = {path: name for path, (mode, name) in git.entries(tree).items()
                 if path.rpartition("/")[2] == ".gitignore" and mode.startswith("100")}
        with tempfile.TemporaryDirectory(prefix="rules-", dir=self.folder) as folder:
            for path, text in zip(rules, git.contents(list(rules.values()))):
                file = Path(folder, path)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(text)
            return _names(git("check-ignore", "--no-index", "-z", "--stdin", given=_listed(paths), codes=(0, 1), cwd=Path(folder),
                              GIT_WORK_TREE=folder))

    def diff(self, git: Git, changes: Mapping[str, Pair]) -> str:
        """A unified diff of just these changes."""
        trees = [self._tree_of(git, {path: pair[side] for path, pair in changes.items()}) for side in (0, 1)]
        text = git("diff-tree", "-r", "-p", "-M", "--no-color", "--no-ext-diff", "--no-textconv", *trees)
        return text.decode("utf-8", "replace")

    def _tree_of(self, git: Git, entries: Mapping[str, Entry | None]) -> str:
        rows = [f"{entry[0]} {entry[1]}\t{path}" for path, entry in entries.items() if entry]
        index = self.folder / "index.diff"
        try:
            git("update-index", "-z", "--index-info", given=_listed(rows), GIT_INDEX_FILE=str(index))
            return git("write-tree", GIT_INDEX_FILE=str(index)).decode().strip()
        finally:
            index.unlink(missing_ok=True)

    def collect(self, git: Git) -> None:
        """Throw away what no snapshot of late needs."""
        git("gc", "--quiet", f"--prune={KEPT_DAYS}.days.ago")


class _Real:
    """The files below a folder, none of them seen through a link."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._folders: dict[str, bool] = {}

    def stat(self, path: str) -> os.stat_result | None:
        """None where there is none."""
        parent = os.path.dirname(path)
        if parent not in self._folders:
            whole = os.path.join(self.root, parent) if parent else str(self.root)
            self._folders[parent] = os.path.realpath(whole) == whole
        try:
            return os.lstat(self.root / path) if self._folders[parent] else None
        except OSError:
            return None


def _program(workspace: Path) -> str:
    """git, unless it lies in the workspace; "" where there is none."""
    places = [place for place in os.environ.get("PATH", os.defpath).split(os.pathsep)
              if os.path.isabs(place) and not Path(os.path.realpath(place)).is_relative_to(workspace)]
    found = shutil.which("git", path=os.pathsep.join(places)) if places else None
    return found if found and not Path(os.path.realpath(found)).is_relative_to(workspace) else ""


def _clean(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if not name.startswith("GIT_")}


def _top(workspace: Path) -> Path:
    """The top of the user's repository that the workspace lies in, or the workspace."""
    return next((folder for folder in (workspace, *workspace.parents) if os.path.lexists(folder / ".git")), workspace)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(path: Path) -> bytes:
    """A small regular file; b"" for all else."""
    try:
        return path.read_bytes() if path.is_file() and path.stat().st_size <= MAX_FILE else b""
    except OSError:
        return b""


def _put(path: Path, data: bytes) -> None:
    """Several processes may do it at once."""
    if _read(path) != data or not path.exists():
        fd, name = tempfile.mkstemp(prefix="put-", dir=path.parent)
        with open(fd, "wb") as file:
            file.write(data)
        os.replace(name, path)


def _signature(path: Path) -> tuple[int, int, int] | None:
    try:
        info = path.stat()
    except FileNotFoundError:
        return None
    return info.st_ino, info.st_mtime_ns, info.st_size


def _bare(folder: str | Path) -> Iterator[str]:
    """A folder and those in it, as long as they hold nothing but folders."""
    try:
        with os.scandir(folder) as entries:
            inside = [(entry.name, entry.is_dir(follow_symlinks=False), entry.path) for entry in entries]
    except OSError:
        return
    if all(is_folder and name != ".git" for name, is_folder, _ in inside):
        yield str(folder).rstrip("/")
        for _, _, path in inside:
            yield from _bare(path)


# ---- writing back ----------------------------------------------------------------------------------------


@dataclass
class Way:
    """What has to become of the files: path -> (as it has to be now, as it will be), and the empty folders of the goal."""

    files: dict[str, Pair] = field(default_factory=dict)
    torn: set[str] = field(default_factory=set)  # changed by somebody else between two steps
    make: set[str] = field(default_factory=set)
    remove: set[str] = field(default_factory=set)


class Writer:
    """Writes into a workspace, never through a link, and only where nothing else is in the way."""

    def __init__(self, workspace: Path, way: Way, now: Mapping[str, Entry]) -> None:
        self.workspace, self.way, self.now = workspace, way, now
        self.todo = {path: pair for path, pair in way.files.items() if now.get(path) != pair[1]}
        self.removed = {path for path, (_, goal) in self.todo.items() if goal is None}

    def conflicts(self) -> list[str]:
        """The paths that are not as the agent, or the undoing of it, has left them."""
        return sorted(path for path, (expected, _) in self.todo.items()
                      if path in self.way.torn or self.now.get(path) != expected or self._in_the_way(path))

    def _in_the_way(self, path: str) -> bool:
        """Is there something at a path, or above it, that is no file of ours?"""
        parts = path.split("/")
        for at in range(1, len(parts)):
            above = "/".join(parts[:at])
            if _is_other(self.workspace / above):
                return above not in self.removed  # what lies behind a link that goes is in nobody's way
        target = self.workspace / path
        if path in self.now or not os.path.lexists(target):
            return False
        return _is_other(target) or any(found not in self.removed for found in _files(target, self.workspace))

    def write(self, contents: Callable[[Sequence[str]], list[bytes]]) -> None:
        """Do it. Raises OSError, ToolError: then part of it is done, and doing it again does the rest."""
        for path in self.removed:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._checked(path))
        wanted = [(path, old, goal) for path, (old, goal) in sorted(self.todo.items()) if goal]
        for start in range(0, len(wanted), AT_ONCE):
            part = wanted[start:start + AT_ONCE]
            for (path, old, goal), data in zip(part, contents([goal[1] for _, _, goal in part])):
                self._write(self._checked(path), old, goal, data)
        self._tidy()

    def _checked(self, path: str) -> Path:
        target = self.workspace / path
        if not _is_relative(path) or os.path.realpath(target.parent) != str(target.parent):
            raise ToolError(f"{escaped(path)} would be reached through a link")
        return target

    def _write(self, target: Path, old: Entry | None, goal: Entry, data: bytes) -> None:
        mode, name = goal
        if target.is_dir() and not target.is_symlink():
            for folder in sorted(_bare(target), key=len, reverse=True):
                os.rmdir(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        if mode == "120000":
            _link(target, data)
            return
        if target.is_symlink():
            target.unlink()
        if not (old and old[1] == name and old[0] != "120000"):
            replace(target, data)
        bits = stat.S_IMODE(target.stat().st_mode)
        target.chmod(bits | (bits & 0o444) >> 2 if mode == "100755" else bits & ~0o111)

    def _tidy(self) -> None:
        """Folders: those that came with what was removed go, as far as they are empty; those of the goal come."""
        parents = {str(parent) for path in self.removed for parent in Path(path).parents if str(parent) != "."}
        for folder in sorted((parents | self.way.remove) - self.way.make, key=len, reverse=True):
            with contextlib.suppress(OSError, ToolError):
                os.rmdir(self._checked(folder))
        for folder in sorted(self.way.make):
            with contextlib.suppress(FileExistsError, ToolError):
                self._checked(folder).mkdir(parents=True)


def _is_other(target: Path) -> bool:
    """Is it there, and no folder?"""
    return os.path.lexists(target) and (target.is_symlink() or not target.is_dir())


def _files(folder: Path, workspace: Path) -> Iterator[str]:
    """All in a folder that is no folder itself, relative to the workspace."""
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        yield from (os.path.relpath(os.path.join(parent, name), workspace) for name in [*files, *links])


def _link(target: Path, data: bytes) -> None:
    """A link in the place of what is there."""
    name = target.parent / f".coder-{os.getpid()}-{os.urandom(4).hex()}.tmp"
    os.symlink(data, os.fsencode(name))
    try:
        os.replace(name, target)
    except BaseException:
        name.unlink(missing_ok=True)
        raise


# ---- the snapshots of a session --------------------------------------------------------------------------


class Snapshots:
    """The runs of a session and what they changed in the workspace; a subscriber of their events.

    `data` is the data folder of the program; the repository is made in it, 0700, when it is first needed. `harmless` are the
    names of tools that change nothing, `seconds` what one snapshot may take, `max_files` how many files it may have. Where it
    cannot work, `off` says why, and `taken_notices` tells it once. `runs` are the runs of the session, `undone` those that
    `undo` has taken back, the newest last in both.
    """

    def __init__(self, workspace: Path, data: Path, *, harmless: Collection[str] = (), seconds: float = SECONDS,
                 max_files: int = MAX_FILES) -> None:
        self.harmless = harmless
        self.seconds = seconds
        self.runs: list[RunSnapshot] = []
        self.undone: list[RunSnapshot] = []
        self.off = ""
        self._shadow = Shadow(workspace, data, max_files)
        self._notices: list[Notice] = []
        self._step = 0
        self._before: State | None = None
        self._used = False  # has the step under way begun a tool?
        self._told = False
        if not self._shadow.program:
            self._switch_off("git was not found")

    # -- taking them

    def track(self, abort: Abort) -> str:
        """The id of the tree that the workspace is now, or "" where they are off. Raises Aborted."""
        state = self._look(abort, self.seconds)
        return state.tree if state else ""

    def __call__(self, event: Event, abort: Abort | None = None) -> None:
        """Take what an event asks for: the state before the first tool of a step, and after the step.

        `abort` is the run's. When it is set, the state after the step is still taken, in AFTER_ABORT seconds.
        """
        match event:
            case RunStart():
                self.undone.clear()
                self.runs.append(RunSnapshot())
                self._step = 0
            case MessageEnd(message={"role": "user"} as message) if self._step <= 1 and self.runs and not self.runs[-1].message:
                self.runs[-1].message = key_of(message)
            case StepStart(step=step):
                self._step = step
            case ToolStart(name=name) if not self._used and name not in self.harmless:
                self._used = True
                with contextlib.suppress(Aborted):
                    self._before = self._look(abort or Abort(), self.seconds)
            case StepEnd() | RunEnd():
                self.finish(abort)

    def finish(self, abort: Abort | None = None) -> None:
        """End the step under way. To be called behind a run that was broken off, which may tell no end of its step."""
        if not self._used:
            return
        before, self._before, self._used = self._before, None, False
        try:
            after = self._look(abort or Abort(), self.seconds)
        except Aborted:
            after = self._look(Abort(), AFTER_ABORT)
        if self.runs:
            self.runs[-1].steps.append(self._between(before, after))

    def _between(self, before: State | None, after: State | None) -> StepSnapshot:
        lost: list[str] | None = []
        if before and after and before != after:
            lost = self._in_turn(lambda git: self._shadow.lost(git, before, after), Abort(), self.seconds)
        if before is None or after is None or lost is None:
            return StepSnapshot(self._step, "", "")
        return StepSnapshot(self._step, before.tree, after.tree, sorted(after.folders - before.folders),
                            sorted(before.folders - after.folders), lost)

    def _look(self, abort: Abort, seconds: float) -> State | None:
        return self._in_turn(self._shadow.look, abort, seconds)

    def _in_turn(self, work: Callable[[Git], T], abort: Abort, seconds: float) -> T | None:
        """Do something with the repository; where that fails, it is off from then on. Raises Aborted."""
        if self.off:
            return None
        try:
            with self._shadow.turn(abort, seconds) as git:
                return work(git)
        except (SnapshotError, OSError) as error:
            if not isinstance(error, TooLong) or seconds >= self.seconds:  # in a hurry it may fail, and work the next time
                self._switch_off(str(error))
            return None

    def _switch_off(self, reason: str) -> None:
        self.off = reason
        self._notices.append(Notice(f"No snapshots in this session, so no /undo of file changes: {reason}."))

    def taken_notices(self) -> list[Notice]:
        """What a person should know, each once."""
        notices, self._notices = self._notices, []
        return notices

    # -- keeping them

    def records(self) -> list[dict[str, Any]]:
        """The runs as JSON has them."""
        return [run.to_dict() for run in self.runs]

    def restore(self, records: Iterable[Mapping[str, Any]]) -> None:
        """The runs of a session that goes on. Raises ValueError for what `records` does not give."""
        self.runs, self.undone = [RunSnapshot.from_dict(record) for record in records], []

    # -- taking back

    def undo(self) -> Undone:
        """Take back what the last run changed in the workspace; with a problem or a conflict, nothing."""
        return self._travel(self.runs, self.undone, back=True)

    def redo(self) -> Undone:
        """Do again what was undone last."""
        return self._travel(self.undone, self.runs, back=False)

    def _travel(self, source: list[RunSnapshot], target: list[RunSnapshot], back: bool) -> Undone:
        word = "undo" if back else "redo"
        if not source:
            return Undone(problem=f"There is nothing to {word}.")
        run = source[-1]
        if self._used:
            return Undone(run, problem=f"There is no {word} during a run.")
        try:
            paths, conflicts = self._moved(run, back) if run.steps else ([], [])
        except (SnapshotError, OSError, ToolError) as error:
            return Undone(run, problem=f"The files of this run cannot be brought back: {error}.")
        if conflicts:
            return Undone(run, conflicts=conflicts, problem="Nothing was done: these files were changed since.")
        target.append(source.pop())
        note, self._told = ("" if self._told or not run.steps else OUTSIDE), self._told or bool(run.steps)
        return Undone(run, paths, lost=run.lost, note=note)

    def _moved(self, run: RunSnapshot, back: bool) -> tuple[list[str], list[str]]:
        """The paths that were written, or those that are in the way of it."""
        if self.off:
            raise SnapshotError(self.off)
        if not all(step.before and step.after for step in run.steps):
            raise SnapshotError("no snapshot could be taken in one of its steps")
        with self._shadow.turn(Abort(), self.seconds) as git:
            way = self._way(git, [run], back)
            writer = Writer(self._shadow.workspace, way, git.entries(self._shadow.look(git).tree))
            if conflicts := writer.conflicts():
                return [], conflicts
            goals = [goal[1] for _, goal in writer.todo.values() if goal]
            if git.missing(goals):
                raise SnapshotError(GONE)
            git.deadline += 60.0  # what is begun is ended
            writer.write(git.contents)
        return sorted(writer.todo), []

    def _way(self, git: Git, runs: Iterable[RunSnapshot], back: bool) -> Way:
        """All that the runs changed, as one change."""
        way = Way()
        made: dict[str, bool] = {}
        for step in (step for run in runs for step in run.steps if step.before and step.after):
            if git.missing([step.before, step.after]):
                raise SnapshotError(GONE)
            for path, (old, new) in git.changes(step.before, step.after).items():
                if not _kept(path, step, old, new):
                    continue
                first, last = way.files.get(path, (old, old))
                way.torn |= {path} if last != old else set()
                way.files[path] = first, new
            for folder, is_made in [*((each, True) for each in step.made), *((each, False) for each in step.gone)]:
                made[folder] = made.get(folder, is_made) if back else is_made
        way.files = {path: pair[::-1] if back else pair for path, pair in way.files.items() if pair[0] != pair[1] or path in way.torn}
        way.make = {folder for folder, is_made in made.items() if is_made != back}
        way.remove = set(made) - way.make
        return way

    def diff(self, run: RunSnapshot | None = None) -> str:
        """A unified diff of what a run changed, or all runs of the session; binary files are named.

        Raises SnapshotError where there are no snapshots, or no longer.
        """
        if self.off:
            raise SnapshotError(self.off)
        with self._shadow.turn(Abort(), self.seconds) as git:
            changes = self._way(git, self.runs if run is None else [run], back=False).files
            return self._shadow.diff(git, changes) if changes else ""

    def prune(self, abort: Abort) -> None:
        """Throw away what is old: in this repository, once a day, what no snapshot of KEPT_DAYS needs; those of workspaces in
        which nobody worked for IDLE_DAYS. What fails is tried again the next day. Raises Aborted."""
        shadow = self._shadow
        stamp = shadow.folder / "pruned"
        if self.off or not shadow.folder.exists() or (stamp.exists() and _age(stamp) < DAY):
            return
        begun = stamp.exists()
        with contextlib.suppress(SnapshotError, OSError):
            stamp.touch(0o600)
            for other in shadow.folder.parent.iterdir():
                if other != shadow.folder and _age(other / "lock") > IDLE_DAYS * DAY:
                    shutil.rmtree(other, ignore_errors=True)
            if begun:  # in a new one there is nothing old
                with shadow.turn(abort, self.seconds) as git:
                    shadow.collect(git)


GONE = "the snapshots are no longer kept"


def _kept(path: str, step: StepSnapshot, old: Entry | None, new: Entry | None) -> bool:
    """Are both contents known? A repository inside of the workspace has a commit in the place of one."""
    return path not in step.lost and not any(entry and entry[0] == "160000" for entry in (old, new))


def _age(path: Path) -> float:
    """Seconds since a file was last written; 0 where there is none."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0
