"""Files of the workspace: where a path leads, opening, exact text, replacing.

Promises: regular files only, judged on the open descriptor; no write outside the workspace, also
through links and where a folder becomes one meanwhile; a file is wholly old or wholly new; mode,
encoding, links and line endings stay; what changed on disk since it was read is not overwritten.
A kill -9 during a write leaves the old file and a .coder-*.tmp.
"""

from __future__ import annotations

import codecs
import contextlib
import difflib
import os
import re
import stat
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from coder.tools.folder import file_info, folder_of, open_in, replace_in
from coder.tools.process import private_folder
from coder.tools.secrets import secret_for
from coder.toolset import ToolContext
from coder.types import ToolError

MAX_EDIT = 50_000_000  # bytes of a file that is edited in memory
MAX_COMPARED = 20_000  # lines of both texts together; difflib takes seconds for more
KERNEL = ("/proc/", "/sys/", "/dev/")  # process and device files look regular and are not
MEMORY = "/dev/shm/"  # these are files
# What `escaped` writes
ESCAPE = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U00(?:0[0-9a-f]|10)[0-9a-f]{4}|[nrt])")


# ---- where ----------------------------------------------------------------------------------


def resolve(ctx: ToolContext, path: str) -> Path:
    """The place that a path of the model's leads to, links followed, relative to the workspace.

    A name that is not there may be meant as our listings write it (`escaped`), since no request can
    carry a name that is no text.
    """
    if "\0" in path or not path.strip():
        raise ToolError("the path is empty or holds a NUL")
    place = ctx.cwd / os.path.expanduser(path)  # Path's expanduser raises for a file named ~x
    if "\\" in path and not os.path.lexists(place):
        meant = ctx.cwd / ESCAPE.sub(lambda found: found[0].encode().decode("unicode_escape"), path)
        place = meant if "\0" not in str(meant) and os.path.lexists(meant) else place
    return real(place)


def real(place: Path) -> Path:
    """A place with links followed. Raises ToolError where one cannot be read."""
    try:
        return Path(os.path.realpath(place))
    except OSError as error:
        raise ToolError(f"{place} cannot be resolved: {error.strerror}") from None


def inside(ctx: ToolContext, target: Path) -> bool:
    """Component by component: /ws-evil is not inside /ws."""
    return target.is_relative_to(ctx.cwd)


def to_read(ctx: ToolContext, path: str) -> Generator[Any, None, Path]:
    """The place to read; permission is asked for one outside the workspace."""
    target = resolve(ctx, path)
    if str(target).startswith(KERNEL) and not str(target).startswith(MEMORY):
        raise ToolError(f"{path} is a device or process file and is not read")
    saved = private_folder.cache_info().currsize and os.path.realpath(private_folder())
    if not inside(ctx, target) and not (saved and target.is_relative_to(saved)):
        yield from ctx.ask("external_directory", str(target))
    return target


def to_write(ctx: ToolContext, path: str) -> Path:
    """The place to write; a place outside the workspace, also behind a link, is refused."""
    target = resolve(ctx, path)
    if not inside(ctx, target):
        raise ToolError(f"{path} is outside the workspace {ctx.cwd}: nothing is written there")
    return target


def shown(ctx: ToolContext, target: Path) -> str:
    """The path as listings and results have it."""
    return str(target.relative_to(ctx.cwd)) if inside(ctx, target) else str(target)


def escaped(name: str) -> str:
    """A file name in one line that can be sent: control characters and stray bytes as escapes."""
    if name.isprintable():
        return name
    escapes = ((c, c.encode("unicode_escape", "surrogatepass").decode()) for c in name)
    return "".join(c if c.isprintable() else escape for c, escape in escapes)


def ask_to_show(ctx: ToolContext, *targets: Path) -> Generator[Any, None, None]:
    """Ask for permission to read: a diff and advice show lines of a file that is changed."""
    if names := [name for target in targets if secret_for(ctx)(name := shown(ctx, target))]:
        yield from ctx.ask("read", names)


# ---- opening and reading --------------------------------------------------------------------


@contextlib.contextmanager
def opened(target: Path) -> Iterator[int]:
    """A descriptor of a regular file at a path without links. Raises ToolError."""
    try:
        fd = open_in(target.parent, target.name or ".")
    except FileNotFoundError:
        raise ToolError(f"there is no file {target}{similar_names(target)}") from None
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


def similar_names(target: Path) -> str:
    """For the end of an error: names in the folder that are like one that is not there."""
    with contextlib.suppress(OSError):
        names = difflib.get_close_matches(target.name, os.listdir(target.parent), 3)
        if names:
            return f". Did you mean {', '.join(str(target.parent / name) for name in names)}?"
    return ""


def stamp(info: os.stat_result) -> tuple[int, ...]:
    """What changes with the content of a file."""
    return info.st_ino, info.st_size, info.st_mtime_ns


def refuse_changed(ctx: ToolContext, target: Path) -> None:
    """Raises ToolError where a file changed since it was last read or written here."""
    before = ctx.seen.get(target)
    if before is not None and before != stamp(os.stat(target)):
        name = shown(ctx, target)
        raise ToolError(f"{name} changed on disk since it was read. Read it again first.")


