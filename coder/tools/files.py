"""read, write and ls."""

from __future__ import annotations

import base64
import codecs
import contextlib
import hashlib
import os
import re
import shlex
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO, Any

from coder.tools import paths, slips, workspace
from coder.tools.edit import create_file, replace_text
from coder.tools.text import load_known, open_text
from coder.toolset import ToolContext, tool
from coder.types import ToolError, ToolResult

MAX_LINES = 2000  # of one read
MAX_LINE = 2000  # characters shown of one line
MAX_BYTES = 4 * MAX_LINE + 4  # of a line that are kept: more than is shown
CONTINUATION = bytes(range(0x80, 0xC0))  # bytes of UTF-8 that begin no character
MAX_READ = 28_000  # characters of one read: under the 30,000 that the loop passes on
# What models write for lines that they leave out
PLACEHOLDER = r"(?mi)^[ \t]*(?:#|//|/\*|--|<!--|;)?[ \t]*(?:\.\.\.|…).*\b(?:rest|existing|unchanged|remaining)\b.*$"
MAX_ENTRIES = 500  # of one ls
PIECE = 1 << 18  # bytes
MAX_IMAGE = 5_000_000  # bytes, what Anthropic takes; others take more
NO_LINE = 1 << 62  # no file has so many
PDF = b"%PDF-"
# How the files of images begin that providers take
IMAGE = (
    rb"(?s)(?P<png>\x89PNG\r\n\x1a\n)"
    rb"|(?P<jpeg>\xff\xd8\xff)"
    rb"|(?P<gif>GIF8)"
    rb"|(?P<webp>RIFF.{4}WEBP)"
)


@tool(
    concurrent=True,
    permission="read",
    default="allow",
    asks_itself=True,
    slips=slips.READ,
)
def read(
    ctx: ToolContext,
    path: str,
    offset: int = 0,
    limit: int = MAX_LINES,
) -> Generator[Any, None, ToolResult]:
    """Read a text file, up to 2000 lines or 28,000 characters at once; the end says how to go on.

    path: file, absolute or in the workspace
    offset: first line; from 2 on lines come as number<TAB>text
    limit: number of lines
    """
    path, line = paths.meant(ctx, path)
    target = yield from workspace.to_read(ctx, path)
    name = workspace.shown(ctx, target)
    yield from ctx.ask("read", name)
    if target.is_dir():
        return _list(target, path)
    first = offset or line or 1
    wanted = min(max(1, limit), MAX_LINES)
    with paths.naming_near(ctx, path):
        file = open_text(ctx, target, name)
    with file:
        page, digest = _read_page(ctx, file, name, first, wanted)
    ctx.seen[target] = digest
    return _say_page(page, name)


def _read_page(
    ctx: ToolContext,
    file: IO[bytes],
    name: str,
    first: int,
    wanted: int,
) -> tuple[Page, bytes]:
    """Read a file: (the wanted lines, the digest of all). Raises ToolError for a binary file."""
    head = file.read(8192)
    if b"\0" in head or head.startswith(PDF):
        raise ToolError(_say_binary(name, file.seek(0, os.SEEK_END), head))
    mark = codecs.BOM_UTF8 if head.startswith(codecs.BOM_UTF8) else b""
    if first < 0:  # counted from the end
        all_lines = Page(NO_LINE, 1)
        all_lines.fill(_pieces(ctx, file, start=len(mark)))
        first += all_lines.total + 1
    digest = hashlib.sha256(mark)
    page = Page(max(1, first), wanted)
    page.fill(
        _pieces(
            ctx,
            file,
            start=len(mark),
            digest=digest,
        )
    )
    return page, digest.digest()


def _say_page(page: Page, name: str) -> ToolResult:
    if not page.total:
        return ToolResult("(the file is empty)")
    if page.first > page.total:
        raise ToolError(f"offset {page.first} is past the end: the file has {page.total} lines")
    lines = page.shown()
    last = page.first + len(lines) - 1
    # Numbers cost a tenth of a file in every later request: only a page within the file has them
    if page.first > 1:
        lines = [f"{number}\t{line}" for number, line in enumerate(lines, page.first)]
    text = "\n".join(lines)
    if page.cut:
        columns = f"{MAX_LINE + 1}-{2 * MAX_LINE}"
        command = f"sed -n {page.cut}p {shlex.quote(name)} | cut -c {columns}"
        text += f"\n\n(the next part of line {page.cut}, with bash: {command})"
    if last < page.total:
        text += f"\n\n(lines {page.first}-{last} of {page.total}; use offset={last + 1} to go on)"
    return ToolResult(text, details={"lines": page.total})


def _say_binary(name: str, size: int, head: bytes) -> str:
    if head.startswith(PDF):
        return f"{name} is a PDF: run pdftotext {name} - with bash"
    if re.match(IMAGE, head):
        return f"{name} is an image of {size:,} bytes: it cannot be shown here"
    return f"{name} is a binary file of {size:,} bytes"


