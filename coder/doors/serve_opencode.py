"""What is shown of a session in the form of opencode's API, so that its clients are ours.

A View follows the events of a session, and answers each with events in that form: messages whose
parts (texts, thoughts, tool calls) grow. It is made anew for each client, of what the session
shows; the id of a message is its place in the list.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from coder.doors.serve_questions import permission_of, question_of
from coder.doors.serve_sessions import Live
from coder.history import calls_of, text_of
from coder.questions import ASKING
from coder.types import Message

Json = dict[str, Any]
Changes = list[Json]  # events in opencode's form

PROVIDER = "coder"
SHARE = 50  # a text, which is sent as a whole each time, is sent once it has grown by 1/SHARE


def view_of(live: Live, last: int | None = None) -> View:
    """What is shown of a session, until the event of this number."""
    view = View(live)
    for entry in live.entries:
        if last is None or entry.number <= last:
            view.follow(entry.event, entry.time)
    return view


class View:
    """`messages`, the id of the `newest_prompt`, and the open `permissions` and `questions` by
    their ids."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.session_id = live.info.id
        self.messages: list[Json] = []
        self.newest_prompt = ""
        self.permissions: dict[str, Json] = {}
        self.questions: dict[str, Json] = {}
        self._calls: dict[str, Json] = {}  # the parts of tool calls
        self._time = 0  # of the present event
        self._unsent = ""  # the end of the text that grows
        self.show_again()

    def show_again(self) -> Changes:
        """Show the messages of the session in place of all that was shown."""
        self.start = self.live.start
        changes = []
        for each in self.messages:
            message_id = each["info"]["id"]
            changes.append(self._event("message.removed", messageID=message_id))
        self.messages.clear()
        self.newest_prompt = ""
        self._forget_questions()
        self._calls.clear()
        for message in self.live.base:
            event = {"type": "message_end", "message": message}
            changes += self.follow(event, 0)
        return changes

    def follow(self, event: Json, time: int) -> Changes:
        """What an event changes; to be sent before the next one changes it further."""
        self._time = time
        while event["type"] == "nested":
            event = event["event"]
            if event["type"] not in ASKING:
                return []  # what a sub-agent does is seen at its call
        handler = HANDLERS.get(event["type"])
        if handler is None:
            return []
        return handler(self, event)

    def _event(self, kind: str, /, **properties: Any) -> Json:
        """An event in opencode's form."""
        place = {"sessionID": self.session_id}
        return {"type": kind, "properties": place | properties}

    def _updated(self, part: Json, **more: Any) -> Json:
        return self._event("message.part.updated", part=part, **more)

    def _forget_questions(self) -> None:
        self.permissions.clear()
        self.questions.clear()

    # -- messages

    def _newest(self) -> Json:
        return self.messages[-1]

    def _is_answering(self) -> bool:
        if not self.messages:
            return False
        info = self._newest()["info"]
        return info["role"] == "assistant" and "completed" not in info["time"]

    def _begin(self, role: str, **more: Any) -> Json:
        """Begin a message."""
        info = {
            "id": f"msg_{len(self.messages):08d}",
            "sessionID": self.session_id,
            "role": role,
            "time": {"created": self._time},
        }
        self.messages.append({"info": info | more, "parts": []})
        return self._changed()

    def _changed(self) -> Json:
        """The newest message has changed."""
        return self._event("message.updated", info=self._newest()["info"])

    def _start_message(self, event: Json) -> Changes:
        message = event["message"]
        if message["role"] != "assistant":
            return []
        if self._is_answering():  # an attempt that failed: its text is void
            return self._remove_parts()
        return [self._begin_answer(message)]

    def _remove_parts(self) -> Changes:
        message = self._newest()
        removed = message["parts"]
        message["parts"] = []
        message_id = message["info"]["id"]
        changes = []
        for part in removed:
            part_id = part["id"]
            change = self._event("message.part.removed", messageID=message_id, partID=part_id)
            changes.append(change)
        return changes

    def _begin_answer(self, message: Message) -> Json:
        info = self.live.info
        return self._begin(
            "assistant",
            parentID=self.newest_prompt,
            modelID=message.get("meta", {}).get("model") or info.model,
            providerID=PROVIDER,
            mode=info.agent,
            path={"cwd": info.directory, "root": info.directory},
            tokens=_tokens({}),
            cost=0,
        )

    def _end_message(self, event: Json) -> Changes:
        message = event["message"]
        meta = message.get("meta", {})
        self._time = meta.get("timestamp") or self._time
        if message["role"] == "user":
            return self._add_prompt(message)
        if message["role"] == "assistant":
            return self._end_answer(message, meta)
        if message["role"] == "tool":
            return self._end_call(message["tool_call_id"], message, meta.get("is_error"))
        return []

    def _add_prompt(self, message: Message) -> Changes:
        info = self.live.info
        model = {"providerID": PROVIDER, "modelID": info.model}
        begun = self._begin("user", agent=info.agent, model=model)
        self.newest_prompt = self._newest()["info"]["id"]
        return [begun, self._set_text(message)]

    def _end_answer(self, message: Message, meta: Json) -> Changes:
        changes = []
        if not self._is_answering():
            changes.append(self._begin_answer(message))
        info = self._newest()["info"]
        info["time"]["completed"] = self._time
        info["tokens"] = _tokens(meta.get("usage") or {})
        if meta.get("aborted"):
            info["error"] = _error("MessageAbortedError", "aborted")
        if text_of(message):
            changes.append(self._set_text(message))
        for call in calls_of(message):
            changes.append(self._add_call(call))
        changes.append(self._changed())
        return changes

    def _end_step(self, event: Json) -> Changes:
        if not event["message"]:
            return []
        usage = event["usage"]
        info = self._newest()["info"]
        info["tokens"] = _tokens(usage)
        info["cost"] = usage["cost"] or 0
        info["finish"] = event["finish_reason"]
        return [self._changed()]

    # -- texts

    def _add_part(self, kind: str, **more: Any) -> Json:
        message = self._newest()
        message_id = message["info"]["id"]
        place = len(message["parts"])
        part = {
            "id": f"{message_id}_{place}",
            "sessionID": self.session_id,
            "messageID": message_id,
            "type": kind,
        }
        part |= more
        message["parts"].append(part)
        return part

    def _text_part(self, kind: str) -> Json:
        """The text or the thoughts of the newest message."""
        for part in self._newest()["parts"]:
            if part["type"] == kind:
                found: Json = part
                return found
        return self._add_part(
            kind,
            text="",
            time={"start": self._time},
        )

    def _set_text(self, message: Message) -> Json:
        part = self._text_part("text")
        part["text"] = text_of(message)
        self._unsent = ""
        return self._updated(part)

    def _grow(self, event: Json) -> Changes:
        if not self._is_answering():
            return []
        kind = event["type"].removesuffix("_delta")
        part = self._text_part(kind)
        part["text"] += event["text"]
        self._unsent += event["text"]
        if len(self._unsent) * SHARE < len(part["text"]):
            return []
        delta = self._unsent
        self._unsent = ""
        return [self._updated(part, delta=delta)]

    # -- tools

    def _add_call(self, call: Json) -> Json:
        function = call["function"]
        arguments: Json = {}
        with suppress(ValueError):  # they are as the model has written them
            arguments = json.loads(function["arguments"])
        state = {
            "status": "pending",
            "input": arguments,
            "raw": function["arguments"],
        }
        part = self._add_part(
            "tool",
            callID=call["id"],
            tool=function["name"],
            state=state,
        )
        self._calls[call["id"]] = part
        return self._updated(part)

    def _start_call(self, event: Json) -> Changes:
        part = self._calls.get(event["id"])
        if part is None:
            return []
        part["state"] = {
            "status": "running",
            "input": event["arguments"],
            "title": event["title"],
            "time": {"start": self._time},
        }
        return [self._updated(part)]

    def _end_tool(self, event: Json) -> Changes:
        return self._end_call(event["id"], event["result"], event["is_error"])

    def _end_call(self, call_id: str, result: Json, is_error: bool | None) -> Changes:
        """`result` has the content, and what the tool has for programs."""
        part = self._calls.pop(call_id, None)
        if part is None:
            return []
        before = part["state"]
        times = before.get("time") or {"start": self._time}
        times["end"] = self._time
        state = {
            "input": before["input"],
            "metadata": result.get("details") or {},
            "time": times,
        }
        text = text_of(result)
        if is_error:
            state["status"] = "error"
            state["error"] = text
        else:
            state["status"] = "completed"
            state["output"] = text
            state["title"] = before.get("title", part["tool"])
        part["state"] = state
        return [self._updated(part)]

    # -- questions

    def _ask_permission(self, event: Json) -> Changes:
        asked = permission_of(event, self._call_of(event), self._time)
        self.permissions[event["id"]] = asked
        return [
            self._event("permission.updated", **asked),  # of the first version
            self._event("permission.asked", **asked),
        ]

    def _ask_question(self, event: Json) -> Changes:
        asked = question_of(event, self._call_of(event))
        self.questions[event["id"]] = asked
        return [self._event("question.asked", **asked)]

    def _call_of(self, event: Json) -> Json:
        """The place of the call that a question belongs to."""
        return {
            "sessionID": self.session_id,
            "messageID": self._newest()["info"]["id"],
            "callID": event["call_id"],
        }

    def _close_question(self, event: Json) -> Changes:
        question_id = event["id"]
        answer = event["answer"]
        if self.questions.pop(question_id, None):
            answers = [[answer]]
            return [self._event("question.replied", requestID=question_id, answers=answers)]
        self.permissions.pop(question_id, None)
        word = "reject" if answer == "no" else answer
        closed = {
            "requestID": question_id,
            "reply": word,
            # of the first version
            "permissionID": question_id,
            "response": word,
        }
        return [self._event("permission.replied", **closed)]

    # -- the state of the run

    def _start_run(self, event: Json) -> Changes:
        return [self._status("busy")]

    def _status(self, word: str) -> Json:
        return self._event("session.status", status={"type": word})

    def _end_run(self, event: Json) -> Changes:
        self._forget_questions()
        changes = [self._status("idle")]
        reason = event.get("stop_reason", "error")  # `failed` has none
        if reason in ("aborted", "error"):
            name = "MessageAbortedError" if reason == "aborted" else "UnknownError"
            error = _error(name, event["text"])
            changes.append(self._event("session.error", error=error))
            if self.messages:
                self._newest()["info"]["error"] = error
                changes.append(self._changed())
        changes.append(self._event("session.idle"))
        return changes


HANDLERS: dict[str, Callable[[View, Json], Changes]] = {
    "message_start": View._start_message,
    "message_end": View._end_message,
    "text_delta": View._grow,
    "reasoning_delta": View._grow,
    "step_end": View._end_step,
    "tool_start": View._start_call,
    "tool_end": View._end_tool,
    "permission_asked": View._ask_permission,
    "doom_loop": View._ask_permission,
    "question_asked": View._ask_question,
    "answered": View._close_question,
    "run_start": View._start_run,
    "run_end": View._end_run,
    "failed": View._end_run,
}


def _error(name: str, text: str) -> Json:
    return {"name": name, "data": {"message": text}}


def _tokens(usage: Json) -> Json:
    """Of a `usage` of ours; 0 for what is not known."""
    return {
        "input": usage.get("input", 0),
        "output": usage.get("output", 0),
        "reasoning": usage.get("reasoning", 0),
        "cache": {"read": usage.get("cached", 0), "write": 0},
    }
