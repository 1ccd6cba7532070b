"""The command line from outside: one task, its answer on stdout, its exit code; flags, formats for
programs, bad surroundings.

`Place.run` runs it in this process; `Place.coder` and `Place.shell` start the program, where the
process is what matters.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import os
import re
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from coder import __version__
from coder.cli.main import run
from coder.cli.one_shot import finish
from coder.devtools.scripted import Body, Reply, ScriptedServer
from coder.types import RunResult, Usage
from tests.harness import assert_all_valid, results, serve

ROOT = Path(__file__).parents[1]
FOUR_LS = [Reply("Once more.", [("ls", {})])]
Done = subprocess.CompletedProcess[str]


class Place:
    """A folder to work in, a home with nothing in it, and the program started there."""

    def __init__(self, folder: Path) -> None:
        self.ws = folder / "ws"
        self.home = folder / "home"
        self.temp = folder / "temp"
        self.config = self.home / ".config" / "coder"
        for each in (self.ws, self.home, self.temp):
            each.mkdir(parents=True)

    def env(self, server: ScriptedServer | None = None, **more: str) -> dict[str, str]:
        """Nothing of the user who runs the tests: no key, no proxy, no settings."""
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "TMPDIR": str(self.temp),
        }
        env |= {"LANG": "C.UTF-8", "PYTHONPATH": str(ROOT)}
        if server:
            env |= {"OPENAI_BASE_URL": server.url, "OPENAI_MODEL": "m", "CODER_RETRY_BASE": "0.01"}
        return env | more

    def run(
        self,
        *arguments: str,
        server: ScriptedServer | None = None,
        stdin: bytes | None = None,
        **env: str,
    ) -> Done:
        """Run it in this process, with a file or the null device as stdin."""
        (given := self.temp / "stdin").write_bytes(stdin or b"")
        out = io.StringIO()
        errors = io.StringIO()
        factory = logging.getLogRecordFactory()
        with contextlib.ExitStack() as stack:
            stack.callback(logging.setLogRecordFactory, factory)
            stack.callback(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT))
            stack.callback(given.unlink)
            stack.enter_context(contextlib.chdir(self.ws))
            stack.enter_context(
                mock.patch.dict(
                    os.environ,
                    self.env(server, **env),
                    clear=True,
                )
            )
            file = stack.enter_context(open(given if stdin is not None else os.devnull))
            stack.enter_context(mock.patch.object(sys, "stdin", file))
            stack.enter_context(contextlib.redirect_stdout(out))
            stack.enter_context(contextlib.redirect_stderr(errors))
            try:
                code = run(arguments)
            except SystemExit as end:
                code = int(end.code or 0)
        return subprocess.CompletedProcess(arguments, code, out.getvalue(), errors.getvalue())

    def coder(
        self,
        *arguments: str,
        server: ScriptedServer | None = None,
        python: Sequence[str] = ("-m", "coder"),
        **env: str,
    ) -> Done:
        """Start the program, with the null device as stdin, and wait for its end."""
        argv = [sys.executable, *python, *arguments]
        env = self.env(server, **env)
        options: dict[str, Any] = {
            "cwd": self.ws,
            "env": env,
            "stdin": subprocess.DEVNULL,
        }
        options |= {"encoding": "utf-8", "capture_output": True, "timeout": 60}
        return subprocess.run(argv, **options)

    def shell(self, line: str, server: ScriptedServer | None = None, **env: str) -> Done:
        """Run a line of bash in which $CODER is the program."""
        program = "import os, sys; os.execlp('bash', 'bash', '-c', sys.argv[1])"
        env |= {"CODER": f"{sys.executable} -m coder"}
        return self.coder(line, server=server, python=("-c", program), **env)

    def start(self, *arguments: str, server: ScriptedServer | None = None) -> subprocess.Popen[str]:
        """Start the program with pipes, to be waited for by the test."""
        options: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        options |= {"cwd": self.ws, "env": self.env(server), "encoding": "utf-8"}
        return subprocess.Popen([sys.executable, "-m", "coder", *arguments], **options)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def asked(server: ScriptedServer, request: int = 0) -> str:
    """The newest user message of a request."""
    messages = server.requests[request]["messages"]
    return str([message["content"] for message in messages if message["role"] == "user"][-1])


def assert_one_line(done: Done, *words: str) -> None:
    """Usage or configuration: exit code 2 and one clear line."""
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize(
    ("model", "offered"),
    [("m", "edit"), ("gpt-5-mini", "apply_patch")],
)
def test_edit_and_apply_patch_both_run_whichever_the_model_is_offered(
    place: Place, model: str, offered: str
) -> None:
    hunk = "*** Begin Patch\n*** Update File: a\n@@\n-one\n+1\n*** End Patch"
    calls = [
        ("apply_patch", {"patch": hunk}),
        ("edit", dict(path="a", old_string="1", new_string="2")),
    ]
    (place.ws / "a").write_text("one\n")
    with serve(Reply(calls=calls), Reply("done")) as server:
        assert place.run("-y", "-m", model, "go", server=server).stdout == "done\n"
        tools = {each["function"]["name"] for each in server.requests[0]["tools"]}
    assert {"edit", "apply_patch"} & tools == {offered}
    assert (place.ws / "a").read_text() == "2\n"


# ---- what goes where -----------------------------------------------------------------------------


def test_stdout_is_the_final_text_alone_and_everything_else_is_on_stderr(place: Place) -> None:
    (folder := place.ws / "other folder").mkdir()
    (folder / "a.txt").write_text("content of a\n" * 30)
    look = Reply("First I look.", [("read", {"path": "a.txt"})], reasoning="hmm")
    with serve(look, Reply("The answer.\nTwo lines.")) as server:
        verbose = place.run("-v", "-C", "other folder", "go", server=server).stderr
        assert "hmm" in verbose
        assert verbose.count("content of a") == 30
    with serve(look, Reply("The answer.\nTwo lines.")) as server:
        done = place.coder("-C", "other folder", "what is in a.txt?", server=server)
        assert_all_valid(server)
    assert done.returncode == 0
    assert done.stdout == "The answer.\nTwo lines.\n"
    assert done.stderr.splitlines()[:2] == ["First I look.", "● read a.txt · 30 lines"]
    assert "The answer" not in done.stderr
    assert "hmm" not in done.stderr
    assert re.search(r"^done · 2 steps · .* in, .* out · [\d.]+ s$", done.stderr, re.M)
    assert asked(server) == "what is in a.txt?"
    assert "content of a" in results(server)[0]


LS = [("ls", {})]
STEPS, TIME = (f"stopped: the {limit} limit is reached" for limit in ("step", "time"))
WEB_PAGE = Reply(chunks=[b"<html>Hi</html>"], headers={"content-type": "text/html"})
# name: (exit code, requests, replies, flags, stdout, how the reason begins)
ENDINGS: dict[str, tuple[int, int, Any, list[str], str, str]] = {
    "cut": (
        3,
        1,
        [Reply("Half", finish="length")],
        [],
        "Half\n",
        "stopped: the answer reached",
    ),
    "cut at once": (
        3,
        1,
        [Reply("", finish="length")],
        [],
        "",
        "The answer was cut at the output",
    ),
    "steps": (
        3,
        1,
        [Reply("", LS)],
        ["--max-steps=1"],
        "",
        "Max steps reached, task may be",
    ),
    "steps, text": (
        *(
            3,
            2,
            [
                Reply("I look.", LS),
                Reply("", [("ls", {"path": ".."})]),
            ],
            ["--max-steps=2"],
        ),
        *("I look.\n", STEPS),
    ),
    "filter": (
        1,
        1,
        [Reply("", finish="content_filter")],
        [],
        "",
        "The provider's content filter",
    ),
    "repetition": (3, 4, FOUR_LS, [], "Once more.\n", "stopped: the model repeats itself"),
    "a full context": (
        3,
        1,
        [Reply("context_length_exceeded", status=400)],
        [],
        "",
        "Error: ",
    ),
    "401": (
        1,
        1,
        [Reply("no", status=401)],
        [],
        "",
        "Error: the key was rejected: no (HTTP 401).",
    ),
    "404": (
        1,
        1,
        [Reply("no m", status=404)],
        [],
        "",
        "Error: not found: no m at http",
    ),
    "a web page": (1, 1, [WEB_PAGE], [], "", "Error: "),
    "no text": (
        3,
        2,
        [Reply("")],
        [],
        "",
        "The model answered nothing.",
    ),
    "429": (
        75,
        5,
        [Reply("slow", status=429)],
        [],
        "",
        "Failed after 5 errors: too many requests",
    ),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_every_end_has_its_exit_code_its_stdout_and_its_reason(place: Place, name: str) -> None:
    code, requests, replies, flags, stdout, reason = ENDINGS[name]
    with ScriptedServer(replies) as server:
        done = place.run("-q", *flags, "go", server=server)
        assert len(server.requests) == requests
    assert done.returncode == code, done.stderr
    assert done.stdout == stdout, done.stderr
    assert done.stderr.startswith(reason), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize(
    ("answer", "reason"),
    [("Half", TIME), ("", "Time limit of 1 s reached")],
)
def test_a_run_that_took_too_long_prints_what_it_has(
    capsys: pytest.CaptureFixture[str], answer: str, reason: str
) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": answer},
    ]
    result = RunResult("max_time", "Time limit of 1 s reached", messages, Usage(), 1)
    assert finish(Namespace(output_format="text", quiet=True), result) == 3
    said = capsys.readouterr()
    assert said.out == (f"{answer}\n" if answer else "")
    assert said.err == f"{reason}\n"


def test_the_name_of_a_subcommand_or_flag_is_a_prompt_if_it_is_meant_so(place: Place) -> None:
    with serve(Reply("Hello.")) as server:
        for words in (
            ["-p", "export", "it"],
            ["export the table"],
            ["fix", "the", "tests"],
        ):
            assert place.run(*words, server=server).stdout == "Hello.\n"
            assert asked(server, -1) == " ".join(words).removeprefix("-p ")
        place.run("-q", "--", "--version", server=server)
        assert asked(server, -1) == "--version"
        for words in (
            ["export", "the", "table"],
            ["config", "x"],
            ["sessions", "lst"],
        ):
            assert place.run(*words, server=server).returncode == 2
    assert len(server.requests) == 4


def test_nothing_that_drives_a_terminal_is_on_stderr_if_it_is_a_pipe(place: Place) -> None:
    calls = [("bash", {"command": "printf 'x\\033[31my\\007'; exit 3"}), ("nothing", {})]
    calls += [("write", {"path": "n.txt", "content": "a\n"})]
    with serve(Reply("I \x1b[1mlook.", calls), Reply("bad\x1b[2J", status=400)) as server:
        done = place.run("-y", "go", server=server, TERM="xterm-256color")
    assert {c for c in done.stderr if not c.isprintable()} == {"\n"}
    assert done.returncode == 1
    assert "xy" in done.stderr
    assert "1 + a" in done.stderr


def test_stdin_alone_is_the_prompt_and_next_to_one_its_context(place: Place) -> None:
    context = "explain this\n\n<stdin>\nline 1\nline 2\n\n</stdin>"
    with serve(Reply("Hello.")) as server:
        for words, stdin, expected in (
            ([], b"say hello\n", "say hello"),
            (["explain", "this"], b"line 1\nline 2\n", context),
            (["-p"], b"caf\xc3\xa9 \xff\n", "café \N{REPLACEMENT CHARACTER}"),
        ):
            done = place.run(*words, server=server, stdin=stdin)
            assert done.returncode == 0
            assert done.stdout == "Hello.\n"
            assert asked(server, -1) == expected


@pytest.mark.parametrize("command", ["$CODER </dev/null", "$CODER -p <&-", "$CODER <&- >&-"])
def test_no_prompt_and_nothing_on_stdin_is_reported_at_once(place: Place, command: str) -> None:
    assert_one_line(place.shell(command), "nothing to do", "PROMPT")


def test_more_on_stdin_than_a_model_can_read_is_cut_and_reported(place: Place) -> None:
    with serve(Reply("Hello.")) as server:
        done = place.shell("yes | $CODER", server)
    assert done.returncode == 0
    assert done.stdout == "Hello.\n"
    assert "only the first 400,000 bytes" in done.stderr
    assert asked(server).startswith("y\ny\n")
    assert asked(server).endswith("[cut after 400000 bytes]")


def test_a_prompt_with_a_closed_stdin_or_stdout_runs(place: Place) -> None:
    first = Reply("Hello.", [("bash", {"command": "echo from bash"})])
    with serve(first, Reply("Hello.")) as server:
        done = place.shell("$CODER -y hi <&- && $CODER hi <&- >&- 2>&-; echo $?", server)
    assert done.stdout == "Hello.\n0\n"
    assert "Traceback" not in done.stderr
    assert server.requests[1]["messages"][-1]["content"] == "from bash"


def test_an_open_stdin_is_reported_and_read_until_it_ends_or_a_signal_comes(place: Place) -> None:
    with serve(Reply("Hello.")) as server:
        first, second = (place.start(server=server) for _ in range(2))
        assert first.stdin
        first.stdin.write("say ")  # as `tail -f` does: something, and no end
        first.stdin.flush()
        for child in (first, second):
            assert child.stderr
            assert "waiting for the end of stand" in child.stderr.readline()
        assert server.requests == []
        second.send_signal(signal.SIGTERM)
        out, errors = second.communicate(timeout=20)
        assert (second.returncode, out) == (143, "")
        assert "Traceback" not in errors
        assert first.communicate("hello", timeout=20)[0] == "Hello.\n"
    assert first.returncode == 0
    assert asked(server) == "say hello"
    assert len(server.requests) == 1


def test_a_late_signal_of_the_clock_ends_nothing(place: Place) -> None:
    with serve(Reply("Hello.")) as server:
        child = place.start(server=server)
        assert child.stderr
        assert "waiting for the end of stand" in child.stderr.readline()
        child.send_signal(signal.SIGALRM)  # no run, so that the clock is off
        assert child.communicate("hello", timeout=20)[0] == "Hello.\n"
    assert child.returncode == 0


# ---- the formats for programs --------------------------------------------------------------------

RUN_END = {"stop_reason", "text", "usage", "steps", "error"}
USAGE = {"input", "output", "cached", "reasoning", "estimated", "cost"}


def test_json_is_one_object_with_the_named_fields(place: Place) -> None:
    with serve(
        Reply(
            "no such key",
            status=401,
            headers={"x-request-id": "r7"},
        )
    ) as server:
        done = place.run("--output-format", "json", "-q", "hi", server=server)
    assert done.returncode == 1
    assert done.stderr == ""
    end = json.loads(done.stdout)
    error = {"kind": "auth", "message": "no such key", "status": 401, "request_id": "r7"}
    assert end["error"] == error
    assert (end["stop_reason"], end["steps"]) == ("error", 1)
    with serve(
        Reply("First.", [("ls", {})]),
        Reply("Café.\n"),
    ) as server:
        done = place.run("--output-format", "json", "hi", server=server)
    assert done.returncode == 0
    assert re.fullmatch(".*Café.*\n", done.stdout)
    end = json.loads(done.stdout)
    assert set(end) == RUN_END | {"session_id", "messages"}
    assert set(end["usage"]) == USAGE
    assert [end[name] for name in ("stop_reason", "text", "steps", "error")] == [
        *("stop", "Café.\n", 2, None)
    ]
    roles = [message["role"] for message in end["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert "● ls" in done.stderr


@pytest.mark.parametrize("output_format", ["json", "stream-json"])
def test_json_has_no_text_if_the_model_answered_nothing(place: Place, output_format: str) -> None:
    with serve(Reply(""), Reply("")) as server:
        done = place.run("--output-format", output_format, "-q", "hi", server=server)
    assert done.returncode == 3
    assert done.stderr == "The model answered nothing.\n"
    end = json.loads(done.stdout.splitlines()[-1])
    assert end["text"] == ""
    assert (end["stop_reason"], end["error"]) == ("stop", None)


def test_stream_json_of_a_run_with_tools(place: Place) -> None:
    command = "for i in 1 2 3; do echo $i; sleep 0.15; done"
    first = Reply("I run it.", [("bash", {"command": command})], reasoning="hm")
    with serve(first, Reply("Hello, \N{GRINNING FACE}.")) as server:
        done = place.run("--output-format", "stream-json", "-y", "hi", server=server)
    assert done.returncode == 0
    assert done.stderr == ""
    events = [json.loads(line) for line in done.stdout.splitlines()]
    kinds = [event["type"] for event in events if event["type"] not in ("status", "tool_update")]
    message = ["message_start", "message_end"]
    # Deltas of a kind folded
    assert [kind for kind, _ in itertools.groupby(kinds)] == [
        *("run_start", "step_start", *message, "message_start", "reasoning_delta", "text_delta"),
        *("tool_call_delta", "message_end", "tool_start", "tool_end", *message, "step_end"),
        *("step_start", "message_start", "text_delta", "message_end", "step_end", "run_end"),
    ]
    by_type = {event["type"]: event for event in events}
    start = by_type["tool_start"]
    end = by_type["tool_end"]
    assert set(start) == {"type", "id", "name", "arguments", "title"}
    assert set(by_type["tool_update"]) == {"type", "id", "text"}
    assert set(end) == {"type", "id", "name", "result", "is_error", "seconds"}
    step = {"type", "message", "tool_results", "finish_reason", "usage"}
    assert set(by_type["step_end"]) == step
    assert end["result"]["content"] == "1\n2\n3"
    assert start["id"] == end["id"]
    assert set(events[-1]) == RUN_END | {"type"}
    assert set(events[-1]["usage"]) == USAGE
    said = by_type["message_end"]["message"]["content"]
    assert events[-1]["text"] == said == "Hello, \N{GRINNING FACE}."


@pytest.mark.parametrize("output_format", ["json", "stream-json"])
def test_a_run_for_programs_names_its_conversation(place: Place, output_format: str) -> None:
    form = ("--output-format", output_format)
    with serve(Reply("Hello.")) as server:
        kept, not_kept = (
            json.loads(
                place.run(
                    *form,
                    *flags,
                    "hi",
                    server=server,
                ).stdout.splitlines()[0]
            )
            for flags in ([], ["--no-session"])
        )
        if output_format == "stream-json":
            facts = {"type": "run_start", "model": "m", "cwd": str(place.ws)}
            facts |= {"version": __version__, "session_id": kept["session_id"]}
            assert kept == facts
        assert not_kept["session_id"] is None
        again = place.run("-r", kept["session_id"], "and now?", server=server)
        assert again.returncode == 0
        assert len(server.requests[-1]["messages"]) == 4


# ---- usage and configuration ---------------------------------------------------------------------


NINE = {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1", "OPENAI_MODEL": "m"}
# words -> (what the environment adds, what the line says)
ONE_LINE: dict[str, tuple[dict[str, str], list[str]]] = {
    "hi": ({"OPENAI_MODEL": "m"}, ["no key", "OPENAI_API_KEY", "--demo"]),
    "hello": ({"OPENAI_API_KEY": "k"}, ["no model: set OPENAI_MODEL, or use -m NAME\n"]),
    "-C nowhere": (NINE, ["--cwd nowhere: No such file"]),
    "-i hi": (NINE, ["-i needs a terminal"]),
    "hi 2": (NINE | {"CODER_HEADERS": "{oops"}, ["CODER_HEADERS"]),
    "--max-steps -1 hi": (NINE, ["--max-steps: '-1' has to be"]),
    "--base-url 127.0.0.1:80 hi": (NINE, ["--base-url: ", "such as http://127.0.0.1"]),
    "-r hi": (NINE, ["nothing to do"]),
    "--trace gone/t hi": (NINE, ["--trace gone/t: No such file"]),
    "--image gone.png -C nowhere hi": (NINE, ["gone.png: No such file"]),
    "--agent none hi": (NINE, ["no agent 'none'"]),
    "--output-format=json -r zzz hi": (NINE, ["There is no session 'zzz'"]),
}


@pytest.mark.parametrize("words", ONE_LINE)
def test_what_cannot_be_met_is_one_line_with_the_way_to_mend_it(place: Place, words: str) -> None:
    env, said = ONE_LINE[words]
    assert_one_line(place.run(*words.split(), **env), *said)


def test_what_runs_no_model_imports_no_library(place: Place) -> None:
    traced = ["-X", "importtime", "-m", "coder"]
    libraries = {"openai", "httpx2", "httpx", "rich", "dotenv", "pydantic"}
    # Slow ones of Python's, where there is only a help to print; a list of sessions needs nothing
    # that runs a model
    slow = {"dataclasses", "inspect", "json", "traceback", "coder.types"}
    unused = {f"coder.{name}" for name in ("session", "parts", "cli.commands", "toolset", "ai")}
    for words, others in ("--help", slow), ("sessions --all", unused):
        done = place.coder(*words.split(), python=traced, PYTHONIOENCODING="ascii")
        loaded = set(re.findall(r"^import time:.*\| +([\w.]+)$", done.stderr, re.M))
        assert done.returncode == 0
        assert "coder.cli.main" in loaded
        assert not libraries & {name.split(".")[0] for name in loaded}
        assert not others & loaded
    imports = "import sys, coder.cli.main, coder.cli.input, coder.cli.screen; print(*sys.modules)"
    at_prompt = place.coder(python=["-c", imports]).stdout.split()
    assert "coder.cli.keys" in at_prompt
    assert not {"dataclasses", "coder.types"} & {*at_prompt}
    assert place.run("--version").stdout == f"coder {__version__}\n"


def test_config_shows_values_and_sources_and_is_a_file_to_start_from(place: Place) -> None:
    place.config.mkdir(parents=True)
    (place.config / ".env").write_text('CODER_MAX_STEPS=7\nCODER_EXTRA_BODY=\'{"a": "b\\\'c"}\'\n')
    with serve(Reply("Hello.")) as server:
        done = place.run("config", server=server, OPENAI_API_KEY="sk-1234567890")
        assert (done.returncode, done.stderr) == (0, "")
        assert "1234567890" not in done.stdout
        lines = done.stdout.splitlines()
        for name, value, source in (
            ("CODER_MAX_STEPS", "7", "your .env"),
            ("OPENAI_MODEL", "m", "the environment"),
            ("CODER_IDLE_TIMEOUT", "", ""),
        ):
            at = lines.index(f"{name}={value}")
            assert lines[at - 1].endswith(f"; from {source}") is bool(source)
        (place.config / ".env").write_text(done.stdout)
        assert place.run("hi").stdout == "Hello.\n"
    body = server.requests[0]
    assert body["model"] == "m"
    assert body["a"] == "b'c"
    assert "# Missing or wrong: no key" in place.run("config", HOME=str(place.temp)).stdout


# ---- what the model may do -----------------------------------------------------------------------

CHANGES = [
    ("bash", {"command": "touch made"}),
    ("write", {"path": "new.txt", "content": "x"}),
    ("edit", {"path": "a.txt", "old_string": "old", "new_string": "new"}),
    ("read", {"path": "a.txt"}),
]


@pytest.mark.parametrize("yolo", [False, True])
def test_without_a_terminal_nothing_is_changed_but_with_y(place: Place, yolo: bool) -> None:
    (place.ws / "a.txt").write_text("old\n")
    read_first = Reply("", [("read", {"path": "a.txt"})])
    with serve(read_first, Reply("", CHANGES), Reply("Well.")) as server:
        done = place.run(*["-y"] * yolo, "go", server=server)
        assert_all_valid(server)
    assert done.returncode == 0
    assert done.stdout == "Well.\n"
    _, *refused, read = results(server)
    names = sorted(path.name for path in place.ws.iterdir())
    if yolo:
        assert names == ["a.txt", "made", "new.txt"]
        assert "new" in read
        assert "Denied" not in done.stderr + "".join(refused)
    else:
        assert names == ["a.txt"]
        assert "old" in read
        assert all(each.startswith("Denied: ") and "-y" in each for each in refused)
        assert len(re.findall(r"^  Denied: .*-y", done.stderr, re.M)) == 3


@pytest.mark.parametrize("flags", [[], ["--no-compaction"]])
def test_without_compaction_a_full_context_ends_the_run(place: Place, flags: list[str]) -> None:
    """With it the history is summarised, and the task goes on."""
    full = Reply("context_length_exceeded: too many tokens", status=400)

    def script(body: Body) -> Reply:
        if "tools" not in body:
            return Reply("A summary.")
        return full if "Done." in str(body["messages"]) else Reply("Done.")

    with ScriptedServer(script) as server:
        assert place.run(*flags, "hi " * 3000, server=server).returncode == 0
        done = place.run("-c", *flags, "go on", server=server)
    assert done.returncode == (3 if flags else 0), done.stderr
    assert any("tools" not in request for request in server.requests) is not bool(flags)


# ---- bad surroundings ----------------------------------------------------------------------------


needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
FULL = "coder: the output cannot be written: No space left on device\n"


@needs_full
@pytest.mark.parametrize("stderr", ["2> /dev/full", "2>&-", "2> >(true)"])
def test_progress_that_cannot_be_written_costs_no_answer(place: Place, stderr: str) -> None:
    calls = [("bash", {"command": "seq 9"})]
    with serve(
        Reply("First.", [("ls", {})]),
        Reply("Then.", calls),
        Reply("Answer."),
    ) as server:
        done = place.shell(f"$CODER -y go {stderr}; echo $?${{PIPESTATUS[0]}}", server)
    assert done.stdout == "Answer.\n00\n"
    assert done.stderr == ""


@needs_full
def test_what_cannot_be_written_to_stdout_is_one_line_and_exit_code_one(place: Place) -> None:
    with serve(Reply("Hello.")) as server:
        place.run("--trace", "run.jsonl", "-q", "a question", server=server)
        name = place.run("sessions").stdout.split()[0]
        for command in ("sessions search question", f"export {name}", "trace run.jsonl", "-q hi"):
            unbuffered = "1" if "search" in command else ""
            done = place.shell(f"$CODER {command} >/dev/full", server, PYTHONUNBUFFERED=unbuffered)
            assert done.returncode == 1, command
            assert done.stderr == FULL, command


@pytest.mark.parametrize(
    ("command", "code"),
    [("hi", 2), ("sessions", 2), ('-C "$HOME" hi', 0)],
)
def test_a_removed_folder_is_one_line_if_needed(place: Place, command: str, code: int) -> None:
    with serve(Reply("Hello.")) as server:
        done = place.shell(f"mkdir gone && cd gone && rmdir ../gone && $CODER {command}", server)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    if code:
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1
        assert "no longer exists" in done.stderr


LATE = """
import time

