"""Answers in a given form: the request, the check, one more try, what the caller gets; tools that
end a run."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypedDict

import pytest
from pydantic import BaseModel, Field

from coder import (
    Agent,
    ChatModel,
    CoderError,
    Completion,
    Final,
    Hooks,
    ModelError,
    ParallelTools,
    Reply,
    Request,
    ScriptedModel,
    ScriptedServer,
    Session,
    ToolCall,
    ToolResult,
    Usage,
    tool,
)
from coder.devtools.scripted import Body
from tests.harness import FAST, add, assert_all_valid, contents, roles, serve


class Person(BaseModel):
    name: str
    age: int = Field(ge=0)


@dataclasses.dataclass
class City:
    name: str
    country: Literal["NO", "SE"]
    people: int | None = None


class Point(TypedDict):
    x: int
    y: int


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
}
NO_TITLES = {"CODER_TITLES": "off"}
ADA = '{"name": "Ada", "age": 36}'


def form_of(body: Body) -> dict[str, Any]:
    form = body["response_format"]
    assert form["type"] == "json_schema"
    described: dict[str, Any] = form["json_schema"]
    return described


@pytest.mark.parametrize(
    ("form", "answer", "output", "name", "is_strict"),
    [
        pytest.param(
            Person,
            ADA,
            Person(name="Ada", age=36),
            "Person",
            True,
            id="pydantic",
        ),
        pytest.param(
            City,
            '{"name": "Oslo", "country": "NO"}',
            City("Oslo", "NO"),
            "City",
            False,
            id="dataclass",
        ),
        pytest.param(
            Point,
            '{"x": 1, "y": 2}',
            {"x": 1, "y": 2},
            "Point",
            True,
            id="TypedDict",
        ),
        pytest.param(
            SCHEMA,
            '{"ok": true}',
            {"ok": True},
            "answer",
            True,
            id="schema",
        ),
    ],
)
def test_an_answer_has_the_form_that_was_asked_for(
    form: Any, answer: str, output: Any, name: str, is_strict: bool
) -> None:
    with serve(Reply(answer)) as server:
        agent = Agent(ChatModel("m", base_url=server.url))
        result = agent.run("Who?", output=form)
        agent.run("And in words?")
    assert result.output == output
    assert result.text == answer
    asked, then = server.requests
    sent = form_of(asked)
    assert sent["name"] == name
    assert sent["strict"] == is_strict
    assert sent["schema"]["additionalProperties"] is False
    assert "response_format" not in then, "it holds for one run"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(f"```json\n{ADA}\n```", id="fenced"),
        pytest.param(f"Here it is: {ADA}. Bye.", id="with words around it"),
        pytest.param("{'name': 'Ada', 'age': 36,}", id="almost JSON"),
        pytest.param('{"name": "Ada", "age": "36"}', id="a number as text"),
    ],
)
def test_what_is_certainly_meant_is_taken(text: str) -> None:
    result = Agent(ScriptedModel([Reply(text)])).run(
        "Who?",
        output=Person,
    )
    assert result.output == Person(name="Ada", age=36)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Ada, 36", "there is no JSON object in it"),
        ('{"name": "Ada", "age": }', "it is not valid JSON"),
        ('{"name": "Ada"}', "Person needs age"),
        ('{"name": "Ada", "age": -1}', "age: Input should be greater than or equal to 0"),
        ("", "there is no JSON object in it"),
    ],
)
def test_an_answer_that_does_not_fit_is_asked_for_once_more_with_what_is_wrong(
    text: str, problem: str
) -> None:
    replies = [Reply(text), Reply(text)] if not text else [Reply(text)]  # an empty one is repeated
    with serve(*replies, Reply(ADA)) as server:
        result = Agent(ChatModel("m", base_url=server.url), retry=FAST).run(
            "Who?",
            output=Person,
        )
    assert result.output == Person(name="Ada", age=36)
    words = server.requests[-1]["messages"][-1]["content"]
    assert words.startswith("This does not fit: ")
    assert problem in words
    assert '"required": ["name", "age"]' in words, "a server may have ignored the form"
    assert_all_valid(server)


def test_an_answer_that_never_fits_raises_where_it_is_used() -> None:
    model = ScriptedModel([Reply("Ada"), Reply("Ada, I said")])
    result = Agent(model).run("Who?", output=Person)
    assert result.stop_reason == "stop"
    assert result.text == "Ada, I said"
    assert result.steps == 2
    with pytest.raises(CoderError, match="does not fit: there is no JSON"):
        assert result.output


def test_a_run_that_failed_raises_its_error_where_the_output_is_used() -> None:
    model = ScriptedModel([Reply("no", status=401)])
    result = Agent(model).run("Who?", output=Person)
    with pytest.raises(ModelError, match="no"):
        assert result.output
    assert Agent(ScriptedModel([Reply("hi")])).run("Say hi").output is None


def test_tools_run_before_the_answer() -> None:
    ask = Reply(calls=[("add", {"a": 1, "b": 2})])
    model = ScriptedModel([ask, Reply('{"x": 3, "y": 0}')])
    result = Agent(model, tools=[add]).run("Where?", output=Point)
    assert result.output["x"] == 3
    assert result.steps == 2


@pytest.mark.parametrize(
    "message",
    [
        "This response_format type is unavailable now",
        "Function calling with a response mime type: 'application/json' is unsupported",
        "Bad request",
    ],
)
def test_a_server_that_rejects_the_form_gets_it_in_the_prompt(message: str) -> None:
    def refuse(body: Body) -> Reply:
        if "response_format" in body:
            return Reply(message, status=400)
        return Reply(ADA)

    with ScriptedServer(refuse) as server:
        model = ChatModel("m", base_url=server.url)
        for _ in range(2):
            agent = Agent(model, system="Be brief.")
            assert agent.run("Who?", output=Person).output == Person(name="Ada", age=36)
        agent.run("And now?")
    tried, told, at_once, plain = server.requests
    assert "response_format" in tried
    for body in (told, at_once):
        assert "response_format" not in body
        system = body["messages"][0]["content"]
        assert system.startswith("Be brief.\n\n")
        assert '"required":["name","age"]' in system
    assert plain["messages"][0]["content"] == "Be brief."


def test_a_rejection_that_has_another_cause_stays_one() -> None:
    with serve(Reply("the image is too large", status=400)) as server:
        result = Agent(ChatModel("m", base_url=server.url)).run(
            "Who?",
            output=Person,
        )
    assert result.stop_reason == "error"
    assert result.error
    assert "image" in result.error.message
    assert [("response_format" in body) for body in server.requests] == [True, False]


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (int, "not <class 'int'>"),
        (list[Person], "not list"),
        ({"type": "array"}, "not {'type'"),
    ],
)
def test_what_is_no_form_is_refused_before_anything_is_sent(form: Any, said: str) -> None:
    agent = Agent(ScriptedModel([]))
    with pytest.raises(TypeError, match=said):
        agent.run("Who?", output=form)
    assert agent.messages == []


def test_a_model_of_your_own_is_asked_for_the_form_and_checked() -> None:
    class Mine:
        name = "mine"
        context_window = 1000
        asked: Request

        def stream(self, request: Request, abort: Any) -> Any:
            yield from ()
            self.asked = request
            message = {"role": "assistant", "content": ADA}
            return Completion(
                ADA,
                [],
                "stop",
                message,
                Usage(1, 1),
                finish_reason="stop",
            )

    model = Mine()
    assert Agent(model).run("Who?", output=Person).output.name == "Ada"
    assert model.asked.options["response_format"]["json_schema"]["name"] == "Person"


# ---- a tool that ends the run --------------------------------------------------------------------


@tool
def book(name: str) -> Final:
    """Book a table.

    name: for whom
    """
    return Final(Person(name=name, age=1))


class Shout(Hooks):
    def after_tool_call(self, call: ToolCall, result: ToolResult) -> ToolResult:
        return ToolResult(str(result.content).upper())


@pytest.mark.parametrize("kind", [list, ParallelTools])
def test_a_tool_ends_the_run_with_its_value(kind: Callable[..., Any]) -> None:
    calls = [
        ("book", {"name": "Ada"}),
        ("add", {"a": 1, "b": 2}),
    ]
    with serve(Reply("One moment.", calls=calls), Reply("Gladly.")) as server:
        agent = Agent(
            ChatModel("m", base_url=server.url),
            tools=kind([book, add]),
            hooks=Shout(),
        )
        result = agent.run("A table for Ada.")
        assert result.output == Person(name="Ada", age=1)
        assert result.stop_reason == "stop"
        assert result.steps == 1
        assert result.text == '{"NAME": "ADA", "AGE": 1}', "as the hooks have left it"
        assert contents(agent.messages, "tool") == [
            result.text,
            "Not run: the run ended before this call.",
        ]
        agent.run("Thanks.")
        assert_all_valid(server)


def test_the_value_of_a_tool_is_the_output_also_if_a_form_was_asked_for() -> None:
    model = ScriptedModel([Reply(calls=[("book", {"name": "Ada"})])])
    assert (
        Agent(model, tools=[book])
        .run(
            "Book.",
            output=Person,
        )
        .output.name
        == "Ada"
    )


# ---- sessions ------------------------------------------------------------------------------------


def test_a_session_gives_it_too_with_asyncio_and_without(tmp_path: Path) -> None:
    model = ScriptedModel([Reply(ADA), Reply('{"x": 1, "y": 2}'), Reply("Hello.")])
    with Session.open(
        tmp_path,
        model=model,
        data=tmp_path / "data",
        settings=NO_TITLES,
    ) as session:
        assert session.run("Who?", output=Person).output.age == 36
        assert asyncio.run(session.arun("Where?", output=Point)).output["y"] == 2
        assert asyncio.run(session.arun("Hello?")).text == "Hello."
        assert roles(session.messages) == ["user", "assistant"] * 3


def test_a_task_that_is_cancelled_aborts_its_run(tmp_path: Path) -> None:
    async def cancel(session: Session) -> None:
        task = asyncio.create_task(session.arun("Go on."))
        while not model.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not session.agent.state.is_streaming

    model = ScriptedModel([Reply("word " * 5000, pace=0.01)])
    with Session.open(
        tmp_path,
        model=model,
        data=tmp_path / "data",
        settings=NO_TITLES,
    ) as session:
        asyncio.run(cancel(session))


@pytest.mark.parametrize("form", ["abc", 5, list[int], int | None, {"type": "array"}], ids=repr)
def test_what_is_no_form_is_refused_in_one_line(form: Any) -> None:
    agent = Agent(ScriptedModel([Reply("{}")]))
    with pytest.raises(TypeError) as caught:
        agent.run("go", output=form)
    assert "\n" not in str(caught.value)
