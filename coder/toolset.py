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
from coder.arguments import Schema, described_schema, fit
from coder.events import BaseEvent, Event, Outcome, Returning, ToolUpdate, resolve
from coder.history import as_text
from coder.providers.text import NO_NAME
from coder.slips import ENDINGS, HOW_TO_END, NO_SLIPS, Arguments, Slips
from coder.types import Aborted, Budget, DeniedError, ToolCall, ToolError, ToolResult

# Asks for permission: (ctx, permission, patterns, detail) -> None, or raises DeniedError.
Authorize = Callable[["ToolContext", str, Sequence[str], str], Outcome[Any]]
Title = str | Callable[[Arguments], str]
Default = Literal["allow", "ask"]


def keep(text: str) -> str:
    """Change nothing."""
    return text


@dataclass
class ToolContext:
    """What a tool gets.

    `seen`: digests of files as this session last read or wrote them; None if only their names were
    told.
    """

    cwd: Path
    abort: Abort
    session_id: str = ""
    message_id: str = ""
    call_id: str = ""
    seen: dict[Path, Any] = field(default_factory=dict)
    authorize: Authorize | None = None
    secret: Callable[[str], bool] | None = None  # may this file only be searched with permission?
    confine: Any = None  # starts child processes confined (permissions/sandbox.py)
    budget: Budget | None = None  # of the run, for a tool that starts another one
    redact: Callable[[str], str] = keep  # takes the values of keys out (permissions/redact.py)
    updates: list[Any] = field(default_factory=list, repr=False)  # events not yielded yet
    tool: Tool | None = None  # that is called; None: the set has none of this name
    read_only: bool = False  # the agent changes nothing: what a tool starts may not either

    def update(self, text: str) -> None:
        """Show output while the tool works: when it yields next, or returns."""
        self.updates.append(ToolUpdate(self.call_id, self.redact(text)))

    def ask(
        self,
        permission: str,
        pattern: str | Sequence[str],
        detail: str = "",
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
    """A function, its name and what the model is sent of it.

    `title` is what people see of a call: the name of an argument, or a function of the arguments.
    `concurrent`: its calls change nothing, and may run side by side (agent/parallel.py). `is_open`:
    it takes arguments that its schema does not name; the function gets (ctx, arguments).
    `permission`: the kind of its rules, "" for its own name. `default`: what holds without a rule.
    `asks_itself`: with ctx.ask, about something exact; else each call is asked about before it
    runs. `slips`: what models write for a call of it (slips.py). `twin`: a tool for the same work
    in another form, which is not offered, and runs if the model calls it.
    """

    name: str
    description: str
    parameters: Schema
    function: Callable[..., Any]
    context: str = ""  # the parameter that takes the ToolContext
    title: Title = ""
    concurrent: bool = False
    is_open: bool = False
    slips: Slips = NO_SLIPS
    permission: str = ""
    default: Default = "ask"
    asks_itself: bool = False
    twin: Tool | None = None

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
) -> Callable[[Callable[..., Any]], Tool]: ...


