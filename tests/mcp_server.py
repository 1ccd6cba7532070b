"""A server of the official package: `python mcp_server.py [fd NUMBER]`; without a word on stdio."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult, Tool


class Odd(MCPServer):
    """Schemas as some servers have them, which OpenAI's API rejects."""

    async def list_tools(self) -> list[Tool]:
        tools = await super().list_tools()
        tools[0].input_schema |= {
            "anyOf": [{"required": ["a"]}],
            "$schema": "x",
        }
        return tools


server = Odd("test")
text = server.tool(structured_output=False)


@server.tool(structured_output=False, description="Add two numbers. " * 1000)
def add(a: int, b: int = 10) -> str:
    return f"{a + b}"


@text
def anything(self: dict[str, Any] | None, ctx: list[Any] | None = None) -> str:
    return f"{self} {ctx}"


@text
def picture() -> list[Any]:
    return ["a picture", Image(data=b"\x89PNG\r\n\x1a\n", format="png")]


@text
def no_picture() -> list[Any]:
    return [Image(data=b"none", format="png")]


@text
def nothing() -> None:
    return None


@server.tool()
def facts(variable: str) -> CallToolResult:
    """Structured content without a text."""
    facts = {"variable": os.environ.get(variable), "folder": os.getcwd()}
    return CallToolResult(content=[], structured_content=facts)


@text
def header(name: str, context: Context) -> str:
    return (context.headers or {}).get(name, "none")


@text
def fail() -> str:
    raise ToolError("no such cheese")


@text
def chat(file: str) -> None:
    """Write much to stderr; the file is made when that has been emptied."""

    def note() -> None:
        while os.fstat(2).st_size > 1_000_000:
            time.sleep(0.05)
        Path(file).touch()

    os.write(2, b"x" * 3_000_000)
    threading.Thread(target=note, daemon=True).start()


@text
async def wait(file: str) -> None:
    """Wait until the call is cancelled; the file holds how far it is."""
    Path(file).write_text("called")
    try:
        await asyncio.sleep(60)
    finally:
        Path(file).write_text("cancelled")


for name in ("a strange.name/ü", "n" * 80 + "1", "n" * 80 + "2"):
    server.tool(name, structured_output=False)(lambda name=name: name[-1])

if __name__ == "__main__":
    match sys.argv[1:]:
        case ["fd", number]:
            import uvicorn

            uvicorn.run(server.streamable_http_app(), fd=int(number), log_level="error")
        case _:
            server.run()
