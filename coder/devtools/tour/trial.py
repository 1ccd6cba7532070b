"""One trial of a program: a scratch folder, a server that is as strict as real ones, limits.

The program gets its prompt as the last argument, and OPENAI_BASE_URL, OPENAI_API_KEY and
OPENAI_MODEL. A start of it may take `patience` seconds, print MAX_OUTPUT bytes and make
MAX_REQUESTS requests. What it leaves running is ended before the next start, and at the end.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from coder.devtools.scripted import MODEL, Body, Reply, Script, ScriptedServer, in_order
from coder.devtools.tour.validity import RefusedError, check_head, check_request, ids_of_calls
from coder.history import text_of
from coder.providers.text import plural
from coder.tools import processes

KEY = "the-key-of-the-tour"
PATIENCE = 60.0  # seconds for one start of the program
STOP_WITHIN = 5.0  # seconds after Ctrl+C
MAX_OUTPUT = 1_000_000  # bytes
MAX_REQUESTS = 30
NO_SECOND = "the answer had a call, and no second request has come"
NO_STREAM = 'the request does not ask for a stream: "stream": true'
NOTHING = "no request has come to $OPENAI_BASE_URL/chat/completions (POST, with a list of messages)"
TICK = 0.02  # seconds between two looks at the program


class NotYetError(Exception):
    """The program does not do yet what the chapter asks for; the text says what."""


class StartError(Exception):
    """The program cannot be started; the text says why."""


def expect(holds: object, reason: str) -> None:
    """Raises NotYetError unless it holds."""
    if not holds:
        raise NotYetError(reason)


class Trial:
    """A context manager. `requests` are the bodies received so far, over all starts."""

    def __init__(self, command: Sequence[str], folder: Path, patience: float = PATIENCE) -> None:
        self.command = command
        self.patience = patience
        self.folder = folder
        self.work = folder / "work"  # the program works here
        self.server = ScriptedServer(self._answer)
        self.requests = self.server.requests
        self.script: Script = lambda body: Reply("(there is no script)")
        self.needs_stream = False
        self.faults: list[str] = []  # of requests; the first one ends the program
        self.remarks: list[str] = []  # for the learner, about a check that was passed
        self.output = ""
        self.errors = ""
        self.code = 0
        self._mark = processes.new_mark()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Trial:
        self.work.mkdir()
        self.server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self.server.__exit__()

    # -- what a check prepares

    def play(self, *replies: Reply) -> None:
        """Answer with these, in order; the last one again and again."""
        self.script = in_order(replies)

    def hide_word(self, name: str) -> str:
        """Write a file with a new word in it; the word."""
        word = new_word()
        (self.work / name).write_text(f"The word is {word}.\n")
        return word

    def _answer(self, body: Body) -> Reply:
        number = len(self.requests)
        try:
            check_head(self.server.paths[number - 1], self.server.heads[number - 1], KEY)
            check_request(body)
        except RefusedError as refusal:
            self.faults.append(f"the server refuses request {number}: {refusal}")
            return Reply(str(refusal), status=400)
        if self.needs_stream and body.get("stream") is not True:
            self.faults.append(NO_STREAM)
            return Reply(NO_STREAM, status=400)
        return self.script(body)

    # -- the program

    def start(self, prompt: str) -> None:
        """Start the program. Raises StartError."""
        processes.main_guard()  # ends it if this program is killed
        self._end()
        environment = os.environ | {
            "OPENAI_BASE_URL": self.server.url,
            "OPENAI_API_KEY": KEY,
            "OPENAI_MODEL": MODEL,
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
            processes.MARK: self._mark,
        }
        with (
            open(self.folder / "output", "wb") as out,
            open(self.folder / "errors", "wb") as err,
        ):
            try:
                self._process = subprocess.Popen(
                    [*self.command, prompt],
                    cwd=self.work,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            except OSError as error:
                why = f"{self.command[0]} cannot be started: {error.strerror}"
                raise StartError(why) from None

    def wait(self, seconds: float) -> None:
        """Wait for its end. Raises NotYetError if a limit is passed, or at once if a request has a
        fault.
        """
        process = self._process
        assert process
        deadline = time.monotonic() + seconds
        passed = ""
        while not passed and process.poll() is None:
            time.sleep(TICK)
            passed = self._limit_passed()
            if time.monotonic() > deadline:
                passed = f"the program has not ended within {seconds:.0f} seconds"
        if passed:
            self._end()
        self.output = self._read("output")
        self.errors = self._read("errors")
        self.code = process.wait()
        if self.faults:
            raise NotYetError(self.faults[0])
        if passed:
            raise NotYetError(passed)
        expect(self.requests, NOTHING)

    def _limit_passed(self) -> str:
        """The limit that the program has passed, or its fault; "" if there is none."""
        if self.faults:
            return self.faults[0]
        if len(self.requests) > MAX_REQUESTS:
            return f"the program has made more than {MAX_REQUESTS} requests"
        for name in ("output", "errors"):
            if (self.folder / name).stat().st_size > MAX_OUTPUT:
                return f"the program has printed more than {MAX_OUTPUT:,} bytes"
        return ""

    def _read(self, name: str) -> str:
        with open(self.folder / name, "rb") as file:
            return file.read(MAX_OUTPUT).decode(errors="replace")

    def run(self, prompt: str) -> None:
        """Start the program and wait for its end. Raises NotYetError and StartError."""
        self.start(prompt)
        self.wait(self.patience)

    def interrupt_when(self, is_so_far: Callable[[], object], what: str) -> None:
        """Press Ctrl+C once the program is so far. Raises NotYetError if it does not stop then."""
        process = self._process
        assert process
        deadline = time.monotonic() + self.patience
        while not is_so_far():
            if process.poll() is not None or time.monotonic() > deadline:
                self.wait(0)
                raise NotYetError(f"{what} did not come")
            time.sleep(TICK)
        os.killpg(process.pid, signal.SIGINT)  # the whole group, as a terminal does it
        self.wait(STOP_WITHIN)
        expect(self.code in (130, -2), f"after Ctrl+C the exit code has to be 130, not {self.code}")

    def _end(self) -> None:
        """End the program if it still runs, and all that it has left."""
        if self._process:
            processes.kill(self._process, self._mark)
        self._process = None

    # -- what has come

    def expect_request(self, number: int, reason: str) -> Body:
        """The request of this number, from 1. Raises NotYetError if it has not come."""
        expect(len(self.requests) >= number, reason)
        return self.requests[number - 1]

    def expect_results(self, number: int, count: int, reason: str) -> list[str]:
        """The texts of the results in a request, so many. Raises NotYetError."""
        texts = results_of(self.expect_request(number, reason))
        found = f"request {number} holds {plural(len(texts), 'result')} (role tool)"
        expect(len(texts) == count, f"{found}, and there had been {plural(count, 'call')}")
        return texts

    def expect_chain(self, requests: Sequence[Body]) -> None:
        """Each of these requests begins with the one before it. Raises NotYetError."""
        for earlier, later in pairwise(requests):
            first = self.number_of(earlier)
            second = self.number_of(later)
            is_offered = not earlier.get("tools") or later.get("tools")
            expect(is_offered, f"request {second} does not offer the tools of request {first}")
            lost = f"request {second} does not begin with request {first}: the cache is lost"
            expect(later["messages"][: len(earlier["messages"])] == earlier["messages"], lost)
            same_tools = later.get("tools") == earlier.get("tools")
            other = f"the tools of request {second} are not exactly those of request {first}"
            expect(same_tools, f"{other}: the cache is lost")

    def number_of(self, body: Body) -> int:
        """The number of a request, from 1."""
        [number] = [number for number, each in enumerate(self.requests, 1) if each is body]
        return number

    def expect_end(self, text: str) -> None:
        """The program has ended well and printed this. Raises NotYetError."""
        expect(self.code == 0, f"the program has ended with exit code {self.code}")
        expect(text in self.output, f"the answer {text!r} was not printed")


def new_word() -> str:
    return f"plum-{secrets.token_hex(3)}"


def bash(command: str) -> Reply:
    """An answer that calls bash."""
    return Reply(calls=[("bash", {"command": command})])


def results_of(body: Body) -> list[str]:
    """The texts of the results in a request, in order."""
    return [text_of(message) for message in body["messages"] if message["role"] == "tool"]


def are_in_order(body: Body) -> bool:
    """Do the results of a request stand in the order of their calls?"""
    calls: list[str] = []
    results: list[str] = []
    for message in body["messages"]:
        if message["role"] == "assistant":
            calls += ids_of_calls(message)
        if message["role"] == "tool":
            results.append(message["tool_call_id"])
    return calls == results


def users_texts(body: Body) -> list[str]:
    return [text_of(message) for message in body["messages"] if message["role"] == "user"]


def offers(body: Body, name: str) -> bool:
    """Does the request offer a tool of this name?"""
    return any(tool["function"]["name"] == name for tool in body.get("tools") or [])
