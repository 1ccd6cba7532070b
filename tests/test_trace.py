"""A run's trace: what is recorded, what never is, its table and page, and that it can serve as the
model."""

from __future__ import annotations

import io
import itertools
import json
import re
import shutil
import signal
import stat
import subprocess
import threading
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from coder.abort import Abort
from coder.ai import ChatModel
from coder.cli.main import run
from coder.devtools.scripted import Reply, ScriptedModel, ScriptedServer
from coder.devtools.trace import Trace
from coder.devtools.trace_report import TraceError, read
from coder.events import DoomLoop, Event, Notice, Retry, TextDelta
from coder.history import user
from coder.hooks import FunctionHooks, HookChain, Hooks
from coder.loop import run_loop
from coder.tools.bash import bash
from coder.tools.files import ls, write
from coder.tools.files import read as read_tool
from coder.toolset import ToolContext, Toolset, tool
from coder.types import ModelError, Request, ToolResult
from tests.harness import FAST, ask_model, drive, serve, types
from tests.terminal import OneShot, promptly, until

DELTAS = ("text_delta", "reasoning_delta", "tool_call_delta")
OURS = ("trace", "model", "request", "response", "chunk", "response_end")
TIMES = ("model", "tools", "waits", "own")
KEY = "sk-CANARY-0123456789"


def of(path: Path, *kinds: str) -> list[dict[str, Any]]:
    """The lines of these types, or all."""
    records = [json.loads(line) for line in path.read_bytes().splitlines()]
    return [record for record in records if not kinds or record["type"] in kinds]


