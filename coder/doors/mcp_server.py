"""`coder mcp-server`: the agent as one tool for an MCP client, over standard input and output."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel

from coder.events import PermissionAsked, Question, QuestionAsked, RunEnd, ToolStart
from coder.questions import question_in
from coder.session import Session
from coder.types import CoderError

server = MCPServer("coder")


class Permission(BaseModel):
    allow: bool


class Words(BaseModel):
    answer: str


@server.tool()
async def code(prompt: str, cwd: str, ctx: Context) -> str:
    """Let a coding agent do a task in a folder of this machine; returns what it says at its end."""
    can_ask = bool(ctx.client_capabilities and ctx.client_capabilities.elicitation)
    try:
        session = await asyncio.to_thread(Session.open, cwd, ask=can_ask, one_task=True)
    except CoderError as error:
        raise ToolError(str(error)) from None  # any other exception hides its text
    calls = 0
    text = ""
    try:
        async with aclosing(session.aprompt(prompt)) as events:
            async for event in events:
                question = question_in(event)
                if question and can_ask:
                    session.answer(question.id, await answer_of(question, ctx))
                if isinstance(event, ToolStart):
                    calls += 1
                    await ctx.report_progress(calls, message=event.title)
                if isinstance(event, RunEnd):
                    text = event.text
    finally:
        await asyncio.to_thread(session.close)
    return text


async def answer_of(question: Question, ctx: Context) -> str:
    """The user's answer, by the client's form; no if it was declined."""
    if isinstance(question, QuestionAsked):
        words = await ctx.elicit("\n- ".join([question.question, *question.options]), Words)
        return words.data.answer if words.action == "accept" else ""
    if isinstance(question, PermissionAsked):
        about = f"{question.permission}: {question.pattern}\n{question.detail}"
    else:
        about = f"{question.name} with the same arguments, {question.count} times in a row"
    allowed = await ctx.elicit(about, Permission)
    return "once" if allowed.action == "accept" and allowed.data.allow else "no"


def main() -> None:
    server.run("stdio")
