"""Files of the workspace: what a path leads to, opening, replacing; private folders.

A path that was checked may lead elsewhere a moment later, when one of its folders has become a
link. So it is opened from the root on, folder by folder and through no link, and a file is named
relative to its folder's descriptor. A file is wholly old or wholly new; mode and owner stay; a file
that changed on disk since it was read is not overwritten. A kill -9 during a write leaves the old
file and a .coder-*.tmp.
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

# Made by tools: they hold none of the project's own files
TOOL_FOLDERS = set(
    ".git .hg node_modules __pycache__ venv .venv .tox .mypy_cache .cache".split()  # noqa: SIM905
)
KERNEL = "/(?:proc|sys|dev(?!/shm/))/"  # what is there may look regular and is not


class MissingFileError(ToolError):
    """There is nothing at a path."""


# ---- what a path leads to -------------------------------------------------------------------


def resolve(ctx: ToolContext, path: str, follow: bool = True) -> Path:
    """What a path from the model leads to, relative to the workspace; links are followed.

    Without `follow` a link at the end of the path is the target itself.
    """
    if "\0" in path or not path.strip():
        raise ToolError("the path is empty or holds a NUL")
    target = ctx.cwd / os.path.expanduser(path)  # Path's expanduser raises for a file named ~x
    if follow:
        return real(target)
    return real(target.parent) / target.name


def real(path: Path) -> Path:
    """A path with links followed; unchanged if one cannot be read: opening it fails then."""
    with contextlib.suppress(OSError):
        target = Path(os.path.realpath(path))
        # From Python 3.13 on, a link that cannot be read is no error, and the path ends with it
        if target == path or not target.is_symlink():
            return target
    return Path(os.path.abspath(path))


def to_read(ctx: ToolContext, path: str) -> Generator[Any, None, Path]:
    """The file or folder to read; permission is asked for one outside the workspace."""
    target = resolve(ctx, path)
    if re.match(KERNEL, str(target)):
        raise ToolError(f"{path} is a device or process file and is not read")
    is_output = private_folder.cache_info().currsize and target.is_relative_to(private_folder())
    if not target.is_relative_to(ctx.cwd) and not is_output:
        yield from ctx.ask("external_directory", str(target))
    return target


def to_write(ctx: ToolContext, path: str, follow: bool = True) -> Path:
    """The file to write. Raises ToolError if it is outside the workspace, also through a link."""
    target = resolve(ctx, path, follow)
    if not target.is_relative_to(ctx.cwd):
        raise ToolError(
            f"{path} is outside the workspace {ctx.cwd}: nothing is written there."
            f"{_say_path_inside(ctx, path)}"
        )
    return target


def _say_path_inside(ctx: ToolContext, path: str) -> str:
    """The end of an outside path that would be a file in a folder of the workspace, or ""."""
    parts = Path(path.lstrip("/")).parts
    for start in range(len(parts) - 1):
        tail = Path(*parts[start:])
        if ".." not in tail.parts and (ctx.cwd / tail.parent).is_dir():
            return f" Inside it this is {tail}."
    return ""


def shown(ctx: ToolContext, target: Path) -> str:
    """The path as listings and results have it."""
    if target.is_relative_to(ctx.cwd):
        return str(target.relative_to(ctx.cwd))
    return str(target)


def escaped(name: str) -> str:
    """A file name in one line that can be sent: control characters and stray bytes as escapes."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in name
    )


def is_secret(ctx: ToolContext, name: str) -> bool:
    """Is a file only read with permission: does a rule ask about it, or else its name?"""
    asks = ctx.secret or holds_secrets
    return asks(name)


def ask_to_show(ctx: ToolContext, target: Path) -> Generator[Any, None, None]:
    """Ask for permission to show lines of a secret file, in a diff or an error."""
    name = shown(ctx, target)
    if is_secret(ctx, name):
        yield from ctx.ask("read", name)


# ---- folders and files by descriptor --------------------------------------------------------

