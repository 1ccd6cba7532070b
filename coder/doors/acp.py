"""`coder acp`: the agent in an editor that speaks the Agent Client Protocol, on standard streams.

One process, one connection, any number of sessions in any folders. Read acp_talk.py next: what an
editor sees of one session. acp_updates.py makes updates of events, acp_commands.py has the slash
commands, acp_buffers.py the editor's unsaved texts.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import acp
from acp import schema

from coder import __version__
from coder.doors.acp_buffers import Buffers
from coder.doors.acp_talk import Talk
from coder.session import Session
from coder.settings import ConfigError, config_folder, data_folder, needed
from coder.tools.processes import adopt_orphans
from coder.types import CoderError

REFUSED = -32602  # the codes of errors
NOT_FOUND = -32002
LINE = 50_000_000  # bytes of a message that are read at once: a prompt may have images
CAPABILITIES = schema.AgentCapabilities(
    load_session=True,
    prompt_capabilities=schema.PromptCapabilities(image=True, embedded_context=True),
    mcp_capabilities=schema.McpCapabilities(http=True),
    session_capabilities=schema.SessionCapabilities(
        list=schema.SessionListCapabilities(),
        close=schema.SessionCloseCapabilities(),
    ),
)


@contextmanager
def in_one_line(code: int = REFUSED) -> Iterator[None]:
    """Report what is wrong with a request as an error of it."""
    try:
        yield
    except (CoderError, ConfigError) as error:
        raise acp.RequestError(code, str(error)) from None


class Door:
    """What an editor can ask for; each method answers a request of the protocol."""

    client: acp.Client

    def __init__(self) -> None:
        self.talks: dict[str, Talk] = {}
        self.has_files = False  # the editor lets others read and write its texts

    def on_connect(self, conn: acp.Client) -> None:
        self.client = conn

    async def initialize(
        self,
        protocol_version: int,
        client_capabilities: schema.ClientCapabilities | None = None,
        **_: Any,
    ) -> acp.InitializeResponse:
        ours = acp.PROTOCOL_VERSION
        if protocol_version < ours:
            theirs = f"the editor speaks version {protocol_version} of the protocol"
            raise acp.RequestError(REFUSED, f"{theirs}, coder speaks {ours}: update the editor")
        files = client_capabilities.fs if client_capabilities else None
        if files:
            self.has_files = bool(files.read_text_file and files.write_text_file)
        return acp.InitializeResponse(
            protocol_version=ours,
            agent_info=schema.Implementation(name="coder", version=__version__),
            agent_capabilities=CAPABILITIES,
        )

    # -- sessions

    async def new_session(
        self, cwd: str, mcp_servers: Sequence[Any] | None = None, **_: Any
    ) -> acp.NewSessionResponse:
        talk = await self._open(cwd, mcp_servers)
        return acp.NewSessionResponse(session_id=talk.session.id, modes=talk.modes)

    async def load_session(
        self,
        cwd: str,
        session_id: str,
        mcp_servers: Sequence[Any] | None = None,
        **_: Any,
    ) -> acp.LoadSessionResponse:
        await self.close_session(session_id)
        with in_one_line(NOT_FOUND):
            await asyncio.to_thread(check_kept, session_id)
        talk = await self._open(cwd, mcp_servers, resume=session_id)
        session = talk.session
        for update in talk.updates.replay(
            session.messages,
            session.agent.state.tools,
        ):
            await talk.send(update)
        return acp.LoadSessionResponse(modes=talk.modes)

    async def _open(self, cwd: str, servers: Sequence[Any] | None, resume: str = "") -> Talk:
        hooks: list[Buffers] = []
        if self.has_files:
            hooks.append(Buffers(self.client, asyncio.get_running_loop()))
        with in_one_line():
            session = await asyncio.to_thread(open_session, cwd, resume, servers, hooks)
        for buffers in hooks:
            buffers.session_id = session.id
        talk = Talk(session, self.client)
        self.talks[session.id] = talk
        # It comes after the response, with which the editor gets the id
        talk.listing = asyncio.create_task(talk.list_commands())
        return talk

    async def list_sessions(self, cwd: str | None = None, **_: Any) -> schema.ListSessionsResponse:
        with in_one_line():
            found = await asyncio.to_thread(kept_sessions, cwd)
        return schema.ListSessionsResponse(sessions=found)

    async def close_session(self, session_id: str, **_: Any) -> schema.CloseSessionResponse:
        talk = self.talks.pop(session_id, None)
        if talk:
            talk.cancel()
            await asyncio.to_thread(talk.session.close)
        return schema.CloseSessionResponse()

    async def close(self) -> None:
        """End all runs and sessions."""
        closing = [self.close_session(session_id) for session_id in list(self.talks)]
        await asyncio.gather(*closing)

    # -- turns

    def _talk(self, session_id: str) -> Talk:
        if session_id not in self.talks:
            raise acp.RequestError(NOT_FOUND, f"there is no open session {session_id}")
        return self.talks[session_id]

    async def prompt(self, session_id: str, prompt: Sequence[Any], **_: Any) -> acp.PromptResponse:
        talk = self._talk(session_id)
        with in_one_line():
            stop_reason = await talk.prompt(prompt)
        return acp.PromptResponse(stop_reason=stop_reason)

    async def cancel(self, session_id: str, **_: Any) -> None:
        if session_id in self.talks:
            self.talks[session_id].cancel()

    async def set_session_mode(
        self, session_id: str, mode_id: str, **_: Any
    ) -> acp.SetSessionModeResponse:
        talk = self._talk(session_id)
        with in_one_line():
            talk.set_mode(mode_id)
        return acp.SetSessionModeResponse()


# ---- in threads ----------------------------------------------------------------------------------


def open_session(
    cwd: str, resume: str, servers: Sequence[Any] | None, hooks: Sequence[Buffers]
) -> Session:
    """A session for the editor, with the MCP servers that it names. Raises CoderError."""
    started = None
    if servers:
        module = needed("coder.extend.mcp", "an MCP server")
        more = {server.name: entry_of(server) for server in servers}
        started = module.Servers(config_folder() / "mcp.json", Path(cwd), more)
    try:
        return Session.open(cwd, resume=resume, hooks=hooks, servers=started)
    except CoderError:
        if started:
            started.close()
        raise


def entry_of(server: Any) -> dict[str, Any]:
    """An MCP server of the editor's as one of mcp.json."""
    if isinstance(server, schema.McpServerStdio):
        variables = {variable.name: variable.value for variable in server.env}
        return {"command": server.command, "args": server.args, "env": variables}
    if not isinstance(server, schema.HttpMcpServer):
        return {}  # of a kind that is not offered: a notice says so
    headers = {header.name: header.value for header in server.headers}
    return {"url": server.url, "headers": headers}


