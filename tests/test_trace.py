"""A run's trace: what is recorded, what never is, how it reads as a table, and that it can serve as the model."""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pexpect
import pytest

from coder.abort import Abort
from coder.ai import ChatModel
from coder.cli.main import main
from coder.devtools.replay import ScriptedModel, difference
from coder.devtools.scripted import Reply, ScriptedServer
from coder.devtools.trace import Trace
from coder.devtools.trace_file import KINDS, Recording, Span, TraceError, read, shares, short
from coder.events import DoomLoop, Event, Notice, RunEnd, ToolEnd
from coder.hooks import FunctionHooks, HookChain, Hooks, implements
from coder.loop import run_loop
from coder.tools.bash import bash
from coder.tools.edit import edit
from coder.tools.files import ls, write
from coder.tools.files import read as read_tool
from coder.toolset import ToolContext, Toolset, tool
from coder.types import ModelError, Request, ToolError, ToolResult
from tests.harness import FAST, drive, serve, types
from tests.terminal import OneShot, Place, Terminal, promptly, until

DELTAS = ("text_delta", "reasoning_delta", "tool_call_delta")
KEY = "sk-CANARY-0123456789"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def of(path: Path, *kinds: str) -> list[dict[str, Any]]:
    return [record for record in lines(path) if record["type"] in kinds]


