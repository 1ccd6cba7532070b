"""An answer in a given form: a class, or a JSON schema.

    agent.run("Who wrote it?", output=Person).output    # a Person

The schema goes out with each request, as `response_format`; for a server that rejects this it goes
into the prompt (providers/request.py). What comes is checked here, since a server may ignore it. An
answer that does not fit is asked for once more, with what is wrong.
"""

from __future__ import annotations

import json
from typing import Any

from coder.arguments import Schema
from coder.events import Events
from coder.history import user
from coder.hooks import Hooks
from coder.providers.call_arguments import parse_arguments
from coder.providers.request import IN_THIS_FORM
from coder.schemas import TypeAdapter, adapter_of
from coder.types import Completion, Message, Request, RunResult, ToolError, V

NOT_AN_OBJECT = "an output is a pydantic model, a dataclass, a TypedDict or a schema of an object"


class StructuredAnswer(Hooks):
    """Asks for the form in one run, and reads the answer. Raises TypeError for what is no form."""

    def __init__(self, form: type[Any] | Schema) -> None:
        self.name = getattr(form, "__name__", "answer")
        if isinstance(form, dict):
            self.adapter = TypeAdapter(form)
        else:
            self.adapter = adapter_of(form, "output")
        if self.adapter.schema.get("type") != "object":
            raise TypeError(f"{NOT_AN_OBJECT}, not {form!r:.80}")
        self.has_asked_again = False
        self._text = ""  # of the newest answer

    def before_llm_call(self, request: Request) -> None:
        schema = closed(self.adapter.schema)
        form = {"name": self.name, "schema": schema, "strict": is_strict(schema)}
        request.options["response_format"] = {"type": "json_schema", "json_schema": form}

    def after_llm_call(self, completion: Completion) -> None:
        self._text = completion.text

    def get_follow_up_messages(self) -> list[Message]:
        """After an answer that does not fit: what is wrong, once."""
        if self.has_asked_again:
            return []
        try:
            self._read()
        except ToolError as error:
            self.has_asked_again = True
            schema = json.dumps(self.adapter.schema, ensure_ascii=False)
            question = user(f"This does not fit: {error}. {IN_THIS_FORM}{schema}")
            question["meta"]["asks_again"] = True
            return [question]
        return []

    def watch(self, run: Events[RunResult]) -> Events[RunResult[V]]:
        """The same run; its result gets the output, unless a tool has ended it with one."""
        result = yield from run
        if result.value is None and result.stop_reason == "stop":
            try:
                result.value = self._read()
            except ToolError as error:
                result.misfit = f"the answer does not fit: {error}"
        return result

    def _read(self) -> Any:
        """The value of the newest answer. Raises ToolError."""
        text = self._text
        first = text.find("{")
        last = text.rfind("}")
        if first < 0 or last < first:
            raise ToolError("there is no JSON object in it")
        value, problem = parse_arguments([text[first : last + 1]])
        if problem:
            raise ToolError(f"it is {problem}")
        return self.adapter.take(value, self.name)


def closed(schema: Any) -> Any:
    """The schema with objects that have no other members than those it names."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: closed(value) for name, value in schema.items()}
    if made.get("type") == "object" and "properties" in made:
        made.setdefault("additionalProperties", False)
    return made


def is_strict(schema: Any) -> bool:
    """Do all objects in it require the members that they name, and allow no others?

    Only then can servers hold a model to it (`strict`).
    """
    if isinstance(schema, list):
        return all(is_strict(each) for each in schema)
    if not isinstance(schema, dict):
        return True
    if schema.get("type") == "object":
        names = schema.get("properties", {}).keys()
        if names != set(schema.get("required", ())) or schema.get("additionalProperties", True):
            return False
    return all(is_strict(value) for value in schema.values())
