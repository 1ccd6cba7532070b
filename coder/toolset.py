"""Tools: from a function to a tool, and one call of it.

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

import copy
import inspect
import typing
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, overload

from coder.abort import Abort
from coder.arguments import WAY_OUT, Schema, Take, described_schema, fit
from coder.events import BaseEvent, Event, Outcome, Returning, ToolUpdate, resolve
from coder.history import as_text
from coder.providers.text import NO_NAME
from coder.slips import ENDINGS, HOW_TO_END, NO_SLIPS, Arguments, Slips
from coder.types import Aborted, Budget, DeniedError, Final, ToolCall, ToolError, ToolResult

# Asks for permission: (ctx, permission, patterns, detail) -> None, or raises DeniedError.
Authorize = Callable[["ToolContext", str, Sequence[str], str], Outcome[Any]]
Title = str | Callable[[Arguments], str]
Default = Literal["allow", "ask"]


def keep(text: str) -> str:
    """Change nothing."""
    return text


@dataclass
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
    # A digest of each file as this session last read or wrote it; None: only its name was told
    seen: dict[Path, Any] = field(default_factory=dict)

    # From hooks: the permissions, the sandbox, the redaction
    authorize: Authorize | None = None
    secret: Callable[[str], bool] | None = None  # may this file only be searched with permission?
    read_only: bool = False  # the agent changes nothing: what a tool starts may not either
    confine: Any = None  # starts child processes confined (permissions/sandbox.py)
    redact: Callable[[str], str] = keep  # takes the values of keys out (permissions/redact.py)

    def update(self, text: str) -> None:
        """Show output while the tool works: when it yields next, or returns."""
        self.updates.append(ToolUpdate(self.call_id, self.redact(text)))

    def ask(
        self, permission: str, pattern: str | Sequence[str], detail: str = ""
    ) -> Generator[Event, None, None]:
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
    concurrent: bool = False  # changes nothing, so that calls may run in parallel
    # What people see of a call: the value of this argument, or of a function of all arguments
    title: Title = ""
    # Who decides whether a call is run
    permission: str = ""  # the kind of its rules; "": its name
    default: Default = "ask"  # what holds without a rule
    asks_itself: bool = False  # by ctx.ask, about something exact; else each call is asked about
    # What models call instead
    slips: Slips = NO_SLIPS
    twin: Tool | None = None  # for the same work in another form: not offered, but run if called
    # What makes the value of a parameter of its JSON value
    takes: dict[str, Take] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """What rules about it are for: the permission that it declares, else its name."""
        return self.permission or self.name

    @property
    def schema(self) -> Schema:
        """The API's form."""
        parameters = {"type": "object", "properties": {}} | self.parameters
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

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
    """Make a tool of a function; the options are fields of Tool.

    `schema` is that of the arguments, if hints and docstring cannot say it; the function then gets
    the JSON values. Raises TypeError for a hint without a schema, and a parameter without a
    description.
    """
    if function is None:
        return partial(tool, name=name, title=title, default=default, schema=schema, **options)
    name = name or function.__name__
    if default not in get_args(Default):
        raise TypeError(f"tool {name}: default has to be allow or ask, not {default!r}")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"tool {name} is async: tools are plain functions or generators")

    # The parameters that the model sees: all but the one for the ToolContext
    type_hints = _hints_of(function, f"tool {name}")
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