# To name things in it a folder need not be readable; O_PATH is Linux's.
FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
# Opening never waits, as it would for a FIFO.
FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


@contextlib.contextmanager
def folder_of(path: Path, make: bool = False) -> Iterator[int]:
    """A descriptor of the folder that a path is in; `make` makes missing folders.

    Raises OSError, also if one of the folders is a link.
    """
    fd = os.open("/", FOLDER)
    try:
        for part in path.parts[1:-1]:
            try:
                below = os.open(part, FOLDER | os.O_NOFOLLOW, dir_fd=fd)
            except FileNotFoundError:
                if not make:
                    raise
                with contextlib.suppress(FileExistsError):  # another process was faster
                    os.mkdir(part, dir_fd=fd)
                below = os.open(part, FOLDER | os.O_NOFOLLOW, dir_fd=fd)
            os.close(fd)
            fd = below
        yield fd
    finally:
        os.close(fd)


def opened(target: Path, name: str) -> BufferedReader:
    """A regular file at a path without links, to read from. Raises ToolError with its `name`."""
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
    """For a file that will replace another one in its folder."""
    return f".coder-{os.getpid()}-{os.urandom(4).hex()}.tmp"


def put_file(
    target: Path,
    data: bytes,
    mode: int | None,
    owner: tuple[int, int] = (-1, -1),
    *,
    sync: bool,
) -> None:
    """Replace a file at once, by a file or by the link to `data`, as `mode` says.

    Makes missing folders. `sync`: a power cut loses nothing (5 ms). Raises OSError; nothing
    changed.
    """
    name = temporary_name()
    with folder_of(target, make=True) as folder:
        try:
            if mode and stat.S_ISLNK(mode):
                os.symlink(data, os.fsencode(name), dir_fd=folder)
            else:
                _write_new(name, data, mode, owner, folder=folder, sync=sync)
            os.replace(name, target.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)
            raise


def _write_new(
    name: str,
    data: bytes,
    mode: int | None,
    owner: tuple[int, int],
    *,
    folder: int,
    sync: bool,
) -> None:
    first_mode = 0o666 if mode is None else 0o600  # nobody else reads it before it has its own mode
    fd = os.open(name, NEW_FILE, first_mode, dir_fd=folder)
    with open(fd, "wb") as file:
        file.write(data)
        file.flush()
        with contextlib.suppress(OSError):  # first: it clears special bits
            os.fchown(fd, *owner)
        if mode is not None:
            os.fchmod(fd, stat.S_IMODE(mode))
        if sync:
            os.fsync(fd)