def _pieces(
    ctx: ToolContext,
    file: IO[bytes],
    start: int,
    digest: Any = None,
) -> Iterator[bytes]:
    """The file from `start`, piece by piece; the digest gets them, too."""
    file.seek(start)
    while piece := file.read(PIECE):
        ctx.abort.check()
        if digest:
            digest.update(piece)
        yield piece


class Page:
    """The lines of a file from `first` on, at most `wanted`, and the number of all lines.

    Lines are kept with (the bytes at their begin, the number of all their characters).
    """

    def __init__(self, first: int, wanted: int) -> None:
        self.first = first
        self.wanted = wanted
        self.total = 0
        self.cut = 0  # the number of the first line that is not shown whole, or 0
        self._lines: list[tuple[bytes, int]] = []
        self._rest = b""  # the begin of the line that has not ended
        self._dropped = 0  # more characters of it

    def fill(self, pieces: Iterator[bytes]) -> None:
        for piece in pieces:
            self._add(piece)
        if self._rest:
            self._end_line(self._rest)

    def _add(self, piece: bytes) -> None:
        ends = piece.count(b"\n")
        is_wanted = len(self._lines) < self.wanted and self.total + ends + 1 >= self.first
        if ends and not is_wanted:  # its lines are only counted
            self.total += ends
            self._rest = piece[piece.rfind(b"\n") + 1 :]
            self._dropped = 0
        else:
            *whole, self._rest = (self._rest + piece).split(b"\n")
            for line in whole:
                self._end_line(line)
        self._dropped += _count_characters(self._rest[MAX_BYTES:])
        self._rest = self._rest[:MAX_BYTES]

    def _end_line(self, line: bytes) -> None:
        self.total += 1
        if self.total >= self.first and len(self._lines) < self.wanted:
            line = line.rstrip(b"\r")
            self._lines.append((line[:MAX_BYTES], self._dropped + _count_characters(line)))
        self._dropped = 0

    def shown(self) -> list[str]:
        """The lines as the model reads them, as many as there is room for."""
        shown = list[str]()
        room = MAX_READ
        for line, characters in self._lines:
            text = line.decode("utf-8", "replace")
            is_cut = len(text) > MAX_LINE
            if is_cut:
                text = f"{text[:MAX_LINE]} … (line cut; {characters:,} characters)"
            if shown and len(text) > room:
                break
            if is_cut and not self.cut:
                self.cut = self.first + len(shown)
            shown.append(text)
            room -= len(text) + 8
        return shown


def _count_characters(data: bytes) -> int:
    return len(data.translate(None, CONTINUATION))


@tool(
    permission="edit",
    default="ask",
    asks_itself=True,
    slips=slips.WRITE,
)
def write(ctx: ToolContext, path: str, content: str) -> Generator[Any, None, ToolResult]:
    """Create a file, or overwrite one that was read before.

    path: file; missing folders are made
    content: the whole new content
    """
    target = workspace.to_write(ctx, path)
    name = workspace.shown(ctx, target)
    state = workspace.state_of(target)
    if not state:
        mended, _ = paths.meant(ctx, path)
        if mended != path:
            raise ToolError(f"there is no file {path}; did you mean {mended}?")
        return (yield from create_file(ctx, target, content))
    old = load_known(ctx, target)
    if re.search(PLACEHOLDER, content) and not re.search(PLACEHOLDER, old.text):
        raise ToolError(
            "the content leaves lines out ('... unchanged ...'): "
            "write takes the whole file; to change a part use edit"
        )
    new = content.replace("\r\n", "\n").replace("\n", old.newline)
    changes, notes = yield from replace_text(ctx, target, state, old, new)
    lines = len(content.splitlines())
    done = f"Overwrote {name}: {lines} lines, was {len(old.text.splitlines())}.{notes}"
    return ToolResult(done, details={"diff": changes, "path": str(target)})


@tool(
    concurrent=True,
    permission="read",
    default="allow",
    slips=slips.LS,
)
def ls(ctx: ToolContext, path: str = ".") -> Generator[Any, None, ToolResult]:
    """List a folder.

    path: folder, default the workspace
    """
    path, _ = paths.meant(ctx, path)
    target = yield from workspace.to_read(ctx, path)
    with paths.naming_near(ctx, path, "folder"):
        return _list(target, path)


def _list(target: Path, path: str) -> ToolResult:
    """The entries of a folder; errors name it `path`."""
    try:
        with workspace.folder_of(target / "any") as fd:
            folder = os.open(".", workspace.FILE, dir_fd=fd)
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
    if entry.is_file(follow_symlinks=False):
        return name
    return f"{name} (not a regular file)"


def image_of(data: bytes) -> dict[str, Any]:
    """An image as a content block.

    Raises ValueError for any other bytes: a server would refuse all requests that have them.
    """
    image = re.match(IMAGE, data)
    if not image:
        raise ValueError("it is no image of a known kind (PNG, JPEG, GIF, WebP)")
    if len(data) > MAX_IMAGE:
        raise ValueError(f"the image has more than {MAX_IMAGE:,} bytes")
    kind = f"image/{image.lastgroup}"
    return {"type": "image", "data": base64.b64encode(data).decode(), "mimeType": kind}