def refuse_other(ctx: ToolContext, target: Path, before: Text | None) -> None:
    """Raises ToolError where the content is not what the call worked from (None: no file).

    It may have changed while permission was asked.
    """
    if (load(ctx, target) if os.path.lexists(target) else None) != before:
        name = shown(ctx, target)
        raise ToolError(f"{name} changed on disk in the meantime. Read it again first.")


# ---- text and bytes -------------------------------------------------------------------------

NOT_ASCII = re.compile(r"[^\x00-\x7f]")
STRAY = re.compile("[\udc80-\udcff]")  # how a byte that is no UTF-8 is decoded
BOMS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}


@dataclass(frozen=True)
class Text:
    """The content of a file, and how to get its bytes back.

    Bytes that are no UTF-8 survive as surrogates.
    """

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
        found = enumerate(re.finditer("\r\n", self.text))
        return [each.start() - number for number, each in found]

    def encoded(self, text: str) -> bytes:
        """`text` in this file's encoding. Raises ToolError where it would be read otherwise."""
        stray = STRAY.search(self.text)
        if stray and Counter(NOT_ASCII.findall(text)) - Counter(NOT_ASCII.findall(self.text)):
            raise ToolError(
                "the file is not UTF-8: only ASCII can be added to it. Use a command that knows "
                "its encoding."
            )
        return self.bom + text.encode(self.encoding, "surrogateescape" if stray else "strict")


def decoded(data: bytes, name: str) -> Text:
    """The text in `data`. Raises ToolError for a binary file."""
    bom = next((each for each in BOMS if data.startswith(each)), b"")
    encoding = BOMS.get(bom, "utf-8")
    if encoding == "utf-8":
        if b"\0" in data[:8192]:
            raise ToolError(f"{name} is a binary file of {len(data):,} bytes")
        return Text(data[len(bom) :].decode(encoding, "surrogateescape"), encoding, bom)
    try:
        return Text(data[len(bom) :].decode(encoding), encoding, bom)
    except UnicodeDecodeError:
        problem = "begins like UTF-16 and is not: use a command to change it"
        raise ToolError(f"{name} {problem}") from None


def load(ctx: ToolContext, target: Path) -> Text:
    """The whole text of a file that is to be edited."""
    with opened(target) as fd, open(fd, "rb", closefd=False) as file:
        size, name = os.fstat(fd).st_size, shown(ctx, target)
        if size > MAX_EDIT:
            raise ToolError(f"{name} has {size:,} bytes, too large to edit here: use a command")
        return decoded(file.read(), name)


def diff(old: str, new: str, name: str) -> str:
    """A unified diff with three lines around; in words where no line differs but its ending."""
    before, after = old.splitlines(), new.splitlines()
    if len(before) + len(after) > MAX_COMPARED:
        lines = _one_hunk(before, after, name)
    else:
        lines = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}", lineterm="")
    text = "\n".join(lines).encode("utf-8", "replace").decode()
    return text or ("(only line endings, or the newline at the end, differ)" if old != new else "")


def _one_hunk(before: list[str], after: list[str], name: str) -> Iterator[str]:
    """A diff from the first line that differs to the last; equal lines in between are in it."""
    start = _in_common(before, after)
    if start == len(before) == len(after):
        return
    end = _in_common(before[start:][::-1], after[start:][::-1])
    first, last = max(0, start - 3), min(len(before), len(before) - end + 3)
    old, new = before[start : len(before) - end], after[start : len(after) - end]
    size = last - first
    yield from (f"--- a/{name}", f"+++ b/{name}")
    yield f"@@ -{first + 1},{size} +{first + 1},{size - len(old) + len(new)} @@"
    yield from (f" {line}" for line in before[first:start])
    yield from (f"-{line}" for line in old)
    yield from (f"+{line}" for line in new)
    yield from (f" {line}" for line in before[len(before) - end : last])


def _in_common(lines: list[str], others: list[str]) -> int:
    """The number of lines that both begin with."""
    pairs = enumerate(zip(lines, others))
    return next((at for at, (a, b) in pairs if a != b), min(len(lines), len(others)))


# ---- writing --------------------------------------------------------------------------------


def save(ctx: ToolContext, target: Path, data: bytes, like: Path | None = None) -> str:
    """Put `data` in the place of a file and remember it as it is now. Returns a note, mostly empty.

    The file gets owner and mode of the one that it replaces, or of `like`. Raises ToolError; the
    file is then as it was.
    """
    try:
        with folder_of(target, make=True) as folder:
            old = file_info(folder, target.name)
            replace_in(folder, target.name, data, _info(like) if like else old)
            ctx.seen[target] = stamp(os.stat(target.name, dir_fd=folder, follow_symlinks=False))
    except OSError as error:
        problem = f"could not be written, and is as it was: {error.strerror}"
        raise ToolError(f"{target} {problem}") from None
    if old and old.st_nlink > 1:
        return f" Note: the file had {old.st_nlink} hard links; the others keep the old content."
    return ""


def _info(place: Path) -> os.stat_result | None:
    with folder_of(place) as folder:
        return file_info(folder, place.name)
