"""An editor for the tests of `coder acp`: a client of the official package, and the program that it
starts."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from coder.devtools.scripted import ScriptedServer
from tests.late import Late
from tests.terminal import MARK, PATIENCE

acp = Late("acp")
schema = Late("acp.schema")
ROOT = Path(__file__).parents[1]
FILES = {"read_text_file": True, "write_text_file": True}
Choice = Callable[[str, list[Any]], str]  # of the title and the options: an id


def once(title: str, options: list[Any]) -> str:
    return "once"


class Editor:
    """What it was shown and asked, by session; how it answers; its unsaved texts. `connection`: to
    the program."""

    def __init__(self, home: Path, server: ScriptedServer, **offers: Any) -> None:
        self.home = home
        self.server = server
        self.offers = schema.ClientCapabilities(**offers)
        self.shown: dict[str, list[Any]] = {}
        self.asked: list[tuple[str, dict[str, str]]] = []  # title, words of the options by id
        self.choose: Choice = once
        self.unsaved: dict[str, str] = {}
        self.written: list[str] = []  # paths
        self.connection: Any = None
        self.process: Any = None
        self.loop = asyncio.new_event_loop()
        self._program: Any = None

    # -- the program

    def __enter__(self) -> Editor:
        self.run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._program.__aexit__(None, None, None))
        self.loop.close()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, PATIENCE))

    async def _start(self) -> None:
        self._program = acp.spawn_agent_process(
            self,  # type: ignore[arg-type]
            sys.executable,
            "-m",
            "coder",
            "acp",
            env=environment(self.home, self.server),
            cwd=self.home,
            transport_kwargs={"stderr": None, "limit": 1 << 24},
        )
        self.connection, self.process = await self._program.__aenter__()
        await self.connection.initialize(acp.PROTOCOL_VERSION, client_capabilities=self.offers)

    # -- what a user does in it

    def open(self, folder: Path, **more: Any) -> str:
        folder.mkdir(exist_ok=True)
        return str(
            self.run(
                self.connection.new_session(
                    str(folder),
                    **more,
                )
            ).session_id
        )

    def load(self, folder: Path, session: str) -> Any:
        return self.run(
            self.connection.load_session(
                str(folder),
                session,
                mcp_servers=[],
            )
        )

    def prompt(self, session: str, *words: Any) -> str:
        """One turn; why it stopped."""
        return str(self.run(self.turn(session, *words)))

    async def turn(self, session: str, *words: Any) -> str:
        blocks = [acp.text_block(each) if isinstance(each, str) else each for each in words]
        answer = await self.connection.prompt(session_id=session, prompt=blocks)
        return str(answer.stop_reason)

    def set_mode(self, session: str, mode: str) -> None:
        self.run(self.connection.set_session_mode(session_id=session, mode_id=mode))

    # -- what it was shown

    def updates(self, session: str, kind: str) -> list[Any]:
        return [each for each in self.shown.get(session, []) if each.session_update == kind]

    def said(self, session: str, kind: str = "agent_message_chunk") -> str:
        return "".join(each.content.text for each in self.updates(session, kind))

    def ended(self, session: str) -> list[Any]:
        """The calls that have ended, in order."""
        changes = self.updates(session, "tool_call_update")
        return [each for each in changes if each.status in ("completed", "failed")]

    def results(self, session: str) -> list[str]:
        """The texts that calls returned."""
        content = [each for call in self.ended(session) for each in call.content or []]
        return [each.content.text for each in content if each.type == "content"]

    # -- what the program asks it

    def on_connect(self, connection: Any) -> None:
        pass

    async def session_update(self, session_id: str, update: Any, **_: Any) -> None:
        self.shown.setdefault(session_id, []).append(update)

    async def request_permission(
        self, session_id: str, tool_call: Any, options: list[Any], **_: Any
    ) -> Any:
        title = str(tool_call.title)
        self.asked.append(
            (
                title,
                {option.option_id: option.name for option in options},
            )
        )
        self.shown.setdefault(session_id, []).append(Asked(tool_call))
        answer = self.choose(title, options)
        while not answer:  # the user is away
            await asyncio.sleep(0.01)
            answer = self.choose(title, options)
        outcome = schema.AllowedOutcome(outcome="selected", option_id=answer)
        return schema.RequestPermissionResponse(outcome=outcome)

    async def read_text_file(self, session_id: str, path: str, **_: Any) -> Any:
        text = self.unsaved.get(path)
        if text is None:
            text = Path(path).read_text()
        return schema.ReadTextFileResponse(content=text)

    async def write_text_file(self, session_id: str, path: str, content: str, **_: Any) -> None:
        self.unsaved.pop(path, None)
        self.written.append(path)
        Path(path).write_text(content)


class Asked:
    """A request for permission among the updates."""

    session_update = "asked"

    def __init__(self, call: Any) -> None:
        self.call = call


def environment(home: Path, server: ScriptedServer) -> dict[str, str]:
    """That of the program: nothing of the user's is read."""
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "HOME": str(home),
        "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
        "OPENAI_BASE_URL": server.url,
        "OPENAI_MODEL": "script",
        "CODER_TITLES": "off",
        "CODER_RETRY_BASE": "0.01",
        MARK: str(home),
    }