def tool(
    function: Any = None,
    /,
    *,
    name: str = "",
    title: Title = "",
    default: Default = "ask",
    **options: Any,
) -> Any:
    """Make a tool of a function; the options are fields of Tool.

    Raises TypeError for a hint without a JSON type, and a parameter without a description.
    """
    if function is None:
        return partial(tool, name=name, title=title, default=default, **options)
    name = name or function.__name__
    if default not in get_args(Default):
        raise TypeError(f"tool {name}: default has to be allow or ask, not {default!r}")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"tool {name} is async: tools are plain functions or generators")
    hints = typing.get_type_hints(function)
    signature = dict(inspect.signature(function).parameters)
    context = next((name for name in signature if hints.get(name) is ToolContext), "")
    signature.pop(context, None)
    doc = inspect.getdoc(function) or ""
    description, parameters = described_schema(f"tool {name}", doc, signature, hints)
    return Tool(
        name,
        description,
        parameters,
        function,
        context=context,
        title=title or next(iter(signature), ""),
        default=default,
        **options,
    )


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
        made = [_as_tool(entry) for entry in tools]
        self.tools: dict[str, Tool] = {tool.name: tool for tool in made}
        self.cwd = Path(cwd or Path.cwd()).resolve()
        self.session_id = session_id
        self.seen: dict[Path, Any] = {}

    @property
    def schemas(self) -> list[Schema]:
        return [tool.schema for tool in self.tools.values()]

    def select(self, entries: Iterable[Any]) -> tuple[list[Schema], Toolset]:
        """The schemas of these entries, and this set with the tools that they name.

        An entry is a schema, or a tool or function, which need not be in the set.
        """
        schemas = []
        tools = self.tools.copy()
        for entry in entries:
            made = _as_tool(entry)
            if isinstance(made, Tool):
                tools[made.name] = made
                made = made.schema
            schemas.append(made)
        names = {(schema.get("function") or {}).get("name") for schema in schemas}
        chosen = copy.copy(self)
        chosen.tools = {name: tool for name, tool in tools.items() if name in names}
        return schemas, chosen

    @property
    def known(self) -> dict[str, Tool]:
        """The tools that run by their names: the offered ones, and their twins."""
        twins = [tool.twin for tool in self.tools.values() if tool.twin]
        return {twin.name: twin for twin in twins} | self.tools

    def title(self, call: ToolCall) -> str:
        try:
            return self.known[call.name].title_of(call.arguments)
        except Exception:  # an unknown tool; or a tool's title function, for unchecked arguments
            return call.name

    def fit_arguments(self, call: ToolCall) -> Arguments:
        """The arguments of a call in the types that its tool takes.

        Raises ToolError if they are unusable.
        """
        if call.problem:
            raise ToolError(f"the arguments are {call.problem}. Send one JSON object.")
        called = self.known.get(call.name)
        if called is None:  # only a hook can give it a result
            return call.arguments
        schema = called.parameters
        # One without properties may name its parameters elsewhere
        if "properties" in schema and not called.is_open:
            schema = {"additionalProperties": False} | schema
        fitted: Arguments = fit(
            value=call.arguments,
            schema=schema,
            where=call.name,
            hints=called.slips.hints,
        )
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
        meant = []
        for tool in known.values():
            if word == tool.name.lower() or word in tool.slips.names:
                meant.append(tool)
        return meant[0] if len(meant) == 1 else None

    def _describe_unknown(self, name: str) -> str:
        """What a call of an unknown tool is answered with."""
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
        self, tools: Sequence[Generator[Event, None, ToolResult]], abort: Abort
    ) -> Generator[tuple[int, Event | ToolResult], None, None]:
        """Run the calls of a group: `tools` is what `run` returned for each; here one by one.

        Yields (index of the call, event) for each event, and (index, result) once for each call.
        """
        for index, tool in enumerate(tools):
            with Returning(tool) as events:
                for event in events:
                    yield index, event
            yield index, events.value

    def run(self, call: ToolCall, ctx: ToolContext) -> Generator[Event, None, ToolResult]:
        """Run one call.

        Errors in the arguments or in the tool become the result. Raises Aborted.
        """
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
        except Exception as error:
            why = f"{call.name} failed: {type(error).__name__}: {error}"
            result = as_failure(ToolError(why))
        yield from ctx.updates
        return result


def _as_tool(entry: Any) -> Any:
    """A function as a tool; a tool, or the schema of one, as it is."""
    return entry if isinstance(entry, Tool | dict) else tool(entry)


def _call(called: Tool, arguments: Arguments, ctx: ToolContext) -> Generator[Event, None, Any]:
    """Call the function; what a generator yields goes out: events as they are, the rest as
    updates.
    """
    if called.is_open:
        value = called.function(ctx, arguments)
    else:
        context = {called.context: ctx} if called.context else {}
        value = called.function(**arguments, **context)
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
    if isinstance(value, list) and value and all(_is_block(part) for part in value):
        return ToolResult(value)
    return ToolResult(as_text(value))


def _is_block(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in BLOCKS
