"""The redactor: texts, JSON, logs, and what a model and its tools return (test_cases_sec.py: the
program)."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

from coder.ai import ChatModel
from coder.devtools.scripted import Reply, ScriptedServer
from coder.events import ToolUpdate
from coder.permissions.redact import HIDDEN, Redaction, Redactor, redact_logs, redacted
from coder.toolset import ToolContext, Toolset, tool
from coder.types import Message
from tests.harness import drive, run_loop, serve
from tests.terminal import OneShot, add_plugin

KEY = "sk-abcabc-0123456789/abcdefghij+KLMNOP"


def redacting(server: ScriptedServer) -> dict[str, Any]:
    """A model and hooks that redact the key that the model sends."""
    model = ChatModel(
        "m",
        base_url=server.url,
        api_key=KEY,
        redact=Redactor(KEY).data,
    )
    return {"model": model, "hooks": Redaction(Redactor(KEY)), "prompt": "go"}


def chunks(*deltas: dict[str, Any], end: str) -> list[bytes]:
    """The bytes of a stream of these deltas."""
    choices = [{"delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"delta": {}, "finish_reason": end})
    lines = [json.dumps({"choices": [choice]}).encode() for choice in choices]
    return [b"data: %s\n\n" % line for line in [*lines, b"[DONE]"]]


def test_every_string_of_a_json_value_is_redacted() -> None:
    value = {
        "a": ["text", {"b": 1, "c": None}],
        KEY: [f"x{KEY}"],
    }
    expected = {
        "a": ["text", {"b": 1, "c": None}],
        HIDDEN: [f"x{HIDDEN}"],
    }
    assert redacted(value, Redactor(KEY).text) == expected


def test_which_keys_are_found_and_how() -> None:
    both = Redactor("sk-abcdefg1", "sk-abcdefg1-admin")
    assert both.text("sk-abcdefg1-admin sk-abcdefg1") == f"{HIDDEN} {HIDDEN}"
    assert Redactor("short12", "", None, " ").text("short12  ") == "short12  "
    assert Redactor("longer12").text("a longer12") == f"a {HIDDEN}", "from 8 characters on"
    # What users write where a local server wants a key and does not check it
    placeholders = "none sk-no-key sk-no-key-required not-needed lm-studio EMPTY xxxxxxxx password"
    for key in [*placeholders.split(), "your-api-key", "12345678"]:
        assert Redactor(key).text(f"{key} it is") == f"{key} it is"
    key = f'{KEY}"é'  # as JSON escapes it
    line, clean = (json.dumps({"key": f"<{each}>"}) for each in (key, HIDDEN))
    assert Redactor(key).text(line) == clean
    assert Redactor(key).data(line.encode()).decode() == clean


def test_an_answer_that_repeats_a_key_in_pieces_is_kept_without_it() -> None:
    deltas = [
        {"content": KEY[:9]},
        {"content": KEY[9:]},
        {"reasoning_content": KEY},
    ]
    messages: list[Message] = []
    with serve(Reply(chunks=chunks(*deltas, end="stop"))) as server:
        drive(run_loop(messages, tools=[], **redacting(server)))
    assert messages[-1]["content"] == HIDDEN
    assert KEY not in json.dumps(messages)


def test_a_tool_says_no_key_while_it_works_in_questions_and_at_its_end() -> None:
    details: list[str] = []

    @tool
    def leak(ctx: ToolContext) -> object:
        """Leak."""
        yield ctx.update(f"{KEY} and on")
        yield from ctx.ask("edit", "a.txt", f"+{KEY}")
        return f"it is {KEY}"

    class Asked(Redaction):
        def before_tool_call(self, call: Any, ctx: ToolContext) -> None:  # type: ignore[override]
            ctx.authorize = lambda ctx, permission, patterns, detail: details.append(detail)
            super().before_tool_call(call, ctx)

    with serve(
        Reply("", [("leak", {})]),
        Reply("Done."),
    ) as server:
        given = redacting(server) | {"hooks": Asked(Redactor(KEY))}
        events, _ = drive(
            run_loop(
                [],
                tools=Toolset([leak]),
                **given,
            )
        )
        assert server.requests[-1]["messages"][-1]["content"] == f"it is {HIDDEN}"
    shown = [event.text for event in events if isinstance(event, ToolUpdate)]
    assert "".join(shown) == f"{HIDDEN} and on"
    assert details == [f"+{HIDDEN}"]


def test_logs_hold_no_key_and_no_line_of_them_hurts_anybody() -> None:
    stream = io.StringIO()
    log = logging.getLogger("some")
    before = logging.getLogRecordFactory()
    handler = logging.StreamHandler(stream)
    log.addHandler(handler)
    try:
        redact_logs(Redactor(KEY))
        log.warning("sent %s to %r, 100%%", KEY, {"key": KEY})
        # none of these fits its arguments
        log.warning(f"%d items {KEY}", "x")
        log.warning(f"%s %s {KEY}", "x")
        log.warning(f"%(a)s {KEY}", {"b": "x"})
        log.warning(f"%c {KEY}", 1 << 40)
        try:
            raise ValueError(f"no: {KEY}\x1b[2J\u202e")
        except ValueError:
            log.exception("failed")
    finally:
        logging.setLogRecordFactory(before)
        log.removeHandler(handler)
    said = stream.getvalue()
    assert said.startswith(f"sent {HIDDEN} to {{'key': '{HIDDEN}'}}, 100%\n%d items {HIDDEN}")
    assert KEY not in said
    assert said.count(HIDDEN) == 7
    assert f"ValueError: no: {HIDDEN}\n" in said
    assert "Traceback" in said


def test_what_a_plugin_logs_when_it_is_loaded_holds_no_key(tmp_path: Path) -> None:
    """Nothing has imported `logging` before."""
    assert_unloaded = "import sys\nassert 'logging' not in sys.modules, 'loaded'\n"
    add_plugin(
        tmp_path,
        "loud.py",
        f"{assert_unloaded}import logging\nlogging.warning('the key is %s', {KEY!r})\n"
        "def setup(api): logging.getLogger('loud').error('now %s', 'x\x1b[2J')\n",
    )
    with (
        serve(Reply("done")) as server,
        OneShot(tmp_path, server, "go", OPENAI_API_KEY=KEY) as run,
    ):
        assert run.end() == 0
        assert "skipped" not in run.err
        assert f"the key is {HIDDEN}" in run.err
        assert "now x" in run.err
        assert "\x1b" not in run.err
