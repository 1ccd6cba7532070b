"""A question in the form of opencode's API, with the fields of both of its versions."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def permission_of(event: Json, call: Json, time: int) -> Json:
    """A permission, or a call that repeats itself. `call`: the place of the call."""
    kind = event.get("permission", "doom_loop")
    pattern = event.get("pattern") or event["name"]
    remember = event.get("remember", "")
    metadata = {
        "diff": event.get("detail", ""),
        "why": event.get("why", ""),
    }
    first_version = {
        "type": kind,
        "pattern": remember or pattern,
        "title": pattern,
        "time": {"created": time},
    }
    second_version = {
        "permission": kind,
        "patterns": [pattern],
        "always": [remember] if remember else [],
        "tool": call,
    }
    both = {"id": event["id"], "metadata": metadata}
    return both | call | first_version | second_version


def question_of(event: Json, call: Json) -> Json:
    """A question of the model's, which the second version alone knows."""
    options = []
    for option in event["options"]:
        options.append({"label": option, "description": ""})
    question = {
        "question": event["question"],
        "header": "",
        "options": options,
        "custom": True,  # another answer than an option is possible
    }
    return {
        "id": event["id"],
        "sessionID": call["sessionID"],
        "questions": [question],
        "tool": call,
    }