def open_store() -> Any:
    """The conversations of the user, in a `with`. Raises StoreError."""
    module = needed("coder.sessions.store", "a kept session")
    return module.Store(data_folder() / module.FILE)


def check_kept(session_id: str) -> None:
    """Raises StoreError for a conversation that is not there."""
    with open_store() as store:
        store.get(session_id)


def kept_sessions(cwd: str | None) -> list[schema.SessionInfo]:
    """The conversations of a folder, or all. Raises StoreError."""
    with open_store() as store:
        found = store.sessions(cwd)
    listed: list[schema.SessionInfo] = []
    for info in found:
        updated = datetime.fromtimestamp(info.updated / 1000, UTC)
        listed.append(
            schema.SessionInfo(
                session_id=info.id,
                cwd=info.directory,
                title=info.title or info.first,
                updated_at=updated.isoformat(),
            )
        )
    return listed


# ---- the process ---------------------------------------------------------------------------------


def main() -> None:
    """Serve the editor until it closes standard input."""
    adopt_orphans()
    asyncio.run(serve())


async def serve() -> None:
    # Whatever else writes to standard output would break the protocol: it goes to standard error
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with redirect_stdout(output):  # type: ignore[type-var]
        reader, writer = await acp.stdio_streams(limit=LINE)
    door = Door()
    try:
        agent = cast(acp.Agent, door)  # it has none of the optional methods
        await acp.run_agent(agent, Frames(reader, writer), use_unstable_protocol=True)
    finally:
        await door.close()


class Frames:
    """The messages of the connection, one a line. What is none gets an error: the reader of the
    package would end, and with it all runs."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, message: dict[str, Any]) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")
        await self.writer.drain()

    async def receive(self) -> dict[str, Any] | None:
        """The next message; None at the end."""
        while True:
            try:
                line = await self.reader.readline()
                if not line:
                    return None
                message = json.loads(line)
                if isinstance(message, dict) and not isinstance(message.get("id"), dict | list):
                    return message
                problem = acp.RequestError.invalid_request()
            except (ValueError, RecursionError):  # no JSON, or longer than LINE
                problem = acp.RequestError.parse_error()
            refusal = {
                "jsonrpc": "2.0",
                "id": None,
                "error": problem.to_error_obj(),
            }
            await self.send(refusal)

    async def close(self) -> None:
        self.writer.close()
