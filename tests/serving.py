"""`coder serve` as a process on loopback, and a client of it that knows HTTP alone."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from coder.devtools.scripted import Body, Reply, ScriptedServer
from tests.terminal import PATIENCE, OneShot, until

TOKEN = "a-token-of-the-tests"
ENDS = {"run_end", "session.idle"}
Event = dict[str, Any]
# The second line does not look like one if blanks collapse, and a sign turns what follows around
HIDDEN = "ls  # the files:\necho \u202egnihton"


def reply_by_prompt(body: Body) -> Reply:
    """What the model does depends on a word of the prompt."""
    prompts = [message["content"] for message in body["messages"] if message["role"] == "user"]
    has_results = body["messages"][-1]["role"] == "tool"
    words = prompts[-1].split()
    if "long" in words:
        return Reply("word " * 2000, pace=0.01)
    if "write" in words and not has_results:
        write = ("write", {"path": "made.txt", "content": "one\n<b>two</b>\n"})
        command = ("bash", {"command": "touch by-command.txt"})
        return Reply("I **write** it.", calls=[write, command])
    if "outside" in words and not has_results:  # two questions: the folder, and the secrets in it
        return Reply(calls=[("read", {"path": "../home/.env"})])
    if "hidden" in words and not has_results:
        return Reply(calls=[("bash", {"command": HIDDEN})])
    if words[0] == "itself:" and not has_results:
        return Reply(calls=[("bash", {"command": prompts[-1].partition(": ")[2]})])
    if "environment" in words and not has_results:
        return Reply(calls=[("bash", {"command": "env"})])
    if "colour" in words and not has_results:
        question = {"question": "Which one?", "options": ["red", "blue"]}
        return Reply(calls=[("ask_user", question)])
    if has_results:
        return Reply(f"Done: {body['messages'][-1]['content']}")
    return Reply("# Hello\n\n*How* are `you`?\n\n- <img src=x onerror=alert(1)>\n")


class Served(OneShot):
    """A server and its client. A context manager; at its end a signal ends the server."""

    def __init__(self, folder: Path, model: ScriptedServer, *flags: str, **more: str) -> None:
        own = {"CODER_SERVE_TOKEN": TOKEN} | more
        super().__init__(folder, model, "serve", "--port=0", *flags, **own)
        assert self.child.stdout
        line = self.child.stdout.readline().decode()
        assert line.startswith("Serving "), self.child.communicate()
        self.url = line.split()[1]
        self.port = int(self.url.rpartition(":")[2].strip("/"))
        self.token = own["CODER_SERVE_TOKEN"]

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self.child.poll() is None:
            self.kill(signal.SIGTERM)
        super().__exit__(kind, error, trace)

    def crash(self) -> None:
        """A kill -9, which leaves temporary files behind."""
        self.kill(signal.SIGKILL)
        self.child.wait()
        for left in self.temp.iterdir():
            shutil.rmtree(left)

    def connect(self, method: str, path: str, body: Any, headers: dict[str, str]) -> Any:
        """The connection, and the answer whose body is still to come."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        own = {"Authorization": f"Bearer {self.token}"}
        data = json.dumps(body) if isinstance(body, dict) else body
        connection.request(method, path, data, own | headers)
        return connection, connection.getresponse()

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """The status, and the value of the answer."""
        connection, answer = self.connect(method, path, body, headers)
        with closing(connection):
            data = answer.read()
        assert self.key.encode() not in data
        return answer.status, json.loads(data) if data else None

    def get(self, path: str) -> Any:
        status, value = self.ask("GET", path)
        assert status == 200, value
        return value

    def post(self, path: str, **body: Any) -> Any:
        status, value = self.ask("POST", path, body)
        assert status in (200, 204), value
        return value

    def new(self, directory: Path | None = None) -> str:
        """The id of a new session."""
        query = f"?directory={directory}" if directory else ""
        return str(self.post(f"/session{query}")["id"])

    def prompt(self, session: str, text: str) -> None:
        self.post(f"/session/{session}/prompt_async", parts=[{"type": "text", "text": text}])

    def permission(self) -> Event:
        """The question that waits, once it does."""
        questions: list[Event] = []

        def has_come() -> bool:
            questions[:] = self.get("/permission")
            return bool(questions)

        until(has_come, "a question")  # asked for once: it may be answered at any moment
        [asked] = questions
        return dict(asked)

    def answer(self, word: str = "once") -> Event:
        asked = self.permission()
        assert self.post(f"/permission/{asked['id']}/reply", reply=word) is True
        return asked

    def is_idle(self, session: str) -> bool:
        return session not in self.get("/session/status")

    def finish(self, session: str) -> None:
        """Answer all questions of a run with once, until its end."""
        while not self.is_idle(session):
            for asked in self.get("/permission"):
                self.ask("POST", f"/permission/{asked['id']}/reply", {"reply": "once"})

    @contextmanager
    def events(self, path: str, last: str = "") -> Iterator[Iterator[tuple[str, Event]]]:
        """A stream: ids and events."""
        headers = {"Last-Event-ID": last} if last else {}
        connection, answer = self.connect("GET", path, None, headers)
        with closing(connection):
            assert answer.status == 200
            yield read_events(answer, self.key)
            answer.close()

    def texts(self, session: str) -> list[str]:
        """The texts of its messages."""
        found = []
        for message in self.get(f"/session/{session}/message"):
            found += [part["text"] for part in message["parts"] if part["type"] == "text"]
        return found


def read_events(answer: Any, key: str) -> Iterator[tuple[str, Event]]:
    event_id = ""
    for line in answer:
        assert key.encode() not in line
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name == "id":
            event_id = value
        elif name == "data":
            yield event_id, json.loads(value)
            event_id = ""


def until_type(stream: Iterator[tuple[str, Event]], *types: str) -> list[tuple[str, Event]]:
    """The events up to the first one of such a type."""
    seen = []
    for event_id, event in stream:
        seen.append((event_id, event))
        if event["type"] in types:
            return seen
    raise AssertionError(f"the stream ended before {types}")
