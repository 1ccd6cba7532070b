"""MCP: the tools of other programs and sites, from mcp.json in the configuration folder.

    {"mcpServers": {
        "time": {"command": "uvx", "args": ["mcp-server-time"], "env": {"TZ": "${TZ:-UTC}"}},
        "docs": {"url": "https://example.com/mcp", "headers": {"X-Key": "${DOCS_KEY}"}}}}

A tool is called `server__tool`. Programs start in that folder, since `npx` and `python -m` run what
they find in their working directory.
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
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AsyncExitStack, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from coder.abort import TICK, Abort
from coder.events import Events, Notice
from coder.extend.mcp_transport import MAX_RESULT, TOO_LONG, bounded, checked, program
from coder.permissions.ownership import check_ownership
from coder.tools.files import image_of
from coder.tools.processes import GRACE, marked_environment
from coder.toolset import Tool, ToolContext
from coder.types import T, ToolError, ToolResult

START = 60  # seconds for a server to start; `npx` may download it
CALL = 300  # seconds for a call
MAX_NAME = 64  # characters of a tool's name, by the API
UNKNOWN_IN_NAMES = r"[^a-zA-Z0-9_-]"
MAX_STDERR = 1_000_000  # bytes that are kept of a program's standard error
MANY = 40_000  # characters of all tools, which each request sends; above it, a notice says so
VARIABLE = r"\$\{(\w+)(?::-([^}]*))?\}"  # ${NAME} and ${NAME:-default}
REJECTED = {"$schema", "allOf", "anyOf", "enum", "not", "oneOf"}  # by APIs, at the top
to_json = partial(json.dumps, ensure_ascii=False)


def expand(entry: Any, cwd: Path) -> Any:
    """Replace `${NAME}` and `${NAME:-default}` in all texts.

    Raises ValueError for a variable that is not set.
    """
    values = os.environ | {"PWD": str(cwd)}

    def value_of(variable: re.Match[str]) -> str:
        name, default = variable.groups()
        if name in values:
            return json.dumps(values[name])[1:-1]  # inside the quotes of a JSON text
        if default is None:
            raise ValueError(f"the variable {name} is not set")
        return default

    return json.loads(re.sub(VARIABLE, value_of, json.dumps(entry)))


class Server:
    """One server, in the event loop: its connection and its tools. `problem`: why there is none."""

    def __init__(
        self,
        name: str,
        entry: Any,
        folder: Path,
        cwd: Path,
    ) -> None:
        self.name = name
        self.entry = entry
        self.folder = folder
        self.cwd = cwd
        self.client: Any = None  # None: not connected
        self.tools: list[Any] = []
        self.problem = ""
        self.left_out: list[str] = []  # tools whose schemas are incomplete
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
                self.tools = tools
                self.problem = ""
                self.client = client
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
        """The client of a program or an address. Raises ValueError if the entry has neither."""
        import httpx2
        from mcp import Client, StdioServerParameters
        from mcp.client.streamable_http import streamable_http_client

        entry = expand(self.entry, self.cwd)
        self.left_out.clear()
        if "command" in entry:
            start = entry | {
                "cwd": self.folder / Path(entry.get("cwd", "")).expanduser(),
                "env": marked_environment() | entry.get("env", {}),
            }
            transport: Any = program(StdioServerParameters(**start), self._stderr)
        elif "url" in entry and entry.get("type") != "sse":
            http = httpx2.AsyncClient(
                headers=entry.get("headers"),
                timeout=CALL,
                event_hooks={"response": [bounded]},
            )
            await stack.enter_async_context(http)
            transport = streamable_http_client(
                entry["url"],
                http_client=http,
                max_sse_event_size=MAX_RESULT,
            )
        else:
            raise ValueError("a server needs a command, or a url of streamable HTTP")
        return Client(checked(transport, self.left_out))

    def _reason(self, error: BaseException) -> str:
        """Why it failed, in one line: the error, and what the program wrote last on stderr."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - 2000))
        written = self._stderr.read(2000).decode("utf-8", "replace")
        last = written.strip().rpartition("\n")[2]
        if isinstance(error, TimeoutError):
            text = f"not ready after {START} s"
        else:
            text = str(error) or type(error).__name__
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
            has_ended = error.code == CONNECTION_CLOSED or error.message == "Session terminated"
            if not has_ended:
                raise ToolError(error.message) from None
            await self.close()
            raise ToolError(
                f"the MCP server {self.name} ended: {self._reason(error)}. "
                "The next call starts it again."
            ) from None


def result_of(result: Any) -> ToolResult:
    """A CallToolResult as a ToolResult: texts and images, else its structured content."""
    parts = [_part(block.model_dump(by_alias=True, mode="json")) for block in result.content]
    texts = [part["text"] for part in parts if "text" in part]
    if result.structured_content is not None and not texts:
        text = to_json(result.structured_content)
        texts.append(text)
        parts.append({"type": "text", "text": text})
    if len(texts) == len(parts):
        return ToolResult("\n".join(texts), result.is_error)
    return ToolResult(parts, result.is_error)


def _part(block: dict[str, Any]) -> dict[str, Any]:
    """A content block of the protocol as one of the API."""
    block |= block.get("resource", {})
    data = block.get("data", block.get("blob", ""))
    with suppress(ValueError):
        return image_of(base64.b64decode(data, validate=True))
    if "text" in block:
        text = block["text"]
    elif data:
        kind = block.get("mimeType") or block["type"]
        text = f"[{kind}, {len(data)} characters, not shown]"
    else:
        text = str(block.get("uri"))
    return {"type": "text", "text": text}


