"""Files of the workspace, for every tool that touches one: one resolver, careful opening, exact text, atomic replacing.

Promises: regular files only, judged on the open descriptor; no write outside the workspace, also through links and where a
folder becomes one meanwhile; a file is wholly old or wholly new; mode, encoding, links and line endings stay; what changed
on disk since it was read is not overwritten. One gap: a kill between giving the new content a name and renaming it leaves a
.coder-*.tmp.
"""

from __future__ import annotations

import codecs
import contextlib
import difflib
import os
import re
import stat
import zlib
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from coder.tools.folder import folder_of, temporary_name
from coder.tools.process import private_folder
from coder.tools.secrets import secret_for
from coder.toolset import ToolContext
from coder.types import ToolError

MAX_EDIT = 50_000_000  # bytes of a file that is edited in memory
CHUNK = 1 << 20
MATCHED = 20_000  # lines of both texts together that a diff is looked for in: difflib takes seconds for more
AROUND = 3  # lines that a diff shows around a change
KERNEL = ("/proc/", "/sys/", "/dev/")  # process and device files look regular and are not
MEMORY = "/dev/shm/"  # these are files
# What `escaped` writes
ESCAPE = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U00(?:0[0-9a-f]|10)[0-9a-f]{4}|[nrt])")


# ---- where -----------------------------------------------------------------------------------------------


def resolve(ctx: ToolContext, path: str) -> Path:
    """The real place that a path of the model's means, links followed, relative to the workspace. A name that is not there may be
    meant as our listings write it (`escaped`), since no request can carry a name that is no text."""
    if "\0" in path or not path.strip():
        raise ToolError("the path is empty or holds a NUL")
    place = ctx.cwd / os.path.expanduser(path)  # Path's expanduser raises for a file named ~x
    if "\\" in path and not os.path.lexists(place):
        meant = ctx.cwd / ESCAPE.sub(lambda found: found[0].encode().decode("unicode_escape"), path)
        place = meant if "\0" not in str(meant) and os.path.lexists(meant) else place
    return real(place)


def real(place: Path) -> Path:
    """A place with links followed. Raises ToolError where one cannot be read, as while it is replaced."""
    try:
        return Path(os.path.realpath(place))
    except OSError as error:
        raise ToolError(f"{place} cannot be resolved: {error.strerror}") from None


def inside(ctx: ToolContext, target: Path) -> bool:
    """Component by component: /ws-evil is not inside /ws."""
    return target.is_relative_to(ctx.cwd)


def to_read(ctx: ToolContext, path: str) -> Generator[Any, None, Path]:
    """The place to read, asking first where it is outside the workspace."""
    target = resolve(ctx, path)
    if str(target).startswith(KERNEL) and not str(target).startswith(MEMORY):
        raise ToolError(f"{path} is a device or process file and is not read")
    # Saved output
    own = private_folder.cache_info().currsize and target.is_relative_to(
        os.path.realpath(private_folder())
    )
    if not inside(ctx, target) and not own:
        yield from ctx.ask("external_directory", str(target))
    return target


def to_write(ctx: ToolContext, path: str) -> Path:
    """The place to write; a place outside the workspace, also behind a link, is refused."""
    target = resolve(ctx, path)
    if not inside(ctx, target):
        raise ToolError(f"{path} is outside the workspace {ctx.cwd}: nothing is written there")
    return target


def shown(ctx: ToolContext, target: Path) -> str:
    return str(target.relative_to(ctx.cwd)) if inside(ctx, target) else str(target)


def ask_to_show(ctx: ToolContext, *targets: Path) -> Generator[Any, None, None]:
    """Ask where one is not read unasked: whoever changes it is shown lines of it, in the diff or in advice."""
    if names := [name for target in targets if secret_for(ctx)(name := shown(ctx, target))]:
        yield from ctx.ask("read", names)


# ---- opening and reading ---------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(target: Path) -> Iterator[int]:
    """A descriptor of a regular file at a real path. Opening never waits (a FIFO would); the check is made on what was opened."""
    try:
        with folder_of(target) as folder:
            fd = os.open(
                target.name or ".",
                os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY,
                dir_fd=folder,
            )
    except FileNotFoundError:
        raise ToolError(f"there is no file {target}{alike(target)}") from None
    except OSError as error:
        raise ToolError(f"{target} cannot be opened: {error.strerror}") from None
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise ToolError(f"{target} is a folder: use ls")
        if not stat.S_ISREG(mode):
            raise ToolError(f"{target} is not a regular file")
        yield fd
    finally:
        os.close(fd)


