"""MCP: the tools of other programs and sites, from mcp.json in the configuration folder.

    {"mcpServers": {"time": {"command": "uvx", "args": ["mcp-server-time"], "env": {"TZ": "${TZ:-UTC}"}},
                    "docs": {"url": "https://example.com/mcp", "headers": {"X-Key": "${DOCS_KEY}"}}}}

A tool is called `server__tool`. Programs start in that folder, since `npx` and `python -m` run what lies in theirs.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future, wait
from contextlib import AsyncExitStack, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from coder.abort import TICK, Abort
from coder.events import Events, Notice
from coder.extend.mcp_transport import MAX_RESULT, TOO_LONG, bounded, checked, program
from coder.permissions.rules import check_ownership
from coder.tools.files import image_of
from coder.tools.processes import GRACE, marked_environment
from coder.toolset import Tool, ToolContext
from coder.types import T, ToolError, ToolResult

START = 60  # seconds for a server to start; `npx` may download it
CALL = 300  # seconds for a call
MAX_NAME = 64  # characters of a tool's name, by the API
MAX_STDERR = 1_000_000  # bytes that are kept of a program's standard error
MANY = 40_000  # characters of all tools that are sent with each request, above which that is said
REJECTED = {"$schema", "allOf", "anyOf", "enum", "not", "oneOf"}  # by APIs, at the top
to_json = partial(json.dumps, ensure_ascii=False)


def expand(entry: Any) -> Any:
    """Replace `${NAME}` and `${NAME:-default}` in all texts. Raises ValueError for a variable that is not set."""
    known = os.environ | {"PWD": os.getcwd()}

    def value(found: re.Match[str]) -> str:
        if found[1] not in known and found[2] is None:
            raise ValueError(f"the variable {found[1]} is not set")
        return json.dumps(known[found[1]])[1:-1] if found[1] in known else found[2]

    return json.loads(re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", value, json.dumps(entry)))


class Server:
    """One server, in the event loop: its connection and its tools. `problem`: why there is none."""

    def __init__(self, name: str, entry: Any, folder: Path) -> None:
        self.name, self.entry, self.folder = name, entry, folder
        self.client: Any = None  # None: not connected
        self.tools, self.problem = list[Any](), ""
        self.left_out = list[str]()  # tools whose schemas are incomplete
        self._task: asyncio.Task[None] | None = None
        self._stderr: Any = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115

    async def connect(self) -> None:
        """Begin, if that has not begun, and wait until it is connected. Raises ToolError."""
        if not self._task or self._task.done():
            self._task = asyncio.create_task(self._live())
        while not (self.client or self._task.done()):
            await asyncio.sleep(TICK)
        if not self.client:
            raise ToolError(f"the MCP server {self.name} is not available: {self.problem}")

    async def close(self) -> None:
        """End the connection, and the program."""
        if self._task and self._task.cancel():
            await asyncio.wait({self._task})

    async def _live(self) -> None:
        """Connect, list the tools and stay: a connection has to begin and end in the same task."""
        try:
            async with asyncio.timeout(START) as limit, AsyncExitStack() as stack:
                client = await stack.enter_async_context(await self._client(stack))
                page = await client.list_tools()
                tools = page.tools
                while page.next_cursor:
                    page = await client.list_tools(cursor=page.next_cursor)
                    tools += page.tools
                limit.reschedule(None)
                self.tools, self.client, self.problem = tools, client, ""
                while True:  # until `close`
                    if os.fstat(self._stderr.fileno()).st_size > MAX_STDERR:
                        self._clear_stderr()
                    await asyncio.sleep(1)
        except ImportError as error:
            from coder.extend.installed import command_for

            self.problem = f"{error} (fix: {command_for('mcp')})"
        except Exception as error:
            self.problem = self._reason(error)
        finally:
            self.client = None

    async def _client(self, stack: AsyncExitStack) -> Any:
        """The client of a program or an address. Raises ValueError for an entry that has neither."""
        import httpx2
        from mcp import Client, StdioServerParameters
        from mcp.client.streamable_http import streamable_http_client

        entry = expand(self.entry)
        self.left_out.clear()
        if "command" in entry:
            cwd = self.folder / Path(entry.get("cwd", "")).expanduser()
            given = {"env": marked_environment() | entry.get("env", {}), "cwd": cwd}
            transport = program(StdioServerParameters(**entry | given), self._stderr)
            return Client(checked(transport, self.left_out))
        if "url" not in entry or entry.get("type") == "sse":
            raise ValueError("a server needs a command, or a url of streamable HTTP")
        hooks = {"response": [bounded]}
        http = httpx2.AsyncClient(headers=entry.get("headers"), timeout=CALL, event_hooks=hooks)
        await stack.enter_async_context(http)
        site = streamable_http_client(entry["url"], http_client=http, max_sse_event_size=MAX_RESULT)
        return Client(checked(site, self.left_out))

    def _reason(self, error: BaseException) -> str:
        """Why it failed, in one line: the error, and what the program wrote last on stderr."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - 2000))
        last = self._stderr.read(2000).decode("utf-8", "replace").strip().rpartition("\n")[2]
        is_late = isinstance(error, TimeoutError)
        text = f"not ready after {START} s" if is_late else f"{error}" or type(error).__name__
        return " ".join(f"{text}: {last}".split()).removesuffix(":")

    def _clear_stderr(self) -> None:
        self._stderr.truncate(self._stderr.seek(0))  # the position is the program's as well

    async def call(self, tool: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool; a connection that was lost is made anew before. Raises ToolError."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        if not self.client:
            await self.connect()
        self._clear_stderr()
        try:
            return result_of(await self.client.call_tool(tool, arguments, CALL))
        except MCPError as error:
            if TOO_LONG in error.message:
                raise ToolError(TOO_LONG) from None
            if error.code != CONNECTION_CLOSED and error.message != "Session terminated":
                raise ToolError(error.message) from None
            await self.close()
            why = f"the MCP server {self.name} ended: {self._reason(error)}"
            raise ToolError(f"{why}. The next call starts it again.") from None


def result_of(result: Any) -> ToolResult:
    """A CallToolResult as a ToolResult: texts and images; structured content where there is no text."""
    parts = [_part(each.model_dump(by_alias=True, mode="json")) for each in result.content]
    if result.structured_content is not None and not any("text" in part for part in parts):
        parts.append({"type": "text", "text": to_json(result.structured_content)})
    content = "\n".join(p["text"] for p in parts) if all("text" in p for p in parts) else parts
    return ToolResult(content, result.is_error)


def _part(block: dict[str, Any]) -> dict[str, Any]:
    """A content block of the protocol as one of the API."""
    block |= block.get("resource", {})
    kind, data = block.get("mimeType") or block["type"], block.get("data", block.get("blob", ""))
    with suppress(ValueError):
        return image_of(base64.b64decode(data, validate=True))
    other = f"[{kind}, {len(data)} characters, not shown]" if data else f"{block.get('uri')}"
    return {"type": "text", "text": block.get("text", other)}


class Servers:
    """The servers of a file. They start at once; one thread runs the event loop of the package `mcp` for all."""

    def __init__(self, path: Path) -> None:
        self.servers: list[Server] = []
        self._problems = list[str]()
        self._loop = asyncio.new_event_loop()
        try:
            check_ownership(path)
            entries = json.loads(path.read_text("utf-8"))["mcpServers"].items()
            self.servers = [Server(name, entry, path.parent) for name, entry in entries]
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            self._problems = [f"{path} is ignored: {type(error).__name__}: {error}"]
        self._starting = {each: self._submit(each.connect()) for each in self.servers}
        self._are_many_reported = False
        self._deadline = 0.0  # of the wait for them, once it has begun
        for name in ("mcp", "client", "asyncio"):  # what they log would go to stderr
            logging.getLogger(name).addHandler(logging.NullHandler())
        if self.servers:
            threading.Thread(target=self._loop.run_forever, daemon=True, name="mcp").start()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, abort: Abort, seconds: float = START) -> Events[None]:
        """Wait until each server is ready or has failed, `seconds` from the first call on. Raises Aborted.

        A notice, once, for those that have failed, and for those that are late.
        """
        self._deadline = self._deadline or time.monotonic() + seconds
        while wait(self._starting.values(), TICK).not_done and time.monotonic() < self._deadline:
            abort.check()
        problems, self._problems = self._problems, []
        done = [each for each, future in self._starting.items() if future.done()]
        for each in done:
            del self._starting[each]
        failed = [each for each in done if each.problem]
        for problem in dict.fromkeys(each.problem for each in failed):
            names = ", ".join(each.name for each in failed if each.problem == problem)
            problems.append(f"MCP servers left out: {names} ({problem})")
        for each in done:
            if each.left_out and not each.problem:
                names = ", ".join(each.left_out)
                why = "their inputSchema is missing or incomplete"
                problems.append(f"MCP server {each.name}: tools left out: {names} ({why})")
        if self._starting and self._deadline > 0:
            self._deadline = -1.0  # reported; no later call waits
            names = ", ".join(each.name for each in self._starting)
            problems.append(f"MCP servers still starting: {names}. A later prompt has their tools.")
        yield from map(Notice, problems)

    def tools(self) -> list[Tool]:
        """The tools of all servers that are ready, or were."""
        made: dict[str, Tool] = {}
        for server, each in ((s, tool) for s in self.servers for tool in s.tools):
            name = re.sub(r"[^a-zA-Z0-9_-]", "_", f"{server.name}__{each.name}")[:MAX_NAME]
            name = f"{name[: MAX_NAME - 5]}_{len(made):04}" if name in made else name
            text = (each.description or "")[:2_000]  # each request holds it
            schema = {k: v for k, v in each.input_schema.items() if k not in REJECTED}
            call = partial(self._call, server, each.name)
            made[name] = Tool(
                *(name, text, schema, call), title=to_json, is_open=True, permission="mcp"
            )
        return [*made.values()]

    def pending(self) -> list[str]:
        """The servers whose tools no run has yet, each with its state or what went wrong."""
        states = list[str]()
        for each, future in self._starting.items():
            state = each.problem or "ready" if future.done() else "still starting"
            states.append(f"{each.name} ({state})")
        return states

    def check_size(self, tools: Sequence[Tool]) -> Events[None]:
        """A notice, once, if these tools of ours, which each request holds, are long."""
        sizes = dict[str, int]()
        for each in tools:
            server = each.name.partition("__")[0]
            sizes[server] = sizes.get(server, 0) + len(to_json(each.schema))
        total = sum(sizes.values())
        if total <= MANY or self._are_many_reported:
            return
        self._are_many_reported = True
        largest = sorted(sizes.items(), key=lambda item: -item[1])
        servers = ", ".join(f"{name} {size:,}" for name, size in largest)
        yield Notice(
            f"The tools of MCP servers take {total:,} characters of each request: {servers}. "
            f"Deny those that are not needed, as in --deny 'mcp:{largest[0][0]}__*' or in "
            "permissions.json, or take a server out of mcp.json."
        )

    def _call(
        self, server: Server, tool: str, ctx: ToolContext, arguments: dict[str, Any]
    ) -> ToolResult:
        future = self._submit(server.call(tool, arguments))
        try:
            while not wait([future], TICK).done:
                ctx.abort.check()
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """End all of them; what takes longer than GRACE is left to `stop_all`."""
        if self._loop.is_running():
            wait([self._submit(each.close()) for each in self.servers], GRACE)
            self._loop.call_soon_threadsafe(self._loop.stop)


_lock, _start = threading.Lock(), cache(Servers)


def start(path: Path) -> Servers:
    """The servers of this file, which are started once, whoever asks first."""
    with _lock:
        return _start(path)
