"""A tool: made of a function, and what a call of it gets.

    @tool
    def add(a: int, b: int) -> str:
        '''Add two numbers.

        a: the first
        b: the second
        '''
        return str(a + b)

The JSON schema comes from the signature, the descriptions from the docstring (`name: text`, a line
each). A parameter annotated `ToolContext` gets one and is not shown to the model. A tool may be a
generator: what it yields is shown while it works, what it returns is the result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, get_type_hints, overload

from coder.abort import Abort
from coder.arguments import WAY_OUT, Schema, Take, described_schema
from coder.events import Events, Nested, Outcome, Returning, ToolUpdate, resolve
from coder.providers.text import new_id
from coder.slips import NO_SLIPS, Arguments, Slips
from coder.types import Budget, Limits, RunResult, V

# Asks for permission: (ctx, permission, patterns, detail) -> None, or raises DeniedError.
Authorize = Callable[["ToolContext", str, Sequence[str], str], Outcome[Any]]
Title = str | Callable[[Arguments], str]
Default = Literal["allow", "ask"]


def keep(text: str) -> str:
    """Change nothing."""
    return text


class SubAgent(Protocol):
    """What `ctx.run` can run: an Agent."""

    limits: Limits

    @property
    def session_id(self) -> str: ...

    def stream(
        self,
        prompt: str,
        *,
        output: type[V] | Schema | None = None,
        abort: Abort | None = None,
        budget: Budget | None = None,
    ) -> Events[RunResult[V]]: ...


@dataclass(eq=False)
class ToolContext:
    """What a tool gets for one call."""

    cwd: Path
    abort: Abort
    session_id: str = ""
    message_id: str = ""
    call_id: str = ""
    tool: Tool | None = None  # that is called; None: the set has none of this name
    budget: Budget | None = None  # of the run, for a tool that starts another one
    updates: list[Any] = field(default_factory=list, repr=False)  # events not yielded yet
    # A digest of each file as this session last read or wrote it
    seen: dict[Path, Any] = field(default_factory=dict)

    # From hooks: the permissions, the sandbox, the redaction, the editor
    authorize: Authorize | None = None
    secret: Callable[[str], bool] | None = None  # may this file only be searched with permission?
    read_only: bool = False  # the agent changes nothing: what a tool starts may not either
    confine: Any = None  # starts child processes confined (permissions/sandbox.py)
    redact: Callable[[str], str] = keep  # takes the values of keys out (permissions/redact.py)
    editor: Any = None  # which has unsaved texts of files (Editor in tools/text.py)

    def run(
        self,
        agent: SubAgent,
        prompt: str,
        *,
        name: str = "agent",
        output: type[V] | Schema | None = None,
    ) -> Events[RunResult[V]]:
        """`yield from` it: a run of another agent as a part of this call.

        Its events come out as `nested`, its tokens and steps count for this run. The abort of this
        run stops it, and raises Aborted here.
        """
        child_id = agent.session_id or new_id()
        budget = Budget(agent.limits.max_steps, self.budget)
        with self.abort.child() as token:
            events = agent.stream(prompt, output=output, abort=token, budget=budget)
            with Returning(events) as run:
                for event in run:
                    yield Nested(name, event, child_id, self.call_id)
        self.abort.check()
        return run.value

    def update(self, text: str) -> None:
        """Show output while the tool works: when it yields next, or returns."""
        self.updates.append(ToolUpdate(self.call_id, self.redact(text)))

    def take_updates(self) -> Events[None]:
        while self.updates:
            yield self.updates.pop(0)

    def ask(self, permission: str, pattern: str | Sequence[str], detail: str = "") -> Events[None]:
        """`yield from` it before acting. Raises DeniedError; without permissions all is allowed.

        `pattern` is the command, or the path or paths, that will be acted on.
        """
        if self.authorize is not None:
            patterns = [pattern] if isinstance(pattern, str) else list(pattern)
            yield from resolve(self.authorize(self, permission, patterns, self.redact(detail)))


# ---- from a function to a tool --------------------------------------------------------------


@dataclass(frozen=True)
class Tool:
    """A function, what the model is sent of it, and how its calls are run."""

    # What the model is sent
    name: str
    description: str
    parameters: Schema
    # How it is called
    function: Callable[..., Any]
    context: str = ""  # the parameter that takes the ToolContext
    is_open: bool = False  # takes what its schema does not name: function(ctx, arguments)
    concurrent: bool = False  # calls may run side by side
    may_change: bool = False  # a concurrent tool changes nothing, except with this: a sub-agent
    # What people see of a call: the value of this argument, or of a function of all arguments
    title: Title = ""
    # Who decides whether a call is run
    permission: str = ""  # the kind of its rules; "": its name
    default: Default = "ask"  # what holds without a rule
    asks_itself: bool = False  # by ctx.ask, about something exact; else each call is asked about
    # What models write instead of its names
    slips: Slips = NO_SLIPS
    # A tool for the same work in another form (apply_patch for edit). It is run if it is called,
    # although it is not offered
    twin: Tool | None = None
    # By parameter, if its hint is not plain: what turns its JSON value into the Python value
    takes: dict[str, Take] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """What rules about it are for: the permission that it declares, else its name."""
        return self.permission or self.name

    @property
    def changes_nothing(self) -> bool:
        return self.concurrent and not self.may_change

    @property
    def schema(self) -> Schema:
        """The API's form."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {"type": "object", "properties": {}} | self.parameters,
            },
        }

    def title_of(self, arguments: Arguments) -> str:
        """The title of a call: the tool's name and what the call is about."""
        if callable(self.title):
            about = self.title(arguments)
        else:
            about = str(arguments.get(self.title, ""))
        return f"{self.name} {about.strip()}".strip()

    def values_of(self, arguments: Arguments) -> Arguments:
        """The arguments of a call as the function gets them. Raises ToolError."""
        values = dict(arguments)
        for name in self.takes.keys() & arguments.keys():
            values[name] = self.takes[name](arguments[name], f"{self.name}: {name}")
        return values

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    name: str = ...,
    title: Title = ...,
    concurrent: bool = ...,
    may_change: bool = ...,
    permission: str = ...,
    default: Default = ...,
    asks_itself: bool = ...,
    slips: Slips = ...,
    schema: Schema | None = ...,
) -> Callable[[Callable[..., Any]], Tool]: ...


