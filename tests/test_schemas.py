"""Parameters of tools: which hints have a schema, what a function gets of the model's JSON, what
docstrings say."""

from __future__ import annotations

import dataclasses
import enum
import re
import subprocess
import sys
import textwrap
from datetime import date, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest
from pydantic import BaseModel, Field

from coder import Tool, ToolContext, tool
from tests.workspace import Workspace


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Size(TypedDict):
    """A size.

    Attributes:
        width (int): in pixels
        height: in pixels, too
    """

    width: int
    height: NotRequired[int]


@dataclasses.dataclass
class Person:
    name: str
    born: date
    tags: list[str] = dataclasses.field(default_factory=list)
    friend: str | None = None
    shown: str = dataclasses.field(init=False, default="")

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a person has a name")


class Address(BaseModel):
    city: str
    zip: int = Field(ge=1000, description="four digits")


class Company(BaseModel):
    title: str
    address: Address
    people: list[Address] = []


class Node(BaseModel):
    inner: list[Node]


@dataclasses.dataclass
class Tree:
    inner: list[Tree]


def taking(hint: Any) -> Tool:
    """A tool with one parameter of this hint, which tells what it got."""

    def take(value: Any) -> str:
        """Take it.

        value: the value
        """
        return repr(value)

    take.__annotations__["value"] = hint
    return tool(take)


ADA = {"name": "Ada", "born": "1815-12-10"}
ADA_IS = "Person(name='Ada', born=datetime.date(1815, 12, 10), tags=[], friend=None, shown='')"
OSLO = {"city": "Oslo", "zip": 1050}
OSLO_IS = "Address(city='Oslo', zip=1050)"


@pytest.mark.parametrize(
    ("hint", "sent", "got"),
    [
        pytest.param(Color, "red", "<Color.RED: 'red'>", id="enum"),
        pytest.param(Level, 2, "<Level.HIGH: 2>", id="enum of integers"),
        pytest.param(Color | None, "blue", "<Color.BLUE: 'blue'>", id="enum or nothing"),
        pytest.param(date, "2024-02-29", "datetime.date(2024, 2, 29)", id="date"),
        pytest.param(
            datetime, "2024-02-29T10:30", "datetime.datetime(2024, 2, 29, 10, 30)", id="datetime"
        ),
        pytest.param(
            tuple[int, str],
            [1, "a"],
            "(1, 'a')",
            id="tuple",
        ),
        pytest.param(
            tuple[int, ...],
            [1, "2"],
            "(1, 2)",
            id="tuple of any length",
        ),
        pytest.param(int | str, "10", "'10'", id="union takes what fits as it is"),
        pytest.param(int | float, 10, "10", id="union of numbers"),
        pytest.param(int | bool, "7", "7", id="union converts what fits nowhere"),
        pytest.param(
            list[int | None],
            [1, None],
            "[1, None]",
            id="null in a list",
        ),
        pytest.param(date | Literal["today"], "today", "'today'", id="union of texts"),
        pytest.param(dict[str, date], {"a": "2024-02-29"}, "{'a': datetime.date(2024, 2, 29)}"),
        pytest.param(Any, {"a": [1]}, "{'a': [1]}", id="anything"),
        pytest.param(Annotated[int, "a number"], "3", "3", id="annotated"),
        pytest.param(Size, {"width": "3"}, "{'width': 3}", id="TypedDict"),
        pytest.param(Person, ADA, ADA_IS, id="dataclass"),
        pytest.param(Person, ADA | {"friend": None}, ADA_IS, id="dataclass with a null"),
        pytest.param(list[Person], [ADA], f"[{ADA_IS}]", id="dataclasses"),
        pytest.param(Address, OSLO, OSLO_IS, id="pydantic"),
        pytest.param(Address, '{"city": "Oslo", "zip": 1050}', OSLO_IS, id="pydantic, as text"),
        pytest.param(
            Company,
            {"title": "ACME", "address": OSLO},
            f"Company(title='ACME', address={OSLO_IS}, people=[])",
            id="pydantic in pydantic",
        ),
        pytest.param(Address | Person, ADA, ADA_IS, id="one of two classes"),
    ],
)
def test_a_function_gets_what_its_hints_promise(
    tmp_path: Path, hint: Any, sent: Any, got: str
) -> None:
    assert Workspace(tmp_path, taking(hint))("take", value=sent) == got


@pytest.mark.parametrize(
    ("hint", "sent", "said"),
    [
        (Color, "green", "has to be one of red, blue"),
        (date, "tomorrow", "take: value: Invalid isoformat string: 'tomorrow'"),
        (tuple[int, str], [1], "take: value has to have 2 items, not 1"),
        (tuple[int, str], ["a", "b"], "value[0] has to be of type integer"),
        (int | bool, "x", 'of type integer, not "x"; or take: value has to be of type boolean'),
        (Size, {}, "needs width. Its parameters: width, height"),
        (Size, {"width": 1, "depth": 2}, "has no parameter depth"),
        (Person, ADA | {"born": "1815"}, "take: value.born: Invalid isoformat"),
        (Person, ADA | {"name": ""}, "take: value: a person has a name"),
        (Address, {"city": "Oslo", "zip": 1}, "take: value: zip: Input should be greater than"),
    ],
)
def test_a_value_that_does_not_fit_its_hint_is_told_before_anything_runs(
    tmp_path: Path, hint: Any, sent: Any, said: str
) -> None:
    assert said in Workspace(tmp_path, taking(hint)).fails("take", value=sent)


