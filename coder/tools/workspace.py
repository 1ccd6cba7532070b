"""Files of the workspace: where a path leads, opening, replacing; the repository; private folders.

A path that was checked may lead elsewhere a moment later, when one of its folders has become a link. So it is opened
from the root on, folder by folder and through no link, and a file is named relative to its folder's descriptor.
A file is wholly old or wholly new; mode and owner stay; what changed on disk since it was read is not overwritten.
A kill -9 during a write leaves the old file and a .coder-*.tmp.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Generator, Iterator
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coder.tools.secrets import holds_secrets
from coder.types import ToolError

if TYPE_CHECKING:  # what lists conversations needs no tools
    from coder.toolset import ToolContext

# What tools have installed or made, and none of the project's own files
TOOL_FOLDERS = {".git", ".hg", "node_modules", "__pycache__", "venv", ".venv", ".tox"}
TOOL_FOLDERS |= {".mypy_cache", ".cache"}
KERNEL = re.compile("/(?:proc|sys|dev(?!/shm/))/")  # what is there may look regular and is not


class MissingFileError(ToolError):
    """There is nothing at a path."""


# ---- where a path leads ---------------------------------------------------------------------


def resolve(ctx: ToolContext, path: str, follow: bool = True) -> Path:
    """The place that a path of the model's leads to, relative to the workspace; links are followed.

    Without `follow` a link at the end of the path is the place itself.
    """
    if "\0" in path or not path.strip():
        raise ToolError("the path is empty or holds a NUL")
    place = ctx.cwd / os.path.expanduser(path)  # Path's expanduser raises for a file named ~x
    return real(place) if follow else real(place.parent) / place.name


def real(place: Path) -> Path:
    """A place with links followed; as it is where one cannot be read, and nothing is opened through that."""
    with contextlib.suppress(OSError):
        found = Path(os.path.realpath(place))
        # From Python 3.13 on, a link that cannot be read is no error, and the path ends with it
        if found == place or not found.is_symlink():
            return found
    return Path(os.path.abspath(place))


def to_read(ctx: ToolContext, path: str) -> Generator[Any, None, Path]:
    """The place to read; permission is asked for one outside the workspace."""
    target = resolve(ctx, path)
    if KERNEL.match(str(target)):
        raise ToolError(f"{path} is a device or process file and is not read")
    is_saved = private_folder.cache_info().currsize and target.is_relative_to(private_folder())
    if not target.is_relative_to(ctx.cwd) and not is_saved:
        yield from ctx.ask("external_directory", str(target))
    return target


def to_write(ctx: ToolContext, path: str, follow: bool = True) -> Path:
    """The place to write; one outside the workspace, also behind a link, is refused."""
    target = resolve(ctx, path, follow)
    if not target.is_relative_to(ctx.cwd):
        where = f"{path} is outside the workspace {ctx.cwd}: nothing is written there."
        raise ToolError(f"{where}{_place_inside(ctx, path)}")
    return target


def _place_inside(ctx: ToolContext, path: str) -> str:
    """The tail of an outside path that would be a file in a folder of the workspace, as a sentence; "" if none is."""
    parts = [part for part in Path(path).parts if part != "/"]
    for start in range(len(parts) - 1):
        tail = Path(*parts[start:])
        if ".." not in tail.parts and (ctx.cwd / tail.parent).is_dir():
            return f" Inside it this is {tail}."
    return ""


def shown(ctx: ToolContext, target: Path) -> str:
    """The path as listings and results have it."""
    return str(target.relative_to(ctx.cwd) if target.is_relative_to(ctx.cwd) else target)


def escaped(name: str) -> str:
    """A file name in one line that can be sent: control characters and stray bytes as escapes."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode()
        for each in name
    )


def is_secret(ctx: ToolContext, name: str) -> bool:
    """Is a file only read with permission: does a rule ask about it, or else its name?"""
    return (ctx.secret or holds_secrets)(name)


def ask_to_show(ctx: ToolContext, target: Path) -> Generator[Any, None, None]:
    """Ask for permission to show lines of a secret file, in a diff or an error."""
    if is_secret(ctx, name := shown(ctx, target)):
        yield from ctx.ask("read", name)


# ---- folders and files by descriptor --------------------------------------------------------

# To name things in it a folder need not be readable; O_PATH is Linux's.
FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
# Opening never waits, as it would for a FIFO.
FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


@contextlib.contextmanager
def folder_of(place: Path, make: bool = False) -> Iterator[int]:
    """A descriptor of the folder that a path is in; `make` makes missing folders.

    Raises OSError, also where a link is in the way.
    """
    fd = os.open("/", FOLDER)
    try:
        for part in place.parts[1:-1]:
            try:
                below = os.open(part, FOLDER | os.O_NOFOLLOW, dir_fd=fd)
            except FileNotFoundError:
                if not make:
                    raise
                with contextlib.suppress(FileExistsError):  # another one was faster
                    os.mkdir(part, dir_fd=fd)
                below = os.open(part, FOLDER | os.O_NOFOLLOW, dir_fd=fd)
            os.close(fd)
            fd = below
        yield fd
    finally:
        os.close(fd)


