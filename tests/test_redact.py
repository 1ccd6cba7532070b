"""The one redactor: whole texts, pieces, JSON, what was cut, and what a model and its tools say (tests/test_cases_sec.py: the program)."""

from __future__ import annotations

import io
import json
import logging
import random
from collections.abc import Callable

import pytest

from coder.features.redact import HIDDEN, RedactingModel, Redaction, Redactor, redact_logs
from coder.features.scripted import Reply
from coder.tools import ToolContext, Toolset, tool
from coder.types import ReasoningDelta, TextDelta, ToolCallDelta, ToolUpdate
from tests.harness import drive, run_loop, serve
from tests.terminal import promptly

KEY = "sk-abcabc-0123456789/abcdefghij+KLMNOP"


def test_a_text_without_the_key_is_the_same_object() -> None:
    value = {"a": ["text", {"b": 1, "c": None}], "d": "sk-abc"}
    assert Redactor(KEY).value(value) is value
    changed = Redactor(KEY).value(value | {KEY: [f"x{KEY}"]})
    assert changed == value | {HIDDEN: [f"x{HIDDEN}"]} and changed["a"] is value["a"]


@pytest.mark.parametrize("encode", [lambda text: text, json.dumps, lambda text: json.dumps(json.dumps(text)),
                                    lambda text: json.dumps(text).replace("/", "\\/"), lambda text: text.replace("+", "\\u002B")])
def test_every_spelling_in_json_is_found_in_text_and_in_bytes(encode: object) -> None:
    text = encode(f"<{KEY}>")  # type: ignore[operator]
    assert "0123456789" not in Redactor(KEY).text(text) and HIDDEN in Redactor(KEY).text(text)
    assert b"0123456789" not in Redactor(KEY).data(text.encode()) and HIDDEN.encode() in Redactor(KEY).data(text.encode())


@pytest.mark.parametrize(("text", "left"), [
    (f"a {KEY[:19]} … (line cut)", f"a {HIDDEN} … (line cut)"), (f"a {KEY[:30]}", f"a {HIDDEN}"), (f"…{KEY[-19:]} b", f"…{HIDDEN} b"),
    (f"…{KEY[3:]} b{KEY[:-1]}", f"…{HIDDEN} b{HIDDEN}"), (KEY[:18], KEY[:18]), (KEY[-18:], KEY[-18:])])
def test_half_a_key_and_more_is_found_where_a_text_was_cut(text: str, left: str) -> None:
    assert Redactor(KEY).text(text) == left


def test_of_two_keys_the_longer_goes_first_and_a_short_one_or_none_is_no_key() -> None:
    assert Redactor("sk-abcdefg1", "sk-abcdefg1-admin").text("sk-abcdefg1-admin sk-abcdefg1") == f"{HIDDEN} {HIDDEN}"
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
        text = "".join(chance.choice([key, key[:4], key[2:], key[:-1], key[-3:], "x ", chance.choice(key)]) for _ in range(8))
        redactor, at, out = Redactor(key), 0, ""
        stream = redactor.stream()
        while at < len(text):
            size = chance.randint(1, 6)
            out, at = out + stream.add(text[at:at + size]), at + size
        out += stream.rest()
        assert key not in out
        if len(key) < 24:  # of a long one half a key is taken out as soon as it is known to be no more
            assert out == redactor.text(text)


def test_text_goes_on_at_once_where_it_cannot_be_a_key() -> None:
    stream = Redactor(KEY).stream()
    assert [stream.add(piece) for piece in ("Hello, ", "s", "k", "y s", "k-abc", "abx")] == ["Hello, ", "", "", "sky ", "", "sk-abcabx"]
    assert stream.add("the end sk-") == "the end " and stream.rest() == "sk-" and stream.rest() == ""


def test_a_model_sends_and_says_no_key_in_deltas_answers_and_errors() -> None:
    reply = Reply(f"I say {KEY} again s", [("echo", {"text": f"{KEY}!"})], reasoning=f"think {KEY}")
    words = [{"role": "user", "content": f"mine is {KEY}"}]
    with serve(reply, Reply(f"no {KEY}", status=400)) as server:
        model = RedactingModel("m", base_url=server.url, api_key=KEY, redactor=Redactor(KEY))
        events, result = drive(run_loop(words, model, [], system=f"key: {KEY}"))
        assert KEY not in json.dumps(server.requests) and server.heads[0]["authorization"] == f"Bearer {KEY}"
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    assert text == f"I say {HIDDEN} again s" and "".join(e.text for e in events if isinstance(e, ReasoningDelta)) == f"think {HIDDEN}"
    assert KEY not in "".join(event.arguments for event in events if isinstance(event, ToolCallDelta))
    assert KEY not in json.dumps(result.messages[1:]) and result.error and KEY not in f"{result.error}{result.error.message}{result.text}"
    order = [type(event) for event in events if isinstance(event, TextDelta | ReasoningDelta | ToolCallDelta)]
    assert sorted(order, key=[ReasoningDelta, TextDelta, ToolCallDelta].index) == order, "what was held back comes before the next kind"


def test_a_tool_says_no_key_while_it_works_in_questions_and_at_its_end() -> None:
    details: list[str] = []

    @tool
    def leak(ctx: ToolContext) -> object:
        """Leak."""
        for at in range(0, len(KEY), 5):
            yield ctx.update(KEY[at:at + 5])
        yield ctx.update(" and on")
        yield from ctx.ask("edit", "a.txt", f"+{KEY}")
        return f"it is {KEY}"

    class Asked(Redaction):
        def before_tool_call(self, call: object, ctx: ToolContext) -> None:  # type: ignore[override]
            ctx.authorize = lambda ctx, permission, patterns, detail: details.append(detail)
            super().before_tool_call(call, ctx)  # type: ignore[arg-type]

    with serve(Reply("", [("leak", {})]), Reply("Done.")) as server:
        model = RedactingModel("m", base_url=server.url, api_key="k", redactor=Redactor())
        events, _ = drive(run_loop([], model, Toolset([leak]), prompts="go", hooks=Asked(Redactor(KEY))))
        assert server.requests[-1]["messages"][-1]["content"] == f"it is {HIDDEN}"
    assert "".join(event.text for event in events if isinstance(event, ToolUpdate)) == f"{HIDDEN} and on" and details == [f"+{HIDDEN}"]


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
    stream, logger, before = io.StringIO(), logging.getLogger("some.other"), logging.getLogRecordFactory()
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
    assert logged(lambda log: log.warning("got %s\nand on", "a\x1b]0;EVIL\x07b\u202e")) == "got ab\nand on\n"


@pytest.mark.parametrize(("message", "arguments"), [("%d items", ("x",)), ("%s %s", ("x",)), ("%(a)s", ({"b": "x"},)), ("%c", (1 << 40,))])
def test_a_log_line_that_does_not_fit_its_arguments_is_written_and_hurts_nobody(message: str, arguments: tuple[object, ...]) -> None:
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
