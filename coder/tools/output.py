"""The output of a command as the model reads it: bounded, cut at line ends, all in a file if long.

Of a line that a program writes again and again (a progress bar) the last state counts, and colours
are left out. The file has every byte as it came.
"""

from __future__ import annotations

import codecs
import os
import re
import tempfile
from typing import IO

from coder.tools.workspace import private_folder

HEAD = 5_400  # characters
TAIL = 10_800  # two thirds: a command says at its end how it went
MAX_SAVED = 1 << 30  # bytes of output: an endless command must not fill the disk
MAX_PENDING = 1 << 16  # characters of a line that has not ended yet
BINARY_SHARE = 0.1  # of characters that are not UTF-8, or NUL; an output with more is not shown
SMALL = 200  # bytes that are shown in any case
# Colours, the cursor's movements, titles (ECMA-48, and xterm's control sequences)
CONTROLS = r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][0-9A-B])"
UNDECODABLE = "\ufffd"


class Output:
    """Head and tail of a stream as text; if there is more, all of it in a private file."""

    def __init__(self, max_saved: int = MAX_SAVED) -> None:
        self.bytes = 0
        self.max_saved = max_saved  # bytes
        self.saved = ""  # the path of the file
        self._written_bytes = 0
        self._characters = 0
        self._undecodable = 0
        self._line_ends = 0
        self._head = ""
        self._tail = ""
        self._pending = ""  # the line that has not ended
        self._unsaved_bytes = bytearray()
        self._is_saving = True
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._file: IO[bytes] | None = None

    def add(self, data: bytes, is_last: bool = False) -> str:
        """Take bytes; returns their text as it came."""
        text = self._decoder.decode(data, is_last)
        self._undecodable += text.count(UNDECODABLE) + text.count("\0")
        self._take(text, is_last)
        self.bytes += len(data)
        if self._is_saving:
            self._unsaved_bytes += data
            if self.is_cut:
                self._save()
        return text

    def _take(self, text: str, is_last: bool) -> None:
        """Add the lines that have ended; the rest waits for its end, or for being too long."""
        lines, line_end, rest = (self._pending + text).rpartition("\n")
        ended = lines + line_end
        if is_last or len(rest) > MAX_PENDING:
            ended += rest
            rest = ""
        if "\r" in ended or "\x1b" in ended:
            ended = "\n".join(final_state(line) for line in ended.split("\n"))
        # A \r at the very end may belong to a line end that is still to come
        last_return = rest.rfind("\r", 0, len(rest) - 1)
        self._pending = rest[last_return + 1 :]
        room = HEAD + TAIL - len(self._head)
        self._head += ended[:room]
        self._tail = (self._tail + ended[room:])[-TAIL:]
        self._characters += len(ended)
        self._line_ends += ended.count("\n")

    @property
    def is_cut(self) -> bool:
        return self._characters > HEAD + TAIL

    def _save(self) -> None:
        """Write what has come, until `max_saved` or the disk is full."""
        try:
            if not self._file:
                fd, self.saved = tempfile.mkstemp(".txt", "output-", str(private_folder()))
                self._file = os.fdopen(fd, "wb", buffering=0)
            size = self._file.write(self._unsaved_bytes[: self.max_saved - self._written_bytes])
            self._written_bytes += size
            self._is_saving = size == len(self._unsaved_bytes)
        except OSError:
            self._is_saving = False
        self._unsaved_bytes.clear()

    def text(self) -> str:
        """The whole, or head and tail with a marker for what is missing. After `close`."""
        if self.bytes > SMALL and self._undecodable > BINARY_SHARE * self._characters:
            rest = f"; {self._say_file()}" if self.is_cut else ""
            return f"(binary output of {self.bytes:,} bytes, not shown{rest})"
        if not self.is_cut:
            return self._head.rstrip("\n")
        head = self._head[:HEAD]
        tail = (self._head[HEAD:] + self._tail)[-TAIL:]
        # At line ends, unless one line is longer than all that is shown
        head = head[: head.rfind("\n") + 1] or head
        tail = tail[tail.find("\n") + 1 :] or tail
        return f"{head.rstrip()}\n\n{self._marker(head, tail)}\n\n{tail}".rstrip("\n")

    def _marker(self, head: str, tail: str) -> str:
        lines = self._line_ends
        if not (self._head + self._tail).endswith("\n"):
            lines += 1
        first = head.count("\n") + 1
        last = lines - len(tail.splitlines())
        missing = f"lines {first}-{last} of {lines} are not shown"
        if not head.endswith("\n") or last < first:
            missing = f"{self._characters - len(head) - len(tail):,} characters are not shown"
        way = f": grep it, or read it with offset {first}" if self.saved else ""
        return f"[{missing}; {self._say_file()}{way}]"

    def _say_file(self) -> str:
        """Tell which file has the rest."""
        if not self.saved:
            return "the whole could not be saved"
        if self._written_bytes == self.bytes:
            return f"all are in {self.saved}"
        return f"the first {self._written_bytes:,} bytes of {self.bytes:,} are in {self.saved}"

    def close(self) -> None:
        self.add(b"", is_last=True)
        if self._file:
            self._file.close()


def final_state(line: str) -> str:
    """What a terminal shows of a line in the end: what follows the last return, no controls."""
    written = [part for part in line.split("\r") if part]
    return re.sub(CONTROLS, "", written[-1]) if written else ""