def recorded(
    path: Path,
    server: ScriptedServer,
    *,
    tools: Any = (ls,),
    hooks: Hooks | None = None,
    prompt: str = "go",
    each: Callable[[Event], None] | None = None,
    model: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[list[Event], Any]:
    """A run that is traced."""
    with Trace(path) as trace:
        chat = ChatModel("m", base_url=server.url, **({"api_key": KEY} | (model or {})))
        trace.attach(chat)
        timed = trace.hooks(hooks) if hooks else None
        return drive(
            trace.watch(
                run_loop([], chat, tools, prompts=prompt, hooks=timed, retry=FAST, **options)
            ),
            each,
        )


def shown(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """`coder trace ...`, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["trace", *map(str, arguments)])
    return subprocess.CompletedProcess([], code, out.getvalue(), err.getvalue())


def table(path: Path) -> list[dict[str, str]]:
    """The rows of the first table that is shown: cells by heading. A cell of words may hold blanks."""
    done = shown(path)
    assert done.returncode == 0, done
    _, head, *rows = done.stdout.split("\n")
    names, ends = head.split(), [found.end() for found in re.finditer(r"\S+", head)]
    starts = [0, *(end + 1 for end in ends[:-1])]
    starts[names.index("finish")], starts[names.index("called")] = (
        head.index("finish"),
        head.index("called"),
    )
    found = []
    for row in rows:
        cells = [row[start:end].strip() for start, end in zip(starts, [*starts[1:], None])]
        found.append(dict(zip(names, cells)))
        if cells[0] == "all":
            return found
    raise AssertionError(done.stdout)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    return home / "run.jsonl"


# ---- what is recorded ----------------------------------------------------------------------------


def test_the_command_line_records_every_request_answer_and_event(
    tmp_path: Path, file: Path
) -> None:
    replies = [
        Reply("Look.", [("ls", {}), ("bash", {"command": "echo hi"})], reasoning="hm"),
        Reply("Dönе ✓."),
    ]
    with (
        serve(*replies) as server,
        OneShot(
            tmp_path, server, "-y", "--trace", str(file), "--output-format", "stream-json", "go"
        ) as run,
    ):
        assert run.end() == 0
        printed = [json.loads(line) for line in run.out.splitlines()]
    records = lines(file)
    assert [record["body"] for record in records if record["type"] == "request"] == server.requests
    assert [record["bytes"] for record in records if record["type"] == "request"] == [
        int(head["content-length"]) for head in server.heads
    ]
    ours = {"trace", "model", "request", "response", "chunk", "response_end", "hook"}
    events = [
        {key: value for key, value in record.items() if key not in ("t", "of")}
        for record in records
        if record["type"] not in ours
    ]
    assert events[0]["type"] == printed[0]["type"] == "run_start"  # with more on stdout
    assert events[1:] == [event for event in printed[1:] if event["type"] not in DELTAS]
    for number, text in ((1, "Look."), (2, "Dönе ✓.")):
        body = "".join(
            record["text"]
            for record in records
            if record["type"] == "chunk" and record["n"] == number
        )
        data = [json.loads(line[6:]) for line in body.split("\n") if line.startswith("data: {")]
        said = "".join(
            choice["delta"].get("content") or "" for each in data for choice in each["choices"]
        )
        assert said == text and body.endswith("data: [DONE]\n\n")
    assert [
        (record["status"], record["headers"]["content-type"]) for record in of(file, "response")
    ] == [(200, "text/event-stream")] * 2
    assert [record["error"] for record in of(file, "response_end")] == [None, None]
    assert ("Permissions", "before_tool_call") in {
        (record["hook"], record["place"]) for record in of(file, "hook")
    }
    assert [record["t"] for record in records] == sorted(
        record["t"] for record in records
    ) and records[0]["t"] == 0
    assert records[0]["type"] == "trace" and stat.S_IMODE(file.stat().st_mode) == 0o600


def test_chunks_are_recorded_when_they_come(file: Path) -> None:
    with serve(Reply("one two three", pace=0.05)) as server:
        recorded(file, server)
    times = [record["t"] for record in of(file, "chunk")]
    assert len(times) >= 5 and times[4] - times[0] >= 0.15
    [exchange] = read(file).exchanges
    assert (
        exchange.first is not None
        and exchange.ended is not None
        and exchange.sent < exchange.chunks[0][0] <= exchange.ended
    )


def test_a_session_records_all_its_runs_and_each_is_a_table_of_its_own(
    tmp_path: Path, file: Path
) -> None:
    with (
        serve(Reply("first"), Reply("second")) as server,
        Terminal(tmp_path, server, "--trace", str(file)) as terminal,
    ):
        terminal.say("one")
        terminal.say("/model other")
        terminal.say("two")
    done = shown(file)
    assert re.findall(r"^run (\d) of 2 · (\w+) at http", done.stdout, re.M) == [
        ("1", "script"),
        ("2", "other"),
    ]
    assert (
        done.stdout.count("\nstep ") == 2
        and "\nstop: first\n" in done.stdout
        and "\nstop: second\n" in done.stdout
    )


def test_an_old_trace_goes_on_in_the_same_file_and_becomes_private(file: Path) -> None:
    for answer in ("first", "second"):
        with serve(Reply(answer)) as server:
            recorded(file, server)
        file.chmod(0o644)
    with serve(Reply("third")) as server:
        recorded(file, server)
    assert [run.why for run in read(file).runs] == ["stop: first", "stop: second", "stop: third"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_retries_and_failures_are_recorded_with_what_can_be_known_of_them(file: Path) -> None:
    limited = Reply("slow down", status=429, headers={"retry-after": "0.01"})
    with serve(limited, Reply("cut", cut=2, close="reset"), Reply("done")) as server:
        recorded(file, server)
    first, second, third = of(file, "response_end")
    assert (first["error"]["kind"], first["error"]["status"], first["error"]["retryable"]) == (
        "rate_limit",
        429,
        True,
    )
    assert (
        first["error"]["retry_after"] == pytest.approx(0.01)
        and second["error"]["kind"] == "network"
        and third["error"] is None
    )
    assert [record["n"] for record in of(file, "response")] == [2, 3]
    assert [record["error"]["kind"] for record in of(file, "retry")] == ["rate_limit", "network"]
    assert table(file)[0]["retries"] == "2" and table(file)[1]["retries"] == "2"


def test_what_a_person_answers_is_recorded_with_the_time_it_took(file: Path) -> None:
    def slowly_allow(event: Event) -> None:
        if isinstance(event, DoomLoop):
            threading.Event().wait(2)
            event.reply(True)

    with serve(*[Reply(calls=[("ls", {})])] * 3, Reply("done")) as server:
        recorded(file, server, each=slowly_allow)
    [reply] = of(file, "reply")
    assert (reply["to"], reply["answer"]) == ("doom_loop", True) and reply["seconds"] >= 2
    third = read(file).runs[0].steps[2].figures
    assert (
        third.seconds["waits"] >= 2 and third.seconds["tools"] < 1.5 and third.seconds["own"] < 1.5
    )


def test_the_questions_about_permissions_and_their_answers_are_recorded(
    tmp_path: Path, file: Path
) -> None:
    with (
        serve(Reply(calls=[("bash", {"command": "touch hi"})]), Reply("done")) as server,
        Terminal(tmp_path, server, "--trace", str(file)) as terminal,
    ):
        terminal.enter("go")
        terminal.expect("or why not: ")
        terminal.settled()
        terminal.say("y")
    asked, reply, replied = of(file, "permission_asked", "reply", "permission_replied")
    assert (asked["pattern"], reply["to"], reply["answer"], replied["answer"]) == (
        "touch hi",
        "permission_asked",
        "once",
        "once",
    )


def test_what_ends_a_run_from_outside_is_recorded(file: Path) -> None:
    with serve(Reply("x")) as server, pytest.raises(RuntimeError), Trace(file) as trace:
        run = trace.watch(run_loop([], ChatModel("m", base_url=server.url), prompts="go"))
        next(run)
        run.throw(RuntimeError("the screen is gone"))
    assert [record["error"] for record in of(file, "raised")] == [
        "RuntimeError: the screen is gone"
    ]
    assert read(file).runs[0].why == "ended by RuntimeError: the screen is gone"


def test_walking_away_from_a_traced_run_closes_the_run_too(file: Path) -> None:
    messages: list[dict[str, Any]] = []
    with serve(Reply(calls=[("ls", {})])) as server, Trace(file) as trace:
        inner = run_loop(messages, ChatModel("m", base_url=server.url), (ls,), prompts="go")
        run = trace.watch(inner)
        for event in run:
            if event.type == "tool_start":
                break
        run.close()
        assert inner.gi_frame is None
    assert messages[-1]["role"] == "tool", "the history is in order"
    assert [record["error"] for record in of(file, "raised")] == ["GeneratorExit"]


# ---- what is never recorded ----------------------------------------------------------------------


@pytest.mark.parametrize("key", [KEY, "key with blanks/and+more=="])
def test_the_key_is_in_no_byte_of_the_file(tmp_path: Path, file: Path, key: str) -> None:
    (tmp_path / "secret.txt").write_text(f"the key is {key}\n")
    said = json.dumps({"said": key})
    raw = (
        b"data: "
        + json.dumps({"choices": [{"delta": {"content": said}, "finish_reason": "stop"}]}).encode()
        + b"\n\ndata: [DONE]\n\n"
    )
    refused = Reply(f"no such key: {key}", status=401)
    told = Reply(f"I was told {key}.", [("read", {"path": "secret.txt"})])
    for reply in [told, Reply(chunks=[b"\xff" + key.encode() + b"\n" + raw])], [refused]:
        with serve(*reply) as server:
            recorded(
                file,
                server,
                tools=Toolset([read_tool], cwd=tmp_path),
                prompt=f"my key is {key}",
                model={"api_key": key},
            )
            assert (
                key in server.requests[0]["messages"][0]["content"]
                and server.heads[0]["authorization"] == f"Bearer {key}"
            )
    data = file.read_bytes()
    decoded = b"".join(
        base64.b64decode(record["base64"]) for record in of(file, "chunk") if "base64" in record
    )
    assert key.encode() not in data and key.encode() not in decoded
    assert b"***" in decoded and data.count(b"***") >= 6
    assert b"uthorization" not in data and b"Bearer" not in data


def test_keys_that_hooks_and_headers_bring_are_not_recorded_either(file: Path) -> None:
    def put(request: Request) -> None:
        request.api_key = "sk-of-a-request"

    hooks = HookChain(
        FunctionHooks(get_api_key=lambda: "sk-of-a-hook"), FunctionHooks(before_llm_call=put)
    )
    with serve(Reply("sk-of-a-hook sk-of-a-request other-token upstream short plainly")) as server:
        recorded(
            file,
            server,
            hooks=hooks,
            model={
                "headers": {
                    "x-token": "other-token",
                    "x-up": "Bearer upstream",
                    "x-key": "short",
                    "x-env": "plainly",
                }
            },
        )
        assert server.heads[0]["authorization"] == "Bearer sk-of-a-request"
    text = file.read_text()
    assert not re.search("sk-of-a|other-token|upstream", text) and "short plainly" in text, (
        "what is short is no secret"
    )


# ---- what may go wrong ---------------------------------------------------------------------------


def test_a_path_that_cannot_be_written_is_one_line_and_nothing_is_asked(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("print('mine')\n")
    (tmp_path / "code.py").chmod(0o644)
    bad = {
        tmp_path: "Is a directory",
        tmp_path / "no" / "run.jsonl": "No such file",
        tmp_path / "code.py": "something else",
    }
    for path, why in bad.items():
        with (
            serve(Reply("x")) as server,
            OneShot(tmp_path, server, "--trace", str(path), "go") as run,
        ):
            assert run.end() == 2 and server.requests == []
            assert (
                run.err.count("\n") == 1
                and run.err.startswith("coder: --trace ")
                and why in run.err
            )
    assert (tmp_path / "code.py").read_text() == "print('mine')\n" and stat.S_IMODE(
        (tmp_path / "code.py").stat().st_mode
    ) == 0o644


def test_a_relative_path_is_where_one_stands_whatever_the_folder_to_work_in(tmp_path: Path) -> None:
    with serve(Reply("x")) as server:
        place = Place(tmp_path, server)
        (place.ws / "sub").mkdir()
        with OneShot(tmp_path, server, "-C", "sub", "--trace", "here.jsonl", "go") as run:
            assert run.end() == 0
    assert (tmp_path / "ws" / "here.jsonl").exists()


def test_a_killed_run_leaves_whole_lines(tmp_path: Path, file: Path) -> None:
    with serve(Reply("one two three", cut=3, close="hang")) as server:
        run = OneShot(tmp_path, server, "--trace", str(file), "go")
        try:
            until(
                lambda: file.exists() and b"two" in file.read_bytes(), "the second word is recorded"
            )
            run.kill(signal.SIGKILL)
            assert run.end() == -signal.SIGKILL
        finally:
            run.stop()
    assert (
        file.read_bytes().endswith(b"}\n")
        and of(file, "chunk")
        and not of(file, "response_end", "run_end")
    )
    done = shown(file)
    assert done.returncode == 0 and "no end: killed, or still at work" in done.stdout


def test_ctrl_c_in_the_middle_of_an_answer_is_in_the_trace(tmp_path: Path, file: Path) -> None:
    with (
        serve(Reply("one two three", cut=3, close="hang")) as server,
        OneShot(tmp_path, server, "--trace", str(file), "go") as run,
    ):
        until(lambda: file.exists() and b"two" in file.read_bytes(), "the second word is recorded")
        run.kill(signal.SIGINT)
        assert run.end() == 130
    assert [record["stop_reason"] for record in of(file, "run_end")] == ["aborted"]
    assert "\naborted: Request aborted.\n" in shown(file).stdout
    _, result = drive(run_loop([], ScriptedModel.from_trace(file), prompts="go", retry=FAST))
    assert result.error and "the trace ends in the middle of this answer" in result.text


def test_sigterm_is_told_as_what_ended_the_run(tmp_path: Path, file: Path) -> None:
    with (
        serve(Reply("one two three", cut=3, close="hang")) as server,
        OneShot(tmp_path, server, "--trace", str(file), "go") as run,
    ):
        until(lambda: file.exists() and b"two" in file.read_bytes(), "the second word is recorded")
        run.kill(signal.SIGTERM)
        assert run.end() == 143
    assert "ended by SystemExit: 143" in shown(file).stdout


def test_two_programs_that_write_to_the_same_file_do_not_tear_lines(
    tmp_path: Path, file: Path
) -> None:
    code = (
        "import sys; from coder.devtools.trace import Trace\n"
        "trace = Trace(sys.argv[1]); input()\n"
        "for number in range(300): trace.record('noted', who=sys.argv[2], number=number, text=sys.argv[2] * 9000)\n"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", code, str(file), who], stdin=subprocess.PIPE)
        for who in "ab"
    ]
    until(lambda: file.exists() and len(file.read_bytes().splitlines()) == 2, "both have begun")
    for child in children:
        assert child.stdin
        child.stdin.write(b"\n")
        child.stdin.close()
    assert [child.wait(60) for child in children] == [0, 0]
    found = of(file, "noted")
    assert len(found) == 600 and all(set(record["text"]) == {record["who"]} for record in found)
    recording = read(file)
    assert not recording.cut and sorted(len(records) for records in recording.traces) == [301, 301]


def test_half_a_surrogate_pair_bytes_that_are_no_text_and_a_huge_chunk_come_back_as_they_were(
    file: Path,
) -> None:
    @tool
    def odd() -> ToolResult:
        """Give something odd."""
        return ToolResult(
            "half \ud83d of a pair", details={"half": "\ude00", "path": Path("/x"), 1: float("inf")}
        )

    big = "x" * 6_000_000
    event = (
        b"data: "
        + json.dumps({"choices": [{"delta": {"content": big}, "finish_reason": "stop"}]}).encode()
        + b"\n\n"
    )
    heart = 'data: {"choices": [{"delta": {"content": "♥"}}]}\n\n'.encode()
    cut = heart.index("♥".encode()) + 1
    with serve(
        Reply(calls=[("odd", {})]),
        Reply(chunks=[b": \xff\xfe\n\n", heart[:cut], heart[cut:], event]),
    ) as server:
        _, result = recorded(file, server, tools=(odd,), prompt="half \udc00")
    received = b"".join(data for _, data in read(file).exchanges[1].chunks)
    assert result.text == "♥" + big and received == b": \xff\xfe\n\n" + heart + event
    assert read(file).exchanges[0].body == server.requests[0]
    [end] = of(file, "tool_end")
    assert end["result"]["details"]["half"] == "\ude00" and "base64" in str(of(file, "chunk"))
    assert (
        shown(file).returncode == 0
        and shown(file, "--html", file.with_suffix(".html")).returncode == 0
    )


def test_details_that_no_file_can_hold_are_told_as_such(file: Path) -> None:
    circle: dict[str, Any] = {}
    circle["itself"] = circle

    @tool
    def odd() -> ToolResult:
        """Give something odd."""
        return ToolResult("fine", details=circle)

    with serve(Reply(calls=[("odd", {})]), Reply("done")) as server:
        _, result = recorded(file, server, tools=(odd,))
    assert result.text == "done" and "unwritable" in of(file, "tool_end")[0]


def test_a_full_disk_ends_the_trace_and_not_the_run() -> None:
    with serve(Reply(calls=[("ls", {})]), Reply("done")) as server:
        events, result = recorded(Path("/dev/full"), server)
    assert result.text == "done"
    assert [event.text for event in events if isinstance(event, Notice)] == [
        "The trace ends here: No space left on device."
    ]


def test_without_the_flag_nothing_of_it_is_loaded(tmp_path: Path) -> None:
    code = (
        "import sys; from coder.cli.main import main\ncode = main(['go'])\n"
        "print(code, [name for name in sys.modules if 'trace_' in name or name == 'coder.devtools.trace'])"
    )
    with serve(Reply("x")) as server:
        place = Place(tmp_path, server)
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=place.ws,
            env=place.environment,
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )
    assert done.stdout.endswith("0 []\n"), done
    assert ChatModel("m").tap is None


# ---- the seams it uses ---------------------------------------------------------------------------


def test_a_tap_of_ones_own_sees_the_bytes_of_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Any] = []

    def tap(sent: bytes) -> Callable[[Any], None]:
        seen.append(json.loads(sent)["messages"][-1]["content"])
        return seen.append

    with serve(Reply("x", status=500), Reply("hello")) as server:
        model = ChatModel("m", base_url=server.url, tap=tap)
        _, result = drive(run_loop([], model, prompts="go", retry=FAST))
        asked, failure, again, response, *chunks, end = seen
        assert result.text == "hello" and (asked, again, end) == ("go", "go", None)
        assert isinstance(failure, ModelError) and failure.status == 500
        assert (
            response.status_code == 200
            and b"hello" in b"".join(chunks)
            and all(isinstance(chunk, bytes) for chunk in chunks)
        )
        model.tap = lambda sent: print
        assert drive(run_loop([], model, prompts="go"))[1].text == "hello"
    assert "[DONE]" in capsys.readouterr().out


def test_hooks_are_timed_one_by_one_without_the_time_of_those_who_read_their_events(
    file: Path,
) -> None:
    def slow(request: Request) -> Iterator[Event]:
        threading.Event().wait(0.05)
        yield Notice("asking")
        threading.Event().wait(0.05)

    asked = itertools.count()

    def wait(event: Event) -> None:
        if isinstance(event, Notice) and next(asked) == 0:
            threading.Event().wait(2)

    class Audit(Hooks):
        def after_tool_call(self, call: Any, result: ToolResult) -> ToolResult:
            return ToolResult(f"seen: {result.content}")

    with serve(Reply(calls=[("ls", {})]), Reply("done")) as server:
        recorded(
            file,
            server,
            hooks=HookChain(FunctionHooks(before_llm_call=slow), HookChain(Audit())),
            each=wait,
        )
        assert server.requests[1]["messages"][-1]["content"].startswith("seen: ")
    hooks = of(file, "hook")
    assert [(record["hook"], record["place"]) for record in hooks] == [
        ("FunctionHooks", "before_llm_call"),
        ("Audit", "after_tool_call"),
        ("FunctionHooks", "before_llm_call"),
    ]
    assert 0.1 <= hooks[0]["seconds"] < 1.5
    step = read(file).runs[0].steps[0].figures
    assert 0.1 <= step.seconds["hooks"] < 1.5 and step.seconds["own"] >= 2


def test_timed_hooks_do_nothing_where_the_hook_does_nothing_and_raise_what_it_raises(
    file: Path,
) -> None:
    def refuse(call: Any, ctx: Any) -> None:
        raise ToolError("not today")

    with Trace(file) as trace:
        chain = trace.hooks(FunctionHooks(before_tool_call=refuse))
        assert (
            implements(chain, "before_tool_call")
            and not implements(chain, "after_tool_call")
            and not implements(chain, "before_llm_call")
        )
        [timed] = chain.hooks
        assert timed.get_steering_messages() == () and timed.transform_context([{}], Abort()) == [
            {}
        ]
    with serve(Reply(calls=[("ls", {})]), Reply("done")) as server:
        recorded(file, server, hooks=FunctionHooks(before_tool_call=refuse))
        assert server.requests[1]["messages"][-1]["content"] == "Error: not today"
    assert [record["place"] for record in of(file, "hook")] == ["before_tool_call"]


# ---- the table -----------------------------------------------------------------------------------


def test_a_run_is_a_table_of_its_steps_with_what_they_took_and_why_it_stopped(file: Path) -> None:
    with serve(
        Reply("a", [("ls", {}), ("ls", {"path": "/nowhere"}), ("bash", {"command": "sleep 0.3"})]),
        Reply("All done."),
    ) as server:
        recorded(file, server, tools=(ls, bash))
        sent = [int(head["content-length"]) for head in server.heads]
    first, second, total = table(file)
    assert (first["step"], first["messages"], first["same"]) == ("1", "1 +1", "")
    assert (first["finish"], first["called"]) == ("tool_calls", "ls ×2, bash")
    assert (second["messages"], second["same"], second["finish"], second["called"]) == (
        "5 +4",
        "100 %",
        "stop",
        "",
    )
    assert (total["step"], total["messages"], total["finish"]) == ("all", "5 +5", "")
    figures = [step.figures for step in read(file).runs[0].steps]
    assert [one.size for one in figures] == sent and first["bytes"] == short(sent[0])
    assert first["in"] == short(figures[0].input) and first["out"] == short(figures[0].output)
    assert (
        float(first["tools"]) >= 0.3
        and figures[0].seconds["model"] < 5
        and float(second["tools"]) == 0
    )
    for one in figures:
        assert sum(one.seconds.values()) == pytest.approx(one.wall) and set(one.seconds) == set(
            KINDS
        )
    whole = read(file).runs[0]
    assert sum(whole.figures.seconds.values()) == pytest.approx(whole.end - whole.start)
    done = shown(file)
    assert done.stdout.startswith("run 1 of 1 · m at http://127.0.0.1") and done.stdout.endswith(
        "\nstop: All done.\n\n"
    )
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("change", "kept"), [("nothing", 1.0), ("system", 0.0), ("middle", 0.5), ("tools", 0.0)]
)
def test_the_unchanged_prefix_is_measured_in_bytes_of_the_request_before(
    file: Path, change: str, kept: float
) -> None:
    asked = []

    def alter(request: Request) -> None:
        asked.append(1)
        if len(asked) > 1 and change == "system":
            request.system = "Other." + "x" * 100
        if len(asked) > 1 and change == "middle":
            request.messages = [
                request.messages[0] | {"content": "x" * 1000 + "y" * 1000},
                *request.messages[1:],
            ]
        if len(asked) > 1 and change == "tools":
            request.tools = request.tools[:1]

    with serve(Reply(calls=[("ls", {})]), Reply("once more", status=503), Reply("done")) as server:
        recorded(
            file,
            server,
            tools=(ls, bash),
            hooks=FunctionHooks(before_llm_call=alter),
            prompt="x" * 2000,
            system="One." + "x" * 100,
        )
    figures = read(file).runs[0].steps[1].figures
    assert figures.same == pytest.approx(kept, abs=0.08) and (figures.same == 1) == (
        change == "nothing"
    )
    assert (figures.messages, figures.new, figures.retries) == (4, 2, 1)


def test_what_a_sub_agent_asks_is_its_tools_time_and_not_the_steps_request(file: Path) -> None:
    with (
        serve(Reply(calls=[("task", {})]), Reply("from below", hold=0.2), Reply("done")) as server,
        Trace(file) as trace,
    ):
        chat = ChatModel("m", base_url=server.url)
        trace.attach(chat)

        @tool
        def task(ctx: ToolContext) -> str:
            """Ask another."""
            return str(
                drive(
                    run_loop(
                        [], chat, prompts="a much longer prompt than the first", abort=ctx.abort
                    )
                )[1].text
            )

        drive(trace.watch(run_loop([], chat, (task,), prompts="go")))
    assert [exchange.nested for exchange in read(file).exchanges] == [False, True, False]
    first, second = (step.figures for step in read(file).runs[0].steps)
    assert (first.messages, first.new, second.messages, second.new, second.same) == (
        1,
        1,
        3,
        2,
        1.0,
    )
    assert first.seconds["tools"] >= 0.2


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], {"own": 10}),
        ([("model", 0, 4), ("tools", 5, 9)], {"model": 4, "tools": 4, "own": 2}),
        ([("tools", 0, 6), ("tools", 2, 8)], {"tools": 8, "own": 2}),
        (
            [("tools", 0, 10), ("hooks", 1, 2), ("waits", 4, 8), ("hooks", 5, 6)],
            {"tools": 5, "hooks": 1, "waits": 4},
        ),
        ([("model", -5, 20)], {"model": 10}),
    ],
)
def test_each_moment_of_a_step_is_counted_once(
    spans: list[tuple[Any, float, float]], expected: dict[str, float]
) -> None:
    found = shares([Span(kind, start, end, "") for kind, start, end in spans], 0, 10)
    assert {kind: value for kind, value in found.items() if value} == expected


def test_on_a_narrow_screen_what_holds_nothing_is_left_out(file: Path) -> None:
    with serve(Reply("a", [("ls", {})], hold=0.03), Reply("done")) as server:
        recorded(file, server)
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    output = {}
    for columns in (80, 160):
        child = pexpect.spawn(
            sys.executable,
            ["-m", "coder", "trace", str(file)],
            dimensions=(40, columns),
            encoding="utf-8",
            env=environment | {"COLUMNS": str(columns)},
            timeout=30,
        )  # type: ignore[arg-type]
        child.expect(pexpect.EOF)
        child.close()
        assert child.exitstatus == 0
        output[columns] = re.sub(r"\x1b\[[0-9;]*m", "", child.before)
    assert "cached" in output[160] and "waits" in output[160]
    assert "cached" not in output[80] and "waits" not in output[80] and "model" in output[80]
    assert all(len(line.rstrip()) <= 80 for line in output[80].splitlines()[1:])


def test_what_a_model_wrote_cannot_drive_the_terminal(file: Path) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31mred"
    with serve(Reply(evil, [("ls\x1b[2J", {})], finish="tool\x1b[2J"), Reply(evil)) as server:
        recorded(file, server)
    done = shown(file)
    assert (
        done.returncode == 0
        and "owned" not in done.stdout
        and "red" in done.stdout
        and "ls" in done.stdout
    )
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", done.stdout)


BEGINNING = b'{"t": 0.0, "of": "a", "type": "trace", "format": 1}\n'
FOREIGN: dict[str, bytes] = {
    "empty": b"",
    "text": b"hello\n",
    "one word": b"hello",
    "json": b'{"t": 1}\n',
    "binary": bytes(range(256)) * 4,
    "deep": b"[" * 100_000,
    "other format": b'{"t": 0.0, "of": "a", "type": "trace", "format": 2}\n',
    "no beginning": b'{"t": 0.0, "of": "a", "type": "run_start"}\n',
    "broken in the middle": BEGINNING
    + b'{"t": 1.0, "of\n{"t": 2.0, "of": "a", "type": "run_start"}\n',
    "a stranger's line": BEGINNING + b'{"t": 2.0, "of": "b", "type": "run_start"}\n',
    "other shapes": BEGINNING
    + b'{"t": 1.0, "of": "a", "type": "run_start"}\n{"t": 1.0, "of": "a", "type": "step_start", "step": []}\n'
    b'{"t": 1.0, "of": "a", "type": "request", "n": "x\\u001b[2J", "body": 5}\n',
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_file_that_is_no_trace_is_one_clear_line_and_exit_code_2(file: Path, what: str) -> None:
    file.write_bytes(FOREIGN[what])
    for arguments in ((file,), (file, "--html", file.with_suffix(".html"))):
        done = shown(*arguments)
        assert (done.returncode, done.stdout) == (2, ""), done
        assert (
            done.stderr.startswith(f"coder: {file}: ")
            and done.stderr.count("\n") == 1
            and "\x1b" not in done.stderr
        )
    with pytest.raises(TraceError):
        recording = read(file)
        assert recording.runs is None
    assert not file.with_suffix(".html").exists()


def test_a_file_that_is_not_there_or_a_page_that_cannot_be_written_is_said_in_a_line(
    file: Path,
) -> None:
    done = shown(file)
    assert done.returncode == 2 and done.stderr == f"coder: {file}: No such file or directory\n"
    with serve(Reply("x")) as server:
        recorded(file, server)
    before = file.read_bytes()
    for out, why in (
        (file.parent, "Is a directory"),
        (file.parent / "no" / "x.html", "No such file"),
        (file, "over its own trace"),
    ):
        done = shown(file, "--html", out)
        assert (
            done.returncode == 2
            and done.stdout == ""
            and done.stderr.count("\n") == 1
            and why in done.stderr
        )
    assert file.read_bytes() == before


@pytest.mark.parametrize("left", [1, 40, -2])
def test_a_last_line_that_a_kill_has_cut_is_left_out_and_said(file: Path, left: int) -> None:
    with serve(Reply("x")) as server:
        recorded(file, server)
    *whole, last = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(whole) + last[:left])
    done = shown(file)
    assert done.returncode == 0 and "no end" in done.stdout and "A line was cut" in done.stdout
    with serve(Reply("again")) as server:
        recorded(file, server)
    recording = read(file)
    assert recording.cut and [run.why for run in recording.runs] == [
        "no end: killed, or still at work",
        "stop: again",
    ]


def test_a_prompt_that_begins_with_the_word_is_a_prompt(tmp_path: Path) -> None:
    with serve(Reply("x")) as server, OneShot(tmp_path, server, "trace", "the", "bug") as run:
        assert run.end() == 0 and server.requests[0]["messages"][-1]["content"] == "trace the bug"
    command = [sys.executable, "-m", "coder", "trace"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "usage: python -m coder trace" in done.stderr


# ---- the trace as the model ----------------------------------------------------------------------


def without_times(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events without what is different each time: deltas, when they were, how long a tool took, how long a retry waits."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            left_out = ("t", "of", "timestamp", "message_id", "seconds", "delay")
            return {key: plain(item) for key, item in value.items() if key not in left_out}
        return [plain(item) for item in value] if isinstance(value, list) else value

    return [plain(event) for event in events if event["type"] not in DELTAS]


def test_a_recorded_run_is_repeated_offline_with_the_same_events(
    tmp_path: Path, file: Path
) -> None:
    replies = [
        Reply("First.", [("write", {"path": "a.txt", "content": "one\n"})], reasoning="well"),
        Reply("slow", status=503),
        Reply("half of", cut=2, close="reset"),
        Reply(calls=[("edit", {"path": "a.txt", "old_string": "one", "new_string": "two"})]),
        Reply(calls=[("bash", {"command": "cat a.txt"}), ("bash", {"command": "cat nothing"})]),
        Reply("It says two."),
    ]
    with (
        serve(*replies) as server,
        OneShot(
            tmp_path, server, "-y", "--trace", str(file), "--system-prompt", "Be brief.", "go"
        ) as run,
    ):
        assert run.end() == 0
        assert (run.ws / "a.txt").read_text() == "two\n"
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    model = ScriptedModel.from_trace(file, strict=True)
    tools = Toolset([read_tool, write, edit, bash], cwd=fresh)
    schemas = [schema for schema in server.requests[0]["tools"]]
    hooks = FunctionHooks(before_llm_call=lambda request: setattr(request, "tools", schemas))
    events, result = drive(
        run_loop([], model, tools, prompts="go", system="Be brief.", retry=FAST, hooks=hooks)
    )
    assert result.text == "It says two." and (fresh / "a.txt").read_text() == "two\n"
    ours = {"trace", "model", "request", "response", "chunk", "response_end", "hook"}
    before = [record for record in lines(file) if record["type"] not in ours]
    before = json.loads(json.dumps(before).replace(str(run.ws), str(fresh)))
    again = json.loads(json.dumps([event.to_dict() for event in events]))
    assert without_times(again) == without_times(before)
    assert model.requests == server.requests and len(server.requests) == 6


def test_a_server_that_refused_a_member_of_the_request_does_so_again(file: Path) -> None:
    def picky(body: dict[str, Any]) -> Reply:
        return (
            Reply("Unrecognized request argument supplied: top_k", status=400)
            if "top_k" in body
            else Reply("fine")
        )

    with serve(picky) as server:
        events, _ = recorded(file, server, model={"extra_body": {"top_k": 3}})
    model = ScriptedModel.from_trace(file, strict=True)
    again, result = drive(run_loop([], model, (ls,), prompts="go"))
    assert result.text == "fine" and types(again) == types(events) and "notice" in types(again)
    assert len(model.requests) == 2 and "top_k" not in model.requests[1]


def test_an_answer_that_is_no_stream_and_a_zipped_one_are_repeated_too(file: Path) -> None:
    import gzip

    whole = json.dumps(
        {"choices": [{"message": {"content": "at once"}, "finish_reason": "stop"}]}
    ).encode()
    stream = b'data: {"choices": [{"delta": {"content": "zipped"}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
    replies = [
        Reply(chunks=[whole], headers={"content-type": "application/json"}),
        Reply(chunks=[gzip.compress(stream)], headers={"content-encoding": "gzip"}),
    ]
    for reply, text in zip(replies, ("at once", "zipped")):
        with serve(reply) as server:
            file.unlink(missing_ok=True)
            assert recorded(file, server)[1].text == text
        assert drive(run_loop([], ScriptedModel.from_trace(file), prompts="go"))[1].text == text


def test_asked_more_often_than_recorded_the_trace_says_so(file: Path) -> None:
    with serve(Reply("done")) as server:
        recorded(file, server)
    model = ScriptedModel.from_trace(file)
    assert drive(run_loop([], model, prompts="go"))[1].text == "done"
    _, result = drive(run_loop([], model, prompts="more", retry=FAST))
    assert (
        result.stop_reason == "error"
        and result.text == "Error: the trace is at its end, and the run asks for more"
    )


def test_strict_names_the_first_difference_and_nothing_else_does(file: Path) -> None:
    with serve(Reply("done")) as server:
        recorded(file, server, prompt="go")
    _, result = drive(
        run_loop([], ScriptedModel.from_trace(file, strict=True), (ls,), prompts="stop")
    )
    assert (
        result.text
        == "Error: request 1 is not the recorded one: messages[0].content is 'stop' and was 'go'"
    )
    assert (
        drive(run_loop([], ScriptedModel.from_trace(file), (ls,), prompts="stop"))[1].text == "done"
    )


def test_strict_does_not_mind_another_session_or_a_key_that_was_starred_out(file: Path) -> None:
    with serve(Reply("done")) as server:
        recorded(
            file,
            server,
            prompt=f"my key is {KEY}!",
            model={"profile": {"cache_key": True}},
            tools=Toolset([ls], session_id="one"),
        )
        assert server.requests[0]["prompt_cache_key"] == "one"
    model = ScriptedModel.from_trace(file, strict=True)
    assert (
        drive(run_loop([], model, Toolset([ls], session_id="two"), prompts=f"my key is {KEY}!"))[
            1
        ].text
        == "done"
    )
    assert model.requests[0]["prompt_cache_key"] == "two"


@pytest.mark.parametrize(
    ("asked", "was", "said"),
    [
        ({"a": 1}, {"a": 1}, ""),
        ({"a": 1, "b": 2}, {"a": 1}, "b is 2 and was None"),
        ({}, {"a": [0]}, "a is None and was [0]"),
        ({"a": [1, 2]}, {"a": [1, 3]}, "a[1] is 2 and was 3"),
        ({"a": [1]}, {"a": [1, {"b": 2}]}, "a[1] is None and was {'b': 2}"),
        ({"a": {"b": "x"}}, {"a": {"b": "y"}}, "a.b is 'x' and was 'y'"),
        ("a key b", "a *** b", ""),
        ("a key c", "a *** b", " is 'a key c' and was 'a *** b'"),
        (True, 1, ""),
    ],
)
def test_the_first_difference_of_two_requests(asked: Any, was: Any, said: str) -> None:
    assert difference(asked, was) == said


def test_many_stars_in_a_text_that_differs_do_not_hold_up_the_replay() -> None:
    with promptly(5):
        assert difference(
            "x" * 140 + "!", "x***" * 6 + "y"
        )  # a regular expression tries all places for all stars: half a minute
    with promptly(5):
        assert difference("x " * 100_000, "x ***" * 1000 + "y")


def test_a_trace_of_another_shape_is_no_model(file: Path) -> None:
    file.write_bytes(FOREIGN["other shapes"])
    with pytest.raises(TraceError):
        ScriptedModel.from_trace(file)


# ---- a script without a server -------------------------------------------------------------------


def test_a_script_without_a_server_answers_in_turn_and_then_says_that_it_is_over() -> None:
    broken = [Reply("x", status=429), Reply("half", cut=1, close="reset"), Reply(status=0)]
    model = ScriptedModel([Reply("", [("ls", {})]), *broken, Reply("done")])
    events, result = drive(run_loop([], model, (ls,), prompts="go", retry=FAST))
    assert result.text == "done" and types(events).count("retry") == 3 and len(model.requests) == 5
    kinds = [event.to_dict()["error"]["kind"] for event in events if event.type == "retry"]
    assert kinds == ["rate_limit", "network", "network"]
    again = drive(run_loop([], model, prompts="more"))[1]
    assert again.text == "Error: the script is at its end, and the run asks for more"


def test_what_one_scripted_model_learns_is_not_the_others() -> None:
    refused = Reply("Unrecognized request argument supplied: top_k", status=400)
    for _ in range(2):
        model = ScriptedModel([refused, Reply("fine")], extra_body={"top_k": 1})
        assert drive(run_loop([], model, prompts="go"))[1].text == "fine"
        assert [("top_k" in body) for body in model.requests] == [True, False]


@pytest.mark.parametrize(
    "reply", [Reply("one two", close="hang"), Reply("late", hold=60), Reply("a b c", pace=60)]
)
def test_an_abort_ends_a_scripted_answer_that_hangs(reply: Reply) -> None:
    abort = Abort()
    threading.Timer(0.1, abort.set).start()
    with promptly():
        _, result = drive(run_loop([], ScriptedModel([reply]), prompts="go", abort=abort))
    assert result.stop_reason == "aborted"


def test_runs_of_the_trace_are_told_by_their_events_alone(file: Path) -> None:
    """A model without bytes of its own can be traced, too: only the requests are missing."""
    with Trace(file) as trace:
        events, _ = drive(trace.watch(run_loop([], ScriptedModel([Reply("fine")]), prompts="go")))
    recording: Recording = read(file)
    [run] = recording.runs
    assert (
        run.why == "stop: fine" and recording.exchanges == [] and run.steps[0].figures.messages == 0
    )
    assert isinstance(events[-1], RunEnd) and not [
        event for event in events if isinstance(event, ToolEnd)
    ]
    assert "run 1 of 1 · an unknown model" in shown(file).stdout
