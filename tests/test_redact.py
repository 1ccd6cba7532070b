"""The redactor: whole texts, pieces, JSON, and what a model and its tools return (tests/test_cases_sec.py: the program)."""

from __future__ import annotations

import io
import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest

from coder.devtools.scripted import Body, Reply, ScriptedServer
from coder.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolUpdate
from coder.permissions.redact import HIDDEN, RedactingModel, Redaction, Redactor, redact_logs
from coder.toolset import ToolContext, Toolset, tool
from tests.harness import ask, drive, run_loop, serve
from tests.terminal import OneShot, promptly

KEY = "sk-abcabc-0123456789/abcdefghij+KLMNOP"


def test_a_text_without_the_key_is_the_same_object() -> None:
    value = {"a": ["text", {"b": 1, "c": None}], "d": "sk-abc"}
    assert Redactor(KEY).value(value) is value
    changed = Redactor(KEY).value(value | {KEY: [f"x{KEY}"]})
    assert changed == value | {HIDDEN: [f"x{HIDDEN}"]} and changed["a"] is value["a"]


@pytest.mark.parametrize(
    "encode",
    [
        lambda text: text,
        json.dumps,
        lambda text: json.dumps(json.dumps(text)),
        lambda text: quote(text, safe=""),
    ],
)
def test_a_key_in_json_and_in_an_address_is_found_in_text_and_in_bytes(encode: object) -> None:
    key = f'{KEY}"é'
    text, redactor = encode(f"<{key}>"), Redactor(key)  # type: ignore[operator]
    assert redactor.text(text) == encode(f"<{HIDDEN}>").replace(quote(HIDDEN), HIDDEN)  # type: ignore[operator]
    assert redactor.data(text.encode()).decode() == redactor.text(text)


def test_of_two_keys_the_longer_goes_first_and_a_short_one_or_none_is_no_key() -> None:
    assert (
        Redactor("sk-abcdefg1", "sk-abcdefg1-admin").text("sk-abcdefg1-admin sk-abcdefg1")
        == f"{HIDDEN} {HIDDEN}"
    )
    assert Redactor("short12", "", None, " ").text("short12  ") == "short12  "


def test_no_text_and_no_key_takes_long() -> None:
    with promptly(5):
        Redactor("x" * 200 + "!").text("x" * 1_000_000)
        redactor = Redactor("/" * 40, KEY)
        redactor.text("/" * 100_000)
        redactor.text(KEY[:19] * 20_000)
        stream = redactor.stream()
        for _ in range(20_000):
            stream.add("/s")


@pytest.mark.parametrize("key", [KEY, "aaaaaaaaab", "abcababcabx", "aab1aab1aab"])
def test_pieces_make_no_difference(key: str) -> None:
    """2,000 texts of the key, parts of it and its letters, cut anywhere: what comes out is what the whole gives, and no key."""
    chance = random.Random(7)
    for _ in range(2000):
        text = "".join(
            chance.choice([key, key[:4], key[2:], key[:-1], key[-3:], "x ", chance.choice(key)])
            for _ in range(8)
        )
        redactor, at, out = Redactor(key), 0, ""
        stream = redactor.stream()
        while at < len(text):
            size = chance.randint(1, 6)
            out, at = out + stream.add(text[at : at + size]), at + size
        out += stream.rest()
        assert key not in out
        assert out == redactor.text(text)


def test_text_goes_on_at_once_where_it_cannot_be_a_key() -> None:
    stream = Redactor(KEY).stream()
    assert [stream.add(piece) for piece in ("Hello, ", "s", "k", "y s", "k-abc", "abx")] == [
        "Hello, ",
        "",
        "",
        "sky ",
        "",
        "sk-abcabx",
    ]
    assert (
        stream.add("the end sk-") == "the end " and stream.rest() == "sk-" and stream.rest() == ""
    )


def test_a_model_sends_and_says_no_key_in_deltas_answers_and_errors() -> None:
    reply = Reply(f"I say {KEY} again s", [("echo", {"text": f"{KEY}!"})], reasoning=f"think {KEY}")
    words = [{"role": "user", "content": f"mine is {KEY}"}]
    with serve(reply, Reply(f"no {KEY}", status=400)) as server:
        model = RedactingModel("m", base_url=server.url, api_key=KEY, redactor=Redactor(KEY))
        events, result = drive(run_loop(words, model, [], system=f"key: {KEY}"))
        assert (
            KEY not in json.dumps(server.requests)
            and server.heads[0]["authorization"] == f"Bearer {KEY}"
        )
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    assert (
        text == f"I say {HIDDEN} again s"
        and "".join(e.text for e in events if isinstance(e, ReasoningDelta)) == f"think {HIDDEN}"
    )
    assert KEY not in "".join(
        event.arguments for event in events if isinstance(event, ToolCallDelta)
    )
    assert (
        KEY not in json.dumps(result.messages[1:])
        and result.error
        and KEY not in f"{result.error}{result.error.message}{result.text}"
    )
    order = [
        type(event)
        for event in events
        if isinstance(event, TextDelta | ReasoningDelta | ToolCallDelta)
    ]
    assert sorted(order, key=[ReasoningDelta, TextDelta, ToolCallDelta].index) == order, (
        "what was held back comes before the next kind"
    )


