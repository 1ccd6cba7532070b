"""Tools as such: from a function to a schema, arguments, one call."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from coder.arguments import fit
from coder.events import Notice, ToolUpdate
from coder.toolset import ToolContext, Toolset, tool
from coder.types import Aborted, DeniedError, ToolCall, ToolError
from tests.workspace import Workspace


@tool
def everything(
    text: str,
    whole: int,
    real: float,
    flag: bool,
    table: dict,
    names: list[str],
    choice: Literal["a", "b"],
    ctx: ToolContext,
    maybe: int | None = None,
    rows: list[list[int]] | None = None,
    size: int = 7,
) -> Any:
    """Take one of each.
    Note: this line is a part of the description.

    Args:
        text: a string
            that goes on here
        whole: an integer
        real: a number
        flag: a boolean
        table: an object
        names: strings
        choice: one of two
        maybe: an integer or nothing
        rows: lists in a list
        size: has a default
    """
    return {name: value for name, value in locals().items() if name != "ctx"}


VALUES = {
    "text": "t",
    "whole": 1,
    "real": 1.5,
    "flag": True,
    "table": {"k": 1},
}
ONE_OF_EACH = VALUES | {"names": ["n"], "choice": "a"}


def test_the_schema_comes_from_the_signature_and_the_docstring() -> None:
    schema = json.loads(json.dumps(everything.schema))["function"]
    note = "Take one of each. Note: this line is a part of the description."
    assert schema["name"] == "everything"
    assert schema["description"] == note
    properties = schema["parameters"]["properties"]
    assert properties["text"] == {"type": "string", "description": "a string that goes on here"}
    assert properties["choice"].pop("description") == "one of two"
    types = [each.pop("type") for each in properties.values()]
    assert list(properties) == [*ONE_OF_EACH, "maybe", "rows", "size"]
    simple = "string integer number boolean object array string integer array integer"
    assert types == simple.split()
    assert properties["choice"] == {"enum": ["a", "b"]}
    assert properties["rows"]["items"] == {"type": "array", "items": {"type": "integer"}}
    assert schema["parameters"]["required"] == list(ONE_OF_EACH)


def test_the_context_is_hidden_from_the_model_and_filled_in(tmp_path: Path) -> None:
    @tool
    def where(context: ToolContext) -> str:
        """Say where the tool works."""
        return f"{context.cwd} {context.call_id}"

    assert Workspace(tmp_path, where)("where") == f"{tmp_path} call-1"
    assert "no parameter context" in Workspace(tmp_path, where).fails("where", context="mine")


def test_name_and_title_can_be_given_and_the_function_can_still_be_called() -> None:
    @tool(name="plus", title="b")
    def add(a: int, b: int) -> int:
        """Add.

        a: the first
        b: the second
        """
        return a + b

    assert add.name == "plus"
    assert add.title_of({"a": 1, "b": 2}) == "plus 2"
    assert add(1, 2) == 3
    tools = Toolset([add, everything])
    assert [each["function"]["name"] for each in tools.schemas] == ["plus", "everything"]
    assert tools.title(ToolCall("1", "plus", {"b": 5})) == "plus 5"
    assert tools.title(ToolCall("1", "nothing", {}, "no JSON")) == "nothing"


@pytest.mark.parametrize(
    "hint",
    [
        set[int],
        bytes,
        list,
        None,
        Literal["a", 1],
        Literal[None],
    ],
)
def test_a_function_that_says_too_little_is_refused(hint: Any) -> None:
    def said(value: Any) -> None:
        """Take a value.

        value: the value
        """

    said.__annotations__["value"] = hint or int
    if hint is None:
        said.__doc__ = "Take a value."
    with pytest.raises(
        TypeError, match="makes no schema. Use another" if hint else "describe 'value' in"
    ):
        tool(said)


@pytest.mark.parametrize(
    ("name", "sent", "taken"),
    [
        ("whole", "10", 10),
        ("whole", 10.0, 10),
        ("real", "2.5", 2.5),
        ("real", 2, 2),
        ("flag", "true", True),
        ("names", '["a", "b"]', ["a", "b"]),
        ("table", '{"a": [1]}', {"a": [1]}),
        (
            "rows",
            ["[3]", [1, "2"]],
            [[3], [1, 2]],
        ),
        ("text", "10", "10"),
        ("maybe", None, None),
        ("size", None, 7),
    ],
)
def test_a_certain_value_is_taken(tmp_path: Path, name: str, sent: Any, taken: Any) -> None:
    text = Workspace(tmp_path, everything)("everything", **ONE_OF_EACH | {name: sent})
    value = json.loads(text)[name]
    assert value == taken
    assert type(value) is type(taken)


@pytest.mark.parametrize(
    ("name", "sent", "kind"),
    [
        ("whole", True, "of type integer"),
        ("whole", 1.5, "of type integer"),
        ("whole", "ten", "of type integer"),
        ("whole", "1e999", "of type integer"),
        ("whole", "9" * 5000, "of type integer"),
        ("real", False, "of type number"),
        ("flag", "yes", "of type boolean"),
        ("text", {"a": 1}, "of type string"),
        ("names", "a", "of type array"),
        ("names[0]", [1], "of type string"),
        ("table", "[]", "of type object"),
        ("rows[0][1]", [[1, None]], "of type integer"),
        ("choice", "c", "one of a, b"),
    ],
)
def test_a_value_that_does_not_fit_is_told(tmp_path: Path, name: str, sent: Any, kind: str) -> None:
    arguments = ONE_OF_EACH | {name.partition("[")[0]: sent}
    message = Workspace(tmp_path, everything).fails("everything", **arguments)
    assert f"{name} has to be {kind}" in message
    assert len(message) < 250


INTEGER = {"type": "integer"}
STRING = {"type": "string"}
NULLS = {"type": ["string", "null"]}
PLACE = {
    "type": "object",
    "properties": {"x": INTEGER, "tags": {"type": "array", "items": STRING}},
}
PLACE |= {"required": ["x"], "additionalProperties": False}
OPEN = {
    "a": STRING,
    "b": NULLS,
    "c": {"anyOf": [STRING, {"type": "null"}]},
    "d": {},
}
PATTERNS = {"properties": OPEN, "patternProperties": {"^x": {}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "given", "expected"),
    [
        ({}, [None], [None]),
        (True, 3, 3),
        (NULLS, None, None),
        ({"enum": ["x", 1, None]}, 1, 1),
        ({"enum": ["x", 1]}, "y", "t has to be one of x, 1"),
        (
            PLACE,
            {"x": "3", "tags": "[]"},
            {"x": 3, "tags": []},
        ),
        (PLACE, {"tags": []}, "t needs x. Its parameters: x, tags"),
        (PLACE, {"x": 1, "tags": ["a", 5]}, "t: tags[1] has to be of type string, not 5"),
        (
            {"$ref": "#/$defs/p", "allOf": [{}], "minimum": 3},
            {"x": 1},
            {"x": 1},
        ),
        (PATTERNS, dict.fromkeys("abcdx"), dict.fromkeys("bcdx")),
    ],
)
def test_a_tool_may_have_any_schema(schema: Any, given: Any, expected: Any) -> None:
    """Written by hand. What is not checked goes to the function as it came; a null, where the
    schema may mean it."""
    if isinstance(expected, str):
        with pytest.raises(ToolError, match=re.escape(expected)):
            fit(given, schema, "t")
    else:
        assert fit(given, schema, "t") == expected


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("read", {"file_path": "a"}, "read has no parameter file_path. Its parameters: path, off"),
        ("write", {"path": "a"}, "write needs content. Its parameters: path, content"),
        (
            "write",
            {"path": "a", "content": None},
            "write: content has to be of type string, not null",
        ),
        ("bash", {}, "there is no tool 'bash'. The tools are: read, write, edit, ls, apply_patch"),
        ("read", None, "the arguments are cut off. Send one JSON object."),
    ],
)
def test_a_call_that_cannot_be_made_is_answered_with_the_way_to_make_it(
    tmp_path: Path, name: str, arguments: dict[str, Any] | None, said: str
) -> None:
    problem = "cut off" if arguments is None else ""
    result = Workspace(tmp_path).run(
        ToolCall(
            "1",
            name,
            arguments or {},
            problem,
        )
    )
    assert result.is_error
    assert str(result.content).startswith(f"Error: {said}")
    assert list(tmp_path.iterdir()) == []


def failing(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        """Raise."""
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ToolError("no such thing"), "Error: no such thing"),
        (DeniedError("not here"), "Denied: not here"),
        (RecursionError("deep"), "Error: fail failed: RecursionError: deep"),
    ],
)
def test_a_tool_that_raises_gives_an_error(tmp_path: Path, error: Exception, text: str) -> None:
    assert Workspace(tmp_path, failing(error)).fails("fail") == text


@pytest.mark.parametrize("error", [Aborted("aborted"), KeyboardInterrupt()])
def test_an_abort_and_ctrl_c_climb_out_of_a_tool(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        Workspace(tmp_path, failing(error))("fail")


@dataclass
class Row:
    name: str
    path: Path


class Made(BaseModel):
    name: str


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    ("value", "content"),
    [
        ("text", "text"),
        (None, ""),
        ({"a": [1, "é"]}, '{"a": [1, "é"]}'),
        ([], "[]"),
        (Path("p"), '"p"'),
        ([Row("a", Path("p"))], '[{"name": "a", "path": "p"}]'),
        (Made(name="a"), '{"name": "a"}'),
        (
            [{"type": "text", "text": "block"}],
            [{"type": "text", "text": "block"}],
        ),
        (ENDLESS, "Error: give failed: ValueError: Circular reference detected"),
    ],
)
def test_what_a_tool_returns_becomes_content(tmp_path: Path, value: Any, content: Any) -> None:
    def give() -> Any:
        """Give something."""
        return value

    result = Workspace(tmp_path, give).call("give")
    assert result.content == content
    assert result.is_error == (value is ENDLESS)


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_generator_tool_yields_is_passed_on(tmp_path: Path, fails: bool) -> None:
    def work(ctx: ToolContext) -> Generator[Any, None, str]:
        """Work in steps."""
        yield "one"
        yield ctx.update("two")
        yield Notice("three")
        if fails:
            raise ToolError("broken")
        return "done"

    ws = Workspace(tmp_path, work)
    assert ws.fails("work") == "Error: broken" if fails else ws("work") == "done"
    assert ws.events == [
        ToolUpdate("call-1", "one"),
        ToolUpdate("call-1", "two"),
        Notice("three"),
    ]