def _hints_of(function: Callable[..., Any], where: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError as error:  # a class inside of a function
        raise TypeError(f"{where} has a hint that is not found: {error}. {WAY_OUT}") from None


# ---- a set of tools, and one call -----------------------------------------------------------


class Toolset:
    """The tools of a session, by name, and what they share: folder, session id and files seen."""

    def __init__(
        self,
        tools: Iterable[Tool | Callable[..., Any]] = (),
        *,
        cwd: str | Path | None = None,
        session_id: str = "",
    ) -> None:
        self.tools: dict[str, Tool] = {}
        for entry in tools:
            made = _as_tool(entry)
            self.tools[made.name] = made
        self.cwd = Path(cwd or Path.cwd()).resolve()
        self.session_id = session_id
        self.seen: dict[Path, Any] = {}

    @property
    def schemas(self) -> list[Schema]:
        """The tools in the API's form."""
        return [tool.schema for tool in self.tools.values()]

    def select(self, entries: Iterable[Any]) -> tuple[list[Schema], Toolset]:
        """(the schemas of these entries, a set with the tools that they name).

        An entry is the schema of a tool in this set, or any tool or function.
        """
        schemas = []
        tools = self.tools.copy()
        for entry in entries:
            if isinstance(entry, dict):
                schemas.append(entry)
            else:
                made = _as_tool(entry)
                tools[made.name] = made
                schemas.append(made.schema)
        names = {(schema.get("function") or {}).get("name") for schema in schemas}
        selected = copy.copy(self)
        selected.tools = {name: tool for name, tool in tools.items() if name in names}
        return schemas, selected

    @property
    def known(self) -> dict[str, Tool]:
        """The tools that run by their names: the offered ones, and their twins."""
        twins = [tool.twin for tool in self.tools.values() if tool.twin]
        return {twin.name: twin for twin in twins} | self.tools

    def title(self, call: ToolCall) -> str:
        """What people see of a call."""
        try:
            return self.known[call.name].title_of(call.arguments)
        except Exception:  # an unknown tool; or a tool's title function, for unchecked arguments
            return call.name

    def fit_arguments(self, call: ToolCall) -> Arguments:
        """The arguments of a call in the types that its tool takes. Raises ToolError."""
        if call.problem:
            raise ToolError(f"the arguments are {call.problem}. Send one JSON object.")
        called = self.known.get(call.name)
        if called is None:  # only a hook can give it a result
            return call.arguments
        schema = called.parameters
        # One without properties may name its parameters elsewhere
        if "properties" in schema and not called.is_open:
            schema = {"additionalProperties": False} | schema
        fitted: Arguments = fit(call.arguments, schema, where=call.name, hints=called.slips.hints)
        called.values_of(fitted)  # before anybody is asked for permission
        return fitted

    def recognize(self, call: ToolCall) -> ToolCall:
        """The call as one of these tools takes it: with its own name and its own parameters.

        What is not certain stays as it is; `run` then says what is wrong with it.
        """
        meant = self._tool_meant(call.name)
        if meant is None:
            return call
        arguments = call.arguments
        if not call.problem and not meant.is_open:
            arguments = meant.slips.mend(arguments, meant.parameters.get("properties") or {})
        return replace(call, name=meant.name, arguments=arguments)

    def has(self, name: str) -> bool:
        """Is this the name of one of the tools, or one under which models know it?"""
        return self._tool_meant(name) is not None

    def _tool_meant(self, name: str) -> Tool | None:
        """The tool of this name, or the only one that has it among its other names, in any case."""
        known = self.known
        if name in known:
            return known[name]
        word = name.lower()
        candidates = []
        for tool in known.values():
            if word == tool.name.lower() or word in tool.slips.names:
                candidates.append(tool)
        return candidates[0] if len(candidates) == 1 else None

    def _describe_unknown(self, name: str) -> str:
        """What the model is told after a call of an unknown tool."""
        tools = f"The tools are: {', '.join(self.tools) or 'none'}"
        if name == NO_NAME:
            return f"the call had no name. {tools}"
        word = name.lower()
        if word in ENDINGS:
            return f"there is no tool {name!r}. {HOW_TO_END}"
        for tool in self.tools.values():
            if tool.slips.hints.get(word):
                return f"there is no tool {name!r}; {tool.slips.hints[word]}. {tools}"
        return f"there is no tool {name!r}. {tools}"

    def changes_nothing(self, call: ToolCall) -> bool:
        """Is this a call of a tool that changes nothing?"""
        tool = self.tools.get(call.name)
        return tool is not None and tool.concurrent

    def group_size(self, calls: list[ToolCall]) -> int:
        """How many of these calls, from the first one, run together: here each runs alone."""
        return 1

    def outputs_of(
        self, generators: Sequence[Generator[Event, None, ToolResult]], abort: Abort
    ) -> Generator[tuple[int, Event | ToolResult], None, None]:
        """Run the calls of a group, here one after the other. `run` has made their generators.

        Yields (index of the call, event) for each event, and (index, result) once for each call.
        """
        for index, generator in enumerate(generators):
            with Returning(generator) as events:
                for event in events:
                    yield index, event
            yield index, events.value

    def run(self, call: ToolCall, ctx: ToolContext) -> Generator[Event, None, ToolResult]:
        """Run one call; errors in its arguments or its tool become the result. Raises Aborted."""
        called = self.known.get(call.name)
        if called is None:
            text = f"Error: {self._describe_unknown(call.name)}"
            return ToolResult(text, is_error=True, is_news=False)
        try:
            call.arguments = self.fit_arguments(call)  # again: hooks may have changed them
            value = yield from _call(called, call.arguments, ctx)
            result = as_result(value)
        except Aborted:
            raise
        except ToolError as error:
            result = as_failure(error)
        except Exception as error:  # a bug of the tool
            why = f"{call.name} failed: {type(error).__name__}: {error}"
            result = as_failure(ToolError(why))
        yield from ctx.updates  # those after the last yield of the tool
        return result


def _as_tool(entry: Tool | Callable[..., Any]) -> Tool:
    return entry if isinstance(entry, Tool) else tool(entry)


def _call(called: Tool, arguments: Arguments, ctx: ToolContext) -> Generator[Event, None, Any]:
    """Call the function. A generator's events are passed on, all else that it yields as updates."""
    values = called.values_of(arguments)
    if called.is_open:
        value = called.function(ctx, values)
    elif called.context:
        value = called.function(**values, **{called.context: ctx})
    else:
        value = called.function(**values)
    if not isinstance(value, Generator):
        return value
    with Returning(value) as outputs:
        for output in outputs:
            if isinstance(output, BaseEvent):
                ctx.updates.append(output)
            elif output is not None:  # as of `yield ctx.update(text)`
                ctx.update(str(output))
            while ctx.updates:
                yield ctx.updates.pop(0)
    return outputs.value


def as_failure(error: ToolError) -> ToolResult:
    """The result of a call that failed or was denied."""
    kind = "Denied" if isinstance(error, DeniedError) else "Error"
    return ToolResult(f"{kind}: {error}", is_error=True)


BLOCKS = {"text", "image", "image_url", "input_audio", "file"}  # the kinds of content


def as_result(value: Any) -> ToolResult:
    """What a tool returned: text and content blocks as they are, anything else as JSON."""
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, Final):
        return ToolResult(as_text(value.value), final=value)
    if isinstance(value, list) and value and all(_is_block(part) for part in value):
        return ToolResult(value)
    return ToolResult(as_text(value))


def _is_block(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in BLOCKS
