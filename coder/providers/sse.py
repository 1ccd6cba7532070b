"""Bytes of an event stream -> its events, tolerant of what real servers send."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from coder.types import ModelError

BOM = b"\xef\xbb\xbf"
MAX_LINE = 50_000_000  # bytes: some servers send a whole file in one event
CUT = "\n"  # the name of an event that the body ended in; no other can be called so


def sse(chunks: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """(event name, data) of each event, CUT for a last one without its blank line. Comments, empty data and other fields
    are passed over."""
    event, data = "", list[str]()
    for lines in _lines(chunks):
        for line in lines:
            if line.startswith("data:"):
                data.append(line[6:] if line.startswith("data: ") else line[5:])
            elif not line:
                if any(data):
                    yield event, data[0] if len(data) == 1 else "\n".join(data)
                event, data = "", []
            elif line.startswith("event:"):
                event = line[6:].strip()
            elif line.startswith("error:"):  # some servers send an error as a field of its own
                yield "error", line[6:].strip()
    if any(data):  # perhaps whole, as a [DONE]
        yield event if event == "error" else CUT, "\n".join(data)


def _lines(chunks: Iterable[bytes]) -> Iterator[list[str]]:
    """The lines that each chunk ends. CR, LF and CRLF end a line, and nothing else does."""
    held, size, mark = list[bytes](), 0, BOM
    for chunk in filter(None, chunks):
        end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r", 0, -1)) + 1  # a last CR may be half a CRLF
        if end or (held and held[-1].endswith(b"\r")):
            yield _split(b"".join([*held, chunk[:end]]).removeprefix(mark))
            held, size, mark = [], 0, b""
        if end < len(chunk):
            held.append(chunk[end:])
            size += len(chunk) - end
        if size > MAX_LINE:
            raise ModelError("protocol", "a line of the event stream is too long")
    if held:
        yield _split(b"".join(held).removeprefix(mark))


def _split(data: bytes) -> list[str]:
    """Whole lines, decoded together, so that no character is cut."""
    text = data.decode("utf-8", "replace")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.removesuffix("\n").split("\n")