def fill_file(
    target: Path,
    data: bytes,
    mode: int,
    inode: int,
) -> bool:
    """Write into the file with this inode, for all of its names; not at once. Raises OSError.

    False if the path has another file by now.
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
    """Replace a file by another name of `source`. Makes missing folders. Raises OSError."""
    name = temporary_name()
    with folder_of(source) as old, folder_of(target, make=True) as folder:
        os.link(source.name, name, src_dir_fd=old, dst_dir_fd=folder, follow_symlinks=False)
        try:
            os.replace(name, target.name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:  # replace does nothing if both are names of one file
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)


def remove(path: Path, how: Callable[..., None] = os.unlink) -> None:
    """Remove a file or a link itself, or with os.rmdir a folder. Raises OSError."""
    with folder_of(path) as folder:
        how(path.name, dir_fd=folder)


def save(
    ctx: ToolContext,
    target: Path,
    data: bytes,
    like: os.stat_result | None = None,
    *,
    had_changed: bool = False,
) -> str:
    """Replace what a file holds. Returns notes for the model, or "".

    The session knows the file then, unless it did not know what was there. The file gets owner and
    mode of the one that it replaces, or of `like`. `had_changed`: what was there is not what the
    session had read. Raises ToolError.
    """
    mode = None
    owner = (-1, -1)
    try:
        old = info_of(target)
        like = like or old
        if like:
            # Without its type: it may be a link by now, and the new file is a file
            mode = stat.S_IMODE(like.st_mode)
            owner = (like.st_uid, like.st_gid)
        if not _is_saved_by_editor(ctx, target, data):
            put_file(target, data, mode, owner, sync=True)
    except OSError as error:
        raise ToolError(
            f"{shown(ctx, target)} could not be written, and is as it was: {error.strerror}"
        ) from None
    notes = ""
    if old and old.st_nlink > 1:
        notes += f" Note: the file had {old.st_nlink} hard links; the others keep the old content."
    if had_changed:
        notes += " Note: the file had changed since it was read."
        ctx.seen.pop(target, None)
    elif not old or ctx.seen.get(target):
        ctx.seen[target] = digest_of(data)
    return notes


def _is_saved_by_editor(ctx: ToolContext, target: Path, data: bytes) -> bool:
    """Let the editor replace and save a text that it has changed; False if it has not."""
    return ctx.editor is not None and ctx.editor.write(target, data)


def digest_of(data: bytes) -> bytes:
    """What a session remembers of a file that it has read or written."""
    return hashlib.sha256(data).digest()


def state_of(path: Path) -> tuple[int, ...] | None:
    """What changes with the content of a file, or of a link itself; None if nothing is there."""
    info = info_of(path)
    return (info.st_ino, info.st_size, info.st_mtime_ns) if info else None


def info_of(path: Path) -> os.stat_result | None:
    return os.lstat(path) if os.path.lexists(path) else None


def refuse_changed(ctx: ToolContext, path: Path, state: tuple[int, ...] | None) -> None:
    """Raises ToolError if a file is not in the state any more for which permission was asked."""
    if state_of(path) != state:
        raise changed_error(shown(ctx, path))


def changed_error(name: str) -> ToolError:
    return ToolError(f"{name} changed on disk since it was read. Read it again first.")


def read_small_file(path: str | os.PathLike[str], most: int = -1) -> bytes | None:
    """At most `most` bytes of a regular file, or all; None if there is no file that can be read.

    Links are not followed, and opening does not wait for the other end of a pipe.
    """
    with contextlib.suppress(OSError, ValueError), contextlib.ExitStack() as closing:
        fd = os.open(path, FILE)
        closing.callback(os.close, fd)  # open() raises for a folder, and leaves it open
        if stat.S_ISREG(os.fstat(fd).st_mode):
            with open(fd, "rb", closefd=False) as file:
                return file.read(most)
    return None


# ---- for the user alone ---------------------------------------------------------------------

# Marks the folders of this program, since their name alone may be another's
LOCK = ".lock-of-coder"


def make_private(folder: Path, close: bool = False) -> None:
    """Make a folder, and those above it that are missing, for the user alone. Raises OSError.

    `close`: others lose their access to a folder that was there before.
    """
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)  # this mode is not for parents that mkdir would make
    if not close:
        return
    info = folder.stat()
    if info.st_uid == os.geteuid() and info.st_mode & 0o077:
        folder.chmod(0o700)


@cache
def private_folder() -> Path:
    """A temporary folder of this process alone, links resolved, until the process ends."""
    _remove_left_folders()
    folder = real(Path(tempfile.mkdtemp(prefix=f"coder-{os.getpid()}-")))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # The descriptor stays open, and the lock is held, as long as this process lives
    fcntl.flock(os.open(folder / "new", NEW_FILE), fcntl.LOCK_EX)
    # Only a file that is locked has the name that lets others remove the folder
    os.rename(folder / "new", folder / LOCK)
    return folder


def _remove_left_folders() -> None:
    """Remove the folders of killed processes: the kernel has given their locks back."""
    for mark in Path(tempfile.gettempdir()).glob(f"coder-*/{LOCK}"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as closing:
            lock = os.open(mark, FILE)
            closing.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(mark.parent, ignore_errors=True)
