"""A stored conversation in which anything may stand: whatever reads the history takes it, and a defect of one feature ends no run."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, get_args

from hypothesis import given, seed, settings
from hypothesis import strategies as st

from coder.agent.compaction import Compaction, transcript
from coder.agent.instructions import FolderInstructions
from coder.agent.todo import todo
from coder.cli.render import print_history
from coder.cli.screen import Screen
from coder.devtools.replay import ScriptedModel
from coder.devtools.scripted import Body, Reply
from coder.events import Compacted, HookFailed
from coder.extend.guard import Guard
from coder.history import repair
from coder.hooks import FunctionHooks, HookChain
from coder.loop import run_loop
from coder.sessions.export import Format, export
from coder.sessions.recorder import Recorder
from coder.sessions.store import MEMORY, Store
from coder.types import Message, ToolCall, ToolResult
from tests.harness import FAST, ask, assert_all_valid, assert_valid, drive, serve
from tests.test_cli import Place, asked

NUMBERS = st.integers(-9, 10**20) | st.floats(allow_nan=False)
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=5)
KEYS = st.sampled_from(["items", "path", "text", "status", "id", "type", "image_url", "function"])
JUNK = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.sampled_from(["items", "path", "command"]), JUNK)
ARGUMENTS = JUNK | JUNK.map(json.dumps) | OBJECTS.map(json.dumps)
SUMMARY = Reply(
    "## Goal\nGo on.\n## Instructions\nnone\n## Discoveries\nnone\n## Accomplished\nnone\n## Files\nnone"
)


@st.composite
def strange(draw: Any) -> list[Message]:
    """A conversation with calls and results, and something random in each of them."""
    messages: list[Any] = [
        {"role": "user", "content": "Do it."},
        {"role": "assistant", "content": "I think. " * 3_000},
    ]
    for number in range(draw(st.integers(1, 4))):
        name, meta = draw(st.sampled_from(["todo", "read", "bash"])), {"timestamp": 1}
        function = {"name": name, "arguments": draw(ARGUMENTS)}
        call: Any = {"id": f"c{number}", "type": "function", "function": function}
        result: Any = {"role": "tool", "tool_call_id": f"c{number}", "content": "x" * 900}
        answer: Any = {"role": "assistant", "content": "So.", "tool_calls": [call], "meta": meta}
        result["meta"] = {**meta}
        for place in (call, function, result, answer):
            if draw(st.booleans()):
                place[draw(st.sampled_from(sorted(place)))] = draw(JUNK)
        messages += [answer, result]
    last = {"role": "user", "content": "And?"}, {"role": "assistant", "content": "Done."}
    return [*messages, *last]


def stored(store: Store, messages: list[Message]) -> str:
    """A session whose rows hold these messages, whatever they are."""
    info = store.create("/ws")
    plain: list[Message] = [{"role": "user", "content": str(at)} for at in range(len(messages))]
    Recorder(store, info, plain).close()
    with store.transaction() as db:
        for at, message in enumerate(messages):
            role = message.get("role")
            values = json.dumps(message), role if isinstance(role, str) else "", info.id, at
            db.execute(
                "UPDATE message SET data = ?, role = ? WHERE session = ? AND position = ?", values
            )
    return info.id


@seed(20261122)
@settings(max_examples=60, deadline=None)
@given(strange())
def test_whatever_stands_in_a_stored_conversation_is_read_shown_shortened_and_sent(
    messages: list[Message],
) -> None:
    store = Store(MEMORY)
    session_id = stored(store, messages)
    for form in get_args(Format):
        assert export(store, session_id, form)
    files = FolderInstructions(Path("/nowhere"))
    with Recorder(store, store.get(session_id)) as recorder:
        assert transcript(repair(recorder.messages), 60_000)
        print_history(Screen(io.StringIO()), recorder.messages)
        model = ScriptedModel([SUMMARY, Reply(calls=[("todo", {"items": 5})]), Reply("Well.")])
        compaction = Compaction(model)
        compaction.request()
        events, result = drive(
            run_loop(
                recorder.messages,
                model,
                [todo],
                prompt="Go on.",
                hooks=HookChain(files.hooks, compaction),
            ),
            recorder,
        )
        assert not recorder.problem
    assert result.text == "Well." and any(isinstance(event, Compacted) for event in events)
    for body in model.requests:
        assert_valid(body)


def test_a_checklist_that_is_none_ends_neither_the_run_nor_the_session(tmp_path: Path) -> None:
    """The call is refused, stays in the history, and is read at each compaction: there, and when the session is taken up."""
    place = Place(tmp_path)
    (place.ws / "big").write_text("a line of the file\n" * 4_000)
    steps = iter(
        [
            Reply(calls=[("todo", {"items": 5})]),
            *[Reply(calls=[("read", {"path": "big", "offset": n})]) for n in (1, 900, 1800)],
            Reply("done"),
        ]
    )

    def script(body: Body) -> Reply:
        if "<conversation>" in str(body["messages"][-1]["content"]):
            return SUMMARY
        return next(steps, Reply("Here."))

    with serve(script) as server:
        first = place.coder("go", server=server, CODER_CONTEXT_WINDOW="16000")
        assert first.returncode == 0 and "shortened" in first.stderr, first.stderr
        again = place.coder("-c", "and now", server=server, CODER_CONTEXT_WINDOW="16000")
        assert (again.returncode, again.stdout) == (0, "Here.\n"), again.stderr
        assert asked(server, -1) == "and now" and "Traceback" not in first.stderr + again.stderr
        assert_all_valid(server)


class Defect(FunctionHooks):
    """A feature with a bug in it."""

    def after_tool_call(self, call: ToolCall, result: ToolResult) -> Any:
        return {}["nothing"]

    def transform_context(self, messages: list[Message], abort: Any) -> Any:
        yield from ()
        raise ZeroDivisionError("of course")


def test_a_feature_that_fails_is_reported_once_and_left_out() -> None:
    with serve(
        Reply(calls=[("todo", {"items": []})]),
        Reply(calls=[("todo", {"items": [{"text": "x"}]})]),
        Reply("done"),
    ) as server:
        events, result = ask(
            server, tools=[todo], hooks=HookChain(Guard(Defect(), seconds=None)), retry=FAST
        )
    failed = [event for event in events if isinstance(event, HookFailed)]
    assert result.text == "done" and len(server.requests) == 3
    assert [(event.hook, event.place) for event in failed] == [
        ("Defect", "transform_context"),
        ("Defect", "after_tool_call"),
    ]
    assert "of course" in failed[0].error
