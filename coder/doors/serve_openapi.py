"""The API as an OpenAPI file: schemas are made of the classes of events, paths of the routes.

python -m coder.doors.serve_openapi > docs/openapi.json
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from starlette.routing import Route

from coder import events
from coder.doors.serve_routes import ROUTES
from coder.doors.serve_sessions import Answered, Failed, History
from coder.events import BaseEvent
from coder.schemas import adapter_of
from coder.types import ModelError

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
CHOICE: Schema = {"enum": ["once", "always", "reject"]}
TEXTS: Schema = {"type": "array", "items": TEXT}
TEXTS_OF_QUESTIONS: Schema = {"type": "array", "items": TEXTS}
# What the body of a request has, by the name of the route's function
BODIES: dict[str, Schema] = {
    "prompt": {
        "parts": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "type": {"enum": ["text", "file"]},
                    "text": TEXT,
                    "mime": TEXT,
                    "url": TEXT | {"description": "data:image/...;base64,..."},
                },
                "required": ["type"],
            },
        },
        "agent": TEXT,
        "model": {"type": "object", "properties": {"providerID": TEXT, "modelID": TEXT}},
    },
    "revert": {"messageID": TEXT},
    "reply_of_session": {"response": CHOICE},
    "reply_permission": {"reply": CHOICE, "message": TEXT},
    "reply_question": {"answers": TEXTS_OF_QUESTIONS},
}
BODIES["prompt_async"] = BODIES["prompt"]


def openapi() -> Schema:
    paths: dict[str, Schema] = {}
    for route in ROUTES:
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(route.path, {})[method.lower()] = operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "coder serve",
            "version": "1",
            "description": "docs/library.md says what the events mean.",
        },
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": schemas(),
        },
    }


# ---- paths ---------------------------------------------------------------------------------------


def operation(route: Route) -> Schema:
    """What a route takes and gives."""
    name = route.endpoint.__name__
    media: Schema = {"application/json": {}}
    if name == "follow_all":
        media = {"text/event-stream": {}}  # in opencode's form
    if name == "follow_session":
        event = {"$ref": "#/components/schemas/Event"}
        media = {"text/event-stream": {"schema": event}}
    found: Schema = {
        "operationId": name,
        "summary": (route.endpoint.__doc__ or "").strip().splitlines()[0],
        "parameters": [
            {"name": each, "in": "path", "required": True, "schema": TEXT}
            for each in re.findall(r"{(\w+)}", route.path)
        ],
        "responses": {"2XX": {"description": "done", "content": media}} | FAILURES,
    }
    if name in BODIES:
        body = {"type": "object", "properties": BODIES[name]}
        found["requestBody"] = {"content": {"application/json": {"schema": body}}}
    return found


FAILURES: Schema = {
    "4XX": {
        "description": "why not",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
}


# ---- schemas -------------------------------------------------------------------------------------


def schemas() -> Schema:
    """The schemas of all events, and of what is in them."""
    kinds: tuple[type[BaseEvent], ...] = (
        *get_args(events.Event),
        History,
        Answered,
        Failed,
    )
    found: Schema = {}
    for kind in kinds:
        schema_of(kind, found)
    text = {"type": "object", "properties": {"message": TEXT}}
    found["Problem"] = {
        "type": "object",
        "properties": {"name": TEXT, "data": text},
    }
    found["Event"] = {"oneOf": [reference(kind) for kind in kinds]}
    return found


def reference(kind: Any) -> Schema:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def schema_of(kind: Any, found: Schema) -> Schema:
    """The schema of a type; that of a class is added to those that are `found`."""
    if kind == events.Event:
        return {"$ref": "#/components/schemas/Event"}
    if isinstance(kind, types.UnionType):
        return {"anyOf": [schema_of(each, found) for each in get_args(kind)]}
    if not dataclasses.is_dataclass(kind):
        return adapter_of(kind, "an event").schema
    add_class(kind, found)
    return reference(kind)


def add_class(kind: Any, found: Schema) -> None:
    """Add the schema of a class: of the fields that its `to_dict` has."""
    if kind.__name__ in found:
        return
    found[kind.__name__] = {}  # it may hold itself
    hints = get_type_hints(kind)
    if kind is ModelError:
        names = list(ModelError("server", "").to_dict())
    else:
        names = [each.name for each in dataclasses.fields(kind) if each.repr]
    properties = {name: schema_of(hints[name], found) for name in names}
    if get_origin(hints.get("type")) is ClassVar:
        properties = {"type": {"const": kind.type}} | properties
    found[kind.__name__] = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
    }


if __name__ == "__main__":
    print(json.dumps(openapi(), indent=1))  # noqa: T201
