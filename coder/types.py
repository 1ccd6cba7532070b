"""The words of the agent: messages, calls, results, events, hooks, limits, errors.

Read this file first: every other file speaks in these types. Nothing here does anything; it holds no I/O,
no policy and no imports from the rest of the package.

Two seams are defined here and nowhere else: the events that come out of a run (`Event` and its subclasses),
and the hooks that go in (`Hooks`). A front end, a session store or a trace only looks at events; permissions,
compaction, queues and plugins are hooks.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from coder.abort import Abort
    from coder.tools import ToolContext

T = TypeVar("T")

# A message is the API's dict: {"role": "user" | "assistant" | "tool", "content": ..., ...}. Private facts
# (timestamp, is_error, ...) live under the key "meta"; a role outside the API's is for the screen only.
# Both are dropped by history.convert_to_llm. A message in a list is replaced, never changed in place.
Message = dict[str, Any]

StopReason = Literal["stop", "length", "content_filter", "max_steps", "max_time", "doom_loop", "aborted", "error"]
ErrorKind = Literal["overflow", "rate_limit", "quota", "auth", "bad_request", "not_found", "server", "network",
                    "incomplete", "empty", "protocol"]
Finish = Literal["stop", "tool_calls", "length", "content_filter"]
Trigger = Literal["threshold", "length", "overflow", "manual"]  # why a history is shortened
Reasoning = Literal["off", "minimal", "low", "medium", "high", "xhigh"]


# ---- what goes to and comes from the model ---------------------------------------------------------------


@dataclass(slots=True)
class Usage:
    """Tokens of one answer or of a whole run; `cached` is part of `input`, `reasoning` part of `output`.

    `estimated` is true where the server reported nothing and the numbers are our guess. `cost` is what the tokens cost
    at the prices that the user gave; None where there is none for all of them.
    """

    input: int = 0
    output: int = 0
    cached: int = 0
    reasoning: int = 0
    estimated: bool = False
    cost: float | None = None

    def __add__(self, other: Usage) -> Usage:
        parts = [usage for usage in (self, other) if usage.input or usage.output or usage.cost]
        costs = [usage.cost for usage in parts if usage.cost is not None]
        return Usage(self.input + other.input, self.output + other.output, self.cached + other.cached,
                     self.reasoning + other.reasoning, self.estimated or other.estimated,
                     sum(costs) if costs and len(costs) == len(parts) else None)


@dataclass(slots=True)
class ToolCall:
    """One call the model asks for. `arguments` is None where what arrived is no JSON object: then `problem` says why."""

    id: str
    name: str
    arguments: dict[str, Any] | None
    problem: str = ""


@dataclass(slots=True)
class ToolResult:
    """What a tool gives back: text (or content blocks) for the model, `details` for people and programs only."""

    content: str | list[dict[str, Any]]
    is_error: bool = False
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Request:
    """One model call as the loop asks for it. A before_llm_call hook may change any field.

    `messages` are wire messages without the system prompt; `tools` are the API's tool schemas. `reasoning` is how much
    the model is to think, "off" leaves it to the server; `budgets` are tokens by level, where they differ from ours.
    `session_id` names the conversation for the provider's cache. `options` are further body fields (temperature,
    max_tokens, ...), in the API's own names.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    system: str = ""
    api_key: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    reasoning: Reasoning = "off"
    budgets: Mapping[str, int] = field(default_factory=dict)
    session_id: str = ""


@dataclass(slots=True)
class Completion:
    """One whole answer. `message` is what enters the history; `finish` the provider's word in our four terms."""

    text: str
    calls: list[ToolCall]
    finish: Finish
    message: Message
    usage: Usage
    reasoning: str = ""
    finish_reason: str = ""


class Model(Protocol):
    """Anything that answers a request: `ai.ChatModel`, a script, a relay."""

    name: str
    context_window: int

    def stream(self, request: Request, abort: Abort) -> Generator[Event, None, Completion]:
        """Yield delta events, return the Completion. Raises ModelError, or Aborted when `abort` was set."""
        ...


# ---- errors ----------------------------------------------------------------------------------------------


class CoderError(Exception):
    """Base of all errors of this package.

        CoderError
        ├── ModelError    a model call failed; `kind` says how
        ├── Aborted       the run's Abort was set
        └── ToolError     a tool could not do what was asked: the text goes to the model as a result
            └── DeniedError   it was not allowed
    """