class Servers:
    """The servers of a file, for a session in `cwd` (or the present folder), and `more` of the
    program's own.

    They start at once; one thread runs the event loop of the package `mcp` for all.
    """

    def __init__(
        self,
        path: Path,
        cwd: Path | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        self.servers: list[Server] = []
        self._problems: list[str] = []
        self._loop = asyncio.new_event_loop()
        cwd = cwd or Path.cwd()
        entries = dict(more or {})
        try:
            if path.exists() or not more:
                check_ownership(path)
                entries = dict(json.loads(path.read_text("utf-8"))["mcpServers"]) | entries
        except (OSError, ValueError, LookupError, TypeError) as error:
            self._problems = [f"{path} is ignored: {type(error).__name__}: {error}"]
        for name, entry in entries.items():
            server = Server(name, entry, folder=path.parent, cwd=cwd)
            self.servers.append(server)
        self._starting = {server: self._submit(server.connect()) for server in self.servers}
        self._are_many_reported = False
        self._are_late_reported = False
        self._deadline = 0.0  # of the wait for them, once it has begun
        for name in ("mcp", "client", "asyncio"):  # what they log would go to stderr
            logging.getLogger(name).addHandler(logging.NullHandler())
        if self.servers:
            threading.Thread(target=self._loop.run_forever, daemon=True, name="mcp").start()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, abort: Abort, seconds: float = START) -> Events[None]:
        """Wait until each server is ready or has failed, `seconds` from the first call on. Raises
        Aborted.

        A notice, once, for those that have failed, and for those that are late.
        """
        if not self._deadline:
            self._deadline = time.monotonic() + seconds
        while wait(self._starting.values(), TICK).not_done and time.monotonic() < self._deadline:
            abort.check()
        for problem in self._take_problems():
            yield Notice(problem)
        if self._starting and not self._are_late_reported:
            self._are_late_reported = True
            names = ", ".join(server.name for server in self._starting)
            yield Notice(f"MCP servers still starting: {names}. A later prompt has their tools.")

    def _take_problems(self) -> list[str]:
        """What is wrong with the file, and with the servers that are ready or have failed; once."""
        done = [server for server, future in self._starting.items() if future.done()]
        for server in done:
            del self._starting[server]
        problems = self._problems + _problems_of(done)
        self._problems = []
        return problems

    def tools(self) -> list[Tool]:
        """The tools of all servers that are ready, or were."""
        tools: dict[str, Tool] = {}
        for server in self.servers:
            for offered in server.tools:
                name = f"{server.name}__{offered.name}"
                name = re.sub(UNKNOWN_IN_NAMES, "_", name)[:MAX_NAME]
                if name in tools:  # another name that is the same in these characters
                    name = f"{name[: MAX_NAME - 5]}_{len(tools):04}"
                schema = offered.input_schema
                tools[name] = Tool(
                    name=name,
                    description=(offered.description or "")[:2_000],  # each request holds it
                    parameters={key: schema[key] for key in schema if key not in REJECTED},
                    function=partial(self._call, server, offered.name),
                    title=to_json,
                    is_open=True,
                    permission="mcp",
                )
        return list(tools.values())

    def pending(self) -> list[str]:
        """The servers whose tools no run has yet, each with its state or what went wrong."""
        states = []
        for server, future in self._starting.items():
            state = "still starting"
            if future.done():
                state = server.problem or "ready"
            states.append(f"{server.name} ({state})")
        return states

    def check_size(self, tools: Sequence[Tool]) -> Events[None]:
        """A notice, once, if these tools of the servers, which each request holds, are long."""
        sizes: Counter[str] = Counter()
        for tool in tools:
            server = tool.name.partition("__")[0]
            sizes[server] += len(to_json(tool.schema))
        total = sizes.total()
        if total <= MANY or self._are_many_reported:
            return
        self._are_many_reported = True
        largest = sizes.most_common()
        servers = ", ".join(f"{name} {size:,}" for name, size in largest)
        yield Notice(
            f"The tools of MCP servers take {total:,} characters of each request: {servers}. "
            f"Deny those that are not needed, as in --deny 'mcp:{largest[0][0]}__*' or in "
            "permissions.json, or take a server out of mcp.json."
        )

    def _call(
        self,
        server: Server,
        tool: str,
        ctx: ToolContext,
        arguments: dict[str, Any],
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
        servers = self.servers
        self.servers = []  # it may be called twice
        if servers and self._loop.is_running():
            wait([self._submit(server.close()) for server in servers], GRACE)
            self._loop.call_soon_threadsafe(self._loop.stop)


def _problems_of(servers: list[Server]) -> list[str]:
    """A sentence for each problem of these servers, with all that share it."""
    names_by_problem: dict[str, list[str]] = {}
    sentences = []
    for server in servers:
        if server.problem:
            names_by_problem.setdefault(server.problem, []).append(server.name)
        elif server.left_out:
            names = ", ".join(server.left_out)
            sentences.append(
                f"MCP server {server.name}: tools left out: {names} "
                "(their inputSchema is missing or incomplete)"
            )
    for problem, failed in names_by_problem.items():
        sentences.append(f"MCP servers left out: {', '.join(failed)} ({problem})")
    return sentences


_lock = threading.Lock()
_start = cache(Servers)


def start(path: Path, cwd: Path | None = None) -> Servers:
    """The servers of this file for this folder, which are started once, whoever asks first."""
    with _lock:
        return _start(path, cwd)
