"""Tools: a function with type hints and a docstring, what the model sees of it, and how one call of it is run.

    @tool
    def add(a: int, b: int) -> str:
        '''Add two numbers.

        a: the first
        b: the second
        '''
        return str(a + b)

The JSON schema comes from the signature, the descriptions from the docstring (`name: text`, a line each). A parameter
annotated `ToolContext` is filled in by us and not shown to the model. A tool may be a generator: what it yields is
shown while it works, what it returns is the result.

What it leaves out: the built-in tools (the files beside this one), permissions (hooks), cutting the output (executor.py).
"""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Container, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Union, overload

from coder.abort import Abort
from coder.tools.secrets import holds_secrets
from coder.types import Aborted, DeniedError, Event, Said, ToolCall, ToolError, ToolResult, ToolUpdate, settle

if TYPE_CHECKING:
    from coder.executor import Ledger
    from coder.tools.process import Confinement

JSON_TYPES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object"}

# Asks for leave: (ctx, permission, patterns, detail) -> None, or raises DeniedError.
Authorize = Callable[["ToolContext", str, Sequence[str], str], Said[None]]
Title = str | Callable[[dict[str, Any]], str]


class Redact(Protocol):
    """Takes out what nobody is to see (features/redact.py)."""

    def text(self, text: str) -> str:
        """Of a whole text."""
        ...

    def add(self, text: str) -> str:
        """Of the next piece of what a tool puts out while it works; what may go on in the next one waits for it."""
        ...


@dataclass
class ToolContext:
    """What a tool may know and do: where it works, who asks, when to stop.

    `seen` records files as they were when they were last read or written in this session (tools/files.py). `ledger` is the
    run's, for a tool that starts another one (features/subagent.py).
    """

    cwd: Path
    abort: Abort
    session_id: str = ""
    message_id: str = ""
    call_id: str = ""
    seen: dict[Path, Any] = field(default_factory=dict)
    authorize: Authorize | None = None
    secret: Callable[[str], bool] = holds_secrets  # is a file one that a search passes over, as it is not read unasked?
    confine: Confinement | None = None  # what a hook puts the call's child processes in
    ledger: Ledger | None = None
    redact: Redact | None = None

    def update(self, text: str) -> ToolUpdate:
        """Yield it from a generator tool: output to show while the tool works."""
        return ToolUpdate(self.call_id, self.redact.add(text) if self.redact else text)

    def ask(self, permission: str, pattern: str | Sequence[str], detail: str = "") -> Generator[Event, None, None]:
        """`yield from` it before acting: returns if allowed, raises DeniedError. Without permissions all is allowed.

        `pattern` is the command, or the path or paths, that will be acted on.
        """
        detail = self.redact.text(detail) if self.redact else detail
        if self.authorize is not None:
            yield from settle(self.authorize(self, permission, [pattern] if isinstance(pattern, str) else list(pattern), detail))


# ---- from a function to a tool ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Tool:
    """A function, its name and what the model is told of it.

    `title` is what people are shown of a call: the name of an argument, or a function of the arguments. `concurrent`: its
    calls may run beside others of their kind (features/parallel.py), since they change nothing.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    function: Callable[..., Any]
    context: str = ""  # the parameter that takes the ToolContext
    title: Title = ""
    concurrent: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """The API's form."""
        return {"type": "function", "function": {"name": self.name, "description": self.description,
                                                 "parameters": self.parameters}}

    def title_of(self, arguments: dict[str, Any]) -> str:
        """A line for people: the tool's name and what it is about."""
        shown = (self.title(arguments) if callable(self.title) else str(arguments.get(self.title, ""))).strip()
        return f"{self.name} {shown}".strip()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(*, name: str = ..., title: Title = ..., concurrent: bool = ...) -> Callable[[Callable[..., Any]], Tool]: ...


