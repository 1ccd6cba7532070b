"""Instruction files of sub-folders: they come with the first file that is read there.

A hook. All of them together have a limit for a conversation, MOST characters. Which have come is seen from the messages, so that
they come again where a conversation does not hold them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from coder.agent.instructions import MOST, Instruction, folders_down, found_in
from coder.history import text_of, user
from coder.hooks import Hooks
from coder.tools.workspace import real
from coder.types import Message, ToolCall, ToolError, ToolResult

HEAD = re.compile(r'^<instructions path="(.+)">$', re.MULTILINE)  # as an Instruction begins


class FolderInstructions(Hooks):
    """Adds the instruction files of sub-folders to the result of the first `read` there. `known` are those in the prompt; `tell` is
    called once for each that cannot be taken."""

    def __init__(
        self,
        cwd: Path,
        known: Sequence[Instruction] = (),
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.cwd = Path(os.path.realpath(cwd))
        self.prompt = {each.file for each in known}
        self.added: list[Instruction] = []
        self.tell = cache(tell)

    def after_tool_call(self, call: ToolCall, result: ToolResult) -> ToolResult | None:
        if call.name != "read" or result.is_error or not isinstance(result.content, str):
            return None
        try:
            read = real(self.cwd / os.path.expanduser(str((call.arguments or {}).get("path", ""))))
        except ToolError:  # replaced since it was read
            return None
        new = self._add(each for each in self._above(read) if each.file != read)
        return (
            ToolResult("\n\n".join([result.content, *map(str, new)]), details=result.details)
            if new
            else None
        )

    def _above(self, read: Path) -> Iterator[Instruction]:
        """The files of the folders on the way down to one that was read."""
        if not read.is_relative_to(self.cwd):
            return
        for parts in folders_down(read.parent.relative_to(self.cwd)):
            yield from found_in(self.cwd / Path(*parts), self.cwd, "", self.tell)

    def _add(self, found: Iterable[Instruction]) -> list[Instruction]:
        """Those that are new, as far as there is room for them."""
        new: list[Instruction] = []
        for each in found:
            room = MOST - sum(len(other.text) for other in self.added)
            if room > 0 and each.file not in self.prompt | {other.file for other in self.added}:
                new.append(each.cut(room))
                self.added.append(new[-1])
        return new

    def take_up(self, messages: Sequence[Message]) -> None:
        """Go on with this conversation: what has come is what it holds, in results of tools and in notes of ours."""
        self.added.clear()
        for message in messages:
            if message.get("role") == "tool" or message.get("meta", {}).get("attached"):
                named = (
                    self.cwd / path
                    for path in HEAD.findall(text_of(message))
                    if ".." not in path.split("/")
                )
                self._add(each for path in named for each in self._above(path) if each.file == path)

    def notes(self) -> list[Message]:
        """What was added in this way, to be said again where the history is shortened."""
        return [user("\n\n".join(map(str, self.added)))] if self.added else []
