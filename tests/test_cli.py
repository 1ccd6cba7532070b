"""The command line in real child processes against a scripted server: what goes where, and with which exit code."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from coder import __version__
from coder.devtools.scripted import Body, Reply, ScriptedServer
from tests.harness import assert_all_valid, serve

ROOT = Path(__file__).parents[1]
FOUR_LS = [Reply("Once more.", [("ls", {})])]


class Place:
    """A folder to work in, a home with nothing in it, and the program started there."""

    def __init__(self, folder: Path) -> None:
        self.ws, self.home, self.temp = folder / "ws", folder / "home", folder / "temp"
        for each in (self.ws, self.home, self.temp):
            each.mkdir(parents=True)

    def env(self, server: ScriptedServer | None = None, **more: str) -> dict[str, str]:
        """Nothing of the person who runs the tests: no key, no proxy, no settings."""
        model = (
            {"OPENAI_BASE_URL": server.url, "OPENAI_MODEL": "m", "CODER_RETRY_BASE": "0.01"}
            if server
            else {}
        )
        return (
            {
                "PATH": os.environ["PATH"],
                "HOME": str(self.home),
                "TMPDIR": str(self.temp),
                "LANG": "C.UTF-8",
                "PYTHONPATH": str(ROOT),
            }
            | model
            | more
        )

    def coder(
        self,
        *arguments: str,
        server: ScriptedServer | None = None,
        stdin: str | bytes | None = None,
        python: Sequence[str] = ("-m", "coder"),
        timeout: float = 60,
        **env: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run it to its end; without `stdin` that is the null device."""
        data = stdin.encode() if isinstance(stdin, str) else stdin
        given: dict[str, Any] = {"stdin": subprocess.DEVNULL} if data is None else {"input": data}
        done = subprocess.run(
            [sys.executable, *python, *arguments],
            cwd=self.ws,
            env=self.env(server, **env),
            timeout=timeout,
            capture_output=True,
            **given,
        )
        return subprocess.CompletedProcess(
            done.args, done.returncode, done.stdout.decode("utf-8"), done.stderr.decode("utf-8")
        )

    def shell(
        self, command: str, server: ScriptedServer | None = None, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """A line of bash in which $CODER is the program."""
        env |= {"CODER": f"{sys.executable} -m coder"}
        return subprocess.run(
            ["bash", "-c", command],
            cwd=self.ws,
            env=self.env(server, **env),
            timeout=60,
            capture_output=True,
            encoding="utf-8",
            stdin=subprocess.DEVNULL,
        )

    def start(
        self, *arguments: str, server: ScriptedServer | None = None, **env: str
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "coder", *arguments],
            cwd=self.ws,
            env=self.env(server, **env),
            encoding="utf-8",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def eventually(holds: Callable[[], Any], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


def asked(server: ScriptedServer, request: int = 0) -> str:
    """The newest user message of a request."""
    return str(
        [
            message["content"]
            for message in server.requests[request]["messages"]
            if message["role"] == "user"
        ][-1]
    )


def results(server: ScriptedServer) -> list[str]:
    """What the tools answered, by the newest request."""
    return [
        message["content"]
        for message in server.requests[-1]["messages"]
        if message["role"] == "tool"
    ]


def assert_one_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Usage or configuration: exit code 2 and one clear line."""
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr, done.stderr
    for word in words:
        assert word in done.stderr


# ---- what goes where -------------------------------------------------------------------------------------


def test_stdout_is_the_final_text_alone_and_everything_else_is_on_stderr(place: Place) -> None:
    (place.ws / "a.txt").write_text("content of a\n")
    with serve(
        Reply("First I look.", [("read", {"path": "a.txt"})], reasoning="hmm"),
        Reply("The answer.\nTwo lines."),
    ) as server:
        done = place.coder("what is in a.txt?", server=server)
        assert_all_valid(server)
    assert (done.returncode, done.stdout) == (0, "The answer.\nTwo lines.\n")
    assert done.stderr.splitlines()[:2] == ["First I look.", "● read a.txt"]
    assert "The answer" not in done.stderr and "hmm" not in done.stderr
    assert re.search(r"^done · 2 steps · .* in, .* out · [\d.]+ s$", done.stderr, re.M)
    assert asked(server) == "what is in a.txt?"
    assert "content of a" in results(server)[0]


def test_a_line_on_stderr_is_not_cut_at_80_columns_where_there_is_no_terminal(
    place: Place,
) -> None:
    command = f"touch {'a-long-name/' * 6}x"
    with serve(Reply(calls=[("bash", {"command": command})]), Reply("Well.")) as server:
        done = place.coder("go", server=server)
    assert done.returncode == 0 and "…" not in done.stderr
    assert f", or --allow 'bash:{command}'" in done.stderr


def test_verbose_shows_reasoning_and_whole_outputs_on_stderr(place: Place) -> None:
    (place.ws / "a.txt").write_text("".join(f"line {number} of a\n" for number in range(30)))
    with serve(
        Reply("First.", [("read", {"path": "a.txt"})], reasoning="hmm, well"), Reply("Answer.")
    ) as server:
        done = place.coder("-v", "go", server=server)
    assert (done.returncode, done.stdout) == (0, "Answer.\n")
    assert all(words in done.stderr for words in ("hmm, well", "line 0 of a", "line 29 of a"))


def test_quiet_says_nothing_on_stderr_but_why_an_answer_is_not_whole(place: Place) -> None:
    with serve(
        Reply("First.", [("ls", {})], reasoning="hmm"), Reply("Answer.", finish="length")
    ) as server:
        done = place.coder("-q", "go", server=server)
    assert (done.returncode, done.stdout, done.stderr) == (
        3,
        "Answer.\n",
        "stopped: the answer reached the output limit\n",
    )


FULL = Reply("context_length_exceeded: too many tokens", status=400)
NO_ANSWER: dict[
    str, tuple[int, list[Reply], list[str], str, str]
] = {  # (exit code, replies, flags, stdout, what stderr says)
    "the step limit": (
        3,
        [Reply("", [("ls", {})])],
        ["--max-steps", "1"],
        "",
        "Max steps reached, task may be incomplete.",
    ),
    "the step limit behind a text": (
        3,
        [Reply("I look.", [("ls", {})]), Reply("", [("ls", {"path": ".."})])],
        ["--max-steps", "2"],
        "I look.\n",
        "stopped: the step limit is reached; enter `continue` to go on",
    ),
    "the output limit": (
        3,
        [Reply("", finish="length")],
        [],
        "",
        "The answer was cut at the output limit before it began.",
    ),
    "the content filter": (
        1,
        [Reply("", finish="content_filter")],
        [],
        "",
        "The provider's content filter stopped the answer.",
    ),
    "the content filter behind a text": (
        1,
        [Reply("I begin.", finish="content_filter")],
        [],
        "I begin.\n",
        "stopped by the content filter",
    ),
    "a repetition": (
        3,
        [Reply("Once more.", [("ls", {})])],
        [],
        "Once more.\n",
        "stopped: the model repeats itself",
    ),
    "an error behind a text": (
        1,
        [Reply("I look.", [("ls", {})]), Reply("wrong key", status=401)],
        [],
        "I look.\n",
        "Error: the key was rejected: wrong key (HTTP 401).",
    ),
    "a full context": (3, [FULL], [], "", "Error: "),
}


@pytest.mark.parametrize("name", NO_ANSWER)
def test_what_is_no_answer_is_on_stderr_and_stdout_keeps_what_the_model_said_last(
    place: Place, name: str
) -> None:
    code, replies, flags, stdout, reason = NO_ANSWER[name]
    with ScriptedServer(replies) as server:
        done = place.coder("-q", *flags, "go", server=server)
    assert (done.returncode, done.stdout) == (code, stdout), done.stderr
    assert done.stderr.startswith(reason) and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("sesions", "sessions"),
        ("exprt x", "export ID"),
        ("Export x", "export ID"),
        ("help", "--help"),
        ("config x", "config"),
        ("sessions lst", "sessions"),
        ("export", "export ID"),
        ("trce x.jsonl", "trace FILE"),
        ("dem", "demo"),
    ],
)
def test_a_typo_of_a_subcommand_is_not_sent(place: Place, words: str, meant: str) -> None:
    with serve(Reply("?")) as server:
        done = place.coder(*words.split(), server=server)
        assert server.requests == []
    assert_one_line(done, f"did you mean `python -m coder {meant}`? To ask the model: ", "-p")


@pytest.mark.parametrize(
    "words",
    [
        ["hello"],
        ["fix", "the", "tests"],
        ["heap"],
        ["export", "the", "table"],
        ["trace this"],
        ["explain", "main.py"],
        ["-p", "sesions"],
        ["-p", "export"],
    ],
)
def test_what_is_no_subcommand_is_sent(place: Place, words: list[str]) -> None:
    with serve(Reply("Hello.")) as server:
        done = place.coder(*words, server=server)
    assert (done.returncode, done.stdout) == (0, "Hello.\n"), done.stderr
    assert asked(server) == " ".join(word for word in words if word != "-p")


def test_nothing_that_drives_a_terminal_is_on_stderr_where_it_is_a_pipe(place: Place) -> None:
    calls = [
        ("bash", {"command": "printf 'x\\033[31my\\007'; exit 3"}),
        ("write", {"path": "n.txt", "content": "a\n"}),
        ("nothing", {}),
    ]
    with serve(Reply("I \x1b[1mlook.", calls), Reply("bad\x1b[2J", status=400)) as server:
        done = place.coder("-y", "go", server=server, TERM="xterm-256color")
    assert done.returncode == 1
    assert {c for c in done.stderr if not c.isprintable()} == {"\n"}
    assert "xy" in done.stderr and "+a" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "stdin", "expected"),
    [
        ([], "say hello\n", "say hello"),
        (
            ["explain", "this"],
            "line 1\nline 2\n",
            "explain this\n\n<stdin>\nline 1\nline 2\n\n</stdin>",
        ),
        (["-p"], b"caf\xc3\xa9 \xff\n", "café \N{REPLACEMENT CHARACTER}"),
    ],
)
def test_stdin_alone_is_the_prompt_and_beside_one_its_context(
    place: Place, arguments: list[str], stdin: str | bytes, expected: str
) -> None:
    with serve(Reply("Hello.")) as server:
        done = place.coder(*arguments, server=server, stdin=stdin)
    assert (done.returncode, done.stdout) == (0, "Hello.\n")
    assert asked(server) == expected


@pytest.mark.parametrize(
    "command",
    [
        "$CODER </dev/null",
        "$CODER <&-",
        "printf ' \\n' | $CODER",
        "$CODER -p <&-",
        "$CODER ''",
        "$CODER <&- >&-",
    ],
)
def test_no_prompt_and_nothing_on_stdin_is_said_at_once(place: Place, command: str) -> None:
    started = time.monotonic()
    with serve(Reply("?")) as server:
        done = place.shell(command, server)
    assert_one_line(done, "nothing to do", "PROMPT")
    assert server.requests == []
    assert time.monotonic() - started < 10


def test_a_prompt_with_a_closed_stdin_or_stdout_runs(place: Place) -> None:
    with serve(
        Reply("Hello.", [("bash", {"command": "echo from bash"})]), Reply("Hello.")
    ) as server:
        done = place.shell("$CODER -y hi <&- && $CODER hi <&- >&- 2>&-; echo $?", server)
    assert done.stdout == "Hello.\n0\n"
    assert "Traceback" not in done.stderr
    assert server.requests[1]["messages"][-1]["content"] == "from bash"


def test_a_stdin_that_nobody_closes_is_said_and_waited_for_until_it_ends_or_a_signal_comes(
    place: Place,
) -> None:
    with serve(Reply("Hello.")) as server:
        first, second = (
            subprocess.Popen(
                [sys.executable, "-m", "coder"],
                cwd=place.ws,
                env=place.env(server),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for _ in range(2)
        )
        for child in (first, second):
            assert child.stdin and child.stderr
            child.stdin.write(b"say ")
            child.stdin.flush()
            assert select.select([child.stderr], [], [], 20)[0]
            assert b"waiting for the end of standard input" in os.read(child.stderr.fileno(), 1000)
        assert server.requests == []
        second.send_signal(signal.SIGTERM)
        out, errors = second.communicate(timeout=20)
        assert (second.returncode, out) == (143, b"") and b"Traceback" not in errors
        assert first.communicate(b"hello", timeout=20)[0] == b"Hello.\n" and first.returncode == 0
    assert asked(server) == "say hello" and len(server.requests) == 1


# ---- the formats for programs ----------------------------------------------------------------------------

RUN_END = {"stop_reason", "text", "usage", "steps", "error"}
USAGE = {"input", "output", "cached", "reasoning", "estimated", "cost"}


def test_json_is_one_object_with_the_named_fields(place: Place) -> None:
    with serve(Reply("First.", [("ls", {})]), Reply("Café.\n")) as server:
        done = place.coder("--output-format", "json", "hi", server=server)
    assert done.returncode == 0
    assert done.stdout.count("\n") == 1 and "Café" in done.stdout
    end = json.loads(done.stdout)
    assert set(end) == RUN_END | {"session_id", "messages"}
    assert set(end["usage"]) == USAGE
    assert (end["stop_reason"], end["text"], end["steps"], end["error"]) == (
        "stop",
        "Café.\n",
        2,
        None,
    )
    assert [message["role"] for message in end["messages"]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert isinstance(end["session_id"], str)
    assert "● ls" in done.stderr


def test_json_tells_an_error_in_four_fields(place: Place) -> None:
    with serve(Reply("no such key", status=401, headers={"x-request-id": "r7"})) as server:
        done = place.coder("--output-format", "json", "-q", "hi", server=server)
    assert (done.returncode, done.stderr) == (1, "")
    end = json.loads(done.stdout)
    assert end["error"] == {
        "kind": "auth",
        "message": "no such key",
        "status": 401,
        "request_id": "r7",
    }
    assert (end["stop_reason"], end["text"], end["steps"]) == ("error", "Error: no such key", 1)


def stream(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """The events of a stream-json run; deltas of a kind and statuses folded."""
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(isinstance(event, dict) and isinstance(event["type"], str) for event in events)
    assert (
        events[-1]["type"] == "run_end"
        and [event["type"] for event in events].count("run_end") == 1
    )
    return [
        event
        for at, event in enumerate(events)
        if event["type"] != "status"
        and not (event["type"].endswith("_delta") and events[at - 1]["type"] == event["type"])
    ]


def test_stream_json_of_a_plain_answer(place: Place) -> None:
    with serve(Reply("Hello, \N{GRINNING FACE}.", reasoning="hm")) as server:
        done = place.coder("--output-format", "stream-json", "hi", server=server)
    assert (done.returncode, done.stderr) == (0, "")
    events = stream(done)
    assert [event["type"] for event in events] == [
        "run_start",
        "step_start",
        "message_start",
        "message_end",
        "message_start",
        "reasoning_delta",
        "text_delta",
        "message_end",
        "step_end",
        "run_end",
    ]
    assert set(events[-1]) == RUN_END | {"type"} and set(events[-1]["usage"]) == USAGE
    assert events[-1]["text"] == events[-3]["message"]["content"] == "Hello, \N{GRINNING FACE}."
    assert set(events[-2]) == {"type", "message", "tool_results", "finish_reason", "usage"}


def test_stream_json_of_a_run_with_tools(place: Place) -> None:
    with serve(
        Reply("I run it.", [("bash", {"command": "for i in 1 2 3; do echo $i; sleep 0.15; done"})]),
        Reply("Done."),
    ) as server:
        done = place.coder("--output-format", "stream-json", "-y", "hi", server=server)
    events = stream(done)
    assert [event["type"] for event in events if event["type"] != "tool_update"] == [
        "run_start",
        "step_start",
        "message_start",
        "message_end",
        "message_start",
        "text_delta",
        "tool_call_delta",
        "message_end",
        "tool_start",
        "tool_end",
        "message_start",
        "message_end",
        "step_end",
        "step_start",
        "message_start",
        "text_delta",
        "message_end",
        "step_end",
        "run_end",
    ]
    by_type = {event["type"]: event for event in events}
    assert set(by_type["tool_start"]) == {"type", "id", "name", "arguments", "title"}
    assert set(by_type["tool_update"]) == {"type", "id", "text"}
    assert set(by_type["tool_end"]) == {"type", "id", "name", "result", "is_error", "seconds"}
    assert by_type["tool_end"]["result"]["content"] == "1\n2\n3"
    assert by_type["tool_start"]["id"] == by_type["tool_end"]["id"] == by_type["tool_update"]["id"]
    assert (done.returncode, done.stderr) == (0, "")


def test_stream_json_of_a_failing_server_tells_each_retry_and_ends_with_the_error(
    place: Place,
) -> None:
    with serve(Reply("busy", status=503)) as server:
        done = place.coder("--output-format", "stream-json", "hi", server=server)
    events = stream(done)
    retries = [event for event in events if event["type"] == "retry"]
    assert [retry["attempt"] for retry in retries] == [1, 2, 3, 4]
    assert all(
        set(retry) == {"type", "attempt", "delay", "error"} and retry["error"]["kind"] == "server"
        for retry in retries
    )
    assert events[-1]["error"] == {
        "kind": "server",
        "message": "busy",
        "status": 503,
        "request_id": None,
    }
    assert events[-1]["text"] == "Failed after 5 errors: busy"
    assert (done.returncode, len(server.requests)) == (75, 5)


def last(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The last line for a program, which ends as a line does."""
    assert done.stdout.endswith("}\n"), done
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("output_format", ["json", "stream-json"])
@pytest.mark.parametrize("flags", [[], ["--no-session"]])
def test_a_run_for_programs_names_the_conversation_where_it_is_kept(
    place: Place, output_format: str, flags: list[str]
) -> None:
    with serve(Reply("Hello.")) as server:
        done = place.coder("--output-format", output_format, *flags, "hi", server=server)
        first = json.loads(done.stdout.splitlines()[0])
        if output_format == "stream-json":
            about = {
                "type": "run_start",
                "model": "m",
                "cwd": str(place.ws),
                "version": __version__,
            }
            assert first == about | {"session_id": first["session_id"]}
        if flags:
            assert first["session_id"] is None
        else:
            again = place.coder("-r", first["session_id"], "and now?", server=server)
            assert again.returncode == 0 and len(server.requests[1]["messages"]) == 4
    assert done.returncode == 0 and last(done)["text"] == "Hello."


USAGE_ERRORS = {
    "nothing to do": ["-p"],
    "no key": ["hi"],
    "invalid int value": ["--max-steps", "many", "hi"],
    "unrecognized arguments": ["hi", "--nonsense"],
    "no agent 'none'": ["--base-url", "http://127.0.0.1:9/v1", "--agent", "none", "hi"],
    "There is no session 'zzz'": ["--base-url", "http://127.0.0.1:9/v1", "-r", "zzz", "hi"],
}


@pytest.mark.parametrize("message", USAGE_ERRORS)
@pytest.mark.parametrize("output_format", ["json", "stream-json"])
def test_an_error_of_usage_is_an_object_of_the_format_too(
    place: Place, message: str, output_format: str
) -> None:
    form = f"--output-format={output_format}"
    done = place.coder(form, *USAGE_ERRORS[message], OPENAI_MODEL="m")
    assert (done.returncode, done.stdout.count("\n")) == (2, 1)
    end = last(done)
    error = end["error"]
    assert error.pop("kind") == "usage" and message in error.pop("message")
    assert error == {"status": None, "request_id": None}
    more = {"type"} if output_format == "stream-json" else {"session_id", "messages"}
    assert set(end) == RUN_END | more
    assert (end["stop_reason"], end["steps"], set(end["usage"])) == ("error", 0, USAGE)
    assert message in done.stderr and "Traceback" not in done.stderr
    left = place.shell(f"exec 3> >(exec true); wait $!; $CODER {form} -p </dev/null >&3; echo $?")
    assert left.stdout == "1\n" and "Traceback" not in left.stderr, "the reader has left by then"


SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
BUSY = {  # what a run does when the signal comes
    "waits for an answer": Reply("", close="hang", cut=0),
    "reads an answer": Reply("Half an", cut=3, close="hang"),
    "runs a command": Reply("", [("bash", {"command": "trap '' INT TERM HUP; sleep 300"})]),
    "waits for the next attempt": Reply("busy", status=503, headers={"retry-after": "50"}),
    "runs a tool that sees nothing": Reply("", [("dream", {})]),
}
DREAM = """import time
def dream() -> str:
    "Sleep."
    time.sleep(300)
    return ""
def setup(api): api.add_tool(dream)
"""


@pytest.mark.parametrize("output_format", ["json", "stream-json"])
@pytest.mark.parametrize("busy", BUSY)
def test_a_signal_ends_the_formats_for_programs_with_their_last_line(
    place: Place, busy: str, output_format: str
) -> None:
    plugins = place.home / ".config/coder/plugins"
    plugins.mkdir(parents=True)
    (plugins / "dream.py").write_text(DREAM)
    for number, code in SIGNALS:
        seen = place.ws / "events"
        listen = f"def setup(api): api.subscribe(lambda event: open({str(seen)!r}, 'a').write(event.type + '\\n'))\n"
        (plugins / "listen.py").write_text(listen)
        seen.write_text("")
        with serve(BUSY[busy]) as server:
            child = place.start("-y", "--output-format", output_format, "go", server=server)
            mark = {
                "waits for an answer": "step_start",
                "reads an answer": "text_delta",
                "waits for the next attempt": "retry",
            }.get(busy, "tool_start")
            eventually(lambda seen=seen, mark=mark: mark in seen.read_text())
            eventually(lambda server=server: server.requests)
            child.send_signal(number)
            out, errors = child.communicate(timeout=20)
        assert child.returncode == code, errors
        end = last(subprocess.CompletedProcess([], code, out, errors))
        assert end["stop_reason"] == "aborted" and end["text"] == "Request aborted.", errors
        if output_format == "json":
            assert out.count("\n") == 1
            roles = [message["role"] for message in end["messages"]]
            tool = mark == "tool_start"
            partial = busy == "reads an answer"
            assert roles == ["user", *["assistant"] * (tool or partial), *["tool"] * tool]
        else:
            assert end["type"] == "run_end" and errors == ""


def test_what_a_person_is_told_at_the_end_of_a_run_comes_before_its_last_line(place: Place) -> None:
    plugins = place.home / ".config/coder/plugins"
    plugins.mkdir(parents=True)
    listener = "def told(event):\n    if event.type == 'run_end': raise OSError('too late')\n"
    (plugins / "late.py").write_text(f"{listener}def setup(api): api.subscribe(told)\n")
    with serve(Reply("Hello.")) as server:
        events = stream(place.coder("--output-format", "stream-json", "hi", server=server))
    assert "too late" in events[-2]["text"] and events[-2]["type"] == "notice"


# ---- exit codes ------------------------------------------------------------------------------------------


def refusing() -> str:
    """The address of a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return f"http://127.0.0.1:{closed.getsockname()[1]}/v1"


def turning(body: Body) -> Reply:
    """Calls for ever, never the same."""
    return Reply("", [("grep", {"pattern": f"x{len(body['messages'])}"})])


# name: (exit code, replies, flags, what stdout is, what stderr says)
ENDINGS: dict[str, tuple[int, Any, list[str], str, str]] = {
    "content_filter": (
        1,
        [Reply("Half", finish="content_filter")],
        [],
        "Half\n",
        "The provider's content filter",
    ),
    "401": (
        1,
        [Reply("wrong key", status=401)],
        [],
        "",
        "Error: the key was rejected: wrong key (HTTP 401). Check OPENAI_API_KEY",
    ),
    "404": (
        1,
        [Reply("no model m", status=404)],
        [],
        "",
        "no model m (HTTP 404). Check the model's name",
    ),
    "a web page": (
        1,
        [Reply(chunks=[b"<html>Hi</html>"], headers={"content-type": "text/html"})],
        [],
        "",
        "Check the base URL",
    ),
    "max_steps": (3, turning, ["--max-steps", "2"], "", "step limit"),
    "max_time": (
        3,
        [Reply("", [("bash", {"command": "sleep 300"})])],
        ["--max-seconds", "1.5", "-y"],
        None,
        "time limit",
    ),
    "doom_loop": (3, FOUR_LS, [], None, "repeats itself"),
    "length": (3, [Reply("Half an answ", finish="length")], [], "Half an answ\n", "output limit"),
    "429": (
        75,
        [Reply("slow down", status=429)],
        [],
        "",
        "Failed after 5 errors: too many requests: slow down (HTTP 429). Try",
    ),
    "refused": (75, None, [], "", "nothing answers at"),
}


@pytest.fixture(scope="module")
def endings(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Future[tuple[subprocess.CompletedProcess[str], int]]]]:
    """All of them, two at a time: most of each is the start of the program."""

    def run(name: str) -> tuple[subprocess.CompletedProcess[str], int]:
        _, replies, flags, _, _ = ENDINGS[name]
        place = Place(tmp_path_factory.mktemp("ending"))
        if replies is None:
            return place.coder(
                "go", OPENAI_BASE_URL=refusing(), OPENAI_MODEL="m", CODER_RETRY_BASE="0.01"
            ), 0
        with ScriptedServer(replies) as server:
            return place.coder(*flags, "go", server=server), len(server.requests)

    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(run, name) for name in ENDINGS}


@pytest.mark.parametrize("name", ENDINGS)
def test_every_way_to_end_has_its_exit_code_its_stdout_and_its_reason(
    endings: dict[str, Future[tuple[subprocess.CompletedProcess[str], int]]], name: str
) -> None:
    code, _, _, stdout, reason = ENDINGS[name]
    done, requests = endings[name].result()
    assert done.returncode == code, done.stderr
    assert stdout is None or done.stdout == stdout
    assert reason in done.stderr and "Traceback" not in done.stderr
    expected = {"429": 5, "max_steps": 2, "doom_loop": 4, "refused": 0}
    assert (
        requests == expected.get(name, 1) or name == "max_time"
    )  # which may be over before the first


def test_the_time_limit_holds_from_the_start_also_where_the_server_is_silent(place: Place) -> None:
    with serve(Reply("Half", cut=2, close="hang")) as server:
        assert place.coder("--max-seconds", "0.1", "go", server=server, timeout=20).returncode == 3


def test_a_flag_goes_before_the_environment(place: Place) -> None:
    with ScriptedServer(turning) as server:
        done = place.coder(
            "--max-steps", "3", "--output-format", "json", "go", server=server, CODER_MAX_STEPS="1"
        )
    assert (done.returncode, json.loads(done.stdout)["stop_reason"], len(server.requests)) == (
        3,
        "max_steps",
        3,
    )


def test_sigint_stops_a_stalled_stream_with_130(place: Place) -> None:
    with serve(Reply("Half an", cut=3, close="hang")) as server:
        child = place.start("--output-format", "stream-json", "go", server=server)
        assert child.stdout
        while '"text_delta"' not in (line := child.stdout.readline()):
            assert line
        sent = time.monotonic()
        child.send_signal(signal.SIGINT)
        rest, errors = child.communicate(timeout=20)
        assert time.monotonic() - sent < 2
    assert (child.returncode, errors) == (130, "")
    end = json.loads(rest.splitlines()[-1])
    assert (end["type"], end["stop_reason"], end["text"]) == (
        "run_end",
        "aborted",
        "Request aborted.",
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_during_a_command_ends_the_command_too(
    place: Place, number: signal.Signals, code: int
) -> None:
    pids = place.ws / "pids"
    with serve(
        Reply(
            "", [("bash", {"command": "sleep 300 & echo $$ $! > pids.new; mv pids.new pids; wait"})]
        )
    ) as server:
        child = place.start("-y", "go", server=server)
        eventually(pids.exists)
        child.send_signal(number)
        out, errors = child.communicate(timeout=20)
    assert (child.returncode, out) == (code, "")
    assert "Traceback" not in errors
    for pid in pids.read_text().split():
        eventually(lambda pid=pid: not alive(int(pid)), 3)


def alive(pid: int) -> bool:
    """Is it a process that has not ended? (One that nobody has waited for yet has ended.)"""
    state = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True
    ).stdout.strip()
    return state not in ("",) and not state.startswith("Z")


# ---- usage and configuration -----------------------------------------------------------------------------


def test_the_program_is_called_as_it_was_started(place: Place) -> None:
    for start, name in (
        ([str(Path(sys.executable).with_name("coder"))], "coder"),
        ([sys.executable, "-m", "coder"], "python -m coder"),
    ):
        for arguments in (["--help"], ["sessions", "--help"], ["--nonsense"]):
            done = subprocess.run(
                [*start, *arguments],
                cwd=place.ws,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert (done.stdout or done.stderr).startswith(f"usage: {name} "), done


def test_a_missing_key_or_model_is_said_in_one_line_with_the_way_to_mend_it(place: Place) -> None:
    assert_one_line(place.coder("hi", OPENAI_MODEL="m"), "no key", "OPENAI_API_KEY", "--demo")
    assert_one_line(place.coder("hi", OPENAI_API_KEY="k"), "no model", "OPENAI_MODEL", "-m")
    assert_one_line(place.coder("hi", OPENAI_BASE_URL="http://127.0.0.1:9/v1"), "no model")


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8080/v1",
        "localhost:8080",
        "http://[::1",
        "http://127.0.0.1:x/v1",
        "http://",
        "ftp://127.0.0.1/",
        "http://127.0.0.1\n.example/",
        "http://127.0.0.1:0/v1",
    ],
)
def test_a_base_url_that_is_no_address_is_said_in_one_line(place: Place, url: str) -> None:
    assert_one_line(
        place.coder("hi", OPENAI_BASE_URL=url, OPENAI_MODEL="m"),
        "OPENAI_BASE_URL",
        "http://127.0.0.1:8080/v1",
    )
    assert_one_line(
        place.coder("--base-url", url, "hi", OPENAI_API_KEY="k", OPENAI_MODEL="m"),
        "OPENAI_BASE_URL",
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["-C", "nowhere"],
        ["-C", "a-file"],
        ["-i", "hi"],
        ["--max-steps", "-1", "hi"],
        ["--idle-timeout", "nan", "hi"],
        ["--context-window", "-5", "hi"],
    ],
)
def test_a_flag_that_cannot_be_met_is_said_in_one_line(place: Place, arguments: list[str]) -> None:
    (place.ws / "a-file").touch()
    assert_one_line(
        place.coder(*arguments, OPENAI_BASE_URL="http://127.0.0.1:9/v1", OPENAI_MODEL="m")
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nonsense"],
        ["--max-steps", "many"],
        ["--output-format", "xml", "hi"],
        ["-C"],
        ["demo", "--port", "99999"],
        ["demo", "--port", "x"],
        ["demo", "--port", "-1"],
    ],
)
def test_a_bad_flag_shows_the_usage_and_no_traceback(place: Place, arguments: list[str]) -> None:
    done = place.coder(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr.startswith("usage:")
        and "error:" in done.stderr
        and "Traceback" not in done.stderr
    )


def test_version_and_help_need_no_library(place: Place) -> None:
    for flag in ("--version", "--help"):
        done = place.coder(flag, python=["-X", "importtime", "-m", "coder"])
        assert done.returncode == 0 and done.stdout
        loaded = set(re.findall(r"^import time:.*\| +([\w.]+)$", done.stderr, re.M))
        assert "coder.cli.main" in loaded
        assert not {
            name
            for name in loaded
            if name.split(".")[0] in ("openai", "httpx2", "httpx", "rich", "dotenv", "pydantic")
        }
    help_text = done.stdout
    assert "exit codes" in help_text and "--output-format" in help_text
    assert place.coder("--version").stdout == "coder 0.1.0\n"


def test_who_has_only_the_package_gets_the_settings_from_it_and_can_use_what_is_printed(
    place: Place,
) -> None:
    done = place.coder("config")
    assert (done.returncode, done.stderr) == (0, "")
    folder = place.home / ".config/coder"
    folder.mkdir(parents=True)
    with serve(Reply("Hello.")) as server:
        text = done.stdout.replace("OPENAI_BASE_URL=", f"OPENAI_BASE_URL={server.url}")
        (folder / ".env").write_text(text.replace("OPENAI_MODEL=", "OPENAI_MODEL=mine"))
        assert place.coder("hi").stdout == "Hello.\n" and server.requests[0]["model"] == "mine"
    assert "coder config`" in place.coder("--help").stdout
    assert "coder config`" in place.coder("hi", HOME=str(place.temp), OPENAI_MODEL="m").stderr


def test_a_list_of_sessions_needs_no_tools_and_nothing_that_runs_a_model(place: Place) -> None:
    for verb in (["list"], ["search", "x"]):
        done = place.coder("sessions", *verb, python=["-X", "importtime", "-m", "coder"])
        loaded = set(re.findall(r"^import time:.*\| +([\w.]+)$", done.stderr, re.M))
        assert "coder.cli.subcommands" in loaded
        assert not loaded & {
            "coder.cli.app",
            "coder.cli.commands",
            "coder.cli.render",
            "coder.toolset",
            "coder.ai",
            "rich",
        }


def test_help_can_be_read_where_the_terminal_knows_ascii_only(place: Place) -> None:
    done = place.coder("--help", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "exit codes" in done.stdout and done.stderr == ""


# ---- what the model may do -------------------------------------------------------------------------------

CHANGES = [
    ("bash", {"command": "touch made"}),
    ("write", {"path": "new.txt", "content": "x"}),
    ("edit", {"path": "a.txt", "old_string": "old", "new_string": "new"}),
    ("read", {"path": "a.txt"}),
]


def test_without_a_terminal_to_ask_on_nothing_is_changed_and_the_way_to_allow_it_is_named(
    place: Place,
) -> None:
    (place.ws / "a.txt").write_text("old\n")
    read_first = Reply("", [("read", {"path": "a.txt"})])
    with serve(read_first, Reply("", CHANGES), Reply("I may not.")) as server:
        done = place.coder("go", server=server)
        assert_all_valid(server)
    assert sorted(path.name for path in place.ws.iterdir()) == ["a.txt"]
    assert (place.ws / "a.txt").read_text() == "old\n"
    _, bash, write, edit, read = results(server)
    for refused in (bash, write, edit):
        assert refused.startswith("Denied: ") and "-y" in refused and "\n" not in refused
    assert "old" in read
    assert done.stderr.count("  Denied: ") == 3
    assert done.returncode == 0


def test_the_refusal_on_stderr_names_y_for_the_person_too(place: Place) -> None:
    with serve(Reply("", CHANGES[:1]), Reply("I may not.")) as server:
        assert re.search(r"^  Denied: .*-y", place.coder("go", server=server).stderr, re.M)


def test_with_y_it_is_done(place: Place) -> None:
    (place.ws / "a.txt").write_text("old\n")
    with serve(
        Reply("", [("read", {"path": "a.txt"})]), Reply("", CHANGES), Reply("Done.")
    ) as server:
        done = place.coder("-y", "go", server=server)
    assert (done.returncode, done.stdout) == (0, "Done.\n")
    assert sorted(path.name for path in place.ws.iterdir()) == ["a.txt", "made", "new.txt"]
    assert (place.ws / "a.txt").read_text() == "new\n"
    assert "Denied" not in done.stderr + "".join(results(server))


def test_cwd_is_where_everything_happens(place: Place) -> None:
    other = place.ws / "other folder"
    other.mkdir()
    with serve(Reply("", [("bash", {"command": "pwd; touch made"})]), Reply("Done.")) as server:
        done = place.coder("-C", "other folder", "-y", "go", server=server)
    assert done.returncode == 0
    assert results(server) == [str(other)] and (other / "made").exists()
    assert f"Workspace: {other}\n" in server.requests[0]["messages"][0]["content"]


def test_the_system_prompt_can_be_replaced_and_added_to(place: Place) -> None:
    with serve(Reply("Done.")) as server:
        place.coder("--system-prompt", "You are a test.", "-m", "other", "go", server=server)
        place.coder("--append-system-prompt", "Speak Latin.", "go", server=server)
    replaced, added = [request["messages"][0] for request in server.requests]
    assert replaced == {"role": "system", "content": "You are a test."}
    assert (
        added["role"] == "system"
        and added["content"].startswith("You are coder")
        and added["content"].endswith("\n\nSpeak Latin.")
    )
    assert [request["model"] for request in server.requests] == ["other", "m"]


def test_an_addition_is_not_lost_where_the_system_prompt_is_replaced(place: Place) -> None:
    with serve(Reply("Done.")) as server:
        place.coder(
            "--system-prompt",
            "You are a test.",
            "--append-system-prompt",
            "Speak Latin.",
            "go",
            server=server,
        )
    assert server.requests[0]["messages"][0]["content"] == "You are a test.\n\nSpeak Latin."


# ---- bad surroundings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        "$CODER --output-format stream-json hi | head -1",
        "$CODER hi 2>&1 | true",
        "$CODER --output-format json hi | head -c 1",
    ],
)
def test_a_reader_that_leaves_early_gives_no_traceback(place: Place, command: str) -> None:
    with serve(Reply("word " * 3000, [("ls", {})]), Reply("w" * 200_000)) as server:
        done = place.shell(f"{command}; echo ${{PIPESTATUS[0]}} >&2", server)
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    assert done.stderr.splitlines()[-1] in ("0", "1")
    if "head -1" in command:
        assert json.loads(done.stdout)["type"] == "run_start" and done.stdout.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_is_said_in_one_line(place: Place) -> None:
    with serve(Reply("Hello.")) as server:
        done = place.shell("$CODER -q hi > /dev/full", server)
    assert (done.returncode, done.stderr) == (
        1,
        "coder: the output cannot be written: No space left on device\n",
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
@pytest.mark.parametrize(
    "stderr",
    ["2> /dev/full", "2>&-", "2< /dev/null", "2> >(true)", "2> /dev/full < /dev/null | cat"],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_progress_that_cannot_be_written_costs_no_answer(
    place: Place, stderr: str, unbuffered: str
) -> None:
    with serve(
        Reply("First.", [("ls", {})]),
        Reply("Then.", [("bash", {"command": "seq 9"})]),
        Reply("The answer."),
    ) as server:
        done = place.shell(
            f"$CODER -y go {stderr}; echo $?${{PIPESTATUS[0]}}", server, PYTHONUNBUFFERED=unbuffered
        )
    assert (done.stdout, done.stderr) == ("The answer.\n00\n", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "command",
    [
        "sessions",
        "sessions list --all",
        "sessions search question",
        "sessions show ID",
        "sessions fork ID",
        "export ID",
        "export ID --format json",
        "trace run.jsonl",
        "--output-format stream-json hi",
        "hi",
    ],
)
def test_what_cannot_be_written_to_stdout_is_said_in_one_line_and_one(
    place: Place, command: str, unbuffered: str
) -> None:
    with serve(Reply("Hello.")) as server:
        place.coder("--trace", "run.jsonl", "-q", "a question", server=server)
        session_id = place.coder("sessions").stdout.split()[0]
        done = place.shell(
            f"$CODER {command.replace('ID', session_id)} > /dev/full",
            server,
            PYTHONUNBUFFERED=unbuffered,
        )
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if not line.startswith("done")]
    assert said == ["coder: the output cannot be written: No space left on device"]


@pytest.mark.parametrize(
    "arguments",
    [["--trace", "pipe", "hi"], ["trace", "pipe"], ["trace", "run.jsonl", "--html", "pipe"]],
)
def test_a_pipe_with_nobody_at_its_other_end_is_one_line_and_not_waited_for(
    place: Place, arguments: list[str]
) -> None:
    os.mkfifo(place.ws / "pipe")
    with serve(Reply("Hello.")) as server:
        place.coder("--trace", "run.jsonl", "-q", "hi", server=server)
        done = place.coder(*arguments, server=server)
    assert_one_line(
        done,
        "pipe: it is no trace"
        if arguments == ["trace", "pipe"]
        else "pipe: no process reads this pipe",
    )


def test_a_trace_goes_through_pipes_that_have_two_ends(place: Place) -> None:
    with serve(Reply("Hello.")) as server:
        done = place.shell(
            "$CODER --trace >(cat > copy.jsonl) -q hi && sleep 0.2 && $CODER trace <(sleep 0.2; cat copy.jsonl)",
            server,
        )
    assert (
        done.returncode == 0
        and "run 1 of 1" in done.stdout
        and (done.stderr, done.stdout[:7]) == ("", "Hello.\n")
    )


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("hi", 2),
        ("sessions", 2),
        ("export abc", 2),
        ("--trace x.jsonl hi", 2),
        ("-C . hi", 2),
        ("--version", 0),
        ("sessions --help", 0),
        ('-C "$HOME" hi', 0),
        ("--demo", 0),
    ],
)
def test_a_folder_that_was_removed_is_one_line_where_it_is_needed(
    place: Place, command: str, code: int
) -> None:
    with serve(Reply("Hello.")) as server:
        done = place.shell(f"mkdir gone && cd gone && rmdir ../gone && $CODER {command}", server)
    assert done.returncode == code, done.stderr
    if code:
        assert (done.stdout, done.stderr.count("\n")) == (
            "",
            1,
        ) and "no longer exists" in done.stderr
    else:
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("home", ["relative", "./relative", ""])
@pytest.mark.parametrize("command", [["hi"], ["sessions"], ["export", "abc"]])
def test_a_home_that_is_no_absolute_path_is_one_line_and_nothing_is_read_there(
    place: Place, home: str, command: list[str]
) -> None:
    config = place.ws / "relative" / ".config" / "coder"
    config.mkdir(parents=True)
    (config / ".env").write_text("CODER_MAX_STEPS=many\n")
    with serve(Reply("Hello.")) as server:
        assert_one_line(
            place.coder(*command, server=server, HOME=home), f"HOME is '{home}'", "absolute path"
        )
    assert [*(place.ws / "relative").rglob("*")] == [
        config.parent,
        config,
        config / ".env",
    ] and not server.requests


def test_a_clock_that_shows_a_time_before_1970_stops_nothing(place: Place) -> None:
    (place.home / "sitecustomize.py").write_text(
        "import time\ntime.time = lambda: -1e8\ntime.time_ns = lambda: -10**17\n"
    )
    early = f"{place.home}:{ROOT}"
    with serve(Reply("First.", [("bash", {"command": "echo hi > a"})]), Reply("Hello.")) as server:
        done = place.coder("-y", "--trace", "run.jsonl", "hi", server=server, PYTHONPATH=early)
        assert (done.returncode, done.stdout) == (0, "Hello.\n")
        again = place.coder("-q", "-c", "again", server=server, PYTHONPATH=early)
        assert (again.returncode, again.stderr, asked(server, -1)) == (0, "", "again")
    session_id = place.coder("sessions").stdout.split()[0]
    for command in (
        ["sessions"],
        ["sessions", "search", "hi"],
        ["export", session_id],
        ["trace", "run.jsonl"],
    ):
        done = place.coder(*command, PYTHONPATH=early)
        assert done.returncode == 0 and done.stdout and not done.stderr


def bad_instructions(path: Path, kind: str) -> None:
    match kind:
        case "no regular file":
            os.mkfifo(path)
        case "leads out of the repository":
            path.symlink_to("/etc/hostname")
        case "No such file":
            path.symlink_to("nowhere")
        case "symbolic links":
            path.symlink_to(path)


@pytest.mark.parametrize(
    "kind", ["no regular file", "leads out of the repository", "No such file", "symbolic links"]
)
def test_a_file_of_instructions_that_cannot_be_taken_is_told_of_once(
    place: Place, kind: str
) -> None:
    (place.ws / "sub").mkdir()
    (place.ws / "sub" / "a").write_text("content\n")
    for folder in (place.ws, place.ws / "sub"):
        bad_instructions(folder / "AGENTS.md", kind)
    with serve(
        *[Reply("", [("read", {"path": "sub/a", "limit": number})]) for number in (1, 2)],
        Reply("Hello."),
    ) as server:
        done = place.coder("go", server=server)
        assert (done.returncode, done.stdout) == (0, "Hello.\n")
    said = [line for line in done.stderr.splitlines() if "is ignored" in line]
    assert [line.split(" is ignored")[0] for line in said] == [
        "AGENTS.md",
        "sub/AGENTS.md",
    ] and all(kind in line for line in said)


PRESS = """
import os, signal, sys

def press(frame, event, argument, wanted=os.environ["PRESS"].split(",")):
    if event == "call" and frame.f_code.co_name == wanted[0] and (wanted[1] in sys.modules or not wanted[1]):
        sys.setprofile(None)
        os.kill(os.getpid(), signal.SIGINT)

sys.setprofile(press)
"""


@pytest.mark.parametrize(
    "moment",
    [
        "getsignal,",
        "main,coder.cli.main",
        "format_usage,argparse",
        "cb,coder.cli.main",
        "cb,coder.cli.app",
        "load,coder.cli.config",
        "build_app,",
        "open_conversation,",
        "__init__,coder.cli.conversation",
    ],
)
def test_ctrl_c_while_the_program_starts_ends_it_at_once_without_a_word(
    place: Place, moment: str
) -> None:
    (place.home / "sitecustomize.py").write_text(
        PRESS
    )  # a press of the key, just where this function is called
    with serve(Reply("Hello.")) as server:
        done = place.coder("hi", server=server, PYTHONPATH=f"{place.home}:{ROOT}", PRESS=moment)
    assert (done.returncode, done.stdout, server.requests, list(place.temp.iterdir())) == (
        130,
        "",
        [],
        [],
    )
    assert done.stderr in ("", f"m at {server.url.split('/')[2]}\n")


@pytest.mark.parametrize(
    "env", [{"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
def test_a_locale_without_other_letters_gives_no_traceback(
    place: Place, env: dict[str, str]
) -> None:
    calls = [
        ("bash", {"command": "echo \N{SNOWMAN} ä"}),
        ("write", {"path": "ü.txt", "content": "中\n"}),
    ]
    with serve(Reply("Zuerst ä.", calls), Reply("Grün 中 \ud83d.")) as server:
        done = place.shell("$CODER -y größe $'a\\xff\\xfeb'", server, **env)
        assert_all_valid(server)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert done.stdout in ("Grün 中 \N{REPLACEMENT CHARACTER}.\n", "Gr?n ? ?.\n")
    assert re.fullmatch(r"gr.+e a.+b", asked(server))


# ---- the key and the conversation stay where they belong --------------------------------------------------


@pytest.mark.case("NET-12")
def test_a_redirect_is_not_followed_and_the_other_server_sees_nothing(place: Place) -> None:
    with serve(Reply("I am evil.")) as evil:
        with serve(
            Reply("moved", status=307, headers={"location": f"{evil.url}/chat/completions"})
        ) as server:
            done = place.coder("hi", server=server, OPENAI_API_KEY="secret")
        assert (evil.connections, evil.requests) == (0, [])
    assert (done.returncode, done.stdout, len(server.requests)) == (1, "", 1)
    assert "redirects to" in done.stderr and "not followed" in done.stderr.replace("\n", " ")
    assert "secret" not in done.stderr


STRANGER = "import pathlib\nwith pathlib.Path(__file__).parent.joinpath('IMPORTED').open('a') as f:\n    print(__name__, file=f)\n"
CONSOLE_SCRIPT = "import sys\nfrom coder.__main__ import main\nif __name__ == '__main__':\n    sys.exit(main())\n"  # as pip writes it


@pytest.mark.case("SEC-04")
@pytest.mark.parametrize("way", ["python -m coder", "python -P -m coder", "the console script"])
def test_modules_that_lie_in_the_folder_are_not_imported(place: Place, way: str) -> None:
    strangers = [
        "rich",
        "dotenv",
        "json",
        "openai",
        "httpx2",
        "argparse",
        "subprocess",
        "socket",
        "re",
        "typing",
        "ctypes",
        "resource",
    ]
    if (
        way != "python -m coder"
    ):  # without -P, Python itself looks in the folder first: for the package and what it finds that with
        strangers += ["coder", "importlib"]
    for name in strangers:
        (place.ws / name).mkdir()
        (place.ws / name / "__init__.py").write_text(STRANGER.replace("parent", "parents[1]"))
        (place.ws / f"{name}.py").write_text(STRANGER)
    (place.ws / ".env").write_text("CODER_MAX_STEPS=7\n")
    script = place.home / "coder"
    script.write_text(CONSOLE_SCRIPT)
    python = {
        "python -m coder": ["-m", "coder"],
        "python -P -m coder": ["-P", "-m", "coder"],
        "the console script": [str(script)],
    }[way]
    calls = [
        ("bash", {"command": "echo hi"}),
        ("grep", {"pattern": "x"}),
        ("write", {"path": "n", "content": "n\n"}),
    ]
    with serve(Reply("", calls), Reply("Done.")) as server:
        done = place.coder("-y", "go", server=server, python=python)
    assert (done.returncode, done.stdout) == (0, "Done.\n"), done.stderr
    assert not (place.ws / "IMPORTED").exists(), (place.ws / "IMPORTED").read_text()


def test_commands_of_the_users_are_hooks_and_those_of_a_folder_are_not(place: Place) -> None:
    folder = place.home / ".config" / "coder"
    folder.mkdir(parents=True)
    hooks = '{"before_tool_call": [{"command": "echo no ls today >&2; exit 2", "tools": "^ls$"}]}'
    replies = [Reply("", [("ls", {"path": "."})]), Reply("fine")]
    for at, blocked in ((place.ws / "hooks.json", False), (folder / "hooks.json", True)):
        at.write_text(hooks)
        with ScriptedServer(replies) as server:
            done = place.coder("go", server=server)
            assert (
                done.returncode == 0
                and ("no ls today" in str(server.requests[1]["messages"][-1])) == blocked
            )
    (folder / "hooks.json").write_text("{oops")
    with ScriptedServer(replies) as server:
        done = place.coder("go", server=server)
    assert done.returncode == 2 and "hooks.json: " in done.stderr and "Traceback" not in done.stderr