def tool(function: Callable[..., Any] | None = None, /, *, name: str = "", title: Title = "",
         concurrent: bool = False) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool of a function. Raises TypeError for a hint without a JSON type or a parameter without a description."""
    if function is None:
        return lambda function: tool_of(function, name, title, concurrent)
    return tool_of(function, name, title, concurrent)


def tool_of(function: Callable[..., Any], name: str = "", title: Title = "", concurrent: bool = False) -> Tool:
    """The tool that a function describes (see `tool`)."""
    name = name or function.__name__
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"tool {name} is async: tools are plain functions or generators")
    hints = typing.get_type_hints(function)
    signature = inspect.signature(function).parameters
    described, description = _described(inspect.getdoc(function) or "", signature)
    context, properties, required = "", dict[str, Any](), list[str]()
    for parameter in signature.values():
        hint = hints.get(parameter.name)
        if hint is ToolContext:
            context = parameter.name
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(f"tool {name}: *{parameter.name} has no JSON schema; name each parameter")
        if parameter.name not in described:
            raise TypeError(f"tool {name}: describe {parameter.name!r} in the docstring, in a line `{parameter.name}: ...`")
        properties[parameter.name] = _schema(hint, f"tool {name}: {parameter.name}") | {"description": described[parameter.name]}
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return Tool(name, description, parameters, function, context, title or next(iter(properties), ""), concurrent)


def _described(doc: str, names: Container[str]) -> tuple[dict[str, str], str]:
    """({parameter: description}, the rest) of a docstring. A `Note: ...` before the parameters is no parameter."""
    described, rest = dict[str, str](), list[str]()
    for line in doc.splitlines():
        found = re.match(r"\s*(\w+): (.+)", line)
        if found and (described or found[1] in names):
            described[found[1]] = found[2].strip()
        elif described and line.strip():
            described[next(reversed(described))] += " " + line.strip()
        elif not described:
            rest.append(line.strip())
    return described, " ".join(" ".join(rest).split()).removesuffix(" Args:")


def _schema(hint: Any, where: str) -> dict[str, Any]:
    """The JSON schema of a type hint, in the words that every server knows: type, items, enum (R21, R22)."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        kinds = [kind for kind in arguments if kind is not type(None)]
        if len(kinds) == 1:
            return _schema(kinds[0], where)
    elif origin is Literal:
        return {"type": JSON_TYPES[type(arguments[0])], "enum": list(arguments)}
    elif origin is list:
        return {"type": "array", "items": _schema(arguments[0], where)}
    elif hint in JSON_TYPES or origin in JSON_TYPES:
        return {"type": JSON_TYPES[hint if hint in JSON_TYPES else origin]}
    raise TypeError(f"{where} has the hint {hint!r}: use str, int, float, bool, dict, list[...], Literal[...] or one of them | None")


# ---- checking the arguments ------------------------------------------------------------------------------

PYTHON_TYPES: dict[str, Any] = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list,
                                "object": dict}