def tool(
    function: Any = None,
    /,
    *,
    name: str = "",
    title: Title = "",
    default: Default = "ask",
    schema: Schema | None = None,
    **options: Any,
) -> Any:
    """Make a tool of a function; the other options are fields of Tool.

    With a `schema` of the arguments the docstring is the description as it is, no hint but
    ToolContext counts, and the function gets JSON. Raises TypeError with what is missing.
    """
    if function is None:
        return partial(tool, name=name, title=title, default=default, schema=schema, **options)
    name = name or function.__name__
    if default not in get_args(Default):
        raise TypeError(f"tool {name}: default has to be allow or ask, not {default!r}")
    if inspect.isasyncgenfunction(function):
        raise TypeError(f"tool {name} is an async generator: report with ctx.update, and return")
    # The parameters that the model sees: all but the one for the ToolContext
    type_hints = _hints_of(function, f"tool {name}", are_needed=schema is None)
    signature = dict(inspect.signature(function).parameters)
    contexts = [parameter for parameter in signature if type_hints.get(parameter) is ToolContext]
    context = next(iter(contexts), "")
    signature.pop(context, None)
    doc = inspect.getdoc(function) or ""
    takes: dict[str, Take] = {}
    if schema is None:
        doc, schema, takes = described_schema(
            where=f"tool {name}", doc=doc, signature=signature, type_hints=type_hints
        )
    return Tool(
        name=name,
        description=doc,
        parameters=schema,
        function=function,
        context=context,
        title=title or next(iter(signature), ""),  # the first argument
        default=default,
        takes=takes,
        **options,
    )


def _hints_of(function: Callable[..., Any], where: str, are_needed: bool) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except NameError as error:  # a class inside of a function
        if not are_needed:  # only ToolContext counts, and it may be written as text
            named = {"ToolContext": ToolContext}
            hints = function.__annotations__
            return {parameter: named.get(hint, hint) for parameter, hint in hints.items()}
        raise TypeError(f"{where} has a hint that is not found: {error}. {WAY_OUT}") from None
