"""Shadow: a git repository of our own that keeps the states of a workspace.

Nothing of the user's git is written, no configuration of the user's or of the workspace is read but the ignore rules, and no
filter, hook or monitor that a workspace names is run.

What it leaves out: which states belong to which run (snapshots.py), and writing one back (restoring.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from coder.abort import Abort
from coder.features.git import Entry, Git, GitFailed, Pair, SnapshotError, State, TooLong, listed, names
from coder.tools.process import environment

MAX_FILE = 2_000_000  # bytes of a file that is kept
MAX_FILES = 50_000  # in a workspace
MAX_FOLDERS = 1_000  # empty ones that are kept
KEPT_DAYS = 14  # that objects stay which no snapshot of today needs
BULK = 100  # new files from which on they go into one pack instead of a file each
ATTRIBUTES = "* -text -ident !eol !filter !working-tree-encoding !diff !merge\n"  # these win over every .gitattributes
REPOSITORY = "040000"  # how a folder that is a repository of its own is known among the files that are left out
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
        if git("check-ignore", "--no-index", "-z", "--stdin", given=listed([self.prefix.rstrip("/")]), codes=(0, 1)):
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
        return names(git("--literal-pathspecs", "ls-files", "-z", "--others", "--exclude-standard", *options, *here))

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
            git("update-index", "--force-remove", "-z", "--stdin", given=listed(remove))
        bulk = ["-c", "core.bigFileThreshold=1"] if len(add) > BULK else []
        git(*bulk, "update-index", "-q", "--refresh", "--add", "--remove", "--replace", "-z", "--stdin", given=listed(add), codes=(0, 1))

    def _folders(self, git: Git) -> frozenset[str]:
        """The folders that hold nothing but folders."""
        listed = self._list(git, "--directory")
        found = (folder for name in listed if name.endswith("/") for folder in bare(self.root / name))
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
            return names(git("check-ignore", "--no-index", "-z", "--stdin", given=listed(paths), codes=(0, 1), cwd=Path(folder),
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
            git("update-index", "-z", "--index-info", given=listed(rows), GIT_INDEX_FILE=str(index))
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


def bare(folder: str | Path) -> Iterator[str]:
    """A folder and those in it, as long as they hold nothing but folders."""
    try:
        with os.scandir(folder) as entries:
            inside = [(entry.name, entry.is_dir(follow_symlinks=False), entry.path) for entry in entries]
    except OSError:
        return
    if all(is_folder and name != ".git" for name, is_folder, _ in inside):
        yield str(folder).rstrip("/")
        for _, _, path in inside:
            yield from bare(path)