def checked(tool: Tool, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments as the function takes them. Raises ToolError in words the model can use.

    A value in the wrong clothes is taken where it is certain: "10" for 10, a list or object encoded once more (T13).
    """
    properties = tool.parameters["properties"]
    if unknown := [name for name in arguments if name not in properties]:
        raise ToolError(f"{tool.name} has no parameter {', '.join(unknown)}. Its parameters: {', '.join(properties)}")
    missing = [name for name in tool.parameters["required"] if arguments.get(name) is None]
    if missing:
        raise ToolError(f"{tool.name} needs {', '.join(missing)}. Its parameters: {', '.join(properties)}")
    return {name: _fitting(value, properties[name], f"{tool.name}: {name}")
            for name, value in arguments.items() if value is not None}


def _fitting(value: Any, schema: dict[str, Any], where: str) -> Any:
    kind = schema["type"]
    if isinstance(value, str) and kind != "string":
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, PYTHON_TYPES[kind]) or (isinstance(value, bool) and kind in ("integer", "number")):
        raise ToolError(f"{where} has to be of type {kind}, not {json.dumps(value)[:80]}")
    if "enum" in schema and value not in schema["enum"]:
        raise ToolError(f"{where} has to be one of {', '.join(map(str, schema['enum']))}")
    if kind == "array":
        return [_fitting(item, schema["items"], where) for item in value]
    return value


# ---- a set of tools, and one call ------------------------------------------------------------------------


class Toolset:
    """The tools of a session, by name, with what they share: the folder, the session and the files seen.

    Takes Tool objects and plain functions.
    """

    def __init__(self, tools: Iterable[Tool | Callable[..., Any]] = (), *, cwd: str | Path | None = None,
                 session_id: str = "") -> None:
        made = [each if isinstance(each, Tool) else tool_of(each) for each in tools]
        self.tools = {each.name: each for each in made}
        self.cwd = Path(cwd or Path.cwd()).resolve()
        self.session_id = session_id
        self.seen: dict[Path, Any] = {}

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [each.schema for each in self.tools.values()]

    def context(self, call: ToolCall, abort: Abort) -> ToolContext:
        return ToolContext(self.cwd, abort, self.session_id, call_id=call.id, seen=self.seen)

    def title(self, call: ToolCall) -> str:
        known = self.tools.get(call.name)
        try:
            return known.title_of(call.arguments or {}) if known else call.name
        except Exception:  # a title made by a function of somebody's, from arguments that are not checked yet
            return call.name

    def groups(self, calls: list[ToolCall]) -> Iterable[list[ToolCall]]:
        """The calls of an answer, in their order, in groups of those that run together: each alone, here."""
        return ([call] for call in calls)

    def together(self, works: Sequence[Generator[Event, None, ToolResult]],
                 abort: Abort) -> Generator[tuple[int, Event | ToolResult], None, None]:
        """Run what `run` gave for the calls of one group; yields (place, event), and once for each (place, result)."""
        return in_turn(works)

    def run(self, call: ToolCall, ctx: ToolContext) -> Generator[Event, None, ToolResult]:
        """Run one call, passing on its events. Never raises for what the model or the tool did wrong; Aborted climbs."""
        try:
            if call.name not in self.tools:
                raise ToolError(f"there is no tool {call.name!r}. The tools are: {', '.join(self.tools) or 'none'}")
            if call.arguments is None:
                raise ToolError(f"the arguments are {call.problem}. Send one JSON object.")
            known = self.tools[call.name]
            given = checked(known, call.arguments) | ({known.context: ctx} if known.context else {})
            value = known.function(**given)
            if inspect.isgenerator(value):
                value = yield from _relay(value, ctx)
            return as_result(value)
        except Aborted:
            raise
        except ToolError as error:
            return as_failure(error)
        except Exception as error:
            return ToolResult(f"Error: {call.name} failed: {type(error).__name__}: {error}", is_error=True)


def in_turn(works: Sequence[Generator[Event, None, ToolResult]]) -> Generator[tuple[int, Event | ToolResult], None, None]:
    """Works one after the other: (place, what it says), and at its end (place, its result)."""
    for place, work in enumerate(works):
        try:
            while True:
                yield place, next(work)
        except StopIteration as end:
            yield place, end.value
        finally:
            work.close()


def _relay(work: Generator[Any, Any, Any], ctx: ToolContext) -> Generator[Event, None, Any]:
    """Pass on what a generator tool yields: events as they are, text as updates. Close it on every way out."""
    try:
        while True:
            try:
                said = next(work)
            except StopIteration as end:
                return end.value
            yield said if isinstance(said, Event) else ctx.update(str(said))
    finally:
        work.close()


def as_failure(error: ToolError) -> ToolResult:
    """What the model is told of a call that could not, or may not, be done."""
    return ToolResult(f"{'Denied' if isinstance(error, DeniedError) else 'Error'}: {error}", is_error=True)


BLOCKS = {"text", "image_url", "input_audio", "file"}  # the API's kinds of content


def as_result(value: Any) -> ToolResult:
    """What a tool returned, as a result: text and content blocks as they are, anything else as JSON."""
    if isinstance(value, ToolResult):
        return value
    if value is None:
        return ToolResult("")
    blocks = isinstance(value, list) and value and all(isinstance(each, dict) and each.get("type") in BLOCKS for each in value)
    if isinstance(value, str) or blocks:
        return ToolResult(value)
    return ToolResult(json.dumps(value, ensure_ascii=False, default=str))
