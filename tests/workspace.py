"""A folder, a session in it, and what its tools asked for and told."""

from __future__ import annotations

import contextlib
import os
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coder.abort import Abort
from coder.events import Event, Returning
from coder.tools.edit import edit
from coder.tools.files import ls, read, write
from coder.tools.patch import apply_patch
from coder.toolset import ToolContext, Toolset
from coder.types import ToolCall, ToolResult


class Workspace:
    """`when_asked` is called at each question; it allows the call, or raises DeniedError."""

    def __init__(self, folder: Path, *tools: Any) -> None:
        self.folder = folder
        self.tools = Toolset(
            tools or [read, write, edit, ls, apply_patch],
            cwd=folder,
        )
        self.abort = Abort()
        self.events: list[Event] = []
        self.each: Callable[[Event], object] = self.events.append
        self.asked: list[tuple[str, str]] = []
        self.details: list[str] = []
        self.when_asked: Callable[[], object] = lambda: None

    def authorize(
        self, ctx: ToolContext, permission: str, patterns: Sequence[str], detail: str
    ) -> None:
        self.asked.append((permission, ", ".join(patterns)))
        self.details.append(detail)
        self.when_asked()

    def run(self, call: ToolCall) -> ToolResult:
        ctx = ToolContext(
            self.tools.cwd,
            self.abort,
            call_id=call.id,
            seen=self.tools.seen,
        )
        ctx.authorize = self.authorize
        with Returning(self.tools.run(call, ctx)) as events:
            for event in events:
                self.each(event)
        assert isinstance(events.value.content, str | list)
        return events.value

    def call(self, name: str, **arguments: Any) -> ToolResult:
        return self.run(ToolCall("call-1", name, arguments))

    def __call__(self, name: str, **arguments: Any) -> str:
        """The text of a call that works."""
        result = self.call(name, **arguments)
        assert not result.is_error, result.content
        return str(result.content)

    def fails(self, name: str, **arguments: Any) -> str:
        """The text of a call that does not."""
        result = self.call(name, **arguments)
        assert result.is_error, result.content
        return str(result.content)

    def put(self, files: Mapping[str, str | bytes], **links: str) -> Path:
        """Files with their contents, links (`_` stands for -) with their targets. Returns the
        folder."""
        return tree(
            self.folder,
            files,
            {name.replace("_", "-"): to for name, to in links.items()},
        )

    def names(self) -> list[str]:
        return sorted(os.listdir(self.folder))

    def files(self) -> dict[str, tuple[int, object]]:
        """All there is under the folder: names, modes, and contents or link targets."""
        return {
            str(path.relative_to(self.folder)): (
                path.lstat().st_mode,
                held_by(path),
            )
            for path in self.folder.rglob("*")
        }


def tree(
    folder: Path, files: Mapping[str, str | bytes], links: Mapping[str, str] | None = None
) -> Path:
    """Files with their contents, empty folders (the name ends in /), links with their targets."""
    for name, content in files.items():
        path = folder / name
        (path if name.endswith("/") else path.parent).mkdir(
            parents=True,
            exist_ok=True,
        )
        if not name.endswith("/"):
            path.write_bytes(content.encode() if isinstance(content, str) else content)
    for name, target in (links or {}).items():
        (folder / name).symlink_to(target)
    return folder


def held_by(path: Path) -> str | bytes | None:
    """A link's target, a file's contents, nothing of a folder."""
    if path.is_symlink():
        return os.readlink(path)
    return path.read_bytes() if path.is_file() else None


@contextlib.contextmanager
def in_little_memory() -> Iterator[None]:
    """What is done in it needs less than 8 MB at any time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def patch_of(*sections: str) -> dict[str, str]:
    """The call that applies them."""
    body = "\n".join(each.strip("\n") for each in sections)
    return {"name": "apply_patch", "patch": f"*** Begin Patch\n{body}\n*** End Patch"}
