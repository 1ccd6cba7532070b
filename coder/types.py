"""The data of the agent: messages, calls, results, requests, answers, limits, errors.

All other files use these types. No I/O, no policy and no imports from the package are here. The
events that come out of a run are in events.py, the hooks that go into it in hooks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

T = TypeVar("T")  # any type, for the generic functions of other files
# V: the output of a run. For type checkers it has a default, so that RunResult alone is
# RunResult[Any]; Python itself has defaults of type variables only from 3.13 on
if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    V = TypeVarWithDefault("V", default=Any)
else:
    V = TypeVar("V")
# Takes a sentence for the user: for code outside of a run, which has no events to say it with
Report = Callable[[str], object]


def ignore(sentence: str) -> None:
    """The Report that is used if none is given: nobody reads the sentence."""


# A message is the API's dict: {"role": "user" | "assistant" | "tool", "content": ..., ...}. Private
# facts (timestamp, is_error, ...) are under the key "meta", which is not sent. A message with a
# role that the API does not know is not sent either, unless a hook (convert_to_llm) converts it.
# Each request is made of the messages as they are then: change one in place, and the next request
# has it changed.
Message = dict[str, Any]

# Three words for an end. `finish_reason`: why an answer ended, in the provider's words. Finish: the
# same in four terms of our own. StopReason: why the run ended, after one answer or many
Finish = Literal["stop", "tool_calls", "length", "content_filter"]
StopReason = Literal[
    "stop", "length", "content_filter", "max_steps", "max_time", "doom_loop", "aborted", "error"
]
# Kinds of errors. These may pass by themselves: a later attempt can succeed
Transient = Literal["rate_limit", "server", "network", "incomplete", "empty"]
# All kinds. "overflow": the context is full; "protocol": what came is no answer of this API;
# "no_call": the model called no tool, although it was asked to
ErrorKind = Literal[
    Transient, "overflow", "quota", "auth", "bad_request", "not_found", "protocol", "no_call"
]
Trigger = Literal["threshold", "length", "overflow", "manual"]  # why a history is shortened
Reasoning = Literal["off", "minimal", "low", "medium", "high", "xhigh"]


@dataclass(slots=True)
class Usage:
    """Tokens of one answer or of a whole run; `cached` is part of `input`, `reasoning` part of
    `output`.

    `estimated`: the server reported nothing, the numbers are an estimate. `cost`: in the currency
    of the user's prices; None if a price is missing.
    """

    input: int = 0
    output: int = 0
    cached: int = 0
    reasoning: int = 0
    estimated: bool = False
    cost: float | None = None

    @property
    def is_empty(self) -> bool:
        """Was nothing counted? A sum begins with such a Usage."""
        return not (self.input or self.output or self.cost)

    def __add__(self, other: Usage) -> Usage:
        # The cost None has two meanings. In an empty Usage nothing was spent: the sum costs what
        # the other one does. In all others a price is missing: then the sum has no cost either
        if self.is_empty:
            cost = other.cost
        elif other.is_empty:
            cost = self.cost
        elif self.cost is None or other.cost is None:
            cost = None
        else:
            cost = self.cost + other.cost
        return Usage(
            input=self.input + other.input,
            output=self.output + other.output,
            cached=self.cached + other.cached,
            reasoning=self.reasoning + other.reasoning,
            estimated=self.estimated or other.estimated,
            cost=cost,
        )


@dataclass(slots=True)
class ToolCall:
    """One call that the model asks for.

    If its arguments are no JSON object, they are {} and `problem` says why.
    """

    id: str
    name: str
    arguments: dict[str, Any]
    problem: str = ""


@dataclass(slots=True)
class ToolResult:
    """Text or content blocks for the model, `details` for user interfaces and programs only.

    `can_be_new`: false for a call that could not be made, and for the model's own checklist: such a
    result never counts as progress, even if the run has had none like it. Many calls without
    progress end the run (repetition.py). `final`: set if the tool ends the run.
    """

    content: str | list[dict[str, Any]]
    is_error: bool = False
    details: dict[str, Any] = field(default_factory=dict)
    can_be_new: bool = field(default=True, repr=False)
    final: Final | None = field(default=None, repr=False)


@dataclass(slots=True)
class Final:
    """A tool returns it to end the run. `value` becomes the `output` of the run's result; as text,
    or else as JSON, it becomes its `text`."""

    value: Any


@dataclass(slots=True)
class Request:
    """One model call as the loop asks for it. A before_llm_call hook may change any field.

    `messages` were repaired before; what the hook changes is sent as it is. `tools` are the API's
    tool schemas. If a hook takes one out, this tool is not run; if it adds a Tool or a function,
    the model can call it. `reasoning` "off" asks for nothing, so that the server's default counts.
    `session_id` names the conversation for the provider's cache. `options` are further body fields
    (temperature, ...), in the API's names.
    """

    messages: list[Message]
    tools: list[Any] = field(default_factory=list)
    system: str = ""
    api_key: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    reasoning: Reasoning = "off"
    session_id: str = ""


@dataclass(slots=True)
class Completion:
    """One whole answer. `message` enters the history, unless it is empty; `finish` is
    `finish_reason` in the four terms of Finish."""

    text: str
    calls: list[ToolCall]
    finish: Finish
    message: Message
    usage: Usage
    reasoning: str = ""
    finish_reason: str = ""


# ---- errors --------------------------------------------------------------------------------------


class CoderError(Exception):
    """Base of all errors of this package."""


@dataclass(eq=False)
class ModelError(CoderError):
    """A model call failed. `retryable` and `retry_after` (seconds) are facts for the retry policy
    to judge."""

    kind: ErrorKind
    message: str  # the server's text
    _: KW_ONLY
    status: int | None = None
    request_id: str | None = None
    retryable: bool = False
    retry_after: float | None = None
    param: str = ""  # the member of the request that the error names
    loading: bool = False  # the server is still loading the model
    advice: str = ""  # what the user can do, if the kind alone does not say it
    body: bytes = b""  # what the server sent instead of an answer

    def __str__(self) -> str:
        return self.message

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("kind", "message", "status", "request_id")}


class Aborted(CoderError):
    """The run's Abort was set; its text is the reason: "aborted" or "max_time"."""


