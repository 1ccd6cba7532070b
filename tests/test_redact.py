"""The redactor: whole texts, pieces, JSON, and what a model and its tools return (tests/test_cases_sec.py: the program)."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from coder.ai import ChatModel
from coder.devtools.scripted import Body, Reply, ScriptedServer
from coder.events import ReasoningDelta, TextDelta, ToolUpdate
from coder.permissions.redact import HIDDEN, Redaction, Redactor, redact_logs
from coder.toolset import ToolContext, Toolset, tool
from coder.types import Message
from tests.harness import ask, drive, run_loop, serve
from tests.terminal import OneShot

KEY = "sk-abcabc-0123456789/abcdefghij+KLMNOP"


def test_a_text_without_the_key_is_the_same_object() -> None:
    value = {"a": ["text", {"b": 1, "c": None}], "d": "sk-abc"}
    assert Redactor(KEY).value(value) is value
    changed = Redactor(KEY).value(value | {KEY: [f"x{KEY}"]})
    assert changed == value | {HIDDEN: [f"x{HIDDEN}"]} and changed["a"] is value["a"]


def test_of_two_keys_the_longer_goes_first_and_a_short_one_or_none_is_no_key() -> None:
    assert (
        Redactor("sk-abcdefg1", "sk-abcdefg1-admin").text("sk-abcdefg1-admin sk-abcdefg1")
        == f"{HIDDEN} {HIDDEN}"
    )
    assert Redactor("short12", "", None, " ").text("short12  ") == "short12  "


def test_a_key_is_found_as_json_escapes_it_in_text_and_in_bytes() -> None:
    key = f'{KEY}"é'
    line = json.dumps({"key": f"<{key}>"})
    clean = json.dumps({"key": f"<{HIDDEN}>"})
    assert Redactor(key).text(line) == clean
    assert Redactor(key).data(line.encode()).decode() == clean


def test_a_model_brings_no_key_in_deltas_answers_and_errors() -> None:
    reply = Reply(f"I say {KEY} again", [("echo", {"text": f"{KEY}!"})], reasoning=f"think {KEY}")
    with serve(reply, Reply(f"no {KEY}", status=400)) as server:
        redactor = Redactor(KEY)
        model = ChatModel("m", base_url=server.url, api_key=KEY, redact=redactor.data)
        run = run_loop([], model, [], prompt="go", system=f"key: {KEY}", hooks=Redaction(redactor))
        events, result = drive(run)
    assert KEY not in json.dumps(server.requests)
    assert server.heads[0]["authorization"] == f"Bearer {KEY}"
    shown = {
        kind: "".join(event.text for event in events if isinstance(event, kind))
        for kind in (TextDelta, ReasoningDelta)
    }
    assert shown == {TextDelta: f"I say {HIDDEN} again", ReasoningDelta: f"think {HIDDEN}"}
    assert result.error and KEY not in f"{result}{result.error}{result.error.message}"


def test_an_answer_that_repeats_a_key_in_pieces_is_kept_without_it() -> None:
    deltas = [{"content": KEY[:9]}, {"content": KEY[9:]}, {"reasoning_content": KEY}]
    chunks = [
        b"data: %s\n\n" % json.dumps({"choices": [{"delta": delta, "finish_reason": end}]}).encode()
        for delta, end in [*((delta, None) for delta in deltas), ({}, "stop")]
    ]
    messages: list[Message] = []
    with serve(Reply(chunks=[*chunks, b"data: [DONE]\n\n"])) as server:
        model = ChatModel("m", base_url=server.url, api_key=KEY, redact=Redactor(KEY).data)
        drive(run_loop(messages, model, [], prompt="go", hooks=Redaction(Redactor(KEY))))
    assert messages[-1]["content"] == HIDDEN and KEY not in json.dumps(messages)


def test_a_call_whose_id_holds_the_key_is_run_and_kept_without_it() -> None:
    @tool
    def look() -> str:
        """Look."""
        return "seen"

    call = {"index": 0, "id": f"id-{KEY}", "function": {"name": "look", "arguments": "{}"}}
    chunk = {"choices": [{"delta": {"tool_calls": [call]}, "finish_reason": "tool_calls"}]}
    chunks = [b"data: %s\n\n" % json.dumps(chunk).encode(), b"data: [DONE]\n\n"]
    messages: list[Message] = []
    with serve(Reply(chunks=chunks), Reply("Done.")) as server:
        model = ChatModel("m", base_url=server.url, api_key=KEY, redact=Redactor(KEY).data)
        hooks = Redaction(Redactor(KEY))
        events, _ = drive(run_loop(messages, model, [look], prompt="go", hooks=hooks))
    assert KEY not in f"{messages}{events}" and messages[2]["content"] == "seen"


@pytest.mark.parametrize(("form", "status"), [("text", 401), ("stream-json", 503)])
def test_the_number_of_a_request_holds_no_key_on_the_screen_nor_in_the_store(
    tmp_path: Path, form: str, status: int
) -> None:
    def script(_: Body) -> Reply:
        return Reply("no", status=status, headers={"x-request-id": f"for-{sent(server)}"})

    with serve(script) as server, OneShot(tmp_path, server, "--output-format", form, "go") as run:
        run.end()
        assert (
            "for-***" in run.out + run.err
        )  # that the key is nowhere is looked at behind every run


def sent(server: ScriptedServer) -> str:
    """The key of the newest request."""
    return server.heads[-1]["authorization"].removeprefix("Bearer ")


def test_a_plain_model_shows_no_key_in_the_number_of_a_request() -> None:
    with serve(Reply("no", status=401, headers={"x-request-id": f"for {KEY}"})) as server:
        _, result = ask(server, model={"api_key": KEY})
    assert result.error and result.error.request_id == "for ***"


def test_a_tool_says_no_key_while_it_works_in_questions_and_at_its_end() -> None:
    details: list[str] = []

    @tool
    def leak(ctx: ToolContext) -> object:
        """Leak."""
        yield ctx.update(f"{KEY} and on")
        yield from ctx.ask("edit", "a.txt", f"+{KEY}")
        return f"it is {KEY}"

    class Asked(Redaction):
        def before_tool_call(self, call: object, ctx: ToolContext) -> None:  # type: ignore[override]
            ctx.authorize = lambda ctx, permission, patterns, detail: details.append(detail)
            super().before_tool_call(call, ctx)  # type: ignore[arg-type]

    with serve(Reply("", [("leak", {})]), Reply("Done.")) as server:
        model = ChatModel("m", base_url=server.url, api_key="k")
        events, _ = drive(
            run_loop([], model, Toolset([leak]), prompt="go", hooks=Asked(Redactor(KEY)))
        )
        assert server.requests[-1]["messages"][-1]["content"] == f"it is {HIDDEN}"
    assert (
        "".join(event.text for event in events if isinstance(event, ToolUpdate))
        == f"{HIDDEN} and on"
    )
    assert details == [f"+{HIDDEN}"]


def test_logs_hold_no_key(caplog: pytest.LogCaptureFixture) -> None:
    before = logging.getLogRecordFactory()
    try:
        redact_logs(Redactor(KEY))
        logging.getLogger("some.library").warning("sent %s to %r, 100%%", KEY, {"key": KEY})
    finally:
        logging.setLogRecordFactory(before)
    assert caplog.messages == [f"sent {HIDDEN} to {{'key': '{HIDDEN}'}}, 100%"]


def logged(record: Callable[[logging.Logger], None]) -> str:
    """What a handler of anybody's writes."""
    stream, logger, before = (
        io.StringIO(),
        logging.getLogger("some.other"),
        logging.getLogRecordFactory(),
    )
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    try:
        redact_logs(Redactor(KEY))
        record(logger)
    finally:
        logging.setLogRecordFactory(before)
        logger.removeHandler(handler)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("message", "arguments"),
    [("%d items", ("x",)), ("%s %s", ("x",)), ("%(a)s", ({"b": "x"},)), ("%c", (1 << 40,))],
)
def test_a_log_line_that_does_not_fit_its_arguments_is_written_and_hurts_nobody(
    message: str, arguments: tuple[object, ...]
) -> None:
    said = logged(lambda log: log.warning(f"{message} {KEY}", *arguments))
    assert said.startswith(message) and HIDDEN in said and KEY not in said


def test_the_text_of_a_logged_exception_holds_no_key() -> None:
    def fail(log: logging.Logger) -> None:
        try:
            raise ValueError(f"no: {KEY}\x1b[2J\u202e")
        except ValueError:
            log.exception("failed")

    said = logged(fail)
    assert f"ValueError: no: {HIDDEN}\n" in said and "Traceback" in said
