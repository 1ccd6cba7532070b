"""Golden orders of events: whole runs as lines, and the state that is rebuilt from the events
alone.

One line is one event with the fields that matter; a message that starts and ends at once is one
line, and so are the deltas of a kind in a row. The ids of calls are numbered as they come up. Every
story is played by `run_loop` and by `Agent`, with the same lines. P59 to P61 are the orders of
pi-agent-core, in our words (its turn is our step).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from textwrap import dedent
from typing import Any

import pytest

from coder.abort import Abort
from coder.agent.agent import Agent
from coder.ai import ChatModel
from coder.devtools.scripted import Reply
from coder.events import (
    Event,
    MessageEnd,
    MessageStart,
    ReasoningDelta,
    Retry,
    RunEnd,
    Status,
    StepEnd,
    TextDelta,
    ToolCallDelta,
    ToolEnd,
    ToolStart,
    ToolUpdate,
)
from coder.history import text_of, user
from coder.hooks import FunctionHooks, Hooks
from coder.loop import run_loop
from coder.toolset import ToolContext
from coder.types import Message
from tests.harness import FAST, add, assert_all_valid, drive, quick, serve
from tests.terminal import promptly

# ---- a run as lines ------------------------------------------------------------------------------


class Story:
    """Events as lines; knows the ids of calls that came up."""

    def __init__(self) -> None:
        self.ids: dict[str, str] = {}
        self.lines: list[str] = []
        self.delta = ""  # the kind of the last line, if it is of deltas
        self.status = ""

    def id(self, call_id: str) -> str:
        return self.ids.setdefault(call_id, f"#{len(self.ids) + 1}")

    def message(self, message: Message) -> str:
        """Its role, the call that it answers, its text, its calls, and what is marked in its
        meta."""
        words = [message["role"]]
        words += [self.id(message["tool_call_id"])] if "tool_call_id" in message else []
        words += [repr(text_of(message))] if text_of(message) else []
        words += [
            f"{self.id(call['id'])}={call['function']['name']}"
            for call in message.get("tool_calls", ())
        ]
        return " ".join(
            [
                *words,
                *({"is_error", "aborted"} & message.get("meta", {}).keys()),
            ]
        )

    def add(self, event: Event) -> None:
        match event:
            case TextDelta() | ReasoningDelta():
                self.piece(event.type, event.text)
            case ToolCallDelta():
                kind = f"{event.type} {self.id(event.id)} {event.name}"
                self.piece(kind, event.arguments)
            case Status() if self.status == event.status:
                pass  # tests/test_loop.py looks at the states
            case _:
                self.line(f"{event.type} {self.fields(event)}".rstrip())
        if isinstance(event, Status):
            self.status = event.status

    def piece(self, kind: str, text: str) -> None:
        if kind != self.delta:
            self.delta = kind
            self.text = ""
            self.lines.append("")
        self.text += text
        self.lines[-1] = f"{kind} {self.text!r}"

    def line(self, line: str) -> None:
        if self.lines and line.replace("message_end", "message_start") == self.lines[-1]:
            line = self.lines.pop().replace("message_start", "message_start/end")
        self.lines.append(line)
        self.delta = ""

    def fields(self, event: Event) -> str:
        """The fields that matter; a kind of event that is not here fails the test."""
        match event:
            case RunEnd():
                error = f" error={event.error.kind}" if event.error else ""
                return f"{event.stop_reason} {event.text!r} steps={event.steps}{error}"
            case StepEnd():
                results = [self.id(result["tool_call_id"]) for result in event.tool_results]
                return " ".join(
                    [
                        event.finish_reason,
                        event.message.get("role", "-"),
                        *results,
                    ]
                )
            case MessageStart() | MessageEnd():
                return self.message(event.message)
            case ToolStart():
                return f"{self.id(event.id)} {event.name} {json.dumps(event.arguments)}"
            case ToolEnd():
                mark = " is_error" if event.is_error else ""
                return f"{self.id(event.id)} {event.result.content!r}{mark}"
            case Retry():
                return f"{event.attempt} {event.error.kind}"
        assert event.type in FIELDS, "add it to FIELDS, and to the stories of runs that have it"
        names = FIELDS[event.type].split()
        values = [getattr(event, name) for name in names]
        return " ".join(
            self.id(each) if name == "id" else str(each) for name, each in zip(names, values)
        )


FIELDS = {"run_start": "", "step_start": "step", "tool_update": "id text", "status": "status"}


def story(events: Sequence[Event]) -> str:
    told = Story()
    for event in events:
        told.add(event)
    return "\n".join(told.lines)


def lines(*parts: str) -> str:
    return "\n".join(dedent(part).strip() for part in parts)


def answered(text: str, steps: int = 1) -> str:
    """How a run ends with a plain answer in its last step."""
    return lines(f"""
        message_start assistant
        text_delta {text!r}
        message_end assistant {text!r}
        step_end stop assistant
        status idle
        run_end stop {text!r} steps={steps}
        """)


# ---- playing it ----------------------------------------------------------------------------------

Watch = Callable[[Event, Callable[[], None]], None]  # (event, what aborts the run)
Played = tuple[list[Event], list[Message]]


def by_the_loop(chat: ChatModel, hooks: Hooks, watch: Watch, options: dict[str, Any]) -> Played:
    abort = Abort()
    messages = list[Message]()
    events, result = drive(
        run_loop(messages, chat, prompt="go", hooks=hooks, abort=abort, **options),
        lambda event: watch(event, abort.set),
    )
    assert result.messages is messages
    return events, messages


def by_an_agent(chat: ChatModel, hooks: Hooks, watch: Watch, options: dict[str, Any]) -> Played:
    agent = Agent(chat, hooks=hooks, **options)
    seen = list[Event]()
    agent.subscribe(seen.append)
    events, result = drive(
        agent.stream("go"),
        lambda event: watch(event, agent.abort),
    )
    assert [*map(id, seen)] == [*map(id, events)], "a subscriber gets what stream() yields"
    assert agent.messages == result.messages
    assert not agent.state.is_streaming
    error = agent.state.error
    assert str(error) == result.text if result.stop_reason == "aborted" else error is result.error
    return events, agent.messages


def unwatched(event: Event, stop: Callable[[], None]) -> None:
    pass


# How each run begins; left out of its story.
BEGINNING = "run_start\nstatus busy\nstep_start 1\nmessage_start/end user 'go'\n"


def assert_rebuilt(events: Sequence[Event], messages: list[Message]) -> None:
    """P14, P16, P25: the events alone hold the list and the calls."""
    ended = [event.message for event in events if isinstance(event, MessageEnd)]
    assert messages == [each for each in ended if text_of(each) or each.get("tool_calls")]
    started = [event.id for event in events if isinstance(event, ToolStart)]
    assert started == [event.id for event in events if isinstance(event, ToolEnd)]
    assert isinstance(events[-1], RunEnd)


def stopping(kind: type[Event], text: str = "") -> Watch:
    """Abort at the first event of a kind that says this."""

    def watch(event: Event, stop: Callable[[], None]) -> None:
        if isinstance(event, kind) and text in getattr(event, "text", ""):
            stop()

    return watch


def saying(place: str, count: int, text: str) -> Callable[[], Hooks]:
    """Hooks that give a message when this queue is asked for the `count`th time."""

    def made() -> Hooks:
        asked = iter(range(1, 100))
        return FunctionHooks(**{place: lambda: [user(text)] if next(asked) == count else []})

    return made


@quick
def work(ctx: ToolContext) -> Generator[str, None, str]:
    yield "half way"
    ctx.abort.wait(60)
    return "never"


TWO = Reply(
    "Let me see.",
    calls=[
        ("add", {"a": 1, "b": 2}),
        ("add", {"a": 3, "b": 4}),
    ],
)

# name: (replies, options, the story in parts)
STORIES: dict[str, tuple[Any, ...]] = {
    # P59
    "a plain answer": (
        [Reply("Four.", reasoning="Hm, easy.")],
        {},
        """
        message_start assistant
        reasoning_delta 'Hm, easy.'
        text_delta 'Four.'
        message_end assistant 'Four.'
        step_end stop assistant
        status idle
        run_end stop 'Four.' steps=1
        """,
    ),
    # P60, P33: start, end, then the result as a message; the step ends after it
    "an answer with a tool": (
        [
            Reply(calls=[("add", {"a": 2, "b": 2})]),
            Reply("Four."),
        ],
        {},
        """
        message_start assistant
        tool_call_delta #1 add '{"a": 2, "b": 2}'
        message_end assistant #1=add
        tool_start #1 add {"a": 2, "b": 2}
        tool_end #1 '4'
        message_start/end tool #1 '4'
        step_end tool_calls assistant #1
        step_start 2
        """,
        answered("Four.", 2),
    ),
    # P61, P36: the queue is asked at the start and after each tool: the second time is after the
    # first tool
    "steering between two tools": (
        [TWO, Reply("Stopped.")],
        {"hooks": saying("get_steering_messages", 2, "Stop.")},
        """
        message_start assistant
        text_delta 'Let me see.'
        tool_call_delta #1 add '{"a": 1, "b": 2}'
        tool_call_delta #2 add '{"a": 3, "b": 4}'
        message_end assistant 'Let me see.' #1=add #2=add
        tool_start #1 add {"a": 1, "b": 2}
        tool_end #1 '3'
        message_start/end tool #1 '3'
        tool_start #2 add {"a": 3, "b": 4}
        tool_end #2 'Skipped due to queued user message.' is_error
        message_start/end tool #2 'Skipped due to queued user message.' is_error
        message_start/end user 'Stop.'
        step_end tool_calls assistant #1 #2
        step_start 2
        """,
        answered("Stopped.", 2),
    ),
    # P26, P41: a step of its own in the same run
    "a follow-up": (
        [Reply("One."), Reply("Two.")],
        {"hooks": saying("get_follow_up_messages", 1, "And then?")},
        """
        message_start assistant
        text_delta 'One.'
        message_end assistant 'One.'
        step_end stop assistant
        step_start 2
        message_start/end user 'And then?'
        """,
        answered("Two.", 2),
    ),
    # the half answer has a start and no end: `retry` comes in its place
    "retries": (
        [
            Reply("half an", cut=3),
            Reply("busy", status=503),
            Reply("A whole one."),
        ],
        {},
        """
        message_start assistant
        text_delta 'half an'
        retry 1 incomplete
        status retry
        status busy
        retry 2 server
        status retry
        status busy
        """,
        answered("A whole one."),
    ),
    # P28, P47
    "an abort in the middle of the text": (
        [Reply("alpha beta gamma", cut=3, close="hang")],
        {"watch": stopping(TextDelta, "beta")},
        """
        message_start assistant
        text_delta 'alpha beta'
        message_end assistant 'alpha beta' aborted
        step_end aborted assistant
        status idle
        run_end aborted 'Request aborted.' steps=1
        """,
    ),
    "an abort in a tool": (
        [
            Reply(
                "Working.",
                calls=[
                    ("work", {}),
                    ("add", {"a": 1, "b": 2}),
                ],
            )
        ],
        {"tools": [work, add], "watch": stopping(ToolUpdate)},
        r"""
        message_start assistant
        text_delta 'Working.'
        tool_call_delta #1 work '{}'
        tool_call_delta #2 add '{"a": 1, "b": 2}'
        message_end assistant 'Working.' #1=work #2=add
        tool_start #1 work {}
        tool_update #1 half way
        tool_end #1 'half way\n[aborted by the user]' is_error
        message_start/end tool #1 'half way\n[aborted by the user]' is_error
        tool_start #2 add {"a": 1, "b": 2}
        tool_end #2 'Not run: aborted by the user.' is_error
        message_start/end tool #2 'Not run: aborted by the user.' is_error
        step_end tool_calls assistant #1 #2
        status idle
        run_end aborted 'Request aborted.' steps=1
        """,
    ),
}


@pytest.mark.parametrize("play", [by_the_loop, by_an_agent])
@pytest.mark.parametrize("name", STORIES)
def test_a_run_is_this_story_and_its_events_hold_what_it_left(name: str, play: Any) -> None:
    script, options, *told = STORIES[name]
    options = {"retry": FAST, "tools": [add]} | options
    hooks = options.pop("hooks", Hooks)
    watch = options.pop("watch", unwatched)
    with serve(*script) as server, promptly(20):
        events, messages = play(
            ChatModel("m", base_url=server.url),
            hooks(),
            watch,
            options,
        )
        assert_all_valid(server)
    assert_rebuilt(events, messages)
    assert story(events) == BEGINNING + lines(*told)
