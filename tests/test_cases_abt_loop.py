"""Stopping within the loop, two cases of the group ABT: while the conversation is shortened, and while a large file is written."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from coder.devtools.scripted import Body, Reply, ScriptedServer
from tests.terminal import PATIENCE, ROOT, Terminal, promptly

LONG = "word " * 2_200


@pytest.mark.case("ABT-08")
def test_ctrl_c_while_a_session_is_shortened_loses_nothing(tmp_path: Path) -> None:
    release, summaries = threading.Event(), list[Body]()

    def script(body: Body) -> Reply:
        if "<conversation>" not in str(body["messages"][-1]["content"]):
            return Reply(LONG)
        summaries.append(body)
        release.wait(PATIENCE)
        return Reply("not now", status=500)

    with (
        ScriptedServer(script) as server,
        Terminal(tmp_path, server, CODER_CONTEXT_WINDOW="8000") as terminal,
    ):
        earlier = ["one", "two"]
        for words in earlier:
            terminal.say(words)
        terminal.enter("three")
        terminal.until(lambda: summaries, "the request for a summary")
        terminal.ctrl_c()
        with promptly():
            assert "stopped by you" in terminal.prompt()
        release.set()
        terminal.say("four")
        asked = server.requests[-1]["messages"]
        assert [message["content"] for message in asked if message["role"] == "user"] == [
            *earlier,
            "three",
            "four",
        ]
        assert [
            message["content"].rstrip() for message in asked if message["role"] == "assistant"
        ] == [LONG.rstrip()] * 2
        with closing(sqlite3.connect(terminal.home / ".data" / "coder" / "sessions.db")) as db:
            rows = [
                json.loads(data)
                for (data,) in db.execute("SELECT data FROM message ORDER BY position")
            ]
        assert [row["content"] for row in rows if row["role"] == "user"] == [
            *earlier,
            "three",
            "four",
        ]


WRITER = """
import os, sys
from coder.devtools.replay import ScriptedModel
from coder.devtools.scripted import Reply
from coder.loop import run_loop
from coder.toolset import Toolset
from coder.tools.files import read, write
from coder.hooks import Hooks

CONTENT = ("new " * 249_999 + "\\n") * 50

class Large(Hooks):
    def before_tool_call(self, call, ctx):
        if call.name == "write":
            call.arguments["content"] = CONTENT
            ctx.authorize = self.authorize

    def authorize(self, *asked):  # all is prepared: from here on each run is a process of its own
        for _ in sys.stdin:
            if not (pid := os.fork()):
                print(os.getpid(), flush=True)
                return
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        os._exit(0)
        yield

calls = [Reply(calls=[("read", {"path": "file", "limit": 1})]), Reply(calls=[("write", {"path": "file", "content": ""})]), Reply("ok")]
try:
    for event in run_loop([], ScriptedModel(calls), Toolset([read, write], cwd=sys.argv[1]), prompts="go", hooks=Large()):
        pass
except KeyboardInterrupt:
    os._exit(130)
os._exit(0)
"""


@pytest.mark.case("ABT-18")
@pytest.mark.parametrize("rounds", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_ctrl_c_while_a_large_file_is_written_leaves_the_old_or_the_new_one(
    tmp_path: Path, rounds: int
) -> None:
    ws, chance = tmp_path / "ws", random.Random(18)
    ws.mkdir()
    old, new = ((word * 249_999 + b"\n") * 50 for word in (b"old ", b"new "))
    (ws / "file").write_bytes(old)
    codes: list[int] = []
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(ws)],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as writer:

        def written(after: float) -> float:
            """One run, with a SIGINT so many seconds after it has begun; how long it took."""
            assert writer.stdin and writer.stdout
            writer.stdin.write("once more\n")
            writer.stdin.flush()
            pid, started = int(writer.stdout.readline()), time.monotonic()
            if after < PATIENCE:
                time.sleep(after)  # the moment within the call is the case
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGINT)
            codes.append(int(writer.stdout.readline()))
            took = time.monotonic() - started
            assert os.listdir(ws) == ["file"]
            content = (ws / "file").read_bytes()
            is_old, is_new = content == old, content == new
            assert is_new or (is_old and codes[-1] == 130)
            if is_new:
                (ws / "file").write_bytes(old)
            return took

        whole = written(PATIENCE)
        for _ in range(rounds):
            written(chance.uniform(0, whole))
        writer.communicate(timeout=PATIENCE)
    assert codes[0] == 0 and set(codes) <= {0, 130} and codes.count(130) >= rounds // 4, codes