class ToolError(CoderError):
    """Raised by a tool for what the model can correct; its text is the result."""


class DeniedError(ToolError):
    """Permission was denied, by a rule or by the user."""


# ---- limits and the result -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one run. `max_seconds` None is no limit.

    `max_errors`: so many failed attempts at one answer end the run; the next answer has as many
    again. Not counted: an empty answer with a finish_reason, and attempts that find the server
    loading its model (for `RetryPolicy.loading` seconds).
    """

    max_steps: int = 25
    max_seconds: float | None = None
    max_errors: int = 5
    max_compactions: int = 2  # between two answers
    # 3: the third equal call in a row is not run, if the two before it had equal results
    doom_loop_threshold: int = 3
    max_output: int = 30_000  # characters of one tool result that the model sees


@dataclass
class Budget:
    """How many steps a run may take, and has taken. A sub-agent's steps also count in its parent's
    budget."""

    max_steps: int
    parent: Budget | None = None
    steps: int = 0

    def step(self) -> None:
        self.steps += 1
        if self.parent:
            self.parent.step()

    @property
    def left(self) -> int:
        """Steps until the nearest limit. One step is reserved for the parent's own answer."""
        own = self.max_steps - self.steps
        if self.parent is None:
            return own
        return min(own, self.parent.left - 1)


@dataclass(slots=True)
class RunResult(Generic[V]):
    """What `run_loop` returns: the fields of RunEnd and the list of messages that it extended.

    Read `output`, which raises if there is none to rely on. Behind it are `value`, unchecked, and
    `misfit`: what is wrong with the answer, if `Agent.run(output=...)` asked for a form that it
    does not have.
    """

    stop_reason: StopReason
    text: str
    messages: list[Message]
    usage: Usage
    steps: int
    error: ModelError | None = None
    value: Any = field(default=None, repr=False)
    misfit: str = field(default="", repr=False)

    @property
    def output(self) -> V:
        """What was asked for with `output=`, or the value of a tool that ended the run (Final).

        None for a run without either. Raises as `check`, and CoderError if the answer does not have
        the form that was asked for.
        """
        self.check()
        if self.misfit:
            raise CoderError(self.misfit)
        value: V = self.value
        return value

    def _repr_markdown_(self) -> str:
        """For a notebook: the question, the calls and the answer."""
        from coder.notebook import result_as_markdown  # late: only notebooks need it

        return result_as_markdown(self)

    def check(self) -> RunResult[V]:
        """This result, if the run ended with "stop". Raises the run's ModelError, or CoderError."""
        if self.stop_reason == "stop":
            return self
        raise self.error or CoderError(f"{self.stop_reason}: {self.text}")
