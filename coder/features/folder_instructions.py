"""Instruction files of sub-folders: they come with the first file that is read there.

A hook. What it leaves out: those that the system prompt holds from the start (instructions.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from coder.features.instructions import Instruction, folders_down, found_in
from coder.history import user
from coder.types import Hooks, Message, ToolCall, ToolResult


class FolderInstructions(Hooks):
    """Adds the instruction files of sub-folders to the result of the first `read` there. `known` are those in the prompt."""

    def __init__(self, cwd: Path, known: Sequence[Instruction] = ()) -> None:
        self.cwd = Path(os.path.realpath(cwd))
        self.known = {each.file for each in known}
        self.added: list[Instruction] = []

    def after_tool_call(self, call: ToolCall, result: ToolResult) -> ToolResult | None:
        if call.name != "read" or result.is_error or not isinstance(result.content, str):
            return None
        new = list(self._new(Path(os.path.realpath(self.cwd / str((call.arguments or {}).get("path", ""))))))
        if not new:
            return None
        self.added += new
        self.known |= {each.file for each in new}
        return ToolResult("\n\n".join([result.content, *map(str, new)]), details=result.details)

    def _new(self, read: Path) -> Iterator[Instruction]:
        if not read.is_relative_to(self.cwd):
            return
        for parts in folders_down(read.parent.relative_to(self.cwd)):
            found = found_in(self.cwd / Path(*parts), self.cwd, "")
            if found and found.file not in self.known and found.file != read:
                yield found

    def notes(self) -> list[Message]:
        """What was added in this way, to be said again where the history is shortened."""
        return [user("\n\n".join(map(str, self.added)))] if self.added else []