def recorded(
    path: Path,
    server: ScriptedServer,
    *,
    tools: Any = (ls,),
    hooks: Hooks | None = None,
    prompt: Any = "go",
    each: Callable[[Event], None] | None = None,
    model: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[list[Event], Any]:
    """A run that is traced."""
    with Trace(path) as trace:
        chat = ChatModel(
            "m",
            base_url=server.url,
            **({"api_key": KEY} | (model or {})),
        )
        trace.attach(chat)
        hiding = trace.hooks(hooks) if hooks else None
        run = run_loop(
            [],
            chat,
            tools,
            prompt=prompt,
            hooks=hiding,
            retry=FAST,
            **options,
        )
        return drive(trace.watch(run), each)


def called(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The program, in this process."""
    out = io.StringIO()
    err = io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run([*map(str, arguments)])
    return subprocess.CompletedProcess([], code, out.getvalue(), err.getvalue())


def shown(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return called("trace", *arguments)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home" / "run.jsonl"


# ---- what is recorded ----------------------------------------------------------------------------


def test_the_program_records_every_request_answer_and_event(tmp_path: Path, file: Path) -> None:
    calls = [("ls", {}), ("bash", {"command": "echo hi"})]
    replies = [Reply("Look.", calls, reasoning="hm"), Reply("Dönе ✓.")]
    arguments = ("-y", "--trace", str(file), "--output-format", "stream-json", "go")
    with serve(*replies) as server, OneShot(tmp_path, server, *arguments) as run:
        assert run.end() == 0
        printed = [json.loads(line) for line in run.out.splitlines()]
    requests = of(file, "request")
    assert [record["body"] for record in requests] == server.requests
    sizes = [int(head["content-length"]) for head in server.heads]
    assert [record["bytes"] for record in requests] == sizes
    events = [
        {key: value for key, value in record.items() if key != "t"}
        for record in of(file)
        if record["type"] not in OURS
    ]
    assert events[0]["type"] == printed[0]["type"] == "run_start"  # with more on stdout
    assert events[1:] == [event for event in printed[1:] if event["type"] not in DELTAS]
    body = "".join(record["text"] for record in of(file, "chunk") if record["n"] == 2)
    assert body.endswith("data: [DONE]\n\n")
    answers = [
        (
            each["status"],
            each["headers"]["content-type"],
        )
        for each in of(file, "response")
    ]
    assert answers == [(200, "text/event-stream")] * 2
    assert [record["error"] for record in of(file, "response_end")] == [None, None]
    times = [record["t"] for record in of(file)]
    assert times == sorted(times)
    assert times[0] < 1
    assert of(file)[0]["type"] == "trace"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_users_answer_is_recorded_with_the_time_it_took(file: Path) -> None:
    def slowly_allow(event: Event) -> None:
        if isinstance(event, DoomLoop):
            threading.Event().wait(0.5)
            event.reply(True)

    with serve(
        *[Reply(calls=[("ls", {})])] * 3,
        Reply("done"),
    ) as server:
        recorded(file, server, each=slowly_allow)
    [reply] = of(file, "reply")
    assert (reply["to"], reply["answer"]) == ("doom_loop", True)
    assert reply["seconds"] >= 0.5
    assert read(file).runs[0].steps[2].figures["waits"] >= 0.5


def test_a_tap_of_ones_own_sees_the_bytes_of_both_ways() -> None:
    seen: list[Any] = []

    class Seen:
        head = piece = ended = staticmethod(seen.append)

    def tap(sent: bytes) -> Seen:
        seen.append(json.loads(sent)["messages"][-1]["content"])
        return Seen()

    with serve(Reply("x", status=500), Reply("hello")) as server:
        model = ChatModel("m", base_url=server.url, tap=tap)
        assert ask_model(model)[1].text == "hello"
    asked, failure, again, response, *chunks, end = seen
    assert asked == "go"
    assert again == "go"
    assert end is None
    assert isinstance(failure, ModelError)
    assert failure.status == 500
    assert response.status_code == 200
    assert b"hello" in b"".join(chunks)


# ---- what is never recorded ----------------------------------------------------------------------


@pytest.mark.parametrize("key", [KEY, "key with blanks/and+more=="])
def test_the_key_is_in_no_byte_of_the_file(tmp_path: Path, file: Path, key: str) -> None:
    (tmp_path / "secret.txt").write_text(f"the key is {key}\n")
    delta = {"choices": [{"delta": {"content": key}, "finish_reason": "stop"}]}
    raw = b"\xff" + key.encode() + b"\ndata: " + json.dumps(delta).encode() + b"\n\n"
    told = Reply(f"I was told {key}.", [("read", {"path": "secret.txt"})])
    tools = Toolset([read_tool], cwd=tmp_path)
    for replies in [told, Reply(chunks=[raw])], [Reply(f"no such key: {key}", status=401)]:
        with serve(*replies) as server:
            options = {"tools": tools, "prompt": f"my key is {key}", "model": {"api_key": key}}
            recorded(file, server, **options)
            assert key in server.requests[0]["messages"][0]["content"]
    data = file.read_bytes()
    chunks = of(file, "chunk")
    assert any("\udcff***" in each["text"] for each in chunks)
    assert key.encode() not in data
    assert data.count(b"***") >= 7
    assert b"uthorization" not in data
    assert b"Bearer" not in data


def test_keys_that_hooks_and_headers_bring_are_not_recorded_either(file: Path) -> None:
    hooks = HookChain(
        FunctionHooks(get_api_key=lambda: "sk-of-a-hook"),
        FunctionHooks(before_llm_call=lambda request: setattr(request, "api_key", "sk-of-a-run")),
    )
    headers = {"x-token": "other-token", "x-up": "Bearer upstream", "x-env": "plainly"}
    with serve(Reply("sk-of-a-hook sk-of-a-run other-token upstream plainly")) as server:
        recorded(file, server, hooks=hooks, model={"headers": headers})
        assert server.heads[0]["authorization"] == "Bearer sk-of-a-run"
    text = file.read_text()
    assert not re.search("sk-of-a|other-token|upstream", text)
    assert "plainly" in text


# ---- what may go wrong ---------------------------------------------------------------------------


def test_a_path_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    code.write_text("print('mine')\n")
    code.chmod(0o644)
    for path, why in (
        (tmp_path / "no" / "run.jsonl", "No such file"),
        (code, "something else"),
    ):
        done = called("--trace", path, "go")
        assert done.returncode == 2
        assert done.stderr.startswith("coder: --trace ")
        assert why in done.stderr
        assert done.stderr.count("\n") == 1
    assert code.read_text() == "print('mine')\n"
    assert stat.S_IMODE(code.stat().st_mode) == 0o644


def test_a_kill_leaves_whole_lines(tmp_path: Path, file: Path) -> None:
    with (
        serve(Reply("one two three", cut=3, close="hang")) as server,
        OneShot(tmp_path, server, "--trace", str(file), "go") as run,
    ):
        until(lambda: file.exists() and b"two" in file.read_bytes(), "the second word is recorded")
        run.kill(signal.SIGKILL)
        run.child.wait()
        run.stop()
        shutil.rmtree(run.temp)  # left by a kill
        run.temp.mkdir()
    assert file.read_bytes().endswith(b"}\n")
    assert of(file, "chunk")
    assert "\nno end: killed, or still at work\n" in shown(file).stdout
    _, result = drive(
        run_loop(
            [],
            ScriptedModel.from_trace(file),
            prompt="go",
            retry=FAST,
        )
    )
    assert result.error
    assert "the trace ends in the middle of this answer" in result.text


def test_a_full_disk_ends_the_trace_and_not_the_run() -> None:
    with serve(
        Reply(calls=[("ls", {})]),
        Reply("done"),
    ) as server:
        events, result = recorded(Path("/dev/full"), server)
    assert result.text == "done"
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert notices == ["The trace ends here: No space left on device."]


# ---- the table -----------------------------------------------------------------------------------


def test_a_run_is_a_table_of_its_steps_with_what_they_took_and_why_it_stopped(file: Path) -> None:
    calls = [
        ("ls", {}),
        ("ls", {"path": "/nowhere"}),
        ("bash", {"command": "sleep 0.3"}),
    ]
    with serve(
        Reply("a", calls),
        Reply("once more", status=503),
        Reply("All done."),
    ) as server:
        recorded(file, server, tools=(ls, bash))
        sent = [int(head["content-length"]) for head in server.heads]
    run = read(file).runs[0]
    first, second = (step.figures for step in run.steps)
    assert first["messages"] == 1
    assert first["new"] == 1
    assert first["same %"] == ""
    assert second["messages"] == 5
    assert second["new"] == 4
    assert second["same %"] == 100
    assert first["finish"] == "tool_calls"
    assert second["finish"] == "stop"
    assert second["retries"] == 1
    assert first["called"] == "ls, ls, bash"
    assert [first["bytes"], second["bytes"]] == [sent[0], sent[1] + sent[2]]
    assert 0.3 <= first["tools"] < 5
    assert second["tools"] == 0
    assert first["first"] > 0
    for part in (*run.steps, run):
        assert sum(part.figures[name] for name in TIMES) == pytest.approx(part.wall, abs=0.05)
    done = shown(file)
    title, head, *rows, why = done.stdout.rstrip().split("\n")
    assert title.startswith("run 1 of 1 · m · ")
    assert why == "stop: All done."
    assert head.split()[:5] == ["step", "messages", "new", "bytes", "same"]
    assert "cached" not in head, "an empty column"
    assert [row.split()[0] for row in rows] == ["1", "2", "all"]
    assert "\x1b" not in done.stdout


def test_the_time_of_an_answer_that_was_given_up_is_the_models(file: Path) -> None:
    abort = Abort()

    def give_up_later(event: Event) -> None:
        if isinstance(event, TextDelta):
            threading.Timer(0.3, abort.set).start()

    with serve(Reply("a b", close="hang", cut=2)) as server:
        recorded(file, server, each=give_up_later, abort=abort)
    *_, chunk = of(file, "chunk")
    [end] = of(file, "step_end")
    assert end["t"] - chunk["t"] > 0.2
    assert read(file).runs[0].steps[0].figures["model"] >= end["t"] - chunk["t"]


def test_a_message_that_changed_shows_in_what_a_cache_can_hold(file: Path) -> None:
    asked = itertools.count()

    def alter(request: Request) -> None:
        if next(asked):
            request.messages[1] = request.messages[1] | {"content": "changed"}

    messages = [
        user("x" * 1000),
        {"role": "assistant", "content": "yes"},
        user("y" * 1000),
    ]
    with serve(
        Reply(calls=[("ls", {})]),
        Reply("done"),
    ) as server:
        recorded(file, server, hooks=FunctionHooks(before_llm_call=alter), prompt=messages)
    assert read(file).runs[0].steps[1].figures["same %"] == pytest.approx(50, abs=4)


def test_what_a_sub_agent_asks_is_its_tools_time_and_not_the_steps_request(file: Path) -> None:
    replies = Reply(calls=[("task", {})]), Reply("from below", hold=0.2), Reply("done")
    with serve(*replies) as server, Trace(file) as trace:
        chat = ChatModel("m", base_url=server.url)
        trace.attach(chat)

        @tool
        def task(ctx: ToolContext) -> str:
            """Ask another."""
            return drive(
                run_loop(
                    [],
                    chat,
                    prompt="a longer prompt",
                    abort=ctx.abort,
                )
            )[1].text

        drive(
            trace.watch(
                run_loop(
                    [],
                    chat,
                    (task,),
                    prompt="go",
                )
            )
        )
    assert [exchange.nested for exchange in read(file).exchanges] == [False, True, False]
    first, second = (step.figures for step in read(file).runs[0].steps)
    assert first["messages"] == 1
    assert second["messages"] == 3
    assert second["new"] == 2
    assert second["same %"] == 100
    assert first["tools"] >= 0.2
    assert "  == Request of a sub-agent: 1 messages\n" in shown(file, "--diff").stdout


def test_the_requests_are_shown_each_with_what_is_new_in_it(file: Path) -> None:
    calls = [
        ("ls", {"path": "sub"}),
        ("ls", {"path": "/nowhere"}),
    ]
    with serve(Reply("I look.", calls), Reply("no", status=400)) as server:
        recorded(file, server, prompt="go \x1b[2J on")
    done = shown(file, "--diff")
    lines = done.stdout.splitlines()
    assert lines[0] == "run 1 of 1 · m"
    assert lines[1].startswith("== Request 1: 1 messages, ")
    assert lines[2].startswith("  + system, ")
    assert lines[2].endswith(" and 1 tools")
    assert lines[3] == "  + user: go  on"
    assert re.fullmatch(r"-- Answer \(tool_calls\): \d+ tokens in \(0 cached\), \d+ out", lines[4])
    assert lines[5].startswith("  + assistant: I look. ls({")
    assert lines[6].startswith("== Request 2: 4 messages, ")
    assert lines[7] == lines[5]
    assert [line.split(":")[0] for line in lines[8:10]] == ["  + tool", "  + tool"]
    assert lines[10] == "-- Error: bad_request: no"
    assert "\x1b" not in done.stdout


def test_a_changed_message_is_named_with_what_follows_it(file: Path) -> None:
    asked = itertools.count()

    def alter(request: Request) -> None:
        if next(asked):
            request.messages[0] = {"role": "user", "content": "changed"}

    with serve(
        Reply(calls=[("ls", {})]),
        Reply("done"),
    ) as server:
        recorded(file, server, hooks=FunctionHooks(before_llm_call=alter))
    second = shown(file, "--diff").stdout.partition("== Request 2")[2]
    assert "; 0 % as in the request before" in second
    assert "  - 1 messages changed or gone: what follows is not cached\n" in second
    assert "  + user: changed\n" in second


def test_the_requests_of_a_second_process_begin_anew(file: Path) -> None:
    for prompt in ("one", "two"):
        with serve(Reply("Well.")) as server:
            recorded(file, server, prompt=prompt)
    text = shown(file, "--diff").stdout
    assert text.count("== Request 1: 1 messages") == 2
    assert "changed or gone" not in text


BEGINNING = b'{"type": "trace", "t": 0.0, "format": 2}\n'
FOREIGN: dict[str, bytes] = {
    "empty": b"",
    "text": b"hello\n",
    "json": b'{"t": 1}\n',
    "binary": bytes(range(256)) * 4,
    "deep": b"[" * 100_000,
    "other format": BEGINNING.replace(b"2}", b"3}"),
    "other shapes": BEGINNING
    + b'{"t": 1, "type": "run_start"}\n{"t": 1, "type": "step_start"}\n'
    + b'{"t": 1.0, "type": "request", "n": "x\\u001b[2J", "body": 5}\n',
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_file_that_is_no_trace_is_one_clear_line_and_exit_code_2(file: Path, what: str) -> None:
    file.write_bytes(FOREIGN[what])
    page = file.with_suffix(".html")
    for arguments in (
        (file,),
        (file, "--diff"),
        (file, "--html", page),
    ):
        done = shown(*arguments)
        assert done.returncode == 2, done
        assert done.stdout == "", done
        assert done.stderr.startswith(f"coder: {file}: ")
        assert done.stderr.count("\n") == 1
        assert "\x1b" not in done.stderr
    with pytest.raises(TraceError):
        ScriptedModel.from_trace(file)
    assert not page.exists()


@pytest.mark.parametrize("left", [1, -2])
def test_a_file_goes_on_after_a_line_that_a_kill_has_cut(file: Path, left: int) -> None:
    with serve(Reply("x")) as server:
        recorded(file, server)
    *whole, last = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(whole) + last[:left])
    file.chmod(0o644)
    for answer in ("second", "third"):
        with serve(Reply(answer)) as server:
            recorded(file, server)
    ends = [run.end[1] for run in read(file).runs]
    assert ends == ["killed, or still at work", "second", "third"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert re.findall(
        r"^run (\d) of 3 · m ·",
        shown(file).stdout,
        re.M,
    ) == ["1", "2", "3"]


# ---- the page ------------------------------------------------------------------------------------

EVIL = (
    "</pre></details><script>document.title = 'owned'</script><img src=x onerror='y'>"
    "<style>body { display: none }</style>&lt;\x00\x1b[31m\x9b2J\" onclick='x'"
)


def test_the_page_holds_the_run_and_no_script_whatever_was_written(tmp_path: Path) -> None:
    @tool
    def shout(text: str) -> ToolResult:
        """Say something loudly.

        text: what
        """
        return ToolResult(f"{text.upper()} {EVIL}", details={"<b>": EVIL})

    replies = [
        Reply(EVIL, [("shout", {"text": EVIL})], reasoning=EVIL),
        Reply(f"slow down {EVIL}", status=429),
        Reply(
            "late",
            [("shout", {"text": "word"}), (EVIL, {EVIL: 1})],
        ),
        Reply(f"The end. {EVIL}", finish=EVIL),
    ]
    file = tmp_path / "<b>run & rest.jsonl"
    page = tmp_path / "page.html"
    with serve(*replies) as server:
        recorded(file, server, tools=(shout,), prompt=f"Why? {EVIL}")
    page.write_text("x" * 1_000_000)
    page.chmod(0o644)
    done = shown(file, "--html", page)
    assert done.returncode == 0, done
    assert done.stdout == f"{page}\n", done
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    source = page.read_text(encoding="utf-8")
    assert "<h1>Why? &lt;/pre&gt;" in source
    assert "width=device-width" in source
    assert re.search(r"<details><summary>stop .*</summary><pre>The end\. ", source)
    tags = {*re.findall(r"<(/?\w+)", source)}
    known = "html head meta title style body h1 p details summary pre div table tr th td"
    drawn = "svg a rect line text"
    assert tags <= {f"{end}{name}" for name in f"{known} {drawn}".split() for end in ("", "/")}
    for name in ("details", "summary", "pre", "table", "td", "svg", "a", "text", "style"):
        assert len(re.findall(f"<{name}[ >]", source)) == source.count(f"</{name}>") > 0
    assert not re.search(r"\bon\w+=|javascript:|href=\"[^#]", re.sub("(?s)>[^<]*<", "><", source))
    assert source.count("<style>") == 1
    assert "default-src 'none'" in source
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", source + shown(file).stdout)
    text = unescape(source)
    assert all(words in text for words in ("document.title = 'owned'", "WORD", "rate_limit"))
    before = file.read_bytes()
    for out, why in (
        (tmp_path / "no" / "x", "No such file"),
        (file, "over its own trace"),
    ):
        done = shown(file, "--html", out)
        assert done.returncode == 2
        assert why in done.stderr
        assert done.stderr.count("\n") == 1
    assert file.read_bytes() == before


def page_of_a_run(tmp_path: Path, file: Path) -> str:
    """A run with two tools, a failed attempt, a question and a sub-agent."""

    @tool
    def task(ctx: ToolContext) -> str:
        """Ask another."""
        return drive(
            run_loop(
                [],
                chat,
                prompt="below",
                abort=ctx.abort,
            )
        )[1].text

    calls = [
        ("ls", {}),
        ("bash", {"command": "sleep 0.3 && true"}),
        ("task", {}),
    ]
    replies = Reply("a", calls), Reply("from below", hold=0.2), Reply("busy", status=503)
    with (
        serve(
            *replies,
            *[Reply(calls=[("ls", {})])] * 3,
            Reply("done"),
        ) as server,
        Trace(file) as trace,
    ):
        chat = ChatModel("m", base_url=server.url)
        trace.attach(chat)

        def allow(event: Event) -> None:
            if isinstance(event, DoomLoop):
                event.reply(True)

        run = run_loop(
            [],
            chat,
            (ls, bash, task),
            prompt="go",
            retry=FAST,
        )
        drive(trace.watch(run), allow)
    page = tmp_path / "page.html"
    assert shown(file, "--html", page).returncode == 0
    return page.read_text()


def test_the_page_has_a_timeline_whose_bars_lead_to_the_steps(tmp_path: Path, file: Path) -> None:
    source = page_of_a_run(tmp_path, file)
    [drawing] = re.findall("<svg.*?</svg>", source, re.S)
    assert re.findall(r'<text x="0"[^>]*>([^<]*)<', drawing) == [
        "model",
        "tools",
        "sub-agents",
        "waits",
    ]
    bars = re.findall(
        r'<a href="#([^"]+)"><rect class="([\w -]+)" x="([\d.]+)" y="\d+" width="([\d.]+)"[^>]*>'
        r"<title>([^<]*)</title>",
        drawing,
    )
    titles = [title for *_, title in bars]
    for title in (
        "step 1 · bash sleep 0.3 &amp;&amp; true · ",
        "step 1 · ls",
        "step 1 · request 1",
        "step 2 · attempt 2",
    ):
        assert any(each.startswith(title) for each in titles), (title, titles)
    [slept] = [bar for bar in bars if "sleep" in bar[-1]]
    took = re.search(r" · (\d+\.\d)", slept[-1])
    assert took, slept
    assert float(took[1]) >= 0.3
    listed = next(bar for bar in bars if bar[-1].startswith("step 1 · ls"))
    assert float(slept[3]) > float(listed[3])
    assert float(slept[2]) >= float(listed[2])
    assert all(float(x) + float(width) <= 1001.5 for _, _, x, width, _ in bars)
    targets = set(re.findall(r'<details id="([^"]+)"', source))
    assert {link for link, *_ in bars} <= targets
    assert len(targets) == 5
    assert any(look == "model first" for _, look, *_ in bars), "until the first byte"


def test_the_table_of_the_page_is_a_table_whose_words_break(tmp_path: Path, file: Path) -> None:
    source = page_of_a_run(tmp_path, file)
    [table] = re.findall("<table>.*?</table>", source, re.S)
    rows = [re.findall("<t[hd][^>]*>([^<]*)<", row) for row in table.split("</tr>")[:-1]]
    text = shown(file).stdout.split("\n")[1 : 1 + len(rows)]
    assert [" ".join(row).split() for row in rows] == [line.split() for line in text]
    assert '<td class="words">ls, bash, task</td>' in table


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
MEASURE = "<script>document.title = 'wide: ' + document.documentElement.scrollWidth</script>"


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium to measure a page with")
@pytest.mark.parametrize("width", [1000, 600])
def test_the_page_fits_a_window(tmp_path: Path, file: Path, width: int) -> None:
    source = re.sub("<meta http-equiv[^>]*>", "", page_of_a_run(tmp_path, file))
    (tmp_path / "page.html").write_text(source.replace("</body>", f"{MEASURE}</body>"))
    argv = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    argv += [f"--user-data-dir={tmp_path}/chromium", f"--window-size={width},900"]
    options: Any = {"capture_output": True, "text": True, "timeout": 60}
    dom = subprocess.run([*argv, f"file://{tmp_path}/page.html"], **options).stdout
    found = re.search(r"<title>wide: (\d+)", dom)
    assert found
    assert int(found[1]) <= width


# ---- the trace as the model ----------------------------------------------------------------------


def test_a_recorded_run_is_repeated_with_the_same_events(tmp_path: Path, file: Path) -> None:
    replies = [
        Reply(
            "First.",
            [("write", {"path": "a.txt", "content": "one\n"})],
            reasoning="well",
        ),
        *(
            Reply("slow", status=503),
            Reply("half of", cut=2, close="reset"),
        ),
        Reply(
            calls=[
                ("bash", {"command": "cat a.txt"}),
                ("bash", {"command": "cat nothing"}),
            ]
        ),
        Reply("It says one."),
    ]
    folders = [tmp_path / "first", tmp_path / "second"]
    first, second = (Toolset([write, bash], cwd=each) for each in folders)
    for folder in folders:
        folder.mkdir()
    with serve(*replies) as server:
        before, _ = recorded(file, server, tools=first, system="Be brief.")
    model = ScriptedModel.from_trace(file)
    run = run_loop(
        [],
        model,
        second,
        prompt="go",
        system="Be brief.",
        retry=FAST,
    )
    events, result = drive(run)
    assert result.text == "It says one."
    assert (folders[1] / "a.txt").read_text() == "one\n"
    # Output is shown while a command runs if that takes a little longer
    kinds = [[kind for kind in types(each) if kind != "tool_update"] for each in (events, before)]
    assert kinds[0] == kinds[1]
    errors = [[str(e.error) for e in each if isinstance(e, Retry)] for each in (events, before)]
    assert errors[0] == errors[1]
    assert len(errors[0]) == 2
    assert model.bodies == server.requests
    assert len(server.requests) == 5


def test_a_script_without_a_server_answers_in_turn_and_then_reports_its_end() -> None:
    broken = [
        Reply("x", status=429),
        Reply("half", cut=1, close="reset"),
        Reply(status=0),
    ]
    model = ScriptedModel(
        [
            Reply("", [("ls", {})]),
            *broken,
            Reply("done"),
        ]
    )
    events, result = drive(
        run_loop(
            [],
            model,
            (ls,),
            prompt="go",
            retry=FAST,
        )
    )
    assert result.text == "done"
    assert len(model.requests) == 5
    kinds = [event.error.kind for event in events if isinstance(event, Retry)]
    assert kinds == ["rate_limit", "network", "network"]
    again = drive(run_loop([], model, prompt="more"))[1]
    assert again.text == "Error: the script is at its end, and the run asks for more"


@pytest.mark.parametrize(
    "reply",
    [Reply("one two", close="hang"), Reply("late", hold=60)],
)
def test_an_abort_ends_a_scripted_answer_that_hangs(reply: Reply) -> None:
    abort = Abort()
    threading.Timer(0.1, abort.set).start()
    with promptly():
        _, result = drive(
            run_loop(
                [],
                ScriptedModel([reply]),
                prompt="go",
                abort=abort,
            )
        )
    assert result.stop_reason == "aborted"
