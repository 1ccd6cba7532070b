"""read, write and ls."""

from __future__ import annotations

import base64
import codecs
import contextlib
import hashlib
import os
import re
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from coder.tools import paths, slips, workspace
from coder.tools.edit import create_file, replace_text
from coder.tools.text import load_known
from coder.toolset import ToolContext, tool
from coder.types import ToolError, ToolResult

MAX_LINES = 2000  # of one read
MAX_LINE = 2000  # characters shown of one line
MAX_BYTES = 4 * MAX_LINE + 4  # of a line that are kept: more than is shown
MAX_READ = 28_000  # characters of one read: under the 30,000 that the loop passes on
# A line of a model that stands for lines it left out
PLACEHOLDER = re.compile(
    r"^[ \t]*(?:#|//|/\*|--|<!--|;)?[ \t]*(?:\.\.\.|…).*\b(?:rest|existing|unchanged|remaining)\b.*$",
    re.MULTILINE | re.IGNORECASE,
)
MAX_ENTRIES = 500  # of one ls
PIECE = 1 << 18  # bytes
MAX_IMAGE = 5_000_000  # bytes, what Anthropic takes; others take more
NO_LINE = 1 << 62  # no file has so many
PDF = b"%PDF-"
# How the files of images begin that providers take
IMAGE = (
    rb"(?s)(?P<png>\x89PNG\r\n\x1a\n)|(?P<jpeg>\xff\xd8\xff)|(?P<gif>GIF8)|(?P<webp>RIFF.{4}WEBP)"
)


@tool(concurrent=True, permission="read", default="allow", asks_itself=True, slips=slips.READ)
def read(
    ctx: ToolContext, path: str, offset: int = 0, limit: int = MAX_LINES
) -> Generator[Any, None, ToolResult]:
    """Read a text file, up to 2000 lines or 28,000 characters at once; the end says how to go on.

    path: file, absolute or in the workspace
    offset: first line; with it lines come as number<TAB>text
    limit: number of lines
    """
    path, line = paths.meant(ctx, path)
    target = yield from workspace.to_read(ctx, path)
    name = workspace.shown(ctx, target)
    yield from ctx.ask("read", name)
    if target.is_dir():
        return _list(target, path)
    first = offset or line or 0
    is_numbered = first != 0
    wanted = min(max(1, limit), MAX_LINES)
    with paths.naming_near(ctx, path):
        file = workspace.opened(target, name)
    with file:
        head = file.read(8192)
        if b"\0" in head or head.startswith(PDF):
            raise ToolError(_say_binary(name, os.fstat(file.fileno()).st_size, head))
        mark = codecs.BOM_UTF8 if head.startswith(codecs.BOM_UTF8) else b""
        digest = hashlib.sha256(mark)
        if first < 0:
            file.seek(len(mark))
            _, total = _page(_pieces(file, ctx), NO_LINE, 1)
            first += total + 1
        first = max(1, first)
        file.seek(len(mark))
        lines, total = _page(_pieces(file, ctx, digest), first, wanted)
        ctx.seen[target] = digest.digest()
    if not total:
        return ToolResult("(the file is empty)")
    if first > total:
        raise ToolError(f"offset {first} is past the end: the file has {total} lines")
    last = first + len(lines) - 1
    # Numbers cost a tenth of a file in every later request, so a whole file comes without
    if is_numbered:
        lines = [f"{number}\t{line}" for number, line in enumerate(lines, first)]
    text = "\n".join(lines)
    if last < total:
        text += f"\n\n(lines {first}-{last} of {total}; use offset={last + 1} to go on)"
    return ToolResult(text, details={"lines": total})


def _say_binary(name: str, size: int, head: bytes) -> str:
    if head.startswith(PDF):
        return f"{name} is a PDF: run pdftotext {name} - with bash"
    if re.match(IMAGE, head):
        return f"{name} is an image of {size:,} bytes: it cannot be shown here"
    return f"{name} is a binary file of {size:,} bytes"


def _pieces(file: IO[bytes], ctx: ToolContext, digest: Any = None) -> Iterator[bytes]:
    """The rest of a file piece by piece; what is passed goes into the digest."""
    while piece := file.read(PIECE):
        ctx.abort.check()
        if digest:
            digest.update(piece)
        yield piece


def _page(pieces: Iterable[bytes], first: int, wanted: int) -> tuple[list[str], int]:
    """(the lines from `first`, as many as are wanted and have room, the number of all lines)."""
    found = list[bytes]()
    passed = 0
    rest = b""
    for piece in pieces:
        count = piece.count(b"\n")
        is_wanted = len(found) < wanted and passed + count + 1 >= first
        if is_wanted or not count:
            *whole, rest = (rest + piece).split(b"\n")
            found += [line[:MAX_BYTES] for line in whole[max(0, first - passed - 1) :][:wanted]]
        else:  # its lines are only counted
            rest = piece[piece.rfind(b"\n") + 1 :]
        passed += count
        rest = rest[:MAX_BYTES]
    if rest:
        passed += 1
        if passed >= first:
            found.append(rest)
    lines = list[str]()
    room = MAX_READ
    for line in found[:wanted]:
        text = line.rstrip(b"\r").decode("utf-8", "replace")
        if len(text) > MAX_LINE:
            text = f"{text[:MAX_LINE]} … (line cut)"
        if lines and len(text) > room:
            break
        lines.append(text)
        room -= len(text) + 8
    return lines, passed


@tool(permission="edit", default="ask", asks_itself=True, slips=slips.WRITE)
def write(ctx: ToolContext, path: str, content: str) -> Generator[Any, None, ToolResult]:
    """Create a file, or overwrite one that was read before.

    path: file; missing folders are made
    content: the whole new content
    """
    target = workspace.to_write(ctx, path)
    name = workspace.shown(ctx, target)
    known = workspace.state_of(target)
    if not known:
        meant, _ = paths.meant(ctx, path)
        if meant != path:
            raise ToolError(f"there is no file {path}; did you mean {meant}?")
        return (yield from create_file(ctx, target, content))
    old = load_known(ctx, target)
    if PLACEHOLDER.search(content) and not PLACEHOLDER.search(old.text):
        whole = "write takes the whole file; to change a part use edit"
        raise ToolError(f"the content leaves lines out ('... unchanged ...'): {whole}")
    new = content.replace("\r\n", "\n").replace("\n", old.newline)
    changes, notes = yield from replace_text(ctx, target, known, old, new)
    before = len(old.text.splitlines())
    done = f"Overwrote {name}: {len(content.splitlines())} lines, was {before}.{notes}"
    return ToolResult(done, details={"diff": changes, "path": str(target)})


@tool(concurrent=True, permission="read", default="allow", slips=slips.LS)
def ls(ctx: ToolContext, path: str = ".") -> Generator[Any, None, ToolResult]:
    """List a folder.

    path: folder, default the workspace
    """
    path, _ = paths.meant(ctx, path)
    target = yield from workspace.to_read(ctx, path)
    with paths.naming_near(ctx, path, "folder"):
        return _list(target, path)


def _list(target: Path, path: str) -> ToolResult:
    """The entries of a folder; `path` is its name in an error."""
    try:
        with workspace.folder_of(target / "any") as at:
            folder = os.open(".", workspace.FILE, dir_fd=at)
    except FileNotFoundError:
        raise workspace.MissingFileError(f"there is no folder {path}") from None
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