ZIP = {"type": "integer", "minimum": 1000, "description": "four digits"}
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "zip": ZIP},
    "required": ["city", "zip"],
}
COMPANY = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "address": PLACE,
        "people": {"type": "array", "items": PLACE, "default": []},
    },
    "required": ["title", "address"],
}


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (Color, {"type": "string", "enum": ["red", "blue"]}),
        (date, {"type": "string", "format": "date"}),
        (
            int | str,
            {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        ),
        (
            dict[str, int],
            {"type": "object", "additionalProperties": {"type": "integer"}},
        ),
        (
            Size,
            {
                "type": "object",
                "properties": {
                    "width": {"type": "integer", "description": "in pixels"},
                    "height": {"type": "integer", "description": "in pixels, too"},
                },
                "required": ["width"],
                "additionalProperties": False,
            },
        ),
        (Company, COMPANY),
    ],
)
def test_the_schema_of_a_hint(hint: Any, schema: dict[str, Any]) -> None:
    made = taking(hint).parameters["properties"]["value"]
    assert made.pop("description") == "the value"
    assert "$ref" not in str(made)
    assert made == schema


def test_annotated_describes_a_parameter_that_the_docstring_does_not() -> None:
    @tool
    def move(
        x: Annotated[int, "to the right"],
        y: Annotated[int, Field(description="upwards")],
        z: Annotated[int, "never shown"],
    ) -> None:
        """Move.

        z: out of the page
        """

    properties = move.parameters["properties"]
    texts = [each["description"] for each in properties.values()]
    assert texts == ["to the right", "upwards", "out of the page"]


OWN = """
    x: the first
        of both
    y: the second
"""
GOOGLE = """
    Args:
        x: the first
            of both
        y (int, optional): the second

    Returns:
        what it is
"""
NUMPY = """
    Parameters
    ----------
    x : int
        the first
        of both
    y : int, optional
        the second

    Returns
    -------
    what it is
"""
SPHINX = """
    :param int x: the first
        of both
    :type y: int
    :param y: the second
    :return: what it is
"""


@pytest.mark.parametrize(
    "form", [OWN, GOOGLE, NUMPY, SPHINX], ids=["own", "google", "numpy", "sphinx"]
)
def test_a_docstring_describes_parameters_in_four_forms(form: str) -> None:
    def work(x: int, y: int = 2) -> None: ...

    work.__doc__ = f"Do it.\n{form}"
    made = tool(work)
    texts = [each["description"] for each in made.parameters["properties"].values()]
    assert texts == ["the first of both", "the second"]
    assert re.fullmatch(r"Do it\.( (Returns:?|:return:) what it is)?", made.description)


@pytest.mark.parametrize(
    ("hint", "said"),
    [
        (set[int], "the hint set[int], which makes no schema"),
        (dict[int, str], "the hint dict[int, str], which makes no schema"),
        (Path, "the hint Path, which makes no schema"),
        (list[bytes], "the hint bytes, which makes no schema"),
        (Tree, "Tree contains itself"),
        (Node, "Node contains itself"),
    ],
)
def test_what_cannot_be_a_schema_is_refused_with_the_way_out(hint: Any, said: str) -> None:
    with pytest.raises(TypeError) as caught:
        taking(hint)
    assert said in str(caught.value)
    assert "tool(schema={...})" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_class_that_is_not_found_is_refused_with_the_way_out() -> None:
    def late(value: Missing) -> None:  # type: ignore[name-defined]  # noqa: F821
        """Take it.

        value: it
        """

    with pytest.raises(TypeError, match=r"'Missing' is not defined.*tool\(schema="):
        tool(late)


def test_a_schema_can_be_given_and_the_function_gets_the_json(tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"where": {"type": "string"}},
        "required": ["where"],
    }

    @tool(schema=schema)
    def go(where: Path) -> str:
        """Go there."""
        return repr(where)

    assert go.parameters == schema
    assert go.description == "Go there."
    assert Workspace(tmp_path, go)("go", where="here") == "'here'"


def test_plain_tools_load_neither_schemas_nor_pydantic() -> None:
    code = """
        import sys
        from coder import Agent, ScriptedModel, read, tool
        def count(words: list[str], limit: int | None = None) -> str:
            '''Count.

            words: them
            limit: at most so many
            '''
            return "1"
        Agent(ScriptedModel([]), tools=[count, read])
        assert not {"pydantic", "coder.schemas"} & set(sys.modules), sys.modules.keys()
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        check=True,
        timeout=60,
    )


def test_a_schema_is_the_way_out_for_a_hint_that_is_not_found() -> None:
    class Inside:
        pass

    @tool(schema={"type": "object", "properties": {"a": {"type": "integer"}}})
    def take(ctx: ToolContext, a: Inside) -> str:
        """Take it."""
        return f"{a!r} in {ctx.cwd.name}"

    assert take.description == "Take it."
    assert take.context == "ctx"
    assert take.parameters["properties"] == {"a": {"type": "integer"}}
