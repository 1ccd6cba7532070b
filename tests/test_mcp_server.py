"""`coder mcp-server` as a client of the protocol meets it: the package's own client, over stdio."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from coder.devtools.scripted import Body, Reply, ScriptedServer
from tests.harness import results
from tests.late import Late, needs
from tests.terminal import until

needs("mcp", extra="mcp")
mcp = Late("mcp")
stdio = Late("mcp.client.stdio")
ROOT = Path(__file__).parents[1]
Talk = Callable[[Any], Coroutine[Any, Any, Any]]  # with the session of a client


def writes(body: Body) -> Reply:
    """A file is written, and then the task is done."""
    if body["messages"][-1]["role"] == "user":
        return Reply(calls=[("write", {"path": "made.txt", "content": "made\n"})])
    return Reply("All is done.")


def talk(tmp_path: Path, server: ScriptedServer, what: Talk, **client: Any) -> Any:
    """Start the program, and let a client talk to it."""
    names = {"OPENAI_BASE_URL": server.url, "OPENAI_MODEL": "script", "HOME": str(tmp_path)}
    parameters = mcp.StdioServerParameters(
        command=sys.executable,
        args=["-m", "coder", "mcp-server"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)} | names,
        cwd=tmp_path,
    )

    async def run() -> Any:
        async with (
            stdio.stdio_client(parameters) as (reads, sends),
            mcp.ClientSession(reads, sends, **client) as session,
        ):
            await session.initialize()
            return await what(session)

    return asyncio.run(asyncio.wait_for(run(), 60))


def folder(tmp_path: Path) -> Path:
    made = tmp_path / "work"
    made.mkdir()
    return made


def answering(action: str, seen: list[str], **content: Any) -> Any:
    """A client that answers every form so."""

    async def elicit(context: Any, params: Any) -> Any:
        seen.append(params.message)
        return mcp.types.ElicitResult(action=action, content=content or None)  # type: ignore[arg-type]

    return elicit


# What the client does with the form, and what it holds
FORMS: dict[str, tuple[str, dict[str, bool] | None]] = {
    "allowed": ("accept", {"allow": True}),
    "denied": ("accept", {"allow": False}),
    "declined": ("decline", None),
}


def test_the_client_is_asked_and_told_of_progress(tmp_path: Path) -> None:
    seen: list[str] = []
    told: list[str | None] = []
    forms = iter(FORMS.values())

    async def elicit(context: Any, params: Any) -> Any:
        seen.append(params.message)
        action, content = next(forms)
        return mcp.types.ElicitResult(action=action, content=content)

    async def progress(done: float, total: float | None, message: str | None) -> None:
        told.append(message)

    async def call(session: Any) -> Any:
        texts = []
        for name in FORMS:
            (tmp_path / name).mkdir()
            words = {"prompt": "Make it.", "cwd": str(tmp_path / name)}
            answer = await session.call_tool("code", words, progress_callback=progress)
            texts.append(answer.content[0].text)
        return texts

    with ScriptedServer(writes) as server:
        assert talk(tmp_path, server, call, elicitation_callback=elicit) == ["All is done."] * 3
    assert [name for name in FORMS if (tmp_path / name / "made.txt").exists()] == ["allowed"]
    assert len(seen) == 3
    assert all("made.txt" in each for each in seen)
    assert told == ["write made.txt"] * 3
    offered = [tool["function"]["name"] for tool in server.requests[0]["tools"]]
    assert "bash" in offered
    assert "ask_user" not in offered  # the client's form knows yes and no


def test_a_client_that_cannot_be_asked_needs_rules(tmp_path: Path) -> None:
    work = folder(tmp_path)

    async def call(session: Any) -> Any:
        return await session.call_tool("code", {"prompt": "Make it.", "cwd": str(work)})

    with ScriptedServer(writes) as server:
        answer = talk(tmp_path, server, call)
        assert "Denied" in results(server)[-1]
    assert answer.content[0].text == "All is done."
    assert not (work / "made.txt").exists()


def test_a_call_that_repeats_itself_asks_nobody(tmp_path: Path) -> None:
    work = folder(tmp_path)
    seen: list[str] = []

    async def call(session: Any) -> Any:
        return await session.call_tool("code", {"prompt": "Look.", "cwd": str(work)})

    with ScriptedServer(lambda body: Reply(calls=[("ls", {})])) as server:
        content = answering("accept", seen, allow=True)
        answer = talk(tmp_path, server, call, elicitation_callback=content)
    assert answer.content[0].text.startswith("Stopped: ls was called")
    assert seen == []


def test_a_cancelled_call_ends_the_run(tmp_path: Path) -> None:
    work = folder(tmp_path)
    command = "touch begun; sleep 600"

    def sleeps(body: Body) -> Reply:
        return Reply(calls=[("bash", {"command": command})])

    async def call(session: Any) -> Any:
        words = {"prompt": "Sleep.", "cwd": str(work)}
        task = asyncio.create_task(session.call_tool("code", words))
        await asyncio.to_thread(until, lambda: (work / "begun").exists())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.to_thread(until, lambda: not sleeping(work), "the command ends")
        return await session.list_tools()  # the server still answers

    with ScriptedServer(sleeps) as server:
        content = answering("accept", [], allow=True)
        listed = talk(tmp_path, server, call, elicitation_callback=content)
    assert [tool.name for tool in listed.tools] == ["code"]


def sleeping(work: Path) -> bool:
    """Does a process with `sleep 600` work in the folder?"""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if b"sleep\x00600" in (entry / "cmdline").read_bytes() and (
                (entry / "cwd").resolve() == work
            ):
                return True
        except OSError:
            continue
    return False


def test_other_requests_are_answered_while_a_session_opens(tmp_path: Path) -> None:
    work = folder(tmp_path)
    plugins = tmp_path / ".config" / "coder" / "plugins"
    plugins.mkdir(parents=True)
    os.mkfifo(tmp_path / "gate")
    text = f"open({str(tmp_path / 'gate')!r}).read()\ndef setup(api): pass\n"
    (plugins / "slow.py").write_text(text)

    async def call(session: Any) -> Any:
        words = {"prompt": "Make it.", "cwd": str(work)}
        task = asyncio.create_task(session.call_tool("code", words))
        # Returns when the plugin has opened the other end: then the session is opening
        gate = await asyncio.to_thread(open, tmp_path / "gate", "w")
        try:
            await asyncio.wait_for(session.list_tools(), 10)
        finally:
            gate.close()
        return await task

    with ScriptedServer(writes) as server:
        answer = talk(tmp_path, server, call)
    assert answer.content[0].text == "All is done."


def test_a_missing_folder_is_an_error_of_the_call(tmp_path: Path) -> None:
    async def call(session: Any) -> Any:
        return await session.call_tool("code", {"prompt": "x", "cwd": "/nowhere"})

    with ScriptedServer(writes) as server:
        answer = talk(tmp_path, server, call)
    assert answer.is_error
    assert "no folder /nowhere" in answer.content[0].text