def opened(target: Path, name: str) -> BufferedReader:
    """A regular file at a path without links, to read from. Raises ToolError, which has its name."""
    try:
        with folder_of(target) as folder:
            fd = os.open(target.name or ".", FILE, dir_fd=folder)
    except FileNotFoundError:
        raise MissingFileError(f"there is no file {name}") from None
    except OSError as error:
        raise ToolError(f"{name} cannot be opened: {error.strerror}") from None
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return open(fd, "rb")
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise ToolError(f"{name} is a folder: name a file in it")
    raise ToolError(f"{name} is not a regular file")


def temporary_name() -> str:
    """For a file that is to take another one's place in its folder."""
    return f".coder-{os.getpid()}-{os.urandom(4).hex()}.tmp"


def put_file(
    target: Path, data: bytes, mode: int | None, owner: tuple[int, int] = (-1, -1), *, sync: bool
) -> None:
    """Put a file, or the link that `mode` stands for, in its place at once.

    Makes missing folders. `sync`: a power cut loses nothing, which takes 5 ms. Raises OSError; the
    place is then as it was.
    """
    name = temporary_name()
    private = 0o666 if mode is None else 0o600  # no one else reads it before it has its own mode
    with folder_of(target, make=True) as folder:
        try:
            if mode and stat.S_ISLNK(mode):
                os.symlink(data, os.fsencode(name), dir_fd=folder)
            else:
                with open(os.open(name, NEW_FILE, private, dir_fd=folder), "wb") as file:
                    file.write(data)
                    file.flush()
                    with contextlib.suppress(OSError):  # first: it clears special bits
                        os.fchown(file.fileno(), *owner)
                    if mode is not None:
                        os.fchmod(file.fileno(), stat.S_IMODE(mode))
                    if sync:
                        os.fsync(file.fileno())
            os.replace(name, target.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)
            raise


def fill_file(target: Path, data: bytes, mode: int, inode: int) -> bool:
    """Give the file with this inode a content where it is, for all of its names; not at once. Raises OSError.

    False if the file at this place is another one.
    """
    with folder_of(target) as folder:
        fd = os.open(target.name, FILE | os.O_WRONLY, dir_fd=folder)
    with open(fd, "wb") as file:
        info = os.fstat(fd)
        if info.st_ino != inode or not stat.S_ISREG(info.st_mode):
            return False
        file.write(data)
        file.truncate()
        os.fchmod(fd, stat.S_IMODE(mode))
    return True


def link_file(source: Path, target: Path) -> None:
    """Put another name of a file in the place of a file. Makes missing folders. Raises OSError."""
    name = temporary_name()
    with folder_of(source) as old, folder_of(target, make=True) as folder:
        os.link(source.name, name, src_dir_fd=old, dst_dir_fd=folder, follow_symlinks=False)
        try:
            os.replace(name, target.name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:  # of two names of one file the first stays
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)


def remove(place: Path, how: Callable[..., None] = os.unlink) -> None:
    """Remove a file or a link itself, or with os.rmdir a folder. Raises OSError."""
    with folder_of(place) as folder:
        how(place.name, dir_fd=folder)


def save(
    ctx: ToolContext,
    target: Path,
    data: bytes,
    like: os.stat_result | None = None,
    *,
    had_changed: bool = False,
) -> str:
    """Put `data` in the place of a file. Returns notes for the model, or "".

    It is remembered, unless the model does not know the rest of the file. The file gets owner and mode of the one
    that it replaces, or of `like`. `had_changed`: what was there is not what the session had read. Raises ToolError.
    """
    mode = None
    owner = (-1, -1)
    try:
        old = info_of(target)
        like = like or old
        if like:
            # Without its type: a link may have taken the place, and the file takes that of the link
            mode = stat.S_IMODE(like.st_mode)
            owner = (like.st_uid, like.st_gid)
        put_file(target, data, mode, owner, sync=True)
    except OSError as error:
        problem = f"could not be written, and is as it was: {error.strerror}"
        raise ToolError(f"{shown(ctx, target)} {problem}") from None
    notes = [""]
    if old and old.st_nlink > 1:
        links = f"the file had {old.st_nlink} hard links"
        notes.append(f"Note: {links}; the others keep the old content.")
    if had_changed:
        notes.append("Note: the file had changed since it was read.")
        ctx.seen.pop(target, None)
    elif not old or ctx.seen.get(target):
        ctx.seen[target] = digest_of(data)
    return " ".join(notes)


