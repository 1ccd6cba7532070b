"""read, write and ls."""

from __future__ import annotations

import base64
import codecs
import contextlib
import os
import re
from collections.abc import Generator
from typing import IO, Any

from coder.tools import slips, workspace
from coder.tools.edit import Text, load, replace_text
from coder.toolset import ToolContext, tool
from coder.types import ToolError, ToolResult

MAX_LINES = 2000  # of one read
MAX_LINE = 2000  # characters shown of one line
MAX_BYTES = 4 * MAX_LINE + 4  # of a line that are kept: more than is shown
MAX_READ = 28_000  # characters of one read: under the 30,000 that the loop passes on
MAX_ENTRIES = 500  # of one ls
PIECE = 1 << 18  # bytes
MAX_IMAGE = 5_000_000  # bytes, what Anthropic takes; others take more
# How the files of images begin that providers take
IMAGE = (
    rb"(?s)(?P<png>\x89PNG\r\n\x1a\n)|(?P<jpeg>\xff\xd8\xff)|(?P<gif>GIF8)|(?P<webp>RIFF.{4}WEBP)"
)


@tool(concurrent=True, permission="read", default="allow", asks_itself=True, slips=slips.READ)
def read(
    ctx: ToolContext, path: str, offset: int = 1, limit: int = MAX_LINES
) -> Generator[Any, None, ToolResult]:
    """Read a text file: its lines as `number<TAB>text`. Long files come in parts; the end says how to
    go on.

    path: file, absolute or in the workspace
    offset: first line to read, from 1
    limit: number of lines, at most 2000
    """
    target = yield from workspace.to_read(ctx, path)
    yield from ctx.ask("read", name := workspace.shown(ctx, target))
    first, wanted = max(1, offset), min(max(1, limit), MAX_LINES)
    with workspace.opened(target) as file:
        info, head = os.fstat(file.fileno()), file.read(8192)
        if b"\0" in head:
            raise ToolError(f"{name} is a binary file of {info.st_size:,} bytes")
        file.seek(len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0)
        lines, total = _page(file, first, wanted, ctx)
        ctx.seen[target] = workspace.stamp(info)
    if not total:
        return ToolResult("(the file is empty)")
    if first > total:
        raise ToolError(f"offset {first} is past the end: the file has {total} lines")
    last = first + len(lines) - 1
    text = "\n".join(f"{number}\t{line}" for number, line in enumerate(lines, first))
    if last < total:
        text += f"\n\n(lines {first}-{last} of {total}; use offset={last + 1} to go on)"
    return ToolResult(text, details={"lines": total})


def _page(file: IO[bytes], first: int, wanted: int, ctx: ToolContext) -> tuple[list[str], int]:
    """(the lines from `first`, as many as are wanted and have room, the number of all lines)."""
    found, passed, rest = list[bytes](), 0, b""
    while piece := file.read(PIECE):
        ctx.abort.check()
        count = piece.count(b"\n")
        if count and (len(found) >= wanted or passed + count + 1 < first):
            rest = piece[piece.rfind(b"\n") + 1 :]  # its lines are only counted
        else:
            *whole, rest = (rest + piece).split(b"\n")
            found += [line[:MAX_BYTES] for line in whole[max(0, first - passed - 1) :][:wanted]]
        passed, rest = passed + count, rest[:MAX_BYTES]
    if rest:
        passed += 1
        found += [rest] if passed >= first else []
    lines, room = list[str](), MAX_READ
    for line in found[:wanted]:
        text = line.rstrip(b"\r").decode("utf-8", "replace")
        text = text if len(text) <= MAX_LINE else text[:MAX_LINE] + " … (line cut)"
        if lines and len(text) > room:
            break
        lines.append(text)
        room -= len(text) + 8
    return lines, passed


@tool(permission="edit", default="ask", asks_itself=True, slips=slips.WRITE)
def write(ctx: ToolContext, path: str, content: str) -> Generator[Any, None, ToolResult]:
    """Create a file or overwrite it whole. To change a part of a file use edit. A file that exists has
    to be read first.

    path: file, absolute or in the workspace; missing folders are made
    content: the whole new content
    """
    target = workspace.to_write(ctx, path)
    known, old, new = workspace.state_of(target), Text(""), content
    if known:
        old = load(ctx, target)
        if target not in ctx.seen:
            way = "Read it first, or change it with edit."
            raise ToolError(f"{path} exists and was not read in this session. {way}")
        new = content.replace("\r\n", "\n").replace("\n", old.newline)
    lines = f"{workspace.shown(ctx, target)} ({len(content.splitlines())} lines)."
    verb = "Overwrote" if known else "Created"
    return (yield from replace_text(ctx, target, known, old, new, f"{verb} {lines}"))


@tool(concurrent=True, permission="read", default="allow", slips=slips.LS)
def ls(ctx: ToolContext, path: str = ".") -> Generator[Any, None, ToolResult]:
    """List a folder: folders with /, links with ->, at most 500 entries.

    path: folder, default the workspace
    """
    target = yield from workspace.to_read(ctx, path)
    try:
        with workspace.folder_of(target / "any") as at:
            folder = os.open(".", workspace.FILE, dir_fd=at)
    except NotADirectoryError:
        raise ToolError(f"{path} is a file: use read") from None
    except OSError as error:
        raise ToolError(f"{path} cannot be listed: {error.strerror}") from None
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
    name = workspace.escaped(entry.name)
    if entry.is_symlink():
        with contextlib.suppress(OSError):
            return f"{name} -> {workspace.escaped(os.readlink(entry.name, dir_fd=folder))}"
    if entry.is_dir(follow_symlinks=False):
        return f"{name}/"
    return name if entry.is_file(follow_symlinks=False) else f"{name} (not a regular file)"


def image_of(data: bytes) -> dict[str, Any]:
    """An image as a content block. Raises ValueError for any other bytes: a server would refuse all that follows."""
    if not (found := re.match(IMAGE, data)):
        raise ValueError("it is no image of a known kind (PNG, JPEG, GIF, WebP)")
    if len(data) > MAX_IMAGE:
        raise ValueError(f"the image has more than {MAX_IMAGE:,} bytes")
    kind = f"image/{found.lastgroup}"
    return {"type": "image", "data": base64.b64encode(data).decode(), "mimeType": kind}