class ModelError(CoderError):
    """A model call failed. `retryable` and `retry_after` (seconds) are facts for the retry policy to judge.

    `message` is what the server said, `errors.explain` makes a sentence of all of it. `param` is the member of the request
    that the server names, `loading` says that it is not ready yet because it loads the model.
    """

    def __init__(self, kind: ErrorKind, message: str, *, status: int | None = None, request_id: str | None = None,
                 retryable: bool = False, retry_after: float | None = None, param: str = "", loading: bool = False) -> None:
        super().__init__(message)
        self.kind: ErrorKind = kind
        self.message = message
        self.status = status
        self.request_id = request_id
        self.retryable = retryable
        self.retry_after = retry_after
        self.param = param
        self.loading = loading
        self.body = b""  # what came in the place of an answer, as it came

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "message": self.message, "status": self.status, "request_id": self.request_id}


class Aborted(CoderError):
    """The run's Abort was set; its `reason` tells whether a person did it or the clock."""


class ToolError(CoderError):
    """Raised by a tool for what the model can mend; its text is the result."""


class DeniedError(ToolError):
    """The permissions, or the person, said no."""


# ---- events: everything a run tells ----------------------------------------------------------------------


class Event:
    """Base of the events. `type` is the class name in snake_case; `to_dict()` is the line of `stream-json`."""

    __slots__ = ()
    type: ClassVar[str] = "event"

    def __init_subclass__(cls) -> None:
        cls.type = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def to_dict(self) -> dict[str, Any]:
        """The fields, by name; an event of somebody's own that is no dataclass has none."""
        known: Sequence[dataclasses.Field[Any]] = dataclasses.fields(self) if dataclasses.is_dataclass(self) else ()
        fields = {f.name: getattr(self, f.name) for f in known if f.repr}
        return {"type": self.type} | {name: _plain(value) for name, value in fields.items()}


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, Event | ModelError):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


@dataclass(slots=True)
class RunStart(Event):
    pass


@dataclass(slots=True)
class RunEnd(Event):
    """`text` is the answer, or the sentence that says why there is none; `error` is set where stop_reason is error."""

    stop_reason: StopReason
    text: str
    usage: Usage
    steps: int
    error: ModelError | None = None


@dataclass(slots=True)
class StepStart(Event):
    step: int


@dataclass(slots=True)
class StepEnd(Event):
    message: Message
    tool_results: list[Message]
    finish_reason: str
    usage: Usage


@dataclass(slots=True)
class MessageStart(Event):
    message: Message


@dataclass(slots=True)
class MessageEnd(Event):
    message: Message


@dataclass(slots=True)
class TextDelta(Event):
    text: str


@dataclass(slots=True)
class ReasoningDelta(Event):
    text: str


