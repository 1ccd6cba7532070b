"""Toolset: the tools of an agent by their names, and one call of one of them.

Tools as such are in tool_definition.py.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from coder.abort import Abort
from coder.arguments import Schema, fit
from coder.events import BaseEvent, Event, Events, Returning
from coder.history import as_text
from coder.providers.text import NO_NAME
from coder.slips import ENDINGS, HOW_TO_END, Arguments
from coder.tool_definition import Tool as Tool
from coder.tool_definition import ToolContext as ToolContext
from coder.tool_definition import tool as tool
from coder.types import Aborted, DeniedError, Final, ToolCall, ToolError, ToolResult


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
        """The tools that run by their names: the offered ones, and the twin of each, which does the
        same in another form and is known to models as well (edit and apply_patch)."""
        twins = {tool.twin.name: tool.twin for tool in self.tools.values() if tool.twin}
        return twins | self.tools

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
        # Arguments that the schema does not name are refused. But one without properties may name
        # them elsewhere, and an open tool takes them all
        if "properties" in schema and not called.is_open:
            schema = {"additionalProperties": False} | schema
        fitted: Arguments = fit(call.arguments, schema, where=call.name, hints=called.slips.hints)
        called.values_of(fitted)  # raises for a wrong value, before anybody is asked for permission
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
        for known_tool in known.values():
            if word == known_tool.name.lower() or word in known_tool.slips.names:
                candidates.append(known_tool)
        return candidates[0] if len(candidates) == 1 else None

    def _describe_unknown(self, name: str) -> str:
        """What the model is told after a call of an unknown tool."""
        tools = f"The tools are: {', '.join(self.tools) or 'none'}"
        if name == NO_NAME:
            return f"the call had no name. {tools}"
        word = name.lower()
        if word in ENDINGS:
            return f"there is no tool {name!r}. {HOW_TO_END}"
        for offered in self.tools.values():
            if offered.slips.hints.get(word):
                return f"there is no tool {name!r}; {offered.slips.hints[word]}. {tools}"
        return f"there is no tool {name!r}. {tools}"

    def changes_nothing(self, call: ToolCall) -> bool:
        """Is this a call of a tool that changes nothing?"""
        tool = self.tools.get(call.name)
        return tool is not None and tool.changes_nothing

    def group_size(self, calls: list[ToolCall]) -> int:
        """How many of these calls, from the first one, run together: here each runs alone."""
        return 1

    def outputs_of(
        self, generators: Sequence[Events[ToolResult]], abort: Abort
    ) -> Generator[tuple[int, Event | ToolResult], None, None]:
        """Run the calls of a group, here one after the other. `run` has made their generators.

        Yields (index of the call, event) for each event, and (index, result) once for each call.
        """
        for index, generator in enumerate(generators):
            with Returning(generator) as events:
                for event in events:
                    yield index, event
            yield index, events.value

    def run(self, call: ToolCall, ctx: ToolContext) -> Events[ToolResult]:
        """Run one call; errors in its arguments or its tool become the result. Raises Aborted."""
        called = self.known.get(call.name)
        if called is None:
            text = f"Error: {self._describe_unknown(call.name)}"
            return ToolResult(text, is_error=True, can_be_new=False)
        try:
            call.arguments = self.fit_arguments(call)  # again: hooks may have changed them
            value = yield from _call(called, call.arguments, ctx)
            result = as_result(value)
        except Aborted:
            raise
        except ToolError as error:
            result = as_failure(error)
        except Exception as error:  # a bug of the tool
            text = f"Error: {call.name} failed: {type(error).__name__}: {error}"
            result = ToolResult(text, is_error=True)
        yield from ctx.take_updates()  # those after the last yield of the tool
        return result


def _as_tool(entry: Tool | Callable[..., Any]) -> Tool:
    return entry if isinstance(entry, Tool) else tool(entry)


def _call(called: Tool, arguments: Arguments, ctx: ToolContext) -> Events[Any]:
    """Call the function. A generator's events are passed on, all else that it yields as updates.

    A coroutine runs in a thread with an event loop of its own.
    """
    values = called.values_of(arguments)
    if called.context:
        values[called.context] = ctx
    if called.is_open:
        value = called.function(ctx, values)
    else:
        value = called.function(**values)
    if inspect.iscoroutine(value):
        from coder.asynchronous import run_coroutine  # late: asyncio takes 40 ms

        with Returning(run_coroutine(value, ctx.abort)) as ticks:
            for _ in ticks:
                yield from ctx.take_updates()
        return ticks.value
    if not isinstance(value, Generator):
        return value
    with Returning(value) as outputs:
        for output in outputs:
            if isinstance(output, BaseEvent):
                ctx.updates.append(output)
            elif output is not None:  # as of `yield ctx.update(text)`
                ctx.update(str(output))
            yield from ctx.take_updates()
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