@pytest.mark.parametrize("form", ["text", "stream-json"])
@pytest.mark.parametrize("status", [401, 503])
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


def test_ids_and_names_of_calls_hold_no_key_and_a_call_with_one_is_run(tmp_path: Path) -> None:
    def call(index: int, id: str, name: str) -> dict[str, object]:  # noqa: A002
        return {
            "index": index,
            "id": id,
            "function": {"name": name, "arguments": json.dumps({"path": str(index)})},
        }

    def script(body: Body) -> Reply:
        if body["messages"][-1]["role"] == "tool":
            return Reply("done")
        key = sent(server)
        calls = [
            call(0, f"call-{key}", "ls"),
            call(1, f"{key}-1", "ls"),
            call(2, "plain", f"x{key}"),
            call(3, key[:-3], "ls"),
        ]
        pieces = [
            {"index": 4, "id": "more", "function": {"name": key[:at]}}
            for at in range(9, len(key) + 1, 9)
        ]
        deltas = [{"choices": [{"delta": {"tool_calls": [each]}}]} for each in [*calls, *pieces]]
        return Reply(
            chunks=[b"data: " + json.dumps(delta).encode() + b"\n\n" for delta in deltas]
            + [b"data: [DONE]\n\n"]
        )

    for number in "013":
        (tmp_path / "ws" / number).mkdir(parents=True)
    with (
        serve(script) as server,
        OneShot(tmp_path, server, "--output-format", "stream-json", "go") as run,
    ):
        assert run.end() == 0
        events = [json.loads(line) for line in run.out.splitlines()]
        assert run.key[:18] not in run.out
        started, ended = (
            [each["id"] for each in events if each["type"] == kind]
            for kind in ("tool_start", "tool_end")
        )
        deltas = {each["id"] for each in events if each["type"] == "tool_call_delta"}
        assert len(set(started)) == 5 and set(ended) == deltas == set(started)
        results = [
            message for message in server.requests[-1]["messages"] if message["role"] == "tool"
        ]
        assert [message["tool_call_id"] for message in results] == started
        assert not [message for message in results if "Not run" in message["content"]]
        failed = [each["id"] for each in events if each["type"] == "tool_end" and each["is_error"]]
        assert failed == [started[2], started[4]], "the tools that are not there"


def test_a_name_that_is_a_key_with_signs_that_no_name_has_is_hidden_too() -> None:
    with serve(Reply(calls=[(f"x{KEY}", {})]), Reply("done")) as server:
        events, result = drive(
            run_loop(
                [],
                RedactingModel("m", base_url=server.url, api_key=KEY, redactor=Redactor(KEY)),
                prompts="go",
            )
        )
        assert "KLMNOP" not in f"{events}{result.messages}{server.requests}"


def test_a_plain_model_shows_no_key_in_the_number_of_a_request() -> None:
    with serve(Reply("no", status=401, headers={"x-request-id": f"for {KEY}"})) as server:
        _, result = ask(server, model={"api_key": KEY})
    assert result.error and result.error.request_id == "for ***"


def test_a_tool_says_no_key_while_it_works_in_questions_and_at_its_end() -> None:
    details: list[str] = []

    @tool
    def leak(ctx: ToolContext) -> object:
        """Leak."""
        for at in range(0, len(KEY), 5):
            yield ctx.update(KEY[at : at + 5])
        yield ctx.update(" and on")
        yield from ctx.ask("edit", "a.txt", f"+{KEY}")
        return f"it is {KEY}"

    class Asked(Redaction):
        def before_tool_call(self, call: object, ctx: ToolContext) -> None:  # type: ignore[override]
            ctx.authorize = lambda ctx, permission, patterns, detail: details.append(detail)
            super().before_tool_call(call, ctx)  # type: ignore[arg-type]

    with serve(Reply("", [("leak", {})]), Reply("Done.")) as server:
        model = RedactingModel("m", base_url=server.url, api_key="k", redactor=Redactor())
        events, _ = drive(
            run_loop([], model, Toolset([leak]), prompts="go", hooks=Asked(Redactor(KEY)))
        )
        assert server.requests[-1]["messages"][-1]["content"] == f"it is {HIDDEN}"
    assert "".join(
        event.text for event in events if isinstance(event, ToolUpdate)
    ) == f"{HIDDEN} and on" and details == [f"+{HIDDEN}"]


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


def test_a_log_line_does_not_drive_the_terminal() -> None:
    assert (
        logged(lambda log: log.warning("got %s\nand on", "a\x1b]0;EVIL\x07b\u202e"))
        == "got ab\nand on\n"
    )


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
            raise ValueError(f"no: {KEY}\x1b[2J")
        except ValueError:
            log.exception("failed")

    said = logged(fail)
    assert f"ValueError: no: {HIDDEN}\n" in said and "Traceback" in said
