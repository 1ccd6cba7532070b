"""What the user has not saved yet: texts of files in an editor that offers its file system."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Coroutine
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import acp

from coder.abort import TICK, Abort
from coder.hooks import Hooks
from coder.toolset import ToolContext
from coder.types import ToolCall, ToolError


class Buffers(Hooks):
    """Gives each call the editor. The calls run in threads, the connection in `loop`."""

    session_id = ""  # set once it is known

    def __init__(self, client: acp.Client, loop: asyncio.AbstractEventLoop) -> None:
        self.client = client
        self.loop = loop

    def before_tool_call(self, call: ToolCall, ctx: ToolContext) -> None:
        ctx.editor = OpenFiles(self, ctx.abort)


class OpenFiles:
    """The files in the editor, for one call (an Editor of tools/text.py)."""

    def __init__(self, buffers: Buffers, abort: Abort) -> None:
        self.buffers = buffers
        self.abort = abort
        self.texts: dict[Path, str] = {}  # that are not saved

    def unsaved(self, path: Path, saved: bytes) -> bytes | None:
        try:
            on_disk = saved.removeprefix(codecs.BOM_UTF8).decode()
            text = self._read(path)
        except (UnicodeDecodeError, ToolError):  # another encoding, or not a file of the editor's
            return None
        if _plain(text) == _plain(on_disk):
            return None
        self.texts[path] = text
        return text.encode()

    def write(self, path: Path, data: bytes) -> bool:
        if path not in self.texts:
            return False
        if self._read(path) != self.texts.pop(path):
            raise ToolError(
                f"{path.name} was changed in the editor meanwhile. Read it again first."
            )
        client = self.buffers.client
        session = self.buffers.session_id
        self._wait_for(
            client.write_text_file(
                session,
                str(path),
                data.decode(),
            )
        )
        return True

    def _read(self, path: Path) -> str:
        client = self.buffers.client
        session = self.buffers.session_id
        response = self._wait_for(client.read_text_file(session, str(path)))
        return str(response.content)

    def _wait_for(self, request: Coroutine[Any, Any, Any]) -> Any:
        """The editor's answer. Raises Aborted, and ToolError for its error."""
        future = asyncio.run_coroutine_threadsafe(request, self.buffers.loop)
        try:
            while not wait([future], TICK).done:
                self.abort.check()
            return future.result()
        except (acp.RequestError, ConnectionError) as error:
            raise ToolError(f"the editor reports an error: {error}") from None
        finally:
            future.cancel()


def _plain(text: str) -> str:
    """A text whatever its line ends are, which an editor may keep apart from it."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n")
