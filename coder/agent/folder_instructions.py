"""Instruction files of sub-folders: added to the result of the first file that is read there.

All of them together have a limit for a conversation. Which have been added is known from the messages, so
that they come again where a conversation does not hold them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from coder.agent.instructions import (
    LIMIT,
    Instruction,
    Report,
    files_in,
    folders_between,
    no_report,
)
from coder.history import text_of, user
from coder.hooks import Hooks
from coder.types import Message, ToolCall, ToolResult

HEAD = re.compile(r'^<instructions path="(.+)">$', re.MULTILINE)  # as an Instruction begins


class FolderInstructions(Hooks):
    """Adds them to results of `read`. `known` are those in the system prompt; `report` is called once for each
    file that is left out."""

    def __init__(
        self, cwd: Path, known: Sequence[Instruction] = (), report: Report = no_report
    ) -> None:
        self.cwd = Path(os.path.realpath(cwd))
        self.known = {each.file for each in known}
        self.added: list[Instruction] = []
        self.report = cache(report)

    def after_tool_call(self, call: ToolCall, result: ToolResult) -> ToolResult | None:
        if call.name != "read" or result.is_error or not isinstance(result.content, str):
            return None
        path = os.path.expanduser(str((call.arguments or {}).get("path", "")))
        file = Path(os.path.realpath(self.cwd / path))
        new = self._add(each for each in self._above(file) if each.file != file)
        content = "\n\n".join([result.content, *map(str, new)])
        return ToolResult(content, details=result.details) if new else None

    def _above(self, file: Path) -> list[Instruction]:
        """The instruction files of the folders on the way down to a file."""
        if not file.is_relative_to(self.cwd):
            return []
        folders = folders_between(self.cwd, file.parent)
        return [each for folder in folders for each in files_in(folder, self.cwd, self.report)]

    def _add(self, found: Iterable[Instruction]) -> list[Instruction]:
        """Those that are new, as far as there is room for them."""
        before = len(self.added)
        for each in found:
            room = LIMIT - sum(len(other.text) for other in self.added)
            if room > 0 and each.file not in {*self.known, *(other.file for other in self.added)}:
                self.added.append(each.cut(room))
        return self.added[before:]

    def take_up(self, messages: Sequence[Message]) -> None:
        """Go on with this conversation: added is what its tool results and attached notes hold."""
        self.added.clear()
        for message in messages:
            if message.get("role") == "tool" or message.get("meta", {}).get("attached"):
                for path in HEAD.findall(text_of(message)):
                    file = self.cwd / path
                    if ".." not in file.parts:
                        self._add(each for each in self._above(file) if each.file == file)

    def notes(self) -> list[Message]:
        """What was added, to be attached again where the history is shortened."""
        return [user("\n\n".join(map(str, self.added)))] if self.added else []
