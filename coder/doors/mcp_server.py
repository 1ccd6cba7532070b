"""`coder mcp-server`: the agent as one tool for an MCP client, over standard input and output."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from anyio import CancelScope
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel

from coder.events import PermissionAsked, RunEnd, ToolStart
from coder.questions import question_in
from coder.session import Session
from coder.types import CoderError

server = MCPServer("coder")
RULES = {"ask_user": "deny", "doom_loop": "deny"}  # permissions alone are asked for


class Form(BaseModel):
    allow: bool


@server.tool()
async def code(prompt: str, cwd: str, ctx: Context) -> str:
    """Let a coding agent do a task in a folder of this machine; returns what it says at its end."""
    can_ask = bool(ctx.client_capabilities and ctx.client_capabilities.elicitation)
    # In threads: other calls go on. Not cancelled: what is opened has to be closed
    opening = asyncio.to_thread(Session.open, cwd, ask=can_ask, one_task=True, rules=RULES)
    try:
        with CancelScope(shield=True):
            session = await opening
    except CoderError as error:
        raise ToolError(str(error)) from None  # any other exception hides its text
    calls = 0
    text = ""
    try:
        async with aclosing(session.aprompt(prompt)) as events:
            async for event in events:
                asked = question_in(event)
                if isinstance(asked, PermissionAsked):
                    about = f"{asked.permission}: {asked.pattern}\n{asked.detail}"
                    form = await ctx.elicit(about, Form)
                    is_allowed = form.action == "accept" and form.data.allow
                    session.answer(asked.id, "once" if is_allowed else "no")
                if isinstance(event, ToolStart):
                    calls += 1
                    await ctx.report_progress(calls, message=event.title)
                if isinstance(event, RunEnd):
                    text = event.text
    finally:
        with CancelScope(shield=True):
            await asyncio.to_thread(session.close)
    return text
