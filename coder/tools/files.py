"""read, write and ls."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
from collections.abc import Generator, Iterator
from typing import Any, BinaryIO

from coder.tools.folder import open_in
from coder.tools.workspace import (
    MAX_EDIT,
    diff,
    escaped,
    load,
    opened,
    refuse_changed,
    refuse_other,
    save,
    shown,
    similar_names,
    stamp,
    to_read,
    to_write,
)
from coder.toolset import ToolContext, tool
from coder.types import ToolError, ToolResult

MAX_LINES = 2000  # of one read
MAX_LINE = 2000  # characters shown of one line
MAX_READ = 28_000  # characters of one read: under the 30,000 that the loop passes on
MAX_ENTRIES = 500  # of one ls
PIECE = 1 << 20  # bytes


@tool(concurrent=True)
def read(
    ctx: ToolContext, path: str, offset: int = 1, limit: int = MAX_LINES
) -> Generator[Any, None, ToolResult]:
    """Read a text file: its lines as `number<TAB>text`. Long files come in parts; the end says how to
    go on.

    path: file, absolute or in the workspace
    offset: first line to read, from 1
    limit: number of lines, at most 2000
    """
    target = yield from to_read(ctx, path)
    yield from ctx.ask("read", shown(ctx, target))
    first, wanted = max(1, offset), min(max(1, limit), MAX_LINES)
    with opened(target) as fd, open(fd, "rb", closefd=False) as file:
        info = os.fstat(fd)
        lines, total = _page(_text(file, info.st_size, shown(ctx, target)), first, wanted, ctx)
        ctx.seen[target] = stamp(info)
    if not total:
        return ToolResult("(the file is empty)")
    if first > total:
        raise ToolError(f"offset {first} is past the end: the file has {total} lines")
    last = first + len(lines) - 1
    text = "\n".join(f"{number}\t{line}" for number, line in enumerate(lines, first))
    if last < total:
        text += f"\n\n(lines {first}-{last} of {total}; use offset={last + 1} to go on)"
    return ToolResult(text, details={"lines": total})


def _text(file: BinaryIO, size: int, name: str) -> BinaryIO:
    """The file without its mark, a small one in UTF-16 as UTF-8. Raises ToolError for binary."""
    head = file.read(8192)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and size <= MAX_EDIT:
        text = (head + file.read()).decode("utf-16", "replace")
        return io.BytesIO(text.encode("utf-8", "replace"))
    if b"\0" in head:
        raise ToolError(f"{name} is a binary file of {size:,} bytes")
    file.seek(len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0)
    return file


def _page(file: BinaryIO, first: int, wanted: int, ctx: ToolContext) -> tuple[list[str], int]:
    """(the lines from `first`, as many as are wanted and have room, the number of all lines)."""
    lines, room = list[str](), MAX_READ
    number = passed = _skip(file, first - 1, ctx)
    for number, line in enumerate(_lines(file, ctx), passed + 1):
        if number < first:
            continue
        text = line.rstrip(b"\r\n").decode("utf-8", "replace")
        if len(text) > MAX_LINE:
            text = text[:MAX_LINE] + " … (line cut)"
        if len(lines) == wanted or (lines and len(text) > room):
            return lines, number + _count(file, ctx)
        lines.append(text)
        room -= len(text) + 8
    return lines, number


def _skip(file: BinaryIO, lines: int, ctx: ToolContext) -> int:
    """Pass over pieces of a file that end before so many lines; returns the lines passed."""
    start, end, passed = file.tell(), file.seek(0, os.SEEK_END), 0
    file.seek(start)
    while (start := file.tell()) + PIECE < end:
        ctx.abort.check()
        following = passed + file.read(PIECE).count(b"\n")
        if following >= lines:
            break
        passed = following
    file.seek(start)
    return passed


def _lines(file: BinaryIO, ctx: ToolContext) -> Iterator[bytes]:
    """Each line, or what may be shown of it."""
    while line := file.readline(PIECE):
        ctx.abort.check()
        piece = line
        while len(piece) == PIECE and not piece.endswith(b"\n"):
            piece = file.readline(PIECE)
            ctx.abort.check()
        yield line[: 4 * MAX_LINE + 4]


def _count(file: BinaryIO, ctx: ToolContext) -> int:
    """The number of lines that are left in a file."""
    count, last = 0, b""
    while piece := file.read(PIECE):
        ctx.abort.check()
        count, last = count + piece.count(b"\n"), piece[-1:]
    return count + (last not in (b"", b"\n"))


@tool
def write(ctx: ToolContext, path: str, content: str) -> Generator[Any, None, ToolResult]:
    """Create a file or overwrite it whole. To change a part of a file use edit. A file that exists has
    to be read first.

    path: file, absolute or in the workspace; missing folders are made
    content: the whole new content
    """
    target = to_write(ctx, path)
    name, old, new = shown(ctx, target), None, content
    if os.path.lexists(target):
        with opened(target):
            if target not in ctx.seen:
                way = "Read it first, or change it with edit."
                raise ToolError(f"{name} exists and was not read in this session. {way}")
        refuse_changed(ctx, target)
        old = load(ctx, target)
        new = content.replace("\r\n", "\n").replace("\n", "\r\n") if old.newline != "\n" else new
    data = old.encoded(new) if old else content.encode()
    changes = diff(old.text if old else "", new, name)
    yield from ctx.ask("edit", name, changes)
    refuse_other(ctx, target, old)
    note = save(ctx, target, data)
    text = f"{'Overwrote' if old else 'Created'} {name} ({len(content.splitlines())} lines).{note}"
    return ToolResult(text, details={"diff": changes, "path": str(target)})


@tool(concurrent=True)
def ls(ctx: ToolContext, path: str = ".") -> Generator[Any, None, ToolResult]:
    """List a folder: folders with /, links with ->, at most 500 entries.

    path: folder, default the workspace
    """
    target = yield from to_read(ctx, path)
    try:
        folder = open_in(target, ".")
    except NotADirectoryError:
        raise ToolError(f"{path} is a file: use read") from None
    except OSError as error:
        raise ToolError(
            f"{path} cannot be listed: {error.strerror}{similar_names(target)}"
        ) from None
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        lines = [_entry(folder, entry) for entry in entries[:MAX_ENTRIES]]
    finally:
        os.close(folder)
    if len(entries) > MAX_ENTRIES:
        lines.append(f"({MAX_ENTRIES} of {len(entries)} entries; use glob with a pattern)")
    text = "\n".join(lines) or "(the folder is empty)"
    return ToolResult(text, details={"entries": len(entries)})


def _entry(folder: int, entry: os.DirEntry[str]) -> str:
    name = escaped(entry.name)
    if entry.is_symlink():
        with contextlib.suppress(OSError):
            return f"{name} -> {escaped(os.readlink(entry.name, dir_fd=folder))}"
    if entry.is_dir(follow_symlinks=False):
        return f"{name}/"
    return name if entry.is_file(follow_symlinks=False) else f"{name} (not a regular file)"
