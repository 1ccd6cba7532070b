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
from coder.devtools.scripted import Reply, ScriptedModel
from coder.events import Compacted
from coder.history import repair
from coder.hooks import HookChain
from coder.loop import run_loop
from coder.sessions.export import Format, export
from coder.sessions.recorder import Recorder
from coder.sessions.store import MEMORY, Store
from coder.types import Message
from tests.harness import assert_valid, drive

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
