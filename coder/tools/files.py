"""read, write and ls."""

from __future__ import annotations

import codecs
import contextlib
import os
import zlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from coder.tools.workspace import (
    MAX_EDIT,
    Stamp,
    alike,
    chunks,
    diff,
    escaped,
    load,
    opened,
    refuse_changed,
    refuse_other,
    save,
    shown,
    to_read,
    to_write,
)
from coder.toolset import ToolContext, tool
from coder.types import ToolError, ToolResult

MAX_LINES = 2000  # of one read
MAX_LINE = 2000  # characters shown of one line
MAX_READ = 28_000  # characters of one read: under the 30,000 that the loop passes on, so that nothing is cut inside a page
MAX_ENTRIES = 500  # of one ls


# ---- read ------------------------------------------------------------------------------------------------


@tool(concurrent=True)
def read(
    ctx: ToolContext, path: str, offset: int = 1, limit: int = MAX_LINES
) -> Generator[Any, None, ToolResult]:
    """Read a text file: its lines as `number<TAB>text`. Long files come in parts; the end says how to go on.

    path: file, absolute or in the workspace
    offset: first line to read, from 1
    limit: number of lines, at most 2000
    """
    target = yield from to_read(ctx, path)
    yield from ctx.ask("read", shown(ctx, target))
    first, wanted = max(1, offset), min(max(1, limit), MAX_LINES)
    with opened(target) as fd:
        page = _page(fd, first, wanted, shown(ctx, target), ctx)
        info = os.fstat(fd)
        ctx.seen[target] = Stamp(info.st_size, info.st_mtime_ns, page.checksum)
    if not page.total:
        return ToolResult("(the file is empty)")
    if first > page.total:
        raise ToolError(f"offset {first} is past the end: the file has {page.total} lines")
    last = first + len(page.lines) - 1
    text = "\n".join(f"{number}\t{line}" for number, line in enumerate(page.lines, first))
    if last < page.total:
        text += f"\n\n(lines {first}-{last} of {page.total}; use offset={last + 1} to go on)"
    return ToolResult(text, details={"lines": page.total})


@dataclass
class _Page:
    """Lines `first` and following of a file, gathered in one pass with bounded memory, whatever its size."""

    first: int
    wanted: int
    lines: list[str]
    total: int = 0
    checksum: int = 0
    room: int = MAX_READ

    def summed(self, raw: Iterator[bytes]) -> Iterator[bytes]:
        for chunk in raw:
            self.checksum = zlib.crc32(chunk, self.checksum)
            yield chunk

    def add(self, line: bytes, cut: bool) -> None:
        """Take a line in: the next one that was asked for, while there is room."""
        text = line.rstrip(b"\r\n").decode("utf-8", "replace")
        if len(text) > MAX_LINE or cut:
            text = text[:MAX_LINE] + " … (line cut)"
        if len(self.lines) < self.wanted and (self.room >= len(text) or not self.lines):
            self.lines.append(text)
            self.room -= len(text) + 8
        else:
            self.room = -1


def _page(fd: int, first: int, wanted: int, name: str, ctx: ToolContext) -> _Page:
    page = _Page(first, wanted, [])
    kept, cut = b"", False  # the line under way, at most its shown part
    head = True
    for chunk in _decodable(fd, page):
        ctx.abort.check()
        if head and b"\0" in chunk[:8192]:
            raise ToolError(f"{name} is a binary file of {os.fstat(fd).st_size:,} bytes")
        chunk, head = chunk.removeprefix(codecs.BOM_UTF8) if head else chunk, False
        # Nothing of it is shown: count only
        if page.room < 0 or page.total + chunk.count(b"\n") + 1 < first:
            page.total += chunk.count(b"\n")
            kept = chunk[chunk.rfind(b"\n") + 1 :][: 4 * MAX_LINE] or (
                kept if b"\n" not in chunk else b""
            )
            continue
        *whole, rest = chunk.split(b"\n")
        for line in whole:
            page.total += 1
            if page.total >= first:
                page.add(kept + line[: 4 * MAX_LINE], cut or len(line) > 4 * MAX_LINE)
            kept, cut = b"", False
        cut = cut or len(kept) + len(rest) > 4 * MAX_LINE
        kept = (kept + rest[: 4 * MAX_LINE])[: 4 * MAX_LINE]
    if kept:
        page.total += 1
        if page.total >= first:
            page.add(kept, cut)
    return page


def _decodable(fd: int, page: _Page) -> Iterator[bytes]:
    """The chunks of a file; one in UTF-16 with its mark (small) comes as UTF-8. The checksum is of what is on disk."""
    raw = page.summed(chunks(fd))
    head = next(raw, b"")
    if (
        head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        and os.fstat(fd).st_size <= MAX_EDIT
    ):
        yield b"".join([head, *raw]).decode("utf-16", "replace").encode("utf-8", "replace")
        return
    yield head
    yield from raw


# ---- write and ls ----------------------------------------------------------------------------------------


@tool
def write(ctx: ToolContext, path: str, content: str) -> Generator[Any, None, ToolResult]:
    """Create a file or overwrite it whole. To change a part of a file use edit. A file that exists has to be read first.

    path: file, absolute or in the workspace; missing folders are made
    content: the whole new content
    """
    target = to_write(ctx, path)
    name = shown(ctx, target)
    old = None
    if os.path.lexists(target):
        if target not in ctx.seen:
            with opened(target):
                raise ToolError(
                    f"{name} exists and was not read in this session. Read it first, or change it with edit."
                )
        refuse_changed(ctx, target)
        old = load(ctx, target)
    before = old.text if old else ""
    new = (
        content.replace("\r\n", "\n").replace("\n", "\r\n")
        if old and old.newline == "\r\n"
        else content
    )
    data = old.encoded(new) if old else content.encode()
    changes = diff(before, new, name)
    yield from ctx.ask("edit", name, changes)
    refuse_other(ctx, target, old)
    note = save(ctx, target, data)
    verb = "Overwrote" if old else "Created"
    return ToolResult(
        f"{verb} {name} ({len(content.splitlines())} lines).{note}",
        details={"diff": changes, "path": str(target)},
    )


@tool(concurrent=True)
def ls(ctx: ToolContext, path: str = ".") -> Generator[Any, None, ToolResult]:
    """List a folder: folders with /, links with ->, at most 500 entries.

    path: folder, default the workspace
    """
    target = yield from to_read(ctx, path)
    try:
        entries = sorted(os.scandir(target), key=lambda entry: entry.name)
    except NotADirectoryError:
        raise ToolError(f"{path} is a file: use read") from None
    except OSError as error:
        raise ToolError(f"{path} cannot be listed: {error.strerror}{alike(target)}") from None
    lines = [_entry(entry) for entry in entries[:MAX_ENTRIES]]
    if len(entries) > MAX_ENTRIES:
        lines.append(f"({MAX_ENTRIES} of {len(entries)} entries; use glob with a pattern)")
    return ToolResult(
        "\n".join(lines) or "(the folder is empty)", details={"entries": len(entries)}
    )


def _entry(entry: os.DirEntry[str]) -> str:
    name = escaped(entry.name)
    if entry.is_symlink():
        with contextlib.suppress(OSError):
            return f"{name} -> {escaped(os.readlink(entry.path))}"
    if entry.is_dir(follow_symlinks=False):
        return f"{name}/"
    return name if entry.is_file(follow_symlinks=False) else f"{name} (not a regular file)"