def digest_of(data: bytes) -> bytes:
    """What a session remembers of a file that it has read or written."""
    return hashlib.sha256(data).digest()


def state_of(place: Path) -> tuple[int, ...] | None:
    """What changes with the content of a file, or of a link itself; None where there is nothing."""
    info = info_of(place)
    return (info.st_ino, info.st_size, info.st_mtime_ns) if info else None


def info_of(place: Path) -> os.stat_result | None:
    return os.lstat(place) if os.path.lexists(place) else None


def refuse_changed(ctx: ToolContext, place: Path, known: tuple[int, ...] | None) -> None:
    """Raises ToolError if a file is not in the state for which permission was asked any more."""
    if state_of(place) != known:
        raise changed_error(shown(ctx, place))


def changed_error(name: str) -> ToolError:
    return ToolError(f"{name} changed on disk since it was read. Read it again first.")


# ---- the repository -------------------------------------------------------------------------


def repository_top(folder: Path, counts: Callable[[Path], bool] = os.path.lexists) -> Path:
    """The folder that holds `.git`: this folder, or the first above it whose `.git` `counts`.

    Where there is none, the folder itself.
    """
    if os.path.lexists(folder / ".git"):
        return folder
    return next((each for each in folder.parents if counts(each / ".git")), folder)


def git_folders(top: Path) -> list[Path]:
    """The folder that `.git` is or names (of a linked worktree or a submodule), links resolved.

    For a linked worktree also the repository's own folder, which all worktrees share; it is last.
    What `.git` names may be hostile: a caller that reads or writes there checks it itself.
    """
    pointer = read_path(top / ".git")
    named = top / pointer.removeprefix("gitdir: ")
    folder = real(named if pointer.startswith("gitdir: ") else top / ".git")
    shared = read_path(folder / "commondir")
    return [folder, real(folder / shared)] if shared else [folder]


def writable_git_folders(workspace: Path) -> list[Path]:
    """The folders that git needs to write to in a workspace, where they belong to it: in a folder
    above, or of a linked worktree or a submodule. What the workspace says is believed only where
    the other place points back."""
    top = repository_top(workspace)
    pointer, folders = top / ".git", git_folders(top)
    folder, shared = folders[0], folders[-1]
    if not os.path.isfile(folder / "HEAD"):
        return []
    if folder.parent == shared / "worktrees" and read_path(folder / "gitdir") == str(pointer):
        return [shared]
    config = os.fsdecode(read_small_file(folder / "config", 1 << 20) or b"")
    worktree = re.search(r"^\s*worktree = ([^\0\n]+)$", config, re.M)
    leads_back = worktree is not None and real(folder / worktree[1]) == top
    return [folder] if folder == pointer or leads_back else []


def read_path(file: Path) -> str:
    """The path in a small file, exactly as git reads it; "" where there is none."""
    data = (read_small_file(file, 1 << 16) or b"").rstrip(b"\r\n")
    return os.fsdecode(data.partition(b"\0")[0])


def read_small_file(path: str | os.PathLike[str], most: int = -1) -> bytes | None:
    """At most `most` bytes of a regular file, or all; None where there is none that can be read.

    Links are not followed, and opening does not wait for the other end of a pipe.
    """
    with contextlib.suppress(OSError, ValueError), contextlib.ExitStack() as closing:
        fd = os.open(path, FILE)
        closing.callback(os.close, fd)  # by itself: no file object is made of a folder
        if stat.S_ISREG(os.fstat(fd).st_mode):
            with open(fd, "rb", closefd=False) as file:
                return file.read(most)
    return None


# ---- for the user alone ---------------------------------------------------------------------

LOCK = (
    ".lock-of-coder"  # marks the folders of this program, since their name alone may be another's
)


def make_private(folder: Path, close: bool = False) -> None:
    """Make a folder, and those above it that are missing, for the user alone. Raises OSError.

    With `close` it is for the user alone also where it was there before.
    """
    for each in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        each.mkdir(mode=0o700, exist_ok=True)  # this mode is not for parents that mkdir would make
    if close and folder.stat().st_uid == os.geteuid() and folder.stat().st_mode & 0o077:
        folder.chmod(0o700)


@cache
def private_folder() -> Path:
    """A temporary folder of this process alone, links resolved. It is removed at its end, and those of
    killed processes at this start: the kernel gives their locks back."""
    for mark in Path(tempfile.gettempdir()).glob(f"coder-*/{LOCK}"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as closing:
            lock = os.open(mark, FILE)
            closing.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(mark.parent, ignore_errors=True)
    folder = real(Path(tempfile.mkdtemp(prefix=f"coder-{os.getpid()}-")))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    fcntl.flock(os.open(folder / "new", NEW_FILE), fcntl.LOCK_EX)  # as long as this process lives
    os.rename(folder / "new", folder / LOCK)  # when it is locked: without this nobody removes it
    return folder
