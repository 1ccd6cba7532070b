"""The events that come out of a run: everything that a user interface, a session store or a trace
needs.

    for event in run_loop(messages, model, tools):
        match event:
            case TextDelta(text=text):
                print(text, end="")
            case ToolStart(title=title):
                print(title)

`Event` is the union of all classes, so that `match` and `event.type == "..."` narrow for a type
checker. `to_dict()` is the line of `--output-format stream-json`. An event with a `reply` method
asks something: the consumer calls it before it takes the next event; without a reply the answer is
no.

Tools and hooks that report or ask something while they work are generators: they yield events and
return their value.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeAlias, TypeVar, dataclass_transform

from coder.types import Message, ModelError, StopReason, T, ToolResult, Trigger, Usage

Y = TypeVar("Y")  # what a generator yields
Answer = Literal["once", "always", "no"]
State = Literal[
    "preparing", "asking", "waiting", "compacting", "running_tools", "finishing", "ended"
]


@dataclass_transform(field_specifiers=(field,))
class BaseEvent:
    """Base of all events: makes a dataclass of each subclass. `type` is its name in snake_case.

    It has one repr and one comparison for all of them: generated ones cost 6 ms at each start.
    """

    def __init_subclass__(cls) -> None:
        dataclass(cls, repr=False, eq=False)
        if "type" not in vars(cls):  # an event of a plugin's own
            cls.type = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        event: Any = self  # each subclass is a dataclass
        shown = [field.name for field in dataclasses.fields(event) if field.repr]
        parts = [f"{name}={getattr(event, name)!r}" for name in shown]
        return f"{type(self).__name__}({', '.join(parts)})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def to_dict(self) -> dict[str, Any]:
        """{"type": ..., fields by name}, without those with repr=False (replies, histories)."""
        return {"type": getattr(self, "type", "event")} | _fields_of(self)


def _fields_of(value: Any) -> dict[str, Any]:
    return {
        shown.name: _json_of(getattr(value, shown.name))
        for shown in dataclasses.fields(value)
        if shown.repr
    }


def _json_of(value: Any) -> Any:
    """Events, errors and dataclasses as dicts; everything else as it is."""
    if isinstance(value, BaseEvent | ModelError):
        return value.to_dict()
    if dataclasses.is_dataclass(value):
        return _fields_of(value)
    return value


# ---- a run and its steps -------------------------------------------------------------------------


class RunStart(BaseEvent):
    """The first event of a run."""

    type: ClassVar[Literal["run_start"]] = "run_start"


class RunEnd(BaseEvent):
    """`text` is the answer, or why there is none. `error`: the model call that ended the run."""

    type: ClassVar[Literal["run_end"]] = "run_end"
    stop_reason: StopReason
    text: str
    usage: Usage
    steps: int
    error: ModelError | None = None


class StepStart(BaseEvent):
    """A step begins: one request, and the tools that its answer calls. The first is 1."""

    type: ClassVar[Literal["step_start"]] = "step_start"
    step: int


class StepEnd(BaseEvent):
    """`message` is the answer, `tool_results` are the results of its calls."""

    type: ClassVar[Literal["step_end"]] = "step_end"
    message: Message
    tool_results: list[Message]
    finish_reason: str
    usage: Usage


class Status(BaseEvent):
    """What the run is doing; docs/reading-guide.md draws the states and the ways between them."""

    type: ClassVar[Literal["status"]] = "status"
    status: Literal["idle", "busy", "retry"] = field(init=False)  # the state in a rougher word
    state: State

    def __post_init__(self) -> None:
        if self.state == "ended":
            self.status = "idle"
        elif self.state == "waiting":
            self.status = "retry"
        else:
            self.status = "busy"


class Retry(BaseEvent):
    """Attempt `attempt` failed, and its text is void. The next one starts after `delay` seconds."""

    type: ClassVar[Literal["retry"]] = "retry"
    attempt: int
    delay: float
    error: ModelError


class Compacted(BaseEvent):
    """`before` and `after` are {"messages": n, "tokens": n}; `messages` is the new list."""

    type: ClassVar[Literal["compacted"]] = "compacted"
    trigger: Trigger
    attempt: int
    before: dict[str, int]
    after: dict[str, int]
    strategy: str
    messages: list[Message] = field(default_factory=list, repr=False)


# ---- messages and their pieces -------------------------------------------------------------------


class MessageStart(BaseEvent):
    """A message of any role begins; that of the model is empty until its text arrives."""

    type: ClassVar[Literal["message_start"]] = "message_start"
    message: Message


class MessageEnd(BaseEvent):
    """A message is whole, and belongs to the conversation."""

    type: ClassVar[Literal["message_end"]] = "message_end"
    message: Message


class TextDelta(BaseEvent):
    """A piece of the answer's text, as it arrives."""

    type: ClassVar[Literal["text_delta"]] = "text_delta"
    text: str


class ReasoningDelta(BaseEvent):
    """A piece of the model's reasoning, as it arrives."""

    type: ClassVar[Literal["reasoning_delta"]] = "reasoning_delta"
    text: str


class ToolCallDelta(BaseEvent):
    """A piece of a call while it arrives; `arguments` is raw text, for display only."""

    type: ClassVar[Literal["tool_call_delta"]] = "tool_call_delta"
    id: str
    name: str
    arguments: str


# ---- tools ---------------------------------------------------------------------------------------


class ToolStart(BaseEvent):
    """`arguments` are a copy of the model's, with the types of the tool, before hooks change them.

    {} if they are unusable.
    """

    type: ClassVar[Literal["tool_start"]] = "tool_start"
    id: str
    name: str
    arguments: dict[str, Any]
    title: str