@dataclass(slots=True)
class ToolCallDelta(Event):
    """A piece of a call while it arrives; `arguments` is raw text, for display only."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class ToolStart(Event):
    """`arguments` is what the tool gets, or {} where what the model sent is unusable."""

    id: str
    name: str
    arguments: dict[str, Any]
    title: str


@dataclass(slots=True)
class ToolUpdate(Event):
    id: str
    text: str


@dataclass(slots=True)
class ToolEnd(Event):
    id: str
    name: str
    result: ToolResult
    is_error: bool
    seconds: float


@dataclass(slots=True)
class Retry(Event):
    """Attempt number `attempt` failed; the next comes after `delay` seconds. Text shown of it is taken back."""

    attempt: int
    delay: float
    error: ModelError


@dataclass(slots=True)
class Status(Event):
    status: Literal["idle", "busy", "retry"]


@dataclass(slots=True)
class Compacted(Event):
    """`before` and `after` are {"messages": n, "tokens": n}; `messages` is the list as it is now, which the loop fills in."""

    trigger: Trigger
    attempt: int
    before: dict[str, int]
    after: dict[str, int]
    strategy: str
    messages: list[Message] = field(default_factory=list, repr=False)


@dataclass(slots=True)
class Notice(Event):
    """Something a person should know."""

    text: str


Answer = Literal["once", "always", "no"]


@dataclass(slots=True)
class PermissionAsked(Event):
    """A question: the consumer calls `reply` before it takes the next event; no reply is a no.

    `pattern` is the whole command or path that will be acted on, `remember` what "always" would store, "" where nothing can be;
    `detail` a preview (a diff), `why` what makes it ask where a person would not expect it. `reason` is a person's word to
    the model with a no.
    """

    id: str
    permission: str
    pattern: str
    remember: str
    detail: str = ""
    why: str = ""
    answer: Answer = field(default="no", repr=False)
    reason: str = field(default="", repr=False)

    def reply(self, answer: Answer, reason: str = "", remember: str = "") -> None:
        """`remember`: with "always", another pattern to store."""
        self.answer, self.reason, self.remember = answer, reason, remember or self.remember


@dataclass(slots=True)
class HookFailed(Event):
    """A guarded hook failed, or took too long, at this place (features/hooks.py)."""

    hook: str
    place: str
    error: str
    seconds: float


@dataclass(slots=True)
class PermissionReplied(Event):
    id: str
    answer: Answer


@dataclass(slots=True)
class QuestionAsked(Event):
    """The model asks the person; no reply is an empty answer."""

    id: str
    question: str
    options: list[str]
    answer: str = field(default="", repr=False)

    def reply(self, answer: str) -> None:
        self.answer = answer


@dataclass(slots=True)
class DoomLoop(Event):
    """The same call for the `count`th time in a row. `reply(True)` lets it run; no reply answers it unrun."""

    name: str
    arguments: dict[str, Any]
    count: int
    allowed: bool = field(default=False, repr=False)

    def reply(self, allow: bool) -> None:
        self.allowed = allow


@dataclass(slots=True)
class Nested(Event):
    """An event of a sub-agent's run. `session_id` is the child's, which tells two that run side by side apart."""

    agent: str
    event: Event
    session_id: str = ""


# ---- hooks: everything others can put in -----------------------------------------------------------------

# What a hook or tool may return: a value, or a generator that yields events and returns the value.
Said: TypeAlias = T | Generator[Event, None, T]


def settle(said: Said[T]) -> Generator[Event, None, T]:
    """Pass on the events of a hook or tool that is a generator; return the value either way."""
    if said is not None and isinstance(said, Generator):  # most say nothing, and the check is slow
        return (yield from said)
    return said


class Hooks:
    """What others can do to a run. Every method does nothing; override what you need.

    Each may be a plain method or a generator that yields events and returns its value. A ToolError raised around a tool
    (DeniedError) answers its call, a ModelError raised around a request fails it. Any other exception ends the run: it is
    a bug, and the history is left valid; features/hooks.py has a guard for hooks that are not one's own.
    """

    def on_run_start(self, abort: Abort) -> Said[None]:
        """A run begins; `abort` is its token, for hooks that wait for something."""

    def before_llm_call(self, request: Request) -> Said[None]:
        """Change the request in place: messages, tools, system, options."""

    def after_llm_call(self, completion: Completion) -> Said[None]:
        """Look at the answer."""

    def before_tool_call(self, call: ToolCall, ctx: ToolContext) -> Said[ToolResult | None]:
        """Change `call.arguments` in place, or answer the call instead of the tool by returning a result."""

    def after_tool_call(self, call: ToolCall, result: ToolResult) -> Said[ToolResult | None]:
        """Give another result, or None to leave it."""

    def transform_context(self, messages: list[Message], abort: Abort) -> Said[list[Message]]:
        """Another list for this request only: prune, inject. The history is not touched."""
        return messages

    def convert_to_llm(self, messages: list[Message]) -> Said[list[Message]]:
        """Make API messages of those with roles of one's own; what is left of them, and "meta", is dropped after it."""
        return messages

    def get_api_key(self) -> Said[str | None]:
        """Asked before every model call; None keeps the model's own key."""

    def get_steering_messages(self) -> Said[Sequence[Message]]:
        """Polled at the start of the run, after each tool, where what it gives makes the remaining calls be skipped, and before
        the run would end with `stop`."""
        return ()

    def get_follow_up_messages(self) -> Said[Sequence[Message]]:
        """Polled only when the run would end with `stop` and there is no steering; what it gives goes on with the run."""
        return ()

    def on_length(self, messages: list[Message], trigger: Trigger, usage: Usage, abort: Abort) -> Said[bool]:
        """The context may be too long: shorten `messages` in place and return True, or return False.

        Called with "threshold" before every request (judge by `usage`, that of the last answer), with "length"
        and "overflow" when the model ran into its limit.
        """
        return False

    def on_doom_loop(self, event: DoomLoop) -> Said[bool]:
        """True runs the repeated call after all. The default asks whoever reads the events."""
        yield event
        return event.allowed

    def on_compacted(self, messages: list[Message]) -> Said[None]:
        """The history was shortened: attach again what must not be lost."""


# ---- limits and the result -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """When a run stops by itself. `max_seconds` None is no limit; `max_errors` counts failed attempts in a row."""

    max_steps: int = 25
    max_seconds: float | None = None
    max_errors: int = 5
    max_compactions: int = 2
    doom_loop_threshold: int = 3
    max_output: int = 30_000  # characters of one tool result that the model sees


@dataclass(slots=True)
class RunResult:
    """What `run_loop` returns: the fields of RunEnd and the list that it worked on."""

    stop_reason: StopReason
    text: str
    messages: list[Message]
    usage: Usage
    steps: int
    error: ModelError | None = None