def late():
    raise OverflowError("timestamp too large to convert to C _PyTime_t")

time.time = time.time_ns = late
"""


@pytest.mark.parametrize(
    "command",
    [["hi"], ["sessions"], ["--demo", "hi"]],
)
def test_a_clock_beyond_pythons_own_is_one_line(place: Place, command: list[str]) -> None:
    """What Python 3.11 does in the year 2326, in which logging cannot be imported."""
    (place.temp / "sitecustomize.py").write_text(LATE)
    done = place.coder(*command, PYTHONPATH=str(place.temp))
    assert_one_line(done, "the clock of this machine is later than the year 2261: set it")


PRESS = """
import os, signal, sys

def press(frame, event, argument, wanted=os.environ["PRESS"].split(",")):
    if event == "call" and frame.f_code.co_name == wanted[0] and (wanted[1] in sys.modules or not wanted[1]):
        sys.setprofile(None)
        os.kill(os.getpid(), signal.SIGINT)

sys.setprofile(press)
"""


@pytest.mark.parametrize(
    "moment", ["getsignal,", "main,coder.cli.main", "cb,coder.session", "open_conversation,"]
)
def test_ctrl_c_during_the_start_ends_it_at_once_without_a_word(place: Place, moment: str) -> None:
    (place.home / "sitecustomize.py").write_text(PRESS)  # when this function is called
    with serve(Reply("Hello.")) as server:
        done = place.coder("hi", server=server, PYTHONPATH=f"{place.home}:{ROOT}", PRESS=moment)
    assert done.returncode == 130
    assert done.stdout == ""
    assert server.requests == []
    assert list(place.temp.iterdir()) == []
    assert done.stderr == ""


# ---- the key and the conversation stay where they belong -----------------------------------------


@pytest.mark.case("NET-12")
def test_a_redirect_is_not_followed_and_the_other_server_sees_nothing(place: Place) -> None:
    with serve(Reply("I am evil.")) as evil:
        location = {"location": f"{evil.url}/chat/completions"}
        with serve(Reply("moved", status=307, headers=location)) as server:
            done = place.run("hi", server=server, OPENAI_API_KEY="secret")
        assert evil.connections == 0
        assert evil.requests == []
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(server.requests) == 1
    assert "redirects to" in done.stderr
    assert "not followed" in done.stderr.replace("\n", " ")
    assert "secret" not in done.stderr


STRANGER = (
    "import pathlib\nwith pathlib.Path(__file__).parent.joinpath('IMPORTED').open('a') as f:\n"
    "    print(__name__, file=f)\n"
)
# As pip writes it
CONSOLE_SCRIPT = "import sys\nfrom coder.__main__ import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
STRANGERS = "rich dotenv json openai httpx2 argparse subprocess socket re typing ctypes resource"


@pytest.mark.case("SEC-04")
@pytest.mark.parametrize("way", ["python -m coder", "python -P -m coder", "the console script"])
def test_modules_that_lie_in_the_folder_are_not_imported(place: Place, way: str) -> None:
    strangers = STRANGERS.split()
    if way != "python -m coder":
        # without -P, Python itself looks in the folder first: for the package and what it finds
        # that with
        strangers += ["coder", "importlib"]
    for name in strangers:
        (place.ws / name).mkdir()
        (place.ws / name / "__init__.py").write_text(STRANGER.replace("parent", "parents[1]"))
        (place.ws / f"{name}.py").write_text(STRANGER)
    (place.ws / ".env").write_text("CODER_MAX_STEPS=7\n")
    script = place.home / "coder"
    script.write_text(CONSOLE_SCRIPT)
    python = [str(script)] if "script" in way else way.split()[1:]
    calls = [
        ("bash", {"command": "echo hi"}),
        ("grep", {"pattern": "x"}),
    ]
    calls += [("write", {"path": "n", "content": "n\n"})]
    with serve(Reply("", calls), Reply("Done.")) as server:
        done = place.coder("-y", "go", server=server, python=python)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Done.\n", done.stderr
    assert not (place.ws / "IMPORTED").exists(), (place.ws / "IMPORTED").read_text()