class ToolUpdate(BaseEvent):
    """A piece of a tool's output while it runs; `id` is that of the call."""

    type: ClassVar[Literal["tool_update"]] = "tool_update"
    id: str
    text: str


class ToolEnd(BaseEvent):
    """`seconds` is the tool's own time, without that of the user's answers."""

    type: ClassVar[Literal["tool_end"]] = "tool_end"
    id: str
    name: str
    result: ToolResult
    is_error: bool
    seconds: float


class Nested(BaseEvent):
    """An event of a sub-agent's run; `session_id` is the sub-agent's, `call_id` the call that it
    works for."""

    type: ClassVar[Literal["nested"]] = "nested"
    agent: str
    event: Event
    session_id: str = ""
    call_id: str = ""


# ---- notices and questions -----------------------------------------------------------------------


class Notice(BaseEvent):
    """What the user should know: a hook failed, a file was left out, the content filter stopped the
    answer."""

    type: ClassVar[Literal["notice"]] = "notice"
    text: str


class PermissionAsked(BaseEvent):
    """`pattern` is the whole command or path that will be acted on; `remember` is what "always"
    would store, "" if nothing can be; `detail` is a preview (a diff); `why` is the reason for an
    unexpected question.

    `id` is the question's own, since one call can ask several; `call_id` is that of the call, as in
    ToolStart.
    """

    type: ClassVar[Literal["permission_asked"]] = "permission_asked"
    id: str
    permission: str
    pattern: str
    remember: str
    detail: str = ""
    why: str = ""
    call_id: str = field(default="", kw_only=True)
    answer: Answer = field(default="no", repr=False)
    reason: str = field(default="", repr=False)
    is_answered: bool = field(default=False, repr=False)

    def reply(self, answer: Answer, reason: str = "", remember: str = "") -> None:
        """`reason`: for the model, with "no". `remember`: with "always", another pattern."""
        self.answer = answer
        self.reason = reason
        if remember:
            self.remember = remember
        self.is_answered = True


class PermissionReplied(BaseEvent):
    """`id` is the question's."""

    type: ClassVar[Literal["permission_replied"]] = "permission_replied"
    id: str
    answer: Answer


class QuestionAsked(BaseEvent):
    """The model asks the user; without a reply the answer is empty. The ids are as in
    PermissionAsked."""

    type: ClassVar[Literal["question_asked"]] = "question_asked"
    id: str
    question: str
    options: list[str]
    call_id: str = field(default="", kw_only=True)
    answer: str = field(default="", repr=False)
    is_answered: bool = field(default=False, repr=False)

    def reply(self, answer: str) -> None:
        self.answer = answer
        self.is_answered = True


class DoomLoop(BaseEvent):
    """The run repeats itself: this call for the `count`th time, or `count` calls without anything
    new. `reply(True)` lets it go on. The ids are as in PermissionAsked."""

    type: ClassVar[Literal["doom_loop"]] = "doom_loop"
    name: str
    arguments: dict[str, Any]
    count: int
    id: str = field(default="", kw_only=True)
    call_id: str = field(default="", kw_only=True)
    allowed: bool = field(default=False, repr=False)
    is_answered: bool = field(default=False, repr=False)

    def reply(self, allow: bool) -> None:
        self.allowed = allow
        self.is_answered = True


RunEvent: TypeAlias = RunStart | RunEnd | StepStart | StepEnd | Status | Retry | Compacted | Notice
MessageEvent: TypeAlias = MessageStart | MessageEnd | TextDelta | ReasoningDelta | ToolCallDelta
ToolEvent: TypeAlias = ToolStart | ToolUpdate | ToolEnd | Nested | PermissionReplied
Question: TypeAlias = PermissionAsked | QuestionAsked | DoomLoop  # with a `reply`
Event: TypeAlias = RunEvent | MessageEvent | ToolEvent | Question
DELTAS = (TextDelta, ReasoningDelta, ToolCallDelta)  # pieces of what MessageEnd brings whole


def innermost(event: Event) -> Event:
    """The event itself, or the sub-agent's event that nested ones carry."""
    while isinstance(event, Nested):
        event = event.event
    return event


def is_question(event: Event) -> bool:
    """Does the event, or the sub-agent's event in it, wait for a reply?"""
    return hasattr(innermost(event), "reply")


def hidden_usage(event: Event) -> Usage | None:
    """At the end of a hidden agent's run, such as a summary: its tokens, which no total has yet."""
    while isinstance(event, Nested):
        if isinstance(event.event, RunEnd) and not event.session_id:
            return event.event.usage
        event = event.event
    return None


# ---- generators of events ------------------------------------------------------------------------

Events: TypeAlias = Generator[Event, None, T]  # yields events, returns a T

# What a tool or a hook may return: a value, or a generator of events that returns the value.
Outcome: TypeAlias = T | Events[T]


def resolve(outcome: Outcome[T]) -> Events[T]:
    """Pass on the events of an outcome that is a generator; return the value either way."""
    if outcome is not None and isinstance(outcome, Generator):
        return (yield from outcome)
    return outcome


class Returning(Generic[Y, T]):
    """Iterate once over a generator, such as the events of a run; afterwards `value` is what the
    generator returned.

        with Returning(run_loop(messages, model)) as run:
            for event in run: ...
        print(run.value.text)

    Closes the generator on every way out of the `with`.
    """

    value: T

    def __init__(self, generator: Generator[Y, None, T]) -> None:
        self.generator = generator

    def __enter__(self) -> Returning[Y, T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.generator.close()

    def __iter__(self) -> Iterator[Y]:
        self.value = yield from self.generator


def drain(generator: Generator[Any, None, T]) -> T:
    """What a generator returns, without its events."""
    # `with` closes it after an interrupt, too: the traceback would keep it open
    with Returning(generator) as run:
        for _ in run:
            pass
    return run.value