def alike(target: Path) -> str:
    with contextlib.suppress(OSError):
        names = difflib.get_close_matches(target.name, os.listdir(target.parent), 3)
        if names:
            return f". Did you mean {', '.join(str(target.parent / name) for name in names)}?"
    return ""


def chunks(fd: int) -> Iterator[bytes]:
    while chunk := os.read(fd, CHUNK):
        yield chunk


@dataclass(frozen=True)
class Stamp:
    """A file as it was: equal stamps, equal content."""

    size: int
    mtime_ns: int
    checksum: int


def stamp(target: Path) -> Stamp:
    with opened(target) as fd:
        checksum = 0
        for chunk in chunks(fd):
            checksum = zlib.crc32(chunk, checksum)
        info = os.fstat(fd)
        return Stamp(info.st_size, info.st_mtime_ns, checksum)


def changed(ctx: ToolContext, target: Path) -> bool:
    """Did a file that was read change since? A new time with the same content is no change."""
    before: Stamp | None = ctx.seen.get(target)
    if before is None:
        return False
    info = target.stat()
    if (info.st_size, info.st_mtime_ns) == (before.size, before.mtime_ns):
        return False
    now = stamp(target)
    ctx.seen[target] = now if now.checksum == before.checksum else before
    return now.checksum != before.checksum


def refuse_changed(ctx: ToolContext, target: Path) -> None:
    if changed(ctx, target):
        raise ToolError(
            f"{shown(ctx, target)} changed on disk since it was read. Read it again first."
        )


def refuse_other(ctx: ToolContext, target: Path, before: Text | None) -> None:
    """The same after a person was asked, by the content that the call worked from (None: there was no file)."""
    if (load(ctx, target) if os.path.lexists(target) else None) != before:
        raise ToolError(
            f"{shown(ctx, target)} changed on disk in the meantime. Read it again first."
        )


# ---- text and bytes --------------------------------------------------------------------------------------

NOT_ASCII = re.compile(r"[^\x00-\x7f]")
STRAY = re.compile("[\udc80-\udcff]")  # how a byte that is no UTF-8 is decoded
BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


@dataclass(frozen=True)
class Text:
    """The content of a file, and how to get its bytes back. Bytes that are no UTF-8 survive as surrogates."""

    text: str
    encoding: str = "utf-8"
    bom: bytes = b""

    @cached_property
    def newline(self) -> str:
        """The line ending that most lines have."""
        return "\r\n" if self.text.count("\r\n") * 2 > self.text.count("\n") else "\n"

    @cached_property
    def breaks(self) -> list[int]:
        """Where each CRLF stands in the text with plain line endings."""
        return [
            found.start() - number for number, found in enumerate(re.finditer("\r\n", self.text))
        ]

    def encoded(self, text: str) -> bytes:
        """`text` in this file's encoding. Raises ToolError where it would not be the same text for its other readers."""
        stray = STRAY.search(self.text)
        if stray and Counter(NOT_ASCII.findall(text)) - Counter(NOT_ASCII.findall(self.text)):
            raise ToolError(
                "the file is not UTF-8: only ASCII can be added to it. Use a command that knows its encoding."
            )
        return self.bom + text.encode(self.encoding, "surrogateescape" if stray else "strict")


def decoded(data: bytes, name: str) -> Text:
    """The text in `data`. Raises ToolError for a binary file."""
    for bom, encoding in BOMS:
        if data.startswith(bom):
            try:
                return Text(
                    data[len(bom) :].decode(
                        encoding, "surrogateescape" if encoding == "utf-8" else "strict"
                    ),
                    encoding,
                    bom,
                )
            except UnicodeDecodeError:
                raise ToolError(
                    f"{name} begins like UTF-16 and is not: use a command to change it"
                ) from None
    if b"\0" in data[:8192]:
        raise ToolError(f"{name} is a binary file of {len(data):,} bytes")
    return Text(data.decode("utf-8", "surrogateescape"))


def load(ctx: ToolContext, target: Path) -> Text:
    """The whole text of a file that is to be edited."""
    with opened(target) as fd:
        if (size := os.fstat(fd).st_size) > MAX_EDIT:
            raise ToolError(
                f"{shown(ctx, target)} has {size:,} bytes, too large to edit here: use a command"
            )
        return decoded(b"".join(chunks(fd)), shown(ctx, target))


