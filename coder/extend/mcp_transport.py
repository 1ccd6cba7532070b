"""What an MCP server sends, before the package `mcp` reads it: bounded, and without tools that it
would refuse.

A result of 100 MB must cost neither the memory nor the connection, and one bad tool not the other
tools of its page. The package's own stdio transport has no bound, and joins the pieces of a line in
quadratic time.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from coder.tools.processes import signal_group

MAX_RESULT = 16_000_000  # bytes of a message; a picture may have some MB
TOO_LONG = f"the result was over {MAX_RESULT // 1_000_000} MB and is left out; ask for less of it"
END = 2  # seconds for a program to end when its input is closed, and again after SIGTERM
TICK = 0.01  # seconds between looks at a program that ends

# The id of a response. In whatever order its three members are, it is next to one end of it
_RPC = rb'"jsonrpc"\s*:\s*"2\.0"\s*'
FIRST_ID = rb'\s*\{\s*(?:%s,\s*)?"id"\s*:\s*(\d+)\b(?!\s*,\s*"method")' % _RPC
LAST_ID = rb'"id"\s*:\s*(\d+)\s*(?:,\s*%s)?\}\s*$' % _RPC


class Checked:
    """The messages of a stream. `left_out` gets the names of incomplete tools."""

    def __init__(self, messages: Any, left_out: list[str]) -> None:
        self._messages = messages
        self._left_out = left_out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._messages, name)  # `last_context` and others

    async def __aenter__(self) -> Checked:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._messages.aclose()

    def __aiter__(self) -> Checked:
        return self

    async def __anext__(self) -> Any:
        item = await anext(self._messages)
        message = getattr(item, "message", None)
        result = getattr(message, "result", None)
        if isinstance(result, dict) and isinstance(result.get("tools"), list):
            result["tools"] = self._complete_tools(result["tools"])
        return item

    def _complete_tools(self, tools: list[Any]) -> list[Any]:
        complete = []
        for tool in tools:
            if is_complete(tool):
                complete.append(tool)
            else:
                name = tool.get("name") if isinstance(tool, dict) else tool
                self._left_out.append(str(name))
        return complete


def is_complete(tool: Any) -> bool:
    """Does the package take a page with this tool? If not, it refuses the whole page."""
    from mcp_types import Tool
    from mcp_types.methods import validate_server_result
    from mcp_types.version import LATEST_HANDSHAKE_VERSION

    try:
        validate_server_result("tools/list", LATEST_HANDSHAKE_VERSION, {"tools": [tool]})
        Tool.model_validate(tool, by_name=False)
    except ValueError:
        return False
    return True


@asynccontextmanager
async def checked(transport: Any, left_out: list[str]) -> AsyncIterator[Any]:
    """A transport whose messages are checked."""
    async with transport as (messages, output):
        yield Checked(messages, left_out), output


# ---- programs ------------------------------------------------------------------------------------


@asynccontextmanager
async def program(parameters: Any, stderr: Any) -> AsyncIterator[Any]:
    """The transport of a program, with StdioServerParameters: a line is a message.

    Raises OSError and ValueError.
    """
    process = await asyncio.create_subprocess_exec(
        parameters.command,
        *parameters.args,
        env=parameters.env,
        cwd=parameters.cwd,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
        limit=MAX_RESULT,
        start_new_session=True,
    )
    assert process.stdin and process.stdout
    try:
        yield _messages(process.stdout), _Input(process)
    finally:
        process.stdin.close()
        await _end(process)


async def _messages(output: asyncio.StreamReader) -> AsyncIterator[Any]:
    """The messages of a program. One that is too long becomes an error for its request."""
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    skipped = b""  # the last bytes so far of a line that is too long
    while True:
        try:
            line = await output.readuntil(b"\n")
        except asyncio.IncompleteReadError:  # the end
            return
        except asyncio.LimitOverrunError as error:
            part = await output.readexactly(error.consumed)
            answered = None if skipped else re.match(FIRST_ID, part)
            if answered:  # at once: the line may never end
                yield SessionMessage(_too_long(answered[1]))
            skipped = part[-200:]
            continue
        if not skipped:
            with suppress(ValueError):  # a line that is no message is not for us
                yield SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
            continue
        answered = re.search(LAST_ID, skipped + line[-200:])
        if answered:
            yield SessionMessage(_too_long(answered[1]))
        skipped = b""


def _too_long(request: bytes) -> Any:
    """The answer to the request with this number."""
    from mcp_types import INTERNAL_ERROR, ErrorData, JSONRPCError

    return JSONRPCError(
        jsonrpc="2.0", id=int(request), error=ErrorData(code=INTERNAL_ERROR, message=TOO_LONG)
    )


class _Input:
    """The stream into a program, as the package writes it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def __aenter__(self) -> _Input:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Nothing: `program` closes it."""

    async def send(self, item: Any) -> None:
        """Write a message. A program that takes none is ended, and with its output all calls."""
        text = item.message.model_dump_json(by_alias=True, exclude_unset=True)
        assert self._process.stdin
        try:
            self._process.stdin.write(f"{text}\n".encode())
            await self._process.stdin.drain()
        except OSError:
            signal_group(self._process.pid, signal.SIGKILL)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Wait until a program without input ends; then end its group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if await _has_ended(process):
            return
        signal_group(process.pid, number)
    await _has_ended(process)


async def _has_ended(process: asyncio.subprocess.Process) -> bool:
    """Wait END seconds for it. Not by `wait`, which waits for the program's children as well."""
    deadline = asyncio.get_running_loop().time() + END
    while process.returncode is None and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(TICK)
    return process.returncode is not None


# ---- addresses -----------------------------------------------------------------------------------


async def bounded(response: Any) -> None:
    """Bound the bytes of a response to a request, unpacked; a hook for the client.

    Reading more raises an error of httpx2.
    """
    import httpx2

    if response.request.method != "POST":  # the stream of a server's own messages, which stays
        return
    # The two errors that the package takes for the end of this response only
    is_events = "event-stream" in response.headers.get("content-type", "")
    kind = httpx2.SSEError if is_events else httpx2.StreamError
    whole = httpx2.Response(200, headers=response.headers, stream=response.stream)

    class Bounded(httpx2.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for piece in whole.aiter_bytes():
                size += len(piece)
                if size > MAX_RESULT:
                    raise kind(TOO_LONG)
                yield piece

        async def aclose(self) -> None:
            await whole.aclose()

    response.headers.pop("content-encoding", None)  # `whole` unpacks it
    response.stream = Bounded()