def diff(old: str, new: str, name: str) -> str:
    """A unified diff of a change, with three lines around it; in words where no line differs but its ending."""
    before, after = old.splitlines(), new.splitlines()
    if len(before) + len(after) > MATCHED:
        lines = _one_hunk(before, after, name)
    else:
        lines = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}", lineterm="")
    text = "\n".join(lines).encode("utf-8", "replace").decode()
    return text or ("(only line endings, or the newline at the end, differ)" if old != new else "")


def _one_hunk(before: Sequence[str], after: Sequence[str], name: str) -> Iterator[str]:
    """A diff from the first line that differs to the last, without looking for what is the same in between."""
    start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after)))
    end = sum(
        1
        for _ in takewhile(
            lambda pair: pair[0] == pair[1], zip(reversed(before[start:]), reversed(after[start:]))
        )
    )
    if start == len(before) == len(after):
        return
    above, below = min(start, AROUND), min(end, AROUND)
    old, new = before[start : len(before) - end], after[start : len(after) - end]
    yield from (f"--- a/{name}", f"+++ b/{name}")
    yield f"@@ -{start - above + 1},{above + len(old) + below} +{start - above + 1},{above + len(new) + below} @@"
    yield from (f" {line}" for line in before[start - above : start])
    yield from (f"-{line}" for line in old)
    yield from (f"+{line}" for line in new)
    yield from (f" {line}" for line in before[len(before) - end : len(before) - end + below])


# ---- writing ---------------------------------------------------------------------------------------------


def replace(target: Path, data: bytes, like: Path | None = None) -> str:
    """Put `data` in the place of a file, at once and durably. Returns a note for the result, mostly empty.

    The new content has no name until it is whole, so that a kill leaves nothing behind (but between two system calls). It
    gets owner and mode of the file that it replaces, or of `like`. Raises ToolError; the file is then as it was.
    """
    try:
        with folder_of(target, make=True) as folder:
            info = _facts(folder, target.name)
            _put(folder, target.name, data, _like(like) if like else info)
    except OSError as error:
        raise ToolError(
            f"{target} could not be written, and is as it was: {error.strerror}"
        ) from None
    if info and info.st_nlink > 1:
        return f" Note: the file had {info.st_nlink} hard links; the others keep the old content."
    return ""


def _like(other: Path) -> os.stat_result | None:
    with folder_of(other) as folder:
        return _facts(folder, other.name)


def _facts(folder: int, name: str) -> os.stat_result | None:
    """Of a regular file; None where there is none."""
    with contextlib.suppress(FileNotFoundError):
        info = os.stat(name, dir_fd=folder, follow_symlinks=False)
        return info if stat.S_ISREG(info.st_mode) else None
    return None


def _put(folder: int, name: str, data: bytes, info: os.stat_result | None) -> None:
    fd, temporary = _unnamed(folder)
    try:
        _fill(fd, data, info)
        if not temporary:
            temporary = temporary_name()
            # With a folder given, the link is followed
            os.link(f"/proc/self/fd/{fd}", temporary, src_dir_fd=fd, dst_dir_fd=folder)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    finally:
        os.close(fd)


def _unnamed(folder: int) -> tuple[int, str]:
    """A file open for writing that has no name yet; with a name where the system has no such files."""
    flags = os.O_WRONLY | os.O_CLOEXEC
    if hasattr(os, "O_TMPFILE") and os.path.isdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            return os.open(".", flags | os.O_TMPFILE, 0o666, dir_fd=folder), ""
    name = temporary_name()
    return os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder), name


def _fill(fd: int, data: bytes, info: os.stat_result | None) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    if info:
        with contextlib.suppress(OSError):
            # Before the mode: changing the owner clears its special bits
            os.fchown(fd, info.st_uid, info.st_gid)
        os.fchmod(fd, stat.S_IMODE(info.st_mode))
    os.fsync(fd)


def save(ctx: ToolContext, target: Path, data: bytes, like: Path | None = None) -> str:
    """`replace`, and remember the file as we left it."""
    note = replace(target, data, like)
    ctx.seen[target] = stamp(target)
    return note


def escaped(name: str) -> str:
    """A file name in one line that can be sent: control characters and stray bytes as escapes."""
    return (
        name
        if name.isprintable()
        else "".join(
            c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode()
            for c in name
        )
    )
